"""Weights in a stack are quantized each as if alone, whatever steps over the stack."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics

from ..arrays import normal

LAYERS, K = 3, 32
MINE = numerics.Block(jnp.int4, 8, "mine", scale_qtype=jnp.float8_e5m2)
BLOCKS = {
    form.label: form
    for form in (
        *(numerics.mxfp8_e4m3, numerics.mxfp8_e5m2, numerics.mxfp6_e2m3, numerics.mxfp6_e3m2),
        *(numerics.mxfp4, numerics.mxint8, numerics.nvfp4, MINE),
    )
}
SPECS = {
    **{f"{name} per_group": jqx.QSpec(form) for name, form in BLOCKS.items()},
    "int8 per_channel": jqx.QSpec(jnp.int8, jqx.per_channel()),
    "uint4 per_group": jqx.QSpec(
        jnp.uint4, jqx.per_group(8), symmetric=False, calibrator=jqx.calibrators.minmax
    ),
    "nf4 per_group": jqx.QSpec(numerics.nf4, jqx.per_group(16)),
    "e4m3 per_channel": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_channel()),
}
NAMED = {  # granularity of a layer, and of the stack
    "nvfp4 in tiles": (numerics.nvfp4, {0: 4, 1: 4}, {0: 1, 1: 4, 2: 4}),
    "nvfp4 in blocks": (numerics.nvfp4, {0: 16, 1: 1}, {0: 1, 1: 16, 2: 1}),
    "mxfp4 in tiles": (numerics.mxfp4, {0: 8, 1: 4}, {0: 1, 1: 8, 2: 4}),
}


def layer(w, x):
    return jnp.tanh(x @ w)


def conv(w, x):
    image = x.reshape(1, 4, K)
    return lax.conv_general_dilated(image, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def scan(f, w, x):
    return lax.scan(lambda _, w: (None, f(w, x)), None, w)[1]


def mapped(f, w, x):
    return jax.vmap(f, (0, None))(w, x)


def mapped_in_scan(f, w, x):
    w = w.reshape(1, *w.shape)
    return lax.scan(lambda _, w: (None, mapped(f, w, x)), None, w)[1][0]


STEPS = {
    "scan": scan,
    "loop": lambda f, w, x: jnp.stack([f(w[i], x) for i in range(LAYERS)]),
    "split": lambda f, w, x: jnp.stack([f(v[0], x) for v in jnp.split(w, LAYERS)]),
    "map": lambda f, w, x: lax.map(lambda w: f(w, x), w),
    "indexed": lambda f, w, x: lax.map(lambda i: f(w[i], x), jnp.arange(LAYERS)),
    "vmap, one x for all": mapped,
    "vmap": lambda f, w, x: jax.vmap(f)(w, jnp.stack([x] * LAYERS)),
    "vmap in scan": mapped_in_scan,
    "remat in scan": lambda f, w, x: scan(jax.checkpoint(f), w, x),
}


def ragged(f, w, x):
    rows = jnp.concatenate([x] * LAYERS)
    y = lax.ragged_dot(rows, w, jnp.full(LAYERS, x.shape[0], jnp.int32))
    return jnp.tanh(y).reshape(LAYERS, *x.shape[:1], w.shape[2])


STEPS["ragged"] = ragged
NVFP4 = jqx.QSpec(numerics.nvfp4, jqx.per_group(16, tail=True))
KERNELS = {
    "transposed": (lambda w, x: x @ w.T, (16, K)),
    "heads": (lambda w, x: jnp.einsum("td,dhe->the", x, w), (K, 2, 8)),
    "out of heads": (lambda w, x: jnp.einsum("thd,hde->te", x.reshape(4, 2, 16), w), (2, 16, 8)),
    "conv": (conv, (3, K, 8)),
}
FAST = ("scan", "indexed", "vmap, one x for all", "vmap in scan", "ragged")


def fast_or_slow(name, *fast):
    return name if name in fast else pytest.param(name, marks=pytest.mark.slow)


def policy(spec):
    return jqx.Policy([jqx.Rule(weight=spec)])


def stack(*shape):
    """Layers of so different ranges that a scale of scales for all would serve none."""
    w = normal(0, LAYERS, *shape)
    return w * jnp.array([1.0, 3000.0, 1e-4]).reshape(LAYERS, *[1] * len(shape))


def rows(count=4):
    return normal(1, count, K)


def assert_trees_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def quantized(f, step, spec, of_layer, w, x):
    """Returns a stack in three ways, layer by layer and as a whole, and each layer as if alone."""
    plan = jqx.make_plan(functools.partial(step, f), policy(spec))(w, x)
    assert jqx.Plan.from_dict(plan.to_dict()) == plan
    alone = jqx.make_plan(f, policy(of_layer))(w[0], x)
    q = jqx.quantize_params(w, plan)
    each = [jqx.quantize_params(w[i], alone) for i in range(LAYERS)]
    indexed = [q[i] for i in range(LAYERS)]
    sliced = [jax.tree.map(lambda leaf, i=i: leaf[i], q) for i in range(LAYERS)]
    return plan, each, (indexed, sliced, [jqx.QTensor.stack(each)[i] for i in range(LAYERS)])


def assert_runs_as_if_alone(f, step, spec, w, x):
    @jax.jit
    def run(w, x):
        plan, each, found = quantized(f, step, spec, spec, w, x)
        whole, q = functools.partial(step, f), jqx.quantize_params(w, plan)
        expected = jnp.stack([f(v.dequantize(), x) for v in each])
        results = jqx.convert(whole, plan)(q, x), jqx.simulate(whole, plan)(w, x)
        return each, found, expected, results

    each, found, expected, results = run(w, x)
    for stacked in found:
        assert_trees_equal(stacked, each)
    for result in results:
        largest = np.abs(expected).max(tuple(range(1, expected.ndim)), keepdims=True)
        assert (np.abs(result - expected) <= 1e-5 * largest).all()


LIKE_OTHERS = ("mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8")


@pytest.mark.parametrize("like_others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_format_quantizes_the_layers_of_a_scan_as_if_alone(like_others):
    """In one compiled program, but for formats that differ from others in their codes alone."""
    specs = {
        name: (spec, spec)
        for name, spec in SPECS.items()
        if (name.split()[0] in LIKE_OTHERS) == like_others
    }
    for name, (form, own, whole) in NAMED.items() if not like_others else ():
        specs[name] = [jqx.QSpec(form, jqx.per_block(sizes)) for sizes in (whole, own)]

    @jax.jit
    def run(w, x):
        return {name: quantized(layer, scan, *pair, w, x)[1:] for name, pair in specs.items()}

    for each, found in run(stack(K, 16), rows()).values():
        for stacked in found:
            assert_trees_equal(stacked, each)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_format_runs_the_layers_of_a_scan_as_if_alone(name):
    assert_runs_as_if_alone(layer, scan, SPECS[name], stack(K, 16), rows())


@pytest.mark.many
@pytest.mark.parametrize("step", [fast_or_slow(name, *FAST) for name in STEPS])
def test_whatever_steps_over_the_stack(step):
    assert_runs_as_if_alone(layer, STEPS[step], NVFP4, stack(K, 16), rows())


@pytest.mark.parametrize("step", ["vmap, one x for all", fast_or_slow("scan")])
@pytest.mark.parametrize("kernel", [fast_or_slow(name, "conv", "heads") for name in KERNELS])
def test_kernels_of_any_shape(step, kernel):
    f, shape = KERNELS[kernel]
    assert_runs_as_if_alone(f, STEPS[step], NVFP4, stack(*shape), rows())


@pytest.mark.parametrize("step", [fast_or_slow(name, *FAST) for name in STEPS])
def test_a_stack_with_one_second_scale_is_stepped_over_too(step):
    """As plans and files had it before layers had their own."""
    whole = functools.partial(STEPS[step], layer)
    w, x = stack(K, 16), rows()
    data = jqx.make_plan(whole, policy(NVFP4))(w, x).to_dict()
    (fields,) = data["weights"]
    assert fields["spec"].pop("stacked") == [0]
    plan = jqx.Plan.from_dict(data)
    assert plan.weights[0].spec.stacked == ()

    @jax.jit
    def run(w, x):
        q = jqx.quantize_params(w, plan)
        assert q.scale.scale.shape == (1, 1, 1)
        found = jqx.convert(whole, plan)(q, x), jqx.simulate(whole, plan)(w, x)
        return whole(q.dequantize(), x), found

    expected, results = run(w, x)
    for found in results:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_zero_points_that_layers_share_are_stepped_over_too():
    w, x = stack(K, 16), rows()
    codes = jax.random.randint(jax.random.key(2), w.shape, 0, 15).astype(jnp.uint8)
    scale, zero_point = jnp.ones((LAYERS, 1, 16)) / 16, jnp.full((1, 1, 1), 7, jnp.uint8)
    q = jqx.QTensor(codes, scale, zero_point, qtype=jnp.uint8)
    whole = functools.partial(scan, layer)
    spec = jqx.QSpec(
        jnp.uint8, jqx.per_channel(), symmetric=False, calibrator=jqx.calibrators.minmax
    )
    plan = jqx.make_plan(whole, policy(spec))(w, x)
    found = jax.jit(jqx.convert(whole, plan))(q, x)
    np.testing.assert_allclose(found, whole(q.dequantize(), x), rtol=1e-5, atol=1e-5)


def test_activations_of_a_batch_have_second_scales_of_their_own():
    spec = jqx.QSpec(numerics.nvfp4, dynamic=True)
    rule = jqx.Policy([jqx.Rule(weight=jqx.QSpec(numerics.nvfp4), activation=spec)])
    w, x = stack(K, 16), stack(4, K)
    plan, alone = (jqx.make_plan(f, rule) for f in (jax.vmap(layer), layer))
    whole = jax.jit(jqx.simulate(jax.vmap(layer), plan(w, x)))(w, x)
    one = jax.jit(jqx.simulate(layer, alone(w[0], x[0])))
    each = [one(w[i], x[i]) for i in range(LAYERS)]
    np.testing.assert_allclose(whole, jnp.stack(each), rtol=1e-5, atol=1e-5)
