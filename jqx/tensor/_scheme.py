"""Schemes: a `QSpec` as a string, `int4:group=32:asymmetric`, for rules and the command line.

    scheme = "float" | format { ":" option }
    option = "group=N" | "block=N" | "channel" | "token" | "tensor"
           | "asymmetric" | "dynamic" | "calibrator=NAME" | "contract=AXES"

A format is a dtype of JAX or a name of `jqx.numerics`. `group` (or its synonym `block`) is the
number of elements that share a scale along the contracted axes; the last group may be smaller.
`channel`, `token` and `tensor` are `jqx.per_channel()` and so on. Without one of them, the
granularity is that of the presets: per channel for weights, per tensor for activations, per token
for dynamic activations and for state, and per block for a block format. `asymmetric` means zero
points, `dynamic` means that the scale of an activation is computed from its values in each call,
and `calibrator` is a name of `jqx.calibrators`. `contract` names the axes that the product of a
weight in a file sums over, such as `contract=0` or `contract=0,1`; in a program, the contraction
itself defines them.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from .. import calibrators
from .._checks import shown
from .._errors import fail, message
from ..calibrators import Calibrator, absmax, minmax
from ..calibrators._shared import per_channel, per_group, per_tensor, per_token
from ..numerics import Block, QType, format_of
from ..numerics._shared import formats_by_name
from ._spec import QSpec

Role = Literal["weight", "activation", "state", "array"]
"""What a scheme is for. An array has no contraction, so its default is that of `QSpec`."""

FLOAT = "float"
"""The scheme that leaves an operand as it is."""

_CALIBRATORS = {n: c for n, c in vars(calibrators).items() if isinstance(c, Calibrator)}
_CALIBRATORS["hqo"] = calibrators.hqq  # its former name
_GRANULARITIES = {"channel": per_channel, "token": per_token, "tensor": per_tensor}
_SIZES = ("group", "block")
_VALUED = (*_SIZES, "calibrator", "contract")
_EXAMPLES = {"group": "32", "block": "64", "calibrator": "mse", "contract": "0"}
_OPTIONS = (*_VALUED, *_GRANULARITIES, "asymmetric", "dynamic")
PRESETS = ("fp8", "mxfp8", "nf4", "w4a16", "w4a4", "w4a8", "w8a16", "w8a8", "w8a8_dynamic")
"""The names of `jqx.presets`."""

_PRESET = re.compile(r"w([0-9]+)a([0-9]+)(_dynamic)?")
"""What the name of a preset looks like."""


class Scheme(NamedTuple):
    """A parsed scheme.

    Attributes:
      spec: the spec; `None` leaves an operand in float.
      contract: the contracted axes; `None` if a contraction or a file format defines them.
    """

    spec: QSpec | None
    contract: tuple[int, ...] | None = None


def parse_scheme(text: str, role: Role = "weight", function: str = "scheme") -> Scheme:
    """Parses a scheme for an operand of that role.

    Raises:
      ValueError: a name or option is unknown, or the options do not fit each other.

    Example:
      >>> str(parse_scheme("uint4:group=64:asymmetric").spec)
      'uint4 per_group(64, tail=True) asymmetric minmax'
      >>> str(parse_scheme("int8:token:dynamic", "activation").spec)
      'int8 per_token dynamic'
      >>> parse_scheme("float").spec is None
      True
    """
    name, *options = text.split(":")
    given = _given(function, text, options)
    if name == FLOAT:
        if given:
            raise _wrong(function, "`float` has no options.", text, "float")
        return Scheme(None)
    known = formats_by_name()
    if name not in known:
        raise _unknown(function, name, known)
    if "dynamic" in given and role != "activation":
        expected = "no `dynamic` here: the values do not change from call to call"
        raise _wrong(function, "`dynamic` is for activations.", text, expected)
    spec = QSpec(
        known[name],
        _granularity(function, text, known[name], given, role),
        symmetric="asymmetric" not in given,
        calibrator=_calibrator(function, text, given),
        dynamic="dynamic" in given,
    )
    contract = given.get("contract")
    if contract is None:
        return Scheme(spec)
    return Scheme(spec, tuple(_integer(function, text, n) for n in contract.split(",")))


def as_spec(function: str, argument: str, value: Any, role: Role = "weight") -> QSpec | None:
    """Returns a `QSpec` as it is, or the spec of a scheme; `None` means float.

    Raises:
      TypeError: it is neither a spec nor a string.
      ValueError: it is not a valid scheme, or it is a scheme for files.
    """
    if value is None or isinstance(value, QSpec):
        return value
    if not isinstance(value, str):
        raise fail(
            function,
            f"`{argument}` is neither a QSpec nor a scheme.",
            given=f"{argument} == {shown(value)}"
            if isinstance(value, (bool, int, float, Mapping))
            else f"an object of type {type(value).__name__}",
            expected='a jqx.QSpec, a scheme such as "int4:group=32", or None for float',
            fix=_fix(value, role),
            error=TypeError,
        )
    spec, contract = parse_scheme(value, role, function)
    if contract is not None:
        expected = "no `contract`: the contraction defines the axes that it sums over"
        raise _wrong(function, "`contract` is only for tensors in files.", value, expected)
    return spec


def needed_spec(function: str, argument: str, value: Any, role: Role) -> QSpec:
    """Returns the spec as `as_spec` does, but raises for float."""
    spec = as_spec(function, argument, value, role)
    if spec is not None:
        return spec
    error = TypeError if value is None else ValueError
    raise fail(
        function,
        f"`{argument}` is {value}, but a format is needed.",
        given=f"{argument} == {value!r}",
        expected='a jqx.QSpec, or a scheme such as "int8:tensor"',
        fix='pass for example "int8", or leave the array as it is.',
        error=error,
    )


_ONE_FOR: dict[Role, str] = {
    "weight": "per channel",
    "activation": "for all values",
    "state": "per token",
    "array": "for all values",
}
"""What shares a scale if a scheme has no granularity, by what it is for."""


def _fix(value: Any, role: Role) -> str:
    """Returns how to pass a value that is almost a spec."""
    if isinstance(value, Mapping):
        return 'make a spec of the fields: jqx.QSpec("int8", symmetric=True).'
    if isinstance(value, type) and issubclass(value, QSpec):
        return 'make a spec: jqx.QSpec("int8").'
    if type(value) is int and f"int{value}" in formats_by_name():
        return f'pass the scheme "int{value}", with one scale {_ONE_FOR[role]}.'
    try:
        given: Any = value
        name = format_of(given).name
    except (TypeError, ValueError):
        return 'pass for example "int8", or jqx.QSpec("int8", jqx.per_channel()).'
    own = f'pass the scheme "{name}", with one scale {_ONE_FOR[role]}'
    return f'{own}, or jqx.QSpec("{name}", ...).'


def _given(function: str, text: str, options: list[str]) -> dict[str, str]:
    """Returns the options of a scheme, each with its value."""
    given: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        known = key in _OPTIONS and (key in _VALUED) == ("=" in option) == bool(value)
        if key in given or not known:
            raise _wrong(
                function,
                f"the option {option!r} is unknown, lacks a value, or is given twice.",
                text,
                ", ".join(f"{key}=..." if key in _VALUED else key for key in _OPTIONS),
                _mend_option(key, value, given),
            )
        given[key] = value
    return given


def _mend_option(key: str, value: str, given: Mapping[str, str]) -> str | None:
    """Returns how to write an option that does not exist as it is written."""
    if key in given:
        return f"give {key} once."
    if key == "symmetric":
        return "drop it: a scheme is symmetric unless it says asymmetric."
    close = difflib.get_close_matches(key, _OPTIONS, n=1)
    if not close:
        return None
    name = close[0]
    written = f"{name}={value or _EXAMPLES[name]}" if name in _VALUED else name
    return f"write {written!r}."


def _granularity(
    function: str, text: str, qtype: jnp.dtype | QType, given: dict[str, str], role: Role
) -> Any:
    """Returns the granularity; `None` leaves it to `QSpec`."""
    said = [name for name in (*_SIZES, *_GRANULARITIES) if name in given]
    if len(said) > 1:
        expected = f"one of {', '.join((*_SIZES, *_GRANULARITIES))}"
        raise _wrong(function, "the scheme gives two granularities.", text, expected)
    if said and said[0] in _SIZES:
        return per_group(_integer(function, text, given[said[0]]), tail=True)
    if said == ["token"] and role == "weight":
        expected = "channel: one scale for each index of the axes that the product keeps"
        raise _wrong(function, "`token` is for activations.", text, expected)
    if said:
        return _GRANULARITIES[said[0]]()
    form = format_of(qtype)
    if isinstance(form, Block):
        return per_group(form.size, tail=True)
    if role == "array":
        return None
    if role == "weight":
        return per_channel()
    return per_token() if role == "state" or "dynamic" in given else per_tensor()


def _calibrator(function: str, text: str, given: dict[str, str]) -> Calibrator:
    name = given.get("calibrator")
    if name is None:
        return minmax if "asymmetric" in given else absmax
    if name not in _CALIBRATORS:
        expected = f"one of {', '.join(_CALIBRATORS)}"
        close = difflib.get_close_matches(name, _CALIBRATORS, n=1)
        fix = f"write 'calibrator={close[0]}'." if close else None
        raise _wrong(function, "the calibrator is unknown.", text, expected, fix)
    return _CALIBRATORS[name]


def _integer(function: str, text: str, number: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", number):
        expected = "such as group=32 or contract=0,1"
        raise _wrong(function, f"{number!r} is not an integer.", text, expected)
    return int(number)


def _unknown(function: str, name: str, known: Mapping[str, Any]) -> ValueError:
    close = difflib.get_close_matches(name, known, n=1)
    fix = f"write {close[0]!r}." if close else 'write for example "int8", or "int4:group=32".'
    fix = preset_instead(name) or fix
    expected = f"float, or one of {', '.join(known)}"
    text = message(function, "the format is unknown.", given=repr(name), expected=expected, fix=fix)
    return ValueError(text)


def preset_instead(name: str) -> str | None:
    """Returns what to write in place of the name of a preset, which may not exist; `None` if it
    does not look like one.
    """
    if name in PRESETS:
        return f"call the preset: jqx.presets.{name}()."
    bits = _PRESET.fullmatch(name)
    if bits is None:
        return None
    fields = [("weight", f"int{bits[1]}")]
    fields += [] if bits[2] in ("16", "32") else [("activation", f"int{bits[2]}")]
    if not all(form in formats_by_name() for _, form in fields):
        return f"no preset has this name: there are {', '.join(PRESETS)}."
    dynamic = {"activation": ":token:dynamic" if bits[3] else ""}
    rule = ", ".join(f"{x}={form + dynamic.get(x, '')!r}" for x, form in fields)
    return f'no preset has this name: write jqx.Policy([jqx.Rule(".*", {rule})]).'


def _wrong(
    function: str, problem: str, given: str, expected: str, fix: str | None = None
) -> ValueError:
    fix = (
        fix
        or 'write a format and its options, such as "int8:tensor" or "int4:group=32:asymmetric".'
    )
    return ValueError(message(function, problem, given=given, expected=expected, fix=fix))
