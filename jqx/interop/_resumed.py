"""A safetensors file whose write continues after an interruption.

Data is written to a temporary file in the folder of the target, with each tensor at its final
offset. A journal next to it records which leaves were started, and which are complete and what they
were made from. The last entry of a leaf counts. Several processes can write leaves of one file,
each with a journal; the last process puts the file in place.

Entries are numbered: a process starts after the largest number in all journals. Clocks are not
used, as they may step back.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .._errors import fail
from .._files import Path, Replacement, lock, unlock
from ._writer import Writer

Share = tuple[int, int]
"""The index of this process, and the number of processes that write."""


class _Kept(Replacement):
    """A replacement whose file has a name that the next run knows. It stays until complete."""

    def __init__(self, function: str, path: Path) -> None:
        super().__init__(function, path)
        name = self._target.name
        own = hashlib.sha256(name.encode()).hexdigest()[:8]
        self._part = self._target.with_name(f"{name[:50]}.{own}.part")

    @property
    def part(self) -> pathlib.Path:
        """Path of the temporary file."""
        return self._part

    def __enter__(self) -> "_Kept":
        mode = 0o666 if self._old is None else 0o600  # less the umask
        with self._written():
            self._file = os.fdopen(os.open(self._part, os.O_RDWR | os.O_CREAT, mode), "r+b")
        return self

    def begins_with(self, head: bytes) -> bool:
        """Returns whether the file begins with `head`."""
        with self._written():
            self._file.seek(0)
            return self._file.read(len(head)) == head

    def begin(self, head: bytes) -> None:
        """Empties the file and writes its header."""
        with self._written():
            self._file.truncate(0)
            self.write(0, head)
            self._file.flush()

    def keep(self) -> None:
        """Flushes the written data to the disk."""
        with self._written():
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lets only one process at a time run the block."""
        lock(self._file, wait=True)
        try:
            yield
        finally:
            unlock(self._file)

    def is_there(self) -> bool:
        """Returns whether no other process has put the file in place."""
        try:
            return os.path.samestat(os.stat(self._part), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class ResumedWriter(Writer):
    """A file that is written leaf by leaf. A context manager.

    Args:
      path: path of the file.
      tensors: dtype and shape of each tensor, by name.
      metadata: metadata of the file.
      leaves: paths of all leaves.
      share: the index of this process, and the number of processes.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[np.dtype, Sequence[int]]],
        metadata: Mapping[str, str],
        leaves: Sequence[str],
        share: Share = (0, 1),
    ) -> None:
        super().__init__(path, tensors, metadata)
        self._file: _Kept = _Kept("save", path)
        self._leaves, self._share = leaves, share
        self._known: dict[str, str | None] = {}
        self._number = 0

    def __enter__(self) -> "ResumedWriter":
        self._file.__enter__()
        try:
            with self._file.alone():
                if not self._file.begins_with(self._head):
                    for path in self._journals():
                        with open(path, "ab") as journal:
                            self._check_free(journal)
                        path.unlink()
                    self._file.begin(self._head)
                self._journal = open(self._path_of(self._share[0]), "ab")
            self._check_free(self._journal)
            self._journal.write(b"\n")  # after a line that may be incomplete
            entries = self._journaled()
            self._known, self._number = _last(entries), max((n for n, *_ in entries), default=0)
        except BaseException as error:
            self._file.__exit__(type(error), error, None)
            raise
        return self

    def has(self, leaf: str, source: str) -> bool:
        """Returns whether a leaf made from the same source is already written."""
        return bool(source) and self._known.get(leaf) == source

    def is_own(self, place: int) -> bool:
        """Returns whether this process writes the leaf at a place."""
        return place % self._share[1] == self._share[0]

    def begin(self, leaf: str) -> None:
        """Records that a leaf is being written; its previous data is lost."""
        self._say(leaf, None)

    def done(self, leaf: str, source: str) -> None:
        """Records that all tensors of a leaf are written."""
        self._file.keep()
        self._say(leaf, source)

    def _say(self, leaf: str, source: str | None) -> None:
        self._number += 1
        self._journal.write(json.dumps([leaf, source, self._number]).encode() + b"\n")
        self._journal.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with self._file.alone():
                    if self._file.is_there() and None not in map(
                        _last(self._journaled()).get, self._leaves
                    ):
                        self._file.commit()
                        for journal in self._journals():
                            journal.unlink()
        finally:
            self._journal.close()
            self._file.__exit__(kind, error, where)

    def _journaled(self) -> list[tuple[int, str, str | None]]:
        """Returns number, leaf and source of the entries of all journals. The source is `None` for
        a leaf that was only started. In one journal numbers increase, whatever is written there.
        Incomplete lines are ignored.
        """
        found = []
        for journal in self._journals():
            last = 0
            for line in journal.read_bytes().split(b"\n")[:-1]:
                with contextlib.suppress(ValueError):
                    leaf, source, number = json.loads(line)
                    last = max(number, last + 1)
                    found.append((last, leaf, source))
        return found

    def _check_free(self, journal: Any) -> None:
        if not lock(journal, wait=False):
            raise fail(
                "save",
                "another process writes this file.",
                given=f"{str(self._file.part)!r}, which is being written",
                expected="one process for each share of a file",
                fix="wait for it, or pass share=(i, n) to n processes, each with another i.",
            )

    def _path_of(self, index: int) -> pathlib.Path:
        return self._file.part.with_name(f"{self._file.part.name}.{index}")

    def _journals(self) -> list[pathlib.Path]:
        part = self._file.part
        found = part.parent.glob(f"{_glob_of(part.name)}.*")
        return [path for path in found if path.name[len(part.name) + 1 :].isdigit()]


def _last(entries: list[tuple[int, str, str | None]]) -> dict[str, str | None]:
    """Returns the last source of each leaf."""
    return {leaf: source for _, leaf, source in sorted(entries, key=lambda entry: entry[0])}


def _glob_of(name: str) -> str:
    """Returns a pattern that matches only this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
