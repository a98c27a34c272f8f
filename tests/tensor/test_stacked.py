"""`QSpec.stacked`: arrays of a stack are quantized each by itself."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jqx
from jqx import numerics
from jqx._src.tensor.serialize import record_from_json, to_json
from jqx._src.tensor.shardings import partition_specs
from jqx._src.tensor.views import sliceable

from ..arrays import assert_same, on_device
from ..oracles.refusals import assert_refused

SHAPE = (2, 3, 4, 32)
ALONE = jqx.QSpec(numerics.nvfp4, jqx.per_block({2: 1, 3: 16, 0: 1, 1: 1}))
STACKS = [(), (0,), (0, 1), (0, 2), (0, 1, 2)]


def stack():
    """Rows of magnitudes that no scale of scales serves together."""
    x = np.random.default_rng(0).normal(size=SHAPE) * 10.0 ** np.arange(-8, 16).reshape(2, 3, 4, 1)
    return on_device(x, jnp.float32)


def stacked(*axes):
    return dataclasses.replace(ALONE, stacked=axes)


@functools.cache
def in_every_way():
    return jax.jit(lambda x: [jqx.QTensor.quantize(x, stacked(*axes)) for axes in STACKS])(stack())


def with_layers():
    return in_every_way()[STACKS.index((0,))]


def test_each_array_of_a_stack_is_quantized_as_if_alone():
    x = stack()
    for axes, q in zip(STACKS, in_every_way(), strict=True):
        inner = tuple(n if i in axes else 1 for i, n in enumerate(SHAPE))
        assert q.scale.shape == (2, 3, 4, 2) and q.scale.scale.shape == inner
    alone = jax.jit(lambda x: jqx.QTensor.quantize(x, ALONE))
    whole = in_every_way()[STACKS.index((0, 1))]
    for i, j in itertools.product(range(2), range(3)):
        assert_same(whole[i : i + 1, j : j + 1], alone(x[i : i + 1, j : j + 1]))


def test_it_is_what_vmap_and_stack_make():
    x = stack()
    spec = jqx.QSpec(numerics.nvfp4, jqx.per_block({0: 1, 1: 1, 2: 16}))
    mapped = jax.vmap(lambda x: jqx.QTensor.quantize(x, spec))(x)
    assert_same(with_layers(), mapped)
    assert_same(jqx.QTensor.stack([jqx.QTensor.quantize(part, spec) for part in x]), mapped)


def test_views_keep_the_numbers():
    shapes = (6, 4, 32), (24, 32), (2, 12, 32), (2, 3, 4, 2, 16), (768,)
    views = [
        lambda x: x[1, 0],
        lambda x: x[:, 1:3],
        lambda x: x[:, jnp.array([2, 0, 0])],
        lambda x: x.transpose(1, 0, 3, 2),
        lambda x: x.transpose(2, 0, 1, 3).reshape(8, 3, 32),
        *(lambda x, shape=shape: x.reshape(shape) for shape in shapes),
    ]

    @jax.jit
    def run(q):
        real = q.dequantize()
        pairs = [(view(q).dequantize(), view(real)) for view in views]
        pairs.append((jqx.QTensor.concatenate([q[:, :2], q[:, 2:]], 1).dequantize(), real))
        pairs += [(sliceable(q, axis).dequantize(), real) for axis in range(q.ndim)]
        return pairs, [sliceable(q, axis) for axis in range(q.ndim)]

    for q in in_every_way()[1:4:2]:
        pairs, apart = run(q)
        for found, expected in pairs:
            np.testing.assert_array_equal(found, expected)
        for axis, found in enumerate(apart):
            assert all(leaf.shape[axis] == SHAPE[axis] for leaf in jax.tree.leaves(found))


def test_a_scan_and_a_map_step_over_it():
    q = with_layers()
    _, found = jax.lax.scan(lambda _, q: (None, q.dequantize()), None, q)
    np.testing.assert_array_equal(found, q.dequantize())
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(q), q.dequantize())


def test_zeros_have_the_second_scales_of_the_spec():
    for axes, q in zip(STACKS, in_every_way(), strict=True):
        empty = jqx.QTensor.zeros(SHAPE, stacked(*axes))
        assert jax.tree.structure(empty) == jax.tree.structure(q)
        assert [x.shape for x in jax.tree.leaves(empty)] == [x.shape for x in jax.tree.leaves(q)]
    written = jqx.dynamic_update_slice(empty, jnp.full((1, 3, 4, 32), 6.0), (jnp.int32(1), 0, 0, 0))
    np.testing.assert_array_equal(written.dequantize(), jnp.zeros(SHAPE).at[1].set(6))


def test_second_scales_are_on_the_devices_of_their_arrays():
    q = with_layers()
    found = partition_specs("test", q, PartitionSpec("layers"), {"layers": 2})
    assert {tuple(spec)[:1] for spec in jax.tree.leaves(found)} == {("layers",)}


def test_a_file_keeps_it(tmp_path):
    for i, q in enumerate(in_every_way()):
        jqx.save(tmp_path / str(i), {"w": q})
        assert_same(jqx.load(tmp_path / str(i))["w"], q)


def test_a_spec_reads_and_writes_as_before_where_it_has_no_stack():
    written = to_json("test", ALONE, jqx.QSpec)
    assert "stacked" not in written
    assert record_from_json("test", written, jqx.QSpec, {}, "spec") == ALONE
    again = to_json("test", stacked(0, 1), jqx.QSpec)
    assert again == {**written, "stacked": [0, 1]}
    assert record_from_json("test", again, jqx.QSpec, {}, "spec") == stacked(0, 1)
    assert str(stacked(0, 1)) == f"{ALONE} stacked(0, 1)"


def test_resolving_adds_axes_and_counts_them_from_the_first():
    spec = jqx.QSpec(numerics.nvfp4, stacked=(-4,))
    assert spec.resolve(4, (0, 1, 2), (1,)).stacked == (0, 1)
    assert jqx.QSpec(numerics.mxfp4).resolve(3, (0, 1), (0,)).stacked == ()


@pytest.mark.parametrize(
    ("qtype", "given", "error", "problem"),
    [
        (numerics.nvfp4, 0, TypeError, "does not name axes"),
        (numerics.nvfp4, [0], TypeError, "does not name axes"),
        (numerics.nvfp4, ("a",), TypeError, "does not name axes"),
        (numerics.nvfp4, (True,), TypeError, "does not name axes"),
        (numerics.mxfp4, (0,), ValueError, "has no second scale"),
        (jnp.int8, (0,), ValueError, "has no second scale"),
    ],
)
def test_wrong_stacks_are_refused(qtype, given, error, problem):
    assert_refused(lambda: jqx.QSpec(qtype, stacked=given), (), error, "QSpec", problem)


def test_an_axis_that_the_array_lacks_is_refused():
    with pytest.raises(ValueError, match=r"stacked == \(4,\)"):
        jqx.QTensor.quantize(stack(), stacked(4))
