"""Transforms keep the parameters of a function and its result; trees keep their type."""

import dataclasses
import json
from typing import Any, NamedTuple, assert_type, cast

import jax
import jax.numpy as jnp
from jax import lax

import jqx


def f(params: dict[str, jax.Array], x: jax.Array, *, train: bool = False) -> jax.Array:
    y = x @ params["w"]
    return jax.nn.relu(y) if train else y


params = {"w": jnp.eye(64)}
x = jnp.ones((2, 64))

plan = jqx.make_plan(f, jqx.presets.w8a8())(params, x, train=True)
assert_type(plan, jqx.Plan)
assert_type(jqx.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))), jqx.Plan)
abstract: Any = jax.eval_shape(jnp.ones_like, x)
assert_type(jqx.make_plan(f, jqx.presets.w8a8())(params, abstract), jqx.Plan)
plan = jqx.make_plan(f, jqx.presets.w8a8())(params, x)

out, stats = jqx.calibrate(f, plan, observers={".*": jqx.extend.mean})(params, x)
assert_type(out, jax.Array)
plain = jqx.calibrate_batches(f, plan, params, [x, (x,)], progress=False)
affines = jqx.affines(plan, jqx.merge_stats(plan, plain, plain))
assert_type(affines["w:dot_general:lhs"].scale, jax.Array)

qparams = jqx.quantize_params(params, plan, affines, target="cpu")
assert_type(qparams, dict[str, jax.Array])
assert_type(jqx.dequantize_params(qparams), dict[str, jax.Array])
weight = cast(jqx.QTensor, qparams["w"])
assert_type(jqx.dequantize_params(weight), jax.Array)
assert_type(jqx.pack_for(qparams, "cpu"), dict[str, jax.Array])

converted = jqx.convert(f, plan, affines)
assert_type(converted(qparams, x), jax.Array)
assert_type(converted(qparams, x, train=True), jax.Array)
assert_type(converted(qparams, x=x), jax.Array)
assert_type(jqx.convert(f, jqx.presets.w8a8_dynamic())(params, x), jax.Array)
assert_type(jqx.simulate(f, plan, affines, backward=jnp.float32)(params, x), jax.Array)
assert_type(jqx.map_channels(f, plan, {})(params, x), jax.Array)

assert_type(jqx.report(plan, params).to_markdown(), str)
assert_type(jqx.compare(f, plan, affines)(params, x).sites[0].path, str)
assert_type(jqx.explain(f, params, x, plan=plan, affines=affines).to_markdown(), str)
assert_type(jqx.lowering(converted, qparams, x).contractions[0].site, str)
assert_type(jqx.diagnostics.ranges(f, plan)(params, abstract).sites[0].path, str)
print(jqx.formulations(jqx.matmul)(x, weight)[0].cpu.name)


class Cache(NamedTuple):
    keys: jax.Array
    length: jax.Array


def step(params: jax.Array, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Several results, and a state that is quantized."""
    keys = lax.dynamic_update_slice(cache.keys, (x @ params)[None], (0, cache.length, 0))
    return jnp.einsum("btd,bd->bt", keys, x), Cache(keys, cache.length + 1)


square = jnp.eye(64)
cache = Cache(jnp.zeros((1, 8, 64)), jnp.int32(0))
small = jqx.quantize_state(cache, {"keys": jqx.QSpec("int8", jqx.per_token())})
assert_type(small, Cache)
row = jnp.ones((1, 64))
weights_only = jqx.make_plan(step, jqx.presets.w8a16())(square, row, cache)
coded = jqx.quantize_params(square, weights_only)
scores, small = jqx.convert(step, weights_only)(coded, row, small)
assert_type(scores, jax.Array)
assert_type(small.keys, jax.Array)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    up: jax.Array
    down: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.up) @ self.down


def apply(model: Model, x: jax.Array) -> jax.Array:
    return model(x)


model = Model(square, square)
dynamic = jqx.make_plan(apply, jqx.presets.w8a8_dynamic())(model, x)
assert_type(jqx.quantize_params(model, dynamic), Model)
assert_type(jqx.convert(apply, dynamic)(jqx.quantize_params(model, dynamic), x), jax.Array)
