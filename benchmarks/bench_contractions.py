"""How fast are quantized contractions beside XLA's float32 and the peers, on the CPU?

    python benchmarks/bench_contractions.py [--only decode] [--seconds 600] [--json PATH] [--quick]

All variants of a case take turns in one process. "x float32" divides by XLA's float32 contraction
of the same shape within each round (for one row, by the faster of the weight as [K,N] and [N,K]);
"p10" columns are 10th percentiles, and ratios of them. "error" is the result's relative distance
from XLA's float32 (Frobenius norm); a variant that is far off is left out as wrong. "x floor"
divides by the fastest bare variant: integer products without an epilogue, and for one row and for
depthwise kernels the time to read the bytes they need, cached as they are.

"[K,N]" is a QTensor as quantized, "pack_for" is laid out by `q.pack_for("cpu")`, "packed" holds
nibbles. Weights have one scale a channel or one a block. Every peer gets as many threads as XLA.
`--quick` takes each path once at sizes that mean nothing, and judges nothing.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _contraction_peers import Factory, peers
from _contraction_problems import Attention, Conv, NotAvailable, Problem, Product, Variant
from _contraction_variants import jax_variants
from _harness import (
    Call,
    ForeignLoad,
    Timing,
    environment,
    interleave,
    print_environment,
    print_table,
    threads,
    write_json,
)

BASE = "XLA float32"
NOISE = 1.05  # "no slower than qwix" allows 5 % of noise: XLA may be given the very same program
QUIET_CORES = 0.3  # foreign load above this and the numbers are not to be trusted
HEAD = ("variant", "ms", "p10 ms", "x float32", "x float32 p10", "x floor", "error", "rounds")


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem with its goal.

    Attributes:
      judged: the forms of jqx that have goals.
      bound: at most this times the base; `None` where there is no such goal.
      base: a library, of which the fastest counts, or one variant.
    """

    group: str
    problem: Problem
    judged: tuple[str, ...] = ("[K,N]",)
    bound: float | None = None
    base: str = BASE

    def __str__(self) -> str:
        return f"{self.group}: {self.problem}"

    @property
    def qwix_bound(self) -> float:
        return 0.5 if isinstance(self.problem, Product) and self.problem.m == 1 else NOISE


WEIGHTS = (768, 3072), (1024, 1024), (1024, 4096)
SMALL = (
    *((16, 16, 16), (16, 32, 32), (16, 64, 64), (32, 64, 64), (16, 128, 128), (32, 128, 128)),
    *((1, 1024, 1024), (4, 512, 512), (16, 256, 256), (64, 128, 128), (128, 128, 128)),
    *((16, 512, 512), (128, 256, 256)),
)
LARGE_ENOUGH = 2**20  # products from which W8A8 must not be slower than float32
WEIGHT_ONLY = {  # bits and block: the forms judged, and the bound for one row
    (8, None): (("pack_for",), 0.52),
    (4, 32): (("pack_for", "packed along N"), 0.92),
    (4, 128): (("pack_for", "packed along N"), 0.92),
}


def all_cases() -> Iterator[Case]:
    for m in (16, 128, 1024):
        for k, n in WEIGHTS:
            yield Case("static", Product(m, k, n), bound=0.68)
    for m, k, n in SMALL:
        bound = 1.0 if m * k * n >= LARGE_ENOUGH else None
        yield Case("small", Product(m, k, n), bound=bound)
    for k, n in WEIGHTS:
        yield Case("dynamic", Product(128, k, n, "dynamic"), bound=0.75)
    for k, n in WEIGHTS:
        problem = Product(128, k, n, "asymmetric")
        forms = ("int8 zero points", "uint8 zero points, pack_for", "uint8 zero points")
        yield Case("asymmetric", problem, forms, 1.15, "jqx, symmetric")
    for m in (1, 4, 16, 128):
        for (bits, block), (forms, bound) in WEIGHT_ONLY.items():
            problem = Product(m, 4096, 4096, "weight-only", bits, block)
            if m == 1:
                yield Case("decode", problem, forms, bound)
            else:
                yield Case("weight-only", problem, forms)
    for scheme in ("static", "dynamic"):
        yield Case("decode", Product(1, 4096, 4096, scheme), ("[K,N]", "pack_for"))
    yield Case("conv", Conv(8, 28, 128, 3), ("",), 0.72)
    yield Case("conv", Conv(8, 14, 256, 1), ("",), 0.45)
    yield Case("conv", Conv(8, 56, 64, 3, depthwise=True), ("",), 0.03)
    yield Case("attention", Attention(), ("float products", "int8 products"), 0.85)


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of one case, by variant; `absent` says why a variant is not there."""

    case: Case
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]
    absent: Mapping[str, str]
    foreign_cores: float | None

    def fastest(self, base: str) -> str | None:
        """Returns the fastest variant of a library; a variant's own name is taken too."""
        found = [name for name in self.timings if name == base or name.startswith(f"{base}, ")]
        return min(found, key=lambda name: self.timings[name].median, default=None)

    @property
    def floor(self) -> str | None:
        bare = [name for name in self.timings if name not in self.errors]
        return min(bare, key=lambda name: self.timings[name].median, default=None)

    def ratios(self, name: str, base: str | None) -> tuple[float, float] | None:
        """Returns the ratio within the rounds, and that of the 10th percentiles."""
        time, other = self.timings.get(name), self.timings.get(base or "")
        return (time.ratio(other), time.quiet_ratio(other)) if time and other else None

    def records(self) -> Iterator[dict[str, Any]]:
        base, floor = self.fastest(BASE), self.floor
        for name, timing in self.timings.items():
            to_base, to_floor = self.ratios(name, base), self.ratios(name, floor)
            yield {
                "case": str(self.case),
                "variant": name,
                "median_ms": timing.median * 1e3,
                "p10_ms": timing.p10 * 1e3,
                "to_float32": to_base and to_base[0],
                "p10_to_float32": to_base and to_base[1],
                "to_floor": to_floor and to_floor[0],
                "error": self.errors.get(name),
                "rounds": timing.rounds,
                "foreign_cores": self.foreign_cores,
            }
        for name, why in self.absent.items():
            yield {"case": str(self.case), "variant": name, "absent": why}

    def goals(self) -> Iterator[dict[str, Any]]:
        """Yields the goals of each judged form: beside the base, and beside qwix."""
        for form in self.case.judged:
            name = f"jqx, {form}" if form else "jqx"
            if self.case.bound is not None:
                named = self.case.base in self.timings
                base = self.case.base if named else self.fastest(self.case.base) or self.case.base
                yield self._goal(name, base, self.case.bound)
            same = f"qwix, {form}".removesuffix(", pack_for")
            peer = same if same in {*self.timings, *self.absent} else "qwix"
            yield self._goal(name, peer, self.case.qwix_bound)

    def _goal(self, name: str, base: str, bound: float) -> dict[str, Any]:
        goal = {"case": str(self.case), "goal": f"{name} / {base}, at most {bound}"}
        if (ratios := self.ratios(name, base)) is None:
            return goal | {"verdict": "not measured"}
        verdict = "met" if ratios[0] <= bound else "MISSED"
        return goal | {"verdict": verdict, "ratio": ratios[0], "p10_ratio": ratios[1]}


def measure(case: Case, factories: Iterable[Factory], seconds: float) -> Result:
    arrays = case.problem.arrays()
    variants = [v for factory in factories for v in factory(case.problem, *arrays)]
    calls, errors, absent = prepare(variants, case.problem.tolerance)
    load = ForeignLoad()
    timings = interleave(calls, seconds)
    return Result(case, timings, errors, absent, load.cores())


def prepare(
    variants: list[Variant], tolerance: float
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """Returns the calls that work, the errors of their results, and why the others do not."""
    calls, errors, absent = {}, {}, {}
    expected: np.ndarray | None = None
    for variant in variants:
        try:
            call = variant.make()
            result = call()
            if not variant.bare:
                y = np.asarray(variant.read(result), np.float64)
                expected = y if expected is None else expected
                errors[variant.name] = error = relative_error(y, expected)
                if not error <= tolerance:
                    raise NotAvailable(f"wrong result, relative error {error:.2g}")
        except Exception as error:  # a library may raise anything; what it says is printed
            errors.pop(variant.name, None)
            absent[variant.name] = reason(error)
        else:
            calls[variant.name] = call
    return calls, errors, absent


def relative_error(y: np.ndarray, expected: np.ndarray) -> float:
    if y.shape != expected.shape:
        raise NotAvailable(f"wrong result, of shape {y.shape}")
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


def reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:160]
    return text if isinstance(error, NotAvailable) else f"{type(error).__name__}: {text}"


def print_result(result: Result, judge: bool) -> None:
    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    print(f"\n{result.case}; floor: {result.floor}")
    records = [record for record in result.records() if "absent" not in record]
    keys = [key for key in records[0] if key not in ("case", "foreign_cores")]
    print_table(HEAD, [[cell(record[key]) for key in keys] for record in records])
    for name, why in result.absent.items():
        print(f"not available: {name}: {why}")
    if judge:
        for goal in result.goals():
            print(f"{goal['verdict']}: {text_of(goal)}")
    print_load(result.foreign_cores)


def text_of(goal: Mapping[str, Any]) -> str:
    measured = f": {goal['ratio']:.2f}, of p10 {goal['p10_ratio']:.2f}" if "ratio" in goal else ""
    return goal["goal"] + measured


def print_load(cores: float | None, always: bool = False) -> None:
    if cores is None:
        if always:
            print("the load of other processes is not known here")
    elif cores > QUIET_CORES:
        print(f"NOT TO BE TRUSTED: other processes kept {cores:.2f} of {threads()} cores busy")
    elif always:
        print(f"other processes kept {cores:.2f} of {threads()} cores busy meanwhile")


def print_break_even(results: Iterable[Result]) -> None:
    """Prints from which size on W8A8 is no slower than float32, of the sizes measured."""
    found = []
    for result in results:
        p, base = result.case.problem, result.fastest(BASE)
        if result.case.group == "small" and isinstance(p, Product):
            if (ratios := result.ratios("jqx, [K,N]", base)) is not None:
                found.append((p.m * p.k * p.n, ratios[0]))
    if not found:
        return
    slow = max((size for size, ratio in found if ratio > 1), default=0)
    fast = min((size for size, _ in found if size > slow), default=None)
    where = f"from M*K*N = {fast} = 2**{np.log2(fast):.1f} on" if fast else "at no size measured"
    print(f"small products, W8A8 static: no slower than float32 {where}")


def selected(only: str | None, quick: bool) -> list[Case]:
    cases = list(all_cases())
    if quick:
        cases = [dataclasses.replace(case, problem=case.problem.tiny()) for case in cases]
    named = {str(case): case for case in cases}  # tiny ones are alike
    return [case for name, case in named.items() if only is None or only in name]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="the cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=600, help="of measuring, for all cases")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="every path once, at tiny sizes")
    args = parser.parse_args()
    if not (cases := selected(args.only, args.quick)):
        names = "\n".join(map(str, selected(None, args.quick)))
        parser.error(f"no case holds {args.only!r}; there are\n{names}")
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")  # torch deprecates its quantized tensors
    facts = environment()
    print_environment(facts)
    factories: list[Factory] = [jax_variants]
    for name, factory, settings in peers():
        print(f"{name}: {settings}")
        facts[name] = settings
        factories += [factory] if factory else []
    seconds = 0 if args.quick else args.seconds / sum(1 for _ in all_cases())
    load, results = ForeignLoad(), []
    for case in cases:
        results.append(measure(case, factories, seconds))
        print_result(results[-1], judge=not args.quick)
    facts["foreign_load_cores"] = load.cores()
    records = [record for result in results for record in result.records()]
    goals = [goal for result in results for goal in result.goals()]
    print()
    if args.quick:
        print("quick: sizes that mean nothing; no goal is judged")
    else:
        print_break_even(results)
        for verdict in ("met", "MISSED", "not measured"):
            those = [goal for goal in goals if goal["verdict"] == verdict]
            print(f"{verdict}: {len(those)} of {len(goals)} goals")
            for goal in those if verdict != "met" else []:
                print(f"  {goal['case']}: {text_of(goal)}")
    print_load(facts["foreign_load_cores"], always=True)
    if args.json:
        write_json(args.json, facts | ({} if args.quick else {"goals": goals}), records)


if __name__ == "__main__":
    main()
