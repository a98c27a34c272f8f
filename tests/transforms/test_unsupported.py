"""Quantized weights where they have no place: errors that name the weight and its use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..models.transforms import eighths, normal
from .sources import POLICY, assert_same, rounded

X = eighths(1, 4, 8)


@pytest.mark.parametrize(
    ("f", "fact"),
    [
        (lambda w, x: (x @ w).sum() + jnp.sum(w**2), "reaches `integer_pow`"),
        (
            lambda w, x: (jax.debug.callback(len, w), x @ w)[1],
            "reaches `debug_callback`",
        ),
        (lambda w, x: x @ w + lax.cond(x[0, 0] > 0, lambda: w, lambda: 2 * w)[:1], "`add`"),
    ],
    ids=["decay", "callback", "branch"],
)
def test_a_weight_used_elsewhere_is_simulated_but_converted_only_where_asked(f, fact):
    w = normal(0, 8, 6)
    with pytest.raises(NotImplementedError, match=f"the weight '', .*{fact}"):
        jqx.make_plan(f, POLICY)(w, X)
    plan = jqx.make_plan(f, POLICY, unsupported="dequantize")(w, X)
    q = jqx.quantize_params(w, plan)
    with pytest.raises(NotImplementedError, match=fact):
        jqx.convert(f, plan)(q, X)
    expected = f(rounded(w), X)
    assert_same(jqx.simulate(f, plan)(w, X), expected)
    assert_same(jqx.convert(f, plan, unsupported="dequantize")(q, X), expected)


def test_a_float_weight_that_is_returned_is_no_codes():
    w = normal(0, 8, 6)
    f = lambda w, x: (x @ w, w)  # noqa: E731
    assert jqx.convert(f, POLICY)(w, X)[1] is w
    turned = lambda w, x: (x @ w, jax.jit(jnp.transpose)(w))  # noqa: E731
    with pytest.raises(NotImplementedError, match="returns a float weight"):
        jqx.convert(turned, POLICY)(w, X)
    plan = jqx.make_plan(turned, POLICY)(w, X)
    assert_same(jqx.convert(turned, plan, unsupported="dequantize")(w, X), turned(rounded(w), X))
    q = jqx.quantize_params(w, plan)
    assert_same(jqx.convert(turned, plan)(q, X)[1].dequantize(), q.dequantize().T)


def test_the_error_names_the_weight_and_the_line_that_uses_it():
    f = lambda p, x: x @ p["w"] + jnp.sin(p["w"]).sum()  # noqa: E731
    with pytest.raises(NotImplementedError) as info:
        jqx.convert(f, POLICY)({"w": normal(0, 8, 6)}, X)
    text = str(info.value)
    assert "of 'w'" in text and "test_unsupported.py" in text and "jqx.Rule('w')" in text


def test_the_error_leaves_out_a_line_that_jax_does_not_have():
    f = lambda w, x: x @ w + jnp.sort(w).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="reaches `sort`") as info:
        jqx.make_plan(f, POLICY)(normal(0, 8, 6), X)
    given = next(line for line in str(info.value).splitlines() if "given:" in line)
    assert given.endswith(str(POLICY.rules[0].weight.resolve(2, (1,))))


def test_a_weight_is_quantized_at_every_use_or_at_none():
    f = lambda w, x: jnp.take(w, jnp.arange(4), axis=0) @ w.T  # noqa: E731
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(op="gather"), *POLICY.rules]))(normal(0, 8, 8), X)
    w = normal(0, 8, 8)
    found = jqx.convert(f, plan)(jqx.quantize_params(w, plan), X)
    assert_same(found, jqx.simulate(f, plan)(w, X))


def test_a_weight_whose_one_use_has_no_quantized_form_is_an_error_that_says_so():
    f = lambda w, x: jnp.sort(w, axis=0)[:2] @ x[:2].T @ x[:2] @ w.T  # noqa: E731
    fact = "reaches (a )?`sort`"
    with pytest.raises(NotImplementedError, match=f"the weight '', .*{fact}"):
        jqx.make_plan(f, POLICY)(normal(0, 8, 8), X)
    plan = jqx.make_plan(f, POLICY, unsupported="dequantize")(normal(0, 8, 8), X)
    with pytest.raises(NotImplementedError, match=fact):
        jqx.convert(f, plan)(normal(0, 8, 8), X)


def test_a_weight_of_which_single_numbers_are_taken_stays_codes():
    """Where a scale cannot follow, planning says so as converting does."""
    i = jnp.array([1, 2])
    f = lambda w, x: x @ w + (w[i, i] @ x[:2, :6])[None]  # noqa: E731
    w = normal(0, 8, 6)
    plan = jqx.make_plan(f, POLICY)(w, X)
    found = jqx.convert(f, plan)(jqx.quantize_params(w, plan), X)
    np.testing.assert_allclose(found, jqx.simulate(f, plan)(w, X), rtol=1e-5)
    blocks = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_group(4)))])
    with pytest.raises(NotImplementedError, match=r"the weight '', .* `gather`"):
        jqx.make_plan(f, blocks)(w, X)


@pytest.mark.parametrize("size", [2, 25])
def test_a_qtensor_in_other_blocks_is_refused(size):
    """A tail of 4 in blocks of 32 has as many scales as 4 blocks of 25."""
    f = lambda w, x: x @ w  # noqa: E731
    w, x = normal(0, 100, 4), normal(1, 2, 100)
    given = jqx.QSpec(jnp.int8, jqx.per_block({0: 32, 1: 1}, tail=True))
    planned = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_group(size)))])
    plan = jqx.make_plan(f, planned)(w, x)
    with pytest.raises(ValueError, match=rf"int8 per_group\({size}\)"):
        jqx.convert(f, plan)(jqx.QTensor.quantize(w, given), x)


def test_products_that_codes_cannot_enter_go_on_in_float():
    def f(p, x):
        return jax.grad(lambda x: jnp.sin(x @ p["w"].T).sum())(x)

    w, x = normal(0, 64, 256), normal(1, 2, 256)
    params = {"w": jqx.QTensor.quantize(w, jqx.QSpec("int4", jqx.per_axis(0, 1)))}
    with pytest.raises(ValueError, match="varies along a contracted axis"):
        jqx.convert(f, jqx.Policy([]))(params, x)
    found = jqx.convert(f, jqx.Policy([]), unsupported="dequantize")(params, x)
    expected = f({"w": params["w"].dequantize()}, x)
    # Sums of 256 terms in sin, whose derivative is 1 at most, then of 64: by two programs.
    terms = jnp.abs(params["w"].dequantize())
    allowed = 2 * 2.0**-24 * (256 * (jnp.abs(x) @ terms.T) @ terms + 64 * terms.sum(0)[None])
    assert (jnp.abs(found - expected) <= allowed).all()
