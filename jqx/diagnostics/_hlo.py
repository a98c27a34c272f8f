"""What a compiled program runs, read from the text of its optimized HLO.

A kernel is an instruction that the runtime launches: a fusion, a library call, a copy. The text is
followed from the entry into loops, branches and calls. Of each value it is known which arguments of
the program it comes from, and whether a kernel wrote it from codes alone, in more bits than they
have: a widened copy of a weight.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

SHAPED = ("broadcast", "bitcast", "reshape", "transpose", "copy")
VIEWS = ("bitcast", "optimization-barrier", "copy-done", "fusion-done", "async-done")
NO_KERNEL = ("parameter", "constant", "after-all", "partition-id", "iota")
LIBRARY = re.compile(r"matmul|gemm|conv|triton|mosaic|cudnn|tpu_custom_call|dot", re.IGNORECASE)
MULTIPLIES = re.compile(r"/(dot_general|conv_general_dilated|ragged_dot\w*)$")
CODES = re.compile(r"[su][248]|f8e[45]\w*|f4e2m1fn|f6\w+")
"""Dtypes of codes; float8_e8m0fnu holds scales alone."""
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
    """The name scopes and the primitive that it was traced from; of an argument, its path."""

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
        """Returns the first group of the pattern in the line, or nothing."""
        found = re.search(pattern, self.line)
        return found[1] if found else ""


@dataclass(frozen=True)
class Value:
    """What is known of an array: the arguments it comes from, by path; whether codes are among
    them, and indices; and the instruction that wrote it as a widened copy of codes, if one did.
    """

    origins: frozenset[str] = frozenset()
    codes: str = ""
    counted: bool = False
    widened: Instruction | None = None

    @classmethod
    def of_argument(cls, it: Instruction) -> "Value":
        codes = it.dtype if CODES.fullmatch(it.dtype) else ""
        return cls(frozenset({it.op_name or it.name}), codes, it.dtype in ("s32", "u32", "s64"))

    @classmethod
    def union(cls, values: Sequence[Any]) -> "Value":
        """What is computed from all of them; the copies end here."""
        flat = list(_flat(values))
        origins = frozenset[str]().union(*(value.origins for value in flat))
        codes = min((value.codes for value in flat if value.codes), key=bits, default="")
        return cls(origins, codes, any(value.counted for value in flat))

    def written_by(self, it: Instruction) -> "Value":
        """Returns what a kernel without a contraction makes of it."""
        alone = self.codes and not self.counted and bits(it.dtype) > bits(self.codes)
        return replace(self, widened=it if alone and it.dtype != "pred" else None)


@dataclass(frozen=True)
class Kernel:
    """An instruction that is launched, how often, and where what it reads comes from.

    Attributes:
      instruction: as it stands.
      times: how often it runs; `None` where a loop runs until a condition fails.
      value: what it computes, from all it reads.
      reads: its operands, in order.
    """

    instruction: Instruction
    times: int | None
    value: Value
    reads: tuple[Any, ...] = ()

    @property
    def origins(self) -> frozenset[str]:
        """Paths of the arguments that it is computed from."""
        return self.value.origins

    @property
    def cycles(self) -> int | None:
        """What the compiler for TPUs expects one run to take; of memory it takes no account."""
        found = self.instruction.attribute(r'"estimated_cycles":"(\d+)"')
        return int(found) if found else None


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
        """The computation that an instruction stands in, by its line."""
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

    def contractions(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the contractions that an instruction is, calls or has fused: dots, convolutions,
        library calls, and sums of products of elements that one of them was written as.
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

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """Returns the first two operands, wherever the instruction stands."""
        named = self.named[self.home[instruction.line]]
        return [named[name] for name in instruction.operands[:2] if name in named]

    def called(self, instruction: Instruction) -> Iterator[list[Instruction]]:
        """Yields the computation that a fusion or a call runs."""
        if instruction.opcode in ("fusion", "fusion-start", "call", "async-start", "while"):
            name = instruction.attribute(CALLED)
            if name in self.computations:
                yield self.computations[name]

    def feeding(self, kernel: Instruction, source: Instruction) -> dict[int, Instruction]:
        """Returns which operands of a kernel a value inside of it is made from: their places, and
        the parameters of its computation that stand for them. What another contraction in the
        kernel reads is not among them.
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
        """Returns the name scopes of a contraction in a kernel. Where a compiler has rewritten it
        and dropped them, they are those of the first that has any, of what reads the result.
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

    def _follow(
        self, name: str, arguments: list[Any], times: int | None, found: list[Kernel]
    ) -> Any:
        """Adds the kernels of a computation; returns what is known of its result.

        Of an array that is a `Value`; of a tuple, a list.
        """
        known: dict[str, Any] = {}
        result: Any = Value()
        for it in self.computations[name]:
            read = [known[operand] for operand in it.operands if operand in known]
            called = it.attribute(CALLED)
            if it.opcode == "parameter":
                index = int(it.attribute(r"parameter\((\d+)\)"))
                result = arguments[index] if arguments else Value.of_argument(it)
            elif it.opcode == "tuple":
                result = read
            elif it.opcode == "get-tuple-element":
                index = int(it.attribute(r"index=(\d+)"))
                result = read[0][index] if isinstance(read[0], list) else read[0]
            elif it.opcode in VIEWS:
                result = read[0] if len(read) == 1 else read
            elif it.opcode == "copy-start":
                result = read[0]
            elif it.opcode == "while":
                trips = self._trips(it, self.named[name])
                inside = None if times is None or trips is None else times * trips
                result = _merge(read[0], self._follow(called, read, inside, found))
            elif it.opcode == "conditional":
                bodies = re.findall(r"%([\w.\-]+)", it.attribute(r"branch_computations=\{(.*?)\}"))
                bodies = bodies or [
                    it.attribute(rf"{which}_computation=%?([\w.\-]+)")
                    for which in ("true", "false")
                ]
                results = [
                    self._follow(body, [given], times, found)
                    for body, given in zip(bodies, read[1:], strict=False)
                ]
                result = results[0] if results else Value()
                for other in results[1:]:
                    result = _merge(result, other)
            elif it.opcode in ("call", "async-start") and called in self.computations:
                result = self._follow(called, read, times, found)
            elif it.opcode in NO_KERNEL:
                result = Value()
            else:
                if it.opcode == "fusion-start":  # its own shape begins with the operands
                    root = self.computations[called][-1]
                    it = replace(it, dtype=root.dtype, dims=root.dims)
                value = Value.union(read)
                contracts = any(True for _ in self.contractions(it))
                result = replace(value, codes="") if contracts else value.written_by(it)
                found.append(Kernel(it, times, value, tuple(read)))
            known[it.name] = result
        return result

    def _trips(self, loop: Instruction, here: Mapping[str, Instruction]) -> int | None:
        """Returns how often a loop runs: as the compiler wrote, or by the bound of a counter."""
        if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = loop.attribute(r"condition=%?([\w.\-]+)")
        root = (self.computations.get(condition) or [loop])[-1]
        sides = [self.named[condition][name] for name in root.operands if root is not loop]
        start = here.get(loop.operands[0])
        if "direction=LT" not in root.line or len(sides) != 2 or start is None:
            return None
        index = int(sides[0].attribute(r"index=(\d+)") or len(start.operands))
        if index >= len(start.operands):
            return None
        first = _number(here.get(start.operands[index]), here)
        bound = _number(sides[1], self.named[condition])
        step = self._step(loop.attribute(CALLED), index)
        if first is None or bound is None or not step:
            return None
        return max(-(-(bound - first) // step), 0)

    def _step(self, body: str, index: int) -> int | None:
        """Returns what the body of a loop adds to a counter."""
        named, root = self.named[body], self.computations[body][-1]
        it = named.get(root.operands[index]) if index < len(root.operands) else None
        if it is None or it.opcode != "add":
            return None
        before, added = (named.get(name) for name in it.operands)
        while before is not None and before.opcode in ("copy", "bitcast"):
            before = named.get(before.operands[0])
        kept = before is not None and before.attribute(r"get-tuple-element\(.*index=(\d+)")
        return _number(added, named) if kept == str(index) else None


def is_product(instruction: Instruction) -> bool:
    """Whether an instruction is itself a contraction: a dot, a convolution, a call of a library."""
    if instruction.opcode == "custom-call":
        return LIBRARY.search(instruction.target) is not None
    return instruction.opcode in ("dot", "convolution")


def bits(dtype: str) -> int:
    """Returns the bits of an element, as HLO names its dtype."""
    return 8 if dtype == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", dtype) or 0)


def _number(it: Instruction | None, named: Mapping[str, Instruction]) -> int | None:
    """Reads an integer constant, through copies of it."""
    while it is not None and it.opcode in ("copy", "bitcast"):
        it = named.get(it.operands[0])
    found = it.attribute(r" constant\((-?\d+)\)") if it is not None else ""
    return int(found) if found else None


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


def _flat(values: Any) -> Iterator[Value]:
    if isinstance(values, Value):
        yield values
    else:
        for value in values:
            yield from _flat(value)


def _merge(a: Any, b: Any) -> Any:
    """What either of two may be; a copy that one of them is counts."""
    if isinstance(a, list) and isinstance(b, list):
        return [_merge(x, y) for x, y in zip(a, b, strict=False)]
    both = Value.union([a, b])
    copies = [value.widened for value in _flat([a, b]) if value.widened is not None]
    return replace(both, widened=copies[0] if copies else None)
