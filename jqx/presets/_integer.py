"""Integer presets: weights per channel or in blocks; activations per tensor if their scales are
static, per token if they are dynamic.
"""

import jax.numpy as jnp

from ..calibrators import Mse
from ..calibrators._shared import per_channel, per_tensor, per_token
from ..policy import Policy
from ..tensor import QSpec
from ._preset import NONE, Exclude, Fields, Tables, blocks, policy, preset

_INT8 = QSpec(jnp.int8, per_channel())
_INT4 = QSpec(jnp.int4, per_channel())
_SIGNED = Mse(2, 0.8, signed=True)
_PER_TOKEN = QSpec(jnp.int8, per_token(), dynamic=True)


@preset
def w8a8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int8 weights and int8 activations with static, calibrated scales.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.presets.w8a8(weight={"qtype": jnp.int4}).rules[0].weight.qtype
      dtype(int4)
    """
    return policy(
        "w8a8", path, exclude, _INT8, QSpec(jnp.int8, per_tensor()), tables, weight, activation
    )


@preset
def w8a8_dynamic(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int8 weights and int8 activations. The activations have dynamic scales
    per token, computed from the current values.

    Example:
      >>> import jqx
      >>> jqx.presets.w8a8_dynamic().rules[0].activation.dynamic
      True
    """
    return policy("w8a8_dynamic", path, exclude, _INT8, _PER_TOKEN, tables, weight, activation)


@preset
def w8a16(
    path: str = ".*", *, exclude: Exclude = (), tables: Tables = None, weight: Fields = NONE
) -> Policy:
    """Returns a policy with int8 weights only; activations stay in the model's float dtype.

    Example:
      >>> import jqx
      >>> jqx.presets.w8a16().rules[0].activation is None
      True
    """
    return policy("w8a16", path, exclude, _INT8, None, tables, weight)


@preset
def w4a16(
    path: str = ".*",
    *,
    block: int = 32,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
) -> Policy:
    """Returns a policy with int4 weights in blocks; activations stay in the model's float dtype.

    GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) use this format, with blocks of 128. Each
    block takes the best of six scales, some of them negative (`jqx.calibrators.Mse`), which costs
    nothing at run time. To use zero points as well: `weight={"qtype": jnp.uint4,
    "symmetric": False, "calibrator": jqx.calibrators.minmax}`.

    Example:
      >>> import jqx
      >>> str(jqx.presets.w4a16(block=128).rules[0].weight)
      'int4 per_group(128, tail=True) mse(2, 0.8, signed)'
    """
    return policy(
        "w4a16",
        path,
        exclude,
        QSpec(jnp.int4, blocks("w4a16", block, 32, weight), calibrator=_SIGNED),
        None,
        tables,
        weight,
    )


@preset
def w4a8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int4 weights and int8 activations. The activations have dynamic scales
    per token, computed from the current values.

    A channel has one scale, so that one exact integer sum covers all products, as in the
    per-channel form of QServe (arXiv:2405.04532). Blocks are more accurate but need a sum each:
    `weight={"granularity": jqx.per_group(32, tail=True)}`.

    Example:
      >>> import jqx
      >>> str(jqx.presets.w4a8().rules[0].activation)
      'int8 per_token dynamic'
    """
    return policy("w4a8", path, exclude, _INT4, _PER_TOKEN, tables, weight, activation)


@preset
def w4a4(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int4 weights and int4 activations. The activations have dynamic scales
    per token, computed from the current values.

    For training with `jqx.simulate`, or for models whose outliers were rotated away (QuaRot,
    arXiv:2404.00456). Other models lose much accuracy.

    Example:
      >>> import jqx
      >>> str(jqx.presets.w4a4().rules[0].activation)
      'int4 per_token dynamic'
    """
    return policy(
        "w4a4",
        path,
        exclude,
        _INT4,
        QSpec(jnp.int4, per_token(), dynamic=True),
        tables,
        weight,
        activation,
    )
