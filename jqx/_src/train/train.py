"""`train`: a function whose planned contractions and their gradients run on rounded operands."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax import lax

from ... import Plan, Policy, QSpec
from ...extend import Site
from ..checks import called, check_instance
from ..compat import Eqn
from ..contractions.problem import Dimensions
from ..errors import fail
from ..transforms.arguments import check_function
from ..transforms.higher_order import Records
from ..transforms.interpret import Rules, interpret
from ..transforms.make_plan import as_plan, params_of
from ..transforms.trace import trace_call
from ..transforms.views import real_of
from .products import Products, layer
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
      `jqx.train_state(plan, recipe)`. `key` is a random key, a new one for each step. The same key
      gives the same bits. Recipes that draw no random numbers take it too, so that one training
      step serves all recipes.

    Raises:
      TypeError: if `f` is not a function, or an argument has another type.
      ValueError: if the plan was made for another function, or by another policy than that of the
        recipe; or `key` is missing.
      NotImplementedError: a planned contraction is a lookup, has no weight or two of them, or is a
        convolution of a weight; or `ragged_dot` would need a Hadamard transform along rows.

    Gradient: with respect to all float arguments, once: there are no second derivatives.
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
        args = _without_state(args)
        _check_key(recipe, key)
        call = trace_call("train", f, params, args, kwargs)
        fitted = as_plan("train", plan, call, params)
        _check_sites(fitted, recipe)
        rules = _Trained(fitted, {}, key, recipe=recipe)
        out, _ = interpret(call.jaxpr, call.consts, call.leaves, rules)
        return jax.tree.unflatten(call.out_tree, list(map(real_of, out)))

    return trained


def train_state(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Returns the state of a recipe before the first step: empty for recipes whose scales are
    those of the current values.

    Args:
      plan: the plan.
      recipe: a value of `jqx.recipes`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> recipe = jqx.recipes.mxfp8()
      >>> plan = jqx.make_plan(lambda w, x: x @ w, recipe.policy)(jnp.eye(32), jnp.ones((1, 32)))
      >>> jqx.train_state(plan, recipe)
      {}
    """
    check_instance("train_state", "plan", plan, Plan, fix="pass the result of jqx.make_plan.")
    fix = "pass a value of jqx.recipes, such as jqx.recipes.mxfp8()."
    check_instance("train_state", "recipe", recipe, Recipe, fix=fix)
    return {}


def _without_state(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments of the function, without the state, which is the second argument."""
    fix = "pass jqx.train_state(plan, recipe) after the parameters."
    if len(args) < 2:
        raise fail("train", "the state is missing.", fix=fix, error=TypeError)
    check_instance("train", "state", args[1], Mapping, fix=fix)
    return args[0], *args[2:]


def _check_key(recipe: Recipe, key: Any) -> None:
    """Checks that a key is given if the recipe draws random numbers."""
    if recipe.needs_key and key is None:
        problem = f"{recipe.name} draws random numbers, but no key is given."
        raise fail("train", problem, fix="pass key=jax.random.key(0), a new one for each step.")


def _check_sites(plan: Plan, recipe: Recipe) -> None:
    """Checks that the plan is one of the recipe, and that each site has a weight and an activation,
    in an operation with three products.
    """
    for site in plan.sites:
        if products_of(site, recipe) is None:
            problem = f"the plan quantizes {site.label}, and the recipe {recipe.name} does not."
            raise fail("train", problem, fix="make the plan with recipe.policy.")
        roles = [operand.role for operand in site.operands]
        if sorted(roles) != ["activation", "weight"]:
            problem = f"{site.label} is not a product of an activation and a weight."
            facts = f"{site.op} of {' and '.join(roles)}"
            fix = "leave it out of the policy: its gradient has no quantized form."
            raise fail("train", problem, given=facts, fix=fix, error=NotImplementedError)
        if site.output is not None:
            problem = f"the plan quantizes the result of {site.label}, which no recipe does."
            raise fail("train", problem, fix="make the plan with recipe.policy.")
        rule = recipe.policy.rules[site.rule]
        for operand in site.operands:
            spec = rule.weight if operand.role == "weight" else rule.activation
            if spec is None or _format(operand.spec) != _format(spec):
                problem = f"{site.label} has another format in the plan than in {recipe.name}."
                facts = f"{operand.spec} in the plan, {spec} in the recipe"
                fix = "make the plan with recipe.policy."
                raise fail("train", problem, given=facts, fix=fix)


def _format(spec: QSpec | None) -> Any:
    """Returns what a plan and a recipe must agree on; granularities depend on the contraction."""
    return spec and (spec.qtype, spec.symmetric, spec.calibrator, spec.numerics)


def products_of(site: Site, recipe: Recipe) -> Products | None:
    """Returns the products of a site: those of the rule that applies to it."""
    return recipe.rules[site.rule][1] if site.rule < len(recipe.rules) else None


@dataclasses.dataclass(frozen=True)
class _Trained(Rules):
    """Evaluates sites with the products of a recipe."""

    recipe: Recipe = dataclasses.field(kw_only=True)

    function: ClassVar[str | None] = "train"

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        products, key = products_of(site, self.recipe), None
        assert products is not None
        if self.key is not None and products.needs_key:
            key = jax.random.fold_in(self.key, zlib.crc32(site.output_key.encode()))
        lhs, rhs, *others = map(real_of, operands)
        weight = [operand.role for operand in site.operands].index("weight")
        contract = _CONTRACTIONS.get(eqn.primitive.name)
        if contract is None:
            problem = f"{eqn.primitive.name} has no quantized backward pass."
            fix = f"leave {site.label} out of the policy."
            raise fail("train", problem, fix=fix, error=NotImplementedError)
        result = contract(eqn, lhs, rhs, weight, products, key, *others)
        return result.astype(eqn.outvars[0].aval.dtype), {}


def _dot(
    eqn: Eqn, lhs: jax.Array, rhs: jax.Array, weight: int, products: Products, key: Any
) -> jax.Array:
    """Evaluates a `dot_general` as a layer: in the form [batch, kept, summed]."""
    numbers = Dimensions.of(eqn.params["dimension_numbers"], lhs.ndim, rhs.ndim)
    x = _canonical(lhs, numbers.lhs_batch, numbers.lhs_free, numbers.lhs_contracting)
    w = _canonical(rhs, numbers.rhs_batch, numbers.rhs_free, numbers.rhs_contracting)
    out = layer(x, w, products, key) if weight == 1 else layer(w, x, products, key).swapaxes(1, 2)
    return out.reshape(eqn.outvars[0].aval.shape)


def _canonical(
    x: jax.Array, batch: Sequence[int], kept: Sequence[int], summed: Sequence[int]
) -> jax.Array:
    """Returns an operand in the form [batch, kept, summed]."""
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in (batch, kept, summed)]
    return x.transpose(*batch, *kept, *summed).reshape(sizes)


def _conv(
    eqn: Eqn, lhs: jax.Array, rhs: jax.Array, weight: int, products: Products, key: Any
) -> jax.Array:
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
    out = layer(x, w, products, key)  # [groups, rows, outputs]
    out = out.swapaxes(0, 1).reshape(*sizes, -1)
    order = [0] * out.ndim
    for position, axis in enumerate((batch, *space, features)):
        order[axis] = position
    return out.transpose(order)


def _ragged(
    eqn: Eqn,
    lhs: jax.Array,
    rhs: jax.Array,
    weight: int,
    products: Products,
    key: Any,
    sizes: jax.Array,
) -> jax.Array:
    """Evaluates a `ragged_dot`, of rows in groups with one matrix for each group."""
    if products.wgrad.hadamard:
        problem = "a Hadamard transform along rows would mix the rows of experts."
        fix = "pass a recipe without a transform in wgrad for these layers, such as mxfp8()."
        raise fail("train", problem, fix=fix, error=NotImplementedError)
    assert weight == 1
    return layer(lhs[None], rhs.swapaxes(1, 2), products, key, sizes)[0]


_CONTRACTIONS: dict[str, Callable[..., jax.Array]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "ragged_dot_general": _ragged,
}
