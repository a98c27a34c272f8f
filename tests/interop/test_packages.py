"""What is written in formats of others, read by the packages that have them: to the same floats.

    pip install auto-round==0.16.1 transformers torch bitsandbytes==0.50.2

Those that are not installed are skipped. compressed-tensors, gguf and mlx are in their own files.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.interop import write
from jqx.numerics import nf4

from .test_write import floats, integers, tree_of

pytestmark = pytest.mark.slow
BLOCKS = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 16, 1: 32}))


def written(tmp_path, kinds, form):
    """Writes weights, and returns its tensors, of torch, by weight, and its config."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    write(tmp_path / "m", tree_of(kinds), form, config={})
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    own = {
        name: {
            key.removeprefix(f"{name}."): x
            for key, x in tensors.items()
            if key.startswith(f"{name}.")
        }
        for name in kinds
    }
    return own, said


def test_auto_round_reads_gptq(tmp_path):
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("auto_round_extension.torch.qlinear_torch")
    kinds = {
        f"{kind}{bits}": integers(bits, shape=(64, 96), **more)
        for bits in (2, 3, 4, 8)
        for kind, more in {
            "sym": {},
            "asym": {"zeros": True},
            "order": {"zeros": True, "order": True},
        }.items()
    }
    own, said = written(tmp_path, kinds, "gptq")
    assert said["checkpoint_format"] == "gptq_v2"
    for name, leaf in kinds.items():
        bits = jqx.numerics.format_of(leaf.qtype).bits
        linear = layers.QuantLinear(bits, 32, 96, 64, bias=False, g_idx=True)
        linear.load_state_dict(own[name])
        found = linear(torch.eye(96)).detach().half().T.numpy()
        np.testing.assert_array_equal(found, leaf.dequantize(), err_msg=name)


def test_auto_round_reads_awq(tmp_path):
    utils = pytest.importorskip("auto_round.export.export_to_awq.utils")
    kinds = {"a": integers(4, shape=(64, 96)), "b": integers(4, shape=(64, 96), zeros=True)}
    own, said = written(tmp_path, kinds, "awq")
    for name, leaf in kinds.items():
        parts = [own[name][end] for end in ("qweight", "qzeros", "scales")]
        found = utils.dequantize_gemm(*parts, said["bits"], said["group_size"])
        np.testing.assert_array_equal(found.T.numpy(), leaf.dequantize(), err_msg=name)


def test_transformers_reads_fp8(tmp_path):
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    kinds = {"a": floats(BLOCKS, (64, 96)), "b": floats(BLOCKS, (16, 64))}
    own, said = written(tmp_path, kinds, "fp8")
    for name, leaf in kinds.items():
        codes, scales = own[name]["weight"], own[name]["weight_scale_inv"]
        size = said["weight_block_size"]
        found = fp8._dequantize_fp8_weight(codes, scales, size, torch.float32)
        np.testing.assert_array_equal(found.numpy(), leaf.dequantize(), err_msg=name)


def test_bitsandbytes_reads_nf4(tmp_path):
    package = pytest.importorskip("bitsandbytes.functional")
    kinds = {
        f"in blocks of {size}": floats(jqx.QSpec(nf4, jqx.per_block({0: 1, 1: size})), (8, 256))
        for size in (64, 128)
    }
    own, _ = written(tmp_path, kinds, "bitsandbytes")
    for name, leaf in kinds.items():
        parts = dict(own[name])
        codes = parts.pop("weight")
        state = package.QuantState.from_dict(parts, device="cpu")
        found = package.dequantize_4bit(codes, state)
        np.testing.assert_array_equal(found.float().numpy(), leaf.dequantize(), err_msg=name)
