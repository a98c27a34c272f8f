"""Which weights a kernel of jqx reads, and the layout that the kernel needs.

Compilers handle one scale for each channel well: they multiply by it after the product, and convert
integers and 8-bit floats inside the product. Kernels handle the other cases: scales in blocks along
the contracted axis, codes that are looked up, and rows that are quantized inside the product. The
kernels for CPUs are in the package jqx-cpu.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat, _package_cpu
from ..numerics import Block, Integer, Minifloat, QType, Specials, format_of
from ..numerics._shared import bit_width
from ._layout import Layout, Packing, has_int8_layout, has_uint4_layout

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
"""8-bit floats that kernels convert."""

CACHES = (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4, *FLOAT8)
"""Dtypes of keys and values that kernels read."""

LANES = 128
"""Columns of a tile on a TPU: with other numbers of columns, a compiler copies codes in each call.
"""

ALIGNED = 16
"""On a GPU, rows and columns of 4-bit codes must be multiples of this size."""


def layout_for_kernel(q: Any, axis: int, platform: str, target: str) -> Layout | None:
    """Returns the layout of a weight for a kernel: [..., K, N], where K is the contracted axis and
    N the other one; `None` if no kernel reads this weight.

    Args:
      q: a QTensor of two axes or more.
      axis: the contracted axis, -2 or -1.
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      target: the machine, for features of a single chip.
    """
    form = format_of(q.qtype)
    if platform == "cpu":
        return _for_package(q, axis, form)
    element = form.elements if isinstance(form, Block) else form
    size, n = q.groups.sizes[axis], q.shape[axis]
    looked_up = has_uint4_layout(form)
    is_integer = isinstance(element, Integer) and form.bits <= 8
    known = looked_up or is_integer or form.storage in FLOAT8
    if not known or q.size == 0 or n % size:
        return None
    # With one scale per channel, a kernel gains by quantizing rows; on a GPU, XLA is as fast.
    if not looked_up and size == n and platform == "gpu":
        return None
    if platform == "gpu" and not _is_aligned(q, 4 if looked_up else _bits(form)):
        return None
    if platform == "tpu" and _bits(form) == 2 and q.shape[-3 - axis] % LANES:
        return None  # the compiler (libtpu 0.0.42) would abort
    # Only the matrix units of TPU7x convert float4.
    native = target == "tpu7x" and form.storage == jnp.float4_e2m1fn
    return Layout(swapped=axis == -1, uint4=looked_up and not native, kernel=platform)


def _for_package(q: Any, axis: int, form: Any) -> Layout | None:
    """Returns the layout for jqx-cpu, if it is installed: the contracted axis last, and codes of
    less than 8 bits packed without gaps.
    """
    n, size = q.shape[axis], q.groups.sizes[axis]
    is_known = isinstance(form, Integer) or is_decoded(form)
    has_kernel = is_known and _package_cpu.has_groups(n, size, form.bits)
    if not (has_kernel and q.size and _package_cpu.is_installed()) or _is_sharded(q.values):
        return None
    packing = Packing(axis, n) if form.bits < 8 else None
    int8 = form.bits == 8 and has_int8_layout(form)
    return Layout(packing=packing, swapped=axis == -2, int8=int8, kernel="cpu")


def is_decoded(form: QType) -> bool:
    """Whether jqx-cpu decodes a format inside the product: any 4-bit format except integers, and
    8-bit floats that float16 represents, up to a power of two.
    """
    element = form.elements if isinstance(form, Block) else form
    if isinstance(element, Integer):
        return False
    if form.bits == 4 or not isinstance(element, Minifloat):
        return form.bits == 4
    most = 5 if element.specials is Specials.INFINITY_AND_NAN else 4
    return form.bits == 8 and 3 <= element.exponent_bits <= most


def _is_sharded(x: Any) -> bool:
    """Whether an array is on several devices; compilers do not partition kernels."""
    known = isinstance(x, jax.ShapeDtypeStruct) or _compat.is_concrete(x)
    sharding = x.sharding if known else _compat.explicit_sharding(x)
    return sharding is not None and len(sharding.device_set) > 1


def kernel_of(q: Any) -> str:
    """Returns the platform of the kernel that a QTensor is laid out for, else `""`."""
    layout = getattr(q, "layout", None)
    return layout.kernel if isinstance(layout, Layout) else ""


def _bits(form: Any) -> int:
    return bit_width(form.storage) if jnp.issubdtype(form.storage, jnp.integer) else form.bits


def _is_aligned(q: Any, bits: int) -> bool:
    """Whether kernels on a GPU can read the codes: 8 bits, or 4 bits in whole tiles; not 2 bits."""
    return bits == 8 or (bits == 4 and all(n % ALIGNED == 0 for n in q.shape[-2:]))
