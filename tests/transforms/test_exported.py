"""What `jax.export` writes computes what the transformed function does: every form, platform and
size, symbolic ones too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

import jqx

from ..models.forms import ACTIVATION, FORMS, POLICIES, K, function, rows, weights
from ..models.transforms import close, normal, plan_of
from .test_export import CALLS, TOKENS, assert_same, converted, product, spec

PLATFORMS = ("cpu", "cuda", "tpu")


@partial(jax.jit, static_argnums=0)
def both(functions, operands):
    """Results of two functions of the same operands, of each of some; as one compiled program."""
    return [[f(*args) for f in functions] for args in operands]


def assert_computes(exported, f, *operands):
    """What is written and read again is the function, of each of some operands."""
    read = export.deserialize(exported.serialize())
    for found, expected in both((read.call, f), operands):
        assert_same(found, expected)
    return read


def form(name):
    """All but a few forms run with the slow tests."""
    few = name in ("scan_xs", "while_carried", "cond", "remat_in_scan", "custom_vjp")
    return pytest.param(name, marks=() if few else pytest.mark.slow)


@pytest.mark.parametrize("name", [form(name) for name in FORMS])
def test_every_control_flow_form_is_exported(name):
    w, x = weights(), rows()
    plan = jqx.make_plan(function(name), POLICIES["weights"])(w, x)
    f, q = jax.jit(jqx.convert(function(name), plan, "dynamic")), jqx.quantize_params(w, plan)
    assert_computes(export.export(f)(q, x), f, (q, x))


def test_quantized_weights_may_be_closed_over():
    w, x = weights()[0], rows()
    plan = jqx.make_plan(product, POLICIES["weights"])(w, x)
    q = jqx.quantize_params(w, plan)
    f = jax.jit(lambda x: jqx.convert(product, plan, "dynamic")(q, x))
    assert_computes(export.export(f)(x), f, (x,))


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", ["int8", "int4 packed", "float8", "int4 in blocks with a tail"])
def test_one_artifact_serves_every_platform(name, calls):
    f, args = converted(name, calls)
    exported = export.export(f, platforms=PLATFORMS)(*args)
    assert assert_computes(exported, f, args).platforms == PLATFORMS


def attend(w, x):
    scores = jnp.clip(jnp.einsum("btk,bsk->bts", x @ w, x), -2, 2)
    return jnp.einsum("bts,bsk->btk", scores, x)


def convolve(w, x):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def look_up(w, x):
    return w[jnp.max(x, axis=(1, 2)).astype(jnp.int32)]


SYMBOLIC = {
    "product": (product, weights()[0]),
    "stack": (function("scan_xs"), weights()),
    "attention": (attend, weights()[0]),
    "convolution": (convolve, weights()),
    "lookup": (look_up, weights()[0]),
}
"""Functions of weights and [batch, rows, K], whose numbers are exact in any order."""

SPECS = {
    "weights": POLICIES["weights"].rules,
    "weights and activations": (
        *POLICIES["weights and activations"].rules,
        jqx.Rule(activation=ACTIVATION, optional=True),
    ),
    "uint4 and tokens": (jqx.Rule(weight=spec(jnp.uint4, symmetric=False), activation=TOKENS),),
}
TRANSFORMS = {
    "convert": partial(jqx.convert, affines="dynamic"),
    "simulate": partial(jqx.simulate, affines="dynamic"),
    "calibrate": jqx.calibrate,
}


def batch(sizes, *rest, constraints=()):
    (n,) = export.symbolic_shape(sizes, constraints=constraints)
    return jax.ShapeDtypeStruct((n, *rest), jnp.float32)


@pytest.mark.many
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("specs", ["weights", "weights and activations"])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_plan_serves_a_symbolic_batch(name, specs, transform):
    (f, w), policy = SYMBOLIC[name], jqx.Policy(SPECS[specs])
    g = jax.jit(TRANSFORMS[transform](f, plan_of(f, policy, w, rows(2))))
    exported = export.export(g)(w, batch("b", *rows().shape))
    assert_computes(exported, g, *((w, rows(n)) for n in (1, 2, 5)))


@pytest.mark.many
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("granularity", [jqx.per_channel(), jqx.per_group(32)], ids=str)
def test_large_weights_serve_a_symbolic_number_of_rows(specs, granularity):
    rule = SPECS[specs][0]
    weight = jqx.QSpec(rule.weight.qtype, granularity, rule.weight.symmetric)
    policy = jqx.Policy([jqx.Rule(weight=weight, activation=rule.activation)])
    w = normal(0, 128, 144)
    plan = plan_of(product, policy, w, normal(1, 2, 128))
    g, q = jax.jit(jqx.convert(product, plan, "dynamic")), jqx.quantize_params(w, plan)
    for sizes, bounds, numbers in (
        ("b", (), (8, 24)),
        ("8*b", (), (8,)),
        ("b", ("b <= 2",), (1, 2)),
    ):
        exported = export.export(g)(q, batch(sizes, 128, constraints=bounds))
        operands = tuple((q, normal(n, n, 128)) for n in numbers)
        for found, expected in both((exported.call, g), operands):
            assert close(found, expected, terms=128)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_plan_of_symbolic_sizes_is_that_of_any_sizes(name):
    (f, w), policy = SYMBOLIC[name], jqx.Policy(SPECS["weights and activations"])
    plan = plan_of(f, policy, w, batch("b", *rows().shape))
    assert plan == plan_of(f, policy, w, rows(3))
    assert all(site.macs in (None, 0) for site in plan.sites)
    assert "[b" in str(plan) and "multiply-adds" not in str(plan)
    f, x = jax.jit(jqx.convert(f, policy, "dynamic")), rows(2)
    assert_computes(export.export(f)(w, batch("b", *rows().shape)), f, (w, x))


def test_a_sum_of_symbolic_length_needs_a_bound():
    policy = jqx.Policy([jqx.Rule(activation=ACTIVATION)])
    f = jax.jit(jqx.convert(lambda p, x: x.T @ x, policy, "dynamic"))
    with pytest.raises(ValueError, match="sums of a symbolic length may not fit") as info:
        export.export(f)((), batch("t", K))
    assert 'constraints=["t <= 4096"]' in str(info.value)
    exported = export.export(f)((), batch("t", K, constraints=["t <= 4096"]))
    assert_computes(exported, f, ((), rows()))


@pytest.mark.parametrize("format", ["int4", "uint8:asymmetric"])
def test_a_sum_of_floats_by_codes_of_symbolic_length_needs_no_bound(format):
    f = jax.jit(jqx.convert(jnp.matmul, jqx.Policy([jqx.Rule(activation=f"{format}:dynamic")])))
    for constraints in ((), ("t <= 4096",)):
        y = batch("t", 40, constraints=constraints)
        x = jax.ShapeDtypeStruct((8, y.shape[0]), jnp.float32)
        exported = export.export(f)(x, y)
        x, y = normal(0, 8, 300), normal(1, 300, 40)
        assert close(exported.call(x, y), f(x, y), terms=300)


@pytest.mark.parametrize("scheme", ["int8:group=32:dynamic", "mxfp8:dynamic"])
def test_blocks_along_an_axis_of_symbolic_size_are_refused(scheme):
    policy = jqx.Policy([jqx.Rule(activation=scheme)])
    f = jax.jit(jqx.convert(lambda p, x: x.T @ x, policy, "dynamic"))
    with pytest.raises(ValueError, match=r"per_group: axis \d has a symbolic size") as info:
        export.export(f)((), batch("t", K))
    assert "export with a known size" in str(info.value)
