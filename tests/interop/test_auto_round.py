"""Checkpoints of auto-round: GPTQ, AWQ and its own format, read to what its layers multiply by."""

import json
import shutil

import numpy as np
import pytest

import jqx

from .raw_folders import CHECKPOINTS

FOLDER = CHECKPOINTS / "auto-round-0.16.1"
FORMATS = {"gptq": "gptq", "awq": "awq", "own": "auto-round"}
CASES = sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_package(case):
    expected = np.load(FOLDER / case / "expected.npz")
    with jqx.interop.read(FOLDER / case) as archive:
        assert archive.format == FORMATS[case.partition("_")[0]]
        for name in expected:
            q = archive.read(name)
            mixed = case.endswith("mixed") and "down_proj" in name
            bits = 8 if mixed else next((int(x) for x in case.split("_") if x.isdigit()), 4)
            assert jqx.numerics.format_of(q.qtype).bits == bits
            assert q.dtype == np.float16
            np.testing.assert_array_equal(q.dequantize(), expected[name])
        assert archive.paths[-1] == "model.norm.weight"


def changed(tmp_path, case, **fields):
    """Returns a copy of a checkpoint with some fields of its config changed."""
    shutil.copytree(FOLDER / case, tmp_path / "changed")
    path = tmp_path / "changed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))
    return path.parent


WRONG = {
    "layout": ("own_gptq", {"packing_format": "auto_round:marlin"}, "packing_format == "),
    "floats": ("own_gptq", {"data_type": "fp"}, "data_type == 'fp'"),
    "zero points": ("own_gptq", {"packing_format": "auto_round"}, "which the config"),
    "of awq": ("own_awq", {"sym": True}, "which the config"),
    "bits": ("own_awq", {"bits": 3}, "bits == 3"),
    "no objects": ("own_gptq", {"extra_config": [1]}, "a JSON object"),
    "in float": ("own_gptq", {"extra_config": {".*q_proj": {"bits": 16}}}, "not belong to a layer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_its_config_is_refused(tmp_path, case):
    name, fields, words = WRONG[case]
    with pytest.raises(ValueError, match=words) as caught:
        jqx.load(changed(tmp_path, name, **fields))
    assert "fix:" in str(caught.value)


def test_layers_are_found_by_pattern(tmp_path):
    extra = {r".*down_proj": {"bits": 8, "group_size": 64}}
    loaded = jqx.load(changed(tmp_path, "own_mixed", extra_config=extra))
    assert loaded["model.layers.0.mlp.down_proj.weight"].qtype == np.int8
    assert loaded["model.layers.0.self_attn.q_proj.weight"].qtype != np.int8
