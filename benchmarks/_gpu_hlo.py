"""What a compiled program runs: its kernels, and the class of contraction they amount to.

Reads the text of optimized HLO. A kernel is an instruction that XLA launches: a fusion, a library
call, a copy. The text is followed from the entry into loops and calls, and of each value it is
known which arguments of the program it comes from.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

VIEWS = ("bitcast", "optimization-barrier", "copy-done", "fusion-done", "async-done")
NO_KERNEL = ("parameter", "constant", "after-all", "partition-id", "iota")
LIBRARY = re.compile(r"matmul|gemm|conv|triton|mosaic|cudnn")
KINDS = {  # of fusions
    "__triton_gemm": "Triton",
    "__triton_nested_gemm_fusion": "Triton",
    "__cudnn$fusion": "cuDNN fusion",
}


@dataclass(frozen=True)
class Instruction:
    """One line of HLO; `dims` and `dtype` are those of the first array it returns."""

    name: str
    opcode: str
    dtype: str
    dims: tuple[int, ...]
    operands: tuple[str, ...]
    line: str

    @property
    def size(self) -> int:
        return prod(self.dims)

    def attribute(self, pattern: str) -> str:
        """Returns the first group of the pattern in the line, or nothing."""
        found = re.search(pattern, self.line)
        return found[1] if found else ""


@dataclass(frozen=True)
class Kernel:
    """An instruction that is launched, how often, and where what it reads comes from."""

    instruction: Instruction
    times: int
    origins: frozenset[str]


@dataclass(frozen=True)
class Program:
    """The computations of a module, by name, each a list of instructions in order."""

    computations: Mapping[str, list[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Reads what `compiled.as_text()` returns."""
        computations: dict[str, list[Instruction]] = {}
        entry, current = "", []
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
            elif instruction := _instruction(line):
                current.append(instruction)
        return cls(computations, entry)

    def kernels(self) -> list[Kernel]:
        """Returns the kernels in order; those of a loop once, with the times that it runs."""
        found: list[Kernel] = []
        self._follow(self.entry, [], 1, found)
        return found

    def contraction(self, instruction: Instruction) -> Instruction | None:
        """Returns the dot or convolution that an instruction is, calls or has fused."""
        if instruction.opcode in ("dot", "convolution"):
            return instruction
        if instruction.opcode == "custom-call":
            return instruction if LIBRARY.search(_target(instruction)) else None
        for called in self._called(instruction):
            for inner in called:
                if (found := self.contraction(inner)) is not None:
                    return found
        return None

    def operand_dtypes(self, instruction: Instruction) -> tuple[str, ...]:
        """Returns the dtypes of the first two operands, wherever the instruction stands."""
        for body in self.computations.values():
            if instruction in body:
                dtypes = {other.name: other.dtype for other in body}
                return tuple(dtypes.get(name, "?") for name in instruction.operands[:2])
        return ()

    def _called(self, instruction: Instruction) -> Iterator[list[Instruction]]:
        name = instruction.attribute(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
        if name in self.computations:
            yield self.computations[name]

    def _follow(self, name: str, arguments: list[Any], times: int, found: list[Kernel]) -> Any:
        """Adds the kernels of a computation; returns the origin of its result.

        The origin of an array is a set of names; that of a tuple, a list of origins.
        """
        origins: dict[str, Any] = {}
        result: Any = frozenset()
        for it in self.computations[name]:
            read = [origins[operand] for operand in it.operands if operand in origins]
            called = it.attribute(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
            if it.opcode == "parameter":
                index = int(it.attribute(r"parameter\((\d+)\)"))
                argument = frozenset({it.attribute(r'op_name="(\w+)')})
                result = arguments[index] if arguments else argument
            elif it.opcode == "tuple":
                result = read
            elif it.opcode == "get-tuple-element":
                index = int(it.attribute(r"index=(\d+)"))
                result = read[0][index] if isinstance(read[0], list) else read[0]
            elif it.opcode in VIEWS:
                result = read[0] if len(read) == 1 else read
            elif it.opcode == "while":
                trips = int(it.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)
                self._follow(called, read, times * trips, found)
                result = read[0]
            elif it.opcode in ("call", "async-start"):
                result = self._follow(called, read, times, found)
            elif it.opcode in NO_KERNEL:
                result = frozenset()
            else:
                result = _union(read)
                if it.opcode == "fusion-start":  # its own shape begins with the operands
                    root = self.computations[called][-1]
                    it = replace(it, dtype=root.dtype, dims=root.dims)
                found.append(Kernel(it, times, result))
            origins[it.name] = result
        return result


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line)
    if head is None or (call := re.search(r"\s([a-z][\w\-]*)\((.*)", head[2])) is None:
        return None
    shape = re.match(r"\(*(\w+)\[([\d,]*)\]", head[2])
    dtype, dims = (shape[1], shape[2]) if shape else ("", "")
    return Instruction(
        head[1],
        call[1],
        dtype,
        tuple(int(n) for n in dims.split(",") if n),
        tuple(re.findall(r"%([\w.\-]+)", call[2].partition(")")[0])),
        line,
    )


def _target(instruction: Instruction) -> str:
    return instruction.attribute(r'custom_call_target="([^"]*)"')


def _union(origins: Sequence[Any]) -> frozenset[str]:
    names: frozenset[str] = frozenset()
    for origin in origins:
        names |= _union(origin) if isinstance(origin, list) else origin
    return names


def launches(program: Program) -> int:
    """Returns how many kernels one run launches, counters of loops left out."""
    return sum(kernel.times for kernel in program.kernels() if kernel.instruction.dims)


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
    for kernel in program.kernels():
        it = kernel.instruction
        if (inner := program.contraction(it)) is not None:
            contractions.append(_describe(program, it, inner))
        elif kernel.origins == {weight} and it.size == size:
            written.append(it.dtype)
    text = " + ".join(dict.fromkeys(contractions)) or "loop fusion, no tensor cores"
    return text + "".join(f"; writes W as {dtype}" for dtype in dict.fromkeys(written))


def _describe(program: Program, kernel: Instruction, inner: Instruction) -> str:
    """Names the implementation and the types that it multiplies, and reads where these differ."""
    lhs_rhs = program.operand_dtypes(inner)
    types = f"{' x '.join(lhs_rhs)} -> {inner.dtype}"
    if inner.opcode == "custom-call":
        return f"{_target(inner)} {types}"
    if kernel.opcode in ("dot", "convolution"):
        return f"{kernel.opcode} {types}"
    kind = kernel.attribute(r'"kind":"([^"]+)"') or kernel.attribute(r"kind=(\w+)") + " fusion"
    read = [dtype for dtype in _read(program, kernel) if dtype not in lhs_rhs]
    reads = "".join(f", reads {dtype}" for dtype in dict.fromkeys(read))
    return f"{KINDS.get(kind, kind)} {types}{reads}"


def _read(program: Program, kernel: Instruction) -> Iterator[str]:
    """Yields the dtypes of the matrices that a fusion reads."""
    called = kernel.attribute(r"calls=%?([\w.\-]+)")
    for it in program.computations.get(called, ()):
        if it.opcode == "parameter" and len(it.dims) > 1:
            yield it.dtype
