"""Checkpoints of gpt-oss: experts in mxfp4.

The weights `p` of experts, [E, N, K], are stored as

    p_blocks  uint8 [E, N, K / 32, 16]: two codes of float4_e2m1 a byte, the first in the low bits
    p_scales  uint8 [E, N, K / 32]: float8_e8m0

The leaf `p` is [E, N, K], like its blocks; transformers swaps the last two axes of floats.

Source: https://huggingface.co/openai/gpt-oss-20b (2025).
"""

from collections.abc import Iterator

import numpy as np

from ..calibrators import Groups
from ..numerics import mxfp4
from ..numerics._shared import E8M0
from ._bits import repacked
from ._coded import CodedLeaf, checked, real_dtype, weight
from ._source import Source

MARKS = ("proj_blocks", "proj_scales")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_U8 = np.dtype(np.uint8)


def leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    for name in source.entries:
        if name.endswith("_blocks"):
            yield _leaf(source, name.removesuffix("_blocks"), dtype)


def _leaf(source: Source, path: str, asked: np.dtype | None) -> CodedLeaf:
    names = f"{path}_blocks", f"{path}_scales"
    stored, _ = checked(source, names[0], None, (_U8,))
    if not 3 <= len(stored) <= 4 or stored[-1] != 16 or 0 in stored:
        checked(source, names[0], (1, 1, 1, 16), (_U8,), "three axes or four, the last of 16 bytes")
    checked(source, names[1], stored[:-1], (_U8,), "a scale for each block")
    shape = (*stored[:-2], stored[-2] * 32)
    groups = Groups(shape, (*(1,) * (len(shape) - 1), 32))

    def decode(blocks: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
        rows = blocks.reshape(-1, shape[-1] // 2)
        return [repacked(rows, 4, shape[-1]), scales.view(E8M0)]

    like = weight(groups, mxfp4, E8M0, real_dtype(source, asked, None))
    return CodedLeaf(path, ((names[0], _U8), (names[1], _U8)), like, decode)
