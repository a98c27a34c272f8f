"""Quantized functions as models of LiteRT: products are int8, with the codes of jqx or the next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jqx
from jqx.interop import to_litert

from ..arrays import normal
from .runtime import run

pytestmark = pytest.mark.usefixtures("as_users_write")

STATIC = {"weight": "int8", "activation": "int8"}
W, X = normal(0, 64, 64) / 8, normal(1, 8, 64)
IMAGES = normal(2, 2, 8, 8, 4)
NHWC = ("NHWC", "HWIO", "NHWC")


def quantized(f, policy, params, *args):
    nearest = jqx.algorithms.nearest()
    return jqx.ptq(f, policy, nearest, progress=False)(params, [args])


def simulated(q, *args):
    return jax.jit(jqx.simulate(q.source, q.plan, q.affines))(q.params, *args)


def conv(x, w, **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def within(affine, found, expected, steps=1):
    """Asserts that results are as many steps of a scale away as given."""
    limit = (steps + 0.01) * float(jnp.max(affine.scale))
    np.testing.assert_allclose(found, np.asarray(expected), rtol=0, atol=limit)


def dense(w, b, x):
    return jax.nn.relu(x @ w + b)


def image(w, b, x):
    return jnp.clip(conv(x, w) + b, 0, 6)


def depthwise(w, b, x):
    return jax.nn.relu(conv(x, w, feature_group_count=x.shape[-1]) + b)


def head(w, b, x):
    return x.reshape(len(x), -1) @ w


NETWORKS = {
    "mlp": (
        [("a", dense), ("b", dense), ("c", head)],
        {"a": normal(3, 64, 96) / 8, "b": normal(4, 96, 48) / 10, "c": normal(5, 48, 10) / 7},
        X,
    ),
    "convolutions": (
        [("a", image), ("b", depthwise), ("c", image), ("d", head)],
        {
            "a": normal(6, 3, 3, 4, 16) / 6,
            "b": normal(7, 3, 3, 1, 16) / 3,
            "c": normal(8, 1, 1, 16, 8) / 4,
            "d": normal(9, 512, 10) / 22,
        },
        IMAGES,
    ),
}


@pytest.mark.parametrize("activation", ["int8", "int8:asymmetric:calibrator=minmax"])
@pytest.mark.parametrize("name", NETWORKS)
def test_each_layer_has_the_codes_of_jqx_but_for_a_step(name, activation):
    """Each layer of jqx gets the codes of LiteRT, so that differences do not add up."""
    layers, weights, x = NETWORKS[name]
    biases = {key: normal(20 + i, w.shape[-1]) / 4 for i, (key, w) in enumerate(weights.items())}

    def f(params, x):
        for key, layer in layers:
            x = layer(params[0][key], params[1][key], x)
        return x

    last = layers[-1][0]
    specs = {"weight": "int8", "activation": activation}
    policy = jqx.Policy([jqx.Rule(f"0/{last}", **specs, output=activation), jqx.Rule(**specs)])
    q = quantized(f, policy, (weights, biases), x)
    file = to_litert(q)(x)
    found = run(file, x)
    assert [kinds for kinds, _ in found.products] == [{"int8"}] * len(layers)
    assert found.operations["QUANTIZE"] == found.operations["DEQUANTIZE"] == 1
    scales = [q.affines[site.operands[0].key] for site in q.plan.sites]
    scales.append(q.affines[q.plan.sites[-1].output_key])
    ranges = [[None if part is None else part.reshape(()) for part in affine] for affine in scales]
    codes = jqx.quantize(x, *ranges[0], qtype="int8")
    for i, (key, layer) in enumerate(layers):
        real = jqx.dequantize(codes, *ranges[i])
        y = layer(q.params[0][key].dequantize(), biases[key], real)
        expected = jqx.quantize(y, *ranges[i + 1], qtype="int8")
        codes = jnp.asarray(found.products[i][1]).reshape(expected.shape)
        assert np.abs(codes.astype("i4") - expected.astype("i4")).max() <= 1
        assert (codes != expected).mean() < 0.02
    for each in (found, run(file, x, optimized=True)):
        within(scales[-1], each.outputs[0], simulated(q, x), steps=2)


def heads(params, x):
    q = jnp.einsum("btc,chd->bthd", x.reshape(2, 4, 64), params["q"])
    return jnp.einsum("bthd,hdc->btc", q, params["out"])


def scores(_, x):
    x = x.reshape(2, 4, 64)
    return jnp.einsum("btc,bsc->bts", x, x)


def steps(params, x):
    return lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, params)[0]


def left(params, x):
    return jnp.einsum("hcd,tc->hdt", params, x)


def grouped(params, x):
    return conv(x, params, feature_group_count=2, rhs_dilation=(2, 2))


def words(params, x):
    return params["table"][x] @ params["w"]


FORMS = {
    heads: ({"q": W.reshape(64, 4, 16), "out": W.reshape(4, 16, 64)}, X),
    scores: ({}, X),
    steps: (jnp.stack([W, W[::-1]]), X),
    left: (W.reshape(4, 16, 64).transpose(0, 2, 1), X),
    words: ({"table": normal(10, 50, 64), "w": W}, jnp.array([3, 0, 49])),
    grouped: (normal(11, 3, 3, 2, 8) / 6, IMAGES),
}


@pytest.mark.parametrize("weight", ["int8", "int4"])
@pytest.mark.parametrize("f", FORMS)
def test_products_of_each_form_are_int8(f, weight):
    """Kernels have a matrix for a weight, on the right; scans are unrolled."""
    params, x = FORMS[f]
    specs = {} if f is scores else {"weight": weight, "tables": "int8"}
    q = quantized(f, rule(activation="int8", output="int8", **specs), params, x)
    file = to_litert(q)(x)
    found = run(file, x)
    assert found.products and all(kinds == {"int8"} for kinds, _ in found.products)
    last = q.affines[q.plan.sites[-1].output_key]
    last = last._replace(scale=last.scale[-1:])
    for each in (found, run(file, x, optimized=True)):
        within(last, each.outputs[0], simulated(q, x), steps=3)


def several(params, x, words):
    x = jnp.concatenate([x, params["table"][words]])
    return {"heads": heads(params, x), "image": conv(IMAGES * x[0, 0], params["kernel"])}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_weights_alone_are_codes_in_the_file(scheme):
    words = jnp.array([[3, 0, 5], [7, 1, 2]]).ravel()
    params = {**FORMS[heads][0], "table": normal(12, 50, 64), "kernel": normal(13, 3, 3, 4, 32)}
    args = X[:2], words
    rules = [jqx.Rule("table", weight="int8"), jqx.Rule(weight=scheme)]
    q = quantized(several, jqx.Policy(rules), params, *args)
    file = to_litert(several, q.params, plan=q.plan)(*args)
    assert file == to_litert(q)(*args) and file[4:8] == b"TFL3"
    codes = 50 * 64 + (2 * 64 * 64 + 9 * 4 * 32) // (1 if scheme == "int8" else 2)
    assert len(file) < codes + 4 * IMAGES.size + 12_000
    expected = jax.tree.leaves(simulated(q, *args))
    for x, y in zip(run(file, *args).outputs, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_a_function_in_float_needs_no_plan():
    file = to_litert(lambda w, x: jax.nn.gelu(x @ w), W)(X)
    np.testing.assert_allclose(run(file, X).outputs[0], jax.nn.gelu(X @ W), atol=1e-5)


def branches(params, x):
    return lax.cond(x[0, 0] > 0, lambda: x @ params, lambda: -x @ params)


def experts(params, x):
    return lax.ragged_dot(x, params.reshape(4, 16, 64).swapaxes(1, 2)[:, :, :8], jnp.array([2] * 4))


def product(params, x):
    return x @ params


def batched(params, x):
    return jnp.einsum("bhc,hcd->bhd", x.reshape(8, 2, 32), params)


def lookup(params, x):
    return params[x[:, 0].astype(jnp.int32)]


def rule(**specs):
    return jqx.Policy([jqx.Rule(**specs)])


REFUSED = {
    "dynamic": (product, jqx.presets.w8a8_dynamic(), "int8 per_axis(0) dynamic"),
    "uint8": (product, rule(weight="int8", activation="uint8:asymmetric"), "uint8 per_tensor"),
    "fp8": (product, jqx.presets.fp8(), "float8_e4m3fn"),
    "int4 activations": (product, rule(weight="int4", activation="int4"), "int4 per_tensor"),
    "blocks": (product, jqx.presets.w4a16(), "int4[64, 64]"),
    "zero points": (product, rule(weight="int8:asymmetric"), "zero_point"),
    "codebook": (product, rule(weight="nf4:channel"), "nf4"),
    "two axes": (batched, rule(weight="int8"), "per_axis(0, 2)"),
    "table": (lookup, rule(weight="int4"), "codes in int4"),
    "branch": (branches, rule(weight="int8"), "inside of `cond`"),
    "ragged": (experts, rule(weight="int8"), "ragged_dot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(name):
    f, policy, given = REFUSED[name]
    params = W.reshape(2, 32, 64) if f is batched else W
    plan = jqx.make_plan(f, policy)(params, X)
    affines = {
        key: jqx.calibrators.Affine(jnp.ones((1, 1)), None if spec.symmetric else jnp.uint8([[3]]))
        for key, spec in plan.static_specs().items()
    }
    with pytest.raises(NotImplementedError) as error:
        to_litert(f, params, plan=plan, affines=affines)(X)
    text = str(error.value)
    assert text.startswith("jqx.interop.to_litert: LiteRT has no kernel for ") and "path ''" in text
    assert "expected:" in text and "jqx.Rule('" in text
    assert given in text.split("given:")[1].split("\n")[0]


def test_a_code_that_kernels_do_not_have_is_refused():
    plan = jqx.make_plan(product, jqx.presets.w8a16())(W, X)
    q = jqx.quantize_params(W, plan)
    codes = q.codes.at[0, 0].set(-128)
    with pytest.raises(NotImplementedError, match=r"(?s)code -128.*narrow=True"):
        to_litert(product, jqx.QTensor(codes, q.scale, qtype=q.qtype, dtype=q.dtype), plan=plan)(X)


def test_a_product_that_would_run_in_float_is_refused():
    """The file would hold no int8 product, and the user would not know."""

    def f(params, x):
        return jax.nn.relu(x @ params["a"] + params["b"]) @ params["c"]

    params = {"a": W, "b": normal(14, 64), "c": W}
    for policy, path in ((rule(**STATIC), "c"), (rule(**STATIC, path="a"), "a")):
        with pytest.raises(NotImplementedError, match=r"no scale(?s:.*)output=\"int8\"") as error:
            to_litert(quantized(f, policy, params, X))(X)
        assert f"jqx.Rule('{path}', " in str(error.value)
    policy = jqx.Policy([jqx.Rule("c", **STATIC, output="int8"), jqx.Rule(**STATIC)])
    to_litert(quantized(f, policy, params, X))(X)
    same = {**params, "b": jnp.full(64, 0.5)}  # the converter rounds it to the scale of one channel
    with pytest.raises(NotImplementedError, match=r"rounds a bias wrongly(?s:.*)Rule\('a'"):
        to_litert(quantized(f, policy, same, X))(X)
    volume = rule(**STATIC, output="int8")

    def deep(w, x):
        return lax.conv(x[None, None, None], w[None, None, None, :4, :4], (1, 1, 1), "SAME")

    with pytest.raises(NotImplementedError, match="no int8 kernel for products"):
        to_litert(quantized(deep, volume, W, X))(X)


def test_arguments_are_checked():
    fix = "pass to_litert\\(quantized\\)\\(x\\)"
    q = quantized(product, rule(weight="int8"), W, X)
    with pytest.raises(TypeError, match=fix):
        to_litert(q, W)
    with pytest.raises(TypeError, match="in two steps"):
        to_litert(q, X, X)
    (n,) = export.symbolic_shape("n")
    with pytest.raises(ValueError, match=r"shape \(n, 64\)"):
        to_litert(q)(jax.ShapeDtypeStruct((n, 64), jnp.float32))
    with pytest.raises(ValueError, match=r"'input\[0\]' is not an array"):
        to_litert(q)(jqx.QTensor.quantize(X, jqx.QSpec("int8")))
    with pytest.raises(NotImplementedError, match=r"operations of `f`: .*stablehlo.sort"):
        to_litert(lambda w, x: jnp.sort(x @ w), W)(X)
