"""What makes good for rounding after codes are chosen: shifts of results, whose means become those
in float, and low-rank products, the best of their rank by the inputs of a site.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import bias_correction, chain, eora, gptq, loftq, rotate, smooth_quant

from ..arrays import on_device
from ..models.layers import conv, sites_of_every_kind

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
D, H, LAYERS = 8, 12, 3


@pytest.fixture(autouse=True)
def _numbers_of_its_own():
    """A test draws the same numbers whichever tests run before it."""
    RNG.bit_generator.state = np.random.default_rng(2).bit_generator.state


def positive(*shape):
    """Means far from 0: what rounding of weights moves."""
    return on_device(np.abs(RNG.normal(size=shape)) + 0.5, jnp.float32)


def normal(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


PARAMS = {
    "table": normal(10, D),
    "up": normal(LAYERS, D, H),
    "down": normal(LAYERS, H, D) / 4,
    "kernel": normal(3, 3, 2, 4),
    "experts": normal(2, D, 4),
    "stack": normal(2, D, 5),
}
BATCHES = [positive(32, D), positive(16, D)]
POLICY = jqx.Policy(
    [
        jqx.Rule("table", weight="int8", tables="int4"),
        jqx.Rule("up", weight="int3", activation="int4"),
        jqx.Rule("down", weight="int3", activation="int8:token:dynamic"),
        jqx.Rule(".*", weight="int3"),
    ]
)


def means(results):
    """Of each channel of each result; of the stack each matrix has its own."""
    kernel, experts, stack = (results[name] for name in ("kernel", "experts", "stack"))
    return kernel.mean((0, 1, 2)), experts.mean(0), stack.mean(1)


def quantized(batches, algorithm):
    quantize = jqx.ptq(sites_of_every_kind, POLICY, algorithm, target=False, progress=False)
    return quantize(PARAMS, batches)


@pytest.mark.many
@pytest.mark.parametrize("count", [1, 2])
def test_results_have_the_means_of_float(count):
    """To the last bits of one batch, and nearly of several: each has other means."""
    batches = BATCHES[:count]
    rows = [len(x) for x in batches]
    plain, corrected = (quantized(batches, x) for x in (NEAREST, bias_correction()))

    def over_batches(g):
        g = jax.jit(g)
        each = [means(g(x)) for x in batches]
        return [np.average(x, 0, weights=rows) for x in zip(*each, strict=True)]

    exact = over_batches(lambda x: sites_of_every_kind(PARAMS, x))
    share, report = 1e-5 if count == 1 else 0.2, corrected.details
    results = map(over_batches, (corrected, plain))
    for after, before, mean in zip(*results, exact, strict=True):
        lost = np.abs(before - mean).max()
        assert np.abs(after - mean).max() < share * lost and lost > 0.1
    sites = [site.name for site in corrected.plan.sites if site.op != "gather"]
    assert [entry.site for entry in report] == sites
    assert all(x.after <= share * x.before for x in report)
    assert len(str(report).splitlines()) == len(report) + 1
    shapes = {key: channel_maps[0].shift.shape for key, channel_maps in corrected.maps.items()}
    assert shapes == {
        "up:dot_general:out": (LAYERS, H),
        "down:dot_general:out": (LAYERS, D),
        "kernel:conv_general_dilated:out": (4,),
        "experts:ragged_dot:out": (4,),
        "stack:dot_general:out": (2, 5),
    }


def test_sites_in_loops_and_branches_have_one_shift_for_all_steps():
    """What comes after them is corrected as if they were not: the report says what is left."""

    def g(p, x):
        x = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["a"]), x)
        x = lax.cond(x[0, 0] > 9, lambda: x, lambda: x @ p["b"])
        return x @ p["c"]

    params = {name: normal(D, D) for name in "abc"}
    policy = jqx.Policy({".*": "int3"})
    result = jqx.ptq(g, policy, bias_correction(), progress=False)(params, [positive(32, D)])
    assert {key: x[0].shift.shape for key, x in result.maps.items()} == {
        f"{name}:dot_general:out": (D,) for name in "abc"
    }
    a, _, c = result.details
    assert a.after < a.before and c.after > 0


def test_a_lone_site_is_corrected_by_the_formula_of_the_paper():
    w, x = normal(D, 4), positive(64, D)
    g = lambda w, x: x @ w  # noqa: E731
    policy = jqx.Policy({".*": "int3"})
    quantized = jqx.ptq(g, policy, bias_correction(), progress=False)(w, [x[:16], x[16:]])
    codes = jqx.quantize_params(w, quantized.plan).dequantize()
    expected = np.asarray(x).mean(0) @ (np.asarray(w) - np.asarray(codes))
    (shift,) = quantized.maps[":dot_general:out"]
    np.testing.assert_allclose(shift.shift, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_weight_0_have_no_part_in_shifts():
    params = {"a": normal(D, D), "b": normal(D, D), "c": normal(D, 4)}
    x = positive(64, D)

    def g(p, x):
        x = x + jnp.tanh(x @ p["a"]) @ p["b"]
        return x @ p["c"]

    policy, batches = jqx.Policy({".*": "int3"}), [x.at[40:].mul(9)]
    masked = bias_correction(weight=lambda x: jnp.arange(x.shape[0]) < 40)
    a = jqx.ptq(g, policy, masked, progress=False)(params, batches)
    b = jqx.ptq(g, policy, bias_correction(), progress=False)(params, [x[:40]])
    assert len(a.maps) == 3
    for key, (channel_map,) in a.maps.items():
        np.testing.assert_allclose(channel_map.shift, b.maps[key][0].shift, rtol=1e-4, atol=1e-5)
    assert all(x.after <= 1e-4 * x.before for x in a.details)


BIASED = {
    "up": {"kernel": normal(LAYERS, D, H), "bias": normal(LAYERS, H)},
    "down": {"kernel": normal(LAYERS, H, D) / 4, "bias": normal(LAYERS, D)},
    "heads": {"kernel": normal(D, 2, 4), "bias": normal(2, 4)},
    "out": {"kernel": normal(2, 4, D), "bias": normal(D)},
    "conv": {"kernel": normal(3, 3, 2, 4), "bias": normal(4)},
    "stack": {"kernel": normal(2, D, 5), "bias": normal(2, 5)},
}


def biased(p, x):
    """All kinds of biases: of steps of a scan, of heads, behind a sum, of a stack of matrices."""

    def dense(p, x):
        return x @ p["kernel"] + p["bias"][None]

    def layer(x, p):
        return x + jax.nn.relu(dense(p["up"], x)) @ p["down"]["kernel"] + p["down"]["bias"][None], 0

    x = lax.scan(layer, x, {name: p[name] for name in ("up", "down")})[0]
    h = jnp.einsum("bd,dhk->bhk", x, p["heads"]["kernel"]) + p["heads"]["bias"][None]
    h = jnp.einsum("bhk,hkd->bd", jax.nn.relu(h), p["out"]["kernel"])
    x = x + jax.jit(lambda h, bias: h + bias.reshape(1, -1))(h, p["out"]["bias"])
    y = conv(x.reshape(-1, 2, 2, 2), p["conv"]["kernel"]) + p["conv"]["bias"][None, None, None]
    z = jnp.einsum("bsk,bkn->bsn", x.reshape(2, -1, D), p["stack"]["kernel"])
    return y, z + p["stack"]["bias"][:, None]


def additions(function, *args):
    """How many additions a function has, those in functions inside of it too."""

    def count(jaxpr):
        inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(dict(eqn.params), is_leaf=is_one)]
        direct = sum(eqn.primitive.name == "add" for eqn in jaxpr.eqns)
        return direct + sum(count(getattr(x, "jaxpr", x)) for x in inner if is_one(x))

    def is_one(x):
        return hasattr(getattr(x, "jaxpr", x), "eqns")

    return count(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.mark.slow
def test_biases_take_shifts():
    """Nothing is added at run time, and the function is that with shifts at its sites."""
    policy = jqx.Policy({".*kernel": "int3"})
    batches = BATCHES[:1]
    plain, result = (
        jqx.ptq(biased, policy, x, target=False, progress=False)(BIASED, batches)
        for x in (NEAREST, bias_correction())
    )
    assert result.maps == {} and len(result.details) == len(BIASED)
    exact, corrected, before = biased(BIASED, *batches), result(*batches), plain(*batches)
    for axes, x, y, z in zip(((0, 1, 2), (1,)), exact, corrected, before, strict=True):
        lost = np.abs(x.mean(axes) - z.mean(axes)).max()
        assert np.abs(x.mean(axes) - y.mean(axes)).max() <= 1e-5 * lost
    changed = {k for k, v in BIASED.items() if (v["bias"] != result.params[k]["bias"]).any()}
    assert changed == set(BIASED)
    shifts = {
        f"{name}/kernel:{op}:out": jqx.ChannelMap(
            shift=(result.params[name]["bias"] - BIASED[name]["bias"]).reshape(shape)
        )
        for name, op, shape in (
            *((name, "dot_general", (LAYERS, -1)) for name in ("up", "down")),
            *((name, "dot_general", (-1,)) for name in ("heads", "out")),
            ("conv", "conv_general_dilated", (-1,)),
            ("stack", "dot_general", (2, 5)),
        )
    }
    real = jqx.dequantize_params(plain.params)
    mapped = jax.jit(jqx.map_channels(biased, result.plan, shifts))(real, *batches)
    folded = jax.jit(biased)(jqx.dequantize_params(result.params), *batches)
    for x, y in zip(mapped, folded, strict=True):
        assert np.abs(x - y).max() <= 1e-6 * np.abs(x).max()
    counts = [additions(x.function, x.params, *batches) for x in (plain, result)]
    assert counts[0] == counts[1]
    assert additions(biased, BIASED, *batches) == additions(
        jqx.map_channels(biased, result.plan, result.maps), BIASED, *batches
    )


def test_a_bias_with_another_use_takes_nothing():
    names = ("twice", "result", "half", "shared", "own", "number", "one")
    params = {name: normal(D, D) for name in names}
    params["shared"], params["own"] = normal(2, D, D) / 9, normal(D, D) / 9
    biases = {name: normal(D) for name in names}
    biases |= {
        "half": biases["half"].astype(jnp.bfloat16),
        "number": normal(1),
        "one": normal(3),
        "own": normal(2, D),
    }
    policy = jqx.Policy({"0/.*": "int3"})

    def g(p, x):
        w, b = p
        x = x @ w["twice"] + b["twice"][None] + jnp.tanh(b["twice"])[None]
        y = x @ w["result"]
        x = y + b["result"][None] + jnp.tanh(y)
        x = x @ w["half"] + b["half"].astype(jnp.float32)[None]
        x = lax.scan(lambda x, w: (x @ w + b["shared"][None], 0), x, w["shared"])[0]
        x = lax.scan(lambda x, b: (x @ w["own"] + b[None], 0), x, b["own"])[0]
        return x @ w["number"] + b["number"][None] + x @ w["one"] + b["one"][2]

    quantize = jqx.ptq(g, policy, bias_correction(), progress=False)
    result = quantize((params, biases), BATCHES[:1])
    shifted = {f"0/{name}" for name in names if name != "own"}
    assert {key.split(":")[0] for key in result.maps} == shifted
    deltas = jax.tree.map(lambda a, b: np.float32(a - b), result.params[1], biases)
    assert {name for name, delta in deltas.items() if delta.any()} == {"own"}
    # A weight that all steps share has one shift, which the biases of all steps take.
    np.testing.assert_allclose(*deltas["own"], atol=1e-6)


@pytest.mark.slow
def test_it_is_the_last_of_a_chain():
    policy = jqx.Policy([jqx.Rule(".*", weight="int3", activation="int8")])
    g = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]  # noqa: E731
    params, batches = {"a": normal(D, H), "b": normal(H, 4)}, [positive(32, D)]
    algorithms = smooth_quant(strength=0.85), gptq(), bias_correction()
    quantized = jqx.ptq(g, policy, chain(*algorithms), progress=False)(params, batches)
    assert len(quantized.details) == 3 and set(quantized.maps) == {
        f"{name}:dot_general:{side}" for name in "ab" for side in ("lhs", "out")
    }
    result, wanted = quantized(batches[0]).mean(0), g(params, batches[0]).mean(0)
    np.testing.assert_allclose(result, wanted, atol=1e-5)  # the last bits of sums of float32


def test_a_quantized_table_cannot_be_corrected():
    lookup = jqx.Policy([jqx.Rule(".*", weight="int8", tables="int8")])
    with pytest.raises(ValueError, match=r"(?s)bias_correction: .*has a quantized weight.*fix:"):
        quantize = jqx.ptq(lambda p, i: p["t"][i], lookup, bias_correction(), progress=False)
        quantize({"t": normal(4, 8)}, [jnp.array([1])])


# Low-rank products

WIDTH, HIDDEN, TWO = 16, 24, 2
INPUTS = normal(WIDTH, WIDTH) * on_device(np.exp(-np.arange(WIDTH) / 4), jnp.float32)[:, None]
LOW_PARAMS = {
    "up": normal(TWO, WIDTH, HIDDEN),
    "down": normal(TWO, HIDDEN, WIDTH) / 9,
    "stack": normal(2, WIDTH, 5),
    "kernel": normal(3, 3, WIDTH, 4),
}
LOW_BATCHES = [normal(24, WIDTH) @ INPUTS, normal(16, WIDTH) @ INPUTS]
INT2 = jqx.Policy({".*": "int2:channel"})


low_layers = partial(sites_of_every_kind, act=jnp.tanh)


def low_quantized(algorithm):
    return jqx.ptq(low_layers, INT2, algorithm, target=False, progress=False)(
        LOW_PARAMS, LOW_BATCHES
    )


@pytest.mark.slow
def test_the_error_is_that_of_the_best_matrix_of_its_rank():
    result = low_quantized(eora(rank=4))
    report = {x.site: x for x in result.details}
    assert [(x.site.split(":")[0], x.rank) for x in result.details] == [
        *(("up", 4), ("down", 4), ("kernel", 0), ("stack", 4)),
    ]
    assert "not a plain product" in str(result.details)
    # Of the first layer by NumPy: inputs, what is lost, and its singular values.
    x = np.concatenate(LOW_BATCHES).astype(np.float64)
    codes = np.asarray(result.params["up"].dequantize(), np.float64)[0]
    lost = np.asarray(LOW_PARAMS["up"][0], np.float64) - codes
    (low,) = result.maps["up:dot_general:out"]
    a, b = np.asarray(low.a[0], np.float64), np.asarray(low.b[0], np.float64)
    _, s, _ = np.linalg.svd(x @ lost, full_matrices=False)
    error = ((x @ (lost - a @ b)) ** 2).sum()
    np.testing.assert_allclose(error, (s[4:] ** 2).sum(), rtol=1e-3)
    both = report["up:dot_general"]
    assert both.after < 0.6 * both.before
    whole = low_quantized(eora(rank=WIDTH))
    for entry in whole.details:
        assert entry.after <= 1e-6 * entry.before
    exact, compensated = (
        low_layers(LOW_PARAMS, LOW_BATCHES[0])["stack"],
        whole(LOW_BATCHES[0])["stack"],
    )
    assert np.abs(exact - compensated).max() <= 1e-4 * np.abs(exact).max()


@pytest.mark.slow
def test_more_of_a_rank_loses_less_and_others_may_come_before():
    algorithms = chain(rotate(), gptq(), eora(rank=4), bias_correction())
    exact = low_layers(LOW_PARAMS, LOW_BATCHES[0])["stack"]
    results = [low_quantized(x) for x in (NEAREST, eora(rank=2), eora(rank=8), algorithms)]
    errors = [float(((exact - x(LOW_BATCHES[0])["stack"]) ** 2).mean()) for x in results]
    assert errors[:3] == sorted(errors[:3], reverse=True) and errors[2] < 0.5 * errors[0]
    assert errors[3] < errors[1] and len(results[3].details) == 4
    maps = results[3].maps["up:dot_general:out"]
    assert [type(x).__name__ for x in maps] == ["LowRank", "ChannelMap"]


@pytest.mark.parametrize("low_rank", [eora(rank=2), loftq(rank=2)], ids=["eora", "loftq"])
def test_results_with_a_low_rank_product_are_corrected_to_the_means_of_float(low_rank):
    g, w, (x, *_) = (lambda w, x: x @ w), LOW_PARAMS["up"][0], LOW_BATCHES
    plain, result = (
        jqx.ptq(g, INT2, algorithm, target=False, progress=False)(w, [x])(x)
        for algorithm in (low_rank, chain(low_rank, bias_correction()))
    )
    lost, left = (np.abs((g(w, x) - y).mean(0)).max() for y in (plain, result))
    # float32: means of results that are a hundred times what is lost
    assert left <= 1e-3 * lost


def test_rows_of_weight_0_have_no_part_in_low_rank_products():
    batches = [LOW_BATCHES[0].at[16:].mul(9)]
    g, w = (lambda w, x: x @ w), LOW_PARAMS["up"][0]
    masked = eora(rank=2, weight=lambda x: jnp.arange(x.shape[0]) < 16)
    a = jqx.ptq(g, INT2, masked, progress=False)(w, batches)
    b = jqx.ptq(g, INT2, eora(rank=2), progress=False)(w, [LOW_BATCHES[0][:16]])
    (low,), (low_of_cut,) = (x.maps[":dot_general:out"] for x in (a, b))
    np.testing.assert_allclose(low.a @ low.b, low_of_cut.a @ low_of_cut.b, rtol=1e-3, atol=1e-4)


def test_a_function_without_plain_products_has_no_low_rank_products():
    g = lambda w, x: lax.ragged_dot(x, w, jnp.array([2, 2], jnp.int32))  # noqa: E731
    w8a16, params, batches = jqx.presets.w8a16(), normal(2, WIDTH, 4), [normal(4, WIDTH)]
    with pytest.raises(ValueError, match=r"(?s)eora: no site can have.*fix:"):
        jqx.ptq(g, w8a16, eora(), progress=False)(params, batches)


def test_loftq_makes_the_sum_of_codes_and_products_the_weight():
    losses = []
    for rounds in (1, 6):
        result = low_quantized(loftq(rank=4, rounds=rounds))
        report = {x.site.split(":")[0]: x for x in result.details}
        assert set(report) == {"up", "down", "stack"}
        real = jqx.dequantize_params(result.params)
        for name, entry in report.items():
            exact, codes = (np.asarray(tree[name], np.float64) for tree in (LOW_PARAMS, real))
            (low,) = result.maps[f"{name}:dot_general:out"]
            product = np.asarray(low.a, np.float64) @ np.asarray(low.b, np.float64)
            after = ((exact - codes - product) ** 2).sum()
            np.testing.assert_allclose(after, entry.after, rtol=1e-3)
            s = np.linalg.svd(exact - codes, compute_uv=False)
            np.testing.assert_allclose(after, (s[..., 4:] ** 2).sum(), rtol=1e-3)
        losses.append(sum(x.after for x in report.values()))
        if rounds == 1:  # codes are those of rounding to nearest
            nearest = low_quantized(NEAREST).params
            for name in report:
                assert jnp.array_equal(result.params[name].codes, nearest[name].codes)
                lost = np.asarray(LOW_PARAMS[name]) - np.asarray(nearest[name].dequantize())
                np.testing.assert_allclose(report[name].before, (lost**2).sum(), rtol=1e-3)
    assert losses[1] < losses[0]
