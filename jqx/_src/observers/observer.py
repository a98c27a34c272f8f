"""The interface of an observer: which statistic of an operand a site records."""

import abc
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ..calibrators.calibrator import Calibrator
from ..calibrators.wrappers import observe_where
from ..checks import as_count, is_at_least
from ..errors import fail
from ..tensor.spec import QSpec

T = TypeVar("T")
Axes = tuple[int, ...]

RowWeight = Callable[..., Any]
"""Maps the arguments of a function, without its parameters, to the weights of its rows."""


def serializable(cls: type[T]) -> type[T]:
    """Lets `jax.export` serialize functions that take or return this NamedTuple."""
    name = f"jqx.observers.{cls.__name__}"
    return export.register_namedtuple_serialization(cls, serialized_name=name)


class Patches(NamedTuple):
    """How a convolution takes patches of an image.

    Attributes:
      kernel: sizes of the kernel along the spatial axes.
      strides: stride of the kernel along each spatial axis.
      padding: (low, high) along each spatial axis.
      lhs_dilation: dilation of the image along each spatial axis.
      rhs_dilation: dilation of the kernel along each spatial axis.
      axes: which axes of image and kernel are which.
      groups: feature groups.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    axes: lax.ConvDimensionNumbers
    groups: int

    def of_image(self, x: jax.Array) -> jax.Array:
        """Returns the patches of an image as rows, [groups, rows, channels x taps]; without the
        first axis if there is one group.
        """
        patches = lax.conv_general_dilated_patches(
            x.transpose(self.axes.lhs_spec),
            self.kernel,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            precision=lax.Precision.HIGHEST,
        )
        rows = jnp.moveaxis(patches, 1, -1)
        rows = rows.reshape(-1, self.groups, rows.shape[-1] // self.groups).transpose(1, 0, 2)
        return rows[0] if self.groups == 1 else rows

    def of_kernel(self, x: jax.Array) -> jax.Array:
        """Returns a kernel as the matrices that multiply these rows."""
        x = x.transpose(self.axes.rhs_spec)
        rows = x.reshape(self.groups, x.shape[0] // self.groups, -1)
        return rows[0] if self.groups == 1 else rows


@dataclasses.dataclass(frozen=True)
class ObservedSite:
    """What an observer knows about a contraction and about the operand that it observes.

    Axes are those of this operand, in one step of the loops around the site. An axis of a
    convolution along which the kernel slides is neither contracted nor kept.

    Attributes:
      path: key path of its weight, or its name scope, as in the plan.
      op: `dot_general`, `conv_general_dilated`, `ragged_dot` or `gather`.
      side: which operand: `lhs`, `rhs`, or `out` for the result.
      role: `activation`, `weight` or `result`.
      has_weight: whether an operand of the contraction is a weight.
      contracted: the axes that are summed over, paired in order with those of the other operand.
      kept: the axes that the result keeps, including those of `batch`.
      batch: the batch axes, in the order of the contraction; for example an axis of experts. Along
        them each array of a stack is contracted with one array of the other operand.
      spec: how the plan quantizes the operand, with absolute granularity; `None` for float.
      channels: for a result of a contraction with a weight, the axes that come from the weight;
        empty for an operand.
      patches: for a convolution, how it takes patches; otherwise `None`.
      experts: for a `ragged_dot`, the number of matrices; otherwise `None`.
      sizes: for a `ragged_dot`, the number of rows that each matrix multiplies, int32; given only
        while an operand is observed.
      weights: how much each element of the operand counts, for an observer that has a `weight`:
        float32, with the rank of the operand, and size 1 along an axis whose elements all count the
        same. `None` if all count 1, and while no operand is observed. With `on_nonfinite="ignore"`
        all observers have weights, and a row that is not finite has the weight -1, and holds 0.
    """

    path: str
    op: str
    side: Literal["lhs", "rhs", "out"]
    role: Literal["activation", "weight", "result"]
    has_weight: bool
    contracted: Axes
    kept: Axes
    batch: Axes
    spec: QSpec | None
    channels: Axes = ()
    patches: Patches | None = None
    experts: int | None = None
    sizes: jax.Array | None = dataclasses.field(default=None, compare=False)
    weights: jax.Array | None = dataclasses.field(default=None, compare=False)

    def reduced(self, rank: int) -> Axes:
        """Returns the axes over which a statistic of each channel is taken: those of an operand of
        this rank that are neither contracted nor in `batch`.
        """
        row_free = {*self.contracted, *self.batch}
        return tuple(axis for axis in range(rank) if axis not in row_free)

    def rows(self, x: jax.Array) -> jax.Array:
        """Returns the operand as rows of contracted values: `[*batch, rows, channels]`. Several
        contracted axes are flattened into one, with the last axis fastest. For a convolution the
        rows are patches, its groups are a batch, and the taps of the kernel are fastest.
        """
        if self.patches is not None:
            patches_of = self.patches.of_image if self.side == "lhs" else self.patches.of_kernel
            return patches_of(x)
        reduced = self.reduced(x.ndim)
        count, size = (
            math.prod(x.shape[axis] for axis in axes) for axes in (reduced, self.contracted)
        )
        stack = tuple(x.shape[axis] for axis in self.batch)
        return x.transpose(*self.batch, *reduced, *self.contracted).reshape(*stack, count, size)

    def row_weights(self, x: jax.Array) -> jax.Array | None:
        """Returns how much each row counts, `[*batch, rows]`: as much as the element of the row
        that counts most, but 0 for a patch with a pixel that is not finite; `None` if all count 1.
        """
        if self.weights is None:
            return None
        weights = self.rows(jnp.broadcast_to(self.weights, x.shape))
        max_weights = weights.max(-1, initial=0)
        return (
            max_weights
            if self.patches is None
            else jnp.where(weights.min(-1, initial=0) < 0, 0, max_weights)
        )

    def expert_of_rows(self, count: int) -> jax.Array:
        """Returns which matrix of a `ragged_dot` multiplies each row of the operand, int32; the
        number of matrices for a row that none multiplies.
        """
        assert self.sizes is not None
        ends = jnp.cumsum(as_count(self.sizes, count))
        return jnp.sum(lax.iota(ends.dtype, count)[:, None] >= ends[None], axis=1, dtype=jnp.int32)


class Observer(abc.ABC):
    """A frozen, hashable value that specifies which statistic of an operand a site records.

    Its statistics are a pytree of arrays and form a monoid: `merge` is associative and `empty` is
    its unit. So batches, steps of loops, branches and devices can be combined in any grouping.
    `empty`, `observe` and `merge` return the same structure, with the same shapes and dtypes, which
    do not depend on the size of a batch. All three are traced, also under `jax.vmap`.

    `str(observer)` names it in the statistics: `stats["layer0/w:dot_general:lhs@hessian"]`. By
    default it is the name of the class in lower case. An observer with parameters should show them.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> class Largest(jqx.observers.Observer):
      ...     def empty(self, operand, site):
      ...         return jnp.zeros(())
      ...
      ...     def observe(self, x, site):
      ...         return jnp.abs(x).max(initial=0)
      ...
      ...     def merge(self, a, b):
      ...         return jnp.maximum(a, b)
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2), jnp.array([[1.0, -3.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(w, x)
      >>> _, stats = jqx.calibrate(f, plan, observers={".*": Largest()})(w, x)
      >>> stats
      {':dot_general:lhs@largest': Array(3., dtype=float32)}

    Attributes:
      weight: a function of the arguments of the calibrated function, without its parameters, that
        returns how much rows count. While an operand is observed, `site.weights` holds the result.
        `None`: all rows count 1.
    """

    weight: ClassVar[RowWeight | None] = None

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the observer records the operand: by default any activation that is multiplied by
        a weight.
        """
        return site.role == "activation" and site.has_weight

    @abc.abstractmethod
    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Returns the statistics of no values, for an operand of this shape and dtype."""

    @abc.abstractmethod
    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Returns the statistics of one operand, given in float in its own dtype."""

    @abc.abstractmethod
    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""

    def __str__(self) -> str:
        return type(self).__name__.lower()


# Observers of rows that may count more or less, or not at all, such as padding.


def check_weight(function: str, weight: Any) -> None:
    """Checks that a weight is a function, or `None`."""
    if weight is not None and not callable(weight):
        problem = f"`weight` is not a function, but of type {type(weight).__name__}."
        fix = "pass for example weight=lambda tokens: tokens != 0."
        raise fail(function, problem, fix=fix, error=TypeError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Observer):
    """An observer of rows. Calling it with a `weight` returns one that weights the rows.

    `weight` is called with the arguments of the calibrated function, without its parameters: with
    the inputs of a batch. It returns booleans or non-negative numbers in the shape of the leading
    axes of at least one of these arguments, such as `[batch, tokens]`. An axis may have size 1 if
    all along it count the same. The weights apply to the rows of all arguments that begin with
    these axes.

    Rows are followed through the function, for example where axes are merged or rows are sorted by
    expert. A value made of several rows counts as much as the row that counts most. This holds for
    attention, pooling, and products with zeros and ones that select rows. It counts no more than
    the value it is joined with, such as the token of the query. A row that is made of parameters
    alone counts 1. Rows that count 0 have no influence, not even by a NaN.

    Attributes:
      weight: such a function, or `None` if all rows count 1.
    """

    weight: RowWeight | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_weight(f"observers.{str(self).partition('(')[0]}", self.weight)

    def __call__(self, *, weight: Any) -> Self:
        """Returns the observer with weighted rows."""
        return dataclasses.replace(self, weight=weight)


# Statistics of each channel of an operand: over its rows, and by expert if rows have experts.


def shape_of(operand: jax.ShapeDtypeStruct, site: ObservedSite) -> tuple[int, ...]:
    """Returns the shape of a statistic of each channel: that of the operand with size 1 along the
    axes that are neither contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
    """
    if site.experts is not None:
        return site.experts, operand.shape[1]
    reduced = site.reduced(len(operand.shape))
    return tuple(1 if axis in reduced else n for axis, n in enumerate(operand.shape))


def over_rows(x: jax.Array, site: ObservedSite, of: Literal["sum", "max"]) -> jax.Array:
    """Returns the weighted sum of each channel over its rows, or the largest value among rows whose
    weight is above 0 (0 if there is none); float32.
    """
    x = x.astype(jnp.float32)
    weights = _weights(site)
    if weights is not None:
        x = jnp.where(weights > 0, x * weights if of == "sum" else x, 0)
    if site.sizes is not None:
        segment = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max}[of]
        segments = segment(x, site.expert_of_rows(len(x)), site.experts, indices_are_sorted=True)
        return jnp.maximum(segments, 0) if of == "max" else segments
    axes = site.reduced(x.ndim)
    if of == "max":
        return jnp.max(x, axis=axes, keepdims=True, initial=0)
    return jnp.sum(x, axis=axes, keepdims=True)


def no_rows(operand: jax.ShapeDtypeStruct, site: ObservedSite, is_weighted: bool) -> jax.Array:
    """Returns the result of `count_rows` for no rows."""
    if not is_weighted and site.experts is None:
        return jnp.zeros((), jnp.int32)
    sizes = enumerate(shape_of(operand, site))
    shape = tuple(1 if axis in site.contracted else n for axis, n in sizes)
    return jnp.zeros(shape, jnp.float32 if is_weighted else jnp.int32)


def count_rows(x: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the number of rows, int32: one number, or `[experts, 1]` for a `ragged_dot`. If rows
    have weights, it is the sum of the weights, float32, in the shape of a statistic of one channel.
    """
    if site.weights is not None:
        shape = tuple(1 if i in site.contracted else n for i, n in enumerate(x.shape))
        return over_rows(jnp.ones(shape, jnp.float32), site, "sum")
    if site.sizes is not None:
        return as_count(site.sizes, jnp.iinfo(jnp.int32).max)[:, None]
    rows = math.prod(x.shape[axis] for axis in site.reduced(x.ndim))
    return jnp.asarray(rows, jnp.int32)


def added(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sum of counts; integers saturate."""
    total = a + b
    if jnp.issubdtype(total.dtype, jnp.floating):
        return total
    return jnp.where(total < a, jnp.full_like(total, jnp.iinfo(total.dtype).max), total)


def _weights(site: ObservedSite) -> jax.Array | None:
    """Returns the weights of the rows of an operand, with size 1 along its channels."""
    if site.weights is None:
        return None
    return site.weights.max(site.contracted, keepdims=True)


# Flags of an operand: how many of its rows are not finite, and how many hold a value besides 0,
# for each matrix that the operand is multiplied by at once.


@dataclasses.dataclass(frozen=True)
class Flags(Observer):
    """Counts rows, int32 [4]: those with a NaN, those with an infinity but no NaN, those with a
    value besides 0, and all. Rows of weight 0 are not counted. If the weight is a stack of
    matrices, such as experts, these are the leading axes. Rows of a `ragged_dot` count for the
    expert that they reach, but the last number is that of all rows.
    """

    def looks_at(self, site: ObservedSite) -> bool:
        return True

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> jax.Array:
        stack = [operand.shape[axis] for axis in _stack_of(site)]
        stack += [site.experts] if _has_experts(site) else []
        return jnp.zeros((*stack, 4), jnp.int32)

    def observe(self, x: jax.Array, site: ObservedSite) -> jax.Array:
        counts = _counted(x, site.weights, row_axes(site), _stack_of(site))
        if not _has_experts(site):
            return jnp.sum(counts, -2, dtype=jnp.int32)
        assert site.experts is not None
        expert_counts = jax.ops.segment_sum(counts, site.expert_of_rows(len(x)), site.experts + 1)
        expert_counts = expert_counts.at[-2, :2].add(
            expert_counts[-1, :2]
        )  # a NaN in a row of no expert is not lost
        return expert_counts[:-1].at[:, 3].set(jnp.sum(expert_counts[:, 3], dtype=jnp.int32))

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return added(a, b)


flags: Flags = Flags()


def _stack_of(site: ObservedSite) -> Axes:
    """Returns the axes of an operand, or of a result, along which the weight is a stack."""
    return site.batch if site.has_weight and site.op == "dot_general" else ()


def _has_experts(site: ObservedSite) -> bool:
    return site.experts is not None and site.role == "activation"


@partial(jax.jit, static_argnames=("axes", "stack"))  # traced once for all operands of one shape
def _counted(x: jax.Array, weights: jax.Array | None, axes: Axes, stack: Axes) -> jax.Array:
    """Returns the flags of each row, int32 [*stack, rows, 4]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = (x != 0).astype(jnp.float32)
    elif x.dtype not in _WITH_INFINITY:
        x = x.astype(jnp.float32)
    # The bits of magnitudes have the order of magnitudes, with infinity and then NaN at the end.
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    infinity = np.asarray(np.inf, x.dtype).view(integer)[()]
    bits = lax.bitcast_convert_type(x, integer) & jnp.iinfo(integer).max
    largest = jnp.max(_in_parts(bits, axes), axes, keepdims=True, initial=0)
    kinds = largest > infinity, largest == infinity, largest > 0, largest >= 0
    if weights is not None:
        some = jnp.any(weights != 0, axes, keepdims=True)
        counted = jnp.max(weights, axes, keepdims=True) > 0
        kinds = tuple(
            kind & mask for kind, mask in zip(kinds, (some, some, counted, counted), strict=True)
        )
    flag_counts = jnp.stack(kinds, -1).astype(jnp.int32)
    flag_counts = jnp.moveaxis(flag_counts, stack, range(len(stack)))
    return flag_counts.reshape(*flag_counts.shape[: len(stack)], -1, 4)


def _in_parts(bits: jax.Array, axes: Axes) -> jax.Array:
    """Returns maxima along the last axis, where it is long: XLA on CPU takes those of 64 parts in
    vectors, and those of neighbours one by one.
    """
    size = bits.shape[-1] if bits.ndim - 1 in axes else 0
    if size % 64 != 0 or not is_at_least(size, 128):
        return bits
    parts = bits.reshape(*bits.shape[:-1], size // 64, 64)
    return lax.optimization_barrier(jnp.max(parts, -2))


_WITH_INFINITY = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def row_axes(site: ObservedSite) -> Axes:
    """Returns the axes along which a row of an operand, or of a result, extends."""
    return site.contracted or site.channels


def kept_rows(site: ObservedSite) -> jax.Array:
    """Returns which rows count, with size 1 along the axes of a row."""
    assert site.weights is not None
    return jnp.max(site.weights, row_axes(site), keepdims=True) > 0


def without_nonfinite(x: jax.Array, site: ObservedSite) -> tuple[jax.Array, ObservedSite]:
    """Returns an operand with zeros in place of the rows that are not finite, and the site with the
    weight -1 for them.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x, site
    bad = jnp.any(~jnp.isfinite(x), row_axes(site), keepdims=True)
    weights = jnp.ones((1,) * x.ndim, jnp.float32) if site.weights is None else site.weights
    weights = jnp.where(bad, jnp.float32(-1), weights)
    return jnp.where(bad, jnp.zeros_like(x), x), dataclasses.replace(site, weights=weights)


def in_total(counts: Any) -> jax.Array:
    """Returns how many rows of some flags are not finite, int32."""
    totals = [jnp.sum(x[..., :2], dtype=jnp.int32) for x in counts]
    return jnp.sum(jnp.stack(totals)) if totals else jnp.int32(0)


# A calibrator as an observer: its statistics of an operand, under the operand's spec.


@dataclasses.dataclass(frozen=True)
class Calibrated(Observer):
    """Records the statistics of a calibrator, for the scales of each operand that has a spec.

    Attributes:
      calibrator: a `jqx.calibrators.Calibrator`.
    """

    calibrator: Calibrator

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the plan quantizes the operand, an activation or a result."""
        return site.spec is not None and site.role != "weight"

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Returns the calibrator's statistics of no values."""
        assert site.spec is not None
        return self.calibrator.empty(site.spec.granularity.scale_shape(operand.shape))

    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Returns the calibrator's statistics of the operand, without rows of weight 0."""
        assert site.spec is not None
        if site.weights is not None:
            return observe_where(self.calibrator, x, site.spec, kept_rows(site))
        return self.calibrator.observe(x, site.spec)

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""
        return self.calibrator.merge(a, b)

    def __str__(self) -> str:
        return str(self.calibrator)
