"""Detects functions whose input was taken for the weight: `f(x, params)` planned without
`params=1`, and `f(x)` that closes over its weights. Without an error here the plan would look
complete, and `quantize_params` would quantize the batch.

By position alone, the contents of argument 0 are the weights. They are the input under two
conditions. First, each product of them is with an array from a tree in another argument. If no
other argument is in a product, it is with an array that `f` closes over. Second, they are in the
position of an input: they contract their last axis and the other operand contracts another one, or,
if that does not distinguish them, they are on the left. For a single array this suffices. For a
tree, more arrays of the other tree than of its own must be in products.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp

from .._errors import fail
from ._find import Found, find
from ._origin import Origin
from ._paths import Weights, path_of
from ._reasons import Source, sources
from ._trace import Call


class _Leaf(NamedTuple):
    """An array that a function takes or closes over.

    Attributes:
      place: the argument that holds it, by position or name; `None` if it is closed over, or
        computed from such arrays.
      path: its path in the argument; empty for an argument that is an array.
      aval: its shape and dtype.
    """

    place: int | str | None
    path: str
    aval: Any

    @property
    def is_matrix(self) -> bool:
        """Whether it has two or more axes and a float dtype, as weights of products do."""
        return len(self.aval.shape) > 1 and jnp.issubdtype(self.aval.dtype, jnp.floating)

    @property
    def name(self) -> str:
        """Its path in its argument, with dtype and shape."""
        where = "an array" if self.place is None else f"{self.path!r} of argument {self.place}"
        return f"{where}, {self.aval.dtype}{list(self.aval.shape)}"


class _Product(NamedTuple):
    """A product of a planned weight and another array, each reached through views only.

    Attributes:
      weight: the planned weight.
      other: the array that it is multiplied by.
      as_input: whether the planned weight is in the position of an input.
    """

    weight: _Leaf
    other: _Leaf
    as_input: bool


def check_inputs(function: str, call: Call, planned: Iterable[Found], weights: Weights) -> None:
    """Raises if the input of a function was planned as its weight; `planned` are the contractions
    with quantized weights.
    """
    before = {item.address: item for item in planned if None in item.origins}
    if not isinstance(weights.params, int) or not before:
        return
    leaves = _leaves(call)
    known = [Origin.of_leaf(str(i), len(x.aval.shape)) for i, x in enumerate(leaves)]
    found, _ = find(call.jaxpr, known)
    made_from = sources(call)
    closed = [any(x.is_closed_over for x in made_from.get(id(item.eqn), ())) for item in found]
    multiplied = {int(part.path) for item in found for o in item.origins if o for part in o.parts}
    matrices = [leaves[i] for i in multiplied if leaves[i].is_matrix]
    products = []
    for item in found:
        if item.address in before:
            given = made_from[id(item.eqn)]
            product = _product(item, before[item.address], leaves, given)
            if product is None or not product.as_input:
                return
            products.append(product)
    places = {product.other.place for product in products}
    if len(places) != 1:
        return
    (place,) = places
    if place is None and any(x.place != weights.params for x in matrices):
        return
    count = sum(closed) if place is None else sum(x.place == place for x in matrices)
    own = sum(x.place == weights.params for x in matrices)
    is_array = [path for path in call.paths if path is not None] == [""]
    if is_array or count > max(1, own):
        _refuse(function, products[0], weights.params)


def _leaves(call: Call) -> list[_Leaf]:
    """Returns the arrays that a function takes."""
    return [
        _Leaf(keys[1].idx if keys[0].idx == 0 else keys[1].key, path_of(keys[2:]), atom.aval)
        for keys, atom in zip(call.keys, call.jaxpr.invars, strict=True)
    ]


def _product(
    item: Found, before: Found, leaves: Sequence[_Leaf], given: Sequence[Source]
) -> _Product | None:
    """Returns a contraction as a product; `None` if the other operand is neither a matrix from a
    tree nor one that the function closes over. `given` has the sources of the operands.
    """
    side = 0 if before.origins[1] is None else 1
    weight, other = item.origins[side], item.origins[1 - side]
    if weight is None:
        return None
    if other is None and given[1 - side].is_closed_over:
        parts = [_Leaf(None, "", item.eqn.invars[1 - side].aval)]
    else:
        parts = [leaves[int(part.path)] for part in other.parts] if other else []
        parts = parts if all(part.path for part in parts) else []
    if not parts or not all(part.is_matrix for part in parts):
        return None
    last = [
        _contracts_last(origin, axes, len(atom.aval.shape), leaves)
        for origin, axes, atom in zip(
            item.origins, item.family.kept(item.eqn), item.eqn.invars, strict=False
        )
    ]
    is_known = item.op == "dot_general" and last[0] != last[1]
    return _Product(leaves[int(weight.path)], parts[0], last[side] if is_known else side == 0)


def _contracts_last(
    origin: Origin | None, kept: Sequence[int], rank: int, leaves: Sequence[_Leaf]
) -> bool:
    """Whether a contraction sums over the last axis of an array, as it was before any views."""
    if origin is None:
        return rank - 1 not in kept
    rank = len(leaves[int(origin.path)].aval.shape)
    return rank - 1 not in origin.kept(kept, rank)


def _refuse(function: str, product: _Product, params: int) -> NoReturn:
    weight, place = product.weight, product.other.place
    own = f"argument {params}, {weight.aval.dtype}{list(weight.aval.shape)}"
    if place is None:
        problem = f"`f` closes over its weights: argument {params}, the planned one, is its input."
        fix = "pass the weights as an argument, f(params, x); those of an nnx model by nnx.split, "
        fix += "or use jqx.nnx.quantize."
    elif isinstance(place, str):
        problem = f"argument {params} is planned as the weight, but looks like the input of `f`."
        fix = f"pass {place} by position, and that position as params=."
    else:
        problem = f"argument {params} is planned as the weight, but looks like the input of `f`."
        fix = f"pass params={place} to jqx.make_plan, whose plan every transform takes."
    raise fail(
        function,
        problem,
        given=f"{own}, multiplied by {product.other.name}",
        expected="weights in the argument that params= names",
        fix=f"{fix} (If argument {params} is the weight: params=({params},).)",
    )
