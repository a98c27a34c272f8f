"""The last release of transformers with Flax models: GPT-2 as a function, T5 by `jqx.linen`."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
import jqx.linen
from jqx.linen import Mode

from .checks import ERRORS, POLICIES, Model, check, check_equal, cosine, least_cosine, relative

pytestmark = pytest.mark.bench

NEW = 12
"""Tokens that are generated."""


@pytest.fixture(scope="module")
def transformers():
    library = pytest.importorskip("transformers", minversion="4.57")
    if not hasattr(library, "FlaxPreTrainedModel"):
        pytest.skip("this release of transformers has no Flax models: it needs transformers<5")
    return library


def tokens(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(2, 100, shape), jnp.int32)


@pytest.fixture(scope="module")
def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4, eos_token_id=1
    )
    return transformers.FlaxGPT2LMHeadModel(config, seed=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_of_gpt2(gpt2, policy):
    def f(params, ids):
        return gpt2(ids, params=params).logits

    batches = ((tokens(0, 2, 10),), (tokens(1, 2, 10),))
    check(Model(f, gpt2.params, batches, depth=9), policy, gradient=policy == "w8a8")


@pytest.mark.parametrize("policy", POLICIES)
def test_gpt2_generates_with_its_cache(gpt2, policy):
    """Tokens are the same in `simulate`, `convert` and, where weights alone are quantized, the
    function of the dequantized weights.
    """

    def f(params, ids):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return gpt2.generate(ids, params=params, **options).sequences

    batches = ((tokens(0, 2, 6),), (tokens(1, 2, 6),))
    generated = check(Model(f, gpt2.params, batches, depth=9), policy)
    assert generated.shape == (2, 6 + NEW)


class OlderNumpy:
    """`jax.numpy` with `jnp.clip(x, a_max=...)`, which T5 says and jax 0.10 no longer takes."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    def clip(self, x, a_min=None, a_max=None):
        return jnp.clip(x, a_min, a_max)


@pytest.fixture(scope="module")
def t5(transformers):
    transformers.models.t5.modeling_flax_t5.jnp = OlderNumpy()
    config = transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.FlaxT5ForConditionalGeneration(config, seed=0)


@dataclasses.dataclass(frozen=True)
class Converted:
    """A linen module with codes in place of the parameters that transformers hands to it."""

    module: Any
    variables: Any

    def init(self, *args, **kwargs):
        return self.module.init(*args, **kwargs)

    def apply(self, variables, *args, **kwargs):
        state = {name: tree for name, tree in variables.items() if name != "params"}
        return self.module.apply({**self.variables, **state}, *args, **kwargs)


def around(model, module):
    """Returns a model of transformers around another module."""
    result = copy.copy(model)
    result._module = module
    return result


def call_of(ids, seed):
    """Arguments of the module of T5."""
    return {
        "input_ids": ids,
        "attention_mask": jnp.ones_like(ids),
        "decoder_input_ids": tokens(seed, 2, 6),
        "decoder_attention_mask": jnp.ones((2, 6), jnp.int32),
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_of_t5(t5, policy):
    depth = 2 * 4 + 2 * 6 + 1
    module = jqx.linen.quantize(t5.module, POLICIES[policy])
    variables = {"params": t5.params}
    ids, other = call_of(tokens(0, 2, 10), 1), call_of(tokens(2, 2, 10), 3)
    real = t5.module.apply(variables, **ids).logits
    plan = jqx.linen.make_plan(module, variables, **ids)
    if plan.static_specs():
        calibrate = module.clone(mode=Mode.CALIBRATE)
        for batch in (other, ids):
            observed, new = calibrate.apply(variables, **batch, mutable=["quant_stats"])
            variables = {**variables, **new}
        assert relative(observed.logits, real) <= 1e-5

    def run(module, variables):
        return jax.jit(lambda variables: module.apply(variables, **ids).logits)(variables)

    simulated = run(module, variables)
    training = run(module.clone(backward=jnp.float32), variables)
    integers = module.clone(mode=Mode.CONVERT)
    converted = jqx.linen.convert(integers, variables, **ids)
    result = run(integers, converted)
    weight_only = len(ERRORS[policy]) == 1
    noise = 1e-5 * depth if weight_only else np.sqrt(2) * relative(simulated, real)
    check_equal(result, simulated, noise)
    check_equal(result, training, noise if weight_only else 0)
    assert cosine(result, real) >= least_cosine(policy, depth)


@pytest.mark.parametrize("policy", ["w8a8 dynamic", "w4a16"])
def test_encode_and_generate_of_t5_run_through_linen_ptq(t5, policy):
    """Both call `module.apply(..., method=a function)`; `generate` carries a cache."""
    ids = tokens(0, 2, 10)
    module = jqx.linen.quantize(t5.module, POLICIES[policy])
    integers = module.clone(mode=Mode.CONVERT)
    variables = jqx.linen.convert(integers, {"params": t5.params}, **call_of(ids, 1))

    def run(module):
        model = around(t5, module)
        encoded = jax.jit(lambda ids: model.encode(ids, params=t5.params).last_hidden_state)(ids)
        options = {"max_new_tokens": NEW, "do_sample": False}
        return encoded, model.generate(ids, params=t5.params, **options).sequences

    real, _ = run(t5.module)
    result, generated = run(Converted(integers, variables))
    training, expected = run(module.clone(backward=jnp.float32))
    # Beside rounded activations sums are of integers; beside floats they are in float32.
    check_equal(result, training, 0 if len(ERRORS[policy]) == 2 else 1e-5 * 8)
    np.testing.assert_array_equal(generated, expected)
    assert generated.shape == (2, 1 + NEW)
    assert 1e-4 < relative(result, real)  # which float would give
    assert cosine(result, real) >= least_cosine(policy, 8)
