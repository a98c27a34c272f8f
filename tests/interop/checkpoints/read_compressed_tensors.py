"""Reads a folder with the package compressed-tensors: floats of each weight, to an npz file.

pip install compressed-tensors
python read_compressed_tensors.py FOLDER OUT.npz
"""

import json
import pathlib
import sys

import numpy as np
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file


def main(folder, out):
    folder = pathlib.Path(folder)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    found = {}
    for group in said["config_groups"].values():
        form = group.pop("format")
        scheme = QuantizationScheme(**group)
        compressor = BaseCompressor.get_value_from_registry(form)
        for name in group["targets"]:
            state = {
                key.removeprefix(f"{name}."): x
                for key, x in tensors.items()
                if key.startswith(f"{name}.")
            }
            if len(state.get("weight", state.get("weight_packed")).shape) == 2:
                found[name] = compressor.decompress(state, scheme)["weight"].float().numpy()
                continue
            stacked = []
            for i in range(len(state["weight_scale"])):
                part = {key: x[i] for key, x in state.items() if key != "weight_shape"}
                part["weight_shape"] = state["weight_shape"][1:]
                stacked.append(compressor.decompress(part, scheme)["weight"].float().numpy())
            found[name] = np.stack(stacked)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
