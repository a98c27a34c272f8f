"""How near to float does each algorithm bring a quantized model, and how long does it take?

    python benchmarks/bench_algorithms.py [--models smollm2 minilm lite0] [--only ROW ...]
        [--json PATH] [--list]

The pretrained models of `examples/smollm2.py` (perplexity of 8 x 512 tokens of Python's manual,
8 x 512 others to calibrate), `examples/minilm.py` (mean and least cosine of 256 paragraphs, 64
others to calibrate) and `examples/efficientnet.py` (how many of 104 crops are told as float tells
them, 96 others to calibrate). Linear layers and convolutions are quantized, tables are not.

`--only` names rows, such as "w4a16, default". What is measured is written to `--json` row by row,
beside what is there, and the table is printed from all of it: rows may be measured one at a time.
"default" is `jqx.ptq` without an algorithm. Seconds are those of `ptq`, with what it compiles.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _harness import (
    ForeignLoad,
    environment,
    print_environment,
    print_table,
    read_records,
    write_json,
)

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import jqx
from jqx.algorithms import (
    adaround,
    auto_round,
    awq,
    bias_correction,
    chain,
    equalize,
    gptq,
    nearest,
    rotate,
    smooth_quant,
)

Rows = dict[str, dict[str, Any]]
"""Algorithms by name, by scheme."""

Judge = Callable[[jqx.Policy, Any], tuple[float, dict[str, float]]]
"""Returns the seconds that it takes to quantize, and how near that is to float."""

PRESETS = jqx.presets
QEP = gptq(propagation="qep")
CORRECTED = bias_correction(weight=lambda tokens, mask: mask)
PLAIN = {"nearest": nearest(), "default": None}
OF_PRESETS = {
    "w4a16": PRESETS.w4a16(),
    "w8a8": PRESETS.w8a8(),
    "w8a8_dynamic": PRESETS.w8a8_dynamic(),
    "w4a8": PRESETS.w4a8(),
    "w4a4": PRESETS.w4a4(),
    "nf4": PRESETS.nf4(),
    "fp8": PRESETS.fp8(),
    "mxfp8": PRESETS.mxfp8(),
}
POLICIES = OF_PRESETS | {
    "W4 g128": jqx.Policy({".*": "int4:group=128:asymmetric"}),
    "W3 g128": jqx.Policy({".*": "int3:group=128:asymmetric"}),
    "W2 g64": jqx.Policy({".*": "int2:group=64:asymmetric"}),
    "W4A8 g128": jqx.Policy([jqx.Rule(weight="int4:group=128", activation="int8:token:dynamic")]),
    "MXFP4": jqx.Policy([jqx.Rule(weight="mxfp4", activation="mxfp4:dynamic")]),
    "NVFP4": jqx.Policy([jqx.Rule(weight="nvfp4", activation="nvfp4:dynamic")]),
    "W8 per tensor": jqx.Policy({".*": "int8:tensor"}),
    "W8 per channel": jqx.Policy({".*": "int8"}),
    "W4 per channel": jqx.Policy({".*": "int4"}),
}
BY_DEFAULT: Rows = {name: PLAIN for name in OF_PRESETS}
A_TENSOR: Rows = {"W8 per tensor": PLAIN | {"equalized": chain(equalize(), bias_correction())}}
ROWS: dict[str, Rows] = {
    "smollm2": BY_DEFAULT
    | A_TENSOR
    | {
        "W4 g128": {"nearest": nearest(), "awq": awq(), "gptq": gptq(), "gptq qep": QEP},
        "W3 g128": {
            "nearest": nearest(),
            "gptq": gptq(),
            "gptq qep": QEP,
            "auto_round 20": auto_round(steps=20),
        },
        "W2 g64": {"gptq": gptq(), "gptq qep": QEP, "auto_round 20": auto_round(steps=20)},
        "W4A8 g128": {"nearest": nearest(), "gptq qep": QEP},
        "w4a4": PLAIN | {"rotate": rotate(), "rotate, gptq": chain(rotate(), gptq())},
        "MXFP4": PLAIN | {"rotate 32": rotate(block=32)},
        "NVFP4": PLAIN,
    },
    "minilm": BY_DEFAULT
    | A_TENSOR
    | {"w8a8": PLAIN | {"corrected": chain(smooth_quant(), CORRECTED)}},
    "lite0": A_TENSOR
    | {
        "W8 per channel": PLAIN | {"corrected": chain(nearest(), bias_correction())},
        "W4 per channel": PLAIN | {"adaround": adaround()},
    },
}


def smollm2() -> Judge:
    """Returns what judges the language model."""
    import smollm2 as example

    known, model = np.load(example.TOKENS), example.pretrained(example.read_file())
    calibration = list(known["calibration"].reshape(-1, 2, known["calibration"].shape[-1]))

    def judge(policy: jqx.Policy, algorithm: Any) -> tuple[float, dict[str, float]]:
        start = time.perf_counter()
        done = example.quantize(model, policy, algorithm, calibration)
        seconds = time.perf_counter() - start
        rows = known["evaluation"]
        found = example.perplexity(done.function, done.params, model.config, rows)
        return seconds, {"perplexity": found}

    return judge


def minilm() -> Judge:
    """Returns what judges the encoder of sentences."""
    import minilm as example

    params, tokenize, size = example.pretrained(), example.tokenizer(), example.BATCH
    calibration, evaluation = (
        [tokenize(texts[i : i + size]) for i in range(0, len(texts), size)]
        for texts in example.paragraphs()
    )
    floats, _ = example.embed(example.Encoder().apply, params, evaluation)

    def judge(policy: jqx.Policy, algorithm: Any) -> tuple[float, dict[str, float]]:
        start = time.perf_counter()
        apply, weights = example.quantize(params, calibration, policy, algorithm)
        seconds = time.perf_counter() - start
        found, _ = example.embed(apply, jqx.pack_for(weights, "cpu"), evaluation)
        mean, least, *_ = example.judge(floats, found)
        return seconds, {"mean cosine": mean, "least": least}

    return judge


def lite0() -> Judge:
    """Returns what judges the classifier of pictures."""
    import efficientnet as example

    crops, model = json.loads(example.CROPS.read_text()), example.pretrained()
    evaluation, calibration = (
        np.split(images, range(example.BATCH, len(images), example.BATCH))
        for images in (example.pictures(crops[part]) for part in ("evaluation", "calibration"))
    )
    reference = np.array(crops["reference_top1"])

    def judge(policy: jqx.Policy, algorithm: Any) -> tuple[float, dict[str, float]]:
        start = time.perf_counter()
        done = jqx.nnx.ptq(model, policy, algorithm, progress=False)(calibration)
        seconds = time.perf_counter() - start
        call = jax.jit(done.function)
        found = np.concatenate([call(done.params, batch) for batch in evaluation])
        return seconds, {"told alike": float(np.mean(found.argmax(-1) == reference))}

    return judge


MODELS = {"smollm2": smollm2, "minilm": minilm, "lite0": lite0}
MEASURES = {
    "smollm2": "perplexity",
    "minilm": "mean cosine, least",
    "lite0": "told alike",
}
LINEAR = {"smollm2": "blk/.*", "minilm": ".*kernel", "lite0": ".*"}
"""Paths of the weights that are quantized."""


def wanted(models: list[str], only: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields the rows that are asked for: model, scheme, name of the algorithm."""
    for model in models:
        for scheme, algorithms in ROWS[model].items():
            for name in algorithms:
                if not only or f"{scheme}, {name}" in only:
                    yield model, scheme, name


def measured(rows: list[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    """Measures rows one after another, model by model."""
    for model in dict.fromkeys(row[0] for row in rows):
        judge = MODELS[model]()
        for _, scheme, name in (row for row in rows if row[0] == model):
            load = ForeignLoad()
            policy = jqx.Policy({LINEAR[model]: POLICIES[scheme]})
            seconds, found = judge(policy, ROWS[model][scheme][name])
            record = {"model": model, "scheme": scheme, "algorithm": name, "seconds": seconds}
            found = {key: float(x) for key, x in found.items()}
            yield record | {"found": found, "foreign_load_cores": load.cores()}


def main() -> None:
    """Measures what is asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--only", nargs="+", default=[], help="such as 'w4a16, default'")
    parser.add_argument("--json", type=Path, help="what is measured, beside what is there")
    parser.add_argument("--list", action="store_true", help="name the rows, and measure nothing")
    args = parser.parse_args()
    rows = [*wanted(args.models, args.only)]
    if not rows:
        parser.error(f"no row is called {', '.join(args.only)}: --list names them")
    if args.list:
        print("\n".join(f"{model}: {scheme}, {name}" for model, scheme, name in rows))
        return
    facts = environment()
    print_environment(facts)
    key = ("model", "scheme", "algorithm")
    records = [] if args.json is None else read_records(args.json)
    for record in measured(rows):
        records = [x for x in records if any(x[name] != record[name] for name in key)]
        records.append(record)
        print("  ".join(_cells(record)), flush=True)
        if args.json is not None:
            write_json(args.json, facts, records)
    print()
    print_table(*_table(records))


def _table(records: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns a head, and a row for each scheme and algorithm, with what each model has there."""
    known = {(x["scheme"], x["algorithm"], x["model"]): x for x in records}
    rows = dict.fromkeys((scheme, name) for _, scheme, name in wanted([*MODELS], []))
    schemes = [*dict.fromkeys(scheme for scheme, _ in rows)]
    head, table = ["scheme", "algorithm"], []
    for model, measure in MEASURES.items():
        head += [f"{model}: {measure}", "s"]
    for row in sorted(rows, key=lambda row: schemes.index(row[0])):
        cells = [known.get((*row, model)) for model in MODELS]
        if any(cells):
            found = (_cells(x)[-2:] if x else ["", ""] for x in cells)
            table.append([*row, *itertools.chain(*found)])
    return head, table


def _cells(record: dict[str, Any]) -> list[str]:
    """Returns a row of the table."""
    digits = 3 if record["model"] == "smollm2" else 4
    found = ", ".join(f"{x:.{digits}f}" for x in record["found"].values())
    names = [record[name] for name in ("model", "scheme", "algorithm")]
    return [*names, found, f"{record['seconds']:.0f}"]


if __name__ == "__main__":
    main()
