"""One network of each library, quantized in three ways and by plain transforms: equal numbers; and
what both libraries refuse, in messages that say how to go on.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.modules.quantized_function import Mode

from ..linen import networks as of_linen
from ..linen.networks import WAYS
from ..nnx import networks as of_nnx

POLICIES, images = of_linen.POLICIES, of_linen.images

HELD = r"\w*General\w*/|(conv_general_dilated|dot_general|quant_stats|quant_scales)/"
"""Parts of paths that name what holds variables: what a contraction holds counts as its layer's."""


def named(tree, prefix=""):
    """Leaves by path, of nested dicts or of entries by key."""
    leaves = tree_leaves_with_path(tree)
    paths = [
        f"{prefix}/{keystr(path, simple=True, separator='/')}".strip("/") for path, _ in leaves
    ]
    return {re.sub(HELD, "", path): leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


class Linen:
    """A module of linen with its variables."""

    float_network = staticmethod(of_linen.float_network)

    def __init__(self, form, policy, mode, scales="calibrated"):
        self.mode, self.variables = mode, of_linen.variables()
        self.module = lambda mode: WAYS[form](policy, mode, scales)

    @staticmethod
    def params():
        return of_linen.variables()["params"]

    def __call__(self, x):
        if self.mode is not Mode.CALIBRATE:
            return self.module(self.mode).apply(self.variables, x)
        out, new = self.module(self.mode).apply(self.variables, x, mutable=["quant_stats"])
        self.variables = {**self.variables, **new}
        return out

    def compiled(self, x):
        return jax.jit(self.module(self.mode).apply)(self.variables, x)

    def gradients(self, x):
        """Those of the sum of squares, for the parameters."""
        module = self.module(self.mode)
        return jax.grad(lambda p: (module.apply({"params": p}, x) ** 2).sum())(self.params())

    def change(self, name, x, **options):
        """Calls `convert`, `fix_scales` or `learn_scales`."""
        mode = Mode.CONVERT if name == "convert" else Mode.SIMULATE
        change = getattr(jqx.linen, name)
        self.variables = change(self.module(mode), self.variables, x, **options)
        self.mode = mode

    def plan(self, x):
        return jqx.linen.make_plan(self.module(self.mode), self.variables, x)

    def leaves(self, *collections):
        """Leaves of `params`, `qparams`, `quant_stats` or `quant_scales`, by path."""
        trees = [named(self.variables.get(name, {})) for name in collections]
        return {path: leaf for tree in trees for path, leaf in tree.items()}


KINDS = {
    "params": nnx.Param,
    "qparams": jqx.nnx.QParam,
    "quant_stats": jqx.nnx.Stat,
    "quant_scales": jqx.nnx.Scale,
}
"""The variables of nnx that stand for collections of linen."""


class Nnx:
    """A model of nnx."""

    float_network = staticmethod(of_nnx.float_network)
    params = staticmethod(of_nnx.params)

    def __init__(self, form, policy, mode, scales="calibrated"):
        self.model = of_nnx.WAYS[form](policy, mode, scales)

    @property
    def mode(self):
        raise AttributeError("write only")

    @mode.setter
    def mode(self, mode):
        self.model.set_attributes(mode=mode)

    def __call__(self, x):
        return self.model(x)

    def compiled(self, x):
        return nnx.jit(lambda model, x: model(x))(self.model, x)

    def gradients(self, x):
        """Those of the sum of squares, for the parameters."""
        return nnx.to_pure_dict(nnx.grad(lambda model: (model(x) ** 2).sum())(self.model))

    def change(self, name, x, **options):
        """Calls `convert`, `fix_scales` or `learn_scales`."""
        getattr(jqx.nnx, name)(self.model, x, **options)

    def plan(self, x):
        return jqx.nnx.make_plan(self.model, x)

    def leaves(self, *collections):
        """Leaves of the variables that stand for collections of linen, by path."""
        kinds = nnx.Any(*(KINDS[name] for name in collections))
        flat = {}
        for path, variable in nnx.to_flat_state(nnx.state(self.model, kinds)):
            flat |= named(variable.get_value(), "/".join(map(str, path)))
        return flat


LIBRARIES = {"linen": Linen, "nnx": Nnx}


W8A8 = POLICIES["w8a8"]
EVERY = [
    pytest.param(library, form, name, marks=[pytest.mark.slow] if name != "w8a8" else [])
    for library in LIBRARIES
    for form in WAYS
    for name in POLICIES
]
each = pytest.mark.parametrize(("library", "form", "name"), EVERY)


def assert_equal(a, b):
    """Leaves at the same paths, of equal bits."""
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert (a[key] == b[key]).all(), key


@functools.cache
def transformed(library, name):
    """The float network, its parameters, and what the transforms find on two batches."""
    f, params = LIBRARIES[library].float_network, LIBRARIES[library].params()
    plan = jqx.make_plan(f, POLICIES[name])(params, images())
    observe = jqx.calibrate(f, plan)
    stats = jqx.merge_stats(plan, *(observe(params, images(i))[1] for i in (1, 2)))
    return f, params, plan, stats


def calibrated(library, form, name):
    """A model with the statistics of two batches, which are those of the transforms."""
    f, params, _, stats = transformed(library, name)
    model = LIBRARIES[library](form, POLICIES[name], Mode.CALIBRATE)
    for seed in (1, 2):
        assert (model(images(seed)) == f(params, images(seed))).all()
    assert_equal(model.leaves("quant_stats"), named(dict(stats)))
    return model


@each
def test_parameters_and_float_are_those_of_the_float_model(library, form, name):
    f, params, _, _ = transformed(library, name)
    model = LIBRARIES[library](form, POLICIES[name], Mode.FLOAT)
    assert_equal(model.leaves("params"), named(params))
    assert (model(images()) == f(params, images())).all()
    for mode in Mode if library == "linen" else ():
        variables = model.module(mode).init(jax.random.key(0), images())
        assert_equal(named(variables), named(model.variables))


@each
def test_simulate_with_statistics(library, form, name):
    f, params, plan, stats = transformed(library, name)
    expected = jqx.simulate(f, plan, jqx.affines(plan, stats))(params, images(3))
    model = calibrated(library, form, name)
    model.mode = Mode.SIMULATE
    assert (model(images(3)) == expected).all()
    if plan.static_specs():
        model.change("fix_scales", images(4))
        assert (model(images(3)) == expected).all()
        assert not model.leaves("quant_stats")


@each
def test_gradients_with_dynamic_scales(library, form, name):
    f, params, _, _ = transformed(library, name)
    model = LIBRARIES[library](form, POLICIES[name], Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(f, POLICIES[name], "dynamic")
    gradients = jax.grad(lambda p, x: (expected(p, x) ** 2).sum())(params, images())
    assert_equal(named(model.gradients(images())), named(gradients))


@each
def test_convert(library, form, name):
    f, params, plan, stats = transformed(library, name)
    affines, weights = jqx.affines(plan, stats), jqx.quantize_params(params, plan)
    expected = jqx.convert(f, plan, affines)(weights, images(3))
    model = calibrated(library, form, name)
    model.change("convert", images())
    assert_equal(model.leaves("params", "qparams"), named(weights))
    assert_equal(model.leaves("quant_scales"), named(affines))
    assert not model.leaves("quant_stats")
    model.mode = Mode.CONVERT
    assert (model(images(3)) == expected).all()
    # Two compilers' orders of the float sums behind the integer products: 2^-18 of the largest.
    compiled = model.compiled(images(3))
    assert jnp.abs(expected - compiled).max() <= 2.0**-18 * jnp.abs(expected).max()


@pytest.mark.parametrize("form", WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forgotten_calibration_is_an_error_that_names_the_sites(library, form):
    model = LIBRARIES[library](form, W8A8, Mode.SIMULATE)
    leaves = "params", "qparams", "quant_stats", "quant_scales"
    before = model.leaves(*leaves)
    site = "kernel:conv_general_dilated:lhs"
    if form == "whole":
        site = f"conv/{site}, hidden/kernel:dot_general:lhs"
        assert len(model.plan(images()).sites) == 3
    match = f"(?s)have no scale.*{{}}, without .*{re.escape(site)}.*fix.*dynamic"
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        model.mode = mode
        with pytest.raises(ValueError, match=match.format(mode)):
            model(images())
        for name in ("convert", "fix_scales", "learn_scales"):
            with pytest.raises(ValueError, match=match.format(f"a call of {name}")):
                model.change(name, images())
    assert_equal(model.leaves(*leaves), before)


@pytest.mark.parametrize("form", WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_dynamic_scales_are_those_of_the_values_of_the_call(library, form):
    f, params, plan, _ = transformed(library, "w8a8")
    model = LIBRARIES[library](form, W8A8, Mode.SIMULATE, "dynamic")
    expected = jqx.simulate(f, W8A8, "dynamic")(params, images())
    assert (model(images()) == expected).all()
    stats = jqx.calibrate(f, plan)(params, images())[1]
    affines = jqx.affines(plan, stats) if form == "whole" else "dynamic"
    expected = jqx.convert(f, plan, affines)(jqx.quantize_params(params, plan), images())
    model.change("convert", images())
    other = LIBRARIES[library](form, W8A8, Mode.SIMULATE)
    other.change("convert", images(), scales="dynamic")
    assert (model(images()) == expected).all() and (other(images()) == expected).all()
    assert model(2 * images()).shape == (4, 3)


@pytest.mark.parametrize("library", LIBRARIES)
def test_scales_are_checked(library):
    with pytest.raises(ValueError, match=r"(?s)`scales` is unknown.*'batch'.*fix"):
        LIBRARIES[library]("layers", W8A8, Mode.SIMULATE, "batch")(images())
    model = LIBRARIES[library]("whole", W8A8, Mode.SIMULATE)
    with pytest.raises(ValueError, match=r"(?s)fix_scales: `scales` is unknown"):
        model.change("fix_scales", images(), scales="static")


DYNAMIC = POLICIES["w8a8_dynamic"]
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


def in_an_unknown_mode():
    layer = linear()
    layer.set_attributes(mode="float")
    return layer(ONES)


NO_MATCH = "rule 0 of the policy matches no contraction|'conv/kernel'"
NO_MODE = "Linear: `mode` is not a Mode"
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
        NO_MATCH,
    ),
    "nnx, a policy": (lambda: linear(policy="w8a8"), TypeError, "Linear: `policy` is not a Policy"),
    "nnx, a mode": (lambda: linear(mode="simulate"), TypeError, f"{NO_MODE}|SIMULATE"),
    "nnx, a mode later": (in_an_unknown_mode, TypeError, f"{NO_MODE}|'float'"),
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
        NO_MATCH,
    ),
    "nnx, a rule in convert": (
        lambda: jqx.nnx.convert(jqx.nnx.quantize(net(), UNMATCHED), images()),
        ValueError,
        NO_MATCH,
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


@pytest.mark.parametrize("form", WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_statistics_of_fixed_scales_have_no_use(library, form):
    model = LIBRARIES[library](form, W8A8, Mode.SIMULATE)
    model.change("fix_scales", images(), scales="dynamic")
    model.mode = Mode.CALIBRATE
    with pytest.raises(ValueError, match=r"(?s)statistics have no use.*lhs.*calibrate before"):
        model(images())


@pytest.mark.parametrize("form", ["layers", "whole"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_that_is_converted_already_keeps_its_state(library, form):
    model = LIBRARIES[library](form, DYNAMIC, Mode.SIMULATE)
    model.change("convert", images())
    model.mode = Mode.CONVERT
    before = model(images())
    with pytest.raises(ValueError, match=r"(?s)convert: no part.*not.* converted"):
        model.change("convert", images())
    assert (model(images()) == before).all()


@pytest.mark.parametrize("function", ["convert", "fix_scales", "learn_scales"])
@pytest.mark.parametrize("form", WAYS)
def test_a_module_in_another_mode_is_refused(form, function):
    module = WAYS[form](W8A8, Mode.FLOAT)
    match = rf"(?s)jqx\.linen\.{function}: no part of the module is in Mode\..*fix.*Mode\."
    with pytest.raises(ValueError, match=match):
        getattr(jqx.linen, function)(module, of_linen.variables(), images())


@pytest.mark.parametrize("form", WAYS)
def test_statistics_need_a_mutable_collection(form):
    module = WAYS[form](W8A8, Mode.CALIBRATE)
    match = r"(?s)CALIBRATE.* writes the collection 'quant_stats'.*mutable=\['quant_stats'\]"
    with pytest.raises(ValueError, match=match):
        module.apply(of_linen.variables(), images())


@pytest.mark.parametrize("form", ["layer", "whole", "inside", "part"])
def test_weights_that_were_not_converted_are_named(form):
    """A layer, a whole module, one inside another of linen, and a part of one of nnx."""
    x, options = jnp.ones((2, 4)), {"policy": DYNAMIC, "mode": Mode.CONVERT}
    module, path = jqx.linen.Dense(3, **options), "kernel"
    model = run = jqx.nnx.Linear(4, 3, rngs=nnx.Rngs(0), **options)
    if form != "layer":
        module = jqx.linen.quantize(nn.Sequential([nn.Dense(3)]), **options)
        path = "layers_0/kernel"
        model = run = jqx.nnx.quantize(
            nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0))), **options
        )
    if form == "inside":
        module, path = nn.Sequential([module]), "layers_0/layers_0/kernel"
    if form == "part":
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
