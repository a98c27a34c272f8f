"""google-tunix: its Llama 3, by `jqx.nnx`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode

from .checks import ERRORS, POLICIES, check_equal, cosine, floats, least_cosine, relative

pytestmark = pytest.mark.bench

BATCH, LENGTH = 2, 12

DEPTH = 4 * (4 * 1 + 7) + 7 + 1
"""A gated product doubles the error of what enters it, whose square then counts four times: that of
the table before the first layer, those of the table and the first layer before the second. Each
layer has seven weights; last comes the head.
"""


def rest(ids):
    """Returns the other arguments of a call: positions, no cache, and a causal mask."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
    return positions, None, mask


@nnx.jit
def logits(model, ids):
    return model(ids, *rest(ids))[0]


def tokens(seed):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 100, (BATCH, LENGTH)), jnp.int32)


@pytest.fixture(scope="module")
def llama():
    library = pytest.importorskip("tunix.models.llama3.model")
    config = library.ModelConfig(
        num_layers=2, vocab_size=100, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    model = library.Llama3(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def draw(x):  # tunix starts the perceptrons at zero
        if x.ndim < 2:
            return x
        return jnp.asarray(rng.normal(0, np.prod(x.shape[:-1]) ** -0.5, x.shape), x.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_of_llama(llama, policy):
    ids, real = tokens(0), logits(llama, tokens(0))
    model = jqx.nnx.quantize(llama, POLICIES[policy], mode=Mode.CALIBRATE)
    plan = jqx.nnx.make_plan(model, ids, *rest(ids))
    assert len(plan.weights) == 2 * 7 + 1 + any(site.op == "gather" for site in plan.sites)
    for seed in (1, 0):
        observed = logits(model, tokens(seed))
    assert relative(observed, real) <= 1e-5
    model.set_attributes(mode=Mode.SIMULATE)
    simulated = logits(model, ids)
    gradient = nnx.jit(nnx.grad(lambda model: jnp.mean(logits(model, ids) ** 2)))(model)
    assert np.isfinite(floats(gradient)).all() and np.any(floats(gradient))
    training = nnx.clone(model)
    training.set_attributes(backward=jnp.float32)
    trained = logits(training, ids)
    jqx.nnx.convert(model, ids, *rest(ids))
    result = logits(model, ids)
    weight_only = len(ERRORS[policy]) == 1
    allowed = 1e-5 * DEPTH if weight_only else np.sqrt(2) * relative(simulated, real)
    check_equal(result, simulated, allowed)
    np.testing.assert_array_equal(trained, result)
    assert cosine(result, real) >= least_cosine(policy, DEPTH)


def test_llama_decodes_with_its_cache(llama):
    """Token by token it gives what it gives of the whole sequence, in float and on integers."""
    ids, policy = tokens(0), "w8a8 dynamic"
    model = jqx.nnx.quantize(llama, POLICIES[policy], mode=Mode.SIMULATE)
    jqx.nnx.convert(model, ids, *rest(ids))
    shape = (BATCH, LENGTH, 2, 16)
    cache = {
        f"layer_{i}": {
            "k": jnp.zeros(shape),
            "v": jnp.zeros(shape),
            "end_index": jnp.zeros(BATCH, jnp.int32),
        }
        for i in range(2)
    }

    @nnx.jit
    def step(model, token, place, cache):
        positions = jnp.full((BATCH, 1), place)
        mask = jnp.broadcast_to(jnp.arange(LENGTH) <= place, (BATCH, 1, LENGTH))
        return model(token, positions, cache, mask)

    given = []
    for place in range(LENGTH):
        y, cache = step(model, ids[:, place : place + 1], place, cache)
        given.append(y)
    # Scales are per token: a step rounds as the whole sequence does, but for ties that are tipped.
    real = logits(llama, ids)
    stepped = jnp.concatenate(given, 1)
    whole = logits(model, ids)
    assert relative(stepped, whole) <= np.sqrt(2) * relative(whole, real)
    assert cosine(stepped, real) >= least_cosine(policy, DEPTH)
