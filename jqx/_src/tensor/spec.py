"""QSpec: how one operand is quantized."""

import dataclasses
import difflib
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..checks import (
    added,
    called,
    check_fields,
    check_instance,
    flag,
    normalize_axes,
    shown,
    shown_as,
)
from ..errors import fail
from ..gradients.estimators import Gradient, check_estimator, ste
from ..numerics.blocks import Block
from ..numerics.exact import RoundMode
from ..numerics.lookup import as_qtype, format_of, formats_by_name
from ..numerics.qtype import Integer, QType
from ..numerics.runtimes import Numerics, ngraph
from ..ops.affine import check_symmetric
from ..ops.quantize import check_round_mode
from ..statistics.calibrators import Calibrator, absmax, delayed, minmax
from ..statistics.granularity import (
    Granularity,
    PerGroup,
    is_without_blocks,
    per_axis,
    per_channel,
    per_group,
    per_tensor,
    per_token,
)
from ..statistics.searches import ceil, four_over_six, hqq, mse, percentile

_PER_TENSOR = per_tensor()


def _instead(name: str) -> str | None:
    """Returns what to write in place of a field of a spec that does not exist."""
    if name in ("axis", "axes", "ch_axis", "channel_axis", "channelwise_axes"):
        return 'write jqx.QSpec("int8", jqx.per_axis(0)), or jqx.per_channel() in a policy.'
    if name in ("group_size", "block_size", "tile_size", "group", "block"):
        return 'write jqx.QSpec("int4", jqx.per_group(32)).'
    return None


@called(
    "QSpec", 'the format sets the number of bits: jqx.QSpec("int4", jqx.per_group(32)).', _instead
)
@dataclasses.dataclass(frozen=True)
class QSpec:
    """How one operand is quantized: its format, granularity, and how the scale is found.

    Attributes:
      qtype: a number format: a dtype such as `jnp.int8` or `jnp.float8_e4m3fn`, a value of
        `jqx.numerics`, or the name of either, such as `"int4"` or `"nf4"`.
      granularity: which elements share a scale: `jqx.per_tensor()`, `jqx.per_axis(...)`,
        `jqx.per_block(...)`, or, relative to the axes that a contraction keeps,
        `jqx.per_channel()`, `jqx.per_token()` and `jqx.per_group(size)`. `None` means per tensor;
        for a block format, groups of its size.
      symmetric: whether the zero point is zero; only integer formats have zero points.
      calibrator: finds the range, a value of `jqx.calibrators`.
      dynamic: for activations, whether the range is computed from the values in each call.
      round_mode: one of the nine modes; `None` takes that of `numerics`.
      gradient: the gradient estimator for simulated quantization, a value of `jqx.gradients`.
      stacked: axes along which the array is a stack of arrays, for formats whose scales are
        quantized (nvfp4). Each array of the stack then has its own second scale, as if it had been
        quantized alone. Plans find these axes: layers that a scan steps over, batch axes of a
        contraction, the groups of `ragged_dot`.
      numerics: the runtime whose integer arithmetic is followed, a value of `jqx.numerics` such as
        `jqx.numerics.torchao`.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `symmetric` is True for an unsigned `qtype`, or False for a format without zero
        points; the granularity has another block size than a block format; the estimator does not
        fit the format; `stacked` is given for a format whose scales are not quantized.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.QSpec(jnp.int8, jqx.per_axis(1)).granularity.scale_shape((3, 4))
      (1, 4)
      >>> str(jqx.QSpec(jqx.numerics.mxfp4))
      'mxfp4 per_group(32)'
    """

    qtype: DTypeLike | QType
    granularity: Granularity = None  # type: ignore[assignment]  # resolved below
    symmetric: bool = True
    calibrator: Calibrator = absmax
    dynamic: bool = False
    round_mode: RoundMode | None = None
    gradient: Gradient = ste
    numerics: Numerics = ngraph
    stacked: tuple[int, ...] = added(())

    def __post_init__(self) -> None:
        qtype = as_qtype("QSpec", "qtype", self.qtype, "Quantized")
        object.__setattr__(self, "qtype", qtype)
        form = format_of(qtype)
        if self.granularity is None:
            of_blocks = isinstance(form, Block)
            default = per_group(form.size) if of_blocks else _PER_TENSOR
            object.__setattr__(self, "granularity", default)
        if self.round_mode is not None:
            check_round_mode("QSpec", self.round_mode)
        check_estimator("QSpec", self.gradient, uniform=form.uniform)
        _check_granularity(self.granularity)
        for field, kind, example in (
            ("calibrator", Calibrator, "calibrators.absmax"),
            ("numerics", Numerics, "numerics.onnx"),
        ):
            value = getattr(self, field)
            if not isinstance(value, kind):
                fix = f"pass {_public_value(value, kind, example)}."
                check_instance("QSpec", field, value, kind, fix=fix)
        if not isinstance(form, Integer) and self.numerics != ngraph:
            problem = f"`numerics` ({self.numerics}) is only for integer formats, not {form.name}."
            raise fail("QSpec", problem, fix="drop numerics, or pass an integer qtype.")
        check_fields("QSpec", self, symmetric=flag(), dynamic=flag())
        check_symmetric("QSpec", qtype, self.symmetric)
        if isinstance(form, Block):
            _check_blocks(form, self.granularity)
        axes = self.stacked if isinstance(self.stacked, tuple) else (None,)
        if not all(type(axis) is int for axis in axes):
            problem = f"`stacked` does not name axes: {self.stacked!r}."
            fix = "pass a tuple of integers, such as stacked=(0,)."
            raise fail("QSpec", problem, fix=fix, error=TypeError)
        if self.stacked and not is_two_level(form):
            problem = f"{form.name} has no second scale, so `stacked` has no effect."
            fix = "drop stacked; the granularity sets which axes have their own scale."
            raise fail("QSpec", problem, fix=fix)

    @property
    def rounding(self) -> RoundMode:
        """The round mode: the one given, or that of `numerics`."""
        return self.round_mode or self.numerics.round_mode

    def resolve(self, rank: int, kept: Sequence[int], stacked: Sequence[int] = ()) -> "QSpec":
        """Returns the spec of a site, with an absolute granularity, for an array of `rank` axes.
        `kept` are the axes that the contraction keeps, `stacked` the axes of a stack.
        """
        stacked_axes = {*normalize_axes("QSpec", self.stacked, rank, argument="stacked"), *stacked}
        return dataclasses.replace(
            self,
            granularity=self.granularity.resolve(rank, kept),
            stacked=tuple(sorted(stacked_axes)) if is_two_level(format_of(self.qtype)) else (),
        )

    def of_second_scale(self, rank: int) -> Granularity:
        """Returns which scales of an array of `rank` axes share a second scale."""
        axes = normalize_axes("QSpec", self.stacked, rank, argument="stacked")
        return per_axis(*axes) if axes else _PER_TENSOR

    def __str__(self) -> str:
        parts = [format_of(self.qtype).name, str(self.granularity)]
        if not self.symmetric:
            parts.append("asymmetric")
        if self.calibrator != absmax:
            parts.append(str(self.calibrator))
        if self.dynamic:
            parts.append("dynamic")
        if self.numerics != ngraph:
            parts.append(str(self.numerics))
        if self.stacked:
            parts.append(f"stacked({', '.join(map(str, self.stacked))})")
        return " ".join(parts)


def is_two_level(form: QType) -> bool:
    """Whether the scales of a format are themselves quantized."""
    return isinstance(form, Block) and form.two_level


def _check_granularity(granularity: Any) -> None:
    """Checks that it is a granularity; the error suggests the one that a name or function means."""
    if callable(getattr(granularity, "groups", None)) and not isinstance(granularity, type):
        return
    name, suggestion = getattr(granularity, "__name__", granularity), None
    if isinstance(name, str):
        suggestion = _BY_NAME.get(re.sub(r"per_?|[^a-z]", "", name.lower()))
    if type(granularity) is int:
        suggestion = f"jqx.per_group({granularity})"
    facts = shown_as("granularity", granularity)
    fix = f"pass {suggestion or 'a granularity, for example jqx.per_channel()'}."
    raise fail(
        "QSpec", "`granularity` is not a granularity.", given=facts, fix=fix, error=TypeError
    )


_BY_NAME = {
    "channel": "jqx.per_channel()",
    "token": "jqx.per_token()",
    "tensor": "jqx.per_tensor()",
    "axis": "jqx.per_axis(0), with the axes that have their own scale",
    "group": "jqx.per_group(32), with the size of a group",
    "block": "jqx.per_block({0: 32}), with the sizes of a block",
}
"""Granularities by the names that users give them."""


def _public_value(value: Any, kind: type, example: str) -> str:
    """Returns the public value with a name, or an example in its module."""
    module = f"jqx.{example.partition('.')[0]}"
    public = vars(importlib.import_module(module))
    is_name = isinstance(value, str) and isinstance(public.get(value), kind)
    return f"{module}.{value}" if is_name else f"for example jqx.{example}"


def _check_blocks(form: Block, granularity: Granularity) -> None:
    """Checks the block size, as far as it is known without an array."""
    has_other_size = isinstance(granularity, PerGroup) and granularity.size != form.size
    if has_other_size or is_without_blocks(granularity):
        problem = f"{form.name} has blocks of {form.size} elements, not {granularity}."
        raise fail("QSpec", problem, fix=f"leave granularity out, or pass per_group({form.size}).")


# Schemes: a `QSpec` as a string, `int4:group=32:asymmetric`, for rules and the command line.
#
#     scheme = "float" | format { ":" option }
#     option = "group=N" | "block=N" | "channel" | "token" | "tensor"
#            | "asymmetric" | "dynamic" | "calibrator=NAME" | "contract=AXES"
#
# A format is a dtype of JAX or a name of `jqx.numerics`. `group` (or its synonym `block`) is the
# number of elements that share a scale along the contracted axes; the last group may be smaller.
# `channel`, `token` and `tensor` are `jqx.per_channel()` and so on. Without one of them, the
# granularity is that of the presets: per channel for weights, per tensor for activations, per token
# for dynamic activations and for state, and per block for a block format. `asymmetric` means zero
# points, `dynamic` means that the scale of an activation is computed from its values in each call,
# and `calibrator` is a name of `jqx.calibrators`. `contract` names the axes that the product of a
# weight in a file sums over, such as `contract=0` or `contract=0,1`; in a program, the contraction
# itself defines them.


Role = Literal["weight", "activation", "state", "array"]
"""What a scheme is for. An array has no contraction, so its default is that of `QSpec`."""

FLOAT = "float"
"""The scheme that leaves an operand as it is."""

_CALIBRATORS: dict[str, Calibrator] = {
    "absmax": absmax,
    "minmax": minmax,
    "ceil": ceil,
    "four_over_six": four_over_six,
    "hqq": hqq,
    "mse": mse,
    "percentile": percentile,
    "delayed": delayed,
}
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
    options_by_name = _options_of(function, text, options)
    if name == FLOAT:
        if options_by_name:
            raise _wrong(function, "`float` has no options.", text)
        return Scheme(None)
    formats = formats_by_name()
    if name not in formats:
        raise _unknown(function, name, formats)
    if "dynamic" in options_by_name and role != "activation":
        problem = "`dynamic` is for activations: other values do not change from call to call."
        raise _wrong(function, problem, text)
    spec = QSpec(
        formats[name],
        _granularity(function, text, formats[name], options_by_name, role),
        symmetric="asymmetric" not in options_by_name,
        calibrator=_calibrator(function, text, options_by_name),
        dynamic="dynamic" in options_by_name,
    )
    contract = options_by_name.get("contract")
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
        problem = f'`{argument}` is neither a QSpec nor a scheme such as "int4:group=32".'
        is_short = isinstance(value, (bool, int, float, Mapping))
        facts = f"{argument} == {shown(value)}" if is_short else type(value).__name__
        raise fail(function, problem, given=facts, fix=_fix(value, role), error=TypeError)
    spec, contract = parse_scheme(value, role, function)
    if contract is not None:
        problem = "`contract` is only for tensors in files: a contraction defines its own axes."
        raise _wrong(function, problem, value)
    return spec


def needed_spec(function: str, argument: str, value: Any, role: Role) -> QSpec:
    """Returns the spec as `as_spec` does, but raises for float."""
    spec = as_spec(function, argument, value, role)
    if spec is not None:
        return spec
    problem = f"`{argument}` is {value}, but a format is needed."
    fix = 'pass for example "int8", or leave the array as it is.'
    raise fail(function, problem, fix=fix, error=TypeError if value is None else ValueError)


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
        spec_value: Any = value
        name = format_of(spec_value).name
    except (TypeError, ValueError):
        return 'pass for example "int8", or jqx.QSpec("int8", jqx.per_channel()).'
    advice = f'pass the scheme "{name}", with one scale {_ONE_FOR[role]}'
    return f'{advice}, or jqx.QSpec("{name}", ...).'


def _options_of(function: str, text: str, options: list[str]) -> dict[str, str]:
    """Returns the options of a scheme, each with its value."""
    values: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        is_option = key in _OPTIONS and (key in _VALUED) == ("=" in option) == bool(value)
        if key in values or not is_option:
            problem = f"the option {option!r} is unknown, lacks a value, or is given twice."
            expected = ", ".join(f"{key}=..." if key in _VALUED else key for key in _OPTIONS)
            raise _wrong(function, problem, text, expected, _fixed_option(key, value, values))
        values[key] = value
    return values


def _fixed_option(key: str, value: str, options: Mapping[str, str]) -> str | None:
    """Returns how to write an option that does not exist as it is written."""
    if key in options:
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
    function: str, text: str, qtype: jnp.dtype | QType, options: dict[str, str], role: Role
) -> Any:
    """Returns the granularity; `None` leaves it to `QSpec`."""
    names = [name for name in (*_SIZES, *_GRANULARITIES) if name in options]
    if len(names) > 1:
        problem = f"the scheme gives two granularities, {' and '.join(names)}."
        raise _wrong(function, problem, text)
    if names and names[0] in _SIZES:
        return per_group(_integer(function, text, options[names[0]]), tail=True)
    if names == ["token"] and role == "weight":
        problem = "`token` is for activations; a weight has one scale per channel."
        raise _wrong(function, problem, text)
    if names:
        return _GRANULARITIES[names[0]]()
    form = format_of(qtype)
    if isinstance(form, Block):
        return per_group(form.size, tail=True)
    if role == "array":
        return None
    if role == "weight":
        return per_channel()
    return per_token() if role == "state" or "dynamic" in options else per_tensor()


def _calibrator(function: str, text: str, options: dict[str, str]) -> Calibrator:
    name = options.get("calibrator")
    if name is None:
        return minmax if "asymmetric" in options else absmax
    if name not in _CALIBRATORS:
        expected = f"one of {', '.join(_CALIBRATORS)}"
        close = difflib.get_close_matches(name, _CALIBRATORS, n=1)
        fix = f"write 'calibrator={close[0]}'." if close else None
        raise _wrong(function, "the calibrator is unknown.", text, expected, fix)
    return _CALIBRATORS[name]


def _integer(function: str, text: str, number: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", number):
        problem = f"{number!r} is not an integer, as in group=32 or contract=0,1."
        raise _wrong(function, problem, text)
    return int(number)


def _unknown(function: str, name: str, names: Mapping[str, Any]) -> Exception:
    close = difflib.get_close_matches(name, names, n=1)
    fix = f"write {close[0]!r}." if close else 'write for example "int8", or "int4:group=32".'
    expected = f"float, or one of {', '.join(names)}"
    problem = f"the format is unknown: {name!r}."
    return fail(function, problem, expected=expected, fix=preset_instead(name) or fix)


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
    function: str, problem: str, text: str, expected: str = "", fix: str | None = None
) -> Exception:
    """Returns the error for a scheme, `text`."""
    example = 'such as "int8:tensor" or "int4:group=32:asymmetric".'
    fix = fix or f"write a format and its options, {example}"
    return fail(function, problem, given=text, expected=expected, fix=fix)
