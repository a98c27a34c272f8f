"""The gradient estimators of jqx, each with its formula and its source."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import (
    added,
    as_real,
    check_fields,
    check_integer,
    flag,
    normalize_axes,
    nothing,
    number,
    whole,
)
from ..errors import fail
from ..numerics.exact import compute_dtype, divide

# The protocols of gradient estimators: a backward rule on real bounds, or a differentiable
# surrogate of the quantizer.


class GradientEstimator(Hashable, Protocol):
    """A hashable value that defines the gradient of a quantizer.

    The quantizer clamps `x` to `[low, high]` and rounds it to one of `levels` levels, the first of
    which is `low` and the last `high`. Every fake quantization in jqx reduces to this quantizer.
    The caller applies the chain rule around it and sums over broadcast axes.

    An estimator whose rule holds only for evenly spaced levels has the class attribute
    `uniform_only = True`. Using it with a float format or a codebook is an error.
    """

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`, each of the shape of `x`.

        `x` and `cotangent` have the same shape. `low` and `high` have the same rank, and size 1
        along each axis whose elements share a range, so that `x.size // low.size` elements share
        a range. All have the same dtype, float32 or float64; `low <= high` elementwise.
        """
        ...


@runtime_checkable
class Surrogate(Hashable, Protocol):
    """A hashable value that replaces the quantizer in simulation, forward and backward.

    With it, training sees noise, or a softened rounding, instead of the rounding itself. It does
    not change what `convert` and `QTensor.quantize` compute. The levels are evenly spaced.

    Attributes:
      needs_key: whether `surrogate` draws random numbers.
    """

    @property
    def needs_key(self) -> bool: ...

    def surrogate(
        self,
        x: jax.Array,
        low: jax.Array,
        high: jax.Array,
        levels: int,
        key: jax.Array | None,
    ) -> jax.Array:
        """Returns the replacement of the quantized `x`; JAX differentiates it.

        The operands are those of `GradientEstimator.bwd`; `key` is `None` unless `needs_key`.
        """
        ...


Gradient = GradientEstimator | Surrogate


def check_estimator(function: str, gradient: Any, *, uniform: bool = True) -> None:
    """Checks that `gradient` is an estimator, and that it fits a format whose levels are evenly
    spaced (`uniform`) or not.
    """
    rule = callable(getattr(gradient, "bwd", None))
    surrogate = callable(getattr(gradient, "surrogate", None))
    try:
        hash(gradient)  # fields may have no hash
        is_value = not isinstance(gradient, type)
    except TypeError:
        is_value = False
    if not is_value or not (rule or surrogate):
        kind = f"an object of type {type(gradient).__name__}"
        problem = f"`gradient` is not a gradient estimator, but {kind}."
        fix = "pass a value of jqx.gradients, such as jqx.gradients.ste, or a hashable value with "
        fix += "a method bwd(x, low, high, levels, cotangent)."
        raise fail(function, problem, fix=fix, error=TypeError)
    if not uniform and (surrogate or getattr(gradient, "uniform_only", False)):
        problem = f"the gradient estimator {gradient} is only for evenly spaced levels."
        raise fail(function, problem, fix="pass jqx.gradients.ste, or an integer format.")


@functools.lru_cache
def draws(gradient: Gradient) -> bool:
    """Whether an estimator draws random numbers, and so needs a key."""
    return isinstance(gradient, Surrogate) and gradient.needs_key


def check_key(function: str, gradient: Gradient, key: Any) -> None:
    """Checks that a random key is given if and only if the estimator draws random numbers."""
    if draws(gradient) and key is None:
        problem = f"the gradient estimator {gradient} draws random numbers, but no key is given."
        raise fail(function, problem, fix="pass key=jax.random.key(0), a new one for each step.")
    if key is not None and not draws(gradient):
        problem = f"`key` is not used: the gradient estimator {gradient} draws no random numbers."
        raise fail(function, problem, fix="drop key.")


# Whether an estimator has a gradient for the limits of a range, and so for a scale.


_LEVELS = 16


class MovesLimits(NamedTuple):
    """From which values the limits of a range get a gradient.

    Attributes:
      inside: whether they get one from values inside of the range, or at its ends.
      outside: whether they get one from values that are clipped.
    """

    inside: bool
    outside: bool


@functools.lru_cache
def moves_limits(gradient: Gradient) -> MovesLimits:
    """Returns from which values an estimator has a gradient for limits, found by an example."""

    def moved(inside: jax.Array, outside: jax.Array) -> jax.Array:
        x, cotangent = jnp.stack([inside, outside]), 1 + jnp.stack([inside, inside]) / 4
        low, high = -jnp.ones((2, 1), x.dtype), jnp.ones((2, 1), x.dtype)
        if isinstance(gradient, Surrogate):
            key = jax.random.key(0) if gradient.needs_key else None
            surrogate = gradient.surrogate
            _, pull = jax.vjp(lambda a, b: surrogate(x, a, b, _LEVELS, key), low, high)
            ends = pull(cotangent)
        else:
            ends = gradient.bwd(x, low, high, _LEVELS, cotangent)[1:]
        return jnp.stack([jnp.any(end != 0, axis=1) for end in ends]).any(axis=0)

    inside = np.linspace(-1, 1, 41, dtype=np.float32)
    outside = inside + np.sign(inside + np.float32(0.01))
    # Compiled first: that gives values also where another program is traced.
    moved_limits = np.asarray(jax.jit(moved).lower(inside, outside).compile()(inside, outside))
    return MovesLimits(bool(moved_limits[0]), bool(moved_limits[1]))


# The levels of a uniform quantizer, computed from its bounds.


def grid(low: jax.Array, high: jax.Array, levels: int) -> tuple[jax.Array, jax.Array]:
    """Returns `origin` and `step`: the levels are `origin + k * step` for integers `k`.

    The origin is zero where zero is a level, and `low` elsewhere. Zero is then exact, and a tie
    goes to the even multiple of the scale, as in `round(x / scale)`. If the bounds are multiples
    of a scale, `step` equals that scale up to one rounding. Where the range is empty, `step` is 1.

    Args:
      low: float32 or float64, any shape.
      high: shape and dtype of `low`.
      levels: number of levels, 2 or more.
    """
    step = divide(high - low, jnp.asarray(levels - 1, low.dtype))
    step = jnp.where(step > 0, step, jnp.ones_like(step))
    farther = jnp.where(-low > high, low, high)
    count, exact = jnp.round(divide(farther, step)), divide(low, step)
    # The bounds and the step have one rounding error each, so `low` may differ from a multiple of
    # the step by this much.
    slack = 4 * levels * float(jnp.finfo(low.dtype).eps)
    is_integral = (jnp.abs(exact - jnp.round(exact)) <= slack) & (high > low)
    step = jnp.where(is_integral & (count != 0), divide(farther, count), step)
    return jnp.where(is_integral, jnp.zeros_like(low), low), step


def rounding_error(x: jax.Array, low: jax.Array, high: jax.Array, levels: int) -> jax.Array:
    """Returns nearest level minus `x`, in steps: `round(v) - v`; 0 where `x` is not finite."""
    origin, step = grid(low, high, levels)
    v = divide(x - origin, step)
    error = jnp.round(v) - v
    return jnp.where(jnp.isfinite(error), error, jnp.zeros_like(error))


# A function whose derivative in reverse mode is a given rule, and which forward mode passes over
# when it differentiates a gradient, as in `jax.jvp(jax.grad(f))` and `jax.hessian(f)`.
#
# Forward mode then needs the tangent of the value that reverse mode keeps. It is the transpose of
# the rule. A rule that is not linear in the cotangent has none; its linear part at a cotangent of
# zero is transposed instead.


def with_rule(
    f: Callable[[Any, Any], jax.Array], rule: Callable[[Any, Any, jax.Array], Any]
) -> Callable[[Any, Any], jax.Array]:
    """Returns `f` with a derivative rule.

    Args:
      f: a function of a pytree of float arrays, and of a pytree of other values that have no
        derivative; it returns one array.
      rule: returns the cotangents of the first pytree, from both pytrees and the cotangent of the
        result.
    """

    @jax.custom_jvp
    def value(operands: Any, others: Any) -> jax.Array:
        return f(operands, others)

    def value_and_tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        y, (operands, others) = f(*primals), primals
        _, pull = jax.linearize(lambda ct: rule(operands, others, ct), jnp.zeros_like(y))
        (moved,) = jax.linear_transpose(pull, y)(tangents[0])
        return y, moved

    value.defjvp(value_and_tangent)
    function = jax.custom_vjp(f)
    function.defvjp(
        lambda operands, others: (value(operands, others), (operands, others)),
        lambda primals, cotangent: (rule(primals[0], primals[1], cotangent), None),
    )
    return function


# The straight-through estimator, with the clip mask (`ste`) and without (`ste_unclipped`).
#
#                   ste                                          ste_unclipped
#     dx    =       cotangent where low <= x <= high, else 0     cotangent
#     dlow  =       cotangent where x < low,          else 0     0
#     dhigh =       cotangent where x > high,         else 0     0
#
# The first is the derivative of `clamp(x, low, high)`, that is, of the quantizer without its
# rounding. The second is the derivative of the identity.
#
# Source: Bengio, Leonard, Courville, "Estimating or Propagating Gradients Through Stochastic
# Neurons for Conditional Computation", arXiv:1308.3432; the clip mask is from Hubara et al.,
# "Binarized Neural Networks", NeurIPS 2016.


# A limit computed from the extreme of the data can be on either side of it, by one rounding error.
# The gradient of the extreme must not depend on the side, so this fraction of the range outside of
# the limits still counts as inside.
_SLACK = 2.0**-20


@dataclasses.dataclass(frozen=True)
class StraightThrough:
    """Passes the cotangent to `x` inside the range, and to the limit that clips `x` outside."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        below, above = _outside(x, low, high)
        zero = jnp.zeros_like(cotangent)
        dx = jnp.where(below | above | jnp.isnan(x), zero, cotangent)
        return dx, jnp.where(below, cotangent, zero), jnp.where(above, cotangent, zero)


@dataclasses.dataclass(frozen=True)
class StraightThroughUnclipped:
    """Passes the cotangent to `x`, inside the range and outside; the limits get none."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        zero = jnp.zeros_like(cotangent)
        return jnp.where(jnp.isnan(x), zero, cotangent), zero, zero


ste: StraightThrough = StraightThrough()
ste_unclipped: StraightThroughUnclipped = StraightThroughUnclipped()


@jax.custom_jvp
def straight_through(value: jax.Array, through: jax.Array) -> jax.Array:
    """Returns `value`, with the derivative of `through`.

    Args:
      value: array of any shape and dtype; no gradient passes through it.
      through: array of the same shape and dtype.

    Gradient: `through` gets the cotangent.
    NaN and infinities: those of `value` are kept.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jqx.gradients import straight_through
      >>> f = lambda x: straight_through(jnp.round(x), x)
      >>> f(1.7), jax.grad(f)(1.7)
      (Array(2., dtype=float32, weak_type=True), Array(1., dtype=float32, weak_type=True))
    """
    return value


@straight_through.defjvp
def _tangent(primals, tangents):
    return straight_through(*primals), tangents[1]


def clamp(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns `x` clamped to `[low, high]`, with the derivative of `ste`."""
    below, above = _outside(x, low, high)
    inside = jnp.where(jnp.isnan(x), jax.lax.stop_gradient(x), x)
    through = jnp.where(below, low, jnp.where(above, high, inside))
    return straight_through(jnp.clip(x, low, high), through)


def _outside(x: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where `x` is below and where it is above the range."""
    share = jnp.asarray(_SLACK, x.dtype)
    slack = high * share - low * share  # finite for any finite range
    slack = jnp.where(jnp.isfinite(slack), slack, jnp.zeros_like(slack))
    return x < low - slack, x > high + slack


# Learned step size quantization (LSQ): a gradient of the scale that includes the rounding error.
#
#     v_bar = round(clip(v / s, -Q_N, Q_P)),   v_hat = v_bar * s
#     d v_hat / d v = 1 where -Q_N <= v / s <= Q_P, else 0
#     d v_hat / d s = round(v / s) - v / s there, -Q_N below, Q_P above
#     g = 1 / sqrt(N * Q_P) multiplies the gradient of s; N elements share s
#
# In real bounds, `low = -Q_N * s` and `high = Q_P * s`, with `e = round(v / s) - v / s`:
#
#     d v_hat / d low = -e / (levels - 1),   d v_hat / d high = e / (levels - 1)   inside
#     and 1 for the bound that clips outside; the chain rule `-Q_N * dlow + Q_P * dhigh` gives ds.
#
# `Q_P` is read from the bounds, and is at least 1. Rounding is to nearest, whatever the round mode
# of the quantizer. The paper has an open interval inside, its pseudo-code a closed one as here.
#
# Source: Esser et al., "Learned Step Size Quantization", ICLR 2020, arXiv:1902.08153.


@dataclasses.dataclass(frozen=True)
class LearnedStep:
    """Passes the rounding error to the limits, in addition to the cotangent of clipped elements.

    Attributes:
      gradient_scale: whether `g` multiplies the gradients of the limits.
      elements: the number `N` in `g`. `None` counts the elements of `x` that share a range. Pass it
        where a call sees only a part of the batch: micro-batches, steps of a scan, `jax.vmap` over
        examples, or one device of a `jax.shard_map`. Otherwise the gradients of the parts do not
        add up to that of the batch.
    """

    gradient_scale: bool = True
    elements: int | None = added(None)
    uniform_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name, elements = type(self).__name__, whole(1, 2**63) | nothing()
        fix = "pass the number of elements of the whole batch that share a scale, or None."
        check_fields(name, self, fix, gradient_scale=flag(), elements=elements)
        if self.elements is not None and not self.gradient_scale:
            problem = f"`elements` ({self.elements}) has no effect with gradient_scale=False."
            raise fail(name, problem, fix="leave out elements, or gradient_scale=False.")

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        dx, dlow, dhigh = ste.bwd(x, low, high, levels, cotangent)
        share = dx * rounding_error(x, low, high, levels) / (levels - 1)
        dlow, dhigh = dlow - share, dhigh + share
        if self.gradient_scale:
            n = self.elements or max(x.size // max(low.size, 1), 1)
            g = jax.lax.rsqrt(float(n) * jnp.maximum(self.largest_code(low, high, levels), 1))
            dlow, dhigh = g * dlow, g * dhigh
        return dx, dlow, dhigh

    def largest_code(self, low: jax.Array, high: jax.Array, levels: int) -> jax.Array:
        """Returns `Q_P`: the number of steps from zero to `high`."""
        _, step = grid(low, high, levels)
        return high / step


lsq: LearnedStep = LearnedStep()


# LSQ+: a learned step and a learned real offset.
#
#     x_bar = round(clip((x - beta) / s, n, p)),   x_hat = x_bar * s + beta
#     d x_hat / d s    = round(v) - v inside, with v = (x - beta) / s; n below, p above
#     d x_hat / d beta = 0 inside, 1 outside
#
# With the bounds `low = n * s + beta` and `high = p * s + beta`, both free, this is the rule of
# LSQ, `-e / (levels - 1)` and `e / (levels - 1)` inside and 1 for the bound that clips outside: the
# chain rule gives `ds = n * dlow + p * dhigh` and `dbeta = dlow + dhigh`, which are those above.
#
# Only the gradient scale `g = 1 / sqrt(N * p)` differs: an offset moves the bounds and not the
# codes, so `p` is not computed from the bounds. It is that of signed codes, `levels // 2 - 1` (at
# least 1). Learn the bounds as limits of `fake_quantize`, or learn a scale with a fixed zero point.
#
# Source: Bhalgat et al., "LSQ+: Improving low-bit quantization through learnable offsets and better
# initialization", CVPR Workshops 2020, arXiv:2004.09576; `g` is that of LSQ.


@dataclasses.dataclass(frozen=True)
class LearnedStepAndOffset(LearnedStep):
    """`LearnedStep` for two independent limits: only the gradient scale differs."""

    def largest_code(self, low: jax.Array, high: jax.Array, levels: int) -> jax.Array:
        """Returns `p`, the largest signed code."""
        return jnp.full_like(low, levels // 2 - 1)


lsq_plus: LearnedStepAndOffset = LearnedStepAndOffset()


# Parameterized clipping activation (PACT): a learned upper limit.
#
#     y = 0.5 * (|x| - |x - alpha| + alpha), which is clip(x, 0, alpha), then rounded
#     d y / d alpha = 1 where x >= alpha, else 0
#     d y / d x     = 1 where 0 <= x < alpha, else 0
#
# Here `alpha` is `high` and 0 is `low`, which is not learned and gets no gradient.
#
# Source: Choi et al., "PACT: Parameterized Clipping Activation for Quantized Neural Networks",
# 2018, arXiv:1805.06085.


@dataclasses.dataclass(frozen=True)
class ParameterizedClipping:
    """Passes the cotangent to `x` inside the range, and to `high` at and above it."""

    def bwd(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cotangents of `x`, `low` and `high`; a NaN in `x` gets none."""
        zero = jnp.zeros_like(cotangent)
        dx = jnp.where((low <= x) & (x < high), cotangent, zero)
        return dx, zero, jnp.where(x >= high, cotangent, zero)


pact: ParameterizedClipping = ParameterizedClipping()


# Stochastic rounding: up or down, with probabilities that make it unbiased.
#
#     Round(x) = floor(x) with probability 1 - (x - floor(x)), floor(x) + 1 with x - floor(x)
#
# so that the expected value of Round(x) is x. The gradient treats the rounding as the identity.
#
# Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015,
# arXiv:1502.02551.


def stochastic_round(
    x: ArrayLike, key: jax.Array, *, shared_axes: int | Sequence[int] = ()
) -> jax.Array:
    """Rounds each element to one of its two neighbouring integers, without bias.

    Args:
      x: real array, any shape; float16, bfloat16, float32 or float64. 16-bit floats are computed in
        float32.
      key: a key from `jax.random.key(...)`, a new one for each call.
      shared_axes: axes of `x` along which all elements share one random number; `()` means that
        each element has its own.

    Returns:
      Integers in the shape and dtype of `x`. Elements that are integers do not change.

    Raises:
      TypeError: `x` is not floating point, or `shared_axes` does not hold integers.
      ValueError: an axis is out of range.

    Gradient: the cotangent, unchanged.
    NaN and infinities: unchanged.
    Source: Gupta et al. 2015, section 3. The probability is truncated to a multiple of `2**-32`
      (`2**-64` for float64), which is the only bias.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> keys = jax.random.split(jax.random.key(0), 10_000)
      >>> jax.vmap(jqx.gradients.stochastic_round, (None, 0))(0.3, keys).mean().round(1)
      Array(0.3, dtype=float32)
    """
    name = "gradients.stochastic_round"
    x = as_real(name, "x", x)
    shared = normalize_axes(name, shared_axes, x.ndim, argument="shared_axes")
    wide = x.astype(compute_dtype(x.dtype))
    # Exact for every finite float; x - floor(x) and x + u would round.
    toward_zero = jnp.trunc(wide)
    chance = jnp.abs(wide - toward_zero)
    shape = tuple(1 if axis in shared else size for axis, size in enumerate(x.shape))
    kind, bits = (jnp.uint64, 64) if wide.dtype == jnp.float64 else (jnp.uint32, 32)
    away = jax.random.bits(key, shape, kind) < (chance * 2.0**bits).astype(kind)
    rounded = toward_zero + jnp.where(away, jnp.sign(wide), jnp.zeros_like(wide))
    return straight_through(rounded.astype(x.dtype), x)


@dataclasses.dataclass(frozen=True)
class StochasticRounding:
    """Rounds to one of the two levels next to `x`, without bias; its gradient is that of `ste`.

    Attributes:
      shared_axes: axes of the operand along which all elements share one random number.
    """

    shared_axes: tuple[int, ...] = ()
    needs_key: ClassVar[bool] = True

    def __post_init__(self) -> None:
        axes = self.shared_axes if isinstance(self.shared_axes, Sequence) else (self.shared_axes,)
        axes = tuple(check_integer(type(self).__name__, "shared_axes", axis) for axis in axes)
        object.__setattr__(self, "shared_axes", axes)

    def surrogate(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, key: jax.Array | None
    ) -> jax.Array:
        """Returns `x` clamped, and rounded in steps of the quantizer; a NaN gets no gradient."""
        assert key is not None
        round_steps = partial(stochastic_round, key=key, shared_axes=self.shared_axes)
        return _in_steps(round_steps, x, low, high, levels)


def _in_steps(
    round_steps: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    low: jax.Array,
    high: jax.Array,
    levels: int,
) -> jax.Array:
    """Returns `x` clamped and rounded in steps of the quantizer, with the gradient of `clamp`."""
    clamped = clamp(x, low, high)
    c, low, high = jax.lax.stop_gradient((clamped, low, high))
    origin, step = grid(low, high, levels)
    rounded = round_steps(divide(c - origin, step))
    return straight_through(jnp.clip(origin + rounded * step, low, high), clamped)


stochastic: StochasticRounding = StochasticRounding()


# PARQ: the proximal map of a piecewise-affine regularizer, a rounding with a slope.
#
# Between two neighbouring levels at distance d, with the midpoint m and the inverse slope r:
#
#     prox(x) = m + clip((x - m) / r, -d/2, d/2)
#
# flat at the levels and steep between them; r = 1 is the identity and r = 0 the rounding. Training
# takes r from 1 to 0. The gradient is taken at prox(x) and applied to x (the paper's AProx), which
# is the straight-through rule.
#
# Source: Jin et al., "PARQ: Piecewise-Affine Regularized Quantization", ICML 2025,
# arXiv:2503.15748.


def _toward_integers(x: jax.Array, inverse_slope: float) -> jax.Array:
    """Moves each element toward the nearest integer; rounds it if `inverse_slope` is 0."""
    r = jnp.asarray(inverse_slope, x.dtype)
    nearest = jnp.round(x)
    error = x - nearest
    # The formula relative to the nearest level: the remaining error, which is 0 near the level.
    gained = (0.5 - jnp.abs(error)) * (1 - r) / r
    left = jnp.where(r > 0, jnp.maximum(jnp.abs(error) - gained, 0), jnp.zeros_like(error))
    moved = nearest + jnp.sign(error) * left
    return straight_through(jnp.where(jnp.isfinite(x), moved, x), x)


@dataclasses.dataclass(frozen=True)
class Parq:
    """Moves `x` toward its level with a slope; its gradient is that of `ste`. See `parq`.

    Attributes:
      inverse_slope: 1 leaves `x` as it is inside the range, 0 rounds it. Each new value recompiles.
    """

    inverse_slope: float
    needs_key: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fix = "pass a number that falls from 1 to 0 in training, such as inverse_slope=0.5."
        check_fields("gradients.parq", self, fix, inverse_slope=number(0, 1))

    def surrogate(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, key: jax.Array | None
    ) -> jax.Array:
        """Returns `x` clamped and moved toward its level; a NaN gets no gradient."""
        round_steps = partial(_toward_integers, inverse_slope=self.inverse_slope)
        return _in_steps(round_steps, x, low, high, levels)


def parq(inverse_slope: float) -> Parq:
    """Returns an estimator that moves `x` toward its level with a slope.

    Its gradient is that of `ste`.

    Args:
      inverse_slope: 1 leaves `x` as it is inside the range, 0 rounds it. Each new value recompiles.

    Raises:
      TypeError: `inverse_slope` is not a number.
      ValueError: it is not in `[0, 1]`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.array([0.125, 0.375, 0.5, 0.625])
      >>> jqx.quantize_dequantize(x, 1.0, qtype=jnp.int8, gradient=jqx.gradients.parq(0.5))
      Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
    """
    return Parq(inverse_slope)
