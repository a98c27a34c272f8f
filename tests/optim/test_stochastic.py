"""Parameters in bfloat16: sums that are right in the mean, and updates that give exactly them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jqx
import jqx.optim

from ..arrays import assert_same, normal, on_device

pytestmark = pytest.mark.usefixtures("as_users_write")

BF16 = jnp.bfloat16


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def rounded(updates, params, key):
    """The parameters after an update, as optax adds it up, and jqx under any promotion."""
    tx = jqx.optim.stochastic_bf16(optax.sgd(1.0), key)

    @jax.jit
    def step(grads, params):
        with jax.numpy_dtype_promotion("strict"):
            updates, _ = tx.update(grads, tx.init(params), params)
            added = jqx.optim.apply_updates(params, updates)
        return optax.apply_updates(params, updates), added

    by_optax, by_jqx = step(-updates, params)
    assert by_optax.dtype == by_jqx.dtype == BF16
    np.testing.assert_array_equal(wide(by_optax), wide(by_jqx))
    return wide(by_optax)


def neighbours(x):
    """The bfloat16 numbers below and above, or `x` itself twice."""
    bits = np.float32(x).view(np.uint32)
    cut = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    next_one = ((bits & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    return cut, np.where(bits & 0xFFFF, next_one, cut)


def test_a_sum_becomes_one_of_its_neighbours_whatever_the_sizes():
    """Also where the update is much larger or smaller than the parameter, or nearly cancels it."""
    rng, n = np.random.default_rng(0), 1 << 14
    params = (rng.standard_normal(n) * 2.0 ** rng.integers(-30, 30, n)).astype(BF16)
    cancelling = 1 + rng.choice([-1, 1], n) * 2.0 ** -rng.integers(1, 15, n)
    updates = [
        rng.standard_normal(n) * 2.0 ** rng.integers(-60, 30, n),
        -params.astype(np.float64) * cancelling,
        np.zeros(n),
    ]
    params = np.concatenate([params] * 3)
    updates = np.concatenate(updates).astype(np.float32)
    total = params.astype(np.float32) + updates
    low, high = neighbours(total)
    found = rounded(on_device(updates), on_device(params), 0)
    assert ((found == low) | (found == high)).all()
    assert (found == low).any() and (found == high)[low != high].any()
    np.testing.assert_array_equal(found[2 * n :], params[2 * n :].astype(np.float64))


def test_a_sum_that_cancels_all_but_a_few_bits_stays_right_in_the_mean():
    params = on_device(np.ones(1 << 16), BF16)
    total = 3 * 2.0**-24
    found = rounded(jnp.full(1 << 16, np.float32(-1 + total)), params, 1)
    assert set(found) <= {0.0, 2.0**-22}
    assert abs(found.mean() - total) < 3 * found.std() / 2**8


def test_draws_are_right_in_the_mean_within_three_standard_errors():
    draws, updates = 4096, np.float32([1e-3, -2e-3, 0.7, 1e-9, 3.7e-3, -1.0000001])
    params = np.float32([1.0, -0.3, 100.0, 2.0, 0.004, 1.0]).astype(BF16)
    grid = on_device(np.tile(updates, (draws, 1))), on_device(np.tile(params, (draws, 1)))
    found = rounded(*grid, jax.random.key(5))
    low, high = neighbours(params.astype(np.float32) + updates)
    total = (params.astype(np.float32) + updates).astype(np.float64)
    deviation = np.sqrt((total - low) * (high - total))
    assert (np.abs(found.mean(0) - total)[:5] <= 3 * deviation[:5] / np.sqrt(draws)).all()


def test_a_small_constant_update_moves_weights_by_its_sum():
    """1,000 updates of 1e-4 of the weight; rounded to nearest they are all lost."""
    params = normal(0, 100_000).astype(BF16)
    grads = -1e-4 * params.astype(jnp.float32)

    def moved(tx):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (jqx.optim.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=1000)[0][0]

    nearest = optax.sgd(1.0)
    stochastic, dropped = jax.jit(
        lambda: (moved(jqx.optim.stochastic_bf16(nearest, 1)), moved(nearest))
    )()
    assert abs((wide(stochastic) / wide(params) - 1).mean() - 0.1) < 0.001
    assert (dropped == params).all()


def test_the_same_key_gives_the_same_bits():
    params = {"a": normal(0, 64).astype(BF16), "b": normal(0, 64).astype(BF16)}
    grads = jax.tree.map(lambda x: 1e-3 * jnp.cos(x.astype(jnp.float32)), params)

    @jax.jit
    def two_steps(state):
        tx = jqx.optim.stochastic_bf16(optax.sgd(1.0))
        first, state = tx.update(grads, state, params)
        return first, tx.update(grads, state, params)[0]

    init = [jqx.optim.stochastic_bf16(optax.sgd(1.0), key).init(params) for key in (0, 1)]
    init += [jqx.optim.stochastic_bf16(optax.sgd(1.0), jax.random.key(0)).init(params)]
    first, other, again = map(two_steps, init)
    assert_same(first, again)
    differing = [(first, other), (first[0], first[1]), (first[0]["a"], first[0]["b"])]
    for a, b in differing:
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        assert any((x != y).any() for x, y in pairs)


def test_a_state_may_be_donated_and_begun_again():
    params, key = normal(0, 8).astype(BF16), jax.random.key(3)
    tx = jqx.optim.stochastic_bf16(optax.adam(1e-3), key)
    update = jax.jit(tx.update, donate_argnums=1)
    first = update(params, tx.init(params), params)
    assert_same(update(params, tx.init(params), params), first)
    assert jax.random.uniform(key) >= 0  # the key of the user is there still


def test_the_transformation_sees_float32_and_other_parameters_are_left_to_it():
    params = {"half": jnp.ones(4, BF16), "full": jnp.ones(4), "none": None}
    tx = jqx.optim.stochastic_bf16(optax.adamw(1e-3, weight_decay=0.1))
    state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(state.inner_state[0].mu)} == {jnp.dtype("float32")}
    grads = {"half": jnp.ones(4, BF16), "full": jnp.ones(4), "none": None}
    updates, _ = tx.update(grads, state, params)
    plain = optax.adamw(1e-3, weight_decay=0.1)
    whole = {"half": jnp.ones(4), "full": jnp.ones(4), "none": None}
    expected, _ = plain.update(whole, plain.init(whole), whole)
    assert_same(updates["full"], expected["full"])
    new = jqx.optim.apply_updates(params, updates)
    assert {name: x.dtype.name for name, x in new.items() if x is not None} == {
        "half": "bfloat16",
        "full": "float32",
    }
    assert new["none"] is None


def test_nan_and_infinities_stay():
    found = rounded(on_device(np.float32([np.nan, np.inf, -np.inf])), jnp.ones(3, BF16), 0)
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: jqx.optim.stochastic_bf16(0.1), TypeError, "`tx` is not a gradient transf"),
        (lambda: jqx.optim.stochastic_bf16(optax.sgd(1.0), 0.5), TypeError, "`key` is neither"),
        (lambda: jqx.optim.stochastic_bf16(optax.sgd(1.0), True), TypeError, "`key` is neither"),
        (lambda: jqx.optim.stochastic_bf16(), TypeError, "missing a required argument: 'tx'"),
        (
            lambda: jqx.optim.stochastic_bf16(optax.sgd(1.0)).update({}, None),
            ValueError,
            r"`params` is missing.*\n.*tx\.update\(grads, state, params\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
