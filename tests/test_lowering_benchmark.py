"""The benchmark of kernels for TPUs: what it counts, against what is counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .environment import benchmarks

benchmark, counting, schemes = benchmarks("bench_lowering", "_lowering_kernel", "_lowering_schemes")
V5E, V6E, TPU7X = counting.UNITS.values()


def product(x, w):
    """[16, 512] x [512, 300] in tiles of 128 columns, then 8 rows, then 256 along the sum."""

    def kernel(x, w, y, total):
        for start in (0, 128):
            part = pl.ds(start, 128)
            columns = w[part, :].astype(jnp.bfloat16)
            total[...] += jnp.dot(x[:, part], columns, preferred_element_type=jnp.float32)
        y[...] = total[...]

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((16, 300), jnp.float32),
        grid=(3, 2, 2),
        in_specs=[
            pl.BlockSpec((8, 256), lambda j, i, step: (i, step)),
            pl.BlockSpec((256, 128), lambda j, i, step: (step, j)),
        ],
        out_specs=pl.BlockSpec((8, 128), lambda j, i, step: (i, j)),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
    )(x, w)


def shaped(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def counted(f, *args, scalars=()):
    (kernel,) = counting.kernels_of(jax.make_jaxpr(f)(*args).jaxpr, scalars)
    return kernel


def test_blocks_are_moved_when_their_index_changes():
    kernel = counted(product, shaped(jnp.bfloat16, 16, 512), shaped(jnp.int8, 512, 300))
    x, w = kernel.inputs
    (y,) = kernel.outputs
    assert (x.fetches, x.bytes, x.once, x.times) == (12, 3 * 16 * 512 * 2, 16 * 512 * 2, 3)
    assert (w.fetches, w.bytes, w.once, w.times) == (12, 2 * 512 * 300, 512 * 300, 2)
    assert (y.fetches, y.bytes, y.once) == (6, 16 * 300 * 4, 16 * 300 * 4)


def test_blocks_that_change_have_two_buffers_of_whole_registers():
    kernel = counted(product, shaped(jnp.bfloat16, 16, 512), shaped(jnp.int8, 512, 300))
    x, w, y = 16 * 256 * 2, 256 * 128, 8 * 128 * 4  # 8 rows of bfloat16 are half a register
    assert kernel.vmem == 2 * (x + w + y) + 8 * 128 * 4


def test_half_a_byte_is_read_of_a_code_of_4_bits():
    kernel = counted(product, shaped(jnp.bfloat16, 16, 512), shaped(jnp.int4, 512, 300))
    assert kernel.inputs[1].once == 512 * 300 / 2


def test_products_of_all_steps_are_counted():
    kernel = counted(product, shaped(jnp.bfloat16, 16, 512), shaped(jnp.int8, 512, 300))
    assert kernel.products == (counting.Product(8, 128, 128, "bfloat16"),) * 2
    assert [kernel.passes(unit) for unit in (V5E, V6E)] == [2 * 8 * 12] * 2


@pytest.mark.parametrize(
    "dtype, expected",
    [("bfloat16", (96, 32, 32)), ("int8", (48, 16, 32)), ("float8_e5m2", (96, 32, 16))],
)
def test_passes_of_a_product(dtype, expected):
    one = counting.Product(3, 300, 512, dtype)  # 3 x 4 tiles of 128, 2 x 2 of 256; 8 rows
    assert tuple(one.passes(unit) for unit in (V5E, V6E, TPU7X)) == expected


def test_a_matrix_is_read_once_for_the_tiles_of_its_group():
    def stacked(group, x, w):
        def kernel(group, x, w, y):
            y[...] = jnp.dot(x[...], w[...])

        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2, 4),
            in_specs=[
                pl.BlockSpec((8, 128), lambda j, i, group: (i, 0)),
                pl.BlockSpec((None, 128, 128), lambda j, i, group: (group[i], 0, j)),
            ],
            out_specs=pl.BlockSpec((8, 128), lambda j, i, group: (i, j)),
        )
        shape = jax.ShapeDtypeStruct((32, 256), jnp.float32)
        return pl.pallas_call(kernel, shape, grid_spec=grid)(group, x, w)

    group = np.array([0, 0, 2, 2], np.int32)
    args = shaped(jnp.int32, 4), shaped(jnp.float32, 32, 128), shaped(jnp.float32, 3, 128, 256)
    w = counted(stacked, *args, scalars=[group]).inputs[1]
    assert (w.fetches, w.times, w.once) == (4, 1, 2 * 128 * 256 * 4)
    with pytest.raises(ValueError, match="is told 1 arrays first"):
        counted(stacked, *args)


def products_of(f, *args):
    return [p.times for p in counting._products(jax.make_jaxpr(f)(*args).jaxpr, 1)]


def test_loops_and_conditions_multiply_as_often_as_they_can():
    x = jnp.ones((8, 8))

    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: x @ x, x)

    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    def apart(x):
        for is_met in (x[0, 0] > 0, x[0, 0] <= 0):
            x = jax.lax.cond(is_met, lambda x: x @ x, lambda x: x, x)
        return x

    assert [products_of(f, x) for f in (loop, either, apart)] == [[5], [1, 1], [1]]


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="a loop of unknown length multiplies"):
        products_of(
            lambda n, x: jax.lax.fori_loop(0, n, lambda _, x: x @ x, x), 3, jnp.ones((8, 8))
        )


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_kernels_of_jqx_read_codes_once(scheme):
    (at,) = schemes.problems(scheme, [schemes.Shape(8, 512, 1024)])
    record = benchmark.counted(at)
    bits = 8 if scheme in ("mxfp8", "w8a8 dynamic", "fp8 128x128") else 4
    assert record["codes_mib"] * 2**20 == 512 * 1024 * bits / 8
    assert record["codes_times"] == 1
    assert record["written_mib"] * 2**20 == 8 * 1024 * 2  # bfloat16, as the rows are


def test_goals_name_what_misses_them():
    (at,) = schemes.problems("w4a8 g128", [schemes.Shape(8, 512, 1024)])
    record, program = (
        benchmark.counted(at),
        {"runs": "loop", "reads": "s8", "widened": ["bf16[2] of w"]},
    )
    unknown = program | {"reads": "s32 x bf16"}
    programs = [
        {"scheme": "a", "shape": "b", "target": target, "own": own}
        for target, own in {"c": program, "d": unknown}.items()
    ]
    found = list(benchmark.goals([record], programs))
    assert [line.partition(":")[0].strip() for line in found] == [
        *("met", "met"),
        *("MISSED", "MISSED"),  # groups of 128 fill half a unit of TPU7x, which has no faster int8
        "met",
        *("MISSED", "MISSED"),
        "not known",
        "Time",
    ]
    assert found[3].endswith("MISSED: w4a8 g128 8x512x1024 tpu7x: 2.00")
    assert found[6].endswith("MISSED: a b c, loop: 1.00")
