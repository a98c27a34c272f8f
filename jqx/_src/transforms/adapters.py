"""Adapters of low rank (LoRA): which weights can have them, and a function that adds them."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..checks import check_instance
from ..errors import fail, some
from ..policy import Policy
from .channel_map import LowRank
from .find import Found, contractions
from .make_plan import with_contractions
from .map_channels import keys_by_address, map_call
from .paths import Weights
from .trace import trace_call
from .views import Origin

Axes = tuple[int, ...]


class LoRA(NamedTuple):
    """An adapter of low rank for each weight that a rule of `apply_lora` matches.

    Attributes:
      rank: rank of the two factors.
      alpha: weight of their product, times rank: `alpha / rank * (x @ a) @ b` is added.

    Source: Hu et al., "LoRA", arXiv:2106.09685.

    Example:
      >>> import jqx.nnx
      >>> jqx.nnx.LoRA(rank=16, alpha=32.0)
      LoRA(rank=16, alpha=32.0)
    """

    rank: int
    alpha: float


class Use(NamedTuple):
    """How a product with one weight sees the axes of this weight.

    Attributes:
      stack: axes of the scans that step over the weight, then batch axes of the product.
      summed: axes that are summed, in the order of the product.
      kept: axes that the result keeps, in its order.
    """

    stack: Axes
    summed: Axes
    kept: Axes

    def stacked(self, count: int) -> "Use":
        """Returns the use of a stack of weights, with this number of axes before the others."""
        stack, summed, kept = (tuple(count + axis for axis in axes) for axes in self)
        return Use((*range(count), *stack), summed, kept)


class Adapter(NamedTuple):
    """The adapter of a weight: `a` `[*stack, *summed, rank]` and `b` `[*stack, rank, *kept]`, whose
    product is added to the weight, times `alpha / rank`. Axes are in the order of the weight.
    """

    rank: int
    alpha: float
    use: Use

    def of_axes(self, of_weight: Sequence[Any], of_rank: Any) -> list[tuple[Any, ...]]:
        """Returns what each axis of `a` and of `b` has, from what the axes of the weight have."""
        stack, *others = self.use
        summed, kept = map(sorted, others)
        stack, summed, kept = (tuple(of_weight[i] for i in axes) for axes in (stack, summed, kept))
        return [(*stack, *summed, of_rank), (*stack, of_rank, *kept)]

    def of_matrices(self, weight: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of `a` and `b` as matrices, `[*stack, summed, rank]` and
        `[*stack, rank, kept]`, for a weight of a shape.
        """
        stack, summed, kept = (tuple(weight[i] for i in axes) for axes in self.use)
        return (*stack, math.prod(summed), self.rank), (*stack, self.rank, math.prod(kept))

    def from_matrices(
        self, a: jax.Array, b: jax.Array, weight: Sequence[int]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `a` and `b` from such matrices, with channels in the order of the product."""
        n, summed, kept = len(self.use.stack), self.use.summed, self.use.kept
        a = a.reshape(*a.shape[:n], *(weight[i] for i in summed), a.shape[-1])
        b = b.reshape(*b.shape[: n + 1], *(weight[i] for i in kept))
        a = a.transpose(*range(n), *(n + i for i in _sorted(summed)), a.ndim - 1)
        return a, b.transpose(*range(n + 1), *(n + 1 + i for i in _sorted(kept)))

    def steps_apart(self, weight: int, a: int) -> bool:
        """Returns whether a weight and `a`, of these ranks, are not in the same step of a stack."""
        stack, summed, kept = map(len, self.use)
        return stack + summed + kept - weight != stack + summed + 1 - a

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns what the adapter adds to its weight, in the shape of the weight."""
        count = sum(map(len, self.use))
        in_a, in_b = self.of_axes(range(count), count)
        delta = jnp.einsum(a, in_a, b, in_b, range(count), precision=jax.lax.Precision.HIGHEST)
        return delta * jnp.asarray(self.alpha / self.rank, delta.dtype)

    def as_map(self, a: jax.Array, b: jax.Array, use: Use) -> LowRank:
        """Returns what the adapter adds to a product that uses its weight in some order."""
        n, (_, summed, kept) = len(use.stack), use
        a = a.transpose(*range(n), *_places(summed, n), a.ndim - 1)
        b = b.transpose(*range(n + 1), *_places(kept, n + 1))
        a = a * jnp.asarray(self.alpha / self.rank, a.dtype)
        return LowRank(a.reshape(*a.shape[:n], -1, a.shape[-1]), b.reshape(*b.shape[: n + 1], -1))


def _places(axes: Axes, start: int) -> list[int]:
    """Returns where axes of a weight are in a factor that has them, in order, from `start` on."""
    return [start + sorted(axes).index(axis) for axis in axes]


def _sorted(axes: Axes) -> list[int]:
    """Returns the positions of axes, in the order of the axes."""
    return sorted(range(len(axes)), key=axes.__getitem__)


class Products(NamedTuple):
    """What a function does with its weights, by their paths.

    Attributes:
      items: the products with one weight.
      others: weights in lookups, convolutions and other forms.
    """

    items: dict[str, list[Found]]
    others: set[str]


def find_products(function: str, f: Callable[..., Any], args: Sequence[Any]) -> Products:
    """Returns the products of `f(params, ...)`."""
    products = Products({}, set())
    for item in contractions(trace_call(function, f, 0, args, {})):
        if (path := _product_of(item)) is None:
            products.others.update(p.path for x in item.origins if x is not None for p in x.parts)
        else:
            products.items.setdefault(path, []).append(item)
    return products


def match_rules(
    function: str, rules: Mapping[str, LoRA], products: Collection[str], others: Collection[str]
) -> dict[str, LoRA]:
    """Returns the first rule that matches each weight of a product.

    Raises:
      ValueError: if a rule matches none.
    """
    matched = {
        path: pattern
        for path in products
        if (pattern := next((x for x in rules if _matches(x, path)), None)) is not None
    }
    _check_used(function, rules, set(matched.values()), sorted(products), sorted(others))
    return {path: rules[pattern] for path, pattern in matched.items()}


def adapter_of(function: str, path: str, rule: LoRA, uses: Collection[Use]) -> Adapter:
    """Returns the adapter of a weight.

    Raises:
      ValueError: if products use its axes in different ways.
    """
    if len(uses) > 1:
        problem = f"products use the axes of the weight {path!r} in different ways."
        facts = "sums over axes " + some(str(use.summed) for use in sorted(uses))
        raise fail(function, problem, given=facts, fix="leave it out of the rules.")
    (use,) = uses
    return Adapter(*rule, use)


def _check_used(
    function: str,
    rules: Mapping[str, LoRA],
    used: Collection[str],
    products: Sequence[str],
    others: Sequence[str],
) -> None:
    for pattern in rules:
        if pattern not in used:
            hidden, no_products = (
                [path for path in paths if _matches(pattern, path)] for paths in (products, others)
            )
            facts = "it matches nothing"
            if hidden:
                facts = f"an earlier rule has {some(map(repr, hidden))}"
            elif no_products:
                facts = f"{some(map(repr, no_products))}, in a lookup or another form"
            fix = "pass a model that multiplies by a parameter of floats."
            if products:
                fix = f"match one of {some(map(repr, products))}, or its module."
            problem = f"the rule {pattern!r} matches no weight of a product."
            raise fail(function, problem, given=facts, fix=fix)


def _matches(pattern: str, path: str) -> bool:
    """Returns whether a pattern is the whole path of a weight, or of its module."""
    return any(re.fullmatch(pattern, x) for x in (path, path.rpartition("/")[0]))


def with_adapters(
    function: str, f: Callable[..., Any], adapters: Mapping[str, Adapter]
) -> Callable[..., Any]:
    """Returns `g(params, values, *args, **kwargs)`: `f` with adapters, whose values are a pair
    `(a, b)` for each path.
    """

    def adapted(params: Any, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        weights = Weights(0)
        call = trace_call(function, f, weights, (params, *args), kwargs)
        plan, items = with_contractions(function, Policy([]), call, weights)
        keys, maps = keys_by_address(plan), {}
        for item in items:
            if (path := _product_of(item)) is not None and path in adapters:
                a, b = values[path]
                low_rank = adapters[path].as_map(a, b, use_of(function, path, item))
                maps[keys[item.address, -1]] = (low_rank,)
        return map_call(call, plan, items, maps)

    return adapted


def _product_of(item: Found) -> str | None:
    """Returns the path of the one weight of a product that is evaluated, or `None`."""
    weights = [origin for origin in item.origins if origin is not None]
    is_product = item.op == "dot_general" and item.address and len(weights) == 1
    return weights[0].path if is_product and not weights[0].others else None


def use_of(function: str, path: str, item: Found) -> Use:
    """Returns how a product uses its weight.

    Raises:
      ValueError: if it uses a part of the weight, or has its axes merged in another order.
    """
    (side,) = (i for i, origin in enumerate(item.origins) if origin is not None)
    origin: Origin = item.origins[side]  # type: ignore[assignment]
    axes = item.family.axes(item.eqn)[side]
    kept = sorted(axis for axis in axes.kept if axis not in axes.batch)
    stack = [tuple(x) for x in (*origin.stepped, *(origin.dims[axis] for axis in axes.batch))]
    groups = [
        [tuple(sorted(origin.dims[axis])) for axis in group] for group in (axes.contracted, kept)
    ]
    held = [axis for part in (*stack, *groups[0], *groups[1]) for axis in part]
    views = {name for _, name in origin.moved}
    is_merged = any(len(part) > 1 for part in (*stack, *groups[0], *groups[1]))
    if (
        origin.cut
        or len(set(held)) < len(held)
        or any(len(part) != 1 for part in stack)
        or (is_merged and "transpose" in views)
    ):
        problem = f"the function multiplies by a part or a reordered view of the weight {path!r}."
        facts = ", ".join(sorted({name for _, name in origin.moved | origin.cut}))
        fix = "leave it out of the rules, or keep the parts as separate parameters."
        raise fail(function, problem, given=f"views: {facts}", fix=fix)
    flat = (tuple(axis for part in group for axis in part) for group in (stack, *groups))
    return Use(*flat)


def check_rules(function: str, rules: Any) -> dict[str, LoRA]:
    """Checks the rules of `apply_lora`."""
    fix = "pass for example {'.*attn.*': LoRA(rank=16, alpha=32.0)}."
    check_instance(function, "rules", rules, Mapping, fix=fix)
    if not rules:
        raise fail(function, "`rules` is empty: nothing would get an adapter.", fix=fix)
    for pattern, rule in rules.items():
        check_instance(function, "a pattern of `rules`", pattern, str, fix=fix)
        check_instance(function, f"rules[{pattern!r}]", rule, LoRA, fix=fix)
        try:
            re.compile(pattern)
        except re.error as error:
            problem = f"the pattern {pattern!r} of `rules` is no regular expression: {error}."
            raise fail(function, problem, fix=fix) from error
        if isinstance(rule.rank, bool) or not isinstance(rule.rank, int) or rule.rank < 1:
            problem = f"the rank of {pattern!r} is {rule.rank!r}."
            raise fail(function, problem, fix="pass an integer that is at least 1.")
    return dict(rules)
