"""Rule: which contractions are quantized, and how."""

import dataclasses
import re
from typing import Any, Literal

from .._calls import called
from .._checks import check_instance
from .._errors import fail
from ..numerics._shared import formats_by_name
from ..tensor import QSpec
from ..tensor._shared import FLOAT, as_spec, preset_instead
from ._steps import Selector

Spec = QSpec | str | None
"""How an operand is quantized: a spec, a scheme such as `"int4:group=32"`, or `None` for float."""


@called("Rule", 'name the specs: jqx.Rule(".*", weight="int4:group=32").')
@dataclasses.dataclass(frozen=True)
class Rule:
    """How the contractions that match are quantized.

    A rule with a `weight` spec matches contractions that have a weight. A rule without one matches
    all contractions, including those of two activations, such as attention scores. There,
    `activation` applies to both operands.

    Specs may be given as schemes, as on the command line: a format, followed by colons and any of
    `group=32`, `channel`, `token`, `tensor`, `asymmetric`, `dynamic`, `calibrator=mse`. If a scheme
    has no granularity, a weight has one scale for each channel (in `jqx.QTensor.quantize`, which
    knows no channels, one for all), and an activation has one scale, or one for each token if it is
    dynamic. A block format has one scale for each block.

    Attributes:
      path: regular expression, matched in full against the path of the contraction. This is the key
        path of its weight inside the parameters, such as `blocks/0/query`, or its name scope if it
        has no weight. If several weights are joined, or multiplied by each other, one rule must
        match all of them. For weights that a scan steps over it may select steps: `layers[0]`,
        `layers[-2:]/attn/.*`, `layers[1:3]`. The scan is split there: see `make_plan`. Brackets
        select steps if they hold an integer or a slice, stand at the end of a part of the path, and
        the path matches nothing as a regular expression. If the path ends with them, it includes
        everything below.
      op: regular expression, matched in full against the operation: `dot_general`,
        `conv_general_dilated`, `ragged_dot` or `gather`; `None` matches all.
      weight: spec of weights; `None` leaves them in float.
      activation: spec of the other operands; `None` leaves them in float.
      output: spec of the result; `None` leaves it in float.
      tables: spec of weights that are used for lookups. `"weight"` uses the spec `weight`, and
        `None` leaves them in float, as presets do. All uses of one weight share the same codes or
        none, including a product with the table.
      optional: whether the rule, or an alternative in its path, may match nothing. Otherwise that
        is an error for a rule, and a warning for an alternative, as in `(embed|haed)/kernel`.

    Raises:
      TypeError: if a field has the wrong type.
      ValueError: if a regular expression or a scheme is invalid.

    Example:
      >>> import jqx
      >>> rule = jqx.Rule("layer[0-9]+/w", weight="int4:group=32", activation="int8:token:dynamic")
      >>> rule.matches("layer0/w", "dot_general", has_weight=True)
      True
      >>> print(rule)
      Rule('layer[0-9]+/w', weight=int4 per_group(32, tail=True), activation=int8 per_token dynamic)
    """

    path: str
    op: str | None
    _: dataclasses.KW_ONLY
    weight: QSpec | None
    activation: QSpec | None
    output: QSpec | None
    tables: QSpec | Literal["weight"] | None
    optional: bool

    def __init__(
        self,
        path: str = ".*",
        op: str | None = None,
        *,
        weight: Spec = None,
        activation: Spec = None,
        output: Spec = None,
        tables: Spec = "weight",
        optional: bool = False,
    ) -> None:
        _check_regex("path", path)
        if op is not None:
            _check_regex("op", op)
            _check_op(path, op)
        check_instance(
            "Rule", "optional", optional, bool, fix="pass optional=True or optional=False."
        )
        as_is = isinstance(tables, str) and tables == "weight"
        fields = {
            "path": path,
            "op": op,
            "weight": as_spec("Rule", "weight", weight),
            "activation": as_spec("Rule", "activation", activation, "activation"),
            "output": as_spec("Rule", "output", output, "activation"),
            "tables": tables if as_is else as_spec("Rule", "tables", tables),
            "optional": optional,
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    def matches(self, path: str, op: str, *, has_weight: bool) -> bool:
        """Whether the rule applies to a contraction."""
        if self.weight is not None and not has_weight:
            return False
        return self._is_for(op) and re.fullmatch(self.path, path) is not None

    @property
    def selector(self) -> Selector | None:
        """The steps of a scan that its path selects, if the path does not match an existing path as
        a regular expression.
        """
        return Selector.of(self.path)

    def selects(self, path: str, op: str) -> bool:
        """Whether the rule selects steps of a scan over the weight at a path."""
        return self.selector is not None and self._is_for(op) and self.selector.matches(path)

    def _is_for(self, op: str) -> bool:
        return self.op is None or re.fullmatch(self.op, op) is not None

    def weight_for(self, op: str) -> QSpec | None:
        """Returns the spec of the weights of an operation."""
        return self.tables if op == "gather" and self.tables != "weight" else self.weight

    @property
    def is_float(self) -> bool:
        """Whether the rule leaves everything that it matches in float."""
        tables = None if self.tables == "weight" else self.tables
        return not any((self.weight, self.activation, self.output, tables))

    def described(self) -> str:
        """Returns what the rule does, in words: `int4 per_channel, activation int8 per_tensor`."""
        parts = [str(self.weight)] if self.weight else []
        parts += [
            f"{field} {spec}"
            for field in ("activation", "output", "tables")
            if (spec := getattr(self, field)) is not None and spec != "weight"
        ]
        parts = parts or [FLOAT]
        if self.tables is None and self.weight is not None:
            parts.append("tables float")
        if self.op is not None:
            parts.append(f"op {self.op!r}")
        return ", ".join([*parts, *(["optional"] if self.optional else [])])

    def __str__(self) -> str:
        parts = [repr(self.path)] + ([f"op={self.op!r}"] if self.op else [])
        for field in ("weight", "activation", "output"):
            if getattr(self, field) is not None:
                parts.append(f"{field}={getattr(self, field)}")
        if self.tables != "weight":
            parts.append(f"tables={self.tables}")
        return f"Rule({', '.join(parts)})"


def pattern_of(path: str) -> str:
    """Returns the path of a rule for one weight: its own path, with special characters escaped."""
    if re.search(r"\[\d+:\d+\]\Z", path):  # a part of a stack of layers
        return path
    try:
        return path if re.fullmatch(path, path) else re.escape(path)
    except (re.error, OverflowError):
        return re.escape(path)


def _check_regex(field: str, pattern: Any) -> None:
    fix = 'pass a regular expression such as "blocks/[0-9]+/.*".'
    names = f"specs have names: weight=, activation=. As {field}, {fix}"
    fix = names if isinstance(pattern, QSpec) else fix
    check_instance("Rule", field, pattern, str, fix=fix)
    try:
        re.compile(str(pattern))
    except (re.error, OverflowError) as error:
        raise fail(
            "Rule",
            f"`{field}` is not a valid regular expression: {error}.",
            given=f"{field} == {pattern!r}",
            expected="a pattern that Python's re accepts",
            fix=_glob(str(pattern)) or "escape special characters with a backslash.",
        ) from None


def _glob(pattern: str) -> str | None:
    """Returns what to write for a pattern of a shell; `None` if it does not look like one."""
    found = re.sub(r"(?<![.\\\])])\*+", ".*", pattern)
    try:
        re.compile(found)
    except (re.error, OverflowError):
        return None
    if found == pattern:
        return None
    return f"it is a regular expression, in which any text is '.*': write {found!r}."


def _check_op(path: str, op: str) -> None:
    """Checks that an operation is not a scheme or a preset, which has a name of its own."""
    name = op.partition(":")[0]
    if name not in (FLOAT, *formats_by_name()) and preset_instead(op) is None:
        return
    fix = f"write jqx.Rule({path!r}, weight={op!r}): the second argument is the operation."
    if preset_instead(op) is not None:
        fix = f"a preset is a policy: jqx.Policy({{{path!r}: jqx.presets.w8a8()}})."
    raise fail(
        "Rule",
        "`op` says how to quantize, not which operation.",
        given=f"op == {op!r}",
        expected="dot_general, conv_general_dilated, ragged_dot or gather, or None for all",
        fix=fix,
    )
