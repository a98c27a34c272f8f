"""Rules for the scales of blocks of 4-bit floats, MXFP4 and NVFP4.

MX rounds the power of two down, so that a largest magnitude of up to 8 / 6 of the largest number is
clipped; `Ceil` rounds it up. NVFP4 maps the largest magnitude to 6, and has no number between 4 and
6; `FourOverSix` maps it to 4 if that loses less.

Sources: OCP Microscaling Formats (MX) Specification 1.0, section 6.3, for the rule itself; Mishra
et al., "Recipes for Pre-training LLMs with MXFP8", arXiv:2506.08027, for rounding up; Cook et al.,
"Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling", arXiv:2512.02010.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..numerics import Block, format_of
from ..numerics._shared import E8M0
from ._absmax import AbsMax, AbsMaxStats
from ._calibrator import Affine, Affinity, look_at, poisoned
from ._cover import cover
from ._histogram import FromHistogram, HistogramStats
from ._mse import searched
from ._points import Points, points_in, points_of


@dataclasses.dataclass(frozen=True)
class Ceil(AbsMax):
    """Takes the least scale that clips nothing: a power of two for formats with such scales, as MX
    has them, and the scale of `absmax` for all others.
    """

    def affine(self, stats: AbsMaxStats, spec: Affinity) -> Affine:
        """Returns the least scale at which the largest magnitude is in range."""
        return poisoned(_up(stats.largest, spec), stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale for one array in one pass; the largest magnitude of a NaN is NaN."""
        largest = spec.granularity.groups(x.shape).largest_magnitude(x).astype(jnp.float32)
        return _up(largest, spec)

    def __str__(self) -> str:
        return "ceil"


@dataclasses.dataclass(frozen=True)
class FourOverSix(FromHistogram):
    """Maps the largest magnitude to 6 or to 4, whichever has the smaller squared error. For blocks
    of 4-bit floats whose scales are not powers of two, such as nvfp4.

    Raises:
      ValueError: on use, if the format is another one.
    """

    def affine(self, stats: HistogramStats, spec: Affinity) -> Affine:
        """Returns the scale of least expected error under the histogram."""
        return poisoned(_either(points_in(stats), spec), stats.nans)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the scale of least error for `x` itself."""
        return poisoned(_either(points_of(x, spec), spec), look_at(x, spec).nans)

    def __str__(self) -> str:
        return "four_over_six"


def _up(largest: jax.Array, spec: Affinity) -> Affine:
    found, form = cover(-largest, largest, spec), format_of(spec.qtype)
    if not isinstance(form, Block) or form.scale_qtype != E8M0:
        return found
    clips = largest > found.scale.astype(jnp.float32) * jnp.float32(form.high)
    wide = jnp.where(clips, 2 * largest, largest)
    return cover(-wide, wide, spec)


def _either(points: Points, spec: Affinity) -> Affine:
    form = format_of(spec.qtype)
    fits = isinstance(form, Block) and form.scale_qtype != E8M0 and form.elements.high == 6
    if not fits:
        raise fail(
            "calibrators.four_over_six",
            "the format has other elements or scales.",
            given=f"qtype {form.name}",
            expected="a block format like jqx.numerics.nvfp4",
            fix="use another calibrator for it, such as jqx.calibrators.mse.",
        )
    return searched(points, spec, np.array([1.5], np.float32), jnp.square)


ceil: Ceil = Ceil()
four_over_six: FourOverSix = FourOverSix()
