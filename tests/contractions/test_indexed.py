"""Taking from and writing to QTensors at any places, as `x[i, j]` and `x.at[i, j].set(y)` do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics

from ..arrays import on_device
from ..tensor.tensors import spread_out

NOTHING = jqx.Policy([])
SHAPE = (3, 6, 2, 32)
X = on_device(spread_out(SHAPE), jnp.float32)
NEW = on_device(spread_out((3, 1, 2, 32))[:, ::-1] * 3, jnp.float32)
ROWS, PLACES = jnp.array([0, 2, 1]), jnp.array([4, 0, 5])
MINMAX = {"symmetric": False, "calibrator": jqx.calibrators.minmax}
FORMATS = {
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


def dequantized(found):
    """The real arrays of the QTensors of a dict."""
    return {key: q.dequantize() for key, q in found.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_taken_stays_quantized(name):
    def f(p, c):
        return {key: take(c) for key, take in TAKEN.items()}

    @jax.jit
    def run(x):
        q = jqx.QTensor.quantize(x, FORMATS[name])
        found = jqx.convert(f, NOTHING)({}, q)
        for taken in found.values():
            assert isinstance(taken, jqx.QTensor) and taken.qtype == q.qtype
        return dequantized(found), f({}, q.dequantize())

    found, wanted = run(X)
    for key, expected in wanted.items():
        np.testing.assert_array_equal(found[key], expected, err_msg=key)


@pytest.mark.many
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_quantized_by_itself_and_the_rest_stays(name):
    """With the scale of all, where there is one."""
    spec = FORMATS[name]

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
            found = jqx.convert(f, NOTHING)({}, c, new)
            for written in found.values():
                assert jax.tree.structure(written) == jax.tree.structure(c)
            results.append(dequantized(found))
        return f({}, q.dequantize(), of_new), results

    wanted, results = run(X, NEW)
    for found in results:
        for key, expected in wanted.items():
            np.testing.assert_array_equal(found[key], expected, err_msg=key)


def test_a_place_out_of_bounds_is_nan_where_jnp_fills_with_it():
    f = lambda p, c: jnp.take_along_axis(c, PLACES[:, None, None, None] + 4, axis=1)  # noqa: E731

    @jax.jit
    def run(x):
        q = jqx.QTensor.quantize(x, FORMATS["a token and head"])
        return jqx.convert(f, NOTHING)({}, q).dequantize(), f({}, q.dequantize())

    found, expected = run(X)
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found).any()


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda p, c: c.at[:, 1, :, 3].set(0.0), "a token and head"),
        (lambda p, c: c.at[ROWS, PLACES].add(1.0), "a token and head"),
        (lambda p, c: c[ROWS, :, :, PLACES], "nf4 in blocks"),
    ],
)
def test_what_a_scale_cannot_follow_is_an_error(f, name):
    q = jqx.QTensor.quantize(X, FORMATS[name])
    with pytest.raises(NotImplementedError, match=r"reaches `(scatter|gather)"):
        jqx.convert(f, NOTHING)({}, q)
    converted = jqx.convert(f, NOTHING, unsupported="dequantize")
    found, expected = jax.jit(lambda q: (converted({}, q), f({}, q.dequantize())))(q)
    np.testing.assert_array_equal(found, expected)
