"""Keys or values of attention as codes and factors that can be taken out of the products.

sum_w q[w] (c[l, w] - z[w]) s[w]  =  sum_w (q[w] s[w]) c[l, w]  -  sum_w (q[w] s[w]) z[w]
sum_w q[w] (c[l, w] - z[l]) s[l]  =  (sum_w q[w] c[l, w]  -  z[l] sum_w q[w]) s[l]
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checks import as_real
from .._errors import fail
from ..numerics import Block, Integer, format_of
from ..tensor import QTensor
from ..tensor._shared import check_dtypes, refine

BATCH, LENGTH, HEADS, WIDTH = 0, 1, 2, 3


class Cached(NamedTuple):
    """Numbers `(codes - zero) * scale` on the axes batch, length, heads, width.

    Attributes:
      codes: [B, L, H, W], of a dtype whose elements are the numbers themselves.
      of_token: scale of each token, [B, L, H, 1] or [B, L, 1, 1]; `None` is 1.
      of_channel: scale of each channel, [B, 1, H or 1, W or 1]; `None` is 1.
      zero: one for each token or each channel, like the scale, or a single one; `None` is 0.
    """

    codes: jax.Array
    of_token: jax.Array | None = None
    of_channel: jax.Array | None = None
    zero: jax.Array | None = None

    @property
    def zero_of_token(self) -> jax.Array | None:
        """Zero points that go with scales for each token, [B, L, H or 1, 1]."""
        return None if self.of_token is None else self.zero

    @property
    def zero_of_channel(self) -> jax.Array | None:
        """Zero points that go with scales for each channel, [B, 1, H or 1, W or 1]."""
        return self.zero if self.of_token is None else None


def cached(function: str, argument: str, x: Any, dtype: DTypeLike) -> Cached:
    """Returns keys or values, given as a float array or a QTensor, as codes and float factors.

    Dequantizes them if scales are neither for each token nor for each channel, or if codes are not
    numbers.
    """
    if not isinstance(x, QTensor):
        return Cached(as_real(function, argument, x))
    check_dtypes(function, x, f" of `{argument}`")
    if not (x.offset is None and x.order is None):
        raise fail(
            function,
            f"`{argument}` have a float offset or a permuted axis.",
            given=repr(x),
            expected="codes with a scale, and zero points",
            fix=f"pass {argument}.dequantize().",
        )
    form = format_of(x.qtype)
    is_number = isinstance(form, Integer) or jnp.issubdtype(x.values.dtype, jnp.floating)
    is_number = is_number and not isinstance(form, Block)
    if x.ndim != 4 or not is_number or 1 not in (x.scale.shape[LENGTH], x.scale.shape[WIDTH]):
        return Cached(x.dequantize())
    of_channel = x.scale.shape[LENGTH] == 1
    for axis in (BATCH, HEADS, WIDTH if of_channel else LENGTH):
        if x.scale.shape[axis] not in (1, x.shape[axis]):
            x = refine(x, axis)

    def each(parameter: jax.Array) -> jax.Array:
        shape = x.shape[0], *parameter.shape[1:]
        return jnp.broadcast_to(parameter.astype(dtype), shape)

    scale = each(x.real_scale())
    zero = None if x.zero_point is None else each(x.zero_point)
    if of_channel:
        return Cached(x.codes, None, scale, zero)
    if zero is not None and zero.shape[LENGTH] == 1:
        zero = jnp.broadcast_to(zero, (*zero.shape[:1], scale.shape[LENGTH], *zero.shape[2:]))
    return Cached(x.codes, scale, None, zero)
