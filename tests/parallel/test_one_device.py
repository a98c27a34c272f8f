"""What several devices find is what one device finds: scales, codes of algorithms, the text of a
model, modules of Flax; and that of two processes.
"""

import functools
import pathlib
import socket
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
import jqx.linen
import jqx.nnx
from jqx.algorithms import auto_round, gptq, nearest, own_text
from jqx.calibrators import AcrossDevices

from ..arrays import normal
from ..environment import unoptimized
from ..models.parallel import AUTO, EXPLICIT, inputs, mesh_of, network, on_mesh, params
from .devices import TABLE


def cases():
    """The spec of one device and that of several, for each calibrator and granularity."""
    for name in ("absmax", "minmax", "mse", "percentile"):
        calibrator, symmetric = getattr(jqx.calibrators, name), name != "minmax"
        for granularity in (jqx.per_axis(0), jqx.per_tensor()):
            fields = {"granularity": granularity, "symmetric": symmetric}
            alone = jqx.QSpec("int8" if symmetric else "uint8", calibrator=calibrator, **fields)
            across = AcrossDevices("model", calibrator)
            yield alone, jqx.QSpec(alone.qtype, calibrator=across, **fields)


def codes_of_one_device(x):
    """Of all elements at once, and of what the same spec finds where nothing is parted."""
    out = []
    for alone, spec in cases():
        calibrator = alone.calibrator
        whole = jqx.QTensor.quantize(
            x, alone, calibrator.affine(calibrator.observe(x, alone), alone)
        )
        out.append((whole.codes, jqx.QTensor.quantize(x, spec).codes))
    return out


@pytest.mark.many
@pytest.mark.parametrize("checked", [True, False])
def test_codes_are_those_of_the_whole_array(checked):
    x = jnp.asarray(normal(0, 8, 64)) * jnp.arange(1, 65, dtype=jnp.float32)[None]
    parted = jax.shard_map(
        lambda x: [jqx.QTensor.quantize(x, spec).codes for _, spec in cases()],
        mesh=mesh_of(AUTO, 2, 4),
        in_specs=P(None, "model"),
        out_specs=P(None, "model"),
        check_vma=checked,
    )
    for parted_codes, of_one, (alone, _) in zip(
        jax.jit(parted)(x), jax.jit(codes_of_one_device)(x), cases(), strict=True
    ):
        for codes in (parted_codes, of_one[1]):
            np.testing.assert_array_equal(codes, of_one[0], err_msg=str(alone))


def test_a_row_parallel_product_in_shard_map_has_the_sums_of_one_device():
    mesh = mesh_of(AUTO, 2, 4)
    x, w = jnp.asarray(normal(1, 8, 128)), jnp.asarray(normal(2, 128, 32))

    def parted(w, x):
        body = lambda w, x: lax.psum(x @ w, "model")  # noqa: E731
        specs = P("model", None), P("data", "model")
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("data"))(w, x)

    spec = jqx.QSpec("int8", jqx.per_token(), dynamic=True, calibrator=AcrossDevices("model"))
    channel = jqx.QSpec("int8", jqx.per_channel())
    plan = jqx.make_plan(parted, jqx.Policy([jqx.Rule(weight=channel, activation=spec)]))(w, x)
    y = jax.jit(jqx.convert(parted, plan))(jqx.quantize_params(w, plan), x)
    one = lambda w, x: x @ w  # noqa: E731
    plan = jqx.make_plan(one, jqx.presets.w8a8_dynamic())(w, x)
    expected = jax.jit(jqx.convert(one, plan))(jqx.quantize_params(w, plan), x)
    size = 128 * float(jnp.abs(x).max() * jnp.abs(w).max())
    np.testing.assert_allclose(y, expected, rtol=0, atol=size * 8 * 2.0**-24)


def test_rows_of_padding_are_left_out_of_scales_on_each_device():
    """One device has only padding. All find the scale of the rows of all devices."""
    w, x = jnp.eye(4), jnp.asarray(normal(1, 16, 4)).at[2:4].set(1000.0)
    spec = jqx.QSpec("int8", calibrator=AcrossDevices("model"))
    f = lambda w, x: x @ w  # noqa: E731
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight="int8", activation=spec)]))(w, x[:2])

    def scale(w, x):
        weight = lambda x: x[:, 0] != 1000.0  # noqa: E731
        (stats,) = jqx.calibrate(f, plan, weight=weight)(w, x)[1].values()
        return spec.calibrator.affine(stats, spec).scale, spec.calibrator.observed(stats)[None]

    options = {"in_specs": (P(), P("model")), "out_specs": P("model"), "check_vma": False}
    scales, observed = jax.shard_map(scale, mesh=mesh_of(AUTO, 1, 8), **options)(w, x)
    expected = np.abs(np.delete(x, [2, 3], axis=0)).max() / np.float32(127)
    np.testing.assert_array_equal(scales, np.full_like(scales, expected))
    assert (observed > 0).all()


def test_wrong_axes_of_a_calibrator_are_refused():
    with pytest.raises(TypeError, match="`axis_name` names no mesh axis"):
        AcrossDevices(3)
    with pytest.raises(TypeError, match="`calibrator`"):
        AcrossDevices("model", "absmax")
    spec = jqx.QSpec("int8", calibrator=AcrossDevices("tensor"))
    f = jax.shard_map(
        lambda x: jqx.QTensor.quantize(x, spec).codes,
        mesh=mesh_of(AUTO),
        in_specs=P("model"),
        out_specs=P("model"),
    )
    with pytest.raises(ValueError, match="has no axis 'tensor'"):
        f(jnp.ones(8))


def test_a_calibrator_across_devices_is_written_as_json():
    spec = jqx.QSpec("int8", dynamic=True, calibrator=AcrossDevices(("data", "model")))
    plan = jqx.make_plan(
        lambda w, x: x @ w, jqx.Policy([jqx.Rule(weight="int8", activation=spec)])
    )(jnp.ones((4, 4)), jnp.ones((1, 4)))
    assert jqx.Plan.from_dict(plan.to_dict()) == plan


INT4 = jqx.Policy({".*": "int4:group=32"})
ALGORITHMS = {
    "nearest": (INT4, nearest()),
    "static scales": (jqx.presets.w8a8(), nearest()),
    "layer by layer": (INT4, gptq()),
    "one pass": (INT4, gptq(sequential=False)),
    "learned": (INT4, auto_round(steps=2)),
}


def quantize(name, p, x):
    return jqx.ptq(network, *ALGORITHMS[name], target=False, progress=False)(p, [x, x])


@functools.cache
def of_one_device(name):
    one = quantize(name, params(), inputs())
    return one, jax.jit(one.function)(one.params, inputs())


@pytest.mark.many("kind")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((AUTO, name) for name in ALGORITHMS),
        *((EXPLICIT, name) for name in ("static scales", "layer by layer", "learned")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name.lower(),
)
def test_codes_equal_those_of_one_device_and_are_on_the_devices_of_the_floats(name, kind):
    p, x = on_mesh(mesh_of(kind))
    quantized, (one, expected) = quantize(name, p, x), of_one_device(name)
    for path in ("up", "down"):
        q, q_of_one = quantized.params[path], one.params[path]
        np.testing.assert_array_equal(q.values, q_of_one.values)
        np.testing.assert_array_equal(q.scale, q_of_one.scale)
        assert q.values.sharding.is_equivalent_to(p[path].sharding, 2)
    for key, (scale, _) in one.affines.items():
        np.testing.assert_allclose(quantized.affines[key].scale, scale, rtol=512 * 2.0**-24)
    y = jax.jit(quantized.function)(quantized.params, x)
    size = float(np.abs(expected).max())
    np.testing.assert_allclose(y, expected, rtol=0, atol=size * 512 * 2.0**-24)


WORDS, WIDTH, HEADS, LAYERS, ROWS, LENGTH = 48, 32, 4, 2, 4, 40


def weights(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-2])
    return values.astype(np.float32)


PARAMS = {
    "table": 1.5 * weights(0, WORDS, WIDTH),
    "qkv": weights(1, LAYERS, WIDTH, 3 * WIDTH),
    "out": weights(2, LAYERS, WIDTH, WIDTH),
}
SPECS = {"table": P(), "qkv": P(None, None, "b"), "out": P(None, "b")}


def attend(q, k, v, mask):
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(*mixed.shape[:2], WIDTH)


def decoder(params, tokens):
    """Logits of a decoder of two layers, scanned."""

    def layer(x, p):
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
        return x + attend(*jnp.split(x @ p["qkv"], 3, -1), mask) @ p["out"], None

    x, _ = jax.lax.scan(layer, params["table"][tokens], {k: params[k] for k in ("qkv", "out")})
    return x @ params["table"].T


def step(params, cache, tokens, position):
    """The same for a token of each row, with a cache of keys and values."""
    x, caches = params["table"][tokens][:, None], []
    for i in range(LAYERS):
        q, *new = jnp.split(x @ params["qkv"][i], 3, -1)
        layer_cache = jax.lax.dynamic_update_slice(cache[i], jnp.stack(new), (0, 0, position, 0))
        mask = (jnp.arange(LENGTH) <= position)[None, None, None]
        x = x + attend(q, *layer_cache, mask) @ params["out"][i]
        caches.append(layer_cache)
    caches = jnp.stack(caches)
    jax.debug.inspect_array_sharding(caches, callback=LAID_OUT.append)
    return (x @ params["table"].T)[:, 0], caches


LAID_OUT = []
CACHE = np.zeros((LAYERS, 2, ROWS, LENGTH, WIDTH), np.float32)


def on_table(x, spec):
    return jax.device_put(x, NamedSharding(TABLE, spec))


@pytest.mark.parametrize("way", ["function", "step"])
def test_text_of_sharded_weights_is_that_of_one_device(way):
    """Sums over several devices round in another order, which changes none of these tokens. The
    cache stays on the devices, and so do the weights.
    """
    f, caches = (decoder, []) if way == "function" else (step, [CACHE])
    options = {"rows": ROWS, "length": LENGTH, "progress": False}
    expected = np.asarray(own_text(f, PARAMS, *caches, **options))
    assert len(np.unique(expected)) > WORDS / 2
    params = {name: on_table(x, SPECS[name]) for name, x in PARAMS.items()}
    shardings = {name: x.sharding for name, x in params.items()}
    spec = P(None, None, "a", None, "b")
    LAID_OUT.clear()
    tokens = own_text(f, params, *(on_table(x, spec) for x in caches), **options)
    np.testing.assert_array_equal(tokens, expected)
    assert tokens.sharding.device_set == set(TABLE.devices.flat)
    for name, x in params.items():
        assert x.sharding == shardings[name]
        np.testing.assert_array_equal(x, PARAMS[name])
    if way == "step":
        laid_out = NamedSharding(TABLE, spec)
        assert LAID_OUT
        assert all(x.is_equivalent_to(laid_out, CACHE.ndim) for x in LAID_OUT), LAID_OUT


init = nn.initializers.lecun_normal()
zeros = nn.initializers.zeros_init()
PRESETS = ("w8a8_dynamic", "w4a16")


def quantized_of(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    return [x for x in leaves if isinstance(x, jqx.QTensor)]


def partitioned(q):
    """How the real array of a QTensor is partitioned, as its values say."""
    spec = (*q.values.sharding.spec, *(None,) * (q.ndim - len(q.values.sharding.spec)))
    return spec[::-1] if q.layout is not None and q.layout.swapped else spec


class Network(nnx.Module):
    def __init__(self, rngs):
        up, down = (
            nnx.with_partitioning(init, spec) for spec in ((None, "model"), ("model", None))
        )
        bias = nnx.with_partitioning(zeros, ("model",))
        self.up = nnx.Linear(64, 128, rngs=rngs, kernel_init=up, bias_init=bias)
        self.down = nnx.Linear(128, 64, rngs=rngs, kernel_init=down)

    def __call__(self, x):
        h = nnx.relu(self.up(x))
        mesh = jax.typeof(h).sharding.mesh
        if EXPLICIT not in mesh.axis_types:
            return self.down(h)
        return self.down(h, out_sharding=NamedSharding(mesh, P("data", None)))


kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


@pytest.mark.slow
@pytest.mark.many
@kinds
@pytest.mark.parametrize("preset", PRESETS)
def test_codes_of_nnx_are_on_the_devices_of_their_floats(preset, kind):
    mesh = mesh_of(kind, 2, 4)
    with jax.set_mesh(mesh):
        model = Network(nnx.Rngs(0))
    alone = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), nnx.state(model))
    one = nnx.merge(nnx.graphdef(model), alone)
    x = jnp.asarray(normal(0, 16, 64))
    rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    policy = getattr(jqx.presets, preset)()
    q, q_of_one = (jqx.nnx.quantize(m, policy, scales="dynamic") for m in (model, one))
    jqx.nnx.convert(q, rows)
    jqx.nnx.convert(q_of_one, x)
    down, up = quantized_of(nnx.state(q))
    assert partitioned(up) == (None, "model") and partitioned(down) == ("model", None)
    assert up.scale.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (q, q_of_one)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    run = nnx.jit(lambda m, x: m(x))
    # Of 128 numbers at most, in another order: each sum rounds as often, by half a last place.
    size = float(jnp.abs(run(q_of_one, x)).max())
    np.testing.assert_allclose(run(q, rows), run(q_of_one, x), rtol=0, atol=size * 128 * 2.0**-24)
    done = jqx.nnx.ptq(model, policy, progress=False)([rows])
    down, up = quantized_of(done.params)
    assert partitioned(up) == (None, "model") and partitioned(down) == ("model", None)


@kinds
@pytest.mark.parametrize("preset", PRESETS)
def test_codes_of_linen_are_on_the_devices_of_their_floats(preset, kind):
    mesh = mesh_of(kind, 2, 4)
    dense = nn.Dense(128, kernel_init=nn.with_partitioning(init, (None, "model")))
    x = jnp.asarray(normal(0, 16, 64))
    boxed = dense.init(jax.random.key(0), x)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nn.get_partition_spec(boxed))
    one = nn.meta.unbox(boxed)
    on_devices, rows = (
        jax.device_put(one, shardings),
        jax.device_put(x, NamedSharding(mesh, P("data"))),
    )
    module = jqx.linen.quantize(dense, getattr(jqx.presets, preset)(), mode=jqx.linen.Mode.CONVERT)
    converted, expected = (
        jqx.linen.convert(module, on_devices, rows),
        jqx.linen.convert(module, one, x),
    )
    (kernel,) = quantized_of(converted)
    assert partitioned(kernel) == (None, "model")
    for a, b in zip(*map(jax.tree.leaves, (converted, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    y, y_of_one = jax.jit(module.apply)(converted, rows), jax.jit(module.apply)(expected, x)
    atol = float(jnp.abs(y_of_one).max()) * 64 * 2.0**-24  # sums of 64 numbers
    np.testing.assert_allclose(y, y_of_one, rtol=0, atol=atol)
    done = jqx.linen.ptq(dense, getattr(jqx.presets, preset)(), progress=False)(on_devices, [rows])
    assert partitioned(quantized_of(done.params)[0]) == (None, "model")


@pytest.mark.slow
def test_two_processes_have_the_codes_and_scales_of_one_device():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = pathlib.Path(__file__).parent / "processes.py"
    options = {"env": unoptimized() | {"JAX_PLATFORMS": "cpu"}, "stdout": subprocess.PIPE}
    command = [sys.executable, str(program)]
    both = [
        subprocess.Popen(
            [*command, str(i), "2", str(port)], stderr=subprocess.STDOUT, text=True, **options
        )
        for i in range(2)
    ]
    told = [process.communicate(timeout=600)[0] for process in both]
    for process, text in zip(both, told, strict=True):
        assert process.returncode == 0 and text.endswith("done\n"), text
