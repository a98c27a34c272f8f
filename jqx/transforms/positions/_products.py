"""Products, convolutions and lookups."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ... import _compat
from ..._compat import Eqn
from ._steps import At, Steps


def product(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Products. One with keys or values of all positions reads them from what is kept."""
    contracted, batch = eqn.params["dimension_numbers"]
    roles = [_role(*x) for x in zip(xs, contracted, batch, strict=True)]
    if "contracted" in roles:
        place = roles.index("contracted")
        if roles[1 - place] != "free":
            raise steps.over(eqn, xs[place])
        query, product = 1 - place, None
    elif roles == ["free", "free"]:
        query, product = int(id(eqn) in steps.turned), id(eqn)
    else:
        query = roles.index("batch" if "batch" in roles else "free")
        product = xs[query].product
    own = xs[query]
    if roles[query] == "batch":
        axis = batch[query].index(own.axis)
        both = zip(xs, batch, strict=True)
        if any(isinstance(x, At) and x.axis != dims[axis] for x, dims in both):
            raise steps.over(eqn, own)
        values = [
            x.value if isinstance(x, At) else steps.at(x, dims[axis])
            for x, dims in zip(xs, batch, strict=True)
        ]
    else:
        other = xs[1 - query]
        if isinstance(other, At):
            eqn, other = _in_order(steps, eqn, 1 - query, other)
            contracted, batch = eqn.params["dimension_numbers"]
        values = [own.value, other][:: -1 if query else 1]
        free = [
            [i for i in range(jnp.ndim(x)) if i not in (*dims, *shared)]
            for x, dims, shared in zip(values, contracted, batch, strict=True)
        ]
        axis = len(batch[0]) + query * len(free[0]) + free[query].index(own.axis)
    return [At(y, axis, product) for y in _compat.bind(eqn, values)]


def convolved(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Convolutions; those along positions are computed of all up to this one."""
    x, kernel = xs
    if isinstance(kernel, At):
        raise steps.over(eqn, kernel)
    axes = eqn.params["dimension_numbers"]
    axis = axes.out_spec[axes.lhs_spec.index(x.axis)]
    is_spatial = x.axis in axes.lhs_spec[2:]
    if not is_spatial or eqn.outvars[0].aval.shape[axis] != steps.length:
        raise steps.over(eqn, x)
    return [At(steps.at(y, axis), axis) for y in _compat.bind(eqn, [steps.whole(x), kernel])]


def gathered(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Lookups: of each position in a table, or in its own part of a value."""
    x, indices = xs
    numbers, rank = eqn.params["dimension_numbers"], eqn.outvars[0].aval.ndim
    own, others = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    sizes, is_alike = list(eqn.params["slice_sizes"]), isinstance(indices, At)
    if isinstance(x, At) and x.axis in own:
        place = others[own.index(x.axis)]
        indices = indices if is_alike else At(steps.at(indices, place), place)
        if indices.axis != place:
            raise steps.over(eqn, x)
        x = x.value
    elif isinstance(x, At):
        rows = [i for i in range(len(sizes)) if i not in numbers.collapsed_slice_dims]
        rows = [i for i in rows if i not in own]
        if is_alike or x.axis not in rows or x.axis in numbers.start_index_map:
            raise steps.over(eqn, x)
        sizes[x.axis] = 1
        axis = numbers.offset_dims[rows.index(x.axis)]
        return [At(_gather(eqn, x.value, indices, sizes), axis, x.product)]
    elif indices.axis in others:
        x = steps.at(x, own[others.index(indices.axis)])
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    if indices.axis >= len(batch):
        raise steps.over(eqn, indices)
    found = _gather(eqn, x, indices.value, sizes)
    return [At(found, batch[indices.axis], indices.product)]


def _in_order(steps: Steps, eqn: Eqn, which: int, x: At) -> tuple[Eqn, Any]:
    """Returns a product, and one of its operands at all positions up to this one, kept in the order
    of axes that products are computed in. From another one XLA would copy all of it at each
    position.
    """
    contracted, batch = ([*dims] for dims in eqn.params["dimension_numbers"])
    shared, summed = batch[which], contracted[which]
    free = [i for i in range(x.value.ndim) if i not in (*shared, *summed)]
    order = (*shared, *((*summed, *free) if which else (*free, *summed)))
    batch[which] = tuple(map(order.index, shared))
    contracted[which] = tuple(map(order.index, summed))
    params = {**eqn.params, "dimension_numbers": (tuple(contracted), tuple(batch))}
    return eqn.replace(params=params), steps.whole(x, order)


def _role(x: Any, contracted: Sequence[int], batch: Sequence[int]) -> str | None:
    if not isinstance(x, At):
        return None
    return "contracted" if x.axis in contracted else "batch" if x.axis in batch else "free"


def _gather(eqn: Eqn, x: Any, indices: Any, sizes: Sequence[int]) -> Any:
    params = {**eqn.params, "slice_sizes": tuple(sizes)}
    return _compat.bind(eqn.replace(params=params), [x, indices])[0]


PRODUCTS: dict[str, Any] = {
    "conv_general_dilated": convolved,
    "dot_general": product,
    "gather": gathered,
}
