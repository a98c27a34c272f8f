"""Messages name the function that was called by its public name, with its folder."""

import ast
import dataclasses
import functools
import pathlib
import pkgutil
import re
import warnings

import jqx
import jqx.linen
import jqx.nnx

ROOT = pathlib.Path(jqx.__file__).parent / "_src"
CALLS = ("message", "fail", "called", "require", "check_instance", "check_fields")
OTHERS = {
    "learn_scales": "of jqx.linen or jqx.nnx",
    "bind": "a method of what jqx.load returns",
    "jit": "JAX's",
    "jax.jit": "JAX's",
    "jax.export": "JAX's",
}
"""Names that are no attributes of jqx."""


def names_in(path):
    """The names of functions that calls in a file have as constants, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CALLS:
            first = node.args[0] if node.args and "require" not in node.func.id else None
            named = next((x.value for x in node.keywords if x.arg == "function"), first)
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                yield named.value.partition("(")[0], node.lineno


def is_public(name, folder):
    """Whether a name is an attribute of jqx, and no other one that a folder has too."""
    try:
        with warnings.catch_warnings(action="error"):
            functools.reduce(getattr, name.split("."), jqx)
    except (AttributeError, DeprecationWarning):
        return name in OTHERS
    return not (folder and hasattr(getattr(jqx, folder), name.partition(".")[0]))


NO_ATTRIBUTES = {
    "jqx.bind": "what a file with the result of ptq has as a method",
    "jqx.quantized": "a key in the metadata of files",
    "jqx.transforms.Stats": "a name in programs of jax.export, which stays",
}
"""Names with dots that stand in texts of jqx, and are no attributes."""


def exists(name):
    """Whether a dotted name is an attribute, or a field of a dataclass, which has no default."""
    try:
        pkgutil.resolve_name(name)
        return True
    except (AttributeError, ImportError):
        owner, _, field = name.rpartition(".")
        return "." in owner and exists(owner) and field in fields_of(pkgutil.resolve_name(owner))


def fields_of(value):
    return {x.name for x in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else ()


def test_every_name_of_jqx_in_a_text_exists():
    """Fixes, docstrings and comments name what a user can write."""
    wrong = []
    for path in sorted(ROOT.parent.rglob("*.py")):
        for name in {*re.findall(r"\bjqx(?:\.[A-Za-z]\w*)+", path.read_text())}:
            if name not in NO_ATTRIBUTES and not exists(name):
                wrong.append(f"{path.relative_to(ROOT.parent)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_a_function_in_a_message_has_its_public_name():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        folder = path.relative_to(ROOT).parts[0]
        if folder == "command_line":
            continue
        own = folder if folder in ("linen", "nnx") else None
        for name, line in names_in(path):
            if not is_public(name, own):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong, "\n".join(wrong)
