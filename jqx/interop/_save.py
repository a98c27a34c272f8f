"""Trees of arrays and QTensors, written to safetensors files."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from .._checks import require_that
from ..tensor import NONE, Values, check_values
from ._archive import KEY, VERSION
from ._safetensors import Path, Writer
from ._tree import describe, tensors_of


def save(path: Path, tree: Any, *, values: Values | None = None) -> None:
    """Writes a tree of arrays and QTensors to a safetensors file, which any reader of these opens.

    An array is one tensor, named by its keys joined with "/". A QTensor is the tensors
    `<path>.values`, `<path>.scale` and `<path>.zero_point`; its format, dtype, blocks and layout
    stand as JSON in the file's metadata. Codes of less than 8 bits are stored a byte each, as I8 or
    U8, unless they are packed: see `QTensor.pack`. The file is complete or not there: it takes the
    place of another of its name at the end.

    Args:
      path: of the file.
      tree: nested dicts, with strings or integers for keys, lists and tuples of arrays, QTensors
        and None.
      values: formats of your own, by name; `jqx.load` looks them up by it.

    Raises:
      OSError: the file cannot be written.
      TypeError: something else is in the tree.
      ValueError: an array has a dtype that no file holds, or a QTensor a format of your own that is
        not among `values`.

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
    node, named = describe(tree, values)
    _write(path, node, named, (leaf for _, leaf in named), {})


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
    _write(path, *describe(tree, values), leaves, metadata or {})


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
    text = json.dumps({"version": VERSION, "tree": node}, separators=(",", ":"))
    with Writer(path, tensors, {**metadata, KEY: text}) as out:
        for (leaf_path, abstract), leaf in zip(named, leaves, strict=True):
            _check_same(leaf_path, abstract, leaf)
            for name, array in tensors_of(leaf_path, leaf):
                out.write(name, np.asarray(array))


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
