"""Groups: which elements of an array share a scale, expressed as shapes. They reshape an array so
that a scale broadcasts to it, and reduce an array to one value per scale.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import export, lax

from .. import _package_cpu
from .._checks import is_at_least
from .._compat_kernels import alone_or_in_parts
from .._errors import fail

LARGE = 2**14
"""The least number of elements of an array for which a kernel is called."""

LEAST = 32
"""The least number of elements that share a scale for which a kernel is called."""

MOST = 2**24
"""The largest number of elements that a kernel counts, in float32."""


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
        known = {(length, count): size for length, count, size in blocks}
        sizes = tuple(
            known.get((n, m), n if m == 1 else 1 if m == n else n // m)
            for n, m in zip(shape, scale, strict=True)
        )
        return cls(tuple(shape), sizes)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scale: the number of blocks along each axis."""
        return tuple(1 if b == n else -(-n // b) for n, b in self._axes)

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """(length, count, size) of the axes whose block size the shape of the scale leaves open.

        They do not name axes, so they stay valid under vmap over any other axis.
        """
        known = {
            (n, m, b)
            for (n, b), m in zip(self._axes, self.scale_shape, strict=True)
            if n != m * b and m > 1
        }
        if len({(n, m) for n, m, _ in known}) < len(known):
            raise fail(
                "QTensor",
                "two axes of the same length have equally many blocks of different sizes.",
                given=f"shape {self.shape}, block sizes {self.sizes}",
                expected="block sizes that can be told apart by length and number of blocks",
                fix="use one block size for both axes.",
            )
        return tuple(sorted(known))

    @property
    def per_scale(self) -> int:
        """Number of elements that share a scale; a tail has fewer."""
        return math.prod(self.sizes)

    @property
    def _axes(self) -> list[tuple[int, int]]:
        return list(zip(self.shape, self.sizes, strict=True))

    def is_blocked(self, axis: int) -> bool:
        """Whether a scale is shared by blocks, not by the whole axis or a single index."""
        return self._is_blocked(self.shape[axis], self.sizes[axis])

    def _is_blocked(self, n: int, b: int) -> bool:
        return b not in (1, n) and b < n  # equality first: a symbolic size may not be ordered

    def split(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """Splits each blocked axis in two, (blocks, size); a tail is padded with `fill`."""
        padding = [(0, (-n) % b if self._is_blocked(n, b) else 0, 0) for n, b in self._axes]
        if any(high for _, high, _ in padding):
            x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
        return x.reshape(
            [
                part
                for n, b in self._axes
                for part in ((-(-n // b), b) if self._is_blocked(n, b) else (n,))
            ]
        )

    def split_scale(self, scale: jax.Array) -> jax.Array:
        """Reshapes a scale so that it broadcasts, axis by axis, to what `split` returns."""
        return scale.reshape(
            [
                part
                for (n, b), m in zip(self._axes, scale.shape, strict=True)
                for part in ((m, 1) if self._is_blocked(n, b) else (m,))
            ]
        )

    def join(self, x: jax.Array) -> jax.Array:
        """Inverts `split`; the padding of a tail is dropped."""
        x = x.reshape([-(-n // b) * b if self._is_blocked(n, b) else n for n, b in self._axes])
        return x if x.shape == self.shape else x[tuple(slice(n) for n in self.shape)]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the result of `split` along which a scale is shared."""
        axes, i = [], 0
        for n, b in self._axes:
            i += self._is_blocked(n, b)
            if b != 1:
                axes.append(i)
            i += 1
        return tuple(axes)

    def reduce(self, f: Callable[..., jax.Array], x: jax.Array, fill: float) -> jax.Array:
        """Reduces to the shape of the scale by `f`, such as `jnp.max`, whose unit is `fill`."""
        kept = f(self.split(x, fill), axis=self.axes, keepdims=True, initial=fill)
        return kept.reshape(self.scale_shape)

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
        first = self.axes[0] if self.axes else x.ndim
        together = self.axes == tuple(range(first, x.ndim))
        known = not any(map(export.is_symbolic_dim, x.shape))
        return (
            _package_cpu.is_installed()
            and x.dtype == jnp.float32
            and known
            and together
            and x.size >= LARGE
            and math.prod(x.shape[first:]) >= LEAST
        )

    def _in_rows(self, x: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        """Returns rows of elements that share a scale, and the shape of the scales. A scale has
        several rows if there are few scales.
        """
        kept = tuple(1 if axis in self.axes else n for axis, n in enumerate(x.shape))
        rows = math.prod(kept)
        parts = 64 if rows < 64 and x.size // rows % 64 == 0 else 1
        return x.reshape(rows * parts, -1), kept

    def _by_kernel(self, x: jax.Array) -> jax.Array:
        rows, kept = self._in_rows(x)
        bits = _magnitude_bits(_package_cpu.magnitudes(rows))
        bits = jnp.max(bits.reshape(math.prod(kept), -1), axis=1)
        return lax.bitcast_convert_type(bits, x.dtype).reshape(kept)

    @functools.partial(jax.jit, static_argnums=0)
    def extremes(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the least and the largest number for each scale, and the number of NaN values,
        int32. Without any number the extremes are infinite.
        """
        plain, in_blocks = self._extremes_at_once, self.split(x)
        if not self._has_kernel(in_blocks) or in_blocks.size != x.size or self.per_scale > MOST:
            return plain(x)

        @jax.custom_jvp
        def found(x: jax.Array) -> jax.Array:
            def kernel(x: jax.Array) -> jax.Array:
                return alone_or_in_parts(self._extremes_by_kernel, in_floats, x)

            return lax.platform_dependent(x, cpu=kernel, default=in_floats)

        def in_floats(x: jax.Array) -> jax.Array:
            return jnp.stack([part.astype(x.dtype) for part in plain(x)])

        found.defjvps(lambda tangent, y, x: jax.jvp(in_floats, (x,), (tangent,))[1])
        low, high, nans = found(x)
        return low, high, nans.astype(jnp.int32)

    def _extremes_at_once(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        nan = jnp.isnan(x)
        low = self.reduce(jnp.min, jnp.where(nan, jnp.full_like(x, jnp.inf), x), jnp.inf)
        high = self.reduce(jnp.max, jnp.where(nan, jnp.full_like(x, -jnp.inf), x), -jnp.inf)
        return low, high, self.count(nan)

    def _extremes_by_kernel(self, x: jax.Array) -> jax.Array:
        rows, kept = self._in_rows(self.split(x))
        low, high, nans = _package_cpu.ranges(rows).reshape(math.prod(kept), -1, 3).T
        parts = jnp.min(low, 0), jnp.max(high, 0), jnp.sum(nans, 0)
        return jnp.stack([part.reshape(self.scale_shape) for part in parts])

    def count(self, is_so: jax.Array) -> jax.Array:
        """Returns how many elements are true for each scale, int32."""
        kind = jnp.float32 if is_at_least(self.per_scale, 2**31) else jnp.int32  # cannot wrap
        return self.reduce(jnp.sum, is_so.astype(kind), 0).astype(jnp.int32)  # not int64

    def _in_steps(self, x: jax.Array) -> jax.Array:
        bits = _magnitude_bits(x)
        for axis in reversed(self.axes):
            bits = _maximum(bits, axis)
        return lax.bitcast_convert_type(bits, x.dtype)

    def _at_once(self, x: jax.Array) -> jax.Array:
        bits = jnp.max(_magnitude_bits(x), axis=self.axes, initial=0, keepdims=True)
        return lax.bitcast_convert_type(bits, x.dtype)

    def _on_tpu(self, x: jax.Array) -> jax.Array:
        """Uses 32 bits: a TPU cannot take a maximum of 16-bit values."""
        wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
        return self._at_once(wide).astype(x.dtype)

    def __str__(self) -> str:
        own = tuple(i for i, (n, b) in enumerate(self._axes) if b == 1 and n != 1)
        if any(self._is_blocked(n, b) for n, b in self._axes):
            named = {i: b for i, (n, b) in enumerate(self._axes) if b != n}
            return f"per_block({named})"
        return f"per_axis{own}".replace(",)", ")") if own else "per_tensor"


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of magnitudes, as integers."""
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    return lax.bitcast_convert_type(x, integer) & jnp.iinfo(integer).max


def _maximum(x: jax.Array, axis: int) -> jax.Array:
    """Returns the maximum of nonnegative integers along an axis, which is kept.

    A long axis is reduced in two steps. XLA on CPU runs the first in vectors and on all cores. It
    leaves 64 (or 8) maxima, next to each other if the axis is the last.
    """
    n, shape = x.shape[axis], x.shape
    last = axis == x.ndim - 1
    parts = 64 if n % 64 == 0 and is_at_least(n, 512) else None
    if parts is None and last and n % 8 == 0 and is_at_least(n, 9):
        parts = 8
    if parts is not None:
        pair = (n // parts, parts) if last else (parts, n // parts)
        x = x.reshape(*shape[:axis], *pair, *shape[axis + 1 :])
        x = lax.optimization_barrier(jnp.max(x, axis=axis if last else axis + 1))
    return jnp.max(x, axis=axis, initial=0, keepdims=True)
