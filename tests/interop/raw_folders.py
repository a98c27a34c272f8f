"""Folders of safetensors files, written tensor by tensor as a test says."""

import json
import pathlib

import numpy as np

from jqx._src.interop.save import Writer

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"


def write_file(path, tensors, metadata=None):
    """Writes NumPy arrays by name."""
    kinds = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    with Writer(str(path), kinds, metadata or {}) as out:
        for name, x in tensors.items():
            out.write(name, np.ascontiguousarray(x).reshape(x.shape))


def write_folder(folder, tensors, config=None):
    """Writes a folder of one file and its config."""
    folder.mkdir(exist_ok=True)
    write_file(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
