"""Every preset, with the specs of weights and activations that it is to give."""

import dataclasses

import jax.numpy as jnp
import pytest

import jqx
from jqx import calibrators, numerics, presets

INT8 = jqx.QSpec(jnp.int8, jqx.per_channel())
INT4 = jqx.QSpec(jnp.int4, jqx.per_channel())
PER_TOKEN = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
E4M3 = jnp.float8_e4m3fn
IN_32 = jqx.per_group(32, tail=True)
MXFP8 = jqx.QSpec(numerics.mxfp8_e4m3, IN_32, calibrator=calibrators.ceil)
SIGNED = calibrators.Mse(2, 0.8, signed=True)

PRESETS = {
    presets.w8a8: (INT8, jqx.QSpec(jnp.int8, jqx.per_tensor())),
    presets.w8a8_dynamic: (INT8, PER_TOKEN),
    presets.w8a16: (INT8, None),
    presets.w4a16: (jqx.QSpec(jnp.int4, IN_32, calibrator=SIGNED), None),
    presets.w4a8: (INT4, PER_TOKEN),
    presets.w4a4: (INT4, jqx.QSpec(jnp.int4, jqx.per_token(), dynamic=True)),
    presets.fp8: (jqx.QSpec(E4M3, jqx.per_channel()), jqx.QSpec(E4M3, jqx.per_tensor())),
    presets.mxfp8: (MXFP8, dataclasses.replace(MXFP8, dynamic=True)),
    presets.nf4: (jqx.QSpec(numerics.nf4, jqx.per_group(64, tail=True)), None),
}
BLOCKS = {presets.w4a16: 32, presets.nf4: 64}
"""Those with an argument `block`, and its default."""

STATIC = [preset for preset, (_, spec) in PRESETS.items() if spec and not spec.dynamic]
ACTIVE = [preset for preset, (_, spec) in PRESETS.items() if spec]
"""Those that quantize activations."""


def each(presets):
    """Parametrizes a test by presets."""
    return pytest.mark.parametrize("preset", presets, ids=lambda preset: preset.__name__)


every_preset = each(list(PRESETS))
