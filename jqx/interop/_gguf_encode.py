"""Encodes a leaf for a GGUF file: the type of its tensor, and the bytes of its blocks."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..numerics import Integer, format_of, mxfp4
from ..numerics._shared import E8M0
from ..tensor import QTensor
from ._encoded import codes_of, exact_halves, for_rows, minimums_of, refuse_leaf, scale_of
from ._gguf_blocks import FORMATS, NUMBER_OF

_NAME = "GGUF"
_MOST_AXES, _MOST_OF_NAME = 4, 63
_HALF = np.dtype(np.float16)


class GgufEntry(NamedTuple):
    """A tensor to be written.

    Attributes:
      kind: number of its type.
      shape: shape of its weights.
      make: computes its numbers or blocks from the leaf as NumPy arrays.
    """

    kind: int
    shape: tuple[int, ...]
    make: Callable[[Any], np.ndarray]

    @property
    def size(self) -> int:
        """Size in bytes."""
        form = FORMATS[self.kind]
        return math.prod(self.shape) // form.size * form.fields.itemsize


def encode(path: str, leaf: Any) -> GgufEntry:
    """Returns the encoded form of a leaf.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    if len(path.encode()) > _MOST_OF_NAME or len(leaf.shape) > _MOST_AXES:
        refuse_leaf(
            path,
            leaf,
            _NAME,
            expected=f"names of at most {_MOST_OF_NAME} bytes, and at most {_MOST_AXES} axes",
            fix="name it as llama.cpp does, such as blk.0.attn_q.weight; merge or split its axes.",
        )
    name, make = _coded(path, leaf) if isinstance(leaf, QTensor) else _plain(path, leaf)
    return GgufEntry(NUMBER_OF[name], tuple(leaf.shape), make)


def _plain(path: str, leaf: Any) -> tuple[str, Callable[[Any], np.ndarray]]:
    kinds = {form.fields: form.name for form in FORMATS.values() if form.form is None}
    dtype = np.dtype(leaf.dtype)
    if dtype not in kinds:
        refuse_leaf(
            path,
            leaf,
            _NAME,
            expected=f"numbers of {', '.join(kinds.values())}",
            fix="convert it, for example to float32.",
        )
    return kinds[dtype], lambda x: np.ascontiguousarray(x)


def _coded(path: str, leaf: QTensor) -> tuple[str, Callable[[QTensor], np.ndarray]]:
    form, size = format_of(leaf.qtype), leaf.groups.sizes[-1] if leaf.ndim else 0
    whole = size and size % 32 == 0 and leaf.shape[-1] % size == 0 and leaf.order is None
    plain = leaf.zero_point is None and leaf.offset is None
    if whole and form == mxfp4 and plain and leaf.scale.dtype == E8M0:
        return "MXFP4", _floats
    if whole and isinstance(form, Integer) and form.bits == 8 and form.signed and plain:
        return "Q8_0", partial(_integers, path, "Q8_0")
    if whole and isinstance(form, Integer) and form.bits == 4:
        name = "Q4_0" if form.signed and plain else "Q4_1"
        return name, partial(_integers, path, name)
    refuse_leaf(
        path,
        leaf,
        _NAME,
        expected="int4, 4 bits with a minimum, int8, or mxfp4; in whole groups of 32 or of a "
        "multiple, along the last axis; in order",
        fix="quantize it like that (other row lengths do not fit blocks), leave it in float, "
        "or write compressed-tensors.",
    )


def _integers(path: str, name: str, q: QTensor) -> np.ndarray:
    """Returns the blocks of Q4_0, Q4_1 or Q8_0."""
    form, raw = format_of(q.qtype), _blocks(name, q)
    assert isinstance(form, Integer)
    each = q.groups.sizes[-1] // 32
    raw["scale"] = np.repeat(exact_halves(path, q, _NAME), each, -1)
    codes = codes_of(q)
    if form.bits == 4:
        shift = 8 if form.signed else 0
        codes = (codes.astype(np.int16) + shift).astype(np.uint8)
    if name == "Q4_1":
        scale = for_rows(scale_of(q), q).astype(np.float64)
        raw["minimum"] = np.repeat(minimums_of(path, q, scale, _HALF, _NAME), each, -1)
    codes = codes.reshape(*raw.shape, 32)
    raw["codes"] = _paired(codes) if form.bits == 4 else codes
    return raw


def _floats(q: QTensor) -> np.ndarray:
    """Returns the blocks of MXFP4."""
    raw = _blocks("MXFP4", q)
    scale = for_rows(np.asarray(q.scale).view(np.uint8), q)
    raw["scale"] = np.repeat(scale, q.groups.sizes[-1] // 32, -1)
    raw["codes"] = _paired(codes_of(q).reshape(*raw.shape, 32))
    return raw


def _blocks(name: str, q: QTensor) -> np.ndarray:
    return np.empty((*q.shape[:-1], q.shape[-1] // 32), FORMATS[NUMBER_OF[name]].fields)


def _paired(codes: np.ndarray) -> np.ndarray:
    """Returns 32 codes of 4 bits in 16 bytes, with the first half in the low bits."""
    return codes[..., :16] | codes[..., 16:] << np.uint8(4)
