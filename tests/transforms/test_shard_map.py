"""Functions over several devices: each quantizes its part; scales follow their weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx

from ..arrays import assert_same, on_device
from ..models.forms import POLICIES, WEIGHT, act, by_hand, gradients, matmul, rounded
from ..models.transforms import eighths

D, M = 2, 2
MESH = jax.make_mesh((D, M), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
BOTH = "weights and activations"
LAYERS, K, ROWS = 2, 8, 8


def weights():
    """A stack [layers, K, K] on no grid; every scale of 4 bits is 1/4."""
    w = np.array(eighths(0, LAYERS, K, K)) * 1.625
    w[:, ::2] = 1.75
    return on_device(w, jnp.float32)


def columns(dot, w, x):
    """Each device holds columns of the weight."""
    f = jax.shard_map(dot, mesh=MESH, in_specs=(P("d"), P(None, "m")), out_specs=P("d", "m"))
    return f(x, w[0])


def rows_and_sum(dot, w, x):
    """Each device holds rows of the weight; the parts of a sum are added up."""
    body = lambda x, w: lax.psum(dot(x, w), "m")  # noqa: E731
    f = jax.shard_map(body, mesh=MESH, in_specs=(P("d", "m"), P("m")), out_specs=P("d"))
    return f(x, w[1])


def data_parallel(dot, w, x):
    """A scan over layers that every device has whole."""
    body = lambda w, x: lax.scan(lambda x, w: (act(dot(x, w)), x.sum(axis=1)), x, w)  # noqa: E731
    f = jax.shard_map(
        body, mesh=MESH, in_specs=(P(), P(("d", "m"))), out_specs=(P(("d", "m")),) * 2
    )
    return f(w, x)


def stages(dot, w, x):
    """Each device has a layer of its own; all see all rows."""
    body = lambda w, x: dot(x, w[0])[None]  # noqa: E731
    return jax.shard_map(body, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))(w, x)


def unchecked(dot, w, x):
    f = jax.shard_map(dot, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False)
    return f(x, w[0])


def one_axis_manual(dot, w, x):
    f = jax.shard_map(
        dot, mesh=MESH, axis_names={"m"}, in_specs=(P(), P(None, "m")), out_specs=P(None, "m")
    )
    return jax.jit(f)(x, w[0])


def in_scan(dot, w, x):
    def layer(x, w):
        body = lambda x, w: act(dot(lax.all_gather(x, "m", axis=1, tiled=True), w))  # noqa: E731
        specs = P("d", "m"), P(None, "m")
        return jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("d", "m"))(x, w), None

    return lax.scan(layer, x, w)[0]


def loops_inside(dot, w, x):
    """A loop, a branch and a checkpoint inside."""

    def body(x, w):
        x = lax.fori_loop(0, 2, lambda i, x: act(dot(x, w)), x)
        return lax.cond(
            x[0, 0] > 0, jax.checkpoint(lambda: act(dot(x, w))), lambda: act(-dot(x, w))
        )

    return jax.shard_map(body, mesh=MESH, in_specs=(P(("d", "m")), P()), out_specs=P(("d", "m")))(
        x, w[0]
    )


FORMS = {
    f.__name__: f
    for f in (
        columns,
        rows_and_sum,
        data_parallel,
        stages,
        unchecked,
        one_axis_manual,
        in_scan,
        loops_inside,
    )
}
forms = pytest.mark.parametrize("name", FORMS)


def function(name):
    return lambda w, x: FORMS[name](matmul, w, x)


def reference(name, policy):
    return lambda w, x: FORMS[name](by_hand(policy != "weights"), rounded(w), x)


def arguments():
    return weights(), eighths(1, ROWS, K)


@pytest.mark.many
@forms
@pytest.mark.parametrize("policy", [pytest.param("weights", marks=pytest.mark.slow), BOTH])
def test_what_runs_on_devices_is_what_is_quantized_by_hand(name, policy):
    f, (w, x) = function(name), arguments()
    plan = jqx.make_plan(f, POLICIES[policy])(w, x)
    assert plan.sites and plan.skipped == ()
    expected = jax.jit(reference(name, policy))(w, x)
    assert not np.array_equal(jax.tree.leaves(expected)[0], jax.tree.leaves(jax.jit(f)(w, x))[0])
    assert_same(jax.jit(jqx.convert(f, plan, "dynamic"))(jqx.quantize_params(w, plan), x), expected)
    for backward in (None, jnp.float32):
        simulated = jqx.simulate(f, plan, "dynamic", backward=backward)
        assert_same(jax.jit(simulated)(w, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMS if name != "loops_inside"])
def test_gradients_on_devices_are_those_of_what_is_quantized_by_hand(name):
    f, (w, x) = function(name), arguments()
    plan = jqx.make_plan(f, POLICIES[BOTH])(w, x)
    simulated = [jqx.simulate(f, plan, "dynamic", backward=b) for b in (None, jnp.float32)]
    expected, *others = gradients(reference(name, BOTH), *simulated)(w, x)
    for actual in others:
        assert_same(actual, expected)


@pytest.mark.many
@forms
def test_statistics_of_all_devices_are_merged(name):
    spec = jqx.QSpec(jnp.int8)
    policy = jqx.Policy([jqx.Rule(activation=spec)])
    f, (w, x) = function(name), arguments()
    x = x.at[-1, -1].set(1.5)
    plan = jqx.make_plan(f, policy)(w, x)
    out, stats = jax.jit(jqx.calibrate(f, plan))(w, x)
    assert_same(out, jax.jit(f)(w, x))
    first = next(iter(stats.values()))
    assert float(jnp.max(first.largest)) == 2.0 if name == "in_scan" else 1.5
    affines = jqx.affines(plan, jqx.merge_stats(plan, stats, stats))
    actual = jax.jit(jqx.convert(f, plan, affines))(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), actual, out)


def test_scales_get_the_gradients_of_all_devices():
    spec = jqx.QSpec(jnp.int8)
    policy = jqx.Policy([jqx.Rule(weight=WEIGHT, activation=spec)])
    w, x = arguments()

    def gradient(f):
        plan = jqx.make_plan(f, policy)(w, x)
        (key,) = plan.static_specs()

        def loss(scale):
            return jqx.simulate(f, plan, {key: jqx.calibrators.Affine(scale)})(w, x).sum()

        return jax.jit(jax.grad(loss))(jnp.full((1, 1), 2.0**-8))  # clips at half the largest

    expected = gradient(lambda w, x: x @ w[0])
    assert float(expected[0, 0]) != 0
    np.testing.assert_array_equal(gradient(function("columns")), expected)


def test_a_weight_that_is_parted_within_a_block_is_refused():
    def f(w, x):
        body = lambda x, w: lax.psum(x @ w, ("d", "m"))  # noqa: E731
        rows = P(("d", "m"))
        return jax.shard_map(body, mesh=MESH, in_specs=(P(None, *rows), rows), out_specs=P())(
            x, w[0]
        )

    w, x = arguments()
    for size in (4, 2):
        blocks = jqx.QSpec(jnp.int4, jqx.per_group(size))
        plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=blocks)]))(w, x)
        q, run = jqx.quantize_params(w, plan), jax.jit(jqx.convert(f, plan, "dynamic"))
        if size == 4:  # a device has 2 rows
            with pytest.raises(ValueError, match="within blocks that share a scale"):
                run(q, x)
    np.testing.assert_array_equal(run(q, x), x @ rounded(w)[0])


def test_weights_are_laid_out_or_refused():
    f, (w, x) = function("columns"), arguments()
    plan = jqx.make_plan(f, POLICIES["weights"])(w, x)
    q = jqx.quantize_params(w, plan)
    expected = jax.jit(reference("columns", "weights"))(w, x)
    run = jax.jit(jqx.convert(f, plan, "dynamic"))
    assert_same(run(jqx.pack_for(q, "gpu"), x), expected)
    assert_same(run(q.pack(-2), x), expected)
    with pytest.raises(ValueError, match="codes are packed along it"):
        run(q.pack(-1), x)


def sharding(*spec):
    return NamedSharding(MESH, P(*spec))


def test_shardings_inside_a_function_hold_for_each_array_of_a_weight():
    @jax.jit
    def inner(w, x):
        w = lax.with_sharding_constraint(w, sharding("m", None))
        return lax.with_sharding_constraint(x @ w, sharding("d", None))

    def f(w, x):
        outer = jax.jit(
            lambda w, x: inner(w[0], x),
            in_shardings=(sharding(None, "m", "d"), sharding("d")),
            out_shardings=sharding("d", "m"),
        )
        return outer(w, x)

    w, x = arguments()
    plan = jqx.make_plan(f, POLICIES[BOTH])(w, x)
    expected = by_hand(True)(x, rounded(w)[0])
    for actual in (
        jax.jit(jqx.simulate(f, plan, "dynamic"))(w, x),
        jax.jit(jqx.convert(f, plan, "dynamic"))(jqx.quantize_params(w, plan), x),
        jqx.convert(f, plan, "dynamic")(jqx.quantize_params(w, plan), x),
    ):
        np.testing.assert_array_equal(actual, expected)
        assert actual.sharding.is_equivalent_to(sharding("d", "m"), 2)


def test_a_sharded_qtensor_is_what_jit_computes_with():
    """Shardings from outside: no rule is needed."""
    f, (w, x) = (lambda w, x: x @ w[0]), arguments()
    plan = jqx.make_plan(f, POLICIES[BOTH])(w, x)
    q = jqx.quantize_params(jax.device_put(w, sharding(None, None, "m")), plan)
    assert q.scale.sharding.is_equivalent_to(sharding(None, None, "m"), 3)
    actual = jax.jit(jqx.convert(f, plan, "dynamic"))(q, jax.device_put(x, sharding("d")))
    np.testing.assert_array_equal(actual, by_hand(True)(x, rounded(w)[0]))
