"""Transformed functions go through `jax.export`, are written, and read back by another process."""

import pickle
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jqx
from jqx import numerics

from .forms import ACTIVATION, FORMS, POLICIES, K, function, rows, weights
from .models import close, eighths, mlp, normal, plan_of

TOKENS = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
PLATFORMS = ("cpu", "cuda", "tpu")


def spec(qtype, granularity=None, **fields):
    return jqx.QSpec(qtype, granularity or jqx.per_channel(), **fields)


def plain(q):
    return q


WEIGHTS = {
    "int8": (spec(jnp.int8), plain),
    "int8 with zero points": (spec(jnp.int8, symmetric=False), plain),
    "int4": (spec(jnp.int4), plain),
    "uint4 with zero points": (spec(jnp.uint4, symmetric=False), plain),
    "int4 packed": (spec(jnp.int4), jqx.QTensor.pack),
    "uint4 with zero points packed": (spec(jnp.uint4, symmetric=False), lambda q: q.pack(0)),
    "int2 packed": (spec(jnp.int2), jqx.QTensor.pack),
    "int4 for cpu": (spec(jnp.int4), lambda q: q.pack_for("cpu", contracted=-2)),
    "uint8 for cpu": (spec(jnp.uint8, symmetric=False), lambda q: q.pack_for("cpu", contracted=-2)),
    "int4 for gpu": (spec(jnp.int4), lambda q: q.pack_for("gpu", contracted=-2)),
    "nf4": (spec(numerics.nf4), plain),
    "nf4 packed, blocks with a tail": (
        spec(numerics.nf4, jqx.per_group(4, tail=True)),
        jqx.QTensor.pack,
    ),
    "float8": (spec(jnp.float8_e4m3fn), plain),
    "int4 in blocks with a tail": (spec(jnp.int4, jqx.per_group(4, tail=True)), plain),
    "nvfp4": (jqx.QSpec(numerics.nvfp4, jqx.per_group(16, tail=True)), plain),
}
CALLS = {"weights": None, "weights and activations": TOKENS}


def product(w, x):
    return x @ w


def converted(name, calls):
    """A function of quantized weights and rows, and its arguments."""
    weight, laid_out = WEIGHTS[name]
    policy = jqx.Policy([jqx.Rule(weight=weight, activation=CALLS[calls])])
    w, x = eighths(0, K, 8), rows()
    plan = jqx.make_plan(product, policy)(w, x)
    return jax.jit(jqx.convert(product, plan, "dynamic")), (
        laid_out(jqx.quantize_params(w, plan)),
        x,
    )


def simulated():
    """A function of parameters, scales and rows, and its arguments."""
    params = {"w": eighths(0, 16, 24), "b": eighths(1, 24), "v": eighths(2, 5, 24)}
    x = eighths(3, 7, 16)
    plan = jqx.make_plan(mlp, jqx.presets.w8a8(activation={"symmetric": False}))(params, x)
    affines = jqx.affines(plan, jqx.calibrate(mlp, plan)(params, x)[1])

    def f(params, affines, x):
        return jqx.simulate(mlp, plan, affines)(params, x)

    return jax.jit(f), (params, affines, x)


def calibrated(calibrator):
    """A function that returns statistics, and its arguments."""
    policy = jqx.presets.w8a8(activation={"calibrator": calibrator})
    w, x = eighths(0, K, 8), rows()
    return jax.jit(jqx.calibrate(product, jqx.make_plan(product, policy)(w, x))), (w, x)


CALIBRATORS = [
    value
    for value in vars(jqx.calibrators).values()
    if isinstance(value, jqx.calibrators.Calibrator)
] + [jqx.calibrators.fixed(-1, 1), jqx.calibrators.rms(2.0)]

GROUPS = {
    **{
        calls: {f"{name}, {calls}": (converted, name, calls) for name in WEIGHTS} for calls in CALLS
    },
    "calibrate": {str(calibrator): (calibrated, calibrator) for calibrator in CALIBRATORS},
    "simulate": {"simulate": (simulated,)},
}
"""Cases that are written as one function: of the results of all, by their names."""
CASES = [name for group in GROUPS.values() for name in group]


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def form(name):
    """All but a few forms run with the slow tests."""
    few = name in ("scan_xs", "while_carried", "cond", "remat_in_scan", "custom_vjp")
    return pytest.param(name, marks=() if few else pytest.mark.slow)


READER = """
import pathlib, pickle, sys
import jqx
from jax import export

for path in pathlib.Path(sys.argv[1]).glob("*.in"):
    data, args = pickle.loads(path.read_bytes())
    path.with_suffix(".out").write_bytes(pickle.dumps(export.deserialize(data).call(*args)))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Each case: what it returns here, read back here, and read by a process that imports jqx."""
    folder = tmp_path_factory.mktemp("exported")
    here = {}
    for group, cases in GROUPS.items():
        made = {name: make(*args) for name, (make, *args) in cases.items()}
        operands = {name: args for name, (_, args) in made.items()}
        functions = {name: f for name, (f, _) in made.items()}

        def every(operands, functions=functions):
            return {name: f(*operands[name]) for name, f in functions.items()}

        f, path = jax.jit(every), folder / f"{group}.in"
        data = bytearray(export.export(f)(operands).serialize())
        path.write_bytes(pickle.dumps((data, (operands,))))
        here[path.with_suffix(".out")] = f(operands), export.deserialize(data).call(operands)
    subprocess.run([sys.executable, "-c", READER, str(folder)], check=True)
    return {
        name: (expected[name], found[name], there[name])
        for path, (expected, found) in here.items()
        for there in [pickle.loads(path.read_bytes())]
        for name in expected
    }


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_computes_the_same_bits_here_and_elsewhere(name, elsewhere):
    expected, here, there = elsewhere[name]
    assert_same(here, expected)
    assert_same(there, expected)


@pytest.mark.parametrize("name", [form(name) for name in FORMS])
def test_every_control_flow_form_is_exported(name):
    w, x = weights(), rows()
    plan = jqx.make_plan(function(name), POLICIES["weights"])(w, x)
    f, q = jax.jit(jqx.convert(function(name), plan, "dynamic")), jqx.quantize_params(w, plan)
    read = export.deserialize(export.export(f)(q, x).serialize())
    assert_same(read.call(q, x), f(q, x))


def test_quantized_weights_may_be_closed_over():
    w, x = weights()[0], rows()
    plan = jqx.make_plan(product, POLICIES["weights"])(w, x)
    q = jqx.quantize_params(w, plan)
    f = jax.jit(lambda x: jqx.convert(product, plan, "dynamic")(q, x))
    read = export.deserialize(export.export(f)(x).serialize())
    assert_same(read.call(x), f(x))


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", ["int8", "int4 packed", "float8", "int4 in blocks with a tail"])
def test_one_artifact_serves_every_platform(name, calls):
    f, args = converted(name, calls)
    exported = export.export(f, platforms=PLATFORMS)(*args)
    read = export.deserialize(exported.serialize())
    assert read.platforms == PLATFORMS
    assert_same(read.call(*args), f(*args))


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
    read = export.deserialize(exported.serialize())
    for n in (1, 2, 5):
        assert_same(read.call(w, rows(n)), g(w, rows(n)))


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
        for n in numbers:
            x = normal(n, n, 128)
            assert close(exported.call(q, x), g(q, x), terms=128)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_plan_of_symbolic_sizes_is_that_of_any_sizes(name):
    (f, w), policy = SYMBOLIC[name], jqx.Policy(SPECS["weights and activations"])
    plan = plan_of(f, policy, w, batch("b", *rows().shape))
    assert plan == plan_of(f, policy, w, rows(3))
    assert all(site.macs in (None, 0) for site in plan.sites)
    assert "[b" in str(plan) and "multiply-adds" not in str(plan)
    f, x = jax.jit(jqx.convert(f, policy, "dynamic")), rows(2)
    exported = export.export(f)(w, batch("b", *rows().shape))
    assert_same(exported.call(w, x), f(w, x))


def test_a_sum_of_symbolic_length_needs_a_bound():
    policy = jqx.Policy([jqx.Rule(activation=ACTIVATION)])
    f = jax.jit(jqx.convert(lambda p, x: x.T @ x, policy, "dynamic"))
    with pytest.raises(ValueError, match="sums of a symbolic length may not fit") as info:
        export.export(f)((), batch("t", K))
    assert 'constraints=["t <= 4096"]' in str(info.value)
    exported = export.export(f)((), batch("t", K, constraints=["t <= 4096"]))
    assert_same(exported.call((), rows()), f((), rows()))
