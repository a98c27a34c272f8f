"""Here jqx-cpu is what it is: where it is not installed, these tests are skipped."""

import importlib.util

import pytest

from jqx._src import package_cpu


@pytest.fixture(autouse=True)
def _with_the_package_of_kernels(monkeypatch):
    is_there = importlib.util.find_spec(package_cpu.NAME) is not None
    monkeypatch.setattr(package_cpu, "is_installed", lambda: is_there)
