"""Trees of arrays and QTensors, written to safetensors files."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from .._calls import called
from .._checks import require_that, shown
from .._errors import nesting
from .._files import Path
from ..ptq import Quantized
from ..tensor import QTensor
from ..tensor._shared import NONE, Values, check_codes, check_values
from ._archive import KEY, QUANTIZED, VERSION
from ._quantized import contents_of
from ._tree import describe, tensors_of
from ._writer import Writer


@called("save", 'pass for example jqx.save("model.safetensors", params).')
def save(path: Path, tree: Any, *, values: Values | None = None) -> None:
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
        Segments and None; or a `jqx.Quantized`, of parameters in any pytree.
      values: formats of your own, and what else of yours a plan holds, by name; `jqx.load` looks
        them up by it.

    Raises:
      OSError: the file cannot be written, or its name is that of a folder, a FIFO or a device.
      TypeError: something else is in the tree.
      ValueError: an array has a dtype that no file holds, a QTensor a format of your own that is
        not among `values`, or codes that are none of its format; or the tree is nested too deeply.

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
    node, named = _described(tree, values)
    _check_known(named)
    _write(path, node, named, (leaf for _, leaf in named), metadata)


def save_leaves(
    path: Path,
    tree: Any,
    leaves: Iterable[Any],
    *,
    values: Values | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a tree whose leaves come one after another, such that one is held at a time.

    Args:
      path: of the file.
      tree: as `jqx.save` takes it, with `jax.ShapeDtypeStruct` in place of arrays.
      leaves: arrays and QTensors, in order: of dicts in theirs, not sorted.
      values: formats of your own, by name.
      metadata: what the file is to say of itself beside the tree.

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
    _write(path, *_described(tree, values), leaves, metadata or {})


def _described(tree: Any, values: Values) -> tuple[Any, list[tuple[str, Any]]]:
    with nesting("save"):
        return describe(tree, values)


def _check_known(named: list[tuple[str, Any]]) -> None:
    for path, leaf in named:
        for name, array in tensors_of(path, leaf):
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
) -> None:
    tensors = {
        name: (np.dtype(array.dtype), array.shape)
        for leaf_path, leaf in named
        for name, array in tensors_of(leaf_path, leaf)
    }
    with nesting("save"):
        text = json.dumps({"version": VERSION, "tree": node}, separators=(",", ":"))
    with Writer(path, tensors, {**metadata, KEY: text}) as out:
        for (leaf_path, abstract), leaf in zip(named, leaves, strict=True):
            _check_same(leaf_path, abstract, leaf)
            known = jax.tree.map(np.asarray, leaf)
            if isinstance(known, QTensor):
                check_codes("save", known, leaf_path)
            for name, array in tensors_of(leaf_path, known):
                out.write(name, array)


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
