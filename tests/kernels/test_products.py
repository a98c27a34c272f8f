"""Codes beside codes, and rows quantized on the way: kernels, step by step, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.kernels.pallas import arithmetic_on, codes_of
from jqx._src.kernels.products_gpu import products_gpu
from jqx._src.kernels.products_tpu import products_tpu
from jqx.numerics import Integer, format_of

from .matrices import Case, integers_of

KERNELS = {"tpu": products_tpu, "gpu": products_gpu}

# Of x: the format, and whether groups have scales of their own.
CASES = [
    (Case(8, 1536, 256, 128, "int4"), "int8", False),
    (Case(1, 256, 384, 32, "int8", x="float32"), "int8", False),
    (Case(5, 1024, 128, 1024, "int8"), "int8", False),
    (Case(5, 2176, 128, 2176, "int4", x="float32"), "int8", False),
    (Case(5, 2048, 128, 64, "uint4", x="float32", zero=True), "int8", False),
    (Case(8, 1536, 128, 128, "float8_e4m3fn"), "float8_e4m3fn", True),
    (Case(8, 2304, 128, 128, "float8_e4m3fn"), "float8_e5m2", False),
    (Case(3, 4096, 128, 2048, "int8", x="codes"), "int8", False),
    (Case(3, 2304, 128, 96, "int8", "bfloat16", x="float32"), "int8", True),
    (Case(7, 2432, 128, 2432, "float8_e4m3fn", x="float32"), "float8_e4m3fn", False),
    (Case(130, 512, 144, 128, "int8"), "int8", True),
    (Case(2, 512, 128, 64, "int4"), "int4", False),
]


def made(case, qtype, by_group):
    """Returns rows, their QTensor, codes, scale and zero points."""
    rng = np.random.default_rng(case.k)
    real = jnp.asarray(rng.normal(size=(case.m, case.k)), jnp.float32)
    real = real if case.x in ("codes", "float32") else real.astype(case.x)
    granularity = jqx.per_block({0: 1, 1: case.size}) if by_group else jqx.per_axis(0)
    q = jqx.QTensor.quantize(real, jqx.QSpec(qtype, granularity))
    shape = (case.k // case.size, case.n)
    codes = integers_of(rng, case.codes, (case.k, case.n))
    scale = jnp.asarray(rng.uniform(0.5, 2.0, shape), case.scale)
    zero = integers_of(rng, case.codes, shape) if case.zero else None
    return q.values if case.x == "codes" else real, q, codes, scale, zero


@pytest.mark.many("platform")
@pytest.mark.parametrize("case, qtype, by_group", CASES, ids=str)
@pytest.mark.parametrize("platform", KERNELS)
def test_sums_of_codes_are_exact_and_take_their_scales(platform, case, qtype, by_group):
    x, q, codes, scale, zero = made(case, qtype, by_group)
    run = functools.partial(KERNELS[platform], form=format_of(jnp.dtype(qtype)), interpret=True)
    found = np.float64(jax.jit(run)(x, q.scale, codes, scale, zero))
    numbers = np.float64(codes.astype(jnp.float32))
    if zero is not None:
        numbers = numbers - np.repeat(np.float64(zero.astype(jnp.float32)), case.size, 0)
    own = np.float64(q.values.astype(jnp.float32))
    groups = (case.k // case.size, case.size)
    sums = np.einsum(
        "mgk,gkn->gmn", own.reshape(-1, *groups), numbers.reshape(*groups, -1), optimize=True
    )
    rows = np.broadcast_to(np.float64(q.scale), (case.m, groups[0]))
    factors = rows.T[:, :, None] * np.float64(scale.astype(jnp.float32))[:, None, :]
    if groups[0] == 1 and isinstance(format_of(jnp.dtype(qtype)), Integer):
        # Two float32 products behind an exact sum: bit for bit those of the plain form.
        single = np.float32(sums[0]) * np.float32(rows) * np.float32(scale)
        np.testing.assert_array_equal(np.float32(found), single)
    sizes = np.abs(own) @ np.abs(numbers) * np.max(factors)
    bound = (groups[0] + 3 + (0 if "int" in qtype else case.k)) * 2.0**-24 * sizes
    assert (np.abs(found - np.sum(sums * factors, 0)) <= bound).all()


EXTREMES = [0.0, -0.0, 1e-30, 3e38, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -0.5, 126.5, 127.5]


@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_rows_have_the_codes_of_a_qtensor_bit_for_bit(qtype):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.normal(size=(64, 256)) * 10.0 ** rng.integers(-12, 12, (64, 1)),
            np.resize(np.float32(EXTREMES), (4, 256)),
        ]
    ).astype(np.float32)
    form = format_of(jnp.dtype(qtype))
    for granularity in (jqx.per_axis(0), jqx.per_tensor()):
        q = jqx.QTensor.quantize(jnp.asarray(x), jqx.QSpec(qtype, granularity))
        by = arithmetic_on("tpu", interpret=True)
        codes = jax.jit(lambda x, s, by=by: codes_of(x, s, form, by))(x, q.scale)
        dtype = jnp.int8 if "int" in qtype else jnp.uint8
        view = np.asarray(codes).view(dtype)
        expected = np.asarray(q.values.astype(jnp.int8) if "int" in qtype else q.values)
        np.testing.assert_array_equal(view, expected.view(dtype))
