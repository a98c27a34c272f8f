"""The GPU benchmark of a decoder: what can be known of it without a GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from .environment import benchmarks

benchmark, model, reading, rows = benchmarks(
    "gpu_decoder", "_gpu_decoder_model", "_gpu_decoder_reading", "_gpu_decoder_rows"
)

pytestmark = pytest.mark.usefixtures("as_users_write")
TINY = model.Config(layers=1, width=64, hidden=64, heads=4, kv_heads=2, tokens=32)
SETTING = rows.Setting(TINY, "cpu")
PROMPT = rows.Job("prefill", 1, 16)


def distance(x, y):
    x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


# How far logits may be from those of the weights that the codes stand for: roundings to bfloat16
# alone, but for activations in 8 bits, of which a row has its maximum at 127.
@pytest.mark.parametrize(
    ("scheme", "bound"),
    [("jqx W4A16 g128", 0.02), ("jqx nf4 g64", 0.02), ("jqx W8A8 dynamic", 0.04)],
)
def test_a_converted_decoder_computes_what_its_codes_stand_for(scheme, bound):
    params = rows.quantized(SETTING, scheme)
    tokens = rows.inputs(TINY, PROMPT)
    logits, _ = jax.jit(rows.converted(SETTING, scheme, PROMPT))(params, *tokens)
    f = jax.jit(rows.function(TINY, PROMPT))
    float_logits, _ = f(rows.floats(TINY, True), *tokens)
    meant, _ = f(jqx.dequantize_params(params), *tokens)
    assert logits.shape == (1, TINY.tokens)
    assert distance(logits, meant) < bound
    assert 0.005 < distance(logits, float_logits) < 0.5  # something is quantized, nothing broken


@pytest.mark.parametrize("stacked", [False, True])
def test_a_step_goes_on_from_a_prompt(stacked):
    config = dataclasses.replace(TINY, layers=2, stacked=stacked)
    params = rows.floats(config, True)
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, config.tokens)
    prefill, step = (jax.jit(partial(f, config)) for f in (model.prefill, model.step))
    _, caches = prefill(params, tokens[:, :8])
    room = jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 4), (0, 0)]), caches)
    shapes = jax.eval_shape(lambda: model.empty_caches(config, 2, 12))
    assert jax.tree.map(jnp.shape, room) == jax.tree.map(jnp.shape, shapes)
    logits, _ = step(params, tokens[:, 8:], room, 8)
    whole, _ = prefill(params, tokens)
    assert distance(logits, whole) < 0.02  # sums in another order, rounded to bfloat16


def test_goals_are_judged_where_they_were_measured():
    decode, prompt = rows.Job("decode", 16, 512), rows.Job("prefill", 1, 2048)
    records = [
        benchmark.record(decode, "bfloat16", ms=2.0),
        benchmark.record(decode, "jqx W8A16", ms=1.0, of_bandwidth=0.6),
        benchmark.record(decode, "jqx W4A16 g128", ms=1.0, of_bandwidth=0.6),
        benchmark.record(rows.Job("decode", 64, 512), "jqx W8A16", ms=9.0),
        benchmark.record(prompt, "bfloat16", ms=3.0),
        benchmark.record(prompt, "jqx W8A8 dynamic", ms=1.5),
        benchmark.record(prompt, "jqx fp8 dynamic", compiled="compile error: it is"),
    ]
    benchmark.compare(records)
    assert [r["speedup"] for r in records] == [1.0, 2.0, 2.0, None, 1.0, 2.0, None]
    assert list(benchmark.goals(records)) == [
        "met: decode 16x512 jqx W8A16: speedup >= 1.6: 2.00",
        "MISSED: decode 16x512 jqx W4A16 g128: speedup >= 2.2: 2.00",
        "MISSED: decode 16x512 jqx W8A16: of_bandwidth >= 0.7: 0.60",
        "met: decode 16x512 jqx W4A16 g128: of_bandwidth >= 0.55: 0.60",
        "met: prefill 1x2048 jqx W8A8 dynamic: speedup >= 1.5: 2.00",
        "not measured: prefill 1x2048 jqx fp8 dynamic: speedup >= 1.5",
    ]
    assert all(line.startswith("not measured") for line in benchmark.goals(records, False))
    assert len(list(benchmark.goals([]))) == len(benchmark.GOALS)


def test_bytes_count_bits_and_leave_the_table_out():
    params = jax.eval_shape(partial(model.initial, TINY), jax.random.key(0))
    matrices = [*TINY.matrices.values(), (TINY.width, TINY.tokens)]
    norms = 3 * TINY.width
    assert reading.weight_bytes(params) == 2 * (sum(k * n for k, n in matrices) + norms)
    four = {"embed": params["embed"], "w": jax.ShapeDtypeStruct((64, 3), jnp.int4)}
    assert reading.weight_bytes(four) == 96
    caches = model.empty_caches(TINY, 2, 8)
    assert reading.cache_bytes((0, caches)) == 2 * 2 * 2 * 8 * 2 * 16
