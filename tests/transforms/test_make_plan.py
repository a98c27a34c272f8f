import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from ..models.transforms import close, jitted, jitted_params, mlp, mlp_params, normal, plan_of

INT8 = jqx.QSpec(jnp.int8, jqx.per_channel())
DYNAMIC = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)

CHANNELS = {
    "x @ w": (lambda w, x: x @ w, (8, 6), (1,)),
    "x @ w.T": (lambda w, x: x @ w.T, (6, 8), (0,)),
    "w @ x": (lambda w, x: w @ x.T, (6, 8), (0,)),
    "w * 2": (lambda w, x: x @ (w * 2.0), (8, 6), (1,)),
    "2 * w": (lambda w, x: x @ (2.0 * w), (8, 6), (1,)),
    "w / 3": (lambda w, x: x @ (w / 3.0), (8, 6), (1,)),
    "w / traced scalar": (lambda w, x: x @ (w / jnp.sqrt(jnp.float32(3))), (8, 6), (1,)),
    "tensordot": (lambda w, x: jnp.tensordot(x, w, 1), (8, 2, 3), (1, 2)),
    "split heads": (lambda w, x: x @ w.reshape(8, 6), (8, 2, 3), (1, 2)),
    "einsum": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), (8, 2, 3), (1, 2)),
    "einsum over heads": (
        lambda w, x: jnp.einsum("bhk,hkd->bd", x.reshape(-1, 2, 4), w),
        (2, 4, 6),
        (2,),
    ),
    "batched": (
        lambda w, x: jnp.einsum("ebd,edf->ebf", jnp.stack([x, x]), w),
        (2, 8, 6),
        (0, 2),
    ),
    "slice": (lambda w, x: x @ w[:8], (10, 6), (1,)),
    "row of a stack": (lambda w, x: x @ w[1], (3, 8, 6), (0, 2)),
    "merged axes kept": (lambda w, x: x @ w.reshape(8, 6), (8, 6, 1), (1, 2)),
    "split and contracted": (
        lambda w, x: jnp.einsum("bi,ijn->bjn", x[:, :2], w.reshape(2, 4, 6)),
        (8, 6),
        (1,),
    ),
    "cast": (
        lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        (8, 6),
        (1,),
    ),
    "expand and squeeze": (lambda w, x: x @ jnp.squeeze(w[None], 0), (8, 6), (1,)),
    "nested jit": (lambda w, x: jax.jit(lambda w, x: x @ w.T)(w, x), (6, 8), (0,)),
    "view made in a jit": (lambda w, x: x @ jax.jit(lambda w: w.T * 2.0)(w), (6, 8), (0,)),
    "stop_gradient": (lambda w, x: x @ jax.lax.stop_gradient(w), (8, 6), (1,)),
    "vmap inside": (lambda w, x: jax.vmap(lambda row: row @ w)(x), (8, 6), (1,)),
}


@pytest.mark.many
@pytest.mark.parametrize("name", CHANNELS)
def test_per_channel_finds_the_kept_axes_of_the_weight(name):
    f, shape, axes = CHANNELS[name]
    w, x = normal(0, *shape), normal(1, 4, 8)
    plan = plan_of(f, w8a8_dynamic(), w, x)
    (weight,) = plan.weights
    assert weight.spec.granularity.axes == axes
    exact = f(jqx.QTensor.quantize(w, weight.spec).dequantize(), x)
    converted = jax.jit(jqx.convert(f, jqx.Policy([jqx.Rule(weight=INT8)])))(w, x)
    # Both use the same codes: they differ by float rounding (of bfloat16 where f casts to it).
    slack = 2.0**-6 if exact.dtype == jnp.bfloat16 else 2.0**-20
    scale = jnp.abs(exact).max().astype(jnp.float32)
    difference = jnp.abs(converted.astype(jnp.float32) - exact.astype(jnp.float32))
    assert float(difference.max()) <= slack * float(scale)


def test_paths_are_key_paths_inside_the_parameters():
    def f(params, x):
        a, (b, c) = params["a"], params["inner"]
        return x @ a @ b @ c["w"]

    params = {"a": normal(0, 4, 4), "inner": (normal(1, 4, 4), {"w": normal(2, 4, 4)})}
    plan = plan_of(f, w8a8(), params, normal(3, 2, 4))
    assert [site.path for site in plan.sites] == ["a", "inner/0", "inner/1/w"]
    assert next(iter(plan.static_specs())) == "a:dot_general:lhs"


def test_several_arguments_hold_weights_when_params_names_them():
    def f(x, p, q):
        return x @ p["w"] @ q

    args = (normal(0, 2, 4), {"w": normal(1, 4, 4)}, normal(2, 4, 3))
    plan = jqx.make_plan(f, w8a16(), params=(1, 2))(*args)
    assert [weight.path for weight in plan.weights] == ["1/w", "2"]
    p, q = jqx.quantize_params(args[1:], plan)
    out = jqx.convert(f, plan)(args[0], p, q)
    expected = f(args[0], {"w": p["w"].dequantize()}, q.dequantize())
    assert close(out, expected)


def test_static_leaves_and_keyword_arguments_pass_through():
    def f(params, x, scale, *, activation, count):
        assert scale == 2.0 and isinstance(scale, float) and isinstance(count, int)
        for _ in range(count):
            x = getattr(jnp, activation)(x @ params)
        return x * scale

    w, x = normal(0, 4, 4), normal(1, 2, 4)
    plan = plan_of(f, w8a16(), w, x, 2.0, activation="tanh", count=2)
    assert len(plan.sites) == 2
    out = jqx.simulate(f, plan)(w, x, 2.0, activation="tanh", count=2)
    grid = jqx.QTensor.quantize(w, plan.weights[0].spec).dequantize()
    assert jnp.array_equal(out, f(grid, x, 2.0, activation="tanh", count=2))


def test_abstract_arguments_give_the_same_plan():
    params, x = mlp_params(), normal(3, 7, 16)
    abstract = jax.eval_shape(lambda *args: args, params, x)
    assert plan_of(mlp, w8a8(), *abstract) == plan_of(mlp, w8a8(), params, x)


def test_one_plan_holds_for_any_batch_size():
    params = mlp_params()
    plans = [plan_of(mlp, w8a8(), params, normal(3, n, 16)) for n in (1, 7)]
    assert plans[0] == plans[1] and hash(plans[0]) == hash(plans[1])
    assert plans[0].fingerprint == plans[1].fingerprint


def test_calls_of_one_jitted_helper_are_sites_of_their_own():
    plan = plan_of(jitted, w8a8(), jitted_params(), normal(3, 7, 16))
    assert [site.path for site in plan.sites] == ["w", "b", "v"]
    assert len({site.address for site in plan.sites}) == 3


@pytest.mark.parametrize("granularity", [jqx.per_axis(0), jqx.per_group(4), jqx.per_axis(1)])
def test_a_scale_that_one_of_two_sites_cannot_take_is_refused_where_it_is_planned(granularity):
    """The one contracts axis 0, the other axis 1: blocks along both serve both."""

    def tied(w, x):
        return jnp.tanh(x @ w) @ w.T

    w, x = normal(0, 16, 8), normal(1, 3, 16)
    policy = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, granularity))])
    with pytest.raises(ValueError, match="varies along a contracted axis") as error:
        plan_of(lambda p, x: tied(p["w"], x), policy, {"w": w}, x)
    assert "weight 'w', rule 0" in str(error.value) and "per_block({0: 8, 1: 8})" in str(
        error.value
    )
    blocks = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_block({0: 8, 1: 8})))])
    plan = plan_of(tied, blocks, w, x)
    q = jqx.quantize_params(w, plan)
    assert q.scale.shape == (2, 1) and close(jqx.convert(tied, plan)(q, x), tied(q.dequantize(), x))


def test_tied_weights_share_one_tensor_scaled_along_axes_that_all_sites_keep():
    def f(w, x):
        return (x @ w) @ w.T

    plan = plan_of(f, w8a8(), normal(0, 4, 6), normal(1, 2, 4))
    (weight,) = plan.weights
    assert weight.sites == 2 and weight.spec.granularity.scale_shape((4, 6)) == (1, 1)
    assert len(plan.static_specs()) == 2
    assert "one tensor for" in str(plan)


def test_axes_merged_at_one_site_have_equal_scales_at_all_sites():
    def f(w, x):  # the first site keeps axis 0 alone, the second merges both axes
        return jnp.einsum("bj,ij->bi", x, w).sum() + x[:, :1] @ w.reshape(1, -1)

    w, x = normal(0, 4, 6), normal(1, 2, 6)
    plan = plan_of(f, w8a8_dynamic(), w, x)
    assert plan.weights[0].spec.granularity.scale_shape((4, 6)) == (1, 1)
    assert jqx.convert(f, plan)(jqx.quantize_params(w, plan), x).shape == (2, 24)


def test_two_activations_are_skipped_with_a_reason_unless_a_rule_without_weight_matches():
    def f(w, x):
        h = x @ w
        return h @ h.T

    args = (normal(0, 4, 4), normal(1, 3, 4))
    plan = plan_of(f, w8a8_dynamic(), *args)
    assert len(plan.sites) == 1
    assert "no weight reaches it" in plan.skipped[0].reason
    scores = jqx.Rule(activation=DYNAMIC)
    plan = plan_of(f, jqx.Policy([*w8a8_dynamic().rules, scores]), *args)
    assert [operand.spec.qtype for operand in plan.sites[1].operands] == [jnp.int8, jnp.int8]
    assert plan.skipped == ()


def test_the_first_matching_rule_wins_and_an_exclusion_is_listed():
    policy = jqx.Policy([jqx.Rule("v"), *w8a8().rules])
    plan = plan_of(mlp, policy, mlp_params(), normal(3, 7, 16))
    assert [site.path for site in plan.sites] == ["w"]
    assert plan.skipped[0].path == "v" and "rule 0" in plan.skipped[0].reason
    assert "1 of 2 contractions quantized" in str(plan)


def test_an_unmatched_weight_is_listed():
    plan = plan_of(mlp, w8a8("w"), mlp_params(), normal(3, 7, 16))
    assert plan.skipped[0].reason == "no rule matches"


@pytest.mark.parametrize(
    ("rules", "fact"),
    [
        ([jqx.Rule("w", weight=INT8), jqx.Rule("nothing", weight=INT8)], "matches no contraction"),
        ([*w8a16().rules, jqx.Rule("w", weight=INT8)], "earlier rule"),
        ([jqx.Rule(op="gather", weight=INT8)], "matches no contraction"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rules, fact):
    with pytest.raises(ValueError, match=fact):
        plan_of(mlp, jqx.Policy(rules), mlp_params(), normal(3, 7, 16))


MANY = {f"layer_{i}": {"kernel": jax.ShapeDtypeStruct((4, 4), jnp.float32)} for i in range(12)}


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("layer_11/kernle", ("did you mean 'layer_11/kernel'?", "'layer_11/kernel', ", "5 more")),
        ("layer_3", ("such as 'layer_3/kernel': write 'layer_3/.*'",)),
        ("(?i)Layer_3|none", ("such as 'layer_3/kernel': write 'layer_3/.*'",)),
        ("nothing", ("correct its path or op",)),
    ],
)
def test_the_error_of_a_rule_that_matches_nothing_names_near_paths(path, facts):
    def f(params, x):
        for layer in params.values():
            x = x @ layer["kernel"]
        return x @ x.T

    with pytest.raises(ValueError, match="rule 0 of the policy matches no contraction") as refusal:
        jqx.make_plan(f, jqx.Policy({path: "float", ".*": "int8"}))(MANY, jnp.ones((2, 4)))
    assert all(fact in str(refusal.value) for fact in facts), refusal.value
    assert "no weight reaches it" not in str(refusal.value)


def test_an_optional_rule_may_match_nothing():
    policy = jqx.Policy([jqx.Rule("nothing", weight=INT8, optional=True), *w8a16().rules])
    assert len(plan_of(mlp, policy, mlp_params(), normal(3, 7, 16)).sites) == 2


def test_rules_that_differ_leave_a_product_of_two_weights_in_float():
    def f(params, x):
        return x @ params["u"] @ (params["u"] @ params["w"])

    params = {"u": normal(0, 4, 4), "w": normal(1, 4, 4)}
    int4 = jqx.QSpec(jnp.int4, jqx.per_channel())
    policy = jqx.Policy([jqx.Rule("w", weight=int4), jqx.Rule("u", weight=INT8)])
    plan = plan_of(f, policy, params, normal(2, 3, 4))
    assert [site.path for site in plan.sites] == ["u"]
    assert "'w' and 'u' are multiplied by each other, but fall under different rules" in str(plan)


@pytest.mark.parametrize(
    ("rule", "fact"),
    [
        (
            jqx.Rule(activation=jqx.QSpec(jnp.int8, jqx.per_token())),
            "bound to one batch size",
        ),
        (jqx.Rule(activation=jqx.QSpec(jnp.int8, jqx.per_axis(1))), "varies along a contracted"),
        (jqx.Rule("w", weight=jqx.QSpec(jnp.int8, jqx.per_axis(0))), "varies along a contracted"),
        (jqx.Rule("w", weight=jqx.QSpec(jnp.int8, jqx.per_axis(2))), "Quantization axis"),
    ],
)
def test_a_spec_that_does_not_fit_its_site_is_an_error(rule, fact):
    with pytest.raises(ValueError, match=fact):
        plan_of(mlp, jqx.Policy([rule]), mlp_params(), normal(3, 7, 16))


def test_a_contraction_where_jqx_does_not_look_is_listed_with_the_reason():
    def f(w, x):
        y = jax.lax.while_loop(lambda c: (c @ w).sum() > 1e9, lambda c: c + 1, x @ w)
        solve = lambda matvec, b: matvec(b)  # noqa: E731
        return y + jax.lax.custom_linear_solve(lambda v: v @ w, x, solve, symmetric=True)

    args = normal(0, 4, 4), normal(1, 4, 4)
    with pytest.raises(NotImplementedError, match="reaches `custom_linear_solve`"):
        plan_of(f, w8a16(), *args)
    plan = jqx.make_plan(f, w8a16(), unsupported="dequantize")(*args)
    assert len(plan.sites) == 1
    reasons = [skip.reason for skip in plan.skipped]
    assert reasons[0] == "it is in the condition of a while loop"
    assert all("`custom_linear_solve`, which jqx does not look into" in r for r in reasons[1:])
    assert len(reasons) > 1


def test_control_flow_without_a_contraction_is_left_as_it_is():
    def f(w, x):
        h, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x @ w, length=3)
        return jax.nn.relu(jax.lax.cond(h.sum() > 0, jnp.cos, jnp.tan, h))

    w, x = normal(0, 4, 4), normal(1, 3, 4)
    plan = plan_of(f, w8a16(), w, x)
    q = jqx.quantize_params(w, plan)
    assert close(jqx.convert(f, plan)(q, x), f(q.dequantize(), x))


def test_a_rule_names_an_operation():
    def f(params, x):
        y = jax.lax.conv_general_dilated(x, params["k"], (1, 1), "SAME")
        return y.reshape(2, -1) @ params["w"]

    params = {"k": normal(0, 3, 2, 3, 3), "w": normal(1, 48, 5)}
    args = (params, normal(2, 2, 2, 4, 4))
    assert [site.path for site in plan_of(f, w8a16(), *args).sites] == ["k", "w"]
    plan = plan_of(f, jqx.Policy([jqx.Rule(op="conv.*"), *w8a16().rules]), *args)
    assert [site.path for site in plan.sites] == ["w"]
    assert plan.skipped[0].op == "conv_general_dilated"


def test_integer_contractions_are_skipped_with_a_reason():
    def f(w, x):
        return w @ w

    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=INT8)]))(jnp.ones((2, 2), jnp.int32), 0)
    assert plan.sites == () and "not floats" in plan.skipped[0].reason


@pytest.mark.parametrize(
    ("call", "error", "fact"),
    [
        (lambda: jqx.make_plan(3, w8a8()), TypeError, "`f` is not a function"),
        (lambda: jqx.make_plan(mlp, "w8a8"), TypeError, "`policy` is not a Policy"),
        (lambda: jqx.make_plan(mlp, w8a8(), params=2)({}, 1), ValueError, "`params` names"),
        (lambda: jqx.make_plan(mlp, w8a8(), params="w")({}, 1), TypeError, "`params` must be"),
        (lambda: jqx.calibrate(mlp, "plan"), TypeError, "`plan` is not a Plan"),
        (lambda: jqx.simulate(None, w8a8()), TypeError, "`f` is not a function"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_do(call, error, fact):
    with pytest.raises(error, match=fact) as info:
        call()
    text = str(info.value)
    assert all(part in text for part in ("jqx.", "fix:"))


def test_parameters_may_hold_random_keys_and_integers():
    def f(params, x):
        keep = jax.random.bernoulli(params["key"], 0.5, x.shape)
        return jnp.where(keep, x, 0.0) @ params["w"] * params["count"].astype(jnp.float32)

    params = {"key": jax.random.key(0), "count": jnp.int32(3), "w": normal(0, 4, 4)}
    x = normal(1, 2, 4)
    plan = plan_of(f, w8a16(), params, x)
    q = jqx.quantize_params(params, plan)
    real = {**params, "w": q["w"].dequantize()}
    assert close(jax.jit(jqx.convert(f, plan))(q, x), f(real, x))
