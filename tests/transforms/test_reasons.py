"""What a plan says of contractions that no weight reaches."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from .models import normal
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
    assert fact in plan.skipped[0].reason and "compute it outside of f" in plan.skipped[0].reason
    with pytest.raises(ValueError, match=f"matches no contraction(.|\n)*{re.escape(fact)}"):
        jqx.make_plan(f, POLICY)(params, X)


def test_activations_are_not_said_to_be_computed_from_weights():
    def f(w, x):
        h, _ = lax.scan(lambda h, row: (h @ h.T @ h, None), w * x[0, 0], x)
        return h @ (w + x[:, :1].mean())

    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=None, op="gather", optional=True)]))
    reasons = {skip.reason for skip in plan(normal(0, 8, 8), X).skipped}
    assert len(reasons) == 1 and reasons.pop().startswith("no weight reaches it through views")
