"""Transformed functions go through `jax.export`, are written, and read back by another process."""

import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx
from jqx import numerics

from ..models.forms import K, rows
from ..models.transforms import eighths, mlp

TOKENS = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)


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


def planned(name, calls):
    policy = jqx.Policy([jqx.Rule(weight=WEIGHTS[name][0], activation=CALLS[calls])])
    return jqx.make_plan(product, policy)(eighths(0, K, 8), rows())


@functools.cache
def stored():
    """The weights in every format, of one compiled program."""

    @jax.jit
    def quantized(w):
        plans = {name: planned(name, "weights") for name in WEIGHTS}
        return {
            name: laid_out(jqx.quantize_params(w, plans[name]))
            for name, (_, laid_out) in WEIGHTS.items()
        }

    return quantized(eighths(0, K, 8))


def converted(name, calls):
    """A function of quantized weights and rows, and its arguments."""
    f = jqx.convert(product, planned(name, calls), "dynamic")
    return jax.jit(f), (stored()[name], rows())


def simulated():
    """A function of parameters, scales and rows, and its arguments."""
    params = {"w": eighths(0, 16, 24), "b": eighths(1, 24), "v": eighths(2, 5, 24)}
    x = eighths(3, 7, 16)
    plan = jqx.make_plan(mlp, jqx.presets.w8a8(activation={"symmetric": False}))(params, x)
    affines = jqx.affines(plan, jax.jit(jqx.calibrate(mlp, plan))(params, x)[1])

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


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_computes_the_same_bits_here_and_elsewhere(name, elsewhere):
    expected, here, there = elsewhere[name]
    assert_same(here, expected)
    assert_same(there, expected)
