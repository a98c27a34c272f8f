"""Derivative rules of the user that ask what is differentiated: told the same as in float.

Weights and rows lie on the grid of int8, so that the quantized function is the float one, and so
are its gradients: any difference is one of the rules.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jqx

from ..arrays import on_device

K = 4
POLICY = jqx.presets.w8a8_dynamic()
TOLD: set = set()
"""What the rules below were told since it was last cleared."""


def is_zero(x):
    return isinstance(x, SymbolicZero)


def dense(x):
    return jnp.zeros(x.shape, x.dtype) if is_zero(x) else x


@jax.custom_vjp
def asking(w, x, n):
    """A product beside a sum of its rows; `n` is an integer."""
    y = x @ w
    return y * n.astype(y.dtype), y.sum()


def asking_forward(w, x, n):
    TOLD.add(("asking", w.perturbed, x.perturbed, n.perturbed))
    return asking(w.value, x.value, n.value), (w.value, x.value, n.value)


def asking_backward(residuals, cotangents):
    w, x, n = residuals
    TOLD.add(("asked", *map(is_zero, cotangents)))
    y, total = map(dense, cotangents)
    y = n.astype(y.dtype) * y + total
    return 2 * x.T @ y, 3 * y @ w.T, np.zeros(n.shape, jax.dtypes.float0)


asking.defvjp(asking_forward, asking_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor, w, x):
    return factor * asking(w, x, jnp.int32(3))[0]


def scaled_forward(factor, w, x):
    TOLD.add(("scaled", w.perturbed, x.perturbed))
    y, pull = jax.vjp(lambda w, x: asking(w, x, jnp.int32(3))[0], w.value, x.value)
    return factor * y, pull


def scaled_backward(factor, pull, y):
    w, x = pull(dense(y))
    return factor * w, x


scaled.defvjp(scaled_forward, scaled_backward, symbolic_zeros=True)


@jax.custom_jvp
def pushed(w, x):
    return x @ w


def pushed_rule(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    TOLD.add(("pushed", is_zero(dw), is_zero(dx)))
    return x @ w, 2 * x @ dense(dw) + 3 * dense(dx) @ w


pushed.defjvp(pushed_rule, symbolic_zeros=True)


def plain(w, x, **options):
    """A rule that asks nothing."""
    f = jax.custom_vjp(lambda w, x: x @ w)
    f.defvjp(
        lambda w, x: (x @ w, (w, x)),
        lambda residuals, y: (2 * residuals[1].T @ y, 3 * y @ residuals[0].T),
        **options,
    )
    return f(w, x)


def first(w, x):
    return asking(w, x, jnp.int32(2))[0]


def second(w, x):
    return asking(w, x, jnp.int32(2))[1]


def in_scan(f):
    return lambda w, x: lax.scan(lambda c, row: (c, f(w, row)), 0, jnp.stack([x, -x]))[1]


def carried(f):
    return lambda w, x: lax.scan(lambda c, _: (c / 64 + f(w, x), None), x * 0, None, length=2)[0]


def in_cond(f):
    return lambda w, x: lax.cond(x[0, 0] > 0, f, lambda w, x: f(w, -x), w, x)


def in_vmap(f):
    return lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, -x]))


def in_vmap_of_weights(f):
    return lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, -w]), x)


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "scan": in_scan,
    "carry": carried,
    "cond": in_cond,
    "remat": jax.checkpoint,
    "vmap": in_vmap,
    "vmap of weights": in_vmap_of_weights,
}
RULES = {
    "first of two": first,
    "second of two": second,
    "both of two": lambda w, x: sum(asking(w, x, jnp.int32(2))),
    "nested, with a static argument": functools.partial(scaled, 2.0),
    "jvp": pushed,
    "plain": plain,
    "optimize_remat": functools.partial(plain, optimize_remat=True),
}


def values(shape, seed):
    """Integers of which 127 is one of each row and column."""
    x = np.random.default_rng(seed).integers(-8, 9, shape)
    return on_device(x * (1 - np.eye(*shape, dtype=int)) + 127 * np.eye(*shape, dtype=int), float)


def gradients(f, argnums, w, x):
    """Returns the gradients of a function, and what its rules were told."""
    TOLD.clear()
    actual = jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums)(w, x)
    return actual, frozenset(TOLD)


def assert_alike(rule, around, argnums, **kwargs):
    def built():  # JAX traces each function once, and rules are told nothing the second time
        return AROUND[around](lambda w, x: RULES[rule](w, x))

    w, x = values((K, K), 0), values((K, K), 1)
    plan = jqx.make_plan(built(), POLICY)(w, x)
    assert len(plan.sites) >= 1
    np.testing.assert_array_equal(jqx.simulate(built(), plan, **kwargs)(w, x), built()(w, x))
    actual, told = gradients(jqx.simulate(built(), plan, **kwargs), argnums, w, x)
    expected, asked = gradients(built(), argnums, w, x)
    assert told == asked
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)], ids=["w", "x", "both"])
@pytest.mark.parametrize("rule", RULES)
def test_a_custom_rule_gets_the_perturbed_flags_of_float(rule, argnums):
    assert_alike(rule, "nothing", argnums)


@pytest.mark.parametrize("around", list(AROUND)[1:])
@pytest.mark.parametrize("rule", ["first of two", pytest.param("jvp", marks=pytest.mark.slow)])
def test_a_custom_rule_gets_perturbed_flags_inside_other_functions(rule, around):
    assert_alike(rule, around, 0)


EVERYWHERE = [
    (rule, around)
    for rule in RULES
    for around in AROUND
    # In float too JAX turns the result of this one (jax 0.10.2).
    if (rule, around) != ("optimize_remat", "vmap of weights")
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "around"), EVERYWHERE)
def test_every_custom_rule_gets_perturbed_flags_everywhere(rule, around):
    """Half of them where rows alone are differentiated, the others where weights are as well."""
    number = list(RULES).index(rule) + list(AROUND).index(around)
    assert_alike(rule, around, (1, (0, 1))[number % 2])


def test_rules_stay_where_contractions_run_on_integers():
    assert_alike("first of two", "nothing", 0, backward=jnp.float32)


def test_a_custom_rule_gets_perturbed_flags_in_forward_mode_under_jit_and_vmap():
    w, x = values((K, K), 0), values((K, K), 1)
    plan = jqx.make_plan(pushed, POLICY)(w, x)

    def moved(f):
        TOLD.clear()
        push = jax.jit(lambda f, dw: jax.jvp(lambda w: f(w, x), (w,), (dw,))[1], static_argnums=0)
        return jax.vmap(lambda dw: push(f, dw))(jnp.stack([w, -w])), frozenset(TOLD)

    (actual, told), (expected, asked) = moved(jqx.simulate(pushed, plan)), moved(pushed)
    np.testing.assert_array_equal(actual, expected)
    assert told == asked == {("pushed", False, True)}


@pytest.mark.parametrize("rule", ["first of two", "plain", "jvp"])
def test_a_rule_is_differentiated_again(rule):
    f = RULES[rule]
    w, x = values((K, K), 0) / 127, values((K, K), 1) / 127
    plan = jqx.make_plan(f, POLICY)(w, x)

    def curvature(f):
        slope = jax.grad(lambda w, x: (f(w, x) ** 2).sum(), 1)
        return jax.grad(lambda w, x: (slope(w, x) ** 2).sum())(w, x)

    expected = curvature(f)
    actual = curvature(jqx.simulate(f, plan))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
