"""Writing to quantized arrays: what is written is quantized to the format of the target.

A weight does not go through: a plan takes what is written to for an array.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..._compat import Eqn
from ...contractions import dynamic_update_slice, select
from ...tensor import QTensor
from ._view import starts_of

Update = Callable[[Eqn, Sequence[Any]], Any]
"""From operands, of which some are QTensors, the result; `None` where it has no quantized form."""


def _dynamic_update_slice(eqn: Eqn, operands: Sequence[Any]) -> Any:
    target, update, *starts = operands
    if not isinstance(target, QTensor):
        return None
    return dynamic_update_slice(target, update, starts_of(starts))


def _select(eqn: Eqn, operands: Sequence[Any]) -> Any:
    which, *cases = operands
    return None if isinstance(which, QTensor) else select(which, *cases)


UPDATES: dict[str, Update] = {
    "dynamic_update_slice": _dynamic_update_slice,
    "select_n": _select,
}
