"""Views that set the sharding of an array; they apply to every array of a QTensor."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, Sharding

from ... import _compat
from ..._compat import Eqn
from ..._errors import fail
from ...tensor import QTensor
from ...tensor._shared import shardings_of
from .._weight import map_codes
from ._view import Known, View, of_one, same


def sharded_as(weight: Any, sharding: Sharding) -> Any:
    """Returns a weight with the sharding of each of its arrays in its place."""
    return map_codes(partial(_sharded_as, sharding=sharding), weight, sharding)


def _sharded_as(q: QTensor, sharding: Sharding) -> Any:
    if isinstance(sharding, NamedSharding):
        return shardings_of("jit", q, sharding)
    if not sharding.is_fully_replicated:
        raise fail(
            "jit",
            "the sharding of a quantized weight does not name mesh axes.",
            given=f"{sharding} for {q!r}",
            expected="a jax.sharding.NamedSharding",
            fix="shard it with a mesh and a PartitionSpec, or outside of f.",
            error=NotImplementedError,
        )
    return jax.tree.map(lambda _: sharding, q)


def _apply_pvary(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    return _compat.vary(operands[0], frozenset(eqn.params["axes"]))


def _apply_constraint(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    (q,) = operands
    return lax.with_sharding_constraint(q, sharded_as(q, eqn.params["sharding"]))


def _apply_reshard(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    (q,) = operands
    return jax.sharding.reshard(q, sharded_as(q, eqn.params["dst_sharding"]))


def _track_put(eqn: Eqn, known: Known) -> Known:
    anywhere = not any(eqn.params["devices"])
    return known if anywhere else [None] * len(known)


SHARDINGS: dict[str, View] = {
    "device_put": View(_track_put, lambda eqn, operands: list(operands)),
    "pvary": of_one(same, _apply_pvary),
    "reshard": of_one(same, _apply_reshard),
    "sharding_constraint": of_one(same, _apply_constraint),
}
