"""Kernels of jqx-cpu in functions that `jax.export` writes."""

import contextlib
from collections.abc import Iterator

from jax import export

from .. import _package_cpu
from .._checks import require_that
from .._compat_kernels import IN_EXPORTS


@contextlib.contextmanager
def kernels_in_exports() -> Iterator[list[export.DisabledSafetyCheck]]:
    """Lets functions that are exported inside call the kernels of jqx-cpu.

    Elsewhere an exported function has the plain form of each contraction, which runs anywhere, and
    more slowly than kernels do. What is exported inside runs on CPUs where jqx-cpu is installed:
    `import jqx_cpu` tells XLA of its kernels, and jqx itself need not be there. Where that is
    missing, XLA says which kernel it does not find, `No FFI handler registered for jqx_cpu_...`.
    Contractions with a symbolic size have the plain form here too: kernels are for sizes that are
    known.

    Yields:
      What `jax.export.export` must be told as its `disabled_checks`: it refuses calls of which it
      does not know whether later versions have them. Those of jqx-cpu are of one version of jqx.

    Raises:
      ImportError: jqx-cpu is not installed, or its kernels are not used on this processor.

    Gradient: that of the plain form.
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
    require_that(
        _package_cpu.is_installed(),
        error=ImportError,
        function="kernels_in_exports",
        problem="the package jqx-cpu is not installed, or not used on this processor.",
        given="no kernels to call",
        expected=f"the package, on a processor with {' or '.join(_package_cpu.FAST)}",
        mend="install it, pip install ./cpu; name its instructions, as by JQX_CPU_KERNELS=AVX2; or "
        "export without it: the plain form runs anywhere.",
    )
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _package_cpu.handlers()]
    with IN_EXPORTS(True):
        yield checks
