"""Type variables of what takes a function and returns one of the same parameters.

A checker sees a quantized tree as the tree of arrays that it stands for: `quantize_params` returns
the type that it is given, so its result fits the parameters of the function.

Checkers read `_signatures.pyi`, where these have defaults, as Python has them from 3.13: a bare
`jqx.Quantized` is one of any function.
"""

from typing import ParamSpec, TypeVar

P = ParamSpec("P")
"""The parameters of a function."""

R = TypeVar("R")
"""Its result."""

T = TypeVar("T")
"""A pytree, of which leaves may be QTensors in the place of arrays."""
