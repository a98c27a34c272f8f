"""Learned rounding: AdaRound, matrix by matrix, and AutoRound, block by block."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_pattern, choice, flag, nothing, number, whole
from ..errors import fail
from ..files import Path
from ..gradients.estimators import straight_through
from ..numerics.exact import RoundMode
from ..numerics.lookup import E8M0, format_of
from ..numerics.qtype import Integer
from ..statistics.calibrators import Affine, Calibrator
from ..statistics.granularity import Groups
from ..tensor.spec import QSpec
from ..transforms.algorithm import AlgorithmResult, Inapplicable
from ..transforms.calibrate import look_at_batches, progress_bar
from ..transforms.plan import Plan, Site
from ..transforms.row_counts import counts_of, is_counted, value_of
from ..transforms.stats import OnNonfinite, check_mode
from ..transforms.trace import TracedOnce
from ..transforms.views import Address
from .engine import Pairs, Stream, Traced, Walk
from .gptq import Stack
from .grids import Grids, Part, apart, bodies_of, calibrated
from .interface import (
    NOT_REACHED,
    BlockReport,
    BlocksReport,
    Few,
    algorithm,
    check_options,
    name_of,
)
from .layer_by_layer import LayerByLayer
from .matrices import Matrix, Unsupported
from .stages import Replaced, Scope, Stage, Steps, labels_of
from .store import InMemory, Offload, Where, on_device

# AdaRound: learns for each weight whether to round it up or down.


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


@partial(jax.jit, static_argnames=("spec", "steps", "rate", "pull"))
def solve(
    W: jax.Array,
    H: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    *,
    spec: QSpec,
    steps: int,
    rate: float,
    pull: float,
) -> jax.Array:
    """Returns matrices on the grids of their elements, [matrices, rows, columns]. Each element is
    `(floor(W / s) + h(V)) s`, with a position `h(V)` from 0 to 1 that Adam learns.

    Args:
      W: the matrices, float32 [matrices, rows, columns].
      H: the sum of `x x'` over the inputs `x` of each, float32 [matrices, columns, columns].
      scale: the scale `s` of each element.
      zero_point: likewise, or `None`.
      spec: the format.
      steps: number of steps.
      rate: learning rate.
      pull: weight of the regularizer next to the loss.
    """
    form = format_of(spec.qtype)
    zero = jnp.float32(0) if zero_point is None else zero_point.astype(np.float32)
    exact = jnp.where(scale != 0, W / jnp.where(scale != 0, scale, 1), 0) + zero
    exact = jnp.clip(exact, form.low, form.high)
    down, up = (form.round(exact, mode) for mode in (RoundMode.DOWN, RoundMode.UP))
    gap = up - down
    part = jnp.where(gap > 0, (exact - down) / jnp.where(gap > 0, gap, 1), 0.5)
    inner = (part + _STRETCH) / (1 + 2 * _STRETCH)
    start = jnp.log(inner) - jnp.log1p(-inner)

    def values(part: jax.Array) -> jax.Array:
        return (down + gap * part - zero) * scale

    def lost(part: jax.Array) -> jax.Array:
        error = W - values(part)
        return jnp.sum(jnp.einsum("nrk,nkj->nrj", error, H) * error, -1, keepdims=True)

    rounding_loss = lost((part >= 0.5).astype(np.float32))
    unit = jnp.where(rounding_loss > 0, 1 / jnp.where(rounding_loss > 0, rounding_loss, 1), 0)

    def loss(V: jax.Array, k: jax.Array) -> jax.Array:
        done = k / steps
        along = jnp.maximum(done - _FREE, 0) / (1 - _FREE)
        beta = _BETA[0] + (_BETA[1] - _BETA[0]) * along
        h = _up(V)
        undecided = jnp.mean(1 - jnp.abs(2 * h - 1) ** beta, -1, keepdims=True)
        return jnp.sum(unit * lost(h) + jnp.where(done < _FREE, 0, pull) * undecided)

    def step(k: jax.Array, state: Any) -> Any:
        V, mean, square = state
        slope = jax.grad(loss)(V, k.astype(np.float32))
        (a, b), count = _MOMENTS, k.astype(np.float32) + 1
        mean, square = a * mean + (1 - a) * slope, b * square + (1 - b) * slope**2
        moved = (mean / (1 - a**count)) / (jnp.sqrt(square / (1 - b**count)) + _EPSILON)
        return V - rate * moved, mean, square

    none = jnp.zeros_like(start)
    V, _, _ = jax.lax.fori_loop(0, steps, step, (start, none, none))
    h = (_up(V) >= 0.5).astype(np.float32)
    nearest = (part >= 0.5).astype(np.float32)
    h = jnp.where(lost(h) <= lost(nearest), h, nearest)
    return values(_descended(h, gap * scale, W - values(h), H))


def _up(v: jax.Array) -> jax.Array:
    """Returns the position of numbers between their neighbours, 0 (lower) to 1 (upper)."""
    return jnp.clip(jax.nn.sigmoid(v) * (1 + 2 * _STRETCH) - _STRETCH, 0, 1)


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


@algorithm("adaround", "pass options by name: adaround(steps=500).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class adaround(LayerByLayer):
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
      weight: weights of the rows of inputs, as in `jqx.extend.hessian`.
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

    def _solve(
        self, matrices: Sequence[Matrix], grids: Grids, spec: QSpec
    ) -> tuple[Stack, Array, list[float | None], list[str]]:
        stack = Stack.of(matrices, grids, spec, "given")
        for matrix in matrices:
            if bad := int(np.sum(~np.isfinite(matrix.hessian))):
                problem = f"the inputs of {matrix.name} are not finite."
                detail = f"{bad} sums of products of {matrix.rows} inputs"
                fix = "calibrate on other batches, without NaN and infinities."
                raise fail("algorithms.adaround", problem, given=detail, fix=fix)
        goal = np.stack(
            [
                w
                if matrix.drift is None
                else matrix.corrected(w, grids.limits(label), self.strength, _DAMPING)
                for w, matrix, label in zip(stack.w, matrices, stack.label, strict=True)
            ]
        )
        products = np.stack([x.hessian for x in matrices]).astype(np.float32)
        learned = np.asarray(
            solve(
                goal.astype(np.float32),
                products,
                *grids.at(stack.label),
                spec=stack.spec,
                steps=self.steps,
                rate=self.learning_rate,
                pull=self.pull,
            )
        )
        reasons = [x.why_few() for x in matrices]
        return stack, learned, [None if reason else 0.0 for reason in reasons], reasons


# Parts of weights whose rounding is learned: shifts before rounding, and factors of ranges, which
# are learned by signed gradient descent.


_LEAST = 0.05
"""The smallest range, relative to the initial one."""


class Shifts(NamedTuple):
    """The learned values of a tile.

    Attributes:
      shift: what is added to each number before it is rounded, in steps of the grid.
      low: factor of the lower end of each range; `None` if both ends share one scale, or ranges are
        not learned.
      high: factor of the upper end, or of both; `None` if ranges are not learned.
    """

    shift: jax.Array
    low: jax.Array | None
    high: jax.Array | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "scale", "zero_point", "mask", "fixed"],
    meta_fields=["spec", "groups", "kind", "ranges"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class TileValues:
    """The numbers of a tile, and how they are rounded. A pytree of its arrays.

    Attributes:
      x: the float values, float32.
      scale: scale of each group, dequantized, float32.
      zero_point: likewise, or `None`.
      mask: which of the numbers are learned; `None` for all.
      fixed: which of the numbers, and of the scales, stay as they are, because few rows reached
        their matrix; `None` for none.
      spec: spec of the weight.
      groups: which of the numbers share a scale.
      kind: the dtype in which scales are stored.
      ranges: whether scales and zero points may change. That requires that no other tile shares
        them, and that scales are floats and zero points integers.
    """

    x: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    mask: jax.Array | None
    fixed: tuple[jax.Array, jax.Array] | None
    spec: QSpec
    groups: Groups
    kind: Any
    ranges: bool

    def nearest(self, ranges: bool) -> Shifts:
        """Returns the values that round to nearest; `ranges` says whether ranges may be learned."""
        high = jnp.ones_like(self.scale) if ranges and self.ranges else None
        low = None if self.zero_point is None else high
        return Shifts(jnp.zeros_like(self.x), low, high)

    def rounded(self, shifts: Shifts) -> tuple[jax.Array, Affine]:
        """Returns the rounded numbers, with the gradient of the identity for rounding, and their
        scales and zero points.
        """
        affine, groups, form = self._affine(shifts), self.groups, format_of(self.spec.qtype)
        scale = groups.split_scale(affine.scale)
        zero = jnp.zeros_like(scale)
        if affine.zero_point is not None:
            zero = groups.split_scale(affine.zero_point)

        def clipped(x: jax.Array) -> jax.Array:
            return jnp.clip(x, form.low - zero, form.high - zero)

        def on_grid(x: jax.Array, mode: RoundMode) -> jax.Array:
            return form.round(x + zero, mode) - zero

        # Numbers in units of their scales, in groups. Numbers with scale 0 are 0.
        exact = jnp.where(scale != 0, groups.split(self.x) / jnp.where(scale != 0, scale, 1), 0)
        step = jnp.ones_like(exact)
        if not isinstance(form, Integer):  # the distance of the two grid points around each number
            fixed = jax.lax.stop_gradient(clipped(exact))
            step = on_grid(fixed, RoundMode.UP) - on_grid(fixed, RoundMode.DOWN)
        moved = clipped(exact + groups.split(shifts.shift) * step)
        quantized = on_grid(moved, self.spec.rounding)
        return groups.join(straight_through(quantized, moved) * scale), affine

    def moved(self, shifts: Shifts, slope: Shifts, rate: jax.Array) -> Shifts:
        """Returns learned values after a step of a given length against the signs of a gradient;
        what is fixed stays.
        """

        def limited(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else jnp.clip(x, _LEAST, 1)

        if self.fixed is not None:
            shift, scale = self.fixed
            ends = (None if x is None else jnp.where(scale, 0, x) for x in slope[1:])
            slope = Shifts(jnp.where(shift, 0, slope.shift), *ends)
        shift, low, high = jax.tree.map(lambda x, d: x - rate * jnp.sign(d), shifts, slope)
        return Shifts(shift, limited(low), limited(high))

    def _affine(self, shifts: Shifts) -> Affine:
        """Returns scales and zero points, float32; differentiable."""
        scale, zero_point, form = self.scale, self.zero_point, format_of(self.spec.qtype)
        if shifts.high is None:
            return Affine(scale, zero_point)  # pyright: ignore
        if shifts.low is None:
            return Affine(self._stored(scale * shifts.high), None)
        assert zero_point is not None
        low, high = (
            scale * (end - zero_point) * factor
            for end, factor in ((form.low, shifts.low), (form.high, shifts.high))
        )
        scale = self._stored((high - low) / (form.high - form.low))
        offset = form.low - low / jnp.where(scale != 0, scale, 1)
        rounded_offset = jnp.clip(jnp.round(offset), form.low, form.high)
        return Affine(scale, straight_through(rounded_offset, offset))

    def _stored(self, scale: jax.Array) -> jax.Array:
        """Returns scales as they are stored, with the gradient of the identity."""
        return straight_through(scale.astype(self.kind).astype(np.float32), scale)


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """The part of a weight that a block multiplies by: all of it, or one index of its first axes.

    Attributes:
      leaf_index: the index of the weight among the operands of the function.
      index: the index of its first axes.
      numbers: the numbers of its learned elements within their group of weights.
      labels: the indices of its scales, likewise.
      grids: the grids of that group.
      values: its numbers.
    """

    leaf_index: int
    index: tuple[int, ...]
    numbers: Array
    labels: Array
    grids: Grids
    values: TileValues

    @classmethod
    def of(
        cls, leaf_index: int, grids: Grids, part: Part, numbers: Array, fixed: Array | None = None
    ) -> "Tile":
        """Returns the smallest tile that holds some elements of a weight; some are `fixed`."""
        kind = part.nearest
        shape, groups = tuple(kind.shape), kind.groups
        local = np.unique(numbers) - part.start
        ends = np.transpose(np.unravel_index(local[[0, -1]], shape))
        depth = next((i for i, (a, b) in enumerate(ends.T) if a != b), len(shape))
        index, sizes = tuple(map(int, ends[0, :depth])), groups.sizes[:depth]
        elements = np.arange(kind.size).reshape(shape)[index]
        mask = np.isin(elements, local)
        scales = np.arange(np.prod(groups.scale_shape, dtype=int)).reshape(groups.scale_shape)
        labels = scales[tuple(np.floor_divide(index, sizes))] + part.first_scale
        is_separate = all(1 in (size, count) for size, count in zip(sizes, shape, strict=False))
        scale, zero_point = grids.at(labels)
        is_whole = zero_point is None or jnp.issubdtype(zero_point.dtype, jnp.integer)
        is_real = part.scale is None and kind.scale.dtype != E8M0
        local_groups = Groups(shape[depth:], groups.sizes[depth:])
        ranges = bool(is_separate and is_whole and is_real and mask.all())
        is_fixed = np.isin(elements + part.start, [] if fixed is None else fixed)
        fixed_labels = grids.label(elements[is_fixed] + part.start)
        values = TileValues(
            jnp.asarray(part.x)[index].astype(np.float32),
            jnp.asarray(scale),
            None if zero_point is None else jnp.asarray(zero_point.astype(np.float32)),
            None if mask.all() else jnp.asarray(mask),
            (jnp.asarray(is_fixed), jnp.asarray(np.isin(labels, fixed_labels)))
            if is_fixed.any()
            else None,
            grids.spec,
            local_groups,
            kind.scale.dtype,
            ranges,
        )
        return cls(leaf_index, index, elements[mask] + part.start, labels, grids, values)

    def write(self, values: Array, affine: Affine) -> None:
        """Writes numbers on the grid with given scales to the grids of the weight."""
        if self.values.ranges:
            self.grids.put(self.labels, affine)
        mask = self.values.mask
        self.grids.write(self.numbers, values.ravel() if mask is None else values[np.asarray(mask)])


_CHECKS = 8
"""How often the loss is measured after the start."""


# The distance of the results of a block from those in float.


def distance(results: Sequence[Any], targets: Sequence[Any]) -> jax.Array:
    """Returns the squared errors of results relative to their squares, summed."""
    total = jnp.float32(0)
    for x, y in zip(results, targets, strict=True):
        if not jnp.issubdtype(value_of(y).dtype, jnp.floating):
            continue
        a, b = (value_of(z).astype(np.float32) for z in (x, y))
        count = jnp.float32(1)
        if is_counted(x):
            count = jnp.minimum(counts_of(x), counts_of(y))
            count = jnp.where(jnp.isfinite(count) & (count > 0), count, 0)
        # Equal infinities are those of masks.
        difference = jnp.where((count > 0) & (a != b), a - b, 0)
        norm = jnp.sum(count * jnp.where((count > 0) & jnp.isfinite(b), b, 0) ** 2)
        total += jnp.sum(count * difference**2) / jnp.where(norm > 0, norm, 1)
    return total


# Learns the rounding of weights block by block, from the results of each block.


_FUNCTION = "algorithms.auto_round"


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A block in one step of the scans around it.

    Attributes:
      stages: its stage and scope for each batch.
      steps: the numbers of the steps.
      tiles: the tiles of its weights.
      inputs: its inputs for each batch, as they are kept.
      targets: its results in float, likewise.
      decided: the integers that it computes from floats.
      batches: the indices of the batches.
    """

    stages: list[tuple[Stage, Scope]]
    steps: Steps
    tiles: list[Tile]
    inputs: list[list[Any]]
    targets: list[list[Any]]
    decided: list[Any]
    batches: list[int]

    @property
    def values(self) -> list[TileValues]:
        """The numbers of its tiles."""
        return [tile.values for tile in self.tiles]


class _Learning(Walk):
    """Runs blocks with weights in float and with learned ones, and learns the latter.

    Attributes:
      current: the leaves of the parameters as they are at each stage, by index.
      grids: the grids of all weights.
      entries: the entries of the report.
      bar: shows how many blocks are done, or `None`.
    """

    def __init__(
        self, options: "auto_round", traced: Traced, learned_sites: set[Address], few_rows: Few
    ):
        super().__init__(traced.plan)
        self._few_rows = few_rows
        self._kinds["block"] = self._block
        self._options, self._traced, self._learned_sites = options, traced, learned_sites
        self.current, self.grids = dict(traced.originals), traced.grids(options.spec_of)
        self.entries: list[BlockReport] = []
        self.bar: Any = None
        self._programs: dict[Any, Any] = {}
        # Weights that are not learned must be rounded before a block gets its inputs.
        for site in self.plan.sites:
            if site.address not in learned_sites:
                for path in self.plan.weights_in(site):
                    self._round(path)

    def _round(self, path: str) -> None:
        grids = self.grids[self._traced.group_of(path).path]
        part = next(x for x in grids.parts if x.path == path)
        leaf_index, element_range = self._traced.leaf_indices[path], part.elements
        leaf = self._traced.originals[leaf_index]
        values = grids.values(np.arange(element_range.start, element_range.stop)).reshape(
            leaf.shape
        )
        self.current[leaf_index] = jnp.asarray(values, leaf.dtype)

    def nearest(self) -> Iterable[tuple[str, str]]:
        """Yields the sites whose weights were rounded to nearest, with the reason."""
        reached = {name for entry in self.entries for name in entry.sites}
        for site in self.plan.sites:
            if not any(self.plan.weight_at(x.path) for x in site.operands):
                continue
            if site.address not in self._learned_sites:
                yield site.name, "whose weight other blocks or steps of a loop share"
            elif site.name not in reached:
                yield site.name, NOT_REACHED
        yield from self._few_rows.why.items()

    def _block(self, pairs: Pairs, steps: Steps) -> None:
        start, sites = time.perf_counter(), self._sites(pairs[0][0])
        block = self._prepared(pairs, steps, self._tiles(sites, steps))
        entry, shifts = self._learned(block)
        for tile, tile_shifts in zip(block.tiles, shifts, strict=True):
            values, affine = tile.values.rounded(tile_shifts)
            tile.write(np.asarray(values), affine)
            leaf, mask = self.current[tile.leaf_index], tile.values.mask
            self.current[tile.leaf_index] = Replaced(leaf, values, mask, tile.index, False).whole()
        for (stage, (quantized, exact)), target in zip(pairs, block.targets, strict=True):
            quantized.run(stage, steps)
            exact.put(stage, list(map(on_device, target)))
        names, seconds = tuple(site.name for site in sites), time.perf_counter() - start
        self.entries.append(BlockReport(names, steps, *entry, seconds))
        if self.bar is not None:
            self.bar.update()

    def _learned(self, block: _Block) -> tuple[tuple[float, float, int], list[Shifts]]:
        """Returns the loss of rounding to nearest, the least loss, after how many steps it was
        found, and what was learned then.
        """
        options, count = self._options, len(block.stages)
        rate, rng = options.learning_rate or 1 / options.steps, np.random.default_rng(options.seed)
        # So many batches that measuring the loss takes at most half as long as the steps.
        checked = rng.permutation(count)[: max(options.steps // (2 * _CHECKS), 1)].tolist()

        def mean(shifts: list[Shifts]) -> float:
            return float(np.mean([self._call("lost", block, i, shifts) for i in checked]))

        shifts = [x.nearest(options.ranges) for x in block.values]
        initial = lowest = mean(shifts)
        if not np.isfinite(initial):
            raise self._not_finite(block, initial, None)
        best_shifts, best, order, losses = shifts, 0, [], {}
        for k in range(1, options.steps + 1):
            order = order or rng.permutation(count).tolist()
            i, length = order.pop(), 1 - (k - 1) / options.steps
            shifts, losses[i] = self._call("step", block, i, shifts, rate * length)
            if k % max(options.steps // _CHECKS, 1) == 0 and (current := mean(shifts)) < lowest:
                lowest, best_shifts, best = current, shifts, k
        for i, loss in losses.items():
            if not np.isfinite(loss):
                raise self._not_finite(block, float(loss), block.batches[i])
        return (initial, lowest, best), best_shifts

    def _sites(self, stage: Stage) -> list[Site]:
        return [
            site
            for site in self.plan.sites
            if site.address in self._learned_sites
            and any(site.address[: len(address)] == address for address in stage.inside)
        ]

    def _tiles(self, sites: Sequence[Site], steps: Steps) -> list[Tile]:
        """Returns the parts of weights that some sites multiply by."""
        numbers: dict[str, list[Array]] = {}
        fixed: dict[str, list[Array]] = {}
        for site in sites:
            for operand in site.operands:
                if operand.path is not None:
                    path = self._traced.group_of(self.plan.weights_in(site)[0]).path
                    elements = self._traced.elements[operand.key][steps]
                    numbers.setdefault(path, []).append(elements.ravel())
                    key = next(x.key for x in site.operands if x.path is None)
                    is_few = self._few_rows.at(site, key, elements.shape[-1], steps)
                    is_few = np.broadcast_to(is_few, elements.shape[:-2])
                    fixed.setdefault(path, []).append(elements[is_few].ravel())
        tiles = []
        for path, arrays in numbers.items():
            grids: Grids = self.grids[path]
            needed, is_few = np.concatenate(arrays), np.concatenate(fixed[path])
            for part in grids.parts:
                mine = part.elements
                elements = needed[(needed >= mine.start) & (needed < mine.stop)]
                if elements.size:
                    tiles.append(
                        Tile.of(self._traced.leaf_indices[part.path], grids, part, elements, is_few)
                    )
        return tiles

    def _prepared(self, pairs: Pairs, steps: Steps, tiles: list[Tile]) -> _Block:
        """Runs the block in float, with the integers that it decides on the quantized inputs."""
        block = _Block(
            [], steps, tiles, [], [], [], [quantized.batch for _, (quantized, _) in pairs]
        )
        for stage, (quantized, exact) in pairs:
            read = [quantized.values[x] for x in stage.reads]
            operands = list(map(on_device, read))
            _, decisions = quantized.scope.run(stage, self.current, steps, operands, None, True)
            floats = [on_device(exact.values[x]) for x in stage.reads]
            results, _ = quantized.scope.run(
                stage, self._traced.originals, steps, floats, decisions
            )
            block.stages.append((stage, quantized.scope))
            block.inputs.append(read)
            block.targets.append(list(map(exact.stream.offload.kept, results)))
            block.decided.append(decisions)
        return block

    def _call(self, name: str, block: _Block, i: int, *arguments: Any) -> Any:
        """Calls a program on one batch."""
        stage, scope = block.stages[i]
        inputs, targets = (list(map(on_device, x[i])) for x in (block.inputs, block.targets))
        position = [tile.index for tile in block.tiles], block.steps
        program, batch = (
            self._program(name, block, stage, scope),
            (inputs, targets, block.decided[i]),
        )
        try:
            return program(block.values, self.current, position, batch, *arguments)
        except ValueError as error:
            if "differentiation" not in str(error):
                raise
            problem = f"{self._name(block)} cannot be differentiated."
            fix = "use smaller blocks, without loops of unknown length, such as blocks='.*'."
            error_type = Inapplicable
            raise fail(_FUNCTION, problem, given=str(error), fix=fix, error=error_type) from error

    def _name(self, block: _Block) -> str:
        sites = [site.name for site in self._sites(block.stages[0][0])]
        return f"the block of {name_of(sites[:1], block.steps)}"

    def _not_finite(self, block: _Block, loss: float, batch: int | None) -> Exception:
        batches = f"{len(block.stages)} batches" if batch is None else f"batch {batch}"
        problem = f"the loss of {self._name(block)} is not finite: {loss} on {batches}."
        fix = "leave such batches out, or pass on_nonfinite='ignore', which leaves out their rows."
        return fail(_FUNCTION, problem, fix=fix)

    def _program(self, name: str, block: _Block, stage: Stage, scope: Scope) -> Any:
        """Returns the program of a loss or a step, compiled once for equal blocks."""
        kinds = [(x.leaf_index, x.index == tuple(block.steps)) for x in block.tiles]
        key = name, id(stage), tuple(kinds)
        if key in self._programs:
            return self._programs[key]

        def lost(
            tile_values: Any, params: Any, position: Any, batch: Any, shifts: list[Shifts]
        ) -> jax.Array:
            indices, steps = position
            leaves = dict(params)
            tiles = zip(kinds, tile_values, indices, shifts, strict=True)
            for (leaf_index, stepped), x, index, tile_shifts in tiles:
                values, _ = x.rounded(tile_shifts)
                where = steps if stepped else index
                leaves[leaf_index] = Replaced(leaves[leaf_index], values, x.mask, where, stepped)
            inputs, targets, decided = batch
            results, _ = scope.run(stage, leaves, steps, inputs, decided)
            return distance(results, targets)

        def step(*arguments: Any) -> tuple[list[Shifts], jax.Array]:
            *values, shifts, rate = arguments
            loss, slope = jax.value_and_grad(partial(lost, *values))(shifts)
            tiles = zip(arguments[0], shifts, slope, strict=True)
            return [x.moved(*learned, rate) for x, *learned in tiles], loss

        self._programs[key] = jax.jit({"lost": lost, "step": step}[name])
        return self._programs[key]


@algorithm("auto_round", "pass options by name: auto_round(steps=100).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class auto_round:
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
      weight: weights of the rows of inputs, as in `jqx.extend.hessian`.
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
        rate = number(0, 1, above=True) | nothing()
        check_options(_FUNCTION, self, steps=whole(1), learning_rate=rate, ranges=flag())
        if self.blocks is not None:
            fix = "pass a pattern such as r'layers_[0-9]+'."
            check_pattern(_FUNCTION, "blocks", self.blocks, fix=fix)

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
    ) -> AlgorithmResult:
        """Returns the parameters with learned codes, and a report."""
        batch_list, ignores = list(batches), check_mode(_FUNCTION, on_nonfinite)
        f = TracedOnce(f)
        few_rows = Few(look_at_batches(_FUNCTION, f, plan, params, batch_list, on_nonfinite))
        traced = Traced.of(f, plan, params, batch_list, self.weight, ignores=ignores)
        plan, bodies = traced.plan, bodies_of(traced.plan, traced.calls[0].jaxpr)
        sites = [site for site in plan.sites if site.address in bodies]
        labels = labels_of(sites, bodies, self.blocks)
        is_met = any(label != address for address, label in labels.items())
        if self.blocks is not None and not is_met:
            problem = f"`blocks` matches nothing: {self.blocks!r}."
            detail = f"paths such as {[x.path for x in sites[:3]]}"
            fix = "pass a pattern that matches in paths of weights; the plan prints all of them."
            raise fail(_FUNCTION, problem, given=detail, fix=fix)
        learned_sites = apart(plan, traced.groups, traced.elements, labels) & {*labels}
        walk = _Learning(self, traced, learned_sites, few_rows)
        scopes = traced.scopes(lambda site: site.address in learned_sites, labels)
        leaves = walk.current, dict(traced.originals)
        offload = Offload(self.offload)
        streams = [Stream(x, offload) for x in leaves]
        walk.bar = progress_bar("auto_round", "block") if progress else None
        walk.go(traced.frames(scopes, streams))
        if walk.bar is not None:
            walk.bar.close()
        report = BlocksReport(tuple(walk.entries), tuple(walk.nearest()))
        codes = InMemory(walk.grids).quantized()
        weights = plan.map_weights(lambda weight, _: codes[weight.path], params)
        return AlgorithmResult(weights, report, few=few_rows.why)
