"""Writing to quantized arrays, and taking from them anywhere: what is written is quantized to the
format of the target, and what is taken has the format that it had.

A weight does not go through: a plan takes what is written to for an array.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..._compat import Eqn
from ...contractions import dynamic_update_slice
from ...contractions._shared import gathered, scattered, select
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


_INDEXED = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def _scatter(eqn: Eqn, operands: Sequence[Any]) -> Any:
    target, *others = operands
    plain = isinstance(target, QTensor) and not any(isinstance(x, QTensor) for x in others)
    return scattered(*operands, **{name: eqn.params[name] for name in _INDEXED}) if plain else None


def _gather(eqn: Eqn, operands: Sequence[Any]) -> Any:
    options = {name: eqn.params[name] for name in (*_INDEXED, "slice_sizes", "fill_value")}
    table, indices = operands
    return gathered(table, indices, **options) if isinstance(table, QTensor) else None


UPDATES: dict[str, Update] = {
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "select_n": _select,
}
