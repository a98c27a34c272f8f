"""Maps over the leaves of a tree that turn codes into other numbers: any use says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jqx

from ..arrays import normal

W, X = normal(0, 32, 8), normal(1, 4, 32)
SPECS = {
    "int8": jqx.QSpec("int8", jqx.per_axis(1)),
    "uint4 with zero points": jqx.QSpec("uint4", jqx.per_axis(1), symmetric=False),
    "nf4": jqx.QSpec(jqx.numerics.nf4, jqx.per_block({0: 16, 1: 1})),
    "float8": jqx.QSpec("float8_e4m3fn", jqx.per_axis(1)),
    "nvfp4": jqx.QSpec(jqx.numerics.nvfp4, jqx.per_block({0: 16, 1: 1})),
}
CHANGES = {
    "a cast": lambda q: jax.tree.map(lambda a: a.astype(jnp.bfloat16), q),
    "an average": lambda q: jax.tree.map(lambda a: 0.9 * a.astype(jnp.float32), q),
    "wider codes": lambda q: jax.tree.map(
        lambda a: a if a.dtype == jnp.float32 else a.astype(jnp.int32), q
    ),
}


def f(params, x):
    return x @ params["w"]


USES = {
    "dequantize": lambda q: q.dequantize(),
    "codes": lambda q: q.codes,
    "transpose": lambda q: q.T,
    "index": lambda q: q[0],
    "reshape": lambda q: q.reshape(2, 16, 8),
    "astype": lambda q: q.astype(jnp.float16),
    "matmul": lambda q: X @ q,
    "einsum": lambda q: jqx.einsum("bi,ij->bj", X, q),
    "dot_general": lambda q: jqx.dot_general(X, q, (((1,), (0,)), ((), ()))),
    "ragged_dot": lambda q: jqx.ragged_dot(X, q, np.array([4])),
    "take": lambda q: jqx.take(q, np.array([0]), 0),
    "dynamic_slice": lambda q: jqx.dynamic_slice(q, (0, 0), (1, 8)),
    "pack_for": lambda q: jqx.pack_for({"w": q}, "cpu"),
    "dequantize_params": lambda q: jqx.dequantize_params({"w": q}),
    "save": lambda q: jqx.save("never.safetensors", {"w": q}),
    "convert": lambda q: jqx.convert(f, jqx.Policy([]))({"w": q}, X),
    "simulate": lambda q: jqx.simulate(f, jqx.Policy([]))({"w": q}, X),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_changed_codes_is_an_error_that_says_how_to_skip_them(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    q = jqx.QTensor.quantize(W, SPECS["int8"])
    for change in CHANGES.values():
        with pytest.raises(TypeError, match=r"(?s)^jqx\..*does not hold codes.*is_leaf") as refusal:
            USES[use](change(q))
        assert "fix:" in str(refusal.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spec", SPECS)
def test_changed_codes_of_every_format_are_seen_and_printed(spec):
    q = jqx.QTensor.quantize(W, SPECS[spec])
    for change in (CHANGES["a cast"], CHANGES["an average"]):
        changed = change(q)
        dtype = changed.values.dtype.name
        assert f"values {dtype}[32, 8], which are no codes of" in repr(changed)
        assert "which are no codes" in changed._repr_html_()
        with pytest.raises(TypeError, match="does not hold codes"):
            X @ changed
        with pytest.raises(TypeError, match="of 'w' does not hold codes"):
            jax.eval_shape(jqx.convert(f, jqx.Policy([])), {"w": changed}, X)


def test_what_stands_for_leaves_passes():
    """Placeholders, types, places and gradients are no codes, and can be mapped and printed."""
    q = jqx.QTensor.quantize(W, SPECS["int8"])
    for stand_in in (
        lambda a: None,
        lambda a: PartitionSpec(),
        lambda a: a.dtype,
        lambda a: a.shape,
        lambda a: 0,
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
    ):
        tree = jax.tree.map(stand_in, q)
        assert repr(tree).startswith("QTensor(")
        tree._repr_html_()
    kind = jax.eval_shape(lambda q: q, q)
    assert jax.eval_shape(lambda q: X @ q, kind).shape == (4, 8)
    both = jax.tree.map(lambda a: jnp.stack([a, a]), q)
    assert jax.eval_shape(jax.vmap(lambda q: X @ q), both).shape == (2, 4, 8)
    slope = jax.eval_shape(jax.grad(lambda q: (X @ q).sum(), allow_int=True), q)
    assert slope.scale.shape == (1, 8)
    assert "float0" in repr(slope)
