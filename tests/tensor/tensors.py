"""QTensors made of NumPy arrays, and what they stand for."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jqx
from jqx import numerics

from ..arrays import on_device
from ..oracles.numerics import as_float64, as_int64, code_range, codes_of

SHAPES = ((2, 3, 4), (3, 1, 2), (5,))


def tensor(codes: Any, qtype: Any, scale: Any = None, zero_point: Any = None, **fields: Any) -> Any:
    """A QTensor of NumPy codes; its scale is 1 unless it is given."""
    codes = codes_of(codes, qtype)
    scale = np.ones((1,) * codes.ndim) if scale is None else scale
    return jqx.QTensor(
        on_device(codes),
        on_device(np.asarray(scale, np.float32)),
        None if zero_point is None else on_device(codes_of(zero_point, qtype)),
        qtype=qtype,
        **fields,
    )


def random_codes(rng: np.random.Generator, qtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Codes of the whole range of a format, as int64."""
    low, high = code_range(qtype)
    return rng.integers(low, high + 1, shape)


def kept(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a scale with an entry for each index of `axes`."""
    return tuple(n if i in axes else 1 for i, n in enumerate(shape))


def random_tensor(
    rng: np.random.Generator,
    qtype: Any,
    shape: Sequence[int],
    axes: Sequence[int] = (),
    zero_point_axes: Sequence[int] | None = None,
    **fields: Any,
) -> jqx.QTensor:
    """A QTensor of any codes, whose scales all differ; `None` for no zero point."""
    scale = rng.uniform(0.01, 1, kept(shape, axes))
    zero_point = None
    if zero_point_axes is not None:
        zero_point = random_codes(rng, qtype, kept(shape, zero_point_axes))
    return tensor(random_codes(rng, qtype, shape), qtype, scale, zero_point, **fields)


GRANULARITIES = [(), (0, 3), (1, 2), (0, 1, 2, 3)]


def tensors_of(
    shape: Sequence[int], axes: Sequence[Sequence[int]] = GRANULARITIES, coarser: int = 1
) -> Iterator[jqx.QTensor]:
    """One of each granularity, with zero points as the scales, on fewer of its axes, or absent."""
    for seed, axes_of_scale in enumerate(axes):
        rng = np.random.default_rng(seed)
        for zero_point_axes in (None, axes_of_scale, axes_of_scale[:coarser]):
            yield random_tensor(rng, "uint8", shape, axes_of_scale, zero_point_axes)


def spread(scale: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Repeats each entry over its block, the last of which may be smaller."""
    for axis, n in enumerate(shape):
        size = max(1, -(-n // scale.shape[axis]))
        scale = np.take(scale, np.arange(n) // size, axis)
    return scale


def differences(q: jqx.QTensor) -> np.ndarray:
    """The codes less their zero points, as int64."""
    zero = 0 if q.zero_point is None else as_int64(q.zero_point)
    return as_int64(q.values) - zero


def reals(q: Any) -> np.ndarray:
    """The real values of an array or QTensor, in float64."""
    return differences(q) * as_float64(q.scale) if isinstance(q, jqx.QTensor) else as_float64(q)


@st.composite
def qtensors(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]] = SHAPES) -> jqx.QTensor:
    """QTensors of all granularities, with a zero point for each scale, for fewer, or for none."""
    shape = draw(st.sampled_from(shapes))
    axes = draw(st.sets(st.sampled_from(range(len(shape)))))
    zero_point_axes = draw(st.none() | st.sets(st.sampled_from(sorted(axes) or [0])))
    if zero_point_axes is not None:
        zero_point_axes &= axes
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    qtype = draw(st.sampled_from(["int4", "int8", "uint8"]))
    return random_tensor(rng, qtype, shape, axes, zero_point_axes)


class Case(NamedTuple):
    """How one array is quantized: its shape, the spec, and what becomes of its zero point."""

    shape: tuple[int, ...]
    spec: jqx.QSpec
    zero_point_axes: tuple[int, ...] | None = None


BOX = (3, 4, 10)
MX4 = numerics.Block(jnp.float4_e2m1fn, 5, "mx4_of_5")
NV4 = numerics.Block(jnp.float4_e2m1fn, 4, "nv4_of_4", scale_qtype=jnp.float8_e4m3fn)


def spec(qtype: Any, granularity: Any = None, symmetric: bool = True, **fields: Any) -> jqx.QSpec:
    """A spec; per tensor unless a granularity is given."""
    return jqx.QSpec(qtype, granularity or jqx.per_tensor(), symmetric, **fields)


# Every format family, with every way to share a scale; blocks of 4 and 32 leave a tail of 10 and
# 100.
CASES = {
    "int8 per tensor": Case(BOX, spec(jnp.int8, symmetric=False)),
    "int8 per axis, coarser zero point": Case(BOX, spec(jnp.int8, jqx.per_axis(0, 2), False), (2,)),
    "uint8 in blocks, coarser zero point": Case(
        BOX, spec(jnp.uint8, jqx.per_block({0: 1, 1: 2, 2: 5}), False), (1,)
    ),
    "int4 with a tail": Case(
        BOX, spec(jnp.int4, jqx.per_block({0: 1, 2: 4}, tail=True), symmetric=False)
    ),
    "int3 in blocks of two axes": Case(BOX, spec(numerics.int3, jqx.per_block({1: 2, 2: 5}))),
    "e4m3 per axis": Case(BOX, spec(jnp.float8_e4m3fn, jqx.per_axis(1))),
    "nf4 with a tail": Case(BOX, spec(numerics.nf4, jqx.per_block({1: 1, 2: 4}, tail=True))),
    "mx in blocks": Case(BOX, spec(MX4, jqx.per_block({0: 1, 1: 1, 2: 5}))),
    "nv with a tail": Case(BOX, spec(NV4, jqx.per_block({0: 1, 1: 1, 2: 4}, tail=True))),
    "nv in blocks of two axes": Case(BOX, spec(NV4, jqx.per_block({0: 1, 1: 2, 2: 2}))),
    "int8 of 100 in blocks of 32": Case(
        (100, 2), spec(jnp.int8, jqx.per_block({0: 32, 1: 1}, tail=True), symmetric=False)
    ),
    "int8 of 100 in blocks of 25": Case((100, 2), spec(jnp.int8, jqx.per_block({0: 25, 1: 1}))),
}


def spread_out(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Normal float32 values whose magnitude differs from place to place, so that scales do."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-3, 4, shape)
    return (x + rng.normal()).astype(np.float32)


def quantized_case(name: str, seed: int = 0) -> jqx.QTensor:
    """The QTensor of a case."""
    return _quantized(seed)[name][0]


def made(name: str) -> tuple[jqx.QTensor, np.ndarray]:
    """A case with the array that it stands for."""
    return _quantized(0)[name]


@functools.cache
def _quantized(seed: int) -> dict[str, tuple[jqx.QTensor, np.ndarray]]:
    """Every case with the array that it stands for; one program makes them all, of any seed."""
    arrays = {name: spread_out(case.shape, seed) for name, case in CASES.items()}
    return {name: (q, np.asarray(real)) for name, (q, real) in _quantize_all(arrays).items()}


@jax.jit
def _quantize_all(arrays: dict[str, Any]) -> dict[str, tuple[jqx.QTensor, jax.Array]]:
    found = {}
    for name, (_, spec, zero_point_axes) in CASES.items():
        q = jqx.QTensor.quantize(arrays[name], spec)
        if zero_point_axes is not None:
            lead = tuple(slice(None) if i in zero_point_axes else slice(1) for i in range(q.ndim))
            q = dataclasses.replace(q, zero_point=q.zero_point[lead])
        found[name] = q, q.dequantize()
    return found


def on_host(q: jqx.QTensor) -> jqx.QTensor:
    """The QTensor with NumPy's arrays, which NumPy indexes: nothing is compiled."""
    return jax.tree.map(np.asarray, q)


def elements(q: jqx.QTensor) -> dict[str, np.ndarray]:
    """The code, the scale and the zero point of each element of a QTensor, read in NumPy from its
    shape, its scale and its blocks; what has no zero point has zeros.
    """
    scale = q.scale
    if isinstance(scale, jqx.QTensor):
        of_scale = elements(scale)
        scale = (of_scale["code"] * of_scale["scale"]).astype(np.float32)
    zero_point = (
        np.zeros((1,) * q.ndim, np.int64) if q.zero_point is None else as_int64(q.zero_point)
    )
    of_blocks = {"scale": as_float64(scale), "zero point": zero_point}
    spread = {"code": as_float64(q.values)}
    for name, leaf in of_blocks.items():
        leaf = np.broadcast_to(leaf, q.scale.shape)
        for axis, (n, size) in enumerate(zip(q.shape, q.groups.sizes, strict=True)):
            leaf = leaf.take(np.arange(n) // max(size, 1), axis)
        spread[name] = leaf
    return spread


def assert_stands_for(viewed, expected, case=""):
    """Asserts that a QTensor has these elements, and is a sound one."""
    actual = elements(viewed)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=f"{case} {name}", strict=True)
    shape = expected["code"].shape
    facts = (viewed.shape, viewed.ndim, viewed.size, viewed.scale.ndim)
    assert facts == (shape, len(shape), math.prod(shape), len(shape)), case
    rebuilt = dataclasses.replace(viewed)  # checked again
    assert jax.tree.structure(rebuilt) == jax.tree.structure(viewed), case


def of_elements(f, *tensors):
    """What a function of arrays makes of the elements of QTensors."""
    every = [elements(q) for q in tensors]
    return {name: f(*(of[name] for of in every)) for name in every[0]}


def assert_laws(q, views, case=""):
    """Asserts that views of a QTensor have the elements of the views of arrays."""
    q = on_host(q)
    for i, view in enumerate(views):
        assert_stands_for(view(q), of_elements(view, q), f"{case}, view {i}:")


def assert_commute(tensors, views):
    """As `assert_laws`, of the views of each of some tensors, under jit: one compiled program."""
    tensors, views = list(tensors), list(views)

    @jax.jit
    def viewed(tensors):
        return [[view(q) for view in of] for q, of in zip(tensors, views, strict=True)]

    for i, (q, found, of) in enumerate(zip(tensors, viewed(tensors), views, strict=True)):
        for j, (result, view) in enumerate(zip(found, of, strict=True)):
            assert_stands_for(result, of_elements(view, q), f"tensor {i}, view {j}:")


def assert_jitted_laws(name, views):
    """Asserts the law of many views of a case in one compilation."""
    q, real = made(name)

    @jax.jit
    def dequantized(q):
        return [view(q).dequantize() for view in views]

    for i, (found, view) in enumerate(zip(dequantized(q), views, strict=True)):
        expected = np.asarray(view(real))
        assert found.shape == expected.shape, i
        np.testing.assert_array_equal(found, expected, err_msg=f"{name}, view {i}")


def along_axis(axis, index):
    return lambda x: x[(slice(None),) * axis + (index,)]


FEW = (
    "int8 per axis, coarser zero point",
    "int4 with a tail",
    "mx in blocks",
    "nv in blocks of two axes",
)
few = pytest.mark.parametrize("name", FEW)
