"""Kernels in contractions, run step by step: formats, dimensions, derivatives, transformations,
rows that are quantized on the way, rows in groups, layers in a scan, and refusals.
"""

import functools
import operator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx
from jqx import numerics
from jqx._src import compat, compat_kernels
from jqx._src.tensor.segments import StackSlice, without_stack

from ..arrays import normal, on_device
from .stepwise import on

targets = pytest.mark.parametrize("target", ["tpu", "gpu"])
platforms = pytest.mark.parametrize("target, platform", [("tpu", "tpu"), ("gpu", "cuda")])

K, N = 128, 32
TOKEN = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)


def blocks(qtype, sizes, **options):
    return jqx.QSpec(qtype, jqx.per_block(sizes), **options)


def affine(qtype, sizes):
    return blocks(qtype, sizes, symmetric=False, calibrator=jqx.calibrators.minmax)


FORMATS = {
    "int8": blocks(jnp.int8, {0: 32, 1: 1}),
    "uint8 with zero points": affine(jnp.uint8, {0: 32, 1: 1}),
    "int4": blocks(jnp.int4, {0: 16, 1: 1}),
    "shared by all columns": blocks(jnp.int8, {0: 32}),
    "blocks of both axes": blocks(jnp.float8_e4m3fn, {0: 32, 1: 16}),
    "nf4": blocks(numerics.nf4, {0: 64, 1: 1}),
    "nf4, one a channel": jqx.QSpec(numerics.nf4, jqx.per_axis(1)),
    "three numbers": jqx.QSpec(numerics.Codebook((-1.0, 0.25, 1.0)), jqx.per_axis(1)),
    "float4": jqx.QSpec(jnp.float4_e2m1fn, jqx.per_axis(1)),
    "mxfp8": blocks(numerics.mxfp8_e5m2, {0: 32, 1: 1}),
    "mxfp4": blocks(numerics.mxfp4, {0: 32, 1: 1}),
    "mxint8": blocks(numerics.mxint8, {0: 32, 1: 1}),
    "nvfp4": blocks(numerics.nvfp4, {0: 16, 1: 1}),
}


def weight(name, target, shape=(K, N)):
    return jqx.QTensor.quantize(normal(1, *shape), FORMATS[name]).pack_for(target)


def run_on(target, f, *args):
    """Returns the result with the kernels of a target, and the names of the formulations."""
    with on(target):
        chosen = [contraction.cpu.name for contraction in jqx.formulations(f)(*args)]
        return jax.jit(lambda *args: f(*args))(*args), chosen


def converted(f, policy, w, *args):
    """Returns a converted function without static scales, and its codes."""
    plan = jqx.make_plan(f, policy)(w, *args)
    return jqx.convert(f, plan), jqx.quantize_params(w, plan)


def rule_of(weight, activation=None):
    return jqx.Policy([jqx.Rule(weight=weight, activation=activation)])


def rounding(x, q):
    """Half a unit in the last place of each weight in the dtype of the rows, and of the sum."""
    sizes = np.abs(np.float64(x.astype(jnp.float32))) @ np.abs(np.float64(q.dequantize()))
    each = float(jnp.finfo(x.dtype).eps) / 2 if x.dtype != jnp.float32 else 0.0
    return (each + q.shape[-2] * 2.0**-24) * sizes + 1e-30


@pytest.mark.many("target")
@pytest.mark.parametrize("name", FORMATS)
@targets
def test_every_format_is_read_as_it_lies(target, name):
    q = weight(name, target)
    assert q.layout.kernel == target
    rows = [normal(0, 3, K).astype(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float16)]
    products = lambda rows, q: [jqx.matmul(x, q.astype(x.dtype)) for x in rows]  # noqa: E731
    results, chosen = run_on(target, products, rows, q)
    assert all(f"kernel_{target}" in kernel for kernel in chosen) and len(chosen) == 3
    for x, y in zip(rows, results, strict=True):
        exact = np.float64(x.astype(jnp.float32)) @ np.float64(q.dequantize())
        last = np.abs(exact) * float(jnp.finfo(x.dtype).eps)  # the result has their dtype
        assert (np.abs(np.float64(y.astype(jnp.float32)) - exact) <= rounding(x, q) + last).all()


def test_weights_that_float16_would_flush_or_overflow_are_brought_near_one():
    for size in (1e-9, 1e8):
        q = jqx.QTensor.quantize(normal(1, K, N) * size, FORMATS["int8"]).pack_for("gpu")
        x = normal(0, 3, K).astype(jnp.float16)
        product = functools.partial(jqx.matmul, preferred_element_type=jnp.float32)
        y, _ = run_on("gpu", product, x, q)
        exact = np.float64(x) @ np.float64(q.dequantize())
        assert (np.abs(np.float64(y) - exact) <= 2 * rounding(x, q)).all()


NUMBERS = {
    "rows of several axes": ((2, 3, K), (K, N), (((2,), (0,)), ((), ()))),
    "turned rows": ((K, 3), (K, N), (((0,), (0,)), ((), ()))),
    "a vector": ((K,), (K, N), (((0,), (0,)), ((), ()))),
    "a stack": ((2, 3, K), (2, K, N), (((2,), (1,)), ((0,), (0,)))),
    "stacks in another order": ((3, 2, K), (2, 3, K, N), (((2,), (2,)), ((1, 0), (0, 1)))),
    "no rows": ((0, K), (K, N), (((1,), (0,)), ((), ()))),
}


@pytest.mark.many
@pytest.mark.parametrize("name", NUMBERS)
@targets
def test_dimensions_are_those_of_dot_general(target, name):
    left, right, numbers = NUMBERS[name]
    x = normal(0, *left)
    sizes = {axis: 1 for axis in range(len(right))} | {len(right) - 2: 32}
    q = jqx.QTensor.quantize(normal(1, *right), blocks(jnp.int8, sizes))
    product = functools.partial(jqx.dot_general, dimension_numbers=numbers)
    swapped = tuple(pair[::-1] for pair in numbers)
    with on(target):
        y = jax.jit(product)(x, q.pack_for(target))
        other_way_round = jax.jit(lambda q, x: jqx.dot_general(q, x, swapped))(
            q.pack_for(target), x
        )
    expected = product(np.float64(x), np.float64(q.dequantize())) if 0 not in left else y
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
    assert other_way_round.size == y.size


@targets
def test_the_transpose_of_a_table_is_read_without_a_copy(target):
    """As a head that is tied to a table [N, K] is."""
    q = jqx.QTensor.quantize(normal(1, N, K), blocks(jnp.int8, {0: 1, 1: 32})).pack_for(target)
    x = normal(0, 3, K)
    y, (kernel,) = run_on(target, lambda x, q: x @ q.T, x, q)
    assert "kernel" in kernel
    np.testing.assert_allclose(y, x @ q.dequantize().T, rtol=0, atol=1e-4)


@targets
def test_it_is_mapped_and_scanned_over_a_stack(target):
    spec = blocks(jnp.int8, {0: 1, 1: 32, 2: 1})
    q = jqx.QTensor.quantize(normal(1, 3, K, K) / 8, spec).pack_for(target)
    x = normal(0, 3, 2, K)
    with on(target):
        mapped = jax.jit(jax.vmap(jqx.matmul))(x, q)
        shared = jax.jit(jax.vmap(jqx.matmul, (0, None)))(x, q[0])
        scanned = jax.jit(lambda x, q: jax.lax.scan(lambda h, w: (h @ w, None), x, q)[0])(x[0], q)
    real = q.dequantize()
    np.testing.assert_allclose(mapped, x @ real, rtol=0, atol=1e-4)
    np.testing.assert_allclose(shared, x @ real[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(scanned, x[0] @ real[0] @ real[1] @ real[2], rtol=0, atol=1e-3)


@targets
def test_it_runs_inside_shard_map(target):
    q, x = weight("int8", target), normal(0, 4, K)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    every = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), q)
    specs = {"mesh": mesh, "in_specs": (rows, every), "out_specs": rows}
    with on(target):
        # The interpreter of JAX 0.10 loses what varies: no check of that.
        y = jax.jit(jax.shard_map(jqx.matmul, check_vma=False, **specs))(x, q)
    np.testing.assert_allclose(y, x @ q.dequantize(), rtol=0, atol=1e-4)
    traced = jax.jit(jax.shard_map(jqx.matmul, **specs)).trace(x, q)
    assert "jqx_weights" in str(traced.jaxpr)
    if target == "tpu":
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("target, exact", [("tpu", True), (None, False)])
def test_mxfp8_beside_mxfp8_is_multiplied_in_bfloat16(target, exact):
    """Which holds its values exactly."""
    x = jqx.QTensor.quantize(normal(0, 3, K), blocks(numerics.mxfp8_e4m3, {1: 32, 0: 1}))
    q = jqx.QTensor.quantize(normal(1, K, N), FORMATS["mxfp8"])
    q = q if target is None else q.pack_for(target)
    with on("tpu"):
        (chosen,) = jqx.formulations(jqx.matmul)(x, q)
        y = jax.jit(jqx.matmul)(x, q)
    assert chosen.operands[0].startswith("bf16" if exact else "f32")
    real = np.float64(x.dequantize()) @ np.float64(q.dequantize())
    np.testing.assert_allclose(y, real, rtol=0, atol=1e-4)


@platforms
def test_a_kernel_is_not_exported(target, platform):
    q = weight("int8", target)
    x = jax.ShapeDtypeStruct((3, K), jnp.float32)
    with pytest.raises(ValueError, match=r"jax\.export: a kernel of jqx(.|\n)*target=False"):
        export.export(jax.jit(jqx.matmul), platforms=[platform])(x, q)
    export.export(jax.jit(jqx.matmul), platforms=["cpu"])(x, q)  # without a kernel
    export.export(jax.jit(jqx.matmul), platforms=[platform])(x, q.unpack())


@platforms
def test_a_compiler_does_not_part_a_kernel_over_devices(target, platform):
    """It would gather whole weights on each."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((4, K), jnp.float32, sharding=rows)
    q = jax.eval_shape(lambda: weight("int8", target))
    words = r"jax\.jit: a compiler cannot partition a kernel(.|\n)*shard_map"
    with pytest.raises(ValueError, match=words):
        jax.jit(jqx.matmul).trace(x, q).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("name", ["int4", "nf4", "mxfp4"])
def test_a_weight_for_a_kernel_is_used_and_kept_like_any(name, tmp_path):
    q = jqx.QTensor.quantize(normal(1, K, N), FORMATS[name])
    for target in ("tpu", "gpu", "tpu7x"):
        laid = q.pack_for(target)
        np.testing.assert_array_equal(laid.dequantize(), q.dequantize())
        np.testing.assert_array_equal(jqx.take(laid, jnp.arange(3), axis=0), q.dequantize()[:3])
        rows = jax.jit(jqx.matmul)(normal(0, 3, K), laid)
        np.testing.assert_allclose(rows, normal(0, 3, K) @ q.dequantize(), rtol=0, atol=1e-4)
        path = tmp_path / f"{target}.safetensors"
        jqx.save(path, {"w": laid})
        again = jqx.load(path)["w"]
        assert again.layout == laid.layout
        np.testing.assert_array_equal(again.dequantize(), q.dequantize())


def test_codes_that_a_compiler_would_abort_on_have_no_kernel():
    for columns, kernel in [(128, "tpu"), (64, None)]:
        q = jqx.QTensor.quantize(normal(1, K, columns), blocks(jnp.int2, {0: 32, 1: 1}))
        for laid in (q.pack_for("tpu"), q.T.pack_for("tpu")):
            assert ((laid.layout and laid.layout.kernel) or None) == kernel


def test_one_chip_alone_converts_float4():
    q = jqx.QTensor.quantize(normal(1, K, N), FORMATS["mxfp4"])
    assert q.pack_for("tpu7x").values.dtype == jnp.float4_e2m1fn
    for target in ("tpu", "tpu-v5e", "tpu-v6e", "gpu", "h200"):
        assert q.pack_for(target).values.dtype == jnp.uint4


def test_codes_laid_out_for_another_tpu_are_refused_if_that_is_known(monkeypatch):
    q = jqx.QTensor.quantize(normal(1, K, N), FORMATS["mxfp4"])
    x = jax.ShapeDtypeStruct((4, K), jnp.float32)

    def lower(target):
        run = jax.jit(lambda x, q: jqx.matmul(x, q)).trace(x, q.pack_for(target))
        return run.lower(lowering_platforms=("tpu",))

    lower("tpu7x")  # no TPU is at hand
    monkeypatch.setattr(compat_kernels, "local_chip", lambda: "TPU v6 lite")
    lower("tpu-v6e")
    other = r"laid out for another TPU(.|\n)*TPU v6 lite(.|\n)*pack_for"
    with pytest.raises(ValueError, match=other):
        lower("tpu7x")
    monkeypatch.setattr(compat_kernels, "local_chip", lambda: "TPU7x")
    lower("tpu7x")


# Activations that a kernel quantizes on the way.

DEPTH, WIDTH = 256, 128
GROUPS = {0: 64, 1: 1}
POLICIES = {
    "int8 a channel": jqx.presets.w8a8_dynamic(),
    "int8 a channel, static": jqx.presets.w8a8(),
    "int4 a channel": jqx.presets.w4a8(),
    "int4 beside int4": jqx.presets.w4a4(),
    "fp8 a channel": jqx.presets.fp8(),
    "int8 in groups": rule_of(blocks(jnp.int8, GROUPS), TOKEN),
    "uint4 with zero points in groups": rule_of(affine(jnp.uint4, GROUPS), TOKEN),
    # As DeepSeek does: 128 x 128 weights and 1 x 128 activations share a scale.
    "blocks in two dimensions": rule_of(
        blocks(jnp.float8_e4m3fn, {0: 128, 1: 128}),
        blocks(jnp.float8_e4m3fn, {0: 1, 1: 128}, dynamic=True),
    ),
}


def product(w, x):
    return x @ w


@functools.cache
def in_groups():
    """Returns the converted product of int8 in groups, and its codes."""
    return converted(product, POLICIES["int8 in groups"], normal(1, DEPTH, WIDTH), rows_of(5))


def rows_of(count):
    return normal(0, count, DEPTH)


@pytest.mark.many
@pytest.mark.parametrize("name", POLICIES)
@targets
def test_rows_quantized_on_the_way_have_the_result_of_codes_made_before(target, name):
    w, x = normal(1, DEPTH, WIDTH), rows_of(5)
    plan = jqx.make_plan(product, POLICIES[name])(w, x)
    stats = jqx.calibrate_batches(product, plan, w, [x], progress=False)
    run, q = jqx.convert(product, plan, jqx.affines(plan, stats)), jqx.quantize_params(w, plan)
    plain = jax.jit(run)(q, x)
    y, (kernel,) = run_on(target, run, q.pack_for(target), x)
    # On a GPU a scale a channel is left to the compiler.
    has_kernel = target == "tpu" or ("channel" not in name and "beside" not in name)
    assert ("kernel_quantizing" in kernel) == has_kernel
    if "channel" in name and "int" in name:
        np.testing.assert_array_equal(y, plain)
    else:  # sums of float32 in another order
        bound = 64 * 2.0**-24 * np.max(np.abs(x)) * np.max(np.abs(w)) * DEPTH
        np.testing.assert_allclose(y, plain, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["int8 in groups", "blocks in two dimensions"])
@targets
def test_rows_that_are_codes_already_are_multiplied_as_such(target, name):
    (rule,) = POLICIES[name].rules
    q = jqx.QTensor.quantize(normal(1, DEPTH, WIDTH), rule.weight).pack_for(target)
    shared = jqx.per_axis(0) if name == "int8 in groups" else rule.activation.granularity
    x = jqx.QTensor.quantize(rows_of(5), jqx.QSpec(rule.activation.qtype, shared))
    y, (kernel,) = run_on(target, jqx.matmul, x, q)
    assert "kernel_of_codes" in kernel
    real = np.float64(x.dequantize()) @ np.float64(q.dequantize())
    np.testing.assert_allclose(y, real, rtol=0, atol=1e-4)


def test_a_gpu_quantizes_many_rows_first():
    run, q = in_groups()
    with on("gpu"):
        (many,), (few,) = (
            jqx.formulations(run)(q.pack_for("gpu"), rows_of(count)) for count in (65, 64)
        )
    assert many.cpu.name == "quantize_first"
    assert "kernel_quantizing" in few.cpu.name


# Rows in groups beside stacks of matrices, against a loop over groups.

EXPERTS = 5
SIZES = {
    "some": (40, [5, 0, 19, 3, 7]),
    "one": (1, [0, 0, 0, 1, 0]),
    "fewer rows than groups": (3, [1, 0, 0, 0, 2]),
    "too many": (20, [9, 9, 9, 9, 9]),
    "all of one": (200, [0, 200, 0, 0, 0]),
}
STACKS = {
    "int8": blocks(jnp.int8, {0: 1, 1: 32, 2: 1}),
    "int4": blocks(jnp.int4, {0: 1, 1: 32, 2: 1}),
    "nf4": blocks(numerics.nf4, {0: 1, 1: 64, 2: 1}),
    "mxfp4": blocks(numerics.mxfp4, {0: 1, 1: 32, 2: 1}),
    "fp8, blocks of both axes": blocks(jnp.float8_e4m3fn, {0: 1, 1: 64, 2: 16}),
    "one scale for all matrices": blocks(jnp.int8, {1: 32}),
}


def matrices(name, target):
    return jqx.QTensor.quantize(normal(1, EXPERTS, K, N), STACKS[name]).pack_for(target)


def in_order(name="some"):
    """Returns rows, and how many are in each group."""
    count, sizes = SIZES[name]
    return normal(0, count, K), on_device(sizes, np.int32)


def looped(x, w, sizes):
    y, start = np.zeros((len(x), w.shape[2])), 0
    for matrix, size in zip(w, np.asarray(sizes), strict=True):
        y[start : start + size] = x[start : start + size] @ matrix
        start += size
    return y


def assert_sums(y, x, w, sizes):
    """Checks products to K roundings of the sum of sizes, and one of each number and scale."""
    rows, real = np.float64(x), np.float64(w)
    bound = (K + 4) * 2.0**-24 * looped(np.abs(rows), np.abs(real), sizes) + 1e-30
    assert (np.abs(np.float64(y) - looped(rows, real, sizes)) <= bound).all()


@pytest.mark.many
@targets
@pytest.mark.parametrize("name", SIZES)
def test_rows_meet_the_matrix_of_their_group(target, name):
    (x, sizes), w = in_order(name), matrices("int8", target)
    codes = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    for rows, real in ((x, x), (codes, codes.dequantize())):
        y, (kernel,) = run_on(target, jqx.ragged_dot, rows, w, sizes)
        assert "ragged_kernel" in kernel
        assert_sums(y, real, w.dequantize(), sizes)


@pytest.mark.many("target")
@targets
@pytest.mark.parametrize("name", STACKS)
def test_every_format_of_a_stack_is_read_as_it_lies(target, name):
    (x, sizes), w = in_order(), matrices(name, target)
    y, _ = run_on(target, jqx.ragged_dot, x, w, sizes)
    assert_sums(y, x, w.dequantize(), sizes)


@targets
def test_kernels_quantize_the_rows_of_experts_in_a_converted_function(target):
    (x, sizes), w = in_order(), normal(1, EXPERTS, K, N)
    f = lambda w, x, sizes: jax.lax.ragged_dot(x, w, sizes)  # noqa: E731
    run, q = converted(f, rule_of(STACKS["int8"], TOKEN), w, x, sizes)
    plain = jax.jit(run)(q, x, sizes)
    y, (kernel,) = run_on(target, run, q.pack_for(target), x, sizes)
    assert "ragged_kernel_quantizing" in kernel
    np.testing.assert_allclose(y, plain, rtol=0, atol=1e-4)


@targets
def test_nan_stays_in_its_row(target):
    (x, sizes), w = in_order(), matrices("int4", target)
    y, _ = run_on(target, jqx.ragged_dot, x.at[3, 4].set(jnp.nan), w, sizes)
    expected = np.zeros((len(x), N), bool)
    expected[3] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


@targets
def test_it_is_mapped_over_rows_and_sizes(target):
    count, sizes = SIZES["some"]
    x, w = normal(0, 2, count, K), matrices("int8", target)
    sizes = jnp.asarray([sizes, [0, 0, count, 0, 0]])
    mapped = jax.vmap(lambda x, sizes: jqx.ragged_dot(x, w, sizes))
    results, _ = run_on(target, mapped, x, sizes)
    for rows, counts, y in zip(x, sizes, results, strict=True):
        assert_sums(y, rows, w.dequantize(), counts)


# Layers in a scan: kernels find the weight of a step in the stack; nothing slices its codes.

LAYERS, SIZE, ROWS = 3, 64, 10
SCHEMES = {
    "int8": (jqx.QSpec(jnp.int8, jqx.per_group(32)), None),
    "nf4": (jqx.QSpec(numerics.nf4, jqx.per_group(32)), None),
    "nvfp4": (jqx.QSpec(numerics.nvfp4, jqx.per_group(16)), None),
    "int8 beside int8": (jqx.QSpec(jnp.int8, jqx.per_group(32)), TOKEN),
}


def scanned(step, w, x, **options):
    return jax.lax.scan(lambda h, w: (jnp.tanh(step(h, w)), None), x, w, **options)[0]


def layers(w, x):
    return scanned(jnp.matmul, w, x)


def backwards(w, x):
    return scanned(jnp.matmul, w, x, reverse=True, unroll=2)


def einsums(w, x):
    return scanned(lambda h, w: jnp.einsum("mk,kn->mn", h, w), w, x)


def turned(w, x):
    return scanned(lambda h, w: h @ w.T, w, x)


def recomputed(w, x):
    return scanned(jax.checkpoint(jnp.matmul), w, x)


def experts(w, x):
    sizes = jnp.asarray([3, 0, 5, 1])
    return scanned(lambda h, w: jax.lax.ragged_dot(h, w, sizes), w, x)


SHAPES = {experts: (LAYERS, 4, SIZE, SIZE)}


def quantized_layers(f, scheme, target, shape=(LAYERS, SIZE, SIZE)):
    """Returns a converted function, its codes, those for kernels of a target, and rows."""
    w, x = normal(0, *shape) / 8, normal(1, ROWS, SIZE)
    run, q = converted(f, rule_of(*SCHEMES[scheme]), w, x)
    return run, q, jqx.pack_for(q, target), x


def run_on_slices(run, *args):
    """Runs a function whose kernels are given slices."""
    of_stack = StackSlice.of
    with mock.patch.object(
        StackSlice, "of", lambda stack, step: without_stack(of_stack(stack, step))
    ):
        return jax.jit(lambda *args: run(*args))(*args)


def operands_of_kernels(jaxpr):
    """Returns the shapes that kernels in a jaxpr read, each a list."""
    shapes = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            shapes.append([v.aval.shape for v in eqn.invars])
        for inner in compat.sub_jaxprs(eqn):
            shapes += operands_of_kernels(inner)
    return shapes


@pytest.mark.many
@targets
@pytest.mark.parametrize("f", [layers, backwards, einsums, turned, recomputed, experts])
def test_a_kernel_is_given_the_stack(f, target):
    shape = SHAPES.get(f, (LAYERS, SIZE, SIZE))
    run, plain, packed, x = quantized_layers(f, "int8", target, shape)
    with on(target):
        jaxpr = jax.make_jaxpr(run)(packed, x).jaxpr
        y = jax.jit(run)(packed, x)
        np.testing.assert_array_equal(y, run_on_slices(run, packed, x))
    (shapes,) = operands_of_kernels(jaxpr)
    assert shape in shapes and shape[1:] not in shapes
    np.testing.assert_allclose(y, jax.jit(run)(plain, x), rtol=0, atol=1e-5)


@pytest.mark.many
@targets
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_finds_its_codes(name, target):
    run, plain, packed, x = quantized_layers(layers, name, target)
    slope_of = jax.value_and_grad(lambda q, x: run(q, x).sum(), argnums=1)
    with on(target):
        y, slope = jax.jit(lambda q, x: slope_of(q, x))(packed, x)
        jax.tree.map(np.testing.assert_array_equal, (y, slope), run_on_slices(slope_of, packed, x))
    expected, gradient = jax.jit(slope_of)(plain, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, rtol=0, atol=1e-5)


def nested(w, x):
    return jax.lax.scan(lambda h, w: (layers(w, h), None), x, w)[0]


def branched(w, x):
    def step(h, w):
        return jax.lax.cond(h.sum() > 0, lambda h: h @ w, lambda h: jnp.tanh(h @ w), h), None

    return jax.lax.scan(step, x, w)[0]


def handed_on(w, x):
    step = lambda c, w: ((jnp.tanh(c[0] @ w), w), w)  # noqa: E731
    (h, last), all_ = jax.lax.scan(step, (x, w[0]), w)
    return layers(all_, h @ last)


SHAPES[nested] = (2, LAYERS, SIZE, SIZE)


@pytest.mark.parametrize("f", [nested, branched, handed_on])
def test_weights_go_where_arrays_go(f):
    shape = SHAPES.get(f, (LAYERS, SIZE, SIZE))
    run, plain, packed, x = quantized_layers(f, "int8", "tpu", shape)
    with on("tpu"):
        y = jax.jit(run)(packed, x)
    np.testing.assert_allclose(y, jax.jit(run)(plain, x), rtol=0, atol=1e-5)


def test_a_scan_is_mapped_over():
    run, plain, packed, x = quantized_layers(layers, "int8", "tpu")
    mapped = jax.vmap(run, in_axes=(None, 0))
    y, _ = run_on("tpu", mapped, packed, jnp.stack([x, -x]))
    np.testing.assert_allclose(y, jax.jit(mapped)(plain, jnp.stack([x, -x])), rtol=0, atol=1e-5)


def test_a_scan_quantizes_the_rows_of_each_step_on_the_way():
    stacked = lambda ws, x: jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0]  # noqa: E731
    ws, x = normal(1, 3, DEPTH, DEPTH) / 16, rows_of(3)
    run, q = converted(stacked, jqx.presets.w8a8_dynamic(), ws, x)
    with on("tpu"):
        y = jax.jit(lambda q, x: run(q, x))(q.pack_for("tpu"), x)
        (chosen,) = jqx.formulations(run)(q.pack_for("tpu"), x)
    assert "kernel_quantizing" in chosen.cpu.name and chosen.times == 3
    np.testing.assert_array_equal(y, jax.jit(run)(q, x))


def test_on_another_platform_a_step_reads_a_slice():
    run, plain, packed, x = quantized_layers(layers, "nf4", "tpu")
    np.testing.assert_allclose(jax.jit(run)(packed, x), jax.jit(run)(plain, x), atol=1e-5)


def test_one_of_a_stack_is_a_qtensor_that_knows_it():
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0, 2))
    stack = jqx.QTensor.quantize(normal(0, LAYERS, SIZE, SIZE), spec).pack_for("tpu")

    @jax.jit
    def second(i):
        one = StackSlice.of(stack, i)
        assert one.T.all_values is stack.values and one.in_memory_order.all_values is stack.values
        assert (
            one.astype(jnp.bfloat16).all_values is None and type(without_stack(one)) is jqx.QTensor
        )
        same = jax.tree.unflatten(*reversed(jax.tree.flatten(one)))
        assert isinstance(same, StackSlice) and same.all_values is stack.values
        return one.dequantize(), without_stack(one)

    real, q = second(jnp.int32(1))
    np.testing.assert_array_equal(real, stack[1].dequantize())
    np.testing.assert_array_equal(q.values, stack.values[1])


# Derivatives: a function of rows and weight, its codes, and the function that is differentiated.


def of_layers():
    run, q, _, x = quantized_layers(layers, "int8", "tpu")
    return (lambda x, w: run(w, x)), q, x


def of_rows_quantized_on_the_way():
    run, q = in_groups()
    return (lambda x, w: run(w, x)), q, rows_of(3)


def of_rows_in_groups():
    x, sizes = in_order()
    q = jqx.QTensor.quantize(normal(1, EXPERTS, K, N), STACKS["int8"])
    return (lambda x, w: jqx.ragged_dot(x, w, sizes)), q, x


def of_a_product():
    return operator.matmul, jqx.QTensor.quantize(normal(1, K, N), FORMATS["int8"]), normal(0, 3, K)


@targets
@pytest.mark.parametrize(
    "case, rtol",
    [
        (of_a_product, 1e-3),
        (of_rows_quantized_on_the_way, 1e-3),
        (of_rows_in_groups, 1e-3),
        (of_layers, 1e-4),
    ],
)
def test_derivatives_are_those_of_the_plain_form(case, rtol, target):
    """A plain product has those of its real weight."""
    f, q, x = case()

    def loss(x, scale, q, is_real=False):
        w = jqx.QTensor(q.values, scale, qtype=q.qtype, dtype=q.dtype, layout=q.layout)
        return jnp.sum(jnp.sin(f(x, w.dequantize() if is_real else w)))

    gradient = jax.grad(loss, (0, 1))
    expected = jax.jit(gradient, static_argnums=3)(x, q.scale, q, case is of_a_product)
    with on(target):
        gradients = jax.jit(lambda *args: gradient(*args))(x, q.scale, q.pack_for(target))
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-3)
