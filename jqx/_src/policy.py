"""Policy: an ordered list of rules, and ways to write and join policies."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from .checks import called, check_flags, check_instance, shown_as
from .errors import fail, some
from .numerics.lookup import formats_by_name
from .table import Table
from .tensor.products import Products
from .tensor.spec import FLOAT, QSpec, as_spec, preset_instead

# Steps of a scan that the path of a rule selects: `layers[0]`, `layers[-2:]/attn/.*`.


_SELECTOR = re.compile(r"(?<!\\)\[(-?[0-9]+|(?:-?[0-9]+)?(?::(?:-?[0-9]+)?){1,2})\](?=/|\)|\||\Z)")
"""An integer or a slice in brackets at the end of a part of the path."""


class Selector(NamedTuple):
    """The steps that a path selects.

    Attributes:
      path: the path of the rule, for messages.
      base: the path without the steps, a regular expression for weights that a scan steps over.
      texts: the text in each pair of brackets.
    """

    path: str
    base: str
    texts: tuple[str, ...]

    @classmethod
    def of(cls, path: str) -> "Selector | None":
        """Parses a path; `None` if it selects no steps."""
        return _selector_of(path)

    def matches(self, path: str) -> bool:
        """Whether the path of a weight is one from which the steps are selected."""
        return re.fullmatch(self.base, path) is not None

    def resolve(self, function: str, path: str, length: int) -> tuple[int, int]:
        """Returns the first selected step of a scan and the end of the selection.

        Raises:
          ValueError: if the scan does not have these steps, or they are not consecutive.
        """
        text, *others = self.texts
        parts = [int(part) if part else None for part in text.split(":")]
        if len(parts) == 1:
            start, stop = parts[0], None if parts[0] == -1 else (parts[0] or 0) + 1
        else:
            start, stop = parts[:2]
        start = 0 if start is None else start + length * (start < 0)
        stop = length if stop is None else stop + length * (stop < 0)
        problem = ""
        if others:
            problem = "selects steps twice."
        elif parts[2:] not in ([], [None], [1]):
            problem = "selects every other step."
        elif not 0 <= start < stop <= length:
            problem = "selects steps that the scan does not have."
        if problem:
            details = f"path {self.path!r}, of {length} steps over {path!r}"
            fix = f"select consecutive steps within [0:{length}], or write several rules, such as "
            fix += "layers[0] and layers[-2:]; a rule with optional=True may match no steps."
            raise fail(function, f"the path of a rule {problem}", given=details, fix=fix)
        return start, stop


@functools.lru_cache(256)
def _selector_of(path: str) -> Selector | None:
    texts = tuple(match[1] for match in _SELECTOR.finditer(path))
    if not texts:
        return None
    pieces, end = [], 0
    for match in _SELECTOR.finditer(path):
        pieces.append(path[end : match.start()])
        under = path[match.end() : match.end() + 1] == "/"
        pieces.append("" if under else "(?:/.*)?")
        end = match.end()
    base = "".join([*pieces, path[end:]])
    try:
        re.compile(base)
    except re.error:  # the brackets are part of something else
        return None
    return Selector(path, base, texts)


# Rule: which contractions are quantized, and how.


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
      products: for `jqx.train`, how the three products of a layer are rounded; a
        `jqx.recipes.Products`. It determines `weight` and `activation`, and leaves lookups in
        float.

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
    products: Products | None

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
        products: Products | None = None,
    ) -> None:
        _check_regex("path", path)
        if op is not None:
            _check_regex("op", op)
            _check_op(path, op)
        check_flags("Rule", optional=optional)
        as_is = isinstance(tables, str) and tables == "weight"
        if as_is and products is not None:  # a lookup is no product
            tables, as_is = None, False
        fields = {
            "path": path,
            "op": op,
            "weight": as_spec("Rule", "weight", weight),
            "activation": as_spec("Rule", "activation", activation, "activation"),
            "output": as_spec("Rule", "output", output, "activation"),
            "tables": tables if as_is else as_spec("Rule", "tables", tables),
            "optional": optional,
            "products": products,
        }
        if products is not None:
            fields |= _specs_of(products, fields)
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    def matches(self, path: str, op: str, *, has_weight: bool) -> bool:
        """Whether the rule applies to a contraction."""
        if self.weight is not None and not has_weight:
            return False
        return self._is_for(op) and re.fullmatch(self.path, path) is not None

    @property
    def selector(self) -> Selector | None:
        """The steps of a scan that its path would select. `selecting` in `transforms/find.py`
        leaves out rules whose path matches an existing path as a regular expression.
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
        if self.products is not None:
            parts += [f"{field}={getattr(self.products, field)}" for field in ("dgrad", "wgrad")]
        return f"Rule({', '.join(parts)})"


def _specs_of(products: Any, fields: Mapping[str, Any]) -> dict[str, QSpec]:
    """Returns the specs of a rule with products, which may be given if they are the same."""
    fix = "pass a value of jqx.recipes.Products."
    check_instance("Rule", "products", products, Products, fix=fix)
    activation, weight = products.planned
    specs = {"activation": activation, "weight": weight}
    for name, spec in specs.items():
        if fields[name] not in (None, spec):
            problem = f"`{name}` is not that of `products`."
            facts = f"{fields[name]}; {spec} in the forward product"
            fix = "leave it out: products= has all specs."
            raise fail("Rule", problem, given=facts, fix=fix)
    return specs


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
        problem = f"`{field}`, {pattern!r}, is not a valid regular expression: {error}."
        fix = _glob(str(pattern)) or "escape special characters with a backslash."
        raise fail("Rule", problem, fix=fix) from None


def _glob(pattern: str) -> str | None:
    """Returns what to write for a pattern of a shell; `None` if it does not look like one."""
    regex = re.sub(r"(?<![.\\\])])\*+", ".*", pattern)
    try:
        re.compile(regex)
    except (re.error, OverflowError):
        return None
    if regex == pattern:
        return None
    return f"it is a regular expression, in which any text is '.*': write {regex!r}."


def _check_op(path: str, op: str) -> None:
    """Checks that an operation is not a scheme or a preset, which has a name of its own."""
    is_preset = preset_instead(op) is not None
    if is_preset or op.partition(":")[0] in (FLOAT, *formats_by_name()):
        fix = f"write jqx.Rule({path!r}, weight={op!r}): the second argument is the operation."
        if is_preset:
            fix = f"a preset is a policy: jqx.Policy({{{path!r}: jqx.presets.w8a8()}})."
        raise fail("Rule", f"`op` ({op!r}) says how to quantize, not which operation.", fix=fix)


@called("Policy", "pass one list, jqx.Policy([rule, ...]), or one dict.")
@dataclasses.dataclass(frozen=True)
class Policy:
    """Rules in order of precedence: the first rule that matches a contraction applies.

    `a + b` is the policy with the rules of `a` followed by those of `b`. A policy prints one line
    for each rule.

    Attributes:
      rules: any iterable of `Rule`, or a dict. The keys of the dict are regular expressions of
        paths. A value says how the weights there are quantized: `"float"` (or `None`), a scheme
        such as `"int4:group=32"`, a `QSpec`, a `Rule`, or a policy, such as a preset. A scheme or a
        spec applies to the weights only. The key replaces the path of a rule, or of a policy whose
        rules all have one path. What a policy leaves in float (`exclude=` of a preset) also stays
        in float where the key matches. For layers that a scan steps over, a key may select some of
        them: `"layers[0]"`, `"layers[-2:]/.*"`; see `Rule`.

    Raises:
      TypeError: if an element of `rules` is not a `Rule`, or a value of the dict is none of the
        above.
      ValueError: if a key is not a regular expression, a scheme is invalid, or a policy under a key
        has several paths.

    Example:
      >>> import jqx
      >>> policy = jqx.Policy(
      ...     {"head/.*": "float", ".*attn.*": jqx.presets.w8a8_dynamic(), ".*": "int4:group=32"}
      ... )
      >>> print(policy)
      0  'head/.*'   float
      1  '.*attn.*'  int8 per_channel, activation int8 per_token dynamic, tables float
      2  '.*'        int4 per_group(32, tail=True)
      >>> policy.first("head/w", "dot_general", has_weight=True)[0]
      0
      >>> jqx.presets.w8a8("attn/.*") + jqx.presets.w4a16() == jqx.Policy(
      ...     {"attn/.*": jqx.presets.w8a8(), ".*": jqx.presets.w4a16()}
      ... )
      True
    """

    rules: tuple[Rule, ...]

    def __init__(self, rules: Iterable[Rule] | Mapping[str, Any]) -> None:
        if isinstance(rules, Mapping):
            rules = [rule for path, value in rules.items() for rule in _under(path, value)]
        if isinstance(rules, str) or not isinstance(rules, Iterable):
            details = shown_as("rules", rules)
            problem = "`rules` is not a list of rules, or a dict."
            raise fail("Policy", problem, given=details, fix=_fix(rules), error=TypeError)
        rules = tuple(rules)
        for rule in rules:
            fix = "pass jqx.Rule(...) values; take those of a preset from its .rules, or join "
            fix += "policies: jqx.Policy([rule]) + jqx.presets.w8a8()."
            check_instance("Policy", "an element of rules", rule, Rule, fix=fix)
        object.__setattr__(self, "rules", rules)

    def first(self, path: str, op: str, *, has_weight: bool) -> tuple[int, Rule] | None:
        """Returns the first rule that matches and its index; `None` if none matches."""
        for index, rule in enumerate(self.rules):
            if rule.matches(path, op, has_weight=has_weight):
                return index, rule
        return None

    def __add__(self, other: "Policy") -> "Policy":
        check_policy("Policy", other, "what is added")
        return Policy((*self.rules, *other.rules))

    def __radd__(self, other: Any) -> "Policy":
        check_policy("Policy", other, "what is added")
        return NotImplemented

    def __str__(self) -> str:
        paths = [repr(rule.path) for rule in self.rules]
        width = max(map(len, paths), default=0)
        count = len(str(len(paths) - 1))
        return "\n".join(
            f"{index:{count}}  {path:{width}}  {rule.described()}"
            for index, (path, rule) in enumerate(zip(paths, self.rules, strict=True))
        )

    def _repr_html_(self) -> str:
        rows = [(str(i), rule.path, rule.described()) for i, rule in enumerate(self.rules)]
        footer = "The first rule that matches a contraction decides; what none matches is float."
        head = "rule", "path", "quantization"
        return Table(head, tuple(rows), footer, texts=3).to_html("Policy")


def check_policy(function: str, policy: Any, argument: str = "policy") -> None:
    """Checks that `policy` is a `Policy`; the error shows how to make one from similar values."""
    if not isinstance(policy, Policy):
        check_instance(function, argument, policy, Policy, fix=_fix(policy))


def preset_of(value: Any) -> str | None:
    """Returns the name of a preset if the function itself was passed instead of its result."""
    is_preset = callable(value) and getattr(value, "__module__", "") == "jqx._src.presets"
    return value.__name__ if is_preset else None


def _fix(value: Any) -> str:
    """Returns how to make a policy of the value that was passed in place of one."""
    name = preset_of(value)
    if name is not None:
        return f"call the preset: jqx.presets.{name}()."
    if isinstance(value, str) and preset_instead(value) is not None:
        return str(preset_instead(value))
    if isinstance(value, str) and value.partition(":")[0] not in (FLOAT, *formats_by_name()):
        return "call a preset, such as jqx.presets.w8a8(), or write jqx.Policy([rule, ...])."
    if isinstance(value, Rule):
        return "pass jqx.Policy([rule])."
    if isinstance(value, Policy):
        return "it is a policy already; join policies with +: jqx.Policy([rule]) + policy."
    if isinstance(value, int) and value == 0:  # `sum` adds to it
        return "sum policies from jqx.Policy([])."
    if isinstance(value, (list, tuple)):
        return "pass jqx.Policy([rule, ...]), or join policies with +."
    if isinstance(value, Mapping):
        return "pass jqx.Policy({regex: scheme, ...})."
    if isinstance(value, (QSpec, str)):
        return "say which paths it is for: jqx.Policy({'.*': ...}), or jqx.Policy([rule])."
    return "pass jqx.presets.w8a8(), or jqx.Policy([rule, ...])."


def _under(path: Any, value: Any) -> tuple[Rule, ...]:
    """Returns the rules of one entry of a dict."""
    if isinstance(value, Policy):
        return _replaced(path, value)
    if isinstance(value, Rule):
        return (dataclasses.replace(value, path=path),)
    if value is None or (isinstance(value, str) and value == FLOAT):
        return (Rule(path),)
    name = preset_of(value)
    if name is not None or isinstance(value, (Mapping, tuple, list)):
        names = value if isinstance(value, Mapping) else ("weight", "activation")
        fix = f"write {{{path!r}: jqx.Rule({', '.join(f'{field}=...' for field in names)})}}."
        fix = fix if name is None else f"call it: {{{path!r}: jqx.presets.{name}()}}."
        problem = f"the value at {path!r} is a {type(value).__name__}."
        raise fail("Policy", problem, fix=fix, error=TypeError)
    return (Rule(path, weight=as_spec("Policy", f"rules[{path!r}]", value)),)


def _replaced(path: Any, policy: Policy) -> tuple[Rule, ...]:
    """Returns the rules of a policy with another path. What was left in float stays in float."""
    paths = list(dict.fromkeys(rule.path for rule in policy.rules if not rule.is_float))
    if len(paths) > 1:
        problem = f"the policy at {path!r} has rules of several paths, which a key cannot replace."
        details = f"rules of {some(map(repr, paths))}"
        raise fail("Policy", problem, given=details, fix="join them: jqx.Policy({...}) + policy.")
    pattern = Rule(path).path  # a regular expression, or an error
    rules = []
    for rule in policy.rules:
        new = pattern
        if rule.is_float and paths:
            new = rule.path if pattern == ".*" else f"(?=(?:{pattern})\\Z)(?:{rule.path})"
        rules.append(dataclasses.replace(rule, path=new))
    return tuple(rules)
