"""Which formulation is chosen, by shapes and formats alone; and that each computes the contraction,
those for other platforms too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx._src.contractions import problem
from jqx._src.contractions.conv_general_dilated import CONVOLUTIONS
from jqx._src.contractions.conv_general_dilated import SUMS as CONVOLVED_SUMS
from jqx._src.contractions.dot_general import FLOATS, PRODUCTS, QUANTIZED, SUMS, plan
from jqx._src.contractions.formulation import FORMULATIONS
from jqx._src.contractions.problem import (
    FEW_ROWS,
    SHARE,
    SMALL,
    Dimensions,
    HowTo,
    Product,
    find_block,
)
from jqx._src.contractions.ragged_dot import GROUPS
from jqx._src.contractions.ragged_dot import QUANTIZED as QUANTIZED_ROWS

from ..arrays import on_device
from ..oracles.contractions import (
    LARGE,
    MATRICES,
    Layout,
    chosen,
    contraction,
    gamma,
    small_integers,
)
from ..oracles.numerics import as_float64
from .blocks import magnitudes, real_values, weight

TURNED = (((1,), (1,)), ((), ()))
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
K, N = 128, 160


def like(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def quantized(qtype, shape, numbers=MATRICES, **options):
    """A QTensor on the right, of shapes and dtypes alone."""
    return jax.eval_shape(lambda: weight(qtype, Layout((), shape, numbers), **options))


def case_of(lhs, rhs, numbers=MATRICES):
    dimensions = Dimensions.of(numbers, len(lhs.shape), len(rhs.shape))
    return Product(lhs, rhs, HowTo.of(lhs, rhs, dimensions))


def sums_of(lhs, rhs):
    choice = SUMS.choose(case_of(lhs, rhs))
    return choice.cpu.name, choice.elsewhere.name


def names(lhs, rhs, numbers=MATRICES):
    choice = plan(case_of(lhs, rhs, numbers))
    return None if choice is None else (choice.cpu.name, choice.elsewhere.name)


WEIGHTS = {
    "int8": (8, "int8", {}, ("digits", "convert")),
    "uint8 with a zero point": (8, "uint8", {"zero_point": True}, ("digits", "convert")),
    "int4 packed": (8, "int4", {"pack": 0}, ("digits", "convert")),
    "int8, rows too many for digits": (9, "int8", {}, ("tiles", "convert")),
    "int3": (1, numerics.int3, {}, ("digits", "convert")),
    "int16": (1, "int16", {}, ("tiles", "convert")),
    "nf4": (1, numerics.nf4, {}, ("tiles", "convert")),
    "e4m3": (16, E4M3, {}, ("tiles", "convert")),
    "int8 in blocks": (4, "int8", {"size": 32}, ("block_digits", "convert")),
    "int8 in blocks, rows too many for digits": (5, "int8", {"size": 32}, ("tiles", "convert")),
    "int8 in large blocks": (8, "int8", {"size": 64}, ("block_digits", "convert")),
    "int8 in blocks, many rows": (9, "int8", {"size": 64}, ("tiles", "dequantize")),
    "int8 in blocks and a tail": (1, "int8", {"size": 48}, ("tiles", "convert_row")),
    "mxint8": (1, numerics.mxint8, {}, ("tiles", "convert_row")),
    "mxfp4, many rows": (16, numerics.mxfp4, {}, ("tiles", "dequantize")),
}


@pytest.mark.parametrize("rows, qtype, options, expected", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_weight_beside_floats(rows, qtype, options, expected, dtype):
    assert names(like((rows, K), dtype), quantized(qtype, (K, N), **options)) == expected


def test_blocks_along_another_axis_than_the_first_are_tiles():
    w = quantized("int8", (N, K), TURNED, size=32)
    assert names(like((1, K)), w, TURNED) == ("tiles", "convert_row")
    numbers = (((2,), (1,)), ((0,), (0,)))
    w = quantized("int8", (4, K, N), numbers, size=32)
    assert names(like((4, 1, K)), w, numbers) == ("tiles", "convert_row")


def test_the_borders_of_what_the_planner_weighs():
    """The sizes at which the choice changes, and one below or above."""
    for n, expected in [(SMALL // K - 1, "convert_wide"), (SMALL // K, "digits")]:
        assert names(like((8, K)), quantized("int8", (K, n))) == (expected, "convert")
        assert names(like((8, K)), quantized("int8", (n, K), TURNED), TURNED)[0] == expected
    size = SHARE * FEW_ROWS
    for rows, expected in [
        (FEW_ROWS, ("block_digits", "convert")),
        (FEW_ROWS + 1, ("tiles", "dequantize")),
    ]:
        assert names(like((rows, K)), quantized("int8", (K, N), size=size)) == expected


def test_a_sum_of_digits_that_an_int32_might_not_hold_is_one_of_tiles():
    """A digit is up to 128, a code less its zero point up to 128, 255 or, in 4 bits, 15."""
    for qtype, options, extreme in [
        ("int8", {}, 128),
        ("uint8", {"zero_point": True}, 255),
        ("int4", {"zero_point": True}, 15),
    ]:
        longest = (2**31 - 1) // (128 * extreme)
        for k, expected in [(longest, "digits"), (longest + 1, "tiles")]:
            assert names(like((1, k)), shapes_only(qtype, k, **options))[0] == expected
        for size, expected in [(longest, "block_digits"), (longest + 1, "tiles")]:
            w = shapes_only(qtype, 2 * size, blocks=2, **options)
            assert names(like((1, 2 * size)), w)[0] == expected


def shapes_only(qtype, k, zero_point=False, blocks=1):
    """A QTensor of one column that is never made."""
    codes, scale = jax.ShapeDtypeStruct((k, 1), qtype), like((blocks, 1))
    zero = jax.ShapeDtypeStruct((blocks, 1), qtype) if zero_point else None
    return jax.eval_shape(lambda *leaves: jqx.QTensor(*leaves, qtype=qtype), codes, scale, zero)


def test_a_small_weight_and_floats_beside_it_are_widened_on_cpu():
    w = quantized("int8", (4, 5))
    for dtype in ("float32", "bfloat16", "float16"):
        assert names(like((3, 4), dtype), w) == ("convert_wide", "convert")


def test_float64_is_never_split_into_digits():
    with jax.enable_x64(True):
        for x, dtype in [("float64", jnp.float32), ("float32", jnp.float64)]:
            w = quantized("int8", (K, N), dtype=dtype)
            assert names(like((1, K), x), w) == ("tiles", "convert")


def byte(qtype, shape, numbers=MATRICES, **options):
    """A QTensor on the left."""
    (contracting, _), _ = numbers
    return quantized(qtype, shape, ((contracting, contracting), ((), ())), **options)


INTEGERS = {
    "plain": ((16, K), "int8", (K, N), "int8", {}, "integer"),
    "int4": ((16, K), "int4", (K, N), "int8", {}, "integer"),
    "a zero point": ((16, K), "int8", (K, N), "int8", {"zero_point": True}, "integer_shaped"),
    "unsigned": ((16, K), "uint8", (K, N), "int8", {}, "integer_shaped"),
    "one row": ((1, K), "int8", (K, N), "int8", {}, "integer_shaped"),
    "one column": ((3, SMALL), "int8", (SMALL, 1), "int8", {}, "integer_shaped"),
    "a large left operand": ((N, K), "int8", (K, 1), "int8", {}, "integer_shaped"),
    "small": ((1, K), "int8", (K, 5), "int8", {"zero_point": True}, "integer"),
    "16 bits": ((16, K), "int16", (K, N), "int8", {}, "integer_digits"),
    "16 bits on the right": ((16, K), "int4", (K, N), "uint16", {}, "integer_digits"),
    "in blocks": ((16, K), "int8", (K, N), "int8", {"size": 32}, "integer_blocks"),
    "in blocks, one row": ((1, K), "int8", (K, N), "uint8", {"size": 32}, "integer_blocks"),
    "in blocks, small": ((3, K), "int8", (K, 5), "int8", {"size": 32}, "integer"),
}


@pytest.mark.parametrize("left, lq, right, rq, options, cpu", INTEGERS.values(), ids=INTEGERS)
def test_two_integer_operands(left, lq, right, rq, options, cpu):
    elsewhere = "integer_digits" if cpu == "integer_digits" else "integer"
    lhs, rhs = byte(lq, left), quantized(rq, right, **options)
    assert names(lhs, rhs) == (cpu, elsewhere)
    turned = quantized(rq, right[::-1], TURNED, **options)
    assert names(lhs, turned, TURNED) == (cpu, elsewhere)
    if cpu != "integer_digits":
        shaped = "accumulator_shaped" if cpu == "integer_shaped" else "accumulator"
        assert sums_of(lhs, rhs) == (shaped, "accumulator")


def test_one_row_times_4_bit_codes_gets_another_row_on_every_platform():
    """XLA on GPUs does not compile a product of one row with codes that are widened in it."""
    for m, expected in [(1, ("integer_shaped",) * 2), (2, ("integer",) * 2)]:
        lhs, rhs = byte("int8", (m, K)), quantized("int4", (K, N))
        assert names(lhs, rhs) == expected
        sums = tuple(name.replace("integer", "accumulator") for name in expected)
        assert sums_of(lhs, rhs) == sums
    assert names(byte("int8", (1, K)), quantized("int4", (K, N), pack=0))[1] == "integer"


def test_a_left_operand_contracted_along_its_first_axis_is_turned():
    numbers = (((0,), (0,)), ((), ()))
    lhs, rhs = byte("int8", (K, 16), numbers), quantized("int8", (K, N))
    assert names(lhs, rhs, numbers) == ("integer_shaped", "integer")


WAYS = (QUANTIZED, QUANTIZED_ROWS)
KERNELS = {f"kernel{of}_{on}" for of in ("", "_of_codes") for on in ("tpu", "gpu")}


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("target, platform", [("tpu", "tpu"), ("gpu", "cuda"), ("h200", "cuda")])
def test_a_weight_laid_out_for_a_kernel_is_read_by_it_only_on_its_platform(target, platform, rows):
    x, q = like((rows, K)), quantized("int8", (K, N), size=32)
    laid = jqx.pack_for(q, target)
    choice, plain = plan(case_of(x, laid)), plan(case_of(x, q))
    assert choice.own[platform].name in KERNELS
    assert choice._replace(**{platform: None}) == plain._replace(**{platform: None})


def test_8_bit_floats_in_groups_are_codes_where_the_kernel_runs_alone():
    """Plainly one is dequantized: no formulation is then chosen."""
    x, q = byte(E4M3, (16, K)), quantized(E4M3, (K, N), size=32)
    choice = plan(case_of(x, jqx.pack_for(q, "tpu")))
    assert choice.tpu.name == "kernel_of_codes_tpu"
    assert (choice.cpu.name, choice.cuda.name) == ("float8_groups_in_tiles", "float8_groups")
    assert names(x, q) is None


def test_what_a_kernel_does_not_compute_is_computed_as_without_it():
    q = jqx.pack_for(quantized("int8", (K, N), size=32), "tpu")
    a_channel = jqx.pack_for(quantized("int8", (K, N)), "tpu")
    assert a_channel.layout.kernel
    others = {
        "float64": (like((2, K), "float64"), q, MATRICES, None),
        "an algorithm": (like((2, K)), q, MATRICES, "BF16_BF16_F32"),
        "the transpose": (like((2, N)), q, TURNED, None),
        "codes with a zero point": (byte("uint8", (2, K)), q, MATRICES, None),
        "codes of 16 bits": (byte("int16", (2, K)), q, MATRICES, None),
        "one scale a channel": (like((2, K)), a_channel, MATRICES, None),
        "its codes": (byte("int8", (2, K)), a_channel, MATRICES, None),
    }
    for name, (x, q, numbers, precision) in others.items():
        case = case_of(x, q, numbers)
        if precision is not None:
            how = case.how._replace(precision=jax.lax.DotAlgorithmPreset[precision])
            case = Product(x, q, how)
        assert {form.name for form in plan(case)}.isdisjoint(KERNELS), name


def test_two_operands_that_are_not_both_integers():
    small, large = quantized(E4M3, (16, 4)), quantized(E5M2, (K, N))
    assert names(byte(E4M3, (16, K)), large) == ("float8_tiles", "float8")
    assert names(byte(E4M3, (3, 16)), small) is None
    assert names(byte("int8", (16, K)), large) is None
    assert names(byte(E4M3, (16, K)), quantized(E4M3, (K, N), size=32)) is None


def test_every_formulation_that_the_planner_knows_is_chosen_in_these_tests():
    known = {f.name for f in (*PRODUCTS.formulations, *SUMS.formulations)}
    tables = {name for *_, pair in WEIGHTS.values() for name in pair}
    tables |= {cpu for *_, cpu in INTEGERS.values()}
    tables |= {"accumulator", "accumulator_shaped", "float8", "float8_tiles", "convert_wide"}
    tables |= {"float8_groups", "float8_groups_in_tiles"}
    tables |= {"dequantize_smaller", "exact_blocks", "scaled_blocks"}  # of test_scaled
    tables |= {"integer_onednn"}  # of test_onednn
    package = {  # of tests/package_cpu
        "package_batches",
        "package_codes",
        "package_decoded",
        "package_floats",
        "package_groups",
        "package_sums",
    }
    assert known == tables | KERNELS | package


def test_every_formulation_stands_in_the_list_of_its_operation():
    known = {}
    for each in (PRODUCTS, SUMS, FLOATS, CONVOLUTIONS, CONVOLVED_SUMS, GROUPS, *WAYS):
        for form in each.formulations:
            assert form.op == each.op
            known.setdefault(form.name, set()).add(each.op)
    assert known == {name: {form.op} for name, form in FORMULATIONS.items()}


def test_blocks_of_scales_are_found_once(monkeypatch):
    """By planning, which hands them to what computes the product."""
    found = []

    def counted(lhs, rhs, dimensions):
        found.append(dimensions)
        return find_block(lhs, rhs, dimensions)

    monkeypatch.setattr(problem, "find_block", counted)
    jax.make_jaxpr(jqx.matmul)(jnp.ones((3, K)), weight("int8", LARGE["one row"], size=32))
    assert found.count(Dimensions.of(MATRICES, 2, 2)) == 1  # not that of single blocks


def test_a_weight_on_the_left_is_planned_as_one_on_the_right():
    def left(w, x):
        return jqx.dot_general(w, x, (((0,), (1,)), ((), ())))

    blocks = ("block_digits", "convert_row")
    for options, expected in [({}, ("digits", "convert")), ({"size": 32}, blocks)]:
        w = quantized("int8", (K, N), **options)
        for f in (left, jax.jit(left)):
            assert chosen(f, w, like((1, K))) == [expected]


def test_the_larger_of_two_operands_keeps_its_codes():
    numbers = (((0,), (1,)), ((), ()))
    swapped = functools.partial(jqx.dot_general, dimension_numbers=numbers)
    for qtype, other, cpu in [(E4M3, "int8", "tiles"), ("int8", E4M3, "digits")]:
        x, w = byte(other, (2, K)), quantized(qtype, (K, N))
        assert chosen(jqx.matmul, x, w) == chosen(swapped, w, x) == [(cpu, "convert")]


def test_a_vector_beside_blocks_has_no_axis_for_another_row():
    w = quantized("int8", (K, N), size=32)
    assert names(like((K,)), w, (((0,), (0,)), ((), ()))) == ("block_digits", "convert")


def test_a_weight_is_planned_as_it_lies_in_memory():
    """`pack_for` brings blocks along the last axis to the first, where digits take them."""
    w = quantized("int8", (N, K), TURNED, size=32)
    contract = functools.partial(jqx.dot_general, dimension_numbers=TURNED)
    assert chosen(contract, like((1, K)), w) == [("tiles", "convert_row")]
    packed = jqx.pack_for(w, "cpu")
    assert packed.shape == w.shape and packed.values.shape == (K, N)
    assert chosen(contract, like((1, K)), packed) == [("block_digits", "convert_row")]


ELSEWHERE = {
    "convert, uint8": ("convert", "uint8", {"zero_point": True}, "float32"),
    "convert, int4 packed": ("convert", "int4", {"pack": 0}, "float32"),
    "convert, blocks": ("convert", "int8", {"size": 32, "zero_point": True}, "float32"),
    "convert, nf4": ("convert", numerics.nf4, {}, "float32"),
    "convert, e4m3 beside bfloat16": ("convert", E4M3, {}, "bfloat16"),
    "convert_row": ("convert_row", "int8", {"size": 48, "zero_point": True}, "float32"),
    "convert_row, mxfp4 beside bfloat16": ("convert_row", numerics.mxfp4, {}, "bfloat16"),
    "dequantize": ("dequantize", "int8", {"size": 48, "zero_point": True}, "float32"),
    "dequantize, mxfp4 packed": ("dequantize", numerics.mxfp4, {"pack": 1}, "float32"),
}


@pytest.mark.many
@pytest.mark.parametrize("name, qtype, options, dtype", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_chosen_elsewhere_computes_the_same(name, qtype, options, dtype):
    """Higham's bound on a float32 sum, of zero points apart, and on 12 roundings around it."""
    layout = Layout((1 if name == "convert_row" else 16, K), (K, N), MATRICES)
    w = weight(qtype, layout, **options)
    x = on_device(small_integers(np.random.default_rng(0), layout.lhs), dtype)
    how = case_of(x, w).how
    y = jax.jit(FORMULATIONS[name].compute, static_argnums=2)(x, w, how)
    expected = real_values(x) @ real_values(w)
    bound = gamma(K + 12) * contraction(magnitudes(x), magnitudes(w), MATRICES)
    assert y.dtype == jnp.float32 and np.all(np.abs(as_float64(y) - expected) <= bound)


EMPTY = {
    "digits": ("int8", {}),
    "block_digits": ("int8", {"size": 32}),
    "tiles": (numerics.nf4, {"pack": 0}),
    "blocks": (numerics.mxfp4, {}),
}


@pytest.mark.parametrize("qtype, options", EMPTY.values(), ids=EMPTY)
def test_a_product_without_rows_is_empty(qtype, options):
    w = weight(qtype, LARGE["one row"], **options)
    assert jax.jit(jqx.matmul)(jnp.zeros((0, K)), w).shape == (0, N)
    x = jqx.QTensor(jnp.zeros((0, K), jnp.int8), jnp.ones((1, 1)), qtype=jnp.int8)
    assert jax.jit(jqx.matmul)(x, w).shape == (0, N)


def test_a_plan_does_not_depend_on_values():
    """So that one compiled function serves all."""
    traced = []

    @jax.jit
    def f(x, w):
        traced.append(chosen(functools.partial(jqx.matmul), x, w))
        return jqx.matmul(x, w)

    for seed in range(2):
        x = np.random.default_rng(seed).normal(size=(1, K)).astype(np.float32)
        f(x, weight("int8", LARGE["one row"]))
    assert traced == [[("digits", "convert")]]


def test_the_row_that_is_added_stands_beside_batch_axes_too():
    """Of a product with batch axes: the axis of the row is found, and cut off again."""
    numbers = (((2,), (1,)), ((0,), (0,)))
    layout = Layout((3, 1, K), (3, K, N), numbers)
    w = weight("int8", layout, size=32)
    x = on_device(small_integers(np.random.default_rng(0), layout.lhs), "float32")
    how = case_of(x, w, numbers).how
    row, alone = (
        jax.jit(form.compute, static_argnums=2)(x, w, how)
        for form in (FORMULATIONS["convert_row"], FORMULATIONS["convert"])
    )
    assert row.shape == (3, 1, N)
    expected = np.einsum("bmk,bkn->bmn", real_values(x), real_values(w))
    bound = gamma(K + 12) * np.einsum("bmk,bkn->bmn", magnitudes(x), magnitudes(w))
    assert np.all(np.abs(as_float64(row) - expected) <= bound)
    assert np.all(np.abs(as_float64(alone) - expected) <= bound)
