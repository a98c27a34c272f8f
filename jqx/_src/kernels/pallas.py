"""Pallas, which is imported when the first kernel is traced, and the call of a kernel."""

import functools
import importlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .. import compat, compat_kernels
from ..errors import fail, message
from ..numerics.exact import RoundMode, divide
from ..numerics.lookup import E8M0
from ..numerics.qtype import Integer, QType


@functools.cache
def pl() -> Any:
    """Returns the module that is common to all platforms."""
    return importlib.import_module("jax.experimental.pallas")


@functools.cache
def tpu() -> Any:
    """Returns the module for TPUs."""
    return importlib.import_module("jax.experimental.pallas.tpu")


@functools.cache
def triton() -> Any:
    """Returns the module for GPUs, whose kernels Triton compiles.

    Raises:
      ImportError: this release of JAX does not have it.
    """
    try:
        return importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        raise fail(
            "pack_for",
            f"kernels for GPUs are compiled by Triton, which jax {jax.__version__} does not "
            "support.",
            fix="install a release with it, such as 0.12, or restore the default layout: "
            "q.unpack().",
            error=ImportError,
        ) from error


def call(
    kernel: Callable[..., None],
    name: str,
    result: Any,
    arrays: Sequence[jax.Array],
    *,
    multiplies: DTypeLike,
    interpret: bool,
    chips: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Calls a kernel on arrays.

    Args:
      kernel: a function of references to blocks of the arrays and of the results.
      name: its name in a compiled program.
      result: shape and dtype of its result, or a list of them.
      arrays: the arrays that it reads.
      multiplies: the dtype that matrix units multiply, which `jqx.lowering` shows.
      interpret: whether to run it step by step on any platform, as tests do.
      chips: the kinds of TPUs that it supports, if it does not support all of them.
      **options: options of `pallas_call`.

    Raises:
      ValueError: on lowering, if the program is exported, is partitioned over devices by the
        compiler, or is for a TPU of another kind.
    """
    arrays = compat.vary_alike(*arrays)
    axes = compat.varies_along(arrays[0])
    if axes:
        result = jax.tree.map(lambda shape: compat.shape_that_varies(shape, axes), result)
    if not interpret:
        texts = {"exported": _EXPORTED, "partitioned": _PARTITIONED, "other": _OTHER}
        checked = compat_kernels.for_kernel(arrays[0], chips=chips, **texts)
        arrays = (checked, *arrays[1:])
    run = pl().pallas_call(kernel, result, name=name, interpret=interpret, **options)
    with jax.named_scope(f"multiplies_{_name_in_hlo(jnp.dtype(multiplies))}"):
        return run(*arrays)


def _name_in_hlo(dtype: jnp.dtype) -> str:
    kinds = {"float8_": "f8", "bfloat": "bf", "float": "f", "uint": "u", "int": "s"}
    start = next(kind for kind in kinds if dtype.name.startswith(kind))
    return kinds[start] + dtype.name[len(start) :]


_EXPORTED = message(
    "jax.export",
    "a kernel of jqx cannot be exported: its program is valid only for one release of JAX.",
    given="a weight that pack_for, or target=, has laid out for a kernel",
    fix="pass target=False to jqx.ptq, or leave out target= and pack_for; q.unpack() restores the "
    "default layout.",
)

_PARTITIONED = message(
    "jax.jit",
    "a compiler cannot partition a kernel of jqx over devices: each would read whole arrays.",
    given="a weight or cache that is laid out for a kernel, in a program for several devices",
    fix="call it in jax.shard_map over all axes of the mesh, or pass target=False to jqx.ptq, or "
    "leave out target= and "
    "pack_for; q.unpack() restores the default layout.",
)

_OTHER = message(
    "pack_for",
    "a weight is laid out for another TPU: this one does not convert its codes.",
    given="{chip}, and codes that are stored as float4, the layout for target='tpu7x'",
    fix="lay the weights out for this machine: jqx.pack_for(params, 'tpu').",
)


# The operands of a kernel of a product, the same on every platform.


class Operands(NamedTuple):
    """The arrays of a product [M, K] x [K, N].

    Attributes:
      x: rows, [M, K].
      codes: [K, N], or [E, K, N] with a `group`; with one more leading axis if `step` is given.
      parameters: scales and zero points, [G, N] each, or [E, G, N].
      x_scale: scales of rows: [M, 1], or one per group in the layout of a kernel; or `None`.
      group: the index of the matrix of each tile of rows, int32; `~group` means that the tile is
        not used. `None`: there is only one matrix.
      step: the index along the leading axis of the codes, int32 []; `None`: there is no such axis.
    """

    x: jax.Array
    codes: jax.Array
    parameters: Sequence[jax.Array]
    x_scale: jax.Array | None = None
    group: jax.Array | None = None
    step: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, K and N."""
        m, k = self.x.shape
        return m, k, self.codes.shape[-1]

    @property
    def scales(self) -> list[jax.Array]:
        """The scale of rows in a list, or an empty list."""
        return [] if self.x_scale is None else [self.x_scale]


# Conversion of codes and scales to numbers in registers, shared by kernels of all platforms.


Table = tuple[float, ...] | None
"""The table of numbers of codes of 4 bits or fewer; `None` if a code is itself the number."""


def numbers(codes: jax.Array, table: Table) -> jax.Array:
    """Returns the numbers of codes, float32."""
    if table is None:
        # They have 8 bits or fewer; the integer unit uses int32 for all of them.
        wide = codes if jnp.issubdtype(codes.dtype, jnp.floating) else codes.astype(jnp.int32)
        return wide.astype(jnp.float32)
    return _looked_up(codes.astype(jnp.int32), table)


def _looked_up(codes: jax.Array, table: Sequence[float]) -> jax.Array:
    """Returns entries of a table by a tree of selects, with one level for each bit."""
    count = 1 << (len(table) - 1).bit_length()
    entries = [jnp.float32(table[min(i, len(table) - 1)]) for i in range(count)]
    bit = 0
    while len(entries) > 1:
        is_set = (codes >> jnp.int32(bit)) & jnp.int32(1) == jnp.int32(1)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [jnp.where(is_set, high, low) for low, high in pairs]
        bit += 1
    return entries[0]


def scales(scale: jax.Array) -> jax.Array:
    """Returns scales as float32; uint8 are the exponents of powers of two, as in E8M0."""
    if scale.dtype == E8M0:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    code = scale.astype(jnp.int32)
    # 2**-127 is a subnormal float32, and 255 is NaN.
    bits = jnp.where(code == 255, 0x7FC00000, jnp.where(code == 0, 1 << 22, code << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


# Quantization of rows in registers, to the codes of `QTensor.quantize` for symmetric formats.


class Arithmetic(NamedTuple):
    """Operations on float32 that a platform rounds as in IEEE 754.

    Attributes:
      divide: `(x, divisor) -> quotient`; the divisor broadcasts to `x`.
      to_nearest: rounds to an integer, ties to even.
    """

    divide: Callable[[jax.Array, jax.Array], jax.Array]
    to_nearest: Callable[[jax.Array], jax.Array]


def arithmetic_on(platform: str, interpret: bool) -> Arithmetic:
    """Returns the operations of a platform; in interpret mode, those of XLA on CPU."""
    if interpret:
        return Arithmetic(divide, _to_nearest)
    if platform == "gpu":
        return Arithmetic(_divide_gpu, _to_nearest_gpu)
    return Arithmetic(operator.truediv, _to_nearest)


def _to_nearest(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _divide_gpu(x: jax.Array, divisor: jax.Array) -> jax.Array:
    return _in_ptx("div.rn.f32 $0, $1, $2;", x, jnp.broadcast_to(divisor, x.shape))


def _to_nearest_gpu(x: jax.Array) -> jax.Array:
    return _in_ptx("cvt.rni.f32.f32 $0, $1;", x)


def _in_ptx(instruction: str, *args: jax.Array) -> jax.Array:
    """Runs a GPU instruction on float32 that Triton lacks, or has with another rounding."""
    shape = jax.ShapeDtypeStruct(args[0].shape, jnp.float32)
    (result,) = triton().elementwise_inline_asm(
        instruction,
        args=args,
        constraints=",".join(["=r", *["r"] * len(args)]),
        pack=1,
        result_shape_dtypes=[shape],
    )
    return result


def multiplied(form: QType) -> jnp.dtype:
    """Returns the dtype in which codes of a format are multiplied."""
    return jnp.dtype(jnp.int8) if isinstance(form, Integer) else form.storage


def codes_of(x: jax.Array, scale: jax.Array, form: QType, arithmetic: Arithmetic) -> jax.Array:
    """Returns the codes of float32 values, of the dtype in which they are multiplied.

    `scale` broadcasts to `x`. NaN becomes 0 as an integer, and stays NaN as a float.
    """
    y = arithmetic.divide(x, scale)
    if isinstance(form, Integer):
        codes = jnp.clip(arithmetic.to_nearest(y), form.low, form.high)
        return jnp.where(jnp.isnan(y), 0.0, codes).astype(jnp.int32).astype(jnp.int8)
    y = jnp.where((x == 0) & ~jnp.isnan(scale), 0.0, y)
    bits = form.encode_bits(y, RoundMode.NEAREST_TOWARD_EVEN)
    return lax.bitcast_convert_type(bits, form.storage)


# Numbers as sums of bfloat16, which matrix units multiply without loss.


EXACT = 3
"""The number of bfloat16 terms that represent a float32 exactly."""


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Returns bfloat16 numbers whose sum is `x`: one is rounded, three are exact.

    Bits are truncated, because XLA removes a rounding that is followed by a widening.
    """
    if parts == 1:
        return [x.astype(jnp.bfloat16)]
    terms, left = [], x.astype(jnp.float32)
    for _ in range(parts):
        bits = lax.bitcast_convert_type(left, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        terms.append(part.astype(jnp.bfloat16))
        left = left - part
    return terms
