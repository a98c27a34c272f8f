"""The steps in which a TPU computes a product: tiles of columns, then of rows, then along the sum.

Where rows are in groups with a matrix each (experts), a tile of rows belongs to one group, whose
number says which matrix is read. A matrix is read whole along the sum then, so that it stays where
it is while the tiles of its group follow each other.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._pallas import call, pl, tpu
from ._tiles_tpu import LIMIT, Tiles


def in_steps(
    kernel: Callable[..., None],
    name: str,
    tiles: Tiles,
    x: jax.Array,
    codes: jax.Array,
    x_scale: jax.Array | None,
    parameters: Sequence[jax.Array],
    group: jax.Array | None,
    *,
    sums: DTypeLike,
    multiplies: DTypeLike,
    interpret: bool,
) -> jax.Array:
    """Runs a kernel on tiles. It is given references to x, codes, the scale of x (where there is
    one), the parameters, the result, and the sums, which it keeps from step to step.

    Args:
      kernel: as above.
      name: what it is called.
      tiles: their sizes.
      x: [M, K].
      codes: [K, N], or [E, K, N].
      x_scale: [M, 1], or [steps along the sum, M, groups of a tile], or `None`.
      parameters: [G, N] each, or [E, G, N].
      group: int32, one for each tile of rows, or `None`.
      sums: their dtype.
      multiplies: what matrix units multiply.
      interpret: whether to run on any platform, step by step.

    Returns:
      float32 [M, N].
    """
    (m, k), n = x.shape, codes.shape[-1]
    space = pl()
    block = functools.partial(space.BlockSpec, memory_space=tpu().VMEM)

    def of_matrix(rows: int, moves: bool) -> Any:
        def place(j: Any, i: Any, step: Any, *groups: Any) -> tuple[Any, ...]:
            inside = step if moves else 0, j
            return (groups[0][i], *inside) if groups else inside

        return block((*(None,) * (codes.ndim - 2), rows, tiles.n), place)

    rows = []
    if x_scale is not None:
        by_group = x_scale.ndim == 3
        rows = [
            block((None, tiles.m, x_scale.shape[2]), lambda j, i, step, *_: (step, i, 0))
            if by_group
            else block((tiles.m, 1), lambda j, i, step, *_: (i, 0))
        ]
    prefetched = [] if group is None else [group]

    def without_groups(*references: Any) -> None:
        kernel(*references[len(prefetched) :])

    grid = tpu().PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=(space.cdiv(n, tiles.n), space.cdiv(m, tiles.m), space.cdiv(k, tiles.k)),
        in_specs=[
            block((tiles.m, tiles.k), lambda j, i, step, *_: (i, step)),
            of_matrix(tiles.k, moves=True),
            *rows,
            *[of_matrix(tiles.groups, tiles.moves)] * len(parameters),
        ],
        out_specs=block((tiles.m, tiles.n), lambda j, i, step, *_: (i, j)),
        scratch_shapes=[tpu().VMEM((tiles.m, tiles.n), sums)],
    )
    return call(
        without_groups,
        name,
        jax.ShapeDtypeStruct((m, n), jnp.float32),
        [*prefetched, x, codes, *([] if x_scale is None else [x_scale]), *parameters],
        multiplies=multiplies,
        interpret=interpret,
        grid_spec=grid,
        compiler_params=tpu().CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
    )
