"""jqx-cpu as a package: versions, its variable, exports, devices, what is told of its kernels, and
statistics of rows. Skipped where it is not installed.
"""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src import package_cpu

from ..arrays import normal
from .test_convolutions import convolve, pair

package = pytest.importorskip("jqx_cpu")


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


def test_scales_of_rows_are_those_without_it():
    """NaN, infinities, zeros and subnormal numbers among the largest of a row, or of a block."""
    x = np.array(normal(0, 64, 512)) * 10.0 ** np.arange(-40, 24)[:, None]
    x = x.astype(np.float32)
    x[3, 7], x[5, 9], x[6], x[7, 511], x[8, 0] = np.nan, -np.inf, 0, np.nan, np.inf
    for granularity in (jqx.per_axis(0), jqx.per_tensor(), jqx.per_block({0: 1, 1: 128})):
        for rows in (x, x[10:]):
            groups = granularity.groups(rows.shape)
            alone = jax.jit(lambda x, g=groups: g._in_steps(g.split(x)))(rows)
            run = jax.jit(lambda x, g=groups: g.largest_magnitude(x))
            assert f"{package_cpu.NAME}_magnitudes" in run.lower(rows).as_text()
            np.testing.assert_array_equal(run(rows).ravel(), alone.ravel())
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
        for extremes, plain in zip(run(x), groups._extremes_at_once(x), strict=True):
            np.testing.assert_array_equal(extremes, plain, strict=True)
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

    (calls, gradients_of_kernels), _ = gradients(), jax.clear_caches()
    monkeypatch.setattr(package_cpu, "is_installed", lambda: False)
    (none, expected), _ = gradients(), jax.clear_caches()
    assert calls and not none
    for a, b in zip(*map(jax.tree.leaves, (gradients_of_kernels, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def product(w, x):
    return x @ w


@pytest.mark.parametrize(
    "policy, kernel, dtype, reads",
    [
        (jqx.presets.w4a16(), "float_product", "s8", "u8"),
        (jqx.presets.w8a8_dynamic(), "product", "s8", "s8"),
        (jqx.Policy({".*": "float8_e4m3fn"}), "decoded_product", "f32", "f8e4m3fn"),
        (jqx.Policy({".*": "nf4:group=64"}), "decoded_product", "f32", "u8"),
    ],
    ids=["w4a16", "w8a8_dynamic", "float8", "nf4"],
)
def test_lowering_and_explain_tell_the_kernel(policy, kernel, dtype, reads):
    w, x = normal(0, 256, 192), normal(1, 2, 256)
    plan = jqx.make_plan(product, policy)(w, x)
    q = jqx.quantize_params(w, plan, target="cpu")
    (contraction,) = jqx.lowering(jqx.convert(product, plan), q, x, target="cpu").contractions
    assert contraction.runs == f"jqx_cpu_{kernel}" and contraction.dtypes == (dtype, dtype)
    assert contraction.reads[1] == (reads,)
    text = str(jqx.explain(product, q, x, plan=plan, target="cpu"))
    assert "1 of 1 contractions read codes" in text


# Programs: a function, its operands, how each is partitioned, and the result in shard_map.


def of_a_product():
    w, x = normal(0, 256, 128), normal(1, 8, 256)
    plan = jqx.make_plan(product, jqx.presets.w8a8_dynamic())(w, x)
    q = jqx.pack_for(jqx.quantize_params(w, plan), "cpu")
    return jqx.convert(product, plan), (q, x), (P(), P("d")), P("d")


def of_a_convolution():
    return convolve, pair(images=4), (P("d"), P()), P("d")


def of_batches():
    spec = jqx.QSpec(jnp.int8, jqx.per_tensor())
    operands = [jqx.QTensor.quantize(normal(seed, 2, 70, 6, 32), spec) for seed in (0, 2)]
    scores = lambda q, k: jqx.einsum("btnh,bsnh->bnts", q, k)  # noqa: E731
    return scores, operands, (None, P(None, None, "d")), None


def of_rows_in_groups():
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0, 2))
    q = jqx.pack_for(jqx.QTensor.quantize(normal(1, 5, 128, 130), spec), "cpu")
    return jqx.ragged_dot, (normal(0, 40, 128), q, jnp.array([8] * 5)), (P("d"), None, None), None


def put(x, spec, mesh):
    """Partitions an operand, but for a scale that is one number."""
    if spec is None:
        return x
    return jax.tree.map(
        lambda y: jax.device_put(y, NamedSharding(mesh, spec if y.size > 1 else P())), x
    )


@pytest.mark.parametrize("case", [of_a_product, of_a_convolution, of_batches, of_rows_in_groups])
def test_devices_and_exports_have_the_plain_form(case):
    f, operands, specs, of_result = case()
    run, mesh = jax.jit(f), mesh_of(2 if of_result is None else 4)
    one = run(*operands)
    assert package_cpu.NAME in run.lower(*operands).as_text()
    exported = jax.export.export(run)(*operands)
    assert package_cpu.NAME not in exported.mlir_module()
    parted = [put(x, spec, mesh) for x, spec in zip(operands, specs, strict=True)]
    assert package_cpu.NAME not in run.lower(*parted).as_text()
    if case is not of_rows_in_groups:  # which are summed in another order
        np.testing.assert_array_equal(exported.call(*operands), one)
        np.testing.assert_array_equal(run(*parted), one)
    if of_result is not None:
        mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=of_result))
        assert package_cpu.NAME in mapped.lower(*parted).as_text()
        np.testing.assert_array_equal(mapped(*parted), one)


def mesh_of(count):
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,), devices=devices)


def test_a_weight_on_several_devices_gets_a_layout_without_kernels():
    spec = jqx.QSpec("int4", jqx.per_block({0: 32, 1: 1}))
    q = jqx.QTensor.quantize(normal(0, 256, 128), spec)
    parted = jax.device_put(q, NamedSharding(mesh_of(4), P(None, "d")))
    assert q.pack_for("cpu").layout.kernel == "cpu" and not parted.pack_for("cpu").layout.kernel


READER = """
import sys
import jax
import numpy as np
from jax import export
{imports}
f = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
np.save(sys.argv[2], f.call(np.load(sys.argv[2])))
assert "jqx" not in sys.modules
"""


def export_product(**options):
    w = jqx.QTensor.quantize(normal(0, 256, 192), jqx.QSpec("int8", jqx.per_axis(1)))
    w = jqx.pack_for(w, "cpu")
    f = jax.jit(lambda x: jqx.matmul(x, w))
    x = normal(1, 3, 256)
    return export.export(f, **options)(x), x, f(x)


def test_an_exported_function_calls_kernels_where_it_is_told_to():
    with jqx.kernels_in_exports() as checks:
        with_kernels, x, y = export_product(disabled_checks=checks)
    assert "jqx_cpu_float_product" in with_kernels.mlir_module()
    np.testing.assert_array_equal(with_kernels.call(x), y)
    assert "jqx_cpu" not in export_product()[0].mlir_module()


def test_one_that_is_read_without_the_package_says_what_is_missing(tmp_path):
    pytest.importorskip("flatbuffers")
    with jqx.kernels_in_exports() as checks:
        with_kernels, x, y = export_product(disabled_checks=checks)
    (tmp_path / "f").write_bytes(with_kernels.serialize())

    def read(imports):
        np.save(tmp_path / "x.npy", x)
        command = [sys.executable, "-c", READER.format(imports=imports)]
        command += [str(tmp_path / "f"), str(tmp_path / "x.npy")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "No FFI handler registered for jqx_cpu_float_product" in read("").stderr
    done = read("import jqx_cpu")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), y)


def test_for_several_platforms_the_cpu_alone_calls_kernels():
    with jqx.kernels_in_exports() as checks:
        both, x, y = export_product(disabled_checks=checks, platforms=("cpu", "tpu"))
    assert both.mlir_module().count("@jqx_cpu_float_product") == 1
    np.testing.assert_array_equal(both.call(x), y)


def test_without_the_package_they_are_refused(monkeypatch):
    monkeypatch.setattr(package_cpu, "is_installed", lambda: False)
    with pytest.raises(ImportError, match=r"jqx-cpu is not installed(.|\n)+fix:"):
        jqx.kernels_in_exports().__enter__()
