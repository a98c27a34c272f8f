"""Delayed scales: what the state of training holds after steps, through transforms and forms."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jqx
from jqx.recipes import Product, Products, Rounded

from ..arrays import normal

RECIPE = jqx.recipes.fp8_delayed(history=3)
X, W = normal(0, 8, 32), normal(1, 3, 32, 32) / 6


def trained(f, *args, recipe=RECIPE):
    """The gradients of weights and state, jitted, and the state before the first step."""
    plan = jqx.make_plan(f, recipe.policy)(*args)
    run = jax.jit(jax.grad(jqx.train(f, plan, recipe), (0, 1)))
    return run, jqx.train_state(plan, recipe)


def largest(x):
    return np.float32(np.abs(np.asarray(x)).max())


def rounded(x, largest, dtype):
    """What NumPy makes of an operand with a scale for a largest magnitude; it saturates."""
    high = np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.float32(largest) / high
    codes = np.clip(np.asarray(x, "f4") / scale, -high, high).astype(dtype)
    return codes.astype("f4").astype("f8") * scale


def test_each_step_rounds_with_the_largest_magnitude_of_the_steps_before():
    """With magnitudes that change from step to step, beside NumPy products."""
    coefficients = normal(2, 8, 32)
    f = lambda w, x, c: jnp.sum((x @ w) * c)  # noqa: E731
    run, state = trained(f, W[0], X, coefficients)
    keys = dict(zip(("x", "w", "dy"), state, strict=True))
    seen = {name: np.zeros(3, "f4") for name in keys}
    for factor in (1, 4, 0.5, 0.25, 8):
        operands = {"x": X * factor, "w": W[0] / factor, "dy": coefficients * factor}
        gradient, state = run(operands["w"], state, operands["x"], operands["dy"])
        used = {name: seen[name].max() or largest(x) for name, x in operands.items()}
        x = rounded(operands["x"], used["x"], ml_dtypes.float8_e4m3fn)
        dy = rounded(operands["dy"], used["dy"], ml_dtypes.float8_e5m2)
        exact = x.T @ dy
        np.testing.assert_allclose(gradient, exact, rtol=0, atol=2e-6 * np.abs(exact).max())
        for name, operand in operands.items():
            seen[name] = np.array([largest(operand), *seen[name][:-1]])
            assert (state[keys[name]] == seen[name]).all()


def loss_of(hidden):
    return lambda w, x: jnp.mean(hidden(w, x) ** 2)


FORMS = {
    "scan over weights": loss_of(
        lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]
    ),
    "one weight in all steps": loss_of(
        lambda w, x: lax.scan(lambda h, _: (3 * jnp.tanh(h @ w[0]), None), x, None, length=3)[0]
    ),
    "remat": loss_of(jax.checkpoint(lambda w, x: jnp.tanh(x @ w[0]))),
    "members": loss_of(lambda w, x: jax.vmap(lambda row: jnp.tanh(row @ w[0]))(x)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_history_is_the_maximum_over_the_uses_of_a_site(name):
    f = FORMS[name]
    run, state = trained(f, W, X)
    _, state = run(W, state, X)
    hidden, maxima = np.asarray(X), []
    for w in W if name == "scan over weights" else [W[0]] * 3:
        maxima.append(largest(hidden))
        hidden = np.tanh(hidden @ np.asarray(w)) * (3 if "all steps" in name else 1)
    (lhs,) = (x for key, x in state.items() if key.endswith("lhs"))
    (rhs,) = (x for key, x in state.items() if key.endswith("rhs"))
    if name == "scan over weights":
        np.testing.assert_allclose(lhs[:, 0], maxima, rtol=0.05)  # operands are rounded
        assert rhs[:, 0].tolist() == [largest(w) for w in W]
    else:
        steps = maxima if "all steps" in name else maxima[:1]
        np.testing.assert_allclose(lhs[0], max(steps), rtol=0.05)
        assert rhs[0] == largest(W[0])
    assert (lhs[..., 1:] == 0).all()


def test_a_branch_that_is_not_taken_and_a_skipped_step_leave_no_trace():
    def f(w, x, takes):
        return jnp.sum(lax.cond(takes, lambda: x @ w[0], lambda: x) @ w[1])

    run, state = trained(f, W, X, True)
    _, state = run(W, state, X, True)
    _, after = run(W, state, 2 * X, False)
    changed = [key for key in state if (after[key] != state[key]).any()]
    assert len(changed) == 3  # those of the product that ran
    assert len(state) == 6

    for bad in (jnp.inf, jnp.nan):
        _, after = run(W, state, X.at[0, 0].set(bad), True)
        for old, new in zip(state.values(), after.values(), strict=True):
            assert np.isfinite(new).all()
            assert (new[..., 1:] == old[..., :-1]).all() or (new == old).all()
        gradient, _ = run(W, after, X, True)
        assert np.isfinite(gradient).all()


def test_the_maximum_of_states_of_micro_batches_is_the_state_of_the_batch():
    """For a sum of losses, whose gradients are those of the batch."""
    f = lambda w, x: jnp.sum(x @ w[0])  # noqa: E731
    run, state = trained(f, W, X)
    _, state = run(W, state, X)
    _, whole = run(W, state, 2 * X)
    states = [run(W, state, part)[1] for part in np.split(2 * np.asarray(X), 4)]
    merged = jax.tree.map(lambda *parts: np.maximum.reduce(parts), *states)
    assert merged.keys() == whole.keys()
    assert all((merged[key] == whole[key]).all() for key in whole)


def test_outer_vmap_and_devices_take_the_maximum():
    f = loss_of(lambda w, x: jnp.tanh(x @ w[0]))
    run, state = trained(f, W, X)
    plan = jqx.make_plan(f, RECIPE.policy)(W, X)
    step = jqx.train(f, plan, RECIPE)
    _, expected = run(W, state, X)

    members = lambda w, s, x: jax.vmap(lambda row: step(w, s, row[None]))(x).mean()  # noqa: E731
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    specs = (P(), P(), P("d"))
    parts = jax.shard_map(
        lambda w, s, x: lax.pmean(step(w, s, x), "d"), mesh=mesh, in_specs=specs, out_specs=P()
    )
    inside = jax.shard_map(jax.grad(step, (0, 1)), mesh=mesh, in_specs=specs, out_specs=P())
    for gradients in (jax.grad(members, (0, 1)), jax.grad(parts, (0, 1)), inside):
        _, new = jax.jit(gradients)(W, state, X)
        for key, history in expected.items():
            if not key.endswith("out"):  # gradients of means of parts have other sizes
                assert (new[key] == history).all()
            else:
                assert new[key][0] > 0

    unchecked = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    with pytest.raises(NotImplementedError, match="check_vma=True"):
        unchecked(W, state, X)


def test_a_function_with_shard_map_inside_takes_the_maximum_over_devices():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def body(w, x):
        return jnp.tanh(x @ w[0])

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    run, state = trained(loss_of(mapped), W, X)
    _, new = run(W, state, X)
    run, state = trained(loss_of(body), W, X)
    _, expected = run(W, state, X)
    for a, b in zip(new.values(), expected.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.1)
        assert a[0] > 0


E4M3 = jqx.QSpec("float8_e4m3fn", jqx.per_tensor())
D3, D4 = Rounded(E4M3, history=3), Rounded(E4M3, history=4)


def test_histories_that_make_no_sense_are_refused():
    f = lambda w, x: jnp.sum(x @ w)  # noqa: E731
    plan = jqx.make_plan(f, RECIPE.policy)(W[0], X)
    step = jqx.train(f, plan, RECIPE)
    fp8 = jqx.recipes.fp8()
    cases = [
        (lambda: Rounded("float8_e4m3fn:channel", history=3), "one scale, rounded to nearest"),
        (lambda: Rounded("nvfp4", history=3), "one scale, rounded to nearest"),
        (lambda: Rounded(E4M3, history=-1), "`history` is out of range"),
        (lambda: Product(D3, D3, hadamard=16), "without a Hadamard transform"),
        (lambda: Products((D3, D3), (D3, D3), (D4, D3)), "histories of different lengths"),
        (lambda: step(W[0], {}, X), "the state is not that of the plan"),
        (lambda: jqx.train_state(plan, fp8), "other products"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
