"""Weights as checkpoints have them, that no rule of a plan is for: functions run on their codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor

from ..tensor.test_offset_and_order import matrix


def decoder(p, ids):
    """A table that is looked up and multiplied by, and a scan over layers."""

    def layer(x, w):
        return x + jax.nn.silu(x @ w["up"].T) @ w["down"].T, None

    x, _ = jax.lax.scan(layer, p["table"][ids], p["layers"])
    return x @ p["table"].T


def parameters(**parts):
    def stack(shape):
        return QTensor.stack([matrix(shape, 32, seed=i, **parts) for i in range(3)])

    layers = {"up": stack((128, 64)).pack(), "down": stack((64, 128))}
    return {"table": matrix((50, 64), 32, **parts), "layers": layers}


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_a_decoder_runs_on_the_codes(offset, order):
    p, ids = parameters(offset=offset, order=order), jnp.array([[1, 2, 3, 49]])
    nothing = jqx.Policy([])
    with jax.default_matmul_precision("highest"):
        expected = decoder(jqx.dequantize_params(p), ids)
        found = jax.jit(jqx.convert(decoder, nothing))(p, ids)
        simulated = jax.jit(jqx.simulate(decoder, nothing))(p, ids)
    size = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-4 * size)
    np.testing.assert_allclose(simulated, expected, atol=1e-4 * size)


def test_a_plan_takes_no_offset_for_a_weight_without_one():
    p = matrix((8, 64), 32)
    plan = jqx.make_plan(lambda w, x: x @ w.T, jqx.presets.w4a16(block=32))(
        jnp.ones((8, 64)), jnp.ones((1, 64))
    )
    with pytest.raises(ValueError, match="does not fit the plan"):
        jqx.convert(lambda w, x: x @ w.T, plan)(p, jnp.ones((1, 64)))


def test_a_file_keeps_offset_and_order(tmp_path):
    p = parameters()
    jqx.save(tmp_path / "a", p)
    loaded = jqx.load(tmp_path / "a")
    assert jax.tree.structure(loaded) == jax.tree.structure(p)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(p), strict=True):
        np.testing.assert_array_equal(a, b)
