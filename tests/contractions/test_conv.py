"""How convolutions are computed: what is chosen, what it holds in memory, what it is lowered to."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics

from ..arrays import normal
from ..oracles.contractions import gamma
from ..oracles.numerics import as_float64, assert_floats
from ..tensor.tensors import tensor
from .convolutions import NHWC, case, convolution, powers, uniform

"""How convolutions are computed: what is chosen, what it holds in memory, what it is lowered to."""


plain = functools.partial(
    jqx.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC
)


CHOSEN = {
    "integers": (case("int8", "uint8"), ["conv_integer", "conv_integer"]),
    "depthwise": (
        case("int8", "uint8", groups="depthwise, two outputs"),
        ["conv_depthwise", "conv_integer"],
    ),
    "kernel": (case("float32", "int8", of_kernel="outputs"), ["conv_tiles", "conv_convert"]),
    "depthwise kernel": (
        case("float32", "int8", groups="depthwise"),
        ["conv_tiles", "conv_convert"],
    ),
    "large kernel": (case("float32", "int8", size="large"), ["conv_tiles", "conv_convert"]),
    "zero points": (case("float32", "uint4 with zero points"), ["conv_tiles", "conv_dequantize"]),
    "blocks": (case("bfloat16", "nf4", of_kernel="taps"), ["conv_tiles", "conv_dequantize"]),
    "large blocks": (
        case("float32", "nf4", size="large", of_kernel="outputs and input blocks"),
        ["conv_tiles", "conv_dequantize"],
    ),
    "two formats": (case("e4m3", "int8"), ["conv_tiles", "conv_convert"]),
    "one tap, integers": (case("int8", "uint8", taps="one"), ["integer"] * 2),
    "one tap, large": (case("float32", "int8", taps="one", size="large"), ["tiles", "convert"]),
    "one tap, padded": (
        case("int8", "int8", taps="one", padding="pairs"),
        ["conv_integer", "conv_integer"],
    ),
    "one tap, in groups": (
        case("int8", "int8", taps="one", groups="two"),
        ["conv_integer", "conv_integer"],
    ),
    "one tap, holes": (
        case("float32", "int8", taps="one", padding="pairs", steps="holes"),
        ["conv_tiles", "conv_convert"],
    ),
    "two arrays": (case("float32", "float32"), []),
}


@pytest.mark.parametrize("some, names", CHOSEN.values(), ids=CHOSEN)
def test_formulations_tell_what_is_chosen(some, names):
    lhs, rhs = some.operands(uniform)
    contractions = jqx.formulations(some.convolve)(lhs.value, rhs.value)
    assert [
        name
        for contraction in contractions
        for name in (contraction.cpu.name, contraction.elsewhere.name)
    ] == names


@pytest.mark.parametrize("left", ["int8", "float32"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_a_kernel_of_one_tap_is_a_matrix(left, strides):
    """Bit by bit the product of the pixels that the strides reach."""
    some = case(left, "uint8 with zero points", taps="one", of_kernel="outputs and input blocks")
    x, w = (operand.value for operand in some.operands(uniform))

    @jax.jit
    def both(x, w):
        pixels = x[:, :: strides[0], :: strides[1]]
        expected = jqx.dot_general(pixels, w[0, 0], (((3,), (0,)), ((), ())))
        return plain(x, w, window_strides=strides), expected

    y, expected = both(x, w)
    np.testing.assert_array_equal(y, expected, strict=True)


def test_a_kernel_of_one_tap_over_an_image_with_holes_is_none():
    x, w = (operand for operand in case("int8", "int8", taps="one").operands(powers))
    options = {"padding": ((0, 0), (0, 0)), "lhs_dilation": (2, 1)}
    expected = convolution(x.real, w.real, (1, 1), **options)
    y = jax.jit(functools.partial(plain, **options))(x.value, w.value)
    assert_floats(y, expected, np.float32)


def highest(shape, scale=None):
    """Codes of 255 with a zero point of 0: each product is as large as any."""
    return tensor(np.full(shape, 255), "uint8", scale, np.zeros((1,) * len(shape)))


LONG = {
    "features": ((1, 9, 8000), (9, 8000, 2), {}, [1]),
    "features of a group": ((1, 9, 8000), (9, 4000, 4), {"feature_group_count": 2}, [1]),
    "features, batch in groups": ((2, 9, 8000), (9, 8000, 2), {"batch_group_count": 2}, [1]),
    "taps": ((1, 40000, 2), (40000, 2, 2), {}, [1]),
    "a block": ((1, 11000, 8), (11000, 8, 2), {}, [1, 0.5]),
}


LIMIT = (2**31 - 1) // 255**2


@pytest.mark.parametrize("image, kernel, options, blocks", LONG.values(), ids=LONG)
def test_a_sum_beyond_int32_is_split(image, kernel, options, blocks):
    """Parts below 2**31, each rounded once to float32 and scaled twice, and summed."""
    scale = np.reshape(blocks, (1, 1, -1))
    assert kernel[0] * kernel[1] > LIMIT
    options = {"dimension_numbers": ("NHC", "HIO", "NHC"), **options}
    convolve = functools.partial(
        jqx.conv_general_dilated, window_strides=(1,), padding="VALID", **options
    )
    y = jax.jit(convolve)(highest(image, scale), highest(kernel))
    expected = 255**2 * kernel[0] * kernel[1] * np.mean(blocks)
    parts = kernel[1] * math.ceil(kernel[0] / LIMIT)  # as many as that at most
    assert y.shape == (1, 1, kernel[2])
    assert np.all(np.abs(as_float64(y) - expected) <= gamma(parts + 3) * expected)


def test_the_longest_sum_allowed_is_one_convolution():
    def convolutions(features):
        x = tensor(np.zeros((1, 3, 3, 1)), "int8")
        shapes = [(1, 3, 3, features), (3, 3, features, 2)]
        pair = [
            dataclasses.replace(x, values=jax.ShapeDtypeStruct(shape, jnp.int8)) for shape in shapes
        ]
        lowered = jax.jit(plain).trace(*pair).lower(lowering_platforms=("cpu",))
        return lowered.as_text().count("stablehlo.convolution")

    longest = (2**31 - 1) // 128**2 // 9
    assert [convolutions(longest), convolutions(longest + 1)] == [1, 2]


SPECS = {
    "int8": {"qtype": jnp.int8},
    "uint8 with zero points": {
        "qtype": jnp.uint8,
        "symmetric": False,
        "calibrator": jqx.calibrators.minmax,
    },
    "int4": {"qtype": jnp.int4},
    "int4 packed": {"qtype": jnp.int4},
    "nf4": {"qtype": numerics.nf4},
    "e4m3": {"qtype": jnp.float8_e4m3fn},
    "blocks of int8": {"qtype": jnp.int8, "granularity": jqx.per_block({2: 32, 3: 1})},
}


IMAGE, KERNEL = (1, 8, 8, 256), (3, 3, 256, 256)


def shapes_of(name, shape=KERNEL):
    """The shapes and dtypes of a kernel."""
    spec = jqx.QSpec(**{"granularity": jqx.per_axis(3), **SPECS[name]})
    pack = 3 if name.endswith("packed") else None
    quantize = functools.partial(jqx.QTensor.quantize, spec=spec, pack=pack)
    return jax.eval_shape(quantize, jax.ShapeDtypeStruct(shape, jnp.float32))


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


@pytest.mark.parametrize("name", SPECS)
def test_a_large_kernel_is_never_held_in_floats(name):
    """An eighth of it at a time, as codes and as floats, and the results of those; and 1 KiB for
    what counts the steps.
    """
    x = jax.ShapeDtypeStruct(IMAGE, jnp.float32)
    memory = compiled(plain, x, shapes_of(name)).memory_analysis()
    eighth, image = math.prod(KERNEL) // 8, math.prod(IMAGE)
    assert memory.temp_size_in_bytes <= 5 * eighth + 4 * image + 1024


@pytest.mark.parametrize("pack", [0, 2, 3])
def test_a_packed_kernel_is_convolved_in_slices(pack):
    """Along the outputs 4 bits are cut as they lie; 3 bits, and an odd number, are not."""
    x = normal(0, 1, 4, 4, 64)

    @jax.jit
    def run(w):
        pairs = []
        for qtype in (jnp.int4, numerics.nf4, numerics.int3):
            for outputs in (192, 190):
                spec = jqx.QSpec(qtype, jqx.per_block({2: 32, 3: 1}))
                q = jqx.QTensor.quantize(w[..., :outputs], spec, pack=pack)
                pairs.append((plain(x, q), plain(x, q.dequantize())))
        return pairs

    for result, expected in run(normal(1, 3, 3, 64, 192)):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_nor_is_it_for_the_gradient_of_the_image():
    """A slice, another in the layout of the transposed convolution, and their sums."""
    x = jax.ShapeDtypeStruct(IMAGE, jnp.float32)
    gradient = jax.grad(lambda x, q: plain(x, q).sum())
    memory = compiled(gradient, x, shapes_of("int8")).memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * (math.prod(KERNEL) / 2 + 4 * math.prod(IMAGE))


def test_integers_are_convolved_as_bytes_into_int32_on_cpu():
    program = compiled(plain, bytes_of(IMAGE), shapes_of("int8"))
    text = program.as_text()
    convolutions = re.findall(r"= (\w+)(\S*) convolution\((%[\w.]+), (%[\w.]+)\)", text)
    assert any("[1,8,8,256]" in shape for _, shape, *_ in convolutions)
    for result, _, *operands in convolutions:
        types = [re.search(rf"{re.escape(name)} = (\w+)\[", text).group(1) for name in operands]
        assert [*types, result] == ["s8", "s8", "s32"]
    assert not re.search(r"(f32|bf16)\[3,3,256,256\]", text)


def bytes_of(shape):
    """The shapes and dtypes of unsigned bytes with one zero point."""
    codes, zero = (jax.ShapeDtypeStruct(s, jnp.uint8) for s in (shape, (1, 1, 1, 1)))
    scale = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    return jqx.QTensor(codes, scale, zero, qtype=jnp.uint8)


@pytest.mark.parametrize("name", ["int8", "uint8 with zero points"])
def test_no_kernel_of_integers_is_held_in_wider_ones(name):
    """Not for the sums that zero points are multiplied with either, but unsigned codes are flipped
    to signed ones.
    """
    program = compiled(plain, bytes_of(IMAGE), shapes_of(name))
    flipped = math.prod(KERNEL) if name.startswith("uint8") else 0
    assert program.memory_analysis().temp_size_in_bytes < flipped + math.prod(KERNEL)


def test_a_depthwise_convolution_of_integers_has_no_convolution_on_cpu():
    lhs, rhs = CHOSEN["depthwise"][0].operands(uniform)
    text = compiled(CHOSEN["depthwise"][0].convolve, lhs.value, rhs.value).as_text()
    assert "convolution(" not in text and "s32[" in text


@pytest.mark.parametrize("platform, result", [("cuda", "f32"), ("tpu", "i32"), ("cpu", "i32")])
@pytest.mark.parametrize("name", ["int8", "uint8 with zero points"])
def test_what_integers_are_lowered_to(platform, result, name):
    """GPU libraries return the sum of bytes as float32; the sums that zero points need likewise."""
    some = case(name, name)
    lhs, rhs = (operand.value for operand in some.operands(uniform))
    lowered = jax.jit(some.convolve).trace(lhs, rhs).lower(lowering_platforms=(platform,))
    types = re.findall(
        r"stablehlo\.convolution.*: \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\) -> tensor<\S*x(\w+)>",
        lowered.as_text(),
    )
    assert set(types) == {("i8", "i8", result)}


@pytest.mark.parametrize("some", [CHOSEN["depthwise"][0], CHOSEN["large kernel"][0]])
def test_convolutions_can_be_exported(some):
    lhs, rhs = (operand.value for operand in some.operands(uniform))
    convolve = jax.jit(some.convolve)
    exported = jax.export.export(convolve, platforms=("cpu", "cuda", "tpu"))(lhs, rhs)
    np.testing.assert_array_equal(exported.call(lhs, rhs), convolve(lhs, rhs), strict=True)
