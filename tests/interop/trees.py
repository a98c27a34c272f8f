"""Trees of arrays and of QTensors of every kind, to be written and read back."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jqx
from jqx import numerics
from jqx._src.numerics import lookup

from ..arrays import on_device
from ..tensor.tensors import CASES, quantized_case, spec, spread_out

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
    *("int64", "int32", "int16", "int8", "int4", "int2"),
    *("uint64", "uint32", "uint16", "uint8", "uint4", "uint2"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn"),
]
"""All dtypes of JAX but complex128."""

QTYPES = [
    *(jnp.dtype(name) for name in lookup.DTYPES if name != "float8_e8m0fnu"),
    *(numerics.int3, numerics.int5, numerics.uint7, numerics.ternary),
    *(numerics.Integer(8, narrow=True), numerics.nf4, numerics.binary),
    numerics.Codebook((-1.0, 0.25, 3.0), "three"),
    *(numerics.float6_e3m2fn, numerics.Minifloat(2, 3, numerics.Specials.NONE, bias=3)),
]
BLOCKS = [
    *(numerics.mxfp8_e4m3, numerics.mxfp8_e5m2, numerics.mxfp6_e2m3, numerics.mxfp6_e3m2),
    *(numerics.mxfp4, numerics.mxint8, numerics.nvfp4),
]


def quantized(qtype: Any, tail: bool = False) -> jqx.QTensor:
    """A QTensor of a format; of a block format, in blocks of its size, the last one smaller."""
    form = numerics.format_of(qtype)
    if isinstance(form, numerics.Block):
        x = spread_out((2, 2 * form.size + (3 if tail else 0)))
        granularity = jqx.per_block({0: 1, 1: form.size}, tail)
        return jqx.QTensor.quantize(on_device(x), spec(qtype, granularity))
    x = on_device(spread_out((4, 10)))
    granularity = jqx.per_block({0: 1, 1: 4}, tail=True) if tail else jqx.per_axis(0)
    calibrator = jqx.calibrators.absmax if form.signed else jqx.calibrators.minmax
    return jqx.QTensor.quantize(x, spec(qtype, granularity, form.signed, calibrator=calibrator))


LAYOUTS = {
    "": lambda q: q,
    " for cpu": lambda q: q.pack_for("cpu"),
    " packed": lambda q: q.pack(),
    " packed and turned": lambda q: q.pack(0).T,
    " in bfloat16": lambda q: q.astype(jnp.bfloat16),
}
FORMATS = {numerics.format_of(qtype).name: qtype for qtype in (*QTYPES, *BLOCKS)}
KINDS = [
    *CASES,
    *(f"{name} with a tail" for name in FORMATS),
    *(
        name + layout
        for name, qtype in FORMATS.items()
        for layout in LAYOUTS
        if "packed" not in layout or numerics.format_of(qtype).bits < 8
    ),
]
"""QTensors of every format, granularity and layout, by name."""


@functools.cache
def kind(name: str) -> jqx.QTensor:
    """A QTensor of `KINDS`."""
    if name in CASES:
        return quantized_case(name)
    qtype, rest = name.partition(" ")[::2]
    if rest == "with a tail":
        return quantized(FORMATS[qtype], tail=True)
    return LAYOUTS[name.removeprefix(qtype)](quantized(FORMATS[qtype]))


def random_array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of any bits, NaN among them; of bool, of any truths."""
    dtype = jnp.dtype(dtype)
    if dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    bits = 8 * dtype.itemsize
    if dtype.name[-1] in "24" and "int" in dtype.name:
        low, high = (0, 4) if dtype.name[-1] == "2" else (0, 16)
        offset = 0 if dtype.name[0] == "u" else high // 2
        return (rng.integers(low, high, shape) - offset).astype(np.int8).astype(dtype)
    if dtype.name == "float4_e2m1fn":
        return rng.integers(0, 16, shape).astype(np.uint8).view(dtype)
    raw = rng.integers(0, 256, (*shape, bits // 8)).astype(np.uint8)
    return raw.view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of every dtype; of no axes, of no elements, of several."""
    shape = draw(st.sampled_from([(), (0,), (3, 0, 2), (5,), (2, 3), (1, 2, 3)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_array(rng, draw(st.sampled_from(DTYPES)), shape)


keys = st.one_of(
    st.sampled_from(["a", "b", "a/b", "a.values", "__metadata__", "", "é~"]), st.integers(0, 2)
)


def trees() -> st.SearchStrategy[Any]:
    """Nested dicts, lists and tuples; keys that join to one path are among them."""
    leaves = st.one_of(st.none(), arrays(), st.sampled_from(KINDS).map(kind))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
        ),
        max_leaves=8,
    )


RNG = np.random.default_rng(0)


def integers(
    bits: int,
    *,
    zeros: bool = False,
    order: bool = False,
    block: int = 32,
    shape: tuple[int, ...] = (12, 96),
    signed: bool = True,
) -> jqx.QTensor:
    """A random QTensor of integers in blocks along its last axis."""
    form = numerics.Integer(bits, signed=signed)
    entries = (*shape[:-1], shape[-1] // block)

    def codes(shape: tuple[int, ...]) -> Any:
        return on_device(RNG.integers(form.low, form.high + 1, shape), form.storage)

    columns = RNG.permutation(shape[-1]).astype(np.int32)
    return jqx.QTensor(
        codes(shape),
        on_device(RNG.normal(size=entries), jnp.float16),
        codes(entries) if zeros else None,
        order=on_device(columns.reshape((1,) * (len(shape) - 1) + (-1,))) if order else None,
        qtype=form,
        dtype=jnp.float16,
    )


def floats(spec: jqx.QSpec, shape: tuple[int, ...] = (64, 96)) -> jqx.QTensor:
    """A random QTensor of a spec."""
    return jqx.QTensor.quantize(on_device(RNG.normal(size=shape), jnp.float32), spec)


def blocks_of(qtype: Any, size: int, shape: tuple[int, ...] = (64, 96)) -> jqx.QTensor:
    """A random QTensor of a format in blocks of a size along its last axis."""
    return floats(jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size})), shape)


def tree_of(leaves: dict[str, Any]) -> dict[str, Any]:
    """A tree with a weight in each module."""
    return {name: {"weight": leaf} for name, leaf in leaves.items()}


def halved(q: jqx.QTensor) -> jqx.QTensor:
    """A QTensor whose scales are float16."""
    return dataclasses.replace(q, scale=q.scale.astype(jnp.float16))


def with_scale(q: jqx.QTensor, value: Any, first: bool = True) -> jqx.QTensor:
    """A QTensor whose first scale is another, or all are."""
    scale = np.array(q.scale)
    scale.reshape(-1)[: 1 if first else None] = value
    return dataclasses.replace(q, scale=jnp.asarray(scale, q.scale.dtype))


def assert_same_weight(q: jqx.QTensor, expected: jqx.QTensor, name: str) -> None:
    """Codes, scales and zero points are equal; the one factor of nvfp4 nearly. Within their groups,
    permuted columns may stand in another order.
    """
    assert (q.order is None) == (expected.order is None)
    if expected.order is None:
        codes = [weight.unpack().values for weight in (q, expected)]
        np.testing.assert_array_equal(*codes, err_msg=name)
    unit = 2e-7 if name == "nv4" else 0
    np.testing.assert_allclose(q.real_scale(), expected.real_scale(), rtol=unit, err_msg=name)
    x, y = (weight.astype(jnp.float32).dequantize() for weight in (q, expected))
    np.testing.assert_allclose(x, y, rtol=unit, err_msg=name)


def assert_same(a: Any, b: Any) -> None:
    """Asserts that trees are equal in containers, keys and their order, static fields and bits."""
    if isinstance(a, (np.ndarray, np.generic)) or hasattr(a, "addressable_shards"):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        return
    assert type(a) is type(b)
    if isinstance(a, jqx.QTensor):
        for field in ("qtype", "dtype", "blocks", "layout"):
            assert getattr(a, field) == getattr(b, field)
        for field in ("values", "scale", "zero_point"):
            assert_same(getattr(a, field), getattr(b, field))
    elif isinstance(a, dict):
        assert list(a) == list(b) and list(map(type, a)) == list(map(type, b))
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a is None
