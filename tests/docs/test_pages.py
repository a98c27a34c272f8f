"""Every code block of the documentation runs and prints what the page says."""

import contextlib
import importlib.util
import re

import jax
import pytest

from .pages import DOCS, PAGES, ROOT, blocks, needs, run

FAST = ("index", "start")
"""Pages of the default run: a reader's first ones."""

KINDS = ("python", "text", "console", "toml", "yaml", "json", "cmake")


def name_of(page):
    return page.relative_to(DOCS).with_suffix("").as_posix()


@contextlib.contextmanager
def as_users():
    """Leaves out the strict promotion of the other tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


WITH_CODE = [page for page in PAGES if any(block.kind == "python" for block in blocks(page))]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=name_of(page), marks=[] if name_of(page) in FAST else [pytest.mark.slow]
        )
        for page in WITH_CODE
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    for module in needs(page):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{name_of(page)} needs {module}")
    monkeypatch.chdir(tmp_path)
    with as_users():
        assert run(page)


def test_each_snippet_of_the_readme_runs_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with as_users():
        assert run(ROOT / "README.md", alone=True) == 5


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_pages_have_blocks_of_known_kinds():
    """A block of Python under another name would not run."""
    kinds = {(name_of(page), block.kind) for page in PAGES for block in blocks(page)}
    assert [
        (page, kind)
        for page, kind in sorted(kinds)
        if not kind.startswith("{") and kind not in KINDS
    ] == []


def test_links_between_files_lead_somewhere():
    """Sphinx checks those between pages; these are of files that it does not read."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
        links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
        assert [link for link in links if not (page.parent / link).exists()] == []
