"""Strict promotion everywhere: a silent upcast or rank change fails a test. Eight CPU devices.

What is compiled is kept in `.pytest_cache/jax` for the other process and for the next run. It is
optimized as users' programs are only where `OPTIMIZED` says so: LLVM takes most of the time of the
tests, and half of it for what it does to bits and speed.
"""

import collections
import gc
import pathlib
import threading
import zlib

import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from jqx._src import package_cpu

from .environment import older

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

CACHE = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

jax.config.update("jax_disable_most_optimizations", True)

# What jqx computes alone is tested as if jqx-cpu were not installed; see package_cpu/conftest.py.
package_cpu.is_installed = lambda: False


def _with_older(options, older):
    """Gives the options to every compilation: jax has a setting for single functions alone."""

    def wrapped(*args, env_options_overrides=None, **rest):
        if jax.config.read("jax_disable_most_optimizations"):
            env_options_overrides = older | (env_options_overrides or {})
        return options(*args, env_options_overrides=env_options_overrides, **rest)

    return wrapped


compiler.get_compile_options = _with_older(compiler.get_compile_options, older())


def _reused(make, times=50):
    """Lowers many programs in one context of MLIR, as later releases of jax do: one takes 4 ms.

    A program that is compiled while another one is lowered has a context of its own: jax copies it
    to make the key of its cache, and in the same context MLIR would put the copy into the other.
    """
    own = threading.local()

    def wrapped():
        if ir.Context.current is not None:
            return make()
        own.left = getattr(own, "left", 0) - 1
        if own.left < 0:
            own.context, own.left = make(), times - 1
        return own.context

    return wrapped


mlir.make_ir_context = _reused(mlir.make_ir_context)

OPTIMIZED = (
    "bench",
    "calibrators/test_ranges.py",
    "conformance",
    "contractions/test_integer_products.py",
    "contractions/test_lowering.py",
    "contractions/test_requantize.py",
    "gradients/test_laws.py",
    "gradients/test_ste.py",
    "interop/test_quantized.py",
    "numerics",
    "ops",
    "optim/test_stochastic.py",
    "parallel/test_shardings.py",
    "test_gpu_benchmark.py",
    "test_smollm2.py",
    "test_xla_cpu.py",
    "transforms/test_deployed.py",
)
"""Folders and files whose tests hold the bits of a result, those of another process too, or the
distance of two programs."""

OPTIMIZED_IN_SLOW_RUN = (
    "contractions/test_gradients.py",
    "contractions/test_dot_general.py",
    "contractions/test_formulation.py",
    "contractions/test_products.py",
    "contractions/test_range.py",
)
"""Files that the default run does not optimize, since that takes more than half of their time: sums
in them are exact in any order, or held to a bound of every order.
"""

FEW = 32
"""One in so many cases of tests with many cases is in the default run, besides the first."""

SETTLED = ("calibrators", "conformance", "contractions", "gradients", "numerics", "ops", "tensor")
"""Folders in which each test of `MANY` cases or more is taken as one marked `many`: arithmetic that
is exhaustively tested, and rarely changes. Over two minutes of the default run's CPU time.
"""

MANY = 4

LONG = (
    "test_examples.py",
    "test_notebooks.py",
    "test_pages.py",
    "test_real_models.py",
    "test_smollm2.py",
)
"""Files that take minutes: a file is run by one process."""


@pytest.fixture
def as_users_write():
    """The promotion that JAX has where nobody asks for another: examples are written for it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def pytest_addoption(parser):
    """Adds how often the slow test of changed checkpoints changes those of each format, whether all
    cases of tests marked `many` are there, and which share of the tests runs.
    """
    parser.addoption("--mutations", type=int, default=2_000, help="of checkpoints of each format")
    parser.addoption("--every", action="store_true", help="all cases, with -m 'slow or not slow'")
    parser.addoption("--share", type=int, default=1, help="one in so many of the tests, by a hash")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leaves the first case of a test marked `many`, and about one in 32 of the others, to the
    default run; so of tests in `SETTLED` folders. An eighth of the rest are slow tests, of number
    formats a quarter. The others are there with `--every`, and where tests are asked for by name.
    A hash chooses: a stride may skip a whole parameter. Of a parameter that the marker names, each
    value has a first case.
    Files that take minutes come first, or the other process would wait for the last of them.
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    every = config.getoption("every") or any("::" in name for name in config.args)
    sizes = collections.Counter(item.nodeid.partition("[")[0] for item in items)
    cases, left = collections.Counter(), []
    for item in items:
        test, _, case = item.nodeid.partition("[")
        many = item.get_closest_marker("many")
        is_settled = item.path.parent.name in SETTLED and sizes[test] >= MANY
        if many or (is_settled and not item.get_closest_marker("slow")):
            names = many.args if many else ()
            kind = test, *(str(item.callspec.params[name]) for name in names)
            turn, place = divmod(zlib.crc32(case.encode()), FEW)
            if cases[kind] and place:
                item.add_marker(pytest.mark.slow)
                if turn % (4 if "numerics" in item.path.parts else 8) and not every:
                    left.append(item)
            cases[kind] += 1
    share, counted = config.getoption("share"), set(left)
    left += [
        item for item in items if item not in counted and zlib.crc32(item.nodeid.encode()) % share
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        without = set(left)
        items[:] = [item for item in items if item not in without]


def pytest_collection_finish():
    """Leaves what is there before the first test out of every search for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def _programs(request):
    """Optimizes the programs of a file or does not, and frees them after it: tens of thousands in
    one process slow down every further compilation.
    """
    own = request.path.relative_to(pathlib.Path(__file__).parent).as_posix()
    is_default_run = request.config.option.markexpr.startswith("not slow")
    optimized = OPTIMIZED if is_default_run else OPTIMIZED + OPTIMIZED_IN_SLOW_RUN
    jax.config.update("jax_disable_most_optimizations", not own.startswith(optimized))
    yield
    jax.clear_caches()
