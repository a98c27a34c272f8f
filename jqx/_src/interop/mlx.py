"""Checkpoints of MLX: affine codes of 2 to 8 bits with float minimums, mxfp4, mxfp8, nvfp4.

A layer `m` with a weight [N, K] has

    m.weight   uint32 [N, K * bits / 32]: streams of codes
    m.scales   [N, K / group]: of the dtype of the model; E8M0, or the bits of float8_e4m3, as uint8
    m.biases   [N, K / group], of the dtype of the scales: a weight is scale * code + bias. Only
               if the mode is affine, with unsigned codes; scales may be negative.

Embedding tables are quantized in the same way as matrices. MLX computes in the dtype of the scales:
in float32 its weights equal those of jqx; in 16 bits it rounds the product before it adds the bias.

Source: https://ml-explore.github.io/mlx (mlx.core.quantize, version 0.32).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ... import QTensor
from ...extend import Groups
from ...numerics import Block, Integer, format_of, mxfp4, mxfp8_e4m3, nvfp4
from ..numerics.lookup import E8M0
from .codec import (
    FLOATS,
    CodedLeaf,
    Config,
    Encoded,
    abstract,
    codes_of,
    for_rows,
    minimums_of,
    module_of,
    real_dtype,
    refuse,
    refuse_leaf,
    repacked,
    scale_of,
    shape_and_dtype,
    stream_length,
    to_stream,
    weight,
)
from .safetensors import Source

MLX_MARKS = (".scales", ".biases")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_FLOATS = {"mxfp4": mxfp4, "mxfp8": mxfp8_e4m3, "nvfp4": nvfp4}
_U32 = np.dtype(np.uint32)
_U8 = np.dtype(np.uint8)


class LayerConfig(NamedTuple):
    """The config of a layer."""

    group_size: int
    bits: int
    mode: str


def mlx_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    assert source.config is not None
    config = Config(source.config["quantization"], "quantization")
    end = ".scales"
    for name in source.entries:
        module = name.removesuffix(end)
        if name.endswith(end) and config.data.get(module) is not False:
            layer = config.part(module) if isinstance(config.data.get(module), Mapping) else config
            yield _leaf(source, module, _layer_config(layer, layer is config), dtype)


def _layer_config(config: Config, of_model: bool) -> LayerConfig:
    """Returns the config of a layer. That of the whole model must say sizes; in that of one layer
    they have defaults.
    """
    mode = config.one_of("mode", ("affine", *_FLOATS), "affine")
    for key in ("group_size", "bits") if of_model and mode == "affine" else ():
        config.integer(key)
    if mode == "affine":
        return LayerConfig(config.integer("group_size", 64), config.one_of("bits", _BITS, 4), mode)
    form = _FLOATS[mode]
    size = config.integer("group_size", form.size)
    if size != form.size:
        config.refuse("group_size", f"{form.size}, of {mode}")
    return LayerConfig(size, config.one_of("bits", (form.bits,), form.bits), mode)


def _leaf(source: Source, module: str, layer: LayerConfig, asked: np.dtype | None) -> CodedLeaf:
    size, bits, mode = layer
    names = [f"{module}.{end}" for end in ("weight", "scales", "biases")]
    stored, _ = shape_and_dtype(source, names[0], None, (_U32,))
    columns = stored[-1] * 32 // bits if stored else 0
    if len(stored) not in (2, 3) or stored[-1] * 32 % bits or columns % size or 0 in stored:
        problem = f"of {list(stored)} words does not hold whole groups of {size} {bits}-bit codes."
        refuse(source, names[0], problem)
    shape = (*stored[:-1], columns)
    groups = Groups(shape, (*(1,) * (len(shape) - 1), size))
    entries = (*shape[:-1], columns // size)
    kinds = FLOATS if mode == "affine" else (_U8,)
    _, kind = shape_and_dtype(source, names[1], entries, kinds)
    tensors = [(names[0], _U32), (names[1], kind)]
    parts: dict[str, Any] = {}
    real, scale, form = real_dtype(source, asked, kind), kind, Integer(bits, signed=False)
    if mode == "affine":
        shape_and_dtype(source, names[2], entries, (kind,))
        tensors.append((names[2], kind))
        parts["offset"] = abstract(groups.scale_shape, kind)
    else:
        form, scale = _FLOATS[mode], E8M0
        if form == nvfp4:
            unit_scale = abstract((1,) * len(shape), jnp.float32)
            code = jnp.dtype(jnp.float8_e4m3fn)
            scale = QTensor(abstract(groups.scale_shape, code), unit_scale, qtype=code)

    def decode(codes: np.ndarray, scales: np.ndarray, *biases: np.ndarray) -> list[np.ndarray]:
        values = repacked(codes.reshape(-1, codes.shape[-1]), bits, columns)
        if mode == "mxfp8":
            values = values.view(jnp.float8_e4m3fn)
        if mode == "nvfp4":
            return [values, scales.view(jnp.float8_e4m3fn), np.ones(1, np.float32)]
        return [values, scales if mode == "affine" else scales.view(E8M0), *biases]

    template = weight(groups, form, scale, real, **parts)
    return CodedLeaf(names[0], tuple(tensors), template, decode)


def encode_mlx(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    module, form = module_of(path, leaf, "MLX"), format_of(leaf.qtype)
    rows = set(leaf.groups.sizes[:-1]) == {1}
    size = leaf.groups.sizes[-1]
    fits = leaf.ndim in (2, 3) and leaf.order is None and leaf.shape[-1] % max(size, 1) == 0
    if isinstance(form, Block):
        names = {block_form: mode for mode, block_form in _FLOATS.items()}
        block_form = form in names and size == form.size and rows
        inner = leaf.scale.scale if isinstance(leaf.scale, QTensor) else None
        if fits and block_form and leaf.offset is None and (inner is None or inner.size == 1):
            return _floats(path, module, leaf, LayerConfig(size, form.bits, names[form]))
    elif isinstance(form, Integer) and fits and form.bits in _BITS and size in _GROUPS:
        return _affine(path, module, leaf, form)
    bits, groups = (", ".join(map(str, sizes)) for sizes in (_BITS, _GROUPS))
    expected = f"integers of {bits} bits in groups of {groups}, mxfp4, mxfp8 or nvfp4"
    fix = "quantize it so with inputs in order, leave it in float, or write compressed-tensors."
    refuse_leaf(path, leaf, "MLX", expected=expected, fix=fix)


def _affine(path: str, module: str, leaf: QTensor, form: Integer) -> Encoded:
    bits, size = form.bits, leaf.groups.sizes[-1]
    entries = (*leaf.shape[:-1], leaf.shape[-1] // size)
    kind = _kind_of(leaf)
    tensors = {
        f"{module}.weight": (_U32, (*leaf.shape[:-1], stream_length(leaf.shape[-1], bits) // 4)),
        f"{module}.scales": (kind, entries),
        f"{module}.biases": (kind, entries),
    }

    def make(q: QTensor) -> list[np.ndarray]:
        codes = codes_of(q).astype(np.int16) + (2 ** (bits - 1) if form.signed else 0)
        scale = for_rows(scale_of(q), q).astype(np.float64)
        words = to_stream(codes.astype(np.uint8), bits).view("<u4")
        return [words, scale.astype(kind), minimums_of(path, q, scale, kind, "MLX")]

    return Encoded(tensors, make, LayerConfig(size, bits, "affine"))


def _kind_of(leaf: QTensor) -> np.dtype:
    """Returns the dtype of scales and biases: that of the scale, if it can hold both."""
    kind, offset = np.dtype(leaf.scale.dtype), leaf.offset
    is_quantized = isinstance(leaf.scale, QTensor) or isinstance(offset, QTensor)
    fits = leaf.zero_point is None and (offset is None or offset.dtype == kind)
    return kind if fits and not is_quantized else np.dtype(np.float32)


def _floats(path: str, module: str, leaf: QTensor, layer: LayerConfig) -> Encoded:
    """Encodes a weight of mxfp4, mxfp8 or nvfp4."""
    columns = leaf.shape[-1]
    tensors = {
        f"{module}.weight": (_U32, (*leaf.shape[:-1], columns * layer.bits // 32)),
        f"{module}.scales": (_U8, (*leaf.shape[:-1], columns // layer.group_size)),
    }

    def make(q: QTensor) -> list[np.ndarray]:
        scale: Any = q.scale
        if isinstance(scale, QTensor):
            if np.asarray(scale.scale).item() != 1:
                expected = "nvfp4 whose scales have the factor 1"
                fix = "quantize it to mxfp4, or write compressed-tensors."
                refuse_leaf(path, q, "MLX", expected=expected, fix=fix)
            scale = scale.values
        codes = codes_of(q) if layer.bits == 8 else to_stream(codes_of(q), layer.bits)
        return [np.ascontiguousarray(codes).view("<u4"), np.asarray(scale).view(_U8)]

    return Encoded(tensors, make, layer)


def mlx_config(layers: Mapping[str, LayerConfig], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization` of a checkpoint."""
    (common, _), *_ = Counter(layers.values()).most_common(1)
    overrides = {
        path.removesuffix(".weight"): x._asdict() for path, x in layers.items() if x != common
    }
    return {**common._asdict(), **overrides, **dict.fromkeys(floats, False)}
