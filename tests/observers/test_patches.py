"""Convolutions as products of matrices: patches times kernels are the result, by group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.observers import Observer, hessian, places

CASES = {
    "plain": ((2, 6, 7, 4), (3, 3, 4, 5), {"padding": "SAME"}),
    "strides": ((2, 9, 7, 4), (3, 2, 4, 5), {"window_strides": (2, 3), "padding": "VALID"}),
    "dilated": ((1, 9, 9, 4), (3, 3, 4, 6), {"padding": "SAME", "rhs_dilation": (2, 1)}),
    "stretched": (
        (1, 4, 5, 4),
        (3, 3, 4, 6),
        {"padding": [(1, 2), (2, 0)], "lhs_dilation": (2, 2)},
    ),
    "groups": ((2, 6, 6, 8), (3, 1, 2, 12), {"padding": "SAME", "feature_group_count": 4}),
    "depthwise": ((2, 6, 6, 4), (3, 3, 1, 8), {"padding": "SAME", "feature_group_count": 4}),
    "pointwise": ((2, 3, 3, 4), (1, 1, 4, 5), {"padding": [(1, 0), (0, 2)]}),
}


class Rows(Observer):
    """The matrices themselves."""

    def looks_at(self, site):
        return site.role != "result"

    def empty(self, operand, site):
        return jnp.zeros(jax.eval_shape(site.rows, operand).shape)

    def observe(self, x, site):
        return site.rows(x)

    def merge(self, a, b):
        return a


@pytest.mark.parametrize("numbers", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")], ids=str)
def test_patches_times_kernels_are_the_convolution(numbers):
    rng = np.random.default_rng(0)

    def given(name):
        image, kernel, _ = CASES[name]
        arrays = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (image, kernel))
        if numbers[0] == "NHWC":
            return tuple(arrays)
        turned = ((0, 3, 1, 2), (3, 2, 0, 1))
        return tuple(x.transpose(order) for x, order in zip(arrays, turned, strict=True))

    def convolution(name):
        options = {"window_strides": (1, 1), **CASES[name][2]}
        return lambda w, x: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)

    @jax.jit
    def found(inputs):
        every = {}
        for name, (x, w) in inputs.items():
            f = convolution(name)
            plan = jqx.make_plan(f, jqx.presets.w8a16())(w, x)
            observers = {".*": (Rows(), hessian, places)}
            every[name] = jqx.calibrate(f, plan, observers=observers)(w, x)
        return every

    inputs = {name: given(name) for name in CASES}
    for name, (y, stats) in found(inputs).items():
        x, w = (np.asarray(stats[f":conv_general_dilated:{side}@rows"]) for side in ("lhs", "rhs"))
        features = -1 if numbers[2] == "NHWC" else 1
        expected = np.moveaxis(np.asarray(y), features, -1)
        product = np.einsum("...rk,...nk->r...n", x, w).reshape(expected.shape)
        np.testing.assert_array_equal(product, expected, err_msg=name)  # small integers
        seen = stats[":conv_general_dilated:lhs@hessian"]
        np.testing.assert_array_equal(seen.products, x.mT @ x, err_msg=name)
        assert int(seen.rows) == x.shape[-2]
        elements = np.asarray(stats[":conv_general_dilated:rhs@places"])
        np.testing.assert_array_equal(inputs[name][1].ravel()[elements], w, err_msg=name)


def test_batch_groups_are_refused():
    f = lambda w, x: lax.conv_general_dilated(  # noqa: E731
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), batch_group_count=2
    )
    w, x = np.ones((3, 4, 6), np.float32), np.ones((2, 5, 4), np.float32)
    plan = jqx.make_plan(f, jqx.presets.w8a16())(w, x)
    with pytest.raises(NotImplementedError, match=r"observers\.hessian: (.|\n)*fix"):
        jax.eval_shape(jqx.calibrate(f, plan, observers={"": hessian}), w, x)
