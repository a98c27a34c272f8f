"""How an operand of a product is rounded in training: to nearest, stochastically, or by EDEN.

Operands are in the form [batch, kept, summed], so that one definition serves all three products of
a layer: one scale per channel is one for each index of `kept`, and groups run along `summed`.

Sources: stochastic rounding, Gupta et al., arXiv:1502.02551; MS-EDEN, Panferov et al., Quartet II,
arXiv:2601.22813; the random Hadamard transform of NVFP4, arXiv:2509.25149.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ... import QSpec, QTensor, RoundMode, per_tensor
from ...calibrators import Affine
from ...extend import QType
from ...numerics import Block, format_of
from .. import compat
from ..numerics.exact import divide, widen
from ..numerics.qtype import neighbour
from ..tensor.grid import Grid, fit, grid_of, with_grid
from ..tensor.products import BATCH, KEPT, SUMMED, Rounded

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


def quantized(
    x: jax.Array,
    rounded: Rounded,
    key: jax.Array | None,
    size: int,
    history: jax.Array | None = None,
) -> QTensor:
    """Returns an operand as a QTensor.

    Args:
      x: [batch, kept, summed], rotated already if the product has a transform.
      rounded: how it is rounded.
      key: a random key, if `rounded` needs one. Each device of a `shard_map` along which `x` varies
        draws numbers of its own.
      size: the size of the blocks of the transform, for `"eden"`.
      history: the largest magnitudes of earlier steps, if `rounded` has delayed scales.
    """
    spec = rounded.spec.resolve(3, (BATCH, KEPT), stacked=(BATCH,))
    if rounded.history:
        assert history is not None
        return QTensor.quantize(x, spec, fit(_expected(history, x), spec))
    if rounded.rounding == "nearest":
        return QTensor.quantize(x, spec, pack=packed_axis(spec))
    assert key is not None
    for axis in sorted(compat.varies_along(x)):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    if rounded.rounding == "stochastic":
        return _stochastic(x, spec, key)
    return _eden(x, spec, key, size)


# Delayed scales.


@custom_vmap
def largest_magnitude(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude of an operand, a float32 scalar; under `vmap`, of all its
    members, so that the gradient of a history is a maximum instead of a sum.
    """
    return per_tensor().groups(x.shape).largest_magnitude(x).reshape(()).astype(jnp.float32)


@largest_magnitude.def_vmap
def _of_all_members(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    """The rule of `vmap`: the result has no axis of it."""
    return largest_magnitude(x), False


def _expected(history: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the largest magnitude to expect, [1, 1, 1]: that of earlier steps, or of `x` itself
    if there are none yet.
    """
    seen = jnp.max(history)
    return jnp.where(seen > 0, seen, largest_magnitude(x)).reshape(1, 1, 1)


def remembered(history: jax.Array, largest: jax.Array) -> jax.Array:
    """Returns a history after one more step. A step with NaN or infinity, which an optimizer
    skips, leaves 0, which counts for nothing. The maximum over the devices that saw other data.
    """
    others = sorted(compat.varies_along(largest) - compat.varies_along(history))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    if others:
        largest = jax.lax.pmax(largest, tuple(others))
    return jnp.concatenate([largest[None], history[:-1]])


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
    return _encoded(between(units, form, key), grid, x, spec)


def packed_axis(spec: QSpec) -> int | None:
    """Returns the axis along which codes are packed, if they are floats of 4 bits: XLA on CPU
    converts such floats one by one, and bytes in vectors.
    """
    return SUMMED if format_of(spec.qtype).storage == jnp.float4_e2m1fn else None


def _encoded(values: jax.Array, grid: Grid, x: jax.Array, spec: QSpec) -> QTensor:
    """Returns numbers of a format, in the groups of a grid, as codes."""
    form, axis = format_of(spec.qtype), packed_axis(spec)
    encode = form.encode if axis is None else form.encode_bits
    codes = encode(values, RoundMode.NEAREST_TOWARD_EVEN)
    return with_grid(codes, grid, x, cls=QTensor, spec=spec, axis=axis)


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

        r = nearest(x / (s g)),    c = <x, x> / <x, s g r>,    s' = stochastic(s c)

    for the code `s` of the scale of a block, the scale `g` of the scales, and sums over the blocks
    of the transform. After a random transform `c s g r` is an unbiased estimate of `x`. The sums
    must be those of `x`, not of `x / (s g)`: blocks with other scales count for less.
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
    weights = groups.split_scale(codes)  # without `g`, which may make squares too small
    v, r = (groups.join(a * weights).reshape(*x.shape[:-1], -1, size) for a in (units, values))
    shares = jnp.sum(v * r, -1)
    correction = jnp.where(shares > 0, jnp.sum(v * v, -1) / jnp.where(shares > 0, shares, 1), 1)
    corrected = codes * jnp.repeat(correction, size // form.size, -1)
    scales = between(jnp.minimum(corrected, scale_form.high), scale_form, key)
    stored = scale_form.encode(scales, RoundMode.NEAREST_TOWARD_EVEN)
    return _encoded(values, Grid(stored, inner, None, groups), x, spec)
