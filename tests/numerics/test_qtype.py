"""The contract that every format obeys, a format of a user that obeys it, and names of formats."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx import RoundMode, numerics
from jqx._src.numerics.lookup import DTYPES, E8M0, PowerOfTwo, as_qtype, name_of_qtype
from jqx._src.numerics.minifloats import MINIFLOATS
from jqx._src.numerics.qtype import INTEGERS
from jqx.extend import QType, round_to_integer, step_of
from jqx.numerics import (
    Block,
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

from ..arrays import on_device
from .tables import Table, assert_conforms, assert_same_numbers, every_way, grid

NEAREST_EVEN = RoundMode.NEAREST_TOWARD_EVEN


@dataclasses.dataclass(frozen=True)
class Logarithmic(QType):
    """Zero and signed powers of two, 1 the largest: code `k` of 1 or more is `2**(k - high_code)`.

    A user's own: signed codes in int8 and one bit pattern, -8 of 4 bits, that is no code.
    """

    bits: int = 4

    @property
    def name(self) -> str:
        return f"log{self.bits}"

    @property
    def storage(self) -> jnp.dtype:
        return jnp.dtype(jnp.int8)

    @property
    def high_code(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def low(self) -> float:
        return -1.0

    @property
    def high(self) -> float:
        return 1.0

    @property
    def levels(self) -> int:
        return 2 * self.high_code + 1

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        y = jnp.where(jnp.isnan(y), jnp.zeros_like(y), jnp.clip(y, -1.0, 1.0))
        step, inverse = step_of(y, 0, 1 - self.high_code, 0)
        return round_to_integer(y * inverse, mode) * step + jnp.zeros_like(y)

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        r = self.round(y, mode)
        code = jnp.where(r == 0, 0, jnp.frexp(r)[1] - 1 + self.high_code)
        return (code * jnp.sign(r).astype(jnp.int32)).astype(jnp.int8)

    def decode(self, codes: jax.Array) -> jax.Array:
        exponent = jnp.abs(codes.astype(jnp.int32)) - self.high_code
        size = jnp.where(codes == 0, jnp.float32(0), jqx.extend.power_of_two(exponent, jnp.float32))
        return size * jnp.sign(codes).astype(jnp.float32)


LOG4 = Logarithmic()
LOG4_SIZES = np.ldexp(1.0, np.arange(-6, 1))
LOG4_NUMBERS = np.concatenate([-LOG4_SIZES[::-1], [0.0], LOG4_SIZES])
# Without mantissa bits the larger of two powers of two is even, as a multiple of the smaller.
LOG4_TABLE = Table(LOG4_NUMBERS, np.array([False] * 6 + [True] + [False] + [True] * 6), nan=0.0)
FORMATS = [
    *map(format_of, DTYPES),
    *(Integer(bits, signed) for bits in range(2, 9) for signed in (True, False)),
    *(Integer(bits, narrow=True) for bits in range(2, 9)),
    *(Minifloat(e, m, Specials.NONE) for e in range(2, 8) for m in (0, 7 - e)),
    *(Minifloat(4, 3, specials) for specials in Specials),
    *(Minifloat(5, 2, s, saturate=False) for s in (Specials.NAN, Specials.INFINITY_AND_NAN)),
    *(numerics.nf4, numerics.binary, Codebook(tuple(range(256))), Codebook((-1, 0, 5))),
    *(numerics.mxfp4, numerics.mxint8, numerics.nvfp4, numerics.mxfp6_e3m2, PowerOfTwo()),
    *(LOG4, Logarithmic(3), Block(LOG4, 16, "blocklog4")),
]
SMALL = list(dict.fromkeys(qtype for qtype in FORMATS if qtype.bits <= 8))


def bits_that_are_codes(qtype):
    """The bit patterns of all codes, repeated to one length so that operations are compiled once.

    A narrow integer leaves one pattern out, and so does `Logarithmic`.
    """
    every = np.arange(2**qtype.bits, dtype=np.uint8)
    element = qtype.elements if isinstance(qtype, Block) else qtype
    if getattr(element, "narrow", False) or isinstance(element, Logarithmic):
        every = np.delete(every, 2 ** (qtype.bits - 1))
    return np.resize(every, 256)


def test_a_format_is_a_frozen_hashable_value_that_says_what_it_holds():
    for qtype in FORMATS:
        assert isinstance(qtype, QType)
        copy = dataclasses.replace(qtype)
        assert copy is not qtype and copy == qtype and hash(copy) == hash(qtype)
        assert {qtype: "a value"}[copy] == "a value"
        with pytest.raises(dataclasses.FrozenInstanceError):
            qtype.name = "another"
        assert str(qtype) == qtype.name and "\n" not in qtype.name
        assert isinstance(qtype.storage, np.dtype)
        assert type(qtype.bits) is int and type(qtype.levels) is int
        assert qtype.low < qtype.high and np.isfinite([qtype.low, qtype.high]).all()
        assert qtype.signed is (qtype.low < 0)
        assert 2 <= qtype.levels <= 2**qtype.bits
        assert qtype.uniform is isinstance(qtype, Integer)


@pytest.mark.many
@pytest.mark.parametrize("qtype", SMALL, ids=str)
def test_bits_and_codes_invert_each_other_and_decode_alike(qtype):
    """Codes in a byte each decode like packed ones."""
    bits = on_device(bits_that_are_codes(qtype))
    codes = qtype.from_bits(bits)
    assert codes.dtype == qtype.storage
    back = qtype.to_bits(codes)
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, bits)
    wide, numbers = qtype.widen_bits(bits), qtype.decode(codes)
    assert wide.dtype in (np.int8, np.uint8)
    assert numbers.dtype == np.float32
    assert_same_numbers(qtype.decode(wide), np.asarray(numbers).astype(np.float64))


@pytest.mark.many
@pytest.mark.parametrize("qtype", SMALL, ids=str)
def test_every_finite_number_is_the_code_that_it_decodes_from(qtype):
    numbers = np.asarray(qtype.decode(qtype.from_bits(on_device(bits_that_are_codes(qtype)))))
    finite = np.isfinite(numbers)
    assert (numbers[finite].min(), numbers[finite].max()) == (qtype.low, qtype.high)
    flushed = (numbers != 0) & (np.abs(numbers) < 2.0**-126)
    numbers = np.where(finite & ~flushed, numbers, np.float32(qtype.high))
    for mode in RoundMode:
        rounded = qtype.round(on_device(numbers), mode)
        assert_same_numbers(rounded, numbers.astype(np.float64))
        back = qtype.decode(qtype.from_bits(qtype.encode_bits(on_device(numbers), mode)))
        assert_same_numbers(back, numbers.astype(np.float64))


@pytest.mark.many
@pytest.mark.parametrize("qtype", SMALL, ids=str)
def test_shapes_are_kept_from_scalars_to_empty_arrays(qtype):
    for shape in [(), (0,), (2, 0, 3), (2, 1, 2)]:
        y = jnp.ones(shape, jnp.float32)
        for result in jax.eval_shape(lambda y: every_way(qtype, y, NEAREST_EVEN), y).values():
            assert result.shape == shape


@pytest.mark.parametrize("qtype", [f for f in FORMATS if not isinstance(f, Block)], ids=str)
def test_the_scale_is_the_least_that_has_the_largest_magnitude_in_range_on_both_sides(qtype):
    ends = [abs(end) for end in (min(qtype.low, 0), max(qtype.high, 0)) if end]
    largest = np.array([0.0, 1e-20, 0.3, 7.0, 1e20, np.inf, np.nan], np.float32)
    scale = qtype.scale_of(on_device(largest))
    with np.errstate(over="ignore", under="ignore"):
        expected = largest / np.float32(min(ends))
    normal = ~((expected < np.finfo(np.float32).tiny) & (largest > 0))
    np.testing.assert_array_equal(np.asarray(scale)[normal], expected[normal], strict=True)


def test_an_incomplete_format_cannot_be_made():
    class Half(QType):
        bits = 4

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_a_format_of_ones_own_rounds_as_its_table():
    y = grid(LOG4_NUMBERS)
    for mode in RoundMode:
        actual = every_way(LOG4, on_device(y), mode)
        assert_conforms(LOG4, actual, y, LOG4_TABLE.rounded(y, mode))


X = on_device(np.random.default_rng(0).normal(size=(4, 24)), jnp.float32)


def rounded_to_log4(x, scale):
    return LOG4_TABLE.rounded(np.asarray(x) / np.float32(scale), NEAREST_EVEN) * scale


def test_a_format_of_ones_own_has_the_codes_of_its_bits():
    assert Logarithmic().code_range == (-8, 7)
    assert Logarithmic(bits=6).code_range == (-32, 31)


def test_a_format_of_ones_own_is_quantized_to_and_back():
    assert as_qtype("caller", "qtype", LOG4, "Output") is LOG4
    for quantize in (jqx.quantize, jax.jit(jqx.quantize, static_argnames="qtype")):
        codes = quantize(X, jnp.float32(2), qtype=LOG4)
        assert codes.dtype == jnp.int8 and codes.shape == X.shape
        real = jqx.dequantize(codes, jnp.float32(2), qtype=LOG4)
        np.testing.assert_array_equal(real, rounded_to_log4(X, 2))


def test_a_format_of_ones_own_takes_axes_and_round_modes_but_no_zero_point():
    scale = on_device([0.5, 1.0, 2.0, 4.0], jnp.float32)
    codes = jqx.quantize(X, scale, qtype=LOG4, axes=0, round_mode=RoundMode.TOWARD_ZERO)
    real = jqx.dequantize(codes, scale, qtype=LOG4, axes=0)
    s = np.asarray(scale)[:, None]
    expected = LOG4_TABLE.rounded(np.asarray(X) / s, RoundMode.TOWARD_ZERO) * s
    np.testing.assert_array_equal(real, expected)
    with pytest.raises(ValueError, match=r"^jqx\.quantize: log4 has no zero point\.\n  fix:"):
        jqx.quantize(X, scale, jnp.zeros(4, jnp.int8), qtype=LOG4, axes=0)


def test_a_format_of_ones_own_is_simulated_with_a_gradient():
    def loss(x, scale):
        return jqx.quantize_dequantize(x, scale, qtype=LOG4).sum()

    scale = jnp.float32(0.5)
    y = jqx.quantize_dequantize(X, scale, qtype=LOG4)
    np.testing.assert_array_equal(y, rounded_to_log4(X, 0.5))
    dx, dscale = jax.jit(jax.grad(loss, argnums=(0, 1)))(X, scale)
    inside = np.abs(np.asarray(X)) <= 0.5
    np.testing.assert_array_equal(dx, inside.astype(np.float32))
    np.testing.assert_array_equal(dscale, np.sign(np.asarray(X))[~inside].sum())
    with pytest.raises(ValueError, match="evenly spaced"):
        jqx.quantize_dequantize(X, scale, qtype=LOG4, gradient=jqx.gradients.lsq)


def test_a_format_of_ones_own_finds_its_scale():
    scale, zero_point = jqx.affine_from_range(-3.0, 2.0, qtype=LOG4, symmetric=True)
    assert (float(scale), zero_point) == (3.0, None)
    with pytest.raises(ValueError, match=r"log4 has no zero point"):
        jqx.affine_from_range(-3.0, 2.0, qtype=LOG4, symmetric=False)


@pytest.mark.parametrize("packed_axis", [0, 1, -1])
def test_a_format_of_ones_own_makes_tensors_that_pack(packed_axis):
    spec = jqx.QSpec(LOG4, jqx.per_axis(0))
    q = jqx.QTensor.quantize(X, spec)
    scale = np.abs(np.asarray(X)).max(axis=1, keepdims=True)
    expected = (rounded_to_log4(X, scale)).astype(np.float32)
    assert q.values.dtype == jnp.int8 and "log4" in repr(q)
    np.testing.assert_array_equal(q.dequantize(), expected)
    packed = q.pack(packed_axis)
    assert packed.values.size == X.size // 2
    np.testing.assert_array_equal(packed.dequantize(), expected)
    np.testing.assert_array_equal(packed.unpack().values, q.values)
    at_once = jqx.QTensor.quantize(X, spec, pack=packed_axis)
    np.testing.assert_array_equal(at_once.values, packed.values)
    np.testing.assert_array_equal(jax.jit(lambda q: q.dequantize())(packed), expected)


def test_a_format_of_ones_own_goes_into_blocks():
    spec = jqx.QSpec(Block(LOG4, 8, "blocklog4"), jqx.per_block({0: 1, 1: 8}))
    q = jqx.QTensor.quantize(X, spec)
    largest = np.abs(np.asarray(X)).reshape(4, 3, 8).max(axis=2)
    scale = np.ldexp(1.0, np.frexp(largest)[1] - 1)
    np.testing.assert_array_equal(np.asarray(q.scale).astype(np.float64), scale)
    expected = rounded_to_log4(X, np.repeat(scale, 8, axis=1))
    np.testing.assert_array_equal(q.dequantize(), expected)
    np.testing.assert_array_equal(q.pack(1).unpack().dequantize(), expected)


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


def test_every_listed_dtype_is_a_format_and_the_format_is_that_dtype():
    for name in DTYPES:
        dtype = jnp.dtype(name)
        form = format_of(dtype)
        assert form.storage == dtype and form.name == name
        for spelling in (name, dtype, getattr(jnp, name), dtype.type, form):
            assert format_of(spelling) == form
            result = as_qtype("caller", "qtype", spelling, "Output")
            assert isinstance(result, np.dtype) and result == dtype
            assert name_of_qtype(spelling) == name
        limits = jnp.finfo if name.startswith("float") else jnp.iinfo
        assert form.bits == limits(dtype).bits


def test_numbers_of_e8m0_are_read_as_powers_of_two():
    assert format_of(E8M0) == format_of(ml_dtypes.float8_e8m0fnu) == PowerOfTwo()


def test_a_format_without_a_dtype_stays_itself():
    for qtype in WITHOUT_DTYPE:
        assert as_qtype("caller", "qtype", qtype, "Output") is qtype
        assert format_of(qtype) is qtype
        assert name_of_qtype(qtype) == qtype.name


def test_other_dtypes_are_refused_with_their_role():
    for name in OTHERS:
        facts = [
            rf"^jqx\.caller: Weight element type \({name}\) must be a quantized type\.",
            r"  fix:      pass as argument a jqx\.extend\.QType, or one of int2, .*"
            r"float8_e8m0fnu\.$",
        ]
        with pytest.raises(TypeError, match="\n".join(facts)):
            as_qtype("caller", "argument", name, "Weight")


def test_what_is_no_dtype_is_refused_by_name():
    problem = re.escape("jqx.caller: `qtype` is not a dtype") + "[^\n]*"
    parts = r"\n(  given:    qtype = .+\n)?(  expected: .+\n)?  fix:"
    for spelling in ("int9", "i4", "nf3", "", None, 8, object()):
        with pytest.raises(TypeError, match=f"^{problem}{parts}"):
            as_qtype("caller", "qtype", spelling, "Output")
    with pytest.raises(TypeError, match=r"fix:      pass 'nf4'\."):
        as_qtype("caller", "qtype", "nf3", "Output")


def test_a_name_stands_for_the_format():
    values = {q.name: q for q in WITHOUT_DTYPE if q is getattr(numerics, q.name, None)}
    values |= {"mxfp8": numerics.mxfp8_e4m3, "fp8": jnp.dtype("float8_e4m3fn")}
    for name, value in [*values.items(), ("int4", jnp.dtype("int4"))]:
        assert as_qtype("caller", "qtype", name, "Output") == value
        assert format_of(name) == format_of(value)
