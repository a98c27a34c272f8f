"""Statistics: what sites record of their operands, and how statistics of several arrays merge.

Statistics are a monoid: `merge` is associative and `empty` is its unit. So batches, steps of loops,
branches and devices can be combined in any grouping. An observer is a statistic of an operand of a
site. A calibrator (`calibrators.py`) is a statistic of the elements that share a scale, from which
it computes that scale.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import export, lax

from ..checks import as_count
from ..compat import whole_of
from ..errors import fail
from .granularity import magnitude_bits, maximum_in_steps

if TYPE_CHECKING:
    from jqx import QSpec

T = TypeVar("T")
Axes = tuple[int, ...]

RowWeight = Callable[..., Any]
"""Maps the arguments of a function, without its parameters, to the weights of its rows."""

# How statistics merge: field by field, as the names of the fields say.


def serializable(module: str) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that lets `jax.export` serialize functions that take or return a
    NamedTuple, under its name in a public module.
    """

    def decorate(cls: type[T]) -> type[T]:
        name = f"jqx.{module}.{cls.__name__}"
        return export.register_namedtuple_serialization(cls, serialized_name=name)

    return decorate


def saturating_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sum; sums of integers are counts, and saturate at the largest of their dtype."""
    total = a + b
    if jnp.issubdtype(total.dtype, jnp.floating):
        return total
    return jnp.where(total < a, jnp.full_like(total, jnp.iinfo(total.dtype).max), total)


_EXTREMES = {
    "largest": jnp.maximum,
    "history": jnp.maximum,
    "high": jnp.maximum,
    "low": jnp.minimum,
}
"""How fields merge that are no sums."""


class MergedByField:
    """A statistic whose results are NamedTuples: extremes merge to the wider, all other fields to
    their sum. Float sums round, so merging in another order may change their last bits.
    """

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both, field by field."""
        fields = zip(a._fields, a, b, strict=True)
        return type(a)(*(_EXTREMES.get(name, saturating_add)(x, y) for name, x, y in fields))


# The interface of an observer: which statistic of an operand a site records.


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
        moved = x.transpose(*self.batch, *reduced, *self.contracted)
        first, last = len(self.batch), x.ndim - len(self.contracted)
        count, size = math.prod(moved.shape[first:last]), math.prod(moved.shape[last:])
        return moved.reshape(*moved.shape[:first], count, size)

    def row_weights(self, x: jax.Array) -> jax.Array | None:
        """Returns how much each row counts, `[*batch, rows]`: as much as the element of the row
        that counts most, but 0 for a patch with a pixel that is not finite; `None` if all count 1.
        """
        if self.weights is None:
            return None
        weights = self.rows(jnp.broadcast_to(self.weights, x.shape))
        max_weights = weights.max(-1, initial=0)
        if self.patches is None:
            return max_weights
        return jnp.where(weights.min(-1, initial=0) < 0, 0, max_weights)

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
      >>> class Largest(jqx.extend.Observer):
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


class OfRows(MergedByField, Observer):
    """An observer whose statistics are zeros where nothing was observed: sums and magnitudes."""

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Returns zeros."""
        has_weight, observer = self.weight is not None, self
        if isinstance(self, Weighted):
            observer = self(weight=None)  # the cache must not keep what the function refers to
        site = dataclasses.replace(site, path="")
        kinds = _kinds_of(observer, operand.shape, operand.dtype, site, has_weight)
        return jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)


@lru_cache(maxsize=1024)  # many sites of a model have operands of one shape
def _kinds_of(
    observer: Observer, shape: tuple[int, ...], dtype: Any, site: ObservedSite, has_weight: bool
) -> Any:
    """Returns the shapes and dtypes of the statistics of an operand."""

    def observe(x: Any, sizes: Any, weights: Any) -> Any:
        return observer.observe(x, dataclasses.replace(site, sizes=sizes, weights=weights))

    sizes = None if site.experts is None else jax.ShapeDtypeStruct((site.experts,), jnp.int32)
    weights = jax.ShapeDtypeStruct((1,) * len(shape), jnp.float32) if has_weight else None
    return jax.eval_shape(observe, jax.ShapeDtypeStruct(shape, dtype), sizes, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(OfRows):
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
        check_weight(f"extend.{str(self).partition('(')[0]}", self.weight)

    def __call__(self, *, weight: Any) -> Self:
        """Returns the observer with weighted rows."""
        return dataclasses.replace(self, weight=weight)


# Rows of an operand, or of a result: how much they count, and which ones are left out.


def row_axes(site: ObservedSite) -> Axes:
    """Returns the axes along which a row of an operand, or of a result, extends."""
    return site.contracted or site.channels


def weights_of_rows(site: ObservedSite) -> jax.Array | None:
    """Returns how much each row counts, with size 1 along the axes of a row; `None` if all count
    1.
    """
    return None if site.weights is None else jnp.max(site.weights, row_axes(site), keepdims=True)


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


def _number_of_rows(site: ObservedSite, count: Any) -> jax.Array:
    """Returns a number of rows as an array, int32; for a `ragged_dot` that of each matrix."""
    if site.sizes is None:
        return jnp.asarray(count).astype(jnp.int32)
    return as_count(site.sizes, jnp.iinfo(jnp.int32).max)


# Statistics of each channel: over the rows of the operand, and by expert if rows have experts.


def _over_rows(x: jax.Array, site: ObservedSite, of: Literal["sum", "max"]) -> jax.Array:
    """Returns the weighted sum of each channel over its rows, or the largest value among rows whose
    weight is above 0 (0 if there is none); float32.
    """
    x = x.astype(jnp.float32)
    weights = weights_of_rows(site)
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


def _count_rows(x: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the number of rows, int32: one number, or `[experts, 1]` for a `ragged_dot`. If rows
    have weights, it is the sum of the weights, float32, in the shape of a statistic of one channel.
    """
    if site.weights is not None:
        shape = tuple(1 if i in site.contracted else n for i, n in enumerate(x.shape))
        return _over_rows(jnp.ones(shape, jnp.float32), site, "sum")
    count = _number_of_rows(site, math.prod(x.shape[axis] for axis in site.reduced(x.ndim)))
    return count if site.sizes is None else count[:, None]


@serializable("observers")
class AbsMaxStats(NamedTuple):
    """The largest magnitude of each channel, and the number of rows.

    Attributes:
      largest: float32, with the rank of the operand and size 1 along the axes that are neither
        contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
      rows: number of rows seen, as in `MeanStats`.
    """

    largest: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsMax(Weighted):
    """The largest magnitude of each channel of an activation that is multiplied by a weight, over
    the rows whose weight is above 0.

    A NaN makes the result of its channel NaN. The rows of a convolution are pixels, and a group has
    some of the channels. A row of a `ragged_dot` counts for the expert that it reaches.
    """

    def observe(self, x: jax.Array, site: ObservedSite) -> AbsMaxStats:
        """Returns the largest magnitudes of the rows of one operand."""
        return AbsMaxStats(_over_rows(jnp.abs(x), site, "max"), _count_rows(x, site))


absmax: AbsMax = AbsMax()


# The mean of each channel.


@serializable("observers")
class MeanStats(NamedTuple):
    """Sums of channels, and the number of rows they are taken over: the mean is `total / rows`.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      total: sum of each channel, float32, with the rank of the operand and size 1 along the axes
        that are neither contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
      rows: number of rows seen, int32, one number, or `[experts, 1]` for a `ragged_dot`. It
        saturates at the largest int32. With a `weight`, the sum of the weights of the rows,
        float32, in the shape of `total` with size 1 along the channels.
    """

    total: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Weighted):
    """Sums the channels of an activation that is multiplied by a weight: the mean is
    `total / rows`.

    Sums are in float32 whatever the dtype of the operand. A NaN makes the sum of its channel NaN.
    The rows of a convolution are pixels, and a group has some of the channels. A row of a
    `ragged_dot` counts for the expert that it reaches.
    """

    def observe(self, x: jax.Array, site: ObservedSite) -> MeanStats:
        """Returns the sum over the rows of one operand."""
        return MeanStats(_over_rows(self.of(x), site, "sum"), _count_rows(x, site))

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the values that are summed."""
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAbs(Mean):
    """Sums the magnitudes of the channels of an activation, as `mean` does their values."""

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the values that are summed."""
        return jnp.abs(x)

    def __str__(self) -> str:
        return "mean_abs"


mean: Mean = Mean()
mean_abs: MeanAbs = MeanAbs()


# The Hessian of the squared error of a product, with respect to its weight: sums of `x x^T`.


@serializable("observers")
class HessianStats(NamedTuple):
    """Sums of products of channels, and the number of rows they are taken over.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      products: sum over the rows of `x[i] * x[j]`, float32 [*batch, channels, channels].
      rows: number of rows seen, an int32 scalar, or one entry for each matrix of a `ragged_dot`. It
        saturates at the largest int32. With a `weight`, the sum of the weights of the rows,
        float32, for each matrix.
      fourth: sum over the rows of `|x|^4`, the squares of their squared lengths, float32 [*batch].
        `trace(products)^2 / fourth` is the effective number of rows: all of them if their lengths
        are equal, 1 if one is far longer than the others. It is beyond the range of float32 for
        rows longer than 4e9, or all shorter than 1e-10.
    """

    products: jax.Array
    rows: jax.Array
    fourth: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hessian(Weighted):
    """Sums `x x^T` over the rows of an activation that is multiplied by a weight.

    Channels are the contracted axes flattened into one, in the order of the contraction, with the
    last axis fastest. A stack of weights has one matrix for each weight. A convolution has one
    matrix for each group, and its rows are the patches of the image. A `ragged_dot` has one for
    each of its matrices, over the rows that reach it. Sums are in float32 whatever the dtype of the
    operand. A NaN makes the row and column of its channel NaN.
    `hessian(weight=lambda tokens: tokens != 0)` leaves padding out.

    Raises:
      NotImplementedError: if the site is a lookup, or a convolution with batch groups: its rows are
        not rows of the operand.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> HessianStats:
        """Returns sums of 0."""
        _check_rows(site)
        return super().empty(operand, site)

    def observe(self, x: jax.Array, site: ObservedSite) -> HessianStats:
        """Returns the sum over the rows of one operand."""
        _check_rows(site)
        return _of_values(_hessian, site, x)


def gram(x: jax.Array, y: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the weighted sum of `x[i] y[j]` over the rows of two values of an operand, float32
    `[*batch, channels, channels]`; for a `ragged_dot` one for each of its matrices.
    """
    return _of_values(_gram, site, x, y)


def _of_values(f: Callable[..., Any], site: ObservedSite, *values: jax.Array) -> Any:
    """Returns sums over rows, replicated on every device if value types carry shardings."""

    def of(sizes: Any, weights: Any, *values: jax.Array) -> Any:
        return f(*values, dataclasses.replace(site, sizes=sizes, weights=weights))

    return whole_of(of, site.sizes, site.weights, *values)


def _gram(x: jax.Array, y: jax.Array, site: ObservedSite) -> jax.Array:
    weights = site.row_weights(x)
    x, y = (site.rows(z).astype(jnp.float32) for z in (x, y))
    if weights is not None:
        weights = weights[..., None]
        x, y = jnp.where(weights > 0, x * weights, 0), jnp.where(weights > 0, y, 0)
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    if site.sizes is None:
        return product(x.mT, y)
    expert = site.expert_of_rows(len(x))[:, None]

    def of_expert(is_own_row: jax.Array) -> jax.Array:
        return product(
            jnp.where(expert == is_own_row, x, 0).T, jnp.where(expert == is_own_row, y, 0)
        )

    return lax.map(of_expert, jnp.arange(len(site.sizes), dtype=jnp.int32))


def _hessian(x: jax.Array, site: ObservedSite) -> HessianStats:
    """Returns the sums of `Hessian` over the rows of one operand."""
    lengths = jnp.sum(jnp.square(site.rows(x).astype(jnp.float32)), -1)
    weights = site.row_weights(x)
    if weights is None:
        count = _number_of_rows(site, lengths.shape[-1])
    else:
        count = _of_each_matrix(weights, site)
        lengths = jnp.where(weights > 0, lengths * weights, 0)
    fourth = _of_each_matrix(lengths * lengths, site)
    return HessianStats(_gram(x, x, site), count, fourth)


def _of_each_matrix(values: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the sum of one number of each row, for each matrix that multiplies rows."""
    if site.sizes is None:
        return values.sum(-1)
    return jax.ops.segment_sum(values, site.expert_of_rows(len(values)), site.experts)


def has_rows(site: ObservedSite) -> bool:
    """Whether the rows of a site are rows of its operand."""
    return site.op in ("dot_general", "ragged_dot") or site.patches is not None


def _check_rows(site: ObservedSite) -> None:
    """Raises if the rows of a site are not rows of its operand."""
    if not has_rows(site):
        problem = f"{site.op} does not multiply rows of its operand by one matrix."
        details = f"the site {site.path!r}"
        fix = "leave it out of the regular expression in observers=, or write an Observer."
        name, error = "extend.hessian", NotImplementedError
        raise fail(name, problem, given=details, fix=fix, error=error)


hessian: Hessian = Hessian()


# The positions of a weight's elements in the matrices that its sites multiply by.


@dataclasses.dataclass(frozen=True)
class Places(Observer):
    """Maps each element of the matrix that a site multiplies by to an element of its weight: int32
    `[*loops, *batch, rows, channels]`. Elements are numbered in the order of the weight, with the
    last axis fastest. Rows are the axes that the product keeps, channels are those of `hessian`. If
    several weights are joined, they are numbered consecutively, in the order of `plan.weights`.
    Weights have no entry if they are not in a product of matrices, are inside a `shard_map`, or are
    read at a computed position.

    The result depends on the function, not on values. An algorithm that works on the matrices of
    sites uses it to write to the weight through any views.
    """

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the operand is a weight."""
        return site.role == "weight"

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Not called: `calibrate` follows the views of the function."""
        raise NotImplementedError

    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Not called: `calibrate` follows the views of the function."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the first: both are the same."""
        return a


places: Places = Places()


# Flags of an operand: how many of its rows are not finite, and how many hold a value besides 0,
# for each matrix that the operand is multiplied by at once.


@dataclasses.dataclass(frozen=True)
class Flags(OfRows):
    """Counts rows, int32 [4]: those with a NaN, those with an infinity but no NaN, those with a
    value besides 0, and all. Rows of weight 0 are not counted. If the weight is a stack of
    matrices, such as experts, these are the leading axes. Rows of a `ragged_dot` count for the
    expert that they reach, but the last number is that of all rows.
    """

    def looks_at(self, site: ObservedSite) -> bool:
        return True

    def observe(self, x: jax.Array, site: ObservedSite) -> jax.Array:
        is_stack = site.has_weight and site.op == "dot_general"
        counts = _counted(x, site.weights, row_axes(site), site.batch if is_stack else ())
        if site.experts is None or site.role != "activation":
            return jnp.sum(counts, -2, dtype=jnp.int32)
        expert_counts = jax.ops.segment_sum(counts, site.expert_of_rows(len(x)), site.experts + 1)
        # A NaN in a row of no expert is not lost.
        expert_counts = expert_counts.at[-2, :2].add(expert_counts[-1, :2])
        return expert_counts[:-1].at[:, 3].set(jnp.sum(expert_counts[:, 3], dtype=jnp.int32))

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return saturating_add(a, b)


flags: Flags = Flags()


@partial(jax.jit, static_argnames=("axes", "stack"))  # traced once for all operands of one shape
def _counted(x: jax.Array, weights: jax.Array | None, axes: Axes, stack: Axes) -> jax.Array:
    """Returns the flags of each row, int32 [*stack, rows, 4]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = (x != 0).astype(jnp.float32)
    elif x.dtype not in _WITH_INFINITY:
        x = x.astype(jnp.float32)
    infinity = magnitude_bits(jnp.asarray(jnp.inf, x.dtype))
    largest = maximum_in_steps(magnitude_bits(x), axes)
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


_WITH_INFINITY = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def in_total(counts: Any) -> jax.Array:
    """Returns how many rows of some flags are not finite, int32."""
    totals = [jnp.sum(x[..., :2], dtype=jnp.int32) for x in counts]
    return jnp.sum(jnp.stack(totals)) if totals else jnp.int32(0)
