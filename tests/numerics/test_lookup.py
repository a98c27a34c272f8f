import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jqx import numerics
from jqx._src.numerics.lookup import DTYPES, E8M0, PowerOfTwo, as_qtype, name_of_qtype
from jqx._src.numerics.minifloats import MINIFLOATS
from jqx._src.numerics.qtype import INTEGERS
from jqx.numerics import (
    Codebook,
    Integer,
    Minifloat,
    Specials,
    binary,
    float6_e2m3fn,
    format_of,
    int3,
    mxfp4,
    nf4,
    ternary,
)

OTHERS = ["bool", "int64", "uint64", "float16", "bfloat16", "float32", "float64", "complex64"]
WITHOUT_DTYPE = [
    *(int3, ternary, nf4, binary, float6_e2m3fn, mxfp4),
    Integer(8, narrow=True),
    Integer(4, narrow=True),
    Minifloat(4, 3, Specials.NAN, saturate=False),
    Minifloat(4, 3, Specials.NAN, bias=9),
    Codebook(tuple(range(256)), "uint8"),
]


def test_the_nineteen_dtypes_of_jax_that_are_formats_are_listed():
    assert DTYPES == (*INTEGERS, *MINIFLOATS, "float8_e8m0fnu")
    assert len(set(DTYPES)) == len(DTYPES) == 19


@pytest.mark.parametrize("name", DTYPES)
def test_every_listed_dtype_is_a_format_and_the_format_is_that_dtype(name):
    dtype = jnp.dtype(name)
    form = format_of(dtype)
    assert form.storage == dtype and form.name == name
    for spelling in (name, dtype, getattr(jnp, name), dtype.type, form):
        assert format_of(spelling) == form
        found = as_qtype("caller", "qtype", spelling, "Output")
        assert isinstance(found, np.dtype) and found == dtype
        assert name_of_qtype(spelling) == name
    assert form.bits == (jnp.finfo(dtype) if name.startswith("float") else jnp.iinfo(dtype)).bits


def test_numbers_of_e8m0_are_read_as_powers_of_two():
    assert format_of(E8M0) == format_of(ml_dtypes.float8_e8m0fnu) == PowerOfTwo()


@pytest.mark.parametrize("qtype", WITHOUT_DTYPE, ids=str)
def test_a_format_without_a_dtype_stays_itself(qtype):
    assert as_qtype("caller", "qtype", qtype, "Output") is qtype
    assert format_of(qtype) is qtype
    assert name_of_qtype(qtype) == qtype.name


@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes_are_refused_with_their_role(name):
    facts = [
        rf"^jqx\.caller: Weight element type \({name}\) must be a quantized type\.",
        r"  fix:      pass as argument a jqx\.numerics\.QType, or one of int2, .*float8_e8m0fnu\.$",
    ]
    with pytest.raises(TypeError, match="\n".join(facts)):
        as_qtype("caller", "argument", name, "Weight")


@pytest.mark.parametrize("spelling", ["int9", "i4", "nf3", "", None, 8, object()])
def test_what_is_no_dtype_is_refused_by_name(spelling):
    problem = re.escape("jqx.caller: `qtype` is not a dtype") + "[^\n]*"
    parts = r"\n(  given:    qtype = .+\n)?(  expected: .+\n)?  fix:"
    with pytest.raises(TypeError, match=f"^{problem}{parts}"):
        as_qtype("caller", "qtype", spelling, "Output")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((q.name, q) for q in WITHOUT_DTYPE if q is getattr(numerics, q.name, None)),
        ("mxfp8", numerics.mxfp8_e4m3),
        ("fp8", jnp.dtype("float8_e4m3fn")),
        ("int4", jnp.dtype("int4")),
    ],
    ids=str,
)
def test_a_name_stands_for_the_format(name, value):
    assert as_qtype("caller", "qtype", name, "Output") == value
    assert format_of(name) == format_of(value)


def test_the_name_that_is_meant_is_proposed():
    with pytest.raises(TypeError, match=r"fix:      pass 'nf4'\."):
        as_qtype("caller", "qtype", "nf3", "Output")
