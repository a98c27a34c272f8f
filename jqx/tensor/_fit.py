"""A spec applied to an array: find its scale, or round the array to the grid of that scale."""

from functools import partial

import jax

from ..calibrators import Affine
from ..ops import affine_fake_quantize
from ._spec import QSpec


@partial(jax.jit, static_argnames=("spec",))
def fit(x: jax.Array, spec: QSpec) -> Affine:
    """Returns the scale and zero point that the calibrator of `spec` finds for `x` itself."""
    return spec.calibrator.affine(spec.calibrator.observe(x, spec), spec)


def fake_quantize_as(x: jax.Array, spec: QSpec, affine: Affine | None = None) -> jax.Array:
    """Rounds `x` to the grid that `QTensor.quantize` puts it on, differentiably.

    A scale that is not given is found from `x`, and counts as a constant.
    """
    scale, zero_point = affine or jax.lax.stop_gradient(fit(x, spec))
    return affine_fake_quantize(
        x,
        scale,
        zero_point,
        qtype=spec.qtype,
        round_mode=spec.round_mode,
        gradient=spec.gradient,
    )
