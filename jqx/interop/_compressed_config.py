"""Writes the config of compressed-tensors: the value of `quantization_config`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._errors import fail
from ..calibrators._shared import per_tensor, per_token
from ..numerics import Integer, format_of, nvfp4
from ..tensor import QSpec

NAME = "compressed-tensors"


class LayerConfig(NamedTuple):
    """The config of a weight.

    Attributes:
      format: format of its tensors.
      bits: bits of a code.
      type: `"int"` or `"float"`.
      symmetric: whether there are no zero points.
      strategy: what shares a scale: `"tensor"`, `"channel"`, `"group"`, `"block"`,
        `"tensor_group"`.
      group: size of a group.
      block: sizes of a block.
      ordered: whether columns are sorted by their groups.
    """

    format: str
    bits: int
    type: str
    symmetric: bool = True
    strategy: str = "channel"
    group: int | None = None
    block: tuple[int, int] | None = None
    ordered: bool = False


_SCALES = {
    "mxfp8-quantized": "torch.uint8",
    "mxfp4-pack-quantized": "torch.uint8",
    "nvfp4-pack-quantized": "torch.float8_e4m3fn",
}
"""Dtypes of scales that are not floats of 16 or 32 bits."""

_HEAD = "lm_head"
"""Name of the last layer of a language model in transformers."""


def config(
    layers: Mapping[str, LayerConfig], floats: Sequence[str], activation: QSpec | None
) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint.

    Args:
      layers: config of each QTensor, by its path.
      floats: names of the weights that stay in float.
      activation: how the activations that multiply the weights are quantized.

    Raises:
      ValueError: if the format has no such activations.
    """
    kinds = list(dict.fromkeys(layers.values()))
    formats = sorted({kind.format for kind in kinds})
    inputs = None if activation is None else _inputs(activation)
    ignored = dict.fromkeys(name.removesuffix(".weight") for name in floats)
    if len(kinds) == 1 and f"{_HEAD}.weight" not in layers:
        ignored[_HEAD] = None  # if tied to the table it has no tensor, but is a Linear
    groups = {}
    for i, kind in enumerate(kinds):
        modules = [path.removesuffix(".weight") for path, own in layers.items() if own == kind]
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else modules,
            "weights": _weights(kind),
            "input_activations": inputs,
            "output_activations": None,
            "format": kind.format,
        }
    return {
        "quant_method": NAME,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "config_groups": groups,
    }


def _weights(kind: LayerConfig) -> dict[str, Any]:
    args = _arguments(kind.bits, kind.type, kind.strategy, kind.group, symmetric=kind.symmetric)
    args["block_structure"] = None if kind.block is None else list(kind.block)
    args["actorder"] = "group" if kind.ordered else None
    args["observer"] = "minmax"
    if kind.format in _SCALES:
        args["scale_dtype"] = _SCALES[kind.format]
    return args


def _arguments(
    bits: int, kind: str, strategy: str, group: int | None = None, **more: Any
) -> dict[str, Any]:
    args = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy}
    return {**args, "group_size": group, "dynamic": False, **more}


def _inputs(spec: QSpec) -> dict[str, Any]:
    """Returns `input_activations` of a spec."""
    form = format_of(spec.qtype)
    size = getattr(spec.granularity, "size", None)
    if form == nvfp4 and spec.dynamic:
        scales = {"dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
        return _arguments(4, "float", "tensor_group", 16, **scales)
    kind = "int" if isinstance(form, Integer) else "float"
    known = isinstance(form, Integer) or spec.qtype == jnp.float8_e4m3fn
    more = {"dynamic": spec.dynamic, "symmetric": spec.symmetric}
    if known and spec.granularity == per_token() and spec.dynamic:
        return _arguments(form.bits, kind, "token", **more)
    if known and spec.granularity == per_tensor():
        return _arguments(form.bits, kind, "tensor", **more)
    if known and isinstance(size, int) and spec.dynamic:
        return _arguments(form.bits, kind, "group", size, **more)
    raise fail(
        "interop.write",
        f"{NAME} does not support these activations.",
        given=str(spec),
        expected="integers or float8_e4m3fn with one scale a tensor, a token (dynamic) or a "
        "group (dynamic); or dynamic nvfp4",
        fix='pass for example activation="int8:token:dynamic".',
    )
