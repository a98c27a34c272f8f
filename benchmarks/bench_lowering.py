"""What do kernels for quantized weights read, hold and multiply, without an accelerator?

    python benchmarks/bench_lowering.py [--all] [--match TEXT] [--targets NAME ...] [--json PATH]

The compiler for TPUs gives no cycles for a kernel, so that two tables count what it does. Nothing
runs: TIME IS NOT MEASURED. A product has bfloat16 rows and a shape MxKxN. Of experts M is all rows,
in 8 groups as even as they can be. Attention is of one query of 32 heads for each sequence, over a
cache that is full: sequences x tokens x heads x width.

The first table is of each kernel for TPUs, counted in its grid, its blocks and their index maps
(`_lowering_kernel.py`); it is the same for each TPU. A block is moved again whenever its index
differs from that of the step before. Sizes are MiB.

    codes      bytes of codes that are read; "codes x": / bytes of those codes
    scales     the same of their scales and zero points
    rows       the same of rows, with their scales; "rows x" is how often: each tile of columns
               reads all rows again, and quantizes them again
    written    the results, in float32
    VMEM       of a step, on the chip: blocks, two of each that changes, and sums
    passes     rows that go through a matrix unit / those of bfloat16's product of the shape. A unit
               holds 128 x 128 numbers on TPU v5e, 256 x 256 on v6e and TPU7x; int8 takes half a
               pass on v5e and v6e, float8 on TPU7x. No goal of attention: its rows are few, and
               taking in the codes, which both do once, takes longer

The second table is of the compiled programs, on each target: with codes laid out for kernels, and
plainly ("XLA"), as no kernel reads them; the latter on TPU v5e and H200, and with `--all` on all.

    reads      what the product reads from memory; "multiplies" is what it makes of that
    copies     codes that are written in a wider type first, and MiB of temporary memory
    rest       cycles that the compiler for TPUs estimates of what is beside the kernel, such as
               finding scales of rows, and converting the result
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
from _lowering_schemes import NAMES, Call, Problem, Shape, problems

import jqx
from jqx._src.kernels import products_tpu

TARGETS = (*UNITS, "h200")
BESIDE = ("tpu-v5e", "h200")
"""Targets for which the XLA form is compiled as well, unless all are: it takes longest."""

NARROW, WIDE = (4096, 4096), (4096, 14336)
ONCE = 512
"""Rows up to which weights must be read once."""

ATTENTION = "jqx_decode_attention"
CODES = {"jqx_weights": 1, "jqx_products": 1, ATTENTION: 2}
"""How many arrays of codes a kernel is given, after the rows."""

PLAIN: None = None
"""The layout of codes that no kernel reads."""

MIB = 2**20
Record = dict[str, Any]

COUNTED = {  # head: how a record of the first table is shown
    "scheme": lambda r: r["scheme"],
    "shape": lambda r: r["shape"],
    "kernel": lambda r: r["kernel"],
    "grid": lambda r: "x".join(map(str, r["grid"])),
    "codes": lambda r: f"{r['codes_mib']:.2f}",
    "codes x": lambda r: f"{r['codes_times']:.2f}",
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
    "multiplies": lambda r: _of(r["own"], "multiplies"),
    "reads": lambda r: _of(r["own"], "reads"),
    "copies": lambda r: _copies(r["own"]),
    "rest": lambda r: _of(r["own"], "cycles") if r["own"]["kernel"] else "-",
    "XLA multiplies": lambda r: _of(r["xla"], "multiplies"),
    "XLA reads": lambda r: _of(r["xla"], "reads"),
    "XLA copies": lambda r: _copies(r["xla"]),
    "XLA cycles": lambda r: _of(r["xla"], "cycles"),
    "bf16 cycles": lambda r: _of(r, "bf16_cycles"),
}


def counted(at: Problem) -> Record | None:
    """Returns what the kernel of a problem does, or `None` where a TPU has none for it."""
    f, *args = at.quantized("tpu")
    found = kernels_of(jax.make_jaxpr(f)(*args).jaxpr, at.scalars)
    if not found:
        return None
    (kernel,) = found
    codes = kernel.inputs[1 : 1 + CODES[kernel.name]]
    rest = kernel.inputs[1 + len(codes) :]
    quantized = kernel.name == "jqx_products"  # rows have scales, then
    rows = [kernel.inputs[0], *rest[:quantized]]
    return {
        "scheme": at.scheme,
        "shape": at.shape,
        "rows": at.rows,
        "kernel": kernel.name,
        "grid": kernel.grid,
        "codes_mib": _mib(codes),
        "codes_times": sum(one.bytes for one in codes) / sum(one.once for one in codes),
        "rows_times": rows[0].times,
        "scales_mib": _mib(rest[quantized:]),
        "rows_mib": _mib(rows),
        "written_mib": _mib(kernel.outputs),
        "vmem_mib": kernel.vmem / MIB,
        "products": _products(kernel),
        "passes": {
            name: kernel.passes(unit) / sum(own.passes(unit) for own in at.products)
            for name, unit in UNITS.items()
        },
    }


def _mib(moved: Sequence[Moved]) -> float:
    return sum(one.bytes for one in moved) / MIB


def _products(kernel: Kernel) -> str:
    """Returns the products of a step, those alike counted."""
    found = [
        f"{p.rows}x{p.depth}x{p.width} {p.dtype}" for p in kernel.products for _ in range(p.times)
    ]
    return ", ".join(f"{found.count(one)} of {one}" for one in dict.fromkeys(found))


def compiled(at: Problem, target: str, beside: bool) -> Record:
    """Returns what the compiler for a target makes of a problem: with kernels, and `beside` it
    without, and of bfloat16.
    """
    layout = "gpu" if target == "h200" else "tpu"
    return {
        "scheme": at.scheme,
        "shape": at.shape,
        "target": target,
        "own": _read(at.quantized(layout), target),
        "xla": _read(at.quantized(PLAIN), target) if beside else None,
        "bf16_cycles": _cycles(at.bfloat16, target) if beside else None,
    }


def _read(call: Call, target: str) -> Record:
    f, *args = call
    try:
        low = jqx.lowering(f, *args, target=target)
    except Exception as problem:  # whatever a compiler raises is this row's result
        text = " ".join(str(problem).split())[:80]
        names = ("multiplies", "reads", "widened", "temp_bytes", "cycles")
        error = f"error: {type(problem).__name__}: {text}"
        return dict.fromkeys(names) | {"runs": error, "kernel": False}
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
def _cycles(call: Call, target: str) -> int | None:
    return _read(call, target)["cycles"]


def _of(read: Record | None, name: str) -> str:
    """Returns a fact of a program as text."""
    return "-" if read is None or read[name] is None else str(read[name])


def _copies(read: Record | None) -> str:
    if read is None or read["widened"] is None:
        return "-"
    copies = ", ".join(dict.fromkeys(copy.partition(" ")[0] for copy in read["widened"])) or "none"
    return f"{copies}, {read['temp_bytes'] / MIB:.1f} MiB"


def goals(counts: Sequence[Record], programs: Sequence[Record]) -> Iterator[str]:
    """Yields how many rows meet each goal, and those that do not."""
    named = {f"{r['scheme']} {r['shape']}": r for r in counts}
    read = {name: r["codes_times"] for name, r in named.items() if r["rows"] <= ONCE}
    yield from _goal(f"codes are read once, up to {ONCE} rows: bytes / codes <= 1", read, 1)
    limit = products_tpu.LIMIT / MIB
    held = {name: r["vmem_mib"] for name, r in named.items()}
    yield from _goal(f"a step fits: MiB of VMEM <= {limit:.0f}", held, limit)
    passes = {
        f"{name} {target}": r["passes"][target]
        for name, r in named.items()
        for target in UNITS
        if r["kernel"] != ATTENTION
    }
    yield from _goal("passes <= those of bfloat16's product", passes, 1)
    compiled = {f"{r['scheme']} {r['shape']} {r['target']}": r["own"] for r in programs}
    own = {name: float(r["widened"] is None) for name, r in compiled.items()}
    yield from _goal("it compiles: errors <= 0", own, 0)
    told = {name: r for name, r in compiled.items() if r["widened"] is not None}
    hidden = [name for name, r in told.items() if "s32" in r["reads"]]
    copies = {f"{n}, {r['runs']}": len(r["widened"]) for n, r in told.items() if n not in hidden}
    yield from _goal("no codes are written in a wider type: copies <= 0", copies, 0)
    if hidden:  # `jqx.lowering` takes the first operands of a kernel for those of its product
        yield f"not known: whether codes are written in a wider type: {', '.join(hidden)}"
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
    matrices = [NARROW, WIDE] if args.all else [NARROW]
    shapes = [Shape(m, *matrix) for matrix in matrices for m in args.rows]
    names = [name for name in NAMES if re.search(args.match, name)]
    counts, programs = [], []
    for at in (at for name in names for at in problems(name, shapes)):
        counts += [found] if (found := counted(at)) else []
        for target in args.targets:
            programs.append(compiled(at, target, args.all or target in BESIDE))
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
