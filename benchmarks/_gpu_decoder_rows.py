"""The rows of the decoder's benchmark: a scheme at a prompt, or at steps of several rows.

Float weights are drawn once, and quantized one matrix at a time by a compiled function each: beside
the floats and the codes there is never more than one matrix in float32. A decode is timed as a
server runs it: `STEPS` calls of one compiled step, each fed the tokens and the caches of the last,
which it overwrites.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from _gpu_decoder_model import Config, empty_caches, initial, prefill, step

import jqx

STEPS = 16
BASELINE = "bfloat16"

ROWS_DYNAMIC = {"granularity": jqx.per_token(), "dynamic": True}
SCHEMES: Mapping[str, jqx.Policy | None] = {  # the most telling first
    BASELINE: None,
    "jqx W8A16": jqx.presets.w8a16(),
    "jqx W4A16 g128": jqx.presets.w4a16(block=128),
    "jqx W8A8 dynamic": jqx.presets.w8a8_dynamic(),
    "jqx fp8 dynamic": jqx.presets.fp8(activation=ROWS_DYNAMIC),
    "jqx nf4 g64": jqx.presets.nf4(block=64),
}

SCANNED = (BASELINE, "jqx W8A16", "jqx W4A16 g128")


@dataclass(frozen=True)
class Job:
    """What is computed.

    Attributes:
      group: "prefill" of a prompt; "decode", steps with layers unrolled; "scan", the same with
        layers stacked and scanned over, which copies each out of its stack.
      batch: rows.
      context: tokens of the prompt, or what a cache holds.
    """

    group: str
    batch: int
    context: int

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.context}"

    @property
    def tokens(self) -> int:
        """Tokens that one run reads or writes."""
        return self.batch * (self.context if self.group == "prefill" else 1)


JOBS = (
    *(Job("decode", 16, 512), Job("prefill", 1, 2048)),
    *(Job("decode", 1, 512), Job("decode", 64, 512), Job("scan", 16, 512)),
)
SMOKE_JOBS = (Job("decode", 2, 32), Job("prefill", 1, 32), Job("scan", 2, 32))
SMOKE = Config(layers=2, width=64, hidden=128, heads=4, kv_heads=2, tokens=64)


@dataclass(frozen=True)
class Setting:
    """Where rows are compiled: the sizes, the target of weights, and whether arrays are real."""

    config: Config
    target: str
    real: bool = True


def function(config: Config, job: Job) -> Callable[..., Any]:
    """Returns what a job runs, in float: of parameters, tokens and, but for a prompt, caches and
    the place of the tokens.
    """
    return partial(prefill if job.group == "prefill" else step, config)


def inputs(config: Config, job: Job) -> tuple[Any, ...]:
    """Returns random tokens, and for steps caches full of random keys and values."""
    keys = jax.random.split(jax.random.key(1), config.layers + 1)
    length = job.context if job.group == "prefill" else 1
    tokens = jax.random.randint(keys[0], (job.batch, length), 0, config.tokens)
    if job.group == "prefill":
        return (tokens,)
    caches = empty_caches(config, job.batch, job.context)
    if config.stacked:
        caches = jax.random.normal(keys[1], caches.shape, caches.dtype)
    else:
        drawn = zip(keys[1:], caches, strict=True)
        caches = [jax.random.normal(key, own.shape, own.dtype) for key, own in drawn]
    return tokens, caches, jnp.int32(job.context - min(STEPS, job.context))


def program(f: Callable[..., Any], job: Job) -> Any:
    """Returns the jitted function of a row; that of a step gives back what the next one is fed."""

    def whole(params: Any, tokens: Any) -> Any:
        return f(params, tokens)

    def one(params: Any, tokens: Any, caches: Any, place: Any) -> Any:
        logits, caches = f(params, tokens, caches, place)
        likeliest = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        return logits, (likeliest[:, None], caches, place + 1)

    return jax.jit(whole) if job.group == "prefill" else jax.jit(one, donate_argnums=2)


def call(run: Any, job: Job, params: Any, given: tuple[Any, ...]) -> tuple[Callable[[], Any], int]:
    """Returns a call that waits for its work and gives the logits, and how many runs it makes."""
    if job.group == "prefill":
        return lambda: jax.block_until_ready(run(params, *given)[0]), 1
    tokens, caches, place = given

    def steps() -> Any:
        nonlocal caches
        logits, fed = run(params, tokens, caches, place)
        for _ in range(STEPS - 1):
            logits, fed = run(params, *fed)
        caches = fed[1]
        return jax.block_until_ready(logits)

    return steps, STEPS


@cache
def floats(config: Config, real: bool) -> Any:
    """Returns the parameters in bfloat16, or their shapes."""
    draw = partial(initial, config)
    return draw(jax.random.key(0)) if real else jax.eval_shape(draw, jax.random.key(0))


@lru_cache(maxsize=1)  # rows of one scheme follow each other
def quantized(setting: Setting, scheme: str) -> Any:
    """Returns the parameters of a scheme, laid out for the target."""
    config, policy = setting.config, SCHEMES[scheme]
    params = floats(config, setting.real)
    if policy is None:
        return params
    plain = partial(prefill, replace(config, attention="xla"))  # weights are planned alike
    plan = jqx.make_plan(plain, policy)(params, jnp.zeros((1, 8), jnp.int32))
    return jqx.quantize_params(params, plan, target=setting.target)


def converted(setting: Setting, scheme: str, job: Job) -> Callable[..., Any]:
    """Returns what a job runs in a scheme."""
    f, policy = function(setting.config, job), SCHEMES[scheme]
    if policy is None:
        return f
    given = jax.eval_shape(lambda: inputs(setting.config, job))
    plan = jqx.make_plan(f, policy)(floats(setting.config, setting.real), *given)
    return jqx.convert(f, plan)
