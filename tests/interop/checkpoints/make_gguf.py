"""Writes the fixture `gguf-0.19.0`: a file of the package `gguf`, and what it reads from it.

    pip install gguf==0.19.0
    python make_gguf.py gguf-0.19.0

Tensors whose type the package quantizes have weights of chance; those of K-quants, which it only
reads, have bytes of chance, as has one of each type beside (`<type>.bytes`): every scale, infinite
and NaN among them.
"""

import pathlib
import sys

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
READ = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SHAPE = (3, 512)

folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
rng = np.random.default_rng(0)
writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
writer.add_name("fixture")
writer.add_block_count(2)
writer.add_rope_freq_base(10000.0)
writer.add_tokenizer_model("gpt2")
writer.add_token_list(["a", "b", "<end>"])
writer.add_token_types([1, 1, 3])
writer.add_bool("tokenizer.ggml.add_bos_token", False)
floats = {}


def add(name, raw, kind):
    writer.add_tensor(name, raw, raw_dtype=kind)
    with np.errstate(all="ignore"):
        floats[name] = gguf.quants.dequantize(raw, kind)


for name in (*QUANTIZED, *READ):
    kind = GGMLQuantizationType[name]
    size, length = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (SHAPE[0], SHAPE[1] // size * length), np.uint8)
    if name == "MXFP4":  # 255 is NaN of the standard, and 2**128 of ggml
        raw[:, ::length] = raw[:, ::length] % 255
    add(f"{name}.bytes", raw, kind)
    if name in QUANTIZED:
        add(name, gguf.quants.quantize(rng.normal(size=SHAPE).astype(np.float32), kind), kind)
for name, dtype in (("F32", np.float32), ("F16", np.float16)):
    x = rng.normal(size=(2, 3, 4)).astype(dtype)
    writer.add_tensor(name, x)
    floats[name] = x
kind = GGMLQuantizationType.BF16
add("BF16", gguf.quants.quantize(rng.normal(size=(2, 4)).astype(np.float32), kind), kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
np.savez_compressed(folder / "floats.npz", **floats)
