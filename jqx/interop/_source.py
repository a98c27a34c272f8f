"""Sources that are opened for reading: a file of tensors, or a folder of files with its config."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .._checks import shown
from .._errors import fail
from .._files import Path, as_path, naming_file
from ._bytes import Bytes
from ._config import read_config, read_json, wrapped
from ._gguf_source import MAGIC, GgufSource
from ._orbax import OrbaxSource, is_orbax
from ._reader import Reader
from ._safetensors import KEY, Entry

INDEX = "model.safetensors.index.json"

_ONE = "model.safetensors"

_PART = re.compile(r"(?P<model>.*)-\d+-of-0*(?P<count>[1-9]\d{0,8})\.safetensors", re.DOTALL)
"""The name of one of several files."""


class Source(Protocol):
    """Tensors by name, which are read one by one. See `Reader`.

    Attributes:
      describes_tree: whether its metadata may describe a tree of jqx.
      asked: whether the caller passed the config, and thus knows what the tensors are.
    """

    asked: bool

    describes_tree: bool
    path: str
    metadata: dict[str, Any]
    entries: dict[str, Entry]
    config: Mapping[str, Any] | None

    def dtype(self, name: str) -> np.dtype: ...
    def check_dtype(self, name: str, dtype: np.dtype) -> None: ...
    def read(self, name: str, dtype: np.dtype) -> np.ndarray: ...
    def view(self, name: str, dtype: np.dtype) -> np.ndarray: ...
    def __exit__(self, *_: object) -> None: ...


class Folder:
    """A folder in the layout of Hugging Face: `config.json`, and one or more safetensors files,
    which `model.safetensors.index.json` lists.

    Raises:
      OSError: if a file cannot be opened, or there are no files.
      ValueError: if the files are not those in the index, or hold other tensors.
    """

    describes_tree, asked = True, False

    def __init__(self, path: str) -> None:
        self.path = path
        self.config: Mapping[str, Any] | None = read_config(path)
        self._open = contextlib.ExitStack()
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self._readers: dict[str, Reader] = {}
        try:
            for name, wanted in _files_of(path).items():
                self._add(name, wanted)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor in its file."""
        return self._readers[name].dtype(name)

    def check_dtype(self, name: str, dtype: np.dtype) -> None:
        """Checks that a tensor is stored in the way of arrays with a dtype."""
        self._readers[name].check_dtype(name, dtype)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a copy of a tensor."""
        return self._readers[name].read(name, dtype)

    def view(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor, mapped into memory."""
        return self._readers[name].view(name, dtype)

    def _add(self, file: str, wanted: set[str] | None) -> None:
        """Opens a file and adds its tensors to those of the folder."""
        reader = self._open.enter_context(Reader(os.path.join(self.path, file)))
        missing = (wanted or set()) - {*reader.entries}
        if missing:
            raise fail(
                "interop.read",
                f"{file!r} does not hold the tensors in the index.",
                given=f"no tensor {shown(min(missing, default=''))}",
                expected=f"the tensors that {INDEX} lists for it",
                fix="download the folder again; leave no files of another model in it.",
            )
        twice = {*self.entries} & {*reader.entries}
        if twice:
            raise fail(
                "interop.read",
                f"{self.path!r} has a tensor twice.",
                given=f"the tensor {shown(min(twice, default=''))} in {file!r} and in another file",
                expected="each tensor in one file",
                fix="download the folder again; leave no files of another model in it.",
            )
        self.metadata.update(reader.metadata)
        self.entries.update(reader.entries)
        self._readers.update(dict.fromkeys(reader.entries, reader))


def files_of(path: str) -> str:
    """Returns a fingerprint of the state of a file, or of all files of a folder."""
    real = os.path.realpath(path)
    names = [os.path.join(base, name) for base, _, own in os.walk(real) for name in own]
    stats = [(os.path.relpath(name, real), os.stat(name)) for name in sorted(names or [real])]
    states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return f"{real} {states}"


def open_source(path: Path, config: Mapping[str, Any] | None) -> Source:
    """Opens a file, or a folder of files.

    Args:
      path: path of the file or folder.
      config: replaces the config of the folder; a file has none.

    Raises:
      OSError: if it cannot be opened.
      ValueError: if it has no format that jqx reads.
    """
    text = as_path("load", path)
    kind = _kind_of(text)
    if config is not None and kind not in (Folder, Reader):
        raise fail(
            "load",
            "`config` has no use.",
            given=f"a config, and {'the GGUF file' if kind is GgufSource else 'the Orbax folder'} "
            f"{text!r}",
            expected="config=None: the file describes each tensor",
            fix="leave it out.",
        )
    source: Source = kind(text)
    source.asked = config is not None
    if kind is Reader and config is None:
        _check_whole(source)
    if config is not None:
        source.config = wrapped(config, source.entries)
    return source


def _check_whole(source: Source) -> None:
    """Checks that a file by itself is not one of several, by its name."""
    part = _PART.fullmatch(os.path.basename(source.path))
    if part is not None and not int(part["count"]) < 2 and KEY not in source.metadata:
        raise fail(
            "interop.read",
            f"{source.path!r} is only a part of a model.",
            given=f"one of {'' if part is None else part['count']} files, as its name says",
            expected=f"the folder with all files and {INDEX}",
            fix="pass the folder; config={} reads the tensors of this file alone, as plain arrays.",
        )


def _kind_of(path: str) -> type:
    """Returns the class that opens a file or folder."""
    if os.path.isdir(path):
        return OrbaxSource if is_orbax(path) else Folder
    with Bytes(path) as file:
        return GgufSource if file.head(len(MAGIC)) == MAGIC else Reader


def _files_of(folder: str) -> dict[str, set[str] | None]:
    """Returns the files of a folder, each with its tensors if an index lists them."""
    index = os.path.join(folder, INDEX)
    if os.path.lexists(index):
        files = _listed(index)
        one = os.path.lexists(os.path.join(folder, _ONE)) and _ONE not in files
        _check_chosen(not one, folder, f"{_ONE!r}, and {INDEX} of other files")
        return files
    with naming_file("interop.read", folder, "cannot be opened", "a readable folder"):
        names = sorted(os.listdir(folder))
    found = [name for name in names if name.endswith(".safetensors")]
    wanted = [_ONE] if _ONE in found else found
    parts = [part for name in wanted if (part := _PART.fullmatch(name)) is not None]
    count = int(parts[0]["count"]) if parts else 1
    given = f"{', '.join(map(repr, found[:4]))} and no {INDEX}" if found else _others(names)
    whole = len(parts) == len(wanted) and len({part["model"] for part in parts}) == 1
    kind = ValueError if found else IsADirectoryError
    _check_chosen(len(wanted) == 1 or whole, folder, given, kind)
    if len(wanted) != count:
        raise fail(
            "interop.read",
            f"{folder!r} lacks files of the model.",
            given=given,
            expected=f"all {count} files",
            fix="download the folder again; or pass a file and config={}, to read its tensors as "
            "plain arrays.",
        )
    return dict.fromkeys(wanted)


def _check_chosen(
    holds: bool, folder: str, given: str, error: type[Exception] = ValueError
) -> None:
    if not holds:
        raise fail(
            "interop.read",
            f"{folder!r} does not say which files are the model's.",
            given=given,
            expected=f"{_ONE}, one safetensors file, or {INDEX} with several files",
            fix="pass the file itself, and config=json.load(...) of the folder's config if it is "
            "quantized; if the checkpoint has another form (.bin, .pt), save it as safetensors "
            "first.",
            error=error,
        )


def _others(names: Sequence[str]) -> str:
    return f"a folder of {', '.join(map(repr, names[:6])) or 'nothing'}"


def _listed(index: str) -> dict[str, set[str] | None]:
    """Returns the tensors in each file of an index, after checking that these are in the folder."""
    data = read_json(index)
    weights = data.get("weight_map") if isinstance(data, dict) else None
    fits = isinstance(weights, dict) and all(
        isinstance(file, str)
        and file == os.path.basename(file)
        and file.endswith(".safetensors")
        and "\0" not in file
        for file in weights.values()
    )
    if not (fits and weights):
        raise fail(
            "interop.read",
            f"{index!r} is not an index of tensors.",
            given="no weight_map of names of safetensors files in the same folder",
            expected='{"weight_map": {"name of a tensor": "model-00001-of-00002.safetensors"}}',
            fix="download the folder again.",
        )
    assert isinstance(weights, dict)
    files: dict[str, set[str]] = {}
    for name, file in weights.items():
        files.setdefault(file, set()).add(name)
    return {**files}
