"""`map_channels`: a function with maps of channels at its contractions."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _compat
from .._calls import called
from .._checks import check_instance
from .._compat import Eqn
from .._errors import fail, some
from .._signatures import P, R
from ._channel_map import ChannelMap, Channels, LowRank
from ._entries import observed_parts
from ._find import Found
from ._interpret import Rules, interpret
from ._origin import Address
from ._plan import Plan
from ._plan_call import with_contractions
from ._site import Operand, Site
from ._trace import check_function, trace_call
from ._weight import real_of
from .primitives import Records

Map = ChannelMap | LowRank
Maps = Mapping[str, Map | Sequence[Map]]
"""Maps by the key of an operand or a result, such as `w:dot_general:lhs`; several in order."""

_NAME, _SIDES = "map_channels", ("lhs", "rhs")


@called("map_channels", "call it in two steps: jqx.map_channels(f, plan, maps)(params, x).")
def map_channels(f: Callable[P, R], plan: Plan, maps: Maps) -> Callable[P, R]:
    """Returns `f` with maps of channels at its contractions, in float. The contractions are the
    same, so a plan of `f` is also a plan of the result.

    Algorithms change weights so that the mapped function with the new weights equals `f` with the
    old ones, and rounds better. XLA fuses scales and shifts with the operations before or after
    them.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`.
      maps: the maps, by the key of an operand that is not a weight, or of a result. The key of a
        site is for example `layer0/w:dot_general:lhs`. For a contraction that the plan skips it is
        `<path>:<op>~<index among skipped ones>:lhs`. Several maps apply in order. A `LowRank`
        applies to the result of a `dot_general` with a weight.

    Returns:
      A function with the arguments and the result of `f`.

    Raises:
      TypeError: if `f` is not a function, `plan` is not a plan, or `maps` is not a dict of maps.
      ValueError: if a key is unknown, a map does not fit its value, or the plan was made for
        another function.

    Gradient: that of the maps, with respect to arguments and to the arrays of `maps`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.ones((2, 1)), jnp.array([[1.0, 8.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
      >>> maps = {":dot_general:lhs": jqx.ChannelMap(scale=jnp.array([1.0, 0.125]))}
      >>> jqx.map_channels(f, plan, maps)(w, x)
      Array([[2.]], dtype=float32)
    """
    name = _NAME
    check_function(name, f)
    check_instance(name, "plan", plan, Plan, fix="call jqx.make_plan(f, policy)(params, x) first.")
    given = as_maps(name, maps)
    keys = set(_places(plan))
    unknown = sorted(set(given) - keys)
    if unknown:
        raise fail(
            name,
            "`maps` has keys that are not in the plan.",
            given=some(unknown),
            expected=f"keys of operands and results, such as {some(sorted(keys))}",
            fix="take the keys of plan.sites: operand.key, or site.output_key.",
        )

    def mapped(*args: P.args, **kwargs: P.kwargs) -> R:
        call = trace_call(name, f, plan.parameters, args, kwargs)
        known, items = with_contractions(name, plan, call, plan.parameters)
        places, wanted = _places(known), dict[Address, dict[int, str]]()
        for key in given:
            address, place = places[key]
            wanted.setdefault(address, {})[place] = key
        found = {item.address: item for item in items if item.address}
        sites = [_site(found[address], keys) for address, keys in wanted.items()]
        for here in sites:
            _check_loops(here.site, given)
        own = Plan(tuple(x.site for x in sites), (), (), plan.params, ())
        by_address = {x.site.address: x for x in sites}
        rules = _Mapped(own, given, sites=by_address)  # type: ignore[arg-type]
        leaves = list(map(real_of, call.leaves))
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        out = [real_of(call.returned.get(i, x)) for i, x in enumerate(out)]
        return jax.tree.unflatten(call.out_tree, out)

    return mapped


def as_maps(function: str, maps: Any) -> dict[str, tuple[Map, ...]]:
    """Returns a tuple of maps for each key, after checking their types."""
    fix = "pass for example {'layer0/w:dot_general:lhs': jqx.ChannelMap(scale=s)}."
    check_instance(function, "maps", maps, Mapping, fix=fix)
    each = {
        key: tuple(value) if isinstance(value, (tuple, list)) else (value,)
        for key, value in maps.items()
    }
    for key, values in each.items():
        for value in values:
            check_instance(function, f"maps[{key!r}]", value, (ChannelMap, LowRank), fix=fix)
    return each


def with_maps(function: str, first: Maps, then: Maps) -> Maps:
    """Returns the maps of `first` followed by those of `then`."""
    a, b = as_maps(function, first), as_maps(function, then)
    return a | {key: a.get(key, ()) + own for key, own in b.items()}


def _places(plan: Plan) -> dict[str, tuple[Address, int]]:
    """Returns for each key the address of a contraction, and the index of its operand; -1 for its
    result.
    """
    found = {}
    for site in plan.sites:
        for i, operand in enumerate(site.operands):
            if operand.path is None:
                found[operand.key] = site.address, i
        found[site.output_key] = site.address, -1
    for i, skip in enumerate(plan.skipped):
        if skip.address:
            name = plan.name_of_skipped(i)
            sides = _SIDES[: len(skip.shapes)] if skip.op != "gather" else ()
            found |= {f"{name}:{side}": (skip.address, k) for k, side in enumerate(sides)}
            found[f"{name}:out"] = skip.address, -1
    return found


class _Here(NamedTuple):
    """A contraction with maps: the index of each mapped operand (-1 for the result), its channels,
    and in `factor` the operand that is multiplied by a weight, `None` for other contractions.
    """

    site: Site
    channels: Mapping[int, Channels]
    factor: tuple[int, Channels] | None


def _site(item: Found, keys: Mapping[int, str]) -> _Here:
    """Returns the contraction with what is mapped there."""
    first = keys[min(keys)]
    operands = []
    for i, origin in enumerate(item.origins):
        if origin is not None and i in keys:
            raise fail(
                _NAME,
                "a map is for a weight.",
                given=repr(keys.get(i)),
                expected="an operand that is not a weight, or a result",
                fix="change the weight itself.",
            )
        role = "activation" if origin is None else "weight"
        path = None if origin is None else origin.path
        operands.append(Operand(role, None, keys.get(i, f"{first}/{i}"), path))
    own, output = tuple(operands), keys.get(-1, f"{first}/out")
    at = item.address, item.path, item.scope, item.op
    site = Site(*at, own, None, output, 0, item.loops, (), (), None)
    weights = [i for i, origin in enumerate(item.origins) if origin is not None]
    place = weights[0] if weights else len(operands) - 1
    parts = [Channels.of_operand(part.about) for part in observed_parts(site, item)[:-1]]
    parts.append(Channels.of_result(item.eqn, place))
    is_product = item.op == "dot_general" and len(weights) == 1
    factor = (1 - place, parts[1 - place]) if is_product else None
    return _Here(site, {i: parts[i] for i in keys}, factor)


def _check_loops(site: Site, maps: Mapping[str, Sequence[Map]]) -> None:
    """Checks that maps have a leading axis for each scan over the weight of their site."""
    loops = tuple(loop.length for loop in site.loops)
    for key in set(site.keys) & set(maps):
        for x in jax.tree.leaves(maps[key]):
            if jnp.shape(x)[: len(loops)] != loops:
                raise fail(
                    _NAME,
                    f"a map of {key!r} does not step with its weight.",
                    given=f"an array of shape {jnp.shape(x)}",
                    expected=f"leading axes {loops}, one for each scan over the weight",
                    fix="repeat it: jnp.broadcast_to(x, (steps, *x.shape)).",
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mapped(Rules):
    """Evaluates in float, with the maps at their contractions."""

    sites: Mapping[Address, _Here]

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        here = self.sites[site.address]
        values = [jnp.asarray(real_of(x)) for x in operands]
        maps: Mapping[str, Any] = self.affines
        for i, channels in here.channels.items():
            for each in maps[site.keys[i]] if i >= 0 else ():
                _check_fits(site.keys[i], each, channels, values[i], None)
                values[i] = each.apply(values[i], channels)
        (result,) = _compat.bind(eqn, values)
        for each in maps[site.output_key] if -1 in here.channels else ():
            channels, factor = here.channels[-1], None
            if here.factor is not None:
                factor = values[here.factor[0]], here.factor[1]
            _check_fits(site.output_key, each, channels, result, factor)
            if isinstance(each, ChannelMap):
                result = each.apply(result, channels)
            elif factor is not None:
                result = each.apply(result, channels, *factor)
        return result, {}


def _check_fits(
    key: str,
    each: Map,
    channels: Channels,
    x: jax.Array,
    factor: tuple[jax.Array, Channels] | None,
) -> None:
    """Checks that a map fits these channels."""
    *stack, count = channels.shape(x.shape)
    if isinstance(each, LowRank):
        if factor is None:
            raise fail(
                _NAME,
                f"LowRank is not possible at {key!r}.",
                given="an operand, or the result of another operation",
                expected="the result of a dot_general with one weight",
                fix="use it for the results of such contractions.",
            )
        assert factor is not None
        rank, inputs = jnp.shape(each.b)[-2], factor[1].shape(factor[0].shape)
        wanted: dict[str, Any] = {"a": (*inputs, rank), "b": (*stack, rank, count)}
        shapes = {"a": jnp.shape(each.a), "b": jnp.shape(each.b)}
    else:
        own = {"scale": each.scale, "shift": each.shift, "clip": each.clip}
        shapes = {name: jnp.shape(x) for name, x in own.items() if x is not None}
        wanted: dict[str, Any] = dict.fromkeys(shapes, (*stack, count))
        sizes = [jnp.shape(factor)[-1] for factor in each.factors]
        fits = count % math.prod(sizes) == 0
        for i, n in enumerate(sizes):
            shapes[f"factors[{i}]"] = jnp.shape(each.factors[i])
            wanted[f"factors[{i}]"] = (n, n) if fits else f"a size that divides {count}"
    for name, shape in shapes.items():
        if shape != wanted[name]:
            raise fail(
                _NAME,
                f"a map of {key!r} does not fit its channels.",
                given=f"{name} of shape {shape}, in one step of the loops around it",
                expected=str(wanted[name]),
                fix="give it the channels of this value, with a leading axis for each scan over "
                "the "
                "weight.",
            )
