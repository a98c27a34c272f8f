"""A safetensors file that is written tensor by tensor, completely or not at all."""

from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np

from .._errors import fail
from .._files import Path, Replacement
from ._safetensors import placed, to_stored, write_header


class Writer:
    """A file that is written tensor by tensor, in any order. A context manager.

    It is put in place once every tensor is written. If an error occurs before that, nothing
    changes.

    Args:
      path: path of the file.
      tensors: dtype and shape of each tensor, by name.
      metadata: metadata of the file.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[np.dtype, Sequence[int]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._file = Replacement("save", path)
        self._tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
        self._entries = placed((name, *item) for name, item in self._tensors.items())
        self._head = write_header(self._entries, metadata)
        self._missing = dict.fromkeys(self._entries)

    def __enter__(self) -> "Writer":
        self._file.__enter__()
        try:
            self._file.write(0, self._head)
        except BaseException as error:
            self._file.__exit__(type(error), error, None)
            raise
        return self

    def write(self, name: str, x: np.ndarray) -> None:
        """Writes a tensor, with the dtype and shape that were announced."""
        dtype, shape = self._tensors[name]
        if x.dtype.name != dtype.name or x.shape != shape:
            raise fail(
                "save",
                f"the tensor {name!r} differs from what was announced.",
                given=f"{x.dtype.name}{list(x.shape)}",
                expected=f"{dtype.name}{list(shape)}",
                fix="make both from one function, for example with jax.eval_shape.",
            )
        numbers = np.ascontiguousarray(to_stored(x)).reshape(-1).view(np.uint8)
        self._file.write(len(self._head) + self._entries[name].start, numbers.data)
        self._missing.pop(name, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._check_complete()
                self._file.commit()
        finally:
            self._file.__exit__(kind, error, where)

    def _check_complete(self) -> None:
        if self._missing:
            raise fail(
                "save",
                "not all tensors were written.",
                given=f"no data for {next(iter(self._missing), None)!r}",
                expected=f"{len(self._entries)} tensors",
                fix="write each of them.",
            )
