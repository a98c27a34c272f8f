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
    """Returns a policy with float8_e4m3fn weights and activations with static, calibrated scales.

    An activation has one scale, as in Micikevicius et al. (arXiv:2209.05433): in a float format an
    outlier does not cost the other values accuracy, so a scale for each token gains little. The
    scale is static, so that no maximum must be computed before a cast. Values beyond the calibrated
    range saturate. Per token: `activation={"granularity": jqx.per_token(), "dynamic": True}`.

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
    """Returns a policy with MXFP8 weights and activations: float8_e4m3fn in blocks of 32 along the
    axes that a contraction sums over. The scale of a block is a power of two.

    Scales of activations are dynamic, computed from the current values, as the format intends. The
    powers of two are rounded up (`jqx.calibrators.ceil`), so that nothing is clipped. If 32 does
    not divide an axis, the last block is smaller. In a kernel of 3x3 taps all blocks are smaller.

    Example:
      >>> import jqx
      >>> str(jqx.presets.mxfp8().rules[0].activation)
      'mxfp8_e4m3 per_group(32, tail=True) ceil dynamic'
    """
    blocks = per_group(mxfp8_e4m3.size, tail=True)
    weights = QSpec(mxfp8_e4m3, blocks, calibrator=ceil)
    activations = QSpec(mxfp8_e4m3, blocks, calibrator=ceil, dynamic=True)
    return policy("mxfp8", path, exclude, weights, activations, tables, weight, activation)
