"""QTensor: a pytree that quantizes exactly and refuses parts that do not fit."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import RoundMode, calibrators
from jqx.numerics import INTEGERS

from ..calibrators.oracles import affine, extremes, magnitude, ordinary_floats
from ..numerics.oracles import (
    as_float64,
    as_int64,
    assert_codes,
    assert_floats,
    nearest,
    quantized,
)
from ..ops.refusals import assert_refused
from .tensors import SHAPES, differences, kept, qtensors, random_tensor, tensor

law = settings(max_examples=25, deadline=None)

quantize = functools.partial(jax.jit, static_argnames="spec")(jqx.QTensor.quantize)


def granularity(axes):
    return jqx.per_axis(*axes) if axes else jqx.per_tensor()


def assert_equal(a, b):
    """Asserts that QTensors have one structure and equal leaves."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


@st.composite
def floats_and_specs(draw):
    """Arrays of `SHAPES` and specs for them; halves of the step are as common as all else."""
    shape = draw(st.sampled_from(SHAPES))
    elements = st.one_of(
        ordinary_floats,
        st.integers(-254, 254).map(lambda n: n / 2),
        st.sampled_from([0.0, 127.0, -127.0]),
    )
    x = draw(hnp.arrays(np.float32, shape, elements=elements))
    axes = tuple(sorted(draw(st.sets(st.sampled_from(range(len(shape)))))))
    qtype = draw(st.sampled_from([name for name in INTEGERS if not name.endswith("32")]))
    spec = jqx.QSpec(
        qtype,
        granularity(axes),
        symmetric=not qtype.startswith("u") and draw(st.booleans()),
        calibrator=draw(st.sampled_from([calibrators.absmax, calibrators.minmax])),
    )
    return x, axes, spec


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
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, round_mode=mode))
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


@pytest.mark.parametrize("spec", [jnp.int8, "int8", None, jqx.per_tensor()], ids=repr)
def test_a_spec_of_another_kind_is_refused(spec):
    f = functools.partial(jqx.QTensor.quantize, spec=spec)
    assert_refused(f, (jnp.ones(3),), TypeError, "QTensor.quantize", "`spec`", "QSpec")


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
        None if shape is None else jnp.ones(shape, "float32" if part == "scale" else "int8")
        for part, shape in shapes.items()
    ]
    assert_refused(f, leaves, ValueError, "QTensor", *facts)


@pytest.mark.parametrize("name", ["values", "zero_point"])
@pytest.mark.parametrize("dtype", ["uint8", "int4", "int32", "float32"])
def test_codes_of_another_dtype_than_qtype_are_refused(name, dtype):
    dtypes = dict.fromkeys(("values", "zero_point"), "int8") | {name: dtype}
    values, zero_point = (jnp.ones((1, 1), dtypes[part]) for part in ("values", "zero_point"))
    f = functools.partial(jqx.QTensor, qtype=jnp.int8)
    facts = (f"`{name}`", f"{name}.dtype == {dtype}", "int8")
    assert_refused(f, (values, jnp.ones((1, 1)), zero_point), TypeError, "QTensor", *facts)


@pytest.mark.parametrize("dtype", ["int32", "bool", "int8"])
def test_a_scale_that_is_no_float_is_refused(dtype):
    leaves = jnp.ones((2,), jnp.int8), jnp.ones((1,), dtype)
    f = functools.partial(jqx.QTensor, qtype=jnp.int8)
    assert_refused(f, leaves, TypeError, "QTensor", "`scale`", dtype)


@pytest.mark.parametrize("qtype", ["float32", "float8_e5m2", "bool", "int64"])
def test_a_qtype_that_is_no_integer_format_is_refused(qtype):
    f = functools.partial(jqx.QTensor, qtype=qtype)
    leaves = jnp.ones((2,), jnp.int8), jnp.ones((1,))
    assert_refused(f, leaves, TypeError, "QTensor", "qtype", qtype)


@pytest.mark.parametrize("dtype", ["int8", "bool", "float99"])
def test_a_real_dtype_that_is_no_float_is_refused(dtype):
    leaves = jnp.ones((2,), jnp.int8), jnp.ones((1,))
    make_one = functools.partial(jqx.QTensor, qtype=jnp.int8, dtype=dtype)
    assert_refused(make_one, leaves, TypeError, "QTensor", "dtype", dtype)
    q = jqx.QTensor(*leaves, qtype=jnp.int8)
    assert_refused(lambda q: q.astype(dtype), (q,), TypeError, "QTensor", "dtype", dtype)


def test_a_qtensor_cannot_be_changed_but_replaced():
    q = tensor([[1, 2]], "int8", [[0.5, 2]])
    with pytest.raises(AttributeError):
        q.scale = jnp.ones((1, 1))
    doubled = dataclasses.replace(q, scale=q.scale * 2)
    assert_floats(doubled.dequantize(), 2 * as_float64(q.dequantize()), np.float32)
    with pytest.raises(ValueError, match="`scale`"):
        dataclasses.replace(q, scale=jnp.ones((3, 1)))


@law
@given(qtensors())
def test_dequantizing_rounds_the_exact_product_once(q):
    expected = nearest(differences(q) * as_float64(q.scale), np.float32)
    assert_floats(q.dequantize(), expected, np.float32)


@law
@given(qtensors(SHAPES[:1]), st.sampled_from(["bfloat16", "float16", "float32"]))
def test_narrowing_commutes_with_dequantizing(q, dtype):
    """From float32, the dtype of the scale: a wider one is more than was there to begin with."""
    narrow = q.astype(dtype)
    assert narrow.dtype == jnp.dtype(dtype)
    assert_floats(narrow.dequantize(), np.asarray(q.dequantize().astype(dtype)), dtype)


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
    assert repr(plain) == "QTensor(int8[3, 4], scale [3, 1], dtype=float32)"
    full = random_tensor(rng, "uint4", (2,), (), (), dtype=jnp.bfloat16)
    assert repr(full) == "QTensor(uint4[2], scale [1], zero_point [1], dtype=bfloat16)"
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
    assert_floats(shared(jnp.ones(2), q), np.stack([real, real]), np.float32)


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
    q = jqx.QTensor.quantize(jnp.ones((2, 3)), jqx.QSpec(jnp.int8))
    for use in (np.asarray, jnp.asarray):
        with pytest.raises(TypeError, match=r"not an array(.|\n)*q\.dequantize\(\)"):
            use(q)
    for use in (list, lambda q: 1.0 in q):
        with pytest.raises(TypeError, match="iterable"):
            use(q)


def test_it_prints_and_counts_bytes_whatever_its_leaves_are():
    q = jqx.QTensor.quantize(jnp.ones((2, 3)), jqx.QSpec(jnp.int8))
    part = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int8 else None, q)
    assert repr(part) == "QTensor(int8[2, 3], scale None, dtype=float32)"
    assert jax.eval_shape(lambda q: q, q).nbytes == q.nbytes == 6 + 4
    assert repr(jax.device_get(q)) == repr(q)


def test_a_coarser_zero_point_reshapes_with_the_scale():
    values, zero = jnp.ones((3, 4), jnp.int8), jnp.arange(3, dtype=jnp.int8)[:, None]
    q = jqx.QTensor(values, jnp.full((3, 4), 0.5), zero, qtype=jnp.int8)
    assert jnp.array_equal(q.reshape(np.int64(12)).dequantize(), q.dequantize().reshape(12))


@pytest.mark.parametrize("name", ["values", "scale", "zero_point"])
def test_a_field_that_is_no_array_is_refused_by_name(name):
    fields = {"values": jnp.ones(3, jnp.int8), "scale": jnp.ones(1), "zero_point": None}
    with pytest.raises(TypeError, match=f"`{name}` is not an array"):
        jqx.QTensor(**{**fields, name: 0}, qtype=jnp.int8)


def test_a_given_scale_must_fit():
    x = jnp.ones((3, 4))
    for spec in (jqx.QSpec(jnp.int8), jqx.QSpec(jnp.int8, jqx.per_axis(0))):
        with pytest.raises(ValueError, match=r"`affine\.scale` does not fit `x`"):
            jqx.QTensor.quantize(x, spec, (jnp.ones((2, 1)), None))
    with pytest.raises(ValueError, match="relative to a contraction"):
        jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_channel()), (jnp.ones((1, 1)), None))


def test_a_range_wider_than_the_largest_float_stays_finite():
    x = jnp.array([2e38, -2e38])
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, symmetric=False))
    # The range is 255 steps. Rounding the zero point moves it by up to half a step, 1/255 of 2e38.
    assert jnp.allclose(q.dequantize(), x, rtol=1 / 255)
