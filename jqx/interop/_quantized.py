"""The description of a quantized function in a file: JSON in the file's metadata.

    {"version": 1, "plan": as of Plan.to_dict, "affines": [[key, numbers, numbers or null], ...],
     "report": its fields, "inputs": null or a tree, "shapes": [[name, shape], ...],
     "parents": such a tree of the parameters before `hoist`, if it split the function,
     "shapes_of_parents": as "shapes",
     "structured": whether the weights are a tree as the function takes it, or leaves by path,
     "given": whether the codes stand for the parameters that were given, and not for others that an
     algorithm made of them; missing if that is not known,
     "maps": whether the tree of the file is {"params": the weights, "maps": of channels, by key}}

Numbers are `{"dtype": ..., "shape": ..., "numbers": ...}`; those of files are exact in JSON.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes

from .._added import added, unwritten
from .._checks import as_dtype, check_instance
from .._errors import fail, nesting
from ..calibrators import Affine
from ..diagnostics import Report
from ..numerics import format_of
from ..ptq import Quantized, Unbound
from ..ptq._shared import Basis, leaves_by_path
from ..tensor import QTensor
from ..tensor._shared import Lazy, Values, check_version, of_kinds, record_from_json, to_json
from ..transforms import ChannelMap, LowRank, Plan
from ..transforms._shared import Maps, as_maps, check_scales_of_weights, named_leaves, rooted
from ._safetensors import stored_dtype
from ._tree import describe, map_stored, parse, tensors_of

_VERSION = 1


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
            found = x.astype(dtype).reshape(self.shape)
            same = np.array_equal(found.reshape(-1).astype(np.float64), x, equal_nan=True)
        _check(same, f"numbers that {dtype.name} does not have")
        return jnp.asarray(found) if dtypes.canonicalize_dtype(dtype) == dtype else found


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
        named = named_leaves("save", rooted(plan.params, packed), plan)
        check_scales_of_weights("save", plan, named, affines)
    structured = _is_described(packed, values)
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
        "version": _VERSION,
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
        tree = {"params": tree, "maps": {key: [_fields(x) for x in own] for key, own in maps}}
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

    return jax.tree.map(packed, tree, is_leaf=lambda x: isinstance(x, QTensor))


def _unpacked(tree: Any) -> Any:
    """Returns parameters with QTensors in the default layout."""

    def unpacked(x: Any) -> Any:
        return x.unpack() if isinstance(x, QTensor) else x

    return jax.tree.map(unpacked, tree, is_leaf=lambda x: isinstance(x, QTensor))


def _fields(x: Any) -> dict[str, Any]:
    found = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    return {k: v for k, v in found.items() if v is not None or k not in unwritten(type(x))}


def _kind(names: Iterable[str]) -> type | None:
    """Returns the type of map of channels that has fields of these names."""
    for kind in (ChannelMap, LowRank):
        known = {x.name for x in dataclasses.fields(kind)}
        if known - unwritten(kind).keys() <= set(names) <= known:
            return kind
    return None


def _maps(tree: Any) -> Maps:
    """Returns the maps of channels of a file.

    Raises:
      ValueError: if the tree is not a result of `contents_of`.
    """
    fits = isinstance(tree, dict) and set(tree) == {"params", "maps"}
    _check(fits and isinstance(tree["maps"], dict), "a tree without maps of channels")
    found = {}
    for key, each in tree["maps"].items():
        known = isinstance(each, list) and all(isinstance(x, dict) for x in each)
        kinds = [_kind(x) for x in each] if known else [None]
        _check(None not in kinds, f"no maps of channels at {key!r}")
        found[key] = tuple(kind(**x) for kind, x in zip(kinds, each, strict=True) if kind)
    return found


def unbound(tree: Any, text: str, values: Values) -> Unbound:
    """Returns a quantized function that is not bound to its function.

    Raises:
      ValueError: if the JSON is not a result of `contents_of`.
    """
    with nesting("load"):
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        fields = check_version("load", data, _VERSION)
        plan = Plan.from_dict(fields.pop("plan", None), values)
        node, node_of_parents = fields.pop("inputs", None), fields.pop("parents", None)
        contents = record_from_json("load", fields, _Contents, values, "the quantized function")
        inputs = _inputs(node, dict(contents.shapes), values)
        parents = _inputs(node_of_parents, dict(contents.shapes_of_parents), values)
    affines = {each.key: _affine(each) for each in contents.affines}
    plan.check_affines("load", affines)
    maps: Maps = {}
    if contents.maps:
        maps = _maps(tree)
        tree = tree["params"]
    params = _unpacked(tree)
    given = params, plan, affines, contents.report, inputs, contents.structured, maps
    return Unbound(*given, parents, Basis.of_given(maps) if contents.given else None)


def _affine(each: _Scale) -> Affine:
    zero = each.zero_point
    return Affine(each.scale.array(), None if zero is None else zero.array())


def _is_described(tree: Any, values: Values) -> bool:
    """Returns whether files hold a tree as it is, not only its leaves."""
    try:
        describe(tree, values)
    except TypeError:
        return False
    return True


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


def _check(fits: Any, given: str) -> None:
    if not fits:
        raise fail(
            "load",
            "the description of the quantized function in the file is invalid.",
            given=given,
            expected="a plan, scales of activations, a report and inputs, as in files of jqx.save",
            fix="write the file again with jqx.save(path, quantized).",
        )
