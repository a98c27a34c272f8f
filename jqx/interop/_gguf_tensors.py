"""GGUF files as checkpoints: the QTensor for a tensor of each type.

A QTensor has the scales and minimums of the file. Those of K-quants are themselves QTensors of
integers, whose scales are the factors of the blocks of 256. Minimums are subtracted, so the factor
of the `offset` is negative. Real arrays are float32, which holds every product with a scale
exactly.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..calibrators import Groups
from ..numerics import Block
from ..numerics._shared import E8M0
from ._coded import CodedLeaf, abstract, weight
from ._gguf_blocks import FORMATS, Format, Parts, in_bits
from ._gguf_source import GgufSource
from ._in_runs import in_runs
from ._source import Source

_U8 = np.dtype(np.uint8)


def leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a file."""
    assert isinstance(source, GgufSource)
    real = np.dtype(np.float32) if dtype is None else dtype
    for name, kind in source.kinds.items():
        source.dtype(name)  # raises if the type cannot be read
        form = FORMATS[kind]
        if form.form is not None:
            yield _leaf(name, form, source.entries[name].shape, real)


def _leaf(name: str, form: Format, stored: tuple[int, ...], real: np.dtype) -> CodedLeaf:
    blocks = stored[-1] // form.fields.itemsize
    shape, rows = (*stored[:-1], blocks * form.size), math.prod(stored[:-1])
    groups = Groups(shape, (*(1,) * (len(shape) - 1), form.group))
    half = np.dtype(np.float16)
    more: dict[str, Any] = {}
    if form.inner is not None:
        outer = Groups(groups.scale_shape, (*groups.sizes[:-1], form.size // form.group))
        scale: Any = weight(outer, form.inner, half, np.dtype(np.float32))
        if form.minimum:
            more["offset"] = scale
    else:
        scale = E8M0 if isinstance(form.form, Block) else half
        if form.minimum:
            more["offset"] = abstract(groups.scale_shape, half)
    like = weight(groups, form.form, scale, real, **more)

    def decode(raw: np.ndarray) -> list[np.ndarray]:
        fields = np.ascontiguousarray(raw).reshape(-1).view(form.fields).reshape(rows, blocks)
        made = [np.empty((rows, x.shape[-1]), x.dtype) for x in jax.tree.leaves(like)]
        for run in in_runs(rows, blocks * form.size):
            for x, part in zip(made, _taken_apart(form, fields[run]), strict=True):
                x[run] = part.view(x.dtype)
        return made

    return CodedLeaf(name, ((name, _U8),), like, decode)


def _taken_apart(form: Format, fields: np.ndarray) -> list[np.ndarray]:
    """Returns the arrays of a QTensor for some rows."""
    assert form.form is not None
    parts: Parts = form.read(fields)
    made = [in_bits(_rows(parts.codes), form.form)]
    if form.inner is None:
        assert parts.scale is not None
        return [*made, parts.scale, *(() if parts.minimum is None else (parts.minimum,))]
    assert parts.scales is not None and parts.scale is not None
    made += [in_bits(_rows(parts.scales), form.inner), parts.scale]
    if parts.minimum is not None and parts.minimums is not None:
        made += [in_bits(_rows(parts.minimums), form.inner), -parts.minimum]
    return made


def _rows(x: np.ndarray) -> np.ndarray:
    rows, *outer = x.shape
    return x.reshape(rows, math.prod(outer))
