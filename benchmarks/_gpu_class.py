"""The class of contraction that a compiled program amounts to, in a few words."""

from collections.abc import Iterator

from jqx._src.diagnostics.hlo import Instruction, Program, is_product, kernels
from jqx._src.diagnostics.lowering import KINDS


def launches(program: Program) -> int:
    """Returns how many kernels one run launches, counters of loops left out."""
    return sum(kernel.times or 1 for kernel in kernels(program) if kernel.instruction.dims)


def classify(program: Program, weight: str, size: int) -> str:
    """Says what runs a contraction: which implementation, on which operand types.

    Args:
      program: the compiled program.
      weight: the name of its argument that holds the weights.
      size: the number of elements of one weight. A kernel without a contraction that makes as many
        elements from the weights alone has copied or widened them in memory.

    Returns:
      For example "Triton s8 x s8 -> s32", "Triton bf16 x bf16 -> f32, reads s4", or "loop fusion,
      no tensor cores"; "; writes W as bf16" follows where a kernel does.
    """
    contractions: list[str] = []
    written: list[str] = []
    for kernel in kernels(program):
        it = kernel.instruction
        inner = next(filter(is_product, program.contractions(it)), None)
        if inner is not None:
            contractions.append(_describe(program, it, inner))
        elif {_argument(path) for path in kernel.origins} == {weight} and it.size == size:
            written.append(it.dtype)
    text = " + ".join(dict.fromkeys(contractions)) or "loop fusion, no tensor cores"
    return text + "".join(f"; writes W as {dtype}" for dtype in dict.fromkeys(written))


def _argument(path: str) -> str:
    return path.partition("[")[0].partition(".")[0]


def _describe(program: Program, kernel: Instruction, inner: Instruction) -> str:
    """Names the implementation and the types that it multiplies, and reads where these differ."""
    lhs_rhs = tuple(it.dtype for it in program.operands_of(inner))
    types = f"{' x '.join(lhs_rhs)} -> {inner.dtype}"
    if inner.opcode == "custom-call":
        return f"{inner.target} {types}"
    if kernel.opcode in ("dot", "convolution"):
        return f"{kernel.opcode} {types}"
    kind = kernel.attribute(r'"kind":"([^"]+)"') or kernel.attribute(r"kind=(\w+)") + " fusion"
    read = [dtype for dtype in _read(program, kernel) if dtype not in lhs_rhs]
    reads = "".join(f", reads {dtype}" for dtype in dict.fromkeys(read))
    return f"{KINDS.get(kind, kind).removesuffix(' fusion')} {types}{reads}"


def _read(program: Program, kernel: Instruction) -> Iterator[str]:
    """Yields the dtypes of the matrices that a fusion reads."""
    for body in program.called(kernel):
        for it in body:
            if it.opcode == "parameter" and len(it.dims) > 1:
                yield it.dtype
