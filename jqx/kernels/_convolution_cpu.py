"""The convolution of the package jqx-cpu, in C++: see `_products_cpu.py`."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from .. import _package_cpu
from ._products_cpu import one_by_one

Pairs = Sequence[tuple[int, int]]


def convolution_cpu(
    x: jax.Array,
    x_scale: jax.Array | None,
    x_zero: jax.Array | None,
    w: jax.Array,
    w_scale: jax.Array | None,
    w_zero: jax.Array | None,
    *,
    strides: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    dtype: DTypeLike = jnp.int32,
) -> jax.Array:
    """Returns sums of products of images and a kernel as int32, or times both scales as float32.

    Args:
      x: int8 [B, H, W, C], padded with its zero point, or with 0.
      x_scale: float32 [1, B or 1], or `None`.
      x_zero: int8 [1, B or 1], or `None`; it is subtracted from codes.
      w: int8 [h, w, C / groups, N].
      w_scale: float32 [1, N or 1], or `None`.
      w_zero: int8 [1, N or 1], or `None`.
      strides: the two strides of the window.
      padding: (low, high) of both spatial axes; may be negative.
      dilation: the two distances between taps of the kernel.
      groups: the number of feature groups.
      dtype: int32 or float32.
    """
    options = tuple(strides), tuple(map(tuple, padding)), tuple(dilation), groups
    none = [jnp.zeros((0,), kind) for kind in (jnp.float32, jnp.int8)]
    parameters = [
        empty if p is None else p.astype(empty.dtype)
        for p, empty in zip((x_scale, x_zero, w_scale, w_zero), none * 2, strict=True)
    ]
    return _over_batches(*options, jnp.dtype(dtype))(x, w, *parameters)


@functools.cache
def _over_batches(
    strides: tuple[int, ...],
    padding: tuple[tuple[int, ...], ...],
    dilation: tuple[int, ...],
    groups: int,
    dtype: jnp.dtype,
) -> Callable[..., jax.Array]:
    """Returns a convolution that `vmap` maps to one call with more images, or to one call for each
    kernel.
    """
    options = {
        "strides": np.array(strides, np.int64),
        "dilation": np.array(dilation, np.int64),
        "padding": np.array(padding, np.int64).ravel(),
        "groups": np.int64(groups),
    }

    @custom_vmap
    def call(x: jax.Array, w: jax.Array, *parameters: jax.Array) -> jax.Array:
        places = [
            max(0, (n + sum(pair) - (taps - 1) * apart - 1) // stride + 1)
            for n, taps, pair, apart, stride in zip(
                x.shape[1:3], w.shape[:2], padding, dilation, strides, strict=True
            )
        ]
        with jax.named_scope("multiplies_s8"):  # shown by jqx.lowering
            result = jax.ShapeDtypeStruct((x.shape[0], *places, w.shape[3]), dtype)
            return _package_cpu.call("convolution", result, x, w, *parameters, **options)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *given: jax.Array) -> tuple[jax.Array, bool]:
        if batched[1] or any(batched[4:]):
            return one_by_one(call, batched, given), True
        x, w, scale, zero, *of_kernel = given
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        batch = x.shape[1]
        scale, zero = (
            _of_more(size, batch, p, own)
            for p, own in zip((scale, zero), batched[2:4], strict=True)
        )
        y = call(x.reshape(-1, *x.shape[2:]), w, scale, zero, *of_kernel)
        return y.reshape(size, batch, *y.shape[1:]), True

    return call


def _of_more(size: int, batch: int, parameter: jax.Array, is_mapped: bool) -> jax.Array:
    """Returns a parameter of images for `size` times as many images; a shared one stays shared."""
    if parameter.size == 0 or (not is_mapped and parameter.shape[1] == 1):
        return parameter if parameter.size else parameter.reshape(0)
    full = parameter if is_mapped else jnp.broadcast_to(parameter, (size, *parameter.shape))
    return jnp.broadcast_to(full, (size, 1, batch)).reshape(1, -1)
