"""An open Orbax checkpoint, whose arrays Orbax reads one by one."""

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ._safetensors import Entry, stored_dtype

_MARKS = ("_METADATA", "_CHECKPOINT_METADATA")
"""Files that an Orbax folder has."""


def is_orbax(folder: str) -> bool:
    """Returns whether a folder is an Orbax checkpoint."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in _MARKS)


class OrbaxSource:
    """An open checkpoint of a tree of arrays.

    Attributes:
      path: path of the folder.
      tree: the containers of the tree; each leaf is the name of an array, its keys joined with "/".
      entries: dtype, shape and size in memory of each array.
      metadata: empty.
      config: none.
      describes_tree, asked: see `Source`.

    Raises:
      ImportError: if Orbax is not installed.
      ValueError: if it is not a checkpoint that Orbax reads, or has leaves that are not arrays.
    """

    describes_tree, asked = False, False

    def __init__(self, path: str) -> None:
        self.path = path
        self.config: Mapping[str, Any] | None = None
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._keys: dict[str, tuple[Any, ...]] = {}
        self._orbax = _orbax()
        self._reader = self._orbax.PyTreeCheckpointer()
        try:
            self._known = self._reader.metadata(os.path.abspath(path)).item_metadata.tree
        except Exception as error:  # any error of Orbax and its storage
            self._refuse(error)
        self.tree = self._named(self._known, ())

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of an array."""
        return self._dtypes[name]

    def check_dtype(self, name: str, dtype: np.dtype) -> None:
        """Checks that an array has a dtype."""
        assert self.dtype(name) == dtype, f"{name}: {self.dtype(name)} is not {dtype}"

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns an array."""
        spec = jax.ShapeDtypeStruct(self.entries[name].shape, dtype)
        item, args = self._alone(self._known, self._keys[name], spec)
        wanted = self._orbax.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
        try:
            found = self._reader.restore(os.path.abspath(self.path), args=wanted)
        except Exception as error:
            self._refuse(error)
        for key in self._keys[name]:
            found = found[key]
        made = np.asarray(found)
        assert (made.shape, made.dtype) == (spec.shape, dtype), name
        return made

    view = read

    def _named(self, node: Any, keys: tuple[Any, ...]) -> Any:
        """Returns a tree of names, after recording its arrays."""
        if isinstance(node, Mapping):
            return {key: self._named(item, (*keys, key)) for key, item in node.items()}
        if isinstance(node, (list, tuple)):
            return [self._named(item, (*keys, i)) for i, item in enumerate(node)]
        if node is None:
            return None
        name = "/".join(map(str, keys))
        shape, dtype = getattr(node, "shape", None), getattr(node, "dtype", None)
        if shape is None or dtype is None or stored_dtype(jnp.dtype(dtype)) is None:
            self._refuse(TypeError(f"{name!r} is not a supported array: {type(node).__name__}"))
        kind = jnp.dtype(dtype)
        self._dtypes[name], self._keys[name] = kind, keys
        size = math.prod(shape) * kind.itemsize
        self.entries[name] = Entry(kind.name, tuple(shape), 0, size)
        return name

    def _alone(self, node: Any, keys: Sequence[Any], spec: Any) -> tuple[Any, Any]:
        """Returns a tree that requests one array, so that nothing else is restored."""
        as_numpy = self._orbax.RestoreArgs(restore_type=np.ndarray)
        if not keys:
            return spec, as_numpy
        key, *rest = keys
        item, args = self._alone(node[key], rest, spec)
        if isinstance(node, Mapping):
            return {key: item}, {key: args}
        items, many = [self._orbax.PLACEHOLDER] * len(node), [as_numpy] * len(node)
        items[key], many[key] = item, args
        return items, many

    def _refuse(self, error: Exception) -> NoReturn:
        text = str(error).strip().splitlines() or [""]
        raise fail(
            "interop.read",
            f"{self.path!r} is not an Orbax checkpoint that can be read.",
            given=f"{type(error).__name__}: {text[0][:500]}",
            expected="a folder that orbax.checkpoint saved: arrays in dicts and lists",
            fix="copy or download it again; if it has several items or steps, pass the "
            "one with the parameters.",
        ) from error


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise fail(
            "interop.read",
            "the checkpoint is an Orbax checkpoint, but Orbax is not installed.",
            given=str(error),
            expected="the package orbax-checkpoint",
            fix="pip install orbax-checkpoint",
            error=ImportError,
        ) from error
