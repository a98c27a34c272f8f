"""Messages name the function that was called by its public name, with its folder."""

import ast
import functools
import pathlib
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
