"""Products and convolutions in ONNX, in float and with quantized operands."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import export

from ..compat import Eqn
from ..contractions.problem import Dimensions
from ..numerics.exact import RoundMode
from ..numerics.lookup import format_of
from ..numerics.minifloats import Minifloat
from ..numerics.qtype import Integer
from ..numerics.runtimes import ngraph, onnx
from ..statistics.calibrators import Affine, absmax, minmax
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from .dtypes import cast, computed_in
from .graph import Graph, Operand, Value
from .lookups import filled, row_axis, row_index
from .primitives import RULES, pad, refuse

# Quantized values.


@dataclasses.dataclass(frozen=True)
class Codes:
    """A quantized value that the graph computes: `real = (codes - zero_point) * scale`.

    Attributes:
      codes: the name of the codes.
      dtype: their dtype, int8 or uint8.
      scale: float32, which broadcasts to the codes.
      zero_point: a scalar of the dtype of the codes; or the name of a float32 value that broadcasts
        to the codes; or `None`.
      shape: the shape of the codes.
      scale_shape: the shape of the scale.
    """

    codes: str
    dtype: np.dtype[Any]
    scale: Operand
    zero_point: Operand | None
    shape: tuple[Any, ...]
    scale_shape: tuple[Any, ...]

    @property
    def zero(self) -> np.ndarray:
        """The zero point as a scalar of the dtype of the codes; 0 if there is none."""
        number = 0 if isinstance(self.zero_point, str | None) else self.zero_point
        return np.asarray(number, self.dtype)


@dataclasses.dataclass(frozen=True)
class Later:
    """An operand with one static scale, which is rounded after its axes are turned: runtimes look
    for what rounds it beside the product, and onnxruntime 1.32 fails to load what it moves there.

    Attributes:
      x: the operand.
      spec: its spec.
      affine: its scale.
    """

    x: Value
    spec: QSpec
    affine: Affine


_IN_ONNX = ("int8", "uint8", "int4", "uint4", "int16", "uint16", "float8_e4m3fn", "float8_e5m2")
"""The formats that `QuantizeLinear` and `DequantizeLinear` know, in opset 21."""


def dequantized(g: Graph, q: QTensor) -> str:
    """Returns the name of the real array of a QTensor, whose codes the file holds."""
    q = q.unpack()
    if q.offset is not None or q.order is not None:
        return g.name(np.asarray(q.dequantize()))
    form, dtype = format_of(q.qtype), np.dtype(q.dtype)
    codes, scale = _narrow(g, form, np.asarray(q.values)), np.asarray(q.real_scale(), np.float32)
    zero_point = None if q.zero_point is None else np.asarray(q.zero_point).astype(codes.dtype)
    sizes = q.groups.sizes
    several = [i for i, n in enumerate(scale.shape) if n > 1]
    blocked = [i for i in several if q.groups.is_blocked(i)]
    if g.in_step and several == [q.ndim - 1] != [0] and not blocked:
        # onnxruntime reads scales of the last axis in a tenth of the time if they are of blocks.
        blocked = [q.ndim - 2]
    # Other formats have indices of numbers, or the bits of one that NumPy does not know; and
    # runtimes do not slice the floats that it knows.
    is_float = codes.dtype.kind not in "iu" and not g.in_step
    is_number = isinstance(form, Integer) or is_float
    name = codes.dtype.name if is_number else ""
    if name in _IN_ONNX and len(blocked) <= 1 and (blocked or len(several) <= 1):
        if blocked and (cut := _whole_blocks(q, blocked[0])):
            parts = _cut(g, q, blocked[0], cut)
            return g.add("Concat", *(dequantized(g, part) for part in parts), axis=blocked[0])
        attributes = {}
        if blocked:
            full = [
                n if i in blocked else m
                for i, (n, m) in enumerate(zip(scale.shape, q.shape, strict=True))
            ]
            scale = np.broadcast_to(scale, full)
            if zero_point is not None:
                zero_point = np.broadcast_to(zero_point, full)
            attributes = {"axis": blocked[0], "block_size": int(sizes[blocked[0]])}
        else:
            kept = several or ([] if scale.size == 1 else [0])
            attributes = {"axis": kept[0]} if kept else {}
            flat = (-1,) if kept else ()
            scale = scale.reshape(flat)
            zero_point = (
                None
                if zero_point is None
                else np.broadcast_to(zero_point, q.scale.shape).reshape(flat)
            )
        operands = [codes, np.ascontiguousarray(scale)]
        if zero_point is not None:
            operands.append(np.ascontiguousarray(zero_point))
        real = g.add("DequantizeLinear", *operands, **attributes)
        return real if dtype == np.float32 else g.cast(real, dtype)
    if name in _IN_ONNX:
        real = g.cast(codes, np.float32)
    elif form.bits <= 8:
        bits, table = _numbers_of(g, form, np.asarray(q.values))
        real = g.add("Gather", table, g.cast(bits, np.int32))
    else:
        return g.name(np.asarray(q.dequantize()))
    if zero_point is not None:
        real = g.add("Sub", real, _spread(g, zero_point.astype(np.float32), q))
    real = g.add("Mul", real, _spread(g, scale, q))
    return real if dtype == np.float32 else g.cast(real, dtype)


def _whole_blocks(q: Any, axis: int) -> int:
    """Returns how many elements along an axis are in whole blocks, if its last block is smaller;
    else 0. OpenVINO knows blocks of one size alone.
    """
    if not isinstance(q, QTensor) or not q.groups.is_blocked(axis % q.ndim):
        return 0
    size, block = q.shape[axis], q.groups.sizes[axis]
    return size - size % block if size % block else 0


def _cut(g: Graph, x: Any, axis: int, at: int) -> list[Any]:
    """Returns a value in two parts along an axis, which is counted from the front."""
    if not isinstance(x, (QTensor, np.ndarray)):
        return [g.slice(x, axis, *ends) for ends in ((0, at), (at, np.iinfo(np.int64).max))]
    x = x.unpack() if isinstance(x, QTensor) else x
    whole = (slice(None),) * axis
    return [x[(*whole, part)] for part in (slice(None, at), slice(at, None))]


def _numbers_of(g: Graph, form: Any, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes as indices of a table, and the table of the numbers that they stand for."""
    bits = codes.view(np.uint8) & np.uint8((1 << form.bits) - 1)
    table = _table(form, codes.dtype)
    return bits.astype(g.packed(jnp.uint4)) if form.bits <= 4 else bits, table


@functools.lru_cache(maxsize=256)
def _table(form: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns the numbers that all codes of a format stand for, in the order of their bits."""
    count = 1 << form.bits
    index = np.arange(count)
    if dtype.kind == "i":
        index = (index + count // 2) % count - count // 2
    each = index.astype(np.int8).view(dtype)
    return np.asarray(form.decode(jnp.asarray(each)), np.float32)


def _narrow(g: Graph, form: Any, codes: np.ndarray) -> np.ndarray:
    """Returns codes in the smallest format of ONNX that has them."""
    if not isinstance(form, Integer) or form.bits > 4:
        return codes
    return codes.astype(g.packed(jnp.int4 if form.low < 0 else jnp.uint4))


def _spread(g: Graph, x: Operand, q: QTensor, place: Callable[[int], int] = int) -> Operand:
    """Returns what blocks share for each element; `place` says which axis of `x` is one of `q`."""
    for axis, (size, n) in enumerate(zip(q.groups.sizes, q.shape, strict=True)):
        if q.groups.is_blocked(axis):
            x = g.add("Gather", x, np.arange(n) // size, axis=place(axis))
    return x


def has_nodes(spec: QSpec, affine: Affine | None, shape: Sequence[Any]) -> bool:
    """Whether a few nodes round an activation as its spec does; see `quantized`."""
    groups = spec.granularity.groups(_fixed(shape))
    if any(map(groups.is_blocked, range(len(shape)))):
        return False
    form = format_of(spec.qtype)
    is_float = isinstance(form, Minifloat) and form.name in _IN_ONNX
    rounds_to_even = spec.rounding == RoundMode.NEAREST_TOWARD_EVEN
    calibrator = absmax if spec.symmetric else minmax
    has_scale = affine is not None or spec.calibrator == calibrator
    return (
        (isinstance(form, Integer) or is_float)
        and has_scale
        and rounds_to_even
        and spec.numerics in (ngraph, onnx)
    )


def quantized(
    g: Graph, x: Value, spec: QSpec, affine: Affine | None, *, as_codes: bool
) -> Codes | str:
    """Returns an activation as codes; or, with `as_codes=False`, rounded to the same grid. Its spec
    has to be one of those of `has_nodes`.
    """
    form, groups = format_of(spec.qtype), spec.granularity.groups(_fixed(x.shape))
    shared = [i for i, n in enumerate(groups.scale_shape) if n == 1]
    scale_shape = tuple(1 if i in shared else n for i, n in enumerate(x.shape))
    real = x.name if x.dtype == np.float32 else g.cast(x, np.float32)
    if affine is None:
        scale, zero_point = current_affine(g, real, spec, form, shared)
    else:
        scale, zero_point = np.asarray(affine[0], np.float32), affine[1]
        zero_point = None if zero_point is None else np.asarray(zero_point, np.float32)
    dtype, low, high = np.dtype(form.storage), form.low, form.high
    wanted = g.multiplied
    if dtype.itemsize == 1 and dtype.kind in "iu" and dtype != wanted:  # the codes, moved by 128
        dtype, shift = wanted, 128 if wanted == np.uint8 else -128
        low, high = low + shift, high + shift
        if isinstance(zero_point, str):
            zero_point = g.add("Add", zero_point, np.float32(shift))
        else:
            zero_point = np.asarray((0 if zero_point is None else zero_point) + np.float32(shift))
    is_whole = not isinstance(scale, str) and scale.size == 1
    if is_whole and dtype.name in _IN_ONNX:
        number = np.asarray(scale).reshape(())
        numbers = np.zeros(()) if isinstance(zero_point, str | None) else zero_point
        zero = numbers.reshape(()).astype(dtype)
        codes = g.add("QuantizeLinear", real, number, zero)
        if as_codes:
            shape = (1,) * len(x.shape)
            given = None if zero_point is None else zero
            number = number.reshape(shape)
            return Codes(codes, dtype, number, given, x.shape, shape)
        return _as(g, g.add("DequantizeLinear", codes, number, zero), x)
    limits = np.float32(low), np.float32(high)
    if isinstance(form, Minifloat):
        units = g.add("Div", real, scale)
        units = g.add("Min", g.add("Max", units, limits[0]), limits[1])
        rounded = g.cast(g.cast(units, dtype), np.float32)
        return _as(g, g.add("Mul", rounded, scale), x)
    if as_codes and affine is None and spec.symmetric and _fills(dtype, limits):
        # Where a scale is NaN, so is the result, whatever the codes are.
        zero = _scalar(0 if zero_point is None else zero_point, dtype)
        codes = g.add("QuantizeLinear", g.add("Div", real, scale), np.float32(1), zero)
        return Codes(codes, dtype, scale, zero, x.shape, scale_shape)
    units = rounded_units(g, real, scale, zero_point, limits)
    if affine is not None or not spec.symmetric:
        # NaN has the code 0, which may have been moved. A symmetric current scale is NaN itself.
        code = np.float32(low - form.low)
        units = g.add("Where", g.add("Equal", units, units), units, code)
    if as_codes:
        if isinstance(zero_point, np.ndarray):
            one = zero_point.size == 1
            zero_point = _scalar(zero_point, dtype) if one else g.name(zero_point)
        codes = g.cast(units, dtype)
        return Codes(codes, dtype, scale, zero_point, x.shape, scale_shape)
    units = units if zero_point is None else g.add("Sub", units, zero_point)
    return _as(g, g.add("Mul", units, scale), x)


def _scalar(zero_point: Any, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Returns a zero point as a scalar."""
    return None if zero_point is None else np.asarray(zero_point).reshape(()).astype(dtype)


def _fills(dtype: np.dtype[Any], limits: Sequence[Any]) -> bool:
    """Whether codes are all integers of their dtype, so that `QuantizeLinear` has their limits."""
    if dtype.kind not in "iu" or dtype.name not in _IN_ONNX:
        return False
    return tuple(map(float, limits)) == (np.iinfo(dtype).min, np.iinfo(dtype).max)


def rounded_units(
    g: Graph, x: Operand, scale: Operand, zero_point: Operand | None, limits: Sequence[Any]
) -> str:
    """Returns the codes of integers as float32, by arithmetic; NaN stays."""
    units = g.add("Round", g.add("Div", x, scale))
    units = units if zero_point is None else g.add("Add", units, zero_point)
    low, high = map(np.float32, limits)
    return g.add("Min", g.add("Max", units, low), high)


def _as(g: Graph, rounded: str, x: Value) -> str:
    """Returns a value in the dtype of another."""
    return rounded if x.dtype == np.float32 else g.cast(rounded, x.dtype)


def _fixed(shape: Sequence[Any]) -> tuple[int, ...]:
    """Returns a shape with a number in place of each open size. Which axes share a scale does not
    depend on the number.
    """
    return tuple(7919 if export.is_symbolic_dim(n) else int(n) for n in shape)


def current_affine(
    g: Graph, x: str, spec: QSpec, form: Any, shared: Sequence[int]
) -> tuple[str, Operand | None]:
    """Returns the scale and zero point of the current values, by absmax or minmax."""
    axes = g.ints(*shared)
    sizes = g.add("Abs", x)
    total = g.add("ReduceSum", sizes, axes, keepdims=1)  # NaN if there is one, unlike a maximum
    has_no_nan = g.add("Equal", total, total)
    if spec.symmetric:
        largest = g.add("ReduceMax", sizes, axes, keepdims=1)
        scale = g.add("Div", largest, np.float32(form.high))
        is_zero = g.add("Equal", scale, np.float32(0))
        scale = g.add("Where", is_zero, np.float32(1), scale)
        # With an infinite scale all codes are 0, and 0 times infinity is NaN.
        is_usable = g.add("And", has_no_nan, g.add("Less", scale, np.float32(np.inf)))
        return g.add("Where", is_usable, scale, np.float32(np.nan)), None
    low = g.add("Min", g.add("ReduceMin", x, axes, keepdims=1), np.float32(0))
    high = g.add("Max", g.add("ReduceMax", x, axes, keepdims=1), np.float32(0))
    scale = g.add("Div", g.add("Sub", high, low), np.float32(form.high - form.low))
    is_zero = g.add("Equal", scale, np.float32(0))
    scale = g.add("Where", is_zero, np.float32(1), scale)
    scale = g.add("Where", has_no_nan, scale, np.float32(np.nan))
    start = g.add("Sub", np.float32(form.low), g.add("Div", low, scale))
    start = g.add("Min", g.add("Max", start, np.float32(form.low)), np.float32(form.high))
    # An infinite range has no start, and the zero point 0.
    start = g.add("Where", g.add("Equal", start, start), start, np.float32(0))
    return scale, g.add("Round", start)


def real(g: Graph, x: Any) -> Operand:
    """Returns an operand in float."""
    return dequantized(g, x) if isinstance(x, QTensor) else x


# Products.


@dataclasses.dataclass(frozen=True)
class _Form:
    """How an operand of a product is brought into the form [*batch, rows, columns].

    Attributes:
      order: of its axes.
      sizes: its shape then; `None` if the transposition has it already.
    """

    order: tuple[int, ...]
    sizes: tuple[Any, ...] | None

    def of(self, g: Graph, x: Operand) -> Operand:
        """Returns an array or a value in this form."""
        if isinstance(x, QTensor):
            x = x.unpack().transpose(self.order)
            return x if self.sizes is None else x.reshape(self.sizes)
        if isinstance(x, np.ndarray):
            x = x.transpose(self.order)
            return x if self.sizes is None else x.reshape(self.sizes)
        y = g.transpose(x, self.order)
        return y if self.sizes is None else g.reshape(y, self.sizes)

    def of_scale(self, g: Graph, scale: Operand, shape: Sequence[Any]) -> Operand:
        """Returns a scale that broadcasts to an operand, in this form."""
        if isinstance(scale, np.ndarray) and scale.size == 1:
            return scale.reshape(())
        turned = [shape[i] for i in self.order]
        y = g.transpose(scale, self.order)
        if self.sizes is None:
            return y
        return g.reshape(y, _merged(turned, self.sizes))


def _merged(sizes: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Returns the sizes of a scale where axes of its operand are merged at the end."""
    count = len(like)
    kept = list(sizes[: count - 1])
    return [*kept, math.prod(sizes[count - 1 :])]


def _size(shape: Sequence[Any], axes: Sequence[int]) -> Any:
    return math.prod(shape[i] for i in axes)


def is_turned(eqn: Eqn, index: int) -> bool:
    """Whether a product in float reads an operand with its axes turned or merged."""
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name == "conv_general_dilated"
    ranks = [atom.aval.ndim for atom in eqn.invars]
    n = Dimensions.of(eqn.params["dimension_numbers"], *ranks)
    batch, free, summed = (
        (n.lhs_batch, n.lhs_free, n.lhs_contracting),
        (n.rhs_batch, n.rhs_free, n.rhs_contracting),
    )[index]
    order = (*batch, *summed, *free) if index else (*batch, *free, *summed)
    is_merged = len(summed) != 1 or (len(free) != 1 and bool(index or batch or not free))
    return is_merged or order != tuple(range(ranks[index]))


def dot_general(g: Graph, eqn: Eqn, x: Any, y: Any) -> str:
    """Returns a product: of integers if an activation is in codes, else in float."""
    shapes = [atom.aval.shape for atom in eqn.invars]
    numbers = Dimensions.of(eqn.params["dimension_numbers"], *map(len, shapes))
    batch = [shapes[0][i] for i in numbers.lhs_batch]
    summed = _size(shapes[0], numbers.lhs_contracting)
    rows = [shapes[0][i] for i in numbers.lhs_free]
    columns = [shapes[1][i] for i in numbers.rhs_free]
    keeps_rows = not batch and len(rows) >= 1
    rows_in = rows if keeps_rows else [_size(rows, range(len(rows)))]
    merged_lhs = len(numbers.lhs_contracting) != 1 or rows_in != rows
    lhs = _Form(
        (*numbers.lhs_batch, *numbers.lhs_free, *numbers.lhs_contracting),
        (*batch, *rows_in, summed) if merged_lhs else None,
    )
    merged_rhs = len(numbers.rhs_contracting) != 1 or len(columns) != 1
    rhs = _Form(
        (*numbers.rhs_batch, *numbers.rhs_contracting, *numbers.rhs_free),
        (*batch, summed, _size(columns, range(len(columns)))) if merged_rhs else None,
    )
    out_shape, dtype = eqn.outvars[0].aval.shape, np.dtype(eqn.outvars[0].aval.dtype)
    if isinstance(summed, int) and summed == 0:
        # onnxruntime leaves sums of nothing as the memory was.
        return g.cast(g.add("Expand", np.float32(0), g.shape(out_shape)), dtype)
    result = _integer_product(g, lhs, rhs, x, y)
    if result is None:
        dtypes = [np.dtype(atom.aval.dtype) for atom in eqn.invars]
        operands = [
            _plain(g, v, kind, lambda x, _, form=form: form.of(g, x))
            for form, v, kind in zip((lhs, rhs), (x, y), dtypes, strict=True)
        ]
        if all(x.name in ("int8", "uint8") for x in dtypes) and dtype == np.int32:
            result = g.add("MatMulInteger", *(real(g, v) for v in operands))
        else:
            axes = len(batch) + len(rows_in), len(batch)
            wide = computed_in("dot_general", dtype)
            assert wide is not None
            result = _float_product(g, eqn, operands, axes, wide)
            if axes == (1, 0) and isinstance(y, QTensor) and _is_fused(y):
                g.matrices.add(result)
            result = result if wide == dtype else g.cast(result, dtype)
    elif dtype != np.float32:
        result = g.cast(result, dtype)
    if rows_in == rows and len(columns) == 1:
        return result
    return g.reshape(result, out_shape)


def _float_product(
    g: Graph, eqn: Eqn, operands: Sequence[Any], axes: Sequence[int], dtype: Any
) -> str:
    """Returns the product of operands in their forms, whose summed axes are given. Where the last
    block of a scale along the sum is smaller, it is that of the whole blocks plus that of the rest,
    since runtimes read codes in a product only if no node is between.
    """
    cut = max(map(_whole_blocks, operands, axes))
    if not cut:
        return g.add("MatMul", *_in(g, eqn, [real(g, x) for x in operands], dtype))
    parts = [_cut(g, x, axis, cut) for x, axis in zip(operands, axes, strict=True)]
    both = zip(*parts, strict=True)
    return g.add("Add", *(_float_product(g, eqn, part, axes, dtype) for part in both))


def _in(g: Graph, eqn: Eqn, operands: Sequence[Operand], dtype: Any) -> list[Operand]:
    """Returns the operands of a product in one dtype."""
    pairs = zip(operands, eqn.invars, strict=True)
    return [x if atom.aval.dtype == dtype else cast(g, x, dtype) for x, atom in pairs]


def _plain(g: Graph, x: Any, dtype: np.dtype[Any], turned: Callable[[Any, Any], Any]) -> Any:
    """Returns an operand of a product in float, with its axes turned by a function of it and of its
    zero.
    """
    zero = np.zeros((), dtype)
    if isinstance(x, Later):
        real = Value(g.name(turned(x.x, zero)), (), dtype)
        return quantized(g, real, x.spec, x.affine, as_codes=False)
    if not isinstance(x, Codes):
        return turned(x, zero)
    units = g.cast(x.codes, np.float32)
    if x.zero_point is not None:
        name = isinstance(x.zero_point, str)
        units = g.add("Sub", units, x.zero_point if name else np.float32(x.zero_point))
    real = g.add("Mul", units, x.scale)
    return turned(real if dtype == np.float32 else g.cast(real, dtype), zero)


def is_integer(q: Any) -> bool:
    """Whether the codes of a weight may be multiplied as integers: 8 bits, and no scale varies
    along the sum, which the form of the product then shows.
    """
    if not isinstance(q, QTensor) or q.offset is not None or q.order is not None:
        return False
    form = format_of(q.qtype)
    return isinstance(form, Integer) and form.bits <= 8


def _integer_product(g: Graph, lhs: _Form, rhs: _Form, x: Any, y: Any) -> str | None:
    """Returns a product of integers, if one operand is in codes of the graph, and the other is a
    weight with a scale for each result; else `None`.
    """
    if isinstance(x, Codes) and is_integer(y):
        weight, codes, form_of_codes, is_rhs = rhs.of(g, y), x, lhs, True
    elif isinstance(y, Codes) and is_integer(x):
        weight, codes, form_of_codes, is_rhs = lhs.of(g, x), y, rhs, False
    else:
        return None
    summed = -2 if is_rhs else -1
    scale = np.asarray(weight.real_scale(), np.float32)
    stored = None if scale.shape[summed] != 1 else _as_multiplied(g, weight)
    if stored is None:
        return None
    by_row = codes.zero_point if isinstance(codes.zero_point, str) else None
    of_codes = form_of_codes.of_scale(g, codes.scale, codes.scale_shape)
    if g.is_qdq and by_row is None and _is_fused(weight):
        # All tokens have the scale 1 until the sums are known: runtimes fuse one scale alone.
        one = np.float32(1)
        units = g.add("DequantizeLinear", form_of_codes.of(g, codes.codes), one, codes.zero)
        operands = [units, dequantized(g, weight)]
        return g.add("Mul", g.add("MatMul", *operands[:: 1 if is_rhs else -1]), of_codes)
    pairs = [(form_of_codes.of(g, codes.codes), codes.zero), (stored.codes, stored.zero_point)]
    in_order = zip(*pairs[:: 1 if is_rhs else -1], strict=True)
    sums = g.add("MatMulInteger", *itertools.chain(*in_order))
    if by_row is not None:  # runtimes know zero points of the whole operand alone
        rows = g.cast(form_of_codes.of_scale(g, by_row, codes.scale_shape), np.int32)
        columns = stored.centered.sum(summed, keepdims=True, dtype=np.int32)
        sums = g.add("Sub", sums, g.add("Mul", rows, columns))
    sums = g.add("Mul", g.cast(sums, np.float32), of_codes)
    return g.add("Mul", sums, scale.reshape(()) if scale.size == 1 else scale)


def _is_fused(q: QTensor) -> bool:
    """Whether runtimes fuse a product with the node that dequantizes a weight in 8 bits."""
    return format_of(q.qtype).bits == 8 and sum(n > 1 for n in q.scale.shape) <= 1


class _Integers(NamedTuple):
    """A weight as the integers that runtimes multiply.

    Attributes:
      codes: of the dtype of products, or the name of them if they are stored in 4 bits.
      zero_point: a scalar of that dtype.
      centered: the codes less the zero point, int32.
    """

    codes: Operand
    zero_point: np.ndarray
    centered: np.ndarray


def _as_multiplied(g: Graph, q: QTensor) -> _Integers | None:
    """Returns the codes of a weight, moved into the dtype of products; `None` if it has several
    zero points, which runtimes do not know.
    """
    form, values = format_of(q.qtype), np.asarray(q.values).astype(np.int32)
    zeros = np.zeros(1) if q.zero_point is None else np.asarray(q.zero_point).astype(np.int32)
    if (zeros != zeros.flat[0]).any():
        return None
    zero, dtype = int(zeros.flat[0]), g.multiplied
    shift = -int(form.low) if dtype == np.uint8 else -128 * (form.high > 127)
    codes: Operand = (values + shift).astype(dtype)
    if form.bits <= 4:
        small = g.packed(jnp.int4 if form.low + shift < 0 else jnp.uint4)
        codes = codes.astype(small) if small == dtype else g.cast(codes.astype(small), dtype)
    return _Integers(codes, np.asarray(zero + shift, dtype), values - zero)


# Convolutions.


def convolution(g: Graph, eqn: Eqn, x: Any, kernel: Any) -> str:
    """Returns a convolution: of integers if the image is in codes, else in float."""
    p = eqn.params
    numbers = p["dimension_numbers"]
    if p["batch_group_count"] != 1:
        raise refuse(eqn, "with groups of the batch has no form in ONNX")
    if not p["window_strides"]:
        raise refuse(eqn, "without axes of space has no form in ONNX")
    if isinstance(kernel, QTensor | np.ndarray):
        kernel = kernel.unpack() if isinstance(kernel, QTensor) else kernel
        weight: Any = kernel.transpose(tuple(numbers.rhs_spec))
    else:
        weight = g.transpose(kernel, numbers.rhs_spec)
    attributes = {
        "dilations": list(p["rhs_dilation"]),
        "group": p["feature_group_count"],
        "pads": [n - _by_hand(n) for end in (0, 1) for n in (x[end] for x in p["padding"])],
        "strides": list(p["window_strides"]),
    }
    y = _integer_convolution(g, eqn, x, weight, attributes)
    if y is None:
        y = g.transpose(_float_convolution(g, eqn, x, weight, attributes), _to_result(eqn))
    return y


def _to_result(eqn: Eqn) -> list[int]:
    """Returns the order of the axes of what `Conv` makes that gives the result."""
    return [int(i) for i in np.argsort(eqn.params["dimension_numbers"].out_spec)]


def _by_hand(n: Any) -> Any:
    """Returns how much of a padding is not written as that of `Conv`: what is cut, or open."""
    return n if export.is_symbolic_dim(n) else min(n, 0)


def _image(g: Graph, eqn: Eqn, x: Operand, zero: np.ndarray) -> str:
    """Returns an image with its channels in front, spread by zeros, and cut. `Conv` pads by itself,
    but neither spreads nor cuts.
    """
    numbers, padding, dilations = (
        eqn.params[key] for key in ("dimension_numbers", "padding", "lhs_dilation")
    )
    x = g.transpose(x, numbers.lhs_spec)
    pairs = zip(padding, dilations, strict=True)
    config = [(_by_hand(low), _by_hand(high), n - 1) for (low, high), n in pairs]
    if all(entry == (0, 0, 0) for entry in config):
        return x
    shape, wide = eqn.invars[0].aval.shape, computed_in("pad", zero.dtype)
    config, sizes = [(0, 0, 0), (0, 0, 0), *config], [shape[i] for i in numbers.lhs_spec]
    if wide == zero.dtype:
        return pad(g, x, zero, config, sizes)
    return g.cast(pad(g, g.cast(x, wide), zero.astype(wide), config, sizes), zero.dtype)


def _integer_convolution(
    g: Graph, eqn: Eqn, x: Any, weight: Any, attributes: dict[str, Any]
) -> str | None:
    """Returns the convolution of an image in codes; `None` if runtimes have no form for it."""
    if not isinstance(x, Codes) or isinstance(x.zero_point, str) or not is_integer(weight):
        return None
    scale = np.asarray(weight.real_scale(), np.float32)
    has_one_for_each_channel = scale.size == scale.shape[0]
    stored = _as_multiplied(g, weight) if has_one_for_each_channel else None
    if stored is None:
        return None
    numbers, dtype = eqn.params["dimension_numbers"], np.dtype(eqn.outvars[0].aval.dtype)
    codes, of_image = _image(g, eqn, x.codes, x.zero), x.scale
    is_of_images = numbers.lhs_spec[0] == numbers.out_spec[0] == 0 and set(x.scale_shape[1:]) == {1}
    has_groups = eqn.params["feature_group_count"] > 1  # those in QDQ crash OpenVINO 2026.4
    if g.is_qdq and is_of_images and _is_fused(weight) and not has_groups:
        # As in products of tokens, the scales of images follow.
        units = g.add("DequantizeLinear", codes, np.float32(1), x.zero)
        y = g.add("Conv", units, dequantized(g, weight), **attributes)
        y = g.add("Mul", g.transpose(y, _to_result(eqn)), of_image)
        return y if dtype == np.float32 else g.cast(y, dtype)
    y = g.add("ConvInteger", codes, stored.codes, x.zero, stored.zero_point, **attributes)
    if not (isinstance(of_image, np.ndarray) and of_image.size == 1):
        of_image = g.transpose(of_image, numbers.lhs_spec)
    y = g.add("Mul", g.cast(y, np.float32), of_image)
    y = g.add("Mul", y, scale.reshape(1, -1, *[1] * (scale.ndim - 2)))
    return g.transpose(y if dtype == np.float32 else g.cast(y, dtype), _to_result(eqn))


def _float_convolution(g: Graph, eqn: Eqn, x: Any, weight: Any, attributes: dict[str, Any]) -> str:
    """Returns the convolution of numbers; those of bytes are added up in int32."""
    dtypes = [np.dtype(atom.aval.dtype) for atom in eqn.invars]
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    operands = [_plain(g, x, dtypes[0], functools.partial(_image, g, eqn)), real(g, weight)]
    if {x.name for x in dtypes} <= {"int8", "uint8"} and dtype.kind in "iu":
        y, wide = g.add("ConvInteger", *operands, **attributes), np.dtype(np.int32)
        return y if wide == dtype else g.cast(y, dtype)
    wide = computed_in("conv_general_dilated", dtype)
    if wide is None:
        raise refuse(eqn, f"of {dtypes[0].name} into {dtype.name} has no form in ONNX")
    y = g.add("Conv", *_in(g, eqn, operands, wide), **attributes)
    return y if wide == dtype else g.cast(y, dtype)


def table_rows(g: Graph, eqn: Eqn, table: QTensor, starts: Operand) -> str:
    """Returns rows of a quantized table: its codes and scales are looked up, then multiplied."""
    axis, table = row_axis(eqn), table.unpack()
    form = format_of(table.qtype)
    simple = form.bits <= 8 and table.offset is None and table.order is None
    scale = np.asarray(table.real_scale(), np.float32)
    if axis is None or not simple or table.groups.is_blocked(axis):
        return RULES["gather"](g, eqn, dequantized(g, table), starts)
    index, batch = row_index(g, eqn, starts, axis), len(eqn.invars[1].aval.shape) - 1

    def rows_of(x: np.ndarray) -> Operand:
        """Returns the rows of codes or scales; those that all rows share with as many axes."""
        if x.shape[axis] == 1:
            return x.reshape(*x.shape[:axis], *[1] * batch, *x.shape[axis + 1 :])
        stored = x
        if x.dtype.name in ("int4", "uint4"):  # runtimes look up bytes
            stored = g.cast(x, np.int8 if x.dtype.name == "int4" else np.uint8)
        return g.add("Gather", stored, index.clamped, axis=axis)

    def spread(x: np.ndarray) -> Operand:
        return _spread(g, rows_of(x), table, lambda i: i if i < axis else i - 1 + batch)

    codes = np.asarray(table.values)
    if isinstance(form, Integer):
        rows = g.cast(rows_of(_narrow(g, form, codes)), np.float32)
    else:
        bits, numbers = _numbers_of(g, form, codes)
        rows = g.add("Gather", numbers, g.cast(rows_of(bits), np.int32))
    if table.zero_point is not None:
        zeros = np.asarray(table.zero_point).astype(np.int32).astype(np.float32)
        rows = g.add("Sub", rows, spread(zeros))
    rows = g.add("Mul", rows, spread(scale))
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    return filled(g, eqn, rows if dtype == np.float32 else g.cast(rows, dtype), index.inside)


def ragged_dot(g: Graph, eqn: Eqn, x: Any, weights: Any, sizes: Operand) -> str:
    """Returns a product of groups of rows, each by a matrix of its own: all rows by each matrix,
    and zeros in place of those of other groups.
    """
    numbers, (rows, _) = eqn.params["ragged_dot_dimension_numbers"], eqn.invars[0].aval.shape
    axes = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    expected = ((0,), (0,), (((1,), (1,)), ((), ())))
    dimensions = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    if (*map(tuple, axes), dimensions) != expected or eqn.params["group_offset"] is not None:
        raise refuse(eqn, "of another pattern than rows by matrices has no form in ONNX")
    dtypes = [np.dtype(atom.aval.dtype) for atom in eqn.invars[:2]]
    operands = zip((x, weights), dtypes, strict=True)
    x, weights = (real(g, _plain(g, v, dtype, lambda v, _: v)) for v, dtype in operands)
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    wide = computed_in("dot_general", dtype)
    x, weights = (cast(g, v, wide) for v in (x, weights))
    sizes = g.add("Reshape", cast(g, sizes, np.int64), g.ints(-1, 1))
    ends = g.add("CumSum", sizes, np.asarray(0, np.int64))
    row = g.add("Range", np.asarray(0, np.int64), g.add("Squeeze", g.size(rows)), np.int64(1))
    inside = g.add(
        "And", g.add("GreaterOrEqual", row, g.add("Sub", ends, sizes)), g.add("Less", row, ends)
    )
    inside = g.add("Unsqueeze", inside, g.ints(-1))
    parts = g.add("Where", inside, x, np.zeros((), wide))
    y = g.add("ReduceSum", g.add("MatMul", parts, weights), g.ints(0), keepdims=0)
    return y if wide == dtype else g.cast(y, dtype)


CONTRACTIONS: dict[str, Callable[..., str]] = {
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "ragged_dot_general": ragged_dot,
}
