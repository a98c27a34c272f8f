"""Experts that few rows reached: no algorithm leaves them worse than rounding to nearest, and the
report names them.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import algorithms

from ..arrays import on_device

D = 16
COUNTS = np.array([0, 1, 2, 3, 400, 640])
"""Rows that reach each expert in calibration."""

FEW, EXPERTS = COUNTS < D, len(COUNTS)
RNG = np.random.default_rng(3)
MIXED = RNG.normal(size=(D, D)) * np.exp(-np.arange(D) / 4)[:, None] * np.exp(RNG.normal(size=D))
"""Inputs have few directions, and channels of different magnitudes."""

PARAMS = {
    "gain": jnp.ones((1, D), jnp.float32),
    "up": on_device(RNG.normal(size=(EXPERTS, D, D)) / 4, jnp.float32),
    "down": on_device(RNG.normal(size=(EXPERTS, D, D)) / 4, jnp.float32),
}


def batch(counts):
    which = RNG.permutation(np.repeat(np.arange(EXPERTS), counts)).astype(np.int32)
    return on_device(RNG.normal(size=(len(which), D)) @ MIXED, jnp.float32), jnp.asarray(which)


CALIBRATION, TEST = batch(COUNTS), batch(np.full(EXPERTS, 256))
BATCHES = [tuple(x[:500] for x in CALIBRATION), tuple(x[500:] for x in CALIBRATION)]


def sorted_rows(p, x, which):
    order, sizes = jnp.argsort(which), jnp.bincount(which, length=EXPERTS).astype(jnp.int32)
    h = jax.nn.relu(lax.ragged_dot(x[order] * p["gain"], p["up"], sizes))
    y = lax.ragged_dot(h, p["down"], sizes)
    return jnp.zeros_like(y).at[order].set(y)


def masked(p, x, which):
    mine = (which[None] == jnp.arange(EXPERTS)[:, None])[..., None]
    h = jax.nn.relu(jnp.einsum("etk,ekn->etn", jnp.where(mine, x * p["gain"], 0), p["up"]))
    return jnp.einsum("etk,ekn->etn", h, p["down"]).sum(0)


def scanned(p, x, which):
    def expert(y, own):
        i, up, down = own
        h = jnp.where((which == i)[:, None], x * p["gain"], 0)
        return y + jax.nn.relu(h @ up) @ down, None

    each = jnp.arange(EXPERTS), p["up"], p["down"]
    return lax.scan(expert, jnp.zeros_like(x), each)[0]


FORMS = {"ragged": sorted_rows, "masked": masked, "scanned": scanned}
"""Rows sorted by expert; all rows at all experts, those of others as zeros; one after another."""

W4, W8A8 = jqx.Policy({".*": "int4:channel"}), jqx.presets.w8a8()
ALGORITHMS = {
    "gptq": (algorithms.gptq(), W4),
    "one_pass": (algorithms.gptq(sequential=False), W4),
    "adaround": (algorithms.adaround(steps=50), W4),
    "auto_round": (algorithms.auto_round(steps=20), W4),
    "bias_correction": (algorithms.bias_correction(), W4),
    "awq": (algorithms.awq(steps=8), W4),
    "awq_static": (algorithms.awq(steps=8), W8A8),
    "smooth_quant": (algorithms.smooth_quant(strength=0.85), W8A8),
    "chained": (algorithms.chain(algorithms.smooth_quant(strength=0.85), algorithms.gptq()), W8A8),
}
EXACT = "gptq", "one_pass", "adaround", "auto_round", "bias_correction"
"""What is left as rounding to nearest leaves it, bit by bit."""


def errors(function, y):
    """Of the rows of each expert, relative to their results in float."""
    x, which = TEST
    exact = np.asarray(function(PARAMS, x, which), np.float64)
    lost, which = np.asarray(y, np.float64) - exact, np.asarray(which)
    return np.array(
        [
            np.linalg.norm(lost[which == e]) / np.linalg.norm(exact[which == e])
            for e in FEW.nonzero()[0]
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_few_rows_leave_no_expert_worse_than_rounding_to_nearest(form):
    f = FORMS[form]
    quantized = partial(jqx.ptq, f, target=False, progress=False)
    nearest = {}
    for name, (algorithm, policy) in ALGORITHMS.items():
        if policy not in nearest:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an expert without rows has the static scale 1
                found = quantized(policy, algorithms.nearest())(PARAMS, BATCHES)
            nearest[policy] = errors(f, found(*TEST))
        with pytest.warns(UserWarning, match="rounded to nearest(.|\n)+inputs of 16 channels"):
            found = quantized(policy, algorithm)(PARAMS, BATCHES)
        ratio = errors(f, found(*TEST)) / nearest[policy]
        if name in EXACT:
            np.testing.assert_allclose(ratio, 1, atol=1e-4, err_msg=name)
        # Factors of channels that all experts read move single weights to other codes.
        assert ratio.mean() <= 1.02 and ratio.max() <= 1.15, (name, ratio)
        site = "ragged_dot" if form == "ragged" else "dot_general"
        for i in FEW.nonzero()[0]:
            assert f"up:{site}[{i}]" in found.report.codes, (name, found.report.codes)
        for i in (~FEW).nonzero()[0]:
            assert f"up:{site}[{i}]" not in found.report.codes, (name, found.report.codes)


@pytest.mark.slow
def test_an_ordinary_layer_of_few_rows_is_fitted_as_before():
    f = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]  # noqa: E731
    params, x = {"a": PARAMS["up"][0], "b": PARAMS["down"][0]}, TEST[0][:5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm, policy in ALGORITHMS.values():
            found = jqx.ptq(f, policy, algorithm, progress=False)(params, [x])
            assert "few inputs" not in found.report.codes
