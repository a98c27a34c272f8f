"""Checkpoints that packages wrote are read to their floats; packages read what is written."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import write
from jqx.numerics import nf4

from .files import CHECKPOINTS
from .test_write import compressed_leaves, of_mlx
from .trees import blocks_of, floats, integers, tree_of

COMPRESSED = CHECKPOINTS / "compressed-tensors-0.20.0"
AUTO_ROUND = CHECKPOINTS / "auto-round-0.16.1"
BITSANDBYTES = CHECKPOINTS / "bitsandbytes-0.50.2"
TRANSFORMERS = CHECKPOINTS / "transformers-5.24.0"


def structure(leaf):
    return jax.tree.structure(leaf), [(x.shape, x.dtype) for x in jax.tree.leaves(leaf)]


def test_every_scheme_of_compressed_tensors_is_read_to_the_codes_and_floats_of_the_package():
    expected = np.load(COMPRESSED / "expected.npz")
    with jqx.interop.read(COMPRESSED) as archive:
        assert archive.format == "compressed-tensors"
        leaves = {path: archive.read(path) for path in archive.paths}
        for path, leaf in leaves.items():
            assert structure(leaf) == structure(archive.spec(path))
            viewed = archive.view(path)
            for a, b in zip(jax.tree.leaves(leaf), jax.tree.leaves(viewed), strict=True):
                np.testing.assert_array_equal(np.asarray(a), b)
    assert leaves.pop("norm.weight").shape == (64,)
    assert {*leaves} == {name for name in expected if name.endswith(".weight")}
    real = {path: leaf.dequantize().astype(jnp.float32) for path, leaf in leaves.items()}
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(real[path], expected[path], strict=True, err_msg=path)
        codes = path.replace(".weight", ".codes")
        if codes in expected:
            np.testing.assert_array_equal(leaf.codes, expected[codes])


def test_weights_take_their_real_size():
    with jqx.interop.read(COMPRESSED) as archive:
        for bits in range(2, 8):
            assert archive.spec(f"int{bits}_sym.weight").values.size == 64 * 128 * bits // 8


def test_load_reads_a_folder_whole_and_takes_a_dtype():
    loaded = jqx.load(str(COMPRESSED), dtype=jnp.float32)
    assert all(leaf.dtype == jnp.float32 for leaf in loaded.values())
    assert isinstance(loaded["f8.weight"], jqx.QTensor)


def test_tensors_as_they_are():
    with jqx.interop.Archive(COMPRESSED, config={}) as archive:
        assert archive.format == "safetensors"
        assert archive.read("int4_sym.weight_packed").dtype == jnp.int32


FORMATS = {"gptq": "gptq", "awq": "awq", "own": "auto-round"}


@pytest.mark.parametrize("case", sorted(path.name for path in AUTO_ROUND.iterdir()))
def test_weights_are_those_of_auto_round(case):
    expected = np.load(AUTO_ROUND / case / "expected.npz")
    with jqx.interop.read(AUTO_ROUND / case) as archive:
        assert archive.format == FORMATS[case.partition("_")[0]]
        for name in expected:
            q = archive.read(name)
            mixed = case.endswith("mixed") and "down_proj" in name
            bits = 8 if mixed else next((int(x) for x in case.split("_") if x.isdigit()), 4)
            assert jqx.numerics.format_of(q.qtype).bits == bits
            assert q.dtype == np.float16
            np.testing.assert_array_equal(q.dequantize(), expected[name])
        assert archive.paths[-1] == "model.norm.weight"


def test_every_weight_is_read_to_the_floats_of_bitsandbytes():
    expected = np.load(BITSANDBYTES / "expected.npz")
    with jqx.interop.read(BITSANDBYTES) as archive:
        assert archive.format == "bitsandbytes" and {*archive.paths} == {*expected, "norm.weight"}
        for path in expected:
            leaf = archive.read(path)
            assert jax.tree.structure(leaf) == jax.tree.structure(archive.spec(path))
            np.testing.assert_array_equal(leaf.dequantize(), expected[path], err_msg=path)
            nested = path.endswith("nested.weight") and "across" not in path
            assert isinstance(leaf.scale, QTensor) == nested


def test_a_file_of_bitsandbytes_tells_how_it_is_read():
    with jqx.interop.read(BITSANDBYTES / "model.safetensors") as archive:
        assert archive.format == "bitsandbytes"
        assert archive.spec("nf4_plain.weight").qtype == nf4


def test_every_mode_of_mlx_is_read_to_the_floats_of_the_package():
    expected = np.load(CHECKPOINTS / "mlx-0.32.4" / "expected.npz")
    with jqx.interop.read(CHECKPOINTS / "mlx-0.32.4", dtype=jnp.float32) as archive:
        assert archive.format == "mlx" and {*archive.paths} == {*expected}
        for path in archive.paths:
            leaf, spec = archive.read(path), archive.spec(path)
            assert jax.tree.structure(leaf) == jax.tree.structure(spec)
            np.testing.assert_array_equal(leaf.dequantize(), expected[path], err_msg=path)
        line = archive.read("line.weight")
    assert (np.asarray(line.scale) < 0).all() and line.offset == 1
    np.testing.assert_array_equal(line.codes[0, :8], [14, 14, 14, 13, 13, 13, 13, 12])


@pytest.mark.parametrize("case", sorted(path.name for path in TRANSFORMERS.iterdir()))
def test_weights_are_those_of_transformers(case):
    expected = np.load(TRANSFORMERS / case / "expected.npz")
    with jqx.interop.read(TRANSFORMERS / case) as archive:
        assert archive.format == case.partition("_")[0]
        assert {*archive.paths} == {*expected, "norm.weight"}
        for name in expected:
            q = archive.read(name)
            assert isinstance(q, QTensor) and q.dtype == jnp.float32
            wanted = expected[name]
            wanted = wanted.swapaxes(1, 2) if case == "mxfp4" else wanted
            np.testing.assert_array_equal(q.dequantize(), wanted)


# What is written, read by the packages that have the formats: to the same floats.
#
#     pip install auto-round==0.16.1 transformers torch bitsandbytes==0.50.2 mlx compressed-tensors
#
# Those that are not installed are skipped; gguf is in its own file.


FP8_BLOCKS = jqx.QSpec("float8_e4m3fn", jqx.per_block({0: 16, 1: 32}))


def written(tmp_path, leaves, form):
    """Writes weights, and returns its tensors, of torch, by weight, and its config."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    write(tmp_path / "m", tree_of(leaves), form, config={})
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    parts = {
        name: {
            key.removeprefix(f"{name}."): x
            for key, x in tensors.items()
            if key.startswith(f"{name}.")
        }
        for name in leaves
    }
    return parts, config


@pytest.mark.slow
def test_auto_round_reads_gptq(tmp_path):
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("auto_round_extension.torch.qlinear_torch")
    leaves = {
        f"{kind}{bits}": integers(bits, shape=(64, 96), **more)
        for bits in (2, 3, 4, 8)
        for kind, more in {
            "sym": {},
            "asym": {"zeros": True},
            "order": {"zeros": True, "order": True},
        }.items()
    }
    parts, config = written(tmp_path, leaves, "gptq")
    assert config["checkpoint_format"] == "gptq_v2"
    for name, leaf in leaves.items():
        bits = jqx.numerics.format_of(leaf.qtype).bits
        linear = layers.QuantLinear(bits, 32, 96, 64, bias=False, g_idx=True)
        linear.load_state_dict(parts[name])
        real = linear(torch.eye(96)).detach().half().T.numpy()
        np.testing.assert_array_equal(real, leaf.dequantize(), err_msg=name)


@pytest.mark.slow
def test_auto_round_reads_awq(tmp_path):
    utils = pytest.importorskip("auto_round.export.export_to_awq.utils")
    leaves = {"a": integers(4, shape=(64, 96)), "b": integers(4, shape=(64, 96), zeros=True)}
    parts_of, config = written(tmp_path, leaves, "awq")
    for name, leaf in leaves.items():
        parts = [parts_of[name][end] for end in ("qweight", "qzeros", "scales")]
        real = utils.dequantize_gemm(*parts, config["bits"], config["group_size"])
        np.testing.assert_array_equal(real.T.numpy(), leaf.dequantize(), err_msg=name)


@pytest.mark.slow
def test_transformers_reads_fp8(tmp_path):
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    leaves = {"a": floats(FP8_BLOCKS, (64, 96)), "b": floats(FP8_BLOCKS, (16, 64))}
    parts, config = written(tmp_path, leaves, "fp8")
    for name, leaf in leaves.items():
        codes, scales = parts[name]["weight"], parts[name]["weight_scale_inv"]
        size = config["weight_block_size"]
        real = fp8._dequantize_fp8_weight(codes, scales, size, torch.float32)
        np.testing.assert_array_equal(real.numpy(), leaf.dequantize(), err_msg=name)


@pytest.mark.slow
def test_bitsandbytes_reads_nf4(tmp_path):
    package = pytest.importorskip("bitsandbytes.functional")
    leaves = {f"in blocks of {size}": blocks_of(nf4, size, (8, 256)) for size in (64, 128)}
    parts_of, _ = written(tmp_path, leaves, "bitsandbytes")
    for name, leaf in leaves.items():
        parts = dict(parts_of[name])
        codes = parts.pop("weight")
        state = package.QuantState.from_dict(parts, device="cpu")
        real = package.dequantize_4bit(codes, state)
        np.testing.assert_array_equal(real.float().numpy(), leaf.dequantize(), err_msg=name)


@pytest.mark.slow
def test_mlx_reads_what_is_written(tmp_path):
    mx = pytest.importorskip("mlx.core")
    write(tmp_path / "m", tree_of(of_mlx()), "mlx", config={})
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization"]
    tensors = mx.load(str(tmp_path / "m" / "model.safetensors"))
    for name, leaf in of_mlx().items():
        defaults = {
            "group_size": config["group_size"],
            "bits": config["bits"],
            "mode": config["mode"],
        }
        parts = [tensors.get(f"{name}.{end}") for end in ("weight", "scales", "biases")]
        wide = [
            x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
            for x in parts
            if x is not None
        ]
        y = mx.dequantize(*wide, **{**defaults, **config.get(name, {})})
        real = leaf.astype(jnp.float32).dequantize()
        np.testing.assert_array_equal(np.array(y.astype(mx.float32)), real, err_msg=name)


@pytest.mark.slow
def test_compressed_tensors_reads_what_is_written(tmp_path):
    pytest.importorskip("compressed_tensors")
    program = CHECKPOINTS / "read_compressed_tensors.py"
    leaves = {name: q for name, q in compressed_leaves().items() if not name.startswith("order")}
    leaves.pop("f8 ragged")
    write(tmp_path / "m", tree_of(leaves), "compressed-tensors", config={})
    out = tmp_path / "out.npz"
    subprocess.run([sys.executable, str(program), str(tmp_path / "m"), str(out)], check=True)
    reals = np.load(out)
    loaded = jqx.load(str(tmp_path / "m"))
    for name in leaves:
        expected = loaded[f"{name}.weight"].dequantize().astype(jnp.float32)
        np.testing.assert_array_equal(reals[name], expected, err_msg=name)
