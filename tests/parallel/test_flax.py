"""Both ways of Flax leave codes and scales on the devices of their float weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
import jqx.linen
import jqx.nnx

from ..arrays import normal
from ..models.parallel import AUTO, EXPLICIT, mesh_of

init = nn.initializers.lecun_normal()
zeros = nn.initializers.zeros_init()
PRESETS = ("w8a8_dynamic", "w4a16")


def quantized_of(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    return [x for x in leaves if isinstance(x, jqx.QTensor)]


def partitioned(q):
    """How the real array of a QTensor is partitioned, as its values say."""
    spec = (*q.values.sharding.spec, *(None,) * (q.ndim - len(q.values.sharding.spec)))
    return spec[::-1] if q.layout is not None and q.layout.swapped else spec


class Network(nnx.Module):
    def __init__(self, rngs):
        up, down = (
            nnx.with_partitioning(init, spec) for spec in ((None, "model"), ("model", None))
        )
        bias = nnx.with_partitioning(zeros, ("model",))
        self.up = nnx.Linear(64, 128, rngs=rngs, kernel_init=up, bias_init=bias)
        self.down = nnx.Linear(128, 64, rngs=rngs, kernel_init=down)

    def __call__(self, x):
        h = nnx.relu(self.up(x))
        mesh = jax.typeof(h).sharding.mesh
        if EXPLICIT not in mesh.axis_types:
            return self.down(h)
        return self.down(h, out_sharding=NamedSharding(mesh, P("data", None)))


kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


@pytest.mark.slow
@pytest.mark.many
@kinds
@pytest.mark.parametrize("preset", PRESETS)
def test_nnx(preset, kind):
    mesh = mesh_of(kind, 2, 4)
    with jax.set_mesh(mesh):
        model = Network(nnx.Rngs(0))
    alone = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), nnx.state(model))
    one = nnx.merge(nnx.graphdef(model), alone)
    x = jnp.asarray(normal(0, 16, 64))
    rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    policy = getattr(jqx.presets, preset)()
    q, q_of_one = (jqx.nnx.quantize(m, policy, scales="dynamic") for m in (model, one))
    jqx.nnx.convert(q, rows)
    jqx.nnx.convert(q_of_one, x)
    down, up = quantized_of(nnx.state(q))
    assert partitioned(up) == (None, "model") and partitioned(down) == ("model", None)
    assert up.scale.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (q, q_of_one)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    run = nnx.jit(lambda m, x: m(x))
    # Of 128 numbers at most, in another order: each sum rounds as often, by half a last place.
    size = float(jnp.abs(run(q_of_one, x)).max())
    np.testing.assert_allclose(run(q, rows), run(q_of_one, x), rtol=0, atol=size * 128 * 2.0**-24)
    done = jqx.nnx.ptq(model, policy, progress=False)([rows])
    down, up = quantized_of(done.params)
    assert partitioned(up) == (None, "model") and partitioned(down) == ("model", None)


@kinds
@pytest.mark.parametrize("preset", PRESETS)
def test_linen(preset, kind):
    mesh = mesh_of(kind, 2, 4)
    dense = nn.Dense(128, kernel_init=nn.with_partitioning(init, (None, "model")))
    x = jnp.asarray(normal(0, 16, 64))
    boxed = dense.init(jax.random.key(0), x)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nn.get_partition_spec(boxed))
    one = nn.meta.unbox(boxed)
    given, rows = jax.device_put(one, places), jax.device_put(x, NamedSharding(mesh, P("data")))
    module = jqx.linen.quantize(dense, getattr(jqx.presets, preset)(), mode=jqx.linen.Mode.CONVERT)
    found, expected = jqx.linen.convert(module, given, rows), jqx.linen.convert(module, one, x)
    (kernel,) = quantized_of(found)
    assert partitioned(kernel) == (None, "model")
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    y, y_of_one = jax.jit(module.apply)(found, rows), jax.jit(module.apply)(expected, x)
    atol = float(jnp.abs(y_of_one).max()) * 64 * 2.0**-24  # sums of 64 numbers
    np.testing.assert_allclose(y, y_of_one, rtol=0, atol=atol)
    done = jqx.linen.ptq(dense, getattr(jqx.presets, preset)(), progress=False)(given, [rows])
    assert partitioned(quantized_of(done.params)[0]) == (None, "model")
