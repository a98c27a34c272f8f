"""Shardings of quantized parameters: scales in step with their values, nothing gathered; Orbax
saves QTensors on one mesh, and restores them on another one.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx

from ..arrays import normal
from ..models.parallel import AUTO, EXPLICIT, SPECS, inputs, mesh_of, network, on_mesh, params, sent
from ..models.parallel import shardings as placed
from ..oracles.refusals import assert_error

PRESETS = ("w8a8", "w8a8_dynamic", "w8a16", "w4a16", "w4a8", "w4a4", "nf4", "fp8", "mxfp8")
kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
presets = pytest.mark.parametrize(
    ("preset", "kind"),
    [
        *((preset, AUTO) for preset in PRESETS),
        *((preset, EXPLICIT) for preset in ("w8a8", "w4a16", "nf4", "mxfp8")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name.lower(),
)


def plan_of(preset, p=None, x=None):
    policy = getattr(jqx.presets, preset)()
    return jqx.make_plan(network, policy)(
        params() if p is None else p, inputs() if x is None else x
    )


def assert_bits(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(
            np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
        )


def assert_shardings(tree, shardings):
    for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)


@functools.cache
def of_one_device(preset):
    """The codes, of both layouts, and the result of the converted function."""
    plan = plan_of(preset)
    q, laid_out = (jqx.quantize_params(params(), plan, target=x) for x in (None, "cpu"))
    scales = "dynamic" if plan.static_specs() else None
    return q, laid_out, jax.jit(jqx.convert(network, plan, scales))(q, inputs())


@pytest.mark.many("kind")
@presets
def test_codes_are_on_the_devices_of_their_floats_with_the_bits_of_one_device(preset, kind):
    mesh = mesh_of(kind)
    plan = plan_of(preset)
    on_devices, _ = on_mesh(mesh)
    for target, one in zip((None, "cpu"), of_one_device(preset)[:2], strict=True):
        shardings = jqx.parallel.shardings(SPECS, plan, mesh=mesh, target=target)
        from_one_device = jqx.quantize_params(params(), plan, target=target, shardings=placed(mesh))
        for q in (jqx.quantize_params(on_devices, plan, target=target), from_one_device):
            assert_bits(q, one)
            assert_shardings(q, shardings)
        assert jax.tree.structure(jqx.parallel.shardings(SPECS, one, mesh=mesh)) == (
            jax.tree.structure(shardings)
        )
    packed = jqx.pack_for(jqx.quantize_params(on_devices, plan), "cpu")
    assert_shardings(packed, jqx.parallel.shardings(SPECS, packed, mesh=mesh))


@pytest.mark.many("kind")
@presets
def test_a_converted_function_sends_sums_alone(preset, kind):
    """No weight is gathered, neither its codes nor its real values; the result is that of one
    device within the rounding of a sum.
    """
    mesh = mesh_of(kind)
    p, x = on_mesh(mesh)
    plan = plan_of(preset, p, x)
    q = jqx.quantize_params(p, plan)
    scales = "dynamic" if plan.static_specs() else None
    run = jax.jit(jqx.convert(network, plan, scales))
    assert {op for op, *_ in sent(run.lower(q, x).compile())} == {"all-reduce"}
    y = run(q, x)
    *_, expected = of_one_device(preset)
    size = float(jnp.abs(expected).max())
    np.testing.assert_allclose(np.asarray(y), expected, rtol=0, atol=size * 512 * 2.0**-24)


@kinds
def test_integers_on_several_devices_have_the_bits_of_one(kind):
    mesh = mesh_of(kind)
    p, x = on_mesh(mesh)
    plan = plan_of("w8a8_dynamic", p, x)
    y = jax.jit(jqx.convert(network, plan))(jqx.quantize_params(p, plan), x)
    *_, one = of_one_device("w8a8_dynamic")
    np.testing.assert_array_equal(np.asarray(y), one)


def test_no_device_has_a_float_copy_of_more_than_its_part():
    mesh = mesh_of(AUTO, 1, 4)
    spec = jqx.QSpec("int4", jqx.per_block({0: 32}))
    weight = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    sharding = NamedSharding(mesh, P("model"))
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.Policy([jqx.Rule(weight=spec)]))(
        weight, jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    )
    shardings = jqx.parallel.shardings(sharding, plan)
    quantize = jax.jit(lambda w: jqx.quantize_params(w, plan), out_shardings=shardings)
    parted = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)
    compiled = quantize.lower(parted).compile()
    assert not sent(compiled)
    part = 4 * 1024 * 512 // 4
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == part
    assert memory.temp_size_in_bytes < part // 8


def test_specs_stay_specs_on_the_mesh_around():
    plan = plan_of("w4a16")
    with jax.set_mesh(mesh_of(AUTO)):
        specs = jqx.parallel.shardings(SPECS, plan)
        q = jqx.quantize_params(params(), plan, shardings=SPECS)
    assert specs["down"].values == P("model", None)
    assert specs["down"].scale == P("model", None)
    assert specs["up"].scale == P(None, "model")
    assert specs["b"] == P()
    assert q["down"].scale.sharding.spec == P("model", None)


def test_logical_axes_of_flax():
    mesh = mesh_of(AUTO)
    rules = (("wide", "model"), ("narrow", None))
    init = nn.initializers.lecun_normal()
    dense = nn.Dense(64, kernel_init=nn.with_logical_partitioning(init, ("narrow", "wide")))
    x = jnp.ones((4, 32))
    boxed = jax.eval_shape(dense.init, jax.random.key(0), x)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    variables = nn.meta.unbox(dense.init(jax.random.key(0), x))
    plan = jqx.make_plan(dense.apply, jqx.presets.w8a16())(variables, x)
    quantized = jqx.parallel.shardings(shardings, plan)["params"]["kernel"]
    assert quantized.values.spec == P(None, "model")
    assert quantized.scale.spec == P(None, "model")

    with jax.set_mesh(mesh):
        partitioned = nnx.with_partitioning(init, (None, "model"))
        model = nnx.Linear(32, 64, kernel_init=partitioned, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    plan = jqx.make_plan(run, jqx.presets.w8a16())(state, x)
    quantized = jqx.parallel.shardings(nnx.get_named_sharding(state, mesh), plan)
    (kernel,) = (q for q in jax.tree.leaves(quantized, is_leaf=is_quantized) if is_quantized(q))
    assert kernel.scale.spec == P(None, "model")


def is_quantized(x):
    return isinstance(x, jqx.QTensor)


def block_of(n, blocks):
    granularity = jqx.per_block(blocks) if blocks else jqx.per_tensor()
    return jqx.QTensor.quantize(jnp.ones((n, 4)), jqx.QSpec("int4", granularity))


def assert_refused(spec, weight, *words, error=ValueError, **options):
    """Asserts that there is an error with these words for a weight with this sharding."""
    options = {"mesh": mesh_of(AUTO)} | options
    shard = functools.partial(jqx.parallel.shardings, {"w": spec}, {"w": weight}, **options)
    assert_error(shard, *words, error=error)


def test_errors_name_the_weight_and_what_works():
    one, parts = block_of(8, {}), "whole blocks on each device: 3 parts"
    for spec, weight, problem, fix in [
        (
            P("data"),
            block_of(96, {0: 32}),
            "is partitioned within blocks that share a scale",
            parts,
        ),
        (P("data"), block_of(9, {}), "does not divide into parts", "3, 9 parts"),
        (
            P("data"),
            one.pack(0),
            "is partitioned, but codes are packed along it",
            "pack it along another axis",
        ),
    ]:
        assert_refused(spec, weight, f"axis 0 of 'w' {problem}", fix)
    for spec, options, problem, fix in [
        (
            P(None, None, "data"),
            {},
            "the partition of 'w' has more axes than the array",
            "2 entries or fewer",
        ),
        (
            P("data"),
            {"mesh": None},
            "the mesh along whose axes 'w' is partitioned is not known",
            "pass NamedShardings",
        ),
        (
            "data",
            {"error": TypeError},
            "the entry for 'w' is not a sharding",
            "pass a NamedSharding",
        ),
        (P(), {"target": "cpu"}, "`target` is not used", "leave out target="),
    ]:
        assert_refused(spec, one, problem, fix, **options)
    assert_error(
        lambda: jqx.quantize_params(params(), plan_of("w8a16"), shardings={"up": P()}),
        "`shardings` are not for these parameters",
        "Dict key mismatch",
    )


# Orbax.

FORMATS = ("int8", "uint4", "int4", "uint2", "nf4", "float8_e4m3fn", "mxfp4", "nvfp4", "int3")


def spec_of(form):
    size = 16 if form == "nvfp4" else 32
    blocks = jqx.per_block({0: size, 1: 1})
    return jqx.QSpec(form, blocks, symmetric=not form.startswith("u"))


def test_codes_are_saved_on_one_mesh_and_restored_on_another(tmp_path):
    one, other = mesh_of(AUTO, 1, 4), mesh_of(AUTO, 2, 4)
    w = jnp.asarray(normal(0, 128, 64))
    tree = {form: jqx.QTensor.quantize(w, spec_of(form)) for form in FORMATS}
    tree["bias"] = jnp.ones(4)
    specs = {**dict.fromkeys(FORMATS, P("model")), "bias": P()}
    saved = jax.device_put(tree, jqx.parallel.shardings(specs, tree, mesh=one))
    specs = {**dict.fromkeys(FORMATS, P("data", "model")), "bias": P("model")}
    shardings = jqx.parallel.shardings(specs, tree, mesh=other)
    like = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", jqx.interop.to_orbax(saved))
        checkpointer.wait_until_finished()
        stored = checkpointer.restore(tmp_path / "saved", jqx.interop.to_orbax(like))
    restored = jqx.interop.from_orbax(stored, like)
    assert_bits(restored, tree)
    assert_shardings(restored, shardings)


def test_what_was_not_stored_so_is_an_error():
    q = jqx.QTensor.quantize(jnp.ones((4, 4)), jqx.QSpec("uint4", symmetric=False))
    with pytest.raises(ValueError, match=r"an array is uint4.+, not int4"):
        jqx.interop.from_orbax({"w": q}, {"w": q})
    with pytest.raises(ValueError, match="the trees differ"):
        jqx.interop.from_orbax({"v": q}, {"w": q})
