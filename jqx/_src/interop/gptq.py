"""GPTQ checkpoints, of AutoGPTQ, GPTQModel and auto-round; AWQ and auto-round's own format below.

A layer `m` with a weight [N, K] has

    m.qweight  int32 [K * bits / 32, N]: streams of unsigned codes along the first axis
    m.qzeros   int32 [groups, N * bits / 32]: streams of zero points along the last axis
    m.scales   float16 [groups, N]
    m.g_idx    int32 [K]: the group of each input; sorted unless `desc_act`

`format: gptq` (v1, the default; `checkpoint_format` is the same field) stores zero points less 1,
  modulo the number of codes; `gptq_v2` stores them unchanged. Only the config tells the versions
  apart, except in symmetric files, where a zero point of the other version is an error.

Source: https://github.com/ModelCloud/GPTQModel (2026); Frantar et al., "GPTQ", arXiv:2210.17323.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import QTensor
from ...extend import Groups
from ...numerics import Integer, format_of
from .codec import (
    FLOATS,
    CodedLeaf,
    Config,
    Encoded,
    check_names_in_float,
    check_no_offset,
    exact_halves,
    from_stream,
    group_size,
    in_runs,
    integers_of,
    matches,
    module_of,
    modules_with,
    order_field,
    order_of,
    quantization_of,
    real_dtype,
    refuse,
    refuse_leaf,
    repacked,
    shape_and_dtype,
    to_stream,
    weight,
)
from .safetensors import Source

GPTQ_MARKS = (".qweight", ".qzeros", ".g_idx", ".scales")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_BITS = (2, 3, 4, 8)
_I32 = np.dtype(np.int32)


class GptqConfig(NamedTuple):
    """The config of a layer.

    Attributes:
      bits: bits of a code.
      group_size: -1 if all inputs are one group.
      sym: whether all zero points are those of symmetric codes.
      desc_act: whether inputs are not sorted by their groups.
    """

    bits: int
    group_size: int
    sym: bool
    desc_act: bool


def gptq_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    config.one_of("pack_dtype", ("int32",), "int32")
    if config.data.get("is_marlin_format"):
        config.refuse("is_marlin_format", "false: marlin is a layout for special kernels")
    keys = [key for key in ("checkpoint_format", "format") if key in config]
    version = config.common(keys, "gptq")
    if version not in ("gptq", "gptq_v2"):
        config.refuse(keys[0], "one of 'gptq', 'gptq_v2'")
    for module in modules_with(source, ".qweight"):
        layer = _gptq_layer(config, module)
        if layer is not None:
            yield gptq_leaf(source, module, layer, version == "gptq", dtype)


def _gptq_layer(config: Config, module: str) -> Config | None:
    """Returns the config of a layer; `None` if it is not quantized."""
    fields = dict(config.data)
    overrides = config.data.get("dynamic") or {}
    for pattern, override in Config(overrides, f"{config.where}.dynamic").data.items():
        sign, _, text = pattern.partition(":")
        is_rule = sign in ("+", "-") and text
        if matches(f"re:{text if is_rule else pattern}", module, config.where):
            if is_rule and sign == "-":
                return None
            fields |= Config(override, f"{config.where}.dynamic[{pattern!r}]").data
            break
    return Config(fields, config.where)


def gptq_leaf(
    source: Source, module: str, config: Config, adds_one: bool, asked: np.dtype | None
) -> CodedLeaf:
    """Returns the QTensor of a layer.

    Args:
      source: the checkpoint.
      module: name of the layer.
      config: config of the layer.
      adds_one: whether zero points are stored less 1.
      asked: the requested real dtype; `None` takes the dtype of the scales.
    """
    bits = config.one_of("bits", _BITS)
    form = Integer(bits)
    names = [f"{module}.{end}" for end in ("qweight", "scales", "qzeros", "g_idx")]
    words, rows = shape_and_dtype(source, names[0], None, (_I32,), axes=(2,))[0]
    columns = words * 32 // bits
    size = group_size(source, config, names[1], columns)
    groups = Groups((rows, columns), (1, size))
    count = groups.scale_shape[1]
    if words * 32 % bits:
        problem = f"of {words} words of {rows} rows holds no whole number of codes of {bits} bits."
        refuse(source, names[0], problem)
    _, kind = shape_and_dtype(source, names[1], (count, rows), FLOATS)
    shape_and_dtype(source, names[2], (count, -(-rows * bits // 32)), (_I32,))
    order = None
    sym, zeros = "sym" not in config or config.flag("sym"), np.zeros((1, 1))
    if sym:
        zeros = _zero_points(source.read(names[2], _I32), bits, rows, adds_one)
        sym = "sym" in config or bool((zeros == zeros[:1, :1]).all())
    consumed = [names[2]] if sym else []
    if names[3] in source.entries:
        consumed.append(names[3])
        shape_and_dtype(source, names[3], (columns,), (_I32,))
        order = order_of(source, names[3], source.read(names[3], _I32), size)
    elif config.flag("desc_act", False):
        shape_and_dtype(source, names[3], (columns,), (_I32,), "as desc_act == true")
    if sym and zeros.any():
        versions = ("gptq", "gptq_v2") if adds_one else ("gptq_v2", "gptq")
        problem = "has several zero points, which the config excludes by sym == true."
        if not _zero_points(source.read(names[2], _I32), bits, rows, not adds_one).any():
            problem = f"has zero points of {versions[1]!r}, which the config calls {versions[0]!r}."
        refuse(source, names[2], problem)

    def decode(codes: np.ndarray, scales: np.ndarray, *zeros: np.ndarray) -> list[np.ndarray]:
        values = repacked(codes.T, bits, columns, flip=2 ** (bits - 1), order=order)
        points = [
            _zero_points(words, bits, rows, adds_one).T.astype(form.storage) for words in zeros
        ]
        values = values.view(np.int8) if bits == 8 else values
        return [values, scales.T, *points, *([] if order is None else [order])]

    real, fields = real_dtype(source, asked, kind), order_field(order, 2)
    template = weight(groups, form, kind, real, zero_point=not sym, **fields)
    tensors = [(names[0], _I32), (names[1], kind)]
    tensors += [] if sym else [(names[2], _I32)]
    return CodedLeaf(f"{module}.weight", tuple(tensors), template, decode, tuple(consumed))


def _zero_points(words: np.ndarray, bits: int, rows: int, adds_one: bool) -> np.ndarray:
    """Returns zero points less that of symmetric codes, `(groups, rows)`."""
    stored = from_stream(np.ascontiguousarray(words).view(np.uint8), bits, rows).astype(np.int16)
    points = (stored + 1) % 2**bits if adds_one else stored
    return points - 2 ** (bits - 1)


def encode_gptq(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor, for a checkpoint of `gptq_v2`.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    name, form = "GPTQ", format_of(leaf.qtype)
    module = module_of(path, leaf, name)
    bits = form.bits
    if not isinstance(form, Integer) or bits not in _BITS or leaf.ndim != 2:
        expected = f"matrices of integers of {', '.join(map(str, _BITS))} bits"
        fix = "quantize it like that, or leave it in float."
        refuse_leaf(path, leaf, name, expected=expected, fix=fix)
    check_no_offset(path, leaf, name)
    rows, columns = leaf.shape
    if columns % 32 or rows * bits % 32:
        expected = "whole words: inputs and outputs a multiple of 32"
        fix = "leave it in float, or write compressed-tensors."
        refuse_leaf(path, leaf, name, expected=expected, fix=fix)
    size, count = leaf.groups.sizes[1], leaf.groups.scale_shape[1]
    sym = leaf.zero_point is None and form.signed
    layer = GptqConfig(bits, -1 if count == 1 else size, sym, leaf.order is not None)
    tensors = {
        f"{module}.qweight": (_I32, (columns * bits // 32, rows)),
        f"{module}.qzeros": (_I32, (count, rows * bits // 32)),
        f"{module}.scales": (np.dtype(np.float16), (count, rows)),
        f"{module}.g_idx": (_I32, (columns,)),
    }

    def make(q: QTensor) -> list[np.ndarray]:
        codes, zeros, index = integers_of(path, q, name)
        words = to_stream(codes, bits).view("<i4")
        points = to_stream(np.ascontiguousarray(zeros.T), bits).view("<i4")
        return [words.T, points, exact_halves(path, q, name).T, index]

    return Encoded(tensors, make, layer)


def gptq_config(layers: Mapping[str, GptqConfig], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint of `gptq_v2`."""
    (common, _), *_ = Counter(layers.values()).most_common(1)
    dynamic: dict[str, dict[str, Any]] = {}
    for path, layer in layers.items():
        if layer != common:
            dynamic[f"+:^{re.escape(path.removesuffix('.weight'))}$"] = layer._asdict()
    for module in floats:
        if module != "lm_head":
            dynamic[f"-:^{re.escape(module)}$"] = {}
    return {
        "quant_method": "gptq",
        **common._asdict(),
        "checkpoint_format": "gptq_v2",
        "lm_head": "lm_head.weight" in layers,
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }


# AWQ checkpoints in the version `gemm`, of AutoAWQ and other libraries: 4 bits.
#
# A layer `m` with a weight [N, K] has
#
#     m.qweight  int32 [K, N / 8]: nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its 8
#     m.qzeros   int32 [groups, N / 8]: in the same order
#     m.scales   float16 [groups, N]
#
# Source: https://github.com/casper-hansen/AutoAWQ (0.2.7); Lin et al., "AWQ", arXiv:2306.00978.


AWQ_MARKS = (".qweight", ".qzeros", ".scales")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of the 8 that each nibble of a word holds, lowest nibble first."""

_RENAMED = {"w_bit": "bits", "q_group_size": "group_size"}
"""Fields of `quant_config.json`, in which AutoAWQ had its config at first."""

_INT4 = Integer(4)


class AwqConfig(NamedTuple):
    """The config of a layer.

    Attributes:
      group: size of a group.
      inputs: number of inputs of the layer.
      zero_point: whether zero points differ from that of symmetric codes.
    """

    group: int
    inputs: int
    zero_point: bool


def awq_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    config = Config({_RENAMED.get(key, key): x for key, x in config.data.items()}, config.where)
    keys = [key for key in ("version", "checkpoint_format", "format") if key in config]
    if config.common(keys, "gemm") != "gemm":
        config.refuse(keys[0], "'gemm': other versions have layouts for special kernels")
    if config.data.get("backend") == "llm-awq":
        config.refuse("backend", "another one: llm-awq has a layout for its kernels")
    excluded = config.names("modules_to_not_convert")
    for module in modules_with(source, ".qweight"):
        if not any(f".{part}." in f".{module}." for part in excluded):
            yield awq_leaf(source, module, config, dtype)


def awq_leaf(source: Source, module: str, config: Config, asked: np.dtype | None) -> CodedLeaf:
    """Returns the QTensor of a layer.

    Args:
      source: the checkpoint.
      module: name of the layer.
      config: config of the layer.
      asked: the requested real dtype; `None` takes the dtype of the scales.
    """
    config.one_of("bits", (4,), 4)
    names = [f"{module}.{end}" for end in ("qweight", "scales", "qzeros")]
    stored, _ = shape_and_dtype(source, names[0], None, (_I32,), axes=(2,))
    columns, rows = stored[0], stored[1] * 8
    size = group_size(source, config, names[1], columns)
    groups = Groups((rows, columns), (1, size))
    count = groups.scale_shape[1]
    _, kind = shape_and_dtype(source, names[1], (count, rows), FLOATS)
    shape_and_dtype(source, names[2], (count, rows // 8), (_I32,))
    zeros = config.flag("zero_point", True)
    if not zeros and (_nibbles(source.read(names[2], _I32)) != 8).any():
        refuse(
            source, names[2], "has zero points, which the config excludes by zero_point == false."
        )

    def decode(codes: np.ndarray, scales: np.ndarray, *points: np.ndarray) -> list[np.ndarray]:
        zero_points = [(_nibbles(x).astype(np.int8) - 8).T.astype(_INT4.storage) for x in points]
        return [_packed(codes), scales.T, *zero_points]

    template = weight(groups, _INT4, kind, real_dtype(source, asked, kind), zero_point=zeros)
    tensors = [(names[0], _I32), (names[1], kind)]
    tensors += [(names[2], _I32)] if zeros else []
    consumed = () if zeros else (names[2],)
    return CodedLeaf(f"{module}.weight", tuple(tensors), template, decode, consumed)


def _packed(words: np.ndarray) -> np.ndarray:
    """Returns the codes of words `[K, N / 8]`, less 8, as the rows of a QTensor `[N, K]`.

    A byte of the QTensor has two codes of a row, one from each half of K. From two words, the even
    nibbles make the bytes of four rows, and the odd nibbles those of the other four.
    """
    inputs, columns = words.shape
    middle = -(-inputs // 2)
    values = np.empty((columns, 8, middle), np.uint8)
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    for run in in_runs(columns, 4 * inputs):
        turned = np.ascontiguousarray(words[:, run].T).view("<u4") ^ np.uint32(0x88888888)
        low_rows, high_rows = turned[:, :middle], turned[:, middle:]
        if inputs % 2:
            high_rows = np.pad(high_rows, ((0, 0), (0, 1)))
        for start, pairs in enumerate(
            ((low_rows & low) | (high_rows << 4) & high, (low_rows >> 4) & low | (high_rows & high))
        ):
            bytes_of = pairs.view(np.uint8).reshape(*pairs.shape, 4)
            for i, row in enumerate(_ORDER[start::2]):
                values[run, row] = bytes_of[..., i]
    return values.reshape(columns * 8, middle)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Returns the codes of words, `(..., 8 columns for each)`, in the order of columns."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    codes = np.empty((*words.shape, 8), np.uint8)
    parts = raw.reshape(*words.shape, 4)
    for i, column in enumerate(_ORDER):
        codes[..., column] = (parts[..., i // 2] >> np.uint8(i % 2 * 4)) & np.uint8(15)
    return codes.reshape(*words.shape[:-1], -1)


def _words(codes: np.ndarray) -> np.ndarray:
    """Inverts `_nibbles`."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)[..., list(_ORDER)]
    raw = eights[..., ::2] | eights[..., 1::2] << np.uint8(4)
    return np.ascontiguousarray(raw).view("<i4")[..., 0]


def encode_awq(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    name, form = "AWQ", format_of(leaf.qtype)
    module = module_of(path, leaf, name)
    check_no_offset(path, leaf, name)
    fits = isinstance(form, Integer) and form.bits == 4 and leaf.ndim == 2 and leaf.order is None
    if not fits or leaf.shape[0] % 8 or leaf.shape[1] % leaf.groups.sizes[1]:
        expected = (
            "matrices of 4-bit integers, outputs a multiple of 8, equal groups, inputs in order"
        )
        fix = "quantize it like that, leave it in float, or write GPTQ or compressed-tensors."
        refuse_leaf(path, leaf, name, expected=expected, fix=fix)
    rows, columns = leaf.shape
    count = leaf.groups.scale_shape[1]
    zeros = leaf.zero_point is not None or not form.signed
    tensors = {
        f"{module}.qweight": (_I32, (columns, rows // 8)),
        f"{module}.qzeros": (_I32, (count, rows // 8)),
        f"{module}.scales": (np.dtype(np.float16), (count, rows)),
    }

    def make(q: QTensor) -> list[np.ndarray]:
        codes, points, _ = integers_of(path, q, name)
        return [_words(codes.T), _words(points.T), exact_halves(path, q, name).T]

    return Encoded(tensors, make, AwqConfig(leaf.groups.sizes[1], columns, zeros))


def awq_config(layers: Mapping[str, AwqConfig], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint.

    Raises:
      ValueError: if layers have groups of different sizes.
    """
    cut = [layer.group for layer in layers.values() if layer.group < layer.inputs]
    group = cut[0] if cut else -1
    for path, layer in layers.items():
        if cut and layer.group != min(group, layer.inputs):
            expected = f"groups of {group}, as in other layers"
            fix = "quantize all layers with equal groups, or write GPTQ or compressed-tensors."
            refuse_leaf(path, f"groups of {layer.group}", "AWQ", expected=expected, fix=fix)
    check_names_in_float(layers, floats, "AWQ", inside=True)
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": any(layer.zero_point for layer in layers.values()),
        "version": "gemm",
        "modules_to_not_convert": list(floats) or None,
    }


# Checkpoints of auto-round in its own format: layers as in GPTQ or AWQ, with another config.
#
# `packing_format` is the layout of layers: `auto_round:auto_gptq` and `auto_round:auto_awq` are
# those of GPTQ (first version) and AWQ; `auto_round` is that of GPTQ with unmodified zero points.
# `extra_config` has the layers with another quantization, by name or by a regular expression.
#
# Source: https://github.com/intel/auto-round (0.16); Cheng et al., "SignRound", arXiv:2309.05516.


_FLOAT = 16
"""Layers with this number of bits or more are left in float."""

_LAYOUTS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round")


def auto_round_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    layout = config.one_of("packing_format", _LAYOUTS)
    config.one_of("data_type", ("int",), "int")
    modules = modules_with(source, ".qweight")
    for module in modules:
        layer = _auto_round_layer(config, module, set(modules))
        if layer is None:
            continue
        if layout == "auto_round:auto_awq":
            sym = {"zero_point": not layer.flag("sym", True)}
            yield awq_leaf(source, module, Config({**layer.data, **sym}, layer.where), dtype)
        else:
            adds_one = layout == "auto_round:auto_gptq"
            yield gptq_leaf(source, module, layer, adds_one, dtype)


def _auto_round_layer(config: Config, module: str, names: set[str]) -> Config | None:
    """Returns the config of a layer; `None` if it is not quantized."""
    extra = config.part("extra_config").data if "extra_config" in config else {}
    patterns = (key for key in extra if key not in names)
    matching = (key for key in patterns if matches(f"re:{key}", module, config.where))
    key = module if module in extra else next(matching, None)
    if key is None:
        return config
    override = Config(extra[key], f"{config.where}.extra_config[{key!r}]")
    if "bits" in override and override.integer("bits") >= _FLOAT:
        return None
    return Config({**config.data, **override.data}, config.where)
