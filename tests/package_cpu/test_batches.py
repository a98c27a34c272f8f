"""Batches of codes, as attention multiplies them, by jqx-cpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src import package_cpu

from ..arrays import normal

package = pytest.importorskip("jqx_cpu")

SCORES, MIXED = "btnh,bsnh->bnts", "bnts,bsnh->btnh"
SPECS = (
    jqx.QSpec(jnp.int8, jqx.per_tensor()),
    jqx.QSpec(jnp.int8, jqx.per_axis(0)),
    jqx.QSpec(jnp.uint8, jqx.per_tensor(), symmetric=False),
)


def operands(spec, seed=0, length=70):
    """Queries or keys [2, length, 6, 32], and weights of attention [2, 6, length, length]."""
    return (
        jqx.QTensor.quantize(normal(seed, 2, length, 6, 32), spec),
        jqx.QTensor.quantize(jax.nn.softmax(normal(seed + 1, 2, 6, length, length)), spec),
    )


def attention(q, k, v, p):
    return jqx.einsum(SCORES, q, k), jqx.einsum(MIXED, p, v)


def exact(pattern, x, y):
    """The int64 sums of codes, each less its zero point, times both scales in float32."""
    codes = [
        np.asarray(q.values, np.int64)
        - (0 if q.zero_point is None else np.asarray(q.zero_point, np.int64))
        for q in (x, y)
    ]
    left, right = (np.asarray(q.scale).reshape(-1, 1, 1, 1) for q in (x, y))
    return np.einsum(pattern, *codes).astype(np.float32) * left * right


def test_batches_are_multiplied_exactly():
    given = []
    for spec in SPECS:
        (q, p), (k, _), (v, _) = (operands(spec, seed) for seed in (0, 2, 4))
        given.append((q, k, v, p))
    names = {c.cpu.name for each in given for c in jqx.formulations(attention)(*each)}
    assert names == {"package_batches"}
    found = jax.jit(lambda every: [attention(*each) for each in every])(given)
    for (q, k, v, p), (scores, mixed) in zip(given, found, strict=True):
        np.testing.assert_array_equal(scores, exact(SCORES, q, k), strict=True)
        np.testing.assert_array_equal(mixed, exact(MIXED, p, v), strict=True)


def test_they_are_mapped_and_differentiated():
    (q, _), (k, _) = (operands(SPECS[0], seed) for seed in (0, 2))
    one = jax.jit(lambda q, k: jqx.einsum(SCORES, q, k))(q, k)

    def scores(values, k):
        return jqx.einsum(SCORES, jqx.QTensor(values, q.scale, None, qtype=jnp.int8), k)

    found = jax.jit(jax.vmap(scores, (0, None)))(jnp.stack([q.values] * 2), k)
    np.testing.assert_array_equal(found, jnp.stack([one] * 2))

    def total(scale, k):
        x = jqx.QTensor(q.values, scale, None, qtype=jnp.int8)
        return jnp.sum(jqx.einsum(SCORES, x, k))

    found = jax.grad(total)(q.scale, k)
    scores_of_codes = np.asarray(one, np.float64) / np.asarray(q.scale)
    bound = one.size * np.finfo(np.float32).eps * np.abs(scores_of_codes).sum()
    assert np.abs(found - scores_of_codes.sum()) <= bound


def test_a_partitioned_program_has_the_plain_form():
    (q, _), (k, _) = (operands(SPECS[0], seed) for seed in (0, 2))
    f = jax.jit(lambda q, k: jqx.einsum(SCORES, q, k))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    heads = NamedSharding(mesh, P(None, None, "x"))
    parted = jqx.QTensor(
        jax.device_put(k.values, heads),
        jax.device_put(k.scale, NamedSharding(mesh, P())),
        None,
        qtype=jnp.int8,
    )
    assert package_cpu.NAME in f.lower(q, k).as_text()
    assert package_cpu.NAME not in f.lower(q, parted).as_text()
    np.testing.assert_array_equal(f(q, parted), f(q, k))
