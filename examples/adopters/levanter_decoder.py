"""Levanter's Llama, whose weights have named axes: int8 training, W8A8 and 4-bit weights.

Levanter builds its models with haliax: a module is a pytree, and each weight is a `NamedArray`, one
array with the names of its axes. Its layers are stacked and run by a scan, with gradient
checkpointing. jqx takes the module itself as the parameters of a function, sees the products inside
of the scan, and returns a module of the same class, whose NamedArrays hold QTensors.

(1) `jqx.train` computes all products of the loss of the package on int8 operands, forward and
backward. (2) `jqx.ptq` quantizes the decoder after training, in W8A8 and with 4-bit weights in
groups of 32 by GPTQ. The weights are random.

Prints for each the number of sites, the bytes of parameters with packed codes, and the cosine of
gradients or logits with those of float. Asserts all of them, and that gradients are finite.

Needs `pip install marin-levanter`; 0.2.20 was run. Takes a minute or two on two cores.
"""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmExample

import jqx

config = LlamaConfig(
    max_seq_len=32,
    hidden_dim=64,
    intermediate_dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    gradient_checkpointing=True,
)
Vocab, Batch = hax.Axis("vocab", 256), hax.Axis("batch", 8)
model = LlamaLMHeadModel.init(Vocab, config, key=jax.random.key(0))
tokens = hax.random.randint(jax.random.key(1), (Batch, config.max_Pos), 0, Vocab.size)
example = LmExample(tokens, LmExample.causal_loss_mask(config.max_Pos).astype(jnp.float32))


def loss(model, example):
    return model.compute_next_token_loss(example).scalar()


def logits(model, tokens):
    return model(tokens, attn_mask=AttentionMask.causal())


def flat(tree):
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


def cosine(x, y):
    x, y = flat(x), flat(y)
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


def row(name, plan, size, similarity):
    count = f"{len(plan.sites)} of {len(plan.sites) + len(plan.skipped)}"
    print(f"{name:28}{count:>10}{size:>12,}{similarity:>10.4f}", flush=True)


print(f"{'':28}{'sites':>10}{'bytes':>12}{'cosine':>10}")
recipe = jqx.recipes.int8()
plan = jqx.make_plan(loss, recipe.policy)(model, example)
assert "transformer/layers/stacked/mlp/up_proj/weight" in [site.path for site in plan.sites]
step = jax.jit(jax.value_and_grad(jqx.train(loss, plan, recipe)))
value, gradients = step(model, jqx.train_state(plan, recipe), example)
exact = jax.jit(jax.grad(loss))(model, example)
size = sum(x.nbytes for x in jax.tree.leaves(model))
row("gradients of int8 products", plan, size, cosine(gradients, exact))
assert isinstance(gradients, LlamaLMHeadModel) and np.isfinite(value)
assert np.isfinite(flat(gradients)).all() and cosine(gradients, exact) > 0.99

y = jax.jit(logits)(model, tokens)
for name, policy, bound, part in (
    ("logits of W8A8", jqx.presets.w8a8_dynamic(), 0.999, 0.4),
    ("logits of W4A16, GPTQ", jqx.presets.w4a16(block=32), 0.99, 0.3),
):
    quantized = jqx.ptq(logits, policy, progress=False)(model, [tokens])
    weight = quantized.params.transformer.layers.stacked.mlp.up_proj.weight
    assert isinstance(weight, hax.NamedArray) and isinstance(weight.array, jqx.QTensor)
    assert weight.axes[1].name == "mlp"
    out = jax.jit(quantized.function)(quantized.params, tokens)
    packed = quantized.report.bytes_packed
    row(name, quantized.plan, packed, cosine(out, y))
    assert cosine(out, y) > bound and packed < part * size
print("Claims hold.")
