"""Products by the oneDNN inside of jaxlib, where those of bytes are exact on the processor."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src.kernels import onednn
from jqx.extend import Formulation, using

from ..oracles.contractions import MATRICES, exact_tensor

pytestmark = [
    pytest.mark.skipif(
        not onednn.is_available(), reason="oneDNN does not multiply bytes exactly here"
    ),
    # XLA does not serialize these programs, and so jqx does not use them with the cache of tests.
    pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache"),
]


@pytest.fixture(autouse=True)
def used(monkeypatch):
    monkeypatch.setattr(onednn, "is_used", lambda: True)


CALL = "__onednn$matmul"
ROWS = (((1,), (1,)), ((), ()))
HEADS = (((3,), (0,)), ((0,), (2,)))
MANY_BATCHES = (((6,), (5,)), ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)))


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


@functools.partial(jax.jit, static_argnums=2)
def product(rows, columns, in_rows):
    return [
        onednn.matrix_product(rows, columns, dtype, in_rows=in_rows)
        for dtype in (jnp.int32, jnp.float32)
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([1, 2, 3, 15, 16, 17, 33, 64]),
    st.sampled_from([1, 2, 15, 17, 48, 130]),
    st.sampled_from([1, 3, 4, 31, 64, 65, 257]),
    st.booleans(),
    st.integers(0, 99),
)
def test_sums_are_exact(batch, m, n, k, in_rows, seed):
    rows, columns = integers(seed, *batch, m, k), integers(seed + 1, *batch, n, k)
    rows[..., : k // 2] = np.where(seed % 3, rows[..., : k // 2], -128)  # extremes in pairs
    columns[..., : k // 2] = np.where(seed % 3, columns[..., : k // 2], -128)
    expected = rows.astype(np.int64) @ np.swapaxes(columns, -1, -2).astype(np.int64)
    other = columns if in_rows else np.swapaxes(columns, -1, -2).copy()
    sums, floats = product(rows, other, in_rows)
    assert (np.asarray(sums) == expected).all()
    assert (np.asarray(floats) == expected.astype(np.float32)).all()


def test_programs_that_jax_stores_do_without(monkeypatch):
    monkeypatch.undo()
    lhs, rhs = operands(*CASES["matrices"])
    assert jax.config.jax_compilation_cache_dir  # that of the tests
    (form,) = jqx.formulations(jqx.matmul)(lhs, rhs)
    assert form.cpu.name == "integer_shaped"


def test_sums_above_float32_are_rounded_once():
    rows, columns = np.full((3, 2**15), 127, np.int8), np.full((5, 2**15), 127, np.int8)
    columns[:, :7] = -1
    expected = rows.astype(np.int64) @ columns.T.astype(np.int64)
    assert expected.max() > 2**24
    sums, floats = product(rows, columns, True)
    assert (np.asarray(sums) == expected).all()
    assert (np.asarray(floats) == expected.astype(np.float32)).all()


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_mapped_products_are_those_of_each(axes):
    by_axes = {
        (0, None): ((4, 6, 8), (5, 8)),
        (None, 0): ((6, 8), (4, 5, 8)),
        (0, 0): ((4, 6, 8), (4, 5, 8)),
        (1, 2): ((6, 4, 8), (5, 8, 4)),
    }
    rows, columns = (jnp.asarray(integers(i, *shape)) for i, shape in enumerate(by_axes[axes]))
    multiply = functools.partial(onednn.matrix_product, dtype=jnp.int32, in_rows=True)
    mapped = jax.jit(jax.vmap(multiply, axes))(rows, columns)
    for i in range(4):
        x = rows if axes[0] is None else jnp.take(rows, i, axes[0])
        y = columns if axes[1] is None else jnp.take(columns, i, axes[1])
        expected = np.asarray(x, np.int64) @ np.asarray(y, np.int64).T
        assert (np.asarray(mapped[i]) == expected).all()


def operands(left, right, numbers, zero_point=True):
    rng = np.random.default_rng(0)
    (left_kept, right_kept) = (
        tuple(axis for axis in range(len(shape)) if axis not in axes)
        for shape, axes in zip((left, right), numbers[0], strict=True)
    )
    return (
        exact_tensor(rng, "uint8", left, left_kept, zero_point=zero_point),
        exact_tensor(rng, "int8", right, right_kept, zero_point=zero_point),
    )


CASES = {
    "matrices": ((33, 640), (640, 48), MATRICES),
    "more rows than one beside them pays for": ((520, 160), (160, 48), MATRICES),
    "one row by [N, K]": ((1, 640), (48, 640), ROWS),
    "heads": ((2, 40, 3, 128), (128, 60, 2), HEADS),
    "many batch axes": ((1, 2, 1, 3, 2, 30, 80), (1, 2, 1, 3, 2, 80, 40), MANY_BATCHES),
}


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_products_of_tensors_are_those_without_it(name, zero_point, monkeypatch):
    """Bit for bit, and so are the derivatives of scales."""
    left, right, numbers = CASES[name]
    lhs, rhs = operands(left, right, numbers, zero_point)

    def results(lhs, rhs):
        def f(factor):
            q = dataclasses.replace(rhs, scale=rhs.scale * factor)
            return jqx.dot_general(lhs, q, numbers).sum()

        return jqx.dot_general(lhs, rhs, numbers), jax.grad(f)(1.0)

    (form,) = jqx.formulations(lambda *x: jqx.dot_general(*x, numbers))(lhs, rhs)
    assert form.cpu.name == "integer_onednn"
    own = jax.jit(lambda *x: results(*x))(lhs, rhs)
    monkeypatch.setattr(onednn, "is_used", lambda: False)
    without = jax.jit(lambda *x: results(*x))(lhs, rhs)
    assert (own[0] == without[0]).all() and own[1] == without[1]


def test_programs_on_several_devices_and_exports_do_without():
    lhs, rhs = operands(*CASES["matrices"])

    def f(lhs, rhs):
        return jqx.dot_general(lhs, rhs, MATRICES)

    alone = jax.jit(f)
    assert CALL in alone.lower(lhs, rhs).as_text()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    columns = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "x"))), rhs)
    replicated = jax.device_put(lhs, NamedSharding(mesh, P()))
    parts = jax.jit(f)
    assert CALL not in parts.lower(replicated, columns).as_text()
    assert (parts(replicated, columns) == alone(lhs, rhs)).all()
    exported = export.export(jax.jit(lambda *x: f(*x)))(lhs, rhs)
    assert CALL not in exported.mlir_module()
    assert (exported.call(lhs, rhs) == alone(lhs, rhs)).all()


def test_a_scan_over_layers_multiplies_each():
    q = jqx.QTensor.quantize(
        jax.random.normal(jax.random.key(0), (3, 160, 160)), jqx.QSpec("int8", jqx.per_axis(0, 2))
    )
    x = jax.random.normal(jax.random.key(1), (9, 160))
    plan_spec = jqx.QSpec("int8", jqx.per_axis(0), dynamic=True)

    def layer(x, w):
        rows = jqx.QTensor.quantize(x, dataclasses.replace(plan_spec, dynamic=False))
        return jnp.tanh(jqx.matmul(rows, w)), None

    scanned = jax.jit(lambda x, q: jax.lax.scan(layer, x, q)[0])
    assert CALL in scanned.lower(x, q).as_text()
    expected = x
    for i in range(3):
        expected, _ = layer(expected, jax.tree.map(lambda leaf, i=i: leaf[i], q))
    assert jnp.abs(scanned(x, q) - expected).max() <= 2.0**-20


def attention(params, x, mask):
    """Two products of activations, with groups of heads, between two of weights."""
    heads = (x @ params["in"]).reshape(*x.shape[:2], 4, 24)
    y = jax.nn.dot_product_attention(heads, heads[:, :, :2], heads[:, :, 2:] + 1, mask=mask)
    return y.reshape(*x.shape[:2], 96) @ params["out"]


def of_attention(batch, length):
    keys = jax.random.split(jax.random.key(length), 3)
    params = {
        "in": jax.random.normal(keys[0], (64, 96)) / 8,
        "out": jax.random.normal(keys[1], (96, 40)) / 10,
    }
    x = jax.random.normal(keys[2], (batch, length, 64))
    lengths = jnp.arange(batch) * (length // batch)
    return params, x, (jnp.arange(length)[None] <= lengths[:, None])[:, None, None]


def forms_of(f, *args):
    return [form.cpu.name for form in jqx.formulations(f)(*args)]


@pytest.mark.parametrize("shape", [(5, 130), (3, 65), (1, 257)])
def test_attention_beside_codes_is_that_of_float_products(shape, monkeypatch):
    args = of_attention(*shape)
    plan = jqx.make_plan(attention, jqx.presets.w8a16())(*args)
    weights = jqx.quantize_params(args[0], plan)
    f = jqx.convert(attention, plan)
    forms = forms_of(f, weights, *args[1:])
    assert forms[1:-1] == ["float_onednn"] * 2
    assert jax.jit(f).lower(weights, *args[1:]).as_text().count(CALL) == 2
    # Of the last one, all later rows read the NaN; other sequences do not.
    xs = jnp.stack([args[1], args[1].at[-1, -1, 0].set(jnp.nan)])
    simulated = jqx.simulate(attention, plan, backward=jnp.float32)

    def each(f, params):
        return jax.jit(lambda params: jnp.stack([f(params, x, args[2]) for x in xs]))(params)

    own = each(f, weights)
    assert jnp.array_equal(each(simulated, args[0]), own, equal_nan=True)
    monkeypatch.setattr(onednn, "is_used", lambda: False)
    without = each(f, weights)
    nans = jnp.isnan(without)
    assert (jnp.isnan(own) == nans).all() and not nans[0].any() and nans[1, -1].any()
    # Each product rounds sums of up to 257 numbers, and a softmax doubles an error of its scores.
    assert jnp.nanmax(jnp.abs(own - without)) <= 4 * 257 * 2.0**-24 * jnp.nanmax(jnp.abs(without))


def test_gradients_and_maps_through_float_products_are_those_of_jax(monkeypatch):
    params, x, mask = of_attention(4, 96)
    plan = jqx.make_plan(attention, jqx.presets.w8a16())(params, x, mask)
    simulated = jqx.simulate(attention, plan, backward=jnp.float32)

    def results(x):
        mapped = jax.vmap(simulated, in_axes=(None, 0, None))(params, jnp.stack([x, -x]), mask)
        return mapped, jax.grad(lambda x: jnp.sin(simulated(params, x, mask)).sum())(x)

    own = jax.jit(lambda x: results(x))(x)
    assert forms_of(simulated, params, x, mask).count("float_onednn") == 2
    monkeypatch.setattr(onednn, "is_used", lambda: False)
    without = jax.jit(lambda x: results(x))(x)
    for a, b in zip(own, without, strict=True):
        assert jnp.abs(a - b).max() <= 4 * 257 * 2.0**-24 * jnp.abs(b).max()


def test_small_products_and_those_of_other_floats_are_left_to_jax():
    params, x, mask = of_attention(4, 96)
    plan = jqx.make_plan(attention, jqx.presets.w8a16())(params, x[:, :16], mask[..., :16])
    weights = jqx.quantize_params(params, plan)
    f = jqx.convert(attention, plan)
    assert "float_onednn" not in forms_of(f, weights, x[:, :16], mask[..., :16])

    def narrow(params, x):
        heads = (x @ params["in"]).astype(jnp.bfloat16)
        return jnp.einsum("btd,bsd->bts", heads, heads).astype(jnp.float32) @ x

    plan = jqx.make_plan(narrow, jqx.presets.w8a16())(params, x)
    f = jqx.convert(narrow, plan)
    # The second product is of float32, from one of bfloat16.
    assert forms_of(f, jqx.quantize_params(params, plan), x).count("float_onednn") == 1


def test_a_formulation_of_the_user_computes_float_products():
    """Also one for all platforms, and in place of oneDNN."""
    params, x, mask = of_attention(4, 96)
    plan = jqx.make_plan(attention, jqx.presets.w8a16())(params, x, mask)
    weights = jqx.quantize_params(params, plan)

    def mine(lhs, rhs, how):
        return jax.lax.dot_general(lhs, rhs, how.dimensions.numbers, how.precision, how.dtype)

    platforms = ("cpu", "tpu", "cuda", "rocm", "default")
    options = {"applies": lambda case: True, "op": "dot_general:float"}
    form = Formulation("by_hand", "for this test", platforms, compute=mine, **options)
    with using(form):
        forms = forms_of(jqx.convert(attention, plan), weights, x, mask)
    assert forms[1:-1] == ["by_hand"] * 2
