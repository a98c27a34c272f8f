"""LSQ+: a learned step and a learned real offset.

    x_bar = round(clip((x - beta) / s, n, p)),   x_hat = x_bar * s + beta
    d x_hat / d s    = round(v) - v inside, with v = (x - beta) / s; n below, p above
    d x_hat / d beta = 0 inside, 1 outside

With the bounds `low = n * s + beta` and `high = p * s + beta`, both free, this is the rule of LSQ,
`-e / (levels - 1)` and `e / (levels - 1)` inside and 1 for the bound that clips outside: the chain
rule gives `ds = n * dlow + p * dhigh` and `dbeta = dlow + dhigh`, which are those above.

Only the gradient scale `g = 1 / sqrt(N * p)` differs: an offset moves the bounds and not the codes,
so `p` is not computed from the bounds. It is that of signed codes, `levels // 2 - 1` (at least 1).
Learn the bounds as limits of `fake_quantize`, or learn a scale with a fixed zero point.

Source: Bhalgat et al., "LSQ+: Improving low-bit quantization through learnable offsets and better
initialization", CVPR Workshops 2020, arXiv:2004.09576; `g` is that of LSQ.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ._lsq import LearnedStep


@dataclasses.dataclass(frozen=True)
class LearnedStepAndOffset(LearnedStep):
    """`LearnedStep` for two independent limits: only the gradient scale differs."""

    def largest_code(self, low: jax.Array, high: jax.Array, levels: int) -> jax.Array:
        """Returns `p`, the largest signed code."""
        return jnp.full_like(low, levels // 2 - 1)


lsq_plus: LearnedStepAndOffset = LearnedStepAndOffset()
