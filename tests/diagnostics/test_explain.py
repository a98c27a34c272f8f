"""What each site of a plan became."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from .programs import by_hand, codes, looped, shape, two_layers

PARAMS = {"w": shape(256, 256), "v": shape(256, 256)}
X = shape(32, 256)


def really(found):
    return {(site.path, site.op): site.really for site in found.sites}


def test_each_site_is_found_though_all_have_one_shape():
    found = jqx.explain(two_layers, PARAMS, X, plan=w8a8_dynamic())
    assert [site.path for site in found.sites] == ["w", "v"]
    assert [site.really for site in found.sites] == ["codes", "codes"]
    assert [len(site.contractions) for site in found.sites] == [1, 1]
    assert found.others == ()


def test_a_site_left_in_float_is_shown_with_its_reason():
    found = jqx.explain(two_layers, PARAMS, X, plan=w8a8_dynamic("v"))
    (w,), (v,) = found["w"], found["v"]
    assert (v.really, v.is_quantized) == ("codes", True)
    assert (w.really, w.is_quantized) == ("float", False)
    assert w.plan == "left in float: no rule matches"
    assert w.contractions[0].dtypes == ("f32", "f32")


def test_sites_in_loops_and_contractions_without_weights_are_found():
    found = jqx.explain(looped, {"layers": shape(3, 256, 256)}, X, plan=w8a8_dynamic())
    assert really(found) == {
        ("layers", "dot_general"): "codes",
        ("scores", "dot_general"): "float",
        ("", "dot_general"): "float",
    }
    assert found["layers"][0].contractions[0].times == 3
    assert found.others == ()
    assert [site.label for site in found.sites] == ["layers", "scores", "(dot_general~1)"]
    assert "gone" not in str(found)
    sites = (dataclasses.replace(found.sites[0], really="gone"), *found.sites[1:])
    assert "\ngone: the program has no such product:" in str(
        dataclasses.replace(found, sites=sites)
    )


def test_what_has_neither_weight_nor_scope_is_called_by_its_operation_and_number():
    """In every table; a weight that is a whole argument is called so. Rules see empty paths."""
    attention = jqx.Rule(activation=jqx.QSpec("int8", dynamic=True))
    policy = w8a8_dynamic() + jqx.Policy([attention])
    f, w = lambda w, x: (x @ w) @ x.T @ x, jnp.eye(4)
    plan = jqx.make_plan(f, policy)(w, w)
    labels = ["(argument)", "(dot_general#1)", "(dot_general#2)"]
    assert [site.label for site in plan.sites] == labels
    assert [site.path for site in plan.sites] == [""] * 3
    assert [row.name for row in jqx.compare(f, plan)(w, w).sites] == labels
    assert [row.label for row in jqx.diagnostics.ranges(f, plan, {})(w, w).sites] == labels
    skipped = jqx.make_plan(f, w8a8_dynamic())(w, w)
    assert [row[0] for row in skipped.table().rows] == [
        "(argument)",
        "(dot_general~0)",
        "(dot_general~1)",
    ]
    three = lambda p, x: f(p["w"], x)  # noqa: E731
    costs = jqx.diagnostics.sensitivity(three, policy, estimate="one_at_a_time")({"w": w}, w)
    assert {row.label: row.path for row in costs.ranked} == {"w": "w", "(2 unnamed)": ""}
    assert {row.scheme for row in costs.ranked} == {
        "int8 per_axis(0) dynamic x int8 per_channel",
        "int8 per_tensor dynamic x int8 per_tensor dynamic",
    }


def test_a_fault_by_hand_is_no_site_and_is_listed_beside():
    """One weight goes through a plan; the other is dequantized by the user, before the product."""

    def f(params, x):
        return by_hand(params["own"], jax.nn.relu(x @ params["w"]))

    params = {"w": shape(256, 256), "own": codes(256, 256)}
    policy = w8a8_dynamic("w")
    plan = jqx.make_plan(lambda p, x: jax.nn.relu(x @ p["w"]), policy)({"w": params["w"]}, X)
    converted = jqx.convert(lambda p, x: jax.nn.relu(x @ p["w"]), plan)
    q = jqx.quantize_params({"w": params["w"]}, plan)
    found = jqx.explain(lambda q, own, x: by_hand(own, converted(q, x)), q, params["own"], X)
    assert really(found) == {("w", "dot_general"): "codes"}
    (other,) = found.others
    assert other.widened == ("f32[256,256] of own.scale and own.values",)


def test_a_weight_whose_codes_are_converted_before_the_product_is_widened_first():
    found = jqx.explain(two_layers, PARAMS, shape(8, 256), plan=w8a16())
    assert [site.really for site in found.sites] == ["codes", "codes"]  # digits of x, on CPU
    blocks = jqx.explain(two_layers, PARAMS, X, plan=jqx.presets.w4a16())
    assert [site.really for site in blocks.sites] == ["widened first", "widened first"]
    copies = {copy.partition(" ")[0] for c in blocks["w"][0].contractions for copy in c.widened}
    assert copies == {"f32[32,256]"}  # a tile at a time


@pytest.mark.parametrize("preset", ["fp8", "mxfp8", "nf4", "w4a16"])
def test_a_product_of_one_row_is_found_though_xla_on_cpu_drops_its_name(preset):
    def f(params, x):
        return x @ params["w"]

    plan = getattr(jqx.presets, preset)()
    found = jqx.explain(f, {"w": shape(512, 1024)}, shape(1, 512), plan=plan)
    assert really(found) == {("w", "dot_general"): "widened first"}
    assert found.others == ()


def test_a_lookup_multiplies_nothing():
    def f(params, i):
        return params["table"][i] @ params["w"]

    params = {"table": shape(300, 256), "w": shape(256, 256)}
    found = jqx.explain(f, params, shape(32, dtype=jnp.int32), plan=w8a8_dynamic())
    assert really(found) == {("table", "gather"): "lookup", ("w", "dot_general"): "codes"}


def test_a_plan_and_quantized_parameters_are_taken_as_they_are():
    plan = jqx.make_plan(two_layers, w8a8())(PARAMS, X)
    key = jax.random.key(0)
    params = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), PARAMS)
    x = jax.random.normal(key, X.shape)
    affines = jqx.affines(plan, jqx.calibrate(two_layers, plan)(params, x)[1])
    q = jqx.quantize_params(params, plan)
    found = jqx.explain(two_layers, q, x, plan=plan, affines=affines)
    assert [site.is_quantized for site in found.sites] == [True, True]


def test_it_prints_a_table_and_is_a_dict():
    found = jqx.explain(two_layers, PARAMS, X, plan=w8a8_dynamic("v"))
    assert "left in float: no rule matches" in str(found)
    assert str(found).endswith("1 of 2 contractions read codes on cpu")
    assert json.loads(json.dumps(found.to_dict()))["sites"][1]["really"] == "float"
    assert found.__rich__().row_count == 2


def test_scales_without_a_plan_are_refused():
    with pytest.raises(ValueError, match="`affines` has no use without a plan"):
        jqx.explain(two_layers, PARAMS, X, affines={})


def test_what_is_no_plan_is_refused():
    with pytest.raises(TypeError, match="`plan` is not a Plan or a Policy"):
        jqx.explain(two_layers, PARAMS, X, plan="w8a8")


@pytest.mark.parametrize("path", ["a/b", 'quo"te', "br]acket", "back\\slash", "per%cent"])
def test_any_path_is_found_again(path):
    def f(params, x):
        return x @ params[path]

    found = jqx.explain(f, {path: shape(256, 256)}, X, plan=w8a8_dynamic())
    assert really(found) == {(path, "dot_general"): "codes"}


def test_the_compilation_cache_does_not_mix_up_names():
    """Functions that differ in the names of their weights alone are one to JAX's cache, which the
    tests use.
    """
    assert jax.config.jax_compilation_cache_dir
    for path in ("one", "other", "one"):
        f = lambda params, x, path=path: jnp.tanh(x @ params[path])  # noqa: E731
        found = jqx.explain(f, {path: shape(256, 192)}, X, plan=w8a8_dynamic())
        assert really(found) == {(path, "dot_general"): "codes"}


def test_weights_in_the_plain_layout_are_named_with_what_lays_them_out():
    f, params = lambda p, x: x @ p["w"] + p["b"], {"w": jnp.ones((64, 32)), "b": jnp.ones((1, 32))}
    plan = jqx.make_plan(f, jqx.presets.w4a16())(params, jnp.ones((2, 64)))
    plain = jqx.explain(f, params, jnp.ones((2, 64)), plan=plan)
    assert plain.plain == ("w",) and plain.to_dict()["plain"] == ["w"]
    assert "quantize_params" in str(plain) and "pack_for" in str(plain)
    packed = jqx.quantize_params(params, plan, target="cpu")
    found = jqx.explain(f, packed, jnp.ones((2, 64)), plan=plan)
    assert found.plain == () and "pack_for" not in str(found)


def test_weights_that_were_quantized_before_the_plan_say_so():
    def f(params, x):
        return x @ params["params"]["up"]["w"]

    spec = jqx.QSpec("int4", jqx.per_block({0: 32, 1: 1}), symmetric=False)
    w = jqx.QTensor.quantize(jnp.ones((64, 32)), spec)
    found = jqx.explain(f, {"params": {"up": {"w": w}}}, shape(8, 64), plan=jqx.Policy([]))
    (site,) = found.sites
    assert site.plan == "quantized already: int4 per_block({0: 32, 1: 1}) asymmetric"
    assert "of w.scale and w.values" in str(found) and "args[0]" not in str(found)
