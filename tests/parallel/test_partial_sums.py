"""Parts of sums, scaled on each device before they are added in a dtype of the user's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx

from ..models.parallel import (
    AUTO,
    EXPLICIT,
    inputs,
    mesh_of,
    network,
    on_mesh,
    params,
    sent,
    shardings,
)

kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
PRESETS = ("w8a8_dynamic", "w4a16", "nf4", "fp8")


@pytest.mark.many
@kinds
@pytest.mark.parametrize("preset", PRESETS)
def test_parts_are_floats_and_their_sum_is_that_of_one_device(preset, kind):
    mesh = mesh_of(kind)
    p, x = on_mesh(mesh)
    plan = jqx.make_plan(network, getattr(jqx.presets, preset)())(p, x)
    q = jqx.quantize_params(p, plan)
    scales = "dynamic" if plan.static_specs() else None
    whole = jax.jit(jqx.convert(network, plan, scales))(q, x)
    told = None if kind == EXPLICIT else shardings(mesh)
    for dtype, steps in ((jnp.float32, 512 * 2.0**-24), (jnp.bfloat16, 2.0**-7)):
        run = jax.jit(jqx.convert(network, plan, scales, partial_dtype=dtype, shardings=told))
        counted = sent(run.lower(q, x).compile())
        # XLA on CPU adds bfloat16 in float32; dynamic scales are maxima, sent as they are.
        assert {op for op, *_ in counted} == {"all-reduce"}
        assert ("all-reduce", "s32", (8, 256)) not in counted
        assert counted["all-reduce", "f32", (8, 256)] == 1
        parts = jnp.abs(p["down"]).sum(0).max() * jnp.abs(x @ p["up"]).max()
        np.testing.assert_allclose(run(q, x), whole, rtol=0, atol=float(parts) * steps)


def test_the_result_is_partitioned_as_the_function_says():
    """`out_sharding` parts the sum along its columns too, as it does without `partial_dtype`."""
    mesh = mesh_of(EXPLICIT)
    p, x = on_mesh(mesh)
    place = NamedSharding(jax.typeof(x).sharding.mesh, P("data", "model"))
    f = lambda p, x: jnp.dot(jax.nn.relu(x @ p["up"]), p["down"], out_sharding=place)  # noqa: E731
    plan = jqx.make_plan(f, jqx.presets.w4a16())(p, x)
    q = jqx.quantize_params(p, plan)
    for dtype in (None, jnp.float32):
        y = jax.jit(jqx.convert(f, plan, partial_dtype=dtype))(q, x)
        assert y.sharding.spec == P("data", "model")


def test_weights_of_a_scan_and_seen_through_views():
    """The partition of a parameter is followed to the axes that it has at the contraction. All are
    whole numbers, with scales of 1: sums are exact in any order.
    """
    mesh = mesh_of(AUTO)

    def heads(p, x):
        def layer(x, w):
            y = x.reshape(16, 8, 32).reshape(16, 256) @ w.reshape(256, 256)
            return x + jnp.clip(jnp.round(y / 256), -7, 7), None

        return lax.scan(layer, x, p)[0] @ p[0].reshape(256, 256).T

    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.integers(-127, 128, (2, 8, 32, 256)), jnp.float32)
    w = w.at[:, 0, 0].set(127).at[:, :, :, 0].set(127)  # the largest of each row and each column
    x = jnp.asarray(rng.integers(-3, 4, (16, 256)), jnp.float32)
    place = NamedSharding(mesh, P(None, "model"))
    given, rows = jax.device_put(w, place), jax.device_put(x, NamedSharding(mesh, P("data")))
    plan = jqx.make_plan(heads, jqx.presets.w8a16())(given, rows)
    q = jqx.quantize_params(given, plan)
    run = jax.jit(jqx.convert(heads, plan, partial_dtype=jnp.float32, shardings=place))
    expected = jax.jit(jqx.convert(heads, plan))(jqx.quantize_params(w, plan), x)
    np.testing.assert_array_equal(run(q, rows), expected)
    text = run.lower(q, rows).as_text()
    assert text.count('manual_axes={"model"}') >= 1


ERRORS = {
    "no use": (
        {"shardings": {"up": None}},
        "`shardings` have no effect",
        "pass one of these",
    ),
    "integers": ({"partial_dtype": jnp.int8}, "`partial_dtype`", "float"),
    "not partitioned": (
        {"partial_dtype": jnp.bfloat16},
        "`partial_dtype` has no effect: no weight is known to be partitioned",
        "pass shardings=",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, problem, mend = ERRORS[name]
    plan = jqx.make_plan(network, jqx.presets.w8a16())(params(), inputs())
    with pytest.raises((ValueError, TypeError)) as caught:
        jqx.convert(network, plan, **options)(params(), inputs())
    assert problem in str(caught.value)
    assert mend in str(caught.value)
