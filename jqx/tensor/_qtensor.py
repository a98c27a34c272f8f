"""QTensor: quantized values with their scale and zero point."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._calls import called
from .._checks import as_dtype, as_real, check_real, normalize_axes
from ..calibrators import Affine, Groups
from ..numerics import QType, format_of
from ..numerics._shared import E8M0, as_qtype
from . import _layout
from ._fields import check_blocks, check_dtypes, check_layout, check_leaves, check_shapes
from ._layout import Layout, packed_axis, real_shape, shape_of_values
from ._no_array import QUANTIZE_INSTEAD, NoArray, check_affine
from ._pytree import register
from ._round_trip import dequantized, quantized
from ._scheme import needed_spec
from ._select import concatenate, index, reshape, split
from ._show import as_html, text, treescope_tree
from ._spec import QSpec
from ._targets import check_target, lay_out_for
from ._zeros import zeros


@called("QTensor", 'pass codes, scale and qtype=; jqx.QTensor.quantize(x, "int8") makes them.')
@dataclasses.dataclass(frozen=True, eq=False)
class QTensor(NoArray):
    """A quantized array: `real = (values - zero_point) * scale`, or `number of values * scale`.

    It is a pytree with the leaves `values`, `scale` and `zero_point`, and in rare cases `offset`
    and `order`. It works with jit, scan, vmap and `jax.tree` like any pytree. No axis number is
    stored: the scale has the rank of the values, so it is sliced, transposed and mapped over in
    step with them. (To vmap or scan over an axis, the scale must have that axis too, or JAX reports
    inconsistent sizes: quantize with `per_axis` of it, in nvfp4 also with `stacked=`.) Where a map
    over leaves has changed the dtype of codes, any use is a TypeError.

    For every view and selection, `op(q).dequantize()` equals `op(q.dequantize())`.

    Attributes:
      values: the codes, an array of the `storage` dtype of `qtype`, unless `layout` says otherwise.
      scale: array of the rank of `values`; each dim is 1, that of `values`, or the number of blocks
        that divide it. Its dtype is float, in MX formats float8_e8m0fnu. If the scales of a block
        format are quantized (nvfp4), it is a QTensor with one scale, or one per array of a stack.
      zero_point: array of the dtype of the codes, with the rank of `scale`, that broadcasts to its
        shape; `None` means zero everywhere. Only integer formats have zero points.
      offset: a float minimum that is added to the product with the scale: an array of floats or a
        QTensor, with the rank of `scale`, that broadcasts to its shape; `None` means zero. Product
        and sum are each rounded to float32 (or float64), and the sum then to `dtype`.
      order: the permutation of an axis, such as inputs that are sorted by group: place `j` of
        `values` holds element `order[j]` of the real array. int32, of the rank of `values`, with
        size 1 along all other axes, except axes before it that have their own orders. (The permuted
        axis is the last one whose size is not 1.) Scale, zero point and offset follow `values`.
      qtype: the number format of the codes: a dtype, or a value of `jqx.numerics`.
      dtype: dtype of the real array, which `dequantize` returns.
      blocks: (length of an axis, number of blocks, block size) for an axis whose last block is
        smaller, so that the shape of the scale does not determine the block size.
      layout: how `values` are stored, if not in the default layout: `pack` and `pack_for` pack
        them, swap their last two axes, or use one byte per code. Shape, scale and zero point do not
        change. Its axes count from the last, so map such tensors over leading axes.

    Raises:
      TypeError: an operand does not have the dtype stated above.
      ValueError: the shapes do not fit each other.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.array([[0.5, -1.0], [20.0, 127.0]])
      >>> q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
      >>> q.values
      Array([[  64, -127],
             [  20,  127]], dtype=int8)
      >>> q[1].dequantize()
      Array([ 20., 127.], dtype=float32)
      >>> q
      QTensor(int8[2, 2] per_axis(0), scale float32[2, 1], dtype=float32, 12 bytes)
    """

    values: jax.Array
    scale: Union[jax.Array, "QTensor"]
    zero_point: jax.Array | None = None
    _: dataclasses.KW_ONLY
    offset: Union[jax.Array, "QTensor", None] = None
    order: jax.Array | None = None
    qtype: DTypeLike | QType
    dtype: DTypeLike = jnp.float32
    blocks: tuple[tuple[int, int, int], ...] = ()
    layout: Layout | None = None

    def __post_init__(self) -> None:
        qtype = as_qtype("QTensor", "qtype", self.qtype, "Quantized")
        object.__setattr__(self, "qtype", qtype)
        object.__setattr__(self, "dtype", as_dtype("QTensor", "dtype", self.dtype))
        check_blocks(self.blocks)
        check_real("QTensor", "Real element type", self.dtype)
        check_layout(self)
        if self.layout == Layout():
            object.__setattr__(self, "layout", None)
        check_leaves(self)
        if self.order is not None and self.order.size == 1:
            object.__setattr__(self, "order", None)
        check_shapes(self)

    @classmethod
    @called(
        "QTensor.quantize",
        'pass for example jqx.QTensor.quantize(x, jqx.QSpec("int8")).',
        QUANTIZE_INSTEAD.get,
    )
    def quantize(
        cls,
        x: ArrayLike,
        spec: QSpec | str,
        affine: Affine | None = None,
        *,
        pack: int | None = None,
    ) -> "QTensor":
        """Quantizes `x` according to `spec`.

        Args:
          x: real array, any shape; float16, bfloat16, float32 or float64.
          spec: a `QSpec` with an absolute granularity, or a scheme. An array has no channels, so
            `"int8"` is one scale for all of it (in a policy, one for each channel of a weight).
          affine: scale and zero point; `None` lets the calibrator of `spec` find them from `x`.
          pack: the axis along which codes of less than 8 bits are packed; `None` packs none.

        Returns:
          A `QTensor` of the shape and dtype of `x`. A scale that is found is float32 (of a block
          format: in its scale format).

        Raises:
          TypeError: `x` is not floating point, `spec` no `QSpec`, or `affine` no `Affine`.
          ValueError: the granularity is relative, names an axis that `x` lacks or blocks that do
            not divide; `affine` does not broadcast to `x`, axis by axis; `pack` is not an axis of
            `x`, or the format has 8 bits or more.
        """
        x = as_real("QTensor.quantize", "x", x)
        spec = needed_spec("QTensor.quantize", "spec", spec, "array")
        check_affine(affine)
        form = format_of(spec.qtype)
        axis = None if pack is None else packed_axis("QTensor.quantize", form, pack, x.ndim)
        return quantized(x, affine, cls=cls, spec=spec, axis=axis)

    @classmethod
    def zeros(
        cls,
        shape: Sequence[int],
        spec: QSpec | str,
        dtype: DTypeLike = jnp.float32,
        *,
        affine: Affine | None = None,
        target: str | None = None,
    ) -> "QTensor":
        """Returns a QTensor of zeros, such as an empty cache for `dynamic_update_slice`.

        Args:
          shape: its shape.
          spec: a `QSpec` with an absolute granularity, or a scheme such as `"int8"`, with one scale
            per token as in `quantize_state`: per index of all axes except the last.
          dtype: dtype of the real array.
          affine: scale and zero point, with the shapes of `spec`; `None` means scale 1 and zero
            point 0. A scale that several writes share is never recomputed, so pass one.
          target: as in `pack_for`, for its kernel of `jqx.decode_attention`; `None`: no kernel.

        Returns:
          QTensor of the codes of 0 (or of the nearest number, in a format without 0).

        Raises:
          TypeError: `shape` is not a tuple, `spec` is not a `QSpec`, or `dtype` is not a float.
          ValueError: granularity or `affine` does not fit the shape, or the format the target.

        Example:
          >>> import jqx, jax.numpy as jnp
          >>> jqx.QTensor.zeros((128, 64), jqx.QSpec(jnp.int8, jqx.per_axis(0)))
          QTensor(int8[128, 64] per_axis(0), scale float32[128, 1], dtype=float32, 8,704 bytes)
        """
        return zeros(cls, shape, spec, dtype, affine, target)

    @called("QTensor.dequantize", "convert first, for example q.astype(jnp.float32).dequantize().")
    def dequantize(self) -> jax.Array:
        """Returns the real array: values times scale, in float32 or wider, rounded to `dtype`."""
        check_dtypes("QTensor.dequantize", self)
        check_shapes(self)  # a map over leaves may have changed them
        return dequantized(self)

    @property
    def codes(self) -> jax.Array:
        """The codes, one per element, in the order of the shape (a permuted axis in that of
        `values`): of dtype `storage`, or one byte each if they are packed or stored as int8.
        """
        check_dtypes("QTensor.codes", self)
        return _layout.codes_of(self)

    def pack(self, axis: int = -1) -> "QTensor":
        """Packs codes of less than 8 bits into bytes, along an axis. `unpack` is the inverse.

        Raises:
          ValueError: the format has 8 bits or more, the codes are not in the default layout, or
            the axis does not exist.
        """
        return _layout.pack(self, axis)

    def pack_for(self, target: str, *, contracted: int | None = None) -> "QTensor":
        """Gives the codes the layout that `target` contracts fastest; see `jqx.pack_for`."""
        check_target("QTensor.pack_for", target, contracted)
        return lay_out_for("QTensor.pack_for", self, target, contracted)

    def unpack(self) -> "QTensor":
        """Returns the same array in the default layout: each code an element of dtype `storage`, in
        the order of the shape. Returns itself if it already has that layout.
        """
        return _layout.unpack(self)

    @property
    def stored(self) -> "QTensor":
        """The array with its axes in the order of `values`: if the layout swaps the last two axes,
        they are swapped in shape, scale and zero point instead. No code moves.
        """
        return _layout.swap_axes(self) if self.layout is not None and self.layout.swapped else self

    @property
    def groups(self) -> Groups:
        """Which elements share a scale."""
        return Groups.of_scale(self.shape, self.scale.shape, self.blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the real array."""
        return real_shape(self.values.shape, self.layout)

    @property
    def ndim(self) -> int:
        """Rank of the real array."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Number of elements of the real array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves, as JAX counts them: an unpacked int4 takes one byte."""
        leaves = jax.tree.leaves(self)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def T(self) -> "QTensor":
        """The transpose; the scale is transposed with the values."""
        return self.transpose()

    def transpose(self, *axes: Any) -> "QTensor":
        """Permutes the axes, as `jax.Array.transpose` does, of the values and the scale.

        If the codes are not in the default layout, a swap of the last two axes does not move them:
        it only changes the layout.

        Raises:
          ValueError: another order moves an axis along which codes are packed or swapped.
        """
        if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)):
            axes = tuple(axes[0]) if axes[0] is not None else ()
        given = [normalize_axes("QTensor.transpose", axis, self.ndim)[0] for axis in axes]
        order = tuple(given) or tuple(reversed(range(self.ndim)))
        return _layout.transpose(self, order)

    def reshape(self, *shape: Any) -> "QTensor":
        """Reshapes, as `jax.Array.reshape` does, if the scale can follow.

        It can follow if the axes that merge or split with each other all have their own scale or
        all share one. Blocks that do not fit the new axes become smaller ones.

        Raises:
          ValueError: some of the axes that merge or split have their own scale and some do not, or
            axes change along which codes are packed or swapped.
        """
        if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)):
            shape = tuple(shape[0])
        return reshape(self, shape)

    def broadcast_to(self, shape: Sequence[int]) -> "QTensor":
        """Broadcasts, as `jnp.broadcast_to` does; new axes share one scale."""
        full = shape_of_values("QTensor.broadcast_to", self, shape)
        new = len(shape) - self.ndim
        wide = self.map_leaves(lambda leaf: leaf.reshape((1,) * new + leaf.shape), self.blocks)
        return dataclasses.replace(wide, values=jnp.broadcast_to(self.values, full))

    def take(self, indices: ArrayLike, axis: int) -> "QTensor":
        """Takes indices along an axis, as `jnp.take` does; indices out of range are clamped."""
        (axis,) = normalize_axes("QTensor.take", axis, self.ndim, argument="axis")
        return self[(slice(None),) * axis + (indices,)]

    def split(self, indices_or_sections: int | Sequence[int], axis: int = 0) -> list["QTensor"]:
        """Splits along an axis, as `jnp.split` does."""
        return split(self, indices_or_sections, axis)

    @staticmethod
    def concatenate(tensors: Sequence["QTensor"], axis: int = 0) -> "QTensor":
        """Joins QTensors of one format along an axis, as `jnp.concatenate` does.

        If blocks do not fit end to end, they become the largest smaller ones that do.
        Formats, dtypes or layouts that differ are a TypeError.
        """
        return concatenate("QTensor.concatenate", tensors, axis)

    @staticmethod
    def stack(tensors: Sequence["QTensor"], axis: int = 0) -> "QTensor":
        """Stacks QTensors of one format and shape along a new axis, as `jnp.stack` does."""
        rank = tensors[0].ndim + 1 if tensors else 1
        (axis,) = normalize_axes("QTensor.stack", axis, rank, argument="axis")
        new = (slice(None),) * axis + (None,)
        return concatenate("QTensor.stack", [q[new] for q in tensors], axis)

    def astype(self, dtype: DTypeLike) -> "QTensor":
        """Changes the dtype of the real array, not the codes. TypeError: it is no float dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def scaled(self, factor: ArrayLike) -> "QTensor":
        """Multiplies the scale by a scalar. An E8M0 scale becomes float32."""
        return self.map_scale(lambda scale: scale * jnp.asarray(factor, scale.dtype))

    def map_scale(self, f: Callable[[jax.Array], jax.Array]) -> "QTensor":
        """Applies a linear function to scale and offset, and to the inner scale of a nested one.
        E8M0 becomes float32.
        """
        offset = self.offset
        if offset is not None:
            offset = offset.map_scale(f) if isinstance(offset, QTensor) else f(offset)
        if isinstance(self.scale, QTensor):
            return dataclasses.replace(self, scale=self.scale.map_scale(f), offset=offset)
        return dataclasses.replace(self, scale=f(self.real_scale()), offset=offset)

    def real_scale(self) -> jax.Array:
        """Returns the scale as an array of floats, also if it is E8M0 or a QTensor."""
        scale = self.scale.dequantize() if isinstance(self.scale, QTensor) else self.scale
        return format_of(E8M0).decode(scale) if scale.dtype == E8M0 else scale

    def real_offset(self) -> jax.Array | None:
        """Returns the offset as an array of floats, also if it is a QTensor."""
        offset = self.offset
        return offset.dequantize() if isinstance(offset, QTensor) else offset

    @property
    def bare(self) -> "QTensor":
        """The array in the order of `values`, without offset and order."""
        plain = self.offset is None and self.order is None
        return self if plain else dataclasses.replace(self, offset=None, order=None)

    def __getitem__(self, key: Any) -> "QTensor":
        """Indexes as `jax.Array` does, by integers, slices, `None`, `...`, integer arrays and
        masks. The scale is indexed in step. If a slice cuts blocks, or takes them in another order,
        the result has the largest blocks that fit it.

        Raises:
          TypeError: the index holds anything else.
          ValueError: it indexes an axis along which codes are packed or swapped.
          IndexError: there are more indices than axes, or an integer is out of range.
        """
        check_dtypes("QTensor.__getitem__", self)
        return index(self, key)

    if TYPE_CHECKING:  # bound by jqx.contractions

        def __matmul__(self, other: "ArrayLike | QTensor") -> jax.Array: ...
        def __rmatmul__(self, other: ArrayLike) -> jax.Array: ...

    def __repr__(self) -> str:
        return text(self)

    _repr_html_ = as_html

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return treescope_tree(self, path, subtree_renderer)

    def map_leaves(self, f: Any, blocks: tuple[tuple[int, int, int], ...]) -> "QTensor":
        """Applies a view to every leaf."""
        order = None if self.order is None else f(self.order)
        values = f(self.values)
        return dataclasses.replace(
            self.map_parameters(f), values=values, order=order, blocks=blocks
        )

    def map_parameters(self, f: Any) -> "QTensor":
        """Applies a function to scale, zero point and offset, if present, without checks."""
        changed = copy.copy(self)
        for name in ("scale", "zero_point", "offset"):
            parameter = getattr(self, name)
            if parameter is not None:
                object.__setattr__(changed, name, f(parameter))
        return changed


register(QTensor)
