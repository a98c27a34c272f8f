"""Which values of a traced function depend on its parameters alone, and which of them to split off.

A forward pass finds the values that are computed from parameters and constants only. A backward
pass then starts at what the function returns, and goes back to the values to split off. Views of a
value stay in the function, so that a parameter that is only viewed stays a parameter.

Inside a scan, a value that depends on slices of parameters is split off as a stack of its values in
all steps. A value that depends on the size of a batch stays in the function, as far as its axes
show that: an axis counts as fixed if it is that of a parameter, or of an array that the function
closes over.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from .. import compat
from ..compat import Eqn
from ..errors import fail
from ..tensor.views import axis_groups
from .find import Found
from .plan import Plan, Unreached
from .rules import CONTRACTIONS, VIEWS
from .trace import Call, is_quantized
from .views import UPDATES, Address, Origin
from .walk import CALLS, HIDDEN, Body, Domain, Where, carried, passed_on, walk

What = Literal["all", "weights"]
"""What is split off: all values of parameters, or those that are weights and not larger."""

CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Primitives that compute a function with a derivative rule; whole ones are split off as one."""

INLINE = frozenset(CALLS) - CUSTOM
"""Primitives whose inside is looked at as if it were outside."""

_REDUCTIONS = ("reduce_", "arg")


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that depends on parameters and constants alone.

    Attributes:
      number: equal numbers mean equal values.
      parents: indices of the parameters that it depends on.
      fixed: for each axis, whether its size is that of a parameter.
      loops: addresses of the scans that step over parameters it depends on, outermost first.
    """

    number: int
    parents: frozenset[int]
    fixed: tuple[bool, ...]
    loops: tuple[Address, ...] = ()


KnownValue = Value | None

Need = frozenset[int] | None
"""Which contractions a value is a weight of, by the `id` of their equations; `None` if it is not
needed.
"""

_PLAIN: frozenset[int] = frozenset()
"""What is needed, but not as a weight."""


@dataclasses.dataclass(frozen=True)
class SplitOff:
    """A value to split off: its number, parents, scans, shape in one step, and dtype."""

    value: Value
    aval: Any


@dataclasses.dataclass(eq=False)
class _Node:
    """A value of the function, as the walk meets it.

    Attributes:
      value: what is known of it; `None` if it does not depend on parameters alone.
      is_view: whether it is a view of a known value, at an index that is not known.
      need: what it is needed for.
    """

    value: KnownValue = None
    is_view: bool = False
    need: Need = None

    def want(self, need: Need) -> None:
        """Notes that the value is needed, if it is."""
        if need is not None:
            self.need = (self.need or _PLAIN) | need


class KnownValues(Domain[_Node]):
    """The values of a traced function that depend on parameters alone.

    The walk is the forward pass. It leaves on a tape what an equation needs of its operands, and
    the backward pass reads the tape from its end.

    Args:
      jaxpr: the function.
      consts: the arrays that it closes over.
      is_parameter: for each operand, whether it is a parameter.
      what: what is split off.

    Attributes:
      at: what is split off, by address, index of the equation and index of its result.
      lengths: the number of steps of each scan, by address.
      steps: which of the stacks that a scan steps over are known, by address.
      operands: what is split off as an operand of a contraction, by the `id` of the equation.
      inner: the `id` of equations that compute known values, which may be split off.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], is_parameter: Sequence[bool], what: What):
        self._what = what
        self._numbers: dict[Any, int] = {}
        self._held: list[Any] = []
        self._tape: list[Callable[[], None]] = []
        self._carries: dict[Address, list[_Node]] = {}
        self.at: dict[tuple[Address, int, int], SplitOff] = {}
        self.lengths: dict[Address, int] = {}
        self.steps: dict[Address, list[bool]] = {}
        self.operands: dict[int, SplitOff] = {}
        self.inner: set[int] = set()
        shapes = [
            var.aval.shape if p else None for var, p in zip(jaxpr.invars, is_parameter, strict=True)
        ]
        self.sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
        values = [
            None if shape is None else Value(self._number(i), frozenset({i}), (True,) * len(shape))
            for i, shape in enumerate(shapes)
        ]
        self._leaves = {x.number for x in values if x is not None}
        for result in walk(self, jaxpr, list(map(_Node, values)), consts=consts):
            result.want(_PLAIN)
        for go_back in reversed(self._tape):
            go_back()

    def _number(self, *key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def literal(self, atom: Any) -> _Node:
        number = self._number("literal", str(atom.aval), str(atom.val))
        return _Node(Value(number, frozenset(), (False,) * len(atom.aval.shape)))

    def constant(self, array: Any) -> _Node:
        if array is None:
            return _Node()
        self._held.append(array)
        number = self._number("const", id(array))
        return _Node(Value(number, frozenset(), (True,) * jnp.ndim(array)))

    def enters(self, eqn: Eqn, values: list[_Node], where: Where) -> bool:
        return _is_inline(eqn) or bool(eqn.effects) or not all(x.value for x in values)

    def evaluate(self, eqn: Eqn, values: list[_Node], where: Where) -> list[_Node]:
        is_known = not eqn.effects and all(x.value for x in values)
        operands = [x.value for x in values if x.value is not None]
        known = self._computed(eqn, operands) if is_known else [None] * len(eqn.outvars)
        origins = self._viewed(eqn, values)
        results = [_Node(x, x is None and bool(origins)) for x in known]
        inner = [] if is_known else self._inside_unknown(eqn, values, where)
        self._tape.append(partial(self._go_back, eqn, where, values, results, inner, origins))
        return results

    def _inside_unknown(self, eqn: Eqn, values: list[_Node], where: Where) -> list[_Node]:
        """Walks the functions inside a primitive that the walk does not know. They are taken to
        have its last operands.
        """
        results: list[_Node] = []
        for jaxpr in compat.sub_jaxprs(eqn):
            count = len(jaxpr.invars)
            last = values[-count:] if 0 < count <= len(values) else [_Node() for _ in range(count)]
            results += walk(self, jaxpr, [self._passed(x, None) for x in last], where)
        return results

    def _passed(self, outer: _Node, value: KnownValue, is_view: bool = False) -> _Node:
        """Returns a value that a function inside an equation gets, given where it comes from."""
        node = _Node(value, is_view)
        self._tape.append(lambda: outer.want(node.need))
        return node

    def body(
        self, eqn: Eqn, body: Body, values: list[_Node], where: Where
    ) -> tuple[Domain[_Node], list[_Node]]:
        if _is_inline(eqn):
            return self, values
        name, end = eqn.primitive.name, carried(eqn).stop
        known = [x.value for x in values]
        if name == "shard_map":  # a part of a known value, so that views lead to what is outside
            return self, [self._passed(x, None, bool(x.value and x.value.parents)) for x in values]
        if name == "scan":
            self.lengths[where.path] = eqn.params["length"]
            known[end:] = [self._step(x, where.path) for x in known[end:]]
            self.steps[where.path] = [x is not None for x in known[end:]]
        return self, list(map(self._passed, values, known))

    def start(self, eqn: Eqn, values: list[_Node], where: Where) -> list[_Node]:
        pairs = zip(values, passed_on(eqn), strict=True)
        return [self._passed(x, x.value if same else None) for x, same in pairs]

    def carry(
        self, eqn: Eqn, values: list[_Node], results: list[_Node], where: Where
    ) -> list[_Node]:
        self._carries[where.path] = results
        return values

    def returned(
        self, eqn: Eqn, values: list[_Node], results: list[list[_Node]], where: Where
    ) -> Sequence[_Node]:
        if _is_inline(eqn):
            return results[-1]
        known = [x.value for x in values[carried(eqn)]]
        outer = [_Node(x) for x in [*known, *[None] * (len(eqn.outvars) - len(known))]]
        inner = [*itertools.chain(*results), *self._carries.pop(where.path, ())]
        self._tape.append(partial(self._go_back, eqn, where, values, outer, inner))
        return outer

    def _step(self, x: KnownValue, address: Address) -> KnownValue:
        if x is None or not x.parents or not x.fixed[0]:
            return None
        number = self._number("step", address, x.number)
        return Value(number, x.parents, x.fixed[1:], (*x.loops, address))

    def _computed(self, eqn: Eqn, operands: list[Value]) -> list[KnownValue]:
        parents = frozenset().union(*(x.parents for x in operands))
        loops = max((x.loops for x in operands), key=len, default=())
        key = (eqn.primitive.name, _hashable(eqn), *(x.number for x in operands))
        self._held.append(eqn)
        if parents:
            self._find_inner(eqn)
        return [
            Value(self._number(*key, i), parents, _fixed(eqn, operands, var.aval.shape), loops)
            for i, var in enumerate(eqn.outvars)
        ]

    def _find_inner(self, eqn: Eqn) -> None:
        self.inner.add(id(eqn))
        for body in compat.sub_jaxprs(eqn):
            for inner in body.eqns:
                self._find_inner(inner)

    def _go_back(
        self,
        eqn: Eqn,
        where: Where,
        values: Sequence[_Node],
        results: Sequence[_Node],
        inner: Sequence[_Node],
        origins: Sequence[Origin | None] = (),
    ) -> None:
        """Splits off results of an equation, and notes what the others need: of its operands, and
        of the results of functions inside it.
        """
        needs = [x.need for x in results]
        if all(need is None for need in needs) and not eqn.effects:
            return
        if origins:
            joint_need = _PLAIN.union(*(need for need in needs if need is not None))
            for x, origin in zip(values, origins, strict=True):
                x.want(joint_need if origin else _PLAIN)
            return
        is_needed = bool(eqn.effects)
        for j, (var, x) in enumerate(zip(eqn.outvars, results, strict=True)):
            if x.need is None:
                continue
            if x.value is None or not self._is_split_off(x.value, var.aval, bool(x.need)):
                is_needed = True
                continue
            self.at[where.path[:-1], where.path[-1], j] = entry = SplitOff(x.value, var.aval)
            self.operands.update(dict.fromkeys(x.need, entry))
        if not is_needed:
            return
        family = CONTRACTIONS.get(eqn.primitive.name)
        sides = 0 if family is None else len(family.axes(eqn))
        for i, x in enumerate(values):
            x.want(frozenset({id(eqn)}) if i < sides else _PLAIN)
        if not all(x.value for x in results):
            for x in inner:
                x.want(_PLAIN)

    def _viewed(self, eqn: Eqn, values: Sequence[_Node]) -> Sequence[Origin | None]:
        """Returns the origins of the operands of a view of known values, also at an index that is
        not known; none if the equation is no such view.
        """
        if eqn.primitive.name not in VIEWS:
            return ()
        origins = list(map(self._origin, eqn.invars, values))
        views = VIEWS[eqn.primitive.name].track(eqn, origins) if any(origins) else [None]
        return origins if all(view is not None for view in views) else ()

    def _origin(self, atom: Any, x: _Node) -> Origin | None:
        value, ndim = x.value, len(atom.aval.shape)
        if value is None:
            return Origin.of_leaf("", ndim) if x.is_view else None
        # Weights may be scaled by a factor.
        is_factor = value.number in self._leaves and ndim == 0
        return Origin.of_leaf(str(value.number), ndim) if value.parents and not is_factor else None

    def _is_split_off(self, value: Value, aval: Any, as_weight: bool) -> bool:
        sizes = zip(value.fixed, aval.shape, strict=True)
        if not value.parents or not all(fixed or size == 1 for fixed, size in sizes):
            return False
        if self._what == "all":
            return True
        real = jnp.issubdtype(aval.dtype, jnp.floating)
        return as_weight and real and self.size_of(value, aval) <= self.size_before(value)

    def size_of(self, value: Value, aval: Any) -> int:
        """Returns the number of elements of a value, in all steps of its scans."""
        return math.prod(aval.shape) * math.prod(self.lengths[loop] for loop in value.loops)

    def size_before(self, value: Value) -> int:
        """Returns the number of elements of the parameters that a value is computed from."""
        return sum(self.sizes[parent] for parent in value.parents)


def _is_inline(eqn: Eqn) -> bool:
    """Whether the inside of an equation is looked at as if it were outside."""
    return eqn.primitive.name in INLINE and compat.name_of_jit(eqn) != HIDDEN


def _hashable(eqn: Eqn) -> Any:
    """Returns the parameters of an equation as part of a key; its `id` if they have no hash."""
    try:
        key = tuple(sorted(eqn.params.items()))
        hash(key)
    except TypeError:
        return id(eqn)
    return key


def _fixed(eqn: Eqn, operands: Sequence[Value], shape: Sequence[Any]) -> tuple[bool, ...]:
    """Returns which axes of a result have the size of an axis of a parameter."""
    name, params = eqn.primitive.name, eqn.params
    pairs = [(x, atom.aval.shape) for x, atom in zip(operands, eqn.invars, strict=True)]
    is_form = bool(compat.sub_jaxprs(eqn))
    pairs = [(x, value) for x, value in pairs if value and (x.parents or not is_form)]
    if not pairs:
        return tuple(False for _ in shape)
    operand, old_sizes = pairs[0]
    if name == "broadcast_in_dim":
        fixed = [False] * len(shape)
        for axis, target in enumerate(params["broadcast_dimensions"]):
            fixed[target] = operand.fixed[axis] and old_sizes[axis] == shape[target]
        return tuple(fixed)
    if name == "transpose":
        return tuple(operand.fixed[axis] for axis in params["permutation"])
    if name == "squeeze":
        return tuple(x for axis, x in enumerate(operand.fixed) if axis not in params["dimensions"])
    if name == "reshape" and params["dimensions"] is None:
        fixed = [False] * len(shape)
        for sources, targets in axis_groups(old_sizes, shape):
            is_fixed = all(operand.fixed[i] or old_sizes[i] == 1 for i in sources)
            for j in targets:
                fixed[j] = is_fixed
        return tuple(fixed)
    if name.startswith(_REDUCTIONS) and "axes" in params and len(old_sizes) > len(shape):
        return tuple(x for axis, x in enumerate(operand.fixed) if axis not in params["axes"])
    if name == "dot_general":
        (left, right), (batch, rhs_batch) = params["dimension_numbers"]
        lhs, rhs = operands
        batch_fixed = [lhs.fixed[i] or rhs.fixed[j] for i, j in zip(batch, rhs_batch, strict=True)]
        batch_fixed += [x for i, x in enumerate(lhs.fixed) if i not in (*left, *batch)]
        batch_fixed += [x for i, x in enumerate(rhs.fixed) if i not in (*right, *rhs_batch)]
        return tuple(batch_fixed)
    same = [x.fixed for x, value in pairs if not is_form and tuple(value) == tuple(shape)]
    if same:
        return tuple(map(any, zip(*same, strict=True)))
    takes_all = all(
        fixed or size == 1 for x, value in pairs for fixed, size in zip(x.fixed, value, strict=True)
    )
    return tuple(takes_all for _ in shape)


# Where the codes of weights go outside of contractions, as `convert` carries them: through views,
# updates, loops and branches. Elsewhere they have no quantized form.


Paths = frozenset[str]
"""The weights whose codes a value holds; empty for an array."""

_NONE: Paths = frozenset()


@dataclasses.dataclass(frozen=True)
class Escape:
    """A place where codes have no quantized form.

    Attributes:
      paths: paths of the weights that reach it.
      how: a description, such as "reaches `sin`, which has no quantized form".
      eqn: the operation.
      scope: the name scopes around it.
    """

    paths: Paths
    how: str
    eqn: Eqn
    scope: str


@dataclasses.dataclass
class Codes(Domain[Paths]):
    """Follows codes through jaxprs.

    Attributes:
      escapes: the places where they have no quantized form, in order.
      mixed: the places where codes of several origins become one value: their formats must agree.
      contracted: the weights whose codes a contraction reads.
    """

    escapes: list[Escape] = dataclasses.field(default_factory=list)
    mixed: list[Escape] = dataclasses.field(default_factory=list)
    contracted: set[str] = dataclasses.field(default_factory=set)

    nothing: ClassVar[Paths] = _NONE

    def enters(self, eqn: Eqn, values: list[Paths], where: Where) -> bool:
        return any(values)

    def evaluate(self, eqn: Eqn, values: list[Paths], where: Where) -> Sequence[Paths]:
        if not any(values):
            return super().evaluate(eqn, values, where)
        name, nothing, scope = eqn.primitive.name, [_NONE] * len(eqn.outvars), where.scope
        how = f"reaches `{name}`, which has no quantized form"
        if name in CONTRACTIONS:
            unsupported = CONTRACTIONS[name].why_unsupported(eqn)
            if unsupported is None:
                self.contracted |= _NONE.union(*values)
                return nothing
            if name in UPDATES and values[0]:
                return self._indexed(eqn, values, scope)
            how = f"reaches a `{name}` that has no quantized form: {unsupported}"
        elif (viewed := _views(eqn, values)) is not None:
            if len(set(filter(None, values))) > 1 and len(viewed) == 1:
                self._mixes(eqn, values, "is joined with others of another format", scope)
            return viewed
        elif name in UPDATES and (name == "select_n") != bool(values[0]):
            if name == "scatter":
                return self._indexed(eqn, values, scope)
            if sum(map(bool, values)) > 1:
                self._mixes(eqn, values, "is selected among others", scope)
            return [_NONE.union(*values)]
        self.escapes.append(Escape(_NONE.union(*values), how, eqn, scope))
        return nothing

    def _indexed(self, eqn: Eqn, values: list[Paths], scope: str) -> list[Paths]:
        """Values that are read or written at any places stay codes if the scale can follow."""
        how = f"reaches a `{eqn.primitive.name}` that its scale cannot follow"
        self._mixes(eqn, values[:1], how, scope)
        return values[:1]

    def _mixes(self, eqn: Eqn, codes: Sequence[Paths], how: str, scope: str) -> None:
        if any(codes):
            self.mixed.append(Escape(_NONE.union(*codes), how, eqn, scope))

    def start(self, eqn: Eqn, values: list[Paths], where: Where) -> list[Paths]:
        return values

    def carry(
        self, eqn: Eqn, values: list[Paths], results: list[Paths], where: Where
    ) -> list[Paths]:
        """A carried value keeps the format that it has before the first step."""
        name, scope = eqn.primitive.name, where.scope
        widened = [x for x, init in zip(results, values, strict=True) if x and not init]
        if widened:
            how = f"is carried by `{name}` in place of an array"
            self.escapes.append(Escape(_NONE.union(*widened), how, eqn, scope))
        carried_values = zip(results, values, passed_on(eqn), strict=True)
        changed = [x for x, init, same in carried_values if init and not same]
        self._mixes(eqn, changed, f"is carried by `{name}`, which changes its format", scope)
        return values

    def returned(
        self, eqn: Eqn, values: list[Paths], results: list[list[Paths]], where: Where
    ) -> Sequence[Paths]:
        name = eqn.primitive.name
        if name not in ("cond", "shard_map"):
            return results[-1]
        joint = [_NONE.union(*x) for x in zip(*results, strict=True)]
        self._mixes(eqn, joint, f"is returned by `{name}` in its own format", where.scope)
        return joint


def _views(eqn: Eqn, operands: Sequence[Paths]) -> list[Paths] | None:
    """Returns the codes in the results of a view; `None` if the equation is not a view."""
    view = VIEWS.get(eqn.primitive.name)
    if view is None:
        return None
    origins = [
        Origin.of_leaf("", atom.aval.ndim) if paths else None
        for atom, paths in zip(eqn.invars, operands, strict=True)
    ]
    viewed = [x if x and x.is_view else None for x in view.track(eqn, origins)]
    if not any(viewed):
        return None
    if len(viewed) == len(operands):  # as many results as operands: each is a view of its operand
        return [paths if origin else _NONE for origin, paths in zip(viewed, operands, strict=True)]
    joint = _NONE.union(*operands)
    return [joint if origin else _NONE for origin in viewed]


def check_unsupported(function: str, unsupported: Any) -> None:
    """Checks the value of `unsupported`."""
    if unsupported not in ("error", "dequantize"):
        problem = f"`unsupported` is unknown: {unsupported!r}."
        raise fail(function, problem, fix="leave it at 'error', or pass 'dequantize'.")


def unreached(call: Call, found: Sequence[Found]) -> tuple[Unreached, ...]:
    """Returns the float parameters with two or more axes that no contraction multiplies by."""
    reached = {
        part.path for item in found for origin in item.origins if origin for part in origin.parts
    }
    used_otherwise = {
        path: tuple(leaf.shape)
        for path, leaf in zip(call.paths, call.leaves, strict=True)
        if path is not None and path not in reached
        if len(leaf.shape) > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    if not used_otherwise:
        return ()
    codes, returned = followed(call, set(used_otherwise))
    reason_of = dict.fromkeys(returned, "f returns it")
    reason_of |= dict.fromkeys(
        codes.contracted, "only the result of a loop or branch on it is multiplied"
    )
    only = "uses it, and only operands of contractions are quantized"
    for escape in reversed(codes.escapes):
        reason_of |= dict.fromkeys(escape.paths, f"`{compat.shown_name(escape.eqn)}` {only}")
    unused = "f does not use it"
    return tuple(
        Unreached(path, reason_of.get(path, unused), shape)
        for path, shape in used_otherwise.items()
    )


def followed(call: Call, paths: set[str]) -> tuple[Codes, set[str]]:
    """Follows the codes of some weights; returns what was found, and which of them `f` returns."""
    codes = Codes()
    inputs = [frozenset({path} & paths) if path is not None else frozenset() for path in call.paths]
    results = walk(codes, call.jaxpr, inputs)
    return codes, set().union(*results)


def reaching(call: Call, plan: Plan, eqn: Any) -> list[tuple[str | None, str]]:
    """Returns the quantized leaves whose codes an equation cannot take: the path of each, `None` if
    it is no parameter, and its name in an error.
    """
    named = dict(enumerate(zip(call.paths, call.leaves, strict=True)))
    inputs = [
        frozenset({str(i)} if is_quantized(leaf) or plan.weight_at(path) is not None else ())
        for i, (path, leaf) in named.items()
    ]
    codes = Codes()
    walk(codes, call.jaxpr, inputs)
    path_sets = [x.paths for x in (*codes.escapes, *codes.mixed) if x.eqn is eqn]
    numbers = sorted(map(int, frozenset().union(*path_sets)))
    return [(named[i][0], _name(call, i)) for i in numbers]


def _name(call: Call, i: int) -> str:
    path = call.paths[i]
    if path is not None:
        return repr(path)
    kind, argument, *_ = call.keys[i]
    return f"argument {argument.idx}" if kind.idx == 0 else f"argument {argument.key!r}"


# What a plan says of operands that `jqx.hoist` can split off.


OUTSIDE = ": compute it outside of f"
"""The end of a reason that an offer replaces."""


def offers(call: Call) -> dict[int, tuple[str, str]]:
    """Returns what can be done about operands that depend on parameters alone, by the `id` of the
    contraction: the names of the parameters, and the end of the reason.
    """
    values = known_values(call)
    inner = "parameters", ": jqx.hoist computes it outside of f"
    offered: dict[int, tuple[str, str]] = dict.fromkeys(values.inner, inner)
    for eqn_id, operand in values.operands.items():
        paths = [call.paths[parent] for parent in sorted(operand.value.parents)]
        names = named([path for path in paths if path is not None])
        offered[eqn_id] = names, _offer(values, operand.value, operand.aval)
    return offered


def known_values(call: Call) -> KnownValues:
    """Returns what depends on the parameters of a call alone."""
    numbered = zip(call.paths, call.keys, strict=True)
    argnums = {keys[1].idx for path, keys in numbered if path is not None}
    are_known = [
        path is not None
        or (keys[0].idx == 0 and keys[1].idx in argnums and tuple(leaf.shape) == ())
        for path, keys, leaf in zip(call.paths, call.keys, call.leaves, strict=True)
    ]
    return KnownValues(call.jaxpr, call.consts, are_known, "all")


def _offer(values: KnownValues, value: Value, aval: Any) -> str:
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return f", and it is {aval.dtype.name}, not a float"
    size, size_before = values.size_of(value, aval), values.size_before(value)
    if size <= size_before:
        return ": use jqx.hoist, or ptq(hoist=True)"
    return (
        f": with {size:,} elements it is larger than their {size_before:,}, so use jqx.hoist, or "
        "ptq(hoist='all')"
    )


def named(paths: list[str]) -> str:
    """Returns paths of parameters as text; of many, the first three."""
    names = " and ".join(map(repr, paths[:3]))
    return names + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


# Reasons why no weight reaches a contraction: what its operands are computed from.


NO_WEIGHT = "no weight reaches it through views, and no rule without a weight spec matches"


_DRAWS = ("random_", "rng_", "prng_", "threefry")
"""Prefixes of the names of primitives that make random numbers and keys; they return no weight."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The inputs that a value is computed from.

    Attributes:
      weights: the paths of weights.
      closure: whether it depends on arrays that the function closes over.
      inputs: whether it depends on other arguments.
      drawn: whether it depends on random numbers.
      through: the first operation on a weight that is not a view.
    """

    weights: frozenset[str] = frozenset()
    closure: bool = False
    inputs: bool = False
    drawn: bool = False
    through: str | None = None

    def __or__(self, also: "Source") -> "Source":
        return Source(
            self.weights | also.weights,
            self.closure or also.closure,
            self.inputs or also.inputs,
            self.drawn or also.drawn,
            self.through or also.through,
        )

    @property
    def is_closed_over(self) -> bool:
        """Whether it is computed only from arrays that the function closes over."""
        return self.closure and not (self.weights or self.inputs or self.drawn)

    @property
    def reason(self) -> str | None:
        """Why it is not a weight; `None` if it depends on other arguments, as activations do."""
        if self.inputs:
            return None
        if self.weights:
            operation = (
                f"`{self.through}`, which is not a view" if self.through else "more than views"
            )
            return (
                f"an operand is computed from {named(sorted(self.weights))} by {operation}{OUTSIDE}"
            )
        if self.closure:
            return "an operand is closed over by f: pass weights in an argument that params= names"
        return "an operand is drawn at random in f" if self.drawn else None


def reasons(call: Call) -> dict[int, str]:
    """Returns the reasons for the operands of contractions, by the `id` of the equation."""
    sources_of = sources(call)
    reasons_of = {
        eqn_id: [source.reason for source in sources_of_eqn]
        for eqn_id, sources_of_eqn in sources_of.items()
    }
    reason_of = {
        eqn_id: next(filter(None, reason)) for eqn_id, reason in reasons_of.items() if any(reason)
    }
    if any(source.weights for sources_of_eqn in sources_of.values() for source in sources_of_eqn):
        for eqn_id, (names, offer) in offers(call).items():
            reason = reason_of.get(eqn_id, f"an operand is computed from {names}")
            reason_of[eqn_id] = reason.removesuffix(OUTSIDE) + offer
    return reason_of


def sources(call: Call) -> dict[int, list[Source]]:
    """Returns what the operands of contractions are computed from, by the `id` of the equation.

    The sources of a function that is called twice are those of all its calls together.
    """
    inputs = [
        Source(inputs=True) if path is None else Source(frozenset({path})) for path in call.paths
    ]
    sources = _Sources()
    walk(sources, call.jaxpr, inputs)
    return sources.at


@dataclasses.dataclass
class _Sources(Domain[Source]):
    """Follows sources, and collects those of the operands of contractions."""

    at: dict[int, list[Source]] = dataclasses.field(default_factory=dict)

    nothing: ClassVar[Source] = Source()

    def constant(self, array: Any) -> Source:
        return Source(closure=True)

    def evaluate(self, eqn: Eqn, values: list[Source], where: Where) -> Sequence[Source]:
        name, joint = eqn.primitive.name, functools.reduce(operator.or_, values, self.nothing)
        if name in CONTRACTIONS:
            previous = self.at.get(id(eqn), values)
            self.at[id(eqn)] = [a | b for a, b in zip(previous, values, strict=True)]
        inner = compat.sub_jaxprs(eqn)
        for jaxpr in inner:
            walk(self, jaxpr, [joint] * len(jaxpr.invars), where)
        if name.startswith(_DRAWS):
            joint = Source(inputs=joint.inputs, drawn=True)
        elif joint.weights and not joint.through and (inner or name not in VIEWS):
            joint = dataclasses.replace(joint, through=name)
        return [joint] * len(eqn.outvars)

    def start(self, eqn: Eqn, values: list[Source], where: Where) -> list[Source]:
        return values

    def carry(
        self, eqn: Eqn, values: list[Source], results: list[Source], where: Where
    ) -> list[Source]:
        return [a | b for a, b in zip(values, results, strict=True)]

    def returned(
        self, eqn: Eqn, values: list[Source], results: list[list[Source]], where: Where
    ) -> Sequence[Source]:
        if eqn.primitive.name != "cond":
            return results[-1]
        return [functools.reduce(operator.or_, x, values[0]) for x in zip(*results, strict=True)]
