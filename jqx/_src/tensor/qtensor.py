"""QTensor: quantized values with their scale and zero point."""

import copy
import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..checks import as_dtype, as_real, called, check_instance, check_real, normalize_axes
from ..errors import fail
from ..numerics.blocks import Block
from ..numerics.lookup import E8M0, as_qtype, format_of, name_of_qtype
from ..numerics.qtype import QType
from ..statistics.calibrators import Affine
from ..statistics.granularity import Groups
from ..table import pairs_html
from . import layout
from .grid import dequantized, groups_of, quantized
from .layout import (
    Layout,
    check_blocks,
    check_dtypes,
    check_layout,
    check_leaves,
    check_shapes,
    packed_axis,
    permuted_axis,
    real_shape,
    refuse_as_array,
    shape_of_values,
    wrong_codes,
)
from .serialize import make_exportable
from .spec import QSpec, needed_spec
from .targets import cache_for, check_target, lay_out_for
from .views import concatenate, index, reshape, split

# QTensor as a pytree: which of its fields are leaves, and which are static.


_STATIC = ("qtype", "dtype", "blocks", "layout")
_LEAVES = ("values", "scale", "zero_point")
_MORE = ("offset", "order")
"""Leaves that few arrays have: without both of them, a QTensor has three children."""


def register(cls: type) -> None:
    """Registers QTensor with JAX and with `jax.export`. (Its file imports this one.)"""

    unflatten = functools.partial(rebuilt, cls)
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, flatten)
    make_exportable(cls)


def rebuilt(cls: type, static: Any, leaves: Any) -> Any:
    """Rebuilds without checks: a tree may hold anything in place of its arrays."""
    q = object.__new__(cls)
    leaves = (*leaves, *(None,) * (len(_LEAVES) + len(_MORE) - len(leaves)))
    for name, value in zip((*_LEAVES, *_MORE, *_STATIC), (*leaves, *static), strict=True):
        object.__setattr__(q, name, value)
    return q


def flatten(q: Any) -> tuple[tuple, tuple]:
    """Returns the leaves of a QTensor, and its static fields."""
    leaves = (q.values, q.scale, q.zero_point)
    if q.offset is not None or q.order is not None:
        leaves += (q.offset, q.order)
    return leaves, (q.qtype, q.dtype, q.blocks, q.layout)


_KEYS = tuple(map(jax.tree_util.GetAttrKey, (*_LEAVES, *_MORE)))


def _flatten_with_keys(q: Any) -> tuple[tuple, tuple]:
    leaves, static = flatten(q)
    return tuple(zip(_KEYS, leaves, strict=False)), static


# What a QTensor does not do, because codes are no numbers to calculate with: each is an error that
# says what to write.


_INSTEAD = {
    "at": "write with jqx.dynamic_update_slice(q, update, starts), or change q.dequantize().",
    "dot": "write q @ x, or jqx.dot_general(q, x, dimension_numbers).",
    "flatten": "write q.reshape(-1).",
    "ravel": "write q.reshape(-1).",
    "mT": "write q.transpose(...) with the last two axes swapped; q.T reverses all.",
    "swapaxes": "write q.transpose(...) with the order of the axes.",
    "squeeze": "write q.reshape(...), or q[0].",
    "numpy": "write numpy.asarray(q.dequantize()), or numpy.asarray(q.values) for the codes.",
    "float": "write q.dequantize().",
    "dequant": "write q.dequantize().",
    "data": "the codes are q.values; the real array is q.dequantize().",
    "qvalue": "the codes are q.values; the real array is q.dequantize().",
    "int_repr": "the codes are q.values.",
    "q_scale": "it is called q.scale.",
    "q_zero_point": "it is called q.zero_point.",
}
"""What to write in place of attributes of arrays in JAX, PyTorch and other libraries."""

_AFFINE = "write affine=jqx.calibrators.Affine(scale, zero_point)."
_SPEC = 'write jqx.QTensor.quantize(x, "int8"), or jqx.QSpec("int8", jqx.per_axis(0)).'
QUANTIZE_INSTEAD = {
    **dict.fromkeys(("scale", "scales", "zero_point", "zero_points"), _AFFINE),
    **dict.fromkeys(("bits", "num_bits", "qtype", "dtype", "axis", "axes", "channel_axis"), _SPEC),
}
"""What to write in place of arguments that `QTensor.quantize` does not have."""

_SCALE = "write q.scaled(factor) to change the scale, or calculate with q.dequantize()."
_FLOAT = "calculate with q.dequantize(), or write q @ x for a product."
_OPERATORS = {
    "multiplication": ("mul truediv", _SCALE),
    "addition": ("add sub", _FLOAT),
    "arithmetic": ("floordiv mod pow divmod", _FLOAT),
    "sign": ("neg pos abs", _SCALE),
    "bits": ("and or xor lshift rshift invert", "use q.values for the bits of codes."),
    "order": ("lt le gt ge", "compare q.dequantize()."),
}
_ALONE = ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")
"""Operators without a reflected form."""


class Named(type):
    """The class of QTensor. The errors of `jax.numpy` for an argument that is no array show its
    `repr`, so it says what to write.
    """

    def __repr__(cls) -> str:
        if cls.__module__.partition(".")[0] != "jqx":
            return super().__repr__()
        return (
            f"<class 'jqx.{cls.__name__}'> (write x @ q, jqx.matmul, jqx.einsum, jqx.dot_general "
            "or jqx.take, or pass q.dequantize())"
        )


class NoArray(metaclass=Named):
    """The base of QTensor that refuses what only arrays can do."""

    __array_ufunc__: ClassVar[None] = None  # so that `numpy_array @ q` reaches `__rmatmul__`
    __iter__ = None  # else Python iterates with __getitem__, and `in` compares by identity

    if not TYPE_CHECKING:
        # Hidden from type checkers: for NumPy's types anything with `__array__` is an array, and
        # with `__getattr__` any attribute exists.

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            """Raises, because the caller must choose between the codes and the real array."""
            fix = "pass q.dequantize() for the real array, or q.values for the codes."
            refuse_as_array("QTensor", "a QTensor is not an array.", self, fix)

        def __getattr__(self, name: str) -> Any:
            """Raises: looked up only if there is no such attribute."""
            if name.startswith("_"):
                raise AttributeError(name)
            attributes = [x for x in dir(type(self)) if not x.startswith("_")]
            close = difflib.get_close_matches(name, [*attributes, "values", "scale"], n=1)
            fix = f"write q.dequantize().{name}." if hasattr(jax.Array, name) else None
            fix = _INSTEAD.get(name, fix) or (f"did you mean q.{close[0]}?" if close else None)
            fix = fix or "take the attribute of q.dequantize()."
            raise fail(
                "QTensor", f"a QTensor has no attribute {name!r}.", fix=fix, error=AttributeError
            )


def _refusing(operation: str, fix: str) -> Any:
    def operator(self: Any, *others: Any) -> Any:
        refuse_as_array("QTensor", f"a QTensor has no {operation}.", self, fix)

    return operator


for _kind, (_operators, _remedy) in _OPERATORS.items():
    for _operator in _operators.split():
        for _sign in (_operator,) if _operator in _ALONE else (_operator, f"r{_operator}"):
            setattr(NoArray, f"__{_sign}__", _refusing(_kind, _remedy))


# The display of a QTensor: format, shape, granularity and bytes, never contents.


def text(q: Any) -> str:
    """Returns the `repr` of a QTensor, whatever its leaves are."""
    name, dtype = name_of_qtype(q.qtype), jnp.dtype(q.dtype).name
    if not _has_arrays(q):
        return f"QTensor({name} of {_leaf(q.values)}, scale {_leaf(q.scale)}, dtype={dtype})"
    wrong = wrong_codes(q)
    if wrong is not None:
        part = f"{wrong} {_leaf(getattr(q, wrong))}"
        return f"QTensor({part}, which are no codes of {name}, scale {_leaf(q.scale)})"
    zero = "" if q.zero_point is None else f", zero_point {_leaf(q.zero_point)}"
    zero += "" if q.offset is None else f", offset {_leaf(q.offset)}"
    layout = "" if q.layout is None else f" {q.layout}"
    if q.order is not None and hasattr(q.order, "shape"):
        layout += f" permuted along axis {permuted_axis(q.order)}"
    return (
        f"QTensor({name}{list(q.shape)} {q.groups}{layout}, scale {_leaf(q.scale)}{zero}, "
        f"dtype={dtype}, {_grouped(q.nbytes)} bytes)"
    )


def as_html(q: Any) -> str:
    """Returns the HTML that a notebook shows for a QTensor, whatever its leaves are."""
    name, dtype = name_of_qtype(q.qtype), jnp.dtype(q.dtype).name
    if not _has_arrays(q) or wrong_codes(q) is not None:
        return pairs_html([("", text(q))], "QTensor")
    is_static = isinstance(q.size, int) and isinstance(q.nbytes, int) and q.size > 0
    bits = f", {8 * q.nbytes / q.size:.2f} bits for each of {q.size:,} numbers" if is_static else ""
    layout = [] if q.layout is None else [("laid out", str(q.layout))]
    parts = [("zero points", q.zero_point), ("offsets", q.offset), ("order", q.order)]
    return pairs_html(
        [
            ("format", f"{name} {q.groups}"),
            ("stands for", f"{dtype}{list(q.shape)}"),
            ("codes", _leaf(q.values)),
            *layout,
            ("scales", _leaf(q.scale)),
            *((name, _leaf(part)) for name, part in parts if part is not None),
            ("bytes", f"{_grouped(q.nbytes)}{bits}"),
        ],
        "QTensor",
    )


def _has_arrays(q: Any) -> bool:
    return all(map(_is_array, (q.values, q.scale)))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")  # a dtype has a shape too


def _grouped(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)  # it may be symbolic


def _leaf(leaf: Any) -> str:
    if not _is_array(leaf):
        return repr(leaf)
    name = name_of_qtype(leaf.qtype) if hasattr(leaf, "qtype") else leaf.dtype.name
    name = "float0" if leaf.dtype == jax.dtypes.float0 else name  # in a gradient
    return f"{name}{list(leaf.shape)}"


# QTensors of zeros, such as an empty cache.


@partial(jax.jit, static_argnames=("cls", "shape", "spec", "dtype"))
def _zeros(
    affine: Affine | None, *, cls: Any, shape: tuple[int, ...], spec: QSpec, dtype: jnp.dtype
) -> Any:
    """Returns a QTensor of zeros; jitted, so that no array of floats is created."""
    form, entries = format_of(spec.qtype), groups_of("QTensor.zeros", spec, shape).scale_shape
    if affine is None and isinstance(form, Block) and form.two_level:
        codes = jnp.ones(entries, form.scale_qtype)
        inner = jnp.ones(spec.of_second_scale(len(shape)).scale_shape(entries), jnp.float32)
        scale = cls(codes, inner, qtype=form.scale_qtype)
        affine = Affine(scale)
    elif affine is None:
        scale = jnp.ones(entries, E8M0 if isinstance(form, Block) else jnp.float32)
        affine = Affine(scale, None if spec.symmetric else jnp.zeros(entries, form.storage))
    return cls.quantize(jnp.zeros(shape, dtype), spec, affine)


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
        check_real("QTensor", "`dtype` of the real array", self.dtype)
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
        if affine is not None:
            check_instance("QTensor.quantize", "affine", affine, tuple, fix=_AFFINE)
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
        name = "QTensor.zeros"
        check_instance(name, "shape", shape, (tuple, list), fix="pass for example (2, 128, 64).")
        if isinstance(spec, str):
            rank = len(shape)
            spec = needed_spec(name, "spec", spec, "state").resolve(rank, range(rank - 1))
        fix = 'pass for example jqx.QSpec("int8"), or "int8".'
        check_instance(name, "spec", spec, QSpec, fix=fix)
        dtype = as_dtype(name, "dtype", dtype)
        check_real(name, "`dtype`", dtype)
        q = _zeros(affine, cls=cls, shape=tuple(map(int, shape)), spec=spec, dtype=dtype)
        return q if target is None else cache_for(name, q, target)

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
        return layout.codes_of(self)

    def pack(self, axis: int = -1) -> "QTensor":
        """Packs codes of less than 8 bits into bytes, along an axis. `unpack` is the inverse.

        Raises:
          ValueError: the format has 8 bits or more, the codes are not in the default layout, or
            the axis does not exist.
        """
        return layout.pack(self, axis)

    def pack_for(self, target: str, *, contracted: int | None = None) -> "QTensor":
        """Gives the codes the layout that `target` contracts fastest; see `jqx.pack_for`."""
        check_target("QTensor.pack_for", target, contracted)
        return lay_out_for("QTensor.pack_for", self, target, contracted)

    def unpack(self) -> "QTensor":
        """Returns the same array in the default layout: each code an element of dtype `storage`, in
        the order of the shape. Returns itself if it already has that layout.
        """
        return layout.unpack(self)

    @property
    def in_memory_order(self) -> "QTensor":
        """The array with its axes in the order of `values`: if the layout swaps the last two axes,
        they are swapped in shape, scale and zero point instead. No code moves.
        """
        return layout.swap_axes(self) if self.layout is not None and self.layout.swapped else self

    @functools.cached_property
    def groups(self) -> Groups:
        """Which elements share a scale."""
        return Groups.of_scale(self.shape, self.scale.shape, self.blocks)

    @functools.cached_property
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
        order = [normalize_axes("QTensor.transpose", axis, self.ndim)[0] for axis in axes]
        return layout.transpose(self, tuple(order or reversed(range(self.ndim))))

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
    def without_offset(self) -> "QTensor":
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

    if TYPE_CHECKING:  # bound in contractions/dot_general.py

        def __matmul__(self, other: "ArrayLike | QTensor") -> jax.Array: ...
        def __rmatmul__(self, other: ArrayLike) -> jax.Array: ...

    def __repr__(self) -> str:
        return text(self)

    _repr_html_ = as_html

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
        vars(changed).pop("groups", None)  # that of the scale before
        return changed


register(QTensor)
