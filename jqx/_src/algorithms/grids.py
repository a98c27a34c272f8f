"""The grids that weights are rounded to, and the codes on them: one code for each element, no
floats.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import whole_of
from ..numerics.lookup import E8M0, format_of
from ..ops.affine import affine_dequantize, affine_quantize
from ..policy import Policy, Rule
from ..statistics.calibrators import Affine, Calibrator
from ..statistics.statistics import places
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from ..transforms.find import Found
from ..transforms.make_plan import plan_call, with_contractions
from ..transforms.plan import Plan, Site, Weight
from ..transforms.quantize_params import quantize_weight
from ..transforms.stats import Entry, observed_parts, places_of, renumbered
from ..transforms.trace import Call, trace_call
from ..transforms.views import Address
from ..transforms.walk import REMAT, Enclosing, contractions_in

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
        weight = self.weights[0]
        return weight if len(self.weights) == 1 else dataclasses.replace(weight, path=self.path)

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
            paths = set(plan.weights_in(site))
            joined = [group for group in groups if group & paths]
            if len(joined) > 1:
                groups = [x for x in groups if not x & paths] + [set().union(*joined)]
        result = []
        for group in groups:
            weights = tuple(x for x in plan.weights if x.path in group)
            result.append(cls(weights, {x.path: sizes[x.path] for x in weights}))
        return result


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "scale"),
    meta_fields=("path", "nearest", "start", "first_scale"),
)
@dataclasses.dataclass(frozen=True)
class Part:
    """One weight of a group.

    Attributes:
      path: its path among the parameters.
      x: its values, in float.
      nearest: its QTensor as rounded to nearest, with shapes in place of codes and scales.
      scale: its scales, if they are quantized themselves; they do not change.
      start: the number of its first element within the group.
      first_scale: the index of its first scale, likewise.
    """

    path: str
    x: Any
    nearest: QTensor
    scale: QTensor | None
    start: int
    first_scale: int

    @property
    def elements(self) -> slice:
        """Its elements within the group."""
        return slice(self.start, self.start + math.prod(self.nearest.shape))

    @property
    def scales(self) -> slice:
        """Its scales within the group."""
        return slice(
            self.first_scale, self.first_scale + math.prod(self.nearest.groups.scale_shape)
        )

    @property
    def sizes(self) -> Array:
        """The number of elements of each scale."""
        groups, counts = self.nearest.groups, np.ones(1, int)
        for count, size, scales in zip(groups.shape, groups.sizes, groups.scale_shape, strict=True):
            lengths = np.full(scales, size)
            lengths[-1:] = count - size * (scales - 1)
            counts = np.multiply.outer(counts, lengths).ravel()
        return counts

    def label(self, element_ids: Array) -> Array:
        """Returns the index of the scale of each element."""
        groups, remainder = self.nearest.groups, element_ids - self.start
        labels, stride = np.full(element_ids.shape, self.first_scale, np.int32), 1
        for count, size, scales in reversed(
            list(zip(self.nearest.shape, groups.sizes, groups.scale_shape, strict=True))
        ):
            remainder, index = np.divmod(remainder, count)
            if scales > 1:
                labels += stride * (index // size)
            stride *= scales
        return labels


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("parts", "codes", "scale", "zero_point"),
    meta_fields=("spec",),
)
@dataclasses.dataclass
class Grids:
    """Scales, zero points and codes of a group of weights, in NumPy, concatenated. A pytree of
    these arrays.

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
        parts, arrays = [], []
        start = first_scale = 0
        for path, spec in specs.items():
            q = quantize_weight(x := leaves[path], spec)
            kind = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), q)
            scale = q.scale if isinstance(q.scale, QTensor) else None
            parts.append(Part(path, x, kind, scale, start, first_scale))
            real = np.asarray(q.real_scale().astype(np.float32)).ravel()
            zero_point = None if q.zero_point is None else np.asarray(q.zero_point).ravel()
            arrays.append((np.asarray(q.codes).ravel(), real, zero_point))
            start, first_scale = start + q.size, first_scale + real.size
        codes, scales, zero_points = zip(*arrays, strict=True)
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

    def _each(self, element_ids: Array) -> Iterator[tuple[Part, Any]]:
        """Yields the part of some elements that belongs to each weight."""
        for part in self.parts:
            if len(self.parts) == 1:
                yield part, ...
                return
            elements = part.elements
            mine = (element_ids >= elements.start) & (element_ids < elements.stop)
            if mine.any():
                yield part, mine

    def label(self, element_ids: Array) -> Array:
        """Returns the index of the scale of each of some elements."""
        labels = np.empty(element_ids.shape, np.int32)
        for part, mine in self._each(element_ids):
            labels[mine] = part.label(element_ids[mine])
        return labels

    def floats(self, element_ids: Array) -> Array:
        """Returns the values of some elements before rounding, float32."""
        values = np.empty(element_ids.shape, np.float32)
        for part, mine in self._each(element_ids):
            values[mine] = _taken(part.x, element_ids[mine] - np.int32(part.start))
        return values

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

    def limits(self, label: Array) -> tuple[Array, Array]:
        """Returns the least and the largest value of elements by the index of their scale."""
        scale, zero_point = self.at(label)
        start = 0 if zero_point is None else zero_point.astype(np.float32)
        form = format_of(self.spec.qtype)
        return (form.low - start) * scale, (form.high - start) * scale

    def put(self, label: Array, affine: Affine) -> None:
        """Writes scales and zero points by their index."""
        self.scale[label] = np.asarray(affine.scale.astype(np.float32))
        if self.zero_point is not None:
            self.zero_point[label] = np.asarray(affine.zero_point)

    def put_scales(self, label: Array, scale: Array) -> None:
        """Writes scales by their index, rounded to their dtype."""
        kind = self.parts[0].nearest.scale.dtype
        self.scale[label] = scale.astype(kind).astype(np.float32)

    def write(self, element_ids: Array, values: Array) -> None:
        """Writes the codes of values that are on the grids."""
        spec = self.spec
        self.codes[element_ids] = affine_quantize(
            values,
            *self._scales(element_ids),
            qtype=spec.qtype,
            round_mode=spec.rounding,
            numerics=spec.numerics,
        )

    def values(self, element_ids: Array) -> Array:
        """Returns the dequantized values of some elements, float32."""
        codes, scales = self.codes[element_ids], self._scales(element_ids)
        values = affine_dequantize(codes, *scales, qtype=self.spec.qtype, dtype=np.float32)
        return np.asarray(values)

    def _scales(self, element_ids: Array) -> Any:
        scale, zero_point = self.at(self.label(element_ids))
        kind = self.parts[0].nearest.scale
        return scale.astype(E8M0) if kind.dtype == E8M0 else scale, zero_point

    def quantized(self) -> dict[str, QTensor]:
        """Returns the QTensor of each weight, by path."""
        tensors = {}
        for part in self.parts:
            kind, scale, zero_point = part.nearest, part.scale, self.zero_point
            if scale is None:
                scale = _like(self.scale[part.scales], kind.scale)
            if zero_point is not None:
                zero_point = _like(zero_point[part.scales], kind.zero_point)
            codes = _like(self.codes[part.elements], kind.values)
            parts = {"values": codes, "scale": scale, "zero_point": zero_point}
            tensors[part.path] = dataclasses.replace(kind, **parts)
        return tensors


def calibrated(spec: QSpec, calibrator: Calibrator | None) -> QSpec:
    """Returns a spec with another calibrator, if one is given."""
    return spec if calibrator is None else dataclasses.replace(spec, calibrator=calibrator)


def _like(x: Array, kind: Any) -> jax.Array:
    """Returns flat entries in a shape, of a dtype."""
    return jnp.asarray(x.reshape(kind.shape).astype(kind.dtype))


@jax.jit
def _taken(x: jax.Array, element_ids: jax.Array) -> jax.Array:
    """Returns elements of an array by their numbers, float32."""
    return whole_of(
        lambda x, element_ids: x.ravel()[element_ids].astype(np.float32), x, element_ids
    )


# Which elements of a weight a site multiplies by: their numbers, stored as a few integers if a
# formula describes them.


@dataclasses.dataclass(frozen=True)
class Elements:
    """Numbers of elements, int32, that can be indexed like an array.

    Attributes:
      shape: [*steps, *batch, rows, columns].
      offset: the number of the first element.
      strides: the increment of numbers along each axis; `None` if increments are not constant.
      table: the numbers, if increments are not constant.
    """

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None
    table: Array | None = None

    @classmethod
    def of(cls, numbers: Array) -> "Elements":
        """Returns numbers as a formula, if there is one. There is one for views of a weight."""
        numbers, shape = np.asarray(numbers), np.shape(numbers)
        if not numbers.size:
            return cls(shape, 0, (0,) * len(shape))
        origin = numbers[(0,) * len(shape)]
        strides = []
        for axis, size in enumerate(shape):
            second = (0,) * axis + (min(1, size - 1),) + (0,) * (len(shape) - axis - 1)
            strides.append(int(numbers[second] - origin))
        formula = cls(shape, int(origin), tuple(strides))
        # Part by part, so that the whole array is not built a second time.
        even = all(
            np.array_equal(part, formula[index])
            for index, part in zip(
                np.ndindex(shape[:-2]), numbers.reshape(-1, *shape[-2:]), strict=True
            )
        )
        return formula if even else cls(shape, 0, None, np.array(numbers, np.int32))

    def equals(self, elements: "Elements") -> bool:
        """Whether others are the same numbers in the same order."""
        same = (self.shape, self.offset, self.strides) == (
            elements.shape,
            elements.offset,
            elements.strides,
        )
        return same and np.array_equal(self.table, elements.table)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """The bytes that it holds."""
        return 0 if self.table is None else self.table.nbytes

    def __getitem__(self, index: tuple[int, ...]) -> Array:
        """Returns the numbers at an index of the first axes."""
        if self.strides is None:
            assert self.table is not None
            return self.table[index]
        depth = len(index)
        start = self.offset + sum(
            i * stride for i, stride in zip(index, self.strides, strict=False)
        )
        numbers = np.full(self.shape[depth:], start, np.int32)
        for axis in range(depth, len(self.shape)):
            increments = np.arange(self.shape[axis], dtype=np.int32) * np.int32(self.strides[axis])
            numbers += increments.reshape(
                [-1 if i == axis else 1 for i in range(depth, len(self.shape))]
            )
        return numbers


def elements_of_sites(
    plan: Plan, call: Call, items: Mapping[Address, Found], groups: Sequence[Group]
) -> dict[str, Elements]:
    """Returns which elements of its group each site multiplies by, by the key of its operand. They
    are computed site by site, from shapes alone.
    """
    of_path: dict[str | None, Group] = {path: group for group in groups for path in group.sizes}
    entries = [
        Entry(part.key, site, places, part)
        for site in plan.sites
        for part in observed_parts(site, items[site.address])
        if places.looks_at(part.observed)
    ]
    numbers_of, elements = places_of(plan, call, entries), {}
    for entry in entries:
        if entry.key in numbers_of:
            group = of_path[entry.site.operands[entry.part.argnum].path]
            local_numbers = np.asarray(numbers_of[entry.key]())
            numbers = group.numbers(plan.weights_in(entry.site), local_numbers)
            elements[entry.key] = Elements.of(numbers)
    return elements


# Finds sites that run once for each part of their weight: these are quantized in place.


def sites_once(
    plan: Plan, groups: Sequence[Group], jaxpr: Any, elements: Mapping[str, Elements]
) -> set[Address]:
    """Returns the addresses of the sites that run once for each part of their weight: all scans
    around them step over it, and no other site multiplies by the same elements.
    """
    labels = {site.address: site.address for site in plan.sites}
    return apart(plan, groups, elements, labels) & {*bodies_of(plan, jaxpr)}


def bodies_of(plan: Plan, jaxpr: Any) -> dict[Address, Address | None]:
    """Returns the sites with a weight over which all scans around them step, each with the
    innermost body of a scan or of `jax.checkpoint` around it, or `None`.
    """
    bodies: dict[Address, Address | None] = {}
    for site, forms in reached_sites(plan, jaxpr):
        scans = tuple(x.address for x in forms if x.name == "scan")
        weights = sum(x.path is not None for x in site.operands)
        if weights == 1 and tuple(loop.address for loop in site.loops) == scans:
            enclosing = [x.address for x in forms if x.name == "scan" or x.name in REMAT]
            bodies[site.address] = enclosing[-1] if enclosing else None
    return bodies


def reached_sites(plan: Plan, jaxpr: Any) -> Iterator[tuple[Site, tuple[Enclosing, ...]]]:
    """Yields the sites outside of `while` and `shard_map`, each with the equations around it."""
    for address, forms in contractions_in(jaxpr):
        site = plan.site_at(address)
        if site is not None and not any(x.name in ("while", "shard_map") for x in forms):
            yield site, forms


def apart(
    plan: Plan,
    groups: Sequence[Group],
    elements: Mapping[str, Elements],
    labels: Mapping[Address, Any],
) -> set[Address]:
    """Returns the addresses of the sites whose weight shares no element with that of a site of
    another label.
    """
    addresses: set[Address] = set()
    for group in groups:
        mine = [
            (site.address, elements.get(operand.key))
            for site in plan.sites
            for operand in site.operands
            if operand.path in group.sizes
        ]
        located = [(address, numbers) for address, numbers in mine if numbers is not None]
        if not located or len(located) < len(mine):
            continue
        if len({labels.get(address) for address, _ in located}) == 1:
            addresses |= {address for address, _ in located}
            continue
        located = [(address, numbers[()]) for address, numbers in located]
        uses = np.zeros(1 + max(int(numbers.max(initial=0)) for _, numbers in located), np.int32)
        for label in dict.fromkeys(labels.get(address) for address, _ in located):
            is_used = np.zeros(len(uses), bool)
            for address, numbers in located:
                if labels.get(address) == label:
                    is_used[numbers.ravel()] = True
            uses += is_used
        addresses |= {address for address, numbers in located if np.all(uses[numbers] == 1)}
    return addresses


# All contractions of a function with weights, quantized or not.


_EVERY = Policy([Rule(".*", weight="int8", tables=None, optional=True)])


class Every(NamedTuple):
    """A function with the plan of all contractions that may be sites.

    Attributes:
      call_plan: the plan of its call.
      plan: the plan of everything that may be a site.
      elements: which elements of its leaf each site multiplies by, by the key of its operand.
      once: addresses of sites whose matrices no other site multiplies by.
      call: the traced function.
      items: its contractions, by address.
    """

    call_plan: Plan
    plan: Plan
    elements: dict[str, Elements]
    once: set[Address]
    call: Call
    items: dict[Address, Found]


def every_site(function: str, f: Callable[..., Any], plan: Plan, args: Sequence[Any]) -> Every:
    """Returns the contractions of a function with weights, traced at its arguments."""
    call = trace_call(function, f, plan.parameters, args, {})
    call_plan, found = with_contractions(function, plan, call, plan.parameters)
    full_plan = plan_call(function, call, _EVERY, plan.parameters, found)
    items = {item.address: item for item in found if item.address}
    named = zip(call.paths, call.leaves, strict=True)
    groups = Group.of_plan(full_plan, {path: x.size for path, x in named if path is not None})
    elements_of_key = elements_of_sites(full_plan, call, items, groups)
    joined = {
        x.key
        for site in full_plan.sites
        for x in site.operands
        if len(full_plan.weights_in(site)) > 1
    }
    elements = {key: x for key, x in elements_of_key.items() if key not in joined}
    once = sites_once(full_plan, groups, call.jaxpr, elements)
    return Every(call_plan, full_plan, elements, once, call, items)
