"""Contractions that stay in float and weights that are refused: each is named with the reason.

Plans speak of live code: what no result and no effect needs is no part of them.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

import jqx

from ..arrays import assert_same
from ..models.forms import FORMS, function, rows, weights
from ..models.transforms import eighths, normal, product
from .sources import POLICY, assert_transformed, rounded

X = eighths(1, 4, 8)
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
        return h @ (w + x[:, :1].mean()), x @ (w * x[0][:, None])

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
    reason_by_path = {item.path: item.reason for item in plan.unreached}
    assert reason_by_path.keys() == {"depthwise", "g", "v", "bias", "unused", "kept"}
    assert reason_by_path["depthwise"].startswith(
        "`mul` uses it, and only operands of contractions"
    )
    assert (
        reason_by_path["unused"] == "f does not use it" and reason_by_path["kept"] == "f returns it"
    )
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


KINDS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
REST_OPTIONAL = jqx.Policy([jqx.Rule("w", weight="int8"), jqx.Rule(weight="int8", optional=True)])


def inside(value, ancestors=()):
    """Yields the jaxprs that an object holds, in containers and attributes of any depth."""
    if any(value is other for other in ancestors) or isinstance(
        value, (str, bytes, int, float, type)
    ):
        return
    ancestors = (*ancestors, value)
    if hasattr(value, "eqns"):
        yield getattr(value, "jaxpr", value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from inside(item, ancestors)
    elif isinstance(value, dict):
        yield from inside(list(value.values()), ancestors)
    elif type(value).__name__ == "CustomRoot":
        yield from inside(vars(value), ancestors)


def count(jaxpr):
    """Counts products in a jaxpr, and in everything that it holds."""
    return sum(
        (eqn.primitive.name in KINDS) + sum(map(count, inside(eqn.params))) for eqn in jaxpr.eqns
    )


def root(matrix_of):
    def f(params, x):
        y = lax.custom_root(
            lambda y: y @ matrix_of(params, x) - x[0],
            x[0],
            lambda g, first: g(first) + first,
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        )
        return x @ params["w"] + y[None]

    return f


def linear_solve(matrix_of):
    def f(params, x):
        matrix = matrix_of(params, x)
        y = lax.custom_linear_solve(lambda v: matrix @ v, x[0], lambda f, b: f(b))
        return x @ params["w"] + y[None]

    return f


def weight_of(params, x):
    return params["w"]


def squares_of(params, x):
    return x.T @ x


def batched_by_hand(params, x):
    product = custom_vmap(lambda w, x: x @ w)
    product.def_vmap(lambda n, b, w, x: (x @ w, True))
    return product(params["w"], x) @ params["w"] + product(x, x)


def kernel(params, x):
    def multiply(a, b, out):
        out[...] = a[...] @ b[...]

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    y = pl.pallas_call(multiply, out_shape=shape, interpret=True)(x, params["w"])
    return y @ params["w"]


def composite(params, x):
    product = lax.composite(lambda w, x: x @ w, name="product")
    return product(params["w"], x) @ params["w"] + product(x, x)


def named(params, x):
    return x @ lax.optimization_barrier(checkpoint_name(params["w"], "w")) @ params["w"].T


OTHERS = {
    "root": root(weight_of),
    "root_of_activations": root(squares_of),
    "solve": linear_solve(weight_of),
    "solve_of_activations": linear_solve(squares_of),
    "batched_by_hand": batched_by_hand,
    "kernel": kernel,
    "composite": composite,
    "named": named,
}
BY_SQUARES = {"w": normal(0, 8, 8)}, normal(1, 8, 8)


@pytest.mark.parametrize("f", OTHERS.values(), ids=OTHERS)
def test_what_other_primitives_hold_is_listed(f):
    plan = jqx.make_plan(f, REST_OPTIONAL, unsupported="dequantize")(*BY_SQUARES)
    assert len(plan.sites) + len(plan.skipped) == count(jax.make_jaxpr(f)(*BY_SQUARES).jaxpr)
    assert plan.sites


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_entered(name):
    args = weights(), rows()
    plan = jqx.make_plan(function(name), jqx.presets.w8a16())(*args)
    assert len(plan.sites) + len(plan.skipped) == count(jax.make_jaxpr(function(name))(*args).jaxpr)


def test_what_is_inside_of_such_a_primitive_says_so():
    for f, name in ((root(squares_of), "oot"), (linear_solve(squares_of), "custom_linear_solve")):
        reasons = {item.reason for item in jqx.make_plan(f, REST_OPTIONAL)(*BY_SQUARES).skipped}
        if name == "oot" and len(reasons) == 1 and "no weight reaches" in min(reasons):
            continue  # until jax 0.12 the root is an ordinary function
        assert any(f"{name}`, which jqx does not look into" in reason for reason in reasons)


def test_reasons_are_known_inside_of_loops():
    def in_scan(p, x):
        u = p["u"] / jnp.linalg.norm(p["u"], axis=0, keepdims=True)
        h, _ = lax.scan(lambda h, s: (h @ u @ jnp.sin(s), None), x, p["s"])
        return h @ p["w"]

    def in_while(p, x):
        u = jnp.sin(p["u"])
        return lax.fori_loop(0, 3, lambda i, h: h @ u, x) @ p["w"]

    def in_cond(p, x):
        u = jnp.sin(p["u"])
        return lax.cond(x[0, 0] > 0, lambda: x @ u, lambda: x) @ p["w"]

    def carried(p, x):
        step = lambda c, _: ((c[0] @ c[1], jnp.sin(c[1])), None)  # noqa: E731
        return lax.scan(step, (x, p["u"]), None, length=3)[0][0] @ p["w"]

    p = {"w": normal(0, 8, 8), "u": normal(1, 8, 8), "s": normal(2, 3, 8, 8)}
    expected = {
        in_scan: ["'u' by", "'s' by `sin`"],
        in_while: ["'u' by `sin`"],
        in_cond: ["'u' by `sin`"],
        carried: ["'u' by `sin`"],
    }
    for f, names in expected.items():
        plan = jqx.make_plan(f, REST_OPTIONAL)
        reasons = [item.reason for item in plan(p, normal(3, 8, 8)).skipped]
        assert len(reasons) == len(names)
        for reason, name in zip(reasons, names, strict=True):
            assert name in reason, f.__name__


FIRST = jnp.array([0, 1])
ELSEWHERE = {
    "decay": (lambda w, x: (x @ w).sum() + jnp.sum(w**2), "reaches `integer_pow`"),
    "callback": (
        lambda w, x: (jax.debug.callback(len, w), x @ w)[1],
        "reaches `debug_callback`",
    ),
    "branch": (
        lambda w, x: x @ w + lax.cond(x[0, 0] > 0, lambda: w, lambda: 2 * w)[:1],
        "`add`",
    ),
    "one use": (
        lambda w, x: jnp.sort(w, axis=0)[:2] @ x[:2].T @ x[:2] @ w.T,
        "reaches (a )?`sort`",
    ),
    "single numbers": (lambda w, x: x @ w + w[FIRST, FIRST].sum(), "reaches `reduce_sum`"),
    "solve": (
        lambda w, x: x @ w + lax.custom_linear_solve(lambda v: v @ w, x, lambda f, b: f(b)),
        "reaches `custom_linear_solve`",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_weight_used_elsewhere_is_simulated_but_converted_only_where_asked(name):
    f, fact = ELSEWHERE[name]
    w = normal(0, 8, 8)
    with pytest.raises(NotImplementedError, match=f"the weight '', .*{fact}"):
        jqx.make_plan(f, POLICY)(w, X)
    plan = jqx.make_plan(f, POLICY, unsupported="dequantize")(w, X)
    q = jqx.quantize_params(w, plan)
    for params in (q, w):
        with pytest.raises(NotImplementedError, match=fact) as info:
            jqx.convert(f, plan)(params, X)
        assert 'unsupported="dequantize"' in str(info.value)
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
    assert "of 'w'" in text and "test_reasons.py" in text and "jqx.Rule('w')" in text


def test_the_error_leaves_out_a_line_that_jax_does_not_have():
    f = lambda w, x: x @ w + jnp.sort(w).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="reaches `sort`") as info:
        jqx.make_plan(f, POLICY)(normal(0, 8, 6), X)
    given = next(line for line in str(info.value).splitlines() if "given:" in line)
    assert given.endswith(str(POLICY.rules[0].weight.resolve(2, (1,))))


def test_a_weight_of_which_single_numbers_are_taken_stays_codes():
    """Where a scale cannot follow, planning says so as converting does."""
    i = jnp.array([1, 2])
    f = lambda w, x: x @ w + (w[i, i] @ x[:2, :6])[None]  # noqa: E731
    w = normal(0, 8, 6)
    plan = jqx.make_plan(f, POLICY)(w, X)
    actual = jqx.convert(f, plan)(jqx.quantize_params(w, plan), X)
    np.testing.assert_allclose(actual, jqx.simulate(f, plan)(w, X), rtol=1e-5)
    blocks = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_group(4)))])
    with pytest.raises(NotImplementedError, match=r"the weight '', .* `gather`"):
        jqx.make_plan(f, blocks)(w, X)


@pytest.mark.parametrize("size", [2, 25])
def test_a_qtensor_in_other_blocks_is_refused(size):
    """A tail of 4 in blocks of 32 has as many scales as 4 blocks of 25."""
    w, x = normal(0, 100, 4), normal(1, 2, 100)
    given = jqx.QSpec(jnp.int8, jqx.per_block({0: 32, 1: 1}, tail=True))
    planned = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_group(size)))])
    plan = jqx.make_plan(product, planned)(w, x)
    with pytest.raises(ValueError, match=rf"int8 per_group\({size}\)"):
        jqx.convert(product, plan)(jqx.QTensor.quantize(w, given), x)


def test_products_that_codes_cannot_enter_go_on_in_float():
    def f(p, x):
        return jax.grad(lambda x: jnp.sin(x @ p["w"].T).sum())(x)

    w, x = normal(0, 64, 256), normal(1, 2, 256)
    params = {"w": jqx.QTensor.quantize(w, jqx.QSpec("int4", jqx.per_axis(0, 1)))}
    with pytest.raises(ValueError, match="varies along a contracted axis"):
        jqx.convert(f, jqx.Policy([]))(params, x)
    actual = jqx.convert(f, jqx.Policy([]), unsupported="dequantize")(params, x)
    expected = f({"w": params["w"].dequantize()}, x)
    # Sums of 256 terms in sin, whose derivative is 1 at most, then of 64: by two programs.
    terms = jnp.abs(params["w"].dequantize())
    allowed = 2 * 2.0**-24 * (256 * (jnp.abs(x) @ terms.T) @ terms + 64 * terms.sum(0)[None])
    assert (jnp.abs(actual - expected) <= allowed).all()


W, SQUARE = normal(0, 8, 8) / 4, eighths(1, 8, 8)


@jax.custom_vjp
def with_vjp(w, x):
    return x @ w, x @ x


with_vjp.defvjp(
    lambda w, x: (with_vjp(w, x), (w, x)),
    lambda residuals, ct: (residuals[1].T @ ct[0], ct[0] @ residuals[0].T),
)


@jax.custom_jvp
def with_jvp(w, x):
    return x @ w, x @ x


with_jvp.defjvp(
    lambda primals, tangents: (with_jvp(*primals), (tangents[1] @ primals[0], tangents[1]))
)


def scanned(w, x):
    (a, _), _ = lax.scan(lambda c, _: ((c[0] @ w, c[1] @ w @ w), c[0] @ w), (x, x), None, length=2)
    return a


def looped(w, x):
    """A carried value that nothing needs, and a product that no step hands on."""

    def body(carry):
        i, a, b = carry
        _ = a @ w
        return i + 1, a @ w, b @ w @ w

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, x, x))[1]


def looped_in_a_scan(w, x):
    return lax.scan(lambda c, _: (looped(w, c), None), x, None, length=1)[0]


def conditional(w, x):
    branches = lambda w, x: (x @ w, x @ w @ w), lambda w, x: (x @ w, x)
    return lax.cond(x[0, 0] > 0, *branches, w, x)[0]


LIVE = {
    "at top level": (lambda w, x: [x @ w, x @ w @ w][0], 1),
    "jit": (lambda w, x: jax.jit(lambda w, x: (x @ w, x @ x))(w, x)[0], 1),
    "an operand of jit": (lambda w, x: jax.jit(lambda w, x, y: x @ w)(w, x, x @ w @ w), 1),
    "an operand of a branch": (
        lambda w, x: lax.cond(x[0, 0] > 9, lambda y, z: z, lambda y, z: z @ w, x @ w @ w, x),
        1,
    ),
    "scan": (scanned, 1),
    "while": (looped, 1),
    "while in a scan": (looped_in_a_scan, 1),
    "cond": (conditional, 2),
    "checkpoint": (lambda w, x: jax.checkpoint(lambda w, x: (x @ w, x @ x))(w, x)[0], 1),
    "custom_vjp": (lambda w, x: with_vjp(w, x)[0], 1),
    "custom_jvp": (lambda w, x: with_jvp(w, x)[0], 1),
    "a condition that counts": (
        lambda w, x: lax.while_loop(lambda c: c[1].sum() < -9, lambda c: (c[0], c[1] @ w), (x, x)),
        1,
    ),
}


@pytest.mark.parametrize("name", LIVE)
def test_dead_contractions_are_in_no_plan_and_the_result_is_as_before(name):
    f, count = LIVE[name]
    plan = jqx.make_plan(f, POLICY)(W, SQUARE)
    assert (len(plan.sites), plan.skipped) == (count, ())
    assert f"{count} of {count} contractions quantized" in str(plan)
    expected = jax.jit(f)(rounded(W), SQUARE)
    assert_transformed(f, plan, W, expected, SQUARE)
    assert_same(jqx.calibrate(f, plan)(W, SQUARE)[0], f(W, SQUARE))


@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp", "checkpoint", "scan", "at top level"])
def test_gradients_are_those_of_the_function_as_it_stands(name):
    f, _ = LIVE[name]
    loss = lambda f: lambda w, x: jnp.sum(f(w, x) ** 2)  # noqa: E731
    w = jnp.clip(W, -1, 1)
    plan = jqx.make_plan(f, POLICY)(w, SQUARE)
    actual = jax.jit(jax.grad(loss(jqx.simulate(f, plan)), (0, 1)))(w, SQUARE)
    assert_same(actual, jax.jit(jax.grad(loss(f), (0, 1)))(rounded(w), SQUARE))


def test_effects_stay(capsys):
    def f(w, x):
        jax.debug.print("seen {}", (x @ w).shape[0] + 0 * (x @ w).sum())
        ancestors.append(0)
        return x @ w

    ancestors = []
    plan = jqx.make_plan(f, POLICY)(W, SQUARE)
    assert len(plan.sites) == 2  # the product that is printed, and the result
    jqx.convert(f, plan)(W, SQUARE)
    jax.effects_barrier()
    assert "seen 8.0" in capsys.readouterr().out


def test_a_dead_operation_on_a_weight_is_no_reason_to_refuse_it():
    f = lambda w, x: [x @ w, jnp.linalg.norm(w)][0]  # noqa: E731
    q = jqx.quantize_params(W, jqx.make_plan(f, POLICY)(W, SQUARE))
    assert_same(jqx.convert(f, POLICY)(q, SQUARE), f(rounded(W), SQUARE))


def looping(p, x, change):
    """Multiplies by a weight that is carried, and that each step changes."""

    def body(carry):
        i, w, x = carry
        return i + 1, change(w), x @ w @ p["v"]

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, p["w"], x @ p["w"]))[2]


def test_a_weight_that_a_loop_carries_and_changes_is_refused_where_it_is_planned_or_runs():
    params = {"v": W, "w": W.T, "u": W}
    for change in (lambda w: w, lambda w: w * 0.5, lambda w: w.T.T):
        plan = jqx.make_plan(looping, POLICY)(params, SQUARE, change)
        assert {weight.path for weight in plan.weights} == {"v", "w"}
        on_grid = {**params, "v": rounded(W), "w": rounded(W.T)}
        q = jqx.quantize_params(params, plan)
        assert_same(jqx.convert(looping, plan)(q, SQUARE, change), looping(on_grid, SQUARE, change))
    with pytest.raises(NotImplementedError, match=r"the weight 'w', .* reaches `tanh`") as info:
        jqx.make_plan(looping, POLICY)(params, SQUARE, jnp.tanh)
    text = str(info.value)
    assert "test_reasons.py" in text and "jqx.Rule('w')" in text and "'v'" not in text
    assert isinstance(info.value, ValueError)
    spared = jqx.Policy([jqx.Rule("w"), *POLICY.rules])
    plan = jqx.make_plan(looping, spared)(params, SQUARE, jnp.tanh)
    assert [weight.path for weight in plan.weights] == ["v"]


def swapped(w, x):
    """A carried array becomes a weight."""
    return lax.fori_loop(0, 2, lambda i, c: (w[i], c[1] @ c[0]), (jnp.eye(8), x))[1] @ w[0]


AS_CONVERT = {
    "an array that becomes a weight": (swapped, (2, 8, 8)),
    "a weight that becomes another": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: (w[i], c[1] @ c[0]), (w[1], x))[1] @ w[0],
        (2, 8, 8),
    ),
    "a weight that is turned": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: (c[0].T, c[1] @ c[0]), (w, x))[1] @ w,
        (8, 8),
    ),
    "branches of one format": (
        lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda: w, lambda: -w) @ w,
        (8, 8),
    ),
    "a branch": (lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda: w, lambda: w.T) @ w, (8, 8)),
    "a branch and a sum": (
        lambda w, x: x @ w + lax.cond(x[0, 0] > 0, lambda: w, lambda: w.T),
        (8, 8),
    ),
    "steps handed out": (lambda w, x: lax.scan(lambda c, w: (c @ w, w), x, w)[1][0] @ x, (2, 8, 8)),
    "a condition": (
        lambda w, x: lax.while_loop(lambda c: (c @ w).sum() > 9, jnp.cos, x @ w),
        (8, 8),
    ),
    "a sum in a condition": (
        lambda w, x: lax.while_loop(lambda c: (c + w).sum() > 9, jnp.cos, x @ w),
        (8, 8),
    ),
    "a selection": (lambda w, x: x @ w @ jnp.where(x[0, 0] > 0, w, -w), (8, 8)),
    "written to": (lambda w, x: x @ w @ lax.dynamic_update_slice(w, x[:2], (0, 0)), (8, 8)),
    "written": (lambda w, x: x @ w @ lax.dynamic_update_slice(x, w[:2], (0, 0)), (8, 8)),
    "relu": (lambda w, x: x @ w @ jax.nn.relu(w), (8, 8)),
    "another gather": (lambda w, x: x @ w + w[jnp.arange(8), jnp.arange(8)][None], (8, 8)),
    "unstacked": (lambda w, x: x @ jnp.stack([w[0], w[1]])[1] @ w[0], (2, 8, 8)),
    "returned": (lambda w, x: (x @ w, w.T), (8, 8)),
    "padded": (lambda w, x: x @ w @ jnp.pad(w, ((0, 0), (0, 1))), (8, 8)),
}


@pytest.mark.parametrize("name", AS_CONVERT)
def test_what_convert_refuses_is_refused_where_it_is_planned_and_nothing_else(name):
    f, shape = AS_CONVERT[name]
    w = normal(0, *shape) / 4
    plan = jqx.make_plan(f, POLICY, unsupported="dequantize")(w, SQUARE)
    q = jqx.quantize_params(w, plan)
    try:
        jax.eval_shape(jqx.convert(f, plan), q, SQUARE)
    except NotImplementedError:
        with pytest.raises(NotImplementedError, match="the weight '', which the policy quantizes"):
            jqx.make_plan(f, POLICY)(w, SQUARE)
    else:
        assert jqx.make_plan(f, POLICY)(w, SQUARE) == plan
