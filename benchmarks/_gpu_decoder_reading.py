"""What a compiled decoder multiplies, copies and holds, in numbers and a few words."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from _gpu_decoder_model import ATTENTION, Config

from jqx._src.diagnostics.hlo import Program, bits, kernels
from jqx._src.diagnostics.lowering import CompiledContraction, Lowering

JQX = re.compile(r"/jqx_\w+/pallas_call$")
PARAMS = "params"  # the argument that holds the weights


def weight_bytes(params: Mapping[str, Any]) -> int:
    """Returns the bytes that a run reads of the weights: of the table of tokens next to none."""
    return _bytes({name: part for name, part in params.items() if name != "embed"})


def cache_bytes(given: tuple[Any, ...]) -> int:
    """Returns the bytes of the caches among the inputs of a job."""
    return _bytes(given[1]) if len(given) > 1 else 0


def _bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * _bits(leaf.dtype) for leaf in leaves) // 8


def _bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)


def held_bytes(lowering: Lowering) -> int | None:
    """Returns the most bytes that a run holds: arguments, results and what is between."""
    sizes = lowering.memory
    if "argument" not in sizes:
        return None
    return sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]


def copied_bytes(program: Program, config: Config) -> dict[str, int]:
    """Returns by dtype the bytes of whole weights that one run writes to memory."""
    least = min(prod(shape) for shape in config.matrices.values())
    found: Counter[str] = Counter()
    for kernel in kernels(program):
        it = kernel.instruction
        of_weights = kernel.origins and all(path.startswith(PARAMS) for path in kernel.origins)
        multiplies = any(True for _ in program.contractions(it))
        if of_weights and not multiplies and it.size >= least:
            found[it.dtype] += it.size * bits(it.dtype) // 8 * (kernel.times or 1)
    return dict(found)


def words(lowering: Lowering, copied: Mapping[str, int]) -> str:
    """Says what multiplies weights, what is copied, and what does not run on matrix units."""
    own = [c for c in lowering.contractions if ATTENTION not in c.op_name]
    text = " + ".join(dict.fromkeys(map(_one, own)))
    for dtype, size in copied.items():
        text += f"; writes W as {dtype}, {size / 2**20:.0f} MiB"
    widened = dict.fromkeys(copy.partition("[")[0] for c in own for copy in c.widened)
    text += "".join(f"; widened to {dtype}" for dtype in widened)
    return text + "".join(f"; {left}" for left in dict.fromkeys(c.left for c in own if c.left))


def _one(c: CompiledContraction) -> str:
    runs = "jqx kernel" if JQX.search(c.op_name) else c.runs
    text = f"{runs.removesuffix(' fusion').lstrip('_')} {' x '.join(c.dtypes)}"
    read = dict.fromkeys(_not_multiplied(c))
    return text + (f", reads {'+'.join(read)}" if read else "")


def _not_multiplied(c: CompiledContraction) -> Iterator[str]:
    for dtypes in c.reads:
        yield from (dtype for dtype in dtypes if dtype not in c.dtypes)
