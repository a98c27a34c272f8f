"""Where the grids of weights are stored: in memory, or, for lazy weights, in files from the moment
their first codes are chosen.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._heap import give_back
from ..tensor import QSpec, QTensor
from ..tensor._shared import Lazy, read
from ..transforms._shared import quantize_weight
from ._grids import Grids, Group
from ._offload import temporary_folder

Array = np.ndarray


class Shelf(Protocol):
    """Grids of groups of weights, rounded to nearest unless other codes are chosen."""

    def take(self, group: Group, leaves: Mapping[str, Any]) -> Grids:
        """Returns the grids of a group. `leaves` are its weights as arrays, by path, in float for
        weights without chosen codes.
        """
        ...

    def put(self, group: Group, grids: Grids, where: Array) -> None:
        """Stores grids; the codes of elements `where` are chosen now."""
        ...

    def quantized(self) -> dict[str, Any]:
        """Returns each weight with its codes, by path."""
        ...


class InMemory:
    """Grids that are all computed at the start, and held in memory."""

    def __init__(self, grids: Mapping[str, Grids]):
        self._grids = grids

    def take(self, group: Group, leaves: Mapping[str, Any]) -> Grids:
        """Returns the grids of a group."""
        return self._grids[group.path]

    def put(self, group: Group, grids: Grids, where: Array) -> None:
        """Does nothing: the grids are in memory already."""

    def quantized(self) -> dict[str, QTensor]:
        """Returns the codes of each weight, by path."""
        return {path: q for own in self._grids.values() for path, q in own.quantized().items()}


class InFiles:
    """Grids with chosen codes are in files; all others are computed when needed.

    Args:
      folder: for the files; `None` creates one that lives as long as whatever reads from it.
      groups: the weights.
      leaves: the weights, by path.
      spec_of: returns the spec with the calibrator that computes scales.
      source: identifies everything that codes depend on; empty if that is not known.
    """

    def __init__(
        self,
        folder: str | None,
        groups: Iterable[Group],
        leaves: Mapping[str, Any],
        spec_of: Callable[[QSpec], QSpec],
        source: str,
    ):
        folder = temporary_folder(self) if folder is None else folder
        self._folder, self._leaves, self._spec_of, self._source = folder, leaves, spec_of, source
        self._groups = {path: group for group in groups for path in group.sizes}
        self._numbers = {group.path: i for i, group in enumerate(self._groups.values())}
        self._kinds: dict[str, Grids] = {}

    def take(self, group: Group, leaves: Mapping[str, Any]) -> Grids:
        """Reads the grids of a group, or computes them."""
        if group.path in self._kinds:
            return self._load(group, leaves)[0]
        return Grids.of_group(group, leaves, self._spec_of)

    def put(self, group: Group, grids: Grids, where: Array) -> None:
        """Writes grids to their file."""
        chosen = np.zeros(grids.codes.size, bool)
        if group.path in self._kinds:
            chosen = self._load(group, {})[1]
        chosen[where] = True
        arrays: dict[str, Any] = {
            "codes": grids.codes,
            "scale": grids.scale,
            "chosen": np.packbits(chosen),
        }
        if grids.zero_point is not None:
            arrays["zero_point"] = grids.zero_point
        for i, part in enumerate(grids.parts):
            for j, x in enumerate(jax.tree.leaves(part.scale)):
                arrays[f"scale {i} {j}"] = np.asarray(x)
        path = self._path(group)
        bare: dict[str, Any] = {name: _bare(x) for name, x in arrays.items()}
        with open(f"{path}.part", "wb") as file:
            np.savez(file, **bare)
        os.replace(f"{path}.part", path)
        self._kinds[group.path] = _without(grids)
        give_back()

    def values(self, path: str) -> jax.Array:
        """Returns a weight as it is now: in float, with dequantized values for elements whose codes
        are chosen.
        """
        group, x = self._groups[path], read(self._leaves[path])
        if group.path not in self._kinds:
            return x
        grids, chosen = self._load(group, {})
        part = next(part for part in grids.parts if part.path == path)
        where = np.flatnonzero(chosen[part.elements]).astype(np.int32)
        found = np.array(x).ravel()
        found[where] = grids.values(where + np.int32(part.start)).astype(found.dtype)
        return jnp.asarray(found.reshape(x.shape))

    def current(self, path: str) -> Lazy:
        """Returns a lazy leaf that reads the weight as it is at that time."""
        x = self._leaves[path]
        return Lazy(jax.ShapeDtypeStruct(x.shape, x.dtype), partial(self.values, path))

    def quantized(self) -> dict[str, Lazy]:
        """Returns the codes of each weight, by path, as lazy leaves that read the files. Weights
        without chosen codes are rounded to nearest when they are read.
        """
        found = {}
        for path, group in self._groups.items():
            (weight,) = (x for x in group.weights if x.path == path)
            spec, source = self._spec_of(weight.spec), f"{self._source}\n{path}"
            kind = quantize_weight(_kind(self._leaves[path]), spec)
            make = partial(self._quantized, path, spec)
            found[path] = Lazy(kind, make, source if self._source else "")
        return found

    def _quantized(self, path: str, spec: QSpec) -> QTensor:
        group = self._groups[path]
        if group.path not in self._kinds:
            return quantize_weight(read(self._leaves[path]), spec)
        return self._load(group, {})[0].quantized()[path]

    def _path(self, group: Group) -> str:
        return os.path.join(self._folder, f"weight-{self._numbers[group.path]:06}.npz")

    def _load(self, group: Group, leaves: Mapping[str, Any]) -> tuple[Grids, Array]:
        """Returns the contents of a file: grids, and which elements have chosen codes."""
        kind = self._kinds[group.path]
        with np.load(self._path(group), allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        size = sum(group.sizes.values())
        parts = []
        for i, part in enumerate(kind.parts):
            kinds, structure = jax.tree.flatten(part.scale)
            own = [jnp.asarray(found[f"scale {i} {j}"].view(x.dtype)) for j, x in enumerate(kinds)]
            scale, x = structure.unflatten(own), leaves.get(part.path)
            parts.append(dataclasses.replace(part, x=x, scale=scale))
        zero_point = None if kind.zero_point is None else found["zero_point"]
        arrays = {"codes": found["codes"].view(kind.codes.dtype), "scale": found["scale"]}
        if zero_point is not None and kind.zero_point is not None:
            arrays["zero_point"] = zero_point.view(kind.zero_point.dtype)
        chosen = np.unpackbits(found["chosen"], count=size).astype(bool)
        return dataclasses.replace(kind, parts=tuple(parts), **arrays), chosen


def _without(grids: Grids) -> Grids:
    """Returns grids with shapes in place of arrays."""
    parts = tuple(
        dataclasses.replace(part, x=None, scale=jax.tree.map(_kind, part.scale))
        for part in grids.parts
    )
    kinds = jax.tree.map(_kind, (grids.codes, grids.scale, grids.zero_point))
    return Grids(grids.spec, parts, *kinds)


def _kind(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _bare(x: Array) -> Array:
    """Returns an array that files support: bytes for dtypes that are not NumPy's own."""
    return x if x.dtype.isbuiltin == 1 else x.view(f"u{x.dtype.itemsize}")
