"""What both members of a comparison evaluate: float parameters in the basis in which the sites of
the quantized function compute, and in their place its codes and whatever else it has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from .._errors import fail
from ..calibrators import Affine
from ..tensor import QTensor
from ..transforms import Plan, Weight, hoist, map_channels
from ..transforms._shared import (
    Call,
    Hoisted,
    Maps,
    as_maps,
    as_plan,
    is_quantized,
    named_leaves,
    placed,
    rooted,
    trace_call,
)

_MAPS, _KWARGS = "maps", "kwargs"


class QuantizedFunction(Protocol):
    """The attributes used of a `jqx.Quantized`."""

    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def params(self) -> Any: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def affines(self) -> Mapping[str, Affine]: ...
    @property
    def details(self) -> Any: ...
    @property
    def maps(self) -> Maps: ...
    @property
    def basis(self) -> Callable[[Any], tuple[Any, Maps]] | None: ...


def is_quantized_function(x: Any) -> bool:
    """Whether a value is a `jqx.Quantized`."""
    return isinstance(getattr(x, "plan", None), Plan) and callable(getattr(x, "function", None))


class Members(NamedTuple):
    """Both members of a comparison.

    Attributes:
      params: the parameters of the float member.
      maps: its maps at sites.
      rounded: what the other member has in place of parameters, by path: codes, and floats that a
        correction has changed.
      rounded_maps: what it has in place of the leaves of `maps`; `None` for the same.
    """

    params: Any
    maps: Maps
    rounded: Mapping[str, Any]
    rounded_maps: Sequence[Any]

    @classmethod
    def of(cls, function: str, quantized: QuantizedFunction, params: Any) -> "Members":
        """Returns the members for a quantized function and its float parameters."""
        plan, basis = quantized.plan, quantized.basis
        if basis is None:
            raise fail(
                function,
                "it is not known what the algorithm did to the weights before it chose codes.",
                given="a Quantized without `basis`: it comes from a file of scaled or rotated "
                "weights, "
                "or of an older jqx, or an algorithm returned no Chosen.basis",
                expected="the result of jqx.ptq",
                fix="compare before saving. If the algorithm only chose codes: jqx.compare(f, "
                "quantized.plan, quantized.affines, weights=quantized.params).",
            )
        assert basis is not None
        floats, maps = basis(params)
        rounded: dict[str, Any] = {**codes_by_path(function, plan, quantized.params)}
        exact, others = (
            dict(named_leaves(function, rooted(plan.params, x), plan))
            for x in (floats, quantized.params)
        )
        for path in (exact.keys() & others.keys()) - rounded.keys() - {None}:
            x, other = exact[path], others[path]
            is_known = x is other or is_quantized(x) or is_quantized(other)
            if not is_known and not jnp.array_equal(x, other, equal_nan=_is_float(x)):
                rounded[cast(str, path)] = other
        own = map(jax.tree.leaves, (as_maps(function, maps), as_maps(function, quantized.maps)))
        rounded_maps = [None if a is b else b for a, b in zip(*own, strict=True)]
        return cls(floats, as_maps(function, maps), rounded, rounded_maps)

    def call(
        self, function: str, f: Callable[..., Any], plan: Plan, args: Sequence[Any], kwargs: Any
    ) -> tuple[Call, Plan]:
        """Returns a function with the maps, traced at the parameters of the float member and other
        arguments, and its plan.
        """

        def mapped(*args: Any, maps: Maps, kwargs: Any) -> Any:
            return map_channels(f, plan, maps)(*args, **kwargs)

        own = f
        if self.maps:
            own, kwargs = mapped, {_MAPS: self.maps, _KWARGS: kwargs}
        call = trace_call(function, own, plan.parameters, args, kwargs)
        return call, as_plan(function, plan, call, plan.parameters)

    def others(self, call: Call) -> list[Any]:
        """Returns what the rounded member has in place of the leaves of a call; `None` for the
        same, or for a weight that is rounded to nearest.
        """
        maps = iter(self.rounded_maps)

        def other(keys: tuple[Any, ...], path: str | None) -> Any:
            if self.maps and keys[0].idx == 1 and keys[1].key == _MAPS:
                return next(maps)
            return None if path is None else self.rounded.get(path)

        return [other(*x) for x in zip(call.keys, call.paths, strict=True)]


def checked_call(
    function: str, f: Callable[..., Any], plan: Any, args: Sequence[Any], kwargs: Any, weights: Any
) -> tuple[Call, Plan]:
    """Returns a function traced at its arguments, with float weights, and the plan of the call."""
    call = trace_call(function, f, weights, args, kwargs)
    known = as_plan(function, plan, call, weights)
    both = zip(call.paths, call.leaves, strict=True)
    done = [path for path, x in both if is_quantized(x) and known.weight_at(path) is not None]
    if done:
        raise fail(
            function,
            "a parameter is quantized already, so that its float values are not known.",
            given=f"QTensors for {', '.join(map(repr, done[:4]))}",
            expected="float parameters",
            fix="pass the original parameters, not the result of jqx.quantize_params.",
        )
    return call, known


def as_planned(
    f: Callable[..., Any], plan: Plan, args: Sequence[Any], kwargs: Any
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns a function and its arguments in the form that a plan is for: split by `hoist`, if the
    planned function was.
    """
    places = places_of(f, plan)
    if plan.hoisted is None or isinstance(f, Hoisted):
        return f, args
    what, _, names = plan.hoisted
    g, computed = hoist(f, cast(Any, what), params=places, names=dict(names) or None)(
        *args, **kwargs
    )
    return g, placed(plan.params, computed, _without(args, places))


def places_of(f: Callable[..., Any], plan: Plan) -> int | tuple[int, ...]:
    """Returns the position, or positions, of the parameters among the arguments of a function."""
    return plan.params if plan.hoisted is None or isinstance(f, Hoisted) else plan.hoisted.params


def params_and_others(plan: Plan, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the parameters among the arguments of a function, a tuple if they are several
    arguments, and the other arguments.
    """
    places = plan.params
    params = args[places] if isinstance(places, int) else tuple(args[i] for i in places)
    return params, _without(args, places)


def _without(args: Sequence[Any], places: int | tuple[int, ...]) -> list[Any]:
    positions = (places,) if isinstance(places, int) else places
    return [x for i, x in enumerate(args) if i not in positions]


def codes_by_path(function: str, plan: Plan, weights: Any) -> dict[str, QTensor]:
    """Returns the codes of each weight of a plan."""
    found: dict[str, QTensor] = {}

    def keep(weight: Weight, x: Any) -> Any:
        if not (isinstance(x, QTensor) and x.qtype == weight.spec.qtype):
            raise fail(
                function,
                "`weights` do not belong to this plan.",
                given=f"{x!r} for {weight.path!r}"
                if is_quantized(x)
                else f"floats: {weight.path!r}",
                expected=f"a QTensor of {weight.spec}",
                fix="pass Quantized.params, or what jqx.quantize_params returned for this plan.",
            )
        found[weight.path] = x
        return x

    plan.map_weights(keep, weights)
    return found


class Entry(Protocol):
    """The fields used of an entry of a report of `jqx.algorithms`, for one matrix or block."""

    sites: tuple[str, ...]
    step: tuple[int, ...]
    before: float
    after: float


def entries_in(report: Any) -> list[Entry]:
    """Returns the entries of a report of an algorithm, or of several; others have no entries."""
    each = [x for x in _reports(report) if isinstance(x, Iterable)]
    return [entry for x in each for entry in x if _is_entry(entry)]


def entries_alone(function: str, report: Any) -> list[Entry]:
    """Returns the entries of a report, after checking that it has nothing else."""
    others = [
        x for x in _reports(report) if not isinstance(x, Iterable) or not all(map(_is_entry, x))
    ]
    if others:
        raise fail(
            function,
            "`report` is not that of an algorithm which only chooses codes.",
            given=f"a report of type {type(others[0]).__name__}" if others else "",
            expected="the objectives of codes, as from jqx.algorithms.gptq() alone: other "
            "algorithms "
            "change what sites compute in float, which a plan does not tell",
            fix="pass the result of jqx.ptq in place of the plan: jqx.compare(f, quantized).",
        )
    return entries_in(report)


def _reports(report: Any) -> Sequence[Any]:
    if report is None:
        return ()
    is_several = type(report) is tuple and not any(map(_is_entry, report))
    return report if is_several else (report,)


def _is_entry(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("sites", "step", "before", "after"))


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
