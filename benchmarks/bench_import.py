"""How long does `import jqx` take, beside `import jax`?

    python benchmarks/bench_import.py

Processes take turns, so that foreign load falls on all alike. What is measured is the processor
time of a whole process, start and end of Python included. The first run of each is left out: it
compiles files to bytecode, which pip does when it installs a package. The goal is a quarter of a
second above jax's.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from _harness import environment, print_environment, print_table

ROUNDS = 15
GOAL = 0.25
PROGRAMS = {
    "jax": "import jax",
    "jqx": "import jqx",
    "jqx and folders that are imported late": "import jqx; jqx.algorithms, jqx.save, jqx.parallel",
    "jqx.linen": "import jqx.linen",
    "jqx.nnx": "import jqx.nnx",
    "flax": "import flax",
}


def seconds(code: str, variables: dict[str, str]) -> float:
    """Returns the processor time of a program."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    after = os.times()
    user, system = after.children_user, after.children_system
    return user - before.children_user + system - before.children_system


def main() -> None:
    """Prints a row for each program."""
    print_environment(environment())
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        for code in PROGRAMS.values():
            seconds(code, variables)
        rounds = [{k: seconds(c, variables) for k, c in PROGRAMS.items()} for _ in range(ROUNDS)]
    rows = []
    for name in PROGRAMS:
        own = [taken[name] for taken in rounds]
        above = statistics.median(taken[name] - taken["jax"] for taken in rounds)
        least = min(own) - min(taken["jax"] for taken in rounds)
        columns = (min(own), statistics.median(own), least, above)
        rows.append([name, *(f"{x:.3f}" for x in columns)])
    head = ["import of", "least s", "median s", "above jax, least", "above jax, median"]
    print_table(head, rows)
    print(f"The goal is {GOAL} s of jqx above jax.")


if __name__ == "__main__":
    main()
