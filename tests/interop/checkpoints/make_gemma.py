"""Writes the fixture `gemma-3.3.0.npz`: trees that the package quantizes.

    pip install gemma==3.3.0
    python make_gemma.py gemma-3.3.0.npz

Its modules compute `kernel / scale`.
"""

import sys

import jax
import numpy as np
from gemma.peft import _quantization_utils as peft

HEADS, WIDTH, HEAD, HIDDEN = 2, 64, 16, 48
keys = iter(jax.random.split(jax.random.key(0), 99))


def layer():
    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    return {
        "attn": {
            "q_einsum": {"w": normal(HEADS, WIDTH, HEAD)},
            "kv_einsum": {"w": normal(2, 1, WIDTH, HEAD)},
            "attn_vec_einsum": {"w": normal(HEADS, HEAD, WIDTH)},
        },
        "mlp": {"gating_einsum": normal(2, HIDDEN, WIDTH), "linear": normal(HIDDEN, WIDTH)},
        "pre_attention_norm": {"scale": normal(WIDTH)},
    }


params = {"layer_0": layer()}
arrays = {}
for method in ("INT4", "INT8"):
    tree = peft.quantize(params, method=peft.QuantizationMethod[method])
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = "codes/" if name.endswith("/kernel") else "floats/"
        arrays[f"{method}/{kind}{name}"] = np.asarray(x).astype(
            np.int8 if "codes" in kind else "f4"
        )
np.savez_compressed(sys.argv[1], **arrays)
