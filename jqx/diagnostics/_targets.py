"""Compiles for a machine that need not be present."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jax

from .. import _compat
from .._errors import fail
from ..transforms._shared import is_array


@dataclass(frozen=True)
class Target:
    """What the compiler of a platform needs to know about a machine.

    Attributes:
      platform: `"cpu"`, `"cuda"` or `"tpu"`.
      topology: JAX's name of its kind.
      extra: the extra of jqx that installs the compiler.
      modules: modules, one of which must be installed.
      options: compiler options.
      environment: environment variables that the compiler needs when it is loaded.
    """

    platform: str
    topology: str = ""
    extra: str = ""
    modules: tuple[str, ...] = ()
    options: dict[str, str | bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def _tpu(topology: str) -> Target:
    alone = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    # Only one process can use a TPU, but several can use its compiler.
    shared = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return Target("tpu", topology, "aot-tpu", ("libtpu",), environment=alone | shared)


TARGETS = {
    "cpu": Target("cpu"),
    # The autotuner would run kernels.
    "h200": Target(
        "cuda",
        "1x1x1",
        "aot-gpu",
        ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
        options={"xla_gpu_autotune_level": "0"},
        environment={"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    ),
    "tpu-v5e": _tpu("v5e:2x2"),
    "tpu-v6e": _tpu("v6e:2x2"),
    "tpu7x": _tpu("tpu7x:2x2x1"),
}


def target_of(function: str, target: str) -> Target:
    """Returns a target by name, after checking that its compiler is installed."""
    if target not in TARGETS:
        raise fail(
            function,
            "`target` is unknown.",
            given=f"target == {target!r}",
            expected=f"one of {', '.join(map(repr, TARGETS))}",
            fix="pass one of these.",
        )
    found = TARGETS[target]
    if found.modules and not any(map(_is_installed, found.modules)):
        raise fail(
            function,
            f"the compiler for {target!r} is not installed.",
            given=f"no module {' or '.join(found.modules)}",
            expected=f"the packages of the extra {found.extra!r} of jqx; no accelerator is needed",
            fix=f'pip install "jqx[{found.extra}]".',
            error=ImportError,
        )
    return found


def sharding_on(function: str, target: str) -> jax.sharding.Sharding:
    """Returns a sharding on one device of a target."""
    target_of(function, target)
    return jax.sharding.SingleDeviceSharding(_device(function, target))


def compiled_for(function: str, target: str, f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Compiles `f` at `args` for one device of a target, and returns the executable."""
    known, sharding = target_of(function, target), sharding_on(function, target)
    leaves, tree = jax.tree.flatten(args)
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) if is_array(leaf) else leaf
        for leaf in leaves
    ]
    if isinstance(f, jax.stages.Wrapped):
        lowered = f.lower(*jax.tree.unflatten(tree, placed))
    else:
        jitted = jax.jit(with_static(f, leaves, tree), keep_unused=True)
        lowered = jitted.lower(
            *jax.tree.unflatten(tree, [x if is_array(x) else None for x in placed])
        )
    with _compat.names_in_cache_key():
        return lowered.compile(compiler_options=known.options or None)


def with_static(f: Callable[..., Any], leaves: list[Any], tree: Any) -> Callable[..., Any]:
    """Returns `f` as a function of the arrays among its arguments; the other leaves are static."""

    @functools.wraps(f)
    def call(*given: Any) -> Any:
        arrays = iter(jax.tree.leaves(given))
        filled = [next(arrays) if is_array(leaf) else leaf for leaf in leaves]
        return f(*jax.tree.unflatten(tree, filled))

    return call


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def _device(function: str, target: str) -> Any:
    """Returns the device to compile for."""
    default = jax.devices()  # starts the backends of this process, before a compiler is loaded
    known = TARGETS[target]
    if known.platform == "cpu":
        return default[0] if default[0].platform == "cpu" else jax.devices("cpu")[0]
    try:
        with _present(known.environment):
            if known.platform == "tpu":
                return _compat.devices_of_topology("tpu", known.topology)[0]
            config = resources.files("jqx.diagnostics").joinpath(f"{target}.textproto").read_text()
            return _compat.devices_of_topology(
                "cuda",
                "",
                plugin=next(filter(_is_installed, known.modules)),
                target_config=config,
                topology=known.topology,
            )[0]
    except (RuntimeError, NotImplementedError) as error:
        raise fail(
            function,
            f"the compiler for {target!r} cannot be loaded.",
            given=" ".join(str(error).split())[:200],
            expected=f"the release that fits jax {jax.__version__}",
            fix=f'install it with pip install "jqx[{known.extra}]", which has it.',
            error=RuntimeError,
        ) from error


@contextlib.contextmanager
def _present(variables: dict[str, str]) -> Iterator[None]:
    """Sets absent environment variables inside the context."""
    absent = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(absent)
    try:
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)
