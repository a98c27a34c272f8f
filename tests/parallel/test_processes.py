"""Two processes of four devices each, over the loopback address."""

import pathlib
import socket
import subprocess
import sys

import pytest

from ..environment import unoptimized


@pytest.mark.slow
def test_two_processes_have_the_codes_and_scales_of_one_device():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = pathlib.Path(__file__).parent / "processes.py"
    options = {"env": unoptimized() | {"JAX_PLATFORMS": "cpu"}, "stdout": subprocess.PIPE}
    command = [sys.executable, str(program)]
    both = [
        subprocess.Popen(
            [*command, str(i), "2", str(port)], stderr=subprocess.STDOUT, text=True, **options
        )
        for i in range(2)
    ]
    told = [process.communicate(timeout=600)[0] for process in both]
    for process, text in zip(both, told, strict=True):
        assert process.returncode == 0 and text.endswith("done\n"), text
