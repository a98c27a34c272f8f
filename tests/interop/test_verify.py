"""What was written is read again and compared with the float model."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import Name, verify, write

from ..oracles.refusals import assert_error

NAMES = [
    Name("layers.{i}.up.weight", "up", transpose=True),
    Name("head.weight", "head", transpose=True),
    Name("norm.weight", "norm"),
]


def apply(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["up"])
    return (x * params["norm"][None]) @ params["head"]


@pytest.fixture(scope="module")
def floats():
    keys = jax.random.split(jax.random.key(0), 4)
    names = {f"layers.{i}.up.weight": jax.random.normal(keys[i], (32, 32)) for i in range(3)}
    return {
        **names,
        "head.weight": jax.random.normal(keys[3], (16, 32)),
        "norm.weight": jnp.ones(32),
    }


def quantized(floats, scheme="int4"):
    spec = jqx.QSpec(scheme, jqx.per_block({0: 1, 1: 32}))
    return {
        name: QTensor.quantize(x, spec) if name.startswith("layers") else x
        for name, x in floats.items()
    }


def test_what_is_written_well_is_right(tmp_path, floats):
    write(tmp_path / "m", quantized(floats), "compressed-tensors", config={})
    jqx.save(tmp_path / "f", floats)
    found = verify(tmp_path / "m", tmp_path / "f")
    assert found.ok and found.check() is found and found.sites is None
    assert {row.path for row in found.tensors} == {*floats}
    for row in found.tensors:
        assert 15 < row.sqnr < 25 if row.path.startswith("layers") else row.sqnr == math.inf
    with jqx.interop.read(tmp_path / "m") as archive:
        assert verify(archive, floats) == found
    assert json.loads(json.dumps(found.to_dict()))["problems"] == []
    assert "0 of them wrong" in str(found)


def test_sites_of_a_function_are_compared(tmp_path, floats):
    write(tmp_path / "m", quantized(floats), "compressed-tensors", config={})
    jqx.save(tmp_path / "f", floats)
    with jqx.interop.read(tmp_path / "f") as archive:
        params = jqx.interop.tree(archive, NAMES)
    batch = (jax.random.normal(jax.random.key(5), (8, 32)),)
    found = verify(tmp_path / "m", params, names=NAMES, function=apply, batch=batch)
    assert found.ok and [site.name for site in found.sites.sites] == ["up[0]", "up[1]", "up[2]"]
    assert all(15 < site.local_sqnr < 30 for site in found.sites.sites)
    assert "own SQNR dB" in str(found)
    strict = verify(tmp_path / "m", params, names=NAMES, function=apply, batch=batch, least=15)
    assert len(strict.problems) == 1 and strict.problems[0].startswith("the site '(result)': ")


def test_a_file_of_a_quantized_function(tmp_path, floats):
    params = {"up": jnp.stack([floats[f"layers.{i}.up.weight"] for i in range(3)])}
    params |= {"norm": floats["norm.weight"], "head": floats["head.weight"].T}
    batch = (jax.random.normal(jax.random.key(5), (8, 32)),)
    whole = jqx.ptq(apply, jqx.presets.w8a8_dynamic(), progress=False)(params, [batch])
    jqx.save(tmp_path / "q", whole)
    found = verify(tmp_path / "q", params, function=apply, batch=batch)
    assert found.ok and len(found.sites.sites) == 4
    other = {**params, "head": params["head"][::-1]}
    assert any("'head'" in line for line in verify(tmp_path / "q", other).problems)


@pytest.mark.parametrize("by", [jqx.algorithms.rotate(), jqx.algorithms.smooth_quant()], ids=str)
def test_a_file_of_rewritten_weights_is_refused(tmp_path, by):
    params = {
        "norm": jnp.linspace(0.5, 9, 32),
        "up": jax.random.normal(jax.random.key(0), (32, 32)),
    }
    f = lambda p, x: (x * p["norm"][None]) @ p["up"]  # noqa: E731
    batch = (jax.random.normal(jax.random.key(5), (8, 32)),)
    jqx.save(tmp_path / "q", jqx.ptq(f, jqx.presets.w8a8(), by, progress=False)(params, [batch]))
    for options in ({}, {"function": f, "batch": batch}):
        call = functools.partial(verify, tmp_path / "q", params, **options)
        assert_error(call, "the weights of the file are not those of the float model")


def with_scale(q, scale):
    return dataclasses.replace(q, scale=scale)


WRONG = {
    "missing": (lambda q: None, "missing in the file"),
    "shape": (lambda q: q[:16], r"shape \(16, 32\)"),
    "layout": (lambda q: q.T, "less than 3 dB"),
    "sign": (lambda q: with_scale(q, -q.scale), "less than 3 dB"),
    "infinite": (lambda q: with_scale(q, q.scale.at[0].set(jnp.inf)), "not finite"),
    "zeros": (lambda q: with_scale(q, q.scale.at[3].set(0)), "1 rows are zeros"),
    "twice": (lambda q: with_scale(q, q.scale * 2), "less than 3 dB"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_found(floats, case):
    name, tree = "layers.1.up.weight", quantized(floats, "int8")
    change, words = WRONG[case]
    changed = change(tree.pop(name))
    if changed is not None:
        tree[name] = changed
    found = verify(tree, floats)
    assert not found.ok and len([row for row in found.tensors if row.problems]) == 1
    with pytest.raises(ValueError, match=f"'{name}': .*{words}"):
        found.check()


@pytest.mark.parametrize(
    ("value", "words"), [(0, "is 0"), (-1, "negative"), (np.nan, "not finite")]
)
def test_scales_of_caches_are_looked_at(floats, value, words):
    tree = quantized(floats)
    for name in ("layers.0.k_scale", "layers.0.up.input_scale", "layers.0.up.weight_scale_inv"):
        assert verify({**tree, name: jnp.ones(2)}, floats).ok
        (problem,) = verify({**tree, name: jnp.array([1, value])}, floats).problems
        assert name in problem and words in problem


def test_floats_are_those_of_the_model_in_the_dtype_of_the_file(floats):
    tree = quantized(floats)
    half = {**tree, "head.weight": tree["head.weight"].astype(jnp.bfloat16)}
    assert verify(half, floats).ok
    other = {**tree, "norm.weight": tree["norm.weight"] * 1.05}
    assert verify(other, floats).problems == ("'norm.weight': less than 45 dB",)
    more = {**tree, "more.weight": jnp.ones(3)}
    assert verify(more, floats).problems == ("'more.weight': not in the float model",)
    assert verify(more, floats, ignore=[r"more\..*"]).ok


def test_floats_that_are_lost_in_their_dtype_are_found():
    w = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    lost = {
        "int8, and float32 in the model": (w * 0.2, np.zeros((32, 64), np.int8)),
        "bool, and float32 in the model": (w, w > 0),
        "numbers that are not finite": (w * 1e5, jnp.asarray(w * 1e5).astype(jnp.float16)),
        "less than 20 dB": (w * 1e-4, (w * 1e-4).astype(jnp.float8_e4m3fn)),
    }
    for words, (real, found) in lost.items():
        (problem, *_) = verify({"w": jnp.asarray(found)}, {"w": real}).problems
        assert words in problem
    overflown = (w * 1e4).astype(jnp.float8_e4m3fn)
    assert "not finite" in verify({"w": overflown}, {"w": w * 1e4}).problems[0]


def test_swapped_rows_and_layers_are_found(floats):
    name = "layers.0.up.weight"
    tree = quantized(floats, "int8")
    rows = np.arange(32)
    rows[[3, 4]] = 4, 3
    found = verify({**tree, name: tree[name].take(rows, axis=0)}, floats)
    assert found.problems == (f"{name!r}: 2 rows are worse than zeros",)
    rng = np.random.default_rng(0)
    a, b = (1 + 0.02 * rng.normal(size=(2, 576))).astype(np.float32)
    assert len(verify({"a": a, "b": b}, {"a": b, "b": a}).problems) == 2
    zero = {"up.k_scale": jnp.zeros(1)}
    assert verify(zero, zero).problems == ("'up.k_scale': a scale is 0",)


def test_arguments_that_do_not_fit(tmp_path, floats):
    assert_error(lambda: verify(floats, floats, function=apply), "a function needs a batch")
    assert_error(lambda: verify(floats, floats, ignore=["nothing"]), "matches no")
    assert_error(lambda: verify(floats, floats, ignore=["["]), "not a regular expression")
    twice = {"a.b": jnp.ones(3), "a": {"b": jnp.ones(3)}}
    assert_error(lambda: verify(twice, floats), "two tensors have the same name")
    assert_error(lambda: verify(floats, floats, ignore="x"), "not hold patterns", error=TypeError)
    assert_error(lambda: verify({}, floats), "nothing to compare", error=TypeError)
    assert_error(lambda: verify({"w": "text"}, floats), "nothing to compare", error=TypeError)
    assert_error(lambda: verify(floats, floats, names=NAMES), "`file`", error=TypeError)
    assert_error(lambda: verify(tmp_path / "no", floats), "cannot", error=FileNotFoundError)
