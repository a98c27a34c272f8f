"""Checks that the codes of a QTensor are in the range of its format, which storage may exceed."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..numerics import format_of
from ._fields import check_dtypes
from ._layout import is_flipped
from ._order import permuted_axis


def check_codes(function: str, q: Any, where: str) -> None:
    """Checks the codes and zero points of a concrete QTensor, and those of a nested scale.

    Args:
      function: the caller, for messages.
      q: a QTensor of NumPy arrays, or of JAX arrays outside of transformations.
      where: its path, for messages.

    Raises:
      TypeError: codes have another dtype.
      ValueError: a code or a zero point is out of the range of the format, such as 100 in an int3.
    """
    check_dtypes(function, q, f" of {where!r}")
    form = format_of(q.qtype)
    if form.code_range is not None:
        codes = _integers(q, form)
        if codes is not None:
            _check_range(function, f"{where}.values", codes, form)
        if q.zero_point is not None:
            _check_range(function, f"{where}.zero_point", q.zero_point, form)
    for name in ("scale", "offset"):
        if hasattr(getattr(q, name), "qtype"):
            check_codes(function, getattr(q, name), f"{where}.{name}")
    if q.order is not None:
        _check_order(function, q, f"{where}.order")


def _check_order(function: str, q: Any, name: str) -> None:
    """Checks that an order is a permutation."""
    axis = permuted_axis(q.order)
    if axis is None or not q.order.size:
        return
    found = np.sort(np.moveaxis(np.asarray(q.order), axis, -1), axis=-1)
    if not np.array_equal(found, np.broadcast_to(np.arange(q.shape[axis]), found.shape)):
        raise fail(
            function,
            f"the tensor {name!r} is not a permutation.",
            given=f"numbers from {int(found.min())} to {int(found.max())}",
            expected=f"each of 0 to {q.shape[axis] - 1} exactly once",
            fix="quantize the array again: its order is damaged.",
        )


def _integers(q: Any, form: Any) -> Any:
    """Returns the codes, or `None` if every bit pattern is a code of the format."""
    low, high = form.code_range
    if q.layout is None:
        return q.values
    if q.layout.packing is not None:
        return None if high - low + 1 == 2**form.bits else q.codes
    return None if q.layout.int8 and is_flipped(form) else q.values


def _check_range(function: str, name: str, codes: Any, form: Any) -> None:
    low, high = form.code_range
    info = jnp.iinfo(codes.dtype)
    if codes.size == 0 or (low <= int(info.min) and int(info.max) <= high):
        return
    codes = np.asarray(codes)
    least, most = int(codes.min()), int(codes.max())
    if not (low <= least and most <= high):
        raise fail(
            function,
            f"the tensor {name!r} holds numbers that are not codes of {form.name}.",
            given=f"numbers from {least} to {most}",
            expected=f"codes from {low} to {high}",
            fix="quantize the array again: its codes are damaged, or were made for another format.",
        )
