"""What programs for a GPU and for TPUs must never do, held against every preset, without either.

Each is known to leave the matrix units, or to read a weight in more bits than its codes have.
Cells that violate a rule today stand in `KNOWN`, with the reason; they must go on failing, so that
mending one takes it off the list.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx import lowering, presets
from jqx._src.diagnostics import lowering as targets

pytestmark = pytest.mark.aot

TPUS = ("tpu-v5e", "tpu-v6e", "tpu7x")
ALL = ("h200", *TPUS)
K, N = 512, 1024
DECODE, PREFILL = (1, 8), 512
INTEGERS = ("w8a8", "w8a8_dynamic", "w4a8", "w4a4")
BLOCKS = ("w4a16", "mxfp8", "nf4")
PRESETS = (*INTEGERS, "w8a16", "fp8", *BLOCKS)

KNOWN: dict[tuple[str, str, str, int], str] = {}
"""What compilers do worse than we want, and why: (rule, preset, target, rows). Nothing today."""


def needs(target):
    """Skips a test where the compiler for a target is not installed."""
    compiler = targets.TARGETS[target]
    if not any(map(targets._is_installed, compiler.modules)):
        pytest.skip(f"no compiler for {target}: the extra {compiler.extra} is not installed")


def cells(rule, rows, names=PRESETS):
    """Every preset, target and number of rows; the known violations must fail."""
    results = []
    for preset, target, m in itertools.product(names, ALL, rows):
        reason = KNOWN.get((rule, preset, target, m))
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        results.append(pytest.param(preset, target, m, marks=marks, id=f"{preset}-{target}-{m}"))
    return results


def dense(w, x):
    return x @ w


def bf16(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


@functools.cache
def compiled(preset, target, rows, f=dense, w=(K, N), x=K):
    """The contractions of a layer in bfloat16, quantized by a preset."""
    plan = jqx.make_plan(f, getattr(presets, preset)())(bf16(*w), bf16(rows, x))
    q = jqx.quantize_params(bf16(*w), plan, target=target)
    return lowering(jqx.convert(f, plan, "dynamic"), q, bf16(rows, x), target=target).contractions


@pytest.mark.parametrize("preset, target, rows", cells("units", (8, PREFILL)))
def test_products_run_on_the_units_for_matrices(preset, target, rows):
    """s4 x s4 and u8 x s8 as they are, and 32-bit integers, are loops on a GPU. (Of one row any
    product may be one: reading the weight takes all its time.)
    """
    needs(target)
    result = compiled(preset, target, rows)
    assert result
    for c in result:
        assert "by elements" not in c.runs and "a loop multiplies" not in c.left, c
        assert not {"s32", "u8", "u4"} & {*c.dtypes}, c


@pytest.mark.parametrize("preset, target, rows", cells("types", (8, PREFILL), (*INTEGERS, "fp8")))
def test_both_operands_are_multiplied_as_codes(preset, target, rows):
    """float8 too: scales that stand before a product would make it one of bfloat16."""
    needs(target)
    kinds = {"f8e4m3fn"} if preset == "fp8" else {"s8", "s4"}
    for c in compiled(preset, target, rows):
        assert {*c.dtypes} <= kinds, c
        assert target != "h200" or "s4" not in c.dtypes, c


@pytest.mark.parametrize(
    "preset, target, rows", cells("narrow", (*DECODE, PREFILL), ("w8a16", *BLOCKS))
)
def test_codes_beside_bfloat16_are_not_multiplied_as_float32(preset, target, rows):
    """As a product of mixed types is, as written."""
    needs(target)
    for c in compiled(preset, target, rows):
        assert "f32" not in c.dtypes or "by elements" in c.runs, c


@pytest.mark.parametrize("preset, target, rows", cells("copies none", DECODE))
def test_few_rows_copy_no_weight(preset, target, rows):
    """Reading the codes is what decoding takes its time for."""
    needs(target)
    for c in compiled(preset, target, rows):
        assert c.widened == (), c


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in BLOCKS])
@pytest.mark.parametrize("target", ALL)
def test_scales_for_channels_need_no_copy_for_many_rows_either(preset, target):
    needs(target)
    for c in compiled(preset, target, PREFILL):
        assert c.widened == (), c


def convolution(w, x):
    x = x.reshape(2, 16, 16, 64)
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
@pytest.mark.parametrize("target", ALL)
def test_convolutions_of_int8_compile(preset, target):
    """XLA refuses those with an int32 result on a GPU."""
    needs(target)
    (c,) = compiled(preset, target, 2, convolution, (3, 3, 64, 64), 16 * 16 * 64)
    assert {*c.dtypes} <= {"s8"}, c
    assert c.runs == "__cudnn$convForward" if target == "h200" else c.runs.endswith("fusion"), c


def layers(w, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
    return h


@pytest.mark.parametrize("preset", ["w8a8_dynamic", "w8a16", "w4a16", "w4a8", "fp8"])
@pytest.mark.parametrize("target", ALL)
def test_a_loop_over_layers_carries_codes(preset, target):
    """Compilers may move a conversion out of a loop: then the stack would lie there in float."""
    needs(target)
    result = compiled(preset, target, 8, layers, (4, K, K))
    assert [c.times for c in result] == [4]
    assert result[0].widened == ()


FAULTS = {
    "s4 x s4": (jnp.int4, jnp.int4, jnp.int32, ("s32", "s32")),
    "u8 x s8": (jnp.uint8, jnp.int8, jnp.int32, ("s32", "s32")),
    "bf16 x s8": (jnp.bfloat16, jnp.int8, jnp.float32, ("f32", "f32")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_on_a_gpu(name):
    """Else the rules above could not fail."""
    needs("h200")
    left, right, result, dtypes = FAULTS[name]
    x, w = jax.ShapeDtypeStruct((64, K), left), jax.ShapeDtypeStruct((K, N), right)
    f = functools.partial(jax.lax.dot, preferred_element_type=result)
    (c,) = lowering(f, x, w, target="h200").contractions
    assert c.dtypes == dtypes
    assert (
        c.left == "a loop multiplies s32" if dtypes[0] == "s32" else "multiplied as f32" in c.left
    )


@pytest.mark.parametrize("target", ALL)
def test_a_weight_that_is_dequantized_first_is_seen(target):
    needs(target)

    def by_hand(w, x):
        wide = jax.lax.optimization_barrier(w.values.astype(jnp.float32) * w.scale)
        return x @ wide.astype(jnp.bfloat16)

    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1))
    w = jax.eval_shape(lambda w: jqx.QTensor.quantize(w, spec), jnp.ones((K, N)))
    (c,) = lowering(by_hand, w, bf16(64, K), target=target).contractions
    assert c.widened and c.widened[0].endswith("of w.scale and w.values")


@pytest.mark.parametrize("target", TPUS)
def test_cycles_are_those_of_all_kernels_and_steps(target):
    needs(target)
    w, x = jax.ShapeDtypeStruct((4, K, K), jnp.bfloat16), bf16(8, K)
    low = lowering(layers, w, x, target=target)
    (c,) = low.contractions
    assert c.times == 4 and c.cycles > 0
    assert low.cycles >= 4 * c.cycles


@pytest.mark.parametrize("target", ALL)
def test_what_a_product_before_it_reads_is_not_what_a_product_reads(target):
    """Compilers for TPUs put both into one kernel."""
    needs(target)

    def f(params, x):
        return jax.nn.relu(x @ params["w"]) @ params["v"]

    params = {"w": bf16(1024, 4096), "v": bf16(4096, 1024)}
    explanation = jqx.explain(f, params, bf16(512, 1024), plan=presets.w8a16("w"), target=target)
    assert [site.executed_as for site in explanation.sites] == ["converted", "float"]
