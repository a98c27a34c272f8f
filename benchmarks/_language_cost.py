"""What GPTQ takes for a layer of a model of 7 billion parameters (Llama 2's shapes).

Of a matrix [N, K], N outputs and K inputs, on T tokens:

| what | operations | where |
|---|---|---|
| Hessian, once for the matrices that read one value | 2 T K**2 | float32, on the device |
| its factor: Cholesky, and the inverse of a triangle | 1/3 K**3 + K**3 | float64, on the host |
| columns: K / 128 blocks, each one product with all columns | 2 N K**2 | float32, on the device |
| columns one by one, each changes 128 of its block | 4 x 128 N K, some 512 N a column | the same |
| objective, of what is chosen and of rounding to nearest | 2 x 2 N K**2 | float64, on the host |
| forward, the layer in float and with its codes | 2 x 2 T N K | float32, on the device |

Memory: the Hessian is 8 K**2 bytes (.13 GB of 4096 columns, .97 GB of 11008), and its factor holds
six of these while it is found; the weights of the layer in float32 are 4 N K bytes each, and five
of these are held while a matrix is rounded; activations of 128 x 2048 tokens of width 4096 are
4.3 GB in float32, twice that with errors propagated. The whole is in float32: 27 GB, held once.

On a loaded EPYC 1024 columns of 1024 rows took 1.5 seconds of the processor, of 4096 rows 4.6, and
2048 of 2048 rows 7.3: 1 us and more for each weight, of which the loop over columns is .06; the
rest is the host's. So a layer, of 202 million weights, would take 200 s and more, and 32 of them
two hours. Hessians and forward passes are 3.0e14 operations a layer, of which a core does 1e11 in a
second at best.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import print_table
from _language_memory import Peak
from scipy.optimize import nnls

import jqx

MEASURED = ((1024, 1024), (1024, 4096), (2048, 2048), (2048, 512))  # (K, N)
CHECK, LARGE = (4096, 4096), (11008, 4096)
TOKENS = 128 * 2048
LAYER = {  # the matrices of a layer, (K, N), by the value that they read
    "q, k, v": ((4096, 4096),) * 3,
    "o": ((4096, 4096),),
    "gate, up": ((4096, 11008),) * 2,
    "down": ((11008, 4096),),
}
SPEC = "int4:group=128:asymmetric"


def _product(w: Any, x: Any) -> Any:
    return x @ w


def solved(k: int, n: int) -> tuple[float, float]:
    """Seconds of the processor for a matrix of chance, its Hessian known; the most megabytes."""
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (k, n))
    x = jax.random.normal(keys[1], (512, k))
    algorithm, policy = jqx.algorithms.gptq(), jqx.Policy({".*": SPEC})
    plan = jqx.make_plan(_product, policy)(w, x)
    options = {"observers": algorithm.observers, "progress": False}
    stats = jqx.calibrate_batches(_product, plan, w, [x], **options)
    peak, taken = Peak(), []
    for _ in range(2 if k * n < 2**24 else 1):  # the first compiles, which counts in small ones
        start = time.process_time()
        jqx.quantize_params(w, plan, algorithm=algorithm, stats=stats)
        taken.append(time.process_time() - start)
    return min(taken), peak.megabytes()


def multiplied(size: int = 2048) -> float:
    """Operations of a product in float32, in a second of the processor."""
    x, taken = jnp.ones((size, size)), []
    for _ in range(4):
        start = time.process_time()
        (x @ x).block_until_ready()
        taken.append(time.process_time() - start)
    return 2 * size**3 / min(taken)


def terms(k: int, n: int) -> tuple[float, ...]:
    """What the time of a matrix is a sum of multiples of."""
    return k**3, n * k**2, n * k


def cost_of_a_layer(large: bool) -> Iterator[dict[str, Any]]:
    """Measures matrices, fits the times of the terms, checks them on a larger one, and prints what
    a layer takes: all in seconds of the processor, which foreign load changes least.
    """
    print(f"\nGPTQ of a layer of a model of 7 billion parameters, {SPEC}, {TOKENS:,} tokens")
    solved(256, 128)  # loads what is loaded once
    sizes = [*MEASURED, CHECK, *((LARGE,) if large else ())]
    taken = {}
    for size in sizes:
        taken[size] = solved(*size)
        print(f"{size}: {taken[size][0]:.2f} s", flush=True)
    known = np.array([terms(*size) for size in MEASURED])
    seconds = np.array([taken[size][0] for size in MEASURED])
    # Each size counts by its relative error.
    rates, _ = nnls(known / seconds[:, None], np.ones(len(seconds)))
    rows = []
    for size, (found, megabytes) in taken.items():
        model = float(np.dot(terms(*size), rates))
        how = "fitted" if size in MEASURED else "foretold"
        rows.append([f"{size[0]} x {size[1]}", how, f"{found:.2f}", f"{model:.2f}"])
        rows[-1] += [f"{1e6 * found / size[0]:.0f}", f"{megabytes:.0f}"]
        yield {"part": "layer", "size": size, "seconds": found, "model": model, "mb": megabytes}
    print_table(["columns x rows", "", "s", "by the terms s", "us a column", "peak MB"], rows)

    rate, rows, total = multiplied(), [], np.zeros(3)
    for reads, matrices in LAYER.items():
        k = matrices[0][0]
        hessian = 2 * TOKENS * k**2 / rate
        solve = sum(float(np.dot(terms(*size), rates)) for size in matrices)
        forward = sum(2 * 2 * TOKENS * k * n / rate for k, n in matrices)
        parts = np.array([hessian, solve, forward])
        total += parts
        rows.append([reads, *(f"{x:.0f}" for x in parts), f"{8e-9 * k**2:.2f}"])
    rows.append(["a layer", *(f"{x:.0f}" for x in total), ""])
    print(f"products in float32: {rate / 1e9:.0f} G operations in a second of the processor")
    print_table(["matrices", "Hessian s", "solve s", "forward s", "Hessian GB"], rows)
    yield {"part": "layer", "total": total.tolist(), "rate": rate}
