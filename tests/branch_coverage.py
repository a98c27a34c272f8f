"""Which branches of jqx the tests take, by folder. A plugin of pytest, for Python 3.12 and 3.13:

    python -m pytest -p tests.branch_coverage

A branch is one of the two ways on from a conditional jump of the bytecode (`if`, `while`, `for`,
`and`, `or`, conditional expressions). Events of `sys.monitoring` count them in the functions of jqx
alone. The tracer of coverage.py also follows those of JAX, which makes the tests several times as
slow, and it can use these events for branches only since Python 3.14.
"""

import collections
import dis
import json
import pathlib
import sys
import types
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jqx"
RESULTS = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "branches"

Jump = tuple[str, str, int, int]
"""File, function, first line of the function, and offset in its bytecode."""

targets: dict[Jump, set[int]] = collections.defaultdict(set)
"""The offsets that each jump went to."""


def start_monitoring() -> None:
    monitoring, disable = sys.monitoring, sys.monitoring.DISABLE
    tool, events, root = monitoring.COVERAGE_ID, monitoring.events, str(PACKAGE)

    def start(code: types.CodeType, offset: int) -> object:
        if code.co_filename.startswith(root):
            monitoring.set_local_events(tool, code, events.BRANCH)
        return disable

    def branch(code: types.CodeType, offset: int, target: int) -> object:
        taken = targets[jump_at(code, offset)]
        taken.add(target)
        return disable if len(taken) == 2 else None

    monitoring.use_tool_id(tool, "branches of jqx")
    monitoring.register_callback(tool, events.PY_START, start)
    monitoring.register_callback(tool, events.BRANCH, branch)
    monitoring.set_events(tool, events.PY_START)


def jump_at(code: types.CodeType, offset: int) -> Jump:
    return code.co_filename, code.co_qualname, code.co_firstlineno, offset


def jumps_of(code: types.CodeType) -> Iterator[Jump]:
    """Yields the conditional jumps of a module or function, and of the functions in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("POP_JUMP_IF", "FOR_ITER")):
            yield jump_at(code, instruction.offset)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from jumps_of(constant)


def part_of(path: pathlib.Path) -> str:
    """Returns the folder of a file, or its name if it is in none."""
    parts = path.relative_to(PACKAGE).parts
    if parts[0] != "_src":
        return "public modules"
    return parts[1].removesuffix(".py") if len(parts) > 2 else "_src"


def pytest_sessionfinish(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", {}).get("workerid", "main")
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = [[*jump, sorted(taken)] for jump, taken in targets.items()]
    (RESULTS / f"{worker}.json").write_text(json.dumps(rows))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    taken: dict[Jump, set[int]] = collections.defaultdict(set)
    for path in RESULTS.glob("*.json"):
        for *jump, offsets in json.loads(path.read_text()):
            taken[tuple(jump)].update(offsets)
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for path in sorted(PACKAGE.rglob("*.py")):
        for jump in jumps_of(compile(path.read_text(), str(path), "exec")):
            for name in (part_of(path), "all"):
                counts[name][0] += len(taken.get(jump, ()))
                counts[name][1] += 2
    terminalreporter.section("branches")
    for name, (count, total) in sorted(counts.items()):
        terminalreporter.write_line(f"{name:16} {count:6} of {total:6} {count / total:6.1%}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        for path in RESULTS.glob("*.json"):
            path.unlink()


start_monitoring()
