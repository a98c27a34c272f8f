"""Plans speak of live code: what no result and no effect needs is no part of them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jqx

from ..models.transforms import eighths, normal
from .sources import POLICY, assert_same, rounded

W, X = normal(0, 8, 8) / 4, eighths(1, 8, 8)


@jax.custom_vjp
def own(w, x):
    return x @ w, x @ x


own.defvjp(
    lambda w, x: (own(w, x), (w, x)), lambda kept, ct: (kept[1].T @ ct[0], ct[0] @ kept[0].T)
)


@jax.custom_jvp
def twice(w, x):
    return x @ w, x @ x


twice.defjvp(lambda primals, tangents: (twice(*primals), (tangents[1] @ primals[0], tangents[1])))


def scanned(w, x):
    (a, _), _ = lax.scan(lambda c, _: ((c[0] @ w, c[1] @ w @ w), c[0] @ w), (x, x), None, length=2)
    return a


def looped(w, x):
    """A carried value that nothing needs, and a product that no step hands on."""

    def body(carry):
        i, a, b = carry
        _ = a @ w
        return i + 1, a @ w, b @ w @ w

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, x, x))[1]


def looped_in_a_scan(w, x):
    return lax.scan(lambda c, _: (looped(w, c), None), x, None, length=1)[0]


def conditional(w, x):
    branches = lambda w, x: (x @ w, x @ w @ w), lambda w, x: (x @ w, x)
    return lax.cond(x[0, 0] > 0, *branches, w, x)[0]


LIVE = {
    "at top level": (lambda w, x: [x @ w, x @ w @ w][0], 1),
    "jit": (lambda w, x: jax.jit(lambda w, x: (x @ w, x @ x))(w, x)[0], 1),
    "an operand of jit": (lambda w, x: jax.jit(lambda w, x, y: x @ w)(w, x, x @ w @ w), 1),
    "an operand of a branch": (
        lambda w, x: lax.cond(x[0, 0] > 9, lambda y, z: z, lambda y, z: z @ w, x @ w @ w, x),
        1,
    ),
    "scan": (scanned, 1),
    "while": (looped, 1),
    "while in a scan": (looped_in_a_scan, 1),
    "cond": (conditional, 2),
    "checkpoint": (lambda w, x: jax.checkpoint(lambda w, x: (x @ w, x @ x))(w, x)[0], 1),
    "custom_vjp": (lambda w, x: own(w, x)[0], 1),
    "custom_jvp": (lambda w, x: twice(w, x)[0], 1),
    "a condition that counts": (
        lambda w, x: lax.while_loop(lambda c: c[1].sum() < -9, lambda c: (c[0], c[1] @ w), (x, x)),
        1,
    ),
}


@pytest.mark.parametrize("name", LIVE)
def test_dead_contractions_are_in_no_plan_and_the_result_is_as_before(name):
    f, count = LIVE[name]
    plan = jqx.make_plan(f, POLICY)(W, X)
    assert (len(plan.sites), plan.skipped) == (count, ())
    assert f"{count} of {count} contractions quantized" in str(plan)
    expected = jax.jit(f)(rounded(W), X)
    assert_same(jax.jit(jqx.convert(f, plan))(jqx.quantize_params(W, plan), X), expected)
    assert_same(jax.jit(jqx.simulate(f, plan))(W, X), expected)
    assert_same(jqx.calibrate(f, plan)(W, X)[0], f(W, X))


@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp", "checkpoint", "scan", "at top level"])
def test_gradients_are_those_of_the_function_as_it_stands(name):
    f, _ = LIVE[name]
    loss = lambda f: lambda w, x: jnp.sum(f(w, x) ** 2)  # noqa: E731
    w = jnp.clip(W, -1, 1)
    plan = jqx.make_plan(f, POLICY)(w, X)
    found = jax.jit(jax.grad(loss(jqx.simulate(f, plan)), (0, 1)))(w, X)
    assert_same(found, jax.jit(jax.grad(loss(f), (0, 1)))(rounded(w), X))


def test_effects_stay(capsys):
    def f(w, x):
        jax.debug.print("seen {}", (x @ w).shape[0] + 0 * (x @ w).sum())
        seen.append(0)
        return x @ w

    seen = []
    plan = jqx.make_plan(f, POLICY)(W, X)
    assert len(plan.sites) == 2  # the product that is printed, and the result
    jqx.convert(f, plan)(W, X)
    jax.effects_barrier()
    assert "seen 8.0" in capsys.readouterr().out


def test_a_dead_operation_on_a_weight_is_no_reason_to_refuse_it():
    f = lambda w, x: [x @ w, jnp.linalg.norm(w)][0]  # noqa: E731
    q = jqx.quantize_params(W, jqx.make_plan(f, POLICY)(W, X))
    assert_same(jqx.convert(f, POLICY)(q, X), f(rounded(W), X))


def looping(p, x, change):
    """Multiplies by a weight that is carried, and that each step changes."""

    def body(carry):
        i, w, x = carry
        return i + 1, change(w), x @ w @ p["v"]

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, p["w"], x @ p["w"]))[2]


def test_a_weight_that_a_loop_carries_and_changes_is_refused_where_it_is_planned_or_runs():
    params = {"v": W, "w": W.T, "u": W}
    for change in (lambda w: w, lambda w: w * 0.5, lambda w: w.T.T):
        plan = jqx.make_plan(looping, POLICY)(params, X, change)
        assert {weight.path for weight in plan.weights} == {"v", "w"}
        on_grid = {**params, "v": rounded(W), "w": rounded(W.T)}
        q = jqx.quantize_params(params, plan)
        assert_same(jqx.convert(looping, plan)(q, X, change), looping(on_grid, X, change))
    with pytest.raises(NotImplementedError, match=r"the weight 'w', .* reaches `tanh`") as info:
        jqx.make_plan(looping, POLICY)(params, X, jnp.tanh)
    text = str(info.value)
    assert "test_live.py" in text and "jqx.Rule('w')" in text and "'v'" not in text
    assert isinstance(info.value, ValueError)
    spared = jqx.Policy([jqx.Rule("w"), *POLICY.rules])
    plan = jqx.make_plan(looping, spared)(params, X, jnp.tanh)
    assert [weight.path for weight in plan.weights] == ["v"]


def swapped(w, x):
    """A carried array becomes a weight."""
    return lax.fori_loop(0, 2, lambda i, c: (w[i], c[1] @ c[0]), (jnp.eye(8), x))[1] @ w[0]


AS_CONVERT = {
    "an array that becomes a weight": (swapped, (2, 8, 8)),
    "a weight that becomes another": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: (w[i], c[1] @ c[0]), (w[1], x))[1] @ w[0],
        (2, 8, 8),
    ),
    "a weight that is turned": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: (c[0].T, c[1] @ c[0]), (w, x))[1] @ w,
        (8, 8),
    ),
    "branches of one format": (
        lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda: w, lambda: -w) @ w,
        (8, 8),
    ),
    "a branch": (lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda: w, lambda: w.T) @ w, (8, 8)),
    "a branch and a sum": (
        lambda w, x: x @ w + lax.cond(x[0, 0] > 0, lambda: w, lambda: w.T),
        (8, 8),
    ),
    "steps handed out": (lambda w, x: lax.scan(lambda c, w: (c @ w, w), x, w)[1][0] @ x, (2, 8, 8)),
    "a condition": (
        lambda w, x: lax.while_loop(lambda c: (c @ w).sum() > 9, jnp.cos, x @ w),
        (8, 8),
    ),
    "a sum in a condition": (
        lambda w, x: lax.while_loop(lambda c: (c + w).sum() > 9, jnp.cos, x @ w),
        (8, 8),
    ),
    "a selection": (lambda w, x: x @ w @ jnp.where(x[0, 0] > 0, w, -w), (8, 8)),
    "written to": (lambda w, x: x @ w @ lax.dynamic_update_slice(w, x[:2], (0, 0)), (8, 8)),
    "written": (lambda w, x: x @ w @ lax.dynamic_update_slice(x, w[:2], (0, 0)), (8, 8)),
    "relu": (lambda w, x: x @ w @ jax.nn.relu(w), (8, 8)),
    "another gather": (lambda w, x: x @ w + w[jnp.arange(8), jnp.arange(8)][None], (8, 8)),
    "unstacked": (lambda w, x: x @ jnp.stack([w[0], w[1]])[1] @ w[0], (2, 8, 8)),
    "returned": (lambda w, x: (x @ w, w.T), (8, 8)),
    "padded": (lambda w, x: x @ w @ jnp.pad(w, ((0, 0), (0, 1))), (8, 8)),
}


@pytest.mark.parametrize("name", AS_CONVERT)
def test_what_convert_refuses_is_refused_where_it_is_planned_and_nothing_else(name):
    f, shape = AS_CONVERT[name]
    w = normal(0, *shape) / 4
    plan = jqx.make_plan(f, POLICY, unsupported="dequantize")(w, X)
    q = jqx.quantize_params(w, plan)
    try:
        jax.eval_shape(jqx.convert(f, plan), q, X)
    except NotImplementedError:
        with pytest.raises(NotImplementedError, match="the weight '', which the policy quantizes"):
            jqx.make_plan(f, POLICY)(w, X)
    else:
        assert jqx.make_plan(f, POLICY)(w, X) == plan
