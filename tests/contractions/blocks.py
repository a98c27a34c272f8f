"""Operands of every number format, with every way to share a scale, and what they stand for."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jqx
from jqx import numerics
from jqx._src.numerics.lookup import E8M0
from jqx.extend import Groups
from jqx.numerics import Block, Codebook, Integer, format_of

from ..arrays import on_device
from ..oracles.contractions import Layout, exact_tensor, small_integers
from ..oracles.numerics import as_float64, as_int64
from ..tensor.tensors import random_codes, tensor

ASYMMETRIC = {"symmetric": False, "calibrator": jqx.calibrators.minmax}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"qtype": jnp.int8},
    "int8 asymmetric": {"qtype": jnp.int8, **ASYMMETRIC},
    "int4 packed": {"qtype": jnp.int4},
    "int3": {"qtype": numerics.int3},
    "e4m3": {"qtype": jnp.float8_e4m3fn},
    "nf4": {"qtype": numerics.nf4},
    "mxfp4": {"qtype": numerics.mxfp4},
    "nvfp4": {"qtype": numerics.nvfp4},
    "mxint8": {"qtype": numerics.mxint8},
}


def in_format(
    rng: np.random.Generator,
    name: str,
    shape: Sequence[int],
    granularity: Any,
    pack: int | None = None,
) -> jqx.QTensor:
    """Any codes of one of `FORMATS`, and any scales."""
    zero_point = not FORMATS[name].get("symmetric", True)
    q = random_tensor(rng, FORMATS[name]["qtype"], granularity.groups(shape), zero_point)
    return q if pack is None else q.pack(pack)


def weight(
    qtype: Any,
    layout: Layout,
    size: int | None = None,
    zero_point: bool = False,
    small: bool = False,
    pack: int | None = None,
    powers: bool = False,
    **fields: Any,
) -> jqx.QTensor:
    """The right operand of a layout: any codes, and a scale for each index of an axis that is kept,
    or for groups of `size` beside it; with `powers`, each scale is a power of two.

    A small one has integers from -4 to 4 (in a codebook, its numbers) and powers of two as scales:
    beside small integers, float32 holds its sums exactly in any order.
    """
    rng = np.random.default_rng([*layout.rhs, size or 0])
    form, shape = format_of(qtype), layout.rhs
    size = form.size if isinstance(form, Block) else size
    sharing = jqx.per_channel() if size is None else jqx.per_group(size, tail=True)
    groups = sharing.resolve(len(shape), layout.rhs_kept).groups(shape)
    q = random_tensor(rng, qtype, groups, zero_point, small, powers, **fields)
    return q if pack is None else q.pack(pack)


SIDES = {
    "integers": ("uint8", "int4"),
    "weight on the right": (None, "uint4"),
    "weight on the left": ("uint8", None),
}


def pair_of(
    layout: Layout, formats: Sequence[Any], zero_point: bool = True, scale_for_each: bool = True
) -> list[Any]:
    """Operands of a layout; a format of `None` stands for a float array."""
    rng = np.random.default_rng(len(layout.lhs) + 7 * len(layout.rhs))
    pair = []
    for shape, qtype, contracted in zip(layout[:2], formats, layout.numbers[0], strict=True):
        if qtype is None:
            pair.append(on_device(small_integers(rng, shape)))
        else:
            summed = {axis % len(shape) for axis in contracted}
            axes = [i for i in range(len(shape)) if i not in summed] if scale_for_each else ()
            pair.append(exact_tensor(rng, qtype, shape, axes, zero_point))
    return pair


def integers_in_blocks(
    rng: np.random.Generator,
    qtype: Any,
    shape: Sequence[int],
    sizes: Sequence[int],
    zero_point: bool = True,
) -> jqx.QTensor:
    """Random codes and zero points, with 1 or 2 as the scale of each block."""
    entries = [-(-n // size) for n, size in zip(shape, sizes, strict=True)]
    scale = np.ldexp(1.0, rng.integers(0, 2, entries))
    zero = random_codes(rng, qtype, entries) if zero_point else None
    blocks = [
        (n, m, size) for n, m, size in zip(shape, entries, sizes, strict=True) if n % size and m > 1
    ]
    return tensor(random_codes(rng, qtype, shape), qtype, scale, zero, blocks=tuple(blocks))


def random_tensor(
    rng: np.random.Generator,
    qtype: Any,
    groups: Groups,
    zero_point: bool = False,
    small: bool = False,
    powers: bool = False,
    **fields: Any,
) -> jqx.QTensor:
    """Any codes, and any scales of the size of 1 (`small` and `powers`: as for `weight`)."""
    form, entries = format_of(qtype), groups.scale_shape
    return jqx.QTensor(
        _random_codes(rng, form, groups.shape, small),
        _random_scale(rng, form, entries, powers=small or powers),
        _random_codes(rng, form, entries, small) if zero_point else None,
        qtype=qtype,
        blocks=groups.blocks,
        **fields,
    )


def in_pairs(q: jqx.QTensor, axis: int) -> jqx.QTensor:
    """With every second scale and zero point of an axis, which two indices then share."""
    key = (slice(None),) * axis + (slice(None, None, 2),)
    zero = None if q.zero_point is None else q.zero_point[key]
    return jqx.QTensor(q.values, q.scale[key], zero, qtype=q.qtype, blocks=q.blocks)


def _random_codes(
    rng: np.random.Generator, form: Any, shape: Sequence[int], small: bool
) -> jax.Array:
    element = form.elements if isinstance(form, Block) else form
    if isinstance(element, Codebook):
        numbers = rng.integers(0, len(element.entries), shape)
    elif small or isinstance(element, Integer):
        low, high = int(element.low), int(element.high)
        low, high = (max(low, -4), min(high, 4)) if small else (low, high)
        numbers = rng.integers(low, high + 1, shape)
    else:
        numbers = rng.normal(size=shape)
    return on_device(numbers.astype(form.storage))


def _random_scale(rng: np.random.Generator, form: Any, entries: Sequence[int], powers: bool) -> Any:
    scale = np.ldexp(1.0, rng.integers(-2, 3, entries))
    if not isinstance(form, Block):
        scale = scale if powers else scale * rng.uniform(1, 2, entries)
        return on_device(scale, jnp.float32)
    codes = on_device(scale.astype(form.scale_qtype))
    if form.scale_qtype == E8M0:
        return codes
    inner = on_device(np.full((1,) * codes.ndim, 0.5 if powers else 0.7), np.float32)
    return jqx.QTensor(codes, inner, qtype=form.scale_qtype)


def spread(parameter: Any, q: jqx.QTensor) -> np.ndarray:
    """A scale or zero point with one entry for each element of its tensor, in NumPy."""
    parameter = np.asarray(parameter)
    for axis, size in enumerate(q.groups.sizes):
        if parameter.shape[axis] > 1:
            parameter = np.take(parameter, np.arange(q.shape[axis]) // size, axis)
    return np.broadcast_to(parameter, q.shape)


def scales(q: jqx.QTensor) -> np.ndarray:
    """The scale of each element, in float64."""
    scale = q.scale
    if isinstance(scale, jqx.QTensor):  # its product is rounded to float32
        scale = np.float32(as_float64(scale.values) * scales(scale))
    return as_float64(spread(scale, q))


def code_numbers(q: jqx.QTensor) -> tuple[np.ndarray, np.ndarray]:
    """What each code stands for without its scale, and the zero point to subtract, in float64."""
    form = format_of(q.qtype)
    element = form.elements if isinstance(form, Block) else form
    codes = np.asarray(q.codes)
    if isinstance(element, Codebook):
        numbers = np.float32(element.entries)[codes]
    elif isinstance(element, Integer) or jnp.issubdtype(codes.dtype, jnp.floating):
        numbers = codes.astype(np.float64)
    else:
        numbers = element.decode(q.codes)
    zero = 0 if q.zero_point is None else as_int64(spread(q.zero_point, q))
    return as_float64(numbers) * getattr(form, "unit", 1.0), as_float64(zero)


def real_values(x: Any) -> np.ndarray:
    """The real values of an array or of any QTensor, in float64."""
    if not isinstance(x, jqx.QTensor):
        return as_float64(x)
    numbers, zero = code_numbers(x)
    return (numbers - zero) * scales(x)


def magnitudes(x: Any) -> np.ndarray:
    """As `real_values`, of what is summed: a code and its zero point are so apart."""
    if not isinstance(x, jqx.QTensor):
        return np.abs(as_float64(x))
    numbers, zero = code_numbers(x)
    return (np.abs(numbers) + np.abs(zero)) * np.abs(scales(x))


def block_sums(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Sums equal blocks of an array, so that one of `shape` is left."""
    for axis, n in enumerate(shape):
        x = np.add.reduceat(x, np.arange(0, x.shape[axis], x.shape[axis] // n), axis)
    return x
