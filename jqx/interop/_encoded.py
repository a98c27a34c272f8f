"""What a QTensor becomes in a checkpoint of others: which tensors, of which numbers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from .._errors import message
from ..numerics import format_of
from ..tensor import QTensor
from ._bits import unpack

Tensors = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


class Encoded(NamedTuple):
    """A QTensor as a format has it, before its numbers are made.

    Attributes:
      tensors: dtype and shape of what is written, by name.
      make: makes these of the QTensor, whose leaves are NumPy arrays, by name.
      says: what the config says of it: a hashable value of the format's own.
    """

    tensors: Tensors
    make: Callable[[QTensor], Mapping[str, np.ndarray]]
    says: Any


def refuse_leaf(path: str, leaf: Any, format: str, *, expected: str, mend: str) -> NoReturn:
    """Raises: a format cannot hold a tensor."""
    raise ValueError(
        message(
            "interop.write",
            f"{format} cannot hold the tensor {path!r}.",
            given=repr(leaf),
            expected=expected,
            mend=mend,
        )
    )


def module_of(path: str, leaf: Any, format: str) -> str:
    """Returns the module of a weight, after checking that it is called as one."""
    if not path.endswith(".weight"):
        refuse_leaf(
            path,
            leaf,
            format,
            expected="quantized tensors that are called <module>.weight",
            mend="name it so, with jqx.interop.tree(..., names), or leave it in float.",
        )
    return path.removesuffix(".weight")


def as_numpy(q: QTensor) -> QTensor:
    """Returns a QTensor whose leaves are NumPy arrays."""
    return jax.tree.map(np.asarray, q)


def codes_of(q: QTensor) -> np.ndarray:
    """Returns the codes of a QTensor of NumPy arrays, in the order of its shape: integers as int8
    or uint8, floats as the bits of their format, uint8.
    """
    form, layout, values = format_of(q.qtype), q.layout, np.asarray(q.values)
    signed = form.code_range is not None and form.code_range[0] < 0
    if layout is not None and layout.packing is not None:
        axis = layout.stored_axis
        assert axis is not None
        rows = np.moveaxis(values, axis, -1)
        bits = np.moveaxis(unpack(rows, form.bits, layout.packing.length), -1, axis)
        half = 2 ** (form.bits - 1)
        codes = ((bits ^ np.uint8(half)).view(np.int8) - np.int8(half)) if signed else bits
    elif layout is not None and layout.int8 and form.storage == np.uint8 and form.bits == 8:
        codes = values.view(np.uint8) ^ np.uint8(128)
    elif form.code_range is None:
        codes = np.asarray(form.to_bits(jax.numpy.asarray(values)))
    else:
        codes = values.astype(np.int8 if signed else np.uint8)
    return np.swapaxes(codes, -1, -2) if layout is not None and layout.swapped else codes


def scale_of(q: QTensor) -> np.ndarray:
    """Returns the scale of a QTensor of NumPy arrays as an array; one of scales is dequantized."""
    scale = q.scale
    return np.asarray(scale.dequantize() if isinstance(scale, QTensor) else scale)
