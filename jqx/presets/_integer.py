"""Integer presets: weights per channel, activations per tensor (static) or token (dynamic)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..calibrators import per_channel, per_tensor, per_token
from ..policy import Policy, Rule
from ..tensor import QSpec

_WEIGHT = QSpec(jnp.int8, per_channel())
_NONE: Mapping[str, Any] = {}


def w8a8(
    path: str = ".*", *, weight: Mapping[str, Any] = _NONE, activation: Mapping[str, Any] = _NONE
) -> Policy:
    """Returns a policy of int8 weights and int8 activations with static, calibrated scales.

    Args:
      path: regular expression of the paths it covers.
      weight: fields of the weights' `QSpec` to replace.
      activation: fields of the activations' `QSpec` to replace.

    Raises:
      TypeError: a field that `QSpec` has not.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.presets.w8a8(weight={"qtype": jnp.int4}).rules[0].weight.qtype
      dtype(int4)
    """
    return _policy(path, _WEIGHT, QSpec(jnp.int8, per_tensor()), weight, activation)


def w8a8_dynamic(
    path: str = ".*", *, weight: Mapping[str, Any] = _NONE, activation: Mapping[str, Any] = _NONE
) -> Policy:
    """Returns a policy of int8 weights and int8 activations, scaled per token from the values at
    hand.

    Args:
      path: regular expression of the paths it covers.
      weight: fields of the weights' `QSpec` to replace.
      activation: fields of the activations' `QSpec` to replace.

    Raises:
      TypeError: a field that `QSpec` has not.

    Example:
      >>> import jqx
      >>> jqx.presets.w8a8_dynamic().rules[0].activation.dynamic
      True
    """
    dynamic = QSpec(jnp.int8, per_token(), dynamic=True)
    return _policy(path, _WEIGHT, dynamic, weight, activation)


def w8a16(path: str = ".*", *, weight: Mapping[str, Any] = _NONE) -> Policy:
    """Returns a policy of int8 weights alone; activations stay in the model's float dtype.

    Args:
      path: regular expression of the paths it covers.
      weight: fields of the weights' `QSpec` to replace.

    Raises:
      TypeError: a field that `QSpec` has not.

    Example:
      >>> import jqx
      >>> jqx.presets.w8a16().rules[0].activation is None
      True
    """
    return Policy([Rule(path, weight=dataclasses.replace(_WEIGHT, **weight))])


def _policy(
    path: str,
    weight: QSpec,
    activation: QSpec,
    weight_fields: Mapping[str, Any],
    activation_fields: Mapping[str, Any],
) -> Policy:
    rule = Rule(
        path,
        weight=dataclasses.replace(weight, **weight_fields),
        activation=dataclasses.replace(activation, **activation_fields),
    )
    return Policy([rule])
