"""Types in the project of a user: pyright and mypy, both strict, accept what is right there
(`tests/typing/user_project`), and report each line of `mistakes.py`; what they accept runs.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import jqx

ROOT = pathlib.Path(jqx.__file__).parents[1]
PROJECT = pathlib.Path(__file__).parent / "typing" / "user_project"
RUN = sorted(path.name for path in PROJECT.glob("*.py") if path.stem != "mistakes")

pytestmark = pytest.mark.slow


def run(*command):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=PROJECT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def needs(checker):
    missing = importlib.util.find_spec(checker) is None
    return pytest.mark.skipif(missing, reason=f"{checker} is not installed: pip install .[dev]")


@needs("pyright")
def test_pyright_accepts_the_project():
    run("-m", "pyright", "--pythonpath", sys.executable, ".")


@needs("mypy")
def test_mypy_accepts_the_project(tmp_path):
    run("-m", "mypy", "--cache-dir", str(tmp_path), ".")


@needs("pyright")
def test_public_types_are_known():
    run("-m", "pyright", "--pythonpath", sys.executable, "--ignoreexternal", "--verifytypes", "jqx")


@pytest.mark.parametrize("name", RUN)
def test_what_is_accepted_runs(name):
    run(name)
