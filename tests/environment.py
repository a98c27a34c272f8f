"""The environment of processes that tests start: one cache of programs, and how they compile."""

import functools
import importlib.util
import os
import pathlib
import sys
from typing import Any

import jax

ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def benchmarks(*names: str) -> list[Any]:
    """Modules of the benchmarks, which import each other by name."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return [importlib.import_module(name) for name in names]


def example(name: str) -> Any:
    """An example, as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OLDER: dict[str, Any] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options of XLA with which it compiles in half of the time what is not optimized."""


def _is_known(option: tuple[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=dict([option])).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@functools.cache
def older() -> dict[str, Any]:
    """Those of the options that this release of XLA knows: another ends the process."""
    return dict(filter(_is_known, OLDER.items()))


def cached() -> dict[str, str]:
    """An environment in which one process reads what another has compiled."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def unoptimized() -> dict[str, str]:
    """The same, where programs compile longer than they run: as most tests compile them."""
    flags = [f"--{name}={str(value).lower()}" for name, value in older().items()]
    return cached() | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]),
    }
