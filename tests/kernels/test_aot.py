"""Every kernel compiled for three TPUs and a GPU that need not be there, at decode and at prefill.

The compiled program must have one kernel for a product, which reads the codes in the bits that they
have; nothing writes them to memory in wider types before.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx import numerics
from jqx._src.diagnostics import lowering as targets

pytestmark = pytest.mark.aot

TARGETS = ("tpu-v5e", "tpu-v6e", "tpu7x", "h200")
ROWS = (1, 8, 32, 512, 2048)
K, N, EXPERTS = 1024, 512, 8

TOKEN = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
FP8_TOKEN = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_token(), dynamic=True)


def grouped(qtype, size, **options):
    return jqx.QSpec(qtype, jqx.per_group(size), **options)


def affine(qtype, size):
    return grouped(qtype, size, symmetric=False, calibrator=jqx.calibrators.minmax)


# Of each scheme: the weight, the activation or None, and what is multiplied.
SCHEMES = {
    "int8 in 128": (grouped(jnp.int8, 128), None, "bf16"),
    "int4 in 128": (grouped(jnp.int4, 128), None, "bf16"),
    "int4 in 16": (grouped(jnp.int4, 16), None, "bf16"),
    "uint4 with zero points": (affine(jnp.uint4, 32), None, "bf16"),
    "int2 in 64": (grouped(jnp.int2, 64), None, "bf16"),
    "fp8 in 64": (grouped(jnp.float8_e5m2, 64), None, "bf16"),
    "nf4": (grouped(numerics.nf4, 64), None, "bf16"),
    "nf4 a channel": (jqx.QSpec(numerics.nf4, jqx.per_channel()), None, "bf16"),
    "mxfp8": (grouped(numerics.mxfp8_e4m3, 32), None, "bf16"),
    "mxfp4": (grouped(numerics.mxfp4, 32), None, "bf16"),
    "mxint8": (grouped(numerics.mxint8, 32), None, "bf16"),
    "nvfp4": (grouped(numerics.nvfp4, 16), None, "bf16"),
    "int8 a channel beside int8": (jqx.QSpec(jnp.int8, jqx.per_channel()), TOKEN, "s8"),
    "int8 in 128 beside int8": (grouped(jnp.int8, 128), TOKEN, "s8"),
    "int4 in 128 beside int8": (grouped(jnp.int4, 128), TOKEN, "s8"),
    "uint4 beside int8": (affine(jnp.uint4, 64), TOKEN, "s8"),
    "fp8 a channel": (jqx.QSpec(jnp.float8_e4m3fn, jqx.per_channel()), FP8_TOKEN, "f8e4m3fn"),
    "fp8 in two dimensions": (
        jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({-2: 128, -1: 128})),
        jqx.QSpec(jnp.float8_e4m3fn, jqx.per_group(128), dynamic=True),
        "f8e4m3fn",
    ),
}
NOT_ON_A_GPU = {"int2 in 64", "int8 a channel beside int8", "fp8 a channel"}
"""XLA's own product of codes is left to it, and codes of two bits lie in no bytes there."""


def needs(target):
    known = targets.TARGETS[target]
    if not any(map(targets._is_installed, known.modules)):
        pytest.skip(f"no compiler for {target}: the extra {known.extra} is not installed")


def dense(w, x):
    return x @ w


def experts(w, x):
    sizes = jnp.full(EXPERTS, len(x) // EXPERTS, jnp.int32)
    return jax.lax.ragged_dot(x, w, sizes)


@functools.cache
def compiled(name, target, rows, f=dense, shape=(K, N)):
    weight, activation, _ = SCHEMES[name]
    w, x = (jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in (shape, (rows, K)))
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=weight, activation=activation)]))(w, x)
    q = jqx.quantize_params(w, plan, target=target)
    return q, jqx.lowering(jqx.convert(f, plan, "dynamic"), q, x, target=target)


def check(q, low, name):
    (found,) = low.contractions
    names = {"int": "s", "uint": "u", "float8_": "f8", "float4_": "f4"}
    kind = q.values.dtype.name
    start = next(start for start in ("float8_", "float4_", "uint", "int") if kind.startswith(start))
    codes = names[start] + kind.removeprefix(start)
    assert found.runs in ("tpu_custom_call", "__gpu$xla.gpu.triton"), found
    assert set(found.dtypes) == {SCHEMES[name][2]}, found
    assert found.reads[1] == (codes,) and found.widened == (), found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_product_is_one_kernel_that_reads_the_codes(name, target):
    needs(target)
    if target == "h200" and name in NOT_ON_A_GPU:
        pytest.skip("no kernel is for it there")
    for rows in ROWS:
        q, low = compiled(name, target, rows)
        check(q, low, name)
        if target != "h200":  # which keeps sums of parts
            # Beside the kernel: rows, results, scales in another form; no weight.
            rest = rows * (K * 3 + N * 8) + N * K // 16 * 8
            assert low.temp_bytes <= rest, (name, rows, low.temp_bytes)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["int4 in 128", "nf4", "mxfp4", "int8 in 128 beside int8", "fp8 in two dimensions"]
)
def test_rows_in_groups_are_one_kernel(name, target):
    needs(target)
    for rows in (8, 32, 512):
        q, low = compiled(name, target, rows, experts, (EXPERTS, K, N))
        check(q, low, name)


def layers(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["int4 in 128", "nf4", "int4 in 128 beside int8"])
def test_a_loop_over_layers_runs_it_once_a_layer(name, target):
    needs(target)
    q, low = compiled(name, target, 8, layers, (4, K, K))
    (found,) = low.contractions
    assert found.times == 4
    check(q, low, name)
    of_a_layer = rf"= [a-z0-9]+\[(1,)?{K},{K}\]"
    assert not re.search(of_a_layer, low.hlo)  # the kernel finds it in the stack
