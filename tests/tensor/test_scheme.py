"""Schemes: what each says of each role, and that nothing is guessed."""

import jax.numpy as jnp
import pytest

import jqx
from jqx import calibrators
from jqx._src.tensor.spec import parse_scheme

CHANNEL, TOKEN, TENSOR = jqx.per_channel(), jqx.per_token(), jqx.per_tensor()
BLOCKS = jqx.per_group(32, tail=True)


@pytest.mark.parametrize(
    ("scheme", "weight", "activation"),
    [
        ("int8", CHANNEL, TENSOR),
        ("int8:tensor", TENSOR, TENSOR),
        ("int8:channel", CHANNEL, CHANNEL),
        ("int8:group=32", BLOCKS, BLOCKS),
        ("int8:block=32", BLOCKS, BLOCKS),
        ("mxfp8", BLOCKS, BLOCKS),
        ("nf4", CHANNEL, TENSOR),
    ],
)
def test_a_scheme_says_who_shares_a_scale(scheme, weight, activation):
    qtype = scheme.partition(":")[0]
    assert parse_scheme(scheme).spec == jqx.QSpec(qtype, weight)
    assert parse_scheme(scheme, "activation").spec == jqx.QSpec(qtype, activation)


def test_options_say_the_other_fields():
    dynamic = jqx.QSpec("int8", TOKEN, dynamic=True)
    assert parse_scheme("int8:dynamic", "activation").spec == dynamic
    assert parse_scheme("int8:token:dynamic", "activation").spec == dynamic
    assert parse_scheme("int8", "state").spec == jqx.QSpec("int8", TOKEN)
    assert parse_scheme("uint4:asymmetric:calibrator=mse").spec == jqx.QSpec(
        "uint4", CHANNEL, symmetric=False, calibrator=calibrators.mse
    )
    assert parse_scheme("int8:contract=0,-1").contract == (0, -1)


@pytest.mark.parametrize(
    "scheme",
    ["", "int9", "Int8", "int8:", "int8:tensor=", "int8:tensor=1", "int8:group", "int8:group=",
     "int8:group=x", "int8:group=4:block=4", "int8:tensor:channel", "int8:tensor:tensor",
     "float:tensor", "int8:dynamic", "int8:token", "int8:calibrator=best", "int8 :tensor",
     "int8:channel=1", "w8a8", "uint8", "mxfp4:group=16"],
)  # fmt: skip
def test_what_is_no_scheme_of_a_weight_is_refused_in_four_parts(scheme):
    with pytest.raises(ValueError, match=r"^jqx\..+\n(  .+\n)*  fix: .+"):
        parse_scheme(scheme)


def test_arrays_and_state_take_schemes():
    x = jnp.ones((2, 4))
    assert jqx.QTensor.quantize(x, "int8").scale.shape == (1, 1)
    assert jqx.quantize_state({"a": x}, {"a": "int8"})["a"].scale.shape == (2, 1)


def test_schemes_are_taken_for_results_and_for_empty_caches():
    x, w = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.eye(4)
    affine = jqx.calibrators.Affine(jnp.full((1, 1), 0.5))
    numbers = (((1,), (0,)), ((), ()))
    wanted = jqx.matmul(x, w, output=jqx.QSpec("int8"))
    for found in (
        jqx.matmul(x, w, output="int8"),
        jqx.dot_general(x, w, numbers, output="int8:tensor"),
    ):
        assert repr(found) == repr(wanted)
        assert (found.values == wanted.values).all() and (found.scale == wanted.scale).all()
    found = jqx.matmul(x, w, output=("int8", affine))
    assert (found.values == jnp.round(x * 2).astype(jnp.int8)).all()
    cache = jqx.QTensor.zeros((2, 5, 8), "int8")
    assert cache.scale.shape == (2, 5, 1)
    assert repr(cache) == repr(jqx.QTensor.zeros((2, 5, 8), jqx.QSpec("int8", jqx.per_axis(0, 1))))
    for run, fact in (
        (lambda: jqx.matmul(x, w, output="int9"), "jqx.dot_general: the format is unknown"),
        (lambda: jqx.matmul(x, w, output="float"), "`output` is float"),
        (lambda: jqx.matmul(x, w, output=3), "`output` is not a QSpec"),
        (lambda: jqx.QTensor.zeros((2,), "float"), "`spec` is float"),
        (lambda: jqx.QTensor.zeros((2,), 3), "`spec` is not a QSpec"),
    ):
        with pytest.raises((TypeError, ValueError), match=fact) as info:
            run()
        assert "fix:" in str(info.value)
