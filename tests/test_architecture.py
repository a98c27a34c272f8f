"""The architecture, checked on the syntax trees of the package: layers, names, private places."""

import ast
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

import jqx

ROOT = pathlib.Path(jqx.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = [
    ("_errors",),
    ("_calls", "_checks", "_compat"),
    ("_files",),
    ("numerics",),
    ("gradients",),
    ("ops",),
    ("calibrators",),
    ("tensor",),
    ("contractions",),
    ("observers",),
    ("policy",),
    ("presets",),
    ("transforms",),
    ("modules",),
    ("linen", "nnx", "interop", "diagnostics"),
    ("_command_line",),
    ("__main__",),
]
"""From the bottom up; each imports only from those before it."""

HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def layer_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: pathlib.Path) -> list[tuple[str, str, ast.stmt]]:
    """Returns (module, name, node) of every import, relative ones resolved to `jqx....`."""
    package = ["jqx", *path.relative_to(ROOT).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "", node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found += [(module, alias.name, node) for alias in node.names]
    return found


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_layer_imports_only_from_layers_below(path):
    layer = layer_of(path)
    if layer == "__init__":
        return
    assert layer in HEIGHT, f"{layer} is not in the list of layers"
    for module, name, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "jqx":
            continue
        target = parts[1] if len(parts) > 1 else name
        allowed = target == layer or HEIGHT[target] < HEIGHT[layer]
        assert allowed, f"{layer} imports {target}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_another_folder_is_imported_by_its_package(path):
    for module, _, _ in imports(path):
        parts = module.split(".")
        if parts[0] == "jqx" and len(parts) > 2 and parts[1] != layer_of(path):
            raise AssertionError(f"import {module} reaches inside another folder")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_stand_at_the_top_of_a_file(path):
    for module, _, node in imports(path):
        assert node.col_offset == 0, f"import of {module}, line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_unstable_jax_names_stand_in_one_file(path):
    for module, name, _ in imports(path):
        full = f"{module}.{name}"
        assert not full.startswith(("jax._src", "jaxlib"))
        if path.name != "_compat.py":
            assert not full.startswith(("jax.extend", "jax.core", "jax.interpreters"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_third_parties_are_the_core_dependencies(path):
    roots = {module.split(".")[0] for module, _, _ in imports(path)} - {"jqx"}
    more = {"flax"} if layer_of(path) in ("linen", "nnx") else set()
    more |= {"matplotlib"} if path.stem == "plots" else set()
    assert roots <= {"jax", "chex", "numpy"} | more | set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_named_for_an_idea_and_holds_no_more(path):
    assert path.stem not in {"utils", "_utils", "common", "_common", "helpers", "_helpers"}
    assert len(path.read_text().splitlines()) <= 400
    assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name == "__init__.py"], ids=name_of
)
def test_an_init_file_lists_each_name_once(path):
    tree = ast.parse(path.read_text())
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                internal = path.parent.name == "contractions" and alias.name == "QTensor"
                assert alias.asname == alias.name or internal, f"{alias.name} is not re-exported"
                names.append(alias.name)
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_contractions_alone_bind_the_matrix_product():
    writers = [
        name_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in ("__matmul__", "__rmatmul__")
    ]
    assert writers == ["contractions/__init__.py"] * 2


def callers(name):
    """The files that call a function, once for each call."""
    return [
        name_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]


def test_one_walk_gives_equations_their_addresses():
    """Who else asks which equations are marked counts none of them."""
    walks = [path for path in FILES if "(*address, marked)" in path.read_text()]
    assert [name_of(path) for path in walks] == ["transforms/_find.py"]
    assert "diagnostics/_interval_forms.py" in callers("addressed")


def test_the_planner_alone_tells_platforms_apart():
    """But for one sum that libraries of GPUs return in float32, inside of a formulation."""
    found = [name for name in callers("platform_dependent") if name.startswith("contractions/")]
    assert found == ["contractions/_how/_conv.py", "contractions/_how/_formulation.py"]


FIXED = (
    "round quantize dequantize dynamic_quantize fake_quantize quantize_dequantize "
    "affine_from_range QTensor QSpec Rule Policy Plan RoundMode per_tensor per_axis per_channel "
    "per_token dot_general matmul make_plan calibrate merge_stats affines simulate "
    "quantize_params convert presets numerics calibrators gradients observers"
).split()


def test_public_names_are_attributes_of_the_package():
    assert [name for name in FIXED if not hasattr(jqx, name)] == []


def test_every_public_object_has_one_name():
    public = {name: value for name, value in vars(jqx).items() if not name.startswith("_")}
    folders = {path.parent.name for path in FILES if path.name == "__init__.py"}
    modules = {name for name in public if name in folders}
    assert modules >= {"presets", "numerics", "calibrators", "gradients", "observers"}
    count = Counter(id(value) for name, value in public.items() if name not in modules)
    assert [name for name, value in public.items() if count[id(value)] > 1] == []


def test_every_public_function_and_class_has_a_docstring_with_an_example():
    for name in sorted(set(vars(jqx))):
        value = getattr(jqx, name)
        if name.startswith("_") or not callable(value):
            continue
        text = value.__doc__ or ""
        assert len(text) > 100, name
        assert ">>>" in text or name in ("RoundMode", "Plan"), name


def test_importing_jqx_does_not_import_flax():
    code = "import sys, jqx; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
