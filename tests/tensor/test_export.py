"""QTensors as arguments and results of exported functions, written and read back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx
from jqx import numerics
from jqx._src.numerics.lookup import DTYPES

from ..arrays import on_device
from .tensors import CASES, NV4, assert_equal, random_tensor, spec, spread_out

X = on_device(spread_out((4, 10)))
OWN = numerics.Codebook((-1.0, 0.25, 3.0), "mine")
QTYPES = [
    *(jnp.dtype(name) for name in DTYPES if name != "float8_e8m0fnu"),
    *(numerics.int3, numerics.uint7, numerics.ternary, numerics.Integer(8, narrow=True)),
    *(numerics.nf4, numerics.binary, OWN),
    numerics.float6_e3m2fn,
    numerics.Minifloat(2, 3, numerics.Specials.NEGATIVE_ZERO_IS_NAN, bias=3),
]


def same(q):
    return q


def written(q, f=same):
    """An exported function of one QTensor, as bytes."""
    return bytes(export.export(jax.jit(f))(q).serialize())


def returned(q):
    """What an exported identity returns once it is written and read back."""
    return export.deserialize(bytearray(written(q))).call(q)


def quantized(qtype):
    symmetric = numerics.format_of(qtype).signed
    return jqx.QTensor.quantize(X, spec(qtype, jqx.per_axis(0), symmetric))


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_a_qtensor_of_any_granularity_crosses(name):
    shape, spec, _ = CASES[name]
    q = jqx.QTensor.quantize(on_device(spread_out(shape)), spec)
    assert_equal(returned(q), q)


@pytest.mark.many
@pytest.mark.parametrize("qtype", [q for q in QTYPES if "int2" not in str(q)], ids=str)
def test_a_qtensor_of_any_format_crosses(qtype):
    q = quantized(qtype)
    assert_equal(returned(q), q)


LAYOUTS = {
    "packed": lambda q: q.pack(),
    "packed along the first axis": lambda q: q.pack(0),
    "for cpu": lambda q: q.pack_for("cpu"),
    "for gpu": lambda q: q.pack_for("gpu"),
    "packed and turned": lambda q: q.pack().T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qtype", [jnp.int4, jnp.uint4, numerics.int3, numerics.nf4], ids=str)
def test_a_qtensor_of_any_layout_crosses(qtype, layout):
    q = LAYOUTS[layout](quantized(jnp.dtype(qtype) if isinstance(qtype, type) else qtype))
    assert_equal(returned(q), q)


def test_a_qtensor_in_a_tree_crosses_and_is_computed_with():
    tree = {"w": (quantized(jnp.dtype("int4")), None), "v": [jnp.ones(3)]}
    f = jax.jit(lambda tree: (tree["w"][0].dequantize() + tree["v"][0].sum(), tree))
    read = export.deserialize(export.export(f)(tree).serialize())
    assert_equal(read.call(tree), f(tree))


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
    assert_equal(returned(q.pack()), q.pack())


def test_a_format_of_the_user_is_refused_by_name():
    class Mine(numerics.Codebook):
        pass

    with pytest.raises(ValueError, match="type Mine is neither of a class of jqx"):
        written(quantized(Mine((-1.0, 1.0), "mine")))


CHANGES = {
    b'"version": 2': (b'"version": 3', "the version is unknown"),
    b'"qtype"': (b'"qtipe"', "the field 'qtipe' at QTensor is unknown"),
    b'"float32"': (b'"float33"', "`dtype` is not a dtype"),
    b"Codebook": (b"Codebock", "'Codebock' at QTensor.qtype is unknown"),
    b'"blocks": []': (b'"blocks": {}', "QTensor.blocks is unknown"),
    b'"mine"': (b"[1, 2]", "QTensor.qtype.label has the wrong type"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_what_is_not_understood_is_refused(part):
    data, (change, problem) = written(quantized(OWN)), CHANGES[part]
    assert data.count(part) >= 1 and len(part) == len(change)
    with pytest.raises((TypeError, ValueError), match=re.escape(problem)) as info:
        export.deserialize(bytearray(data.replace(part, change)))
    assert "fix" in str(info.value)


def test_nested_scales_cross():
    q = jqx.QTensor.quantize(X, spec(NV4, jqx.per_block({0: 1, 1: 4}, tail=True)))
    assert isinstance(q.scale, jqx.QTensor)
    assert_equal(returned(q), q)
