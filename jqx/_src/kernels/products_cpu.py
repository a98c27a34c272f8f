"""Kernels of the package jqx-cpu, in C++, which XLA calls on CPU: see the folder `cpu`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from .. import package_cpu


def product_cpu(
    x: jax.Array,
    x_scale: jax.Array | None,
    x_zero: jax.Array | None,
    w: jax.Array,
    w_scale: jax.Array | None,
    w_zero: jax.Array | None,
    *,
    low: float = 0,
    high: float = 0,
    dtype: DTypeLike = jnp.int32,
    step: jax.Array | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """Returns sums of products of rows and weights as int32, or times both scales as float32.

    Args:
      x: int8 [B, M, K], or float32 that is rounded to codes in `[low, high]` by `x_scale`.
      x_scale: float32 [B, M or 1], or `None`.
      x_zero: int32 [B, M or 1], or `None`; it is subtracted from codes.
      w: int8 [B, N, K].
      w_scale: float32 [B, N or 1], or `None`.
      w_zero: int32 [B, N or 1], or `None`.
      low: the smallest code.
      high: the largest code.
      dtype: int32 or float32.
      step: int32, the index of the weight in a stack [L, N, K]; requires B == 1.
      sizes: int32 [G], the number of consecutive rows for each of the weights [G, N, K]; requires
        B == 1. The scales and zero points of the weights are [G, N or 1]; the results of rows
        beyond the groups are 0.
    """
    options = ("low", np.float32(low)), ("high", np.float32(high))
    args = x, w, _or_none(x_scale), _or_none(x_zero, jnp.int32)
    args = *args, _or_none(w_scale), _or_none(w_zero, jnp.int32), _step(step), _sizes(sizes, x)
    return _product_over_batches("product", (0, 2, 3), 6, options, jnp.dtype(dtype))(*args)


def float_product_cpu(
    x: jax.Array,
    w: jax.Array,
    x_scale: jax.Array | None,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    bits: int,
    is_signed: bool,
    digits: int = 3,
    step: jax.Array | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """Returns the product of rows and weights of few bits, float32 [B, M, N].

    Args:
      x: float32 [B, M, K], bfloat16, or int8. If the processor multiplies bfloat16 and there are
        more than a few rows, products of bfloat16 are exact, and sums of a group are float32;
        otherwise the rows are widened.
      w: uint8 [B, N, K * bits / 8], with the first code of a byte in its lowest bits; or int8.
      x_scale: float32 [B, M or 1] for codes, `None` for floats.
      scale: float32 [B, G, N], for groups of K / G codes.
      zero: int8 [B, G, N], or `None`. Unsigned codes and their zero points are shifted by minus the
        middle of their range.
      bits: the bits of a code: 8, 4 or 2.
      is_signed: whether codes are in two's complement.
      digits: the number of 8-bit digits of floats, relative to the largest magnitude of a row: 3
        or 2.
      step: as in `product_cpu`.
      sizes: as in `product_cpu`, with scales [G, groups, N].
    """
    options = ("bits", np.int32(bits)), ("is_signed", is_signed), ("digits", np.int32(digits))
    args = x, w, _or_none(x_scale), scale, _or_none(zero, jnp.int8), _step(step), _sizes(sizes, x)
    multiplies = "bf16" if x.dtype == jnp.bfloat16 else "s8"
    wide = jnp.dtype(jnp.float32)
    return _product_over_batches("float_product", (0, 2), 5, options, wide, multiplies)(*args)


def decoded_product_cpu(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    *,
    table: Sequence[float],
    step: jax.Array | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """Returns the product of floats and codes that represent floats, float32 [B, M, N].

    Args:
      x: float32 [B, M, K].
      w: uint8 [B, N, K], or 8-bit floats; or uint8 [B, N, K / 2], with the first of the two codes
        of a byte in its lowest bits.
      scale: float32 or E8M0 [B, G, N], for groups of K / G codes.
      table: the number that each of the 256 or 16 codes represents; that of code 0 is finite.
      step: as in `product_cpu`.
      sizes: as in `product_cpu`, with scales [G, groups, N].
    """
    args = x, w, scale, _step(step), _sizes(sizes, x)
    options, wide = (("table", tuple(table)),), jnp.dtype(jnp.float32)
    return _product_over_batches("decoded_product", (0,), 3, options, wide, "f32")(*args)


def _or_none(x: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array:
    return jnp.zeros((0,), dtype) if x is None else x


def _step(step: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.int32) if step is None else step.astype(jnp.int32).reshape(1)


def _sizes(sizes: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns sizes of groups of rows as int32, clamped to the number of all rows."""
    if sizes is None:
        return jnp.zeros((0,), jnp.int32)
    return jnp.clip(sizes, 0, x.shape[1]).astype(jnp.int32)


@functools.cache
def _product_over_batches(
    name: str,
    rows: tuple[int, ...],
    step: int,
    options: tuple[tuple[str, Any], ...],
    dtype: jnp.dtype,
    multiplies: str = "s8",
) -> Callable[..., jax.Array]:
    """Returns a kernel that `vmap` maps to one call: with more rows if only rows are mapped, else
    with a larger batch. For rows in groups, it is called for each one. `rows` are the indices of
    the operands of rows, `step` is that of the index in a stack; sizes of groups come after it.
    """

    @custom_vmap
    def call(*args: jax.Array) -> jax.Array:
        (batch, m, _), n = args[0].shape, args[1].shape[1]
        with jax.named_scope(f"multiplies_{multiplies}"):  # shown by jqx.lowering
            result = jax.ShapeDtypeStruct((batch, m, n), dtype)
            return package_cpu.call(name, result, *args, **dict(options))

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *args: jax.Array) -> tuple[jax.Array, bool]:
        mapped = list(batched)
        if any(x.size for x in args[step + 1 :]):
            return one_by_one(call, mapped, args), True
        if not any(mapped[i] for i in range(len(args)) if i not in rows):
            with_more, m = list(args), args[0].shape[-2]
            for i in rows:
                x = args[i]
                with_more[i] = _into_rows(size, m, x) if mapped[i] else _for_rows(size, x, i == 0)
            y = call(*with_more)
            y = y.reshape(y.shape[0], size, -1, y.shape[-1])
            return jnp.moveaxis(y, 1, 0), True
        larger = list(args)
        if args[step].size:  # a slice of a stack: a larger batch cannot have a stack
            index = jnp.broadcast_to(args[step], (size, 1))[:, 0]
            stack = args[1] if mapped[1] else jnp.broadcast_to(args[1], (size, *args[1].shape))
            larger[1] = jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 1))(stack, index)
            larger[step], mapped[1], mapped[step] = _step(None), True, False
        for i, x in enumerate(larger):
            if x.size:
                x = x if mapped[i] else jnp.broadcast_to(x, (size, *x.shape))
                larger[i] = x.reshape(-1, *x.shape[2:])
            else:
                larger[i] = x.reshape(0)
        y = call(*larger)
        return y.reshape(size, -1, *y.shape[1:]), True

    return call


def one_by_one(
    f: Callable[..., jax.Array], mapped: Sequence[bool], operands: Sequence[jax.Array]
) -> jax.Array:
    """Returns the results of a function for each of the mapped operands, and the others."""

    def call(some: tuple[jax.Array, ...]) -> jax.Array:
        items = iter(some)
        pairs = zip(operands, mapped, strict=True)
        return f(*(next(items) if is_mapped else x for x, is_mapped in pairs))

    pairs = zip(operands, mapped, strict=True)
    return lax.map(call, tuple(x for x, is_mapped in pairs if is_mapped))


def _into_rows(size: int, m: int, x: jax.Array) -> jax.Array:
    """Reshapes a mapped operand [size, B, M or 1, ...] to [B, size * M, ...]."""
    if x.size == 0:
        return x[0] if x.ndim == 2 else x
    x = jnp.moveaxis(x, 0, 1)
    x = jnp.broadcast_to(x, (*x.shape[:2], m, *x.shape[3:]))
    return x.reshape(x.shape[0], size * m, *x.shape[3:])


def _for_rows(size: int, x: jax.Array, is_rows: bool) -> jax.Array:
    """Repeats an operand that is not mapped for `size` times as many rows; a shared one stays."""
    if x.size == 0 or (not is_rows and x.shape[1] == 1):
        return x
    return jnp.tile(x, (1, size, *(1,) * (x.ndim - 2)))


# The convolution of the package jqx-cpu.


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
    parameters = [
        _or_none(parameter, kind).astype(kind)
        for parameter, kind in zip(
            (x_scale, x_zero, w_scale, w_zero), (jnp.float32, jnp.int8) * 2, strict=True
        )
    ]
    return _convolution_over_batches(*options, jnp.dtype(dtype))(x, w, *parameters)


@functools.cache
def _convolution_over_batches(
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
        output_sizes = [
            max(0, (n + sum(pair) - (taps - 1) * step - 1) // stride + 1)
            for n, taps, pair, step, stride in zip(
                x.shape[1:3], w.shape[:2], padding, dilation, strides, strict=True
            )
        ]
        with jax.named_scope("multiplies_s8"):  # shown by jqx.lowering
            result = jax.ShapeDtypeStruct((x.shape[0], *output_sizes, w.shape[3]), dtype)
            return package_cpu.call("convolution", result, x, w, *parameters, **options)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        if batched[1] or any(batched[4:]):
            return one_by_one(call, batched, operands), True
        x, w, scale, zero, *of_kernel = operands
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        batch = x.shape[1]
        scale, zero = (
            _of_more(size, batch, p, is_mapped)
            for p, is_mapped in zip((scale, zero), batched[2:4], strict=True)
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
