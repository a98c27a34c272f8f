"""The description of a tree in a file: its structure as JSON, and the tensors of each leaf.

    null | {"dict": [[key, node], ...]} | {"list": [node, ...]} | {"tuple": [node, ...]}
    {"segments": [node, ...], "axis": axis}
    {"array": name of the tensor, "dtype": dtype}
    {"qtensor": path, "fields": static fields, "values": node, "scale": node, "zero_point": node}
    (and "offset": node, "order": node, if it has them)

A leaf's path is its keys, joined with "/". An array is the tensor of that name. A QTensor is the
tensors `<path>.values`, `<path>.scale` and `<path>.zero_point`; if its scale is quantized too,
`<path>.scale.values` and `<path>.scale.scale`; if it has an offset or an order, `<path>.offset` and
`<path>.order`. The parts of Segments are leaves with the paths `<path>[0:1]` and so on. Names that
are taken get a "~" at the end.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, Union

import jax
import numpy as np

from .. import _compat
from .._checks import as_dtype, shown
from .._errors import fail
from ..tensor import QTensor, Segments
from ..tensor._shared import (
    Lazy,
    Values,
    abstract,
    fields_from_json,
    fields_to_json,
    lazy_parts,
    unchecked_segments,
)
from ._safetensors import METADATA, stored_dtype

Read = Callable[[str, np.dtype], Any]
"""Makes an array from the name of a tensor and its dtype."""

_MORE = ("offset", "order")
"""Parts that few QTensors have; they are left out if they are `None`."""

_EMPTY = "tree"
"""The path of a leaf that is the whole tree."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a file: the name of its tensor, and its dtype."""

    path: str
    dtype: np.dtype
    consumed: ClassVar[tuple[str, ...]] = ()

    def make(self, read: Read) -> Any:
        """Returns the array."""
        return read(self.path, self.dtype)


@dataclasses.dataclass(frozen=True)
class StoredQTensor:
    """A QTensor of a file: its static fields, and the stored form of its arrays."""

    path: str
    fields: dict[str, Any]
    values: StoredArray
    scale: Union[StoredArray, "StoredQTensor"]
    zero_point: StoredArray | None
    more: dict[str, Union[StoredArray, "StoredQTensor"]] = dataclasses.field(default_factory=dict)
    consumed: ClassVar[tuple[str, ...]] = ()

    def make(self, read: Read) -> QTensor:
        """Returns the QTensor of arrays from `read`."""
        zero_point = None if self.zero_point is None else self.zero_point.make(read)
        parts = self.values.make(read), self.scale.make(read), zero_point
        more = {name: part.make(read) for name, part in self.more.items()}
        try:
            return QTensor(*parts, **more, **self.fields)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{error}\n  at:       {self.path!r}") from None


Stored = StoredArray | StoredQTensor


def map_stored(f: Callable[[Stored], Any], tree: Any) -> Any:
    """Applies a function to every leaf of a tree of stored leaves."""
    if isinstance(tree, dict):
        return {key: map_stored(f, item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_stored(f, item) for item in tree)
    if isinstance(tree, Segments):
        parts = [map_stored(f, part) for part in tree.parts]
        known = all(hasattr(part, "shape") for part in parts)
        return (Segments if known else unchecked_segments)(parts, tree.axis)
    return tree if tree is None else f(tree)


def tensors_of(path: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a leaf, each with the name of its tensor."""
    if not isinstance(leaf, QTensor):
        yield path, leaf
        return
    for field in ("values", "scale", "zero_point", *_MORE):
        if getattr(leaf, field) is not None:
            yield from tensors_of(f"{path}.{field}", getattr(leaf, field))


def describe(tree: Any, values: Values) -> tuple[Any, list[tuple[str, Any]]]:
    """Returns the JSON of a tree, and its leaves in order, each with its path.

    Raises:
      TypeError: if something in it is not a dict, list, tuple, array, QTensor, Lazy or None, or a
        key of a dict is not a string or integer.
      ValueError: if an array has a dtype that files cannot hold, or a QTensor has a format of the
        user that is not in `values`.
    """
    leaves: list[tuple[str, Any]] = []
    taken = {METADATA}

    def node_of(x: Any, keys: tuple[str, ...]) -> Any:
        if x is None:
            return None
        if type(x) is dict:
            _check_keys(x, keys)
            return {"dict": [[key, node_of(x[key], (*keys, str(key)))] for key in x]}
        if type(x) in (list, tuple):
            items = [node_of(item, (*keys, str(i))) for i, item in enumerate(x)]
            return {type(x).__name__: items}
        if isinstance(x, Segments):
            places = itertools.pairwise(x.bounds)
            paths = [(*keys[:-1], f"{''.join(keys[-1:])}[{a}:{b}]") for a, b in places]
            parts = [node_of(part, own) for part, own in zip(x.parts, paths, strict=True)]
            return {"segments": parts, "axis": x.axis}
        if isinstance(x, Lazy) and isinstance(x.spec, Segments):
            return node_of(unchecked_segments(lazy_parts(x), x.spec.axis), keys)
        kind = abstract(x)
        _check_leaf(kind, keys)
        path = "/".join(keys) or _EMPTY
        while taken & {path, *(name for name, _ in tensors_of(path, kind))}:
            path += "~"
        taken.update([path, *(name for name, _ in tensors_of(path, kind))])
        leaves.append((path, x))
        return _leaf_to_json(path, kind, values)

    return node_of(tree, ()), leaves


def _leaf_to_json(path: str, x: Any, values: Values) -> Any:
    if not isinstance(x, QTensor):
        return {"array": path, "dtype": np.dtype(x.dtype).name}
    fields = fields_to_json("save", x, values)
    parts = {
        name: part if part is None else _leaf_to_json(f"{path}.{name}", part, values)
        for name in ("values", "scale", "zero_point")
        for part in [getattr(x, name)]
    }
    for name in _MORE:
        if getattr(x, name) is not None:
            parts[name] = _leaf_to_json(f"{path}.{name}", getattr(x, name), values)
    return {"qtensor": path, "fields": fields, **parts}


def _check_keys(x: dict[Any, Any], keys: tuple[str, ...]) -> None:
    for key in x:
        if type(key) not in (str, int):
            raise fail(
                "save",
                f"a key of the dict at {_place(keys)} is neither a string nor an integer.",
                given=f"a key of type {type(key).__name__}",
                expected="strings or integers",
                fix="use strings as keys.",
                error=TypeError,
            )


def _check_leaf(x: Any, keys: tuple[str, ...]) -> None:
    kinds = (QTensor, jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    if not (isinstance(x, kinds) and not isinstance(x, np.ma.MaskedArray)):
        raise fail(
            "save",
            f"there is an object that cannot be stored at {_place(keys)}.",
            given=f"an object of type {type(x).__name__}",
            expected="dicts, lists and tuples of arrays, QTensors, Segments and None",
            fix="make numbers arrays, jnp.asarray(x), and other containers dicts.",
            error=TypeError,
        )
    for name, array in tensors_of("/".join(keys) or _EMPTY, x):
        if not isinstance(array, kinds[1:]):
            raise fail(
                "save",
                f"{name!r} is not an array.",
                given=f"an object of type {type(array).__name__}",
                expected="QTensors of arrays",
                fix="save the original QTensors, not the result of a map over their arrays.",
                error=TypeError,
            )
        if isinstance(array, jax.Array) and not _compat.is_concrete(array):
            raise fail(
                "save",
                f"the array {name!r} has no values yet.",
                given="a traced array",
                expected="an array outside jax.jit",
                fix="return it from the jitted function, and save the result.",
                error=TypeError,
            )
        if stored_dtype(array.dtype) is None:
            raise fail(
                "save",
                f"the array {name!r} has a dtype that files cannot hold.",
                given=str(array.dtype),
                expected="numbers of JAX, or bool",
                fix="convert it; for random keys, save jax.random.key_data(key).",
            )


def _place(keys: tuple[str, ...]) -> str:
    return repr("/".join(keys)) if keys else "the root"


def parse(node: Any, values: Values) -> Any:
    """Returns the tree that JSON describes, with `Stored` leaves.

    Raises:
      ValueError: if it is not a result of `describe`.
    """
    if node is None:
        return None
    if not isinstance(node, dict):
        _refuse(node)
    items = next(iter(node.values())) if len(node) == 1 else None
    if "dict" in node and isinstance(items, list):
        pairs = [pair if _is_pair(pair) else _refuse(pair) for pair in items]
        if len({key for key, _ in pairs}) != len(pairs):
            _refuse(node)
        return {key: parse(item, values) for key, item in pairs}
    for kind in (list, tuple):
        if kind.__name__ in node and isinstance(items, list):
            return kind(parse(item, values) for item in items)
    if set(node) == {"segments", "axis"}:
        parts, axis = node["segments"], node["axis"]
        if not isinstance(parts, list) or not parts or type(axis) is not int:
            _refuse(node)
        return unchecked_segments([_leaf_from_json(part, values) for part in parts], axis)
    return _leaf_from_json(node, values)


def _leaf_from_json(node: Any, values: Values) -> Stored:
    keys = set(node) if isinstance(node, dict) else set()
    if keys == {"array", "dtype"} and isinstance(node["array"], str):
        dtype = as_dtype("load", "dtype", node["dtype"])
        return StoredArray(node["array"], dtype) if stored_dtype(dtype) else _refuse(node)
    if keys - {*_MORE} != {"qtensor", "fields", "values", "scale", "zero_point"}:
        _refuse(node)
    path = node["qtensor"] if isinstance(node["qtensor"], str) else _refuse(node)
    fields = fields_from_json("load", node["fields"], values, path)
    codes, scale = (_leaf_from_json(node[name], values) for name in ("values", "scale"))
    zero_point = node["zero_point"]
    zero_point = None if zero_point is None else _leaf_from_json(zero_point, values)
    more = {name: _leaf_from_json(node[name], values) for name in _MORE if name in node}
    if any(isinstance(part, StoredQTensor) for part in (codes, zero_point, more.get("order"))):
        _refuse(node)
    assert isinstance(codes, StoredArray) and not isinstance(zero_point, StoredQTensor)
    return StoredQTensor(path, fields, codes, scale, zero_point, more)


def _is_pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and type(x[0]) in (str, int)


def _refuse(node: Any) -> NoReturn:
    what = f"an object of {', '.join(map(repr, node))}" if isinstance(node, dict) else shown(node)
    raise fail(
        "load",
        "the description of the tree in the file is invalid.",
        given=what[:200],
        expected="a dict, a list, a tuple, segments, an array, a qtensor, or null",
        fix="write the file again with jqx.save.",
    )
