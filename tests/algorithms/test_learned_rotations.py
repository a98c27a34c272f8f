"""Rotations that are learned: they stay orthogonal, and what is lost falls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jqx
from jqx.algorithms import bias_correction, chain, gptq, nearest, rotate
from jqx.algorithms._hadamard import factors_of
from jqx.algorithms._learned_rotations import moved, relative_error
from jqx.algorithms._orthogonal import Orthogonal

from ..arrays import on_device

RNG = np.random.default_rng(0)
D, LAYERS, TOKENS = 24, 2, 160


def normal(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


START = Orthogonal.hadamard(D, factors_of(D), 0)
WORST = START.signs * functools.reduce(np.kron, START.factors)[:, 0]
"""What the fixed rotation puts in one channel."""
TABLE = RNG.normal(size=(TOKENS, 1)) * 20 * WORST + RNG.normal(size=(TOKENS, D))
PARAMS = {
    "table": on_device(TABLE, jnp.float32),
    "gain": on_device(RNG.uniform(0.9, 1.1, size=(LAYERS, D)), jnp.float32),
    "up": normal(LAYERS, D, D) / np.sqrt(D),
    "gate": normal(LAYERS, D, D) / np.sqrt(D),
    "down": normal(LAYERS, D, D) / np.sqrt(D),
    "head": normal(D, 7) / np.sqrt(D),
}
BATCHES = [on_device(RNG.permutation(TOKENS)[:n], jnp.int32) for n in (128, 96)]


def f(p, tokens):
    """Layers of a stream, with gains, in a scan."""

    def layer(x, p):
        h = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) * p["gain"][None]
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    x, layers = p["table"][tokens], ("gain", "up", "gate", "down")
    return lax.scan(layer, x, {name: p[name] for name in layers})[0] @ p["head"]


def rewritten(algorithm, plan_of=f, policy=None, params=PARAMS, batches=BATCHES):
    plan = jqx.make_plan(plan_of, policy or jqx.presets.w4a4())(params, batches[0])
    return plan, algorithm.rewrite(plan_of, plan, params, batches, progress=False)


@given(
    seed=st.integers(0, 99),
    size=st.integers(2, 40),
    stack=st.sampled_from([(), (3,), (2, 2)]),
    angle=st.floats(1e-4, 1.0),
)
@settings(max_examples=30, deadline=None)
def test_a_step_rotates_by_an_angle_and_descends(seed, size, stack, angle):
    rng = np.random.default_rng(seed)
    q = np.linalg.qr(rng.normal(size=(*stack, size, size)))[0]
    target = rng.normal(size=q.shape)
    found = moved(q, -target, angle)  # the gradient of -sum(q * target)
    eye = np.broadcast_to(np.eye(size), q.shape)
    np.testing.assert_allclose(found.mT @ found, eye, atol=1e-12)
    if angle <= 1e-2:
        assert (np.sum(found * target, (-1, -2)) > np.sum(q * target, (-1, -2))).all()
        # To first order each row of q turns by the angle, in the root mean square. A plane turns by
        # at most sqrt(40) times as much; the first that is left out is that squared by 8: 5e-4.
        turned = np.sqrt(np.mean(np.sum((found - q) ** 2, -1), -1))
        np.testing.assert_allclose(turned, angle, rtol=1e-3)
    np.testing.assert_allclose(moved(q, np.zeros_like(q), angle), q, atol=1e-15)


@pytest.mark.many
@pytest.mark.parametrize("offline", [False, True])
def test_the_function_stays_as_it_is_and_loses_less(offline):
    algorithm = rotate(steps=40, learning_rate=0.05, offline=offline)
    plan, chosen = rewritten(algorithm)
    before, after = chosen.report.lost
    assert after < 0.9 * before
    assert f"learned: loss {after:.4g}, {before:.4g} before" in str(chosen.report)
    exact, own = f(PARAMS, BATCHES[0]), jqx.map_channels(f, plan, chosen.maps)
    found = own(chosen.params, BATCHES[0])
    assert np.abs(exact - found).max() <= 1e-5 * np.abs(exact).max()
    fixed = rewritten(rotate(offline=offline))[1]
    assert fixed.report.lost is None and "learned: a" not in str(fixed.report)
    assert {x.site: x.offline for x in fixed.report} == {x.site: x.offline for x in chosen.report}
    for matrix in (factor for x in chosen.maps.values() for factor in x.factors):
        eye = np.broadcast_to(np.eye(matrix.shape[-1]), matrix.shape)
        # Sums of 24 products in float32: 24 * 2^-24.
        np.testing.assert_allclose(matrix.mT @ matrix, eye, atol=2e-6)
    if offline:
        assert any(x.offline for x in chosen.report)
        assert np.abs(chosen.params["up"] - fixed.params["up"]).max() > 1e-2
        return
    # Each step of the scan has its own, which sites of one value share.
    up, gate = (next(v for k, v in chosen.maps.items() if n in k) for n in ("up", "gate"))
    for a, b in zip(up.factors, gate.factors, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a[0] - a[1]).max() > 1e-2


@pytest.mark.slow
def test_what_is_quantized_loses_less_too():
    def lost(algorithm):
        quantized = jqx.ptq(f, jqx.presets.w4a4(), algorithm, progress=False)(PARAMS, BATCHES)
        return float(relative_error(quantized(BATCHES[0]), f(PARAMS, BATCHES[0])))

    fixed, own = (chain(rotate(steps=n, learning_rate=0.05), gptq()) for n in (0, 40))
    assert lost(own) < 0.9 * lost(fixed)


def test_what_is_reported_is_what_is_lost_when_activations_are_rounded():
    """The loss of the fixed matrices is that of a plan without weights, through `simulate`."""
    batches = BATCHES[:1]
    plan, chosen = rewritten(rotate(steps=1, learning_rate=1e-6), batches=batches)
    one = jqx.Policy([dataclasses.replace(jqx.presets.w4a4().rules[0], weight=None)])
    rotated = jqx.map_channels(f, plan, chosen.maps)
    alone = jqx.make_plan(rotated, one)(chosen.params, batches[0])
    found = jqx.simulate(rotated, alone)(chosen.params, batches[0])
    exact = f(PARAMS, batches[0])
    # One of 128 * 24 values that rounds to its other neighbour is 3e-4 of what all lose.
    np.testing.assert_allclose(chosen.report.lost[0], relative_error(found, exact), rtol=1e-3)


@pytest.mark.slow
def test_a_loss_of_the_caller_is_what_falls():
    divergence = lambda a, b: jnp.mean(  # noqa: E731
        jnp.sum(jax.nn.softmax(b) * (jax.nn.log_softmax(b) - jax.nn.log_softmax(a)), -1)
    )
    chosen = rewritten(rotate(steps=20, learning_rate=0.05, loss=divergence))[1]
    before, after = chosen.report.lost
    assert 0 < after < before
    assert before != rewritten(rotate(steps=1))[1].report.lost[0]


@pytest.mark.slow
def test_the_same_seed_finds_the_same():
    found = [rewritten(rotate(steps=3, seed=seed))[1] for seed in (1, 1, 2)]
    jax.tree.map(np.testing.assert_array_equal, found[0].params, found[1].params)
    assert found[0].report.lost[0] != found[2].report.lost[0]


def test_what_means_nothing_is_refused():
    nan = lambda a, b: jnp.float32(jnp.nan)  # noqa: E731
    weights = jqx.Policy({".*": "int4"})
    cases = (
        (lambda: rotate(steps=-1), ValueError, "`steps` is not valid.*0, which learns nothing"),
        (lambda: rotate(steps=1.5), TypeError, "`steps`"),
        (lambda: rotate(learning_rate=0), ValueError, "`learning_rate` is not valid"),
        (lambda: rotate(learning_rate="1"), TypeError, "`learning_rate` is not valid"),
        (lambda: rotate(loss=3), TypeError, "`loss` is not valid.*a function, or None"),
        (lambda: rewritten(rotate(steps=2), policy=weights), ValueError, "nothing to learn"),
        (lambda: rewritten(rotate(steps=2, loss=nan)), ValueError, "is not finite"),
    )
    for make, error, fact in cases:
        with pytest.raises(error, match=rf"(?s)jqx\.algorithms\.rotate: .*{fact}.*fix:"):
            make()


@pytest.mark.slow
def test_it_goes_with_other_algorithms():
    algorithm = chain(rotate(steps=2), nearest(), bias_correction())
    quantized = jqx.ptq(f, jqx.presets.w4a4(), algorithm, progress=False)(PARAMS, BATCHES)
    assert np.isfinite(quantized(BATCHES[0])).all()
