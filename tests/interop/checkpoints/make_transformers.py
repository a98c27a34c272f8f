"""Makes the checkpoints of Hugging Face that tests read, with transformers: fp8 in blocks, mxfp4.

    pip install transformers==5.24.0 torch safetensors
    python make_transformers.py

fp8 is quantized by the package, mxfp4 has codes of chance. `expected.npz` has what it makes of
them, in float32; of experts in mxfp4 with the last two axes swapped, as it has them.
"""

import json
import pathlib
import shutil
import types

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = pathlib.Path(__file__).parent / f"transformers-{transformers.__version__}"


def write(name, tensors, said, expected):
    path = FOLDER / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    text = json.dumps({"quantization_config": said}, indent=1, default=list)
    (path / "config.json").write_text(text)
    np.savez_compressed(path / "expected.npz", **{k: x.numpy() for k, x in expected.items()})


def fp8(name, block, shapes, fmt):
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=fmt)
    quantize = Fp8Quantize(types.SimpleNamespace(quantization_config=config))
    tensors, expected = {"norm.weight": torch.ones(4)}, {}
    for key, shape in shapes.items():
        weight = torch.randn(shape) * torch.rand(shape).exp()
        codes, scales = quantize._quantize_one(key, weight).items()
        tensors |= dict([codes, scales])
        made = _dequantize_fp8_weight(codes[1], scales[1], block, torch.float32)
        expected[key] = made
    write(name, tensors, config.to_dict(), expected)


def main():
    torch.manual_seed(0)
    shapes = {"up.weight": (64, 128), "experts.gate_up_proj": (2, 32, 64)}
    fp8("fp8", (16, 32), shapes, "float")
    fp8("fp8_ue8m0", (16, 32), shapes, "ue8m0")
    fp8("fp8_tensor", None, {"up.weight": (64, 128)}, "float")
    blocks = torch.randint(0, 256, (2, 32, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 32, 3), dtype=torch.uint8)
    name = "mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, "norm.weight": torch.ones(4)}
    floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    write("mxfp4", tensors, {"quant_method": "mxfp4"}, {name: floats.contiguous()})


if __name__ == "__main__":
    main()
