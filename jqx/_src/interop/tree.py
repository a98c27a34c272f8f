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
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes

from ... import ChannelMap, LowRank, Plan, QTensor, Quantized, SavedModel, Segments
from ...calibrators import Affine
from ...numerics import format_of
from .. import compat
from ..checks import added, as_dtype, check_instance, shown, unwritten
from ..diagnostics.report import Report
from ..errors import fail, nesting
from ..ptq.quantized import Basis, leaves_by_path
from ..tensor.segments import Lazy, abstract, of_kinds, unchecked_segments
from ..tensor.serialize import (
    VERSION,
    Values,
    check_version,
    fields_from_json,
    fields_to_json,
    record_from_json,
    to_json,
)
from ..transforms.channel_map import Maps
from ..transforms.map_channels import as_maps
from ..transforms.paths import Split, by_argument, split_leaf
from ..transforms.quantize_params import check_scales_of_weights, named_leaves
from ..transforms.trace import is_quantized
from .safetensors import METADATA, stored_dtype

Read = Callable[[str, np.dtype], Any]
"""Makes an array from the name of a tensor and its dtype."""

_PARTS = ("values", "scale", "zero_point", "offset", "order")
"""The arrays of a QTensor. Few have the last two, which are left out if they are `None`."""

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
    parts: dict[str, "Stored"]
    consumed: ClassVar[tuple[str, ...]] = ()

    def make(self, read: Read) -> QTensor:
        """Returns the QTensor of arrays from `read`."""
        parts: dict[str, Any] = {name: part.make(read) for name, part in self.parts.items()}
        try:
            return QTensor(**parts, **self.fields)
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
        have_shapes = all(hasattr(part, "shape") for part in parts)
        return (Segments if have_shapes else unchecked_segments)(parts, tree.axis)
    return tree if tree is None else f(tree)


def tensors_of(path: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a leaf, each with the name of its tensor."""
    if not isinstance(leaf, QTensor):
        yield path, leaf
        return
    for name in _PARTS:
        if getattr(leaf, name) is not None:
            yield from tensors_of(f"{path}.{name}", getattr(leaf, name))


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
            wrong = [key for key in x if type(key) not in (str, int)]
            if wrong:
                problem = f"the key {shown(wrong[0])} at {_place(keys)} is no string or integer."
                raise fail("save", problem, fix="use strings as keys.", error=TypeError)
            return {"dict": [[key, node_of(x[key], (*keys, str(key)))] for key in x]}
        if type(x) in (list, tuple):
            items = [node_of(item, (*keys, str(i))) for i, item in enumerate(x)]
            return {type(x).__name__: items}
        kind = abstract(x)
        if isinstance(kind, Segments):
            split = Split("".join(keys[-1:]), kind.axis, kind.bounds)
            named = zip(split_leaf("save", x, split), split.parts, strict=True)
            parts = [node_of(leaf, (*keys[:-1], part.path)) for leaf, part in named]
            return {"segments": parts, "axis": kind.axis}
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
    parts = {name: getattr(x, name) for name in _PARTS}
    nodes = {
        name: None if part is None else _leaf_to_json(f"{path}.{name}", part, values)
        for name, part in parts.items()
        if part is not None or name in _PARTS[:3]
    }
    return {"qtensor": path, "fields": fields, **nodes}


def _check_leaf(x: Any, keys: tuple[str, ...]) -> None:
    kinds = (QTensor, jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    if not (isinstance(x, kinds) and not isinstance(x, np.ma.MaskedArray)):
        problem = f"the {type(x).__name__} at {_place(keys)} cannot be stored."
        fix = "make numbers arrays, jnp.asarray(x), and other containers dicts."
        raise fail("save", problem, fix=fix, error=TypeError)
    for name, array in tensors_of("/".join(keys) or _EMPTY, x):
        problem, fix, error = "", "", TypeError
        if not isinstance(array, kinds[1:]):
            problem = f"{name!r} is not an array: {type(array).__name__}."
            fix = "save the original QTensors, not the result of a map over their arrays."
        elif isinstance(array, jax.Array) and not compat.is_concrete(array):
            problem = f"the array {name!r} is traced, and has no values yet."
            fix = "return it from the jitted function, and save the result."
        elif stored_dtype(array.dtype) is None:
            problem = f"the array {name!r} has the dtype {array.dtype}, which files cannot hold."
            fix, error = "convert it; for random keys, save jax.random.key_data(key).", ValueError
        if problem:
            raise fail("save", problem, fix=fix, error=error)


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
    if keys - {*_PARTS[3:]} != {"qtensor", "fields", *_PARTS[:3]}:
        _refuse(node)
    path = node["qtensor"] if isinstance(node["qtensor"], str) else _refuse(node)
    fields = fields_from_json("load", node["fields"], values, path)
    parts = {
        name: _leaf_from_json(node[name], values)
        for name in _PARTS
        if name in node and not (name == "zero_point" and node[name] is None)
    }
    arrays = (parts.get(name) for name in ("values", "zero_point", "order"))
    if StoredQTensor in map(type, arrays):
        _refuse(node)
    return StoredQTensor(path, fields, parts)


def _is_pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and type(x[0]) in (str, int)


def _refuse(node: Any) -> NoReturn:
    detail = f"an object of {', '.join(map(repr, node))}" if isinstance(node, dict) else shown(node)
    problem = "the description of the tree in the file is invalid."
    raise fail("load", problem, given=detail[:200], fix="write the file again with jqx.save.")


# The description of a quantized function in a file: JSON in the file's metadata.
#
# {"version": 2, "plan": as of Plan.to_dict, "affines": [[key, numbers, numbers or null], ...],
# "report": its fields, "inputs": null or a tree, "shapes": [[name, shape], ...], "parents": such
# a tree of the parameters before `hoist`, if it split the function, "shapes_of_parents": as
# "shapes", "structured": whether the weights are a tree as the function takes it, or leaves by
# path, "given": whether the codes stand for the parameters that were given, and not for others
# that an algorithm made of them; missing if that is not known, "maps": whether the tree of the
# file is {"params": the weights, "maps": of channels, by key}}
#
# Numbers are `{"dtype": ..., "shape": ..., "numbers": ...}`; those of files are exact in JSON.


@dataclasses.dataclass(frozen=True)
class _Numbers:
    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, x: Any) -> "_Numbers":
        x = np.asarray(x)
        wide = np.int64 if jnp.issubdtype(x.dtype, jnp.integer) else np.float64
        return cls(x.dtype.name, x.shape, tuple(x.astype(wide).reshape(-1).tolist()))

    def array(self) -> Any:
        dtype = as_dtype("load", "dtype", self.dtype)
        fits = stored_dtype(dtype) and min(self.shape, default=0) >= 0
        _check(fits and math.prod(self.shape) == len(self.numbers), "numbers of another shape")
        small = all(isinstance(n, float) or abs(n) < 2**63 for n in self.numbers)
        _check(small, "an integer of more than 64 bits")
        with np.errstate(all="ignore"):
            x = np.asarray(self.numbers, np.float64)
            numbers = x.astype(dtype).reshape(self.shape)
            same = np.array_equal(numbers.reshape(-1).astype(np.float64), x, equal_nan=True)
        _check(same, f"numbers that {dtype.name} does not have")
        return jnp.asarray(numbers) if dtypes.canonicalize_dtype(dtype) == dtype else numbers


@dataclasses.dataclass(frozen=True)
class _Scale:
    key: str
    scale: _Numbers
    zero_point: _Numbers | None


@dataclasses.dataclass(frozen=True)
class _Contents:
    affines: tuple[_Scale, ...]
    report: Report
    structured: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    maps: bool = added(False)
    shapes_of_parents: tuple[tuple[str, tuple[int, ...]], ...] = added(())
    given: bool = added(False)


def contents_of(quantized: Quantized, values: Values) -> tuple[Any, str]:
    """Returns the tree of the weights of a quantized function, and the JSON of the rest.

    Raises:
      TypeError: if the report is not a `Report`.
      ValueError: if the plan holds objects that are neither jqx's own nor in `values`, or a weight
        has another scale than `affines` says.
    """
    fix = "make one by jqx.report(plan, params, affines)."
    check_instance("save", "report", quantized.report, Report, fix=fix)
    packed = _packed(quantized.params)
    plan, affines = quantized.plan, quantized.affines
    if any(weight.key in affines for weight in plan.weights):
        named = named_leaves("save", by_argument(plan.params, packed), plan)
        check_scales_of_weights("save", plan, named, affines)
    try:
        describe(packed, values)
        structured = True
    except TypeError:  # files hold only its leaves
        structured = False
    node, shapes = _inputs_of(quantized.inputs, values)
    parents, shapes_of_parents = _inputs_of(quantized.parents, values)
    contents = _Contents(
        affines=tuple(
            _Scale(key, _Numbers.of(scale), None if zero is None else _Numbers.of(zero))
            for key, (scale, zero) in quantized.affines.items()
        ),
        report=quantized.report,
        structured=structured,
        shapes=shapes,
        maps=bool(quantized.maps),
        shapes_of_parents=shapes_of_parents,
        given=isinstance(quantized.basis, Basis) and not quantized.basis.steps,
    )
    data = {
        "version": VERSION,
        "plan": quantized.plan.to_dict(values),
        "inputs": node,
        **to_json("save", contents, _Contents, values),
    }
    if parents is not None:
        data["parents"] = parents
    text = json.dumps(data, separators=(",", ":"))
    tree = packed if structured else leaves_by_path(packed)
    if quantized.maps:
        maps = as_maps("save", quantized.maps).items()
        tree = {
            "params": tree,
            "maps": {key: [_fields(x) for x in maps_of_key] for key, maps_of_key in maps},
        }
    return tree, text


def _packed(tree: Any) -> Any:
    """Returns parameters with QTensors as files hold them: in the default layout, and codes of less
    than 8 bits packed.
    """

    def pack(q: QTensor) -> QTensor:
        q = q.unpack()
        return q.pack() if format_of(q.qtype).bits < 8 and q.ndim else q

    def packed(x: Any) -> Any:
        if isinstance(x, Lazy):
            return x.then(_packed, "packed")
        return of_kinds(pack, x) if isinstance(x, QTensor) else x

    return jax.tree.map(packed, tree, is_leaf=is_quantized)


def _unpacked(tree: Any) -> Any:
    """Returns parameters with QTensors in the default layout."""
    return jax.tree.map(lambda x: x.unpack() if is_quantized(x) else x, tree, is_leaf=is_quantized)


def _fields(x: Any) -> dict[str, Any]:
    fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    return {k: v for k, v in fields.items() if v is not None or k not in unwritten(type(x))}


def _kind(names: Iterable[str]) -> type | None:
    """Returns the type of map of channels that has fields of these names."""
    for kind in (ChannelMap, LowRank):
        fields = {x.name for x in dataclasses.fields(kind)}
        if fields - unwritten(kind).keys() <= set(names) <= fields:
            return kind
    return None


def _maps(tree: Any) -> Maps:
    """Returns the maps of channels of a file.

    Raises:
      ValueError: if the tree is not a result of `contents_of`.
    """
    fits = isinstance(tree, dict) and set(tree) == {"params", "maps"}
    _check(fits and isinstance(tree["maps"], dict), "a tree without maps of channels")
    maps = {}
    for key, items in tree["maps"].items():
        are_dicts = isinstance(items, list) and all(isinstance(x, dict) for x in items)
        kinds = [_kind(x) for x in items] if are_dicts else [None]
        _check(None not in kinds, f"no maps of channels at {key!r}")
        maps[key] = tuple(kind(**x) for kind, x in zip(kinds, items, strict=True) if kind)
    return maps


def saved_model(tree: Any, text: str, values: Values) -> SavedModel:
    """Returns a quantized function that is not bound to its function.

    Raises:
      ValueError: if the JSON is not a result of `contents_of`.
    """
    with nesting("load"):
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        fields = check_version("load", data)
        plan = Plan.from_dict(fields.pop("plan", None), values)
        node, node_of_parents = fields.pop("inputs", None), fields.pop("parents", None)
        contents = record_from_json("load", fields, _Contents, values, "the quantized function")
        inputs = _inputs(node, dict(contents.shapes), values)
        parents = _inputs(node_of_parents, dict(contents.shapes_of_parents), values)
    affines = {
        x.key: Affine(x.scale.array(), None if x.zero_point is None else x.zero_point.array())
        for x in contents.affines
    }
    plan.check_affines("load", affines)
    maps: Maps = {}
    if contents.maps:
        maps = _maps(tree)
        tree = tree["params"]
    params = _unpacked(tree)
    parts = params, plan, affines, contents.report, inputs, contents.structured, maps
    return SavedModel(*parts, parents, Basis.of_given(maps) if contents.given else None)


def is_rewritten(text: str) -> bool:
    """Whether the JSON of a quantized function says that its codes stand for other weights than the
    float model has. Version 1 does not say it.
    """
    try:
        data = json.loads(text)
    except ValueError:  # an error of `load`
        return False
    return isinstance(data, dict) and data.get("version") == VERSION and not data.get("given")


def _inputs_of(inputs: Any, values: Values) -> tuple[Any, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Returns the stored form of inputs, and the shapes of their arrays by name; nothing if they
    are not trees of arrays.
    """
    if inputs is None:
        return None, ()
    try:
        node, named = describe(inputs, values)
    except (TypeError, ValueError):
        return None, ()
    arrays = [pair for path, leaf in named for pair in tensors_of(path, leaf)]
    return node, tuple((name, tuple(array.shape)) for name, array in arrays)


def _inputs(node: Any, shapes: dict[str, tuple[int, ...]], values: Values) -> Any:
    if node is None:
        return None

    def read(name: str, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        fits = name in shapes and min(shapes[name], default=0) >= 0
        _check(fits, "inputs without shapes")
        return jax.ShapeDtypeStruct(shapes[name], dtype)

    inputs = map_stored(lambda leaf: leaf.make(read), parse(node, values))
    _check(isinstance(inputs, tuple), "inputs that are not a tuple")
    return inputs


def _check(fits: Any, detail: str) -> None:
    if not fits:
        problem = "the description of the quantized function in the file is invalid."
        fix = "write the file again with jqx.save(path, quantized)."
        raise fail("load", problem, given=detail, fix=fix)
