"""Rule and Policy: which contractions are quantized, and how."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Literal

from .._checks import check_instance
from .._errors import message
from ..tensor import QSpec


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the contractions that it matches are quantized.

    A rule with a `weight` spec matches contractions that have a weight. One without matches all,
    also those of two activations, such as attention scores, where `activation` applies to both
    operands.

    Attributes:
      path: regular expression, matched in full against the path of the contraction: the key path of
        its weight inside the parameters, such as `blocks/0/query`, or its name scope where it has
        none. Where several weights are joined, one rule must match each.
      op: regular expression, matched in full against the operation: `dot_general`,
        `conv_general_dilated`, `ragged_dot` or `gather`; `None` matches all.
      weight: spec of weights; `None` leaves them in float.
      activation: spec of the other operands; `None` leaves them in float.
      output: spec of the result; `None` leaves it in float.
      tables: spec of weights that it covers lookups in; `"weight"` is that of `weight`, and `None`
        leaves them in float, as presets do. All uses of one weight take the same codes, or none:
        a product with the table too.
      optional: whether the rule may match nothing. Otherwise that is an error.

    Raises:
      TypeError: a field is not of its kind.
      ValueError: a regular expression is invalid.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> rule = jqx.Rule("layer[0-9]+/w", weight=jqx.QSpec(jnp.int4, jqx.per_channel()))
      >>> rule.matches("layer0/w", "dot_general", has_weight=True)
      True
    """

    path: str = ".*"
    op: str | None = None
    _: dataclasses.KW_ONLY
    weight: QSpec | None = None
    activation: QSpec | None = None
    output: QSpec | None = None
    tables: QSpec | Literal["weight"] | None = "weight"
    optional: bool = False

    def __post_init__(self) -> None:
        for field in ("path", "op"):
            pattern = getattr(self, field)
            if pattern is not None or field == "path":
                _check_regex(field, pattern)
        for field in ("weight", "activation", "output", "tables"):
            spec = getattr(self, field)
            if field == "tables" and isinstance(spec, str) and spec == "weight":
                continue
            kinds = (QSpec, type(None))
            check_instance(
                "Rule",
                field,
                spec,
                kinds,
                mend="pass a QSpec such as jqx.QSpec(jnp.int8), or None for float.",
            )
        check_instance(
            "Rule", "optional", self.optional, bool, mend="pass optional=True or optional=False."
        )

    def matches(self, path: str, op: str, *, has_weight: bool) -> bool:
        """Whether the rule applies to a contraction."""
        if self.weight is not None and not has_weight:
            return False
        named = self.op is None or re.fullmatch(self.op, op) is not None
        return named and re.fullmatch(self.path, path) is not None

    def weight_for(self, op: str) -> QSpec | None:
        """Returns the spec of the weights of an operation."""
        return self.tables if op == "gather" and self.tables != "weight" else self.weight

    def __str__(self) -> str:
        parts = [repr(self.path)] + ([f"op={self.op!r}"] if self.op else [])
        for field in ("weight", "activation", "output"):
            if getattr(self, field) is not None:
                parts.append(f"{field}={getattr(self, field)}")
        if self.tables != "weight":
            parts.append(f"tables={self.tables}")
        return f"Rule({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Policy:
    """Rules in order of precedence: the first that matches a contraction wins.

    Attributes:
      rules: any iterable of `Rule`.

    Raises:
      TypeError: something in `rules` is no `Rule`.

    Example:
      >>> import jqx
      >>> head_in_float = jqx.Rule("head/.*")
      >>> policy = jqx.Policy([head_in_float, *jqx.presets.w8a8().rules])
      >>> policy.first("head/w", "dot_general", has_weight=True)[0]
      0
    """

    rules: tuple[Rule, ...]

    def __init__(self, rules: Iterable[Rule]) -> None:
        check_instance("Policy", "rules", rules, Iterable, mend="pass a list: jqx.Policy([rule]).")
        rules = tuple(rules)
        for rule in rules:
            check_instance(
                "Policy",
                "an element of rules",
                rule,
                Rule,
                mend="pass jqx.Rule(...) values; take those of a preset from its .rules.",
            )
        object.__setattr__(self, "rules", rules)

    def first(self, path: str, op: str, *, has_weight: bool) -> tuple[int, Rule] | None:
        """Returns the first rule that matches, with its place; `None` if none does."""
        for place, rule in enumerate(self.rules):
            if rule.matches(path, op, has_weight=has_weight):
                return place, rule
        return None


def _check_regex(field: str, pattern: Any) -> None:
    check_instance(
        "Rule", field, pattern, str, mend='pass a regular expression such as "blocks/[0-9]+/.*".'
    )
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(
            message(
                "Rule",
                f"`{field}` is not a valid regular expression: {error}.",
                given=f"{field} == {pattern!r}",
                expected="a pattern that Python's re accepts",
                mend="escape special characters with a backslash.",
            )
        ) from None
