"""Writes compressed-tensors: the tensors of QTensors, and the config that describes them.

See `_compressed_tensors` for the tensors. Integers become `pack-quantized`, or `int-quantized` if
activations are quantized too. Floats get the format that has their name.
"""

from collections.abc import Mapping
from typing import NoReturn

import jax.numpy as jnp
import numpy as np

from ..numerics import Block, Integer, format_of, mxfp4, mxfp8_e4m3, nvfp4
from ..tensor import QSpec, QTensor
from ._bits import stream_length, to_stream
from ._coded import FLOATS
from ._compressed_config import NAME, LayerConfig
from ._encoded import (
    Encoded,
    check_no_offset,
    codes_of,
    for_rows,
    integers_of,
    module_of,
    refuse_leaf,
    scale_of,
)

_I32, _U8 = np.dtype(np.int32), np.dtype(np.uint8)


def encode(path: str, leaf: QTensor, activation: QSpec | None = None) -> Encoded:
    """Returns the encoded form of a QTensor.

    Args:
      path: name of the QTensor, `<module>.weight`.
      leaf: the QTensor `[out, in]`, or `[experts, out, in]`; it may be abstract.
      activation: how the activation that multiplies it is quantized; `None` leaves it in float.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    module, form = module_of(path, leaf, NAME), format_of(leaf.qtype)
    _check_plain(path, leaf)
    if isinstance(form, Integer):
        return _integers(path, module, leaf, form, activation)
    if leaf.order is not None:
        _refuse(path, leaf, "integers if columns are sorted", "store it as integers")
    if isinstance(form, Block):
        return _blocks(path, module, leaf, form)
    if leaf.qtype != jnp.float8_e4m3fn:
        _refuse(
            path,
            leaf,
            "integers of 2 to 8 bits, float8_e4m3fn, mxfp8_e4m3, mxfp4 or nvfp4",
            "quantize it again in one of these formats",
        )
    return _floats(path, module, leaf)


def _check_plain(path: str, leaf: QTensor) -> None:
    if leaf.ndim not in (2, 3):
        _refuse(path, leaf, "two axes, or three if matrices are stacked", "reshape it")
    check_no_offset(path, leaf, NAME)
    integers = isinstance(format_of(leaf.qtype), Integer)
    tail = leaf.shape[-1] % leaf.groups.sizes[-1] if integers else 0
    if tail:
        _refuse(
            path,
            leaf,
            f"groups of equal size along the last axis: the last group has {tail}",
            "quantize it with a group size that divides its inputs",
        )


def _refuse(path: str, leaf: QTensor, expected: str, fix: str) -> NoReturn:
    refuse_leaf(path, leaf, NAME, expected=expected, fix=f"{fix}, or leave it in float.")


def _integers(
    path: str, module: str, leaf: QTensor, form: Integer, activation: QSpec | None
) -> Encoded:
    """Encodes a weight of integers. Files store codes with half of their levels added, so that
    unsigned codes have a zero point.
    """
    bits, group = form.bits, leaf.groups.sizes[-1]
    if bits > 8:
        _refuse(path, leaf, "integers of 2 to 8 bits", "quantize it to 8 bits")
    entries, kind = _entries(path, leaf)
    whole = group == leaf.shape[-1]
    plain = activation is not None and bits == 8 and whole
    zeros, ordered = leaf.zero_point is not None or not form.signed, leaf.order is not None
    layer = LayerConfig(
        "int-quantized" if plain else "pack-quantized",
        bits,
        "int",
        symmetric=not zeros,
        strategy="channel" if whole else "group",
        group=None if whole else group,
        ordered=ordered,
    )
    *lead, rows, columns = leaf.shape
    words, i8 = stream_length(columns, bits) // 4, np.dtype(np.int8)
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {"weight_scale": (kind, entries)}
    if plain:
        tensors["weight"] = (i8, leaf.shape)
    else:
        tensors["weight_packed"] = (_I32, (*lead, rows, words))
        tensors["weight_shape"] = (np.dtype(np.int64), (leaf.ndim,))
    if zeros:
        packed = (_I32, (*lead, stream_length(rows, bits) // 4, entries[-1]))
        tensors["weight_zero_point"] = (i8, entries) if plain else packed
    if ordered:
        tensors["weight_g_idx"] = (_I32, (columns,))

    def make(q: QTensor) -> Mapping[str, np.ndarray]:
        codes, points, index = integers_of(path, q, NAME)
        made = {"weight_scale": for_rows(scale_of(q), q)}
        if ordered:
            made["weight_g_idx"] = index
        if plain:
            made["weight"] = _signed(codes)
        else:
            made["weight_packed"] = to_stream(codes, bits).view("<i4")
            made["weight_shape"] = np.array(q.shape, np.int64)
        if zeros:
            rows = np.ascontiguousarray(np.swapaxes(points, -1, -2))
            packed = np.swapaxes(to_stream(rows, bits).view("<i4"), -1, -2)
            made["weight_zero_point"] = _signed(points) if plain else packed
        return {f"{module}.{name}": array for name, array in made.items()}

    return Encoded({f"{module}.{name}": kind for name, kind in tensors.items()}, make, layer)


def _signed(codes: np.ndarray) -> np.ndarray:
    """Returns unsigned codes of 8 bits, less 128."""
    return (codes ^ np.uint8(128)).view(np.int8)


def _entries(path: str, leaf: QTensor) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape of scales with an entry for each row, and their dtype."""
    kind = np.dtype(leaf.scale.dtype)
    if kind not in [jnp.dtype(each) for each in FLOATS]:
        _refuse(path, leaf, "scales of float16, bfloat16 or float32", "convert its scale")
    return (*leaf.shape[:-1], leaf.groups.scale_shape[-1]), kind


def _floats(path: str, module: str, leaf: QTensor) -> Encoded:
    """Encodes a weight of float8_e4m3fn."""
    _, kind = _entries(path, leaf)
    *lead, rows, columns = leaf.groups.sizes
    entries: tuple[int, ...] = leaf.groups.scale_shape
    if entries == (1,) * leaf.ndim:
        layer, entries = LayerConfig("float-quantized", 8, "float", strategy="tensor"), (1,)
    elif set(lead) - {1}:
        _refuse(path, leaf, "a scale for each matrix of a stack, or one", "quantize it again")
    elif rows > 1:
        layer = LayerConfig("float-quantized", 8, "float", strategy="block", block=(rows, columns))
    elif columns < leaf.shape[-1]:
        layer = LayerConfig("float-quantized", 8, "float", strategy="group", group=columns)
    else:
        layer = LayerConfig("float-quantized", 8, "float")
    weight, scale = f"{module}.weight", f"{module}.weight_scale"
    code = jnp.dtype(jnp.float8_e4m3fn)

    def make(q: QTensor) -> Mapping[str, np.ndarray]:
        return {weight: codes_of(q).view(code), scale: scale_of(q).reshape(entries)}

    return Encoded({weight: (code, leaf.shape), scale: (kind, entries)}, make, layer)


def _blocks(path: str, module: str, leaf: QTensor, form: Block) -> Encoded:
    """Encodes a weight of mxfp8, mxfp4 or nvfp4."""
    if form not in (mxfp8_e4m3, mxfp4, nvfp4):
        _refuse(path, leaf, "block formats mxfp8_e4m3, mxfp4 or nvfp4", "quantize it again")
    sizes = (*(1,) * (leaf.ndim - 1), min(form.size, leaf.shape[-1]))
    if leaf.groups.sizes != sizes or leaf.shape[-1] % form.size:
        _refuse(path, leaf, f"blocks of {form.size} along the last axis only", "quantize it again")
    scale, entries = f"{module}.weight_scale", leaf.groups.scale_shape
    if form == mxfp8_e4m3:
        code, weight = jnp.dtype(jnp.float8_e4m3fn), f"{module}.weight"
        tensors = {weight: (code, leaf.shape), scale: (_U8, entries)}
        layer = LayerConfig("mxfp8-quantized", 8, "float", strategy="group", group=32)
    else:
        weight = f"{module}.weight_packed"
        tensors = {weight: (_U8, (*leaf.shape[:-1], leaf.shape[-1] // 2)), scale: (_U8, entries)}
        layer = LayerConfig("mxfp4-pack-quantized", 4, "float", strategy="group", group=32)
    second = f"{module}.weight_global_scale"
    if form == nvfp4:
        layer = LayerConfig("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group=16)
        tensors[scale] = (jnp.dtype(jnp.float8_e4m3fn), entries)
        tensors[second] = (np.dtype(np.float32), (1,))
        inner = leaf.scale.scale if isinstance(leaf.scale, QTensor) else None
        if inner is None or inner.size != 1:
            _refuse(path, leaf, "one float scale for all scales of the tensor", "quantize it again")

    def make(q: QTensor) -> Mapping[str, np.ndarray]:
        bits = codes_of(q)
        if form == mxfp8_e4m3:
            return {weight: bits.view(jnp.float8_e4m3fn), scale: np.asarray(q.scale).view(_U8)}
        made = {weight: to_stream(bits, 4, 1)}
        if isinstance(q.scale, QTensor):
            made[scale] = np.asarray(q.scale.values)
            made[second] = _divisor(path, leaf, np.asarray(q.scale.scale).reshape(1))
        else:
            made[scale] = np.asarray(q.scale).view(_U8)
        return made

    return Encoded(tensors, make, layer)


def _divisor(path: str, leaf: QTensor, factor: np.ndarray) -> np.ndarray:
    """Returns the float32 divisor whose reciprocal is nearest to a factor."""
    with np.errstate(divide="ignore"):
        near = np.float32(1) / factor
        both = np.stack([np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.inf)])
        off = np.abs(np.float32(1) / both.astype(np.float32) - factor)
    found = both[np.argmin(off, axis=0), 0].astype(np.float32)
    if not np.isfinite(found).all():
        _refuse(path, leaf, "a scale of all scales with a finite reciprocal", "check the weight")
    return found
