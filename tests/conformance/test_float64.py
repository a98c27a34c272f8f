"""The float64 cases, in a process of their own: x64 is a switch of the whole process."""

import os
import pathlib
import subprocess
import sys

import pytest

from .forms import X64

FOLDER = pathlib.Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(X64, reason="this is the process with x64 on")
@pytest.mark.parametrize("file", ["test_ngraph.py", "test_openvino.py"])
def test_float64_cases_hold_in_a_process_with_x64(file):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(FOLDER / file), "-n", "0", "-q", "-m", ""],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and " skipped" not in done.stdout
