"""A quantized function that is saved, loaded and bound is the same, bit for bit."""

import dataclasses
import json
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.interop.tree import _fields as fields_of_map
from jqx._src.statistics.calibrators import AbsMax

from ..arrays import assert_same, normal
from ..oracles.refusals import assert_error

PARTS = r"jqx\.[A-Za-z_.]+: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
NAMES = ("static", "asymmetric", "blocks", "nf4", "mx", "float")
POLICY = jqx.Policy(
    [
        jqx.Rule("static", weight="int8", activation="int8"),
        jqx.Rule("asymmetric", weight="uint4:group=16:asymmetric", activation="uint8:asymmetric"),
        jqx.Rule("blocks", weight="int4:group=16"),
        jqx.Rule("nf4", weight="nf4:group=16", output="int8"),
        jqx.Rule("mx", weight="mxfp8"),
    ]
)
PARAMS = {name: normal(i, 32, 32) for i, name in enumerate(NAMES)}
X = normal(len(NAMES), 3, 32)


def f(params, x):
    return jnp.stack([x @ params[name] for name in NAMES])


def quantized_of(target=None):
    return jqx.ptq(f, POLICY, target=target, progress=False)(PARAMS, [X, X[:2] - 1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantized") / "model.safetensors"
    quantized = quantized_of()
    jqx.save(path, quantized)
    return path, quantized


@pytest.mark.slow
def test_a_clip_is_a_field_of_files_where_there_is_one(tmp_path):
    """Maps without one are stored as before there were clips."""
    (site,) = (x for x in jqx.make_plan(f, POLICY)(PARAMS, X).sites if "static" in x.path)
    (key,) = (x.key for x in site.operands if x.path is None)
    quantized = jqx.ptq(f, POLICY, progress=False)(PARAMS, [X])
    assert set(fields_of_map(jqx.ChannelMap())) == {"scale", "factors", "shift"}
    for clip in (None, jnp.full(X.shape[-1], 0.5)):
        maps = {key: (jqx.ChannelMap(scale=jnp.ones(X.shape[-1]), clip=clip),)}
        jqx.save(tmp_path / "x", dataclasses.replace(quantized, maps=maps))
        assert_same(dict(jqx.load(tmp_path / "x").maps), maps)


@pytest.mark.slow
def test_maps_of_channels_are_saved(tmp_path):
    """A scale that is kept at a site is one, and so are the scales of two algorithms."""
    smooth = jqx.algorithms.smooth_quant(strength=0.85)
    algorithm = jqx.algorithms.chain(smooth, dataclasses.replace(smooth, strength=0.8))
    quantized = jqx.ptq(f, POLICY, algorithm, progress=False)(PARAMS, [X])
    assert {key: len(x) for key, x in quantized.maps.items()} == {
        f"{name}:dot_general:lhs": 2 for name in ("static", "asymmetric")
    }
    path = tmp_path / "model.safetensors"
    jqx.save(path, quantized)
    loaded = jqx.load(path)
    assert_same(dict(loaded.maps), dict(quantized.maps))
    bound = loaded.bind(f)
    np.testing.assert_array_equal(bound(X), quantized(X))
    again = tmp_path / "again.safetensors"
    jqx.save(again, bound)
    assert again.read_bytes() == path.read_bytes()


def test_what_is_bound_is_what_was_saved(saved):
    path, quantized = saved
    loaded = jqx.load(path)
    bound = loaded.bind(f)
    assert isinstance(loaded, jqx.SavedModel) and isinstance(bound, jqx.Quantized)
    assert (bound.plan, bound.inputs) == (quantized.plan, quantized.inputs)
    assert bound.plan.fingerprint == quantized.plan.fingerprint
    assert (
        repr(bound) == repr(quantized)
        and repr(loaded).removeprefix("SavedModel") == repr(bound)[9:]
    )
    assert str(bound.report) == str(quantized.report)
    assert_same(bound.params, quantized.params)
    assert_same(bound.affines, quantized.affines)
    results = [jax.jit(q.function)(q.params, X) for q in (quantized, bound)]
    assert_same(*results)
    assert_same(bound(X), quantized(X))  # uncompiled


def test_a_file_does_not_depend_on_the_machine(saved, tmp_path):
    path, _ = saved
    for target in ("tpu", False):
        other = quantized_of(target)
        jqx.save(tmp_path / "other", other)
        assert (tmp_path / "other").read_bytes() == path.read_bytes()
        assert_same(jqx.load(path).bind(f, target=target).params, other.params)
    with jqx.interop.Archive(path) as archive:  # its weights are a tree, to whom asks for one
        assert set(archive.paths) == set(NAMES) and archive.metadata == {}
        assert_same(archive.read("blocks"), other.params["blocks"].pack())
        for weight in other.report.weights:  # a file has a byte for a zero point of 4 bits
            zeros = 32 if weight.path == "asymmetric" else 0
            assert archive.read(weight.path).nbytes == weight.bytes_packed + zeros
    assert other.report.bytes_packed < other.report.bytes_after
    assert f"{other.report.bytes_packed:,}" in str(other.report)


def test_a_quantized_function_without_a_report_is_refused(saved, tmp_path):
    _, quantized = saved
    with pytest.raises(TypeError, match=r"`report`(.|\n)*jqx.report\(plan, params, affines\)"):
        jqx.save(tmp_path / "x", dataclasses.replace(quantized, report=None))


class Pair(NamedTuple):
    w: jax.Array
    inner: list


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: jax.Array
    act: str = dataclasses.field(metadata={"static": True})


W = PARAMS["static"]
TREES = {
    "a lone array": W,
    "lists, tuples and None": [(W, None), {1: W}],
    "a named tuple": Pair(W, [W]),
    "a dataclass and a number": {"a": Layer(W, "relu"), "n": 3},
}


@pytest.mark.parametrize("name", TREES)
def test_parameters_may_be_any_pytree(name, tmp_path):
    tree = TREES[name]

    def g(params, x):
        return [x @ w for w in jax.tree.leaves(params) if hasattr(w, "ndim")]

    quantized = jqx.ptq(g, jqx.presets.w8a16(), progress=False)(tree, [X])
    jqx.save(tmp_path / "a", quantized)
    loaded = jqx.load(tmp_path / "a")
    assert loaded.structured == (name in ("a lone array", "lists, tuples and None"))
    if not loaded.structured:
        with pytest.raises(ValueError, match="does not hold the structure") as info:
            loaded.bind(g)
        assert re.match(PARTS, str(info.value))
        with pytest.raises(ValueError, match="does not match the parameters") as info:
            loaded.bind(g, like={"z": W})
        assert re.match(PARTS, str(info.value))
    assert_same(loaded.bind(g, like=tree).params, quantized.params)
    bound = loaded.bind(g, like=quantized.params) if not loaded.structured else loaded.bind(g)
    assert_same(bound.params, quantized.params)
    assert_same(bound(X), quantized(X))


def test_several_arguments_names_and_values_of_the_user(tmp_path):
    class Mine(AbsMax):
        pass

    mine, spec = Mine(), jqx.QSpec("int8", calibrator=Mine())
    policy = jqx.Policy([jqx.Rule("first|1", weight="int8", activation=spec)])
    g = lambda x, w, y, v: x @ w + y @ v  # noqa: E731
    names = {"1": "first", "3": "1"}
    quantize = jqx.ptq(g, policy, params=(1, 3), names=names, progress=False)
    quantized = quantize((W, 2 * W), [(X, X)])
    assert_error(lambda: jqx.save(tmp_path / "a", quantized), "neither of a class of jqx")
    jqx.save(tmp_path / "a", quantized, values={"mine": mine})
    assert_error(lambda: jqx.load(tmp_path / "a"), "'mine'")
    bound = jqx.load(tmp_path / "a", values={"mine": mine}).bind(g)
    assert_same(bound(X, X), quantized(X, X))
    assert_error(lambda: quantize(W, [(X, X)]), "are in several")


def test_inputs_that_files_do_not_hold_are_checked_at_the_first_call(tmp_path):
    g = lambda w, n, x: x @ w * n  # noqa: E731
    jqx.save(tmp_path / "a", jqx.ptq(g, jqx.presets.w8a16(), progress=False)(W, [(3, X)]))
    loaded = jqx.load(tmp_path / "a")
    assert loaded.inputs is None and loaded.bind(g)(3, X).shape == (3, 32)
    assert_error(lambda: loaded.bind(lambda w, n, x: x @ w @ w * n)(3, X), "another function")


OTHERS = {
    "another axis": (
        lambda p, x: f({**p, "static": p["static"].T}, x),
        ValueError,
        r"(?s)another function.*static\[1,0\].*static\[0,1\]",
    ),
    "more": (lambda p, x: [f(p, x), x @ p["static"]], ValueError, "another function"),
    "fewer": (lambda p, x: x @ p["static"], ValueError, "another function"),
    "other keys": (lambda p, x: x @ p["q"], ValueError, "KeyError: 'q'"),
    "no function": (PARAMS, TypeError, "`f` is not a function"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_function_is_refused_in_four_parts(saved, name):
    g, error, fact = OTHERS[name]
    with pytest.raises(error, match=fact) as info:
        jqx.load(saved[0]).bind(g)
    assert re.match(PARTS, str(info.value)) and str(info.value).startswith("jqx.bind")


def test_targets_are_checked(saved):
    with pytest.raises(ValueError, match=r"jqx\.bind: `target` is unknown") as info:
        jqx.load(saved[0]).bind(f, target="npu")
    assert "target=False" in str(info.value)


def _changed(path, out, change):
    """Writes a file with other metadata."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    described = json.loads(header["__metadata__"]["jqx.quantized"])
    described = change(described)
    header["__metadata__"]["jqx.quantized"] = (
        described if isinstance(described, str) else json.dumps(described)
    )
    text = json.dumps(header).encode()
    out.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _set(*keys, to):
    def change(data):
        inner = data
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        return data

    return change


SCALE = ("affines", 0, "scale")
BROKEN = {
    "no JSON": lambda data: "{",
    "deep JSON": lambda data: "[" * 200_000,
    "a list": lambda data: [],
    "another version": _set("version", to=3),
    "no version": _set("version", to="1"),
    "another version of the plan": _set("plan", "version", to=7),
    "no plan": _set("plan", to=None),
    "an unknown field": _set("more", to=1),
    "no report": lambda data: {k: v for k, v in data.items() if k != "report"},
    "a report of text": _set("report", "kept", to="many"),
    "an unknown key": _set("affines", 0, "key", to="nothing"),
    "a scale of another shape": _set(*SCALE, "shape", to=[7]),
    "a scale of no dtype": _set(*SCALE, "dtype", to="float31"),
    "a scale of text": _set(*SCALE, "numbers", to=["x"]),
    "a scale beyond its dtype": _set(*SCALE, "numbers", to=[1e300]),
    "a scale of a huge integer": _set(*SCALE, "numbers", to=[10**400]),
    "inputs of another kind": _set("inputs", to={"list": []}),
    "inputs without shapes": _set("shapes", to=[]),
    "inputs of no tree": _set("inputs", to={"a": 3}),
    "shapes below zero": lambda data: {**data, "shapes": [[n, [-1]] for n, _ in data["shapes"]]},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_errors_in_four_parts(saved, tmp_path, name):
    _changed(saved[0], tmp_path / "a", BROKEN[name])
    with pytest.raises((ValueError, TypeError)) as info:
        jqx.load(tmp_path / "a")
    assert re.match(PARTS, str(info.value)), info.value


def test_truncated_files_and_files_of_other_weights_are_refused(saved, tmp_path):
    path, quantized = saved
    (tmp_path / "a").write_bytes(path.read_bytes()[:-1])
    assert_error(lambda: jqx.load(tmp_path / "a"), "is truncated")
    params = {**quantized.params, "float": jnp.zeros((32, 16))}
    jqx.save(tmp_path / "a", dataclasses.replace(quantized, params=params))
    with pytest.raises(ValueError, match=r"float32\[32, 16\]"):
        jqx.load(tmp_path / "a").bind(f)
    with pytest.raises(TypeError, match="a key that jqx needs"):
        jqx.interop.save_leaves(tmp_path / "a", [X], [X], metadata={"jqx.quantized": "{}"})


FRESH = """
import sys, numpy as np, jqx
from tests.interop.test_quantized import X, f
np.save(sys.argv[2], jqx.load(sys.argv[1]).bind(f)(X))
"""


@pytest.mark.slow
def test_a_fresh_process_computes_the_same_bits(saved, tmp_path):
    path, quantized = saved
    out = tmp_path / "out.npy"
    subprocess.run([sys.executable, "-c", FRESH, str(path), str(out)], check=True)
    assert_same(np.load(out), np.asarray(quantized(X)))


def test_parts_of_a_scan_come_back(tmp_path):
    def deep(params, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]

    params = {"layers": jnp.stack([PARAMS[name] for name in NAMES])}
    policy = jqx.Policy({r"layers[0]": "int8", r"layers[-1]": "float", "layers": "int4:group=16"})
    quantized = jqx.ptq(deep, policy, progress=False)(params, [X])
    jqx.save(tmp_path / "deep", quantized)
    again = jqx.load(tmp_path / "deep").bind(deep)
    assert isinstance(again.params["layers"], jqx.Segments)
    assert_same(again.params, quantized.params)
    assert_same(again(X), quantized(X))
    with pytest.raises(ValueError, match=PARTS):
        jqx.load(tmp_path / "deep").bind(lambda params, x: deep(params, x)[::-1] @ PARAMS["nf4"])
