"""Which weights cannot be quantized as planned, because scales in blocks cannot follow the views of
the function.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .. import _compat
from .._compat import Eqn
from ..tensor._shared import abstract, groups_of
from ._find import Found
from ._interpret import interpret
from ._on_integers import OnIntegers, quantized_leaf
from ._plan import Plan
from ._site import Site
from ._trace import Call
from ._weight import is_coded, real_of
from .primitives import Records


def lost(call: Call, plan: Plan, sites: Sequence[tuple[Site, Found]]) -> dict[str, str]:
    """Returns the paths of weights whose scales cannot follow the views on the way to a site, each
    with the reason.

    Only scales in blocks can fail to follow, and those of joined weights, each of which becomes a
    block. If views change an axis in blocks or join weights, or a kernel of a convolution is in
    blocks, the function is traced once as `convert` would.
    """
    changed = {site.name: _changed(plan, call, item) for site, item in sites}
    if not any(changed.values()):
        return {}
    trial = _Trial(plan, failed={})

    def run(leaves: list[Any]) -> list[Any]:
        pairs = zip(leaves, call.paths, strict=True)
        given = [quantized_leaf(leaf, path, plan, {}) for leaf, path in pairs]
        out = interpret(call.jaxpr, call.consts, given, trial)[0]
        return [real_of(x) for x in out]

    jax.eval_shape(run, list(map(abstract, call.leaves)))
    found: dict[str, str] = {}
    for name in (site.name for site, _ in sites if site.name in trial.failed):
        for path, views in changed[name].items():
            why = f"scales of {path!r} cannot follow its {views}"
            if not views:
                why = trial.failed[name].partition(": ")[2].rstrip(".")
            shared = plan.weight_at(path)
            if shared is not None and shared.sites > 1:
                why += f" at {name}"
            found.setdefault(path, why)
    return found


def _changed(plan: Plan, call: Call, item: Found) -> dict[str, str]:
    """Returns the paths of the weights whose contraction may have no quantized form, each with the
    views that change an axis in blocks or join weights: those that have any, and kernels of
    convolutions in blocks.
    """
    parts = [part for origin in item.origins if origin for part in origin.parts]
    is_kernel = item.op == "conv_general_dilated"
    found = {}
    for part in parts:
        weight = plan.weight_at(part.path)
        if weight is None or not (is_kernel or part.moved or part.cut):
            continue
        shape = tuple(call.leaves[call.paths.index(part.path)].shape)
        groups = groups_of("make_plan", weight.spec, shape)
        names = {
            name for axis, name in part.moved | part.cut if groups.is_blocked(axis) or name == _JOIN
        }
        if names or (is_kernel and any(map(groups.is_blocked, range(len(shape))))):
            found[part.path] = " and ".join(f"`{name}`" for name in sorted(names))
    return found


_JOIN = "concatenate"


@dataclasses.dataclass(frozen=True)
class _Trial(OnIntegers):
    """Rules of `convert` that go on in float where a scale cannot follow.

    Attributes:
      failed: the names of the sites that were computed in float, with the errors.
    """

    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        pairs = zip(site.operands, operands, strict=False)
        lost = [x for own, x in pairs if own.role == "weight" and own.spec and not is_coded(x)]
        if not lost:
            try:
                return super().at_site(site, eqn, operands)
            except (ValueError, NotImplementedError) as error:
                self.failed[site.name] = str(error).splitlines()[0]
        self.failed.setdefault(site.name, "")
        return _compat.bind(eqn, list(map(real_of, operands)))[0], {}

    def view(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
        try:
            return super().view(eqn, operands)
        except ValueError:
            return _compat.bind(eqn, list(map(real_of, operands)))

    def contract(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        return self.unsupported(eqn, operands)

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        return real_of(x)
