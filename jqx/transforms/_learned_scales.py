"""Scales of weights that were learned, and are not those that the weights are quantized with."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from .._errors import fail, some
from ..calibrators import Affine
from ..tensor import QTensor
from ._plan import Plan


def check_no_learned_scales(
    function: str, named: Sequence[tuple[str | None, Any]], plan: Plan, given: Collection[str] = ()
) -> None:
    """Raises if parameters hold learned scales of weights, as `jqx.linen.learn_scales` returns
    them, that are not among the `given` ones: the weights would get other scales.
    """
    names = {name.removesuffix("/scale") for name, _ in named if name is not None}
    learned = sorted((names & {weight.key for weight in plan.weights}).difference(given))
    if learned:
        raise fail(
            function,
            "the parameters hold learned scales, which the weights would not get.",
            given=some(learned),
            expected="parameters without them, or affines= with an entry for each",
            fix="convert the module that was trained: jqx.linen.convert(module, variables, "
            "x), with mode=jqx.linen.Mode.CONVERT.",
        )


def check_scales_of_weights(
    function: str,
    plan: Plan,
    named: Sequence[tuple[str | None, Any]],
    affines: Mapping[str, Affine],
) -> None:
    """Raises if a quantized weight has another scale than the one in `affines`."""
    keys = {weight.path: weight.key for weight in plan.weights}
    other = [
        path
        for path, q in named
        if path in keys
        and isinstance(q, QTensor)
        and keys[path] in affines
        and not _equal(q.scale, affines[keys[path]].scale)
    ]
    if other:
        raise fail(
            function,
            "weights have other scales than `affines` says.",
            given=some(other),
            expected="weights that are quantized with these scales",
            fix="pass the scales to both: jqx.quantize_params(params, plan, affines).",
        )


def _equal(scale: Any, learned: Any) -> bool:
    """Returns whether a scale is the learned one, in the shape and dtype that the weight has it."""
    if isinstance(scale, QTensor):
        return True
    own = np.asarray(scale)
    other = np.asarray(learned).astype(own.dtype).reshape(-1)
    flat = own.reshape(-1)
    return flat.size == other.size and bool(
        np.all((flat == other) | (np.isnan(flat) & np.isnan(other)))
    )
