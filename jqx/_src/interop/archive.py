"""Opens files of trees, to read them leaf by leaf or as a whole."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import dtypes
from jax.typing import DTypeLike

from ..checks import as_dtype, called, check_instance, check_real, shown
from ..errors import fail, nesting
from ..files import Path
from ..tensor.layout import check_codes
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy
from ..tensor.serialize import NONE, Values, check_values, check_version
from ..transforms.calibrate import advancing
from .codec import CodedLeaf
from .safetensors import KEY, check_dtype, shape_of
from .source import files_of, open_source, read_leaves
from .tree import Read, Stored, map_stored, parse, unbound

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
      quantized: JSON of the quantized function whose weights the tree has, see `jqx.Unbound`;
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
      is a `jqx.Unbound`, whose `bind(f)` returns the `jqx.Quantized`.

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
            tree = archive.map(partial(_read, archive, advance))
        return tree if archive.quantized is None else unbound(tree, archive.quantized, values)


def _read(archive: Archive, advance: Callable[[], Any], path: str) -> Any:
    leaf = archive.read(path)
    advance()
    return leaf


def _not_as_written(problem: str) -> Exception:
    return fail("load", problem, fix="write the file again with jqx.save.")
