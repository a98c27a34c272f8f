"""`report`: planted faults are found, and totals are those of the file that is written."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.diagnostics.report import measure

from ..arrays import on_device
from ..tensor.tensors import spread_out
from .files import error_of, run, run_json, saved, torch_weights


@pytest.fixture
def source(tmp_path):
    return saved(tmp_path / "in.safetensors", torch_weights())


def finite(error):
    """The fields of a measure as JSON has them."""
    fields = dataclasses.asdict(error)
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()
    }


def test_each_weight_is_measured_as_it_would_be_written(capsys, source):
    code, found = run_json(capsys, "report", source, "--rule", ".*mlp.weight=int4:block=8")
    x = on_device(torch_weights()["layers.0.mlp.weight"])
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int4, jqx.per_block({0: 1, 1: 8})), pack=-1)
    assert code == 0
    assert found["weights"] == [finite(measure(x, q, "layers.0.mlp.weight"))]
    assert found["bytes_before"] == sum(x.nbytes for x in torch_weights().values())
    assert found["bytes_before"] - found["bytes_after"] == x.nbytes - q.nbytes


def test_totals_are_those_that_quantize_writes(capsys, source, tmp_path):
    flags = ["--policy", "w4a16", "--rule", "lm_head.*=float"]
    _, found = run_json(capsys, "report", source, *flags)
    _, written = run_json(capsys, "quantize", source, tmp_path / "out", *flags)
    assert found["bytes_before"] == written["bytes_before"]
    assert found["bytes_after"] == written["bytes_after"]


def test_a_dead_row_and_an_outlier_are_seen_in_the_table(capsys, tmp_path):
    healthy = np.sign(spread_out((8, 64)))  # exact in int4: scales 1 / 7
    dead, outlier = healthy.copy(), healthy.copy()
    dead[3], outlier[5, 7] = 0, 100.0  # the row's others fall to zero
    weights = {"a.weight": healthy, "b.weight": dead, "c.weight": outlier}
    source = saved(tmp_path / "in", weights)
    code, text, _ = run(capsys, "report", source, "--rule", ".*=int4")
    rows = {line.split()[0]: line.split() for line in text.splitlines()[2:]}
    assert code == 0 and "3 of 3 tensors quantized" in text
    assert rows["b.weight"][-2] == "1" and rows["a.weight"][-2] == rows["c.weight"][-2] == "-"
    _, found = run_json(capsys, "report", source, "--rule", ".*=int4")
    a, b, c = (weight["sqnr"] for weight in found["weights"])
    lost = 10 * math.log10((8 * 64 - 1 + 100.0**2) / 63)
    assert c == lost and (a is None or a > 100) and (b is None or b > 100)


def test_a_quantized_file_reports_what_is_known_of_it(capsys, source, tmp_path):
    out = tmp_path / "out"
    assert run(capsys, "quantize", source, out, "--policy", "w8a16")[0] == 0
    _, before = run_json(capsys, "report", source, "--policy", "w8a16")
    code, after = run_json(capsys, "report", out)
    assert code == 0
    for was, is_ in zip(before["weights"], after["weights"], strict=True):
        known = ("path", "scheme", "bits", "bytes_after", "dead")
        assert [was[key] for key in known] == [is_[key] for key in known]
        assert is_["sqnr"] is None and is_["clipped"] is None
    assert "exact" not in run(capsys, "report", out)[1]


def test_nothing_to_report_is_an_error(capsys, source):
    assert "there is nothing to report" in error_of(capsys, "report", source)
    assert "No such file" in error_of(capsys, "report", str(source) + "x", "--policy", "w8a16")
