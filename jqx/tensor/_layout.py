"""How codes of less than 8 bits lie in bytes."""

from typing import NamedTuple

import numpy as np

from .._checks import require_that
from ..numerics import QType


class Packing(NamedTuple):
    """Packed along one axis; see `jqx.numerics` for the order of the bits.

    Attributes:
      axis: the packed axis, counted from the last (-1).
      length: its length in codes.
    """

    axis: int
    length: int


def packed_axis(function: str, form: QType, axis: int, rank: int) -> int:
    require_that(
        form.bits < 8,
        error=ValueError,
        function=function,
        problem=f"codes of {form.name} fill their bytes.",
        given=f"{form.bits} bits",
        expected="a format of 7 bits or less",
        mend="leave it unpacked.",
    )
    require_that(
        isinstance(axis, (int, np.integer)) and -rank <= axis < rank,
        error=ValueError,
        function=function,
        problem="there is no such axis to pack along.",
        given=f"axis {axis!r} for rank {rank}",
        expected=f"an axis in [{-rank}, {rank - 1}]" if rank else "an array of one axis or more",
        mend="name an axis of the array.",
    )
    return int(axis) % rank
