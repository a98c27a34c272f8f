"""AWQ checkpoints in the version `gemm`, of AutoAWQ and other libraries: 4 bits.

A layer `m` with a weight [N, K] has

    m.qweight  int32 [K, N / 8]: nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its 8
    m.qzeros   int32 [groups, N / 8]: in the same order
    m.scales   float16 [groups, N]

Source: https://github.com/casper-hansen/AutoAWQ (0.2.7); Lin et al., "AWQ", arXiv:2306.00978.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..calibrators import Groups
from ..numerics import Integer, format_of
from ..tensor import QTensor
from ._coded import FLOATS, CodedLeaf, checked, group_size, real_dtype, refuse, weight
from ._config import Config, quantization_of
from ._encoded import (
    Encoded,
    check_names_in_float,
    check_no_offset,
    exact_halves,
    integers_of,
    module_of,
    refuse_leaf,
)
from ._gptq import modules
from ._in_runs import in_runs
from ._source import Source

MARKS = (".qweight", ".qzeros", ".scales")
"""Suffixes of the names of tensors that float checkpoints do not have."""

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of the 8 that each nibble of a word holds, lowest nibble first."""

_RENAMED = {"w_bit": "bits", "q_group_size": "group_size"}
"""Fields of `quant_config.json`, in which AutoAWQ had its config at first."""

_I32, _INT4 = np.dtype(np.int32), Integer(4)


class LayerConfig(NamedTuple):
    """The config of a layer.

    Attributes:
      group: size of a group.
      inputs: number of inputs of the layer.
      zero_point: whether zero points differ from that of symmetric codes.
    """

    group: int
    inputs: int
    zero_point: bool


def leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
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
    for module in modules(source):
        if not any(f".{part}." in f".{module}." for part in excluded):
            yield leaf_of(source, module, config, dtype)


def leaf_of(source: Source, module: str, config: Config, asked: np.dtype | None) -> CodedLeaf:
    """Returns the QTensor of a layer.

    Args:
      source: the checkpoint.
      module: name of the layer.
      config: config of the layer.
      asked: the requested real dtype; `None` takes the dtype of the scales.
    """
    config.one_of("bits", (4,), 4)
    names = [f"{module}.{end}" for end in ("qweight", "scales", "qzeros")]
    stored, _ = checked(source, names[0], None, (_I32,))
    if len(stored) != 2 or 0 in stored:
        checked(source, names[0], (0, 0), (_I32,), "two axes")
    columns, rows = stored[0], stored[1] * 8
    size = group_size(source, config, names[1], columns)
    groups = Groups((rows, columns), (1, size))
    count = groups.scale_shape[1]
    _, kind = checked(source, names[1], (count, rows), FLOATS)
    checked(source, names[2], (count, rows // 8), (_I32,))
    zeros = config.flag("zero_point", True)
    if not zeros and (_nibbles(source.read(names[2], _I32)) != 8).any():
        refuse(
            source,
            names[2],
            "contradicts the config.",
            given="zero points that differ from that of symmetric codes",
            expected="none, as zero_point == false",
        )

    def decode(codes: np.ndarray, scales: np.ndarray, *points: np.ndarray) -> list[np.ndarray]:
        known = [(_nibbles(x).astype(np.int8) - 8).T.astype(_INT4.storage) for x in points]
        return [_packed(codes), scales.T, *known]

    like = weight(groups, _INT4, kind, real_dtype(source, asked, kind), zero_point=zeros)
    tensors = [(names[0], _I32), (names[1], kind)]
    tensors += [(names[2], _I32)] if zeros else []
    consumed = () if zeros else (names[2],)
    return CodedLeaf(f"{module}.weight", tuple(tensors), like, decode, consumed)


def _packed(words: np.ndarray) -> np.ndarray:
    """Returns the codes of words `[K, N / 8]`, less 8, as the rows of a QTensor `[N, K]`.

    A byte of the QTensor has two codes of a row, one from each half of K. From two words, the even
    nibbles make the bytes of four rows, and the odd nibbles those of the other four.
    """
    inputs, columns = words.shape
    half = -(-inputs // 2)
    values = np.empty((columns, 8, half), np.uint8)
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    for run in in_runs(columns, 4 * inputs):
        turned = np.ascontiguousarray(words[:, run].T).view("<u4") ^ np.uint32(0x88888888)
        first, second = turned[:, :half], turned[:, half:]
        if inputs % 2:
            second = np.pad(second, ((0, 0), (0, 1)))
        for start, pairs in enumerate(
            ((first & low) | (second << 4) & high, (first >> 4) & low | (second & high))
        ):
            bytes_of = pairs.view(np.uint8).reshape(*pairs.shape, 4)
            for i, row in enumerate(_ORDER[start::2]):
                values[run, row] = bytes_of[..., i]
    return values.reshape(columns * 8, half)


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


def encode(path: str, leaf: QTensor) -> Encoded:
    """Returns the encoded form of a QTensor.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    name, form = "AWQ", format_of(leaf.qtype)
    module = module_of(path, leaf, name)
    check_no_offset(path, leaf, name)
    fits = isinstance(form, Integer) and form.bits == 4 and leaf.ndim == 2 and leaf.order is None
    if not fits or leaf.shape[0] % 8 or leaf.shape[1] % leaf.groups.sizes[1]:
        refuse_leaf(
            path,
            leaf,
            name,
            expected="matrices of integers of 4 bits, outputs a multiple of 8, equal groups, "
            "inputs in order",
            fix="quantize it like that, leave it in float, or write GPTQ or compressed-tensors.",
        )
    rows, columns = leaf.shape
    count = leaf.groups.scale_shape[1]
    zeros = leaf.zero_point is not None or not form.signed
    tensors = {
        f"{module}.qweight": (_I32, (columns, rows // 8)),
        f"{module}.qzeros": (_I32, (count, rows // 8)),
        f"{module}.scales": (np.dtype(np.float16), (count, rows)),
    }

    def make(q: QTensor) -> Mapping[str, np.ndarray]:
        codes, points, _ = integers_of(path, q, name)
        made = (_words(codes.T), _words(points.T), exact_halves(path, q, name).T)
        return dict(zip(tensors, made, strict=True))

    return Encoded(tensors, make, LayerConfig(leaf.groups.sizes[1], columns, zeros))


def config(layers: Mapping[str, LayerConfig], floats: Sequence[str]) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint.

    Raises:
      ValueError: if layers have groups of different sizes.
    """
    cut = [own.group for own in layers.values() if own.group < own.inputs]
    group = cut[0] if cut else -1
    for path, own in layers.items():
        if cut and own.group != min(group, own.inputs):
            refuse_leaf(
                path,
                f"groups of {own.group} of {own.inputs} inputs",
                "AWQ",
                expected=f"groups of {group}, as in other layers",
                fix="quantize all layers with the same groups, or write GPTQ or "
                "compressed-tensors.",
            )
    names = [name.removesuffix(".weight") for name in floats]
    check_names_in_float(layers, floats, "AWQ", inside=True)
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": any(own.zero_point for own in layers.values()),
        "version": "gemm",
        "modules_to_not_convert": names or None,
    }
