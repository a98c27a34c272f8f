"""Both Flax libraries."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx

policy = jqx.presets.w8a8_dynamic()
x = jnp.ones((2, 64))


class LinenModel(nn.Module):
    policy: jqx.Policy
    mode: jqx.linen.Mode = jqx.linen.Mode.SIMULATE

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = jqx.linen.Dense(8, policy=self.policy, mode=self.mode)(x)
        return y


module = LinenModel(policy)
variables = module.init(jax.random.key(0), x)
small = jqx.linen.convert(LinenModel(policy, jqx.linen.Mode.CONVERT), variables, x)
assert_type(small, dict[str, Any])

dense = nn.Dense(8)
floats = dense.init(jax.random.key(0), x)
whole = jqx.linen.quantize(dense, policy)
assert_type(whole, jqx.linen.Quantized)
assert_type(whole.clone(mode=jqx.linen.Mode.CONVERT), jqx.linen.Quantized)
assert_type(jqx.linen.make_plan(whole, floats, x), jqx.Plan)
quantized = jqx.linen.ptq(dense, policy, progress=False)(floats, [x])
y: jax.Array = quantized(x)


class NnxModel(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layer = jqx.nnx.Linear(64, 8, policy=policy, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = self.layer(x)
        return y


model = NnxModel(rngs=nnx.Rngs(0))
jqx.nnx.convert(model, x)
assert_type(model(x), jax.Array)
linear = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
pure = jqx.nnx.ptq(linear, policy, progress=False)([x])
z: jax.Array = pure(x)

f, params = jqx.nnx.pure(linear)
assert_type(jqx.nnx.update(linear, params), nnx.Linear)
assert_type(jqx.nnx.update(params, {"bias": params["bias"]}), dict[str, Any])
