"""What quantized modules of both libraries refuse, in messages that say how to go on."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.modules.quantized_function import Mode

from ..linen import networks as of_linen
from ..nnx import networks as of_nnx
from .libraries import LIBRARIES, POLICIES, images

W8A8, DYNAMIC = POLICIES["w8a8"], POLICIES["w8a8_dynamic"]
UINT8 = jqx.presets.w8a8(
    activation={"symmetric": False, "qtype": "uint8"}, weight={"gradient": jqx.gradients.lsq}
)
UNMATCHED = jqx.Policy([jqx.Rule("heads/.*", weight="int8"), *DYNAMIC.rules])
ONES = jnp.ones((1, 4))


def linear(policy=DYNAMIC, **options):
    return jqx.nnx.Linear(4, 2, policy=policy, rngs=nnx.Rngs(0), **options)


def net():
    return of_nnx.Net(nnx.Rngs(0))


class Named(nnx.Module):
    def __init__(self):
        self.policy = "mine"


class NamedModule(nn.Module):
    policy: str = "mine"


def renamed_weight():
    dot = jqx.nnx.DotGeneral(policy=DYNAMIC, weight_name="weight")
    return nnx.Linear(4, 2, dot_general=dot, rngs=nnx.Rngs(0))


def in_an_unknown_mode():
    layer = linear()
    layer.set_attributes(mode="float")
    return layer(ONES)


MISTAKES = {
    "linen, a policy": (lambda: jqx.linen.Dense(3, policy="w8a8"), TypeError, "`policy`"),
    "linen, a mode": (
        lambda: jqx.linen.Dense(3, policy=W8A8, mode="convert"),
        TypeError,
        "`mode`|SIMULATE",
    ),
    "linen, no module": (
        lambda: jqx.linen.quantize(lambda x: x, W8A8),
        TypeError,
        "linen.quantize: `module`",
    ),
    "linen, quantized": (
        lambda: jqx.linen.quantize(jqx.linen.quantize(of_linen.Net(), W8A8), W8A8),
        ValueError,
        "QuantizedNet, is quantized already|clone",
    ),
    "linen, bound": (
        lambda: jqx.linen.quantize(of_linen.Net().bind(of_linen.variables()), W8A8),
        ValueError,
        "class Net, is bound to variables|parent=None",
    ),
    "linen, a plan": (
        lambda: jqx.linen.make_plan(of_linen.Net(), of_linen.variables(), images()),
        TypeError,
        "linen.make_plan: `module`",
    ),
    "linen, a field": (
        lambda: jqx.linen.quantize(NamedModule(), W8A8),
        ValueError,
        "names that quantized modules use: policy|rename",
    ),
    "linen, a rule": (
        lambda: jqx.linen.quantize(of_linen.Net(), UNMATCHED).apply(of_linen.variables(), images()),
        ValueError,
        "rule 0 of the policy matches no contraction|'conv/kernel'",
    ),
    "nnx, a policy": (lambda: linear(policy="w8a8"), TypeError, "Linear: `policy` is not a Policy"),
    "nnx, a mode": (
        lambda: linear(mode="simulate"),
        TypeError,
        "Linear: `mode` is not a Mode|SIMULATE",
    ),
    "nnx, a mode later": (in_an_unknown_mode, TypeError, "Linear: `mode` is not a Mode|'float'"),
    "nnx, no module": (
        lambda: jqx.nnx.quantize(lambda x: x, DYNAMIC),
        TypeError,
        "nnx.quantize: `model` is not a Module",
    ),
    "nnx, quantized": (
        lambda: jqx.nnx.quantize(of_nnx.of_layers(DYNAMIC, Mode.FLOAT), DYNAMIC),
        ValueError,
        "quantize: this Net is quantized already: Conv, Linear",
    ),
    "nnx, a plan": (
        lambda: jqx.nnx.make_plan(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), ONES),
        TypeError,
        "make_plan: `model` is not a Quantized",
    ),
    "nnx, an attribute": (
        lambda: jqx.nnx.quantize(Named(), DYNAMIC),
        ValueError,
        "attributes that quantized models use: policy|rename",
    ),
    "nnx, a rule": (
        lambda: jqx.nnx.quantize(net(), UNMATCHED)(images()),
        ValueError,
        "rule 0 of the policy matches no contraction|'conv/kernel'",
    ),
    "nnx, a rule in convert": (
        lambda: jqx.nnx.convert(jqx.nnx.quantize(net(), UNMATCHED), images()),
        ValueError,
        "rule 0 of the policy matches no contraction|'conv/kernel'",
    ),
    "nnx, a weight": (
        lambda: jqx.nnx.convert(renamed_weight(), ONES),
        ValueError,
        "convert: an injected DotGeneral|weight_name=",
    ),
    "nnx, no adapters": (
        lambda: jqx.nnx.merge_lora(linear()),
        ValueError,
        "merge_lora: there are no adapters",
    ),
    **{
        f"nnx, {name} of no {kind}": (
            lambda name=name, make=make: getattr(jqx.nnx, name)(make(), images()),
            error,
            f"jqx.nnx.{name}: {words}",
        )
        for name in ("convert", "fix_scales", "learn_scales")
        for kind, make, error, words in (
            ("quantized part", net, ValueError, "no part|Net with 0 quantized parts"),
            ("module", lambda: lambda x: x, TypeError, "`model` is not a Module"),
        )
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_says_how_to_go_on(mistake):
    call, error, words = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("jqx.") and "fix: " in text
    assert all(word in text for word in words.split("|")), text


@pytest.mark.parametrize("library", LIBRARIES)
def test_zero_points_are_not_learned(library):
    model = LIBRARIES[library]("whole", UINT8, Mode.SIMULATE)
    match = r"(?s)learn_scales: an integer zero point.*has no gradient.*fix_scales"
    with pytest.raises(ValueError, match=match):
        model.change("learn_scales", images(), scales="dynamic")
    assert not any("weight" in path for path in model.leaves("params"))


@pytest.mark.parametrize("way", of_linen.WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_statistics_of_fixed_scales_have_no_use(library, way):
    model = LIBRARIES[library](way, W8A8, Mode.SIMULATE)
    model.change("fix_scales", images(), scales="dynamic")
    model.mode = Mode.CALIBRATE
    with pytest.raises(ValueError, match=r"(?s)statistics have no use.*lhs.*calibrate before"):
        model(images())


@pytest.mark.parametrize("way", ["layers", "whole"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_that_is_converted_already_keeps_its_state(library, way):
    model = LIBRARIES[library](way, DYNAMIC, Mode.SIMULATE)
    model.change("convert", images())
    model.mode = Mode.CONVERT
    before = model(images())
    with pytest.raises(ValueError, match=r"(?s)convert: no part.*not.* converted"):
        model.change("convert", images())
    assert (model(images()) == before).all()


@pytest.mark.parametrize("function", ["convert", "fix_scales", "learn_scales"])
@pytest.mark.parametrize("way", of_linen.WAYS)
def test_a_module_in_another_mode_is_refused(way, function):
    module = of_linen.WAYS[way](W8A8, Mode.FLOAT)
    match = rf"(?s)jqx\.linen\.{function}: no part of the module is in Mode\..*fix.*Mode\."
    with pytest.raises(ValueError, match=match):
        getattr(jqx.linen, function)(module, of_linen.variables(), images())


@pytest.mark.parametrize("way", of_linen.WAYS)
def test_statistics_need_a_mutable_collection(way):
    module = of_linen.WAYS[way](W8A8, Mode.CALIBRATE)
    match = r"(?s)CALIBRATE.* writes the collection 'quant_stats'.*mutable=\['quant_stats'\]"
    with pytest.raises(ValueError, match=match):
        module.apply(of_linen.variables(), images())


@pytest.mark.parametrize("way", ["layer", "whole", "inside", "part"])
def test_weights_that_were_not_converted_are_named(way):
    """A layer, a whole module, one inside another of linen, and a part of one of nnx."""
    x, options = jnp.ones((2, 4)), {"policy": DYNAMIC, "mode": Mode.CONVERT}
    module, path = jqx.linen.Dense(3, **options), "kernel"
    model = run = jqx.nnx.Linear(4, 3, rngs=nnx.Rngs(0), **options)
    if way != "layer":
        module = jqx.linen.quantize(nn.Sequential([nn.Dense(3)]), **options)
        path = "layers_0/kernel"
        model = run = jqx.nnx.quantize(
            nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0))), **options
        )
    if way == "inside":
        module, path = nn.Sequential([module]), "layers_0/layers_0/kernel"
    if way == "part":
        run = model.layers[0]
    variables = module.init(jax.random.key(0), x)
    match = r"(?s)not converted.*floats for {}, .*fix: .*jqx\.{}\.convert"
    with pytest.raises(ValueError, match=match.format(path, "linen")):
        module.apply(variables, x)
    with pytest.raises(ValueError, match=match.format(r"\S*kernel", "nnx")):
        run(x)
    assert module.apply(jqx.linen.convert(module, variables, x), x).shape == (2, 3)
    jqx.nnx.convert(model, x)
    assert run(x).shape == (2, 3)


def test_a_layer_that_is_called_twice_is_converted_once():
    class Twice(nn.Module):
        def setup(self):
            options = {"policy": W8A8, "mode": Mode.CONVERT, "scales": "dynamic"}
            self.layer = jqx.linen.Dense(4, **options)

        def __call__(self, x):
            return self.layer(self.layer(x))

    variables = Twice().init(jax.random.key(0), ONES)
    converted = jqx.linen.convert(Twice(), variables, ONES)
    assert isinstance(converted["qparams"]["layer"]["kernel"], jqx.QTensor)
    assert Twice().apply(converted, ONES).shape == (1, 4)
