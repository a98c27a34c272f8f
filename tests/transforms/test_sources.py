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

from ..arrays import assert_same, on_device
from ..models.transforms import eighths, normal, product
from .sources import POLICY, STEP, assert_quantized, assert_transformed, axes_of, cases, rounded

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
    "split heads": (lambda w, x: x @ w.reshape(8, 6), (8, 2, 3), (1, 2)),
    "einsum with heads": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), (8, 2, 3), (1, 2)),
    "einsum over heads": (
        lambda w, x: jnp.einsum("bhk,hkd->bd", x.reshape(-1, 2, 4), w),
        (2, 4, 6),
        (2,),
    ),
    "batched": (
        lambda w, x: jnp.einsum("ebd,edf->ebf", jnp.stack([x, x]), w),
        (2, 8, 6),
        (0, 2),
    ),
    "a slice": (lambda w, x: x @ w[:8], (10, 6), (1,)),
    "a row of a stack": (lambda w, x: x @ w[1], (3, 8, 6), (0, 2)),
    "merged axes kept": (lambda w, x: x @ w.reshape(8, 6), (8, 6, 1), (1, 2)),
    "split and contracted": (
        lambda w, x: jnp.einsum("bi,ijn->bjn", x[:, :2], w.reshape(2, 4, 6)),
        (8, 6),
        (1,),
    ),
    "expanded and squeezed": (lambda w, x: x @ jnp.squeeze(w[None], 0), (8, 6), (1,)),
    "in jit": (lambda w, x: jax.jit(lambda w, x: x @ w.T)(w, x), (6, 8), (0,)),
    "a view made in jit": (lambda w, x: x @ jax.jit(lambda w: w.T * 2.0)(w), (6, 8), (0,)),
    "stop_gradient": (lambda w, x: x @ lax.stop_gradient(w), (8, 6), (1,)),
    "mapped rows": (lambda w, x: jax.vmap(lambda row: row @ w)(x), (8, 6), (1,)),
    "times 3": (lambda w, x: x @ (3.0 * w), (8, 6), (1,)),
    "by 3": (lambda w, x: x @ (w / 3.0), (8, 6), (1,)),
    "by a traced scalar": (lambda w, x: x @ (w / jnp.sqrt(jnp.float32(3))), (8, 6), (1,)),
    "cast": (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), (8, 6), (1,)),
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
    "beside control flow": (
        lambda w, x: lax.cond(x[0, 0] > 9, jnp.cos, jnp.sin, lax.map(jnp.abs, x @ w)),
        (8, 6),
        (1,),
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


SLOW_PRODUCTS = (
    *("a vector", "jnp.inner", "jnp.matmul of a stack", "jnp.linalg.multi_dot", "swapped axes"),
    *("moved axes", "a negative factor", "a column", "mapped over an inner axis", "one hot"),
    *("jnp.tensordot", "jnp.matmul of stacks", "repeated", "einsum with a batch"),
    "beside a fourier transform",
)
ROUNDED = {"times 3": 16, "by 3": 16, "by a traced scalar": 16, "cast": 2**17}
"""Products that round once more, and by how many roundings of float32: one of bfloat16 is 2**16."""


@pytest.mark.many
@cases(PRODUCTS, SLOW_PRODUCTS)
def test_every_way_to_write_a_product_is_a_site(name):
    f, shape, axes = PRODUCTS[name]
    by_hand = {"": axes}, normal(0, *shape), X
    assert_quantized(f, *by_hand, roundings=ROUNDED.get(name, 0))


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
    params = {"w": normal(0, 8, 6), "s": jnp.float32(2)}
    scale = jqx.quantize_params(params, assert_quantized(f, {"w": (1,)}, params, X))["w"].scale
    np.testing.assert_array_equal(scale, np.full((1, 6), STEP, np.float32))


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
    actual, expected = transform(nested, plan)(w, X, "a"), nested(rounded(w), X, "a")
    assert_same(actual, expected)
    assert type(actual[1][0]) is int and actual[1][3] is True and actual[3] is KEPT
    assert actual[0].second.name == "a" and actual[2]["x"] is X
    jitted = jax.jit(transform(nested, plan), static_argnums=2)(w, X, "a")
    again = jax.jit(nested, static_argnums=2)(rounded(w), X, "a")
    assert_same(jitted, again)
    assert jax.tree.map(jax.typeof, jitted) == jax.tree.map(jax.typeof, again)


def test_outputs_that_are_no_arrays_come_out_as_they_are():
    f = lambda w, x: {"y": x @ w, "name": "tanh", "f": jnp.tanh}  # noqa: E731
    actual = jqx.convert(f, POLICY, "dynamic")(normal(0, 8, 6), X)
    assert actual["name"] == "tanh" and actual["f"] is jnp.tanh
    _, stats = jqx.calibrate(f, w8a8())(normal(0, 8, 6), X)
    assert list(stats) == [":dot_general:lhs"]


@pytest.mark.parametrize("dtype", [np.float16, jnp.float16, np.dtype("float16"), "float16"])
def test_dtypes_are_static_arguments(dtype):
    f = lambda w, x, dtype: (x @ w).astype(dtype)  # noqa: E731
    w = normal(0, 8, 6)
    assert_same(jqx.convert(f, POLICY, "dynamic")(w, X, dtype=dtype), f(rounded(w), X, dtype))


def layers(w, x, kind, count=1, *, scale=1.0, mask=None, f=jnp.abs):
    """Static positions, names, numbers and functions, and an array by name."""
    assert isinstance(scale, float) and isinstance(count, int)
    for _ in range(count if kind == "deep" else 1):
        x = f(x @ w)
    return x * scale if mask is None else x * mask


def test_static_and_keyword_arguments_reach_the_function_as_they_are():
    w = normal(0, 8, 8)
    plan = jqx.make_plan(layers, POLICY)(w, X, "deep", 2, scale=2.0, f=jax.nn.relu)
    assert len(plan.sites) == 2
    actual = jqx.convert(layers, plan, "dynamic")(w, X, "deep", 2, scale=2.0, f=jax.nn.relu)
    assert_same(actual, layers(rounded(w), X, "deep", 2, scale=2.0, f=jax.nn.relu))
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
    assert jqx.quantize_params(params, plan)["s"] is number
    expected = f({**params, "w": rounded(params["w"])}, X)
    for wrap in (jax.jit, lambda f: f):
        assert_transformed(f, plan, params, expected, X, wrap=wrap)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_parameters_of_16_bits_give_results_of_16_bits(dtype):
    """The grid has 8 bits: rounded weights are exact in both formats."""
    w, x = normal(0, 8, 6).astype(dtype), jnp.round(X).astype(dtype)
    plan = jqx.make_plan(product, POLICY)(w, x)
    q = jqx.quantize_params(w, plan)
    actual = jqx.convert(product, plan, "dynamic")(q, x)
    assert actual.dtype == dtype and q.dtype == dtype
    on_grid = rounded(w.astype(jnp.float32))
    exact = (x.astype(jnp.float32) @ on_grid).astype(dtype)  # sums of 8 products of 10 bits: exact
    assert_same(actual, exact)
    assert_same(jqx.simulate(product, plan, "dynamic")(w, x), product(on_grid.astype(dtype), x))
    for policy in (w8a8_dynamic(), w8a16()):
        for transform in (jqx.convert, jqx.simulate):
            assert transform(product, policy)(w, x).dtype == dtype


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
    w, x = jnp.zeros((k, columns)), jnp.zeros((rows, k))
    plan = jqx.make_plan(product, policy)(w, x)
    assert_transformed(product, plan, w, jnp.zeros((rows, columns)), x)


def with_key_data(f):
    """Compiles a function, and returns the data of a key instead of the key."""

    @jax.jit
    def g(*args):
        x, key, bits = f(*args)
        return x, jax.random.key_data(key), bits

    return g


def test_random_keys_are_arguments_parameters_carries_and_results():
    def f(p, x, key):
        def step(carry, w):
            x, key = carry
            key, subkey = jax.random.split(key)
            return (x @ w * jax.random.randint(subkey, (4, 8), 0, 2).astype(x.dtype), key), None

        (x, key), _ = lax.scan(step, (x, key), p["w"])
        return x, key, jax.random.bits(p["key"], (2,))

    params = {"w": normal(0, 2, 8, 8), "key": jax.random.key(1)}
    plan = jqx.make_plan(f, POLICY)(params, X, jax.random.key(0))
    assert axes_of(plan) == {"w": (0, 2)}
    expected = with_key_data(f)({**params, "w": rounded(params["w"])}, X, jax.random.key(0))
    assert_transformed(f, plan, params, expected, X, jax.random.key(0), wrap=with_key_data)


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
    actual = jax.jit(jax.grad(jqx.simulate(f, plan, "dynamic"), allow_int=True))(params, X)
    assert actual["n"].dtype == jax.dtypes.float0
    assert_same(actual["w"], jax.jit(jax.grad(f, allow_int=True))(params, X)["w"])


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
        actual = converted(q, X), simulated(w, X)
        assert_same(jqx.affines(plan, jqx.calibrate(f, plan)(w, X)[1]), affines)
    assert_same(actual, expected)


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
    assert_transformed(f, plan, params, expected, X)


IDS = jnp.array([-9, -1, 3, 9])
LOOKUPS = {
    "jnp.take": (lambda w: jnp.take(w, IDS, axis=0), 0),
    "jnp.take, filled": (lambda w: jnp.take(w, IDS, axis=1, fill_value=5.0), 1),
    "jnp.take, clipped": (lambda w: jnp.take(w, IDS, axis=0, mode="clip"), 0),
    "jnp.take, wrapped": (lambda w: jnp.take(w, IDS, axis=0, mode="wrap"), 0),
    "indexed": (lambda w: w[IDS], 0),
    "indexed by bytes": (lambda w: w[IDS.astype(jnp.int8)], 0),
    "indexed columns": (lambda w: w[:, IDS.reshape(2, 2)], 1),
    "get, filled": (lambda w: w.at[IDS].get(mode="fill", fill_value=7.0), 0),
    "a mapped index": (lambda w: jax.vmap(lambda i: w[i])(IDS), 0),
    "an index mapped twice": (lambda w: jax.vmap(jax.vmap(lambda i: w[i]))(IDS.reshape(2, 2)), 0),
    "a mapped index, axes out": (lambda w: jax.vmap(lambda i: w[i], out_axes=1)(IDS), 0),
    "mapped indices": (lambda w: jax.vmap(lambda i: w[i])(IDS.reshape(2, 2)), 0),
    "mapped indices of columns": (lambda w: jax.vmap(lambda i: w[:, i])(IDS.reshape(2, 2)), 1),
    "a mapped slice": (
        lambda w: jax.vmap(lambda i: lax.dynamic_index_in_dim(w, i, 1))(IDS),
        1,
    ),
    "a mapped index, filled": (
        lambda w: jax.vmap(lambda i: w.at[i].get(mode="fill", fill_value=0.0))(IDS),
        0,
    ),
}


SLOW_LOOKUPS = (
    *("jnp.take, wrapped", "indexed by bytes", "indexed columns", "an index mapped twice"),
    *("mapped indices", "a mapped index, filled", "jnp.take, clipped"),
)


@cases(LOOKUPS, SLOW_LOOKUPS)
def test_every_way_to_write_a_lookup_is_a_site_also_out_of_bounds(name):
    f, axis = LOOKUPS[name]
    assert_quantized(f, {"": (axis,)}, normal(0, 8, 6))


@pytest.mark.parametrize(
    "f",
    [
        lambda w: w[jnp.array([1, 2]), jnp.array([3, 4])],
        lambda w: jax.vmap(lambda t, i: t[i])(w.reshape(2, 4, 6), jnp.array([1, 3])),
        lambda w: jax.vmap(lambda i: lax.dynamic_slice_in_dim(w, i, 2))(jnp.array([1, 3])),
        lambda w: jax.vmap(lambda i: w[:1][i])(jnp.array([0, 3])),
    ],
)
def test_other_gathers_stay_in_float_and_are_listed(f):
    w = normal(0, 8, 6)
    plan = jqx.make_plan(f, OPTIONAL)(w)
    assert plan.sites == () and "not a lookup along one axis" in plan.skipped[0].reason
    assert_same(jqx.convert(f, plan)(w), f(w))
