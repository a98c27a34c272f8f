"""Primitives and rules that only this file defines: known inside of a context."""

import math

import jax
import jax.extend.core
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir

import jqx
from jqx._src.contractions.dimensions import OperandAxes
from jqx._src.transforms.rules import Contraction, primitive_rules
from jqx._src.transforms.views import View


def primitive(name, compute):
    """A primitive of one result, that JAX evaluates as a function."""
    made = jax.extend.core.Primitive(name)
    made.def_impl(compute)
    made.def_abstract_eval(
        lambda *args, **params: jax.core.ShapedArray(
            *(lambda y: (y.shape, y.dtype))(
                jax.eval_shape(lambda *xs: compute(*xs, **params), *args)
            )
        )
    )
    mlir.register_lowering(made, mlir.lower_fun(compute, multiple_results=False))
    return made


plain = lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ())))  # noqa: E731
rows_by_rows = primitive("rows_by_rows", plain)
halves = primitive("halves", lambda x: x.reshape(2, x.shape[0] // 2, x.shape[1])[0])


def apply(eqn, operands):
    return jqx.dot_general(*operands, (((1,), (1,)), ((), ())))


def gradients(eqn, operands, cotangent, dtype):
    x, w = (operand.astype(dtype) for operand in operands)
    return cotangent.astype(dtype) @ w, cotangent.astype(dtype).T @ x


RULES = {
    "rows_by_rows": Contraction(
        op="rows_by_rows",
        axes=lambda eqn: (OperandAxes((1,), (0,)), OperandAxes((1,), (0,))),
        pattern=lambda eqn: "",
        macs=lambda eqn: (
            math.prod(eqn.invars[0].aval.shape) * math.prod(eqn.invars[1].aval.shape[:1])
        ),
        apply=apply,
        gradients=gradients,
    ),
    "halves": View(
        track=lambda eqn, known: known,
        apply=lambda eqn, operands: [operands[0][: operands[0].shape[0] // 2]],
    ),
}

W = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
POLICY = jqx.presets.w8a8_dynamic()


def f(w, x):
    return rows_by_rows.bind(x, halves.bind(w))


def g(w, x):
    return x @ w[:3].T


def test_they_are_planned_simulated_and_converted_as_what_they_stand_for():
    with primitive_rules(RULES):
        plan = jqx.make_plan(f, POLICY)(W, X)
        (site,) = plan.sites
        assert (site.op, site.macs) == ("rows_by_rows", 2 * 4 * 3)
        q = jqx.quantize_params(W, plan)
        assert q.scale.shape == (6, 1)
        found = jax.jit(jqx.convert(f, plan))(q, X)
        simulated = jax.jit(jqx.simulate(f, plan))(W, X)
        step = jax.jit(jax.grad(lambda x: jqx.simulate(f, plan, backward="float32")(W, x).sum()))
        gradient = step(X)
    known = jqx.make_plan(g, POLICY)(W, X)
    expected = jax.jit(jqx.convert(g, known))(jqx.quantize_params(W, known), X)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(simulated, expected, rtol=1e-5, atol=1e-5)
    real = jqx.QTensor.quantize(W, plan.weights[0].spec).dequantize()[:3]
    np.testing.assert_allclose(gradient, np.tile(real.sum(0), (2, 1)), rtol=1e-5, atol=1e-5)


def test_nothing_is_left_behind():
    with primitive_rules(RULES):
        plan = jqx.make_plan(f, POLICY)(W, X)
        q = jqx.quantize_params(W, plan)
    with pytest.raises(ValueError, match="matches no contraction"):
        jqx.make_plan(f, POLICY)(W, X)
    with pytest.raises(ValueError, match="made for"):
        jqx.convert(f, plan)(q, X)


def test_a_jitted_transform_is_traced_again_inside():
    optional = jqx.Policy([jqx.Rule(weight=jqx.QSpec("int8", jqx.per_channel()), optional=True)])
    simulate = jax.jit(jqx.simulate(f, optional))
    before = simulate(W, X)
    with primitive_rules(RULES):
        assert (simulate(W, X) != before).any()
    np.testing.assert_array_equal(simulate(W, X), before)
    np.testing.assert_array_equal(before, jax.jit(f)(W, X))


WRONG = {
    "no rule": ({"halves": 3}, TypeError, r"rules\['halves'\]"),
    "no mapping": ([1], TypeError, "`rules` is not a"),
    "one of jqx": ({"reshape": RULES["halves"]}, ValueError, "jqx already has a rule"),
}


@pytest.mark.parametrize("rules, error, match", WRONG.values(), ids=WRONG)
def test_what_is_no_rule_is_refused(rules, error, match):
    with pytest.raises(error, match=match) as caught, primitive_rules(rules):
        pass
    assert "jqx.extend.primitive_rules" in str(caught.value)
    assert "fix:" in str(caught.value)
