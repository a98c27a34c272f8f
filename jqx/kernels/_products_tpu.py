"""Products of codes with scales in groups on a TPU; the kernel may quantize the rows.

Each group is multiplied as codes: integers exactly, into int32, and 8-bit floats into float32. Its
sums are multiplied by the scales of the group in float32, and added. If a column has one scale,
integer sums are exact over the whole column, and are multiplied by both scales at the end.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..numerics import Integer, QType
from ._codes import scales
from ._operands import Operands
from ._pallas import pl
from ._rows import Arithmetic, arithmetic_on, codes_of, multiplied
from ._steps_tpu import in_steps
from ._tiles_tpu import Tiles, columns_of, tiles_of


def products_tpu(
    x: jax.Array,
    x_scale: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    group: jax.Array | None = None,
    *,
    step: jax.Array | None = None,
    form: QType,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """Returns the product of real rows and a weight, both multiplied as codes.

    Args:
      x: [M, K]: float32 or bfloat16, to be quantized, or codes of the format.
      x_scale: float32 [M, 1], one scale per row, or [M, G], one for each of its groups.
      codes: [K, N]: integers of 8 bits or fewer, or 8-bit floats if the rows are.
      scale: [G, N]; each row is shared by K / G rows of codes; floats, or E8M0.
      zero: [G, N], integers, for codes of 4 bits or fewer, or `None`.
      group: int32 [T], if codes, scale and zero are stacks [E, ..., N]: the index of the matrix of
        each of T tiles of M / T rows, a multiple of 8; `~group` for unused tiles.
      step: int32 [], if codes have one more leading axis: the index along it.
      form: the symmetric format of rows: signed integers of 8 bits or fewer, which are multiplied
        as int8, or 8-bit floats.
      dtype: the dtype of the result, to which float32 sums are rounded.
      interpret: whether to run on any platform, step by step.

    Returns:
      [M, N].
    """
    (m, k), n, groups = x.shape, codes.shape[-1], scale.shape[-2]
    size, parameters = k // groups, [scale]
    if zero is not None:
        parameters.append(zero.astype(jnp.bfloat16))
    rows = None if group is None else m // group.shape[0]
    dtypes, width, qtype = [p.dtype for p in parameters], x.dtype.itemsize, multiplied(form)
    quantizes = x.dtype != qtype
    tiles = tiles_of(m, k, n, size, dtypes, width, rows, kept=quantizes)
    keeps = quantizes and group is None and tiles.stay and n > tiles.n
    if not tiles.moves and groups > 1:  # rows of float32 can be read at any index
        parameters = [scales(p) for p in parameters]
    by_group = x_scale.shape[1] > 1
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        shape=(k, size),
        form=form,
        by_group=by_group,
        has_zero=zero is not None,
        by=arithmetic_on("tpu", interpret),
    )
    return in_steps(
        kernel,
        "jqx_products",
        tiles,
        Operands(
            x,
            codes,
            parameters,
            _in_tiles(x_scale, tiles, k, size) if by_group else x_scale,
            group,
            step,
        ),
        sums=jnp.int32 if isinstance(form, Integer) and groups == 1 else jnp.float32,
        dtype=dtype,
        multiplies=qtype,
        interpret=interpret,
        kept=qtype if keeps else None,
    )


def _in_tiles(x_scale: jax.Array, tiles: Tiles, k: int, size: int) -> jax.Array:
    """Returns scales [M, G] as [tiles along K, M, groups of a tile]."""
    each, steps = max(1, tiles.k // size), -(-k // tiles.k)
    if size > tiles.k:
        x_scale = jnp.repeat(x_scale, size // tiles.k, axis=1)
    padded = jnp.pad(x_scale, ((0, 0), (0, steps * each - x_scale.shape[1])))
    return jnp.moveaxis(padded.reshape(x_scale.shape[0], steps, each), 1, 0)


def _kernel(
    column: Any,
    step: Any,
    x: Any,
    codes: Any,
    x_scale: Any,
    scale: Any,
    *rest: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    form: QType,
    by_group: bool,
    has_zero: bool,
    by: Arithmetic,
) -> None:
    zeros, (result, total, *kept) = rest[:has_zero], rest[has_zero:]
    k, size = shape
    qtype = multiplied(form)
    integers = isinstance(form, Integer)
    each = min(size, tiles.k)
    one = k == size

    @pl().when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    parts = tiles.k // each
    by_row = [x_scale[:, i : i + 1] if by_group else x_scale[...] for i in range(parts)]
    where = columns_of(tiles, k, step, 0, tiles.k)
    all_rows = x[:, where]
    if x.dtype != qtype:
        all_rows = _codes(all_rows, by_row, kept, where, column, form, by)
    for place in range(parts):
        start, own = place * each, by_row[place]
        rows, columns = all_rows[:, start : start + each], codes[pl().ds(start, each), :]
        of_group = functools.partial(_row, step=step, start=start, tiles=tiles, size=size, one=one)
        if zeros:
            difference = columns.astype(jnp.int32) - of_group(zeros[0]).astype(jnp.int32)
            columns = difference.astype(qtype)
        elif integers and columns.dtype != qtype:
            columns = columns.astype(jnp.int32).astype(qtype)
        left = k - step * tiles.k - start
        if k % tiles.k:  # memory beyond the end is not zero
            rows = _first(rows, left, axis=1)
            columns = columns if integers else _first(columns, left, 0)
        wide = jnp.int32 if integers else jnp.float32
        product = jnp.dot(rows, columns, preferred_element_type=wide)
        if one:
            total[...] += product
            continue
        product = product.astype(jnp.float32) * of_group(scale)
        product = product * own if by_group else product
        total[...] += jnp.where(left > 0, product, 0.0) if k % tiles.k else product

    @pl().when(step == -(-k // tiles.k) - 1)
    def _() -> None:
        y = total[...].astype(jnp.float32)
        if not by_group:
            y = y * x_scale[...]
        y = y * scales(scale[...]) if one else y
        result[...] = y.astype(result.dtype)


def _codes(
    x: jax.Array,
    by_row: Sequence[jax.Array],
    kept: Sequence[Any],
    where: Any,
    column: Any,
    form: QType,
    by: Arithmetic,
) -> jax.Array:
    """Returns the codes of a part of rows, which are computed for the first tile of columns and
    stored for the others.
    """

    def made() -> jax.Array:
        each = x.shape[1] // len(by_row)
        spread = [jnp.broadcast_to(own, (x.shape[0], each)) for own in by_row]
        scale = spread[0] if len(spread) == 1 else jnp.concatenate(spread, axis=1)
        return codes_of(x.astype(jnp.float32), scale, form, by)

    if not kept:
        return made()

    @pl().when(column == 0)
    def _() -> None:
        kept[0][:, where] = made()

    return kept[0][:, where]


def _row(parameter: Any, *, step: Any, start: int, tiles: Tiles, size: int, one: bool) -> jax.Array:
    """Returns the parameters of a group, or of a part of it, one row."""
    if one:
        return scales(parameter[...])
    if size > tiles.k or not tiles.moves:
        row = lax.div(step * tiles.k + start, size)  # `//` would query the local chip
        return scales(parameter[pl().ds(row, 1), :])
    return scales(parameter[start // size : start // size + 1, :])


def _first(codes: jax.Array, count: Any, axis: int) -> jax.Array:
    """Returns codes with zeros after the first `count` of an axis."""
    wide = codes.astype(jnp.float32)
    kept = jnp.where(lax.broadcasted_iota(jnp.int32, codes.shape, axis) < count, wide, 0.0)
    return kept.astype(codes.dtype)
