"""Rules of users for primitives in files of ONNX."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..checks import check_instance, shown
from ..errors import fail
from .rules import CONTRACTION_RULES
from .walk import HOLDING

ADDED: contextvars.ContextVar[Mapping[str, Callable[..., Any]]]
ADDED = contextvars.ContextVar("rules for ONNX", default={})  # noqa: B039
"""The rules by the name of the primitive."""


@contextlib.contextmanager
def onnx_rules(rules: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Adds rules with which `jqx.interop.to_onnx` writes primitives, inside the context.

    They affect only this thread, and go before the rules of jqx for the same primitives.

    Args:
      rules: by the name of the primitive, a function `rule(graph, equation, *operands)`. The
        operands are constants, as NumPy arrays, or values of the graph. `graph.add(op, *operands,
        **attributes)` adds a node of ONNX (opset 21, or another `domain=`) and returns its result;
        `graph.add_many(op, count, ...)` adds one with several results, and `graph.cast(x, dtype)`
        one that converts. `equation.params` has the parameters, and `equation.invars[i].aval` shape
        and dtype of an operand. The rule returns the result of the primitive, or a list of them.

    Raises:
      TypeError: if `rules` is not a mapping, or a rule is not a function.
      ValueError: if a primitive is a product or a lookup, whose quantization jqx writes, or holds
        functions.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jqx.extend import onnx_rules
      >>> def atan2(graph, equation, y, x):  # of positive x
      ...     return graph.add("Atan", graph.add("Div", y, x))
      >>> f = lambda params, y: jnp.arctan2(y, params)
      >>> with onnx_rules({"atan2": atan2}):
      ...     model = jqx.interop.to_onnx(f, jnp.ones(4))(jnp.ones(4))
      >>> [node.op_type for node in model.graph.node]
      ['Div', 'Atan', 'Identity']
    """
    name = "extend.onnx_rules"
    fix = "pass for example {'my_primitive': lambda graph, equation, x: graph.add('Abs', x)}."
    check_instance(name, "rules", rules, Mapping, fix=fix)
    for primitive, rule in rules.items():
        if not callable(rule):
            problem = f"rules[{primitive!r}] is not a function, but {shown(rule)}."
            raise fail(name, problem, fix=fix, error=TypeError)
        if primitive in CONTRACTION_RULES or primitive in HOLDING:
            problem = f"the primitive {primitive!r} cannot have another rule."
            facts = "products and lookups are written as the plan quantizes them, and functions "
            fix = "leave it out."
            raise fail(name, problem, expected=facts + "as what they hold.", fix=fix)
    token = ADDED.set({**ADDED.get(), **rules})
    try:
        yield
    finally:
        ADDED.reset(token)
