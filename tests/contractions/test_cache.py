"""Slices at run-time places, read and written, and caches of keys and values made of them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import QTensor, dynamic_slice, dynamic_update_slice, numerics
from jqx._src.contractions.einsum import einsum
from jqx.calibrators import Affine

from ..arrays import assert_same, on_device
from ..oracles.contractions import gamma
from ..oracles.numerics import as_float64, assert_floats
from ..oracles.refusals import assert_refused
from ..tensor.tensors import BOX, CASES, made, spread_out, tensor
from .blocks import magnitudes, real_values

"""Slices at run-time places, read and written, and caches of keys and values made of them."""


pytestmark = pytest.mark.slow


BATCH, TOKENS, HEADS, WIDTH = SHAPE = (2, 5, 3, 32)


MINMAX = {"symmetric": False, "calibrator": jqx.calibrators.minmax}


BLOCKS = {0: 1, 1: 1, 2: 1}


PER_TOKEN = {
    "int8": jqx.QSpec(jnp.int8, jqx.per_axis(0, 1, 2)),
    "uint8 asymmetric": jqx.QSpec(jnp.uint8, jqx.per_axis(0, 1, 2), **MINMAX),
    "int8, all heads as one": jqx.QSpec(jnp.int8, jqx.per_axis(0, 1)),
    "uint4 asymmetric in blocks": jqx.QSpec(jnp.uint4, jqx.per_block({**BLOCKS, 3: 8}), **MINMAX),
    "nf4": jqx.QSpec(numerics.nf4, jqx.per_axis(0, 1, 2)),
    "e4m3": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0, 1, 2)),
    "mxfp4": jqx.QSpec(numerics.mxfp4, jqx.per_block({**BLOCKS, 3: 32})),
}


NVFP4 = jqx.QSpec(numerics.nvfp4, jqx.per_block({**BLOCKS, 3: 16}))


@functools.cache
def tokens(dtype="float32"):
    return on_device(spread_out(SHAPE), dtype)


@functools.partial(jax.jit, donate_argnums=0)
def write(cache, x, t):
    return dynamic_update_slice(cache, x, (0, t, 0, 0))


def packed(spec, cache):
    """A cache, and the same packed."""
    can_pack = numerics.format_of(spec.qtype).bits < 8
    return [cache, cache.pack(-1)] if can_pack else [cache]


@pytest.mark.parametrize("name", PER_TOKEN)
def test_tokens_are_appended_as_each_is_quantized_by_itself(name):
    """One by one, in a jitted step whose cache is donated, and in a scan."""
    spec, x = PER_TOKEN[name], tokens()
    expected = jqx.QTensor.concatenate(
        [jqx.QTensor.quantize(x[:, t : t + 1], spec) for t in range(TOKENS)], axis=1
    )
    for empty in packed(spec, QTensor.zeros(SHAPE, spec)):
        want = expected if empty.layout is None else expected.pack(-1)

        def step(cache, t):
            row = lax.dynamic_slice_in_dim(x, t, 1, axis=1)
            return dynamic_update_slice(cache, row, (0, t, 0, 0)), None

        scanned, _ = jax.jit(lambda cache: lax.scan(step, cache, jnp.arange(TOKENS)))(empty)
        assert_same(scanned, want)
        cache = jax.tree.map(jnp.copy, empty)
        for t in range(TOKENS):
            cache = write(cache, x[:, t : t + 1], t)
        assert_same(cache, want)


def test_scales_that_are_quantized_themselves_keep_their_own_scale():
    """NVFP4: of each block the largest magnitude by 6 as e4m3, and codes by that; in NumPy."""
    x = tokens()
    for cache in packed(NVFP4, QTensor.zeros(SHAPE, NVFP4)):
        cache = jax.tree.map(jnp.copy, cache)  # what is donated is shared by both
        for t in range(TOKENS):
            cache = write(cache, x[:, t : t + 1], t)
        blocks = np.asarray(x).reshape(*SHAPE[:3], 2, 16)
        scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(6)).astype(
            ml_dtypes.float8_e4m3fn
        )
        codes = (blocks / scale.astype(np.float32)).astype(ml_dtypes.float4_e2m1fn)
        real = as_float64(codes) * as_float64(scale)
        assert_floats(cache.dequantize(), real.reshape(SHAPE), np.float32)
        assert_floats(cache.scale.scale, np.ones((1, 1, 1, 1)), np.float32)


@pytest.mark.parametrize("names", [("int8", "uint8 asymmetric"), ("nf4", "int8"), ("e4m3", "nf4")])
@pytest.mark.parametrize("quantized_queries", [False, True])
def test_attention_over_a_cache_is_that_over_its_real_values(names, quantized_queries):
    """Sums of 32 and of 5 products, 12 roundings more for scales and zero points: Higham (3.5)."""
    rng = np.random.default_rng(0)
    k, v = (
        write(QTensor.zeros(SHAPE, PER_TOKEN[name]), on_device(spread_out(SHAPE, seed)), 0)
        for seed, name in enumerate(names)
    )
    q = on_device(rng.normal(size=(BATCH, HEADS, WIDTH)), jnp.float32)
    if quantized_queries:
        q = jqx.QTensor.quantize(q, jqx.QSpec(jnp.int8, jqx.per_axis(0, 1)))
    p = on_device(rng.dirichlet(np.ones(TOKENS), (BATCH, HEADS)), jnp.float32)
    for subscripts, x, cache, products in [
        ("bhd,bthd->bht", q, k, WIDTH),
        ("bht,bthd->bhd", p, v, TOKENS),
    ]:
        result = jax.jit(functools.partial(einsum, subscripts))(x, cache)
        expected = np.einsum(subscripts, real_values(x), real_values(cache))
        allowed = np.einsum(subscripts, magnitudes(x), magnitudes(cache))
        assert np.all(np.abs(as_float64(result) - expected) <= gamma(products + 12) * allowed)


def test_a_calibrated_scale_stays_and_quantizes_what_is_written():
    """One for the cache, or one for each layer of a stack: other tokens share it."""
    x = tokens()[:, 1:3]
    affine = Affine(jnp.full((1, 1, 1, 1), 0.5), jnp.full((1, 1, 1, 1), 7, jnp.int8))
    spec = jqx.QSpec(jnp.int8, jqx.per_tensor(), **MINMAX)
    cache = write(QTensor.zeros(SHAPE, spec, affine=affine), x, 2)
    assert_same(cache[:, 2:4], jqx.QTensor.quantize(x, spec, affine))
    np.testing.assert_array_equal(cache.dequantize()[:, [0, 1, 4]], 0)

    layers = on_device([0.5, 2.0, 8.0]).reshape(3, 1, 1)
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0))
    empty = QTensor.zeros((3, 4, 8), spec, affine=Affine(layers))
    x = on_device(spread_out((1, 2, 8)))
    cache = jax.jit(dynamic_update_slice)(empty, x, (jnp.int32(1), jnp.int32(-2), 0))
    assert_same(cache[1:2, 2:], jqx.QTensor.quantize(x, spec, Affine(layers[1:2])))
    np.testing.assert_array_equal(cache.scale, layers)
    unwritten = cache.dequantize().at[1, 2:].set(0)
    np.testing.assert_array_equal(unwritten, 0)


def test_part_of_a_token_is_quantized_with_the_scale_it_has():
    spec = PER_TOKEN["int8"]
    cache = write(QTensor.zeros(SHAPE, spec), tokens(), 0)
    x = tokens()[:, :1, :, 8:24] / 2
    result = dynamic_update_slice(cache, x, (0, 3, 0, 4))
    part = jqx.QTensor.quantize(x, spec, Affine(cache.scale[:, 3:4]))
    np.testing.assert_array_equal(result.scale, cache.scale)
    codes = np.array(cache.values)
    codes[:, 3:4, :, 4:20] = part.values
    np.testing.assert_array_equal(result.values, codes)


def test_no_tokens_change_nothing():
    for name in ("uint8 asymmetric", "mxfp4"):
        cache = QTensor.zeros(SHAPE, PER_TOKEN[name])
        assert_same(dynamic_update_slice(cache, tokens()[:, :0], (0, 2, 0, 0)), cache)


def test_a_cache_that_is_overwritten_as_a_whole_gets_new_scales():
    spec = jqx.QSpec(jnp.int8)
    assert_same(
        write(QTensor.zeros(SHAPE, spec), tokens(), 0), jqx.QTensor.quantize(tokens(), spec)
    )


def test_sequences_may_be_at_different_places():
    """Mapped over a batch: each writes to, and reads from, where it is."""
    spec, starts = PER_TOKEN["uint4 asymmetric in blocks"], jnp.array([3, 1])
    x = tokens()[:, :1]
    for empty in packed(spec, QTensor.zeros(SHAPE, spec)):
        write_each = jax.vmap(lambda cache, x, t: dynamic_update_slice(cache, x, (t, 0, 0)))
        cache = jax.jit(write_each)(empty, x, starts)
        read = jax.vmap(lambda cache, t: dynamic_slice(cache, (t, 0, 0), (1, *SHAPE[2:])))
        row = jax.jit(read)(cache, starts)
        expected = jqx.QTensor.quantize(x, spec)
        assert_same(row, expected if empty.layout is None else expected.pack(-1))
        for b, t in enumerate(starts):
            others = np.delete(np.asarray(cache.dequantize()[b]), int(t), axis=0)
            np.testing.assert_array_equal(others, 0)


def test_arrays_of_any_float_dtype_are_written():
    spec = PER_TOKEN["int8"]
    for dtype in ("bfloat16", "float16", "float32"):
        x = tokens(dtype)[:, :1]
        cache = write(QTensor.zeros(SHAPE, spec, dtype), x, 1)
        assert cache.dtype == jnp.dtype(dtype)
        assert_same(cache[:, 1:2], jqx.QTensor.quantize(x, spec))
        cache = write(QTensor.zeros(SHAPE, spec), x, 1)
        assert_same(cache[:, 1:2], jqx.QTensor.quantize(x, spec).astype(jnp.float32))


def test_a_found_scale_is_rounded_to_the_dtype_that_scales_are_kept_in():
    spec = PER_TOKEN["int8"]
    half = Affine(jnp.ones((*SHAPE[:3], 1), jnp.bfloat16))
    x = tokens()[:, :1]
    cache = write(QTensor.zeros(SHAPE, spec, affine=half), x, 0)
    scale = jqx.QTensor.quantize(x, spec).scale.astype(jnp.bfloat16)
    assert_same(cache[:, :1], jqx.QTensor.quantize(x, spec, Affine(scale)))


@pytest.mark.parametrize("name", ["int8", "uint4 asymmetric in blocks", "mxfp4", "nvfp4"])
def test_a_donated_cache_is_written_in_place(name):
    """The compiled step aliases every byte of it, and holds no more than some tokens besides."""
    spec = NVFP4 if name == "nvfp4" else PER_TOKEN[name]
    large = (2, 1024, 3, 32)
    for cache in packed(spec, QTensor.zeros(large, spec)):
        x = jax.ShapeDtypeStruct((2, 1, 3, 32), jnp.float32)
        memory = write.lower(cache, x, jnp.int32(0)).compile().memory_analysis()
        bits = sum(
            leaf.size * jnp.finfo(leaf.dtype).bits
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf.size * jnp.iinfo(leaf.dtype).bits
            for leaf in jax.tree.leaves(cache)
        )
        nested = 4 if name == "nvfp4" else 0  # the scale of scales may be passed on, not written
        assert bits // 8 - nested <= memory.alias_size_in_bytes <= bits // 8
        assert memory.temp_size_in_bytes <= 8 * 2 * 3 * 32 * 4


SIZES = [(3, 4, 10), (2, 3, 7), (1, 2, 5), (3, 2, 1), (2, 4, 0)]


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].shape == BOX])
def test_a_slice_is_that_of_the_dequantized_array(name):
    """At traced starts, below, within and beyond the axes."""
    q, real = made(name)
    for sizes in SIZES:
        f = jax.jit(lambda q, starts, sizes=sizes: dynamic_slice(q, starts, sizes))
        for starts in [(0, 0, 0), (1, 2, 4), (-1, -3, -6), (7, 7, 7), (-9, 1, 3)]:
            part = f(q, jnp.array(starts))
            expected = lax.dynamic_slice(real, starts, sizes)
            assert_floats(part.dequantize(), np.asarray(expected), np.float32)


def test_blocks_stay_where_a_slice_is_known_to_begin_and_end_at_their_borders():
    q, real = made("uint8 in blocks, coarser zero point")  # blocks of 2 along axis 1, of 5 along 2
    tail, real_tail = made("int4 with a tail")  # blocks of 4 along axis 2, of 10
    for x, of_x, starts, sizes, blocks in [
        (q, real, (0, 2, 5), (3, 2, 5), (1, 2, 5)),
        (q, real, (0, -4, -9), (3, 4, 5), (1, 2, 4)),
        (q, real, (0, 0, 3), (3, 2, 5), (1, 2, 2)),
        (q, real, (0, 1, 0), (3, 2, 5), (1, 1, 5)),
        (q, real, (0, 0, 9), (3, 4, 5), (1, 2, 5)),
        (q, real, (0, 0, jnp.int32(5)), (3, 4, 5), (1, 2, 1)),
        (tail, real_tail, (0, 0, 4), (3, 4, 6), (1, 4, 4)),
        (tail, real_tail, (0, 0, 4), (3, 4, 4), (1, 4, 4)),
        (tail, real_tail, (0, 0, 0), (3, 4, 6), (1, 4, 4)),
    ]:
        part = dynamic_slice(x, starts, sizes)
        assert part.groups.sizes == blocks, (starts, sizes)
        assert_floats(
            part.dequantize(), np.asarray(lax.dynamic_slice(of_x, starts, sizes)), np.float32
        )


def test_a_slice_of_laid_out_codes_leaves_them_so():
    q = jqx.QTensor.quantize(tokens(), jqx.QSpec(jnp.int4, jqx.per_axis(1, 3)))
    for laid_out in (q.pack(3), q.pack(2), q.pack(0), q.pack_for("cpu")):
        depth = laid_out.layout.depth
        sizes = (*(1,) * (4 - depth), *SHAPE[4 - depth :])
        part = jax.jit(lambda q, t, sizes=sizes: dynamic_slice(q, (t,) * 4, sizes))(laid_out, 1)
        assert part.layout == laid_out.layout
        expected = lax.dynamic_slice(q.dequantize(), (1,) * 4, sizes)
        assert_floats(part.dequantize(), np.asarray(expected), np.float32)


TOKENS_IN_BLOCKS = PER_TOKEN["uint4 asymmetric in blocks"]


COARSER = jqx.QSpec(jnp.uint4, jqx.per_block({0: 1, 3: 16}), **MINMAX)


MX = jqx.QSpec(numerics.mxfp4, jqx.per_block({**BLOCKS, 3: 32}))


WITH_TAIL = jqx.QSpec(jnp.int8, jqx.per_block({1: 2, 3: 4}, tail=True))


def laid_out(q, layout):
    """A QTensor as it is (`None`), packed along an axis, or for a target."""
    if layout is None:
        return q
    return q.pack(layout) if isinstance(layout, int) else q.pack_for(layout)


ONE_SCALE = jqx.QSpec(jnp.uint4, **MINMAX)
UPDATES = {  # the specs of a QTensor and of what is written to it, how they lie, and where
    "own scales": (TOKENS_IN_BLOCKS, TOKENS_IN_BLOCKS, None, None, (0, 2, 0, 0)),
    "packed": (TOKENS_IN_BLOCKS, TOKENS_IN_BLOCKS, -1, -1, (0, 3, 0, 0)),
    "to packed": (TOKENS_IN_BLOCKS, TOKENS_IN_BLOCKS, -1, None, (0, -2, 0, 0)),
    "from packed": (TOKENS_IN_BLOCKS, TOKENS_IN_BLOCKS, None, 2, (1, 9, 0, 0)),
    "to swapped and as int8": (TOKENS_IN_BLOCKS, TOKENS_IN_BLOCKS, "cpu", None, (0, 1, 0, 0)),
    "coarser scales": (TOKENS_IN_BLOCKS, COARSER, None, None, (0, 1, 0, 0)),
    "no zero points": (TOKENS_IN_BLOCKS, TOKENS_IN_BLOCKS, None, None, (0, 1, 0, 0)),
    "one scale": (TOKENS_IN_BLOCKS, ONE_SCALE, None, None, (0, 1, 0, 0)),
    "mxfp4": (MX, MX, None, None, (0, 1, 0, 0)),
    "whole blocks": (WITH_TAIL, WITH_TAIL, None, None, (0, 2, 0, 0)),
    "a tail": (WITH_TAIL, WITH_TAIL, None, None, (0, 4, 0, 0)),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_qtensor_is_written_with_its_scales(name):
    spec, spec_of_update, layout, layout_of_update, starts = UPDATES[name]
    q = laid_out(jqx.QTensor.quantize(tokens(), spec), layout)
    part = on_device(spread_out((2, 2, 3, 32), 1))[:, : 1 if name == "a tail" else 2]
    update = laid_out(jqx.QTensor.quantize(part, spec_of_update), layout_of_update)
    if name == "no zero points":
        update = dataclasses.replace(update, zero_point=None)
    result = jax.jit(lambda q, u: dynamic_update_slice(q, u, starts))(q, update)
    assert jax.tree.structure(result) == jax.tree.structure(q)
    expected = lax.dynamic_update_slice(q.dequantize(), update.dequantize(), starts)
    assert_floats(result.dequantize(), np.asarray(expected), np.float32)


def test_whole_blocks_of_tokens_get_new_scales():
    """Keys in blocks along the tokens: at static starts, or with the blocks as an axis."""
    spec = jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 4, 2: 1}, tail=True))
    x = on_device(spread_out((2, 10, 6)))
    expected = jqx.QTensor.quantize(x, spec)
    for borders in [(0, 4, 8, 10), (0, 4, 10), (0, 8, 10)]:
        cache = QTensor.zeros(x.shape, spec)
        for start, stop in itertools.pairwise(borders):
            cache = dynamic_update_slice(cache, x[:, start:stop], (0, start, 0))
        assert_same(cache, expected)
    expected_blocks = jqx.QTensor.quantize(x[:, :8], spec)
    blocks = QTensor.zeros((2, 8, 6), spec).reshape(2, 2, 4, 6)
    for i in range(2):
        part = x[:, None, 4 * i : 4 * i + 4]
        blocks = jax.jit(dynamic_update_slice)(blocks, part, (0, jnp.int32(i), 0, 0))
    assert_same(blocks.reshape(2, 8, 6), expected_blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*PER_TOKEN, "nvfp4"])
def test_zeros_are_zero(name, dtype):
    spec = NVFP4 if name == "nvfp4" else PER_TOKEN[name]
    q = QTensor.zeros(SHAPE, spec, jnp.dtype(dtype))
    assert q.shape == SHAPE and q.dtype == jnp.dtype(dtype) and q.qtype == spec.qtype
    assert_floats(q.dequantize(), np.zeros(SHAPE), dtype)
    np.testing.assert_array_equal(as_float64(q.real_scale()), 1)
    assert q.scale.shape == spec.granularity.scale_shape(SHAPE)
    assert (q.zero_point is None) == spec.symmetric
    again = jax.jit(lambda: QTensor.zeros(SHAPE, spec, jnp.dtype(dtype)))()
    assert_same(again, q)


def test_zeros_may_have_calibrated_scales():
    scale, zero = jnp.full((1, 1), 0.25), jnp.full((1, 1), 9, jnp.uint8)
    q = QTensor.zeros((2, 3), jqx.QSpec(jnp.uint8, **MINMAX), affine=Affine(scale, zero))
    np.testing.assert_array_equal(q.values, np.full((2, 3), 9))
    np.testing.assert_array_equal(q.scale, scale)


def test_arrays_are_left_to_lax():
    x, u = jnp.arange(12).reshape(3, 4), jnp.full((1, 2), -1)
    starts = (jnp.int32(9), 1)
    np.testing.assert_array_equal(dynamic_slice(x, starts, (1, 2)), x[2:, 1:3])
    np.testing.assert_array_equal(
        dynamic_update_slice(x, u, starts), lax.dynamic_update_slice(x, u, starts)
    )


def test_starts_may_be_of_any_integer_dtype():
    q = tensor(np.arange(300)[:, None] % 100, "int8", np.arange(1, 301)[:, None])
    for dtype in (np.int8, np.uint8, np.int16, np.uint32):
        info = np.iinfo(dtype)
        for start in {0, 1, int(info.max), int(info.min)}:
            first_row = min(max(start if start >= 0 else start + 300, 0), 298)
            expected = q.dequantize()[first_row : first_row + 2]
            for index in (dtype(start), on_device(start, dtype)):
                part = dynamic_slice(q, (index, 0), (2, 1))
                assert_floats(part.dequantize(), np.asarray(expected), np.float32)


def test_the_gradient_of_a_scale_is_that_of_the_dequantized_slice():
    q, _ = made("uint8 in blocks, coarser zero point")
    g = np.random.default_rng(2).integers(-3, 4, (2, 3, 7)).astype(np.float32)

    def loss(scale, t, f):
        return (f(dataclasses.replace(q, scale=scale), (t, t, t), (2, 3, 7)) * g).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    ours = gradient(q.scale, 1, lambda q, *slice_args: dynamic_slice(q, *slice_args).dequantize())
    theirs = gradient(
        q.scale, 1, lambda q, *slice_args: lax.dynamic_slice(q.dequantize(), *slice_args)
    )
    assert np.any(as_float64(theirs) != 0)
    np.testing.assert_array_equal(ours, theirs)


def test_a_nan_spoils_its_own_token_alone():
    x = tokens().at[0, 1, 2, 3].set(jnp.nan)
    cache = QTensor.zeros(SHAPE, PER_TOKEN["int8"])
    for t in range(TOKENS):
        cache = write(cache, x[:, t : t + 1], t)
    bad = np.isnan(np.asarray(cache.dequantize()))
    assert bad[0, 1, 2].all() and bad.sum() == WIDTH


def test_slices_that_do_not_fit_are_refused():
    q = tensor(np.zeros((3, 4)), "int8")
    for starts, sizes, fact in [
        ((0,), (1, 1), "1 starts"),
        ((0, 0), (4, 1), "(4, 1)"),
        ((0, 0), (1,), "(1,)"),
        ((0, 0, 0), (1, 1, 1), "3 starts"),
    ]:
        part = functools.partial(dynamic_slice, start_indices=starts, slice_sizes=sizes)
        assert_refused(part, (q,), ValueError, "dynamic_slice", fact, "(3, 4)")
        update = functools.partial(dynamic_update_slice, start_indices=starts)
        args = q, jnp.zeros(sizes)
        assert_refused(update, args, ValueError, "dynamic_update_slice", fact, "(3, 4)")
    for start, fact in [
        (0.0, "`start_indices` are not integers"),
        (True, "`start_indices` are not integers"),
        (np.zeros((2,), int), "a start is not one integer"),
    ]:
        part = functools.partial(dynamic_slice, start_indices=(start, 0), slice_sizes=(1, 1))
        assert_refused(part, (q,), TypeError, "dynamic_slice", fact)


def test_slices_that_cut_what_is_laid_out_are_refused():
    q = jqx.QTensor.quantize(tokens(), jqx.QSpec(jnp.int4, jqx.per_axis(1))).pack(-1)
    part = functools.partial(dynamic_slice, start_indices=(0,) * 4, slice_sizes=(1, 1, 1, 8))
    assert_refused(part, (q,), ValueError, "dynamic_slice", "packed along axis -1", "unpack")
    update = functools.partial(dynamic_update_slice, start_indices=(0,) * 4)
    facts = "packed along axis -1", "unpack"
    assert_refused(update, (q, jnp.zeros((1, 1, 1, 8))), ValueError, "dynamic_update_slice", *facts)


def test_writes_that_may_cut_a_block_are_refused():
    q = QTensor.zeros((8, 4), jqx.QSpec(jnp.int8, jqx.per_block({0: 4, 1: 1})))
    for size, start in [(4, 2), (2, 0), (3, 4), (6, 1)]:
        f = functools.partial(dynamic_update_slice, start_indices=(start, 0))
        facts = "axis 0", f"size {size}", "blocks of 4", "reshape(..., 2, 4, ...)"
        assert_refused(f, (q, jnp.zeros((size, 4))), ValueError, "dynamic_update_slice", *facts)

    def at(q, x, t):
        return dynamic_update_slice(q, x, (t, 0))

    facts = "known only at run time", "blocks of 4"
    args = q, jnp.zeros((4, 4)), jnp.int32(4)
    assert_refused(at, args, ValueError, "dynamic_update_slice", *facts)


def test_qtensors_that_have_no_place_for_their_scales_are_refused():
    q = tensor(np.zeros((4, 6)), "int8", np.ones((4, 1)))
    per_tensor = tensor(np.zeros((4, 6)), "int8")
    u = tensor(np.zeros((1, 6)), "int8")
    fine = tensor(np.zeros((1, 6)), "int8", np.ones((1, 6)))
    zero = tensor(np.zeros((1, 6)), "int8", zero_point=[[3]])
    shared = tensor(np.zeros((4, 6)), "int8", np.ones((4, 1)), [[1]])
    f = functools.partial(dynamic_update_slice, start_indices=(1, 0))
    for operand, update, fact in [
        (per_tensor, u, "shared with elements that are not overwritten, along axes [0]"),
        (q, fine, "fewer scales than `update` along axis 1"),
        (q, zero, "no place for the zero points"),
    ]:
        assert_refused(f, (operand, update), ValueError, "dynamic_update_slice", fact)
    two_zeros = tensor(np.zeros((2, 6)), "int8", np.ones((2, 1)), [[1], [2]])
    facts = "no place for the zero points", "(2, 1)"
    assert_refused(f, (shared, two_zeros), ValueError, "dynamic_update_slice", *facts)
    assert_refused(f, (shared, jnp.ones((2, 6))), ValueError, "dynamic_update_slice", *facts)
    nested = QTensor.zeros((4, 16), jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 1, 1: 16})))
    fact = "they are quantized, with one scale"
    assert_refused(f, (nested, nested[:1]), ValueError, "dynamic_update_slice", fact)


def test_qtensors_of_another_kind_are_refused():
    q = tensor(np.zeros((4, 6)), "int8", np.ones((4, 1)))
    f = functools.partial(dynamic_update_slice, start_indices=(1, 0))
    for update in (
        tensor(np.zeros((1, 6)), "uint8"),
        tensor(np.zeros((1, 6)), "int8", dtype=jnp.bfloat16),
        dataclasses.replace(q[:1], scale=jnp.ones((1, 1), jnp.bfloat16)),
    ):
        fact = "different formats"
        assert_refused(f, (q, update), TypeError, "dynamic_update_slice", fact)
    assert_refused(
        f, (jnp.zeros((4, 6)), q[:1]), TypeError, "dynamic_update_slice", "jqx.QTensor.zeros"
    )
    ints = jnp.zeros((1, 6), jnp.int8)
    assert_refused(f, (q, ints), TypeError, "dynamic_update_slice", "`update`", "int8")


def test_zeros_of_nothing_known_are_refused():
    def refused(error, *facts, **options):
        with pytest.raises(error) as refusal:
            QTensor.zeros(**{"shape": (2, 3), "spec": jqx.QSpec(jnp.int8), **options})
        for fact in facts:
            assert fact in str(refusal.value)

    refused(TypeError, "jqx.QTensor.zeros", "`shape`", shape=5)
    refused(TypeError, "jqx.QTensor.zeros", "`spec`", spec=jnp.int8)
    refused(TypeError, "jqx.QTensor.zeros", "`dtype`", dtype=jnp.int8)
    refused(ValueError, "relative", spec=jqx.QSpec(jnp.int8, jqx.per_token()))
    refused(ValueError, "does not fit", affine=Affine(jnp.ones((5, 1))))


@pytest.mark.parametrize("axes", [(), (0,), (1,)])
@pytest.mark.parametrize("shape, size", [((4, 0), (2, 0)), ((0, 4), (0, 4)), ((4, 8), (2, 0))])
def test_nothing_is_written_where_an_axis_is_empty(shape, size, axes):
    q = jqx.QTensor.zeros(
        shape, jqx.QSpec(jnp.int8, jqx.per_axis(*axes) if axes else jqx.per_tensor())
    )
    assert_same(jqx.dynamic_update_slice(q, jnp.zeros(size), (0, 0)), q)
    assert jqx.dynamic_slice(q, (0, 0), size).dequantize().shape == size
