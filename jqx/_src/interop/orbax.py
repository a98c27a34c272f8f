"""Orbax checkpoints, which Orbax reads array by array; trees for it to save, `to_orbax` and
`from_orbax`; and the quantized trees of gemma, which are saved with it, `from_gemma`.
"""

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import QTensor
from ...extend import Groups
from ..checks import called, check_instance, shown
from ..errors import fail
from .codec import CodedLeaf, pack, weight
from .safetensors import Entry, Source, stored_dtype
from .tree import StoredArray

_MARKS = ("_METADATA", "_CHECKPOINT_METADATA")
"""Files that an Orbax folder has."""


def is_orbax(folder: str) -> bool:
    """Returns whether a folder is an Orbax checkpoint."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in _MARKS)


class OrbaxSource(Source):
    """An open checkpoint of a tree of arrays.

    Attributes:
      tree: the tree of `StoredArray`s; the name of each is its keys, joined with "/".

    Raises:
      ImportError: if Orbax is not installed.
      ValueError: if it is not a checkpoint that Orbax reads, or has leaves that are not arrays.
    """

    def _open(self) -> None:
        self._dtypes: dict[str, np.dtype] = {}
        self._keys: dict[str, tuple[Any, ...]] = {}
        self._orbax = _orbax()
        self._reader = self._orbax.PyTreeCheckpointer()
        self._opened.callback(self._reader.close)
        try:
            self._known = self._reader.metadata(os.path.abspath(self.path)).item_metadata.tree
        except Exception as error:  # any error of Orbax and its storage
            self._refuse(error)
        self.tree = self._named(self._known, ())

    def dtype(self, name: str) -> np.dtype:
        return self._dtypes[name]

    def read(self, name: str, dtype: np.dtype, *, mapped: bool = False) -> np.ndarray:
        spec = jax.ShapeDtypeStruct(self.entries[name].shape, dtype)
        item, args = self._alone(self._known, self._keys[name], spec)
        restore_args = self._orbax.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
        try:
            item_read = self._reader.restore(os.path.abspath(self.path), args=restore_args)
        except Exception as error:
            self._refuse(error)
        for key in self._keys[name]:
            item_read = item_read[key]
        array = np.asarray(item_read)
        assert (array.shape, array.dtype) == (spec.shape, dtype), name
        return array

    def _named(self, node: Any, keys: tuple[Any, ...]) -> Any:
        """Returns a tree of stored arrays, after recording their shapes and keys."""
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
        return StoredArray(name, kind)

    def _alone(self, node: Any, keys: Sequence[Any], spec: Any) -> tuple[Any, Any]:
        """Returns a tree that requests one array, so that nothing else is restored."""
        as_numpy = self._orbax.RestoreArgs(restore_type=np.ndarray)
        if not keys:
            return spec, as_numpy
        key, *inner_keys = keys
        item, args = self._alone(node[key], inner_keys, spec)
        if isinstance(node, Mapping):
            return {key: item}, {key: args}
        items, restore_args = [self._orbax.PLACEHOLDER] * len(node), [as_numpy] * len(node)
        items[key], restore_args[key] = item, args
        return items, restore_args

    def _refuse(self, error: Exception) -> NoReturn:
        text = str(error).strip().splitlines() or [""]
        problem = f"{self.path!r} is not an Orbax checkpoint that can be read."
        detail = f"{type(error).__name__}: {text[0][:500]}"
        fix = "copy it again; if it has several items or steps, pass the one with the parameters."
        raise fail("interop.read", problem, given=detail, fix=fix) from error


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        problem = "the checkpoint is an Orbax checkpoint, but Orbax is not installed."
        fix = "pip install orbax-checkpoint"
        raise fail("interop.read", problem, fix=fix, error=ImportError) from error


# Trees that Orbax saves and restores, in which unsigned codes of 2 and 4 bits are stored as
# signed ones, since its storage (TensorStore) lacks the unsigned ones.


_STORED = {jnp.dtype(jnp.uint4): jnp.int4, jnp.dtype(jnp.uint2): jnp.int2}
"""The stored dtype with the same bits, for dtypes that cannot be stored."""


@called("interop.to_orbax", "pass the tree to save.")
def to_orbax(tree: Any) -> Any:
    """Returns a tree of QTensors and arrays with dtypes that Orbax stores.

    Orbax saves QTensors unchanged, each device its part, and restores them to any mesh. The
    exceptions are codes of `jnp.uint4` and `jnp.uint2`: this function returns them as int4 and int2
    with the same bits. `from_orbax` inverts it.

    Args:
      tree: any pytree. Arrays may be `jax.ShapeDtypeStruct`, with or without a sharding: such a
        tree, for example from `jqx.parallel.shardings`, is the target of a restore.

    Returns:
      The same tree. Arrays stay where they are, and arrays of other dtypes are the same objects.
      Use the result only with Orbax: its QTensors may have codes whose dtype is not that of their
      format.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec("uint4", symmetric=False)
      >>> q = jqx.QTensor.quantize(jnp.array([[0.0, 15.0]]), spec)
      >>> stored = jqx.interop.to_orbax({"w": q})
      >>> stored["w"].values
      Array([[-8, -1]], dtype=int4)
      >>> jqx.interop.from_orbax(stored, like={"w": q})["w"].values
      Array([[8, 15]], dtype=uint4)
    """
    return jax.tree.map(lambda x: _viewed(x, _STORED.get(np.dtype(x.dtype), x.dtype)), tree)


_FIX = "restore with to_orbax(like) as the target, and pass the same `like`."


@called(
    "interop.from_orbax",
    "pass the restored tree, and like=, a tree like the saved one.",
)
def from_orbax(stored: Any, like: Any) -> Any:
    """Returns a restored tree, saved from the result of `to_orbax`, in its original dtypes.

    Args:
      stored: the tree that Orbax restored.
      like: the tree that was passed to `to_orbax`, or one with its shapes and dtypes, abstract or
        not.

    Raises:
      ValueError: if the trees differ, or an array does not have the dtype that was stored.
    """
    shapes = jax.tree.structure(stored), jax.tree.structure(like)
    if shapes[0] != shapes[1]:
        stored_text, like_text = (str(shape)[:300] for shape in shapes)
        problem = f"the trees differ: {stored_text}, and `like` {like_text}."
        raise fail("interop.from_orbax", problem, fix=_FIX)

    def back(x: Any, kind: Any) -> Any:
        dtype = np.dtype(kind.dtype)
        stored_as = np.dtype(_STORED.get(dtype, dtype))
        if x.dtype != stored_as or tuple(x.shape) != tuple(kind.shape):
            expected = f"{stored_as}{list(kind.shape)} for {dtype}"
            problem = f"an array is {x.dtype}{list(x.shape)}, not {expected}."
            raise fail("interop.from_orbax", problem, fix=_FIX)
        return _viewed(x, dtype)

    return jax.tree.map(back, stored, like)


def _viewed(x: Any, dtype: Any) -> Any:
    """Returns the same bits in another dtype, on the same devices."""
    if x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    if isinstance(x, np.ndarray):
        return x.view(dtype)
    return lax.bitcast_convert_type(x, dtype)


# Trees of the gemma library in int4 or int8, with a `kernel` and the `scale` that divides it.


_PREFIX, _ONLY, _WEIGHT = "_IntEinsum_", "_IntEinsum_0", "w"
_KINDS = (jnp.dtype(jnp.int4), jnp.dtype(jnp.int8))


@called("interop.from_gemma", "pass the tree that Orbax restores.")
def from_gemma(params: Any) -> Any:
    """Returns parameters that `gemma.peft.quantize` has quantized, with QTensors.

    The published int4 checkpoints of Gemma are such trees, in Orbax. `jqx.load(folder)` reads them
    array by array, with the same result. This function takes a tree that has already been restored.

    Each `kernel` with a `scale` becomes one QTensor, under the key of the float weight: `w`,
    `gating_einsum` or `linear`; after `quantize(in_place_keys=True)` it is `kernel`, with a bias
    beside it. Thus functions of the float parameters run on them with
    `jqx.convert(f, jqx.Policy([]))`. The codes are those of the tree. gemma divides by its scale,
    and a QTensor multiplies by the reciprocal in float32: a weight may differ by one unit in the
    last place.

    Args:
      params: nested dicts of arrays.

    Returns:
      The tree, with QTensors of packed codes; other leaves are the same.

    Raises:
      TypeError: if `params` is not a dict.
      ValueError: if nothing is quantized, a kernel is not int4 or int8, or its scale does not fit.

    Source: https://github.com/google-deepmind/gemma (gemma.peft, version 3.3).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> kernel = jnp.array([[7, -3], [2, 1]], jnp.int4)
      >>> own = {"_IntEinsum_0": {"kernel": kernel, "scale": jnp.array([[2.0, 4.0]])}}
      >>> jqx.interop.from_gemma({"mlp": own})["mlp"]["w"].dequantize()
      Array([[ 3.5 , -0.75],
             [ 1.  ,  0.25]], dtype=float32)
    """
    fix = "pass what orbax.checkpoint restores: nested dicts of arrays."
    check_instance("interop.from_gemma", "params", params, Mapping, fix=fix)
    quantized, count = _replaced(params, _coded)
    if not count:
        detail = "no `kernel` of int4 or int8 with a `scale`"
        raise _not_gemma((), detail, "use float trees as they are.")
    return quantized


def read_tree(source: OrbaxSource, asked: np.dtype | None) -> tuple[str, Any]:
    """Returns the format of an Orbax checkpoint, and its tree with a reader for each leaf."""

    def leaf(path: tuple[str, ...], kernel: StoredArray, scale: StoredArray) -> CodedLeaf:
        shapes = [source.entries[x.path].shape for x in (kernel, scale)]
        kinds = [x.dtype for x in (kernel, scale)]
        groups = _groups(path, *map(jax.ShapeDtypeStruct, shapes, kinds))
        template = weight(groups, kinds[0], np.dtype(np.float32), asked or kinds[1])

        def decode(codes: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
            values = codes
            if kinds[0] == _KINDS[0]:
                values = pack(codes.astype(np.int8).view(np.uint8) & np.uint8(15), 4)
            return [values, np.float32(1) / scales.astype(np.float32)]

        tensors = tuple((x.path, x.dtype) for x in (kernel, scale))
        return CodedLeaf("/".join(path), tensors, template, decode)

    tree, count = _replaced(source.tree, leaf)
    return "gemma" if count else "orbax", tree


def _replaced(params: Any, make: Callable[[tuple[str, ...], Any, Any], Any]) -> tuple[Any, int]:
    """Returns a tree with the result of `make` for each `kernel` and `scale`, and their number."""
    count = 0

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        nonlocal count
        if not isinstance(node, Mapping):
            return node
        children: dict[str, Any] = {}
        for key, item in node.items():
            address = (*path, str(key))
            if not _is_coded(item):
                children[key] = walk(item, address)
                continue
            count += 1
            pair = item["kernel"], item["scale"]
            if not str(key).startswith(_PREFIX):  # quantized in place, with a bias beside it
                rest = {name: x for name, x in item.items() if name not in ("kernel", "scale")}
                children[key] = {**rest, "kernel": make((*address, "kernel"), *pair)}
                continue
            name = _WEIGHT if key == _ONLY else str(key).removeprefix(_PREFIX)
            if name in node:
                raise _not_gemma(address, "two weights of one name", "drop one of them.")
            if len(item) != 2:
                raise _not_gemma(address, shown([*item]), "keep only kernel and scale.")
            children[name] = make((*path, name), *pair)
        return children

    return walk(params, ()), count


def _is_coded(item: Any) -> bool:
    """Whether a node has a kernel of codes and its scale."""
    if not isinstance(item, Mapping) or not {"kernel", "scale"} <= {*item}:
        return False
    kinds = [getattr(item[part], "dtype", None) for part in ("kernel", "scale")]
    return all(kind is not None for kind in kinds) and kinds[0] in _KINDS


def _groups(path: tuple[str, ...], kernel: Any, scale: Any) -> Groups:
    """Returns which elements share a scale."""
    shape, sizes = tuple(kernel.shape), tuple(scale.shape)
    fits = len(shape) == len(sizes) and all(m in (1, n) for n, m in zip(shape, sizes, strict=True))
    if not fits:
        detail = f"kernel {kernel.dtype.name}{list(shape)}, scale {scale.dtype.name}{list(sizes)}"
        raise _not_gemma(path, detail, "use sizes of the kernel, or 1, for the scale.")
    return Groups(shape, tuple(n if m == 1 else 1 for n, m in zip(shape, sizes, strict=True)))


def _coded(path: tuple[str, ...], kernel: Any, scale: Any) -> QTensor:
    _groups(path, kernel, scale)
    factor = 1 / jnp.asarray(scale).astype(jnp.float32)
    qtype, real = jnp.dtype(kernel.dtype), jnp.dtype(scale.dtype)
    q = QTensor(jnp.asarray(kernel), factor, qtype=qtype, dtype=real)
    return q.pack() if qtype == _KINDS[0] else q


def _not_gemma(path: tuple[str, ...], detail: str, fix: str) -> Exception:
    problem = f"the tree is not one of gemma{' at ' + '/'.join(path) if path else ''}."
    return fail("interop.from_gemma", problem, given=detail, fix=fix)
