"""Contractions of QTensors with float offsets and permuted axes: those of the real array, of which
none is ever made.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor

from ..arrays import normal
from ..tensor.test_offset_and_order import double_quantized, matrix, super_blocks

EXACT = jax.lax.Precision.HIGHEST


def near(result, expected, unit=2e-5):
    size = np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(result, expected, rtol=unit, atol=unit * size)


WEIGHTS = {
    "offset": matrix((64, 128), 32, order=False),
    "order": matrix((64, 128), 32, offset=False),
    "both": matrix((64, 128), 32),
    "packed": matrix((64, 128), 32).pack(),
    "tail": matrix((64, 100), 32),
    "large": matrix((256, 512), 64),
    "one group": matrix((64, 128), 128),
    "super blocks": super_blocks(64, 256),
    "double quantized": double_quantized(64, 128),
}


@pytest.mark.many
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_those_of_the_real_array(name):
    q = WEIGHTS[name]
    rows = {str(n): normal(n, n, q.shape[1]) for n in (1, 5, 40)}

    @jax.jit
    def both(q, rows):
        y = q.dequantize()
        results, expected = {}, {}
        for n, x in rows.items():
            results[n] = jqx.matmul(x, q.T), jqx.matmul(q, x.T), jqx.einsum("bk,nk->nb", x, q)
            right = jnp.matmul(x, y.T, precision=EXACT)
            expected[n] = right, right.T, right.T
        x8 = QTensor.quantize(rows["5"], jqx.QSpec("int8", jqx.per_axis(0)))
        results["int8"] = (jqx.matmul(x8, q.T),)
        expected["int8"] = (jnp.matmul(x8.dequantize(), y.T, precision=EXACT),)
        loss = jax.grad(lambda x: (jqx.matmul(x, q.T) ** 2).sum())
        real = jax.grad(lambda x: (jnp.matmul(x, y.T, precision=EXACT) ** 2).sum())
        results["gradient"], expected["gradient"] = (loss(rows["5"]),), (real(rows["5"]),)
        return results, expected

    results, expected = both(q, rows)
    for key, values in results.items():
        for a, b in zip(values, expected[key], strict=True):
            near(a, b, 1e-4 if key == "gradient" else 2e-5)


@pytest.mark.parametrize("name", ["offset", "both", "tail", "super blocks"])
def test_lookups_are_exact(name):
    q, indices = WEIGHTS[name], jnp.array([[3, 63], [0, 1]])
    y = q.dequantize()
    np.testing.assert_array_equal(jqx.take(q, indices, axis=0), y[indices])
    rows = jax.jit(lambda q, i: jqx.dynamic_slice(q, (i, 0), (2, q.shape[1])).dequantize())(q, 5)
    np.testing.assert_array_equal(rows, y[5:7])


def test_stacks_batches_and_experts():
    @jax.jit
    def both(q, x):
        """The results of codes beside those of real values."""
        y, turned = q.dequantize(), q.transpose(0, 2, 1)
        rows, sizes = x.reshape(15, 64), jnp.array([4, 0, 11])
        expected = jnp.einsum("ebk,enk->ebn", x, y, precision=EXACT)
        _, steps = jax.lax.scan(lambda c, w: (c, jqx.matmul(x[0], w.T)), 0, q)
        return (
            (jqx.einsum("ebk,enk->ebn", x, q), expected),
            (jqx.einsum("enk,bek->ben", q, x.transpose(1, 0, 2)), expected.transpose(1, 0, 2)),
            (
                jqx.ragged_dot(rows, turned, sizes),
                jax.lax.ragged_dot(rows, turned.dequantize(), sizes, precision=EXACT),
            ),
            (steps, jnp.einsum("bk,enk->ebn", x[0], y, precision=EXACT)),
        )

    q = QTensor.stack([matrix((16, 64), 32, seed=i) for i in range(3)])
    for result, expected in both(q, normal(0, 3, 5, 64)):
        near(result, expected)


def test_no_weight_is_made_real():
    q, x = matrix((512, 1024), 64), normal(0, 1, 1024)
    compiled = jax.jit(lambda x, q: jqx.matmul(x, q.T)).lower(x, q.pack()).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < q.size, "less than a byte for each weight"


def test_gradients_of_scale_and_offset():
    q, x = matrix((8, 64), 32), normal(0, 3, 64)

    def loss(scale, offset, dense):
        w = dataclasses.replace(q, scale=scale, offset=offset)
        y = jnp.matmul(x, w.dequantize().T, precision=EXACT) if dense else jqx.matmul(x, w.T)
        return (y**2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    gradients, expected = (gradient(q.scale, q.offset, dense) for dense in (False, True))
    for a, b in zip(gradients, expected, strict=True):
        near(a, b, 1e-4)


CANNOT = {
    "a permuted axis that is kept": lambda q, x: jqx.matmul(x[:, :6], q),
    "two permuted axes": lambda q, x: jqx.matmul(q, q.T),
    "an image": lambda q, x: jqx.conv_general_dilated(
        x.reshape(1, 1, 5, 8), q.reshape(6, 1, 1, 8), (1, 1), "SAME"
    ),
    "a place to write to": lambda q, x: jqx.dynamic_update_slice(q, x[:1], (0, 0)),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_is_refused(name):
    q = dataclasses.replace(matrix((6, 8), 8, offset=False), scale=jnp.ones((1, 1)))
    with pytest.raises(ValueError, match="permuted") as caught:
        CANNOT[name](q, normal(0, 5, 8))
    assert "fix:" in str(caught.value)


def test_gradients_beside_scales_of_scales_of_many_weights():
    q, x = super_blocks(256, 512), normal(0, 1, 512)

    def loss(x, inner, dense):
        w = dataclasses.replace(q, scale=dataclasses.replace(q.scale, scale=inner))
        return 1e-3 * (jnp.matmul(x, w.dequantize().T) if dense else jqx.matmul(x, w.T)).sum()

    inner = q.scale.scale
    gradients, expected = (
        jax.jit(jax.grad(partial(loss, dense=d), (0, 1)))(x, inner) for d in (0, 1)
    )
    for a, b in zip(gradients, expected, strict=True):
        near(a.astype(jnp.float32), b.astype(jnp.float32), 2e-3 if a.dtype == jnp.float16 else 1e-4)
