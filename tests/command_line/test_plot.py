"""`plot`: what is drawn is what was asked for; the picture is one that matplotlib wrote."""

import importlib.util
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.diagnostics.report import measure
from jqx.diagnostics import plots

from ..arrays import on_device
from .files import error_of, run, run_json, saved, torch_weights

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def source(tmp_path):
    return saved(tmp_path / "in.safetensors", torch_weights())


@pytest.fixture
def picture(tmp_path):
    return tmp_path / "picture.png"


@pytest.fixture
def drawn(monkeypatch):
    """What the functions that draw are called with."""
    calls = []

    def watched(name):
        original = getattr(plots, name)

        def draw(*args, **fields):
            read = [
                dict(x) if isinstance(x, Mapping) else x for x in args
            ]  # while the file is open
            calls.append((name, read, fields))
            return original(*args, **fields)

        monkeypatch.setattr(plots, name, draw)

    for name in ("histogram", "ranges", "sqnr_bars"):
        watched(name)
    return calls


def test_ranges_are_of_every_float_tensor(capsys, source, picture, drawn):
    code, found = run_json(capsys, "plot", source, "--out", picture)
    floats = [name for name in torch_weights() if name != "position_ids"]
    assert code == 0 and found == {"written": str(picture), "kind": "ranges", "tensors": floats}
    assert picture.read_bytes().startswith(PNG)
    ((name, (arrays,), _),) = drawn
    assert name == "ranges" and list(arrays) == floats
    for name in floats:
        np.testing.assert_array_equal(np.asarray(arrays[name]), torch_weights()[name])


def test_bars_are_of_what_would_be_quantized(capsys, source, picture, drawn):
    flags = ["--kind", "sqnr", "--policy", "w8a16", "--tensor", "layers.*"]
    assert run(capsys, "plot", source, "--out", picture, *flags)[0] == 0
    ((name, (report,), _),) = drawn
    names = ["layers.0.mlp.weight", "layers.1.conv.weight"]
    assert name == "sqnr_bars" and [w.path for w in report.weights] == names
    x = on_device(torch_weights()[names[0]])
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    assert report.weights[0] == measure(x, q, names[0])


@pytest.mark.parametrize("first", [False, True])
def test_a_histogram_shows_the_grid_of_one_tensor(capsys, source, picture, drawn, tmp_path, first):
    """Of a float file with a policy, and of the file that `quantize` writes with it."""
    flags = ["--policy", "w4a16"]
    if first:
        assert run(capsys, "quantize", source, tmp_path / "q", *flags)[0] == 0
        source, flags = tmp_path / "q", []
    command = ["plot", source, "--out", picture, "--kind", "histogram", "--tensor", "embed.*"]
    code, out, _ = run(capsys, *command, *flags)
    assert (code, out) == (0, f"{picture}: histogram of 1 tensors\n")
    ((name, (x, q), fields),) = drawn
    assert name == "histogram"
    assert fields == {"title": "embed.weight, int4 per_axis(0)"}
    real = np.asarray(q.dequantize())
    assert np.array_equal(x, real) == first
    (rule,) = jqx.presets.w4a16().rules
    blocks = rule.weight.resolve(rank=2, kept=(0,))
    x = on_device(torch_weights()["embed.weight"])
    np.testing.assert_array_equal(real, jqx.QTensor.quantize(x, blocks).dequantize())


ERRORS = {
    "two for a histogram": (["--kind", "histogram", "--policy", "w8a16"], "shows one quantized"),
    "none for a histogram": (["--kind", "histogram"], "shows one quantized tensor"),
    "no noise": (["--kind", "sqnr"], "there is no noise"),
    "nothing": (["--tensor", "x"], "there is nothing to draw"),
    "integers": (["--tensor", "position_ids"], "there is nothing to draw"),
    "a regex": (["--tensor", "("], "is not a valid regular expression"),
    "a kind": (["--kind", "pie"], "invalid choice: 'pie'"),
    "a rule": (["--rule", "x=int8"], "matches no"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_nothing_is_drawn(capsys, source, picture, name):
    flags, problem = ERRORS[name]
    assert problem in error_of(capsys, "plot", source, "--out", picture, *flags)
    assert not picture.exists()


def test_a_format_of_pictures_that_there_is_not(capsys, source, tmp_path):
    assert "is not supported" in error_of(capsys, "plot", source, "--out", tmp_path / "x.abc")


def test_matplotlib_is_asked_for(capsys, source, picture, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert 'pip install "jqx[examples]"' in error_of(capsys, "plot", source, "--out", picture)
