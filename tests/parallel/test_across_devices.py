"""Scales that devices find together are those of the whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jqx
from jqx.calibrators import AcrossDevices

from ..arrays import normal
from ..models.parallel import AUTO, mesh_of

CALIBRATORS = {
    "absmax": jqx.calibrators.absmax,
    "minmax": jqx.calibrators.minmax,
    "mse": jqx.calibrators.mse,
    "percentile": jqx.calibrators.percentile,
}


def cases():
    """The spec of one device and that of several, for each calibrator and granularity."""
    for name, own in CALIBRATORS.items():
        for granularity in (jqx.per_axis(0), jqx.per_tensor()):
            symmetric = name != "minmax"
            fields = {"granularity": granularity, "symmetric": symmetric}
            alone = jqx.QSpec("int8" if symmetric else "uint8", calibrator=own, **fields)
            across = AcrossDevices("model", own)
            yield alone, jqx.QSpec(alone.qtype, calibrator=across, **fields)


def codes_of_one_device(x):
    """Of all elements at once, and of what the same spec finds where nothing is parted."""
    out = []
    for alone, spec in cases():
        own = alone.calibrator
        whole = jqx.QTensor.quantize(x, alone, own.affine(own.observe(x, alone), alone))
        out.append((whole.codes, jqx.QTensor.quantize(x, spec).codes))
    return out


@pytest.mark.many
@pytest.mark.parametrize("checked", [True, False])
def test_codes_are_those_of_the_whole_array(checked):
    x = jnp.asarray(normal(0, 8, 64)) * jnp.arange(1, 65, dtype=jnp.float32)[None]
    parted = jax.shard_map(
        lambda x: [jqx.QTensor.quantize(x, spec).codes for _, spec in cases()],
        mesh=mesh_of(AUTO, 2, 4),
        in_specs=P(None, "model"),
        out_specs=P(None, "model"),
        check_vma=checked,
    )
    for found, own, (alone, _) in zip(
        jax.jit(parted)(x), jax.jit(codes_of_one_device)(x), cases(), strict=True
    ):
        for codes in (found, own[1]):
            np.testing.assert_array_equal(codes, own[0], err_msg=str(alone))


def test_a_row_parallel_product_in_shard_map_has_the_sums_of_one_device():
    mesh = mesh_of(AUTO, 2, 4)
    x, w = jnp.asarray(normal(1, 8, 128)), jnp.asarray(normal(2, 128, 32))

    def parted(w, x):
        body = lambda w, x: lax.psum(x @ w, "model")  # noqa: E731
        specs = P("model", None), P("data", "model")
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("data"))(w, x)

    spec = jqx.QSpec("int8", jqx.per_token(), dynamic=True, calibrator=AcrossDevices("model"))
    channel = jqx.QSpec("int8", jqx.per_channel())
    plan = jqx.make_plan(parted, jqx.Policy([jqx.Rule(weight=channel, activation=spec)]))(w, x)
    found = jax.jit(jqx.convert(parted, plan))(jqx.quantize_params(w, plan), x)
    one = lambda w, x: x @ w  # noqa: E731
    plan = jqx.make_plan(one, jqx.presets.w8a8_dynamic())(w, x)
    expected = jax.jit(jqx.convert(one, plan))(jqx.quantize_params(w, plan), x)
    size = 128 * float(jnp.abs(x).max() * jnp.abs(w).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=size * 8 * 2.0**-24)


def test_errors():
    with pytest.raises(TypeError, match="`axis_name` names no mesh axis"):
        AcrossDevices(3)
    with pytest.raises(TypeError, match="`calibrator`"):
        AcrossDevices("model", "absmax")
    spec = jqx.QSpec("int8", calibrator=AcrossDevices("tensor"))
    f = jax.shard_map(
        lambda x: jqx.QTensor.quantize(x, spec).codes,
        mesh=mesh_of(AUTO),
        in_specs=P("model"),
        out_specs=P("model"),
    )
    with pytest.raises(ValueError, match="has no axis 'tensor'"):
        f(jnp.ones(8))


def test_it_is_written_as_json():
    spec = jqx.QSpec("int8", dynamic=True, calibrator=AcrossDevices(("data", "model")))
    plan = jqx.make_plan(
        lambda w, x: x @ w, jqx.Policy([jqx.Rule(weight="int8", activation=spec)])
    )(jnp.ones((4, 4)), jnp.ones((1, 4)))
    assert jqx.Plan.from_dict(plan.to_dict()) == plan
