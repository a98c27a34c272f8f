"""Lookups and writes at any places: `take`, against `jnp.take` of the dequantized array, bit by
bit; and what `x[i, j]` and `x.at[i, j].set(y)` become in converted functions.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics
from jqx._src.contractions.cache import take

from ..arrays import on_device
from ..oracles.numerics import as_float64, assert_floats
from ..oracles.refusals import assert_refused
from ..tensor.tensors import spread_out, tensor

"""`take`: what it returns is what `jnp.take` returns of the dequantized array, bit for bit."""


SHAPE = (10, 32)


MINMAX = {"symmetric": False, "calibrator": jqx.calibrators.minmax}


SPECS = {
    "int8, one scale": jqx.QSpec(jnp.int8),
    "int8, a scale for each row": jqx.QSpec(jnp.int8, jqx.per_axis(0)),
    "int8, a scale for each column": jqx.QSpec(jnp.int8, jqx.per_axis(1), **MINMAX),
    "uint4 asymmetric in blocks": jqx.QSpec(jnp.uint4, jqx.per_block({0: 1, 1: 8}), **MINMAX),
    "uint4 in blocks of rows, with a tail": jqx.QSpec(
        jnp.uint4, jqx.per_block({0: 4, 1: 16}, tail=True), **MINMAX
    ),
    "int3, a scale for each element": jqx.QSpec(numerics.int3, jqx.per_axis(0, 1)),
    "nf4 in blocks": jqx.QSpec(numerics.nf4, jqx.per_block({0: 1, 1: 16})),
    "float8": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0)),
    "mxfp4": jqx.QSpec(numerics.mxfp4, jqx.per_block({0: 1, 1: 32})),
    "nvfp4": jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 1, 1: 16})),
    "nvfp4 in blocks of rows": jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 2, 1: 8})),
}


@functools.cache
def table(name):
    quantize = functools.partial(jqx.QTensor.quantize, spec=SPECS[name])
    return jax.jit(quantize)(spread_out(SHAPE))


dequantize = jax.jit(jqx.QTensor.dequantize)


def layouts(q):
    """A QTensor, and the same laid out in other ways."""
    yield q
    yield q.pack_for("cpu")
    if numerics.format_of(q.qtype).bits < 8:
        yield q.pack(0)
        yield q.pack(1)


def assert_same(result, expected):
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(as_float64(result), as_float64(expected), strict=True)


INDICES = np.array([[0, -1, 9], [-10, 4, 3]], np.int32)


AXES = (0, -1, None)


MORE = {
    "int8, a scale for each column",
    "int3, a scale for each element",
    "nvfp4 in blocks of rows",
}


@pytest.mark.many
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in SPECS]
)
def test_what_is_taken_is_that_of_the_dequantized_array(name):
    """From rows, columns and the flattened array, however the codes are laid out."""
    q = table(name)
    real = np.asarray(dequantize(q))
    compute = jax.jit(lambda q: [[take(x, INDICES, axis) for axis in AXES] for x in layouts(q)])
    for results in compute(q):
        for axis, result in zip(AXES, results, strict=True):
            assert_same(result, np.take(real, INDICES, axis=axis))


BEYOND = np.array([0, 9, -1, -10, 10, -11, 50, -50], np.int32)


@pytest.mark.parametrize(
    "name", ["int8, one scale", "uint4 in blocks of rows, with a tail", "nvfp4"]
)
def test_indices_out_of_bounds_are_those_of_jnp_take(name):
    modes = [
        {},
        {"mode": "fill"},
        {"mode": "fill", "fill_value": -3.5},
        {"mode": "clip"},
        {"mode": "wrap"},
    ]

    def taken(q):
        real = q.dequantize()
        for options in modes:
            for axis, indices in [(0, BEYOND), (1, BEYOND * 3), (None, BEYOND * 32)]:
                yield (
                    take(q, indices, axis, **options),
                    jnp.take(real, indices, axis=axis, **options),
                )

    results = jax.jit(lambda q: list(taken(q)))(table(name))
    for result, expected in results:
        assert_same(result, expected)
    for options, (rows, _) in zip(modes, results[::3], strict=True):
        if options.get("mode") not in ("clip", "wrap"):
            fill = options.get("fill_value", np.nan)
            np.testing.assert_array_equal(rows[4:], np.full((4, 32), fill, np.float32))


@pytest.mark.parametrize("mode", ["fill", "clip", "wrap"])
def test_indices_may_be_of_any_integer_dtype(mode):
    """Of 300 rows, which no 8 bits count, and up to the largest index that there is."""
    q = tensor(np.arange(300)[:, None] % 251 - 125, "int8", np.arange(1, 301)[:, None])
    indices = []
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.uint32):
        info = np.iinfo(dtype)
        ends = [0, 1, info.max, info.max - 1, info.min, info.min + 1]
        indices.append(np.array(ends, dtype))
    compute = jax.jit(lambda q, indices: [take(q, index, 0, mode=mode) for index in indices])
    for index, result in zip(indices, compute(q, indices), strict=True):
        rows = index.astype(np.int64)
        inside = np.ones(rows.shape, bool)
        if mode == "fill":
            inside = (rows >= -300) & (rows < 300)
        elif mode == "clip":
            rows = np.clip(rows, 0, 299)
        expected = as_float64(dequantize(q))[rows % 300]
        expected[~inside] = np.nan
        assert_floats(result, expected, np.float32)


def test_indices_may_have_any_shape():
    q = table("uint4 asymmetric in blocks")
    real = np.asarray(dequantize(q))
    shapes = [(), (2, 0), (1,), (2, 1, 3)]
    indices = [np.arange(math.prod(shape), dtype=np.int32).reshape(shape) for shape in shapes]
    compute = jax.jit(lambda q, indices: [[take(q, i, axis) for axis in AXES] for i in indices])
    for index, results in zip(indices, compute(q, indices), strict=True):
        for axis, result in zip(AXES, results, strict=True):
            assert_same(result, np.asarray(np.take(real, index, axis=axis)))
    assert_same(take(q, 3, 0), real[3])


def test_arrays_of_any_rank_are_taken_from():
    tensors = []
    for shape in [(), (5,), (2, 3, 4)]:
        scale = np.full((1,) * len(shape), 0.5)
        codes = np.arange(math.prod(shape)).reshape(shape)
        tensors.append(tensor(codes, "int8", scale, np.full(scale.shape, 3)))

    def axes(q):
        return (None, *range(q.ndim))[:3]

    indices = np.array([[0, -1]], np.int32)
    compute = jax.jit(
        lambda tensors: [[take(q, indices, axis) for axis in axes(q)] for q in tensors]
    )
    for q, results in zip(tensors, compute(tensors), strict=True):
        for axis, result in zip(axes(q), results, strict=True):
            assert_same(result, np.take(np.asarray(dequantize(q)), indices, axis=axis))


def test_an_axis_in_the_middle_is_taken_from_whatever_is_packed_around_it():
    rng = np.random.default_rng(0)
    spec = jqx.QSpec(jnp.int4, jqx.per_block({0: 1, 1: 2, 2: 4}))
    indices = np.array([[1, 0], [2, 2]], np.int32)

    @jax.jit
    def taken(x):
        q = jqx.QTensor.quantize(x, spec)
        packed = q.pack(0), q.pack(1), q.pack(2), q.pack_for("cpu"), q.pack(2).transpose(0, 2, 1)
        return q.dequantize(), [[take(x, indices, n) for n in range(3)] for x in (q, *packed)]

    real, results = taken(rng.normal(size=(3, 6, 8)).astype(np.float32))
    reals = [np.asarray(real)] * 5 + [np.asarray(real).transpose(0, 2, 1)]
    for real, of_axes in zip(reals, results, strict=True):
        for axis, rows in enumerate(of_axes):
            assert_same(rows, np.take(real, indices, axis=axis))


@pytest.mark.parametrize(
    "name", ["int8, a scale for each row", "uint4 asymmetric in blocks", "mxfp4"]
)
def test_it_maps_over_indices_and_tables(name):
    rows = functools.partial(take, axis=0)

    @jax.jit
    def mapped(q):
        of_one = [jax.vmap(rows, in_axes=(None, 0))(x, INDICES) for x in layouts(q)]
        return of_one, jax.vmap(rows)(jqx.QTensor.stack([q, q[::-1]]), INDICES)

    q = table(name)
    real = np.asarray(dequantize(q))
    of_one, of_each = mapped(q)
    for result in of_one:
        assert_same(result, real[INDICES])
    assert_same(of_each, np.stack([real[INDICES[0]], real[::-1][INDICES[1]]]))


LARGE = jax.ShapeDtypeStruct((4096, 256), jnp.float32)


def results(jaxpr):
    """The sizes of all arrays that a jaxpr makes, at any depth."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield from (v.aval.size for v in eqn.outvars)
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from results(inner)


@pytest.mark.parametrize("name", ["int8, a scale for each row", "nf4 in blocks", "mxfp4", "nvfp4"])
def test_no_more_is_dequantized_or_unpacked_than_what_is_taken(name):
    """Of 4096 rows, 3: no array larger than theirs is made, and the compiled lookup takes no more
    temporary memory than twice theirs, of 4 bytes an element.
    """
    spec = SPECS[name]
    forms = [lambda q: q, lambda q: q.pack_for("cpu")]
    if numerics.format_of(spec.qtype).bits < 8:
        forms.append(lambda q: q.pack(1))
    for form in forms:
        q = jax.eval_shape(lambda x, f=form: f(jqx.QTensor.quantize(x, spec)), LARGE)
        indices = jax.ShapeDtypeStruct((3,), jnp.int32)
        rows = functools.partial(take, axis=0)
        assert max(results(jax.make_jaxpr(rows)(q, indices))) <= 3 * 256
        compiled = jax.jit(rows).lower(q, indices).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 2 * 3 * 256 * 4


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("name", ["uint4 asymmetric in blocks", "int8, one scale"])
def test_the_gradient_of_a_scale_is_that_of_the_dequantized_array(name, axis):
    """Out of bounds there is none. Cotangents are small integers: every sum of them is exact."""
    q = table(name)
    indices = np.array([[0, 3, 3], [-1, 50, 9]], np.int32)
    shape = jax.eval_shape(functools.partial(take, axis=axis), q, indices).shape
    g = np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32)

    def loss(scale, f):
        rows = f(dataclasses.replace(q, scale=scale))
        return (jnp.where(jnp.isnan(rows), 0.0, rows) * g).sum()

    @jax.jit
    def gradients(scale):
        ours = jax.grad(loss)(scale, lambda q: take(q, indices, axis))
        return ours, jax.grad(loss)(scale, lambda q: jnp.take(q.dequantize(), indices, axis=axis))

    ours, theirs = gradients(q.scale)
    assert np.any(as_float64(theirs) != 0)
    assert_same(ours, theirs)


def test_a_block_without_a_scale_spoils_its_own_rows_alone():
    x = spread_out(SHAPE)
    x[3, 5] = np.nan
    q = jqx.QTensor.quantize(on_device(x), SPECS["int8, a scale for each row"])
    rows = np.asarray(take(q, np.array([2, 3, 4]), 0))
    assert np.isnan(rows[1]).all() and np.isfinite(rows[[0, 2]]).all()


def test_arrays_go_to_jnp_take():
    x = jnp.arange(6).reshape(2, 3)
    assert_same(take(x, jnp.array([1, 5]), 1, mode="clip"), jnp.array([[1, 2], [4, 5]]))
    assert_same(take(x, jnp.array([4])), jnp.array([4]))
    assert_same(take(x, jnp.array([7]), 0, fill_value=-1), jnp.full((1, 3), -1))


def test_bad_arguments_are_refused():
    q, x, indices = table("int8, one scale"), jnp.ones(SHAPE), jnp.array([0])
    for options, facts in [
        ({"mode": "raise"}, ("mode", "'raise'", "'wrap'")),
        ({"mode": "clip", "fill_value": 0.0}, ("`fill_value`", "'clip'")),
        ({"mode": "wrap", "fill_value": 0.0}, ("`fill_value`", "'wrap'")),
    ]:
        for operand in (q, x):
            f = functools.partial(take, axis=0, **options)
            assert_refused(f, (operand, indices), ValueError, "take", *facts)
    f = functools.partial(take, axis=0)
    for wrong in (jnp.array([0.0]), jnp.array([True])):
        assert_refused(f, (q, wrong), TypeError, "take", "integers", wrong.dtype.name)
    beyond = functools.partial(take, axis=2)
    assert_refused(beyond, (q, indices), ValueError, "take", "axis", "2")
    empty = tensor(np.zeros((0, 3)), "int8")
    assert_refused(f, (empty, indices), IndexError, "take", "(0, 3)")
    assert take(empty, jnp.zeros((2, 0), int), 0).shape == (2, 0, 3)


"""Taking from and writing to QTensors at any places, as `x[i, j]` and `x.at[i, j].set(y)` do."""


NOTHING = jqx.Policy([])


CACHE = on_device(spread_out((3, 6, 2, 32)), jnp.float32)


TOKENS = on_device(spread_out((3, 1, 2, 32))[:, ::-1] * 3, jnp.float32)


ROWS, PLACES = jnp.array([0, 2, 1]), jnp.array([4, 0, 5])


CACHES = {
    "a token and head": jqx.QSpec(jnp.int8, jqx.per_axis(0, 1, 2)),
    "a token": jqx.QSpec(jnp.uint8, jqx.per_axis(0, 1), **MINMAX),
    "one": jqx.QSpec(jnp.int8),
    "int4": jqx.QSpec(jnp.int4, jqx.per_axis(0, 1, 2)),
    "nf4 in blocks": jqx.QSpec(numerics.nf4, jqx.per_block({0: 1, 1: 1, 2: 1, 3: 8})),
    "e4m3": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0, 1, 2)),
    "mxfp8": jqx.QSpec(numerics.mxfp8_e4m3, jqx.per_block({0: 1, 1: 1, 2: 1, 3: 32})),
}


TAKEN = {
    "rows and places": lambda c: c[ROWS, PLACES],
    "one place of each": lambda c: jnp.take_along_axis(c, PLACES[:, None, None, None], axis=1),
    "slices": lambda c: jax.vmap(lambda c, i: lax.dynamic_slice(c, (i, 0, 0), (2, 2, 32)))(
        c, PLACES
    ),
    "rows of heads": lambda c: c[:, PLACES[:2], jnp.array([1, 0])],
}


WRITTEN = {
    "each at its place": lambda c, x: jax.vmap(
        lambda c, x, i: lax.dynamic_update_slice(c, x, (i, 0, 0))
    )(c, x, PLACES),
    "one place of all": lambda c, x: c.at[:, jnp.int32(2)].set(x[:, 0]),
    "rows and places": lambda c, x: c.at[ROWS, PLACES].set(x[:, 0]),
    "some rows": lambda c, x: c.at[ROWS[:2]].set(jnp.concatenate([x] * 6, axis=1)[:2]),
    "beyond the end": lambda c, x: c.at[ROWS, PLACES + 3].set(x[:, 0]),
}


def dequantized(tensors):
    """The real arrays of the QTensors of a dict."""
    return {key: q.dequantize() for key, q in tensors.items()}


@pytest.mark.parametrize("name", CACHES)
def test_what_is_taken_stays_quantized(name):
    def f(p, c):
        return {key: take(c) for key, take in TAKEN.items()}

    @jax.jit
    def run(x):
        q = jqx.QTensor.quantize(x, CACHES[name])
        results = jqx.convert(f, NOTHING)({}, q)
        for taken in results.values():
            assert isinstance(taken, jqx.QTensor) and taken.qtype == q.qtype
        return dequantized(results), f({}, q.dequantize())

    results, real = run(CACHE)
    for key, expected in real.items():
        np.testing.assert_array_equal(results[key], expected, err_msg=key)


@pytest.mark.many
@pytest.mark.parametrize("name", CACHES)
def test_what_is_written_is_quantized_by_itself_and_the_rest_stays(name):
    """With the scale of all, where there is one."""
    spec = CACHES[name]

    def f(p, c, x):
        return {key: write(c, x) for key, write in WRITTEN.items()}

    @jax.jit
    def run(x, new):
        q = jqx.QTensor.quantize(x, spec)
        affine = jqx.calibrators.Affine(q.scale) if name == "one" else None
        of_new = jqx.QTensor.quantize(new, spec, affine).dequantize()
        packed = [q.pack()] if numerics.format_of(q.qtype).bits < 8 else []
        results = []
        for c in (q, *packed):
            of_cache = jqx.convert(f, NOTHING)({}, c, new)
            for written in of_cache.values():
                assert jax.tree.structure(written) == jax.tree.structure(c)
            results.append(dequantized(of_cache))
        return f({}, q.dequantize(), of_new), results

    expected, results = run(CACHE, TOKENS)
    for written in results:
        for key, real in expected.items():
            np.testing.assert_array_equal(written[key], real, err_msg=key)


def test_a_place_out_of_bounds_is_nan_where_jnp_fills_with_it():
    f = lambda p, c: jnp.take_along_axis(c, PLACES[:, None, None, None] + 4, axis=1)  # noqa: E731

    @jax.jit
    def run(x):
        q = jqx.QTensor.quantize(x, CACHES["a token and head"])
        return jqx.convert(f, NOTHING)({}, q).dequantize(), f({}, q.dequantize())

    result, expected = run(CACHE)
    np.testing.assert_array_equal(result, expected)
    assert np.isnan(result).any()


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda p, c: c.at[:, 1, :, 3].set(0.0), "a token and head"),
        (lambda p, c: c.at[ROWS, PLACES].add(1.0), "a token and head"),
        (lambda p, c: c[ROWS, :, :, PLACES], "nf4 in blocks"),
    ],
)
def test_what_a_scale_cannot_follow_is_an_error(f, name):
    q = jqx.QTensor.quantize(CACHE, CACHES[name])
    with pytest.raises(NotImplementedError, match=r"reaches `(scatter|gather)"):
        jqx.convert(f, NOTHING)({}, q)
    converted = jqx.convert(f, NOTHING, unsupported="dequantize")
    result, expected = jax.jit(lambda q: (converted({}, q), f({}, q.dequantize())))(q)
    np.testing.assert_array_equal(result, expected)
