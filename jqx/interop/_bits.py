"""Codes in streams of bits, as in files of other libraries, and packed as in jqx, in NumPy.

A stream is little-endian and dense: code i with b bits takes the bits from i * b on, lowest bit
first, for any word size in which the bytes are read. A code may cross the boundary of two words.
Formats differ in the axis along which they pack, and in what they add to a code before packing.
"""

import functools
from collections.abc import Callable

import numpy as np

from ..numerics._shared import packed_length, planes_of
from ._in_runs import in_runs


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
        first, second, third = (wide[..., i].astype(np.uint16) for i in range(3))
        index = np.empty((*wide.shape[:-1], 2), np.uint16)
        index[..., 0] = first | (second & np.uint16(15)) << np.uint16(8)
        index[..., 1] = second >> np.uint16(4) | third << np.uint16(4)
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
    each = 8 if bits <= 2 else 4
    numbers, codes = np.arange(2 ** (each * bits)), np.zeros(2 ** (each * bits), f"<u{each}")
    for i in range(each):
        codes |= (numbers >> (i * bits) & (2**bits - 1)).astype(codes.dtype) << codes.dtype.type(
            8 * i
        )
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
    whole = np.zeros((*codes.shape[:-1], length), np.uint8)
    kept = min(length, raw.shape[-1])
    whole[..., :kept] = raw[..., :kept]
    return whole


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 codes below `2**bits` along the last axis as `QTensor.pack` does."""
    count, place = codes.shape[-1], 0
    packed = np.empty((*codes.shape[:-1], packed_length(count, bits)), np.uint8)
    for width, lowest in planes_of(bits):
        each = 8 // width
        run = -(-count // each)
        plane = packed[..., place : place + run]
        place += run
        plane[..., count:] = 0  # fewer codes than runs
        for i in range(each):
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
    raw: np.ndarray,
    bits: int,
    count: int,
    *,
    flip: int = 0,
    order: np.ndarray | None = None,
    before: Callable[[np.ndarray], np.ndarray] | None = None,
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
      before: makes the streams of some rows from the data of the file, if these are not streams.

    Returns:
      uint8 `(rows, packed_length(count, bits))`; for 8 bits, the codes.
    """
    width = raw.shape[1] * raw.itemsize
    plain = bits == 8 and order is None and before is None and raw.flags.c_contiguous
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
        stream = stream if before is None else before(stream)
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
    half = raw.shape[-1] // 2
    low, high = _spread(raw[:, :half]), _spread(raw[:, half:])
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
