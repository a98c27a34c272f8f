"""Resolves specs of a plan to the axes of weights, and of activations at a site."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .._errors import fail
from ..contractions._shared import can_leave_sum
from ..tensor import QSpec
from ..tensor._shared import groups_of
from ._find import Found
from ._origin import Origin, close_over_merges
from ._site import Site, Weight


def resolve_weights(
    function: str,
    sites: Sequence[tuple[Site, Found]],
    shapes_of: Mapping[str, tuple[int, ...]],
) -> tuple[Weight, ...]:
    """Resolves the spec of every weight in its own axes; sites that share a weight must agree."""
    specs: dict[str, tuple[QSpec | None, int]] = {}
    kept: dict[str, list[frozenset[int]]] = {}
    stacked: dict[str, list[frozenset[int]]] = {}
    merged: dict[str, set[frozenset[int]]] = {}
    summed: dict[str, set[frozenset[int]]] = {}
    moved: dict[str, set[int]] = defaultdict(set)
    cut: dict[str, set[int]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for site, item in sites:
        for operand, origin, axes in zip(
            site.operands, item.origins, item.family.axes(item.eqn), strict=True
        ):
            if origin is None:
                continue
            counts.update({part.path for part in origin.parts})
            for part in origin.parts:
                path, rank = part.path, len(shapes_of[part.path])
                spec, place = specs.setdefault(path, (operand.spec, site.rule))
                if spec != operand.spec:
                    raise fail(
                        function,
                        f"two rules give the weight {path!r} different specs.",
                        given=f"rule {place}: {spec}; rule {site.rule}: {operand.spec}",
                        expected="one spec for one weight, wherever it is used",
                        fix="let one rule match every use of it.",
                    )
                moved[path].update(axis - rank for axis, _ in part.moved)
                cut[path].update(axis - rank for axis, _ in part.cut)
                merged.setdefault(path, set()).update(part.merged)
                kept.setdefault(path, []).append(part.kept(axes.kept, rank))
                stacked.setdefault(path, []).append(_stacked(part, axes.kept, axes.batch, rank))
                held = frozenset().union(*(part.dims[dim] for dim in axes.contracted))
                summed.setdefault(path, set()).update([held] if axes.contracted else [])
    weights = []
    for path, (spec, place) in specs.items():
        if spec is None:
            continue
        axes = close_over_merges(frozenset.intersection(*kept[path]), merged[path])
        stack = frozenset.intersection(*stacked[path])
        where = f"weight {path!r}, rule {place}"
        try:
            resolved = spec.resolve(len(shapes_of[path]), sorted(axes), sorted(stack))
        except ValueError as error:
            raise ValueError(f"{error} Here it is {_GRANULARITY}, at {where}.") from None
        differ = len(set(kept[path])) > 1
        for here in kept[path]:
            _check_kept(function, resolved, shapes_of[path], here, where, tied=differ)
        last = summed[path] == {frozenset({len(shapes_of[path]) - 1})}
        contracted = -1 if last else None
        views = tuple(sorted(moved[path])), tuple(sorted(cut[path]))
        weights.append(Weight(path, resolved, f"{path}:weight", counts[path], contracted, *views))
    return tuple(weights)


_GRANULARITY = "jqx.per_channel() or jqx.per_group(size), which find the axes of a weight"


def _stacked(part: Origin, kept: Sequence[int], batch: Sequence[int], rank: int) -> frozenset[int]:
    """Returns the axes of a weight along which it is a stack of weights.

    They are in batch axes, or not in the value at all, which is then one of the stack. `vmap` makes
    no batch axis if all share the other operand. Then they are the axes in front of all contracted
    ones, of which the last is left to the weights themselves.
    """
    batch_axes, own = part.kept(batch, rank), part.kept(kept, rank)
    contracted = min(frozenset(range(rank)) - own, default=0)
    return batch_axes | {axis for axis in sorted(own - batch_axes)[:-1] if axis < contracted}


def resolve_activation(
    function: str,
    spec: QSpec,
    shape: tuple[int, ...],
    kept: Sequence[int],
    where: str,
    stacked: Sequence[int] = (),
) -> QSpec:
    """Resolves the spec of an activation, or of a result, in its own axes; `where` for errors."""
    if not spec.dynamic and spec.granularity.is_relative:
        raise fail(
            function,
            f"a static scale per token is bound to one batch size ({where}).",
            given=f"granularity {spec.granularity} with dynamic=False",
            expected="per_tensor() for static scales, or dynamic=True",
            fix="pass dynamic=True, or granularity=jqx.per_tensor().",
        )
    resolved = spec.resolve(len(shape), kept, stacked)
    _check_kept(function, resolved, shape, kept, where)
    return resolved


def _check_kept(
    function: str,
    spec: QSpec,
    shape: tuple[int, ...],
    kept: Sequence[int] | frozenset[int],
    where: str,
    tied: bool = False,
) -> None:
    """Raises if each element that the contraction sums over has its own scale.

    With `tied`, other sites contract other axes of the same weight.
    """
    fix = f"use {_GRANULARITY}, or jqx.per_axis({', '.join(map(str, sorted(kept)))})."
    if tied:
        fix = "its sites contract different axes: put a separate rule for it first, with "
        fix += "per_tensor(), or with blocks along all of them, such as per_block({0: 8, 1: 8})."
    try:
        groups = groups_of(function, spec, shape)
    except ValueError as error:
        raise ValueError(f"{error}\n  at:       {where}") from None
    if not can_leave_sum(groups, set(range(len(shape))) - set(kept)):
        raise fail(
            function,
            f"the scale varies along a contracted axis ({where}).",
            given=f"granularity {spec.granularity}; the contraction keeps axes {sorted(kept)}",
            expected="a scale that is shared along every contracted axis, or in blocks",
            fix=fix,
        )
