"""What a killed writer leaves is removed by the next writer of the same file; what others write
stays.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jqx
from jqx.interop import Lazy, write

from ..command_line.files import run

TREE = {"a.weight": np.ones((4, 32), np.float32)}
KIND = jax.ShapeDtypeStruct((4, 32), "f4")
LEFT = f"out.{'0' * 31}a.part"
GGUF = {"general.architecture": "x"}

WRITERS = {
    "save": lambda path: jqx.save(path, TREE),
    "save_leaves": lambda path: jqx.interop.save_leaves(path, {"a": KIND}, TREE.values()),
    "a folder": lambda path: write(path, TREE, "safetensors", config={}),
    "gguf": lambda path: write(path, TREE, "gguf", metadata=GGUF),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path, name):
    (tmp_path / LEFT).mkdir()
    (tmp_path / LEFT / "model.safetensors").write_bytes(b"half")
    (tmp_path / LEFT.replace("a.part", "b.part")).write_bytes(b"half")
    others = [f"other.{'0' * 32}.part", f"out.{'0' * 8}.part", "out.part", f"{LEFT}.old"]
    for other in others:
        (tmp_path / other).write_bytes(b"of others")
    (tmp_path / "out.0.part").symlink_to(tmp_path / others[0])
    WRITERS[name](tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "out.0.part", "out"])


def test_what_another_writer_of_the_file_writes_stays(tmp_path):
    def make():
        (own,) = tmp_path.glob("out.*.part")
        shutil.copy(own, tmp_path / LEFT)  # as if its writer were killed
        jqx.save(tmp_path / "out", {"a": np.zeros(4, "f4")})
        assert sorted(os.listdir(tmp_path)) == sorted(["out", own.name])
        return TREE["a.weight"]

    jqx.save(tmp_path / "out", {"a": Lazy(KIND, make)})
    assert jqx.load(tmp_path / "out")["a"].shape == (4, 32)
    assert os.listdir(tmp_path) == ["out"]


def test_the_command_line_removes_it_too(capsys, tmp_path):
    jqx.save(tmp_path / "in", TREE)
    (tmp_path / LEFT).write_bytes(b"half")
    assert run(capsys, "quantize", tmp_path / "in", tmp_path / "out", "--policy", "w8a16")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_killed(capsys, tmp_path, number):
    x = np.ones((512, 512), np.float32)
    tree = {f"{i}.weight": KIND.update(shape=x.shape) for i in range(64)}
    jqx.interop.save_leaves(tmp_path / "in", tree, (x for _ in tree))
    command = [sys.executable, "-m", "jqx", "quantize", tmp_path / "in", tmp_path / "out"]
    command += ["--policy", "w4a16"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not [*tmp_path.glob("out*")]:
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    assert len([*tmp_path.glob("out.*.part")]) == (number == signal.SIGKILL)
    assert run(capsys, *command[3:])[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
