"""`KVCache`: keys and values of attention in 4 or 2 bits, or fp8."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .. import compat
from ..checks import as_dtype, as_real, called, check_integer, check_real, shown
from ..errors import fail
from ..numerics.packing import pack_bits, unpack_bits
from ..table import pairs_html

# Groups of numbers as codes of few bits between the minimum and the maximum of each group.


_PARTS = {4: (1.0,), 2: (1.0, 0.9, 0.8, 0.7)}
"""The parts of the range of a group that are tried, by bits."""


class Groups(NamedTuple):
    """Numbers `low + step * code` along the last axis.

    Attributes:
      codes: uint8 [..., size * bits / 8], packed.
      low: the number of code 0, float16 [...].
      step: the distance of two codes, float16 [...]; 0 if all numbers of a group are equal.
    """

    codes: jax.Array
    low: jax.Array
    step: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...], bits: int) -> "Groups":
        """Returns groups of zeros; the last axis of `shape` is that of a group."""
        *lead, size = shape
        low = jnp.zeros(lead, jnp.float16)
        return cls(jnp.zeros((*lead, size * bits // 8), jnp.uint8), low, low)

    @classmethod
    def of(cls, x: jax.Array, bits: int) -> "Groups":
        """Quantizes groups along the last axis, rounding to nearest, ties to even.

        Codes span the range from the minimum to the maximum, or a part of it if that loses less. A
        NaN, an infinity, or a number beyond the range of float16 makes its whole group NaN.
        """
        real = x.astype(jnp.float32)
        low, high = real.min(-1), real.max(-1)
        # XLA on CPU may lose a NaN in the minimum and maximum of vectors.
        low = jnp.where(jnp.isnan(real).any(-1), jnp.nan, low)
        best, least_error = None, jnp.inf
        for part in _PARTS[bits]:
            cut = (high - low) * ((1 - part) / 2)
            candidate = cls._between(real, low + cut, high - cut, bits)
            error = jnp.square(candidate.values(bits, real.shape[-1]) - real).sum(-1)
            if best is None:
                best, least_error = candidate, error
                continue
            better = error < least_error
            pairs = zip(best, candidate, strict=True)
            best = cls(*(jnp.where(_spread(better, a), b, a) for a, b in pairs))
            least_error = jnp.where(better, error, least_error)
        assert best is not None
        return best

    @classmethod
    def _between(cls, x: jax.Array, low: jax.Array, high: jax.Array, bits: int) -> "Groups":
        highest = 2**bits - 1
        step, low = ((high - low) / highest).astype(jnp.float16), low.astype(jnp.float16)
        divisor = jnp.where(step > 0, step, jnp.ones_like(step)).astype(jnp.float32)[..., None]
        codes = jnp.round((x - low.astype(jnp.float32)[..., None]) / divisor)
        codes = jnp.clip(jnp.nan_to_num(codes), 0, highest).astype(jnp.uint8)
        return cls(pack_bits(codes, bits, codes.ndim - 1), low, step)

    def values(self, bits: int, size: int) -> jax.Array:
        """Returns the numbers, float32 [..., size]."""
        codes = unpack_bits(self.codes, bits, self.codes.ndim - 1, size)
        low, step = (x.astype(jnp.float32)[..., None] for x in (self.low, self.step))
        return low + step * codes.astype(jnp.float32)

    def put(self, groups: "Groups", positions: jax.Array, axis: int) -> "Groups":
        """Writes groups at positions along an axis; drops those out of bounds."""

        def put(array: jax.Array, update: jax.Array) -> jax.Array:
            index = (slice(None),) * axis + (positions,)
            return array.at[index].set(update, mode="drop", unique_indices=True)

        return Groups(*map(put, self, groups))


def _spread(is_better: jax.Array, x: jax.Array) -> jax.Array:
    return is_better[(..., *(None,) * (x.ndim - is_better.ndim))]


_BITS = {"int4": 4, "int2": 2}
_FORMATS = (*_BITS, "fp8")
_GROUP, _TAIL, _FIRST = 16, 32, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """A quantized cache of the keys and values of attention: a pytree, for `jit`, `scan` and
    `vmap`. `KVCache.empty` makes one, `append` adds tokens, `attend` computes attention.

    In `"int4"` and `"int2"`, keys have a minimum and a step (float16) for each channel and 16
    tokens; values have them for each token and 16 channels. Keys have channels of large values,
    values do not. The last 16 to 31 tokens stay in float. So do the first 4, which all later tokens
    attend to. In `"fp8"`, each value is a `float8_e4m3fn` number times a scale for its head. Keys
    are quantized as they are given: apply the rotary embedding before.

    Attributes:
      key_codes: codes of keys.
      value_codes: codes of values.
      first: keys and values of the first tokens, in float, [2, batch, 4, heads, width].
      tail: those of the last ones, [2, batch, 32, heads, width]; both hold no tokens in `"fp8"`.
      length: number of tokens, int32.
      format: `"int4"`, `"int2"` or `"fp8"`.
      capacity: maximum number of tokens.

    Source: Liu et al., arXiv:2402.02750 (KIVI); the first tokens: Xiao et al., arXiv:2309.17453.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> cache = jqx.KVCache.empty(batch=1, length=64, heads=2, width=32, format="int4")
      >>> k, v, q = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 32))
      >>> cache = jax.jit(jqx.KVCache.append)(cache, k, v)
      >>> cache
      KVCache(int4, 40 of 64 tokens, 24,580 bytes)
      >>> exact = jax.nn.dot_product_attention(q, k, v, is_causal=True)
      >>> bool(jnp.abs(cache.attend(q) - exact).max() < 0.1)
      True
    """

    key_codes: Any
    value_codes: Any
    first: jax.Array
    tail: jax.Array
    length: jax.Array
    format: str = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})

    @classmethod
    @called(
        "KVCache.empty", "for example jqx.KVCache.empty(batch=1, length=512, heads=4, width=64)."
    )
    def empty(
        cls,
        *,
        batch: int,
        length: int,
        heads: int,
        width: int,
        format: str = "int4",
        dtype: DTypeLike = jnp.float32,
        scales: tuple[Any, Any] | None = None,
    ) -> "KVCache":
        """Returns a cache of no tokens.

        Args:
          batch: number of sequences, all of one length.
          length: capacity in tokens.
          heads: number of heads of keys and values.
          width: size of a head.
          format: `"int4"`, `"int2"` or `"fp8"`.
          dtype: dtype of the tokens that stay in float.
          scales: scales of keys and of values in `"fp8"`, finite and above 0, one for each head:
            arrays [heads], or numbers or arrays [1], as files have them; `None` is 1.

        Raises:
          TypeError: a size is not an integer, or `dtype` is not floating point.
          ValueError: a size is not positive, `format` is unknown, `width` does not fit groups of 16
            channels, or `scales` have the wrong shape, are not finite or not above 0, or are given
            for a format other than `"fp8"`. (Under `jit`, the numbers are not checked.)
        """
        name = "KVCache.empty"
        sizes = {"batch": batch, "length": length, "heads": heads, "width": width}
        for field, value in sizes.items():
            if check_integer(name, field, value) < 1:
                fix = "pass the sizes of the keys."
                raise fail(name, f"`{field}` == {value} is not positive.", fix=fix)
        check_format(name, "format", format)
        dtype = as_dtype(name, "dtype", dtype)
        check_real(name, "`dtype`", dtype)
        count = jnp.zeros((), jnp.int32)
        if format == "fp8":
            shape = batch, length, heads, width
            keys, values = (_Scaled.empty(name, shape, x) for x in scales or (1, 1))
            none = jnp.zeros((2, batch, 0, heads, width), dtype)
            return cls(keys, values, none, none, count, format, length)
        if scales is not None:
            problem = f"the format {format!r} does not use `scales`, but those of its groups."
            raise fail(name, problem, fix="leave scales out.")
        bits, group_size = _BITS[format], min(width, _GROUP)
        if width % group_size or group_size * bits % 8:
            problem = f"`width` == {width} is no multiple of the group size, or its codes of bytes."
            raise fail(name, problem, fix="pad the heads with zeros, or use format='fp8'.")
        groups = -(-length // _GROUP)
        keys = Groups.zeros((batch, groups, heads, width, _GROUP), bits)
        values = Groups.zeros((batch, groups, _GROUP, heads, width // group_size, group_size), bits)
        head, tail = (jnp.zeros((2, batch, n, heads, width), dtype) for n in (_FIRST, _TAIL))
        return cls(keys, values, head, tail, count, format, length)

    @called("KVCache.append", "pass keys and values: cache.append(keys, values).")
    def append(self, keys: jax.Array, values: jax.Array) -> "KVCache":
        """Returns the cache with new tokens after the ones that it holds.

        Args:
          keys: [batch, tokens, heads, width], floating point. No tokens leave the cache as it is.
          values: of the shape of `keys`, floating point.

        Raises:
          TypeError: keys or values are not floats.
          ValueError: shapes differ from those of the cache, or there is no room. If the length is
            traced, missing room cannot be detected: reading the cache then returns NaN.
        """
        name = "KVCache.append"
        batch, _, heads, width = self.tail.shape[1:]
        keys, values = as_real(name, "keys", keys), as_real(name, "values", values)
        for field, x in (("keys", keys), ("values", values)):
            shape = x.shape
            fits = len(shape) == 4 and (shape[0], *shape[2:]) == (batch, heads, width)
            if not fits or shape != keys.shape:
                problem = f"`{field}` of shape {shape} does not fit the cache, or the other one."
                fix = f"pass new tokens alone, [{batch}, tokens, {heads}, {width}]."
                raise fail(name, problem, fix=fix)
        count = keys.shape[1]
        if compat.is_concrete(self.length) and int(self.length) + count > self.capacity:
            problem = f"the cache is full: {int(self.length)} and {count} new, of {self.capacity}."
            raise fail(name, problem, fix="make a longer cache: KVCache.empty(length=...).")
        if count == 0:
            return self
        new = jnp.stack([x.astype(self.tail.dtype) for x in (keys, values)])
        length = self.length + count
        if self.format == "fp8":
            k, v = (codes.put(x, self.length) for codes, x in zip(self._codes, new, strict=True))
            return dataclasses.replace(self, key_codes=k, value_codes=v, length=length)
        return self._grouped(new, count, length)

    @property
    def _codes(self) -> tuple[Any, Any]:
        return self.key_codes, self.value_codes

    @property
    def _start(self) -> jax.Array:
        """The position of the first token of the tail: how many tokens are read as codes."""
        return jnp.maximum(self.length - (_TAIL - _GROUP), 0) // _GROUP * _GROUP

    def _grouped(self, new: jax.Array, count: int, length: jax.Array) -> "KVCache":
        """Writes tokens to the tail, and moves groups that leave it to the codes."""
        done = dataclasses.replace(self, length=length)
        padding = [(0, 0)] * 5
        padding[2] = (0, count + _TAIL)
        tokens = jnp.pad(self.tail, padding)
        offset, moved = self.length - self._start, done._start - self._start
        tokens = lax.dynamic_update_slice_in_dim(tokens, new, offset, axis=2)
        tail = lax.dynamic_slice_in_dim(tokens, moved, _TAIL, axis=2)
        earliest = self.length + jnp.arange(min(count, _FIRST), dtype=jnp.int32)
        head = self.first.at[:, :, earliest].set(new[:, :, :_FIRST], mode="drop")
        group_count = -(-count // _GROUP)
        leaving = self._without_first(tokens)[:, :, : group_count * _GROUP]
        keys, values = lax.cond(
            moved > 0, self._written, lambda _: self._codes, leaving
        )  # groups that stay in the tail may be written too: reads take the tail in their place
        return dataclasses.replace(done, key_codes=keys, value_codes=values, first=head, tail=tail)

    def _written(self, tokens: jax.Array) -> tuple[Groups, Groups]:
        """Returns the codes with new codes for the first tokens of the tail."""
        bits, channel_groups = _BITS[self.format], self.value_codes.codes.shape[-2]
        count = tokens.shape[2] // _GROUP
        keys, values = tokens.reshape(2, tokens.shape[1], count, _GROUP, *tokens.shape[3:])
        keys = Groups.of(jnp.moveaxis(keys, 2, -1), bits)
        values = Groups.of(values.reshape(*values.shape[:-1], channel_groups, -1), bits)
        positions = self._start // _GROUP + jnp.arange(count, dtype=jnp.int32)
        return self.key_codes.put(keys, positions, 1), self.value_codes.put(values, positions, 1)

    def _without_first(self, tokens: jax.Array) -> jax.Array:
        """Returns tokens that follow those with codes. Tokens that are kept in float are replaced
        by the token after them, so that they do not widen the range of their group.
        """
        positions = self._start + jnp.arange(tokens.shape[2], dtype=jnp.int32)
        is_first = (positions < _FIRST)[None, None, :, None, None]
        return jnp.where(is_first, tokens[:, :, _FIRST : _FIRST + 1], tokens)

    @property
    def keys(self) -> jax.Array:
        """The keys in float, [batch, capacity, heads, width]; 0 after the last token."""
        if self.format == "fp8":
            return self._read(self.key_codes.real(self.tail.dtype))
        x = self.key_codes.values(_BITS[self.format], _GROUP)
        return self._read(self._in_float(jnp.moveaxis(x, -1, 2), 0))

    @property
    def values(self) -> jax.Array:
        """The values in float, [batch, capacity, heads, width]; 0 after the last token."""
        if self.format == "fp8":
            return self._read(self.value_codes.real(self.tail.dtype))
        x = self.value_codes.values(_BITS[self.format], min(self.tail.shape[-1], _GROUP))
        return self._read(self._in_float(x.reshape(*x.shape[:-2], -1), 1))

    def _in_float(self, x: jax.Array, kind: int) -> jax.Array:
        """Returns all tokens from groups [batch, groups, 16, heads, width]; the first and the last
        ones are exact.
        """
        tokens = x.reshape(x.shape[0], -1, *x.shape[3:]).astype(self.tail.dtype)
        tokens = jnp.pad(tokens, ((0, 0), (0, _TAIL), (0, 0), (0, 0)))
        for exact, start in ((self.tail, self._start), (self.first, 0)):
            tokens = lax.dynamic_update_slice_in_dim(tokens, exact[kind], start, axis=1)
        return tokens[:, : self.capacity]

    def _read(self, x: jax.Array) -> jax.Array:
        positions = lax.broadcasted_iota(jnp.int32, (1, self.capacity, 1, 1), 1)
        filled = jnp.where(positions < self.length, x, 0)
        return jnp.where(self.length > self.capacity, jnp.nan, filled).astype(x.dtype)

    @called("KVCache.attend", "pass queries: cache.attend(queries).")
    def attend(self, queries: jax.Array, *, scale: float | None = None) -> jax.Array:
        """Returns causal attention of the last tokens over all of the cache.

        Args:
          queries: queries of the last tokens, [batch, tokens, heads, width]. Their heads are a
            multiple of those of the cache; each of these serves as many consecutive heads.
          scale: factor of the products; `None` means `1 / sqrt(width)`.

        Returns:
          [batch, tokens, heads, width], of the dtype of the queries; NaN if there are queries of
          more tokens than the cache holds.

        Raises:
          TypeError: queries are not floats.
          ValueError: shapes do not fit.
        """
        queries = as_real("KVCache.attend", "queries", queries)
        shape = queries.shape
        batch, _, heads, width = self.tail.shape[1:]
        if len(shape) != 4 or (shape[0], shape[3]) != (batch, width) or shape[2] % heads:
            problem = f"`queries` of shape {shape} do not fit the cache."
            fix = f"pass the last tokens, [{batch}, tokens, a multiple of {heads}, {width}]."
            raise fail("KVCache.attend", problem, fix=fix)
        positions = self.length - shape[1] + jnp.arange(shape[1], dtype=jnp.int32)
        is_seen = jnp.arange(self.capacity, dtype=jnp.int32)[None] <= positions[:, None]
        rows = queries.astype(jnp.float32)
        factor = width**-0.5 if scale is None else scale
        rows = rows.reshape(*shape[:2], heads, shape[2] // heads, width) * factor
        keys, values = (x.astype(jnp.float32) for x in (self.keys, self.values))
        products = jnp.einsum("bthgw,blhw->bhgtl", rows, keys)
        parts = jax.nn.softmax(jnp.where(is_seen[None, None, None], products, -jnp.inf))
        mixed = jnp.einsum("bhgtl,blhw->bthgw", parts, values)
        return mixed.reshape(shape).astype(queries.dtype)

    @property
    def nbytes(self) -> int:
        """The size of its arrays in bytes."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def __repr__(self) -> str:
        return f"KVCache({self.format}, {self._filled()}, {self.nbytes:,} bytes)"

    def _filled(self) -> str:
        """Returns a phrase: how many tokens of how many the cache holds."""
        length = int(self.length) if compat.is_concrete(self.length) else "?"
        return f"{length} of {self.capacity} tokens"

    def _repr_html_(self) -> str:
        batch, _, heads, width = self.first.shape[-4:]
        numbers = math.prod(self.first.shape[:-3]) * self.capacity * heads * width
        bits = f", {8 * self.nbytes / numbers:.2f} bits for each of {numbers:,} numbers"
        return pairs_html(
            [
                ("format", self.format),
                ("holds", self._filled()),
                ("shape", f"batch {batch}, {heads} heads, {width} wide"),
                ("bytes", f"{self.nbytes:,}{bits if numbers else ''}"),
            ],
            "KVCache",
        )


def check_format(function: str, argument: str, format: Any) -> None:
    """Checks the name of a cache format."""
    if not isinstance(format, str) or format not in _FORMATS:
        fix = f"pass one of {', '.join(map(repr, _FORMATS))}."
        raise fail(function, f"`{argument}` is unknown: {shown(format)}.", fix=fix)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Scaled:
    """Numbers in fp8 [batch, tokens, heads, width], with a scale for each head [1, 1, heads, 1]."""

    codes: jax.Array
    scale: jax.Array

    @classmethod
    def empty(cls, name: str, shape: tuple[int, ...], scale: Any) -> "_Scaled":
        head_scale = jnp.asarray(scale, jnp.float32)
        if head_scale.shape not in ((), (1,), (shape[2],)):
            problem = f"`scales` do not fit the heads: a scale of shape {head_scale.shape}."
            fix = f"pass a number, or one scale for each head: an array of shape ({shape[2]},)."
            raise fail(name, problem, fix=fix)
        numbers = np.asarray(head_scale) if compat.is_concrete(head_scale) else np.ones(1)
        if not ((numbers > 0) & np.isfinite(numbers)).all():
            problem = f"`scales` are not finite numbers above 0: {shown(numbers.tolist())}."
            fix = "take them from calibration, or leave them out: such a checkpoint is damaged."
            raise fail(name, problem, fix=fix)
        head_scale = jnp.broadcast_to(head_scale, (shape[2],)).reshape(1, 1, -1, 1)
        return cls(jnp.zeros(shape, jnp.float8_e4m3fn), head_scale)

    def put(self, x: jax.Array, position: jax.Array) -> "_Scaled":
        """Writes tokens, rounded; saturates at the largest number of fp8."""
        limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
        codes = jnp.clip(x.astype(jnp.float32) / self.scale, -limit, limit)
        codes = codes.astype(jnp.float8_e4m3fn)
        codes = lax.dynamic_update_slice_in_dim(self.codes, codes, position, axis=1)
        return dataclasses.replace(self, codes=codes)

    def real(self, dtype: DTypeLike) -> jax.Array:
        """Returns the numbers."""
        return (self.codes.astype(jnp.float32) * self.scale).astype(dtype)
