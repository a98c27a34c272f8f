"""Weights with several sites, plans or arguments, and several weights at one site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.presets import w8a16

from ..arrays import assert_same
from ..models.forms import POLICIES as FORM_POLICIES
from ..models.forms import STEP as GRID
from ..models.forms import K, act, rows, weights
from ..models.transforms import eighths, normal
from .sources import POLICY, WEIGHT, assert_quantized, assert_transformed, axes_of, by_hand, rounded

X = eighths(1, 4, 8)


def test_a_table_tied_to_the_head_by_its_transpose_has_scales_by_row():
    def f(p, tokens):
        return p["table"][tokens] @ p["w"] @ p["table"].T

    params = {"table": normal(0, 11, 8), "w": normal(1, 8, 8)}
    plan = assert_quantized(f, {"table": (0,), "w": (1,)}, params, jnp.array([3, 1, 4]))
    assert [weight.sites for weight in plan.weights] == [2, 1]
    assert str(plan).endswith("; one tensor for table (2 sites)")
    assert jqx.quantize_params(params, plan)["table"].scale.shape == (11, 1)


def test_sites_that_keep_no_axis_in_common_share_one_scale():
    plan = assert_quantized(lambda w, x: (x @ w) @ w.T, {"": ()}, normal(0, 8, 6), X)
    assert jqx.quantize_params(normal(0, 8, 6), plan).scale.shape == (1, 1)


def test_sites_of_other_ranks_share_the_axes_that_both_keep():
    """One site keeps both heads and widths, the other the heads alone."""

    def f(w, x):
        heads = jnp.einsum("bd,dhk->bhk", x, w)
        return jnp.einsum("bhk,dhk->bhd", heads, w)

    plan = assert_quantized(f, {"": (1,)}, normal(0, 8, 2, 3), X)
    assert plan.weights[0].sites == 2


@pytest.mark.slow
def test_a_weight_tied_inside_and_outside_of_a_scan_has_no_scale_by_layer_unless_both_keep_it():
    def f(w, x):
        h, _ = lax.scan(lambda h, w: (h @ w, None), x, w)
        return h @ w[1]

    assert_quantized(f, {"": (0, 2)}, normal(0, 2, 8, 8), jnp.sign(X))

    def merged(w, x):
        h, _ = lax.scan(lambda h, w: (h @ w, None), x, w)
        return jnp.einsum("bld,ldk->bk", jnp.stack([h, -h], 1), w)

    assert_quantized(merged, {"": (2,)}, normal(0, 2, 8, 8), jnp.sign(X))


D, LENGTH, VOCABULARY = 8, 6, 11


def attend(q, k, v, seen):
    scores = jnp.where(seen, jnp.einsum("btd,bsd->bts", q, k), -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v)


def prefill(p, tokens):
    """Logits of the last token, and keys and values of all: [batch, length, width]."""
    x = jnp.take(p["table"], tokens, axis=0)
    n = tokens.shape[1]
    q, k, v = (x @ p[name] for name in "qkv")
    h = attend(q, k, v, jnp.tril(jnp.ones((1, n, n), bool)))
    cache = [jnp.pad(a, ((0, 0), (0, LENGTH - n), (0, 0))) for a in (k, v)]
    return (x + h)[:, -1] @ p["table"].T, cache


def decode(p, token, cache, index):
    """The same for one token more."""
    x = p["table"][token][:, None]
    q, k, v = (x @ p[name] for name in "qkv")
    k, v = (
        lax.dynamic_update_slice(c, a, (0, index, 0)) for c, a in zip(cache, (k, v), strict=True)
    )
    h = attend(q, k, v, jnp.arange(LENGTH)[None, None] <= index)
    return (x + h)[:, 0] @ p["table"].T, [k, v]


def generate(prefill, decode, p, tokens):
    """Logits of every step of greedy decoding."""
    logits, cache = prefill(p, tokens)
    seen = [logits]
    for index in range(tokens.shape[1], LENGTH):
        logits, cache = decode(p, jnp.argmax(seen[-1], axis=-1), cache, index)
        seen.append(logits)
    return jnp.stack(seen)


def test_prefill_and_decode_share_one_set_of_quantized_parameters():
    params = {name: normal(i, D, D) / 3 for i, name in enumerate("qkv")}
    params["table"] = normal(9, VOCABULARY, D)
    tokens = jnp.array([[3, 1, 4], [1, 5, 9]])
    first = jqx.make_plan(prefill, POLICY)(params, tokens)
    cache = [jnp.zeros((2, LENGTH, D))] * 2
    second = jqx.make_plan(decode, POLICY)(params, tokens[:, 0], cache, jnp.int32(3))
    assert first.weights == second.weights
    assert first.fingerprint != second.fingerprint
    assert axes_of(first) == {"table": (0,), "q": (1,), "k": (1,), "v": (1,)}

    q = jqx.quantize_params(params, first)
    assert_same(q, jqx.quantize_params(params, second))
    actual = generate(
        jax.jit(jqx.convert(prefill, first)), jax.jit(jqx.convert(decode, second)), q, tokens
    )
    on_grid = by_hand(params, set(params))
    assert_same(actual, generate(jax.jit(prefill), jax.jit(decode), on_grid, tokens))


def test_a_function_that_needs_another_scale_refuses_the_shared_tensor():
    both, one = (lambda w, x: (x @ w) @ w.T), (lambda w, x: x @ w)
    w = normal(0, 8, 6)
    q = jqx.quantize_params(w, jqx.make_plan(both, POLICY)(w, X))
    plan = jqx.make_plan(one, POLICY)(w, X)
    with pytest.raises(ValueError, match="does not fit the plan") as info:
        jqx.convert(one, plan)(q, X)
    assert "scale [1, 6], one for each [8, 1] elements" in str(info.value)


def several(x, encoder, scale, decoder):
    return x @ encoder["w"] * scale @ decoder[0].T


ENCODER, DECODER = {"w": normal(0, 8, 6), "b": normal(2, 6)}, [normal(1, 8, 6)]


@pytest.mark.parametrize("params", [(1, 3), (3, 1), [1, 3]], ids=str)
def test_several_arguments_hold_weights_in_any_order(params):
    plan = jqx.make_plan(several, POLICY, params=params)(X, ENCODER, 2.0, DECODER)
    assert axes_of(plan) == {"1/w": (1,), "3/0": (0,)}
    hash(plan)
    by_position = {1: ENCODER, 3: DECODER}
    q = jqx.quantize_params(tuple(by_position[i] for i in params), plan)
    assert isinstance(q, tuple) and len(q) == 2
    encoder, decoder = (q[list(params).index(i)] for i in (1, 3))
    assert encoder["b"] is ENCODER["b"] and isinstance(decoder[0], jqx.QTensor)
    assert_same(
        jqx.convert(several, plan)(X, encoder, 2.0, decoder),
        several(X, {"w": rounded(ENCODER["w"])}, 2.0, [rounded(DECODER[0])]),
    )


def test_several_arguments_are_trained_together():
    plan = jqx.make_plan(several, POLICY, params=(1, 3))(X, ENCODER, 2.0, DECODER)
    loss = lambda f: lambda e, d: jnp.sum(f(X, e, 2.0, d))  # noqa: E731
    clipped = lambda tree: jax.tree.map(lambda w: jnp.clip(w, -1, 1), tree)  # noqa: E731
    encoder, decoder = clipped(ENCODER), clipped(DECODER)
    actual = jax.jit(jax.grad(loss(jqx.simulate(several, plan)), (0, 1)))(encoder, decoder)
    on_grid = {**encoder, "w": rounded(encoder["w"])}, [rounded(decoder[0])]
    assert_same(actual, jax.jit(jax.grad(loss(several), (0, 1)))(*on_grid))


@pytest.mark.parametrize(
    ("params", "error", "fact"),
    [
        ((1, 1), ValueError, "names an argument twice"),
        (-1, ValueError, "names an argument that does not exist"),
        ((1, 4), ValueError, "names an argument that does not exist"),
        ((1, "3"), TypeError, "`params` must be an integer"),
        (True, TypeError, "`params` must be an integer"),
    ],
)
def test_positions_that_are_none_are_refused(params, error, fact):
    with pytest.raises(error, match=fact):
        jqx.make_plan(several, w8a16(), params=params)(X, ENCODER, 2.0, DECODER)


@pytest.mark.parametrize("arguments", [ENCODER, (ENCODER,), (ENCODER, DECODER, X)])
def test_as_many_arguments_are_quantized_as_the_plan_names(arguments):
    plan = jqx.make_plan(several, w8a16(), params=(1, 3))(X, ENCODER, 2.0, DECODER)
    with pytest.raises(ValueError, match=r"several arguments(.|\n)*a tuple of the 2 arguments"):
        jqx.quantize_params(arguments, plan)


IDS = jnp.array([3, 1, 4])
TIED = {"wte": normal(0, 11, 8), "a": normal(1, 8, 8), "wpe": normal(2, 5, 8)}
LOOKUP, PRODUCT = jqx.Rule(op="gather"), jqx.Rule("wte", "dot_general", weight=WEIGHT)


def tied(p, ids):
    h = p["wte"][ids] + p["wpe"][jnp.arange(3)]
    return jnp.tanh(h @ p["a"]) @ p["wte"].T


def plan_tied(rules, **kwargs):
    return jqx.make_plan(tied, jqx.Policy(rules), **kwargs)(TIED, IDS)


def operations(items):
    return {(item.path, item.op) for item in items}


TABLE, HEAD, BODY = ("wte", "gather"), ("wte", "dot_general"), ("a", "dot_general")
PLACES = ("wpe", "gather")


TABLES = {
    "tables in float, as presets have it": ([jqx.Rule(weight=WEIGHT, tables=None)], {BODY}),
    "a lookup left in float first": ([LOOKUP, *POLICY.rules], {BODY}),
    "a table left in float first": ([jqx.Rule("wte"), *POLICY.rules], {BODY, PLACES}),
    "tables": ([jqx.Rule(weight=WEIGHT, tables=WEIGHT)], {TABLE, HEAD, BODY, PLACES}),
    "one rule for all": (POLICY.rules, {TABLE, HEAD, BODY, PLACES}),
    "a product alone": ([PRODUCT], {TABLE, HEAD}),
    "a product before a preset": (
        [PRODUCT, jqx.Rule(weight=WEIGHT, tables=None)],
        {TABLE, HEAD, BODY},
    ),
    "a product before a lookup in float": ([PRODUCT, LOOKUP], {TABLE, HEAD}),
    "a lookup alone": ([jqx.Rule("wte", "gather", weight=WEIGHT)], {TABLE, HEAD}),
    "not covered": ([jqx.Rule("a", weight=WEIGHT), LOOKUP], {BODY}),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_quantized_for_all_its_uses_or_for_none(name):
    rules, sites = TABLES[name]
    plan = plan_tied(rules)
    assert operations(plan.sites) == sites
    assert operations(plan.skipped) == {TABLE, HEAD, BODY, PLACES} - sites
    on_grid = {k: rounded(w) if any(k == path for path, _ in sites) else w for k, w in TIED.items()}
    assert {weight.path for weight in plan.weights} == {path for path, _ in sites}
    assert_transformed(tied, plan, TIED, tied(on_grid, IDS), IDS, wrap=lambda f: f)
    assert_same(jqx.calibrate(tied, plan)(TIED, IDS)[0], tied(TIED, IDS))
    assert jqx.Plan.from_dict(plan.to_dict()) == plan


def test_a_plan_says_why_a_table_stays_in_float_and_what_takes_the_codes_of_another_use():
    plan = plan_tied(jqx.presets.w8a16().rules)
    (head,) = (skip for skip in plan["wte"] if skip.op == "dot_general")
    assert "rule 0 leaves the lookup of 'wte' in float" in head.reason
    assert 'pass tables="int8", or put a rule for it first' in head.reason
    assert "rule 0 leaves lookups in float" in str(plan)
    plan = plan_tied([PRODUCT])
    assert [site.codes for site in plan["wte"]] == ["dot_general", None]
    assert "0; takes the codes of its dot_general" in str(plan)
    assert "one tensor for wte (2 sites)" in str(plan)


@pytest.mark.parametrize("preset", [jqx.presets.w8a8_dynamic, jqx.presets.w4a16])
def test_tables_of_a_preset_are_the_codes_of_its_products_too(preset):
    policy = preset(tables="int8")
    plan = jqx.make_plan(tied, policy)(TIED, IDS)
    assert str(plan.weight_at("wte").spec) == "int8 per_axis(0)"
    (head,) = (site for site in plan["wte"] if site.op == "dot_general")
    assert (head.operands[0].spec is None) == (policy.rules[0].activation is None)
    assert head.codes == (None if preset is jqx.presets.w8a8_dynamic else "gather")
    q = jqx.quantize_params(TIED, plan)
    results = jqx.convert(tied, plan)(q, IDS), jqx.simulate(tied, plan)(TIED, IDS)
    np.testing.assert_allclose(*results, atol=1e-4)
    assert jqx.compare(tied, plan, affines=None)(TIED, IDS).sites


def test_a_weight_multiplied_with_one_that_stays_in_float_stays_so_too():
    """Both are joined in one product, and the table is left in float at its lookup."""

    def joined(p, ids):
        both = jnp.concatenate([p["wte"][:8], p["a"]], axis=1)
        return p["wte"][ids] @ both, p["wte"][ids] @ p["a"], p["wte"][ids] @ p["b"]

    params = {**TIED, "b": normal(3, 8, 8)}
    plan = jqx.make_plan(joined, jqx.presets.w8a16())(params, IDS)
    assert [site.path for site in plan.sites] == ["b"]
    assert ["'wte' in float, and" in skip.reason for skip in plan["wte+a"]] == [True]
    assert "and 'a' is multiplied together with it" in plan["a"][0].reason


def test_a_scale_of_a_table_that_is_multiplied_by_as_it_stands_fits_both_uses():
    square = lambda p, ids: p[ids] @ p  # noqa: E731
    plan = jqx.make_plan(square, jqx.Policy([jqx.Rule(op="dot_general", weight=WEIGHT)]))
    w = normal(0, 8, 8)
    assert plan(w, IDS).weights[0].spec.granularity.scale_shape((8, 8)) == (1, 1)
    assert_same(jqx.convert(square, plan(w, IDS))(w, IDS), square(rounded(w), IDS))


def test_products_under_rules_of_different_specs_are_an_error_and_a_lookup_decides():
    int4 = jqx.QSpec(jnp.int4, jqx.per_channel())
    wrong = [PRODUCT, jqx.Rule(op="gather", weight=int4)]
    with pytest.raises(ValueError, match="two rules give the weight 'wte' different specs"):
        plan_tied(wrong)
    plan = plan_tied(wrong[::-1])
    assert plan.weight_at("wte").spec.qtype == jnp.int4 and plan.weight_at("wte").sites == 2


@pytest.mark.parametrize("other", ["w", None], ids=["beside a weight", "alone"])
def test_integers_cast_inside_are_no_weights(other):
    """Multiplied by a weight they are activations; alone they are listed with the reason."""
    params = {"codes": jnp.arange(16, dtype=jnp.int8).reshape(4, 4), "w": normal(0, 4, 4)}

    def g(p, x):
        real = p["codes"].astype(jnp.float32) * 0.25
        return x @ p["w"] + (real @ p[other] if other else x @ real)

    x = normal(1, 4, 4)
    plan = jqx.make_plan(g, POLICY)(params, x)
    assert [weight.path for weight in plan.weights] == ["w"]
    reasons = ["the parameter 'codes' is int8, not a float"]
    assert [skip.reason for skip in plan.skipped] == ([] if other else reasons)
    assert jqx.quantize_params(params, plan)["codes"] is params["codes"]
    expected = jax.jit(g)({**params, "w": rounded(params["w"])}, x)
    assert_transformed(g, plan, params, expected, x)


WITH_ACTIVATIONS = FORM_POLICIES["weights and activations"]


def pair():
    """Two weights [K, K] with channels that reach 1.75, the other's twice that."""
    w = weights()
    return {"a": w[0], "b": 2 * w[1]}


def on_grid(pair):
    return {"a": jnp.round(pair["a"] * 4) / 4, "b": jnp.round(pair["b"] * 2) / 2}


def on_steps(x):
    return jqx.quantize_dequantize(x, jnp.float32(GRID), qtype=jnp.int8)


def fused(p, x):
    a, b = jnp.split(x @ jnp.concatenate([p["a"], p["b"]], axis=1), 2, axis=1)
    return a - b


def fused_and_turned(p, x):
    return x @ jnp.concatenate([p["a"].T, p["b"][::-1].T], axis=0).T


def above_each_other(p, x):
    return jnp.concatenate([x, x[:, ::-1]], axis=1) @ jnp.concatenate([p["a"], p["b"]])


def stacked(p, x):
    return lax.scan(lambda c, w: (act(c @ w), c), x, jnp.stack([p["a"], p["b"]]))


FUNCTIONS = {f.__name__: f for f in (fused, fused_and_turned, above_each_other, stacked)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_that_are_joined_are_quantized_each_by_itself(name):
    f, p, x = FUNCTIONS[name], pair(), rows()
    plan = jqx.make_plan(f, FORM_POLICIES["weights"])(p, x)
    assert [site.path for site in plan.sites] == ["a+b"] and plan.skipped == ()
    assert {(weight.path, weight.sites) for weight in plan.weights} == {("a", 1), ("b", 1)}
    expected = f(on_grid(p), x)
    assert not np.array_equal(jax.tree.leaves(expected)[0], jax.tree.leaves(f(p, x))[0])
    assert_same(jqx.dequantize_params(jqx.quantize_params(p, plan)), on_grid(p))
    assert_transformed(f, plan, p, expected, x)


def test_activations_beside_joined_weights_are_quantized():
    p, x = pair(), rows()
    plan = jqx.make_plan(fused, WITH_ACTIVATIONS)(p, x)
    assert list(plan.static_specs()) == ["a+b:dot_general:lhs"]
    assert_transformed(fused, plan, p, fused(on_grid(p), on_steps(x)), x)


def test_scales_that_differ_along_the_sum_stay_apart():
    """`a` above `b` along the contracted axis: a scale for each, in blocks of K."""
    p, x = pair(), rows()
    plan = jqx.make_plan(above_each_other, WITH_ACTIVATIONS)(p, x)
    wide = jnp.concatenate([x, x[:, ::-1]], axis=1)
    w = on_grid(p)
    expected = on_steps(wide) @ jnp.concatenate([w["a"], w["b"]])
    joined = jqx.QTensor.concatenate([*jqx.quantize_params(p, plan).values()])
    assert joined.scale.shape == (2, K)
    assert_transformed(above_each_other, plan, p, expected, x)


def test_rules_that_part_joined_weights_leave_them_in_float():
    policy = jqx.Policy(
        [jqx.Rule("b", weight=jqx.QSpec(jnp.int8)), *FORM_POLICIES["weights"].rules]
    )
    plan = jqx.make_plan(fused, policy)(pair(), rows())
    assert plan.sites == () and plan.weights == ()
    assert [skip.reason for skip in plan.skipped] == [
        "the weights 'a' and 'b' are joined, but fall under different rules"
    ]


def test_a_weight_joined_with_an_activation_is_no_weight():
    def f(p, x):
        return x @ jnp.concatenate([p["a"], x[:, :K]])[:K] + x @ p["b"]

    plan = jqx.make_plan(f, FORM_POLICIES["weights"])(pair(), rows())
    assert [site.path for site in plan.sites] == ["b"]
    assert "no weight reaches it" in plan.skipped[0].reason


def test_views_of_one_weight_that_are_joined_are_that_weight():
    f = lambda w, x: x @ jnp.roll(w, 1, axis=1)  # noqa: E731
    w, x = weights()[0], rows()
    plan = jqx.make_plan(f, WITH_ACTIVATIONS)(w, x)
    assert [(weight.path, weight.sites) for weight in plan.weights] == [("", 1)]
    assert_transformed(f, plan, w, f(jnp.round(w * 4) / 4, on_steps(x)), x)
