"""Kernels in contractions: dimensions, formats, derivatives, transformations, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx
from jqx import numerics
from jqx._src import compat_kernels

from ..arrays import normal
from .stepwise import on

PLATFORMS = ("tpu", "gpu")
K, N = 128, 32

FORMATS = {
    "int8": jqx.QSpec(jnp.int8, jqx.per_block({0: 32, 1: 1})),
    "uint8 with zero points": jqx.QSpec(
        jnp.uint8, jqx.per_block({0: 32, 1: 1}), symmetric=False, calibrator=jqx.calibrators.minmax
    ),
    "int4": jqx.QSpec(jnp.int4, jqx.per_block({0: 16, 1: 1})),
    "shared by all columns": jqx.QSpec(jnp.int8, jqx.per_block({0: 32})),
    "blocks of both axes": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 32, 1: 16})),
    "nf4": jqx.QSpec(numerics.nf4, jqx.per_block({0: 64, 1: 1})),
    "nf4, one a channel": jqx.QSpec(numerics.nf4, jqx.per_axis(1)),
    "three numbers": jqx.QSpec(numerics.Codebook((-1.0, 0.25, 1.0)), jqx.per_axis(1)),
    "float4": jqx.QSpec(jnp.float4_e2m1fn, jqx.per_axis(1)),
    "mxfp8": jqx.QSpec(numerics.mxfp8_e5m2, jqx.per_block({0: 32, 1: 1})),
    "mxfp4": jqx.QSpec(numerics.mxfp4, jqx.per_block({0: 32, 1: 1})),
    "mxint8": jqx.QSpec(numerics.mxint8, jqx.per_block({0: 32, 1: 1})),
    "nvfp4": jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 16, 1: 1})),
}


def weight(name, target, shape=(K, N)):
    return jqx.QTensor.quantize(normal(1, *shape), FORMATS[name]).pack_for(target)


def rounding(x, q):
    """Half a unit in the last place of each weight in the dtype of the rows, and of the sum."""
    sizes = np.abs(np.float64(x.astype(jnp.float32))) @ np.abs(np.float64(q.dequantize()))
    each = float(jnp.finfo(x.dtype).eps) / 2 if x.dtype != jnp.float32 else 0.0
    return (each + q.shape[-2] * 2.0**-24) * sizes + 1e-30


@pytest.mark.many("target")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", PLATFORMS)
def test_every_format_is_read_as_it_lies(target, name):
    q = weight(name, target)
    assert q.layout.kernel == target
    dtypes = (jnp.bfloat16, jnp.float32, jnp.float16)
    rows = [normal(0, 3, K).astype(dtype) for dtype in dtypes]
    with on(target):
        products = jax.jit(lambda rows, q: [jqx.matmul(x, q.astype(x.dtype)) for x in rows])
        chosen = jqx.formulations(products)(rows, q)
        found = products(rows, q)
    assert all(f"kernel_{target}" in one.cpu.name for one in chosen) and len(chosen) == 3
    for x, y in zip(rows, found, strict=True):
        exact = np.float64(x.astype(jnp.float32)) @ np.float64(q.dequantize())
        own = np.abs(exact) * float(jnp.finfo(x.dtype).eps)  # the result has their dtype
        assert (np.abs(np.float64(y.astype(jnp.float32)) - exact) <= rounding(x, q) + own).all()


def test_weights_that_float16_would_flush_or_overflow_are_brought_near_one():
    spec = jqx.QSpec(jnp.int8, jqx.per_block({0: 32, 1: 1}))
    for size in (1e-9, 1e8):
        q = jqx.QTensor.quantize(normal(1, K, N) * size, spec).pack_for("gpu")
        x = normal(0, 3, K).astype(jnp.float16)
        with on("gpu"):
            found = jax.jit(functools.partial(jqx.matmul, preferred_element_type=jnp.float32))(x, q)
        exact = np.float64(x) @ np.float64(q.dequantize())
        assert (np.abs(np.float64(found) - exact) <= 2 * rounding(x, q)).all()


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
@pytest.mark.parametrize("target", PLATFORMS)
def test_dimensions_are_those_of_dot_general(target, name):
    left, right, numbers = NUMBERS[name]
    x = normal(0, *left)
    blocks = {axis: 1 for axis in range(len(right))} | {len(right) - 2: 32}
    q = jqx.QTensor.quantize(normal(1, *right), jqx.QSpec(jnp.int8, jqx.per_block(blocks)))
    product = functools.partial(jqx.dot_general, dimension_numbers=numbers)
    with on(target):
        found = jax.jit(product)(x, q.pack_for(target))
        other_way_round = jax.jit(
            lambda q, x: jqx.dot_general(q, x, tuple(pair[::-1] for pair in numbers))
        )(q.pack_for(target), x)
    expected = product(np.float64(x), np.float64(q.dequantize())) if 0 not in left else found
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert other_way_round.size == found.size


@pytest.mark.parametrize("target", PLATFORMS)
def test_the_transpose_of_a_table_is_read_without_a_copy(target):
    """As a head that is tied to a table [N, K] is."""
    spec = jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 32}))
    q = jqx.QTensor.quantize(normal(1, N, K), spec).pack_for(target)
    x = normal(0, 3, K)
    with on(target):
        product = jax.jit(lambda x, q: x @ q.T)
        (chosen,) = jqx.formulations(product)(x, q)
        found = product(x, q)
    assert "kernel" in chosen.cpu.name
    np.testing.assert_allclose(found, x @ q.dequantize().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", PLATFORMS)
def test_derivatives_are_those_of_the_dequantized_weight(target):
    q, x = weight("int8", target), normal(0, 3, K)

    def loss(x, scale, real):
        w = jqx.QTensor(q.values, scale, qtype=q.qtype, layout=q.layout)
        return jnp.sum(jnp.sin(x @ (w.dequantize() if real else w)))

    gradient = jax.grad(loss, (0, 1))
    with on(target):
        found = jax.jit(gradient, static_argnums=2)(x, q.scale, False)
    expected = jax.jit(gradient, static_argnums=2)(x, q.scale, True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("target", PLATFORMS)
def test_it_is_mapped_and_scanned_over_a_stack(target):
    spec = jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 32, 2: 1}))
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


@pytest.mark.parametrize("target", PLATFORMS)
def test_it_runs_inside_shard_map(target):
    q, x = weight("int8", target), normal(0, 4, K)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    every = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), q)
    specs = {"mesh": mesh, "in_specs": (rows, every), "out_specs": rows}
    with on(target):
        # The interpreter of JAX 0.10 loses what varies: no check of that.
        product = jax.shard_map(jqx.matmul, check_vma=False, **specs)
        found = jax.jit(product)(x, q)
    np.testing.assert_allclose(found, x @ q.dequantize(), rtol=0, atol=1e-4)
    traced = jax.jit(jax.shard_map(jqx.matmul, **specs)).trace(x, q)
    assert "jqx_weights" in str(traced.jaxpr)
    if target == "tpu":
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("target, exact", [("tpu", True), (None, False)])
def test_mxfp8_beside_mxfp8_is_multiplied_in_bfloat16(target, exact):
    """Which holds its values exactly."""
    x = jqx.QTensor.quantize(
        normal(0, 3, K), jqx.QSpec(numerics.mxfp8_e4m3, jqx.per_block({1: 32, 0: 1}))
    )
    q = jqx.QTensor.quantize(normal(1, K, N), FORMATS["mxfp8"])
    q = q if target is None else q.pack_for(target)
    with on("tpu"):
        (chosen,) = jqx.formulations(jqx.matmul)(x, q)
        found = jax.jit(jqx.matmul)(x, q)
    assert chosen.operands[0].startswith("bf16" if exact else "f32")
    real = np.float64(x.dequantize()) @ np.float64(q.dequantize())
    np.testing.assert_allclose(found, real, rtol=0, atol=1e-4)


@pytest.mark.parametrize("target, platform", [("tpu", "tpu"), ("gpu", "cuda")])
def test_a_kernel_is_not_exported(target, platform):
    q = weight("int8", target)
    x = jax.ShapeDtypeStruct((3, K), jnp.float32)
    with pytest.raises(ValueError, match=r"jax\.export: a kernel of jqx(.|\n)*target=False"):
        export.export(jax.jit(jqx.matmul), platforms=[platform])(x, q)
    export.export(jax.jit(jqx.matmul), platforms=["cpu"])(x, q)  # without a kernel
    export.export(jax.jit(jqx.matmul), platforms=[platform])(x, q.unpack())


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
    spec = jqx.QSpec(jnp.int2, jqx.per_block({0: 32, 1: 1}))
    for columns, kernel in [(128, "tpu"), (64, None)]:
        q = jqx.QTensor.quantize(normal(1, K, columns), spec)
        laid = (q.pack_for("tpu"), q.T.pack_for("tpu"))
        assert [x.layout.kernel if x.layout and x.layout.kernel else None for x in laid] == [
            kernel
        ] * 2


def test_one_chip_alone_converts_float4():
    q = jqx.QTensor.quantize(normal(1, K, N), FORMATS["mxfp4"])
    assert q.pack_for("tpu7x").values.dtype == jnp.float4_e2m1fn
    for target in ("tpu", "tpu-v5e", "tpu-v6e", "gpu", "h200"):
        assert q.pack_for(target).values.dtype == jnp.uint4


@pytest.mark.parametrize("target, platform", [("tpu", "tpu"), ("gpu", "cuda")])
def test_a_compiler_does_not_part_a_kernel_over_devices(target, platform):
    """It would gather whole weights on each."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((4, K), jnp.float32, sharding=rows)
    q = jax.eval_shape(lambda: weight("int8", target))
    with pytest.raises(
        ValueError, match=r"jax\.jit: a compiler cannot partition a kernel(.|\n)*shard_map"
    ):
        jax.jit(jqx.matmul).trace(x, q).lower(lowering_platforms=(platform,))


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
