"""Granularity: which elements share a scale. It resolves to the shape of a scale."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .. import package_cpu
from ..checks import (
    called,
    check_fields,
    check_instance,
    flag,
    instance,
    is_at_least,
    normalize_axes,
    number,
    shown,
    whole,
)
from ..compat_kernels import alone_or_in_parts
from ..errors import fail

# Groups: which elements of an array share a scale, expressed as shapes. They reshape an array so
# that a scale broadcasts to it, and reduce an array to one value per scale.


_MIN_ELEMENTS = 2**14
"""The least number of elements of an array for which a kernel is called."""

_MIN_SHARED = 32
"""The least number of elements that share a scale for which a kernel is called."""

_MAX_COUNTED = 2**24
"""The largest number of elements that a kernel counts, in float32."""

_MAX_SIZE = 2**31 - 1
"""The largest number of elements along an axis that share a scale."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """An array of `shape` in blocks of `sizes`, with one scale for each block.

    Along each axis the block size is the length of the axis if the whole axis shares one scale (0
    for an empty axis), 1 if each index has its own scale, and any value between for blocks. The
    last block may be smaller; it is the tail.

    Attributes:
      shape: shape of the array.
      sizes: block size along each axis.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_scale(
        cls, shape: Sequence[int], scale: Sequence[int], blocks: Iterable[Sequence[int]] = ()
    ) -> "Groups":
        """Returns the groups for a given shape of the scale, each dim of which divides that of the
        array; `blocks` has (length, count, size) for axes with a tail.
        """
        block_sizes, sizes = {}, []
        for length, count, size in blocks:
            block_sizes[length, count] = size
        for n, m in zip(shape, scale, strict=True):
            sizes.append(block_sizes.get((n, m), n if m == 1 else 1 if m == n else n // m))
        return cls(tuple(shape), tuple(sizes))

    @functools.cached_property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scale: the number of blocks along each axis."""
        return tuple(1 if b == n else -(-n // b) for n, b in self._axes)

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """(length, count, size) of the axes whose block size the shape of the scale leaves open.

        They do not name axes, so they stay valid under vmap over any other axis.
        """
        sizes_by_counts = {
            (n, m, b)
            for (n, b), m in zip(self._axes, self.scale_shape, strict=True)
            if n != m * b and m > 1
        }
        if len({(n, m) for n, m, _ in sizes_by_counts}) < len(sizes_by_counts):
            problem = "two axes of the same length have equally many blocks of different sizes, "
            problem += f"{self.sizes}, in shape {self.shape}."
            raise fail("QTensor", problem, fix="use one block size for both axes.")
        return tuple(sorted(sizes_by_counts))

    @property
    def per_scale(self) -> int:
        """Number of elements that share a scale; a tail has fewer."""
        return math.prod(self.sizes)

    @functools.cached_property
    def _axes(self) -> list[tuple[int, int]]:
        return list(zip(self.shape, self.sizes, strict=True))

    @functools.cached_property
    def _parts(self) -> list[tuple[int, ...]]:
        """For each axis the axes that `split` makes of it: (blocks, size), or itself."""
        axes = enumerate(self._axes)
        return [(-(-n // b), b) if self.is_blocked(axis) else (n,) for axis, (n, b) in axes]

    @functools.cached_property
    def _split(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """How `split` pads an array, empty if nothing is padded, and the shape that it returns."""
        pairs = zip(self._parts, self.shape, strict=True)
        padding = [(0, math.prod(part) - n if len(part) == 2 else 0, 0) for part, n in pairs]
        is_padded = any(high for _, high, _ in padding)
        return padding if is_padded else [], [n for part in self._parts for n in part]

    def is_blocked(self, axis: int) -> bool:
        """Whether a scale is shared by blocks, not by the whole axis or a single index."""
        n, b = self.shape[axis], self.sizes[axis]
        return b not in (1, n) and b < n  # equality first: a symbolic size may not be ordered

    def split(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """Splits each blocked axis in two, (blocks, size); a tail is padded with `fill`."""
        padding, sizes = self._split
        if padding:
            x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
        return x.reshape(sizes)

    def split_scale(self, scale: jax.Array) -> jax.Array:
        """Reshapes a scale so that it broadcasts, axis by axis, to what `split` returns."""
        pairs = zip(self._parts, scale.shape, strict=True)
        return scale.reshape([n for part, m in pairs for n in (m, 1)[: len(part)]])

    def join(self, x: jax.Array) -> jax.Array:
        """Inverts `split`; the padding of a tail is dropped."""
        x = x.reshape([math.prod(part) for part in self._parts])
        return x if x.shape == self.shape else x[tuple(slice(n) for n in self.shape)]

    @functools.cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes of the result of `split` along which a scale is shared."""
        ends = itertools.accumulate(map(len, self._parts))
        return tuple(end - 1 for end, size in zip(ends, self.sizes, strict=True) if size != 1)

    def reduce(self, f: Callable[..., jax.Array], x: jax.Array, fill: float) -> jax.Array:
        """Reduces to the shape of the scale by `f`, such as `jnp.max`, whose unit is `fill`."""
        reduced = f(self.split(x, fill), axis=self.axes, keepdims=True, initial=fill)
        return reduced.reshape(self.scale_shape)

    @functools.partial(jax.jit, static_argnums=0)  # traced once for all sites of one shape
    def largest_magnitude(self, x: jax.Array) -> jax.Array:
        """Returns the largest magnitude for each scale, in the dtype of `x`; a NaN makes it NaN.

        The maximum is taken of integers: the bits of magnitudes have the same order, with NaN above
        all. XLA on CPU loses NaN in a maximum of floats along 32 or more contiguous elements
        (jaxlib 0.10.2).
        """
        forms = {"cpu": self._on_cpu, "tpu": self._on_tpu, "default": self._at_once}
        largest = lax.platform_dependent(self.split(x), **forms)
        return largest.reshape(self.scale_shape)

    def _on_cpu(self, x: jax.Array) -> jax.Array:
        """Uses a kernel of jqx-cpu if there is one. XLA computes the kernel's input once; without a
        kernel it would compute it for the maximum, and again for what is scaled.
        """
        if not self._has_kernel(x):
            return self._in_steps(x)
        return alone_or_in_parts(self._by_kernel, self._in_steps, lax.stop_gradient(x))

    def _has_kernel(self, x: jax.Array) -> bool:
        """Whether jqx-cpu is installed, and elements that share a scale are contiguous."""
        first_axis = self.axes[0] if self.axes else x.ndim
        is_trailing = self.axes == tuple(range(first_axis, x.ndim))
        is_static = not any(map(export.is_symbolic_dim, x.shape))
        return (
            package_cpu.is_installed()
            and x.dtype == jnp.float32
            and is_static
            and is_trailing
            and x.size >= _MIN_ELEMENTS
            and math.prod(x.shape[first_axis:]) >= _MIN_SHARED
        )

    def _in_rows(self, x: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        """Returns rows of elements that share a scale, and the shape of the scales. A scale has
        several rows if there are few scales.
        """
        scale_shape = tuple(1 if axis in self.axes else n for axis, n in enumerate(x.shape))
        rows = math.prod(scale_shape)
        parts = 64 if rows < 64 and x.size // rows % 64 == 0 else 1
        return x.reshape(rows * parts, -1), scale_shape

    def _by_kernel(self, x: jax.Array) -> jax.Array:
        rows, scale_shape = self._in_rows(x)
        bits = magnitude_bits(package_cpu.magnitudes(rows))
        bits = jnp.max(bits.reshape(math.prod(scale_shape), -1), axis=1)
        return lax.bitcast_convert_type(bits, x.dtype).reshape(scale_shape)

    @functools.partial(jax.jit, static_argnums=0)
    def extremes(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the least and the largest number for each scale, and the number of NaN values,
        int32. Without any number the extremes are infinite.
        """
        blocks = self.split(x)
        is_for_kernel = self._has_kernel(blocks) and blocks.size == x.size
        if not is_for_kernel or self.per_scale > _MAX_COUNTED:
            return self._extremes_at_once(x)

        def in_floats(x: jax.Array) -> jax.Array:
            return jnp.stack([part.astype(x.dtype) for part in self._extremes_at_once(x)])

        @jax.custom_jvp
        def in_floats_by_kernel(x: jax.Array) -> jax.Array:
            kernel = functools.partial(alone_or_in_parts, self._extremes_by_kernel, in_floats)
            return lax.platform_dependent(x, cpu=kernel, default=in_floats)

        in_floats_by_kernel.defjvps(lambda tangent, y, x: jax.jvp(in_floats, (x,), (tangent,))[1])
        low, high, nans = in_floats_by_kernel(x)
        return low, high, nans.astype(jnp.int32)

    def _extremes_at_once(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        nan = jnp.isnan(x)
        low = self.reduce(jnp.min, jnp.where(nan, jnp.full_like(x, jnp.inf), x), jnp.inf)
        high = self.reduce(jnp.max, jnp.where(nan, jnp.full_like(x, -jnp.inf), x), -jnp.inf)
        return low, high, self.count(nan)

    def _extremes_by_kernel(self, x: jax.Array) -> jax.Array:
        rows, scale_shape = self._in_rows(self.split(x))
        low, high, nans = package_cpu.ranges(rows).reshape(math.prod(scale_shape), -1, 3).T
        parts = jnp.min(low, 0), jnp.max(high, 0), jnp.sum(nans, 0)
        return jnp.stack([part.reshape(self.scale_shape) for part in parts])

    def count(self, mask: jax.Array) -> jax.Array:
        """Returns how many elements are true for each scale, int32."""
        kind = jnp.float32 if is_at_least(self.per_scale, 2**31) else jnp.int32  # cannot wrap
        return self.reduce(jnp.sum, mask.astype(kind), 0).astype(jnp.int32)  # not int64

    def _in_steps(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(maximum_in_steps(magnitude_bits(x), self.axes), x.dtype)

    def _at_once(self, x: jax.Array) -> jax.Array:
        bits = jnp.max(magnitude_bits(x), axis=self.axes, initial=0, keepdims=True)
        return lax.bitcast_convert_type(bits, x.dtype)

    def _on_tpu(self, x: jax.Array) -> jax.Array:
        """Uses 32 bits: a TPU cannot take a maximum of 16-bit values."""
        wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
        return self._at_once(wide).astype(x.dtype)

    def __str__(self) -> str:
        single_axes = tuple(i for i, (n, b) in enumerate(self._axes) if b == 1 and n != 1)
        if any(map(self.is_blocked, range(len(self.shape)))):
            named = {i: b for i, (n, b) in enumerate(self._axes) if b != n}
            return f"per_block({named})"
        return f"per_axis{single_axes}".replace(",)", ")") if single_axes else "per_tensor"


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of magnitudes, as integers: these have the order of the magnitudes, with
    infinity and then NaN at the end.

    The sign is cleared before the cast, because XLA on CPU masks the bits of some constants
    wrongly, and again after it. XLA drops the first where a value cannot be negative, as after a
    ReLU, but the sign of a NaN may be set there: that of inf - inf is, on x86.
    """
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    bits = lax.bitcast_convert_type(jnp.abs(x), integer)
    return bits & jnp.asarray(jnp.iinfo(integer).max, integer)


def maximum_in_steps(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns the maximum of nonnegative integers along axes, which are kept.

    A long axis is reduced in two steps. XLA on CPU runs the first in vectors and on all cores. It
    leaves 64 (or 8) maxima, next to each other if the axis is the last.
    """
    for axis in reversed(axes):
        n, shape = x.shape[axis], x.shape
        is_last = axis == x.ndim - 1
        parts = 64 if n % 64 == 0 and is_at_least(n, 512) else None
        if parts is None and is_last and n % 8 == 0 and is_at_least(n, 9):
            parts = 8
        if parts is not None:
            pair = (n // parts, parts) if is_last else (parts, n // parts)
            x = x.reshape(*shape[:axis], *pair, *shape[axis + 1 :])
            x = lax.optimization_barrier(jnp.max(x, axis=axis if is_last else axis + 1))
        x = jnp.max(x, axis=axis, initial=0, keepdims=True)
    return x


# Rows of the elements that share a scale, for sorting, counting or searching scale by scale.


def rows_of(x: jax.Array, groups: Groups, fill: float) -> jax.Array:
    """Returns one row per scale, `(*scale_shape, elements)`; the row of a tail is padded."""
    x, axes = groups.split(x, fill), groups.axes
    length = math.prod(x.shape[axis] for axis in axes)
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return x.reshape(*groups.scale_shape, length)


def members(groups: Groups) -> jax.Array:
    """Returns the number of elements that share each scale, uint32, in the shape of the scale."""
    rank = len(groups.shape)
    total = jnp.ones((1,) * rank, jnp.uint32)
    axes = zip(groups.shape, groups.sizes, groups.scale_shape, strict=True)
    for axis, (n, b, m) in enumerate(axes):
        sizes = np.minimum(b, n - b * np.arange(m)).astype(np.uint32)
        total = total * np.expand_dims(sizes, [i for i in range(rank) if i != axis])
    return total


# Checks of the arguments of calibrators and granularities.


_INTEGER = whole()


def _check_integers(function: str, argument: str, numbers: Any, count: int | None = None) -> Any:
    """Returns integers as a tuple, after checking their type and their number."""
    has_length = isinstance(numbers, (tuple, list)) and count in (None, len(numbers))
    if not has_length or not all(map(_INTEGER.is_kind, numbers)):
        problem = f"`{argument}` must hold integers: {shown(numbers)}."
        fix = "pass axis numbers, as in per_axis(0, 2), or pairs of an axis and a size."
        raise fail(function, problem, fix=fix, error=TypeError)
    return tuple(map(int, numbers))


def _check_group(granularity: Any) -> None:
    """Checks the size of a group, and whether the last one may be smaller."""
    fix = "pass a size of 1 or more, such as per_group(32), and a bool for tail."
    check_fields("per_group", granularity, fix, size=whole(1, _MAX_SIZE), tail=flag())


def _check_tile(granularity: Any, **rules: Any) -> None:
    """Checks the size of a tile: a number of elements, or a share of an axis."""
    size = number(0, 1, above=True) if isinstance(granularity.size, float) else whole(1, _MAX_SIZE)
    fix = "pass a size of 1 or more, or a share of an axis, such as 0.25."
    check_fields("interop.from_qwix", granularity, fix, size=size, **rules)


def _unfit(granularity: object, shape: Sequence[int], problem: str, fix: str) -> Exception:
    """Returns the error for a shape that a granularity cannot divide."""
    function = str(granularity).partition("(")[0]
    return fail(function, problem, given=f"{granularity} for shape {tuple(shape)}", fix=fix)


def _check_size(granularity: object, shape: Sequence[int], axis: int, size: int) -> None:
    """Checks that an axis with more than one block of `size` has no symbolic size, as `jax.export`
    has them.
    """
    n = shape[axis]
    if size != 1 and export.is_symbolic_dim(n) and is_at_least(n, size + 1):
        problem = f"axis {axis} has a symbolic size, so its blocks are not known."
        fix = "use one scale per token, channel or tensor there, or export with a known size."
        raise _unfit(granularity, shape, problem, fix)


def _check_divides(granularity: Any, shape: Sequence[int], axis: int, size: int) -> None:
    """Checks that blocks divide an axis, unless the last one may be smaller."""
    if not granularity.tail and shape[axis] % size != 0:
        fix = f"pass tail=True for a smaller last block, or a size that divides {shape[axis]}."
        raise _unfit(granularity, shape, f"blocks of {size} do not divide axis {axis}.", fix)


class Granularity(Protocol):
    """A frozen, hashable value that specifies which elements share a scale.

    Attributes:
      is_relative: whether it depends on a site, through the axes that a contraction keeps.
    """

    is_relative: ClassVar[bool] = False

    def resolve(self, rank: int, kept: Sequence[int]) -> "Granularity":
        """Returns the absolute granularity for an operand of this rank that keeps axes `kept`."""
        return self

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns which elements of an array of `shape` share a scale."""
        ...

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scale of an array of `shape`; both have the same rank."""
        return self.groups(shape).scale_shape


@dataclasses.dataclass(frozen=True)
class PerAxis(Granularity):
    """One scale for each index along `axes`, shared along all other axes."""

    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _check_integers("per_axis", "axes", self.axes))

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerAxis":
        """Returns itself with non-negative axes."""
        return PerAxis(normalize_axes("per_axis", self.axes, rank))

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns blocks of size 1 along `axes`, and of the full axis length along all others."""
        axes = normalize_axes("per_axis", self.axes, len(shape))
        sizes = tuple(1 if i in axes else n for i, n in enumerate(shape))
        return Groups(tuple(shape), sizes)

    def __str__(self) -> str:
        return f"per_axis{self.axes}" if len(self.axes) != 1 else f"per_axis({self.axes[0]})"


@dataclasses.dataclass(frozen=True)
class PerTensor(PerAxis):
    """One scale for the whole array: no axis has its own."""

    axes: tuple[int, ...] = dataclasses.field(default=(), init=False)

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerTensor":
        """Returns itself."""
        return self

    def __str__(self) -> str:
        return "per_tensor"


@dataclasses.dataclass(frozen=True)
class PerBlock(Granularity):
    """One scale for each block, shared along the axes that are not named.

    Attributes:
      sizes: (axis, block size) pairs.
      tail: whether the last block along an axis may be smaller.
    """

    sizes: tuple[tuple[int, int], ...]
    tail: bool = False

    def __post_init__(self) -> None:
        pairs = self.sizes if isinstance(self.sizes, tuple) else (self.sizes,)
        sizes = tuple(_check_integers("per_block", "sizes", pair, count=2) for pair in pairs)
        if not sizes or not all(1 <= size <= _MAX_SIZE for _, size in sizes):
            problem = f"`sizes` has no blocks, or one without elements: {shown(dict(sizes))}."
            fix = "pass sizes of 1 or more, such as {0: 32}, or use jqx.per_tensor()."
            raise fail("per_block", problem, fix=fix)
        object.__setattr__(self, "sizes", sizes)
        check_fields("per_block", self, tail=flag())

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerBlock":
        """Returns itself with non-negative axes."""
        pairs = [(normalize_axes("per_block", axis, rank)[0], n) for axis, n in self.sizes]
        return PerBlock(tuple(sorted(pairs)), self.tail)

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns the blocks; raises if a size does not divide its axis and there is no tail."""
        sizes = dict(self.resolve(len(shape), ()).sizes)
        if len(sizes) != len(self.sizes):
            fix = "name each axis once, counted from the front or from the end."
            raise _unfit(self, shape, "an axis is named twice.", fix)
        for axis, size in sizes.items():
            _check_size(self, shape, axis, size)
            _check_divides(self, shape, axis, size)
        return Groups(tuple(shape), tuple(min(sizes.get(i, n), n) for i, n in enumerate(shape)))

    def __str__(self) -> str:
        return f"per_block({dict(self.sizes)}{', tail=True' if self.tail else ''})"


@dataclasses.dataclass(frozen=True)
class PerRun(Granularity):
    """One scale for each run of `size` elements along `axes`, flattened with the last axis fastest;
    every index of all other axes has its own scales. This is what `per_group` resolves to.

    With a tail a run holds as many whole inner axes as fit: 27 elements of a 3x3 kernel for 32.
    """

    axes: tuple[int, ...]
    size: int
    tail: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _check_integers("per_group", "axes", self.axes))
        _check_group(self)

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns the blocks that make up the runs; raises if there are none."""
        sizes, remaining = [1] * len(shape), self.size
        for axis in reversed(normalize_axes("per_group", self.axes, len(shape))):
            n = shape[axis]
            _check_size(self, shape, axis, remaining)
            if n <= remaining and (self.tail or n == 0 or remaining % n == 0):
                sizes[axis], remaining = n, remaining // n if n else 1
                continue
            _check_divides(self, shape, axis, remaining)
            sizes[axis], remaining = min(remaining, n), 1
        if remaining != 1 and not self.tail:
            problem = f"axes {self.axes} hold fewer than {self.size} elements."
            raise _unfit(self, shape, problem, "use a smaller group, or pass tail=True.")
        return Groups(tuple(shape), tuple(sizes))

    def __str__(self) -> str:
        return f"per_group({self.size}{', tail=True' if self.tail else ''}) along {self.axes}"


class _Relative(Granularity):
    """Raises for `groups` and `scale_shape`: the axes come from a contraction."""

    is_relative: ClassVar[bool] = True

    def groups(self, shape: Sequence[int]) -> NoReturn:
        """Raises, because there is no contraction here."""
        name = str(self) if "(" in str(self) else f"{self}()"
        problem = f"{name} is relative to a contraction and has no meaning outside of one."
        fix = "name the axes or blocks: jqx.per_axis(...), or jqx.per_block({axis: size})."
        raise fail(name.partition("(")[0], problem, fix=fix)


@dataclasses.dataclass(frozen=True)
class PerKeptAxis(_Relative):
    """One scale for each index of every axis that a contraction keeps; resolved at a site."""

    name: str

    def __post_init__(self) -> None:
        check_fields("per_channel", self, "pass for example 'per_channel'.", name=instance(str))

    def resolve(self, rank: int, kept: Sequence[int]) -> PerAxis:
        """Returns `per_axis` of the kept axes, or `per_tensor` if there are none."""
        axes = normalize_axes(self.name, tuple(kept), rank)
        return PerAxis(axes) if axes else PerTensor()

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class PerGroup(_Relative):
    """`per_channel` with blocks of `size` along the contracted axes; resolved at a site."""

    size: int
    tail: bool = False

    def __post_init__(self) -> None:
        _check_group(self)

    def resolve(self, rank: int, kept: Sequence[int]) -> PerRun:
        """Returns runs along the axes that are not kept."""
        axes = normalize_axes("per_group", tuple(kept), rank)
        return PerRun(tuple(i for i in range(rank) if i not in axes), self.size, self.tail)

    def __str__(self) -> str:
        return f"per_group({self.size}{', tail=True' if self.tail else ''})"


@dataclasses.dataclass(frozen=True)
class PerTile(_Relative):
    """`per_channel` with blocks of `size` along the last contracted axis, shared along the others,
    as Qwix has it; resolved at a site. A size that is a float is a share of the axis.
    """

    size: int | float

    def __post_init__(self) -> None:
        _check_tile(self)

    def resolve(self, rank: int, kept: Sequence[int]) -> Granularity:
        """Returns blocks along each axis that is kept, and along the last of the others."""
        axes = normalize_axes("interop.from_qwix", tuple(kept), rank)
        others = [axis for axis in range(rank) if axis not in axes]
        if isinstance(self.size, float) and others:
            return PerShare(axes, others[-1], self.size)
        sizes = dict.fromkeys(axes, 1) | {axis: int(self.size) for axis in others[-1:]}
        return PerBlock(tuple(sorted(sizes.items())))

    def __str__(self) -> str:
        return f"per_tile({self.size})"


@dataclasses.dataclass(frozen=True)
class PerShare(Granularity):
    """One scale for each part of an axis, which is a share of it, and for each index of `axes`."""

    axes: tuple[int, ...]
    axis: int
    size: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _check_integers("interop.from_qwix", "axes", self.axes))
        _check_tile(self, axis=whole(0))

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns the parts; raises unless all are alike."""
        n = shape[self.axis]
        size = 0 if export.is_symbolic_dim(n) else round(n * self.size)
        if size == 0 or n % size:
            fix = f"choose another share, or a number of elements, that divides axis {self.axis}."
            problem = "the parts of an axis are not of one size."
            given = f"{self} for shape {tuple(shape)}"
            raise fail("interop.from_qwix", problem, given=given, fix=fix)
        return PerBlock(tuple({**dict.fromkeys(self.axes, 1), self.axis: size}.items())).groups(
            shape
        )

    def __str__(self) -> str:
        return f"per_tile({self.size}) along {self.axis}"


def is_without_blocks(granularity: Granularity) -> bool:
    """Whether a scale never has blocks, whatever the array."""
    return isinstance(granularity, (PerAxis, PerKeptAxis))


def _axes_instead(name: str) -> str | None:
    """Returns what to write in place of an argument of `per_axis`."""
    return "pass the axes by position: jqx.per_axis(0)." if name.startswith("ax") else None


@called("per_tensor", "it takes no arguments; jqx.per_axis(0) takes axes.")
def per_tensor() -> Granularity:
    """Returns the granularity of one scale for the whole array.

    Example:
      >>> import jqx
      >>> jqx.per_tensor().scale_shape((3, 4))
      (1, 1)
    """
    return PerTensor()


@called("per_axis", "pass the axes by position: jqx.per_axis(0).", _axes_instead)
def per_axis(*axes: int) -> Granularity:
    """Returns the granularity of one scale for each index along `axes`.

    Args:
      *axes: axis numbers, as in NumPy; negative numbers count from the end.

    Raises:
      TypeError: if an axis is not an integer.
      ValueError: if no axis is given; on use, if an array does not have one of them.

    Example:
      >>> import jqx
      >>> jqx.per_axis(-1).scale_shape((3, 4))
      (1, 4)
    """
    if not axes:
        fix = "pass the axes that have their own scales, or use jqx.per_tensor()."
        raise fail("per_axis", "no axis given.", fix=fix)
    return PerAxis(axes)


@called("per_channel", "it takes no arguments: the axes are those that a contraction keeps.")
def per_channel() -> Granularity:
    """Returns one scale for each index of every axis that a contraction keeps.

    The granularity is relative and is resolved at a site: for `x @ w` it is axis 1 of `w`, for
    `x @ w.T` axis 0. Batch axes of the contraction are kept as well.

    Example:
      >>> import jqx
      >>> jqx.per_channel().resolve(rank=2, kept=(1,)).scale_shape((3, 4))
      (1, 4)
    """
    return PerKeptAxis("per_channel")


@called("per_block", "pass the sizes of a block: jqx.per_block({0: 32}).")
def per_block(sizes: Mapping[int, int], tail: bool = False) -> Granularity:
    """Returns the granularity of one scale for each block.

    Args:
      sizes: the block size along each axis; negative axes count from the end. An axis that is not
        named shares one scale. With size 1 each index of the axis has its own scale.
      tail: whether the last block along an axis may be smaller.

    Raises:
      TypeError: if an axis or a size is not an integer, or `sizes` is not a dict.
      ValueError: if no axis is given, or a size is below 1; on use, if a size does not divide its
        axis and `tail` is False.

    Example:
      >>> import jqx
      >>> jqx.per_block({0: 32, 1: 1}).scale_shape((64, 3))
      (2, 3)
      >>> jqx.per_block({0: 32}, tail=True).scale_shape((100, 3))
      (4, 1)
    """
    check_instance("per_block", "sizes", sizes, Mapping, fix="pass a dict such as {0: 32}.")
    return PerBlock(tuple(sizes.items()), tail)


@called("per_group", "pass the size of a group: jqx.per_group(32).")
def per_group(size: int, tail: bool = False) -> Granularity:
    """Returns `per_channel()` with blocks of `size` along the axes that a contraction sums over.

    The granularity is relative and is resolved at a site: for `x @ w` it has blocks along axis 0 of
    `w`, one row of blocks for each index of axis 1. Several contracted axes are flattened into one,
    with the last axis fastest.

    Args:
      size: number of elements that share a scale.
      tail: whether groups may be smaller: the last group along an axis, and all groups if several
        contracted axes do not divide `size` (27 elements of a 3x3 kernel share a scale for 32).

    Raises:
      TypeError: if `size` is not an integer.
      ValueError: if `size` is below 1; on use, if it does not divide and `tail` is False.

    Example:
      >>> import jqx
      >>> jqx.per_group(32).resolve(rank=2, kept=(1,)).scale_shape((64, 3))
      (2, 3)
    """
    return PerGroup(size, tail)


@called("per_token", "it takes no arguments: the axes are those that a contraction keeps.")
def per_token() -> Granularity:
    """Returns `per_channel()` under the name used for activations: one scale for each token.

    Example:
      >>> import jqx
      >>> jqx.per_token().resolve(rank=3, kept=(0, 1)).scale_shape((2, 5, 8))
      (2, 5, 1)
    """
    return PerKeptAxis("per_token")
