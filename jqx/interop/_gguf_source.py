"""An open GGUF file, whose tensors are read one by one or mapped into memory."""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from .._errors import message
from .._files import Path
from ._bytes import Bytes
from ._gguf_blocks import FORMATS, name_of
from ._gguf_header import read_header
from ._safetensors import Entry

MAGIC = b"GGUF"

_U8 = np.dtype(np.uint8)


class GgufSource:
    """An open GGUF file. Quantized tensors are bytes, `(..., bytes of a row)`.

    Attributes:
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
        self._bytes = Bytes(path)
        self.path = self._bytes.path
        self.config: Mapping[str, Any] | None = None
        self.entries: dict[str, Entry] = {}
        self.kinds: dict[str, int] = {}
        try:
            whole = self._bytes.view("", 0, self._bytes.size)
            self.metadata, found = read_header(self.path, whole)
        except BaseException:
            self.__exit__()
            raise
        for name, (kind, shape, start, stop) in found.items():
            self.kinds[name] = kind
            form = FORMATS.get(kind)
            if form is not None and form.form is not None:
                row = shape[-1] // form.size * form.fields.itemsize
                shape = (*shape[:-1], row)
            self.entries[name] = Entry(name_of(kind), shape, start, start if stop is None else stop)

    def __exit__(self, *_: object) -> None:
        self._bytes.__exit__()

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
        return self._array(name, self._bytes.read(name, *self._place(name)))

    def view(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor, mapped into memory."""
        return self._array(name, self._bytes.view(name, *self._place(name)))

    def _place(self, name: str) -> tuple[int, int]:
        entry = self.entries[name]
        return entry.start, entry.stop - entry.start

    def _array(self, name: str, raw: np.ndarray) -> np.ndarray:
        return raw.view(self.dtype(name)).reshape(self.entries[name].shape)

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            message(
                "interop.read",
                f"the tensor {name!r} of {self.path!r} has a type that jqx does not read.",
                given=self.entries[name].dtype,
                expected=f"one of {', '.join(form.name for form in FORMATS.values())}",
                mend="convert the file with llama-quantize of llama.cpp (--allow-requantize), for "
                "example to Q4_K; jqx.interop.read_gguf reads the other tensors of this file.",
            )
        )
