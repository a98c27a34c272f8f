"""Writes trees of arrays and QTensors to safetensors files."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._calls import called
from .._checks import shown
from .._errors import fail, nesting
from .._files import Path
from ..ptq import Quantized
from ..tensor import QTensor
from ..tensor._shared import NONE, Lazy, Values, abstract, check_codes, check_values, read
from ..transforms._shared import advancing, bytes_of
from ._archive import QUANTIZED, VERSION
from ._quantized import contents_of
from ._resumed import ResumedWriter, Share
from ._safetensors import KEY
from ._tree import describe, tensors_of
from ._writer import Writer


@called("save", 'pass for example jqx.save("model.safetensors", params).')
def save(
    path: Path,
    tree: Any,
    *,
    values: Values | None = None,
    resume: bool = False,
    share: Share = (0, 1),
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
      resume: whether an interrupted write keeps its data, as a `.part` file with journals, so that
        the same call continues there. A `Lazy` leaf whose source is unchanged is not read again;
        other leaves are. A tree with other names, shapes or formats starts again.
      share: `(i, n)` for process i of n that write one file on one file system, each a part of the
        leaves, with `resume=True`: `(jax.process_index(), jax.process_count())`. The file is put in
        place when the last process is done.
      progress: whether to show a progress bar on standard error, if this is a terminal and tqdm is
        installed (extra `examples`).

    Raises:
      OSError: if the file cannot be written, or its path is a folder, a FIFO or a device.
      TypeError: if something else is in the tree.
      ValueError: if an array has a dtype that files cannot hold; if a QTensor has a format of your
        own that is not in `values`, or codes that its format does not have; if a weight of a
        `jqx.Quantized` has another scale than its `affines`; if the tree is nested too deeply; if
        `share` is invalid or passed without `resume`; or if another process writes the same share.

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
        raise fail(
            "save",
            "`tree` is a path.",
            given=f"tree == {shown(tree)}" if isinstance(tree, (str, os.PathLike)) else "bytes",
            expected="dicts, lists and tuples of arrays, QTensors and None",
            fix="pass the path first: jqx.save(path, tree).",
            error=TypeError,
        )
    metadata = {}
    if isinstance(tree, Quantized):
        with nesting("save"):
            tree, metadata[QUANTIZED] = contents_of(tree, values)
    save_tree(path, tree, metadata, values, resume=resume, share=share, progress=progress)


def save_tree(
    path: Path,
    tree: Any,
    metadata: Mapping[str, str],
    values: Values = NONE,
    *,
    resume: bool = False,
    share: Share = (0, 1),
    progress: bool = True,
) -> None:
    """Writes a tree and further metadata; see `save`."""
    _check_share(resume, share)
    node, named = _described(tree, values)
    _check_known(named)
    if resume:
        _write_resumed(path, node, named, metadata, share, progress)
        return
    leaves = [leaf for _, leaf in named]
    with _bar(leaves, progress) as advance:
        _write(path, node, named, map(read, leaves), metadata, advance)


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
    _check_metadata(metadata)
    node, named = _described(tree, values)
    with _bar([leaf for _, leaf in named], progress) as advance:
        _write(path, node, named, leaves, metadata or {}, advance)


def _described(tree: Any, values: Values) -> tuple[Any, list[tuple[str, Any]]]:
    with nesting("save"):
        return describe(tree, values)


def _check_known(named: list[tuple[str, Any]]) -> None:
    for path, leaf in named:
        for name, array in () if isinstance(leaf, Lazy) else tensors_of(path, leaf):
            if isinstance(array, jax.ShapeDtypeStruct):
                raise fail(
                    "save",
                    f"the array {name!r} has no values.",
                    given="a jax.ShapeDtypeStruct",
                    expected="an array",
                    fix="pass arrays; jqx.interop.save_leaves takes shapes, and arrays one by one.",
                    error=TypeError,
                )


def _check_metadata(metadata: Any) -> None:
    fits = isinstance(metadata, Mapping) and all(
        isinstance(text, str) for item in metadata.items() for text in item
    )
    if metadata is not None and not (fits and not {KEY, QUANTIZED} & {*metadata}):
        raise fail(
            "interop.save_leaves",
            "`metadata` is not a dict of strings, or has a key that jqx needs.",
            given=shown(metadata),
            expected=f"strings by name, none of them {KEY!r} or {QUANTIZED!r}",
            fix="pass for example metadata={'format': 'pt'}.",
            error=TypeError,
        )


def _write(
    path: Path,
    node: Any,
    named: list[tuple[str, Any]],
    leaves: Iterable[Any],
    metadata: Mapping[str, str],
    advance: Callable[[], None] = lambda: None,
) -> None:
    with Writer(path, *_announced(node, named, metadata)) as out:
        for (leaf_path, kind), leaf in zip(named, leaves, strict=True):
            _write_leaf(out, leaf_path, abstract(kind), leaf)
            advance()


def _write_resumed(
    path: Path,
    node: Any,
    named: list[tuple[str, Any]],
    metadata: Mapping[str, str],
    share: Share,
    progress: bool,
) -> None:
    paths, leaves = zip(*named, strict=True) if named else ((), ())
    announced = _announced(node, named, metadata)
    with _bar(leaves, progress) as advance, ResumedWriter(path, *announced, paths, share) as out:
        for place, (leaf_path, leaf) in enumerate(named):
            source = leaf.source if isinstance(leaf, Lazy) else ""
            if out.is_own(place) and not out.has(leaf_path, source):
                made = read(leaf)
                out.begin(leaf_path)
                _write_leaf(out, leaf_path, abstract(leaf), made)
                out.done(leaf_path, source)
            advance()


def _announced(
    node: Any, named: list[tuple[str, Any]], metadata: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the tensors of a file, and its metadata."""
    tensors = {
        name: (np.dtype(array.dtype), array.shape)
        for leaf_path, leaf in named
        for name, array in tensors_of(leaf_path, abstract(leaf))
    }
    with nesting("save"):
        text = json.dumps({"version": VERSION, "tree": node}, separators=(",", ":"))
    return tensors, {**metadata, KEY: text}


def _write_leaf(out: Writer, path: str, kind: Any, leaf: Any) -> None:
    _check_same(path, kind, leaf)
    known = jax.tree.map(np.asarray, leaf)
    if isinstance(known, QTensor):
        check_codes("save", known, path)
    for name, array in tensors_of(path, known):
        out.write(name, array)


@contextlib.contextmanager
def _bar(leaves: Sequence[Any], progress: bool) -> Iterator[Callable[[], None]]:
    """Shows how many bytes of leaves are written, and the remaining time; yields a function to call
    for the next leaf.
    """
    sizes = [bytes_of(abstract(leaf)) for leaf in leaves]
    rest = iter(sizes)
    with advancing("save", "B", sum(sizes), progress, unit_scale=True, delay=1) as advance:
        yield lambda: advance(next(rest))


def _check_share(resume: bool, share: Any) -> None:
    fits = isinstance(share, tuple) and [*map(type, share)] == [int, int]
    if not (fits and 0 <= share[0] < share[1] and (resume or share == (0, 1))):
        raise fail(
            "save",
            "`share` does not name a process and the number of processes."
            if resume
            else "`share` needs a write that can be resumed.",
            given=f"share == {shown(share)}, resume == {resume}",
            expected="(i, n), 0 <= i < n, with resume=True",
            fix="pass share=(jax.process_index(), jax.process_count()) and resume=True.",
        )


def _check_same(path: str, abstract: Any, leaf: Any) -> None:
    """Checks that a leaf has the announced kind; its dtypes and shapes are checked elsewhere."""
    if jax.tree.structure(abstract) != jax.tree.structure(leaf):
        raise fail(
            "save",
            f"the leaf {path!r} differs from what was announced.",
            given=f"{jax.tree.structure(leaf)}",
            expected=f"{jax.tree.structure(abstract)}",
            fix="make both from one function, for example with jax.eval_shape.",
        )
