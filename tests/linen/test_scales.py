"""A static activation without a scale is an error, unless it is asked of the values at hand."""

import re

import jax
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

from .networks import POLICIES, WAYS, float_network, images, variables

W8A8 = POLICIES["w8a8"]
SITES = {
    "whole": "conv/kernel:conv_general_dilated:lhs, hidden/kernel:dot_general:lhs",
    "layers": "conv/kernel:conv_general_dilated:lhs",
    "injected": "conv/ConvGeneralDilated_0/kernel:conv_general_dilated:lhs",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_forgotten_calibration_is_an_error_that_names_the_sites(way):
    module, integers = (WAYS[way](W8A8, mode) for mode in (Mode.SIMULATE, Mode.CONVERT))
    calls = {
        "Mode.SIMULATE": lambda: module.apply(variables(), images()),
        "Mode.CONVERT": lambda: integers.apply(variables(), images()),
        "convert": lambda: jqx.linen.convert(integers, variables(), images()),
        "fix_scales": lambda: jqx.linen.fix_scales(module, variables(), images()),
        "learn_scales": lambda: jqx.linen.learn_scales(module, variables(), images()),
    }
    for name, call in calls.items():
        where = name if name.startswith("Mode") else f"a call of {name}"
        match = f"(?s)have no scale.*{where}, without .*{re.escape(SITES[way])}.*fix.*dynamic"
        with pytest.raises(ValueError, match=match):
            call()
    module.init(jax.random.key(0), images())
    if way == "whole":
        assert len(jqx.linen.make_plan(module, variables(), images()).sites) == 3


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


@pytest.mark.parametrize("way", WAYS)
def test_dynamic_scales_are_those_of_the_values_of_the_call(way):
    params = variables()["params"]
    module = WAYS[way](W8A8, Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(float_network, W8A8, "dynamic")(params, images())
    assert (module.apply(variables(), images()) == expected).all()
    for options in ({"scales": "dynamic"}, {}):
        given = "calibrated" if options else "dynamic"
        integers = WAYS[way](W8A8, Mode.CONVERT, given)
        small = jqx.linen.convert(integers, variables(), images(), **options)
        plan = jqx.make_plan(float_network, W8A8)(params, images())
        weights = jqx.quantize_params(params, plan)
        stats = jqx.calibrate(float_network, plan)(params, images())[1]
        affines = jqx.affines(plan, stats) if way == "whole" else "dynamic"
        expected = jqx.convert(float_network, plan, affines)(weights, images())
        assert (integers.apply(small, images()) == expected).all()


def test_scales_are_checked():
    with pytest.raises(ValueError, match=r"(?s)Dense: `scales` is unknown.*'batch'.*fix"):
        jqx.linen.Dense(3, policy=W8A8, scales="batch")
    module = WAYS["whole"](W8A8, Mode.SIMULATE)
    with pytest.raises(ValueError, match=r"(?s)fix_scales: `scales` is unknown"):
        jqx.linen.fix_scales(module, variables(), images(), scales="static")
