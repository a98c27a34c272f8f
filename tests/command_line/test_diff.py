"""`diff`: equal means equal bits; numbers are those of real values."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import on_device
from ..tensor.tensors import spec, spread_out
from .files import error_of, run, run_json, saved, torch_weights


@pytest.fixture
def files(tmp_path):
    """Saves two trees and returns their paths."""

    def save(a, b):
        return saved(tmp_path / "a", a), saved(tmp_path / "b", b)

    return save


def only(capsys, files, a, b):
    """The one difference of two trees."""
    code, found = run_json(capsys, "diff", *files(a, b))
    assert code == 1 and not found["equal"]
    (difference,) = found["differences"]
    return difference


def test_equal_files_are_equal(capsys, files):
    tree = {**torch_weights(), "q": jqx.QTensor.quantize(jnp.ones((2, 2)), spec(jnp.int8))}
    tree["nan"] = np.array([np.nan, np.inf, -0.0], np.float32)
    code, text, _ = run(capsys, "diff", *files(tree, tree))
    assert (code, text) == (0, "9 tensors equal\n")
    assert run_json(capsys, "diff", *files(tree, tree)) == (
        0,
        {"equal": True, "same": 9, "differences": []},
    )


def test_numbers_of_a_change_that_is_known(capsys, files):
    x = np.array([3.0, 4.0, 0.0], np.float32)
    found = only(capsys, files, {"x": x, "y": x}, {"x": x + np.float32([0, 0, -0.5]), "y": x})
    assert found == {
        **{"path": "x", "a": "float32[3]", "b": "float32[3]", "what": ["values"]},
        **{"max_abs": 0.5, "relative": 0.1, "sqnr": -20 * math.log10(0.1)},
    }


def test_long_tensors_are_compared_to_their_ends(capsys, files):
    x = np.zeros((3, 1 << 20), np.float32)
    x[0, 0] = 1.0
    y = x.copy()
    y[2, -1] = 2.0
    found = only(capsys, files, {"x": x}, {"x": y})
    assert (found["max_abs"], found["relative"]) == (2.0, 2.0)


X = spread_out((4, 8))
Q = jqx.QTensor.quantize(on_device(X), spec(jnp.int4, jqx.per_axis(0)))
REAL = np.asarray(Q.dequantize())
KINDS = {
    "shape": (X, X.reshape(8, 4), ["shape"], None),
    "rank": (X, X[None], ["shape"], None),
    "dtype": (np.float32([1, 2]), on_device([1, 2], jnp.bfloat16), ["dtype"], 0.0),
    "dtype and values": (np.float32([1, 2]), np.int32([1, 3]), ["dtype", "values"], 1.0),
    "codes and what they stand for": (REAL, Q, ["scheme"], 0.0),
    "codes and what they were made of": (X, Q, ["scheme", "values"], np.abs(X - REAL).max()),
    "layout": (Q, Q.pack(), ["scheme"], 0.0),
    "sign of zero": (np.float32([0.0]), np.float32([-0.0]), ["values"], 0.0),
    "nan": (np.float32([0.0, 1]), np.float32([np.nan, 1]), ["values"], None),
    "infinity": (np.float32([np.inf, 1]), np.float32([np.inf, 2]), ["values"], 1.0),
    "truths": (np.array([True, False]), np.array([True, True]), ["values"], 1.0),
    "complex": (np.complex64([1j]), np.complex64([2j]), ["values"], 1.0),
    "long integers": (np.int64([2**60]), np.int64([2**60 + 1]), ["values"], 0.0),
    "nothing": (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.int8), ["dtype"], 0.0),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_differs_is_named(capsys, files, name):
    a, b, what, largest = KINDS[name]
    found = only(capsys, files, {"x": a}, {"x": b})
    assert (found["what"], found["max_abs"]) == (what, largest)


def test_tensors_in_one_file_alone_are_named(capsys, files):
    a, b = files({"x": X, "gone": X}, {"x": X, "new": Q})
    code, found = run_json(capsys, "diff", a, b)
    assert code == 1 and found["same"] == 1
    assert [(d["path"], d["a"], d["b"], d["what"]) for d in found["differences"]] == [
        ("gone", "float32[4, 8]", None, ["presence"]),
        ("new", None, "int4 per_axis(0), float32[4, 8]", ["presence"]),
    ]
    assert "1 tensors equal, 2 different" in run(capsys, "diff", a, b)[1]


def test_sqnr_of_a_quantized_file_is_that_of_its_report(capsys, tmp_path):
    source = saved(tmp_path / "in", {"weight": spread_out((64, 64))})
    run(capsys, "quantize", source, tmp_path / "out", "--policy", "w4a16")
    _, report = run_json(capsys, "report", source, "--policy", "w4a16")
    _, diff = run_json(capsys, "diff", source, tmp_path / "out")
    want = report["weights"][0]["sqnr"]
    # sums in another order: each of 4096 terms, in float64
    assert abs(diff["differences"][0]["sqnr"] - want) < 20 * 4096 * 2.0**-53 * 100


def test_a_wrong_file_is_two_and_one_line(capsys, tmp_path):
    saved(tmp_path / "a", {"x": X})
    assert "No such file" in error_of(capsys, "diff", tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-1])
    assert "is truncated" in error_of(capsys, "diff", tmp_path / "a", tmp_path / "b")
