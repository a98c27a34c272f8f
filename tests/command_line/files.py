"""Small files of weights, and the command line run on them."""

import json

import jax.numpy as jnp
import numpy as np

import jqx
from jqx._src.command_line.main import main

from ..tensor.tensors import spread_out


def torch_weights() -> dict[str, np.ndarray]:
    """A network as torch names and lays out its weights."""
    return {
        "embed.weight": spread_out((40, 16), 0),
        "layers.0.mlp.weight": spread_out((64, 16), 1),
        "layers.0.mlp.bias": spread_out((64,), 2),
        "layers.0.norm.weight": spread_out((16,), 3),
        "layers.1.conv.weight": spread_out((8, 4, 3, 3), 4),
        "lm_head.weight": spread_out((40, 16), 5).astype(jnp.bfloat16),
        "position_ids": np.arange(7),
    }


def run(capsys, *argv):
    """Runs the command line; returns its exit code and what it printed."""
    capsys.readouterr()
    code = main([str(part) for part in argv])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys, *argv):
    """Runs it with --json; returns the exit code and the JSON."""
    code, out, err = run(capsys, *argv, "--json")
    assert err == ""
    return code, json.loads(out)


def error_of(capsys, *argv):
    """Runs what must fail, and returns the one line that it says."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def saved(path, tree):
    """Saves a tree and returns the path."""
    jqx.save(path, tree)
    return path
