"""Checkpoints: results so far in a folder, from which an interrupted run continues."""

import dataclasses
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail
from .._files import Path, Replacement, as_path
from ..gradients import ste
from ..tensor import QSpec
from ..tensor._shared import Lazy
from ..transforms import Plan, Weight
from ..transforms._shared import Call, is_array
from ._grids import Grids
from ._matrices import Matrix, Unsupported
from ._report import MatrixReport

Array = np.ndarray

NAME = "checkpoint.json"


class Checkpoint:
    """Matrices with chosen codes, in the order in which they were chosen.

    Matrices that are chosen together share one file, which is written as a whole. A run with the
    same inputs processes them in the same order.

    Args:
      function: name of the function, for errors.
      path: the folder; it is created if necessary.
      made_of: digests of everything that the codes depend on, by name.

    Raises:
      OSError: the folder cannot be created or written to.
      ValueError: the folder holds something else, or the results of another run.
    """

    def __init__(self, function: str, path: Path, made_of: Mapping[str, str]):
        self._function, self._folder, self._count = function, as_path(function, path), 0
        try:
            os.makedirs(self._folder, exist_ok=True)
            is_new = not os.listdir(self._folder)
        except OSError:
            is_new = False
        if is_new:
            text = json.dumps(made_of, indent=1)
            self._write(os.path.join(self._folder, NAME), text.encode())
        known = self._known()
        differ = [name for name in made_of if known.get(name) != made_of[name]]
        if differ:
            raise fail(
                self._function,
                "the checkpoint belongs to another run.",
                given=f"{self._folder!r}, made with other {', '.join(differ)}",
                expected="results of a run with the same function, plan, options, parameters and "
                "batches",
                fix="pass another folder, or delete this one to start again.",
            )

    @property
    def folder(self) -> str:
        """The path of the folder."""
        return self._folder

    def _known(self) -> Mapping[str, Any]:
        known = None
        try:
            with open(os.path.join(self._folder, NAME), "rb") as file:
                known = json.load(file)
        except (OSError, ValueError):
            pass
        if not isinstance(known, dict):
            raise fail(
                self._function,
                "`checkpoint` is not a checkpoint folder.",
                given=f"{self._folder!r}, which has no readable {NAME}",
                expected="a folder that is empty, does not exist yet, or is of an interrupted run",
                fix="pass another folder.",
            )
        assert known is not None
        return known

    def read(self, grids: Grids, places: Array) -> list[MatrixReport] | None:
        """Writes the next matrices to a weight and returns their report, if the checkpoint has
        them.
        """
        path = self._path()
        if not os.path.exists(path):
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in ("places", "codes", "scale", "report")}
                zero_point = file["zero_point"] if "zero_point" in file else None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            found, zero_point, given = None, None, str(error)
        else:
            given = f"matrices of {found['places'].shape}"
        if not (found is not None and np.array_equal(found["places"], places)):
            raise fail(
                self._function,
                "a file of the checkpoint is not what this run wrote.",
                given=f"{path!r}: {given}",
                expected=f"matrices of {places.shape}",
                fix="delete that file and those with higher numbers.",
            )
        assert found is not None
        label = _labels(grids, places)
        grids.codes[places] = found["codes"].view(grids.codes.dtype)
        grids.scale[label] = found["scale"]
        if grids.zero_point is not None:
            grids.zero_point[label] = zero_point
        self._count += 1
        return list(map(_entry, json.loads(str(found["report"]))))

    def write(self, grids: Grids, places: Array, entries: Sequence[MatrixReport]) -> None:
        """Writes matrices that were just chosen."""
        scale, zero_point = grids.at(_labels(grids, places))
        codes = grids.codes[places]  # as integers: files support only NumPy's own dtypes
        codes = codes.view(f"u{codes.dtype.itemsize}")
        arrays: dict[str, Any] = {"places": places, "codes": codes, "scale": scale}
        if zero_point is not None:
            arrays["zero_point"] = zero_point
        report = json.dumps([dataclasses.asdict(entry) for entry in entries])
        data = io.BytesIO()
        np.savez(data, report=np.array(report), **arrays)
        self._write(self._path(), data.getbuffer())
        self._count += 1

    def _write(self, path: str, data: Any) -> None:
        with Replacement(self._function, path) as file:
            file.write(0, data)
            file.commit()

    def _path(self) -> str:
        return os.path.join(self._folder, f"{self._count:06}.npz")


class Solver(Protocol):
    """Chooses the codes of matrices. Its `repr` shows all options that codes depend on.

    Attributes:
      weight: weights of the rows of inputs, a function of the values of a batch; or `None`.
      observers: what is recorded for sites whose weights are chosen before all others.
      unsupported: what to do with weights whose inputs cannot be observed.
      function: name of the function, for errors.
    """

    function: ClassVar[str]

    @property
    def weight(self) -> Callable[..., Any] | None: ...

    @property
    def observers(self) -> Mapping[str, Any]: ...

    @property
    def unsupported(self) -> Unsupported: ...

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns the spec with the calibrator that computes scales."""
        ...

    def solve(self, matrices: Sequence[Matrix], grids: Grids, weight: Weight) -> list[MatrixReport]:
        """Rounds the elements of matrices of one shape, in place, and returns a report of each."""
        ...


def chosen(
    checkpoint: Checkpoint | None,
    solver: Solver,
    matrices: Callable[[], Sequence[Matrix]],
    places: Array,
    grids: Grids,
    weight: Weight,
) -> list[MatrixReport]:
    """Rounds matrices of one shape, in place, and returns their reports: from a checkpoint if it
    has them, otherwise by a solver.
    """
    known = None if checkpoint is None else checkpoint.read(grids, places)
    if known is not None:
        return known
    entries = solver.solve(matrices(), grids, weight)
    if checkpoint is not None:
        checkpoint.write(grids, places, entries)
    return entries


def _entry(stored: Mapping[str, Any]) -> MatrixReport:
    """Returns an entry of a report, with tuples restored from the lists of JSON."""
    fields: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in stored.items()
    }
    return MatrixReport(**fields)


def _labels(grids: Grids, places: Array) -> Array:
    """Returns the distinct indices of the scales of some elements."""
    return np.flatnonzero(np.bincount(grids.label(places).ravel()))


def made_of(plan: Plan, solver: Solver, calls: Sequence[Call]) -> dict[str, str]:
    """Returns digests of everything that the codes of a run depend on, by name, except the version
    of JAX and the devices.

    Args:
      plan: the plan.
      solver: chooses the codes.
      calls: the function, traced for each batch.
    """
    functions = {id(call.jaxpr): call for call in calls}.values()
    weights = [(x.path, dataclasses.replace(x.spec, gradient=ste)) for x in plan.weights]
    first = list(zip(calls[0].leaves, calls[0].paths, strict=True))
    batches = [
        [x for x, path in zip(call.leaves, call.paths, strict=True) if path is None]
        for call in calls
    ]
    return {
        "function": digest([(call.jaxpr, call.consts) for call in functions]),
        "plan": digest([plan.fingerprint, weights]),
        "options": digest(solver),
        "parameters": digest([(x, path) for x, path in first if path is not None]),
        "batches": digest(batches),
    }


def digest(tree: Any) -> str:
    """Returns a digest of the leaves of a pytree, and of its structure."""
    leaves, structure = jax.tree.flatten(tree)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if not is_array(leaf):
            found.update(re.sub(r" at 0x[0-9a-f]+", "", repr(leaf)).encode())
            continue
        if isinstance(leaf, Lazy):
            found.update(f"{leaf.dtype}{leaf.shape}{leaf.source}".encode())
            continue
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        x = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        found.update(f"{x.dtype}{x.shape}".encode())
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
