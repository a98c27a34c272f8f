"""Transforms through every control-flow form, against quantization by hand, bit by bit; the
backward pass of `simulate(..., backward=)`; and the walk over equations beside what JAX finds out.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src import compat
from jqx._src.transforms.walk import Domain, bodies, walk

from ..arrays import assert_same, on_device
from ..models.forms import (
    FORMS,
    LAYERS,
    POLICIES,
    UNTAKEN,
    WEIGHT,
    WHILES,
    K,
    act,
    by_hand,
    function,
    gradients,
    matmul,
    reference,
    rows,
    together,
    weights,
)
from ..models.transforms import mlp, mlp_params, normal, product
from .test_shard_map import FORMS as ON_DEVICES
from .test_shard_map import function as on_devices

forms = pytest.mark.parametrize("name", FORMS)
BOTH = "weights and activations"
slow = pytest.mark.slow
policies = pytest.mark.parametrize("policy", [pytest.param("weights", marks=slow), BOTH])
MODES = {"eager": lambda *functions: lambda *args: [f(*args) for f in functions], "jit": together}
modes = pytest.mark.parametrize("mode", [pytest.param("eager", marks=slow), "jit"])
ways = pytest.mark.parametrize(
    ("policy", "mode"),
    [
        pytest.param("weights", "jit", marks=slow),
        pytest.param(BOTH, "eager", marks=slow),
        (BOTH, "jit"),
    ],
)
CUSTOM = ("custom_jvp", "custom_vjp", "custom_vmap")


def plan_of(name, policy=BOTH):
    return jqx.make_plan(function(name), POLICIES[policy])(weights(), rows())


def simulated(name, policy=BOTH, **options):
    return jqx.simulate(function(name), plan_of(name, policy), "dynamic", **options)


@pytest.mark.slow
def test_the_numbers_are_quantized_with_loss_and_exactly():
    w, x = weights(), rows()
    for name in FORMS:
        exact = function(name)(w, x)
        for policy in POLICIES:
            actual = reference(name, policy)(w, x)
            with jax.enable_x64(True):
                wide = reference(name, policy)(*(on_device(np.float64(a)) for a in (w, x)))
            assert_same(jax.tree.map(np.float64, actual), jax.tree.map(np.asarray, wide))
            pairs = zip(jax.tree.leaves(exact), jax.tree.leaves(actual), strict=True)
            assert not all(np.array_equal(a, b) for a, b in pairs), name


@forms
def test_every_contraction_is_planned(name):
    plan = plan_of(name)
    assert plan.skipped == () and [weight.path for weight in plan.weights] == [""]
    assert len({site.address for site in plan.sites}) == len(plan.sites) > 0
    assert plan.weights[0].spec.granularity == jqx.per_axis(0, 2)


@pytest.mark.many
@forms
@modes
def test_calibration_returns_the_float_result_and_sees_every_activation(name, mode):
    plan = plan_of(name)

    def calibrated(w, x):
        out, stats = jqx.calibrate(function(name), plan)(w, x)
        return out, jqx.affines(plan, jqx.merge_stats(plan, stats, stats))

    (out, affines), expected = MODES[mode](calibrated, function(name))(weights(), rows())
    assert_same(out, expected)
    for affine in affines.values():
        np.testing.assert_array_equal(affine.scale, np.full_like(affine.scale, 0.25))


def observed(name):
    """A plan of static activations, and their statistics."""
    policy = jqx.Policy([jqx.Rule(weight=None, activation=jqx.QSpec(jnp.int8))])
    plan = jqx.make_plan(function(name), policy)(weights(), rows())
    return plan, jax.jit(jqx.calibrate(function(name), plan))(weights(), rows())[1]


def largest_inputs(*steps):
    """The largest magnitude that each layer of a chain sees."""
    w, x, largest = np.asarray(weights()), np.asarray(rows()), []  # few bits: every sum is exact
    for i in steps:
        largest.append(float(np.abs(x).max()))
        x = np.clip(x @ w[i], -2, 2)
    return largest


def test_each_layer_of_a_scan_over_weights_has_statistics_of_its_own_and_other_loops_merge_them():
    layers, loop = largest_inputs(0, 1), max(largest_inputs(0, 0))
    scans = "scan_xs", "remat_in_scan", "while_in_scan", "scan_in_while"
    for name, largest, count in [
        *((name, layers, [1, 1]) for name in scans),
        ("stacks_in_scan", [[x] for x in layers], [[1], [1]]),
        ("scan_constant", loop, 2),
        ("fori", loop, 2),
        ("scan_carried", max(largest_inputs(1, 1)), 2),
        ("scan_in_scan", [loop], [2]),  # the outer loop merges the statistics of each layer
    ]:
        plan, stats = observed(name)
        (entry,) = stats.values()
        largest = np.reshape(np.float32(largest), (*np.shape(largest), 1, 1))
        np.testing.assert_array_equal(entry.largest, largest, strict=True)
        np.testing.assert_array_equal(entry.observed, count)
        decide = lambda s, plan=plan: jqx.affines(plan, jqx.merge_stats(plan, s, s))  # noqa: E731
        (affine,) = jax.jit(decide)(stats).values()
        np.testing.assert_array_equal(affine.scale, largest / np.float32(127))


@pytest.mark.parametrize("name", UNTAKEN)
def test_a_branch_that_is_not_taken_leaves_nothing_and_has_no_scale(name):
    plan, stats = observed(name)
    assert 0 in [int(np.min(entry.observed)) for entry in stats.values()]
    with pytest.raises(ValueError, match="never observed"):
        jqx.affines(plan, jqx.merge_stats(plan, stats, stats))


LEARNED = on_device([[[2.0**-7]], [[2.0**-6]]], np.float32)


def test_scales_learned_for_each_layer_get_gradients_through_a_scan():
    spec = jqx.QSpec(jnp.int8, gradient=jqx.gradients.lsq)
    policy = jqx.Policy([jqx.Rule(weight=WEIGHT, activation=spec)])
    f, w, x = function("scan_xs"), weights(), rows()
    plan = jqx.make_plan(f, policy)(w, x)
    (key,) = plan.static_specs()

    def loss(scales):
        y, _ = jqx.simulate(f, plan, {key: jqx.calibrators.Affine(scales)})(w, x)
        return jnp.sum(y**2)

    def unrolled(scales):
        y = x
        for i in range(LAYERS):
            affines = {":dot_general:lhs": jqx.calibrators.Affine(scales[i])}
            y = act(jqx.simulate(product, policy, affines)(w[i], y))
        return jnp.sum(y**2)

    actual, expected = together(jax.grad(loss), jax.grad(unrolled))(LEARNED)
    assert np.all(np.asarray(expected) != 0)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.many
@forms
@ways
def test_what_is_simulated_is_what_is_quantized_by_hand(name, policy, mode):
    functions = simulated(name, policy), reference(name, policy)
    assert_same(*MODES[mode](*functions)(weights(), rows()))


@pytest.mark.many
@forms
@ways
def test_what_is_converted_is_what_is_quantized_by_hand(name, policy, mode):
    """Whether the weights are given as codes or in float."""
    plan, w, x = plan_of(name, policy), weights(), rows()
    f, q = jqx.convert(function(name), plan, "dynamic"), jqx.quantize_params(w, plan)
    assert isinstance(q, jqx.QTensor)
    ways = lambda q, w, x: f(q, x), lambda q, w, x: f(w, x)
    expected, *actual = MODES[mode](lambda q, w, x: reference(name, policy)(w, x), *ways)(q, w, x)
    for out in actual:
        assert_same(out, expected)


@pytest.mark.many
@forms
@pytest.mark.parametrize("transform", [jqx.simulate, jqx.convert])
def test_a_mapped_function_is_that_of_each_row(name, transform):
    f = transform(function(name), plan_of(name), "dynamic")

    def each(w, x):
        results = [reference(name, BOTH)(w, row) for row in x]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *results)

    assert_same(*together(jax.vmap(f, (None, 0)), each)(weights(), rows(2)))


@pytest.mark.many("backward")
@pytest.mark.parametrize(
    "name", [name for name in FORMS if FORMS[name] not in WHILES and name not in CUSTOM]
)
@pytest.mark.parametrize("backward", [None, jnp.float32])
@policies
def test_gradients_of_what_is_simulated_are_those_of_what_is_quantized_by_hand(
    name, backward, policy
):
    functions = simulated(name, policy, backward=backward), reference(name, policy)
    assert_same(*gradients(*functions)(weights(), rows()))


@pytest.mark.parametrize("name", CUSTOM)
def test_the_derivative_rule_of_the_user_is_kept(name):
    """It doubles the derivative, and sees what the function sees: rounded weights, float rows."""
    w, x = weights(), rows()
    floats, integers = gradients(simulated(name), simulated(name, backward=jnp.float32))(w, x)
    assert_same(integers, floats)
    dw, dx = floats
    on_grid = jnp.round(w * 4) / 4
    np.testing.assert_array_equal(dx, jnp.broadcast_to(2 * on_grid[0].sum(axis=1), x.shape))
    np.testing.assert_array_equal(dw[0], jnp.broadcast_to(2 * x.sum(axis=0)[:, None], w[0].shape))
    np.testing.assert_array_equal(dw[1], np.zeros_like(dw[1]))


def assert_by_hand(f, real, plan, w, x):
    """Simulated and converted, a function of a product is that of the product by hand."""

    @jax.jit
    def run(w, x):
        converted = jqx.convert(real, plan, "dynamic")(jqx.quantize_params(w, plan), x)
        expected = f(by_hand(True), jnp.round(w * 4) / 4, x)
        return expected, jqx.simulate(real, plan, "dynamic")(w, x), converted

    expected, simulated, converted = run(w, x)
    assert_same(simulated, expected)
    assert_same(converted, expected)
    return expected


def test_a_contraction_in_the_condition_of_a_loop_is_no_site_of_its_body():
    """On the grid of activations every row is zero: the loop would end before its first step."""

    def f(dot, w, x):
        layer = jax.jit(lambda x: dot(x, w[0]) + 1)
        goes_on = lambda s: (s[0] < 1) & (s[1][0] @ s[1][0] > 1 / 16)  # noqa: E731
        return jax.lax.while_loop(goes_on, lambda s: (s[0] + 1, layer(s[1])), (0, x))[1]

    real, w = functools.partial(f, matmul), weights()
    x = on_device(np.full((2, K), 1 / 8, np.float32))
    plan = jqx.make_plan(real, POLICIES[BOTH])(w, x)
    assert [skip.reason for skip in plan.skipped] == ["it is in the condition of a while loop"]
    expected = assert_by_hand(f, real, plan, w, x)
    assert not np.array_equal(expected, x)


def test_what_is_differentiated_inside_is_quantized():
    """The backward product is a site too: it quantizes the cotangent, which is on the grid."""

    def f(dot, w, x):
        value, gradient = jax.value_and_grad(lambda x: dot(x, w[0]).sum())(x)
        return value, x - gradient

    real, w, x = functools.partial(f, matmul), weights(), rows()
    plan = jqx.make_plan(real, POLICIES[BOTH])(w, x)
    assert len(plan.sites) == 2 and plan.skipped == ()
    expected = assert_by_hand(f, real, plan, w, x)
    assert not np.array_equal(expected[1], jax.jit(real)(w, x)[1])


@pytest.mark.many
@pytest.mark.parametrize("name", FORMS)
def test_the_forward_pass_is_on_integers(name):
    """By jaxpr: no contraction of floats is left, but inside custom derivatives."""
    f, w, x = simulated(name, backward=jnp.float32), weights(), rows()
    assert_same(*together(f, reference(name, BOTH))(w, x))
    text = jax.jit(f).lower(w, x).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    if name not in CUSTOM:
        assert products and not any("xf32" in line.split("->")[0] for line in products)


def test_the_backward_pass_contracts_in_the_dtype_asked_for():
    plan = jqx.make_plan(mlp, jqx.presets.w8a8())(mlp_params(), normal(3, 4, 16))
    f = jqx.simulate(mlp, plan, "dynamic", backward=jnp.bfloat16)
    loss = lambda p, x: jnp.sum(f(p, x) ** 2)  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(mlp_params(), normal(3, 4, 16)).as_text()
    products = [line.split(":")[-1] for line in text.splitlines() if "dot_general" in line]
    kinds = [
        "".join(k for k in ("xi8>", "xbf16>", "xf32>") if k in p.split("->")[0]) for p in products
    ]
    assert sorted(kinds) == ["xbf16>"] * 3 + ["xi8>"] * 2


def test_learned_scales_get_the_same_gradients():
    spec = jqx.QSpec(jnp.int8, gradient=jqx.gradients.lsq)
    weight = jqx.QSpec(jnp.int4, jqx.per_channel(), gradient=jqx.gradients.lsq)
    policy = jqx.Policy([jqx.Rule(weight=weight, activation=spec)])
    f, w, x = function("scan_xs"), weights(), rows()
    plan = jqx.make_plan(f, policy)(w, x)
    (key,) = plan.static_specs()
    quarters = on_device(np.full((2, 1, 6), 0.25, np.float32))
    scales = {key: LEARNED, ":weight": quarters}

    def gradient(**options):
        return jax.grad(lambda affines: jqx.simulate(f, plan, affines, **options)(w, x)[0].sum())

    affines = {name: jqx.calibrators.Affine(scale) for name, scale in scales.items()}
    expected, actual = together(gradient(), gradient(backward=jnp.float32))(affines)
    assert all(np.any(np.asarray(g.scale)) for g in expected.values())
    assert_same(actual, expected)


def test_quantized_weights_may_be_given():
    plan, f = plan_of("scan_xs"), simulated("scan_xs", backward=jnp.float32)
    of_codes = lambda w, x: f(jqx.quantize_params(w, plan), x)  # noqa: E731
    assert_same(*together(of_codes, reference("scan_xs", BOTH))(weights(), rows()))


def test_weights_used_elsewhere_are_real_there():
    f = lambda w, x: (jnp.sum(x @ w[0]) + jnp.sum(w**2), w)  # noqa: E731
    w, x = weights(), rows()
    plan = jqx.make_plan(f, POLICIES[BOTH], unsupported="dequantize")(w, x)
    integers = jqx.simulate(f, plan, "dynamic", backward=jnp.float32)
    assert_same(*together(integers, jqx.simulate(f, plan, "dynamic"))(w, x))


def test_bad_arguments_are_refused():
    plan = plan_of("jitted")
    for dtype, fact in [(jnp.int8, "floating point"), ("fast", "not a dtype")]:
        with pytest.raises(TypeError, match=fact):
            jqx.simulate(function("jitted"), plan, "dynamic", backward=dtype)
    noisy = jqx.QSpec(jnp.int8, gradient=jqx.gradients.stochastic)
    policy = jqx.Policy([jqx.Rule(activation=noisy)])
    with pytest.raises(ValueError, match="which this estimator does not use"):
        jqx.simulate(function("jitted"), policy, "dynamic", backward=jnp.float32)(weights(), rows())


PRODUCTS = {
    "x @ w": ("bk,kn->bn", (6, 8), (8, 5)),
    "a tied head": ("bk,nk->bn", (6, 8), (5, 8)),
    "a tied head of sequences": ("btk,nk->btn", (2, 3, 8), (5, 8)),
    "heads": ("btk,khd->bthd", (2, 3, 8), (8, 2, 5)),
    "heads, joined": ("bthd,hdk->btk", (2, 3, 2, 5), (2, 5, 8)),
    "heads first": ("btk,hdk->bhtd", (2, 3, 8), (2, 5, 8)),
    "experts": ("ebk,ekn->ebn", (3, 4, 8), (3, 8, 5)),
    "experts last": ("bke,nek->ben", (4, 8, 3), (5, 3, 8)),
    "columns first": ("kb,kn->nb", (8, 6), (8, 5)),
    "two sums": ("jbk,nkj->bn", (3, 6, 8), (5, 8, 3)),
    "a row": ("k,kn->n", (8,), (8, 5)),
    "a column": ("bk,k->b", (6, 8), (8,)),
    "outer": ("b,n->bn", (6,), (5,)),
}


def of_products(p, x):
    """One result of each: of all patterns, a convolution, groups of rows, loops and remat."""
    actual = {
        name: jnp.einsum(pattern, x[name], p[name]) for name, (pattern, *_) in PRODUCTS.items()
    }
    image, rows = x["heads first"][..., None], x["columns first"].T
    actual["conv"] = jax.lax.conv(image.transpose(0, 3, 1, 2), p["conv"], (1, 1), "SAME")
    if "ragged" in p:
        sizes = jnp.array([2, 4], jnp.int32)
        actual["ragged"] = jax.lax.ragged_dot(rows, p["ragged"], sizes)
    step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.T), None))
    actual["scan"] = jax.lax.scan(step, rows, p["scan"])[0]
    actual["vmap"] = jax.vmap(lambda row, w: row @ w.T, (0, None))(rows, p["scan"][0])
    return actual


@pytest.mark.parametrize("around", ["jit", "vmap"])
def test_a_backward_pass_in_bfloat16_runs_for_every_order_of_dimensions(around):
    x = {name: normal(i, *shape) for i, (name, (_, shape, _)) in enumerate(PRODUCTS.items())}
    p = {name: normal(50 + i, *shape) for i, (name, (*_, shape)) in enumerate(PRODUCTS.items())}
    p |= {"conv": normal(80, 4, 1, 3, 3), "scan": normal(82, 2, 8, 8)}
    if around == "jit":  # JAX maps the backward pass of no other
        p["ragged"] = normal(81, 2, 8, 5)
    plan = jqx.make_plan(of_products, jqx.presets.w8a8_dynamic())(p, x)

    def gradients(dtype):
        simulated = jqx.simulate(of_products, plan, backward=dtype)
        loss = lambda p, x: sum(jnp.sum(jnp.sin(y)) for y in simulated(p, x).values())  # noqa: E731
        return jax.grad(loss, (0, 1))

    def both(p, x):
        return gradients(jnp.bfloat16)(p, x), gradients(jnp.float32)(p, x)

    if around == "vmap":
        both = jax.vmap(both, ({name: -1 for name in p}, None))
        p = jax.tree.map(lambda w: np.stack([w, 2 * np.asarray(w)], -1), p)
    for integers, right in zip(*map(jax.tree.leaves, jax.jit(both)(p, x)), strict=True):
        size = np.abs(right).max()
        assert np.abs(integers - right).max() <= 2**-6 * size  # of products of two rounded factors
        assert np.linalg.norm(integers - right) <= 2**-7 * np.linalg.norm(right)


class Dependence(Domain[frozenset]):
    """Which operands of a function a value depends on."""

    nothing = frozenset()

    def evaluate(self, eqn, values, where):
        return [functools.reduce(operator.or_, values, self.nothing)] * len(eqn.outvars)

    def start(self, eqn, values, where):
        return values

    def carry(self, eqn, values, results, where):
        return [a | b for a, b in zip(values, results, strict=True)]

    def returned(self, eqn, values, results, where):
        if eqn.primitive.name != "cond":
            return results[-1]
        return [functools.reduce(operator.or_, x, values[0]) for x in zip(*results, strict=True)]


def traced(f, *args):
    return compat.open_jaxpr(jax.make_jaxpr(f)(*args))[0]


def beside(f):
    """A function with one result that depends on all operands, and one that depends on each."""
    return lambda w, x, y: (f(w, x), w.sum(), (y @ w[0])[0])


CASES = {name: function(name) for name in FORMS} | {
    f"{name} on devices": on_devices(name) for name in ON_DEVICES
}


@pytest.mark.parametrize("name", CASES)
def test_what_results_depend_on_is_what_jax_needs_for_them(name):
    w, x = weights(), rows()
    jaxpr = traced(beside(CASES[name]), w, x, x)
    actual = walk(Dependence(), jaxpr, [frozenset({i}) for i in range(3)])
    for i, operands in enumerate(actual):
        used = [i == j for j in range(len(actual))]
        needed = {k for k, is_needed in enumerate(compat.needed(jaxpr, used)) if is_needed}
        assert operands == needed


def test_a_value_that_later_steps_mix_into_another_is_found():
    def f(a, b, c):
        def step(carry, _):
            a, b, c = carry
            return (a, a + b, b + c), c

        return lax.scan(step, (a, b, c), None, length=3)

    actual = walk(Dependence(), traced(f, 1.0, 2.0, 3.0), [frozenset(i) for i in "abc"])
    assert [*map("".join, map(sorted, actual))] == ["a", "ab", "abc", "abc"]


class Trace(Domain[str]):
    """What is computed from what, as text, step by step."""

    unrolls = True

    def literal(self, atom):
        return str(atom.val)

    def evaluate(self, eqn, values, where):
        return [f"{eqn.primitive.name}{list(where.steps)}({', '.join(values)})"]

    def part(self, value, step):
        return f"{value}[{step}]"

    def stack(self, values, aval):
        return f"{list(aval.shape)}: {' '.join(values)}"


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_of_scans_are_walked_in_their_order_if_the_domain_unrolls_them(reverse):
    def f(x):
        return lax.scan(lambda c, x: (lax.add(c, x), lax.neg(c)), np.float32(0), x, reverse=reverse)

    order = (1, 0) if reverse else (0, 1)
    last, stack = walk(Trace(), traced(f, np.ones(2, np.float32)), ["x"])
    first, second = order
    inner = f"add[{first}](0.0, x[{first}])"
    assert last == f"add[{second}]({inner}, x[{second}])"
    negated = {first: f"neg[{first}](0.0)", second: f"neg[{second}]({inner})"}
    assert stack == f"[2]: {negated[0]} {negated[1]}"


def test_the_functions_of_an_equation_have_its_operands():
    def f(n, x):
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * x), (0, x))

    (eqn,) = (eqn for eqn in traced(f, 3, 2.0).eqns if eqn.primitive.name == "while")
    condition, step = bodies(eqn)
    assert [len(compat.open_jaxpr(x.jaxpr)[0].invars) for x in (condition, step)] == [3, 3]
    assert (condition.part, step.part) == ((-1,), ())
    assert condition.operands[-2:] == step.operands[-2:] and condition.operands != step.operands
