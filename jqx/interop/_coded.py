"""A QTensor of a checkpoint: the tensors of the file that it is made from, and how."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..calibrators import Groups
from ..numerics import format_of
from ..numerics._shared import packed_length
from ..tensor import QTensor
from ..tensor._shared import Layout, Packing
from ._config import Config
from ._source import Source
from ._tree import Read


@dataclasses.dataclass(frozen=True)
class CodedLeaf:
    """A QTensor of a checkpoint.

    Attributes:
      path: name of the QTensor: that of the weight before it was quantized.
      tensors: name and dtype of each tensor of the file that it is made from.
      like: the abstract QTensor, of `jax.ShapeDtypeStruct`.
      decode: makes the leaves of the QTensor (in the order of `jax.tree.leaves`) from the tensors,
        NumPy arrays in that order. The results have the sizes and dtypes of `like`; they are then
        reshaped to its shapes.
      consumed: names of the tensors that were already read to find all this.
    """

    path: str
    tensors: tuple[tuple[str, np.dtype], ...]
    like: QTensor
    decode: Callable[..., Sequence[np.ndarray]]
    consumed: tuple[str, ...] = ()

    def make(self, read: Read) -> QTensor:
        """Returns the QTensor of arrays from `read`; it is abstract if these are."""
        parts = [read(name, dtype) for name, dtype in self.tensors]
        if any(isinstance(part, jax.ShapeDtypeStruct) for part in parts):
            return self.like
        known, structure = jax.tree.flatten(self.like)
        made = self.decode(*parts)
        for leaf, like in zip(made, known, strict=True):
            assert leaf.dtype == like.dtype, f"{self.path}: {leaf.dtype} is not {like.dtype}"
        return structure.unflatten(
            leaf.reshape(like.shape) for leaf, like in zip(made, known, strict=True)
        )


def weight(
    groups: Groups,
    qtype: Any,
    scale: Any,
    dtype: np.dtype,
    *,
    zero_point: bool = False,
    swapped: bool = False,
    **more: Any,
) -> QTensor:
    """Returns the QTensor of a weight, of `jax.ShapeDtypeStruct`.

    Codes of 8 bits keep their layout. Others are packed along the last axis of the file. This is
    also the last axis of the real array, or the one before it if `swapped`.

    Args:
      groups: shape of the weight, and which elements share a scale.
      qtype: format of the codes.
      scale: dtype of the scales, or an abstract QTensor.
      dtype: dtype of the real array.
      zero_point: whether there are zero points, as many as scales.
      swapped: whether the last two axes are swapped in the file.
      **more: other fields of the QTensor.
    """
    form, shape = format_of(qtype), groups.shape
    stored = (*shape[:-2], shape[-1], shape[-2]) if swapped else shape
    packing, kind = None, form.storage
    if form.bits < 8:
        packing, kind = Packing(-2 if swapped else -1, stored[-1]), jnp.uint8
        stored = (*stored[:-1], packed_length(stored[-1], form.bits))
    scales = scale if isinstance(scale, QTensor) else abstract(groups.scale_shape, scale)
    return QTensor(
        abstract(stored, kind),
        scales,
        abstract(groups.scale_shape, form.storage) if zero_point else None,
        qtype=qtype,
        dtype=dtype,
        blocks=groups.blocks,
        layout=Layout(packing, swapped) if swapped or packing else None,
        **more,
    )


def abstract(shape: Sequence[int], dtype: Any) -> Any:
    """Returns a placeholder of an array whose numbers are not read."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def refuse(source: Source, name: str, problem: str, *, given: str, expected: str) -> NoReturn:
    """Raises an error: a tensor of a checkpoint contradicts its config or the other tensors."""
    raise fail(
        "interop.read",
        f"the tensor {name!r} of {source.path!r} {problem}",
        given=given,
        expected=expected,
        fix="the file or its config is damaged or has another format: download it again, or "
        "correct its config.",
    )


def checked(
    source: Source, name: str, shape: Sequence[int] | None, dtypes: Sequence[Any], why: str = ""
) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and dtype of a tensor, after checking them.

    Args:
      source: the checkpoint.
      name: name of the tensor.
      shape: the expected shape; `None` for any.
      dtypes: the allowed dtypes.
      why: the reason for the expected shape.
    """
    if name not in source.entries:
        raise fail(
            "interop.read",
            f"the tensor {name!r} is missing.",
            given=f"{source.path!r}, of {len(source.entries)} tensors, others of the same layer "
            f"among "
            "them",
            expected=f"a tensor {name!r}",
            fix="download the checkpoint again; if this is a part of it, read the whole folder.",
        )
    entry, dtype = source.entries[name], source.dtype(name)
    known = {jnp.dtype(each) for each in dtypes}
    if dtype not in known or (shape is not None and tuple(shape) != entry.shape):
        wanted = " or ".join(sorted(each.name for each in known))
        refuse(
            source,
            name,
            "is not what its layer needs.",
            given=f"{dtype.name}{list(entry.shape)}",
            expected=f"{wanted}{'' if shape is None else list(shape)}{why and f', {why}'}",
        )
    return entry.shape, dtype


FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)
"""Dtypes of scales that are floats."""


def real_dtype(source: Source, asked: np.dtype | None, scale: np.dtype | None) -> np.dtype:
    """Returns the dtype of a real array: the requested dtype; else that of its scale, if this is a
    float dtype of 16 or 32 bits; else that of the model in its config; else float32.
    """
    if asked is not None:
        return asked
    if scale in [jnp.dtype(each) for each in FLOATS]:
        assert scale is not None
        return scale
    config = source.config or {}
    name = config.get("dtype", config.get("torch_dtype"))
    known = {each.__name__: jnp.dtype(each) for each in FLOATS}
    return known.get(name if isinstance(name, str) else "", jnp.dtype(jnp.float32))


def group_size(source: Source, config: Config, scales: str, columns: int) -> int:
    """Returns the size of the groups of GPTQ and AWQ. If the config does not say it, readers take
    128 or, old ones, the whole row; the number of scales tells which.
    """
    stored = config.data.get("group_size", -1 if _length(source, scales) == 1 else 128)
    return columns if stored == -1 else min(config.integer("group_size", 128), columns)


def _length(source: Source, name: str) -> int:
    entry = source.entries.get(name)
    return entry.shape[0] if entry is not None and entry.shape else 0


def order_of(source: Source, name: str, groups: np.ndarray, size: int) -> np.ndarray | None:
    """Returns the order of elements that are sorted by groups; `None` if they are sorted already.

    Args:
      source: the checkpoint that `groups` come from.
      name: name of their tensor.
      groups: the group of each element of an axis, as in `g_idx` of GPTQ.
      size: size of a group; the last group may be smaller.

    Raises:
      ValueError: if a group has another size.
    """
    order = np.argsort(groups, kind="stable").astype(np.int32)
    wanted = np.arange(len(groups), dtype=np.int64) // size
    if not np.array_equal(groups[order], wanted):
        refuse(
            source,
            name,
            "does not put equally many elements in each group.",
            given=f"groups from {groups.min()} to {groups.max()}, of {len(groups)} elements",
            expected=f"{size} elements of each of {wanted[-1] + 1} groups",
        )
    return None if np.array_equal(order, np.arange(len(groups))) else order


def leading(ndim: int, count: int) -> tuple[int, ...]:
    """Returns the shape of the `order` of a last axis of `count` elements."""
    return (*(1,) * (ndim - 1), count)
