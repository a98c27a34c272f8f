"""A decoder of MaxText, trained in int8 and quantized after training, without changing it.

The model is MaxText's own, from its `base.yml`, small and with random weights: two layers in a
scan, with `remat_policy` full. `jqx.nnx.pure` makes a function of it. First a training step whose
products are int8, forward and backward, by the policy that `jqx.interop.from_qwix` makes of
MaxText's `quantization="int8"`. Its loss and gradients are compared with those of the same step of
MaxText, which quantizes with Qwix. Then weights and activations of 8 bits, and weights of 4 bits in
groups of 32, through the scan and the checkpoint. Prints sites, bytes, cosines, and asserts its
claims.

Needs Python 3.12 and `pip install "maxtext[tpu]"`, or what its imports ask for on a CPU, of which
TensorFlow is none. Takes a minute on two cores.
"""

import pathlib

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import optax
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

import jqx.nnx

SETTINGS = {
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "vocab_size": 128,
    "max_target_length": 24,
    "per_device_batch_size": 3,  # no shape of an activation is that of a weight: Qwix would err
    "dtype": "float32",
    "attention": "dot_product",
    "remat_policy": "full",
    "scan_layers": True,
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "run_name": "jqx",
}


def make(**settings):
    """Returns a decoder of MaxText with random weights, always the same."""
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base)], **SETTINGS, **settings)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    rngs = nnx.Rngs(params=0, dropout=1)
    return model_creation_utils.from_config(config, mesh=mesh, rngs=rngs)


def size(params):
    """Returns the bytes of all arrays, with two codes of 4 bits in a byte, as chips hold them."""
    bits = lambda x: 4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize  # noqa: E731
    return sum(x.size * bits(x) // 8 for x in jax.tree.leaves(params))


def cosine(a, b):
    """Returns the cosine of two arrays or pytrees of arrays."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def loss(logits, tokens):
    """Returns the loss of the next tokens."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


tokens, *others, unseen = jax.random.randint(jax.random.key(2), (5, 3, 24), 0, 128)
positions = jnp.broadcast_to(jnp.arange(24), (3, 24))
model = make()
function, params = jqx.nnx.pure(model, enable_dropout=False)

policy = jqx.interop.from_qwix("int8", merge_einsum=True)
recipe = jqx.recipes.Recipe("MaxText's int8", {r.path: r.products for r in policy.rules})
trained = jqx.train(function, policy, recipe)
step = jax.jit(jax.value_and_grad(lambda p: loss(trained(p, {}, tokens, positions), tokens)))
value, gradients = step(params)
assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
updates, _ = optax.adam(1e-3).update(gradients, optax.adam(1e-3).init(params))
after, _ = step(optax.apply_updates(params, updates))

theirs = make(quantization="int8", use_qwix_quantization=True)
reference, graph = nnx.value_and_grad(
    lambda m: loss(m(tokens, positions, enable_dropout=False), tokens)
)(theirs)
alike = cosine(gradients, nnx.to_pure_dict(nnx.state(graph, nnx.Param)))
plan = jqx.make_plan(function, policy)(params, tokens, positions)
print(f"a step in int8: {len(plan.sites)} sites, loss {value:.4f}, of MaxText {reference:.4f}")
print(f"  gradients: cosine to those of MaxText {alike:.5f}; loss after the step {after:.4f}")
assert abs(value - reference) < 0.01 and alike > 0.995 and after < value

expected = function(params, unseen, positions)
print(f"float32: {size(params):,} bytes")
for name, scheme, least in (
    ("W8A8", jqx.presets.w8a8(), 0.999),
    ("W4A16", jqx.presets.w4a16(), 0.98),
):
    quantize = jqx.nnx.ptq(model, jqx.Policy({".*layers.*": scheme}), target=False)
    quantized = quantize([(x, positions) for x in (tokens, *others)])
    y = jax.jit(quantized.function)(quantized.params, unseen, positions)
    found, sites = cosine(y, expected), len(quantized.plan.sites)
    print(f"{name}: {sites} sites, {size(quantized.params):,} bytes, cosine {found:.5f}")
    assert sites == 7 and found > least
