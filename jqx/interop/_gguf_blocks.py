"""The formats of tensors in GGUF files: how the bytes of a block hold its codes, scale and minimum.

A block is 32 weights of a row, or one where numbers are stored as they are. Types are numbered as
in ggml. What stands in `FORMATS` is read; to read another format, add its line.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h (2026).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class GgufBlocks(NamedTuple):
    """What the blocks of a tensor hold. A weight is `scale * code + minimum`.

    Attributes:
      codes: numbers of the weights, `(..., blocks of a row, weights of a block)`.
      scale: of each block, `(..., blocks of a row)`; `None` where numbers are stored as they are.
      minimum: as `scale`; `None` where the format has none.
    """

    codes: np.ndarray
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None


class Format(NamedTuple):
    """A type of tensors: its name in ggml, the weights of a block, its bytes, and their reading."""

    name: str
    size: int
    fields: np.dtype
    read: Callable[[np.ndarray], GgufBlocks]


def _numbers(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(raw[..., None])


def _bytes(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(raw["codes"], raw["scale"])


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Returns two codes of each byte: first those of all low nibbles, then those of the high."""
    packed = raw["codes"]
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _nibbles_around_8(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_nibbles(raw).view(np.int8) - np.int8(8), raw["scale"])


def _nibbles_from_minimum(raw: np.ndarray) -> GgufBlocks:
    return GgufBlocks(_nibbles(raw), raw["scale"], raw["minimum"])


def _fields(*fields: Any) -> np.dtype:
    return np.dtype(list(fields))


_SCALE, _MINIMUM = ("scale", "<f2"), ("minimum", "<f2")

FORMATS = {
    0: Format("F32", 1, np.dtype("<f4"), _numbers),
    1: Format("F16", 1, np.dtype("<f2"), _numbers),
    2: Format("Q4_0", 32, _fields(_SCALE, ("codes", "u1", 16)), _nibbles_around_8),
    3: Format("Q4_1", 32, _fields(_SCALE, _MINIMUM, ("codes", "u1", 16)), _nibbles_from_minimum),
    8: Format("Q8_0", 32, _fields(_SCALE, ("codes", "i1", 32)), _bytes),
    30: Format("BF16", 1, np.dtype(jnp.bfloat16), _numbers),
}
"""Types that are read, by their numbers."""

_OTHERS = {
    **{6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K"},
    **{14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


def name_of(number: int) -> str:
    """Returns the name of a type, read or not."""
    found = FORMATS.get(number)
    return found.name if found else _OTHERS.get(number, f"type {number}")


def dequantized(blocks: GgufBlocks) -> np.ndarray:
    """Returns the weights in float32: each is rounded once."""
    codes, scale, minimum = blocks
    if scale is None:
        return codes.astype(np.float32)
    with np.errstate(invalid="ignore"):  # scales may be infinite, or NaN
        weights = np.multiply(codes, scale.astype(np.float32)[..., None], dtype=np.float32)
        if minimum is not None:
            weights += minimum.astype(np.float32)[..., None]
    return weights
