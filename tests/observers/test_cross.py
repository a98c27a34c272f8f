"""Inputs of a float function and of the quantized one, site by site, beside NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.observers import cross, hessian

from .test_custom_observer import WEIGHTS, K, integers


def f(p, x):
    x = jax.nn.relu(x @ p["first"])
    x, _ = lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, p["stack"])
    return lax.cond(x[0, 0] > -1, lambda: x @ p["branch"], lambda: x)


def inputs(p, x):
    found = [x]
    for w in (p["first"], *p["stack"]):
        found.append(np.maximum(found[-1] @ w, 0))
    return found


def test_float_inputs_are_compared_with_quantized_ones():
    p = {"first": integers(0, K, K), "stack": integers(1, 2, K, K), "branch": integers(2, K, K)}
    p = {name: w + 0.25 for name, w in p.items()}
    batches = [integers(seed, 5, K) for seed in (3, 4)]
    plan = jqx.make_plan(f, WEIGHTS)(p, batches[0])
    codes = jqx.quantize_params(p, plan)
    real = jax.tree.map(np.float64, jqx.dequantize_params(codes))
    given = {".*": (cross, hessian)}
    weighted = {".*": cross(weight=lambda x: jnp.arange(5) < 3)}

    def seen(observers, quantized=codes):
        return jqx.calibrate_batches(
            f, plan, p, batches, observers=observers, quantized=quantized, progress=False
        )

    found, some = seen(given), seen(weighted)
    names = ["first", "stack", "stack", "branch"]
    for i, name in enumerate(names):
        key = f"{name}:dot_general:lhs"
        own = [
            jax.tree.map(lambda v, i=i: v[i - 1] if name == "stack" else v, stats)  # noqa: B023
            for stats in (found[f"{key}@cross"], some[f"{key}@cross"], found[f"{key}@hessian"])
        ]
        for stats, count in zip(own[:2], (5, 3), strict=True):
            exact, x = (
                np.concatenate([inputs(q, np.float64(batch))[i][:count] for batch in batches])
                for q in (p, real)
            )
            bound = 64 * 2.0**-24 * (np.abs(exact).T @ np.abs(x) + np.abs(x).T @ np.abs(x))
            assert (np.abs(stats.products - (exact - x).T @ x) <= bound).all(), name
            assert (np.abs(stats.quantized - x.T @ x) <= bound).all(), name
            assert int(stats.rows) == 2 * count
        exact = np.concatenate([inputs(p, np.float64(batch))[i] for batch in batches])
        assert (np.abs(own[2].products - exact.T @ exact) <= 1e-5 * (exact.T @ exact).max()).all()


def test_mistakes_are_errors_in_four_parts():
    f, w, x = (lambda w, x: x @ w), jnp.eye(K), jnp.ones((2, K))
    plan = jqx.make_plan(f, WEIGHTS)(w, x)
    parts = r"jqx\.[a-z_.]+: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
    with pytest.raises(ValueError) as refusal:
        jax.eval_shape(jqx.calibrate(f, plan, observers={"": cross}), w, x)
    assert re.fullmatch(parts, str(refusal.value)) and "no quantized function" in str(refusal.value)
    for other in ({"w": w}, jnp.eye(K + 1)):
        with pytest.raises(ValueError) as refusal:
            jqx.calibrate_batches(f, plan, w, [x], observers={"": cross}, quantized=other)
        assert re.fullmatch(parts, str(refusal.value)) and "same parameters" in str(refusal.value)
    ragged, stack, sizes = lax.ragged_dot, jnp.ones((3, K, 2)), jnp.array([1, 1, 0])
    f = lambda w, x, sizes: ragged(x, w, sizes)  # noqa: E731
    plan = jqx.make_plan(f, WEIGHTS)(stack, x, sizes)
    with pytest.raises(NotImplementedError) as refusal:
        jax.eval_shape(jqx.calibrate(f, plan, observers={"": cross}), stack, x, sizes)
    assert re.fullmatch(parts, str(refusal.value)) and "ragged_dot" in str(refusal.value)
