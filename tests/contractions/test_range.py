"""The range of what is computed on the way: where the float64 result of the real operands is finite
in the dtype of the result, so is the computed one, and near it.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics

from ..arrays import on_device
from ..oracles import contractions
from ..oracles.contractions import gamma
from ..oracles.numerics import as_float64
from .blocks import random_tensor, real_values
from .convolutions import NHWC, convolution

MAGNITUDES = {
    "float16": ((6e4, 1e-7), (6e4, 1e-5), (1.0, 1e-2), (1e-4, 1e3), (20.0, 0.1)),
    "bfloat16": ((1e37, 1e-30), (1e37, 1e-3), (1e20, 1e-34), (1e-28, 1e34), (1.0, 1e-2)),
}
MAGNITUDES["float32"] = MAGNITUDES["bfloat16"]
"""By dtype: of the array, and of the scales beside it."""

FORMATS = {
    "int8": (jnp.int8, "axis", False),
    "uint8 in blocks": (jnp.uint8, "block", True),
    "int16": (jnp.int16, "tensor", False),
    "uint8": (jnp.uint8, "axis", True),
    "e5m2": (jnp.float8_e5m2, "tensor", False),
    "e4m3 in blocks": (jnp.float8_e4m3fn, "block", False),
    "nf4": (numerics.nf4, "axis", False),
}
USUAL = ("int8", "uint8 in blocks")

conv = functools.partial(
    jqx.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC
)
OPS: dict[str, tuple[Any, ...]] = {
    "small": (jqx.matmul, np.matmul, (3, 16), (16, 8)),
    "few rows": (jqx.matmul, np.matmul, (3, 128), (128, 128)),
    "one row": (jqx.matmul, np.matmul, (1, 128), (128, 128)),
    "many rows": (jqx.matmul, np.matmul, (20, 128), (128, 128)),
    "more rows than columns": (jqx.matmul, np.matmul, (160, 128), (128, 128)),
    "convolution": (
        conv,
        lambda x, w: convolution(x, w, (1, 1), "SAME"),
        (1, 3, 3, 16),
        (3, 3, 16, 4),
    ),
    "large convolution": (
        conv,
        lambda x, w: convolution(x, w, (1, 1), "SAME"),
        (1, 3, 3, 64),
        (3, 3, 64, 32),
    ),
}
FLOATS = ("float16", "bfloat16", "float32")


def kernel_of(form, shape, dtype):
    """A QTensor contracted along all its axes but the last, blocks along the one before that."""
    qtype, sharing, zero_point = FORMATS[form]
    blocks = {axis: n for axis, n in enumerate(shape[:-1])} | {len(shape) - 1: 1}
    if sharing == "tensor":
        granularity = jqx.per_tensor()
    else:
        blocks[len(shape) - 2] //= 2 if sharing == "block" else 1
        granularity = jqx.per_block(blocks)
    rng = np.random.default_rng(len(form))
    q = random_tensor(rng, qtype, granularity.groups(shape), zero_point)
    return q.astype(dtype)


def check(op, form, dtype, result=None):
    """One program for all magnitudes; a result that float64 has beyond its dtype is not looked at.

    Tolerated: roundings of float32 sums and of scales, those of 16-bit values on other platforms,
    and what is subnormal.
    """
    apply, reference, image, kernel = OPS[op]
    options = {} if result is None else {"preferred_element_type": jnp.dtype(result)}
    compute = jax.jit(functools.partial(apply, **options))
    info = jnp.finfo(result or dtype)
    rng = np.random.default_rng(len(op))
    compared = 0
    q = kernel_of(form, kernel, dtype)
    unit = q.map_scale(lambda scale: scale / jnp.max(scale))
    coarsest = max(float(jnp.finfo(t).eps) for t in (dtype, result or dtype))
    rounding = 4 * coarsest if coarsest > 1e-6 else 0.0
    for size, scale in MAGNITUDES[dtype]:
        x = on_device(rng.uniform(-1, 1, image) * size, dtype)
        w = unit.map_scale(lambda s, scale=scale: s * np.float32(scale))
        y = compute(x, w)
        assert y.dtype == info.dtype
        pair = as_float64(x), real_values(w)
        expected, magnitude = reference(*pair), reference(*map(np.abs, pair))
        in_range = magnitude < float(info.max) * (1 - 2 * rounding)
        allowed = (gamma(np.prod(kernel) + 20) + rounding) * magnitude
        allowed = allowed + np.prod(kernel[:-1]) * float(info.tiny)
        error = np.abs(as_float64(y) - expected)
        assert np.all((error <= allowed) | ~in_range), (op, form, dtype, size, scale)
        compared += np.any(in_range)
    assert compared >= (2 if result is None else 1)


@pytest.mark.many
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", USUAL)
def test_no_intermediate_product_is_out_of_range(form, dtype):
    for op in ("small", "few rows", "many rows", "more rows than columns", "convolution"):
        check(op, form, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMATS)
def test_no_intermediate_product_is_out_of_range_in_any_form(form, dtype):
    """Nor where the result is of another dtype: of bfloat16, float16 and float32 by turns."""
    dtypes = itertools.cycle([result for result in ("float16", "float32") if result != dtype])
    for op, result in zip(OPS, dtypes, strict=False):
        check(op, form, dtype)
        check(op, form, dtype, result)


@pytest.fixture
def as_elsewhere(monkeypatch):
    """Computes contractions on CPU as other platforms do."""
    contractions.as_elsewhere(monkeypatch)


@pytest.mark.parametrize("form", USUAL)
def test_float16_stays_in_range_on_other_platforms(form, as_elsewhere):
    for op in ("small", "many rows", "convolution"):
        check(op, form, "float16")
    gradient = jax.jit(jax.grad(lambda q, x: jnp.sum(jqx.matmul(x, q)), allow_int=True))
    x = jnp.ones((20, 128), jnp.float16)
    assert np.all(np.isfinite(gradient(kernel_of(form, (128, 128), "float16"), x).scale))
    check("convolution", form, "float16", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_float16_stays_in_range_on_other_platforms_in_any_form(form, as_elsewhere):
    for op, result in itertools.product(OPS, (None, "float32")):
        check(op, form, "float16", result)


LEAST, LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max) * 0.999
PAIRS = ((1e34, 1e-34), (1e-34, 1e34), (1e30, 1e4), (1e-25, 1e-7), (1e-34, 1e30), (1.0, 1.0))
INTEGERS: dict[str, tuple[Any, ...]] = {
    "product": (jqx.matmul, np.matmul, (3, 16), (16, 4)),
    "large product": (jqx.matmul, np.matmul, (1, 128), (128, 128)),
    "convolution": OPS["convolution"],
}


@pytest.mark.parametrize("op", INTEGERS)
@pytest.mark.parametrize("qtype", ["int8", "int16", "float8_e5m2"])
def test_scales_far_apart_do_not_overflow(op, qtype):
    apply, reference, *shapes = INTEGERS[op]
    rng = np.random.default_rng(0)
    compute = jax.jit(apply)
    sides = []
    for shape in shapes:
        axis = 0 if not sides else len(shape) - 1
        q = random_tensor(rng, jnp.dtype(qtype), jqx.per_axis(axis).groups(shape), False)
        sides.append(q.map_scale(lambda scale: scale / jnp.max(scale)))
    for scales in PAIRS:
        pair = [
            q.map_scale(lambda s, factor=factor: s * np.float32(factor))
            for q, factor in zip(sides, scales, strict=True)
        ]
        real = [real_values(q) for q in pair]
        expected, magnitude = reference(*real), reference(*map(np.abs, real))
        error = np.abs(as_float64(compute(*pair)) - expected)
        allowed = gamma(np.prod(shapes[1]) + 20) * magnitude + 2 * LEAST
        sizes = np.concatenate([np.abs(x[x != 0]) for x in real])
        are_floats = LEAST <= np.min(sizes) and np.max(sizes) <= LARGEST
        assert are_floats or qtype == "float8_e5m2"
        assert not are_floats or np.all((error <= allowed) | (magnitude > LARGEST)), scales


def test_the_gradient_by_a_scale_is_the_product_over_the_scale():
    left, right = (
        jqx.QTensor(jnp.full((2, 2), 100, jnp.int8), jnp.full((1, 1), scale), qtype=jnp.int8)
        for scale in (1e36, 1e-36)
    )
    np.testing.assert_array_equal(jqx.matmul(left, right), np.full((2, 2), 2e4, np.float32))
    total = lambda left, right: jnp.sum(jqx.matmul(left, right))  # noqa: E731
    by_left = jax.grad(total, allow_int=True)(left, right)
    np.testing.assert_allclose(by_left.scale, 8e4 * 1e-36, rtol=1e-6)
