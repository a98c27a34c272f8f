"""`pack_for`: the layout of each target, the axis that a scale tells, and whole trees."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx import numerics
from jqx._src.tensor.layout import Layout

from ..arrays import assert_same, on_device
from ..oracles.numerics import assert_floats
from ..oracles.refusals import assert_refusals, refusal
from .tensors import CASES, made, random_tensor, spec, spread_out, tensor

TARGETS = ("cpu", "gpu", "tpu")
BYTES = {"gpu": (jnp.int8, jnp.uint8), "tpu": (jnp.int4, jnp.int8, jnp.uint8)}
K, N = 8, 6
# Granularity of a [K, N] weight, and of its transpose: is axis -2 contracted, and in blocks?
SCALES = {
    "per channel": (jqx.per_axis(1), -2, False),
    "per channel of the transpose": (jqx.per_axis(0), -1, False),
    "per group": (jqx.per_block({0: 4, 1: 1}), -2, True),
    "per group of the transpose": (jqx.per_block({0: 1, 1: 3}), -1, True),
    "blocks of one axis, shared along the other": (jqx.per_block({0: 4}), -2, True),
    "blocks with a tail": (jqx.per_block({0: 1, 1: 4}, tail=True), -1, True),
    "per tensor": (jqx.per_tensor(), None, False),
    "blocks of both axes": (jqx.per_block({0: 4, 1: 3}), None, True),
}


def is_swapped(target, contracted, blocked):
    """Whether [K, N] or [N, K] is the other order than the one that the axes are in."""
    wanted = "[K, N]" if target == "tpu" or blocked else "[N, K]"
    return wanted != ("[K, N]" if contracted == -2 else "[N, K]")


def weight(granularity, qtype=jnp.int4, shape=(K, N), symmetric=True):
    return jqx.QTensor.quantize(spread_out(shape), spec(qtype, granularity, symmetric))


@pytest.mark.many
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SCALES)
def test_the_layout_is_that_of_the_target_and_the_scale(name, target):
    granularity, told, blocked = SCALES[name]
    for qtype, asked in itertools.product((jnp.int4, jnp.int8, jnp.uint8), (None, -2, -1)):
        if told is not None and asked not in (None, told):
            continue
        q = weight(granularity, qtype, symmetric=qtype != jnp.uint8)
        contracted = told or asked or -2
        swapped = is_swapped(target, contracted, blocked)
        int8 = target == "cpu" and qtype != jnp.int8
        # In whole blocks, of bytes (GPUs want 4 bits in tiles of 16): what a kernel reads. On a TPU
        # one scale a channel too, beside rows that are quantized on the way.
        reads = (blocked or target == "tpu") and "tail" not in name and target in BYTES
        kernel = target if reads and qtype in BYTES[target] else ""
        expected = None if not (swapped or int8 or kernel) else Layout(None, swapped, int8)
        if kernel:
            expected = dataclasses.replace(expected, kernel=kernel)
        laid = q.pack_for(target, contracted=asked)
        assert laid.layout == expected
        values = np.swapaxes(q.values, -1, -2) if swapped else np.asarray(q.values)
        if int8:
            values = (values.astype(np.int16) - (128 if qtype == jnp.uint8 else 0)).astype(np.int8)
        np.testing.assert_array_equal(laid.values, values, strict=True)
        assert laid.scale is q.scale and laid.shape == (K, N)
        assert_same(laid.unpack(), q)
        assert_same(jqx.pack_for(q, target, contracted=asked), laid)
        assert laid.pack_for(target, contracted=asked) is laid


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_no_code_scale_or_real_value_changes(name, target):
    q, real = made(name)
    laid = jqx.pack_for(q, target)
    assert_same(laid.unpack(), q)
    assert_floats(laid.dequantize(), real, np.float32)


def test_a_layout_gives_way_to_that_of_another_target():
    q = weight(jqx.per_axis(1), jnp.uint4, symmetric=False)
    for first in (q.pack(0), q.pack(1), q, *map(q.pack_for, TARGETS)):
        for target in TARGETS:
            assert_same(first.pack_for(target), q.pack_for(target))
            assert_same(first.T.pack_for(target), q.T.pack_for(target))
    assert q.pack(0).pack_for("tpu").layout == Layout(kernel="tpu")


@pytest.mark.parametrize("name", SCALES)
def test_transposing_a_weight_moves_its_axis_and_not_its_codes(name):
    granularity, told, _ = SCALES[name]
    q = weight(granularity)
    for target in TARGETS:
        asked = None if told else -2
        laid = q.pack_for(target, contracted=asked)
        turned = q.T.pack_for(target, contracted=asked and -1)
        np.testing.assert_array_equal(laid.values, turned.values, strict=True)
        assert laid.in_memory_order.shape == turned.in_memory_order.shape == laid.values.shape


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_stack_is_laid_out_as_each_of_it(data):
    name = data.draw(st.sampled_from(sorted(SCALES)))
    target = data.draw(st.sampled_from(TARGETS))
    qtype = data.draw(st.sampled_from([jnp.int4, jnp.uint2, jnp.int8, jnp.float8_e4m3fn]))
    tensors = [
        jqx.QTensor.quantize(
            spread_out((K, N), seed), spec(qtype, SCALES[name][0], qtype != jnp.uint2)
        )
        for seed in range(2)
    ]
    laid = jqx.pack_for(jqx.QTensor.stack(tensors), target)
    assert_same(laid, jqx.QTensor.stack([q.pack_for(target) for q in tensors]))
    assert_same(laid[1], tensors[1].pack_for(target))


@pytest.mark.parametrize(
    "qtype",
    [
        jnp.int2,
        jnp.uint2,
        jnp.int4,
        jnp.uint4,
        numerics.uint3,
        jnp.uint8,
        numerics.Block(jnp.int4, K, "blockint4"),
    ],
    ids=str,
)
def test_integers_of_other_dtypes_are_stored_as_int8_only_on_cpu(qtype):
    form = numerics.format_of(qtype)
    q = weight(jqx.per_block({0: K, 1: 1}), qtype, symmetric=form.signed)
    laid = q.pack_for("cpu")
    assert laid.values.dtype == jnp.int8
    assert laid.layout.int8 and laid.values.size == q.values.size
    assert_same(laid.unpack(), q)
    assert_floats(laid.dequantize(), np.asarray(q.dequantize()), np.float32)
    for target in ("gpu", "tpu"):
        assert (q.pack(0) if form.bits < 8 else q).pack_for(target).values.dtype == form.storage


@pytest.mark.parametrize(
    "qtype",
    [numerics.int3, numerics.ternary, jnp.int8, numerics.nf4, jnp.float8_e5m2],
    ids=str,
)
def test_codes_that_have_a_byte_each_and_are_no_unsigned_integers_stay(qtype):
    symmetric = numerics.format_of(qtype).signed
    q = weight(jqx.per_axis(0), qtype, symmetric=symmetric)
    for target in ("cpu", "gpu"):
        assert q.pack_for(target) is q
        if numerics.format_of(qtype).bits < 8:
            assert_same(q.pack().pack_for(target), q)


def test_what_has_no_axis_to_contract_keeps_its_order():
    row = jqx.QTensor.quantize(spread_out((6,)), spec(jnp.int4))
    scalar = jqx.QTensor.quantize(spread_out(()), spec(jnp.int4))
    each = weight(jqx.per_axis(0, 1))
    for target in TARGETS:
        for q in (row, scalar, row.pack()):
            assert q.pack_for(target, contracted=-1) is q
        assert each.pack_for(target).layout == (Layout(int8=True) if target == "cpu" else None)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 3), (3, 1), (1, 1)])
def test_axes_of_one_element_or_none_are_laid_out_like_any(shape):
    for axes in [(), (0,), (1,)]:
        q = random_tensor(np.random.default_rng(0), "int4", shape, axes)
        for target in TARGETS:
            laid = q.pack_for(target)
            assert laid.shape == shape
            assert_same(laid.unpack(), q)


def tree_of_weights():
    return {
        "blocks": [{"w": weight(jqx.per_axis(1)), "b": jnp.zeros(N)}],
        "table": weight(jqx.per_axis(0), jnp.int8),
        "static": "relu",
        "none": None,
    }


@pytest.mark.parametrize("target", TARGETS)
def test_every_qtensor_of_a_tree_is_laid_out_and_nothing_else(target):
    tree = tree_of_weights()
    laid = jqx.pack_for(tree, target)
    assert laid["blocks"][0]["b"] is tree["blocks"][0]["b"]
    assert (laid["static"], laid["none"]) == ("relu", None)
    assert_same(laid["blocks"][0]["w"], tree["blocks"][0]["w"].pack_for(target))
    assert_same(laid["table"], tree["table"].pack_for(target))
    back = jax.tree.map(
        lambda q: q.unpack() if isinstance(q, jqx.QTensor) else q,
        laid,
        is_leaf=lambda q: isinstance(q, jqx.QTensor),
    )
    for actual, expected in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_tree_is_laid_out_under_jit_and_of_shapes_alone():
    tree = {"w": weight(jqx.per_axis(1), jnp.uint4, symmetric=False), "b": jnp.zeros(N)}
    for target in TARGETS:
        laid = jqx.pack_for(tree, target)
        pack = functools.partial(jqx.pack_for, target=target)
        assert_same(jax.jit(pack)(tree), laid)
        abstract = jax.eval_shape(pack, tree)
        assert jax.tree.structure(abstract) == jax.tree.structure(laid)
        for shape, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(laid), strict=True):
            assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        shapes = jax.eval_shape(lambda tree: tree, tree)
        assert jax.tree.leaves(pack(shapes)) == jax.tree.leaves(abstract)
        assert jax.tree.structure(pack(shapes)) == jax.tree.structure(abstract)


def test_mapped_over_leading_axes_it_is_that_of_the_stack():
    q = random_tensor(np.random.default_rng(0), "int4", (3, K, N), (0, 2), (0, 2))
    for target in TARGETS:
        mapped = jax.vmap(lambda q, target=target: q.pack_for(target))(q)
        assert_same(mapped, q.pack_for(target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_laid_out_weight_contracts_and_converts_as_before(target):
    """Small integers and scales that are powers of two: every sum is exact in any order."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (2, K, N))
    x = rng.integers(-4, 5, (3, K)).astype(np.float32)
    y = rng.integers(-4, 5, (3, N)).astype(np.float32)
    for scale in (np.full((1, 1), 0.5), 2.0 ** rng.integers(-2, 3, (1, N))):
        q = tensor(codes[0], "int4", scale).pack_for(target)
        real = codes[0] * scale
        assert_floats(on_device(x) @ q, x @ real, np.float32)
        if scale.shape == (1, 1):
            assert_floats(on_device(y) @ q.T, y @ real.T, np.float32)
        numbers = (((0,), (1,)), ((), ()))
        assert_floats(jqx.dot_general(q, x, numbers), real.T @ x.T, np.float32)


def test_a_converted_function_takes_laid_out_parameters():
    def f(params, x):
        h = jax.nn.relu(x @ params["in"])
        return h @ params["out"].T

    params = {"in": on_device(spread_out((K, N))), "out": on_device(spread_out((K, N), 1))}
    x = on_device(spread_out((3, K), 2))
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(params, x)
    quantized = jqx.quantize_params(params, plan)
    convert = jax.jit(jqx.convert(f, plan))
    expected = np.asarray(convert(quantized, x))
    for target in TARGETS:
        laid = jqx.pack_for(quantized, target)
        assert target == "tpu" or laid["in"].layout == Layout(swapped=True)
        np.testing.assert_array_equal(convert(laid, x), expected)


CONTRADICTIONS = [  # the scales, the axis that is asked for, and what the error says
    ("per channel", -1, "axis -1 has a scale for each index"),
    ("per channel of the transpose", -2, "axis -2 has a scale for each index"),
    ("per group", -1, "axis -1 has a scale for each index"),
    ("per group of the transpose", -2, "axis -2 has a scale for each index"),
    ("blocks of one axis, shared along the other", -1, "axis -2 has its scales in blocks"),
]


def test_an_axis_that_contradicts_the_scale_is_refused():
    for name, asked, words in CONTRADICTIONS:
        q, options = weight(SCALES[name][0]), {"target": "gpu", "contracted": asked}
        facts = ("contradicts", f"contracted == {asked}", f"contracted == {-3 - asked}", words)
        assert_refusals("QTensor.pack_for", ValueError, [refusal(facts, q, **options)])
        in_a_tree = refusal((*facts, "at 'blocks/0/w'"), {"blocks": [{"w": q}]}, **options)
        assert_refusals("pack_for", ValueError, [in_a_tree])
    facts = ("contradicts", "contracted == None", "each index of both axes")
    for asked in (-2, -1):
        case = refusal(facts, weight(jqx.per_axis(0, 1)), target="tpu", contracted=asked)
        assert_refusals("QTensor.pack_for", ValueError, [case])


WRONG_OPTIONS = [
    ({"target": "cuda"}, ("`target`", "'cuda'", "'cpu', 'gpu', 'tpu'", "default_backend")),
    ({"target": None}, ("`target`", "target == None", "'cpu'")),
    ({"contracted": 0}, ("`contracted`", "contracted == 0", "-2 or -1")),
    ({"contracted": 1}, ("`contracted`", "contracted == 1")),
    ({"contracted": -3}, ("`contracted`", "contracted == -3")),
    ({"contracted": -1.0}, ("`contracted`", "contracted == -1.0")),
    ({"contracted": "k"}, ("`contracted`", "contracted == 'k'")),
]


def test_other_targets_and_axes_and_trees_without_qtensors_are_refused():
    q = weight(jqx.per_tensor())
    for function, operand in (("QTensor.pack_for", q), ("pack_for", [q])):
        cases = [refusal(facts, operand, **options) for options, facts in WRONG_OPTIONS]
        assert_refusals(function, ValueError, cases, target="cpu")
    facts = ("no QTensor", "quantize_params")
    trees = [refusal((*facts, "1 leaves"), {"w": np.ones(3)}), refusal((*facts, "0 leaves"), [])]
    assert_refusals("pack_for", ValueError, trees, target="cpu")


def test_a_scale_that_is_quantized_itself_does_not_change():
    q = jqx.QTensor.quantize(
        spread_out((32, N)), spec(numerics.nvfp4, jqx.per_block({0: 16, 1: 1}))
    )
    for axes in ((0, 1), (1, 0)):
        turned = q.transpose(axes)
        laid = turned.pack_for("cpu")
        assert_same(laid.scale, turned.scale)
        assert laid.layout == (None if axes == (0, 1) else Layout(swapped=True))
        assert_same(laid.in_memory_order, dataclasses.replace(q))
        assert_floats(laid.dequantize(), np.asarray(turned.dequantize()), np.float32)
