"""Uses the installed package: quantizes a function, saves it in this folder, and loads it."""

import jax
import jax.numpy as jnp

import jqx

w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
quantized = jqx.ptq(lambda w, x: x @ w, jqx.presets.w8a8())(w, [x])
error = jnp.linalg.norm(quantized(x) - x @ w) / jnp.linalg.norm(x @ w)
assert error < 0.03, error
jqx.save("quantized.safetensors", quantized)
loaded = jqx.load("quantized.safetensors").bind(lambda w, x: x @ w)
assert (loaded(x) == quantized(x)).all()
print(f"jqx {jqx.__version__} from {jqx.__file__}: int8 has a relative error of {error:.4f}")
