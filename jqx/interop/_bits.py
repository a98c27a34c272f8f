"""Codes in streams of bits, as the files of others have them, and packed as jqx has them, in NumPy.

A stream is little-endian and dense: code i of b bits takes the bits from i * b on, the lowest
first, whatever words the bytes are read as; a code may lie across two words. Formats differ in the
axis along which they pack, and in what they add to a code before.
"""

from collections.abc import Iterator

import numpy as np

from ..numerics._shared import packed_length, planes_of

_AT_ONCE = 2**17
"""Bytes of a stream that are taken apart at a time: what is made of them stays in the cache."""


def stream_length(count: int, bits: int, word: int = 4) -> int:
    """Returns the bytes of a stream of `count` codes, in whole words of `word` bytes."""
    return -(-count * bits // (8 * word)) * word


def from_stream(raw: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the codes of streams, a byte each.

    Args:
      raw: uint8, `(..., bytes)`; bytes beyond the codes are not looked at.
      bits: 1 to 8.
      count: how many codes each stream has.

    Returns:
      uint8 `(..., count)`, below `2**bits`.
    """
    if bits == 8:
        return raw[..., :count]
    if bits in (1, 2, 4):
        each = 8 // bits
        used = raw[..., : -(-count // each)]
        parts = np.empty((*used.shape, each), np.uint8)
        for i in range(each):
            parts[..., i] = (used >> np.uint8(i * bits)) & np.uint8(2**bits - 1)
        return parts.reshape(*raw.shape[:-1], -1)[..., :count]
    groups = -(-count // 8)  # 8 codes are a whole number of bytes
    wide = np.zeros((*raw.shape[:-1], groups * bits), np.uint8)
    kept = min(raw.shape[-1], groups * bits)
    wide[..., :kept] = raw[..., :kept]
    wide = wide.reshape(*raw.shape[:-1], groups, bits)
    codes = np.empty((*wide.shape[:-1], 8), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        code = wide[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            code = code | wide[..., byte + 1] << np.uint8(8 - shift)
        codes[..., i] = code & np.uint8(2**bits - 1)
    return codes.reshape(*raw.shape[:-1], groups * 8)[..., :count]


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
    whole = np.zeros((*codes.shape[:-1], length), np.uint8)
    kept = min(length, raw.shape[-1])
    whole[..., :kept] = raw[..., :kept]
    return whole


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 codes below `2**bits` along the last axis as `QTensor.pack` does."""
    count, place = codes.shape[-1], 0
    packed = np.zeros((*codes.shape[:-1], packed_length(count, bits)), np.uint8)
    for width, lowest in planes_of(bits):
        each = 8 // width
        run = -(-count // each)
        plane = packed[..., place : place + run]
        for i in range(each):
            part = codes[..., i * run : (i + 1) * run]
            part = ((part >> np.uint8(lowest)) & np.uint8(2**width - 1)) << np.uint8(i * width)
            plane[..., : part.shape[-1]] |= part
        place += run
    return packed


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Inverts `pack`: uint8 codes `(..., count)`."""
    codes, place = np.zeros((*packed.shape[:-1], count), np.uint8), 0
    for width, lowest in planes_of(bits):
        each = 8 // width
        run = -(-count // each)
        plane = packed[..., place : place + run]
        for i in range(each):
            part = codes[..., i * run : (i + 1) * run]
            bits_of = (plane[..., : part.shape[-1]] >> np.uint8(i * width)) & np.uint8(2**width - 1)
            part |= bits_of << np.uint8(lowest)
        place += run
    return codes


def repacked(
    raw: np.ndarray, bits: int, count: int, flip: int = 0, order: np.ndarray | None = None
) -> np.ndarray:
    """Returns streams packed as `QTensor.pack` packs; no code is held in more than a byte, and only
    some rows are at a time.

    Args:
      raw: uint8 `(rows, bytes)`.
      bits: 1 to 8.
      count: codes of a row.
      flip: what each code is xor-ed with: `2**(bits - 1)` makes signed codes of those that files
        have with `2**(bits - 1)` added.
      order: which code of a row comes where; `None` leaves them in order.

    Returns:
      uint8 `(rows, packed_length(count, bits))`; of 8 bits the codes.
    """
    width = count if bits == 8 else packed_length(count, bits)
    out = np.empty((raw.shape[0], width), np.uint8)
    for rows in _runs(*raw.shape):
        if bits == 4 and count % 4 == 0 and order is None:
            _repack_nibbles(raw[rows, : count // 2], out[rows], flip)
            continue
        codes = from_stream(raw[rows], bits, count)
        codes = codes if order is None else codes[:, order]
        codes = codes ^ np.uint8(flip) if flip else codes
        out[rows] = codes if bits == 8 else pack(codes, bits)
    return out


def restreamed(
    packed: np.ndarray, bits: int, count: int, flip: int = 0, word: int = 4
) -> np.ndarray:
    """Inverts `repacked`: uint8 `(rows, stream_length(count, bits, word))`."""
    out = np.empty((packed.shape[0], stream_length(count, bits, word)), np.uint8)
    for rows in _runs(*packed.shape):
        codes = unpack(packed[rows], bits, count)
        out[rows] = to_stream(codes ^ np.uint8(flip) if flip else codes, bits, word)
    return out


def _repack_nibbles(raw: np.ndarray, out: np.ndarray, flip: int) -> None:
    """Packs nibbles anew: those of the two halves of a row, beside each other in a byte."""
    half = raw.shape[-1] // 2
    low, high = _spread(raw[:, :half]), _spread(raw[:, half:])
    high <<= np.uint16(4)
    high |= low
    if flip:
        high ^= np.uint16(flip * 0x1111)
    out[:] = high.astype("<u2", copy=False).view(np.uint8)


def _spread(x: np.ndarray) -> np.ndarray:
    """Returns the nibbles of bytes in a byte each, the low one in the lower byte of an uint16."""
    wide = x.astype(np.uint16)
    shifted = wide << np.uint16(4)
    shifted |= wide
    shifted &= np.uint16(0x0F0F)
    return shifted


def _runs(rows: int, width: int) -> Iterator[slice]:
    """Yields runs of rows of some bytes."""
    step = max(1, _AT_ONCE // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
