"""The architecture, checked on the syntax trees of the package: layers, names, private places."""

import ast
import functools
import importlib
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

import jqx

PACKAGE = pathlib.Path(jqx.__file__).parent
ROOT = PACKAGE / "_src"
FILES = sorted(ROOT.rglob("*.py"))
LISTS = sorted({*PACKAGE.rglob("*.py")} - {*FILES} - {PACKAGE / "__main__.py"})
"""The public modules, which only list names."""

LAYERS = [
    ("errors", "signatures"),
    ("checks", "compat"),
    ("compat_kernels", "files", "heap", "late", "table", "xla_cpu"),
    ("package_cpu",),
    ("numerics",),
    ("gradients",),
    ("ops",),
    ("statistics",),
    ("tensor",),
    ("kernels",),
    ("contractions",),
    ("caches",),
    ("policy",),
    ("presets",),
    ("transforms",),
    ("algorithms",),
    ("modules",),
    ("diagnostics",),
    ("ptq", "parallel", "train", "optim"),
    ("linen", "nnx", "interop", "onnx"),
    ("litert",),
    ("command_line",),
]
"""From the bottom up; each imports only from those before it."""

HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

SATELLITES = (
    "diagnostics",
    "parallel",
    "train",
    "optim",
    "interop",
    "onnx",
    "litert",
    "command_line",
)
"""Layers that are imported late, so that they may use the public names of the core."""

TOOLS = "checks compat errors files late signatures table"
"""What every layer may use."""

INSIDE = {
    "diagnostics": """
        contractions.problem ops.affine policy tensor.layout tensor.segments tensor.views
        transforms.arguments transforms.calibrate transforms.channel_map transforms.find
        transforms.higher_order transforms.hoist transforms.interpret transforms.make_plan
        transforms.map_channels transforms.paths transforms.plan transforms.quantize_params
        transforms.rules transforms.trace transforms.views transforms.walk
    """,
    "parallel": """
        algorithms.hadamard statistics.granularity tensor.grid tensor.shardings tensor.spec
        transforms.partitioned transforms.paths transforms.plan transforms.quantize_params
    """,
    "train": """
        contractions.formulation contractions.problem contractions.scaled numerics.exact
        numerics.qtype statistics.granularity tensor.grid tensor.layout
        tensor.products transforms.arguments transforms.convert transforms.higher_order
        transforms.interpret transforms.make_plan transforms.trace transforms.views
    """,
    "optim": "numerics.qtype tensor.grid tensor.spec",
    "interop": """
        diagnostics.compare diagnostics.report numerics.lookup numerics.packing ptq.quantized
        statistics.granularity tensor.layout tensor.segments tensor.serialize tensor.shardings
        tensor.spec transforms.calibrate transforms.channel_map transforms.map_channels
        transforms.paths transforms.quantize_params transforms.trace
    """,
    "onnx": """
        contractions.cache contractions.problem diagnostics.report gradients.estimators
        numerics.exact numerics.lookup numerics.minifloats numerics.qtype numerics.runtimes
        ops.affine statistics.calibrators tensor.grid tensor.qtensor tensor.spec
        transforms.arguments transforms.calibrate transforms.higher_order transforms.integers
        transforms.interpret transforms.make_plan transforms.onnx_rules transforms.paths
        transforms.plan transforms.trace transforms.views transforms.walk
    """,
    "litert": """
        numerics.exact numerics.lookup onnx.export policy statistics.calibrators
        transforms.integers transforms.interpret transforms.plan transforms.trace transforms.views
        transforms.walk
    """,
    "command_line": """
        diagnostics.report interop.archive interop.codec interop.named_tree interop.save
        interop.verify interop.write tensor.segments tensor.serialize tensor.spec
        transforms.calibrate
    """,
}
"""The files of other layers that a satellite reads, beside public names, and no others."""


def layer_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: pathlib.Path) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    """The syntax tree of a file, and all its nodes."""
    tree = ast.parse(path.read_text())
    return tree, tuple(ast.walk(tree))


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[str, str, ast.stmt]]:
    """Returns (module, name, node) of every import, relative ones resolved to `jqx....`."""
    package = ["jqx", *path.relative_to(PACKAGE).parts[:-1]]
    found = []
    for node in parsed(path)[1]:
        if isinstance(node, ast.Import):
            found += [(alias.name, "", node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found += [(module, alias.name, node) for alias in node.names]
    return found


def for_type_checkers(path: pathlib.Path) -> list[ast.stmt]:
    """Returns what stands below `if TYPE_CHECKING:`, at the top of a file."""
    blocks = [node for node in parsed(path)[0].body if isinstance(node, ast.If)]
    is_meant = {"TYPE_CHECKING", "_typing.TYPE_CHECKING"}
    return [x for node in blocks if ast.unparse(node.test) in is_meant for x in node.body]


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def in_every_file(rule):
    """A test that no file breaks a rule, which yields what is wrong with one; all are told."""

    def test():
        found = [f"{name_of(path)}: {wrong}" for path in FILES for wrong in rule(path)]
        assert not found, "\n".join(found)

    return test


@in_every_file
def test_a_layer_imports_only_from_layers_below(path):
    layer = layer_of(path)
    if layer == "__init__":
        return
    if layer not in HEIGHT:
        yield f"{layer} is not in the list of layers"
        return
    for module, name, node in imports(path):
        parts = [*module.split("."), name]
        if parts[0] != "jqx":
            continue
        if parts[1] != "_src":
            if layer not in SATELLITES and node not in for_type_checkers(path):
                yield f"{layer} imports the public module {module}"
        elif parts[2] != layer and HEIGHT[parts[2]] >= HEIGHT[layer]:
            yield f"{layer} imports {parts[2]}"


@pytest.mark.parametrize("satellite", SATELLITES)
def test_a_satellite_reaches_inside_other_layers_only_where_it_is_listed(satellite):
    paths = [path for path in FILES if layer_of(path) == satellite]
    modules = {module for path in paths for module, _, _ in imports(path)}
    inside = {x.removeprefix("jqx._src.") for x in modules if x.startswith("jqx._src.")}
    others = {x for x in inside if x.split(".")[0] not in (satellite, *TOOLS.split())}
    assert sorted(others) == sorted(INSIDE[satellite].split())


@in_every_file
def test_private_names_stay_in_their_file(path):
    for module, name, _ in imports(path):
        if module.startswith("jqx") and name.startswith("_") and name != "_src":
            yield f"import of {name} from {module}"


def test_folders_hold_files_and_list_no_names():
    for path in FILES:
        if path.name == "__init__.py":
            assert len(parsed(path)[0].body) == 1, name_of(path)  # the docstring


@in_every_file
def test_imports_stand_at_the_top_of_a_file(path):
    for module, _, node in imports(path):
        if node.col_offset and node not in for_type_checkers(path):
            yield f"import of {module}, line {node.lineno}"


@in_every_file
def test_unstable_jax_names_stand_in_one_file(path):
    unstable = ("jax._src", "jaxlib")
    if path.name not in ("compat.py", "compat_kernels.py"):
        unstable += ("jax.extend", "jax.core", "jax.interpreters")
    for module, name, _ in imports(path):
        if f"{module}.{name}".startswith(unstable):
            yield f"import of {module}.{name}"


@in_every_file
def test_third_parties_are_the_core_dependencies(path):
    roots = {module.split(".")[0] for module, _, _ in imports(path)} - {"jqx"}
    more = {"flax"} if layer_of(path) in ("linen", "nnx") else set()
    more |= {"scipy"} if layer_of(path) == "algorithms" else set()
    is_late = all(
        node in for_type_checkers(path) for name, _, node in imports(path) if name == "optax"
    )
    more |= {"optax"} if layer_of(path) == "optim" and is_late else set()
    more |= {"matplotlib"} if path.name == "plots.py" else set()
    yield from sorted(roots - {"jax", "chex", "numpy"} - more - set(sys.stdlib_module_names))


@in_every_file
def test_a_file_is_named_for_an_idea_and_holds_no_more(path):
    if path.stem in {"utils", "_utils", "common", "_common", "helpers", "_helpers"}:
        yield "the name is no idea"
    if len(path.read_text().splitlines()) > 900:
        yield "more than 900 lines"
    if not ast.get_docstring(parsed(path)[0]):
        yield "no module docstring"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_public_module_lists_each_name_once_and_holds_no_code(path):
    aliases = [
        alias
        for node in parsed(path)[0].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname not in ("_unknown", "_late")
    ]
    assert all(alias.asname == alias.name for alias in aliases)
    assert max(Counter(alias.name for alias in aliases).values(), default=1) == 1
    assert not [
        node for node in parsed(path)[1] if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]


def test_contractions_alone_bind_the_matrix_product():
    writers = [
        name_of(path)
        for path in FILES
        for node in parsed(path)[1]
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in ("__matmul__", "__rmatmul__")
    ]
    assert writers == ["contractions/dot_general.py"] * 2


def callers(name):
    """The files that call a function, once for each call."""
    return [
        name_of(path)
        for path in FILES
        for node in parsed(path)[1]
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]


def test_one_walk_gives_equations_their_addresses():
    """Nobody else asks which equations count in addresses. Analyses are domains of this walk; these
    go through equations themselves: evaluation, and stages and biases, which look at several
    equations at once.
    """
    assert callers("is_marked") == ["transforms/walk.py"]
    assert {*callers("addressed")} == {
        "algorithms/corrections.py",
        "algorithms/stages.py",
        "transforms/interpret.py",
        "transforms/walk.py",
    }


def test_the_planner_alone_tells_platforms_apart():
    """But for a sum that libraries of GPUs return in float32, inside of a formulation, and products
    of 16-bit floats in a backward pass, whose transposes XLA on CPU must not merge.
    """
    found = [name for name in callers("platform_dependent") if name.startswith("contractions/")]
    assert found == [
        "contractions/conv_general_dilated.py",
        "contractions/dot_general.py",
        "contractions/formulation.py",
    ]


PUBLIC = {
    "jqx": """
        QSpec QTensor Quantized SavedModel Plan Policy RoundMode Rule Segments ptq
        round quantize dequantize dynamic_quantize fake_quantize quantize_dequantize
        affine_from_range per_tensor per_axis per_block per_channel per_group per_token
        dot_general matmul einsum conv_general_dilated ragged_dot take formulations
        kernels_in_exports dynamic_slice dynamic_update_slice pack_for KVCache decode_attention
        make_plan map_channels ChannelMap LowRank calibrate calibrate_batches merge_stats affines
        simulate convert hoist
        quantize_params dequantize_params quantize_state
        compare explain lowering report save load train train_state
        algorithms calibrators diagnostics extend gradients interop numerics onednn
        optim parallel presets recipes tflite
    """,
    "algorithms": """
        adaround auto_round awq bias_correction chain eora equalize find_pairs gptq loftq nearest
        own_text rotate smooth_quant
    """,
    "calibrators": """
        Affine advance moving_average
        absmax AcrossDevices Delayed delayed fixed Hqq hqq
        minmax Mse mse Percentile percentile rms Rounded ceil four_over_six
    """,
    "diagnostics": """
        dashboard held_back ranges search Bits Bytes Error sensitivity relative_error plots
    """,
    "diagnostics.plots": "front heat_map histogram ranges sensitivity_bars sqnr_bars",
    "extend": """
        Contraction Formulation OperandAxes View cudnn_blocks onnx_rules primitive_rules using
        Site Operand Weight Skipped Unreached
        Algorithm AlgorithmResult Calibrator Granularity Groups GradientEstimator Surrogate
        Observer ObservedSite absmax hessian mean mean_abs places
        QType power_of_two round_to_integer step_of
    """,
    "gradients": """
        straight_through ste ste_unclipped LearnedStep lsq LearnedStepAndOffset lsq_plus pact
        StochasticRounding stochastic stochastic_round parq
    """,
    "interop": """
        Archive Lazy Name from_gemma from_keras from_orbax from_qarray from_qwix named read
        read_gguf save_leaves to_keras to_litert to_onnx to_orbax to_qarray tree verify
        verify_onnx write
    """,
    "linen": """
        Mode quantize Quantized convert fix_scales learn_scales make_plan pure ptq bind
        Conv ConvTranspose Dense DenseGeneral Einsum Embed MultiHeadAttention
        MultiHeadDotProductAttention LoRA LoRADense apply_lora init_lora
        merge_lora
    """,
    "nnx": """
        Mode quantize Quantized convert fix_scales learn_scales make_plan pure update ptq bind
        QParam Scale Stat
        Conv ConvTranspose Einsum Embed Linear LinearGeneral MultiHeadAttention
        LoRA LoRALinear apply_lora init_lora merge_lora
    """,
    "numerics": """
        format_of
        Block mxfp4 mxfp6_e2m3 mxfp6_e3m2 mxfp8_e4m3 mxfp8_e5m2 mxint8 nvfp4
        Codebook Squares binary nf4 Integer int3 int5 int6 int7 ternary uint3 uint5 uint6 uint7
        Minifloat Specials float6_e2m3fn float6_e3m2fn
        Numerics SymmetricRange ngraph onednn onednn_runtime onnx openvino qwix tflite torchao
    """,
    "onednn": "dynamic_dequantize onednn_dequantize onednn_quantize",
    "optim": "apply_updates quantized stochastic_bf16",
    "parallel": "all_gather all_reduce all_to_all ppermute reduce_scatter shardings",
    "presets": "fp8 mxfp8 nf4 w4a16 w4a4 w4a8 w8a16 w8a8 w8a8_dynamic",
    "recipes": """
        Rounded Product Products Recipe fp8 fp8_block fp8_delayed fp8_rowwise int8 mxfp8 nvfp4
        quartet2
    """,
    "tflite": "FixedPointRounding Requantization requantize",
}
"""What users may write: of jqx itself, and of each module of it that users meet."""


def exported(path: pathlib.Path) -> set[str]:
    """The names that a file re-exports, as `Name as Name`."""
    body = [*parsed(path)[0].body, *for_type_checkers(path)]
    aliases = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname for alias in aliases if alias.asname == alias.name}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_those_that_are_listed(module):
    folder = PACKAGE if module == "jqx" else PACKAGE.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert exported(path) == set(PUBLIC[module].split())
    found = importlib.import_module("jqx" if module == "jqx" else f"jqx.{module}")
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []


def test_a_name_that_never_was_is_no_attribute():
    for module in (jqx, jqx.numerics, jqx.calibrators, jqx.gradients, jqx.diagnostics):
        for name in ("nothing", "__wrapped__"):
            with pytest.raises(AttributeError, match=f"{module.__name__}.*{name}"):
                getattr(module, name)


def public_objects():
    """Each public object, by the name of its module and its own."""
    for module, names in PUBLIC.items():
        owner = importlib.import_module("jqx" if module == "jqx" else f"jqx.{module}")
        yield from ((module, name, getattr(owner, name)) for name in names.split())


def test_every_public_object_has_one_name():
    """The modules of Flax are each complete by themselves."""
    public = [(m, name, value) for m, name, value in public_objects() if m not in ("linen", "nnx")]
    count = Counter(id(value) for _, _, value in public)
    assert [f"{module}.{name}" for module, name, value in public if count[id(value)] > 1] == []


def test_every_public_function_and_class_has_a_docstring_with_an_example():
    for name in dir(jqx):
        value = getattr(jqx, name)
        if name.startswith("_") or not callable(value):
            continue
        text = value.__doc__ or ""
        assert len(text) > 100, name
        assert ">>>" in text or name in ("Plan", "Quantized", "RoundMode"), name


def test_names_that_are_imported_late_are_those_that_type_checkers_read():
    """`dir` and `import *` know them before they are imported."""
    code = "import jqx; first = dir(jqx); from jqx import *; print(*({*first} & {*dir()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(PUBLIC["jqx"].split()) <= set(done.stdout.split())


HEAVY = """
    flax optax chex scipy tqdm matplotlib orbax jax.experimental.pallas jax.experimental.topologies
"""
LATE = """
"""


def test_importing_jqx_imports_neither_what_is_heavy_nor_folders_that_few_programs_use():
    """Of the time that jax takes, jqx adds less than half (`benchmarks/bench_import.py`)."""
    late = {*HEAVY.split(), *LATE.split()}
    code = f"import sys, jqx; print(*({late} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
