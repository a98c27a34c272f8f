"""QTensors with float offsets, with scales and offsets that are quantized in turn, and with a
permuted axis: what they stand for, and that views are views.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor

from ..arrays import on_device
from .tensors import spread


def matrix(shape=(6, 8), block=4, *, offset=True, order=True, seed=0):
    """A QTensor of int4 in blocks along the last axis."""
    rng = np.random.default_rng(seed)
    entries = (*shape[:-1], -(-shape[-1] // block))
    parts = {}
    if offset:
        parts["offset"] = on_device(rng.normal(size=entries), np.float32)
    if order:
        positions = rng.permutation(shape[-1]).astype(np.int32)
        parts["order"] = on_device(positions.reshape((1,) * (len(shape) - 1) + (-1,)))
    tail = shape[-1] % block
    return QTensor(
        on_device(rng.integers(-8, 8, shape), jnp.int4),
        on_device(rng.normal(size=entries), np.float32),
        qtype=jnp.int4,
        blocks=((shape[-1], entries[-1], block),) if tail else (),
        **parts,
    )


def super_blocks(rows=6, columns=256):
    """As files with K-quants have them: codes of scales and minimums, with scales of their own."""
    rng = np.random.default_rng(1)

    def codes():
        return on_device(rng.integers(0, 64, (rows, columns // 32)).astype(np.uint8))

    def floats():
        return on_device(rng.normal(size=(rows, columns // 128)).astype(np.float16))

    six = {"qtype": jqx.numerics.uint6, "dtype": jnp.float32}
    return QTensor(
        on_device(rng.integers(0, 16, (rows, columns)), jnp.uint4),
        QTensor(codes(), floats(), **six),
        offset=QTensor(codes(), floats(), **six),
        qtype=jnp.uint4,
    )


def double_quantized(rows=6, columns=128):
    """As bitsandbytes has them: scales are codes of a table, with an offset for all of them."""
    rng = np.random.default_rng(2)
    table = jqx.numerics.Codebook(tuple(np.linspace(-1, 1, 256).tolist()), "scales")
    scale = QTensor(
        on_device(rng.integers(0, 256, (rows, columns // 32)).astype(np.uint8)),
        on_device(rng.random((rows // 2, 1)).astype(np.float32)),
        offset=jnp.full((1, 1), 0.75, jnp.float32),
        qtype=table,
    )
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    return QTensor(jnp.asarray(codes), scale, qtype=jqx.numerics.nf4)


def real(q):
    """The real array, by NumPy: the product, the sum, the order."""
    nested = {name: getattr(q, name) for name in ("scale", "offset")}
    known = {
        name: real(x) if isinstance(x, QTensor) else None if x is None else np.asarray(x)
        for name, x in nested.items()
    }
    numbers = np.asarray(jqx.numerics.format_of(q.qtype).decode(q.codes)).astype(np.float32)
    y = numbers * spread(known["scale"].astype(np.float32), q.shape)
    if known["offset"] is not None:
        y = y + spread(known["offset"].astype(np.float32), q.shape)
    if q.order is None:
        return y
    whole = np.empty_like(y)
    np.put_along_axis(whole, np.broadcast_to(np.asarray(q.order), y.shape), y, -1)
    return whole


TENSORS = {
    "offset": matrix(order=False),
    "order": matrix(offset=False),
    "both": matrix(),
    "tail": matrix((6, 10)),
    "super blocks": super_blocks(),
    "double quantized": double_quantized(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_real_array_is_product_then_sum_then_order(name):
    q = TENSORS[name]
    y = jax.jit(lambda q: q.dequantize())(q)
    np.testing.assert_array_equal(y, real(q))
    np.testing.assert_array_equal(q.dequantize(), y)


VIEWS = {
    "transpose": lambda x: x.T,
    "row": lambda x: x[2],
    "rows": lambda x: x[1:4],
    "some rows": lambda x: x[jnp.array([3, 1])],
    "rows apart": lambda x: x.reshape(2, 3, x.shape[1]),
    "new axis": lambda x: x[:, None],
    "turned back": lambda x: x.T.T,
}
ALONG_THE_LAST_AXIS = {
    "column": lambda x: x[:, 5],
    "columns": lambda x: x[:, 2:4],
    "flat": lambda x: x.reshape(-1),
    "columns apart": lambda x: x.reshape(x.shape[0], 2, -1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_views_are_those_of_the_real_array(name):
    q = TENSORS[name]
    views = VIEWS | ({} if q.order is not None else ALONG_THE_LAST_AXIS)
    if q.blocks:
        views.pop("columns apart", None)

    @jax.jit
    def both(q):
        y = q.dequantize()
        return {key: (f(q).dequantize(), f(y)) for key, f in views.items()}

    for key, (actual, expected) in both(q).items():
        np.testing.assert_array_equal(actual, expected, err_msg=key)


@pytest.mark.many
@pytest.mark.parametrize("name", ["offset", "both", "tail", "super blocks"])
def test_packed_scaled_stacked_and_mapped(name):
    q = TENSORS[name]
    y = q.dequantize()
    np.testing.assert_array_equal(q.pack().dequantize(), y)
    np.testing.assert_array_equal(q.pack().T.dequantize(), y.T)
    np.testing.assert_array_equal(q.pack_for("cpu").dequantize(), y)
    np.testing.assert_array_equal(q.scaled(-2.0).dequantize(), -2 * y)
    np.testing.assert_array_equal(q.astype(jnp.bfloat16).dequantize(), y.astype(jnp.bfloat16))
    stacked = QTensor.stack([q, q.scaled(3.0)])
    np.testing.assert_array_equal(stacked[0].dequantize(), y)
    mapped = jax.vmap(lambda q: q.dequantize())(stacked)
    np.testing.assert_array_equal(mapped[0], y)
    _, stepped = jax.lax.scan(lambda c, q: (c, q.dequantize()), 0, stacked)
    np.testing.assert_array_equal(stepped, mapped)


def test_what_has_no_offset_is_joined_with_one_of_zeros():
    q, plain = matrix(order=False), matrix(offset=False, order=False, seed=1)
    joined = QTensor.concatenate([q, plain], 0)
    expected = jnp.concatenate([q.dequantize(), plain.dequantize()])
    np.testing.assert_array_equal(joined.dequantize(), expected)
    both = QTensor.concatenate([super_blocks(), super_blocks()], 0)
    assert isinstance(both.offset, QTensor)
    np.testing.assert_array_equal(both.dequantize()[:6], super_blocks().dequantize())


def test_layers_have_orders_of_their_own():
    layers = [matrix(seed=i) for i in range(3)]
    stacked = QTensor.stack(layers)
    assert stacked.order.shape == (3, 1, 8)
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(stacked[i].dequantize(), layer.dequantize())
    turned = stacked.transpose(0, 2, 1)
    np.testing.assert_array_equal(turned.dequantize(), stacked.dequantize().transpose(0, 2, 1))


CUT = {
    "a column": lambda q: q[:, 3],
    "columns": lambda q: q[:, 2:6],
    "flat": lambda q: q.reshape(-1),
    "joined rows": lambda q: QTensor.concatenate([q, q], 0),
    "joined columns": lambda q: QTensor.concatenate([q, q], 1),
    "one that is not permuted": lambda q: QTensor.stack([q, dataclasses.replace(q, order=None)]),
    "layers merged": lambda q: QTensor.stack([q, q]).reshape(-1, q.shape[1]),
    "layers behind": lambda q: QTensor.stack([q, q]).transpose(1, 2, 0),
    "taken": lambda q: jqx.take(q, jnp.array([1]), axis=1),
    "sliced": lambda q: jqx.dynamic_slice(q, (0, 1), (6, 2)),
}


@pytest.mark.parametrize("name", CUT)
def test_a_permuted_axis_is_not_cut_joined_or_reshaped(name):
    with pytest.raises(ValueError, match="of the array is permuted, and cannot be cut"):
        CUT[name](matrix())


def test_leaves_that_do_not_fit_are_refused():
    q = matrix(offset=False, order=False)
    ones = jnp.ones
    for error, words, fields in [
        (ValueError, "`offset` does not fit `scale`", {"offset": ones((6, 8))}),
        (TypeError, "offset", {"offset": ones((6, 2), jnp.int32)}),
        (TypeError, "`offset` is not an array", {"offset": 1.0}),
        (TypeError, "`order` does not fit", {"order": ones((1, 8))}),
        (ValueError, "`order` does not fit", {"order": ones((1, 7), jnp.int32)}),
        (ValueError, "`order` does not fit", {"order": ones(8, jnp.int32)}),
    ]:
        with pytest.raises(error, match=words):
            dataclasses.replace(q, **fields)


def test_the_repr_says_so():
    assert "permuted along axis -1, scale float32[6, 2], offset float32[6, 2]" in repr(matrix())


def test_three_children_where_there_is_neither():
    plain = matrix(offset=False, order=False)
    assert len(jax.tree_util.default_registry.flatten_one_level(plain)[0]) == 3
    assert len(jax.tree.leaves(matrix())) == 4
