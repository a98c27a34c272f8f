"""The checkpoint formats of other libraries, and which of them a checkpoint has.

The config decides. Tensors that only one format has are an error without a config for it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._errors import fail
from . import (
    _auto_round,
    _awq,
    _bitsandbytes,
    _compressed_tensors,
    _fp8,
    _gemma,
    _gguf_tensors,
    _gptq,
    _mlx,
    _mxfp4,
)
from ._coded import CodedLeaf
from ._config import method_of, quantization_of
from ._gguf_source import GgufSource
from ._orbax import OrbaxSource
from ._source import Source
from ._tree import StoredArray


class Format(NamedTuple):
    """A checkpoint format.

    Attributes:
      name: name of the format.
      matches: returns whether a config (`config.json`) belongs to a checkpoint in this format.
      marks: suffixes of the names of tensors that float checkpoints do not have.
      leaves: yields the QTensors of a checkpoint, given its source and the requested real dtype.
        Tensors that are not used for them are plain arrays.
      alone: whether the tensors can be read without a config.
      plain: returns whether a checkpoint may have no QTensors, given its source.
      source: the class of sources that always have this format, whatever the config says.
    """

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    marks: tuple[str, ...]
    leaves: Callable[[Source, np.dtype | None], Iterator[CodedLeaf]]
    alone: bool = False
    plain: Callable[[Source], bool] = lambda _: False
    source: type | None = None


def _method(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a function that returns whether a config has one of these quantization methods."""

    def matches(config: Mapping[str, Any]) -> bool:
        return method_of(config) in names

    return matches


def _is_mlx(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("quantization"), Mapping)


FORMATS = (
    Format(
        "compressed-tensors",
        _method("compressed-tensors"),
        _compressed_tensors.MARKS,
        _compressed_tensors.leaves,
        plain=_compressed_tensors.keeps_weights,
    ),
    Format("gptq", _method("gptq"), _gptq.MARKS, _gptq.leaves),
    Format("awq", _method("awq"), _awq.MARKS, _awq.leaves),
    Format(
        "auto-round",
        _method("auto-round", "intel/auto-round"),
        _auto_round.MARKS,
        _auto_round.leaves,
    ),
    Format("fp8", _method("fp8", "fbgemm_fp8"), _fp8.MARKS, _fp8.leaves),
    Format("mxfp4", _method("mxfp4"), _mxfp4.MARKS, _mxfp4.leaves),
    Format("mlx", _is_mlx, _mlx.MARKS, _mlx.leaves),
    Format(
        "bitsandbytes",
        _method("bitsandbytes"),
        _bitsandbytes.MARKS,
        _bitsandbytes.leaves,
        alone=True,
    ),
    Format("gguf", lambda _: False, (), _gguf_tensors.leaves, source=GgufSource),
)
"""The formats that can be read, in the order in which they are tried."""

_UNREAD = {"torchao": "torchao stores tensors in the layouts of its kernels"}
"""Methods that are known but not supported, and why."""

_TORCHAO = "._weight_qdata"
"""Suffix of the names of torchao's tensors."""


def read_leaves(source: Source, dtype: np.dtype | None) -> tuple[str, Any]:
    """Returns the name of the format of a checkpoint, and its tree with a reader for each leaf: a
    dict of all leaves by path, in the order of the file; for Orbax, the tree that was saved.

    Raises:
      ValueError: as in `format_of_source`; or if the tensors contradict the config.
    """
    if isinstance(source, OrbaxSource):
        return _gemma.read_tree(source, dtype)
    form = format_of_source(source)
    made = [] if form is None else list(form.leaves(source, dtype))
    used = {name: leaf for leaf in made for name in (*dict(leaf.tensors), *leaf.consumed)}
    if form is not None and form.source is None:
        _check_left(source, form, used)
    leaves: dict[str, CodedLeaf | StoredArray] = {}
    for name in source.entries:
        leaf = used.get(name) or StoredArray(name, source.dtype(name))
        _check_alone(source, leaves, leaf)
        leaves[leaf.path] = leaf
    return "safetensors" if form is None else form.name, leaves


def _check_alone(source: Source, leaves: Mapping[str, Any], leaf: CodedLeaf | StoredArray) -> None:
    if leaves.get(leaf.path, leaf) is not leaf:
        raise fail(
            "interop.read",
            f"the weight {shown(leaf.path)} of {source.path!r} exists twice.",
            given="a float tensor and a quantized one with the same name",
            expected="one of them",
            fix="download the checkpoint again.",
        )


def format_of_source(source: Source) -> Format | None:
    """Returns the format of a checkpoint; `None` if it holds plain arrays.

    Raises:
      ValueError: if its config names a format that jqx does not read; or if there is no config and
        the tensors have a format that needs one.
    """
    own = next((form for form in FORMATS if form.source is type(source)), None)
    if own is not None:
        return own
    config = source.config or {}
    fitting = [form for form in FORMATS if form.matches(config)]
    found = next((form for form in fitting if form.name == "mlx" and _has_mlx(source)), None)
    found = found or next(iter(fitting), None)
    quantization = quantization_of(config)
    if found is None and quantization is not None:
        method = method_of(config)
        why = _UNREAD.get(method, "no such format is known") if isinstance(method, str) else ""
        quantization.refuse(
            "quant_method", f"one of {', '.join(form.name for form in FORMATS)}{why and f': {why}'}"
        )
    return _marked(source) if found is None and (config or not source.asked) else found


def _has_mlx(source: Source) -> bool:
    """Returns whether tensors are those of MLX: mlx-lm looks at `quantization` first, as
    `quantization_config` may be left from the model that was converted.
    """
    names = source.entries
    return any(name.endswith(".scales") and f"{name[:-6]}qweight" not in names for name in names)


def _marked(source: Source) -> Format | None:
    """Returns the format of files whose config names none; it must not need a config."""
    foreign = next((name for name in source.entries if name.endswith(_TORCHAO)), None)
    if foreign is not None:
        raise fail(
            "interop.read",
            f"{source.path!r} is in the format of torchao, which jqx does not read.",
            given=f"the tensor {shown(foreign)}",
            expected=f"one of {', '.join(form.name for form in FORMATS)}: {_UNREAD['torchao']}",
            fix="save the float weights, or quantize with llm-compressor (compressed-tensors).",
        )
    for form in FORMATS:
        name = next((name for name in source.entries if name.endswith(form.marks)), None)
        if name is not None and form.alone:
            return form
        if name is not None:
            raise fail(
                "interop.read",
                f"{source.path!r} is quantized, but has no config that says how.",
                given=f"the tensor {shown(name)}, as in {form.name}, and "
                + ("a config without quantization_config" if source.config else "no config"),
                expected="a folder whose config.json has a quantization_config, or config=",
                fix="pass config=json.load(...) of its config.json or quantize_config.json, or the "
                "folder if it has one model; config={} reads the tensors as plain arrays.",
            )
    return None


def _are_codes(source: Source, name: str) -> bool:
    """Returns whether a tensor holds codes by its dtype: 8-bit floats, or non-float weights."""
    kind = source.dtype(name)
    is_float = jnp.issubdtype(kind, jnp.floating)
    return (is_float and kind.itemsize == 1) or (name.endswith(".weight") and not is_float)


def _check_left(source: Source, form: Format, used: Mapping[str, Any]) -> None:
    """Checks that there are quantized tensors, and that none of the format is left over."""
    left = (name for name in source.entries if name not in used)
    name = next((n for n in left if n.endswith(form.marks) or _are_codes(source, n)), None)
    if name is not None:
        raise fail(
            "interop.read",
            f"the tensor {shown(name)} of {source.path!r} does not belong to a layer.",
            given=f"a tensor of {form.name} that lacks the others of its layer, or a layer that "
            f"the "
            "config leaves in float",
            expected="whole layers, as in the config",
            fix="download the checkpoint again; if this is a part of it, read the whole folder.",
        )
    if not used and not form.plain(source):
        raise fail(
            "interop.read",
            f"{source.path!r} is not quantized as its config says.",
            given=f"no tensor of {form.name} among {len(source.entries)}",
            expected=f"tensors of {form.name}",
            fix="drop quantization_config from its config, or pass config={} to read the tensors "
            "as "
            "plain arrays.",
        )
