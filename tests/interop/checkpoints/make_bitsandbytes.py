"""Makes the checkpoint of bitsandbytes that tests read, with the package itself, on a CPU.

    pip install bitsandbytes==0.50.2 torch safetensors
    python make_bitsandbytes.py

`expected.npz` has what `dequantize_4bit` makes of each weight, in float32.
"""

import json
import pathlib

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent / f"bitsandbytes-{bitsandbytes.__version__}"


def main():
    torch.manual_seed(0)
    tensors, expected = {"norm.weight": torch.ones(64)}, {}
    shapes = {"plain": (64, 128), "long": (2, 32768), "many": (300, 128), "across": (40, 192)}
    for kind in ("nf4", "fp4"):
        for name, shape in shapes.items():
            for nested in (False, True):
                if (nested, kind) == (True, "fp4") and name != "plain":
                    continue
                if not nested and name != "plain":
                    continue
                path = f"{kind}_{name}{'_nested' * nested}.weight"
                codes, state = quantize_4bit(
                    torch.randn(shape), blocksize=64, quant_type=kind, compress_statistics=nested
                )
                tensors[path] = codes
                tensors |= {f"{path}.{key}": x for key, x in state.as_dict(packed=True).items()}
                expected[path] = dequantize_4bit(codes, state).float().numpy()
    FOLDER.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, FOLDER / "model.safetensors")
    np.savez_compressed(FOLDER / "expected.npz", **expected)
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (FOLDER / "config.json").write_text(json.dumps({"quantization_config": said}, indent=1))


if __name__ == "__main__":
    main()
