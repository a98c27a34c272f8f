"""QTensors, contractions, caches and operators."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jqx

x = jnp.ones((4, 64))
numbers = np.ones((4, 64), np.float32)
q = jqx.QTensor.quantize(jnp.ones((64, 32)), jqx.QSpec("int8", jqx.per_axis(1)))

assert_type(x @ q, jax.Array)
assert_type(numbers @ q, jax.Array)
assert_type(q.T @ x.T, jax.Array)
assert_type(q.T @ numbers.T, jax.Array)
assert_type(q.T @ q, jax.Array)
assert_type(q.T, jqx.QTensor)
assert_type(q[0], jqx.QTensor)
assert_type(q[:, jnp.array([1, 2])], jqx.QTensor)
assert_type(q[..., None, :4], jqx.QTensor)
assert_type(q.reshape(8, 8, 32), jqx.QTensor)
assert_type(q.transpose(1, 0), jqx.QTensor)
assert_type(q.split(2), list[jqx.QTensor])
assert_type(jqx.QTensor.concatenate([q, q]), jqx.QTensor)
assert_type(q.dequantize(), jax.Array)
assert_type(q.values, jax.Array)
assert_type(q.real_scale(), jax.Array)
assert_type(q.shape, tuple[int, ...])
assert_type(jqx.pack_for(q, "cpu"), jqx.QTensor)
assert_type(jqx.QTensor.zeros((8, 64), "int8"), jqx.QTensor)
assert_type(q.scaled(2.0), jqx.QTensor)
leaves: list[jax.Array] = jax.tree.leaves(q)

numbers_of = (((1,), (0,)), ((), ()))
assert_type(jqx.matmul(x, q), jax.Array)
assert_type(jqx.matmul(x, q, output="int8:tensor"), jqx.QTensor)
assert_type(jqx.dot_general(x, q, numbers_of), jax.Array)
assert_type(jqx.dot_general(x, q, numbers_of, output=jqx.QSpec("int8")), jqx.QTensor)
assert_type(jqx.einsum("bk,kn->nb", x, q), jax.Array)
assert_type(jqx.einsum(x, [0, 1], q, [1, 2], [0, 2]), jax.Array)
assert_type(jqx.take(q, jnp.array([1, 2]), axis=0), jax.Array)
assert_type(jqx.ragged_dot(x, q[None], jnp.array([4])), jax.Array)
kernel = jqx.QTensor.quantize(jnp.ones((3, 3, 1, 2)), jqx.QSpec("int8"))
axes = ("NHWC", "HWIO", "NHWC")
image = jnp.ones((1, 4, 4, 1))
assert_type(
    jqx.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=axes), jax.Array
)

cache = jqx.QTensor.zeros((8, 64), "int8")
assert_type(jqx.dynamic_update_slice(cache, x, (2, 0)), jqx.QTensor)
assert_type(jqx.dynamic_update_slice(jnp.zeros((8, 64)), x, (2, 0)), jax.Array)
assert_type(jqx.dynamic_slice(cache, (2, 0), (1, 64)), jqx.QTensor)
assert_type(jqx.dynamic_slice(x, (2, 0), (1, 64)), jax.Array)

kv = jqx.KVCache.empty(batch=1, length=32, heads=2, width=16, format="int4")
tokens = jnp.ones((1, 3, 2, 16))
kv = kv.append(tokens, tokens)
assert_type(kv, jqx.KVCache)
assert_type(kv.attend(tokens), jax.Array)
assert_type(kv.keys, jax.Array)
keys = jqx.QTensor.zeros((1, 8, 2, 16), "int8")
assert_type(jqx.decode_attention(jnp.ones((1, 2, 16)), keys, keys, jnp.array([3])), jax.Array)

codes = jqx.quantize(x, 0.1, qtype="int8")
assert_type(codes, jax.Array)
assert_type(jqx.dequantize(codes, 0.1), jax.Array)
assert_type(jqx.quantize_dequantize(x, 0.1, qtype=jnp.int8), jax.Array)
assert_type(jqx.round(x, jqx.RoundMode.NEAREST_TOWARD_EVEN), jax.Array)
assert_type(jqx.fake_quantize(x, 0.0, 1.0, 0.0, 1.0, levels=256), jax.Array)
assert_type(jqx.affine_from_range(0.0, 1.0, qtype="uint8"), tuple[jax.Array, jax.Array | None])


def halve(w: jqx.QTensor | jax.Array) -> jax.Array:
    """Narrowing tells them apart."""
    return w.dequantize() / 2 if isinstance(w, jqx.QTensor) else w / 2


halve(q)
