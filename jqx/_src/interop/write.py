"""`write`: writes a tree of arrays and QTensors as a folder that other libraries load, or as a GGUF
file.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ... import QSpec, QTensor
from ...numerics import Integer, format_of, mxfp4
from ..checks import called, check_instance, check_integer, shown
from ..errors import fail, some
from ..files import Path, Replacement, as_path
from ..numerics.lookup import E8M0
from ..tensor.spec import as_spec
from ..transforms.calibrate import with_bar
from .archive import Archive
from .bitsandbytes import bitsandbytes_config, encode_bitsandbytes
from .codec import (
    Encoded,
    as_numpy,
    codes_of,
    exact_halves,
    for_rows,
    minimums_of,
    read_config,
    read_json,
    refuse_leaf,
    scale_of,
    without_quantization,
)
from .compressed_tensors import compressed_config, encode_compressed
from .fp8 import encode_fp8, fp8_config
from .gguf import FORMATS, MAGIC, MOST_AXES, NUMBER_OF, NUMBERS
from .gptq import awq_config, encode_awq, encode_gptq, gptq_config
from .mlx import encode_mlx, mlx_config
from .named_tree import Leaf, leaves_of
from .safetensors import METADATA, stored_dtype
from .save import written_folder

TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
    "generation_config.json",
)
"""Files of a folder that describe a tokenizer."""

MOST = 5_000_000_000
"""Size in bytes of one file, as in Hugging Face."""


class Target(NamedTuple):
    """A format that can be written.

    Attributes:
      encode: returns the encoded form of a QTensor, given its path.
      config: returns the quantization config, given `layer` of each encoded QTensor by path and the
        names of modules with weights in float.
      key: its key in the config.
      activations: whether both take, as the last argument, how activations are quantized.
      metadata: metadata of each file.
    """

    encode: Callable[..., Encoded]
    config: Callable[..., dict[str, Any]]
    key: str = "quantization_config"
    activations: bool = False
    metadata: Mapping[str, str] = {"format": "pt"}


def _refused(path: str, leaf: QTensor) -> Encoded:
    expected = "only arrays: no config says how codes become numbers"
    fix = "write another format, keep it with jqx.save, or write leaf.dequantize()."
    refuse_leaf(path, leaf, "safetensors", expected=expected, fix=fix)


TARGETS = {
    "compressed-tensors": Target(encode_compressed, compressed_config, activations=True),
    "gptq": Target(encode_gptq, gptq_config),
    "awq": Target(encode_awq, awq_config),
    "fp8": Target(encode_fp8, fp8_config),
    "bitsandbytes": Target(encode_bitsandbytes, bitsandbytes_config),
    "mlx": Target(encode_mlx, mlx_config, "quantization", metadata={"format": "mlx"}),
    "safetensors": Target(_refused, lambda layers, floats: {}, ""),
}
"""The formats of folders that can be written, by name."""

GGUF = "gguf"
"""The format of a file that can be written."""


@called("interop.write", 'pass for example jqx.interop.write("folder", tree, "gptq").')
def write(
    path: Path,
    tree: Any,
    format: str,
    *,
    config: Mapping[str, Any] | Path | None = None,
    tokenizer: Any = None,
    activation: QSpec | str | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    limit: int | None = None,
    progress: bool = True,
) -> None:
    """Writes a model as a folder for transformers, vLLM and other libraries, or as a GGUF file.

    Each QTensor becomes the tensors of the format, exactly: codes, scales and zero points stay the
    same, and it is an error if the format cannot hold them. Arrays are written unchanged. Tensors
    are made and written one at a time. The folder is written completely or not at all.

    A GGUF file has Q4_0 (int4), Q4_1 (4 bits with a minimum in float16; zero points only if float16
    holds their products with the scales), Q8_0 (int8) and MXFP4, in groups of 32 or of a multiple;
    and arrays unchanged. Give its tensors the names that llama.cpp uses (`jqx.interop.tree`,
    `named`).

    Args:
      path: path of the folder or file; its parent must exist.
      tree: arrays and QTensors by name, such as `"model.layers.0.mlp.up_proj.weight"`, or in nested
        dicts, whose keys are joined with "."; weights are `[out, in]`, as in torch
        (`jqx.interop.tree` transposes them). Or an open `jqx.interop.Archive`, whose leaves are
        read one at a time.
      format: `"compressed-tensors"`, `"gptq"` (second version), `"awq"`, `"fp8"` (in blocks),
        `"mlx"`, `"bitsandbytes"` (nf4), `"gguf"`, or `"safetensors"` (only arrays).
      config: config of the model, which becomes `config.json`: a dict, or the path of the file or
        of its folder; `None` takes that of an archive. Its quantization config is replaced, also
        in parts such as `text_config`.
      tokenizer: a folder whose tokenizer files are copied, or an object with `save_pretrained`;
        `None` writes none.
      activation: how the activations that multiply quantized weights are to be quantized: a
        `QSpec`, or a scheme such as `"int8:token:dynamic"`; static ones need `<module>.input_scale`
        in the tree. `None` leaves them in float. Only for compressed-tensors.
      metadata: metadata of a GGUF file, by key, such as that of `read_gguf`;
        `"general.architecture"` is required. Python integers become uint32 (int32 if negative, 64
        bits if necessary), Python floats float32; NumPy numbers keep their dtype. `None` takes that
        of an archive.
      overwrite: whether to replace an existing folder with all its contents, or an existing file.
      limit: maximum size in bytes of a file, 1 or more (a tensor is never split); `None` for 5 *
        10**9.
      progress: whether to show a progress bar, as in `jqx.save`.

    Raises:
      OSError: if the folder or file exists already, or cannot be written.
      TypeError: if something else is in the tree.
      ValueError: if the format is unknown or cannot hold a tensor, which the message names, or a
        tensor has scales, minimums or codes that are NaN or infinite; if nothing is quantized; or
        if a name exists twice.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> w = jqx.QTensor.quantize(jnp.eye(64), jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32})))
      >>> jqx.interop.write(folder, {"up": {"weight": w}}, "compressed-tensors", config={})
      >>> jqx.load(folder)["up.weight"]
      QTensor(int4[64, 64] per_block({0: 1, 1: 32}) packed along axis -1, scale float32[64, 2], \
dtype=float32, 2,560 bytes)
    """
    spec = as_spec("interop.write", "activation", activation, "activation")
    if format == GGUF:
        options = {"config": config, "tokenizer": tokenizer, "activation": spec, "limit": limit}
        for name, value in options.items():
            _check_unused(value, name, format)
        if metadata is None and isinstance(tree, Archive) and tree.format == GGUF:
            metadata = tree.metadata
        write_gguf(path, leaves_of(tree), metadata, overwrite=overwrite, progress=progress)
        return
    if not (isinstance(format, str) and format in TARGETS):
        formats = ", ".join(map(repr, (*TARGETS, GGUF)))
        problem = f"there is no format {shown(format)} to write."
        fix = f"pass one of {formats}; jqx.save writes jqx's own."
        raise fail("interop.write", problem, fix=fix)
    target = TARGETS[format]
    _check_unused(metadata, "metadata", format)
    limit = MOST if limit is None else check_integer("interop.write", "limit", limit)
    if limit < 1:
        problem = f"`limit` == {limit} is not a size of a file in bytes."
        fix = "leave it out, or pass for example limit=5 * 10**9."
        raise fail("interop.write", problem, fix=fix)
    leaves = leaves_of(tree)
    arguments = _activations(format, target, spec, leaves)
    encoded = {
        name: target.encode(name, leaf.spec, *arguments)
        if isinstance(leaf.spec, QTensor)
        else _encode_array(name, leaf.spec)
        for name, leaf in leaves.items()
    }
    layers = {name: item.layer for name, item in encoded.items() if item.layer is not None}
    if target.key and not layers:
        problem = f"none of {len(leaves)} arrays is quantized, for {format}."
        fix = "quantize them first, with jqx.ptq or jqx.quantize_params."
        raise fail("interop.write", problem, fix=fix)
    floats = [
        name.removesuffix(".weight")
        for name, leaf in leaves.items()
        if name not in layers and name.endswith(".weight") and len(leaf.spec.shape) > 1
    ]
    model = _config(config, tree)
    if target.key:
        model[target.key] = target.config(layers, floats, *arguments)
    tensors = _tensors(encoded)
    try:
        text = json.dumps(model, indent=2).encode()
    except (TypeError, ValueError) as error:
        problem = f"`config` is not JSON: {error}."
        fix = "convert other values, such as NumPy's numbers with float(x)."
        raise fail("interop.write", problem, fix=fix, error=TypeError) from None
    files = {**_tokenizer(tokenizer), "config.json": text}
    with written_folder(
        path, tensors, files, limit=limit, metadata=target.metadata, overwrite=overwrite
    ) as write_tensor:
        for name in with_bar("write", "tensor", leaves, progress):
            item, leaf = encoded[name], as_numpy(name, leaves[name].read(), format)
            for tensor, array in zip(item.tensors, item.make(leaf), strict=True):
                write_tensor(tensor, np.asarray(array))


def _check_unused(value: Any, name: str, format: str) -> None:
    """Checks that an argument that a format does not use is left out."""
    if value is not None:
        problem = f"`{name}` has no use for {format}: {_INSTEAD.get(name, 'it is for folders')}."
        raise fail("interop.write", problem, fix="leave it out.")


_INSTEAD = {
    "metadata": "it is for gguf",
    "config": "metadata= says what the model is",
    "tokenizer": "metadata= has the entries tokenizer.ggml.*",
}


def _activations(
    format: str, target: Target, spec: QSpec | None, leaves: Mapping[str, Leaf]
) -> tuple[Any, ...]:
    """Returns the last argument of `encode` and `config` of a target."""
    if spec is not None and not target.activations:
        problem = f"{format} does not support quantized activations."
        raise fail("interop.write", problem, fix='leave it out, or write "compressed-tensors".')
    if not target.activations:
        return ()
    lacking = [
        name
        for name, leaf in leaves.items()
        if spec is not None
        and not spec.dynamic
        and isinstance(leaf.spec, QTensor)
        and f"{name.removesuffix('.weight')}.input_scale" not in leaves
    ]
    if lacking:
        problem = f"static activations need an input_scale next to {some(map(repr, lacking))}."
        fix = "put each scale (jqx.affines) into the tree as <module>.input_scale, or be dynamic."
        raise fail("interop.write", problem, fix=fix)
    return (spec,)


def _tensors(encoded: Mapping[str, Encoded]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Returns dtype and shape of the tensors to write, by name."""
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, item in encoded.items():
        for tensor, kind in item.tensors.items():
            if tensor in tensors:
                problem = f"the tensor {tensor!r} exists twice: as a leaf, and as part of {name!r}."
                fix = "leave out what belongs to a quantized weight: its scales and zero points."
                raise fail("interop.write", problem, fix=fix)
            tensors[tensor] = kind
    return tensors


def _encode_array(name: str, spec: Any) -> Encoded:
    """Returns an array as it is, after checking that files of other libraries support its dtype."""
    dtype = np.dtype(spec.dtype)
    if not (stored_dtype(dtype) == dtype and name != METADATA):
        problem = f"the array {name!r} does not fit safetensors files of other libraries."
        detail = f"{dtype.name}; the name {METADATA!r} is taken"
        fix = "convert it, for example with x.astype(jnp.int8); jqx.save keeps every dtype."
        raise fail("interop.write", problem, given=detail, fix=fix)
    return Encoded({name: (dtype, tuple(spec.shape))}, lambda x: [x], None)


def _config(config: Any, tree: Any) -> dict[str, Any]:
    """Returns the config of the model, without its quantization config."""
    if config is None and isinstance(tree, Archive):
        config = tree.config
    if isinstance(config, (str, os.PathLike)):
        path = as_path("interop.write", config)
        config = read_config(path) if os.path.isdir(path) else read_json(path)
    if not isinstance(config, Mapping):
        detail = "none" if config is None else f"config of type {type(config).__name__}"
        problem = f"there is no config of the model: {detail}."
        fix = "pass config=json.load(...) of the float model, or {} to write none."
        raise fail("interop.write", problem, fix=fix, error=TypeError)
    assert isinstance(config, Mapping)
    return without_quantization(config)


def _tokenizer(tokenizer: Any) -> dict[str, bytes]:
    """Returns the files of a tokenizer."""
    if tokenizer is None:
        return {}
    if hasattr(tokenizer, "save_pretrained"):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}
    folder = pathlib.Path(as_path("interop.write", tokenizer))
    files = {name: folder / name for name in TOKENIZERS if (folder / name).is_file()}
    if not files:
        problem = f"there is no tokenizer in {str(folder)!r}, such as {', '.join(TOKENIZERS[:3])}."
        fix = "pass the folder of the float model, or tokenizer=None."
        raise fail("interop.write", problem, fix=fix, error=FileNotFoundError)
    return {name: path.read_bytes() for name, path in files.items()}


# Writes GGUF files tensor by tensor; a file is written completely or not at all.

_TYPES = {np.dtype(dtype).name: kind for kind, dtype in NUMBERS.items()}
"""Metadata types that are numbers, by dtype."""

_STRING, _ARRAY = 8, 9

_ARCHITECTURE, _ALIGNMENT = "general.architecture", "general.alignment"


def write_gguf(
    path: Path,
    leaves: Mapping[str, Leaf],
    metadata: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    progress: bool,
) -> None:
    """Writes a file; see `jqx.interop.write`.

    Raises:
      OSError: if the file exists already or cannot be written.
      TypeError: if metadata has a type that the format does not support.
      ValueError: if the format cannot hold a tensor.
    """
    fix = "pass metadata={'general.architecture': 'llama', ...}, such as read_gguf(...).metadata."
    check_instance("interop.write", "metadata", metadata, Mapping, fix=fix)
    assert metadata is not None
    architecture = metadata.get(_ARCHITECTURE)
    if not (isinstance(architecture, str) and architecture):
        problem = f"`metadata` does not say which model a GGUF file has: {_ARCHITECTURE} is "
        problem += f"{shown(architecture)}."
        raise fail("interop.write", problem, fix=fix)
    stored = metadata.get(_ALIGNMENT, 32)
    is_integer = isinstance(stored, (int, np.integer)) and not isinstance(stored, bool)
    if not (is_integer and 8 <= stored <= 2**16 and stored & (stored - 1) == 0):
        problem = f"{_ALIGNMENT!r} is {shown(stored)}, not a power of two from 8 to 65536."
        raise fail("interop.write", problem, fix="leave it out: tensors are aligned to 32 bytes.")
    alignment = int(stored)
    target = as_path("interop.write", path)
    if not overwrite and os.path.lexists(target):
        problem = f"{target!r} exists already."
        fix = "choose another name, or pass overwrite=True."
        raise fail("interop.write", problem, fix=fix, error=FileExistsError)
    entries = {name: encode(name, leaf.spec) for name, leaf in leaves.items()}
    offsets, stop = {}, 0
    for name, entry in entries.items():
        offsets[name] = stop
        stop += -(-entry.size // alignment) * alignment
    head = _header(metadata, entries, offsets)
    data_start = -(-len(head) // alignment) * alignment
    with Replacement("interop.write", target) as file:
        file.write(0, head.ljust(data_start, b"\0"))
        for name in with_bar("write", "tensor", leaves, progress):
            entry, leaf = entries[name], leaves[name].read()
            array = entry.make(as_numpy(name, leaf, "GGUF"))
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            assert raw.size == entry.size, f"{name}: {raw.size} bytes are not {entry.size}"
            file.write(data_start + offsets[name], raw.data)
            file.write(data_start + offsets[name] + raw.size, bytes(-raw.size % alignment))
        file.commit()


def _header(
    metadata: Mapping[str, Any], entries: Mapping[str, GgufEntry], offsets: Mapping[str, int]
) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, value in metadata.items():
        check_instance("interop.write", "metadata", key, str, fix="use strings as keys.")
        kind, raw = _value(key, value)
        parts += [_text(key), struct.pack("<I", kind), raw]
    for name, entry in entries.items():
        sizes = entry.shape[::-1]
        parts += [_text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts.append(struct.pack("<IQ", entry.kind, offsets[name]))
    return b"".join(parts)


def _text(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        problem = f"a name or a string of `metadata` is not text: {text!r}, {error}."
        fix = "correct it: UTF-8 cannot encode lone surrogates."
        raise fail("interop.write", problem, fix=fix) from None
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """Returns the type and the bytes of a metadata value."""
    if isinstance(value, str):
        return _STRING, _text(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        texts = b"".join(map(_text, value))
        return _ARRAY, struct.pack("<IQ", _STRING, len(value)) + texts
    array = value if isinstance(value, (np.ndarray, np.generic)) else _as_numbers(value)
    fits = array is not None and array.ndim < 2 and array.dtype.name in _TYPES
    if not fits:
        problem = f"{shown(key)} of `metadata` has no type in GGUF files: {type(value).__name__}."
        fix = "convert it to strings, numbers or booleans, or to lists or 1-d arrays of them."
        raise fail("interop.write", problem, fix=fix, error=TypeError)
    assert array is not None
    kind, raw = _TYPES[array.dtype.name], array.astype(array.dtype.newbyteorder("<")).tobytes()
    return (kind, raw) if array.ndim == 0 else (_ARRAY, struct.pack("<IQ", kind, array.size) + raw)


def _as_numbers(value: Any) -> np.ndarray | None:
    """Returns Python numbers in the smallest dtype that files of llama.cpp use for them."""
    is_list = isinstance(value, (list, tuple))
    items = list(value) if is_list else [value]
    if all(isinstance(item, bool) for item in items):
        return np.array(value)
    if all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items):
        if any(isinstance(item, float) for item in items):
            largest = np.finfo(np.float32).max
            wide = any(largest < abs(item) < math.inf for item in items)
            return np.array(value, np.float64 if wide else np.float32)
        low, high = min(items), max(items)
        order = (np.uint32, np.int32, np.uint64, np.int64)
        for dtype in (np.int32, *order) if is_list else order:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return np.array(value, dtype)
    return None


# Encodes a leaf for a GGUF file: the type of its tensor, and the bytes of its blocks.


_NAME = "GGUF"
_MOST_OF_NAME = 63
_HALF = np.dtype(np.float16)


class GgufEntry(NamedTuple):
    """A tensor to be written.

    Attributes:
      kind: number of its type.
      shape: shape of its weights.
      make: computes its numbers or blocks from the leaf as NumPy arrays.
    """

    kind: int
    shape: tuple[int, ...]
    make: Callable[[Any], np.ndarray]

    @property
    def size(self) -> int:
        """Size in bytes."""
        form = FORMATS[self.kind]
        return math.prod(self.shape) // form.size * form.fields.itemsize


def encode(path: str, leaf: Any) -> GgufEntry:
    """Returns the encoded form of a leaf.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    if len(path.encode()) > _MOST_OF_NAME or len(leaf.shape) > MOST_AXES:
        expected = f"names of at most {_MOST_OF_NAME} bytes, and at most {MOST_AXES} axes"
        fix = "name it as llama.cpp does, such as blk.0.attn_q.weight; merge or split its axes."
        refuse_leaf(path, leaf, _NAME, expected=expected, fix=fix)
    name, make = _coded(path, leaf) if isinstance(leaf, QTensor) else _encode_floats(path, leaf)
    return GgufEntry(NUMBER_OF[name], tuple(leaf.shape), make)


def _encode_floats(path: str, leaf: Any) -> tuple[str, Callable[[Any], np.ndarray]]:
    kinds = {form.fields: form.name for form in FORMATS.values() if form.form is None}
    dtype = np.dtype(leaf.dtype)
    if dtype not in kinds:
        fix = f"convert it to one of {', '.join(kinds.values())}, for example to float32."
        refuse_leaf(path, leaf, _NAME, fix=fix)
    return kinds[dtype], lambda x: np.ascontiguousarray(x)


def _coded(path: str, leaf: QTensor) -> tuple[str, Callable[[QTensor], np.ndarray]]:
    """Returns the type of a QTensor, and the function that computes its blocks."""
    form, size = format_of(leaf.qtype), leaf.groups.sizes[-1] if leaf.ndim else 0
    fits_blocks = size and size % 32 == 0 and leaf.shape[-1] % size == 0 and leaf.order is None
    plain, name = leaf.zero_point is None and leaf.offset is None, ""
    if form == mxfp4 and plain and leaf.scale.dtype == E8M0:
        name = "MXFP4"
    elif isinstance(form, Integer) and form.bits == 8 and form.signed and plain:
        name = "Q8_0"
    elif isinstance(form, Integer) and form.bits == 4:
        name = "Q4_0" if form.signed and plain else "Q4_1"
    if not (name and fits_blocks):
        formats = "int4, 4 bits with a minimum, int8 or mxfp4"
        expected = f"{formats}; whole groups of 32 or more; in order"
        fix = "quantize it like that, leave it in float, or write compressed-tensors."
        refuse_leaf(path, leaf, _NAME, expected=expected, fix=fix)
    return name, partial(_blocks, path, name)


def _blocks(path: str, name: str, q: QTensor) -> np.ndarray:
    """Returns the blocks of a QTensor. The first half of 32 codes of 4 bits is in the low bits."""
    form, blocks_per_group = format_of(q.qtype), q.groups.sizes[-1] // 32
    raw = np.empty((*q.shape[:-1], q.shape[-1] // 32), FORMATS[NUMBER_OF[name]].fields)
    if name == "MXFP4":
        scale = for_rows(np.asarray(q.scale).view(np.uint8), q)
    else:
        scale = exact_halves(path, q, _NAME)
    raw["scale"] = np.repeat(scale, blocks_per_group, -1)
    if name == "Q4_1":
        scale = for_rows(scale_of(q), q).astype(np.float64)
        raw["minimum"] = np.repeat(minimums_of(path, q, scale, _HALF, _NAME), blocks_per_group, -1)
    codes = codes_of(q)
    if form.bits == 4 and codes.dtype == np.int8:
        codes = (codes + np.int8(8)).view(np.uint8)
    codes = codes.reshape(*raw.shape, 32)
    raw["codes"] = codes if form.bits == 8 else codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return raw
