"""The origin of a traced value, which is a weight, or several joined, seen through views, and the
rules of views: how they move the axes of weights, and how they are applied to codes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, Sharding

from .. import compat
from ..checks import is_real
from ..compat import Eqn
from ..contractions.cache import (
    dynamic_slice,
    dynamic_update_slice,
    gathered,
    is_like,
    quantized_like,
    scattered,
    select,
)
from ..errors import fail
from ..gradients.estimators import straight_through
from ..tensor.qtensor import QTensor
from ..tensor.segments import Segments
from ..tensor.shardings import shardings_of
from ..tensor.views import axis_groups

Address = tuple[int, ...]
"""Address of an equation: its index among the contractions and calls of each enclosing jaxpr."""


Marks = frozenset[tuple[int, str]]
"""Axes of a weight, each with the name of a view that has changed it."""


class Loop(NamedTuple):
    """A scan that steps over the leading axis of a weight: its address and its length."""

    address: Address
    length: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """A value that is one weight seen through views, or one joined with others.

    Attributes:
      path: key path of the weight.
      dims: for each axis of the value, the axes of the weight that it holds.
      merged: sets of axes of the weight that a reshape has merged: a scale varies along all or
        none.
      loops: the scans that gave a slice of the weight to each of their steps, outermost first.
      stepped: for each of these scans the axes of the weight that it steps over.
      others: the other weights that are joined with it in the value, each with its own axes.
      moved: the axes of the weight that a view has merged, split, or moved away from the end of the
        shape, each with the name of the view.
      cut: the axes of which a view has taken a part, in any order, or joined parts; each with the
        name of the view.
      cast: the format of less than 16 bits that the function has rounded it to; else empty. What it
        multiplies is listed under its path, but it is not a view.
    """

    path: str
    dims: tuple[frozenset[int], ...]
    merged: frozenset[frozenset[int]] = frozenset()
    loops: tuple[Loop, ...] = ()
    others: tuple["Origin", ...] = ()
    stepped: tuple[frozenset[int], ...] = ()
    moved: Marks = frozenset()
    cut: Marks = frozenset()
    cast: str = ""

    @classmethod
    def of_leaf(cls, path: str, rank: int) -> "Origin":
        """The weight itself."""
        return cls(path, _axes_in_place(rank))

    @classmethod
    def joined(cls, parts: Iterable["Origin | None"]) -> "Origin | None":
        """A value joined from several weights, or several views of one; `None` if anything else is
        part of it, or if scans step over only some of them.
        """
        parts_by_source: dict[Origin, Origin] = {}
        for joined in parts:
            if joined is None:
                return None
            for part in joined.parts:
                bare = part.with_marks()
                twin = parts_by_source.setdefault(bare, part)
                parts_by_source[bare] = twin.with_marks(
                    twin.moved | part.moved, twin.cut | part.cut
                )
        if not parts_by_source or len({part.loops for part in parts_by_source}) > 1:
            return None
        first_part, *parts_after = parts_by_source.values()
        return (
            dataclasses.replace(first_part, others=tuple(parts_after))
            if parts_after
            else first_part
        )

    @property
    def parts(self) -> tuple["Origin", ...]:
        """The weights joined in the value, each as a separate origin."""
        return (dataclasses.replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def is_view(self) -> bool:
        """Whether the value is a view of all of them."""
        return not any(part.cast for part in self.parts)

    @property
    def name(self) -> str:
        """The paths of these weights."""
        return "+".join(dict.fromkeys(part.path for part in self.parts))

    def through(self, view: Callable[["Origin"], "Origin | None"]) -> "Origin | None":
        """The origin of a view of all of them together."""
        return Origin.joined(map(view, self.parts)) if self.others else view(self)

    def with_marks(self, moved: Marks = frozenset(), cut: Marks = frozenset()) -> "Origin":
        """The same value with other marks of views."""
        if (moved, cut) == (self.moved, self.cut):
            return self
        return dataclasses.replace(self, moved=moved, cut=cut)

    def with_dims(self, dims: Iterable[frozenset[int]]) -> "Origin":
        """The same weight with its axes moved."""
        return dataclasses.replace(self, dims=tuple(dims))

    def step_of(self, loop: Loop) -> "Origin | None":
        """The origin of the value in one step of a scan over the leading axis."""

        def step(part: "Origin") -> "Origin":
            return dataclasses.replace(
                part,
                dims=part.dims[1:],
                loops=(*part.loops, loop),
                stepped=(*part.stepped, part.dims[0]),
            )

        return self.through(step)

    def kept(self, dims: Iterable[int], rank: int) -> frozenset[int]:
        """Returns the axes of the weight that are only in the axes `dims` of the value."""
        dims = set(dims)
        dropped = set().union(*(axes for dim, axes in enumerate(self.dims) if dim not in dims))
        return close_over_merges(frozenset(range(rank)) - dropped, self.merged)


@functools.cache
def _axes_in_place(rank: int) -> tuple[frozenset[int], ...]:
    """Returns the axes of a value that is a weight itself."""
    return tuple(frozenset({axis}) for axis in range(rank))


def close_over_merges(
    kept_axes: frozenset[int], merged: Iterable[frozenset[int]]
) -> frozenset[int]:
    """Drops every merged set of axes that is not kept as a whole."""
    merged = tuple(merged)
    while True:
        broken = frozenset().union(*(group for group in merged if not group <= kept_axes))
        if not broken & kept_axes:
            return kept_axes
        kept_axes = kept_axes - broken


# How the transforms handle a primitive through which weights pass quantized.


Origins = Sequence[Origin | None]


@dataclasses.dataclass(frozen=True)
class View:
    """How a view primitive treats weights among its operands.

    Attributes:
      track: maps the origins of the operands to those of the results; `None` for a result that is
        no longer a weight.
      apply: maps operands, of which those that are tracked may be QTensors, to the results.
    """

    track: Callable[[Eqn, Origins], Origins]
    apply: Callable[[Eqn, Sequence[Any]], list[Any]]


def marked(eqn: Eqn, origins: Origins, results: Origins, *, is_known: bool = True) -> Origins:
    """Returns the origins of the results of a view, with the axes of weights that it moves and of
    which it takes parts. A view that is not known moves all of them.
    """
    is_pairwise = len(results) == len(origins) > 1
    marked_results = []
    for i, (result, atom) in enumerate(zip(results, eqn.outvars, strict=True)):
        if result is not None:
            indices = [i] if is_pairwise else range(len(origins))
            sources = [
                (origins[j], eqn.invars[j].aval.shape) for j in indices if origins[j] is not None
            ]
            for source, shape in sources:
                shapes = shape, atom.aval.shape if is_known else None
                result = _marked_by(eqn, source, result, *shapes)
        marked_results.append(result)
    return marked_results


def _marked_by(
    eqn: Eqn, source: Any, result: Origin, old: Sequence[int], new: Sequence[int] | None
) -> Origin:
    """Returns the origin of a result, with what the view did to the weights of one operand."""
    name = eqn.primitive.name
    turned = eqn.params["dimensions"] if name == "rev" else ()
    old_dims = {part.path: part.dims for part in source.parts}

    def mark(part: Origin) -> Origin:
        dims = old_dims.get(part.path)
        if dims is None or (dims == part.dims and not turned and old == new):
            return part
        if new is None:
            all_axes = frozenset().union(*dims)
            return part.with_marks(part.moved | {(axis, name) for axis in all_axes}, part.cut)
        moved: set[int] = set()
        cut: set[int] = set()
        for axis, (axes, n) in enumerate(zip(dims, old, strict=True)):
            positions = [i for i, dim in enumerate(part.dims) if dim & axes]
            if len(positions) == 1 and part.dims[positions[0]] == axes:
                cut |= axes if new[positions[0]] != n or axis in turned else set()
            elif n != 1:
                moved |= axes
        last_dims = dims[-2:]
        if {*last_dims} != {*part.dims[-2:]}:
            moved |= frozenset().union(*last_dims)
        return part.with_marks(
            part.moved | {(axis, name) for axis in moved}, part.cut | {(axis, name) for axis in cut}
        )

    parts = [mark(part) for part in result.parts]
    return dataclasses.replace(parts[0], others=tuple(parts[1:])) if parts[1:] else parts[0]


def of_one(
    track: Callable[[Eqn, int, Origin], Origin | None],
    apply: Callable[[Eqn, int, Sequence[Any]], Any],
) -> View:
    """Returns a view of the one operand that is a weight; both rules get its position. All results
    show the same axes.
    """

    def track_one(eqn: Eqn, origins: Origins) -> Origins:
        count, positions = len(eqn.outvars), _positions(origins)
        if len(positions) != 1:
            return [None] * count
        (index,) = positions
        origin = origins[index]
        assert origin is not None
        return [origin.through(lambda part: track(eqn, index, part))] * count

    def apply_one(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        (index,) = _positions([x if isinstance(x, QTensor) else None for x in operands])
        results = apply(eqn, index, operands)
        return results if isinstance(results, list) else [results]

    return View(track_one, apply_one)


def _positions(origins: Sequence[Any]) -> list[int]:
    return [i for i, origin in enumerate(origins) if origin is not None]


def starts_of(starts: Sequence[Any]) -> list[Any]:
    """Returns the starts of a dynamic slice for jqx: the primitive clamps a negative start to 0,
    but in `jqx.dynamic_slice` it counts from the end.
    """
    static = (int, np.integer, np.ndarray)
    return [max(int(x), 0) if isinstance(x, static) else jnp.maximum(x, 0) for x in starts]


def same(eqn: Eqn, position: int, origin: Origin) -> Origin:
    """Returns the origin unchanged, because the axes of the weight stay in place."""
    return origin


# Views that set the sharding of an array; they apply to every array of a QTensor.


def sharded_as(weight: Any, sharding: Sharding) -> Any:
    """Returns a weight with the sharding of each of its arrays in its place."""
    return map_codes(partial(_sharded_as, sharding=sharding), weight, sharding)


def _sharded_as(q: QTensor, sharding: Sharding) -> Any:
    if isinstance(sharding, NamedSharding):
        return shardings_of("jit", q, sharding)
    if not sharding.is_fully_replicated:
        problem = "the sharding of a quantized weight does not name mesh axes."
        fix = "shard it with a mesh and a PartitionSpec, or outside of f."
        details = f"{sharding} for {q!r}"
        raise fail("jit", problem, given=details, fix=fix, error=NotImplementedError)
    return jax.tree.map(lambda _: sharding, q)


def _apply_pvary(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    return compat.vary(operands[0], frozenset(eqn.params["axes"]))


def _apply_constraint(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    (q,) = operands
    return lax.with_sharding_constraint(q, sharded_as(q, eqn.params["sharding"]))


def _apply_reshard(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    (q,) = operands
    return jax.sharding.reshard(q, sharded_as(q, eqn.params["dst_sharding"]))


def _track_put(eqn: Eqn, origins: Origins) -> Origins:
    anywhere = not any(eqn.params["devices"])
    return origins if anywhere else [None] * len(origins)


SHARDINGS: dict[str, View] = {
    "device_put": View(_track_put, lambda eqn, operands: list(operands)),
    "pvary": of_one(same, _apply_pvary),
    "reshard": of_one(same, _apply_reshard),
    "sharding_constraint": of_one(same, _apply_constraint),
}


# View primitives: a weight passes through them quantized, together with its scale.


def _identity(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[position]


def _track_transpose(eqn: Eqn, position: int, origin: Origin) -> Origin:
    return origin.with_dims(origin.dims[axis] for axis in eqn.params["permutation"])


def _apply_transpose(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].transpose(eqn.params["permutation"])


def _track_reshape(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    order = _read_order(eqn)
    old_dims = [origin.dims[axis] for axis in order]
    dims: list[frozenset[int]] = [frozenset()] * len(new)
    merged = set(origin.merged)
    for sources, targets in axis_groups([old[axis] for axis in order], new):
        axes = frozenset().union(*(old_dims[i] for i in sources))
        for j in targets:
            dims[j] = axes
        if len(axes) > 1:
            merged.add(axes)
    return dataclasses.replace(origin, dims=tuple(dims), merged=frozenset(merged))


def _read_order(eqn: Eqn) -> Sequence[int]:
    """Returns the order in which a reshape reads the axes, which `vmap` may have transposed."""
    dimensions = eqn.params["dimensions"]
    return range(eqn.invars[0].aval.ndim) if dimensions is None else dimensions


def _apply_reshape(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].transpose(_read_order(eqn)).reshape(eqn.outvars[0].aval.shape)


def _track_squeeze(eqn: Eqn, position: int, origin: Origin) -> Origin:
    gone = eqn.params["dimensions"]
    return origin.with_dims(axes for axis, axes in enumerate(origin.dims) if axis not in gone)


def _apply_squeeze(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].reshape(eqn.outvars[0].aval.shape)


def _track_broadcast(eqn: Eqn, position: int, origin: Origin) -> Origin:
    dims: list[frozenset[int]] = [frozenset()] * len(eqn.params["shape"])
    for axis, target in enumerate(eqn.params["broadcast_dimensions"]):
        dims[target] = origin.dims[axis]
    return origin.with_dims(dims)


def _apply_broadcast(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q, shape, axes = operands[0], eqn.params["shape"], eqn.params["broadcast_dimensions"]
    lined_up = [1] * len(shape)
    for axis, target in enumerate(axes):
        lined_up[target] = q.shape[axis]
    return q.reshape(lined_up).broadcast_to(shape)


def _apply_slice(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    parts = list(zip(start, limit, strides, strict=True))
    wholes = [(0, n, 1) for n in eqn.invars[0].aval.shape]  # sizes may be symbolic
    pairs = zip(parts, wholes, strict=True)
    return operands[0][tuple(slice(None) if a == b else slice(*a) for a, b in pairs)]


def _track_dynamic_slice(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return origin if position == 0 else None


def _apply_dynamic_slice(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    q, *starts = operands
    return dynamic_slice(q, starts_of(starts), eqn.params["slice_sizes"])


def _track_convert(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    old, new = eqn.invars[position].aval.dtype, eqn.params["new_dtype"]
    if not jnp.issubdtype(new, jnp.floating):
        return None
    rounds = is_real(old) and not is_real(new)
    return dataclasses.replace(origin, cast=jnp.dtype(new).name) if rounds else origin


def _apply_convert(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].astype(eqn.params["new_dtype"])


def _track_mul(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return origin if eqn.invars[1 - position].aval.ndim == 0 else None


def _apply_mul(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q, factor = operands[position], operands[1 - position]
    return q.scaled(factor)


def _track_div(eqn: Eqn, position: int, origin: Origin) -> Origin | None:
    return _track_mul(eqn, position, origin) if position == 0 else None


def _apply_div(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q, divisor = operands
    return q.map_scale(lambda scale: scale / jnp.asarray(divisor, scale.dtype))


def _apply_neg(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    return operands[0].scaled(-1)


def _apply_rev(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    flipped = eqn.params["dimensions"]
    q = operands[0]
    return q[tuple(slice(None, None, -1 if axis in flipped else 1) for axis in range(q.ndim))]


def _apply_split(eqn: Eqn, position: int, operands: Sequence[Any]) -> list[QTensor]:
    ends = [int(end) for end in itertools.accumulate(eqn.params["sizes"])]
    return operands[0].split(ends[:-1], eqn.params["axis"])


def _track_unstack(eqn: Eqn, position: int, origin: Origin) -> Origin:
    gone = eqn.params["axis"]
    return origin.with_dims(axes for axis, axes in enumerate(origin.dims) if axis != gone)


def _apply_unstack(eqn: Eqn, position: int, operands: Sequence[Any]) -> list[QTensor]:
    q, lead = operands[0], (slice(None),) * eqn.params["axis"]
    return [q[(*lead, i)] for i in range(len(eqn.outvars))]


def _apply_tile(eqn: Eqn, position: int, operands: Sequence[Any]) -> QTensor:
    q = operands[0]
    for axis, repeats in enumerate(eqn.params["reps"]):
        q = QTensor.concatenate([q] * repeats, axis) if repeats != 1 else q
    return q


def _track_concatenate(eqn: Eqn, origins: Origins) -> Origins:
    return [Origin.joined(origins)]


def _apply_concatenate(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    return [QTensor.concatenate(operands, eqn.params["dimension"])]


def _track_stack(eqn: Eqn, origins: Origins) -> Origins:
    origin, axis = Origin.joined(origins), eqn.params["axis"]
    if origin is None:
        return [None]
    new: frozenset[int] = frozenset()
    return [origin.through(lambda x: x.with_dims((*x.dims[:axis], new, *x.dims[axis:])))]


def _apply_stack(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    return [QTensor.stack(operands, eqn.params["axis"])]


_UNCHANGED = of_one(same, _identity)
_EACH = View(lambda eqn, origins: origins, lambda eqn, operands: list(operands))
"""A view with as many results as operands, each unchanged."""

VIEW_RULES: dict[str, View] = {
    "broadcast_in_dim": of_one(_track_broadcast, _apply_broadcast),
    "concatenate": View(_track_concatenate, _apply_concatenate),
    "convert_element_type": of_one(_track_convert, _apply_convert),
    "copy": _UNCHANGED,
    "div": of_one(_track_div, _apply_div),
    "dynamic_slice": of_one(_track_dynamic_slice, _apply_dynamic_slice),
    "layout_constraint": _UNCHANGED,
    "mul": of_one(_track_mul, _apply_mul),
    "name": _UNCHANGED,
    "neg": of_one(same, _apply_neg),
    "optimization_barrier": _EACH,
    "reshape": of_one(_track_reshape, _apply_reshape),
    "rev": of_one(same, _apply_rev),
    "slice": of_one(same, _apply_slice),
    "split": of_one(same, _apply_split),
    "squeeze": of_one(_track_squeeze, _apply_squeeze),
    "stack": View(_track_stack, _apply_stack),
    "stop_gradient": _UNCHANGED,
    "tile": of_one(same, _apply_tile),
    "transpose": of_one(_track_transpose, _apply_transpose),
    "unstack": of_one(_track_unstack, _apply_unstack),
    "xla_metadata_value": _UNCHANGED,
    **SHARDINGS,
}


# Writes to quantized arrays, and reads at any positions. Written values are quantized to the
# format of the target, and values that are read keep their format.
#
# Weights do not pass through: a plan treats the target of a write as an array.


Update = Callable[[Eqn, Sequence[Any]], Any]
"""Maps operands, some of them QTensors, to the result; `None` if there is no quantized form."""


def _dynamic_update_slice(eqn: Eqn, operands: Sequence[Any]) -> Any:
    target, update, *starts = operands
    if not isinstance(target, QTensor):
        return None
    return dynamic_update_slice(target, update, starts_of(starts))


def _select(eqn: Eqn, operands: Sequence[Any]) -> Any:
    which, *cases = operands
    return None if isinstance(which, QTensor) else select(which, *cases)


_INDEXED = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def _scatter(eqn: Eqn, operands: Sequence[Any]) -> Any:
    target, *others = operands
    plain = isinstance(target, QTensor) and not any(isinstance(x, QTensor) for x in others)
    return scattered(*operands, **{name: eqn.params[name] for name in _INDEXED}) if plain else None


def _gather(eqn: Eqn, operands: Sequence[Any]) -> Any:
    options = {name: eqn.params[name] for name in (*_INDEXED, "slice_sizes", "fill_value")}
    table, indices = operands
    return gathered(table, indices, **options) if isinstance(table, QTensor) else None


UPDATES: dict[str, Update] = {
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "select_n": _select,
}


# The forms of an operand while a function is evaluated: codes, with or without float values. Codes
# are those of a weight of the plan, or quantized state: a QTensor that the caller passed.


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "real"), meta_fields=("is_state",))
@dataclasses.dataclass(frozen=True)
class Trainable:
    """A quantized array in training.

    Attributes:
      codes: the operand of contractions on integers.
      real: the dequantized values, through which gradients pass.
      is_state: whether the caller passed codes, and receives codes if it is a result.
    """

    codes: QTensor
    real: jax.Array
    is_state: bool = False

    @classmethod
    def state(cls, q: QTensor) -> "Trainable":
        """Quantized state that the caller passed."""
        return cls(q, q.dequantize(), is_state=True)


def is_coded(x: Any) -> bool:
    """Whether a value represents an array without being one: it is quantized, or in parts."""
    return isinstance(x, (QTensor, Trainable, Segments))


def codes_of(x: Any) -> Any:
    """Returns the codes of a quantized array; arrays are unchanged."""
    return x.codes if isinstance(x, Trainable) else x


def real_of(x: Any) -> Any:
    """Returns the dequantized values of a quantized array; other values are unchanged."""
    if isinstance(x, QTensor):
        return x.dequantize()
    return x.real if isinstance(x, Trainable) else x


def map_codes(f: Callable[[QTensor], Any], x: Any, real: Any = None) -> Any:
    """Applies `f` to the codes of a quantized array. Its float values, if any, stay, or are
    replaced by `real`.
    """
    if not isinstance(x, Trainable):
        return f(x)
    return dataclasses.replace(x, codes=f(x.codes), real=x.real if real is None else real)


def with_codes(codes: Any, real: Callable[[], jax.Array], operands: Any) -> Any:
    """Returns the result of an operation on operands: only its codes, or, if an operand has float
    values with its codes, both. `real` computes the result in float, and gives the gradient.
    """
    trainable = [x for x in operands if isinstance(x, Trainable)]
    if not trainable or not isinstance(codes, QTensor):
        return codes
    is_state = any(x.is_state for x in trainable)
    return Trainable(codes, straight_through(codes.dequantize(), real()), is_state)


def as_like(x: Any, example: Any, dense: Callable[[Any], jax.Array]) -> Any:
    """Returns a value in the form of another: an array made by `dense`, or quantized to the format
    of the other.
    """
    if not is_coded(example):
        return dense(x) if is_coded(x) else x
    if type(x) is type(example) and is_like(codes_of(x), codes_of(example)):
        return dataclasses.replace(x, is_state=example.is_state) if isinstance(x, Trainable) else x
    real = dense(x) if is_coded(x) else x
    return with_codes(quantized_like(codes_of(example), real), lambda: real, [example])
