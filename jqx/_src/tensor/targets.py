"""Which layout of a weight each target contracts fastest.

With a scale per channel, [N, K] (the contracted axis last) is best: both operands are read along
their rows. Blocks along the contracted axis become a batch axis, and [K, N] keeps each block
contiguous. TPUs transpose operands while loading, and use [K, N] for both. XLA on CPU stores
jnp.int4 in one byte per code, and converts it 5 times slower than int8. Its library multiplies only
int8, so XLA would copy a weight of another dtype in every call. Where compilers for GPUs and TPUs
would make a wider copy, a kernel of jqx reads [K, N]; see `layout_for_kernel`.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat, package_cpu
from ..checks import name_of, shown_as
from ..errors import fail
from ..numerics.blocks import Block
from ..numerics.exact import bit_width
from ..numerics.lookup import format_of
from ..numerics.minifloats import Minifloat, Specials
from ..numerics.qtype import Integer, QType
from .layout import Layout, Packing, has_int8_layout, has_uint4_layout, lay_out

# Which weights a kernel of jqx reads, and the layout that the kernel needs.
#
# Compilers handle one scale for each channel well: they multiply by it after the product, and
# convert integers and 8-bit floats inside the product. Kernels handle the other cases: scales in
# blocks along the contracted axis, codes that are looked up, and rows that are quantized inside the
# product. The kernels for CPUs are in the package jqx-cpu.


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
    is_supported = looked_up or is_integer or form.storage in FLOAT8
    if not is_supported or q.size == 0 or n % size:
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
    has_kernel = is_known and package_cpu.has_groups(n, size, form.bits)
    if not (has_kernel and q.size and package_cpu.is_installed()) or _is_sharded(q.values):
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
    max_bits = 5 if element.specials is Specials.INFINITY_AND_NAN else 4
    return form.bits == 8 and 3 <= element.exponent_bits <= max_bits


def _is_sharded(x: Any) -> bool:
    """Whether an array is on several devices; compilers do not partition kernels."""
    is_placed = isinstance(x, jax.ShapeDtypeStruct) or compat.is_concrete(x)
    sharding = x.sharding if is_placed else compat.explicit_sharding(x)
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


T = TypeVar("T", bound=Any)
"""A QTensor; its own file imports this one."""

TARGETS = {
    "cpu": "cpu",
    "gpu": "gpu",
    "tpu": "tpu",
    "h200": "gpu",
    "b200": "gpu",
    "tpu-v5e": "tpu",
    "tpu-v6e": "tpu",
    "tpu7x": "tpu",
}
"""Platforms by the names of targets: backends, and machines as in `jqx.lowering`."""


def check_target(function: str, target: Any, contracted: Any) -> None:
    """Checks the arguments of `pack_for` apart from the tensors."""
    if not isinstance(target, str) or target not in TARGETS:
        facts = shown_as("target", target)
        fix = f"pass one of {', '.join(map(repr, TARGETS))}, such as jax.default_backend()."
        raise fail(function, "`target` is unknown.", given=facts, fix=fix)
    is_integer = isinstance(contracted, (int, np.integer))
    if contracted is not None and not (is_integer and contracted in (-2, -1)):
        problem = "`contracted` is neither of the last two axes."
        fix = "leave it out if the scale determines it, or pass -2 or -1; x @ w contracts -2."
        raise fail(function, problem, given=shown_as("contracted", contracted), fix=fix)


def lay_out_for(
    function: str,
    q: T,
    target: str,
    contracted: int | None = None,
    place: str = "",
    *,
    default: int = -2,
    kernels: bool = True,
) -> T:
    """Gives a QTensor the layout for a target; see `jqx.pack_for`. `place` is its path, for errors.
    `default` is the contracted axis if neither the scale nor `contracted` determines it.
    `kernels` allows layouts for kernels.
    """
    if q.ndim < 2:
        return q
    axis, platform = _contracted_axis(function, q, contracted, place, default), TARGETS[target]
    if axis is not None and kernels:
        for_kernel = layout_for_kernel(q, axis, platform, target)
        if for_kernel is not None:
            return lay_out(q, for_kernel)
    int8 = platform == "cpu" and has_int8_layout(format_of(q.qtype))
    if axis is None:
        return lay_out(q, Layout(int8=int8))
    comes_last = platform != "tpu" and not _is_blocked(q, axis)
    return lay_out(q, Layout(swapped=comes_last == (axis == -2), int8=int8))


def cache_for(function: str, q: T, target: str) -> T:
    """Returns keys or values in the layout that the kernel of `jqx.decode_attention` reads on a
    target; unchanged for a CPU, which has no such kernel.
    """
    check_target(function, target, None)
    platform, form = TARGETS[target], format_of(q.qtype)
    if platform == "cpu":
        return q
    are_numbers = isinstance(form, Integer) or form.storage in FLOAT8
    if q.layout is not None or not are_numbers or form.storage not in CACHES:
        facts, names = f"target == {target!r} for {q!r}", ", ".join(map(name_of, CACHES))
        fix = f"use {names} in the default layout, or leave out `target`."
        raise fail(function, f"no kernel reads a cache of {form.name}.", given=facts, fix=fix)
    return lay_out(q, Layout(kernel=platform))


def _contracted_axis(
    function: str, q: Any, contracted: int | None, place: str, default: int
) -> int | None:
    """Returns which of the last two axes is contracted: the one that the scale determines, or else
    the one that is asked for; `None` if each index of both axes has its own scale, so that neither
    can be contracted.
    """
    scaled_axes = [axis for axis in (-2, -1) if q.groups.sizes[axis] == 1 < q.shape[axis]]
    blocked = [axis for axis in (-2, -1) if _is_blocked(q, axis)]
    axis, reason = None, "each index of both axes has its own scale"
    if len(scaled_axes) == 1:
        axis, reason = -3 - scaled_axes[0], f"axis {scaled_axes[0]} has a scale for each index"
    elif len(blocked) == 1:
        axis, reason = blocked[0], f"axis {blocked[0]} has its scales in blocks"
    elif not scaled_axes:
        return default if contracted is None else int(contracted)
    if contracted is not None and contracted != axis:
        facts = f"contracted == {contracted} for {q!r}{place}"
        fix = f"leave `contracted` out, which gives contracted == {axis}: {reason}."
        raise fail(function, "`contracted` contradicts the scale.", given=facts, fix=fix)
    return axis


def _is_blocked(q: Any, axis: int) -> bool:
    return 1 < q.groups.sizes[axis] < q.shape[axis]
