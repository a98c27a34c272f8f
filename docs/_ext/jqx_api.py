"""What the API reference needs of Sphinx: lists of names, signatures as written, labelled notes.

    .. names::

       quantize dequantize

gives a table of summaries, and the documentation of each name, of the current module.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import textwrap

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
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


class Names(Directive):
    """The documentation of the names that are listed, each by its kind."""

    has_content = True

    def run(self):
        module = self.state.document.settings.env.ref_context["py:module"]
        names = " ".join(self.content).split()
        lines = [".. autosummary::", "   :nosignatures:", "", *(f"   {n}" for n in names), ""]
        for name in names:
            value = getattr(importlib.import_module(module), name)
            kind = "autoclass" if isinstance(value, type) else "autofunction"
            options = ["   :members:"] if kind == "autoclass" else []
            lines += [f".. {kind}:: {name}", *options, ""]
        node = nodes.section()
        node.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=self.content.source(0)), node)
        return node.children


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    app.setup_extension("sphinx.ext.autosummary")
    app.add_directive("names", Names)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", as_fields, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", as_written)
    return {"parallel_read_safe": True}
