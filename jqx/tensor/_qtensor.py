"""QTensor: quantized values with the scale and zero point that make them real."""

import dataclasses
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._checks import as_dtype, as_real, check_instance, check_real, require, require_that
from .._errors import message
from ..calibrators import Affine
from ..numerics import as_quantized_type
from ..ops import affine_dequantize, affine_quantize
from . import _views
from ._fit import fit
from ._spec import QSpec


@dataclasses.dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized array: `real = (values - zero_point) * scale`.

    A pytree with the leaves `values`, `scale` and `zero_point`; it crosses jit, scan, vmap and
    `jax.tree` as any pytree does. No axis number is stored: the scale has the rank of the values,
    so it slices, transposes and is mapped over in step with them. (To vmap or scan over an axis,
    the scale must have that axis too: quantize with `per_axis` of it.)

    Attributes:
      values: the codes, an array of dtype `qtype`.
      scale: float array of the rank of `values`; each dim is 1 or that of `values`.
      zero_point: array of dtype `qtype` that broadcasts to the shape of `scale`, of its rank;
        `None` means zero everywhere.
      qtype: the number format of the codes; an integer dtype of up to 32 bits.
      dtype: dtype of the real array, what `dequantize` returns.

    Raises:
      TypeError: an operand has not the dtype stated above.
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
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    _: dataclasses.KW_ONLY
    qtype: DTypeLike
    dtype: DTypeLike = jnp.float32

    __array_ufunc__: ClassVar[None] = None  # so that `numpy_array @ q` reaches `__rmatmul__`

    def __post_init__(self) -> None:
        qtype = as_quantized_type("QTensor", "qtype", self.qtype, "Quantized")
        object.__setattr__(self, "qtype", qtype)
        object.__setattr__(self, "dtype", as_dtype("QTensor", "dtype", self.dtype))
        check_real("QTensor", "Real element type", self.dtype)
        for name in ("values", "scale", "zero_point"):
            leaf = getattr(self, name)
            require_that(
                hasattr(leaf, "shape") or (leaf is None and name == "zero_point"),
                error=TypeError,
                function="QTensor",
                problem=f"`{name}` is not an array.",
                given=f"an object of type {type(leaf).__name__}",
                expected="an array",
                mend=f"pass jnp.asarray({name}).",
            )
        check_real("QTensor", "`scale` element type", self.scale.dtype)
        codes = {"values": self.values}
        if self.zero_point is not None:
            codes["zero_point"] = self.zero_point
        for name, array in codes.items():
            require(
                chex.assert_type,
                array,
                qtype,
                error=TypeError,
                function="QTensor",
                problem=f"`{name}` does not hold codes of `qtype`.",
                given=f"{name}.dtype == {array.dtype.name}",
                expected=f"{name}.dtype == {qtype.name}",
                mend=f"convert {name}, or pass the qtype that it has.",
            )
        _check_broadcasts("scale", self.scale.shape, "values", self.values.shape)
        if self.zero_point is not None:
            _check_broadcasts("zero_point", self.zero_point.shape, "scale", self.scale.shape)

    @classmethod
    def quantize(cls, x: ArrayLike, spec: QSpec, affine: Affine | None = None) -> "QTensor":
        """Quantizes `x` as `spec` says.

        Args:
          x: real array, any shape; float16, bfloat16, float32 or float64.
          spec: a `QSpec` with an absolute granularity.
          affine: scale and zero point to use; `None` lets the calibrator of `spec` find them from
            `x`.

        Returns:
          A `QTensor` of the shape and dtype of `x`; a scale that is found is float32.

        Raises:
          TypeError: `x` is not floating point, or `spec` is not a `QSpec`.
          ValueError: the granularity is relative, or names an axis that `x` lacks; `affine` does
            not broadcast to `x`, axis by axis.
        """
        x = as_real("QTensor.quantize", "x", x)
        check_instance(
            "QTensor.quantize", "spec", spec, QSpec, mend="pass for example jqx.QSpec(jnp.int8)."
        )
        expected = spec.granularity.scale_shape(x.shape)
        if affine is not None:
            _check_affine(Affine(*affine), expected, x.shape)
        scale, zero_point = affine or fit(x, spec)
        codes = affine_quantize(x, scale, zero_point, qtype=spec.qtype, round_mode=spec.round_mode)
        return cls(codes, scale, zero_point, qtype=spec.qtype, dtype=x.dtype)

    def dequantize(self) -> jax.Array:
        """Returns the real array: `(values - zero_point) * scale`, rounded once to `dtype`."""
        return affine_dequantize(self.values, self.scale, self.zero_point, dtype=self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the real array."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Rank of the real array."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Number of elements of the real array."""
        return self.values.size

    @property
    def nbytes(self) -> int:
        """Bytes that values, scale and zero point hold in memory."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def T(self) -> "QTensor":
        """The transpose; the scale turns with the values."""
        return self.transpose()

    def transpose(self, *axes: Any) -> "QTensor":
        """Permutes the axes, as `jax.Array.transpose` does; the scale turns with the values."""
        if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)):
            axes = tuple(axes[0]) if axes[0] is not None else ()
        order = axes or tuple(reversed(range(self.ndim)))
        return self._map(lambda leaf: jnp.transpose(leaf, order))

    def reshape(self, *shape: Any) -> "QTensor":
        """Reshapes, as `jax.Array.reshape` does, where the scale can follow.

        It can where axes that merge or split with each other are scaled alike: all have their own
        scale or none has.

        Raises:
          ValueError: some of the axes that merge or split have their own scale and some do not.
        """
        if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)):
            shape = tuple(shape[0])
        values, zero_point = jnp.reshape(self.values, shape), self.zero_point
        new = _views.reshaped(self.scale.shape, self.shape, values.shape)
        if zero_point is not None:
            zero_point = jnp.broadcast_to(zero_point, self.scale.shape).reshape(new)
        return dataclasses.replace(
            self, values=values, scale=self.scale.reshape(new), zero_point=zero_point
        )

    def astype(self, dtype: DTypeLike) -> "QTensor":
        """Changes the dtype of the real array; the codes stay.

        Raises:
          TypeError: `dtype` is not floating point.
        """
        return dataclasses.replace(self, dtype=dtype)

    def __getitem__(self, index: Any) -> "QTensor":
        """Indexes with integers, slices, `None` and `...`; the scale is indexed in step.

        Raises:
          TypeError: the index holds an array or a list.
          IndexError: there are more indices than axes, or an integer is out of range.
        """
        parts = _views.basic_index(index, self.shape)
        return self._map(lambda leaf: leaf[_views.index_for(parts, leaf.shape, self.shape)])

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: which array is meant, the codes or the real one, is for the caller to say."""
        raise TypeError(
            message(
                "QTensor",
                "a QTensor is not an array.",
                given=repr(self),
                expected="an array",
                mend="pass q.dequantize() for the real array, or q.values for the codes.",
            )
        )

    __iter__ = None  # else Python would iterate by __getitem__, and `in` compare by identity

    def __repr__(self) -> str:
        def show(leaf: Any) -> str:
            return str(list(leaf.shape)) if hasattr(leaf, "shape") else repr(leaf)

        zero = "" if self.zero_point is None else f", zero_point {show(self.zero_point)}"
        return (
            f"QTensor({jnp.dtype(self.qtype).name}{show(self.values)}, scale {show(self.scale)}"
            f"{zero}, dtype={jnp.dtype(self.dtype).name})"
        )

    def _map(self, f: Any) -> "QTensor":
        """Applies a view to every leaf."""
        zero_point = None if self.zero_point is None else f(self.zero_point)
        return dataclasses.replace(
            self, values=f(self.values), scale=f(self.scale), zero_point=zero_point
        )


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether `shape` has the rank of `full`, and each dim is 1 or that of `full`."""
    return len(shape) == len(full) and all(m in (1, n) for m, n in zip(shape, full, strict=True))


def _check_affine(affine: Affine, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for name, array in affine._asdict().items():
        require_that(
            array is None or _broadcasts(array.shape, shape),
            error=ValueError,
            function="QTensor.quantize",
            problem=f"`affine.{name}` does not fit `x`.",
            given=f"affine.{name}.shape == {getattr(array, 'shape', None)}, x.shape == {shape}",
            expected=f"shape {expected}, the scale shape of spec",
            mend="pass one scale per index of the axes that have their own, with size 1 elsewhere.",
        )


def _check_broadcasts(name: str, shape: tuple, other: str, full: tuple) -> None:
    require_that(
        _broadcasts(shape, full),
        error=ValueError,
        function="QTensor",
        problem=f"`{name}` does not fit `{other}`.",
        given=f"{name}.shape == {shape}, {other}.shape == {full}",
        expected=f"the rank of {other}, each dim 1 or that of {other}",
        mend=f"reshape {name}: {other}'s size along the axes they share, 1 elsewhere.",
    )


def _flatten(q: QTensor) -> tuple[tuple, tuple]:
    return (q.values, q.scale, q.zero_point), (q.qtype, q.dtype)


def _flatten_with_keys(q: QTensor) -> tuple[tuple, tuple]:
    leaves, static = _flatten(q)
    names = ("values", "scale", "zero_point")
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in names)
    return tuple(zip(keys, leaves, strict=True)), static


def _unflatten(static: Any, leaves: Any) -> QTensor:
    """Rebuilds without checks: a tree may hold anything in place of its arrays."""
    q = object.__new__(QTensor)
    fields = ("values", "scale", "zero_point", "qtype", "dtype")
    for name, value in zip(fields, (*leaves, *static), strict=True):
        object.__setattr__(q, name, value)
    return q


jax.tree_util.register_pytree_with_keys(QTensor, _flatten_with_keys, _unflatten, _flatten)
