"""Folders of Orbax: read array by array, to the tree that was saved; those of gemma to QTensors."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jqx

from .refusals import assert_refused


def saved(path, tree):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def gemma(rng):
    def coded(shape, over, dtype):
        codes = rng.integers(-8, 8, shape).astype(np.int8).astype(dtype)
        sizes = [1 if axis in over else n for axis, n in enumerate(shape)]
        scale = rng.uniform(0.5, 9, sizes).astype(np.float32)
        return {"kernel": jnp.asarray(codes), "scale": jnp.asarray(scale, jnp.bfloat16)}

    return {
        "layer_0": {
            "attn": {"q_einsum": {"_IntEinsum_0": coded((2, 8, 4), (1,), jnp.int4)}},
            "mlp": {
                "_IntEinsum_linear": coded((7, 8), (0,), jnp.int4),
                "_IntEinsum_gating_einsum": coded((2, 5, 8), (2,), jnp.int8),
            },
            "norm": {"scale": jnp.ones(4)},
        }
    }


def test_a_tree_is_read_array_by_array(tmp_path):
    tree = {
        "a": {"b": [jnp.arange(3), jnp.ones((2, 2), jnp.bfloat16)], "c": jnp.zeros(())},
        "d": jnp.arange(-3, 4).astype(jnp.int4),
    }
    with jqx.interop.read(saved(tmp_path / "m", tree)) as archive:
        assert archive.format == "orbax"
        assert archive.paths == ("a/b/0", "a/b/1", "a/c", "d")
        assert archive.spec("a/b/1") == jax.ShapeDtypeStruct((2, 2), jnp.bfloat16)
        np.testing.assert_array_equal(archive.read("a/b/1"), tree["a"]["b"][1])
        loaded = archive.map(archive.read)
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    for found, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)


def test_gemma_is_what_from_gemma_makes_of_the_restored_tree(tmp_path):
    tree = gemma(np.random.default_rng(0))
    expected = jqx.interop.from_gemma(tree)
    with jqx.interop.read(saved(tmp_path / "m", tree)) as archive:
        assert archive.format == "gemma"
        loaded, specs = archive.map(archive.read), archive.map(archive.spec)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    assert jax.tree.structure(specs) == jax.tree.structure(expected)
    for found, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)
    assert loaded["layer_0"]["mlp"]["linear"].layout.packing is not None


def test_what_is_no_checkpoint_is_refused(tmp_path):
    folder = saved(tmp_path / "m", {"a": jnp.ones(3)})
    assert_refused(lambda: jqx.load(folder, config={}), "the Orbax folder")
    (folder / "_METADATA").write_text("{")
    assert_refused(lambda: jqx.load(folder), "not an Orbax checkpoint")
    other = saved(tmp_path / "n", {"a": jnp.ones(3), "b": "text"})
    assert_refused(lambda: jqx.load(other), "'b' is not a")
