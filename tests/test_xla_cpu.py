"""What XLA on CPU still needs help with: a test that fails says that a workaround can go."""

import importlib
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src import xla_cpu
from jqx._src.transforms import convert

from .contractions.convolutions import NHWC, convolution
from .oracles.contractions import MATRICES

LHS_FIRST = (((0,), (0,)), ((), ()))


def multiplied(lhs, rhs, numbers, dtype, result):
    """The dtypes that the compiled program of a product on CPU multiplies, each once."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs)]
    product = lambda a, b: lax.dot_general(a, b, numbers, preferred_element_type=result)  # noqa: E731
    (found,) = jqx.lowering(product, *shapes).contractions
    return set(found.dtypes)


def test_one_row_or_column_is_multiplied_as_int32():
    product = lambda m, n: multiplied((m, 128), (128, n), MATRICES, "int8", "int32")  # noqa: E731
    assert product(2, 160) == {"s8"}
    assert product(1, 160) == product(16, 1) == {"s32"}


def test_a_left_operand_that_is_not_in_order_is_multiplied_as_int32():
    assert multiplied((128, 16), (128, 160), LHS_FIRST, "int8", "int32") == {"s32"}


def test_sixteen_bit_floats_are_multiplied_in_some_layouts_alone():
    bfloat16 = jnp.bfloat16
    assert multiplied((16, 128), (128, 160), MATRICES, bfloat16, "float32") == {"bf16"}
    assert multiplied((128, 16), (128, 160), LHS_FIRST, bfloat16, "float32") == {"f32"}


def test_a_transposed_product_of_sixteen_bit_floats_cannot_run():
    x, g = jnp.ones((4, 16, 128), jnp.bfloat16), jnp.ones((4, 16, 94), jnp.bfloat16)
    numbers = (((0, 1), (0, 1)), ((), ()))
    product = lambda x, g: lax.dot_general(x, g, numbers, preferred_element_type=jnp.float32).T  # noqa: E731
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        jax.block_until_ready(jax.jit(product)(x, g))


mended = pytest.mark.skipif(
    jax.__version_info__ >= (0, 12), reason="mended in jaxlib 0.12: goes when that is the oldest"
)


@mended
def test_padding_is_folded_into_an_int8_convolution_that_then_sums_wrongly():
    rng = np.random.default_rng(0)
    shapes = ((1, 2, 2, 64), (3, 3, 64, 64))
    image, kernel = (rng.integers(-128, 128, shape, np.int8) for shape in shapes)
    around = [(0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)]

    def padded_before(image, kernel):
        image = lax.pad(image, np.int8(0), around)
        return convolved(image, kernel)

    expected = convolution(image.astype(np.int64), kernel.astype(np.int64), (1, 1), "SAME")
    assert np.any(np.asarray(jax.jit(padded_before)(image, kernel)) != expected)


def convolved(image, kernel):
    options = {"dimension_numbers": NHWC, "preferred_element_type": jnp.int32}
    return lax.conv_general_dilated(image, kernel, (1, 1), "VALID", **options)


def held(f, *shapes, dtype=jnp.int8):
    """Bytes that the compiled program of a function of codes holds beside arguments and results."""
    codes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(f).lower(*codes).compile().memory_analysis().temp_size_in_bytes


def test_a_sum_of_codes_beside_their_product_holds_them_as_int32():
    kernel = (3, 3, 64, 64)
    of_kernel = lambda w: jnp.sum(w, (0, 1, 2), dtype=jnp.int32)  # noqa: E731
    both = lambda x, w: (convolved(x, w), of_kernel(w))  # noqa: E731
    assert held(both, (1, 8, 8, 64), kernel) >= 4 * math.prod(kernel)

    def rows(x, w):
        y = lax.dot_general(x, w, MATRICES, preferred_element_type=jnp.int32)
        return y - jnp.sum(x, 1, dtype=jnp.int32)[:, None]

    assert held(rows, (128, 256), (256, 128)) >= 4 * 128 * 256


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int4])
def test_a_loop_over_narrow_codes_converts_all_of_them_before_it(dtype):
    count, n = 8, 64

    def loop(w):
        def step(x, i):
            slice_ = lax.dynamic_index_in_dim(w, i, keepdims=False)
            return x, slice_.astype(jnp.float32) @ x

        return lax.scan(step, jnp.ones(n), jnp.arange(count))[1]

    assert held(loop, (count, n, n), dtype=dtype) >= count * n * n


def test_the_largest_of_many_floats_is_no_NaN():
    x = np.zeros((128, 256), np.float32)
    x[3, 5] = np.nan
    assert jax.jit(lambda x: jnp.max(jnp.abs(x)))(x) == 0


@mended
def test_codes_that_the_backward_pass_reads_are_kept_as_quotients(monkeypatch):
    monkeypatch.setattr(convert, "as_stored", lax.optimization_barrier)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (64, 256))]
    f = lambda w, x: jax.nn.relu(x @ w)  # noqa: E731
    simulated = jqx.simulate(f, jqx.presets.w8a8_dynamic(), "dynamic", backward=jnp.float32)
    step = jax.value_and_grad(lambda w, x: simulated(w, x).sum(), (0, 1))
    program = jax.jit(step).lower(*shapes).compile().as_text()
    assert re.search(r"ROOT \S+ = f32\[256,512\]\S* divide", program)


def ends_the_process(program):
    """Whether a new process that compiles a program ends without an answer."""
    code = f"import jax, jax.numpy as jnp\nfrom jax import lax\n{program}\nprint('done')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0 or not found.stderr.rstrip().endswith("Error"), found.stderr
    return found.returncode < 0 and "done" not in found.stdout


@pytest.mark.slow
@mended
def test_bits_of_a_transposed_constant_in_a_loop_are_masked_wrongly():
    constant = jnp.asarray(np.random.default_rng(0).normal(size=(64, 48)), jnp.float32)
    bits = lambda x: lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)  # noqa: E731

    def in_loop(f):
        return jax.jit(lambda d: lax.map(lambda z: f(constant.T) + z, d))(jnp.zeros(2, jnp.uint32))

    assert (in_loop(bits)[0] == bits(constant.T)).all()
    assert (in_loop(jax.jit(bits))[0] != bits(constant.T)).any()


def test_joining_codes_of_two_bits_ends_the_process():
    join = "print(jax.jit(lambda x: lax.concatenate([x, x], 0))(jnp.zeros((4, 8), jnp.{})))"
    assert not ends_the_process(join.format("int8"))
    assert ends_the_process(join.format("int2"))


def test_a_bitcast_of_four_bit_floats_in_a_loop_is_not_compiled():
    cast = lambda y: lax.bitcast_convert_type(y, jnp.uint4).astype(jnp.uint8)  # noqa: E731
    rows = jax.ShapeDtypeStruct((4, 8), jnp.float4_e2m1fn)
    jax.jit(cast).lower(rows).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="Invalid bitcast"):
        jax.jit(lambda x: lax.map(cast, x)).lower(rows).compile()


@pytest.mark.parametrize("name", xla_cpu.WORKAROUNDS)
def test_each_workaround_has_a_test_and_stands_where_the_list_says(name):
    assert callable(globals()[f"test_{name}"])
    for place in xla_cpu.WORKAROUNDS[name].where:
        file, function = place.rsplit(".", 1)
        assert hasattr(importlib.import_module(f"jqx._src.{file}"), function)
