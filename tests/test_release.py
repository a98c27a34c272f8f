"""What a release consists of: versions that agree, files for GitHub that are what it reads, and the
metadata of packages. `.ci/package` builds these and tries them.
"""

import ast
import pathlib
import re
import tomllib

import pytest
import yaml

import jqx

ROOT = pathlib.Path(__file__).parent.parent
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU = tomllib.loads((ROOT / "cpu" / "pyproject.toml").read_text())["project"]


def parsed(path):
    return yaml.safe_load(path.read_text())


def test_versions_agree():
    """Both packages take theirs from one line of `__init__.py`; what repeats it must agree."""
    assert PROJECT["dynamic"] == CPU["dynamic"] == ["version"]
    assert f'__version__ = "{jqx.__version__}"' in (ROOT / "cpu/jqx_cpu/__init__.py").read_text()
    assert parsed(ROOT / "CITATION.cff")["version"] == jqx.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == jqx.__version__


def test_metadata_of_both_packages_agree():
    for name in ("requires-python", "license", "authors", "license-files"):
        assert PROJECT[name] == CPU[name], name
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "cpu" / "LICENSE").read_bytes()
    (jax,) = [x for x in PROJECT["dependencies"] if x.startswith("jax>")]
    assert CPU["dependencies"] == [jax]


def test_the_citation_has_what_its_format_wants():
    citation = parsed(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] and citation["message"] and citation["license"] == PROJECT["license"]
    assert [x["name"] for x in citation["authors"]] == [x["name"] for x in PROJECT["authors"]]


def test_the_workflow_runs_the_check_on_the_oldest_and_the_newest():
    job = parsed(GITHUB / "workflows" / "ci.yml")["jobs"]["check"]
    oldest, newest = job["strategy"]["matrix"]["include"]
    assert PROJECT["requires-python"] == f">={oldest['python']}"
    assert f"jax>={oldest['jax']}" in PROJECT["dependencies"]
    pythons = [x.rsplit(" ", 1)[1] for x in PROJECT["classifiers"] if ":: 3." in x]
    assert [pythons[0], pythons[-1]] == [oldest["python"], newest["python"]]
    assert newest["jax"] == "newest"
    (step,) = [step for step in job["steps"] if "run" in step]
    script = (ROOT / step["run"]).read_text()
    assert all(f"${{{name}:-" in script for name in step["env"])
    assert f"${{JQX_PYTHON:-python{oldest['python']}}}" in script
    assert f"${{JQX_JAX:-{oldest['jax']}}}" in script


def test_workflows_run_scripts_that_are_there():
    jobs = [
        job
        for path in sorted((GITHUB / "workflows").iterdir())
        for job in parsed(path)["jobs"].values()
    ]
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    scripts = {x for text in commands for x in re.findall(r"\.ci/[\w.]+", text)}
    assert scripts == {".ci/run", ".ci/package", ".ci/smoke.py"}
    assert all((ROOT / script).exists() for script in scripts)


def test_every_public_module_is_stable_or_experimental():
    text = (ROOT / "docs" / "versions.md").read_text()
    table = text.partition("## Stable and experimental")[2].partition("##")[0]
    modules = {path.stem for path in (ROOT / "jqx").glob("*.py") if path.stem[0] != "_"}
    modules |= {"diagnostics"}  # a folder, with `plots`
    assert {*re.findall(r"`jqx\.(\w+)`", table)} == modules


KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


@pytest.mark.parametrize("name", ["bug", "feature", "wrong-numbers"])
def test_issue_forms_are_what_github_reads(name):
    form = parsed(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= {*form}
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in form["body"]} <= KINDS
    assert all(part["attributes"]["label"] for part in asked)
    assert len({part["id"] for part in asked}) == len(asked)
    if name != "feature":
        required = {part["id"] for part in asked if part.get("validations", {}).get("required")}
        assert {"program", "versions"} <= required
        for part in asked:  # commands that users are asked to run are Python
            for code in re.findall(r'python -c "(.*)"', part["attributes"].get("description", "")):
                ast.parse(code)
