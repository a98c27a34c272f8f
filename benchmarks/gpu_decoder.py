"""What does a whole decoder cost, quantized by jqx, beside bfloat16, on one NVIDIA H200?

    python benchmarks/gpu_decoder.py [--seconds 540] [--match TEXT] [--layers 12]
    python benchmarks/gpu_decoder.py --check       no GPU: compiles for one that is not there
    python benchmarks/gpu_decoder.py --cpu-smoke   no GPU: a tiny decoder on the CPU

12 layers as Llama 3 8B has them: width 4096, a perceptron of 14336, 32 heads of queries, 8 of keys
and values, random weights, a head of 32000 tokens; tables, norms and caches are in bfloat16 in
every scheme. Prefill reads 2048 tokens; a decode reads one token for each of 1, 16 or 64 rows,
beside caches of 512. Weights are arguments of the compiled function, laid out for the device. The
layers are unrolled; in "scan" they are stacked and scanned over, for which XLA copies each out of
its stack at every step. A time is the median of 10 calls after 3, or of those that fit into 5
seconds, a call being 16 steps. Rows whose time would not fit into `--seconds` are not started, and
named. XLA's autotuner is on.

    x bf16     bfloat16 time / time, of the same library's jax, at the same shape
    of copy    bytes of weights / time, as a share of the bytes a second that a copy moves; "all":
               those of the caches as well
    W MiB      weights, without the table of tokens; "W x": those of bfloat16 / these
    memory     MiB of arguments, results and what is between; "temp": the last alone
    error      of a prompt's logits: root mean square of the difference to bfloat16, to its own
    compiled   what multiplies weights, and the types; "writes W" where whole weights are copied

qwix and torchao stand beside it where they are installed. `--check` needs the CUDA plugin of the
installed jax, as gpu_contractions.py does, and compiles with the autotuner off.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import _gpu_decoder_qwix as of_qwix
import _gpu_decoder_torch as of_torch
import jax
import jax.numpy as jnp
from _gpu_decoder_model import Config
from _gpu_decoder_reading import cache_bytes, copied_bytes, held_bytes, weight_bytes, words
from _gpu_decoder_rows import (
    BASELINE,
    JOBS,
    SCANNED,
    SCHEMES,
    SMOKE,
    SMOKE_JOBS,
    Job,
    Setting,
    call,
    converted,
    floats,
    inputs,
    program,
    quantized,
)
from _gpu_program import BANDWIDTH
from _gpu_rows import GROUPS, Row
from _harness import environment, print_environment, print_table, write_json
from gpu_contractions import Task, run_within, time_of
from gpu_contractions import measure as measure_contraction

from jqx._src.diagnostics import lowering as targets
from jqx._src.diagnostics.hlo import Program
from jqx._src.diagnostics.lowering import read_executable

START = time.perf_counter()
MIB = 2**20

Record = dict[str, Any]
Make = Callable[[], tuple[Callable[..., Any], Any]]

COLUMNS = {  # head: how a record is shown
    "group": lambda r: r["group"],
    "shape": lambda r: r["shape"],
    "variant": lambda r: r["variant"],
    "ms": lambda r: _number(r["ms"], 3),
    "tokens/s": lambda r: _number(r["tokens_per_second"], 0),
    "x bf16": lambda r: _number(r["speedup"], 2),
    "of copy": lambda r: _number(r["of_bandwidth"], 2),
    "all": lambda r: _number(r["all_of_bandwidth"], 2),
    "W MiB": lambda r: _number(r["weight_mib"], 0),
    "W x": lambda r: _number(r["weight_ratio"], 2),
    "memory": lambda r: _number(r["memory_mib"], 0),
    "temp": lambda r: _number(r["temp_mib"], 0),
    "error": lambda r: "-" if r["error"] is None else f"{r['error']:.1e}",
    "compiled": lambda r: r["compiled"],
}
FIELDS = (
    *("ms", "tokens_per_second", "speedup", "of_bandwidth", "all_of_bandwidth", "weight_mib"),
    *("weight_ratio", "memory_mib", "temp_mib", "error", "cache_mib", "copied_mib"),
)
FEW = r"decode ([1-9]|1[0-6])x\d+"
GOALS = (  # of which rows, field, the least that it should be
    (rf"{FEW} jqx W8A16", "speedup", 1.6),
    (rf"{FEW} jqx W4A16 g128", "speedup", 2.2),
    (rf"{FEW} jqx W8A16", "of_bandwidth", 0.7),
    (rf"{FEW} jqx W4A16 g128", "of_bandwidth", 0.55),
    (r"prefill \S+ jqx (W8A8|fp8) dynamic", "speedup", 1.5),
)


def record(job: Job, variant: str, **fields: Any) -> Record:
    empty = dict.fromkeys(FIELDS)
    own = {"group": job.group, "shape": job.shape, "variant": variant, "compiled": ""}
    return own | empty | fields


class Bench:
    """Makes records of rows, all in one setting."""

    def __init__(self, setting: Setting, bandwidth: float | None):
        self._setting = setting
        self._bandwidth = bandwidth
        self._logits: dict[str, jax.Array] = {}

    def setting(self, job: Job) -> Setting:
        """Returns the setting of a job, whose layers are stacked or not."""
        config = replace(self._setting.config, stacked=job.group == "scan")
        return replace(self._setting, config=config)

    def jqx(self, job: Job, scheme: str) -> Record:
        """Measures a scheme of jqx, or bfloat16."""
        own = self.setting(job)
        return self.measure(
            job, scheme, lambda: (converted(own, scheme, job), quantized(own, scheme))
        )

    def qwix(self, job: Job, name: str) -> Record:
        """Measures a scheme of qwix."""
        own = replace(self.setting(job), config=replace(self._setting.config, attention="xla"))
        return self.measure(job, name, lambda: of_qwix.made(own, name, job))

    def measure(self, job: Job, name: str, make: Make) -> Record:
        """Compiles a row, and runs it where its arrays are real."""
        own, stage = self.setting(job), "quantize"
        try:
            f, params = make()
            given = inputs(own.config, job) if own.real else _shapes(own.config, job)
            stage = "compile"
            executable = self._compiled(program(f, job), params, given)
            lowering = read_executable(executable, own.target)
            fields = self._described(own.config, job, params, given, lowering)
            if own.real:
                stage = "run"
                fields |= self._timed(job, name, executable, params, given, fields)
            return record(job, name, **fields)
        except Exception as problem:  # whatever a compiler raises is this row's result
            text = " ".join(str(problem).split())[:160]
            return record(job, name, compiled=f"{stage} error: {type(problem).__name__}: {text}")

    def torch(self, job: Job, name: str) -> Record:
        """Times torch, and torchao."""
        try:
            run, times, size = of_torch.call(self._setting.config, name, job, "cuda")
            seconds = time_of(run) / times
        except Exception as problem:  # likewise
            text = " ".join(str(problem).split())[:160]
            return record(job, name, compiled=f"run error: {type(problem).__name__}: {text}")
        fields = {"weight_mib": size / MIB, "cache_mib": 0.0, "compiled": "torch.compile"}
        return record(job, name, **fields, **self._rates(job, seconds, fields))

    def _compiled(self, run: Any, params: Any, given: Any) -> Any:
        if self._setting.real:
            return run.lower(params, *given).compile()
        return targets.compiled_for("gpu_decoder", self._setting.target, run, (params, *given))

    def _described(
        self, config: Config, job: Job, params: Any, given: Any, lowering: Any
    ) -> Record:
        copied = copied_bytes(Program.parse(lowering.hlo), config)
        held, size = held_bytes(lowering), weight_bytes(params)
        return {
            "weight_mib": size / MIB,
            "weight_ratio": weight_bytes(floats(config, self._setting.real)) / size,
            "cache_mib": cache_bytes(given) / MIB,
            "memory_mib": None if held is None else held / MIB,
            "temp_mib": lowering.temp_bytes / MIB,
            "copied_mib": sum(copied.values()) / MIB,
            "compiled": words(lowering, copied),
        }

    def _timed(
        self, job: Job, name: str, run: Any, params: Any, given: Any, fields: Record
    ) -> Record:
        work, times = call(run, job, params, given)
        error = self._error(job, name, work()) if job.group == "prefill" else None
        return self._rates(job, time_of(work) / times, fields) | {"error": error}

    def _rates(self, job: Job, seconds: float, fields: Record) -> Record:
        found = {"ms": seconds * 1e3, "tokens_per_second": job.tokens / seconds}
        if self._bandwidth and job.group != "prefill":
            share = MIB / seconds / self._bandwidth
            found["of_bandwidth"] = fields["weight_mib"] * share
            if fields["cache_mib"]:
                found["all_of_bandwidth"] = (fields["weight_mib"] + fields["cache_mib"]) * share
        return found

    def _error(self, job: Job, name: str, logits: jax.Array) -> float | None:
        """Returns how far logits are from those of bfloat16, which come first."""
        real = logits.astype(jnp.float32)
        if name == BASELINE:
            self._logits[job.shape] = real
        if (known := self._logits.get(job.shape)) is None:
            return None
        return float(jnp.linalg.norm(real - known) / jnp.linalg.norm(known))


def _shapes(config: Config, job: Job) -> Any:
    return jax.eval_shape(lambda: inputs(config, job))


def tasks(bench: Bench, jobs: Sequence[Job], has_gpu: bool) -> Iterator[Task]:
    """Yields the rows of jqx, then those of others: they come last, where time may run out."""

    def of(run: Callable[[Job, str], Record], names: Iterable[str], *of: Job) -> Iterator[Task]:
        for name in names:
            for job in of:
                yield Task(f"{job.group} {job.shape}", name, partial(run, job, name))

    unrolled = [job for job in jobs if job.group != "scan"]
    yield from of(bench.jqx, SCHEMES, *unrolled)
    yield from of(bench.jqx, SCANNED, *(job for job in jobs if job not in unrolled))
    if reason := of_qwix.reason_without_qwix():
        print(f"qwix is left out: {reason}")
    else:
        yield from of(bench.qwix, of_qwix.RULES, *unrolled)
    if reason := of_torch.reason_without_torchao() if has_gpu else "it is timed on a GPU alone":
        print(f"torch and torchao are left out: {reason}")
    else:
        yield from of(bench.torch, of_torch.FORMS, *unrolled)


def compare(records: Sequence[Record]) -> None:
    """Adds the ratio to bfloat16 of jax, at the same shape."""
    base = {(r["group"], r["shape"]): r["ms"] for r in records if r["variant"] == BASELINE}
    for r in records:
        known = base.get((r["group"], r["shape"]))
        if known is not None and r["ms"] is not None:
            r["speedup"] = known / r["ms"]


def goals(records: Sequence[Record], measured: bool = True) -> Iterator[str]:
    """Yields each goal at each row that it speaks of; `measured` says whether on a GPU."""
    for pattern, field, bound in GOALS:
        of = [(f"{r['group']} {r['shape']} {r['variant']}", r[field]) for r in records]
        found = [(name, value) for name, value in of if re.fullmatch(pattern, name)]
        for name, value in found or [(pattern, None)]:
            if not measured or value is None:
                yield f"not measured: {name}: {field} >= {bound}"
            else:
                verdict = "met" if value >= bound else "MISSED"
                yield f"{verdict}: {name}: {field} >= {bound}: {value:.2f}"


def bandwidth() -> float:
    """Returns the bytes a second that a copy moves."""
    group = GROUPS["copy"]
    row = Row("copy", group.shapes[0], group.variants[0], group.layers, group.stacked)
    found = measure_contraction(row)
    if found["of_floor"] is None:
        sys.exit(f"The copy could not be timed: {found['hlo']}")
    return found["of_floor"] * BANDWIDTH


def attention_here() -> Literal["xla", "cudnn"]:
    """Returns what attends over a prompt: cuDNN where jax finds it, or else XLA."""
    x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    try:
        jax.block_until_ready(jax.jit(attend)(x, x, x))
    except Exception as problem:  # whatever jax or the library raises
        print(f"cuDNN does not attend: {' '.join(str(problem).split())[:160]}")
        return "xla"
    return "cudnn"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compile every row, without a GPU")
    mode.add_argument("--cpu-smoke", action="store_true", help="run a tiny decoder on the CPU")
    seconds = "for all rows and start-up; 540, and without a GPU no limit"
    parser.add_argument("--seconds", type=float, help=seconds)
    parser.add_argument("--layers", type=int, help="instead of 12")
    parser.add_argument("--match", default="", help="only rows whose name this regex finds")
    parser.add_argument("--attention", choices=("cudnn", "xla"), help="over a prompt, on a GPU")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    if args.seconds is None:
        args.seconds = math.inf if args.check or args.cpu_smoke else 540
    return args


def setting_of(args: argparse.Namespace) -> Setting:
    """Returns where rows are compiled, after checking that they can be."""
    layers = {} if args.layers is None else {"layers": args.layers}
    if args.cpu_smoke:
        return Setting(replace(SMOKE, **layers), "cpu")
    if args.check:
        try:
            targets.sharding_on("gpu_decoder --check", "h200")
        except (ImportError, RuntimeError) as problem:
            sys.exit(str(problem))
        return Setting(Config(**layers), "h200", real=False)
    attention = args.attention or attention_here()
    return Setting(Config(**layers, attention=attention), "h200")


def main() -> None:
    args = arguments_given()
    if args.check or args.cpu_smoke:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit("There is no GPU here: pass --check to compile for one, or --cpu-smoke.")
    on_gpu = not (args.check or args.cpu_smoke)
    setting = setting_of(args)
    copy = bandwidth() if on_gpu else None
    facts = environment() | {
        "runtime": jax.devices()[0].client.platform_version,
        "compiled_for": "an NVIDIA H200 that is not there" if args.check else "this device",
        "decoder": str(setting.config),
        "copy": "not measured" if copy is None else f"{copy / 1e9:.0f} GB/s",
    }
    print_environment(facts)
    jobs = SMOKE_JOBS if args.cpu_smoke else JOBS
    found = tasks(Bench(setting, copy), jobs, on_gpu)
    chosen = [task for task in found if re.search(args.match, f"{task.place} {task.variant}")]

    def done(records: list[Record]) -> None:
        """Keeps what there is: a compiler that aborts takes the process along."""
        last = records[-1]
        elapsed, name = time.perf_counter() - START, "{group} {shape} {variant}".format(**last)
        print(f"{elapsed:6.1f} s  {name}: {last['ms']} ms, {last['compiled']}", file=sys.stderr)
        if args.json:
            write_json(args.json, facts, records)

    records, dropped = run_within(chosen, args.seconds, lambda: time.perf_counter() - START, done)
    places = [f"{job.group} {job.shape}" for job in jobs]
    records.sort(key=lambda r: places.index(f"{r['group']} {r['shape']}"))
    compare(records)
    print()
    if records:
        print_table(list(COLUMNS), [[show(r) for show in COLUMNS.values()] for r in records])
        print()
    for place, left in groupby(dropped, lambda task: task.place):
        names = ", ".join(task.variant for task in left)
        print(f"not started, {args.seconds:.0f} s are spent: {place}: {names}")
    print(*goals(records, on_gpu), sep="\n")
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
