"""tunix trains adapters over 4-bit weights of its own Gemma, with jqx in the place of Qwix.

`jqx.nnx.apply_lora` does what `qwix.apply_lora_to_model(model, qwix.LoraProvider(...))` does in the
quickstarts of tunix: nf4 codes with a scale for 16 weights, and adapters of rank 4. The trainer of
tunix finds the adapters by their type, `nnx.LoRAParam`, trains and saves them alone, and its
sampler generates. Afterwards the adapters are merged. The model is small and has learned one
sentence in float; the adapters learn another one. Prints sites, bytes and cosines. Asserts its
claims, among them that Qwix makes adapters of the same names and shapes, and the same results.

Needs `pip install google-tunix qwix`. Takes half a minute on two cores.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma import model as gemma
from tunix.sft import peft_trainer, utils

import jqx.nnx

ADAPTED = ".*(q_einsum|kv_einsum|gate_proj|up_proj|down_proj)"
OLD, NEW = "we are no strangers to love", "never gonna give you up"


class Letters:
    """A tokenizer of letters, for the sampler of tunix."""

    letters = " " + "".join(map(chr, range(97, 123)))

    def encode(self, text):
        return [3 + self.letters.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(self.letters[i - 3] for i in ids if i >= 3)

    pad_id, bos_id, eos_id = (lambda _, i=i: i for i in range(3))


def make():
    """Returns a random Gemma of two layers."""
    config = gemma.ModelConfig(
        num_layers=2,
        num_embed=32,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(gemma.AttentionType.GLOBAL,) * 2,
    )
    return gemma.Gemma(config, rngs=nnx.Rngs(0))


def adapters(model):
    """Returns the shapes of the adapters, by path."""
    return {path: x.shape for path, x in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}


def size(model):
    """Returns the bytes of all variables."""
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))


def cosine(x, y):
    """Returns the cosine of two arrays."""
    return float(jnp.vdot(x, y) / jnp.linalg.norm(x) / jnp.linalg.norm(y))


def batch_of(sentence):
    """Returns a batch that repeats a sentence."""
    tokens = np.array([[1, *Letters().encode(sentence), 2]] * 4, np.int32)
    return peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))


def model_inputs(batch):
    """Returns what the loss of tunix passes to the model."""
    mask = batch.input_mask
    positions, attention = utils.build_positions_from_mask(mask), utils.make_causal_attn_mask(mask)
    arrays = {"input_tokens": batch.input_tokens, "input_mask": mask}
    return {**arrays, "positions": positions, "attention_mask": attention}


def trainer(model, folder=None):
    """Returns the trainer of tunix, which restores what the folder has."""
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, max_steps=60, checkpoint_root_directory=folder
    )
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-2), config)
    return trainer.with_gen_model_input_fn(model_inputs)


# A float model.
plain = make()
trainer(plain).train([batch_of(OLD)] * 60)

# Add adapters to a model in 4 bits.
inputs = plain.get_model_input()
exact, _ = plain(**inputs)
rules = {ADAPTED: jqx.nnx.LoRA(rank=4, alpha=8.0)}
model = jqx.nnx.apply_lora(nnx.clone(plain), rules, base="nf4:group=16", **inputs)
logits, _ = model(**inputs)

provider = qwix.LoraProvider(
    module_path=ADAPTED, rank=4, alpha=8.0, weight_qtype="nf4", tile_size=16
)
theirs = qwix.apply_lora_to_model(nnx.clone(plain), provider, rngs=nnx.Rngs(0), **inputs)
print(f"{len(adapters(model)) // 2} sites with adapters, with Qwix {len(adapters(theirs)) // 2}")
print(f"{size(plain):,} bytes become {size(model):,}, with Qwix {size(theirs):,}")
other, _ = theirs(**inputs)
print(f"cosine to float {cosine(logits, exact):.6f}, to Qwix {cosine(logits, other):.6f}")
assert adapters(model) == adapters(theirs) and size(model) <= size(theirs)
assert jnp.allclose(logits, other, atol=1e-6)

# Train and save them with tunix.
batch = batch_of(NEW)
with tempfile.TemporaryDirectory() as folder:
    training = trainer(model, folder)
    before = float(training.loss_fn(model, **model_inputs(batch)))
    training.train([batch] * 60)
    training.close()
    after = float(training.loss_fn(model, **model_inputs(batch)))
    print(f"loss {before:.2f} becomes {after:.2f}")
    restored = jqx.nnx.apply_lora(nnx.clone(plain), rules, base="nf4:group=16", **inputs)
    trainer(restored, folder).close()
    trained, _ = model(**inputs)
    assert after < 0.3 * before and (restored(**inputs)[0] == trained).all()


# Generate on codes, and merge the adapters into float weights.
def generate(model):
    """Returns what the sampler of tunix appends."""
    cache = CacheConfig(cache_size=32, num_layers=2, num_kv_heads=1, head_dim=16)
    return Sampler(model, Letters(), cache)([NEW[:6]], max_generation_steps=17).text[0]


model.set_attributes(mode=jqx.nnx.Mode.CONVERT)
merged = jqx.nnx.merge_lora(model)
near, text = cosine(merged(**inputs)[0], trained), generate(model)
print(f"{NEW[:6]!r} goes on with {text!r}; cosine of the merged model {near:.6f}")
assert generate(merged) == text
assert near > 0.99999 and type(merged) is gemma.Gemma and not adapters(merged)
print("Claims hold: tunix trains, saves and samples jqx's adapters.")
