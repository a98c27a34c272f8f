"""Products of bytes and of float32 by oneDNN, which jaxlib contains. XLA calls it on CPU, with its
own threads.

The name of the call is that which passes of XLA write, and no part of StableHLO. So it is used only
where a first product is exact, with this jaxlib and on this processor, and never in exports.
"""

import functools
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike


def matrix_product(
    rows: jax.Array, columns: jax.Array, dtype: DTypeLike, *, in_rows: bool
) -> jax.Array:
    """Returns sums of products: [*batch, M, N]. Those of bytes are exact as int32, or as such
    rounded to float32.

    Args:
      rows: int8 or float32 [*batch, M, K].
      columns: the other operand, of the same dtype.
      dtype: int32 or float32.
      in_rows: whether that is [*batch, N, K]; else [*batch, K, N].
    """
    return _product(jnp.dtype(dtype), in_rows)(rows, columns)


@functools.cache
def _product(dtype: Any, in_rows: bool) -> Any:
    config = json.dumps({"onednn_matmul_config": {"transpose_b": in_rows}})

    @custom_vmap
    def product(rows: jax.Array, columns: jax.Array) -> jax.Array:
        shape = (*rows.shape[:-1], columns.shape[-2 if in_rows else -1])
        kind = jax.ShapeDtypeStruct(shape, dtype)
        options: Any = {"custom_call_api_version": 2, "legacy_backend_config": config}
        return jax.ffi.ffi_call("__onednn$matmul", kind, **options)(rows, columns)

    @product.def_vmap
    def batched(size: int, is_batched: Any, rows: Any, columns: Any) -> Any:
        if not is_batched[1] and columns.ndim == 2:  # one product with all rows
            y = product(rows.reshape(-1, rows.shape[-1]), columns)
            return y.reshape(*rows.shape[:-1], y.shape[-1]), True
        rows, columns = (
            x if batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, batched in zip((rows, columns), is_batched, strict=True)
        )
        return product(rows, columns), True

    return product


def is_used() -> bool:
    """Whether products are computed by oneDNN: where it is exact, unless compiled programs are
    stored. XLA (jaxlib 0.10.2 to 0.12) does not serialize programs with these calls, so the
    persistent compilation cache of JAX would compile them again in each process.
    """
    config: Any = jax.config
    return config.jax_compilation_cache_dir is None and is_available()


@functools.cache
def is_available() -> bool:
    """Whether oneDNN multiplies bytes exactly here. Processors without VNNI add pairs of products
    in 16 bits, where they may saturate.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    with ThreadPoolExecutor(1) as thread:  # without the traces and the mesh of the caller
        return thread.submit(_is_exact).result()


def _is_exact() -> bool:
    """Whether some products of extremes are exact."""
    extremes = np.array([-128, 127, -128, 127, 127, 127, -128, -128], np.int8)
    product = functools.partial(matrix_product, dtype=jnp.int32, in_rows=True)
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves CPUs out
        return False
    for m, n, k in ((1, 3, 8), (5, 17, 40), (64, 64, 256)):
        rows, columns = (
            np.resize(np.roll(extremes, i), (count, k)) for i, count in enumerate((m, n))
        )
        expected = rows.astype(np.int32) @ columns.astype(np.int32).T
        with jax.default_device(cpu), jax.transfer_guard("allow"):
            try:
                y = np.asarray(jax.jit(product)(rows, columns))
            except jax.errors.JaxRuntimeError:  # a jaxlib without this call
                return False
        if not (y == expected).all():
            return False
    return True
