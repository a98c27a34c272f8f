"""Functions of what each of eight devices has."""

import functools

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

COUNT = 8
MESH = jax.make_mesh((COUNT,), ("i",), axis_types=(AxisType.Auto,))
TABLE = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def normal(seed, *shape):
    """Values of unit variance for each device, [8, *shape], in NumPy."""
    return np.random.default_rng(seed).standard_normal((COUNT, *shape)).astype(np.float32)


def on_each(f, mesh=MESH, check_vma=True):
    """`f` of the parts of arrays [8, ...], one on each device; its results stacked."""
    spec = P(mesh.axis_names)

    def part(*args):
        results = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda y: y[None], results)

    mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=spec, check_vma=check_vma)
    return jax.jit(mapped(part, in_specs=spec))
