"""Makes the checkpoint of compressed-tensors that tests read, with the package itself.

    pip install compressed-tensors==0.20.0 numpy
    python make_compressed_tensors.py

Every layer is of another scheme; the config has a group for each. `expected.npz` has the weights
that the package makes of its tensors, in float32, and the codes that it packed.
"""

import json
import pathlib

import compressed_tensors
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent / f"compressed-tensors-{compressed_tensors.__version__}"


def scales(weight, args):
    """Returns scale and zero point of a weight, by minimum and maximum."""
    rows, columns = weight.shape
    block = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
        "block": args.block_structure,
    }[args.strategy]
    parts = weight.reshape(rows // block[0], block[0], columns // block[1], block[1])
    high, low = parts.amax((1, 3)).clamp(min=0), parts.amin((1, 3)).clamp(max=0)
    largest = torch.maximum(high, -low)
    if args.type == "float":
        return largest / {8: 448.0, 4: 6.0}[args.num_bits], None
    half = 2 ** (args.num_bits - 1)
    if args.symmetric:
        return largest / (half - 0.5), None
    scale = (high - low) / (2 * half - 1)
    zero_point = (torch.round(-low / scale) - half).clamp(-half, half - 1)
    return scale, zero_point.to(torch.int8)


def layer(name, form, shape, dtype, **fields):
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=[name], weights=args, format=form)
    weight = torch.randn(shape) * 0.1
    scale, zero_point = scales(weight, args)
    state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype)}
    if form.startswith("nvfp4"):
        state["weight_global_scale"] = 448.0 * 6.0 / weight.abs().max().reshape(1)
        state["weight_scale"] = (
            (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        )
    if form.startswith("mx"):
        state["weight_scale"] = 2.0 ** torch.ceil(torch.log2(scale))
    if args.strategy == "tensor":
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if zero_point is not None:
        state["weight_zero_point"] = zero_point
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(dict(state), scheme)
    real = compressor.decompress(dict(packed), scheme)["weight"]
    expected = {f"{name}.weight": real.float().numpy()}
    if args.type == "int":
        codes = quantize(state["weight"], state["weight_scale"], zero_point, args, torch.int8)
        expected[f"{name}.codes"] = codes.numpy()
    group = json.loads(scheme.model_dump_json())
    tensors = {f"{name}.{key}": x.contiguous() for key, x in packed.items()}
    return tensors, expected, {**group, "format": form}


def main():
    torch.manual_seed(0)
    b16, f16, f32, shape = torch.bfloat16, torch.float16, torch.float32, (64, 128)
    packed, group = ("pack-quantized", shape, b16), dict(strategy="group", group_size=32)
    integers = [
        (f"int{bits}_{kind}", *packed, dict(num_bits=bits, symmetric=kind == "sym", **group))
        for bits in range(2, 9)
        for kind in ("sym", "asym")
    ]
    channel, block = dict(strategy="channel"), dict(strategy="block", block_structure=[16, 32])
    floats, nibbles = dict(type="float", num_bits=8), dict(type="float", num_bits=4)
    sixteen = dict(strategy="tensor_group", group_size=16)
    powers = dict(**floats, **group, scale_dtype=torch.uint8)
    layers = [
        *integers,
        ("odd", "pack-quantized", (9, 96), f16, dict(num_bits=4, symmetric=False, **group)),
        ("rows", "pack-quantized", (9, 100), f32, dict(num_bits=3, symmetric=False, **channel)),
        ("w8", "int-quantized", shape, f32, dict(num_bits=8, **channel)),
        ("w8_asym", "int-quantized", shape, b16, dict(num_bits=8, symmetric=False, **channel)),
        ("w8_tensor", "int-quantized", shape, f16, dict(num_bits=8, strategy="tensor")),
        ("f8", "float-quantized", shape, b16, dict(**floats, **channel)),
        ("f8_tensor", "float-quantized", shape, f32, dict(**floats, strategy="tensor")),
        ("f8_block", "float-quantized", shape, f32, dict(**floats, **block)),
        ("nv4", "nvfp4-pack-quantized", shape, f32, dict(**nibbles, **sixteen)),
        ("mx4", "mxfp4-pack-quantized", shape, f32, dict(**nibbles, **group)),
        ("mx8", "mxfp8-quantized", shape, f32, powers),
    ]
    tensors, expected, groups = {"norm.weight": torch.ones(64)}, {}, {}
    for name, form, size, dtype, fields in layers:
        made, known, groups[name] = layer(name, form, size, dtype, **fields)
        tensors |= made
        expected |= known
    FOLDER.mkdir(exist_ok=True)
    save_file(tensors, FOLDER / "model.safetensors", {"format": "pt"})
    np.savez_compressed(FOLDER / "expected.npz", **expected)
    said = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": groups,
    }
    (FOLDER / "config.json").write_text(json.dumps({"quantization_config": said}, indent=1))


if __name__ == "__main__":
    main()
