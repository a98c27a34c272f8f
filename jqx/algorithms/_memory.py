"""The memory of a run, computed before it starts, from shapes alone."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax

from .. import _compat
from ..observers import hessian
from ..tensor import QSpec, QTensor
from ..tensor._shared import Lazy, has_lazy
from ..transforms import Plan
from ..transforms._shared import bytes_of, in_bytes, quantize_weight
from ._offload import Where
from ._stages import Operands, Scope, Stage


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that a run needs, without the temporaries inside a stage.

    Attributes:
      weights: the parameters, in float. For quantized ones also a copy as they are at each stage,
        and on the host their codes, scales and zero points, and the numbers of their elements if a
        site sees them through more than views. If some are lazy: the arrays among them, and all of
        this for the largest weight only.
      statistics: the sums of products of the inputs of one site, the one with the most, or of all
        sites whose weights are chosen together before the others.
      activations: the largest total of values of all batches that live between stages, including
        those of the float function if it runs too.
      offload: whether these are on the host, or on `"disk"`, except those of one batch.
    """

    weights: int
    statistics: int
    activations: int
    offload: Where = False

    def __str__(self) -> str:
        where = " on disk" if self.offload == "disk" else " on the host" if self.offload else ""
        return (
            f"{in_bytes(self.weights)} of weights, {in_bytes(self.statistics)} of statistics, "
            f"{in_bytes(self.activations)} of activations{where}"
        )


def bytes_of_weights(
    plan: Plan,
    leaves: Iterable[Any],
    paths: Iterable[str | None],
    spec_of: Callable[[QSpec], QSpec],
) -> int:
    """Returns the bytes of parameters, and of what is stored for quantized ones."""
    held, once = 0, [0]
    named = [(leaf, path) for leaf, path in zip(leaves, paths, strict=True) if path is not None]
    is_lazy = has_lazy([leaf for leaf, _ in named])
    for leaf, path in named:
        own, weight = 0, plan.weight_at(path)
        kind = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if weight is not None:
            codes = jax.eval_shape(partial(quantize_weight, spec=spec_of(weight.spec)), kind)
            # A copy; codes, dequantized scales, zero points; scales that are quantized themselves.
            kept = codes.scale if isinstance(codes.scale, QTensor) else None
            own = bytes_of((kind, codes.values, codes.zero_point, kept))
            own += 4 * math.prod(codes.groups.scale_shape)
        once.append(own + bytes_of(kind) if is_lazy else 0)
        held += 0 if isinstance(leaf, Lazy) else bytes_of(kind)
        held += 0 if is_lazy else own
    return held + max(once)


def bytes_of_sums(part: Any, with_float: bool = False) -> int:
    """Returns the bytes of the sums of products of the inputs of a site in one step of its scans:
    in float64, and for one batch in float32.
    """
    one = jax.eval_shape(lambda: hessian.empty(part.kind, part.about)).products
    return math.prod(one.shape) * (8 + 4) * (3 if with_float else 1)


def bytes_of_activations(scopes: Sequence[Scope], streams: int) -> int:
    """Returns the largest total bytes of values of batches that live between stages.

    Args:
      scopes: the scope of each batch.
      streams: how many times each is run.
    """
    known = {id(scope): list(_moments(scope, frozenset())) for scope in scopes}
    moments = zip(*(known[id(scope)] for scope in scopes), strict=True)
    most = ((sum(x.held for x in each), max(x.more for x in each)) for each in moments)
    return max((streams * held + more for held, more in most), default=0)


@dataclasses.dataclass(frozen=True)
class _Moment:
    """Bytes of one batch: the most before or after a stage, and the additional ones during it."""

    held: int
    more: int = 0

    def plus(self, count: int) -> "_Moment":
        return _Moment(self.held + count, self.more)


def _moments(scope: Scope, shared: frozenset[Any]) -> Iterable[_Moment]:
    """Yields the live bytes of each stage; the outer scope counts values in `shared`."""

    def total(atoms: Iterable[Any]) -> int:
        return sum(bytes_of(x.aval) for x in {*atoms} - shared)

    alive = {var for var in scope.jaxpr.invars if scope.is_of_batch(var)}
    for stage in scope.stages:
        kept, given = alive - {*stage.last}, {*stage.gives}
        before, after = total(alive), total(kept | given)
        if stage.kind in ("run", "site"):
            held = max(before, after)
            yield _Moment(held, total(alive | given) - held)
        else:
            inside = _scanned if stage.kind == "scan" else _entered
            for moment in inside(scope, stage, kept | shared):
                yield moment.plus(total(kept))
            yield _Moment(after)
        alive = kept | given


def _entered(scope: Scope, stage: Stage, around: Any) -> Iterable[_Moment]:
    """Yields the same for the function inside an equation; for branches the largest of them."""
    (eqn,) = stage.eqns
    if stage.kind == "inline":
        inner, operands = scope.entered(stage)
        yield from _moments(inner, _shared(operands, around))
        return
    found = [
        moment
        for i in range(len(eqn.params["branches"]))
        for inner, operands in [scope.entered(stage, i)]
        for moment in _moments(inner, _shared(operands, around))
    ]
    yield _Moment(max(x.held for x in found), max(x.more for x in found))


def _scanned(scope: Scope, stage: Stage, around: Any) -> Iterable[_Moment]:
    """Yields the same for one step of a scan, plus the results of all steps and their stack."""
    (eqn,) = stage.eqns
    inner, operands = scope.stepped(stage)
    consts, count = _compat.scan_counts(eqn)
    once = frozenset(inner.jaxpr.invars[:consts])
    carried = inner.jaxpr.invars[consts : consts + count]
    through = {x for var, x in operands.items() if var not in carried}
    held = sum(bytes_of(x.aval) for x in through - around)
    rows = sum(bytes_of(x.aval) for x in eqn.outvars[count:])
    last = rows // max(eqn.params["length"], 1)
    for moment in _moments(inner, once):
        yield moment.plus(held + rows - last)
    # Each column of rows becomes one array while the rows still exist.
    yield _Moment(held + rows + sum(bytes_of(x.aval) for x in carried), rows)


def _shared(operands: Operands, around: Any) -> frozenset[Any]:
    return frozenset(var for var, x in operands.items() if x in around)
