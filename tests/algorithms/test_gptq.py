"""GPTQ of functions: no row is worse than rounded, in any format; layer after layer. The loop over
columns, against a float64 model of it.
"""

import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.algorithms.gptq import solve
from jqx._src.algorithms.matrices import Drift, Matrix, carried_over, damped, factor, order_of
from jqx.algorithms import gptq
from jqx.calibrators import Affine
from jqx.extend import Observer, places

from ..arrays import on_device
from ..models.layers import conv
from ..oracles.contractions import UNIT, gamma
from ..roundings import exactly

RNG = np.random.default_rng(0)
D, L = 32, 3


def weight(*shape):
    return on_device(np.float32(RNG.normal(size=shape) / np.sqrt(shape[-2])))


PARAMS = {
    "layers": weight(L, D, D),
    "query": weight(D, 2, 16),
    "out": weight(2, 16, D),
    "fused": weight(D, 3 * D),
    "up": weight(D, 80),
    "down": weight(80, D),
}
TWO = {"a": PARAMS["layers"][0], "b": PARAMS["layers"][1]}
MIX = RNG.normal(size=(D, D))
BATCHES = [on_device(np.float32(RNG.normal(size=(n, D)) @ MIX)) for n in (96, 64, 96)]
TEST = on_device(np.float32(RNG.normal(size=(256, D)) @ MIX))


def rest(p, h):
    q = jnp.einsum("bd,dhk->bhk", h, p["query"])
    h = h + jnp.einsum("bhk,hkd->bd", jnp.tanh(q), p["out"])
    a, b, c = jnp.split(p["fused"], 3, axis=1)
    h = h + jnp.tanh(h @ a) + h @ b * jnp.tanh(h @ c)
    return h + jax.nn.relu(h @ p["up"]) @ p["down"]


def scanned(p, x):
    h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w.T), None), x, p["layers"])
    return rest(p, h)


def unrolled(p, x):
    for w in p["layers"]:
        x = x + jnp.tanh(x @ w.T)
    return rest(p, x)


def plan_of(f, scheme, params=PARAMS):
    return jqx.make_plan(f, jqx.Policy({".*": scheme}))(params, TEST)


def run(f, params=PARAMS, scheme="int4", batches=BATCHES, **options):
    """The plan of a function, and what GPTQ chooses."""
    plan = jqx.make_plan(f, jqx.Policy({".*": scheme}))(params, TEST)
    return plan, gptq(**options).run(f, plan, params, batches, progress=False)


def lost(f, plan, params):
    y = jqx.convert(f, plan)(params, TEST)
    return float(jnp.linalg.norm(y - f(PARAMS, TEST)) / jnp.linalg.norm(f(PARAMS, TEST)))


def check_objective(entry, inputs, error):
    """Asserts that what is reported is the squared error of the products of float32 inputs, with
    running errors, and a float32 sum over their rows.
    """
    rows = len(inputs.value)
    exact, off = inputs.value @ error, inputs.error @ np.abs(error)
    bound = np.sum(2 * np.abs(exact) * off + off**2)
    bound += gamma(rows + 4) * np.sum((inputs.size @ np.abs(error)) ** 2)
    assert abs(entry.after - np.sum(exact**2) / rows) <= bound / rows


FORMATS = (
    *("int2:group=16", "int3:group=16", "int4", "int4:group=32", "uint4:group=32:asymmetric"),
    *("int8", "nf4:group=32", "fp8", "mxfp4", "mxfp8", "nvfp4", "int4:block=8"),
)


@pytest.mark.many
@pytest.mark.parametrize("scheme", FORMATS)
def test_no_row_is_worse_than_rounded_to_nearest_with_the_same_scales(scheme):
    plan = plan_of(scanned, scheme)
    algorithm = gptq(sequential=False)
    stats = jqx.calibrate_batches(
        scanned, plan, PARAMS, BATCHES, observers=algorithm.observers, progress=False
    )
    chosen = algorithm(plan, PARAMS, stats)
    nearest = jqx.quantize_params(PARAMS, plan)
    codes = jqx.quantize_params(PARAMS, plan, algorithm=algorithm, stats=stats)
    for a, b in zip(jax.tree.leaves(codes), jax.tree.leaves(chosen.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(chosen.report) == L + 7
    for entry in chosen.report:
        assert entry.after <= entry.before and entry.damping == 0.01 and entry.dead == 0
        assert entry.inputs == sum(len(x) for x in BATCHES)
    # What is reported is true: of `down`, whose Hessian the statistics hold.
    hessian = np.float64(stats["down:dot_general:lhs@hessian"].products)
    of_down = next(entry for entry in chosen.report if entry.path == "down")
    for params, expected in ((chosen.params, of_down.after), (nearest, of_down.before)):
        error = np.float64(PARAMS["down"] - params["down"].dequantize())
        rows = np.einsum("kn,kj,jn->n", error, hessian, error)
        # Both in float64, but for a difference of float32 numbers: of two roundings of its size.
        assert rows.sum() / of_down.inputs == pytest.approx(expected, rel=4 * UNIT)
    assert lost(scanned, plan, chosen.params) < lost(scanned, plan, nearest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_have_the_codes_that_were_chosen(dtype):
    """The objective is that of the codes: nothing is rounded between them."""
    params = {"down": PARAMS["down"].astype(dtype)}
    f = lambda p, x: jnp.tanh(x) @ p["down"].astype(jnp.float32)[:D]  # noqa: E731
    _, chosen = run(f, params, "int8")
    q = chosen.params["down"]
    assert q.dtype == jnp.dtype(dtype)
    real = np.float32(q.values) * np.asarray(q.scale.astype(jnp.float32))
    error = np.float64(params["down"].astype(jnp.float32)) - real
    (entry,) = chosen.report
    check_objective(entry, exactly(np.concatenate(BATCHES)).tanh(), error[:D])
    assert entry.after < entry.before


@pytest.mark.many
@pytest.mark.parametrize("scheme", ["int4", "uint3:group=16:asymmetric", "mxfp4", "int4:tensor"])
def test_factors_and_sweeps_lose_less_and_stay_on_the_grid(scheme):
    """The loss is that of the returned weights, in float64; shared and quantized scales stay."""
    batch = BATCHES[0] @ np.float32(np.diag(np.logspace(-1, 1, D)))
    f = lambda w, x: x @ w  # noqa: E731
    w, x = PARAMS["up"], np.float64(batch)
    losses, scales = [], []
    for options in ({}, {"factors": (0.9, 0.8, 0.7)}, {"factors": (0.9, 0.8, 0.7), "sweeps": 2}):
        quantize = jqx.ptq(f, jqx.Policy({".*": scheme}), gptq(**options), progress=False)
        chosen = quantize(w, [batch])
        error = x @ np.float64(w - chosen.params.dequantize())
        losses.append(float(np.sum(error**2) / len(x)))
        assert chosen.details[0].after == pytest.approx(losses[-1], rel=1e-4)
        scales.append(np.asarray(chosen.params.real_scale().astype(np.float32)))
    plain, searched, swept = losses
    if scheme in ("mxfp4", "int4:tensor"):
        assert searched == plain and all(np.array_equal(scales[0], x) for x in scales)
        assert swept < 1.001 * plain  # the damped error falls; this one may not
    else:
        assert swept < searched < 0.97 * plain
        assert not np.array_equal(scales[0], scales[2])


def test_each_scale_takes_the_factor_of_least_error_where_inputs_are_independent():
    """With unit vectors as inputs, no column makes up for another one; NumPy in float64."""
    factors, size = (0.9, 0.8, 0.7), 16
    heavy = np.random.default_rng(3).choice([0.2, 1, 5], PARAMS["up"].shape)
    w = PARAMS["up"] * np.float32(heavy)
    quantize = partial(jqx.ptq, lambda w, x: x @ w, jqx.Policy({".*": f"int3:group={size}"}))
    plain, fitted = (
        quantize(algorithm, progress=False)(w, [np.eye(D, dtype=np.float32)]).params.scale
        for algorithm in (jqx.algorithms.nearest(), gptq(factors=factors))
    )
    groups = np.float64(w).reshape(-1, size, w.shape[1])
    scales = np.float32(np.asarray(plain)[:, None] * np.float32([1, *factors])[:, None, None, None])
    units = np.clip(np.rint(groups / np.float64(scales)), -4, 3)
    best = np.square(groups - units * np.float64(scales)).sum(2).argmin(0)
    assert len(np.unique(best)) == 4  # each factor is the best one somewhere
    np.testing.assert_array_equal(fitted, np.take_along_axis(scales[:, :, 0], best[None], 0)[0])


SPECTRA = {
    "decaying": 1 / np.arange(1.0, D + 1),
    "slowly": np.arange(1.0, D + 1) ** -0.5,
    "spiked": np.r_[np.full(3, 100.0), np.ones(D - 3)],
    "massive": np.r_[1e4, np.ones(D - 1)],
}


@pytest.mark.many
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_damping_by_ledoit_and_wolf_recovers_more_of_the_optimum(spectrum):
    """The error on infinitely many inputs, of codes chosen from few: in NumPy float64."""
    rng = np.random.default_rng(0)
    f = lambda p, x: [x @ w for w in p]  # noqa: E731
    basis = np.linalg.qr(rng.normal(size=(D, D)))[0]
    truth = (basis * SPECTRA[spectrum]) @ basis.T
    root = (basis * np.sqrt(SPECTRA[spectrum])) @ basis.T
    params = [on_device(np.float32(rng.normal(size=(D, 48)))) for _ in range(3)]
    policy, losses = jqx.Policy({".*": "int3"}), {}
    for rows in (1, 2, 4, 16, 4096):
        batch = on_device(np.float32(rng.normal(size=(rows * D, D)) @ root))
        for damping in (1e-6, "ledoit-wolf"):
            algorithm = gptq(damping=damping, sequential=False)
            chosen = jqx.ptq(f, policy, algorithm, progress=False)(params, [batch])
            lost = [
                np.float64(w - q.dequantize()) for w, q in zip(params, chosen.params, strict=True)
            ]
            losses[rows, damping] = sum(np.sum((truth @ e) * e) for e in lost)
            last = chosen.details[0].damping
    ratios = [losses[rows, "ledoit-wolf"] / losses[rows, 1e-6] for rows in (1, 2, 4, 16)]
    assert max(ratios) < 1.01 and ratios[0] < 0.8 and ratios[1] < 0.98
    # Of very many inputs nearly nothing is added.
    assert last < 1e-2
    assert losses[4096, "ledoit-wolf"] == pytest.approx(losses[4096, 1e-6], rel=0.02)


@pytest.mark.slow
def test_columns_of_large_inputs_come_first_unless_groups_stay_together():
    plan = plan_of(scanned, "int3:group=16")
    options = {}, {"order": "activation"}, {"groups": "dynamic"}
    options += ({"groups": "dynamic", "order": "groups"},)
    algorithms = [gptq(sequential=False, **option) for option in options]
    stats = jqx.calibrate_batches(
        scanned, plan, PARAMS, BATCHES, observers=algorithms[0].observers, progress=False
    )
    one, same, other, likewise = (
        np.asarray(jqx.quantize_params(PARAMS, plan, algorithm=a, stats=stats)["down"].values)
        for a in algorithms
    )
    assert np.array_equal(one, same) and np.array_equal(other, likewise)
    assert not np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("options", [{"order": "groups"}, {"groups": "dynamic"}], ids=str)
def test_column_orders_and_dynamic_groups_lose_less_than_rounding(options):
    plan, chosen = run(scanned, scheme="int4:group=16:asymmetric", **options)
    nearest = jqx.quantize_params(PARAMS, plan)
    assert lost(scanned, plan, chosen.params) < 0.9 * lost(scanned, plan, nearest)


def test_layers_in_a_scan_are_those_one_by_one():
    """The same codes but where sums of products in another order meet a tie."""
    results = [run(f, scheme="int4:group=16")[1].params for f in (scanned, unrolled)]
    for name in PARAMS:
        same = np.asarray(results[0][name].values) == np.asarray(results[1][name].values)
        assert same.mean() >= 0.999, name


def test_of_given_statistics_codes_are_equal_bit_by_bit_scanned_and_unrolled():
    plans = [plan_of(f, "int3:group=16:asymmetric") for f in (scanned, unrolled)]
    stats = jqx.calibrate_batches(
        scanned, plans[0], PARAMS, BATCHES, observers=gptq().observers, progress=False
    )
    apart = {key: value for key, value in stats.items() if not key.startswith("layers")}
    for i in range(L):
        site = "layers:dot_general" + (f"#{i}" if i else "")
        whole = stats["layers:dot_general:lhs@hessian"]
        apart[f"{site}:lhs@hessian"] = jax.tree.map(lambda x, i=i: x[i], whole)
        apart[f"{site}:rhs@places"] = stats["layers:dot_general:rhs@places"][i]
    one, other = (
        jqx.quantize_params(PARAMS, plan, algorithm=gptq(), stats=statistics)
        for plan, statistics in zip(plans, (stats, apart), strict=True)
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_layer_sees_what_those_before_it_quantized_give():
    """A model of three layers in NumPy: inputs of each by the codes chosen before."""
    params = {"layers": PARAMS["layers"]}
    f = lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]  # noqa: E731
    _, chosen = run(f, params)
    codes = np.float64(chosen.params["layers"].dequantize())
    states = exactly(np.concatenate(BATCHES))
    for layer, entry in enumerate(chosen.report):
        check_objective(entry, states, np.float64(params["layers"][layer]) - codes[layer])
        states = (states @ codes[layer]).tanh()


@pytest.mark.many
@pytest.mark.parametrize("propagation", ["qep", "gptaq"])
def test_propagation_loses_less(propagation):
    searched = {"propagation": propagation, "factors": (0.9, 0.8), "sweeps": 1}
    (plan, most), (_, more), (_, plain) = (
        run(scanned, scheme="int3:group=16", **options)
        for options in (searched, {"propagation": propagation}, {})
    )
    losses = [lost(scanned, plan, x.params) for x in (most, more, plain)]
    assert losses == sorted(losses) and losses[0] < losses[1] < losses[2]
    for chosen in (more, most):
        assert all(0 <= entry.after <= entry.before for entry in chosen.report)


@dataclasses.dataclass(frozen=True)
class Operand(Observer):
    """The weight as its site sees it."""

    def looks_at(self, site):
        return site.role == "weight"

    def empty(self, operand, site):
        return jnp.full(jax.eval_shape(site.rows, operand).shape, -jnp.inf, operand.dtype)

    def observe(self, x, site):
        return site.rows(x)

    def merge(self, a, b):
        return jnp.maximum(a, b)


def branches(p, x):
    w = p["fused"][:, ::3]
    x = lax.cond(x.sum() > 1e9, lambda x: x @ w, lambda x: jax.checkpoint(lambda x: x @ w)(x), x)
    x = lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ p["down"].T[:, :D].T[::-1]), x)
    e = jax.vmap(lambda w: x @ w)(p["layers"][::-1].swapaxes(1, 2)).sum(0)
    return e @ (p["up"].reshape(D, 8, 10).transpose(0, 2, 1).reshape(D, 80) * 2.0)


@pytest.mark.parametrize("f", [scanned, unrolled, branches], ids=lambda f: f.__name__)
def test_places_say_which_elements_a_site_multiplies_by(f):
    plan = plan_of(f, "int8:channel" if f is not branches else "int8")
    _, stats = jax.jit(jqx.calibrate(f, plan, observers={".*": (Operand(), places)}))(PARAMS, TEST)
    checked = 0
    for key, elements in stats.items():
        if not key.endswith("@places"):
            continue
        path, seen = key.split(":")[0], np.asarray(stats[key.replace("@places", "@operand")])
        if np.all(np.isinf(seen)):  # in the branch that was not taken
            continue
        result = np.asarray(PARAMS[path]).ravel()[np.asarray(elements)]
        np.testing.assert_array_equal(result * (2 if path == "up" and f is branches else 1), seen)
        checked += 1
    assert checked >= 4


def test_a_loop_and_a_weight_of_two_sites_are_chosen_by_the_sum_of_their_inputs():
    def f(p, x):
        x = lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ p["a"]), x)
        return x @ p["b"] + jnp.sin(x) @ p["b"]

    _, chosen = run(f, TWO)
    rows = {entry.path: entry.inputs for entry in chosen.report}
    count = sum(len(x) for x in BATCHES)
    assert rows == {"a": 2 * count, "b": 2 * count}


def test_arguments_that_are_no_arrays_are_those_of_each_batch():
    def f(p, x, times):
        for _ in range(times):
            x = jnp.tanh(x)
        return jnp.tanh(x @ p["a"]) @ p["b"]

    x = BATCHES[0]
    plan = jqx.make_plan(f, jqx.Policy({".*": "int4"}))(TWO, x, 0)
    batches = [(x, 0), (x, 2), (x, 0)]
    chosen = gptq().run(f, plan, TWO, batches, progress=False)
    same = gptq().run(f, plan, TWO, [(y, 0) for y in (x, jnp.tanh(jnp.tanh(x)), x)])
    for name in TWO:
        np.testing.assert_array_equal(chosen.params[name].values, same.params[name].values)


def test_a_batch_that_another_function_is_traced_for_is_an_error():
    f = lambda p, x: x @ p["a"] if len(x) > 80 else x @ p["a"] @ p["b"]  # noqa: E731
    plan = jqx.make_plan(f, jqx.Policy({".*": "int4"}))(TWO, BATCHES[0])
    with pytest.raises(ValueError, match="another function"):
        gptq().run(f, plan, TWO, BATCHES, progress=False)


def test_a_branch_that_no_batch_takes_is_rounded_and_the_report_says_so():
    def f(p, x):
        return lax.cond(x[0, 0] > 1e9, lambda x: x @ p["a"], lambda x: x @ p["b"], x)

    plan, chosen = run(f, TWO)
    nearest = jqx.quantize_params(TWO, plan)
    np.testing.assert_array_equal(chosen.params["a"].values, nearest["a"].values)
    assert {entry.path: entry.inputs for entry in chosen.report} == {"a": 0, "b": 256}


def test_an_input_that_is_no_number_is_an_error_that_names_the_site():
    bad = [BATCHES[0].at[0, 0].set(jnp.nan)]
    plan = plan_of(scanned, "int4")
    with pytest.raises(ValueError, match=r"(?s)layers:dot_general:lhs\[0\].+fix:"):
        gptq().run(scanned, plan, PARAMS, bad, progress=False)
    none, options = [BATCHES[0] * jnp.nan], {"progress": False, "on_nonfinite": "ignore"}
    with pytest.warns(UserWarning, match="rows that are not finite were left out"):
        chosen = gptq().run(scanned, plan, PARAMS, none, **options)
    assert {entry.why for entry in chosen.report} == {"no batch has reached it"}
    assert "rounded" in str(chosen.report)


def test_ptq_takes_it_and_reports_and_a_bar_shows_how_many_matrices_are_done(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    quantized = jqx.ptq(scanned, jqx.Policy({".*": "int4"}), gptq())(PARAMS, BATCHES[:1])
    assert len(quantized.details) == L + 7
    assert str(quantized.details).count("\n") == L + 8
    assert quantized(TEST).shape == TEST.shape
    pytest.importorskip("tqdm")
    assert f"{L + 7}/{L + 7}" in capsys.readouterr().err


def test_a_strength_may_be_nothing_or_all():
    for strength in (0, 1):
        assert gptq(propagation="qep", strength=strength).strength == strength


def experts(p, x):
    return lax.ragged_dot(jnp.tanh(x), p["w"], jnp.array([48, 0, x.shape[0] - 48], jnp.int32))


def test_experts_are_chosen_by_the_rows_that_reach_them():
    params = {"w": PARAMS["layers"]}
    plan, chosen = run(experts, params)
    assert [entry.inputs for entry in chosen.report] == [144, 0, 112]
    nearest = jqx.quantize_params(params, plan)["w"]
    equal = np.asarray(chosen.params["w"].values) == np.asarray(nearest.values)
    assert equal[1].all() and not equal[0].all() and not equal[2].all()
    assert all(entry.after <= entry.before for entry in chosen.report)
    few = 130 / PARAMS["layers"].shape[1]  # inputs for each column: the third expert has 112
    _, chosen = run(experts, params, least_inputs=few)
    equal = np.asarray(chosen.params["w"].values) == np.asarray(nearest.values)
    assert equal[1:].all() and not equal[0].all()
    assert [entry.damping is None for entry in chosen.report] == [False, True, True]


def kernels(p, x):
    """Convolutions, one of them in groups."""
    image = jnp.tanh(x.reshape(-1, 4, 4, 2))
    h = jnp.tanh(conv(image, p["first"]))
    return conv(h, p["groups"], strides=(2, 2), feature_group_count=4)


def test_kernels_of_convolutions_are_chosen_by_group():
    params = {"first": weight(3, 3, 2, 8), "groups": weight(3, 3, 2, 12)}
    plan, chosen = run(kernels, params)
    shapes = [(8, 18)] + [(3, 18)] * 4
    assert [entry.shape for entry in chosen.report] == shapes
    assert all(entry.after <= entry.before for entry in chosen.report)
    exact, nearest = kernels(params, TEST), jqx.quantize_params(params, plan)
    loss = [
        float(jnp.linalg.norm(jqx.convert(kernels, plan)(q, TEST) - exact))
        for q in (chosen.params, nearest)
    ]
    assert loss[0] < loss[1]


def both_ways(p, x):
    return x @ p["w"] + x @ p["w"].T


def looked_up(p, x):
    return p["w"][jnp.argmax(x, 1)] + x @ p["w"]


REFUSED = {"a table": (looked_up, "in a gather"), "both ways": (both_ways, "in different ways")}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_hessian_is_an_error_that_names_the_weight(name):
    (f, fact), params = REFUSED[name], {"w": PARAMS["layers"][0]}
    rule = jqx.Rule(weight=jqx.QSpec("int4"), tables="weight")
    plan = jqx.make_plan(f, jqx.Policy([rule]))(params, TEST)
    with pytest.raises(NotImplementedError, match=r"jqx\.[a-z.]+: (.|\n)+fix:") as info:
        gptq().run(f, plan, params, BATCHES, progress=False)
    assert "'w" in str(info.value) and fact in str(info.value)
    nearest = jqx.quantize_params(params, plan)["w"]
    for way in ({}, {"sequential": False}):
        chosen = gptq(unsupported="round", **way).run(f, plan, params, BATCHES, progress=False)
        assert jnp.array_equal(chosen.params["w"].codes, nearest.codes)
        (entry,) = chosen.report
        assert entry.damping is None and "rounded" in str(chosen.report) and entry.path == "w"


def test_statistics_are_needed_and_scales_that_rows_share_cannot_be_dynamic():
    plan = plan_of(unrolled, "int4")
    with pytest.raises(NotImplementedError, match=r"algorithm\.observers"):
        jqx.quantize_params(PARAMS, plan, algorithm=gptq())
    with pytest.raises(ValueError, match="`stats` have no effect"):
        jqx.quantize_params(PARAMS, plan, stats={})
    with pytest.raises(ValueError, match="donate=True"):
        jqx.quantize_params(PARAMS, plan, algorithm=gptq(), stats={}, donate=True)
    with pytest.raises(ValueError, match="groups='static'"):
        plan = plan_of(unrolled, "nvfp4")
        gptq(groups="dynamic").run(unrolled, plan, PARAMS, BATCHES, progress=False)


K, N, BLOCK = 96, 24, 32
INT4 = jqx.QSpec("int4", jqx.per_axis(1))


def problem(seed, count=K):
    """Inputs of channels that are far from alike, and a matrix [columns, rows]."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(count, count)) * np.exp(rng.normal(size=count))
    inputs = rng.normal(size=(4 * count, count)) @ mix
    return inputs, np.float32(rng.normal(size=(count, N)))


def oracle(w, upper, carried, rounded):
    """The columns just before they are rounded, where they are rounded as given; float64."""
    left, before = np.float64(w), np.zeros(w.shape)
    for i in range(len(left)):
        before[i] = left[i]
        error = (left[i] - rounded[i]) / upper[i, i]
        left[i + 1 :] -= np.outer(upper[i, i + 1 :], error)
        left[i + 1 :] += np.outer(carried[i, i + 1 :], before[i])
    return before


def run_columns(w, upper, carried=None, affine=None, group=None, spec=INT4, **options):
    arrays = [None if x is None else on_device(x, np.float32) for x in (w, upper, carried)]
    return solve(*arrays, affine, group, spec=spec, size=BLOCK, **options)


def test_a_loss_is_that_of_the_product_with_quantized_inputs_against_the_float_one():
    rng = np.random.default_rng(5)
    exact, rounded, w, q = (rng.normal(size=shape) for shape in ((40, 6), (40, 6), (3, 6), (3, 6)))
    drift = Drift((exact - rounded).T @ rounded, (exact - rounded).T @ (exact - rounded))
    numbers = np.arange(18, dtype=np.int32).reshape(3, 6)
    matrix = Matrix(("w",), (), (), numbers, rounded.T @ rounded, 40, drift)
    lost = ((exact @ w.T - rounded @ q.T) ** 2).sum(0)
    np.testing.assert_allclose(matrix.losses(w, q)[0], lost, rtol=1e-12)
    alone = dataclasses.replace(matrix, drift=None)
    np.testing.assert_allclose(
        alone.losses(w, q)[0], ((rounded @ (w - q).T) ** 2).sum(0), rtol=1e-12
    )


@pytest.mark.parametrize("strength", [0.0, 0.25])
def test_each_column_is_what_a_float64_model_has_before_it_is_rounded(strength):
    inputs, w = problem(0)
    upper = factor(inputs.T @ inputs, 0.01).upper
    drift = 0.1 * np.random.default_rng(1).normal(size=inputs.shape)
    carried = carried_over(upper, drift.T @ inputs, strength)
    scale = np.abs(w).max(0) / 7
    affine = Affine(on_device(scale[None]), None)
    result = run_columns(w, upper, carried, affine, on_device(np.zeros(K, np.int32)))
    expected = oracle(w, upper, carried, np.float64(result.rounded))
    assert np.max(np.abs(expected - result.unrounded) / np.abs(w).max(0)) < 1e-5
    codes = np.clip(np.rint(np.asarray(result.unrounded) / scale), -8, 7)
    # The scale is rounded to float32, and so is its product with a code.
    np.testing.assert_allclose(result.rounded, codes * scale, rtol=2.0**-23)


def test_columns_that_are_given_are_taken():
    inputs, w = problem(2)
    upper = factor(inputs.T @ inputs, 0.01).upper
    targets = np.float32(np.rint(w * 4) / 4)
    affine = Affine(on_device(np.ones((1, N), np.float32)), None)
    group = on_device(np.zeros(K, np.int32))
    result = run_columns(w, upper, None, affine, group, targets=on_device(targets))
    np.testing.assert_array_equal(result.rounded, targets)
    expected = oracle(w, upper, np.zeros((K, K)), np.float64(targets))
    assert np.max(np.abs(expected - result.unrounded) / np.abs(w).max(0)) < 1e-5


def test_scales_of_dynamic_groups_are_those_of_corrected_columns():
    inputs, w = problem(3)
    upper = factor(inputs.T @ inputs, 0.01).upper
    result = run_columns(w, upper)
    first = np.asarray(result.unrounded).reshape(K // BLOCK, BLOCK, N)
    # A group is corrected for all before it when its scale is found, not yet inside of itself.
    left = np.float64(w)
    for group in range(K // BLOCK):
        columns = slice(group * BLOCK, (group + 1) * BLOCK)
        largest = np.abs(left[columns]).max(0)
        # As near as columns are to those of a float64 model.
        far = np.abs(np.asarray(result.scale)[group] * 7 - largest)
        assert np.all(far < 1e-5 * np.abs(w).max(0))
        for i in range(columns.start, columns.stop):
            error = (left[i] - np.asarray(result.rounded)[i]) / upper[i, i]
            left[i + 1 :] -= np.outer(upper[i, i + 1 :], error)
    assert first.shape == (3, BLOCK, N)


def test_the_factor_is_that_of_the_inverse():
    inputs, _ = problem(4)
    hessian = inputs.T @ inputs
    hessian[5] = hessian[:, 5] = 0
    result = factor(hessian, 0.01)
    assert result.damping == 0.01 and np.array_equal(result.upper, np.triu(result.upper))
    inverse = result.upper.T @ result.upper
    assert np.abs(inverse @ damped(hessian, 0.01) - np.eye(K)).max() < 1e-9
    assert inverse[5, 5] == pytest.approx(1) and np.count_nonzero(inverse[5]) == 1


def test_damping_grows_until_it_helps_and_no_further():
    hessian = np.eye(4)
    hessian[0, 1] = hessian[1, 0] = 1.04  # eigenvalues 2.04 and -.04
    assert factor(hessian, 0.01).damping == pytest.approx(0.1)
    hessian[2, 2] = np.nan
    assert factor(hessian, 0.01) is None
    assert factor(np.zeros((4, 4)), 0.01).upper == pytest.approx(np.eye(4))


@pytest.mark.parametrize("order", ["given", "activation", "groups"])
def test_an_order_is_a_permutation_of_the_columns(order):
    rng = np.random.default_rng(5)
    hessian, group = np.diag(rng.permutation(20) + 1.0), np.arange(20) // 8
    result = order_of(hessian, group, order)
    weight = np.diagonal(hessian)[result]
    assert sorted(result) == list(range(20))
    if order == "given":
        assert list(result) == list(range(20))
    elif order == "activation":
        assert list(weight) == sorted(weight, reverse=True)
    else:
        runs = group[result]
        assert list(runs[::8]) in ([0, 1, 2], [1, 0, 2])  # the smaller group last
        assert weight[:8].max() > weight[8:16].max()
        assert all(list(part) == sorted(part, reverse=True) for part in np.split(weight, [8, 16]))
