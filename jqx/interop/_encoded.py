"""A QTensor in a checkpoint format of another library: its tensors and their numbers."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..numerics import Integer, format_of
from ..tensor import QTensor
from ._bits import unpack

Tensors = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


class Encoded(NamedTuple):
    """A QTensor in a format, before its numbers are computed.

    Attributes:
      tensors: dtype and shape of the tensors to write, by name.
      make: computes these from the QTensor, whose leaves are NumPy arrays, by name.
      layer: the config of the QTensor: a hashable value that the format defines.
    """

    tensors: Tensors
    make: Callable[[QTensor], Mapping[str, np.ndarray]]
    layer: Any


def refuse_leaf(path: str, leaf: Any, format: str, *, expected: str, fix: str) -> NoReturn:
    """Raises an error: a format cannot hold a tensor."""
    raise fail(
        "interop.write",
        f"{format} cannot hold the tensor {path!r}.",
        given=repr(leaf),
        expected=expected,
        fix=fix,
    )


def check_names_in_float(
    layers: Iterable[str], floats: Sequence[str], format: str, *, inside: bool = False
) -> None:
    """Checks that loaders that skip the layers in float do not skip quantized ones. transformers
    skips modules in a module of the list, and those whose names end in one.

    Args:
      layers: names of quantized weights.
      floats: names of weights in float.
      format: name of the format.
      inside: whether some loaders also skip names that have a name of the list anywhere.
    """
    skipped = [name.removesuffix(".weight") for name in floats]
    for path in layers:
        module = path.removesuffix(".weight")
        part = next(
            (
                name
                for name in skipped
                if module.endswith(name)
                or f"{module}.".startswith(f"{name}.")
                or (inside and name in module)
            ),
            None,
        )
        if part is not None:
            refuse_leaf(
                path,
                f"a quantized layer, and {part!r} in float",
                format,
                expected="layers in float whose names are not parts of those of quantized ones: "
                "loaders skip layers whose names have such a part",
                fix=f"quantize {part!r} too, or write GPTQ or compressed-tensors.",
            )


def module_of(path: str, leaf: Any, format: str) -> str:
    """Returns the module of a weight, after checking that it has the name of a weight."""
    if not path.endswith(".weight"):
        refuse_leaf(
            path,
            leaf,
            format,
            expected="quantized tensors that are named <module>.weight",
            fix="name it like that with jqx.interop.named(params, names), or leave it in float.",
        )
    if 0 in leaf.shape:
        refuse_leaf(path, leaf, format, expected="weights", fix="leave it in float.")
    return path.removesuffix(".weight")


def as_numpy(path: str, leaf: Any, format: str) -> Any:
    """Returns a leaf of NumPy arrays, after checking that other libraries read finite numbers: a
    QTensor, or a separate scale of an activation or a cache. Other arrays may hold anything.

    Raises:
      ValueError: if a scale, a minimum or a code is NaN or infinite, if scales make all codes 0, or
        if a separate scale is not above 0.
    """
    leaf = jax.tree.map(np.asarray, leaf)
    wrong = _wrong_numbers(leaf) if isinstance(leaf, QTensor) else _wrong_scale(path, leaf)
    if wrong is not None:
        refuse_leaf(
            path,
            leaf if isinstance(leaf, QTensor) else f"{leaf.dtype.name}{list(leaf.shape)}: {wrong}",
            format,
            expected=f"finite numbers, and scales that keep the codes: it has {wrong}",
            fix="check the weight or the statistics that it comes from for NaN, infinity and "
            "zeros; jqx.save keeps it as it is.",
        )
    return leaf


_SEPARATE = re.compile(r"(.*[./])?(input|output|[qkv])(_global)?_scale")
"""Names of the scales of activations and caches."""


def _wrong_scale(path: str, x: np.ndarray) -> str | None:
    """Returns what is wrong with a separate scale; `None` if nothing is, or it is none."""
    if not _SEPARATE.fullmatch(path) or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    values = x.astype(np.float64)
    return None if (np.isfinite(values) & (values > 0)).all() else "a scale that is not above 0"


def _wrong_numbers(q: QTensor) -> str | None:
    """Returns what is wrong with the numbers of a QTensor; `None` if nothing is."""
    scale, offset, codes = scale_of(q).astype(np.float64), q.real_offset(), np.asarray(q.values)
    if not np.isfinite(scale).all():
        return "scales that are NaN or infinite"
    if offset is not None and not np.isfinite(np.asarray(offset).astype(np.float64)).all():
        return "minimums that are NaN or infinite"
    if jnp.issubdtype(codes.dtype, jnp.floating) and not np.isfinite(codes).all():
        return "codes that are NaN or infinite"
    if not scale.any() and offset is None and codes_of(q).any():
        return "only scales of 0, and codes of other numbers"
    return None


def codes_of(q: QTensor) -> np.ndarray:
    """Returns the codes of a QTensor of NumPy arrays, in the order of its shape: integers as int8
    or uint8, floats as the bits of their format in uint8.
    """
    form, layout, values = format_of(q.qtype), q.layout, np.asarray(q.values)
    signed = form.code_range is not None and form.code_range[0] < 0
    if layout is not None and layout.packing is not None:
        axis = layout.stored_axis
        assert axis is not None
        rows = np.moveaxis(values, axis, -1)
        if layout.kernel == "cpu":  # the codes of a byte are consecutive
            places = np.arange(0, 8, form.bits, dtype=np.uint8)
            parts = (rows[..., None] >> places) & np.uint8(2**form.bits - 1)
            bits = parts.reshape(*rows.shape[:-1], layout.packing.length)
        else:
            bits = unpack(rows, form.bits, layout.packing.length)
        bits = np.moveaxis(bits, -1, axis)
        half = 2 ** (form.bits - 1)
        codes = ((bits ^ np.uint8(half)).view(np.int8) - np.int8(half)) if signed else bits
    elif layout is not None and layout.int8 and form.storage == np.uint8 and form.bits == 8:
        codes = values.view(np.uint8) ^ np.uint8(128)
    elif layout is not None and layout.uint4:
        codes = values.astype(np.uint8)
    elif form.code_range is None:
        codes = np.asarray(form.to_bits(jax.numpy.asarray(values)))
    else:
        codes = values.astype(np.int8 if signed else np.uint8)
    return np.swapaxes(codes, -1, -2) if layout is not None and layout.swapped else codes


def scale_of(q: QTensor) -> np.ndarray:
    """Returns the scale of a QTensor of NumPy arrays as an array, dequantized if necessary."""
    scale = q.scale
    return np.asarray(scale.dequantize() if isinstance(scale, QTensor) else scale)


def for_rows(x: np.ndarray, q: QTensor) -> np.ndarray:
    """Returns scales or zero points with an entry for each row of each group."""
    shape = (*q.shape[:-1], q.groups.scale_shape[-1])
    x = np.broadcast_to(x, q.groups.scale_shape)
    for axis, n in enumerate(shape):
        if x.shape[axis] != n:
            x = np.take(x, np.arange(n) // q.groups.sizes[axis], axis)
    return x


def integers_of(path: str, q: QTensor, format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, zero points and the group of each column of a matrix of integers with at most
    8 bits, for formats whose codes are unsigned. Columns are in the order of the real array.

    Raises:
      ValueError: if the tensor has a float offset.
    """
    check_no_offset(path, q, format)
    form, columns = format_of(q.qtype), q.shape[-1]
    assert isinstance(form, Integer)
    shift = 2 ** (form.bits - 1) if form.signed else 0
    codes = (codes_of(q).astype(np.int16) + shift).astype(np.uint8)
    known = np.zeros((1,) * q.ndim) if q.zero_point is None else np.asarray(q.zero_point)
    zeros = (for_rows(known.astype(np.int16), q) + shift).astype(np.uint8)
    index = np.arange(columns, dtype=np.int32) // q.groups.sizes[-1]
    if q.order is not None:
        order, places = np.asarray(q.order).reshape(-1), index.copy()
        index[order] = places
        codes[..., order] = codes.copy()
    return codes, zeros, index


def check_no_offset(path: str, leaf: QTensor, format: str) -> None:
    """Checks that a tensor has no float minimum, which few formats support."""
    if leaf.offset is not None:
        refuse_leaf(
            path,
            leaf,
            format,
            expected="no float minimum in addition to the scale",
            fix="write it as MLX, or as GGUF; or quantize it again with integer zero points.",
        )


def exact_halves(path: str, q: QTensor, format: str) -> np.ndarray:
    """Returns the scales of a matrix in float16, an entry for each row of each group.

    Raises:
      ValueError: if float16 cannot hold a scale exactly.
    """
    scale = for_rows(scale_of(q), q)
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), scale.astype(np.float32), equal_nan=True):
        refuse_leaf(
            path,
            q,
            format,
            expected="scales that float16 holds exactly",
            fix="quantize it with scales of float16: calibrator=jqx.calibrators.Rounded().",
        )
    return halves


def minimums_of(
    path: str, q: QTensor, scale: np.ndarray, dtype: np.dtype, format: str
) -> np.ndarray:
    """Returns the exact minimums that are added to the scaled unsigned codes.

    Args:
      path: path of the QTensor.
      q: integers, of NumPy arrays.
      scale: float64, an entry for each row of each group.
      dtype: dtype of the minimums.
      format: name of the format.

    Raises:
      ValueError: if the dtype cannot hold a minimum exactly.
    """
    form = format_of(q.qtype)
    assert isinstance(form, Integer)
    shift = 2 ** (form.bits - 1) if form.signed else 0
    offset, plain = q.real_offset(), q.zero_point is None and shift == 0
    if plain and offset is not None and offset.dtype == dtype:
        return for_rows(np.asarray(offset), q)
    zero = 0 if q.zero_point is None else for_rows(np.asarray(q.zero_point).astype(np.float64), q)
    minimums = np.zeros_like(scale) if plain else -(zero + shift) * scale
    if offset is not None:
        minimums = minimums + for_rows(np.asarray(offset).astype(np.float64), q)
    with np.errstate(over="ignore"):
        kept = minimums.astype(dtype)
    if not np.array_equal(kept.astype(np.float64), minimums, equal_nan=True):
        refuse_leaf(
            path,
            q,
            format,
            expected=f"minimums (-zero point * scale) that {dtype.name} holds exactly",
            fix="quantize it with a float minimum or without zero points, or write "
            "compressed-tensors.",
        )
    return kept
