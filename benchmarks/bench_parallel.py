"""What do devices send each other, in float and in codes?

    python benchmarks/bench_parallel.py [--seconds S] [--skip PART ...] [--json PATH]

Three parts, which differ in what they are worth:

    hosts      a W8A8 perceptron on 1, 2, 4 and 8 devices of the CPU. They share its cores, so that
               time says nothing of other machines: read bytes, collectives and instructions
    programs   collectives compiled for 8 TPUs v5e and 8 H200, which need not be there: bytes, and
               bytes / those of float32. NOTHING RUNS; time is not measured. What is not installed
               is skipped
    model      a MODEL, NOT MEASURED: time on 8, 256 and 4,096 chips, from bandwidths and latencies
               that are printed with it (`_parallel_model.py`)

"sends" are bytes that one device sends: of a gathered or exchanged array its part for the others,
of a sum that twice.
"""

import argparse
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

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
from _parallel_model import ASSUMED, GATHERS, NETWORKS, SUMS, Way
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx import parallel
from jqx._src import compat
from jqx._src.diagnostics import lowering

PARTS = ("hosts", "programs", "model")
COUNT, SIZE = 8, 1 << 18
"""Devices that programs are compiled for, and the elements that each has."""

WIDTHS, ROWS, BATCHES = (512, 2048, 512), 256, 4
ARRAYS = {"a gradient": 1 << 28, "a step of decoding": 1 << 17}
"""Elements of what is added up in the model."""

SPECS = ("int8:group=256", "int4:group=256", "float8_e4m3fn:group=256")
Record = dict[str, Any]

COLLECTIVES: dict[str, tuple[Callable[..., jax.Array], float]] = {
    "sum": (parallel.all_reduce, 2),
    "sum, ring": (functools.partial(parallel.all_reduce, form="ring"), 2),
    "scattered": (functools.partial(parallel.reduce_scatter, tiled=True), 1),
    "scattered, ring": (functools.partial(parallel.reduce_scatter, tiled=True, form="ring"), 1),
    "weight gathered": (parallel.all_gather, COUNT),
    "weight and gradient": (lambda x, **options: _gradient(x, **options), 2 * COUNT),
}
"""What is called, and how often a device sends what it has, but for its own part."""


def _gradient(x: jax.Array, axis_name: str, spec: str) -> jax.Array:
    """A gathered weight is used, and its gradient scattered."""
    gather = functools.partial(parallel.all_gather, axis_name=axis_name, spec=spec)
    return jax.grad(lambda x: jnp.sin(gather(x)).sum())(x)


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def bytes_sent(text: str, count: int) -> tuple[Counter[str], int]:
    """Returns the bytes that a device sends by type of element, and how many collectives do.

    Args:
      text: an optimized program.
      count: of devices, all of which take part in each collective.
    """
    part, found, calls = 1 - 1 / count, Counter(), 0
    for types, kind, start in re.findall(rf" = (.+?) ({'|'.join(KINDS)})(-start)?\(", text):
        share = {"all-reduce": 2 * part, "collective-permute": 1, "reduce-scatter": count - 1}
        share = share.get(kind, part)
        if start:  # has the types of operands and results
            operands = {"all-gather": 1 / count, "reduce-scatter": count}.get(kind, 1)
            share /= 1 if kind == "all-reduce" else 1 + operands
        calls += 1
        types = types.replace("u32[]", "")  # handles of a TPU
        for dtype, dims in re.findall(r"([a-z]\w+)\[([\d,]*)\]", types):
            bits = int(re.sub(r"^\D+(\d+).*", r"\1", dtype))
            size = math.prod(map(int, filter(None, dims.split(","))))
            found[dtype] += size * bits / 8 * share
    return found, calls


def _instructions(text: str) -> int:
    return len(re.findall(r"^ +(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))


def hosts(seconds: float) -> Iterator[Record]:
    """Yields what calibration and a converted call do on 1, 2, 4 and 8 devices of the CPU."""

    def network(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ p["up"]) @ p["down"]

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": WIDTHS[:2], "down": WIDTHS[1:]}
    draw = dict(zip(shapes, keys, strict=False))
    params = {k: jax.random.normal(draw[k], s) / s[0] ** 0.5 for k, s in shapes.items()}
    batches = jax.random.normal(keys[2], (BATCHES, ROWS, WIDTHS[0]))
    calls, records = {}, {}
    for count in (1, 2, 4, 8):
        mesh = Mesh(np.array(jax.devices()[:count]), ("i",), axis_types=(AxisType.Auto,))
        place = functools.partial(NamedSharding, mesh)
        given = jax.device_put(params, {"up": place(P(None, "i")), "down": place(P("i"))})
        rows, copies = (
            jax.device_put(list(batches), place(P("i"))),
            jax.device_put(params, place(P())),
        )
        plan = jqx.make_plan(network, jqx.presets.w8a8())(given, rows[0])
        observe = jax.jit(jqx.calibrate(network, plan))
        stats = jqx.calibrate_batches(network, plan, copies, rows, progress=False)
        q, affines = jqx.quantize_params(given, plan), jqx.affines(plan, stats)
        convert = functools.partial(jqx.convert, network, plan, affines)
        whole = jax.device_put(batches[0], place(P()))
        places = jax.tree.map(lambda x: x.sharding, given)
        sums = convert(partial_dtype=jnp.bfloat16, shardings=places) if count > 1 else None
        for name, f, args in (
            ("calibrate, rows on all", observe, (copies, rows[0])),
            ("float32, weights on all", jax.jit(network), (given, whole)),
            ("W8A8, weights on all", jax.jit(convert()), (q, whole)),
            ("W8A8, sums of bfloat16", sums and jax.jit(sums), (q, whole)),
        ):
            if f is None:
                continue
            compiled = f.lower(*args).compile()
            text = compiled.as_text()
            sent, collectives = bytes_sent(text, count) if count > 1 else (Counter(), 0)
            records[name, count] = {
                "part": "hosts",
                "call": name,
                "devices": count,
                "sends": dict(sent),
                "collectives": collectives,
                "instructions": _instructions(text),
            }
            calls[name, count] = functools.partial(_run, compiled, args)
    for key, timing in interleave(calls, seconds).items():
        yield records[key] | {"seconds": timing.median}


def _run(compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(compiled(*args))


def devices_of(target: str) -> list[Any] | None:
    """Returns eight devices of a target, `None` where its compiler is not installed."""
    known = lowering.TARGETS[target]
    modules = list(filter(lowering._is_installed, known.modules))
    if not modules:
        return None
    with lowering._present(known.environment):
        if known.platform == "tpu":
            return compat.devices_of_topology("tpu", "v5e:2x4")
        config = resources.files("jqx._src.diagnostics").joinpath(f"{target}.textproto").read_text()
        return compat.devices_of_topology(
            "cuda", "", plugin=modules[0], target_config=config, topology="1x1x8"
        )


def programs(target: str, devices: Sequence[Any]) -> Iterator[Record]:
    """Yields what collectives send, compiled for eight devices."""
    mesh = Mesh(np.array(devices), ("i",))
    x = jax.ShapeDtypeStruct((COUNT * SIZE,), jnp.float32, sharding=NamedSharding(mesh, P("i")))
    options = lowering.TARGETS[target].options or None

    for name, (f, often) in COLLECTIVES.items():
        floats = often * (1 - 1 / COUNT) * SIZE * 4
        for spec in SPECS:
            body = functools.partial(f, axis_name="i", spec=spec)
            mapped = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
            compiled = jax.jit(mapped).lower(x).compile(compiler_options=options)
            found, collectives = bytes_sent(compiled.as_text(), COUNT)
            yield {
                "part": "programs",
                "target": target,
                "collective": name,
                "spec": spec,
                "sends": dict(found),
                "of_float32": found.total() / floats,
                "collectives": collectives,
            }


def all_programs() -> Iterator[Record]:
    """Yields the same for each target, and prints which compilers are not installed."""
    for target in ("tpu-v5e", "h200"):
        devices = devices_of(target)
        if devices is None:
            extra = lowering.TARGETS[target].extra
            print(f"\nskipped: no compiler for {target}: the extra {extra} is not installed")
        else:
            yield from programs(target, devices)


def model() -> Iterator[Record]:
    """Yields what the model says; nothing is measured."""
    ways: tuple[tuple[str, Sequence[Way]], ...] = (("sum", SUMS), ("gather", GATHERS))
    for network in NETWORKS:
        for kind, own in ways:
            for way in own:
                times = {name: way.time(network, size) for name, size in ARRAYS.items()}
                if None in times.values():
                    continue
                yield {
                    "part": "model, not measured",
                    "network": network.name,
                    "devices": network.count,
                    "kind": kind,
                    "way": way.name,
                    "bytes_an_element": way.sent(network),
                    "seconds": times,
                    "of_bfloat16": {
                        name: times[name] / own[1].time(network, size)
                        for name, size in ARRAYS.items()
                    },
                }


def _bytes(sends: dict[str, float]) -> str:
    return ", ".join(f"{kind} {size:,.0f}" for kind, size in sorted(sends.items())) or "nothing"


def print_hosts(records: Sequence[Record]) -> None:
    """Prints the first table."""
    print("\nDevices of the CPU, which share its cores: time is not that of other machines. XLA on")
    print("CPU adds bfloat16 in float32.\n")
    rows = [
        [
            r["call"],
            str(r["devices"]),
            _bytes(r["sends"]),
            str(r["collectives"]),
            str(r["instructions"]),
            f"{1e3 * r['seconds']:.2f}",
        ]
        for r in records
    ]
    print_table(["call", "devices", "sends", "collectives", "instructions", "ms"], rows)


def print_programs(records: Sequence[Record]) -> None:
    """Prints the second table."""
    print(f"\nCompiled for {COUNT} devices, {SIZE:,} elements on each. Time: not measured.\n")
    rows = [
        [
            r["target"],
            r["collective"],
            r["spec"],
            _bytes(r["sends"]),
            f"{r['of_float32']:.3f}",
            str(r["collectives"]),
        ]
        for r in records
    ]
    print_table(["target", "collective", "spec", "sends", "of float32", "collectives"], rows)


def print_model(records: Sequence[Record]) -> None:
    """Prints the third table and what it assumes."""
    print("\nMODEL, NOT MEASURED. It assumes:\n")
    print(*(f"  {line}" for line in ASSUMED), sep="\n")
    sizes = ", ".join(f"{name} of {size:,} elements" for name, size in ARRAYS.items())
    print(f"\nArrays: {sizes}.\n")
    heads = [head for name in ARRAYS for head in (f"{name}: ms", "of bfloat16")]
    rows = [
        [
            r["network"],
            r["way"],
            f"{r['bytes_an_element']:.2f}",
            *(
                text
                for name in ARRAYS
                for text in (f"{1e3 * r['seconds'][name]:.3f}", f"{r['of_bfloat16'][name]:.2f}")
            ),
        ]
        for r in records
    ]
    print_table(["network", "way", "bytes an element", *heads], rows)


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="of timing (default: 20)")
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


def main() -> None:
    """Prints the tables."""
    args = arguments_given()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", COUNT)
    facts, load = environment(), ForeignLoad()
    print_environment(facts)
    records: list[Record] = []
    if "hosts" not in args.skip:
        records += (found := list(hosts(args.seconds)))
        print_hosts(found)
        cores = load.cores()
        print(f"\nforeign load: {'unknown' if cores is None else f'{cores:.2f} cores'}")
    if "programs" not in args.skip:
        found = list(all_programs())
        if found:
            print_programs(found)
        records += found
    if "model" not in args.skip:
        records += (found := list(model()))
        print_model(found)
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
