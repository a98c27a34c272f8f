"""The formats of tensors in GGUF files: how the bytes of a block hold codes, scales and minimums.

A block is 32 or 256 weights of a row, or one weight if numbers are stored directly. Types have the
same numbers as in ggml. The types in `FORMATS` can be read; to read another one, add its line.

In blocks of 256 (K-quants) each group of 16 or 32 weights has a scale, and in some types a minimum;
both are integers of 4 to 8 bits. One float16 of a block multiplies all its scales, and another all
its minimums.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h (2026).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..numerics.blocks import Block, mxfp4
from ..numerics.qtype import Integer
from .codec import pack


class GgufBlocks(NamedTuple):
    """The contents of the blocks of a tensor. A weight is `scale * code + minimum`.

    Attributes:
      codes: numbers of the weights, `(..., scales of a row, weights of a scale)`.
      scale: scales, `(..., scales of a row)`; `None` if numbers are stored directly. If a scale is
        an integer and a factor, it is their product in float32.
      minimum: as `scale`; `None` if the format has none.
    """

    codes: np.ndarray
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None


class Parts(NamedTuple):
    """The fields of blocks, separated; the first axes are those of the blocks.

    Attributes:
      codes: uint8 `(..., size)`, with half of their range added if they are signed; int8 for 8
        bits; or numbers.
      scale: scale of each block, or the factor of its scales if these are integers.
      minimum: as `scale`, for the minimums, with the sign in the file.
      scales: integers `(..., size // group)` that `scale` multiplies, stored like codes.
      minimums: as `scales`, for `minimum`; they are subtracted.
    """

    codes: np.ndarray
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None
    scales: np.ndarray | None = None
    minimums: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """A type of tensors.

    Attributes:
      name: name in ggml.
      size: weights in a block.
      fields: layout of the bytes of a block.
      read: separates the fields.
      form: format of the codes; `None` if numbers are stored directly.
      group: weights per scale.
      inner: format of the scales and minimums, if these are integers.
      minimum: whether weights have a minimum.
    """

    name: str
    size: int
    fields: np.dtype
    read: Callable[[np.ndarray], Parts]
    form: Integer | Block | None = None
    group: int = 1
    inner: Integer | None = None
    minimum: bool = False


def in_bits(codes: np.ndarray, form: Integer | Block) -> np.ndarray:
    """Returns codes of `Parts` in whole rows, packed as `QTensor.pack` does."""
    if form.bits == 8:
        return codes
    signed = isinstance(form, Integer) and form.signed
    return pack(codes ^ np.uint8(2 ** (form.bits - 1)) if signed else codes, form.bits)


def blocks_of(form: Format, raw: np.ndarray) -> GgufBlocks:
    """Returns the contents of blocks, from `(..., blocks of a row)` fields of a format."""
    parts = form.read(raw)
    if form.form is None:
        return GgufBlocks(parts.codes[..., None])
    assert parts.scale is not None
    codes, scale, minimum = parts.codes, parts.scale, parts.minimum
    if isinstance(form.form, Block):
        codes, scale = _DOUBLED[codes], _half_power(scale)
    elif form.form.signed and form.form.bits < 8:
        codes = _signed(codes, form.form)
    if parts.scales is not None:
        assert form.inner is not None
        scale = _product(_signed(parts.scales, form.inner), scale)
        minimum = None if minimum is None else -_product(parts.minimums, minimum)
        *outer, blocks = raw.shape
        codes = codes.reshape(*outer, blocks * form.size // form.group, form.group)
    return GgufBlocks(codes, scale, minimum)


def dequantized(blocks: GgufBlocks) -> np.ndarray:
    """Returns the weights in float32, each rounded once."""
    codes, scale, minimum = blocks
    if scale is None:
        return codes.astype(np.float32)
    with np.errstate(invalid="ignore"):  # scales may be infinite, or NaN
        weights = np.multiply(codes, scale.astype(np.float32)[..., None], dtype=np.float32)
        if minimum is not None:
            weights += minimum.astype(np.float32)[..., None]
    return weights


def _signed(codes: np.ndarray, form: Integer) -> np.ndarray:
    if not form.signed or form.bits == 8:
        return codes
    return codes.view(np.int8) - np.int8(2 ** (form.bits - 1))


def _product(codes: Any, factor: np.ndarray) -> np.ndarray:
    """Returns the integers of blocks times the factor of each block, exact in float32."""
    with np.errstate(invalid="ignore"):
        product = np.multiply(codes, factor.astype(np.float32)[..., None], dtype=np.float32)
    *outer, blocks, group_size = product.shape
    return product.reshape(*outer, blocks * group_size)


_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers of float4_e2m1."""


def _half_power(exponents: np.ndarray) -> np.ndarray:
    """Returns half of the numbers of float8_e8m0, in float32; 255 is NaN."""
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    return np.where(exponents == 255, np.float32(np.nan), powers)


# Functions that read blocks.


def _numbers(raw: np.ndarray) -> Parts:
    return Parts(raw)


def _bytes(raw: np.ndarray) -> Parts:
    return Parts(raw["codes"], raw["scale"])


def _runs(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Returns the codes of bytes: each `run` of bytes holds `run` codes in its lowest bits, then as
    many in the next bits, and so on.
    """
    *outer, length = packed.shape
    packed = packed.reshape(*outer, length // run, run)
    # NumPy moves a run at once if it is one element, and byte by byte otherwise.
    element = np.dtype((np.void, run))
    contiguous = np.ascontiguousarray(packed.view(element)).view(np.uint8)
    parts = np.empty((*packed.shape[:-1], 8 // bits, run), np.uint8)
    for i in range(8 // bits):
        part = contiguous >> np.uint8(i * bits) & np.uint8(2**bits - 1)
        parts.view(element)[..., i, :] = part.view(element)
    return parts.reshape(*outer, length * 8 // bits)


def _nibbles(raw: np.ndarray) -> Parts:
    minimum = raw["minimum"] if "minimum" in (raw.dtype.names or ()) else None
    return Parts(_runs(raw["codes"], 4, 16), raw["scale"], minimum)


def _fives(raw: np.ndarray) -> Parts:
    low, scale, minimum, *_ = _nibbles(raw)
    high = np.unpackbits(raw["high"], axis=-1, bitorder="little")
    return Parts(low | high << np.uint8(4), scale, minimum)


def _k2(raw: np.ndarray) -> Parts:
    pairs = raw["scales"]
    codes = _runs(raw["codes"], 2, 32)
    return Parts(codes, raw["scale"], raw["minimum"], pairs & np.uint8(15), pairs >> np.uint8(4))


def _k3(raw: np.ndarray) -> Parts:
    codes = _runs(raw["codes"], 2, 32) | _runs(raw["high"], 1, 32) << np.uint8(2)
    low, high = _runs(raw["scales"][..., :8], 4, 8), _runs(raw["scales"][..., 8:], 2, 4)
    return Parts(codes, raw["scale"], None, low | high << np.uint8(4))


def _sixes(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns 8 scales and 8 minimums of 6 bits from 12 bytes; the last four of each are split."""
    a, b, c = (raw[..., i : i + 4] for i in (0, 4, 8))
    six, two = np.uint8(63), np.uint8(48)
    scales = np.concatenate([a & six, c & np.uint8(15) | a >> np.uint8(2) & two], axis=-1)
    minimums = np.concatenate([b & six, c >> np.uint8(4) | b >> np.uint8(2) & two], axis=-1)
    return scales, minimums


def _k4(raw: np.ndarray) -> Parts:
    return Parts(_runs(raw["codes"], 4, 32), raw["scale"], raw["minimum"], *_sixes(raw["scales"]))


def _k5(raw: np.ndarray) -> Parts:
    parts = _k4(raw)
    return parts._replace(codes=parts.codes | _runs(raw["high"], 1, 32) << np.uint8(4))


def _k6(raw: np.ndarray) -> Parts:
    codes = _runs(raw["codes"], 4, 64) | _runs(raw["high"], 2, 32) << np.uint8(4)
    return Parts(codes, raw["scale"], None, raw["scales"])


def _fields(*fields: Any) -> np.dtype:
    return np.dtype(list(fields))


def _codes(size: int) -> tuple[str, str, int]:
    return "codes", "u1", size


_SCALE, _MINIMUM = ("scale", "<f2"), ("minimum", "<f2")
_HIGH, _SCALES = ("high", "u1", 32), ("scales", "u1", 12)


def _plain(name: str, dtype: Any) -> Format:
    return Format(name, 1, np.dtype(dtype), _numbers)


def _ints(bits: int, signed: bool) -> Integer:
    return Integer(bits, signed=signed)


_Q4_0 = _fields(_SCALE, _codes(16))
_Q4_1 = _fields(_SCALE, _MINIMUM, _codes(16))
_Q5_0 = _fields(_SCALE, ("high", "u1", 4), _codes(16))
_Q5_1 = _fields(_SCALE, _MINIMUM, ("high", "u1", 4), _codes(16))
_Q8_0 = _fields(_SCALE, ("codes", "i1", 32))
_Q2_K = _fields(("scales", "u1", 16), _codes(64), _SCALE, _MINIMUM)
_Q3_K = _fields(_HIGH, _codes(64), _SCALES, _SCALE)
_Q4_K = _fields(_SCALE, _MINIMUM, _SCALES, _codes(128))
_Q5_K = _fields(_SCALE, _MINIMUM, _SCALES, _HIGH, _codes(128))
_Q6_K = _fields(_codes(128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE)
_MXFP4 = _fields(("scale", "u1"), _codes(16))
_U6 = _ints(6, False)

FORMATS = {
    0: _plain("F32", "<f4"),
    1: _plain("F16", "<f2"),
    2: Format("Q4_0", 32, _Q4_0, _nibbles, _ints(4, True), 32),
    3: Format("Q4_1", 32, _Q4_1, _nibbles, _ints(4, False), 32, minimum=True),
    6: Format("Q5_0", 32, _Q5_0, _fives, _ints(5, True), 32),
    7: Format("Q5_1", 32, _Q5_1, _fives, _ints(5, False), 32, minimum=True),
    8: Format("Q8_0", 32, _Q8_0, _bytes, _ints(8, True), 32),
    10: Format("Q2_K", 256, _Q2_K, _k2, _ints(2, False), 16, _ints(4, False), True),
    11: Format("Q3_K", 256, _Q3_K, _k3, _ints(3, True), 16, _ints(6, True)),
    12: Format("Q4_K", 256, _Q4_K, _k4, _ints(4, False), 32, _U6, True),
    13: Format("Q5_K", 256, _Q5_K, _k5, _ints(5, False), 32, _U6, True),
    14: Format("Q6_K", 256, _Q6_K, _k6, _ints(6, True), 16, _ints(8, True)),
    24: _plain("I8", "i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    30: _plain("BF16", jnp.bfloat16),
    39: Format("MXFP4", 32, _MXFP4, _nibbles, mxfp4, 32),
}
"""The types that can be read, by number."""

NUMBER_OF = {form.name: number for number, form in FORMATS.items()}

_OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}


def name_of(number: int) -> str:
    """Returns the name of a type, also if it cannot be read."""
    form = FORMATS.get(number)
    return form.name if form else _OTHERS.get(number, f"type {number}")
