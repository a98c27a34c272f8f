"""AdaRound: learns for each weight whether to round it up or down."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import choice, number, whole
from ..errors import fail
from ..files import Path
from ..numerics.exact import RoundMode
from ..numerics.lookup import format_of
from ..statistics.calibrators import Calibrator
from ..tensor.spec import QSpec
from ..transforms.algorithm import Chosen
from ..transforms.plan import Plan, Weight
from ..transforms.stats import OnNonfinite
from .chain import algorithm, check_options
from .columns import Stack, parted
from .grids import Grids, calibrated
from .layers import layer_by_layer
from .matrices import Matrix, Unsupported, observers_of, settled
from .report import MatrixReport
from .store import Where

Array = np.ndarray

_DAMPING = 0.01
"""Damping of the correction for the error of inputs."""

_STRETCH = 0.1
"""How far the stretched sigmoid extends beyond 0 and 1, so that it reaches both."""

_FREE = 0.2
"""The first part of the steps, without the term that pulls weights to a neighbour."""

_BETA = (20.0, 2.0)
"""The exponent of that term, at its first and at its last step."""

_MOMENTS, _EPSILON = (0.9, 0.999), 1e-8
"""Parameters of Adam."""


@algorithm("adaround", "pass options by name: adaround(steps=500).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class adaround:
    """Learns for each weight whether to round it up or down: an algorithm of `jqx.ptq`, made for
    convolutions.

    Each weight starts at its float value, between its two neighbours on the grid. A sigmoid gives
    its position between them. Adam minimizes the squared error of the product over the inputs,
    `tr((W - Q) H (W - Q)')` with `H` the sum of `x x'`. After a fifth of the steps, a growing
    regularizer pushes each weight to one neighbour. Then single choices are flipped as long as a
    flip reduces the error of its row. The loss depends on the inputs only through `H`, so the steps
    read no inputs. Sites are processed layer by layer, as by `gptq`, with the same report. A row
    whose error ends above that of rounding to nearest is rounded to nearest, and so is a matrix
    with too few inputs, as in `gptq`. Scales do not change.

    Attributes:
      steps: number of steps for each matrix.
      learning_rate: learning rate of Adam.
      pull: weight of the regularizer next to the loss, relative to the loss of rounding to nearest.
      propagation: `"qep"` corrects a weight for the quantization error of its inputs before it is
        rounded; `"none"` does not.
      strength: how much of that correction is applied, 0 to 1.
      calibrator: computes the scales; `None` takes that of each spec.
      unsupported: as in `gptq`.
      weight: weights of the rows of inputs, as in `jqx.observers.hessian`.
      offload: whether values of batches are kept on the host, or on `"disk"`, between sites.
      checkpoint: a folder for results so far, as in `gptq`.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a field is out of range; at run time, inputs are not finite.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization",
    arXiv:2004.10568, equation 20 for the loss; Adam: Kingma and Ba, arXiv:1412.6980.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w = jax.random.normal(jax.random.key(0), (64, 8))
      >>> x = jax.random.normal(jax.random.key(1), (256, 8)) @ jnp.ones((8, 64)) + 0.1
      >>> algorithm = jqx.algorithms.adaround(steps=500)
      >>> quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), algorithm, progress=False)
      >>> entry = quantize(w, [x]).details[0]
      >>> entry.after < 0.1 * entry.before
      True
    """

    steps: int = 1000
    learning_rate: float = 0.03
    pull: float = 1.0
    propagation: Literal["none", "qep"] = "qep"
    strength: float = 0.5
    calibrator: Calibrator | None = None
    unsupported: Unsupported = "error"
    weight: Callable[..., Any] | None = None
    offload: Where = False
    checkpoint: Path | None = None
    function: ClassVar[str] = "algorithms.adaround"
    lazy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(
            "algorithms.adaround",
            self,
            steps=whole(1, 10**9),
            learning_rate=number(1e-9, 10),
            pull=number(0, 1e9),
            propagation=choice("none", "qep"),
            strength=number(0, 1),
            unsupported=choice("error", "round"),
        )

    @property
    def observers(self) -> Mapping[str, Any]:
        """What is recorded for sites whose weights are chosen before all others."""
        return observers_of(self.weight, self.unsupported)

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
        return layer_by_layer(
            dataclasses.replace(self, offload=False, checkpoint=None),
            f,
            plan,
            params,
            batches,
            with_float=self.propagation != "none",
            offload=self.offload,
            checkpoint=self.checkpoint,
            progress=progress,
            on_nonfinite=on_nonfinite,
        )

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that computes scales."""
        return calibrated(spec, self.calibrator)

    def solve(self, matrices: Sequence[Matrix], grids: Grids, weight: Weight) -> list[MatrixReport]:
        """Rounds the elements of matrices of one shape, in place, and returns a report of each."""
        entries: list[MatrixReport] = []
        for part in parted(matrices):
            entries += self._solve(part, grids, weight)
        return entries

    def _solve(
        self, matrices: Sequence[Matrix], grids: Grids, weight: Weight
    ) -> list[MatrixReport]:
        start = time.perf_counter()
        stack = Stack.of(matrices, grids, self.spec_of(weight.spec), "given")
        for matrix in matrices:
            if bad := int(np.sum(~np.isfinite(matrix.hessian))):
                problem = f"the inputs of {matrix.name} are not finite."
                detail = f"{bad} sums of products of {matrix.rows} inputs"
                fix = "calibrate on other batches, without NaN and infinities."
                raise fail("algorithms.adaround", problem, given=detail, fix=fix)
        goal = np.stack(
            [
                self._goal(w, matrix, grids.limits(label))
                for w, matrix, label in zip(stack.w, matrices, stack.label, strict=True)
            ]
        )
        products = np.stack([x.hessian for x in matrices]).astype(np.float32)
        learned = np.asarray(
            _learned(
                goal.astype(np.float32),
                products,
                *grids.at(stack.label),
                spec=stack.spec,
                options=(self.steps, self.learning_rate, self.pull),
            )
        )
        reasons, nearest = [x.why_few() for x in matrices], stack.nearest()
        learned = np.where(np.array(reasons)[:, None, None] == "", learned, nearest)
        damping = [None if reason else 0.0 for reason in reasons]
        rounded, entries = settled(
            matrices, weight.path, stack.w, nearest, learned, damping, start, reasons
        )
        grids.write(stack.element_ids, rounded)
        return entries

    def _goal(self, w: Array, matrix: Matrix, limits: tuple[Array, Array]) -> Array:
        """Returns the target that the rounded matrix approximates."""
        if matrix.drift is None:
            return w
        return matrix.corrected(w, limits, self.strength, _DAMPING)


def _up(v: jax.Array) -> jax.Array:
    """Returns the position of numbers between their neighbours, 0 (lower) to 1 (upper)."""
    return jnp.clip(jax.nn.sigmoid(v) * (1 + 2 * _STRETCH) - _STRETCH, 0, 1)


@partial(jax.jit, static_argnames=("spec", "options"))
def _learned(
    w: jax.Array,
    products: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    *,
    spec: QSpec,
    options: tuple[int, float, float],
) -> jax.Array:
    """Returns matrices [matrices, rows, columns] on the grids of their elements."""
    steps, rate, pull = options
    form = format_of(spec.qtype)
    zero = jnp.float32(0) if zero_point is None else zero_point.astype(np.float32)
    exact = jnp.where(scale != 0, w / jnp.where(scale != 0, scale, 1), 0) + zero
    exact = jnp.clip(exact, form.low, form.high)
    down, up = (form.round(exact, mode) for mode in (RoundMode.DOWN, RoundMode.UP))
    gap = up - down
    part = jnp.where(gap > 0, (exact - down) / jnp.where(gap > 0, gap, 1), 0.5)
    inner = (part + _STRETCH) / (1 + 2 * _STRETCH)
    start = jnp.log(inner) - jnp.log1p(-inner)

    def values(part: jax.Array) -> jax.Array:
        return (down + gap * part - zero) * scale

    def lost(part: jax.Array) -> jax.Array:
        error = w - values(part)
        return jnp.sum(jnp.einsum("nrk,nkj->nrj", error, products) * error, -1, keepdims=True)

    rounding_loss = lost((part >= 0.5).astype(np.float32))
    unit = jnp.where(rounding_loss > 0, 1 / jnp.where(rounding_loss > 0, rounding_loss, 1), 0)

    def loss(v: jax.Array, k: jax.Array) -> jax.Array:
        done = k / steps
        along = jnp.maximum(done - _FREE, 0) / (1 - _FREE)
        beta = _BETA[0] + (_BETA[1] - _BETA[0]) * along
        h = _up(v)
        undecided = jnp.mean(1 - jnp.abs(2 * h - 1) ** beta, -1, keepdims=True)
        return jnp.sum(unit * lost(h) + jnp.where(done < _FREE, 0, pull) * undecided)

    def step(k: jax.Array, state: Any) -> Any:
        v, mean, square = state
        slope = jax.grad(loss)(v, k.astype(np.float32))
        (a, b), count = _MOMENTS, k.astype(np.float32) + 1
        mean, square = a * mean + (1 - a) * slope, b * square + (1 - b) * slope**2
        moved = (mean / (1 - a**count)) / (jnp.sqrt(square / (1 - b**count)) + _EPSILON)
        return v - rate * moved, mean, square

    none = jnp.zeros_like(start)
    v, _, _ = jax.lax.fori_loop(0, steps, step, (start, none, none))
    h = (_up(v) >= 0.5).astype(np.float32)
    nearest = (part >= 0.5).astype(np.float32)
    h = jnp.where(lost(h) <= lost(nearest), h, nearest)
    return values(_descended(h, gap * scale, w - values(h), products))


def _descended(h: jax.Array, gap: jax.Array, error: jax.Array, products: jax.Array) -> jax.Array:
    """Flips choices of neighbours, in each row the best one at a time, until no single flip would
    reduce the loss.
    """
    diagonal = jnp.diagonal(products, axis1=1, axis2=2)[:, None]

    def change(state: Any) -> Any:
        h, slope, i, _ = state
        move = gap * (1 - 2 * h)
        gain = move * (2 * slope - move * diagonal)
        column = jnp.argmax(gain, -1, keepdims=True)
        # A gain below the rounding error of the sums does not count.
        gained = jnp.take_along_axis(gain, column, -1) > 1e-6 * jnp.sum(
            gap**2 * diagonal, -1, keepdims=True
        )
        is_flipped = (jnp.arange(h.shape[-1])[None, None] == column) & gained
        moved = jnp.sum(jnp.where(is_flipped, move, 0), -1, keepdims=True)
        rows = jnp.take_along_axis(products, column, 1)
        return jnp.where(is_flipped, 1 - h, h), slope - moved * rows, i + 1, jnp.any(gained)

    def is_improving(state: Any) -> jax.Array:
        return state[3] & (state[2] < 4 * h.shape[-1])

    slope = jnp.einsum("nrk,nkj->nrj", error, products)
    return jax.lax.while_loop(is_improving, change, (h, slope, 0, jnp.bool_(True)))[0]
