"""Scales of several methods of a module."""

import jax
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

from .networks import POLICIES, images

W8A8 = POLICIES["w8a8"]


def test_scales_of_another_method_are_not_enough():
    class Two(nn.Module):
        def setup(self):
            self.first, self.second = nn.Dense(50), nn.Dense(3)

        def __call__(self, x):
            return self.first(x)

        def other(self, x):
            return self.second(self.first(x))

    x = images().reshape(4, -1)
    observe = jqx.linen.quantize(Two(), W8A8, mode=Mode.CALIBRATE)
    known = Two().init(jax.random.key(0), x, method="other")
    known |= observe.apply(known, x, mutable=["quant_stats"])[1]
    for scales in ("calibrated", "dynamic"):
        module = observe.clone(mode=Mode.SIMULATE, scales=scales)
        with pytest.raises(ValueError, match=r"(?s)have no scale.*: second/kernel:dot_general:lhs"):
            module.apply(known, x, method="other")


def test_scales_of_methods_are_fixed_one_after_another():
    class Two(nn.Module):
        def setup(self):
            self.first, self.second = nn.Dense(50), nn.Dense(3)

        def __call__(self, x):
            return self.second(self.first(x))

        def half(self, x):
            return self.first(x)

    x = images().reshape(4, -1)
    observe = jqx.linen.quantize(Two(), W8A8, mode=Mode.CALIBRATE)
    known = Two().init(jax.random.key(0), x)
    known |= observe.apply(known, x, mutable=["quant_stats"])[1]
    module, integers = observe.clone(mode=Mode.SIMULATE), observe.clone(mode=Mode.CONVERT)
    half = jqx.linen.fix_scales(module, known, x, method="half")
    assert set(half["quant_stats"]) == {"second"} and set(half["quant_scales"]) == {"first"}
    assert (module.apply(half, x) == module.apply(known, x)).all()
    small = jqx.linen.convert(integers, known, x)
    again = jqx.linen.convert(integers, half, x)
    assert jax.tree.structure(again) == jax.tree.structure(small)
    assert (integers.apply(again, x) == integers.apply(small, x)).all()
    part = jqx.linen.convert(integers, known, x, method="half")
    assert set(part["quant_stats"]) == {"second"}
    assert (integers.apply(part, x, method="half") == integers.apply(small, x, method="half")).all()
    with pytest.raises(ValueError, match=r"(?s)not converted.*floats for second/kernel,"):
        integers.apply(part, x)
