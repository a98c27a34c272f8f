"""Checkpoints of Hugging Face in float8_e4m3: `fbgemm_fp8`, and `fp8` in blocks, as used by
DeepSeek-V3 and Qwen3.

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

from ..calibrators import Groups
from ..numerics._shared import E8M0
from ..tensor import QTensor
from ._coded import FLOATS, CodedLeaf, checked, real_dtype, refuse, weight
from ._config import Config, method_of, quantization_of
from ._encoded import Encoded, check_names_in_float, codes_of, module_of, refuse_leaf, scale_of
from ._source import Source

MARKS = ("_scale_inv", ".weight_scale")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_UNSAID = (128, 128)
"""Sizes of a block if the config has no `weight_block_size`, and the scales need one."""

_CODE = jnp.dtype(jnp.float8_e4m3fn)
_F32 = np.dtype(np.float32)


class LayerConfig(NamedTuple):
    """The config of a layer.

    Attributes:
      block: sizes of a block, at most those of the weight.
      shape: shape of the weight.
    """

    block: tuple[int, int]
    shape: tuple[int, ...]


def leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    blocks = _blocks(config) if method_of(source.config) == "fp8" else None
    for name in source.entries:
        path = name.removesuffix("_inv").removesuffix("_scale")
        if name.endswith(MARKS) or (name == f"{path}_scale" and _is_coded(source, path)):
            yield _leaf(source, path, name, blocks, dtype)


def _is_coded(source: Source, name: str) -> bool:
    return name in source.entries and source.dtype(name) == _CODE


def _blocks(config: Config) -> tuple[int, int] | None:
    """Returns the sizes of a block; `None` if rows or tensors have one scale. transformers takes
    128 where the config does not say it.
    """
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = config.data.get("weight_block_size", _UNSAID)
    if block is None or block is _UNSAID:
        return block
    if isinstance(block, list) and len(block) == 2:
        rows, columns = block
        if type(rows) is type(columns) is int and min(rows, columns) > 0:
            return rows, columns
    config.refuse("weight_block_size", "two sizes, such as [128, 128], or null")


def _leaf(
    source: Source, name: str, scale: str, blocks: tuple[int, int] | None, asked: np.dtype | None
) -> CodedLeaf:
    shape, _ = checked(source, name, None, (_CODE,))
    if not 2 <= len(shape) <= 3 or 0 in shape:
        checked(source, name, (0, 0), (_CODE,), "two axes, or three if matrices are stacked")
    stored, kind = checked(source, scale, None, (*FLOATS, E8M0))
    ones = (1,) * len(shape)
    each = ones if stored in ((), (1,)) else (*stored, *ones[len(stored) :])
    sizes = tuple(n if m == 1 else 1 for n, m in zip(shape, each, strict=False))
    if blocks is _UNSAID and Groups(shape, sizes).scale_shape == each:
        blocks = None
    if blocks is not None:
        sizes = (*ones[2:], *map(min, blocks, shape[-2:]))
    groups = Groups(shape, sizes)
    if groups.scale_shape != each:
        refuse(
            source,
            scale,
            "does not have the shape in the config.",
            given=f"{kind.name}{list(stored)} for a weight {list(shape)}",
            expected=f"{list(groups.scale_shape)}, of blocks {groups.sizes}",
        )
    real = real_dtype(source, asked, None if kind == _F32 else kind)
    like = weight(groups, _CODE, kind, real)
    return CodedLeaf(name, ((name, _CODE), (scale, kind)), like, lambda codes, s: [codes, s])


def encode(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor, for a checkpoint of `fp8` in blocks.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    name = "fp8"
    module = module_of(path, leaf, name)
    plain = leaf.offset is None and leaf.order is None
    rows, columns = leaf.groups.sizes[-2:]
    alone = all(size == 1 for size in leaf.groups.sizes[:-2])
    fits = leaf.qtype == _CODE and plain and 2 <= leaf.ndim <= 3 and alone
    if not fits or leaf.scale.dtype != _F32 or isinstance(leaf.scale, QTensor):
        refuse_leaf(
            path,
            leaf,
            name,
            expected="float8_e4m3fn with float32 scales in blocks of its last two axes",
            fix="quantize it with jqx.per_block({0: 128, 1: 128}, tail=True), leave it in float, "
            "or write compressed-tensors.",
        )
    weight, scale, entries = path, f"{module}.weight_scale_inv", leaf.groups.scale_shape

    def make(q: QTensor) -> Mapping[str, np.ndarray]:
        return {weight: codes_of(q).view(_CODE), scale: scale_of(q)}

    tensors = {weight: (_CODE, leaf.shape), scale: (_F32, entries)}
    return Encoded(tensors, make, LayerConfig((rows, columns), leaf.shape[-2:]))


def config(layers: Mapping[str, LayerConfig], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint.

    Raises:
      ValueError: if layers have blocks of different sizes, or loaders would skip one.
    """
    sizes = []
    for axis in range(2):
        cut = [own.block[axis] for own in layers.values() if own.block[axis] < own.shape[axis]]
        sizes.append(cut[0] if cut else max(128, *(own.shape[axis] for own in layers.values())))
    for path, own in layers.items():
        wanted = tuple(min(n, size) for n, size in zip(own.shape, sizes, strict=True))
        if own.block != wanted:
            refuse_leaf(
                path,
                own,
                "fp8",
                expected=f"blocks of {sizes}, as in other layers",
                fix="quantize all layers with the same blocks.",
            )
    check_names_in_float(layers, floats, "fp8")
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": sizes,
        "modules_to_not_convert": [name.removesuffix(".weight") for name in floats] or None,
    }
