"""What the API reference needs of Sphinx: lists of names, signatures as written, labelled notes.

    .. names::

       quantize dequantize

gives a table of summaries, and the documentation of each name, of the current module.

    .. results:: diagnostics.report

       Report

documents classes that public functions return, and that no public module lists: a program uses
what they hold, and has no need of their names.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import textwrap
import types

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.domains.python import PyObject
from sphinx.util.nodes import nested_parse_with_titles

NOTES = (
    "Bytes",
    "Float sums round",
    "Format",
    "Gradient",
    "Integers",
    "NaN and infinities",
    "NaN, infinity",
    "NaN inputs",
    "Rounding",
    "Source",
    "Sources",
    "State",
    "Subnormals",
)
"""Labels of notes in docstrings, which stand beside Args and Returns: `Gradient: none.`"""

NOTE = re.compile(rf"^({'|'.join(NOTES)}): ")


def as_fields(app, what, name, obj, options, lines):
    """Makes fields of labelled notes, as Args and Returns become: their lines hang together."""
    inside = False
    for index, line in enumerate(lines):
        label = NOTE.match(line)
        inside = bool(label) or (inside and bool(line.strip()))
        if line == "Returns:":  # Napoleon takes a sentence with a colon for a type
            lines[index] = ":returns:"
        elif label:
            lines[index] = NOTE.sub(r":\1: ", line)
        elif inside:
            lines[index] = f"  {line.lstrip()}"


def as_written(app, what, name, obj, options, signature, returns):
    """Returns the signature of a function or dataclass as its source has it: with its aliases."""
    if isinstance(obj, type):
        return of_class(obj)
    try:
        node = parsed(inspect.unwrap(getattr(obj, "__func__", obj)))
    except (TypeError, OSError, SyntaxError):
        return None
    if not isinstance(node, ast.FunctionDef):
        return None
    without_self(node, what == "method")
    return f"({ast.unparse(node.args)})", ast.unparse(node.returns) if node.returns else None


def of_class(cls):
    if issubclass(cls, enum.Enum) or getattr(cls, "_is_protocol", False):
        return "", None
    if "__init__" in vars(cls) and not dataclasses.is_dataclass(cls):
        node = parsed(cls.__init__)
        without_self(node, True)
        return f"({ast.unparse(node.args)})", None
    if not dataclasses.is_dataclass(cls):
        return None
    written, parts, star = annotations_of(cls), [], False
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.kw_only and not star:
            parts, star = [*parts, "*"], True
        annotation, default = written.get(field.name, ("Any", ""))
        parts.append(f"{field.name}: {annotation}{default}")
    return f"({', '.join(parts)})", None


def annotations_of(cls):
    """Returns, of each field of a dataclass, its annotation and its default as they are written."""
    found = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        for node in parsed(base).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = ast.unparse(node.annotation), default_of(node.value)
    return found


def default_of(value):
    if not isinstance(value, ast.Call) or ast.unparse(value.func).split(".")[-1] != "field":
        return "" if value is None else f" = {ast.unparse(value)}"
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    if "default_factory" in given:
        return f" = {given['default_factory']}()"
    return f" = {given['default']}" if "default" in given else ""


def parsed(obj):
    return ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]


def without_self(node, is_method):
    static = any(ast.unparse(name) == "staticmethod" for name in node.decorator_list)
    if is_method and not static and (first := node.args.posonlyargs or node.args.args):
        del first[0]


class Documented(Directive):
    """A directive whose content is names of a module."""

    has_content = True

    def names(self):
        return " ".join(self.content).split()

    def parsed(self, lines):
        """Returns the nodes of lines of reStructuredText."""
        node = nodes.section()
        node.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=self.content.source(0)), node)
        return node


class Names(Documented):
    """The documentation of the names that are listed, each by its kind."""

    def run(self):
        module = self.state.document.settings.env.ref_context["py:module"]
        names = self.names()
        lines = [".. autosummary::", "   :nosignatures:", "", *(f"   {n}" for n in names), ""]
        for name in names:
            value = getattr(importlib.import_module(module), name)
            kind = "autoclass" if isinstance(value, type) else "autofunction"
            options = ["   :members:"] if kind == "autoclass" else []
            lines += [f".. {kind}:: {name}", *options, ""]
        return self.parsed(lines).children


class Results(Documented):
    """The documentation of classes of a private module, without the name of the module."""

    required_arguments = 1

    def run(self):
        module = f"jqx._src.{self.arguments[0]}"
        lines = [
            line
            for name in self.names()
            for line in (f".. autoclass:: {module}.{name}", "   :members:", "")
        ]
        node = self.parsed(lines)
        for prefix in list(node.findall(addnodes.desc_addname)):
            prefix.parent.remove(prefix)
        return node.children


class AllNames(Documented):
    """All public names of the modules that are listed, each a link."""

    def run(self):
        lines = []
        for module in self.names():
            owner = importlib.import_module(module)
            public = [x for x in dir(owner) if not x.startswith("_")]
            names = [x for x in public if not isinstance(getattr(owner, x), types.ModuleType)]
            links = " ".join(f":py:obj:`~{module}.{name}`" for name in names)
            lines += [f"``{module}``", f"   {links}", ""]
        return self.parsed(lines).children


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    app.setup_extension("sphinx.ext.autosummary")
    app.add_directive("names", Names)
    app.add_directive("results", Results)
    app.add_directive("all-names", AllNames)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", as_fields, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", as_written)
    return {"parallel_read_safe": True}
