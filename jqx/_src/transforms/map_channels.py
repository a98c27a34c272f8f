"""`map_channels`: a function with maps of channels at its contractions."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import compat
from ..checks import called, check_instance
from ..compat import Eqn
from ..errors import fail, some
from ..signatures import P, R
from .arguments import check_function
from .channel_map import ChannelMap, Channels, LowRank, Map, Maps
from .find import Found
from .higher_order import Records
from .interpret import Rules, interpret
from .make_plan import with_contractions
from .plan import Operand, Plan, Site
from .stats import observed_parts
from .trace import Call, trace_call
from .views import Address, real_of

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
    maps_of_keys = as_maps(name, maps)
    keys = set(_sides_by_key(plan))
    unknown = sorted(set(maps_of_keys) - keys)
    if unknown:
        problem = "`maps` has keys that are not in the plan."
        fix = "take the keys of plan.sites: operand.key, or site.output_key."
        raise fail(name, problem, given=some(unknown), fix=fix)

    def mapped(*args: P.args, **kwargs: P.kwargs) -> R:
        call = trace_call(name, f, plan.parameters, args, kwargs)
        fitted, items = with_contractions(name, plan, call, plan.parameters)
        return map_call(call, fitted, items, maps_of_keys)

    return mapped


def map_call(
    call: Call, plan: Plan, items: Sequence[Found], maps: Mapping[str, Sequence[Map]]
) -> Any:
    """Evaluates a call with maps at its contractions, given its plan and these contractions."""
    sides_of_keys, keys_of_sites = _sides_by_key(plan), dict[Address, dict[int, str]]()
    for key in maps:
        address, side = sides_of_keys[key]
        keys_of_sites.setdefault(address, {})[side] = key
    items_by_address = {item.address: item for item in items if item.address}
    sites = [_site(items_by_address[address], keys) for address, keys in keys_of_sites.items()]
    for mapped_site in sites:
        _check_loops(mapped_site.site, maps)
    mapped_plan = Plan(tuple(x.site for x in sites), (), (), plan.params, ())
    by_address = {x.site.address: x for x in sites}
    rules = _Mapped(mapped_plan, maps, sites=by_address)  # type: ignore[arg-type]
    out, _ = interpret(call.jaxpr, call.consts, list(map(real_of, call.leaves)), rules)
    out = [real_of(call.returned.get(i, x)) for i, x in enumerate(out)]
    return jax.tree.unflatten(call.out_tree, out)


def keys_by_address(plan: Plan) -> dict[tuple[Address, int], str]:
    """Returns the key of each operand, by the address of its contraction and its index; -1 is the
    result.
    """
    return {place: key for key, place in _sides_by_key(plan).items()}


def as_maps(function: str, maps: Any) -> dict[str, tuple[Map, ...]]:
    """Returns a tuple of maps for each key, after checking their types."""
    fix = "pass for example {'layer0/w:dot_general:lhs': jqx.ChannelMap(scale=s)}."
    check_instance(function, "maps", maps, Mapping, fix=fix)
    tuples = {
        key: tuple(value) if isinstance(value, (tuple, list)) else (value,)
        for key, value in maps.items()
    }
    for key, values in tuples.items():
        for value in values:
            check_instance(function, f"maps[{key!r}]", value, (ChannelMap, LowRank), fix=fix)
    return tuples


def with_maps(function: str, inner: Maps, outer: Maps) -> Maps:
    """Returns the maps of `inner` followed by those of `outer`."""
    maps = as_maps(function, inner)
    return maps | {k: maps.get(k, ()) + added for k, added in as_maps(function, outer).items()}


def _sides_by_key(plan: Plan) -> dict[str, tuple[Address, int]]:
    """Returns for each key the address of a contraction, and the index of its operand; -1 for its
    result.
    """
    sides_by_key = {}
    for site in plan.sites:
        for i, operand in enumerate(site.operands):
            if operand.path is None:
                sides_by_key[operand.key] = site.address, i
        sides_by_key[site.output_key] = site.address, -1
    for i, skip in enumerate(plan.skipped):
        if skip.address:
            name = plan.name_of_skipped(i)
            sides = _SIDES[: len(skip.shapes)] if skip.op != "gather" else ()
            sides_by_key |= {f"{name}:{side}": (skip.address, k) for k, side in enumerate(sides)}
            sides_by_key[f"{name}:out"] = skip.address, -1
    return sides_by_key


class _MappedSite(NamedTuple):
    """A contraction with maps: the index of each mapped operand (-1 for the result), its channels,
    and in `factor` the operand that is multiplied by a weight, `None` for other contractions.
    """

    site: Site
    channels: Mapping[int, Channels]
    factor: tuple[int, Channels] | None


def _site(item: Found, keys: Mapping[int, str]) -> _MappedSite:
    """Returns the contraction with what is mapped there."""
    first_key = keys[min(keys)]
    operands = []
    for i, origin in enumerate(item.origins):
        if origin is not None and i in keys:
            problem = f"the map {keys[i]!r} is for a weight."
            raise fail(_NAME, problem, fix="change the weight itself.")
        role = "activation" if origin is None else "weight"
        path = None if origin is None else origin.path
        operands.append(Operand(role, None, keys.get(i, f"{first_key}/{i}"), path))
    sides, output = tuple(operands), keys.get(-1, f"{first_key}/out")
    identity = item.address, item.path, item.scope, item.op
    site = Site(*identity, sides, None, output, 0, item.loops, (), (), None)
    weights = [i for i, origin in enumerate(item.origins) if origin is not None]
    weight_side = weights[0] if weights else len(operands) - 1
    parts = [Channels.of_operand(part.observed) for part in observed_parts(site, item)[:-1]]
    parts.append(Channels.of_result(item.eqn, weight_side))
    is_product = item.op == "dot_general" and len(weights) == 1
    factor = (1 - weight_side, parts[1 - weight_side]) if is_product else None
    return _MappedSite(site, {i: parts[i] for i in keys}, factor)


def _check_loops(site: Site, maps: Mapping[str, Sequence[Map]]) -> None:
    """Checks that maps have a leading axis for each scan over the weight of their site."""
    loops = tuple(loop.length for loop in site.loops)
    for key in set(site.keys) & set(maps):
        for x in jax.tree.leaves(maps[key]):
            if jnp.shape(x)[: len(loops)] != loops:
                problem = f"a map of {key!r} does not step with its weight."
                details = f"shape {jnp.shape(x)}, without the leading axes {loops}"
                fix = "repeat it: jnp.broadcast_to(x, (steps, *x.shape))."
                raise fail(_NAME, problem, given=details, fix=fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mapped(Rules):
    """Evaluates in float, with the maps at their contractions."""

    sites: Mapping[Address, _MappedSite]

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        mapped = self.sites[site.address]
        values = [jnp.asarray(real_of(x)) for x in operands]
        maps: Mapping[str, Any] = self.affines
        for i, channels in mapped.channels.items():
            for channel_map in maps[site.keys[i]] if i >= 0 else ():
                _check_fits(site.keys[i], channel_map, channels, values[i], None)
                values[i] = channel_map.apply(values[i], channels)
        (result,) = compat.bind(eqn, values)
        for channel_map in maps[site.output_key] if -1 in mapped.channels else ():
            channels, factor = mapped.channels[-1], None
            if mapped.factor is not None:
                factor = values[mapped.factor[0]], mapped.factor[1]
            _check_fits(site.output_key, channel_map, channels, result, factor)
            if isinstance(channel_map, ChannelMap):
                result = channel_map.apply(result, channels)
            elif factor is not None:
                result = channel_map.apply(result, channels, *factor)
        return result, {}


def _check_fits(
    key: str,
    channel_map: Map,
    channels: Channels,
    x: jax.Array,
    factor: tuple[jax.Array, Channels] | None,
) -> None:
    """Checks that a map fits these channels."""
    if isinstance(channel_map, LowRank) and factor is None:
        fix = "use it for results of a dot_general with one weight."
        raise fail(_NAME, f"LowRank is not possible at {key!r}.", fix=fix)
    for name, (shape, expected) in _shapes(channel_map, channels.shape(x.shape), factor).items():
        if shape != expected:
            problem = f"a map of {key!r} does not fit its channels."
            details = f"{name} of shape {shape}, and not {expected}, in one step of its loops"
            fix = "give it the channels of this value, with a leading axis for each scan."
            raise fail(_NAME, problem, given=details, fix=fix)


def _shapes(
    channel_map: Map, sizes: tuple[int, ...], factor: tuple[jax.Array, Channels] | None
) -> dict[str, tuple[Any, Any]]:
    """Returns the shape of each array of a map, and the one that fits `[*batch, channels]`."""
    *stack, count = sizes
    if isinstance(channel_map, LowRank):
        assert factor is not None
        a, b = jnp.shape(channel_map.a), jnp.shape(channel_map.b)
        inputs = factor[1].shape(factor[0].shape)
        return {"a": (a, (*inputs, b[-2])), "b": (b, (*stack, b[-2], count))}
    arrays = {"scale": channel_map.scale, "shift": channel_map.shift, "clip": channel_map.clip}
    shapes: dict[str, tuple[Any, Any]] = {
        name: (jnp.shape(x), sizes) for name, x in arrays.items() if x is not None
    }
    orders = [jnp.shape(factor)[-1] for factor in channel_map.factors]
    fits = count % math.prod(orders) == 0
    for i, n in enumerate(orders):
        expected = (n, n) if fits else f"a size that divides {count}"
        shapes[f"factors[{i}]"] = jnp.shape(channel_map.factors[i]), expected
    return shapes
