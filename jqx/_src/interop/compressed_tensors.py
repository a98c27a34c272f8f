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

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from ... import QSpec, QTensor, per_tensor, per_token
from ...extend import Groups
from ...numerics import Block, Integer, format_of, mxfp4, mxfp8_e4m3, nvfp4
from ..errors import fail
from ..numerics.lookup import E8M0
from .codec import (
    FLOATS,
    CodedLeaf,
    Config,
    Encoded,
    abstract,
    check_no_offset,
    codes_of,
    for_rows,
    from_stream,
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
    scale_of,
    shape_and_dtype,
    stream_length,
    to_stream,
    weight,
)
from .safetensors import Source

_PARTS = ("packed", "scale", "zero_point", "global_scale", "shape")

COMPRESSED_MARKS = tuple(f".weight_{part}" for part in _PARTS)
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


def compressed_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a checkpoint."""
    config = quantization_of(source.config)
    assert config is not None
    if config.data.get("transform_config"):
        config.refuse("transform_config", "none: such rotations run in the model")
    if config.data.get("sparsity_config"):
        config.part("sparsity_config").one_of("format", ("dense",), "dense")
    schemes, ignored = _schemes(config), config.names("ignore")
    for module in modules_with(source, ".weight_scale"):
        if not any(matches(pattern, module, config.where) for pattern in ignored):
            scheme = _scheme_of(source, module, schemes, config)
            yield READ[_kind(source, module, scheme)](source, module, scheme.weights, dtype)


def keeps_weights(source: Source) -> bool:
    """Returns whether the config quantizes no weights, only activations or caches."""
    config = quantization_of(source.config)
    return config is not None and not _schemes(config)


def _schemes(config: Config) -> list[_Scheme]:
    groups = config.part("config_groups") if "config_groups" in config else Config({}, "")
    format = config.one_of("format", _KNOWN, "mixed-precision")
    schemes = []
    for name in groups.data:
        group = groups.part(name)
        if "weights" in group:
            kind, args = group.one_of("format", _KNOWN, format), group.part("weights")
            texts = {key: x for key, x in args.data.items() if isinstance(x, str)}
            lower = {key: texts[key].lower() for key in _LOWER if key in texts}
            args = Config({**args.data, **lower}, args.where)
            schemes.append(_Scheme(group.names("targets"), kind, args))
    return schemes


_LOWER = ("type", "strategy", "actorder")
"""Arguments whose values the package reads in lower case."""


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
    matching = named or of_class
    if len(matching) == 1 or (named and matching):
        return matching[0]
    count = "several groups" if matching else "no group"
    problem = f"belongs to a layer that {count} of the config describe{'s' * (not matching)}."
    texts = [scheme.targets for scheme in schemes][:4]
    refuse(source, f"{module}.weight_scale", problem, given=f"groups for {texts}")


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
        format = "pack-quantized" if packed else "int-quantized"
    elif packed:
        if bits != 4:
            args.refuse("num_bits", "4 for packed floats")
        two = f"{module}.weight_global_scale" in source.entries
        format = "nvfp4-pack-quantized" if two else "mxfp4-pack-quantized"
    else:
        if bits != 8:
            args.refuse("num_bits", "8 for floats that are not packed")
        scale = source.dtype(f"{module}.weight_scale")
        format = "mxfp8-quantized" if scale == np.uint8 else "float-quantized"
    free = ("mixed-precision", "naive-quantized", "dense")
    if scheme.format not in (format, *free):
        problem = f"has tensors of {format}, not of {scheme.format} as in the config."
        refuse(source, f"{module}.weight_scale", problem)
    return format


# The config that is written: the value of `quantization_config`.


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


def compressed_config(
    layers: Mapping[str, LayerConfig], floats: Sequence[str], activation: QSpec | None
) -> dict[str, Any]:
    """Returns `quantization_config` of a checkpoint.

    Args:
      layers: config of each QTensor, by its path.
      floats: names of the modules whose weights stay in float.
      activation: how the activations that multiply the weights are quantized.

    Raises:
      ValueError: if the format has no such activations.
    """
    kinds = list(dict.fromkeys(layers.values()))
    formats = sorted({kind.format for kind in kinds})
    inputs = None if activation is None else _inputs(activation)
    ignored: dict[str, None] = dict.fromkeys(floats)
    if len(kinds) == 1 and f"{_HEAD}.weight" not in layers:
        ignored[_HEAD] = None  # if tied to the table it has no tensor, but is a Linear
    groups = {}
    for i, kind in enumerate(kinds):
        modules = [path.removesuffix(".weight") for path, layer in layers.items() if layer == kind]
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
    bits: int, kind: str, strategy: str, group: int | None = None, **options: Any
) -> dict[str, Any]:
    args = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy}
    return {**args, "group_size": group, "dynamic": False, **options}


def _inputs(spec: QSpec) -> dict[str, Any]:
    """Returns `input_activations` of a spec."""
    form = format_of(spec.qtype)
    size = getattr(spec.granularity, "size", None)
    if form == nvfp4 and spec.dynamic:
        scales = {"dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
        return _arguments(4, "float", "tensor_group", 16, **scales)
    kind = "int" if isinstance(form, Integer) else "float"
    has_codes = isinstance(form, Integer) or spec.qtype == jnp.float8_e4m3fn
    strategy = "group" if isinstance(size, int) else ""
    strategy = {per_token(): "token", per_tensor(): "tensor"}.get(spec.granularity, strategy)
    if has_codes and strategy and (spec.dynamic or strategy == "tensor"):
        options = {"dynamic": spec.dynamic, "symmetric": spec.symmetric}
        return _arguments(form.bits, kind, strategy, size, **options)
    problem = f"{NAME} does not support the activations {spec}."
    expected = "integers or float8_e4m3fn with one scale a tensor, token or group, or dynamic nvfp4"
    fix = 'pass for example activation="int8:token:dynamic".'
    raise fail("interop.write", problem, expected=expected, fix=fix)


# Reading: codes, scales, zero points and their order.


_HALF = jnp.dtype(jnp.bfloat16)
"""Formats of weights whose scales are not floats."""


def _groups(
    source: Source, module: str, args: Config, shape: tuple[int, ...], dtypes: Any = FLOATS
) -> tuple[Groups, np.dtype]:
    """Returns which elements of a weight share a scale, and the dtype of scales, after checking
    that the number of scales agrees with the config.
    """
    *lead, rows, columns = shape
    size = args.data.get("group_size")
    unsaid = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = args.one_of("strategy", strategies, unsaid)
    sizes = {
        "tensor": lambda: (rows, columns),
        "channel": lambda: (1, columns),
        "block": lambda: _block(args),
    }.get(strategy, lambda: (1, args.integer("group_size")))()
    lead_sizes = tuple(lead) if strategy == "tensor" else (1,) * len(lead)
    groups = Groups(shape, (*lead_sizes, min(sizes[0], rows), min(sizes[1], columns)))
    name = f"{module}.weight_scale"
    stored, dtype = shape_and_dtype(source, name, None, dtypes)
    if _wide(stored) != _wide(groups.scale_shape):
        shape_and_dtype(source, name, groups.scale_shape, dtypes, f"for the strategy {strategy}")
    return groups, dtype


def _wide(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape without axes of size 1."""
    return tuple(n for n in shape if n != 1)


def _block(args: Config) -> tuple[int, int]:
    block: Any = args.data.get("block_structure")
    if isinstance(block, str) and block.count("x") == 1:  # as in old releases
        block = [int(text) if text.isdecimal() else text for text in block.split("x")]
    return args.two_sizes("block_structure", block, "two sizes, such as [128, 128]")


def _packed(source: Source, module: str, args: Config, asked: np.dtype | None) -> CodedLeaf:
    """Reads a weight of `pack-quantized`."""
    form, codes = _integers(args), f"{module}.weight_packed"
    shape, per_word = _packed_shape(source, module, form.bits)
    groups, dtype = _groups(source, module, args, shape)
    zeros = _zeros(source, module, args, groups, form, packed=True)
    order = _order(source, module, args, groups)

    def decode(codes: np.ndarray, scale: np.ndarray, *zeros: np.ndarray) -> list[np.ndarray]:
        values = _values(codes, shape[-1], form, per_word, order)
        points = [_packed_zeros(points, groups.scale_shape, form) for points in zeros]
        return [values, scale, *points, *([] if order is None else [order])]

    real = real_dtype(source, asked, dtype)
    fields = order_field(order, len(shape))
    template = weight(groups, form, dtype, real, zero_point=bool(zeros), **fields)
    tensors = (codes, np.dtype(np.int32)), (f"{module}.weight_scale", dtype), *zeros
    return _leaf(source, module, tensors, template, decode)


def _packed_shape(source: Source, module: str, bits: int) -> tuple[tuple[int, ...], int]:
    """Returns the shape of a packed weight, and the number of codes in a word if no code crosses
    two words, as in old releases; 0 if codes are dense.
    """
    name, packed = f"{module}.weight_shape", f"{module}.weight_packed"
    stored, _ = shape_and_dtype(source, packed, None, (jnp.int32,))
    rank = len(stored)
    _, dtype = shape_and_dtype(
        source, name, (rank,), (jnp.int64, jnp.int32), "a size for each axis"
    )
    shape = tuple(source.read(name, dtype).tolist())
    if 2 <= rank <= 3 and shape[:-1] == stored[:-1] and shape[-1] > 0:
        if stored[-1] == stream_length(shape[-1], bits) // 4:
            return shape, 0
        if stored[-1] == -(-shape[-1] // (32 // bits)):
            return shape, 32 // bits
    problem = f"of {list(stored)} words does not hold {list(shape)} codes of {bits} bits."
    refuse(source, packed, problem)


def _integers(args: Config) -> Integer:
    bits = args.integer("num_bits", 8, least=2)
    if bits > 8:
        args.refuse("num_bits", "2 to 8")
    return Integer(bits)


def _values(
    codes: np.ndarray, count: int, form: Integer, per_word: int, order: np.ndarray | None
) -> np.ndarray:
    """Returns codes in the layout of a QTensor, from rows of words."""
    bits = form.bits
    rows = codes.reshape(-1, codes.shape[-1])

    def dense(raw: np.ndarray) -> np.ndarray:
        words = raw.view("<u4")[..., None]
        shifts = np.arange(0, per_word * bits, bits, dtype=np.uint32)
        parts = ((words >> shifts) & np.uint32(2**bits - 1)).astype(np.uint8)
        return to_stream(parts.reshape(len(raw), -1)[:, :count], bits)

    convert = dense if per_word else None
    values = repacked(rows, bits, count, flip=2 ** (bits - 1), order=order, convert=convert)
    return values.view(np.int8) if bits == 8 else values


def _zeros(
    source: Source, module: str, args: Config, groups: Groups, form: Integer, *, packed: bool
) -> tuple[tuple[str, np.dtype], ...]:
    """Returns the tensor of the zero points; none if the config says that there are none."""
    name = f"{module}.weight_zero_point"
    if args.flag("symmetric", True):
        if name in source.entries and source.read(name, source.dtype(name)).any():
            refuse(source, name, "has zero points, which the config excludes by symmetric == true.")
        return ()
    *lead, rows, columns = groups.scale_shape
    if packed and args.data.get("strategy") != "tensor":
        shape = (*lead, stream_length(rows, form.bits) // 4, columns)
        return ((name, shape_and_dtype(source, name, shape, (jnp.int32,))[1]),)
    stored, dtype = shape_and_dtype(source, name, None, (jnp.int8,))
    if _wide(stored) != _wide(groups.scale_shape):
        shape_and_dtype(source, name, groups.scale_shape, (jnp.int8,), "as many as scales")
    return ((name, dtype),)


def _packed_zeros(points: np.ndarray, shape: tuple[int, ...], form: Integer) -> np.ndarray:
    """Returns zero points from streams along the last axis but one."""
    if points.dtype == np.int8:
        return points.astype(form.storage)
    rows = np.ascontiguousarray(np.swapaxes(points, -1, -2)).view(np.uint8)
    codes = from_stream(rows, form.bits, shape[-2]).astype(np.int16) - 2 ** (form.bits - 1)
    return np.swapaxes(codes, -1, -2).astype(form.storage)


def _order(source: Source, module: str, args: Config, groups: Groups) -> np.ndarray | None:
    """Returns the order in which the columns of a weight are sorted by their groups; `None` if they
    are sorted already.
    """
    name = f"{module}.weight_g_idx"
    sorted_inputs = args.data.get("actorder") in ("group", "dynamic", True)
    if name not in source.entries and not sorted_inputs:
        return None
    _, dtype = shape_and_dtype(source, name, groups.shape[-1:], (jnp.int32,))
    indices = source.read(name, dtype)
    if (indices == -1).all():  # not used
        return None
    return order_of(source, name, indices, groups.sizes[-1])


def _plain(source: Source, module: str, args: Config, asked: np.dtype | None) -> CodedLeaf:
    """Reads a weight of `int-quantized`, `float-quantized`, `mxfp8-quantized`: a code per byte."""
    integers = args.one_of("type", ("int", "float"), "int") == "int"
    form: Any = Integer(8) if integers else jnp.dtype(jnp.float8_e4m3fn)
    kinds = (form.storage if integers else form,)
    shape, codes = shape_and_dtype(source, f"{module}.weight", None, kinds, axes=(2, 3))
    powers = source.dtype(f"{module}.weight_scale") == np.uint8
    groups, dtype = _groups(source, module, args, shape, (jnp.uint8,) if powers else FLOATS)
    zeros = _zeros(source, module, args, groups, Integer(8), packed=False) if integers else ()

    def decode(codes: np.ndarray, scale: np.ndarray, *zeros: np.ndarray) -> list[np.ndarray]:
        return [codes, scale.view(E8M0) if powers else scale, *zeros]

    real = real_dtype(source, asked, _HALF if powers else dtype)
    form, kind = (mxfp8_e4m3, E8M0) if powers else (form, dtype)
    template = weight(groups, form, kind, real, zero_point=bool(zeros))
    tensors = (f"{module}.weight", codes), (f"{module}.weight_scale", dtype), *zeros
    return _leaf(source, module, tensors, template, decode)


def _small_floats(source: Source, module: str, args: Config, asked: np.dtype | None) -> CodedLeaf:
    """Reads a weight of `nvfp4-pack-quantized` or `mxfp4-pack-quantized`: two codes per byte, the
    first in the low half. Codes of nvfp4 are divided by its single scale.
    """
    packed = f"{module}.weight_packed"
    stored, dtype = shape_and_dtype(source, packed, None, (jnp.uint8,), axes=(2, 3))
    shape, unit_shape = (*stored[:-1], 2 * stored[-1]), (1,) * len(stored)
    second = f"{module}.weight_global_scale"
    two = second in source.entries
    form = nvfp4 if two else mxfp4
    kinds = (jnp.float8_e4m3fn,) if two else (jnp.uint8,)
    groups, kind = _groups(source, module, args, shape, kinds)
    if groups.sizes != (*unit_shape[:-1], min(form.size, shape[-1])):
        args.refuse("group_size", f"{form.size}, of {form.name}")
    scale: Any = E8M0
    second_scale: tuple[tuple[str, np.dtype], ...] = ()
    if two:
        _, real = shape_and_dtype(source, second, None, (jnp.float32,))
        if _wide(source.entries[second].shape):
            shape_and_dtype(source, second, (1,), (real,))
        second_scale = ((second, real),)
        entries = abstract(groups.scale_shape, kind)
        scale = QTensor(entries, abstract(unit_shape, real), qtype=kind, dtype=real)

    def decode(codes: np.ndarray, scale: np.ndarray, *second: np.ndarray) -> list[np.ndarray]:
        values = repacked(codes.reshape(-1, codes.shape[-1]), 4, shape[-1])
        with np.errstate(divide="ignore"):
            parts = [scale, np.float32(1) / second[0]] if second else [scale.view(E8M0)]
        return [values, *parts]

    template = weight(groups, form, scale, real_dtype(source, asked, _HALF))
    tensors = (packed, dtype), (f"{module}.weight_scale", kind), *second_scale
    return _leaf(source, module, tensors, template, decode)


def _leaf(
    source: Source,
    module: str,
    tensors: tuple[tuple[str, np.dtype], ...],
    template: QTensor,
    decode: Callable[..., list[np.ndarray]],
) -> CodedLeaf:
    """Returns the weight of a module, with what has already been read from it."""
    read = {f"{module}.weight_{end}" for end in ("shape", "g_idx", "zero_point")}
    consumed = read.intersection(source.entries) - {name for name, _ in tensors}
    return CodedLeaf(f"{module}.weight", tensors, template, decode, tuple(sorted(consumed)))


READ = {
    "pack-quantized": _packed,
    "int-quantized": _plain,
    "float-quantized": _plain,
    "mxfp8-quantized": _plain,
    "nvfp4-pack-quantized": _small_floats,
    "mxfp4-pack-quantized": _small_floats,
}
"""The function that reads the weights of each format."""


# Writing: integers become `pack-quantized`, or `int-quantized` if
# activations are quantized too. Floats get the format that has their name.


_I32, _U8, _F8 = np.dtype(np.int32), np.dtype(np.uint8), jnp.dtype(jnp.float8_e4m3fn)

_BLOCKS = {
    mxfp8_e4m3: LayerConfig("mxfp8-quantized", 8, "float", strategy="group", group=32),
    mxfp4: LayerConfig("mxfp4-pack-quantized", 4, "float", strategy="group", group=32),
    nvfp4: LayerConfig("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group=16),
}
"""The configs of block formats."""


def encode_compressed(path: str, leaf: QTensor, activation: QSpec | None = None) -> Encoded:
    """Returns the encoded form of a QTensor.

    Args:
      path: name of the QTensor, `<module>.weight`.
      leaf: the QTensor `[out, in]`, or `[experts, out, in]`; it may be abstract.
      activation: how the activation that multiplies it is quantized; `None` leaves it in float.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    module, form = module_of(path, leaf, NAME), format_of(leaf.qtype)
    if leaf.ndim not in (2, 3):
        _refuse(path, leaf, "two axes, or three if matrices are stacked", "reshape it")
    check_no_offset(path, leaf, NAME)
    if isinstance(form, Integer):
        return _encode_integers(path, module, leaf, form, activation)
    if leaf.order is not None:
        _refuse(path, leaf, "integers if columns are sorted", "store it as integers")
    if isinstance(form, Block):
        return _encode_blocks(path, module, leaf, form)
    if leaf.qtype != jnp.float8_e4m3fn:
        formats = "integers of 2 to 8 bits, float8_e4m3fn, mxfp8_e4m3, mxfp4 or nvfp4"
        _refuse(path, leaf, formats, "quantize it again in one of these formats")
    return _encode_floats(path, module, leaf)


def _refuse(path: str, leaf: QTensor, expected: str, fix: str) -> NoReturn:
    refuse_leaf(path, leaf, NAME, expected=expected, fix=f"{fix}, or leave it in float.")


def _encode_integers(
    path: str, module: str, leaf: QTensor, form: Integer, activation: QSpec | None
) -> Encoded:
    """Encodes a weight of integers. Files store codes with half of their levels added, so that
    unsigned codes have a zero point.
    """
    bits, group = form.bits, leaf.groups.sizes[-1]
    if tail := leaf.shape[-1] % group:
        expected = f"groups of equal size along the last axis: the last group has {tail}"
        _refuse(path, leaf, expected, "quantize it with a group size that divides its inputs")
    if bits > 8:
        _refuse(path, leaf, "integers of 2 to 8 bits", "quantize it to 8 bits")
    entries, kind = _entries(path, leaf)
    one_group = group == leaf.shape[-1]
    plain = activation is not None and bits == 8 and one_group
    zeros, ordered = leaf.zero_point is not None or not form.signed, leaf.order is not None
    layer = LayerConfig(
        "int-quantized" if plain else "pack-quantized",
        bits,
        "int",
        symmetric=not zeros,
        strategy="channel" if one_group else "group",
        group=None if one_group else group,
        ordered=ordered,
    )
    *lead, rows, columns = leaf.shape
    words, i8 = stream_length(columns, bits) // 4, np.dtype(np.int8)
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {"weight_scale": (kind, entries)}
    if plain:
        tensors["weight"] = (i8, leaf.shape)
    else:
        tensors["weight_packed"] = (_I32, (*lead, rows, words))
        tensors["weight_shape"] = (np.dtype(np.int64), (leaf.ndim,))
    if zeros:
        packed = (_I32, (*lead, stream_length(rows, bits) // 4, entries[-1]))
        tensors["weight_zero_point"] = (i8, entries) if plain else packed
    if ordered:
        tensors["weight_g_idx"] = (_I32, (columns,))

    def make(q: QTensor) -> list[np.ndarray]:
        codes, points, index = integers_of(path, q, NAME)
        packed = [to_stream(codes, bits).view("<i4"), np.array(q.shape, np.int64)]
        arrays = [for_rows(scale_of(q), q), *([_signed(codes)] if plain else packed)]
        if zeros:
            rows = np.ascontiguousarray(np.swapaxes(points, -1, -2))
            streams = np.swapaxes(to_stream(rows, bits).view("<i4"), -1, -2)
            arrays.append(_signed(points) if plain else streams)
        return [*arrays, index] if ordered else arrays

    return Encoded({f"{module}.{name}": kind for name, kind in tensors.items()}, make, layer)


def _signed(codes: np.ndarray) -> np.ndarray:
    """Returns unsigned codes of 8 bits, less 128."""
    return (codes ^ np.uint8(128)).view(np.int8)


def _entries(path: str, leaf: QTensor) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape of scales with an entry for each row, and their dtype."""
    kind = np.dtype(leaf.scale.dtype)
    if kind not in [jnp.dtype(name) for name in FLOATS]:
        _refuse(path, leaf, "scales of float16, bfloat16 or float32", "convert its scale")
    return (*leaf.shape[:-1], leaf.groups.scale_shape[-1]), kind


def _encode_floats(path: str, module: str, leaf: QTensor) -> Encoded:
    """Encodes a weight of float8_e4m3fn."""
    _, kind = _entries(path, leaf)
    *lead, rows, columns = leaf.groups.sizes
    entries: tuple[int, ...] = leaf.groups.scale_shape
    if entries == (1,) * leaf.ndim:
        layer, entries = LayerConfig("float-quantized", 8, "float", strategy="tensor"), (1,)
    elif set(lead) - {1}:
        _refuse(path, leaf, "a scale for each matrix of a stack, or one", "quantize it again")
    elif rows > 1:
        layer = LayerConfig("float-quantized", 8, "float", strategy="block", block=(rows, columns))
    elif columns < leaf.shape[-1]:
        layer = LayerConfig("float-quantized", 8, "float", strategy="group", group=columns)
    else:
        layer = LayerConfig("float-quantized", 8, "float")
    tensors = {f"{module}.weight": (_F8, leaf.shape), f"{module}.weight_scale": (kind, entries)}

    def make(q: QTensor) -> list[np.ndarray]:
        return [codes_of(q).view(_F8), scale_of(q).reshape(entries)]

    return Encoded(tensors, make, layer)


def _encode_blocks(path: str, module: str, leaf: QTensor, form: Block) -> Encoded:
    """Encodes a weight of mxfp8, mxfp4 or nvfp4."""
    if form not in _BLOCKS:
        _refuse(path, leaf, "block formats mxfp8_e4m3, mxfp4 or nvfp4", "quantize it again")
    sizes = (*(1,) * (leaf.ndim - 1), min(form.size, leaf.shape[-1]))
    if leaf.groups.sizes != sizes or leaf.shape[-1] % form.size:
        _refuse(path, leaf, f"blocks of {form.size} along the last axis only", "quantize it again")
    inner = leaf.scale.scale if isinstance(leaf.scale, QTensor) else None
    if form == nvfp4 and (inner is None or inner.size != 1):
        _refuse(path, leaf, "one float scale for all scales of the tensor", "quantize it again")
    layer, (*lead, columns) = _BLOCKS[form], leaf.shape
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    if layer.bits == 8:
        tensors[f"{module}.weight"] = (_F8, leaf.shape)
    else:
        tensors[f"{module}.weight_packed"] = (_U8, (*lead, columns // 2))
    kind = _F8 if form == nvfp4 else _U8
    tensors[f"{module}.weight_scale"] = (kind, leaf.groups.scale_shape)
    if form == nvfp4:
        tensors[f"{module}.weight_global_scale"] = (np.dtype(np.float32), (1,))

    def make(q: QTensor) -> list[np.ndarray]:
        bits = codes_of(q)
        codes = bits.view(_F8) if layer.bits == 8 else to_stream(bits, 4, 1)
        if not isinstance(q.scale, QTensor):
            return [codes, np.asarray(q.scale).view(_U8)]
        factor = np.asarray(q.scale.scale).reshape(1)
        return [codes, np.asarray(q.scale.values), _divisor(path, leaf, factor)]

    return Encoded(tensors, make, layer)


def _divisor(path: str, leaf: QTensor, factor: np.ndarray) -> np.ndarray:
    """Returns the float32 divisor whose reciprocal is nearest to a factor."""
    with np.errstate(divide="ignore"):
        reciprocal = np.float32(1) / factor
        ends = [np.nextafter(reciprocal, np.float32(x)) for x in (-np.inf, np.inf)]
        candidates = np.stack([ends[0], reciprocal, ends[1]])
        off = np.abs(np.float32(1) / candidates.astype(np.float32) - factor)
    divisor = candidates[np.argmin(off, axis=0), 0].astype(np.float32)
    if not np.isfinite(divisor).all():
        _refuse(path, leaf, "a scale of all scales with a finite reciprocal", "check the weight")
    return divisor
