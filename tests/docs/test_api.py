"""The API reference has every public name, once. Names of others in `jqx.extend` are with those."""

import importlib
import inspect
import re
from collections import Counter

import pytest

import jqx

from ..test_architecture import PUBLIC
from .pages import DOCS

MODULE = re.compile(r"^\.\. module:: (jqx\S*)$", re.M)
LISTED = re.compile(r"^\.\. names::\n\n((?: {3}.*\n)+)", re.M)
WRITTEN = re.compile(r"^\.\. py:(?:data|function):: (\w+)", re.M)
TYPED = re.compile(r"^\.\. py:data:: (\w+)\n   :type: ([\w.]+)$", re.M)


def modules(text):
    """The modules that a page documents, each with the text about it."""
    found = MODULE.split(text)
    return dict(zip(found[1::2], found[2::2], strict=True))


TEXTS = {}
for page in sorted((DOCS / "api").glob("*.rst")):
    TEXTS.update(modules(page.read_text()))


def test_every_module_has_its_place():
    assert set(TEXTS) == {"jqx", *(f"jqx.{name}" for name in PUBLIC if name != "jqx")}


@pytest.mark.parametrize("module", PUBLIC)
def test_a_page_has_each_public_name_once(module):
    text = TEXTS["jqx" if module == "jqx" else f"jqx.{module}"] + "\n"
    found = " ".join(LISTED.findall(text)).split() + WRITTEN.findall(text)
    elsewhere = [name for name in PUBLIC if "." not in name] if module == "jqx" else ["plots"]
    if module == "extend":
        others = [jqx, jqx.calibrators, jqx.gradients, jqx.numerics, jqx.observers]
        elsewhere = [name for name in dir(jqx.extend) if any(hasattr(x, name) for x in others)]
    assert Counter(found) == Counter(set(PUBLIC[module].split()) - set(elsewhere))


@pytest.mark.parametrize("module", PUBLIC)
def test_a_value_is_of_the_type_that_a_page_says(module):
    path = "jqx" if module == "jqx" else f"jqx.{module}"
    for name, kind in TYPED.findall(TEXTS[path]):
        value = getattr(importlib.import_module(path), name)
        kinds = {cls.__name__ for cls in type(value).__mro__} - {"object"}
        assert inspect.isclass(value) or kind in kinds, name
