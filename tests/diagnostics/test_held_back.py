"""`compare` and `held_back` against NumPy, on the rows used and on others; where algorithms rewrite
weights, in the basis in which the quantized function computes.
"""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jqx
import jqx.linen
import jqx.nnx
from jqx.algorithms import (
    awq,
    bias_correction,
    chain,
    eora,
    equalize,
    gptq,
    loftq,
    nearest,
    rotate,
    smooth_quant,
)
from jqx.diagnostics import held_back

from ..arrays import normal, on_device
from ..oracles.contractions import near

WIDTH = 24
INT4 = jqx.Policy({".*": "int4"})


def layers(params, x, power=1):
    """Two layers; the number is static."""
    return jnp.tanh(x @ params["a"]) ** power @ params["b"]


TWO = {"a": normal(0, WIDTH, WIDTH) / 5, "b": normal(1, WIDTH, 7)}
SHORT = [normal(2, 9, WIDTH), normal(3, 4, WIDTH), normal(4, 9, WIDTH)]
LONG = [normal(5, 30, WIDTH), (normal(6, 5, WIDTH), 3)]


def quantized_two(algorithm, f=layers, policy=INT4, params=TWO, batches=SHORT, **options):
    return jqx.ptq(f, policy, algorithm, progress=False, **options)(params, batches)


def relative(pairs):
    """The energy of differences, relative to that of the float results, over batches."""
    noise, signal = (sum(np.square(x).sum() for x in each) for each in zip(*pairs, strict=True))
    return noise / signal


def errors_of(codes, batches):
    """The errors of both sites alone, and of the result, in float64."""
    real = {name: np.float64(w) for name, w in TWO.items()}
    results = {name: np.float64(w.dequantize()) for name, w in codes.items()}
    pairs = {"a": [], "b": [], "": []}
    for batch in batches:
        x, power = batch if isinstance(batch, tuple) else (batch, 1)
        x = np.float64(x)
        h, k = (np.tanh(x @ w["a"]) ** power for w in (real, results))
        pairs["a"].append((x @ (results["a"] - real["a"]), x @ real["a"]))
        pairs["b"].append((h @ (results["b"] - real["b"]), h @ real["b"]))
        pairs[""].append((k @ results["b"] - h @ real["b"], h @ real["b"]))
    return {path: relative(each) for path, each in pairs.items()}


def error_of(sqnr):
    return 10 ** (-sqnr / 10)


def test_the_errors_of_sites_and_of_the_result_are_those_of_numpy():
    quantized = quantized_two(gptq())
    result = held_back(layers, quantized)(TWO, SHORT, iter(LONG))
    want = [errors_of(quantized.params, batches) for batches in (SHORT, LONG)]
    for comparison, errors in zip((result.used, result.held_back), want, strict=True):
        assert [site.path for site in comparison.sites] == ["a", "b"]
        measured = {site.path: error_of(site.local_sqnr) for site in comparison.sites}
        measured[""] = error_of(comparison.result.sqnr)
        for path, error in errors.items():
            assert measured[path] == pytest.approx(error, rel=near(error, 2, WIDTH)), path
    assert result.ratio == pytest.approx(want[1][""] / want[0][""], rel=1e-3)
    assert result.ratio > 1.5  # 22 rows for 24 columns
    rounded = held_back(layers, quantized_two(nearest()))(TWO, SHORT, LONG)
    assert rounded.ratio < 1.5
    lines = str(result).splitlines()
    assert len(lines) == 6 and lines[4].startswith("(result)")
    assert lines[4].endswith(f"{result.ratio:.2f}")
    assert json.loads(json.dumps(result.to_dict()))["used"]["sites"][0]["path"] == "a"


def scanned(x, scale, params):
    """The parameters are the last argument; a scan steps over them."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x * scale, params)[0]


def test_each_layer_of_a_scan_has_a_row_and_parameters_may_be_any_argument():
    params, inputs = normal(7, 3, WIDTH, WIDTH) / 5, normal(8, 2, 6, WIDTH)
    batches = [(x, jnp.float32(2)) for x in inputs]
    quantize = jqx.ptq(scanned, jqx.presets.w8a8(), gptq(), params=2, progress=False)
    quantized = quantize(params, batches)
    result = held_back(scanned, quantized)(params, batches, batches[:1])
    assert [site.layer for site in result.used.sites] == [(0,), (1,), (2,)]
    for comparison, inputs_of_one in ((result.used, batches), (result.held_back, batches[:1])):
        exact = [np.float64(scanned(*batch, params)) for batch in inputs_of_one]
        pairs = [
            (np.float64(quantized(*b)) - y, y) for b, y in zip(inputs_of_one, exact, strict=True)
        ]
        error = relative(pairs)
        assert error_of(comparison.result.sqnr) == pytest.approx(error, rel=near(error, 3, WIDTH))


def test_an_exact_result_has_no_error_and_keeps_its_sites():
    params = {"a": jnp.round(9 * normal(9, WIDTH, WIDTH)).at[0].set(127), "b": jnp.eye(WIDTH)}
    f = lambda p, x: jnp.maximum(x @ p["a"], 0) @ p["b"]  # noqa: E731
    quantized = quantized_two(nearest(), f, jqx.Policy({"a": "int8", "b": "float"}), params)
    result = held_back(f, quantized)(params, [jnp.round(x) for x in SHORT], [jnp.round(LONG[0])])
    assert [site.local_sqnr for site in result.used.sites] == [math.inf]
    assert result.used.result.sqnr == math.inf and math.isnan(result.ratio)
    assert result.to_dict()["used"]["result"]["sqnr"] is None


def test_other_arguments_are_errors():
    q = quantized_two(nearest())
    two = held_back(layers, q)
    for call, error, text in (
        (lambda: held_back(layers, TWO), TypeError, "`quantized` is not a quantized function"),
        (lambda: held_back(layers, q, TWO, SHORT), TypeError, "in two steps"),
        (lambda: held_back(3, q), TypeError, "`f` is not a function"),
        (lambda: two(TWO, [], SHORT), ValueError, "there is no batch"),
        (lambda: two(TWO, SHORT, []), ValueError, "there is no batch"),
        (lambda: two(TWO, SHORT, SHORT[0]), TypeError, "`batches` is not a list"),
        (lambda: two(q.params, SHORT, SHORT), ValueError, "a parameter is quantized already"),
        (lambda: held_back(lambda p, x: x @ p["a"], q)(TWO, SHORT, SHORT), ValueError, "fix"),
    ):
        with pytest.raises(error, match=text) as caught:
            call()
        assert "diagnostics.held_back: " in str(caught.value) and "fix: " in str(caught.value)


# Where algorithms rewrite weights

RNG = np.random.default_rng(0)
D, HIDDEN, ROWS = 16, 24, 12
W8A8 = jqx.presets.w8a8()


def scaled(*shape):
    return on_device(np.float32(RNG.normal(size=shape) / shape[0] ** 0.5))


def rms_norm(x, gain):
    core = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
    return core * jnp.broadcast_to(gain, x.shape)


def layer(x, w):
    h = jax.nn.relu(rms_norm(x, w["gain"]) @ w["up"] + jnp.broadcast_to(w["bias"], (ROWS, HIDDEN)))
    return x + h @ w["down"]


def network(params, x):
    """A residual network; a scan steps over its layers if they are stacked."""
    layers = params["layers"]
    if isinstance(layers, dict):
        x = lax.scan(lambda x, w: (layer(x, w), None), x @ params["in"], layers)[0]
    else:
        x = functools.reduce(layer, layers, x @ params["in"])
    return rms_norm(x, params["gain"]) @ params["head"]


def one_layer():
    """Gains and inputs have large channels, which rotations and scales spread."""
    return {
        "gain": jnp.exp(1.5 * scaled(1, D)[0]),
        "up": scaled(D, HIDDEN),
        "bias": jnp.abs(scaled(1, HIDDEN)[0]),
        "down": scaled(HIDDEN, D),
    }


LAYERS = [one_layer(), one_layer()]
PARAMS = {"in": scaled(D, D), "layers": LAYERS[:1], "gain": jnp.exp(scaled(1, D)[0])}
PARAMS |= {"head": scaled(D, 8)}
STACKED = PARAMS | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *LAYERS)}
CHANNELS = jnp.exp(2 * scaled(1, D))
USED, OTHERS = (scaled(ROWS, D) * CHANNELS for _ in range(2))


def mapped(x, maps, step, operand=None):
    """A value after the maps of a site, in float64; a result has the operand of its site."""
    for each in maps:
        if isinstance(each, jqx.LowRank):
            x = x + operand @ np.float64(each.a)[step] @ np.float64(each.b)[step]
            continue
        scale, shift, clip, *factors = (
            None if part is None else np.float64(part)[step]
            for part in (each.scale, each.shift, each.clip, *each.factors)
        )
        x = x if scale is None else x * scale
        if factors:
            whole = functools.reduce(np.kron, factors)
            x = (x.reshape(len(x), -1, len(whole)) @ whole).reshape(x.shape)
        x = x if shift is None else x + shift
        x = x if clip is None else np.minimum(x, clip)
    return x


def exact(values, maps, x, quantized=None):
    """The network in float64 with maps at its sites. With a quantized function, also the energies
    of the error of each site alone, and of its result.
    """
    results = []
    codes = None if quantized is None else jqx.dequantize_params(quantized.params)

    def site(path, x, w, rounded_weights, step=()):
        x = mapped(x, maps.get(f"{path}:dot_general:lhs", ()), step)
        y = x @ np.float64(w)[step]
        if quantized is not None:
            scale = np.float64(quantized.affines[f"{path}:dot_general:lhs"].scale)
            scale = scale[step].reshape(()) if scale.size > 1 else scale.reshape(())
            rounded = np.clip(np.round(x / scale), -128, 127) * scale
            results.append(
                (path, step, np.sum((rounded @ np.float64(rounded_weights)[step] - y) ** 2), y)
            )
        return mapped(y, maps.get(f"{path}:dot_general:out", ()), step, x)

    def norm(x, gain):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True)) * np.float64(gain)

    is_stacked = isinstance(values["layers"], dict)
    rounded_weights = values if codes is None else codes
    x = site("in", np.float64(x), values["in"], rounded_weights["in"])
    for i in range(2 if is_stacked else len(values["layers"])):
        at, step = ("layers", (i,)) if is_stacked else (f"layers/{i}", ())
        w, q = (
            each["layers"] if is_stacked else each["layers"][i]
            for each in (values, rounded_weights)
        )
        h = site(f"{at}/up", norm(x, np.float64(w["gain"])[step]), w["up"], q["up"], step)
        h = np.maximum(h + np.float64(w["bias"])[step], 0)
        x = x + site(f"{at}/down", h, w["down"], q["down"], step)
    y = site("head", norm(x, values["gain"]), values["head"], rounded_weights["head"])
    order = [row[0] for row in results]
    return y if quantized is None else (y, sorted(results, key=lambda row: order.index(row[0])))


def decibels(signal, noise):
    return 10 * np.log10(np.sum(np.square(signal)) / noise)


def close(a, b, layers=3):
    """Whether two errors in dB are those of one function, in float32 and in float64."""
    return abs(a - b) < 10 / np.log(10) * near(10 ** (-b / 10), layers, HIDDEN)


ALGORITHMS = {
    "run time": rotate(),
    "weights alone": rotate(offline="only"),
    "both": rotate(offline=True),
    "rounded well": chain(rotate(offline=True), gptq()),
    "smooth": smooth_quant(0.85),
    "awq": awq(),
    "equal": equalize(),
    "corrected": chain(smooth_quant(0.85), loftq(rank=2), bias_correction()),
    "compensated": chain(rotate(), bias_correction(), eora(rank=2)),
}
QUICK, SLOW = ("rounded well", "smooth", "equal"), pytest.mark.slow

ROUNDED = 2 * 4 * 4 * 2.0**-24
"""How far the exact results of rewritten values may be from those of the given ones, relative to
the largest: a path has four products, each of up to four factors that are rounded to float32 (a
weight, a gain, two of a map), and the terms of a result add up to about twice the largest in size.
"""


CASES = [
    *(pytest.param(x, PARAMS, id=x, marks=() if x in QUICK else SLOW) for x in ALGORITHMS),
    *(pytest.param(x, STACKED, id=f"{x}, in a scan", marks=SLOW) for x in ALGORITHMS),
]


@pytest.mark.parametrize(("name", "params"), CASES)
def test_sites_are_compared_as_they_compute(name, params):
    quantized = jqx.ptq(network, W8A8, ALGORITHMS[name], progress=False)(params, [USED])
    values, maps = quantized.basis(params)
    result = held_back(network, quantized)(params, [USED], [OTHERS])
    for comparison, x in ((result.used, USED), (result.held_back, OTHERS)):
        y, rows = exact(values, maps, x, quantized)
        real = exact(params, {}, x)
        np.testing.assert_allclose(y, real, rtol=0, atol=ROUNDED * np.abs(real).max())
        want = decibels(real, np.sum((np.float64(quantized(x)) - real) ** 2))
        assert close(comparison.result.sqnr, want)
        for row, (path, step, noise, y) in zip(comparison.sites, rows, strict=True):
            assert (row.path, row.layer) == (path, step)
            assert close(row.local_sqnr, decibels(y, noise)), row
    assert min(row.local_sqnr for row in result.used.sites) > 30
    assert result.used.result.sqnr > 25


def test_compare_has_the_rows_of_held_back_and_finds_what_a_plan_alone_does_not():
    quantized = jqx.ptq(network, W8A8, ALGORITHMS["rounded well"], progress=False)(PARAMS, [USED])
    comparison = jqx.compare(network, quantized)(PARAMS, USED)
    used = held_back(network, quantized)(PARAMS, [USED], [OTHERS]).used
    for row, other in zip(
        (*comparison.sites, comparison.result), (*used.sites, used.result), strict=True
    ):
        assert row.name == other.name
        assert close(row.sqnr, other.sqnr) and close(row.local_sqnr, other.local_sqnr)
    entries = {entry.sites[0]: entry for entry in quantized.details[1]}
    for row in comparison.sites:
        entry = entries[f"{row.path}:dot_general"]
        assert row.objective == entry.after / entry.before
    plan = quantized.plan, quantized.affines
    wrong = jqx.compare(network, *plan, weights=quantized.params)(PARAMS, USED)
    assert wrong.worst(1)[0].local_sqnr < 0 < 30 < comparison.worst(1)[0].local_sqnr


def quantized_by(algorithm, f=network, params=PARAMS, **options):
    return jqx.ptq(f, W8A8, algorithm, progress=False, **options)(params, [USED])


def test_a_shift_that_corrects_is_in_the_rounded_member_alone():
    """It is in the bias of the first site, and at the second."""

    def f(p, x):
        return jnp.tanh(x @ p["a"] + p["bias"][None]) @ p["b"]

    params = {"a": PARAMS["in"], "bias": PARAMS["gain"], "b": PARAMS["head"]}
    quantized = jqx.ptq(f, jqx.presets.w4a16(), bias_correction(), progress=False)(params, [USED])
    assert (quantized.params["bias"] != params["bias"]).any() and quantized.maps
    comparison = jqx.compare(f, quantized)(params, USED)
    p, x = jax.tree.map(np.float64, params), np.float64(USED)
    real = np.tanh(x @ p["a"] + p["bias"]) @ p["b"]
    noise = np.sum((np.float64(quantized(USED)) - real) ** 2)
    assert close(comparison.result.sqnr, decibels(real, noise))
    assert comparison.result.sqnr > comparison.sites[1].sqnr + 0.1  # the site is before its shift
    lost = np.float64(quantized.params["a"].dequantize()) - p["a"]
    assert close(comparison.sites[0].sqnr, decibels(x @ p["a"], np.sum((x @ lost) ** 2)))


@pytest.mark.slow
def test_functions_that_hoist_has_split_and_bound_functions():
    def f(params, x, by=None):
        y = network(params | {"head": params["head"] * params["mask"][None]}, x)
        return y if by is None else by * y

    params = PARAMS | {"mask": jnp.ones(8).at[3].set(0.0)}
    quantized = quantized_by(smooth_quant(0.85), f, params, hoist=True)
    result = held_back(f, quantized)(params, [USED], [OTHERS])
    real = np.float64(f(params, USED))
    want = decibels(real, np.sum((np.float64(quantized(USED)) - real) ** 2))
    assert close(result.used.result.sqnr, want) and want > 25
    g, computed = jqx.hoist(f, "weights")(params, USED)
    for function, own_params, own_quantized, *more in (
        (f, params, quantized),
        (g, computed, quantized),
        (f, params, quantized.bind(f), 2.0),
    ):
        rows = jqx.compare(function, own_quantized)(own_params, USED, *more)
        assert close(rows.result.sqnr, want)
        assert all(
            close(a.local_sqnr, b.local_sqnr)
            for a, b in zip(rows.sites, result.used.sites, strict=True)
        )


def test_steps_of_a_scan_that_a_policy_selects():
    policy = jqx.presets.w8a8(r"layers[0]/.*") + jqx.presets.w8a16("layers/.*")
    policy += jqx.presets.w8a8("in|head")
    quantize = jqx.ptq(network, policy, smooth_quant(0.85), progress=False)
    quantized = quantize(STACKED, [USED])
    comparison = jqx.compare(network, quantized)(STACKED, USED)
    real = exact(STACKED, {}, USED)
    want = decibels(real, np.sum((np.float64(quantized(USED)) - real) ** 2))
    assert close(comparison.result.sqnr, want, 4) and comparison.worst(1)[0].local_sqnr > 30


def test_a_file_holds_that_codes_stand_for_the_given_weights(tmp_path):
    quantized = quantized_by(chain(gptq(), bias_correction()))
    assert quantized.maps
    again = loaded(quantized, str(tmp_path / "model.safetensors"))
    rows = [jqx.compare(network, x)(PARAMS, USED) for x in (quantized, again)]
    objectives = [row.objective for row in rows[0].sites]
    assert None not in objectives and {row.objective for row in rows[1].sites} == {None}
    plain = [dataclasses.replace(row, objective=None) for row in rows[0].sites]
    assert (tuple(plain), rows[0].result) == (rows[1].sites, rows[1].result)


class Algorithm:
    """Rewrites nothing, and does not say so."""

    def rewrite(self, f, plan, params, batches, *, progress=True):
        return params


@pytest.fixture(scope="module")
def smooth():
    return quantized_by(smooth_quant(0.85))


def loaded(quantized, path):
    jqx.save(path, quantized)
    return jqx.load(path).bind(network)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (
            lambda q, _: jqx.compare(network, q, q.affines, weights=q.params),
            ("compare: a quantized function has `affines` and", "compare(f, quantized)"),
        ),
        (
            lambda q, path: jqx.compare(network, loaded(q, path))(PARAMS, USED),
            ("compare: it is not known what the algorithm did", "weights=quantized.params"),
        ),
        (
            lambda q, path: held_back(network, loaded(q, path))(PARAMS, [USED], [OTHERS]),
            ("held_back: it is not known what the algorithm did", "result of jqx.ptq"),
        ),
        (
            lambda q, _: jqx.compare(network, quantized_by(Algorithm()))(PARAMS, USED),
            ("compare: it is not known what the algorithm did", "AlgorithmResult.basis"),
        ),
        (
            lambda q, _: jqx.compare(network, q)(q.params, USED),
            ("compare: a parameter is quantized already", "'head'"),
        ),
        (
            lambda q, _: jqx.compare(lambda p, x: x @ p["in"], q)(PARAMS, USED),
            ("compare: the plan was made for another function",),
        ),
    ],
)
def test_errors(call, facts, smooth, tmp_path):
    with pytest.raises(ValueError, match="fix: ") as error:
        call(smooth, str(tmp_path / "model.safetensors"))
    assert all(fact in str(error.value) for fact in facts), str(error.value)


def held_by(x):
    """The arrays that an object holds, and what it is made of; not the world of its functions."""
    seen, todo = {}, [x]
    while todo:
        x = todo.pop()
        if id(x) in seen or x is None or isinstance(x, (type, str, bytes, int, float)):
            continue
        seen[id(x)] = x
        if isinstance(x, dict):
            todo += [*x.keys(), *x.values()]
        elif isinstance(x, (list, tuple, set, frozenset)):
            todo += x
        elif isinstance(x, functools.partial):
            todo += [x.func, x.args, x.keywords]
        elif not type(x).__module__.startswith(("jax", "numpy")):
            cells = getattr(x, "__closure__", None) or ()
            todo += [cell.cell_contents for cell in cells]
            todo += [getattr(x, "__self__", None), dict(getattr(x, "__dict__", {}))]
    return [x for x in seen.values() if isinstance(x, (np.ndarray, jax.Array))]


@pytest.mark.parametrize("name", ["both", "smooth", "awq"])
def test_the_basis_holds_no_copy_of_weights(name):
    quantized = quantized_by(ALGORITHMS[name])
    sizes = {HIDDEN * D, 8 * D}
    assert sizes <= {x.size for x in held_by(quantized.params)}
    arrays = held_by(quantized.basis)
    assert arrays and not [x.shape for x in arrays if x.size in sizes and x.dtype != np.int32]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.RMSNorm()(x))


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.head = nnx.RMSNorm(D, rngs=rngs), nnx.Linear(D, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_models_of_flax(kind):
    algorithm = smooth_quant(0.85)
    if kind == "linen":
        module = Linen()
        f, params = module.apply, module.init(jax.random.key(0), USED)
        quantized = jqx.linen.ptq(module, W8A8, algorithm, progress=False)(params, [USED])
    else:
        graph, streams, params = nnx.split(Nnx(), nnx.RngState, ...)
        f = lambda state, x: nnx.merge(graph, streams, state)(x)  # noqa: E731
        quantized = jqx.nnx.ptq(Nnx(), W8A8, algorithm, progress=False)([USED])
        graph, state = nnx.split(Nnx())
        with pytest.raises(ValueError, match=r"keep streams of random numbers in the function"):
            jqx.compare(lambda state, x: nnx.merge(graph, state)(x), quantized)(state, USED)
    comparison, real = jqx.compare(f, quantized)(params, USED), np.float64(f(params, USED))
    want = decibels(real, np.sum((np.float64(quantized(USED)) - real) ** 2))
    assert close(comparison.result.sqnr, want) and close(comparison.sites[0].local_sqnr, want)
    assert want > 35
