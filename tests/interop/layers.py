"""A layer of one weight in each format, as the tensors and the config of a checkpoint."""

import json

import ml_dtypes
import numpy as np

from jqx._src.interop.codec import to_stream
from jqx.numerics import nf4


def within(config):
    return {"quantization_config": config}


# compressed-tensors.

CODES = np.zeros((4, 64), np.int64)


def compressed_config(**fields):
    """A config whose only group has weights with these fields."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": 32, "dynamic": False, **fields}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["head"]}
    return within({**scheme, "config_groups": {"group_0": group}})


def packed(codes, bits=4):
    return to_stream((codes + 2 ** (bits - 1)).astype(np.uint8), bits).view(np.int32)


def compressed(codes=CODES, bits=4, scale=None):
    rows, columns = codes.shape
    scale = np.ones((rows, columns // 32), np.float32) if scale is None else scale
    return {
        "m.weight_packed": packed(codes, bits),
        "m.weight_scale": scale,
        "m.weight_shape": np.array(codes.shape, np.int64),
    }


# GPTQ and AWQ.

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def gptq(word="77777777", zeros=None, columns=32, bits=4, groups=1):
    """A layer of 32 outputs, each of which has the codes 0, 1, 2 and so on."""
    rows = 32
    codes = np.arange(columns) % 2**bits
    stream = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    words = np.frombuffer(stream.to_bytes(columns * bits // 8, "little"), "<i4")
    points = np.full((groups, rows * bits // 32), int(word, 16), np.uint32).view(np.int32)
    return {
        "m.qweight": np.repeat(words[:, None], rows, 1),
        "m.qzeros": points if zeros is None else zeros,
        "m.scales": np.ones((groups, rows), np.float16),
        "m.g_idx": (np.arange(columns) // (columns // groups)).astype(np.int32),
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}


def awq(columns=32, word=0x75316420):
    return {
        "m.qweight": np.full((columns, 1), 0x75316420, np.int32),
        "m.qzeros": np.full((1, 1), word, np.int32),
        "m.scales": np.ones((1, 8), np.float16),
    }


# Formats whose layers have no options here.

MLX = {
    "m.weight": np.full((4, 8), 0x76543210, np.uint32),
    "m.scales": np.ones((4, 1), np.float32),
    "m.biases": np.zeros((4, 1), np.float32),
}
FP8 = {
    "m.weight": np.ones((200, 300), ml_dtypes.float8_e4m3fn),
    "m.weight_scale_inv": np.arange(6, dtype=np.float32).reshape(2, 3),
}


def bitsandbytes(state=None, **tensors):
    """A weight [2, 64] of nf4, with changes to its state and its tensors."""
    fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 64]}
    text = json.dumps({**fields, **(state or {})}).encode()
    parts = {
        "": np.zeros((64, 1), np.uint8),
        ".absmax": np.ones(2, np.float32),
        ".quant_map": np.asarray(nf4.entries, np.float32),
        ".quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8),
        **{f".{name}": x for name, x in tensors.items()},
    }
    return {f"m.weight{end}": x for end, x in parts.items()}


# Experts of gpt-oss.

OSS = within({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
BLOCKS, SCALES = "m.experts.up_proj_blocks", "m.experts.up_proj_scales"


def experts(shape=(2, 6, 3)):
    rng = np.random.default_rng(0)
    return {
        BLOCKS: rng.integers(0, 256, (*shape, 16)).astype(np.uint8),
        SCALES: rng.integers(100, 140, shape).astype(np.uint8),
        "m.experts.up_proj_bias": np.ones(shape[:2], np.float32),
    }


FLOAT = {"m.weight": np.ones((4, 64), np.float32)}
