"""`train`: a function whose planned contractions and their gradients run on rounded operands."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import Plan, Policy
from ...extend import Site
from .. import compat
from ..checks import called, check_instance
from ..compat import Eqn
from ..contractions.problem import Dimensions
from ..errors import fail, some
from ..transforms.arguments import check_function
from ..transforms.higher_order import Records
from ..transforms.interpret import Rules, interpret
from ..transforms.make_plan import as_plan, params_of
from ..transforms.trace import trace_call
from ..transforms.views import real_of
from .products import layer
from .recipes import Recipe


@called("train", "call it in two steps: jqx.train(f, plan, recipe)(params, state, x, key=key).")
def train(f: Callable[..., Any], plan: Plan | Policy, recipe: Recipe) -> Callable[..., Any]:
    """Returns `f` for training in low precision: the products of planned contractions, forward and
    backward, have rounded operands.

    Each planned contraction with a weight computes `x w` on operands rounded as `recipe` says, and
    its derivative computes the other two products, `dy w` and `x dy`, on operands rounded for them.
    All else, and the weights themselves, stay in float. So an optimizer updates float weights.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with, such as `recipe.policy`. It says which
        contractions are quantized.
      recipe: how, a value of `jqx.recipes`.

    Returns:
      A function of `(params, state, *args, key=)` with the result of `f(params, *args)`. `state` is
      `jqx.train_state(plan, recipe)`, and its gradient is the state after this step; both are empty
      for most recipes. `key` is a random key, a new one for each step. The same key
      gives the same bits. Recipes that draw no random numbers take it too, so that one training
      step serves all recipes.

    Raises:
      TypeError: if `f` is not a function, or an argument has another type.
      ValueError: if the plan was made for another function, or by another policy than that of the
        recipe; if `key` is missing, or the state is that of another plan.
      NotImplementedError: a planned contraction is a lookup, has no weight or two of them, or is a
        convolution of a weight; or `ragged_dot` would need a Hadamard transform along rows.

    Gradient: with respect to all float arguments, once: there are no second derivatives. That of
      the state is the new state. Of several, as of micro-batches, take the largest elements.
    NaN and infinities: as in the contractions; a NaN makes all values that share its scale NaN.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: (x @ w).sum()
      >>> w, x = jnp.eye(64), jnp.ones((8, 64))
      >>> recipe = jqx.recipes.int8()
      >>> plan = jqx.make_plan(f, recipe.policy)(w, x)
      >>> float(jax.grad(jqx.train(f, plan, recipe))(w, {}, x)[0, 0])
      8.0
    """
    check_function("train", f)
    params = params_of("train", plan)
    fix = "pass a value of jqx.recipes, such as jqx.recipes.mxfp8()."
    check_instance("train", "recipe", recipe, Recipe, fix=fix)

    def trained(*args: Any, key: jax.Array | None = None, **kwargs: Any) -> Any:
        state, args = _split(args)
        _check_key(recipe, key)
        call = trace_call("train", f, params, args, kwargs)
        fitted = as_plan("train", plan, call, params)
        _check_sites(fitted, recipe)
        _check_state(state, fitted)
        rules = _Trained(fitted, jax.tree.map(_unless_unused, dict(state)), key)
        out, _ = interpret(call.jaxpr, call.consts, call.leaves, rules)
        return jax.tree.unflatten(call.out_tree, list(map(real_of, out)))

    return trained


def train_state(plan: Plan, recipe: Recipe) -> dict[str, jax.Array]:
    """Returns the state of a recipe before the first step.

    It is empty for recipes whose scales are those of the current values. For delayed scales it has
    the largest magnitudes of earlier steps, newest first: float32 zeros, by the name of an operand
    in the plan, or of the result, for its gradient. A weight that a scan steps over has one history
    for each step.

    Args:
      plan: the plan.
      recipe: the recipe of the plan, a value of `jqx.recipes`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> recipe = jqx.recipes.fp8_delayed(history=16)
      >>> f = lambda p, x: x @ p["w"]
      >>> plan = jqx.make_plan(f, recipe.policy)({"w": jnp.eye(32)}, jnp.ones((1, 32)))
      >>> {name: x.shape for name, x in jqx.train_state(plan, recipe).items()}
      {'w:dot_general:lhs': (16,), 'w:dot_general:rhs': (16,), 'w:dot_general:out': (16,)}
    """
    check_instance("train_state", "plan", plan, Plan, fix="pass the result of jqx.make_plan.")
    fix = "pass a value of jqx.recipes, such as jqx.recipes.mxfp8()."
    check_instance("train_state", "recipe", recipe, Recipe, fix=fix)
    _check_sites(plan, recipe)
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in _histories(plan).items()}


def _histories(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all histories of a plan, by key."""
    shapes = {}
    for site in plan.sites:
        assert site.products is not None
        lengths = tuple(loop.length for loop in site.loops)
        for name, key in _keys_of(site).items():
            if name in site.products.histories:
                shapes[key] = (*lengths, site.products.histories[name])
    return shapes


def _keys_of(site: Site) -> dict[str, str]:
    """Returns the keys of the histories of `x`, `w` and `dy` of a site."""
    names = {"activation": "x", "weight": "w"}
    return {names[x.role]: x.key for x in site.operands} | {"dy": site.output_key}


def _split(args: Sequence[Any]) -> tuple[Mapping[str, jax.Array], tuple[Any, ...]]:
    """Returns the state, which is the second argument, and the arguments of the function."""
    fix = "pass jqx.train_state(plan, recipe) after the parameters."
    if len(args) < 2:
        raise fail("train", "the state is missing.", fix=fix, error=TypeError)
    check_instance("train", "state", args[1], Mapping, fix=fix)
    return args[1], (args[0], *args[2:])


def _check_state(state: Mapping[str, Any], plan: Plan) -> None:
    """Checks that a state is that of a plan."""
    shapes = {name: jnp.shape(x) for name, x in state.items()}
    expected = _histories(plan)
    if shapes != expected:
        differing = sorted(
            name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name)
        )
        problem = "the state is not that of the plan and its recipe."
        facts = f"histories of other shapes, or missing: {some(differing)}"
        fix = "pass jqx.train_state(plan, recipe) in the first step, and then its gradient."
        raise fail("train", problem, given=facts, fix=fix)
    if expected and compat.manual_axes() and not compat.tracks_devices():
        problem = "delayed scales need to know what differs from device to device."
        fix = "pass check_vma=True to shard_map."
        raise fail("train", problem, given="check_vma == False", fix=fix, error=NotImplementedError)


def _check_key(recipe: Recipe, key: Any) -> None:
    """Checks that a key is given if the recipe draws random numbers."""
    if recipe.needs_key and key is None:
        problem = f"{recipe.name} draws random numbers, but no key is given."
        raise fail("train", problem, fix="pass key=jax.random.key(0), a new one for each step.")


def _check_sites(plan: Plan, recipe: Recipe) -> None:
    """Checks that the plan is one of the recipe, and that each site has a weight and an activation,
    in an operation with three products.
    """
    of_rules = dict(enumerate(products for _, products in recipe.rules))
    for site in plan.sites:
        if site.products is None or site.products != of_rules.get(site.rule):
            problem = f"the plan has other products for {site.label} than the recipe {recipe.name}."
            raise fail("train", problem, fix="make the plan with recipe.policy.")
        roles = [operand.role for operand in site.operands]
        if sorted(roles) != ["activation", "weight"]:
            problem = f"{site.label} is not a product of an activation and a weight."
            facts = f"{site.op} of {' and '.join(roles)}"
            fix = "leave it out of the policy: its gradient has no quantized form."
            raise fail("train", problem, given=facts, fix=fix, error=NotImplementedError)
        if site.op == "ragged_dot" and site.products.wgrad.hadamard:
            problem = f"a Hadamard transform along the rows of {site.label} would mix the rows of "
            problem += "experts."
            fix = "pass a recipe without a transform in wgrad for these layers, such as mxfp8()."
            raise fail("train", problem, fix=fix, error=NotImplementedError)
        if site.output is not None:
            problem = f"the plan quantizes the result of {site.label}, which no recipe does."
            raise fail("train", problem, fix="make the plan with recipe.policy.")


# Histories. Each is read once in a trace, and its gradient is the history after this step.


@jax.custom_vjp
def _unless_unused(history: jax.Array) -> jax.Array:
    """Returns a history, whose gradient is itself if no product has read it in this step, as in a
    branch that was not taken.
    """
    return history


def _unless_unused_backward(old: jax.Array, new: jax.Array) -> tuple[jax.Array]:
    is_used = jnp.any(new != 0, -1, keepdims=True)
    return (jnp.where(is_used, new, old),)


_unless_unused.defvjp(lambda history: (history, history), _unless_unused_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _in_each_step(history: jax.Array, length: int) -> jax.Array:
    """Returns a history for each step of a scan, whose gradient is the maximum over the steps."""
    return jnp.broadcast_to(history, (length, *history.shape))


_in_each_step.defvjp(
    lambda history, length: (_in_each_step(history, length), None),
    lambda length, _, new: (jnp.max(new, 0),),
)


@dataclasses.dataclass(frozen=True)
class _Trained(Rules):
    """Evaluates sites with the products of a recipe."""

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        products, key = site.products, None
        assert products is not None
        if self.key is not None and products.needs_key:
            key = jax.random.fold_in(self.key, zlib.crc32(site.output_key.encode()))
        histories: dict[str, Any] = {
            name: self.affines[key] for name, key in _keys_of(site).items() if key in self.affines
        }
        lhs, rhs, *others = map(real_of, operands)
        weight = [operand.role for operand in site.operands].index("weight")
        contract = _CONTRACTIONS.get(eqn.primitive.name)
        if contract is None:
            problem = f"{eqn.primitive.name} has no quantized backward pass."
            fix = f"leave {site.label} out of the policy."
            raise fail("train", problem, fix=fix, error=NotImplementedError)
        run = functools.partial(layer, products=products, key=key, histories=histories)
        result = contract(eqn, lhs, rhs, weight, run, *others)
        return result.astype(eqn.outvars[0].aval.dtype), {}

    def in_each_step(self, x: Any, length: int) -> Any:
        return _in_each_step(x, length)


Layer = Callable[..., jax.Array]
"""`layer` with the products of a site, its key and its histories."""


def _dot(eqn: Eqn, lhs: jax.Array, rhs: jax.Array, weight: int, run: Layer) -> jax.Array:
    """Evaluates a `dot_general` as a layer: in the form [batch, kept, summed]."""
    numbers = Dimensions.of(eqn.params["dimension_numbers"], lhs.ndim, rhs.ndim)
    turned = numbers.lhs_rank - 1 in numbers.lhs_free, numbers.rhs_rank - 1 in numbers.rhs_free
    lefts = numbers.lhs_batch, numbers.lhs_free, numbers.lhs_contracting
    rights = numbers.rhs_batch, numbers.rhs_free, numbers.rhs_contracting
    x, w = _canonical(lhs, *lefts, turned[0]), _canonical(rhs, *rights, turned[1])
    if weight == 1:
        out = run(x, w, turned=turned)
    else:
        out = run(w, x, turned=turned[::-1]).swapaxes(1, 2)
    return out.reshape(eqn.outvars[0].aval.shape)


Axes = Sequence[int]


def _canonical(x: jax.Array, batch: Axes, kept: Axes, summed: Axes, is_turned: bool) -> jax.Array:
    """Returns an operand in the form [batch, kept, summed]; `is_turned` says that its last axis is
    kept, so that only the swap of the last two axes moves elements.
    """
    if is_turned:
        return _canonical(x, batch, summed, kept, False).swapaxes(1, 2)
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in (batch, kept, summed)]
    return x.transpose(*batch, *kept, *summed).reshape(sizes)


def _conv(eqn: Eqn, lhs: jax.Array, rhs: jax.Array, weight: int, run: Layer) -> jax.Array:
    """Evaluates a convolution as a layer of patches: each row is what one output reads."""
    if weight != 1 or eqn.params["batch_group_count"] != 1:
        problem = "a convolution with a weight as its image has no quantized backward pass."
        raise fail("train", problem, fix="leave it out of the policy.", error=NotImplementedError)
    numbers = eqn.params["dimension_numbers"]
    groups = eqn.params["feature_group_count"]
    out_axis, in_axis, *window = numbers.rhs_spec
    patches = lax.conv_general_dilated_patches(
        lhs,
        [rhs.shape[axis] for axis in window],
        eqn.params["window_strides"],
        eqn.params["padding"],
        lhs_dilation=eqn.params["lhs_dilation"],
        rhs_dilation=eqn.params["rhs_dilation"],
        dimension_numbers=numbers,
        precision=lax.Precision.HIGHEST,
    )
    batch, features, *space = numbers.out_spec
    rows = patches.transpose(batch, *space, features)  # features: input channels, then the window
    sizes = [rows.shape[i] for i in range(rows.ndim - 1)]
    x = rows.reshape(math.prod(sizes), groups, -1).swapaxes(0, 1)
    w = rhs.transpose(out_axis, in_axis, *window)
    w = w.reshape(groups, w.shape[0] // groups, -1)
    turned = False, out_axis == rhs.ndim - 1
    out = run(x, w, turned=turned)  # [groups, rows, outputs]
    out = out.swapaxes(0, 1).reshape(*sizes, -1)
    order = [0] * out.ndim
    for position, axis in enumerate((batch, *space, features)):
        order[axis] = position
    return out.transpose(order)


def _ragged(
    eqn: Eqn, lhs: jax.Array, rhs: jax.Array, weight: int, run: Layer, sizes: jax.Array
) -> jax.Array:
    """Evaluates a `ragged_dot`, of rows in groups with one matrix for each group."""
    assert weight == 1
    return run(lhs[None], rhs.swapaxes(1, 2), sizes=sizes, turned=(False, True))[0]


_CONTRACTIONS: dict[str, Callable[..., jax.Array]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "ragged_dot_general": _ragged,
}
