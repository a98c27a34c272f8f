"""The language model in other libraries, beside jqx: GPTQ, AutoRound and rounding to nearest.

All quantize the same weights, calibrated on the same tokens, with each library's defaults for what
a scheme does not say, and read the same tokens in float32. 128 does not divide the width of 576:
jqx makes the last group of a column smaller, NNCF takes smaller groups for these layers,
llm-compressor refuses; so groups are of 64. jqx takes the range of each group from least to
greatest, as they do.

AutoRound, at 3 and 2 bits, takes the same number of steps for each layer in both libraries, each of
2 rows, at the rate 1 / steps, and ranges are learned too. What differs:

| | jqx | auto-round |
|---|---|---|
| scales | float32 | float16, its default |
| computes in | float32 | float32, as it is told: by default the model is cast to bfloat16 |
| keeps | what loses least, always on the same rows | what loses least, each on its step's rows |
| looks at that | 8 times | at each step |
| last token of a row | counts | is masked |

Times are of quantization alone; those of jqx have the compilation in them. auto-round compiles
nothing on CPU.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import smollm2
from _harness import print_table
from _language_memory import Peak
from _language_peers import HERE, peer, written

import jqx

SCHEMES: dict[str, dict[str, Any]] = {
    "float32": {"bits": 0},
    "W4 g64 asymmetric": {"bits": 4, "group": 64, "symmetric": False},
    "W4 per channel": {"bits": 4, "group": 0, "symmetric": True},
    "W3 g64 asymmetric": {"bits": 3, "group": 64, "symmetric": False},
    "W2 g64 asymmetric": {"bits": 2, "group": 64, "symmetric": False},
}
OWN = {
    "float32": jqx.Policy([]),
    "W4 g64 asymmetric": smollm2.linear("int4:group=64:asymmetric"),
    "W4 per channel": smollm2.linear("int4"),
    "W3 g64 asymmetric": smollm2.linear("int3:group=64:asymmetric"),
    "W2 g64 asymmetric": smollm2.linear("int2:group=64:asymmetric"),
}
LEARNED = "AutoRound"
WAYS = {
    "jqx": ("rounded", "GPTQ", "GPTQ, mse, qep", LEARNED),
    "llm-compressor": ("rounded", "GPTQ"),
    "NNCF": ("rounded", "GPTQ"),
    "auto-round": ("rounded", LEARNED),
}
ROWS = 2  # that AutoRound takes in a step
PeerRow = tuple[str, str, str]  # library, scheme, how codes are chosen


def peer_rows() -> Iterator[PeerRow]:
    """Yields all rows of peers."""
    for library, ways in WAYS.items():
        for scheme, way in product(SCHEMES, ways):
            fits = SCHEMES[scheme]["bits"] in ((2, 3) if way == LEARNED else (2, 3, 4))
            if fits or way == "rounded":
                yield library, scheme, way


def asked_for(row: Sequence[str], chosen: list[str], only: list[str]) -> bool:
    """Tells whether a row is to be measured."""
    name = ", ".join(row)
    return name in only if only else any(part in name for part in chosen)


def measure_peers(
    given: Any,
    rows: Sequence[PeerRow],
    algorithms: Mapping[str, Any],
    pythons: dict[str, Path | None],
    steps: int,
) -> Iterator[dict[str, Any]]:
    """Yields perplexities of other libraries, beside jqx with min-max scales, and prints them."""
    print("\nGPTQ, AutoRound and rounding on the same weights and tokens")

    def told(row: PeerRow, answer: dict[str, Any]) -> dict[str, Any]:
        record = {"part": "peers", **dict(zip(("library", "scheme", "codes"), row, strict=True))}
        cells = _peer_cells(record | answer) if "refused" not in answer else None
        print("  ".join(cells or (*row, answer["refused"])), flush=True)
        return record | answer

    learned = jqx.algorithms.auto_round(steps=steps)
    for row in rows:
        if row[0] == "jqx":
            yield told(row, _own(given, row, {**algorithms, LEARNED: learned}))
    tokens = {"calibration": given.calibration, "evaluation": given.evaluation}
    with written(given.file, given.model.config, **tokens) as folder:
        for library in dict.fromkeys(row[0] for row in rows if row[0] != "jqx"):
            script = HERE / "_language_torch.py"
            with peer(library, pythons[library], script, folder, library) as process:
                for row in rows:
                    if process is not None and row[0] == library:
                        _, name, way = row
                        asked = {"gptq": way == "GPTQ", "steps": steps if way == LEARNED else 0}
                        asked |= SCHEMES[name] | {"rows": ROWS}
                        yield told(row, process(json.dumps(asked)))


def _own(given: Any, row: PeerRow, algorithms: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what jqx reaches in a row."""
    _, name, way = row
    algorithm, rows = algorithms[way], ROWS if way == LEARNED else 1
    peak, start = Peak(), time.perf_counter()
    done = given.quantized(OWN[name], algorithm, rows)
    seconds = time.perf_counter() - start
    found, told = given.perplexity(done), ""
    if isinstance(algorithm, jqx.algorithms.auto_round):
        told = f"{algorithm.steps} steps of {rows} rows, scales float32"
    return {"perplexity": found, "seconds": seconds, "told": told, "peak_mb": peak.megabytes()}


def _peer_cells(record: dict[str, Any]) -> list[str]:
    numbers = zip(("perplexity", "seconds", "peak_mb"), (3, 1, 0), strict=True)
    cells = [f"{record[name]:.{digits}f}" for name, digits in numbers]
    names = [record[name] for name in ("scheme", "codes", "library")]
    return [*names, *cells, record.get("told", "")]


def print_peers(records: Sequence[dict[str, Any]]) -> None:
    """Prints the table of peers, scheme by scheme, without what libraries refuse."""
    own = [x for x in records if x["part"] == "peers" and "refused" not in x]
    order = [*peer_rows()]
    own.sort(key=lambda x: order.index((x["library"], x["scheme"], x["codes"])))
    own.sort(key=lambda x: [*SCHEMES].index(x["scheme"]))
    print()
    head = ["scheme", "codes", "library", "perplexity", "s", "peak MB", "settings"]
    print_table(head, list(map(_peer_cells, own)))
