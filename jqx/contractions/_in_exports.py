"""Kernels of jqx-cpu in functions that `jax.export` serializes."""

import contextlib
from collections.abc import Iterator

from jax import export

from .. import _package_cpu
from .._compat_kernels import IN_EXPORTS
from .._errors import fail


@contextlib.contextmanager
def kernels_in_exports() -> Iterator[list[export.DisabledSafetyCheck]]:
    """Lets functions that are exported inside of this context call the kernels of jqx-cpu.

    Outside of it, an exported function uses the form of each contraction without kernels, which
    runs everywhere but is slower. A function that is exported inside runs on CPUs where jqx-cpu is
    installed: `import jqx_cpu` registers its kernels with XLA, and jqx itself is not needed. If it
    is missing, XLA reports the missing kernel: `No FFI handler registered for jqx_cpu_...`.
    Contractions with a symbolic size use the form without kernels here too, because kernels need
    known sizes.

    Yields:
      The `disabled_checks` argument for `jax.export.export`, which otherwise rejects custom calls
      without a stability guarantee. The kernels of jqx-cpu belong to one version of jqx.

    Raises:
      ImportError: jqx-cpu is not installed, or its kernels are not used on this processor.

    Gradient: that of the form without kernels.
    NaN and infinities: as in `jqx.dot_general`.

    Example:
      >>> import jax, jqx, jax.numpy as jnp
      >>> def written(x, w):
      ...     with jqx.kernels_in_exports() as checks:
      ...         f = jax.export.export(jax.jit(jqx.matmul), disabled_checks=checks)
      ...         return f(x, w)
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 256)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> w = w.pack_for("cpu")
      >>> written(jnp.ones((1, 256)), w).platforms  # doctest: +SKIP
      ('cpu',)
    """
    if not _package_cpu.is_installed():
        raise fail(
            "kernels_in_exports",
            "the package jqx-cpu is not installed, or not used on this processor.",
            given="no kernels to call",
            expected=f"the package, on a processor with {' or '.join(_package_cpu.FAST)}",
            fix="install it with pip install ./cpu; select its instructions, such as with "
            "JQX_CPU_KERNELS=AVX2; or export without it: that form runs everywhere.",
            error=ImportError,
        )
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _package_cpu.handlers()]
    with IN_EXPORTS(True):
        yield checks
