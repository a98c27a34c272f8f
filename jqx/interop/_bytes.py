"""An open file of tensors, whose parts are read or mapped into memory."""

import os
import threading
from typing import NoReturn

import numpy as np

from .._errors import fail
from .._files import Path, as_path, open_regular

_ALIGNED = 64
"""Alignment in bytes of JAX arrays on CPUs."""


class Bytes:
    """An open file. A context manager.

    Attributes:
      path: path of the file.

    Raises:
      OSError: if the file cannot be opened or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = as_path("load", path)
        self._lock = threading.Lock()
        self._file = open_regular("load", self.path)

    def __enter__(self) -> "Bytes":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def head(self, size: int) -> bytes:
        """Returns the first bytes; fewer if the file is shorter."""
        with self._lock:
            self._file.seek(0)
            return self._file.read(size)

    def read(self, name: str, place: int, size: int) -> np.ndarray:
        """Returns a copy of the bytes of the tensor `name`, from a place on."""
        self._check_open(name)
        raw, done = _aligned(size), 0
        with self._lock:
            self._file.seek(place)
            while done < size:
                count = self._file.readinto(raw[done:].data)
                if not count:
                    self._refuse_shorter(name, place + size)
                done += count
        return raw

    def view(self, name: str, place: int, size: int) -> np.ndarray:
        """Returns bytes mapped into memory: read when they are used, dropped when freed."""
        self._check_open(name)
        if self.size < place + size:
            self._refuse_shorter(name, place + size)
        raw = np.memmap(self._file, np.uint8, "r", place, (size,)) if size else np.empty(0, "u1")
        return np.asarray(raw)

    def _check_open(self, name: str) -> None:
        if self._file.closed:
            raise fail(
                "load",
                f"{self.path!r} is closed.",
                given=f"the tensor {name!r} of a closed file",
                expected="an open file",
                fix="read inside the `with` block.",
            )

    def _refuse_shorter(self, name: str, stop: int) -> NoReturn:
        raise fail(
            "load",
            f"{self.path!r} has become shorter while it was open.",
            given=f"{self.size} bytes",
            expected=f"{stop} bytes, up to the tensor {name!r}",
            fix="copy or download it again, and put a new file in its place only as a whole.",
            error=OSError,
        )


def _aligned(size: int) -> np.ndarray:
    """Allocates bytes with the alignment that a JAX array needs to use them without a copy."""
    raw = np.empty(size + _ALIGNED, np.uint8)
    return raw[-raw.ctypes.data % _ALIGNED :][:size]
