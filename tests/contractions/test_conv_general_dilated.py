"""`conv_general_dilated`: scales, dtypes, transformations, derivatives, values that are not finite,
and what it refuses.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.contractions.requantize import Requantization

from ..arrays import assert_same, on_device
from ..oracles.contractions import chosen, gamma
from ..oracles.numerics import as_float64, assert_codes, assert_floats, nearest
from ..oracles.refusals import assert_refused
from ..tensor.tensors import random_codes, reals, tensor
from .blocks import random_tensor, real_values, scales, spread
from .convolutions import GROUPS, LAYOUTS, NHWC, case, convolution, powers, uniform


def test_two_arrays_are_convolved_by_lax():
    """And the oracle is right: it is compared with lax where nothing is quantized."""
    names = list(GROUPS)
    for i, layout in enumerate(LAYOUTS):
        some = case("float32", "float32", layout=layout, groups=names[i], padding="negative pairs")
        some = some._replace(steps="all three")
        lhs, rhs = some.operands(uniform)
        of_lax = functools.partial(lax.conv_general_dilated, **some.options)
        y, theirs = jax.jit(lambda *pair, some=some, f=of_lax: (some.convolve(*pair), f(*pair)))(
            lhs.value, rhs.value
        )
        assert_floats(y, theirs, np.float32)
        expected = convolution(lhs.real, rhs.real, **some.options)
        sizes = convolution(lhs.apart, rhs.apart, **some.options)
        assert np.all(np.abs(as_float64(y) - expected) <= gamma(some.products) * sizes)


plain = functools.partial(
    jqx.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC
)


def compute(lhs, rhs, **options):
    """As `plain`, in one compiled program."""
    return jax.jit(functools.partial(plain, **options))(lhs, rhs)


def any_tensor(seed, qtype, shape, scale=None, zero_point=None):
    codes = random_codes(np.random.default_rng(seed), qtype, shape)
    return tensor(codes, qtype, scale, zero_point)


def along(axis, values):
    """An array of rank 4 whose entries lie along one axis."""
    return np.reshape(values, [len(values) if i == axis else 1 for i in range(4)])


@pytest.mark.parametrize("kernel, groups", [((3, 3, 4, 6), 1), ((3, 3, 1, 8), 4)])
def test_one_zero_point_may_serve_many_scales(kernel, groups):
    zero = np.full((1, 1, 1, 1), 7)
    x = any_tensor(0, "uint8", (2, 5, 4, 4), along(0, [1, 2]), zero)
    w = any_tensor(1, "int4", kernel, along(3, np.arange(kernel[3]) % 2 + 1), zero)
    expected = convolution(reals(x), reals(w), (1, 1), "SAME", feature_group_count=groups)
    assert_floats(compute(x, w, feature_group_count=groups), expected, np.float32)


def in_blocks(axis, n, **fields):
    """An image whose axis of `n` has two blocks, with scales and zero points that differ."""
    shape = [2, 5, 4, 4]
    shape[axis] = n
    codes = random_codes(np.random.default_rng(2), "uint8", shape)
    x = tensor(codes, "uint8", along(axis, [1, 2]), along(axis, [9, 200]), **fields)
    size = fields["blocks"][0][2] if fields else n // 2
    block = along(axis, np.minimum(np.arange(n) // size, 1))
    real = (codes - np.take([9, 200], block)) * np.take([1, 2], block)
    return x, real.astype(np.float64)


def test_blocks_of_the_batch_and_of_features_share_a_scale_where_each_output_reads_one():
    x, real = in_blocks(0, 4)
    w = any_tensor(3, "int8", (3, 3, 4, 2))
    assert_floats(compute(x, w), convolution(real, reals(w), (1, 1), "SAME"), np.float32)
    for n, fields in [(4, {}), (5, {"blocks": ((5, 2, 3),)})]:
        x, real = in_blocks(3, n, **fields)
        w = any_tensor(4, "int8", (3, 3, 1, 2 * n))
        expected = convolution(real, reals(w), (1, 1), "SAME", feature_group_count=n)
        assert_floats(compute(x, w, feature_group_count=n), expected, np.float32)


@pytest.mark.parametrize("taps", [(3, 3), (1, 1)])
def test_each_input_feature_of_a_kernel_may_have_a_scale_beside_floats(taps):
    """Small integers: every sum is exact."""
    image = np.random.default_rng(5).integers(-8, 9, (2, 5, 4, 4)).astype(np.float32)
    w = any_tensor(6, "int8", (*taps, 4, 3), along(2, [1, 2, 2, 1]))
    for x in (on_device(image), tensor(image, "float8_e4m3fn", along(3, [1, 2, 1, 2]))):
        real = as_float64(image) * as_float64(getattr(x, "scale", 1))
        expected = convolution(real, reals(w), (1, 1), "SAME")
        assert_floats(compute(x, w), expected, np.float32)


def test_blocks_of_32_features_are_convolved_as_their_formats_have_them():
    """MX on both sides: each pixel and each tap has its own scales."""
    rng = np.random.default_rng(7)
    mx = jqx.numerics.mxfp8_e4m3
    x, w = (
        random_tensor(rng, mx, jqx.per_block({0: 1, 1: 1, **sizes}).groups(shape))
        for shape, sizes in (((1, 4, 4, 64), {2: 1, 3: 32}), ((3, 3, 64, 2), {2: 32, 3: 1}))
    )
    real = [real_values(q) for q in (x, w)]
    allowed = gamma(9 * 64 + 6) * convolution(*map(np.abs, real), (1, 1), "SAME")
    error = as_float64(compute(x, w)) - convolution(*real, (1, 1), "SAME")
    assert np.all(np.abs(error) <= allowed)


@pytest.mark.parametrize(
    "kernel, groups", [((3, 3, 4, 6), 1), ((3, 3, 1, 4), 4), ((1, 1, 4, 2), 1)]
)
@pytest.mark.parametrize("image", [(2, 1, 5, 4), (2, 2, 5, 4), (0, 5, 5, 4)])
def test_a_result_may_be_empty(image, kernel, groups):
    """A window larger than the image, or no image."""
    w = any_tensor(5, "int8", kernel)
    for x in (any_tensor(6, "uint8", image), jnp.ones(image)):
        options = {"padding": "VALID", "feature_group_count": groups}
        expected = convolution(reals(x), reals(w), (1, 1), **options)
        assert_floats(compute(x, w, **options), expected, np.float32)


ROUNDED = {
    "converted inside": case("bfloat16", "int8"),
    "dequantized": case("bfloat16", "uint4 with zero points"),
    "dequantized in tiles": case("bfloat16", "int8", size="large"),
}


@pytest.mark.parametrize("some", ROUNDED.values(), ids=ROUNDED)
def test_sums_of_sixteen_bit_floats_are_rounded_once(some):
    """Small integers and scales of 1 or 2: float32 holds the sum, bfloat16 does not."""
    rng = np.random.default_rng(7)
    _, w = some.operands(powers)
    x = rng.integers(-8, 9, some.shapes[0]).astype(np.float64)
    expected = convolution(x, w.real, **some.options)
    image = on_device(x, jnp.bfloat16)
    y = jax.jit(some.convolve)(image, w.value)
    assert np.any(nearest(expected, "bfloat16") != expected), "no rounding to be seen"
    assert_floats(y, nearest(expected, "bfloat16"), "bfloat16")
    wide = functools.partial(some.convolve, preferred_element_type=jnp.float32)
    assert_floats(jax.jit(wide)(image, w.value), expected, np.float32)


def test_a_codebook_is_not_rounded_to_the_dtype_of_the_image():
    """Its numbers are float32: so are products, sum and, where asked for, the result."""
    some = case("bfloat16", "nf4", of_kernel="outputs")
    x, w = some.operands(uniform)
    wide = functools.partial(some.convolve, preferred_element_type=jnp.float32)
    y = jax.jit(wide)(x.value, w.value)
    expected, sizes = (
        convolution(*pair, **some.options) for pair in ((x.real, w.real), (x.apart, w.apart))
    )
    assert np.all(np.abs(as_float64(y) - expected) <= gamma(some.products + 6) * sizes)


def test_the_result_has_the_promoted_dtype_or_the_one_asked_for():
    shapes = (1, 4, 4, 2), (3, 3, 2, 3)
    for dtypes in itertools.product(("float32", "bfloat16", "float16"), repeat=2):
        arrays = [jnp.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        quantized = [
            tensor(np.zeros(s), "int8", dtype=jnp.dtype(d))
            for s, d in zip(shapes, dtypes, strict=True)
        ]
        pairs = [quantized, (arrays[0], quantized[1]), (quantized[0], arrays[1])]
        for pair, asked in itertools.product(pairs, (None, "float16", "bfloat16", "float32")):
            with jax.numpy_dtype_promotion("standard"):
                expected = asked or jnp.promote_types(*dtypes)
                y = jax.eval_shape(functools.partial(plain, preferred_element_type=asked), *pair)
            assert (y.dtype, y.shape) == (expected, (1, 4, 4, 3))


MAPPED = {
    "integers": case("uint8 with zero points", "int8", of_kernel="outputs"),
    "depthwise": case("uint8 with zero points", "int8", groups="depthwise"),
    "weight only": case("float32", "uint4 with zero points", of_kernel="outputs"),
}


@pytest.mark.parametrize("some", MAPPED.values(), ids=MAPPED)
def test_eager_and_vmapped_convolutions_are_those_of_a_loop(some):
    """Small integers as floats: all sums are exact."""
    (lhs, rhs), (_, second) = some.operands(powers), some.operands(powers, ("any", "highest"))
    x, real = lhs.value, lhs.real
    if some.left == "float32":
        real = np.random.default_rng(8).integers(-8, 9, real.shape).astype(np.float64)
        x = on_device(real, jnp.float32)
    expected = [convolution(real, w.real, **some.options) for w in (rhs, second)]
    assert_floats(some.convolve(x, rhs.value), expected[0], np.float32)
    kernels = jax.tree.map(lambda *leaves: np.stack(leaves), rhs.value, second.value)
    images = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), x)

    @jax.jit
    def mapped(x, images, kernels):
        shared = jax.vmap(some.convolve, (None, 0))(x, kernels)
        return shared, jax.vmap(some.convolve)(images, kernels)

    for result in mapped(x, images, kernels):
        assert_floats(result, np.stack(expected), np.float32)


ACCUMULATED = {
    "integers": case("uint8 with zero points", "int8", layout="crossed", steps="strides"),
    "depthwise": case("uint8 with zero points", "int8", groups="depthwise, two outputs"),
}


@pytest.mark.parametrize("some", ACCUMULATED.values(), ids=ACCUMULATED)
def test_the_result_may_be_quantized(some):
    """From the int32 sums by a factor of 1, which int16 clips, or from floats by a spec."""
    x, w = some.operands(lambda _, shape: np.ones(shape, np.float32))
    sums = convolution(x.real, w.real, **some.options)
    unscaled = Requantization.of(1.0, 1.0, 1.0, qtype=jnp.int16)
    y = jax.jit(functools.partial(some.convolve, output=unscaled))(x.value, w.value)
    assert np.abs(sums).max() > 2**15
    assert_codes(y.values, np.clip(sums, -(2**15), 2**15 - 1).astype(np.int64), jnp.int16)
    spec = jqx.QSpec(jnp.int8)
    expected = jqx.QTensor.quantize(on_device(sums, jnp.float32), spec)
    rounded = jax.jit(functools.partial(some.convolve, output=spec))(x.value, w.value)
    assert_same(rounded, expected)


def zeros(shape, scale=(1, 1, 1, 1), qtype="int8", **fields):
    return tensor(np.zeros(shape), qtype, np.ones(scale), **fields)


IMAGE, KERNEL = (4, 5, 5, 4), (3, 3, 4, 6)


@pytest.mark.parametrize("zero_point", [None, 40_000])
@pytest.mark.parametrize("groups", [1, 2])
def test_codes_of_16_bits_are_convolved_exactly(zero_point, groups):
    """As digits of int8: the image has both extremes, and float32 holds every sum."""
    qtype, low = ("int16", -(2**15)) if zero_point is None else ("uint16", 0)
    rng = np.random.default_rng(0)
    image = rng.choice([low, low + 2**16 - 1, low + 300, low + 2**15], IMAGE)
    kernel = rng.integers(-2, 3, (3, 3, 4 // groups, 6))
    zero = None if zero_point is None else np.full((1, 1, 1, 1), zero_point)
    f = functools.partial(plain, feature_group_count=groups)
    lhs, rhs = tensor(image, qtype, None, zero), tensor(kernel, "int8")
    y = jax.jit(f)(lhs, rhs)
    options = dict(window_strides=(1, 1), padding="SAME", feature_group_count=groups)
    expected = convolution(image - (zero_point or 0), kernel, **options)
    assert np.abs(expected).max() <= 2**24
    assert_floats(y, expected.astype(np.float64), np.float32)
    assert chosen(f, lhs, rhs) == [("conv_digits", "conv_digits")]


def test_digits_are_those_of_codes_less_the_zero_point_of_their_own_block():
    rng = np.random.default_rng(0)
    image, kernel = rng.integers(-300, 300, IMAGE), rng.integers(0, 256, KERNEL)
    zero = np.array([3, 250]).reshape(1, 1, 2, 1)
    scale = np.array([1.0, 2.0]).reshape(1, 1, 2, 1)
    y = jax.jit(plain)(tensor(image, "int16"), tensor(kernel, "uint8", scale, zero))
    repeated = lambda x: np.repeat(x, 2, axis=2)  # noqa: E731
    expected = convolution(image * 1.0, (kernel - repeated(zero)) * repeated(scale), (1, 1), "SAME")
    assert_floats(y, expected, np.float32)


def leaf_of(operand):
    """What is differentiated: an array, or the scale of a QTensor."""
    value = operand.value
    return value.scale if isinstance(value, jqx.QTensor) else value


def loss(some, operands, cotangent, leaves):
    """A function of the convolution of operands with other leaves, linear in each."""
    pair = [
        dataclasses.replace(x.value, scale=leaf) if isinstance(x.value, jqx.QTensor) else leaf
        for x, leaf in zip(operands, leaves, strict=True)
    ]
    return (some.convolve(*pair).astype(jnp.float32) * cotangent.astype(np.float32)).sum()


def exact_loss(some, operands, cotangent, leaves):
    """The same in NumPy."""
    pair = []
    for x, leaf in zip(operands, leaves, strict=True):
        if isinstance(x.value, jqx.QTensor):
            leaf = as_float64(spread(leaf, x.value)) * x.real / scales(x.value)
        pair.append(leaf)
    return (convolution(*pair, **some.options) * cotangent).sum()


DIFFERENTIATED = {
    "integers": case(
        "uint8 with zero points", "int8", of_image="batch", of_kernel="outputs", steps="strides"
    ),
    "depthwise": case(
        "int8", "int8", groups="depthwise, two outputs", of_image="batch and features"
    ),
    "input blocks": case("int8", "int8", of_image="batch and input blocks"),
    "converted": case("float32", "int8", of_kernel="outputs", steps="apart"),
    "dequantized": case("float32", "uint4 with zero points", of_kernel="outputs and input blocks"),
    "in tiles": case("float32", "nf4", of_kernel="output blocks", size="large"),
    "bfloat16": case("bfloat16", "int8", of_kernel="outputs"),
    "image": case("uint8 with zero points", "float32", of_image="batch", groups="two"),
}


@pytest.mark.many
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_as_near_the_float64_ones_as_float32_allows(name):
    """Of arrays and scales: along any direction, that of a linear function is the function itself.

    They are sums over results and kernel at most, with 12 roundings around them; beside bfloat16,
    five of those.
    """
    some = DIFFERENTIATED[name]
    rng, operands = np.random.default_rng(1), list(some.operands(uniform))
    shape = jax.eval_shape(some.convolve, *(x.value for x in operands)).shape
    cotangent, leaves = rng.normal(size=shape), [leaf_of(x) for x in operands]
    relative = gamma(math.prod(shape) + math.prod(some.shapes[1]) + 12)
    if "bfloat16" in some:
        relative += (1 + 2.0**-8) ** 5 - 1
    gradient = jax.grad(functools.partial(loss, some, operands, cotangent))
    if name in ("integers", "in tiles", "dequantized"):
        twice = [jnp.stack([leaf, leaf / 2]) for leaf in leaves]
        mapped = jax.jit(jax.vmap(gradient))(twice)
        results = [(factor, [g[i] for g in mapped]) for i, factor in enumerate((1, 0.5))]
    else:
        results = [(1, jax.jit(gradient)(leaves))]
    magnitudes = [x._replace(real=np.abs(x.real)) for x in operands]
    for (factor, gradients), i in itertools.product(results, range(2)):
        assert gradients[i].dtype == leaves[i].dtype
        for _ in range(3):
            point = [as_float64(leaf) * factor for leaf in leaves]
            point[i] = rng.normal(size=point[i].shape)
            exact = exact_loss(some, operands, cotangent, point)
            size = exact_loss(some, magnitudes, np.abs(cotangent), [np.abs(p) for p in point])
            assert abs((as_float64(gradients[i]) * point[i]).sum() - exact) <= relative * size


SPOILED = {
    "converted": case("float32", "int8", padding="pairs"),
    "with holes": case("float32", "int8", padding="pairs", steps="all three"),
    "dequantized": case("float32", "uint4 with zero points", padding="negative pairs"),
    "in tiles": case("float32", "nf4", size="large", steps="strides"),
    "depthwise": case("float32", "int8", groups="depthwise, two outputs"),
    "matrix": case("float32", "int8", taps="one"),
}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("some", SPOILED.values(), ids=SPOILED)
def test_nan_and_infinities_spoil_the_windows_that_hold_them_alone(some, bad):
    x, w = some.operands(powers)
    is_bad = np.zeros(x.real.shape)
    is_bad[1, 3, 2, 0] = 1
    spoiled = convolution(is_bad, np.ones(w.real.shape), **some.options) > 0
    image = on_device(np.where(is_bad, bad, x.real), jnp.float32)
    y = np.asarray(jax.jit(some.convolve)(image, w.value))
    finite = np.asarray(jax.jit(some.convolve)(x.value, w.value))
    assert spoiled.any() and not spoiled.all()
    assert not np.isfinite(y[spoiled]).any()
    assert np.isnan(y[spoiled]).all() or np.isinf(bad)
    np.testing.assert_array_equal(y[~spoiled], finite[~spoiled])


@pytest.mark.parametrize("groups", ["one", "depthwise"])
def test_a_nan_scale_spoils_its_own_image_or_feature_alone(groups):
    some = case("int8", "uint8 with zero points", groups=groups, of_image="batch")
    some = some._replace(of_kernel="outputs")
    x, w = some.operands(powers)
    y = convolution(x.real, w.real, **some.options)
    y[1], y[..., 2] = np.nan, np.nan
    pair = [
        dataclasses.replace(q.value, scale=q.value.scale.at[index].set(jnp.nan))
        for q, index in ((x, 1), (w, (..., 2)))
    ]
    assert_floats(jax.jit(some.convolve)(*pair), y, np.float32)


VARYING = {  # operand, shapes of it and of its scale, shape of the other, groups
    "taps of the kernel": ("rhs", KERNEL, (3, 1, 1, 1), IMAGE, {}),
    "blocks of taps": ("rhs", (4, 3, 4, 6), (2, 1, 1, 1), IMAGE, {}),
    "each input feature": ("rhs", KERNEL, (1, 1, 4, 1), IMAGE, {}),
    "each feature": ("lhs", IMAGE, (1, 1, 1, 4), KERNEL, {}),
    "pixels": ("lhs", IMAGE, (1, 1, 5, 1), KERNEL, {}),
    "pixels, depthwise": ("lhs", IMAGE, (1, 5, 1, 4), (3, 3, 1, 4), {"feature_group_count": 4}),
    "groups of features": ("lhs", IMAGE, (1, 1, 1, 2), (3, 3, 2, 6), {"feature_group_count": 2}),
    "groups of inputs": ("rhs", KERNEL, (1, 1, 2, 1), (4, 5, 5, 8), {"feature_group_count": 2}),
    "groups of the batch": ("lhs", IMAGE, (4, 1, 1, 1), KERNEL, {"batch_group_count": 2}),
}


@pytest.mark.parametrize("case", VARYING)
def test_a_scale_that_varies_along_a_summed_axis_or_one_in_groups_is_refused(case):
    name, shape, scale, shape_of_other, options = VARYING[case]
    pair = [zeros(shape, scale), zeros(shape_of_other)]
    facts = f"the scale of `{name}` varies", str(shape), str(scale)
    if case.startswith("groups"):
        ((groups, count),) = options.items()
        facts = "are in groups", f"{groups}={count}"
    f = functools.partial(plain, **options)
    operands = pair if name == "lhs" else pair[::-1]
    assert_refused(f, operands, ValueError, "conv_general_dilated", *facts)


def test_operands_of_other_dtypes_and_ranks_are_refused():
    """It is not known what the integers of an array stand for."""

    def refused(lhs, rhs, error, *facts, **options):
        f = functools.partial(plain, **options)
        assert_refused(f, (lhs, rhs), error, "conv_general_dilated", *facts)

    image, kernel = zeros(IMAGE), zeros(KERNEL)
    for left, right in [("int32", "int8"), ("uint8", "int32")]:
        pair = zeros(IMAGE, qtype=left), zeros(KERNEL, qtype=right)
        refused(*pair, ValueError, "codes of 32 bits overflow", left, right)
    for dtype in ("int8", "int32", "bool"):
        refused(jnp.zeros(IMAGE, dtype), kernel, TypeError, "`lhs`", dtype, "floating point")
        refused(image, jnp.zeros(KERNEL, dtype), TypeError, "`rhs`", dtype, "floating point")
    facts = "preferred_element_type", "int32"
    for x in (jnp.zeros(IMAGE), image):
        refused(x, kernel, TypeError, *facts, preferred_element_type=jnp.int32)
    for shape in [(5, 4), (5, 5, 4), (1, 4, 5, 5, 4)]:
        for x in (jnp.zeros(shape), zeros(shape, (1,) * len(shape))):
            refused(x, kernel, ValueError, str(shape), str(KERNEL))


@pytest.mark.parametrize(
    "kernel, options, match",
    [
        ((3, 3, 3, 6), {}, "feature dimension size"),
        ((3, 3, 2, 5), {"feature_group_count": 2}, "multiple of feature_group_count"),
        (KERNEL, {"feature_group_count": 3}, "must divide lhs feature"),
        (KERNEL, {"batch_group_count": 3}, "must divide lhs batch"),
        (KERNEL, {"dimension_numbers": ("NHWC", "HWIO", "NHWX")}, "dimension_numbers"),
        (KERNEL, {"window_strides": (1,)}, "same number of dimensions"),
        (KERNEL, {"padding": "FULL"}, "FULL"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_lax(kernel, options, match):
    for x in (jnp.zeros(IMAGE), zeros(IMAGE)):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
            plain(x, zeros(kernel), **options)
