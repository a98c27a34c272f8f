"""`einsum` on arrays and QTensors: pairwise contractions, each by `dot_general`."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..checks import as_real, called, is_at_least
from ..errors import fail
from ..numerics.exact import common_dtype
from ..tensor.qtensor import QTensor
from ..tensor.views import refine
from .blocks import item_along
from .dot_general import Operand, as_float_dtype, as_operand, dot_general
from .problem import can_leave_sum, check_no_offset_or_order

# The subscripts of an einsum: a label for each axis of each operand, and of the result.


Label = Any
"""The user's label of an axis; for an axis of an ellipsis, `("...", its place from the last)`."""

Labels = tuple[Label, ...]


class Subscripts(NamedTuple):
    """Subscripts as written: `...` is an item, and the result may be left out.

    Attributes:
      terms: the items of each operand.
      output: the items of the result, or `None`.
    """

    terms: tuple[tuple[Any, ...], ...]
    output: tuple[Any, ...] | None

    def __str__(self) -> str:
        """The string form."""
        terms = ",".join(map(_show, self.terms))
        return terms if self.output is None else f"{terms}->{_show(self.output)}"


def read(subscripts: Any, operands: Sequence[Any]) -> tuple[Subscripts, tuple[Any, ...]]:
    """Returns subscripts and operands, from either of the two forms that an einsum accepts."""
    if isinstance(subscripts, str):
        return _read_string(subscripts), tuple(operands)
    items = (subscripts, *operands)
    pairs = len(items) // 2
    lists, output = items[1 : 2 * pairs : 2], items[2 * pairs :]
    terms = [_read_list(term) for term in (*lists, *output)]
    return Subscripts(tuple(terms[:pairs]), terms[-1] if output else None), items[0 : 2 * pairs : 2]


def _read_string(subscripts: str) -> Subscripts:
    left, *right = "".join(subscripts.split()).split("->")
    if len(right) > 1:
        raise fail("einsum", f"there are several arrows in {subscripts!r}.", fix="keep one.")
    items = [_items(subscripts, term) for term in (*left.split(","), *right)]
    output = items.pop() if right else None
    return Subscripts(tuple(items), output)


def _items(subscripts: str, term: str) -> tuple[Any, ...]:
    lead, dots, trail = term.partition("...")
    items = (*lead, *([...] if dots else []), *trail)
    for item in items:
        if item is not ... and not item.isalnum():
            fix = "name each axis by a letter, as in 'bij,jk->bik'; '...' once in a term."
            raise fail("einsum", f"{item!r} in {subscripts!r} is not a label.", fix=fix)
    return items


def _read_list(term: Any) -> tuple[Any, ...]:
    hashable = isinstance(term, Sequence) and all(isinstance(item, Hashable) for item in term)
    if not hashable or sum(item is ... for item in term) > 1:
        problem = f"an operand is not followed by its labels, but of type {type(term).__name__}."
        fix = "write einsum('ij,jk', x, y), or einsum(x, [0, 1], y, [1, 2]) with one `...` at most."
        raise fail("einsum", problem, fix=fix, error=ValueError if hashable else TypeError)
    return tuple(term)


def labels_of(
    subscripts: Subscripts, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Labels], Labels]:
    """Returns the labels of each operand and of the result."""
    if len(subscripts.terms) != len(shapes):
        raise fail(
            "einsum",
            f"the numbers of operands and terms differ: {len(shapes)} operands for '{subscripts}'.",
            fix="write one term for each operand, with ',' between them.",
        )
    terms = [
        _spelt_out(subscripts, i, term, len(shape))
        for i, (term, shape) in enumerate(zip(subscripts.terms, shapes, strict=True))
    ]
    count = Counter(label for term in terms for label in term)
    widest = max((label[1] for label in count if _is_dots(label)), default=0)
    dots = tuple(("...", position) for position in range(widest, 0, -1))
    if subscripts.output is None:
        once = [label for label in count if count[label] == 1 and not _is_dots(label)]
        return terms, (*dots, *_in_order(once))
    output = _put_for_dots(subscripts.output, dots)
    for label in output:
        if label not in count or output.count(label) > 1:
            why = " twice" if label in count else ", which no operand has"
            problem = f"the result of '{subscripts}' cannot have the label {_show([label])!r}{why}."
            fix = "give every axis of the result a different label of the operands."
            raise fail("einsum", problem, fix=fix)
    return terms, output


def _spelt_out(subscripts: Subscripts, i: int, term: tuple[Any, ...], rank: int) -> Labels:
    """Returns the labels of an operand, with one for each axis that its ellipsis stands for."""
    dot_count = rank - sum(item is not ... for item in term)
    if dot_count < 0 or (dot_count and ... not in term):
        raise fail(
            "einsum",
            f"operand {i} does not have as many axes as its term has labels.",
            given=f"rank {rank} for the term {_show(term)!r} of '{subscripts}'",
            fix="name each axis once, or write '...' for those without a name.",
        )
    return _put_for_dots(term, tuple(("...", position) for position in range(dot_count, 0, -1)))


def _put_for_dots(term: tuple[Any, ...], dots: Labels) -> Labels:
    return tuple(label for item in term for label in (dots if item is ... else (item,)))


def _in_order(labels: list[Any]) -> Labels:
    try:
        return tuple(sorted(labels))
    except TypeError:
        raise fail(
            "einsum",
            "the labels cannot be sorted, which is needed if the result is left out.",
            given=f"labels of types {sorted({type(label).__name__ for label in labels})}",
            fix="pass the labels of the result.",
            error=TypeError,
        ) from None


def sizes_of(terms: Sequence[Labels], shapes: Sequence[tuple[int, ...]]) -> dict[Label, int]:
    """Returns the size of each label; axes of size 1 broadcast to those of other operands."""
    sizes: dict[Label, int] = {}
    for i, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        term_sizes: dict[Label, int] = {}
        for label, n in zip(term, shape, strict=True):
            size_in_term, size_so_far = term_sizes.setdefault(label, n), sizes.get(label, 1)
            if n != size_in_term or (n != 1 and size_so_far != 1 and n != size_so_far):
                sizes_seen = size_in_term if n != size_in_term else size_so_far
                raise fail(
                    "einsum",
                    f"axes of label {_show([label])!r} have different sizes: {sizes_seen} and {n}.",
                    given=f"operand {i} of shapes {[tuple(shape) for shape in shapes]}",
                    fix="use the same label only for axes of the same size.",
                )
            sizes[label] = n if size_so_far == 1 else size_so_far
    return sizes


def _is_dots(label: Any) -> bool:
    return isinstance(label, tuple) and label[:1] == ("...",)


def _show(items: Sequence[Any]) -> str:
    parts = ["..." if item is ... or _is_dots(item) else str(item) for item in items]
    short = all(len(part) == 1 or part == "..." for part in parts)
    return ("" if short else " ").join(parts)


@called("einsum")
def einsum(
    subscripts: str | Operand,
    *operands: Operand | Sequence[Any],
    optimize: Any = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Evaluates the Einstein summation convention; any operand may be quantized. Otherwise it is
    `jax.numpy.einsum`.

    Operands are contracted pairwise by `jqx.dot_general`; a QTensor stays quantized until it is
    contracted. A diagonal is taken of codes and scales. A label that only one QTensor has is summed
    by a contraction with ones. A QTensor may have a scale for each index of a summed label, such as
    values that are cached per token in attention. Then the other operand, an array, is multiplied
    by the scale first: `sum_t p[t] (s[t] v[t]) = sum_t (p[t] s[t]) v[t]`. With blocks of
    another label it is copied for each block, or contracted with one block after another if the
    copies were larger than the QTensor. If all operands are arrays, they are passed to
    `jax.numpy.einsum`.

    Args:
      subscripts: such as `"bik,kj->bij"`, with `...` for axes without a name. Or the first operand:
        then each operand is followed by its list of labels, and the last one by that of the result.
      *operands: arrays of floats and QTensors, any shapes that fit the subscripts; axes of size 1
        broadcast.
      optimize: the order in which more than two operands are contracted: a name that
        `jax.numpy.einsum_path` accepts, a bool, or a list of pairs of positions as it returns.
      precision: as in `jqx.dot_general`.
      preferred_element_type: floating point dtype of the result, and of intermediate results;
        `None` takes the promoted dtype of the operands.

    Returns:
      Array of `preferred_element_type`.

    Raises:
      ValueError: the subscripts are malformed, or do not fit ranks or sizes; `optimize` is not
        valid; a scale varies along a summed label, and no array can take the scale; and as in
        `jqx.dot_general`.
      TypeError: an array that is contracted with a QTensor is not of floats, or
        `preferred_element_type` is not a float dtype.

    Gradient: JAX differentiates it with respect to arrays and scales; codes have no gradient.
    NaN and infinities: as in `jqx.dot_general`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.eye(2) * 3.0, jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> jqx.einsum("bk,kn->nb", jnp.ones((1, 2)), w)
      Array([[3.],
             [3.]], dtype=float32)
      >>> jqx.einsum("ii", w)
      Array(6., dtype=float32)
    """
    if operands and not any(isinstance(x, QTensor) for x in (subscripts, *operands)):
        return jnp.einsum(
            subscripts,
            *operands,
            optimize=optimize,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    text, inputs = read(subscripts, operands)
    arrays = [
        as_operand(x) if isinstance(x, QTensor) else as_real("einsum", f"operands[{i}]", x)
        for i, x in enumerate(inputs)
    ]
    shapes = [x.shape for x in arrays]
    inputs, output = labels_of(text, shapes)
    if preferred_element_type is None:
        dtype = jnp.result_type(*(x.dtype if isinstance(x, QTensor) else x for x in arrays))
    else:
        dtype = as_float_dtype("einsum", preferred_element_type)
    sizes = sizes_of(inputs, shapes)
    terms = [_Term(x, labels) for x, labels in zip(arrays, inputs, strict=True)]
    terms = [_without_ones(_diagonal(term), sizes, output) for term in terms]
    how = _How(dtype, precision)
    terms = [
        _sum_of_own(term, _labels([*terms[:i], *terms[i + 1 :]], output), how)
        for i, term in enumerate(terms)
    ]
    for pair in _order_of(terms, output, optimize):
        lhs, rhs = (terms[i] for i in sorted(pair))
        terms = [term for i, term in enumerate(terms) if i not in pair]
        terms.append(_contract(lhs, rhs, _labels(terms, output), how))
    (term,) = terms
    x = term.x.astype(dtype).dequantize() if isinstance(term.x, QTensor) else term.x.astype(dtype)
    return jnp.transpose(x, [term.labels.index(label) for label in output])


class _Term(NamedTuple):
    """An array or QTensor, and the label of each of its axes."""

    x: Any
    labels: Labels

    def size(self, label: Any) -> int:
        return self.x.shape[self.labels.index(label)]

    def axes(self, labels: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.labels.index(label) for label in labels)


class _How(NamedTuple):
    """How terms are contracted: the dtype of the result, and the precision."""

    dtype: jnp.dtype
    precision: lax.PrecisionLike


def _labels(terms: Sequence[_Term], output: Labels) -> Labels:
    """Returns the labels of the result and of the terms that are still to be contracted."""
    return tuple(dict.fromkeys([*output, *(label for term in terms for label in term.labels)]))


def _plain(x: Any) -> Any:
    return x.unpack() if isinstance(x, QTensor) else x


def _diagonal(term: _Term) -> _Term:
    """Takes the diagonal of axes with one label."""
    x, labels = term
    for label in [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        axes = [axis for axis, axis_label in enumerate(labels) if axis_label == label]
        diagonal = np.arange(x.shape[axes[0]], dtype=np.int32)
        parts = [diagonal if axis_label == label else slice(None) for axis_label in labels]
        x = _plain(x)[tuple(parts)]
        # As in NumPy, the new axis is at the first of adjacent axes, else in front.
        new_axis = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
        other_labels = [axis_label for axis_label in labels if axis_label != label]
        labels = (*other_labels[:new_axis], label, *other_labels[new_axis:])
    return _Term(x, labels)


def _without_ones(term: _Term, sizes: dict[Any, int], output: Labels) -> _Term:
    """Drops axes of size 1 that broadcast, or that the result does not have."""
    x, labels = term
    drop = [
        n == 1 and (sizes[label] != 1 or label not in output)
        for n, label in zip(x.shape, labels, strict=True)
    ]
    if not any(drop):
        return term
    index = tuple(0 if dropped else slice(None) for dropped in drop)
    kept_labels = tuple(label for label, dropped in zip(labels, drop, strict=True) if not dropped)
    return _Term(_plain(x)[index], kept_labels)


def _sum_of_own(term: _Term, needed: Labels, how: _How) -> _Term:
    """Sums over the labels that neither another term nor the result has."""
    x, labels = term
    summed = tuple(label for label in labels if label not in needed)
    if not summed:
        return term
    axes = term.axes(summed)
    remaining = tuple(label for label in labels if label not in summed)
    if not isinstance(x, QTensor):
        wide = common_dtype(x.dtype, how.dtype)
        return _Term(jnp.sum(x, axis=axes, dtype=wide).astype(how.dtype), remaining)
    if can_leave_sum(x.groups, axes):
        codes = jnp.ones([x.shape[axis] for axis in axes], jnp.int8)
        unit_scale = jnp.ones((1,) * len(summed), jnp.float32)
        all_ones = QTensor(codes, unit_scale, qtype=jnp.int8, dtype=x.dtype)
        return _contract(_Term(all_ones, summed), term, remaining, how)
    # Floats take the scale: ones for every label along which it varies.
    over = [
        label for label, m in zip(labels, x.scale.shape, strict=True) if m > 1 or label in summed
    ]
    all_ones = jnp.ones([term.size(label) for label in over], x.dtype)
    return _contract(_Term(all_ones, tuple(over)), term, remaining, how)


def _order_of(terms: Sequence[_Term], output: Labels, optimize: Any) -> Sequence[tuple[int, ...]]:
    """Returns pairs of positions in a list: both terms are removed, and the result is appended."""
    if isinstance(optimize, (list, tuple)):
        pairs = [tuple(pair) for pair in optimize]
        if len(terms) == 1 and pairs == [(0,)]:  # jax.numpy.einsum_path of one operand
            return []
        counts = range(len(terms), 1, -1)  # the list gets shorter by one each time
        if len(pairs) != len(counts) or not all(
            len(pair) == 2 and pair[0] != pair[1] and all(i in range(n) for i in pair)
            for pair, n in zip(pairs, counts, strict=True)
        ):
            raise _bad_order(optimize, len(terms))
        return pairs
    if len(terms) <= 2:
        return [(0, 1)] * (len(terms) - 1)
    number = {label: i for i, label in enumerate(_labels(terms, ()))}
    labels = tuple(tuple(number[label] for label in term.labels) for term in terms)
    # A symbolic size, in an exported program, is replaced by some number.
    shapes = tuple(tuple(n if isinstance(n, int) else 8 for n in term.x.shape) for term in terms)
    try:
        return _path(labels, shapes, tuple(number[label] for label in output), optimize)
    except (KeyError, TypeError):
        raise _bad_order(optimize, len(terms)) from None


def _bad_order(optimize: Any, count: int) -> Exception:
    problem = f"`optimize` is not an order of contraction of {count} operands: {optimize!r}."
    fix = "pass the first result of jax.numpy.einsum_path, or a name that it accepts."
    return fail("einsum", problem, fix=fix)


@functools.cache
def _path(labels: Any, shapes: Any, output: Any, optimize: Any) -> Sequence[tuple[int, ...]]:
    """Finds an order from shapes only."""
    interleaved = []
    for shape, term in zip(shapes, labels, strict=True):
        interleaved += [jax.ShapeDtypeStruct(shape, jnp.float32), term]
    return jnp.einsum_path(*interleaved, output, optimize=optimize)[0]


def _contract(lhs: _Term, rhs: _Term, needed: Labels, how: _How) -> _Term:
    """Contracts two terms over the labels that both have and that are not needed later."""
    common = [label for label in lhs.labels if label in rhs.labels]
    batch = [label for label in needed if label in common]
    summed = [label for label in common if label not in needed]
    left = [label for label in lhs.labels if label not in common]
    right = [label for label in rhs.labels if label not in common]
    if (*batch, *right, *left) == needed:  # the order of the result
        lhs, rhs, left, right = rhs, lhs, right, left
    labels = (*batch, *left, *right)
    for x, q in ((lhs, rhs), (rhs, lhs)):
        if _takes_scale_of(x, q, summed):
            return _Term(_contract_folded(x, q, labels, how), labels)
    numbers = ((lhs.axes(summed), rhs.axes(summed)), (lhs.axes(batch), rhs.axes(batch)))
    return _Term(_dot(lhs.x, rhs.x, numbers, how), labels)


def _dot(lhs: Any, rhs: Any, numbers: lax.DotDimensionNumbers, how: _How) -> jax.Array:
    """Contracts two operands, and rounds once to the dtype of the result."""
    dtype = how.dtype
    if not isinstance(lhs, QTensor) and not isinstance(rhs, QTensor):
        if lhs.dtype != rhs.dtype:
            wide = common_dtype(lhs.dtype, rhs.dtype)
            lhs, rhs = lhs.astype(wide), rhs.astype(wide)
        dtype = common_dtype(lhs.dtype, how.dtype)
    y = dot_general(lhs, rhs, numbers, precision=how.precision, preferred_element_type=dtype)
    return y.astype(how.dtype)


def _takes_scale_of(x: _Term, q: _Term, summed: Sequence[Any]) -> bool:
    """Whether a QTensor has scales that cannot leave the sum, but can be multiplied into the array
    that it is contracted with.
    """
    if isinstance(x.x, QTensor) or not isinstance(q.x, QTensor):
        return False
    scaled_labels = [label for label, m in zip(q.labels, q.x.scale.shape, strict=True) if m > 1]
    per_element = [label for label in scaled_labels if not q.x.groups.is_blocked(*q.axes([label]))]
    inside = all(label in x.labels for label in per_element)
    return inside and not can_leave_sum(q.x.groups, q.axes(summed))


def _contract_folded(x: _Term, q: _Term, labels: Labels, how: _How) -> jax.Array:
    """Contracts an array, times the scale of a QTensor, with its codes.

    sum_t x[t] s[t] (q[t] - z[t])  =  sum_t (x[t] s[t]) q[t]  -  sum_t (x[t] s[t]) z[t]

    The array gets an axis for each other axis of the QTensor with scales of blocks.
    """
    check_no_offset_or_order("einsum", q.x, context=", and a scale that varies along a summed axis")
    shape = [(x if label in x.labels else q).size(label) for label in labels]
    q, split = _in_blocks(x, q)
    labels = tuple(part for label in labels for part in split.get(label, (label,)))
    copies = math.prod(q.size(block) for block, _ in split.values())
    if split and is_at_least(copies * x.x.size, q.x.size + 1):
        return _block_by_block(x, q, labels, next(iter(split.values()))[0], how).reshape(shape)
    scale, zero_point = q.x.real_scale(), q.x.zero_point
    wide = common_dtype(x.x.dtype, scale.dtype)
    exact = how._replace(dtype=common_dtype(wide, how.dtype))
    factor = _without_shared(scale, q.labels)
    everywhere = tuple(dict.fromkeys((*x.labels, *factor.labels)))
    aligned = _align(factor, everywhere).astype(wide)
    x = _Term(_align(x, everywhere).astype(wide) * aligned, everywhere)
    unit_scale = jnp.ones((1,) * q.x.ndim, scale.dtype)
    q = _Term(dataclasses.replace(q.x, scale=unit_scale, zero_point=None, blocks=()), q.labels)
    y = _align(_contract(x, q, labels, exact), labels)
    if zero_point is not None:
        zero = _without_shared(zero_point.astype(wide), q.labels)
        x = _sum_of_own(x, (*labels, *zero.labels), exact)
        y = y - _align(_contract(x, zero, labels, exact), labels)
    return y.reshape(shape).astype(how.dtype)


def _block_by_block(x: _Term, q: _Term, labels: Labels, block: Any, how: _How) -> jax.Array:
    """Contracts one block of a QTensor after another, without copies of the array in memory."""
    (axis,) = q.axes([block])
    inner, outer = (
        tuple(label for label in names if label != block) for names in (q.labels, labels)
    )

    def one(i: jax.Array) -> jax.Array:
        return _contract_folded(x, _Term(item_along(q.x, axis, i), inner), outer, how)

    y = lax.map(one, jnp.arange(q.size(block), dtype=jnp.int32))
    return jnp.moveaxis(y, 0, labels.index(block))


def _in_blocks(x: _Term, q: _Term) -> tuple[_Term, dict[Any, Labels]]:
    """Returns a QTensor in which each axis with a scale for each block has an axis of blocks before
    it, and the labels of both by the label of the axis. An axis that the array has too gets a scale
    for each index in place of blocks.
    """
    split: dict[Any, Labels] = {}
    for label in q.labels:
        (axis,) = q.axes([label])
        n, size = q.x.shape[axis], q.x.groups.sizes[axis]
        if not q.x.groups.is_blocked(axis):
            continue
        if label in x.labels:
            q = q._replace(x=refine(q.x, axis))
            continue
        run = math.gcd(n, size)  # of a shorter last block too
        blocked = q.x if run == size else refine(q.x, axis, run)
        blocked = blocked.unpack().reshape(*q.x.shape[:axis], n // run, run, *q.x.shape[axis + 1 :])
        split[label] = ("block of", label), label
        q = _Term(blocked, (*q.labels[:axis], *split[label], *q.labels[axis + 1 :]))
    return q, split


def _without_shared(parameter: jax.Array, labels: Labels) -> _Term:
    """Returns a scale or zero point as a term, without the axes along which it is shared."""
    own_labels = tuple(label for label, m in zip(labels, parameter.shape, strict=True) if m > 1)
    return _Term(parameter.reshape([m for m in parameter.shape if m > 1]), own_labels)


def _align(term: _Term, labels: Labels) -> jax.Array:
    """Orders the axes of an array as `labels`, with size 1 for labels that it does not have."""
    order = [label for label in labels if label in term.labels]
    shape = [term.size(label) if label in order else 1 for label in labels]
    return jnp.transpose(term.x, term.axes(order)).reshape(shape)
