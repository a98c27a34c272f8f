"""AutoRound: learns the rounding and the ranges of weights by signed gradient descent."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .._checks import check_instance, check_integer, check_pattern, shown
from .._errors import fail
from ..calibrators import Calibrator
from ..observers._shared import check_weight
from ..tensor import QSpec
from ..transforms import Plan
from ..transforms._shared import Chosen, OnNonfinite
from ._grids import calibrated
from ._learn import learned
from ._offload import Where, check_offload
from ._options import algorithm


@algorithm("auto_round", "pass options by name: auto_round(steps=100).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoRound:
    """Learns the rounding of the weights of a block from the results of the block: an algorithm of
    `jqx.ptq`.

    A learned shift is added to each weight before it is rounded, and each range is multiplied by
    learned factors of at most 1. Both are learned by signed gradient descent. Blocks are processed
    one by one. The inputs of a block come from the quantized blocks before it, and its targets from
    the float function. One batch is one step. The loss is the squared error of each result of the
    block, relative to its squares, summed. The step with the least loss over batches is kept;
    rounding to nearest is one of the candidates.

    A block is the innermost body of a scan or of `jax.checkpoint`. Outside of both, each site is a
    block, with the equations after it up to the point where the fewest numbers are passed on.
    `blocks=` defines other blocks. Sites in loops that do not step over their weight, and weights
    that several blocks share, are rounded to nearest, and so is an expert that fewer rows reach
    than it has channels; the report names them. Activations stay in float.

    Attributes:
      steps: number of steps for each block.
      learning_rate: length of the first step; it decays to 0 linearly. `None` is `1 / steps`: a
        shift then moves by at most half a step of the grid.
      blocks: a pattern (`re.search`) for paths of weights, such as `r"layers_\\d+"`. Sites whose
        paths give the same match are one block. It replaces bodies as blocks.
      ranges: whether ranges are learned too. Ranges stay fixed if scales are quantized themselves,
        or are powers of two.
      calibrator: computes the initial ranges; `None` takes that of each spec.
      weight: weights of the rows of inputs, as in `jqx.observers.hessian`.
      offload: whether values of batches are kept on the host, or on `"disk"`, between blocks.
      seed: seed of the order of the batches.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a field is out of range, or `blocks` is not a regular expression; at run time,
        `blocks` matches nothing, or a block cannot be differentiated.

    Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", arXiv:2309.05516.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: jax.nn.relu(x @ w)
      >>> w = jax.random.normal(jax.random.key(0), (64, 8))
      >>> x = jax.random.normal(jax.random.key(1), (256, 8)) @ jnp.ones((8, 64)) + 0.1
      >>> algorithm = jqx.algorithms.auto_round(steps=50)
      >>> quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), algorithm, progress=False)
      >>> block = quantize(w, [x]).details[0]
      >>> block.after < 0.1 * block.before
      True
    """

    steps: int = 200
    learning_rate: float | None = None
    blocks: str | None = None
    ranges: bool = True
    calibrator: Calibrator | None = None
    weight: Callable[..., Any] | None = None
    offload: Where = False
    seed: int = 0

    def __post_init__(self) -> None:
        name, rate = "algorithms.auto_round", self.learning_rate
        check_integer(name, "steps", self.steps)
        is_rate = isinstance(rate, (int, float)) and 0 < rate <= 1
        for field, fits, expected in (
            ("steps", self.steps >= 1, "1 or more"),
            ("learning_rate", rate is None or is_rate, "a number above 0 and up to 1"),
        ):
            if not fits:
                raise fail(
                    name,
                    f"`{field}` is out of range.",
                    given=f"{field} == {shown(getattr(self, field))}",
                    expected=expected,
                    fix="leave it out for the default.",
                )
        if self.blocks is not None:
            fix = "pass a pattern such as r'layers_[0-9]+'."
            check_pattern(name, "blocks", self.blocks, fix=fix)
        if self.calibrator is not None:
            fix = "pass for example jqx.calibrators.mse."
            check_instance(name, "calibrator", self.calibrator, Calibrator, fix=fix)
        check_weight(name, self.weight)
        check_offload(name, self.offload)

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that computes the initial ranges."""
        return calibrated(spec, self.calibrator)

    def run(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns the parameters with learned codes, and a report."""
        options: Any = {"progress": progress, "on_nonfinite": on_nonfinite}
        return learned(self, f, plan, params, batches, **options)


auto_round = AutoRound
