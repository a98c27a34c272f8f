import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqx._src.numerics.packing import pack_bits, packed_length, unpack_bits

from ..arrays import on_device

PLANES = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1]}


def packed_along(codes, bits, axis):
    """The bytes that the docstring of the module describes, one code at a time."""
    rows = np.moveaxis(codes, axis, -1)
    *outer, n = rows.shape
    packed = []
    for row in rows.reshape(int(np.prod(outer)), n):
        actual, lowest = [], 0
        for width in PLANES[bits]:
            runs = 8 // width
            run = (n + runs - 1) // runs
            plane = [0] * run
            for place, code in enumerate(row.tolist()):
                part = (code >> lowest) % 2**width
                plane[place % run] += part * 2 ** (width * (place // run))
            actual += plane
            lowest += width
        packed.append(actual)
    length = sum((n * width + 7) // 8 for width in PLANES[bits])
    array = np.array(packed, np.uint8).reshape(*outer, length)
    return np.moveaxis(array, -1, axis)


def assert_packs(codes, bits, axis):
    packed = pack_bits(on_device(codes), bits, axis)
    expected = packed_along(codes, bits, axis)
    np.testing.assert_array_equal(packed, expected, strict=True)
    assert packed.shape[axis] == packed_length(codes.shape[axis], bits)
    back = unpack_bits(packed, bits, axis, codes.shape[axis])
    np.testing.assert_array_equal(back, codes, strict=True)


SHAPES = [*((n,) for n in (0, 1, 7, 8, 17)), (4, 11), (3, 5, 2), (0, 3), (3, 0), (0, 0)]


@pytest.mark.parametrize("bits", PLANES)
def test_any_shape_is_packed_along_any_axis_and_comes_back(bits):
    """Every code, of lengths that are even, odd or zero."""
    assert_packs(np.arange(2**bits, dtype=np.uint8), bits, 0)
    for shape in SHAPES:
        codes = np.random.default_rng(len(shape)).integers(0, 2**bits, shape, dtype=np.uint8)
        for axis in range(len(shape)):
            assert_packs(codes, bits, axis)


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_packing_is_the_same_under_jit_and_vmap(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 10), dtype=np.uint8)
    pack = jax.jit(jax.vmap(lambda row: pack_bits(row, bits, 0)))
    unpack = jax.jit(jax.vmap(lambda row: unpack_bits(row, bits, 0, 10)))
    np.testing.assert_array_equal(pack(codes), packed_along(codes, bits, 1), strict=True)
    np.testing.assert_array_equal(unpack(pack(codes)), codes, strict=True)


def test_nibbles_lie_half_the_axis_apart():
    codes = on_device([1, 2, 3, 4], jnp.uint8)
    assert pack_bits(codes, 4, 0).tolist() == [1 + 16 * 3, 2 + 16 * 4]


def test_planes_follow_each_other_lowest_bits_first():
    codes = on_device([0b101, 0b010, 0b111, 0b100], jnp.uint8)
    low = 0b01 | 0b10 << 2 | 0b11 << 4 | 0b00 << 6
    high = 0b1 | 0b0 << 1 | 0b1 << 2 | 0b1 << 3
    assert pack_bits(codes, 3, 0).tolist() == [low, high]


def test_no_byte_is_spent_but_to_fill_a_plane():
    for bits in range(1, 8):
        for length in range(0, 200):
            least = -(-length * bits // 8)
            assert least <= packed_length(length, bits) <= least + len(PLANES[bits]) - 1
        for length in range(0, 200, 8):
            assert packed_length(length, bits) == length * bits // 8
