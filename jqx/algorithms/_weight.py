"""A weight as the matrices that sites multiply by, each with the Hessian of its inputs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import message
from ..calibrators import Affine
from ..observers import hessian, places
from ..tensor import QSpec, QTensor
from ..transforms import Plan
from ..transforms._shared import Site, Weight, quantize_weight, renumbered
from ._factor import objective
from ._report import name_of

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that are joined where some site multiplies by them; most often one.

    Attributes:
      weights: in the order of the plan.
      sizes: how many elements each has, by path.
    """

    weights: tuple[Weight, ...]
    sizes: Mapping[str, int]

    @property
    def whole(self) -> Weight:
        """All of them as one."""
        first = self.weights[0]
        return first if len(self.weights) == 1 else dataclasses.replace(first, path=self.path)

    @property
    def path(self) -> str:
        """Their paths."""
        return "+".join(self.sizes)

    def numbers(self, paths: Sequence[str], elements: Array) -> Array:
        """Returns numbers of elements of some of the weights as they are among all of them."""
        if [*paths] == [*self.sizes]:
            return elements
        return renumbered(elements, {path: self.sizes[path] for path in paths}, self.sizes)

    @classmethod
    def of_plan(cls, plan: Plan, sizes: Mapping[str, int]) -> "list[Group]":
        """Returns the weights of a plan in groups."""
        groups = [{weight.path} for weight in plan.weights]
        for site in plan.sites:
            own = set(plan.weights_in(site))
            joined = [group for group in groups if group & own]
            if len(joined) > 1:
                groups = [x for x in groups if not x & own] + [set().union(*joined)]
        found = []
        for group in groups:
            weights = tuple(x for x in plan.weights if x.path in group)
            found.append(cls(weights, {x.path: sizes[x.path] for x in weights}))
        return found


@dataclasses.dataclass
class Grids:
    """A weight and the grids that it is rounded to, in NumPy.

    Attributes:
      values: the weight, float32, flat; algorithms write to it what stands on the grid.
      label: for each element the index of its scale, flat.
      scale: of each group, flat, as real numbers.
      zero_point: likewise, or `None`.
      nearest: the weight rounded to nearest.
    """

    values: Array
    label: Array
    scale: Array
    zero_point: Array | None
    nearest: QTensor

    @classmethod
    def of(cls, x: Any, spec: QSpec) -> "Grids":
        """Finds the scales of a weight by the calibrator of a spec."""
        q = quantize_weight(x, spec)
        zero_point = None if q.zero_point is None else np.array(q.zero_point).ravel()
        label = np.zeros(q.shape, np.int32)
        stride = 1
        for axis in reversed(range(q.ndim)):
            size = q.groups.sizes[axis]
            own = np.arange(q.shape[axis], dtype=np.int32) // max(size, 1)
            label += stride * own.reshape([-1 if i == axis else 1 for i in range(q.ndim)])
            stride *= q.groups.scale_shape[axis]
        values = np.array(x, np.float32).ravel()
        scale = np.array(q.real_scale().astype(np.float32)).ravel()
        return cls(values, label.ravel(), scale, zero_point, q)

    @functools.cached_property
    def sizes(self) -> Array:
        """How many elements have each scale."""
        return np.bincount(self.label, minlength=len(self.scale))

    def at(self, label: Array) -> tuple[Array, Array | None]:
        """Returns scales and zero points of elements by the index of their scale."""
        return self.scale[label], None if self.zero_point is None else self.zero_point[label]

    def put(self, label: Array, affine: Affine) -> None:
        """Writes scales and zero points by their index."""
        self.scale[label] = np.asarray(affine.scale.astype(np.float32))
        if self.zero_point is not None:
            self.zero_point[label] = np.asarray(affine.zero_point)

    @classmethod
    def of_group(
        cls, group: Group, leaves: Mapping[str, Any], spec_of: Callable[[QSpec], QSpec]
    ) -> "tuple[Grids, dict[str, Grids]]":
        """Returns the grids of weights as if they were one, and those of each, which sees what is
        written to them.
        """
        parts = {x.path: cls.of(leaves[x.path], spec_of(x.spec)) for x in group.weights}
        first, *rest = parts.values()
        if not rest:
            return first, parts
        label, start = [], 0
        for part in parts.values():
            label.append(part.label + np.int32(start))
            start += len(part.scale)
        zero_point = None
        if first.zero_point is not None:
            zero_point = _concatenated(parts, "zero_point")
        values, scale = _concatenated(parts, "values"), _concatenated(parts, "scale")
        return cls(values, np.concatenate(label), scale, zero_point, first.nearest), parts

    def quantized(self, spec: QSpec) -> QTensor:
        """Returns the QTensor of the values, which stand on the grids."""
        q, given = self.nearest, self.nearest.scale
        if not isinstance(given, QTensor):
            given = self.scale.reshape(given.shape).astype(given.dtype)
        zero_point = self.zero_point
        if zero_point is not None:
            zero_point = zero_point.reshape(q.zero_point.shape)  # pyright: ignore
        values = self.values.reshape(q.shape)  # a value of 16 bits might round to another code
        return quantize_weight(values, spec, Affine(given, zero_point)).astype(q.dtype)  # pyright: ignore


def _concatenated(parts: Mapping[str, Grids], field: str) -> Array:
    """Joins an array of several grids, of which theirs become parts."""
    whole, start = np.concatenate([getattr(x, field) for x in parts.values()]), 0
    for part in parts.values():
        stop = start + len(getattr(part, field))
        setattr(part, field, whole[start:stop])
        start = stop
    return whole


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix that sites multiply by, and what was observed of its inputs.

    Attributes:
      sites: their names.
      step: the number of the step in each scan over the weight around the site, such as a layer.
      at: which of several matrices that are multiplied by at once, such as an expert or a group of
        a convolution; `()` where there is one.
      places: for each entry the element of the weight that it is, [rows, columns].
      hessian: sum of `x x^T` of the inputs, float64 [columns, columns].
      rows: how many inputs were seen.
      drift: how the inputs differ from those of the float function, where that is known.
    """

    sites: tuple[str, ...]
    step: tuple[int, ...]
    at: tuple[int, ...]
    places: Array
    hessian: Array
    rows: int
    drift: "Drift | None" = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return name_of(self.sites, (*self.step, *self.at))

    def loss(self, w: Array, rounded: Array) -> Array:
        """Returns the squared error of each row of the result, summed over the inputs: of `rounded`
        on the inputs as they are, against `w` on those of the float function.
        """
        lost = w - rounded
        error = objective(lost, self.hessian)
        if self.drift is None:
            return error
        mixed = np.einsum("nk,nk->n", w @ self.drift.cross, lost)
        return error + 2 * mixed + objective(w, self.drift.own)


class Drift(NamedTuple):
    """How inputs differ from those of the float function, `d = float - quantized`.

    Attributes:
      cross: sum of `d x^T`, `x` the quantized ones, float64 [columns, columns].
      own: sum of `d d^T`.
    """

    cross: Array
    own: Array


def matrices_of(function: str, plan: Plan, group: Group, stats: Mapping[str, Any]) -> list[Matrix]:
    """Returns the matrices of weights: of sites that multiply by the same elements one, with the
    sum of their Hessians.
    """
    found: dict[bytes, Matrix] = {}
    for site in plan.sites:
        mine = [x for x in site.operands if x.path in group.sizes]
        if not mine:
            continue
        others = [x for x in site.operands if x.path is None]
        known = stats.get(f"{mine[0].key}@{places}")
        seen = stats.get(f"{others[0].key}@{hessian}") if others else None
        if known is None or seen is None:
            raise _refusal(function, site)
        products = np.asarray(seen.products)
        elements = group.numbers(plan.weights_in(site), np.asarray(known))
        counts = np.broadcast_to(np.asarray(seen.rows), products.shape[:-2])
        for step in np.ndindex(elements.shape[:-2]):
            own, gram = np.ascontiguousarray(elements[step]), products[step].astype(np.float64)
            depth = len(site.loops)
            new = Matrix((site.name,), step[:depth], step[depth:], own, gram, int(counts[step]))
            old = found.get(own.tobytes())
            if old is not None:
                new = dataclasses.replace(
                    old,
                    sites=tuple(dict.fromkeys((*old.sites, *new.sites))),
                    hessian=old.hessian + new.hessian,
                    rows=old.rows + new.rows,
                )
            found[own.tobytes()] = new
    _check_apart(function, group.path, list(found.values()))
    return list(found.values())


def stacked(matrices: Sequence[Matrix]) -> Array:
    """Returns the places of matrices of one shape, [matrices, rows, columns]."""
    return np.stack([matrix.places for matrix in matrices])


def alike_of(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Returns matrices by shape."""
    found: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(matrix.places.shape, []).append(matrix)
    return list(found.values())


def _refusal(function: str, site: Site) -> NotImplementedError:
    return NotImplementedError(
        message(
            function,
            f"nothing is known of the inputs of {site.name!r}.",
            given=f"the weight {site.path!r} in a {site.op}",
            expected="a product of an activation and a weight, each element of which stands at a "
            "known place, not inside of a shard_map; statistics of jqx.observers.hessian and "
            "jqx.observers.places",
            mend="pass the statistics of calibrate_batches(..., observers=algorithm.observers); in "
            "the place of a shard_map, jit over sharded arrays while codes are chosen; or let a "
            "rule leave that site in float.",
        )
    )


def _check_apart(function: str, path: str, matrices: list[Matrix]) -> None:
    """Raises where two matrices have some elements in common."""
    elements = np.concatenate([matrix.places.ravel() for matrix in matrices])
    if len(np.unique(elements)) == len(elements):
        return
    raise NotImplementedError(
        message(
            function,
            f"sites multiply by the weight {path!r} in different ways.",
            given=", ".join(matrix.name for matrix in matrices[:4]),
            expected="sites that contract the same axes of it, or have no element in common",
            mend="give it a rule of its own that leaves it in float.",
        )
    )
