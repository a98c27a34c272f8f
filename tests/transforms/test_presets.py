"""What is simulated with a preset is what is converted: code by code, and end to end.

Between two sites both compute in float32, in another order, so that an activation may come out one
rounding apart, on either side of a tie: that moves its code by a whole step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.tensor.grid import fake_quantize_as

from ..arrays import on_device
from ..models.transforms import mlp, mlp_params, normal, relative
from ..oracles.contractions import equations_of
from ..presets.table import PRESETS, STATIC, every_preset

FEATURES, HEADS, HIDDEN = 64, 4, 160


def centred(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def transformer(params, x):
    """A block of attention and a perceptron."""
    h = centred(x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, params[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / (FEATURES / HEADS) ** 0.5
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, params["o"])
    return x + jax.nn.gelu(centred(x) @ params["up"]) @ params["down"]


def transformer_params():
    split = (FEATURES, HEADS, FEATURES // HEADS)
    shapes = dict.fromkeys("qkv", split) | {"o": (*split[1:], FEATURES)}
    shapes |= {"up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}
    return {name: normal(i, *shape) / 8 for i, (name, shape) in enumerate(shapes.items())}


MODELS = {
    "mlp": (mlp, mlp_params, (32, 16)),
    "transformer": (transformer, transformer_params, (2, 24, FEATURES)),
}


def calibrated(f, preset, params, x):
    plan = jqx.make_plan(f, preset())(params, x)
    seen = jax.jit(lambda params, x: jqx.affines(plan, jqx.calibrate(f, plan)(params, x)[1]))
    return plan, seen(params, x)


def operands(plan, affines, params):
    """(spec, scale given, values) of each quantized operand: weights, and normal activations."""
    for weight in plan.weights:
        yield weight.spec, None, params[weight.path]
    for i, site in enumerate(plan.sites):
        for operand, shape in zip(site.operands, site.shapes, strict=False):
            if operand.role == "activation" and operand.spec is not None:
                x = 2 * np.random.default_rng(i).standard_normal(shape, np.float32)
                yield operand.spec, affines.get(operand.key), on_device(x)


@pytest.mark.many
@every_preset
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_equal_inputs_have_equal_codes_simulated_and_converted(preset, dtype):
    """Twice as large as what was calibrated, so that static codes saturate as well."""
    params = transformer_params()
    x = normal(9, 2, 24, FEATURES)
    plan, affines = calibrated(transformer, preset, params, x)
    specs, scales, arrays = zip(*operands(plan, affines, params), strict=True)

    @jax.jit
    def run(scales, arrays):
        found = []
        for spec, affine, x in zip(specs, scales, arrays, strict=True):
            x = x.astype(dtype)
            q = jqx.QTensor.quantize(x, spec, affine)
            simulated = fake_quantize_as(x, spec, affine)
            again = jqx.QTensor.quantize(simulated, spec, jqx.calibrators.Affine(q.scale))
            found.append((simulated, q.dequantize(), q.values, again.values))
        return found

    found = run(scales, arrays)
    for spec, (simulated, real, codes, again) in zip(specs, found, strict=True):
        assert simulated.dtype == dtype
        np.testing.assert_array_equal(simulated, real, str(spec))
        np.testing.assert_array_equal(again, codes, str(spec))
    assert len(found) == len(plan.weights) + (0 if PRESETS[preset][1] is None else len(plan.sites))


def cases():
    """A transformer is slow to compile: of dynamic presets, with the slow tests."""
    for preset in PRESETS:
        for name in MODELS:
            slow = name == "transformer" and preset not in STATIC
            marks = pytest.mark.slow if slow else ()
            yield pytest.param(preset, name, marks=marks, id=f"{preset.__name__}-{name}")


@pytest.mark.many
@pytest.mark.parametrize(("preset", "name"), list(cases()))
def test_simulated_and_converted_agree_end_to_end(preset, name):
    f, make, shape = MODELS[name]
    params = make()
    plan, affines = calibrated(f, preset, params, normal(9, *shape))
    assert {skip.op for skip in plan.skipped} <= {"dot_general"}  # attention
    simulated = jax.jit(jqx.simulate(f, plan, affines))
    converted = jax.jit(jqx.convert(f, plan, affines))
    q = jqx.quantize_params(params, plan)
    for seed in (9, 10, 11):
        x = normal(seed, *shape)
        expected = simulated(params, x)
        assert relative(converted(q, x), expected) <= 1e-3
        assert relative(expected, f(params, x)) > 1e-3  # or nothing is quantized


def stacked(params, x):
    layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    return jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]


def stacked_params():
    """Weights large enough to be contracted in tiles or digits."""
    return {"layers": normal(0, 3, 144, 144) / 12, "head": normal(1, 144, 144)}


def is_wide(atom):
    return jnp.issubdtype(atom.aval.dtype, jnp.floating) and atom.aval.dtype.itemsize > 1


@every_preset
def test_weights_reach_their_contractions_as_codes(preset):
    """No float array holds a stack of layers, and what a scan steps over are the codes."""
    params, x = stacked_params(), normal(2, 4, 144)
    plan = jqx.make_plan(stacked, preset())(params, x)
    q = jqx.quantize_params(params, plan)
    equations = equations_of(jax.jit(jqx.convert(stacked, plan, "dynamic")), q, x)
    stacks = [v for eqn in equations for v in eqn.outvars if v.aval.shape == (3, 144, 144)]
    assert not any(map(is_wide, stacks))
    scans = [eqn for eqn in equations if eqn.primitive.name == "scan"]
    (layers,) = [eqn for eqn in scans if (3, 144, 144) in [v.aval.shape for v in eqn.invars]]
    codes = [v.aval.dtype for v in layers.invars if v.aval.shape == (3, 144, 144)]
    assert codes == [q["layers"].values.dtype]


@pytest.mark.many
@every_preset
@pytest.mark.parametrize("inside", ["jit", "scan"])
def test_a_weight_that_reaches_an_operation_without_a_quantized_form_is_refused(preset, inside):
    def layer(h, w):
        return h @ w + jnp.sin(w).sum(), None

    forms = {
        "jit": lambda w, x: jax.jit(layer)(x, w)[0],
        "scan": lambda w, x: jax.lax.scan(layer, x, w)[0],
    }
    w = normal(0, 64, 64) if inside == "jit" else normal(0, 2, 64, 64)
    f, x = forms[inside], normal(1, 3, 64)
    with pytest.raises(NotImplementedError, match=r"the weight '', .* reaches `sin`"):
        jqx.make_plan(f, preset())(w, x)
    plan = jqx.make_plan(f, preset(), unsupported="dequantize")(w, x)
    q = jqx.quantize_params(w, plan)
    with pytest.raises(NotImplementedError, match="a quantized array reaches `sin`"):
        jax.eval_shape(jqx.convert(f, plan, "dynamic"), q, x)
    float_form = jqx.convert(f, plan, "dynamic", unsupported="dequantize")
    assert jax.eval_shape(float_form, q, x).shape == x.shape
