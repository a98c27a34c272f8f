"""How an operand of a product is rounded in training: to nearest, stochastically, or by EDEN.

Operands are in the form [batch, kept, summed], so that one definition serves all three products of
a layer: one scale per channel is one for each index of `kept`, and groups run along `summed`.

Sources: stochastic rounding, Gupta et al., arXiv:1502.02551; MS-EDEN, Panferov et al., Quartet II,
arXiv:2601.22813; the random Hadamard transform of NVFP4, arXiv:2509.25149.
"""

import dataclasses
import importlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ... import QSpec, QTensor, RoundMode
from ...calibrators import Affine
from ...extend import QType
from ...numerics import Block, format_of, ngraph
from ..checks import called
from ..errors import fail
from ..numerics.exact import divide, widen
from ..numerics.qtype import neighbour
from ..tensor.grid import Grid, fit, grid_of, with_grid
from ..tensor.spec import needed_spec

RoundingName = Literal["nearest", "stochastic", "eden"]

BATCH, KEPT, SUMMED = 0, 1, 2
"""The axes of an operand."""

FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The diagonal of the Hadamard transform in NVIDIA's recipe, which is the same in each step."""


@called("recipes.Rounded", 'pass a spec first: Rounded("nvfp4", "stochastic").')
@dataclasses.dataclass(frozen=True, init=False)
class Rounded:
    """How one operand of a product is rounded.

    Attributes:
      spec: its format and granularity. Relative granularities refer to the axis that the product
        sums over; absolute ones to the form [batch, kept, summed].
      rounding: `"nearest"`; `"stochastic"`, up or down so that the mean is the value; or `"eden"`,
        to nearest with stochastic scales that make the product unbiased, for formats with scales in
        a float format (nvfp4) in a product with a random Hadamard transform.
    """

    spec: QSpec
    rounding: RoundingName

    def __init__(self, spec: QSpec | str, rounding: RoundingName = "nearest") -> None:
        own = needed_spec("recipes.Rounded", "spec", spec, "array")
        object.__setattr__(self, "spec", own)
        object.__setattr__(self, "rounding", rounding)
        if self.rounding not in ("nearest", "stochastic", "eden"):
            problem = f"`rounding` is unknown: {self.rounding!r}."
            raise fail("recipes.Rounded", problem, fix="pass 'nearest', 'stochastic' or 'eden'.")
        form = format_of(own.qtype)
        if self.rounding != "nearest" and not (own.symmetric and own.numerics == ngraph):
            problem = f"{self.rounding} rounding is for symmetric specs of jqx's own numerics."
            fix = "pass symmetric=True, and no numerics=, in the spec."
            raise fail("recipes.Rounded", problem, given=str(own), fix=fix)
        if self.rounding == "eden" and not (isinstance(form, Block) and form.two_level):
            problem = f"{form.name} has no scales in a float format, which EDEN rounds."
            raise fail("recipes.Rounded", problem, fix='pass "nvfp4", or rounding="stochastic".')

    @property
    def needs_key(self) -> bool:
        """Whether rounding draws random numbers."""
        return self.rounding != "nearest"

    def __str__(self) -> str:
        return str(self.spec) if self.rounding == "nearest" else f"{self.spec} {self.rounding}"


Operand = Rounded | np.dtype[Any]
"""A rounded operand, or the float dtype in which it is multiplied."""

OperandLike = Rounded | QSpec | DTypeLike
"""What is given as an operand: also a spec, or a scheme such as `"int8:token"`."""


def as_operand(function: str, argument: str, value: Any) -> Operand:
    """Returns an operand that is given as a `Rounded`, a spec, a scheme or a float dtype."""
    if isinstance(value, Rounded):
        return value
    if _is_float(value):
        return jnp.dtype(value)
    if isinstance(value, (QSpec, str)):
        return Rounded(value)
    problem = f"`{argument}` is neither a spec nor a float dtype: {value!r}."
    fix = 'pass for example "int8:token", a QSpec, recipes.Rounded(...), or jnp.bfloat16.'
    raise fail(function, problem, fix=fix, error=TypeError)


def _is_float(value: Any) -> bool:
    """Whether a value names a float dtype in which products run, of 16 bits or more."""
    if value is None:  # NumPy takes it for float64
        return False
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        return False
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2


# A block Hadamard transform along the summed axis, which cancels in the product.


def sylvester(size: int) -> np.ndarray:
    """Returns Sylvester's Hadamard matrix of a power of two, entries 1 and -1, [size, size]."""
    return importlib.import_module("scipy.linalg").hadamard(size, np.float32)


def rotated(x: jax.Array, size: int, signs: jax.Array) -> jax.Array:
    """Returns `x` times `diag(signs) H / sqrt(size)` in each block of `size` along the last axis.

    Args:
      x: [batch, kept, summed]; float32.
      size: the size of a block; it divides `summed`.
      signs: 1 or -1, [size].
    """
    matrix = signs[:, None] * (sylvester(size) / np.sqrt(np.float32(size)))
    blocks = x.reshape(*x.shape[:-1], -1, size)
    return jnp.matmul(blocks, matrix, precision=jax.lax.Precision.HIGHEST).reshape(x.shape)


def padded(x: jax.Array, multiple: int) -> jax.Array:
    """Returns `x` with zeros at the end of its last axis, so that a number divides its size."""
    rest = -x.shape[-1] % multiple
    return jnp.pad(x, ((0, 0), (0, 0), (0, rest))) if rest else x


# Rounding.


def quantized(x: jax.Array, rounded: Rounded, key: jax.Array | None, size: int) -> QTensor:
    """Returns an operand as a QTensor.

    Args:
      x: [batch, kept, summed], rotated already if the product has a transform.
      rounded: how it is rounded.
      key: a random key, if `rounded` needs one.
      size: the size of the blocks of the transform, for `"eden"`.
    """
    spec = rounded.spec.resolve(3, (BATCH, KEPT), stacked=(BATCH,))
    if rounded.rounding == "nearest":
        return QTensor.quantize(x, spec)
    assert key is not None
    if rounded.rounding == "stochastic":
        return _stochastic(x, spec, key)
    return _eden(x, spec, key, size)


def _stochastic(x: jax.Array, spec: QSpec, key: jax.Array) -> QTensor:
    """Returns codes of the two numbers next to each element, the upper one with the probability
    that makes the mean right.
    """
    form = format_of(spec.qtype)
    affine = fit(x, spec)
    if isinstance(form, Block) and form.two_level:  # a scale that is rounded down would clip
        affine = Affine(affine.scale * _ROOM, affine.zero_point)
    grid = grid_of("train", x, spec, affine)
    scale, _ = grid.lined_up()
    units = divide(grid.groups.split(widen(x)), scale.astype(jnp.float32))
    codes = form.encode(between(units, form, key), spec.rounding)
    return with_grid(codes, grid, x, cls=QTensor, spec=spec)


_ROOM = 17 / 16
"""By what a scale in float8_e4m3fn may be smaller than before it was rounded."""


def between(y: jax.Array, form: QType, key: jax.Array) -> jax.Array:
    """Returns numbers of a format next to `y`, at random, with mean `y` within its range."""
    return neighbour(form, y, jax.random.uniform(key, y.shape, y.dtype))


_EDEN_TOP = 6 / ((17 / 16) * 0.93)
"""The largest magnitude of a block in units of its scale: clips a little, which EDEN corrects."""

_EDEN_SCALES = 255.99
"""The largest code of a scale before its correction, which may double it."""


def _eden(x: jax.Array, spec: QSpec, key: jax.Array, size: int) -> QTensor:
    """Rounds to nearest, and multiplies the scales by a correction that is rounded stochastically.

        u = x / (s g),    r = nearest(u),    c = <u, u> / <u, r>,    s' = stochastic(s c)

    for the code `s` of the scale of a block, the scale `g` of the scales, and sums over the blocks
    of the transform. After a random transform `c r` is an unbiased estimate of `u`.
    """
    form = format_of(spec.qtype)
    assert isinstance(form, Block)
    scale_form = format_of(form.scale_qtype)
    groups = spec.granularity.groups(x.shape)
    wide = widen(x)
    largest = divide(groups.largest_magnitude(wide), jnp.float32(_EDEN_TOP))
    # One scale of scales for each member of the batch.
    inner = divide(jnp.max(largest, (KEPT, SUMMED), keepdims=True), jnp.float32(_EDEN_SCALES))
    inner = jnp.where(inner == 0, 1, inner)
    codes = scale_form.round(divide(largest, inner), RoundMode.NEAREST_TOWARD_EVEN)
    codes = jnp.where(codes == 0, 1, codes)
    units = divide(groups.split(wide), groups.split_scale(codes * inner))
    values = form.round(units, RoundMode.NEAREST_TOWARD_EVEN)
    u, r = (groups.join(a).reshape(*x.shape[:-1], -1, size) for a in (units, values))
    shares = jnp.sum(u * r, -1)
    correction = jnp.where(shares > 0, jnp.sum(u * u, -1) / jnp.where(shares > 0, shares, 1), 1)
    corrected = codes * jnp.repeat(correction, size // form.size, -1)
    scales = between(jnp.minimum(corrected, scale_form.high), scale_form, key)
    stored = scale_form.encode(scales, RoundMode.NEAREST_TOWARD_EVEN)
    encoded = form.encode(values, RoundMode.NEAREST_TOWARD_EVEN)
    return with_grid(encoded, Grid(stored, inner, None, groups), x, cls=QTensor, spec=spec)
