"""Sums of integers: products of codes whose scales are one, so that each result is an integer.

Every sum is below 2**24, so float32 holds it, and any order of evaluation gives the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jqx

from .normal_forms import digest


def _codes(seed: int, shape: tuple[int, ...], qtype: str, axis: int | None = None) -> jqx.QTensor:
    """Random codes with scales of one: for the tensor, or for each index of an axis."""
    most = 7 if qtype == "int4" else 127
    x = np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32)
    granularity = jqx.per_tensor() if axis is None else jqx.per_axis(axis)
    sizes = [n if i == axis else 1 for i, n in enumerate(shape)]
    affine = jqx.calibrators.Affine(jnp.ones(sizes, jnp.float32), None)
    return jqx.QTensor.quantize(jnp.asarray(x), jqx.QSpec(qtype, granularity), affine)


def _products(own: str, other: str) -> dict[str, Any]:
    """Results of each op on codes of two formats."""
    x, w = _codes(0, (5, 40), own), _codes(1, (40, 7), other, 1)
    stack, many = _codes(2, (3, 5, 12), own), _codes(3, (3, 12, 6), other)
    image, taps = _codes(4, (2, 6, 6, 4), own), _codes(5, (3, 3, 4, 5), other, 3)
    deep, table = _codes(6, (3, 3, 1, 8), other, 3), _codes(7, (9, 6), other, 0)
    rows, counts = _codes(8, (10, 12), own), jnp.array([4, 0, 6], jnp.int32)
    dims = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, w, **how: jqx.conv_general_dilated(  # noqa: E731
        x, w, (2, 1), "SAME", dimension_numbers=dims, **how
    )
    return {
        "matmul": jqx.matmul(x, w),
        "transposed": jqx.matmul(w.transpose(), x.transpose()),
        "dot_general": jqx.dot_general(stack, many, (((2,), (1,)), ((0,), (0,)))),
        "einsum": jqx.einsum("bti,bio->tbo", stack, many),
        "conv": conv(image, taps),
        "depthwise": conv(_codes(9, (2, 6, 6, 8), own), deep, feature_group_count=8),
        "ragged_dot": jqx.ragged_dot(rows, many, counts),
        "take": jqx.take(table, jnp.array([3, 0, 8]), axis=0),
    }


def product_sums() -> dict[str, Any]:
    """Digests of all results, by formats and op."""
    found = {}
    for own, other in (("int8", "int8"), ("int8", "int4"), ("int4", "int4")):
        for op, sums in jax.jit(_products, static_argnums=(0, 1))(own, other).items():
            sums = np.asarray(sums.dequantize() if isinstance(sums, jqx.QTensor) else sums)
            whole = sums.astype(np.int64)
            assert np.array_equal(whole, sums), f"{op} of {own} and {other} is no integer"
            found[f"{own} x {other}: {op}"] = [list(sums.shape), digest(whole.tobytes())]
    return found
