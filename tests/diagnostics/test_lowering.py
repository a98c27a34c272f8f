"""What compiled programs run, on CPU; what each site of a plan became; planted faults are seen."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx import lowering
from jqx._src.diagnostics import lowering as targets
from jqx._src.diagnostics.hlo import Program, bits
from jqx._src.diagnostics.lowering import contractions_of
from jqx.presets import w8a8, w8a8_dynamic, w8a16


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def codes(*dims, qtype=jnp.int8, granularity=None):
    """An abstract weight [K, N]."""
    spec = jqx.QSpec(qtype, granularity or jqx.per_axis(1))
    return jax.eval_shape(lambda w: jqx.QTensor.quantize(w, spec), shape(*dims))


def two_layers(params, x):
    """A layer, and one with the same shapes under another name."""
    return jax.nn.relu(x @ params["w"]) @ params["v"]


def looped(params, x):
    """Layers under a scan, and attention without weights."""
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    with jax.named_scope("scores"):
        scores = h @ h.T
    return scores @ h


def by_hand(w, x):
    """What not to do: the weight is dequantized before the product."""
    return x @ (w.values.astype(jnp.float32) * w.scale)


# A fusion inside of a fusion, a loop whose condition alone bounds it, and cycles.
FUSIONS = """
%read (p: s8[4,64,32], i: s32[]) -> bf16[64,32] {
  %p = s8[4,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = s8[1,64,32]{2,1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,64,32}
  %flat = s8[64,32]{1,0} bitcast(%one)
  ROOT %wide = bf16[64,32]{1,0} convert(%flat)
}
%product (x: bf16[16,64], w: s8[4,64,32], i: s32[]) -> f32[16,32] {
  %x.1 = bf16[16,64]{1,0} parameter(0)
  %w.1 = s8[4,64,32]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %fusion.1 = bf16[64,32]{1,0} fusion(%w.1, %i.1), kind=kLoop, calls=%read
  ROOT %conv = f32[16,32]{1,0} convolution(%x.1, %fusion.1), dim_labels=bf_io->bf, NAME
}
%body (arg: (s32[], bf16[16,64], s8[4,64,32])) -> (s32[], bf16[16,64], s8[4,64,32]) {
  %arg = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%arg), index=0
  %x.2 = bf16[16,64]{1,0} get-tuple-element(%arg), index=1
  %w.2 = s8[4,64,32]{2,1,0} get-tuple-element(%arg), index=2
  %y = f32[16,32]{1,0} fusion(%x.2, %w.2, %n), kind=kOutput, calls=%product, CYCLES
  %step = s32[] STEP
  %next = s32[] add(%n, %step)
  ROOT %out = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) tuple(%next, %x.2, %w.2)
}
%condition (arg: (s32[], bf16[16,64], s8[4,64,32])) -> pred[] {
  %bound = s32[] constant(7)
  %arg.1 = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %less = pred[] compare(%n.1, %bound), direction=LT
}
ENTRY %main (w: s8[4,64,32], scale: f32[4,1,32], x: bf16[16,64]) -> f32[16,32] {
  %w = s8[4,64,32]{2,1,0} parameter(0), metadata={op_name="w.values"}
  %scale = f32[4,1,32]{2,1,0} parameter(1), metadata={op_name="w.scale"}
  %x = bf16[16,64]{1,0} parameter(2), metadata={op_name="x"}
  %start = s32[] FIRST
  %first = s32[] copy(%start)
  %carry = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) tuple(%first, %x, %w)
  ROOT %loop = (s32[], bf16[16,64]{1,0}) while(%carry), condition=%condition, body=%body
}
"""
SITE = 'metadata={op_name="jit(f)/while/body/jqx[a/w:dot_general#1]/dot_general"}'
CONFIG = 'backend_config={"window_config":{"estimated_cycles":"123"}}'


def tpu(first="constant(3)", step="constant(1)"):
    text = FUSIONS.replace("CYCLES", CONFIG).replace("NAME", SITE)
    text = text.replace("FIRST", first).replace("STEP", step)
    (result,) = contractions_of(Program.parse(text), "tpu-v6e")
    return result


def test_a_fusion_in_a_fusion_is_read_through():
    result = tpu()
    assert result.site == "a/w:dot_general#1"
    assert result.operands == ("bf16[16,64]", "bf16[64,32]")
    assert result.reads == (("bf16",), ("s8",))
    assert (result.runs, result.widened, result.left) == ("output fusion", (), "")


def test_the_bound_of_a_counter_is_how_often_a_loop_runs():
    assert (tpu().times, tpu().cycles) == (7 - 3, 123)
    assert tpu("constant(9)").times == 0
    assert tpu(step="constant(3)").times == 2  # 3 and 6
    assert tpu("rng-get-and-update-state()").times is None
    assert tpu(step="rng-get-and-update-state()").times is None


BY_ELEMENTS = """
%sum (p: bf16[512], q: s8[512,64]) -> f32[64] {
  %p = bf16[512]{0} parameter(0)
  %q = s8[512,64]{1,0} parameter(1)
  %p.1 = f32[512]{0} convert(%p)
  %spread = f32[512,64]{1,0} broadcast(%p.1), dimensions={0}
  %wide = f32[512,64]{1,0} convert(%q)
  %times = f32[512,64]{1,0} multiply(%spread, %wide)NAME1
  %zero = f32[] constant(0)
  ROOT %total = f32[64]{0} reduce(%times, %zero), dimensions={0}, to_apply=%addNAME2
}
ENTRY %main (x: bf16[512], w: s8[512,64]) -> f32[64] {
  %x = bf16[512]{0} parameter(0), metadata={op_name="x"}
  %w = s8[512,64]{1,0} parameter(1), metadata={op_name="w"}
  ROOT %y = f32[64]{0} fusion(%x, %w), kind=kInput, calls=%sum
}
"""


SCALED = """
%scaled (p: f8e4m3fn[64,128], q: f8e4m3fn[128,32], s: f8e8m0fnu[64,4]) -> f32[64,32] {
  %p = f8e4m3fn[64,128]{1,0} parameter(0)
  %q = f8e4m3fn[128,32]{1,0} parameter(1)
  %s = f8e8m0fnu[64,4]{1,0} parameter(2)
  %t = f8e8m0fnu[4,32]{1,0} constant({...})
  ROOT %y.1 = f32[64,32]{1,0} scaled-dot(%p, %q, %s, %t), lhs_contracting_dims={1}
}
ENTRY %main (x: f8e4m3fn[64,128], w: f8e4m3fn[128,32], s: f8e8m0fnu[64,4]) -> f32[64,32] {
  %x = f8e4m3fn[64,128]{1,0} parameter(0), metadata={op_name="x"}
  %w = f8e4m3fn[128,32]{1,0} parameter(1), metadata={op_name="w"}
  %s.1 = f8e8m0fnu[64,4]{1,0} parameter(2), metadata={op_name="s"}
  ROOT %y = f32[64,32]{1,0} fusion(%x, %w, %s.1), kind=kCustom, calls=%scaled
}
"""


@pytest.mark.parametrize(("target", "left"), [("h200", "emulated: bf16 "), ("b200", "")])
def test_a_product_with_scales_of_blocks_is_emulated_where_units_have_none(target, left):
    (result,) = contractions_of(Program.parse(SCALED), target)
    assert result.dtypes == ("f8e4m3fn", "f8e4m3fn")
    assert result.left.startswith(left) and bool(result.left) == bool(left)


@pytest.mark.parametrize("named", ["NAME1", "NAME2"])
@pytest.mark.parametrize("target", ["h200", "tpu-v6e"])
def test_a_product_that_is_written_as_a_sum_of_elements_is_found_by_its_name(target, named):
    text = BY_ELEMENTS.replace(named, ', metadata={op_name="jit(f)/dot_general"}')
    text = text.replace("NAME1", "").replace("NAME2", "")
    (result,) = contractions_of(Program.parse(text), target)
    assert result.operands == ("f32[512]", "f32[512,64]")
    assert result.reads == (("bf16",), ("s8",))
    assert (result.runs, result.left) == (
        "input fusion, by elements",
        "elements are multiplied and summed",
    )


def test_another_sum_of_products_is_no_contraction():
    text = BY_ELEMENTS.replace("NAME1", "").replace(
        "NAME2", ', metadata={op_name="jit(f)/reduce_sum"}'
    )
    assert contractions_of(Program.parse(text), "tpu-v6e") == []


@pytest.mark.parametrize(
    "dtype, expected", [("s4", 4), ("bf16", 16), ("f8e4m3fn", 8), ("f4e2m1fn", 4), ("pred", 8)]
)
def test_the_bits_of_a_dtype(dtype, expected):
    assert bits(dtype) == expected


def only(low):
    (contraction,) = low.contractions
    return contraction


def test_a_quantized_product_multiplies_codes_and_copies_none():
    q = only(lowering(jqx.matmul, shape(8, 256), codes(256, 512)))
    assert q.operands == ("s8[24,256]", "s8[256,512]")  # three digits of x
    assert (q.reads, q.widened, q.left) == ((("s8",), ("s8",)), (), "")
    assert q.result == "s32[24,512]"


def looked_up(table, v, i):
    """Rows of a table in float: they are no copy of it."""
    return (table.values[i].astype(jnp.float32) * table.scale) @ v


def int32_dot(x, w):
    return jax.lax.dot(x, w, preferred_element_type=jnp.int32)


INT8_X, INT8_W = shape(32, 256, dtype=jnp.int8), shape(256, 512, dtype=jnp.int8)
UINT8_X = shape(32, 256, dtype=jnp.uint8)
COPY = "f32[256,512] of w.scale and w.values"
PRODUCTS = {
    "dequantized first": (by_hand, (codes(256, 512), shape(32, 256)), "f32", (COPY,)),
    "float": (jnp.matmul, (shape(32, 256), shape(256, 512)), "f32", ()),
    "a widened activation": (
        looked_up,
        (codes(300, 256), shape(256, 512), shape(32, dtype=jnp.int32)),
        "f32",
        (),
    ),
    "uint8 beside int8": (
        int32_dot,
        (UINT8_X, INT8_W),
        "s32",
        ("s32[32,256] of x", "s32[256,512] of w"),
    ),
    "int8 beside int8": (int32_dot, (INT8_X, INT8_W), "s8", ()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_copies_of_weights_are_named_and_there_are_no_others(name):
    f, args, dtype, widened = PRODUCTS[name]
    q = only(lowering(f, *args))
    assert (q.dtypes, q.widened) == ((dtype, dtype), widened)


def test_int4_codes_are_widened_on_cpu_unless_packed_for_it():
    """XLA on CPU multiplies no 4-bit integers; `jqx.pack_for` lays them out as int8 once."""
    plain = codes(256, 512, qtype=jnp.int4)
    tiles = lowering(jqx.matmul, shape(8, 256), plain).contractions
    assert {c.widened for c in tiles} == {("s8[32,512] of rhs.values",)}
    assert sum(c.times for c in tiles) == 8
    packed = only(lowering(jqx.matmul, shape(8, 256), jqx.pack_for(plain, "cpu")))
    assert (packed.dtypes, packed.widened) == (("s8", "s8"), ())


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


def test_a_lowering_prints_a_table_and_is_a_dict():
    low = lowering(by_hand, codes(256, 512), shape(32, 256))
    text = str(low)
    assert "f32[32,256] x f32[256,512] -> f32[32,512]" in text
    assert f"writes {COPY} first" in text
    assert text.splitlines()[-1].startswith("1 contractions on cpu; bytes: argument")
    data = json.loads(json.dumps(low.to_dict()))
    assert data["contractions"][0]["widened"] == [COPY]
    assert low.__rich__().row_count == 1


def test_an_unknown_target_names_those_that_are_known():
    with pytest.raises(ValueError, match="pass one of 'cpu', 'h200', 'b200', 'tpu-v5e'"):
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


@pytest.mark.parametrize("name", ["h200", "b200"])
def test_what_a_gpu_is_comes_with_the_package(name):
    config = targets.resources.files("jqx._src.diagnostics").joinpath(f"{name}.textproto")
    assert f'name: "NVIDIA {name.upper()}"' in config.read_text()


@pytest.mark.aot
@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e", "tpu7x", "h200", "b200"])
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


PARAMS = {"w": shape(256, 256), "v": shape(256, 256)}
X = shape(32, 256)


def executed_as(explanation):
    return {(site.path, site.op): site.executed_as for site in explanation.sites}


def test_each_site_is_found_though_all_have_one_shape():
    explanation = jqx.explain(two_layers, PARAMS, X, plan=w8a8_dynamic())
    assert [site.path for site in explanation.sites] == ["w", "v"]
    assert [site.executed_as for site in explanation.sites] == ["codes", "codes"]
    assert [len(site.contractions) for site in explanation.sites] == [1, 1]
    assert explanation.others == ()


def test_a_site_left_in_float_is_shown_with_its_reason():
    explanation = jqx.explain(two_layers, PARAMS, X, plan=w8a8_dynamic("v"))
    (w,), (v,) = explanation["w"], explanation["v"]
    assert (v.executed_as, v.is_quantized) == ("codes", True)
    assert (w.executed_as, w.is_quantized) == ("float", False)
    assert w.plan == "left in float: no rule matches"
    assert w.contractions[0].dtypes == ("f32", "f32")
    assert "left in float: no rule matches" in str(explanation)
    assert str(explanation).endswith("1 of 2 contractions read codes on cpu")
    assert json.loads(json.dumps(explanation.to_dict()))["sites"][1]["executed_as"] == "float"
    assert explanation.__rich__().row_count == 2


def test_sites_in_loops_and_contractions_without_weights_are_found():
    explanation = jqx.explain(looped, {"layers": shape(3, 256, 256)}, X, plan=w8a8_dynamic())
    assert executed_as(explanation) == {
        ("layers", "dot_general"): "codes",
        ("scores", "dot_general"): "float",
        ("", "dot_general"): "float",
    }
    assert explanation["layers"][0].contractions[0].times == 3
    assert explanation.others == ()
    assert [site.label for site in explanation.sites] == ["layers", "scores", "(dot_general~1)"]
    assert "gone" not in str(explanation)
    sites = (dataclasses.replace(explanation.sites[0], executed_as="gone"), *explanation.sites[1:])
    assert "\ngone: the program has no such product:" in str(
        dataclasses.replace(explanation, sites=sites)
    )


def test_what_has_neither_weight_nor_scope_is_called_by_its_operation_and_number():
    """In every table; a weight that is a whole argument is called so. Rules see empty paths."""
    attention = jqx.Rule(activation=jqx.QSpec("int8", dynamic=True))
    policy = w8a8_dynamic() + jqx.Policy([attention])
    f, w = lambda w, x: (x @ w) @ x.T @ x, jnp.eye(4)
    plan = jqx.make_plan(f, policy)(w, w)
    labels = ["(argument)", "(dot_general#1)", "(dot_general#2)"]
    assert [site.label for site in plan.sites] == labels
    assert [site.path for site in plan.sites] == [""] * 3
    assert [row.name for row in jqx.compare(f, plan)(w, w).sites] == labels
    assert [row.label for row in jqx.diagnostics.ranges(f, plan, {})(w, w).sites] == labels
    skipped = jqx.make_plan(f, w8a8_dynamic())(w, w)
    assert [row[0] for row in skipped.table().rows] == [
        "(argument)",
        "(dot_general~0)",
        "(dot_general~1)",
    ]
    three = lambda p, x: f(p["w"], x)  # noqa: E731
    costs = jqx.diagnostics.sensitivity(three, policy, estimate="one_at_a_time")({"w": w}, w)
    assert {row.label: row.path for row in costs.ranked} == {"w": "w", "(2 unnamed)": ""}
    assert {row.scheme for row in costs.ranked} == {
        "int8 per_axis(0) dynamic x int8 per_channel",
        "int8 per_tensor dynamic x int8 per_tensor dynamic",
    }


def test_a_fault_by_hand_is_no_site_and_is_listed_beside():
    """One weight goes through a plan; the other is dequantized by the user, before the product."""

    def f(params, x):
        return by_hand(params["own"], jax.nn.relu(x @ params["w"]))

    params = {"w": shape(256, 256), "own": codes(256, 256)}
    policy = w8a8_dynamic("w")
    plan = jqx.make_plan(lambda p, x: jax.nn.relu(x @ p["w"]), policy)({"w": params["w"]}, X)
    converted = jqx.convert(lambda p, x: jax.nn.relu(x @ p["w"]), plan)
    q = jqx.quantize_params({"w": params["w"]}, plan)
    explanation = jqx.explain(lambda q, own, x: by_hand(own, converted(q, x)), q, params["own"], X)
    assert executed_as(explanation) == {("w", "dot_general"): "codes"}
    (other,) = explanation.others
    assert other.widened == ("f32[256,256] of own.scale and own.values",)


def test_a_weight_whose_codes_are_converted_before_the_product_is_widened_first():
    explanation = jqx.explain(two_layers, PARAMS, shape(8, 256), plan=w8a16())
    assert [site.executed_as for site in explanation.sites] == [
        "codes",
        "codes",
    ]  # digits of x, on CPU
    blocks = jqx.explain(two_layers, PARAMS, X, plan=jqx.presets.w4a16())
    assert [site.executed_as for site in blocks.sites] == ["widened first", "widened first"]
    copies = {copy.partition(" ")[0] for c in blocks["w"][0].contractions for copy in c.widened}
    assert copies == {"f32[32,256]"}  # a tile at a time


@pytest.mark.parametrize("preset", ["fp8", "mxfp8", "nf4", "w4a16"])
def test_a_product_of_one_row_is_found_though_xla_on_cpu_drops_its_name(preset):
    plan = getattr(jqx.presets, preset)()
    f = lambda params, x: x @ params["w"]  # noqa: E731
    explanation = jqx.explain(f, {"w": shape(512, 1024)}, shape(1, 512), plan=plan)
    assert executed_as(explanation) == {("w", "dot_general"): "widened first"}
    assert explanation.others == ()


def test_a_lookup_multiplies_nothing():
    def f(params, i):
        return params["table"][i] @ params["w"]

    params = {"table": shape(300, 256), "w": shape(256, 256)}
    explanation = jqx.explain(f, params, shape(32, dtype=jnp.int32), plan=w8a8_dynamic())
    assert executed_as(explanation) == {
        ("table", "gather"): "lookup",
        ("w", "dot_general"): "codes",
    }


def test_a_plan_and_quantized_parameters_are_taken_as_they_are():
    plan = jqx.make_plan(two_layers, w8a8())(PARAMS, X)
    key = jax.random.key(0)
    params = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), PARAMS)
    x = jax.random.normal(key, X.shape)
    affines = jqx.affines(plan, jqx.calibrate(two_layers, plan)(params, x)[1])
    q = jqx.quantize_params(params, plan)
    explanation = jqx.explain(two_layers, q, x, plan=plan, affines=affines)
    assert [site.is_quantized for site in explanation.sites] == [True, True]


def test_what_is_no_plan_and_scales_without_one_are_refused():
    with pytest.raises(ValueError, match="`affines` has no use without a plan"):
        jqx.explain(two_layers, PARAMS, X, affines={})
    with pytest.raises(TypeError, match="`plan` is not a Plan or a Policy"):
        jqx.explain(two_layers, PARAMS, X, plan="w8a8")


@pytest.mark.parametrize("path", ["a/b", 'quo"te', "br]acket", "back\\slash", "per%cent"])
def test_any_path_is_found_again(path):
    f = lambda params, x: x @ params[path]  # noqa: E731
    explanation = jqx.explain(f, {path: shape(256, 256)}, X, plan=w8a8_dynamic())
    assert executed_as(explanation) == {(path, "dot_general"): "codes"}


def test_the_compilation_cache_does_not_mix_up_names():
    """Functions that differ in the names of their weights alone are one to JAX's cache, which the
    tests use.
    """
    assert jax.config.jax_compilation_cache_dir
    for path in ("one", "other", "one"):
        f = lambda params, x, path=path: jnp.tanh(x @ params[path])  # noqa: E731
        explanation = jqx.explain(f, {path: shape(256, 192)}, X, plan=w8a8_dynamic())
        assert executed_as(explanation) == {(path, "dot_general"): "codes"}


def test_weights_in_the_plain_layout_are_named_with_what_lays_them_out():
    f, params = lambda p, x: x @ p["w"] + p["b"], {"w": jnp.ones((64, 32)), "b": jnp.ones((1, 32))}
    plan = jqx.make_plan(f, jqx.presets.w4a16())(params, jnp.ones((2, 64)))
    plain = jqx.explain(f, params, jnp.ones((2, 64)), plan=plan)
    assert plain.plain == ("w",) and plain.to_dict()["plain"] == ["w"]
    assert "quantize_params" in str(plain) and "pack_for" in str(plain)
    packed = jqx.quantize_params(params, plan, target="cpu")
    explanation = jqx.explain(f, packed, jnp.ones((2, 64)), plan=plan)
    assert explanation.plain == () and "pack_for" not in str(explanation)


def test_weights_that_were_quantized_before_the_plan_say_so():
    def f(params, x):
        return x @ params["params"]["up"]["w"]

    spec = jqx.QSpec("int4", jqx.per_block({0: 32, 1: 1}), symmetric=False)
    w = jqx.QTensor.quantize(jnp.ones((64, 32)), spec)
    explanation = jqx.explain(f, {"params": {"up": {"w": w}}}, shape(8, 64), plan=jqx.Policy([]))
    (site,) = explanation.sites
    assert site.plan == "quantized already: int4 per_block({0: 32, 1: 1}) asymmetric"
    assert "of w.scale and w.values" in str(explanation) and "args[0]" not in str(explanation)
