"""Orbax saves converted variables of every format, and restores them into an abstract target."""

import jax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn

import jqx
import jqx.linen

from ..arrays import normal

NET = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(4)])
X = normal(1, 2, 32)


@pytest.mark.many
@pytest.mark.parametrize("name", ["w8a8", "w4a16", "w4a8", "fp8", "mxfp8", "nf4"])
def test_a_converted_module_comes_back(name, tmp_path):
    policy = getattr(jqx.presets, name)()
    options = {"mode": jqx.linen.Mode.CONVERT, "scales": "dynamic"}
    module = jqx.linen.quantize(NET, policy, **options)
    variables = NET.init(jax.random.key(0), X)
    converted = jqx.linen.convert(module, variables, X)
    target = jax.eval_shape(lambda v: jqx.linen.convert(module, v, X), variables)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", converted)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", target)
    assert jax.tree.structure(restored) == jax.tree.structure(converted)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), restored, converted)
    assert jax.tree.all(same)
    assert isinstance(restored["qparams"]["layers_0"]["kernel"], jqx.QTensor)
    assert (module.apply(restored, X) == module.apply(converted, X)).all()
