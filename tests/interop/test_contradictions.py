"""Checkpoints that contradict themselves or their config are refused, in every format."""

import copy
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.interop.codec import matches

from ..oracles.refusals import assert_error
from .files import CHECKPOINTS, write_folder
from .layers import (
    AWQ,
    BLOCKS,
    FLOAT,
    GPTQ,
    MLX,
    OSS,
    SCALES,
    awq,
    bitsandbytes,
    compressed,
    compressed_config,
    experts,
    gptq,
    within,
)

LACKING = "does not belong to a layer"


def ones(shape, dtype=np.float32):
    return np.ones(shape, dtype)


# Of each case: the tensors that differ, the fields of the config, and words of the error.
COMPRESSED = {
    "a scale short": (
        {"m.weight_scale": ones((4, 1))},
        {},
        r"'m.weight_scale' .* its layer needs",
    ),
    "another group": ({}, {"group_size": 16}, r"float32\[4, 4\], for the strategy group"),
    "other bits": ({}, {"num_bits": 8}, "words does not hold"),
    "no such bits": ({}, {"num_bits": 9}, "num_bits == 9"),
    "bits that are none": ({}, {"num_bits": "4"}, "num_bits == '4'"),
    "no such strategy": ({}, {"strategy": "row"}, "strategy == 'row'"),
    "floats": ({}, {"type": "float"}, "not of pack-quantized as in the config"),
    "zero points": ({"m.weight_zero_point": ones((1, 2), np.int32)}, {}, "which the config"),
    "no zero points": ({}, {"symmetric": False}, "'m.weight_zero_point' is missing"),
    "a shape too long": ({"m.weight_shape": np.array([4, 2**62])}, {}, "words does not hold"),
    "a shape below zero": ({"m.weight_shape": np.array([4, -64])}, {}, "words does not hold"),
    "a scale of integers": ({"m.weight_scale": ones((4, 2), np.int32)}, {}, "its layer needs"),
    "groups of unequal size": (
        {"m.weight_g_idx": np.zeros(64, np.int32)},
        {"actorder": "group"},
        "elements in a group, not always",
    ),
    "no order": ({}, {"actorder": "group"}, "'m.weight_g_idx' is missing"),
    "an ignored layer": ({"head.weight_scale": ones((4, 1))}, {}, "not belong to"),
    "a weight twice": (FLOAT, {}, "in float and quantized"),
    "no scale": ({"m.weight_scale": None}, {}, rf"'m.weight_\w+' .* {LACKING}"),
}
OF_GPTQ = {
    "bits": ({}, {"bits": 5}, "bits == 5"),
    "a layout of kernels": ({}, {"is_marlin_format": True}, "is_marlin_format == True"),
    "another version": ({}, {"checkpoint_format": "gptq_p"}, "checkpoint_format == 'gptq_p'"),
    "another format": ({}, {"format": "gptq_p"}, "format == 'gptq_p'"),
    "a format of kernels": ({}, {"format": "marlin"}, "format == 'marlin'"),
    "two versions": (
        {},
        {"format": "gptq", "checkpoint_format": "gptq_v2"},
        "format == 'gptq'",
    ),
    "words": ({}, {"pack_dtype": "int16"}, "pack_dtype == 'int16'"),
    "groups": ({}, {"group_size": 16}, r"'m.scales' .* its layer needs"),
    "scales": ({"m.scales": ones((1, 32), np.int32)}, {}, "'m.scales' .* its layer needs"),
    "no scales": ({"m.scales": None}, {}, "'m.scales' is missing"),
    "no order": ({"m.g_idx": None}, {"desc_act": True}, "'m.g_idx' is missing"),
    "an order": ({"m.g_idx": ones(32, np.int32)}, {}, "elements in a group, not always"),
    "three axes": ({"m.qweight": np.zeros((1, 4, 32), np.int32)}, {}, "2 axes"),
    "overrides": ({}, {"dynamic": [1]}, "a JSON object"),
}
OF_AWQ = {
    "a version": ({}, {"version": "gemv"}, "version == 'gemv'"),
    "a fast version": ({}, {"version": "GEMV_fast"}, "version == 'GEMV_fast'"),
    "a format": ({}, {"format": "gemv"}, "format == 'gemv'"),
    "a backend": ({}, {"backend": "llm-awq"}, "backend == 'llm-awq'"),
    "bits": ({}, {"bits": 8}, "bits == 8"),
    "zero points": ({}, {"zero_point": False}, "which the config"),
    "groups": ({}, {"group_size": 16}, "'m.scales' .* its layer needs"),
    "a layer in float": ({}, {"modules_to_not_convert": ["m"]}, LACKING),
}
OF_MLX = {
    "bits": ({}, {"bits": 7}, "bits == 7"),
    "a group": ({}, {"group_size": 48}, "does not hold whole groups"),
    "more groups": ({}, {"group_size": 32}, r"'m.scales' .* its layer needs"),
    "no minimums": ({"m.biases": None}, {}, "'m.biases' is missing"),
    "minimums": ({"m.biases": ones((4, 1), np.float16)}, {}, "'m.biases' .* its layer needs"),
    "a mode": ({}, {"mode": "mine"}, "mode == 'mine'"),
    "groups of mxfp4": ({}, {"mode": "mxfp4", "group_size": 64}, "32, of mxfp4"),
    "a layer in float": ({}, {"m": False}, LACKING),
    "words": ({"m.weight": np.zeros((4, 8), np.int32)}, {}, "'m.weight' .* its layer needs"),
}
# The state of the layer in place of fields of the config.
OF_BITSANDBYTES = {
    "a shape": ({}, {"shape": [2, 2**62]}, "'m.weight' .* its layer needs"),
    "a shape of one": ({}, {"shape": [128]}, "two sizes"),
    "rows": ({}, {"blocksize": 128}, "has blocks of 128 that cross rows"),
    "no size": ({}, {"blocksize": 0}, "blocksize == 0"),
    "another format": ({}, {"quant_type": "fp4"}, "quant_type == 'fp4'"),
    "a dtype": ({}, {"dtype": "int8"}, "dtype == 'int8'"),
    "no scales": ({"m.weight.absmax": None}, {}, "'m.weight.absmax' is missing"),
    "too few scales": ({"m.weight.absmax": ones(1)}, {}, "'m.weight.absmax' .* its layer needs"),
    "no nested state": (
        {"m.weight.nested_absmax": ones(1), "m.weight.absmax": ones(2, np.uint8)},
        {},
        "nest",
    ),
    "a table": (
        {"m.weight.quant_map": np.full(16, np.nan, np.float32)},
        {},
        "holds 1 numbers, not 16 finite",
    ),
    "no JSON": (
        {"m.weight.quant_state.bitsandbytes__nf4": np.full(9, 255, np.uint8)},
        {},
        "is not JSON",
    ),
}
OF_EXPERTS = {
    "blocks": ({BLOCKS: experts()[BLOCKS][..., :8]}, {}, "the last of 16 bytes"),
    "scales": ({SCALES: experts()[SCALES][:1]}, {}, "a scale for each block"),
    "a dtype": ({SCALES: experts()[SCALES].astype(np.int8)}, {}, "uint8"),
    "no blocks": ({BLOCKS: None}, {}, LACKING),
}
FORMATS = {
    "compressed-tensors": (COMPRESSED, lambda fields: (compressed(), compressed_config(**fields))),
    "gptq": (OF_GPTQ, lambda fields: (gptq(), within({**GPTQ, **fields}))),
    "awq": (OF_AWQ, lambda fields: (awq(), within({**AWQ, **fields}))),
    "mlx": (OF_MLX, lambda fields: (MLX, {"quantization": MLX_CONFIG | fields})),
    "bitsandbytes": (
        OF_BITSANDBYTES,
        lambda state: (bitsandbytes(state), within({"quant_method": "bitsandbytes"})),
    ),
    "mxfp4": (OF_EXPERTS, lambda _: (experts(), OSS)),
}
MLX_CONFIG = {"group_size": 64, "bits": 4}
CASES = [(form, case) for form, (cases, _) in FORMATS.items() for case in cases]


@pytest.mark.parametrize(("form", "case"), CASES)
def test_what_contradicts_its_config_is_refused(tmp_path, form, case):
    cases, checkpoint = FORMATS[form]
    changes, fields, words = cases[case]
    tensors, config = checkpoint(fields)
    tensors = {name: x for name, x in {**tensors, **changes}.items() if x is not None}
    with pytest.raises(ValueError, match=words) as caught:
        jqx.load(write_folder(tmp_path, tensors, config))
    assert "fix:" in str(caught.value)


AUTO_ROUND = CHECKPOINTS / "auto-round-0.16.1"


def changed(tmp_path, case, **fields):
    """Returns a copy of a checkpoint of auto-round with some fields of its config changed."""
    shutil.copytree(AUTO_ROUND / case, tmp_path / "changed")
    path = tmp_path / "changed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))
    return path.parent


OF_AUTO_ROUND = {
    "layout": ("own_gptq", {"packing_format": "auto_round:marlin"}, "packing_format == "),
    "floats": ("own_gptq", {"data_type": "fp"}, "data_type == 'fp'"),
    "zero points": ("own_gptq", {"packing_format": "auto_round"}, "which the config"),
    "of awq": ("own_awq", {"sym": True}, "which the config"),
    "bits": ("own_awq", {"bits": 3}, "bits == 3"),
    "no objects": ("own_gptq", {"extra_config": [1]}, "a JSON object"),
    "in float": ("own_gptq", {"extra_config": {".*q_proj": {"bits": 16}}}, "not belong to a layer"),
}


@pytest.mark.parametrize("case", OF_AUTO_ROUND)
def test_what_contradicts_its_config_of_auto_round_is_refused(tmp_path, case):
    name, fields, words = OF_AUTO_ROUND[case]
    assert_error(lambda: jqx.load(changed(tmp_path, name, **fields)), words)


def test_layers_of_auto_round_are_found_by_pattern(tmp_path):
    extra = {r".*down_proj": {"bits": 8, "group_size": 64}}
    loaded = jqx.load(changed(tmp_path, "own_mixed", extra_config=extra))
    assert loaded["model.layers.0.mlp.down_proj.weight"].qtype == np.int8
    assert loaded["model.layers.0.self_attn.q_proj.weight"].qtype != np.int8


NO_CONFIG = "has no config that says how"
WITHOUT_LAYERS = {
    "torchao": (FLOAT, within({"quant_method": "torchao"}), "torchao stores tensors"),
    "an unknown method": (FLOAT, within({"quant_method": "mine"}), "no such format is known"),
    "a config of a list": (FLOAT, within([1]), "a JSON object"),
    "a list": (FLOAT, [], "a JSON object"),
    "tensors of torchao": (
        {"m._weight_qdata": ones((4, 4), np.int8)},
        None,
        "in the format of torchao, which jqx does not read",
    ),
    "no codes": (FLOAT, compressed_config(), "is not quantized as its config says"),
    "no config": (experts(), None, NO_CONFIG),
}


@pytest.mark.parametrize("case", WITHOUT_LAYERS)
def test_folders_without_layers_of_their_config_are_refused(tmp_path, case):
    tensors, config, words = WITHOUT_LAYERS[case]
    assert_error(lambda: jqx.load(write_folder(tmp_path, tensors, config)), words)


def test_a_file_alone_does_not_say_how_it_is_quantized():
    folder = CHECKPOINTS / "compressed-tensors-0.20.0"
    path = folder / "model.safetensors"
    assert_error(lambda: jqx.load(str(path)), NO_CONFIG)
    config = json.loads((folder / "config.json").read_text())
    with jqx.interop.read(str(path), config=config) as archive:
        assert archive.format == "compressed-tensors"


def test_groups_of_compressed_tensors_are_found_by_name_and_by_format(tmp_path):
    config = compressed_config()
    groups = config["quantization_config"]["config_groups"]
    eight = copy.deepcopy(groups["group_0"])
    eight["weights"] |= {"num_bits": 8}
    eight["targets"] = ["re:.*down.*"]
    groups["group_1"] = eight
    down = {name.replace("m.", "down."): x for name, x in compressed(bits=8).items()}
    folder = write_folder(tmp_path, {**compressed(), **down}, config)
    loaded = jqx.load(str(folder))
    assert loaded["m.weight"].qtype == jnp.int4 and loaded["down.weight"].qtype == jnp.int8
    eight["targets"] = ["Embedding"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_error(lambda: jqx.load(folder), "belongs to a layer that several groups")
    del groups["group_1"]
    groups["group_0"]["targets"] = ["re:other"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_error(lambda: jqx.load(folder), "to a layer that no group of the config describes")


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
    assert_error(lambda: matches(pattern, "a" * 400, "config"), "a regular expression of at most")
