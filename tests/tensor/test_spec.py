import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode, calibrators, gradients
from jqx._src.numerics.qtype import INTEGERS

from ..oracles.refusals import assert_refused


@dataclasses.dataclass(frozen=True)
class Unclipped:
    """A gradient estimator of a user."""

    def bwd(self, x, low, high, levels, cotangent):
        return cotangent, jnp.zeros_like(low), jnp.zeros_like(high)


UNSIGNED = [qtype for qtype in INTEGERS if qtype.startswith("u")]


@pytest.mark.parametrize("qtype", INTEGERS)
def test_every_integer_format_has_an_asymmetric_spec(qtype):
    spec = jqx.QSpec(qtype, symmetric=False)
    assert spec.qtype == jnp.dtype(qtype)


@pytest.mark.parametrize("qtype", UNSIGNED)
def test_an_unsigned_format_cannot_be_symmetric(qtype):
    signed = qtype.removeprefix("u")
    facts = (qtype, "symmetric=False", f"such as {signed}")
    assert_refused(lambda: jqx.QSpec(qtype), (), ValueError, "QSpec", *facts)
    assert jqx.QSpec(signed).symmetric


@pytest.mark.parametrize("qtype", ["float32", "float16", "bool", "int64", "complex64"])
def test_a_dtype_that_is_no_format_is_refused(qtype):
    assert_refused(lambda: jqx.QSpec(qtype), (), TypeError, "QSpec", "qtype", qtype, "int8")


@pytest.mark.parametrize("qtype", ["int9", object(), 8, None, "i4"], ids=lambda q: str(type(q)))
def test_a_qtype_that_is_no_dtype_is_refused(qtype):
    assert_refused(lambda: jqx.QSpec(qtype), (), TypeError, "QSpec", "`qtype`")


@pytest.mark.parametrize(
    "field, values",
    [
        ("granularity", ["per_tensor", 0, jqx.per_tensor, type(jqx.per_tensor())]),
        ("calibrator", [None, "absmax", type(calibrators.absmax), jqx.per_tensor()]),
        ("symmetric", [None, 1, "no", np.True_]),
        ("dynamic", [None, 0, "yes"]),
        ("round_mode", ["UP", RoundMode]),
        ("gradient", [None, "ste"]),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(field, values):
    for value in values:
        f = functools.partial(jqx.QSpec, jnp.int8, **{field: value})
        assert_refused(f, (), TypeError, "QSpec", f"`{field}`")


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


@pytest.mark.parametrize("spelling", [jnp.int8, np.int8, "int8", np.dtype("int8"), jnp.dtype("i1")])
def test_specs_are_equal_however_their_dtype_is_spelt(spelling):
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


@pytest.mark.parametrize(
    "spec, text",
    [
        (jqx.QSpec(jnp.int8), "int8 per_tensor"),
        (jqx.QSpec(jnp.int4, jqx.per_axis(1)), "int4 per_axis(1)"),
        (
            jqx.QSpec(jnp.uint8, jqx.per_token(), False, calibrators.minmax, True),
            "uint8 per_token asymmetric minmax dynamic",
        ),
    ],
)
def test_a_spec_prints_what_differs_from_the_defaults(spec, text):
    assert str(spec) == text
