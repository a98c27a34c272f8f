"""What is given wrongly is an error in four parts, before anything is compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import parallel

PARTS = r"jqx\.parallel\.\w+: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
INT8 = "int8:group=32"
X = np.ones((4, 4, 6), np.float32)

KEYS = jax.random.split(jax.random.key(0), 2)


def reduced(spec=INT8, x=X, axis_name="i", **options):
    return on_four(lambda x: parallel.all_reduce(x, axis_name, spec, **options), x)


def on_four(f, x=X):
    """Evaluates for four devices, without computing anything."""
    return jax.eval_shape(jax.vmap(f, axis_name="i"), x)


def permuted(perm):
    return on_four(lambda x: parallel.ppermute(x, "i", perm, INT8))


MISTAKES = {
    "integers": (lambda: reduced(x=np.ones((4, 3), np.int32)), TypeError, "float32"),
    "no axis": (lambda: reduced(axis_name="j"), NameError, "inside jax.shard_map"),
    "outside": (lambda: parallel.all_reduce(X, "i", INT8), NameError, "inside jax.shard_map"),
    "no spec": (lambda: reduced(jnp.int8), TypeError, "int8"),
    "float": (lambda: reduced("float"), ValueError, "int8"),
    "a scale an axis": (
        lambda: reduced(jqx.QSpec(jnp.int8, jqx.per_axis(0))),
        ValueError,
        "jqx.per_group(256)",
    ),
    "a scale a channel": (lambda: reduced("int8:channel"), ValueError, "jqx.per_group(256)"),
    "no signs": (lambda: reduced("float8_e8m0fnu:group=32"), ValueError, "pass int8"),
    "a spec backward": (lambda: reduced(backward="int8:channel"), ValueError, "`backward`"),
    "a form": (lambda: reduced(form="tree"), ValueError, 'form="ring"'),
    "a flag": (lambda: reduced(hadamard=1), TypeError, "hadamard=False"),
    "no order": (lambda: reduced("int8:group=6", hadamard=True), ValueError, "jqx.per_group(256)"),
    "no group": (lambda: reduced("int8", hadamard=True), ValueError, "jqx.per_group(256)"),
    "a seed": (lambda: reduced(key=0), TypeError, "jax.random.key(0)"),
    "many keys": (lambda: reduced(key=KEYS), TypeError, "jax.random.key(0)"),
    "a key beside zero points": (
        lambda: reduced("uint8:group=32:asymmetric", key=KEYS[0]),
        ValueError,
        "drop key",
    ),
    "a key beside a calibrator that clips": (
        lambda: reduced("int4:group=32:calibrator=mse", key=KEYS[0]),
        ValueError,
        "drop key",
    ),
    "a key beside scales of few bits": (lambda: reduced("mxfp8", key=KEYS[0]), ValueError, "drop"),
    "an error of 16 bits": (
        lambda: reduced(error=jnp.zeros((4, 6), jnp.bfloat16)),
        TypeError,
        "error.astype(jnp.float32)",
    ),
    "an error of another shape": (
        lambda: reduced(error=jnp.zeros(6)),
        ValueError,
        "jnp.zeros(x.shape, jnp.float32)",
    ),
    "parts that do not fit": (
        lambda: on_four(lambda x: parallel.reduce_scatter(x, "i", INT8, scatter_dimension=1)),
        ValueError,
        "tiled=True",
    ),
    "tiles that do not fit": (
        lambda: on_four(lambda x: parallel.all_to_all(x, "i", 1, 0, INT8, tiled=True)),
        ValueError,
        "pad the array",
    ),
    "an axis": (
        lambda: on_four(lambda x: parallel.all_gather(x, "i", INT8, axis=2, tiled=True)),
        ValueError,
        "pass an axis",
    ),
    "an axis of floats": (
        lambda: on_four(lambda x: parallel.all_gather(x, "i", INT8, axis=1.0)),
        TypeError,
        "axis=1",
    ),
    "tiled": (
        lambda: on_four(lambda x: parallel.all_gather(x, "i", INT8, tiled="yes")),
        TypeError,
        "tiled=False",
    ),
    "a destination twice": (lambda: permuted([(0, 1), (2, 1)]), ValueError, "(i, (i + 1) % 4)"),
    "a device too many": (lambda: permuted([(0, 4)]), ValueError, "(i, (i + 1) % 4)"),
    "no pairs": (lambda: permuted([1, 2]), ValueError, "(i, (i + 1) % 4)"),
    "a number": (lambda: permuted(1), ValueError, "(i, (i + 1) % 4)"),
    "too few arguments": (lambda: parallel.all_to_all(X, "i", INT8), TypeError, "concat_axis"),
    "another name": (lambda: reduced(specs=INT8), TypeError, "spec"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_says_how_to_mend_it(mistake):
    call, error, mend = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert re.match(PARTS, text) and mend in text, text


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match="float32"):
        reduced(x=np.ones((4, 3)))


def test_nobody_may_send():
    """And one device alone may be the whole mesh."""
    mesh = jax.sharding.AbstractMesh((4,), ("i",), (jax.sharding.AxisType.Auto,))
    nobody = functools.partial(parallel.ppermute, axis_name="i", perm=[], spec=INT8)
    rows = jax.P("i")
    f = jax.shard_map(nobody, mesh=mesh, in_specs=rows, out_specs=rows)
    assert jax.eval_shape(f, X).shape == X.shape
    f = functools.partial(parallel.all_reduce, axis_name="i", spec=INT8)
    assert jax.eval_shape(jax.vmap(f, axis_name="i"), X[:1]).shape == (1, 4, 6)
