"""Trees of arrays and QTensors, written to safetensors files."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._calls import called
from .._checks import require_that, shown
from .._errors import nesting
from .._files import Path
from ..ptq import Quantized
from ..tensor import QTensor
from ..tensor._shared import NONE, Lazy, Values, abstract, check_codes, check_values, read
from ..transforms._shared import advancing, bytes_of
from ._archive import KEY, QUANTIZED, VERSION
from ._quantized import contents_of
from ._resumed import ResumedWriter, Share
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
    """Writes a tree of arrays and QTensors, or what `jqx.ptq` returns, to a safetensors file, which
    any reader of these opens.

    An array is one tensor, named by its keys joined with "/". A QTensor is the tensors
    `<path>.values`, `<path>.scale` and `<path>.zero_point`; its format, dtype, blocks and layout
    stand as JSON in the file's metadata. The parts of Segments are leaves of their own, such as
    `<path>[0:1]`. Codes of less than 8 bits are stored a byte each, as I8 or U8, unless they are
    packed: see `QTensor.pack`.

    Of a `jqx.Quantized` the parameters are written, laid out plainly whatever they were laid out
    for; its plan, scales of activations, report and the shapes of its inputs stand as JSON in the
    metadata. Its function is not written: `jqx.load(path).bind(f)` makes it of `f` again.

    The file is complete or not there: it is written beside, as a `.part`, and takes the place of
    another of its name at the end. Of a link, the file that it leads to is replaced. Permissions of
    the file that is replaced stay, and its owner and group where the system allows.

    Args:
      path: of the file.
      tree: nested dicts, with strings or integers for keys, lists and tuples of arrays, QTensors,
        Segments and None; or a `jqx.Quantized`, of parameters in any pytree. `jqx.interop.Lazy` in
        the place of an array or a QTensor is read when it is written, and dropped.
      values: formats of your own, and what else of yours a plan holds, by name; `jqx.load` looks
        them up by it.
      resume: keeps what is written, as a `.part` with journals beside it, where the process ends
        early, however it does: the same call goes on there. A `Lazy` leaf whose source is the same
        is not read again; others are. A tree of other names, shapes or formats begins anew.
      share: `(i, n)` of process i of n that write one file on one file system, each a part of the
        leaves, with `resume=True`: `(jax.process_index(), jax.process_count())`. The file takes its
        place when the last of them is done.
      progress: whether to show a bar on standard error, where that is a terminal and tqdm is
        installed (extra `examples`).

    Raises:
      OSError: the file cannot be written, or its name is that of a folder, a FIFO or a device.
      TypeError: something else is in the tree.
      ValueError: an array has a dtype that no file holds, a QTensor a format of your own that is
        not among `values`, or codes that are none of its format; the tree is nested too deeply;
        `share` is none, or stands alone; or another process writes the same share.

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
    require_that(
        not isinstance(tree, (str, bytes, os.PathLike)),
        error=TypeError,
        function="save",
        problem="`tree` is a path.",
        given=f"tree == {shown(tree)}" if isinstance(tree, (str, os.PathLike)) else "bytes",
        expected="dicts, lists and tuples of arrays, QTensors and None",
        mend="pass the path first: jqx.save(path, tree).",
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
    """Writes a tree, with what the file is to say of itself beside it; see `save`."""
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
    """Writes a tree whose leaves come one after another, such that one is held at a time.

    Args:
      path: of the file.
      tree: as `jqx.save` takes it, with `jax.ShapeDtypeStruct` in place of arrays.
      leaves: arrays and QTensors, in order: of dicts in theirs, not sorted.
      values: formats of your own, by name.
      metadata: what the file is to say of itself beside the tree.
      progress: as for `jqx.save`.

    Raises:
      OSError: the file cannot be written.
      TypeError: something else is in the tree.
      ValueError: a leaf is not what the tree says; or as for `jqx.save`.

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
            require_that(
                not isinstance(array, jax.ShapeDtypeStruct),
                error=TypeError,
                function="save",
                problem=f"the array {name!r} has no values.",
                given="a jax.ShapeDtypeStruct",
                expected="an array",
                mend="pass arrays; jqx.interop.save_leaves takes shapes, and arrays one by one.",
            )


def _check_metadata(metadata: Any) -> None:
    fits = isinstance(metadata, Mapping) and all(
        isinstance(text, str) for item in metadata.items() for text in item
    )
    require_that(
        metadata is None or (fits and not {KEY, QUANTIZED} & {*metadata}),
        error=TypeError,
        function="interop.save_leaves",
        problem="`metadata` is no dict of strings, or has a key that jqx needs.",
        given=shown(metadata),
        expected=f"strings by name, none of them {KEY!r} or {QUANTIZED!r}",
        mend="pass for example metadata={'format': 'pt'}.",
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
    """Returns the tensors of a file, and what it says of itself."""
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
    """Shows how many bytes of leaves are written, and how long the rest takes; yields what says
    that the next leaf is.
    """
    sizes = [bytes_of(abstract(leaf)) for leaf in leaves]
    rest = iter(sizes)
    with advancing("save", "B", sum(sizes), progress, unit_scale=True, delay=1) as advance:
        yield lambda: advance(next(rest))


def _check_share(resume: bool, share: Any) -> None:
    fits = isinstance(share, tuple) and [*map(type, share)] == [int, int]
    require_that(
        fits and 0 <= share[0] < share[1] and (resume or share == (0, 1)),
        error=ValueError,
        function="save",
        problem="`share` does not say which of how many processes writes."
        if resume
        else "`share` is for writes that are resumed.",
        given=f"share == {shown(share)}, resume == {resume}",
        expected="(i, n), 0 <= i < n, beside resume=True",
        mend="pass share=(jax.process_index(), jax.process_count()) and resume=True.",
    )


def _check_same(path: str, abstract: Any, leaf: Any) -> None:
    """Checks that a leaf is of the kind announced; its dtypes and shapes are checked on the way."""
    require_that(
        jax.tree.structure(abstract) == jax.tree.structure(leaf),
        error=ValueError,
        function="save",
        problem=f"the leaf {path!r} is not what was announced.",
        given=f"{jax.tree.structure(leaf)}",
        expected=f"{jax.tree.structure(abstract)}",
        mend="make both from one function, such as with jax.eval_shape.",
    )
