"""`ptq`, policies, and files."""

import tempfile
from typing import Any, assert_type

import jax
import jax.numpy as jnp

import jqx


def f(params: dict[str, jax.Array], x: jax.Array, scale: float = 1.0) -> jax.Array:
    return x @ params["w"] * scale


def g(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    return x @ params["w"]


params, x = {"w": jnp.eye(64)}, jnp.ones((2, 64))

policy = jqx.Policy({"head/.*": "float"}) + jqx.presets.w8a8()
assert_type(policy, jqx.Policy)
rule = jqx.Rule(".*", weight="int4:group=32", activation=jqx.QSpec("int8", jqx.per_token()))
assert_type(jqx.Policy([rule]), jqx.Policy)
presets = [
    jqx.presets.w4a16(block=16),
    jqx.presets.w4a8(".*mlp.*", weight={"granularity": jqx.per_group(32)}, exclude="head.*"),
    jqx.presets.w8a16(weight="int8:calibrator=mse", tables="int8"),
    jqx.presets.w8a8(activation={"calibrator": jqx.calibrators.percentile}),
    jqx.presets.fp8(),
    jqx.presets.mxfp8(),
    jqx.presets.nf4(block=32),
]
assert_type(presets, list[jqx.Policy])

quantize = jqx.ptq(f, jqx.presets.w8a8(), jqx.algorithms.nearest(), progress=False)
quantized = quantize(params, [x, x])
assert_type(quantized(x), jax.Array)
assert_type(quantized(x, scale=2.0), jax.Array)
assert_type(quantized.function(quantized.params, x), jax.Array)
assert_type(quantized.plan, jqx.Plan)
assert_type(quantized.report.to_markdown(), str)

second = jqx.ptq(g, jqx.presets.w8a16(), params=1, progress=False)(params, [x])
assert_type(second(x), jax.Array)


class Halved:
    """An algorithm of one's own."""

    def __call__(self, plan: jqx.Plan, params: Any, stats: Any) -> Any:
        return {name: value / 2 for name, value in params.items()}


algorithm: jqx.extend.Algorithm = Halved()
halved = jqx.ptq(f, jqx.presets.w8a16(), algorithm, progress=False)(params, [x])
assert_type(halved(x), jax.Array)


def serve(model: jqx.Quantized, x: jax.Array) -> jax.Array:
    """`Quantized` without parameters is one of any function."""
    y: jax.Array = model(x)
    return y


assert_type(serve(quantized, x), jax.Array)

path = tempfile.mkdtemp() + "/model.safetensors"
jqx.save(path, quantized)
loaded: jqx.SavedModel = jqx.load(path)
again = loaded.bind(f)
assert_type(again(x), jax.Array)
jqx.save(path, params)
tree: dict[str, jax.Array] = jqx.load(path)
with jqx.interop.Archive(path) as archive:
    assert_type(archive.paths, tuple[str, ...])
