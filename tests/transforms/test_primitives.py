"""Convolutions, grouped products and lookups as sites, against quantization by hand, bit by bit;
and rules for primitives that only this file defines.
"""

import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas.ops.tpu import megablox
from jax.interpreters import mlir

import jqx
from jqx._src.contractions.problem import OperandAxes
from jqx._src.transforms.rules import Contraction, primitive_rules
from jqx._src.transforms.views import View

from ..arrays import on_device
from ..models.forms import POLICIES
from ..models.transforms import normal
from ..oracles.refusals import assert_error

STEP = 2.0**-2


def numbers(seed, *shape):
    """Multiples of 1/32 that a step of 1/4 does not hold, in [-7/4, 7/4]; the ends are there."""
    x = np.random.default_rng(seed).integers(-56, 57, shape) / 32
    x[..., 0] = 1.75  # of whatever has a scale of its own, once its axis is first
    return on_device(x, jnp.float32)


def on_grid(x, hand):
    return jqx.quantize_dequantize(x, jnp.float32(STEP), qtype=jnp.int8) if hand else x


def conv(w, x, rounds=lambda x: x):
    axes = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(rounds(x), w, (2, 1), "SAME", dimension_numbers=axes)
    return y.sum(axis=(1, 2))


def grouped_conv(w, x, rounds=lambda x: x):
    axes = ("NHWC", "OIHW", "NCHW")
    return lax.conv_general_dilated(
        rounds(x),
        w,
        (1, 1),
        [(1, 0), (0, 1)],
        rhs_dilation=(1, 2),
        dimension_numbers=axes,
        feature_group_count=2,
    )


def ragged(w, x, rounds=lambda x: x):
    return lax.ragged_dot(rounds(x), w, jnp.array([2, 0, 3]))


def lookup(w, i, rounds=lambda x: x):
    return w[i] + jnp.take(w, i, axis=0, mode="clip")


def tied(w, i, rounds=lambda x: x):
    return rounds(jnp.take(w, i, axis=0, mode="clip")) @ w.T


def columns(w, i, rounds=lambda x: x):
    return jnp.take(w, i, axis=1, mode="wrap")


def image(seed, *shape):
    return on_device(np.random.default_rng(seed).integers(-16, 17, shape) / 8, jnp.float32)


INDICES = jnp.array([[1, 2, 0], [3, 9, 4]])
KERNEL = jnp.moveaxis(numbers(0, 6, 3, 2, 4), 0, -1)
CASES = {
    "conv": (conv, KERNEL, image(1, 2, 5, 5, 4), (3,)),
    "grouped conv": (grouped_conv, numbers(0, 6, 2, 3, 2)[..., ::-1], image(1, 2, 5, 6, 4), (0,)),
    "ragged": (ragged, jnp.swapaxes(numbers(0, 3, 4, 8), 1, 2), image(1, 5, 8), (0, 2)),
    "lookup": (lookup, numbers(0, 10, 8), INDICES, (0,)),
    "tied": (tied, numbers(0, 10, 8), INDICES, (0,)),
    "columns": (columns, numbers(0, 8, 10).T[::-1].T[:, ::-1].at[0].set(1.75), INDICES, (1,)),
}
cases = pytest.mark.parametrize("name", CASES)


@pytest.mark.many
@cases
@pytest.mark.parametrize("policy", POLICIES)
def test_simulated_and_converted_are_what_is_quantized_by_hand(name, policy):
    f, w, x, axes = CASES[name]
    plan = jqx.make_plan(f, POLICIES[policy])(w, x)
    assert plan.skipped == () and len(plan.sites) > 0
    assert plan.weights[0].spec.granularity == jqx.per_axis(*axes)
    hand = policy != "weights"
    real = lambda w, x: f(w, x, lambda x: on_grid(x, hand))  # noqa: E731
    expected = jax.jit(real)(jnp.round(w * 4) / 4, x)
    assert not np.array_equal(expected, f(w, x))
    q = jqx.quantize_params(w, plan)
    np.testing.assert_array_equal(q.scale, np.full_like(q.scale, STEP))
    for actual in (
        jax.jit(jqx.simulate(f, plan, "dynamic"))(w, x),
        jax.jit(jqx.simulate(f, plan, "dynamic", backward=jnp.float32))(w, x),
        jax.jit(jqx.convert(f, plan, "dynamic"))(q, x),
        jqx.convert(f, plan, "dynamic")(q, x),
    ):
        np.testing.assert_array_equal(actual, expected, strict=True)


@cases
def test_calibration_returns_the_float_result(name):
    f, w, x, _ = CASES[name]
    plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
    out, stats = jax.jit(jqx.calibrate(f, plan))(w, x)
    np.testing.assert_array_equal(out, jax.jit(f)(w, x))
    assert {key.rpartition(":")[2] for key in stats} <= {"lhs"}
    assert all(int(entry.observed) == 1 for entry in stats.values())


@pytest.mark.many
@cases
@pytest.mark.parametrize("backward", [None, jnp.float32])
def test_gradients_of_what_is_simulated_are_those_of_what_is_quantized_by_hand(name, backward):
    f, w, x, _ = CASES[name]
    plan = jqx.make_plan(f, POLICIES["weights and activations"])(w, x)
    real = lambda w, x: f(w, x, lambda x: on_grid(x, True))  # noqa: E731
    straight = w + lax.stop_gradient(jnp.round(w * 4) / 4 - w)
    simulated = jqx.simulate(f, plan, "dynamic", backward=backward)
    actual = jax.grad(lambda w: jnp.sum(simulated(w, x)))(w)
    expected = jax.grad(lambda s: jnp.sum(real(s, x)))(straight)
    np.testing.assert_array_equal(actual, expected)


def test_a_lookup_counts_as_one_contraction_of_its_table_and_of_no_other():
    def f(params, x, i):
        return (x[i] @ params["w"])[i]  # those of activations are no sites

    plan = jqx.make_plan(f, jqx.presets.w8a16())({"w": normal(0, 4, 4)}, normal(1, 5, 4), INDICES)
    assert [site.op for site in plan.sites] == ["dot_general"] and plan.skipped == ()


def test_a_table_of_single_numbers_stays_in_float():
    plan = jqx.make_plan(lambda w, i: w[i], jqx.presets.w8a16())(normal(0, 4), INDICES)
    assert len(plan.sites) == 0 and "one number" in plan.skipped[0].reason


def test_grouped_products_of_another_pattern_are_listed():
    def f(w, x):
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(x, w, jnp.array([2, 3]), numbers)

    plan = jqx.make_plan(f, jqx.presets.w8a16())(normal(0, 5, 4), normal(1, 5, 3))
    assert len(plan.sites) == 0 and "groups are not rows" in plan.skipped[0].reason


def primitive(name, compute):
    """A primitive of one result, that JAX evaluates as a function."""
    new = jax.extend.core.Primitive(name)
    new.def_impl(compute)
    new.def_abstract_eval(
        lambda *args, **params: jax.core.ShapedArray(
            *(lambda y: (y.shape, y.dtype))(
                jax.eval_shape(lambda *xs: compute(*xs, **params), *args)
            )
        )
    )
    mlir.register_lowering(new, mlir.lower_fun(compute, multiple_results=False))
    return new


product = lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ())))  # noqa: E731
rows_by_rows = primitive("rows_by_rows", product)
halves = primitive("halves", lambda x: x.reshape(2, x.shape[0] // 2, x.shape[1])[0])


def apply(eqn, operands):
    return jqx.dot_general(*operands, (((1,), (1,)), ((), ())))


def rows_gradients(eqn, operands, cotangent, dtype):
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
        gradients=rows_gradients,
    ),
    "halves": View(
        track=lambda eqn, known: known,
        apply=lambda eqn, operands: [operands[0][: operands[0].shape[0] // 2]],
    ),
}

W = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
POLICY = jqx.presets.w8a8_dynamic()


def bound(w, x):
    return rows_by_rows.bind(x, halves.bind(w))


def stands_for(w, x):
    return x @ w[:3].T


def test_they_are_planned_simulated_and_converted_as_what_they_stand_for():
    with primitive_rules(RULES):
        plan = jqx.make_plan(bound, POLICY)(W, X)
        (site,) = plan.sites
        assert (site.op, site.macs) == ("rows_by_rows", 2 * 4 * 3)
        q = jqx.quantize_params(W, plan)
        assert q.scale.shape == (6, 1)
        actual = jax.jit(jqx.convert(bound, plan))(q, X)
        simulated = jax.jit(jqx.simulate(bound, plan))(W, X)
        step = jax.jit(
            jax.grad(lambda x: jqx.simulate(bound, plan, backward="float32")(W, x).sum())
        )
        gradient = step(X)
    known = jqx.make_plan(stands_for, POLICY)(W, X)
    expected = jax.jit(jqx.convert(stands_for, known))(jqx.quantize_params(W, known), X)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(simulated, expected, rtol=1e-5, atol=1e-5)
    real = jqx.QTensor.quantize(W, plan.weights[0].spec).dequantize()[:3]
    np.testing.assert_allclose(gradient, np.tile(real.sum(0), (2, 1)), rtol=1e-5, atol=1e-5)


def test_nothing_is_left_behind():
    with primitive_rules(RULES):
        plan = jqx.make_plan(bound, POLICY)(W, X)
        q = jqx.quantize_params(W, plan)
    with pytest.raises(ValueError, match="matches no contraction"):
        jqx.make_plan(bound, POLICY)(W, X)
    with pytest.raises(ValueError, match="made for"):
        jqx.convert(bound, plan)(q, X)


def test_a_jitted_transform_is_traced_again_inside():
    optional = jqx.Policy([jqx.Rule(weight=jqx.QSpec("int8", jqx.per_channel()), optional=True)])
    simulate = jax.jit(jqx.simulate(bound, optional))
    before = simulate(W, X)
    with primitive_rules(RULES):
        assert (simulate(W, X) != before).any()
    np.testing.assert_array_equal(simulate(W, X), before)
    np.testing.assert_array_equal(before, jax.jit(bound)(W, X))


def grouped(lhs, rhs, sizes):
    return lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)


def with_kernel(w, x, sizes):
    """Megablox: a `custom_vjp` around a jitted function around a kernel."""
    tiling = (128, 128, 128)
    return megablox.gmm(x, w, sizes, jnp.float32, tiling, None, None, False, True)


@jax.numpy_dtype_promotion("standard")
def test_a_kernel_is_planned_as_the_function_that_stands_for_its_name():
    w, x, sizes = normal(0, 3, 128, 128), normal(1, 256, 128), jnp.array([64, 0, 192])
    policy = jqx.Policy({".*": jqx.presets.w8a8_dynamic()})
    with primitive_rules({"gmm": lambda *args: args[0]}), primitive_rules({"gmm": grouped}):
        plan = jqx.make_plan(with_kernel, policy)(w, x, sizes)
        loss = lambda w, x: (jqx.simulate(with_kernel, plan)(w, x, sizes) ** 2).sum()  # noqa: E731

        @jax.jit
        def run(q, w, x):
            out = jqx.convert(with_kernel, plan)(q, x, sizes)
            simulated = jqx.simulate(with_kernel, plan)(w, x, sizes)
            _, stats = jqx.calibrate(with_kernel, plan)(w, x, sizes)
            return out, simulated, jax.grad(loss, (0, 1))(w, x), stats

        q = jqx.quantize_params(w, plan)
        out, simulated, (dw, dx), _ = run(q, w, x)
        (site,) = plan.sites
        key = site.operands[0].key
        mapped = jqx.map_channels(with_kernel, plan, {key: jqx.ChannelMap(jnp.ones(128))})
        assert jqx.make_plan(mapped, policy)(w, x, sizes).sites == plan.sites
    known = jqx.make_plan(lambda w, *args: grouped(args[0], w, args[1]), policy)(w, x, sizes)
    assert plan.weights == known.weights and plan.skipped == ()
    assert site.op == "ragged_dot"
    rows = jqx.QTensor.quantize(x, site.operands[0].spec)
    np.testing.assert_array_equal(out, jqx.ragged_dot(rows, q, sizes))
    np.testing.assert_allclose(simulated, out, rtol=1e-5, atol=1e-4)
    # The derivative of the function, of rounded operands, and not that of the kernel.
    dy, real_rows = 2 * np.asarray(simulated), rows.dequantize()
    for group, part in ((0, slice(64)), (2, slice(64, None))):
        real = q.dequantize()[group]
        np.testing.assert_allclose(dw[group], real_rows[part].T @ dy[part], rtol=1e-4, atol=1e-2)
        np.testing.assert_allclose(dx[part], dy[part] @ real.T, rtol=1e-4, atol=1e-2)


@jax.numpy_dtype_promotion("standard")
def test_training_rounds_all_three_products_in_place_of_a_kernel():
    args = normal(0, 3, 128, 128), normal(1, 256, 128), jnp.array([64, 0, 192])
    recipe = jqx.recipes.int8()

    def gradients(f):
        def loss(w, x):
            return (jqx.train(f, recipe.policy, recipe)(w, {}, x, args[2]) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(*args[:2])

    def direct(w, x, sizes):
        return grouped(x, w, sizes)

    with primitive_rules({"gmm": grouped}):
        own = gradients(with_kernel)
    jax.tree.map(np.testing.assert_array_equal, own, gradients(direct))


def test_what_is_inside_of_a_kernel_is_named_and_how_to_reach_it():
    args = normal(0, 3, 128, 128), normal(1, 256, 128), jnp.array([64, 0, 192])
    words = "inside `pallas_call`", "jqx.extend.primitive_rules"
    assert_error(lambda: jqx.make_plan(with_kernel, POLICY)(*args), *words)


def test_a_function_that_does_not_stand_for_the_jitted_one_is_refused():
    w, x, sizes = normal(0, 3, 128, 128), normal(1, 256, 128), jnp.array([64, 0, 192])
    for f, *words in (
        (lambda x, w, sizes: x[:3], "for 'gmm'", "float32[3, 128]", "float32[256, 128]"),
        (lambda x, w: x, "`f` does not take these arguments"),
    ):
        with primitive_rules({"gmm": f}):
            assert_error(
                lambda: jqx.make_plan(with_kernel, POLICY)(w, x, sizes),
                "extend.primitive_rules",
                *words,
                error=(TypeError, ValueError),
            )


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
