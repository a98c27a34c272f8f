"""`quantize_state`: arrays that a function reads and writes, such as caches, become QTensors."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._calls import called
from .._checks import check_instance, check_pattern, shown
from .._errors import fail
from .._signatures import T
from ..calibrators import Affine
from ..tensor import QSpec, QTensor
from ..tensor._shared import cache_for, needed_spec
from ._paths import flatten, is_whole, path_of
from ._quantize_weight import quantize_weight
from ._trace import is_array, is_quantized


@called("quantize_state", 'pass for example jqx.quantize_state(cache, {".*key": "int8:token"}).')
def quantize_state(
    tree: T,
    specs: Mapping[str, QSpec | str | tuple[QSpec | str, Affine]],
    *,
    target: str | None = None,
) -> T:
    """Returns a pytree with some of its float arrays as QTensors, such as the caches of a decoder.

    Every transform takes such a tree in place of the float one. The function still sees arrays of
    the same shape and dtype, contractions read the codes, and values are quantized when written.

    Args:
      tree: caches of plain JAX, a collection of linen variables, an `nnx.State`; any pytree of
        arrays, or of `jax.ShapeDtypeStruct`, which gives abstract QTensors.
      specs: how to quantize leaves, by regular expressions that must match the path of a leaf in
        full. Paths are named as for weights in a plan, and the first match applies. A value is a
        `QSpec`, a scheme such as `"int8"` (one scale for each token), or a pair of either and an
        `Affine` if many writes share a scale. The relative granularities `per_token()` and
        `per_channel()` give each vector along the last axis its own scale, and `per_group(size)`
        each of its blocks.
      target: the platform whose kernel reads the caches in `jqx.decode_attention`, as for
        `jqx.pack_for`; `None` uses no kernel.

    Returns:
      The same tree; leaves that nothing matches are the very same objects. For type checkers it has
      the type of `tree`, as in `jqx.quantize_params`.

    Raises:
      TypeError: if `specs` is not a dict of specs, or a matched leaf has no float dtype.
      ValueError: if a regular expression is invalid or matches no remaining leaf; if a leaf is
        already quantized; if a spec does not fit a leaf; if a scale that many writes share would
        come from an array of zeros; or if the target is unknown, or its kernel cannot read such
        codes.

    Gradient: from JAX, for scales; none for codes.
    NaN and infinities: as in `QTensor.quantize`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> cache = {"keys": jnp.zeros((2, 128, 4, 64)), "length": jnp.int32(0)}
      >>> jqx.quantize_state(cache, {"keys": jqx.QSpec(jnp.int8, jqx.per_token())})["keys"]
      QTensor(int8[2, 128, 4, 64] per_axis(0, 1, 2), scale float32[2, 128, 4, 1], dtype=float32, \
69,632 bytes)
    """
    rules = _rules(specs)
    named = [(path_of(keys), leaf) for keys, leaf in flatten(tree)]
    used: set[str] = set()
    leaves = []
    for name, leaf in named:
        found = next((text for text, (regex, _) in rules.items() if regex.fullmatch(name)), None)
        if found is None:
            leaves.append(leaf)
            continue
        used.add(found)
        q = _quantized(name, leaf, *rules[found][1])
        leaves.append(q if target is None else cache_for("quantize_state", q, target))
    unused = [text for text in rules if text not in used]
    if unused:
        names = [repr(name) for name, _ in named[:8]]
        raise fail(
            "quantize_state",
            f"{unused[0]!r} matches no leaf that is left by earlier entries.",
            given=f"{len(rules)} regular expressions",
            expected=f"a match in full; paths are: {', '.join(names) or '(none)'}",
            fix="correct it, move it up, or drop it.",
        )
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_whole), leaves)


Rules = dict[str, tuple[re.Pattern[str], tuple[QSpec, Affine | None]]]


def _rules(specs: Any) -> Rules:
    """Returns the entries, compiled, after checking their types."""
    check_instance(
        "quantize_state",
        "specs",
        specs,
        Mapping,
        fix='pass for example {".*/cached_(key|value)": jqx.QSpec("int8", jqx.per_token())}.',
    )
    rules: Rules = {}
    for text, given in specs.items():
        pair: Any = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        spec, affine = pair
        if not (isinstance(text, str) and isinstance(spec, (QSpec, str))):
            raise fail(
                "quantize_state",
                "`specs` has an entry that is not a spec.",
                given=f"{text!r}: {shown(given)}",
                expected="a regular expression: a QSpec or a scheme, or a pair of it and an Affine",
                fix="pass for example {'.*key': jqx.QSpec(jnp.int8, jqx.per_token())}.",
                error=TypeError,
            )
        spec = needed_spec("quantize_state", f"specs[{text!r}]", spec, "state")
        pattern = check_pattern("quantize_state", f"specs[{text!r}]", text)
        rules[text] = pattern, (spec, affine and Affine(*affine))
    return rules


def _quantized(name: str, leaf: Any, spec: QSpec, affine: Affine | None) -> QTensor:
    if is_quantized(leaf):
        raise fail(
            "quantize_state",
            f"the leaf {name!r} is quantized already.",
            given=repr(leaf),
            expected="a float array",
            fix="quantize the float state, or leave this leaf out.",
        )
    if not (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)):
        raise fail(
            "quantize_state",
            f"the leaf {name!r} is not an array of floats.",
            given=f"dtype {leaf.dtype}" if is_array(leaf) else f"an object {type(leaf).__name__}",
            expected="float16, bfloat16, float32 or float64",
            fix="write a regular expression that does not match it, such as '.*(key|value)'.",
            error=TypeError,
        )
    resolved = spec.resolve(leaf.ndim, range(leaf.ndim - 1))
    try:
        q = quantize_weight(leaf, resolved, affine)
    except (TypeError, ValueError) as error:
        error.add_note(f"  at:       the leaf {name!r} of the state")
        raise
    if affine is None and _shares_a_scale(q) and _is_zero(leaf):
        raise fail(
            "quantize_state",
            f"the scale of {name!r} would come from zeros and be shared by later writes.",
            given=f"{spec.granularity} for an array of zeros of shape {leaf.shape}",
            expected="a scale for each part that is written at once, or a given scale",
            fix="pass granularity=jqx.per_token(), or (spec, jqx.calibrators.Affine(scale)).",
        )
    return q


def _shares_a_scale(q: QTensor) -> bool:
    """Whether elements share a scale along an axis before one with several scales, or all do."""
    own = [m > 1 for m, n in zip(q.scale.shape, q.shape, strict=True) if n > 1]
    return (bool(own) and own != sorted(own, reverse=True)) or (len(own) > 1 and not any(own))


def _is_zero(x: Any) -> bool:
    known = not isinstance(x, jax.ShapeDtypeStruct) and _compat.is_concrete(x)
    return known and not bool(jnp.any(x != 0))
