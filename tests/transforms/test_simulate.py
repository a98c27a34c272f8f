import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.gradients import lsq, ste, stochastic
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from ..arrays import on_device
from ..models.transforms import (
    close,
    mlp,
    mlp_params,
    normal,
    plan_of,
    product,
    relative,
)

X, PARAMS = normal(3, 7, 16), mlp_params()


def calibrated(plan, params):
    return jax.jit(lambda p: jqx.affines(plan, jqx.calibrate(mlp, plan)(p, X)[1]))(params)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_given_scales_are_used(wrap):
    w = jnp.eye(4)
    plan = plan_of(product, w8a8(weight={"qtype": jnp.int16}), w, X[:, :4])
    affines = {":dot_general:lhs": jqx.calibrators.Affine(jnp.full((1, 1), 0.5))}
    out = wrap(jqx.simulate(product, plan, affines))(w, X[:, :4])
    assert close(out, jnp.round(X[:, :4] * 2) / 2)


def test_every_use_of_a_weight_sees_the_rounded_one():
    def f(w, x):
        return x @ w, w

    w = normal(0, 16, 4)
    plan = plan_of(f, w8a16(weight={"qtype": jnp.int4}), w, X)
    grid = jqx.QTensor.quantize(w, plan.weights[0].spec).dequantize()
    out, returned = jqx.simulate(f, plan)(w, X)
    assert jnp.array_equal(returned, grid) and jnp.array_equal(out, X @ grid)


def test_gradients_reach_given_scales():
    def f(w, x):
        return (x @ w).sum()

    w, x = jnp.ones((2, 1)), jnp.array([[3.0, 0.25]])
    plan = plan_of(f, w8a8(), w, x)

    def loss(affines):
        return jqx.simulate(f, plan, affines)(w, x)

    affines = {":dot_general:lhs": jqx.calibrators.Affine(jnp.full((1, 1), 0.01))}
    gradient = jax.grad(loss)(affines)[":dot_general:lhs"].scale
    assert close(gradient, jnp.full((1, 1), 127.0))  # 3.0 is clipped to 127 * scale, 0.25 is inside


def test_an_output_is_rounded_to_its_grid():
    rule = jqx.Rule(output=jqx.QSpec(jnp.int4, dynamic=True))
    out = jqx.simulate(product, plan_of(product, jqx.Policy([rule]), jnp.eye(16), X))(
        jnp.eye(16), X
    )
    assert len(np.unique(np.asarray(out))) <= 15


def test_asymmetric_activations_are_simulated():
    fields = {"qtype": jnp.uint8, "symmetric": False, "calibrator": jqx.calibrators.minmax}
    plan = plan_of(mlp, w8a8(activation=fields), PARAMS, X)
    affines = calibrated(plan, PARAMS)
    assert affines["v:dot_general:lhs"].zero_point == 0  # a relu's range starts at zero
    assert relative(jqx.simulate(mlp, plan, affines)(PARAMS, X), mlp(PARAMS, X)) < 0.02


def twins(params, x):
    """Two weights, and two activations, that may be equal."""
    return x @ params["a"], (2 * x / 2) @ params["b"]


@dataclasses.dataclass(frozen=True)
class Noise:
    """An estimator of a user: uniform noise of one step in place of the rounding."""

    needs_key = True

    def surrogate(self, x, low, high, levels, key):
        u = jax.random.uniform(key, x.shape, x.dtype, minval=-0.5, maxval=0.5)
        return jnp.clip(x, low, high) + (high - low) / (levels - 1) * u


drawing = pytest.mark.parametrize("gradient", [stochastic, Noise()], ids=str)
KEY = jax.random.key(7)


roles = pytest.mark.parametrize("role", ["weight", "activation", "output"])


def noisy(gradient, role="weight"):
    """Parameters of `twins`, equal to each other, their plan, and its simulation by a key."""
    fields = {"qtype": jnp.int4, "gradient": gradient}
    policies = {
        "weight": w8a16(weight=fields),
        "activation": w8a8_dynamic(activation=fields),
        "output": jqx.Policy([jqx.Rule(output=jqx.QSpec(dynamic=True, **fields))]),
    }
    params = {"a": normal(0, 16, 24), "b": normal(0, 16, 24)}
    plan = plan_of(twins, policies[role], params, X)

    def simulated(params, x, key):
        return jqx.simulate(twins, plan, key=key)(params, x)

    return params, plan, simulated


@pytest.mark.parametrize("gradient", [ste, lsq], ids=str)
@roles
def test_a_key_that_nothing_draws_from_is_refused(gradient, role):
    params, _, simulated = noisy(gradient, role=role)
    with pytest.raises(ValueError, match="`key` has no effect"):
        simulated(params, X, KEY)


@drawing
def test_a_key_is_used_by_stochastic_specs_and_ignored_by_others(gradient):
    weight = jqx.QSpec(jnp.int4, gradient=gradient)
    rules = [jqx.Rule("a", weight=weight), jqx.Rule("b", weight=jqx.QSpec(jnp.int4))]
    params, *_ = noisy(gradient)
    plan = plan_of(twins, jqx.Policy(rules), params, X)
    a, b = jqx.simulate(twins, plan, key=KEY)(params, X)
    assert not jnp.array_equal(a, b)
    assert jnp.array_equal(b, X @ jqx.quantize_params(params, plan)["b"].dequantize())


@drawing
@roles
def test_noise_is_that_of_the_key_which_is_needed_and_of_the_place(gradient, role):
    params, _, simulated = noisy(gradient, role=role)
    with pytest.raises(ValueError, match="no key is given"):
        simulated(params, X, None)
    first, again, other = (simulated(params, X, key) for key in (KEY, KEY, jax.random.key(8)))
    for i in range(2):
        assert jnp.array_equal(first[i], again[i])
        assert not jnp.array_equal(first[i], other[i])
    assert not jnp.array_equal(first[0], first[1])


@drawing
def test_noise_under_jit_and_scan_is_that_of_eager_calls(gradient):
    params, _, simulated = noisy(gradient)
    keys = jax.random.split(KEY, 3)
    looped = [simulated(params, X, key) for key in keys]
    jitted = jax.jit(simulated)
    _, scanned = jax.lax.scan(lambda c, key: (c, simulated(params, X, key)), 0, keys)
    for step, expected in enumerate(looped):
        for i in range(2):
            assert close(jitted(params, X, keys[step])[i], expected[i])
            assert close(scanned[i][step], expected[i])


def test_stochastic_weights_are_neighbours_of_theirs_and_right_on_average():
    """Each is one of the two numbers around it, up with the probability of its place between."""
    params, plan, simulated = noisy(stochastic)
    identity = jnp.eye(16)
    keys = jax.random.split(KEY, 400)
    drawn = jax.jit(jax.vmap(lambda key: simulated(params, identity, key)[0]))(keys)
    scale = np.asarray(jqx.quantize_params(params, plan)["a"].scale)
    off = (np.asarray(drawn) - np.asarray(params["a"])) / scale
    assert np.max(np.abs(off)) < 1 + 2.0**-20
    # The standard error of a mean of 400 draws is at most 0.5 / 20 steps; 384 weights.
    assert np.max(np.abs(off.mean(0))) < 5 * 0.025


def test_noise_is_uniform_over_a_step():
    params, plan, simulated = noisy(Noise())
    scale = jqx.quantize_params(params, plan)["a"].scale
    noise = (simulated(params, jnp.eye(16), KEY)[0] - params["a"]) / scale
    inside = jnp.abs(params["a"] / scale) < 6.9  # the largest of a column may be clipped at 7
    noise = np.asarray(noise)[np.asarray(inside)]
    assert np.max(np.abs(noise)) <= 0.5 + 2.0**-20
    assert abs(noise.mean()) < 5 * np.sqrt(1 / 12 / noise.size)
    assert abs(noise.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / noise.size)


@pytest.mark.parametrize("granularity", [jqx.per_tensor(), jqx.per_channel(), jqx.per_group(8)])
@pytest.mark.parametrize("qtype", [jnp.int4, jqx.numerics.int3], ids=str)
def test_a_learned_scale_gets_the_gradient_of_lsq(qtype, granularity):
    """Esser et al. 2020, equations 3 and 5, with g = 1 / sqrt(N Q_P), in float64."""

    w, cotangent = np.asarray(normal(0, 16, 6)), np.asarray(normal(1, 7, 6), np.float64)
    policy = w8a16(weight={"qtype": qtype, "granularity": granularity, "gradient": lsq})
    plan = plan_of(product, policy, w, X)
    spec = plan.weights[0].spec
    shape = spec.granularity.scale_shape(w.shape)
    high = 2.0 ** (jqx.numerics.format_of(qtype).bits - 1) - 1
    scale = np.linspace(0.15, 0.45, int(np.prod(shape)), dtype=np.float32).reshape(shape)

    def loss(affines):
        return (
            jqx.simulate(product, plan, affines)(w, X) * on_device(cotangent, jnp.float32)
        ).sum()

    affines = {":weight": jqx.calibrators.Affine(on_device(scale))}
    actual = jax.jit(jax.grad(loss))(affines)[":weight"].scale

    blocks = [n // m for n, m in zip(w.shape, shape, strict=True)]
    s = np.kron(scale, np.ones(blocks)).astype(np.float64)
    v = w.astype(np.float64) / s
    inside = (v >= -high - 1) & (v <= high)
    slope = np.where(inside, np.round(v) - v, np.where(v < 0, -high - 1, high))
    assert not inside.all() and inside.any()
    ds = slope * (np.asarray(X, np.float64).T @ cotangent)
    for axis, size in enumerate(blocks):
        ds = np.add.reduceat(ds, np.arange(0, w.shape[axis], size), axis)
    assert close(actual, ds / np.sqrt(np.prod(blocks) * high), terms=96)


def test_learned_scales_of_an_activation_and_a_weight_both_get_gradients():
    fields = {"qtype": jnp.int4, "gradient": lsq}
    plan = plan_of(mlp, w8a8(weight=fields, activation=fields), PARAMS, X)
    affines = calibrated(plan, PARAMS)
    q = jqx.quantize_params(PARAMS, plan)
    affines |= {f"{n}:weight": jqx.calibrators.Affine(q[n].scale) for n in ("w", "v")}

    @jax.jit
    def loss(affines):
        return jnp.square(jqx.simulate(mlp, plan, affines)(PARAMS, X) - mlp(PARAMS, X)).mean()

    gradient = jax.grad(loss)(affines)
    assert set(gradient) == set(affines)
    for key in affines:
        assert gradient[key].scale.shape == affines[key].scale.shape
        assert jnp.all(jnp.isfinite(gradient[key].scale)) and jnp.any(gradient[key].scale != 0)
    step = jax.tree.map(lambda a, g: a - 0.002 * g, affines, gradient)
    assert loss(step) < loss(affines)
