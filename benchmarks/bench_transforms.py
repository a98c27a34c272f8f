"""What do the transforms cost to trace and to compile, and a training step to run, on the CPU?

    python benchmarks/bench_transforms.py [--seconds 60] [--json PATH]

Three questions. "trace" and "compile": an MLP and a transformer of 24 layers, unrolled and under
`lax.scan`, forward and `value_and_grad`; the ratio is to the function alone, traced and compiled
anew each time, in turns. The goals are ratios of 2.0 and 2.5 (trace), 2.5 and 1.6 (compile) for the
unrolled functions, and under scan the same cost for 24 layers as for 6. "step": value and gradients
of an MLP 768-3072-768 at batch 128 with respect to parameters and input; the peer is qwix's
`QtProvider`, which takes Flax modules alone and is traced last, as it patches `jax.lax`.

"by hand" is the function with the five textbook lines of fake quantization written into it
(`by_hand`: no NaN kept, no range checked, no plan): what quantization costs without a library, near
which traces and compilations of unrolled functions can be expected to stay. The floor of a step
with integers is its three products at the rate of int8 and bfloat16, about half of float32.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    ForeignLoad,
    environment,
    interleave,
    print_environment,
    print_table,
    write_json,
)

import jqx

WIDTH, HEADS, LAYERS, FEW = 256, 4, 24, 6
POLICY = jqx.presets.w8a8_dynamic()
GOALS = {  # of unrolled functions
    ("trace", "forward"): 2.0,
    ("trace", "gradient"): 2.5,
    ("compile", "forward"): 2.5,
    ("compile", "gradient"): 1.6,
}


def weights(layers: int, *shape: int) -> jax.Array:
    """Weights of stacked layers."""
    return jax.random.normal(jax.random.key(0), (layers, *shape)) / np.sqrt(shape[0])


Product = Callable[[jax.Array, jax.Array], jax.Array]


def by_hand(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of two operands, each fake quantized to int8 in the fewest lines that train."""

    def fake_quantize(x: jax.Array, axis: int) -> jax.Array:
        scale = jnp.max(jnp.abs(x), axis, keepdims=True) / 127
        scale = jax.lax.stop_gradient(jnp.where(scale == 0, 1, scale))
        y = jnp.clip(x / scale, -127, 127)
        return (y + jax.lax.stop_gradient(jnp.round(y) - y)) * scale

    return fake_quantize(x, -1) @ fake_quantize(w, 0)


def mlp_layer(w: Any, x: jax.Array, product: Product = jnp.matmul) -> jax.Array:
    """A perceptron with a bias."""
    return jax.nn.relu(product(x, w["w"]) + w["b"][None])


def transformer_layer(w: Any, x: jax.Array, product: Product = jnp.matmul) -> jax.Array:
    """Causal attention and a perceptron, each added to its input."""
    batch, time_, _ = x.shape

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    h = norm(x)
    q, k, v = (product(h, w[n]).reshape(batch, time_, HEADS, -1) for n in ("q", "k", "v"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(WIDTH / HEADS)
    seen = jnp.tril(jnp.ones((time_, time_), bool))[None, None]
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)
    x = x + product(mixed.reshape(x.shape), w["o"])
    return x + product(jax.nn.gelu(product(norm(x), w["up"])), w["down"])


def models(layers: int) -> dict[str, tuple[Callable[..., Any], Any, jax.Array]]:
    """Layer, stacked parameters and input of each model."""
    mlp = {"w": weights(layers, WIDTH, WIDTH), "b": jnp.zeros((layers, WIDTH))}
    transformer = {name: weights(layers, WIDTH, WIDTH) for name in "qkvo"}
    transformer |= {"up": weights(layers, WIDTH, 2 * WIDTH)}
    transformer |= {"down": weights(layers, 2 * WIDTH, WIDTH)}
    x = jax.random.normal(jax.random.key(1), (64, WIDTH))
    return {
        "mlp": (mlp_layer, mlp, x),
        "transformer": (transformer_layer, transformer, x.reshape(2, 32, WIDTH)),
    }


def unrolled(layer: Callable[..., Any], params: Any, x: jax.Array) -> jax.Array:
    """One layer after the other; the parameters are a list."""
    for w in params:
        x = layer(w, x)
    return x


def scanned(layer: Callable[..., Any], params: Any, x: jax.Array) -> jax.Array:
    """The same as a scan over stacked layers."""
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0]


class Case(NamedTuple):
    """A model: as a function, the same quantized by hand, and what both take."""

    name: str
    function: Callable[..., Any]
    by_hand: Callable[..., Any]
    params: Any
    x: jax.Array


def cases(layers: int) -> Iterator[Case]:
    """Yields every model unrolled and under scan."""
    for name, (layer, stack, x) in models(layers).items():
        each = [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(layers)]
        for form, of, params in (("unrolled", unrolled, each), ("scan", scanned, stack)):
            hand = partial(of, partial(layer, product=by_hand))
            yield Case(f"{name}, {form}", partial(of, layer), hand, params, x)


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradient of a loss."""
    return jax.value_and_grad(lambda params, x: jnp.sum(f(params, x) ** 2))


def cost(f: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """Returns the seconds that tracing and compiling a function take, nothing of it cached."""
    jax.clear_caches()
    start = time.perf_counter()
    traced = jax.jit(lambda *args: f(*args)).trace(*args)
    middle = time.perf_counter()
    traced.lower().compile()
    return middle - start, time.perf_counter() - middle


def overheads(layers: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields seconds and ratios of the transforms for every model, in turns."""
    for name, f, hand, params, x in cases(layers):
        plan = jqx.make_plan(f, POLICY)(params, x)
        simulated = jqx.simulate(f, plan)
        quantized = jqx.quantize_params(params, plan)
        for direction, variants in {
            "forward": {
                "alone": (f, params),
                "by hand": (hand, params),
                "simulate": (simulated, params),
                "convert": (jqx.convert(f, plan), quantized),
            },
            "gradient": {
                "alone": (gradient(f), params),
                "by hand": (gradient(hand), params),
                "simulate": (gradient(simulated), params),
            },
        }.items():
            taken = {variant: [] for variant in variants}
            for _ in range(rounds):
                for variant, (g, p) in variants.items():
                    taken[variant].append(cost(g, p, x))
            alone = np.array(taken["alone"])
            for variant, samples in taken.items():
                seconds = np.median(samples, axis=0)
                ratios = np.median(np.array(samples) / alone, axis=0)
                yield {
                    "model": name,
                    "layers": layers,
                    "direction": direction,
                    "variant": variant,
                    "trace_s": seconds[0],
                    "compile_s": seconds[1],
                    "trace": ratios[0],
                    "compile": ratios[1],
                }


class MLP(nn.Module):
    """768-3072-768."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(768)(nn.relu(nn.Dense(3072)(x)))


def steps() -> dict[str, Callable[[], object]]:
    """A training step of each kind, compiled."""
    model, x = MLP(), jax.random.normal(jax.random.key(0), (128, 768))
    params = model.init(jax.random.key(1), x)

    def step(f: Callable[..., Any]) -> Callable[[], object]:
        of = jax.value_and_grad(lambda params, x: jnp.mean(f(params, x) ** 2), (0, 1))
        compiled = jax.jit(of).lower(params, x).compile()
        return lambda: jax.block_until_ready(compiled(params, x))

    def by_hand_mlp(params: Any, x: jax.Array) -> jax.Array:
        first, last = (params["params"][f"Dense_{i}"] for i in (1, 0))
        x = nn.relu(by_hand(x, first["kernel"]) + first["bias"])
        return by_hand(x, last["kernel"]) + last["bias"]

    found = {"float32": step(model.apply), "by hand, dynamic": step(by_hand_mlp)}
    for name, policy in (("static", jqx.presets.w8a8()), ("dynamic", POLICY)):
        plan = jqx.make_plan(model.apply, policy)(params, x)
        affines = jqx.affines(plan, jqx.calibrate(model.apply, plan)(params, x)[1])
        simulate = partial(jqx.simulate, model.apply, plan, affines)
        found[f"fake quantization, {name}"] = step(simulate())
        found[f"integers, float32 backward, {name}"] = step(simulate(backward=jnp.float32))
        found[f"integers, bfloat16 backward, {name}"] = step(simulate(backward=jnp.bfloat16))
    try:
        qwix = import_module("qwix")
    except ImportError:
        return found
    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    peer = qwix.quantize_model(model, qwix.QtProvider([rule]))
    return found | {"qwix": step(peer.apply)}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="for the steps (default: 60)")
    parser.add_argument("--rounds", type=int, default=3, help="of tracing (default: 3)")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    facts, load = environment(), ForeignLoad()
    print_environment(facts)
    records = [record for layers in (LAYERS, FEW) for record in overheads(layers, arguments.rounds)]
    few = {(r["model"], r["direction"], r["variant"]): r for r in records if r["layers"] == FEW}
    rows = []
    for r in records:
        if r["layers"] == FEW:
            continue
        same = few[r["model"], r["direction"], r["variant"]]
        row = [r["model"], r["direction"], r["variant"]]
        for what in ("trace", "compile"):
            goal = GOALS[what, r["direction"]]
            judged = r["variant"] not in ("alone", "by hand") and "unrolled" in r["model"]
            missed = " missed" if judged and r[what] > goal else ""
            row += [f"{1e3 * r[what + '_s']:.0f}", f"{r[what]:.2f}{missed}"]
            row.append(f"{r[what + '_s'] / same[what + '_s']:.2f}")
        rows.append(row)
    ratios = ("ms", "x alone", f"x {FEW} layers")
    head = [f"{what} {ratio}" for what in ("trace", "compile") for ratio in ratios]
    print(f"\n{LAYERS} layers of width {WIDTH}; goals for unrolled functions:", GOALS)
    print_table(["model", "direction", "variant", *head], rows)
    timings = interleave(steps(), arguments.seconds)
    peer = timings.get("qwix")
    rows = [
        [
            name,
            f"{1e3 * t.median:.2f}",
            f"{t.ratio(timings['float32']):.2f}",
            f"{t.ratio(peer):.2f}" if peer else "-",
        ]
        for name, t in timings.items()
    ]
    print("\nA training step; goals x float32: 0.90 with integers and bfloat16, 1.12 with fake")
    print("quantization; x qwix: 0.95")
    print_table(["step", "ms", "x float32", "x qwix"], rows)
    cores = load.cores()
    print(f"\nforeign load: {'unknown' if cores is None else f'{cores:.2f} cores'}")
    if arguments.json:
        own = [{"step": name, "seconds": t.median} for name, t in timings.items()]
        write_json(arguments.json, facts, [*records, *own])


if __name__ == "__main__":
    main()
