"""A traced function as stages that the host runs one by one, each on all batches. Equations between
sites are jitted, scans over weights run step by step, branches batch by batch.

Values that depend on parameters alone are not kept. Every stage recomputes them from the current
parameters, so it sees the weights that are quantized already.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..compat import Eqn
from ..heap import give_back
from ..transforms.interpret import followed
from ..transforms.plan import Plan, Site
from ..transforms.row_counts import is_counted, value_of
from ..transforms.views import Address
from ..transforms.walk import HOLDING, addressed, bodies, bound, carried, evaluate

# Blocks: contractions whose weights are learned together, and the equations between them.


Group = tuple[str, list[Eqn], tuple[Address, ...]]
"""Equations that run together: their kind, the equations, the addresses of those with sites."""


def labels_of(
    sites: Iterable[Site], bodies: Mapping[Address, Address | None], named: str | None
) -> dict[Address, Any]:
    """Returns for each site the block that it belongs to.

    Args:
      sites: sites of weights that are learned.
      bodies: the innermost body of a scan or of `jax.checkpoint` around each site, if there is one.
      named: a pattern; sites whose paths give the same match are one block. `None` uses bodies.
    """
    labels: dict[Address, Any] = {}
    for site in sites:
        match = None if named is None else re.search(named, site.path)
        body = bodies[site.address] if named is None else None
        labels[site.address] = body or site.address
        if match is not None:
            labels[site.address] = tuple(loop.address for loop in site.loops), match.group()
    return labels


def grouped(
    groups: Sequence[Group],
    label_of: Callable[[str, Address], Any],
    address: Address,
    is_of_batch: Callable[[Any], bool],
    results: Iterable[Any],
) -> list[Group]:
    """Groups the equations of a scope, so that those of a block are together.

    A block has the equations between its sites. It also has those after the last site, up to the
    point where the fewest numbers are passed on, for example after the sum with a residual stream,
    but no equation that reduces them. A body that is one block stays whole.

    Args:
      groups: equations that are entered, and before, between and after them those that are jitted.
      label_of: returns the block of an entered equation, or `None`.
      address: address of the scope.
      is_of_batch: whether a value depends on more than parameters.
      results: results of the scope that depend on more than parameters.
    """
    entered = groups[1::2]
    labels = [label_of(kind, inside[0]) for kind, _, inside in entered]
    if labels and all(label == address for label in labels):
        return [("run", [], ()), _joined(groups), ("run", [], ())]
    crossing = _crossing(groups, is_of_batch, results)
    result, i = [groups[0]], 0
    while i < len(entered):
        label, start = labels[i], i
        if label is None:
            result += groups[2 * i + 1 : 2 * i + 3]
            i += 1
            continue
        while i + 1 < len(entered) and labels[i + 1] == label:
            i += 1
        members, (_, behind, _) = groups[2 * start + 1 : 2 * i + 2], groups[2 * i + 2]
        cut = _cut(behind, crossing[2 * i + 2], is_of_batch)
        result += [_joined([*members, ("run", behind[:cut], ())]), ("run", behind[cut:], ())]
        i += 1
    return result


def _joined(groups: Sequence[Group]) -> Group:
    eqns = [eqn for _, members, _ in groups for eqn in members]
    return "block", eqns, tuple(address for _, _, inside in groups for address in inside)


def _crossing(
    groups: Sequence[Group], is_of_batch: Callable[[Any], bool], results: Iterable[Any]
) -> list[list[int]]:
    """Returns how many numbers of a batch are still needed before each equation of each group, and
    after its last one.
    """
    needed = set(results)
    counts: list[list[int]] = []
    for _, eqns, _ in reversed(groups):
        eqn_counts = [_count(needed)]
        for eqn in reversed(eqns):
            needed = (needed - {*eqn.outvars}) | set(filter(is_of_batch, eqn.invars))
            eqn_counts.append(_count(needed))
        counts.append(eqn_counts[::-1])
    return counts[::-1]


def _cut(eqns: Sequence[Eqn], crossing: Sequence[int], is_of_batch: Callable[[Any], bool]) -> int:
    """Returns how many equations after its last site belong to a block."""
    stop = 0
    for eqn in eqns:
        operands = [x.aval for x in eqn.invars if is_of_batch(x)]
        largest = max((x.size for x in operands), default=0)
        real = any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.outvars)
        if not real or min(x.aval.size for x in eqn.outvars) < largest:
            break
        stop += 1
    return min(range(stop + 1), key=lambda i: (crossing[i], -i))


def _count(atoms: Iterable[Any]) -> int:
    return sum(x.aval.size for x in atoms)


# Compiled programs: equal stages, such as those of layers, share one program.


_PLACED = ("dynamic_slice", "dynamic_update_slice")
"""Primitives that read or write at an index, such as that of a layer in a cache."""


class Programs:
    """Functions of arrays, compiled once for all functions that trace to the same text with the
    same constants. Indices that are read or written at may differ: they become arguments.

    Traced functions live as long as this object, so that no two objects in them share an address.
    """

    def __init__(self) -> None:
        self._called: dict[Any, tuple[Any, list[Any], Any]] = {}
        self._compiled: dict[Any, Any] = {}

    def call(self, key: Any, f: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function, compiled. `key` identifies it, and lives as long as this object."""
        flat, tree = jax.tree.flatten(arguments)
        program_key = key, tree, tuple(map(compat.type_of, flat))
        is_new = program_key not in self._called
        if is_new:
            self._called[program_key] = self._compile(f, tree, flat)
        program, numbers, out = self._called[program_key]
        results = program(numbers, *flat)
        if is_new:
            give_back()  # memory that compilers freed
        return jax.tree.unflatten(out, results)

    def _compile(
        self, f: Callable[..., Any], tree: Any, flat: Sequence[Any]
    ) -> tuple[Any, list[Any], Any]:
        out = None

        def run(*leaves: Any) -> list[Any]:
            nonlocal out
            results, out = jax.tree.flatten(f(*jax.tree.unflatten(tree, leaves)))
            return results

        jaxpr, consts = compat.trace(run, *flat)
        literals = [x for eqn in jaxpr.eqns for x in _places(eqn)]
        numbers = [int(x.val) if x.aval.weak_type else np.int32(x.val) for x in literals]
        lifted, constants = jaxpr, [*consts]
        if numbers:
            evaluate = partial(_evaluated, jaxpr, consts, numbers=len(numbers))
            lifted, constants = compat.trace(evaluate, *numbers, *flat)
        key = str(lifted), tuple(map(id, (*constants, *compat.arrays_inside(lifted))))
        if key not in self._compiled:
            self._compiled[key] = jax.jit(partial(_program, lifted, constants))
        return self._compiled[key], numbers, out


def _places(eqn: compat.Eqn) -> list[Any]:
    """Returns the integer literals of an equation that may say where it reads or writes."""
    if eqn.primitive.name not in _PLACED and not compat.is_jit(eqn):
        return []
    # JAX gives a scalar int32 the same type if Python passes it.
    return [
        x
        for x in eqn.invars
        if compat.is_literal(x) and (x.aval.shape, x.aval.dtype) == ((), np.int32)
    ]


def _program(
    jaxpr: Any, consts: Sequence[Any], numbers: Sequence[Any], *arguments: Any
) -> list[Any]:
    return _evaluated(jaxpr, consts, *numbers, *arguments)


def _evaluated(jaxpr: Any, consts: Sequence[Any], *arguments: Any, numbers: int = 0) -> list[Any]:
    """Evaluates a jaxpr; the first arguments replace the indices in it."""
    indices = iter(arguments[:numbers])

    def results_of(index: int, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        lifted = set(map(id, _places(eqn) if numbers else ()))
        pairs = zip(eqn.invars, operands, strict=True)
        return bound(index, eqn, [next(indices) if id(x) in lifted else y for x, y in pairs])

    return evaluate(jaxpr, consts, arguments[numbers:], results_of)


# Integers that a function computes from floats, such as the expert of a token. The second of two
# functions that run in parallel takes those of the first, so that rows of both are the same tokens.


class Decisions:
    """Evaluates equations and records the integers that they decide, or takes known decisions.

    Attributes:
      plan: the plan.
      made: for each equation that decides, its results, and the order in which a sort puts rows.
    """

    def __init__(self, plan: Plan, decisions: Sequence[Any] | None = None, ignores: bool = False):
        self.plan, self.made, self._ignores = plan, [], ignores
        self._known = None if decisions is None else iter(decisions)

    def evaluate(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        """Returns the results of an equation."""
        if not _decides_inside(eqn):
            return followed(self.plan, eqn, operands, self._ignores)
        if not _decides(eqn):
            return self._inside(eqn, operands)
        if self._known is not None:
            return self._taken(eqn, operands, next(self._known))
        results, order = followed(self.plan, eqn, operands, self._ignores), None
        if eqn.primitive.name == "sort":
            values, params = [value_of(x) for x in operands], eqn.params
            positions = jax.lax.broadcasted_iota(jnp.int32, values[0].shape, params["dimension"])
            order = eqn.primitive.bind(*values, positions, **params)[-1]
        self.made.append((results, order))
        return results

    def _inside(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        """Evaluates the equations of the function inside an equation."""
        body, consts = compat.open_jaxpr(body_of(eqn))
        return evaluate(body, consts, operands, lambda _, eqn, xs: self.evaluate(eqn, xs))

    def _taken(self, eqn: Eqn, operands: list[Any], decided: Any) -> list[Any]:
        """Returns the decided integers, and floats from these operands in the same order."""
        decided_results, order = decided
        axis = eqn.params.get("dimension", -1)
        if eqn.primitive.name == "top_k":
            axis, order = eqn.params.get("axis", -1), value_of(decided_results[1])
        results = list(decided_results)
        for i, x in enumerate(decided_results):
            if _is_integer(value_of(x)):
                continue
            moved = jnp.take_along_axis(value_of(operands[i]), order, axis)
            results[i] = replace(x, value=moved) if is_counted(x) else moved
        return results


def _is_integer(x: Any) -> bool:
    """Whether a value may be a row index; codes of 8 bits and less are values."""
    return jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits > 8


def _decides(eqn: Eqn) -> bool:
    """Whether an equation computes integers from something else. It must be known how its other
    results follow from these integers.
    """
    kinds = [_is_integer(x.aval) for x in eqn.outvars]
    of_others = not all(_is_integer(x.aval) for x in eqn.invars)
    is_supported = all(kinds) or eqn.primitive.name in ("sort", "top_k")
    return of_others and is_supported and (any(kinds) or len(eqn.outvars) > 1)


def _decides_inside(eqn: Eqn) -> bool:
    """Whether an equation decides, or one of a function that it runs once."""
    if _decides(eqn):
        return True
    name = eqn.primitive.name
    if name not in HOLDING or name in ("scan", "while", "cond", "shard_map"):
        return False
    return any(_decides_inside(x) for x in compat.open_jaxpr(body_of(eqn))[0].eqns)


def body_of(eqn: Eqn) -> Any:
    """Returns the one function inside an equation that runs on its operands."""
    return bodies(eqn)[-1].jaxpr


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
      released: the values that nothing reads after it.
    """

    kind: str
    eqns: tuple[Eqn, ...]
    inside: tuple[Address, ...]
    reads: tuple[Any, ...]
    gives: tuple[Any, ...]
    released: tuple[Any, ...]

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
      mask: which of these are used; `None` for all.
      index: where they are.
      stepped: whether the index consists of the steps of surrounding scans.
    """

    leaf: jax.Array
    values: jax.Array
    mask: jax.Array | None
    index: tuple[Any, ...]
    stepped: bool

    def whole(self) -> jax.Array:
        """Returns the leaf."""
        values, leading = self.values.astype(self.leaf.dtype), (1,) * len(self.index)
        start = [*self.index, *[0] * values.ndim]
        if self.mask is not None:
            current = lax.dynamic_slice(self.leaf, start, (*leading, *values.shape))
            values = jnp.where(self.mask, values, current.reshape(values.shape))
        if not self.index:
            return values
        return lax.dynamic_update_slice(self.leaf, values.reshape(*leading, *values.shape), start)

    def step(self, depth: int) -> jax.Array | None:
        """Returns the part that a scan over it reads in this step, without building the whole leaf;
        `None` if that needs more than the values.
        """
        is_enough = self.stepped and self.mask is None and (depth, len(self.index)) == (1, 1)
        return self.values.astype(self.leaf.dtype) if is_enough else None


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """How a function is divided into stages.

    Attributes:
      plan: the plan.
      is_own_site: says which sites are stages, or parts of blocks.
      blocks: for each such site the block that it belongs to, by address.
      returns: whether results are needed, such as logits; if not, nothing runs after the last site.
      ignores: whether rows that are not finite are left out.
      programs: the programs of all stages.
    """

    plan: Plan
    is_own_site: Callable[[Site], bool]
    blocks: Mapping[Address, Any]
    returns: bool
    ignores: bool
    programs: Programs = dataclasses.field(default_factory=Programs)

    def sites_in(self, address: Address) -> list[Site]:
        """Returns the sites inside an equation that are stages, or parts of blocks."""
        n = len(address)
        return [x for x in self.plan.sites if x.address[:n] == address and self.is_own_site(x)]


class Scope:
    """A jaxpr whose operands are known to be values of batches or made of parameters alone.

    Attributes:
      jaxpr: an open jaxpr.
      depth: number of surrounding scans that the host steps through.
      stages: the stages, in order.
    """

    def __init__(
        self,
        division: Division,
        jaxpr: Any,
        consts: Sequence[Any],
        sources: Mapping[Any, Source],
        address: Address = (),
        depth: int = 0,
    ):
        self._division, self.jaxpr, self.depth = division, jaxpr, depth
        self._consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self._sources = dict(sources)
        self._made: dict[Any, Eqn] = {}
        self._inner: dict[Address, tuple[Scope, Operands]] = {}
        self._leaves: dict[Any, frozenset[int]] = {}
        self.stages = self._staged(address)

    def is_of_batch(self, atom: Any) -> bool:
        """Whether a value depends on more than parameters."""
        sets = self._consts, self._sources, self._made
        return not compat.is_literal(atom) and not any(atom in atoms for atoms in sets)

    def _staged(self, address: Address) -> list[Stage]:
        # Before, between and after the others stands a stage of jitted equations, empty or not, so
        # that functions traced for other batches have the same number of stages.
        groups: list[Group] = [("run", [], ())]
        for eqn_address, eqn, marked in addressed(self.jaxpr, address):
            if not any(map(self.is_of_batch, eqn.invars)) and not eqn.effects:
                self._made.update(dict.fromkeys(eqn.outvars, eqn))
                continue
            kind = self._kind(eqn, eqn_address) if marked else "run"
            if kind == "run":
                groups[-1][1].append(eqn)
            else:
                groups += [(kind, [eqn], (eqn_address,)), ("run", [], ())]
        needed = set(filter(self.is_of_batch, self.jaxpr.outvars))
        if not (self._division.returns or address):
            groups[-1], needed = ("run", [], ()), set()
        if self._division.blocks:
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
            released = tuple(x for x in reads if x not in needed)
            needed = (needed - inside) | set(reads)
            stages.append(Stage(kind, tuple(eqns), entered, reads, gives, released))
        return stages[::-1]

    def _kind(self, eqn: Eqn, address: Address) -> str:
        """Returns how to run an equation that is a site, or may have some inside."""
        division, name = self._division, eqn.primitive.name
        site = division.plan.site_at(address)
        if site is not None:
            return "site" if division.is_own_site(site) else "run"
        if not division.sites_in(address):
            return "run"
        if name == "scan":
            return "scan" if eqn.params["length"] else "run"
        if name == "cond":
            return "branch"
        return "run" if name in ("while", "shard_map") else "inline"

    def _label(self, kind: str, address: Address) -> Any:
        """Returns the block that an equation belongs to as a whole; `None` if there is none."""
        sites = self._division.sites_in(address)
        labels = {self._division.blocks[x.address] for x in sites}
        stepped = any(len(x.loops) > self.depth for x in sites)
        is_whole = kind in ("site", "inline") and len(labels) == 1 and not stepped
        return labels.pop() if is_whole else None

    def read(self, atom: Any, params: Params, steps: Steps, memo: dict[Any, Any]) -> Any:
        """Returns a value that depends on parameters alone; traceable."""
        value = self._read(atom, params, steps, memo)
        return value.whole() if isinstance(value, Replaced) else value

    def _read(self, atom: Any, params: Params, steps: Steps, memo: dict[Any, Any]) -> Any:
        if compat.is_literal(atom):
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
            results = compat.bind(eqn, [self.read(x, params, steps, memo) for x in eqn.invars])
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
        if compat.is_literal(atom):
            return frozenset()
        if atom not in self._leaves:
            source, eqn, leaves = self._sources.get(atom), self._made.get(atom), frozenset()
            if source is not None:
                scope = source.scope
                leaves = frozenset([source.atom]) if scope is None else scope.needs([source.atom])
            elif eqn is not None:
                leaves = self.needs(eqn.invars)
            self._leaves[atom] = leaves
        return self._leaves[atom]

    def read_by(self, stage: Stage) -> frozenset[int]:
        """Returns the indices of the leaves that a stage reads."""
        return self.needs([x for eqn in stage.eqns for x in eqn.invars])

    def run(
        self,
        stage: Stage,
        params: Params,
        steps: Steps,
        operands: Sequence[Any],
        decided: Sequence[Any] | None = None,
        records: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Runs a stage without sites on the values of one batch that it reads. `params` must hold
        at least the leaves that it needs.

        Returns its results, and, if `records`, what it decided.
        """

        def run(
            params: Params, steps: Steps, operands: Sequence[Any], decided: Sequence[Any] | None
        ) -> tuple[list[Any], list[Any]]:
            env, memo = dict(zip(stage.reads, operands, strict=True)), {}
            plan, ignores = self._division.plan, self._division.ignores
            decisions = Decisions(plan, decided, ignores)
            is_plain = decided is None and not records
            plainly = partial(followed, plan, leaves_out=ignores)
            results_of = plainly if is_plain else decisions.evaluate

            def read(atom: Any) -> Any:
                of_batch = self.is_of_batch(atom)
                return env[atom] if of_batch else self.read(atom, params, steps, memo)

            for eqn in stage.eqns:
                results = results_of(eqn, list(map(read, eqn.invars)))
                env.update(zip(eqn.outvars, results, strict=True))
            return [env[var] for var in stage.gives], decisions.made

        if any(isinstance(x, Replaced) for x in params.values()):
            return run(params, steps, list(operands), decided)
        key = "run", id(stage), records
        return self._division.programs.call(key, run, params, steps, list(operands), decided)

    def values(self, atoms: Sequence[Any], params: Params, steps: Steps) -> list[Any]:
        """Returns values that depend on parameters alone."""

        def read(params: Params, steps: Steps) -> list[Any]:
            memo: dict[Any, Any] = {}
            return [jnp.asarray(self.read(x, params, steps, memo)) for x in atoms]

        atom_keys = tuple(id(x) if compat.is_literal(x) else x for x in atoms)
        return self._division.programs.call(("values", id(self), atom_keys), read, params, steps)

    def entered(self, stage: Stage, branch: int = -1) -> "tuple[Scope, Operands]":
        """Returns the scope of the function inside an equation, or of a branch of it, and its
        operands that are values of batches, with the values here that they come from. What a scan
        carries depends on batches.
        """
        (eqn,) = stage.eqns
        body, state, is_scan = bodies(eqn)[branch], carried(eqn), eqn.primitive.name == "scan"
        address = (*stage.here, *body.part)
        if address not in self._inner:
            inner, consts = compat.open_jaxpr(body.jaxpr)
            sources, operands = {}, {}
            for var, i in zip(inner.invars, body.operands, strict=True):
                if self.is_of_batch(eqn.invars[i]):
                    operands[var] = eqn.invars[i]
                elif not state.start <= i < state.stop:
                    sources[var] = Source(self, eqn.invars[i], is_scan and i >= state.stop)
            depth = self.depth + is_scan
            scope = Scope(self._division, inner, consts, sources, address, depth)
            self._inner[address] = scope, operands
        return self._inner[address]


Operands = Mapping[Any, Any]
"""Maps operands of a function inside an equation that are values of batches to the operands of the
equation that they come from.
"""
