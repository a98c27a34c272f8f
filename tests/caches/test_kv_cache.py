"""Caches of keys and values, against NumPy; the same however tokens come."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jqx

from ..arrays import on_device

BATCH, HEADS, WIDTH, LENGTH = 2, 3, 64, 100
BITS = {"int4": 4, "int2": 2}
RNG = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return on_device(RNG.normal(size=shape), dtype)


def empty(format, **options):
    sizes = {"batch": BATCH, "length": LENGTH, "heads": HEADS, "width": WIDTH}
    return jqx.KVCache.empty(**{**sizes, "format": format, **options})


append = jax.jit(jqx.KVCache.append)


@jax.jit
def read(cache):
    return cache.keys, cache.values


def filled(cache, keys, values, parts):
    """Appends tokens in parts of some sizes."""
    start = 0
    for n in parts:
        cache = append(cache, keys[:, start : start + n], values[:, start : start + n])
        start += n
    return cache


def rounded(x, bits):
    """Rounds groups along the last axis between two numbers of float16, the best of some ranges."""
    x, best, smallest_error = x.astype(np.float32), None, None
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    for part in {4: (1,), 2: (1, 0.9, 0.8, 0.7)}[bits]:
        cut = (high - low) * np.float32((1 - part) / 2)
        step = ((high - low - 2 * cut) / (2**bits - 1)).astype(np.float16).astype(np.float32)
        first = (low + cut).astype(np.float16).astype(np.float32)
        codes = np.clip(np.round((x - first) / np.where(step > 0, step, 1)), 0, 2**bits - 1)
        in_range = first + step * codes
        error = ((in_range - x) ** 2).sum(-1, keepdims=True)
        best = in_range if best is None else np.where(error < smallest_error, in_range, best)
        smallest_error = error if smallest_error is None else np.minimum(smallest_error, error)
    return best


def oracle(keys, values, bits):
    """Keys by channel and 16 tokens, values by token and 16 channels; the first and the last in
    float.
    """
    k, v = np.array(keys), np.array(values)
    stop = max(k.shape[1] - 16, 0) // 16 * 16
    if not stop:
        return k, v
    inner_k, inner_v = k[:, :stop].copy(), v[:, :stop].copy()
    inner_k[:, :4], inner_v[:, :4] = k[:, 4:5], v[:, 4:5]
    parts = np.moveaxis(inner_k.reshape(BATCH, -1, 16, HEADS, WIDTH), 2, -1)
    k[:, 4:stop] = np.moveaxis(rounded(parts, bits), -1, 2).reshape(inner_k.shape)[:, 4:]
    parts = inner_v.reshape(BATCH, stop, HEADS, WIDTH // 16, 16)
    v[:, 4:stop] = rounded(parts, bits).reshape(inner_v.shape)[:, 4:]
    return k, v


@pytest.mark.many
@pytest.mark.parametrize("format", BITS)
@pytest.mark.parametrize("count", [0, 3, 31, 32, 47, 70, 96, 100])
def test_what_is_read_is_what_numpy_rounds(format, count):
    keys, values = (np.array(x) for x in normal(2, BATCH, LENGTH, HEADS, WIDTH))
    keys[:, :, :, 3] *= 20
    cache = filled(empty(format), keys, values, [count] if count else [])
    k, v = oracle(keys[:, :count], values[:, :count], BITS[format])
    found_keys, found_values = read(cache)
    for result, expected in ((found_keys, k), (found_values, v)):
        assert result.shape == (BATCH, LENGTH, HEADS, WIDTH)
        # Two ranges may lose the same but for the last bits: then codes of a group may differ.
        differ = np.abs(result[:, :count] - expected) > 2**-22 * np.abs(expected).max(initial=0)
        assert differ.mean() < 1e-3 if count else True
        assert not np.any(result[:, count:])
    for start, stop in ((0, min(4, count)), (max(count - 16, 0), count)):
        np.testing.assert_array_equal(found_keys[:, start:stop], k[:, start:stop])
        np.testing.assert_array_equal(k[:, start:stop], keys[:, start:stop])
    assert int(cache.length) == count


formats = pytest.mark.parametrize(
    "format", ["int2", pytest.param("int4", marks=pytest.mark.slow), "fp8"]
)


@formats
def test_tokens_may_come_in_any_parts(format):
    keys, values = normal(2, BATCH, LENGTH, HEADS, WIDTH)
    at_once = append(empty(format), keys, values)
    for parts in ([1] * 100, [33, 1, 66], [17] * 5 + [1] * 15):
        cache = filled(empty(format), keys, values, parts)
        np.testing.assert_array_equal(cache.keys, at_once.keys)
        np.testing.assert_array_equal(cache.values, at_once.values)


@pytest.mark.slow
@formats
def test_a_decoder_scans_over_tokens_and_layers(format):
    """Attention of the last tokens is that over what is read, causal, with groups of heads."""
    layers, count = 2, 40
    tokens = normal(layers, 3, BATCH, count, 2 * HEADS, WIDTH)
    caches = jax.tree.map(lambda x: jnp.stack([x] * layers), empty(format))

    def step(caches, token):
        def layer(_, both):
            cache, (q, k, v) = both
            cache = cache.append(k[:, :, :HEADS], v[:, :, :HEADS])
            return None, (cache, cache.attend(q))

        _, (caches, out) = lax.scan(layer, None, (caches, token))
        return caches, out

    steps = jnp.moveaxis(tokens, 3, 0)[:, :, :, :, None]
    caches, results = jax.jit(lambda c, x: lax.scan(step, c, x))(caches, steps)
    for i in range(layers):
        own = jax.tree.map(lambda x, i=i: x[i], caches)
        prefilled = filled(empty(format), *tokens[i, 1:, :, :, :HEADS], [count])
        np.testing.assert_array_equal(own.keys, prefilled.keys)
        expected = jax.nn.dot_product_attention(
            tokens[i, 0, :, -3:], own.keys[:, :count], own.values[:, :count],
            mask=(jnp.arange(count)[None] <= jnp.arange(count - 3, count)[:, None])[None, None],
        )  # fmt: skip
        np.testing.assert_allclose(own.attend(tokens[i, 0, :, -3:]), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results[-1, i, :, 0], expected[:, -1], rtol=1e-5, atol=1e-5)


def test_the_scale_of_products_may_be_any_number():
    keys, values = normal(2, BATCH, 8, HEADS, WIDTH)
    cache = empty("int4").append(keys, values)
    alike = np.asarray(values).mean(1, keepdims=True)  # products of 0 weigh all tokens alike
    np.testing.assert_allclose(cache.attend(keys[:, -1:], scale=0.0), alike, rtol=1e-5, atol=1e-6)
    plain = cache.attend(keys[:, -1:])
    np.testing.assert_array_equal(cache.attend(keys[:, -1:], scale=WIDTH**-0.5), plain)


def test_fp8_holds_each_of_its_numbers_times_the_scale_of_its_head():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.nan_to_num(codes).reshape(1, 4, 1, 64)
    scales = on_device([0.5, 4.0], jnp.float32)
    x = on_device(np.concatenate([codes * 0.5, codes * 4], 2), jnp.float32)
    cache = jqx.KVCache.empty(
        batch=1, length=4, heads=2, width=64, format="fp8", scales=(scales, scales)
    ).append(x, 100 * x)
    np.testing.assert_array_equal(cache.keys, x)
    largest = np.array([448 * 0.5, 448 * 4], np.float32)[:, None]
    assert (np.abs(cache.values) <= largest).all()
    large = np.abs(np.asarray(100 * x)) >= largest
    assert (np.abs(np.asarray(cache.values)) == largest)[large].all()


def test_bytes_are_those_of_the_codes():
    sizes = {"batch": 1, "length": 512, "heads": 3, "width": 64}
    exact = 2 * 512 * 3 * 64 * 4
    shares = {
        x: jqx.KVCache.empty(format=x, **sizes).nbytes / exact for x in ("int4", "int2", "fp8")
    }
    assert shares["int4"] <= 0.26 and shares["int2"] <= 0.2 and shares["fp8"] <= 0.2501
    compiled = jax.jit(jqx.KVCache.append, donate_argnums=0).lower(
        jqx.KVCache.empty(format="int2", **sizes), *normal(2, 1, 1, 3, 64)
    ).compile()  # fmt: skip
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.9 * memory.output_size_in_bytes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_stay_what_they_are(dtype):
    keys, values = normal(2, BATCH, 40, HEADS, WIDTH, dtype=dtype)
    cache = empty("int4", dtype=dtype).append(keys, values)
    assert cache.keys.dtype == cache.attend(keys).dtype == dtype
    wide = [np.asarray(x, np.float32) for x in (keys, values)]
    for result, expected in zip((cache.keys, cache.values), oracle(*wide, 4), strict=True):
        assert np.abs(np.asarray(result[:, :40], np.float32) - expected).max() < 0.5
        np.testing.assert_array_equal(result[:, 24:40].astype(jnp.float32), expected[:, 24:])


def test_nan_infinity_and_what_float16_has_not_make_their_group_nan():
    keys, values = normal(2, BATCH, 40, HEADS, WIDTH)
    keys = keys.at[0, 5, 0, 5].set(jnp.nan).at[1, 12, 1, 7].set(1e6)
    cache = empty("int4").append(keys, values.at[1, 4, 2, 40].set(jnp.inf))
    k, v = (np.isnan(np.asarray(x)) for x in (cache.keys, cache.values))
    assert k[0, 4:16, 0, 5].all() and k[1, 4:16, 1, 7].all() and k.sum() == 24
    assert v[1, 4, 2, 32:48].all() and v.sum() == 16


def test_without_room_nothing_is_lost_silently():
    token = normal(BATCH, 1, HEADS, WIDTH)
    for format in (*BITS, "fp8"):
        full = filled(empty(format, length=32), *[normal(BATCH, 32, HEADS, WIDTH)] * 2, [32])
        with pytest.raises(ValueError, match=r"(?s)KVCache\.append: the cache is full.*fix:"):
            full.append(token, token)
        assert not np.isnan(full.attend(token)).any()
        more = jax.jit(jqx.KVCache.append)(full, token, token)
        assert np.isnan(more.attend(token)).all() and np.isnan(more.keys).all()


def test_what_does_not_fit_is_refused():
    cache, token = empty("int4"), normal(BATCH, 1, HEADS, WIDTH)
    jax.jit(lambda x: empty("fp8", scales=(x, 2)).keys)(on_device([0.5], jnp.float32))
    cases = (
        (lambda: empty("int3"), ValueError, "unknown"),
        (lambda: empty("int4", length=0), ValueError, "`length` == 0 is not positive"),
        (lambda: empty("int4", heads=2.5), TypeError, "`heads`"),
        (lambda: empty("int4", width=24), ValueError, "no multiple of the group size"),
        (lambda: empty("int4", dtype=jnp.int8), TypeError, "`dtype`"),
        (lambda: empty("int4", scales=(1, 1)), ValueError, "does not use"),
        (lambda: empty("fp8", scales=(jnp.ones(2), 1)), ValueError, "do not fit the heads"),
        *(
            (lambda x=x: empty("fp8", scales=(1, x)), ValueError, "not finite numbers above 0")
            for x in (0, -0.5, float("nan"), [float("inf")])
        ),
        (lambda: cache.append(token[0], token[0]), ValueError, "`keys` of shape .* does not fit"),
        (
            lambda: cache.append(token, token[:, :0]),
            ValueError,
            "`values` of shape .* does not fit",
        ),
        (lambda: cache.attend(token[..., :32]), ValueError, "`queries` of shape .* do not fit"),
        (lambda: cache.attend(token[:, :, :2]), ValueError, "`queries` of shape .* do not fit"),
    )
    for call, error, fact in cases:
        with pytest.raises(error, match=rf"(?s)jqx\.KVCache\.\w+: .*{fact}.*fix:"):
            call()


@pytest.mark.parametrize("form", ["fp8", "int4", "int2"])
def test_no_tokens_change_nothing_and_lists_are_arrays(form):
    cache = jqx.KVCache.empty(batch=1, length=16, heads=1, width=8, format=form)
    none = on_device(np.zeros((1, 0, 1, 8)), jnp.float32)
    full = cache.append(*np.ones((2, 1, 16, 1, 8), np.float32))
    for held in (cache, full):
        same = held.append(none, none)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), held, same))
        assert held.attend(none).shape == (1, 0, 1, 8)
    one = [[[[1.0] * 8]]]
    assert cache.append(one, one).attend(one).shape == (1, 1, 1, 8)
    for wrong in ([[[[1] * 8]]], "word"):
        with pytest.raises(TypeError, match=r"(?s)^jqx\.KVCache\.append: `keys`.+fix:"):
            cache.append(wrong, wrong)
