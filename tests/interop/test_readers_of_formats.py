"""Checkpoints as the readers of each format take them: worked examples, precedence, defaults, old
names, parts.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.interop import write

from ..oracles.refusals import assert_error
from .files import file_of, write_file, write_folder
from .layers import (
    AWQ,
    FP8,
    GPTQ,
    MLX,
    OSS,
    awq,
    compressed,
    compressed_config,
    experts,
    gptq,
    packed,
    within,
)
from .trees import assert_same_weight, floats, integers, tree_of


def load(folder, tensors, config, **options):
    """Loads a layer that is written with a config."""
    return jqx.load(write_folder(folder, tensors, config), **options)["m.weight"]


def load_gptq(folder, tensors, **fields):
    return load(folder, tensors, within({**GPTQ, **fields}))


@pytest.mark.parametrize(("form", "word"), [("gptq", "77777777"), ("gptq_v2", "88888888")])
def test_gptq_of_both_versions_stores_the_same_codes(tmp_path, form, word):
    tensors = gptq(word)
    assert tensors["m.qweight"][0, 0] == 0x76543210
    q = load_gptq(tmp_path, tensors, checkpoint_format=form)
    assert q.shape == (32, 32) and q.zero_point is None
    np.testing.assert_array_equal(q.codes[5], np.arange(32) % 16 - 8)
    asymmetric = load_gptq(tmp_path, tensors, checkpoint_format=form, sym=False)
    assert not asymmetric.zero_point.any()
    np.testing.assert_array_equal(asymmetric.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    ("form", "word", "words"),
    [
        ("gptq", "88888888", "zero points of 'gptq_v2', which the config calls 'gptq'"),
        ("gptq_v2", "77777777", "zero points of 'gptq', which the config calls 'gptq_v2'"),
        ("gptq", "12345678", "has several zero points"),
    ],
)
def test_symmetric_gptq_with_other_zero_points_is_refused(tmp_path, form, word, words):
    with pytest.raises(ValueError, match=words):
        load_gptq(tmp_path, gptq(word), checkpoint_format=form)
    q = load_gptq(tmp_path, gptq(word), checkpoint_format=form, sym=False)  # the config decides
    assert q.zero_point.any()


def test_zero_points_of_the_first_version_wrap_around(tmp_path):
    q = load_gptq(tmp_path, gptq("ffffffff"), sym=False)
    np.testing.assert_array_equal(q.zero_point, np.full((32, 1), -8))


def test_three_bits_lie_across_words(tmp_path):
    tensors = gptq(columns=64, bits=3, zeros=np.zeros((1, 3), np.int32))
    q = load_gptq(tmp_path, tensors, bits=3, sym=False, group_size=-1, checkpoint_format="gptq_v2")
    np.testing.assert_array_equal(q.codes[0], np.arange(64) % 8 - 4)
    np.testing.assert_array_equal(q.zero_point, np.full((32, 1), -4))


def test_layers_may_be_quantized_otherwise_or_not_at_all(tmp_path):
    eight = gptq(columns=32, bits=8, zeros=np.full((1, 8), 0x7F7F7F7F, np.int32))
    tensors = {**gptq(), **{name.replace("m.", "down."): x for name, x in eight.items()}}
    tensors["head.weight"] = np.ones((2, 2), np.float16)
    dynamic = {"-:head": {}, r"+:.*down": {"bits": 8}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    loaded = jqx.load(str(write_folder(tmp_path, tensors, {"quantization_config": config})))
    assert loaded["down.weight"].qtype == jnp.int8 and loaded["m.weight"].qtype == jnp.int4


def test_awq_interleaves_columns(tmp_path):
    q = load(tmp_path, awq(word=0x75316420), within(AWQ))
    np.testing.assert_array_equal(q.codes[:, 3], np.arange(8) - 8)
    assert not q.dequantize().any()


def test_scales_of_stacked_experts_lie_along_the_axis_that_they_have(tmp_path):
    codes = np.arange(2 * 4 * 4).reshape(2, 4, 4).astype(jnp.float8_e4m3fn)
    scale = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    for shape in [(2, 1, 4), (2, 4, 1)]:
        tensors = {"experts.up": codes, "experts.up_scale": scale.reshape(shape)}
        q = jqx.load(str(write_folder(tmp_path, tensors, config)))["experts.up"]
        wanted = codes.astype(np.float32) * scale.reshape(shape)
        np.testing.assert_array_equal(q.dequantize(), wanted)
    tensors = {"experts.up": codes, "experts.up_scale": scale[:, :3].reshape(2, 3, 1)}
    assert_error(lambda: jqx.load(str(write_folder(tmp_path, tensors, config))), "of blocks")


def test_fbgemm_has_a_scale_for_each_row(tmp_path):
    q = floats(jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0)))
    tensors = {
        "m.weight": np.asarray(q.values),
        "m.weight_scale": np.asarray(q.scale),
        "m.input_scale_ub": np.full(1, 1200, np.float32),
    }
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}, "torch_dtype": "bfloat16"}
    loaded = jqx.load(str(write_folder(tmp_path, tensors, config)))
    assert loaded["m.input_scale_ub"] == 1200 and loaded["m.weight"].dtype == jnp.bfloat16
    assert_same_weight(loaded["m.weight"], q.astype(jnp.bfloat16), "m")
    config["quantization_config"] |= {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match=r"not .* of blocks"):
        jqx.load(str(write_folder(tmp_path, tensors, config)))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_experts_of_gpt_oss_are_read(tmp_path):
    tensors = experts()
    with jqx.interop.read(write_folder(tmp_path, tensors, OSS)) as archive:
        assert archive.format == "mxfp4"
        assert {*archive.paths} == {"m.experts.up_proj", "m.experts.up_proj_bias"}
        q = archive.read("m.experts.up_proj")
    assert q.shape == (2, 6, 96) and q.nbytes == 2 * 6 * (48 + 3)
    blocks = tensors["m.experts.up_proj_blocks"]
    want = FP4[np.stack([blocks & 15, blocks >> 4], -1)].reshape(2, 6, 3, 32)
    powers = np.ldexp(np.float32(1), tensors["m.experts.up_proj_scales"].astype(int) - 127)
    np.testing.assert_array_equal(q.dequantize(), (want * powers[..., None]).reshape(q.shape))


def test_columns_in_the_order_of_their_groups(tmp_path):
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(-8, 8, (4, 96)), rng.random((4, 3)).astype(np.float32)
    index = rng.permutation(np.arange(96) // 32).astype(np.int32)
    tensors = {**compressed(codes, scale=scale), "m.weight_g_idx": index}
    folder = write_folder(tmp_path, tensors, compressed_config(actorder="group"))
    q = jqx.load(str(folder))["m.weight"]
    np.testing.assert_array_equal(q.dequantize(), codes.astype(np.float32) * scale[:, index])
    unused = {**tensors, "m.weight_g_idx": np.full(96, -1, np.int32)}
    q = jqx.load(str(write_folder(tmp_path, unused, compressed_config())))["m.weight"]
    np.testing.assert_array_equal(q.codes, codes)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_of_old_releases_hold_whole_codes(tmp_path, bits):
    each = 32 // bits
    codes = np.random.default_rng(bits).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (2, 96))
    padded = np.zeros((2, -(-96 // each) * each), np.uint64)
    padded[:, :96] = codes + 2 ** (bits - 1)
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(bits)
    old = (padded.reshape(2, -1, each) << shifts).sum(-1, dtype=np.uint64).astype(np.uint32)
    tensors = {**compressed(codes, bits), "m.weight_packed": old.view(np.int32)}
    folder = write_folder(tmp_path, tensors, compressed_config(num_bits=bits))
    np.testing.assert_array_equal(jqx.load(str(folder))["m.weight"].codes, codes)


def test_experts_are_stacked_and_scales_of_caches_are_leaves(tmp_path):
    codes = np.random.default_rng(0).integers(-8, 8, (2, 4, 64))
    tensors = {
        "m.weight_packed": np.stack([packed(part) for part in codes]),
        "m.weight_scale": np.ones((2, 4, 2), np.float16),
        "m.weight_shape": np.array([2, 4, 64], np.int64),
        "attn.k_scale": np.full(1, 0.5, np.float32),
    }
    loaded = jqx.load(str(write_folder(tmp_path, tensors, compressed_config())))
    np.testing.assert_array_equal(loaded["m.weight"].codes, codes)
    assert loaded["attn.k_scale"] == 0.5


# Precedence, defaults, and old names.


ASYMMETRIC = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
OF_GPTQ = {"quant_method": "gptq", **ASYMMETRIC}


def first_zero(folder, **options):
    """The first zero point of the layer; which version of OF_GPTQ is read decides it."""
    return int(jqx.load(folder, **options)["m.weight"].zero_point[0, 0])


VERSIONS = {
    "none": ({}, -8 + 6),
    "checkpoint_format": ({"checkpoint_format": "gptq_v2"}, -8 + 5),
    "format": ({"format": "gptq_v2"}, -8 + 5),
    "capitals": ({"format": "GPTQ_V2"}, -8 + 5),
    "both": ({"format": "gptq", "checkpoint_format": "gptq"}, -8 + 6),
    "a null": ({"format": "gptq_v2", "checkpoint_format": None}, -8 + 5),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_the_version_of_gptq_has_two_names(tmp_path, case):
    fields, zero = VERSIONS[case]
    folder = write_folder(tmp_path, gptq("55555555"), within({**OF_GPTQ, **fields}))
    assert first_zero(folder) == zero


ALONE = {
    "of AutoGPTQ": (gptq("55555555"), ASYMMETRIC),
    "of GPTQModel": (gptq("55555555"), {**ASYMMETRIC, "method": "gptq", "format": "gptq"}),
    "with its method": (gptq("55555555"), OF_GPTQ),
    "of AWQ": (
        awq(128, 0x55555555),
        {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"},
    ),
    "of MLX": (MLX, {"group_size": 64, "bits": 4}),
    "of fp8": (FP8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_quantization_config_may_be_passed_by_itself(tmp_path, case):
    tensors, config = ALONE[case]
    write_file(tmp_path / "f.safetensors", tensors)
    with jqx.interop.read(tmp_path / "f.safetensors", config=config) as archive:
        assert archive.paths == ("m.weight",)
        assert isinstance(archive.read("m.weight"), jqx.QTensor)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"bits": 4}, {"text_config": {}}])
@pytest.mark.parametrize("case", ["of AutoGPTQ", "of MLX", "of fp8"])
def test_a_config_that_says_nothing_of_codes_is_refused(tmp_path, case, config):
    path = tmp_path / "f.safetensors"
    write_file(path, ALONE[case][0])
    assert_error(lambda: jqx.load(path, config=config), "a config without quantization_config")
    assert {*jqx.load(path, config={})} == {*ALONE[case][0]}


OLD_NAMES = {"quantize_config.json": "of AutoGPTQ", "quant_config.json": "of AWQ"}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_folders_have_the_quantization_config_in_a_file_of_its_own(tmp_path, name):
    tensors, config = ALONE[OLD_NAMES[name]]
    for model_config in (None, {"model_type": "a"}, {"quantization_config": None}):
        write_folder(tmp_path, tensors, model_config)
        (tmp_path / name).write_text(json.dumps(config))
        with jqx.interop.read(tmp_path) as archive:
            assert archive.format == OLD_NAMES[name][3:].lower().removeprefix("auto")
            assert archive.config.get("model_type") == (model_config or {}).get("model_type")
            assert isinstance(archive.read("m.weight"), jqx.QTensor)


MISSING = {
    "gptq, no groups": (gptq("77777777"), {**OF_GPTQ, "sym": True}, "group_size"),
    "gptq, one group": (gptq("77777777"), {**OF_GPTQ, "group_size": -1}, "group_size"),
    "gptq, symmetric": (gptq("77777777"), {**OF_GPTQ, "sym": True}, "sym"),
    "gptq, order": (gptq("77777777"), OF_GPTQ, "desc_act"),
    "awq, groups": (
        awq(128, 0x55555555),
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        "group_size",
    ),
    "awq, bits": (
        awq(128, 0x55555555),
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        "bits",
    ),
    "fp8": (FP8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_block_size"),
    "fp8, format": (FP8, {"quant_method": "fp8", "fmt": "float8_e4m3fn"}, "fmt"),
}


@pytest.mark.parametrize("case", MISSING)
def test_fields_that_are_missing_have_the_defaults_of_readers(tmp_path, case):
    tensors, config, field = MISSING[case]
    expected = jqx.load(write_folder(tmp_path, tensors, within(config)))["m.weight"]
    fields = {key: x for key, x in config.items() if key != field}
    weight = jqx.load(write_folder(tmp_path, tensors, within(fields)))["m.weight"]
    np.testing.assert_array_equal(weight.dequantize(), expected.dequantize())


def test_groups_that_no_config_speaks_of_are_of_128(tmp_path):
    tensors = gptq("77777777", columns=256, groups=2)
    config = {"quant_method": "gptq", "bits": 4}
    q = jqx.load(write_folder(tmp_path, tensors, within(config)))["m.weight"]
    assert q.groups.sizes == (1, 128)
    assert_error(
        lambda: jqx.load(
            write_folder(tmp_path, gptq("77777777", columns=256, groups=4), within(config))
        ),
        "'m.scales'",
    )


def test_zero_points_of_several_values_tell_that_codes_are_not_symmetric(tmp_path):
    zeros = np.array([[0x76543210] * 4], np.uint32).view(np.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folder = write_folder(tmp_path, gptq(zeros=zeros), within(config))
    np.testing.assert_array_equal(jqx.load(folder)["m.weight"].zero_point[:8, 0], np.arange(8) - 7)


@pytest.mark.parametrize(
    "left", [{"quant_method": "mxfp4"}, {"quant_method": "quark"}, {"group_size": 64, "bits": 4}]
)
def test_mlx_looks_at_its_own_config_first(tmp_path, left):
    config = {"quantization": {"group_size": 64, "bits": 4}, **within(left)}
    q = jqx.load(write_folder(tmp_path, MLX, config))["m.weight"]
    np.testing.assert_array_equal(q.codes[0, :8], np.arange(8))
    other = {**config, **within(OF_GPTQ)}
    assert first_zero(write_folder(tmp_path, gptq("55555555"), other)) == -2


def test_a_config_of_mlx_says_all_sizes_and_that_of_a_layer_need_not(tmp_path):
    for fields in ({"group_size": 64}, {"bits": 4}):
        folder = write_folder(tmp_path, MLX, {"quantization": fields})
        assert_error(lambda folder=folder: jqx.load(folder), "an integer of 1 or more")
    config = {"quantization": {"group_size": 32, "bits": 8, "m": {}}}
    assert jqx.load(write_folder(tmp_path, MLX, config))["m.weight"].qtype == jnp.uint4


TARGETS = {
    "a name before an expression": (["re:.*mlp.*"], ["a.mlp.down"]),
    "the alphabet among expressions": (["re:b?.*mlp.*"], ["re:a.*down$"]),
    "an expression before a class": (["Linear"], ["re:.*down$"]),
    "the last group of one target": (["re:.*down$", "Linear"], ["re:.*down$"]),
    "a name that looks like a class": (["Linear"], ["a.mlp.down", "lm_head"]),
    "several in one group": (["Linear", "re:.*up"], ["Other", "a.mlp.down"]),
}


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize("turned", [False, True])
def test_compressed_tensors_takes_the_most_specific_target(tmp_path, case, turned):
    last = case == "the last group of one target"
    leaves = {"a.mlp.up": integers(4), "a.mlp.down": integers(3)}
    write(tmp_path / "m", tree_of(leaves), "compressed-tensors", config={})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    scheme = config["quantization_config"]
    by_bits = {group["weights"]["num_bits"]: group for group in scheme["config_groups"].values()}
    for bits, targets in zip((4, 3), TARGETS[case], strict=True):
        by_bits[bits]["targets"] = targets
    scheme["config_groups"] = {
        str(i): by_bits[i] for i in ((3, 4) if turned and not last else (4, 3))
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    loaded = jqx.load(tmp_path / "m")
    for name, leaf in leaves.items():
        assert_same_weight(loaded[f"{name}.weight"], leaf, name)


NOTHING = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": {}}


@pytest.mark.parametrize(
    "groups", [{}, None, {"group_0": {"targets": ["Linear"], "weights": None}}]
)
def test_a_config_that_quantizes_only_caches_leaves_weights_as_they_are(tmp_path, groups):
    tensors = {"k_proj.weight": np.ones((4, 4), np.float32), "k_scale": np.ones(1, np.float32)}
    folder = write_folder(tmp_path, tensors, within({**NOTHING, "config_groups": groups}))
    with jqx.interop.read(folder) as archive:
        assert archive.format == "compressed-tensors" and {*archive.paths} == {*tensors}
    codes = {**tensors, "m.weight": np.ones((4, 4), np.int8)}
    write_folder(tmp_path, codes, within({**NOTHING, "config_groups": groups}))
    assert_error(lambda: jqx.load(folder), "'m.weight'")


def test_old_names_in_compressed_tensors(tmp_path):
    spec = jqx.QSpec("float8_e4m3fn", jqx.per_block({0: 128, 1: 128}, tail=True))
    q = floats(spec, (200, 300))
    write(tmp_path / "m", tree_of({"m": q}), "compressed-tensors", config={})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    scheme = config.pop("quantization_config")
    (group,) = scheme["config_groups"].values()
    group["weights"] |= {"block_structure": "128x128", "type": "FLOAT", "strategy": "BLOCK"}
    del scheme["quant_method"]
    (tmp_path / "m" / "config.json").write_text(json.dumps({"compression_config": scheme}))
    assert_same_weight(jqx.load(tmp_path / "m")["m.weight"], q, "m")


PARTS = ("text_config", "llm_config", "vision_config", "thinker_config")


def test_the_config_of_a_part_counts_and_is_replaced_with_the_whole(tmp_path):
    for part in PARTS:
        inner = {**within(OF_GPTQ), "hidden_size": 8, "quantization": {"bits": 4}}
        for config in ({part: inner}, {"thinker_config": {part: inner}}):
            folder = write_folder(tmp_path / "m", gptq("55555555"), config)
            assert first_zero(folder) == -2
            with jqx.interop.read(folder) as archive:
                write(tmp_path / "out", archive, "gptq", overwrite=True)
            whole_config = json.loads((tmp_path / "out" / "config.json").read_text())
            scheme = whole_config.pop("quantization_config")
            assert scheme["checkpoint_format"] == "gptq_v2"
            assert "quant" not in json.dumps(whole_config) and "hidden_size" in json.dumps(
                whole_config
            )
            assert first_zero(tmp_path / "out") == -2


def test_configs_of_parts_that_differ_are_refused_unless_the_whole_has_one(tmp_path):
    other = within({**OF_GPTQ, "bits": 8})
    config = {"text_config": within(OF_GPTQ), "vision_config": other}
    folder = write_folder(tmp_path, gptq("55555555"), config)
    assert_error(lambda: jqx.load(folder), "the same in all parts", "vision_config")
    write_folder(tmp_path, gptq("55555555"), {**config, **within(OF_GPTQ)})
    assert first_zero(folder) == -2


SKIPPED = {
    "fp8": floats(jqx.QSpec("float8_e4m3fn", jqx.per_block({0: 128, 1: 128}, tail=True))),
    "bitsandbytes": floats(jqx.QSpec("nf4", jqx.per_block({0: 1, 1: 64})), (4, 64)),
    "awq": integers(4, shape=(16, 32)),
}


@pytest.mark.parametrize("form", SKIPPED)
def test_layers_that_loaders_would_skip_are_not_written(tmp_path, form):
    q, one = SKIPPED[form], jnp.ones((4, 4))
    for quantized, name in [("a.up", "up"), ("gate.up", "gate"), ("w_gate", "gate")]:
        tree = tree_of({quantized: q, name: one})
        assert_error(lambda tree=tree: write(tmp_path / "m", tree, form, config={}), repr(name))
    tree = tree_of({"a.up": q, "a.upper": one, "b": one})
    write(tmp_path / "m", tree, form, config={})
    assert_same_weight(jqx.load(tmp_path / "m")["a.up.weight"], q, "a.up")


@pytest.mark.parametrize("said", [{"load_in_8bit": True}, {"quant_method": "bitsandbytes"}, None])
def test_llm_int8_is_read(tmp_path, said):
    codes = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
    tensors = {"m.weight": codes, "m.SCB": np.array([127, 12.7], np.float32)}
    form = {"m.weight_format": np.array(0, np.uint8)}
    for more in ({}, form):
        folder = write_folder(tmp_path, {**tensors, **more}, said and within(said))
        q = jqx.load(folder)["m.weight"]
        expected = codes * np.array([[1], [0.1]], np.float32)
        np.testing.assert_allclose(q.dequantize(), expected, rtol=3e-7)  # two roundings
    write_folder(tmp_path, {**tensors, "m.weight_format": np.array(2, np.uint8)})
    assert_error(lambda: jqx.load(folder), "'m.weight_format'", "is 2, a layout for kernels")


@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16", "float32", "float64"])
def test_codes_of_bitsandbytes_may_be_stored_in_another_dtype(tmp_path, dtype):
    q = floats(jqx.QSpec("nf4", jqx.per_block({0: 1, 1: 64})), (4, 128))
    write(tmp_path / "m", tree_of({"m": q}), "bitsandbytes", config={})
    with jqx.interop.read(tmp_path / "m", config={}) as raw:
        tensors = {name: raw.numpy(name) for name in raw.paths}
    codes = tensors["m.weight"].reshape(-1).view(jnp.dtype(dtype)).reshape(-1, 1)
    write_file(tmp_path / "m" / "model.safetensors", {**tensors, "m.weight": codes})
    assert_same_weight(jqx.load(tmp_path / "m")["m.weight"], q, "m")
    write_file(tmp_path / "m" / "model.safetensors", {**tensors, "m.weight": codes[:-1]})
    assert_error(lambda: jqx.load(tmp_path / "m"), "'m.weight'")


def test_files_beside_an_index(tmp_path):
    tree = {f"{i}.weight": jnp.full((8, 8), i, jnp.float32) for i in range(3)}
    write(tmp_path / "m", tree, "safetensors", config={}, limit=300)
    index = tmp_path / "m" / "model.safetensors.index.json"
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    names = json.loads(index.read_text())
    del names["weight_map"]["1.weight"]
    index.write_text(json.dumps(names))
    assert {*jqx.load(tmp_path / "m")} == {"0.weight", "2.weight"}  # a file that it does not name
    extra = {"0.weight": np.ones((8, 8)), "other": np.ones(3)}
    write_file(files[0], extra)
    assert {*jqx.load(tmp_path / "m")} == {"0.weight", "2.weight", "other"}
    write_file(files[2], {"2.weight": np.ones((8, 8)), "other": np.ones(3)})
    assert_error(lambda: jqx.load(tmp_path / "m"), "and in another file", "'other'")
    write_file(files[2], {"3.weight": np.ones(3)})
    assert_error(lambda: jqx.load(tmp_path / "m"), "lacks the tensor", "'2.weight'")
    write_file(tmp_path / "m" / "model.safetensors", extra)
    assert_error(lambda: jqx.load(tmp_path / "m"), "which files are the model's")


def test_all_files_of_a_model_need_no_index_and_some_are_none(tmp_path):
    tree = {f"{i}.weight": jnp.ones((8, 8)) for i in range(3)}
    write(tmp_path / "m", tree, "safetensors", config={}, limit=300)
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    assert {*jqx.load(tmp_path / "m")} == {*tree}
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    for file in files:
        assert_error(lambda file=file: jqx.load(file), "only one of 3 files of a model")
        assert len(jqx.load(file, config={})) == 1
    files[1].unlink()
    assert_error(lambda: jqx.load(tmp_path / "m"), "lacks files of the model", "2 of 3")
    jqx.save(files[0], {"a": jnp.ones(2)})
    assert [*jqx.load(files[0])] == ["a"]  # a tree of its own


def split(folder, count=3, **changes):
    """A model in several files, as llama-gguf-split writes them; metadata of each may change."""
    paths = []
    for i in range(count):
        metadata = {"split.no": np.uint16(i), "split.count": np.uint16(count)}
        metadata |= {"split.tensors.count": np.int32(2 * count), "general.architecture": "llama"}
        metadata |= {"a.b": "c"} if i == 0 else {}
        tree = {f"blk.{2 * i + j}.w": np.full((2, 32), 2 * i + j, "f4") for j in range(2)}
        paths.append(folder / f"m-{i + 1:05d}-of-{count:05d}.gguf")
        entries = {**metadata, **changes.get(f"of{i}", {})}
        write(paths[-1], changes.get(f"tree{i}", tree), "gguf", metadata=entries, overwrite=True)
    return paths


def test_a_model_in_several_gguf_files_is_read_as_a_whole(tmp_path):
    paths = split(tmp_path)
    file, tree = jqx.interop.read_gguf(paths[0]), jqx.load(paths[0])
    assert file.metadata["a.b"] == "c" and [*file.tensors] == [*tree] and len(tree) == 6
    for i, (name, x) in enumerate(tree.items()):
        np.testing.assert_array_equal(x, np.full((2, 32), i))
        np.testing.assert_array_equal(file.tensors[name].dequantize(), x)
    with jqx.interop.read(paths[0]) as archive:
        write(tmp_path / "whole.gguf", archive, "gguf")
        before = archive.lazy("blk.5.w").source
    whole = jqx.interop.read_gguf(tmp_path / "whole.gguf")
    assert whole.metadata["split.count"] == 0 and len(whole.tensors) == 6
    split(tmp_path, tree2={"blk.4.w": np.ones((2, 32), "f4"), "blk.5.w": np.ones((2, 64), "f4")})
    with jqx.interop.read(paths[0]) as archive:
        assert archive.lazy("blk.5.w").source != before


SPLIT = {
    "another number": ({"of1": {"split.no": np.uint16(2)}}, "file 2 of 3"),
    "another count": ({"of2": {"split.count": np.uint16(4)}}, "file 3 of 3"),
    "too few tensors": ({"of0": {"split.tensors.count": np.int32(7)}}, "6 tensors in 3 files"),
    "a tensor twice": ({"tree2": {"blk.0.w": np.ones((2, 32), "f4")}}, "'blk.0.w', as in another"),
    "a count that its name lacks": ({"of0": {"split.count": np.uint16(2)}}, "the first"),
}


@pytest.mark.parametrize("case", SPLIT)
def test_files_that_are_no_parts_of_one_model_are_refused(tmp_path, case):
    changes, words = SPLIT[case]
    paths = split(tmp_path, **changes)
    for read in (jqx.load, jqx.interop.read_gguf):
        assert_error(lambda read=read: read(paths[0]), words)


def test_a_part_of_a_model_in_gguf_is_refused(tmp_path):
    paths = split(tmp_path)
    renamed = paths[0].rename(tmp_path / "m.gguf")
    for path in (paths[1], renamed):
        assert_error(lambda path=path: jqx.load(path), "a part of a model", "the first file")
    renamed.rename(paths[0])
    paths[2].unlink()
    assert_error(lambda: jqx.load(paths[0]), paths[2].name, error=FileNotFoundError)


def test_gguf_of_version_2_is_read(tmp_path):
    (tmp_path / "m.gguf").write_bytes(
        file_of([("w", (2,), 0, 0)], data=np.array([1.5, -2], "<f4").tobytes(), version=2)
    )
    np.testing.assert_array_equal(jqx.load(tmp_path / "m.gguf")["w"], [1.5, -2])
