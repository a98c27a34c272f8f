"""Reads the weights of compressed-tensors: codes, scales, zero points and their order. See
`_compressed_tensors`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..calibrators import Groups
from ..numerics import Integer, mxfp4, mxfp8_e4m3, nvfp4
from ..numerics._shared import E8M0
from ..tensor import QTensor
from ._bits import from_stream, repacked, stream_length, to_stream
from ._coded import (
    FLOATS,
    CodedLeaf,
    abstract,
    checked,
    leading,
    order_of,
    real_dtype,
    refuse,
    weight,
)
from ._config import Config
from ._source import Source

_HALF = jnp.dtype(jnp.bfloat16)
"""Formats of weights whose scales are not floats."""


def _groups(
    source: Source, module: str, args: Config, shape: tuple[int, ...], dtypes: Any = FLOATS
) -> tuple[Groups, np.dtype]:
    """Returns which elements of a weight share a scale, and the dtype of scales, after checking
    that the number of scales agrees with the config.
    """
    *lead, rows, columns = shape
    size = args.data.get("group_size")
    unsaid = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = args.one_of("strategy", strategies, unsaid)
    sizes = {
        "tensor": lambda: (rows, columns),
        "channel": lambda: (1, columns),
        "block": lambda: _block(args),
    }.get(strategy, lambda: (1, args.integer("group_size")))()
    lead_sizes = tuple(lead) if strategy == "tensor" else (1,) * len(lead)
    groups = Groups(shape, (*lead_sizes, min(sizes[0], rows), min(sizes[1], columns)))
    name = f"{module}.weight_scale"
    stored, dtype = checked(source, name, None, dtypes)
    if _wide(stored) != _wide(groups.scale_shape):
        checked(source, name, groups.scale_shape, dtypes, f"for the strategy {strategy}")
    return groups, dtype


def _wide(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape without axes of size 1."""
    return tuple(n for n in shape if n != 1)


def _block(args: Config) -> tuple[int, int]:
    block: Any = args.data.get("block_structure")
    if isinstance(block, str) and block.count("x") == 1:  # as in old releases
        block = [int(text) if text.isdecimal() else text for text in block.split("x")]
    if isinstance(block, list) and len(block) == 2:
        rows, columns = block
        if type(rows) is type(columns) is int and min(rows, columns) > 0:
            return rows, columns
    args.refuse("block_structure", "two sizes, such as [128, 128]")


def _packed(source: Source, module: str, args: Config, asked: np.dtype | None) -> CodedLeaf:
    """Reads a weight of `pack-quantized`."""
    form, codes = _integers(args), f"{module}.weight_packed"
    shape, each = _packed_shape(source, module, form.bits)
    groups, dtype = _groups(source, module, args, shape)
    zeros = _zeros(source, module, args, groups, form, packed=True)
    order = _order(source, module, args, groups)

    def decode(codes: np.ndarray, scale: np.ndarray, *zeros: np.ndarray) -> list[np.ndarray]:
        values = _values(codes, shape[-1], form, each, order)
        points = [_packed_zeros(points, groups.scale_shape, form) for points in zeros]
        return [values, scale, *points, *([] if order is None else [order])]

    more = {} if order is None else {"order": abstract(leading(len(shape), shape[-1]), "int32")}
    real = real_dtype(source, asked, dtype)
    like = weight(groups, form, dtype, real, zero_point=bool(zeros), **more)
    tensors = (codes, np.dtype(np.int32)), (f"{module}.weight_scale", dtype), *zeros
    return _leaf(source, module, tensors, like, decode)


def _packed_shape(source: Source, module: str, bits: int) -> tuple[tuple[int, ...], int]:
    """Returns the shape of a packed weight, and the number of codes in a word if no code crosses
    two words, as in old releases; 0 if codes are dense.
    """
    name, packed = f"{module}.weight_shape", f"{module}.weight_packed"
    stored, _ = checked(source, packed, None, (jnp.int32,))
    rank = len(stored)
    _, dtype = checked(source, name, (rank,), (jnp.int64, jnp.int32), "a size for each axis")
    shape = tuple(source.read(name, dtype).tolist())
    if 2 <= rank <= 3 and shape[:-1] == stored[:-1] and shape[-1] > 0:
        if stored[-1] == stream_length(shape[-1], bits) // 4:
            return shape, 0
        if stored[-1] == -(-shape[-1] // (32 // bits)):
            return shape, 32 // bits
    refuse(
        source,
        packed,
        "does not have the shape in weight_shape.",
        given=f"{list(stored)} words for {list(shape)} codes of {bits} bits",
        expected="as many words as the codes of each row take",
    )


def _integers(args: Config) -> Integer:
    bits = args.integer("num_bits", 8, least=2)
    if bits > 8:
        args.refuse("num_bits", "2 to 8")
    return Integer(bits)


def _values(
    codes: np.ndarray, count: int, form: Integer, each: int, order: np.ndarray | None
) -> np.ndarray:
    """Returns codes in the layout of a QTensor, from rows of words."""
    bits = form.bits
    rows = codes.reshape(-1, codes.shape[-1])

    def dense(raw: np.ndarray) -> np.ndarray:
        return to_stream(_from_words(raw, bits, count, each), bits)

    before = dense if each else None
    values = repacked(rows, bits, count, flip=2 ** (bits - 1), order=order, before=before)
    return values.view(np.int8) if bits == 8 else values


def _from_words(raw: np.ndarray, bits: int, count: int, each: int) -> np.ndarray:
    """Returns the codes of words in which no code crosses two words."""
    words = raw.view("<u4")[..., None]
    codes = (words >> np.arange(0, each * bits, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(len(raw), -1)[:, :count]


def _zeros(
    source: Source, module: str, args: Config, groups: Groups, form: Integer, *, packed: bool
) -> tuple[tuple[str, np.dtype], ...]:
    """Returns the tensor of the zero points; none if the config says that there are none."""
    name = f"{module}.weight_zero_point"
    if args.flag("symmetric", True):
        if name in source.entries and source.read(name, source.dtype(name)).any():
            refuse(
                source,
                name,
                "contradicts the config.",
                given="zero points other than 0",
                expected="none, as symmetric == true",
            )
        return ()
    *lead, rows, columns = groups.scale_shape
    if packed and args.data.get("strategy") != "tensor":
        shape = (*lead, stream_length(rows, form.bits) // 4, columns)
        return ((name, checked(source, name, shape, (jnp.int32,))[1]),)
    stored, dtype = checked(source, name, None, (jnp.int8,))
    if _wide(stored) != _wide(groups.scale_shape):
        checked(source, name, groups.scale_shape, (jnp.int8,), "as many as scales")
    return ((name, dtype),)


def _packed_zeros(points: np.ndarray, shape: tuple[int, ...], form: Integer) -> np.ndarray:
    """Returns zero points from streams along the last axis but one."""
    if points.dtype == np.int8:
        return points.astype(form.storage)
    rows = np.ascontiguousarray(np.swapaxes(points, -1, -2)).view(np.uint8)
    codes = from_stream(rows, form.bits, shape[-2]).astype(np.int16) - 2 ** (form.bits - 1)
    return np.swapaxes(codes, -1, -2).astype(form.storage)


def _order(source: Source, module: str, args: Config, groups: Groups) -> np.ndarray | None:
    """Returns the order in which the columns of a weight are sorted by their groups; `None` if they
    are sorted already.
    """
    name = f"{module}.weight_g_idx"
    wanted = args.data.get("actorder") in ("group", "dynamic", True)
    if name not in source.entries and not wanted:
        return None
    _, dtype = checked(source, name, groups.shape[-1:], (jnp.int32,))
    found = source.read(name, dtype)
    if (found == -1).all():  # not used
        return None
    return order_of(source, name, found, groups.sizes[-1])


def _plain(source: Source, module: str, args: Config, asked: np.dtype | None) -> CodedLeaf:
    """Reads a weight of `int-quantized`, `float-quantized`, `mxfp8-quantized`: a code per byte."""
    integers = args.one_of("type", ("int", "float"), "int") == "int"
    form: Any = Integer(8) if integers else jnp.dtype(jnp.float8_e4m3fn)
    shape, codes = _stored(source, f"{module}.weight", form.storage if integers else form)
    powers = source.dtype(f"{module}.weight_scale") == np.uint8
    groups, dtype = _groups(source, module, args, shape, (jnp.uint8,) if powers else FLOATS)
    zeros = _zeros(source, module, args, groups, Integer(8), packed=False) if integers else ()

    def decode(codes: np.ndarray, scale: np.ndarray, *zeros: np.ndarray) -> list[np.ndarray]:
        return [codes, scale.view(E8M0) if powers else scale, *zeros]

    real = real_dtype(source, asked, _HALF if powers else dtype)
    form, kind = (mxfp8_e4m3, E8M0) if powers else (form, dtype)
    like = weight(groups, form, kind, real, zero_point=bool(zeros))
    tensors = (f"{module}.weight", codes), (f"{module}.weight_scale", dtype), *zeros
    return _leaf(source, module, tensors, like, decode)


def _small_floats(source: Source, module: str, args: Config, asked: np.dtype | None) -> CodedLeaf:
    """Reads a weight of `nvfp4-pack-quantized` or `mxfp4-pack-quantized`: two codes per byte, the
    first in the low half. Codes of nvfp4 are divided by its single scale.
    """
    stored, dtype = _stored(source, f"{module}.weight_packed", np.dtype(np.uint8))
    shape, ones = (*stored[:-1], 2 * stored[-1]), (1,) * len(stored)
    second = f"{module}.weight_global_scale"
    two = second in source.entries
    form = nvfp4 if two else mxfp4
    kinds = (jnp.float8_e4m3fn,) if two else (jnp.uint8,)
    groups, kind = _groups(source, module, args, shape, kinds)
    if groups.sizes != (*ones[:-1], min(form.size, shape[-1])):
        args.refuse("group_size", f"{form.size}, of {form.name}")
    scale: Any = E8M0
    more: tuple[tuple[str, np.dtype], ...] = ()
    if two:
        _, real = checked(source, second, None, (jnp.float32,))
        if _wide(source.entries[second].shape):
            checked(source, second, (1,), (real,))
        more = ((second, real),)
        entries = abstract(groups.scale_shape, kind)
        scale = QTensor(entries, abstract(ones, real), qtype=kind, dtype=real)

    def decode(codes: np.ndarray, scale: np.ndarray, *second: np.ndarray) -> list[np.ndarray]:
        values = repacked(codes.reshape(-1, codes.shape[-1]), 4, shape[-1])
        with np.errstate(divide="ignore"):
            parts = [scale, np.float32(1) / second[0]] if second else [scale.view(E8M0)]
        return [values, *parts]

    like = weight(groups, form, scale, real_dtype(source, asked, _HALF))
    tensors = (f"{module}.weight_packed", dtype), (f"{module}.weight_scale", kind), *more
    return _leaf(source, module, tensors, like, decode)


def _leaf(
    source: Source,
    module: str,
    tensors: tuple[tuple[str, np.dtype], ...],
    like: QTensor,
    decode: Callable[..., list[np.ndarray]],
) -> CodedLeaf:
    """Returns the weight of a module, with what has already been read from it."""
    read = {f"{module}.weight_{end}" for end in ("shape", "g_idx", "zero_point")}
    consumed = read.intersection(source.entries) - {name for name, _ in tensors}
    return CodedLeaf(f"{module}.weight", tensors, like, decode, tuple(sorted(consumed)))


def _stored(source: Source, name: str, dtype: np.dtype) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and dtype of a tensor of codes with two or three axes."""
    shape, found = checked(source, name, None, (dtype,))
    if not 2 <= len(shape) <= 3 or 0 in shape:
        refuse(
            source,
            name,
            "is not a matrix.",
            given=f"{found.name}{list(shape)}",
            expected="two axes, or three if matrices are stacked",
        )
    return shape, found


READ = {
    "pack-quantized": _packed,
    "int-quantized": _plain,
    "float-quantized": _plain,
    "mxfp8-quantized": _plain,
    "nvfp4-pack-quantized": _small_floats,
    "mxfp4-pack-quantized": _small_floats,
}
"""The function that reads the weights of each format."""
