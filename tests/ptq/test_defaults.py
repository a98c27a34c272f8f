"""Without an algorithm `ptq` takes what measured best for the formats of a plan, and says what."""

import dataclasses
import json

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

from ..arrays import on_device

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


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


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
    found, same_by_name = ptq(policy), ptq(policy, algorithm)
    same(found.params, same_by_name.params)
    same(found.maps, same_by_name.maps)
    text, separator, notes = same_by_name.report.codes.partition("; ")
    assert f"{text} (effort='seconds'){separator}{notes}" in found.report.codes
    assert str(found.report).endswith(f"\ncodes: {found.report.codes}")
    again = jqx.Plan.from_dict(json.loads(json.dumps(found.plan.to_dict())))
    assert again == found.plan  # what is chosen is not of the plan


def residual(p, x):
    """A block after a norm, and a head."""
    h = (jnp.broadcast_to(p["gain"], x.shape) * x) @ p["in"]
    norm = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5)
    h = h + jnp.tanh(norm @ p["up"]) @ p["down"]
    return h @ p["out"]


def test_weights_of_few_bits_are_rotated_offline_for_quantized_activations():
    params = {"gain": normal(1, D), "in": normal(D, D), "out": normal(D, 8), **PARAMS}
    found = ptq(jqx.presets.w4a8(), None, residual, params)
    assert found.report.codes.startswith("rotate(offline='only'), gptq(") and not found.maps
    by_name = chain(rotate(offline="only"), FITTED)
    same(found.params, ptq(jqx.presets.w4a8(), by_name, residual, params).params)
    weights_alone = ptq(jqx.presets.w4a16(), None, residual, params)
    assert weights_alone.report.codes.startswith("gptq(")


@pytest.mark.slow
def test_more_effort_takes_more():
    minutes, hours = ptq(jqx.presets.w8a16(), effort="minutes"), "hours"
    same(minutes.params, ptq(jqx.presets.w8a16(), FITTED).params)
    assert minutes.report.codes.endswith("(effort='minutes')")
    params = {"layers": [{"up": PARAMS["up"], "down": PARAMS["down"]}] * 2}

    def unrolled(p, x):
        return f(p["layers"][1], f(p["layers"][0], x))

    found = ptq(jqx.presets.w4a16(), None, unrolled, params, effort=hours)
    same(found.params, ptq(jqx.presets.w4a16(), GPTQ, unrolled, params).params)
    found = ptq(INT3, None, unrolled, params, effort=hours)
    learned = auto_round(blocks=r"^.*?\d+")
    same(found.params, ptq(INT3, learned, unrolled, params).params)
    assert "auto_round(blocks=" in found.report.codes and len(found.details) == 2


def test_few_inputs_choose_nothing():
    found = ptq(jqx.presets.w4a4(), batches=[BATCHES[0][:4]] * 2)
    same(found.params, ptq(jqx.presets.w4a4(), rotate()).params)
    assert found.report.codes.startswith(
        "rotate() (effort='seconds'); 8 inputs of 32 channels are too few for gptq("
    )
    found = ptq(jqx.presets.w8a8(), batches=[BATCHES[0][:4]])
    same(found.params, ptq(jqx.presets.w8a8(), nearest()).params)
    assert not found.maps and "4 inputs of 32 channels are too few" in found.report.codes


def grouped(p, x):
    x = x.reshape(4, -1, 1, D)
    out = lax.conv_general_dilated(
        x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), batch_group_count=2
    )
    return out


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
    found = ptq(policy, None, function, params)
    assert fact in found.report.codes
    assert found(BATCHES[0]).shape == function(params, BATCHES[0]).shape


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
    found = jqx.nnx.ptq(model, policy, **options)(BATCHES)
    own = ptq(policy, FITTED, lambda w, x: x @ w, w)
    np.testing.assert_array_equal(
        linen.params["params"]["Dense_0"]["kernel"].codes, own.params.codes
    )
    np.testing.assert_array_equal(found.params["kernel"].codes, own.params.codes)
    assert linen.report.codes == found.report.codes == own.report.codes + " (effort='minutes')"
    jqx.save(tmp_path / "a.safetensors", own)
    assert jqx.load(tmp_path / "a.safetensors").report.codes == own.report.codes


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
        found = ptq(INT3, None, f, effort="hours")
    same(found.params, ptq(INT3, FITTED, f).params)
    assert "without auto_round(): jqx.algorithms.auto_round: the block of" in found.report.codes
    assert "gptq(" in found.report.codes


def test_a_function_of_nothing_is_planned_all_the_same():
    found = ptq(jqx.presets.w4a16(), None, lambda p, x: x[:0] @ p, normal(D, D))
    assert found(BATCHES[0]).shape == (0, D) and "too few" in found.report.codes
