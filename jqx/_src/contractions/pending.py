"""Products of an array that is still to be quantized: a kernel quantizes it inside the product, or
it is quantized before the product.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..calibrators.calibrator import Affine
from ..kernels.products_gpu import products_gpu
from ..kernels.products_tpu import products_tpu
from ..numerics.blocks import Block
from ..numerics.exact import RoundMode
from ..numerics.lookup import format_of
from ..numerics.runtimes import ngraph
from ..tensor.grid import fit
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from ..tensor.targets import kernel_of
from .blocks import HowTo
from .dimensions import Dimensions
from .dot_general import as_stored, contract, is_empty
from .exact import in_fitting_shapes
from .formulation import CPU, PLATFORMS, Planner, formulation
from .kernels import derived_as, multiplies_codes, products
from .kernels_cpu import by_kernel, multiplies_bytes, quantizing
from .ragged_dot import Args, Groups, has_kernel, of_tiles, ragged_dot, tiles_for_kernel

FEW = 64
"""Up to this number of rows, a kernel quantizes them, on a GPU again for each tile of columns. More
rows are quantized first. On CPU, sites that read the same array then share its codes, which matters
more than the cost of a separate call when there are many rows.
"""


class Pending(NamedTuple):
    """An array that is quantized by the contraction that reads it.

    Attributes:
      x: the array.
      spec: how it is quantized, with an absolute granularity.
      affine: its scale and zero point, or `None`.
    """

    x: jax.Array
    spec: QSpec
    affine: Affine | None

    def quantized(self) -> QTensor:
        """Returns the array as a QTensor."""
        return QTensor.quantize(self.x, self.spec, self.affine)

    def scale(self) -> jax.Array:
        """Returns its scale, given or computed; the same on every platform."""
        if self.affine is not None:
            return self.affine[0]
        return fit(self.x, self.spec).scale


def dot_general_pending(
    lhs: Any,
    rhs: Any,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """Returns `jqx.dot_general` of a `Pending` array and a QTensor, in either order."""
    ranks = [(y.x if isinstance(y, Pending) else y).ndim for y in (lhs, rhs)]
    dimensions = Dimensions.of(dimension_numbers, *ranks)
    if isinstance(lhs, Pending):
        y = _product(lhs, rhs, dimensions, precision, preferred_element_type)
    else:
        swapped = _product(rhs, lhs, dimensions.swapped, precision, preferred_element_type)
        y = dimensions.swap_output(swapped)
    return y.astype(preferred_element_type)


def may_quantize(spec: QSpec, q: Any) -> bool:
    """Whether kernels exist that quantize an array by a spec and multiply it by such a weight."""
    return bool(kernel_of(q)) and spec.symmetric and not isinstance(format_of(spec.qtype), Block)


def has_codes_of_kernels(spec: QSpec) -> bool:
    """Whether kernels compute exactly the codes of a spec, for a known scale."""
    return spec.numerics == ngraph and spec.rounding is RoundMode.NEAREST_TOWARD_EVEN


def _product(
    rows: Pending,
    q: QTensor,
    dimensions: Dimensions,
    precision: lax.PrecisionLike,
    dtype: DTypeLike,
) -> jax.Array:
    if q.offset is not None or q.order is not None or is_empty(rows.x):
        return contract(rows.quantized(), q, dimensions, precision)
    x, spec = rows.x, rows.spec
    scale = rows.scale()
    _, q, dimensions = as_stored(x, q, dimensions)
    codes = jax.eval_shape(lambda x, s: quantized(x, s, spec), x, scale)
    how = HowTo.of(codes, q, dimensions, precision)._replace(dtype=jnp.dtype(dtype))
    args = RowArgs(how, spec)
    return PENDING.compute(Rows(x, codes, q, args), x, scale, q)


class RowArgs(NamedTuple):
    """The static arguments of a product that quantizes its left operand.

    Attributes:
      how: those of the product: `HowTo`, or `Args` of a product of groups.
      spec: how the operand is quantized.
    """

    how: Any
    spec: QSpec

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        return self.how.dtype


class Rows(NamedTuple):
    """A float operand to be quantized, and a weight or the matrices of groups, for the planner.

    Attributes:
      lhs: the array.
      codes: the quantized array, as shapes and dtypes only.
      rhs: a QTensor.
      how: the product, and how rows are quantized.
    """

    lhs: Any
    codes: QTensor
    rhs: QTensor
    how: RowArgs


REASON = (
    "a float operand to be quantized, and a weight that is laid out for a kernel: the kernel "
    "quantizes the operand, and multiplies codes"
)


def _quantizes_on(platform: str) -> Callable[[Rows], bool]:
    def applies(case: Rows) -> bool:
        how, spec = case.how
        short = platform == "tpu" or how.dimensions.rows(case.lhs) <= FEW
        has_codes = has_codes_of_kernels(spec)
        return short and has_codes and multiplies_codes(platform, case.codes, case.rhs, how)

    return applies


@formulation(REASON, ("tpu",), _quantizes_on("tpu"), op="dot_general:quantized", finds=True)
def kernel_quantizing_tpu(x: jax.Array, scale: jax.Array, q: QTensor, args: RowArgs) -> jax.Array:
    wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
    return _by_kernel(x.astype(wide), scale, q, args, products_tpu)


@formulation(REASON, ("cuda",), _quantizes_on("gpu"), op="dot_general:quantized", finds=True)
def kernel_quantizing_gpu(x: jax.Array, scale: jax.Array, q: QTensor, args: RowArgs) -> jax.Array:
    return _by_kernel(x, scale, q, args, products_gpu)


def _is_for_package(case: Rows) -> bool:
    how, spec = case.how
    short = how.dimensions.rows(case.lhs) <= FEW
    return short and has_codes_of_kernels(spec) and multiplies_bytes(case.codes, case.rhs, how)


@formulation(
    "a float operand to be quantized, and a weight that is laid out for jqx-cpu: its kernel "
    "quantizes the operand, multiplies codes exactly, and scales the sums as it writes them",
    CPU,
    _is_for_package,
    op="dot_general:quantized",
    finds=True,
)
def package_quantizing(x: jax.Array, scale: jax.Array, q: QTensor, args: RowArgs) -> jax.Array:
    kernel = functools.partial(quantizing, how=args.how, form=format_of(args.spec.qtype))

    def plain(x: jax.Array, scale: jax.Array, q: QTensor) -> jax.Array:
        return in_fitting_shapes(quantized(x, scale, args.spec), q, args.how)

    return derived_as(functools.partial(by_kernel, kernel, plain), plain)(x, scale, q)


@formulation(
    "a float operand to be quantized, and a weight that no kernel reads here: the operand is "
    "quantized first",
    PLATFORMS,
    lambda case: True,
    op="dot_general:quantized",
)
def quantize_first(x: jax.Array, scale: jax.Array, q: QTensor, args: RowArgs) -> jax.Array:
    how = args.how
    return contract(quantized(x, scale, args.spec), q, how.dimensions, how.precision, how.dtype)


PENDING = Planner(
    "dot_general:quantized",
    kernel_quantizing_tpu,
    kernel_quantizing_gpu,
    package_quantizing,
    quantize_first,
)


def _by_kernel(
    x: jax.Array, scale: jax.Array, q: QTensor, args: RowArgs, kernel: Callable[..., jax.Array]
) -> jax.Array:
    def run(x: jax.Array, scale: jax.Array, q: QTensor) -> jax.Array:
        return products(x, scale, q, args.how, format_of(args.spec.qtype), kernel)

    def plain(x: jax.Array, scale: jax.Array, q: QTensor) -> jax.Array:
        return quantize_first.compute(x, scale, q, args)

    return derived_as(run, plain)(x, scale, q)


def quantized(x: jax.Array, scale: jax.Array, spec: QSpec) -> QTensor:
    """Returns an array quantized with a scale."""
    return QTensor.quantize(x, spec, Affine(scale))


# `ragged_dot` of rows that are still to be quantized.


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
    args = RowArgs(Args(precision, jnp.dtype(preferred_element_type)), spec)
    if not isinstance(rhs, QTensor) or 0 in (x.shape[0], rhs.shape[0]):
        return _first(rows.quantized(), rhs, group_sizes, args.how)
    scale = rows.scale()
    codes = jax.eval_shape(lambda x, s: quantized(x, s, spec), x, scale)
    return ROWS_PENDING.compute(Rows(x, codes, rhs, args), x, scale, rhs, group_sizes)


def _first(rows: QTensor, rhs: Any, sizes: jax.Array, how: Args) -> jax.Array:
    return ragged_dot(rows, rhs, sizes, precision=how.precision, preferred_element_type=how.dtype)


def _quantizes_rows_on(platform: str) -> Callable[[Rows], bool]:
    def applies(case: Rows) -> bool:
        short = platform == "tpu" or case.lhs.shape[0] <= FEW
        case_of_codes = Groups(case.codes, case.rhs, case.how.how)
        return short and has_codes_of_kernels(case.how.spec) and has_kernel(case_of_codes, platform)

    return applies


@formulation(REASON, ("tpu",), _quantizes_rows_on("tpu"), op="ragged_dot:quantized", finds=True)
def ragged_kernel_quantizing_tpu(
    x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array, args: RowArgs
) -> jax.Array:
    wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype
    return _rows_by_kernel(x.astype(wide), scale, q, sizes, args, products_tpu)


@formulation(REASON, ("cuda",), _quantizes_rows_on("gpu"), op="ragged_dot:quantized", finds=True)
def ragged_kernel_quantizing_gpu(
    x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array, args: RowArgs
) -> jax.Array:
    return _rows_by_kernel(x, scale, q, sizes, args, products_gpu)


@formulation(
    "rows in groups to be quantized, and matrices that no kernel reads here: the rows are "
    "quantized first",
    PLATFORMS,
    lambda case: True,
    op="ragged_dot:quantized",
)
def ragged_quantize_first(
    x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array, args: RowArgs
) -> jax.Array:
    return _first(quantized(x, scale, args.spec), q, sizes, args.how)


ROWS_PENDING = Planner(
    "ragged_dot:quantized",
    ragged_kernel_quantizing_tpu,
    ragged_kernel_quantizing_gpu,
    ragged_quantize_first,
)


def _rows_by_kernel(
    x: jax.Array,
    scale: jax.Array,
    q: QTensor,
    sizes: jax.Array,
    args: RowArgs,
    kernel: Callable[..., jax.Array],
) -> jax.Array:
    def run(x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array) -> jax.Array:
        tiles = tiles_for_kernel(sizes, x.shape[0])
        row_scale = jnp.broadcast_to(scale, (x.shape[0], scale.shape[1]))
        return of_tiles(tiles, x, row_scale, q, args.how, args.spec.qtype, kernel)

    def plain(x: jax.Array, scale: jax.Array, q: QTensor, sizes: jax.Array) -> jax.Array:
        return ragged_quantize_first.compute(x, scale, q, sizes, args)

    return derived_as(run, plain)(x, scale, q, sizes)
