"""What all presets share: one rule, whose specs can be refined, and what is said of that."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jax.typing import DTypeLike

from .._checks import require_that
from ..calibrators import Granularity
from ..calibrators._shared import per_channel, per_group
from ..numerics import Block, QType, format_of
from ..policy import Policy, Rule
from ..tensor import QSpec

Fields = Mapping[str, Any]
"""Fields of a `QSpec` to replace, by name."""

NONE: Fields = {}

Tables = DTypeLike | QType | QSpec | None
"""How lookup tables are quantized; `None` leaves them in float."""

_ARGUMENTS = {
    "path": """regular expression of the paths it covers.""",
    "block": """how many weights share a scale along the axes that a contraction sums over. Where
    it does not divide them blocks are smaller: the last one along an axis, and all of a kernel of
    3x3 taps. (`weight={"granularity": jqx.per_group(32)}` makes that an error.)""",
    "tables": """format of the tables that are looked up in, such as `"int8"`, one scale a row, or
    their `QSpec`; `None` leaves them in float. A table that is multiplied by as well is quantized
    for all its uses or for none: by default for none.""",
    "weight": """fields of the weights' `QSpec` to replace.""",
    "activation": """fields of the activations' `QSpec` to replace.""",
}
_RAISES = {
    "TypeError": "a field that `QSpec` has not, or an argument of another kind.",
    "ValueError": "`path` is no regular expression, or fields do not fit each other.",
}
_Preset = TypeVar("_Preset", bound=Callable[..., Policy])


def preset(f: _Preset) -> _Preset:
    """Adds to a docstring what is the same for all presets, before its example."""
    before, heading, after = inspect.cleandoc(f.__doc__ or "").partition("Example:")
    taken = {name: _ARGUMENTS[name] for name in inspect.signature(f).parameters}
    sections = [_section("Args", taken), _section("Raises", _RAISES), heading + after]
    f.__doc__ = before + "\n\n".join(sections)
    return f


def policy(
    path: str,
    weight: QSpec,
    activation: QSpec | None,
    tables: Tables,
    weight_fields: Fields,
    activation_fields: Fields = NONE,
) -> Policy:
    """Returns the policy of one rule, of specs with some fields replaced."""
    refined = dataclasses.replace(weight, **weight_fields)
    if activation is not None:
        activation = dataclasses.replace(activation, **activation_fields)
    spec = _table_spec(tables)
    return Policy([Rule(path, weight=refined, activation=activation, tables=spec)])


def _table_spec(tables: Tables) -> QSpec | None:
    if tables is None or isinstance(tables, QSpec):
        return tables
    form = format_of(tables)
    if isinstance(form, Block):
        return QSpec(tables, per_group(form.size, tail=True))
    return QSpec(tables, per_channel())


def blocks(function: str, block: int, default: int, weight_fields: Fields) -> Granularity:
    """Returns blocks of weights, the last ones smaller where need be."""
    require_that(
        block == default or "granularity" not in weight_fields,
        error=ValueError,
        function=f"presets.{function}",
        problem="`block` and `weight` both say who shares a scale.",
        given=f"block == {block} and weight with a granularity",
        expected="one of the two",
        mend="drop block, or the granularity in weight.",
    )
    return per_group(block, tail=True)


def _section(heading: str, entries: Mapping[str, str]) -> str:
    return "\n".join([f"{heading}:", *(f"  {name}: {text}" for name, text in entries.items())])
