"""Functions whose input was taken for the weight: `f(x, params)` planned without `params=1`, and
`f(x)` that closes over its weights. Without an error here the plan would look complete, and
`quantize_params` would quantize the batch.

A weight, by its place alone, is what argument 0 holds. It is the input where each product of it is
with an array from a tree in another argument, or, where no other argument is multiplied by
anything, with one that `f` closes over; and where it stands as inputs do: it contracts its last
axis and the other another one, or, where that does not tell, it is on the left. A lone array is
refused for that; a tree, where also more arrays of the other tree are multiplied than of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp

from .._errors import message
from ._find import Found, find
from ._origin import Origin
from ._paths import Weights, path_of
from ._trace import Call


class _Leaf(NamedTuple):
    """An array that a function is given, or closes over.

    Attributes:
      place: the argument that it is in, by position or name; `None` where it is closed over.
      path: its path there; empty for an argument that is an array.
      aval: its shape and dtype.
    """

    place: int | str | None
    path: str
    aval: Any

    @property
    def is_matrix(self) -> bool:
        """Whether it has two axes or more, of floats, as weights of products have."""
        return len(self.aval.shape) > 1 and jnp.issubdtype(self.aval.dtype, jnp.floating)

    @property
    def name(self) -> str:
        """Its path, as a key of its argument."""
        where = {None: "an array"}.get(self.place, f"{self.path!r} of argument {self.place}")
        return f"{where}, {self.aval.dtype}{list(self.aval.shape)}"


class _Product(NamedTuple):
    """A product of a planned weight and another array, each through views alone.

    Attributes:
      weight: the planned weight.
      other: what it is multiplied by.
      as_input: whether the planned weight stands as inputs do.
    """

    weight: _Leaf
    other: _Leaf
    as_input: bool


def check_inputs(function: str, call: Call, planned: Iterable[Found], weights: Weights) -> None:
    """Raises where the input of a function was planned as its weight; `planned` are contractions of
    quantized weights.
    """
    if not isinstance(weights.params, int):
        return
    planned = {item.address: item for item in planned}
    if not planned or any(len(item.origins) < 2 for item in planned.values()):
        return
    leaves = _leaves(call)
    known = [Origin.of_leaf(str(i), len(x.aval.shape)) for i, x in enumerate(leaves)]
    found, _ = find(_Opened.of(call.jaxpr), known)
    multiplied = {int(part.path) for item in found for o in item.origins if o for part in o.parts}
    matrices = [leaves[i] for i in multiplied if leaves[i].is_matrix]
    own = [x for x in matrices if x.place == weights.params]
    given = [x for x in matrices if x.place not in (weights.params, None)]
    products = []
    for item in found:
        before = planned.get(item.address)
        if before is not None and None in before.origins:
            product = _product(item, before, leaves)
            if product is None or not product.as_input or (product.other.place is None and given):
                return
            products.append(product)
    if not products:
        return
    others = {product.other.place for product in products}
    foreign = [x for x in matrices if x.place in others]
    is_array = [path for path in call.paths if path is not None] == [""]
    if len(others) == 1 and (is_array or len(foreign) > max(1, len(own))):
        _refuse(function, products[0], weights.params)


class _Opened(NamedTuple):
    """A jaxpr whose constants are operands before all others."""

    invars: Sequence[Any]
    eqns: Sequence[Any]
    outvars: Sequence[Any]

    @classmethod
    def of(cls, jaxpr: Any) -> "_Opened":
        """Returns the opened form of a jaxpr."""
        return cls([*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)


def _leaves(call: Call) -> list[_Leaf]:
    """Returns what the jaxpr of a call reads, in the order of its opened form."""
    leaves = [_Leaf(None, "", atom.aval) for atom in call.jaxpr.constvars]
    for keys, atom in zip(call.keys, call.jaxpr.invars, strict=True):
        place = keys[1].idx if keys[0].idx == 0 else keys[1].key
        leaves.append(_Leaf(place, path_of(keys[2:]), atom.aval))
    return leaves


def _product(item: Found, before: Found, leaves: Sequence[_Leaf]) -> _Product | None:
    """Returns the product that a contraction is; `None` where the other operand is no matrix from a
    tree, or of the function itself.
    """
    side = 0 if before.origins[1] is None else 1
    weight, other = item.origins[side], item.origins[1 - side]
    if weight is None or other is None:
        return None
    of_tree = [leaves[int(part.path)] for part in other.parts]
    if not all(x.is_matrix and (x.path or x.place is None) for x in of_tree):
        return None
    own = leaves[int(weight.path)]
    last = [
        len(leaves[int(origin.path)].aval.shape) - 1
        not in origin.kept(axes, len(leaves[int(origin.path)].aval.shape))
        for origin, axes in zip(item.origins, item.family.kept(item.eqn), strict=False)
        if origin is not None
    ]
    tells = item.op == "dot_general" and last[0] != last[1]
    return _Product(own, of_tree[0], last[side] if tells else side == 0)


def _refuse(function: str, product: _Product, params: int) -> NoReturn:
    weight, place = product.weight, product.other.place
    own = f"argument {params}, {weight.aval.dtype}{list(weight.aval.shape)}"
    if place is None:
        problem = f"`f` closes over its weights: argument {params}, the planned one, is its input."
        mend = "pass the weights as an argument, f(params, x); those of an nnx model by nnx.split, "
        mend += "or use jqx.nnx.quantize."
    elif isinstance(place, str):
        problem = f"argument {params} is planned as the weight, and looks like the input of `f`."
        mend = f"pass {place} by position, and that position as params=."
    else:
        problem = f"argument {params} is planned as the weight, and looks like the input of `f`."
        mend = f"pass params={place} to jqx.make_plan, whose plan every transform takes."
    raise ValueError(
        message(
            function,
            problem,
            given=f"{own}, multiplied by {product.other.name}",
            expected="weights in the argument that params= names",
            mend=f"{mend} (Where argument {params} is the weight: params=({params},).)",
        )
    )
