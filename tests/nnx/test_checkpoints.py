"""Orbax saves quantized models in every format, and restores them into abstract ones."""

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqx
import jqx.nnx

from ..arrays import normal

X = normal(1, 2, 32)
INT2 = jqx.presets.w8a16(weight={"qtype": jnp.int2})
UINT8 = jqx.presets.w8a8(activation={"qtype": jnp.uint8, "symmetric": False})
POLICIES = {
    name: getattr(jqx.presets, name)() for name in ("w8a8", "w4a16", "w4a8", "fp8", "mxfp8", "nf4")
} | {"int2": INT2, "uint8": UINT8}

QUICK = ("w8a8", "w4a16", "fp8")


def made(policy, change):
    """A model with a stream of random numbers, converted or otherwise changed."""
    rngs = nnx.Rngs(0)
    layers = (nnx.Linear(32, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    model = nnx.Sequential(*layers, nnx.Linear(64, 4, rngs=rngs))
    model = jqx.nnx.quantize(model, policy, scales="dynamic")
    model.set_attributes(deterministic=True)
    change(model, X)
    return model


def comes_back(policy, change, folder):
    """Checks a model that is saved, and restored into `nnx.eval_shape` of one."""
    model = made(policy, change)
    graphdef, target = nnx.split(nnx.eval_shape(lambda: made(policy, change)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", nnx.state(model))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(folder / "saved", target)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(nnx.state(model)), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()
    restored = nnx.merge(graphdef, state)
    assert (restored(X) == model(X)).all()
    return restored


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in POLICIES],
)
def test_a_converted_model_comes_back(name, tmp_path):
    restored = comes_back(POLICIES[name], jqx.nnx.convert, tmp_path)
    assert isinstance(restored.layers[0].kernel.get_value(), jqx.QTensor)


def observe(model, x):
    model.set_attributes(mode=jqx.nnx.Mode.CALIBRATE)
    model(x)


@pytest.mark.parametrize("change", [observe, jqx.nnx.fix_scales, jqx.nnx.learn_scales])
def test_statistics_and_scales_come_back(change, tmp_path):
    policy = jqx.presets.w8a8(weight={"gradient": jqx.gradients.lsq})
    comes_back(policy, change, tmp_path)
