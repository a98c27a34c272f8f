"""Shardings of quantized parameters: scales in step with their values, nothing gathered."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx

from ..models.parallel import AUTO, EXPLICIT, SPECS, inputs, mesh_of, network, on_mesh, params, sent
from ..models.parallel import shardings as placed

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


def assert_places(tree, places):
    for x, place in zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim), (x.sharding, place)


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
    given, _ = on_mesh(mesh)
    for target, one in zip((None, "cpu"), of_one_device(preset)[:2], strict=True):
        places = jqx.parallel.shardings(SPECS, plan, mesh=mesh, target=target)
        told = jqx.quantize_params(params(), plan, target=target, shardings=placed(mesh))
        for q in (jqx.quantize_params(given, plan, target=target), told):
            assert_bits(q, one)
            assert_places(q, places)
        assert jax.tree.structure(jqx.parallel.shardings(SPECS, one, mesh=mesh)) == (
            jax.tree.structure(places)
        )
    packed = jqx.pack_for(jqx.quantize_params(given, plan), "cpu")
    assert_places(packed, jqx.parallel.shardings(SPECS, packed, mesh=mesh))


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
    found = run(q, x)
    *_, expected = of_one_device(preset)
    size = float(jnp.abs(expected).max())
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=size * 512 * 2.0**-24)


@kinds
def test_integers_on_several_devices_have_the_bits_of_one(kind):
    mesh = mesh_of(kind)
    p, x = on_mesh(mesh)
    plan = plan_of("w8a8_dynamic", p, x)
    found = jax.jit(jqx.convert(network, plan))(jqx.quantize_params(p, plan), x)
    *_, one = of_one_device("w8a8_dynamic")
    np.testing.assert_array_equal(np.asarray(found), one)


def test_no_device_has_a_float_copy_of_more_than_its_part():
    mesh = mesh_of(AUTO, 1, 4)
    spec = jqx.QSpec("int4", jqx.per_block({0: 32}))
    weight = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    place = NamedSharding(mesh, P("model"))
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.Policy([jqx.Rule(weight=spec)]))(
        weight, jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    )
    places = jqx.parallel.shardings(place, plan)
    quantize = jax.jit(lambda w: jqx.quantize_params(w, plan), out_shardings=places)
    given = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=place)
    compiled = quantize.lower(given).compile()
    assert not sent(compiled)
    part = 4 * 1024 * 512 // 4
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == part
    assert memory.temp_size_in_bytes < part // 8


def test_specs_stay_specs_on_the_mesh_around():
    plan = plan_of("w4a16")
    with jax.set_mesh(mesh_of(AUTO)):
        found = jqx.parallel.shardings(SPECS, plan)
        q = jqx.quantize_params(params(), plan, shardings=SPECS)
    assert found["down"].values == P("model", None)
    assert found["down"].scale == P("model", None)
    assert found["up"].scale == P(None, "model")
    assert found["b"] == P()
    assert q["down"].scale.sharding.spec == P("model", None)


def test_logical_axes_of_flax():
    mesh = mesh_of(AUTO)
    rules = (("wide", "model"), ("narrow", None))
    init = nn.initializers.lecun_normal()
    dense = nn.Dense(64, kernel_init=nn.with_logical_partitioning(init, ("narrow", "wide")))
    x = jnp.ones((4, 32))
    boxed = jax.eval_shape(dense.init, jax.random.key(0), x)
    places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    variables = nn.meta.unbox(dense.init(jax.random.key(0), x))
    plan = jqx.make_plan(dense.apply, jqx.presets.w8a16())(variables, x)
    found = jqx.parallel.shardings(places, plan)["params"]["kernel"]
    assert found.values.spec == P(None, "model")
    assert found.scale.spec == P(None, "model")

    with jax.set_mesh(mesh):
        partitioned = nnx.with_partitioning(init, (None, "model"))
        model = nnx.Linear(32, 64, kernel_init=partitioned, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    plan = jqx.make_plan(run, jqx.presets.w8a16())(state, x)
    found = jqx.parallel.shardings(nnx.get_named_sharding(state, mesh), plan)
    (kernel,) = (q for q in jax.tree.leaves(found, is_leaf=is_quantized) if is_quantized(q))
    assert kernel.scale.spec == P(None, "model")


def is_quantized(x):
    return isinstance(x, jqx.QTensor)


ERRORS = {
    "blocks": (
        lambda mesh: jqx.parallel.shardings(
            {"w": P("data")}, {"w": block_of(96, {0: 32})}, mesh=mesh
        ),
        ValueError,
        "axis 0 of 'w' is partitioned within blocks that share a scale",
        "whole blocks on each device: 3 parts",
    ),
    "sizes": (
        lambda mesh: jqx.parallel.shardings({"w": P("data")}, {"w": block_of(9, {})}, mesh=mesh),
        ValueError,
        "axis 0 of 'w' does not divide into parts",
        "3, 9 parts",
    ),
    "rank": (
        lambda mesh: jqx.parallel.shardings(
            {"w": P(None, None, "data")}, {"w": block_of(8, {})}, mesh=mesh
        ),
        ValueError,
        "the partition of 'w' has more axes than the array",
        "2 entries or fewer",
    ),
    "packed": (
        lambda mesh: jqx.parallel.shardings(
            {"w": P("data")}, {"w": block_of(8, {}).pack(0)}, mesh=mesh
        ),
        ValueError,
        "axis 0 of 'w' is partitioned, but codes are packed along it",
        "pack it along another axis",
    ),
    "no mesh": (
        lambda mesh: jqx.parallel.shardings({"w": P("data")}, {"w": block_of(8, {})}),
        ValueError,
        "the mesh along whose axes 'w' is partitioned is not known",
        "pass NamedShardings",
    ),
    "no sharding": (
        lambda mesh: jqx.parallel.shardings({"w": "data"}, {"w": block_of(8, {})}, mesh=mesh),
        TypeError,
        "the entry for 'w' is not a sharding",
        "pass a NamedSharding",
    ),
    "target": (
        lambda mesh: jqx.parallel.shardings(
            {"w": P()}, {"w": block_of(8, {})}, mesh=mesh, target="cpu"
        ),
        ValueError,
        "`target` is not used",
        "leave out target=",
    ),
    "tree": (
        lambda mesh: jqx.quantize_params(params(), plan_of("w8a16"), shardings={"up": P()}),
        ValueError,
        "`shardings` are not for these parameters",
        "Dict key mismatch",
    ),
}


def block_of(n, blocks):
    granularity = jqx.per_block(blocks) if blocks else jqx.per_tensor()
    return jqx.QTensor.quantize(jnp.ones((n, 4)), jqx.QSpec("int4", granularity))


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_weight_and_what_works(name):
    call, kind, problem, expected = ERRORS[name]
    with pytest.raises(kind) as caught:
        call(mesh_of(AUTO))
    assert problem in str(caught.value)
    assert expected in str(caught.value)
