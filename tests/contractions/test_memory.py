"""What a compiled contraction holds beside its arguments: never a float copy of a weight.

Temporaries are counted by XLA, in parts of the weight as float32. Codes of 8 bits are 1/4 of it, so
that not even a copy of the codes is held.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jqx
from jqx import numerics

from ..oracles.contractions import Layout
from .blocks import weight

N = 512
FORWARD = 1 / 4
"""A copy of 8-bit codes, and not reached: 1/8 for one tile of floats, and what is as large as rows.
"""
BACKWARD = 3 / 8
"""A tile of floats for either pass, and 1/8 for what is as large as rows: 16 of them are 1/32, and
held as x, as a result, as their gradients and in the loop over tiles.
"""

if jax.default_backend() != "cpu":
    pytest.skip("temporaries are counted for the formulations on CPU", allow_module_level=True)


class Case(NamedTuple):
    """A weight beside floats: its format, how many share a scale, and whether it is packed."""

    qtype: Any
    size: int | None = None
    zero_point: bool = False
    packed: bool = False

    def weight(self, turned: bool, layers: int | None = None) -> jqx.QTensor:
        """Shapes and dtypes of a weight [K, N], or [N, K], or of a stack of them."""
        layout = Layout((), (N, N), (((), (int(turned),)), ((), ())))
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
    "1 row by [K, N]": pytest.param((1, False), marks=slow),
    "16 rows by [N, K]": pytest.param((16, True), marks=slow),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def held(f, *args):
    """The temporaries of a compiled function, in parts of the weight as float32."""
    memory = jax.jit(f).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes / (4 * N * N)


def rows(m):
    return jax.ShapeDtypeStruct((m, N), jnp.float32)


def product(turned):
    numbers = (((1,), (int(turned),)), ((), ()))
    return functools.partial(jqx.dot_general, dimension_numbers=numbers)


@pytest.mark.many
@cases
@ways
def test_a_product_holds_no_copy_of_the_weight(case, way):
    m, turned = way
    assert held(product(turned), rows(m), case.weight(turned)) < FORWARD


@pytest.mark.many
@cases
@pytest.mark.parametrize("way", [(16, False), pytest.param((16, True), marks=slow)], ids=str)
def test_a_gradient_holds_no_copy_of_the_weight(case, way):
    m, turned = way
    f = product(turned)

    def gradient(x, w, cotangent):
        return jax.grad(lambda x: (f(x, w) * cotangent).sum())(x)

    assert held(gradient, rows(m), case.weight(turned), rows(m)) < BACKWARD


@pytest.mark.many
@pytest.mark.parametrize("m", [64, 128, 256, 1024])
@pytest.mark.parametrize("name", ["int8", "nf4 packed", "mxfp8"])
def test_with_many_rows_a_tile_is_as_large_as_they_are(name, m):
    """But no larger. A loop over tiles also holds the rows in parts, and their sums."""
    tile = max(1 / 8, min(1, m / N))
    loop = 2 * m / N if tile < 1 else 0
    assert held(product(False), rows(m), CASES[name].weight(False)) < tile + loop + 1 / 8


LAYERS = ["int8", "int4 packed in blocks", "nf4 packed"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_scan_over_layers_holds_the_codes_of_one(name):
    """Which the loop slices from the stack."""

    def layers(x, stack):
        return lax.scan(lambda x, w: (product(False)(x, w), None), x, stack)[0]

    stack = CASES[name].weight(False, layers=4)
    codes = stack.values.size // 4 / (4 * N * N)
    assert held(layers, rows(1), stack) < FORWARD + codes


@pytest.mark.parametrize("name", ["int8", "nf4 packed"])
def test_a_gradient_of_a_scan_over_layers_keeps_nothing_of_their_weights(name):
    """But rows: 6 layers more hold less than 1/16 more, where each has codes of 1/8 or 1/4."""

    def loss(x, stack):
        return lax.scan(lambda x, w: (jnp.tanh(product(False)(x, w)), None), x, stack)[0].sum()

    few, many = (held(jax.grad(loss), rows(1), CASES[name].weight(False, layers=n)) for n in (2, 8))
    assert many - few < 1 / 16


def test_what_is_converted_whole_would_be_seen():
    """The bounds are not met by the product of a dequantized weight."""
    w = CASES["int8"].weight(False)
    assert held(lambda x, w: x @ jnp.sin(w.dequantize()), rows(1), w) >= 1


def test_a_weight_of_uint8_laid_out_for_cpu_is_not_copied():
    """As int8 its codes are what the library reads; as they were, each call copies them."""
    numbers = (((1,), (0,)), ((), ()))
    lhs = jax.eval_shape(lambda: jqx.QTensor.quantize(jnp.zeros((16, N)), jqx.QSpec(jnp.int8)))
    plain = Case("uint8", zero_point=True).weight(turned=False)

    def held(weight):
        f = functools.partial(jqx.dot_general, dimension_numbers=numbers)
        return jax.jit(f).lower(lhs, weight).compile().memory_analysis().temp_size_in_bytes

    assert held(plain) >= N * N
    assert held(plain.pack_for("cpu")) <= N * N / 4
