"""Specs, and the schemes that are short names of them: fields, defaults, and what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode, calibrators, gradients
from jqx._src.numerics.qtype import INTEGERS
from jqx._src.tensor.spec import parse_scheme

from ..oracles.refusals import assert_error, assert_refused


@dataclasses.dataclass(frozen=True)
class Unclipped:
    """A gradient estimator of a user."""

    def bwd(self, x, low, high, levels, cotangent):
        return cotangent, jnp.zeros_like(low), jnp.zeros_like(high)


def test_signed_formats_have_symmetric_specs_and_every_integer_format_an_asymmetric_one():
    for qtype in INTEGERS:
        assert jqx.QSpec(qtype, symmetric=False).qtype == jnp.dtype(qtype)
        if qtype.startswith("u"):
            signed = qtype.removeprefix("u")
            facts = (qtype, "symmetric=False", f"such as {signed}")
            make = functools.partial(jqx.QSpec, qtype)
            assert_refused(make, (), ValueError, "QSpec", *facts)
            assert jqx.QSpec(signed).symmetric


REFUSED_FIELDS = {
    "qtype": ["int9", object(), 8, None, "i4"],
    "granularity": ["per_tensor", 0, jqx.per_tensor, type(jqx.per_tensor())],
    "calibrator": [None, "absmax", type(calibrators.absmax), jqx.per_tensor()],
    "symmetric": [None, 1, "no", np.True_],
    "dynamic": [None, 0, "yes"],
    "round_mode": ["UP", RoundMode],
    "gradient": [None, "ste"],
}


def test_a_field_of_another_kind_is_refused_by_name():
    for field, values in REFUSED_FIELDS.items():
        for value in values:
            make = functools.partial(jqx.QSpec, **{"qtype": jnp.int8, field: value})
            assert_refused(make, (), TypeError, "QSpec", f"`{field}`")
    for dtype in ("float32", "float16", "bool", "int64", "complex64"):
        make = functools.partial(jqx.QSpec, dtype)
        assert_refused(make, (), TypeError, "QSpec", "qtype", dtype, "int8")


def test_the_defaults_are_one_symmetric_absmax_scale():
    spec = jqx.QSpec(jnp.int8)
    assert spec == jqx.QSpec(
        qtype=jnp.int8,
        granularity=jqx.per_tensor(),
        symmetric=True,
        calibrator=calibrators.absmax,
        dynamic=False,
        round_mode=None,
        gradient=gradients.ste,
    )


def test_specs_are_equal_however_their_dtype_is_spelt():
    for spelling in (jnp.int8, np.int8, "int8", np.dtype("int8"), jnp.dtype("i1")):
        spec = jqx.QSpec(spelling)
        assert spec == jqx.QSpec(jnp.int8) and hash(spec) == hash(jqx.QSpec(jnp.int8))
        assert isinstance(spec.qtype, np.dtype)


def test_specs_differ_where_one_field_does():
    spec = jqx.QSpec(jnp.int8)
    others = [
        {"qtype": jnp.int4},
        {"granularity": jqx.per_axis(0)},
        {"symmetric": False},
        {"calibrator": calibrators.minmax},
        {"dynamic": True},
        {"round_mode": RoundMode.UP},
        {"gradient": Unclipped()},
    ]
    specs = {spec, *(dataclasses.replace(spec, **fields) for fields in others)}
    assert len(specs) == 1 + len(others)
    assert dataclasses.replace(spec) in specs


def test_equal_specs_share_one_compilation():
    traces = []

    @functools.partial(jax.jit, static_argnums=1)
    def f(x, spec):
        traces.append(spec)
        return jqx.QTensor.quantize(x, spec).values

    x = jnp.ones((2, 3))
    for spec in [jqx.QSpec(jnp.int8, jqx.per_axis(0)), jqx.QSpec("int8", jqx.per_axis(0))]:
        f(x, spec)
    assert len(traces) == 1
    f(x, jqx.QSpec(jnp.int8, jqx.per_axis(1)))
    assert len(traces) == 2


def test_a_spec_cannot_be_changed_and_a_replaced_one_is_checked_again():
    spec = jqx.QSpec(jnp.int8)
    with pytest.raises(AttributeError):
        spec.symmetric = False
    with pytest.raises(ValueError, match="unsigned"):
        dataclasses.replace(spec, qtype=jnp.uint8)
    with pytest.raises(TypeError):
        dataclasses.replace(spec, bits=8)


def test_resolving_makes_the_granularity_absolute_and_keeps_all_else():
    spec = jqx.QSpec(jnp.uint4, jqx.per_channel(), False, calibrators.minmax, True, RoundMode.UP)
    resolved = spec.resolve(rank=3, kept=(0, 2))
    assert resolved == dataclasses.replace(spec, granularity=jqx.per_axis(0, 2))
    assert resolved.resolve(rank=3, kept=(1,)) == resolved


def test_a_spec_prints_what_differs_from_the_defaults():
    wide = jqx.QSpec(jnp.uint8, jqx.per_token(), False, calibrators.minmax, True)
    assert str(jqx.QSpec(jnp.int8)) == "int8 per_tensor"
    assert str(jqx.QSpec(jnp.int4, jqx.per_axis(1))) == "int4 per_axis(1)"
    assert str(wide) == "uint8 per_token asymmetric minmax dynamic"


CHANNEL, TOKEN, TENSOR = jqx.per_channel(), jqx.per_token(), jqx.per_tensor()
BLOCKS = jqx.per_group(32, tail=True)


def test_a_scheme_says_who_shares_a_scale():
    """Beside its format: the granularity of weights, and that of activations."""
    for scheme, weight, activation in [
        ("int8", CHANNEL, TENSOR),
        ("int8:tensor", TENSOR, TENSOR),
        ("int8:channel", CHANNEL, CHANNEL),
        ("int8:group=32", BLOCKS, BLOCKS),
        ("int8:block=32", BLOCKS, BLOCKS),
        ("mxfp8", BLOCKS, BLOCKS),
        ("nf4", CHANNEL, TENSOR),
    ]:
        qtype = scheme.partition(":")[0]
        assert parse_scheme(scheme).spec == jqx.QSpec(qtype, weight), scheme
        assert parse_scheme(scheme, "activation").spec == jqx.QSpec(qtype, activation), scheme


def test_options_say_the_other_fields():
    dynamic = jqx.QSpec("int8", TOKEN, dynamic=True)
    assert parse_scheme("int8:dynamic", "activation").spec == dynamic
    assert parse_scheme("int8:token:dynamic", "activation").spec == dynamic
    assert parse_scheme("int8", "state").spec == jqx.QSpec("int8", TOKEN)
    assert parse_scheme("uint4:asymmetric:calibrator=mse").spec == jqx.QSpec(
        "uint4", CHANNEL, symmetric=False, calibrator=calibrators.mse
    )
    assert parse_scheme("int8:contract=0,-1").contract == (0, -1)


NO_SCHEMES = [
    *("", "int9", "Int8", "int8:", "int8:tensor=", "int8:tensor=1", "int8:group", "int8:group="),
    *("int8:group=x", "int8:group=4:block=4", "int8:tensor:channel", "int8:tensor:tensor"),
    *("float:tensor", "int8:dynamic", "int8:token", "int8:calibrator=best", "int8 :tensor"),
    *("int8:channel=1", "w8a8", "uint8", "mxfp4:group=16"),
]


def test_what_is_no_scheme_of_a_weight_is_refused_in_four_parts():
    for scheme in NO_SCHEMES:
        with pytest.raises(ValueError) as refusal:
            parse_scheme(scheme)
        text = str(refusal.value)
        assert re.search(r"^jqx\..+\n(  .+\n)*  fix: .+", text), (scheme, text)


def test_schemes_are_taken_for_arrays_states_results_and_empty_caches():
    x, w = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.eye(4)
    assert jqx.QTensor.quantize(x, "int8").scale.shape == (1, 1)
    assert jqx.quantize_state({"a": x}, {"a": "int8"})["a"].scale.shape == (3, 1)
    numbers = (((1,), (0,)), ((), ()))
    expected = jqx.matmul(x, w, output=jqx.QSpec("int8"))
    for result in (
        jqx.matmul(x, w, output="int8"),
        jqx.dot_general(x, w, numbers, output="int8:tensor"),
    ):
        assert repr(result) == repr(expected)
        assert (result.values == expected.values).all() and (result.scale == expected.scale).all()
    result = jqx.matmul(x, w, output=("int8", calibrators.Affine(jnp.full((1, 1), 0.5))))
    assert (result.values == jnp.round(x * 2).astype(jnp.int8)).all()
    cache = jqx.QTensor.zeros((2, 5, 8), "int8")
    assert cache.scale.shape == (2, 5, 1)
    assert repr(cache) == repr(jqx.QTensor.zeros((2, 5, 8), jqx.QSpec("int8", jqx.per_axis(0, 1))))
    assert_error(lambda: jqx.matmul(x, w, output="int9"), "jqx.dot_general: the format is unknown")
    for use, fact, error in (
        (lambda: jqx.matmul(x, w, output="float"), "`output` is float", ValueError),
        (lambda: jqx.matmul(x, w, output=3), "`output` is not a QSpec", TypeError),
        (lambda: jqx.QTensor.zeros((2,), "float"), "`spec` is float", ValueError),
        (lambda: jqx.QTensor.zeros((2,), 3), "`spec` is not a QSpec", TypeError),
    ):
        assert_error(use, fact, error=error)
