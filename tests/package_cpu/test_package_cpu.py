"""Kernels of jqx-cpu beside what jqx computes without them. Skipped where it is not installed."""

import itertools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src import package_cpu
from jqx._src.contractions.cache import values_as
from jqx._src.interop.codec import as_numpy, codes_of
from jqx._src.kernels.products_cpu import float_product_cpu, product_cpu

from ..arrays import normal

package = pytest.importorskip("jqx_cpu")

SCHEMES = (
    "int8",
    "uint8:asymmetric",
    "int8:group=32",
    "int8:group=128:asymmetric",
    "int4",
    "int4:group=32",
    "uint4:group=64:asymmetric",
    "int4:group=128",
    "int4:group=16",
    "int2:group=32",
    "uint2:group=64:asymmetric",
)


def chosen(f, *args):
    return [x.cpu.name for x in jqx.formulations(f)(*args)]


def quantized(w, scheme):
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.Policy({".*": scheme}))(w, w[:, :1].T)
    return jqx.quantize_params(w, plan)


def integers(rng, *shape):
    return jnp.asarray(rng.integers(-128, 128, shape), jnp.int8)


SHAPES = (
    (1, 1, 1),
    (1, 64, 4),
    (3, 65, 5),
    (6, 300, 64),
    (24, 7, 70),
    (49, 130, 66),
    (97, 64, 129),
)


def test_sums_are_exact_with_zero_points_of_either_side():
    rng, given, expected = np.random.default_rng(0), [], []
    for (m, k, n), has_x, has_w in itertools.product(SHAPES, (False, True), (False, True)):
        x, w = integers(rng, 2, m, k), integers(rng, 2, n, k)
        a = integers(rng, 2, m if n % 2 else 1).astype(jnp.int32) if has_x else None
        b = integers(rng, 2, 1 if n % 3 else n).astype(jnp.int32) if has_w else None
        given.append((x, None, a, w, None, b))
        left, right = (np.asarray(y, np.int64) for y in (x, w))
        left = left if a is None else left - np.asarray(a)[:, :, None]
        right = right if b is None else right - np.asarray(b)[:, :, None]
        expected.append(np.einsum("bmk,bnk->bmn", left, right).astype(np.int32))
    found = jax.jit(lambda every: [product_cpu(*each) for each in every])(given)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def test_intermediate_terms_wrap_around_and_the_total_does_not():
    k = 60000
    x, w = (jnp.full((1, 1, k), value, jnp.int8) for value in (127, 100))
    zero = jnp.full((1, 1), 126, jnp.int32)
    (y,) = product_cpu(x, None, zero, w, None, jnp.full((1, 1), 99, jnp.int32)).ravel()
    assert int(y) == k


def test_codes_made_in_a_kernel_equal_those_of_the_ops():
    """Halves, NaN, infinities, the ends of the range, subnormal numbers."""
    edges = np.float32([0.5, 1.5, -2.5, 126.5, 127.5, -128.5, 1e9, np.inf, -np.inf, np.nan, 1e-40])
    x = np.concatenate([edges, np.asarray(normal(0, 501)) * 40]).astype(np.float32)
    rows = jnp.asarray(np.stack([x, x * 3, x / 7]))
    scale = jnp.asarray([[1.0], [3.0], [0.3]])
    spec = jqx.QSpec("int8", jqx.per_axis(0))
    codes = jqx.QTensor.quantize(rows, spec, jqx.calibrators.Affine(scale)).values
    one = jnp.eye(rows.shape[1], dtype=jnp.int8)[None]
    found = product_cpu(rows[None], scale.T, None, one, None, None, low=-127, high=127)
    low = int(codes.min())
    assert low in (-127, -128)
    if low == -128:
        found = product_cpu(rows[None], scale.T, None, one, None, None, low=-128, high=127)
    np.testing.assert_array_equal(found[0], np.asarray(codes, np.int32))


@pytest.mark.parametrize("preset", ["w8a8_dynamic", "w8a8"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_products_of_codes_are_those_without_it(preset, rows):
    f = lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"]  # noqa: E731
    w = {"a": normal(0, 256, 130), "b": normal(1, 130, 72)}
    x = normal(2, rows, 256)
    plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x)
    q = jqx.quantize_params(w, plan)
    packed, affines = jqx.pack_for(q, "cpu"), None
    if preset == "w8a8":
        affines = jqx.affines(plan, jqx.calibrate(f, plan)(w, x)[1])
    # As an argument: XLA would multiply the constants of two scales.
    run = jax.jit(lambda q, x, affines: jqx.convert(f, plan, affines)(q, x))
    assert chosen(jqx.convert(f, plan, affines), packed, x) == ["package_quantizing"] * 2
    np.testing.assert_array_equal(run(packed, x, affines), run(q, x, affines), strict=True)
    plain = jqx.QTensor.quantize(x, jqx.QSpec("int8", jqx.per_axis(0)))
    assert chosen(jqx.matmul, plain, packed["a"]) == ["package_codes"]
    np.testing.assert_array_equal(
        jax.jit(jqx.matmul)(plain, packed["a"]), jax.jit(jqx.matmul)(plain, q["a"]), strict=True
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float_rows_times_few_bits(scheme):
    k, n = 512, 70
    bits = int(scheme.split(":")[0][-1])
    w = quantized(normal(0, k, n), scheme)
    q, dense = w.pack_for("cpu"), np.asarray(w.dequantize(), np.float64)
    assert q.layout.kernel == "cpu"
    np.testing.assert_array_equal(q.unpack().values, w.values, strict=True)
    np.testing.assert_array_equal(q.dequantize(), w.dequantize(), strict=True)
    np.testing.assert_array_equal(
        codes_of(as_numpy("w", q, "GGUF")), np.asarray(w.codes)
    )  # as files have them
    for rows in (1, 2, 5, 16, 33):
        x = normal(rows, rows, k) * 10.0 ** (jnp.arange(rows, dtype=jnp.float32)[:, None] % 20)
        assert chosen(jqx.matmul, x, q) == ["package_floats"]
        found, exact = jax.jit(jqx.matmul)(x, q), np.asarray(x, np.float64) @ dense
        # Half a step of each number, and the rounding of the sums of 16 lanes and of their parts.
        size = np.abs(x).max(1, keepdims=True) * k * 2.0**bits * np.asarray(w.real_scale()).max()
        assert np.all(np.abs(found - exact) <= size * (k * bits / 512 + 8) * 2.0**-24)
    few, many = (normal(3, count, k).astype(jnp.bfloat16) for count in (16, 17))
    assert chosen(jqx.matmul, few, q.astype(jnp.bfloat16)) == ["package_floats"]
    form = "package_floats" if package_cpu.has_bfloats() else "tiles"
    assert chosen(jqx.matmul, many, q.astype(jnp.bfloat16)) == [form]


def test_rows_that_are_not_finite_are_nan_and_others_are_not():
    q = quantized(normal(0, 256, 64), "int4:group=32")
    x = normal(1, 3, 256).at[1, 5].set(jnp.inf)
    y = jqx.matmul(x, q.pack_for("cpu"))
    np.testing.assert_array_equal(jnp.isnan(y).all(1), [False, True, False])
    assert bool(jnp.isfinite(y[::2]).all())


def test_small_and_large_rows_keep_their_digits():
    q = quantized(normal(0, 256, 64), "int4:group=32")
    x, packed = normal(1, 1, 256), q.pack_for("cpu")
    one = jqx.matmul(x, packed)
    for power in (-90, -40, 40, 100):
        scaled = jqx.matmul(x * 2.0**power, packed)
        np.testing.assert_array_equal(scaled / 2.0**power, one)


def test_it_composes_with_transforms():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = normal(0, 256, 192), normal(1, 5, 3, 256)
    for preset in ("w8a8_dynamic", "w8a16", "w4a16"):
        plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x[0])
        q = jqx.quantize_params(w, plan)
        p, g = jqx.pack_for(q, "cpu"), jqx.convert(f, plan)
        one = jnp.stack([jax.jit(g)(p, each) for each in x])
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), p)
        for axes, given in (((None, 0), (p, x)), ((0, 0), (stack, x)), ((0, None), (stack, x[0]))):
            expected = one if axes[1] == 0 else jnp.stack([one[0]] * 5)
            found = jax.jit(jax.vmap(g, axes))(*given)
            np.testing.assert_array_equal(found, expected)
        nested = jax.vmap(jax.vmap(g, (None, 0)), (0, None))(stack, x)
        np.testing.assert_array_equal(nested, jnp.stack([one] * 5))
        np.testing.assert_array_equal(g(p, x[0]), one[0])
        if preset == "w8a8_dynamic":
            continue
        c = normal(2, 3, 192)
        weighed = lambda x, q, g=g, c=c: (g(q, x) * c).sum()  # noqa: E731
        gradients = [jax.jit(jax.grad(weighed))(x[0], own) for own in (p, q)]
        # Sums of 192 products, in another order.
        size = float((jnp.abs(c) @ jnp.abs(q.dequantize()).T).max())
        np.testing.assert_allclose(*gradients, rtol=0, atol=size * 192 * 2.0**-24)


def test_a_scan_has_the_numbers_of_its_layers_one_by_one():
    layer = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    scanned = lambda w, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]  # noqa: E731
    w, x = normal(0, 4, 192, 192), normal(1, 3, 192)
    for preset in ("w8a8_dynamic", "w4a16"):
        policy = getattr(jqx.presets, preset)()
        plans = jqx.make_plan(scanned, policy)(w, x), jqx.make_plan(layer, policy)(w[0], x)
        q, y = jqx.pack_for(jqx.quantize_params(w, plans[0]), "cpu"), x
        for i in range(len(w)):
            y = jax.jit(jqx.convert(layer, plans[1]))(q[i], y)
        np.testing.assert_array_equal(jax.jit(jqx.convert(scanned, plans[0]))(q, x), y)


def test_what_is_written_lies_as_the_codes_beside_it():
    one, other = (quantized(normal(i, 256, 64), "int4:group=32") for i in range(2))
    packed = one.pack_for("cpu")
    expected = other.pack_for("cpu").values
    np.testing.assert_array_equal(values_as(other, packed), expected, strict=True)


def test_a_weight_is_found_in_its_stack():
    """No step copies it: what is in memory beside is smaller than one."""

    def f(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w, x = normal(0, 4, 512, 512), normal(1, 1, 512)
    for preset in ("w8a8_dynamic", "w4a16"):
        plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x)
        q = jqx.pack_for(jqx.quantize_params(w, plan), "cpu")
        compiled = jax.jit(jqx.convert(f, plan)).lower(q, x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < q.values.nbytes / 8


def test_scales_of_rows_are_those_without_it():
    """NaN, infinities, zeros and subnormal numbers among the largest of a row, or of a block."""
    x = np.array(normal(0, 64, 512)) * 10.0 ** np.arange(-40, 24)[:, None]
    x = x.astype(np.float32)
    x[3, 7], x[5, 9], x[6], x[7, 511], x[8, 0] = np.nan, -np.inf, 0, np.nan, np.inf
    for granularity in (jqx.per_axis(0), jqx.per_tensor(), jqx.per_block({0: 1, 1: 128})):
        for given in (x, x[10:]):
            groups = granularity.groups(given.shape)
            alone = jax.jit(lambda x, g=groups: g._in_steps(g.split(x)))(given)
            run = jax.jit(lambda x, g=groups: g.largest_magnitude(x))
            assert f"{package_cpu.NAME}_magnitudes" in run.lower(given).as_text()
            np.testing.assert_array_equal(run(given).ravel(), alone.ravel())
    mapped = jax.jit(
        jax.vmap(jax.vmap(lambda x: jqx.per_tensor().groups((16384,)).largest_magnitude(x)))
    )
    np.testing.assert_array_equal(
        mapped(x[None, 10:12].repeat(32, 2))[..., 0], np.abs(x[None, 10:12]).max(2)
    )


def test_ranges_of_rows_are_those_without_it():
    x = np.array(normal(0, 64, 7, 384))
    x[3, 2, 5], x[9], x[10, 1, 3], x[11, 1, 3], x[12] = np.nan, np.nan, np.inf, -np.inf, 3
    ways = (
        jqx.per_axis(0, 1),
        jqx.per_axis(0),
        jqx.per_tensor(),
        jqx.per_block({0: 1, 1: 1, 2: 64}),
    )
    for groups in (way.groups(x.shape) for way in ways):
        run = jax.jit(lambda x, g=groups: g.extremes(x))
        assert f"{package_cpu.NAME}_ranges" in run.lower(x).as_text()
        for found, plain in zip(run(x), groups._extremes_at_once(x), strict=True):
            np.testing.assert_array_equal(found, plain, strict=True)
    assert jqx.per_axis(0).groups(x.shape).extremes(x)[2][9, 0, 0] == 7 * 384
    tail = jqx.per_block({0: 1, 1: 1, 2: 100}, tail=True).groups(x.shape)
    assert package_cpu.NAME not in jax.jit(tail.extremes).lower(x).as_text()
    rows = lambda x: jqx.per_axis(0).groups(x.shape).extremes(x)[0].ravel()  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.vmap(rows))(x), np.fmin.reduce(x, 2, initial=np.inf))
    slopes = np.asarray(jax.grad(lambda x: rows(x).sum())(x[20:]))
    np.testing.assert_array_equal(slopes, x[20:] == x[20:].min((1, 2), keepdims=True))


def test_training_has_the_gradients_that_it_has_without_it(monkeypatch):
    f = lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"]  # noqa: E731
    w, x = {"a": normal(0, 256, 128), "b": normal(1, 128, 64)}, normal(2, 64, 256)
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(w, x)

    def gradients():
        loss = lambda w, x: (jqx.simulate(f, plan)(w, x) ** 2).sum()  # noqa: E731
        each = jax.vmap(jax.grad(jax.checkpoint(loss)), (None, 0))
        run = jax.jit(lambda w, x: (jax.grad(loss)(w, x), each(w, x[None])))
        return run.lower(w, x).as_text().count("_magnitudes"), run(w, x)

    (calls, found), _ = gradients(), jax.clear_caches()
    monkeypatch.setattr(package_cpu, "is_installed", lambda: False)
    (none, expected), _ = gradients(), jax.clear_caches()
    assert calls and not none
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_explain_tells_the_kernel():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = normal(0, 256, 192), normal(1, 2, 256)
    kernels = {"w4a16": "jqx_cpu_float_product", "w8a8_dynamic": "jqx_cpu_product"}
    for preset, name in kernels.items():
        plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x)
        q = jqx.quantize_params(w, plan, target="cpu")
        (found,) = jqx.lowering(jqx.convert(f, plan), q, x, target="cpu").contractions
        assert found.runs == name and found.dtypes == ("s8", "s8")
        assert "1 of 1 contractions read codes" in str(
            jqx.explain(f, q, x, plan=plan, target="cpu")
        )


def test_a_weight_on_several_devices_gets_a_layout_without_kernels():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    q = quantized(normal(0, 256, 128), "int4:group=32")
    parted = jax.device_put(q, NamedSharding(mesh, P(None, "d")))
    assert q.pack_for("cpu").layout.kernel == "cpu" and not parted.pack_for("cpu").layout.kernel


def test_devices_and_exports_have_the_plain_form():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = normal(0, 256, 128), normal(1, 8, 256)
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(w, x)
    p, g = jqx.pack_for(jqx.quantize_params(w, plan), "cpu"), jqx.convert(f, plan)
    one = jax.jit(g)(p, x)
    assert package_cpu.NAME in jax.jit(g).lower(p, x).as_text()
    exported = jax.export.export(jax.jit(g))(p, x)
    assert package_cpu.NAME not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(p, x), one)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    whole = jax.device_put(p, NamedSharding(mesh, P()))
    rows = jax.device_put(x, NamedSharding(mesh, P("d")))
    assert package_cpu.NAME not in jax.jit(g).lower(whole, rows).as_text()
    np.testing.assert_array_equal(jax.jit(g)(whole, rows), one)
    mapped = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")))
    assert package_cpu.NAME in mapped.lower(whole, rows).as_text()
    np.testing.assert_array_equal(mapped(whole, rows), one)


def codes_beside(x, x_scale, w, **options):
    return product_cpu(x, x_scale, None, w, None, None, **options)


def floats_beside(k, size, bits=4):
    given = jnp.zeros((1, 2, k)), jnp.zeros((1, 4, size), jnp.uint8), None, jnp.ones((1, 2, 4))
    return float_product_cpu(*given, None, bits=bits, is_signed=True)


ROWS, WEIGHT = jnp.zeros((1, 2, 3)), jnp.zeros((1, 4, 3), jnp.int8)
WRONG = {
    "weights are s8": lambda: codes_beside(ROWS, jnp.ones((1, 2)), WEIGHT[:, :, :2]),
    "rows are s8 or f32": lambda: codes_beside(ROWS.astype(jnp.int16), None, WEIGHT),
    "a scale is missing": lambda: codes_beside(ROWS, None, WEIGHT),
    "scales of rows": lambda: codes_beside(ROWS, jnp.ones((1, 5)), WEIGHT),
    "codes are in": lambda: codes_beside(ROWS, jnp.ones((1, 2)), WEIGHT, low=-300),
    "no kernel for such groups": lambda: floats_beside(96, 48),
    "weights are u8": lambda: floats_beside(64, 31),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_buffer_is_an_error_of_xla(text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jqx_cpu: .*{text}"):
        jax.block_until_ready(WRONG[text]())


def test_another_version_is_an_error(monkeypatch):
    other = types.SimpleNamespace(__version__="0.0.0")
    monkeypatch.setitem(sys.modules, "jqx_cpu", other)
    with pytest.raises(ImportError, match=r"different versions(.|\n)+0\.0\.0(.|\n)+fix:"):
        package_cpu.check_version.__wrapped__()


def test_its_version_is_that_of_jqx():
    assert package.__version__ == jqx.__version__
    assert package.kernels() in ("AMX", "AVX-512 BF16", "AVX-512 VNNI", "AVX2", "NEON", "plain C++")


def test_a_variable_names_the_kernels():
    code = "import jqx_cpu; print(jqx_cpu.kernels(), package_cpu.is_installed())"
    code = f"from jqx._src import package_cpu; {code}"

    def run(**variables):
        environment = {**os.environ, **variables}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert run(JQX_CPU_KERNELS="plain C++").stdout == "plain C++ True\n"
    assert "has no kernels 'SSE'" in run(JQX_CPU_KERNELS="SSE").stderr
