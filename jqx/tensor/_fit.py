"""Applies a spec to an array: finds its scale, and which elements share a scale."""

from functools import partial

import jax

from .._errors import fail
from ..calibrators import Affine, Groups
from ..numerics import Block, format_of
from ._fields import broadcasts
from ._spec import QSpec


@partial(jax.jit, static_argnames=("spec",))
def fit(x: jax.Array, spec: QSpec) -> Affine:
    """Returns the scale and zero point that the calibrator of `spec` finds for `x` itself."""
    return spec.calibrator.fit(x, spec)


def groups_of(
    function: str, spec: QSpec, shape: tuple[int, ...], affine: Affine | None = None
) -> Groups:
    """Returns which elements of an array of `shape` share a scale: that of `spec`, or `affine`."""
    groups = spec.granularity.groups(shape)
    form = format_of(spec.qtype)
    if isinstance(form, Block):
        tail = getattr(spec.granularity, "tail", False)
        if groups.per_scale not in (form.size, 0) and not (tail and groups.per_scale < form.size):
            raise fail(
                function,
                f"{form.name} has blocks of {form.size} elements.",
                given=f"granularity {spec.granularity}: {groups.per_scale} elements of {shape} a "
                f"block",
                expected=f"block sizes whose product is {form.size}",
                fix=f"pass per_group({form.size}), or per_block with size 1 for every other axis.",
            )
    if affine is None or affine.scale.shape == groups.scale_shape:
        return groups
    if not broadcasts(affine.scale.shape, shape):
        raise fail(
            function,
            "`affine.scale` does not fit `x`.",
            given=f"affine.scale.shape == {affine.scale.shape}, x.shape == {shape}",
            expected=f"shape {groups.scale_shape}, the scale shape of spec",
            fix="pass one scale per index of the axes that have their own, with size 1 elsewhere.",
        )
    return Groups.of_scale(shape, affine.scale.shape)
