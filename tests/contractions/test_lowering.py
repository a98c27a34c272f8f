"""What XLA makes of contractions: on CPU, calls of its int8 library; elsewhere, plain products; and
never a float copy of a weight.

That XLA on CPU hands a product to the library depends on its shapes and types, and was measured on
jaxlib 0.10.2: on another version these tests say whether it still does.

Temporaries are counted by XLA, in parts of the weight as float32. Codes of 8 bits are 1/4 of it, so
that not even a copy of the codes is held.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics

from ..oracles.contractions import MATRICES, Layout, chosen
from .blocks import weight

K, N = 256, 512


TURNED = (((1,), (1,)), ((), ()))


measured = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jaxlib.__version__ != "0.10.2",
    reason="which products XLA hands to its library on CPU was measured on jaxlib 0.10.2",
)


TINY = 8
"""Elements of a result below which it does not matter who computes it: sums of up to 3 rows."""


class Dot(NamedTuple):
    """A product in a compiled program: dtypes of its operands and of its result, and by whom."""

    lhs: str
    rhs: str
    result: str
    in_library: bool


def compiled_dots(f, *args):
    """The products of a program compiled for CPU, but tiny ones."""
    text = jax.jit(f).lower(*args).compile().as_text()
    fusions = set(re.findall(r"calls=(%[\w.\-]+)[^\n]*__ynn_fusion", text))
    products = []
    for name, body in re.findall(r"^(?:ENTRY )?(%[\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        types = dict(re.findall(r"(%[\w.\-]+) = (\w+)\[", body))
        pattern = r"= (\w+)\[([\d,]*)\][^\n]* dot\((%[\w.\-]+), (%[\w.\-]+)\)"
        for result, shape, lhs, rhs in re.findall(pattern, body):
            if math.prod(map(int, shape.split(","))) >= TINY:
                products.append(Dot(types[lhs], types[rhs], result, name in fusions))
    return products


def quantized(qtype, shape, contracted, **options):
    """A QTensor of shapes and dtypes alone, with a scale for each index that is not contracted."""
    layout = Layout((), shape, (((), (contracted,)), ((), ())))
    return jax.eval_shape(lambda: weight(qtype, layout, **options))


def product(numbers=MATRICES):
    return functools.partial(jqx.dot_general, dimension_numbers=numbers)


ZERO = {"zero_point": True}


BATCH = (((3,), (3,)), ((0, 1), (0, 1)))


BATCH_TURNED = (((3,), (2,)), ((0, 1), (0, 1)))


BATCH_BETWEEN = (((3,), (3,)), ((0, 2), (0, 2)))


INTEGERS = {
    "one row": (MATRICES, ("int8", (1, K), 1, {}), ("int8", (K, N), 0, {})),
    "one row by [N, K]": (TURNED, ("int8", (1, K), 1, {}), ("int8", (N, K), 1, {})),
    "one row, zero points": (MATRICES, ("int8", (1, K), 1, ZERO), ("int8", (K, N), 0, ZERO)),
    "16 rows": (MATRICES, ("int8", (16, K), 1, {}), ("int8", (K, N), 0, {})),
    "16 rows, unsigned": (TURNED, ("uint8", (16, K), 1, ZERO), ("uint8", (N, K), 1, ZERO)),
    "128 rows": (TURNED, ("int8", (128, K), 1, {}), ("int8", (N, K), 1, {})),
    "128 rows, zero points": (MATRICES, ("int8", (128, K), 1, ZERO), ("int8", (K, N), 0, ZERO)),
    "128 rows by packed int4": (
        MATRICES,
        ("uint8", (128, K), 1, {}),
        ("int4", (K, N), 0, {"pack": 0}),
    ),
    "in blocks": (MATRICES, ("int8", (64, K), 1, {}), ("int8", (K, N), 0, {"size": 32})),
    "in blocks on both sides, one row, zero points": (
        TURNED,
        ("uint8", (1, K), 1, {"size": 64, **ZERO}),
        ("int8", (N, K), 1, {"size": 32, **ZERO}),
    ),
    "one column": (MATRICES, ("int8", (16, 2**14), 1, {}), ("int8", (2**14, 1), 0, {})),
    "left transposed": (
        (((0,), (0,)), ((), ())),
        ("int8", (K, 64), 0, {}),
        ("int8", (K, N), 0, {}),
    ),
    "attention": (BATCH, ("int8", (2, 4, 64, 32), 3, {}), ("int8", (2, 4, 64, 32), 3, {})),
    "attention by values": (
        BATCH_TURNED,
        ("uint8", (2, 4, 64, 64), 3, ZERO),
        ("int8", (2, 4, 64, 32), 2, {}),
    ),
    "attention, heads last": (
        BATCH_BETWEEN,
        ("int8", (2, 64, 4, 32), 3, {}),
        ("int8", (2, 64, 4, 32), 3, {}),
    ),
}


@measured
@pytest.mark.parametrize("numbers, left, right", INTEGERS.values(), ids=INTEGERS)
def test_integers_are_multiplied_in_the_library(numbers, left, right):
    operands = [quantized(*side[:3], **side[3]) for side in (left, right)]
    products = compiled_dots(product(numbers), *operands)
    assert products and set(products) == {Dot("s8", "s8", "s32", True)}


DIGITS = {
    "one row": (MATRICES, 1, "int8", {}),
    "one row by [N, K]": (TURNED, 1, "uint8", ZERO),
    "8 rows": (MATRICES, 8, "int8", {}),
    "8 rows by packed int4": (TURNED, 8, "int4", {"pack": 1}),
}


@measured
@pytest.mark.parametrize("numbers, m, qtype, options", DIGITS.values(), ids=DIGITS)
def test_digits_are_multiplied_in_the_library(numbers, m, qtype, options):
    contracted = numbers[0][1][0]
    shape = (K, N) if contracted == 0 else (N, K)
    w = quantized(qtype, shape, contracted, **options)
    x = jax.ShapeDtypeStruct((m, K), jnp.float32)
    assert [cpu for cpu, _ in chosen(product(numbers), x, w)] == ["digits"]
    products = compiled_dots(product(numbers), x, w)
    assert products and set(products) == {Dot("s8", "s8", "s32", True)}


@measured
@pytest.mark.parametrize("qtype, options", [("int4", {"pack": 0}), ("uint8", ZERO)])
def test_digits_in_blocks_are_multiplied_and_summed_in_the_library(qtype, options):
    w = quantized(qtype, (K, N), 0, size=32, **options)
    x = jax.ShapeDtypeStruct((2, K), jnp.float32)
    assert [cpu for cpu, _ in chosen(product(), x, w)] == ["block_digits"]
    products = set(compiled_dots(product(), x, w))
    assert Dot("s8", "s8", "s32", True) in products and all(dot.in_library for dot in products)


@measured
def test_a_product_as_written_of_one_row_is_not_in_the_library():
    """Else the forms that these tests are about would be needless."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int8) for shape in ((1, K), (K, N))]
    f = functools.partial(
        jax.lax.dot_general, dimension_numbers=MATRICES, preferred_element_type=jnp.int32
    )
    assert not any(dot.in_library for dot in compiled_dots(f, *shapes))


def lowered_dots(platform, f, *args):
    """The types of the operands and the result of each product, and all types in the program."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    pattern = r"dot_general.*?: \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>"
    return re.findall(pattern, text), set(re.findall(r"tensor<(\S+?)>", text))


ELSEWHERE = {
    "int8": ("int8", {}, "bf16"),
    "uint8 with a zero point": ("uint8", ZERO, "bf16"),
    "int4 packed": ("int4", {"pack": 0}, "bf16"),
    "e4m3": (jnp.float8_e4m3fn, {}, "bf16"),
    "int8 in blocks": ("int8", {"size": 32}, "bf16"),
    "nf4, which bfloat16 does not hold": (numerics.nf4, {"pack": 0}, "f32"),
}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("qtype, options, dtype", ELSEWHERE.values(), ids=ELSEWHERE)
def test_elsewhere_floats_are_multiplied_by_codes_of_their_dtype(platform, qtype, options, dtype):
    """One product of one dtype in float32, and no float32 array as large as the weight."""
    w = quantized(qtype, (K, N), 0, dtype=jnp.bfloat16, **options)
    x = jax.ShapeDtypeStruct((4, K), jnp.bfloat16)
    ((lhs, rhs, result),), types = lowered_dots(platform, jqx.matmul, x, w)
    assert [t.rpartition("x")[2] for t in (lhs, rhs, result)] == [dtype, dtype, "f32"]
    assert (f"{K}x{N}xf32" in types) == (dtype == "f32")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("m", [1, 16])
def test_elsewhere_integers_are_multiplied_as_written(platform, m):
    """In int8, without the row that CPU wants: of unsigned codes and of 16 bits too."""
    w = quantized("uint8", (K, N), 0, **ZERO)
    for qtype, count in [("int8", 1), ("uint8", 1), ("int16", 6)]:
        x = quantized(qtype, (m, K), 1, **({} if qtype == "int16" else ZERO))
        products, types = lowered_dots(platform, jqx.matmul, x, w)
        assert products == [(f"{m}x{K}xi8", f"{K}x{N}xi8", f"{m}x{N}xi32")] * count
        assert not any(t.endswith("xf32") and t.startswith(f"{K}x{N}") for t in types)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_elsewhere_8_bit_floats_are_multiplied_as_they_are(platform):
    x, w = (quantized(jnp.float8_e4m3fn, *side) for side in (((16, K), 1), ((K, N), 0)))
    products, _ = lowered_dots(platform, jqx.matmul, x, w)
    assert products == [(f"16x{K}xf8E4M3FN", f"{K}x{N}xf8E4M3FN", f"16x{N}xf32")]


EXPORTED = {
    "digits": ("float32", "int8", {}),
    "block_digits": ("float32", "uint8", {"size": 32, "zero_point": True}),
    "tiles": ("float32", numerics.nf4, {"pack": 0}),
    "integer_shaped": ("int8", "int8", {}),
    "integer_blocks": ("int8", "uint8", {"size": 32, "zero_point": True}),
}


@pytest.mark.many
@pytest.mark.parametrize("name", EXPORTED)
def test_one_program_for_all_platforms_gives_the_same_bits(name):
    left, right, options = EXPORTED[name]
    w = weight(right, Layout((), (K, N), MATRICES), **options)
    x = np.random.default_rng(0).normal(size=(1, K)).astype(np.float32)
    if left == "int8":
        x = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8))
    assert chosen(jqx.matmul, x, w)[0][0] == name
    f = jax.jit(jqx.matmul)
    exported = jax.export.export(f, platforms=("cpu", "cuda", "tpu"))(x, w)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    np.testing.assert_array_equal(exported.call(x, w), f(x, w))


NUMBERS = {False: MATRICES, True: TURNED}
on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="temporaries are counted for the formulations on CPU"
)


SIDE = 512


FORWARD = 1 / 4
"""A copy of 8-bit codes, and not reached: 1/8 for one tile of floats, and what is as large as rows.
"""


BACKWARD = 3 / 8
"""A tile of floats for either pass, and 1/8 for what is as large as rows: 16 of them are 1/32, and
held as x, as a result, as their gradients and in the loop over tiles.
"""


class Case(NamedTuple):
    """A weight beside floats: its format, how many share a scale, and whether it is packed."""

    qtype: Any
    size: int | None = None
    zero_point: bool = False
    packed: bool = False

    def weight(self, turned: bool, layers: int | None = None) -> jqx.QTensor:
        """Shapes and dtypes of a weight, contracted along its second axis or its first, or of a
        stack of those.
        """
        layout = Layout((), (SIDE, SIDE), (((), (int(turned),)), ((), ())))
        options = self._asdict() | {"pack": int(turned) if self.packed else None}
        options.pop("packed")
        make = functools.partial(weight, layout=layout, **options)
        if layers is None:
            return jax.eval_shape(make)
        return jax.eval_shape(lambda: jax.tree.map(lambda v: jnp.stack([v] * layers), make()))


CASES = {
    "int8": Case("int8"),
    "int8 in blocks": Case("int8", 32),
    "uint8 with a zero point": Case("uint8", zero_point=True),
    "uint8 with a zero point in blocks": Case("uint8", 32, zero_point=True),
    "int4": Case("int4"),
    "int4 in blocks": Case("int4", 32),
    "int4 packed": Case("int4", packed=True),
    "int4 packed in blocks": Case("int4", 32, packed=True),
    "nf4 packed": Case(numerics.nf4, packed=True),
    "nf4 packed in blocks": Case(numerics.nf4, 32, packed=True),
    "e4m3": Case(jnp.float8_e4m3fn),
    "e4m3 in blocks": Case(jnp.float8_e4m3fn, 32),
    "mxfp8": Case(numerics.mxfp8_e4m3),
    "mxfp4 packed": Case(numerics.mxfp4, packed=True),
    "nvfp4 packed": Case(numerics.nvfp4, packed=True),
}


cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


slow = pytest.mark.slow


WAYS = {
    "1 row": (1, True),
    "16 rows": (16, False),
    "1 row by [K, SIDE]": pytest.param((1, False), marks=slow),
    "16 rows by [SIDE, K]": pytest.param((16, True), marks=slow),
}


ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def held(f, *args):
    """The temporaries of a compiled function, in parts of the weight as float32."""
    memory = jax.jit(f).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes / (4 * SIDE * SIDE)


def rows(m):
    return jax.ShapeDtypeStruct((m, SIDE), jnp.float32)


@on_cpu
@pytest.mark.many
@cases
@ways
def test_a_product_holds_no_copy_of_the_weight(case, way):
    m, turned = way
    assert held(product(NUMBERS[turned]), rows(m), case.weight(turned)) < FORWARD


@on_cpu
@pytest.mark.many
@cases
@pytest.mark.parametrize("way", [(16, False), pytest.param((16, True), marks=slow)], ids=str)
def test_a_gradient_holds_no_copy_of_the_weight(case, way):
    m, turned = way
    f = product(NUMBERS[turned])

    def gradient(x, w, cotangent):
        return jax.grad(lambda x: (f(x, w) * cotangent).sum())(x)

    assert held(gradient, rows(m), case.weight(turned), rows(m)) < BACKWARD


@on_cpu
@pytest.mark.many
@pytest.mark.parametrize("m", [64, 128, 256, 1024])
@pytest.mark.parametrize("name", ["int8", "nf4 packed", "mxfp8"])
def test_with_many_rows_a_tile_is_as_large_as_they_are(name, m):
    """But no larger. A loop over tiles also holds the rows in parts, and their sums."""
    tile = max(1 / 8, min(1, m / SIDE))
    loop = 2 * m / SIDE if tile < 1 else 0
    assert held(product(), rows(m), CASES[name].weight(False)) < tile + loop + 1 / 8


LAYERS = ["int8", "int4 packed in blocks", "nf4 packed"]


@on_cpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_scan_over_layers_holds_the_codes_of_one(name):
    """Which the loop slices from the stack."""

    def layers(x, stack):
        return lax.scan(lambda x, w: (product()(x, w), None), x, stack)[0]

    stack = CASES[name].weight(False, layers=4)
    codes = stack.values.size // 4 / (4 * SIDE * SIDE)
    assert held(layers, rows(1), stack) < FORWARD + codes


@on_cpu
@pytest.mark.parametrize("name", ["int8", "nf4 packed"])
def test_a_gradient_of_a_scan_over_layers_keeps_nothing_of_their_weights(name):
    """But rows: 6 layers more hold less than 1/16 more, where each has codes of 1/8 or 1/4."""

    def loss(x, stack):
        return lax.scan(lambda x, w: (jnp.tanh(product()(x, w)), None), x, stack)[0].sum()

    few, many = (held(jax.grad(loss), rows(1), CASES[name].weight(False, layers=n)) for n in (2, 8))
    assert many - few < 1 / 16


@on_cpu
def test_what_is_converted_whole_would_be_seen():
    """The bounds are not met by the product of a dequantized weight."""
    w = CASES["int8"].weight(False)
    assert held(lambda x, w: x @ jnp.sin(w.dequantize()), rows(1), w) >= 1


@on_cpu
def test_a_weight_of_uint8_laid_out_for_cpu_is_not_copied():
    """As int8 its codes are what the library reads; as they were, each call copies them."""
    lhs = jax.eval_shape(lambda: jqx.QTensor.quantize(jnp.zeros((16, SIDE)), jqx.QSpec(jnp.int8)))
    w = CASES["uint8 with a zero point"].weight(turned=False)
    assert held(product(), lhs, w) >= 1 / 4
    assert held(product(), lhs, w.pack_for("cpu")) <= 1 / 16
