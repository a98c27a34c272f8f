"""The grids that weights are rounded to, and the codes on them: one code for each element, no
floats.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import whole_of
from ..calibrators import Affine, Calibrator
from ..numerics._shared import E8M0
from ..ops._shared import affine_dequantize, affine_quantize
from ..tensor import QSpec, QTensor
from ..transforms import Plan, Weight
from ..transforms._shared import quantize_weight, renumbered

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that some site multiplies by after concatenation; in most cases a single one.

    Attributes:
      weights: in the order of the plan.
      sizes: number of elements of each, by path.
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
        """Returns numbers of elements of some of the weights as numbers within the group."""
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


@dataclasses.dataclass(frozen=True)
class Part:
    """One weight of a group.

    Attributes:
      path: its path among the parameters.
      x: its values, in float.
      nearest: its QTensor as rounded to nearest, with shapes in place of codes and scales.
      scale: its scales, if they are quantized themselves; they do not change.
      start: the number of its first element within the group.
      first: the index of its first scale, likewise.
    """

    path: str
    x: Any
    nearest: QTensor
    scale: QTensor | None
    start: int
    first: int

    @property
    def elements(self) -> slice:
        """Its elements within the group."""
        return slice(self.start, self.start + math.prod(self.nearest.shape))

    @property
    def scales(self) -> slice:
        """Its scales within the group."""
        return slice(self.first, self.first + math.prod(self.nearest.groups.scale_shape))

    @property
    def sizes(self) -> Array:
        """The number of elements of each scale."""
        groups, found = self.nearest.groups, np.ones(1, int)
        for count, size, scales in zip(groups.shape, groups.sizes, groups.scale_shape, strict=True):
            own = np.full(scales, size)
            own[-1:] = count - size * (scales - 1)
            found = np.multiply.outer(found, own).ravel()
        return found

    def label(self, places: Array) -> Array:
        """Returns the index of the scale of each element."""
        groups, rest = self.nearest.groups, places - self.start
        found, stride = np.full(places.shape, self.first, np.int32), 1
        for count, size, scales in reversed(
            list(zip(self.nearest.shape, groups.sizes, groups.scale_shape, strict=True))
        ):
            rest, at = np.divmod(rest, count)
            if scales > 1:
                found += stride * (at // size)
            stride *= scales
        return found


@dataclasses.dataclass
class Grids:
    """Scales, zero points and codes of a group of weights, in NumPy, concatenated.

    Attributes:
      spec: how values are rounded; the same for all weights of the group.
      parts: the weights.
      codes: code of each element, flat; from rounding to nearest until others are chosen.
      scale: scale of each group of elements, flat, dequantized.
      zero_point: likewise, or `None`.
    """

    spec: QSpec
    parts: tuple[Part, ...]
    codes: Array
    scale: Array
    zero_point: Array | None

    @classmethod
    def of(cls, leaves: Mapping[str, Any], specs: Mapping[str, QSpec]) -> "Grids":
        """Computes the scales of weights, each by the calibrator of its spec."""
        parts, found = [], []
        start = first = 0
        for path, spec in specs.items():
            q = quantize_weight(x := leaves[path], spec)
            kind = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), q)
            scale = q.scale if isinstance(q.scale, QTensor) else None
            parts.append(Part(path, x, kind, scale, start, first))
            real = np.asarray(q.real_scale().astype(np.float32)).ravel()
            zero_point = None if q.zero_point is None else np.asarray(q.zero_point).ravel()
            found.append((np.asarray(q.codes).ravel(), real, zero_point))
            start, first = start + q.size, first + real.size
        codes, scales, zero_points = zip(*found, strict=True)
        zero_point = None if zero_points[0] is None else np.concatenate(zero_points)
        first_spec, *_ = specs.values()
        joined = np.concatenate(codes), np.concatenate(scales), zero_point
        return cls(first_spec, tuple(parts), *joined)

    @classmethod
    def of_group(
        cls, group: Group, leaves: Mapping[str, Any], spec_of: Callable[[QSpec], QSpec]
    ) -> "Grids":
        """Returns the grids of the weights of a group."""
        return cls.of(leaves, {x.path: spec_of(x.spec) for x in group.weights})

    def _each(self, places: Array) -> Iterator[tuple[Part, Any]]:
        """Yields the part of some elements that belongs to each weight."""
        for part in self.parts:
            if len(self.parts) == 1:
                yield part, ...
                return
            own = part.elements
            mine = (places >= own.start) & (places < own.stop)
            if mine.any():
                yield part, mine

    def label(self, places: Array) -> Array:
        """Returns the index of the scale of each of some elements."""
        found = np.empty(places.shape, np.int32)
        for part, mine in self._each(places):
            found[mine] = part.label(places[mine])
        return found

    def floats(self, places: Array) -> Array:
        """Returns the values of some elements before rounding, float32."""
        found = np.empty(places.shape, np.float32)
        for part, mine in self._each(places):
            found[mine] = _taken(part.x, places[mine] - np.int32(part.start))
        return found

    @functools.cached_property
    def sizes(self) -> Array:
        """The number of elements of each scale."""
        return np.concatenate([part.sizes for part in self.parts])

    @property
    def is_plain(self) -> bool:
        """Whether scales are not quantized themselves."""
        return all(part.scale is None for part in self.parts)

    @property
    def has_floats(self) -> bool:
        """Whether scales are floats, and not quantized themselves."""
        return self.is_plain and self.parts[0].nearest.scale.dtype != E8M0

    def at(self, label: Array) -> tuple[Array, Array | None]:
        """Returns scales and zero points of elements by the index of their scale."""
        return self.scale[label], None if self.zero_point is None else self.zero_point[label]

    def put(self, label: Array, affine: Affine) -> None:
        """Writes scales and zero points by their index."""
        self.scale[label] = np.asarray(affine.scale.astype(np.float32))
        if self.zero_point is not None:
            self.zero_point[label] = np.asarray(affine.zero_point)

    def put_scales(self, label: Array, scale: Array) -> None:
        """Writes scales by their index, rounded to their dtype."""
        kind = self.parts[0].nearest.scale.dtype
        self.scale[label] = scale.astype(kind).astype(np.float32)

    def write(self, places: Array, values: Array) -> None:
        """Writes the codes of values that are on the grids."""
        spec = self.spec
        self.codes[places] = affine_quantize(
            values,
            *self._scales(places),
            qtype=spec.qtype,
            round_mode=spec.rounding,
            numerics=spec.numerics,
        )

    def values(self, places: Array) -> Array:
        """Returns the dequantized values of some elements, float32."""
        codes, scales = self.codes[places], self._scales(places)
        found = affine_dequantize(codes, *scales, qtype=self.spec.qtype, dtype=np.float32)
        return np.asarray(found)

    def _scales(self, places: Array) -> Any:
        scale, zero_point = self.at(self.label(places))
        kind = self.parts[0].nearest.scale
        return scale.astype(E8M0) if kind.dtype == E8M0 else scale, zero_point

    def quantized(self) -> dict[str, QTensor]:
        """Returns the QTensor of each weight, by path."""
        found = {}
        for part in self.parts:
            kind, scale, zero_point = part.nearest, part.scale, self.zero_point
            if scale is None:
                scale = _like(self.scale[part.scales], kind.scale)
            if zero_point is not None:
                zero_point = _like(zero_point[part.scales], kind.zero_point)
            codes = _like(self.codes[part.elements], kind.values)
            parts = {"values": codes, "scale": scale, "zero_point": zero_point}
            found[part.path] = dataclasses.replace(kind, **parts)
        return found


def calibrated(spec: QSpec, calibrator: Calibrator | None) -> QSpec:
    """Returns a spec with another calibrator, if one is given."""
    return spec if calibrator is None else dataclasses.replace(spec, calibrator=calibrator)


def _like(x: Array, kind: Any) -> jax.Array:
    """Returns flat entries in a shape, of a dtype."""
    return jnp.asarray(x.reshape(kind.shape).astype(kind.dtype))


@jax.jit
def _taken(x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns elements of an array by their numbers, float32."""
    return whole_of(lambda x, places: x.ravel()[places].astype(np.float32), x, places)
