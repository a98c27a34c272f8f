"""A small network, its parameters over the devices of a mesh, and what compilers send."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..arrays import normal, on_device

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SPECS = {"up": P(None, "model"), "down": P("model", None), "b": P()}
WIDE, NARROW = 512, 256


def mesh_of(kind, data=2, model=2):
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind,) * 2)


def params():
    return {
        "up": on_device(np.asarray(normal(0, NARROW, WIDE)) / 16),
        "down": on_device(np.asarray(normal(1, WIDE, NARROW)) / 16),
        "b": normal(2, NARROW),
    }


def inputs():
    return normal(3, 16, NARROW)


def network(p, x):
    """A column-parallel product and a row-parallel one; in explicit sharding it says what becomes
    of the sum.
    """
    h = jax.nn.relu(x @ p["up"])
    mesh = jax.typeof(h).sharding.mesh
    place = NamedSharding(mesh, P("data", None)) if EXPLICIT in mesh.axis_types else None
    y = jnp.dot(h, p["down"], out_sharding=place)
    return y + p["b"][None]


def shardings(mesh, specs=SPECS):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def on_mesh(mesh):
    """Parameters and inputs where they lie."""
    return jax.device_put(params(), shardings(mesh)), jax.device_put(
        inputs(), NamedSharding(mesh, P("data"))
    )


def sent(compiled):
    """What devices send each other: (operation, dtype, sizes) of the results, each how often."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    text = re.findall(rf"= \(?(\w+)\[([\d,]*)\].* ({kinds})(?:-start)?\(", compiled.as_text())
    return Counter(
        (op, dtype, tuple(map(int, filter(None, n.split(","))))) for dtype, n, op in text
    )
