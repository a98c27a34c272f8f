"""How fast are products with the kernels of jqx-cpu, and without, on the CPU?

    python benchmarks/bench_package_cpu.py [--only TEXT] [--seconds 120] [--json PATH]

Rows of float32, bfloat16 or int8 (a scale a row) beside weights in many formats, laid out by
`pack_for("cpu")` with the package and without it, and rows in groups beside a matrix each
(`ragged_dot`). Ratios are to XLA's product of the same shape in float32, timed in the same rounds;
its floor is a read of the codes from memory, printed as "GB/s" of the codes that a call reads.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    ForeignLoad,
    environment,
    interleave,
    print_environment,
    print_table,
    write_json,
)

import jqx
from jqx import numerics
from jqx._src import package_cpu

FORMATS = {
    "int8": (jnp.int8, None),
    "int8, groups of 64": (jnp.int8, 64),
    "int4": (jnp.int4, None),
    "int4, groups of 32": (jnp.int4, 32),
    "int4, groups of 128": (jnp.int4, 128),
    "int2, groups of 128": (jnp.int2, 128),
    "nf4, groups of 64": (numerics.nf4, 64),
    "float8_e4m3fn": (jnp.float8_e4m3fn, None),
    "mxfp8_e4m3": (numerics.mxfp8_e4m3, 32),
    "mxfp4": (numerics.mxfp4, 32),
}
SHAPES = {  # of rows by dtype, [M, K] beside [K, N]
    "float32": ((1, 4096, 4096), (4, 4096, 4096), (64, 1024, 4096), (128, 4096, 4096)),
    "bfloat16": ((16, 4096, 4096), (64, 4096, 4096), (512, 1024, 4096)),
    "int8": ((1, 4096, 4096), (128, 1024, 4096)),
}
GROUPS, ROWS, SIDE = 8, 16, 1024
"""Matrices, rows, and their sides, of `ragged_dot`."""


@dataclass(frozen=True)
class Case:
    """A product: dtype of rows, format of the weight, sizes; groups of rows have a matrix each."""

    rows: str
    weight: str
    m: int
    k: int
    n: int
    groups: int = 0

    def __str__(self) -> str:
        kind = f"ragged_dot, {self.groups} groups, " if self.groups else ""
        return f"{kind}{self.rows} {self.m} x {self.k} x {self.n}, {self.weight}"

    @property
    def spec(self) -> jqx.QSpec:
        qtype, size = FORMATS[self.weight]
        first = (0,) if self.groups else ()
        k, n = (1, 2) if self.groups else (0, 1)
        blocks = dict.fromkeys((*first, n), 1)
        own = jqx.per_axis(*first, n) if size is None else jqx.per_block(blocks | {k: size})
        return jqx.QSpec(qtype, own)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns rows, a weight, both float32, and sizes of groups."""
        draw = np.random.default_rng(0).standard_normal
        shape = (self.groups,) * bool(self.groups) + (self.k, self.n)
        x, w = draw((self.m, self.k), np.float32), draw(shape, np.float32)
        sizes = np.full(max(self.groups, 1), self.m // max(self.groups, 1), np.int32)
        return jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes)


def cases() -> Iterator[Case]:
    """The products that are timed."""
    for rows, shapes in SHAPES.items():
        for weight in FORMATS:
            if rows == "float32" or weight.startswith("int"):
                yield from (Case(rows, weight, *shape) for shape in shapes)
    for weight in ("int8", "int4, groups of 32", "nf4, groups of 64"):
        yield Case("float32", weight, ROWS, SIDE, SIDE, GROUPS)


def quantized_product(case: Case, installed: bool) -> Callable[[], object]:
    """Returns a call with the kernels of the package, or without."""
    x, w, sizes = case.arrays()
    with mock.patch.object(package_cpu, "is_installed", lambda: installed):
        jax.clear_caches()  # else what was traced with the package would be used without
        q = jqx.pack_for(jqx.QTensor.quantize(w, case.spec), "cpu")
        if case.rows == "int8":
            rows: Any = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
        else:
            rows = x.astype(case.rows)
        f = jqx.ragged_dot if case.groups else lambda x, q, _: jqx.matmul(x, q)
        compiled = jax.jit(f).lower(rows, q, sizes).compile()
    return lambda: jax.block_until_ready(compiled(rows, q, sizes))


def float_product(case: Case) -> Callable[[], object]:
    """Returns a call of XLA's product in float32."""
    x, w, sizes = case.arrays()
    f = jax.lax.ragged_dot if case.groups else lambda x, w, _: x @ w
    compiled = jax.jit(f).lower(x, w, sizes).compile()
    return lambda: jax.block_until_ready(compiled(x, w, sizes))


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Times a case; returns medians in ms, ratios, and bytes of codes."""
    calls = {
        "float32": float_product(case),
        "without": quantized_product(case, False),
        "with": quantized_product(case, True),
    }
    timings = interleave(calls, seconds)
    base = timings["float32"]
    found: dict[str, Any] = {name: timing.median * 1e3 for name, timing in timings.items()}
    found |= {f"{name} ratio": timings[name].ratio(base) for name in ("without", "with")}
    found["quiet ratio"] = timings["with"].quiet_ratio(base)
    codes = case.k * case.n * max(case.groups, 1) * numerics.format_of(case.spec.qtype).bits / 8
    return found | {"GB/s": codes / timings["with"].median / 1e9}


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="the cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=120, help="of timing, for all cases")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    facts, load = environment(), ForeignLoad()
    print_environment(facts)
    if not package_cpu.is_installed():
        raise SystemExit(
            "jqx-cpu is not installed, or not used on this processor: pip install ./cpu"
        )
    import jqx_cpu

    print(f"kernels of jqx-cpu: {jqx_cpu.kernels()}\n")
    chosen = [case for case in cases() if given.only in str(case)]
    time_each = functools.partial(measure, seconds=given.seconds / max(len(chosen), 1))
    records = [asdict(case) | time_each(case) for case in chosen]
    head = ["case", "float32 ms", "with ms", "without: ratio", "with: ratio", "of p10", "GB/s"]
    names = ("float32", "with", "without ratio", "with ratio", "quiet ratio", "GB/s")
    rows = [
        [str(case), *(f"{record[name]:.3g}" for name in names)]
        for case, record in zip(chosen, records, strict=True)
    ]
    print_table(head, rows)
    if (cores := load.cores()) is not None:
        print(f"foreign load: {cores:.2f} cores")
    if given.json:
        write_json(given.json, facts, records)


if __name__ == "__main__":
    main()
