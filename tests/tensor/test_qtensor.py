"""QTensor: a pytree that quantizes exactly and refuses parts that do not fit."""

import dataclasses
import functools
import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import RoundMode, calibrators, numerics
from jqx._src.numerics.qtype import INTEGERS
from jqx._src.tensor.grid import fake_quantize_as
from jqx._src.tensor.layout import Layout, Packing

from ..arrays import on_device
from ..ops.formats import largest, nearest_number, product, quotient
from ..oracles.calibrators import affine, extremes, magnitude, ordinary_floats
from ..oracles.numerics import as_float64, as_int64, assert_codes, assert_floats, nearest, quantized
from ..oracles.refusals import assert_refused
from .tensors import (
    CASES,
    SHAPES,
    assert_equal,
    differences,
    kept,
    made,
    qtensors,
    random_codes,
    random_tensor,
    tensor,
)

law = settings(max_examples=25, deadline=None)

quantize = functools.partial(jax.jit, static_argnames="spec")(jqx.QTensor.quantize)


@functools.partial(jax.jit, static_argnames="spec")
def round_trip(x, spec):
    """The QTensor and its real values."""
    q = jqx.QTensor.quantize(x, spec)
    return q, q.dequantize()


def ones(shape, dtype=jnp.float32):
    return on_device(np.ones(shape), jnp.dtype(dtype))


def granularity(axes):
    return jqx.per_axis(*axes) if axes else jqx.per_tensor()


AXES_OF = [(SHAPES[0], axes) for axes in [(), (1,), (0, 2), (0, 1, 2)]]
AXES_OF += [(SHAPES[1], (0, 1)), (SHAPES[1], (2,)), (SHAPES[2], ()), (SHAPES[2], (0,))]
KINDS = [
    {"qtype": qtype, "symmetric": symmetric, "calibrator": calibrator}
    for qtype in INTEGERS
    for symmetric in (True, False)
    for calibrator in (calibrators.absmax, calibrators.minmax)
    if not qtype.endswith("32") and not (symmetric and qtype.startswith("u"))
]
COMBINATIONS = [
    (*AXES_OF[(i + i // len(AXES_OF)) % len(AXES_OF)], kind) for i, kind in enumerate(KINDS)
]
"""Shapes, axes and specs: each is a compiled program."""


@st.composite
def floats_and_specs(draw):
    """Arrays of `SHAPES` and specs for them; halves of the step are as common as all else."""
    shape, axes, fields = draw(st.sampled_from(COMBINATIONS))
    elements = st.one_of(
        ordinary_floats,
        st.integers(-254, 254).map(lambda n: n / 2),
        st.sampled_from([0.0, 127.0, -127.0]),
    )
    x = draw(hnp.arrays(np.float32, shape, elements=elements))
    return x, axes, jqx.QSpec(granularity=granularity(axes), **fields)


@law
@given(floats_and_specs())
def test_codes_scale_and_zero_point_are_those_of_numpy(case):
    """Each float32 operation rounds once, as NumPy's: nothing differs in the last bit."""
    x, axes, spec = case
    if spec.calibrator == calibrators.absmax:
        low, high = -magnitude(x, axes), magnitude(x, axes)
    else:
        low, high = extremes(x, axes)
    scale, zero_point = affine(low, high, spec.qtype, spec.symmetric)
    q = quantize(x, spec=spec)
    assert_floats(q.scale, scale, np.float32)
    if spec.symmetric:
        assert q.zero_point is None
    else:
        assert_codes(q.zero_point, zero_point, spec.qtype)
    zero_point = 0 if zero_point is None else zero_point
    assert_codes(q.values, quantized(x, scale, zero_point, spec.qtype), spec.qtype)
    real = (as_int64(q.values) - zero_point) * as_float64(scale)
    assert_floats(q.dequantize(), nearest(real, np.float32), np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_sixteen_bit_floats_are_quantized_with_a_float32_scale(dtype, symmetric):
    """A 16-bit scale would lose up to half a step at the largest code."""
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(jnp.dtype(dtype))
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), symmetric)
    q = quantize(x, spec=spec)
    m = magnitude(x, (1,))
    scale, zero_point = affine(-m, m, "int8", symmetric)
    assert_floats(q.scale, scale, np.float32)
    zero_point = 0 if symmetric else zero_point
    assert_codes(q.values, quantized(x, scale, zero_point, "int8"), "int8")
    assert q.dtype == jnp.dtype(dtype)
    real = nearest((as_int64(q.values) - zero_point) * as_float64(scale), np.float32)
    assert_floats(q.dequantize(), nearest(real, dtype), dtype)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float32"])
def test_codes_are_not_rounded_to_the_dtype_of_their_scale(scale, zero_point):
    """Codes less zero points are exact, their products with scales are rounded to float32 first;
    so does `simulate` round what it puts on the same grid.
    """
    rng = np.random.default_rng(3)
    dtypes, expected, tensors = ("float32", "bfloat16", "float16"), {}, {}
    for qtype in ("int8", "uint8", "int16", "uint16"):
        codes = random_codes(rng, qtype, (3, 64))
        zeros = random_codes(rng, qtype, (3, 4)) if zero_point else None
        scales = rng.uniform(0.5, 1, (3, 4)).astype(jnp.dtype(scale))
        spread = np.repeat(as_float64(scales), 16, axis=1)
        shift = 0 if zeros is None else np.repeat(zeros, 16, axis=1)
        expected[qtype] = nearest((codes - shift) * spread, np.float32)
        q = tensor(codes, qtype, scales, zeros)
        tensors[qtype] = dataclasses.replace(q, scale=on_device(scales))

    def on_the_same_grid(qtype, q, real):
        if qtype.startswith("u") and not zero_point:
            return real
        spec = jqx.QSpec(jnp.dtype(qtype), jqx.per_block({0: 1, 1: 16}), symmetric=not zero_point)
        return fake_quantize_as(real, spec, jqx.calibrators.Affine(q.scale, q.zero_point))

    @jax.jit
    def found(tensors, reals):
        return {
            qtype: (
                [q.astype(dtype).dequantize() for dtype in dtypes],
                on_the_same_grid(qtype, q, reals[qtype]),
            )
            for qtype, q in tensors.items()
        }

    reals = {qtype: real.astype(np.float32) for qtype, real in expected.items()}
    for qtype, (narrowed, again) in found(tensors, reals).items():
        for dtype, result in zip(dtypes, narrowed, strict=True):
            with np.errstate(over="ignore"):
                real = expected[qtype].astype(jnp.dtype(dtype))
            np.testing.assert_array_equal(result, real, f"{qtype}, {dtype}")
        np.testing.assert_array_equal(again, reals[qtype], qtype)


def test_float64_values_keep_their_dtype_under_x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        q = jqx.QTensor.quantize(jnp.array([[1.0, -127]]), jqx.QSpec(jnp.int8))
        assert_codes(q.values, np.array([[1, -127]]), "int8")
        assert_floats(q.scale, np.array([[1]]), np.float32)
        assert_floats(q.dequantize(), np.array([[1, -127]]), np.float64)


def test_halves_of_a_step_go_to_the_even_code():
    x = np.float32([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    q = quantize(x, spec=jqx.QSpec(jnp.int8))
    assert_codes(q.values, np.array([127, 0, 2, 2, 0, -2, -2]), "int8")


@pytest.mark.parametrize("mode", list(RoundMode))
def test_the_round_mode_is_the_one_of_the_spec(mode):
    x = np.float32([127, 0.5, 1.5, -0.5, -1.5, 0.25, -0.75])
    q = quantize(x, spec=jqx.QSpec(jnp.int8, round_mode=mode))
    assert_codes(q.values, quantized(x, np.float32(1), 0, "int8", mode.value), "int8")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axes", [(), (0,), (0, 1)])
def test_zeros_are_quantized_without_nan(axes, symmetric):
    q = quantize(np.zeros((2, 3), np.float32), spec=jqx.QSpec("int8", granularity(axes), symmetric))
    assert_floats(q.scale, np.ones(kept((2, 3), axes)), np.float32)
    assert_floats(q.dequantize(), np.zeros((2, 3)), np.float32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_one_bad_channel_does_not_spoil_the_others(poison, symmetric):
    """NaN reaches the scale of its own channel, where it is seen, and no other."""
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), symmetric, calibrators.minmax)
    clean = quantize(x, spec=spec)
    x[2, 1] = poison
    q = quantize(x, spec=spec)
    assert not np.isfinite(q.scale[0, 1])
    assert_equal(q[:, ::2], clean[:, ::2])


def test_an_array_without_elements_or_without_axes_is_quantized():
    for shape, axes in [((0, 3), (1,)), ((3, 0), (0,)), ((0,), ()), ((), ())]:
        x = np.ones(shape, np.float32)
        q = quantize(x, spec=jqx.QSpec(jnp.int8, granularity(axes)))
        assert q.scale.shape == kept(shape, axes)
        assert_floats(q.dequantize(), x, np.float32)


def test_a_given_scale_and_zero_point_are_used_as_they_are():
    x = np.float32([[0.5, 9], [-0.75, -9]])
    scale, zero_point = jnp.array([[0.25, 0.5]]), jnp.array([[1, -3]], jnp.int4)
    for pair in [calibrators.Affine(scale, zero_point), (scale, zero_point)]:
        q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int4), pair)
        assert_equal(q, tensor([[3, 7], [-2, -8]], "int4", scale, zero_point))
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int4), calibrators.Affine(scale))
    assert_equal(q, tensor([[2, 7], [-3, -8]], "int4", scale))


def test_quantizing_again_with_the_same_scale_changes_nothing():
    x = np.random.default_rng(2).normal(size=(4, 5)).astype(np.float32)
    spec = jqx.QSpec(jnp.uint8, jqx.per_axis(1), symmetric=False)
    q = quantize(x, spec=spec)
    again = jqx.QTensor.quantize(q.dequantize(), spec, (q.scale, q.zero_point))
    assert_equal(again, q)


def test_eager_jitted_and_mapped_quantizing_agree_bit_by_bit():
    x = np.random.default_rng(3).normal(size=(3, 4, 5)).astype(np.float32)
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0, 2))
    q = jqx.QTensor.quantize(x, spec)
    assert_equal(quantize(x, spec=spec), q)
    each = functools.partial(jqx.QTensor.quantize, spec=jqx.QSpec(jnp.int8, jqx.per_axis(1)))
    assert_equal(jax.vmap(each)(x), q)


@pytest.mark.parametrize("x", [np.ones((2, 3), np.int32), [[1, 2]], True], ids=repr)
def test_values_that_are_no_floats_are_refused(x):
    f = functools.partial(jqx.QTensor.quantize, spec=jqx.QSpec(jnp.int8))
    assert_refused(f, (x,), TypeError, "QTensor.quantize", "`x`", "floating point")


@pytest.mark.parametrize("spec", [jnp.int8, 8, None, jqx.per_tensor()], ids=repr)
def test_a_spec_of_another_kind_is_refused(spec):
    f = functools.partial(jqx.QTensor.quantize, spec=spec)
    assert_refused(f, (ones(3),), TypeError, "QTensor.quantize", "`spec`", "QSpec")


def test_the_parts_are_kept_and_the_dtype_is_float32_by_default():
    q = tensor([[1, 2]], "int8", [[0.5, 2]], [[3, 4]])
    assert (q.shape, q.ndim, q.size) == ((1, 2), 2, 2)
    assert (q.qtype, q.dtype) == (jnp.dtype("int8"), jnp.dtype("float32"))
    assert_floats(q.dequantize(), np.array([[-1, -4]]), np.float32)


def shapes_only(values, scale, zero_point=None, dtypes=("int8", "float32", "int8")):
    return [
        None if shape is None else jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip((values, scale, zero_point), dtypes, strict=True)
    ]


def make(*leaves, **fields):
    """Makes a QTensor of leaves that are only shapes and dtypes."""
    return jax.eval_shape(functools.partial(jqx.QTensor, **{"qtype": "int8", **fields}), *leaves)


@law
@given(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3), st.data())
def test_each_dim_of_a_scale_is_1_or_that_of_the_values(shape, data):
    dims = [st.sampled_from([1, n]) for n in shape]
    scale = data.draw(st.tuples(*dims))
    zero_point = data.draw(st.none() | st.tuples(*[st.sampled_from([1, m]) for m in scale]))
    q = make(*shapes_only(shape, scale, zero_point))
    assert (q.shape, q.scale.shape) == (shape, scale)


@pytest.mark.parametrize(
    "values, scale, zero_point, name, other",
    [
        ((2, 3), (), None, "scale", "values"),
        ((2, 3), (3,), None, "scale", "values"),
        ((2, 3), (3, 1), None, "scale", "values"),
        ((2, 3), (1, 2), None, "scale", "values"),
        ((3,), (1, 3), None, "scale", "values"),
        ((1, 3), (2, 3), None, "scale", "values"),
        ((2, 3), (2, 0), None, "scale", "values"),
        ((2, 3), (2, 1), (), "zero_point", "scale"),
        ((2, 3), (2, 1), (2,), "zero_point", "scale"),
        ((2, 3), (2, 1), (1, 3), "zero_point", "scale"),
        ((2, 3), (1, 1), (2, 3), "zero_point", "scale"),
    ],
)
def test_a_part_that_does_not_broadcast_is_refused_by_its_shape(
    values, scale, zero_point, name, other
):
    shapes = {"values": values, "scale": scale, "zero_point": zero_point}
    facts = (f"`{name}`", f"{name}.shape == {shapes[name]}", f"{other}.shape == {shapes[other]}")
    f = functools.partial(jqx.QTensor, qtype=jnp.int8)
    leaves = [
        None if shape is None else ones(shape, "float32" if part == "scale" else "int8")
        for part, shape in shapes.items()
    ]
    assert_refused(f, leaves, ValueError, "QTensor", *facts)


@pytest.mark.parametrize("name", ["values", "zero_point"])
@pytest.mark.parametrize("dtype", ["uint8", "int4", "int32", "float32"])
def test_codes_of_another_dtype_than_qtype_are_refused(name, dtype):
    dtypes = dict.fromkeys(("values", "zero_point"), "int8") | {name: dtype}
    values, zero_point = (ones((1, 1), dtypes[part]) for part in ("values", "zero_point"))
    f = functools.partial(jqx.QTensor, qtype=jnp.int8)
    facts = (f"`{name}`", f"{name}.dtype == {dtype}", "int8")
    assert_refused(f, (values, ones((1, 1)), zero_point), TypeError, "QTensor", *facts)


@pytest.mark.parametrize("dtype", ["int32", "bool", "int8"])
def test_a_scale_that_is_no_float_is_refused(dtype):
    leaves = ones((2,), jnp.int8), ones((1,), dtype)
    f = functools.partial(jqx.QTensor, qtype=jnp.int8)
    assert_refused(f, leaves, TypeError, "QTensor", "`scale`", dtype)


@pytest.mark.parametrize("qtype", ["float32", "float8_e5m2", "bool", "int64"])
def test_a_qtype_that_is_no_integer_format_is_refused(qtype):
    f = functools.partial(jqx.QTensor, qtype=qtype)
    leaves = ones((2,), jnp.int8), ones((1,))
    assert_refused(f, leaves, TypeError, "QTensor", "qtype", qtype)


@pytest.mark.parametrize("dtype", ["int8", "bool", "float99"])
def test_a_real_dtype_that_is_no_float_is_refused(dtype):
    leaves = ones((2,), jnp.int8), ones((1,))
    make_one = functools.partial(jqx.QTensor, qtype=jnp.int8, dtype=dtype)
    assert_refused(make_one, leaves, TypeError, "QTensor", "dtype", dtype)
    q = jqx.QTensor(*leaves, qtype=jnp.int8)
    assert_refused(lambda q: q.astype(dtype), (q,), TypeError, "QTensor", "dtype", dtype)


def test_a_qtensor_cannot_be_changed_but_replaced():
    q = tensor([[1, 2]], "int8", [[0.5, 2]])
    with pytest.raises(AttributeError):
        q.scale = ones((1, 1))
    doubled = dataclasses.replace(q, scale=q.scale * 2)
    assert_floats(doubled.dequantize(), 2 * as_float64(q.dequantize()), np.float32)
    with pytest.raises(ValueError, match="`scale`"):
        dataclasses.replace(q, scale=ones((3, 1)))


@law
@given(qtensors())
def test_dequantizing_rounds_the_exact_product_once(q):
    expected = nearest(differences(q) * as_float64(q.scale), np.float32)
    assert_floats(q.dequantize(), expected, np.float32)


@settings(max_examples=5, deadline=None)
@given(st.lists(qtensors(SHAPES[:1]), min_size=5, max_size=5))
def test_narrowing_commutes_with_dequantizing(tensors):
    """From float32, the dtype of the scale: a wider one is more than was there to begin with."""
    dtypes = ["bfloat16", "float16", "float32"]

    @jax.jit
    def both(tensors):
        narrow = [[q.astype(dtype) for dtype in dtypes] for q in tensors]
        for of in narrow:
            assert [q.dtype for q in of] == list(map(jnp.dtype, dtypes))
        return [q.dequantize() for q in tensors], [[q.dequantize() for q in of] for of in narrow]

    for real, narrow in zip(*both(tensors), strict=True):
        for found, dtype in zip(narrow, dtypes, strict=True):
            assert_floats(found, np.asarray(real).astype(jnp.dtype(dtype)), dtype)


def test_astype_keeps_every_code_and_scale():
    q = random_tensor(np.random.default_rng(0), "uint8", (2, 3), (0,), (0,))
    assert_equal(q.astype(jnp.bfloat16).astype(jnp.float32), q)


@pytest.mark.parametrize(
    "qtype, axes, zero_point_axes, expected",
    [
        ("int8", (), None, 12 + 4),
        ("int8", (0,), None, 12 + 3 * 4),
        ("uint8", (0, 1), (0, 1), 12 + 12 * 4 + 12),
        ("int16", (1,), (), 24 + 4 * 4 + 2),
    ],
)
def test_nbytes_counts_codes_scales_and_zero_points(qtype, axes, zero_point_axes, expected):
    q = random_tensor(np.random.default_rng(0), qtype, (3, 4), axes, zero_point_axes)
    assert q.nbytes == expected
    assert q.T.nbytes == expected and q.astype("bfloat16").nbytes == expected


def test_it_prints_shapes_and_formats_and_no_contents():
    rng = np.random.default_rng(0)
    plain = random_tensor(rng, "int8", (3, 4), (0,))
    assert repr(plain) == (
        "QTensor(int8[3, 4] per_axis(0), scale float32[3, 1], dtype=float32, 24 bytes)"
    )
    full = random_tensor(rng, "uint4", (2,), (), (), dtype=jnp.bfloat16)
    assert repr(full) == (
        "QTensor(uint4[2] per_tensor, scale float32[1], zero_point uint4[1], dtype=bfloat16, "
        "7 bytes)"
    )
    seen = []
    jax.jit(lambda q: seen.append(repr(q)))(plain)
    seen.append(repr(jax.eval_shape(lambda q: q, plain)))
    assert seen == [repr(plain)] * 2


def full_tensor(shape=(3, 4), axes=(0,), **fields):
    return random_tensor(np.random.default_rng(0), "uint8", shape, axes, axes, **fields)


def test_its_leaves_are_its_arrays_under_their_names():
    q = full_tensor()
    paths, _ = jax.tree_util.tree_flatten_with_path({"w": q})
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    assert names == ["w/values", "w/scale", "w/zero_point"]
    parts = (q.values, q.scale, q.zero_point)
    for leaves in (jax.tree.leaves(q), [leaf for _, leaf in paths]):
        assert all(leaf is part for leaf, part in zip(leaves, parts, strict=True))
    assert len(jax.tree.leaves(tensor([1], "int8"))) == 2, "no zero point is no leaf"


def test_its_structure_is_its_formats_and_not_its_contents_or_shapes():
    q = full_tensor()
    same = [full_tensor((5, 2), (1,)), q[1:], q.T, q[0], jax.tree.map(lambda leaf: leaf, q)]
    for other in same:
        assert jax.tree.structure(other) == jax.tree.structure(q)
        assert hash(jax.tree.structure(other)) == hash(jax.tree.structure(q))
    different = [
        q.astype(jnp.bfloat16),
        dataclasses.replace(q, zero_point=None),
        random_tensor(np.random.default_rng(0), "int8", (3, 4), (0,), (0,)),
    ]
    for other in different:
        assert jax.tree.structure(other) != jax.tree.structure(q)


def test_tree_map_may_put_anything_in_place_of_its_arrays():
    """Optimizers and partitions do: masks, `None`, labels, sentinels."""
    q = full_tensor()
    for thing in (None, object(), "label", True, 3):
        mapped = jax.tree.map(lambda leaf, thing=thing: thing, q)
        assert isinstance(mapped, jqx.QTensor)
        assert (mapped.values, mapped.scale, mapped.zero_point) == (thing,) * 3
        assert (mapped.qtype, mapped.dtype) == (q.qtype, q.dtype)
        assert repr(mapped).startswith("QTensor(")
    labels = jax.tree.map(lambda leaf: leaf.dtype.name, q)
    assert jax.tree.leaves(labels) == ["uint8", "float32", "uint8"]


def test_tree_map_over_two_of_them_pairs_their_arrays():
    q = full_tensor()
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), q, q[::-1])
    assert_equal(stacked[0], q)
    assert_equal(stacked[1], q[::-1])


def test_it_is_flattened_and_pickled_without_loss():
    q = full_tensor()
    leaves, structure = jax.tree.flatten(q)
    assert_equal(jax.tree.unflatten(structure, leaves), q)
    assert_equal(pickle.loads(pickle.dumps(q)), q)
    assert_equal(jax.device_put(jax.device_get(q)), q)


def test_it_crosses_jit_in_and_out_and_is_traced_once():
    traces = []

    @jax.jit
    def f(tree):
        traces.append(tree)
        assert isinstance(tree["w"], jqx.QTensor)
        return tree["w"].T, tree["w"].dequantize()

    q = full_tensor()
    turned, real = f({"w": q})
    assert_equal(turned, q.T)
    assert_floats(real, np.asarray(q.dequantize()), np.float32)
    f({"w": q[::-1]})
    assert len(traces) == 1
    f({"w": q.astype(jnp.bfloat16)})
    assert len(traces) == 2


def test_it_is_a_constant_of_a_jitted_function():
    q = full_tensor()
    assert_floats(jax.jit(lambda: q.dequantize())(), np.asarray(q.dequantize()), np.float32)


def test_vmap_over_an_axis_with_its_own_scales_maps_them_in_step():
    q = full_tensor((3, 4, 5), (0, 2))
    real = np.asarray(q.dequantize())
    assert_floats(jax.jit(jax.vmap(lambda q: q.dequantize()))(q), real, np.float32)
    rows = jax.vmap(lambda q: q[1])(q)
    assert_equal(rows, q[:, 1])
    along_last = jax.vmap(lambda q: q.T, in_axes=2, out_axes=2)(q)
    assert_equal(along_last, q.transpose(1, 0, 2))
    shared = jax.vmap(lambda x, q: x * q.dequantize(), in_axes=(0, None))
    assert_floats(shared(ones(2), q), np.stack([real, real]), np.float32)


def test_vmap_over_an_axis_that_shares_a_scale_is_refused():
    with pytest.raises(ValueError, match="inconsistent sizes"):
        jax.vmap(lambda q: q.dequantize())(full_tensor((3, 4), (1,)))


def test_scan_over_layers_takes_the_scale_of_each():
    q = full_tensor((3, 4, 2), (0, 2))

    @jax.jit
    def scanned(q):
        return jax.lax.scan(lambda total, w: (total + w.dequantize().sum(), w[0]), 0.0, q)

    total, first_rows = scanned(q)
    assert_equal(first_rows, q[:, 0])
    expected = sum(jnp.sum(q[i].dequantize()) for i in range(3))
    # Each sum rounds 8 times at most, and they are added up in one order: both errors below.
    slack = 2 * (8 + 3) * 2.0**-24 * np.abs(as_float64(q.dequantize())).sum()
    assert abs(float(total) - float(expected)) <= slack


def test_it_is_a_carry_and_the_result_of_a_branch():
    q = full_tensor((3, 3))
    turned = jax.lax.fori_loop(0, 3, lambda i, q: q[::-1], q)
    assert_equal(turned, q[::-1])
    choose = jax.jit(lambda p, q: jax.lax.cond(p, lambda q: q[::-1], lambda q: q, q))
    assert_equal(choose(True, q), q[::-1])
    assert_equal(choose(False, q), q)


def test_eval_shape_gives_its_shapes_without_computing():
    x = jax.ShapeDtypeStruct((10**6, 10**6), jnp.bfloat16)
    spec = jqx.QSpec(jnp.int4, jqx.per_axis(1), symmetric=False)
    q = jax.eval_shape(functools.partial(jqx.QTensor.quantize, spec=spec), x)
    assert (q.shape, q.ndim, q.size, q.dtype) == (x.shape, 2, 10**12, jnp.bfloat16)
    assert (q.values.dtype, q.zero_point.dtype, q.scale.dtype) == (jnp.int4, jnp.int4, jnp.float32)
    assert q.scale.shape == q.zero_point.shape == (1, 10**6)
    assert jax.eval_shape(lambda q: q.T[0].dequantize(), q).shape == (10**6,)


def test_dequantizing_has_the_gradient_of_the_scale():
    q = full_tensor()
    gradient = jax.jit(jax.grad(lambda q: q.dequantize().sum(), allow_int=True))(q)
    assert jax.tree.structure(gradient) == jax.tree.structure(q)
    assert_floats(gradient.scale, differences(q).sum(1, keepdims=True), np.float32)


def test_it_is_no_array_and_no_sequence():
    q = jqx.QTensor.quantize(ones((2, 3)), jqx.QSpec(jnp.int8))
    for use in (np.asarray, jnp.asarray):
        with pytest.raises(TypeError, match=r"not an array(.|\n)*q\.dequantize\(\)"):
            use(q)
    for use in (list, lambda q: 1.0 in q):
        with pytest.raises(TypeError, match="iterable"):
            use(q)


def test_it_prints_and_counts_bytes_whatever_its_leaves_are():
    q = jqx.QTensor.quantize(ones((2, 3)), jqx.QSpec(jnp.int8))
    part = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int8 else None, q)
    assert repr(part).startswith("QTensor(int8") and "scale None" in repr(part)
    assert "[2, 3]" in repr(part) and "127" not in repr(part), "shapes and no contents"
    assert jax.eval_shape(lambda q: q, q).nbytes == q.nbytes == 6 + 4
    assert repr(jax.device_get(q)) == repr(q)


def test_a_coarser_zero_point_reshapes_with_the_scale():
    q = tensor(np.ones((3, 4)), "int8", np.full((3, 4), 0.5), np.arange(3)[:, None])
    expected = np.asarray(q.dequantize()).reshape(12)
    assert_floats(q.reshape(np.int64(12)).dequantize(), expected, np.float32)


@pytest.mark.parametrize("name", ["values", "scale", "zero_point"])
def test_a_field_that_is_no_array_is_refused_by_name(name):
    fields = {"values": ones(3, jnp.int8), "scale": ones(1), "zero_point": None}
    with pytest.raises(TypeError, match=f"`{name}` is not an array"):
        jqx.QTensor(**{**fields, name: 0}, qtype=jnp.int8)


def test_a_given_scale_must_fit():
    x = ones((3, 4))
    for spec in (jqx.QSpec(jnp.int8), jqx.QSpec(jnp.int8, jqx.per_axis(0))):
        with pytest.raises(ValueError, match=r"`affine\.scale` does not fit `x`"):
            jqx.QTensor.quantize(x, spec, (ones((2, 1)), None))
    with pytest.raises(ValueError, match="relative to a contraction"):
        jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_channel()), (ones((1, 1)), None))


def test_a_range_wider_than_the_largest_float_stays_finite():
    x = jnp.array([2e38, -2e38])
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, symmetric=False))
    # The range is 255 steps. Rounding the zero point moves it by up to half a step, 1/255 of 2e38.
    assert jnp.allclose(q.dequantize(), x, rtol=1 / 255)


# Formats and granularities against NumPy, one block after the other.

FORMATS = {
    "int8": (jnp.int8, "int8"),
    "int4": (jnp.int4, "int4"),
    "int3": (numerics.int3, "int3"),
    "ternary": (numerics.ternary, "ternary"),
    "float8_e4m3fn": (jnp.float8_e4m3fn, "float8_e4m3fn"),
    "float8_e5m2": (jnp.float8_e5m2, "float8_e5m2"),
    "float6_e2m3fn": (numerics.float6_e2m3fn, "float6_e2m3fn"),
    "nf4": (numerics.nf4, "nf4"),
    "mxfp4": (numerics.mxfp4, "float4_e2m1fn"),
    "mxfp6_e3m2": (numerics.mxfp6_e3m2, "float6_e3m2fn"),
    "mxfp8_e4m3": (numerics.mxfp8_e4m3, "float8_e4m3fn"),
    "mxint8": (numerics.mxint8, "int8_narrow"),
    "nvfp4": (numerics.nvfp4, "float4_e2m1fn"),
}
FREE = [name for name in FORMATS if not name.startswith(("mx", "nv"))]
SHARED = {
    "per tensor": (None, (3, 100)),
    "per axis": (jqx.per_axis(0), (1, 100)),
    "blocks of 25": (jqx.per_block({0: 1, 1: 25}), (1, 25)),
    "blocks of 32 and a tail": (jqx.per_block({0: 1, 1: 32}, tail=True), (1, 32)),
    "blocks of two axes and tails": (jqx.per_block({0: 2, 1: 16}, tail=True), (2, 16)),
}


def blocks_of(x, sizes):
    """Slices that cut an array into its blocks, the last along an axis perhaps smaller."""
    ends = [range(0, n, b) for n, b in zip(x.shape, sizes, strict=True)]
    for starts in itertools.product(*ends):
        yield tuple(slice(a, a + b) for a, b in zip(starts, sizes, strict=True))


def scale_by_itself(block, name):
    """The scale that one block would have as an array of its own, as the docstrings have it."""
    m = np.max(np.abs(block.astype(np.float32)))
    element = FORMATS[name][1]
    if name.startswith("mx"):
        top = largest(element) * (2.0**-6 if name == "mxint8" else 1)
        if np.isnan(m):
            return np.float32(np.nan)
        if m == 0:
            return np.float32(2.0**-127)
        exponent = math.floor(math.log2(float(m))) - math.floor(math.log2(top))
        return np.float32(2.0 ** min(max(exponent, -127), 127))
    scale = m / np.float32(largest(element))
    return np.float32(1) if scale == 0 and name != "nvfp4" else scale


def by_blocks(x, name, sizes):
    """The real values and the scales, spread over the array, of an array quantized in NumPy."""
    element = FORMATS[name][1]
    scale = np.zeros(x.shape, np.float32)
    for block in blocks_of(x, sizes):
        scale[block] = scale_by_itself(x[block], name)
    if name == "nvfp4":  # in e4m3, relative to one float32 scale
        known = np.nan_to_num(scale)
        whole = np.max(known) / np.float32(448) or np.float32(1)
        scale = product(nearest_number(quotient(scale, whole), "float8_e4m3fn"), whole)
    unit = 2.0**-6 if name == "mxint8" else 1
    y = quotient(x, scale) / np.float32(unit)
    if element.startswith(("int", "tern")):
        y = np.where(np.isnan(y), 0, y)
    return product(nearest_number(y, element) * unit, scale), scale


def normal(shape=(3, 100), size=1.0):
    rng = np.random.default_rng(7)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-4, 5, shape) * size
    return x.astype(np.float32)


CHECKED = [(name, shared) for name in FREE for shared in SHARED]
CHECKED += [(name, "blocks of 32 and a tail") for name in FORMATS if name.startswith("mx")]
CHECKED += [
    ("nvfp4", "blocks of 16"),
    ("nvfp4", "blocks of 4 by 4"),
]
OF_BLOCKS = {
    "blocks of 16": (jqx.per_block({0: 1, 1: 16}, tail=True), (1, 16)),
    "blocks of 4 by 4": (jqx.per_block({0: 4, 1: 4}, tail=True), (4, 4)),
}


@pytest.mark.many
@pytest.mark.parametrize("name, shared", CHECKED)
def test_each_block_is_quantized_as_if_it_were_alone(name, shared):
    granularity, sizes = (SHARED | OF_BLOCKS)[shared]
    x = normal()
    spec = jqx.QSpec(FORMATS[name][0], granularity or jqx.per_tensor())
    q, found = round_trip(x, spec=spec)
    real, scale = by_blocks(x, name, sizes)
    assert_floats(found, real, np.float32)
    places = tuple(np.arange(0, n, b) for n, b in zip(x.shape, sizes, strict=True))
    found = q.scale.dequantize() if name == "nvfp4" else np.asarray(q.scale).astype(np.float32)
    assert_floats(found, scale[np.ix_(*places)], np.float32)
    assert q.groups.sizes == tuple(min(b, n) for b, n in zip(sizes, x.shape, strict=True))


@pytest.mark.parametrize("shared", SHARED)
def test_each_block_has_the_zero_point_that_it_would_have_alone(shared):
    granularity, sizes = SHARED[shared]
    x = normal() + np.float32(3)
    spec = jqx.QSpec(jnp.uint4, granularity or jqx.per_tensor(), False, calibrators.minmax)
    _, found = round_trip(x, spec=spec)
    real = np.zeros(x.shape, np.float32)
    for block in blocks_of(x, sizes):
        scale, zero = affine(x[block].min(), x[block].max(), "uint4", False)
        codes = quantized(x[block], scale, zero, "uint4")
        real[block] = product(codes - zero, scale)
    assert_floats(found, real, np.float32)


def every_spec():
    """A spec in blocks of each format, for arrays of (2, 64)."""
    for name, (qtype, _) in FORMATS.items():
        size = getattr(qtype, "size", 32)
        yield pytest.param(name, jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size})), id=name)


each_format = pytest.mark.parametrize("name, spec", list(every_spec()))


@pytest.mark.many
@each_format
def test_blocks_of_zeros_and_of_one_value_stay_finite(name, spec):
    x = normal((2, 64))
    x[0, :32], x[1, 32:] = 0, 3
    for array in (x, np.zeros((2, 64), np.float32), np.full((2, 64), -3, np.float32)):
        y = np.asarray(round_trip(array, spec=spec)[1])
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(y[array == 0], 0)
        if array is not x:  # the nearest number to the largest is off by one part in 8 at most
            np.testing.assert_allclose(y, array, rtol=0.34 if name.startswith("mx") else 0.04)


@each_format
def test_a_nan_poisons_its_own_block_alone(name, spec):
    x = normal((2, 64))
    clean = np.asarray(round_trip(x, spec=spec)[1])
    poisoned = x.copy()
    poisoned[0, 3] = np.nan
    y = np.asarray(round_trip(poisoned, spec=spec)[1])
    size = spec.granularity.sizes[1][1]
    assert np.isnan(y[0, :size]).all()
    kept = np.ones((2, 64), bool)
    kept[0, :size] = False
    if name == "nvfp4":  # the block that was lost may have set the scale of the scales
        x[0, :size] = 0
        clean = np.asarray(round_trip(x, spec=spec)[1])
    assert_floats(on_device(y[kept]), clean[kept], np.float32)


@pytest.mark.many
@each_format
def test_a_scale_of_zero_that_is_given_gives_finite_values(name, spec):
    dtype = jnp.float8_e8m0fnu if name.startswith("mx") else np.float32
    scale = np.zeros((2, 64 // spec.granularity.sizes[1][1])).astype(dtype)

    @jax.jit
    def real(x, scale):
        return jqx.QTensor.quantize(x, spec, (scale, None)).dequantize()

    y = np.asarray(real(normal((2, 64)), scale))
    assert np.isfinite(y).all() if not name.startswith("mx") else y.shape == (2, 64)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_nvfp4_keeps_small_weights(size):
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32) * np.float32(size)
    spec = jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 1, 1: 16}))
    error = np.asarray(round_trip(x, spec=spec)[1]) - x
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(x)


PACKED_BYTES = {"int4": 32, "int3": 24, "ternary": 16, "nf4": 32, "mxfp4": 32}
PACKED_BYTES |= {"float6_e2m3fn": 48, "mxfp6_e3m2": 48, "nvfp4": 32}


@pytest.mark.many
@pytest.mark.parametrize("name", PACKED_BYTES)
def test_packing_loses_nothing_and_takes_the_bits_of_the_format(name):
    qtype = FORMATS[name][0]
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: getattr(qtype, "size", 32)}))
    x = normal((3, 64))

    @jax.jit
    def tensors(x):
        q = jqx.QTensor.quantize(x, spec)
        packed, along_rows = q.pack(), q.pack(0)
        again = [jqx.QTensor.quantize(x, spec, pack=axis) for axis in (1, -1)]
        reals = [tensor.dequantize() for tensor in (q, packed, along_rows)]
        return q, packed, along_rows, [packed.unpack(), along_rows.unpack()], again, reals

    q, packed, along_rows, unpacked, again, reals = tensors(x)
    assert packed.values.dtype == jnp.uint8
    assert (packed.shape, packed.ndim, packed.size) == (q.shape, q.ndim, q.size)
    assert packed.values.size == 3 * PACKED_BYTES[name]
    assert packed.nbytes == q.nbytes - 3 * (64 - PACKED_BYTES[name])
    assert packed.unpack().unpack() is not packed and q.unpack() is q
    assert along_rows.layout == Layout(Packing(-2, 3)) and along_rows.shape == (3, 64)
    for found in (*unpacked, packed.unpack()):
        assert_equal(found, q)
    for found in (*again, q.pack()):
        assert_equal(found, packed)
    for real in reals[1:]:
        assert_floats(real, np.asarray(reals[0]), np.float32)
    assert "packed" in repr(packed) and f"{packed.nbytes:,} bytes" in repr(packed)


@pytest.mark.parametrize("qtype", [jnp.int4, jnp.uint4, numerics.uint3, jnp.int2], ids=str)
def test_packed_codes_with_zero_points_and_a_tail_dequantize_alike(qtype):
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 4}, tail=True), symmetric=False)
    x = on_device(normal((3, 11)))
    q, packed = jqx.QTensor.quantize(x, spec), jqx.QTensor.quantize(x, spec, pack=1)

    @jax.jit
    def reals(q, packed):
        mapped = jax.vmap(lambda q: q.dequantize())(packed)
        return q.dequantize(), packed.dequantize(), mapped, packed.unpack()

    real, *others, unpacked = reals(q, packed)
    assert_equal(unpacked, q)
    for found in others:
        assert_floats(found, np.asarray(real), np.float32)


@pytest.mark.parametrize("qtype", [jnp.int8, jnp.int16, jnp.float8_e4m3fn, numerics.int7.storage])
def test_a_format_that_fills_its_bytes_is_not_packed(qtype):
    q = jqx.QTensor.quantize(ones((4, 6)), jqx.QSpec(qtype))
    assert_refused(lambda q: q.pack(), (q,), ValueError, "QTensor.pack", "fill their bytes")
    f = functools.partial(jqx.QTensor.quantize, spec=jqx.QSpec(qtype), pack=0)
    assert_refused(f, (ones((4, 6)),), ValueError, "QTensor.quantize", "fill their bytes")


@pytest.mark.parametrize("shape, axis", [((4, 6), 2), ((4, 6), -3), ((), 0), ((), -1)])
def test_there_must_be_an_axis_to_pack_along(shape, axis):
    f = functools.partial(jqx.QTensor.quantize, spec=jqx.QSpec(jnp.int4), pack=axis)
    facts = ("does not exist", f"axis {axis}", f"rank {len(shape)}")
    assert_refused(f, (ones(shape),), ValueError, "QTensor.quantize", *facts)


BLOCK = jqx.per_block({0: 1, 1: 32})


@pytest.mark.parametrize(
    "f, error, function, facts",
    [
        (
            lambda: jqx.QTensor.quantize(
                ones((2, 64)), jqx.QSpec(numerics.mxfp4, BLOCK), (ones((2, 2)), None)
            ),
            TypeError,
            "QTensor.quantize",
            ("mxfp4", "powers of two", "float32", "float8_e8m0fnu"),
        ),
        (
            lambda: jqx.QTensor.quantize(
                ones((2, 64)), jqx.QSpec(numerics.mxfp4, jqx.per_block({0: 1, 1: 16}))
            ),
            ValueError,
            "QTensor.quantize",
            ("mxfp4 has blocks of 32", "16 elements", "per_group(32)"),
        ),
        (
            lambda: jqx.QSpec(numerics.mxfp4, jqx.per_group(16)),
            ValueError,
            "QSpec",
            ("mxfp4 has blocks of 32", "per_group(16)", "per_group(32)"),
        ),
        (
            lambda: jqx.QSpec(numerics.nvfp4, jqx.per_tensor()),
            ValueError,
            "QSpec",
            ("nvfp4 has blocks of 16", "per_tensor"),
        ),
        (
            lambda: jqx.QTensor.quantize(ones((2, 64)), jqx.QSpec(numerics.mxfp4)),
            ValueError,
            "per_group",
            ("is relative to a contraction", "per_group(", "jqx.per_block"),
        ),
        (
            lambda: jqx.QTensor.quantize(ones((2, 50)), jqx.QSpec(jnp.int8, BLOCK)),
            ValueError,
            "per_block",
            ("blocks of 32 do not divide axis 1", "(2, 50)", "tail=True"),
        ),
        (
            lambda: jqx.QSpec(jnp.float8_e4m3fn, symmetric=False),
            ValueError,
            "QSpec",
            ("float8_e4m3fn has no zero point", "symmetric=True"),
        ),
        (
            lambda: jqx.QTensor(
                ones(4, jnp.float8_e4m3fn),
                ones(1),
                ones(1, jnp.float8_e4m3fn),
                qtype=jnp.float8_e4m3fn,
            ),
            ValueError,
            "QTensor",
            ("float8_e4m3fn has no zero point",),
        ),
        (
            lambda: jqx.QTensor(ones(4, jnp.int8), ones(1), qtype=numerics.nf4),
            TypeError,
            "QTensor",
            ("values.dtype == int8", "uint8, the codes of nf4"),
        ),
        (
            lambda: jqx.QTensor(ones(5, jnp.int8), ones(2), qtype=jnp.int8),
            ValueError,
            "QTensor",
            ("`scale` does not fit `values`", "scale.shape == (2,)"),
        ),
        (
            lambda: jqx.QTensor(ones(5, jnp.int8), ones(2), qtype=jnp.int8, blocks=((5, 2, 2),)),
            ValueError,
            "QTensor",
            ("`scale` does not fit `values`", "blocks == ((5, 2, 2),)"),
        ),
        (
            lambda: jqx.QTensor(ones(5, jnp.int8), ones(1), qtype=jnp.int8, blocks=((-1, 2),)),
            ValueError,
            "QTensor",
            ("`blocks` does not describe block sizes", "((-1, 2),)", "((100, 4, 32),)"),
        ),
        (
            lambda: jqx.QTensor.concatenate([]),
            ValueError,
            "QTensor.concatenate",
            ("nothing to join",),
        ),
        (
            lambda: jqx.QTensor.stack([tensor([1], "int8"), tensor([1], "int4")]),
            TypeError,
            "QTensor.stack",
            ("different formats", "int8", "int4"),
        ),
        (
            lambda: jqx.QTensor.concatenate([tensor([1], "int8"), np.ones(1)]),
            TypeError,
            "QTensor.concatenate",
            ("QTensor",),
        ),
        (
            lambda: tensor([1, 2, 3], "int8").split(2),
            ValueError,
            "QTensor.split",
            ("equal parts", "2 sections", "(3,)"),
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_facts(f, error, function, facts):
    assert_refused(f, (), error, function, *facts)


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_it_shows_format_shape_granularity_and_bytes(name):
    q, _ = made(name)
    form = numerics.format_of(q.qtype).name
    granularity, size = str(q.groups), sum(leaf.nbytes for leaf in jax.tree.leaves(q))
    shown = repr(q)
    for fact in (f"{form}{list(q.shape)}", granularity, f"{size:,} bytes", "dtype=float32"):
        assert fact in shown


def test_it_is_shown_whatever_its_leaves_are():
    """Masks and partitions have `None` or labels in place of arrays."""
    q, _ = made("nv with a tail")
    for thing in (None, "label", True):
        filled = jax.tree.map(lambda leaf, thing=thing: thing, q)
        assert "QTensor" in repr(filled) and repr(thing) in repr(filled)
    assert "[3, 4, 10]" in repr(jax.eval_shape(lambda: q))


@jax.jit
def jitted_scaled(q, factor):
    scaled = q.scaled(factor)
    return scaled, scaled.dequantize()


@law
@given(st.sampled_from(sorted(CASES)), st.integers(-8, 8), st.booleans())
def test_scaling_by_a_power_of_two_commutes_with_dequantizing(name, exponent, negative):
    """Other factors round the scale."""
    q, real = made(name)
    factor = np.float32(2.0**exponent) * (-1 if negative else 1)
    scaled, found = jitted_scaled(q, factor)
    assert_floats(found, real * factor, np.float32)
    np.testing.assert_array_equal(as_float64(scaled.values), as_float64(q.values))


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_format_is_narrowed_after_dequantizing(name, dtype):
    q, real = made(name)
    assert_floats(q.astype(dtype).dequantize(), real.astype(jnp.dtype(dtype)), dtype)


def test_structures_are_equal_exactly_where_all_but_shapes_is():
    tensors = [made(name)[0] for name in CASES]
    for a, b in itertools.combinations(tensors, 2):
        alike = all(
            getattr(a, field) == getattr(b, field) for field in ("qtype", "dtype", "blocks")
        )
        alike &= (a.zero_point is None) == (b.zero_point is None)
        assert (jax.tree.structure(a) == jax.tree.structure(b)) == alike


def test_jax_functions_refuse_it_and_name_the_way_out():
    for name in ("int4 with a tail", "nv with a tail"):
        for use in (jnp.asarray, np.asarray):
            with pytest.raises(TypeError, match=r"QTensor(.|\n)*q\.dequantize\(\)(.|\n)*q\.values"):
                use(made(name)[0])


def test_a_dtype_for_dequantize_is_refused_with_the_call_that_converts():
    q = jqx.QTensor.quantize(jnp.ones((2, 4)), jqx.QSpec("int8"))
    with pytest.raises(TypeError, match=r"jqx\.QTensor\.dequantize: too many positional") as caught:
        q.dequantize(jnp.float32)
    assert "q.astype(jnp.float32).dequantize()" in str(caught.value)
