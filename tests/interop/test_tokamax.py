"""QTensors as operands of tokamax, which takes those of Qwix."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import minmax
from jqx.interop import to_qarray

from ..models.transforms import normal

pytestmark = pytest.mark.bench

SIZES = jnp.array([5, 0, 12, 7], jnp.int32)
EXPERTS = {
    "per channel of each expert": jqx.per_axis(0, 2),
    "per channel of all experts": jqx.per_axis(2),
    "per tensor": jqx.per_tensor(),
    "tiles along the sum": jqx.per_block({0: 1, 1: 32, 2: 1}),
    "tiles along both axes": jqx.per_block({0: 1, 1: 32, 2: 16}),
}
TOKENS = {
    "per token and head": jqx.per_axis(0, 1, 2),
    "per channel": jqx.per_axis(0, 2, 3),
    "per tensor": jqx.per_tensor(),
    "tiles of the width": jqx.per_block({0: 1, 1: 1, 2: 1, 3: 32}),
    "tiles of tokens": jqx.per_block({0: 1, 1: 4, 2: 1, 3: 1}),
}
ZERO_POINTS = {"symmetric": {}, "zero points": {"symmetric": False, "calibrator": minmax}}
qtypes = pytest.mark.parametrize("qtype", ["int8", "int4"])
zero_points = pytest.mark.parametrize("options", ZERO_POINTS.values(), ids=ZERO_POINTS)


@pytest.fixture
def tokamax():
    package = pytest.importorskip("tokamax")
    importlib.import_module("absl.flags").FLAGS(["tokamax"])  # else it reads those of pytest
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield package


def assert_near(actual, expected):
    """Sums of float32 in another order."""
    np.testing.assert_allclose(actual, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def converted(*operands):
    return [to_qarray(x) if isinstance(x, jqx.QTensor) else x for x in operands]


@qtypes
@zero_points
@pytest.mark.parametrize("granularity", EXPERTS.values(), ids=EXPERTS)
def test_grouped_products_are_those_of_jqx(tokamax, qtype, options, granularity):
    x, w = normal(0, 24, 64), normal(1, 4, 64, 48)
    w = jqx.QTensor.quantize(w, jqx.QSpec(qtype, granularity, **options))
    rows = jqx.QTensor.quantize(x, jqx.QSpec("int8", jqx.per_axis(0)))
    for packed in (w, jqx.pack_for(w, "cpu") if granularity == jqx.per_axis(0, 2) else w):
        for lhs in (x, rows):
            actual = tokamax.ragged_dot(*converted(lhs, packed), group_sizes=SIZES)
            assert_near(actual, jqx.ragged_dot(lhs, w, SIZES))
    loss = lambda f, x: (f(x) ** 2).sum()  # noqa: E731
    theirs = lambda x: tokamax.ragged_dot(x, to_qarray(w), group_sizes=SIZES)  # noqa: E731
    ours = functools.partial(jqx.ragged_dot, rhs=w, group_sizes=SIZES)
    assert_near(*(jax.grad(functools.partial(loss, f))(x) for f in (theirs, ours)))


def attention(q, k, v):
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jqx.einsum("btkgh,bskh->bkgts", q, k) / width**0.5
    is_earlier = jnp.arange(k.shape[1]) <= jnp.arange(length)[:, None]
    weights = jax.nn.softmax(jnp.where(is_earlier, scores, -jnp.inf))
    return jqx.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, length, heads, width)


@qtypes
@zero_points
@pytest.mark.parametrize("granularity", TOKENS.values(), ids=TOKENS)
def test_attention_is_that_of_jqx(tokamax, qtype, options, granularity):
    q, k, v = normal(0, 2, 8, 8, 64), normal(1, 2, 16, 4, 64), normal(2, 2, 16, 4, 64)
    quantize = lambda x: jqx.QTensor.quantize(x, jqx.QSpec(qtype, granularity, **options))  # noqa: E731
    cases = [(q, quantize(k), quantize(v)), (q, k, quantize(v))]
    if granularity not in (TOKENS["per channel"], TOKENS["tiles of tokens"]):
        cases += [(quantize(q), quantize(k), quantize(v))]  # else scales vary along the sum
    for operands in cases:
        for implementation in (None, "xla", "xla_chunked"):
            actual = tokamax.dot_product_attention(
                *converted(*operands), is_causal=True, implementation=implementation
            )
            assert_near(actual, attention(*operands))
    one = q[:, :1]
    keys, values = quantize(k), quantize(v)
    actual = tokamax.dot_product_attention(*converted(one, keys, values))[:, 0]
    assert_near(actual, jqx.decode_attention(one[:, 0], keys, values, jnp.array([16, 16])))


@pytest.mark.parametrize("scheme", ["int8", "int4:group=32", "w8a8_dynamic"])
def test_a_function_that_calls_tokamax_is_quantized(tokamax, scheme):
    def f(w, x):
        return tokamax.ragged_dot(x, w, group_sizes=SIZES)

    policy = jqx.Policy({".*": getattr(jqx.presets, scheme, lambda: scheme)()})
    w, x = normal(1, 4, 64, 48), normal(0, 24, 64)
    plan = jqx.make_plan(f, policy)(w, x)
    (site,) = plan.sites
    assert site.op == "ragged_dot" and plan.skipped == ()
    q = jqx.quantize_params(w, plan)
    rows = site.operands[0].spec
    lhs = x if rows is None else jqx.QTensor.quantize(x, rows)
    expected = jqx.ragged_dot(lhs, q, SIZES)
    assert_near(jqx.convert(f, plan)(q, x), expected)
    assert_near(jqx.simulate(f, plan)(w, x), expected)
    assert_near(f(to_qarray(q), lhs if rows is None else to_qarray(lhs)), expected)
    mapped = jax.vmap(jqx.convert(f, plan), (None, 0))(q, jnp.stack([x, -x]))
    assert_near(mapped, jnp.stack([expected, -expected]))
