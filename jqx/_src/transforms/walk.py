"""The one walk over the equations of a traced function, in the order in which they run. It knows
every primitive that holds functions. An analysis is a `Domain`: what is known of a value, and how
equations change that.

Equations are numbered here too: the address of a site is the number of contractions, and of
equations that hold one, before it in each function around it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from .. import compat
from ..compat import Eqn
from .rules import CONTRACTIONS
from .views import Address, Loop

V = TypeVar("V")

HIDDEN = "jqx_channel_map"
"""Name of jitted functions whose contractions belong to another contraction and are not found."""


# The functions that an equation holds.


REMAT = ("remat2", "remat", "checkpoint")
"""Names of `jax.checkpoint`."""

CALLS = {
    **dict.fromkeys(("jit", "pjit", *REMAT), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
}
"""Primitives whose function runs once, on the operands of the equation: where they hold it."""

HOLDING = {*CALLS, "scan", "while", "cond", "shard_map"}
"""Primitives that hold functions which the transforms search and run."""


class Body(NamedTuple):
    """A function that an equation holds.

    Attributes:
      jaxpr: the function.
      part: what addresses inside it have after the address of the equation.
      operands: for each of its operands the index of that of the equation, or of the stack of which
        a step of a scan gets a slice.
    """

    jaxpr: Any
    part: Address
    operands: Sequence[int]


CONDITION: Address = (-1,)
"""The part of the address of the condition of a while loop. It holds no site."""

NOWHERE: Address = (-1,)
"""The part of addresses inside an equation that holds no contraction."""


def bodies(eqn: Eqn) -> tuple[Body, ...]:
    """Returns the functions that an equation holds; the step of a loop comes last."""
    name, p, count = eqn.primitive.name, eqn.params, len(eqn.invars)
    if name == "cond":
        return tuple(Body(x, (i,), range(1, count)) for i, x in enumerate(p["branches"]))
    if name == "while":
        consts, start = while_starts(eqn)
        state = range(start, count)
        condition = Body(p["cond_jaxpr"], CONDITION, (*range(consts), *state))
        return condition, Body(p["body_jaxpr"], (), (*range(consts, start), *state))
    held = p.get(CALLS.get(name, "jaxpr")) if name in HOLDING else None
    return () if held is None else (Body(held, (), range(count)),)


def while_starts(eqn: Eqn) -> tuple[int, int]:
    """Returns the indices of the first constant of the body and of the first carried operand."""
    consts = eqn.params["cond_nconsts"]
    return consts, consts + eqn.params["body_nconsts"]


def carried(eqn: Eqn) -> slice:
    """Returns which operands of an equation a loop carries."""
    if eqn.primitive.name == "scan":
        start, count = compat.scan_counts(eqn)
        return slice(start, start + count)
    end = len(eqn.invars)
    return slice(while_starts(eqn)[1] if eqn.primitive.name == "while" else end, end)


def passed_on(eqn: Eqn) -> list[bool]:
    """Returns for each value that a loop carries whether all steps pass it on unchanged."""
    state, (body, *_) = carried(eqn), bodies(eqn)[::-1]
    jaxpr, _ = compat.open_jaxpr(body.jaxpr)
    indices = {index: i for i, index in enumerate(body.operands)}
    return [
        jaxpr.outvars[i] is jaxpr.invars[indices[index]]
        for i, index in enumerate(range(state.start, state.stop))
    ]


# The numbers of equations.


class Read(dict[str, Any]):
    """The parameters of an equation that reads a value which is not a weight. Equations that JAX
    or jqx derives from it keep them.
    """


def is_lookup_or_product(eqn: Eqn) -> bool:
    """Whether an equation is a contraction: no gather is that is marked as a read."""
    return eqn.primitive.name in CONTRACTIONS and not isinstance(eqn.params, Read)


def is_marked(eqn: Eqn) -> bool:
    """Whether an equation counts in addresses: a contraction, or a form that holds one."""
    if is_lookup_or_product(eqn):
        return True
    return eqn.primitive.name in HOLDING and holds_contraction(eqn)


def holds_contraction(eqn: Eqn) -> bool:
    """Whether the jaxprs inside an equation hold a contraction at any depth that is not hidden."""
    jaxprs = compat.sub_jaxprs(eqn)
    if not jaxprs or compat.name_of_jit(eqn) == HIDDEN:
        return False
    for jaxpr in jaxprs:
        for inner in jaxpr.eqns:
            if is_lookup_or_product(inner) or holds_contraction(inner):
                return True
    return False


class Addressed(NamedTuple):
    """An equation, the address of a site in its place, and whether it counts in addresses."""

    address: Address
    eqn: Eqn
    is_marked: bool


def addressed(jaxpr: Any, address: Address = ()) -> Iterator[Addressed]:
    """Yields the equations of an open jaxpr, each with the address of a site in its place: the
    address of the enclosing function, and the number of marked equations before it.
    """
    count = 0
    for eqn in jaxpr.eqns:
        marked = is_marked(eqn)
        yield Addressed((*address, count), eqn, marked)
        count += marked


class Enclosing(NamedTuple):
    """An equation that holds a function: the name of its primitive, and its address."""

    name: str
    address: Address


def contractions_in(
    jaxpr: Any, address: Address = (), forms: tuple[Enclosing, ...] = ()
) -> Iterator[tuple[Address, tuple[Enclosing, ...]]]:
    """Yields the addresses of contractions, each with the equations around it, outermost first."""
    for place, eqn, marked in addressed(compat.open_jaxpr(jaxpr)[0], address):
        if is_lookup_or_product(eqn):
            yield place, forms
        elif marked:
            around = (*forms, Enclosing(eqn.primitive.name, place))
            for body in bodies(eqn):
                yield from contractions_in(body.jaxpr, (*place, *body.part), around)


# Evaluation.


Evaluated = Callable[[int, Eqn, list[Any]], Sequence[Any]]
"""Maps the index of an equation, the equation and its operands to its results."""


def bound(index: int, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
    """Evaluates an equation unchanged."""
    return compat.bind(eqn, operands)


def evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], results_of: Evaluated = bound
) -> list[Any]:
    """Returns the results of an open jaxpr, one equation after another; operands that it does not
    read may be `None`. `results_of` evaluates an equation on operands of any kind, in the context
    that it was traced in. No value is kept longer than until its last use.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    last_use = {
        atom: i
        for i, eqn in enumerate(jaxpr.eqns)
        for atom in eqn.invars
        if not compat.is_literal(atom)
    }
    last_use |= {atom: -1 for atom in jaxpr.outvars if not compat.is_literal(atom)}

    def read(atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        with compat.equation_context(eqn):
            results = results_of(i, eqn, list(map(read, eqn.invars)))
        env.update(zip(eqn.outvars, results, strict=True))
        for atom in eqn.invars:
            if not compat.is_literal(atom) and last_use[atom] == i:
                env.pop(atom, None)
    return list(map(read, jaxpr.outvars))


# The walk.


class Where(NamedTuple):
    """Where an equation is.

    Attributes:
      address: the address of a site in its place.
      is_marked: whether it counts in addresses.
      outer_scope: the name scopes around the function that it is in, joined by `/`.
      eqn: the equation, or the one that holds the function; `None` for a whole function.
      inside: the address of the loop, branch or `shard_map` that it is in.
      steps: the numbers of the steps of scans around it, in a domain that unrolls them.
      path: its index in its function, after those of the equations and parts around it. No other
        equation has it.
    """

    address: Address = ()
    is_marked: bool = False
    outer_scope: str = ""
    eqn: Eqn | None = None
    inside: Address = ()
    steps: tuple[int, ...] = ()
    path: Address = ()

    @property
    def scope(self) -> str:
        """The name scopes around it and its own, joined by `/`."""
        own_scope = "" if self.eqn is None else compat.scope_of(self.eqn)
        return "/".join(filter(None, (self.outer_scope, own_scope)))

    @property
    def around(self) -> Address:
        """The address of a function that the equation holds, before the part of that function."""
        return self.address if self.is_marked else (*self.address, *NOWHERE)


class Domain(Generic[V]):
    """What an analysis knows of each value, and how equations change that.

    Attributes:
      nothing: what is known of a literal, of a constant, and of results that no rule describes.
      unrolls: whether the steps of scans are walked one after another, not all as one.
    """

    nothing: ClassVar[Any] = None
    unrolls: ClassVar[bool] = False

    def literal(self, atom: Any) -> V:
        """Returns what is known of a number in an equation."""
        return self.nothing

    def constant(self, array: Any) -> V:
        """Returns what is known of an array that a function closes over; `None` if it is not at
        hand.
        """
        return self.nothing

    def enters(self, eqn: Eqn, values: list[V], where: Where) -> bool:
        """Whether the functions that an equation holds are walked. If not, it is evaluated."""
        return True

    def evaluate(self, eqn: Eqn, values: list[V], where: Where) -> Sequence[V]:
        """Returns the results of an equation that is not entered."""
        return [self.nothing] * len(eqn.outvars)

    def body(
        self, eqn: Eqn, body: Body, values: list[V], where: Where
    ) -> tuple["Domain[V]", list[V]]:
        """Returns the domain of a function inside an equation, and what is known of its operands,
        given what is known by default.
        """
        return self, values

    def step(self, value: V, loop: Loop) -> V:
        """Returns what is known of the slice of a stack that a step of a scan gets."""
        return value

    def part(self, value: V, step: int) -> V:
        """Returns what is known of the slice of a stack for one step, if scans are unrolled."""
        raise NotImplementedError

    def stack(self, values: list[V], aval: Any) -> V:
        """Returns what is known of the results of all steps together, if scans are unrolled."""
        raise NotImplementedError

    def start(self, eqn: Eqn, values: list[V], where: Where) -> list[V]:
        """Returns what is known of the values that a loop carries before its first step."""
        same = passed_on(eqn)
        return [x if y else self.nothing for x, y in zip(values, same, strict=True)]

    def carry(self, eqn: Eqn, values: list[V], results: list[V], where: Where) -> list[V]:
        """Returns what is known of the carried values before any step, given what was known of them
        and what is known after a step. The step is walked again until this changes nothing, so it
        must come to an end. By default it is what `start` returns, which must then hold.
        """
        return values

    def returned(
        self, eqn: Eqn, values: list[V], results: list[list[V]], where: Where
    ) -> Sequence[V]:
        """Returns the results of an equation, given those of the functions that it holds; of a
        loop, what is known of the carried values and of the stacked results of its steps. The
        default is right for functions that always run; of a `cond` it is the last branch alone.
        """
        return results[-1]


TOP = Where()
"""Where a whole function is."""


def walk(
    domain: Domain[V],
    jaxpr: Any,
    values: Sequence[V],
    where: Where = TOP,
    consts: Sequence[Any] = (),
) -> list[V]:
    """Returns what is known of the results of a function, given what is known of its operands.
    `consts` are the arrays that it closes over, if the jaxpr does not hold them.
    """
    body, arrays = compat.open_jaxpr(jaxpr)
    arrays, scope = arrays or consts or [None] * len(body.constvars), where.scope
    env = {var: domain.constant(x) for var, x in zip(body.constvars, arrays, strict=True)}
    env.update(zip(body.invars, values, strict=True))

    def read(atom: Any) -> V:
        return domain.literal(atom) if compat.is_literal(atom) else env[atom]

    for i, (address, eqn, marked) in enumerate(addressed(body, where.address)):
        path = (*where.path, i)
        place = Where(address, marked, scope, eqn, where.inside, where.steps, path)
        operands = [read(atom) for atom in eqn.invars]
        if bodies(eqn) and domain.enters(eqn, operands, place):
            results = enter(domain, eqn, operands, place)
        else:
            results = domain.evaluate(eqn, operands, place)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def enter(
    domain: Domain[V],
    eqn: Eqn,
    values: Sequence[V],
    where: Where,
    run: Callable[[Domain[V], Any, list[V], Where], list[V]] = walk,
) -> Sequence[V]:
    """Walks the functions that an equation holds, and returns the results of the equation."""
    name, state, values = eqn.primitive.name, carried(eqn), list(values)
    if name == "scan" and domain.unrolls:
        return _each_step(domain, eqn, values, where)
    if name == "scan":
        loop = Loop(where.address, eqn.params["length"])
        values[state.stop :] = [domain.step(x, loop) for x in values[state.stop :]]
    is_loop = name in ("scan", "while")
    values[state] = domain.start(eqn, values[state], where) if is_loop else []
    while True:
        results = []
        for body in bodies(eqn):
            address = (*where.around, *body.part)
            outside = where.inside if name in CALLS else address
            path = (*where.path, *body.part)
            inside = where._replace(address=address, is_marked=True, inside=outside, path=path)
            operands = [values[i] for i in body.operands]
            inner, operands = domain.body(eqn, body, operands, where)
            results.append(run(inner, body.jaxpr, operands, inside))
        before = values[state]
        values[state] = domain.carry(eqn, before, results[-1][: len(before)], where)
        if values[state] == before:
            results[-1][: len(before)] = before
            return domain.returned(eqn, values, results, where)


def _each_step(domain: Domain[V], eqn: Eqn, values: list[V], where: Where) -> Sequence[V]:
    """Walks the steps of a scan one after another, and returns the results of the equation."""
    (body,), state, steps = bodies(eqn), carried(eqn), range(eqn.params["length"])
    stacks, count = values[state.stop :], state.stop - state.start
    rows: dict[int, list[V]] = {}
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        slices = [domain.part(x, i) for x in stacks]
        steps_inside, address = (*where.steps, i), where.around
        inside = Where(address, True, where.outer_scope, eqn, address, steps_inside, where.path)
        results = walk(domain, body.jaxpr, [*values[: state.stop], *slices], inside)
        values[state], rows[i] = results[:count], results[count:]
    columns = [[rows[i][j] for i in steps] for j in range(len(eqn.outvars) - count)]
    stacked = zip(columns, eqn.outvars[count:], strict=True)
    return [*values[state], *(domain.stack(column, var.aval) for column, var in stacked)]


class Stack(Protocol):
    """A value of which a step of a scan may get a slice."""

    def step_of(self, loop: Loop, /) -> Any: ...


S = TypeVar("S", bound=Stack)


class Followed(Domain[S | None]):
    """Follows values as far as `convert` can carry codes: not out of branches, steps of scans and
    `shard_map`, and through loops only if they pass a value on unchanged.
    """

    def enters(self, eqn: Eqn, values: list[S | None], where: Where) -> bool:
        return any(x is not None for x in values)

    def body(
        self, eqn: Eqn, body: Body, values: list[S | None], where: Where
    ) -> tuple[Domain[S | None], list[S | None]]:
        return self, [None] * len(values) if body.part == CONDITION else values

    def step(self, value: S | None, loop: Loop) -> S | None:
        return None if value is None else value.step_of(loop)

    def returned(
        self, eqn: Eqn, values: list[S | None], results: list[list[S | None]], where: Where
    ) -> Sequence[S | None]:
        if eqn.primitive.name in CALLS:
            return results[-1]
        state = values[carried(eqn)] if eqn.primitive.name in ("scan", "while") else []
        return [*state, *[None] * (len(eqn.outvars) - len(state))]


class _Same(Followed[Any]):
    """Follows values as long as nothing changes them; a step of a scan gets another value."""

    def step(self, value: Any, loop: Loop) -> None:
        return None


def passed_through(jaxpr: Any) -> list[int | None]:
    """Returns for each result of a jaxpr the index of the operand that it is, if it is one."""
    body, _ = compat.open_jaxpr(jaxpr)
    return walk(_Same(), jaxpr, range(len(body.invars)))
