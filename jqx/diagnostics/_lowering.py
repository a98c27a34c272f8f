"""`lowering`: compiles a function for a machine that need not be present."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._calls import called
from .._table import Table, Tabular
from ._contraction import Contraction, contractions_of
from ._hlo import Program
from ._hlo_kernels import kernels
from ._lowering_table import lowering_table
from ._targets import compiled_for, target_of

_BYTES = ("argument", "output", "temp", "alias", "generated_code")


@dataclass(frozen=True)
class Lowering(Tabular):
    """A compiled function. Prints as a table, one row for each contraction.

    Attributes:
      target: the target it was compiled for.
      contractions: contractions of the optimized program, in order; those of a loop once.
      memory: bytes of `argument`, `output`, `temp`, `alias` and `generated_code`, if the compiler
        reports them.
      cycles: cycles that the TPU compiler estimates for all kernels, including loops, without
        memory accesses; `None` on other targets, and if a loop runs until a condition fails.
      hlo: the text of the optimized program.
    """

    target: str
    contractions: tuple[Contraction, ...]
    memory: dict[str, int] = field(hash=False)
    cycles: int | None
    hlo: str = field(repr=False)

    @property
    def temp_bytes(self) -> int:
        """Bytes in addition to arguments and results; 0 if the compiler does not report them."""
        return self.memory.get("temp", 0)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`, without the text of the program."""
        return {
            "target": self.target,
            "contractions": [contraction.to_dict() for contraction in self.contractions],
            "memory": dict(self.memory),
            "cycles": self.cycles,
        }

    def table(self) -> Table:
        """Returns the rows as text."""
        return lowering_table(self)


@called("lowering", "pass the function and its arguments: jqx.lowering(f, params, x).")
def lowering(f: Callable[..., Any], *args: Any, target: str = "cpu") -> Lowering:
    """Compiles a function for a target, and returns the compiled form of each contraction.

    Nothing runs, and no accelerator is needed: compilers for TPUs come with the extra `aot-tpu`,
    the one for NVIDIA GPUs with `aot-gpu`. The latter runs without autotuning: fusions and the
    types that are multiplied are the same as on the device, but the library that multiplies may
    differ.

    Args:
      f: any JAX function, such as one from `jqx.convert`. A jitted function is compiled as it is,
        donation included; other functions are jitted first.
      *args: its arguments, with any shapes and dtypes: arrays, QTensors, or `jax.ShapeDtypeStruct`
        in their place. Their placement is ignored: one device holds them all. For a function that
        is not jitted, leaves that are not arrays are static.
      target: `"cpu"`, `"h200"`, `"tpu-v5e"`, `"tpu-v6e"` or `"tpu7x"`.

    Returns:
      A `Lowering`. For each contraction it has the types that are multiplied and those read from
      memory, what runs it, whether codes were first copied to memory in wider types, whether it
      left the matrix units, and how often it runs; and memory and estimated cycles in total.

    Raises:
      ValueError: if the target is unknown.
      ImportError: if its compiler is not installed.
      RuntimeError: if its compiler cannot be loaded.
      Also the errors of `f` when it is traced, and of the compiler.

    Gradient: none; nothing is computed. NaN and infinity: the same.
    State: the devices of this process do not change. While a compiler is loaded, environment
      variables that it needs are set if they are absent, and then removed: for TPUs
      `TPU_SKIP_MDS_QUERY=1`, `TPU_WORKER_HOSTNAMES=localhost` and `ALLOW_MULTIPLE_LIBTPU_LOAD=1`,
      for GPUs `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 512)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> x = jnp.ones((8, 256))
      >>> (good,) = jqx.lowering(jqx.matmul, x, w).contractions
      >>> good.dtypes, good.widened  # three int8 digits of x, on CPU
      (('s8', 's8'), ())
      >>> by_hand = lambda x, w: x @ (w.values.astype(jnp.float32) * w.scale)
      >>> (bad,) = jqx.lowering(by_hand, x, w).contractions
      >>> bad.dtypes, bad.widened
      (('f32', 'f32'), ('f32[256,512] of w.scale and w.values',))
    """
    executable = compiled_for("lowering", target, f, args)
    return read_executable(executable, target)


def read_executable(executable: Any, target: str) -> Lowering:
    """Reads the contractions and costs of a compiled function."""
    text = executable.as_text()
    program = Program.parse(text)
    launched = kernels(program)
    known = [kernel for kernel in launched if kernel.cycles is not None]
    cycles = None
    if known and all(kernel.times is not None for kernel in known):
        cycles = sum((kernel.cycles or 0) * (kernel.times or 0) for kernel in known)
    stats = executable.memory_analysis()
    sizes = {name: getattr(stats, f"{name}_size_in_bytes", None) for name in _BYTES}
    return Lowering(
        target=target,
        contractions=tuple(contractions_of(program, target_of("lowering", target).platform)),
        memory={name: size for name, size in sizes.items() if size is not None},
        cycles=cycles,
        hlo=text,
    )
