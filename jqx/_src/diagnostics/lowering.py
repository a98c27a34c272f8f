"""`lowering`: compiles a function for a machine that need not be present; `explain`: the compiled
contraction of each site of a plan.
"""

import contextlib
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any, Literal

import jax
from jax.tree_util import keystr

from ... import Plan, Policy, QTensor, convert, make_plan, pack_for, quantize_params
from .. import compat
from ..checks import called
from ..errors import fail
from ..table import Table, Tabular
from ..transforms.arguments import check_plan
from ..transforms.calibrate import arrays_of
from ..transforms.paths import by_argument, insert_params
from ..transforms.plan import GivenAffines, label_of
from ..transforms.quantize_params import lay_out_weights
from ..transforms.trace import is_array, is_quantized
from .compare import params_and_others
from .hlo import CODES, SHAPED, Instruction, Kernel, Program, bits, kernels
from .report import scheme_of, scheme_of_site


@dataclass(frozen=True)
class CompiledContraction:
    """A contraction of an optimized program.

    Attributes:
      site: its site in a plan, for a function from `jqx.convert`; otherwise empty.
      op_name: name scopes and the primitive that it was traced from.
      operands: types that are multiplied, such as `s8[32,256]`.
      result: type of the sums.
      reads: the dtypes that the kernel reads from memory for each operand, without scales.
      runs: what computes it: a custom call by its name (a library, or a kernel of the user), a
        fusion by its kind, or an instruction of the compiler.
      widened: copies of codes in wider types that kernels wrote to memory before it, such as
        `bf16[256,512] of w.values`.
      left: why the matrix units of a GPU or TPU do not run it, or not on codes; empty if they do,
        and on CPU.
      times: how often it runs; `None` in a loop that runs until a condition fails.
      cycles: cycles that the TPU compiler estimates for one run of its kernel, arithmetic only;
        `None` on other targets.
      kernel: name of its kernel; several contractions may share one.
    """

    site: str
    op_name: str
    operands: tuple[str, ...]
    result: str
    reads: tuple[tuple[str, ...], ...]
    runs: str
    widened: tuple[str, ...]
    left: str
    times: int | None
    cycles: int | None
    kernel: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that are multiplied."""
        return tuple(operand.partition("[")[0] for operand in self.operands)

    def to_dict(self) -> dict[str, Any]:
        """Returns its fields."""
        return asdict(self)


@dataclass(frozen=True)
class Lowering(Tabular):
    """A compiled function. Prints as a table, one row for each contraction.

    Attributes:
      target: the target it was compiled for.
      contractions: contractions of the optimized program, in order; those of a loop once.
      memory: bytes of `argument`, `output`, `temp`, `alias` and `generated_code`, if the compiler
        reports them.
      cycles: cycles that the TPU compiler estimates for all kernels, including loops, without
        memory accesses; `None` on other targets, and if a loop runs until a condition fails.
      hlo: the text of the optimized program.
    """

    target: str
    contractions: tuple[CompiledContraction, ...]
    memory: dict[str, int] = field(hash=False)
    cycles: int | None
    hlo: str = field(repr=False)

    @property
    def temp_bytes(self) -> int:
        """Bytes in addition to arguments and results; 0 if the compiler does not report them."""
        return self.memory.get("temp", 0)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`, without the text of the program."""
        return {
            "target": self.target,
            "contractions": [contraction.to_dict() for contraction in self.contractions],
            "memory": dict(self.memory),
            "cycles": self.cycles,
        }

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = [
            (
                c.site or "/".join(c.op_name.split("/")[-2:]) or "(unnamed)",
                multiplied(c),
                " x ".join("+".join(dtypes) or "-" for dtypes in c.reads) or "-",
                c.runs,
                "?" if c.times is None else str(c.times),
                "-" if c.cycles is None else str(c.cycles),
                remarks(c),
            )
            for c in self.contractions
        ]
        head = ("contraction", "multiplies", "reads", "runs", "times", "cycles", "remarks")
        sizes = [f"{name} {size:,}" for name, size in self.memory.items() if size]
        footer = f"{len(rows)} contractions on {self.target}"
        footer += f"; bytes: {', '.join(sizes)}" if sizes else ""
        footer += "" if self.cycles is None else f"; {self.cycles:,} cycles estimated"
        return Table(head, tuple(rows), footer, texts=len(head))


@called("lowering", "pass the function and its arguments: jqx.lowering(f, params, x).")
def lowering(f: Callable[..., Any], *args: Any, target: str = "cpu") -> Lowering:
    """Compiles a function for a target, and returns the compiled form of each contraction.

    Nothing runs, and no accelerator is needed: compilers for TPUs come with the extra `aot-tpu`,
    the one for NVIDIA GPUs with `aot-gpu`. The latter runs without autotuning: fusions and the
    types that are multiplied are the same as on the device, but the library that multiplies may
    differ.

    Args:
      f: any JAX function, such as one from `jqx.convert`. A jitted function is compiled as it is,
        donation included; other functions are jitted first.
      *args: its arguments, with any shapes and dtypes: arrays, QTensors, or `jax.ShapeDtypeStruct`
        in their place. Their placement is ignored: one device holds them all. For a function that
        is not jitted, leaves that are not arrays are static.
      target: `"cpu"`, `"h200"`, `"b200"`, `"tpu-v5e"`, `"tpu-v6e"` or `"tpu7x"`.

    Returns:
      A `Lowering`. For each contraction it has the types that are multiplied and those read from
      memory, what runs it, whether codes were first copied to memory in wider types, whether it
      left the matrix units, and how often it runs; and memory and estimated cycles in total.

    Raises:
      ValueError: if the target is unknown.
      ImportError: if its compiler is not installed.
      RuntimeError: if its compiler cannot be loaded.
      Also the errors of `f` when it is traced, and of the compiler.

    Gradient: none; nothing is computed. NaN and infinity: the same.
    State: the devices of this process do not change. While a compiler is loaded, environment
      variables that it needs are set if they are absent, and then removed: for TPUs
      `TPU_SKIP_MDS_QUERY=1`, `TPU_WORKER_HOSTNAMES=localhost` and `ALLOW_MULTIPLE_LIBTPU_LOAD=1`,
      for GPUs `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 512)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> x = jnp.ones((8, 256))
      >>> (good,) = jqx.lowering(jqx.matmul, x, w).contractions
      >>> good.dtypes, good.widened  # three int8 digits of x, on CPU
      (('s8', 's8'), ())
      >>> by_hand = lambda x, w: x @ (w.values.astype(jnp.float32) * w.scale)
      >>> (bad,) = jqx.lowering(by_hand, x, w).contractions
      >>> bad.dtypes, bad.widened
      (('f32', 'f32'), ('f32[256,512] of w.scale and w.values',))
    """
    executable = compiled_for("lowering", target, f, args)
    return read_executable(executable, target)


_BYTES = ("argument", "output", "temp", "alias", "generated_code")


def read_executable(executable: Any, target: str) -> Lowering:
    """Reads the contractions and costs of a compiled function."""
    text = executable.as_text()
    program = Program.parse(text)
    launched = kernels(program)
    estimated = [kernel for kernel in launched if kernel.cycles is not None]
    cycles = None
    if estimated and all(kernel.times is not None for kernel in estimated):
        cycles = sum((kernel.cycles or 0) * (kernel.times or 0) for kernel in estimated)
    stats = executable.memory_analysis()
    sizes = {name: getattr(stats, f"{name}_size_in_bytes", None) for name in _BYTES}
    return Lowering(
        target=target,
        contractions=tuple(contractions_of(program, target)),
        memory={name: size for name, size in sizes.items() if size is not None},
        cycles=cycles,
        hlo=text,
    )


# One contraction of a compiled program: its operands, what runs it, what came before it.

_MATRIX = re.compile(r"(?<=/)matrix_([0-9]+)_([0-9]+)(?=/)")
SCOPE = re.compile(r"jqx\[((?:\[[0-9]+:[0-9]+\]|.)*?)\](?=/|\)|$)")


MULTIPLIES = re.compile(r"/multiplies_(\w+)/")
"""Operands of jqx kernels, which the operands of the custom call do not show."""


KINDS = {  # kinds of fusions, by their names in XLA
    "__triton_gemm": "Triton fusion",
    "__triton_nested_gemm_fusion": "Triton fusion",
    "__cudnn$fusion": "cuDNN fusion",
    "__ynn_fusion": "YNN fusion",
    "__onednn_fusion": "oneDNN fusion",
}


SHARE = 8
"""A scale stands for more codes than this: operands smaller by this factor are scales."""


Fed = Mapping[int, Instruction]
"""Operands of a kernel by index, as the parameters of its computation."""


def contractions_of(program: Program, target: str) -> list[CompiledContraction]:
    """Returns the contractions of a program for a target, by its name, kernel by kernel."""
    return [
        contraction
        for kernel in kernels(program)
        for inner in program.contractions(kernel.instruction)
        for contraction in _by_site(program, _read(program, kernel, inner, target), inner)
    ]


def _by_site(
    program: Program, contraction: CompiledContraction, inner: Instruction
) -> list[CompiledContraction]:
    """Returns a contraction for each of the sites that one kernel computes, whose weights, or the
    matrices of activations, are its operands in the same order.
    """
    sites = SCOPE.findall(contraction.op_name)
    if not inner.target.endswith("_rows") or not sites:
        return [contraction]
    named = [program.named[inner.home].get(name) for name in inner.operands]
    weights = [x for x in named if x is not None and x.dtype == "s8"]
    matrices = iter(_MATRIX.findall(contraction.op_name))
    rows = math.prod(inner.dims[:-1])
    found = []
    for site, weight in zip(sites, weights, strict=True):
        k, columns = next(matrices, (weight.dims[-1], weight.dims[-2]))
        operands = f"s8[{rows},{k}]", weight.type
        result, reads = f"f32[{rows},{columns}]", (("f32",), ("s8",))
        found.append(replace(contraction, site=site, operands=operands, result=result, reads=reads))
    return found


def _read(program: Program, kernel: Kernel, inner: Instruction, target: str) -> CompiledContraction:
    # The first operands of kernels are the matrix of each tile, or which tokens count.
    start = program.leading(inner, "s32") if inner.opcode == "custom-call" else 0
    operands = program.operands_of(inner, start)
    if inner.opcode == "multiply":
        operands = [_before_broadcast(program, operand) for operand in operands]
    if inner is kernel.instruction:
        fed: list[Fed] = [{index: operand} for index, operand in enumerate(operands, start)]
    else:
        fed = [program.feeding(kernel.instruction, operand) for operand in operands]
    reads = tuple(
        tuple(
            dict.fromkeys(value.dtype for value in parameters.values() if _is_large(value, operand))
        )
        for parameters, operand in zip(fed, operands, strict=True)
    )
    op_name = program.name_of(kernel.instruction, inner)
    site, multiplies = SCOPE.search(op_name), MULTIPLIES.search(op_name)
    return CompiledContraction(
        site=site[1] if site else "",
        op_name=op_name,
        operands=tuple(
            f"{multiplies[1] if multiplies else x.dtype}{x.type[len(x.dtype) :]}" for x in operands
        ),
        result=inner.type,
        reads=reads,
        runs=_runs(kernel.instruction, inner),
        widened=tuple(dict.fromkeys(_widened(kernel, operands, fed))),
        left=_left(kernel.instruction, inner, operands, reads, target),
        times=kernel.times,
        cycles=kernel.cycles,
        kernel=kernel.instruction.name,
    )


def _before_broadcast(program: Program, instruction: Instruction) -> Instruction:
    """Returns the value that a broadcast repeats for a product of elements."""
    named = program.named[instruction.home]
    while instruction.opcode in SHAPED and instruction.operands[0] in named:
        instruction = named[instruction.operands[0]]
    return instruction


def _is_large(value: Instruction, operand: Instruction) -> bool:
    return value.size * SHARE > operand.size


def _widened(kernel: Kernel, operands: Sequence[Instruction], fed: Sequence[Fed]) -> Iterator[str]:
    for operand, parameters in zip(operands, fed, strict=True):
        for index in parameters:
            value = kernel.reads[index]
            if isinstance(value, list) or value.widened is None:
                continue
            copy = value.widened
            if _is_large(copy, operand):
                yield f"{copy.type} of {' and '.join(sorted(value.origins))}"


def _runs(kernel: Instruction, inner: Instruction) -> str:
    if inner.opcode == "custom-call":
        return inner.target
    if inner is kernel:
        return inner.opcode
    kind = kernel.attribute(r'"kind":"([^"]+)"') or kernel.attribute(r"kind=k(\w+)").lower()
    named = KINDS.get(kind, kind if kind.startswith("_") else f"{kind} fusion")
    return f"{named}, by elements" if inner.opcode == "multiply" else named


def _left(
    kernel: Instruction,
    inner: Instruction,
    operands: Sequence[Instruction],
    reads: Sequence[Sequence[str]],
    target: str,
) -> str:
    machine = TARGETS[target]
    if machine.platform == "cpu" or inner.opcode == "custom-call":
        return ""
    if inner.opcode == "scaled-dot":
        return "" if machine.scales_blocks else "emulated: bf16 times its scales is multiplied"
    if inner.opcode == "multiply":
        return "elements are multiplied and summed"
    if machine.platform == "cuda" and kernel.attribute(r"kind=(kLoop|kInput)"):
        return f"a loop multiplies {operands[0].dtype}"
    widest = max((bits(dtype) for dtypes in reads for dtype in dtypes), default=32)
    if operands[0].dtype == "f32" and widest < 32:
        read = " x ".join("+".join(dtypes) for dtypes in reads)
        return f"{read} is multiplied as f32"
    return ""


_KEYS = re.compile(r"\w+(?:\[[^\]]*\])*\['([^']*)'\]")
"""The path of an argument, such as `args[0]['up']['kernel']`: tables show the last key."""


def multiplied(c: CompiledContraction) -> str:
    """Returns the types that a contraction multiplies."""
    return f"{' x '.join(c.operands)} -> {c.result}" if c.operands else c.result


def remarks(c: CompiledContraction) -> str:
    """Returns the problems of a contraction."""
    copies = [_KEYS.sub(r"\1", copy) for copy in c.widened]
    return "; ".join([*(f"writes {copy} first" for copy in copies), *filter(None, [c.left])])


# Compiles for a machine that need not be present.


@dataclass(frozen=True)
class Target:
    """What the compiler of a platform needs to know about a machine.

    Attributes:
      platform: `"cpu"`, `"cuda"` or `"tpu"`.
      topology: JAX's name of its kind.
      extra: the extra of jqx that installs the compiler.
      modules: modules, one of which must be installed.
      options: compiler options.
      environment: environment variables that the compiler needs when it is loaded.
      scales_blocks: whether its matrix units apply scales of blocks of 32.
    """

    platform: str
    topology: str = ""
    extra: str = ""
    modules: tuple[str, ...] = ()
    options: dict[str, str | bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    scales_blocks: bool = False


def _nvidia(scales_blocks: bool = False) -> Target:
    return Target(
        "cuda",
        "1x1x1",
        "aot-gpu",
        ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
        options={"xla_gpu_autotune_level": "0"},  # the autotuner would run kernels
        environment={"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        scales_blocks=scales_blocks,
    )


def _tpu(topology: str) -> Target:
    one_host = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    # Only one process can use a TPU, but several can use its compiler.
    shared = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return Target("tpu", topology, "aot-tpu", ("libtpu",), environment=one_host | shared)


TARGETS = {
    "cpu": Target("cpu"),
    "h200": _nvidia(),
    "b200": _nvidia(scales_blocks=True),
    "tpu-v5e": _tpu("v5e:2x2"),
    "tpu-v6e": _tpu("v6e:2x2"),
    "tpu7x": _tpu("tpu7x:2x2x1"),
}


def target_of(function: str, target: str) -> Target:
    """Returns a target by name, after checking that its compiler is installed."""
    if target not in TARGETS:
        fix = f"pass one of {', '.join(map(repr, TARGETS))}."
        raise fail(function, f"`target` is unknown: {target!r}.", fix=fix)
    machine = TARGETS[target]
    if machine.modules and not any(map(_is_installed, machine.modules)):
        problem = (
            f"the compiler for {target!r} is not installed: no {' or '.join(machine.modules)}."
        )
        fix = f'pip install "jqx[{machine.extra}]"; no accelerator is needed.'
        raise fail(function, problem, fix=fix, error=ImportError)
    return machine


def sharding_on(function: str, target: str) -> jax.sharding.Sharding:
    """Returns a sharding on one device of a target."""
    target_of(function, target)
    return jax.sharding.SingleDeviceSharding(_device(function, target))


def compiled_for(function: str, target: str, f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Compiles `f` at `args` for one device of a target, and returns the executable."""
    sharding = sharding_on(function, target)
    is_jitted = isinstance(f, jax.stages.Wrapped)
    _, filled = arrays_of(args)

    def placed(x: Any) -> Any:
        if is_array(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return x if is_jitted else None

    @functools.wraps(f)
    def of_arrays(*dynamic: Any) -> Any:
        return f(*filled(jax.tree.leaves(dynamic)))

    jitted: Any = f if is_jitted else jax.jit(of_arrays, keep_unused=True)
    lowered = jitted.lower(*jax.tree.map(placed, args))
    with compat.names_in_cache_key():
        return lowered.compile(compiler_options=TARGETS[target].options or None)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def _device(function: str, target: str) -> Any:
    """Returns the device to compile for."""
    default = jax.devices()  # starts the backends of this process, before a compiler is loaded
    machine = TARGETS[target]
    if machine.platform == "cpu":
        return default[0] if default[0].platform == "cpu" else jax.devices("cpu")[0]
    try:
        with _present(machine.environment):
            if machine.platform == "tpu":
                return compat.devices_of_topology("tpu", machine.topology)[0]
            config = (
                resources.files("jqx._src.diagnostics").joinpath(f"{target}.textproto").read_text()
            )
            return compat.devices_of_topology(
                "cuda",
                "",
                plugin=next(filter(_is_installed, machine.modules)),
                target_config=config,
                topology=machine.topology,
            )[0]
    except (RuntimeError, NotImplementedError) as error:
        problem = f"the compiler for {target!r} cannot be loaded."
        text, extra = " ".join(str(error).split())[:200], machine.extra
        fix = f'install the release that fits jax {jax.__version__}: pip install "jqx[{extra}]".'
        raise fail(function, problem, given=text, fix=fix, error=RuntimeError) from error


@contextlib.contextmanager
def _present(variables: dict[str, str]) -> Iterator[None]:
    """Sets absent environment variables inside the context."""
    absent = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(absent)
    try:
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)


# `explain`: the compiled contraction of each site, and whether it runs on codes.

GONE = (
    "gone: the program has no such product: it was merged with an equal one, made of other "
    "operations, or computed beforehand"
)

ExecutedAs = Literal["codes", "converted", "widened first", "float", "lookup", "gone"]


@dataclass(frozen=True)
class Explained:
    """One contraction of a function, and its compiled form.

    Attributes:
      path: path of its weight, or its name scope.
      op: the operation, such as `dot_general`.
      plan: how the plan quantizes it, operand by operand, or why it stays in float; for a weight
        that was a QTensor already, which the plan does not change, its format.
      executed_as: what the compiled program does:

        - `"codes"`: codes are multiplied by codes
        - `"converted"`: the kernel reads codes, and converts them before it multiplies them
        - `"widened first"`: another kernel writes the codes to memory in a wider type
        - `"float"`: no codes are read
        - `"lookup"`: rows of a table are read; nothing is multiplied
        - `"gone"`: the program has no contraction of that name: the compiler merged it with an
          equal one, made it of other operations, or computed it beforehand, or jqx does not look
          where it is
      contractions: its compiled contractions; several if one product is computed in parts.
      label: what tables call it; if empty, its path.
    """

    path: str
    op: str
    plan: str
    executed_as: ExecutedAs
    contractions: tuple[CompiledContraction, ...]
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.path

    @property
    def is_quantized(self) -> bool:
        """Whether its kernels read codes."""
        return self.executed_as in ("codes", "converted")


@dataclass(frozen=True)
class Explanation(Tabular):
    """The compiled form of each contraction of a function. Prints as a table.

    Attributes:
      sites: the sites of the plan, skipped ones last; without a plan, those that a function from
        `jqx.convert` names.
      others: contractions of the program that belong to no site.
      lowering: the whole program.
      plain: paths of quantized weights that are not in the layout that the target contracts
        fastest; `quantize_params(..., target=)` and `pack_for` convert them.
    """

    sites: tuple[Explained, ...]
    others: tuple[CompiledContraction, ...]
    lowering: Lowering
    plain: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> tuple[Explained, ...]:
        """Returns the contractions on a path, in order; an empty tuple if there are none."""
        return tuple(site for site in self.sites if site.path == path)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`."""
        sites = [asdict(site) for site in self.sites]
        for site in sites:
            del site["label"]
        return {
            "target": self.lowering.target,
            "sites": sites,
            "others": [c.to_dict() for c in self.others],
            "plain": list(self.plain),
        }

    def table(self) -> Table:
        """Returns the rows as text."""
        rows: list[tuple[str, ...]] = []
        for site in self.sites:
            parts = [_cells(c) for c in site.contractions] or [("-", "-", "-", "")]
            rows.append((site.name, site.plan or "-", site.executed_as, *parts[0]))
            rows += (("", "", "", *part) for part in parts[1:])
        rows += (("(no site)", "-", "-", *_cells(c)) for c in self.others)
        codes = sum(site.is_quantized for site in self.sites)
        count, target = len(self.sites), self.lowering.target
        lines = [f"{codes} of {count} contractions read codes on {target}"]
        if self.plain:
            lines.insert(
                0,
                f"{len(self.plain)} weights are not in the layout that the target reads fastest: "
                "target= of quantize_params, or pack_for, converts them",
            )
        if any(site.executed_as == "gone" for site in self.sites):
            lines.append(GONE)
        head = ("site", "plan", "executed as", "multiplies", "runs", "times", "remarks")
        return Table(head, tuple(rows), "\n".join(lines), texts=len(head))


@called("explain", "pass the function and its arguments: jqx.explain(f, params, x, plan=plan).")
def explain(
    f: Callable[..., Any],
    *args: Any,
    plan: Plan | Policy | None = None,
    affines: GivenAffines = None,
    target: str = "cpu",
) -> Explanation:
    """Compiles a quantized function, and reports what each of its sites multiplies, and how.

    It also reports how many weights the target would read faster in another layout, made by
    `jqx.quantize_params(..., target=)` or `jqx.pack_for`: weights in the layout of files, and
    weights packed for a kernel of another platform, which the target does not run.

    With a plan, `f` is the float function. `jqx.convert(f, plan, affines)` is compiled, with its
    weights quantized outside (float weights in `args` are replaced by the results of
    `quantize_params`). Without a plan, `f` itself is compiled; then only sites of functions from
    `jqx.convert` have names.

    Args:
      f: a function of arrays and pytrees of arrays.
      *args: its arguments, as for `jqx.lowering`: any shapes and dtypes; arrays, QTensors or
        `jax.ShapeDtypeStruct`.
      plan: a `Plan`, or a `Policy` to plan the call with.
      affines: scales from `jqx.affines`; without them the program computes the scale of every
        activation from its values.
      target: as in `jqx.lowering`.

    Raises:
      TypeError: if `plan` is not a plan.
      ValueError: if the plan does not fit, the target is unknown, or `affines` is passed without a
        plan.
      ImportError, RuntimeError: as in `jqx.lowering`.

    Gradient: none; nothing is computed. NaN and infinity: the same.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda p, x: (x @ p["w"]) @ p["v"]
      >>> params = {"w": jnp.ones((256, 512)), "v": jnp.ones((512, 256))}
      >>> policy = jqx.presets.w8a8_dynamic("w")
      >>> found = jqx.explain(f, params, jnp.ones((32, 256)), plan=policy)
      >>> [(site.path, site.executed_as) for site in found.sites]
      [('w', 'codes'), ('v', 'float')]
      >>> found["v"][0].plan
      'left in float: no rule matches'
    """
    if plan is None:
        if affines is not None:
            raise fail(
                "explain",
                "`affines` has no use without a plan.",
                fix="pass the plan that these scales belong to, or only the converted function.",
            )
        return _explained(lowering(f, *args, target=target), _plain(args, target), None)
    check_plan("explain", plan, order="explain(f, *args, plan=plan)", policies=True)
    if isinstance(plan, Policy):
        plan = make_plan(f, plan)(*args)
    params, others = params_and_others(plan, args)
    weights = _with_codes(params, plan)
    quantized = convert(f, plan, "dynamic" if affines is None else affines)
    program = lowering(quantized, *insert_params(plan.params, weights, others), target=target)
    # Weights that quantize_params would leave as they are for this target, because of their views.
    laid_out = lay_out_weights(weights, plan, target)

    def unless_same(x: Any, y: Any) -> Any:
        return None if is_quantized(x) and is_quantized(y) and x.layout == y.layout else x

    changed = jax.tree.map(unless_same, weights, laid_out, is_leaf=is_quantized)
    plain = _plain(insert_params(plan.params, changed, others), target)
    planned = {operand.path for site in plan.sites for operand in site.operands}
    leaves = _quantized_leaves(by_argument(plan.params, params))
    outside = {path: scheme_of(q) for path, q in leaves if path not in planned}
    return _explained(program, plain, _named_by(plan, outside))


def _plain(args: Any, target: str) -> tuple[str, ...]:
    """Returns the paths of QTensors that would have another layout if packed for a target."""
    target_of("explain", target)
    return tuple(
        path.partition("/")[2]
        for path, q in _quantized_leaves(args)
        if pack_for(q, target).layout != q.layout
    )


def _quantized_leaves(tree: Any) -> list[tuple[str, QTensor]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)
    return [(keystr(path, simple=True, separator="/"), q) for path, q in flat if is_quantized(q)]


def _with_codes(params: Any, plan: Plan) -> Any:
    """Returns parameters with the weights of a plan as abstract QTensors, unless they are some."""
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        return params
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, params
    )
    return quantize_params(shapes, plan)


def _named_by(plan: Plan, schemes_outside: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Returns the name of each contraction of a plan, and the fields that say what it is."""
    named = [(x.name, x.path, x.op, scheme_of_site(x), x.label) for x in plan.sites]
    for i, skip in enumerate(plan.skipped):
        reason = f"left in float: {skip.reason}"
        if skip.path in schemes_outside:
            reason = f"quantized already: {schemes_outside[skip.path]}"
        label = plan.label_of_skipped(i)
        named.append((plan.name_of_skipped(i), skip.path, skip.op, reason, label))
    return named


def _explained(
    program: Lowering, plain: tuple[str, ...], named: list[tuple[str, ...]] | None
) -> Explanation:
    """Returns the explanation of a program, whose contractions are named by a plan or as they are
    in the program.
    """
    by_site: dict[str, list[CompiledContraction]] = {}
    for contraction in program.contractions:
        by_site.setdefault(contraction.site, []).append(contraction)
    if named is None:
        named = []
        for name in filter(None, by_site):
            path, _, op = name.rpartition(":")
            op = re.split("[#~]", op)[0]
            named.append((name, path, op, "", label_of(path, name, is_weight=False)))
    sites = []
    for name, path, op, scheme, label in named:
        parts = tuple(by_site.pop(name, ()))
        sites.append(Explained(path, op, scheme, _executed_as(op, parts), parts, label))
    others = tuple(c for parts in by_site.values() for c in parts)
    return Explanation(tuple(sites), others, program, plain)


def _executed_as(op: str, contractions: tuple[CompiledContraction, ...]) -> ExecutedAs:
    """Returns what a site does, from its contractions that read codes; others sum scales."""
    if not contractions:
        return "lookup" if op == "gather" else "gone"
    if any(c.widened for c in contractions):
        return "widened first"
    reading = [c for c in contractions if any(map(_are_codes, (c.dtypes, *c.reads)))]
    if not reading:
        return "float"
    return "codes" if all(map(_multiplies_codes, reading)) else "converted"


def _multiplies_codes(c: CompiledContraction) -> bool:
    """Returns whether both operands are codes; or integers, or elements read as codes, if no
    product for matrices runs.
    """
    if "by elements" in c.runs:
        kinds = zip(c.dtypes, c.reads, strict=True)
        return all(_are_codes((dtype, *reads)) or dtype[0] in "su" for dtype, reads in kinds)
    return all(_are_codes((dtype,)) for dtype in c.dtypes)


def _are_codes(dtypes: tuple[str, ...]) -> bool:
    return any(CODES.fullmatch(dtype) for dtype in dtypes)


def _cells(c: CompiledContraction) -> tuple[str, ...]:
    return multiplied(c), c.runs, "?" if c.times is None else str(c.times), remarks(c)
