"""One contraction of a compiled program: its operands, what runs it, what came before it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ._hlo import SHAPED, Instruction, Program, bits
from ._hlo_kernels import Kernel, kernels

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


@dataclass(frozen=True)
class Contraction:
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


def contractions_of(program: Program, platform: str) -> list[Contraction]:
    """Returns the contractions of a program for `"cpu"`, `"cuda"` or `"tpu"`, kernel by kernel."""
    return [
        _read(program, kernel, inner, platform)
        for kernel in kernels(program)
        for inner in program.contractions(kernel.instruction)
    ]


def _read(program: Program, kernel: Kernel, inner: Instruction, platform: str) -> Contraction:
    # The first operands of kernels are the matrix of each tile, or which tokens count.
    first = program.leading(inner, "s32") if inner.opcode == "custom-call" else 0
    operands = program.operands_of(inner, first)
    if inner.opcode == "multiply":
        operands = [_before_broadcast(program, it) for it in operands]
    if inner is kernel.instruction:
        fed: list[Fed] = [{place: it} for place, it in enumerate(operands, first)]
    else:
        fed = [program.feeding(kernel.instruction, it) for it in operands]
    reads = tuple(
        tuple(dict.fromkeys(it.dtype for it in given.values() if _is_large(it, operand)))
        for given, operand in zip(fed, operands, strict=True)
    )
    op_name = program.name_of(kernel.instruction, inner)
    site = re.search(SCOPE, op_name)
    return Contraction(
        site=site[1] if site else "",
        op_name=op_name,
        operands=tuple(_multiplied(it, op_name) for it in operands),
        result=inner.type,
        reads=reads,
        runs=_runs(kernel.instruction, inner),
        widened=tuple(dict.fromkeys(_widened(kernel, operands, fed))),
        left=_left(kernel.instruction, inner, operands, reads, platform),
        times=kernel.times,
        cycles=kernel.cycles,
        kernel=kernel.instruction.name,
    )


def _multiplied(it: Instruction, op_name: str) -> str:
    """Returns the type of an operand at its multiplication."""
    found = MULTIPLIES.search(op_name)
    return it.type if found is None else f"{found[1]}{it.type[len(it.dtype) :]}"


def _before_broadcast(program: Program, it: Instruction) -> Instruction:
    """Returns the value that a broadcast repeats for a product of elements."""
    named = program.named[program.home[it.line]]
    while it.opcode in SHAPED and it.operands[0] in named:
        it = named[it.operands[0]]
    return it


def _is_large(it: Instruction, operand: Instruction) -> bool:
    return it.size * SHARE > operand.size


def _widened(kernel: Kernel, operands: Sequence[Instruction], fed: Sequence[Fed]) -> Iterator[str]:
    for operand, given in zip(operands, fed, strict=True):
        for place in given:
            value = kernel.reads[place]
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
    platform: str,
) -> str:
    if platform == "cpu" or inner.opcode == "custom-call":
        return ""
    if inner.opcode == "multiply":
        return "elements are multiplied and summed"
    if platform == "cuda" and kernel.attribute(r"kind=(kLoop|kInput)"):
        return f"a loop multiplies {operands[0].dtype}"
    widest = max((bits(dtype) for given in reads for dtype in given), default=32)
    if operands[0].dtype == "f32" and widest < 32:
        read = " x ".join("+".join(given) for given in reads)
        return f"{read} is multiplied as f32"
    return ""
