"""Additive noise: uniform noise of one step in place of the rounding.

    Q_tilde(x) = clip(x, low, high) + Delta * u,   u ~ U[-1/2, 1/2],
    Delta = (high - low) / (levels - 1)

The noise has the mean and the variance of a rounding error. The derivative is exact, also for the
limits: they scale the noise with the step.

Source: Defossez, Adi, Synnaeve, "Differentiable Model Compression via Pseudo Quantization Noise"
(DiffQ), TMLR 2022, arXiv:2104.09987, with its uniform noise; after Balle, Laparra, Simoncelli,
"End-to-end Optimized Image Compression", ICLR 2017, arXiv:1611.01704.
"""

import dataclasses
from typing import ClassVar

import jax

from ._ste import clamp


@dataclasses.dataclass(frozen=True)
class AdditiveNoise:
    """Adds a uniform random number of up to half a step to each element; no rounding."""

    needs_key: ClassVar[bool] = True

    def surrogate(
        self, x: jax.Array, low: jax.Array, high: jax.Array, levels: int, key: jax.Array | None
    ) -> jax.Array:
        """Returns `x` clamped, plus noise; a NaN gets no gradient."""
        assert key is not None
        u = jax.random.uniform(key, x.shape, x.dtype, minval=-0.5, maxval=0.5)
        return clamp(x, low, high) + (high - low) / (levels - 1) * u


additive_noise: AdditiveNoise = AdditiveNoise()
