"""An open model in GGUF, whose tensors are read one by one or mapped into memory."""

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from .._errors import fail
from .._files import Path, as_path
from ._bytes import Bytes
from ._gguf_blocks import FORMATS, name_of
from ._gguf_parts import read_parts
from ._safetensors import Entry

MAGIC = b"GGUF"

_U8 = np.dtype(np.uint8)


class GgufSource:
    """An open model in GGUF. Quantized tensors are bytes, `(..., bytes of a row)`.

    Attributes:
      files: paths of all files of the model.
      metadata: as in `jqx.interop.Gguf`.
      entries: type, shape and offset of each tensor.
      kinds: number of the type of each tensor.
      config: none.
      describes_tree, asked: see `Source`.

    Raises:
      OSError: if the file cannot be opened or is not a regular file.
      ValueError: if it is not a GGUF file that can be read.
    """

    describes_tree, asked = False, False

    def __init__(self, path: Path) -> None:
        self.path = as_path("load", path)
        self.config: Mapping[str, Any] | None = None
        self.entries: dict[str, Entry] = {}
        self.kinds: dict[str, int] = {}
        self._open = contextlib.ExitStack()
        self._bytes: dict[str, Bytes] = {}
        try:
            self.metadata, found, self.files = read_parts(self.path, self._mapped)
        except BaseException:
            self.__exit__()
            raise
        for name, (file, _, (kind, shape, start, stop)) in found.items():
            self._bytes[name], self.kinds[name] = file, kind
            form = FORMATS.get(kind)
            if form is not None and form.form is not None:
                row = shape[-1] // form.size * form.fields.itemsize
                shape = (*shape[:-1], row)
            self.entries[name] = Entry(name_of(kind), shape, start, start if stop is None else stop)

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _mapped(self, path: str) -> tuple[Bytes, np.ndarray]:
        file = Bytes(path)
        self._open.callback(file.__exit__)
        return file, file.view("", 0, file.size)

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor; for quantized tensors, that of bytes."""
        form = FORMATS.get(self.kinds[name])
        if form is None:
            self._refuse(name)
        return form.fields if form.form is None else _U8

    def check_dtype(self, name: str, dtype: np.dtype) -> None:
        """Checks that a tensor is stored in the way of arrays with a dtype."""
        assert self.dtype(name) == dtype, f"{name}: {self.dtype(name)} is not {dtype}"

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a copy of a tensor."""
        return self._array(name, self._bytes[name].read(name, *self._place(name)))

    def view(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor, mapped into memory."""
        return self._array(name, self._bytes[name].view(name, *self._place(name)))

    def _place(self, name: str) -> tuple[int, int]:
        entry = self.entries[name]
        return entry.start, entry.stop - entry.start

    def _array(self, name: str, raw: np.ndarray) -> np.ndarray:
        return raw.view(self.dtype(name)).reshape(self.entries[name].shape)

    def _refuse(self, name: str) -> NoReturn:
        raise fail(
            "interop.read",
            f"the tensor {name!r} of {self.path!r} has a type that jqx does not read.",
            given=self.entries[name].dtype,
            expected=f"one of {', '.join(form.name for form in FORMATS.values())}",
            fix="convert the file with llama-quantize of llama.cpp (--allow-requantize), for "
            "example to Q4_K; jqx.interop.read_gguf reads the other tensors of this file.",
        )
