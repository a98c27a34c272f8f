"""Checkpoints of bitsandbytes: 4 bits (nf4, fp4), whose scales may be quantized too, and LLM.int8.

A weight `w` [N, K] has

    w                                    uint8 [N * K / 2, 1]: two codes a byte, the first high
    w.quant_map                          float32 [16]: the number of each code
    w.absmax                             float32, the scale of each block of the flattened weight;
                                         or uint8, codes of scales
    w.nested_absmax, w.nested_quant_map  float32: a scale for 256 scales, the number of each code
    w.quant_state.bitsandbytes__nf4      uint8, JSON: shape, block size, dtype, and the offset of
                                         all scales

Blocks are within rows if the block size divides K; otherwise the weight is an error. Scales that
are quantized in blocks of 256 stay quantized if these blocks are whole rows of scales or parts of
one row; otherwise they are decoded to float32. Codes may be stored in another dtype, as
`bnb_4bit_quant_storage` says: the bytes are the same.

A weight `m.weight` [N, K] of LLM.int8 is int8, and has

    m.SCB            float32 [N]: 127 times the scale of each row
    m.weight_format  uint8: 0, rows; it may be missing

Sources: https://github.com/bitsandbytes-foundation/bitsandbytes (0.50); Dettmers et al., "QLoRA",
arXiv:2305.14314.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ... import QTensor
from ...extend import Groups
from ...numerics import Codebook, Integer, nf4
from .codec import (
    CodedLeaf,
    Config,
    Encoded,
    abstract,
    check_names_in_float,
    codes_of,
    module_of,
    real_dtype,
    refuse,
    refuse_leaf,
    repacked,
    scale_of,
    shape_and_dtype,
    weight,
)
from .safetensors import Source

_STATE, _ROWS = ".quant_state.bitsandbytes__", ".SCB"

BITSANDBYTES_MARKS = (f"{_STATE}nf4", f"{_STATE}fp4", ".absmax", _ROWS, ".weight_format")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_U8, _I8, _F32 = np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.float32)
_STORAGE = tuple(map(jnp.dtype, ("int8", "float16", "bfloat16", "float32", "float64")))
_DTYPES = {name: jnp.dtype(name) for name in ("float16", "bfloat16", "float32")}
_MOST = 10_000
"""Maximum size in bytes of the description of a weight."""


class LayerConfig(NamedTuple):
    """The config of a weight: the dtype of its real array."""

    dtype: str


def bitsandbytes_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    for name in source.entries:
        if name.endswith(_ROWS):
            yield _int8(source, name.removesuffix(_ROWS), dtype)
        path, mark, kind = name.partition(_STATE)
        if mark and kind in ("nf4", "fp4"):
            yield _leaf(source, path, name, kind, dtype)


def _leaf(source: Source, path: str, state: str, kind: str, asked: np.dtype | None) -> CodedLeaf:
    state_config = _read_state(source, state)
    state_config.one_of("quant_type", (kind,))
    size, shape = state_config.integer("blocksize"), state_config.data.get("shape")
    rows, columns = state_config.two_sizes("shape", shape, "two sizes")
    if columns % size or columns % 2:
        refuse(source, path, f"has blocks of {size} that cross rows of {columns}.")
    storage = source.dtype(path) if path in source.entries else _U8
    total = rows * columns // 2
    storage = storage if total % storage.itemsize == 0 else _U8
    shape_and_dtype(source, path, (total // storage.itemsize, 1), (_U8, *_STORAGE))
    form, code_order = _table(source, f"{path}.quant_map", 16, kind)
    pairs = _pairs(code_order)
    groups = Groups((rows, columns), (1, size))
    count = columns // size
    tensors: list[tuple[str, np.dtype]] = [(path, storage)]
    consumed = [state, f"{path}.quant_map"]
    _, absmax = shape_and_dtype(source, f"{path}.absmax", (rows * count,), (_U8, _F32))
    tensors.append((f"{path}.absmax", absmax))
    scale, decode_scales = _F32, _unchanged
    if absmax == _U8:
        scale, decode_scales = _nested(source, path, state_config, rows, count)
        tensors.append((f"{path}.nested_absmax", _F32))
        consumed.append(f"{path}.nested_quant_map")

    def decode(codes: np.ndarray, *scales: np.ndarray) -> list[np.ndarray]:
        raw = np.ascontiguousarray(codes).reshape(-1).view(_U8).reshape(rows, -1)
        values = repacked(raw, 4, columns, convert=partial(np.take, pairs))
        return [values, *decode_scales(*scales)]

    real = asked or _DTYPES[state_config.one_of("dtype", tuple(_DTYPES))]
    template = weight(groups, form, scale, real_dtype(source, real, None))
    return CodedLeaf(path, tuple(tensors), template, decode, tuple(consumed))


def _int8(source: Source, module: str, asked: np.dtype | None) -> CodedLeaf:
    """Returns a weight of LLM.int8."""
    path, scales, layout = f"{module}.weight", f"{module}{_ROWS}", f"{module}.weight_format"
    shape, _ = shape_and_dtype(source, path, None, (_I8,), axes=(2,))
    shape_and_dtype(source, scales, shape[:1], (_F32,))
    consumed = [layout] if layout in source.entries else []
    for name in consumed:
        shape_and_dtype(source, name, (), (_U8,))
        if source.read(name, _U8).item() != 0:
            layout = source.read(name, _U8).item()
            refuse(source, name, f"is {layout}, a layout for kernels of some GPUs, not 0.")

    def decode(codes: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        return [codes, rows * np.float32(1 / 127)]

    template = weight(
        Groups(shape, (1, shape[1])), Integer(8), _F32, real_dtype(source, asked, None)
    )
    return CodedLeaf(path, ((path, _I8), (scales, _F32)), template, decode, tuple(consumed))


def _read_state(source: Source, name: str) -> Config:
    """Returns the description of a weight."""
    (length, *_), _ = shape_and_dtype(source, name, None, (_U8,))
    text = source.read(name, _U8).tobytes() if length <= _MOST else b""
    try:
        return Config(json.loads(text), name)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        refuse(source, name, f"is not JSON of at most {_MOST} bytes: {length} bytes.")


def _table(source: Source, name: str, count: int, label: str) -> tuple[Codebook, np.ndarray]:
    """Returns the format of codes, and the entry of the format for each code: tables in files need
    not be sorted, and may have a zero of either sign.
    """
    shape_and_dtype(source, name, (count,), (_F32,))
    numbers = source.read(name, _F32)
    entries = np.unique(numbers)
    if not np.isfinite(numbers).all() or len(entries) < 2:
        refuse(source, name, f"holds {len(entries)} numbers, not {count} finite ones.")
    values = tuple(map(float, entries))
    form = nf4 if values == nf4.entries else Codebook(values, label)
    return form, np.searchsorted(entries, numbers).astype(np.uint8)


def _pairs(code_order: np.ndarray) -> np.ndarray:
    """Returns a table for each byte: codes replaced by places, the first in the low half."""
    byte = np.arange(256)
    return code_order[byte >> 4] | code_order[byte & 15] << np.uint8(4)


def _unchanged(*scales: np.ndarray) -> Sequence[np.ndarray]:
    """Returns scales that are not quantized."""
    return scales


def _nested(
    source: Source, path: str, state_config: Config, rows: int, count: int
) -> tuple[Any, Callable[..., list[np.ndarray]]]:
    """Returns scales that are codes of a table, with a scale and an offset: the abstract QTensor,
    or float32 if its blocks would cross rows; and the function that makes its leaves.
    """
    size = state_config.integer("nested_blocksize")
    offset = state_config.data.get("nested_offset")
    if type(offset) not in (int, float) or not np.isfinite(np.float32(offset)):
        state_config.refuse("nested_offset", "a finite number")
    offset = np.float32(offset)
    shape_and_dtype(source, f"{path}.nested_absmax", (-(-rows * count // size),), (_F32,))
    name = f"{path}.nested_quant_map"
    form, code_order = _table(source, name, 256, "scales")
    if size % count and count % size:
        entries = source.read(name, _F32)

        def dequantized(codes: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
            return [entries[codes] * np.repeat(scales, size)[: codes.size] + offset]

        return _F32, dequantized
    blocks = (min(max(size // count, 1), rows), min(size, count))
    groups = Groups((rows, count), blocks)
    template = QTensor(
        abstract((rows, count), _U8),
        abstract(groups.scale_shape, _F32),
        offset=abstract((1, 1), _F32),
        qtype=form,
        blocks=groups.blocks,
    )
    return template, lambda codes, scales: [code_order[codes], scales, offset.reshape(1)]


def encode_bitsandbytes(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor of nf4, without quantized scales.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    module_of(path, leaf, "bitsandbytes")
    plain = leaf.offset is None and leaf.order is None and leaf.scale.dtype == _F32
    size = leaf.groups.sizes[-1]
    fits = leaf.ndim == 2 and leaf.groups.sizes[0] == 1
    power = size >= 32 and size & (size - 1) == 0 and leaf.shape[-1] % size == 0
    if leaf.qtype != nf4 or not (plain and fits and power) or isinstance(leaf.scale, QTensor):
        expected = "matrices of nf4, float32 scales in blocks of 32, 64, 128 or so along rows"
        fix = "quantize it with jqx.QSpec('nf4', jqx.per_block({0: 1, 1: 64})), or leave it."
        refuse_leaf(path, leaf, "bitsandbytes", expected=expected, fix=fix)
    dtype = np.dtype(leaf.dtype).name
    state = {"quant_type": "nf4", "blocksize": size, "dtype": dtype, "shape": list(leaf.shape)}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors = {
        path: (_U8, (leaf.size // 2, 1)),
        f"{path}.absmax": (_F32, (leaf.size // size,)),
        f"{path}.quant_map": (_F32, (16,)),
        f"{path}{_STATE}nf4": (_U8, text.shape),
    }

    def make(q: QTensor) -> list[np.ndarray]:
        codes = codes_of(q).reshape(-1, 2)
        pairs = codes[:, :1] << np.uint8(4) | codes[:, 1:]
        return [pairs, scale_of(q).reshape(-1), np.asarray(nf4.entries, np.float32), text]

    return Encoded(tensors, make, LayerConfig(dtype))


def bitsandbytes_config(layers: Mapping[str, LayerConfig], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint.

    Raises:
      ValueError: if loaders would skip a layer.
    """
    check_names_in_float(layers, floats, "bitsandbytes")
    layer, *_ = layers.values()
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": layer.dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(floats),
    }
