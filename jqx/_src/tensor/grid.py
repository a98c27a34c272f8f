"""The quantization grid of an array: scale, zero point, and the elements that share them."""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax

from ..errors import fail
from ..gradients.estimators import check_key, ste, ste_unclipped, straight_through
from ..numerics.blocks import Block
from ..numerics.exact import RoundMode, common_dtype, narrow, widen
from ..numerics.lookup import E8M0, format_of
from ..numerics.packing import pack_bits
from ..numerics.runtimes import ngraph
from ..ops.affine import affine_dequantize, affine_fake_quantize, affine_quantize
from ..statistics.calibrators import Affine, absmax, fit_of
from ..statistics.granularity import Groups
from ..statistics.searches import second_scale
from .layout import Layout, Packing, broadcasts, check_zero_point, inverse_of, permuted_axis, taken
from .spec import QSpec

# Applies a spec to an array: finds its scale, and which elements share a scale.


@partial(jax.jit, static_argnames=("spec",))
def fit(x: jax.Array, spec: QSpec) -> Affine:
    """Returns the scale and zero point that the calibrator of `spec` finds for `x` itself."""
    return fit_of(spec.calibrator, x, spec)


def groups_of(
    function: str, spec: QSpec, shape: tuple[int, ...], affine: Affine | None = None
) -> Groups:
    """Returns which elements of an array of `shape` share a scale: that of `spec`, or `affine`."""
    groups = spec.granularity.groups(shape)
    form = format_of(spec.qtype)
    if isinstance(form, Block):
        tail = getattr(spec.granularity, "tail", False)
        if groups.per_scale not in (form.size, 0) and not (tail and groups.per_scale < form.size):
            problem = f"{form.name} has blocks of {form.size} elements."
            facts = f"granularity {spec.granularity}: blocks of {groups.per_scale} for {shape}"
            fix = f"pass per_group({form.size}), or per_block with size 1 for every other axis."
            raise fail(function, problem, given=facts, fix=fix)
    if affine is None or affine.scale.shape == groups.scale_shape:
        return groups
    if not broadcasts(affine.scale.shape, shape):
        problem = f"`affine.scale` does not fit `x`: shape {affine.scale.shape} for {shape}."
        fix = f"pass shape {groups.scale_shape}, the scale shape of spec."
        raise fail(function, problem, fix=fix)
    return Groups.of_scale(shape, affine.scale.shape)


class Grid(NamedTuple):
    """Scale and zero point of an array.

    Attributes:
      scale: one entry for each group: a float, a power of two in float8_e8m0fnu, or a code if
        `inner` is given.
      inner: the scale of the codes in `scale`, if scales are quantized; else `None`.
      zero_point: the zero point, or `None`.
      groups: which elements share a scale.
    """

    scale: jax.Array
    inner: jax.Array | None
    zero_point: jax.Array | None
    groups: Groups

    def real_scale(self) -> jax.Array:
        """Returns the scale as floats or powers of two."""
        if self.inner is None:
            return self.scale
        return affine_dequantize(
            self.scale, self.inner, None, qtype=self.scale.dtype, dtype=self.inner.dtype
        )

    def lined_up(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns scale and zero point so that they broadcast to the array in its groups."""
        zero_point = self.zero_point
        return (
            self.groups.split_scale(wide_scale(self.real_scale())),
            None if zero_point is None else self.groups.split_scale(zero_point),
        )


def wide_scale(scale: jax.Array) -> jax.Array:
    """Returns a scale in the dtype that multiplies codes: 16-bit floats become float32, because
    they would round some codes.
    """
    return scale if scale.dtype == E8M0 else widen(scale)


def grid_of(function: str, x: jax.Array, spec: QSpec, affine: Affine | None) -> Grid:
    """Returns the grid of `x`: that of `affine`, or the one that the calibrator of `spec` finds."""
    if affine is not None:
        affine = Affine(*affine)
    groups = groups_of(function, spec, x.shape, affine)
    scale, zero_point = affine or fit(x, spec)
    if zero_point is not None:
        check_zero_point(function, zero_point, scale)
    scale, inner = _in_scale_format(function, scale, spec)
    return Grid(scale, inner, zero_point, groups)


def fake_quantize_as(
    x: jax.Array, spec: QSpec, affine: Affine | None = None, key: jax.Array | None = None
) -> jax.Array:
    """Rounds `x` differentiably to the grid that `QTensor.quantize` would use.

    Without `affine`, the scale is computed from `x` and has no gradient.
    """
    check_key("simulate", spec.gradient, key)
    return _fake_quantize(x, affine, key, spec=spec)


@partial(jax.jit, static_argnames="spec")
def _fake_quantize(
    x: jax.Array, affine: Affine | None, key: jax.Array | None, *, spec: QSpec
) -> jax.Array:
    """Jitted once for each spec and shape: tracing it again would cost more than the model."""
    covered = _is_covered(spec, affine)
    detached = jax.lax.stop_gradient(x) if covered else x
    grid = grid_of("simulate", detached, spec, affine)
    scale, zero_point = grid.lined_up()
    if affine is None:
        scale, zero_point = jax.lax.stop_gradient((scale, zero_point))
    y = grid.groups.join(rounded_to(grid.groups.split(detached), scale, zero_point, spec, key))
    return straight_through(y, x) if covered else y


def rounded_to(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    spec: QSpec,
    key: jax.Array | None = None,
) -> jax.Array:
    """Rounds `x` to the grid of a scale and a zero point that broadcast to it, as `spec` says."""
    return affine_fake_quantize(
        x,
        scale,
        zero_point,
        key,
        qtype=spec.qtype,
        round_mode=spec.rounding,
        gradient=spec.gradient,
        numerics=spec.numerics,
    )


def _is_covered(spec: QSpec, affine: Affine | None) -> bool:
    """Whether the gradient of `ste` is that of the identity. A scale from the largest magnitude of
    the array itself clips nothing, so the backward pass does not need the mask. A NaN makes its
    whole group NaN, so the mask would not help there.
    """
    form = format_of(spec.qtype)
    return (
        affine is None
        and spec.gradient in (ste, ste_unclipped)
        and spec.symmetric
        and spec.calibrator == absmax
        and spec.numerics == ngraph
        and form.low < 0 < form.high
        and not isinstance(form, Block)
    )


def _in_scale_format(function: str, scale: Any, spec: QSpec) -> tuple[jax.Array, jax.Array | None]:
    """Returns a scale in the scale format of a block format; unchanged for other formats."""
    form = format_of(spec.qtype)
    if hasattr(scale, "qtype"):  # a QTensor
        return scale.values, scale.scale
    if not isinstance(form, Block):
        return scale, None
    if not form.two_level:
        if scale.dtype != E8M0:
            problem = f"the scales of {form.name} are powers of two, not {scale.dtype.name}."
            fix = "convert it with scale.astype(jnp.float8_e8m0fnu), if they are powers of two."
            raise fail(function, problem, fix=fix, error=TypeError)
        return scale, None
    inner = second_scale(scale, spec)
    mode = RoundMode.NEAREST_TOWARD_EVEN
    return affine_quantize(scale, inner, None, qtype=form.scale_qtype, round_mode=mode), inner


# Conversion of a real array to a QTensor and back: one compiled program each, also eagerly.


@partial(jax.jit, static_argnames=("cls", "spec", "axis"), inline=True)
def quantized(
    x: jax.Array, affine: Affine | None, *, cls: Any, spec: QSpec, axis: int | None
) -> Any:
    """Returns `x` as a QTensor, packed along `axis`; see `QTensor.quantize`."""
    grid = grid_of("QTensor.quantize", x, spec, affine)
    codes = affine_quantize(
        grid.groups.split(x),
        *grid.lined_up(),
        qtype=spec.qtype,
        round_mode=spec.rounding,
        numerics=spec.numerics,
        as_bits=axis is not None,
    )
    return with_grid(codes, grid, x, cls=cls, spec=spec, axis=axis)


def with_grid(
    codes: jax.Array, grid: Grid, x: jax.Array, *, cls: Any, spec: QSpec, axis: int | None = None
) -> Any:
    """Returns codes of `x`, in the groups of its grid, as a QTensor, packed along `axis`."""
    codes = grid.groups.join(codes)
    scale = grid.scale
    if grid.inner is not None:
        scale = cls(scale, grid.inner, qtype=scale.dtype, dtype=grid.inner.dtype)
    return cls(
        codes if axis is None else pack_bits(codes, format_of(spec.qtype).bits, axis),
        scale,
        grid.zero_point,
        qtype=spec.qtype,
        dtype=x.dtype,
        blocks=grid.groups.blocks,
        layout=None if axis is None else Layout(Packing(axis - x.ndim, x.shape[axis])),
    )


@partial(jax.jit, inline=True)
def dequantized(q: Any) -> jax.Array:
    """Returns the real array of a QTensor; see `QTensor.dequantize`."""
    groups, offset = q.groups, q.real_offset()
    scale = wide_scale(q.scale.dequantize() if hasattr(q.scale, "qtype") else q.scale)
    wide = q.dtype
    if offset is not None:
        offset = widen(offset)
        wide = functools.reduce(common_dtype, (x.dtype for x in (scale, offset)), q.dtype)
    real = affine_dequantize(
        groups.split(q.codes),
        groups.split_scale(scale),
        None if q.zero_point is None else groups.split_scale(q.zero_point),
        qtype=q.qtype,
        dtype=wide,
    )
    if offset is not None:
        real = narrow(real + groups.split_scale(offset.astype(wide)), q.dtype)
    real = groups.join(real)
    axis = None if q.order is None else permuted_axis(q.order)
    if q.order is None or axis is None:
        return real
    return taken(real, inverse_of(q.order), axis)
