"""Which algorithm `ptq` runs: without one, what measured best for the formats of a plan; or one
that is written here, and asks for statistics that an observer of this file records.
"""

import dataclasses
import json
from typing import Any

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
from jqx.algorithms import auto_round, chain, gptq, nearest, rotate, smooth_quant
from jqx.extend import Observer

from ..arrays import assert_same, on_device
from ..models.layers import conv
from ..models.modules import LinenLayers, NnxLayers

RNG = np.random.default_rng(0)
D = 32


def normal(*shape):
    return on_device(np.float32(RNG.normal(size=shape)))


MIXED = normal(D, D) * on_device(np.exp(-np.arange(D) / 8), jnp.float32)[:, None]
PARAMS = {"up": normal(D, 2 * D), "down": normal(2 * D, D)}
BATCHES = [normal(48, D) @ MIXED for _ in range(3)]
GPTQ = gptq(
    damping=0.05,
    propagation="qep",
    ill_conditioned="round",
    unsupported="round",
    least_inputs=1,
    sweeps=1,
)
FITTED = dataclasses.replace(GPTQ, factors=(0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55))
BITS4 = {"qtype": "int4"}
MX = jqx.Policy([jqx.Rule(weight="mxfp4", activation="mxfp4:dynamic")])
INT3 = jqx.Policy({".*": "int3:group=16"})
NV = jqx.Policy([jqx.Rule(weight="nvfp4", activation="nvfp4:dynamic")])


def f(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def ptq(policy, algorithm=None, function=f, params=PARAMS, batches=BATCHES, **options):
    options = {"target": False, "progress": False, **options}
    return jqx.ptq(function, policy, algorithm, **options)(params, batches)


@pytest.mark.many
@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [
        (jqx.presets.w8a16(), nearest()),
        (jqx.presets.w8a8(), smooth_quant()),
        (jqx.presets.w8a8_dynamic(), smooth_quant()),
        (jqx.presets.mxfp8(), nearest()),
        (jqx.presets.fp8(), nearest()),
        (jqx.presets.w4a16(), GPTQ),
        (jqx.presets.nf4(), GPTQ),
        (jqx.presets.w4a8(), FITTED),
        (jqx.presets.w8a8(weight=BITS4), chain(smooth_quant(), FITTED)),
        (jqx.presets.w4a4(), chain(rotate(), FITTED)),
        (MX, chain(rotate(block=32), GPTQ)),
        (NV, GPTQ),
    ],
    ids=lambda x: None,
)
def test_it_depends_on_the_formats_of_the_plan(policy, algorithm):
    quantized, same_by_name = ptq(policy), ptq(policy, algorithm)
    assert_same(quantized.params, same_by_name.params)
    assert_same(quantized.maps, same_by_name.maps)
    text, separator, notes = same_by_name.report.codes.partition("; ")
    assert f"{text} (effort='seconds'){separator}{notes}" in quantized.report.codes
    assert str(quantized.report).endswith(f"\ncodes: {quantized.report.codes}")
    again = jqx.Plan.from_dict(json.loads(json.dumps(quantized.plan.to_dict())))
    assert again == quantized.plan  # what is chosen is not of the plan


def residual(p, x):
    """A block after a norm, and a head."""
    h = (jnp.broadcast_to(p["gain"], x.shape) * x) @ p["in"]
    norm = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5)
    h = h + jnp.tanh(norm @ p["up"]) @ p["down"]
    return h @ p["out"]


def test_weights_of_few_bits_are_rotated_offline_for_quantized_activations():
    params = {"gain": normal(1, D), "in": normal(D, D), "out": normal(D, 8), **PARAMS}
    quantized = ptq(jqx.presets.w4a8(), None, residual, params)
    assert quantized.report.codes.startswith("rotate(offline='only'), gptq(") and not quantized.maps
    by_name = chain(rotate(offline="only"), FITTED)
    assert_same(quantized.params, ptq(jqx.presets.w4a8(), by_name, residual, params).params)
    weights_alone = ptq(jqx.presets.w4a16(), None, residual, params)
    assert weights_alone.report.codes.startswith("gptq(")


@pytest.mark.slow
def test_more_effort_takes_more():
    minutes, hours = ptq(jqx.presets.w8a16(), effort="minutes"), "hours"
    assert_same(minutes.params, ptq(jqx.presets.w8a16(), FITTED).params)
    assert minutes.report.codes.endswith("(effort='minutes')")
    params = {"layers": [{"up": PARAMS["up"], "down": PARAMS["down"]}] * 2}

    def unrolled(p, x):
        return f(p["layers"][1], f(p["layers"][0], x))

    quantized = ptq(jqx.presets.w4a16(), None, unrolled, params, effort=hours)
    assert_same(quantized.params, ptq(jqx.presets.w4a16(), GPTQ, unrolled, params).params)
    quantized = ptq(INT3, None, unrolled, params, effort=hours)
    learned = auto_round(blocks=r"^.*?\d+")
    assert_same(quantized.params, ptq(INT3, learned, unrolled, params).params)
    assert "auto_round(blocks=" in quantized.report.codes and len(quantized.details) == 2


def test_few_inputs_choose_nothing():
    quantized = ptq(jqx.presets.w4a4(), batches=[BATCHES[0][:4]] * 2)
    assert_same(quantized.params, ptq(jqx.presets.w4a4(), rotate()).params)
    assert quantized.report.codes.startswith(
        "rotate() (effort='seconds'); 8 inputs of 32 channels are too few for gptq("
    )
    quantized = ptq(jqx.presets.w8a8(), batches=[BATCHES[0][:4]])
    assert_same(quantized.params, ptq(jqx.presets.w8a8(), nearest()).params)
    assert not quantized.maps and "4 inputs of 32 channels are too few" in quantized.report.codes


def grouped(p, x):
    return conv(x.reshape(4, -1, 1, D), p, batch_group_count=2)


def looked_up(p, x):
    return p[jnp.argmax(x, 1)] * 2


WHOLE = {
    "groups of a batch": (grouped, normal(1, 1, D, D), {".*": "int4"}, "gptq("),
    "a table": (looked_up, normal(9, D), jqx.Policy([jqx.Rule(tables="int4")]), "nearest()"),
    "a loop": (
        lambda p, x: lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ p), x),
        normal(D, D),
        {".*": jqx.presets.w8a8(weight={"qtype": "int4"})},
        "smooth_quant(), gptq(",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_it_leaves_out_what_does_not_fit_a_function_and_says_so(name):
    function, params, policy, fact = WHOLE[name]
    policy = policy if isinstance(policy, jqx.Policy) else jqx.Policy(policy)
    quantized = ptq(policy, None, function, params)
    assert fact in quantized.report.codes
    assert quantized(BATCHES[0]).shape == function(params, BATCHES[0]).shape


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D, use_bias=False)(x)


def test_linen_and_nnx_take_an_effort_and_files_keep_the_choice(tmp_path):
    w, policy = normal(D, D), jqx.presets.w8a16()
    options = {"target": False, "progress": False, "effort": "minutes"}
    linen = jqx.linen.ptq(Net(), policy, **options)({"params": {"Dense_0": {"kernel": w}}}, BATCHES)
    model = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = w
    quantized = jqx.nnx.ptq(model, policy, **options)(BATCHES)
    by_function = ptq(policy, FITTED, lambda w, x: x @ w, w)
    np.testing.assert_array_equal(
        linen.params["params"]["Dense_0"]["kernel"].codes, by_function.params.codes
    )
    np.testing.assert_array_equal(quantized.params["kernel"].codes, by_function.params.codes)
    assert (
        linen.report.codes
        == quantized.report.codes
        == by_function.report.codes + " (effort='minutes')"
    )
    jqx.save(tmp_path / "a.safetensors", by_function)
    assert jqx.load(tmp_path / "a.safetensors").report.codes == by_function.report.codes


def test_wrong_efforts_are_refused():
    model = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    for call, fact in (
        (lambda: jqx.ptq(f, NV, effort="days"), "pass 'seconds', 'minutes' or 'hours'"),
        (
            lambda: jqx.ptq(f, NV, gptq(), effort="hours"),
            r"`effort`, 'hours', and `algorithm`, gptq\(\),",
        ),
        (lambda: jqx.linen.ptq(Net(), NV, effort=3), r"linen\.ptq: `effort`"),
        (lambda: jqx.nnx.ptq(model, NV, nearest(), effort="hours"), r"nnx\.ptq: `effort`"),
    ):
        with pytest.raises(ValueError, match=fact) as info:
            call()
        assert "fix:" in str(info.value)


def test_where_learning_is_beyond_a_function_gptq_chooses():
    def f(p, x):
        def more(state):
            return jnp.max(jnp.abs(state[1])) > 1e4

        y = lax.while_loop(more, lambda s: (s[0], s[1] / 2), (0, x @ p["up"]))[1]
        return y @ p["down"]

    with pytest.warns(UserWarning, match=r"(?s)does not support this function.+auto_round.+fix"):
        quantized = ptq(INT3, None, f, effort="hours")
    assert_same(quantized.params, ptq(INT3, FITTED, f).params)
    assert "without auto_round(): jqx.algorithms.auto_round: the block of" in quantized.report.codes
    assert "gptq(" in quantized.report.codes


def test_a_function_of_nothing_is_planned_all_the_same():
    quantized = ptq(jqx.presets.w4a16(), None, lambda p, x: x[:0] @ p, normal(D, D))
    assert quantized(BATCHES[0]).shape == (0, D) and "too few" in quantized.report.codes


# Algorithms of users

INT4 = jqx.Policy([jqx.Rule(weight="int4:channel")])
MIX = RNG.normal(size=(16, 16))
CUSTOM_BATCHES = [np.float32(RNG.normal(size=(32, 16)) @ MIX) for _ in range(2)]
FIRST, V = (np.float32(RNG.normal(size=shape)) for shape in ((16, 12), (12, 4)))


@dataclasses.dataclass(frozen=True)
class Rows(Observer):
    """Counts the rows of an operand."""

    def empty(self, operand, site):
        return jnp.float32(0)

    def observe(self, x, site):
        return jnp.float32(x.size // x.shape[site.contracted[0]])

    def merge(self, a, b):
        return a + b


def corrected(w: np.ndarray, hessian: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rounds row after row; what a row loses, the rows after it make good (Frantar, 2022)."""
    damped = hessian + 0.01 * np.trace(hessian) / len(hessian) * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, codes = w.astype(np.float64), np.zeros(w.shape)
    for i in range(len(w)):
        codes[i] = np.clip(np.round(left[i] / scale[0]), -8, 7)
        lost = (left[i] - codes[i] * scale[0]) / upper[i, i]
        left[i + 1 :] -= np.outer(upper[i, i + 1 :], lost)
    return codes


@dataclasses.dataclass(frozen=True)
class Corrected:
    """An algorithm: codes of which each makes good what those before it lost."""

    @property
    def observers(self) -> dict[str, Any]:
        return {".*": (jqx.extend.hessian, Rows())}

    def __call__(self, plan, params, stats):
        inputs = {}
        for site in plan.sites:
            lhs, weight = site.operands
            assert stats[f"{lhs.key}@rows"] == sum(len(x) for x in CUSTOM_BATCHES)
            inputs.setdefault(weight.path, []).append(stats[f"{lhs.key}@hessian"].products)

        def choose(weight, w):
            nearest = jqx.QTensor.quantize(w, weight.spec)
            hessian = np.float64(sum(inputs[weight.path]))
            codes = corrected(np.asarray(w), hessian, np.asarray(nearest.scale))
            return dataclasses.replace(nearest, values=jnp.asarray(codes, nearest.values.dtype))

        return plan.map_weights(choose, params)


def function(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["v"]


def plain(algorithm, policy=INT4):
    params = {"w": jnp.asarray(FIRST), "v": jnp.asarray(V)}
    return ptq(policy, algorithm, function, params, CUSTOM_BATCHES)


def test_an_algorithm_asks_for_statistics_of_functions_and_modules():
    nearest, better = plain(jqx.algorithms.nearest()), plain(Corrected())
    gram = sum(np.float64(x).T @ x for x in CUSTOM_BATCHES)
    want = corrected(FIRST, gram, np.asarray(nearest.params["w"].scale))
    result = np.asarray(better.params["w"].values, np.float64)
    assert np.mean(result == want) > 0.98  # sums of squares are float32 there
    x = np.concatenate(CUSTOM_BATCHES)
    lost = [
        np.linalg.norm(x @ (q.params["w"].dequantize() - FIRST)) / np.linalg.norm(x @ FIRST)
        for q in (nearest, better)
    ]
    assert lost[1] < 0.8 * lost[0], lost

    layers = {"a": {"kernel": jnp.asarray(FIRST)}, "b": {"kernel": jnp.asarray(V)}}
    options, module = {"target": False, "progress": False}, LinenLayers((12, 4), use_bias=False)
    linen = jqx.linen.ptq(module, INT4, Corrected(), **options)({"params": layers}, CUSTOM_BATCHES)
    model = NnxLayers((16, 12, 4), use_bias=False)
    for name in "ab":
        getattr(model, name).kernel.set_value(layers[name]["kernel"])
    model = jqx.nnx.ptq(model, INT4, Corrected(), **options)(CUSTOM_BATCHES)
    for params in (linen.params["params"], model.params):
        for name, weight in zip("ab", "wv", strict=True):
            assert_same(params[name]["kernel"].values, better.params[weight].values)


def test_scales_of_activations_are_calibrated_too():
    policy = jqx.Policy([jqx.Rule(weight="int4:channel", activation="int8")])
    quantized, nearest = plain(Corrected(), policy), plain(jqx.algorithms.nearest(), policy)
    assert set(quantized.affines) == {"w:dot_general:lhs", "v:dot_general:lhs"}
    for key, affine in nearest.affines.items():
        np.testing.assert_array_equal(quantized.affines[key].scale, affine.scale)


def test_what_is_no_algorithm_is_refused():
    def asks(plan, params, stats):
        return params

    asks.observers = {"nowhere": jqx.extend.mean}  # pyright: ignore
    for algorithm, error, fact in (
        (3, TypeError, r"jqx\.ptq: `algorithm` is not an algorithm"),
        (Corrected, TypeError, r"call the class: Corrected\(\)"),
        (asks, ValueError, "matches no site"),
        (lambda plan, params, stats: None, ValueError, "other parameters"),
    ):
        with pytest.raises(error, match=fact) as info:
            plain(algorithm)
        assert "fix:" in str(info.value)


class Hostile:
    """An object of a user that can neither be compared nor printed."""

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __repr__(self):
        raise RuntimeError("printed")

    __hash__ = None


@dataclasses.dataclass(eq=False)
class Fields:
    """An algorithm whose fields are arrays, or have names that mean something in jqx."""

    mask: Any = None
    function: Any = jnp.abs
    algorithms: Any = ("first", "second")
    run: int = 3
    correct: bool = True
    rewrite: str = "no"
    other: Any = dataclasses.field(default_factory=Hostile)

    def __call__(self, plan, params, stats):
        return params


@pytest.mark.parametrize("mask", [None, np.ones(3), jnp.ones((2, 2)), Hostile()])
def test_fields_of_an_algorithm_are_its_own(mask):
    f, policy = lambda w, x: x @ w, jqx.presets.w8a16()
    quantized = jqx.ptq(f, policy, Fields(mask), progress=False, target=False)(
        FIRST, CUSTOM_BATCHES
    )
    assert quantized.report.codes.startswith("fields(")
    if hasattr(mask, "shape"):
        assert f"mask={mask.dtype}{list(mask.shape)}" in quantized.report.codes
    chained = jqx.algorithms.chain(jqx.algorithms.smooth_quant(strength=0.85), Fields(mask))
    assert chained.algorithms[1].mask is mask
    with pytest.raises(ValueError, match="exclude each other"):
        jqx.ptq(f, policy, Fields(mask), effort="hours")
    with pytest.raises(TypeError, match="not an algorithm"):
        jqx.ptq(f, policy, Hostile())
