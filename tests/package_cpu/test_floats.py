"""Float rows beside codes by jqx-cpu and NumPy: integers of few bits, rows of bfloat16 that are
multiplied as such, and codes that stand for floats.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src import package_cpu
from jqx._src.contractions.cache import values_as
from jqx._src.contractions.kernels import numbers_of_codes
from jqx._src.contractions.kernels_cpu import FEW
from jqx._src.interop.codec import as_numpy, codes_of
from jqx._src.kernels.products_cpu import decoded_product_cpu, float_product_cpu
from jqx._src.tensor.targets import kernel_of
from jqx.numerics import Codebook, Minifloat, Specials, format_of, mxfp4, mxfp8_e4m3, nf4, nvfp4

from ..arrays import normal

SCHEMES = (
    "int8",
    "uint8:asymmetric",
    "int8:group=32",
    "int8:group=128:asymmetric",
    "int4",
    "int4:group=32",
    "uint4:group=64:asymmetric",
    "int4:group=128",
    "int4:group=16",
    "int2:group=32",
    "uint2:group=64:asymmetric",
)


pytest.importorskip("jqx_cpu")


def chosen(f, *args):
    return [x.cpu.name for x in jqx.formulations(f)(*args)]


def quantized(w, scheme):
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.Policy({".*": scheme}))(w, w[:, :1].T)
    return jqx.quantize_params(w, plan)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float_rows_times_few_bits(scheme):
    k, n = 512, 70
    bits = int(scheme.split(":")[0][-1])
    w = quantized(normal(0, k, n), scheme)
    q, dense = w.pack_for("cpu"), np.asarray(w.dequantize(), np.float64)
    assert q.layout.kernel == "cpu"
    np.testing.assert_array_equal(q.unpack().values, w.values, strict=True)
    np.testing.assert_array_equal(q.dequantize(), w.dequantize(), strict=True)
    np.testing.assert_array_equal(
        codes_of(as_numpy("w", q, "GGUF")), np.asarray(w.codes)
    )  # as files have them
    for rows in (1, 2, 5, 16, 33):
        x = normal(rows, rows, k) * 10.0 ** (jnp.arange(rows, dtype=jnp.float32)[:, None] % 20)
        assert chosen(jqx.matmul, x, q) == ["package_floats"]
        y, exact = jax.jit(jqx.matmul)(x, q), np.asarray(x, np.float64) @ dense
        # Half a step of each number, and the rounding of the sums of 16 lanes and of their parts.
        size = np.abs(x).max(1, keepdims=True) * k * 2.0**bits * np.asarray(w.real_scale()).max()
        assert np.all(np.abs(y - exact) <= size * (k * bits / 512 + 8) * 2.0**-24)
    few, many = (normal(3, count, k).astype(jnp.bfloat16) for count in (16, 17))
    assert chosen(jqx.matmul, few, q.astype(jnp.bfloat16)) == ["package_floats"]
    form = "package_floats" if package_cpu.has_bfloats() else "tiles"
    assert chosen(jqx.matmul, many, q.astype(jnp.bfloat16)) == [form]


def test_rows_that_are_not_finite_are_nan_and_others_are_not():
    q = quantized(normal(0, 256, 64), "int4:group=32")
    x = normal(1, 3, 256).at[1, 5].set(jnp.inf)
    y = jqx.matmul(x, q.pack_for("cpu"))
    np.testing.assert_array_equal(jnp.isnan(y).all(1), [False, True, False])
    assert bool(jnp.isfinite(y[::2]).all())


def test_small_and_large_rows_keep_their_digits():
    q = quantized(normal(0, 256, 64), "int4:group=32")
    x, packed = normal(1, 1, 256), q.pack_for("cpu")
    one = jqx.matmul(x, packed)
    for power in (-90, -40, 40, 100):
        scaled = jqx.matmul(x * 2.0**power, packed)
        np.testing.assert_array_equal(scaled / 2.0**power, one)


def test_what_is_written_lies_as_the_codes_beside_it():
    one, other = (quantized(normal(i, 256, 64), "int4:group=32") for i in range(2))
    packed = one.pack_for("cpu")
    expected = other.pack_for("cpu").values
    np.testing.assert_array_equal(values_as(other, packed), expected, strict=True)


ROWS = (1, 15, 16, 17, 33, 64, 70)


GROUPS = {8: (8, 16, 32, 192, 0), 4: (16, 32, 128, 0), 2: (32, 64, 0)}


def bytes_of(codes, bits):
    """The first of the codes in a byte in its lowest bits."""
    per = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per) << (bits * np.arange(per, dtype=np.uint8))
    return np.bitwise_or.reduce(parts, -1).astype(np.uint8)


def case(rng, m, bits, size, has_zero, is_whole):
    """What `float_product_cpu` is given, with groups and ends of n and k that vary with the rows,
    and what the weights are in float64.
    """
    k = size * (1 + m % 3 * 4) if size else 8 // bits * (m * 5 + 2)
    n, groups, middle = 60 + m % 9, k // size if size else 1, 2 ** (bits - 1)
    is_signed = not has_zero or m % 2 == 0
    codes = rng.integers(0, 2**bits, (2, n, k), np.uint8)
    real = codes.astype(np.int64)
    real = np.where(real < middle, real, real - 2 * middle) if is_signed else real - middle
    zero = rng.integers(-middle, middle, (2, groups, n)).astype(np.int8) if has_zero else None
    if zero is not None:
        real = real - zero.swapaxes(1, 2).repeat(k // groups, 2)
    if is_whole:
        x = rng.integers(-4, 5, (2, m, k))
        scale = 2.0 ** rng.integers(-2, 3, (2, groups, n))
    else:  # rows of very different sizes, the largest of which times codes no float holds
        power = 10.0 ** (rng.permutation(m)[:, None] % 10 * 6 - 19)
        x, scale = rng.standard_normal((2, m, k)) * power, rng.standard_normal((2, groups, n)) / 128
    x, scale = jnp.asarray(x, jnp.bfloat16), np.float32(scale)
    weights = real * np.float64(scale).swapaxes(1, 2).repeat(k // groups, 2)
    operands = x, bytes_of(codes, bits), None, scale, zero
    return operands, {"bits": bits, "is_signed": is_signed}, np.asarray(x, np.float64), weights


def cases(is_whole):
    rng = np.random.default_rng(int(is_whole))
    for m, (bits, sizes), has_zero in itertools.product(ROWS, GROUPS.items(), (False, True)):
        for size in sizes:
            yield case(rng, m, bits, size, has_zero, is_whole)


@pytest.mark.parametrize("is_whole", [True, False])
def test_products_are_exact_and_their_sums_float32(is_whole):
    operands, options, rows, weights = zip(*cases(is_whole), strict=True)

    def run(operands):
        return [float_product_cpu(*x, **o) for x, o in zip(operands, options, strict=True)]

    scales = [(g[3], o) for g, o in zip(operands, options, strict=True)]
    for y, x, w, (s, o) in zip(jax.jit(run)(operands), rows, weights, scales, strict=True):
        expected = np.einsum("bmk,bnk->bmn", x, w)
        k = x.shape[-1]
        by_digits = x.shape[1] <= FEW or not package_cpu.has_bfloats()
        if is_whole and not by_digits:  # whole numbers, times powers of two, that float32 holds
            np.testing.assert_array_equal(y, expected)
            continue
        # Each sum is rounded once, and that of a group twice more, with its scale; what is smaller
        # than the least normal number is lost of a product or a sum, before the scale and after.
        size = np.einsum("bmk,bnk->bmn", np.abs(x), np.abs(w))
        bound = size * (3 * k + 2) * 2.0**-24 + (3 * k + 2) * 2.0**-126
        if by_digits:
            # Half a step of each number, and sums of codes and of zero points, which are apart.
            largest = np.abs(x).max(-1, keepdims=True) * k * 2.0 ** o["bits"] * np.abs(s).max()
            bound = bound + largest * (k * o["bits"] / 512 + 8) * 2.0**-24
        assert np.all(np.abs(y - expected) <= bound)


def test_rows_that_are_not_finite_leave_the_others_alone():
    k, n = 96, 70
    x = np.array(normal(0, 20, k))
    x[3, 5], x[4, 95], x[5, :2] = np.nan, np.inf, [np.inf, 3e38]
    w = np.random.default_rng(0).integers(1, 127, (1, n, k)).astype(np.int8)
    product = jax.jit(lambda x: float_product_cpu(x, w, None, scale, None, bits=8, is_signed=True))
    scale = np.ones((1, 1, n), np.float32)
    y = np.asarray(product(jnp.asarray(x[None], jnp.bfloat16)))[0]
    assert not np.isfinite(y[3:6]).any()
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, [3, 4, 5], 0)).all()


@pytest.mark.parametrize(
    "scheme", ["int8", "uint8:asymmetric", "int4:group=32", "uint2:group=64:asymmetric"]
)
def test_contractions_multiply_many_rows_as_such(scheme):
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.Policy({".*": scheme}))
    w = normal(0, 256, 70)
    q = jqx.quantize_params(w, plan(w, normal(1, 1, 256))).astype(jnp.bfloat16)
    p, x = q.pack_for("cpu"), normal(2, 3, 40, 256).astype(jnp.bfloat16)
    run = jax.jit(lambda x, q: jqx.matmul(x, q, preferred_element_type=jnp.float32))
    many = package_cpu.has_bfloats()
    (form,) = jqx.formulations(jqx.matmul)(x[0], p)
    assert form.cpu.name == ("package_floats" if many else "tiles")
    assert ("multiplies_bf16" in run.lower(x[0], p).as_text(debug_info=True)) == many
    one = jnp.stack([run(each, p) for each in x])
    np.testing.assert_array_equal(jax.vmap(run, (0, None))(x, p), one)
    dense = np.asarray(q.astype(jnp.float32).dequantize(), np.float64)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(dense)
    # As above; a weight that is dequantized is rounded once more, by the zero point of it.
    bound = size * (3 * 256 + 4) * 2.0**-24
    assert np.all(np.abs(np.asarray(one) - np.asarray(x, np.float64) @ dense) <= bound)


FLOAT8 = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
)


FORMATS = (
    *map(jnp.dtype, FLOAT8),
    Minifloat(4, 3, Specials.NONE),
    jnp.dtype("float4_e2m1fn"),
    nf4,
    Codebook(tuple(np.linspace(-3, 7, 11)), "eleven"),
)


BLOCKS = {"mxfp8": mxfp8_e4m3, "mxfp4": mxfp4, "nvfp4": nvfp4}


def decoded(w, qtype, size=0):
    """A weight [K, N] with a scale for each column, or for each group of a size in it."""
    granularity = jqx.per_block({0: size, 1: 1}) if size else jqx.per_axis(1)
    return jqx.QTensor.quantize(w, jqx.QSpec(qtype, granularity))


def test_every_code_is_decoded_exactly():
    """By few rows and by many, each multiplied by 1 alone."""
    operands, expected = [], []
    for qtype in FORMATS:
        form = format_of(qtype)
        count = 2**form.bits
        table = np.float32(numbers_of_codes(form))
        codes = jnp.arange(count, dtype=jnp.uint8)
        np.testing.assert_array_equal(table, form.decode(codes))
        # A column for each code, and a row that is 1 where it stands; beside it are zeros.
        w = np.zeros((count, 128), np.uint8)
        w[:, 37] = np.arange(count)
        for rows in (1, 9):
            x = np.zeros((1, rows, 128), np.float32)
            x[:, :, 37] = 1
            bytes_ = bytes_of(w, 4) if form.bits == 4 else w
            operands.append((x, bytes_[None], np.ones((1, 1, count), np.float32)))
            expected.append(np.broadcast_to(table, (1, rows, count)))
    tables = [numbers_of_codes(format_of(qtype)) for qtype in FORMATS for _ in range(2)]

    def run(operands):
        return [decoded_product_cpu(*x, table=t) for x, t in zip(operands, tables, strict=True)]

    for y, floats in zip(jax.jit(run)(operands), expected, strict=True):
        np.testing.assert_array_equal(y, floats)


COUNTS = (1, 3, 8, 9, 30, 70)


SIZES = (16, 32, 64, 128, 0)


def test_products_are_as_near_as_sums_of_float32():
    """Groups that are shorter and longer than what a kernel reads at once, and ends of k and n."""
    rng, operands, tables, expected = np.random.default_rng(0), [], [], []
    forms = [format_of(t) for t in (nf4, jnp.float8_e4m3fn, jnp.float8_e5m2)]
    for (i, m), size, form in itertools.product(enumerate(COUNTS), SIZES, forms):
        groups, k, n = (3 + i, size * (3 + i), 66 + i) if size else (1, 650 + 2 * i, 130)
        table = np.float32(numbers_of_codes(form))
        codes = rng.integers(0, 2**form.bits, (1, n, k), np.uint8)
        codes[~np.isfinite(table)[codes]] = 0
        # Rows of very different sizes.
        power = 10.0 ** (rng.permutation(m)[:, None] % 10 * 7 - 31)
        x = np.float32(rng.standard_normal((1, m, k)) * power)
        scale = np.float32(rng.standard_normal((1, groups, n)))
        operands.append((x, bytes_of(codes, 4) if form.bits == 4 else codes, scale))
        tables.append(numbers_of_codes(form))
        real = np.float64(table)[codes[0]] * scale[0].T.repeat(k // groups, 1)
        rows = np.float64(x[0])
        # Each product is rounded twice, with its scale, and each sum once; the least normal number
        # is what may be lost of a product that is no normal one.
        bound = (np.abs(rows) @ np.abs(real).T) * (k + 4) * 2.0**-24 + k * 2.0**-126
        expected.append((rows @ real.T, bound))

    def run(operands):
        return [decoded_product_cpu(*x, table=t) for x, t in zip(operands, tables, strict=True)]

    for y, (exact, bound) in zip(jax.jit(run)(operands), expected, strict=True):
        assert np.all(np.abs(y[0] - exact) <= bound)


@pytest.mark.parametrize("name", ["nf4", "e4m3", *BLOCKS])
def test_weights_are_laid_out_for_the_kernel_and_restored(name, tmp_path):
    qtype = {"nf4": nf4, "e4m3": jnp.float8_e4m3fn, **BLOCKS}[name]
    size = {"nf4": 64, "e4m3": 0}.get(name) or (BLOCKS[name].size if name in BLOCKS else 0)
    w = decoded(normal(0, 256, 80), qtype, size)
    q = w.pack_for("cpu")
    form = format_of(qtype)
    assert q.layout.kernel == "cpu" and q.values.shape == (80, 256 * form.bits // 8)
    np.testing.assert_array_equal(q.unpack().values, w.values, strict=True)
    np.testing.assert_array_equal(q.dequantize(), w.dequantize(), strict=True)
    np.testing.assert_array_equal(
        codes_of(as_numpy("w", q, "GGUF")), form.to_bits(w.unpack().values)
    )  # as files have
    jqx.save(tmp_path / "q.safetensors", {"w": q})
    read = jqx.load(tmp_path / "q.safetensors")["w"]
    assert read.layout == q.layout
    np.testing.assert_array_equal(read.values, q.values, strict=True)


def test_formats_without_a_kernel_get_the_layout_for_compilers():
    w = normal(0, 256, 80)
    for qtype in (jnp.float8_e5m2fnuz, jqx.numerics.float6_e2m3fn, jqx.numerics.mxint8):
        size = 32 if qtype is jqx.numerics.mxint8 else 0
        assert not kernel_of(decoded(w, qtype, size).pack_for("cpu"))


def test_derivatives_and_rows_of_16_bits(monkeypatch):
    q = decoded(normal(0, 256, 80), nf4, 64).pack_for("cpu")
    x, c = normal(1, 3, 256), normal(2, 3, 80)
    half, many = x.astype(jnp.bfloat16), normal(2, 17, 256).astype(jnp.bfloat16)
    assert chosen(jqx.matmul, x, q) == ["package_decoded"]
    assert chosen(jqx.matmul, half, q.astype(jnp.bfloat16)) == ["package_decoded"]
    assert chosen(jqx.matmul, many, q.astype(jnp.bfloat16)) == ["package_decoded"]
    exact = decoded(normal(0, 256, 80), jnp.float8_e4m3fn).pack_for("cpu")  # in bfloat16
    assert chosen(jqx.matmul, half, exact.astype(jnp.bfloat16)) == ["package_decoded"]
    assert chosen(jqx.matmul, many, exact.astype(jnp.bfloat16)) == ["tiles"]

    def f(x, q):
        grad = jax.grad(lambda x, s: (jqx.matmul(x, q.map_scale(lambda _: s)) * c).sum(), (0, 1))
        in_float = jqx.matmul(half.astype(jnp.float32), q).astype(jnp.bfloat16)
        return jqx.matmul(half, q.astype(jnp.bfloat16)), in_float, grad(x, q.scale)

    half_product, expected, gradients = jax.jit(f)(x, q)
    np.testing.assert_array_equal(half_product, expected, strict=True)
    monkeypatch.setattr(package_cpu, "is_installed", lambda: False)
    *_, plain = jax.jit(lambda *args: f(*args))(x, q)
    for a, b in zip(gradients, plain, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_numbers_that_are_none_pass_on():
    """NaN and infinity of a row to its results, a code that is NaN to its column; to no others."""
    w = np.full((1, 80, 256), 0x38, np.uint8)  # 1
    w[0, 5, 70] = 0x7F  # NaN
    for rows in (4, 12):
        x = np.ones((1, rows, 256), np.float32)
        x[0, 1, 3], x[0, 2, 200] = np.nan, -np.inf
        table, scale = (
            numbers_of_codes(format_of(jnp.float8_e4m3fn)),
            np.ones((1, 1, 80), np.float32),
        )
        expected = np.full((rows, 80), 256, np.float32)
        expected[1], expected[2], expected[:, 5] = np.nan, -np.inf, np.nan
        y = decoded_product_cpu(x, w, scale, table=table)
        np.testing.assert_array_equal(y[0], expected)


def test_large_and_small_rows_stay_in_range():
    """Sums of codes times a row may leave float32 where their product with the scale does not."""
    table = numbers_of_codes(format_of(jnp.float8_e4m3fn))
    w, scale = np.full((1, 64, 256), 0x7E, np.uint8), np.full((1, 1, 64), 2.0**-30, np.float32)
    for power in (2.0**110, 2.0**-80):
        x = np.full((1, 2, 256), power, np.float32)
        y = decoded_product_cpu(x, w, scale, table=table)
        np.testing.assert_array_equal(y, np.full((1, 2, 64), 256 * 448 * 2.0**-30 * power))


def test_it_is_mapped_and_stepped_over():
    """Mapped rows, mapped weights and both; and one of a stack in each step, without a copy."""
    scanned = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]  # noqa: E731
    x = normal(1, 5, 3, 512)
    for scheme in ("float8_e4m3fn", "nf4:group=64"):
        stack = normal(0, 4, 512, 512)
        plan = jqx.make_plan(scanned, jqx.Policy({".*": scheme}))(stack, x[0])
        q = jqx.pack_for(jqx.quantize_params(stack, plan), "cpu")
        compiled = jax.jit(jqx.convert(scanned, plan)).lower(q, x[0]).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < q.values.nbytes / 8
        y = x[0]
        one = jax.jit(lambda x, q: jqx.matmul(x, q))
        for i in range(4):
            y = jax.jit(jnp.tanh)(one(y, q[i]))
        np.testing.assert_array_equal(compiled(q, x[0]), y)

        alone = jnp.stack([one(each, q[0]) for each in x])
        run = jax.jit(
            lambda q, x: (
                jax.vmap(lambda x: jqx.matmul(x, q[0]))(x[:2]),
                jax.vmap(lambda q: jqx.matmul(x[0], q))(q),
                jax.vmap(lambda x, q: jqx.matmul(x, q))(x[:4], q),
            )
        )
        rows, weights, both = run(q, x)
        np.testing.assert_array_equal(rows, alone[:2])
        np.testing.assert_array_equal(weights[0], alone[0])
        np.testing.assert_array_equal(both[0], alone[0])
        np.testing.assert_array_equal(both[3], one(x[3], q[3]))


FLOATS = numbers_of_codes(format_of(jnp.float8_e4m3fn))


def beside(k=64, width=64, groups=1, table=None, dtype=np.uint8, scales=4):
    w, scale = np.zeros((1, 4, width), dtype), np.ones((1, groups, scales), np.float32)
    table = FLOATS if table is None else table
    return decoded_product_cpu(np.ones((1, 2, k), np.float32), w, scale, table=table)


WRONG = {
    "weights are bytes": (
        lambda: beside(width=63),
        lambda: beside(dtype=np.int8),
        lambda: beside(table=(0.0,) * 16),
    ),
    "no kernel for such groups": (lambda: beside(96, 96, groups=2), lambda: beside(groups=3)),
    "a table has 16 or 256 floats": (
        lambda: beside(table=(0.0,) * 15),
        lambda: beside(table=(np.nan,) * 16),
    ),
    "floats that float16 holds": (lambda: beside(table=(0.0, *[1.0] * 255)),),
    "scales are": (lambda: beside(scales=3),),
}


@pytest.mark.parametrize(("text", "run"), [(text, f) for text in WRONG for f in WRONG[text]])
def test_a_wrong_buffer_is_an_error_of_xla(text, run):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jqx_cpu: .*{text}"):
        jax.block_until_ready(run())
