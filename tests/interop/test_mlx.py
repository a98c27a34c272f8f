"""Checkpoints of MLX: those of the package, and what is written."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import write
from jqx.numerics import mxfp4, mxfp8_e4m3, nvfp4

from .raw_folders import CHECKPOINTS, write_folder
from .test_write import floats, integers, tree_of

FOLDER = CHECKPOINTS / "mlx-0.32.4"


def test_every_mode_is_read_to_the_floats_of_the_package():
    expected = np.load(FOLDER / "expected.npz")
    with jqx.interop.read(FOLDER, dtype=jnp.float32) as archive:
        assert archive.format == "mlx" and {*archive.paths} == {*expected}
        for path in archive.paths:
            leaf, spec = archive.read(path), archive.spec(path)
            assert jax.tree.structure(leaf) == jax.tree.structure(spec)
            np.testing.assert_array_equal(leaf.dequantize(), expected[path], err_msg=path)
        line = archive.read("line.weight")
    assert (np.asarray(line.scale) < 0).all() and line.offset == 1
    np.testing.assert_array_equal(line.codes[0, :8], [14, 14, 14, 13, 13, 13, 13, 12])


def affine(bits, size=32, dtype=jnp.float32, shape=(8, 128)):
    q = integers(bits, block=size, shape=shape, signed=False)
    rng = np.random.default_rng(0)
    offset = jnp.asarray(rng.normal(size=q.scale.shape), dtype)
    return dataclasses.replace(q, scale=q.scale.astype(dtype), offset=offset, dtype=dtype)


MANY = {
    **{f"affine{bits}": affine(bits) for bits in (2, 3, 4, 5, 6, 8)},
    "half": affine(4, 64, jnp.float16),
    "brain": affine(4, 64, jnp.bfloat16),
    "packed": affine(4, 128).pack(),
    "experts": affine(4, shape=(2, 8, 64)),
    "symmetric": integers(4, shape=(8, 96)),
    "zeros": integers(4, shape=(8, 96), zeros=True),
    "mxfp4": floats(jqx.QSpec(mxfp4, jqx.per_block({0: 1, 1: 32}))),
    "mxfp8": floats(jqx.QSpec(mxfp8_e4m3, jqx.per_block({0: 1, 1: 32}))),
}


def test_what_is_written_is_read_back(tmp_path):
    tree = {**tree_of(MANY), "head.weight": jnp.ones((4, 4))}
    write(tmp_path / "m", tree, "mlx", config={"model_type": "mine"})
    with jqx.interop.read(tmp_path / "m", dtype=jnp.float32) as archive:
        assert archive.config["quantization"]["head"] is False
        for name, leaf in MANY.items():
            found = archive.read(f"{name}.weight")
            real = leaf.astype(jnp.float32).dequantize()
            np.testing.assert_array_equal(found.dequantize(), real, err_msg=name)


def test_nvfp4_has_no_factor_of_the_tensor(tmp_path):
    q = floats(jqx.QSpec(nvfp4, jqx.per_block({0: 1, 1: 16})))
    with pytest.raises(ValueError, match="whose scales have the factor 1"):
        write(tmp_path / "m", tree_of({"a": q}), "mlx", config={})
    one = dataclasses.replace(q.scale, scale=jnp.ones((1, 1)))
    q = dataclasses.replace(q, scale=one)
    write(tmp_path / "m", tree_of({"a": q}), "mlx", config={})
    found = jqx.load(str(tmp_path / "m"), dtype=jnp.float32)["a.weight"]
    np.testing.assert_array_equal(found.dequantize(), q.dequantize())


INEXACT = QTensor(
    jnp.zeros((4, 32), jnp.uint8),
    jnp.full((4, 1), 0.1),
    jnp.full((4, 1), 77, jnp.uint8),
    qtype=jnp.uint8,
)
UNFIT = {
    "zero points": (INEXACT, "that float32 holds"),
    "a group": (affine(4, 16), "in groups of 32, 64, 128"),
    "bits": (integers(7, shape=(8, 96)), "integers of 2, 3, 4, 5, 6, 8 bits"),
    "an order": (integers(4, shape=(8, 96), order=True), "inputs in order"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_it_cannot_hold_is_an_error_that_names_the_tensor(tmp_path, case):
    leaf, words = UNFIT[case]
    with pytest.raises(ValueError, match=words) as caught:
        write(tmp_path / "m", tree_of({"layer": leaf}), "mlx", config={})
    assert "'layer.weight'" in str(caught.value)


LAYER = {
    "m.weight": np.zeros((4, 8), np.uint32),
    "m.scales": np.ones((4, 1), np.float32),
    "m.biases": np.ones((4, 1), np.float32),
}
WRONG = {
    "bits": ({}, {"bits": 7}, "bits == 7"),
    "a group": ({}, {"group_size": 48}, "does not hold whole groups"),
    "more groups": ({}, {"group_size": 32}, r"'m.scales' .* its layer needs"),
    "no minimums": ({"m.biases": None}, {}, "'m.biases' is missing"),
    "minimums": ({"m.biases": np.ones((4, 1), np.float16)}, {}, "'m.biases' .* its layer needs"),
    "a mode": ({}, {"mode": "mine"}, "mode == 'mine'"),
    "groups of mxfp4": ({}, {"mode": "mxfp4", "group_size": 64}, "32, of mxfp4"),
    "a layer in float": ({}, {"m": False}, "does not belong to a layer"),
    "words": ({"m.weight": np.zeros((4, 8), np.int32)}, {}, "'m.weight' .* its layer needs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_its_config_is_refused(tmp_path, case):
    tensors, fields, words = WRONG[case]
    tensors = {name: x for name, x in {**LAYER, **tensors}.items() if x is not None}
    config = {"quantization": {"group_size": 64, "bits": 4, **fields}}
    with pytest.raises(ValueError, match=words) as caught:
        jqx.load(str(write_folder(tmp_path, tensors, config)))
    assert "fix:" in str(caught.value)


@pytest.mark.slow
def test_the_package_reads_what_is_written(tmp_path):
    mx = pytest.importorskip("mlx.core")
    write(tmp_path / "m", tree_of(MANY), "mlx", config={})
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization"]
    tensors = mx.load(str(tmp_path / "m" / "model.safetensors"))
    for name, leaf in MANY.items():
        own = {"group_size": said["group_size"], "bits": said["bits"], "mode": said["mode"]}
        parts = [tensors.get(f"{name}.{end}") for end in ("weight", "scales", "biases")]
        wide = [
            x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
            for x in parts
            if x is not None
        ]
        found = mx.dequantize(*wide, **{**own, **said.get(name, {})})
        real = leaf.astype(jnp.float32).dequantize()
        np.testing.assert_array_equal(np.array(found.astype(mx.float32)), real, err_msg=name)
