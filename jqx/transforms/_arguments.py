"""Checks of the arguments `f`, `plan`, `stats` and `batches`. Errors name the object if it is
another value of jqx, or was passed as the wrong argument.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_instance
from .._compat import is_concrete
from .._errors import fail
from ..calibrators import Affine
from ..policy import Policy
from ..policy._shared import preset_of
from ._plan import Plan

_NOT_BATCHES = (Mapping, str, bytes)

_MAKE = "plan = jqx.make_plan(f, policy)(params, x)"


def check_function(function: str, f: Any) -> None:
    """Checks that `f` can be traced."""
    fix = f"call it in two steps: jqx.{function}(f, ...)(params, x)."
    if callable(f) and not _is_unbound(f):
        return
    kind = "an array" if hasattr(f, "shape") else f"an object of type {type(f).__name__}"
    if isinstance(f, (Plan, Policy)):
        fix = f"pass the function first: jqx.{function}(f, ...)(params, x)."
    elif hasattr(f, "shape"):
        fix = f"pass the function itself, not its result: jqx.{function}(f, ...)(params, x)."
    elif callable(f):
        fix = "pass module.apply, whose parameters are the variables, or use jqx.linen."
    raise fail(
        function,
        "`f` is not a function.",
        given=f"{kind}, a linen module without variables" if callable(f) else kind,
        expected="a function of arrays and pytrees of arrays",
        fix=fix,
        error=TypeError,
    )


def check_plan(function: str, plan: Any, *others: Any, order: str, policies: bool = False) -> None:
    """Checks that `plan` is a `Plan`, or a `Policy` where policies are allowed.

    Args:
      function: name of the calling function, for messages.
      plan: what was passed as the plan.
      *others: the other arguments, one of which may be the plan.
      order: how the function is called: `quantize_params(params, plan)`.
      policies: whether a `Policy` is allowed.
    """
    kinds = (Plan, Policy) if policies else Plan
    if isinstance(plan, kinds):
        return
    name = preset_of(plan)
    if any(isinstance(other, Plan) for other in others):
        fix = f"the arguments are in another order: call jqx.{order}."
    elif isinstance(plan, Policy):
        fix = f"a policy is not a plan: make the plan first, {_MAKE}."
    elif name is not None:
        fix = f"call the preset, jqx.presets.{name}(), and plan with it: {_MAKE}."
    elif hasattr(plan, "shape") and hasattr(plan, "dtype"):
        fix = f"call it in two steps, jqx.{function}(f, plan)(params, x); for models of Flax use "
        fix += "jqx.linen or jqx.nnx."
    elif callable(plan):
        fix = f"call the function that jqx.make_plan returns: {_MAKE}."
    else:
        fix = "make one with jqx.make_plan(f, policy)(*args)."
    check_instance(function, "plan", plan, kinds, fix=fix)


def check_stats(function: str, argument: str, stats: Any) -> None:
    """Checks that statistics are a dict of statistics, not of scales."""
    is_dict = isinstance(stats, Mapping)
    first = next(iter(stats.values()), None) if is_dict else None
    if is_dict and not isinstance(first, Affine):
        return
    fix = "pass statistics from jqx.calibrate with the same plan."
    given = f"an object of type {type(stats).__name__}"
    if isinstance(first, Affine):
        given, fix = "a dict of scales, from jqx.affines", "pass what jqx.calibrate returned."
    elif isinstance(stats, tuple) and len(stats) == 2 and isinstance(stats[1], Mapping):
        given = "a pair whose second part is a dict, as a function from jqx.calibrate returns"
        fix = "take the second: out, stats = jqx.calibrate(f, plan)(params, x)."
    elif isinstance(stats, (list, tuple)):
        fix = "merge them first: jqx.merge_stats(plan, a, b), or jqx.calibrate_batches."
    elif isinstance(stats, Plan):
        fix = "pass the plan first."
    elif callable(stats):
        fix = "call it: out, stats = jqx.calibrate(f, plan)(params, x)."
    raise fail(
        function,
        f"`{argument}` is not a dict of statistics.",
        given=given,
        expected="a dict with the statistics of a calibration",
        fix=fix,
        error=TypeError,
    )


def check_batches(function: str, batches: Any) -> None:
    """Checks that batches are an iterable of batches."""
    fix = "pass a list, or a generator."
    shape = getattr(batches, "shape", None) if hasattr(batches, "dtype") else None
    is_named = isinstance(batches, tuple) and hasattr(batches, "_fields")
    is_one = isinstance(batches, _NOT_BATCHES) or is_named
    if isinstance(batches, Iterable) and shape is None and not is_one:
        return
    kind = type(batches).__name__
    given = f"a {kind}, which iterates over its keys" if isinstance(batches, Mapping) else None
    if shape is not None:
        given = f"an array of shape {list(shape)}, which iterates over its first axis"
        fix = "pass a list of batches: [x]."
    elif isinstance(batches, Mapping) or is_named:
        fix = "pass a list of batches: [batch]."
    elif isinstance(batches, (Plan, Policy)):
        fix = "call jqx.calibrate_batches(f, plan, params, batches)."
    raise fail(
        function,
        "`batches` is not a list of batches.",
        given=given or f"an object of type {kind}",
        expected="an iterable of batches, each a tuple of arguments, or a single argument",
        fix=fix,
        error=TypeError,
    )


def check_batch(function: str, batch: Any, place: int) -> None:
    """Checks that the leaves of a batch are arrays or numbers."""
    for leaf in jax.tree.leaves(batch):
        if not _is_value(leaf):
            raise fail(
                function,
                f"batch {place} holds objects that are not arrays.",
                given=f"an object of type {type(leaf).__name__}",
                expected="arrays and numbers, in a tuple of arguments or a single argument",
                fix="convert it with jnp.asarray; bind static arguments: "
                "functools.partial(f, train=False).",
                error=TypeError,
            )


def _is_value(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OUSM"
    known = (jax.Array, bool, int, float, complex)
    return isinstance(leaf, known) or hasattr(leaf, "__jax_array__")


def _is_unbound(f: Any) -> bool:
    """Whether `f` is a linen module without variables: calling it is an error in Flax."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(f, linen.Module) and f.scope is None


def check_concrete(function: str, *trees: Any) -> None:
    """Checks that arrays have values: the function runs on the host, outside of `jit`."""
    leaves = jax.tree.leaves(trees)
    if any(isinstance(x, jax.Array) and not is_concrete(x) for x in leaves):
        raise fail(
            function,
            "it runs on the host, and cannot be traced.",
            given="arrays without values, inside jax.jit, jax.vmap or jax.grad",
            expected="arrays with values",
            fix=f"call jqx.{function} outside, and jit what it returns, as in "
            "jax.jit(quantized.function)(quantized.params, x).",
            error=TypeError,
        )


def number_of(function: str, argument: str, f: Callable[..., Any], *values: Any) -> jax.Array:
    """Returns the result of a user's metric or loss, after checking that it is one real number."""
    fix = "return one number, such as jnp.mean(...) of the array."
    try:
        found = jnp.asarray(f(*values))
        given = f"{found.dtype.name}{list(found.shape)}"
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        found, given = None, f"a function that reads values: {type(error).__name__}"
        fix = "write it with jax.numpy: it is traced."
    except TypeError as error:
        found, given = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        fix = f"{fix} Its arguments are two results of f."
    if found is None or found.shape or jnp.issubdtype(found.dtype, jnp.complexfloating):
        raise fail(
            function,
            f"`{argument}` does not return one number.",
            given=given,
            expected="a real number, from a function of two results that jax can trace",
            fix=fix,
            error=TypeError,
        )
    return found
