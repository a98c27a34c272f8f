"""How far are the elementwise ops from the memory floor and from their peers, on the CPU?

    python benchmarks/bench_ops.py [--elements 4 64] [--seconds 270] [--json PATH]

float32 to int8 and back, per tensor and per channel (last axis), at 4 Mi and 64 Mi elements, beside
qwix, torch and onnxruntime where they are installed. The dynamic ops go from the array to range,
scale and codes in one call.

Unmarked variants return a new array. "donated" ones write over their argument and "bound" ones into
a buffer that is there: from 32 MiB on (less in a fragmented heap) the C library maps every new
result afresh, and its page faults cost more than the arithmetic.

The floor is the bytes an op must read and write, at the bandwidth of `copyto` in the same rounds:
the faster of one thread and all threads, into a destination that is there. The dynamic ops read
their input twice. "x copyto" divides by one thread, "x peer" by the fastest variant of another
library.
"""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from _harness import (
    ForeignLoad,
    Timing,
    environment,
    interleave,
    print_environment,
    print_table,
    threads,
    write_json,
)
from _op_variants import (
    PEERS,
    copy_variants,
    jqx_variants,
    make_problem,
    peers,
    reciprocal_variants,
)

BYTES = {  # read and written per element
    "quantize": 5,
    "dequantize": 5,
    "fake quantize": 8,
    "dynamic symmetric": 9,
    "dynamic asymmetric": 9,
}
COPY_BYTES = 8
JAX_PEERS = ("qwix",)
NOISE = 1.05  # "no slower" allows 5 % of noise
HEAD = ("Mi", "op", "per", "variant", "ms", "p10 ms", "x copyto", "x floor", "x peer", "rounds")


@dataclass(frozen=True)
class Result:
    """The timings of one op, by variant; a variant is named after its library and its form."""

    mebi: int
    op: str
    per: str
    timings: dict[str, Timing]

    def fastest(self, *libraries: str, donated: bool | None = None) -> Timing | None:
        """Returns the fastest timing of these libraries, among the (not) donated ones if given."""
        found = [
            timing
            for name, timing in self.timings.items()
            if name.partition(" ")[0].rstrip(",") in libraries
            if donated in (None, is_donated(name))
        ]
        return min(found, key=lambda timing: timing.median, default=None)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields one record per variant; its ratios are medians over the rounds."""
        copy, peer = self.fastest("numpy"), self.fastest(*PEERS)
        for name, timing in self.timings.items():
            yield {
                "mebi_elements": self.mebi,
                "op": self.op,
                "per": self.per,
                "variant": name,
                "median_ms": timing.median * 1e3,
                "p10_ms": timing.p10 * 1e3,
                "to_copyto": timing.ratio(self.timings["numpy copyto"]),
                "to_floor": timing.ratio(copy) * COPY_BYTES / BYTES[self.op] if copy else None,
                "to_peer": timing.ratio(peer) if peer else None,
                "rounds": timing.rounds,
            }


def is_donated(variant: str) -> bool:
    return variant.endswith(", donated")


def measured_goals(results: list[Result]) -> Iterator[dict[str, Any]]:
    """Yields each goal with the ratio measured: that of the worse granularity."""
    for mebi in dict.fromkeys(result.mebi for result in results):
        at = [result for result in results if result.mebi == mebi]
        for name in dict.fromkeys(name for r in at for name in r.timings if name.startswith("jqx")):
            pairs = [
                (r.timings[name], peer)
                for r in at
                if name in r.timings
                if (peer := r.fastest(*JAX_PEERS, donated=is_donated(name)))
            ]
            yield _goal(f"{mebi} Mi: {name} / fastest JAX peer", pairs, "at most", NOISE)
    for name in ("jqx quantize_dequantize, donated", "jqx fake_quantize, donated"):
        pairs = [
            (r.timings["torch"], r.timings[name])
            for r in results
            if r.mebi == 64 and name in r.timings and "torch" in r.timings
        ]
        yield _goal(f"64 Mi: torch fake quantize / {name}", pairs, "at least", 10)
    pairs = [
        (r.timings["jqx quantize"], r.timings["jnp reciprocal"])
        for r in results
        if r.mebi == 4 and r.op == "quantize"
    ]
    yield _goal("4 Mi: jqx quantize, which is exact / reciprocal form", pairs, "at most", 1.25)


def _goal(text: str, pairs: list[tuple[Timing, Timing]], sense: str, bound: float) -> dict:
    goal = {"goal": f"{text}, {sense} {bound}", "verdict": "not measured"}
    if not pairs:
        return goal
    worst = max if sense == "at most" else min
    time, other = worst(pairs, key=lambda pair: pair[0].ratio(pair[1]))
    ratio = time.ratio(other)
    met = ratio <= bound if sense == "at most" else ratio >= bound
    verdict = "met" if met else "missed"
    return goal | {"verdict": verdict, "ratio": ratio, "p10_ratio": time.quiet_ratio(other)}


def print_records(records: list[dict[str, Any]]) -> None:
    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    print_table(HEAD, [[cell(value) for value in record.values()] for record in records])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[4, 64], metavar="MEBI")
    parser.add_argument("--seconds", type=float, default=270, help="of measuring, in all")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")  # torch deprecates its quantized tensors
    facts = environment()
    print_environment(facts)
    print(f"torch and onnxruntime are given {threads()} threads, as many as XLA takes")
    factories = [copy_variants, jqx_variants, reciprocal_variants, *peers()]
    cases = [(n, op, per) for n in args.elements for op in BYTES for per in ("tensor", "channel")]
    results, load = [], ForeignLoad()
    for mebi, op, per in cases:
        problem = make_problem(mebi, per)
        variants = {name: call for f in factories for name, call in f(op, problem)}
        results.append(Result(mebi, op, per, interleave(variants, args.seconds / len(cases))))
    facts["foreign_load_cores"] = load.cores()
    records = [record for result in results for record in result.records()]
    goals = list(measured_goals(results))
    print()
    print_records(records)
    if (cores := facts["foreign_load_cores"]) is not None:
        print(f"\nother processes kept {cores:.2f} of {threads()} cores busy meanwhile")
    print("goals, as the ratio in the worse granularity:")
    for goal in goals:
        measured = (
            f": {goal['ratio']:.2f}, of p10 {goal['p10_ratio']:.2f}" if "ratio" in goal else ""
        )
        print(f"{goal['verdict']}: {goal['goal']}{measured}")
    if args.json:
        write_json(args.json, facts | {"goals": goals}, records)


if __name__ == "__main__":
    main()
