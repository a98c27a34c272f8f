"""Writes to quantized arrays, and reads at any positions. Written values are quantized to the
format of the target, and values that are read keep their format.

Weights do not pass through: a plan treats the target of a write as an array.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..._compat import Eqn
from ...contractions import dynamic_update_slice
from ...contractions._shared import gathered, scattered, select
from ...tensor import QTensor
from ._view import starts_of

Update = Callable[[Eqn, Sequence[Any]], Any]
"""Maps operands, some of them QTensors, to the result; `None` if there is no quantized form."""


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
