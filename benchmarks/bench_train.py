"""What does a training step in low precision cost, beside float32 and bfloat16, on the CPU?

    python benchmarks/bench_train.py [--seconds 15] [--recipes int8 fp8] [--parts] [--json PATH]

A step is the value and the gradients of one layer, `mean((x w)**2)`, with respect to `x` and `w`,
which takes the three products and the rounding of their operands, and of an MLP of three layers.
"float32" is the function alone; "bfloat16" has both operands of all three products in bfloat16, and
sums in float32. Ratios are to float32, timed in the same rounds. The goal is 1.0 for int8, and a
shape above 1.2 is a fault.

"--parts" times what a step consists of: each of the three products alone on operands that are
rounded already, and the rounding of the operands, in the forward and in the backward pass.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    Call,
    ForeignLoad,
    environment,
    fresh,
    interleave,
    print_environment,
    print_table,
    write_json,
)

import jqx
from jqx import recipes

SHAPES = (  # rows, inputs, outputs
    (256, 256, 256),
    (64, 1024, 1024),
    (512, 512, 2048),
    (512, 2048, 512),
    (128, 1024, 4096),
    (1024, 1024, 1024),
    (4096, 256, 256),
)
MLP = (512, 768, 3072)  # rows, width, hidden width
GOAL, FAULT = 1.0, 1.2

Function = Callable[[Any, jax.Array], jax.Array]


def in_subchannels() -> recipes.Recipe:
    """Returns int8 for all three products, with wgrad in blocks of 128 rows."""
    row = jqx.QSpec("int8", jqx.per_channel())
    run = jqx.QSpec("int8", jqx.per_group(128, tail=True))
    products = recipes.Products((row, row), (row, row), (run, run))
    return recipes.Recipe("int8, wgrad int8", {".*": products})


RECIPES = {
    "int8": recipes.int8,
    "int8, wgrad float32": partial(recipes.int8, wgrad=jnp.float32),
    "int8, wgrad int8": in_subchannels,
    "fp8": recipes.fp8,
    "fp8_rowwise": recipes.fp8_rowwise,
    "mxfp8": recipes.mxfp8,
}


def in_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of a layer."""
    return x @ w


@jax.custom_vjp
def in_bfloat16(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of a layer with operands in bfloat16, also in the gradients."""
    return _narrow(x, w, 1, 0)


def _narrow(a: jax.Array, b: jax.Array, i: int, j: int) -> jax.Array:
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    numbers = (((i,), (j,)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


in_bfloat16.defvjp(
    lambda x, w: (in_bfloat16(x, w), (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))),
    lambda kept, dy: (_narrow(dy, kept[1], 1, 1), _narrow(kept[0], dy, 0, 0)),
)


def layer(product: Callable[..., jax.Array], w: jax.Array, x: jax.Array) -> jax.Array:
    """The loss of one layer."""
    return jnp.mean(product(x, w) ** 2)


def mlp(product: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    """The loss of three layers."""
    for w in params[:-1]:
        x = jax.nn.relu(product(x, w))
    return jnp.mean(product(x, params[-1]) ** 2)


def models() -> dict[str, tuple[Callable[..., Any], Any, jax.Array]]:
    """Returns the function of each model, its parameters and its input."""
    random = np.random.default_rng(0)

    def normal(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(random.normal(size=(rows, columns)) / np.sqrt(rows), jnp.float32)

    found: dict[str, tuple[Callable[..., Any], Any, jax.Array]] = {
        " x ".join(map(str, shape)): (layer, normal(*shape[1:]), normal(*shape[:2]))
        for shape in SHAPES
    }
    rows, width, hidden = MLP
    weights = [normal(width, hidden), normal(hidden, width), normal(width, width)]
    found[f"MLP {rows} x {width}-{hidden}-{width}-{width}"] = mlp, weights, normal(rows, width)
    return found


def steps(f: Callable[..., Any], params: Any, x: jax.Array, names: list[str]) -> dict[str, Call]:
    """Returns a training step of each kind, compiled."""

    def gradients(g: Function) -> Call:
        return fresh(jax.value_and_grad(g, (0, 1)), params, x)

    plain = partial(f, in_float32)
    found = {"float32": gradients(plain), "bfloat16": gradients(partial(f, in_bfloat16))}
    for name in names:
        recipe = RECIPES[name]()
        trained = jqx.train(plain, recipe.policy, recipe)
        found[name] = gradients(lambda params, x, trained=trained: trained(params, {}, x))
    return found


def parts(shape: tuple[int, int, int]) -> dict[str, Call]:
    """Returns the parts of a step with int8 of one layer, compiled."""
    rows, inputs, outputs = shape
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = {"x": (rows, inputs), "w": (inputs, outputs), "dy": (rows, outputs)}
    arrays = {n: jax.random.normal(k, s) for (n, s), k in zip(sizes.items(), keys, strict=True)}
    spec = jqx.QSpec("int8", jqx.per_channel())
    found: dict[str, Call] = {}
    products = {"forward": ("x", "w", 1, 0), "dgrad": ("dy", "w", 1, 1), "wgrad": ("x", "dy", 0, 0)}

    def as_operand(axis: int, a: jax.Array) -> Any:
        a = a if axis == 1 else a.T
        return jqx.QTensor.quantize(a, spec.resolve(2, (0,)))

    def multiplied(a: Any, b: Any) -> jax.Array:
        numbers = (((1,), (1,)), ((), ()))
        return jqx.dot_general(a, b, numbers, preferred_element_type=jnp.float32)

    for name, (lhs, rhs, i, j) in products.items():
        a, b = arrays[lhs], arrays[rhs]
        numbers = (((i,), (j,)), ((), ()))
        found[f"{name}, float32"] = fresh(
            partial(jax.lax.dot_general, dimension_numbers=numbers), a, b
        )
        found[f"{name}, bfloat16"] = fresh(
            partial(_narrow, i=i, j=j), a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        )
        p, q = (jax.jit(partial(as_operand, k))(y) for k, y in ((i, a), (j, b)))
        found[f"{name}, int8"] = fresh(multiplied, p, q)
        for operand, k, y in ((lhs, i, a), (rhs, j, b)):
            found[f"{name}, {operand} to int8"] = fresh(partial(as_operand, k), y)
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="Times training steps.")
    parser.add_argument("--seconds", type=float, default=15, help="for each model (default: 15)")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--only", help="a part of the names of models to time")
    parser.add_argument("--parts", action="store_true", help="time the parts of a step")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    arguments = parser.parse_args()
    facts, load = environment(), ForeignLoad()
    print_environment(facts)
    records: list[dict[str, Any]] = []
    rows = []
    names = ["float32", "bfloat16", *arguments.recipes]
    for model, (f, params, x) in models().items():
        if arguments.only and arguments.only not in model:
            continue
        timings = interleave(steps(f, params, x, arguments.recipes), arguments.seconds)
        row = [model, f"{1e3 * timings['float32'].median:.2f}"]
        for name, timing in timings.items():
            ratio = timing.ratio(timings["float32"])
            quiet = timing.quiet_ratio(timings["float32"])
            fault = "!" if name.startswith("int8") and ratio > FAULT else ""
            row.append(f"{ratio:.2f}{fault}")
            records.append(
                {"model": model, "step": name, "seconds": timing.median, "ratio": ratio}
                | {"quiet_ratio": quiet}
            )
        rows.append(row)
    print(f"\nA training step; x float32, goal {GOAL} for int8; ! above {FAULT}")
    print_table(["rows x inputs x outputs", "ms", *names], rows)
    if arguments.parts:
        for shape in SHAPES:
            model = " x ".join(map(str, shape))
            if arguments.only and arguments.only not in model:
                continue
            timings = interleave(parts(shape), arguments.seconds)
            whole = timings["forward, float32"]
            table = [
                [n, f"{1e3 * t.median:.3f}", f"{t.ratio(whole):.2f}"] for n, t in timings.items()
            ]
            print(f"\nParts of a step of {model}")
            print_table(["part", "ms", "x forward, float32"], table)
    cores = load.cores()
    print(f"\nforeign load: {'unknown' if cores is None else f'{cores:.2f} cores'}")
    if arguments.json:
        write_json(arguments.json, facts, records)


if __name__ == "__main__":
    main()
