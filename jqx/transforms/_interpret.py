"""Evaluating a jaxpr with a rule for its sites; every other equation is evaluated as it stands.

Nothing is patched and no state is kept: what a site records comes back as a dict beside the
results.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from .. import _compat
from .._compat import Eqn
from .._errors import message
from ._find import is_marked
from ._origin import Origin
from ._plan import Address, Plan, Site
from ._trace import is_quantized
from .primitives import CONTRACTIONS, VIEWS

Records = dict[str, Any]


class Rules(Protocol):
    """What a transform does at the sites of a plan, and where a QTensor meets anything else."""

    @property
    def plan(self) -> Plan: ...

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        """Evaluates a planned contraction."""
        ...

    def unsupported(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Evaluates an equation that has no rule for the QTensor among its operands."""
        ...


def interpret(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rules: Rules, address: Address = ()
) -> tuple[list[Any], Records]:
    """Evaluates a jaxpr and returns its results and what its sites recorded."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    last_use = {
        atom: i
        for i, eqn in enumerate(jaxpr.eqns)
        for atom in eqn.invars
        if not _compat.is_literal(atom)
    }
    kept = {atom for atom in jaxpr.outvars if not _compat.is_literal(atom)}

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    records: Records = {}
    marked = 0
    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in eqn.invars]
        holds_site = is_marked(eqn)
        with _compat.equation_context(eqn):
            results, recorded = _evaluate(eqn, operands, rules, (*address, marked), holds_site)
        marked += holds_site
        records.update(recorded)
        env.update(zip(eqn.outvars, results, strict=True))
        for atom in eqn.invars:
            if not _compat.is_literal(atom) and last_use[atom] == i and atom not in kept:
                env.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars], records


def _evaluate(
    eqn: Eqn, operands: list[Any], rules: Rules, here: Address, holds_site: bool
) -> tuple[list[Any], Records]:
    name = eqn.primitive.name
    quantized = [i for i, operand in enumerate(operands) if is_quantized(operand)]
    if name in CONTRACTIONS:
        site = next((site for site in rules.plan.sites if site.address == here), None)
        if site is not None:
            result, records = rules.at_site(site, eqn, operands)
            return [result], records
    if _compat.is_jit(eqn) and (quantized or holds_site):
        return _call(eqn, operands, rules, here)
    if not quantized:
        return _compat.bind(eqn, operands), {}
    if len(quantized) == 1 and _is_view(eqn, quantized[0]):
        return [VIEWS[name].apply(eqn, quantized[0], operands)], {}
    return rules.unsupported(eqn, operands), {}


def _is_view(eqn: Eqn, position: int) -> bool:
    """Whether an equation is a view of its operand at `position`, as planning sees it."""
    view = VIEWS.get(eqn.primitive.name)
    origin = Origin.of_leaf("", eqn.invars[position].aval.ndim)
    return view is not None and view.track(eqn, position, origin) is not None


def _call(eqn: Eqn, operands: list[Any], rules: Rules, here: Address) -> tuple[list[Any], Records]:
    """Evaluates the call of a jitted function as the call of one that interprets its body."""
    if _compat.has_shardings(eqn):
        raise NotImplementedError(
            message(
                "transforms",
                f"the jitted function {eqn.params['name']!r} fixes shardings: not supported yet.",
                given="jax.jit(..., in_shardings=... or out_shardings=...) inside f",
                expected="a nested jit without shardings",
                mend="use jax.lax.with_sharding_constraint inside f, or shard the outer jit.",
            )
        )
    body, consts = _compat.open_jaxpr(eqn.params["jaxpr"])

    def run(*args: Any) -> tuple[list[Any], Records]:
        return interpret(body, consts, args, rules, here)

    run.__name__ = str(eqn.params["name"])
    return jax.jit(run, inline=eqn.params["inline"])(*operands)
