"""The error of a rule of a policy that matches no contraction, the warning about alternatives that
match nothing, and the error of an input that is planned as a weight.
"""

import difflib
import fnmatch
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp

from ..errors import fail, message, warn
from ..policy import Policy, Rule
from .find import Found, find, selects
from .known_values import sources
from .paths import Weights
from .plan import Skipped
from .trace import Call
from .views import Origin

_MOST = 8
"""How many paths the error lists."""


def check_used(
    function: str,
    policy: Policy,
    used: set[int],
    items: Sequence[Found],
    skipped: Sequence[Skipped],
    call: Call,
) -> None:
    """Raises if a rule that is not optional was not used."""
    for index, rule in enumerate(policy.rules):
        if index not in used and not rule.optional:
            problem, facts, fix = _why_unused(rule, items, skipped, call)
            problem = f"rule {index} of the policy matches no contraction{problem}"
            paths = sorted({path for item in items for path in item.paths})
            expected = f"a match; paths are: {shown_paths(rule.path, paths)}"
            raise fail(function, problem, given=facts, expected=expected, fix=fix)


def _why_unused(
    rule: Rule, items: Sequence[Found], skipped: Sequence[Skipped], call: Call
) -> tuple[str, str, str]:
    """Returns the end of the problem, what is known about the rule, and what to do."""
    parts = call.parts

    def is_covered(path: str, item: Found) -> bool:
        stack = parts[path].whole if path in parts else path
        matches = rule.matches(stack, item.op, has_weight=any(item.origins))
        return matches or (path in parts and selects(rule, parts[path], item.op))

    is_shadowed = any(is_covered(path, item) for item in items for path in item.paths)
    facts = [str(rule)]
    if rule.selector is not None and not is_shadowed:
        facts.append(f"no scan steps over a weight at {rule.selector.base!r}")
    weights = {item.path for item in items if any(item.origins)}
    named = [path for path in call.paths if path is not None]
    if any(re.fullmatch(rule.path, path) for path in (*named, *(x.path for x in skipped))):
        others = [x for x in skipped if x.path not in weights]
        facts += [f"at {x.path!r} {x.reason}" for x in others][:2]
    fix = "pass the weights in an argument of f, and its position as params=."
    if weights:
        fix = _fix(rule, sorted({path for item in items for path in item.paths}), is_shadowed)
    elif any("jqx.hoist" in text for text in facts):
        fix = "compute them first: g, computed = jqx.hoist(f)(params, x), and plan g."
    problem = " that an earlier rule has not taken." if is_shadowed else "."
    return problem, "; ".join(dict.fromkeys(facts)), fix


def shown_paths(pattern: str, paths: Sequence[str]) -> str:
    """Returns paths as text: of many, those that are most similar to a pattern."""
    similar = paths
    if len(paths) > _MOST:
        similar = difflib.get_close_matches(pattern, paths, n=_MOST, cutoff=0)
    ending = f" and {len(paths) - len(similar)} more" if len(paths) > len(similar) else ""
    return (", ".join(map(repr, similar)) or "(none)") + ending


def _fix(rule: Rule, paths: Sequence[str], is_shadowed: bool) -> str:
    operation = _OPS.get((rule.op or "").lower())
    if operation is not None and any(re.fullmatch(rule.path, path) for path in paths):
        return f"the operation is called {operation!r}: write op={operation!r}, or leave it out."
    hint = None if is_shadowed else near_path(rule.path, paths)
    if hint is None:
        return "correct its path or op, move it up, or pass optional=True."
    return f"{hint} Or pass optional=True." if hint.endswith("?") else hint


_OPS = {
    **dict.fromkeys(("matmul", "dot", "linear", "dense", "einsum", "bmm", "mm"), "dot_general"),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d", "convolution"), "conv_general_dilated"),
    **dict.fromkeys(("embedding", "embed", "take", "lookup"), "gather"),
}
"""Operations by the names that others give them."""


_ALL = ("", "*", "all", "default", "any", "everything")


def near_path(pattern: str, paths: Sequence[str]) -> str | None:
    """Returns the path that a pattern without a match is likely to mean, as a hint; `None` if there
    is none.
    """
    for path in paths:
        for parent in accumulate(path.split("/")[:-1], "{}/{}".format):
            if re.fullmatch(pattern, parent):
                return f"a path must match in full, such as {path!r}: write '{parent}/.*'."
    if pattern.lower() in _ALL:
        return "write '.*', which matches every path."
    if pattern in paths:
        return f"it is a regular expression: write {re.escape(pattern)!r}."
    globbed = [path for path in paths if "*" in pattern and fnmatch.fnmatchcase(path, pattern)]
    if globbed:
        text = re.sub(r"(?<!\.)\*+", ".*", pattern)
        return f"it is a regular expression, in which any text is '.*': write {text!r}."
    plain = "/".join(re.findall(r"[^\[\]'\"./]+", pattern))  # PyTorch's dots, JAX's brackets
    for text in (plain, plain.partition("/")[2], plain.rpartition("/")[0]):
        if text and text in paths:
            return f"did you mean {text!r}?"
    close = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.75)
    return f"did you mean {close[0]!r}?" if close else None


_GROUP = re.compile(r"([^(|\\[]*)\((?:\?:)?([^()\\[?+{]+)\)(?![?*+{])([^(|\\[]*)|([^()\\[{]+)()()")
"""A path with one flat group of alternatives, or with alternatives and no group."""


def warn_of_unused_alternatives(
    function: str, policy: Policy, items: Sequence[Found], call: Call
) -> None:
    """Warns of an alternative in the path of a rule, such as `none` in `(embed|none)/kernel`, that
    matches no path of a parameter or contraction. Only paths that `_GROUP` describes are examined.
    """
    paths_of_sites = sorted({path for item in items for path in item.paths})
    paths = {
        *paths_of_sites,
        *(part.whole for part in call.parts.values()),
        *filter(None, call.paths),
    }
    for index, rule in enumerate(policy.rules):
        match = _GROUP.fullmatch(rule.path)
        if rule.optional or match is None or "|" not in rule.path:
            continue
        prefix, group, suffix, options = match.group(1, 2, 3, 4)
        texts = (group or options).split("|")
        patterns = {text: f"{prefix or ''}{text}{suffix or ''}" for text in texts}
        used = [t for t in texts if any(re.fullmatch(patterns[t], path) for path in paths)]
        if (unused := [t for t in texts if t not in used]) and all(texts):
            others = [path for path in paths_of_sites if not re.fullmatch(rule.path, path)]
            hint = near_path(patterns[unused[0]], others) or "correct the path."
            problem = f"rule {index} of the policy has alternatives without a match."
            details = f"{', '.join(map(repr, unused))} in {rule}"
            fix = f"{hint} Or drop them, or pass optional=True for a policy of several models."
            warn(message(function, problem, given=details, fix=fix))


def check_inputs(function: str, call: Call, planned: Sequence[Found], weights: Weights) -> None:
    """Raises if the only array of the weights' argument is an input in all its products:
    `f(x, params)` planned without `params=1`, or `f(x)` that closes over its weights. Without this
    error the plan would look complete, and `quantize_params` would quantize the batch.

    `planned` are the contractions with a quantized weight.
    """
    is_array = [path for path in call.paths if path is not None] == [""]
    keys = _keys_of_weights(call, planned) if is_array else None
    if not isinstance(weights.params, int) or keys is None:
        return
    aval = call.jaxpr.invars[call.paths.index("")].aval
    problem = f"argument {weights.params}, {aval.dtype}{list(aval.shape)}, is planned as the "
    fix = "pass the weights as an argument, f(params, x), or use jqx.nnx.quantize."
    if keys and keys[0].idx == 0:
        fix = f"pass params={keys[1].idx} to jqx.make_plan."
    elif keys:
        fix = f"pass {keys[1].key} by position, and that position as params=."
    fix += f" (If it is the weight: params=({weights.params},).)"
    problem += "weight, but looks like the input of `f`."
    raise fail(function, problem, fix=fix)


def _keys_of_weights(call: Call, planned: Sequence[Found]) -> tuple[Any, ...] | None:
    """Returns the keys of the argument that holds the weights which an array that is planned as a
    weight is multiplied by; `()` if `f` closes over them; `None` if the array may be a weight.

    The array is an input where it is on the left, or alone contracts its last axis, and meets a
    matrix of a tree in another argument or, if no other argument is in a product, one that `f`
    closes over.
    """
    sides = {item.address: item.origins.index(None) for item in planned if None in item.origins}
    leaves = call.jaxpr.invars
    origins = [Origin.of_leaf(str(i), len(leaf.aval.shape)) for i, leaf in enumerate(leaves)]
    items, _ = find(call.jaxpr, origins)
    sources_of = sources(call)
    partners: set[tuple[Any, ...]] = set()
    for item in items:
        if item.address not in sides:
            continue
        side, origin = sides[item.address], item.origins[sides[item.address]]
        parts = [int(part.path) for part in origin.parts] if origin else []
        is_closed_over = origin is None and sources_of[id(item.eqn)][side].is_closed_over
        avals = [leaves[i].aval for i in parts] or [item.eqn.invars[side].aval]
        is_partner = all(map(_is_matrix, avals)) and all(len(call.keys[i]) > 2 for i in parts)
        if not (_is_input(item, 1 - side) and is_partner and (parts or is_closed_over)):
            return None
        partners.update([call.keys[i][:2] for i in parts] or [()])
    multiplied = {int(part.path) for x in items for o in x.origins if o for part in o.parts}
    matrices = {i for i in multiplied if _is_matrix(leaves[i].aval) and call.paths[i] != ""}
    is_clear = len(partners) == 1 and not (partners == {()} and matrices)
    return partners.pop() if is_clear else None


def _is_matrix(aval: Any) -> bool:
    return len(aval.shape) > 1 and jnp.issubdtype(aval.dtype, jnp.floating)


def _is_input(item: Found, side: int) -> bool:
    """Whether an operand of a product stands where inputs do."""
    pairs = zip(item.family.kept(item.eqn), item.eqn.invars, strict=False)
    is_last = [len(operand.aval.shape) - 1 not in axes for axes, operand in pairs]
    return is_last[side] if item.op == "dot_general" and is_last[0] != is_last[1] else side == 0
