"""The common part of all presets: one rule, whose specs can be refined, and its docstring."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from jax.typing import DTypeLike

from .._calls import called
from .._checks import check_instance
from .._errors import fail
from ..calibrators import Granularity
from ..calibrators._shared import per_channel, per_group
from ..numerics import Block, QType, format_of
from ..numerics._shared import as_qtype
from ..policy import Policy, Rule
from ..tensor import QSpec
from ..tensor._shared import Role, as_spec, needed_spec

Fields = Mapping[str, Any] | QSpec | str
"""Fields of a `QSpec` to replace, by name; or a spec, or a scheme, to use instead."""

NONE: Fields = {}

Tables = DTypeLike | QType | QSpec | None
"""How lookup tables are quantized: a format, a scheme, a spec; `None` leaves them in float."""

Exclude = str | Sequence[str]
"""Regular expressions of paths that stay in float: one, or several."""

_ARGUMENTS = {
    "path": """regular expression of the paths to quantize.""",
    "block": """number of weights that share a scale along the axes that a contraction sums over. If
    it does not divide an axis, some blocks are smaller: the last one along the axis, and all blocks
    of a kernel of 3x3 taps. (`weight={"granularity": jqx.per_group(32)}` makes that an error.)""",
    "exclude": """regular expression, or several, of paths to leave in float. Each becomes a rule in
    front of the others. As for any rule, it is an error if one matches nothing, and a warning if an
    alternative in it does.""",
    "tables": """format of the tables used for lookups, such as `"int8"`, with one scale for each
    row; or a scheme such as `"int4:group=32"`, or a `QSpec`. `None` leaves tables in float. A table
    that is also used in a product is quantized for all its uses or for none: by default for
    none.""",
    "weight": """fields to replace in the `QSpec` of the weights; or a `QSpec`, or a scheme such as
    `"int4:group=32"`, to use instead.""",
    "activation": """the same for the activations, such as `"int8:token:dynamic"`.""",
}
_RAISES = {
    "TypeError": "if a field is not one of `QSpec`, or an argument has the wrong type.",
    "ValueError": "if `path` is not a regular expression, or fields do not fit together.",
}
_Preset = TypeVar("_Preset", bound=Callable[..., Policy])


def preset(f: _Preset) -> _Preset:
    """Makes a preset of a function: adds what all presets share to its docstring.

    Calls that do not fit the signature raise errors in four parts.
    """
    signature = inspect.signature(f)
    taken = {name: _ARGUMENTS[name] for name in signature.parameters}
    before, heading, after = inspect.cleandoc(f.__doc__ or "").partition("Example:")
    sections = [_section("Args", taken), _section("Raises", _RAISES), heading + after]
    f.__doc__ = before + "\n\n".join(sections)

    def instead(name: str) -> str | None:
        return _instead(name, taken, f)

    return called(f"presets.{f.__name__}", instead=instead)(f)


def _instead(name: str, taken: Collection[str], f: Callable[..., Policy]) -> str | None:
    """Returns what to write in the place of an argument that a preset does not take."""
    if name.startswith("act") and "activation" not in taken:
        return "activations stay in the model's float dtype: see jqx.presets.w8a8_dynamic()."
    if name in ("bits", "dtype"):
        return 'pass a format: weight={"qtype": "int4"}.'
    if name in ("group", "groups", "group_size", "block", "blocks", "block_size"):
        if "block" in taken:
            return f"{name}= is called block=."
        spec = f().rules[-1].weight
        assert spec is not None
        form = format_of(spec.qtype)
        if isinstance(form, Block):
            return f"drop {name}=: {form.name} has blocks of {form.size}."
        return f'pass a scheme: weight="{form.name}:group=32".'
    if name in {field.name for field in dataclasses.fields(QSpec)}:
        return f'pass a field of the spec: weight={{"{name}": ...}}.'
    return None


def policy(
    name: str,
    path: str,
    exclude: Exclude,
    weight: QSpec,
    activation: QSpec | None,
    tables: Tables,
    weight_fields: Fields,
    activation_fields: Fields = NONE,
) -> Policy:
    """Returns the policy of a preset: a rule for each path to leave in float, and a rule with some
    fields of its specs replaced.
    """
    function = f"presets.{name}"
    check_instance(
        function, "exclude", exclude, (str, list, tuple), fix='pass for example exclude="head/.*".'
    )
    left = (exclude,) if isinstance(exclude, str) else exclude
    refined = _refined(function, "weight", weight, weight_fields)
    if activation is not None:
        activation = _refined(function, "activation", activation, activation_fields)
    spec = _table_spec(function, tables)
    rule = Rule(path, weight=refined, activation=activation, tables=spec)
    return Policy([*map(Rule, left), rule])


def _refined(function: str, role: Role, spec: QSpec, fields: Fields) -> QSpec:
    """Returns a spec with some fields replaced, or the spec that was given instead."""
    if isinstance(fields, Mapping):
        return dataclasses.replace(spec, **fields)
    return needed_spec(function, role, fields, role)


def _table_spec(function: str, tables: Tables) -> QSpec | None:
    if tables is None or isinstance(tables, (str, QSpec)):
        return as_spec(function, "tables", tables)
    qtype = as_qtype(function, "tables", tables, "Table")
    form = format_of(qtype)
    if isinstance(form, Block):
        return QSpec(qtype, per_group(form.size, tail=True))
    return QSpec(qtype, per_channel())


def blocks(function: str, block: int, default: int, weight_fields: Fields) -> Granularity:
    """Returns blocks of weights; the last ones may be smaller."""
    says = not isinstance(weight_fields, Mapping) or "granularity" in weight_fields
    if block != default and says:
        raise fail(
            f"presets.{function}",
            "`block` and `weight` both set the granularity.",
            given=f"block == {block} and weight with a granularity",
            expected="one of the two",
            fix="drop block, or the granularity in weight.",
        )
    return per_group(block, tail=True)


def _section(heading: str, entries: Mapping[str, str]) -> str:
    return "\n".join([f"{heading}:", *(f"  {name}: {text}" for name, text in entries.items())])
