"""The quantization grid of an array: scale, zero point, and the elements that share them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import fail
from ..calibrators import Affine, Groups, absmax
from ..gradients import ste, ste_unclipped, straight_through
from ..gradients._shared import check_key
from ..numerics import Block, format_of, ngraph
from ..numerics._shared import E8M0, RoundMode, widen
from ..ops._shared import affine_dequantize, affine_fake_quantize, affine_quantize
from ._fields import check_zero_point
from ._fit import fit, groups_of
from ._spec import QSpec


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
    scale, inner = _kept_scale(function, scale, spec)
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
    given = jax.lax.stop_gradient(x) if covered else x
    grid = grid_of("simulate", given, spec, affine)
    scale, zero_point = grid.lined_up()
    if affine is None:
        scale, zero_point = jax.lax.stop_gradient((scale, zero_point))
    y = grid.groups.join(rounded_to(grid.groups.split(given), scale, zero_point, spec, key))
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


def _kept_scale(function: str, scale: Any, spec: QSpec) -> tuple[jax.Array, jax.Array | None]:
    """Returns a scale in the scale format of a block format; unchanged for other formats."""
    form = format_of(spec.qtype)
    if hasattr(scale, "qtype"):  # a QTensor
        return scale.values, scale.scale
    if not isinstance(form, Block):
        return scale, None
    if not form.two_level:
        if scale.dtype != E8M0:
            raise fail(
                function,
                f"the scales of {form.name} are powers of two.",
                given=f"a scale of dtype {scale.dtype.name}",
                expected=f"dtype {E8M0.name}",
                fix="convert it with scale.astype(jnp.float8_e8m0fnu), if they are powers of two.",
                error=TypeError,
            )
        return scale, None
    # A block whose scale is NaN must not make the scales of all other blocks NaN.
    known = jnp.where(jnp.isnan(scale), jnp.zeros_like(scale), scale)
    inner = fit(known, QSpec(form.scale_qtype, spec.of_second_scale(scale.ndim))).scale
    mode = RoundMode.NEAREST_TOWARD_EVEN
    return affine_quantize(scale, inner, None, qtype=form.scale_qtype, round_mode=mode), inner
