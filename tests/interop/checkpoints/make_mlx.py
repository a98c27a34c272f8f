"""Makes the checkpoint of MLX that tests read, with the package itself.

    pip install mlx[cpu]==0.32.4 safetensors
    python make_mlx.py

Every layer is of another mode; `expected.npz` has what `mlx.core.dequantize` makes of it, in
float32.
"""

import json
import pathlib
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

FOLDER = pathlib.Path(__file__).parent / f"mlx-{version('mlx')}"


def main():
    rng = np.random.default_rng(0)
    said, tensors, expected = {"group_size": 64, "bits": 4, "mode": "affine"}, {}, {}
    modes = [("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 128)]
    modes += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
    for mode, bits, size in modes:
        name = f"{mode}{bits}_{size}"
        weight = mx.array(rng.normal(size=(64, 128)).astype(np.float32))
        options = {"group_size": size, "bits": bits, "mode": mode}
        codes, *rest = mx.quantize(weight, **options)
        parts = dict(zip(("scales", "biases"), rest, strict=False))
        options |= {} if mode == "affine" else {"dtype": mx.float32}
        real = mx.dequantize(codes, *rest, **options)
        tensors[f"{name}.weight"] = np.array(codes)
        tensors |= {f"{name}.{key}": np.array(x) for key, x in parts.items()}
        expected[f"{name}.weight"] = np.array(real.astype(mx.float32))
        said[name] = {"group_size": size, "bits": bits, "mode": mode}
    line = mx.quantize(mx.array(np.linspace(-1, 1, 64, dtype=np.float32)[None]), 64, 4)
    for key, x in zip(("weight", "scales", "biases"), line, strict=True):
        tensors[f"line.{key}"] = np.array(x)
    expected["line.weight"] = np.array(mx.dequantize(*line, 64, 4))
    FOLDER.mkdir(exist_ok=True)
    save_file(tensors, FOLDER / "model.safetensors", {"format": "mlx"})
    np.savez_compressed(FOLDER / "expected.npz", **expected)
    (FOLDER / "config.json").write_text(json.dumps({"quantization": said}, indent=1))


if __name__ == "__main__":
    main()
