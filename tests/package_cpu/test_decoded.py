"""Weights whose codes stand for floats beside NumPy: the kernel of jqx-cpu that decodes them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src import package_cpu
from jqx._src.contractions.kernels import numbers_of_codes
from jqx._src.interop.codec import as_numpy, codes_of
from jqx._src.kernels.products_cpu import decoded_product_cpu
from jqx._src.tensor.targets import kernel_of
from jqx.numerics import Codebook, Minifloat, Specials, format_of, mxfp4, mxfp8_e4m3, nf4, nvfp4

from ..arrays import normal

pytest.importorskip("jqx_cpu")

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


def packed(codes):
    """Two codes a byte, the first in its lowest bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def quantized(w, qtype, size=0):
    """A weight [K, N] with a scale for each column, or for each group of a size in it."""
    granularity = jqx.per_block({0: size, 1: 1}) if size else jqx.per_axis(1)
    return jqx.QTensor.quantize(w, jqx.QSpec(qtype, granularity))


def chosen(f, *args):
    return [x.cpu.name for x in jqx.formulations(f)(*args)]


def test_every_code_is_decoded_exactly():
    """By few rows and by many, each multiplied by 1 alone."""
    given, expected = [], []
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
            bytes_ = packed(w) if form.bits == 4 else w
            given.append((x, bytes_[None], np.ones((1, 1, count), np.float32)))
            expected.append(np.broadcast_to(table, (1, rows, count)))
    tables = [numbers_of_codes(format_of(qtype)) for qtype in FORMATS for _ in range(2)]

    def run(given):
        return [decoded_product_cpu(*x, table=t) for x, t in zip(given, tables, strict=True)]

    for found, y in zip(jax.jit(run)(given), expected, strict=True):
        np.testing.assert_array_equal(found, y)


ROWS = (1, 3, 8, 9, 30, 70)
GROUPS = (16, 32, 64, 128, 0)


def test_products_are_as_near_as_sums_of_float32():
    """Groups that are shorter and longer than what a kernel reads at once, and ends of k and n."""
    rng, given, tables, expected = np.random.default_rng(0), [], [], []
    forms = [format_of(t) for t in (nf4, jnp.float8_e4m3fn, jnp.float8_e5m2)]
    for (i, m), size, form in itertools.product(enumerate(ROWS), GROUPS, forms):
        groups, k, n = (3 + i, size * (3 + i), 66 + i) if size else (1, 650 + 2 * i, 130)
        table = np.float32(numbers_of_codes(form))
        codes = rng.integers(0, 2**form.bits, (1, n, k), np.uint8)
        codes[~np.isfinite(table)[codes]] = 0
        # Rows of very different sizes.
        power = 10.0 ** (rng.permutation(m)[:, None] % 10 * 7 - 31)
        x = np.float32(rng.standard_normal((1, m, k)) * power)
        scale = np.float32(rng.standard_normal((1, groups, n)))
        given.append((x, packed(codes) if form.bits == 4 else codes, scale))
        tables.append(numbers_of_codes(form))
        real = np.float64(table)[codes[0]] * scale[0].T.repeat(k // groups, 1)
        rows = np.float64(x[0])
        # Each product is rounded twice, with its scale, and each sum once; the least normal number
        # is what may be lost of a product that is no normal one.
        bound = (np.abs(rows) @ np.abs(real).T) * (k + 4) * 2.0**-24 + k * 2.0**-126
        expected.append((rows @ real.T, bound))

    def run(given):
        return [decoded_product_cpu(*x, table=t) for x, t in zip(given, tables, strict=True)]

    for found, (y, bound) in zip(jax.jit(run)(given), expected, strict=True):
        assert np.all(np.abs(found[0] - y) <= bound)


@pytest.mark.parametrize("name", ["nf4", "e4m3", *BLOCKS])
def test_weights_are_laid_out_for_the_kernel_and_restored(name, tmp_path):
    qtype = {"nf4": nf4, "e4m3": jnp.float8_e4m3fn, **BLOCKS}[name]
    size = {"nf4": 64, "e4m3": 0}.get(name) or (BLOCKS[name].size if name in BLOCKS else 0)
    w = quantized(normal(0, 256, 80), qtype, size)
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
        assert not kernel_of(quantized(w, qtype, size).pack_for("cpu"))


def test_derivatives_and_rows_of_16_bits(monkeypatch):
    q = quantized(normal(0, 256, 80), nf4, 64).pack_for("cpu")
    x, c = normal(1, 3, 256), normal(2, 3, 80)
    half, many = x.astype(jnp.bfloat16), normal(2, 17, 256).astype(jnp.bfloat16)
    assert chosen(jqx.matmul, x, q) == ["package_decoded"]
    assert chosen(jqx.matmul, half, q.astype(jnp.bfloat16)) == ["package_decoded"]
    assert chosen(jqx.matmul, many, q.astype(jnp.bfloat16)) == ["package_decoded"]
    exact = quantized(normal(0, 256, 80), jnp.float8_e4m3fn).pack_for("cpu")  # in bfloat16
    assert chosen(jqx.matmul, half, exact.astype(jnp.bfloat16)) == ["package_decoded"]
    assert chosen(jqx.matmul, many, exact.astype(jnp.bfloat16)) == ["tiles"]

    def f(x, q):
        grad = jax.grad(lambda x, s: (jqx.matmul(x, q.map_scale(lambda _: s)) * c).sum(), (0, 1))
        in_float = jqx.matmul(half.astype(jnp.float32), q).astype(jnp.bfloat16)
        return jqx.matmul(half, q.astype(jnp.bfloat16)), in_float, grad(x, q.scale)

    found, expected, gradients = jax.jit(f)(x, q)
    np.testing.assert_array_equal(found, expected, strict=True)
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
        found = decoded_product_cpu(x, w, scale, table=table)
        np.testing.assert_array_equal(found[0], expected)


def test_large_and_small_rows_stay_in_range():
    """Sums of codes times a row may leave float32 where their product with the scale does not."""
    table = numbers_of_codes(format_of(jnp.float8_e4m3fn))
    w, scale = np.full((1, 64, 256), 0x7E, np.uint8), np.full((1, 1, 64), 2.0**-30, np.float32)
    for power in (2.0**110, 2.0**-80):
        x = np.full((1, 2, 256), power, np.float32)
        found = decoded_product_cpu(x, w, scale, table=table)
        np.testing.assert_array_equal(found, np.full((1, 2, 64), 256 * 448 * 2.0**-30 * power))


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


def test_lowering_tells_the_kernel():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = normal(0, 256, 192), normal(1, 2, 256)
    for scheme, reads in (("float8_e4m3fn", "f8e4m3fn"), ("nf4:group=64", "u8")):
        plan = jqx.make_plan(f, jqx.Policy({".*": scheme}))(w, x)
        q = jqx.quantize_params(w, plan, target="cpu")
        (found,) = jqx.lowering(jqx.convert(f, plan), q, x, target="cpu").contractions
        assert found.runs == "jqx_cpu_decoded_product" and found.dtypes == ("f32", "f32")
        assert found.reads[1] == (reads,)


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
