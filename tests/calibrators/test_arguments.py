"""What a value of a spec cannot be made with is an error in four parts, whatever it is."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import calibrators, numerics
from jqx._src.statistics.calibrators import Fixed, Rms
from jqx._src.statistics.granularity import PerAxis, PerBlock, PerGroup, PerKeptAxis, PerRun

HOSTILE = [
    *(None, True, -1, 0, 3.5, math.nan, math.inf, -math.inf, 1e300, 10**400, -(10**400), 2**31),
    *("x", b"x", (), [], {}, (1,), ("a",), ((0, -3),), ((0, 2.5),), ((0,),), {0: 1}, object(), int),
    *(jnp.int8(3), np.float32(2), 1j, jnp.int8, numerics.int3, set(), jqx.RoundMode.UP),
]
MADE = {
    calibrators.Delayed: {},
    Fixed: {"low": -1.0, "high": 1.0},
    calibrators.Hqq: {},
    calibrators.Mse: {},
    calibrators.Percentile: {},
    Rms: {"multiplier": 1.0},
    PerAxis: {},
    PerBlock: {"sizes": ((0, 2),)},
    PerGroup: {"size": 2},
    PerKeptAxis: {"name": "per_channel"},
    PerRun: {"axes": (0,), "size": 2},
    numerics.Block: {"element": jnp.int8, "size": 4},
    numerics.Codebook: {"entries": (-1.0, 1.0)},
    numerics.Integer: {},
    numerics.Minifloat: {"exponent_bits": 2, "mantissa_bits": 1},
    numerics.Numerics: {},
    jqx.QSpec: {"qtype": jnp.int8},
}


@pytest.mark.parametrize("cls", MADE, ids=lambda cls: cls.__name__)
def test_every_field_takes_what_it_is_for_and_refuses_the_rest(cls):
    for field in dataclasses.fields(cls):
        for value in HOSTILE:
            try:
                made = cls(**{**MADE[cls], field.name: value})
            except (TypeError, ValueError) as error:
                assert "fix: " in str(error), (field.name, value, error)
            else:
                hash(made), str(made)


@pytest.mark.parametrize("margin", [-127, 128, 2000, 10**400])
def test_a_margin_is_a_power_of_two_of_float32(margin):
    with pytest.raises(ValueError, match="`margin` is out of range"):
        calibrators.Delayed(2, margin)


def test_the_largest_margins_are_taken():
    for margin in (-126, 127):
        spec = jqx.QSpec(jnp.int8, calibrator=calibrators.Delayed(2, margin))
        jax.eval_shape(lambda x, spec=spec: jqx.QTensor.quantize(x, spec), jnp.ones(4))


BLOCKS = [
    (("a", "b", "c"),),
    ((10, 4, 3.0),),
    ((True, 1, 1),),
    (10, 4, 3),
    "abc",
    [(10, 4, 3)],
    None,
    ((10, 4),),
    ((10, 4, 0),),
    ({1, 2, 3},),
]


@pytest.mark.parametrize("blocks", BLOCKS, ids=repr)
def test_blocks_of_other_types_are_refused(blocks):
    with pytest.raises(ValueError, match="`blocks` does not describe block sizes") as info:
        jqx.QTensor(jnp.zeros(10, jnp.int8), jnp.ones(4), qtype=jnp.int8, blocks=blocks)
    assert "fix: " in str(info.value)
