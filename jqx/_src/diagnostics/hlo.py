"""Parses a compiled program from the text of its optimized HLO."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import jax

SHAPED = ("broadcast", "bitcast", "reshape", "transpose", "copy")
LIBRARY = re.compile(
    r"matmul|gemm|conv|triton|mosaic|cudnn|tpu_custom_call|dot|jqx_cpu_(\w*product|rows)",
    re.IGNORECASE,
)
MULTIPLIES = re.compile(r"/(dot_general|conv_general_dilated|ragged_dot\w*)$")
CODES = re.compile(r"[su][248]|f8e[45]\w*|f4e2m1fn|f6\w+")
"""Dtypes of codes; float8_e8m0fnu only holds scales."""
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
CALLED = r"(?:calls|to_apply|body)=%?([\w.\-]+)"


@dataclass(frozen=True)
class Instruction:
    """One line of HLO; `dims` and `dtype` are those of the first array it returns, and `home` is
    the computation that it is in.
    """

    name: str
    opcode: str
    dtype: str
    dims: tuple[int, ...]
    operands: tuple[str, ...]
    line: str
    home: str
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

    @property
    def position(self) -> int:
        """The position of a parameter."""
        return int(self.attribute(r"parameter\((\d+)\)"))

    @property
    def branches(self) -> list[str]:
        """The computations that a conditional chooses from."""
        listed = self.attribute(r"branch_computations=\{(.*?)\}")
        return re.findall(r"%([\w.\-]+)", listed) or [
            self.attribute(rf"{which}_computation=%?([\w.\-]+)") for which in ("true", "false")
        ]

    def attribute(self, pattern: str) -> str:
        """Returns the first group of the pattern in the line, or an empty string."""
        match = re.search(pattern, self.line)
        return match[1] if match else ""


@dataclass(frozen=True)
class Program:
    """The computations of a module, by name, each a list of instructions in order."""

    computations: Mapping[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def named(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name."""
        return {
            name: {instruction.name: instruction for instruction in body}
            for name, body in self.computations.items()
        }

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """The fusion that runs a computation."""
        return {
            instruction.attribute(CALLED): instruction
            for body in self.computations.values()
            for instruction in body
            if instruction.opcode == "fusion"
        }

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Parses the result of `compiled.as_text()`."""
        computations: dict[str, list[Instruction]] = {}
        entry, home = "", ""
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                home = head[2]
                computations[home] = []
                entry = home if head[1] else entry
            elif instruction := _instruction(line, home):
                computations[home].append(instruction)
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
            inner = [product for part in body for product in self.contractions(part)]
            yield from inner or self._sums(body)

    def _sums(self, body: Sequence[Instruction]) -> Iterator[Instruction]:
        """Yields the products of elements that are summed as a contraction, under its name."""
        named = {instruction.name: instruction for instruction in body}
        for instruction in body:
            if instruction.opcode == "reduce":
                source = named.get(instruction.operands[0])
                while source is not None and source.opcode in ("convert", *SHAPED):
                    source = named.get(source.operands[0])
                if source is not None and source.opcode == "multiply":
                    op_name = next(
                        filter(MULTIPLIES.search, (instruction.op_name, source.op_name)), ""
                    )
                    if op_name:
                        yield replace(source, op_name=op_name)

    def operands_of(self, instruction: Instruction, start: int = 0) -> list[Instruction]:
        """Returns two operands from `first` on, wherever the instruction is."""
        named = self.named[instruction.home]
        two = instruction.operands[start : start + 2]
        return [named[name] for name in two if name in named]

    def leading(self, instruction: Instruction, dtype: str) -> int:
        """Returns how many of the first operands have a dtype, if others follow."""
        named = self.named[instruction.home]
        dtypes = [named[name].dtype if name in named else "" for name in instruction.operands]
        count = next((i for i, operand_dtype in enumerate(dtypes) if operand_dtype != dtype), 0)
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
        parameters: dict[int, Instruction] = {}
        todo, visited = [source], set()
        while todo:
            instruction = todo.pop()
            if instruction in visited:
                continue
            visited.add(instruction)
            home, named = instruction.home, self.named[instruction.home]
            if any(self.contractions(instruction)):
                continue
            if instruction.opcode != "parameter":
                todo += [named[name] for name in instruction.operands if name in named]
                continue
            index = instruction.position
            if home == outermost:
                parameters[index] = instruction
            elif home in self.callers:
                caller = self.callers[home]
                todo.append(self.named[caller.home][caller.operands[index]])
        return parameters

    def name_of(self, kernel: Instruction, inner: Instruction) -> str:
        """Returns the name scopes of a contraction in a kernel. If a compiler rewrote it and
        dropped them, they are the first ones found among the users of the result.
        """
        if inner.op_name or kernel.op_name:
            return inner.op_name or kernel.op_name
        reading = {kernel.name}
        for instruction in self.computations[kernel.home]:  # in order
            if reading & {*instruction.operands}:
                if instruction.op_name:
                    return instruction.op_name
                reading.add(instruction.name)
        return ""


def is_product(instruction: Instruction) -> bool:
    """Returns whether an instruction is a contraction: a dot, convolution or library call."""
    if instruction.opcode == "custom-call":
        return LIBRARY.search(instruction.target) is not None
    return instruction.opcode in ("dot", "scaled-dot", "convolution")


def bits(dtype: str) -> int:
    """Returns the bits of an element, from the HLO name of its dtype."""
    return 8 if dtype == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", dtype) or 0)


def _instruction(line: str, home: str) -> Instruction | None:
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
        home,
        re.sub(r"\\(.)", r"\1", name[1]) if (name := OP_NAME.search(line)) else "",
    )


# The kernels that a compiled program launches.
#
# A kernel is an instruction that the runtime launches: a fusion, a library call, a copy. A program
# is followed from its entry into loops, branches and calls. For each value it is recorded which
# arguments of the program it comes from, and whether a kernel wrote it from codes only, with more
# bits than the codes: a widened copy of a weight.


@dataclass(frozen=True)
class Value:
    """Provenance of an array: the paths of the arguments it comes from; whether these include
    codes, and indices; and the instruction that wrote it as a widened copy of codes, if any.
    """

    origins: frozenset[str] = frozenset()
    codes: str = ""
    counted: bool = False
    widened: Instruction | None = None

    @classmethod
    def of_argument(cls, parameter: Instruction) -> "Value":
        codes = parameter.dtype if CODES.fullmatch(parameter.dtype) else ""
        return cls(
            frozenset({parameter.op_name or parameter.name}),
            codes,
            parameter.dtype in ("s32", "u32", "s64"),
        )

    @classmethod
    def union(cls, values: Sequence[Any]) -> "Value":
        """Returns the provenance of a value computed from all of them; copies end here."""
        flat: list[Value] = jax.tree.leaves(values)
        origins = frozenset[str]().union(*(value.origins for value in flat))
        codes = min((value.codes for value in flat if value.codes), key=bits, default="")
        return cls(origins, codes, any(value.counted for value in flat))


@dataclass(frozen=True)
class Kernel:
    """An instruction that is launched, how often, and the provenance of its operands.

    Attributes:
      instruction: the instruction.
      times: how often it runs; `None` in a loop that runs until a condition fails.
      origins: paths of the arguments that it is computed from.
      reads: its operands, in order.
    """

    instruction: Instruction
    times: int | None
    origins: frozenset[str]
    reads: tuple[Any, ...]

    @property
    def cycles(self) -> int | None:
        """Cycles that the TPU compiler estimates for one run, without memory accesses."""
        cycles = self.instruction.attribute(r'"estimated_cycles":"(\d+)"')
        return int(cycles) if cycles else None


def kernels(program: Program) -> list[Kernel]:
    """Returns the kernels in order; those of a loop once, with the number of its iterations."""
    launched: list[Kernel] = []
    _follow(program, program.entry, [], 1, launched)
    return launched


def _follow(
    program: Program, name: str, arguments: list[Any], times: int | None, launched: list[Kernel]
) -> Any:
    """Follows a computation, and collects its kernels. Returns the provenance of its result: a
    `Value` for an array, a list for a tuple.
    """
    values: dict[str, Any] = {}
    result: Any = Value()
    for instruction in program.computations[name]:
        read = [values[operand] for operand in instruction.operands if operand in values]
        called = instruction.attribute(CALLED)
        match instruction.opcode:
            case "parameter":
                result = Value.of_argument(instruction)
                if arguments:
                    result = arguments[instruction.position]
            case "constant" | "iota" | "after-all" | "partition-id":
                result = Value()
            case "get-tuple-element":
                elements = read[0]
                index = int(instruction.attribute(r"index=(\d+)"))
                result = elements[index] if isinstance(elements, list) else elements
            case "copy-start":
                result = read[0]
            case "bitcast" | "optimization-barrier" | "copy-done" | "fusion-done" | "async-done":
                result = read[0] if len(read) == 1 else read
            case "tuple":
                result = read
            case "async-start" | "call" if called in program.computations:
                result = _follow(program, called, read, times, launched)
            case "while":
                trips = _trips(program, instruction, program.named[name])
                total = None if times is None or trips is None else times * trips
                result = _merge(read[0], _follow(program, called, read, total, launched))
            case "conditional":
                pairs = zip(instruction.branches, read[1:], strict=False)
                results = [_follow(program, x, [y], times, launched) for x, y in pairs]
                result = reduce(_merge, results) if results else Value()
            case _:
                result = _launch(program, instruction, read, times, launched)
        values[instruction.name] = result
    return result


def _launch(
    program: Program,
    instruction: Instruction,
    read: list[Any],
    times: int | None,
    launched: list[Kernel],
) -> Value:
    """Collects a kernel, and returns the provenance of its result."""
    if instruction.opcode == "fusion-start":  # its own shape starts with the operands
        root = program.computations[instruction.attribute(CALLED)][-1]
        instruction = replace(instruction, dtype=root.dtype, dims=root.dims)
    value = Value.union(read)
    launched.append(Kernel(instruction, times, value.origins, tuple(read)))
    if any(program.contractions(instruction)):
        return replace(value, codes="")
    is_wider = value.codes and not value.counted and bits(instruction.dtype) > bits(value.codes)
    return replace(value, widened=instruction if is_wider and instruction.dtype != "pred" else None)


def _trips(program: Program, loop: Instruction, named: Mapping[str, Instruction]) -> int | None:
    """Returns how often a loop runs: as written by the compiler, or by the bound of a counter."""
    if count := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(count)
    condition = loop.attribute(r"condition=%?([\w.\-]+)")
    root = (program.computations.get(condition) or [loop])[-1]
    sides = [program.named[condition][name] for name in root.operands if root is not loop]
    start = named.get(loop.operands[0])
    if "direction=LT" not in root.line or len(sides) != 2 or start is None:
        return None
    index = int(sides[0].attribute(r"index=(\d+)") or len(start.operands))
    if index >= len(start.operands):
        return None
    initial = _number(named.get(start.operands[index]), named)
    bound = _number(sides[1], program.named[condition])
    step = _step(program, loop.attribute(CALLED), index)
    if initial is None or bound is None or not step:
        return None
    return max(-(-(bound - initial) // step), 0)


def _step(program: Program, body: str, index: int) -> int | None:
    """Returns the increment that the body of a loop adds to a counter."""
    named, root = program.named[body], program.computations[body][-1]
    addition = named.get(root.operands[index]) if index < len(root.operands) else None
    if addition is None or addition.opcode != "add":
        return None
    counter, added = (named.get(name) for name in addition.operands)
    while counter is not None and counter.opcode in ("copy", "bitcast"):
        counter = named.get(counter.operands[0])
    counter_index = counter is not None and counter.attribute(r"get-tuple-element\(.*index=(\d+)")
    return _number(added, named) if counter_index == str(index) else None


def _number(constant: Instruction | None, named: Mapping[str, Instruction]) -> int | None:
    """Reads an integer constant, through copies of it."""
    while constant is not None and constant.opcode in ("copy", "bitcast"):
        constant = named.get(constant.operands[0])
    digits = constant.attribute(r" constant\((-?\d+)\)") if constant is not None else ""
    return int(digits) if digits else None


def _merge(a: Any, b: Any) -> Any:
    """Returns the union of two values; it is a copy if one of them is."""
    if isinstance(a, list) and isinstance(b, list):
        return [_merge(x, y) for x, y in zip(a, b, strict=False)]
    union = Value.union([a, b])
    copies = [value.widened for value in jax.tree.leaves([a, b]) if value.widened is not None]
    return replace(union, widened=copies[0] if copies else None)
