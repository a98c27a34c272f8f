"""Convolutions by jqx-cpu beside NumPy, and beside what jqx computes without it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src import package_cpu
from jqx._src.kernels.products_cpu import convolution_cpu

from ..arrays import normal
from ..contractions.convolutions import NHWC, convolution

pytest.importorskip("jqx_cpu")

IMAGES = (  # batch, height, width, features, outputs, taps, groups
    (2, 9, 8, 1, 5, (3, 3), 1),
    (1, 12, 7, 3, 64, (7, 7), 1),
    (3, 6, 5, 16, 130, (3, 2), 1),
    (2, 5, 5, 70, 64, (1, 1), 1),
    (1, 10, 9, 64, 130, (1, 1), 1),
    (2, 4, 3, 8, 5, (6, 5), 1),
    (2, 9, 9, 6, 10, (3, 3), 2),
    (2, 9, 9, 70, 70, (3, 3), 70),
    (2, 7, 20, 12, 24, (3, 3), 12),
    (2, 1, 19, 8, 8, (1, 5), 1),
)
WINDOWS = (  # strides, padding, dilation
    ((1, 1), "SAME", (1, 1)),
    ((2, 1), "VALID", (1, 1)),
    ((1, 2), ((2, 3), (1, 0)), (2, 3)),
    ((2, 2), ((3, 3), (5, 5)), (1, 1)),
    ((1, 1), ((-1, 2), (2, -1)), (1, 2)),
)


def chosen(f, *args):
    return [(x.cpu.name, x.elsewhere.name) for x in jqx.formulations(f)(*args)]


def codes(rng, *shape):
    return rng.integers(-128, 128, shape).astype(np.int8)


def test_sums_are_exact_with_zero_points_of_either_side():
    rng, operands, windows, expected = np.random.default_rng(0), [], [], []
    for at, (image, window) in enumerate(itertools.product(IMAGES, WINDOWS)):
        batch, height, width, features, outputs, taps, groups = image
        strides, padding, dilation = window
        x = codes(rng, batch, height, width, features)
        w = codes(rng, *taps, features // groups, outputs)
        one_x, one_w, has_x, has_w = (at * 7 >> bit & 1 for bit in range(4))
        a = codes(rng, 1, 1 if one_x else batch) if has_x else None
        b = codes(rng, 1, 1 if one_w else outputs) if has_w else None
        reach = [(n - 1) * d + 1 for n, d in zip(taps, dilation, strict=True)]
        if isinstance(padding, str):
            padding = jax.lax.padtype_to_pads((height, width), reach, strides, padding)
        operands.append((x, None, a, w, None, b))
        windows.append({"strides": strides, "padding": tuple(padding), "dilation": dilation})
        windows[-1]["groups"] = groups
        left = x.astype(np.int64) - (0 if a is None else a.reshape(-1, 1, 1, 1))
        right = w.astype(np.int64) - (0 if b is None else b.reshape(-1))
        options = {"rhs_dilation": dilation, "feature_group_count": groups}
        expected.append(convolution(left, right, strides, padding, **options).astype(np.int32))

    def all_of(operands):
        pairs = zip(operands, windows, strict=True)
        return [convolution_cpu(*each, **window) for each, window in pairs]

    for x, y in zip(jax.jit(all_of)(operands), expected, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def quantized(x, *axes, scheme="int8"):
    granularity = jqx.per_axis(*axes) if axes else jqx.per_tensor()
    options = {"symmetric": False, "calibrator": jqx.calibrators.minmax}
    spec = jqx.QSpec(scheme, granularity, **(options if scheme == "uint8" else {}))
    return jqx.QTensor.quantize(x, spec)


SCHEMES = ("int8", "uint8")
LAYOUTS = {  # image, kernel, options
    "NHWC": ((2, 9, 8, 6), (3, 3, 6, 24), {"dimension_numbers": NHWC}),
    "NCHW": ((2, 6, 9, 8), (24, 6, 3, 3), {"dimension_numbers": ("NCHW", "OIHW", "NCHW")}),
    "crossed": ((9, 6, 2, 8), (3, 6, 3, 24), {"dimension_numbers": ("HCNW", "WIHO", "CWNH")}),
    "one axis": ((2, 9, 6), (3, 6, 24), {"dimension_numbers": ("NHC", "HIO", "NHC")}),
    "groups": ((2, 9, 8, 6), (3, 3, 3, 24), {"feature_group_count": 2, "dimension_numbers": NHWC}),
    "depthwise": (
        (2, 9, 8, 6),
        (3, 3, 1, 12),
        {"feature_group_count": 6, "dimension_numbers": NHWC},
    ),
    "one tap": ((2, 9, 8, 24), (1, 1, 24, 16), {"dimension_numbers": NHWC}),
    "image of its own": ((2, 9, 8, 6), (3, 3, 6, 24), {"dimension_numbers": NHWC}),
}


def cases():
    """Yields images, kernels and options: all layouts, paddings and schemes."""
    for i, (name, (image, kernel, options)) in enumerate(LAYOUTS.items()):
        of_image, of_kernel, _ = options["dimension_numbers"]
        own_axes = (of_image.index("N"),) if name == "image of its own" else ()
        for j, padding in enumerate(("SAME", "VALID")):
            x = quantized(normal(i, *image), *own_axes, scheme=SCHEMES[j ^ 1])
            scheme = SCHEMES[(i + j) % 2]
            w = quantized(normal(i + 9, *kernel), of_kernel.index("O"), scheme=scheme)
            strides = (2, 1)[: len(image) - 2]
            yield (x, w), {"window_strides": strides, "padding": padding, **options}


def test_convolutions_and_gradients_are_those_without_it(monkeypatch):
    operands, options = zip(*cases(), strict=True)
    x, w = operands[0]
    output = jqx.tflite.Requantization.of(x.scale.ravel()[0], w.scale.ravel(), 0.1, qtype=jnp.int8)

    def results(operands):
        pairs = zip(operands, options, strict=True)
        return [jqx.conv_general_dilated(*pair, **each) for pair, each in pairs]

    def loss(operands):
        return sum((y**2).sum() for y in results(operands)[::3])

    def requantized(operands):
        return jqx.conv_general_dilated(*operands[0], **options[0], output=output).values

    def everything():
        gradients = jax.grad(loss, allow_int=True)
        run = jax.jit(lambda x: (results(x), requantized(x), _scales(gradients(x))))
        return chosen(results, operands), chosen(requantized, operands), run(operands)

    (names, of_sums, results_of_kernels), _ = everything(), jax.clear_caches()
    monkeypatch.setattr(package_cpu, "is_installed", lambda: False)
    (_, _, expected), _ = everything(), jax.clear_caches()
    assert {cpu for cpu, _ in names} == {"package_convolution"}
    assert {other for _, other in names} == {"conv_integer", "conv_dot"}
    assert of_sums == [("package_convolution_sums", "conv_accumulator")]
    for a, b in zip(*map(jax.tree.leaves, (results_of_kernels, expected)), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def _scales(tree):
    return [x.scale for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jqx.QTensor))]


convolve = functools.partial(
    jqx.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC
)


def pair(scheme="int8", images=3):
    x = quantized(normal(0, images, 8, 7, 16), 0, scheme=scheme)
    return x, quantized(normal(1, 3, 3, 16, 24), 3, scheme=scheme)


def test_it_composes_with_transforms():
    """Images of one kernel are merged; kernels are applied one by one."""
    for scheme in SCHEMES:
        x, w = pair(scheme)
        one = jax.jit(convolve)(x, w)
        images, kernels = (jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), y) for y in (x, w))
        for axes in ((0, None), (None, 0), (0, 0)):
            operands = (x if axes[0] is None else images, w if axes[1] is None else kernels)
            mapped = jax.jit(jax.vmap(convolve, axes))(*operands)
            np.testing.assert_array_equal(mapped, jnp.stack([one] * 4), strict=True)
        by_kernel = jax.vmap(jax.vmap(convolve, (None, 0)), (0, None))
        nested = jax.jit(by_kernel)(images, kernels)
        np.testing.assert_array_equal(nested[1, 2], one, strict=True)
        np.testing.assert_array_equal(convolve(x, w), one, strict=True)


def test_weights_are_taken_as_they_are_packed():
    x, w = pair()
    narrow = jqx.QTensor.quantize(normal(1, 3, 3, 16, 24), jqx.QSpec("int4", jqx.per_axis(3)))
    both = jax.jit(lambda x, *ws: [convolve(x, w) for w in ws])
    products = both(x, w.pack_for("cpu"), narrow.pack(2), narrow.pack_for("cpu"))
    expected = both(x, w, narrow, narrow)
    for a, b in zip(products, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    assert chosen(convolve, x, narrow.pack(2)) == [("package_convolution", "conv_integer")]


def test_what_gathers_for_few_products_stays_with_the_compiler():
    x, w = pair()
    assert chosen(convolve, x, w[..., :7]) == [("conv_integer", "conv_integer")]
    assert chosen(convolve, x[..., :1], w[:, :, :1]) == [("conv_depthwise", "conv_integer")]
    three = jqx.QTensor.quantize(normal(0, 1, 4, 4, 4, 8), jqx.QSpec("int8"))
    cube = jqx.QTensor.quantize(normal(1, 2, 2, 2, 8, 16), jqx.QSpec("int8"))
    options = {"window_strides": (1, 1, 1), "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}
    assert chosen(functools.partial(convolve, **options), three, cube)[0][0] == "conv_integer"


def test_lowering_tells_the_kernel():
    x, w = pair()
    (contraction,) = jqx.lowering(convolve, x, w, target="cpu").contractions
    assert contraction.runs == "jqx_cpu_convolution" and contraction.dtypes == ("s8", "s8")
    assert not contraction.widened


IMAGE, KERNEL = jnp.zeros((2, 5, 5, 4), jnp.int8), jnp.zeros((3, 3, 4, 8), jnp.int8)


def wrong(x=IMAGE, w=KERNEL, x_zero=None, w_scale=None, dtype=jnp.int32, **window):
    window = {"strides": (1, 1), "padding": ((1, 1), (1, 1)), **window}
    return convolution_cpu(x, None, x_zero, w, w_scale, None, dtype=dtype, **window)


WRONG = {
    "images are s8": lambda: wrong(IMAGE.astype(jnp.int16)),
    "a kernel is s8": lambda: wrong(w=KERNEL.astype(jnp.int16)),
    "images are .batch, height": lambda: package_cpu.call(
        "convolution", jax.ShapeDtypeStruct((2,), jnp.int32), IMAGE[0], KERNEL, *NONE, **PLAIN
    ),
    "features are those": lambda: wrong(groups=3),
    "strides and dilation": lambda: package_cpu.call(
        "convolution", RESULT, IMAGE, KERNEL, *NONE, **{**PLAIN, "strides": np.int64([0, 1])}
    ),
    "zero points of images": lambda: wrong(x_zero=jnp.zeros((1, 3), jnp.int8)),
    "scales of a kernel": lambda: wrong(w_scale=jnp.ones((1, 5))),
    "the result is": lambda: package_cpu.call(
        "convolution", jax.ShapeDtypeStruct((2, 5, 5, 8), jnp.int32), IMAGE, KERNEL, *NONE, **PLAIN
    ),
    "a scale is missing": lambda: wrong(dtype=jnp.float32),
}
RESULT = jax.ShapeDtypeStruct((2, 3, 3, 8), jnp.int32)
NONE = [jnp.zeros((0,), dtype) for dtype in (jnp.float32, jnp.int8)] * 2
PLAIN = {
    "strides": np.int64([1, 1]),
    "dilation": np.int64([1, 1]),
    "padding": np.int64([0, 0, 0, 0]),
    "groups": np.int64(1),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_buffer_is_an_error_of_xla(text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jqx_cpu: convolution: .*{text}"):
        jax.block_until_ready(WRONG[text]())
