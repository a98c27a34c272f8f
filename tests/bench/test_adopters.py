"""The examples with packages of others run to their end, where they assert their claims, and the
program of AQT on its page does what that of jqx does.
"""

import importlib.util
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from ..docs.pages import DOCS, blocks
from ..environment import ROOT, cached

FOLDER = ROOT / "examples" / "adopters"
EXAMPLES = sorted(FOLDER.glob("*.py"))
MODULES: dict[str, tuple[str, ...]] = {
    "keras_codes": (),
    "tunix_qlora": ("qwix", "tunix"),
    "gemma_int4": ("gemma", "kauldron", "orbax"),
    "levanter_decoder": ("levanter", "haliax"),
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


@pytest.mark.bench
def test_the_program_of_aqt_serves_and_trains_what_that_of_jqx_does():
    pytest.importorskip("aqt.jax.v2")
    page = [block.text for block in blocks(DOCS / "migration" / "aqt.md")]
    before, after = {}, {}
    for part, namespace in {"from aqt": before, "import jqx": after}.items():
        exec(next(text for text in page if part in text), namespace)
    assert before["frozen"]["aqt"]["AqtDotGeneral_0"]["qrhs"]["value"].dtype == np.int8
    assert "kernel" in before["frozen"]["params"] and "kernel" not in after["converted"]["params"]
    for name in ("y", "gradients"):
        pairs = zip(jax.tree.leaves(before[name]), jax.tree.leaves(after[name]), strict=True)
        for old, new in pairs:
            assert np.linalg.norm(old - new) < 0.02 * np.linalg.norm(old)
