"""SmoothQuant: divides large channels of activations, and multiplies the weights accordingly."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .._checks import check_flags, require_that, shown
from ..observers import Observer, absmax
from ..observers._shared import check_weight
from ..transforms import Plan
from ..transforms._shared import Chosen, OnNonfinite
from ._channels import Visit
from ._kept import Kept, read_together
from ._labels import Array
from ._operands import most
from ._options import algorithm
from ._scaled import Scaled, range_kept

_LEAST = 1e-5
"""Magnitudes below it count as zero."""

_STATIC, _DYNAMIC = 0.85, 0.5


@algorithm("smooth_quant", "pass options by name: jqx.algorithms.smooth_quant(strength=.8).")
@dataclasses.dataclass(frozen=True)
class SmoothQuant:
    """Divides channels of activations by `a**strength / w**(1 - strength)`, and multiplies the
    weights by it. Here `a` is the largest magnitude of a channel over batches, and `w` that of its
    weights. This is an algorithm of `jqx.ptq` that changes weights, but not the function.

    The division is folded into the parameters that produce the channels, as `find_pairs` finds
    them. If channels have no pair, the division is done at the site at run time, if the plan
    quantizes the other operand of the weight. It is one product for all sites that read the value,
    and XLA fuses it with the quantization. The report, a `Pairs`, says where, and why. Use it for
    plans that quantize activations.

    Each channel then has the range that it had in the batches. With static scales, a channel that
    is larger in later inputs saturates, where without scaling it had room up to the largest of all
    channels. So let the batches vary as the inputs will.

    Experts that fewer rows reach than they have channels do not decide scales: their own channels
    are unchanged, and `report.codes` names them.

    Attributes:
      strength: 0 makes the largest magnitudes of all channels equal in the weights, 1 in the
        activations. `None` is 0.85 if the plan has static scales for activations, and 0.5
        otherwise. (Measured in SmolLM2 and in all-MiniLM-L6-v2: static scales lose least from 0.8
        to 0.9, dynamic ones from 0.5 to 0.7.)
      keep: whether scales may be applied at sites at run time. If not, channels without a pair are
        unchanged, and the function does no additional work at run time.
      weight: weights of the rows of the inputs, as in `jqx.observers.absmax`; rows of weight 0 are
        ignored.

    Raises:
      TypeError: `keep` is not a bool, or `weight` is not a function.
      ValueError: `strength` is out of range; at run time, nothing can be scaled.

    Source: Xiao et al., arXiv:2211.10438.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]
      >>> p = {"up": jnp.eye(4) * jnp.array([1.0, 1.0, 1.0, 64.0]), "down": jnp.ones((4, 2))}
      >>> smooth = jqx.algorithms.smooth_quant(strength=0.5)
      >>> quantized = jqx.ptq(f, jqx.presets.w8a8(), smooth, progress=False)(p, [jnp.ones((1, 4))])
      >>> quantized.params["down"].dequantize()[:, 0].round(1)
      Array([1., 1., 1., 8.], dtype=float32)
    """

    strength: float | None = None
    keep: bool = True
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        require_that(
            self.strength is None
            or (isinstance(self.strength, (int, float)) and 0 <= self.strength <= 1),
            error=ValueError,
            function="algorithms.smooth_quant",
            problem="`strength` is out of range.",
            given=f"strength == {shown(self.strength)}",
            expected="a number from 0 to 1",
            mend="leave it out: the default depends on the plan.",
        )
        check_flags("algorithms.smooth_quant", keep=self.keep)
        check_weight("algorithms.smooth_quant", self.weight)

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns parameters with scaled channels, and the scales that are applied at sites."""
        observer = absmax(weight=self.weight)
        given = f, plan, params, list(batches), (observer,), progress, on_nonfinite
        scaled = Scaled.of("algorithms.smooth_quant", *given, every=self.keep)
        folds = scaled.folds
        found = [
            (x, scaled.per_channel(x, scaled.observed(x, observer).largest)) for x in scaled.visits
        ]
        a = folds.largest((folds.inputs(x), largest) for x, largest in found)
        strength = _strength(scaled) if self.strength is None else self.strength
        scale = _scale(strength, a, scaled.largest_weights())
        scale[0] = 1
        sites = [(folds.inputs(x), scaled.is_few(x)) for x in scaled.visits]
        scaled.level(scale, a, sites)
        factors = 1 / scale
        kept = _kept(strength, scaled, found, observer) if self.keep else Kept(folds)
        if len(factors) == 1 and not kept.scales:
            scaled.pairs.refuse("algorithms.smooth_quant")
        params = folds.folded(params, factors, kept.of)
        return Chosen(params, scaled.pairs.keeping(kept.scales), kept.maps(), few=scaled.few.why)


smooth_quant = SmoothQuant


def _strength(scaled: Scaled) -> float:
    """Returns the strength with the least error for the kind of plan."""
    specs = [spec for visit in scaled.visits if (spec := scaled.spec_of_operand(visit)) is not None]
    return _STATIC if any(not spec.dynamic for spec in specs) else _DYNAMIC


def _kept(
    strength: float, scaled: Scaled, found: Sequence[tuple[Visit, Array]], observer: Observer
) -> Kept:
    """Returns the scales of channels without a pair, one for all sites that read a value."""
    largest = {id(visit): x for visit, x in found}
    quantized = [visit for visit, _ in found if scaled.spec_of_operand(visit) is not None]
    kept = Kept(scaled.folds)
    for visits in read_together(scaled, observer, quantized):
        a = np.maximum.reduce([most(visit, largest[id(visit)]) for visit in visits])
        w = np.maximum.reduce([most(visit, scaled.largest_weight(visit)) for visit in visits])
        scale, few = _scale(strength, a, w), scaled.is_few(visits[0])
        if few.all():
            scale = np.ones_like(scale)
        elif few.shape == scale.shape[:-1]:
            scale[~few] *= range_kept(a[~few], scale[~few]) if few.any() else 1
            scale[few] = 1
        kept.divide(visits, scale)
    return kept


def _scale(strength: float, a: Array, w: Array) -> Array:
    """Returns the divisors of channels; 1 for channels without statistics."""
    known = (a > _LEAST) & (w > _LEAST)
    a, w = np.where(known, a, 1), np.where(known, w, 1)
    return a**strength / w ** (1 - strength)
