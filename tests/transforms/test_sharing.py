"""One quantized weight at several sites and in several plans; weights in several arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.presets import w8a8, w8a16

from ..models.transforms import eighths, normal
from .sources import POLICY, assert_quantized, assert_same, axes_of, by_hand, rounded

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


def decode(p, token, cache, at):
    """The same for one token more."""
    x = p["table"][token][:, None]
    q, k, v = (x @ p[name] for name in "qkv")
    k, v = (lax.dynamic_update_slice(c, a, (0, at, 0)) for c, a in zip(cache, (k, v), strict=True))
    h = attend(q, k, v, jnp.arange(LENGTH)[None, None] <= at)
    return (x + h)[:, 0] @ p["table"].T, [k, v]


def generate(prefill, decode, p, tokens):
    """Logits of every step of greedy decoding."""
    logits, cache = prefill(p, tokens)
    seen = [logits]
    for at in range(tokens.shape[1], LENGTH):
        logits, cache = decode(p, jnp.argmax(seen[-1], axis=-1), cache, at)
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
    found = generate(
        jax.jit(jqx.convert(prefill, first)), jax.jit(jqx.convert(decode, second)), q, tokens
    )
    on_grid = by_hand(params, set(params))
    assert_same(found, generate(jax.jit(prefill), jax.jit(decode), on_grid, tokens))


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
    given = {1: ENCODER, 3: DECODER}
    q = jqx.quantize_params(tuple(given[i] for i in params), plan)
    assert isinstance(q, tuple) and len(q) == 2
    encoder, decoder = (q[list(params).index(i)] for i in (1, 3))
    assert encoder["b"] is ENCODER["b"] and isinstance(decoder[0], jqx.QTensor)
    assert_same(
        jqx.convert(several, plan)(X, encoder, 2.0, decoder),
        several(X, {"w": rounded(ENCODER["w"])}, 2.0, [rounded(DECODER[0])]),
    )


def test_several_arguments_are_calibrated_and_trained_together():
    plan = jqx.make_plan(several, w8a8(), params=(1, 3))(X, ENCODER, 2.0, DECODER)
    _, stats = jqx.calibrate(several, plan)(X, ENCODER, 2.0, DECODER)
    batches = [(X, 2.0), (X / 2, 2.0)]
    merged = jqx.calibrate_batches(several, plan, (ENCODER, DECODER), batches, progress=False)
    assert set(stats) == {"1/w:dot_general:lhs", "3/0:dot_general:lhs"}
    for key in stats:
        np.testing.assert_array_equal(merged[key].largest, stats[key].largest)

    plan = jqx.make_plan(several, POLICY, params=(1, 3))(X, ENCODER, 2.0, DECODER)
    loss = lambda f: lambda e, d: jnp.sum(f(X, e, 2.0, d))  # noqa: E731
    clipped = lambda tree: jax.tree.map(lambda w: jnp.clip(w, -1, 1), tree)  # noqa: E731
    encoder, decoder = clipped(ENCODER), clipped(DECODER)
    found = jax.jit(jax.grad(loss(jqx.simulate(several, plan)), (0, 1)))(encoder, decoder)
    on_grid = {**encoder, "w": rounded(encoder["w"])}, [rounded(decoder[0])]
    assert_same(found, jax.jit(jax.grad(loss(several), (0, 1)))(*on_grid))


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


@pytest.mark.parametrize("given", [ENCODER, (ENCODER,), (ENCODER, DECODER, X)])
def test_as_many_arguments_are_quantized_as_the_plan_names(given):
    plan = jqx.make_plan(several, w8a16(), params=(1, 3))(X, ENCODER, 2.0, DECODER)
    with pytest.raises(ValueError, match=r"several arguments(.|\n)*a tuple of the 2 arguments"):
        jqx.quantize_params(given, plan)
