"""An open safetensors file, whose tensors are read one by one or mapped into memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._errors import fail
from .._files import Path
from ._bytes import Bytes
from ._safetensors import (
    DTYPES,
    HEADER_LIMIT,
    NAMES,
    Entry,
    check,
    from_stored,
    read_header,
    shape_of,
    stored_dtype,
    stored_shape,
)


class Reader:
    """An open file: its tensors by name, and its metadata. A context manager.

    Attributes:
      entries: dtype, shape and offset of each tensor.
      metadata: metadata of the file.
      config: `None`; a file has no config of a model.
      describes_tree, asked: see `Source`.

    Raises:
      OSError: if the file cannot be opened or is not a regular file.
      ValueError: if it is not a safetensors file, or is truncated.
    """

    metadata: dict[str, Any]
    entries: dict[str, Entry]
    describes_tree, asked = True, False

    def __init__(self, path: Path) -> None:
        self._bytes = Bytes(path)
        self.path = self._bytes.path
        self.config: Mapping[str, Any] | None = None
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.__exit__()

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor in the file."""
        stored = self.entries[name].dtype
        if stored not in DTYPES:
            raise fail(
                "load",
                f"the tensor {name!r} has a dtype that jqx does not read.",
                given=stored,
                expected=f"one of {', '.join(DTYPES)}",
                fix="convert it with the library that wrote it.",
            )
        return DTYPES[stored]

    def check_dtype(self, name: str, dtype: np.dtype) -> None:
        """Checks that a tensor is stored in the way of arrays with a dtype."""
        shape = self.entries[name].shape
        if not (
            self.dtype(name) == stored_dtype(dtype)
            and shape == stored_shape(dtype, shape_of(self.entries[name], dtype))
        ):
            raise fail(
                "load",
                f"the tensor {name!r} does not have the dtype in the description of the tree.",
                given=f"{self.entries[name].dtype}{list(shape)} for {dtype.name}",
                expected=f"{NAMES.get(getattr(stored_dtype(dtype), 'name', ''))}",
                fix="write the file again with jqx.save.",
            )

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a copy of a tensor, in the dtype in the description of the tree."""
        return self._array(name, self._bytes.read(name, *self._place(name)), dtype)

    def view(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor, mapped into memory: read when it is used, dropped when it is freed."""
        return self._array(name, self._bytes.view(name, *self._place(name)), dtype)

    def _place(self, name: str) -> tuple[int, int]:
        """Returns the offset and the size of the bytes of a tensor."""
        entry = self.entries[name]
        return self._first + entry.start, entry.stop - entry.start

    def _array(self, name: str, raw: np.ndarray, dtype: np.dtype) -> np.ndarray:
        x = from_stored(name, raw, self.dtype(name), dtype)
        return x.reshape(shape_of(self.entries[name], dtype))

    def _open(self) -> None:
        """Reads the header, and checks that the file has the length in the header."""
        size = self._bytes.size
        length = int.from_bytes(self._bytes.head(8), "little")
        check(self.path, size >= 8, f"a file of {size} bytes")
        check(self.path, length <= HEADER_LIMIT, f"a header of {length} bytes")
        check(self.path, 8 + length <= size, f"a header of {length} bytes in a file of {size}")
        self._first = 8 + length
        metadata, self.entries = read_header(self.path, self._bytes.head(8 + length)[8:])
        self.metadata = {**metadata}
        stop = max((entry.stop for entry in self.entries.values()), default=0)
        if not size - self._first >= stop:
            raise fail(
                "load",
                f"{self.path!r} is truncated.",
                given=f"{size - self._first} bytes of numbers",
                expected=f"{stop} bytes",
                fix="copy or download it again.",
            )
        rest = size - self._first - stop
        check(self.path, rest == 0, f"{rest} bytes that do not belong to a tensor")
