"""Kernels on arrays, step by step, against NumPy in float64: floats beside codes in groups and
looked-up codes, codes beside codes, rows that are quantized on the way, and tiles.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.kernels.pallas import arithmetic_on, codes_of
from jqx._src.kernels.products_gpu import products_gpu, weights_gpu
from jqx._src.kernels.products_gpu import tiles_of as tiles_of_gpu
from jqx._src.kernels.products_tpu import BUDGET, products_tpu, tiles_of, weights_tpu
from jqx.numerics import Integer, format_of

from ..arrays import on_device

TABLE = tuple(np.sort(np.random.default_rng(7).normal(size=16)).astype(np.float32).tolist())
WEIGHTS = {"tpu": weights_tpu, "gpu": weights_gpu}
PRODUCTS = {"tpu": products_tpu, "gpu": products_gpu}


@dataclasses.dataclass(frozen=True)
class Case:
    """A product [m, k] x [k, n] with a scale for each group of `size` along k.

    Attributes:
      codes: their dtype.
      scale: dtype of the scales; uint8 are exponents.
      x: dtype of the rows, or "codes".
      zero: whether there are zero points.
      looked_up: whether codes are indices into a table.
    """

    m: int
    k: int
    n: int
    size: int
    codes: str = "int8"
    scale: str = "float32"
    x: str = "bfloat16"
    zero: bool = False
    looked_up: bool = False

    def __str__(self) -> str:
        more = "-zero" * self.zero + "-table" * self.looked_up
        head = f"{self.m}x{self.k}x{self.n}-{self.size}"
        return f"{head}-{self.codes}-{self.scale}-{self.x}{more}"


def random_codes(rng: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Returns codes of any kind: all integers of a dtype, or 8-bit floats."""
    if dtype.startswith("float"):
        return on_device(rng.normal(size=shape) * 4, dtype)
    info = jnp.iinfo(dtype)
    return on_device(rng.integers(int(info.min), int(info.max) + 1, shape), dtype)


def operands(case: Case) -> tuple[Any, ...]:
    """Returns rows in float32, codes, scales and zero points or `None`, on the device."""
    rng = np.random.default_rng(case.k + case.n)
    x = on_device(rng.normal(size=(case.m, case.k)), jnp.float32)
    shape = (case.k // case.size, case.n)
    codes = random_codes(rng, case.codes, (case.k, case.n))
    if case.scale == "uint8":
        scale = on_device(rng.integers(120, 134, shape).astype(np.uint8))
    else:
        scale = on_device(rng.uniform(0.5, 2.0, shape), case.scale)
    zero = random_codes(rng, case.codes, shape) if case.zero else None
    return x, codes, scale, zero


def numbers_of(case: Case, codes: Any, zero: Any) -> np.ndarray:
    """Returns what codes stand for before they are scaled, in float32."""
    numbers = np.asarray(codes.astype(jnp.float32))
    if case.looked_up:
        numbers = np.asarray(TABLE, np.float32)[np.asarray(codes.astype(jnp.int32))]
    if zero is not None:
        numbers = numbers - np.repeat(np.asarray(zero.astype(jnp.float32)), case.size, 0)
    return numbers


def real_weight(case: Case, codes: Any, scale: Any, zero: Any) -> np.ndarray:
    """Returns the weight, float64, each element rounded once to float32 and then as rows are."""
    factors = np.asarray(scale).astype(np.float32)
    if case.scale == "uint8":
        factors = np.exp2(factors - 127).astype(np.float32)
    real = numbers_of(case, codes, zero) * np.repeat(factors, case.size, 0)
    return np.asarray(jnp.asarray(real).astype(case.x).astype(jnp.float32)).astype(np.float64)


def check_weights(platform: str, case: Case, factor: float = 1) -> None:
    """Checks a product to the rounding of a float32 sum: K rounding errors of the sum of sizes."""
    x, codes, scale, zero = operands(case)
    x, scale = x.astype(case.x), scale * factor if factor != 1 else scale
    table = TABLE if case.looked_up else None
    run = functools.partial(WEIGHTS[platform], table=table, interpret=True)
    y = jax.jit(run)(x, codes, scale, zero)
    rows, real = np.float64(x.astype(jnp.float32)), real_weight(case, codes, scale, zero)
    bound = (case.k + 2) * 2.0**-24 * (np.abs(rows) @ np.abs(real)) + 1e-30
    error = np.abs(np.asarray(y, np.float64) - rows @ real)
    assert (error <= bound).all(), float((error / bound).max())


WEIGHT_CASES = [
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
@pytest.mark.parametrize("case", WEIGHT_CASES, ids=str)
@pytest.mark.parametrize("platform", WEIGHTS)
def test_a_product_is_that_of_the_rounded_weight(platform, case):
    check_weights(platform, case)


def test_codes_of_two_bits_are_read_on_a_tpu():
    for dtype in ("int2", "uint2"):
        check_weights("tpu", Case(33, 384, 128, 32, dtype, zero=dtype == "uint2"))


def test_float16_rows_are_multiplied_as_float16_on_a_gpu():
    check_weights("gpu", Case(3, 256, 64, 32, "int8", x="float16"), factor=1 / 128)


@pytest.mark.parametrize("platform", WEIGHTS)
def test_a_nan_stays_in_its_row_and_in_the_column_of_its_scale(platform):
    x, codes, scale, _ = operands(Case(3, 512, 128, 8))
    x, scale = x.astype(jnp.bfloat16).at[1, 5].set(jnp.nan), scale.at[9, 17].set(jnp.nan)
    y = jax.jit(functools.partial(WEIGHTS[platform], interpret=True))(x, codes, scale, None)
    expected = np.zeros((3, 128), bool)
    expected[1], expected[:, 17] = True, True
    np.testing.assert_array_equal(np.isnan(y), expected)


# Of rows: their format, and whether groups have scales of their own.
CODE_CASES = [
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


@pytest.mark.many("platform")
@pytest.mark.parametrize("case, qtype, by_group", CODE_CASES, ids=str)
@pytest.mark.parametrize("platform", PRODUCTS)
def test_sums_of_codes_are_exact_and_take_their_scales(platform, case, qtype, by_group):
    x, codes, scale, zero = operands(case)
    x = x if case.x in ("codes", "float32") else x.astype(case.x)
    granularity = jqx.per_block({0: 1, 1: case.size}) if by_group else jqx.per_axis(0)
    q = jqx.QTensor.quantize(x, jqx.QSpec(qtype, granularity))
    run = functools.partial(PRODUCTS[platform], form=format_of(jnp.dtype(qtype)), interpret=True)
    y = jax.jit(run)(q.values if case.x == "codes" else x, q.scale, codes, scale, zero)
    y, numbers = np.float64(y), np.float64(numbers_of(case, codes, zero))
    rows = np.float64(q.values.astype(jnp.float32))
    groups = (case.k // case.size, case.size)
    sums = np.einsum(
        "mgk,gkn->gmn", rows.reshape(-1, *groups), numbers.reshape(*groups, -1), optimize=True
    )
    row_scale = np.broadcast_to(np.float64(q.scale), (case.m, groups[0]))
    factors = row_scale.T[:, :, None] * np.float64(scale.astype(jnp.float32))[:, None, :]
    if groups[0] == 1 and isinstance(format_of(jnp.dtype(qtype)), Integer):
        # Two float32 products behind an exact sum: bit for bit those of the plain form.
        single = np.float32(sums[0]) * np.float32(row_scale) * np.float32(scale)
        np.testing.assert_array_equal(np.float32(y), single)
    sizes = np.abs(rows) @ np.abs(numbers) * np.max(factors)
    bound = (groups[0] + 3 + (0 if "int" in qtype else case.k)) * 2.0**-24 * sizes
    assert (np.abs(y - np.sum(sums * factors, 0)) <= bound).all()


EXTREMES = [0.0, -0.0, 1e-30, 3e38, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -0.5, 126.5, 127.5]


@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_rows_have_the_codes_of_a_qtensor_bit_for_bit(qtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 256)) * 10.0 ** rng.integers(-12, 12, (64, 1))
    x = np.concatenate([x, np.resize(np.float32(EXTREMES), (4, 256))]).astype(np.float32)
    form = format_of(jnp.dtype(qtype))
    for granularity in (jqx.per_axis(0), jqx.per_tensor()):
        q = jqx.QTensor.quantize(jnp.asarray(x), jqx.QSpec(qtype, granularity))
        by = arithmetic_on("tpu", interpret=True)
        codes = jax.jit(lambda x, s, by=by: codes_of(x, s, form, by))(x, q.scale)
        dtype = jnp.int8 if "int" in qtype else jnp.uint8
        expected = np.asarray(q.values.astype(jnp.int8) if "int" in qtype else q.values)
        np.testing.assert_array_equal(np.asarray(codes).view(dtype), expected.view(dtype))


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


@pytest.mark.parametrize("k", [4096, 14336])
def test_tiles_of_rows_are_as_full_as_each_other_on_a_tpu(k):
    for m in (1, 8, 31, 512, 1696, 1697, 2048, 4096, 5000, 8192, 100_000):
        tiles = tiles_of(m, k, 4096, 128, [jnp.float32], 2)
        count = -(-m // tiles.m)
        assert tiles.m == m or tiles.m % 16 == 0
        assert tiles.m * count - m < 16 * count


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
