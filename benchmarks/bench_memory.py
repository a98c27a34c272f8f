"""How much memory does quantizing take of a model that is read from its file leaf by leaf?

    python benchmarks/bench_memory.py [--rows 8] [--length 512] [--gigabytes 4] [--json PATH]
        [--only ROW ...]

`gptq`: the language model of `examples/smollm2.py`, written once to a file of floats with a leaf
for each layer; its linear layers by GPTQ in int4, groups of 128: lazily, written with `resume`,
also with activations on disk, and with all parameters in memory. The goal is the largest leaf in
float (the table of embeddings; a layer has 14 MB), the statistics of one site, the activations of
all batches, and 400 MB for all else, JAX among it. `round`: `python -m jqx quantize` of tensors of
64 MB; the goal is 700 MB.

Each row is a process of its own, whose largest resident size the system tells. Rows that say
"trimmed" tell glibc to give freed memory back at once (`MALLOC_ARENA_MAX=1`, thresholds of 1 MB):
compilers leave some 100 MB to it. Needs room for the files in the folder for temporary ones.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _harness import environment, print_environment, print_table, write_json

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import jqx

ROWS = ("gptq lazy trimmed", "gptq lazy", "gptq disk", "gptq eager trimmed", "gptq eager", "round")
TRIMMED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
}
BEYOND, OF_ROUNDING, TENSOR = 400e6, 700e6, 64_000_000


def write_floats(path: str) -> None:
    """Writes the language model in float32, with a leaf for each layer."""
    import smollm2 as example

    tensors = example.read_file().tensors

    def turned(name: str) -> bool:
        return name.startswith("blk") and len(tensors[name].shape) == 2

    kinds = {
        name: jax.ShapeDtypeStruct(x.shape[::-1] if turned(name) else x.shape, np.float32)
        for name, x in tensors.items()
    }

    def leaves() -> Iterator[np.ndarray]:
        for name, x in tensors.items():
            own = np.asarray(x.dequantize(), np.float32)
            yield np.ascontiguousarray(own.T) if turned(name) else own

    jqx.interop.save_leaves(path, kinds, leaves())


def quantize(path: str, out: str, how: str, rows: int, length: int) -> None:
    """Quantizes it by GPTQ, and prints what it is to take."""
    import smollm2 as example
    from flax import nnx

    config = example.config_of(example.read_file(), scanned=False)  # layers of their own
    shapes = nnx.eval_shape(lambda: example.SmolLM(config, nnx.Rngs(0)))
    graph, state = nnx.split(shapes)
    names = {keys: "/".join(map(str, keys)) for keys, _ in nnx.to_flat_state(state)}

    def apply(params: Any, tokens: Any) -> Any:
        flat = [(keys, x.replace(params[names[keys]])) for keys, x in nnx.to_flat_state(state)]
        cache = example.empty_cache(config, tokens.shape[1], len(tokens))
        return nnx.merge(graph, nnx.from_flat_state(flat))(tokens, cache, 0)[0]

    batches = list(np.load(example.TOKENS)["calibration"][:rows, None, :length])
    policy = jqx.Policy({"blk/.*": "int4:group=128:asymmetric"})
    start = time.perf_counter()
    with jqx.interop.Archive(path) as archive:
        leaf = archive.read if how == "eager" else archive.lazy
        params = {
            name: leaf(".".join([*name.split("/")[:-1], "weight"])) for name in names.values()
        }
        floats = [x.nbytes for x in params.values()]
        algorithm = jqx.algorithms.gptq(offload="disk" if how == "disk" else False)
        done = jqx.ptq(apply, policy, algorithm, progress=False)(params, batches)
        jqx.save(out, done, resume=how != "eager")
    told = {"floats": sum(floats), "largest": max(floats), "seconds": time.perf_counter() - start}
    memory = dataclasses.asdict(done.details.memory)
    print(json.dumps(told | {name: memory[name] for name in ("statistics", "activations")}))


def write_tensors(path: Path, size: int) -> None:
    """Writes tensors of 64 MB, one after another."""
    shape = (4000, TENSOR // 4 // 4000)
    names = [f"layers.{i}.weight" for i in range(max(size // TENSOR, 1))]
    rng = np.random.default_rng(0)
    kinds = dict.fromkeys(names, jax.ShapeDtypeStruct(shape, np.float32))
    jqx.interop.save_leaves(path, kinds, (rng.standard_normal(shape, np.float32) for _ in names))


def measured(command: list[Any], variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Returns the largest resident size of a process, in bytes, and what it has printed."""
    process = subprocess.Popen(
        list(map(str, command)), env=os.environ | (variables or {}), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    text = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_maxrss * unit, text


def records_of(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what is measured, row by row."""
    own = [sys.executable, __file__, "--child"]
    only = args.only or ROWS
    if any(row.startswith("gptq") for row in only):
        measured([*own, "floats", folder / "floats"])
    for row in only:
        if row == "round":
            write_tensors(folder / "many", int(args.gigabytes * 1e9))
            size, start = (folder / "many").stat().st_size, time.perf_counter()
            command = [sys.executable, "-m", "jqx", "quantize", folder / "many", folder / "few"]
            peak, _ = measured([*command, "--policy", "w4a16"])
            seconds = time.perf_counter() - start
            for name in ("many", "few"):
                (folder / name).unlink()
            yield {
                "row": row,
                "floats": size,
                "seconds": seconds,
                "goal": OF_ROUNDING,
                "peak": peak,
            }
            continue
        how, options = row.split()[1], (args.rows, args.length)
        command = [*own, "quantize", folder / "floats", folder / "out", how, *options]
        peak, text = measured(command, TRIMMED if row.endswith("trimmed") else None)
        (folder / "out").unlink()
        told = json.loads(text)
        goal = told["largest"] + told["statistics"] + told["activations"] + BEYOND
        yield {"row": row, **told, "goal": goal, "peak": peak}


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8, help="of calibration")
    parser.add_argument("--length", type=int, default=512, help="of each row, in tokens")
    parser.add_argument("--gigabytes", type=float, default=4, help="of the file that is rounded")
    parser.add_argument("--only", nargs="*", choices=ROWS, metavar="ROW", help="rows to measure")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, *given = args.child
        if name == "floats":
            write_floats(*given)
        else:
            path, out, how, rows, length = given
            quantize(path, out, how, int(rows), int(length))
        return
    facts = environment()
    print_environment(facts)
    with tempfile.TemporaryDirectory() as folder:
        records = list(records_of(args, Path(folder)))
    columns = ("floats", "largest", "statistics", "activations", "goal", "peak")
    rows = [
        [
            r["row"],
            *(f"{r[c] / 1e6:.0f}" if c in r else "-" for c in columns),
            f"{r['seconds']:.0f}",
        ]
        for r in records
    ]
    print_table(["MB", *columns, "seconds"], rows)
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
