"""Files of trees, opened to be read leaf by leaf, or read whole."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax import dtypes
from jax.typing import DTypeLike

from .._calls import called
from .._checks import as_dtype, check_instance, check_real, require_that, shown
from .._errors import nesting
from .._files import Path
from ..tensor import QTensor
from ..tensor._shared import NONE, Lazy, Values, check_codes, check_values, check_version
from ..transforms._shared import advancing
from ._coded import CodedLeaf
from ._formats import read_leaves
from ._quantized import unbound
from ._source import files_of, open_source
from ._tree import Read, Stored, map_stored, parse

Leaf = Stored | CodedLeaf

KEY = "jqx"
"""The entry of a file's metadata that describes its tree."""

QUANTIZED = "jqx.quantized"
"""The entry that says of which quantized function the tree has the weights."""

VERSION = 1


class Archive:
    """An open file, or folder, whose arrays and QTensors are read one by one. A context manager.

    Args:
      path: of a file that `jqx.save` wrote; of a folder as Hugging Face has them, with a config
        and one safetensors file or several; of any safetensors file, a dict of arrays; of a GGUF
        file; or of a folder of Orbax, the tree of arrays that was saved.
      values: formats of your own, by the names under which they were saved.
      config: what stands in `config.json`, as a dict; `None` takes that of the folder. `{}` reads
        the tensors of a quantized checkpoint as they are.
      dtype: the real dtype of QTensors that others wrote; `None` takes that of their scales, or of
        the model.

    Attributes:
      paths: where the leaves are, in order.
      format: of the files: `"jqx"`, `"safetensors"`, or that of a quantized checkpoint, such as
        `"compressed-tensors"`.
      config: what stands in `config.json`; `None` where there is none.
      metadata: what the file says of itself beside the tree.
      quantized: JSON of the quantized function whose weights the tree has, see `jqx.Unbound`;
        `None` where it is of none.

    Raises:
      OSError: the file cannot be opened, or is no regular file; when a leaf is read: it has become
        shorter since it was opened.
      ValueError: it is no safetensors file, has been cut short, is of another version, or lacks a
        tensor; when a leaf is read: there are numbers that its dtype, or codes that its format,
        has not.
      TypeError: tensors do not fit the QTensor that they are to be.

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
        real = _real(dtype)
        if config is not None:
            check_instance("load", "config", config, Mapping, mend="pass what json.load gives.")
        self._reader = open_source(path, config)
        self._source = f"{files_of(self._reader.path)} {config} {real}"
        try:
            self.config: Mapping[str, Any] | None = self._reader.config
            known, keys = self._reader.metadata, (KEY, QUANTIZED)
            own = {key: known.get(key) for key in keys if self._reader.describes_tree}
            self.metadata: dict[str, Any] = {key: known[key] for key in known if key not in own}
            self.quantized: Any = own.get(QUANTIZED)
            self.format: str
            self.format, self._tree = self._parse(own.get(KEY), values, real)
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
        """Whether there is a leaf of this path."""
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
        """Returns a leaf that is read when it is needed, while the archive is open, and kept by
        nobody: `archive.map(archive.lazy)` is a tree for `jqx.make_plan`, `jqx.quantize_params`
        and `jqx.save` that takes no memory.
        """
        return Lazy(self.spec(path), partial(self.read, path), f"{self._source}\n{path}")

    def view(self, path: str) -> Any:
        """Returns a leaf of NumPy arrays that are mapped into memory: read when they are used.

        They are the file, not a copy of it. They change where it is written to; and where it is cut
        short, using what was beyond its end kills the process (SIGBUS). Map files that nothing else
        writes; `read` copies, and a file that has become shorter is an OSError. (`jqx.save` puts a
        new file in the place of the old one, which lives as long as it is mapped.) Codes of formats
        that their bytes have room beyond are looked through at once, as by `read`.
        """
        return self._made(path, self._reader.view)

    def map(self, f: Callable[[str], Any]) -> Any:
        """Returns the tree with what `f` returns for the path of each leaf."""
        with nesting("interop.Archive"):
            return map_stored(lambda leaf: f(leaf.path), self._tree)

    def _made(self, path: str, read: Read) -> Any:
        leaf = self._leaf(path).make(read)
        if isinstance(leaf, QTensor):
            check_codes("load", leaf, path)
        return leaf

    def _leaf(self, path: str) -> Leaf:
        require_that(
            path in self,
            error=ValueError,
            function="interop.Archive",
            problem=f"there is no leaf {shown(path)}.",
            given=f"a file of {len(self.paths)} leaves: {', '.join(self.paths[:5])}, ...",
            expected="one of archive.paths",
            mend="look there.",
        )
        return self._leaves[path]

    def _parse(self, text: str | None, values: Values, dtype: np.dtype | None) -> tuple[str, Any]:
        if text is None:
            return read_leaves(self._reader, dtype)
        require_that(
            dtype is None,
            error=ValueError,
            function="load",
            problem="`dtype` has no use.",
            given=f"dtype == {dtype}, and a file that jqx.save wrote",
            expected="dtype=None: the file says what each real dtype is",
            mend="leave it out; q.astype(dtype) of a QTensor changes it.",
        )
        with nesting("load"):
            try:
                data = json.loads(text)
            except ValueError:
                data = None
            return "jqx", parse(check_version("load", data, VERSION).get("tree"), values)

    def _named(self) -> dict[str, Leaf]:
        """Returns the leaves by path, after checking that they take every tensor once."""
        leaves: dict[str, Leaf] = {}
        unused = set(self._reader.entries)

        def take(name: str, dtype: np.dtype) -> Any:
            spec = self._spec(name, dtype)
            require_that(
                name in unused,
                error=ValueError,
                function="load",
                problem=f"the tensor {name!r} has two places in the tree.",
                given="the same name for two arrays",
                expected="a tensor for each array",
                mend="write the file again, with jqx.save.",
            )
            unused.remove(name)
            return spec

        def add(leaf: Leaf) -> None:
            require_that(
                leaf.path not in leaves,
                error=ValueError,
                function="load",
                problem=f"the path {leaf.path!r} has two places in the tree.",
                given="the same path for two leaves",
                expected="a path for each leaf",
                mend="write the file again, with jqx.save.",
            )
            leaf.make(take)
            unused.difference_update(leaf.beside)
            leaves[leaf.path] = leaf

        with nesting("load"):
            map_stored(add, self._tree)
        require_that(
            not unused,
            error=ValueError,
            function="load",
            problem=f"the tensor {min(unused, default='')!r} has no place in the tree.",
            given=f"{len(unused)} tensors beside those of the tree",
            expected="none",
            mend="write the file again, with jqx.save.",
        )
        return leaves

    def _spec(self, name: str, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        entries = self._reader.entries
        require_that(
            name in entries,
            error=ValueError,
            function="load",
            problem=f"the tensor {name!r} is missing.",
            given=f"a file of {len(entries)} tensors: {', '.join(islice(entries, 5))}, ...",
            expected=f"a tensor {name!r}",
            mend="write the file again: tensors that its tree names were removed.",
        )
        self._reader.check_dtype(name, dtype)
        return jax.ShapeDtypeStruct(entries[name].shape, dtype)


def _real(dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    found = as_dtype("load", "dtype", dtype)
    check_real("load", "`dtype`", found)
    return found


def as_jax(x: np.ndarray) -> jax.Array | np.ndarray:
    """Returns an array, which nobody else has, as JAX's; of 64 bits, where JAX has none, as it
    is. It is not copied where the device allows.
    """
    is_known = dtypes.canonicalize_dtype(x.dtype) == x.dtype
    return jax.device_put(x, may_alias=True) if is_known else x


@called("interop.read", 'pass for example jqx.interop.read("folder").')
def read(
    path: Path, *, config: Mapping[str, Any] | None = None, dtype: DTypeLike | None = None
) -> Archive:
    """Opens a checkpoint, quantized or not, in the format that its config says.

    Nothing is read but headers and configs; `archive.read(name)` gives one weight at a time, a
    QTensor of the codes that the file has: they are never made floats. Weights are `[out, in]`, as
    torch has them; `jqx.load` reads all of them.

    Args:
      path: of a folder as Hugging Face has them, or of a file.
      config: as for `jqx.interop.Archive`.
      dtype: as for `jqx.interop.Archive`.

    Returns:
      An open `jqx.interop.Archive`: use it in a `with`.

    Raises:
      OSError: a file cannot be opened, or is missing.
      ValueError: the files are none that jqx reads, are damaged, or contradict their config.

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
      path: of a file that `jqx.save` wrote; or of any other safetensors file, or a folder of them
        as Hugging Face has them, which becomes a dict of arrays and QTensors by name: those of
        quantized checkpoints, see `jqx.interop.Archive`.
      values: formats of your own, by the names under which they were saved.
      config: as for `jqx.interop.Archive`.
      dtype: as for `jqx.interop.Archive`.
      progress: whether to show a bar, as in `jqx.save`.

    Returns:
      The tree, equal to the one that was saved bit for bit. Arrays are JAX's; those of 64 bits are
      NumPy's, unless `jax_enable_x64` is set. Of a `jqx.Quantized` that was saved, a `jqx.Unbound`,
      whose `bind(f)` gives it back.

    Raises:
      OSError: the file cannot be opened, is no regular file, or becomes shorter while it is read.
      ValueError: it is no safetensors file, has been cut short, is of another version, lacks a
        tensor, or holds numbers that a dtype, or codes that a format, has not.
      TypeError: tensors do not fit the QTensor that they are to be.

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
