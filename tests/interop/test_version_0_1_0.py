"""Files and plans as jqx 0.1.0 wrote them are read, and mean what they meant.

`tree.npz` has the codes, scales and real values of the QTensors of `tree.safetensors`, and the
bytes of its arrays; `converted.safetensors` the quantized parameters, scales, arguments and results
of the plans of `plans.json`. They were written once, and are not to be written again.
"""

import dataclasses
import enum
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import calibrators, numerics
from jqx._src.statistics.calibrators import AbsMax
from jqx._src.tensor import serialize

from .trees import assert_same

# What the plans were made for: a function for each thing that plans say.


def dense(p, x):
    """Two products, one of a transposed weight."""
    return jax.nn.relu(x @ p["a"]) @ p["b"].T


def scanned(p, x):
    """A scan that steps over its weights."""
    return lax.scan(lambda c, w: (jnp.clip(c @ w, -2, 2), None), x, p["layers"])[0]


def tied(p, tokens):
    """A table that is looked up, and multiplied with."""
    return jnp.take(p["table"], tokens, axis=0) @ p["table"].T


def joined(p, x):
    """Two weights, joined into one operand."""
    return x @ jnp.concatenate([p["a"], p["b"].T], axis=1)


def convolved(p, x):
    """A convolution."""
    return lax.conv_general_dilated(
        x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def attended(p, x):
    """A product of activations, which stays in float, between two that are quantized."""
    q = x @ p["query"]
    return jax.nn.softmax(q @ x.T) @ x @ p["out"][0]


FUNCTIONS = {f.__name__: f for f in (dense, scanned, tied, joined, convolved, attended)}

FOLDER = pathlib.Path(__file__).with_name("version_0_1_0")


@dataclasses.dataclass(frozen=True)
class Mine(AbsMax):
    """A calibrator of the user."""


class Book(numerics.Codebook):
    """A format of the user."""


OWN = {"calibrator": Mine(), "format": Book((-1.0, 0.5, 2.0), "mine")}


def unsigned(x):
    """The bits of an array, an element a row of bytes; of what is smaller than a byte, codes."""
    if x.dtype.itemsize == 1 and x.dtype.name[-1] in "24" and "int" in x.dtype.name:
        x = x.astype(np.int8 if x.dtype.name.startswith("i") else np.uint8)
    return np.frombuffer(x.tobytes(), np.uint8)


@pytest.fixture(scope="module")
def tree():
    return jqx.load(FOLDER / "tree.safetensors", values=OWN)


@pytest.fixture(scope="module")
def expected():
    with np.load(FOLDER / "tree.npz") as file:
        return dict(file)


def test_the_containers_are_those_that_were_saved(tree):
    assert list(tree) == ["qtensors", "arrays", "nested"] and len(tree["qtensors"]) == 78
    items, seven, of_user = tree["nested"].values()
    assert list(tree["nested"]) == ["list", 7, "own"]
    assert [type(item) for item in items[1:]] == [type(None), tuple] and items[2][1:] == ({}, [])
    np.testing.assert_array_equal(items[0], [0, 1, 2])
    assert items[2][0].shape == () and items[2][0] == 1.5
    assert seven["a/b"].shape == (0, 3) and seven[""].tolist() == [1]
    assert of_user.qtype is OWN["format"] and of_user.dtype == jnp.float32


def test_arrays_have_the_bytes_that_were_saved(tree, expected):
    for name, x in tree["arrays"].items():
        assert (x.dtype.name, x.shape) == (name, (2, 3))
    bits = [unsigned(np.asarray(x)) for x in tree["arrays"].values()]
    np.testing.assert_array_equal(np.concatenate(bits), expected["arrays"])


def test_qtensors_have_the_codes_and_scales_that_were_saved(tree, expected):
    leaves = jax.tree.leaves(list(tree["qtensors"].values()))
    leaf_bytes = [np.asarray(leaf).tobytes() for leaf in leaves]
    assert b"".join(leaf_bytes) == expected["leaves"].tobytes()


def assert_real_values(tree, expected, names):
    """Asserts that QTensors of these names stand for the values that were saved."""
    tensors = tree["qtensors"]
    ends = np.cumsum([q.size for q in tensors.values()])
    want = dict(zip(tensors, np.split(expected["real"], ends[:-1]), strict=True))
    assert ends[-1] == expected["real"].size
    values = jax.jit(lambda tensors: [q.dequantize() for q in tensors])([tensors[n] for n in names])
    for name, real in zip(names, values, strict=True):
        # The codes of 32 bits are rounded to float32 before they are multiplied, or are not.
        rtol = 2.0**-22 if numerics.format_of(tensors[name].qtype).bits == 32 else 0
        real = np.asarray(real, np.float32).reshape(-1)
        np.testing.assert_allclose(real, want[name], rtol=rtol, err_msg=name)


def test_qtensors_have_the_values_that_were_saved(tree, expected):
    assert_real_values(tree, expected, [name for name in tree["qtensors"] if " " in name][::2])


@pytest.mark.slow
def test_all_qtensors_have_the_values_that_were_saved(tree, expected):
    assert_real_values(tree, expected, list(tree["qtensors"]))


LAYOUTS = {
    " packed": "packed along axis -1",
    " packed and turned": "packed along axis -1 and swapped",
    "uint8 for cpu": "as int8",
    "int4 for cpu": "as int8",
    "fp4 for cpu": "swapped",
}


def test_qtensors_keep_their_layout(tree):
    for name, q in tree["qtensors"].items():
        texts = [text for end, text in LAYOUTS.items() if name.endswith(end)]
        assert str(q.layout or "") == (texts[0] if texts else ""), name
        assert q.dtype == (jnp.bfloat16 if "bfloat16" in name else jnp.float32)
        assert bool(q.blocks) == ("with a tail" in name or "100 in blocks of 32" in name), name


GONE = ("Entropy", "AdditiveNoise", "ElementwiseGradientScaling", "FixedRange")
"""Classes of version 1 that jqx has no more."""


def is_gone(spec):
    """Whether JSON holds a class that is gone."""
    return any(f'.{name}"' in json.dumps(spec) for name in GONE)


@pytest.fixture(scope="module")
def plans():
    """The plans, without the weights whose specs hold a class that is gone."""
    plans = json.loads((FOLDER / "plans.json").read_text())
    weights = plans["specs"]["weights"]
    plans["specs"]["weights"] = [weight for weight in weights if not is_gone(weight)]
    assert len(plans["specs"]["weights"]) == len(weights) - 3
    return plans


RENAMED = {"Hqo": "Hqq"}
"""Classes that have another name since."""

NAMES = (
    *("AbsMax", "AcrossDevices", "Block", "Ceil", "Codebook", "Delayed"),
    *("Fixed", "FourOverSix", "Groups"),
    *("Hqq", "Integer", "LearnedStep", "LearnedStepAndOffset", "MinMax", "Minifloat", "Mse"),
    *("Numerics", "ParameterizedClipping", "Parq", "PerAxis", "PerBlock", "PerGroup"),
    *("PerKeptAxis", "PerRun", "PerShare", "PerTensor", "PerTile", "Percentile", "PowerOfTwo"),
    *("Rms", "Rounded", "RoundedOperand"),
    *("Squares", "StochasticRounding", "StraightThrough", "StraightThroughUnclipped"),
)
"""What version 2 calls the classes of jqx. These names never change."""


def assert_holds(value, data):
    """Asserts that a value has every field that JSON says, whatever else it has."""
    if isinstance(value, jqx.extend.QType) and isinstance(data, str):
        value = value.name
    if isinstance(data, dict):
        for field, item in data.items():
            if field == "value":
                assert value is OWN[item]
            elif field.startswith("jqx."):
                name = field.rpartition(".")[2]
                assert RENAMED.get(name, name) == type(value).__name__
                assert_holds(value, item)
            else:
                assert_holds(getattr(value, field), item)
    elif isinstance(data, list):
        assert isinstance(value, tuple) and len(value) == len(data)
        for item, part in zip(value, data, strict=True):
            assert_holds(item, part)
    elif isinstance(value, (enum.Enum, np.dtype)):
        assert value.name == data
    else:
        assert value == data


def test_plans_say_what_was_written(plans):
    for name, data in plans.items():
        plan = jqx.Plan.from_dict(data, OWN)
        assert data["version"] == 1
        if name != "specs":
            assert [site.op for site in plan.sites]
        assert_holds(plan, {key: data[key] for key in data if key != "version"})


def test_plans_convert_what_was_quantized_with_them(plans):
    cases = jqx.load(FOLDER / "converted.safetensors")
    assert {*cases, "specs"} == set(plans)
    converted = {}
    for name in cases:
        f, plan = FUNCTIONS[name.split()[0]], jqx.Plan.from_dict(plans[name], OWN)
        affines = {key: calibrators.Affine(*pair) for key, pair in cases[name]["affines"].items()}
        converted[name] = jqx.convert(f, plan, affines)
    run = jax.jit(lambda f, case: f(case["params"], case["x"]), static_argnums=0)
    results = {name: run(f, cases[name]) for name, f in converted.items()}
    for name, case in cases.items():
        # Sums of at most 64 products, in any order: each is a rounding of the largest result.
        # What is rounded to 8 bits after an exponential may become the next code.
        rounding = 2.0**-6 if name.startswith("attended") else 64 * 2.0**-23
        allowed = rounding * float(np.max(np.abs(case["out"])))
        np.testing.assert_allclose(results[name], case["out"], rtol=0, atol=allowed, err_msg=name)


def in_version_2(data):
    """What version 2 writes in place of JSON of version 1."""
    if isinstance(data, list):
        return [in_version_2(item) for item in data]
    if not isinstance(data, dict):
        return data
    names = {name: name.rpartition(".")[2] for name in data if name.startswith("jqx.")}
    fields = {RENAMED.get(n := names.get(key, key), n): in_version_2(data[key]) for key in data}
    return fields | ({"version": 2} if "version" in data else {})


def without(data, others):
    """Leaves out fields that `others` lacks: they were added since."""
    if isinstance(data, list):
        return [without(*pair) for pair in zip(data, others, strict=True)]
    if isinstance(data, dict):
        return {name: without(x, others[name]) for name, x in data.items() if name in others}
    return data


def test_version_2_names_classes_without_their_module(plans):
    for data in plans.values():
        plan = jqx.Plan.from_dict(data, OWN)
        again = plan.to_dict(OWN)
        assert "jqx." not in json.dumps({**again, "operations": None})
        assert without(again, in_version_2(data)) == in_version_2(data)
        assert jqx.Plan.from_dict(json.loads(json.dumps(again)), OWN) == plan


def test_names_of_classes_in_files_stay():
    assert sorted(serialize.CLASSES) == sorted(NAMES)


@pytest.mark.parametrize(
    "name",
    ["jqx.calibrators.Other", "jqx.tensor.AbsMax", "Hqo", "absmax", "jqx.calibrators.Entropy"],
)
def test_names_of_neither_version_are_refused(plans, name):
    text = json.dumps(plans["specs"]).replace("jqx.calibrators.AbsMax", name)
    with pytest.raises(ValueError, match=f"the value '{name}' at .* is unknown"):
        jqx.Plan.from_dict(json.loads(text), OWN)


def test_a_tree_of_version_1_is_written_in_version_2(tree, tmp_path):
    jqx.save(tmp_path / "again", tree, values=OWN)
    raw = (tmp_path / "again").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    text = header["__metadata__"]["jqx"]
    assert json.loads(text)["version"] == 2 and '"Codebook"' in text and "jqx." not in text
    again = jqx.load(tmp_path / "again", values=OWN)
    assert_same(again, tree)
