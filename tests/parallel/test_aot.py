"""What compilers for eight TPUs and eight GPUs, which need not be there, make of collectives."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jqx import _compat, parallel
from jqx.diagnostics import _targets as targets

pytestmark = pytest.mark.aot

COUNT, SIZE = 8, 1 << 18
RING = [(i, (i + 1) % COUNT) for i in range(COUNT)]
BITS = {"f32": 32, "s8": 8, "u8": 8, "s4": 4, "f8e4m3fn": 8, "f8e5m2": 8}

COLLECTIVES = {
    "sum": lambda x, **o: parallel.all_reduce(x, "i", **o),
    "sum in a ring": lambda x, **o: parallel.all_reduce(x, "i", form="ring", **o),
    "scattered": lambda x, **o: parallel.reduce_scatter(x, "i", tiled=True, **o),
    "scattered in a ring": lambda x, **o: parallel.reduce_scatter(
        x, "i", tiled=True, form="ring", **o
    ),
    "gathered": lambda x, **o: parallel.all_gather(x, "i", **o),
    "gathered in a ring": lambda x, **o: parallel.all_gather(x, "i", form="ring", **o),
    "to all": lambda x, **o: parallel.all_to_all(x, "i", 0, 0, tiled=True, **o),
    "to some": lambda x, **o: parallel.ppermute(x, "i", RING, **o),
}
FORMATS = {
    "int8:group=256": ({"s8"}, 0.27),
    "int4:group=256": ({"s4", "s8", "u8"}, 0.15),
    "float8_e4m3fn:group=256": ({"f8e4m3fn"}, 0.27),
    "int2:group=256": ({"u8"}, 0.08),
}


@functools.cache
def devices(target):
    known = targets.TARGETS[target]
    modules = list(filter(targets._is_installed, known.modules))
    if not modules:
        pytest.skip(f"no compiler for {target}: the extra {known.extra} is not installed")
    with targets._present(known.environment):
        if known.platform == "tpu":
            return _compat.devices_of_topology("tpu", "v5e:2x4")
        config = targets.resources.files("jqx.diagnostics").joinpath(f"{target}.textproto")
        return _compat.devices_of_topology(
            "cuda", "", plugin=modules[0], target_config=config.read_text(), topology="1x1x8"
        )


def sent(f, target):
    """Bytes that each device sends, by the type of the elements, in the compiled program."""
    mesh = Mesh(np.array(devices(target)), ("i",))
    x = jax.ShapeDtypeStruct((COUNT * SIZE,), jnp.float32, sharding=NamedSharding(mesh, P("i")))
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    compiled = mapped.lower(x).compile(compiler_options=targets.TARGETS[target].options or None)
    found = {}
    for line in compiled.as_text().splitlines():
        match = re.search(
            r" = (.+?) (all-to-all|all-gather|collective-permute|all-reduce|reduce-scatter)"
            r"(-start)?\(",
            line,
        )
        if not match:
            continue
        types, kind, start = match.groups()
        # What is started has the types of operands and results.
        part = 1 - 1 / COUNT if kind != "collective-permute" else 1
        if start:
            part *= COUNT / (COUNT + 1) if kind == "all-gather" else 1 / 2
        for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", types):
            size = math.prod(map(int, dims.split(",")))
            found[dtype] = found.get(dtype, 0) + size * BITS[dtype] / 8 * part
        assert kind not in ("all-reduce", "reduce-scatter"), line
    return found


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_codes_are_sent_and_floats_are_not(name, spec, target):
    """Beside scales, of which there is one in 256. Measured against what floats would take."""
    types, most = FORMATS[spec]
    found = sent(functools.partial(COLLECTIVES[name], spec=spec), target)
    once = SIZE * 4 * (1 - 1 / COUNT)  # each device sends all others a part
    if name.startswith("sum"):
        once *= 2
    elif name.startswith("gathered"):
        once *= COUNT
    elif name == "to some":
        once = SIZE * 4
    assert "f32" in found and found.keys() - {"f32"} <= types and len(found) > 1
    assert found["f32"] <= 1.01 * once / 256
    ratio = sum(found.values()) / once
    print(f"{target} {spec} {name}: {ratio:.3f} of float32")
    assert ratio <= most


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
def test_gradients_and_keys_send_codes_too(target):
    """A gathered weight, whose gradient is scattered: each in codes, with its own format."""

    def f(x):
        gather = functools.partial(
            parallel.all_gather,
            axis_name="i",
            spec="int8:group=256",
            backward="int4:group=256",
            hadamard=True,
            key=jax.random.key(0),
        )
        return jax.grad(lambda x: jnp.sin(gather(x)).sum())(x)

    found = sent(f, target)
    once = SIZE * 4 * (COUNT - 1)
    assert sum(found.values()) <= (0.27 + 0.15) * once and found["f32"] <= 2.01 * once / 256
