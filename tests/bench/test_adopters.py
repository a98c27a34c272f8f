"""The examples with packages of others run to their end, where they assert their claims."""

import importlib.util
import re
import subprocess
import sys

import pytest

from ..environment import ROOT, cached

FOLDER = ROOT / "examples" / "adopters"
EXAMPLES = sorted(FOLDER.glob("*.py"))
MODULES: dict[str, tuple[str, ...]] = {
    "maxtext_decoder": ("maxtext",),
    "tokamax_experts": ("tokamax",),
}
"""What each imports that the extra `examples` does not install."""


@pytest.mark.bench
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_with_another_package_runs(path, tmp_path):
    for module in MODULES[path.stem]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{path.stem} needs {module}")
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=cached(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    for word in ("sites", "bytes", "cosine"):
        assert re.search(rf"\b{word}\b", done.stdout), done.stdout


def test_the_documentation_lists_every_example():
    text = (ROOT / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if f"adopters/{path.name}`" not in text] == []
