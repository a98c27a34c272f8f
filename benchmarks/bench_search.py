"""Does a mixture of formats beat one format on all weights, at equal bytes, on a pretrained model?

    python benchmarks/bench_search.py

`search` gives each linear layer of `examples/minilm.py` 3 to 6 bits in groups of 32, within the
bytes of 4 bits on all, from 32 calibration paragraphs; then 256 other paragraphs are embedded by
each. There is no floor: what is compared is the cosine to the float32 embeddings. Accuracy alone;
nothing here is timed but the search itself. Takes about two minutes.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from _harness import environment, print_environment, print_table

import jqx
from jqx.diagnostics import Bits, search

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import minilm


def distance(found: jax.Array, plain: jax.Array) -> jax.Array:
    """Mean cosine distance of embeddings."""
    return jnp.mean(1 - jnp.sum(found * plain, axis=-1))


def main() -> None:
    """Prints one row for each format, and one for the mixture."""
    print_environment(environment())
    apply, params, tokenize = minilm.Encoder().apply, minilm.pretrained(), minilm.tokenizer()
    calibration, evaluation = minilm.paragraphs()
    batch = tokenize(calibration[:32])
    ways = {}
    for bits in (3, 4, 5, 6):
        qtype = getattr(jqx.numerics, f"int{bits}", f"int{bits}")
        ways[f"int{bits}"] = jqx.presets.w4a16(".*kernel", weight={"qtype": qtype})
    start = time.perf_counter()
    found = search(apply, ways["int4"], ways, Bits(5), metric=distance)(params, batch)
    print(f"\n{found}\n\nsearched in {time.perf_counter() - start:.0f} s\n")

    batches = [tokenize(evaluation[i : i + 32]) for i in range(0, len(evaluation), 32)]
    floats, _ = minilm.embed(apply, params, batches)
    rows = []
    sizes = {name: size for name, (size, _) in found.uniform.items()} | {"mixture": found.bytes}
    for name, policy in {**ways, "mixture": found.policy}.items():
        plan = jqx.make_plan(apply, policy)(params, *batch)
        rounded = jqx.dequantize_params(jqx.quantize_params(params, plan))
        mean, least, spearman, kept = minilm.judge(floats, minilm.embed(apply, rounded, batches)[0])
        numbers = [f"{sizes[name]:,.0f}", f"{mean:.4f}", f"{least:.4f}", f"{spearman:.4f}"]
        rows.append([name, *numbers, f"{100 * kept:.1f} %"])
    print_table(["weights", "bytes", "mean cosine", "least", "Spearman", "nearest kept"], rows)


if __name__ == "__main__":
    main()
