"""Checkpoints of Hugging Face in float8_e4m3: `fbgemm_fp8`, and `fp8` in blocks, as used by
DeepSeek-V3 and Qwen3; mxfp4 of gpt-oss below.

A weight `w` [N, K], such as `m.weight`, is float8_e4m3, and has

    fbgemm_fp8  w_scale float32 [N, 1]; m.input_scale_ub float32 [1], a separate leaf
    fp8         w_scale_inv float32 [ceil(N / 128), ceil(K / 128)]: multiplied, despite its name;
                the last blocks may be smaller ones. float8_e8m0 where `scale_fmt` is ue8m0

Experts may be stacked, [E, N, K]; a weight may have one scale.

Sources: https://huggingface.co/docs/transformers (fbgemm_fp8, finegrained_fp8; 2026); DeepSeek-V3,
arXiv:2412.19437, section 3.3.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ... import QTensor
from ...extend import Groups
from ...numerics import mxfp4
from ..numerics.lookup import E8M0
from .codec import (
    FLOATS,
    CodedLeaf,
    Config,
    Encoded,
    check_names_in_float,
    codes_of,
    method_of,
    module_of,
    modules_with,
    quantization_of,
    real_dtype,
    refuse,
    refuse_leaf,
    repacked,
    scale_of,
    shape_and_dtype,
    weight,
)
from .safetensors import Source

FP8_MARKS = ("_scale_inv", ".weight_scale")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_UNSAID = (128, 128)
"""Sizes of a block if the config has no `weight_block_size`, and the scales need one."""

_CODE = jnp.dtype(jnp.float8_e4m3fn)
_F32 = np.dtype(np.float32)


class Fp8Config(NamedTuple):
    """The config of a layer.

    Attributes:
      block: sizes of a block, at most those of the weight.
      shape: shape of the weight.
    """

    block: tuple[int, int]
    shape: tuple[int, ...]


def fp8_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    blocks = _blocks(config) if method_of(source.config) == "fp8" else None
    for name in source.entries:
        path = name.removesuffix("_inv").removesuffix("_scale")
        if name.endswith(FP8_MARKS) or (
            name == f"{path}_scale" and path in source.entries and source.dtype(path) == _CODE
        ):
            yield _fp8_leaf(source, path, name, blocks, dtype)


def _blocks(config: Config) -> tuple[int, int] | None:
    """Returns the sizes of a block; `None` if rows or tensors have one scale. transformers takes
    128 where the config does not say it.
    """
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = config.data.get("weight_block_size", _UNSAID)
    if block is None or block is _UNSAID:
        return block
    expected = "two sizes, such as [128, 128], or null"
    return config.two_sizes("weight_block_size", block, expected)


def _fp8_leaf(
    source: Source, name: str, scale: str, blocks: tuple[int, int] | None, asked: np.dtype | None
) -> CodedLeaf:
    shape, _ = shape_and_dtype(source, name, None, (_CODE,), axes=(2, 3))
    stored, kind = shape_and_dtype(source, scale, None, (*FLOATS, E8M0))
    unit_shape = (1,) * len(shape)
    entries = unit_shape if stored in ((), (1,)) else (*stored, *unit_shape[len(stored) :])
    sizes = tuple(n if m == 1 else 1 for n, m in zip(shape, entries, strict=False))
    if blocks is _UNSAID and Groups(shape, sizes).scale_shape == entries:
        blocks = None
    if blocks is not None:
        sizes = (*unit_shape[2:], *map(min, blocks, shape[-2:]))
    groups = Groups(shape, sizes)
    if groups.scale_shape != entries:
        sizes = f"{list(groups.scale_shape)} of blocks {groups.sizes}"
        problem = f"is {kind.name}{list(stored)}, not {sizes}."
        refuse(source, scale, problem)
    real = real_dtype(source, asked, None if kind == _F32 else kind)
    template = weight(groups, _CODE, kind, real)
    return CodedLeaf(name, ((name, _CODE), (scale, kind)), template, lambda codes, s: [codes, s])


def encode_fp8(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor, for a checkpoint of `fp8` in blocks.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    name = "fp8"
    module = module_of(path, leaf, name)
    plain = leaf.offset is None and leaf.order is None
    rows, columns = leaf.groups.sizes[-2:]
    unstacked = all(size == 1 for size in leaf.groups.sizes[:-2])
    fits = leaf.qtype == _CODE and plain and 2 <= leaf.ndim <= 3 and unstacked
    if not fits or leaf.scale.dtype != _F32 or isinstance(leaf.scale, QTensor):
        expected = "float8_e4m3fn with float32 scales in blocks of its last two axes"
        fix = "quantize it with jqx.per_block({0: 128, 1: 128}, tail=True), or leave it in float."
        refuse_leaf(path, leaf, name, expected=expected, fix=fix)
    scale = f"{module}.weight_scale_inv"
    tensors = {path: (_CODE, leaf.shape), scale: (_F32, leaf.groups.scale_shape)}

    def make(q: QTensor) -> list[np.ndarray]:
        return [codes_of(q).view(_CODE), scale_of(q)]

    return Encoded(tensors, make, Fp8Config((rows, columns), leaf.shape[-2:]))


def fp8_config(layers: Mapping[str, Fp8Config], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint.

    Raises:
      ValueError: if layers have blocks of different sizes, or loaders would skip one.
    """
    sizes = []
    for axis in range(2):
        cut = [
            layer.block[axis] for layer in layers.values() if layer.block[axis] < layer.shape[axis]
        ]
        sizes.append(cut[0] if cut else max(128, *(layer.shape[axis] for layer in layers.values())))
    for path, layer in layers.items():
        block = tuple(min(n, size) for n, size in zip(layer.shape, sizes, strict=True))
        if layer.block != block:
            expected = f"blocks of {sizes}, as in other layers"
            fix = "quantize all layers with the same blocks."
            refuse_leaf(path, layer, "fp8", expected=expected, fix=fix)
    check_names_in_float(layers, floats, "fp8")
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": sizes,
        "modules_to_not_convert": list(floats) or None,
    }


# Checkpoints of gpt-oss: experts in mxfp4.
#
# The weights `p` of experts, [E, N, K], are stored as
#
#     p_blocks  uint8 [E, N, K / 32, 16]: two codes of float4_e2m1 a byte, the first in the low bits
#     p_scales  uint8 [E, N, K / 32]: float8_e8m0
#
# The leaf `p` is [E, N, K], like its blocks; transformers swaps the last two axes of floats.
#
# Source: https://huggingface.co/openai/gpt-oss-20b (2025).


MXFP4_MARKS = ("proj_blocks", "proj_scales")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_U8 = np.dtype(np.uint8)


def mxfp4_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    for path in modules_with(source, "_blocks"):
        yield _mxfp4_leaf(source, path, dtype)


def _mxfp4_leaf(source: Source, path: str, asked: np.dtype | None) -> CodedLeaf:
    names = f"{path}_blocks", f"{path}_scales"
    stored, _ = shape_and_dtype(source, names[0], None, (_U8,))
    if not 3 <= len(stored) <= 4 or stored[-1] != 16 or 0 in stored:
        shape_and_dtype(
            source, names[0], (1, 1, 1, 16), (_U8,), "three axes or four, the last of 16 bytes"
        )
    shape_and_dtype(source, names[1], stored[:-1], (_U8,), "a scale for each block")
    shape = (*stored[:-2], stored[-2] * 32)
    groups = Groups(shape, (*(1,) * (len(shape) - 1), 32))

    def decode(blocks: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
        rows = blocks.reshape(-1, shape[-1] // 2)
        return [repacked(rows, 4, shape[-1]), scales.view(E8M0)]

    template = weight(groups, mxfp4, E8M0, real_dtype(source, asked, None))
    return CodedLeaf(path, ((names[0], _U8), (names[1], _U8)), template, decode)
