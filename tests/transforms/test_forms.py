"""Every transform through every control-flow form, against quantization by hand, bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import on_device
from ..models.forms import (
    FORMS,
    LAYERS,
    POLICIES,
    UNTAKEN,
    WEIGHT,
    WHILES,
    K,
    act,
    by_hand,
    function,
    matmul,
    reference,
    rows,
    together,
    weights,
)

forms = pytest.mark.parametrize("name", FORMS)
BOTH = "weights and activations"
slow = pytest.mark.slow
policies = pytest.mark.parametrize("policy", [pytest.param("weights", marks=slow), BOTH])
MODES = {"eager": lambda *functions: lambda *args: [f(*args) for f in functions], "jit": together}
modes = pytest.mark.parametrize("mode", [pytest.param("eager", marks=slow), "jit"])
ways = pytest.mark.parametrize(
    ("policy", "mode"),
    [
        pytest.param("weights", "jit", marks=slow),
        pytest.param(BOTH, "eager", marks=slow),
        (BOTH, "jit"),
    ],
)
CUSTOM = ("custom_jvp", "custom_vjp")


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def plan_of(name, policy=BOTH):
    return jqx.make_plan(function(name), POLICIES[policy])(weights(), rows())


@pytest.mark.slow
def test_the_numbers_are_quantized_with_loss_and_exactly():
    w, x = weights(), rows()
    for name in FORMS:
        exact = function(name)(w, x)
        for policy in POLICIES:
            found = reference(name, policy)(w, x)
            with jax.enable_x64(True):
                wide = reference(name, policy)(*(on_device(np.float64(a)) for a in (w, x)))
            assert_same(jax.tree.map(np.float64, found), jax.tree.map(np.asarray, wide))
            pairs = zip(jax.tree.leaves(exact), jax.tree.leaves(found), strict=True)
            assert not all(np.array_equal(a, b) for a, b in pairs), name


@forms
def test_every_contraction_is_planned(name):
    plan = plan_of(name)
    assert plan.skipped == () and [weight.path for weight in plan.weights] == [""]
    assert len({site.address for site in plan.sites}) == len(plan.sites) > 0
    assert plan.weights[0].spec.granularity == jqx.per_axis(0, 2)


@pytest.mark.many
@forms
@modes
def test_calibration_returns_the_float_result_and_sees_every_activation(name, mode):
    plan = plan_of(name)

    def calibrated(w, x):
        out, stats = jqx.calibrate(function(name), plan)(w, x)
        return out, jqx.affines(plan, jqx.merge_stats(plan, stats, stats))

    (out, affines), expected = MODES[mode](calibrated, function(name))(weights(), rows())
    assert_same(out, expected)
    for affine in affines.values():
        np.testing.assert_array_equal(affine.scale, np.full_like(affine.scale, 0.25))


def observed(name):
    """The largest magnitudes that calibration sees of each activation."""
    spec = jqx.QSpec(jnp.int8)
    policy = jqx.Policy([jqx.Rule(weight=None, activation=spec)])
    plan = jqx.make_plan(function(name), policy)(weights(), rows())
    _, stats = jax.jit(jqx.calibrate(function(name), plan))(weights(), rows())
    seen = {key: (np.asarray(seen.largest), seen.observed) for key, seen in stats.items()}
    return plan, seen, stats


def largest_inputs(steps, w, x):
    """The largest magnitude that each layer of a chain sees."""
    w, x, seen = np.asarray(w), np.asarray(x), []  # of few bits: every sum is exact
    for i in steps:
        seen.append(float(np.abs(x).max()))
        x = np.clip(x @ w[i], -2, 2)
    return seen


def test_each_layer_of_a_scan_over_weights_has_statistics_of_its_own():
    own = largest_inputs([0, 1], weights(), rows())
    for name, shape, count in [
        ("scan_xs", (2,), [1, 1]),
        ("remat_in_scan", (2,), [1, 1]),
        ("while_in_scan", (2,), [1, 1]),
        ("scan_in_while", (2,), [1, 1]),
        ("stacks_in_scan", (2, 1), [[1], [1]]),
    ]:
        plan, found, stats = observed(name)
        ((largest, observations),) = found.values()
        np.testing.assert_array_equal(largest, np.reshape(own, (*shape, 1, 1)))
        np.testing.assert_array_equal(observations, count)
        decide = lambda s, plan=plan: jqx.affines(plan, jqx.merge_stats(plan, s, s))  # noqa: E731
        (affine,) = jax.jit(decide)(stats).values()
        scales = np.float32(own) / np.float32(127)
        np.testing.assert_array_equal(affine.scale, scales.reshape((*shape, 1, 1)))


def test_other_loops_merge_what_their_steps_see():
    for name, steps in [("scan_constant", [0, 0]), ("fori", [0, 0]), ("scan_carried", [1, 1])]:
        _, found, _ = observed(name)
        ((largest, observations),) = found.values()
        assert float(largest[0, 0]) == max(largest_inputs(steps, weights(), rows()))
        assert int(observations) == 2
    _, found, _ = observed("scan_in_scan")  # an outer loop merges the statistics of each layer
    ((largest, observations),) = found.values()
    assert largest.shape == (1, 1, 1) and observations.tolist() == [2]
    assert float(largest[0, 0, 0]) == max(largest_inputs([0, 0], weights(), rows()))


@pytest.mark.parametrize("name", UNTAKEN)
def test_a_branch_that_is_not_taken_leaves_nothing_and_has_no_scale(name):
    plan, found, stats = observed(name)
    counts = [int(np.min(observations)) for _, observations in found.values()]
    assert 0 in counts
    with pytest.raises(ValueError, match="never observed"):
        jqx.affines(plan, jqx.merge_stats(plan, stats, stats))


def test_scales_learned_for_each_layer_get_gradients_through_a_scan():
    spec = jqx.QSpec(jnp.int8, gradient=jqx.gradients.lsq)
    policy = jqx.Policy([jqx.Rule(weight=WEIGHT, activation=spec)])
    plan = jqx.make_plan(function("scan_xs"), policy)(weights(), rows())
    (key,) = plan.static_specs()
    w, x = weights(), rows()

    def loss(scales):
        affines = {key: jqx.calibrators.Affine(scales)}
        y, _ = jqx.simulate(function("scan_xs"), plan, affines)(w, x)
        return jnp.sum(y**2)

    one = lambda w, x: x @ w  # noqa: E731

    def unrolled(scales):
        y = x
        for i in range(LAYERS):
            affines = {":dot_general:lhs": jqx.calibrators.Affine(scales[i])}
            layer = jqx.make_plan(one, policy)(w[i], y)
            y = act(jqx.simulate(one, layer, affines)(w[i], y))
        return jnp.sum(y**2)

    scales = on_device([[[2.0**-7]], [[2.0**-6]]], np.float32)
    found, expected = together(jax.grad(loss), jax.grad(unrolled))(scales)
    assert np.all(np.asarray(expected) != 0)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.many
@forms
@ways
def test_what_is_simulated_is_what_is_quantized_by_hand(name, policy, mode):
    f = jqx.simulate(function(name), plan_of(name, policy), "dynamic")
    assert_same(*MODES[mode](f, reference(name, policy))(weights(), rows()))


@pytest.mark.many
@forms
@ways
def test_what_is_converted_is_what_is_quantized_by_hand(name, policy, mode):
    """Whether the weights are given as codes or in float."""
    plan, w, x = plan_of(name, policy), weights(), rows()
    f, q = jqx.convert(function(name), plan, "dynamic"), jqx.quantize_params(w, plan)
    assert isinstance(q, jqx.QTensor)
    ways = lambda q, w, x: f(q, x), lambda q, w, x: f(w, x)
    expected, *found = MODES[mode](lambda q, w, x: reference(name, policy)(w, x), *ways)(q, w, x)
    for out in found:
        assert_same(out, expected)


@pytest.mark.many
@forms
@pytest.mark.parametrize("transform", [jqx.simulate, jqx.convert])
def test_a_mapped_function_is_that_of_each_row(name, transform):
    f = transform(function(name), plan_of(name), "dynamic")

    def each(w, x):
        results = [reference(name, BOTH)(w, row) for row in x]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *results)

    assert_same(*together(jax.vmap(f, (None, 0)), each)(weights(), rows(2)))


@pytest.mark.many
@pytest.mark.parametrize(
    "name", [name for name in FORMS if FORMS[name] not in WHILES and name not in CUSTOM]
)
@policies
def test_gradients_of_what_is_simulated_are_those_of_what_is_quantized_by_hand(name, policy):
    f = jqx.simulate(function(name), plan_of(name, policy), "dynamic")

    def gradients(f):
        total = lambda w, x: sum(jnp.sum(y) for y in jax.tree.leaves(f(w, x)))  # noqa: E731
        return jax.grad(total, (0, 1))

    assert_same(*together(gradients(f), gradients(reference(name, policy)))(weights(), rows()))


@pytest.mark.parametrize("name", CUSTOM)
def test_the_derivative_rule_of_the_user_is_kept(name):
    """It doubles the derivative, and sees what the function sees: rounded weights, float rows."""
    f, w, x = jqx.simulate(function(name), plan_of(name), "dynamic"), weights(), rows()
    dw, dx = jax.jit(jax.grad(lambda w, x: f(w, x).sum(), (0, 1)))(w, x)
    on_grid = jnp.round(w * 4) / 4
    np.testing.assert_array_equal(dx, jnp.broadcast_to(2 * on_grid[0].sum(axis=1), x.shape))
    np.testing.assert_array_equal(dw[0], jnp.broadcast_to(2 * x.sum(axis=0)[:, None], w[0].shape))
    np.testing.assert_array_equal(dw[1], np.zeros_like(dw[1]))


def assert_by_hand(f, real, plan, w, x):
    """Simulated and converted, a function of a product is that of the product by hand."""

    @jax.jit
    def run(w, x):
        converted = jqx.convert(real, plan, "dynamic")(jqx.quantize_params(w, plan), x)
        expected = f(by_hand(True), jnp.round(w * 4) / 4, x)
        return expected, jqx.simulate(real, plan, "dynamic")(w, x), converted

    expected, simulated, converted = run(w, x)
    assert_same(simulated, expected)
    assert_same(converted, expected)
    return expected


def test_a_contraction_in_the_condition_of_a_loop_is_no_site_of_its_body():
    """On the grid of activations every row is zero: the loop would end before its first step."""
    policy = "weights and activations"

    def f(dot, w, x):
        layer = jax.jit(lambda x: dot(x, w[0]) + 1)
        goes_on = lambda s: (s[0] < 1) & (s[1][0] @ s[1][0] > 1 / 16)  # noqa: E731
        return jax.lax.while_loop(goes_on, lambda s: (s[0] + 1, layer(s[1])), (0, x))[1]

    real, w = functools.partial(f, matmul), weights()
    x = on_device(np.full((2, K), 1 / 8, np.float32))
    plan = jqx.make_plan(real, POLICIES[policy])(w, x)
    assert [skip.reason for skip in plan.skipped] == ["it is in the condition of a while loop"]
    expected = assert_by_hand(f, real, plan, w, x)
    assert not np.array_equal(expected, x)


def test_what_is_differentiated_inside_is_quantized():
    """The backward product is a site too: it quantizes the cotangent, which is on the grid."""

    def f(dot, w, x):
        value, gradient = jax.value_and_grad(lambda x: dot(x, w[0]).sum())(x)
        return value, x - gradient

    real, w, x = functools.partial(f, matmul), weights(), rows()
    plan = jqx.make_plan(real, POLICIES[BOTH])(w, x)
    assert len(plan.sites) == 2 and plan.skipped == ()
    expected = assert_by_hand(f, real, plan, w, x)
    assert not np.array_equal(expected[1], jax.jit(real)(w, x)[1])
