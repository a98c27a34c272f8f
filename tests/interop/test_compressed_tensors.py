"""Checkpoints of compressed-tensors: those of the package, and what contradicts itself."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.interop.codec import to_stream
from jqx._src.interop.config import matches

from .raw_folders import CHECKPOINTS, write_folder

FOLDER = CHECKPOINTS / "compressed-tensors-0.20.0"


def config_of(**fields):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": 32, "dynamic": False, **fields}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["head"]}
    return {"quantization_config": {**said, "config_groups": {"group_0": group}}}


def words(codes, bits=4):
    return to_stream((codes + 2 ** (bits - 1)).astype(np.uint8), bits).view(np.int32)


def tensors_of(codes, bits=4, scale=None):
    rows, columns = codes.shape
    scale = np.ones((rows, columns // 32), np.float32) if scale is None else scale
    return {
        "m.weight_packed": words(codes, bits),
        "m.weight_scale": scale,
        "m.weight_shape": np.array(codes.shape, np.int64),
    }


def kind(leaf):
    return jax.tree.structure(leaf), [(x.shape, x.dtype) for x in jax.tree.leaves(leaf)]


def test_every_scheme_is_read_to_the_codes_and_floats_of_the_package():
    expected = np.load(FOLDER / "expected.npz")
    with jqx.interop.read(FOLDER) as archive:
        assert archive.format == "compressed-tensors"
        found = {path: archive.read(path) for path in archive.paths}
        for path, leaf in found.items():
            assert kind(leaf) == kind(archive.spec(path))
            viewed = archive.view(path)
            for a, b in zip(jax.tree.leaves(leaf), jax.tree.leaves(viewed), strict=True):
                np.testing.assert_array_equal(np.asarray(a), b)
    assert found.pop("norm.weight").shape == (64,)
    assert {*found} == {name for name in expected if name.endswith(".weight")}
    real = {path: leaf.dequantize().astype(jnp.float32) for path, leaf in found.items()}
    for path, leaf in found.items():
        np.testing.assert_array_equal(real[path], expected[path], strict=True, err_msg=path)
        codes = path.replace(".weight", ".codes")
        if codes in expected:
            np.testing.assert_array_equal(leaf.codes, expected[codes])


def test_weights_take_their_real_size():
    with jqx.interop.read(FOLDER) as archive:
        for bits in range(2, 8):
            assert archive.spec(f"int{bits}_sym.weight").values.size == 64 * 128 * bits // 8


def test_load_reads_a_folder_whole_and_takes_a_dtype():
    loaded = jqx.load(str(FOLDER), dtype=jnp.float32)
    assert all(leaf.dtype == jnp.float32 for leaf in loaded.values())
    assert isinstance(loaded["f8.weight"], jqx.QTensor)


def test_tensors_as_they_are():
    with jqx.interop.Archive(FOLDER, config={}) as archive:
        assert archive.format == "safetensors"
        assert archive.read("int4_sym.weight_packed").dtype == jnp.int32


def test_a_file_alone_does_not_say_how_it_is_quantized():
    path = str(FOLDER / "model.safetensors")
    with pytest.raises(ValueError, match="has no config that says how"):
        jqx.load(path)
    config = json.loads((FOLDER / "config.json").read_text())
    with jqx.interop.read(path, config=config) as archive:
        assert archive.format == "compressed-tensors"


def test_columns_in_the_order_of_their_groups(tmp_path):
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(-8, 8, (4, 96)), rng.random((4, 3)).astype(np.float32)
    index = rng.permutation(np.arange(96) // 32).astype(np.int32)
    tensors = {**tensors_of(codes, scale=scale), "m.weight_g_idx": index}
    folder = write_folder(tmp_path, tensors, config_of(actorder="group"))
    q = jqx.load(str(folder))["m.weight"]
    np.testing.assert_array_equal(q.dequantize(), codes.astype(np.float32) * scale[:, index])
    unused = {**tensors, "m.weight_g_idx": np.full(96, -1, np.int32)}
    q = jqx.load(str(write_folder(tmp_path, unused, config_of())))["m.weight"]
    np.testing.assert_array_equal(q.codes, codes)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_of_old_releases_hold_whole_codes(tmp_path, bits):
    each = 32 // bits
    codes = np.random.default_rng(bits).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (2, 96))
    padded = np.zeros((2, -(-96 // each) * each), np.uint64)
    padded[:, :96] = codes + 2 ** (bits - 1)
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(bits)
    old = (padded.reshape(2, -1, each) << shifts).sum(-1, dtype=np.uint64).astype(np.uint32)
    tensors = {**tensors_of(codes, bits), "m.weight_packed": old.view(np.int32)}
    folder = write_folder(tmp_path, tensors, config_of(num_bits=bits))
    np.testing.assert_array_equal(jqx.load(str(folder))["m.weight"].codes, codes)


def test_experts_are_stacked_and_scales_of_caches_are_leaves(tmp_path):
    codes = np.random.default_rng(0).integers(-8, 8, (2, 4, 64))
    tensors = {
        "m.weight_packed": np.stack([words(part) for part in codes]),
        "m.weight_scale": np.ones((2, 4, 2), np.float16),
        "m.weight_shape": np.array([2, 4, 64], np.int64),
        "attn.k_scale": np.full(1, 0.5, np.float32),
    }
    loaded = jqx.load(str(write_folder(tmp_path, tensors, config_of())))
    np.testing.assert_array_equal(loaded["m.weight"].codes, codes)
    assert loaded["attn.k_scale"] == 0.5


CODES = np.zeros((4, 64), np.int64)
LACKING = {name: x for name, x in tensors_of(CODES).items() if "scale" not in name}
WRONG = {
    "a scale short": (
        {"m.weight_scale": np.ones((4, 1), np.float32)},
        {},
        "'m.weight_scale' .* its layer needs",
    ),
    "another group": ({}, {"group_size": 16}, r"float32\[4, 4\], for the strategy group"),
    "other bits": ({}, {"num_bits": 8}, "words does not hold"),
    "no such bits": ({}, {"num_bits": 9}, "num_bits == 9"),
    "bits that are none": ({}, {"num_bits": "4"}, "num_bits == '4'"),
    "no such strategy": ({}, {"strategy": "row"}, "strategy == 'row'"),
    "floats": ({}, {"type": "float"}, "not of pack-quantized as in the config"),
    "zero points": ({"m.weight_zero_point": np.ones((1, 2), np.int32)}, {}, "which the config"),
    "no zero points": ({}, {"symmetric": False}, "'m.weight_zero_point' is missing"),
    "a shape too long": (
        {"m.weight_shape": np.array([4, 2**62], np.int64)},
        {},
        "words does not hold",
    ),
    "a shape below zero": (
        {"m.weight_shape": np.array([4, -64], np.int64)},
        {},
        "words does not hold",
    ),
    "a scale of integers": ({"m.weight_scale": np.ones((4, 2), np.int32)}, {}, "its layer needs"),
    "groups of unequal size": (
        {"m.weight_g_idx": np.zeros(64, np.int32)},
        {"actorder": "group"},
        "elements in a group, not always",
    ),
    "no order": ({}, {"actorder": "group"}, "'m.weight_g_idx' is missing"),
    "an ignored layer": ({"head.weight_scale": np.ones((4, 1), np.float32)}, {}, "not belong to"),
    "a weight twice": ({"m.weight": np.ones((4, 64), np.float32)}, {}, "in float and quantized"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_its_config_is_refused(tmp_path, case):
    tensors, fields, words = WRONG[case]
    folder = write_folder(tmp_path, {**tensors_of(CODES), **tensors}, config_of(**fields))
    with pytest.raises(ValueError, match=words) as caught:
        jqx.load(str(folder))
    assert "fix:" in str(caught.value)


def test_layers_that_lack_their_scale_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'m.weight_\w+' .* does not belong to a layer"):
        jqx.load(str(write_folder(tmp_path, LACKING, config_of())))


def test_a_config_without_its_tensors_is_refused(tmp_path):
    folder = write_folder(tmp_path, {"m.weight": np.ones((4, 64), np.float32)}, config_of())
    with pytest.raises(ValueError, match="is not quantized as its config says"):
        jqx.load(str(folder))


def test_groups_of_the_config_are_found_by_name_and_by_format(tmp_path):
    config = config_of()
    groups = config["quantization_config"]["config_groups"]
    eight = copy.deepcopy(groups["group_0"])
    eight["weights"] |= {"num_bits": 8}
    eight["targets"] = ["re:.*down.*"]
    groups["group_1"] = eight
    down = {name.replace("m.", "down."): x for name, x in tensors_of(CODES, 8).items()}
    folder = write_folder(tmp_path, {**tensors_of(CODES), **down}, config)
    loaded = jqx.load(str(folder))
    assert loaded["m.weight"].qtype == jnp.int4 and loaded["down.weight"].qtype == jnp.int8
    eight["targets"] = ["Embedding"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="belongs to a layer that several groups"):
        jqx.load(str(folder))
    del groups["group_1"]
    groups["group_0"]["targets"] = ["other"]
    groups["group_0"]["targets"] = ["re:other"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="to a layer that no group of the config describes"):
        jqx.load(str(folder))


@pytest.mark.parametrize(
    ("pattern", "name", "means"),
    [
        ("lm_head", "lm_head", True),
        ("head", "lm_head", False),
        ("re:.*head", "lm_head", True),
        ("re:model", "model.layers.0", True),
        (r"re:model\.layers\.(0|1)\.", "model.layers.1.up", True),
        (r"re:model\.layers\.(0|1)\.", "model.layers.2.up", False),
    ],
)
def test_targets_are_names_or_expressions_from_the_begin_on(pattern, name, means):
    assert matches(pattern, name, "config") == means


@pytest.mark.parametrize("pattern", ["re:(", "re:(a+)+$", "re:(a|a)*b", "re:" + "a" * 30_000])
def test_expressions_that_could_take_for_ever_are_refused(pattern):
    with pytest.raises(ValueError, match="a regular expression of at most"):
        matches(pattern, "a" * 400, "config")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "torchao"}}, "torchao stores tensors"),
        ({"quantization_config": {"quant_method": "mine"}}, "no such format is known"),
        ({"quantization_config": [1]}, "a JSON object"),
        ([], "a JSON object"),
    ],
)
def test_formats_that_are_not_read_are_named_in_the_error(tmp_path, config, words):
    folder = write_folder(tmp_path, {"m.weight": np.ones((4, 64), np.float32)}, config)
    with pytest.raises(ValueError, match=words):
        jqx.load(str(folder))
