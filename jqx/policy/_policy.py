"""Policy: an ordered list of rules, and ways to write and join policies."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .._calls import called
from .._checks import check_instance, shown
from .._errors import fail
from .._table import Table
from ..numerics._shared import formats_by_name
from ..tensor import QSpec
from ..tensor._shared import FLOAT, as_spec, preset_instead
from ._rule import Rule


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
        if isinstance(rules, str):
            raise fail(
                "Policy",
                "`rules` is a string.",
                given=f"rules == {shown(rules)}",
                expected="a list of rules, or a dict from paths to schemes or presets",
                fix=_fix(rules),
                error=TypeError,
            )
        check_instance(
            "Policy",
            "rules",
            rules,
            Iterable,
            fix=_fix(rules)
            if isinstance(rules, (Rule, QSpec)) or preset_of(rules)
            else "it is a policy already; join policies with +: jqx.Policy([rule]) + policy."
            if isinstance(rules, Policy)
            else "pass a list, jqx.Policy([rule]), or a dict; join policies with +.",
        )
        rules = tuple(rules)
        for rule in rules:
            check_instance(
                "Policy",
                "an element of rules",
                rule,
                Rule,
                fix="pass jqx.Rule(...) values; take those of a preset from its .rules, or join "
                "policies: jqx.Policy([rule]) + jqx.presets.w8a8().",
            )
        object.__setattr__(self, "rules", rules)

    def first(self, path: str, op: str, *, has_weight: bool) -> tuple[int, Rule] | None:
        """Returns the first rule that matches and its index; `None` if none matches."""
        for place, rule in enumerate(self.rules):
            if rule.matches(path, op, has_weight=has_weight):
                return place, rule
        return None

    def __add__(self, other: "Policy") -> "Policy":
        _check_summand(other)
        return Policy((*self.rules, *other.rules))

    def __radd__(self, other: Any) -> "Policy":
        _check_summand(other)
        raise AssertionError("a policy adds itself")

    def __str__(self) -> str:
        paths = [repr(rule.path) for rule in self.rules]
        width = max(map(len, paths), default=0)
        count = len(str(len(paths) - 1))
        return "\n".join(
            f"{place:{count}}  {path:{width}}  {rule.described()}"
            for place, (path, rule) in enumerate(zip(paths, self.rules, strict=True))
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
    module = getattr(value, "__module__", None) or ""
    is_preset = callable(value) and module.startswith("jqx.presets")
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
    if isinstance(value, (list, tuple)):
        return "pass jqx.Policy([rule, ...]), or join policies with +."
    if isinstance(value, Mapping):
        return "pass jqx.Policy({regex: scheme, ...})."
    if isinstance(value, (QSpec, str)):
        return "say which paths it is for: jqx.Policy({'.*': ...}), or jqx.Policy([rule])."
    return "pass jqx.presets.w8a8(), or jqx.Policy([rule, ...])."


def _check_summand(value: Any) -> None:
    if not isinstance(value, Policy):
        fix = "add jqx.Policy([rule, ...]); policies are summed from jqx.Policy([])."
        name = preset_of(value)
        fix = fix if name is None else f"call the preset: jqx.presets.{name}()."
        check_instance("Policy", "what is added", value, Policy, fix=fix)


def _under(path: Any, value: Any) -> tuple[Rule, ...]:
    """Returns the rules of one entry of a dict."""
    if isinstance(value, Policy):
        return _replaced(path, value)
    if isinstance(value, Rule):
        return (dataclasses.replace(value, path=path),)
    if value is None or (isinstance(value, str) and value == FLOAT):
        return (Rule(path),)
    name = preset_of(value)
    if name is not None:
        raise fail(
            "Policy",
            f"the preset at {path!r} was not called.",
            given=f"jqx.presets.{name}",
            expected="a policy, a rule, a scheme, a QSpec of weights, or 'float'",
            fix=f"call it: {{{path!r}: jqx.presets.{name}()}}.",
            error=TypeError,
        )
    if isinstance(value, (Mapping, tuple, list)):
        fields = ", ".join(f"{name}=..." for name in value) if isinstance(value, Mapping) else ""
        raise fail(
            "Policy",
            f"the value at {path!r} is a {type(value).__name__}.",
            given=f"{len(value)} entries",
            expected="a policy, a rule, a scheme, a QSpec of weights, or 'float'",
            fix=f"write {{{path!r}: jqx.Rule({fields or 'weight=..., activation=...'})}}.",
            error=TypeError,
        )
    return (Rule(path, weight=as_spec("Policy", f"rules[{path!r}]", value)),)


def _replaced(path: Any, policy: Policy) -> tuple[Rule, ...]:
    """Returns the rules of a policy with another path. What was left in float stays in float."""
    paths = list(dict.fromkeys(rule.path for rule in policy.rules if not rule.is_float))
    if len(paths) > 1:
        raise fail(
            "Policy",
            f"the policy at {path!r} has rules of several paths, which its key cannot replace.",
            given=f"rules of {', '.join(map(repr, paths[:4]))}",
            expected="a policy of one path, such as a preset",
            fix="join them instead: jqx.Policy({...}) + policy.",
        )
    own = Rule(path).path  # a regular expression, or an error
    rules = []
    for rule in policy.rules:
        new = own
        if rule.is_float and paths:
            new = rule.path if own == ".*" else f"(?=(?:{own})\\Z)(?:{rule.path})"
        rules.append(dataclasses.replace(rule, path=new))
    return tuple(rules)
