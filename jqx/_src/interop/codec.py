"""What formats of checkpoints have in common: a QTensor that is made from tensors of a file
(`CodedLeaf`), the tensors that a QTensor becomes (`Encoded`), and codes in streams of bits.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import fail
from ..numerics.lookup import format_of
from ..numerics.packing import packed_length, planes_of
from ..numerics.qtype import Integer
from ..statistics.granularity import Groups
from ..tensor.layout import Layout, Packing
from ..tensor.qtensor import QTensor
from .config import Config
from .safetensors import Source
from .tree import Read


@dataclasses.dataclass(frozen=True)
class CodedLeaf:
    """A QTensor of a checkpoint.

    Attributes:
      path: name of the QTensor: that of the weight before it was quantized.
      tensors: name and dtype of each tensor of the file that it is made from.
      like: the abstract QTensor, of `jax.ShapeDtypeStruct`.
      decode: makes the leaves of the QTensor (in the order of `jax.tree.leaves`) from the tensors,
        NumPy arrays in that order. The results have the sizes and dtypes of `like`; they are then
        reshaped to its shapes.
      consumed: names of the tensors that were already read to find all this.
    """

    path: str
    tensors: tuple[tuple[str, np.dtype], ...]
    like: QTensor
    decode: Callable[..., Sequence[np.ndarray]]
    consumed: tuple[str, ...] = ()

    def make(self, read: Read) -> QTensor:
        """Returns the QTensor of arrays from `read`; it is abstract if these are."""
        parts = [read(name, dtype) for name, dtype in self.tensors]
        if any(isinstance(part, jax.ShapeDtypeStruct) for part in parts):
            return self.like
        specs, structure = jax.tree.flatten(self.like)
        arrays = self.decode(*parts)
        for leaf, spec in zip(arrays, specs, strict=True):
            assert leaf.dtype == spec.dtype, f"{self.path}: {leaf.dtype} is not {spec.dtype}"
        return structure.unflatten(
            leaf.reshape(spec.shape) for leaf, spec in zip(arrays, specs, strict=True)
        )


def weight(
    groups: Groups,
    qtype: Any,
    scale: Any,
    dtype: np.dtype,
    *,
    zero_point: bool = False,
    swapped: bool = False,
    **parts: Any,
) -> QTensor:
    """Returns the QTensor of a weight, of `jax.ShapeDtypeStruct`.

    Codes of 8 bits keep their layout. Others are packed along the last axis of the file. This is
    also the last axis of the real array, or the one before it if `swapped`.

    Args:
      groups: shape of the weight, and which elements share a scale.
      qtype: format of the codes.
      scale: dtype of the scales, or an abstract QTensor.
      dtype: dtype of the real array.
      zero_point: whether there are zero points, as many as scales.
      swapped: whether the last two axes are swapped in the file.
      **parts: other fields of the QTensor.
    """
    form, shape = format_of(qtype), groups.shape
    stored = (*shape[:-2], shape[-1], shape[-2]) if swapped else shape
    packing, kind = None, form.storage
    if form.bits < 8:
        packing, kind = Packing(-2 if swapped else -1, stored[-1]), jnp.uint8
        stored = (*stored[:-1], packed_length(stored[-1], form.bits))
    scales = scale if isinstance(scale, QTensor) else abstract(groups.scale_shape, scale)
    return QTensor(
        abstract(stored, kind),
        scales,
        abstract(groups.scale_shape, form.storage) if zero_point else None,
        qtype=qtype,
        dtype=dtype,
        blocks=groups.blocks,
        layout=Layout(packing, swapped) if swapped or packing else None,
        **parts,
    )


def abstract(shape: Sequence[int], dtype: Any) -> Any:
    """Returns a placeholder of an array whose numbers are not read."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def refuse(source: Source, name: str, problem: str, *, given: str = "") -> NoReturn:
    """Raises an error: a tensor of a checkpoint contradicts its config or the other tensors."""
    fix = "download the checkpoint again, or correct its config: one of them is damaged or differs."
    problem = f"the tensor {name!r} of {source.path!r} {problem}"
    raise fail("interop.read", problem, given=given, fix=fix)


def shape_and_dtype(
    source: Source,
    name: str,
    shape: Sequence[int] | None,
    dtypes: Sequence[Any],
    reason: str = "",
    *,
    axes: Sequence[int] = (),
) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and dtype of a tensor, after checking them.

    Args:
      source: the checkpoint.
      name: name of the tensor.
      shape: the expected shape; `None` for any.
      dtypes: the allowed dtypes.
      reason: the reason for the expected shape.
      axes: the allowed numbers of axes, none of which may be empty; `()` for any.
    """
    if name not in source.entries:
        problem = f"the tensor {name!r} is missing in {source.path!r}."
        fix = "download the checkpoint again; if this is a part of it, read the whole folder."
        raise fail("interop.read", problem, fix=fix)
    stored, dtype = source.entries[name].shape, source.dtype(name)
    allowed = {jnp.dtype(option) for option in dtypes}
    fits = shape is None or tuple(shape) == stored
    if axes:
        fits = len(stored) in axes and 0 not in stored
        reason = f"with {' or '.join(map(str, axes))} axes, none of them empty"
    if dtype not in allowed or not fits:
        names = " or ".join(sorted(option.name for option in allowed))
        kind = f"{names}{'' if shape is None else list(shape)}{reason and f', {reason}'}"
        refuse(source, name, f"is {dtype.name}{list(stored)}; its layer needs {kind}.")
    return stored, dtype


def modules_with(source: Source, end: str) -> list[str]:
    """Returns the modules that have a tensor whose name ends so, in the order of the file."""
    return [name.removesuffix(end) for name in source.entries if name.endswith(end)]


FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)
"""Dtypes of scales that are floats."""


def real_dtype(source: Source, asked: np.dtype | None, scale: np.dtype | None) -> np.dtype:
    """Returns the dtype of a real array: the requested dtype; else that of its scale, if this is a
    float dtype of 16 or 32 bits; else that of the model in its config; else float32.
    """
    if asked is not None:
        return asked
    if scale in [jnp.dtype(kind) for kind in FLOATS]:
        assert scale is not None
        return scale
    config = source.config or {}
    name = config.get("dtype", config.get("torch_dtype"))
    by_name = {kind.__name__: jnp.dtype(kind) for kind in FLOATS}
    return by_name.get(name if isinstance(name, str) else "", jnp.dtype(jnp.float32))


def group_size(source: Source, config: Config, scales: str, columns: int) -> int:
    """Returns the size of the groups of GPTQ and AWQ. If the config does not say it, readers take
    128 or, old ones, the whole row; the number of scales tells which.
    """
    entry = source.entries.get(scales)
    default = -1 if entry is not None and entry.shape[:1] == (1,) else 128
    stored = config.data.get("group_size", default)
    return columns if stored == -1 else min(config.integer("group_size", 128), columns)


def order_of(source: Source, name: str, groups: np.ndarray, size: int) -> np.ndarray | None:
    """Returns the order of elements that are sorted by groups; `None` if they are sorted already.

    Args:
      source: the checkpoint that `groups` come from.
      name: name of their tensor.
      groups: the group of each element of an axis, as in `g_idx` of GPTQ.
      size: size of a group; the last group may be smaller.

    Raises:
      ValueError: if a group has another size.
    """
    order = np.argsort(groups, kind="stable").astype(np.int32)
    regular = np.arange(len(groups), dtype=np.int64) // size
    if not np.array_equal(groups[order], regular):
        problem = f"puts {groups.min()} to {groups.max()} elements in a group, not always {size}."
        refuse(source, name, problem)
    return None if np.array_equal(order, np.arange(len(groups))) else order


def order_field(order: np.ndarray | None, ndim: int) -> dict[str, Any]:
    """Returns the field `order` of an abstract QTensor; nothing for `None`."""
    return {} if order is None else {"order": abstract((*(1,) * (ndim - 1), len(order)), "int32")}


# A QTensor in a checkpoint format of another library: its tensors and their numbers.


Tensors = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


class Encoded(NamedTuple):
    """A QTensor in a format, before its numbers are computed.

    Attributes:
      tensors: dtype and shape of the tensors to write, by name.
      make: computes these from the QTensor, whose leaves are NumPy arrays, by name.
      layer: the config of the QTensor: a hashable value that the format defines.
    """

    tensors: Tensors
    make: Callable[[QTensor], Mapping[str, np.ndarray]]
    layer: Any


def refuse_leaf(path: str, leaf: Any, format: str, *, expected: str = "", fix: str) -> NoReturn:
    """Raises an error: a format cannot hold a tensor."""
    problem = f"{format} cannot hold the tensor {path!r}."
    raise fail("interop.write", problem, given=repr(leaf), expected=expected, fix=fix)


def check_names_in_float(
    layers: Iterable[str], floats: Sequence[str], format: str, *, inside: bool = False
) -> None:
    """Checks that loaders that skip the layers in float do not skip quantized ones. transformers
    skips modules in a module of the list, and those whose names end in one.

    Args:
      layers: names of quantized weights.
      floats: names of weights in float.
      format: name of the format.
      inside: whether some loaders also skip names that have a name of the list anywhere.
    """
    skipped = [name.removesuffix(".weight") for name in floats]
    for path in layers:
        module = path.removesuffix(".weight")
        names = [
            name
            for name in skipped
            if module.endswith(name)
            or f"{module}.".startswith(f"{name}.")
            or (inside and name in module)
        ]
        if names:
            expected = f"no layer in float such as {names[0]!r}: loaders skip names with this part"
            fix = f"quantize {names[0]!r} too, or write GPTQ or compressed-tensors."
            refuse_leaf(path, "a quantized layer", format, expected=expected, fix=fix)


def module_of(path: str, leaf: Any, format: str) -> str:
    """Returns the module of a weight, after checking that it has the name of a weight."""
    if not path.endswith(".weight"):
        fix = "name it <module>.weight with jqx.interop.named(params, names), or leave it in float."
        refuse_leaf(path, leaf, format, fix=fix)
    if 0 in leaf.shape:
        refuse_leaf(path, leaf, format, expected="weights", fix="leave it in float.")
    return path.removesuffix(".weight")


def as_numpy(path: str, leaf: Any, format: str) -> Any:
    """Returns a leaf of NumPy arrays, after checking that other libraries read finite numbers: a
    QTensor, or a separate scale of an activation or a cache. Other arrays may hold anything.

    Raises:
      ValueError: if a scale, a minimum or a code is NaN or infinite, if scales make all codes 0, or
        if a separate scale is not above 0.
    """
    leaf = jax.tree.map(np.asarray, leaf)
    wrong = None
    if isinstance(leaf, QTensor):
        wrong = _wrong_numbers(leaf)
    elif _SEPARATE.fullmatch(path) and jnp.issubdtype(leaf.dtype, jnp.floating):
        scales = leaf.astype(np.float64)
        is_valid = (np.isfinite(scales) & (scales > 0)).all()
        wrong = None if is_valid else "a scale that is not above 0"
    if wrong is not None:
        shape = leaf if isinstance(leaf, QTensor) else f"{leaf.dtype.name}{list(leaf.shape)}"
        fix = "check the weight or the statistics that it comes from; jqx.save keeps it as it is."
        refuse_leaf(path, f"{shape}: {wrong}", format, fix=fix)
    return leaf


_SEPARATE = re.compile(r"(.*[./])?(input|output|[qkv])(_global)?_scale")
"""Names of the scales of activations and caches."""


def _wrong_numbers(q: QTensor) -> str | None:
    """Returns what is wrong with the numbers of a QTensor; `None` if nothing is."""
    scale, offset, codes = scale_of(q).astype(np.float64), q.real_offset(), np.asarray(q.values)
    if not np.isfinite(scale).all():
        return "scales that are NaN or infinite"
    if offset is not None and not np.isfinite(np.asarray(offset).astype(np.float64)).all():
        return "minimums that are NaN or infinite"
    if jnp.issubdtype(codes.dtype, jnp.floating) and not np.isfinite(codes).all():
        return "codes that are NaN or infinite"
    if not scale.any() and offset is None and codes_of(q).any():
        return "only scales of 0, and codes of other numbers"
    return None


def codes_of(q: QTensor) -> np.ndarray:
    """Returns the codes of a QTensor of NumPy arrays, in the order of its shape: integers as int8
    or uint8, floats as the bits of their format in uint8.
    """
    form, layout, values = format_of(q.qtype), q.layout, np.asarray(q.values)
    signed = form.code_range is not None and form.code_range[0] < 0
    if layout is not None and layout.packing is not None:
        axis = layout.stored_axis
        assert axis is not None
        rows = np.moveaxis(values, axis, -1)
        if layout.kernel == "cpu":  # the codes of a byte are consecutive
            shifts = np.arange(0, 8, form.bits, dtype=np.uint8)
            parts = (rows[..., None] >> shifts) & np.uint8(2**form.bits - 1)
            bits = parts.reshape(*rows.shape[:-1], layout.packing.length)
        else:
            bits = unpack(rows, form.bits, layout.packing.length)
        bits = np.moveaxis(bits, -1, axis)
        offset = 2 ** (form.bits - 1)
        codes = ((bits ^ np.uint8(offset)).view(np.int8) - np.int8(offset)) if signed else bits
    elif layout is not None and layout.int8 and form.storage == np.uint8 and form.bits == 8:
        codes = values.view(np.uint8) ^ np.uint8(128)
    elif layout is not None and layout.uint4:
        codes = values.astype(np.uint8)
    elif form.code_range is None:
        codes = np.asarray(form.to_bits(jax.numpy.asarray(values)))
    else:
        codes = values.astype(np.int8 if signed else np.uint8)
    return np.swapaxes(codes, -1, -2) if layout is not None and layout.swapped else codes


def scale_of(q: QTensor) -> np.ndarray:
    """Returns the scale of a QTensor of NumPy arrays as an array, dequantized if necessary."""
    scale = q.scale
    return np.asarray(scale.dequantize() if isinstance(scale, QTensor) else scale)


def for_rows(x: np.ndarray, q: QTensor) -> np.ndarray:
    """Returns scales or zero points with an entry for each row of each group."""
    shape = (*q.shape[:-1], q.groups.scale_shape[-1])
    x = np.broadcast_to(x, q.groups.scale_shape)
    for axis, n in enumerate(shape):
        if x.shape[axis] != n:
            x = np.take(x, np.arange(n) // q.groups.sizes[axis], axis)
    return x


def integers_of(path: str, q: QTensor, format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, zero points and the group of each column of a matrix of integers with at most
    8 bits, for formats whose codes are unsigned. Columns are in the order of the real array.

    Raises:
      ValueError: if the tensor has a float offset.
    """
    check_no_offset(path, q, format)
    form, columns = format_of(q.qtype), q.shape[-1]
    assert isinstance(form, Integer)
    shift = 2 ** (form.bits - 1) if form.signed else 0
    codes = (codes_of(q).astype(np.int16) + shift).astype(np.uint8)
    zero_points = np.zeros((1,) * q.ndim) if q.zero_point is None else np.asarray(q.zero_point)
    zeros = (for_rows(zero_points.astype(np.int16), q) + shift).astype(np.uint8)
    index = np.arange(columns, dtype=np.int32) // q.groups.sizes[-1]
    if q.order is not None:
        order, groups = np.asarray(q.order).reshape(-1), index.copy()
        index[order] = groups
        codes[..., order] = codes.copy()
    return codes, zeros, index


def check_no_offset(path: str, leaf: QTensor, format: str) -> None:
    """Checks that a tensor has no float minimum, which few formats support."""
    if leaf.offset is not None:
        fix = "write it as MLX or GGUF, or quantize it without a float minimum."
        refuse_leaf(path, leaf, format, fix=fix)


def exact_halves(path: str, q: QTensor, format: str) -> np.ndarray:
    """Returns the scales of a matrix in float16, an entry for each row of each group.

    Raises:
      ValueError: if float16 cannot hold a scale exactly.
    """
    scale = for_rows(scale_of(q), q)
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), scale.astype(np.float32), equal_nan=True):
        fix = "quantize it with scales of float16: calibrator=jqx.calibrators.Rounded()."
        refuse_leaf(path, q, format, expected="scales that float16 holds exactly", fix=fix)
    return halves


def minimums_of(
    path: str, q: QTensor, scale: np.ndarray, dtype: np.dtype, format: str
) -> np.ndarray:
    """Returns the exact minimums that are added to the scaled unsigned codes.

    Args:
      path: path of the QTensor.
      q: integers, of NumPy arrays.
      scale: float64, an entry for each row of each group.
      dtype: dtype of the minimums.
      format: name of the format.

    Raises:
      ValueError: if the dtype cannot hold a minimum exactly.
    """
    form = format_of(q.qtype)
    assert isinstance(form, Integer)
    shift = 2 ** (form.bits - 1) if form.signed else 0
    offset, plain = q.real_offset(), q.zero_point is None and shift == 0
    if plain and offset is not None and offset.dtype == dtype:
        return for_rows(np.asarray(offset), q)
    zero = 0 if q.zero_point is None else for_rows(np.asarray(q.zero_point).astype(np.float64), q)
    minimums = np.zeros_like(scale) if plain else -(zero + shift) * scale
    if offset is not None:
        minimums = minimums + for_rows(np.asarray(offset).astype(np.float64), q)
    with np.errstate(over="ignore"):
        rounded = minimums.astype(dtype)
    if not np.array_equal(rounded.astype(np.float64), minimums, equal_nan=True):
        expected = f"minimums (-zero point * scale) that {dtype.name} holds exactly"
        fix = "quantize it without zero points, or write compressed-tensors."
        refuse_leaf(path, q, format, expected=expected, fix=fix)
    return rounded


# Codes in streams of bits, as in files of other libraries, and packed as in jqx, in NumPy.
#
# A stream is little-endian and dense: code i with b bits takes the bits from i * b on, lowest bit
# first, for any word size in which the bytes are read. A code may cross the boundary of two words.
# Formats differ in the axis along which they pack, and in what they add to a code before packing.


def stream_length(count: int, bits: int, word: int = 4) -> int:
    """Returns the bytes of a stream of `count` codes, in whole words of `word` bytes."""
    return -(-count * bits // (8 * word)) * word


def from_stream(raw: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the codes of streams, one per byte.

    Args:
      raw: uint8, `(..., bytes)`; bytes after the codes are ignored.
      bits: 1 to 8.
      count: number of codes in each stream.

    Returns:
      uint8 `(..., count)`, below `2**bits`.
    """
    if bits == 8:
        return raw[..., :count]
    if bits in (1, 2, 4):
        word = np.dtype("u1" if bits == 1 else "<u2")
        index = _whole(raw, -(-count * bits // 8 // word.itemsize) * word.itemsize)
        return np.take(_codes_of(bits), index.view(word)).view(np.uint8)[..., :count]
    groups = -(-count // 8)  # 8 codes are a whole number of bytes
    wide = _whole(raw, groups * bits).reshape(*raw.shape[:-1], groups, bits)
    if bits == 3:
        low, middle, high = (wide[..., i].astype(np.uint16) for i in range(3))
        index = np.empty((*wide.shape[:-1], 2), np.uint16)
        index[..., 0] = low | (middle & np.uint16(15)) << np.uint16(8)
        index[..., 1] = middle >> np.uint16(4) | high << np.uint16(4)
        codes = np.take(_codes_of(3), index).view(np.uint8)
        return codes.reshape(*raw.shape[:-1], groups * 8)[..., :count]
    codes = np.empty((*wide.shape[:-1], 8), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        code = wide[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            code = code | wide[..., byte + 1] << np.uint8(8 - shift)
        codes[..., i] = code & np.uint8(2**bits - 1)
    return codes.reshape(*raw.shape[:-1], groups * 8)[..., :count]


def _whole(raw: np.ndarray, length: int) -> np.ndarray:
    """Returns the first `length` bytes of streams, padded with zeros."""
    lacking = max(0, length - raw.shape[-1])
    if lacking:
        raw = np.concatenate([raw, np.zeros((*raw.shape[:-1], lacking), np.uint8)], axis=-1)
    return np.ascontiguousarray(raw[..., :length])


@functools.cache
def _codes_of(bits: int) -> np.ndarray:
    """Returns a table of several codes, one per byte, indexed by the value of their bits: 8 codes
    with 1 or 2 bits, 4 codes with 3 or 4 bits.
    """
    count = 8 if bits <= 2 else 4
    entries = np.arange(2 ** (count * bits))
    codes = np.zeros(len(entries), f"<u{count}")
    for i in range(count):
        code = (entries >> (i * bits) & (2**bits - 1)).astype(codes.dtype)
        codes |= code << codes.dtype.type(8 * i)
    return codes


def to_stream(codes: np.ndarray, bits: int, word: int = 4) -> np.ndarray:
    """Inverts `from_stream`: uint8 codes `(..., count)` to bytes `(..., stream_length)`."""
    count = codes.shape[-1]
    groups = -(-count // 8)
    padded = np.zeros((*codes.shape[:-1], groups * 8), np.uint8)
    padded[..., :count] = codes & np.uint8(2**bits - 1)
    padded = padded.reshape(*codes.shape[:-1], groups, 8)
    raw = np.zeros((*codes.shape[:-1], groups, bits), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        raw[..., byte] |= padded[..., i] << np.uint8(shift)
        if shift + bits > 8:
            raw[..., byte + 1] |= padded[..., i] >> np.uint8(8 - shift)
    raw = raw.reshape(*codes.shape[:-1], groups * bits)
    length = stream_length(count, bits, word)
    words = np.zeros((*codes.shape[:-1], length), np.uint8)
    stored = min(length, raw.shape[-1])
    words[..., :stored] = raw[..., :stored]
    return words


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 codes below `2**bits` along the last axis as `QTensor.pack` does."""
    count, start = codes.shape[-1], 0
    packed = np.empty((*codes.shape[:-1], packed_length(count, bits)), np.uint8)
    for width, lowest in planes_of(bits):
        per_byte = 8 // width
        run = -(-count // per_byte)
        plane = packed[..., start : start + run]
        start += run
        plane[..., count:] = 0  # fewer codes than runs
        for i in range(per_byte):
            part = codes[..., i * run : (i + 1) * run]
            if width < bits:
                part = part & np.uint8(2**width - 1 << lowest)
            shift = i * width - lowest
            part = part << np.uint8(shift) if shift > 0 else part >> np.uint8(-shift)
            if i == 0:
                plane[..., : part.shape[-1]] = part
            else:
                plane[..., : part.shape[-1]] |= part
    return packed


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Inverts `pack`: uint8 codes `(..., count)`."""
    codes, start = np.zeros((*packed.shape[:-1], count), np.uint8), 0
    for width, lowest in planes_of(bits):
        per_byte = 8 // width
        run = -(-count // per_byte)
        plane = packed[..., start : start + run]
        for i in range(per_byte):
            part = codes[..., i * run : (i + 1) * run]
            bits_of = (plane[..., : part.shape[-1]] >> np.uint8(i * width)) & np.uint8(2**width - 1)
            part |= bits_of << np.uint8(lowest)
        start += run
    return codes


def repacked(
    raw: np.ndarray,
    bits: int,
    count: int,
    *,
    flip: int = 0,
    order: np.ndarray | None = None,
    convert: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Returns streams packed as `QTensor.pack` does. Only some rows are copied at a time; codes of
    8 bits are changed in place if possible.

    Args:
      raw: words of any size, `(rows, words)`, in any order in memory.
      bits: 1 to 8.
      count: number of codes in a row.
      flip: value that is xor-ed with each code: `2**(bits - 1)` makes signed codes from codes
        stored with `2**(bits - 1)` added.
      order: index of the code of a row at each place; `None` keeps the order.
      convert: makes the streams of some rows from the data of the file, if these are not streams.

    Returns:
      uint8 `(rows, packed_length(count, bits))`; for 8 bits, the codes.
    """
    width = raw.shape[1] * raw.itemsize
    plain = bits == 8 and order is None and convert is None and raw.flags.c_contiguous
    if plain and width == count:
        out = codes = raw.view(np.uint8)
        if not flip:
            return codes
        out = codes if codes.flags.writeable else np.empty_like(codes)
    else:
        out = np.empty((raw.shape[0], count if bits == 8 else packed_length(count, bits)), np.uint8)
    nibbles = bits == 4 and count % 4 == 0 and order is None
    for rows in in_runs(raw.shape[0], width):
        stream = np.ascontiguousarray(raw[rows]).view(np.uint8)
        stream = stream if convert is None else convert(stream)
        if nibbles:
            _repack_nibbles(stream[:, : count // 2], out[rows], flip)
            continue
        codes = from_stream(stream, bits, count)
        codes = codes if order is None else codes[:, order]
        if bits == 8:
            np.bitwise_xor(codes, np.uint8(flip), out=out[rows])
        else:
            out[rows] = pack(codes ^ np.uint8(flip) if flip else codes, bits)
    return out


def _repack_nibbles(raw: np.ndarray, out: np.ndarray, flip: int) -> None:
    """Packs nibbles again: a byte gets one nibble from each half of a row."""
    middle = raw.shape[-1] // 2
    low, high = _spread(raw[:, :middle]), _spread(raw[:, middle:])
    high <<= np.uint16(4)
    high |= low
    if flip:
        high ^= np.uint16(flip * 0x1111)
    out[:] = high.astype("<u2", copy=False).view(np.uint8)


def _spread(x: np.ndarray) -> np.ndarray:
    """Returns the nibbles of bytes, one per byte, the low one in the lower byte of a uint16."""
    wide = x.astype(np.uint16)
    shifted = wide << np.uint16(4)
    shifted |= wide
    shifted &= np.uint16(0x0F0F)
    return shifted


# Rows of bytes in runs, so that temporary data stays in the cache and needs little memory.


_AT_ONCE = 2**17
"""Bytes in a run."""


def in_runs(rows: int, width: int) -> Iterator[slice]:
    """Yields runs of rows of `width` bytes each, which together cover all rows."""
    step = max(1, _AT_ONCE // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
