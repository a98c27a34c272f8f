"""Rows of bfloat16 beside integers, multiplied as such: the kernel of jqx-cpu beside NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src import package_cpu
from jqx._src.contractions.kernels_cpu import FEW
from jqx._src.kernels.products_cpu import float_product_cpu

from ..arrays import normal

pytest.importorskip("jqx_cpu")

ROWS = (1, 15, 16, 17, 33, 64, 70)
GROUPS = {8: (8, 16, 32, 192, 0), 4: (16, 32, 128, 0), 2: (32, 64, 0)}


def packed(codes, bits):
    """The first of the codes in a byte in its lowest bits."""
    per = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per) << (bits * np.arange(per, dtype=np.uint8))
    return np.bitwise_or.reduce(parts, -1).astype(np.uint8)


def case(rng, m, bits, size, has_zero, is_whole):
    """What `float_product_cpu` is given, with groups and ends of n and k that vary with the rows,
    and what the weights are in float64.
    """
    k = size * (1 + m % 3 * 4) if size else 8 // bits * (m * 5 + 2)
    n, groups, middle = 60 + m % 9, k // size if size else 1, 2 ** (bits - 1)
    is_signed = not has_zero or m % 2 == 0
    codes = rng.integers(0, 2**bits, (2, n, k), np.uint8)
    real = codes.astype(np.int64)
    real = np.where(real < middle, real, real - 2 * middle) if is_signed else real - middle
    zero = rng.integers(-middle, middle, (2, groups, n)).astype(np.int8) if has_zero else None
    if zero is not None:
        real = real - zero.swapaxes(1, 2).repeat(k // groups, 2)
    if is_whole:
        x = rng.integers(-4, 5, (2, m, k))
        scale = 2.0 ** rng.integers(-2, 3, (2, groups, n))
    else:  # rows of very different sizes, the largest of which times codes no float holds
        power = 10.0 ** (rng.permutation(m)[:, None] % 10 * 6 - 19)
        x, scale = rng.standard_normal((2, m, k)) * power, rng.standard_normal((2, groups, n)) / 128
    x, scale = jnp.asarray(x, jnp.bfloat16), np.float32(scale)
    weights = real * np.float64(scale).swapaxes(1, 2).repeat(k // groups, 2)
    given = x, packed(codes, bits), None, scale, zero
    return given, {"bits": bits, "is_signed": is_signed}, np.asarray(x, np.float64), weights


def cases(is_whole):
    rng = np.random.default_rng(int(is_whole))
    for m, (bits, sizes), has_zero in itertools.product(ROWS, GROUPS.items(), (False, True)):
        for size in sizes:
            yield case(rng, m, bits, size, has_zero, is_whole)


@pytest.mark.parametrize("is_whole", [True, False])
def test_products_are_exact_and_their_sums_float32(is_whole):
    given, options, rows, weights = zip(*cases(is_whole), strict=True)

    def run(given):
        return [float_product_cpu(*x, **o) for x, o in zip(given, options, strict=True)]

    told = [(g[3], o) for g, o in zip(given, options, strict=True)]
    for found, x, w, (s, o) in zip(jax.jit(run)(given), rows, weights, told, strict=True):
        expected = np.einsum("bmk,bnk->bmn", x, w)
        k = x.shape[-1]
        by_digits = x.shape[1] <= FEW or not package_cpu.has_bfloats()
        if is_whole and not by_digits:  # whole numbers, times powers of two, that float32 holds
            np.testing.assert_array_equal(found, expected)
            continue
        # Each sum is rounded once, and that of a group twice more, with its scale; what is smaller
        # than the least normal number is lost of a product or a sum, before the scale and after.
        size = np.einsum("bmk,bnk->bmn", np.abs(x), np.abs(w))
        bound = size * (3 * k + 2) * 2.0**-24 + (3 * k + 2) * 2.0**-126
        if by_digits:
            # Half a step of each number, and sums of codes and of zero points, which are apart.
            largest = np.abs(x).max(-1, keepdims=True) * k * 2.0 ** o["bits"] * np.abs(s).max()
            bound = bound + largest * (k * o["bits"] / 512 + 8) * 2.0**-24
        assert np.all(np.abs(found - expected) <= bound)


def test_rows_that_are_not_finite_leave_the_others_alone():
    k, n = 96, 70
    x = np.array(normal(0, 20, k))
    x[3, 5], x[4, 95], x[5, :2] = np.nan, np.inf, [np.inf, 3e38]
    w = np.random.default_rng(0).integers(1, 127, (1, n, k)).astype(np.int8)
    y = jax.jit(lambda x: float_product_cpu(x, w, None, scale, None, bits=8, is_signed=True))
    scale = np.ones((1, 1, n), np.float32)
    found = np.asarray(y(jnp.asarray(x[None], jnp.bfloat16)))[0]
    assert not np.isfinite(found[3:6]).any()
    assert np.isnan(found[3]).all()
    assert np.isfinite(np.delete(found, [3, 4, 5], 0)).all()


@pytest.mark.parametrize(
    "scheme", ["int8", "uint8:asymmetric", "int4:group=32", "uint2:group=64:asymmetric"]
)
def test_contractions_multiply_many_rows_as_such(scheme):
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.Policy({".*": scheme}))
    w = normal(0, 256, 70)
    q = jqx.quantize_params(w, plan(w, normal(1, 1, 256))).astype(jnp.bfloat16)
    p, x = q.pack_for("cpu"), normal(2, 3, 40, 256).astype(jnp.bfloat16)
    run = jax.jit(lambda x, q: jqx.matmul(x, q, preferred_element_type=jnp.float32))
    many = package_cpu.has_bfloats()
    (form,) = jqx.formulations(jqx.matmul)(x[0], p)
    assert form.cpu.name == ("package_floats" if many else "tiles")
    assert ("multiplies_bf16" in run.lower(x[0], p).as_text(debug_info=True)) == many
    one = jnp.stack([run(each, p) for each in x])
    np.testing.assert_array_equal(jax.vmap(run, (0, None))(x, p), one)
    dense = np.asarray(q.astype(jnp.float32).dequantize(), np.float64)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(dense)
    # As above; a weight that is dequantized is rounded once more, by the zero point of it.
    bound = size * (3 * 256 + 4) * 2.0**-24
    assert np.all(np.abs(np.asarray(one) - np.asarray(x, np.float64) @ dense) <= bound)
