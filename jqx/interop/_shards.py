"""Writes a folder of safetensors files with an index, completely or not at all."""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from .._errors import fail
from .._files import Path, as_path, lock, naming_file, new_part, remove_left
from ._encoded import Tensors
from ._safetensors import stored_dtype
from ._source import INDEX
from ._writer import Writer

_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux."""

_HERE = -100
"""AT_FDCWD."""


class FolderWriter:
    """A folder that is written tensor by tensor, in any order. A context manager.

    It is made under a temporary name and put in place when everything is written. If an error
    occurs before that, nothing changes. What a killed process has left is removed by the next
    writer of the same folder, as in `Replacement`. An old folder is replaced in one step if the
    system can exchange two names (Linux); otherwise the old folder is moved aside first.

    Args:
      path: path of the folder.
      tensors: dtype and shape of each tensor, by name.
      files: other files in the folder, by name.
      limit: maximum size in bytes of a file of tensors; a larger tensor has a separate file.
      metadata: metadata of each file of tensors.
      overwrite: whether to replace an old folder, or an empty one.
    """

    def __init__(
        self,
        path: Path,
        tensors: Tensors,
        files: Mapping[str, bytes],
        *,
        limit: int,
        metadata: Mapping[str, str],
        overwrite: bool,
    ) -> None:
        self._target = pathlib.Path(os.path.realpath(as_path("interop.write", path)))
        self._files, self._overwrite = files, overwrite
        self._check_target()
        self._part = new_part(self._target)
        self._shards = _shards(tensors, limit)
        self._place = {name: file for file, names in self._shards.items() for name in names}
        self._tensors, self._metadata = tensors, metadata
        self._open = contextlib.ExitStack()
        self._writers: dict[str, Writer] = {}

    def __enter__(self) -> "FolderWriter":
        with self._written():
            remove_left(self._target)
            self._locked = _new_folder(self._part)
        try:
            for file, names in self._shards.items():
                own = {name: self._tensors[name] for name in names}
                writer = Writer(self._part / file, own, self._metadata)
                self._writers[file] = self._open.enter_context(writer)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def write(self, name: str, x: np.ndarray) -> None:
        """Writes a tensor, with the dtype and shape that were announced."""
        self._writers[self._place[name]].write(name, x)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            self._open.__exit__(kind, error, where)  # raises unless each file is complete
            if kind is None:
                for name, data in {**self._files, **self._index()}.items():
                    _write_synced(self._part / name, data)
                _sync(self._part)
                self._commit()
        finally:
            shutil.rmtree(self._part, ignore_errors=True)
            if self._locked is not None:
                os.close(self._locked)

    def _commit(self) -> None:
        """Puts the folder at `path`; an old folder then has the temporary name."""
        self._check_target()
        with self._written():
            if not self._target.exists():
                os.rename(self._part, self._target)
            elif not _exchange(self._part, self._target):
                aside = self._target.with_name(f"{self._part.name}.old")
                os.rename(self._target, aside)
                os.rename(self._part, self._target)
                shutil.rmtree(aside, ignore_errors=True)
        _sync(self._target.parent)

    def _written(self) -> contextlib.AbstractContextManager[None]:
        expected = "a place where folders can be made"
        return naming_file("interop.write", str(self._target), "cannot be written", expected)

    def _check_target(self) -> None:
        is_there = os.path.lexists(self._target)
        if is_there and not self._target.is_dir():
            raise fail(
                "interop.write",
                f"{str(self._target)!r} is not a folder.",
                given="a file of that name",
                expected="a folder, or nothing",
                fix="choose another name.",
                error=FileExistsError,
            )
        if is_there and not self._overwrite and any(self._target.iterdir()):
            raise fail(
                "interop.write",
                f"{str(self._target)!r} exists already.",
                given="a folder that is not empty",
                expected="a new folder",
                fix="choose another name, or pass overwrite=True, which replaces all its contents.",
                error=FileExistsError,
            )
        if not self._target.parent.is_dir():
            raise fail(
                "interop.write",
                f"{str(self._target)!r} cannot be written.",
                given=f"there is no folder {str(self._target.parent)!r}",
                expected="an existing folder",
                fix="make it first, for example with os.makedirs.",
                error=FileNotFoundError,
            )

    def _index(self) -> dict[str, bytes]:
        """Returns the index, or nothing if there is only one file."""
        if len(self._shards) < 2:
            return {}
        total = sum(_size(*self._tensors[name]) for name in self._place)
        index = {"metadata": {"total_size": total}, "weight_map": self._place}
        return {INDEX: json.dumps(index, indent=1).encode()}


def _new_folder(path: pathlib.Path) -> int | None:
    """Makes a folder and locks it. Returns its number, which holds the lock; `None` if the system
    cannot lock folders.
    """
    while True:
        path.mkdir()
        number = None
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY)
            lock(number)
        if path.exists():  # nobody has removed it before it was locked
            return number
        if number is not None:
            os.close(number)


def _shards(tensors: Tensors, limit: int) -> dict[str, list[str]]:
    """Returns the names of the tensors in each file, in order."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, kind in tensors.items():
        own = _size(*kind)
        if parts[-1] and size + own > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += own
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(parts, 1)}


def _size(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    stored = stored_dtype(dtype)
    assert stored is not None
    size = stored.itemsize
    for n in shape:
        size *= n
    return size


def _write_synced(path: pathlib.Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: pathlib.Path) -> None:
    """Flushes the names in a folder to the disk, if the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(a: pathlib.Path, b: pathlib.Path) -> bool:
    """Exchanges two names in one step; `False` if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    return rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0
