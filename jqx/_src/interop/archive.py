"""Opens files and folders of tensors, finds their format, and reads their leaves."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.typing import DTypeLike

from ... import QTensor
from ..checks import as_dtype, called, check_instance, check_real, shown
from ..errors import fail, nesting, some
from ..files import Path, as_path, naming_file
from ..tensor.layout import check_codes
from ..tensor.segments import Lazy
from ..tensor.serialize import NONE, Values, check_values, check_version
from ..transforms.calibrate import advancing
from .bitsandbytes import BITSANDBYTES_MARKS, bitsandbytes_leaves
from .codec import CodedLeaf, method_of, quantization_of, read_config, read_json, wrapped
from .compressed_tensors import COMPRESSED_MARKS, compressed_leaves, keeps_weights
from .fp8 import FP8_MARKS, MXFP4_MARKS, fp8_leaves, mxfp4_leaves
from .gguf import MAGIC, GgufSource, gguf_leaves
from .gptq import AWQ_MARKS, GPTQ_MARKS, auto_round_leaves, awq_leaves, gptq_leaves
from .mlx import MLX_MARKS, mlx_leaves
from .orbax import OrbaxSource, is_orbax, read_tree
from .safetensors import KEY, Bytes, Reader, Source, check_dtype, shape_of
from .tree import Read, Stored, StoredArray, map_stored, parse, saved_model

Leaf = Stored | CodedLeaf

QUANTIZED = "jqx.quantized"
"""The entry that describes the quantized function whose weights the tree has."""


class Archive:
    """An open file or folder, whose arrays and QTensors are read one by one. A context manager.

    Args:
      path: path of a file that `jqx.save` wrote; of a folder in the layout of Hugging Face, with a
        config and one or more safetensors files; of any safetensors file, read as a dict of arrays;
        of a GGUF file; or of an Orbax folder, read as the tree of arrays that was saved.
      values: your own formats, by the names under which they were saved.
      config: the contents of `config.json`, or a quantization config by itself, as a dict; `None`
        reads the one in the folder. `{}` reads the tensors of a quantized checkpoint, or of one of
        several files, as plain arrays.
      dtype: the real dtype of QTensors that other libraries wrote; `None` takes the dtype of their
        scales, or that of the model.

    Attributes:
      paths: the paths of the leaves, in order.
      format: format of the files: `"jqx"`, `"safetensors"`, or the format of a quantized
        checkpoint, such as `"compressed-tensors"`.
      config: the contents of `config.json`; `None` if there is none.
      metadata: the metadata of the file, without the description of the tree.
      quantized: JSON of the quantized function whose weights the tree has, see `jqx.SavedModel`;
        `None` if there is no such function.

    Raises:
      OSError: if the file cannot be opened or is not a regular file; when a leaf is read: if the
        file has become shorter since it was opened.
      ValueError: if the file is not a safetensors file, is truncated, has another version, or lacks
        a tensor; when a leaf is read: if it has numbers that its dtype does not have, or codes that
        its format does not have.
      TypeError: if tensors do not fit the QTensor that they belong to.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> jqx.save(path, {"a": jnp.zeros((2, 3)), "b": [jnp.ones(4)]})
      >>> with jqx.interop.Archive(path) as archive:
      ...     archive.paths, archive.spec("a").shape, archive.read("b/0")
      (('a', 'b/0'), (2, 3), Array([1., 1., 1., 1.], dtype=float32))
    """

    def __init__(
        self,
        path: Path,
        values: Values | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        values = NONE if values is None else values
        check_values("load", values)
        real = None if dtype is None else as_dtype("load", "dtype", dtype)
        if real is not None:
            check_real("load", "`dtype`", real)
        if config is not None:
            check_instance("load", "config", config, Mapping, fix="pass the result of json.load.")
        self._reader = open_source(path, config)
        files = getattr(self._reader, "files", [self._reader.path])
        self._source = f"{' '.join(map(files_of, files))} {config} {real}"
        try:
            self.config: Mapping[str, Any] | None = self._reader.config
            metadata, keys = self._reader.metadata, (KEY, QUANTIZED)
            descriptions = {key: metadata.get(key) for key in keys if self._reader.describes_tree}
            self.metadata: dict[str, Any] = {
                key: metadata[key] for key in metadata if key not in descriptions
            }
            self.quantized: Any = descriptions.get(QUANTIZED)
            self.format: str
            self.format, self._tree = self._parse(descriptions.get(KEY), values, real)
            self._leaves = self._named()
        except BaseException:
            self._reader.__exit__()
            raise
        self.paths: tuple[str, ...] = tuple(self._leaves)

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()

    def __contains__(self, path: object) -> bool:
        """Returns whether there is a leaf with this path."""
        return isinstance(path, str) and path in self._leaves

    def spec(self, path: str) -> Any:
        """Returns a leaf with `jax.ShapeDtypeStruct` in place of arrays; nothing is read."""
        return self._leaf(path).make(self._spec)

    def read(self, path: str) -> jax.Array | np.ndarray | QTensor:
        """Returns a copy of a leaf; see `jqx.load`."""
        return jax.tree.map(as_jax, self.numpy(path))

    def numpy(self, path: str) -> Any:
        """Returns a copy of a leaf, of NumPy arrays."""
        return self._made(path, self._reader.read)

    def lazy(self, path: str) -> Lazy:
        """Returns a leaf that is read when it is needed, while the archive is open, and not kept:
        `archive.map(archive.lazy)` is a tree for `jqx.make_plan`, `jqx.quantize_params` and
        `jqx.save` that takes no memory.
        """
        return Lazy(self.spec(path), partial(self.read, path), f"{self._source}\n{path}")

    def view(self, path: str) -> Any:
        """Returns a leaf of NumPy arrays that are mapped into memory and read when they are used.

        They are the file, not a copy of it. If the file is written to, the arrays change; if it is
        truncated, using what was beyond its end kills the process (SIGBUS). Map only files that
        nothing else writes. `read` makes copies, and raises OSError for a file that has become
        shorter. (`jqx.save` replaces the old file by a new one; the old one exists as long as it is
        mapped.) Codes of formats that do not use all values of a byte are checked at once, as in
        `read`.
        """
        return self._made(path, partial(self._reader.read, mapped=True))

    def map(self, f: Callable[[str], Any]) -> Any:
        """Returns the tree with the result of `f` for the path of each leaf."""
        with nesting("interop.Archive"):
            return map_stored(lambda leaf: f(leaf.path), self._tree)

    def _made(self, path: str, read: Read) -> Any:
        leaf = self._leaf(path).make(read)
        if isinstance(leaf, QTensor):
            check_codes("load", leaf, path)
        return leaf

    def _leaf(self, path: str) -> Leaf:
        if path not in self:
            problem = f"there is no leaf {shown(path)} among {len(self.paths)}."
            raise fail("interop.Archive", problem, fix="choose a path from archive.paths.")
        return self._leaves[path]

    def _parse(self, text: str | None, values: Values, dtype: np.dtype | None) -> tuple[str, Any]:
        if text is None:
            return read_leaves(self._reader, dtype)
        if dtype is not None:
            problem = f"`dtype` == {dtype} has no use: the file of jqx.save says each real dtype."
            fix = "leave it out; q.astype(dtype) of a QTensor changes it."
            raise fail("load", problem, fix=fix)
        with nesting("load"):
            try:
                data = json.loads(text)
            except ValueError:
                data = None
            return "jqx", parse(check_version("load", data).get("tree"), values)

    def _named(self) -> dict[str, Leaf]:
        """Returns the leaves by path, after checking that they take every tensor once."""
        leaves: dict[str, Leaf] = {}
        unused = set(self._reader.entries)

        def take(name: str, dtype: np.dtype) -> Any:
            spec = self._spec(name, dtype)
            if name not in unused:
                raise _not_as_written(f"the tensor {name!r} has two places in the tree.")
            unused.remove(name)
            return spec

        def add(leaf: Leaf) -> None:
            if leaf.path in leaves:
                raise _not_as_written(f"the path {leaf.path!r} has two places in the tree.")
            leaf.make(take)
            unused.difference_update(leaf.consumed)
            leaves[leaf.path] = leaf

        with nesting("load"):
            map_stored(add, self._tree)
        if unused:
            raise _not_as_written(f"the tensor {min(unused)!r} has no place in the tree.")
        return leaves

    def _spec(self, name: str, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        entries = self._reader.entries
        if name not in entries:
            raise _not_as_written(f"the tensor {name!r} is missing.")
        check_dtype(self._reader, name, dtype)
        return jax.ShapeDtypeStruct(shape_of(entries[name], dtype), dtype)


def as_jax(x: np.ndarray) -> jax.Array | np.ndarray:
    """Returns an array, which nothing else refers to, as a JAX array. An array of 64 bits stays a
    NumPy array if JAX does not have its dtype. It is not copied if the device allows that.
    """
    is_known = dtypes.canonicalize_dtype(x.dtype) == x.dtype
    return jax.device_put(x, may_alias=True) if is_known else x


@called("interop.read", 'pass for example jqx.interop.read("folder").')
def read(
    path: Path, *, config: Mapping[str, Any] | None = None, dtype: DTypeLike | None = None
) -> Archive:
    """Opens a quantized or float checkpoint, in the format that its config names.

    Only headers and configs are read. `archive.read(name)` reads one weight at a time, as a QTensor
    with the codes of the file; they are never converted to floats. Weights are `[out, in]`, as in
    torch. `jqx.load` reads all weights.

    Args:
      path: path of a folder in the layout of Hugging Face, or of a file.
      config: as for `jqx.interop.Archive`.
      dtype: as for `jqx.interop.Archive`.

    Returns:
      An open `jqx.interop.Archive`; use it in a `with` statement.

    Raises:
      OSError: if a file is missing or cannot be opened.
      ValueError: if jqx does not read the format, or the files are damaged or contradict their
        config.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> jqx.save(path, {"a": jnp.zeros((2, 3))})
      >>> with jqx.interop.read(path) as archive:
      ...     archive.format, archive.paths
      ('jqx', ('a',))
    """
    return Archive(path, config=config, dtype=dtype)


@called("load", 'pass for example jqx.load("model.safetensors").')
def load(
    path: Path,
    *,
    values: Values | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    progress: bool = True,
) -> Any:
    """Reads a tree of arrays and QTensors, or a quantized function, from a file or folder.

    Args:
      path: path of a file that `jqx.save` wrote; or of another safetensors file or a folder in the
        layout of Hugging Face, read as a dict of arrays and QTensors by name. QTensors are those of
        quantized checkpoints, see `jqx.interop.Archive`.
      values: your own formats, by the names under which they were saved.
      config: as for `jqx.interop.Archive`.
      dtype: as for `jqx.interop.Archive`.
      progress: whether to show a progress bar, as in `jqx.save`.

    Returns:
      The tree, bit for bit equal to the one that was saved. Arrays are JAX arrays; arrays of 64
      bits are NumPy arrays, unless `jax_enable_x64` is set. For a saved `jqx.Quantized` the result
      is a `jqx.SavedModel`, whose `bind(f)` returns the `jqx.Quantized`.

    Raises:
      OSError: if the file cannot be opened, is not a regular file, or becomes shorter while it is
        read.
      ValueError: if the file is not a safetensors file, is truncated, has another version, lacks a
        tensor, or has numbers that its dtype, or codes that its format, does not have.
      TypeError: if tensors do not fit the QTensor that they belong to.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> q = jqx.QTensor.quantize(jnp.array([[1.0, -7.0]]), jqx.QSpec(jnp.int4))
      >>> jqx.save(path, {"layer": (q, None)})
      >>> jqx.load(path)["layer"][0]
      QTensor(int4[1, 2] per_tensor, scale float32[1, 1], dtype=float32, 6 bytes)
    """
    values = NONE if values is None else values
    with Archive(path, values, config=config, dtype=dtype) as archive:
        with advancing("load", "tensor", len(archive.paths), progress, delay=1) as advance:

            def read_leaf(path: str) -> Any:
                leaf = archive.read(path)
                advance()
                return leaf

            tree = archive.map(read_leaf)
        return tree if archive.quantized is None else saved_model(tree, archive.quantized, values)


def _not_as_written(problem: str) -> Exception:
    return fail("load", problem, fix="write the file again with jqx.save.")


# Opens a file of tensors, or a folder of files with its config, and finds its format.

INDEX = "model.safetensors.index.json"

_AGAIN = "download the folder again; leave no files of another model in it."

_ONE = "model.safetensors"

_PART = re.compile(r"(?P<model>.*)-\d+-of-0*(?P<count>[1-9]\d{0,8})\.safetensors", re.DOTALL)
"""The name of one of several files."""


class Folder(Source):
    """A folder in the layout of Hugging Face: `config.json`, and one or more safetensors files,
    which `model.safetensors.index.json` lists.

    Raises:
      OSError: if a file cannot be opened, or there are no files.
      ValueError: if the files are not those in the index, or hold other tensors.
    """

    describes_tree = True

    def _open(self) -> None:
        self.config = read_config(self.path)
        self._readers: dict[str, Reader] = {}
        for name, listed in _files_of(self.path).items():
            self._add(name, listed)

    def dtype(self, name: str) -> np.dtype:
        return self._readers[name].dtype(name)

    def read(self, name: str, dtype: np.dtype, *, mapped: bool = False) -> np.ndarray:
        return self._readers[name].read(name, dtype, mapped=mapped)

    def _add(self, file: str, listed: set[str] | None) -> None:
        """Opens a file and adds its tensors to those of the folder."""
        reader = self._opened.enter_context(Reader(os.path.join(self.path, file)))
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
      methods: quantization methods in a config that mean this format.
      marks: suffixes of the names of tensors that float checkpoints do not have.
      leaves: yields the QTensors of a checkpoint, given its source and the requested real dtype.
        Tensors that are not used for them are plain arrays.
      alone: whether the tensors can be read without a config.
      plain: returns whether a checkpoint may have no QTensors, given its source.
      source: the class of sources that always have this format, whatever the config says.
    """

    name: str
    methods: tuple[str, ...]
    marks: tuple[str, ...]
    leaves: Callable[[Source, np.dtype | None], Iterator[CodedLeaf]]
    alone: bool = False
    plain: Callable[[Source], bool] = lambda _: False
    source: type | None = None


FORMATS = (
    Format(
        "compressed-tensors",
        ("compressed-tensors",),
        COMPRESSED_MARKS,
        compressed_leaves,
        plain=keeps_weights,
    ),
    Format("gptq", ("gptq",), GPTQ_MARKS, gptq_leaves),
    Format("awq", ("awq",), AWQ_MARKS, awq_leaves),
    Format("auto-round", ("auto-round", "intel/auto-round"), GPTQ_MARKS, auto_round_leaves),
    Format("fp8", ("fp8", "fbgemm_fp8"), FP8_MARKS, fp8_leaves),
    Format("mxfp4", ("mxfp4",), MXFP4_MARKS, mxfp4_leaves),
    Format("mlx", (), MLX_MARKS, mlx_leaves),  # known by its key `quantization`
    Format("bitsandbytes", ("bitsandbytes",), BITSANDBYTES_MARKS, bitsandbytes_leaves, True),
    Format("gguf", (), (), gguf_leaves, source=GgufSource),
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
    method = method_of(config)
    is_mlx = isinstance(config.get("quantization"), Mapping)
    fitting = [f for f in FORMATS if method in f.methods or (f.name == "mlx" and is_mlx)]
    # mlx-lm looks at `quantization` first: `quantization_config` may be left from the model that
    # was converted.
    has_mlx = any(x.endswith(".scales") and f"{x[:-6]}qweight" not in names for x in names)
    fitting = [form for form in fitting if form.name == "mlx" and has_mlx] + fitting
    quantization = quantization_of(config)
    if not fitting and quantization is not None:
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
