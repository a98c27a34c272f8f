"""GGUF files: metadata and tensors, mapped into memory and dequantized one by one."""

from typing import Any, NoReturn

import numpy as np

from .._calls import called
from .._errors import fail, nesting
from .._files import Path, as_path, open_regular
from ._gguf_blocks import FORMATS, GgufBlocks, blocks_of, dequantized, name_of
from ._gguf_header import Entry
from ._gguf_parts import read_parts


class GgufTensor:
    """A tensor of a GGUF file. Its bytes are read when they are used.

    Attributes:
      name: its name in the file.
      shape: sizes of its axes, the size of a row last (files list them in reverse).
      format: name of its type, such as `"Q4_1"`.
    """

    def __init__(self, name: str, entry: Entry, data: np.ndarray) -> None:
        self.name: str = name
        self.shape: tuple[int, ...] = entry.shape
        self.format: str = name_of(entry.kind)
        self._kind, self._raw = entry.kind, data[entry.start : entry.stop]

    def __repr__(self) -> str:
        return f"GgufTensor({self.name!r}, {self.format}{list(self.shape)})"

    def dequantize(self) -> np.ndarray:
        """Returns the numbers in float32, as a new array; the codes are not kept.

        Each number is `scale * code + minimum`, rounded once. NaN and infinity are those of the
        file. A scale of 255 in MXFP4 is NaN, as in the standard (ggml uses 2**128).

        Raises:
          ValueError: if jqx does not read the type.
        """
        return dequantized(self.blocks()).reshape(self.shape)

    def blocks(self) -> GgufBlocks:
        """Returns the contents of the file: codes, and the scale and minimum of each block.

        Arrays are parts of the mapped file, read when they are used. Codes of fewer than 8 bits are
        copied, one per byte. Codes of Q4_0 are -8 to 7, of Q4_1 0 to 15, of Q8_0 -128 to 127, of
        MXFP4 twice the numbers of float4_e2m1, and of F32, F16 and BF16 the numbers.

        Raises:
          ValueError: if jqx does not read the type.
        """
        if self._kind not in FORMATS:
            self._refuse()
        form = FORMATS[self._kind]
        *rows, row = self.shape or (1,)
        return blocks_of(form, self._raw.view(form.fields).reshape(*rows, row // form.size))

    def _refuse(self) -> NoReturn:
        raise fail(
            "interop.read_gguf",
            f"the tensor {self.name!r} has a type that jqx does not read.",
            given=self.format,
            expected=f"one of {', '.join(known.name for known in FORMATS.values())}",
            fix="convert the file with llama-quantize of llama.cpp (--allow-requantize), for "
            "example to Q8_0 or F16; the other tensors of this file can be read.",
        )


class Gguf:
    """A GGUF file.

    Attributes:
      metadata: the metadata of the file, by key: Python strings, booleans and numbers (numbers of
        dtypes that `write` does not use for Python numbers are NumPy's), NumPy arrays, and lists of
        strings or of arrays.
      tensors: the tensors by name, in the order of the file.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> None:
        self.metadata, self.tensors = metadata, tensors

    def __repr__(self) -> str:
        return f"Gguf({len(self.tensors)} tensors, {len(self.metadata)} entries of metadata)"


@called("interop.read_gguf", 'pass for example jqx.interop.read_gguf("model.gguf").')
def read_gguf(path: Path) -> Gguf:
    """Opens a GGUF file (version 2 or 3, little-endian), the format of llama.cpp.

    Its metadata is read, and its tensors are mapped into memory: their bytes are read when they are
    used and never copied as a whole. F16, F32, F64, BF16, integers, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
    Q2_K to Q6_K and MXFP4 are supported. A file may have tensors of other types, which are an error
    when they are used. `jqx.load` and `jqx.interop.read` return the tensors of a file as QTensors.

    The file stays mapped as long as one of its tensors exists. If it is written to, its numbers
    change; if it is truncated, using what was beyond its end kills the process (SIGBUS). Map only
    files that nothing else writes.

    A model that llama-gguf-split has split into files is read as a whole: pass the first file.

    Names, shapes and the order of rows are those of the file. In files of Llama models, rows of the
    weights of queries and keys are permuted, so that rotary embeddings rotate adjacent pairs.

    Args:
      path: path of the file.

    Returns:
      A `Gguf`, with `metadata` and `tensors`; `tensors[name].dequantize()` is a NumPy array in
      float32, `tensors[name].blocks()` its codes, scales and minimums.

    Raises:
      OSError: if the file cannot be opened or is not a regular file.
      ValueError: if it is not a GGUF file, has another version or byte order, is truncated, or has
        invalid contents; when a tensor is used: if jqx does not read its type.

    Example:
      >>> import jqx, struct, tempfile
      >>> info = struct.pack("<Q1sIQIQ", 1, b"w", 1, 2, 0, 0)  # name, 1 axis of 2, F32, at 0
      >>> head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
      >>> path = tempfile.mkdtemp() + "/model.gguf"
      >>> _ = open(path, "wb").write(head.ljust(64, b"-") + struct.pack("<2f", 1.5, -2.0))
      >>> file = jqx.interop.read_gguf(path)
      >>> file.tensors["w"], file.tensors["w"].dequantize()
      (GgufTensor('w', F32[2]), array([ 1.5, -2. ], dtype=float32))
    """
    named = as_path("interop.read_gguf", path)
    with nesting("interop.read_gguf"):
        metadata, tensors, _ = read_parts(named, _mapped)
    return Gguf(metadata, {name: GgufTensor(name, e, x) for name, (_, x, e) in tensors.items()})


def _mapped(path: str) -> tuple[None, np.ndarray]:
    with open_regular("interop.read_gguf", path) as file:
        empty = not file.peek(1)
        return None, np.empty(0, np.uint8) if empty else np.asarray(np.memmap(file, np.uint8, "r"))
