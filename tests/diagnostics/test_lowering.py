"""What compiled programs run, on CPU; planted faults are seen."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx._src.diagnostics import lowering as targets
from jqx.diagnostics import lowering

from .programs import by_hand, codes, looped, shape


def only(low):
    (contraction,) = low.contractions
    return contraction


def test_a_quantized_product_multiplies_codes_and_copies_none():
    q = only(lowering(jqx.matmul, shape(8, 256), codes(256, 512)))
    assert q.operands == ("s8[24,256]", "s8[256,512]")  # three digits of x
    assert (q.reads, q.widened, q.left) == ((("s8",), ("s8",)), (), "")
    assert q.result == "s32[24,512]"


def test_a_weight_that_is_dequantized_first_is_named_with_its_copy():
    q = only(lowering(by_hand, codes(256, 512), shape(32, 256)))
    assert q.dtypes == ("f32", "f32")
    assert q.widened == ("f32[256,512] of w.scale and w.values",)


def test_a_float_product_copies_nothing():
    q = only(lowering(jnp.matmul, shape(32, 256), shape(256, 512)))
    assert (q.dtypes, q.widened) == (("f32", "f32"), ())


def test_a_widened_activation_is_no_weight():
    """A table that is looked up gives rows in float: they are no copy of the table."""

    def f(table, v, i):
        return (table.values[i].astype(jnp.float32) * table.scale) @ v

    q = only(lowering(f, codes(300, 256), shape(256, 512), shape(32, dtype=jnp.int32)))
    assert q.widened == ()


def test_int4_codes_are_widened_on_cpu_unless_packed_for_it():
    """XLA on CPU multiplies no 4-bit integers; `jqx.pack_for` lays them out as int8 once."""
    plain = codes(256, 512, qtype=jnp.int4)
    tiles = lowering(jqx.matmul, shape(8, 256), plain).contractions
    assert {c.widened for c in tiles} == {("s8[32,512] of rhs.values",)}
    assert sum(c.times for c in tiles) == 8
    packed = only(lowering(jqx.matmul, shape(8, 256), jqx.pack_for(plain, "cpu")))
    assert (packed.dtypes, packed.widened) == (("s8", "s8"), ())


def test_uint8_beside_int8_is_widened_to_32_bits_on_cpu():
    def f(x, w):
        return jax.lax.dot(x, w, preferred_element_type=jnp.int32)

    mixed = only(lowering(f, shape(32, 256, dtype=jnp.uint8), shape(256, 512, dtype=jnp.int8)))
    assert mixed.dtypes == ("s32", "s32")
    assert mixed.widened == ("s32[32,256] of x", "s32[256,512] of w")
    alike = only(lowering(f, shape(32, 256, dtype=jnp.int8), shape(256, 512, dtype=jnp.int8)))
    assert (alike.dtypes, alike.widened) == (("s8", "s8"), ())


def test_a_loop_counts_its_steps_and_a_condition_leaves_them_unknown():
    params = {"layers": shape(5, 64, 64)}
    low = lowering(looped, params, shape(8, 64))
    assert [c.times for c in low.contractions] == [5, 1, 1]

    def until(w, x):
        return jax.lax.while_loop(lambda x: x.sum() < 9.0, lambda x: x @ w, x)

    assert only(lowering(until, shape(64, 64), shape(8, 64))).times is None


def test_both_branches_of_a_cond_are_read():
    def f(w, x, flag):
        return jax.lax.cond(flag, lambda x: x @ w, lambda x: (x @ w) @ w, x)

    low = lowering(f, shape(64, 64), shape(8, 64), shape(dtype=jnp.bool_))
    assert [c.times for c in low.contractions] == [1, 1, 1]


def test_a_copy_made_outside_of_a_loop_counts_inside():
    def f(w, x):
        wide = jax.lax.optimization_barrier(w.values.astype(jnp.float32) * w.scale)
        return jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ wide), x)

    q = only(lowering(f, codes(256, 256), shape(32, 256)))
    assert q.times == 4
    assert q.widened == ("f32[256,256] of w.scale and w.values",)


def test_memory_is_that_of_the_executable():
    low = lowering(jnp.matmul, shape(32, 256), shape(256, 512))
    assert low.memory["argument"] == 4 * (32 * 256 + 256 * 512)
    assert low.memory["output"] == 4 * 32 * 512
    assert low.cycles is None


def test_a_jitted_function_keeps_what_jit_was_told():
    f = jax.jit(lambda x, n: x * n, static_argnums=1, donate_argnums=0)
    assert lowering(f, shape(64, 64), 3).memory["alias"] == 4 * 64 * 64


def test_leaves_that_are_no_arrays_are_static():
    low = lowering(lambda p: p["act"](p["w"] @ p["w"]), {"w": shape(64, 64), "act": jnp.tanh})
    assert only(low).dtypes == ("f32", "f32")


def test_it_prints_a_table_and_is_a_dict():
    low = lowering(by_hand, codes(256, 512), shape(32, 256))
    text = str(low)
    assert "f32[32,256] x f32[256,512] -> f32[32,512]" in text
    assert "writes f32[256,512] of w.scale and w.values first" in text
    assert text.splitlines()[-1].startswith("1 contractions on cpu; bytes: argument")
    data = json.loads(json.dumps(low.to_dict()))
    assert data["contractions"][0]["widened"] == ["f32[256,512] of w.scale and w.values"]
    assert low.__rich__().row_count == 1


def test_an_unknown_target_names_those_that_are_known():
    with pytest.raises(ValueError, match="pass one of 'cpu', 'h200', 'tpu-v5e'"):
        lowering(jnp.matmul, shape(2, 2), shape(2, 2), target="gpu")


@pytest.mark.parametrize(("target", "extra"), [("tpu-v6e", "aot-tpu"), ("h200", "aot-gpu")])
def test_a_missing_compiler_names_its_extra(monkeypatch, target, extra):
    monkeypatch.setattr(targets, "_is_installed", lambda module: False)
    with pytest.raises(ImportError, match=rf'fix:      pip install "jqx\[{extra}\]"'):
        lowering(jnp.matmul, shape(2, 2), shape(2, 2), target=target)


def test_variables_of_the_environment_are_set_where_absent_and_removed(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    with targets._present(targets.TARGETS["tpu-v5e"].environment):
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
        assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


def test_what_the_h200_is_comes_with_the_package():
    config = targets.resources.files("jqx._src.diagnostics").joinpath("h200.textproto")
    assert 'name: "NVIDIA H200"' in config.read_text()


@pytest.mark.aot
@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e", "tpu7x", "h200"])
def test_the_devices_of_the_process_stay_what_they_are(target):
    if not any(map(targets._is_installed, targets.TARGETS[target].modules)):
        pytest.skip(f"the extra {targets.TARGETS[target].extra} is not installed")
    code = f"""
import os, jax, jax.numpy as jnp, jqx
before = dict(os.environ)
low = jqx.lowering(jnp.matmul, jnp.ones((64, 128)), jnp.ones((128, 128)), target={target!r})
assert [d.platform for d in jax.devices()] == ["cpu"], jax.devices()
assert (jnp.ones(3) + 1).devices() == {{jax.devices()[0]}}
assert dict(os.environ) == before
assert len(low.contractions) == 1
"""
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
