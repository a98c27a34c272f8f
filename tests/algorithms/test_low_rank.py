"""Low-rank compensation: the best of its rank, by the inputs of a site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import bias_correction, chain, eora, gptq, loftq, rotate

from ..arrays import on_device

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
D, H, LAYERS = 16, 24, 2


def normal(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


INPUTS = normal(D, D) * on_device(np.exp(-np.arange(D) / 4), jnp.float32)[:, None]
PARAMS = {
    "up": normal(LAYERS, D, H),
    "down": normal(LAYERS, H, D) / 9,
    "stack": normal(2, D, 5),
    "kernel": normal(3, 3, D, 4),
}
BATCHES = [normal(24, D) @ INPUTS, normal(16, D) @ INPUTS]
POLICY = jqx.Policy({".*": "int2:channel"})


def f(p, x):
    """Perceptrons in a scan, a stack of matrices, and a convolution."""

    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    x = lax.scan(layer, x, {"up": p["up"], "down": p["down"]})[0]
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    image = x.reshape(-1, 2, 2, D)
    y = lax.conv_general_dilated(image, p["kernel"], (1, 1), "SAME", **options)
    return jnp.einsum("bsk,bkn->bsn", x.reshape(2, -1, D), p["stack"]), y


def quantized(algorithm):
    return jqx.ptq(f, POLICY, algorithm, target=False, progress=False)(PARAMS, BATCHES)


@pytest.mark.slow
def test_the_error_is_that_of_the_best_matrix_of_its_rank():
    found = quantized(eora(rank=4))
    report = {x.site: x for x in found.details}
    assert [(x.site.split(":")[0], x.rank) for x in found.details] == [
        *(("up", 4), ("down", 4), ("kernel", 0), ("stack", 4)),
    ]
    assert "not a plain product" in str(found.details)
    # Of the first layer by NumPy: inputs, what is lost, and its singular values.
    x = np.concatenate(BATCHES).astype(np.float64)
    codes = np.asarray(found.params["up"].dequantize(), np.float64)[0]
    lost = np.asarray(PARAMS["up"][0], np.float64) - codes
    (low,) = found.maps["up:dot_general:out"]
    a, b = np.asarray(low.a[0], np.float64), np.asarray(low.b[0], np.float64)
    _, s, _ = np.linalg.svd(x @ lost, full_matrices=False)
    error = ((x @ (lost - a @ b)) ** 2).sum()
    np.testing.assert_allclose(error, (s[4:] ** 2).sum(), rtol=1e-3)
    both = report["up:dot_general"]
    assert both.after < 0.6 * both.before
    whole = quantized(eora(rank=D))
    for entry in whole.details:
        assert entry.after <= 1e-6 * entry.before
    exact, own = f(PARAMS, BATCHES[0])[0], whole(BATCHES[0])[0]
    assert np.abs(exact - own).max() <= 1e-4 * np.abs(exact).max()


@pytest.mark.slow
def test_more_of_a_rank_loses_less_and_others_may_come_before():
    algorithms = chain(rotate(), gptq(), eora(rank=4), bias_correction())
    exact = f(PARAMS, BATCHES[0])[0]
    found = [quantized(x) for x in (NEAREST, eora(rank=2), eora(rank=8), algorithms)]
    errors = [float(((exact - x(BATCHES[0])[0]) ** 2).mean()) for x in found]
    assert errors[:3] == sorted(errors[:3], reverse=True) and errors[2] < 0.5 * errors[0]
    assert errors[3] < errors[1] and len(found[3].details) == 4
    maps = found[3].maps["up:dot_general:out"]
    assert [type(x).__name__ for x in maps] == ["LowRank", "ChannelMap"]


@pytest.mark.parametrize("low_rank", [eora(rank=2), loftq(rank=2)], ids=["eora", "loftq"])
def test_results_with_a_low_rank_product_are_corrected_to_the_means_of_float(low_rank):
    g, w, (x, *_) = (lambda w, x: x @ w), PARAMS["up"][0], BATCHES
    plain, found = (
        jqx.ptq(g, POLICY, algorithm, target=False, progress=False)(w, [x])(x)
        for algorithm in (low_rank, chain(low_rank, bias_correction()))
    )
    lost, left = (np.abs((g(w, x) - own).mean(0)).max() for own in (plain, found))
    # float32: means of results that are a hundred times what is lost
    assert left <= 1e-3 * lost


def test_rows_of_weight_0_are_left_out():
    batches = [BATCHES[0].at[16:].mul(9)]
    g, w = (lambda w, x: x @ w), PARAMS["up"][0]
    masked = eora(rank=2, weight=lambda x: jnp.arange(x.shape[0]) < 16)
    a = jqx.ptq(g, POLICY, masked, progress=False)(w, batches)
    b = jqx.ptq(g, POLICY, eora(rank=2), progress=False)(w, [BATCHES[0][:16]])
    (own,), (other,) = (x.maps[":dot_general:out"] for x in (a, b))
    np.testing.assert_allclose(own.a @ own.b, other.a @ other.b, rtol=1e-3, atol=1e-4)


def test_what_means_nothing_is_refused():
    for make, error, fact in (
        (lambda: eora(rank=0), ValueError, "1 or more"),
        (lambda: eora(rank=2.5), TypeError, "`rank`"),
        (lambda: eora(weight=3), TypeError, "`weight`"),
    ):
        with pytest.raises(error, match=rf"(?s)jqx\.algorithms\.eora: .*{fact}.*fix:"):
            make()
    g = lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([2, 2], jnp.int32))  # noqa: E731
    with pytest.raises(ValueError, match=r"(?s)eora: no site can have.*fix:"):
        jqx.ptq(g, jqx.presets.w8a16(), eora(), progress=False)(normal(2, D, 4), [normal(4, D)])


def test_loftq_makes_the_sum_of_codes_and_products_the_weight():
    losses = []
    for rounds in (1, 6):
        found = quantized(loftq(rank=4, rounds=rounds))
        report = {x.site.split(":")[0]: x for x in found.details}
        assert set(report) == {"up", "down", "stack"}
        real = jqx.dequantize_params(found.params)
        for name, entry in report.items():
            exact, codes = (np.asarray(tree[name], np.float64) for tree in (PARAMS, real))
            (low,) = found.maps[f"{name}:dot_general:out"]
            product = np.asarray(low.a, np.float64) @ np.asarray(low.b, np.float64)
            after = ((exact - codes - product) ** 2).sum()
            np.testing.assert_allclose(after, entry.after, rtol=1e-3)
            s = np.linalg.svd(exact - codes, compute_uv=False)
            np.testing.assert_allclose(after, (s[..., 4:] ** 2).sum(), rtol=1e-3)
        losses.append(sum(x.after for x in report.values()))
        if rounds == 1:  # codes are those of rounding to nearest
            nearest = quantized(NEAREST).params
            for name in report:
                assert jnp.array_equal(found.params[name].codes, nearest[name].codes)
                lost = np.asarray(PARAMS[name]) - np.asarray(nearest[name].dequantize())
                np.testing.assert_allclose(report[name].before, (lost**2).sum(), rtol=1e-3)
    assert losses[1] < losses[0]
    with pytest.raises(ValueError, match="loftq: `rounds` is out of range"):
        loftq(rounds=0)
