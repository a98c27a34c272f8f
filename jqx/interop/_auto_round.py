"""Checkpoints of auto-round in its own format: layers as in GPTQ or AWQ, with another config.

`packing_format` is the layout of layers: `auto_round:auto_gptq` and `auto_round:auto_awq` are those
of GPTQ (first version) and AWQ; `auto_round` is that of GPTQ with unmodified zero points.
`extra_config` has the layers with another quantization, by name or by a regular expression.

Source: https://github.com/intel/auto-round (0.16); Cheng et al., "SignRound", arXiv:2309.05516.
"""

from collections.abc import Iterator

import numpy as np

from . import _awq, _gptq
from ._coded import CodedLeaf
from ._config import Config, matches, quantization_of
from ._source import Source

MARKS = _gptq.MARKS
"""Suffixes of the names of tensors that float checkpoints do not have."""

_FLOAT = 16
"""Layers with this number of bits or more are left in float."""

_LAYOUTS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round")


def leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    layout = config.one_of("packing_format", _LAYOUTS)
    config.one_of("data_type", ("int",), "int")
    names = set(_gptq.modules(source))
    for module in _gptq.modules(source):
        own = _config_of(config, module, names)
        if own is None:
            continue
        if layout == "auto_round:auto_awq":
            sym = {"zero_point": not own.flag("sym", True)}
            yield _awq.leaf_of(source, module, Config({**own.data, **sym}, own.where), dtype)
        else:
            first = layout == "auto_round:auto_gptq"
            yield _gptq.leaf_of(source, module, own, first, dtype)


def _config_of(config: Config, module: str, names: set[str]) -> Config | None:
    """Returns the config of a layer; `None` if it is not quantized."""
    extra = config.part("extra_config").data if "extra_config" in config else {}
    patterns = (key for key in extra if key not in names)
    found = (key for key in patterns if matches(f"re:{key}", module, config.where))
    key = module if module in extra else next(found, None)
    if key is None:
        return config
    own = Config(extra[key], f"{config.where}.extra_config[{key!r}]")
    if "bits" in own and own.integer("bits") >= _FLOAT:
        return None
    return Config({**config.data, **own.data}, config.where)
