"""`hoist`: splits off what depends on parameters alone, and evaluates the rest of a function."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..checks import called
from ..compat import Eqn
from ..errors import fail, some
from .arguments import check_function
from .higher_order import FORMS, Records, Runner
from .known_values import CUSTOM, INLINE, KnownValues, What
from .paths import (
    Hoisting,
    Names,
    Params,
    Weights,
    check_names,
    flatten,
    insert_params,
    is_whole,
    nested,
    path_of,
    positions_of,
    stand_in,
    type_text,
)
from .trace import Call, as_params, is_array, live, read_by, trace_call
from .views import Address
from .walk import HIDDEN, bodies, carried, evaluate, passed_on

Arrays = dict[str, Any]
"""Values that are split off, by name."""


@dataclasses.dataclass(frozen=True)
class _Splitter:
    """Computes the values that are split off a function, and evaluates the rest of the function.

    Attributes:
      values: its values that depend on parameters alone.
      names: the names of what is split off, by the numbers of values.
    """

    values: KnownValues
    names: Mapping[int, str]

    def computed(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], address: Address = ()
    ) -> tuple[list[Any], Arrays]:
        """Returns the results, and the values that are split off. `None` stands for operands that
        are no parameters, and for results that depend on them.
        """
        arrays: Arrays = {}

        def results_of(i: int, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
            name = eqn.primitive.name
            if name in INLINE and compat.name_of_jit(eqn) != HIDDEN:
                body, inner = compat.open_jaxpr(bodies(eqn)[0].jaxpr)
                results, inner_arrays = self.computed(body, inner, operands, (*address, i))
            elif not eqn.effects and not any(x is None for x in operands):
                results, inner_arrays = compat.bind(eqn, operands), {}
            else:
                results, inner_arrays = self._computed_inside(eqn, operands, (*address, i))
            arrays.update(inner_arrays)
            for j, x in enumerate(results):
                split_off = self.values.at.get((address, i, j))
                if split_off is not None and x is not None:
                    arrays[self.names[split_off.value.number]] = x
            return results

        return evaluate(jaxpr, consts, args, results_of), arrays

    def _computed_inside(
        self, eqn: Eqn, operands: Sequence[Any], address: Address
    ) -> tuple[list[Any], Arrays]:
        """Computes what is split off the functions inside an equation."""
        name, results = eqn.primitive.name, [None] * len(eqn.outvars)
        holds_any = any(key[0][: len(address)] == address for key in self.values.at)

        def run(jaxpr: Any, args: Sequence[Any], part: Address = address) -> Arrays:
            body, consts = compat.open_jaxpr(jaxpr)
            return self.computed(body, consts, args, part)[1]

        operands, state = list(operands), carried(eqn)
        if state.start < state.stop:  # what steps change is not known inside
            pairs = zip(operands[state], passed_on(eqn), strict=True)
            operands[state] = [x if same else None for x, same in pairs]
        results[: state.stop - state.start] = operands[state]
        if not holds_any:
            return results, {}
        if name == "scan":
            fixed, xs = operands[: state.stop], operands[state.stop :]
            return results, self._computed_in_scan(eqn, run, fixed, xs, address)
        arrays: Arrays = {}
        for body in bodies(eqn):
            args = [operands[i] for i in body.operands]
            arrays |= run(body.jaxpr, args, (*address, *body.part))
        return results, arrays

    def _computed_in_scan(
        self, eqn: Eqn, run: Any, fixed: Sequence[Any], xs: Sequence[Any], address: Address
    ) -> Arrays:
        """Computes what is split off a scan: once, or as a stack of its values in all steps."""
        body, stepped = eqn.params["jaxpr"], self.stepped(address)
        arrays = run(body, [*fixed, *([None] * len(xs))])
        is_known = self.values.steps[address]
        slices = {i: x for i, x in enumerate(xs) if is_known[i] and x is not None}

        def step(slices_of_step: dict[int, Any]) -> Arrays:
            values = run(body, [*fixed, *(slices_of_step.get(i) for i in range(len(xs)))])
            return {name: values[name] for name in stepped if name in values}

        return arrays | lax.map(step, slices) if stepped and slices else arrays

    def stepped(self, address: Address) -> list[str]:
        """Returns the names of what is split off a scan as a stack of its steps."""
        values = [entry.value for entry in self.values.at.values()]
        return sorted({self.names[value.number] for value in values if address in value.loops})

    def rest(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        arrays: Arrays,
        address: Address = (),
    ) -> list[Any]:
        """Evaluates a function in which some values are known."""
        depth = len(address)
        inside = {key[0][: depth + 1] for key in self.values.at if len(key[0]) > depth}

        def results_of(i: int, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
            name, eqn_address = eqn.primitive.name, (*address, i)
            if eqn_address not in inside:
                results = compat.bind(eqn, operands)
            elif name in CUSTOM:
                results = self._without_rule(eqn, operands, arrays, eqn_address)
            else:
                runner = _Runner(self, eqn, eqn_address, arrays)
                results = FORMS[name](eqn, operands, runner)[0]
            entries = [self.values.at.get((address, i, j)) for j in range(len(results))]
            return [
                x if entry is None else arrays[self.names[entry.value.number]]
                for x, entry in zip(results, entries, strict=True)
            ]

        return evaluate(jaxpr, consts, args, results_of)

    def _without_rule(
        self, eqn: Eqn, operands: Sequence[Any], arrays: Arrays, address: Address
    ) -> list[Any]:
        """Evaluates a function with a derivative rule, which cannot be applied, since it reads
        parameters that are split off. Differentiating it is an error.
        """
        body, consts = compat.open_jaxpr(bodies(eqn)[0].jaxpr)

        def run(arrays: Arrays, args: Sequence[Any]) -> list[Any]:
            return self.rest(body, consts, args, arrays, address)

        jaxpr, inner = compat.trace(run, arrays, list(operands))
        jaxpr, flat = live(jaxpr), [*jax.tree.leaves(arrays), *operands]
        read = read_by(jaxpr)
        argnums = [i for i, var in enumerate(jaxpr.invars) if id(var) in read]

        @jax.custom_jvp
        def value(*read_values: Any) -> list[Any]:
            some = dict(zip(argnums, read_values, strict=True))
            return evaluate(jaxpr, inner, [some.get(i) for i in range(len(flat))])

        @value.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            problem = "a function with a derivative rule of its own has no derivative here."
            details = f"`{eqn.primitive.name}`{compat.at_line_of(eqn)}, from which values of "
            details += "parameters are split off"
            fix = "differentiate f itself; g is for inference."
            raise fail("hoist", problem, given=details, fix=fix, error=NotImplementedError)

        return value(*(flat[i] for i in argnums))


@dataclasses.dataclass(frozen=True)
class _Runner(Runner):
    """Evaluates the functions inside an equation; their inputs are the values split off."""

    splitter: _Splitter
    eqn: Eqn
    address: Address
    arrays: Arrays

    @property
    def site_inputs(self) -> Arrays:
        names = {
            self.splitter.names[x.value.number]
            for key, x in self.splitter.values.at.items()
            if key[0][: len(self.address)] == self.address
        }
        return {name: self.arrays[name] for name in sorted(names)}

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Address = (), site_inputs: Any = None
    ) -> tuple[list[Any], Records]:
        body, consts = compat.open_jaxpr(jaxpr)
        arrays = self.site_inputs if site_inputs is None else site_inputs
        return self.splitter.rest(body, consts, args, arrays, (*self.address, *part)), {}

    def split(self, length: int) -> tuple[Any, Any]:
        stepped, arrays = set(self.splitter.stepped(self.address)), self.site_inputs
        steps = {name: x for name, x in arrays.items() if name in stepped}
        return steps, {name: x for name, x in arrays.items() if name not in stepped}

    def join(self, step: Any, shared: Any) -> Any:
        return step | shared


_PLACE = "computed"
"""The last part but one of the path of a value that is split off."""

_SHOWN = 4
"""How many parameters such a path names."""


@called("hoist", "call it in two steps: g, computed = jqx.hoist(f)(params, x).")
def hoist(
    f: Callable[..., Any], what: What = "all", *, params: Params = 0, names: Names = None
) -> Callable[..., tuple[Callable[..., Any], Any]]:
    """Splits off what a function computes from its parameters alone, such as masked, normalised or
    padded weights: `g, computed = hoist(f)(params, *args)`, and `g(computed, *args)` is
    `f(params, *args)`.

    A plan of `g` sees these values as parameters, so that they can be quantized. A parameter that
    `f` reads itself, or through views such as a transpose, stays what it is, with its path. A value
    that is computed from `layers/0/w` and `layers/0/mask` has the path
    `layers/0/computed/mask,w`; a second value of the same parameters ends in `-2`.

    Values are found inside jit, remat, cond, while and scan too. In a scan over stacked weights, a
    value that depends on the slice of a step is split off as a stack of its values in all steps.
    Inside a function with a derivative rule of its own, only `f` keeps the rule: differentiating
    `g` there is an error. Values that carried states of a loop depend on, and those inside
    `shard_map`, stay in `g`, as do values whose shape is not made of axes of parameters.

    Args:
      f: any JAX function; it is traced, never changed.
      what: `"all"`, or `"weights"` for what `jqx.ptq(..., hoist=True)` splits off: float values
        that are operands of contractions, and that are not larger than the parameters that they
        are computed from.
      params: position, or positions, of the arguments that hold parameters.
      names: names of parameters, as in `jqx.make_plan`.

    Returns:
      A function of the arguments of `f`, which may be `jax.ShapeDtypeStruct` values. It returns `g`
      and `computed`: nested dicts of the values that are split off and of the parameters that `g`
      reads. They are `jax.ShapeDtypeStruct` values if the parameters are. Values computed from
      QTensors are computed from the floats that these represent. `g` takes `computed` at the
      position of the parameters (the first of several, the others are left out), and all other
      arguments of `f`. It works with jit, grad, vmap, and all transforms of jqx. For new parameters
      call `hoist(f)(params, *args)` again; it may be jitted, and has a gradient.

    Raises:
      TypeError: if `f` is not a function.
      ValueError: if `what` is unknown; or from `g`, if `computed` is not that of `f`, or if a value
        that was split off depends on the sizes of arguments, and these are others.

    Gradient: `computed` is differentiable with respect to the parameters, and `g` with respect to
      all its arguments.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> def f(params, x):
      ...     return x @ (params["w"] * params["mask"]) + params["b"]
      >>> params = {"w": jnp.ones((4, 4)), "mask": jnp.tri(4), "b": jnp.zeros(4)}
      >>> x = jnp.ones((1, 4))
      >>> g, computed = jqx.hoist(f)(params, x)
      >>> sorted(computed), sorted(computed["computed"])
      (['b', 'computed'], ['mask,w'])
      >>> g(computed, x) == f(params, x)
      Array([[ True,  True,  True,  True]], dtype=bool)
      >>> [weight.path for weight in jqx.make_plan(g, jqx.presets.w8a16())(computed, x).weights]
      ['computed/mask,w']
    """
    check_function("hoist", f)
    check_names("hoist", names)
    if what not in ("all", "weights"):
        raise fail("hoist", f"`what` is unknown: {what!r}.", fix="pass 'all' or 'weights'.")
    argnums = as_params("hoist", params)

    def split(*args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Any]:
        call = trace_call("hoist", f, Weights(argnums, names), args, kwargs)
        parts = _Parts.of(call, argnums, what)
        g = Hoisted(
            f=f,
            hoisting=Hoisting(what, argnums, call.names),
            parents=tuple(_template(args[argnum]) for argnum in positions_of(argnums)),
            others=parts.others,
            sizes=_sizes(parts),
            program=str(parts.program[0]),
        )
        return g, parts.computed()

    return split


@dataclasses.dataclass(frozen=True, eq=False)
class Hoisted:
    """A function without the values that depend on its parameters alone; see `hoist`.

    Attributes:
      f: the function before it was split.
      hoisting: how it was split.
      parents: its parameters, with `jax.ShapeDtypeStruct` in place of arrays.
      others: the parameters that hold no weights, as `names=` of `make_plan` takes them.
      sizes: the types of its other arguments, when it was split.
      program: what computes the values, as text, for these; `None` if it is unknown.
    """

    f: Callable[..., Any]
    hoisting: Hoisting
    parents: tuple[Any, ...]
    others: Mapping[str, None] = dataclasses.field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    program: str | None = None

    @property
    def params(self) -> int:
        """The position of what was computed."""
        return min(positions_of(self.hoisting.params))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        argnum = self.params
        if argnum >= len(args):
            problem = f"there are no computed parameters at position {argnum}."
            fix = "pass what hoist(f)(params, *args) returned with g: g(computed, *args)."
            raise fail("hoist", problem, fix=fix)
        others = [x for i, x in enumerate(args) if i != argnum]
        full = insert_params(positions_of(self.hoisting.params), self.parents, others)
        weights = Weights(self.hoisting.params, self.hoisting.names)
        call = trace_call("hoist", self.f, weights, full, kwargs)
        parts = _Parts.of(call, self.hoisting.params, cast(What, self.hoisting.what))
        is_other = self.program is not None and _sizes(parts) != self.sizes
        if is_other and str(parts.program[0]) != self.program:
            problem = "a value that was split off depends on the sizes of the other arguments: "
            problem += f"{some(list(parts.shapes))}."
            fix = "call hoist(f)(params, *args) with arguments of these sizes."
            raise fail("hoist", problem, fix=fix)
        leaves = [x for x, path in zip(call.leaves, parts.paths, strict=True) if path is None]
        return jax.tree.unflatten(call.out_tree, parts.run(args[argnum], leaves))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The two parts of a traced function.

    Attributes:
      call: the function.
      paths: for each leaf the path of a parameter; `None` for the leaves of other arguments.
      splitter: its values that depend on parameters alone, with their paths as names.
    """

    call: Call
    paths: tuple[str | None, ...]
    splitter: _Splitter

    @classmethod
    def of(cls, call: Call, params: Params, what: What) -> "_Parts":
        paths, are_known = [], []
        for path, keys, leaf in zip(call.paths, call.keys, call.leaves, strict=True):
            inside = keys[0].idx == 0 and keys[1].idx in positions_of(params)
            inner_keys = keys[2:] if isinstance(params, int) else keys[1:]
            paths.append((path or path_of(inner_keys)) if inside else None)
            are_known.append(inside and (path is not None or leaf.shape == ()))
        values = KnownValues(call.jaxpr, call.consts, are_known, what)
        return cls(call, tuple(paths), _Splitter(values, _names(values, paths)))

    @functools.cached_property
    def program(self) -> tuple[Any, list[Any], list[int]]:
        """What computes the values: a jaxpr, its constants, and which leaves are its operands."""
        at = self.splitter.values.at
        leaf_indices = sorted({p for entry in at.values() for p in entry.value.parents})

        def run(*leaves: Any) -> list[Any]:
            leaf_at = dict(zip(leaf_indices, leaves, strict=True))
            args = [leaf_at.get(i) for i in range(len(self.paths))]
            _, arrays = self.splitter.computed(self.call.jaxpr, self.call.consts, args)
            return [arrays[name] for name in self.shapes]

        jaxpr, consts = compat.trace(run, *(stand_in(self.call.leaves[i]) for i in leaf_indices))
        return live(jaxpr), consts, leaf_indices

    @functools.cached_property
    def _rest(self) -> tuple[Any, list[Any]]:
        """The rest of the function. Its operands are what is split off, and the leaves."""

        def run(arrays: dict[str, Any], args: list[Any]) -> list[Any]:
            return self.splitter.rest(self.call.jaxpr, self.call.consts, args, arrays)

        args = [stand_in(leaf) for leaf in self.call.leaves]
        jaxpr, consts = compat.trace(run, self.shapes, args)
        return live(jaxpr), consts

    @functools.cached_property
    def _read(self) -> dict[str, Any]:
        """The leaves of the parameters that the rest of the function reads, by path."""
        jaxpr, count = self._rest[0], len(self.shapes)
        read = read_by(jaxpr)
        triples = zip(self.paths, self.call.leaves, jaxpr.invars[count:], strict=True)
        return {path: leaf for path, leaf, var in triples if path is not None and id(var) in read}

    @functools.cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the values that are split off, by path, in the order of their paths."""
        values, names = self.splitter.values, self.splitter.names
        shapes = {}
        for entry in values.at.values():
            stack = tuple(values.lengths[loop] for loop in entry.value.loops)
            shape = jax.ShapeDtypeStruct((*stack, *entry.aval.shape), entry.aval.dtype)
            shapes[names[entry.value.number]] = shape
        return dict(sorted(shapes.items()))

    def computed(self) -> dict[str, Any]:
        """Returns what was split off, and the parameters that the rest reads, as nested dicts."""
        jaxpr, consts, leaf_indices = self.program
        leaves = [self.call.leaves[i] for i in leaf_indices]
        leaves = [x.dequantize() if is_whole(x) else x for x in leaves]
        run = functools.partial(evaluate, jaxpr, consts)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            values = jax.eval_shape(run, leaves)
        else:
            values = run(list(map(jnp.asarray, leaves)))
        return _nested({**self._read, **dict(zip(self.shapes, values, strict=True))})

    @property
    def others(self) -> dict[str, None]:
        """The leaves that hold no weights, by path, as `names=` of `make_plan` takes them."""
        triples = zip(self.call.paths, self.paths, self.call.leaves, strict=True)
        paths = {
            other_path
            for path, other_path, leaf in triples
            if path is None and other_path and leaf.shape != ()
        }
        return dict.fromkeys(path for path in self._read if path in paths)

    def run(self, tree: Any, own_leaves: Sequence[Any]) -> list[Any]:
        """Evaluates the rest of the function on computed values and the other leaves."""
        arrays = {path_of(keys): leaf for keys, leaf in flatten(tree)}
        self._check(arrays)
        rest_of = iter(own_leaves)
        leaves = [next(rest_of) if path is None else arrays.get(path) for path in self.paths]
        return evaluate(*self._rest, [*(arrays[name] for name in self.shapes), *leaves])

    def _check(self, arrays: Mapping[str, Any]) -> None:
        """Raises if computed values are not those that the rest of the function takes."""
        needed = {**self._read, **self.shapes}
        groups = {_group(path) for path in self.shapes}
        others = [
            path
            for path in arrays
            if path not in needed and path not in self.paths and _group(path) in groups
        ]
        wrong = [
            path for path, x in needed.items() if type_text(arrays.get(path)) != type_text(x)
        ] + others
        if wrong:
            path, problem = wrong[0], "these are not the computed parameters of this function."
            details = (
                f"{path!r}: {type_text(arrays.get(path))}, expected {type_text(needed.get(path))}"
            )
            fix = "pass those that hoist(f)(params, *args) returns together with g."
            raise fail("hoist", problem, given=details, fix=fix)


def _template(tree: Any) -> Any:
    """Returns parameters with `jax.ShapeDtypeStruct` in place of arrays."""

    def shape_of(leaf: Any) -> Any:
        if is_whole(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            return stand_in(leaf)
        if not is_array(leaf):
            return leaf
        aval = compat.type_of(leaf)
        return jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            weak_type=getattr(aval, "weak_type", False),
            sharding=compat.explicit_sharding(leaf),
        )

    return jax.tree.map(shape_of, tree, is_leaf=is_whole)


def _sizes(parts: _Parts) -> tuple[str, ...]:
    """Returns the types of the arguments that hold no parameters."""
    pairs = zip(parts.paths, parts.call.leaves, strict=True)
    return tuple(str(compat.type_of(stand_in(leaf))) for path, leaf in pairs if path is None)


def _names(values: KnownValues, paths: Sequence[str | None]) -> dict[int, str]:
    """Names what is split off after the parameters that it is computed from, by number."""
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for _, entry in sorted(values.at.items(), key=lambda item: (*item[0][0], *item[0][1:])):
        if entry.value.number in names:
            continue
        parents = [paths[parent] or "" for parent in sorted(entry.value.parents)]
        name = _joined(parents)
        counts[name] += 1
        names[entry.value.number] = name if counts[name] == 1 else f"{name}-{counts[name]}"
    return names


def _joined(parents: Sequence[str]) -> str:
    """Returns the path of a value that is computed from parameters with these paths."""
    parts = [path.split("/") for path in parents]
    count = 0
    while all(len(keys) > count + 1 and keys[count] == parts[0][count] for keys in parts):
        count += 1
    names = [".".join(keys[count:]) for keys in parts]
    shown = names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], f"{len(names)}"]
    return "/".join([*parts[0][:count], _PLACE, ",".join(shown)]).rstrip("/")


def _group(path: str) -> str:
    return re.sub(r"-[0-9]+\Z", "", path)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by path as nested dicts; as one dict if a path continues another."""
    fronts = {path[:i] for path in values for i, c in enumerate(path) if c == "/"}
    if fronts & values.keys():
        return dict(values)
    return nested((path.split("/"), x) for path, x in values.items())
