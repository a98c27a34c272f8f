"""`held_back` against NumPy: the error on the rows used, and on others."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import gptq, nearest
from jqx.diagnostics import held_back

from ..arrays import on_device
from .errors import near

RNG = np.random.default_rng(0)
D = 24
INT4 = jqx.Policy({".*": "int4"})


def normal(*shape):
    return on_device(np.float32(RNG.normal(size=shape)))


def layers(params, x, power=1):
    """Two layers; the number is static."""
    return jnp.tanh(x @ params["a"]) ** power @ params["b"]


PARAMS = {"a": normal(D, D) / 5, "b": normal(D, 7)}
USED = [normal(9, D), normal(4, D), normal(9, D)]
OTHERS = [normal(30, D), (normal(5, D), 3)]


def quantized_by(algorithm, f=layers, policy=INT4, params=PARAMS, batches=USED, **options):
    return jqx.ptq(f, policy, algorithm, progress=False, **options)(params, batches)


def relative(pairs):
    """The energy of differences, relative to that of the float results, over batches."""
    noise, signal = (sum(np.square(x).sum() for x in each) for each in zip(*pairs, strict=True))
    return noise / signal


def errors_of(codes, batches):
    """The errors of both sites alone, and of the result, in float64."""
    real = {name: np.float64(w) for name, w in PARAMS.items()}
    found = {name: np.float64(w.dequantize()) for name, w in codes.items()}
    pairs = {"a": [], "b": [], "": []}
    for batch in batches:
        x, power = batch if isinstance(batch, tuple) else (batch, 1)
        x = np.float64(x)
        h, k = (np.tanh(x @ w["a"]) ** power for w in (real, found))
        pairs["a"].append((x @ (found["a"] - real["a"]), x @ real["a"]))
        pairs["b"].append((h @ (found["b"] - real["b"]), h @ real["b"]))
        pairs[""].append((k @ found["b"] - h @ real["b"], h @ real["b"]))
    return {path: relative(each) for path, each in pairs.items()}


def error_of(sqnr):
    return 10 ** (-sqnr / 10)


def test_the_errors_of_sites_and_of_the_result_are_those_of_numpy():
    quantized = quantized_by(gptq())
    found = held_back(layers, quantized)(PARAMS, USED, iter(OTHERS))
    want = [errors_of(quantized.params, batches) for batches in (USED, OTHERS)]
    for comparison, errors in zip((found.used, found.held_back), want, strict=True):
        assert [site.path for site in comparison.sites] == ["a", "b"]
        own = {site.path: error_of(site.local_sqnr) for site in comparison.sites}
        own[""] = error_of(comparison.result.sqnr)
        for path, error in errors.items():
            assert own[path] == pytest.approx(error, rel=near(error, 2, D)), path
    assert found.ratio == pytest.approx(want[1][""] / want[0][""], rel=1e-3)
    assert found.ratio > 1.5  # 22 rows for 24 columns
    rounded = held_back(layers, quantized_by(nearest()))(PARAMS, USED, OTHERS)
    assert rounded.ratio < 1.5
    lines = str(found).splitlines()
    assert len(lines) == 6 and lines[4].startswith("(result)")
    assert lines[4].endswith(f"{found.ratio:.2f}")
    assert json.loads(json.dumps(found.to_dict()))["used"]["sites"][0]["path"] == "a"


def scanned(x, scale, params):
    """The parameters are the last argument; a scan steps over them."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x * scale, params)[0]


def test_each_layer_of_a_scan_has_a_row_and_parameters_may_be_any_argument():
    params, batches = normal(3, D, D) / 5, [(normal(6, D), jnp.float32(2)) for _ in range(2)]
    quantize = jqx.ptq(scanned, jqx.presets.w8a8(), gptq(), params=2, progress=False)
    quantized = quantize(params, batches)
    found = held_back(scanned, quantized)(params, batches, batches[:1])
    assert [site.layer for site in found.used.sites] == [(0,), (1,), (2,)]
    for comparison, own in ((found.used, batches), (found.held_back, batches[:1])):
        exact = [np.float64(scanned(*batch, params)) for batch in own]
        pairs = [(np.float64(quantized(*b)) - y, y) for b, y in zip(own, exact, strict=True)]
        error = relative(pairs)
        assert error_of(comparison.result.sqnr) == pytest.approx(error, rel=near(error, 3, D))


def test_an_exact_result_has_no_error_and_keeps_its_sites():
    params = {"a": jnp.round(9 * normal(D, D)).at[0].set(127), "b": jnp.eye(D)}
    f = lambda p, x: jnp.maximum(x @ p["a"], 0) @ p["b"]  # noqa: E731
    quantized = quantized_by(nearest(), f, jqx.Policy({"a": "int8", "b": "float"}), params)
    found = held_back(f, quantized)(params, [jnp.round(x) for x in USED], [jnp.round(OTHERS[0])])
    assert [site.local_sqnr for site in found.used.sites] == [math.inf]
    assert found.used.result.sqnr == math.inf and math.isnan(found.ratio)
    assert found.to_dict()["used"]["result"]["sqnr"] is None


QUANTIZED = quantized_by(nearest())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: held_back(layers, PARAMS), TypeError, "`quantized` is not a quantized function"),
        (lambda: held_back(layers, QUANTIZED, PARAMS, USED), TypeError, "in two steps"),
        (lambda: held_back(3, QUANTIZED), TypeError, "`f` is not a function"),
        (lambda: held_back(layers, QUANTIZED)(PARAMS, [], USED), ValueError, "there is no batch"),
        (lambda: held_back(layers, QUANTIZED)(PARAMS, USED, []), ValueError, "there is no batch"),
        (
            lambda: held_back(layers, QUANTIZED)(PARAMS, USED, USED[0]),
            TypeError,
            "`batches` is not a list",
        ),
        (
            lambda: held_back(layers, QUANTIZED)(QUANTIZED.params, USED, USED),
            ValueError,
            "a parameter is quantized already",
        ),
        (
            lambda: held_back(lambda p, x: x @ p["a"], QUANTIZED)(PARAMS, USED, USED),
            ValueError,
            "fix",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_arguments_are_errors(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "diagnostics.held_back: " in str(caught.value) and "fix: " in str(caught.value)
