"""Plans as JSON and back: equal, for every value of jqx and for those of the user."""

import copy
import dataclasses
import inspect
import json
import math
import re
import sys
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx
from jqx import calibrators, gradients, numerics
from jqx._src.numerics.lookup import DTYPES, PowerOfTwo
from jqx._src.statistics.calibrators import AbsMax
from jqx._src.tensor.serialize import CLASSES, record_from_json, to_json
from jqx._src.transforms.plan import Weight
from jqx.extend import Groups
from jqx.interop import from_qwix

from ..models.forms import FORMS, POLICIES, function, rows, weights
from ..models.transforms import jitted, jitted_params, mlp, mlp_params, normal, plan_of

X = normal(3, 7, 16)
PRESETS = [f for _, f in inspect.getmembers(jqx.presets, inspect.isfunction)]
POLICY = jqx.Policy(
    [
        jqx.Rule("v"),
        jqx.Rule(
            weight=jqx.QSpec(numerics.nf4, jqx.per_group(4)),
            activation=jqx.QSpec(jnp.uint8, symmetric=False, numerics=numerics.onnx),
            output=jqx.QSpec(jnp.int8, dynamic=True, round_mode=jqx.RoundMode.UP),
        ),
    ]
)


def planned():
    return plan_of(mlp, POLICY, mlp_params(), X)


def written(plan, **named):
    """The plan as JSON without extensions, read again."""
    return json.loads(json.dumps(plan.to_dict(**named), allow_nan=False))


def assert_returns(plan, **named):
    again = jqx.Plan.from_dict(written(plan, **named), **named)
    assert again == plan and hash(again) == hash(plan)
    assert (str(again), again.fingerprint) == (str(plan), plan.fingerprint)
    assert again.to_dict(**named) == plan.to_dict(**named)
    return again


def plan_with(spec):
    """A plan of one weight."""
    return jqx.Plan((), (), (Weight("w", spec, "w:weight", 1),), (0, 2), ("parameter w",))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda f: f.__name__)
def test_plans_of_every_preset_return(preset):
    assert_returns(plan_of(jitted, preset(), jitted_params(), X))


@pytest.mark.parametrize("name", FORMS)
def test_plans_of_every_control_flow_form_return(name):
    policy = POLICIES["weights and activations"]
    assert_returns(plan_of(function(name), policy, weights(), rows()))


def test_a_plan_of_symbolic_sizes_returns():
    x = jax.ShapeDtypeStruct((export.symbolic_shape("n")[0], 16), jnp.float32)
    again = assert_returns(plan_of(mlp, POLICY, mlp_params(), x))
    assert again.sites[0].shapes[0] == ("n", 16) and again == planned()


def test_a_plan_that_returned_converts_to_the_same_bits():
    plan = planned()
    again, params = assert_returns(plan), mlp_params()
    affines = jqx.affines(plan, jqx.calibrate(mlp, plan)(params, X)[1])
    results = [
        jqx.convert(mlp, p, affines)(jqx.quantize_params(params, p), X) for p in (plan, again)
    ]
    np.testing.assert_array_equal(*results)


def public(package, matches):
    return [
        value for value in vars(package).values() if matches(value) and not isinstance(value, type)
    ]


QTYPES = [
    *(jnp.dtype(name) for name in DTYPES if name != "float8_e8m0fnu"),
    *public(numerics, lambda value: isinstance(value, jqx.extend.QType)),
    numerics.Integer(7, narrow=True),
    numerics.Minifloat(3, 3, numerics.Specials.NAN, bias=2, saturate=False),
    numerics.Squares(5),
    numerics.Codebook((-2.5, 0.1, 1 / 3), "mine"),
    numerics.Block(numerics.nf4, 8, "mine", jnp.float8_e5m2, 0.5),
]
CALIBRATORS = [
    *public(calibrators, lambda value: isinstance(value, jqx.extend.Calibrator)),
    calibrators.fixed(-1e-300, 2.5),
    calibrators.rms(3.0),
    *(
        dataclasses.replace(value, factor=0.8)
        for value in (calibrators.absmax, calibrators.minmax, calibrators.ceil)
    ),
    calibrators.Percentile(99.99),
    calibrators.Delayed(4, 1),
    calibrators.Rounded(calibrators.Mse(candidates=7), jnp.bfloat16),
    calibrators.AcrossDevices(("data", "model"), calibrators.Mse(candidates=7)),
]
GRADIENTS = [
    *public(gradients, lambda value: hasattr(value, "bwd") or hasattr(value, "surrogate")),
    gradients.parq(0.1),
    gradients.StochasticRounding((0, 2)),
    gradients.LearnedStep(False),
]
NUMERICS = [
    *public(numerics, lambda value: isinstance(value, numerics.Numerics)),
    numerics.Numerics(min_scale=5e-324, symmetric_range=numerics.SymmetricRange.COVER),
]
TILES = [
    from_qwix([{"weight_qtype": "int8", "tile_size": size}]).rules[0].weight.granularity
    for size in (5, 1 / 2)
]
GRANULARITIES = [
    *(jqx.per_tensor(), jqx.per_axis(0, -1), jqx.per_channel(), jqx.per_token()),
    *(jqx.per_block({0: 2, -1: 3}, tail=True), jqx.per_group(5), jqx.per_group(5, tail=True)),
    jqx.per_group(5).resolve(3, (1,)),
    *TILES,
    TILES[1].resolve(3, (1,)),
]
SPECS = [
    *(
        jqx.QSpec(qtype, symmetric=numerics.format_of(qtype).signed or qtype == numerics.binary)
        for qtype in QTYPES
    ),
    *(jqx.QSpec(jnp.int8, calibrator=value) for value in CALIBRATORS),
    *(jqx.QSpec(jnp.int8, gradient=value) for value in GRADIENTS),
    *(jqx.QSpec(jnp.int8, numerics=value) for value in NUMERICS),
    *(jqx.QSpec(jnp.int8, granularity=value) for value in GRANULARITIES),
    *(jqx.QSpec(jnp.int8, round_mode=mode, dynamic=True) for mode in jqx.RoundMode),
]


def test_the_tables_hold_every_class_of_values():
    tables = (QTYPES, CALIBRATORS, GRADIENTS, NUMERICS, GRANULARITIES)
    missing = {*CLASSES.values()} - {type(value) for table in tables for value in table}
    # no value of a spec, one with a dtype, and an operand of training
    assert missing == {Groups, PowerOfTwo, jqx.recipes.Rounded}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_value_of_jqx_returns(spec):
    again = assert_returns(plan_with(spec)).weights[0].spec
    assert all(
        type(getattr(again, field.name)) is type(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
    )


class Numbers(NamedTuple):
    values: tuple[float, ...]


def test_numbers_that_json_lacks_return():
    numbers = Numbers((math.inf, -math.inf, 0.1, -0.0, 5e-324, 1e308))
    data = json.loads(json.dumps(to_json("f", numbers, Numbers), allow_nan=False))
    again = record_from_json("f", data, Numbers, {}, "numbers")
    assert list(map(repr, again.values)) == list(map(repr, numbers.values))
    (nan,) = record_from_json(
        "f", to_json("f", Numbers((math.nan,)), Numbers), Numbers, {}, "n"
    ).values
    assert math.isnan(nan)


# Objects of the user.


@dataclasses.dataclass(frozen=True)
class Twice(AbsMax):
    """A calibrator of the user, a subclass of one of jqx's."""

    factor: float = 2.0


@dataclasses.dataclass(frozen=True)
class Estimator:
    """An estimator of the user."""

    def bwd(self, x, low, high, levels, cotangent):
        return gradients.ste.bwd(x, low, high, levels, cotangent)


class Rows:
    """A granularity of the user, equal to itself alone."""

    is_relative: ClassVar[bool] = False

    def resolve(self, rank, kept):
        return self

    def groups(self, shape):
        return Groups(tuple(shape), (1, *shape[1:]))

    def scale_shape(self, shape):
        return self.groups(shape).scale_shape


class Thirds(numerics.Codebook):
    """A format of the user."""


THIRDS = Thirds((-1.0, -1 / 3, 1 / 3, 1.0), "thirds")
OWN = {"twice": Twice(), "estimator": Estimator(), "rows": Rows(), "thirds": THIRDS}
OWN_SPECS = {
    "twice": jqx.QSpec(jnp.int8, calibrator=Twice()),
    "estimator": jqx.QSpec(jnp.int8, gradient=Estimator()),
    "rows": jqx.QSpec(jnp.int8, OWN["rows"]),
    "thirds": jqx.QSpec(THIRDS),
    "thirds in blocks": jqx.QSpec(numerics.Block(THIRDS, 4)),
}


@pytest.mark.parametrize("name", OWN_SPECS)
def test_objects_of_the_user_return_by_name(name):
    plan = plan_with(OWN_SPECS[name])
    user_object = OWN[name.split()[0]]
    assert {"value": name.split()[0]} in leaves_and_nodes(written(plan, values=OWN))
    again = assert_returns(plan, values=OWN)
    assert (
        any(value is user_object for value in vars(again.weights[0].spec).values())
        or "blocks" in name
    )


@pytest.mark.parametrize("name", OWN_SPECS)
def test_objects_of_the_user_without_a_name_or_that_are_absent_are_refused(name):
    plan, key = plan_with(OWN_SPECS[name]), name.split()[0]
    for values in ({}, {"other": Twice(3.0)}):
        fact = f"type {type(OWN[key]).__name__} is neither of a class of"
        with pytest.raises(ValueError, match=fact) as info:
            plan.to_dict(values)
        assert_four_parts(info, "Plan.to_dict")
    data = written(plan, values=OWN)
    for values in ({}, {"other": OWN[key]}):
        refused(ValueError, f"the object '{key}' at plan.weights", data, values)


def test_an_object_of_another_kind_is_refused():
    data = written(plan_with(OWN_SPECS["twice"]), values=OWN)
    fact = r"plan.weights\[0\].spec.calibrator has the wrong type"
    refused(ValueError, fact, data, {"twice": Estimator()})


def test_names_must_be_names():
    for call in (planned().to_dict, lambda values: jqx.Plan.from_dict(written(planned()), values)):
        for values in ([Twice()], {3: Twice()}):
            with pytest.raises(TypeError, match="`values` is not a dict of objects by name"):
                call(values)


def test_nothing_is_imported():
    data, before = written(planned()), set(sys.modules)
    for name in ("colorsys.rgb_to_hsv", "jqx.calibrators.os", "jqx.presets.w8a8", "Twice"):
        data["weights"][0]["spec"]["calibrator"] = {name: {}}
        refused(ValueError, f"'{name}' at plan.weights", data)
    assert set(sys.modules) == before


# What is not a plan.


def leaves_and_nodes(data):
    """Every value of a JSON tree."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [data, *(node for value in inner for node in leaves_and_nodes(value))]


def paths_in(data, path=()):
    """The path of every value of a JSON tree but the whole."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from paths_in(value, (*path, key))


def keys_of(data):
    return [path for path in paths_in(data) if isinstance(path[-1], str)]


def changed(data, path, change):
    data = copy.deepcopy(data)
    node = data
    for key in path[:-1]:
        node = node[key]
    change(node, path[-1])
    return data


def assert_four_parts(info, call):
    parts = rf"jqx\.{call}: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
    assert re.fullmatch(parts, str(info.value)), str(info.value)


def refused(error, fact, data, *values):
    """Asserts that data are no plan, and returns the message."""
    with pytest.raises(error, match=fact) as info:
        jqx.Plan.from_dict(data, *values)
    assert_four_parts(info, "Plan.from_dict")
    return str(info.value)


@pytest.mark.parametrize("version", [None, 0, 3, "1", 1.0, True])
def test_another_version_is_refused(version):
    refused(ValueError, "the version is unknown", {**written(planned()), "version": version})


@pytest.mark.parametrize("data", [None, [], "plan", {}, 1])
def test_what_has_no_version_is_refused(data):
    refused(ValueError, "the version is unknown", data)


def test_every_missing_field_is_named():
    data = written(planned())
    assert jqx.Plan.from_dict({k: x for k, x in data.items() if k != "operations"}) == planned()
    for path in keys_of(data):
        if path == ("operations",):  # plans of older files do not have it
            continue
        text = refused(ValueError, None, changed(data, path, lambda node, key: node.pop(key)))
        named = f"does not have the field {path[-1]!r}" in text
        assert named or path[-1][0].isupper() or path == ("version",), path


def test_every_unknown_field_is_named():
    data = written(planned())
    for path in keys_of(data):
        extra = changed(data, path, lambda node, key: node.update(extra=1))
        refused(ValueError, "is unknown", extra)


@pytest.mark.parametrize(
    "other", [{"nonsense": 1}, {"number": "inf"}, {"value": "x"}, [[[]]]], ids=str
)
def test_every_value_of_another_kind_is_refused(other):
    data = written(planned())
    for path in paths_in(data):
        with pytest.raises((TypeError, ValueError)) as info:
            jqx.Plan.from_dict(changed(data, path, lambda node, key: node.__setitem__(key, other)))
        assert "fix" in str(info.value), path


def test_a_field_that_its_class_refuses_is_located():
    data = written(planned())
    data["weights"][0]["spec"]["symmetric"] = False
    with pytest.raises(ValueError, match=r"at:       plan.weights\[0\].spec$"):
        jqx.Plan.from_dict(data)
