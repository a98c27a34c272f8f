"""Type variables of what takes a function and returns one of the same parameters.

A checker sees a quantized tree as the tree of arrays that it stands for: `quantize_params` returns
the type that it is given, so its result fits the parameters of the function.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # with defaults, which Python has from 3.13
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any)
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

T = TypeVar("T")
"""A pytree, of which leaves may be QTensors in the place of arrays."""
