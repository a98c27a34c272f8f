"""The steps in which a TPU computes a product: tiles of rows, then of columns, then along the sum.

Rows stay on the chip for all columns, so both operands are read once if there is one tile of rows.
If rows are in groups with a matrix each (experts), a tile of rows belongs to one group, whose
number is the index of its matrix. Then tiles of columns are the outer loop, and a matrix is read
whole along the sum, so that it stays on the chip for all tiles of its group. A negative number
`~group` marks an unused tile, which is not computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._operands import Operands
from ._pallas import call, pl, tpu
from ._tiles_tpu import LIMIT, Tiles


def in_steps(
    kernel: Callable[..., None],
    name: str,
    tiles: Tiles,
    operands: Operands,
    *,
    sums: DTypeLike,
    dtype: DTypeLike,
    multiplies: DTypeLike,
    interpret: bool,
    kept: DTypeLike | None = None,
) -> jax.Array:
    """Runs a kernel on tiles. Its arguments are the index of the tile of columns, the step along
    the sum, and references to x, codes, the scale of x (if there is one), the parameters, the
    result, the sums (which persist between steps), and a buffer for rows.

    Args:
      kernel: the kernel.
      name: its name.
      tiles: the sizes of the tiles.
      operands: the operands, with scales of rows [M, 1], or [steps along the sum, M, groups of a
        tile].
      sums: the dtype of the sums.
      dtype: the dtype of the result.
      multiplies: the dtype that matrix units multiply.
      interpret: whether to run on any platform, step by step.
      kept: the dtype of the buffer for rows, which has the shape of x and is kept for all columns;
        or `None`.

    Returns:
      [M, N].
    """
    (m, k, n), space = operands.shape, pl()
    is_ragged, is_stack = operands.group is not None, operands.step is not None
    prefetched = [] if operands.step is None else [operands.step[None]]
    prefetched += [] if operands.group is None else [operands.group]

    def block(shape: tuple[Any, ...], place: Callable[..., tuple[Any, ...]]) -> Any:
        """Returns the block at `place(i, j, step, *numbers)`."""

        def index(first: Any, second: Any, step: Any, *numbers: Any) -> tuple[Any, ...]:
            i, j = (second, first) if is_ragged else (first, second)
            return place(i, j, step, *numbers)

        return space.BlockSpec(shape, index, memory_space=tpu().VMEM)

    def of_matrix(rows: int, moves: bool, in_stack: bool = False) -> Any:
        def place(i: Any, j: Any, step: Any, *numbers: Any) -> tuple[Any, ...]:
            before = [numbers[0][0]] if in_stack else []
            before += [_matrix(numbers[-1][i])] if is_ragged else []
            return *before, step if moves else 0, j

        return block((*(None,) * (in_stack + is_ragged), rows, tiles.n), place)

    rows = [
        block((None, tiles.m, scale.shape[2]), lambda i, j, step, *_: (step, i, 0))
        if scale.ndim == 3
        else block((tiles.m, 1), lambda i, j, step, *_: (i, 0))
        for scale in operands.scales
    ]

    def run(*references: Any) -> None:
        first, second, step = map(space.program_id, range(3))
        rest = references[len(prefetched) :]
        if not is_ragged:
            return kernel(second, step, *rest)
        groups = references[len(prefetched) - 1]
        space.when(groups[second] >= 0)(lambda: kernel(first, step, *rest))

    whole = block((tiles.m, k), lambda i, j, step, *_: (i, 0))
    part = block((tiles.m, tiles.k), lambda i, j, step, *_: (i, step))
    along = space.cdiv(m, tiles.m), space.cdiv(n, tiles.n)
    keeps = [] if kept is None else [tpu().VMEM((tiles.m, k), kept)]
    grid = tpu().PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=(*(along[::-1] if is_ragged else along), space.cdiv(k, tiles.k)),
        in_specs=[
            whole if tiles.stay else part,
            of_matrix(tiles.k, True, is_stack),
            *rows,
            *[of_matrix(tiles.groups, tiles.moves)] * len(operands.parameters),
        ],
        out_specs=block((tiles.m, tiles.n), lambda i, j, step, *_: (i, j)),
        scratch_shapes=[tpu().VMEM((tiles.m, tiles.n), sums), *keeps],
    )
    return call(
        run,
        name,
        jax.ShapeDtypeStruct((m, n), dtype),
        [*prefetched, operands.x, operands.codes, *operands.scales, *operands.parameters],
        multiplies=multiplies,
        interpret=interpret,
        chips=("TPU7x",) if operands.codes.dtype == jnp.float4_e2m1fn else (),
        grid_spec=grid,
        compiler_params=tpu().CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
    )


def _matrix(group: Any) -> Any:
    """Returns the index of the matrix of a tile; for an unused tile, that of the tile before."""
    return jnp.where(group < 0, ~group, group)
