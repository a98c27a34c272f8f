"""Parses a compiled program from the text of its optimized HLO."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

SHAPED = ("broadcast", "bitcast", "reshape", "transpose", "copy")
LIBRARY = re.compile(
    r"matmul|gemm|conv|triton|mosaic|cudnn|tpu_custom_call|dot|jqx_cpu_\w*product", re.IGNORECASE
)
MULTIPLIES = re.compile(r"/(dot_general|conv_general_dilated|ragged_dot\w*)$")
CODES = re.compile(r"[su][248]|f8e[45]\w*|f4e2m1fn|f6\w+")
"""Dtypes of codes; float8_e8m0fnu only holds scales."""
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
CALLED = r"(?:calls|to_apply|body)=%?([\w.\-]+)"


@dataclass(frozen=True)
class Instruction:
    """One line of HLO; `dims` and `dtype` are those of the first array it returns."""

    name: str
    opcode: str
    dtype: str
    dims: tuple[int, ...]
    operands: tuple[str, ...]
    line: str
    op_name: str = ""
    """The name scopes and the primitive that it was traced from; for an argument, its path."""

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def type(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def target(self) -> str:
        """The function that a custom call calls."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """Returns the first group of the pattern in the line, or an empty string."""
        found = re.search(pattern, self.line)
        return found[1] if found else ""


@dataclass(frozen=True)
class Program:
    """The computations of a module, by name, each a list of instructions in order."""

    computations: Mapping[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def named(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name."""
        return {name: {it.name: it for it in body} for name, body in self.computations.items()}

    @functools.cached_property
    def home(self) -> dict[str, str]:
        """The name of the computation that contains an instruction, by its line."""
        return {it.line: name for name, body in self.computations.items() for it in body}

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """The fusion that runs a computation."""
        return {
            it.attribute(CALLED): it
            for body in self.computations.values()
            for it in body
            if it.opcode == "fusion"
        }

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Parses the result of `compiled.as_text()`."""
        computations: dict[str, list[Instruction]] = {}
        entry, current = "", []
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
            elif instruction := _instruction(line):
                current.append(instruction)
        return cls(computations, entry)

    def contractions(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the contractions that an instruction is, calls or has fused: dots, convolutions,
        library calls, and sums of products of elements into which the compiler rewrote one of
        these.
        """
        if is_product(instruction):
            yield instruction
            return
        for body in self.called(instruction):
            inner = [found for it in body for found in self.contractions(it)]
            yield from inner or self._sums(body)

    def _sums(self, body: Sequence[Instruction]) -> Iterator[Instruction]:
        """Yields the products of elements that are summed as a contraction, under its name."""
        named = {it.name: it for it in body}
        for it in body:
            if it.opcode == "reduce":
                source = named.get(it.operands[0])
                while source is not None and source.opcode in ("convert", *SHAPED):
                    source = named.get(source.operands[0])
                if source is not None and source.opcode == "multiply":
                    op_name = next(filter(MULTIPLIES.search, (it.op_name, source.op_name)), "")
                    if op_name:
                        yield replace(source, op_name=op_name)

    def operands_of(self, instruction: Instruction, first: int = 0) -> list[Instruction]:
        """Returns two operands from `first` on, wherever the instruction is."""
        named = self.named[self.home[instruction.line]]
        two = instruction.operands[first : first + 2]
        return [named[name] for name in two if name in named]

    def leading(self, instruction: Instruction, dtype: str) -> int:
        """Returns how many of the first operands have a dtype, if others follow."""
        named = self.named[self.home[instruction.line]]
        dtypes = [named[name].dtype if name in named else "" for name in instruction.operands]
        count = next((i for i, found in enumerate(dtypes) if found != dtype), 0)
        return count if count + 1 < len(dtypes) else 0

    def called(self, instruction: Instruction) -> Iterator[list[Instruction]]:
        """Yields the computation that a fusion or a call runs."""
        if instruction.opcode in ("fusion", "fusion-start", "call", "async-start", "while"):
            name = instruction.attribute(CALLED)
            if name in self.computations:
                yield self.computations[name]

    def feeding(self, kernel: Instruction, source: Instruction) -> dict[int, Instruction]:
        """Returns the operands of a kernel that a value inside it is made from: their indices, and
        the parameters of its computation for them. Operands that only another contraction in the
        kernel reads are left out.
        """
        outermost = kernel.attribute(CALLED)
        found: dict[int, Instruction] = {}
        todo, seen = [source], set()
        while todo:
            it = todo.pop()
            if it.line in seen:
                continue
            seen.add(it.line)
            home = self.home[it.line]
            named = self.named[home]
            if any(True for _ in self.contractions(it)):
                continue
            if it.opcode != "parameter":
                todo += [named[name] for name in it.operands if name in named]
                continue
            place = int(it.attribute(r"parameter\((\d+)\)"))
            if home == outermost:
                found[place] = it
            elif home in self.callers:
                caller = self.callers[home]
                todo.append(self.named[self.home[caller.line]][caller.operands[place]])
        return found

    def name_of(self, kernel: Instruction, inner: Instruction) -> str:
        """Returns the name scopes of a contraction in a kernel. If a compiler rewrote it and
        dropped them, they are the first ones found among the users of the result.
        """
        if inner.op_name or kernel.op_name:
            return inner.op_name or kernel.op_name
        reading = {kernel.name}
        for it in self.computations[self.home[kernel.line]]:  # in order
            if reading & {*it.operands}:
                if it.op_name:
                    return it.op_name
                reading.add(it.name)
        return ""


def is_product(instruction: Instruction) -> bool:
    """Returns whether an instruction is a contraction: a dot, convolution or library call."""
    if instruction.opcode == "custom-call":
        return LIBRARY.search(instruction.target) is not None
    return instruction.opcode in ("dot", "convolution")


def bits(dtype: str) -> int:
    """Returns the bits of an element, from the HLO name of its dtype."""
    return 8 if dtype == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", dtype) or 0)


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
        re.sub(r"\\(.)", r"\1", name[1]) if (name := OP_NAME.search(line)) else "",
    )
