"""Quantized results of contractions: from floats by a spec, or from int32 sums by integers only.

Source: TensorFlow Lite, tflite/kernels/internal/reference/requantize.h and
reference/integer_ops/conv.h; kernels/kernel_util.cc (PopulateConvolutionQuantizationParams).
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..checks import (
    as_array,
    as_dtype,
    as_like,
    as_real,
    called,
    check_dtype,
    check_instance,
    check_integer,
    check_real,
    is_at_least,
)
from ..compat import is_concrete
from ..errors import fail
from ..numerics.lookup import as_qtype, format_of
from ..numerics.qtype import Integer, QType
from ..statistics.calibrators import Affine
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec, needed_spec
from .problem import check_no_offset_or_order, is_byte, max_products_in_int32, shares_scale

# Integers times a real factor, by integer arithmetic: `factor = multiplier * 2**(shift - 31)`.
#
# JAX does not enable int64 by default, so a product of two int32 is held in two words of 32 bits.
#
# Sources: TensorFlow Lite, tflite/kernels/internal/quantization_util.cc (QuantizeMultiplier) and
# common.cc (MultiplyByQuantizedMultiplier); gemmlowp, fixedpoint/fixedpoint.h
# (SaturatingRoundingDoublingHighMul, RoundingDivideByPOT); B. Jacob et al., "Quantization and
# Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", arXiv:1712.05877;
# the high word of a product from H. S. Warren, "Hacker's Delight", section 8-2.


LEAST_SHIFT, LARGEST_SHIFT = -31, 30
_LOWEST, _LARGEST = -(2**31), 2**31 - 1


class FixedPointRounding(enum.Enum):
    """How often the product of an integer and a multiplier is rounded.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> single = jqx.tflite.FixedPointRounding.SINGLE
      >>> r = jqx.tflite.Requantization.of(0.25, 1.0, 1.0, qtype=jnp.int8, rounding=single)
      >>> jqx.tflite.requantize(jnp.array([-6, -2, 2, 6]), r).values  # -1.5, -0.5, 0.5 and 1.5
      Array([-1,  0,  1,  2], dtype=int8)
    """

    DOUBLE = "double"
    """Twice: when 31 bits are dropped, with halves up, and by the shift, with halves away from
    zero. A positive shift moves the integer to the left first. This is the rounding of gemmlowp and
    of the reference kernels of TFLite."""
    SINGLE = "single"
    """Once, with halves up. This is the rounding of TFLite if it is built with
    TFLITE_SINGLE_ROUNDING."""


def known_scale(function: str, argument: str, scale: Any) -> jax.Array:
    """Returns a scale as an array whose values Python can read."""
    if not is_concrete(scale):
        raise fail(
            function,
            f"`{argument}` is traced and has no value, but multipliers are computed on the host.",
            fix="create the Requantization outside and pass it in (it is a pytree), or quantize "
            "the float result with a QSpec.",
            error=TypeError,
        )
    scale = as_like(function, argument, scale, jnp.float32)
    return as_real(function, argument, scale)


def factor_of(function: str, scales: dict[str, jax.Array]) -> np.ndarray:
    """Returns `lhs_scale * rhs_scale / output_scale` in float64."""
    lhs, rhs, output = (np.asarray(scale).astype(np.float64) for scale in scales.values())
    shapes = ", ".join(f"{name}.shape == {scale.shape}" for name, scale in scales.items())
    is_finite = all(np.isfinite(scale).all() for scale in (lhs, rhs, output))
    if not is_finite or (output == 0).any():
        problem = f"a scale is not finite, or `output_scale` is zero: {shapes}."
        fix = "look for NaN and infinities in the data that the scales were calibrated on."
        raise fail(function, problem, fix=fix)
    try:
        factor = np.asarray(lhs * rhs / output)
    except ValueError:
        fix = "line them up with the result: its size along their own axes, 1 elsewhere."
        raise fail(function, f"the scales do not broadcast: {shapes}.", fix=fix) from None
    largest = np.max(np.abs(factor), initial=0)
    if not np.isfinite(largest) or quantize_multiplier(largest)[1] > LARGEST_SHIFT:
        raise fail(
            function,
            f"lhs_scale * rhs_scale / output_scale is too large: {largest:.3g}, not below "
            f"2**{LARGEST_SHIFT}.",
            fix="calibrate output_scale: every accumulator except 0 would saturate.",
        )
    return factor


def quantize_multiplier(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest int32 `(multiplier, shift)` of float64 factors, computed in NumPy."""
    mantissa, shift = np.frexp(factor)
    scaled = np.ldexp(mantissa, 31)
    multiplier = np.trunc(scaled + np.copysign(0.5, scaled))  # halves away from zero
    carry = multiplier == 2.0**31
    multiplier, shift = np.where(carry, 2.0**30, multiplier), shift + carry
    tiny = shift < LEAST_SHIFT
    multiplier, shift = np.where(tiny, 0, multiplier), np.where(tiny, 0, shift)
    return multiplier.astype(np.int32), shift.astype(np.int32)


def multiply_fixed_point(
    x: jax.Array, multiplier: jax.Array, shift: jax.Array, rounding: FixedPointRounding
) -> jax.Array:
    """Returns `x * multiplier * 2**(shift - 31)`, rounded; all int32, of the same rank.

    Overflow of int32 wraps around: in double rounding that of the shift to the left, in single
    rounding that of the result.
    """
    if rounding is FixedPointRounding.SINGLE:
        return _rounding_shift(_product(x, multiplier), 31 - shift)
    zero = jnp.zeros_like(shift)
    x = x << jnp.maximum(shift, zero)
    return _divide_by_power(_doubling_high_product(x, multiplier), jnp.maximum(-shift, zero))


def _doubling_high_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a * b / 2**31`, halves up; the only result out of range, 2**31, is reduced by 1."""
    y = _rounding_shift(_product(a, b), jnp.full_like(b, 31))
    return jnp.where((a == _LOWEST) & (b == _LOWEST), jnp.int32(_LARGEST), y)


def _divide_by_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns `x / 2**exponent`, exponent from 0 to 31, halves away from zero."""
    mask = (jnp.ones_like(exponent) << exponent) - 1
    threshold = (mask >> 1) + (x < 0).astype(jnp.int32)
    return (x >> exponent) + ((x & mask) > threshold).astype(jnp.int32)


def _product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the product of int32 in 64 bits: the high word, int32, and the low, uint32."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    lowest = a_low.astype(jnp.uint32) * b_low.astype(jnp.uint32)
    middle = a_high * b_low + (lowest >> 16).astype(jnp.int32)
    upper = a_low * b_high + (middle & 0xFFFF)
    high = a_high * b_high + (middle >> 16) + (upper >> 16)
    return high, lax.bitcast_convert_type(a * b, jnp.uint32)


def _rounding_shift(product: tuple[jax.Array, jax.Array], n: jax.Array) -> jax.Array:
    """Returns `(product + 2**(n - 1)) >> n`, n from 1 to 62: its low word; halves round up."""
    return _shifted(product, n) + (_shifted(product, n - 1) & 1)


def _shifted(product: tuple[jax.Array, jax.Array], n: jax.Array) -> jax.Array:
    """Returns the low word of `product >> n`, n from 0 to 62, as int32."""
    high, low = product
    low_shift, high_shift = jnp.minimum(n, 31), jnp.maximum(n - 32, 0)  # no word is shifted by 32
    left_of_low = lax.bitcast_convert_type(low >> low_shift.astype(jnp.uint32), jnp.int32)
    moved_in = high << 1 << (31 - low_shift)  # by 32 - near bits, which leaves 0 if near is 0
    return jnp.where(n < 32, left_of_low | moved_in, high >> high_shift)


_INT32 = Integer(32)


@dataclasses.dataclass(frozen=True, eq=False)
class Requantization:
    """Conversion of int32 accumulators to codes of a quantized result, by integer arithmetic.

    The formula is::

        code = clamp(round((accumulator + bias) * multiplier * 2**(shift - 31)) + zero_point)

    It is a pytree with the arrays as leaves; `Requantization.of` computes multiplier and shift from
    scales. Each array broadcasts to the accumulators by NumPy's rules: its axes, if it has any, are
    aligned with their last axes, and have size 1 or the size of the accumulators.

    Attributes:
      multiplier: int32; from `of`, it is 0 or has a magnitude from 2**30 to 2**31.
      shift: int32, -31 to 30; negative for a factor below a half.
      scale: the scale of the result, float.
      zero_point: the zero point of the result, in the dtype of the codes, broadcast to `scale`;
        `None` means zero everywhere.
      bias: int32, in units of the accumulators; `None` means no bias.
      qtype: format of the codes, integers of 16 bits or less.
      dtype: dtype of the real result.
      rounding: how often to round, a `jqx.tflite.FixedPointRounding`.
      low: the smallest code to return; `None` means that of `qtype`. For a ReLU, the zero point.
      high: the largest code to return; `None` means that of `qtype`.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `shift` is out of range (if its values are known), a Python number exceeds its
        dtype, or `low` and `high` are not a range of codes.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> r = jqx.tflite.Requantization.of(0.5, 0.25, 2.0, qtype=jnp.int8, zero_point=3)
      >>> int(r.multiplier) == 2**30, int(r.shift)
      (True, -3)
    """

    multiplier: jax.Array
    shift: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    bias: jax.Array | None = None
    _: dataclasses.KW_ONLY
    qtype: DTypeLike | QType
    dtype: DTypeLike = jnp.float32
    rounding: FixedPointRounding = FixedPointRounding.DOUBLE
    low: int | None = None
    high: int | None = None

    def __post_init__(self) -> None:
        name = "tflite.Requantization"
        qtype = as_qtype(name, "qtype", self.qtype, "Output")
        form = format_of(qtype)
        if not isinstance(form, Integer) or form.bits > 16:
            raise fail(
                name,
                f"accumulators cannot be requantized to {form.name}.",
                fix="pass an integer format of 16 bits or less, such as jnp.int8; or a QSpec, "
                "which quantizes the float result.",
                error=TypeError,
            )
        dtype = as_dtype(name, "dtype", self.dtype)
        check_real(name, "Real element type", dtype)
        fix = "pass for example jqx.tflite.FixedPointRounding.SINGLE."
        check_instance(name, "rounding", self.rounding, FixedPointRounding, fix=fix)
        zero, bias = self.zero_point, self.bias
        fields = {
            "multiplier": _integers("multiplier", self.multiplier, _INT32),
            "shift": _integers("shift", self.shift, _INT32),
            "scale": as_real(name, "scale", as_like(name, "scale", self.scale, jnp.float32)),
            "zero_point": None if zero is None else _integers("zero_point", zero, form),
            "bias": None if bias is None else _integers("bias", bias, _INT32),
            "qtype": qtype,
            "dtype": dtype,
            "low": int(form.low) if self.low is None else check_integer(name, "low", self.low),
            "high": int(form.high) if self.high is None else check_integer(name, "high", self.high),
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        _check_shift(fields["shift"])
        low, high = fields["low"], fields["high"]
        if not form.low <= low <= high <= form.high:
            raise fail(
                name,
                f"`low` == {low} and `high` == {high} are not a range of codes of {form.name}.",
                fix=f"pass codes from {form.low} to {form.high}, or leave them out.",
            )

    @classmethod
    def of(
        cls,
        lhs_scale: ArrayLike,
        rhs_scale: ArrayLike,
        output_scale: ArrayLike,
        *,
        qtype: DTypeLike | QType,
        zero_point: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        dtype: DTypeLike = jnp.float32,
        rounding: FixedPointRounding = FixedPointRounding.DOUBLE,
        low: int | None = None,
        high: int | None = None,
    ) -> "Requantization":
        """Returns the multiplier and shift nearest to `lhs_scale * rhs_scale / output_scale`.

        They are computed on the host, in float64, as TFLite does per channel. The scales must have
        values, so call it outside of jit. (Per tensor, TFLite first multiplies the scales in
        float32; to match it bit for bit, pass their product as one scale and 1 as the other.) A
        factor below 2**-32 becomes 0, as in TFLite: any accumulator times such a factor rounds
        to 0.

        Args:
          lhs_scale: float, of the left operand, lined up with the last axes of the result.
          rhs_scale: float, of the right operand, lined up in the same way: `(n,)` or `(1, n)` if
            each column of a matrix has its own scale.
          output_scale: float, of the result, lined up in the same way. A Python number is float32.
          qtype: format of the codes, as in the class; so are the other arguments.
          zero_point: an integer, or an array of the dtype of the codes.
          bias: in units of `lhs_scale * rhs_scale`.
          dtype: dtype of the real result.
          rounding: how often to round.
          low: the smallest code to return.
          high: the largest code to return.

        Raises:
          TypeError: a scale is not floating point, or has no value because it is traced.
          ValueError: a scale is not finite, `output_scale` is zero, the scales do not broadcast, or
            the factor is 2**30 or more; and as in the class.

        Gradient: none.
        NaN and infinities: a ValueError.

        Example:
          >>> import jqx, jax.numpy as jnp
          >>> spec = jqx.QSpec(jnp.int8, jqx.per_axis(1))
          >>> w = jqx.QTensor.quantize(jnp.array([[1.0, 8.0], [-2.0, 3.0]]), spec)
          >>> jqx.tflite.Requantization.of(0.1, w.scale, 0.05, qtype=jnp.int8).shift
          Array([[-4, -2]], dtype=int32)
        """
        name = "tflite.Requantization.of"
        factors = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "output_scale": output_scale}
        with jax.ensure_compile_time_eval():
            scales = {field: known_scale(name, field, scale) for field, scale in factors.items()}
            multiplier, shift = quantize_multiplier(factor_of(name, scales))
            return cls(
                jnp.asarray(multiplier),
                jnp.asarray(shift),
                scales["output_scale"],
                zero_point,  # type: ignore[arg-type]  # a number becomes an array
                bias,  # type: ignore[arg-type]
                qtype=qtype,
                dtype=dtype,
                rounding=rounding,
                low=low,
                high=high,
            )


@called("tflite.requantize")
def requantize(accumulator: ArrayLike, requantization: Requantization) -> QTensor:
    """Converts int32 accumulators to a quantized tensor, by integer arithmetic only.

    The codes equal those of the reference kernels of TFLite, bit for bit. As there, int32 overflow
    wraps around: in the sums with the bias and with the zero point; in double rounding, when a
    positive shift moves the accumulator to the left; in single rounding, in the result.

    Args:
      accumulator: int32, any shape.
      requantization: multipliers, shifts and formats; its arrays broadcast to `accumulator`.

    Returns:
      A `QTensor` of the shape of `accumulator`, with the scale and zero point of `requantization`.

    Raises:
      TypeError: `accumulator` is not int32, or `requantization` is not a `Requantization`.
      ValueError: an array does not broadcast to `accumulator`, or the zero point to the scale.

    Gradient: JAX differentiates the scale of the result; integers have no gradient.
    NaN and infinities: integers have none.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> r = jqx.tflite.Requantization.of(0.5, 0.25, 2.0, qtype=jnp.int8, zero_point=3)
      >>> jqx.tflite.requantize(jnp.array([-8, 0, 24, 100_000]), r).values
      Array([  2,   3,   5, 127], dtype=int8)
    """
    name, fix = "tflite.requantize", "create one with jqx.tflite.Requantization.of(...)."
    x = as_array(name, "accumulator", accumulator)
    check_dtype(name, "accumulator", x, jnp.int32, of="the multiplier's")
    check_instance(name, "requantization", requantization, Requantization, fix=fix)
    return as_result(requantized(x, requantization), requantization)


def requantized(x: jax.Array, r: Requantization) -> jax.Array:
    """Returns the codes of int32 accumulators."""
    multiplier, shift, _, zero_point, bias = lined_up(r, x.shape)
    y = x if bias is None else x + bias
    y = multiply_fixed_point(y, multiplier, shift, r.rounding)
    y = y if zero_point is None else y + zero_point.astype(jnp.int32)
    return jnp.clip(y, jnp.int32(r.low), jnp.int32(r.high)).astype(format_of(r.qtype).storage)


def as_result(codes: jax.Array, r: Requantization) -> QTensor:
    """Returns codes as a quantized tensor."""
    _, _, scale, zero_point, _ = lined_up(r, codes.shape)
    return QTensor(codes, scale, zero_point, qtype=r.qtype, dtype=r.dtype)


def lined_up(r: Requantization, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the arrays with the rank of the accumulators, axes of size 1 in front."""
    arrays = []
    for field in _LEAVES:
        x = getattr(r, field)
        if x is not None:
            missing = len(shape) - x.ndim
            sizes = zip(x.shape, shape[max(missing, 0) :], strict=False)
            if missing < 0 or any(m not in (1, n) for m, n in sizes):
                problem = f"`{field}` of shape {x.shape} does not fit the accumulators of {shape}."
                fix = "reshape it: the size of the result along the axes that it has, 1 elsewhere."
                raise fail("tflite.requantize", problem, fix=fix)
            x = jnp.reshape(x, (1,) * missing + x.shape)
        arrays.append(x)
    return tuple(arrays)


def _integers(field: str, x: Any, form: Integer) -> jax.Array:
    """Returns an array of codes of `form`; the value of a Python number must be in its range."""
    if isinstance(x, (bool, int, float)):
        value = check_integer("tflite.Requantization", field, x)
        if not form.low <= value <= form.high:
            problem = f"`{field}` == {value} is out of the range of {form.name}."
            fix = f"pass an integer in [{form.low}, {form.high}]."
            raise fail("tflite.Requantization", problem, fix=fix)
    array = as_like("tflite.Requantization", field, x, form.storage)
    role = "output" if field == "zero_point" else "accumulator"
    check_dtype("tflite.Requantization", field, array, form.storage, of=role)
    return array


def _check_shift(shift: jax.Array) -> None:
    """Checks values that are known; a traced shift is not checked."""
    if not is_concrete(shift):
        return
    lowest, largest = (int(f(np.asarray(shift), initial=0)) for f in (np.min, np.max))
    if lowest < LEAST_SHIFT or largest > LARGEST_SHIFT:
        raise fail(
            "tflite.Requantization",
            f"`shift` is out of range: from {lowest} to {largest}, not in [{LEAST_SHIFT}, "
            f"{LARGEST_SHIFT}].",
            fix="compute it with jqx.tflite.Requantization.of(...).",
        )


_LEAVES = ("multiplier", "shift", "scale", "zero_point", "bias")
_STATIC = ("qtype", "dtype", "rounding", "low", "high")


def _flatten(r: Requantization) -> tuple[tuple, tuple]:
    return tuple(getattr(r, name) for name in _LEAVES), tuple(getattr(r, n) for n in _STATIC)


def _flatten_with_keys(r: Requantization) -> tuple[tuple, tuple]:
    leaves, static = _flatten(r)
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in _LEAVES)
    return tuple(zip(keys, leaves, strict=True)), static


def _unflatten(static: Any, leaves: Any) -> Requantization:
    """Rebuilds without checks: a tree may hold anything in place of its arrays."""
    r = object.__new__(Requantization)
    for name, value in zip((*_LEAVES, *_STATIC), (*leaves, *static), strict=True):
        object.__setattr__(r, name, value)
    return r


jax.tree_util.register_pytree_with_keys(Requantization, _flatten_with_keys, _unflatten, _flatten)


# Quantized results of contractions.


Asked = QSpec | str | tuple[QSpec | str, Affine] | Requantization
Output = Asked | None
"""A spec or scheme whose calibrator finds the scale, one with a given scale and zero point, or
integer factors.
"""


def as_asked(function: str, y: jax.Array, output: Any) -> Any:
    """Returns a float result as it is, or quantized by `output`: a spec or scheme whose calibrator
    finds the scale, or one of these with a given scale and zero point. Errors name `function`.
    """
    if output is None:
        return y
    spec, affine = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    if not isinstance(spec, str):
        fix = 'pass a QSpec or a scheme such as "int8", or one of them and an Affine.'
        check_instance(function, "output", spec, QSpec, fix=fix)
    return QTensor.quantize(y, needed_spec(function, "output", spec, "array"), affine)


def check_requantized(
    function: str,
    lhs: Any,
    rhs: Any,
    summed: tuple[Sequence[int], Sequence[int]],
    products: int,
    dtype: Any,
) -> None:
    """Checks that each result of a contraction is one int32 sum, so that it can be requantized."""
    check_no_offset_or_order(function, lhs, rhs, context=", which int32 sums cannot have")
    if not is_byte(lhs) or not is_byte(rhs):
        raise fail(
            function,
            "`output` requantizes int32 sums, but these operands do not have int32 sums.",
            given=" and ".join(
                repr(x) if isinstance(x, QTensor) else "an array" for x in (lhs, rhs)
            ),
            fix="quantize both to integers of 8 bits or fewer, or pass a QSpec as output.",
            error=TypeError,
        )
    if dtype is not None:
        problem = f"`preferred_element_type` == {dtype} has no effect on a requantized result."
        raise fail(function, problem, fix="leave it out; Requantization has the real dtype.")
    shared = all(shares_scale(q, axes) for q, axes in zip((lhs, rhs), summed, strict=True))
    most_products = max_products_in_int32(lhs, rhs)
    if not shared or is_at_least(products, most_products + 1):
        raise fail(
            function,
            "a result does not fit in one int32 sum.",
            given=f"scales {lhs.scale.shape} and {rhs.scale.shape}, {products} products; "
            f"{most_products} fit",
            fix="quantize without blocks along summed axes, or pass a QSpec as output.",
        )
