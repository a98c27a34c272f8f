"""Plain functions, however they are written, against weights rounded by hand, bit by bit."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from ..arrays import on_device
from ..models.transforms import eighths, normal
from .sources import POLICY, STEP, assert_quantized, assert_same, axes_of, cases, rounded

X = eighths(1, 4, 8)
OPTIONAL = jqx.Policy([dataclasses.replace(POLICY.rules[0], optional=True)])

# The weight's shape, and the axes that have scales of their own.
PRODUCTS = {
    "jnp.dot": (lambda w, x: jnp.dot(x, w), (8, 6), (1,)),
    "a vector": (lambda w, x: jnp.dot(w, x[0]), (6, 8), (0,)),
    "jnp.vdot": (lambda w, x: jnp.vdot(w, x), (4, 8), ()),
    "jnp.inner": (lambda w, x: jnp.inner(x, w), (6, 8), (0,)),
    "jnp.tensordot": (lambda w, x: jnp.tensordot(x.reshape(4, 2, 4), w, 2), (2, 4, 6), (2,)),
    "jnp.matmul of stacks": (lambda w, x: jnp.matmul(jnp.stack([x, x]), w), (2, 8, 6), (0, 2)),
    "jnp.matmul of a stack": (lambda w, x: jnp.matmul(jnp.stack([x, x]), w), (8, 6), (1,)),
    "jnp.linalg.multi_dot": (
        lambda w, x: jnp.linalg.multi_dot([x, w, jnp.eye(6)[:, :2]]),  # the right two first
        (8, 6),
        (0,),
    ),
    "einsum of three": (lambda w, x: jnp.einsum("bi,ij,bj->b", x, w, x), (8, 8), (1,)),
    "einsum with a batch": (lambda w, x: jnp.einsum("bi,bij->bj", x, w), (4, 8, 6), (0, 2)),
    "swapped axes": (lambda w, x: x @ jnp.swapaxes(w, 0, 1), (6, 8), (0,)),
    "moved axes": (lambda w, x: jnp.tensordot(x, jnp.moveaxis(w, 2, 0), 1), (3, 2, 8), (0, 1)),
    "through a vector": (lambda w, x: x @ w.ravel().reshape(8, 6), (8, 6), ()),
    "a negative factor": (lambda w, x: x @ (w * -2.0), (8, 6), (1,)),
    "a factor of the input": (lambda w, x: x @ (w * jnp.sign(x[0, 0])), (8, 6), (1,)),
    "halved": (lambda w, x: x @ (w / 2), (8, 6), (1,)),
    "a column": (lambda w, x: x @ w[:, 1], (8, 6), (1,)),
    "mapped over": (lambda w, x: jax.vmap(lambda w: x @ w)(w), (3, 8, 6), (0, 2)),
    "mapped over an inner axis": (
        lambda w, x: jax.vmap(lambda w: x @ w, in_axes=1)(w),
        (8, 3, 6),
        (1, 2),
    ),
    "repeated": (lambda w, x: x @ jnp.repeat(w, 2, axis=1), (8, 6), (1,)),
    "one of a stack": (lambda w, x: x @ w[jnp.argmax(x[0]) % 3], (3, 8, 6), (0, 2)),
    "one hot": (lambda w, x: jax.nn.one_hot(jnp.arange(3), 8) @ w, (8, 6), (1,)),
    "beside linear algebra": (
        lambda w, x: (w @ x.T, jnp.linalg.inv(x.T @ x + jnp.eye(8)), jnp.linalg.qr(x)),
        (8, 8),
        (0,),
    ),
    "beside a fourier transform": (lambda w, x: jnp.fft.fft(x @ w), (8, 6), (1,)),
    "beside debugging": (
        lambda w, x: (jax.debug.callback(lambda y: None, x), jax.named_scope("s")(jnp.dot)(x, w)),
        (8, 6),
        (1,),
    ),
    "beside a callback": (
        lambda w, x: jax.pure_callback(
            lambda y: np.asarray(y) * 2, jax.ShapeDtypeStruct((4, 6), jnp.float32), x @ w
        ),
        (8, 6),
        (1,),
    ),
}


SLOW = (
    *("a vector", "jnp.inner", "jnp.matmul of a stack", "jnp.linalg.multi_dot", "swapped axes"),
    *("moved axes", "a negative factor", "a column", "mapped over an inner axis", "one hot"),
    *(
        "jnp.tensordot",
        "jnp.matmul of stacks",
        "repeated",
        "einsum with a batch",
        "beside a fourier transform",
    ),
)


@pytest.mark.many
@cases(PRODUCTS, SLOW)
def test_every_way_to_write_a_product_is_a_site(name):
    f, shape, axes = PRODUCTS[name]
    assert_quantized(f, {"": axes}, normal(0, *shape), X)


def test_dot_product_attention_is_a_contraction_of_activations():
    def f(p, x):
        q, k, v = (jnp.dot(x, p[name]).reshape(1, 4, 2, 4) for name in "qkv")
        return jax.nn.dot_product_attention(q, k, v).reshape(4, 8) @ p["o"]

    params = {name: normal(i, 8, 8) for i, name in enumerate("qkvo")}
    plan = assert_quantized(f, {name: (1,) for name in "qkvo"}, params, X)
    assert [skip.op for skip in plan.skipped] == ["dot_general"] * 2
    scores = jqx.Rule(activation=jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True))
    plan = jqx.make_plan(f, jqx.Policy([*POLICY.rules, scores]))(params, X)
    assert plan.skipped == ()


def test_a_factor_among_the_parameters_leaves_a_weight_a_weight():
    f = lambda p, x: x @ (p["w"] * p["s"])  # noqa: E731
    assert_quantized(f, {"w": (1,)}, {"w": normal(0, 8, 6), "s": jnp.float32(2)}, X)


class Pair(NamedTuple):
    first: Any
    second: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    y: Any
    name: str = dataclasses.field(metadata={"static": True})


KEPT = np.arange(3)


def nested(w, x, label):
    return Pair(x @ w, Record((x @ w).sum(), label)), [1, 2.5, None, True], {"t": (), "x": x}, KEPT


@pytest.mark.parametrize("transform", [jqx.simulate, jqx.convert])
def test_outputs_of_any_structure_come_out_as_they_do_of_the_function(transform):
    w = normal(0, 8, 6)
    plan = jqx.make_plan(nested, POLICY)(w, X, "a")
    found, expected = transform(nested, plan)(w, X, "a"), nested(rounded(w), X, "a")
    assert_same(found, expected)
    assert type(found[1][0]) is int and found[1][3] is True and found[3] is KEPT
    assert found[0].second.name == "a" and found[2]["x"] is X
    jitted = jax.jit(transform(nested, plan), static_argnums=2)(w, X, "a")
    again = jax.jit(nested, static_argnums=2)(rounded(w), X, "a")
    assert_same(jitted, again)
    assert jax.tree.map(jax.typeof, jitted) == jax.tree.map(jax.typeof, again)


def test_outputs_that_are_no_arrays_come_out_as_they_are():
    f = lambda w, x: {"y": x @ w, "name": "tanh", "f": jnp.tanh}  # noqa: E731
    found = jqx.convert(f, POLICY, "dynamic")(normal(0, 8, 6), X)
    assert found["name"] == "tanh" and found["f"] is jnp.tanh
    _, stats = jqx.calibrate(f, w8a8())(normal(0, 8, 6), X)
    assert list(stats) == [":dot_general:lhs"]


@pytest.mark.parametrize("dtype", [np.float16, jnp.float16, np.dtype("float16"), "float16"])
def test_dtypes_are_static_arguments(dtype):
    f = lambda w, x, dtype: (x @ w).astype(dtype)  # noqa: E731
    w = normal(0, 8, 6)
    assert_same(jqx.convert(f, POLICY, "dynamic")(w, X, dtype=dtype), f(rounded(w), X, dtype))


def layers(w, x, kind, count=1, *, scale=1.0, mask=None, f=jnp.abs):
    """Static positions, names, numbers and functions, and an array by name."""
    for _ in range(count if kind == "deep" else 1):
        x = f(x @ w)
    return x * scale if mask is None else x * mask


def test_static_and_keyword_arguments_reach_the_function_as_they_are():
    w = normal(0, 8, 8)
    plan = jqx.make_plan(layers, POLICY)(w, X, "deep", 2, scale=2.0, f=jax.nn.relu)
    assert len(plan.sites) == 2
    found = jqx.convert(layers, plan, "dynamic")(w, X, "deep", 2, scale=2.0, f=jax.nn.relu)
    assert_same(found, layers(rounded(w), X, "deep", 2, scale=2.0, f=jax.nn.relu))
    deep = functools.partial(layers, kind="deep", count=2, mask=X)
    assert_same(jqx.convert(deep, POLICY, "dynamic")(w, X), deep(rounded(w), X))
    inner = lambda w, x, kind: jax.jit(layers, static_argnames=("kind", "f"))(w, x, kind)  # noqa: E731
    assert_same(jqx.convert(inner, POLICY, "dynamic")(w, X, "deep"), inner(rounded(w), X, "deep"))


@pytest.mark.parametrize("number", [2.0, 2, True, np.float32(2), jnp.float32(2)], ids=repr)
def test_a_number_among_the_parameters_may_be_traced_or_not(number):
    f = lambda p, x: x @ p["w"] * jnp.asarray(p["s"], x.dtype)  # noqa: E731
    params = {"w": normal(0, 8, 6), "s": number, "name": None}
    plan = jqx.make_plan(f, POLICY)(params, X)
    traced = []
    jax.jit(lambda p: traced.append(jqx.make_plan(f, POLICY)(p, X)))(params)
    assert traced == [plan]
    q = jqx.quantize_params(params, plan)
    assert q["s"] is number
    expected = f({**params, "w": rounded(params["w"])}, X)
    for wrap in (jax.jit, lambda f: f):
        assert_same(wrap(jqx.convert(f, plan, "dynamic"))(q, X), expected)
        assert_same(wrap(jqx.simulate(f, plan, "dynamic"))(params, X), expected)


def test_two_parameters_of_one_path_are_refused():
    f = lambda p, x: x @ p["a/b"] @ p["a"]["b"]  # noqa: E731
    params = {"a/b": normal(0, 8, 8), "a": {"b": normal(1, 8, 8)}}
    with pytest.raises(ValueError, match=r"two weights have the same path(.|\n)*'a/b'"):
        jqx.make_plan(f, w8a16())(params, X)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_parameters_of_16_bits_give_results_of_16_bits(dtype):
    """The grid has 8 bits: rounded weights are exact in both formats."""
    f = lambda w, x: x @ w  # noqa: E731
    w, x = normal(0, 8, 6).astype(dtype), jnp.round(X).astype(dtype)
    plan = jqx.make_plan(f, POLICY)(w, x)
    q = jqx.quantize_params(w, plan)
    found = jqx.convert(f, plan, "dynamic")(q, x)
    assert found.dtype == dtype and q.dtype == dtype
    on_grid = rounded(w.astype(jnp.float32))
    exact = (x.astype(jnp.float32) @ on_grid).astype(dtype)  # sums of 8 products of 10 bits: exact
    assert_same(found, exact)
    assert_same(jqx.simulate(f, plan, "dynamic")(w, x), f(on_grid.astype(dtype), x))


def test_float64_functions_stay_float64():
    with jax.enable_x64(True):
        w, x = (on_device(np.float64(np.asarray(a))) for a in (normal(0, 2, 8, 8), X))
        f = lambda w, x: lax.fori_loop(0, 2, lambda i, x: x @ w[i], x)  # noqa: E731
        assert_quantized(f, {"": (0, 2)}, w, x)
        assert jqx.convert(f, POLICY, "dynamic")(w, x).dtype == jnp.float64


@pytest.mark.parametrize("policy", [w8a8(), w8a8_dynamic(), w8a16()], ids=["", "dynamic", "w"])
@pytest.mark.parametrize("shape", [(0, 8, 6), (4, 0, 6), (4, 8, 0)], ids=str)
def test_empty_arrays_give_what_the_function_gives(policy, shape):
    rows, k, columns = shape
    f = lambda w, x: x @ w  # noqa: E731
    w, x = jnp.zeros((k, columns)), jnp.zeros((rows, k))
    plan = jqx.make_plan(f, policy)(w, x)
    assert_same(
        jqx.convert(f, plan, "dynamic")(jqx.quantize_params(w, plan), x), jnp.zeros((rows, columns))
    )
    assert_same(jqx.simulate(f, plan, "dynamic")(w, x), jnp.zeros((rows, columns)))


def test_random_keys_are_arguments_parameters_carries_and_results():
    def f(p, x, key):
        def step(carry, w):
            x, key = carry
            key, now = jax.random.split(key)
            return (x @ w * jax.random.randint(now, (4, 8), 0, 2).astype(x.dtype), key), None

        (x, key), _ = lax.scan(step, (x, key), p["w"])
        return x, key, jax.random.bits(p["key"], (2,))

    params = {"w": normal(0, 2, 8, 8), "key": jax.random.key(1)}
    plan = jqx.make_plan(f, POLICY)(params, X, jax.random.key(0))
    assert axes_of(plan) == {"w": (0, 2)}
    q = jqx.quantize_params(params, plan)
    expected = jax.jit(f)({**params, "w": rounded(params["w"])}, X, jax.random.key(0))
    for found in (
        jax.jit(jqx.convert(f, plan, "dynamic"))(q, X, jax.random.key(0)),
        jax.jit(jqx.simulate(f, plan, "dynamic"))(params, X, jax.random.key(0)),
    ):
        assert_same((found[0], found[2]), (expected[0], expected[2]))
        assert jnp.array_equal(*(jax.random.key_data(out[1]) for out in (found, expected)))


def test_complex_contractions_are_listed_and_real_ones_beside_them_quantized():
    f = lambda p, x: (lax.complex(x, x) @ p["c"]).real @ p["w"]  # noqa: E731
    w = normal(0, 8, 8)
    params = {"w": w, "c": lax.complex(w, w)}
    plan = assert_quantized(f, {"w": (1,)}, params, X)
    assert plan.skipped[0].path == "c" and "complex64, not floats" in plan.skipped[0].reason


def test_integer_parameters_get_no_gradient_and_float_ones_theirs():
    f = lambda p, x: jnp.sum(x @ p["w"]) * p["n"].sum().astype(x.dtype)  # noqa: E731
    params = {"w": jnp.clip(normal(0, 8, 6), -1, 1), "n": jnp.array([2])}
    plan = jqx.make_plan(f, POLICY)(params, X)
    found = jax.jit(jax.grad(jqx.simulate(f, plan, "dynamic"), allow_int=True))(params, X)
    assert found["n"].dtype == jax.dtypes.float0
    assert_same(found["w"], jax.jit(jax.grad(f, allow_int=True))(params, X)["w"])


@pytest.mark.slow
def test_a_plan_holds_where_jit_is_disabled():
    f = jax.jit(lambda w, x: lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, w)[0])
    w = normal(0, 2, 8, 8)
    plan = jqx.make_plan(f, w8a8())(w, X)
    affines = jqx.affines(plan, jqx.calibrate(f, plan)(w, X)[1])
    q = jqx.quantize_params(w, plan)
    converted, simulated = jqx.convert(f, plan, affines), jqx.simulate(f, plan, affines)
    expected = converted(q, X), simulated(w, X)
    with jax.disable_jit():
        assert jqx.make_plan(f, w8a8())(w, X) == plan
        found = converted(q, X), simulated(w, X)
        assert_same(jqx.affines(plan, jqx.calibrate(f, plan)(w, X)[1]), affines)
    assert_same(found, expected)


@pytest.mark.slow
def test_rules_for_sites_and_operands_hold_inside_of_loops():
    """Of steps that are powers of two, and few bits: float32 holds every sum."""
    act = lambda x: jnp.clip(x, -1, 1)  # noqa: E731

    def f(p, x):
        step = lambda c, p: (act(c @ p["a"]) @ p["b"], None)  # noqa: E731
        return lax.scan(step, x, p["layers"])[0] @ p["head"]

    layer = {"a": normal(0, 2, 8, 8), "b": normal(1, 2, 8, 8)}
    params = {"layers": layer, "head": eighths(2, 8, 4)}
    fixed = jqx.calibrators.fixed
    int4 = jqx.QSpec(jnp.int4, jqx.per_group(4), calibrator=fixed(-7 / 4, 7 / 4))
    int8 = jqx.QSpec(jnp.int8, jqx.per_axis(0), calibrator=fixed(-127 / 16, 127 / 16))
    dynamic = dataclasses.replace(int8, granularity=jqx.per_token(), dynamic=True)
    rules = [
        jqx.Rule("head"),
        jqx.Rule("layers/.", op="gather", weight=int4, optional=True),
        jqx.Rule("layers/a", weight=int4, activation=dynamic),
        jqx.Rule("layers/.*", weight=POLICY.rules[0].weight),
    ]
    plan = jqx.make_plan(f, jqx.Policy(rules))(params, X)
    assert [(site.path, site.rule) for site in plan.sites] == [("layers/a", 2), ("layers/b", 3)]
    assert [(skip.path, skip.reason) for skip in plan.skipped] == [
        ("head", "rule 0 leaves it in float")
    ]
    (a, b), q = plan.sites, jqx.quantize_params(params, plan)
    assert [operand.spec and operand.spec.dynamic for operand in a.operands] == [True, False]
    assert b.operands[0].spec is None and q["head"] is params["head"]
    assert q["layers"]["a"].scale.shape == (2, 2, 8)

    by_hand = {**params, "layers": {"a": q["layers"]["a"].dequantize(), "b": rounded(layer["b"])}}

    def reference(p, x):
        for i in range(2):
            x = jqx.QTensor.quantize(x, int8).dequantize()
            x = act(x @ p["layers"]["a"][i]) @ p["layers"]["b"][i]
        return x @ p["head"]

    expected = reference(by_hand, X)
    assert not np.array_equal(expected, reference(params, X))
    np.testing.assert_array_equal(jax.jit(jqx.simulate(f, plan, "dynamic"))(params, X), expected)
    np.testing.assert_array_equal(jax.jit(jqx.convert(f, plan, "dynamic"))(q, X), expected)


def test_the_step_of_the_grid_is_that_of_the_calibrator():
    plan = jqx.make_plan(lambda w, x: x @ w, POLICY)(normal(0, 8, 6), X)
    scale = jqx.quantize_params(normal(0, 8, 6), plan).scale
    np.testing.assert_array_equal(scale, np.full((1, 6), STEP, np.float32))
