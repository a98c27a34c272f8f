"""Folders of Orbax: read array by array, to the tree that was saved; those of gemma to QTensors."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jqx
from jqx.interop import from_gemma

from ..oracles.refusals import assert_error
from .files import CHECKPOINTS


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
            "dense": {**coded((8, 4), (0,), jnp.int4), "bias": jnp.ones(4)},  # in place
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
    for leaf, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
        assert leaf.dtype == want.dtype
        np.testing.assert_array_equal(leaf, want)


def test_gemma_is_what_from_gemma_makes_of_the_restored_tree(tmp_path):
    tree = gemma(np.random.default_rng(0))
    expected = jqx.interop.from_gemma(tree)
    with jqx.interop.read(saved(tmp_path / "m", tree)) as archive:
        assert archive.format == "gemma"
        loaded, specs = archive.map(archive.read), archive.map(archive.spec)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    assert jax.tree.structure(specs) == jax.tree.structure(expected)
    for leaf, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == want.dtype
        np.testing.assert_array_equal(leaf, want)
    assert loaded["layer_0"]["mlp"]["linear"].layout.packing is not None
    assert loaded["layer_0"]["dense"]["kernel"].shape == (8, 4)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    folder = saved(tmp_path / "m", {"a": jnp.ones(3)})
    assert_error(lambda: jqx.load(folder, config={}), "`config` has no use")
    (folder / "_METADATA").write_text("{")
    assert_error(lambda: jqx.load(folder), "not an Orbax checkpoint")
    other = saved(tmp_path / "n", {"a": jnp.ones(3), "b": "text"})
    assert_error(lambda: jqx.load(other), "'b' is not a")


# Trees of the gemma library, quantized by the package.


@pytest.fixture(scope="module", params=["INT4", "INT8"])
def trees(request):
    """The tree as Orbax restores it."""
    stored = np.load(CHECKPOINTS / "gemma-3.3.0.npz")
    tree, dtype = {}, jnp.dtype(request.param.lower())
    for path in stored:
        method, kind, *keys = path.split("/")
        if method == request.param:
            node = tree
            for key in keys[:-1]:
                node = node.setdefault(key, {})
            x = jnp.asarray(stored[path])
            node[keys[-1]] = x.astype(dtype) if kind == "codes" else x
    return tree


def test_codes_are_those_of_the_package_and_floats_within_a_unit(trees):
    layer = from_gemma(trees)["layer_0"]
    assert layer["pre_attention_norm"]["scale"].shape == (64,)
    pairs = {
        ("attn", "q_einsum", "w"): "_IntEinsum_0",
        ("attn", "kv_einsum", "w"): "_IntEinsum_0",
        ("attn", "attn_vec_einsum", "w"): "_IntEinsum_0",
        ("mlp", "gating_einsum"): "_IntEinsum_gating_einsum",
        ("mlp", "linear"): "_IntEinsum_linear",
    }
    assert len(jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, jqx.QTensor))) == 6
    for (*keys, last), stored_name in pairs.items():
        q, node = layer, trees["layer_0"]
        for key in keys:
            q, node = q[key], node[key]
        q, node = q[last], node[stored_name]
        np.testing.assert_array_equal(np.asarray(q.codes), np.asarray(node["kernel"]))
        want = np.asarray(node["kernel"]).astype(np.float32) / np.asarray(node["scale"])
        np.testing.assert_array_max_ulp(np.asarray(q.dequantize()), want, 1)
        assert q.dtype == jnp.float32 and (q.layout is not None) == (q.qtype == jnp.int4)


def test_a_function_of_the_floats_runs_on_them(trees):
    def f(params, x):
        gate, up = jnp.einsum("td,ghd->gth", x, params["mlp"]["gating_einsum"])
        return (jax.nn.gelu(gate) * up) @ params["mlp"]["linear"]

    params = from_gemma(trees)["layer_0"]
    x = jax.random.normal(jax.random.key(0), (3, 64))
    floats = jax.tree.map(
        lambda p: p.dequantize() if isinstance(p, jqx.QTensor) else p,
        params,
        is_leaf=lambda x: isinstance(x, jqx.QTensor),
    )
    y = jqx.convert(f, jqx.Policy([]))(params, x)
    inner, outer = (np.abs(floats["mlp"][key]) for key in ("gating_einsum", "linear"))
    # Sums of 64 and of 48 terms, in two programs; gelu grows errors by 1.13 at most, and its own
    # is that of some roundings. A number is at most the sum of its terms.
    gate, up = np.einsum("td,ghd->gth", np.abs(x), inner)
    allowed = 2 * (2 * 1.13 * 64 + 48 + 16) * 2.0**-24 * (gate * up) @ outer
    assert (np.abs(y - f(floats, x)) <= allowed).all()


def test_what_is_no_such_tree_is_refused():
    kernel, scale = jnp.ones((4, 2), jnp.int4), jnp.ones((1, 2))
    weight = {"kernel": kernel, "scale": scale}
    assert_error(lambda: from_gemma([1]), "`params`", error=TypeError)
    assert_error(lambda: from_gemma({"a": {"w": scale}}), "no `kernel` of int4")
    assert_error(lambda: from_gemma({"a": {"_IntEinsum_0": {**weight, "b": 1}}}), "a/_IntEinsum_0")
    assert_error(lambda: from_gemma({"_IntEinsum_0": weight, "w": weight}), "two weights")
    assert_error(lambda: from_gemma({"w": scale, "_IntEinsum_0": weight}), "two weights")
    for bad in (jnp.ones(2), jnp.ones((2, 2))):
        tree = {"a": {"kernel": kernel, "scale": bad}}
        assert_error(lambda tree=tree: from_gemma(tree), "at a", "scale float32")
