"""Partitioning of a QTensor over devices: its scale is partitioned in step with its values."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from .._errors import fail
from ._order import permuted_axis

T = TypeVar("T", bound=Any)
"""A QTensor; `_qtensor.py` is above this file."""


def partition_specs(
    function: str, q: T, spec: PartitionSpec, sizes: Mapping[str, int], place: str = ""
) -> T:
    """Returns a QTensor with the PartitionSpec of each of its arrays in place of the array.

    Args:
      function: the caller, for messages.
      q: QTensor.
      spec: the partition of its real array: for each axis the names of mesh axes, or `None`.
      sizes: size of each axis of the mesh.
      place: path of the QTensor, for messages.

    Raises:
      ValueError: the codes of one byte, or the elements of one block, would be split.
    """
    check_parts(function, q, spec, sizes, place)
    where = f" of {place!r}" if place else ""
    entries = (*spec, *(None,) * (q.ndim - len(spec)))
    packing = q.layout.packing if q.layout is not None else None
    for axis, entry in enumerate(entries):
        n = _count(entry, sizes)
        if n == 1:
            continue
        size, block = q.shape[axis] // n, q.groups.sizes[axis]
        if packing is not None and packing.axis % q.ndim == axis:
            raise fail(
                function,
                f"axis {axis}{where} is partitioned, but codes are packed along it.",
                given=f"{spec} of {q!r}",
                expected="no byte with codes of several devices",
                fix="pack it along another axis, or unpack() it first.",
            )
        if q.scale.shape[axis] != 1 and size % block != 0:
            raise fail(
                function,
                f"axis {axis}{where} is partitioned within blocks that share a scale.",
                given=f"{spec} of {q!r}: {size} elements per device, blocks of {block}",
                expected=f"whole blocks on each device: {_counts(q.shape[axis] // block)} parts",
                fix="use one of these numbers of parts, use blocks that divide the part of a "
                "device, "
                "or partition another axis.",
            )

    def of_parameter(parameter: Any) -> Any:
        own = PartitionSpec(
            *(entry if parameter.shape[axis] > 1 else None for axis, entry in enumerate(entries))
        )
        nested = hasattr(parameter, "qtype")
        return partition_specs(function, parameter, own, sizes, place) if nested else own

    swapped = q.layout is not None and q.layout.swapped
    stored = PartitionSpec(*entries[:-2], *reversed(entries[-2:])) if swapped else spec
    axis = None if q.order is None else permuted_axis(q.order)
    if axis is not None and _count(entries[axis], sizes) != 1:
        raise fail(
            function,
            f"axis {axis}{where} is partitioned, but it is permuted.",
            given=f"{spec} of {q!r}",
            expected="an axis in order, or the whole axis on each device",
            fix="partition another axis.",
        )
    parameters = [
        of_parameter(x) for x in (q.scale, q.zero_point, q.offset, q.order) if x is not None
    ]
    return jax.tree.unflatten(jax.tree.structure(q), jax.tree.leaves([stored, *parameters]))


def check_parts(
    function: str, x: Any, spec: PartitionSpec, sizes: Mapping[str, int], place: str = ""
) -> None:
    """Checks that an array has the axes that are partitioned, and that its parts are equal."""
    where = f" of {place!r}" if place else ""
    if not len(spec) <= x.ndim:
        raise fail(
            function,
            f"the partition{where} has more axes than the array.",
            given=f"{spec} of shape {list(x.shape)}",
            expected=f"{x.ndim} entries or fewer",
            fix="pass an entry for each axis, None where it is not partitioned.",
        )
    for axis, (entry, size) in enumerate(zip(spec, x.shape, strict=False)):
        n = _count(entry, sizes)
        if size % n != 0:
            raise fail(
                function,
                f"axis {axis}{where} does not divide into parts.",
                given=f"{spec} of shape {list(x.shape)}: {n} parts",
                expected=f"{_counts(size)} parts",
                fix="use one of these numbers of parts, or partition another axis.",
            )


def _counts(size: int) -> str:
    """Returns the numbers of parts into which an axis divides, as text."""
    found = [str(n) for n in range(2, min(size, 512) + 1) if size % n == 0]
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "no"


def _count(entry: Any, sizes: Mapping[str, int]) -> int:
    """Returns over how many devices an axis is partitioned."""
    return math.prod(sizes.get(name, 1) for name in names_of(entry))


def names_of(entry: Any) -> tuple[Any, ...]:
    """Returns the names of the mesh axes in an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
