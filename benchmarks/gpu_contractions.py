"""What do quantized contractions cost beside bfloat16, on one NVIDIA H200?

    python benchmarks/gpu_contractions.py [--seconds 450] [--groups prefill decode] [--match TEXT]
    python benchmarks/gpu_contractions.py --check       no GPU: compiles for one that is not there
    python benchmarks/gpu_contractions.py --cpu-smoke   no GPU: a few tiny rows on the CPU

Each row is a variant at a shape MxKxN: plain JAX, as one would write it by hand, or jqx, which
chooses for itself; "NT" weights are stored [N, K], "NN" weights [K, N], packed ones are NN weights
after `pack_for("gpu")`. Operands are random and as many as no cache holds; a time is the median of
10 calls after 3, or of those that fit into 5 seconds, per contraction. Rows whose time would not
fit into `--seconds` are not started, and named: the groups take turns, the most telling shapes
first. XLA's autotuner is on.

    x bf16     bfloat16 time / time, at the same shape
    x best     time / time of the fastest variant of the same scheme, at the same shape
    of floor   the least time / time: operations at 989 TFLOP/s (bfloat16) or 1979 (int8, float8),
               or bytes, read and written once, at 4.3 TB/s, whichever is more
    error      of a corner, to float64
    temp       MiB of memory beside arguments and results
    kernels    launched per contraction
    HLO        what XLA made of it: an implementation and the types that it multiplies; "writes W"
               where weights are widened or copied in memory first

`--check` needs the CUDA plugin of the installed jax, not its libraries: `pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt`. It compiles with the autotuner off: which library multiplies may
differ on a device, what is fused and which types are multiplied does not.
"""

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
from _gpu_class import classify, launches
from _gpu_program import Floor, abstract_arguments, arguments, error, program
from _gpu_rows import BASELINE, GROUPS, PREFILL_SHAPES, SMOKE, Gemm, Group, Row, rows
from _gpu_torch import TORCH, TorchVariant, reason_without_torch
from _harness import environment, print_environment, print_table, write_json

from jqx._src.diagnostics import lowering as targets
from jqx._src.diagnostics.hlo import Program

START = time.perf_counter()
WARM, REPETITIONS, CALLS_SECONDS = 3, 10, 5
NOISE = 1.05

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A row to be run; `place` is its group and shape."""

    place: str
    variant: str
    run: Callable[[], Record]


COLUMNS = {  # head: how a record is shown
    "group": lambda r: r["group"],
    "shape": lambda r: r["shape"],
    "variant": lambda r: r["variant"],
    "ms": lambda r: _number(r["ms"], 4),
    "x bf16": lambda r: _number(r["speedup"], 2),
    "x best": lambda r: _number(r["to_best"], 2),
    "rate": lambda r: r["rate"] or "-",
    "of floor": lambda r: _number(r["of_floor"], 2),
    "error": lambda r: "-" if r["error"] is None else f"{r['error']:.1e}",
    "temp": lambda r: _number(r["temp_mib"], 0),
    "kernels": lambda r: _number(r["kernels"], 1),
    "HLO": lambda r: r["hlo"],
}
GOALS = (  # of which rows, field, bound
    (r"prefill 8192x8192x8192 jqx (int8|fp8) packed", "speedup", ">=", 1.5),
    (r"dynamic \S+ jqx dynamic int8", "speedup", ">=", 1.3),
    (r"quantize \S+ jqx rows to int8", "of_floor", ">=", 0.7),
    (r"decode (1|4|8|16)x\S+ jqx W8 packed", "speedup", ">=", 1.6),
    (r"decode (1|4|8|16)x\S+ jqx W8 packed", "of_floor", ">=", 0.7),
    (r"decode (1|4|8|16)x\S+ jqx W4 packed", "speedup", ">=", 2.2),
    (r"decode (1|4|8|16)x\S+ jqx W4 packed", "of_floor", ">=", 0.55),
    (r"epilogue \S+ int8 -> (scales|relu).*", "to_best", "<=", 1.05),
    (r"epilogue \S+ int8 -> s32", "error", "<=", 0),
    (r"conv \S+ jqx int8", "speedup", ">=", 1.2),
    (r"\S+ \S+ jqx .*(packed|dynamic int8|rows to int8)", "to_best", "<=", NOISE),
)


def record(group: str, shape: Any, variant: str, scheme: str, **fields: Any) -> Record:
    names = ("ms", "rate", "of_floor", "error", "temp_mib", "kernels", "speedup", "to_best")
    empty = dict.fromkeys(names) | {"hlo": "", "layers": None, "rounds": None}
    return {"group": group, "shape": str(shape), "variant": variant, "scheme": scheme} | (
        empty | fields
    )


def measure(row: Row, sharding: Any = None) -> Record:
    """Compiles a row, for the device of `sharding` where one is given, else runs it as well."""
    v = row.variant
    made = partial(record, row.group, row.shape, v.name, v.scheme, layers=row.layers)
    if not v.available:
        return made(hlo=f"not available: jqx has no {v.needs}")
    stage = "operands"
    try:
        if sharding is None:
            keys = jax.random.split(jax.random.key(0), row.layers)
            layers = [row.operands(key) for key in keys]
            given = arguments(row, layers)
        else:
            layers = [jax.eval_shape(row.operands, jax.random.key(0))]
            given = abstract_arguments(row, sharding)
        stage = "compile"
        floor = Floor.of(row, (layers[0], jax.eval_shape(row.run, *layers[0])))
        rounds = floor.rounds(row.layers)
        options: Any = None if sharding is None else targets.TARGETS["h200"].options
        run = jax.jit(program(row, rounds)).lower(*given).compile(compiler_options=options)
        fields = {"rounds": rounds} | describe(run, row, rounds)
        if sharding is not None:
            return made(**fields)
        stage = "run"
        runs = rounds * row.layers
        seconds = time_of(lambda: jax.block_until_ready(run(*given))) / runs
        x, w = layers[0]
        y = run(*given)[0]
        return made(
            **fields,
            **rates(floor, seconds),
            error=None if row.stacked else error(row, x, w, y),
        )
    except Exception as problem:  # whatever a compiler raises is this row's result
        text = " ".join(str(problem).split())[:160]
        return made(hlo=f"{stage} error: {type(problem).__name__}: {text}")


def describe(run: Any, row: Row, rounds: int) -> Record:
    """Returns what the compiler says of a program."""
    read = Program.parse(run.as_text())
    memory = run.memory_analysis()
    return {
        "hlo": classify(read, "ws", row.weight_size),
        "kernels": launches(read) / (rounds * row.layers),
        "temp_mib": None if memory is None else memory.temp_size_in_bytes / 2**20,
    }


def rates(floor: Floor, seconds: float) -> Record:
    per_second = floor.operations / 1e12 if floor.is_arithmetic else floor.bytes / 1e9
    unit = "TFLOP/s" if floor.is_arithmetic else "GB/s"
    return {
        "ms": seconds * 1e3,
        "rate": f"{per_second / seconds:.0f} {unit}",
        "of_floor": floor.seconds / seconds,
    }


def time_of(call: Callable[[], object]) -> float:
    """Returns the median seconds of a call that returns when its work is done."""
    taken: list[float] = []
    while len(taken) < WARM + REPETITIONS and sum(taken) < CALLS_SECONDS:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARM:] or taken[-1:])


def measure_torch(shape: Gemm, variant: TorchVariant, layers: int) -> Record:
    """Times torch at a shape; its peak is that of jax's variants of the scheme."""
    m, k, n = shape.m, shape.k, shape.n or 0
    made = partial(record, "prefill", shape, variant.name, variant.scheme, hlo="torch")
    try:
        seconds = time_of(variant.call(m, k, n, layers)) / layers
    except Exception as problem:  # likewise
        return made(hlo=f"run error: {type(problem).__name__}: {problem}")
    peak = next(v.peak for v in GROUPS["prefill"].variants if v.scheme == variant.scheme)
    moved = variant.operand_bytes * (m + n) * k + variant.result_bytes * m * n
    return made(layers=layers, rounds=1, **rates(Floor(shape.operations, moved, peak), seconds))


def torch_tasks(groups: Mapping[str, Group]) -> Iterator[Task]:
    """Yields torch's rows, at the prefill shapes."""
    if reason := reason_without_torch():
        print(f"torch is left out: {reason}")
    elif "prefill" in groups:
        for shape in PREFILL_SHAPES:
            for variant in TORCH:
                run = partial(measure_torch, shape, variant, groups["prefill"].layers)
                yield Task(f"prefill {shape}", variant.name, run)


def run_within(
    tasks: Sequence[Task],
    seconds: float,
    clock: Callable[[], float],
    done: Callable[[list[Record]], None] = lambda records: None,
) -> tuple[list[Record], list[Task]]:
    """Runs tasks while there is time for one more as long as the longest.

    Args:
      tasks: what to run, in order.
      seconds: when the last must have ended, on the clock.
      clock: returns the seconds since the start.
      done: called with the records so far after each.

    Returns:
      The records, and the tasks that were not started.
    """
    records: list[Record] = []
    longest = 0.0
    for index, task in enumerate(tasks):
        start = clock()
        if start + longest > seconds:
            return records, list(tasks[index:])
        records.append(task.run())
        longest = max(longest, clock() - start)
        done(records)
    return records, []


def compare(records: list[Record]) -> None:
    """Adds the ratios to bfloat16, and to the best of the same scheme, at the same shape."""
    timed = [r for r in records if r["ms"] is not None]
    for r in timed:
        beside = [o for o in timed if (o["group"], o["shape"]) == (r["group"], r["shape"])]
        r["to_best"] = r["ms"] / min(o["ms"] for o in beside if o["scheme"] == r["scheme"])
        for base in (o for o in beside if o["variant"] == BASELINE):
            r["speedup"] = base["ms"] / r["ms"]


def goals(records: list[Record]) -> Iterator[str]:
    """Yields each goal at each row that it speaks of."""
    for pattern, field, sign, bound in GOALS:
        for r in records:
            name = f"{r['group']} {r['shape']} {r['variant']}"
            if r[field] is not None and re.fullmatch(pattern, name):
                met = r[field] >= bound if sign == ">=" else r[field] <= bound
                verdict = "met" if met else "MISSED"
                yield f"{verdict}: {name}: {field} {sign} {bound}: {r[field]:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def device_of_target() -> jax.sharding.Sharding:
    """Returns a place on an H200 that need not be there."""
    try:
        return targets.sharding_on("gpu_contractions --check", "h200")
    except (ImportError, RuntimeError) as problem:
        sys.exit(str(problem))


def order_of(groups: Mapping[str, Group]) -> Callable[[Record], tuple[int, int]]:
    """Returns the key that sorts records by group and shape, as the groups list them."""
    names = list(groups)
    shapes = {name: [str(shape) for shape in group.shapes] for name, group in groups.items()}
    return lambda r: (names.index(r["group"]), shapes[r["group"]].index(r["shape"]))


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compile every row, without a GPU")
    mode.add_argument("--cpu-smoke", action="store_true", help="run a few tiny rows on the CPU")
    seconds = "for all rows and start-up; 450, and without a GPU no limit"
    parser.add_argument("--seconds", type=float, help=seconds)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--match", default="", help="only rows whose name this regex finds")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    if args.seconds is None:
        args.seconds = math.inf if args.check or args.cpu_smoke else 450
    return args


def main() -> None:
    args = arguments_given()
    if args.check or args.cpu_smoke:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit("There is no GPU here: pass --check to compile for one, or --cpu-smoke.")
    groups = SMOKE if args.cpu_smoke else {name: GROUPS[name] for name in args.groups}
    sharding = device_of_target() if args.check else None
    facts = environment() | {
        "runtime": jax.devices()[0].client.platform_version,
        "compiled_for": "an NVIDIA H200 that is not there" if args.check else "this device",
    }
    print_environment(facts)
    tasks = [
        Task(f"{row.group} {row.shape}", row.variant.name, partial(measure, row, sharding))
        for row in rows(groups)
    ]
    if not (args.check or args.cpu_smoke):
        tasks += torch_tasks(groups)
    places = [task.place for task in tasks]
    tasks.sort(key=lambda task: places.index(task.place))  # torch beside jax
    tasks = [task for task in tasks if re.search(args.match, f"{task.place} {task.variant}")]

    def done(records: list[Record]) -> None:
        """Keeps what there is: a compiler that aborts takes the process along."""
        last = records[-1]
        elapsed, name = time.perf_counter() - START, "{group} {shape} {variant}".format(**last)
        print(f"{elapsed:6.1f} s  {name}: {last['ms']} ms, {last['hlo']}", file=sys.stderr)
        if args.json:
            write_json(args.json, facts, records)

    records, dropped = run_within(tasks, args.seconds, lambda: time.perf_counter() - START, done)
    records.sort(key=order_of(groups))
    compare(records)
    print()
    if records:
        print_table(list(COLUMNS), [[show(r) for show in COLUMNS.values()] for r in records])
        print()
    for place, left in groupby(dropped, lambda task: task.place):
        names = ", ".join(task.variant for task in left)
        print(f"not started, {args.seconds:.0f} s are spent: {place}: {names}")
    print(*goals(records), sep="\n")
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
