"""Every primitive with a rule, in every dtype, in onnxruntime beside JAX: the same results, or an
error when the model is written. Many primitives are in one file.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jqx.interop import to_onnx

from .runtime import assert_equal, run

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIGNED, UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
NUMBERS, ALL = FLOATS + INTEGERS, (*FLOATS, *INTEGERS, "bool")
SINGLE = ("float16", "bfloat16", "float32")
BYTES = ("int8", "uint8")
SORTED = tuple(x for x in ALL if x != "uint64")
DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "float64": 1e-12}

IN_DEFAULT_RUN = ("float32", "bfloat16", "int32", "uint8", "bool")
DTYPES = [pytest.param(x, marks=() if x in IN_DEFAULT_RUN else pytest.mark.slow) for x in ALL]


def special(dtype):
    """Limits, neighbours of limits and zero, NaN, infinities, and halves."""
    kind = jnp.dtype(dtype)
    if kind == np.bool_:
        return np.array([False, True, True])
    if jnp.issubdtype(kind, jnp.integer):
        low, high = int(jnp.iinfo(kind).min), int(jnp.iinfo(kind).max)
        numbers = [low, low + 1, high, high - 1, 0, 1, 2, 3, 7, 100]
        numbers += [-1, -2, -3, -100] if low else []
        return np.array([np.asarray(x, kind) for x in numbers])
    limits = jnp.finfo(kind)
    numbers = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 0.1, 3.7, -3.7]
    numbers += [float(limits.max), float(limits.min), float(limits.tiny), 1e-3, 300, -70]
    return np.array(numbers).astype(kind)


def bind(primitive, **params):
    return lambda x, *rest: primitive.bind(x, *rest, **params)


def reduce(primitive, *axes):
    return bind(primitive, axes=axes, out_sharding=None)


# Each is a function, the dtypes that it has a form for, and whether digits may differ.

UNARY = [
    *((f, NUMBERS, False) for f in (lax.neg, lax.sign, lax.square)),
    (lax.abs, FLOATS + SIGNED, False),
    *((f, FLOATS, False) for f in (lax.ceil, lax.floor, lax.is_finite, lax.sqrt)),
    (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), FLOATS, False),
    (lambda x: lax.round(x), FLOATS, False),
    (lambda x: lax.integer_pow(x, 0), NUMBERS, False),
    (lambda x: lax.integer_pow(x, 3), NUMBERS, True),
    (lambda x: lax.integer_pow(x, 5), INTEGERS, False),
    (lambda x: lax.integer_pow(x, -2), FLOATS, True),
    (lax.bitwise_not, (*INTEGERS, "bool"), False),
    *((f, FLOATS, True) for f in (lax.exp, lax.expm1, lax.log, lax.log1p, lax.rsqrt, lax.cbrt)),
    *((f, SINGLE, True) for f in (lax.acos, lax.acosh, lax.asin, lax.asinh, lax.atan, lax.atanh)),
    *((f, SINGLE, True) for f in (lax.cosh, lax.erf, lax.sinh)),
    (lax.tanh, FLOATS, True),
    (lambda x: lax.reduce_precision(x, 5, 10), SINGLE, False),
    *(
        (lambda x, new=new: lax.convert_element_type(x, new), ALL, False)
        for new in (*SINGLE, "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool")
    ),
]

BINARY = [
    *((f, NUMBERS, False) for f in (lax.add, lax.sub, lax.mul, lax.div, lax.rem)),
    *((f, ALL, False) for f in (lax.max, lax.min)),
    *((f, ALL, False) for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)),
    *((f, (*INTEGERS, "bool"), False) for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)),
    *((f, INTEGERS, False) for f in (lax.shift_left, lax.shift_right_logical)),
    (lax.shift_right_arithmetic, INTEGERS, False),
    (lambda x, y: x // y, INTEGERS, False),
    (lambda x, y: x % y, INTEGERS, False),
    (lambda x, y: lax.clamp(x.dtype.type(1), x, x.dtype.type(3)), NUMBERS, False),
    (lambda x, y: lax.select(x != y, x, y), ALL, False),
    (lambda x, y: lax.select_n((x != y).astype(jnp.int32) * 2, x, y, x), ALL, False),
]

REDUCTIONS = [
    *((reduce(p, 0), SORTED, False) for p in (lax.reduce_max_p, lax.reduce_min_p)),
    (reduce(lax.reduce_max_p, 0, 1), SORTED, False),
    *((reduce(p, 1), INTEGERS, False) for p in (lax.reduce_sum_p, lax.reduce_prod_p)),
    *(
        (bind(p, axes=(0,)), (*INTEGERS, "bool"), False)
        for p in (lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p)
    ),
    *((lambda x, f=f: f(x, 0, jnp.int32), SORTED, False) for f in (lax.argmax, lax.argmin)),
    (lambda x: lax.cumsum(x, 1), INTEGERS, False),
    (lambda x: lax.cumsum(x, 0, reverse=True), INTEGERS, False),
    (lambda x: lax.sort(x, dimension=0), SORTED, False),
    (lambda x: jnp.argsort(x, 1), SORTED, False),
    (lambda x: jnp.argsort(x, 1, descending=True), SORTED, False),
    (lambda x: lax.top_k(x, 3), SORTED[:-1], False),
]
REDUCED_FLOATS = [
    *((reduce(p, 1), FLOATS, True) for p in (lax.reduce_sum_p, lax.reduce_prod_p)),
    (lambda x: lax.cumsum(x, 1), FLOATS, True),
]

WINDOWS = [
    (
        lambda x, f=f, start=start: lax.reduce_window(
            x, start(x.dtype), f, (2, 3), (1, 2), ((1, 0), (0, 2)), window_dilation=(1, 2)
        ),
        tuple(x for x in NUMBERS if "64" not in x or x == "float64"),
        False,
    )
    for f, start in (
        (lax.max, lambda d: np.asarray(-np.inf if d.kind in "fV" else jnp.iinfo(d).min, d)[()]),
        (lax.min, lambda d: np.asarray(np.inf if d.kind in "fV" else jnp.iinfo(d).max, d)[()]),
    )
]

INSIDE, OUTSIDE = np.array([2, 0, 1], "i4"), np.array([1, -1, -9, 40], "i4")


def at(x, index):
    """An index that is not known when the model is written."""
    return jnp.asarray(index) + jnp.argmax(x != x, 0).max().astype(jnp.int32) * 0


def lookups(x):
    moved = at(x, OUTSIDE)
    yield x[at(x, INSIDE)]
    for mode in ("clip", "fill"):
        yield x.at[moved].get(mode=mode)
        yield x.at[:, moved].get(mode=mode)
        yield x.at[moved, moved].get(mode=mode)
    yield lax.dynamic_slice(x, (moved[2], moved[3]), (2, 3))
    yield lax.dynamic_update_slice(x, x[:2, :3], (moved[2], moved[3]))


def updates(*ops):
    def update(x):
        for mode in ("clip", "drop"):
            for op in ops:
                rows = x[jnp.array([2, 1, 0, 2])]
                yield getattr(x.at[at(x, OUTSIDE)], op)(rows, mode=mode)
                yield getattr(x.at[at(x, OUTSIDE)[::-1], 1], op)(rows[:, 2], mode=mode)

    return update


SHAPES = [
    (lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 2, x.shape[1])), ALL, False),
    (lambda x: [x.reshape(-1), x.T, lax.rev(x, (0, 1)), x[1:, ::2]], ALL, False),
    (
        lambda x: [jnp.concatenate([x, x[:1]]), jnp.stack([x, x], 1), jnp.tile(x, (2, 1))],
        ALL,
        False,
    ),
    (lambda x: lax.split(x, (2, x.shape[1] - 2), 1), ALL, False),
    (lambda x: lax.pad(x, x.dtype.type(1), ((-1, 2, 1), (2, -2, 2))), ALL, False),
    (lambda x: lax.broadcasted_iota(x.dtype, x.shape, 1) * x, NUMBERS, False),
    (lambda x: list(lookups(x)), ALL, False),
    (lambda x: list(updates("set", "min", "max")(x)), ALL, False),
    (lambda x: list(updates("add", "mul")(x)), INTEGERS, False),
]

LAYOUTS = (
    "bmk,bnk",
    "mbk,bkn",
    "kbm,nkb",
    "mk,kn",
    "km,nk",
    "k,k",
    "mkl,lkn",
    "bk,bk",
    "m,n",
    "m,",
)
SIZES = dict(zip("bmnkl", range(2, 7), strict=True))


def dot(layout, result=None):
    """A product of operands with these axes; `b` is the batch, and `k` and `l` are summed."""
    x, y = layout.split(",")
    both = [[c for c in names if c in x and c in y] for names in ("kl", "b")]
    numbers = tuple(([x.index(c) for c in cs], [y.index(c) for c in cs]) for cs in both)
    return lambda a, b: lax.dot_general(a, b, numbers, preferred_element_type=result)


def fitting(rows, dtype, digits=False):
    return [f for f, dtypes, may in rows if dtype in dtypes and may == digits]


def compare(dtype, functions, *args, tolerance=0.0):
    """Compares functions that are in one file; those of bfloat16 take and return float32 there."""

    def together(*args):
        return [f(*args) for f in functions]

    def written(_, *args):
        args = [x.astype(dtype) for x in args]
        is_bfloat = lambda x: x.dtype == jnp.bfloat16  # noqa: E731
        results = together(*args)
        return jax.tree.map(lambda x: x.astype(jnp.float32) if is_bfloat(x) else x, results)

    with jax.enable_x64(True) if dtype.endswith("64") else contextlib.nullcontext():
        given = [x.astype("f4") if dtype == "bfloat16" else x for x in args]
        found = run(to_onnx(written, {})(*given), *given)
        assert_equal(found, jax.tree.map(np.asarray, jax.jit(together)(*args)), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_operations_of_special_values(dtype):
    x = special(dtype)
    pair = np.meshgrid(x, x, indexing="ij")
    functions = fitting(BINARY, dtype) + [lambda x, y, f=f: f(x) for f in fitting(UNARY, dtype)]
    compare(dtype, functions, *map(np.ascontiguousarray, pair))
    if dtype in FLOATS:
        moderate = x[np.abs(x.astype("f8")) < 5]
        compare(dtype, fitting(UNARY, dtype, True), x[:16], tolerance=DIGITS[dtype])
        compare(dtype, [lax.logistic, lax.sin, lax.cos], moderate, tolerance=DIGITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_shapes_lookups_and_updates(dtype):
    rng, values = np.random.default_rng(0), special(dtype)
    functions = fitting([*REDUCTIONS, *WINDOWS, *SHAPES], dtype)
    values = values[values != 0] if dtype in FLOATS else values  # the order of 0 and -0 is open
    for few in (values, values[:3]):  # with ties
        compare(dtype, functions, rng.choice(few, (5, 6)))
    if dtype in FLOATS:
        x = rng.standard_normal((5, 6)).astype(dtype)
        x = np.abs(x)  # JAX rounds sums of 16-bit floats after each term, and runtimes at the end
        tolerance = {"bfloat16": 0.05, "float16": 1e-2}.get(dtype, DIGITS[dtype])
        functions = [
            *fitting(REDUCED_FLOATS, dtype, True),
            lambda x: list(updates("add", "mul")(x)),
        ]
        compare(dtype, functions, x, tolerance=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_every_layout(dtype):
    rng = np.random.default_rng(0)
    for layout in LAYOUTS if dtype in ("float32", "int8") else LAYOUTS[:3]:
        x, y = (
            rng.integers(0, 2 if dtype == "bool" else 100, [SIZES[c] for c in axes]).astype(dtype)
            for axes in layout.split(",")
        )
        functions = [dot(layout), *([dot(layout, jnp.int32)] if dtype in BYTES else [])]
        tolerance = DIGITS[dtype] if dtype in FLOATS else 0
        compare(dtype, functions, x, y, tolerance=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "int8"])
def test_arrays_without_elements_and_scalars(dtype):
    def each(x, y):
        axes = tuple(range(x.ndim))
        yield [x == y, lax.select(x == y, x, y), lax.max(x, y), x.reshape(-1), lax.rev(x, axes)]
        yield [jnp.broadcast_to(x, (2, *x.shape)), jnp.stack([x, x])]
        yield [lax.pad(x, jnp.zeros((), dtype), [(1, 2, 1)] * x.ndim)]
        reductions = [lax.reduce_max_p, lax.reduce_min_p]
        reductions += [lax.reduce_sum_p, lax.reduce_prod_p] if dtype != "bool" else []
        for axis in ((), axes[:1], axes[1:], axes):
            yield [reduce(p, *axis)(x) for p in reductions]
        if x.ndim:
            yield [lax.sort(x, dimension=0), x[:0], x.at[jnp.zeros(0, "i4")].set(x[:0])]

    for shape in ((), (0,), (1,), (2, 0, 3), (1, 1)):
        x = np.ones(shape, dtype)
        compare(dtype, [lambda x, y: list(each(x, y))], x, x)
    if dtype != "bool":
        empty = np.ones((2, 0), dtype), np.ones((0, 4), dtype)
        compare(dtype, [dot("mk,kn"), dot("mk,kn", jnp.int32 if "i" in dtype else None)], *empty)


def test_integers_beyond_the_digits_of_floats_are_rounded_once():
    numbers = [2**24 + 1, 2**25 + 2**17 + 1, 2**17 + 2**9 + 1, 257, 2049, 65519, -(2**24 + 3)]
    casts = [lambda x, d=d: x.astype(d) for d in ("float32", "bfloat16", "float16")]
    compare("int32", casts, np.array(numbers, "i4"))
    compare("uint32", casts, np.array([2**32 - 1, 2**31 + 2**7 + 1, 3], "u4"))


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
def test_dtypes_that_runtimes_only_convert(dtype):
    def through(f):
        return lambda x: f(x.astype(dtype)).astype(jnp.float32)

    functions = [lambda x: x, lambda x: x + x, lambda x: x.T, lambda x: jnp.maximum(x, x[::-1])]
    functions = [*map(through, functions), lambda x: x.astype(dtype).astype(jnp.int32)]
    numbers = [0, 0.5, 1.5, -1.5, 7.4, -8, 100, np.nan, np.inf, -np.inf, 448, 464, 465, 480, -1e6]
    numbers += [57344, 61439, 61440, 1e-9, 0.0019, 2.0**-10, 240, 248, -7.6]
    compare("float32", functions, np.array(numbers, "f4").reshape(4, 6))
    if "int" in dtype:
        codes = lambda x: x.astype(dtype).astype(jnp.int32)  # noqa: E731
        shifts = lambda x: lax.shift_left(x.astype(dtype), x.astype(dtype))  # noqa: E731
        compare("int32", [codes, lambda x: codes(shifts(x))], np.array([0, 7, 9, -8, -300], "i4"))


@pytest.mark.slow
def test_convolutions_of_every_padding_and_dilation():
    rng = np.random.default_rng(0)
    image, kernel = rng.standard_normal((2, 4, 7, 7), "f4"), rng.standard_normal((4, 4, 3, 2), "f4")

    def conv(groups, stride, padding, lhs, rhs):
        options = {"lhs_dilation": (lhs, 1), "rhs_dilation": (1, rhs)}
        return lambda x, k: lax.conv_general_dilated(
            x, k[:, : 4 // groups], (stride, 1), padding, feature_group_count=groups, **options
        )

    functions = [
        conv(groups, stride, padding, lhs, rhs)
        for groups in (1, 2)
        for padding in ("SAME", "VALID", ((1, 2), (0, 1)), ((-1, 2), (-2, 1)))
        for stride, lhs, rhs in ((1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2))
        if lhs == 1 or not isinstance(padding, str)
    ]
    compare("float32", functions, image, kernel, tolerance=1e-4)
    functions = [
        lambda x, k, result=result: lax.conv_general_dilated(
            x, k, (1, 1), ((-1, 2), (1, 1)), preferred_element_type=result
        )
        for result in (None, jnp.int32)
    ]
    codes = [rng.integers(0, 100, x.shape) for x in (image, kernel)]
    for dtype in BYTES:
        compare(dtype, functions, *(x.astype(dtype) for x in codes))
    small = [(x / 100).astype(jnp.bfloat16) for x in codes]
    compare("bfloat16", functions[:1], *small, tolerance=DIGITS["bfloat16"])


@pytest.mark.slow
def test_many_values_are_sorted_as_in_jax():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "int8"):
        x = rng.integers(1, 90, (3, 3000)).astype(dtype)
        if dtype != "int8":
            x[rng.random(x.shape) < 0.05] = np.nan
            x[rng.random(x.shape) < 0.05] = np.inf
        functions = [
            lambda x: jnp.argsort(x, 1),
            lambda x: jnp.argsort(x, 1, descending=True),
            lambda x: [lax.top_k(x, k) for k in (1, 5, 1500)],
            lambda x: [f(x, 1, jnp.int32) for f in (lax.argmax, lax.argmin)],
        ]
        compare(dtype, functions, x)


REFUSED = [
    (lambda x: x.astype(jnp.float8_e8m0fnu).astype(x.dtype), "float32", "values of float8_e8m0fnu"),
    (lambda x: lax.shift_right_logical(x.astype("int4"), x.astype("int4")), "int32", "of int4"),
    (lax.erf, "float64", "`erf` of float64 has no form"),
    (lax.tan, "float64", "`tan` of float64"),
    (lambda x: lax.argmax(x, 0, jnp.int32), "uint64", "`argmax` of uint64"),
    (lambda x: lax.sort(x, dimension=0), "uint64", "`sort` of uint64"),
    (lambda x: lax.reduce_precision(x, 8, 7), "float64", "of float64 to 8 and 7 bits"),
    (
        lambda x: lax.conv_general_dilated(x[None, None], x[None, None], (1,), "SAME"),
        "int32",
        "of int32 into int32",
    ),
    (
        lambda x: lax.reduce_window(x, np.int32(0), lax.add, (2,), (1,), "SAME"),
        "int32",
        "`reduce_window_sum` of int32",
    ),
]


@pytest.mark.parametrize("f, dtype, text", REFUSED, ids=[x[2] for x in REFUSED])
def test_what_no_wider_dtype_holds_is_refused(f, dtype, text):
    with jax.enable_x64(dtype.endswith("64")), pytest.raises(NotImplementedError, match=text):
        to_onnx(lambda _, x: f(x), {})(np.ones(3, dtype))
