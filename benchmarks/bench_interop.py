"""How fast are checkpoints of others read and written, beside NumPy's plain read of the same bytes?

    python benchmarks/bench_interop.py [--seconds 120] [--json PATH]

Four weights of 2048 x 4096 in each format, from a file that the system has in memory. "read" makes
NumPy arrays as QTensors have them (`Archive.numpy`), "write" makes the folder or the file of them,
on the disk. The floor is `np.fromfile` of the same bytes, an array a weight, timed in the same
rounds (of all bytes at once it is up to three times as fast, or not: pages of 2 MB are there or
not); the goal is half of its speed for formats that keep their packing (fp8, and what holds a code
a byte). "package" is the own reader of a package, to what it has of them: the bytes of the file,
from gguf, mlx, and safetensors, by which all others read (compressed-tensors, GPTQModel,
bitsandbytes). "peak" is the memory of NumPy while all is read, less the result, in weights of the
file.
"""

import argparse
import dataclasses
import importlib.util
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    ForeignLoad,
    environment,
    interleave,
    print_environment,
    print_table,
    threads,
    write_json,
)

import jqx
from jqx.calibrators import Rounded
from jqx.numerics import mxfp4, nf4, nvfp4, uint3

SHAPE, COUNT = (2048, 4096), 4
GOAL = 0.5
KEPT = ("fp8 blocks", "int8 channels", "gguf F16")
"""Formats whose bytes jqx keeps as they are."""


def blocks(qtype: Any, size: int, **more: Any) -> jqx.QSpec:
    """Returns the spec of groups along the rows, with scales that float16 holds."""
    scale = {} if qtype in (mxfp4, nvfp4, nf4) else {"calibrator": Rounded()}
    return jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size}), **scale, **more)


FP8 = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 128, 1: 128}))
FORMATS: dict[str, tuple[str, jqx.QSpec | None]] = {
    "compressed-tensors 4 bits": ("compressed-tensors", blocks("int4", 128)),
    "compressed-tensors nvfp4": ("compressed-tensors", blocks(nvfp4, 16)),
    "int8 channels": ("compressed-tensors", jqx.QSpec("int8", jqx.per_axis(0))),
    "fp8 blocks": ("fp8", FP8),
    "gptq 4 bits": ("gptq", blocks("int4", 128)),
    "awq 4 bits": ("awq", blocks("uint4", 128, symmetric=False)),
    "mlx 4 bits": ("mlx", blocks("int4", 64)),
    "mlx 2 bits": ("mlx", blocks("uint2", 64, symmetric=False)),
    "mlx 3 bits": ("mlx", blocks(uint3, 64, symmetric=False)),
    "mlx mxfp4": ("mlx", blocks(mxfp4, 32)),
    "bitsandbytes nf4": ("bitsandbytes", blocks(nf4, 64)),
    "gguf Q4_0": ("gguf", blocks("int4", 32)),
    "gguf Q8_0": ("gguf", blocks("int8", 32)),
    "gguf MXFP4": ("gguf", blocks(mxfp4, 32)),
    "gguf F16": ("gguf", None),
}


def weights(spec: jqx.QSpec | None) -> dict[str, Any]:
    """Returns the weights of a format, by name."""
    keys = jax.random.split(jax.random.key(0), COUNT)
    made = {}
    for i, key in enumerate(keys):
        x = jax.random.normal(key, SHAPE)
        packs = spec is not None and jqx.numerics.format_of(spec.qtype).bits < 8
        q = x.astype(jnp.float16)
        if spec is not None:
            q = jqx.QTensor.quantize(x, spec, pack=-1 if packs else None)
            if isinstance(spec.calibrator, Rounded) and not isinstance(q.scale, jqx.QTensor):
                q = dataclasses.replace(q, scale=q.scale.astype(jnp.float16))
        made[f"layers.{i}.up.weight"] = q
    return made


def written(path: Path, form: str, tree: dict[str, Any]) -> None:
    """Writes them, over what was there."""
    if form == "gguf":
        metadata = {"general.architecture": "llama"}
        jqx.interop.write(path, tree, form, metadata=metadata, overwrite=True)
    else:
        jqx.interop.write(path, tree, form, config={}, overwrite=True)


def read(path: Path) -> list[Any]:
    """Returns all weights, as NumPy arrays."""
    with jqx.interop.Archive(path) as archive:
        return [archive.numpy(name) for name in archive.paths]


def files_of(path: Path) -> list[Path]:
    """Returns the files of tensors."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def plain(path: Path) -> list[np.ndarray]:
    """Returns their bytes: the floor."""
    made = []
    for file in files_of(path):
        with open(file, "rb") as opened:
            size = -(-file.stat().st_size // COUNT)
            made += [np.fromfile(opened, np.uint8, size) for _ in range(COUNT)]
    return made


def package(path: Path, form: str) -> Callable[[], object] | None:
    """Returns a call of the own reader of a package, where it is there."""
    name = {"gguf": "gguf", "mlx": "mlx"}.get(form, "safetensors")
    if importlib.util.find_spec(name) is None:
        return None
    if form == "mlx":
        mx = importlib.import_module("mlx.core")
        (file,) = files_of(path)
        return lambda: mx.eval(list(mx.load(str(file)).values()))
    if form == "gguf":
        reader = importlib.import_module("gguf").GGUFReader
        return lambda: [np.array(tensor.data) for tensor in reader(path).tensors]
    load = importlib.import_module("safetensors.numpy").load_file
    has_fp8 = form == "fp8" or "nvfp4" in path.name  # which safetensors.numpy does not read
    return None if has_fp8 else lambda: [load(file) for file in files_of(path)]


def peak(path: Path) -> float:
    """Returns the memory of NumPy while all is read, less the result, in weights of the file."""
    size = sum(file.stat().st_size for file in files_of(path)) / COUNT
    tracemalloc.start()
    kept = read(path)
    now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept
    return (most - now) / size


def record(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Returns what was measured of a format."""
    form, spec = FORMATS[name]
    tree, path = weights(spec), folder / name.replace(" ", "_")
    written(path, form, tree)
    size = sum(file.stat().st_size for file in files_of(path))
    calls = {
        "read": partial(read, path),
        "numpy": partial(plain, path),
        "write": partial(written, path.with_suffix(".again"), form, tree),
    }
    other = package(path, form)
    if other is not None:
        calls["package"] = other
    timed = interleave(calls, seconds)
    own, floor = timed["read"], timed["numpy"]
    found = {
        "format": name,
        "MB": size / 1e6,
        "read_GBps": size / own.median / 1e9,
        "of_numpy": 1 / own.ratio(floor),
        "of_package": 1 / own.ratio(timed["package"]) if other else None,
        "write_GBps": size / timed["write"].median / 1e9,
        "numpy_GBps": size / floor.median / 1e9,
        "peak": peak(path),
    }
    for used in (path, path.with_suffix(".again")):
        shutil.rmtree(used) if used.is_dir() else used.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="of measuring, in all")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    facts, load = environment(), ForeignLoad()
    print_environment(facts)
    with tempfile.TemporaryDirectory() as folder:
        records = [record(name, Path(folder), args.seconds / len(FORMATS)) for name in FORMATS]
    print()
    head = (
        "format",
        "MB",
        "read GB/s",
        "of numpy",
        "of package",
        "write GB/s",
        "numpy GB/s",
        "peak",
    )
    rows = [
        ["-" if v is None else f"{v:.2f}" if isinstance(v, float) else v for v in r.values()]
        for r in records
    ]
    print_table(head, rows)
    facts["foreign_load_cores"] = cores = load.cores()
    if cores is not None:
        print(f"\nother processes kept {cores:.2f} of {threads()} cores busy meanwhile")
    for r in records:
        if r["format"] in KEPT:
            met = "met" if r["of_numpy"] >= GOAL else "missed"
            print(f"{met}: {r['format']} read, at least {GOAL} of numpy: {r['of_numpy']:.2f}")
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
