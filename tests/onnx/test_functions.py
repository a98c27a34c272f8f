"""Functions of JAX and of libraries in onnxruntime, beside JAX: what is written as a function of
other primitives, and layers, losses and steps of training. The slow ones are layers in float and in
each scheme, as written and as onnxruntime rewrites them.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export, lax

import jqx
from jqx.interop import to_onnx

from ..arrays import normal
from .runtime import LEVELS, assert_close, assert_equal, run

ROWS = np.asarray(normal(0, 5, 6))
SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, -2, -2.5, 1e-4, 1e-30, 3e38, -3e38, 10, -33],
    "f4",
)


EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""The option of onnxruntime that does not round activations to 8 bits."""


def data_of(tree):
    """The data of keys of random numbers; all else as it is."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def each(*functions):
    return lambda *args: [f(*args) for f in functions]


def compare(f, *args, tolerance=1e-5):
    """Compares a function without parameters with JAX, as it is written and as it is rewritten."""
    model = to_onnx(lambda _, *args: f(*args), {})(*args)
    expected = jax.tree.map(np.asarray, jax.jit(f)(*args))
    given = data_of(args)
    for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
        assert_close(run(model, *given, level=level), expected, tolerance)


def test_special_functions_of_special_values():
    def digamma(x):  # at 0 it is NaN, in files too, and -infinity in newer versions of JAX
        return lax.digamma(jnp.where(x == 0, 1, x))

    near = np.abs(ROWS) * 2 + np.float32(0.1)
    for x in (near, SPECIAL):
        pair = np.meshgrid(x.ravel(), x.ravel())
        functions = each(lax.lgamma, digamma, lambda x: lax.erf_inv(x / 2.5))
        compare(functions, x, tolerance=1e-4)
        compare(each(lax.atan2, lax.nextafter), *map(np.ascontiguousarray, pair))
    compare(lax.erf_inv, (np.arange(99, dtype="f4") + 0.5) / 99)


def test_scans_along_an_axis():
    scans = lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp
    both = each(*scans, *(lambda x, f=f: f(x, 1, reverse=True) for f in scans))
    numbers = SPECIAL[np.isfinite(SPECIAL) & (np.abs(SPECIAL) < 30)].reshape(2, -1)
    for x in (ROWS, numbers, ROWS[:1, :1], np.where(ROWS > 0.5, np.nan, -np.inf).astype("f4")):
        compare(both, x)
    compare(each(*scans[:3]), np.arange(-3, 9, dtype="i4").reshape(4, 3))


def test_orders_and_bits():
    counts = np.random.default_rng(0).integers(0, 3, (5, 6)).astype("i4")

    def f(x, i):
        yield lax.sort((i, x), dimension=1, num_keys=2)
        yield lax.sort((i, i % 2, x, x + 1), dimension=0, num_keys=3)
        yield jnp.lexsort((x, i)), lax.approx_max_k(x, 2), lax.approx_min_k(x, 3, 0)
        for dtype in (jnp.int32, jnp.uint32, jnp.uint8, jnp.int16):
            bits = (i * 4567 - 3).astype(dtype)
            yield lax.population_count(bits), lax.clz(bits), lax.clz(i.astype(dtype))
        small = x.astype(jnp.bfloat16)
        bits = lax.bitcast_convert_type(small, jnp.uint16)
        yield bits, lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
        yield x.at[i[:, 0]].subtract(2.0), x.at[:, i[0]].subtract(x[:, :1])

    compare(lambda *args: list(f(*args)), ROWS, counts)


def test_searches_in_an_order():
    """A primitive of newer versions of JAX has no rule, and is refused."""

    def f(x):
        for method in ("scan", "scan_unrolled", "sort", "compare_all"):
            yield jnp.searchsorted(jnp.sort(x[0]), x[1:], method=method)
        yield jnp.interp(x, jnp.linspace(-1, 1, 5), jnp.arange(5.0)), jnp.histogram(x[0], 4)

    if "SearchSorted" in str(jax.make_jaxpr(lambda x: list(f(x)))(ROWS)):
        with pytest.raises(NotImplementedError, match="has no rule for ONNX"):
            to_onnx(lambda _, x: list(f(x)), {})(ROWS)
    else:
        compare(lambda x: list(f(x)), ROWS)


def test_random_numbers_of_a_key():
    """Bit for bit, also of keys in loops, branches and views."""

    def drawn(key, seed):
        yield jax.random.key_data(jax.random.split(key, 3)), jax.random.bits(key, (7,))
        yield jax.random.key_data(jax.random.fold_in(key, seed)), jax.random.bits(key, (5,), "u1")
        yield jax.random.uniform(jax.random.key(seed), (2, 3)), jax.random.randint(key, (5,), 0, 9)
        yield jax.random.permutation(key, 9), jax.random.bernoulli(key, 0.3, (9,))
        yield jax.random.categorical(key, jnp.arange(5.0), shape=(4,))

    def in_loops(key, seed):
        key = lax.fori_loop(0, seed, lambda i, k: jax.random.split(k)[0], key)
        key = lax.cond(seed > 2, lambda k: k, lambda k: jax.random.fold_in(k, 3), key)
        keys = jax.random.split(key, 6)
        yield lax.scan(lambda c, k: (c, jax.random.bits(k)), 0, keys)
        yield lax.scan(lambda k, _: tuple(jax.random.split(k)), key, length=2)
        views = keys[1], keys.reshape(2, 3).T, keys[::-1], keys[jnp.array([2, 0])]
        views += jnp.concatenate([keys, keys]), jnp.where(jnp.arange(6) > seed, keys, keys[::-1])
        yield list(map(jax.random.key_data, views))
        yield jax.vmap(jax.random.bits)(keys)

    f = lambda *args: data_of([*drawn(*args), *in_loops(*args)])  # noqa: E731
    args = jax.random.key(3), np.int32(4)
    model = to_onnx(lambda _, *args: f(*args), {})(*args)
    found = run(model, *data_of(args))
    assert_equal(found, jax.tree.map(np.asarray, jax.jit(f)(*args)))
    compare(lambda key: jax.random.normal(key, (9,)), args[0])


def test_loops_of_a_batch_end_each_for_itself():
    def loop(x, n):
        step = lambda c: (c[0] + 1, c[1] * 2 + 1, ~c[2])  # noqa: E731
        return lax.while_loop(lambda c: c[0] < n, step, (0, x, True))

    compare(jax.vmap(loop), ROWS, np.array([3, 0, 1, 5, 2], "i4"))
    nested = jax.vmap(jax.vmap(lambda x: lax.while_loop(lambda c: c < 5, lambda c: c * c + 1, x)))
    compare(nested, ROWS)


def test_windows_of_any_padding():
    def window(f, start, padding, dilation=(1, 1)):
        return lambda x: lax.reduce_window(
            x, start, f, (2, 3), (1, 2), padding, base_dilation=dilation
        )

    cases = [(lax.max, -jnp.inf), (lax.min, jnp.inf), (lax.add, 0.0)]
    windows = [((3, 2), (0, 4)), ((-1, 1), (2, -2)), ((1, 1), (1, 1))]
    x = np.where(np.abs(ROWS) > 1.5, -np.inf, ROWS).astype("f4")
    x[2, 2] = np.nan
    functions = [window(*case, padding) for case in cases for padding in windows]
    functions += [window(*case, ((2, 0), (0, 1)), (2, 3)) for case in cases]
    compare(each(*functions), x)
    compare(each(*functions[:6]), np.full((5, 6), -np.inf, "f4"))


def test_what_holds_a_function_and_what_moves_nothing():
    marked = jax.custom_batching.custom_vmap(lambda x: jnp.sin(x) + 1)
    marked.def_vmap(lambda size, batched, x: (jnp.sin(x) + 1, True))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    cases = [lax.composite(lambda x: jnp.cos(x) - 1, "a.b"), marked]
    cases += [lambda x: lax.with_sharding_constraint(x, device), lambda x: jax.device_put(x) * 2]
    compare(each(*cases), ROWS)


@pytest.mark.parametrize("scheme", [None, "int8", "w8a8"])
def test_products_of_groups_of_rows(scheme):
    f = lambda w, x, sizes: lax.ragged_dot(x, w, sizes)  # noqa: E731
    w, x = normal(1, 3, 6, 8), normal(2, 9, 6)
    for sizes in ([3, 0, 5], [0, 9, 0]):
        args = x, np.array(sizes, "i4")
        if scheme is None:
            found, expected = run(to_onnx(f, w)(*args), *args), jax.jit(f)(w, *args)
        else:
            policy = jqx.presets.w8a8() if scheme == "w8a8" else jqx.Policy({".*": scheme})
            q = jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)(w, [args])
            found, expected = run(to_onnx(q)(*args), *args), q.function(q.params, *args)
        assert_close(found, expected)


@pytest.mark.parametrize("scheme", ["int8", "int4:group=16"])
def test_weights_inside_of_branches_and_loops(scheme):
    """onnxruntime loads them with its default rewriting too."""

    def f(w, x):
        x = lax.cond(x[0, 0] < 9, lambda: x @ w["a"], lambda: x @ w["b"])
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w["a"]))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1] @ w["b"]

    w, x = {"a": normal(0, 32, 32), "b": normal(1, 32, 32)}, normal(2, 5, 32)
    policy = jqx.Policy({".*": scheme})
    q = jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)(w, [x])
    model, expected = to_onnx(q)(x), q.function(q.params, x)
    for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
        found = run(model, x, level=level, options=EXACT)
        assert_close(found, expected, 1e-4)


def test_parameters_and_results_that_are_known_are_in_the_file():
    """Also numbers without axes, arrays in the dtype of NumPy, and what a plan has no name for."""
    params = {"w": np.ones((6, 4)), "slope": jnp.float32(0.3), "key": jax.random.key(0)}

    def f(p, x):
        y = jnp.where(x > 0, x, x * p["slope"]) @ p["w"]
        noise = jax.random.normal(p["key"], (2,))
        return {"y": y, "name": "a", "count": 3, "noise": noise, "x": x, "table": ROWS}

    model = to_onnx(f, params)(ROWS)
    assert [x.name for x in model.graph.input] == ["input[0]"]
    names = ["count", "noise", "table", "x", "y"]
    assert [x.name for x in model.graph.output] == [f"output['{name}']" for name in names]
    expected = f({**params, "w": np.ones((6, 4), "f4")}, ROWS)
    assert_close(run(model, ROWS), [jnp.asarray(expected[name]) for name in names])


def test_sizes_in_arithmetic_and_windows_of_open_sizes():
    """Slices, strides, pools and random numbers; one file for several sizes."""
    b, n = export.symbolic_shape("b, n")
    spec = jax.ShapeDtypeStruct((b, n), jnp.float32)

    def f(key, x, i):
        rows, columns = x.shape
        yield x[2:], x[:, -3:], x[:, ::2], x[i, i + 1], jnp.roll(x, 1, 0), x[:, :0]
        yield jnp.zeros(columns % 3 + columns // 2 + columns**2)
        yield jnp.zeros((jax.core.max_dim(rows, 3), jax.core.min_dim(columns, 4)))
        yield lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), ((0, 0), (3, 0)))
        for mode in ("clip", "drop"):
            for op in ("set", "add", "mul", "min", "max"):
                yield getattr(x.at[i + 2], op)(0.5, mode=mode), getattr(x.at[0, i], op)(2.0)
        yield jax.random.categorical(key, x), jax.random.key_data(jax.random.split(key, rows))
        yield lax.sort((jnp.round(x), x), num_keys=2), lax.cummax(jnp.stack([x, -x]), 0)

    g = lambda *args: list(f(*args))  # noqa: E731
    index = jax.ShapeDtypeStruct((), jnp.int32)
    model = to_onnx(lambda _, *args: g(*args), {})(jax.random.key(0), spec, index)
    for x, i in ((ROWS, 1), (ROWS[:3, :4], 2), (np.tile(ROWS, (2, 1)), -1)):
        args = jax.random.key(5), x, np.int32(i)
        assert_close(run(model, *data_of(args)), jax.jit(g)(*args))
    with pytest.raises(NotImplementedError, match="`cumprod` over an open size"):
        to_onnx(lambda _, x: lax.cumprod(x, 1), {})(spec)
    with pytest.raises(
        jax.errors.InconclusiveDimensionOperation, match=r"constraints=\['n >= 2'\]"
    ):
        to_onnx(lambda _, x: lax.dynamic_slice_in_dim(x, 1, 2, 0), {})(spec)
    (m,) = export.symbolic_shape("m")
    with pytest.raises(ValueError, match="the open size 'm' is not that of an axis of an input"):
        to_onnx(lambda _, x: x[::2], {})(jax.ShapeDtypeStruct((2 * m,), jnp.float32))


@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_images_of_open_sizes(scheme):
    h, w = export.symbolic_shape("h, w", constraints=["h >= 4", "w >= 4"])

    def f(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        pool = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "SAME")
        total = lax.reduce_window(x, 0.0, lax.add, (1, 2, 3, 1), (1, 2, 1, 1), "SAME")
        return y, y.sum((1, 2)), pool, total

    kernel, images = normal(0, 3, 2, 3, 5), [normal(i, 2, 4 + i, 9 - i, 3) for i in range(3)]
    spec, g, params = jax.ShapeDtypeStruct((2, h, w, 3), jnp.float32), f, kernel
    if scheme is None:
        model = to_onnx(f, kernel)(spec)
    else:
        q = jqx.ptq(f, jqx.presets.w8a8(), jqx.algorithms.nearest(), progress=False)(kernel, images)
        model, g, params = to_onnx(q)(spec), q.function, q.params
    for x in images:
        assert_close(run(model, x), jax.jit(g)(params, x), 1e-5 if scheme is None else 1e-3)


def test_what_a_file_cannot_hold_is_refused():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    places = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(lambda x: x - 1, mesh=mesh, in_specs=places, out_specs=places)
    cases = [
        (lambda x: x.at[np.array([1, 1])].apply(jnp.sin), "`scatter` with a function of the elem"),
        (lambda x: lax.conv(x, x, (), "SAME"), "without axes of space"),
        (mapped, "`shard_map` has no rule"),
        (lambda x: jax.random.gamma(jax.random.key(x[0, 0].astype(int)), 2.0), "random_gamma"),
        (lambda x: lax.approx_max_k(x, 2, aggregate_to_topk=False), "that is not aggregated"),
        (lambda x: lax.igamma(x, x), "`igamma` has no rule"),
    ]
    for f, text in cases:
        with pytest.raises(NotImplementedError, match=text):
            to_onnx(lambda _, x: f(x), {})(ROWS)  # noqa: B023
    f = lambda w, x: x @ w  # noqa: E731
    with pytest.raises(TypeError, match=r"no values for a file.\n  given:    a shape"):
        to_onnx(f, jax.ShapeDtypeStruct((6, 2), jnp.float32))(ROWS)
    with pytest.raises(TypeError, match="an array that is traced"):
        jax.jit(lambda w: to_onnx(f, w)(ROWS))(normal(0, 6, 2))
    with pytest.raises(TypeError, match="or what the function closes over, has no values"):
        jax.jit(lambda w: to_onnx(lambda _, x: x @ w, {})(ROWS))(normal(0, 6, 2))
    with pytest.raises(TypeError, match="an array that is traced"):
        q = jqx.QTensor.quantize(normal(0, 6, 2), jqx.QSpec("int8"))
        jax.jit(lambda q: to_onnx(f, q)(ROWS))(q)


# Layers of libraries.

IMAGES, SEQUENCES = normal(3, 2, 8, 8, 4), normal(4, 2, 6, 16)
CHANNELS = normal(5, 2, 4, 8, 8)
IDS = np.array([[1, 2, 3]], "i4")
SCHEMES = {
    "w8a8": (jqx.presets.w8a8, "uint8"),
    "w8a8 int8": (jqx.presets.w8a8, "int8"),
    "w8a8 QDQ": (jqx.presets.w8a8, "qdq_uint8"),
    "w8a8_dynamic": (jqx.presets.w8a8_dynamic, "uint8"),
    "w8a16": (jqx.presets.w8a16, "uint8"),
    "w4a16": (lambda: jqx.Policy({".*": "int4:group=8"}), "uint8"),
}


class Lengths(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(8))(x, seq_lengths=jnp.array([3, 6]))


class Block(nn.Module):
    """A layer of a transformer."""

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.SelfAttention(4)(nn.LayerNorm()(x))
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))), None


class Network(nn.Module):
    """Layers in a scan, as Flax lifts it."""

    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Block), length=2, **axes)()(x, None)
        return nn.vmap(nn.Dense, in_axes=None, axis_size=3, **axes)(8)(x)


def linen(module, *args):
    params = jax.tree.map(np.asarray, module.init(jax.random.key(0), *args))
    return module.apply, params, args


def of_nnx(make, *args):
    graph, state = nnx.split(make(nnx.Rngs(0)))
    return lambda p, *args: nnx.merge(graph, p)(*args), state, args


def equinox(make, *args):
    params, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)
    return lambda p, *args: jax.vmap(eqx.combine(p, static))(*args), params, args


LAYERS = {
    "Dense": lambda: linen(nn.DenseGeneral((4, 3), axis=(-2, -1)), SEQUENCES),
    "Conv": lambda: linen(nn.Conv(6, (3, 2), strides=(2, 1), padding="CIRCULAR"), IMAGES),
    "Conv of groups": lambda: linen(nn.Conv(8, (3, 3), feature_group_count=2), IMAGES),
    "Conv causal": lambda: linen(nn.Conv(6, (3,), padding="CAUSAL"), SEQUENCES),
    "ConvLocal": lambda: linen(nn.ConvLocal(8, (3, 3)), IMAGES),
    "ConvTranspose": lambda: linen(nn.ConvTranspose(6, (3, 2), strides=(2, 2)), IMAGES),
    "attention": lambda: linen(nn.MultiHeadDotProductAttention(4), SEQUENCES, SEQUENCES),
    "Embed": lambda: linen(nn.Embed(11, 8), IDS),
    "LSTM of lengths": lambda: linen(Lengths(), SEQUENCES),
    "recurrent": lambda: linen(
        nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(8)), nn.RNN(nn.GRUCell(8))), SEQUENCES
    ),
    "ConvLSTM": lambda: linen(nn.RNN(nn.ConvLSTMCell(4, (3, 3))), normal(6, 1, 2, 6, 6, 4)),
    "network": lambda: linen(Network(), SEQUENCES),
    "nnx.Einsum": lambda: of_nnx(
        lambda rngs: nnx.Einsum("abc,cde->abde", (16, 3, 8), (3, 8), rngs=rngs), SEQUENCES
    ),
    "nnx.LoRALinear": lambda: of_nnx(
        lambda rngs: nnx.LoRALinear(16, 8, lora_rank=4, rngs=rngs), SEQUENCES
    ),
    "nnx.GRUCell": lambda: of_nnx(
        lambda rngs: nnx.RNN(nnx.GRUCell(16, 8, rngs=rngs), rngs=rngs), SEQUENCES
    ),
    "eqx.MLP": lambda: equinox(lambda key: eqx.nn.MLP(16, 4, 32, 2, key=key), SEQUENCES[0]),
    "eqx.Conv2d": lambda: equinox(
        lambda key: eqx.nn.Conv2d(4, 6, 3, stride=2, padding="SAME", key=key), CHANNELS
    ),
    "eqx.ConvTranspose2d": lambda: equinox(
        lambda key: eqx.nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, key=key), CHANNELS
    ),
    "eqx.MultiheadAttention": lambda: equinox(
        lambda key: eqx.nn.MultiheadAttention(4, 16, key=key), *[SEQUENCES] * 3
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_write")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_float_and_in_each_scheme(name):
    f, params, args = LAYERS[name]()
    models = {"float": (to_onnx(f, params)(*args), jax.jit(f)(params, *args))}
    for scheme, (policy, products) in SCHEMES.items():
        q = jqx.ptq(f, policy(), jqx.algorithms.nearest(), progress=False)(params, [args])
        model = to_onnx(q, products=products)(*args)
        models[scheme] = model, jax.jit(q.function)(q.params, *args)
    for scheme, (model, expected) in models.items():
        for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
            found = run(model, *args, level=level, options=EXACT)
            assert_close(found, expected, 2e-5 if scheme == "float" else 1e-3)


NORMS = {
    **{
        type(module).__name__: lambda module=module: linen(module, IMAGES)
        for module in (nn.LayerNorm(), nn.GroupNorm(2), nn.RMSNorm(), nn.InstanceNorm(), nn.PReLU())
    },
    "BatchNorm": lambda: linen(nn.BatchNorm(use_running_average=True), IMAGES),
    "WeightNorm": lambda: linen(nn.WeightNorm(nn.Dense(8)), SEQUENCES),
    "Dropout": lambda: of_nnx(lambda rngs: nnx.Dropout(0.5, deterministic=True, rngs=rngs), IMAGES),
    "SpectralNorm": lambda: of_nnx(
        lambda rngs: nnx.SpectralNorm(nnx.Linear(16, 8, rngs=rngs), rngs=rngs), SEQUENCES
    ),
    "pools": lambda: (
        lambda _, x: [
            f(x, (3, 2), (2, 1), padding)
            for f in (nn.max_pool, nn.avg_pool)
            for padding in ("SAME", "VALID", ((1, 1), (0, 1)))
        ],
        {},
        (IMAGES,),
    ),
    "eqx.MaxPool2d": lambda: equinox(
        lambda key: eqx.nn.MaxPool2d(3, 2, 1, use_ceil=True), CHANNELS
    ),
    "eqx.AvgPool2d": lambda: equinox(
        lambda key: eqx.nn.AvgPool2d(3, 2, 1, use_ceil=True), CHANNELS
    ),
    "losses": lambda: (
        lambda _, x: [
            optax.softmax_cross_entropy_with_integer_labels(x, jnp.array([0, 1, 2, 3])),
            optax.huber_loss(x, x[::-1]),
            optax.sigmoid_focal_loss(x, (x > 0) * 1.0),
            optax.ctc_loss(x[None], jnp.zeros((1, 4)), IDS[:, :2], jnp.zeros((1, 2))),
            jax.grad(lambda x: optax.log_cosh(x).sum())(x),
        ],
        {},
        (normal(7, 4, 5),),
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_write")
@pytest.mark.parametrize("name", NORMS)
def test_layers_without_products(name):
    f, params, args = NORMS[name]()
    model, expected = to_onnx(f, params)(*args), jax.jit(f)(params, *args)
    for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
        assert_close(run(model, *args, level=level), expected)


OPTIMIZERS = {
    "adamw": optax.adamw,
    "adafactor": optax.adafactor,
    "lamb": optax.lamb,
    "noisy_sgd": optax.noisy_sgd,
    "muon": optax.contrib.muon,
    "sm3": optax.sm3,
    "apply_if_finite": lambda rate: optax.apply_if_finite(optax.sgd(rate), 3),
    "MultiSteps": lambda rate: optax.MultiSteps(optax.sgd(rate), 2).gradient_transformation(),
}


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_write")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_training(name):
    """A file that takes parameters, the state of an optimizer and a batch, and returns the next."""
    params = {"w": normal(8, 16, 5), "b": normal(9, 5)}
    optimizer = OPTIMIZERS[name](0.1)

    def step(_, params, state, x):
        loss = lambda p: (jnp.tanh(x @ p["w"] + p["b"]) ** 2).mean()  # noqa: E731
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    args = params, optimizer.init(params), SEQUENCES[0]
    found = run(to_onnx(step, {})(*args), *data_of(args))
    assert_close(found, data_of(jax.jit(step)({}, *args)), 1e-4)
