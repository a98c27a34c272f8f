"""Checkpoints of bitsandbytes: those of the package, and what is written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import write
from jqx.numerics import nf4

from .raw_folders import CHECKPOINTS, write_folder
from .test_write import floats, integers, tree_of

FOLDER = CHECKPOINTS / "bitsandbytes-0.50.2"


def test_every_weight_is_read_to_the_floats_of_the_package():
    expected = np.load(FOLDER / "expected.npz")
    with jqx.interop.read(FOLDER) as archive:
        assert archive.format == "bitsandbytes" and {*archive.paths} == {*expected, "norm.weight"}
        for path in expected:
            leaf = archive.read(path)
            assert jax.tree.structure(leaf) == jax.tree.structure(archive.spec(path))
            np.testing.assert_array_equal(leaf.dequantize(), expected[path], err_msg=path)
            nested = path.endswith("nested.weight") and "across" not in path
            assert isinstance(leaf.scale, QTensor) == nested


def test_a_file_tells_how_it_is_read():
    with jqx.interop.read(FOLDER / "model.safetensors") as archive:
        assert archive.format == "bitsandbytes"
        assert archive.spec("nf4_plain.weight").qtype == nf4


def test_what_is_written_is_read_back(tmp_path):
    spec = jqx.QSpec(nf4, jqx.per_block({0: 1, 1: 64}))
    kinds = {"a": floats(spec, (8, 128)), "b": floats(spec, (4, 64)).pack()}
    write(tmp_path / "m", {**tree_of(kinds), "n.weight": jnp.ones(4)}, "bitsandbytes", config={})
    loaded = jqx.load(str(tmp_path / "m"))
    for name, leaf in kinds.items():
        np.testing.assert_array_equal(loaded[f"{name}.weight"].codes, leaf.codes)
        np.testing.assert_array_equal(loaded[f"{name}.weight"].dequantize(), leaf.dequantize())


@pytest.mark.parametrize(
    "leaf",
    [
        integers(4),
        floats(jqx.QSpec(nf4, jqx.per_block({0: 1, 1: 48})), (4, 96)),
        floats(jqx.QSpec(nf4, jqx.per_block({0: 2, 1: 32})), (4, 96)),
    ],
)
def test_what_it_cannot_hold_is_an_error_that_names_the_tensor(tmp_path, leaf):
    with pytest.raises(ValueError, match=r"cannot hold the tensor 'a\.weight'"):
        write(tmp_path / "m", tree_of({"a": leaf}), "bitsandbytes", config={})


def layer(state=None, **tensors):
    """A weight [2, 64] of nf4, whose state says what a test changes."""
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 64]}
    text = json.dumps({**said, **(state or {})}).encode()
    parts = {
        "": np.zeros((64, 1), np.uint8),
        ".absmax": np.ones(2, np.float32),
        ".quant_map": np.asarray(nf4.entries, np.float32),
        ".quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8),
        **{f".{name}": x for name, x in tensors.items()},
    }
    return {f"m.weight{end}": x for end, x in parts.items() if x is not None}


WRONG = {
    "a shape": (layer({"shape": [2, 2**62]}), "'m.weight' .* its layer needs"),
    "a shape of one": (layer({"shape": [128]}), "two sizes"),
    "rows": (layer({"blocksize": 128}), "has blocks of 128 that cross rows"),
    "no size": (layer({"blocksize": 0}), "blocksize == 0"),
    "another format": (layer({"quant_type": "fp4"}), "quant_type == 'fp4'"),
    "a dtype": (layer({"dtype": "int8"}), "dtype == 'int8'"),
    "no scales": (layer(absmax=None), "'m.weight.absmax' is missing"),
    "too few scales": (
        layer(absmax=np.ones(1, np.float32)),
        "'m.weight.absmax' .* its layer needs",
    ),
    "no state": (layer(nested_absmax=np.ones(1, np.float32), absmax=np.ones(2, np.uint8)), "nest"),
    "a table": (layer(quant_map=np.full(16, np.nan, np.float32)), "holds 1 numbers, not 16 finite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_itself_is_refused(tmp_path, case):
    tensors, words = WRONG[case]
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ValueError, match=words) as caught:
        jqx.load(str(write_folder(tmp_path, tensors, config)))
    assert "fix:" in str(caught.value)


def test_a_state_that_is_no_json_is_refused(tmp_path):
    tensors = layer()
    tensors["m.weight.quant_state.bitsandbytes__nf4"] = np.full(9, 255, np.uint8)
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ValueError, match="is not JSON"):
        jqx.load(str(write_folder(tmp_path, tensors, config)))
