"""nGraph v0 Quantize and Dequantize, and affine fake quantization, which composes the two."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..checks import (
    as_array,
    as_dtype,
    as_like,
    as_real,
    called,
    check_dtype,
    check_instance,
    check_real,
    holds,
    normalize_axes,
)
from ..errors import fail
from ..gradients.estimators import Gradient, check_estimator, check_key, ste
from ..numerics.blocks import Block
from ..numerics.exact import RoundMode, round_to_integer, widen
from ..numerics.lookup import as_qtype, format_of
from ..numerics.qtype import QType
from .affine import (
    affine_dequantize,
    affine_fake_quantize,
    affine_quantize,
    check_zero_point,
    expand_to_axes,
)

# `round`: the nine round modes on real arrays.


@called("round", "pass a mode: jqx.round(x, jqx.RoundMode.NEAREST_TOWARD_EVEN).")
def round(x: ArrayLike, mode: RoundMode) -> jax.Array:
    """Rounds real numbers to integers by one of the nine nGraph modes, exactly.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64.
      mode: a `RoundMode`, which includes the rule for ties.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not floating point, or `mode` is not a `RoundMode`.

    Gradient: zero almost everywhere; see `quantize_dequantize` for rounding that can be trained.
    NaN and infinities: unchanged.
    Source: round modes of nGraph Quantize (v0).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.round(jnp.array([2.5, -2.5, 2.4]), jqx.RoundMode.NEAREST_UPWARD)
      Array([ 3., -2.,  2.], dtype=float32)
    """
    x = as_real("round", "x", x)
    check_round_mode("round", mode, argument="mode")
    return round_to_integer(widen(x), mode).astype(x.dtype)


def check_round_mode(function: str, mode: Any, argument: str = "round_mode") -> None:
    """Checks that `mode` is a `RoundMode`."""
    names = ", ".join(mode.name for mode in RoundMode)
    fix = f"pass jqx.RoundMode.NEAREST_TOWARD_EVEN or another of {names}."
    check_instance(function, argument, mode, RoundMode, fix=fix)


@called(
    "quantize",
    'pass scale= and qtype=; or let jqx.QTensor.quantize(x, jqx.QSpec("int8")) find a scale. '
    "Models and parameters are quantized by jqx.ptq, jqx.linen.quantize and jqx.nnx.quantize.",
)
def quantize(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike | None = None,
    *,
    qtype: DTypeLike | QType,
    axes: int | Sequence[int] = (),
    round_mode: RoundMode = RoundMode.NEAREST_TOWARD_EVEN,
) -> jax.Array:
    """Quantizes `x` with a given scale: `round(x / scale) + zero_point`, saturated to `qtype`.

    The division is a true division and the sum with the zero point is exact, also under jit. For a
    float format or a codebook, `round` rounds to the numbers of the format, and there is no zero
    point.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64. 16-bit floats are computed in
        float32.
      scale: dtype of `x`, shape of `x` projected onto `axes` in increasing order (so `()` when
        `axes` is empty; a Python number takes the dtype of `x`). Any value is accepted; positive
        finite values are useful.
      zero_point: dtype of the codes, shape of `scale`; `None` means zero everywhere. Only integer
        formats have zero points.
      qtype: a number format: a dtype such as `jnp.int4` or `jnp.float8_e4m3fn`, or a
        `jqx.extend.QType`. Block formats include their scales: see `QTensor.quantize`.
      axes: axes of `x` that have their own scale, a set in any order, negatives count from the end;
        `()` means one scale for all of `x`.
      round_mode: one of the nine modes, which include the rule for ties.

    Returns:
      Array of codes, of the shape of `x` and dtype `qtype` (the `storage` of a `QType`).

    Raises:
      TypeError: `x` is not floating point, `qtype` is not a format, `scale` does not have the
        dtype of `x`, `zero_point` does not have the dtype of the codes, or `round_mode` is not a
        `RoundMode`.
      ValueError: an axis is out of range, `scale` or `zero_point` does not have the projected
        shape, the format has no zero point, or it is a block format.

    Gradient: none, because JAX treats an integer result as a constant; see `quantize_dequantize`.
    NaN and infinities: a NaN quotient gives 0, whatever the zero point; infinities saturate.
      Formats that can represent NaN keep it.
    Subnormals: float32 subnormals count as zero where the backend flushes them, as XLA on CPU does.
    Source: nGraph v0 Quantize. The specification does not define saturation, negative axes, or
      dtypes other than int8, uint8 and int32; these are additions of jqx.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.quantize(jnp.array([0.3, -9.0]), 0.1, qtype=jnp.int4)
      Array([3, -8], dtype=int4)
    """
    qtype = as_element_type("quantize", "qtype", qtype, "Output")
    x = as_array("quantize", "x", x)
    scale = as_like("quantize", "scale", scale, x.dtype)
    check_dtype("quantize", "scale", scale, x.dtype, of="input")
    x = as_real("quantize", "x", x)
    scale, zero_point = _parameters("quantize", x, scale, zero_point, qtype, "output", axes)
    check_round_mode("quantize", round_mode)
    return affine_quantize(x, scale, zero_point, qtype=qtype, round_mode=round_mode)


@called("dequantize", "pass the scale of the codes; a QTensor has its own: q.dequantize().")
def dequantize(
    q: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
    axes: int | Sequence[int] = (),
    qtype: DTypeLike | QType | None = None,
) -> jax.Array:
    """Dequantizes `q`: `(q - zero_point) * scale`.

    The integer difference is exact and is rounded once to the dtype of `scale`; the product is
    rounded once in that dtype.

    Args:
      q: array of codes, any shape.
      scale: float16, bfloat16, float32 or float64; shape of `q` projected onto `axes` in increasing
        order (so `()` when `axes` is empty; a Python number is taken as float32 or as `dtype`).
      zero_point: dtype of `q`, shape of `scale`; `None` means zero everywhere.
      dtype: dtype of the result, which must equal that of `scale`; `None` means that of `scale`.
      axes: axes of `q` that have their own scale, a set in any order, negatives count from the end.
      qtype: the format of the codes; `None` means the dtype of `q`. A `QType` whose codes are
        stored in another dtype must be given: a codebook, or a bit pattern in uint8.

    Returns:
      Array of the shape of `q` and the dtype of `scale`.

    Raises:
      TypeError: `dtype` is not floating point, `q` does not hold codes of a format, `zero_point`
        does not have the dtype of `q`, or `scale` does not have dtype `dtype`.
      ValueError: an axis is out of range, `scale` or `zero_point` does not have the projected
        shape, the format has no zero point, or it is a block format.

    Gradient: JAX differentiates it with respect to `scale`; the integers have no gradient.
    NaN and infinities: IEEE arithmetic on `scale`, so `0 * inf` is NaN; no saturation.
    Source: nGraph v0 Dequantize, with nearest-even narrowing to bfloat16 and an int32 difference
      that does not wrap (the reference implementation truncates and wraps).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.dequantize(jnp.array([3, -8], jnp.int8), jnp.array([0.5, 2.0]), axes=0)
      Array([  1.5, -16. ], dtype=float32)
    """
    q = as_array("dequantize", "q", q)
    if dtype is not None:
        dtype = as_dtype("dequantize", "dtype", dtype)
        check_real("dequantize", "Output element type", dtype)
    scale = as_like("dequantize", "scale", scale, dtype or jnp.float32)
    dtype = dtype or as_real("dequantize", "scale", scale).dtype
    if qtype is None:
        qtype = as_element_type("dequantize", "q", q.dtype, "Input")
    else:
        qtype = as_element_type("dequantize", "qtype", qtype, "Input")
        check_dtype("dequantize", "q", q, format_of(qtype).storage, of="qtype")
    check_dtype("dequantize", "scale", scale, dtype, of="output")
    scale, zero_point = _parameters("dequantize", q, scale, zero_point, qtype, "input", axes)
    return affine_dequantize(q, scale, zero_point, qtype=qtype, dtype=dtype)


@called(
    "quantize_dequantize",
    'pass scale= and qtype=; jqx.affine_from_range(low, high, qtype="int8") finds a scale.',
)
def quantize_dequantize(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike | None = None,
    *,
    qtype: DTypeLike | QType,
    axes: int | Sequence[int] = (),
    round_mode: RoundMode = RoundMode.NEAREST_TOWARD_EVEN,
    gradient: Gradient = ste,
    key: jax.Array | None = None,
) -> jax.Array:
    """Returns `dequantize(quantize(x))` in the dtype of `x`: affine fake quantization,
    differentiable.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64.
      scale: dtype of `x`, shape of `x` projected onto `axes`; see `quantize`.
      zero_point: dtype of the codes, shape of `scale`; `None` means zero everywhere.
      qtype: a number format; see `quantize`.
      axes: axes of `x` that have their own scale.
      round_mode: one of the nine modes.
      gradient: the gradient estimator, a value from `jqx.gradients` or your own.
      key: random key for an estimator that draws random numbers. Such an estimator also replaces
        the rounding in the forward pass.

    Returns:
      Array of the shape and dtype of `x`, on the grid `(code - zero_point) * scale`.

    Raises:
      TypeError, ValueError: as in `quantize`; TypeError if `gradient` is not an estimator,
        ValueError if it does not fit the format, or if `key` is missing or not used.

    Gradient: `gradient` defines the gradient of `x` and `scale`; `zero_point` has none. The
      default, `ste`, is the straight-through estimator: the derivative of `clamp(x, (qmin -
      zero_point) * scale, (qmax - zero_point) * scale)`. So it is 1 for `x` inside the range and 0
      outside, and 0 for the scale inside.
    NaN and infinities: as in `quantize`; a NaN becomes code 0, and gets no gradient.
    Source: the composition of nGraph v0 Quantize and Dequantize.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> x = jnp.array([0.3, -0.26, 9.0])
      >>> jqx.quantize_dequantize(x, 0.25, qtype=jnp.int4)
      Array([ 0.25, -0.25,  1.75], dtype=float32)
      >>> jax.grad(lambda x: jqx.quantize_dequantize(x, 0.25, qtype=jnp.int4).sum())(x)
      Array([1., 1., 0.], dtype=float32)
    """
    function = "quantize_dequantize"
    qtype = as_element_type(function, "qtype", qtype, "Output")
    x = as_array(function, "x", x)
    scale = as_like(function, "scale", scale, x.dtype)
    check_dtype(function, "scale", scale, x.dtype, of="input")
    x = as_real(function, "x", x)
    scale, zero_point = _parameters(function, x, scale, zero_point, qtype, "output", axes)
    check_round_mode(function, round_mode)
    check_estimator(function, gradient, uniform=format_of(qtype).uniform)
    check_key(function, gradient, key)
    return affine_fake_quantize(
        x, scale, zero_point, key, qtype=qtype, round_mode=round_mode, gradient=gradient
    )


def as_element_type(
    function: str, argument: str, qtype: DTypeLike | QType, role: str
) -> jnp.dtype | QType:
    """Returns a format whose scale the caller passes: any format except block formats."""
    form = as_qtype(function, argument, qtype, role)
    if isinstance(form, Block):
        fix = f"use jqx.QTensor.quantize, or the format of the elements, {form.elements.name}."
        raise fail(function, f"the block format {form.name} includes its own scales.", fix=fix)
    return form


def _parameters(
    function: str,
    x: jax.Array,
    scale: jax.Array,
    zero_point: ArrayLike | None,
    qtype: jnp.dtype | QType,
    quantized: str,
    axes: int | Sequence[int],
) -> tuple[jax.Array, jax.Array | None]:
    """Checks scale and zero point in the order of nGraph, and lines them up with `x`."""
    if zero_point is not None:
        form = format_of(qtype)
        check_zero_point(function, form)
        # A Python integer has no dtype, and would wrap around.
        if isinstance(zero_point, (bool, int, float)) and (
            type(zero_point) is not int or not form.low <= zero_point <= form.high
        ):
            problem = f"`zero_point` is not a code of {form.name}: zero_point == {zero_point!r}."
            raise fail(function, problem, fix=f"pass an integer in [{form.low}, {form.high}].")
        zero_point = as_like(function, "zero_point", zero_point, form.storage)
        check_dtype(function, "zero_point", zero_point, form.storage, of=quantized)
    axes = normalize_axes(function, axes, x.ndim)
    projected = tuple(x.shape[axis] for axis in axes)
    if zero_point is not None and not holds("assert_equal_shape", [scale, zero_point]):
        shapes = f"Scale shape {scale.shape} and zero point shape {zero_point.shape}"
        fix = "pass one zero point per scale, or None for zero everywhere."
        raise fail(function, f"{shapes} must match.", fix=fix)
    if not holds("assert_shape", scale, projected):
        problem = f"Scale / zero point shape {scale.shape} must match input shape {x.shape}"
        raise fail(
            function,
            f"{problem} at the quantization axes {axes}.",
            fix=f"pass scale.shape == {projected}, one for each index, or name other axes.",
        )
    scale = expand_to_axes(scale, axes, x.ndim)
    return scale, None if zero_point is None else expand_to_axes(zero_point, axes, x.ndim)
