"""The API reference has every public name, once, and the classes of what functions return."""

import importlib
import inspect
import pkgutil
import re
from collections import Counter

import pytest

from jqx._src.ptq.quantized import Quantize
from jqx._src.transforms.stats import Stats

from ..test_architecture import PUBLIC, public_objects
from .pages import DOCS

MODULE = re.compile(r"^\.\. module:: (jqx\S*)$", re.M)
LISTED = re.compile(r"^\.\. names::\n\n((?: {3}.*\n)+)", re.M)
WRITTEN = re.compile(r"^\.\. py:(?:data|function):: (\w+)", re.M)
RESULTS = re.compile(r"^\.\. results:: (\S+)\n\n((?: {3}.*\n)+)", re.M)
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
    assert Counter(found) == Counter(set(PUBLIC[module].split()) - set(elsewhere))


@pytest.mark.parametrize("module", PUBLIC)
def test_a_value_is_of_the_type_that_a_page_says(module):
    path = "jqx" if module == "jqx" else f"jqx.{module}"
    for name, kind in TYPED.findall(TEXTS[path]):
        value = getattr(importlib.import_module(path), name)
        kinds = {cls.__name__ for cls in type(value).__mro__} - {"object"}
        assert inspect.isclass(value) or kind in kinds, name


def test_what_a_public_function_returns_is_documented():
    results = {
        pkgutil.resolve_name(f"jqx._src.{module}:{name}")
        for text in TEXTS.values()
        for module, names in RESULTS.findall(text + "\n")
        for name in names.split()
    }
    public = {value for _, _, value in public_objects() if inspect.isclass(value)}
    assert not results & public
    returned = {
        f.__name__: inspect.signature(f).return_annotation
        for module, _, f in public_objects()
        if module in ("jqx", "algorithms", "diagnostics", "interop") and inspect.isfunction(f)
    }
    documented = {*results, *public, Stats, Quantize}  # the last two where they are used
    assert {
        name: kind
        for name, kind in returned.items()
        if inspect.isclass(kind) and kind.__module__.startswith("jqx.") and kind not in documented
    } == {}
