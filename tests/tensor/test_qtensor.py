"""QTensor: a pytree that refuses parts that do not fit, wherever JAX puts it, and in exports."""

import dataclasses
import functools
import itertools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import export
from jax.sharding import PartitionSpec

import jqx
from jqx import numerics
from jqx._src.numerics.lookup import DTYPES

from ..arrays import assert_same, normal, on_device
from ..oracles.numerics import as_float64, assert_floats, nearest
from ..oracles.refusals import assert_error, assert_refused
from .tensors import CASES, differences, made, qtensors, random_tensor, spec, spread_out, tensor

law = settings(max_examples=25, deadline=None)


def ones(shape, dtype=jnp.float32):
    return on_device(np.ones(shape), jnp.dtype(dtype))


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


SHAPES_THAT_DO_NOT_FIT = [  # of values, scale and zero point, and which does not fit which
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
]


def test_a_part_that_does_not_broadcast_is_refused_by_its_shape():
    for values, scale, zero_point, name, other in SHAPES_THAT_DO_NOT_FIT:
        shapes = {"values": values, "scale": scale, "zero_point": zero_point}
        facts = (f"{part}.shape == {shapes[part]}" for part in (name, other))
        leaves = [
            None if shape is None else ones(shape, "float32" if part == "scale" else "int8")
            for part, shape in shapes.items()
        ]
        assert_refused(OF_INT8, leaves, ValueError, "QTensor", f"`{name}`", *facts)


OF_INT8 = functools.partial(jqx.QTensor, qtype=jnp.int8)
CODES = ones((2,), jnp.int8), ones((1,))


def test_parts_of_other_dtypes_are_refused_by_name():
    for name, dtype in itertools.product(
        ("values", "zero_point"), ("uint8", "int4", "int32", "float32")
    ):
        dtypes = dict.fromkeys(("values", "zero_point"), "int8") | {name: dtype}
        values, zero_point = (ones((1, 1), dtypes[part]) for part in ("values", "zero_point"))
        facts = (f"`{name}`", f"{name}.dtype == {dtype}", "int8")
        assert_refused(OF_INT8, (values, ones((1, 1)), zero_point), TypeError, "QTensor", *facts)
    for dtype in ("int32", "bool", "int8"):
        leaves = CODES[0], ones((1,), dtype)
        assert_refused(OF_INT8, leaves, TypeError, "QTensor", "`scale`", dtype)
    for name in ("values", "scale", "zero_point"):
        fields = {"values": ones(3, jnp.int8), "scale": ones(1), "zero_point": None, name: 0}
        make_one = functools.partial(OF_INT8, **fields)
        assert_error(make_one, f"`{name}` is not an array", error=TypeError)


def test_formats_and_dtypes_of_another_kind_are_refused():
    for qtype in ("float32", "float8_e5m2", "bool", "int64"):
        make_one = functools.partial(jqx.QTensor, qtype=qtype)
        assert_refused(make_one, CODES, TypeError, "QTensor", "qtype", qtype)
    for dtype in ("int8", "bool", "float99"):
        make_one = functools.partial(jqx.QTensor, qtype=jnp.int8, dtype=dtype)
        assert_refused(make_one, CODES, TypeError, "QTensor", "dtype", dtype)
        narrow = functools.partial(jqx.QTensor.astype, dtype=dtype)
        assert_refused(narrow, (OF_INT8(*CODES),), TypeError, "QTensor", "dtype", dtype)


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


def test_astype_keeps_every_code_and_scale():
    q = random_tensor(np.random.default_rng(0), "uint8", (2, 3), (0,), (0,))
    assert_same(q.astype(jnp.bfloat16).astype(jnp.float32), q)


def test_nbytes_counts_codes_scales_and_zero_points():
    for qtype, axes, zero_point_axes, expected in [
        ("int8", (), None, 12 + 4),
        ("int8", (0,), None, 12 + 3 * 4),
        ("uint8", (0, 1), (0, 1), 12 + 12 * 4 + 12),
        ("int16", (1,), (), 24 + 4 * 4 + 2),
    ]:
        q = random_tensor(np.random.default_rng(0), qtype, (3, 4), axes, zero_point_axes)
        assert q.nbytes == expected
        assert q.T.nbytes == expected and q.astype("bfloat16").nbytes == expected
        assert jax.eval_shape(lambda q: q, q).nbytes == expected


def test_it_prints_shapes_and_formats_and_no_contents_whatever_its_leaves_are():
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
    texts = []
    jax.jit(lambda q: texts.append(repr(q)))(plain)
    texts += [repr(jax.eval_shape(lambda q: q, plain)), repr(jax.device_get(plain))]
    assert texts == [repr(plain)] * 3
    codes = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int8 else None, plain)
    assert repr(codes) == "QTensor(int8 of int8[3, 4], scale None, dtype=float32)"


def test_it_shows_format_shape_granularity_and_bytes():
    for name in CASES:
        q, _ = made(name)
        form = numerics.format_of(q.qtype).name
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(q))
        for text in (repr(q), repr(jax.eval_shape(lambda q=q: q))):
            for fact in (f"{form}{list(q.shape)}", str(q.groups), "dtype=float32"):
                assert fact in text
            assert f"{size:,} bytes" in text


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
    assert jax.tree.structure(q.astype(jnp.bfloat16)) != jax.tree.structure(q)


def test_tree_map_may_put_anything_in_place_of_its_arrays():
    """Optimizers and partitions do: masks, `None`, labels, sentinels, shapes, and gradients. They
    are no codes, and can be mapped and printed.
    """
    q = full_tensor()
    for thing in (None, object(), "label", True, 3, PartitionSpec()):
        mapped = jax.tree.map(lambda leaf, thing=thing: thing, q)
        assert isinstance(mapped, jqx.QTensor)
        assert (mapped.values, mapped.scale, mapped.zero_point) == (thing,) * 3
        assert (mapped.qtype, mapped.dtype) == (jnp.dtype("uint8"), jnp.dtype("float32"))
        nested = jax.tree.map(lambda leaf, thing=thing: thing, made("nv with a tail")[0])
        for tree in (mapped, nested):
            assert repr(tree).startswith("QTensor(") and repr(thing) in repr(tree)
            tree._repr_html_()
    facts = [lambda a: a.dtype, lambda a: a.shape, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)]
    for fact in facts:
        tree = jax.tree.map(fact, q)
        assert repr(tree).startswith("QTensor(")
        tree._repr_html_()
    assert jax.tree.leaves(jax.tree.map(lambda a: a.dtype.name, q)) == ["uint8", "float32", "uint8"]


def test_shapes_batches_and_gradients_of_it_are_computed_with():
    q = jqx.QTensor.quantize(W, CHANGED_SPECS["int8"])
    kind = jax.eval_shape(lambda q: q, q)
    assert jax.eval_shape(lambda q: X @ q, kind).shape == (4, 8)
    both = jax.tree.map(lambda a: jnp.stack([a, a]), q)
    assert jax.eval_shape(jax.vmap(lambda q: X @ q), both).shape == (2, 4, 8)
    slope = jax.eval_shape(jax.grad(lambda q: (X @ q).sum(), allow_int=True), q)
    assert slope.scale.shape == (1, 8)
    assert "float0" in repr(slope)


def test_tree_map_over_two_of_them_pairs_their_arrays():
    q = full_tensor()
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), q, q[::-1])
    assert_same(stacked[0], q)
    assert_same(stacked[1], q[::-1])


def test_it_is_flattened_and_pickled_without_loss():
    q = full_tensor()
    leaves, structure = jax.tree.flatten(q)
    assert_same(jax.tree.unflatten(structure, leaves), q)
    assert_same(pickle.loads(pickle.dumps(q)), q)
    assert_same(jax.device_put(jax.device_get(q)), q)


def test_it_crosses_jit_in_and_out_and_is_traced_once():
    traces = []

    @jax.jit
    def f(tree):
        traces.append(tree)
        assert isinstance(tree["w"], jqx.QTensor)
        return tree["w"].T, tree["w"].dequantize()

    q = full_tensor()
    turned, real = f({"w": q})
    assert_same(turned, q.T)
    assert_floats(real, np.asarray(q.dequantize()), np.float32)
    f({"w": q[::-1]})
    assert len(traces) == 1
    f({"w": q.astype(jnp.bfloat16)})
    assert len(traces) == 2
    assert_floats(jax.jit(lambda: q.dequantize())(), np.asarray(real), np.float32)


def test_vmap_over_an_axis_with_its_own_scales_maps_them_in_step():
    q = full_tensor((3, 4, 5), (0, 2))
    real = np.asarray(q.dequantize())
    assert_floats(jax.jit(jax.vmap(lambda q: q.dequantize()))(q), real, np.float32)
    rows = jax.vmap(lambda q: q[1])(q)
    assert_same(rows, q[:, 1])
    along_last = jax.vmap(lambda q: q.T, in_axes=2, out_axes=2)(q)
    assert_same(along_last, q.transpose(1, 0, 2))
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
    assert_same(first_rows, q[:, 0])
    expected = sum(jnp.sum(q[i].dequantize()) for i in range(3))
    # Each sum rounds 8 times at most, and they are added up in one order: both errors below.
    slack = 2 * (8 + 3) * 2.0**-24 * np.abs(as_float64(q.dequantize())).sum()
    assert abs(float(total) - float(expected)) <= slack


def test_it_is_a_carry_and_the_result_of_a_branch():
    q = full_tensor((3, 3))
    turned = jax.lax.fori_loop(0, 3, lambda i, q: q[::-1], q)
    assert_same(turned, q[::-1])
    choose = jax.jit(lambda p, q: jax.lax.cond(p, lambda q: q[::-1], lambda q: q, q))
    assert_same(choose(True, q), q[::-1])
    assert_same(choose(False, q), q)


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


def test_it_is_no_array_and_no_sequence_and_says_what_to_write():
    for q in (full_tensor(), made("int4 with a tail")[0], made("nv with a tail")[0]):
        for use in (np.asarray, jnp.asarray):
            with pytest.raises(
                TypeError,
                match=r"QTensor(.|\n)*not an array(.|\n)*q\.dequantize\(\)(.|\n)*q\.values",
            ):
                use(q)
        for use in (list, lambda q: 1.0 in q):
            with pytest.raises(TypeError, match="iterable"):
                use(q)
    with pytest.raises(
        TypeError, match=r"jqx\.QTensor\.dequantize: too many positional"
    ) as refusal:
        full_tensor().dequantize(jnp.float32)
    assert "q.astype(jnp.float32).dequantize()" in str(refusal.value)


def test_a_coarser_zero_point_reshapes_with_the_scale():
    q = tensor(np.ones((3, 4)), "int8", np.full((3, 4), 0.5), np.arange(3)[:, None])
    expected = np.asarray(q.dequantize()).reshape(12)
    assert_floats(q.reshape(np.int64(12)).dequantize(), expected, np.float32)


E4M3, HALF_BLOCKS = jnp.float8_e4m3fn, jqx.per_group(16)
REFUSED = [
    (
        lambda: jqx.QSpec(numerics.mxfp4, HALF_BLOCKS),
        *(ValueError, "QSpec", "mxfp4 has blocks of 32", "per_group(16)", "per_group(32)"),
    ),
    (
        lambda: jqx.QSpec(numerics.nvfp4, jqx.per_tensor()),
        *(ValueError, "QSpec", "nvfp4 has blocks of 16", "per_tensor"),
    ),
    (
        lambda: jqx.QSpec(E4M3, symmetric=False),
        *(ValueError, "QSpec", "float8_e4m3fn has no zero point", "symmetric=True"),
    ),
    (
        lambda: jqx.QTensor(ones(4, E4M3), ones(1), ones(1, E4M3), qtype=E4M3),
        *(ValueError, "QTensor", "float8_e4m3fn has no zero point"),
    ),
    (
        lambda: jqx.QTensor(ones(4, jnp.int8), ones(1), qtype=numerics.nf4),
        *(TypeError, "QTensor", "values.dtype == int8", "uint8, the codes of nf4"),
    ),
    (
        lambda: OF_INT8(ones(5, jnp.int8), ones(2)),
        *(ValueError, "QTensor", "`scale` does not fit `values`", "scale.shape == (2,)"),
    ),
    (
        lambda: OF_INT8(ones(5, jnp.int8), ones(2), blocks=((5, 2, 2),)),
        *(ValueError, "QTensor", "`scale` does not fit `values`", "blocks == ((5, 2, 2),)"),
    ),
    (
        lambda: OF_INT8(ones(5, jnp.int8), ones(1), blocks=((-1, 2),)),
        *(ValueError, "QTensor", "`blocks` does not describe block sizes"),
        *("((-1, 2),)", "((100, 4, 32),)"),
    ),
    (
        lambda: jqx.QTensor.concatenate([]),
        *(ValueError, "QTensor.concatenate", "nothing to join"),
    ),
    (
        lambda: jqx.QTensor.stack([tensor([1], "int8"), tensor([1], "int4")]),
        *(TypeError, "QTensor.stack", "different formats", "int8", "int4"),
    ),
    (
        lambda: jqx.QTensor.concatenate([tensor([1], "int8"), np.ones(1)]),
        *(TypeError, "QTensor.concatenate", "QTensor"),
    ),
    (
        lambda: tensor([1, 2, 3], "int8").split(2),
        *(ValueError, "QTensor.split", "equal parts", "2 sections", "(3,)"),
    ),
]


def test_what_does_not_fit_is_refused_with_the_facts():
    for call, error, function, *facts in REFUSED:
        assert_refused(call, (), error, function, *facts)
    for qtype in (jnp.int8, jnp.int16, E4M3, numerics.int7.storage):
        q = jqx.QTensor.quantize(ones((4, 6)), jqx.QSpec(qtype))
        assert_refused(jqx.QTensor.pack, (q,), ValueError, "QTensor.pack", "fill their bytes")


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
    scaled, actual = jitted_scaled(q, factor)
    assert_floats(actual, real * factor, np.float32)
    np.testing.assert_array_equal(as_float64(scaled.values), as_float64(q.values))


def test_every_format_is_narrowed_after_dequantizing():
    dtypes = ("bfloat16", "float16", "float32")
    tensors = {name: made(name)[0] for name in CASES}

    @jax.jit
    def narrowed(tensors):
        return {
            name: [q.astype(dtype).dequantize() for dtype in dtypes] for name, q in tensors.items()
        }

    for name, arrays in narrowed(tensors).items():
        for y, dtype in zip(arrays, dtypes, strict=True):
            assert tensors[name].astype(dtype).dtype == jnp.dtype(dtype)
            assert_floats(y, made(name)[1].astype(jnp.dtype(dtype)), dtype)


def test_structures_are_equal_exactly_where_all_but_shapes_is():
    tensors = [made(name)[0] for name in CASES]
    for a, b in itertools.combinations(tensors, 2):
        alike = all(
            getattr(a, field) == getattr(b, field) for field in ("qtype", "dtype", "blocks")
        )
        alike &= (a.zero_point is None) == (b.zero_point is None)
        assert (jax.tree.structure(a) == jax.tree.structure(b)) == alike


W, X = normal(0, 32, 8), normal(1, 4, 32)
CHANGED_SPECS = {
    "int8": jqx.QSpec("int8", jqx.per_axis(1)),
    "uint4 with zero points": jqx.QSpec("uint4", jqx.per_axis(1), symmetric=False),
    "nf4": jqx.QSpec(jqx.numerics.nf4, jqx.per_block({0: 16, 1: 1})),
    "float8": jqx.QSpec("float8_e4m3fn", jqx.per_axis(1)),
    "nvfp4": jqx.QSpec(jqx.numerics.nvfp4, jqx.per_block({0: 16, 1: 1})),
}
CHANGES = {
    "a cast": lambda q: jax.tree.map(lambda a: a.astype(jnp.bfloat16), q),
    "an average": lambda q: jax.tree.map(lambda a: 0.9 * a.astype(jnp.float32), q),
    "wider codes": lambda q: jax.tree.map(
        lambda a: a if a.dtype == jnp.float32 else a.astype(jnp.int32), q
    ),
}


def f(params, x):
    return x @ params["w"]


USES = {
    "dequantize": lambda q: q.dequantize(),
    "codes": lambda q: q.codes,
    "transpose": lambda q: q.T,
    "index": lambda q: q[0],
    "reshape": lambda q: q.reshape(2, 16, 8),
    "astype": lambda q: q.astype(jnp.float16),
    "matmul": lambda q: X @ q,
    "einsum": lambda q: jqx.einsum("bi,ij->bj", X, q),
    "dot_general": lambda q: jqx.dot_general(X, q, (((1,), (0,)), ((), ()))),
    "ragged_dot": lambda q: jqx.ragged_dot(X, q, np.array([4])),
    "take": lambda q: jqx.take(q, np.array([0]), 0),
    "dynamic_slice": lambda q: jqx.dynamic_slice(q, (0, 0), (1, 8)),
    "pack_for": lambda q: jqx.pack_for({"w": q}, "cpu"),
    "dequantize_params": lambda q: jqx.dequantize_params({"w": q}),
    "save": lambda q: jqx.save("never.safetensors", {"w": q}),
    "convert": lambda q: jqx.convert(f, jqx.Policy([]))({"w": q}, X),
    "simulate": lambda q: jqx.simulate(f, jqx.Policy([]))({"w": q}, X),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_changed_codes_is_an_error_that_says_how_to_skip_them(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    q = jqx.QTensor.quantize(W, CHANGED_SPECS["int8"])
    for change in CHANGES.values():
        with pytest.raises(TypeError, match=r"(?s)^jqx\..*does not hold codes.*is_leaf") as refusal:
            USES[use](change(q))
        assert "fix:" in str(refusal.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spec", CHANGED_SPECS)
def test_changed_codes_of_every_format_are_seen_and_printed(spec):
    q = jqx.QTensor.quantize(W, CHANGED_SPECS[spec])
    for change in (CHANGES["a cast"], CHANGES["an average"]):
        changed = change(q)
        dtype = changed.values.dtype.name
        assert f"values {dtype}[32, 8], which are no codes of" in repr(changed)
        assert "which are no codes" in changed._repr_html_()
        with pytest.raises(TypeError, match="does not hold codes"):
            X @ changed
        with pytest.raises(TypeError, match="of 'w' does not hold codes"):
            jax.eval_shape(jqx.convert(f, jqx.Policy([])), {"w": changed}, X)


ROWS = on_device(spread_out((4, 10)))
OWN = numerics.Codebook((-1.0, 0.25, 3.0), "mine")
QTYPES = [
    *(jnp.dtype(name) for name in DTYPES if name not in ("float8_e8m0fnu", "int2", "uint2")),
    *(numerics.int3, numerics.uint7, numerics.ternary, numerics.Integer(8, narrow=True)),
    *(numerics.nf4, numerics.binary, OWN),
    numerics.float6_e3m2fn,
    numerics.Minifloat(2, 3, numerics.Specials.NEGATIVE_ZERO_IS_NAN, bias=3),
]


def written(tree):
    """The exported identity of a tree, as bytes."""
    return bytes(export.export(jax.jit(lambda tree: tree))(tree).serialize())


def returned(tree):
    """What an exported identity returns once it is written and read back."""
    return export.deserialize(bytearray(written(tree))).call(tree)


def per_row(x, qtype):
    symmetric = numerics.format_of(qtype).signed
    return jqx.QTensor.quantize(x, spec(qtype, jqx.per_axis(0), symmetric))


LAYOUTS = {
    "packed": lambda q: q.pack(),
    "packed along the first axis": lambda q: q.pack(0),
    "for cpu": lambda q: q.pack_for("cpu"),
    "for gpu": lambda q: q.pack_for("gpu"),
    "packed and turned": lambda q: q.pack().T,
}
LAID_OUT = (jnp.dtype("int4"), jnp.dtype("uint4"), numerics.int3, numerics.nf4)


def test_qtensors_of_any_granularity_format_and_layout_cross():
    """As a tree of all of them, in one program; scales of scales are among the granularities."""

    @jax.jit
    def make_all(x):
        of_formats = {str(qtype): per_row(x, qtype) for qtype in QTYPES}
        laid_out = {
            f"{qtype} {name}": layout(per_row(x, qtype))
            for qtype in LAID_OUT
            for name, layout in LAYOUTS.items()
        }
        return {"formats": of_formats, "layouts": laid_out}

    tree = make_all(ROWS) | {"granularities": {name: made(name)[0] for name in CASES}}
    assert len(tree["formats"]) == len(QTYPES)
    assert isinstance(tree["granularities"]["nv with a tail"].scale, jqx.QTensor)
    assert_same(returned(tree), tree)


@pytest.mark.parametrize("name", ["int2", "uint2"])
def test_two_bits_are_refused_where_jax_cannot_write_them(name):
    plain = export.export(jax.jit(lambda x: x.astype(jnp.float32)))(jnp.zeros(4, name))
    with pytest.raises(KeyError, match=name):  # else jqx need refuse nothing any more
        plain.serialize()
    q = random_tensor(np.random.default_rng(0), jnp.dtype(name), (4, 8))
    with pytest.raises(ValueError, match=f"jax.export cannot serialize {name} values") as info:
        written(q)
    for words in ("jqx.QTensor: ", "q.pack()"):
        assert words in str(info.value)
    assert_same(returned(q.pack()), q.pack())


def test_a_format_of_the_user_is_refused_by_name():
    class Mine(numerics.Codebook):
        pass

    with pytest.raises(ValueError, match="type Mine is neither of a class of jqx"):
        written(per_row(ROWS, Mine((-1.0, 1.0), "mine")))


MISREAD = {  # what is written, what is read in its place, and what is said of it
    b'"version": 2': (b'"version": 3', "the version is unknown"),
    b'"qtype"': (b'"qtipe"', "the field 'qtipe' at QTensor is unknown"),
    b'"float32"': (b'"float33"', "`dtype` is not a dtype"),
    b"Codebook": (b"Codebock", "'Codebock' at QTensor.qtype is unknown"),
    b'"blocks": []': (b'"blocks": {}', "QTensor.blocks is unknown"),
    b'"mine"': (b"[1, 2]", "QTensor.qtype.label has the wrong type"),
}


def test_what_is_not_understood_is_refused():
    data = written(per_row(ROWS, OWN))
    for part, (change, problem) in MISREAD.items():
        assert data.count(part) >= 1 and len(part) == len(change)
        with pytest.raises((TypeError, ValueError), match=re.escape(problem)) as refusal:
            export.deserialize(bytearray(data.replace(part, change)))
        assert "fix" in str(refusal.value)
