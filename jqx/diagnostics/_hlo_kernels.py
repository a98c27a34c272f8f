"""The kernels that a compiled program launches.

A kernel is an instruction that the runtime launches: a fusion, a library call, a copy. A program is
followed from its entry into loops, branches and calls. For each value it is recorded which
arguments of the program it comes from, and whether a kernel wrote it from codes only, with more
bits than the codes: a widened copy of a weight.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from ._hlo import CALLED, CODES, Instruction, Program, bits


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
    def of_argument(cls, it: Instruction) -> "Value":
        codes = it.dtype if CODES.fullmatch(it.dtype) else ""
        return cls(frozenset({it.op_name or it.name}), codes, it.dtype in ("s32", "u32", "s64"))

    @classmethod
    def union(cls, values: Sequence[Any]) -> "Value":
        """Returns the provenance of a value computed from all of them; copies end here."""
        flat = list(_flat(values))
        origins = frozenset[str]().union(*(value.origins for value in flat))
        codes = min((value.codes for value in flat if value.codes), key=bits, default="")
        return cls(origins, codes, any(value.counted for value in flat))

    def written_by(self, it: Instruction) -> "Value":
        """Returns the provenance of the result of a kernel without a contraction."""
        alone = self.codes and not self.counted and bits(it.dtype) > bits(self.codes)
        return replace(self, widened=it if alone and it.dtype != "pred" else None)


@dataclass(frozen=True)
class Kernel:
    """An instruction that is launched, how often, and the provenance of its operands.

    Attributes:
      instruction: the instruction.
      times: how often it runs; `None` in a loop that runs until a condition fails.
      value: provenance of its result, from all operands.
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
        """Cycles that the TPU compiler estimates for one run, without memory accesses."""
        found = self.instruction.attribute(r'"estimated_cycles":"(\d+)"')
        return int(found) if found else None


def kernels(program: Program) -> list[Kernel]:
    """Returns the kernels in order; those of a loop once, with the number of its iterations."""
    walk = _Walk(program, [])
    walk.follow(program.entry, [], 1)
    return walk.found


class _Step(NamedTuple):
    """An instruction during the walk, with the provenance of its operands: a `Value` for an array,
    a list for a tuple. The other fields are those of the computation that contains it.
    """

    it: Instruction
    read: list[Any]
    arguments: list[Any]
    times: int | None
    named: Mapping[str, Instruction]

    @property
    def called(self) -> str:
        """The computation that it calls."""
        return self.it.attribute(CALLED)


@dataclass(frozen=True)
class _Walk:
    """Follows a program and collects its kernels, with a method for each kind of opcode."""

    program: Program
    found: list[Kernel]

    def follow(self, name: str, arguments: list[Any], times: int | None) -> Any:
        """Follows a computation; returns the provenance of its result."""
        known: dict[str, Any] = {}
        result: Any = Value()
        named = self.program.named[name]
        for it in self.program.computations[name]:
            read = [known[operand] for operand in it.operands if operand in known]
            visit = _OPCODES.get(it.opcode, _Walk.launch)
            result = known[it.name] = visit(self, _Step(it, read, arguments, times, named))
        return result

    def parameter(self, step: _Step) -> Any:
        index = int(step.it.attribute(r"parameter\((\d+)\)"))
        return step.arguments[index] if step.arguments else Value.of_argument(step.it)

    def nothing(self, step: _Step) -> Any:
        return Value()

    def all_read(self, step: _Step) -> Any:
        return step.read

    def first_read(self, step: _Step) -> Any:
        return step.read[0]

    def view(self, step: _Step) -> Any:
        return step.read[0] if len(step.read) == 1 else step.read

    def element(self, step: _Step) -> Any:
        whole = step.read[0]
        index = int(step.it.attribute(r"index=(\d+)"))
        return whole[index] if isinstance(whole, list) else whole

    def call(self, step: _Step) -> Any:
        if step.called not in self.program.computations:
            return self.launch(step)
        return self.follow(step.called, step.read, step.times)

    def loop(self, step: _Step) -> Any:
        trips = _trips(self.program, step.it, step.named)
        times = None if step.times is None or trips is None else step.times * trips
        return _merge(step.read[0], self.follow(step.called, step.read, times))

    def branches(self, step: _Step) -> Any:
        listed = step.it.attribute(r"branch_computations=\{(.*?)\}")
        bodies = re.findall(r"%([\w.\-]+)", listed) or [
            step.it.attribute(rf"{which}_computation=%?([\w.\-]+)") for which in ("true", "false")
        ]
        results = [
            self.follow(body, [given], step.times)
            for body, given in zip(bodies, step.read[1:], strict=False)
        ]
        return reduce(_merge, results) if results else Value()

    def launch(self, step: _Step) -> Any:
        it = step.it
        if it.opcode == "fusion-start":  # its own shape starts with the operands
            root = self.program.computations[step.called][-1]
            it = replace(it, dtype=root.dtype, dims=root.dims)
        value = Value.union(step.read)
        self.found.append(Kernel(it, step.times, value, tuple(step.read)))
        contracts = any(True for _ in self.program.contractions(it))
        return replace(value, codes="") if contracts else value.written_by(it)


_OPCODES: dict[str, Callable[[_Walk, _Step], Any]] = {
    "parameter": _Walk.parameter,
    "constant": _Walk.nothing,
    "iota": _Walk.nothing,
    "after-all": _Walk.nothing,
    "partition-id": _Walk.nothing,
    "tuple": _Walk.all_read,
    "get-tuple-element": _Walk.element,
    "bitcast": _Walk.view,
    "optimization-barrier": _Walk.view,
    "copy-start": _Walk.first_read,
    "copy-done": _Walk.view,
    "fusion-done": _Walk.view,
    "async-done": _Walk.view,
    "async-start": _Walk.call,
    "call": _Walk.call,
    "while": _Walk.loop,
    "conditional": _Walk.branches,
}
"""Opcodes that are not launched; every other opcode is a kernel."""


def _trips(program: Program, loop: Instruction, here: Mapping[str, Instruction]) -> int | None:
    """Returns how often a loop runs: as written by the compiler, or by the bound of a counter."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = loop.attribute(r"condition=%?([\w.\-]+)")
    root = (program.computations.get(condition) or [loop])[-1]
    sides = [program.named[condition][name] for name in root.operands if root is not loop]
    start = here.get(loop.operands[0])
    if "direction=LT" not in root.line or len(sides) != 2 or start is None:
        return None
    index = int(sides[0].attribute(r"index=(\d+)") or len(start.operands))
    if index >= len(start.operands):
        return None
    first = _number(here.get(start.operands[index]), here)
    bound = _number(sides[1], program.named[condition])
    step = _step(program, loop.attribute(CALLED), index)
    if first is None or bound is None or not step:
        return None
    return max(-(-(bound - first) // step), 0)


def _step(program: Program, body: str, index: int) -> int | None:
    """Returns the increment that the body of a loop adds to a counter."""
    named, root = program.named[body], program.computations[body][-1]
    it = named.get(root.operands[index]) if index < len(root.operands) else None
    if it is None or it.opcode != "add":
        return None
    before, added = (named.get(name) for name in it.operands)
    while before is not None and before.opcode in ("copy", "bitcast"):
        before = named.get(before.operands[0])
    kept = before is not None and before.attribute(r"get-tuple-element\(.*index=(\d+)")
    return _number(added, named) if kept == str(index) else None


def _number(it: Instruction | None, named: Mapping[str, Instruction]) -> int | None:
    """Reads an integer constant, through copies of it."""
    while it is not None and it.opcode in ("copy", "bitcast"):
        it = named.get(it.operands[0])
    found = it.attribute(r" constant\((-?\d+)\)") if it is not None else ""
    return int(found) if found else None


def _flat(values: Any) -> Iterator[Value]:
    if isinstance(values, Value):
        yield values
    else:
        for value in values:
            yield from _flat(value)


def _merge(a: Any, b: Any) -> Any:
    """Returns the union of two values; it is a copy if one of them is."""
    if isinstance(a, list) and isinstance(b, list):
        return [_merge(x, y) for x, y in zip(a, b, strict=False)]
    both = Value.union([a, b])
    copies = [value.widened for value in _flat([a, b]) if value.widened is not None]
    return replace(both, widened=copies[0] if copies else None)
