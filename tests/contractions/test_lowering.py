"""What XLA makes of contractions: on CPU, calls of its int8 library; elsewhere, plain products.

That XLA on CPU hands a product to the library depends on its shapes and types, and was measured on
jaxlib 0.10.2: on another version these tests say whether it still does.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

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
    found = []
    for name, body in re.findall(r"^(?:ENTRY )?(%[\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        types = dict(re.findall(r"(%[\w.\-]+) = (\w+)\[", body))
        pattern = r"= (\w+)\[([\d,]*)\][^\n]* dot\((%[\w.\-]+), (%[\w.\-]+)\)"
        for result, shape, lhs, rhs in re.findall(pattern, body):
            if math.prod(map(int, shape.split(","))) >= TINY:
                found.append(Dot(types[lhs], types[rhs], result, name in fusions))
    return found


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
    found = compiled_dots(product(numbers), *operands)
    assert found and set(found) == {Dot("s8", "s8", "s32", True)}


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
    found = compiled_dots(product(numbers), x, w)
    assert found and set(found) == {Dot("s8", "s8", "s32", True)}


@measured
@pytest.mark.parametrize("qtype, options", [("int4", {"pack": 0}), ("uint8", ZERO)])
def test_digits_in_blocks_are_multiplied_and_summed_in_the_library(qtype, options):
    w = quantized(qtype, (K, N), 0, size=32, **options)
    x = jax.ShapeDtypeStruct((2, K), jnp.float32)
    assert [cpu for cpu, _ in chosen(product(), x, w)] == ["block_digits"]
    found = set(compiled_dots(product(), x, w))
    assert Dot("s8", "s8", "s32", True) in found and all(dot.in_library for dot in found)


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
        found, types = lowered_dots(platform, jqx.matmul, x, w)
        assert found == [(f"{m}x{K}xi8", f"{K}x{N}xi8", f"{m}x{N}xi32")] * count
        assert not any(t.endswith("xf32") and t.startswith(f"{K}x{N}") for t in types)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_elsewhere_8_bit_floats_are_multiplied_as_they_are(platform):
    x, w = (quantized(jnp.float8_e4m3fn, *side) for side in (((16, K), 1), ((K, N), 0)))
    found, _ = lowered_dots(platform, jqx.matmul, x, w)
    assert found == [(f"16x{K}xf8E4M3FN", f"{K}x{N}xf8E4M3FN", f"16x{N}xf32")]


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
