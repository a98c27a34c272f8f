"""Which layout of a weight each target contracts fastest.

With a scale per channel, [N, K] (the contracted axis last) is best: both operands are read along
their rows. Blocks along the contracted axis become a batch axis, and [K, N] keeps each block
contiguous. TPUs transpose operands while loading, and use [K, N] for both. XLA on CPU stores
jnp.int4 in one byte per code, and converts it 5 times slower than int8. Its library multiplies only
int8, so XLA would copy a weight of another dtype in every call. Where compilers for GPUs and TPUs
would make a wider copy, a kernel of jqx reads [K, N]; see `_for_kernels.py`.
"""

from typing import Any, TypeVar

import numpy as np

from .._checks import name_of
from .._errors import fail
from ..numerics import Integer, format_of
from ._for_kernels import CACHES, FLOAT8, layout_for_kernel
from ._layout import Layout, has_int8_layout, lay_out

T = TypeVar("T", bound=Any)
"""A QTensor; its own file imports this one."""

TARGETS = {
    "cpu": "cpu",
    "gpu": "gpu",
    "tpu": "tpu",
    "h200": "gpu",
    "tpu-v5e": "tpu",
    "tpu-v6e": "tpu",
    "tpu7x": "tpu",
}
"""Platforms by the names of targets: backends, and machines as in `jqx.lowering`."""


def check_target(function: str, target: Any, contracted: Any) -> None:
    """Checks the arguments of `pack_for` apart from the tensors."""
    if not (isinstance(target, str) and target in TARGETS):
        raise fail(
            function,
            "`target` is unknown.",
            given=f"target == {target!r}"
            if isinstance(target, str)
            else f"an object of type {type(target).__name__}",
            expected=f"one of {', '.join(map(repr, TARGETS))}",
            fix="pass one of these, such as jax.default_backend().",
        )
    if contracted is not None and not (
        isinstance(contracted, (int, np.integer)) and contracted in (-2, -1)
    ):
        raise fail(
            function,
            "`contracted` is neither of the last two axes.",
            given=f"contracted == {contracted!r}"
            if isinstance(contracted, (int, float))
            else f"an object of type {type(contracted).__name__}",
            expected="-2 or -1, counted from the last axis, or None",
            fix="leave it out if the scale determines it, or pass -2 for x @ w.",
        )


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
    for_kernel = None
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
    known = [name_of(dtype) for dtype in CACHES]
    are_numbers = isinstance(form, Integer) or form.storage in FLOAT8
    if not (q.layout is None and are_numbers and form.storage in CACHES):
        raise fail(
            function,
            f"no kernel reads a cache of {form.name}.",
            given=f"target == {target!r} for {q!r}",
            expected=f"one of {', '.join(known)}, in the default layout",
            fix="use one of these formats, or leave out `target`.",
        )
    return lay_out(q, Layout(kernel=platform))


def _contracted_axis(
    function: str, q: Any, contracted: int | None, place: str, default: int
) -> int | None:
    """Returns which of the last two axes is contracted: the one that the scale determines, or else
    the one that is asked for; `None` if each index of both axes has its own scale, so that neither
    can be contracted.
    """
    own = [axis for axis in (-2, -1) if q.groups.sizes[axis] == 1 < q.shape[axis]]
    blocked = [axis for axis in (-2, -1) if _is_blocked(q, axis)]
    if len(own) == 1:
        found, why = -3 - own[0], f"axis {own[0]} has a scale for each index"
    elif len(blocked) == 1:
        found, why = blocked[0], f"axis {blocked[0]} has its scales in blocks"
    elif own:
        found, why = None, "each index of both axes has its own scale"
    else:
        return default if contracted is None else int(contracted)
    if contracted is not None and contracted != found:
        raise fail(
            function,
            "`contracted` contradicts the scale.",
            given=f"contracted == {contracted} for {q!r}{place}",
            expected=f"contracted == {found}: {why}",
            fix="leave `contracted` out.",
        )
    return found


def _is_blocked(q: Any, axis: int) -> bool:
    return 1 < q.groups.sizes[axis] < q.shape[axis]
