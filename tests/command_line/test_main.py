"""`python -m jqx` as a program: exit codes, streams, help."""

import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jqx
from jqx._src.command_line.main import main

from .files import error_of, saved


def program(*argv, **fields):
    return subprocess.run(
        [sys.executable, "-m", "jqx", *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        **fields,
    )


def test_a_session(tmp_path):
    a = saved(tmp_path / "a.safetensors", {"w.weight": jnp.eye(4) * 127, "b": jnp.zeros(3)})
    done = program("quantize", a, "q.safetensors", "--policy", "w8a16", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("q.safetensors: 1 of 2 tensors quantized; 76 bytes become 44")
    assert main(["diff", str(a), str(a)]) == 0
    done = program("diff", a, tmp_path / "q.safetensors")
    assert done.returncode == 1 and "exact" in done.stdout


def test_errors_go_to_standard_error_without_a_traceback(tmp_path):
    done = program("report", tmp_path / "missing", "--policy", "w8a16")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("count", [1, 300])  # one table that a buffer holds, one that it does not
def test_a_reader_that_leaves_early_is_no_error(tmp_path, count):
    a = saved(tmp_path / "a", {f"{i}.weight": jnp.ones((2, 2)) for i in range(count)})
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jqx", "quantize", a, "b", "--policy", "w8a16", "--dry-run"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "command", [[], *([name] for name in "quantize convert verify report diff plot".split())]
)
def test_help_says_what_there_is(capsys, command):
    with pytest.raises(SystemExit) as info:
        main([*command, "--help"])
    assert info.value.code == 0
    out = capsys.readouterr().out
    assert "usage: python -m jqx" in out
    assert ("Exit codes: " in out) == (command in ([], ["diff"], ["verify"]))
    assert ("int4:group=32" in out) == (command[:1] not in ([], ["diff"], ["verify"]))


def test_the_version(capsys):
    with pytest.raises(SystemExit) as info:
        main(["--version"])
    assert info.value.code == 0
    assert capsys.readouterr().out == f"jqx {jqx.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["what"], ["diff"], ["diff", "a"], ["plot", "a"]])
def test_wrong_usage_is_one_line(capsys, argv):
    assert "--help" in error_of(capsys, *argv)
