"""Bias correction: means of results become those in float, whatever stands around a site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import bias_correction, chain, gptq, smooth_quant

from ..arrays import on_device

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
D, H, LAYERS = 8, 12, 3


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


def f(p, x):
    """Perceptrons in a scan, a convolution, experts, a stack of matrices and a lookup."""

    def layer(x, p):
        return x + jax.nn.relu(x @ p["up"]) @ p["down"], None

    x = lax.scan(layer, x, {"up": p["up"], "down": p["down"]})[0]
    image = x.reshape(-1, 2, 2, 2)
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = lax.conv_general_dilated(image, p["kernel"], (1, 1), "SAME", **options)
    sizes = jnp.array([x.shape[0] // 4, x.shape[0] - x.shape[0] // 4], jnp.int32)
    z = lax.ragged_dot(x, p["experts"], sizes)
    parts = jnp.einsum("bsk,bkn->bsn", x.reshape(2, -1, D), p["stack"])
    return y, z, parts, p["table"][jnp.arange(3)]


def means(results):
    """Of each channel of each result; of the stack each matrix has its own."""
    y, z, parts, _ = results
    return y.mean((0, 1, 2)), z.mean(0), parts.mean(1)


def quantized(batches, algorithm):
    quantize = jqx.ptq(f, POLICY, algorithm, target=False, progress=False)
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

    exact = over_batches(lambda x: f(PARAMS, x))
    for own, before, wanted in zip(
        over_batches(corrected), over_batches(plain), exact, strict=True
    ):
        lost = np.abs(before - wanted).max()
        assert np.abs(own - wanted).max() < (1e-5 if count == 1 else 0.2) * lost and lost > 0.1
    report = corrected.details
    assert [entry.site for entry in report] == [
        site.name for site in corrected.plan.sites if site.op != "gather"
    ]
    assert all(x.after <= (1e-5 if count == 1 else 0.2) * x.before for x in report)
    assert len(str(report).splitlines()) == len(report) + 1
    shapes = {key: own[0].shift.shape for key, own in corrected.maps.items()}
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
    found = jqx.ptq(g, policy, bias_correction(), progress=False)(params, [positive(32, D)])
    assert {key: x[0].shift.shape for key, x in found.maps.items()} == {
        f"{name}:dot_general:out": (D,) for name in "abc"
    }
    a, _, c = found.details
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


def test_rows_of_weight_0_are_left_out():
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
    for key, (own,) in a.maps.items():
        np.testing.assert_allclose(own.shift, b.maps[key][0].shift, rtol=1e-4, atol=1e-5)
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
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    image = x.reshape(-1, 2, 2, 2)
    y = lax.conv_general_dilated(image, p["conv"]["kernel"], (1, 1), "SAME", **options)
    y = y + p["conv"]["bias"][None, None, None]
    z = jnp.einsum("bsk,bkn->bsn", x.reshape(2, -1, D), p["stack"]["kernel"])
    return y, z + p["stack"]["bias"][:, None]


def additions(function, *args):
    """How many additions a function has, those in functions inside of it too."""

    def count(jaxpr):
        inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(dict(eqn.params), is_leaf=is_one)]
        own = sum(eqn.primitive.name == "add" for eqn in jaxpr.eqns)
        return own + sum(count(getattr(x, "jaxpr", x)) for x in inner if is_one(x))

    def is_one(x):
        return hasattr(getattr(x, "jaxpr", x), "eqns")

    return count(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.mark.slow
def test_biases_take_shifts():
    """Nothing is added at run time, and the function is that with shifts at its sites."""
    policy = jqx.Policy({".*kernel": "int3"})
    batches = BATCHES[:1]
    plain, found = (
        jqx.ptq(biased, policy, x, target=False, progress=False)(BIASED, batches)
        for x in (NEAREST, bias_correction())
    )
    assert found.maps == {} and len(found.details) == len(BIASED)
    exact, own, before = biased(BIASED, *batches), found(*batches), plain(*batches)
    for axes, x, y, z in zip(((0, 1, 2), (1,)), exact, own, before, strict=True):
        lost = np.abs(x.mean(axes) - z.mean(axes)).max()
        assert np.abs(x.mean(axes) - y.mean(axes)).max() <= 1e-5 * lost
    changed = {
        name
        for name, leaves in BIASED.items()
        if (np.asarray(leaves["bias"]) != np.asarray(found.params[name]["bias"])).any()
    }
    assert changed == set(BIASED)
    shifts = {
        f"{name}/kernel:{op}:out": jqx.ChannelMap(
            shift=(found.params[name]["bias"] - BIASED[name]["bias"]).reshape(shape)
        )
        for name, op, shape in (
            *((name, "dot_general", (LAYERS, -1)) for name in ("up", "down")),
            *((name, "dot_general", (-1,)) for name in ("heads", "out")),
            ("conv", "conv_general_dilated", (-1,)),
            ("stack", "dot_general", (2, 5)),
        )
    }
    real = jqx.dequantize_params(plain.params)
    mapped = jax.jit(jqx.map_channels(biased, found.plan, shifts))(real, *batches)
    folded = jax.jit(biased)(jqx.dequantize_params(found.params), *batches)
    for x, y in zip(mapped, folded, strict=True):
        assert np.abs(x - y).max() <= 1e-6 * np.abs(x).max()
    counts = [additions(x.function, x.params, *batches) for x in (plain, found)]
    assert counts[0] == counts[1]
    assert additions(biased, BIASED, *batches) == additions(
        jqx.map_channels(biased, found.plan, found.maps), BIASED, *batches
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

    given = (params, biases)
    found = jqx.ptq(g, policy, bias_correction(), progress=False)(given, BATCHES[:1])
    assert {key.split(":")[0] for key in found.maps} == {
        f"0/{name}" for name in names if name != "own"
    }
    for name in names:
        delta = np.asarray(found.params[1][name] - biases[name], np.float32)
        assert (delta != 0).any() == (name == "own")
    # A weight that all steps share has one shift, which the biases of all steps take.
    np.testing.assert_allclose(delta_of(found, biases, 0), delta_of(found, biases, 1), atol=1e-6)


def delta_of(found, biases, step):
    return found.params[1]["own"][step] - biases["own"][step]


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
    found, wanted = quantized(batches[0]).mean(0), g(params, batches[0]).mean(0)
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # the last bits of sums of float32


def test_what_means_nothing_is_refused():
    for make, error, fact in (
        (lambda: bias_correction(weight=3), TypeError, "`weight`"),
        (lambda: chain(bias_correction(), gptq()), ValueError, "in the wrong order"),
    ):
        with pytest.raises(error, match=rf"(?s)jqx\.algorithms\.\w+: .*{fact}.*fix:"):
            make()
    lookup = jqx.Policy([jqx.Rule(".*", weight="int8", tables="int8")])
    with pytest.raises(ValueError, match=r"(?s)bias_correction: .*has a quantized weight.*fix:"):
        jqx.ptq(lambda p, i: p["t"][i], lookup, bias_correction(), progress=False)(
            {"t": normal(4, 8)}, [jnp.array([1])]
        )
