"""The parts of a checkpoint other than its tensors: which are kept, and which are left out."""

import json
import os
from typing import Any

import numpy as np

from ..interop import Archive
from ..interop._shared import GGUF, INDEX, TOKENIZERS, quantization_of

OWN = "jqx"
"""The format of `jqx.save`."""

_WRITTEN = ("config.json", "quantize_config.json", "quant_config.json", *TOKENIZERS)
"""Files that the output folder gets too, copied or written again."""


def texts(archive: Archive) -> dict[str, str]:
    """Returns the metadata of a file for safetensors files, with values other than text as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=_plain)
        for key, value in archive.metadata.items()
    }


def _plain(x: Any) -> Any:
    assert isinstance(x, (np.ndarray, np.generic)), type(x)
    return x.tolist()


def left_out(
    archive: Archive, source: str, format: str, activation: str | None = None
) -> list[str]:
    """Returns what a checkpoint of another format does not keep, in words.

    Args:
      archive: the input.
      source: its path.
      format: the output format.
      activation: how activations are to be quantized, if this is passed again.
    """
    found = []
    if archive.quantized is not None:
        found.append("the plan and the scales of activations of a quantized function")
    kept = format == OWN or (format == GGUF and archive.format == GGUF)
    names = [] if kept else [key for key in archive.metadata if key != "format"]
    if names:
        found.append(f"{len(names)} entries of metadata: {_shortly(names)}")
    written = {INDEX} if format in (OWN, GGUF) else {INDEX, *_WRITTEN}
    is_folder = os.path.isdir(source) and archive.format not in ("gemma", "orbax")
    files = sorted({*os.listdir(source)} - written) if is_folder else []
    beside = [name for name in files if not name.endswith(".safetensors")]
    if beside:
        found.append(f"the files {_shortly(beside)}")
    if format not in (OWN, GGUF):
        found += _of_config(archive, activation)
    return found


def _of_config(archive: Archive, activation: str | None) -> list[str]:
    """Returns the parts of a config, other than those of weights, that are not written again."""
    config = quantization_of(archive.config)
    data = {} if config is None else config.data
    groups = (data.get("config_groups") or {}).values()
    fields = [f"{kind}_activations" for kind in ("input", "output")]
    found = [field for field in fields if any(group.get(field) for group in groups)]
    found = found if activation is None else []
    found += ["kv_cache_scheme"] if data.get("kv_cache_scheme") else []
    found += ["activation_scheme: static"] if data.get("activation_scheme") == "static" else []
    return [f"{field} of the config" for field in found]


def _shortly(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def print_left_out(found: list[str]) -> None:
    """Prints the list, one entry per line."""
    for text in found:
        print(f"left out: {text}")
