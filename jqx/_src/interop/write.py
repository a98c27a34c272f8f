"""`write`: writes a tree of arrays and QTensors as a folder that other libraries load."""

import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..checks import called, check_integer, shown
from ..errors import fail, some
from ..files import Path, as_path
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec, as_spec
from ..transforms.calibrate import with_bar
from .archive import Archive
from .bitsandbytes import bitsandbytes_config, encode_bitsandbytes
from .codec import Encoded, as_numpy, refuse_leaf
from .compressed_tensors import compressed_config, encode_compressed
from .config import read_config, read_json, without_quantization
from .fp8 import encode_fp8, fp8_config
from .gguf_write import write_gguf
from .gptq import awq_config, encode_awq, encode_gptq, gptq_config
from .mlx import encode_mlx, mlx_config
from .named_tree import Leaf, leaves_of
from .safetensors import METADATA, stored_dtype
from .save import FolderWriter

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
        names of weights in float.
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
        for name, leaf in leaves.items()
        if isinstance(leaf.spec, QTensor)
    }
    if target.key and not encoded:
        problem = f"none of {len(leaves)} arrays is quantized, for {format}."
        fix = "quantize them first, with jqx.ptq or jqx.quantize_params."
        raise fail("interop.write", problem, fix=fix)
    floats = [
        name
        for name, leaf in leaves.items()
        if name not in encoded and name.endswith(".weight") and len(leaf.spec.shape) > 1
    ]
    layers = {name: item.layer for name, item in encoded.items()}
    model = _config(config, tree)
    if target.key:
        model[target.key] = target.config(layers, floats, *arguments)
    tensors = _tensors(leaves, encoded)
    try:
        text = json.dumps(model, indent=2).encode()
    except (TypeError, ValueError) as error:
        problem = f"`config` is not JSON: {error}."
        fix = "convert other values, such as NumPy's numbers with float(x)."
        raise fail("interop.write", problem, fix=fix, error=TypeError) from None
    files = {**_tokenizer(tokenizer), "config.json": text}
    with FolderWriter(
        path, tensors, files, limit=limit, metadata=target.metadata, overwrite=overwrite
    ) as out:
        for name in with_bar("write", "tensor", leaves, progress):
            leaf = as_numpy(name, leaves[name].read(), format)
            arrays = encoded[name].make(leaf) if name in encoded else {name: leaf}
            for tensor, array in arrays.items():
                out.write(tensor, np.asarray(array))


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


def _tensors(
    leaves: Mapping[str, Leaf], encoded: Mapping[str, Encoded]
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Returns dtype and shape of the tensors to write, by name."""
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, leaf in leaves.items():
        plain = {name: (_stored(name, leaf.spec), tuple(leaf.spec.shape))}
        for each, kind in (encoded[name].tensors if name in encoded else plain).items():
            if each in tensors:
                problem = f"the tensor {each!r} exists twice: as a leaf, and as part of {name!r}."
                fix = "leave out what belongs to a quantized weight: its scales and zero points."
                raise fail("interop.write", problem, fix=fix)
            tensors[each] = kind
    return tensors


def _stored(name: str, spec: Any) -> np.dtype:
    """Returns the dtype of an array, after checking that files of other libraries support it."""
    if isinstance(spec, QTensor):
        return np.dtype(spec.dtype)
    if not (stored_dtype(spec.dtype) == spec.dtype and name != METADATA):
        problem = f"the array {name!r} does not fit safetensors files of other libraries."
        detail = f"{np.dtype(spec.dtype).name}; the name {METADATA!r} is taken"
        fix = "convert it, for example with x.astype(jnp.int8); jqx.save keeps every dtype."
        raise fail("interop.write", problem, given=detail, fix=fix)
    return np.dtype(spec.dtype)


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
