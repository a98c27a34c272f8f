"""Under `jax.jit` and `jax.grad`, whose types say nothing of a function: a result has the type that
one writes. In strict mode pyright reports that of JAX itself.
"""

# pyright: standard

import jax
import jax.numpy as jnp

import jqx


def f(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["w"]


params, x = {"w": jnp.eye(64)}, jnp.ones((2, 64))
plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(params, x)
qparams = jqx.quantize_params(params, plan)
simulated = jqx.simulate(f, plan)


@jax.jit
def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return simulated(params, x).sum()


@jax.jit
def product(x: jax.Array, q: jqx.QTensor) -> jax.Array:
    return x @ q


y: jax.Array = jax.jit(jqx.convert(f, plan))(qparams, x)
out, stats = jax.jit(jqx.calibrate(f, plan))(params, x)
gradient: dict[str, jax.Array] = jax.grad(loss)(params, x)
z: jax.Array = product(x, jqx.QTensor.quantize(params["w"], "int8:tensor"))
of_jitted = jqx.convert(jax.jit(f), jqx.presets.w8a8_dynamic())(params, x)
of_lambda = jqx.convert(lambda params, x: x @ params["w"], plan)(qparams, x)
quantized = jqx.ptq(lambda params, x: x @ params["w"], jqx.presets.w8a16(), progress=False)
again = jax.jit(quantized(params, [x]).function)(qparams, x)
