"""Conversion of static values to JSON and back, for plans, specs and QTensors.

- Numbers, strings and `None` are written as they are, tuples as lists, and a dtype as its name. A
  number that JSON does not have is written as `{"number": "inf"}`.
- An instance of a class is written as an object of its fields, a member of an enum as its name. If
  the annotation of the field does not determine the class, its name in `CLASSES` is written as
  well: `{"Percentile": {"percent": 99.9}}`.
- A field that was added to a class later is not written if it has its default.
- An object of the user is written as `{"value": name}`, and looked up in a dict of the user.

Reading never imports or evaluates a name: names are only looked up among the classes of jqx and in
the dict of the user.
"""

import dataclasses
import enum
import json
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np
from jax import export
from jax.typing import DTypeLike

from ..checks import as_dtype, unwritten
from ..errors import fail
from ..gradients.estimators import (
    LearnedStep,
    LearnedStepAndOffset,
    ParameterizedClipping,
    Parq,
    StochasticRounding,
    StraightThrough,
    StraightThroughUnclipped,
)
from ..numerics.blocks import Block
from ..numerics.codebooks import Codebook, Squares
from ..numerics.lookup import PowerOfTwo, as_qtype, format_of
from ..numerics.minifloats import Minifloat
from ..numerics.qtype import Integer, QType
from ..numerics.runtimes import Numerics
from ..statistics.calibrators import AbsMax, AcrossDevices, Delayed, Fixed, MinMax, Rms, Rounded
from ..statistics.granularity import (
    Groups,
    PerAxis,
    PerBlock,
    PerGroup,
    PerKeptAxis,
    PerRun,
    PerShare,
    PerTensor,
    PerTile,
)
from ..statistics.searches import Ceil, FourOverSix, Hqq, Mse, Percentile
from . import products
from .layout import Layout, values_dtype

Values = Mapping[str, Any]
"""Objects of the user, by name."""

NONE: Values = {}

VERSION = 2
"""The version of what jqx writes: files, plans, and QTensors in exported programs."""

CLASSES: dict[str, type] = {
    "Block": Block,
    "Codebook": Codebook,
    "Integer": Integer,
    "Minifloat": Minifloat,
    "Numerics": Numerics,
    "PowerOfTwo": PowerOfTwo,
    "Squares": Squares,
    "LearnedStep": LearnedStep,
    "LearnedStepAndOffset": LearnedStepAndOffset,
    "ParameterizedClipping": ParameterizedClipping,
    "Parq": Parq,
    "StochasticRounding": StochasticRounding,
    "StraightThrough": StraightThrough,
    "StraightThroughUnclipped": StraightThroughUnclipped,
    "AbsMax": AbsMax,
    "AcrossDevices": AcrossDevices,
    "Ceil": Ceil,
    "Delayed": Delayed,
    "Fixed": Fixed,
    "FourOverSix": FourOverSix,
    "Groups": Groups,
    "Hqq": Hqq,
    "MinMax": MinMax,
    "Mse": Mse,
    "Percentile": Percentile,
    "Rms": Rms,
    "Rounded": Rounded,
    "RoundedOperand": products.Rounded,
    "PerAxis": PerAxis,
    "PerBlock": PerBlock,
    "PerGroup": PerGroup,
    "PerKeptAxis": PerKeptAxis,
    "PerRun": PerRun,
    "PerShare": PerShare,
    "PerTensor": PerTensor,
    "PerTile": PerTile,
}
"""The classes that jqx reads and writes, by their name in files of version 2. The name of a class
in files stays when the class moves or is renamed. Version 1 has these names behind a module; those
that have changed since are in `_RENAMED`.
"""

_NAMES = {cls: name for name, cls in CLASSES.items()}

_VERSION_1 = re.compile(r"jqx\.(?:numerics|gradients|calibrators)\.(\w+)")
"""Names of classes in version 1: those of version 2 behind the folder, but for `_RENAMED`."""

_RENAMED = {"Hqo": "Hqq"}


def to_json(function: str, value: Any, kind: Any = Any, values: Values = NONE) -> Any:
    """Returns a value as JSON.

    Args:
      function: the caller, for messages.
      value: the value to convert.
      kind: its annotation, if there is one.
      values: objects of the user, which are looked up first.

    Raises:
      ValueError: an object is neither of a class of jqx nor among `values`.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"number": str(float(value))}
    if isinstance(value, np.dtype):
        return value.name
    name = next((name for name, named in values.items() if _is_same(named, value)), None)
    if name is not None:
        return {"value": name}
    if type(value) is tuple:
        items = zip(value, _kinds_of_items(kind, len(value)), strict=True)
        return [to_json(function, item, kind, values) for item, kind in items]
    cls = type(value)
    is_annotated = cls is _single_kind(kind)
    if isinstance(value, enum.Enum) and is_annotated:
        return value.name
    if not is_annotated and cls not in _NAMES:
        problem = f"an object of type {cls.__name__} is neither of a class of jqx nor among "
        problem += "`values`."
        fix = 'give it a name: values={"mine": object}, here and when you read it.'
        raise fail(function, problem, fix=fix)
    defaults = unwritten(cls)
    fields = {
        name: to_json(function, getattr(value, name), kind, values)
        for name, kind in _fields(cls).items()
        if name not in defaults or getattr(value, name) != defaults[name]
    }
    return fields if is_annotated else {_NAMES[cls]: fields}


def from_json(function: str, data: Any, kind: Any, values: Values, where: str) -> Any:
    """Inverts `to_json`.

    Args:
      function: the caller, for messages.
      data: the result of `json.loads`.
      kind: the annotation that the value must match.
      values: objects of the user.
      where: the path of `data` in the file, for messages.

    Raises:
      ValueError: a name or field is unknown, a field is missing, or a value has the wrong type.
      TypeError: a class rejects its fields.
    """
    value = _value(function, data, kind, values, where)
    if not _fits(value, kind):
        name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        problem = f"{where} has the wrong type: it is not {name}."
        facts = f"a {type(value).__name__}" if isinstance(data, (dict, list)) else repr(data)
        fix = "restore the file; its fields are those that to_dict returns."
        raise fail(function, problem, given=facts, fix=fix)
    return value


def _value(function: str, data: Any, kind: Any, values: Values, where: str) -> Any:
    cls = _single_kind(kind)
    if isinstance(data, list):
        kinds = _kinds_of_items(kind, len(data))
        return tuple(
            from_json(function, item, kind, values, f"{where}[{i}]")
            for i, (item, kind) in enumerate(zip(data, kinds, strict=True))
        )
    if isinstance(data, str) and isinstance(cls, enum.EnumMeta):
        _check_name(function, "member", data, cls.__members__, where)
        return cls[data]
    if not isinstance(data, dict):
        return data
    name, content = next(iter(data.items())) if len(data) == 1 else ("", data)
    if name == "number" and content in ("inf", "-inf", "nan"):
        return float(content)
    if name == "value":
        if not isinstance(content, str) or content not in values:
            names = ", ".join(map(repr, values)) or "(none)"
            problem = f"the object {content!r} at {where} is not among `values`: {names}."
            fix = f"pass values={{{content!r}: object}}: only objects of jqx itself are stored."
            raise fail(function, problem, fix=fix)
        return values[content]
    version_1 = _VERSION_1.fullmatch(name)
    class_name = name if version_1 is None else _RENAMED.get(version_1[1], version_1[1])
    if class_name in CLASSES:
        return record_from_json(function, content, CLASSES[class_name], values, where)
    is_class = isinstance(cls, type)
    if is_class and (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        return record_from_json(function, data, cls, values, where)
    _check_name(function, "value", name or "(none)", CLASSES, where)


def record_from_json(function: str, data: Any, cls: type, values: Values, where: str) -> Any:
    """Returns an instance of a class from its fields as JSON."""
    kinds = _fields(cls)
    if not isinstance(data, dict):
        problem = f"{where} has no fields: it is a {type(data).__name__}."
        fix = f"restore the file: {where} is an object with {', '.join(kinds) or 'no fields'}."
        raise fail(function, problem, fix=fix)
    for name in data:
        _check_name(function, "field", name, kinds, where)
    missing = [name for name in kinds if name not in data and name not in unwritten(cls)]
    if missing:
        problem = f"{where} does not have the field {missing[0]!r}."
        facts = f"the fields {', '.join(data) or '(none)'}"
        fix = "restore the file, or write it again with this version of jqx."
        raise fail(function, problem, given=facts, fix=fix)
    fields = {
        name: from_json(function, data[name], kind, values, f"{where}.{name}")
        for name, kind in kinds.items()
        if name in data
    }
    try:
        return cls(**fields)
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error}\n  at:       {where}") from None


def check_values(function: str, values: Any) -> None:
    """Checks that `values` is a dict of objects by name."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        problem = f"`values` is not a dict of objects by name, but a {type(values).__name__}."
        fix = 'pass for example values={"mine": object}.'
        raise fail(function, problem, fix=fix, error=TypeError)


def check_version(function: str, data: Any) -> dict[str, Any]:
    """Returns the fields of data that has a version number, after checking that number."""
    version = data.get("version") if isinstance(data, Mapping) else None
    if type(version) is not int or not 1 <= version <= VERSION:
        facts = f"version {version!r}" if isinstance(data, Mapping) else type(data).__name__
        expected = f"an object with version 1 to {VERSION}"
        fix = "read it with the version of jqx that wrote it, or write it again with this one."
        raise fail(function, "the version is unknown.", given=facts, expected=expected, fix=fix)
    return {name: value for name, value in data.items() if name != "version"}


def _is_same(named: Any, value: Any) -> bool:
    return named is value or (type(named) is type(value) and bool(named == value))


def _fields(cls: type) -> dict[str, Any]:
    """Returns the annotations of the fields of a class, by name."""
    if dataclasses.is_dataclass(cls):
        return {field.name: field.type for field in dataclasses.fields(cls) if field.init}
    return dict(cls.__annotations__)


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _single_kind(kind: Any) -> Any:
    """Returns the only class that an annotation allows apart from None, or the annotation."""
    options = [option for option in _options(kind) if option is not types.NoneType]
    return options[0] if len(options) == 1 else kind


def _kinds_of_items(kind: Any, count: int) -> tuple[Any, ...]:
    """Returns the annotations of the items of a tuple."""
    kind = _single_kind(kind)
    args = get_args(kind) if get_origin(kind) is tuple else (Any, ...)
    return (args[0],) * count if args[-1] is ... else args if len(args) == count else (Any,) * count


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value matches an annotation; protocols are not checked here."""
    options = _options(kind)
    if len(options) > 1:
        return any(_fits(value, option) for option in options)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        kinds = _kinds_of_items(kind, len(value)) if isinstance(value, tuple) else ()
        has_length = get_args(kind)[-1] is ... or len(kinds) == len(get_args(kind))
        return isinstance(value, tuple) and has_length and all(map(_fits, value, kinds))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not isinstance(kind, type) or kind.__name__ == "Any" or getattr(kind, "_is_protocol", False):
        return True  # Any is a class in Python 3.11
    return isinstance(value, kind)


def _check_name(function: str, kind: str, name: str, names: Any, where: str) -> None:
    if name not in names:
        problem = f"the {kind} {name!r} at {where} is unknown."
        expected = f"one of {', '.join(names)}" if names else "none"
        fix = "restore the file, or read it with the version of jqx that wrote it."
        raise fail(function, problem, expected=expected, fix=fix)


# Serialization of QTensors by `jax.export`: their static fields as JSON.


_UNSUPPORTED = ("int2", "uint2")
"""Dtypes for which JAX has no serializer (0.10.2 to 0.12.0)."""


class _Static(NamedTuple):
    """The static fields of a QTensor, in the order in which it flattens."""

    qtype: DTypeLike | QType
    dtype: DTypeLike
    blocks: tuple[tuple[int, int, int], ...]
    layout: Layout | None


def make_exportable(cls: type) -> None:
    """Registers QTensor. (Its file imports this one.)"""
    export.register_pytree_node_serialization(
        cls,
        serialized_name="jqx.QTensor",
        serialize_auxdata=_write,
        deserialize_auxdata=_read,
    )


def fields_to_json(function: str, q: Any, values: Values = NONE) -> dict[str, Any]:
    """Returns the static fields of a QTensor as JSON; `values` are objects of the user."""
    static = _Static(q.qtype, q.dtype, q.blocks, q.layout)
    return {"version": VERSION, **to_json(function, static, _Static, values)}


def fields_from_json(
    function: str, data: Any, values: Values = NONE, where: str = "QTensor"
) -> dict[str, Any]:
    """Inverts `fields_to_json`: returns the fields by name. Errors name the place `where`."""
    fields = check_version(function, data)
    static = record_from_json(function, fields, _Static, values, where)
    return {
        "qtype": as_qtype(function, "qtype", static.qtype, "Quantized"),
        "dtype": as_dtype(function, "dtype", static.dtype),
        "blocks": static.blocks,
        "layout": static.layout,
    }


def _write(fields: Any) -> bytes:
    static = _Static(*fields)
    form = format_of(static.qtype)
    if values_dtype(static.layout, form).name in _UNSUPPORTED:
        problem = f"jax.export cannot serialize {form.name} values."
        fix = "pass q.pack() when the function is exported and when it is called; zero points stay "
        fix += "unpacked, and need another format, such as numerics.uint3."
        raise fail("QTensor", problem, fix=fix)
    return json.dumps(fields_to_json("QTensor", static)).encode()


def _read(data: bytes) -> tuple:
    return tuple(fields_from_json("QTensor", json.loads(data)).values())
