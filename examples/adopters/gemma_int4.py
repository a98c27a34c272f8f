"""Gemma's int4 weights, read with their codes, in the sampler of its package with an int8 cache.

The package gemma quantizes the layers of a model to int4 (`gemma.peft.quantize`) and runs them with
`gm.nn.IntWrapper`, which makes floats of the codes in each call. Here a small Gemma 3 with random
weights is quantized so, and saved by Orbax, as `gm.ckpts.save_params` does. `jqx.load` reads each
kernel with its scale as one packed QTensor, under the key of the float weight. Thus the float model
runs on the codes after `jqx.convert`, as do the prefill and the sampling loop of the package, with
keys and values in int8 (`jqx.quantize_state`). The package stays as it is, and no plan is needed.

Prints the number of sites that read codes, the bytes of weights and cache, the cosine of the logits
with those of the package's int4 model, and the share of equal tokens. Asserts all of them.

Needs `pip install gemma orbax-checkpoint`; gemma 3.3.0 was run, with kauldron 1.4.2, with which its
`gm.ckpts` cannot be imported. Takes a minute on two cores.
"""

import dataclasses
import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from gemma import gm, peft
from gemma.gm.text import _prefill, _sampler_loop
from gemma.gm.utils import _types

import jqx

LENGTH, NEW = 32, 16
LOCAL, GLOBAL = gm.nn.config.AttentionType.LOCAL_SLIDING, gm.nn.config.AttentionType.GLOBAL
SIZES = {"num_embed": 512, "embed_dim": 128, "hidden_dim": 256}
HEADS = {"num_heads": 4, "head_dim": 32, "num_kv_heads": 1, "sliding_window_size": 16}
NORMS = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "use_qk_norm": True}
OTHER = {"final_logit_softcap": None, "transpose_gating_einsum": True}  # those of Gemma 3
config = gm.nn.config.TransformerConfig(
    **SIZES, **HEADS, **NORMS, **OTHER, attention_types=(LOCAL, GLOBAL, LOCAL)
)
model = gm.nn.Transformer(config=config, dtype=jnp.float32)
own = gm.nn.IntWrapper(model=model)
tokens = jax.random.randint(jax.random.key(1), (4, 12), 110, 512)


def logits(model, params, tokens, cache=None):
    return model.apply({"params": params}, tokens, cache=cache).logits


def prefill(model, params):
    """The state of the package after the prompts, with its cache."""
    given = _types.Input(text=tokens, images=None, config=config.input_config)
    options = {"last_state": None, "cache_length": LENGTH, "max_out_length": NEW, "sharding": None}
    options["rng"] = jax.random.key(0)
    return _prefill.prefill(model=model, params=params, input=given, **options)


def sample(model, params, state):
    """Greedy tokens from the loop of the package."""
    special = gm.text.Gemma3Tokenizer.special_tokens
    options = {"end_tokens": (), "forbidden_tokens": None, "special_tokens": special}
    loop = _sampler_loop.SamplerLoop(
        model=model, sampling=gm.text.Greedy(), cache_length=LENGTH, **options
    )
    steps = jnp.asarray(NEW)
    return loop.sample(params=params, init_state=state, max_new_tokens=steps).predicted_tokens


def on_codes(f):
    """A function of the float model that reads codes of weights and caches."""
    return jax.jit(jqx.convert(functools.partial(f, model), jqx.Policy([])))


def int8(cache):
    return jqx.quantize_state(cache, {"layer_[0-9]+/[kv]": "int8"})


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def cosine(x, y):
    x, y = np.float64(x).ravel(), np.float64(y).ravel()
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


params = model.init(jax.random.key(0), tokens)["params"]
int4 = peft.quantize(params, method=peft.QuantizationMethod.INT4)
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(f"{folder}/int4", int4)
    checkpointer.wait_until_finished()
    codes = jqx.load(f"{folder}/int4")

written, state = sample(own, int4, prefill(own, int4)), on_codes(prefill)(codes)
small = dataclasses.replace(state, cache=int8(state.cache))
same, same8 = ((on_codes(sample)(codes, s) == written).mean() for s in (state, small))

text = jnp.concatenate([tokens, written], 1)
cache = model.init_cache(batch_size=4, dtype=jnp.float32, cache_length=text.shape[1])
want, before = logits(own, int4, text), cosine(logits(model, params, text), logits(own, int4, text))
near, near8 = (cosine(on_codes(logits)(codes, text, c), want) for c in (cache, int8(cache)))

flat = jax.tree.leaves(codes, is_leaf=lambda x: isinstance(x, jqx.QTensor))
sites = sum(isinstance(x, jqx.QTensor) for x in flat)
floats, int4s, held, held8 = map(size, (params, codes, state.cache, small.cache))
print(f"{'':18}{'sites':>6}{'bytes':>11}{'cache':>9}{'cosine':>10}{'tokens':>8}")
print(f"{'float32':18}{0:>6}{floats:>11,}{held:>9,}{before:>10.6f}")
print(f"{'codes':18}{sites:>6}{int4s:>11,}{held:>9,}{near:>10.6f}{same:>8.0%}")
print(f"{'codes, int8 cache':18}{sites:>6}{int4s:>11,}{held8:>9,}{near8:>10.6f}{same8:>8.0%}")
assert sites == 5 * 3 and int4s < 0.3 * floats and held8 < 0.3 * held
assert near > 0.999999 and near8 > 0.999 > before and same == 1 and same8 > 0.7
