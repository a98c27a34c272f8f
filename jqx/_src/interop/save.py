"""`save`: writes trees of arrays and QTensors to safetensors files, completely or not at all; the
writers of files, of files that resume, and of folders of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedRandom
from types import TracebackType
from typing import Any

import jax
import numpy as np

from ... import QTensor, Quantized
from ..checks import called, shown
from ..errors import fail, nesting, some
from ..files import Path, Replacement, as_path, lock, naming_file, new_part, remove_left
from ..tensor.layout import check_codes
from ..tensor.segments import Lazy, abstract, read
from ..tensor.serialize import NONE, VERSION, Values, check_values
from ..transforms.calibrate import advancing, bytes_of
from .archive import INDEX, QUANTIZED
from .codec import Tensors
from .safetensors import KEY, placed, stored_dtype, to_stored, write_header
from .tree import contents_of, describe, tensors_of


@called("save", 'pass for example jqx.save("model.safetensors", params).')
def save(
    path: Path,
    tree: Any,
    *,
    values: Values | None = None,
    resume: bool = False,
    progress: bool = True,
) -> None:
    """Writes a tree of arrays and QTensors, or the result of `jqx.ptq`, to a safetensors file that
    any reader of this format can open.

    An array is one tensor, named by its keys joined with "/". A QTensor is the tensors
    `<path>.values`, `<path>.scale` and `<path>.zero_point`; its format, dtype, blocks and layout
    are JSON in the file's metadata. The parts of Segments are separate leaves, such as
    `<path>[0:1]`. Codes of fewer than 8 bits are stored one per byte, as I8 or U8, unless they are
    packed: see `QTensor.pack`.

    For a `jqx.Quantized`, the parameters are written in the default layout, and codes of fewer than
    8 bits packed, whatever their layout in memory. Its plan, scales of activations, report and the
    shapes of its inputs are JSON in the metadata. Its function is not written:
    `jqx.load(path).bind(f)` combines them with `f` again.

    The file is written completely or not at all: data goes to a `.part` file in the same folder,
    which replaces an existing file at the end. If the process is killed, the next write of the same
    file removes its `.part`. complex128 is stored as pairs of float64. If the path is a link, the
    file that it points to is replaced. The permissions of a replaced file stay, and its owner and
    group if the system allows.

    Args:
      path: path of the file.
      tree: nested dicts (with strings or integers as keys), lists and tuples of arrays, QTensors,
        Segments and `None`; or a `jqx.Quantized`, with parameters in any pytree. A
        `jqx.interop.Lazy` instead of an array or a QTensor is read when it is written, and then
        dropped.
      values: your own formats, and other objects of yours in a plan, by name; pass the same dict to
        `jqx.load`.
      resume: whether an interrupted write keeps its data, as a `.part` file with a journal, so that
        the same call continues there. A `Lazy` leaf whose source is unchanged is not read again;
        other leaves are. A tree with other names, shapes or formats starts again.
      progress: whether to show a progress bar on standard error, if this is a terminal and tqdm is
        installed (extra `examples`).

    Raises:
      OSError: if the file cannot be written, or its path is a folder, a FIFO or a device.
      TypeError: if something else is in the tree.
      ValueError: if an array has a dtype that files cannot hold; if a QTensor has a format of your
        own that is not in `values`, or codes that its format does not have; if a weight of a
        `jqx.Quantized` has another scale than its `affines`; if the tree is nested too deeply; or,
        with `resume=True`, if another process writes the same file.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> jqx.save(path, {"w": jqx.QTensor.quantize(jnp.eye(2), jqx.QSpec(jnp.int8))})
      >>> jqx.load(path)["w"].dequantize()
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    values = NONE if values is None else values
    check_values("save", values)
    if isinstance(tree, (str, bytes, os.PathLike)):
        problem = "`tree` is a path."
        fix = "pass the path first: jqx.save(path, tree)."
        raise fail("save", problem, fix=fix, error=TypeError)
    metadata = {}
    if isinstance(tree, Quantized):
        with nesting("save"):
            tree, metadata[QUANTIZED] = contents_of(tree, values)
    save_tree(path, tree, metadata, values, resume=resume, progress=progress)


def save_tree(
    path: Path,
    tree: Any,
    metadata: Mapping[str, str],
    values: Values = NONE,
    *,
    resume: bool = False,
    progress: bool = True,
) -> None:
    """Writes a tree and further metadata; see `save`."""
    node, named = _described(tree, values)
    for leaf_path, leaf in named:
        arrays = () if isinstance(leaf, Lazy) else tensors_of(leaf_path, leaf)
        for name in (name for name, x in arrays if isinstance(x, jax.ShapeDtypeStruct)):
            problem = f"the array {name!r} has no values, only a shape."
            fix = "pass arrays; jqx.interop.save_leaves takes shapes, and arrays one by one."
            raise fail("save", problem, fix=fix, error=TypeError)
    open_writer = resumed if resume else written
    _write(open_writer, path, node, named, (leaf for _, leaf in named), metadata, progress)


def save_leaves(
    path: Path,
    tree: Any,
    leaves: Iterable[Any],
    *,
    values: Values | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: bool = True,
) -> None:
    """Writes a tree from an iterator of leaves, so that only one leaf is in memory at a time.

    Args:
      path: path of the file.
      tree: as in `jqx.save`, with `jax.ShapeDtypeStruct` in place of arrays.
      leaves: arrays and QTensors, in the order of the tree: dicts in insertion order, not sorted.
      values: your own formats, by name.
      metadata: further metadata of the file.
      progress: as in `jqx.save`.

    Raises:
      OSError: if the file cannot be written.
      TypeError: if something else is in the tree.
      ValueError: if a leaf does not agree with the tree; or as in `jqx.save`.

    Example:
      >>> import jax, jqx, jax.numpy as jnp, tempfile
      >>> path, like = tempfile.mkdtemp() + "/model.safetensors", jax.ShapeDtypeStruct((2,), "f4")
      >>> jqx.interop.save_leaves(path, [like, like], (jnp.full(2, n + 0.0) for n in range(2)))
      >>> jqx.load(path)
      [Array([0., 0.], dtype=float32), Array([1., 1.], dtype=float32)]
    """
    values = NONE if values is None else values
    check_values("save", values)
    is_text = isinstance(metadata, Mapping) and all(
        isinstance(text, str) for item in metadata.items() for text in item
    )
    if metadata is not None and not (is_text and not {KEY, QUANTIZED} & {*metadata}):
        problem = (
            f"`metadata` is no dict of strings, or has a key that jqx needs: {shown(metadata)}."
        )
        fix = "pass for example metadata={'format': 'pt'}."
        raise fail("interop.save_leaves", problem, fix=fix, error=TypeError)
    node, named = _described(tree, values)
    _write(written, path, node, named, leaves, metadata or {}, progress)


def _described(tree: Any, values: Values) -> tuple[Any, list[tuple[str, Any]]]:
    with nesting("save"):
        return describe(tree, values)


def _write(
    open_writer: Callable[..., contextlib.AbstractContextManager[Writer]],
    path: Path,
    node: Any,
    named: list[tuple[str, Any]],
    leaves: Iterable[Any],
    metadata: Mapping[str, str],
    progress: bool,
) -> None:
    """Writes the leaves of a tree, with a bar of their bytes. A leaf that an interrupted write has
    already written is not read again.
    """
    specs = [(leaf_path, abstract(leaf)) for leaf_path, leaf in named]
    sizes = [bytes_of(spec) for _, spec in specs]
    tensors = {
        name: (np.dtype(array.dtype), array.shape)
        for leaf_path, spec in specs
        for name, array in tensors_of(leaf_path, spec)
    }
    with nesting("save"):
        text = json.dumps({"version": VERSION, "tree": node}, separators=(",", ":"))
    bar = advancing("save", "B", sum(sizes), progress, unit_scale=True, delay=1)
    with bar as advance, open_writer(path, tensors, {**metadata, KEY: text}) as out:
        for (leaf_path, spec), size, leaf in zip(specs, sizes, leaves, strict=True):
            source = leaf.source if isinstance(leaf, Lazy) else ""
            if not out.has(leaf_path, source):
                array = read(leaf)
                out.begin(leaf_path)
                _write_leaf(out, leaf_path, spec, array)
                out.done(leaf_path, source)
            advance(size)


def _write_leaf(out: Writer, path: str, spec: Any, leaf: Any) -> None:
    """Writes the tensors of a leaf, after checking that it has the announced structure."""
    if jax.tree.structure(spec) != jax.tree.structure(leaf):
        structure, announced = (str(jax.tree.structure(x)) for x in (leaf, spec))
        raise _not_announced(f"the leaf {path!r}", structure, announced)
    array_leaf = jax.tree.map(np.asarray, leaf)
    if isinstance(array_leaf, QTensor):
        check_codes("save", array_leaf, path)
    for name, array in tensors_of(path, array_leaf):
        out.write(name, array)


def _not_announced(subject: str, detail: str, announced: str) -> Exception:
    problem = f"{subject} differs from what was announced: {detail}, not {announced}."
    fix = "make both from one function, for example with jax.eval_shape."
    return fail("save", problem, fix=fix)


# A safetensors file that is written tensor by tensor, completely or not at all.


class Writer:
    """Writes the tensors of an open file, in any order.

    Attributes:
      head: the start of the file.
      missing: the tensors that are not written yet.
    """

    def __init__(self, file: Replacement, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        self._file, self._tensors = file, tensors
        self._entries = placed((name, *item) for name, item in tensors.items())
        self.head = write_header(self._entries, metadata)
        self.missing = dict.fromkeys(self._entries)

    def write(self, name: str, x: np.ndarray) -> None:
        """Writes a tensor, with the dtype and shape that were announced."""
        dtype, shape = self._tensors[name]
        if x.dtype.name != dtype.name or x.shape != tuple(shape):
            kind, announced = f"{x.dtype.name}{list(x.shape)}", f"{dtype.name}{list(shape)}"
            raise _not_announced(f"the tensor {name!r}", kind, announced)
        numbers = np.ascontiguousarray(to_stored(x)).reshape(-1).view(np.uint8)
        self._file.write(len(self.head) + self._entries[name].start, numbers.data)
        self.missing.pop(name, None)

    def has(self, leaf: str, source: str) -> bool:
        """Returns whether a leaf made from the same source is already written."""
        return False

    def begin(self, leaf: str) -> None:
        """Records that a leaf is being written; its previous data is lost."""

    def done(self, leaf: str, source: str) -> None:
        """Records that all tensors of a leaf are written."""


@contextlib.contextmanager
def written(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Yields the writer of a file, which is put in place once every tensor is written. If an error
    occurs before that, nothing changes.

    Args:
      path: path of the file.
      tensors: dtype and shape of each tensor, by name.
      metadata: metadata of the file.
    """
    with Replacement("save", path) as file:
        out = Writer(file, tensors, metadata)
        file.write(0, out.head)
        yield out
        if out.missing:
            problem = f"tensors were not written: {some(map(repr, out.missing))}."
            raise fail("save", problem, fix="write each of them.")
        file.commit()


# Writes a folder of safetensors files with an index, completely or not at all.


@contextlib.contextmanager
def written_folder(
    path: Path,
    tensors: Tensors,
    files: Mapping[str, bytes],
    *,
    limit: int,
    metadata: Mapping[str, str],
    overwrite: bool,
) -> Iterator[Callable[[str, np.ndarray], None]]:
    """Yields a function that writes a tensor of a folder, by name, in any order.

    The folder is made under a temporary name and put in place when everything is written. If an
    error occurs before that, nothing changes. What a killed process has left is removed by the next
    writer of the same folder, as in `Replacement`. An old folder is replaced in one step if the
    system can exchange two names (Linux); otherwise the old folder is moved aside first.

    Args:
      path: path of the folder.
      tensors: dtype and shape of each tensor, by name.
      files: other files in the folder, by name.
      limit: maximum size in bytes of a file of tensors; a larger tensor has a separate file.
      metadata: metadata of each file of tensors.
      overwrite: whether to replace an old folder, or an empty one.
    """
    target = pathlib.Path(os.path.realpath(as_path("interop.write", path)))
    _check_target(target, overwrite)
    shards, part = _shards(tensors, limit), new_part(target)
    expected = "a place where folders can be made"
    naming = functools.partial(
        naming_file, "interop.write", str(target), "cannot be written", expected
    )
    with naming():
        remove_left(target)
        locked = _new_folder(part)
    try:
        with contextlib.ExitStack() as opened:  # raises at the end unless each file is complete
            writers: dict[str, Writer] = {}
            for file, names in shards.items():
                tensors_of_file = {name: tensors[name] for name in names}
                out = opened.enter_context(written(part / file, tensors_of_file, metadata))
                writers |= dict.fromkeys(names, out)
            yield lambda name, x: writers[name].write(name, x)
        for name, data in {**files, **_index(tensors, shards)}.items():
            with open(part / name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _sync(part)
        _check_target(target, overwrite)
        with naming():
            _put_in_place(part, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if locked is not None:
            os.close(locked)


def _check_target(target: pathlib.Path, overwrite: bool) -> None:
    """Checks that a folder can be made, or may be replaced."""
    path, fix, error = str(target), "choose another name.", FileExistsError
    is_there = os.path.lexists(target)
    is_folder = is_there and target.is_dir()
    problem = f"{path!r} is a file, not a folder." if is_there and not is_folder else ""
    if is_folder and not overwrite and any(target.iterdir()):
        problem = f"the folder {path!r} exists already, and is not empty."
        fix = "choose another name, or pass overwrite=True, which replaces all its contents."
    if not target.parent.is_dir():
        problem = f"there is no folder {str(target.parent)!r} to write in."
        fix, error = "make it first, for example with os.makedirs.", FileNotFoundError
    if problem:
        raise fail("interop.write", problem, fix=fix, error=error)


def _put_in_place(part: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a folder the name of the target; an old folder then has the temporary name."""
    if not target.exists():
        os.rename(part, target)
    elif not _exchange(part, target):
        aside = target.with_name(f"{part.name}.old")
        os.rename(target, aside)
        os.rename(part, target)
        shutil.rmtree(aside, ignore_errors=True)


def _index(tensors: Tensors, shards: Mapping[str, list[str]]) -> dict[str, bytes]:
    """Returns the index of a folder, or nothing if there is only one file."""
    if len(shards) < 2:
        return {}
    total = sum(_size(*kind) for kind in tensors.values())
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return {INDEX: json.dumps(index, indent=1).encode()}


def _new_folder(path: pathlib.Path) -> int | None:
    """Makes a folder and locks it. Returns its number, which holds the lock; `None` if the system
    cannot lock folders.
    """
    while True:
        path.mkdir()
        number = None
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY)
            lock(number)
        if path.exists():  # nobody has removed it before it was locked
            return number
        if number is not None:
            os.close(number)


def _shards(tensors: Tensors, limit: int) -> dict[str, list[str]]:
    """Returns the names of the tensors in each file, in order."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, kind in tensors.items():
        bytes_of_tensor = _size(*kind)
        if parts[-1] and size + bytes_of_tensor > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += bytes_of_tensor
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(parts, 1)}


def _size(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    stored = stored_dtype(dtype)
    assert stored is not None
    return stored.itemsize * math.prod(shape)


def _sync(folder: pathlib.Path) -> None:
    """Flushes the names in a folder to the disk, if the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(a: pathlib.Path, b: pathlib.Path) -> bool:
    """Exchanges two names in one step; `False` if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    # The constants of Linux: AT_FDCWD is -100, RENAME_EXCHANGE is 2.
    return rename is not None and rename(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0


class _KeptFile(Replacement):
    """A replacement whose temporary file has a name that the next run knows, and stays until the
    file is complete. One process at a time has it open.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("save", path)
        name = self._target.name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        self._part = self._target.with_name(f"{name[:50]}.{digest}.part")
        self.journal = self._target.with_name(f"{self._part.name}.journal")

    def __enter__(self) -> _KeptFile:
        mode = 0o666 if self._old is None else 0o600  # minus the umask
        with self._written():
            while True:
                part = os.open(self._part, os.O_RDWR | os.O_CREAT, mode)
                self._file = os.fdopen(part, "r+b")
                if not lock(self._file, wait=False):
                    self._file.close()
                    problem = f"another process writes this file: {str(self._part)!r} is in use."
                    raise fail("save", problem, fix="wait until it is done.")
                if self._is_linked():
                    return self
                self._file.close()

    def _is_linked(self) -> bool:
        """Returns whether no other process put the file in place before it was locked."""
        try:
            return os.path.samestat(os.stat(self._part), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def begins_with(self, head: bytes) -> bool:
        """Returns whether the file begins with `head`."""
        with self._written():
            self._file.seek(0)
            return self._file.read(len(head)) == head

    def begin(self, head: bytes) -> None:
        """Empties the file and its journal, and writes its header."""
        with self._written():
            self.journal.unlink(missing_ok=True)
            self._file.truncate(0)
            self.write(0, head)
            self._file.flush()

    def sync(self) -> None:
        """Flushes the written data to the disk."""
        with self._written():
            self._file.flush()
            os.fsync(self._file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class ResumedWriter(Writer):
    """A writer with a journal of leaves next to the file. It has a line `[leaf, source]` for each
    leaf that is complete, with what it was made from, and `[leaf, null]` for each that was started.
    The last line of a leaf counts.
    """

    _file: _KeptFile

    def open_journal(self, journal: BufferedRandom) -> None:
        """Reads the journal of an interrupted write, to which more lines are added."""
        self._journal = journal
        self._sources: dict[str, str | None] = {}
        journal.seek(0)
        for line in journal.read().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):  # a line that was cut short
                leaf, source = json.loads(line)
                self._sources[leaf] = source
        journal.write(b"\n")  # ends such a line

    def has(self, leaf: str, source: str) -> bool:
        return bool(source) and self._sources.get(leaf) == source

    def begin(self, leaf: str) -> None:
        self._record(leaf, None)

    def done(self, leaf: str, source: str) -> None:
        self._file.sync()
        self._record(leaf, source)

    def _record(self, leaf: str, source: str | None) -> None:
        self._journal.write(json.dumps([leaf, source]).encode() + b"\n")
        self._journal.flush()


@contextlib.contextmanager
def resumed(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Yields the writer of a file like `written`, which continues an interrupted write of the same
    tensors: its data stays in a temporary file in the folder of the target, each tensor at its
    final offset.
    """
    with _KeptFile(path) as file:
        out = ResumedWriter(file, tensors, metadata)
        if not file.begins_with(out.head):
            file.begin(out.head)
        with open(file.journal, "a+b") as journal:
            out.open_journal(journal)
            yield out
        file.commit()
        file.journal.unlink(missing_ok=True)
