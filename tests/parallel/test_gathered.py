"""Weights on the devices of the rows: codes and scales are gathered where they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx

from ..models.parallel import AUTO, EXPLICIT, inputs, mesh_of, network, on_mesh, params, sent

PRESETS = ("w8a16", "w4a16", "w4a8", "nf4", "mxfp8", "w8a8_dynamic")


def placed(tree, mesh, spec):
    place = NamedSharding(mesh, spec)
    return jax.device_put(tree, place), jax.tree.map(lambda _: place, tree)


@pytest.mark.many
@pytest.mark.parametrize("preset", PRESETS)
def test_no_float_of_a_weight_is_gathered(preset):
    """With the result of one device to the rounding of a sum."""
    mesh = mesh_of(AUTO)
    p, places = placed(params(), mesh, P("data"))
    x, _ = placed(inputs(), mesh, P("data"))
    plan = jqx.make_plan(network, getattr(jqx.presets, preset)())(p, x)
    q = jqx.quantize_params(p, plan)
    run = jax.jit(jqx.convert(network, plan, gather_axes="data", shardings=places))
    counted = sent(run.lower(q, x).compile())
    size = min(w.size for w in p.values() if w.ndim == 2)
    large = {dtype for _, dtype, shape in counted if np.prod(shape) >= size / 2}
    # XLA on CPU (jaxlib 0.10.2) sends fp8 as float16, which it computes in.
    assert large == {{"nf4": "u8", "mxfp8": "f16"}.get(preset, "s8")}, counted
    one = jax.jit(jqx.convert(network, plan))(jqx.quantize_params(params(), plan), inputs())
    size = float(jnp.abs(one).max())
    np.testing.assert_allclose(run(q, x), one, rtol=0, atol=size * 512 * 2.0**-24)


def test_other_axes_keep_their_parts():
    """Gathered along one axis of the mesh, parted along the other: in a scan, through views."""
    mesh = mesh_of(AUTO)

    def f(p, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w.reshape(256, 256).T), None

        return lax.scan(layer, x, p)[0]

    w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 256, 8, 32)), jnp.float32) / 16
    given, place = placed(w, mesh, P(None, "data", "model"))
    x, _ = placed(inputs(), mesh, P("data"))
    plan = jqx.make_plan(f, jqx.presets.w4a16())(given, x)
    q = jqx.quantize_params(given, plan)
    run = jax.jit(jqx.convert(f, plan, gather_axes=("data",), shardings=place))
    counted = sent(run.lower(q, x).compile())
    whole = [each for each in counted if each[0] == "all-gather" and each[1] == "f32"]
    assert all(np.prod(shape) < 256 * 256 / 4 for *_, shape in whole), counted
    expected = jax.jit(jqx.convert(f, plan))(jqx.quantize_params(w, plan), inputs())
    size = float(jnp.abs(expected).max())
    np.testing.assert_allclose(run(q, x), expected, rtol=0, atol=size * 256 * 2.0**-24)


def test_parts_of_a_stack_and_joined_weights():
    """A part lies as the whole does; of joined weights the first tells. All are whole numbers, with
    scales of 1: sums are exact in any order.
    """
    mesh = mesh_of(AUTO)

    def f(p, x):
        whole = lambda x, w: (jnp.clip(jnp.round(x @ w / 64), -7, 7), None)  # noqa: E731
        x = lax.scan(whole, x, p["stack"])[0]
        return x @ jnp.concatenate([p["a"], p["b"]], axis=1)

    rng = np.random.default_rng(0)
    shapes = {"stack": (3, 256, 256), "a": (256, 256), "b": (256, 128)}
    w = {name: rng.integers(-7, 8, shape).astype(np.float32) for name, shape in shapes.items()}
    w["stack"][0] = rng.integers(-127, 128, (256, 256))
    for x in w.values():  # the largest of each block
        x[..., ::32, :] = 7
    w["stack"][0, ::32] = 127
    rows = jnp.asarray(rng.integers(-3, 4, (16, 256)), jnp.float32)
    places = {name: NamedSharding(mesh, P("data")) for name in w}
    places["stack"] = NamedSharding(mesh, P(None, "data"))
    given, (x, _) = jax.device_put(w, places), placed(rows, mesh, P("data"))
    policy = jqx.Policy({"stack[0]": "int8:group=32", ".*": "int4:group=32"})
    plan = jqx.make_plan(f, policy)(given, x)
    q = jqx.quantize_params(given, plan)
    run = jax.jit(jqx.convert(f, plan, gather_axes="data", shardings=places))
    counted = sent(run.lower(q, x).compile())
    whole = {key: count for key, count in counted.items() if np.prod(key[2]) > 2**15}
    assert whole == {
        ("all-gather", "s8", (1, 256, 256)): 2,
        ("all-gather", "s8", (256, 384)): 1,
    }, counted
    q_of_one = jqx.quantize_params(jax.tree.map(jnp.asarray, w), plan)
    assert all(bool((x.scale == 1).all()) for x in q_of_one["stack"].parts)
    np.testing.assert_array_equal(run(q, x), jax.jit(jqx.convert(f, plan))(q_of_one, rows))


def test_what_is_gathered_is_not_parted_in_sums():
    """With `partial_dtype` sums are parted along the other axes alone."""
    mesh = mesh_of(AUTO)
    specs = {"up": P("data", "model"), "down": P("model", "data"), "b": P()}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    p, (x, _) = jax.device_put(params(), places), placed(inputs(), mesh, P("data"))
    plan = jqx.make_plan(network, jqx.presets.w4a16())(p, x)
    q = jqx.quantize_params(p, plan)
    options = {"gather_axes": "data", "partial_dtype": jnp.float32, "shardings": places}
    run = jax.jit(jqx.convert(network, plan, **options))
    counted = sent(run.lower(q, x).compile())
    sums = [shape for op, dtype, shape in counted if op == "all-reduce" and dtype == "f32"]
    assert sums == [(8, 256)], counted  # of the rows of a device, along "model"
    one = jax.jit(jqx.convert(network, plan))(jqx.quantize_params(params(), plan), inputs())
    size = float(jnp.abs(one).max())
    np.testing.assert_allclose(run(q, x), one, rtol=0, atol=size * 512 * 2.0**-24)


@pytest.mark.parametrize(
    "axes, kind, given",
    [
        ("model", AUTO, 'P("data")'),
        ((), AUTO, "()"),
        (3, AUTO, "3"),
        ("data", None, "no mesh"),
        ("data", EXPLICIT, "types"),
    ],
)
def test_axes_along_which_no_weight_is_partitioned(axes, kind, given):
    p, x, places = params(), inputs(), None
    if kind == EXPLICIT:
        p, x = on_mesh(mesh_of(kind))
    elif kind is not None:
        _, places = placed(p, mesh_of(kind), P("data"))
    plan = jqx.make_plan(network, jqx.presets.w8a16())(p, x)
    with pytest.raises(ValueError, match=r"`gather_axes` are not axes(.|\n)+fix:"):
        jqx.convert(network, plan, gather_axes=axes, shardings=places)(p, x)
