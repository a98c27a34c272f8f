"""Makes the checkpoints of auto-round that tests read: GPTQ, AWQ, and its own format.

    pip install auto-round==0.16.1 transformers torch safetensors
    python make_auto_round.py

Each is a Llama of one layer of 64 x 128, quantized by rounding and exported as a folder, of which
two weights are kept. `expected.npz` has what the package's own layers multiply by, in float16.
"""

import importlib.metadata
import json
import pathlib
import shutil
import tempfile

import numpy as np
import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VERSION = importlib.metadata.version("auto-round")
FOLDER = pathlib.Path(__file__).parent / f"auto-round-{VERSION}"
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
MIXED = {LAYERS[1]: {"bits": 8, "group_size": 64, "sym": True}}
CASES = {
    **{
        f"gptq_{bits}_{'sym' if sym else 'asym'}": ("auto_gptq", dict(bits=bits, sym=sym))
        for bits in (2, 3, 4, 8)
        for sym in (True, False)
        if sym or bits < 8  # which the package refuses to write
    },
    "gptq_channels": ("auto_gptq", dict(bits=4, sym=True, group_size=-1)),
    "gptq_mixed": ("auto_gptq", dict(bits=4, sym=False, layer_config=MIXED)),
    "awq_asym": ("auto_awq", dict(bits=4, sym=False)),
    "awq_sym": ("auto_awq", dict(bits=4, sym=True)),
    "own_gptq": ("auto_round:auto_gptq", dict(bits=4, sym=True)),
    "own_awq": ("auto_round:auto_awq", dict(bits=4, sym=False)),
    "own_3": ("auto_round", dict(bits=3, sym=False)),
    "own_mixed": ("auto_round:auto_gptq", dict(bits=4, sym=True, layer_config=MIXED)),
}


def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, vocab_size=64, num_hidden_layers=1)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def tokenizer():
    words = {str(i): i for i in range(64)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "0")))


def multiplied_by(tensors, layer, form, bits, size):
    """Returns the weight [out, in] that the package's layer multiplies by."""
    own = {key.removeprefix(f"{layer}."): x for key, x in tensors.items() if key.startswith(layer)}
    if form.endswith("awq"):
        return dequantize_gemm(own["qweight"], own["qzeros"], own["scales"], bits, size).T
    kind = qlinear_torch if form == "auto_round" else qlinear_torch_zp
    inputs, outputs = own["qweight"].shape[0] * 32 // bits, own["scales"].shape[1]
    linear = kind.QuantLinear(bits, size, inputs, outputs, bias=False, g_idx="g_idx" in own)
    linear.load_state_dict(own)
    return linear(torch.eye(inputs)).half().T


def main():
    for name, (form, fields) in CASES.items():
        fields = dict(group_size=32) | fields
        with tempfile.TemporaryDirectory() as folder:
            whole = AutoRound(
                model(), tokenizer(), iters=0, disable_opt_rtn=True, device_map="cpu", **fields
            )
            whole.quantize_and_save(folder, format=form)
            (made,) = pathlib.Path(folder).rglob("model.safetensors")
            tensors = load_file(made)
            config = json.loads((made.parent / "config.json").read_text())
        kept = {key: x for key, x in tensors.items() if key.startswith((*LAYERS, "model.norm"))}
        expected = {}
        for layer in LAYERS:
            own = fields | fields.get("layer_config", {}).get(layer, {})
            size = own["group_size"]
            expected[f"{layer}.weight"] = multiplied_by(kept, layer, form, own["bits"], size)
        path = FOLDER / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        save_file(kept, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=1))
        floats = {key: x.detach().numpy() for key, x in expected.items()}
        np.savez_compressed(path / "expected.npz", **floats)


if __name__ == "__main__":
    main()
