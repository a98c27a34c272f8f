"""A traced function as stages that the host runs one by one, each on all batches. Equations between
sites are jitted, scans over weights run step by step, branches batch by batch.

Values that depend on parameters alone are not kept. Every stage recomputes them from the current
parameters, so it sees the weights that are quantized already.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._compat import Eqn
from ..transforms import Plan, Site
from ..transforms._shared import Address, Call, addressed, followed
from ._blocks import Group, grouped
from ._decisions import Decisions, body_of
from ._programs import Programs

Params = Mapping[int, Any]
"""The leaves of the parameters, by their index among the operands of the jaxpr; some are `Replaced`
when a function is traced.
"""

Steps = tuple[Any, ...]
"""The step number of each surrounding scan that the host steps through, outermost first."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Equations that run at once.

    Attributes:
      kind: `run` for equations that are jitted together, `block` for those of a block; `site`,
        `inline`, `scan` or `branch` for a single equation.
      eqns: the equations.
      inside: the addresses of those that are sites, or have some inside.
      reads: the values of batches that it reads, each once.
      gives: the values of batches that it defines and others read.
      last: the values that nothing reads after it.
    """

    kind: str
    eqns: tuple[Eqn, ...]
    inside: tuple[Address, ...]
    reads: tuple[Any, ...]
    gives: tuple[Any, ...]
    last: tuple[Any, ...]

    @property
    def here(self) -> Address:
        """The address of a single equation."""
        return self.inside[0]


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin of an operand of an inner jaxpr that depends on parameters alone.

    Attributes:
      scope: the surrounding scope, or `None` for a leaf of the parameters.
      atom: the value in that scope, or the index of the leaf.
      stepped: whether the operand is one step of it.
    """

    scope: "Scope | None"
    atom: Any
    stepped: bool = False


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A leaf of the parameters with other values at an index of its first axes.

    Attributes:
      leaf: the original leaf.
      values: the new values.
      own: which of these are used; `None` for all.
      index: where they are.
      stepped: whether the index consists of the steps of surrounding scans.
    """

    leaf: jax.Array
    values: jax.Array
    own: jax.Array | None
    index: tuple[Any, ...]
    stepped: bool

    def whole(self) -> jax.Array:
        """Returns the leaf."""
        values, more = self.values.astype(self.leaf.dtype), (1,) * len(self.index)
        start = [*self.index, *[0] * values.ndim]
        if self.own is not None:
            held = lax.dynamic_slice(self.leaf, start, (*more, *values.shape))
            values = jnp.where(self.own, values, held.reshape(values.shape))
        if not self.index:
            return values
        return lax.dynamic_update_slice(self.leaf, values.reshape(*more, *values.shape), start)

    def step(self, depth: int) -> jax.Array | None:
        """Returns the part that a scan over it reads in this step, without building the whole leaf;
        `None` if that needs more than the values.
        """
        alone = self.stepped and self.own is None and (depth, len(self.index)) == (1, 1)
        return self.values.astype(self.leaf.dtype) if alone else None


class Scope:
    """A jaxpr whose operands are known to be values of batches or made of parameters alone.

    Attributes:
      jaxpr: an open jaxpr.
      depth: number of surrounding scans that the host steps through.
      stages: the stages, in order.
    """

    def __init__(
        self,
        plan: Plan,
        jaxpr: Any,
        consts: Sequence[Any],
        sources: Mapping[Any, Source],
        address: Address = (),
        depth: int = 0,
        own: Callable[[Site], bool] = lambda site: True,
        blocks: Mapping[Address, Any] | None = None,
        programs: Programs | None = None,
        returns: bool = True,
        ignores: bool = False,
    ):
        self._returns, self._ignores = returns, ignores
        self._programs = Programs() if programs is None else programs
        self.plan, self.jaxpr, self.depth, self.own = plan, jaxpr, depth, own
        self._blocks = {} if blocks is None else blocks
        self._consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self._sources = dict(sources)
        self._made: dict[Any, Eqn] = {}
        self._inner: dict[Address, tuple[Scope, Operands]] = {}
        self._leaves: dict[Any, frozenset[int]] = {}
        self.stages = self._staged(address)

    def is_of_batch(self, atom: Any) -> bool:
        """Whether a value depends on more than parameters."""
        known = self._consts, self._sources, self._made
        return not _compat.is_literal(atom) and not any(atom in those for those in known)

    def _staged(self, address: Address) -> list[Stage]:
        # Before, between and after the others stands a stage of jitted equations, empty or not, so
        # that functions traced for other batches have the same number of stages.
        groups: list[Group] = [("run", [], ())]
        for here, eqn, marked in addressed(self.jaxpr, address):
            if not any(map(self.is_of_batch, eqn.invars)) and not eqn.effects:
                self._made.update(dict.fromkeys(eqn.outvars, eqn))
                continue
            kind = self._kind(eqn, here) if marked else "run"
            if kind == "run":
                groups[-1][1].append(eqn)
            else:
                groups += [(kind, [eqn], (here,)), ("run", [], ())]
        needed = set(filter(self.is_of_batch, self.jaxpr.outvars))
        if not self._returns:
            groups[-1], needed = ("run", [], ()), set()
        if self._blocks:
            groups = grouped(groups, self._label, address, self.is_of_batch, needed)
        stages: list[Stage] = []
        for kind, eqns, entered in reversed(groups):
            defined = [var for eqn in eqns for var in eqn.outvars]
            inside = set(defined)
            read = [
                x for eqn in eqns for x in eqn.invars if self.is_of_batch(x) and x not in inside
            ]
            reads = tuple(dict.fromkeys(read))
            gives = tuple(var for var in defined if var in needed)
            last = tuple(x for x in reads if x not in needed)
            needed = (needed - inside) | set(reads)
            stages.append(Stage(kind, tuple(eqns), entered, reads, gives, last))
        return stages[::-1]

    def _kind(self, eqn: Eqn, here: Address) -> str:
        """Returns how to run an equation that is a site, or may have some inside."""
        name, site = eqn.primitive.name, self.plan.site_at(here)
        if site is not None:
            return "site" if self.own(site) else "run"
        n = len(here)
        if not any(x.address[:n] == here and self.own(x) for x in self.plan.sites):
            return "run"
        if name == "scan":
            return "scan" if eqn.params["length"] else "run"
        if name == "cond":
            return "branch"
        return "run" if name in ("while", "shard_map") else "inline"

    def _label(self, kind: str, here: Address) -> Any:
        """Returns the block that an equation belongs to as a whole; `None` if there is none."""
        n = len(here)
        sites = [x for x in self.plan.sites if x.address[:n] == here and self.own(x)]
        labels = {self._blocks[x.address] for x in sites}
        stepped = any(len(x.loops) > self.depth for x in sites)
        is_whole = kind in ("site", "inline") and len(labels) == 1 and not stepped
        return labels.pop() if is_whole else None

    def read(self, atom: Any, params: Params, steps: Steps, memo: dict[Any, Any]) -> Any:
        """Returns a value that depends on parameters alone; traceable."""
        found = self._read(atom, params, steps, memo)
        return found.whole() if isinstance(found, Replaced) else found

    def _read(self, atom: Any, params: Params, steps: Steps, memo: dict[Any, Any]) -> Any:
        if _compat.is_literal(atom):
            return atom.val
        key = (id(self), atom)
        if key in memo:
            return memo[key]
        if atom in self._consts:
            value = self._consts[atom]
        elif atom in self._sources:
            value = self._from(self._sources[atom], params, steps, memo)
        else:
            eqn = self._made[atom]
            results = _compat.bind(eqn, [self.read(x, params, steps, memo) for x in eqn.invars])
            memo.update(((id(self), var), x) for var, x in zip(eqn.outvars, results, strict=True))
            value = memo[key]
        memo[key] = value
        return value

    def _from(self, source: Source, params: Params, steps: Steps, memo: dict[Any, Any]) -> Any:
        if source.scope is None:
            return params[source.atom]
        value = source.scope._read(source.atom, params, steps, memo)
        if not source.stepped:
            return value
        if isinstance(value, Replaced):
            step = value.step(self.depth)
            if step is not None:
                return step
            value = value.whole()
        return lax.dynamic_index_in_dim(value, steps[self.depth - 1], keepdims=False)

    def needs(self, atoms: Sequence[Any]) -> frozenset[int]:
        """Returns the indices of the leaves that values depend on, ignoring values of batches."""
        return frozenset().union(*map(self._needs, atoms))

    def _needs(self, atom: Any) -> frozenset[int]:
        if _compat.is_literal(atom):
            return frozenset()
        if atom not in self._leaves:
            source, eqn, found = self._sources.get(atom), self._made.get(atom), frozenset()
            if source is not None:
                scope = source.scope
                found = frozenset([source.atom]) if scope is None else scope.needs([source.atom])
            elif eqn is not None:
                found = self.needs(eqn.invars)
            self._leaves[atom] = found
        return self._leaves[atom]

    def read_by(self, stage: Stage) -> frozenset[int]:
        """Returns the indices of the leaves that a stage reads."""
        return self.needs([x for eqn in stage.eqns for x in eqn.invars])

    def run(
        self,
        stage: Stage,
        params: Params,
        steps: Steps,
        given: Sequence[Any],
        decided: Sequence[Any] | None = None,
        records: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Runs a stage without sites on the values of one batch that it reads. `params` must hold
        at least the leaves that it needs.

        Returns its results, and, if `records`, what it decided.
        """

        def evaluate(
            params: Params, steps: Steps, given: Sequence[Any], decided: Sequence[Any] | None
        ) -> tuple[list[Any], list[Any]]:
            env, memo = dict(zip(stage.reads, given, strict=True)), {}
            decisions = Decisions(self.plan, decided, self._ignores)
            alone = decided is None and not records
            plainly = partial(followed, self.plan, leaves_out=self._ignores)
            results_of = plainly if alone else decisions.evaluate

            def read(atom: Any) -> Any:
                of_batch = self.is_of_batch(atom)
                return env[atom] if of_batch else self.read(atom, params, steps, memo)

            for eqn in stage.eqns:
                results = results_of(eqn, list(map(read, eqn.invars)))
                env.update(zip(eqn.outvars, results, strict=True))
            return [env[var] for var in stage.gives], decisions.made

        if any(isinstance(x, Replaced) for x in params.values()):
            return evaluate(params, steps, list(given), decided)
        key = "run", id(stage), records
        return self._programs.call(key, evaluate, params, steps, list(given), decided)

    def values(self, atoms: Sequence[Any], params: Params, steps: Steps) -> list[Any]:
        """Returns values that depend on parameters alone."""

        def evaluate(params: Params, steps: Steps) -> list[Any]:
            memo: dict[Any, Any] = {}
            return [jnp.asarray(self.read(x, params, steps, memo)) for x in atoms]

        own = tuple(id(x) if _compat.is_literal(x) else x for x in atoms)
        return self._programs.call(("values", id(self), own), evaluate, params, steps)

    def entered(self, stage: Stage, branch: int | None = None) -> "tuple[Scope, Operands]":
        """Returns the scope of the function inside an equation, or of a branch of it, and its
        operands that are values of batches, with the values here that they come from.
        """
        (eqn,) = stage.eqns
        if branch is None:
            return self._inside(stage, body_of(eqn), eqn.invars)
        return self._inside(stage, eqn.params["branches"][branch], eqn.invars[1:], (branch,))

    def stepped(self, stage: Stage) -> "tuple[Scope, Operands]":
        """Returns the same for a scan that the host steps through. Its carry depends on batches."""
        (eqn,) = stage.eqns
        consts, count = _compat.scan_counts(eqn)
        first = consts + count
        carried = eqn.invars[consts:first]
        steps = range(first, len(eqn.invars))
        return self._inside(stage, eqn.params["jaxpr"], eqn.invars, (), carried, steps)

    def _inside(
        self,
        stage: Stage,
        body: Any,
        atoms: Sequence[Any],
        part: Address = (),
        carried: Sequence[Any] = (),
        steps: Sequence[int] | None = None,
    ) -> "tuple[Scope, Operands]":
        address = (*stage.here, *part)
        if address not in self._inner:
            inner, consts = _compat.open_jaxpr(body)
            first = 0 if steps is None else len(atoms) - len(steps) - len(carried)
            changing = range(first, first + len(carried))
            sources, operands = {}, {}
            for i, (var, atom) in enumerate(zip(inner.invars, atoms, strict=True)):
                if self.is_of_batch(atom):
                    operands[var] = atom
                elif i not in changing:
                    sources[var] = Source(self, atom, steps is not None and i in steps)
            depth = self.depth + (steps is not None)
            shared = self.own, self._blocks, self._programs, True, self._ignores
            scope = Scope(self.plan, inner, consts, sources, address, depth, *shared)
            self._inner[address] = scope, operands
        return self._inner[address]


Operands = Mapping[Any, Any]
"""Maps operands of a function inside an equation that are values of batches to the operands of the
equation that they come from.
"""


def whole(
    plan: Plan,
    call: Call,
    own: Callable[[Site], bool],
    blocks: Mapping[Address, Any] | None = None,
    programs: Programs | None = None,
    returns: bool = True,
    ignores: bool = False,
) -> Scope:
    """Returns the scope of a call.

    Args:
      plan: the plan.
      call: the call.
      own: says which sites are stages, or parts of blocks, by their address.
      blocks: for each such site the block that it belongs to.
      programs: the programs of other calls.
      returns: whether results are needed, such as logits; if not, nothing runs after the last site.
      ignores: whether rows that are not finite are left out.
    """
    sources = {
        var: Source(None, place)
        for place, (var, path) in enumerate(zip(call.jaxpr.invars, call.paths, strict=True))
        if path is not None
    }
    shared = {"own": own, "blocks": blocks, "programs": programs, "returns": returns}
    return Scope(plan, call.jaxpr, call.consts, sources, **shared, ignores=ignores)
