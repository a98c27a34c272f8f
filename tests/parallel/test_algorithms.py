"""Algorithms on parameters and batches that lie on several devices: the codes of one device."""

import functools

import jax
import numpy as np
import pytest

import jqx
from jqx.algorithms import auto_round, gptq, nearest

from ..models.parallel import AUTO, EXPLICIT, inputs, mesh_of, network, on_mesh, params

INT4 = jqx.Policy({".*": "int4:group=32"})
ALGORITHMS = {
    "nearest": (INT4, nearest()),
    "static scales": (jqx.presets.w8a8(), nearest()),
    "layer by layer": (INT4, gptq()),
    "one pass": (INT4, gptq(sequential=False)),
    "learned": (INT4, auto_round(steps=2)),
}


def quantize(name, p, x):
    return jqx.ptq(network, *ALGORITHMS[name], target=False, progress=False)(p, [x, x])


@functools.cache
def of_one_device(name):
    one = quantize(name, params(), inputs())
    return one, jax.jit(one.function)(one.params, inputs())


@pytest.mark.many("kind")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((AUTO, name) for name in ALGORITHMS),
        *((EXPLICIT, name) for name in ("static scales", "layer by layer", "learned")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name.lower(),
)
def test_codes_equal_those_of_one_device_and_are_on_the_devices_of_the_floats(name, kind):
    p, x = on_mesh(mesh_of(kind))
    found, (one, expected) = quantize(name, p, x), of_one_device(name)
    for path in ("up", "down"):
        own, other = found.params[path], one.params[path]
        np.testing.assert_array_equal(own.values, other.values)
        np.testing.assert_array_equal(own.scale, other.scale)
        assert own.values.sharding.is_equivalent_to(p[path].sharding, 2)
    for key, (scale, _) in one.affines.items():
        np.testing.assert_allclose(found.affines[key].scale, scale, rtol=512 * 2.0**-24)
    y = jax.jit(found.function)(found.params, x)
    size = float(np.abs(expected).max())
    np.testing.assert_allclose(y, expected, rtol=0, atol=size * 512 * 2.0**-24)
