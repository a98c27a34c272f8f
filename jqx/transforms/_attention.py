"""`jqx.decode_attention` in a traced function, where its name is kept."""

from collections.abc import Callable, Sequence
from typing import Any

from .. import _compat
from .._compat import Eqn
from ..caches._shared import attention_named
from ..tensor import QTensor
from ._counted import is_counted

_RANKS = [3, 4, 4, 1]


def attention_over(eqn: Eqn, operands: Sequence[Any]) -> Callable[..., Any] | None:
    """Returns `decode_attention` if this equation calls it and its keys or values are quantized. If
    `vmap` or a derivative has changed the call, it is evaluated as any other equation.
    """
    attend = attention_named(_compat.name_of_jit(eqn))
    if attend is None or [x.aval.ndim for x in eqn.invars] != _RANKS or len(eqn.outvars) != 1:
        return None
    q, _, values = (x.aval for x in eqn.invars[:3])
    same = eqn.outvars[0].aval.shape == (*q.shape[:2], values.shape[3])
    plain = same and not any(map(is_counted, operands))
    return attend if plain and any(isinstance(x, QTensor) for x in operands[1:3]) else None
