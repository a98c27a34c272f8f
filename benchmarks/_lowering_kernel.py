"""What a Pallas kernel for a TPU reads, writes, holds and multiplies, counted in its jaxpr.

Nothing is modelled: the grid, the blocks, their index maps and the products are those of the call
that would run. A block is fetched again whenever its index differs from that of the step before.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LANES, SUBLANES = 128, 8
"""Of a register of 32-bit numbers; those of fewer bits are packed along the sublanes."""

PLATFORM = "tpu"


@dataclass(frozen=True)
class Unit:
    """A matrix unit: it holds `side` x `side` numbers, by which rows are multiplied one by one. The
    compiler's cycles for plain products of 2048 x 2048 x 2048 agree.

    Attributes:
      side: elements along the sum, and columns.
      half: dtypes of which a pass takes half the time of bfloat16.
    """

    side: int
    half: tuple[str, ...]


UNITS = {
    "tpu-v5e": Unit(128, ("int8",)),
    "tpu-v6e": Unit(256, ("int8",)),
    "tpu7x": Unit(256, ("float8_e4m3fn", "float8_e5m2")),
}


@dataclass(frozen=True)
class Moved:
    """One array that a kernel reads or writes in blocks.

    Attributes:
      shape: of the array.
      dtype: its name.
      fetches: how many blocks are moved in all steps.
      bytes: of all fetches.
      once: bytes of the blocks that are moved at all, each counted once.
      buffers: bytes on the chip: two buffers of a block that changes, one of another.
    """

    shape: tuple[int, ...]
    dtype: str
    fetches: int
    bytes: float
    once: float
    buffers: int

    @property
    def times(self) -> float:
        """How often each byte is moved, on average."""
        return self.bytes / self.once


@dataclass(frozen=True)
class Product:
    """A product of matrices in a step.

    Attributes:
      rows: how many are multiplied.
      depth: elements of the sum.
      width: columns.
      dtype: the wider one of its operands.
      times: how often it is computed in a step.
    """

    rows: int
    depth: int
    width: int
    dtype: str
    times: int = 1

    def passes(self, unit: Unit) -> float:
        """Returns rows that go through a matrix unit, in those of bfloat16. A register of sums
        has 8 rows, so that fewer cost as much.
        """
        tiles = math.ceil(self.depth / unit.side) * math.ceil(self.width / unit.side)
        rows = math.ceil(self.rows / SUBLANES) * SUBLANES
        return tiles * rows * self.times * (0.5 if self.dtype in unit.half else 1)


@dataclass(frozen=True)
class Kernel:
    """A call of a kernel.

    Attributes:
      name: of the kernel.
      grid: how many steps it takes along each axis.
      inputs: what it reads.
      outputs: what it writes.
      scratch: bytes on the chip that are kept from step to step.
      products: of one step.
    """

    name: str
    grid: tuple[int, ...]
    inputs: tuple[Moved, ...]
    outputs: tuple[Moved, ...]
    scratch: int
    products: tuple[Product, ...]

    @property
    def vmem(self) -> int:
        """Bytes on the chip of blocks and of what is kept; values between them are left out."""
        return self.scratch + sum(moved.buffers for moved in (*self.inputs, *self.outputs))

    def passes(self, unit: Unit) -> float:
        """Returns the passes of all steps."""
        return math.prod(self.grid) * sum(product.passes(unit) for product in self.products)


def kernels_of(jaxpr: Any, scalars: Sequence[Any] = ()) -> list[Kernel]:
    """Returns the kernels that a jaxpr calls on a TPU, of other platforms none.

    Args:
      jaxpr: of the function.
      scalars: values of what kernels are told before they start, where they are told anything.
    """
    return [_kernel(equation.params, scalars) for equation in _calls(jaxpr)]


def bits_of(dtype: Any) -> int:
    """Returns the bits of an element as it lies in memory."""
    known = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return 8 if dtype == jnp.bool_ else known(dtype).bits


def _calls(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations that call kernels, of branches for platforms those for a TPU."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        platforms = equation.params.get("branches_platforms")
        if platforms is None:
            inner = [one for value in equation.params.values() for one in _jaxprs(value)]
        else:
            own = next(i for i, p in enumerate(platforms) if p is None or PLATFORM in p)
            inner = list(_jaxprs(equation.params["branches"][own]))
        for one in inner:
            yield from _calls(one)


def _jaxprs(value: Any) -> Iterator[Any]:
    """Yields the jaxprs that a parameter of an equation is, or has."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        inner = getattr(one, "jaxpr", one)
        if hasattr(inner, "eqns"):
            yield inner


def _kernel(params: Mapping[str, Any], scalars: Sequence[Any]) -> Kernel:
    mapping = params["grid_mapping"]
    told = scalars if mapping.num_index_operands else ()
    if len(told) != mapping.num_index_operands:
        raise ValueError(f"{params['name']} is told {mapping.num_index_operands} arrays first")
    moved = [_moved(block, mapping.grid, told) for block in mapping.block_mappings]
    refs = params["jaxpr"].invars
    scratch = refs[len(refs) - mapping.num_scratch_operands :] if mapping.scratch_avals else []
    return Kernel(
        name=params["name"],
        grid=tuple(mapping.grid),
        inputs=tuple(moved[: mapping.num_inputs]),
        outputs=tuple(moved[mapping.num_inputs :]),
        scratch=sum(_on_chip(ref.aval.shape, ref.aval.dtype) for ref in scratch),
        products=tuple(_products(params["jaxpr"], 1)),
    )


def _moved(block: Any, grid: Sequence[int], scalars: Sequence[Any]) -> Moved:
    """Counts what is moved of an array, the last axis of the grid being the fastest."""
    array = block.array_aval
    sizes = [getattr(dim, "block_size", 1) for dim in block.block_shape]
    steps = np.indices(grid, np.int32).reshape(len(grid), -1)
    told = [jnp.asarray(one) for one in scalars]
    found = jax.vmap(lambda *at: block.compute_start_indices_interpret(at, *told))(*steps)
    shape = (steps.shape[1],)
    starts = np.stack([np.broadcast_to(np.asarray(start), shape) for start in found], axis=1)
    changed = np.r_[True, np.any(starts[1:] != starts[:-1], axis=1)]

    def bytes_of(starts: np.ndarray) -> float:
        """Of what lies inside the array."""
        inside = np.minimum(sizes, np.asarray(array.shape) - starts)
        return float(inside.prod(axis=1).sum()) * bits_of(array.dtype) / 8

    fetches = int(changed.sum())
    return Moved(
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        fetches=fetches,
        bytes=bytes_of(starts[changed]),
        once=bytes_of(np.unique(starts, axis=0)),
        buffers=_on_chip(sizes, array.dtype) * (2 if fetches > 1 else 1),
    )


def _on_chip(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array on the chip, whose last two axes fill whole registers."""
    *outer, rows, columns = (1, *shape) if len(shape) < 2 else shape
    packed = SUBLANES * 32 // bits_of(dtype)
    whole = math.ceil(rows / packed) * packed * math.ceil(columns / LANES) * LANES
    return math.prod(outer) * whole * bits_of(dtype) // 8


def _products(jaxpr: Any, times: int) -> Iterator[Product]:
    """Yields the products of a step; of branches those of the one that has most. Conditions on
    the same products exclude each other: a tile is whole, or it is not.
    """
    seen: list[list[Product]] = []
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            yield _product(equation, times)
            continue
        if name == "while" and any(any(_products(one, 1)) for one in _jaxprs(params["body_jaxpr"])):
            raise ValueError("a loop of unknown length multiplies")
        each = times * params["length"] if name == "scan" else times
        if name == "cond":
            branches = [list(_products(one, each)) for one in _jaxprs(params["branches"])]
            most = max(branches, key=_operations)
            if most not in seen:
                yield from most
            seen.append(most)
            continue
        for value in params.values():
            for inner in _jaxprs(value):
                yield from _products(inner, each)


def _operations(products: Sequence[Product]) -> int:
    return sum(p.rows * p.depth * p.width * p.times for p in products)


def _product(equation: Any, times: int) -> Product:
    left, right = (operand.aval for operand in equation.invars)
    (summed, _), (batch, _) = equation.params["dimension_numbers"]
    count = math.prod(left.shape[axis] for axis in batch)
    depth = math.prod(left.shape[axis] for axis in summed)
    wider = max(left.dtype, right.dtype, key=bits_of)
    rows, width = (aval.size // (count * depth) for aval in (left, right))
    return Product(rows, depth, width, str(wider), times * count)
