"""What a command can do nothing with is an error that says what to do, and is left as it was."""

import os

import jax.numpy as jnp
import pytest

import jqx

from ..arrays import on_device
from ..tensor.tensors import spread_out
from .files import error_of, run, run_json, saved, torch_weights


@pytest.fixture
def quantized(capsys, tmp_path):
    """A file of which `--policy w8a16` has quantized all weights."""
    source = saved(tmp_path / "float", torch_weights())
    assert run(capsys, "quantize", source, tmp_path / "quantized", "--policy", "w8a16")[0] == 0
    return tmp_path / "quantized"


def commands(source, tmp_path):
    return {
        "quantize": ["quantize", source, tmp_path / "out"],
        "dry run": ["quantize", source, tmp_path / "out", "--dry-run"],
        "report": ["report", source],
        "plot": ["plot", source, "--out", tmp_path / "out"],
    }


@pytest.mark.parametrize("name", ["quantize", "dry run", "report", "plot"])
def test_a_policy_for_what_is_quantized_already_is_an_error(capsys, quantized, tmp_path, name):
    command = commands(quantized, tmp_path)[name]
    for flags in (["--policy", "w4a16"], ["--policy", "w8a16"], ["--rule", ".*mlp.weight=int4"]):
        error = error_of(capsys, *command, *flags)
        assert "is quantized already" in error and flags[1] in error
        assert "start from the float file" in error and "=float" in error
    assert not (tmp_path / "out").exists()


def test_a_rule_leaves_what_is_quantized_already(capsys, tmp_path):
    q = jqx.QTensor.quantize(on_device(spread_out((4, 8))), jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    source = saved(tmp_path / "in", {"a.weight": q, "b.weight": spread_out((4, 8))})
    command = ["quantize", source, tmp_path / "out", "--policy", "w8a16"]
    assert "'a.weight' is quantized already" in error_of(capsys, *command)
    code, done = run_json(capsys, *command, "--rule", "a.*=float")
    assert code == 0
    assert [t["why"] for t in done["tensors"]] == ["a.*=float", "policy w8a16"]
    code, found = run_json(capsys, "report", source, "--policy", "w8a16", "--rule", "a.*=float")
    assert code == 0 and len(found["weights"]) == 2
    rules = ["--rule", "a.*=float", "--rule", "c=int4"]
    assert "matches nothing" in error_of(capsys, *command, "--force", *rules)


def test_a_report_of_a_quantized_file_needs_no_policy(capsys, quantized):
    code, found = run_json(capsys, "report", quantized)
    assert code == 0 and len(found["weights"]) == 4


def test_a_layout_for_nothing_is_an_error(capsys, quantized, tmp_path):
    for command in commands(quantized, tmp_path).values():
        assert "`--layout` has no use" in error_of(capsys, *command, "--layout", "flax")


def test_inputs_that_are_no_files_are_refused_at_once(capsys, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    good = saved(tmp_path / "good", torch_weights())
    words = {"fifo": "a FIFO", "folder": "a folder", "empty": "a file of 0 bytes"}
    for name, word in (*words.items(), ("/dev/null", "a device"), ("/dev/zero", "a device")):
        path = tmp_path / name
        made = [*commands(path, tmp_path).values(), ["diff", path, good], ["diff", good, path]]
        for command in made:
            error = error_of(capsys, *command)
            assert word in error and f"'{path}'" in error
    assert not (tmp_path / "out").exists()


def test_outputs_that_are_no_files_are_refused_by_their_names(capsys, tmp_path):
    source = saved(tmp_path / "in", torch_weights())
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    words = {"fifo": "a FIFO", "folder": "a folder", "absent/x/out": "there is no folder"}
    words |= {"/dev/full": "a device", "in/out": "Not a directory"}
    for name, word in words.items():
        path = tmp_path / name
        for command in (
            ["quantize", source, path, "--policy", "w8a16"],
            ["plot", source, "--out", path],
        ):
            error = error_of(capsys, *command)
            assert word in error and f"'{path}'" in error and ".part" not in error
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "in"]


def test_a_picture_has_the_name_that_was_given(capsys, tmp_path):
    source = saved(tmp_path / "in", torch_weights())
    begins = {"picture": b"\x89PNG", "picture.svg": b"<?xml", "picture.pdf": b"%PDF"}
    for name, first in begins.items():
        assert run(capsys, "plot", source, "--out", tmp_path / name)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(first)
    assert "not supported" in error_of(capsys, "plot", source, "--out", tmp_path / "picture.what")
    assert not (tmp_path / "picture.what").exists()
