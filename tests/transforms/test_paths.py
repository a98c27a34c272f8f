"""What weights are called: key paths, those of nnx's variables, and names of the user's."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx

from ..models.transforms import eighths, normal
from .sources import POLICY, assert_same, rounded

X = eighths(1, 4, 8)


def listed(p, x):
    return x @ p[0]["w"] @ p[1] + p[0]["b"][None]


PARAMS = [{"w": normal(0, 8, 8), "b": normal(2, 6)}, normal(1, 8, 6)]


def by_keys(keys):
    return ".".join(str(getattr(key, "key", f"layer{getattr(key, 'idx', '')}")) for key in keys)


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (None, ["0/w", "1"]),
        ({"0": "first", "1": "head/kernel"}, ["first/w", "head/kernel"]),
        ({"0": "first", "0/w": "kernel"}, ["kernel", "1"]),
        (by_keys, ["layer0.w", "layer1"]),
    ],
    ids=["keys", "beginnings", "the longest", "a function"],
)
def test_names_take_the_place_of_key_paths_in_all_transforms(names, paths):
    policy = jqx.Policy([jqx.Rule(path, weight=POLICY.rules[0].weight) for path in paths])
    plan = jqx.make_plan(listed, policy, names=names)(PARAMS, X)
    assert [weight.path for weight in plan.weights] == paths
    again = jqx.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.names == plan.names and hash(again) == hash(plan)
    assert ("names" in plan.to_dict()) == (names is not None)
    q = jqx.quantize_params(PARAMS, again)
    expected = listed([{**PARAMS[0], "w": rounded(PARAMS[0]["w"])}, rounded(PARAMS[1])], X)
    assert_same(jqx.convert(listed, again)(q, X), expected)
    assert_same(jqx.simulate(listed, again)(PARAMS, X), expected)
    assert [row.path for row in jqx.report(plan, PARAMS).weights] == paths
    assert [site.path for site in jqx.compare(listed, plan)(PARAMS, X).sites] == paths


def test_names_cover_several_arguments_and_scales():
    f = lambda a, x, b: x @ a @ b  # noqa: E731
    args = normal(0, 8, 8), X, normal(1, 8, 4)
    given = {"params": (0, 2), "names": {"0": "a", "2": "b"}}
    plan = jqx.make_plan(f, jqx.presets.w8a8(), **given)(*args)
    assert set(plan.static_specs()) == {"a:dot_general:lhs", "b:dot_general:lhs"}
    affines = jqx.affines(plan, jqx.calibrate(f, plan)(*args)[1])
    a, b = jqx.quantize_params((args[0], args[2]), plan, affines)
    assert isinstance(b, jqx.QTensor)
    assert jqx.convert(f, plan, affines)(a, X, b).shape == (4, 4)


@pytest.mark.parametrize(
    ("names", "error", "fact"),
    [
        (3, TypeError, "`names` is neither a dict nor a function"),
        ({"0": 1}, TypeError, "`names` gives a name that is not a string"),
        (lambda keys: None, TypeError, "`names` gives a name that is not a string"),
        ({"2": "a"}, ValueError, "`names` has paths that the parameters do not have"),
        ({"0/w": "1"}, ValueError, "two weights have the same path"),
    ],
)
def test_names_that_are_none_are_refused(names, error, fact):
    with pytest.raises(error, match=fact) as info:
        jqx.make_plan(listed, POLICY, names=names)(PARAMS, X)
    assert all(part in str(info.value) for part in ("jqx.", "fix:"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: jax.Array


def test_the_key_of_a_variables_value_is_no_part_of_a_path_and_that_of_others_is():
    net = nnx.Dict(
        value=nnx.Linear(8, 4, rngs=nnx.Rngs(0)), box=nnx.Param({"value": normal(0, 4, 4)})
    )
    graph, state = nnx.split(net)

    def f(state, x):
        model = nnx.merge(graph, state)
        return model.value(x) @ model.box.get_value()["value"]

    plan = jqx.make_plan(f, POLICY)(state, X)
    assert [weight.path for weight in plan.weights] == ["value/kernel", "box/value"]
    q = jqx.quantize_params(state, plan)
    assert isinstance(q["value"]["kernel"][...], jqx.QTensor)
    assert jnp.isfinite(jqx.convert(f, plan)(q, X)).all()
    boxed = jqx.make_plan(lambda p, x: x @ p.value, POLICY)(Box(normal(0, 8, 2)), X)
    assert [weight.path for weight in boxed.weights] == ["value"]


def test_what_is_named_none_holds_no_weights():
    def f(params, x):
        return x @ params["w"] @ params["constants"]["turn"] + params["constants"]["b"]

    params = {"w": normal(0, 8, 8), "constants": {"turn": normal(1, 8, 4), "b": normal(2, 1, 4)}}
    plan = jqx.make_plan(f, POLICY, names={"constants": None})(params, X)
    assert [weight.path for weight in plan.weights] == ["w"] and len(plan.skipped) == 1
    assert plan.names == (("constants/b", None), ("constants/turn", None))
    assert jqx.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    other = {**params, "constants": {"turn": normal(1, 8, 5), "b": normal(2, 1, 5)}}
    q = jqx.quantize_params(other, plan)  # of any shape, as what is no parameter
    assert q["constants"]["turn"] is other["constants"]["turn"]
    assert jqx.convert(f, plan)(q, X).shape == (len(X), 5)
    assert jqx.report(plan, params).kept == 4 * (8 * 4 + 4)


def test_weights_are_mapped_by_their_names():
    plan = jqx.make_plan(listed, POLICY, names={"0": "embed"})(PARAMS, X)
    seen = []
    mapped = plan.map_weights(
        lambda w, x: seen.append(w.path) or jqx.QTensor.quantize(x, w.spec), PARAMS
    )
    assert seen == [weight.path for weight in plan.weights]
    assert_same(mapped, jqx.quantize_params(PARAMS, plan))
