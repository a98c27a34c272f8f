"""A product as jqx sees it: two operands, which axes are contracted, which scales are in blocks. A
convolution has an image, a kernel and a window.

    y[b, m, n] = sum_g s[b, m, g] t[b, g, n] sum_{k in g} (x[b, m, k] - z[b, m, g])
                                                          (w[b, k, n] - u[b, g, n])

Rows `x` have scales `s` and zero points `z`, columns `w` have `t` and `u`. An array has the scale 1
and no zero point; `g` are the blocks of contracted elements in which no scale changes, often a
single one. Every formulation computes this, with the inner sum exact if both operands are integers.

What computes a product is chosen from shapes, formats and layouts, never from values. An operand is
an array, a QTensor, or an array that is still to be quantized (`Pending`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import is_at_least
from ..errors import fail
from ..numerics.blocks import Block as BlockFormat
from ..numerics.exact import RoundMode, common_dtype
from ..numerics.lookup import format_of
from ..numerics.minifloats import Minifloat
from ..numerics.qtype import Integer
from ..numerics.runtimes import ngraph
from ..statistics.calibrators import Affine
from ..statistics.granularity import Groups
from ..tensor.grid import fit
from ..tensor.layout import is_flipped, permuted_axis, taken
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from ..tensor.targets import kernel_of

# The roles of the axes of an operand in a contraction.


Axes = tuple[int, ...]


class OperandAxes(NamedTuple):
    """The axes of one operand.

    Attributes:
      contracted: the axes that are summed over.
      kept: the axes of the result; each of their indices may have its own scale.
      batch: those of the kept axes that are batch axes.
    """

    contracted: Axes
    kept: Axes
    batch: Axes = ()


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Normalised dimension numbers of operands of known rank.

    The axes of the result are: batch axes, free axes of the left operand, then of the right one.
    """

    lhs_rank: int
    rhs_rank: int
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    @classmethod
    def of(cls, numbers: lax.DotDimensionNumbers, lhs_rank: int, rhs_rank: int) -> "Dimensions":
        """Reads dimension numbers in the form that `lax.dot_general` takes."""
        (lc, rc), (lb, rb) = numbers
        return _normal((*lc,), (*rc,), (*lb,), (*rb,), lhs_rank, rhs_rank)

    @functools.cached_property
    def axes(self) -> tuple[OperandAxes, OperandAxes]:
        """The roles of the axes of both operands."""
        return (
            OperandAxes(self.lhs_contracting, self.lhs_kept, self.lhs_batch),
            OperandAxes(self.rhs_contracting, self.rhs_kept, self.rhs_batch),
        )

    @functools.cached_property
    def numbers(self) -> lax.DotDimensionNumbers:
        """The dimension numbers as `lax.dot_general` takes them."""
        return (
            (self.lhs_contracting, self.rhs_contracting),
            (self.lhs_batch, self.rhs_batch),
        )

    @functools.cached_property
    def lhs_kept(self) -> tuple[int, ...]:
        """Axes of the left operand that the result has: batch axes and free ones."""
        return tuple([i for i in range(self.lhs_rank) if i not in self.lhs_contracting])

    @functools.cached_property
    def rhs_kept(self) -> tuple[int, ...]:
        """Axes of the right operand that the result has: batch axes and free ones."""
        return tuple([i for i in range(self.rhs_rank) if i not in self.rhs_contracting])

    @functools.cached_property
    def lhs_free(self) -> tuple[int, ...]:
        """Axes that only the left operand has."""
        return tuple([i for i in self.lhs_kept if i not in self.lhs_batch])

    @functools.cached_property
    def rhs_free(self) -> tuple[int, ...]:
        """Axes that only the right operand has."""
        return tuple([i for i in self.rhs_kept if i not in self.rhs_batch])

    @functools.cached_property
    def swapped(self) -> "Dimensions":
        """The dimensions of the operands in the other order."""
        return Dimensions(
            self.rhs_rank,
            self.lhs_rank,
            self.rhs_contracting,
            self.lhs_contracting,
            self.rhs_batch,
            self.lhs_batch,
        )

    def renamed(self, lhs: Sequence[int], rhs: Sequence[int]) -> "Dimensions":
        """The dimensions of operands whose axis `i` was moved to `lhs[i]`, `rhs[i]`."""

        def moved(axes: tuple[int, ...], to: Sequence[int]) -> tuple[int, ...]:
            return tuple([to[axis] for axis in axes])

        return Dimensions(
            self.lhs_rank,
            self.rhs_rank,
            moved(self.lhs_contracting, lhs),
            moved(self.rhs_contracting, rhs),
            moved(self.lhs_batch, lhs),
            moved(self.rhs_batch, rhs),
        )

    def swap_output(self, y: jax.Array) -> jax.Array:
        """Reorders the result of the `swapped` contraction: left axes before right axes."""
        batch, left, right = len(self.lhs_batch), len(self.lhs_free), len(self.rhs_free)
        if not (left and right):
            return y
        rights, lefts = range(batch, batch + right), range(batch + right, batch + right + left)
        return jnp.transpose(y, (*range(batch), *lefts, *rights))

    def output_axis(self, rhs_axis: int) -> int:
        """Returns the place, in the result, of an axis that the right operand keeps."""
        if rhs_axis in self.rhs_batch:
            return self.rhs_batch.index(rhs_axis)
        return len(self.lhs_batch) + len(self.lhs_free) + self.rhs_free.index(rhs_axis)

    def partner(self, rhs_axis: int) -> int | None:
        """Returns the axis of the left operand that a contracted or batch axis is paired with."""
        lefts = (*self.lhs_contracting, *self.lhs_batch)
        rights = (*self.rhs_contracting, *self.rhs_batch)
        return dict(zip(rights, lefts, strict=True)).get(rhs_axis)

    def fits(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> bool:
        """Whether operands of two shapes can be contracted: no axis is named twice, and paired axes
        have the same size.
        """
        lefts = (*self.lhs_contracting, *self.lhs_batch)
        rights = (*self.rhs_contracting, *self.rhs_batch)
        counts = len(self.lhs_batch) == len(self.rhs_batch) and len(lefts) == len(rights)
        distinct = len({*lefts}) == len(lefts) and len({*rights}) == len(rights)
        if not (counts and distinct):
            return False
        return [lhs[i] for i in lefts] == [rhs[j] for j in rights]

    def result_shape(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the shape of the result of operands of two shapes."""
        left = [lhs[axis] for axis in (*self.lhs_batch, *self.lhs_free)]
        return (*left, *[rhs[axis] for axis in self.rhs_free])

    def rows(self, lhs: Any) -> int:
        """Returns how many elements the free axes of the left operand have."""
        return math.prod([lhs.shape[axis] for axis in self.lhs_free])

    def columns(self, rhs: Any) -> int:
        """Returns how many elements the free axes of the right operand have."""
        return math.prod([rhs.shape[axis] for axis in self.rhs_free])

    def contracted_size(self, lhs: Any) -> int:
        """Returns the number of products that are summed for each element of the result."""
        return math.prod([lhs.shape[axis] for axis in self.lhs_contracting])

    def lhs_to_output(self, x: jax.Array) -> jax.Array:
        """Lines an array of the left rank, of size 1 along contracted axes, up with the result."""
        order = (*self.lhs_batch, *self.lhs_free)
        shape = [x.shape[axis] for axis in order] + [1] * len(self.rhs_free)
        return jnp.transpose(x, (*order, *self.lhs_contracting)).reshape(shape)

    def rhs_to_output(self, x: jax.Array) -> jax.Array:
        """Lines an array of the right rank, of size 1 along contracted axes, up with the result."""
        shape = [x.shape[axis] for axis in (*self.rhs_batch, *self.rhs_free)]
        shape[len(self.rhs_batch) : len(self.rhs_batch)] = [1] * len(self.lhs_free)
        order = (*self.rhs_batch, *self.rhs_free, *self.rhs_contracting)
        return jnp.transpose(x, order).reshape(shape)


@functools.cache
def _normal(lc: Axes, rc: Axes, lb: Axes, rb: Axes, lhs_rank: int, rhs_rank: int) -> Dimensions:
    """Returns dimensions whose axes count from the first; one object for all equal ones."""

    def normal(axes: Axes, rank: int) -> Axes:
        numbers = []
        for axis in axes:
            if axis not in range(-rank, rank):
                problem = f"axis {axis} of `dimension_numbers` is out of range for rank {rank}."
                fix = "name axes that the operands have."
                raise fail("dot_general", problem, fix=fix, error=TypeError)
            numbers.append(int(axis) % rank)
        return tuple(numbers)

    lefts, rights = normal(lc, lhs_rank), normal(rc, rhs_rank)
    return Dimensions(lhs_rank, rhs_rank, lefts, rights, normal(lb, lhs_rank), normal(rb, rhs_rank))


# Contractions of QTensors with offsets and permuted axes, without dequantizing a weight. Offsets
# are moved out of the sum, and the other operand is permuted to the order of a permuted axis.
#
#     sum_k x[k] (c[k] s[g] + o[g])  =  sum_k x[k] c[k] s[g]  +  sum_g (sum_{k in g} x[k]) o[g]


def in_order(left: Any, right: Any, dimensions: Dimensions) -> tuple[Any, Any]:
    """Returns operands whose contracted axes have the same order, without an `order` field: the
    other operand of a permuted axis is permuted in the same way.
    """
    ordered = []
    for x, q, of_both in ((left, right, dimensions.swapped), (right, left, dimensions)):
        if isinstance(q, QTensor) and q.order is not None:
            x = _ordered_as(x, q, q.order, of_both)
        ordered.append(x)
    left, right = (
        x if getattr(x, "order", None) is None else dataclasses.replace(x, order=None)
        for x in ordered
    )
    return left, right


def _ordered_as(x: Any, q: QTensor, order: jax.Array, dimensions: Dimensions) -> Any:
    """Returns the right operand `x`, contracted with `q`, in its order."""
    axis = permuted_axis(order)
    if axis is None:
        return x
    axis %= q.ndim
    pairs = dict(zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True))
    batch = dict(zip(dimensions.lhs_batch, dimensions.rhs_batch, strict=True))
    order_axes = {i for i, n in enumerate(order.shape) if n != 1 and i != axis}
    plain = not isinstance(x, QTensor) or (x.order is None and not order_axes)
    if not (axis in pairs and order_axes <= {*batch} and plain):
        raise fail(
            "dot_general",
            f"axis {axis - q.ndim} of an operand is permuted, and cannot be contracted so.",
            given=f"{q!r}, contracted axes {tuple(pairs)}, batch axes {tuple(batch)}",
            fix="contract q.dequantize(), or the other axis.",
        )
    target = {i: pairs[i] if i == axis else batch[i] for i in (*order_axes, axis)}
    stored, by_target = sorted(target), sorted(target, key=target.__getitem__)
    indices = order.reshape([order.shape[i] for i in stored])
    indices = indices.transpose([stored.index(i) for i in by_target])
    shape = [1] * x.ndim
    for i in target:
        shape[target[i]] = order.shape[i]
    indices = indices.reshape(shape)
    if isinstance(x, QTensor):
        return x.take(indices.reshape(-1), pairs[axis])
    return taken(x, indices, pairs[axis])


def of_offset(x: Any, q: QTensor, dimensions: Dimensions) -> jax.Array:
    """Returns the term that the offset of a QTensor adds to its contraction with `x`, an array or
    QTensor on the left: sums over groups, times the offset of each group.

    It is computed in float32 on every platform: it is cheap compared to the codes, and often
    cancels most of their sum.
    """
    offset = q.real_offset()
    assert offset is not None
    wide = common_dtype(x.dtype, offset.dtype)
    x = x.astype(wide)
    x, offset = x.dequantize() if isinstance(x, QTensor) else x, offset.astype(wide)
    sizes = [1] * x.ndim
    for mine, axis in zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True):
        sizes[mine] = q.shape[axis] if offset.shape[axis] == 1 else q.groups.sizes[axis]
    sums = Groups(x.shape, tuple(sizes)).reduce(jnp.sum, x, 0)
    for axis in dimensions.rhs_kept:
        n = q.shape[axis]
        if offset.shape[axis] != n:
            size = n if offset.shape[axis] == 1 else q.groups.sizes[axis]
            offset = jnp.take(offset, np.arange(n, dtype=np.int32) // size, axis, mode="clip")
    return lax.dot_general(
        sums,
        offset,
        dimensions.numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )


def has_no_offset_or_order(x: Any) -> bool:
    """Whether an operand has neither an offset nor a permuted axis."""
    return not isinstance(x, QTensor) or (x.offset is None and x.order is None)


def check_no_offset_or_order(function: str, *operands: Any, context: str = "") -> None:
    """Checks that operands have neither an offset nor a permuted axis."""
    for q in operands:
        if not has_no_offset_or_order(q):
            problem = f"an operand has a float offset, or a permuted axis{context}."
            raise fail(function, problem, given=repr(q), fix="pass q.dequantize().")


# Operands: arrays, QTensors, and arrays that are still to be quantized.


INT32_MAX = 2**31 - 1
"""The largest sum that an int32 holds."""


def is_integer(x: Any) -> bool:
    """Whether an operand is a QTensor of an integer format."""
    return isinstance(x, QTensor) and isinstance(format_of(x.qtype), Integer)


def is_byte(x: Any) -> bool:
    """Whether an operand is a QTensor of an integer format of 8 bits or fewer."""
    form = format_of(x.qtype) if isinstance(x, QTensor) else None
    return isinstance(form, Integer) and form.bits <= 8


def largest(q: QTensor) -> int:
    """Returns the largest magnitude of a code minus its zero point."""
    form = format_of(q.qtype)
    low, high = int(form.low), int(form.high)
    return max(-low, high) if q.zero_point is None else high - low


def max_products_in_int32(lhs: QTensor, rhs: QTensor) -> int:
    """Returns how many products of extreme codes, minus their zero points, an int32 sum holds."""
    return INT32_MAX // (largest(lhs) * largest(rhs))


FEW_PENDING = 64
"""Up to this number of rows, a kernel quantizes them, on a GPU again for each tile of columns. More
rows are quantized first. On CPU, sites that read the same array then share its codes, which matters
more than the cost of a separate call when there are many rows.
"""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("x", "scale"), meta_fields=("spec",)
)
@dataclasses.dataclass(frozen=True)
class Pending:
    """An array that is quantized by the contraction that reads it: a kernel may do both at once.

    Attributes:
      x: the array.
      scale: its scale, the same on every platform.
      spec: how it is quantized, symmetric and with an absolute granularity.
    """

    x: jax.Array
    scale: jax.Array
    spec: QSpec

    @classmethod
    def of(cls, x: jax.Array, spec: QSpec, affine: Affine | None) -> "Pending":
        """Returns an array to be quantized with a scale, which the calibrator finds if it is not
        given.
        """
        return cls(x, fit(x, spec).scale if affine is None else affine[0], spec)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.x.shape

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return self.x.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.x.dtype

    def quantized(self) -> QTensor:
        """Returns the array as a QTensor."""
        return QTensor.quantize(self.x, self.spec, Affine(self.scale))

    @cached_property
    def codes(self) -> QTensor:
        """The quantized array, as shapes and dtypes only."""
        return jax.eval_shape(Pending.quantized, self)

    def suits(self, target: str, rows: Any) -> bool:
        """Whether the kernels for a target compute exactly these codes, and quantize so many rows:
        those for TPUs quantize any number.
        """
        spec = self.spec
        few = target == "tpu" or rows <= FEW_PENDING
        return few and spec.numerics == ngraph and spec.rounding is RoundMode.NEAREST_TOWARD_EVEN


def may_wait(spec: QSpec, weight: Any) -> bool:
    """Whether kernels exist that quantize an array by a spec and multiply it by such a weight."""
    is_block = isinstance(format_of(spec.qtype), BlockFormat)
    return bool(kernel_of(weight)) and spec.symmetric and not is_block


def quantize_pending(x: Any) -> Any:
    """Returns an array that is still to be quantized as a QTensor; anything else unchanged."""
    return x.quantized() if isinstance(x, Pending) else x


# Scales in blocks along a contracted axis, and the static arguments of a product.


class Block(NamedTuple):
    """A contracted pair of axes whose scales are in blocks.

    Attributes:
      lhs: the axis of the left operand.
      rhs: the axis of the right operand.
      size: elements of a block in which no scale changes.
      dimensions: the dimensions of the whole contraction.
    """

    lhs: int
    rhs: int
    size: int
    dimensions: Dimensions


def find_block(lhs: Any, rhs: Any, dimensions: Dimensions) -> Block | None:
    """Returns the first contracted pair of axes along which a scale changes."""
    for i, j in zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True):
        n = lhs.shape[i]
        if n != rhs.shape[j]:
            continue  # the contraction itself raises
        left, right = block_size(lhs, i), block_size(rhs, j)
        size = math.gcd(left if left < n else 0, right if right < n else 0)
        if size:
            return Block(i, j, size, dimensions)
    return None


def block_size(x: Any, axis: int) -> int:
    """Returns how many neighbours along an axis share a scale; all of an array do."""
    return x.groups.sizes[axis] if isinstance(x, QTensor) else x.shape[axis]


def can_leave_sum(groups: Groups, contracted: Iterable[int]) -> bool:
    """Whether elements that are summed share scales, instead of each having its own."""
    shared = summed = 1
    for axis in contracted:
        shared, summed = shared * groups.sizes[axis], summed * groups.shape[axis]
    return is_at_least(shared, 2) or not is_at_least(summed, 2)


def shares_scale(q: QTensor, axes: Iterable[int]) -> bool:
    """Whether the elements along the axes share one scale."""
    return all(q.scale.shape[axis] == 1 for axis in axes)


class HowTo(NamedTuple):
    """The static arguments of a contraction.

    Attributes:
      dimensions: which axes are contracted.
      precision: of float products.
      block: the blocks of a scale that changes along a contracted axis; `None` if scales can leave
        the sum.
      dtype: the dtype to which a kernel may round the result; `None` leaves it to the caller.
    """

    dimensions: Dimensions
    precision: lax.PrecisionLike = None
    block: Block | None = None
    dtype: Any = None

    @classmethod
    def of(
        cls, lhs: Any, rhs: Any, dimensions: Dimensions, precision: lax.PrecisionLike = None
    ) -> "HowTo":
        """Returns the static arguments of the contraction of two operands."""
        return cls(dimensions, precision, find_block(lhs, rhs, dimensions))


def needs_transpose(dimensions: Dimensions) -> bool:
    """Whether the left operand is not in the order: batch axes, free axes, contracted axes."""
    order = (*dimensions.lhs_batch, *dimensions.lhs_free, *dimensions.lhs_contracting)
    return order != tuple(range(dimensions.lhs_rank))


def needs_shape(lhs: Any, rhs: Any, dimensions: Dimensions) -> bool:
    """Whether a product leaves the fast path of XLA on CPU as written."""
    narrow = dimensions.rows(lhs) == 1 or dimensions.columns(rhs) == 1
    return narrow or needs_transpose(dimensions)


# The product of an operand with a QTensor, and what the choice of a formulation depends on.


@dataclasses.dataclass(frozen=True)
class Operands:
    """Two operands of a contraction, as the planner sees them: arrays or QTensors."""

    lhs: Any
    rhs: Any

    @cached_property
    def bits(self) -> int:
        """The bits of the wider format of two operands of integers; 0 if one is something else."""
        bits = 0
        for x in (self.lhs, self.rhs):
            form = format_of(x.qtype) if isinstance(x, QTensor) else None
            if not isinstance(form, Integer):
                return 0
            bits = max(bits, form.bits)
        return bits

    @property
    def are_integers(self) -> bool:
        """Whether both operands are QTensors of integers."""
        return self.bits > 0

    @property
    def are_bytes(self) -> bool:
        """Whether both operands are QTensors of integers of 8 bits or fewer."""
        return 0 < self.bits <= 8


SMALL = 2**14
"""Below this number of elements, the conversion of an operand costs less than avoiding it."""

FEW_ROWS = 8
"""Up to this number of rows, the results of single blocks are smaller than the converted operand,
and on CPUs without matrix units, three digits of the rows cost less than the conversion.
"""

SHARE = 8
"""With this number of elements of a block per row, the results of single blocks are small."""


@dataclasses.dataclass(frozen=True)
class Product(Operands):
    """Two operands to contract; the right one is a QTensor.

    Attributes:
      lhs: an array, or a QTensor.
      rhs: a QTensor.
      how: which axes are contracted, and which scales are in blocks.
    """

    how: HowTo

    @cached_property
    def dimensions(self) -> Dimensions:
        """The axes: contracted, batch and free ones."""
        return self.how.dimensions

    @cached_property
    def block(self) -> Block | None:
        """The blocks of a scale that changes along a contracted axis, or `None`."""
        return self.how.block

    @cached_property
    def rows(self) -> Any:
        """How many elements the free axes of the left operand have."""
        return self.dimensions.rows(self.lhs)

    @cached_property
    def has_many_rows(self) -> bool:
        """Whether there are too many rows for the methods for few rows."""
        return is_at_least(self.rows, FEW_ROWS + 1)

    @cached_property
    def is_beside_floats(self) -> bool:
        """Whether the left operand is an array."""
        return not isinstance(self.lhs, QTensor)

    @property
    def are_float8(self) -> bool:
        """Whether both operands are QTensors of 8-bit floats, without blocks, and large."""
        are_codes = _is_float8(self.lhs) and _is_float8(self.rhs)
        return are_codes and self.block is None and self.is_large

    @cached_property
    def is_large(self) -> bool:
        """Whether a QTensor is so large that avoiding its conversion pays off."""
        size = self.lhs.size
        is_large = not self.is_beside_floats and is_at_least(size, SMALL)
        return (is_large or is_at_least(self.rhs.size, SMALL)) and size != 0

    @property
    def is_corrected(self) -> bool:
        """Whether sums of an operand are needed for the zero points of the other one."""
        return any(
            q.zero_point is not None or is_flipped(format_of(q.qtype)) for q in (self.lhs, self.rhs)
        )

    @cached_property
    def is_narrow(self) -> bool:
        """Whether it has one row or column, or a left operand that must be transposed."""
        return needs_shape(self.lhs, self.rhs, self.dimensions)

    @property
    def widens(self) -> bool:
        """Whether codes of fewer than 8 bits are widened in the product."""
        return any([jnp.iinfo(q.values.dtype).bits < 8 for q in (self.lhs, self.rhs)])

    @property
    def fits_digits(self) -> bool:
        """Whether int32 holds the sums of products of codes with the int8 digits of an array."""
        x, q = self.lhs, self.rhs
        if not is_byte(q) or common_dtype(x.dtype, q.dtype) == jnp.float64:
            return False
        block = self.block
        summed = self.dimensions.contracted_size(x) if block is None else block.size
        return not is_at_least(summed, INT32_MAX // (128 * largest(q)) + 1)

    @property
    def has_few_rows_for_blocks(self) -> bool:
        """Whether the results of single blocks along the first axis are small."""
        block, q, dimensions = self.block, self.rhs, self.dimensions
        if block is None:
            return False
        is_first_axis = dimensions.rhs_contracting == (0,) and not dimensions.rhs_batch
        has_no_tail = q.shape[0] % block.size == 0
        return is_first_axis and has_no_tail and not is_at_least(self.rows * SHARE, block.size + 1)


def _is_float8(q: Any) -> bool:
    if not isinstance(q, QTensor):
        return False
    form = format_of(q.qtype)
    return (
        isinstance(form, Minifloat)
        and form.bits == 8
        and jnp.issubdtype(q.values.dtype, jnp.floating)
    )


# The axes and the window of a `lax.conv_general_dilated`.


def conv_axes(numbers: lax.ConvDimensionNumbers) -> tuple[OperandAxes, OperandAxes]:
    """Returns the roles of the axes of an image and a kernel."""
    image, kernel = numbers.lhs_spec, numbers.rhs_spec
    return (
        OperandAxes(tuple(image[1:]), tuple(image[:1])),
        OperandAxes(tuple(kernel[1:]), tuple(kernel[:1])),
    )


class Window(NamedTuple):
    """The static arguments of a convolution, normalised.

    Attributes:
      strides: one for each spatial axis.
      padding: (low, high) for each spatial axis.
      lhs_dilation: one for each spatial axis.
      rhs_dilation: one for each spatial axis.
      axes: the dimension numbers of the operands and the result.
      groups: feature groups.
      batch_groups: batch groups.
      precision: of float products.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    axes: lax.ConvDimensionNumbers
    groups: int = 1
    batch_groups: int = 1
    precision: lax.PrecisionLike = None

    @property
    def batch(self) -> int:
        """The batch axis of the left operand."""
        return self.axes.lhs_spec[0]

    @property
    def features(self) -> int:
        """The feature axis of the left operand."""
        return self.axes.lhs_spec[1]

    @property
    def outputs(self) -> int:
        """The axis of output features of the kernel."""
        return self.axes.rhs_spec[0]

    @property
    def inputs(self) -> int:
        """The axis of input features of the kernel, those of one group."""
        return self.axes.rhs_spec[1]

    @property
    def taps(self) -> tuple[int, ...]:
        """The spatial axes of the kernel."""
        return tuple(self.axes.rhs_spec[2:])

    @property
    def spatial(self) -> tuple[int, ...]:
        """The spatial axes of the left operand."""
        return tuple(self.axes.lhs_spec[2:])

    @property
    def summed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of image and kernel that are summed over: features, then spatial ones."""
        image, kernel = conv_axes(self.axes)
        return image.contracted, kernel.contracted

    def products(self, kernel: Any) -> int:
        """Returns the number of products that are summed for each element of the result."""
        return math.prod(kernel.shape[axis] for axis in self.summed[1])

    def reach(self, kernel: Any) -> list[int]:
        """Returns how many pixels the kernel spans along each spatial axis."""
        pairs = zip(self.taps, self.rhs_dilation, strict=True)
        return [(kernel.shape[axis] - 1) * n + 1 for axis, n in pairs]

    def result_shape(self, lhs: Sequence[int], rhs: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the shape of the result for operands of the same rank; `None` if lax rejects
        them, or if a size is symbolic.
        """
        if not all(isinstance(n, int) for n in (*lhs, *rhs)):
            return None
        batch, features, *pixels = (lhs[axis] for axis in self.axes.lhs_spec)
        outputs, inputs, *taps = (rhs[axis] for axis in self.axes.rhs_spec)
        per_axis = (self.strides, self.padding, self.lhs_dilation, self.rhs_dilation)
        steps = (*self.strides, *self.lhs_dilation, *self.rhs_dilation)
        groups = self.groups, self.batch_groups
        if any(len(entries) != len(taps) for entries in per_axis) or min((*steps, *groups)) < 1:
            return None
        grouped = features == inputs * self.groups and min(groups) == 1
        if not grouped or outputs % max(groups) or batch % self.batch_groups:
            return None
        sizes = []
        for n, tap, stride, (low, high), hole, gap in zip(pixels, taps, *per_axis, strict=True):
            span = _dilated(n, hole) + low + high
            if span < 0:
                return None
            sizes.append(max(0, (span - _dilated(tap, gap)) // stride + 1))
        shape = [0] * len(lhs)
        for axis, n in zip(self.axes.out_spec, (batch // groups[1], outputs, *sizes), strict=True):
            shape[axis] = n
        return tuple(shape)

    def is_depthwise(self, lhs: Any) -> bool:
        """Whether each output feature reads one input feature."""
        return self.groups == lhs.shape[self.features] and self.batch_groups == 1

    def is_dot(self, kernel: QTensor) -> bool:
        """Whether the convolution is a matrix product of features."""
        is_single_tap = all(kernel.shape[axis] == 1 for axis in self.taps)
        is_product = is_single_tap and not self.pads() and self.groups == self.batch_groups == 1
        return is_product and can_leave_sum(kernel.groups, (self.inputs,))

    def pads(self) -> bool:
        """Whether zeros are added around or between the elements of the left operand."""
        return {(0, 0), *self.padding} != {(0, 0)} or {1, *self.lhs_dilation} != {1}

    def without_padding(self) -> "Window":
        """The window over a left operand that is already padded and dilated."""
        rank = len(self.strides)
        return self._replace(padding=((0, 0),) * rank, lhs_dilation=(1,) * rank)

    def lhs_to_output(self, x: jax.Array, outputs: int) -> jax.Array:
        """Lines a parameter of the left operand up with the result. The entry of a feature is
        repeated for all outputs of that feature.
        """
        batch, features = x.shape[self.batch], x.shape[self.features]
        x = (
            x.reshape(batch, features)
            if self.batch < self.features
            else x.reshape(features, batch).T
        )
        if features > 1:
            x = jnp.repeat(x, outputs // features, axis=1)
        return self._place(x)

    def rhs_to_output(self, x: jax.Array) -> jax.Array:
        """Lines a parameter of the kernel with one entry for each output up with the result."""
        return self._place(x.reshape(1, -1))

    def _place(self, x: jax.Array) -> jax.Array:
        batch, features, *_ = self.axes.out_spec
        shape = [1] * len(self.axes.out_spec)
        shape[batch], shape[features] = x.shape
        return (x if batch < features else x.T).reshape(shape)


def _dilated(n: int, step: int) -> int:
    """Returns the length of an axis with `step - 1` places between its elements."""
    return (n - 1) * step + 1 if n else 0


MOST_TAPS = 64
"""Up to this number of taps, a depthwise convolution is unrolled, with one product per tap."""


@dataclasses.dataclass(frozen=True)
class Convolution(Operands):
    """An image and a kernel; at least one is a QTensor.

    Attributes:
      lhs: the image, an array or a QTensor.
      rhs: the kernel, an array or a QTensor.
      how: the window.
    """

    how: Window

    @property
    def is_beside_floats(self) -> bool:
        """Whether the kernel is a QTensor and the image an array."""
        return isinstance(self.rhs, QTensor) and not isinstance(self.lhs, QTensor)

    @property
    def is_shifted(self) -> bool:
        """Whether the convolution is depthwise, with few enough taps to be unrolled."""
        taps = math.prod(self.rhs.shape[axis] for axis in self.how.taps)
        return self.how.is_depthwise(self.lhs) and taps <= MOST_TAPS

    @property
    def is_plain(self) -> bool:
        """Whether the kernel has no zero points, and scales that can be applied after the sum."""
        return self.rhs.zero_point is None and shares_scale(self.rhs, self.how.summed[1])
