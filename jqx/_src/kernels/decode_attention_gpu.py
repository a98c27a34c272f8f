"""Attention of one query per sequence over a cache of codes, on a GPU, by Triton.

A sequence is split into parts. A program processes one part for the queries of one head, so that
few sequences also keep a GPU busy; the parts are combined after the kernel. Their length depends on
the number of tokens to attend to.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .pallas import EXACT, call, pl, split, triton

PROGRAMS = 528
"""Programs that keep a GPU busy: four for each multiprocessor of an H100."""

LEAST = 16
"""Rows and columns of the smallest tile that matrix units multiply."""

CODES = 128 * 128
"""Number of codes of keys per step."""


class Tiles(NamedTuple):
    """Sizes of the operands of a step, powers of two.

    Attributes:
      tokens: tokens of the cache.
      rows: queries of one head.
      columns: widths of a key, and of a value.
      parts: parts of a sequence.
    """

    tokens: int
    rows: int
    columns: tuple[int, int]
    parts: int


def fits_gpu(keys: jax.Array, values: jax.Array) -> bool:
    """Whether the kernel supports codes of these shapes and dtypes: codes of 4 bits are read in
    pairs, without padding.
    """
    narrow = [x for x in (keys, values) if x.dtype in (jnp.int4, jnp.uint4)]
    widths = [x.shape[3] for x in (keys, values)]
    return max(widths) <= 512 and all(x.shape[3] == _power(x.shape[3]) for x in narrow)


def decode_attention_gpu(
    q: jax.Array,
    keys: jax.Array,
    key_scale: jax.Array | None,
    values: jax.Array,
    value_scale: jax.Array | None,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
    key_zero: jax.Array | None = None,
    value_zero: jax.Array | None = None,
    window: int | None = None,
    precise: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Returns the mean of the values of tokens `starts[b]` to `stops[b] - 1`, weighted by the
    softmax of the products of their keys with the query; 0 if there are no such tokens.

    Args:
      q: [B, H * G, W], bfloat16 or float32; head h of the cache belongs to queries h * G to
        h * G + G - 1.
      keys: codes [B, L, H, W] of 4 or 8 bits that bfloat16 represents; `fits_gpu` must be true.
      key_scale: for each token and head, [B, L, H, 1] or [B, L, 1, 1], or `None`.
      values: codes [B, L, H, V].
      value_scale: as `key_scale`.
      starts: int32 [B], 0 or more.
      stops: int32 [B], at most L.
      scale: the factor of the products.
      key_zero: zero points of the codes of keys, in the shape of `key_scale`, or `None`.
      value_zero: as `key_zero`.
      window: an upper limit of `stops - starts`, or `None`.
      precise: whether probabilities are multiplied in float32, or rounded to bfloat16.
      interpret: whether to run on any platform, step by step.

    Returns:
      float32 [B, H * G, V].
    """
    space, (batch, queries, width) = pl(), q.shape
    length, heads, wide = keys.shape[1], keys.shape[2], values.shape[3]
    group = queries // heads
    tiles = _tiles_of(batch * heads, min(window or length, length), group, (width, wide))
    padded = -(-length // tiles.tokens) * tiles.tokens
    rows = q.reshape(batch, heads, 1, group, width)
    pads = [(0, 0), (0, 0), (0, 0), (0, tiles.rows - group), (0, tiles.columns[0] - width)]
    parts = (1 if q.dtype == jnp.bfloat16 else EXACT, EXACT if precise else 1)
    rows = jnp.concatenate(split(jnp.pad(rows, pads), parts[0]), axis=2)

    def of_cache(codes: jax.Array, columns: int) -> Any:
        block = (None, padded, None, columns)
        return codes, space.BlockSpec(block, lambda b, h, part: (b, 0, h, 0))

    def of_scale(scale: jax.Array) -> Any:
        shared = scale.shape[2] == 1
        index = lambda b, h, part: (b, 0, 0 if shared else h)  # noqa: E731
        return scale[..., 0], space.BlockSpec((None, padded, None), index)

    inputs = [(x, space.BlockSpec((1,), lambda b, h, part: (b,))) for x in (starts, stops)]
    row_block = (None, None, *rows.shape[2:])
    inputs += [(rows, space.BlockSpec(row_block, lambda b, h, part: (b, h, 0, 0, 0)))]
    inputs += [of_cache(x, n) for x, n in zip((keys, values), tiles.columns, strict=True)]
    of_token = (key_scale, key_zero, value_scale, value_zero)
    inputs += [of_scale(x) for x in of_token if x is not None]
    arrays, specs = zip(*inputs, strict=True)
    shapes = [(tiles.rows, tiles.columns[1]), (tiles.rows,), (tiles.rows,)]

    def of_result(shape: tuple[int, ...]) -> Any:
        index = lambda b, h, part: (b, h, part, *(0,) * len(shape))  # noqa: E731
        return space.BlockSpec((None, None, None, *shape), index)

    mixed, part_max, total = call(
        functools.partial(
            _kernel,
            tiles=tiles,
            scale=scale,
            widths=(width, wide),
            present=tuple(x is not None for x in of_token),
            parts=parts,
        ),
        "jqx_decode_attention",
        [
            jax.ShapeDtypeStruct((batch, heads, tiles.parts, *shape), jnp.float32)
            for shape in shapes
        ],
        arrays,
        multiplies=jnp.bfloat16,
        interpret=interpret,
        grid=(batch, heads, tiles.parts),
        in_specs=specs,
        out_specs=[of_result(shape) for shape in shapes],
        compiler_params=triton().CompilerParams(num_warps=4, num_stages=3),
    )
    mixed, part_max, total = (x[:, :, :, :group] for x in (mixed, part_max, total))
    largest = jnp.max(part_max, axis=2, keepdims=True)
    weight = jnp.exp(part_max - jnp.where(largest == -jnp.inf, 0, largest))
    total = jnp.sum(weight * total, axis=2)
    mixed = jnp.sum(weight[..., None] * mixed, axis=2)[..., :wide]
    mixed = mixed / jnp.where(total == 0, 1, total)[..., None]
    return mixed.reshape(batch, queries, wide)


def _tiles_of(programs: int, length: int, group: int, widths: tuple[int, int]) -> Tiles:
    columns = (max(LEAST, _power(widths[0])), max(LEAST, _power(widths[1])))
    tokens = max(LEAST, min(128, CODES // max(columns), _power(length)))
    part_limit = max(1, length // (2 * tokens))
    return Tiles(
        tokens, max(LEAST, _power(group)), columns, min(max(1, PROGRAMS // programs), part_limit)
    )


def _power(n: int) -> int:
    """Returns the smallest power of two that is not below a number."""
    return 1 << (n - 1).bit_length()


def _kernel(
    starts: Any,
    stops: Any,
    q: Any,
    keys: Any,
    values: Any,
    *references: Any,
    tiles: Tiles,
    scale: float,
    widths: tuple[int, int],
    present: tuple[bool, ...],
    parts: tuple[int, int],
) -> None:
    *of_token, result, most_result, total_result = references
    arrays = iter(of_token)
    key_scale, key_zero, value_scale, value_zero = (next(arrays) if x else None for x in present)
    space, load = pl(), triton().load
    start, stop = starts[0], stops[0]
    begin = lax.div(start, tiles.tokens) * tiles.tokens
    steps = lax.div(stop - begin + tiles.tokens - 1, tiles.tokens)
    steps_per_part = lax.div(steps + tiles.parts - 1, tiles.parts)
    low = space.program_id(2) * steps_per_part
    high = jnp.minimum(low + steps_per_part, steps)
    rows = [q[i] for i in range(parts[0])]

    def add(step: Any, carry: Any) -> Any:
        running_max, total, mixed = carry
        tokens = space.ds(begin + step * tiles.tokens, tiles.tokens)
        positions = begin + step * tiles.tokens + jnp.arange(tiles.tokens, dtype=jnp.int32)
        counts = (start <= positions) & (positions < stop)

        def codes(x: Any, i: int) -> jax.Array:
            width, columns = widths[i], tiles.columns[i]
            mask = counts[:, None]
            if width < columns:
                mask = mask & (jnp.arange(columns, dtype=jnp.int32) < width)[None, :]
            tile = load(x.at[tokens, :], mask=mask, other=jnp.zeros((), x.dtype))
            return tile.astype(jnp.float32).astype(jnp.bfloat16)

        def of_tokens(x: Any) -> jax.Array:
            zero = jnp.zeros((), x.dtype)
            return load(x.at[tokens], mask=counts, other=zero).astype(jnp.float32)[None, :]

        transposed = codes(keys, 0).T
        products = _sum([_product(part, transposed) for part in rows])
        if key_zero is not None:
            of_rows = _sum([jnp.sum(part.astype(jnp.float32), axis=1) for part in rows])
            products = products - of_rows[:, None] * of_tokens(key_zero)
        products = products * scale
        if key_scale is not None:
            products = products * of_tokens(key_scale)
        products = jnp.where(counts[None, :], products, -jnp.inf)
        new_max = jnp.maximum(running_max, jnp.max(products, axis=1))
        shares = jnp.exp(products - new_max[:, None])
        decay = jnp.exp(running_max - new_max)
        total = total * decay + jnp.sum(shares, axis=1)
        if value_scale is not None:
            shares = shares * of_tokens(value_scale)
        real, share_parts = codes(values, 1), split(shares, parts[1])
        mixed = mixed * decay[:, None] + _sum([_product(share, real) for share in share_parts])
        if value_zero is not None:  # for the probabilities as they were rounded
            shares = shares if len(share_parts) > 1 else share_parts[0].astype(jnp.float32)
            mixed = mixed - jnp.sum(shares * of_tokens(value_zero), axis=1)[:, None]
        return new_max, total, mixed

    shape = (tiles.rows, tiles.columns[1])
    carry = (
        jnp.full(shape[:1], -jnp.inf, jnp.float32),
        jnp.zeros(shape[:1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    most_result[...], total_result[...], result[...] = lax.fori_loop(low, high, add, carry)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def _sum(arrays: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, arrays)
