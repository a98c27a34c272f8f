"""Adapters that start from the low-rank products that an algorithm has found."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path
from jax.typing import DTypeLike

from .._errors import fail, some
from ..transforms import LowRank, Plan
from ..transforms._shared import Maps, as_maps, is_whole


class Adapter(NamedTuple):
    """The adapters of a layer.

    Attributes:
      rank: rank of the adapters.
      alpha: the layer adds `alpha / rank * x a b`.
      a: shape of the first, `[..., inputs, rank]`.
      b: shape of the second, `[..., rank, features]`.
      dtype: dtype of both.
    """

    rank: int
    alpha: float
    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: DTypeLike


def initial_adapters(
    function: str, plan: Plan, maps: Maps, layers: Mapping[str, Adapter]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns the initial values of adapters by the path of their layer: an `a` and a `b` for each,
    such that the layer adds the same as the maps.

    Raises:
      ValueError: if a map is not a product of two narrow matrices at a layer, or if a layer has no
        such product or one that does not fit.
    """
    if not layers:
        raise fail(
            function,
            "the module has no layer with adapters.",
            given="no LoRADense or LoRALinear",
            expected="one for each weight with a compensation",
            fix="make its layers of jqx.linen.LoRADense or jqx.nnx.LoRALinear.",
        )
    found = _products(function, plan, maps)
    missing = sorted(set(layers) - set(found))
    if missing:
        raise fail(
            function,
            "layers with adapters have no compensation.",
            given=f"none for {some(map(repr, missing))}",
            expected=f"one for each of {len(layers)} layers",
            fix="quantize their kernels with jqx.algorithms.loftq or eora and a policy that covers "
            "them; or use layers without adapters there.",
        )
    more = sorted(set(found) - set(layers))
    if more:
        raise fail(
            function,
            "weights with a compensation are not in a layer with adapters.",
            given=some(map(repr, more)),
            expected=f"the kernels of {some(map(repr, sorted(layers)))}",
            fix="make those layers of LoRADense or LoRALinear, or leave them out of the policy.",
        )
    return {path: _scaled(function, path, found[path], layers[path]) for path in layers}


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of nested dicts by path; a quantized weight is one leaf."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=is_whole)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def check_same_parameters(
    function: str, wanted: Mapping[str, Any], given: Mapping[str, Any], parts: Collection[str]
) -> None:
    """Checks that quantized parameters are those of a module, and that each quantized one is inside
    a part that takes codes.
    """
    shapes, own = ({path: jnp.shape(x) for path, x in each.items()} for each in (wanted, given))
    differ = [path for path in (*shapes, *own) if shapes.get(path) != own.get(path)]
    first = differ[0] if differ else ""
    if differ:
        raise fail(
            function,
            "`quantized` does not have the parameters of the module.",
            given=f"{first!r} of shape {own.get(first)}",
            expected=f"shape {shapes.get(first)}",
            fix="quantize the module with layers of Flax in place of those with adapters, with the "
            "same names.",
        )
    codes = [path for path, x in given.items() if is_whole(x)]
    left = [path for path in codes if not any(above in parts for above in _above(path))]
    if left:
        raise fail(
            function,
            "quantized weights are not in a layer that takes codes.",
            given=some(map(repr, left)),
            expected="layers of jqx.linen or jqx.nnx",
            fix="make those layers quantized layers, or leave them out of the policy of ptq.",
        )


def _above(path: str) -> Iterator[str]:
    """Yields the paths of all modules that contain a parameter."""
    parts = path.split("/")[:-1]
    for i in range(len(parts) + 1):
        yield "/".join(parts[:i])


def _products(function: str, plan: Plan, maps: Maps) -> dict[str, LowRank]:
    """Returns the products of narrow matrices by the path of the layer that has the kernel."""
    kernels = {
        site.output_key: site.path[: -len("kernel")].removesuffix("/")
        for site in plan.sites
        if site.path.split("/")[-1] == "kernel"
    }
    found = {}
    for key, values in as_maps(function, maps).items():
        is_product = len(values) == 1 and isinstance(values[0], LowRank)
        if not (is_product and key in kernels):
            raise fail(
                function,
                "an adapter cannot hold what is kept at a site.",
                given=f"{', '.join(type(x).__name__ for x in values)} at {key!r}",
                expected="one LowRank, at the result of a product with a parameter `kernel`",
                fix="quantize with only loftq or eora, or after algorithms that keep nothing at "
                "sites.",
            )
        (value,) = values
        assert isinstance(value, LowRank)
        found[kernels[key]] = value
    return found


def _scaled(
    function: str, path: str, product: LowRank, layer: Adapter
) -> tuple[jax.Array, jax.Array]:
    """Returns both matrices of a product, each with half of the inverse of `alpha / rank`."""
    a, b = jnp.asarray(product.a), jnp.asarray(product.b)
    rank, whole = a.shape[-1], min(a.shape[-2], b.shape[-1])
    if rank != layer.rank and not rank == whole < layer.rank:
        raise fail(
            function,
            f"the adapters of {path!r} have another rank than its compensation.",
            given=f"rank {layer.rank}, and a product of rank {rank}",
            expected="one rank",
            fix=f"make the layer with rank={rank}, or the algorithm with rank={layer.rank}.",
        )
    wide = [(0, 0)] * (a.ndim - 1)
    a = jnp.pad(a, [*wide, (0, layer.rank - rank)])
    b = jnp.pad(b, [*wide[:-1], (0, layer.rank - rank), (0, 0)])
    if (a.shape, b.shape) != (layer.a, layer.b):
        raise fail(
            function,
            f"the compensation of {path!r} does not fit its adapters.",
            given=f"matrices {a.shape} and {b.shape}",
            expected=f"{layer.a} and {layer.b}",
            fix="pass the result of quantizing the same module, with Dense or Linear in the place "
            "of "
            "layers with adapters.",
        )
    if not layer.alpha:
        raise fail(
            function,
            f"the adapters of {path!r} add nothing.",
            given="alpha == 0",
            expected="another alpha",
            fix="make the layer with alpha=1.",
        )
    root = (layer.rank / abs(layer.alpha)) ** 0.5
    sign = 1 if layer.alpha > 0 else -1
    return (a * root).astype(layer.dtype), (b * (sign * root)).astype(layer.dtype)
