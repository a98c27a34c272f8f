"""`shard_map`: each device sees its part; a scale is partitioned in step with its weight."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ... import _compat
from ..._compat import Eqn
from ...tensor import QTensor
from ...tensor._shared import partition_specs
from .._counted import spread
from .._origin import Origin
from .._weight import is_coded, map_codes
from ._form import Finder, Form, Records, Runner


def _track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> Sequence[Origin | None]:
    finder.enter(eqn.params["jaxpr"], known)
    return [None] * len(eqn.outvars)


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    """Each device returns its records with a leading axis, along which they are merged."""
    options = _compat.shard_map_options(eqn)
    axes, sizes = options["axis_names"], dict(options["mesh"].shape)

    def partitioned(x: Any, spec: PartitionSpec) -> Any:
        def parts(q: QTensor) -> QTensor:
            return partition_specs("shard_map", q, spec, sizes)

        return map_codes(parts, x, spec) if is_coded(x) else spec

    specs = map(partitioned, operands, eqn.params["in_specs"])

    def run(given: Any, *args: Any) -> tuple[list[Any], Records]:
        results, records = runner.run(eqn.params["jaxpr"], args, given=given)
        return list(map(spread, results)), jax.tree.map(lambda x: x[None], records)

    results, records = jax.shard_map(
        run,
        in_specs=(PartitionSpec(), *specs),
        out_specs=(list(eqn.params["out_specs"]), PartitionSpec(tuple(sorted(axes)))),
        **options,
    )(runner.given, *map(spread, operands))
    first = jax.tree.map(lambda x: x[0], records)
    rest = jax.tree.map(lambda x: x[1:], records)
    others = math.prod(sizes[axis] for axis in axes) - 1
    merged, _ = lax.scan(lambda a, b: (runner.merge(a, b), None), first, rest, length=others)
    return results, merged


SHARD_MAP = {"shard_map": Form(_track, _apply)}
