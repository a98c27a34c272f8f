"""The files of a model in GGUF: one, or several that llama-gguf-split wrote.

Each file has its own header and tensors. The first has the metadata of the model; `split.no`,
`split.count` and `split.tensors.count` say how the files belong together. llama.cpp takes the first
and finds the others by their names.
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from .._checks import shown
from ._gguf_header import Entry, check, read_header

_NAME = re.compile(r"(?P<model>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MEND = (
    "pass the first file, with all others next to it; or merge them with llama-gguf-split --merge."
)

F = TypeVar("F")


def read_parts(
    path: str, mapped: Callable[[str], tuple[F, np.ndarray]]
) -> tuple[dict[str, Any], dict[str, tuple[F, np.ndarray, Entry]], list[str]]:
    """Returns the metadata of a model; its tensors by name, each with what `mapped` returns for its
    file; and the paths of its files.

    Args:
      path: path of the only file, or of the first.
      mapped: opens a file, and returns something for it and all its bytes.

    Raises:
      OSError: if a file cannot be opened.
      ValueError: if a file is not a GGUF file that can be read, or not one of the model.
    """
    file, data = mapped(path)
    metadata, entries = read_header(path, data)
    tensors = {name: (file, data, entry) for name, entry in entries.items()}
    paths = [path, *_others(path, metadata)]
    for no, other in enumerate(paths[1:], 1):
        file, data = mapped(other)
        known, entries = read_header(other, data)
        place = known.get("split.no"), known.get("split.count")
        _check(other, place == (no, len(paths)), known, f"file {no + 1} of {len(paths)}")
        twice = next((name for name in entries if name in tensors), None)
        check(other, twice is None, f"the tensor {shown(twice)}, as in another file", "others")
        tensors |= {name: (file, data, entry) for name, entry in entries.items()}
    count = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1:
        found = f"{len(tensors)} tensors in {len(paths)} files"
        check(path, count == len(tensors), found, f"{shown(count)}, as split.tensors.count", _MEND)
        metadata["split.count"] = np.uint16(0)  # as in files that llama-gguf-split has merged
    return metadata, tensors, paths


def _others(path: str, metadata: Mapping[str, Any]) -> list[str]:
    """Returns the paths of the other files of a model."""
    count = metadata.get("split.count", 0)
    if not isinstance(count, (int, np.integer)) or count < 2:
        return []
    folder, name = os.path.split(path)
    found = _NAME.fullmatch(name)
    first = found is not None and (int(found["no"]), int(found["count"])) == (1, count)
    wanted = f"the first, with a name such as model-00001-of-{count:05d}.gguf"
    _check(path, first and metadata.get("split.no") == 0, metadata, wanted)
    assert found is not None
    names = (f"{found['model']}-{i:05d}-of-{count:05d}.gguf" for i in range(2, count + 1))
    return [os.path.join(folder, other) for other in names]


def _check(path: str, holds: bool, metadata: Mapping[str, Any], expected: str) -> None:
    known = [f"split.{key} == {shown(metadata.get(f'split.{key}'))}" for key in ("no", "count")]
    check(path, holds, f"a part of a model, {' and '.join(known)}", expected, _MEND)
