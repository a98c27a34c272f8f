"""GPTQ checkpoints, of AutoGPTQ, GPTQModel and auto-round.

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

from ..calibrators import Groups
from ..numerics import Integer, format_of
from ..tensor import QTensor
from ._bits import from_stream, repacked, to_stream
from ._coded import (
    FLOATS,
    CodedLeaf,
    abstract,
    checked,
    group_size,
    leading,
    order_of,
    real_dtype,
    refuse,
    weight,
)
from ._config import Config, matches, quantization_of
from ._encoded import (
    Encoded,
    check_no_offset,
    exact_halves,
    integers_of,
    module_of,
    refuse_leaf,
)
from ._source import Source

MARKS = (".qweight", ".qzeros", ".g_idx", ".scales")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_BITS = (2, 3, 4, 8)
_I32 = np.dtype(np.int32)


class LayerConfig(NamedTuple):
    """The config of a layer.

    Attributes:
      bits: bits of a code.
      group: size of a group; -1 if all inputs are one group.
      sym: whether all zero points are those of symmetric codes.
      desc_act: whether inputs are not sorted by their groups.
    """

    bits: int
    group: int
    sym: bool
    desc_act: bool


def leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    config.one_of("pack_dtype", ("int32",), "int32")
    first = _version(config) == "gptq"
    for module in modules(source):
        own = _config_of(config, module)
        if own is not None:
            yield leaf_of(source, module, own, first, dtype)


def modules(source: Source) -> Iterator[str]:
    """Yields the layers that have codes, by name."""
    end = ".qweight"
    yield from (name.removesuffix(end) for name in source.entries if name.endswith(end))


def _version(config: Config) -> str:
    """Returns the version, `"gptq"` or `"gptq_v2"`."""
    if config.data.get("is_marlin_format"):
        config.refuse("is_marlin_format", "false: marlin is a layout for special kernels")
    keys = [key for key in ("checkpoint_format", "format") if key in config]
    found = config.common(keys, "gptq")
    if found not in ("gptq", "gptq_v2"):
        config.refuse(keys[0], "one of 'gptq', 'gptq_v2'")
    return found


def _config_of(config: Config, module: str) -> Config | None:
    """Returns the config of a layer; `None` if it is not quantized."""
    fields = dict(config.data)
    overrides = config.data.get("dynamic") or {}
    for pattern, own in Config(overrides, f"{config.where}.dynamic").data.items():
        sign, _, text = pattern.partition(":")
        known = sign in ("+", "-") and text
        if matches(f"re:{text if known else pattern}", module, config.where):
            if known and sign == "-":
                return None
            fields |= Config(own, f"{config.where}.dynamic[{pattern!r}]").data
            break
    return Config(fields, config.where)


def leaf_of(
    source: Source, module: str, config: Config, first: bool, asked: np.dtype | None
) -> CodedLeaf:
    """Returns the QTensor of a layer.

    Args:
      source: the checkpoint.
      module: name of the layer.
      config: config of the layer.
      first: whether zero points are stored less 1.
      asked: the requested real dtype; `None` takes the dtype of the scales.
    """
    bits = config.one_of("bits", _BITS)
    form = Integer(bits)
    names = [f"{module}.{end}" for end in ("qweight", "scales", "qzeros", "g_idx")]
    (words, rows), _ = _matrix(source, names[0], None, (_I32,))
    columns = words * 32 // bits
    size = group_size(source, config, names[1], columns)
    groups = Groups((rows, columns), (1, size))
    count = groups.scale_shape[1]
    if words * 32 % bits or not rows * columns:
        refuse(
            source,
            names[0],
            "does not hold a whole number of codes.",
            given=f"{words} words of {rows} rows, {bits} bits a code",
            expected="32 codes in each run of as many words as a code has bits",
        )
    _, kind = _matrix(source, names[1], (count, rows), FLOATS)
    _matrix(source, names[2], (count, -(-rows * bits // 32)), (_I32,))
    order = None
    said = "sym" in config
    sym = config.flag("sym") if said else _has_one_zero(source, names[2], bits, rows)
    consumed = [names[2]] if sym else []
    if names[3] in source.entries:
        consumed.append(names[3])
        checked(source, names[3], (columns,), (_I32,))
        order = order_of(source, names[3], source.read(names[3], _I32), size)
    elif config.flag("desc_act", False):
        checked(source, names[3], (columns,), (_I32,), "as desc_act == true")
    if sym:
        _check_symmetric(source, names[2], bits, rows, first)

    def decode(codes: np.ndarray, scales: np.ndarray, *zeros: np.ndarray) -> list[np.ndarray]:
        values = repacked(codes.T, bits, columns, flip=2 ** (bits - 1), order=order)
        points = [_zero_points(words, bits, rows, first).T.astype(form.storage) for words in zeros]
        values = values.view(np.int8) if bits == 8 else values
        return [values, scales.T, *points, *([] if order is None else [order])]

    more = {} if order is None else {"order": abstract(leading(2, columns), "int32")}
    real = real_dtype(source, asked, kind)
    like = weight(groups, form, kind, real, zero_point=not sym, **more)
    tensors = [(names[0], _I32), (names[1], kind)]
    tensors += [] if sym else [(names[2], _I32)]
    return CodedLeaf(f"{module}.weight", tuple(tensors), like, decode, tuple(consumed))


def _matrix(source: Source, name: str, shape: Any, dtypes: Any) -> tuple[Any, np.dtype]:
    """Returns shape and dtype of a tensor with two axes."""
    found, dtype = checked(source, name, shape, dtypes)
    if len(found) != 2:
        checked(source, name, (0, 0), dtypes, "two axes")
    return found, dtype


def _zero_points(words: np.ndarray, bits: int, rows: int, first: bool) -> np.ndarray:
    """Returns zero points less that of symmetric codes, `(groups, rows)`."""
    stored = from_stream(np.ascontiguousarray(words).view(np.uint8), bits, rows).astype(np.int16)
    points = (stored + 1) % 2**bits if first else stored
    return points - 2 ** (bits - 1)


def _has_one_zero(source: Source, name: str, bits: int, rows: int) -> bool:
    """Returns whether all zero points are equal, as of symmetric codes."""
    points = _zero_points(source.read(name, _I32), bits, rows, first=False)
    return bool((points == points[:1, :1]).all())


def _check_symmetric(source: Source, name: str, bits: int, rows: int, first: bool) -> None:
    """Checks that all zero points are those of symmetric codes."""
    words = source.read(name, _I32)
    points = _zero_points(words, bits, rows, first)
    if not points.any():
        return
    other = not _zero_points(words, bits, rows, not first).any()
    versions = ("gptq", "gptq_v2") if first else ("gptq_v2", "gptq")
    refuse(
        source,
        name,
        "contradicts the config.",
        given=f"zero points of checkpoint_format {versions[1]!r}, which config.json calls "
        f"{versions[0]!r}"
        if other
        else "zero points of several values, with sym == true",
        expected="the zero point of symmetric codes everywhere, as sym == true",
    )


def encode(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor, for a checkpoint of `gptq_v2`.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    name, form = "GPTQ", format_of(leaf.qtype)
    module = module_of(path, leaf, name)
    bits = form.bits
    if not isinstance(form, Integer) or bits not in _BITS or leaf.ndim != 2:
        refuse_leaf(
            path,
            leaf,
            name,
            expected=f"matrices of integers of {', '.join(map(str, _BITS))} bits",
            fix="quantize it like that, or leave it in float.",
        )
    check_no_offset(path, leaf, name)
    rows, columns = leaf.shape
    if columns % 32 or rows * bits % 32:
        refuse_leaf(
            path,
            leaf,
            name,
            expected="whole words: inputs and outputs a multiple of 32",
            fix="leave it in float, or write compressed-tensors.",
        )
    size, count = leaf.groups.sizes[1], leaf.groups.scale_shape[1]
    sym = leaf.zero_point is None and form.signed
    layer = LayerConfig(bits, -1 if count == 1 else size, sym, leaf.order is not None)
    tensors = {
        f"{module}.qweight": (_I32, (columns * bits // 32, rows)),
        f"{module}.qzeros": (_I32, (count, rows * bits // 32)),
        f"{module}.scales": (np.dtype(np.float16), (count, rows)),
        f"{module}.g_idx": (_I32, (columns,)),
    }

    def make(q: QTensor) -> Mapping[str, np.ndarray]:
        codes, zeros, index = integers_of(path, q, name)
        words = to_stream(codes, bits).view("<i4")
        points = to_stream(np.ascontiguousarray(zeros.T), bits).view("<i4")
        made = (words.T, points, exact_halves(path, q, name).T, index)
        return dict(zip(tensors, made, strict=True))

    return Encoded(tensors, make, layer)


def config(layers: Mapping[str, LayerConfig], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint of `gptq_v2`."""
    (most, _), *_ = Counter(layers.values()).most_common(1)
    dynamic: dict[str, dict[str, Any]] = {}
    for path, own in layers.items():
        if own != most:
            dynamic[f"+:^{re.escape(path.removesuffix('.weight'))}$"] = _fields(own)
    for name in floats:
        module = name.removesuffix(".weight")
        if module != "lm_head":
            dynamic[f"-:^{re.escape(module)}$"] = {}
    return {
        "quant_method": "gptq",
        **_fields(most),
        "checkpoint_format": "gptq_v2",
        "lm_head": "lm_head.weight" in layers,
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _fields(layer: LayerConfig) -> dict[str, Any]:
    bits, group, sym, desc_act = layer
    return {"bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
