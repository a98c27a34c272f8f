"""Checkpoints as the readers of each format take them: precedence, defaults, old names, parts."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx.interop import write

from ..oracles.refusals import assert_error
from .gguf_files import file_of
from .raw_folders import write_file, write_folder
from .test_hugging_face_formats import layer
from .test_write import floats, integers, same, tree_of

ASYMMETRIC = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
GPTQ = {"quant_method": "gptq", **ASYMMETRIC}
AWQ = {
    "m.qweight": np.full((128, 1), 0x75316420, np.int32),
    "m.qzeros": np.full((1, 1), 0x55555555, np.int32),
    "m.scales": np.ones((1, 8), np.float16),
}
MLX = {
    "m.weight": np.full((4, 8), 0x76543210, np.uint32),
    "m.scales": np.ones((4, 1), np.float32),
    "m.biases": np.zeros((4, 1), np.float32),
}
FP8 = {
    "m.weight": np.ones((200, 300), ml_dtypes.float8_e4m3fn),
    "m.weight_scale_inv": np.arange(6, dtype=np.float32).reshape(2, 3),
}


def within(config):
    return {"quantization_config": config}


def first_zero(folder, **options):
    """The first zero point of the layer; which version of GPTQ is read decides it."""
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
    folder = write_folder(tmp_path, layer("55555555"), within({**GPTQ, **fields}))
    assert first_zero(folder) == zero


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, "format == 'gptq'"),
        ({"format": "marlin"}, "format == 'marlin'"),
        ({"format": "gptq_p"}, "format == 'gptq_p'"),
    ],
)
def test_another_version_of_gptq_is_refused(tmp_path, fields, words):
    folder = write_folder(tmp_path, layer("55555555"), within({**GPTQ, **fields}))
    assert_error(lambda: jqx.load(folder), words)


ALONE = {
    "of AutoGPTQ": (layer("55555555"), ASYMMETRIC),
    "of GPTQModel": (layer("55555555"), {**ASYMMETRIC, "method": "gptq", "format": "gptq"}),
    "with its method": (layer("55555555"), GPTQ),
    "of AWQ": (AWQ, {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}),
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
    for said in (None, {"model_type": "a"}, {"quantization_config": None}):
        write_folder(tmp_path, tensors, said)
        (tmp_path / name).write_text(json.dumps(config))
        assert isinstance(jqx.load(tmp_path)["m.weight"], jqx.QTensor)


MISSING = {
    "gptq, no groups": (layer("77777777"), {**GPTQ, "sym": True}, "group_size"),
    "gptq, one group": (layer("77777777"), {**GPTQ, "group_size": -1}, "group_size"),
    "gptq, symmetric": (layer("77777777"), {**GPTQ, "sym": True}, "sym"),
    "gptq, order": (layer("77777777"), GPTQ, "desc_act"),
    "awq, groups": (AWQ, {"quant_method": "awq", "bits": 4, "group_size": 128}, "group_size"),
    "awq, bits": (AWQ, {"quant_method": "awq", "bits": 4, "group_size": 128}, "bits"),
    "fp8": (FP8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_block_size"),
    "fp8, format": (FP8, {"quant_method": "fp8", "fmt": "float8_e4m3fn"}, "fmt"),
}


@pytest.mark.parametrize("case", MISSING)
def test_fields_that_are_missing_have_the_defaults_of_readers(tmp_path, case):
    tensors, config, field = MISSING[case]
    wanted = jqx.load(write_folder(tmp_path, tensors, within(config)))["m.weight"]
    left = {key: x for key, x in config.items() if key != field}
    found = jqx.load(write_folder(tmp_path, tensors, within(left)))["m.weight"]
    np.testing.assert_array_equal(found.dequantize(), wanted.dequantize())


def test_groups_that_no_config_speaks_of_are_of_128(tmp_path):
    tensors = layer("77777777", columns=256, groups=2)
    config = {"quant_method": "gptq", "bits": 4}
    q = jqx.load(write_folder(tmp_path, tensors, within(config)))["m.weight"]
    assert q.groups.sizes == (1, 128)
    assert_error(
        lambda: jqx.load(
            write_folder(tmp_path, layer("77777777", columns=256, groups=4), within(config))
        ),
        "'m.scales'",
    )


def test_zero_points_of_several_values_tell_that_codes_are_not_symmetric(tmp_path):
    zeros = np.array([[0x76543210] * 4], np.uint32).view(np.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folder = write_folder(tmp_path, layer(zeros=zeros), within(config))
    np.testing.assert_array_equal(jqx.load(folder)["m.weight"].zero_point[:8, 0], np.arange(8) - 7)


def test_layouts_of_awq_for_kernels_are_refused(tmp_path):
    said = {"quant_method": "awq", "bits": 4, "group_size": 128}
    for fields in ({"format": "gemv"}, {"version": "GEMV_fast"}, {"backend": "llm-awq"}):
        folder = write_folder(tmp_path, AWQ, within({**said, **fields}))
        ((key, value),) = fields.items()
        assert_error(lambda folder=folder: jqx.load(folder), f"{key} == {value!r}")


# The order in which mlx-lm and compressed-tensors look.


@pytest.mark.parametrize(
    "left", [{"quant_method": "mxfp4"}, {"quant_method": "quark"}, {"group_size": 64, "bits": 4}]
)
def test_mlx_looks_at_its_own_config_first(tmp_path, left):
    config = {"quantization": {"group_size": 64, "bits": 4}, **within(left)}
    q = jqx.load(write_folder(tmp_path, MLX, config))["m.weight"]
    np.testing.assert_array_equal(q.codes[0, :8], np.arange(8))
    other = {**config, **within(GPTQ)}
    assert first_zero(write_folder(tmp_path, layer("55555555"), other)) == -2


def test_a_config_of_mlx_says_all_sizes_and_that_of_a_layer_need_not(tmp_path):
    for said in ({"group_size": 64}, {"bits": 4}):
        folder = write_folder(tmp_path, MLX, {"quantization": said})
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
    said = config["quantization_config"]
    by_bits = {group["weights"]["num_bits"]: group for group in said["config_groups"].values()}
    for bits, targets in zip((4, 3), TARGETS[case], strict=True):
        by_bits[bits]["targets"] = targets
    said["config_groups"] = {
        str(i): by_bits[i] for i in ((3, 4) if turned and not last else (4, 3))
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    found = jqx.load(tmp_path / "m")
    for name, leaf in leaves.items():
        same(found[f"{name}.weight"], leaf, name)


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
    said = config.pop("quantization_config")
    (group,) = said["config_groups"].values()
    group["weights"] |= {"block_structure": "128x128", "type": "FLOAT", "strategy": "BLOCK"}
    del said["quant_method"]
    (tmp_path / "m" / "config.json").write_text(json.dumps({"compression_config": said}))
    same(jqx.load(tmp_path / "m")["m.weight"], q, "m")


# Parts of models.


PARTS = ("text_config", "llm_config", "vision_config", "thinker_config")


def test_the_config_of_a_part_counts_and_is_replaced_with_the_whole(tmp_path):
    for part in PARTS:
        inner = {**within(GPTQ), "hidden_size": 8, "quantization": {"bits": 4}}
        for config in ({part: inner}, {"thinker_config": {part: inner}}):
            folder = write_folder(tmp_path / "m", layer("55555555"), config)
            assert first_zero(folder) == -2
            with jqx.interop.read(folder) as archive:
                write(tmp_path / "out", archive, "gptq", overwrite=True)
            found = json.loads((tmp_path / "out" / "config.json").read_text())
            left = found.pop("quantization_config")
            assert left["checkpoint_format"] == "gptq_v2"
            assert "quant" not in json.dumps(found) and "hidden_size" in json.dumps(found)
            assert first_zero(tmp_path / "out") == -2


def test_configs_of_parts_that_differ_are_refused_unless_the_whole_has_one(tmp_path):
    other = within({**GPTQ, "bits": 8})
    config = {"text_config": within(GPTQ), "vision_config": other}
    folder = write_folder(tmp_path, layer("55555555"), config)
    assert_error(lambda: jqx.load(folder), "the same in all parts", "vision_config")
    write_folder(tmp_path, layer("55555555"), {**config, **within(GPTQ)})
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
    same(jqx.load(tmp_path / "m")["a.up.weight"], q, "a.up")


# LLM.int8 and storage of bitsandbytes.


@pytest.mark.parametrize("said", [{"load_in_8bit": True}, {"quant_method": "bitsandbytes"}, None])
def test_llm_int8_is_read(tmp_path, said):
    codes = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
    tensors = {"m.weight": codes, "m.SCB": np.array([127, 12.7], np.float32)}
    form = {"m.weight_format": np.array(0, np.uint8)}
    for more in ({}, form):
        folder = write_folder(tmp_path, {**tensors, **more}, said and within(said))
        q = jqx.load(folder)["m.weight"]
        wanted = codes * np.array([[1], [0.1]], np.float32)
        np.testing.assert_allclose(q.dequantize(), wanted, rtol=3e-7)  # two roundings
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
    same(jqx.load(tmp_path / "m")["m.weight"], q, "m")
    write_file(tmp_path / "m" / "model.safetensors", {**tensors, "m.weight": codes[:-1]})
    assert_error(lambda: jqx.load(tmp_path / "m"), "'m.weight'")


# Files and indices.


def test_files_beside_an_index(tmp_path):
    tree = {f"{i}.weight": jnp.full((8, 8), i, jnp.float32) for i in range(3)}
    write(tmp_path / "m", tree, "safetensors", config={}, limit=300)
    index = tmp_path / "m" / "model.safetensors.index.json"
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    said = json.loads(index.read_text())
    del said["weight_map"]["1.weight"]
    index.write_text(json.dumps(said))
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


# GGUF in several files.


def split(folder, count=3, **changes):
    """A model in several files, as llama-gguf-split writes them; metadata of each may change."""
    paths = []
    for i in range(count):
        known = {"split.no": np.uint16(i), "split.count": np.uint16(count)}
        known |= {"split.tensors.count": np.int32(2 * count), "general.architecture": "llama"}
        known |= {"a.b": "c"} if i == 0 else {}
        tree = {f"blk.{2 * i + j}.w": np.full((2, 32), 2 * i + j, "f4") for j in range(2)}
        paths.append(folder / f"m-{i + 1:05d}-of-{count:05d}.gguf")
        own = {**known, **changes.get(f"of{i}", {})}
        write(paths[-1], changes.get(f"tree{i}", tree), "gguf", metadata=own, overwrite=True)
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
