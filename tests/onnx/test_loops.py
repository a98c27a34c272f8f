"""Scans as loops of ONNX: one body, whose steps get slices of weights, codes and scales."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jqx
from jqx.interop import to_onnx, verify_onnx

from ..arrays import normal
from .runtime import LEVELS, assert_close, operations, run
from .test_models import CACHE, PARAMS, TEXT, cache_in, decoder
from .test_quantized import SCHEMES, U8

X, W = normal(0, 5, 8), normal(1, 3, 8, 8) / 3
F8 = jnp.float8_e4m3fn
SCALES, PLACES = np.array([0.1, 0.2, 0.3], "f4"), np.array([2, 0, 1], "i4")


def scan(step, start, rows=None, **options):
    return lax.scan(step, start, rows, **options)


def layer(h, w):
    return jnp.tanh(h @ w), h.sum(0)


def of_float8(c, r):
    return c + r.astype("f4"), c.astype(F8)


def chosen(h, step):
    w, i = step
    return lax.cond(i == 1, lambda h: jnp.tanh(h @ w), lambda h: h - 1, h), None


def halved(h, w):
    small = lax.while_loop(lambda h: jnp.abs(h).max() > 0.1, lambda h: h * 0.5 * w[0, 0], h @ w)
    return h + small, small


CASES = {
    "carried and stacked": lambda w, x: scan(lambda c, r: (c + r.sum(), r * c), 0.0, x),
    "reverse": lambda w, x: scan(lambda c, r: (c + r.sum(), r * c), 0.0, x, reverse=True),
    "nothing stacked": lambda w, x: scan(lambda c, r: (c + r, None), x[0], x, reverse=True),
    "nothing carried": lambda w, x: scan(lambda _, r: (None, jnp.sin(r)), None, x),
    "nothing sliced": lambda w, x: scan(lambda c, _: (c @ w[0], c[0]), x, length=4),
    "counted": lambda w, x: lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c + i), x),
    "passed on": lambda w, x: scan(lambda c, r: ((c[0], c[1] @ c[0] + r), r > 0), (w[0], x[0]), x),
    "constants": lambda w, x: scan(lambda c, r: (c + r * jnp.arange(8.0), jnp.int8(3)), x[0], x),
    "places": lambda w, x: scan(lambda c, i: (c + x[i], w[i]), x[0], PLACES),
    "int16": lambda w, x: scan(lambda c, r: (c + r, c), jnp.ones(8, "i2"), (9 * x).astype("i2")),
    "float8": lambda w, x: scan(of_float8, x[0], x.astype(F8))[1].astype("f4"),
    "float8, reverse": lambda w, x: scan(of_float8, x[0], x.astype(F8), reverse=True)[1].astype(
        "f4"
    ),
    "layers": lambda w, x: scan(layer, x, w),
    "layers, reverse": lambda w, x: scan(lambda h, w: layer(h, w.T), x, w, reverse=True),
    "one row": lambda w, x: scan(lambda c, r: (c + r, r * c), x[0], x[:1]),
    "no row": lambda w, x: scan(lambda c, r: (c + r, r * c), x[0], x[:0]),
    "rounded": lambda w, x: scan(
        lambda h, s: (h + jqx.quantize_dequantize(h, s, qtype=jnp.int8), None), x, SCALES
    ),
    "a branch by the step": lambda w, x: scan(chosen, x, (w, jnp.arange(3)))[0],
    "a loop inside": lambda w, x: scan(halved, x, w),
    "a scan inside": lambda w, x: scan(lambda h, w: scan(layer, h, jnp.stack([w, w.T])), x, w),
    "inside a loop": lambda w, x: lax.while_loop(
        lambda s: s[0] < x.shape[0], lambda s: (s[0] + 2, scan(layer, s[1], w)[0]), (0, x)
    ),
    "inside a branch": lambda w, x: lax.cond(
        x[0, 0] > 9, jnp.sin, lambda h: scan(layer, h, w)[0], x
    ),
}


def test_scans_give_what_they_give_in_jax():
    def f(w, x):
        return {name: case(w, x) for name, case in CASES.items()}

    expected = jax.jit(f)(W, X)
    # Unrolled, the loops of JAX alone, one of which is in three steps; else all but three cases.
    for scans, count in (("unroll", 4), ("loop", len(CASES) - 3)):
        model = to_onnx(f, W, scans=scans)(X)
        assert operations(model)["Loop"] == count
        for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
            assert_close(run(model, X, level=level), expected)


def test_a_scan_over_time_may_have_any_length():
    def cell(h, x):
        return (jnp.tanh(h @ W[0] + x),) * 2

    def f(w, x):
        both = scan(cell, jnp.zeros(8), x), scan(cell, jnp.zeros(8), x, reverse=True)
        rest = scan(cell, x[0], lax.slice_in_dim(x, 1, None))  # of length 0, if x has one row
        layers = scan(lambda h, w: (scan(cell, w[0], h @ w)[1], None), x, w)
        return both, rest, layers, scan(lambda h, r: scan(layer, h + r[None], w), w[0, :1], x)

    (n,) = export.symbolic_shape("n")
    for scans in ("unroll", "loop"):
        model = to_onnx(f, W, scans=scans)(jax.ShapeDtypeStruct((n, 8), jnp.float32))
        for rows in (1, 2, 5):
            assert_close(run(model, X[:rows]), f(W, X[:rows]))


def network(params, x):
    """Layers, one of which is another, and layers within layers."""

    def layer(h, step):
        w, last = step
        return lax.cond(last, jnp.sin, jnp.tanh, h @ w), None

    h, _ = lax.scan(layer, x, (params["layers"], jnp.arange(3) == 2))
    inner = lambda h, w: (jnp.tanh(h @ w), h.sum())  # noqa: E731
    return lax.scan(lambda h, w: lax.scan(inner, h, w), h, params["nested"])


@pytest.mark.parametrize("name", SCHEMES)
def test_layers_have_their_own_codes_and_scales(name):
    params = {"layers": normal(3, 3, 64, 64) / 8, "nested": normal(4, 2, 2, 64, 64) / 8}
    x, (policy, options) = normal(5, 8, 64), SCHEMES[name]
    q = jqx.ptq(network, policy, jqx.algorithms.nearest(), progress=False)(params, [x])
    model = to_onnx(q, scans="loop", **options)(x)
    assert operations(model)["Loop"] == 2
    assert_close(run(model, x), jax.jit(q.function)(q.params, x))
    unrolled = to_onnx(q, **options)(x)
    stored, fewer = (sum(len(x.raw_data) for x in m.graph.initializer) for m in (model, unrolled))
    assert stored < 1.02 * fewer + 1_000


def test_kernels_and_tables_of_layers_are_sliced():
    def f(params, x, rows):
        def layer(h, w):
            numbers = ("NHWC", "HWIO", "NHWC")
            h = lax.conv_general_dilated(h, w["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
            return jnp.tanh(h + w["table"][rows][:, None, None]), None

        return lax.scan(layer, x, params)[0]

    params = {"kernel": normal(6, 2, 3, 3, 8, 8) / 8, "table": normal(7, 2, 20, 8)}
    x, rows = normal(8, 2, 6, 6, 8), np.array([3, 19], "i4")
    for name in ("w8a8", "w8a8 dynamic with zero points", "w4a16", "fp8", "nf4"):
        (rule,) = SCHEMES[name][0].rules
        policy = jqx.Policy([dataclasses.replace(rule, tables=rule.weight)])
        q = jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)(params, [(x, rows)])
        found = run(to_onnx(q, scans="loop")(x, rows), x, rows)
        assert_close(found, jax.jit(q.function)(q.params, x, rows))


@pytest.mark.usefixtures("as_users_write")
def test_a_decoder_has_one_layer_in_its_file():
    """With an open length and a cache, in float or in codes, which the loop carries."""
    (t,) = export.symbolic_shape("t", constraints=["t <= 12"])
    words, start = jax.ShapeDtypeStruct((1, t), jnp.int32), jnp.int32(0)
    policy = jqx.Policy({"blocks/.*": jqx.presets.w8a8()})
    args = TEXT, CACHE, start
    q = jqx.ptq(decoder, policy, jqx.algorithms.nearest(), progress=False)(PARAMS, [args])
    model = to_onnx(q, scans="loop")(words, CACHE, start)
    assert_close(run(model, *args), jax.jit(q.function)(q.params, *args), 1e-4)
    found = verify_onnx(model, q)(*args)
    assert found.sites == () and found.result.sqnr > 100
    args = TEXT, cache_in("int8", 0, 1, 2, 3, 4), start
    model = to_onnx(decoder, PARAMS, scans="loop")(words, *args[1:])
    logits, codes, scale = run(model, *args)
    want, cache = jax.jit(jqx.convert(decoder, jqx.Policy({})))(PARAMS, *args)
    assert_close([logits], want, 2e-2)
    assert np.abs(codes.astype(int) - cache.values).max() <= 1
    np.testing.assert_allclose(scale, cache.scale, rtol=1e-4)


def test_layers_have_their_own_caches():
    """With scales for each layer, and with some that all share."""

    def f(_, cache, shared, x):
        def layer(x, caches):
            own, other = caches
            own = lax.dynamic_update_slice(own, x[None], (2, 0))
            return jnp.tanh(x + x @ own.T @ own + x @ other.T @ other), own

        return lax.scan(layer, x, (cache, shared))

    caches = [
        jqx.QTensor.quantize(normal(9, 3, 4, 8), jqx.QSpec("int8", jqx.per_axis(*axes)))
        for axes in ((0, 1), (1,))
    ]
    model = to_onnx(f, {}, scans="loop")(*caches, X[0])
    assert operations(model)["Loop"] == 1
    assert_close(run(model, *caches, X[0]), jqx.convert(f, jqx.Policy({}))({}, *caches, X[0]))


def test_sites_outside_of_loops_are_compared():
    def f(params, x):
        h, _ = lax.scan(layer, x @ params["first"], params["layers"])
        return h @ params["last"]

    params = {"first": W[0], "layers": W, "last": W[1]}
    q = jqx.ptq(f, jqx.presets.w8a8(), progress=False)(params, [X])
    found = verify_onnx(to_onnx(q, scans="loop")(X), q)(X)
    assert [(site.path, site.differing) for site in found.sites] == [("first", 0), ("last", 0)]
    assert found.result.sqnr > 100


def test_scans_without_a_form_are_refused():
    def f(w, x):
        return scan(layer, x, w)[0]

    def turned(_, cache, x):
        return scan(lambda c, r: (c.T, r @ c), cache, x)[1]

    def of_4_bits(_, x):
        return scan(lambda c, r: (c + r, r.astype(jnp.int4)), x[0], x)

    # One zero point in the first step, and several in the second.
    uneven = np.array(normal(10, 2, 8, 8))
    uneven[0] = uneven[0, :, :1]
    policy = jqx.presets.w8a8_dynamic(weight=U8)
    q = jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)(uneven, [X])
    cache = jqx.QTensor.quantize(normal(11, 8, 8), jqx.QSpec("int8", jqx.per_axis(0)))
    blocks = jqx.QTensor.quantize(normal(12, 4, 8, 8), jqx.QSpec("int8", jqx.per_block({0: 2})))
    cases = [
        (lambda: to_onnx(f, W, scans="rolled"), "unknown: 'rolled'.\n.* pass 'unroll' or 'loop'"),
        (lambda: to_onnx(q, scans="loop")(X), "steps differ in more than .*\n.*\n.*scans='unroll'"),
        (lambda: to_onnx(turned, {}, scans="loop")(cache, X), "changes the format of an input"),
        (lambda: to_onnx(lambda _, w: f(w, X), {}, scans="loop")(blocks), "cuts blocks of an"),
        (lambda: to_onnx(of_4_bits, {}, scans="loop")(X), "of values of 4 bits"),
    ]
    for call, text in cases:
        with pytest.raises((ValueError, NotImplementedError), match=text):
            call()
