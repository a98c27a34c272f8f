"""How much the rows of a batch count, by the weight of an observer: for the arguments of a function
and for the operands of its sites.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._errors import fail
from ._counted import Counted, counts_of, is_counted, value_of
from ._interpret import Rules, evaluate_counted, interpret
from ._paths import Params
from ._plan import Plan
from ._site import Site
from ._tainted import tainted
from ._trace import Call, trace_call
from ._weight import is_coded

Weight = Callable[..., Any]

_NO_SITE = (-1,)
"""An address at which no contraction is a site."""


@dataclasses.dataclass(frozen=True)
class _Following(Rules):
    """Evaluates in float, and tracks how much rows count."""

    without_nonfinite: bool = False

    @property
    def is_counting(self) -> bool:
        return True

    @property
    def leaves_out(self) -> bool:
        return self.without_nonfinite

    @property
    def cleans(self) -> bool:
        return self.without_nonfinite

    def at_site(self, site: Site, eqn: Any, operands: Sequence[Any]) -> Any:
        """Not called: the evaluated equations are not sites of the plan."""
        raise NotImplementedError


def followed(plan: Plan, eqn: Any, operands: list[Any], leaves_out: bool = False) -> list[Any]:
    """Evaluates an equation in float and returns results with counts, if those of operands are
    known. With `leaves_out` elements that are not finite do not count.
    """
    return evaluate_counted(eqn, operands, _Following(plan, without_nonfinite=leaves_out))[0]


def every_row(*args: Any, **kwargs: Any) -> jax.Array:
    """A weight by which all rows count the same."""
    return jnp.ones((), jnp.float32)


def weights_of(
    function: str, weight: Weight, params: Params, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> jax.Array:
    """Returns how much rows count, float32: the result of `weight` for the arguments of a call
    without the parameters.
    """
    positions = (params,) if isinstance(params, int) else params
    others = [x for place, x in enumerate(args) if place not in positions]
    try:
        found = weight(*others, **kwargs)
    except Exception as error:
        error.add_note(
            f"  at:       weight= of an observer, called with {len(others)} arguments: those "
            "of the function without its parameters"
        )
        raise
    fix = "let it return booleans, such as tokens != 0, or non-negative numbers."
    if not (hasattr(found, "shape") and hasattr(found, "dtype")):
        raise fail(
            function,
            "the `weight` of an observer does not return an array.",
            given=f"an object of type {type(found).__name__}",
            expected="an array with the leading axes of an argument",
            fix=fix,
            error=TypeError,
        )
    dtype = jnp.dtype(found.dtype)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
    positive = not _compat.is_concrete(found) or bool(np.all(np.asarray(found) >= 0))
    if not (is_real and positive):
        raise fail(
            function,
            "the `weight` of an observer does not return weights.",
            given=f"an array of {dtype.name}"
            + ("" if positive else " with entries below 0, or NaN"),
            expected="booleans, or non-negative numbers",
            fix=fix,
        )
    return jnp.asarray(found).astype(jnp.float32)


def count_arguments(
    function: str, weights: jax.Array, params: Params, call: Call, leaves: Sequence[Any]
) -> list[Any]:
    """Returns the leaves of a call. Those that are not parameters have counts, or the reason why
    these are unknown.
    """
    positions = (params,) if isinstance(params, int) else params
    shape, found = weights.shape, []
    for leaf, keys in zip(leaves, call.keys, strict=True):
        is_parameter = keys[0].idx == 0 and keys[1].idx in positions
        if is_parameter or is_coded(leaf):
            found.append(leaf)
        elif len(leaf.shape) >= len(shape) and all(
            n in (1, own) for n, own in zip(shape, leaf.shape, strict=False)
        ):
            ones = (1,) * (len(leaf.shape) - len(shape))
            found.append(Counted(leaf, weights.reshape(*shape, *ones)))
        else:
            name = jax.tree_util.keystr(keys[1:], simple=True, separator="/")
            why = (
                f"the argument {name!r} of shape {leaf.shape} does not begin with the axes {shape}"
                " of the weight"
            )
            found.append(Counted(leaf, None, why))
    if shape != () and not any(is_counted(x) and x.is_known for x in found):
        raise fail(
            function,
            "no argument has the rows that the `weight` of an observer counts.",
            given=f"a weight of shape {shape}, arguments of shapes "
            f"{', '.join(str(x.value.shape) for x in found if is_counted(x)) or 'none'}",
            expected="the leading axes of an argument, such as [batch, tokens]",
            fix="let it return an array with these axes.",
        )
    return found


def count_operand(
    function: str, site: str, x: Any, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Returns how much the elements of an operand of a site count, as observers receive it.

    Args:
      function: name of the calling function, for messages.
      site: the name of the site.
      x: the operand.
      shape: the shape of the weight, for messages; all rows count the same if it is `()`.
    """
    if is_counted(x) and x.is_known:
        return jnp.where(jnp.isinf(x.counts), 1, x.counts)
    if shape == () or (not is_counted(x) and not is_coded(x)):  # the same for all rows
        return jnp.ones((1,) * jnp.ndim(value_of(x)), jnp.float32)
    operand = jax.typeof(x.value).str_short() if is_counted(x) else repr(x)
    raise fail(
        function,
        f"it is not known how much the rows of {site!r} count.",
        given=("" if shape is None else f"a weight of shape {shape}, and ")
        + f"an operand {operand}: {x.lost if is_counted(x) else 'it is quantized'}",
        expected="an operand that is computed from arguments with these leading axes, by "
        "operations through which rows can be followed",
        fix="name other sites in observers=, or let `weight` return the leading axes of the "
        "argument that this site reads.",
    )


def finite_rows(f: Callable[..., Any], plan: Plan, *args: Any) -> tuple[Any, Any]:
    """Returns the results of a function with zeros where they come from rows that are not finite,
    and which elements do not; traceable.
    """
    call = trace_call("ptq", f, plan.parameters, args, {})
    leaves = count_arguments("ptq", every_row(), plan.params, call, call.leaves)
    rules = _Following(plan, without_nonfinite=True)
    out, _ = interpret(call.jaxpr, call.consts, list(map(tainted, leaves)), rules, _NO_SITE)
    kept = [counts_of(x) > 0 for x in out]
    values = [jnp.where(own, value_of(x), 0) for x, own in zip(out, kept, strict=True)]
    both = (jax.tree.unflatten(call.out_tree, x) for x in (values, kept))
    return next(both), next(both)
