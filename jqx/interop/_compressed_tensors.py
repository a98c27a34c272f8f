"""compressed-tensors, the format of llm-compressor that vLLM and transformers load.

A layer `m` with a weight [N, K] has these tensors, depending on its `format`:

    pack-quantized   m.weight_packed int32 [N, words]: streams of codes with 2**(b-1) added
                     m.weight_scale [N, groups]; m.weight_shape int64 [2]
                     m.weight_zero_point int32 [words, groups], streams along the first axis
                     m.weight_g_idx int32 [K]: the group of each column
    int-quantized    m.weight int8 [N, K]; m.weight_scale [N, 1]; m.weight_zero_point int8
    float-quantized  m.weight float8_e4m3 [N, K]; m.weight_scale of a tensor, rows, or 2-D blocks
    nvfp4, mxfp4     m.weight_packed uint8 [N, K/2]; m.weight_scale [N, K/16 or K/32]
    mxfp8            m.weight float8_e4m3 [N, K]; m.weight_scale uint8 [N, K/32]

Scales of activations (`input_scale`, `input_global_scale`) and of caches (`k_scale`, `v_scale`) are
separate leaves, unchanged.

Source: https://github.com/vllm-project/compressed-tensors (version 0.20).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ._coded import CodedLeaf, refuse
from ._compressed_weights import READ
from ._config import Config, matches, quantization_of
from ._source import Source

_PARTS = ("packed", "scale", "zero_point", "global_scale", "shape")

MARKS = tuple(f".weight_{part}" for part in _PARTS)
"""Suffixes of the names of tensors that only this format has."""

_INTEGERS = ("pack-quantized", "int-quantized")

_KNOWN = (
    *_INTEGERS,
    *("float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
)
"""Values of `format`."""


class _Scheme(NamedTuple):
    """How the weights of some layers are quantized.

    Attributes:
      targets: names of classes or modules, or `re:` and an expression.
      format: name of the format in the config.
      weights: arguments of the weights.
    """

    targets: tuple[str, ...]
    format: str
    weights: Config


def leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    _check_plain(config)
    schemes, ignored = _schemes(config), config.names("ignore")
    for module in _modules(source):
        if any(matches(pattern, module, config.where) for pattern in ignored):
            continue
        scheme = _scheme_of(source, module, schemes, config)
        yield READ[_kind(source, module, scheme)](source, module, scheme.weights, dtype)


def keeps_weights(source: Source) -> bool:
    """Returns whether the config quantizes no weights, only activations or caches."""
    config = quantization_of(source.config)
    return config is not None and not _schemes(config)


def _check_plain(config: Config) -> None:
    """Checks that layers multiply by their weights, and that the weights are dense."""
    if config.data.get("transform_config"):
        config.refuse("transform_config", "none: such rotations run in the model")
    if config.data.get("sparsity_config"):
        config.part("sparsity_config").one_of("format", ("dense",), "dense")


def _modules(source: Source) -> list[str]:
    """Returns the modules that have the scale of a weight, in the order of the file."""
    end = ".weight_scale"
    return [name.removesuffix(end) for name in source.entries if name.endswith(end)]


def _schemes(config: Config) -> list[_Scheme]:
    groups = config.part("config_groups") if "config_groups" in config else Config({}, "")
    whole = config.one_of("format", _KNOWN, "mixed-precision")
    found = []
    for name in groups.data:
        group = groups.part(name)
        if "weights" in group:
            kind = group.one_of("format", _KNOWN, whole)
            found.append(_Scheme(group.names("targets"), kind, _lower(group.part("weights"))))
    return found


def _lower(args: Config) -> Config:
    """Returns arguments with names in lower case, as the package reads them."""
    keys = ("type", "strategy", "actorder")
    names = {key: args.data[key].lower() for key in keys if isinstance(args.data.get(key), str)}
    return Config({**args.data, **names}, args.where)


def _scheme_of(source: Source, module: str, schemes: list[_Scheme], config: Config) -> _Scheme:
    """Returns the scheme of a module: the one that names it, else the one whose expression matches
    (the first in the order of the alphabet), else the one of its class. The file does not contain
    the class, so only one scheme may be left. A target counts for the last group that has it.
    """
    targets = {target: scheme for scheme in schemes for target in scheme.targets}
    named = [
        targets[target]
        for target in sorted(targets, key=lambda text: ("re:" in text, text))
        if matches(target, module, config.where)
    ]
    kinds = (scheme for target, scheme in targets.items() if target[:1].isupper())
    of_class = list({f"{kind.format} {kind.weights.data}": kind for kind in kinds}.values())
    if len(of_class) > 1:
        of_class = [scheme for scheme in of_class if _fits(source, module, scheme)]
    found = named or of_class
    if len(found) == 1 or (named and found):
        return found[0]
    refuse(
        source,
        f"{module}.weight_scale",
        "belongs to a layer that the config does not describe."
        if not found
        else "could belong to several groups of the config.",
        given=f"{len(schemes)} groups, for {[scheme.targets for scheme in schemes][:4]}",
        expected="one group whose targets match the layer",
    )


def _fits(source: Source, module: str, scheme: _Scheme) -> bool:
    """Returns whether the tensors of a module have the format of a scheme."""
    try:
        _kind(source, module, scheme)
    except ValueError:
        return False
    return True


def _kind(source: Source, module: str, scheme: _Scheme) -> str:
    """Returns the format of a module, after checking that its tensors have it."""
    args = scheme.weights
    bits, kind = args.integer("num_bits", 8), args.one_of("type", ("int", "float"), "int")
    packed = f"{module}.weight_packed" in source.entries
    if kind == "int":
        found = "pack-quantized" if packed else "int-quantized"
    elif packed:
        if bits != 4:
            args.refuse("num_bits", "4 for packed floats")
        two = f"{module}.weight_global_scale" in source.entries
        found = "nvfp4-pack-quantized" if two else "mxfp4-pack-quantized"
    else:
        if bits != 8:
            args.refuse("num_bits", "8 for floats that are not packed")
        scale = source.dtype(f"{module}.weight_scale")
        found = "mxfp8-quantized" if scale == np.uint8 else "float-quantized"
    free = ("mixed-precision", "naive-quantized", "dense")
    if scheme.format not in (found, *free):
        refuse(
            source,
            f"{module}.weight_scale",
            "does not have the format in the config.",
            given=f"tensors of {found}",
            expected=f"tensors of {scheme.format}",
        )
    return found
