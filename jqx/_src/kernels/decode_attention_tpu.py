"""Attention of one query per sequence over a cache of codes, on a TPU.

XLA chooses the layout of a cache [B, L, H, W] so that there is little padding; `Order` describes
it. The kernel reads the codes in that order, so that the cache is not moved in memory.

    tokens   [B, L, H, W]   W of whole registers, and heads that fill one: rows are (token, head)
    heads    [B, H, L, W]   other heads: rows are tokens
    columns  [B, H, W, L]   any other W: columns are tokens

If rows are (token, head), the queries of all heads are multiplied by all rows at once, and the
products of queries and keys of different heads are excluded from the softmax. Matrix units need the
same time as with one head at a time, because loading the codes is the bottleneck; nothing is
transposed.
"""

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from .pallas import EXACT, call, pl, split, tpu

LANES, SUBLANES = 128, 8

ROWS = 4096
"""Rows of 128 codes per step."""

LIMIT = 48 << 20
"""Bytes of memory on the chip."""


class Order(enum.Enum):
    """The memory order of a cache [batch, length, heads, width], as a permutation of its axes."""

    TOKENS = (0, 1, 2, 3)
    HEADS = (0, 2, 1, 3)
    COLUMNS = (0, 2, 3, 1)


def order_of(codes: jax.Array) -> Order:
    """Returns the memory order that XLA chooses for a cache (jax 0.10 to 0.12)."""
    *_, heads, width = codes.shape
    if width % LANES:
        return Order.COLUMNS
    narrow = codes.dtype in (jnp.int4, jnp.uint4)
    return Order.TOKENS if heads % SUBLANES == 0 or (heads == 4 and not narrow) else Order.HEADS


def fits_tpu(keys: jax.Array, values: jax.Array) -> bool:
    """Whether the kernel supports codes of these shapes and dtypes in their memory order."""
    orders = {order_of(keys), order_of(values)}
    mixes_tokens = Order.TOKENS in orders and len(orders) > 1
    return not mixes_tokens and (orders != {Order.TOKENS} or LANES % keys.shape[2] == 0)


class Tiles(NamedTuple):
    """The part of a cache that a step reads.

    Attributes:
      tokens: number of tokens.
      heads: number of blocks in sequence: one per head, or one for all heads.
      inner: number of heads in a block: all of them if rows are (token, head), else 1.
      groups: number of queries for each head, padded.
      parts: number of bfloat16 terms of a query, and of a probability.
    """

    tokens: int
    heads: int
    inner: int
    groups: int
    parts: tuple[int, int]

    @property
    def rows(self) -> int:
        """Rows of the queries of a block: (group, head)."""
        return self.groups * self.inner

    @property
    def period(self) -> int:
        """Rows after which masks and scales repeat: one register, if rows include heads."""
        return max(self.inner, SUBLANES) if self.inner > 1 else self.rows


def decode_attention_tpu(
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
      keys: codes [B, L, H, W] of 4 or 8 bits that bfloat16 represents; `fits_tpu` must be true.
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
    order = order_of(keys)
    inner = heads if order is Order.TOKENS else 1
    group_multiple = max(SUBLANES // inner, 1)
    parts = (1 if q.dtype == jnp.bfloat16 else EXACT, EXACT if precise else 1)
    rows = ROWS * LANES // max(width, wide, LANES)
    tokens = min(max(rows // heads, LANES) // LANES, -(-length // LANES)) * LANES
    tiles = Tiles(
        tokens=tokens,
        heads=_divisor(heads // inner, rows // tokens),
        inner=inner,
        groups=-(-(queries // heads) // group_multiple) * group_multiple,
        parts=parts,
    )
    steps = space.cdiv(length, tiles.tokens)
    if window is not None:
        steps = min(steps, (window + tiles.tokens - 2) // tiles.tokens + 1)

    def tile(b: Any, step: Any, starts: Any, stops: Any) -> Any:
        first_tile = lax.div(starts[b], tiles.tokens)
        last_tile = lax.div(jnp.maximum(stops[b] - 1, 0), tiles.tokens)
        return jnp.minimum(first_tile + step, last_tile)

    def of_cache(codes: jax.Array) -> tuple[jax.Array, Any]:
        cache_order, w = order_of(codes), codes.shape[3]
        if cache_order is Order.TOKENS:
            block, block_index = (None, tiles.tokens, inner, w), lambda b, h, t: (b, t, 0, 0)
        elif cache_order is Order.HEADS:
            block, block_index = (None, tiles.heads, tiles.tokens, w), lambda b, h, t: (b, h, t, 0)
        else:
            block, block_index = (None, tiles.heads, w, tiles.tokens), lambda b, h, t: (b, h, 0, t)
        index = lambda b, h, t, *limits: block_index(b, h, tile(b, t, *limits))  # noqa: E731
        return codes.transpose(cache_order.value), space.BlockSpec(block, index)

    def of_scale(scale: jax.Array) -> tuple[jax.Array, Any]:
        shared = scale.shape[2] == 1
        block = (None, 1 if shared else tiles.heads * inner, 1, tiles.tokens)
        index = lambda b, h, t, *limits: (  # noqa: E731
            b,
            0 if shared else h,
            0,
            tile(b, t, *limits),
        )
        moved = scale.astype(jnp.float32).transpose(0, 2, 3, 1)
        return moved, space.BlockSpec(block, index)

    rows = _rows(q, heads, tiles)
    steady = lambda b, h, t, *limits: (b, h, 0, 0)  # noqa: E731
    inputs = [(rows, space.BlockSpec((None, tiles.heads, *rows.shape[2:]), steady)), of_cache(keys)]
    inputs += [of_cache(values)]
    of_token = (key_scale, key_zero, value_scale, value_zero)
    inputs += [of_scale(x) for x in of_token if x is not None]
    arrays, specs = zip(*inputs, strict=True)
    arrays = list(compat.vary_alike(starts, stops, *arrays))
    if not interpret:  # otherwise XLA would copy a small cache to on-chip memory as a whole
        for i in (3, 4):
            arrays[i] = tpu().with_memory_space_constraint(arrays[i], tpu().HBM)
    shape = (batch, heads // inner, tiles.rows, wide)
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        scale=scale,
        present=tuple(x is not None for x in of_token),
        orders=(order_of(keys), order_of(values)),
    )
    memory = functools.partial(tpu().VMEM, dtype=jnp.float32)
    result = call(
        kernel,
        "jqx_decode_attention",
        jax.ShapeDtypeStruct(shape, jnp.float32),
        arrays,
        multiplies=jnp.bfloat16,
        interpret=interpret,
        grid_spec=tpu().PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads // inner // tiles.heads, steps),
            in_specs=specs,
            out_specs=space.BlockSpec((None, tiles.heads, *shape[2:]), steady),
            scratch_shapes=[
                memory((tiles.heads, tiles.rows, LANES)),
                memory((tiles.heads, tiles.rows, LANES)),
                memory((tiles.heads, tiles.rows, wide)),
            ],
        ),
        compiler_params=tpu().CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
    )
    result = result.reshape(batch, heads // inner, tiles.groups, inner, wide)
    result = result[:, :, : queries // heads].swapaxes(2, 3)
    return result.reshape(batch, queries, wide)


def _divisor(n: int, limit: int) -> int:
    """Returns the largest divisor of a number that is not above another."""
    return next(d for d in range(min(n, max(limit, 1)), 0, -1) if n % d == 0)


def _rows(q: jax.Array, heads: int, tiles: Tiles) -> jax.Array:
    """Returns queries as [B, H / inner, part * group * inner, W] in bfloat16."""
    batch, queries, width = q.shape
    q = q.reshape(batch, heads // tiles.inner, tiles.inner, queries // heads, width).swapaxes(2, 3)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, tiles.groups - q.shape[2]), (0, 0), (0, 0)))
    q = q.reshape(batch, heads // tiles.inner, tiles.rows, width)
    return jnp.concatenate(split(q, tiles.parts[0]), axis=2)


def _kernel(
    starts: Any,
    stops: Any,
    q: Any,
    keys: Any,
    values: Any,
    *references: Any,
    tiles: Tiles,
    scale: float,
    present: tuple[bool, ...],
    orders: tuple[Order, Order],
) -> None:
    *of_token, result, running_max, total, mixed = references
    space = pl()
    b, step = space.program_id(0), space.program_id(2)
    start, stop = starts[b], stops[b]
    tile_start = (lax.div(start, tiles.tokens) + step) * tiles.tokens
    arrays = iter(of_token)
    key_scale, key_zero, value_scale, value_zero = (next(arrays) if x else None for x in present)

    @space.when(step == 0)
    def _() -> None:
        running_max[...] = jnp.full_like(running_max, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    def add(is_whole: bool, head: int) -> None:
        """Adds a tile of one block of heads; `is_whole` if all its tokens count."""
        count = tiles.tokens * tiles.inner

        def limited(x: jax.Array, axis: int, inner: int, fill: float) -> jax.Array:
            """Replaces the elements of tokens that do not count."""
            if is_whole:
                return x
            positions = tile_start + lax.div(lax.broadcasted_iota(jnp.int32, x.shape, axis), inner)
            return jnp.where((start <= positions) & (positions < stop), x, fill)

        queries = q[head]
        products = _product(queries, _codes(keys, orders[0], head), orders[0] is not Order.COLUMNS)
        products = _summed(products, tiles.parts[0]).reshape(-1, tiles.period, count)
        if key_zero is not None:
            rows = jnp.sum(queries.astype(jnp.float32), axis=1, keepdims=True)
            rows = _summed(rows, tiles.parts[0]).reshape(-1, tiles.period, 1)
            products = products - rows * _spread(_row(key_zero, head, tiles), tiles)[None]
        if key_scale is None:
            products = products * scale
        else:
            products = products * _spread(_row(key_scale, head, tiles) * scale, tiles)[None]
        counts = jnp.zeros((1, tiles.period if tiles.inner > 1 else 1, count), jnp.float32)
        if tiles.inner > 1:
            row, column = (lax.broadcasted_iota(jnp.int32, counts.shape, i) for i in (1, 2))
            is_own = lax.rem(row, tiles.inner) == lax.rem(column, tiles.inner)
            counts = jnp.where(is_own, counts, -1)
        counts = limited(counts, 2, tiles.inner, -1)
        if tiles.inner > 1 or not is_whole:
            products = jnp.where(counts == 0, products, -jnp.inf)
        products = products.reshape(tiles.rows, count)
        old_max = running_max[head, :, :1]
        new_max = jnp.maximum(old_max, jnp.max(products, axis=1, keepdims=True))
        weights, decay = jnp.exp(products - new_max), jnp.exp(old_max - new_max)
        running_max[head] = jnp.broadcast_to(new_max, running_max.shape[1:])
        total[head] = total[head] * decay + jnp.sum(weights, axis=1, keepdims=True)

        def weighted(weights: jax.Array, parameter: Any) -> jax.Array:
            factor = _spread(limited(_row(parameter, head, tiles), 1, 1, 0), tiles)[None]
            return (weights.reshape(-1, tiles.period, count) * factor).reshape(tiles.rows, count)

        if value_scale is not None:
            weights = weighted(weights, value_scale)
        codes = _codes(values, orders[1], head)
        transposed = orders[1] is Order.COLUMNS
        if jnp.issubdtype(values.dtype, jnp.floating):  # floats can be NaN
            codes = limited(codes, int(transposed), tiles.inner, 0)
        parts = split(weights, tiles.parts[1])
        sums = _summed(_product(jnp.concatenate(parts, axis=0), codes, transposed), len(parts))
        if value_zero is not None:  # for the weights as they were rounded
            weights = weights if len(parts) > 1 else parts[0].astype(jnp.float32)
            sums = sums - jnp.sum(weighted(weights, value_zero), axis=1, keepdims=True)
        mixed[head] = mixed[head] * decay + sums

    is_whole = (start <= tile_start) & (tile_start + tiles.tokens <= stop)

    @space.when(is_whole)
    def _() -> None:
        for head in range(tiles.heads):
            add(True, head)

    @space.when(~is_whole & (tile_start < stop))
    def _() -> None:
        for head in range(tiles.heads):
            add(False, head)

    @space.when(step == space.num_programs(2) - 1)
    def _() -> None:
        weight = total[:, :, :1]
        result[...] = mixed[...] / jnp.where(weight == 0, 1, weight)


def _codes(codes: Any, order: Order, head: int) -> jax.Array:
    """Returns codes as a matrix of float32: rows of (token, head), or columns of tokens."""
    if order is not Order.TOKENS:
        return codes[head].astype(jnp.float32)
    return codes[...].astype(jnp.float32).reshape(-1, codes.shape[-1])


def _product(left: jax.Array, right: jax.Array, transposed: bool) -> jax.Array:
    """Multiplies by a matrix, or by its transpose."""
    axes = ((1,), (1,) if transposed else (0,))
    return lax.dot_general(
        left, right.astype(jnp.bfloat16), (axes, ((), ())), preferred_element_type=jnp.float32
    )


def _summed(x: jax.Array, parts: int) -> jax.Array:
    """Adds parts that are consecutive along an axis."""
    rows = x.shape[0] // parts
    return sum((x[i * rows : (i + 1) * rows] for i in range(1, parts)), x[:rows])


def _row(scale: Any, head: int, tiles: Tiles) -> jax.Array:
    """Returns the scales of a tile and a block of heads, [heads or 1, tokens]."""
    if tiles.inner > 1:
        return scale[...].reshape(scale.shape[0], scale.shape[-1])
    return scale[head if scale.shape[0] > 1 else 0]


def _spread(scale: jax.Array, tiles: Tiles) -> jax.Array:
    """Returns scales [heads or 1, tokens] for rows of queries and columns of (token, head)."""
    if tiles.inner == 1:
        return scale
    shared = scale.shape[0] == 1
    scale = jnp.broadcast_to(scale, (SUBLANES, scale.shape[1])) if shared else scale
    tokens_per_row = LANES // tiles.inner
    spread = []
    column = lax.div(lax.broadcasted_iota(jnp.int32, (scale.shape[0], LANES), 1), tiles.inner)
    for start in range(0, scale.shape[1], tokens_per_row):
        begin = start // LANES * LANES
        block = scale[:, begin : begin + LANES]
        spread.append(jnp.take_along_axis(block, column + start % LANES, axis=1))
    spread_scale = jnp.concatenate(spread, axis=1)
    if shared:
        return spread_scale[:1]
    repeats = tiles.period // tiles.inner
    return jnp.concatenate([spread_scale] * repeats, axis=0) if repeats > 1 else spread_scale
