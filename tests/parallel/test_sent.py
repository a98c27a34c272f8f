"""What devices send in converted functions: parts of sums, in a dtype of the user's, and codes and
scales of weights that are gathered where they are read.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx

from ..arrays import on_device
from ..models.parallel import (
    AUTO,
    EXPLICIT,
    inputs,
    mesh_of,
    network,
    on_mesh,
    params,
    sent,
    shardings,
)


def placed(tree, mesh, spec):
    """Returns a tree with one partition of all leaves, and their shardings."""
    sharding = NamedSharding(mesh, spec)
    return jax.device_put(tree, sharding), jax.tree.map(lambda _: sharding, tree)


def assert_result_of_one_device(y, f, plan, p, x, terms=512):
    """Asserts that a result is that of one device to the rounding of a sum of so many terms."""
    expected = jax.jit(jqx.convert(f, plan))(jqx.quantize_params(p, plan), x)
    size = float(jnp.abs(expected).max())
    np.testing.assert_allclose(y, expected, rtol=0, atol=size * terms * 2.0**-24)


kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


@pytest.mark.many
@kinds
@pytest.mark.parametrize("preset", ["w8a8_dynamic", "w4a16", "nf4", "fp8"])
def test_parts_are_floats_and_their_sum_is_that_of_one_device(preset, kind):
    mesh = mesh_of(kind)
    p, x = on_mesh(mesh)
    plan = jqx.make_plan(network, getattr(jqx.presets, preset)())(p, x)
    q = jqx.quantize_params(p, plan)
    scales = "dynamic" if plan.static_specs() else None
    whole = jax.jit(jqx.convert(network, plan, scales))(q, x)
    of_auto = None if kind == EXPLICIT else shardings(mesh)
    for dtype, steps in ((jnp.float32, 512 * 2.0**-24), (jnp.bfloat16, 2.0**-7)):
        run = jax.jit(jqx.convert(network, plan, scales, partial_dtype=dtype, shardings=of_auto))
        counted = sent(run.lower(q, x).compile())
        # XLA on CPU adds bfloat16 in float32; dynamic scales are maxima, sent as they are.
        assert {op for op, *_ in counted} == {"all-reduce"}
        assert ("all-reduce", "s32", (8, 256)) not in counted
        assert counted["all-reduce", "f32", (8, 256)] == 1
        parts = jnp.abs(p["down"]).sum(0).max() * jnp.abs(x @ p["up"]).max()
        np.testing.assert_allclose(run(q, x), whole, rtol=0, atol=float(parts) * steps)


def test_the_result_is_partitioned_as_the_function_says():
    """`out_sharding` parts the sum along its columns too, as it does without `partial_dtype`."""
    mesh = mesh_of(EXPLICIT)
    p, x = on_mesh(mesh)
    out = NamedSharding(jax.typeof(x).sharding.mesh, P("data", "model"))
    f = lambda p, x: jnp.dot(jax.nn.relu(x @ p["up"]), p["down"], out_sharding=out)  # noqa: E731
    plan = jqx.make_plan(f, jqx.presets.w4a16())(p, x)
    q = jqx.quantize_params(p, plan)
    for dtype in (None, jnp.float32):
        y = jax.jit(jqx.convert(f, plan, partial_dtype=dtype))(q, x)
        assert y.sharding.spec == P("data", "model")


def test_weights_of_a_scan_and_seen_through_views():
    """The partition of a parameter is followed to the axes that it has at the contraction. All are
    whole numbers, with scales of 1: sums are exact in any order.
    """
    mesh = mesh_of(AUTO)

    def heads(p, x):
        def layer(x, w):
            y = x.reshape(16, 8, 32).reshape(16, 256) @ w.reshape(256, 256)
            return x + jnp.clip(jnp.round(y / 256), -7, 7), None

        return lax.scan(layer, x, p)[0] @ p[0].reshape(256, 256).T

    rng = np.random.default_rng(0)
    w = on_device(rng.integers(-127, 128, (2, 8, 32, 256)), jnp.float32)
    w = w.at[:, 0, 0].set(127).at[:, :, :, 0].set(127)  # the largest of each row and each column
    x = on_device(rng.integers(-3, 4, (16, 256)), jnp.float32)
    parted, sharding = placed(w, mesh, P(None, "model"))
    rows, _ = placed(x, mesh, P("data"))
    plan = jqx.make_plan(heads, jqx.presets.w8a16())(parted, rows)
    q = jqx.quantize_params(parted, plan)
    run = jax.jit(jqx.convert(heads, plan, partial_dtype=jnp.float32, shardings=sharding))
    expected = jax.jit(jqx.convert(heads, plan))(jqx.quantize_params(w, plan), x)
    np.testing.assert_array_equal(run(q, rows), expected)
    text = run.lower(q, rows).as_text()
    assert text.count('manual_axes={"model"}') >= 1


def test_errors_of_partial_sums():
    plan = jqx.make_plan(network, jqx.presets.w8a16())(params(), inputs())
    no_parts = "`partial_dtype` has no effect: no weight is known to be partitioned"
    for options, problem, fix in [
        ({"shardings": {"up": None}}, "`shardings` have no effect", "pass one of these"),
        ({"partial_dtype": jnp.int8}, "`partial_dtype`", "float"),
        ({"partial_dtype": jnp.bfloat16}, no_parts, "pass shardings="),
    ]:
        with pytest.raises((ValueError, TypeError)) as caught:
            jqx.convert(network, plan, **options)(params(), inputs())
        assert problem in str(caught.value) and fix in str(caught.value)


@pytest.mark.many
@pytest.mark.parametrize("preset", ["w8a16", "w4a16", "w4a8", "nf4", "mxfp8", "w8a8_dynamic"])
def test_no_float_of_a_weight_is_gathered(preset):
    """With the result of one device to the rounding of a sum."""
    mesh = mesh_of(AUTO)
    p, shardings_of_p = placed(params(), mesh, P("data"))
    x, _ = placed(inputs(), mesh, P("data"))
    plan = jqx.make_plan(network, getattr(jqx.presets, preset)())(p, x)
    q = jqx.quantize_params(p, plan)
    run = jax.jit(jqx.convert(network, plan, gather_axes="data", shardings=shardings_of_p))
    counted = sent(run.lower(q, x).compile())
    size = min(w.size for w in p.values() if w.ndim == 2)
    large = {dtype for _, dtype, shape in counted if np.prod(shape) >= size / 2}
    # XLA on CPU (jaxlib 0.10.2) sends fp8 as float16, which it computes in.
    assert large == {{"nf4": "u8", "mxfp8": "f16"}.get(preset, "s8")}, counted
    assert_result_of_one_device(run(q, x), network, plan, params(), inputs())


def test_other_axes_keep_their_parts():
    """Gathered along one axis of the mesh, parted along the other: in a scan, through views."""
    mesh = mesh_of(AUTO)

    def f(p, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w.reshape(256, 256).T), None

        return lax.scan(layer, x, p)[0]

    w = on_device(np.random.default_rng(0).normal(size=(2, 256, 8, 32)), jnp.float32) / 16
    parted, sharding = placed(w, mesh, P(None, "data", "model"))
    x, _ = placed(inputs(), mesh, P("data"))
    plan = jqx.make_plan(f, jqx.presets.w4a16())(parted, x)
    q = jqx.quantize_params(parted, plan)
    run = jax.jit(jqx.convert(f, plan, gather_axes=("data",), shardings=sharding))
    counted = sent(run.lower(q, x).compile())
    whole = [each for each in counted if each[0] == "all-gather" and each[1] == "f32"]
    assert all(np.prod(shape) < 256 * 256 / 4 for *_, shape in whole), counted
    assert_result_of_one_device(run(q, x), f, plan, w, inputs(), terms=256)


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
    rows = on_device(rng.integers(-3, 4, (16, 256)), jnp.float32)
    partitions = {name: NamedSharding(mesh, P("data")) for name in w}
    partitions["stack"] = NamedSharding(mesh, P(None, "data"))
    parted, (x, _) = jax.device_put(w, partitions), placed(rows, mesh, P("data"))
    policy = jqx.Policy({"stack[0]": "int8:group=32", ".*": "int4:group=32"})
    plan = jqx.make_plan(f, policy)(parted, x)
    q = jqx.quantize_params(parted, plan)
    run = jax.jit(jqx.convert(f, plan, gather_axes="data", shardings=partitions))
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
    partitions = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    p, (x, _) = jax.device_put(params(), partitions), placed(inputs(), mesh, P("data"))
    plan = jqx.make_plan(network, jqx.presets.w4a16())(p, x)
    q = jqx.quantize_params(p, plan)
    options = {"gather_axes": "data", "partial_dtype": jnp.float32, "shardings": partitions}
    run = jax.jit(jqx.convert(network, plan, **options))
    counted = sent(run.lower(q, x).compile())
    sums = [shape for op, dtype, shape in counted if op == "all-reduce" and dtype == "f32"]
    assert sums == [(8, 256)], counted  # of the rows of a device, along "model"
    assert_result_of_one_device(run(q, x), network, plan, params(), inputs())


@pytest.mark.parametrize(
    "axes, kind",
    [("model", AUTO), ((), AUTO), (3, AUTO), ("data", None), ("data", EXPLICIT)],
    ids=["another axis", "no axis", "a number", "no mesh", "explicit"],
)
def test_axes_along_which_no_weight_is_partitioned(axes, kind):
    p, x, partitions = params(), inputs(), None
    if kind == EXPLICIT:
        p, x = on_mesh(mesh_of(kind))
    elif kind is not None:
        _, partitions = placed(p, mesh_of(kind), P("data"))
    plan = jqx.make_plan(network, jqx.presets.w8a16())(p, x)
    with pytest.raises(ValueError, match=r"`gather_axes` are not axes(.|\n)+fix:"):
        jqx.convert(network, plan, gather_axes=axes, shardings=partitions)(p, x)
