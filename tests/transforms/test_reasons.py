"""What a plan says of contractions that no weight reaches."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..models.transforms import normal
from .sources import POLICY

X = normal(1, 4, 8)
OPTIONAL = jqx.Policy([dataclasses.replace(POLICY.rules[0], optional=True)])


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("const", [jnp.asarray, np.asarray])
def test_a_weight_that_is_closed_over_is_listed_with_what_to_do(jit, const):
    hidden = const(normal(2, 8, 8))

    def f(w, x):
        return lax.scan(lambda c, _: (c @ hidden, None), x @ hidden @ w, length=2)[0]

    plan = jqx.make_plan(jit(f), POLICY)(normal(0, 8, 8), X)
    assert len(plan.sites) == 1
    reason = "an operand is closed over by f: pass weights in an argument that params= names"
    assert plan.skipped[0].reason == reason
    assert "an operand is closed over" in str(plan)


CHANGED = {
    "sum": (lambda p, x: x @ (p["a"] + p["b"]), "'a' and 'b' by `add`"),
    "scaled by columns": (lambda p, x: x @ (p["a"] * p["b"][:1]), "'a' and 'b' by more than views"),
    "rounded": (lambda p, x: x @ jax.jit(jnp.round)(p["a"]), "'a' by `round`"),
    "masked": (lambda p, x: x @ jnp.tril(p["a"]), "'a' by `select_n`"),
    "of a branch": (
        lambda p, x: x @ lax.cond(p["b"][0, 0] > 0, lambda: p["a"], lambda: p["b"]),
        "'a' and 'b' by `gt`",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_weight_that_is_changed_before_it_is_used_is_named_with_the_operation(name):
    f, fact = CHANGED[name]
    params = {"a": normal(0, 8, 8), "b": normal(1, 8, 8)}
    plan = jqx.make_plan(f, OPTIONAL)(params, X)
    assert plan.sites == ()
    assert fact in plan.skipped[0].reason and "use jqx.hoist" in plan.skipped[0].reason
    with pytest.raises(ValueError, match=f"matches no contraction(.|\n)*{re.escape(fact)}"):
        jqx.make_plan(f, POLICY)(params, X)


def test_activations_are_not_said_to_be_computed_from_weights():
    def f(w, x):
        h, _ = lax.scan(lambda h, row: (h @ h.T @ h, None), w * x[0, 0], x)
        return h @ (w + x[:, :1].mean())

    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=None, op="gather", optional=True)]))
    reasons = {skip.reason for skip in plan(normal(0, 8, 8), X).skipped}
    assert len(reasons) == 1 and reasons.pop().startswith("no weight reaches it through views")


def test_what_is_drawn_at_random_is_not_closed_over():
    closed = jax.random.key(0)

    def f(w, x, key):
        noise = jax.random.normal(jax.random.fold_in(closed, 1), (8, 8))
        given = jax.random.uniform(key, (8, 8))
        raw = jax.random.PRNGKey(3)
        signs = jax.random.rademacher(raw, (8, 8), jnp.float32) * jnp.arange(8.0)[None]
        return x @ w, noise @ noise, given @ given, signs @ signs

    plan = jqx.make_plan(f, POLICY)(normal(0, 8, 8), X, jax.random.key(1))
    drawn, given, signs = (skip.reason for skip in plan.skipped)
    assert drawn == signs == "an operand is drawn at random in f"
    assert given.startswith("no weight reaches it through views")


def mamba(p, x):
    """A depthwise kernel used by elements, a convolution of a normed kernel, an unused weight."""
    h = sum(jnp.roll(x, i, axis=0) * p["depthwise"][i][None] for i in range(3))
    kernel = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0, keepdims=True)
    return (h @ kernel + p["bias"]) @ p["out"], p["kept"]


PARTS = {
    "depthwise": normal(0, 3, 8),
    "g": normal(1, 1, 8),
    "v": normal(2, 8, 8),
    "bias": normal(3, 1, 8),
    "out": normal(4, 8, 8),
    "unused": normal(5, 8, 8),
    "kept": normal(6, 4, 8),
    "flat": normal(7, 8),
    "codes": jnp.ones((4, 4), jnp.int8),
}


def test_weights_that_no_contraction_reads_are_listed_with_what_does():
    plan = jqx.make_plan(mamba, POLICY)(PARTS, X)
    assert [weight.path for weight in plan.weights] == ["out"]
    why = {item.path: item.reason for item in plan.unreached}
    assert why.keys() == {"depthwise", "g", "v", "bias", "unused", "kept"}
    assert why["depthwise"].startswith("`mul` uses it, and only operands of contractions")
    assert why["unused"] == "f does not use it" and why["kept"] == "f returns it"
    assert {item.path: item.shape for item in plan.unreached}["depthwise"] == (3, 8)
    for item in plan.unreached:
        assert any(item.path in line and item.reason in line for line in str(plan).splitlines())
    assert "1 of 2 contractions quantized" in str(plan)
    assert jqx.Plan.from_dict(plan.to_dict()).unreached == plan.unreached
    many = {f"p{i}": normal(0, 2, 2) for i in range(20)}
    text = str(jqx.make_plan(lambda p, x: x @ p["w"], POLICY)({"w": normal(0, 8, 8), **many}, X))
    assert "and 12 more" in text and len(text.splitlines()) == 13


def test_lines_of_a_plan_have_a_width_that_can_be_read():
    names = {f"a weight with a long name {i:02}": normal(i, 8, 8) for i in range(29)}
    params = {"summed": names, "joined": names}

    def f(p, x):
        with jax.named_scope("/".join(["a scope inside of another"] * 40)):
            h = x @ x.T @ x
        joined = jnp.concatenate(list(p["joined"].values()), axis=1)
        return h @ sum(list(p["summed"].values())) @ joined

    plan = jqx.make_plan(f, POLICY)(params, X)
    text = str(plan)
    assert max(map(len, text.splitlines())) < 420
    assert "and 26 more by `add`" in text
    assert (
        len(plan["+".join(f"joined/{name}" for name in names)]) == 1
    )  # the plan itself has all of it
