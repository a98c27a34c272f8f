"""Floats beside codes in groups and looked up codes: kernels, step by step, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqx._src.kernels.products_gpu import tiles_of as tiles_of_gpu
from jqx._src.kernels.products_gpu import weights_gpu
from jqx._src.kernels.products_tpu import BUDGET, tiles_of, weights_tpu

from .matrices import TABLE, Case, assert_sums, made, real_weight

KERNELS = {"tpu": weights_tpu, "gpu": weights_gpu}

CASES = [
    Case(8, 1536, 640, 128, "int4"),
    Case(1, 256, 384, 32, "int8", x="float32", zero=True),
    Case(3, 1000, 130, 40),
    Case(5, 304, 80, 76, "uint4", x="float32", zero=True),
    Case(5, 1536, 144, 12),
    Case(7, 2304, 128, 32, "float8_e4m3fn", "uint8"),
    Case(7, 1024, 128, 16, "uint4", "float8_e4m3fn", looked_up=True),
    Case(7, 2048, 128, 2048, "uint4", looked_up=True),
    Case(2, 8192, 128, 2048, "int4", x="float32"),
    Case(2, 4096, 128, 1024, "uint8", x="float32", zero=True),
    Case(2, 3000, 128, 300, "int8", zero=True),
    Case(40, 2240, 256, 40, "int8", x="float32", zero=True),
    Case(33, 1152, 256, 32, "int8", "bfloat16"),
    Case(700, 512, 256, 64, "int8", x="float32"),
    Case(2, 5184, 128, 32, "float8_e5m2", "uint8", "float32"),
    Case(1, 2400, 144, 2400, "uint4", x="float32", looked_up=True),
    Case(17, 96, 48, 48, "uint4", "bfloat16", looked_up=True),
    Case(1, 32, 16, 16, "int4"),
]


@pytest.mark.many("platform")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("platform", KERNELS)
def test_a_product_is_that_of_the_rounded_weight(platform, case):
    x, codes, scale, zero = made(case)
    table = TABLE if case.looked_up else None
    run = functools.partial(KERNELS[platform], table=table, interpret=True)
    assert_sums(jax.jit(run)(x, codes, scale, zero), x, real_weight(case, codes, scale, zero))


def test_codes_of_two_bits_are_read_on_a_tpu():
    for dtype in ("int2", "uint2"):
        case = Case(33, 384, 128, 32, dtype, zero=dtype == "uint2")
        x, codes, scale, zero = made(case)
        found = jax.jit(functools.partial(weights_tpu, interpret=True))(x, codes, scale, zero)
        assert_sums(found, x, real_weight(case, codes, scale, zero))


def test_float16_rows_are_multiplied_as_float16_on_a_gpu():
    case = Case(3, 256, 64, 32, "int8", x="float16")
    x, codes, scale, _ = made(case)
    found = jax.jit(functools.partial(weights_gpu, interpret=True))(x, codes, scale / 128, None)
    real = real_weight(case, codes, scale / 128, None)
    assert_sums(found, x, real)


@pytest.mark.parametrize("platform", KERNELS)
def test_a_nan_stays_in_its_row_and_in_the_column_of_its_scale(platform):
    case = Case(3, 512, 128, 8)
    x, codes, scale, _ = made(case)
    x, scale = x.at[1, 5].set(jnp.nan), scale.at[9, 17].set(jnp.nan)
    run = functools.partial(KERNELS[platform], interpret=True)
    found = np.isnan(jax.jit(run)(x, codes, scale, None))
    expected = np.zeros((3, 128), bool)
    expected[1], expected[:, 17] = True, True
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("k, size", [(4096, s) for s in (16, 32, 96, 128, 300, 1024, 4096)])
def test_tiles_hold_whole_groups_and_fit_the_memory_of_a_tpu(k, size, scale):
    if k % size:
        k = size * 14
    for m, n, each in [(1, 512, 4), (8, 4096, 2), (2048, 14336, 2), (100, 130, 4)]:
        tiles = tiles_of(m, k, n, size, [jnp.dtype(scale)], each)
        assert tiles.k == k or tiles.k % 128 == 0
        assert tiles.n == n or tiles.n % 128 == 0
        assert tiles.m == m or tiles.m % 16 == 0
        assert tiles.k % tiles.chunk == 0
        assert tiles.chunk % size == 0 or size % tiles.chunk == 0
        assert tiles.groups * size == (tiles.k if tiles.moves else k)
        rows = 32 // jnp.dtype(scale).itemsize
        assert not tiles.moves or tiles.groups % rows == 0
        assert tiles.m <= 16 or tiles.m * (2 * tiles.k * each + 16 * tiles.n) <= BUDGET


def test_weights_are_read_once_on_a_tpu_for_as_many_rows_as_a_prefill_has():
    for rows in (1, 8, 32, 512, 1024):
        assert tiles_of(rows, 4096, 4096, 128, [jnp.dtype("float32")], 2).m >= rows


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize("size", [16, 32, 96, 100, 128, 4800])
def test_tiles_of_a_gpu_are_powers_of_two_that_stay_in_a_group(m, size):
    k = 4800
    for n, narrow in [(4096, True), (144, True), (130, False)]:
        tiles = tiles_of_gpu(m, k, n, size, narrow)
        for value in (tiles.m, tiles.k, tiles.n):
            assert value >= 16 and value & (value - 1) == 0
        if narrow:
            assert n % tiles.n == 0 and k % tiles.k == 0
        assert tiles.parts >= 1
