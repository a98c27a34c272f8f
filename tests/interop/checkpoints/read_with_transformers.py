"""Loads a folder with transformers on a CPU, in float32, and compares its logits with given ones.

pip install transformers compressed-tensors accelerate torch
python read_with_transformers.py FOLDER LOGITS.npz

LOGITS.npz has `tokens` and `logits`, as `test_smollm2.py` writes them. Weights are decompressed as
they are loaded: with packed zero points compressed-tensors 0.20.0 cannot keep them compressed, for
it expects zero points of another shape than it writes.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

folder, file = sys.argv[1:]
known = np.load(file)
config = CompressedTensorsConfig(run_compressed=False)
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, quantization_config=config
)
with torch.no_grad():
    found = model(torch.tensor(known["tokens"].astype(np.int64))).logits.numpy()
error = np.abs(found - known["logits"]).max()
print(f"{folder}: logits differ by {error:.2g} at most, of {np.abs(known['logits']).max():.3g}")
sys.exit(int(error > 1e-3))
