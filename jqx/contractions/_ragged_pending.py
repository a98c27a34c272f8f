"""`ragged_dot` of rows that are still to be quantized, as in `_pending.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..kernels._shared import products_gpu, products_tpu
from ..tensor import QSpec, QTensor
from ._how._formulation import PLATFORMS, Planner, formulation
from ._how._kernels_of_codes import derived_as
from ._pending import FEW, REASON, Pending, Rows, has_codes_of_kernels, quantized
from ._ragged_dot import ragged_dot
from ._ragged_kernels import has_kernel, of_tiles, tiles_for_kernel
from ._ragged_tiles import Args, Groups


class QuantizingArgs(NamedTuple):
    """The static arguments of a product of groups that quantizes its rows.

    Attributes:
      how: those of the product.
      spec: how rows are quantized.
    """

    how: Args
    spec: QSpec


def ragged_dot_pending(
    rows: Pending,
    rhs: Any,
    group_sizes: jax.Array,
    *,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """Returns `jqx.ragged_dot` of rows that are still to be quantized."""
    x, spec = rows.x, rows.spec
    args = QuantizingArgs(Args(precision, jnp.dtype(preferred_element_type)), spec)
    if not isinstance(rhs, QTensor) or 0 in (x.shape[0], rhs.shape[0]):
        return _first(rows.quantized(), rhs, group_sizes, args.how)
    scale = rows.scale()
    codes = jax.eval_shape(lambda x, s: quantized(x, s, spec), x, scale)
    return ROWS_PENDING.compute(Rows(x, codes, rhs, args), x, scale, rhs, group_sizes)


def _first(rows: QTensor, rhs: Any, sizes: jax.Array, how: Args) -> jax.Array:
    return ragged_dot(rows, rhs, sizes, precision=how.precision, preferred_element_type=how.dtype)


def _is_for(platform: str) -> Callable[[Rows[QuantizingArgs]], bool]:
    def applies(case: Rows[QuantizingArgs]) -> bool:
        few = platform == "tpu" or case.lhs.shape[0] <= FEW
        case_of_codes = Groups(case.codes, case.rhs, case.how.how)
        return few and has_codes_of_kernels(case.how.spec) and has_kernel(case_of_codes, platform)

    return applies


@formulation(REASON, ("tpu",), _is_for("tpu"), op="ragged_dot:quantized", finds=True)
def ragged_kernel_quantizing_tpu(
    x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array, args: QuantizingArgs
) -> jax.Array:
    wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
    return _by_kernel(x.astype(wide), scale, q, sizes, args, products_tpu)


@formulation(REASON, ("cuda",), _is_for("gpu"), op="ragged_dot:quantized", finds=True)
def ragged_kernel_quantizing_gpu(
    x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array, args: QuantizingArgs
) -> jax.Array:
    return _by_kernel(x, scale, q, sizes, args, products_gpu)


@formulation(
    "rows in groups to be quantized, and matrices that no kernel reads here: the rows are "
    "quantized first",
    PLATFORMS,
    lambda case: True,
    op="ragged_dot:quantized",
)
def ragged_quantize_first(
    x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array, args: QuantizingArgs
) -> jax.Array:
    return _first(quantized(x, scale, args.spec), q, sizes, args.how)


ROWS_PENDING = Planner(
    "ragged_dot:quantized",
    ragged_kernel_quantizing_tpu,
    ragged_kernel_quantizing_gpu,
    ragged_quantize_first,
)


def _by_kernel(
    x: jax.Array,
    scale: jax.Array,
    q: QTensor,
    sizes: jax.Array,
    args: QuantizingArgs,
    kernel: Callable[..., jax.Array],
) -> jax.Array:
    def run(x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array) -> jax.Array:
        tiles = tiles_for_kernel(sizes, x.shape[0])
        each = jnp.broadcast_to(scale, (x.shape[0], scale.shape[1]))
        return of_tiles(tiles, x, each, q, args.how, args.spec.qtype, kernel)

    def plain(x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array) -> jax.Array:
        return ragged_quantize_first.compute(x, scale, q, sizes, args)

    return derived_as(run, plain)(x, scale, q, sizes)
