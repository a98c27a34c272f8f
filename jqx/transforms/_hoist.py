"""`hoist`: splits off what a function computes from its parameters alone."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import dtypes

from .. import _compat
from .._calls import called
from .._errors import fail, some
from ._arguments import check_function
from ._calibrate_batches import placed
from ._evaluate import evaluate
from ._known_values import KnownValues, SplitOff, What
from ._live import live, read_by
from ._paths import (
    Hoisting,
    Names,
    Params,
    Weights,
    check_names,
    flatten,
    is_whole,
    nested,
    path_of,
)
from ._split_off import computed, rest
from ._trace import Call, as_params, is_array, stand_in, trace_call

_WHATS = ("all", "weights")

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
    if what not in _WHATS:
        raise fail(
            "hoist",
            "`what` is unknown.",
            given=f"what == {what!r}",
            expected=f"one of {', '.join(map(repr, _WHATS))}",
            fix="leave it out to split off everything that depends on the parameters alone.",
        )
    places = as_params("hoist", params)

    def split(*args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Any]:
        call = trace_call("hoist", f, Weights(places, names), args, kwargs)
        parts = _Parts.of(call, places, what)
        g = Hoisted(
            f=f,
            hoisting=Hoisting(what, places, call.names),
            parents=tuple(_template(args[place]) for place in _positions(places)),
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
        return min(_positions(self.hoisting.params))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = self.params
        if not place < len(args):
            raise fail(
                "hoist",
                "there are no computed parameters.",
                given=f"{len(args)} positional arguments",
                expected=f"what hoist(f)(params, *args) has computed, at position {place}",
                fix="pass them: g(computed, *args).",
            )
        others = [x for i, x in enumerate(args) if i != place]
        full = placed(_positions(self.hoisting.params), self.parents, others)
        weights = Weights(self.hoisting.params, self.hoisting.names)
        call = trace_call("hoist", self.f, weights, full, kwargs)
        parts = _Parts.of(call, self.hoisting.params, cast(What, self.hoisting.what))
        if self.program is not None and _sizes(parts) != self.sizes:
            parts.check_program(self.program)
        own = [x for x, path in zip(call.leaves, parts.paths, strict=True) if path is None]
        return jax.tree.unflatten(call.out_tree, parts.run(args[place], own))


def hoisted_as(
    f: Callable[..., Any], hoisting: Hoisting, parents: tuple[Any, ...], inputs: Any = None
) -> Hoisted:
    """Splits a function as another one was split, with parameters of the same shapes."""
    if inputs is None:
        return Hoisted(f, hoisting, parents)
    places = hoisting.params
    names = dict(hoisting.names)
    split = hoist(f, cast(What, hoisting.what), params=places, names=names or None)
    g, _ = split(*placed(_positions(places), parents, inputs))
    return cast(Hoisted, g)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The two parts of a traced function.

    Attributes:
      call: the function.
      paths: for each leaf the path of a parameter; `None` for the leaves of other arguments.
      known: its values that depend on parameters alone.
      names: the paths of what is split off, by the numbers of values.
    """

    call: Call
    paths: tuple[str | None, ...]
    known: KnownValues
    names: Mapping[int, str]

    @classmethod
    def of(cls, call: Call, params: Params, what: What) -> "_Parts":
        paths, are_known = [], []
        for path, keys, leaf in zip(call.paths, call.keys, call.leaves, strict=True):
            inside = keys[0].idx == 0 and keys[1].idx in _positions(params)
            own = keys[2:] if isinstance(params, int) else keys[1:]
            paths.append((path or path_of(own)) if inside else None)
            are_known.append(inside and (path is not None or leaf.shape == ()))
        known = KnownValues(call.jaxpr, are_known, what)
        return cls(call, tuple(paths), known, _names(known, paths))

    @functools.cached_property
    def program(self) -> tuple[Any, list[Any], list[int]]:
        """What computes the values: a jaxpr, its constants, and which leaves are its operands."""
        places = sorted({p for own in self.known.at.values() for p in own.value.parents})

        def run(*leaves: Any) -> list[Any]:
            given = dict(zip(places, leaves, strict=True))
            args = [given.get(i) for i in range(len(self.paths))]
            found = computed(self.known, self.names, self.call.jaxpr, self.call.consts, args)
            return [found[name] for name in self._shapes]

        jaxpr, consts = _compat.trace(run, *(stand_in(self.call.leaves[i]) for i in places))
        return live(jaxpr), consts, places

    @functools.cached_property
    def _rest(self) -> tuple[Any, list[Any]]:
        """The rest of the function. Its operands are what is split off, and the leaves."""

        def run(given: dict[str, Any], args: list[Any]) -> list[Any]:
            return rest(self.known, self.names, self.call.jaxpr, self.call.consts, args, given)

        args = [stand_in(leaf) for leaf in self.call.leaves]
        jaxpr, consts = _compat.trace(run, self._shapes, args)
        return live(jaxpr), consts

    @functools.cached_property
    def _read(self) -> dict[str, Any]:
        """The leaves of the parameters that the rest of the function reads, by path."""
        jaxpr, count = self._rest[0], len(self._shapes)
        read = read_by(jaxpr)
        each = zip(self.paths, self.call.leaves, jaxpr.invars[count:], strict=True)
        return {path: leaf for path, leaf, var in each if path is not None and id(var) in read}

    @functools.cached_property
    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the values that are split off, by path, in the order of their paths."""
        found = {self.names[own.value.number]: own for own in self.known.at.values()}
        return {name: self._shape(found[name]) for name in sorted(found)}

    def _shape(self, own: SplitOff) -> jax.ShapeDtypeStruct:
        stack = tuple(self.known.lengths[loop] for loop in own.value.loops)
        return jax.ShapeDtypeStruct((*stack, *own.aval.shape), own.aval.dtype)

    def computed(self) -> dict[str, Any]:
        """Returns what was split off, and the parameters that the rest reads, as nested dicts."""
        jaxpr, consts, places = self.program
        leaves = [self.call.leaves[i] for i in places]
        leaves = [x.dequantize() if is_whole(x) else x for x in leaves]
        run = functools.partial(evaluate, jaxpr, consts)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            values = jax.eval_shape(run, leaves)
        else:
            values = run(list(map(jnp.asarray, leaves)))
        return _nested({**self._read, **dict(zip(self._shapes, values, strict=True))})

    @property
    def others(self) -> dict[str, None]:
        """The leaves that hold no weights, by path, as `names=` of `make_plan` takes them."""
        each = zip(self.call.paths, self.paths, self.call.leaves, strict=True)
        paths = {own for path, own, leaf in each if path is None and own and leaf.shape != ()}
        return dict.fromkeys(path for path in self._read if path in paths)

    def check_program(self, program: str) -> None:
        """Raises if values that are split off are not those of another call."""
        if str(self.program[0]) != program:
            raise fail(
                "hoist",
                "a value that was split off depends on the sizes of the other arguments.",
                given=f"arguments of other sizes than those of hoist(f)(params, *args), and values "
                f"{some(list(self._shapes))}",
                expected="arguments with the same sizes",
                fix="call hoist(f)(params, *args) with arguments of these sizes.",
            )

    def run(self, tree: Any, own: Sequence[Any]) -> list[Any]:
        """Evaluates the rest of the function on computed values and the other leaves."""
        given = {path_of(keys): leaf for keys, leaf in flatten(tree)}
        self._check(given)
        rest_of = iter(own)
        leaves = [next(rest_of) if path is None else given.get(path) for path in self.paths]
        return evaluate(*self._rest, [*(given[name] for name in self._shapes), *leaves])

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raises if computed values are not those that the rest of the function takes."""
        needed = {**self._read, **self._shapes}
        groups = {_group(path) for path in self._shapes}
        others = [
            path
            for path in given
            if path not in needed and path not in self.paths and _group(path) in groups
        ]
        wrong = [path for path, x in needed.items() if _kind(given.get(path)) != _kind(x)] + others
        if wrong:
            raise fail(
                "hoist",
                "these are not the computed parameters of this function.",
                given=f"{wrong[0]!r}: {_kind(given.get(wrong[0]))}",
                expected=f"{wrong[0]!r}: {_kind(needed.get(wrong[0]))}",
                fix="pass those that hoist(f)(params, *args) returns together with g.",
            )


def _positions(params: Params) -> tuple[int, ...]:
    return (params,) if isinstance(params, int) else params


def _template(tree: Any) -> Any:
    """Returns parameters with `jax.ShapeDtypeStruct` in place of arrays."""

    def shape_of(leaf: Any) -> Any:
        if is_whole(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            return stand_in(leaf)
        if not is_array(leaf):
            return leaf
        aval = _compat.type_of(leaf)
        return jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            weak_type=getattr(aval, "weak_type", False),
            sharding=_compat.explicit_sharding(leaf),
        )

    return jax.tree.map(shape_of, tree, is_leaf=is_whole)


def _sizes(parts: _Parts) -> tuple[str, ...]:
    """Returns the types of the arguments that hold no parameters."""
    each = zip(parts.paths, parts.call.leaves, strict=True)
    return tuple(str(_compat.type_of(stand_in(leaf))) for path, leaf in each if path is None)


def _names(known: KnownValues, paths: Sequence[str | None]) -> dict[int, str]:
    """Names what is split off after the parameters that it is computed from, by number."""
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for _, own in sorted(known.at.items(), key=lambda item: (*item[0][0], *item[0][1:])):
        if own.value.number in names:
            continue
        parents = [paths[place] or "" for place in sorted(own.value.parents)]
        name = _joined(parents)
        counts[name] += 1
        names[own.value.number] = name if counts[name] == 1 else f"{name}-{counts[name]}"
    return names


def _joined(parents: Sequence[str]) -> str:
    """Returns the path of a value that is computed from parameters with these paths."""
    parts = [path.split("/") for path in parents]
    count = 0
    while all(len(own) > count + 1 and own[count] == parts[0][count] for own in parts):
        count += 1
    names = [".".join(own[count:]) for own in parts]
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


def _kind(x: Any) -> str:
    if x is None:
        return "none"
    # That of NumPy's arrays inside JAX; typed keys of random numbers have an extended one.
    return f"{dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)}{list(x.shape)}"
