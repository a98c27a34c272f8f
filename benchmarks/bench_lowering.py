"""What do kernels for quantized weights read, hold and multiply, without an accelerator?

    python benchmarks/bench_lowering.py [--all] [--match TEXT] [--targets tpu-v5e h200] [--json PATH]

The compiler for TPUs gives no cycles for a kernel. So two tables count what it does, and nothing
runs: TIME IS NOT MEASURED. A product has bfloat16 rows and a shape MxKxN; `--all` has 1 to 2048
rows and a wide matrix too. Of the experts M is all rows, in 8 groups as even as they can be.

The first table is of each kernel for TPUs, counted in its grid, its blocks and their index maps
(`_lowering_kernel.py`); it is the same for each TPU. A block is read again whenever its index
differs from that of the step before. MiB are of all reads and writes of the main memory.

    weight x   bytes of codes read / bytes of those codes
    rows x     the same of the rows; each tile of columns reads, and quantizes, all rows again
    VMEM       MiB of a step on the chip: blocks, two of each that changes, and sums
    passes     rows that go through a matrix unit / those of bfloat16's product of the shape. A unit
               holds 128 x 128 numbers on TPU v5e, 256 x 256 on v6e and TPU7x; int8 takes half a
               pass on v5e and v6e, float8 on TPU7x. The compiler's cycles for plain products agree.

The second table is of the compiled programs, on each target: with the weight laid out for kernels,
then with it laid out plainly ("XLA"), which any platform multiplies without a kernel.

    multiplies, reads   of the product; what lies in memory is read, what is multiplied is made
    copies     bytes of codes that are written in a wider type first, MiB of temporary memory beside
    rest       cycles that the compiler for TPUs estimates of all that is beside the kernel: finding
               scales of rows, converting the result
    cycles     of the whole XLA program, and of one that multiplies bfloat16; arithmetic alone
"""

import argparse
import functools
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from _harness import environment, print_environment, print_table, write_json
from _lowering_kernel import UNITS, Kernel, Moved, kernels_of
from _lowering_schemes import NAMES, PLAIN, Problem, Shape, problem, shapes

import jqx
from jqx.kernels import _tiles_tpu

TPUS = tuple(UNITS)
TARGETS = (*TPUS, "h200")
NARROW, WIDE = (4096, 4096), (4096, 14336)
ONCE = 512
"""Rows up to which weights must be read once."""

MIB = 2**20
Record = dict[str, Any]

COUNTED = {  # head: how a record of the first table is shown
    "scheme": lambda r: r["scheme"],
    "shape": lambda r: r["shape"],
    "kernel": lambda r: r["kernel"],
    "grid": lambda r: "x".join(map(str, r["grid"])),
    "weight": lambda r: f"{r['weight_mib']:.2f}",
    "weight x": lambda r: f"{r['weight_times']:.2f}",
    "scales": lambda r: f"{r['scales_mib']:.2f}",
    "rows": lambda r: f"{r['rows_mib']:.2f}",
    "rows x": lambda r: f"{r['rows_times']:.0f}",
    "written": lambda r: f"{r['written_mib']:.2f}",
    "VMEM": lambda r: f"{r['vmem_mib']:.1f}",
    "products of a step": lambda r: r["products"],
    "passes v5e": lambda r: f"{r['passes']['tpu-v5e']:.2f}",
    "v6e": lambda r: f"{r['passes']['tpu-v6e']:.2f}",
    "TPU7x": lambda r: f"{r['passes']['tpu7x']:.2f}",
}
COMPILED = {
    "scheme": lambda r: r["scheme"],
    "shape": lambda r: r["shape"],
    "target": lambda r: r["target"],
    "runs": lambda r: r["own"]["runs"],
    "multiplies": lambda r: r["own"]["multiplies"],
    "reads": lambda r: r["own"]["reads"],
    "copies": lambda r: _copies(r["own"]),
    "rest": lambda r: _count(r["own"]["cycles"]) if r["own"]["kernel"] else "-",
    "XLA multiplies": lambda r: r["xla"]["multiplies"],
    "XLA reads": lambda r: r["xla"]["reads"],
    "XLA copies": lambda r: _copies(r["xla"]),
    "XLA cycles": lambda r: _count(r["xla"]["cycles"]),
    "bf16 cycles": lambda r: _count(r["bf16_cycles"]),
}


def counted(at: Problem) -> Record | None:
    """Returns what the kernel of a problem does, or `None` where a TPU has none for it."""
    f, *args = at.converted("tpu")
    found = kernels_of(jax.make_jaxpr(f)(*args).jaxpr, at.scalars)
    if not found:
        return None
    (kernel,) = found
    rows, codes, *rest = kernel.inputs
    quantized = kernel.name == "jqx_products"  # rows have scales, then
    mine = {"rows": [rows, *rest[:quantized]], "scales": rest[quantized:]}
    return {
        "scheme": at.scheme,
        "shape": str(at.shape),
        "kernel": kernel.name,
        "grid": kernel.grid,
        "weight_mib": codes.bytes / MIB,
        "weight_times": codes.times,
        "rows_times": rows.times,
        **{f"{name}_mib": _mib(moved) for name, moved in mine.items()},
        "written_mib": _mib(kernel.outputs),
        "vmem_mib": kernel.vmem / MIB,
        "products": _products(kernel),
        "passes": {
            name: kernel.passes(unit) / sum(own.passes(unit) for own in at.bfloat16)
            for name, unit in UNITS.items()
        },
    }


def _mib(moved: Sequence[Moved]) -> float:
    return sum(one.bytes for one in moved) / MIB


def _products(kernel: Kernel) -> str:
    """Returns the products of a step, those alike counted."""
    found = [f"{p.rows}x{p.depth}x{p.width} {p.dtype}" for p in kernel.products for _ in range(p.times)]
    return ", ".join(f"{found.count(one)} of {one}" for one in dict.fromkeys(found))


def compiled(at: Problem, target: str) -> Record:
    """Returns what the compiler for a target makes of a problem, with kernels and without."""
    layout = "gpu" if target == "h200" else "tpu"
    return {
        "scheme": at.scheme,
        "shape": str(at.shape),
        "target": target,
        "own": _read(at, layout, target),
        "xla": _read(at, PLAIN, target),
        "bf16_cycles": _cycles_of_bfloat16(at.shape, target) if len(at.args) == 2 else None,
    }


def _read(at: Problem, layout: str | None, target: str) -> Record:
    try:
        f, *args = at.converted(layout)
        low = jqx.lowering(f, *args, target=target)
    except Exception as problem:  # whatever a compiler raises is this row's result
        text = " ".join(str(problem).split())[:80]
        names = ("multiplies", "reads")
        return dict.fromkeys(names, "-") | {
            "runs": f"error: {type(problem).__name__}: {text}",
            "kernel": False,
            "widened": None,
            "temp_bytes": None,
            "cycles": None,
        }
    each = low.contractions
    runs = list(dict.fromkeys(c.runs for c in each))
    return {
        "runs": ", ".join(runs),
        "kernel": "tpu_custom_call" in runs,
        "multiplies": ", ".join(dict.fromkeys(" x ".join(c.dtypes) for c in each)),
        "reads": ", ".join(dict.fromkeys(" x ".join(map("+".join, c.reads)) for c in each)),
        "widened": [copy for c in each for copy in c.widened],
        "temp_bytes": low.temp_bytes,
        "cycles": low.cycles,
    }


@functools.cache
def _cycles_of_bfloat16(shape: Shape, target: str) -> int | None:
    at = problem(NAMES[0], shape)
    return jqx.lowering(at.f, *at.args, target=target).cycles


def _copies(read: Record) -> str:
    if read["widened"] is None:
        return "-"
    copies = ", ".join(dict.fromkeys(copy.partition(" ")[0] for copy in read["widened"])) or "none"
    temp = read["temp_bytes"] / MIB
    return f"{copies}, {temp:.1f} MiB"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def goals(counts: Sequence[Record], programs: Sequence[Record]) -> Iterator[str]:
    """Yields how many rows meet each goal, and those that do not."""
    few = [r for r in counts if int(r["shape"].partition("x")[0]) <= ONCE]
    read = {f"{r['scheme']} {r['shape']}": r["weight_times"] for r in few}
    yield from _goal(f"weights are read once, up to {ONCE} rows: bytes / codes <= 1", read, 1)
    held = {f"{r['scheme']} {r['shape']}": r["vmem_mib"] for r in counts}
    limit = _tiles_tpu.LIMIT / MIB
    yield from _goal(f"a step fits: MiB of VMEM <= {limit:.0f}", held, limit)
    passes = {
        f"{r['scheme']} {r['shape']} {target}": r["passes"][target] for r in counts for target in TPUS
    }
    yield from _goal("passes <= those of bfloat16's product", passes, 1)
    copies = {
        f"{r['scheme']} {r['shape']} {r['target']} {r['own']['runs']}": len(r["own"]["widened"])
        for r in programs
        if r["own"]["widened"] is not None
    }
    yield from _goal("no copy of codes in a wider type", copies, 0)
    failed = [r for r in programs for form in ("own", "xla") if r[form]["widened"] is None]
    for r in failed:
        yield f"MISSED: it compiles: {r['scheme']} {r['shape']} {r['target']}"
    yield "Time: not measured."


def _goal(text: str, found: dict[str, float], bound: float) -> Iterator[str]:
    missed = {name: value for name, value in found.items() if value > bound * (1 + 1e-9)}
    verdict = "MISSED" if missed else "met"
    yield f"{verdict}: {text}: {len(found) - len(missed)} of {len(found)}"
    for name, value in missed.items():
        yield f"  MISSED: {name}: {value:.2f}"


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="all shapes; takes many minutes")
    parser.add_argument("--match", default="", help="only schemes whose name this regex finds")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--rows", nargs="+", type=int, help="numbers of rows")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    if args.rows is None:
        args.rows = [1, 8, 32, 512, 2048] if args.all else [8, 512]
    return args


def main() -> None:
    args = arguments_given()
    jax.config.update("jax_platforms", "cpu")
    start = time.perf_counter()
    facts = environment() | {"compiled_for": f"{', '.join(args.targets)}, none of which is there"}
    print_environment(facts)
    given = shapes(args.rows, [NARROW, WIDE] if args.all else [NARROW])
    names = [name for name in NAMES if re.search(args.match, name)]
    problems = [problem(name, shape) for name in names for shape in given]
    counts, programs = [], []
    for at in problems:
        counts += [found] if (found := counted(at)) else []
        for target in args.targets:
            programs.append(compiled(at, target))
            elapsed = time.perf_counter() - start
            print(f"{elapsed:6.1f} s  {at.scheme} {at.shape} {target}", file=sys.stderr)
        if args.json:
            write_json(args.json, facts, [*counts, *programs])
    for title, columns, records in (
        ("Kernels for TPUs, counted", COUNTED, counts),
        ("Programs, compiled", COMPILED, programs),
    ):
        if records:
            print(f"\n{title}. Time: not measured.\n")
            print_table(list(columns), [[show(r) for show in columns.values()] for r in records])
    print()
    print(*goals(counts, programs), sep="\n")


if __name__ == "__main__":
    main()
