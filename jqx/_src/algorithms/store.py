"""What a run keeps: values of batches between stages, on the devices, on the host, or in files;
results from which an interrupted run continues; and the codes of weights.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import fail
from ..files import Path, Replacement, as_path
from ..heap import give_back
from ..statistics.statistics import hessian
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy, has_lazy, read
from ..tensor.spec import QSpec
from ..transforms.calibrate import bytes_of, in_bytes
from ..transforms.plan import Plan
from ..transforms.quantize_params import quantize_weight
from ..transforms.row_counts import is_counted
from ..transforms.trace import is_array
from ..transforms.walk import bodies
from .grids import Grids, Group
from .stages import Scope, Stage

Where = bool | Literal["disk"]

_LEAST = 1 << 16
"""Smaller arrays are kept on the host and not in a file."""


@dataclasses.dataclass(frozen=True, eq=False)
class OnHost:
    """An array that is kept on the host.

    Attributes:
      values: its values.
      sharding: their sharding on the devices; `None` leaves it to JAX.
    """

    values: np.ndarray
    sharding: Any


class OnDisk:
    """An array that is kept in a file, which is deleted together with this object.

    Args:
      path: path of the file.
      values: the array to write.
      sharding: its sharding on the devices; `None` leaves it to JAX.
    """

    def __init__(self, path: str, values: np.ndarray, sharding: Any):
        self._path, self._kind, self.sharding = path, (values.dtype, values.shape), sharding
        np.ascontiguousarray(values).tofile(path)
        weakref.finalize(self, pathlib.Path(path).unlink, missing_ok=True)

    @property
    def values(self) -> np.ndarray:
        """Its values, read from the file at each access."""
        dtype, shape = self._kind
        return np.fromfile(self._path, np.uint8).view(dtype).reshape(shape)


class Offload:
    """Keeps values of batches.

    Args:
      where: on the host, or in files of a temporary folder, which is deleted with this object.
    """

    def __init__(self, where: Where):
        self._where, self._numbers = where, itertools.count()

    @functools.cached_property
    def _folder(self) -> str:
        return temporary_folder(self)

    def kept(self, x: Any) -> Any:
        """Returns a value as it is kept. Random keys stay on the devices."""
        if is_counted(x):
            return jax.tree.map(self.kept, x)
        is_array = isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        if not self._where or not is_array:
            return x
        sharding = x.sharding if x.committed else None
        if self._where == "disk" and x.nbytes >= _LEAST:
            path = os.path.join(self._folder, f"{next(self._numbers):08}")
            return OnDisk(path, np.asarray(x), sharding)
        return OnHost(np.asarray(x), sharding)


def on_device(x: Any) -> Any:
    """Returns a kept value, on the device."""
    if is_counted(x):
        return jax.tree.map(on_device, x)
    return jax.device_put(x.values, x.sharding) if isinstance(x, (OnHost, OnDisk)) else x


def temporary_folder(owner: Any) -> str:
    """Makes a folder that is deleted together with an object, or at exit."""
    path = tempfile.mkdtemp(prefix="jqx-")
    # A `TemporaryDirectory` would warn when it is collected.
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return path


# Arrays in the files of a folder, by name: results from which an interrupted run continues, and
# weights that are not in memory.


Array = np.ndarray


class Folder:
    """Arrays in files of a folder, by name. A file is written as a whole.

    Args:
      function: name of the function, for errors.
      path: the folder; `None` makes a temporary one, which is deleted with this object.
    """

    def __init__(self, function: str, path: str | None = None):
        self._function = function
        self.folder = temporary_folder(self) if path is None else path

    def put(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Writes arrays; those of dtypes that are not NumPy's own as integers."""
        bare: dict[str, Any] = {
            key: x if x.dtype.isbuiltin == 1 or x.dtype.kind == "U" else x.view(f"u{x.itemsize}")
            for key, x in arrays.items()
        }
        with Replacement(self._function, self._path(name)) as replacement:
            np.savez(replacement.file, **bare)
            replacement.commit()

    def get(self, name: str) -> dict[str, Array] | None:
        """Returns arrays, as they are written; `None` if there are none of this name."""
        path = self._path(name)
        if not os.path.exists(path):
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise self.refusal(name, str(error)) from error

    def refusal(self, name: str, contents: str) -> Exception:
        """Returns the error of a file with other contents than expected."""
        problem = "a file of the checkpoint is not what this run wrote."
        fix = "delete that file and those with higher numbers."
        return fail(self._function, problem, given=f"{self._path(name)!r}: {contents}", fix=fix)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, f"{name}.npz")


NAME = "checkpoint.json"


class Checkpoint(Folder):
    """The results of a run so far. A run with the same inputs computes them in the same order.

    Args:
      function: name of the function, for errors.
      path: the folder; it is created if necessary.
      made_of: digests of everything that the results depend on, by name.

    Raises:
      OSError: the folder cannot be created or written to.
      ValueError: the folder holds something else, or the results of another run.
    """

    def __init__(self, function: str, path: Path, made_of: Mapping[str, str]):
        super().__init__(function, as_path(function, path))
        name, stored = os.path.join(self.folder, NAME), None
        try:
            os.makedirs(self.folder, exist_ok=True)
            is_new = not os.listdir(self.folder)
        except OSError:
            is_new = False
        if is_new:
            with Replacement(function, name) as file:
                file.write(0, json.dumps(made_of, indent=1).encode())
                file.commit()
        with contextlib.suppress(OSError, ValueError), open(name, "rb") as file:
            stored = json.load(file)
        if not isinstance(stored, dict):
            problem = f"`checkpoint` is not a checkpoint folder: it has no readable {NAME}."
            fix = "pass the folder of an interrupted run, or one that is empty or new."
            raise fail(function, problem, given=repr(self.folder), fix=fix)
        differ = [name for name in made_of if stored.get(name) != made_of[name]]
        if differ:
            problem = "the checkpoint belongs to another run."
            detail = f"{self.folder!r}, made with other {', '.join(differ)}"
            fix = "pass another folder, or delete this one to start again."
            raise fail(function, problem, given=detail, fix=fix)


def digest(tree: Any) -> str:
    """Returns a digest of the leaves of a pytree, and of its structure."""
    leaves, structure = jax.tree.flatten(tree)
    sha = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if not is_array(leaf):
            sha.update(re.sub(r" at 0x[0-9a-f]+", "", repr(leaf)).encode())
            continue
        if isinstance(leaf, Lazy):
            sha.update(f"{leaf.dtype}{leaf.shape}{leaf.source}".encode())
            continue
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        x = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        sha.update(f"{x.dtype}{x.shape}".encode())
        sha.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


# Where the grids of weights are stored: in memory, or, for lazy weights, in files from the moment
# their first codes are chosen.


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
        return {path: q for grids in self._grids.values() for path, q in grids.quantized().items()}


class InFiles:
    """Grids with chosen codes are in files; all others are computed when needed.

    Args:
      folder: for the files; `None` makes one that lives as long as whatever reads from it.
      groups: the weights.
      leaves: the weights, by path.
      spec_of: returns the spec with the calibrator that computes scales.
      source: identifies everything that codes depend on; empty if that is not known.
    """

    def __init__(
        self,
        folder: Folder | None,
        groups: Iterable[Group],
        leaves: Mapping[str, Any],
        spec_of: Callable[[QSpec], QSpec],
        source: str,
    ):
        self._folder = folder or Folder("ptq")
        self._leaves, self._spec_of, self._source = leaves, spec_of, source
        self._groups = {path: group for group in groups for path in group.sizes}
        self._numbers = {group.path: i for i, group in enumerate(self._groups.values())}
        self._kinds: dict[str, tuple[Any, list[Any]]] = {}

    def take(self, group: Group, leaves: Mapping[str, Any]) -> Grids:
        """Reads the grids of a group, or computes them."""
        if group.path in self._kinds:
            return self._load(group, leaves)[0]
        return Grids.of_group(group, leaves, self._spec_of)

    def put(self, group: Group, grids: Grids, where: Array) -> None:
        """Writes grids to their file."""
        is_chosen = np.zeros(grids.codes.size, bool)
        if group.path in self._kinds:
            is_chosen = self._load(group, {})[1]
        is_chosen[where] = True
        parts = tuple(dataclasses.replace(part, x=None) for part in grids.parts)
        leaves, tree = jax.tree.flatten(dataclasses.replace(grids, parts=parts))
        arrays = {str(i): np.asarray(x) for i, x in enumerate(leaves)}
        self._folder.put(self._name(group), arrays | {"chosen": np.packbits(is_chosen)})
        self._kinds[group.path] = tree, [x.dtype for x in leaves]
        give_back()

    def values(self, path: str) -> jax.Array:
        """Returns a weight as it is now: in float, with dequantized values for elements whose codes
        are chosen.
        """
        group, x = self._groups[path], read(self._leaves[path])
        if group.path not in self._kinds:
            return x
        grids, is_chosen = self._load(group, {})
        part = next(part for part in grids.parts if part.path == path)
        where = np.flatnonzero(is_chosen[part.elements]).astype(np.int32)
        values = np.array(x).ravel()
        values[where] = grids.values(where + np.int32(part.start)).astype(values.dtype)
        return jnp.asarray(values.reshape(x.shape))

    def current(self, path: str) -> Lazy:
        """Returns a lazy leaf that reads the weight as it is at that time."""
        x = self._leaves[path]
        return Lazy(jax.ShapeDtypeStruct(x.shape, x.dtype), partial(self.values, path))

    def quantized(self) -> dict[str, Lazy]:
        """Returns the codes of each weight, by path, as lazy leaves that read the files. Weights
        without chosen codes are rounded to nearest when they are read.
        """
        leaves = {}
        for path, group in self._groups.items():
            (weight,) = (x for x in group.weights if x.path == path)
            spec, source = self._spec_of(weight.spec), f"{self._source}\n{path}"
            leaf = self._leaves[path]
            kind = quantize_weight(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec)
            make = partial(self._quantized, path, spec)
            leaves[path] = Lazy(kind, make, source if self._source else "")
        return leaves

    def _quantized(self, path: str, spec: QSpec) -> QTensor:
        group = self._groups[path]
        if group.path not in self._kinds:
            return quantize_weight(read(self._leaves[path]), spec)
        return self._load(group, {})[0].quantized()[path]

    def _name(self, group: Group) -> str:
        return f"weight-{self._numbers[group.path]:06}"

    def _load(self, group: Group, leaves: Mapping[str, Any]) -> tuple[Grids, Array]:
        """Returns the contents of a file: grids, and which elements have chosen codes."""
        tree, dtypes = self._kinds[group.path]
        stored = self._folder.get(self._name(group))
        assert stored is not None
        grids = tree.unflatten([stored[str(i)].view(x) for i, x in enumerate(dtypes)])
        parts = []
        for part in grids.parts:
            scale = jax.tree.map(jnp.asarray, part.scale)
            parts.append(dataclasses.replace(part, x=leaves.get(part.path), scale=scale))
        is_chosen = np.unpackbits(stored["chosen"], count=grids.codes.size).astype(bool)
        return dataclasses.replace(grids, parts=tuple(parts)), is_chosen


CodeStore = InMemory | InFiles
"""Grids of groups of weights, rounded to nearest unless other codes are chosen."""


# The memory of a run, computed before it starts, from shapes alone.


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that a run needs, without the temporaries inside a stage.

    Attributes:
      weights: the parameters, in float. For quantized ones also a copy as they are at each stage,
        and on the host their codes, scales and zero points, and the numbers of their elements if a
        site sees them through more than views. If some are lazy: the arrays among them, and all of
        this for the largest weight only.
      statistics: the sums of products of the inputs of one site, the one with the most, or of all
        sites whose weights are chosen together before the others.
      activations: the largest total of values of all batches that live between stages, including
        those of the float function if it runs too.
      offload: whether these are on the host, or on `"disk"`, except those of one batch.
    """

    weights: int
    statistics: int
    activations: int
    offload: Where = False

    def __str__(self) -> str:
        where = " on disk" if self.offload == "disk" else " on the host" if self.offload else ""
        return (
            f"{in_bytes(self.weights)} of weights, {in_bytes(self.statistics)} of statistics, "
            f"{in_bytes(self.activations)} of activations{where}"
        )


def bytes_of_weights(
    plan: Plan,
    leaves: Iterable[Any],
    paths: Iterable[str | None],
    spec_of: Callable[[QSpec], QSpec],
) -> int:
    """Returns the bytes of parameters, and of what is stored for quantized ones."""
    total, once = 0, [0]
    named = [(leaf, path) for leaf, path in zip(leaves, paths, strict=True) if path is not None]
    is_lazy = has_lazy([leaf for leaf, _ in named])
    for leaf, path in named:
        extra, weight = 0, plan.weight_at(path)
        kind = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if weight is not None:
            codes = jax.eval_shape(partial(quantize_weight, spec=spec_of(weight.spec)), kind)
            # A copy; codes, dequantized scales, zero points; scales that are quantized themselves.
            scale_codes = codes.scale if isinstance(codes.scale, QTensor) else None
            extra = bytes_of((kind, codes.values, codes.zero_point, scale_codes))
            extra += 4 * math.prod(codes.groups.scale_shape)
        once.append(extra + bytes_of(kind) if is_lazy else 0)
        total += 0 if isinstance(leaf, Lazy) else bytes_of(kind)
        total += 0 if is_lazy else extra
    return total + max(once)


def bytes_of_sums(part: Any, with_float: bool = False) -> int:
    """Returns the bytes of the sums of products of the inputs of a site in one step of its scans:
    in float64, and for one batch in float32.
    """
    kind = jax.eval_shape(lambda: hessian.empty(part.kind, part.observed)).products
    return math.prod(kind.shape) * (8 + 4) * (3 if with_float else 1)


def bytes_of_activations(scopes: Sequence[Scope], streams: int) -> int:
    """Returns the largest total bytes of values of batches that live between stages.

    Args:
      scopes: the scope of each batch.
      streams: how many times each is run.
    """
    moments_of_scope = {id(scope): list(_moments(scope, frozenset())) for scope in scopes}
    moments = zip(*(moments_of_scope[id(scope)] for scope in scopes), strict=True)
    totals = (
        (sum(x.live for x in stage_moments), max(x.temporary for x in stage_moments))
        for stage_moments in moments
    )
    return max((streams * live + temporary for live, temporary in totals), default=0)


@dataclasses.dataclass(frozen=True)
class _Moment:
    """Bytes of one batch: the most before or after a stage, and the additional ones during it."""

    live: int
    temporary: int = 0

    def plus(self, count: int) -> "_Moment":
        return _Moment(self.live + count, self.temporary)


def _moments(scope: Scope, shared: frozenset[Any]) -> Iterable[_Moment]:
    """Yields the live bytes of each stage; the outer scope counts values in `shared`."""

    def total(atoms: Iterable[Any]) -> int:
        return sum(bytes_of(x.aval) for x in {*atoms} - shared)

    alive = {var for var in scope.jaxpr.invars if scope.is_of_batch(var)}
    for stage in scope.stages:
        remaining, new = alive - {*stage.released}, {*stage.gives}
        bytes_before, bytes_after = total(alive), total(remaining | new)
        if stage.kind in ("run", "site"):
            live = max(bytes_before, bytes_after)
            yield _Moment(live, total(alive | new) - live)
        else:
            inside = _scanned if stage.kind == "scan" else _entered
            for moment in inside(scope, stage, remaining | shared):
                yield moment.plus(total(remaining))
            yield _Moment(bytes_after)
        alive = remaining | new


def _entered(scope: Scope, stage: Stage, around: Any) -> Iterable[_Moment]:
    """Yields the same for the function inside an equation; for branches the largest of them."""
    moments = []
    for branch in range(len(bodies(stage.eqns[0]))):
        inner, operands = scope.entered(stage, branch)
        moments += _moments(inner, frozenset(var for var, x in operands.items() if x in around))
    if stage.kind == "inline":
        yield from moments
    else:
        yield _Moment(max(x.live for x in moments), max(x.temporary for x in moments))


def _scanned(scope: Scope, stage: Stage, around: Any) -> Iterable[_Moment]:
    """Yields the same for one step of a scan, plus the results of all steps and their stack."""
    (eqn,) = stage.eqns
    inner, operands = scope.entered(stage)
    consts, count = compat.scan_counts(eqn)
    once = frozenset(inner.jaxpr.invars[:consts])
    carried = inner.jaxpr.invars[consts : consts + count]
    through = {x for var, x in operands.items() if var not in carried}
    through_bytes = sum(bytes_of(x.aval) for x in through - around)
    rows = sum(bytes_of(x.aval) for x in eqn.outvars[count:])
    last_row = rows // max(eqn.params["length"], 1)
    for moment in _moments(inner, once):
        yield moment.plus(through_bytes + rows - last_row)
    # Each column of rows becomes one array while the rows still exist.
    yield _Moment(through_bytes + rows + sum(bytes_of(x.aval) for x in carried), rows)
