"""Interleaved timing: variants take turns in one process, so that foreign load falls on all alike.

One sample is the mean time of a few calls in a row, enough to fill `SAMPLE_SECONDS`. Each round
takes one sample of every variant, in a random order; a variant far slower than the others sits out
most rounds. Ratios are medians of the ratios within a round, which cancels load that lasts longer
than a round.
"""

import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Call = Callable[[], object]

SAMPLE_SECONDS = 0.01
SETTLE_SECONDS = 0.002
MIN_ROUNDS = 3
SLOW = 4  # times the median variant; a slower one sits out rounds
PACKAGES = (
    *("jqx", "jax", "jaxlib", "numpy", "qwix", "torch", "torchao", "onnx", "onnxruntime"),
    *("openvino", "nncf", "transformers"),
)
VARIABLES = (
    *("XLA_FLAGS", "NPROC", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "LD_PRELOAD"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "JAX_PLATFORMS", "JAX_ENABLE_X64"),
)


@dataclass(frozen=True)
class Timing:
    """The samples of one variant, in seconds a call, one per round; NaN where it sat out."""

    samples: np.ndarray

    @property
    def median(self) -> float:
        return float(np.nanmedian(self.samples))

    @property
    def p10(self) -> float:
        return float(np.nanpercentile(self.samples, 10))

    @property
    def rounds(self) -> int:
        return int(np.isfinite(self.samples).sum())

    def ratio(self, other: "Timing") -> float:
        """Returns the median over the rounds of this time divided by the other's."""
        return float(np.nanmedian(self.samples / other.samples))

    def quiet_ratio(self, other: "Timing") -> float:
        """Returns the ratio of the 10th percentiles: rounds with foreign load drop out."""
        return self.p10 / other.p10


def fresh(f: Callable[..., Any], *args: Any) -> Call:
    """Returns a call of `f` under jit that allocates its result anew."""
    compiled = jax.jit(f)
    return lambda: jax.block_until_ready(compiled(*args))


def donated(f: Callable[..., jax.Array], x: jax.Array, *args: Any) -> Call:
    """Returns a call that replaces a copy of `x` by `f` of it, in place, time after time."""
    compiled = jax.jit(f, donate_argnums=0)
    array = jnp.copy(x)

    def call() -> None:
        nonlocal array
        array = compiled(array, *args).block_until_ready()

    return call


def interleave(variants: Mapping[str, Call], seconds: float) -> dict[str, Timing]:
    """Times calls that return when their work is done, for about `seconds`, warm-up included."""
    start = time.perf_counter()
    first = {}
    for name, call in variants.items():
        call()
        first[name] = _seconds(call, 1)
    calls = {name: int(np.clip(SAMPLE_SECONDS / t, 1, 50)) for name, t in first.items()}
    typical = float(np.median(list(first.values())))
    strides = {name: max(1, int(t / typical / SLOW)) for name, t in first.items()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    order, shuffle, rounds = list(variants), random.Random(0).shuffle, 0
    while rounds < MIN_ROUNDS or time.perf_counter() - start < seconds:
        shuffle(order)
        for name in order:
            if rounds % strides[name]:
                samples[name].append(np.nan)
                continue
            time.sleep(SETTLE_SECONDS)  # the threads of the previous library stop spinning
            if calls[name] > 1:
                variants[name]()  # brings its operands back into the cache
            samples[name].append(_seconds(variants[name], calls[name]))
        rounds += 1
    return {name: Timing(np.array(taken)) for name, taken in samples.items()}


def _seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


class ForeignLoad:
    """How many cores other processes have kept busy since this was made (Linux)."""

    def __init__(self) -> None:
        self._start = self._times()

    def cores(self) -> float | None:
        """Returns the mean number of cores, or `None` where the system does not say."""
        start, now = self._start, self._times()
        if start is None or now is None:
            return None
        return max(0.0, (now[1] - start[1]) / (now[0] - start[0]))

    def _times(self) -> tuple[float, float] | None:
        own, wall = time.process_time(), time.perf_counter()
        if (line := _first_line("/proc/stat")) is None:
            return None
        ticks = [int(field) for field in line.split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # all but idle and iowait
        return wall, busy / os.sysconf("SC_CLK_TCK") - own


def threads() -> int:
    """Returns the number of cores this process may use, which is what XLA takes."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """Returns what a number depends on: device, processor, versions, threads, variables."""
    return {
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "threads": threads(),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "versions": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor()


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().splitlines()[0]
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def print_environment(facts: Mapping[str, Any]) -> None:
    """Prints what `environment` returned, one fact a line."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None) or "none set"
        print(f"{name.replace('_', ' ')}: {value}")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under a head; columns of numbers are aligned right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    numeric = [all(_is_number(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in (head, ["-" * width for width in widths], *rows):
        cells = zip(row, widths, numeric, strict=True)
        print("  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in cells).rstrip())


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.replace(".", "", 1).isdigit()


def write_json(path: Path, facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Writes the environment and one record per variant."""
    path.write_text(json.dumps({"environment": facts, "records": records}, indent=1) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records that a file has, none where there is no file."""
    return json.loads(path.read_text())["records"] if path.exists() else []
