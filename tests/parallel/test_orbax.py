"""Orbax saves QTensors on one mesh, and restores them on another one."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jqx

from ..arrays import normal

FORMATS = ("int8", "uint4", "int4", "uint2", "nf4", "float8_e4m3fn", "mxfp4", "nvfp4", "int3")


def spec_of(form):
    size = 16 if form == "nvfp4" else 32
    blocks = jqx.per_block({0: size, 1: 1})
    return jqx.QSpec(form, blocks, symmetric=not form.startswith("u"))


def mesh_of(*sizes):
    names = ("data", "model")[-len(sizes) :]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def test_codes_are_saved_on_one_mesh_and_restored_on_another(tmp_path):
    one, other = mesh_of(4), mesh_of(2, 4)
    w = jnp.asarray(normal(0, 128, 64))
    tree = {form: jqx.QTensor.quantize(w, spec_of(form)) for form in FORMATS}
    tree["bias"] = jnp.ones(4)
    specs = {**dict.fromkeys(FORMATS, P("model")), "bias": P()}
    saved = jax.device_put(tree, jqx.parallel.shardings(specs, tree, mesh=one))
    specs = {**dict.fromkeys(FORMATS, P("data", "model")), "bias": P("model")}
    places = jqx.parallel.shardings(specs, tree, mesh=other)
    like = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", jqx.interop.to_orbax(saved))
        checkpointer.wait_until_finished()
        stored = checkpointer.restore(tmp_path / "saved", jqx.interop.to_orbax(like))
    found = jqx.interop.from_orbax(stored, like)
    for x, expected, place in zip(*map(jax.tree.leaves, (found, tree, places)), strict=True):
        assert x.dtype == expected.dtype and x.sharding.is_equivalent_to(place, x.ndim)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(expected))


def test_what_was_not_stored_so_is_an_error():
    q = jqx.QTensor.quantize(jnp.ones((4, 4)), jqx.QSpec("uint4", symmetric=False))
    with pytest.raises(ValueError, match=r"an array is uint4.+, not int4"):
        jqx.interop.from_orbax({"w": q}, {"w": q})
    with pytest.raises(ValueError, match="the trees differ"):
        jqx.interop.from_orbax({"v": q}, {"w": q})
