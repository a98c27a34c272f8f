import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.transforms.quantize_weight import _compiled
from jqx.presets import w8a8, w8a16

from ..models.transforms import int8_grid, mlp, mlp_params, normal, plan_of

X = normal(3, 7, 16)


def test_codes_and_scales_are_those_of_numpy():
    params = mlp_params()
    q = jqx.quantize_params(params, plan_of(mlp, w8a8(), params, X))
    for name, axes in [("w", (0,)), ("v", (1,))]:
        codes, scale = int8_grid(params[name], axes)
        assert np.array_equal(q[name].values, codes)
        assert np.array_equal(q[name].scale, scale)


def test_what_the_plan_leaves_alone_is_the_same_object():
    params = mlp_params()
    q = jqx.quantize_params(params, plan_of(mlp, w8a8(), params, X))
    assert q["b"] is params["b"]


def test_abstract_parameters_give_abstract_qtensors():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    abstract = jqx.quantize_params(jax.eval_shape(lambda p: p, params), plan)
    concrete = jqx.quantize_params(params, plan)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for a, c in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert isinstance(a, jax.ShapeDtypeStruct) and (a.shape, a.dtype) == (c.shape, c.dtype)


def test_donated_weights_are_deleted_and_others_are_not():
    params = jax.tree.map(jnp.copy, mlp_params())
    jqx.quantize_params(params, plan_of(mlp, w8a8(), params, X), donate=True)
    assert params["w"].is_deleted() and params["v"].is_deleted()
    assert not params["b"].is_deleted()


def test_parameters_are_quantized_under_jit_to_the_same_codes():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    eager, jitted = (
        jqx.quantize_params(params, plan),
        jax.jit(jqx.quantize_params, static_argnums=1),
    )
    assert jax.tree.all(jax.tree.map(jnp.array_equal, eager, jitted(params, plan)))


def test_a_given_scale_is_used():
    w = jnp.array([[0.4], [1.2]])
    f = lambda w, x: x @ w  # noqa: E731
    plan = plan_of(f, w8a16(), w, jnp.eye(2))
    affine = jqx.calibrators.Affine(jnp.full((1, 1), 0.5))
    q = jqx.quantize_params(w, plan, {":weight": affine})
    assert q.values.tolist() == [[1], [2]] and float(q.scale[0, 0]) == 0.5


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda p: {**p, "w": p["w"][:8]}, r"float32\[8, 24\]"),
        (lambda p: {**p, "w": p["w"].astype(jnp.bfloat16)}, "bfloat16"),
        (lambda p: {"w": p["w"]}, "another function or other parameters"),
    ],
)
def test_other_parameters_are_refused(change, fact):
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    with pytest.raises(ValueError, match=fact):
        jqx.quantize_params(change(params), plan)


def test_quantizing_twice_is_refused():
    params = mlp_params()
    plan = plan_of(mlp, w8a8(), params, X)
    with pytest.raises(ValueError, match="'v' is quantized already"):
        jqx.quantize_params(jqx.quantize_params(params, plan), plan)


def test_a_policy_is_no_plan():
    with pytest.raises(TypeError, match="`plan` is not a Plan"):
        jqx.quantize_params({}, w8a8())


def test_dequantized_parameters_are_floats_again_and_others_stay_themselves():
    params = mlp_params()
    plan = jqx.make_plan(mlp, jqx.presets.w8a16())(params, normal(3, 7, 16))
    q = jqx.quantize_params(params, plan)
    back = jqx.dequantize_params(q)
    assert jax.tree.structure(back) == jax.tree.structure(params) and back["b"] is params["b"]
    for name in ("w", "v"):
        np.testing.assert_array_equal(back[name], q[name].dequantize())


def test_weights_of_equal_shape_share_one_compiled_program_and_its_bits():
    params = {f"w{i}": normal(i, 24, 40) for i in range(6)} | {"other": normal(9, 40, 24)}
    f = lambda p, x: sum(jnp.sum(x[:, : w.shape[0]] @ w) for w in p.values())  # noqa: E731
    plan = plan_of(f, w8a16(), params, normal(10, 2, 40))
    before = _compiled._cache_size()
    q = jqx.quantize_params(params, plan)
    assert _compiled._cache_size() - before == 2
    specs = {weight.path: weight.spec for weight in plan.weights}
    for path, found in q.items():
        expected = jqx.QTensor.quantize(params[path], specs[path])
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
    traced = jax.jit(lambda p: jqx.quantize_params(p, plan))(params)
    assert all(np.array_equal(traced[path].values, q[path].values) for path in q)


def assert_laid_out(tree, plain, target):
    """The leaves of a tree are those of another as `pack_for` lays them out, bit for bit."""
    expected = jqx.pack_for(plain, target)
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("preset", [w8a16(), jqx.presets.w4a16(block=4)], ids=["w8", "w4"])
@pytest.mark.parametrize("target", ["cpu", "gpu", "tpu"])
def test_a_target_lays_weights_out_as_pack_for_does(target, preset):
    params = mlp_params()
    plan = plan_of(mlp, preset, params, X)
    q = jqx.quantize_params(params, plan, target=target)
    assert_laid_out(q, jqx.quantize_params(params, plan), target)
    if target == "cpu":
        assert q["w"].layout is not None
        abstract = jqx.quantize_params(jax.eval_shape(lambda p: p, params), plan, target=target)
        assert jax.tree.structure(abstract) == jax.tree.structure(q)
        given = dict(params, w=jnp.array(params["w"]))
        assert_laid_out(jqx.quantize_params(given, plan, donate=True, target=target), q, target)


@pytest.mark.parametrize("target", ["cuda", 3])
def test_an_unknown_target_is_refused(target):
    params = mlp_params()
    with pytest.raises(ValueError, match=r"jqx\.quantize_params: `target` is unknown"):
        jqx.quantize_params(params, plan_of(mlp, w8a8(), params, X), target=target)


SQUARES = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({-2: 32, -1: 32}))
ANY_WAY = {"blocks of both axes": SQUARES, "one scale": jqx.QSpec(jnp.int8, jqx.per_tensor())}
PRODUCTS = {
    "x @ w": (lambda p, x: x @ p["w"], None),
    "x @ w.T": (lambda p, x: x @ p["w"].T, -1),
    "einsum": (lambda p, x: jnp.einsum("mk,nk->mn", x, p["w"]), -1),
    "step by step": (
        lambda p, x: jax.lax.scan(lambda h, w: (h @ w.T, None), x, jnp.stack([p["w"]] * 2))[0],
        -1,
    ),
    "both": (lambda p, x: x @ p["w"] @ p["w"].T, None),
    "a lookup too": (lambda p, x: x[:2] @ p["w"].T + p["w"][jnp.arange(2)].sum(), -1),
}


@pytest.mark.parametrize("name", ANY_WAY)
@pytest.mark.parametrize("how", PRODUCTS)
def test_where_scales_do_not_tell_the_plan_says_what_is_contracted(how, name):
    f, contracted = PRODUCTS[how]
    params, x = {"w": normal(0, 64, 64)}, normal(1, 3, 64)
    rule = jqx.Rule(weight=ANY_WAY[name], tables=ANY_WAY[name])
    plan = jqx.make_plan(f, jqx.Policy([rule]), unsupported="dequantize")(params, x)
    assert plan.weights[0].contracted == contracted
    plain = jqx.quantize_params(params, plan)
    for target in ("cpu", "gpu", "tpu"):
        found = jqx.quantize_params(params, plan, target=target)["w"]
        expected = plain["w"].pack_for(target, contracted=contracted)
        assert found.layout == expected.layout
        assert (found.values == expected.values).all()
        nearest = jqx.quantize_params(params, plan, target=target, algorithm=rounds)["w"]
        assert nearest.layout == expected.layout


def rounds(plan, params, stats):
    return plan.map_weights(lambda w, x: jqx.QTensor.quantize(x, w.spec), params)
