"""Quantized arrays: codes, scales and real values are those of NumPy, and have the same grid in
simulation.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import RoundMode, calibrators, numerics
from jqx._src.numerics.qtype import INTEGERS
from jqx._src.tensor.grid import fake_quantize_as
from jqx._src.tensor.layout import Layout, Packing
from jqx.calibrators import Affine

from ..arrays import assert_same, on_device
from ..oracles.calibrators import affine, blocks, extremes, magnitude, ordinary_floats
from ..oracles.formats import largest, nearest_number, product, quotient
from ..oracles.numerics import as_float64, as_int64, assert_codes, assert_floats, nearest, quantized
from ..oracles.refusals import assert_error, assert_refused
from .tensors import CASES, SHAPES, kept, random_codes, spread_out, tensor

law = settings(max_examples=25, deadline=None)
quantize = functools.partial(jax.jit, static_argnames="spec")(jqx.QTensor.quantize)


@functools.partial(jax.jit, static_argnames="spec")
def round_trip(x, spec):
    """The QTensor and its real values."""
    q = jqx.QTensor.quantize(x, spec)
    return q, q.dequantize()


def ones(shape, dtype=jnp.float32):
    return on_device(np.ones(shape), jnp.dtype(dtype))


def granularity(axes):
    return jqx.per_axis(*axes) if axes else jqx.per_tensor()


AXES_OF = [(SHAPES[0], axes) for axes in [(), (1,), (0, 2), (0, 1, 2)]]
AXES_OF += [(SHAPES[1], (0, 1)), (SHAPES[1], (2,)), (SHAPES[2], ()), (SHAPES[2], (0,))]
KINDS = [
    {"qtype": qtype, "symmetric": symmetric, "calibrator": calibrator}
    for qtype in INTEGERS
    for symmetric in (True, False)
    for calibrator in (calibrators.absmax, calibrators.minmax)
    if not qtype.endswith("32") and not (symmetric and qtype.startswith("u"))
]
COMBINATIONS = [
    (*AXES_OF[(i + i // len(AXES_OF)) % len(AXES_OF)], kind) for i, kind in enumerate(KINDS)
]
"""Shapes, axes and specs: each is a compiled program."""


@st.composite
def floats_and_specs(draw):
    """Arrays of `SHAPES` and specs for them; halves of the step are as common as all else."""
    shape, axes, fields = draw(st.sampled_from(COMBINATIONS))
    elements = st.one_of(
        ordinary_floats,
        st.integers(-254, 254).map(lambda n: n / 2),
        st.sampled_from([0.0, 127.0, -127.0]),
    )
    x = draw(hnp.arrays(np.float32, shape, elements=elements))
    return x, axes, jqx.QSpec(granularity=granularity(axes), **fields)


@law
@given(floats_and_specs())
def test_codes_scale_and_zero_point_are_those_of_numpy(case):
    """Each float32 operation rounds once, as NumPy's: nothing differs in the last bit."""
    x, axes, spec = case
    if spec.calibrator == calibrators.absmax:
        low, high = -magnitude(x, axes), magnitude(x, axes)
    else:
        low, high = extremes(x, axes)
    scale, zero_point = affine(low, high, spec.qtype, spec.symmetric)
    q = quantize(x, spec=spec)
    assert_floats(q.scale, scale, np.float32)
    if spec.symmetric:
        assert q.zero_point is None
    else:
        assert_codes(q.zero_point, zero_point, spec.qtype)
    zero_point = 0 if zero_point is None else zero_point
    assert_codes(q.values, quantized(x, scale, zero_point, spec.qtype), spec.qtype)
    real = (as_int64(q.values) - zero_point) * as_float64(scale)
    assert_floats(q.dequantize(), nearest(real, np.float32), np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_sixteen_bit_floats_are_quantized_with_a_float32_scale(dtype, symmetric):
    """A 16-bit scale would lose up to half a step at the largest code."""
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(jnp.dtype(dtype))
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), symmetric)
    q = quantize(x, spec=spec)
    m = magnitude(x, (1,))
    scale, zero_point = affine(-m, m, "int8", symmetric)
    assert_floats(q.scale, scale, np.float32)
    zero_point = 0 if symmetric else zero_point
    assert_codes(q.values, quantized(x, scale, zero_point, "int8"), "int8")
    assert q.dtype == jnp.dtype(dtype)
    real = nearest((as_int64(q.values) - zero_point) * as_float64(scale), np.float32)
    assert_floats(q.dequantize(), nearest(real, dtype), dtype)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float32"])
def test_codes_are_not_rounded_to_the_dtype_of_their_scale(scale, zero_point):
    """Codes less zero points are exact, their products with scales are rounded to float32 first;
    so does `simulate` round what it puts on the same grid.
    """
    rng = np.random.default_rng(3)
    dtypes, expected, tensors = ("float32", "bfloat16", "float16"), {}, {}
    for qtype in ("int8", "uint8", "int16", "uint16"):
        codes = random_codes(rng, qtype, (3, 64))
        zeros = random_codes(rng, qtype, (3, 4)) if zero_point else None
        scales = rng.uniform(0.5, 1, (3, 4)).astype(jnp.dtype(scale))
        spread = np.repeat(as_float64(scales), 16, axis=1)
        shift = 0 if zeros is None else np.repeat(zeros, 16, axis=1)
        expected[qtype] = nearest((codes - shift) * spread, np.float32)
        q = tensor(codes, qtype, scales, zeros)
        tensors[qtype] = dataclasses.replace(q, scale=on_device(scales))

    def on_the_same_grid(qtype, q, real):
        if qtype.startswith("u") and not zero_point:
            return real
        spec = jqx.QSpec(jnp.dtype(qtype), jqx.per_block({0: 1, 1: 16}), symmetric=not zero_point)
        return fake_quantize_as(real, spec, jqx.calibrators.Affine(q.scale, q.zero_point))

    @jax.jit
    def actual(tensors, reals):
        return {
            qtype: (
                [q.astype(dtype).dequantize() for dtype in dtypes],
                on_the_same_grid(qtype, q, reals[qtype]),
            )
            for qtype, q in tensors.items()
        }

    reals = {qtype: real.astype(np.float32) for qtype, real in expected.items()}
    for qtype, (narrowed, again) in actual(tensors, reals).items():
        for dtype, result in zip(dtypes, narrowed, strict=True):
            with np.errstate(over="ignore"):
                real = expected[qtype].astype(jnp.dtype(dtype))
            np.testing.assert_array_equal(result, real, f"{qtype}, {dtype}")
        np.testing.assert_array_equal(again, reals[qtype], qtype)


def test_float64_values_keep_their_dtype_under_x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        q = jqx.QTensor.quantize(jnp.array([[1.0, -127]]), jqx.QSpec(jnp.int8))
        assert_codes(q.values, np.array([[1, -127]]), "int8")
        assert_floats(q.scale, np.array([[1]]), np.float32)
        assert_floats(q.dequantize(), np.array([[1, -127]]), np.float64)


def test_the_round_mode_is_the_one_of_the_spec():
    """Without one, halves of a step go to the even code."""
    x = np.float32([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.25, -0.75])
    modes = [None, *RoundMode]

    @jax.jit
    def codes_by_mode(x):
        specs = [jqx.QSpec(jnp.int8, round_mode=mode) for mode in modes]
        return [jqx.QTensor.quantize(x, spec).values for spec in specs]

    for mode, codes in zip(modes, codes_by_mode(x), strict=True):
        attribute = mode.value if mode else "ROUND_NEAREST_TOWARD_EVEN"
        assert_codes(codes, quantized(x, np.float32(1), 0, "int8", attribute), "int8")


def test_an_array_without_elements_or_without_axes_is_quantized():
    for shape, axes in [((0, 3), (1,)), ((3, 0), (0,)), ((0,), ()), ((), ())]:
        x = np.ones(shape, np.float32)
        q = quantize(x, spec=jqx.QSpec(jnp.int8, granularity(axes)))
        assert q.scale.shape == kept(shape, axes)
        assert_floats(q.dequantize(), x, np.float32)


def test_a_given_scale_and_zero_point_are_used_as_they_are():
    x = np.float32([[0.5, 9], [-0.75, -9]])
    scale, zero_point = jnp.array([[0.25, 0.5]]), jnp.array([[1, -3]], jnp.int4)
    for pair in [calibrators.Affine(scale, zero_point), (scale, zero_point)]:
        q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int4), pair)
        assert_same(q, tensor([[3, 7], [-2, -8]], "int4", scale, zero_point))
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int4), calibrators.Affine(scale))
    assert_same(q, tensor([[2, 7], [-3, -8]], "int4", scale))


def test_quantizing_again_with_the_same_scale_changes_nothing():
    x = np.random.default_rng(2).normal(size=(4, 5)).astype(np.float32)
    spec = jqx.QSpec(jnp.uint8, jqx.per_axis(1), symmetric=False)
    q = quantize(x, spec=spec)
    again = jqx.QTensor.quantize(q.dequantize(), spec, (q.scale, q.zero_point))
    assert_same(again, q)


def test_eager_jitted_and_mapped_quantizing_agree_bit_by_bit():
    x = np.random.default_rng(3).normal(size=(3, 4, 5)).astype(np.float32)
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0, 2))
    q = jqx.QTensor.quantize(x, spec)
    assert_same(quantize(x, spec=spec), q)
    each = functools.partial(jqx.QTensor.quantize, spec=jqx.QSpec(jnp.int8, jqx.per_axis(1)))
    assert_same(jax.vmap(each)(x), q)


def test_a_given_scale_must_fit():
    x, channels = ones((3, 4)), jqx.QSpec(jnp.int8, jqx.per_channel())
    wrong = "`affine.scale` does not fit `x`"
    for spec, shape, fact in [
        (jqx.QSpec(jnp.int8), (2, 1), wrong),
        (jqx.QSpec(jnp.int8, jqx.per_axis(0)), (2, 1), wrong),
        (channels, (1, 1), "relative to a contraction"),
    ]:
        assert_error(quantizing(x, spec, (ones(shape), None)), fact)


def test_a_range_wider_than_the_largest_float_stays_finite():
    x = jnp.array([2e38, -2e38])
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, symmetric=False))
    # The range is 255 steps. Rounding the zero point moves it by up to half a step, 1/255 of 2e38.
    assert jnp.allclose(q.dequantize(), x, rtol=1 / 255)


# Formats and granularities against NumPy, one block after the other.
FORMATS = {
    "int8": (jnp.int8, "int8"),
    "int4": (jnp.int4, "int4"),
    "int3": (numerics.int3, "int3"),
    "ternary": (numerics.ternary, "ternary"),
    "float8_e4m3fn": (jnp.float8_e4m3fn, "float8_e4m3fn"),
    "float8_e5m2": (jnp.float8_e5m2, "float8_e5m2"),
    "float6_e2m3fn": (numerics.float6_e2m3fn, "float6_e2m3fn"),
    "nf4": (numerics.nf4, "nf4"),
    "mxfp4": (numerics.mxfp4, "float4_e2m1fn"),
    "mxfp6_e3m2": (numerics.mxfp6_e3m2, "float6_e3m2fn"),
    "mxfp8_e4m3": (numerics.mxfp8_e4m3, "float8_e4m3fn"),
    "mxint8": (numerics.mxint8, "int8_narrow"),
    "nvfp4": (numerics.nvfp4, "float4_e2m1fn"),
}
FREE = [name for name in FORMATS if not name.startswith(("mx", "nv"))]
SHARED = {
    "per tensor": (None, (3, 100)),
    "per axis": (jqx.per_axis(0), (1, 100)),
    "blocks of 25": (jqx.per_block({0: 1, 1: 25}), (1, 25)),
    "blocks of 32 and a tail": (jqx.per_block({0: 1, 1: 32}, tail=True), (1, 32)),
    "blocks of two axes and tails": (jqx.per_block({0: 2, 1: 16}, tail=True), (2, 16)),
}


def scale_by_itself(block, name):
    """The scale that one block would have as an array of its own, as the docstrings have it."""
    m = np.max(np.abs(block.astype(np.float32)))
    element = FORMATS[name][1]
    if name.startswith("mx"):
        top = largest(element) * (2.0**-6 if name == "mxint8" else 1)
        if np.isnan(m):
            return np.float32(np.nan)
        if m == 0:
            return np.float32(2.0**-127)
        exponent = math.floor(math.log2(float(m))) - math.floor(math.log2(top))
        return np.float32(2.0 ** min(max(exponent, -127), 127))
    scale = m / np.float32(largest(element))
    return np.float32(1) if scale == 0 and name != "nvfp4" else scale


def by_blocks(x, name, sizes):
    """The real values and the scales, spread over the array, of an array quantized in NumPy."""
    element = FORMATS[name][1]
    scale = np.zeros(x.shape, np.float32)
    for (_, block), (_, part) in zip(blocks(x, sizes), blocks(scale, sizes), strict=True):
        part[...] = scale_by_itself(block, name)
    if name == "nvfp4":  # in e4m3, relative to one float32 scale
        known = np.nan_to_num(scale)
        whole = np.max(known) / np.float32(448) or np.float32(1)
        scale = product(nearest_number(quotient(scale, whole), "float8_e4m3fn"), whole)
    unit = 2.0**-6 if name == "mxint8" else 1
    y = quotient(x, scale) / np.float32(unit)
    if element.startswith(("int", "tern")):
        y = np.where(np.isnan(y), 0, y)
    return product(nearest_number(y, element) * unit, scale), scale


def normal(shape=(3, 100), size=1.0):
    rng = np.random.default_rng(7)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-4, 5, shape) * size
    return x.astype(np.float32)


CHECKED = [(name, shared) for name in FREE for shared in SHARED]
CHECKED += [(name, "blocks of 32 and a tail") for name in FORMATS if name.startswith("mx")]
CHECKED += [
    ("nvfp4", "blocks of 16"),
    ("nvfp4", "blocks of 4 by 4"),
]
OF_BLOCKS = {
    "blocks of 16": (jqx.per_block({0: 1, 1: 16}, tail=True), (1, 16)),
    "blocks of 4 by 4": (jqx.per_block({0: 4, 1: 4}, tail=True), (4, 4)),
}


@pytest.mark.many
@pytest.mark.parametrize("name, shared", CHECKED)
def test_each_block_is_quantized_as_if_it_were_alone(name, shared):
    granularity, sizes = (SHARED | OF_BLOCKS)[shared]
    x = normal()
    spec = jqx.QSpec(FORMATS[name][0], granularity or jqx.per_tensor())
    q, actual = round_trip(x, spec=spec)
    real, scale = by_blocks(x, name, sizes)
    assert_floats(actual, real, np.float32)
    positions = tuple(np.arange(0, n, b) for n, b in zip(x.shape, sizes, strict=True))
    actual = q.scale.dequantize() if name == "nvfp4" else np.asarray(q.scale).astype(np.float32)
    assert_floats(actual, scale[np.ix_(*positions)], np.float32)
    assert q.groups.sizes == tuple(min(b, n) for b, n in zip(sizes, x.shape, strict=True))


@pytest.mark.parametrize("shared", SHARED)
def test_each_block_has_the_zero_point_that_it_would_have_alone(shared):
    granularity, sizes = SHARED[shared]
    x = normal() + np.float32(3)
    spec = jqx.QSpec(jnp.uint4, granularity or jqx.per_tensor(), False, calibrators.minmax)
    _, actual = round_trip(x, spec=spec)
    real = np.zeros(x.shape, np.float32)
    for (_, block), (_, part) in zip(blocks(x, sizes), blocks(real, sizes), strict=True):
        scale, zero = affine(block.min(), block.max(), "uint4", False)
        part[...] = product(quantized(block, scale, zero, "uint4") - zero, scale)
    assert_floats(actual, real, np.float32)


def every_spec():
    """A spec in blocks of each format, for arrays of (2, 64)."""
    for name, (qtype, _) in FORMATS.items():
        size = getattr(qtype, "size", 32)
        yield pytest.param(name, jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size})), id=name)


each_format = pytest.mark.parametrize("name, spec", list(every_spec()))


@pytest.mark.many
@each_format
def test_blocks_of_zeros_and_of_one_value_stay_finite(name, spec):
    x = normal((2, 64))
    x[0, :32], x[1, 32:] = 0, 3
    for array in (x, np.zeros((2, 64), np.float32), np.full((2, 64), -3, np.float32)):
        y = np.asarray(round_trip(array, spec=spec)[1])
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(y[array == 0], 0)
        if array is not x:  # the nearest number to the largest is off by one part in 8 at most
            np.testing.assert_allclose(y, array, rtol=0.34 if name.startswith("mx") else 0.04)


@each_format
def test_a_nan_poisons_its_own_block_alone(name, spec):
    x = normal((2, 64))
    clean = np.asarray(round_trip(x, spec=spec)[1])
    poisoned = x.copy()
    poisoned[0, 3] = np.nan
    y = np.asarray(round_trip(poisoned, spec=spec)[1])
    size = spec.granularity.sizes[1][1]
    assert np.isnan(y[0, :size]).all()
    kept = np.ones((2, 64), bool)
    kept[0, :size] = False
    if name == "nvfp4":  # the block that was lost may have set the scale of the scales
        x[0, :size] = 0
        clean = np.asarray(round_trip(x, spec=spec)[1])
    assert_floats(on_device(y[kept]), clean[kept], np.float32)


@pytest.mark.many
@each_format
def test_a_scale_of_zero_that_is_given_gives_finite_values(name, spec):
    dtype = jnp.float8_e8m0fnu if name.startswith("mx") else np.float32
    scale = np.zeros((2, 64 // spec.granularity.sizes[1][1])).astype(dtype)

    @jax.jit
    def real(x, scale):
        return jqx.QTensor.quantize(x, spec, (scale, None)).dequantize()

    y = np.asarray(real(normal((2, 64)), scale))
    assert np.isfinite(y).all() if not name.startswith("mx") else y.shape == (2, 64)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_nvfp4_keeps_small_weights(size):
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32) * np.float32(size)
    spec = jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 1, 1: 16}))
    error = np.asarray(round_trip(x, spec=spec)[1]) - x
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(x)


PACKED_BYTES = {"int4": 32, "int3": 24, "ternary": 16, "nf4": 32, "mxfp4": 32}
PACKED_BYTES |= {"float6_e2m3fn": 48, "mxfp6_e3m2": 48, "nvfp4": 32}


@pytest.mark.many
@pytest.mark.parametrize("name", PACKED_BYTES)
def test_packing_loses_nothing_and_takes_the_bits_of_the_format(name):
    qtype = FORMATS[name][0]
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: getattr(qtype, "size", 32)}))
    x = normal((3, 64))

    @jax.jit
    def tensors(x):
        q = jqx.QTensor.quantize(x, spec)
        packed, along_rows = q.pack(), q.pack(0)
        again = [jqx.QTensor.quantize(x, spec, pack=axis) for axis in (1, -1)]
        reals = [tensor.dequantize() for tensor in (q, packed, along_rows)]
        return q, packed, along_rows, [packed.unpack(), along_rows.unpack()], again, reals

    q, packed, along_rows, unpacked, again, reals = tensors(x)
    assert packed.values.dtype == jnp.uint8
    assert (packed.shape, packed.ndim, packed.size) == (q.shape, q.ndim, q.size)
    assert packed.values.size == 3 * PACKED_BYTES[name]
    assert packed.nbytes == q.nbytes - 3 * (64 - PACKED_BYTES[name])
    assert packed.unpack().unpack() is not packed and q.unpack() is q
    assert along_rows.layout == Layout(Packing(-2, 3)) and along_rows.shape == (3, 64)
    for actual in (*unpacked, packed.unpack()):
        assert_same(actual, q)
    for actual in (*again, q.pack()):
        assert_same(actual, packed)
    for real in reals[1:]:
        assert_floats(real, np.asarray(reals[0]), np.float32)
    assert "packed" in repr(packed) and f"{packed.nbytes:,} bytes" in repr(packed)


@pytest.mark.parametrize("qtype", [jnp.int4, jnp.uint4, numerics.uint3, jnp.int2], ids=str)
def test_packed_codes_with_zero_points_and_a_tail_dequantize_alike(qtype):
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 4}, tail=True), symmetric=False)
    x = on_device(normal((3, 11)))
    q, packed = jqx.QTensor.quantize(x, spec), jqx.QTensor.quantize(x, spec, pack=1)

    @jax.jit
    def reals(q, packed):
        mapped = jax.vmap(lambda q: q.dequantize())(packed)
        return q.dequantize(), packed.dequantize(), mapped, packed.unpack()

    real, *others, unpacked = reals(q, packed)
    assert_same(unpacked, q)
    for actual in others:
        assert_floats(actual, np.asarray(real), np.float32)


BLOCK, HALF_BLOCK = jqx.per_block({0: 1, 1: 32}), jqx.per_block({0: 1, 1: 16})
INT8, MXFP4 = jqx.QSpec(jnp.int8), numerics.mxfp4
FLOAT_SCALE = ones((2, 2)), None


def quantizing(x, spec, *affine, **options):
    """A call of `quantize` with all of its arguments."""
    return functools.partial(jqx.QTensor.quantize, x, spec, *affine, **options)


REFUSED = [
    *(
        (quantizing(x, INT8), TypeError, "`x`", "floating point")
        for x in (np.ones((2, 3), np.int32), [[1, 2]], True)
    ),
    *(
        (quantizing(ones(3), spec), TypeError, "`spec`", "QSpec")
        for spec in (jnp.int8, 8, jqx.per_tensor())
    ),
    (quantizing(ones(3), None), TypeError, "`spec` is None", "a format is needed"),
    (
        quantizing(ones((2, 64)), jqx.QSpec(MXFP4, BLOCK), FLOAT_SCALE),
        TypeError,
        *("mxfp4", "powers of two", "float32", "float8_e8m0fnu"),
    ),
    (
        quantizing(ones((2, 64)), jqx.QSpec(MXFP4, HALF_BLOCK)),
        ValueError,
        *("mxfp4 has blocks of 32", "blocks of 16 for (2, 64)", "per_group(32)"),
    ),
    *(
        (quantizing(ones((4, 6)), jqx.QSpec(qtype), pack=0), ValueError, "fill their bytes")
        for qtype in (jnp.int8, jnp.int16, jnp.float8_e4m3fn, numerics.int7.storage)
    ),
    *(
        (
            quantizing(ones(shape), jqx.QSpec(jnp.int4), pack=axis),
            ValueError,
            *("does not exist", f"axis {axis}", f"rank {len(shape)}"),
        )
        for shape, axis in (((4, 6), 2), ((4, 6), -3), ((), 0), ((), -1))
    ),
]


def test_what_cannot_be_quantized_is_refused_with_the_facts():
    for call, error, *facts in REFUSED:
        assert_refused(call, (), error, "QTensor.quantize", *facts)
    no_group = quantizing(ones((2, 64)), jqx.QSpec(MXFP4))
    facts = ("is relative to a contraction", "per_group(", "jqx.per_block")
    assert_refused(no_group, (), ValueError, "per_group", *facts)
    no_tail = quantizing(ones((2, 50)), jqx.QSpec(jnp.int8, BLOCK))
    facts = ("blocks of 32 do not divide axis 1", "(2, 50)", "tail=True")
    assert_refused(no_tail, (), ValueError, "per_block", *facts)


SPECS = [
    jqx.QSpec(jnp.int8),
    jqx.QSpec(jnp.int4, jqx.per_axis(1)),
    jqx.QSpec(jnp.uint8, jqx.per_axis(0), symmetric=False, calibrator=calibrators.minmax),
    jqx.QSpec(jnp.int8, jqx.per_axis(0, 1), round_mode=RoundMode.TOWARD_ZERO),
]


def gaussian(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_it_gives_the_values_of_the_qtensor():
    """With the scale of the values or another, in every dtype."""
    dtypes = ("float32", "bfloat16", "float16")

    @jax.jit
    def simulated_and_real(arrays):
        pairs = []
        for spec, x in itertools.product(SPECS, arrays):
            shape = spec.granularity.scale_shape((4, 5))
            affine = Affine(jnp.full(shape, 0.25), jnp.full(shape, 3, spec.qtype))
            for args in ((x, spec), (x, spec, affine)):
                pairs.append((fake_quantize_as(*args), jqx.QTensor.quantize(*args).dequantize()))
        return pairs

    pairs = simulated_and_real([on_device(gaussian(4, 5), dtype) for dtype in dtypes])
    for i, (simulated, real) in enumerate(pairs):
        assert_floats(simulated, np.asarray(real), dtypes[i // 2 % 3])


GRADIENT_FORMATS = [
    *("int2", "int4", "int8", "int16", "int32", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    *(numerics.int3, numerics.ternary, numerics.Integer(8, True, narrow=True)),
    *(numerics.float6_e2m3fn, numerics.nf4, numerics.binary, numerics.Codebook((-1.0, 0.1, 0.5))),
    *(numerics.Codebook((0.0, 1.0)), numerics.nvfp4, numerics.mxfp8_e4m3),
]
EXTREMES = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1e-38, -1e-30, 3e38, -3.4e38)


@pytest.mark.many
@pytest.mark.parametrize("qtype", GRADIENT_FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_found_has_the_gradient_of_what_is_given_whatever_the_values(qtype, dtype):
    """With the clip mask or without: every format, each row one magnitude and one extreme. Of rows
    below 2^-106 the share of the range that the mask forgives is subnormal, and so it is 0. What a
    NaN itself gets is told below.
    """
    size = 16 if qtype == numerics.nvfp4 else 32
    symmetric = numerics.format_of(qtype).signed or qtype == numerics.Codebook((0.0, 1.0))
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size}), symmetric)
    x = gaussian(64, 32) * 2.0 ** np.linspace(-100, 112, 64).round()[:, None]
    x[: 2 * len(EXTREMES) : 2, 3] = EXTREMES
    with np.errstate(over="ignore"):  # of what is too large for float16
        x = on_device(x.astype(dtype))
    pull = on_device(gaussian(64, 32), dtype)
    q = jqx.QTensor.quantize(x, spec)
    given = Affine(q.scale, q.zero_point)
    actual, back = jax.vjp(lambda x: fake_quantize_as(x, spec), x)
    same, again = jax.vjp(lambda x: fake_quantize_as(x, spec, given), x)
    assert_floats(actual, np.asarray(same), dtype)
    known = ~np.isnan(np.asarray(x))
    assert_floats(back(pull)[0][known], np.asarray(again(pull)[0])[known], dtype)


def test_a_nan_makes_all_nan_that_its_scale_covers_and_the_gradient_is_of_the_identity():
    """No mask is computed there. Beside a scale that is given, `ste` gives a NaN no gradient."""
    x = on_device(gaussian(2, 5)).at[1, 3].set(jnp.nan)
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0))
    actual, back = jax.vjp(lambda x: fake_quantize_as(x, spec), x)
    np.testing.assert_array_equal(jnp.isnan(actual), [[False] * 5, [True] * 5])
    np.testing.assert_array_equal(back(actual.at[1].set(2.0))[0][1], np.full(5, 2.0))
    given = Affine(jnp.ones((2, 1)))
    gradient = jax.grad(lambda x: fake_quantize_as(x, spec, given).sum())(x)
    np.testing.assert_array_equal(gradient[1], [1, 1, 1, 0, 1])


def test_a_scale_that_is_given_has_its_gradient():
    """Of the clamp: the ends of the range move with the scale, -8 and 7 steps away."""
    spec = jqx.QSpec(jnp.int4)
    x = jnp.array([[0.3, 100.0], [-100.0, 200.0]])

    def f(x, scale):
        return fake_quantize_as(x, spec, Affine(scale)).sum()

    dx, dscale = jax.grad(f, (0, 1))(x, jnp.ones((1, 1)))
    assert_floats(dx, np.array([[1, 0], [0, 0]]), np.float32)
    assert_floats(dscale, np.array([[7 - 8 + 7]]), np.float32)


def test_a_relative_granularity_is_refused():
    with pytest.raises(ValueError, match="per_channel"):
        fake_quantize_as(jnp.ones((2, 3)), jqx.QSpec(jnp.int8, jqx.per_channel()))


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_every_format_and_granularity_is_simulated_as_it_is_quantized(name):
    x, spec = on_device(spread_out(CASES[name].shape)), CASES[name].spec
    f = jax.jit(lambda x: (fake_quantize_as(x, spec), jqx.QTensor.quantize(x, spec).dequantize()))
    simulated, real = f(x)
    assert_floats(simulated, np.asarray(real), np.float32)
    gradient = jax.grad(lambda x: fake_quantize_as(x, spec).sum())(x)
    assert gradient.shape == x.shape and np.isfinite(gradient).all()
    if spec.symmetric and not name.startswith(("mx", "nv")):  # whose scales may clip the largest
        assert_floats(gradient, np.ones(x.shape), np.float32)


@pytest.mark.parametrize("name", ["mx in blocks", "nv with a tail"])
def test_the_gradient_of_a_block_format_is_that_of_clamp_at_the_scale_of_each_block(name):
    x, spec = on_device(spread_out(CASES[name].shape)), CASES[name].spec
    q = jqx.QTensor.quantize(x, spec)
    scale = q.scale.dequantize() if name.startswith("nv") else q.scale.astype(jnp.float32)
    high = 6 * np.repeat(scale, q.groups.sizes[-1], axis=-1)[..., : x.shape[-1]]
    gradient = jax.grad(lambda x: fake_quantize_as(x, spec).sum())(x)
    assert_floats(gradient, np.abs(x) <= high * (1 + 2.0**-19), np.float32)
