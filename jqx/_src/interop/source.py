"""Opens a file of tensors, or a folder of files with its config, and finds its format."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..checks import shown
from ..errors import fail, some
from ..files import Path, as_path, naming_file
from .bitsandbytes import BITSANDBYTES_MARKS, bitsandbytes_leaves
from .codec import CodedLeaf
from .compressed_tensors import COMPRESSED_MARKS, compressed_leaves, keeps_weights
from .config import method_of, quantization_of, read_config, read_json, wrapped
from .fp8 import FP8_MARKS, MXFP4_MARKS, fp8_leaves, mxfp4_leaves
from .gguf import MAGIC, GgufSource, gguf_leaves
from .gptq import AWQ_MARKS, GPTQ_MARKS, auto_round_leaves, awq_leaves, gptq_leaves
from .mlx import MLX_MARKS, mlx_leaves
from .orbax import OrbaxSource, is_orbax, read_tree
from .safetensors import KEY, Bytes, Entry, Reader, Source
from .tree import StoredArray

INDEX = "model.safetensors.index.json"

_AGAIN = "download the folder again; leave no files of another model in it."

_ONE = "model.safetensors"

_PART = re.compile(r"(?P<model>.*)-\d+-of-0*(?P<count>[1-9]\d{0,8})\.safetensors", re.DOTALL)
"""The name of one of several files."""


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
            for name, listed in _files_of(path).items():
                self._add(name, listed)
        except BaseException:
            self._open.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor in its file."""
        return self._readers[name].dtype(name)

    def read(self, name: str, dtype: np.dtype, *, mapped: bool = False) -> np.ndarray:
        """Returns a copy of a tensor, or the tensor mapped into memory."""
        return self._readers[name].read(name, dtype, mapped=mapped)

    def _add(self, file: str, listed: set[str] | None) -> None:
        """Opens a file and adds its tensors to those of the folder."""
        reader = self._open.enter_context(Reader(os.path.join(self.path, file)))
        missing = (listed or set()) - {*reader.entries}
        if missing:
            problem = f"{file!r} lacks the tensor {shown(min(missing))} of {INDEX}."
            raise fail("interop.read", problem, fix=_AGAIN)
        twice = {*self.entries} & {*reader.entries}
        if twice:
            problem = f"{self.path!r} has {shown(min(twice))} in {file!r} and in another file."
            raise fail("interop.read", problem, fix=_AGAIN)
        self.metadata.update(reader.metadata)
        self.entries.update(reader.entries)
        self._readers.update(dict.fromkeys(reader.entries, reader))


def files_of(path: str) -> str:
    """Returns a fingerprint of the state of a file, or of all files of a folder."""
    real = os.path.realpath(path)
    names = [os.path.join(base, name) for base, _, files in os.walk(real) for name in files]
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
    if os.path.isdir(text):
        kind: Any = OrbaxSource if is_orbax(text) else Folder
    else:
        with Bytes(text) as file:
            kind = GgufSource if file.head(len(MAGIC)) == MAGIC else Reader
    if config is not None and kind not in (Folder, Reader):
        problem = f"`config` has no use for {text!r}: the file describes each tensor."
        raise fail("load", problem, fix="leave it out.")
    source: Source = kind(text)
    source.asked = config is not None
    part = _PART.fullmatch(os.path.basename(text))
    if config is not None:
        source.config = wrapped(config, source.entries)
    elif kind is Reader and part and int(part["count"]) > 1 and KEY not in source.metadata:
        problem = f"{text!r} is only one of {part['count']} files of a model by its name."
        fix = "pass the folder; config={} reads the tensors of this file alone, as plain arrays."
        raise fail("interop.read", problem, fix=fix)
    return source


def _files_of(folder: str) -> dict[str, set[str] | None]:
    """Returns the files of a folder, each with its tensors if an index lists them."""
    index = os.path.join(folder, INDEX)
    if os.path.lexists(index):
        files = _listed(index)
        if os.path.lexists(os.path.join(folder, _ONE)) and _ONE not in files:
            raise _ambiguous(folder, f"{_ONE!r}, and {INDEX} of other files")
        return files
    with naming_file("interop.read", folder, "cannot be opened", "a readable folder"):
        names = sorted(os.listdir(folder))
    tensor_files = [name for name in names if name.endswith(".safetensors")]
    files_to_read = [_ONE] if _ONE in tensor_files else tensor_files
    parts = [part for name in files_to_read if (part := _PART.fullmatch(name)) is not None]
    count = int(parts[0]["count"]) if parts else 1
    detail = f"a folder of {some(map(repr, names))}"
    if tensor_files:
        detail = f"{', '.join(map(repr, tensor_files[:4]))} and no {INDEX}"
    complete = len(parts) == len(files_to_read) and len({part["model"] for part in parts}) == 1
    if len(files_to_read) != 1 and not complete:
        raise _ambiguous(folder, detail, ValueError if tensor_files else IsADirectoryError)
    if len(files_to_read) != count:
        problem = f"{folder!r} lacks files of the model: it has {len(files_to_read)} of {count}."
        fix = "download it again; or pass a file and config={}, for plain arrays."
        raise fail("interop.read", problem, given=detail, fix=fix)
    return dict.fromkeys(files_to_read)


def _ambiguous(folder: str, detail: str, error: type[Exception] = ValueError) -> Exception:
    problem = f"{folder!r} does not say which files are the model's."
    expected = f"{_ONE}, one safetensors file, or {INDEX} with several files"
    fix = "pass the file, and the folder's config if it is quantized; save .bin as safetensors."
    return fail("interop.read", problem, given=detail, expected=expected, fix=fix, error=error)


def _listed(index: str) -> dict[str, set[str] | None]:
    """Returns the tensors in each file of an index, after checking that these are in the folder."""
    data = read_json(index)
    weights = data.get("weight_map") if isinstance(data, dict) else None
    has_files = isinstance(weights, dict) and all(
        isinstance(file, str)
        and file == os.path.basename(file)
        and file.endswith(".safetensors")
        and "\0" not in file
        for file in weights.values()
    )
    if not (has_files and weights):
        problem = f"{index!r} has no weight_map with safetensors files of its folder."
        raise fail("interop.read", problem, fix="download the folder again.")
    files: dict[str, set[str]] = {}
    for name, file in weights.items():
        files.setdefault(file, set()).add(name)
    return {**files}


# The checkpoint formats of other libraries, and which of them a checkpoint has.
#
# The config decides. Tensors that only one format has are an error without a config for it.


class Format(NamedTuple):
    """A checkpoint format.

    Attributes:
      name: name of the format.
      matches: returns whether a config (`config.json`) belongs to a checkpoint in this format.
      marks: suffixes of the names of tensors that float checkpoints do not have.
      leaves: yields the QTensors of a checkpoint, given its source and the requested real dtype.
        Tensors that are not used for them are plain arrays.
      alone: whether the tensors can be read without a config.
      plain: returns whether a checkpoint may have no QTensors, given its source.
      source: the class of sources that always have this format, whatever the config says.
    """

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    marks: tuple[str, ...]
    leaves: Callable[[Source, np.dtype | None], Iterator[CodedLeaf]]
    alone: bool = False
    plain: Callable[[Source], bool] = lambda _: False
    source: type | None = None


def _method(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a function that returns whether a config has one of these quantization methods."""

    def matches(config: Mapping[str, Any]) -> bool:
        return method_of(config) in names

    return matches


FORMATS = (
    Format(
        "compressed-tensors",
        _method("compressed-tensors"),
        COMPRESSED_MARKS,
        compressed_leaves,
        plain=keeps_weights,
    ),
    Format("gptq", _method("gptq"), GPTQ_MARKS, gptq_leaves),
    Format("awq", _method("awq"), AWQ_MARKS, awq_leaves),
    Format("auto-round", _method("auto-round", "intel/auto-round"), GPTQ_MARKS, auto_round_leaves),
    Format("fp8", _method("fp8", "fbgemm_fp8"), FP8_MARKS, fp8_leaves),
    Format("mxfp4", _method("mxfp4"), MXFP4_MARKS, mxfp4_leaves),
    Format("mlx", lambda c: isinstance(c.get("quantization"), Mapping), MLX_MARKS, mlx_leaves),
    Format("bitsandbytes", _method("bitsandbytes"), BITSANDBYTES_MARKS, bitsandbytes_leaves, True),
    Format("gguf", lambda _: False, (), gguf_leaves, source=GgufSource),
)
"""The formats that can be read, in the order in which they are tried."""

_UNREAD = {"torchao": "torchao stores tensors in the layouts of its kernels"}
"""Methods that are known but not supported, and why."""

_TORCHAO = "._weight_qdata"
"""Suffix of the names of torchao's tensors."""


def read_leaves(source: Source, dtype: np.dtype | None) -> tuple[str, Any]:
    """Returns the name of the format of a checkpoint, and its tree with a reader for each leaf: a
    dict of all leaves by path, in the order of the file; for Orbax, the tree that was saved.

    Raises:
      ValueError: as in `format_of_source`; or if the tensors contradict the config.
    """
    if isinstance(source, OrbaxSource):
        return read_tree(source, dtype)
    form = format_of_source(source)
    coded = [] if form is None else list(form.leaves(source, dtype))
    used = {name: leaf for leaf in coded for name in (*dict(leaf.tensors), *leaf.consumed)}
    if form is not None and form.source is None:
        _check_left(source, form, used)
    leaves: dict[str, CodedLeaf | StoredArray] = {}
    for name in source.entries:
        leaf = used.get(name) or StoredArray(name, source.dtype(name))
        if leaf.path in leaves and leaves[leaf.path] is not leaf:
            problem = f"{source.path!r} has the weight {shown(leaf.path)} in float and quantized."
            raise fail("interop.read", problem, fix="download the checkpoint again.")
        leaves[leaf.path] = leaf
    return "safetensors" if form is None else form.name, leaves


def format_of_source(source: Source) -> Format | None:
    """Returns the format of a checkpoint; `None` if it holds plain arrays.

    Raises:
      ValueError: if its config names a format that jqx does not read; or if there is no config and
        the tensors have a format that needs one.
    """
    by_source = next((form for form in FORMATS if form.source is type(source)), None)
    if by_source is not None:
        return by_source
    config, names = source.config or {}, source.entries
    fitting = [form for form in FORMATS if form.matches(config)]
    # mlx-lm looks at `quantization` first: `quantization_config` may be left from the model that
    # was converted.
    has_mlx = any(x.endswith(".scales") and f"{x[:-6]}qweight" not in names for x in names)
    fitting = [form for form in fitting if form.name == "mlx" and has_mlx] + fitting
    quantization = quantization_of(config)
    if not fitting and quantization is not None:
        method = method_of(config)
        reason = _UNREAD.get(method, "no such format is known") if isinstance(method, str) else ""
        formats = ", ".join(form.name for form in FORMATS)
        quantization.refuse("quant_method", f"one of {formats}{reason and f': {reason}'}")
    if fitting:
        return fitting[0]
    return _marked(source) if config or not source.asked else None


def _marked(source: Source) -> Format | None:
    """Returns the format of files whose config names none; it must not need a config."""
    foreign = next((name for name in source.entries if name.endswith(_TORCHAO)), None)
    if foreign is not None:
        problem = f"{source.path!r} is in the format of torchao, which jqx does not read."
        fix = "save the float weights, or quantize with llm-compressor (compressed-tensors)."
        raise fail("interop.read", problem, given=f"the tensor {shown(foreign)}", fix=fix)
    for form in FORMATS:
        name = next((name for name in source.entries if name.endswith(form.marks)), None)
        if name is not None and form.alone:
            return form
        if name is not None:
            problem = f"{source.path!r} is quantized, but has no config that says how."
            config = "a config without quantization_config" if source.config else "no config"
            detail = f"the tensor {shown(name)}, as in {form.name}, and {config}"
            fix = "pass config=json.load(...) of its config.json; config={} reads plain arrays."
            raise fail("interop.read", problem, given=detail, fix=fix)
    return None


def _are_codes(source: Source, name: str) -> bool:
    """Returns whether a tensor holds codes by its dtype: 8-bit floats, or non-float weights."""
    kind = source.dtype(name)
    is_float = jnp.issubdtype(kind, jnp.floating)
    return (is_float and kind.itemsize == 1) or (name.endswith(".weight") and not is_float)


def _check_left(source: Source, form: Format, used: Mapping[str, Any]) -> None:
    """Checks that there are quantized tensors, and that none of the format is left over."""
    left = (name for name in source.entries if name not in used)
    name = next((n for n in left if n.endswith(form.marks) or _are_codes(source, n)), None)
    if name is not None:
        problem = f"the tensor {shown(name)} of {source.path!r} does not belong to a layer."
        detail = f"a tensor of {form.name} that lacks others of its layer, or is in float"
        fix = "download the checkpoint again; if this is a part of it, read the whole folder."
        raise fail("interop.read", problem, given=detail, fix=fix)
    if not used and not form.plain(source):
        problem = f"{source.path!r} is not quantized as its config says: no tensor of {form.name}."
        fix = "drop quantization_config from its config, or pass config={} to read plain arrays."
        raise fail("interop.read", problem, fix=fix)
