"""Type variables of functions that take a function and return one with the same parameters.

A type checker sees a quantized tree as the tree of arrays that it represents: `quantize_params`
returns the type that it takes, so its result fits the parameters of the function.

Type checkers read `signatures.pyi`, where the variables have defaults, which Python has since
3.13: a bare `jqx.Quantized` is one of any function.
"""

from typing import ParamSpec, TypeVar

P = ParamSpec("P")
"""The parameters of a function."""

R = TypeVar("R")
"""The result of a function."""

T = TypeVar("T")
"""A pytree, whose leaves may be QTensors in place of arrays."""
