"""Presets of 8-bit floats, on weights and activations."""

import jax.numpy as jnp

from ..calibrators import ceil
from ..calibrators._shared import per_channel, per_group, per_tensor
from ..numerics import mxfp8_e4m3
from ..policy import Policy
from ..tensor import QSpec
from ._preset import NONE, Exclude, Fields, Tables, policy, preset


@preset
def fp8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy of float8_e4m3fn weights and activations with static, calibrated scales.

    One scale an activation, as in Micikevicius et al. (arXiv:2209.05433): an outlier takes no
    accuracy from other values of a float, so that a scale for each token gains little. And static,
    so that nothing is searched for a maximum before it is cast; what exceeds the calibrated range
    saturates. Per token: `activation={"granularity": jqx.per_token(), "dynamic": True}`.

    Example:
      >>> import jqx
      >>> str(jqx.presets.fp8().rules[0].weight)
      'float8_e4m3fn per_channel'
    """
    form = jnp.float8_e4m3fn
    weights, activations = QSpec(form, per_channel()), QSpec(form, per_tensor())
    return policy("fp8", path, exclude, weights, activations, tables, weight, activation)


@preset
def mxfp8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy of MXFP8 weights and activations: float8_e4m3fn in blocks of 32 along the
    axes that a contraction sums over, each block with a power of two for a scale.

    Scales of activations are found from the values at hand, as the format means them to be. The
    powers of two are rounded up (`jqx.calibrators.ceil`), so that nothing is clipped. Where
    32 does not divide an axis, the last block is smaller; all are in a kernel of 3x3 taps.

    Example:
      >>> import jqx
      >>> str(jqx.presets.mxfp8().rules[0].activation)
      'mxfp8_e4m3 per_group(32, tail=True) ceil dynamic'
    """
    blocks = per_group(mxfp8_e4m3.size, tail=True)
    weights = QSpec(mxfp8_e4m3, blocks, calibrator=ceil)
    activations = QSpec(mxfp8_e4m3, blocks, calibrator=ceil, dynamic=True)
    return policy("mxfp8", path, exclude, weights, activations, tables, weight, activation)
