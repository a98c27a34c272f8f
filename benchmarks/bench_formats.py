"""What does a number format cost, beside int8 and beside the peers that have it, on the CPU?

    python benchmarks/bench_formats.py [--seconds 180] [--json PATH]

float32 to codes and back at 4 Mi elements (2048 x 2048). "encode" quantizes with a given scale, one
for the tensor or one for each block; "fit + encode" finds the scale as well; "decode" is back to
float32. Packed codes lie along the last axis. Ratios are to jqx's int8 of the same task, one scale
for the tensor, timed in the same rounds; peers find their scales themselves, so they stand beside
"fit + encode". "x peer" divides by the fastest peer with the same format and blocks.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _harness import (
    ForeignLoad,
    Timing,
    environment,
    fresh,
    interleave,
    print_environment,
    print_table,
    threads,
    write_json,
)

import jqx
from jqx import numerics as n

SIDE = 2048
NOISE = 1.05  # "no slower" allows 5 % of noise
TENSOR, BLOCK32 = jqx.per_tensor(), jqx.per_block({0: 1, 1: 32})
BLOCK16, BLOCK64 = jqx.per_block({0: 1, 1: 16}), jqx.per_block({0: 1, 1: 64})

FORMATS: dict[str, tuple[Any, Any, bool]] = {  # qtype, granularity, packed
    "int8": (jnp.int8, TENSOR, False),
    "int8, blocks of 32": (jnp.int8, BLOCK32, False),
    "int4 packed": (jnp.int4, TENSOR, True),
    "int4 packed, blocks of 32": (jnp.int4, BLOCK32, True),
    "int2 packed": (jnp.int2, TENSOR, True),
    "int3": (n.int3, TENSOR, False),
    "int6 packed": (n.int6, TENSOR, True),
    "float8_e4m3fn": (jnp.float8_e4m3fn, TENSOR, False),
    "float8_e5m2": (jnp.float8_e5m2, TENSOR, False),
    "float8_e4m3fnuz": (jnp.float8_e4m3fnuz, TENSOR, False),
    "float6_e2m3fn": (n.float6_e2m3fn, TENSOR, False),
    "float4_e2m1fn packed": (jnp.float4_e2m1fn, TENSOR, True),
    "nf4 packed, blocks of 64": (n.nf4, BLOCK64, True),
    "mxfp8_e4m3": (n.mxfp8_e4m3, BLOCK32, False),
    "mxfp4 packed": (n.mxfp4, BLOCK32, True),
    "mxint8": (n.mxint8, BLOCK32, False),
    "nvfp4 packed": (n.nvfp4, BLOCK16, True),
}
TASKS = ("encode", "fit + encode", "decode")


def jqx_variants(name: str, x: jax.Array) -> dict[str, Callable[[], object]]:
    """Returns the calls of one format, by task."""
    qtype, granularity, packed = FORMATS[name]
    spec, pack = jqx.QSpec(qtype, granularity), 1 if packed else None
    affine = jax.jit(lambda x: spec.calibrator.fit(x, spec))(x)

    def encode(x: jax.Array, affine: Any) -> Any:
        return jqx.QTensor.quantize(x, spec, affine, pack=pack)

    q = jax.jit(encode)(x, affine)
    return {
        "encode": fresh(encode, x, affine),
        "fit + encode": fresh(lambda x: jqx.QTensor.quantize(x, spec, pack=pack), x),
        "decode": fresh(lambda q: q.dequantize(), q),
    }


def qwix_variants(x: jax.Array) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yields (format, task, call) of qwix's own formats."""
    import qwix

    plain = {"int8": jnp.int8, "float8_e4m3fn": jnp.float8_e4m3fn, "float8_e5m2": jnp.float8_e5m2}
    plain |= {"int4 packed": jnp.int4, "int2 packed": "int2", "int3": "int3"}
    blocks = {"nf4 packed, blocks of 64": ("nf4", 64), "int8, blocks of 32": (jnp.int8, 32)}
    blocks |= {"int4 packed, blocks of 32": (jnp.int4, 32)}
    blocks |= {"mxfp8_e4m3": ("mxfp8", 32), "mxfp4 packed": ("mxfp4", 32)}
    options = {name: (qtype, {}) for name, qtype in plain.items()} | {
        name: (qtype, {"channelwise_axes": [0], "tiled_axes": {1: size}})
        for name, (qtype, size) in blocks.items()
    }
    for name, (qtype, keywords) in options.items():

        def encode(x: jax.Array, qtype=qtype, keywords=keywords) -> Any:
            return jax.tree.leaves(qwix.quantize(x, qtype, **keywords))

        try:
            leaves = jax.jit(encode)(x)
        except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
            print(f"qwix has no {name}: {type(error).__name__}")
            continue
        yield name, "fit + encode", fresh(encode, x)
        q = qwix.quantize(x, qtype, **keywords)
        structure = jax.tree.structure(q)
        decode = fresh(lambda v, s=structure: qwix.dequantize(jax.tree.unflatten(s, v)), leaves)
        yield name, "decode", decode


def torchao_variants(x: jax.Array) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yields (format, task, call) of torchao's block formats."""
    import numpy as np
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    torch.set_num_threads(threads())
    t = torch.from_numpy(np.array(x))
    yield "mxfp8_e4m3", "fit + encode", lambda: to_mx(t, torch.float8_e4m3fn, 32)
    yield "mxfp4 packed", "fit + encode", lambda: to_mx(t, torch.float4_e2m1fn_x2, 32)

    def int8(block: tuple[int, int]) -> object:
        parameters = choose_qparams_affine(t, MappingType.SYMMETRIC, block, torch.int8)
        return quantize_affine(t, block, *parameters, torch.int8)

    yield "int8, blocks of 32", "fit + encode", lambda: int8((1, 32))
    yield "int8", "fit + encode", lambda: int8((SIDE, SIDE))


def peer_variants(x: jax.Array) -> dict[tuple[str, str], dict[str, Callable[[], object]]]:
    found: dict[tuple[str, str], dict[str, Callable[[], object]]] = {}
    for library, variants in {"qwix": qwix_variants, "torchao": torchao_variants}.items():
        try:
            for name, task, call in variants(x):
                found.setdefault((name, task), {})[library] = call
        except ImportError as error:
            print(f"{library} is left out: {error}")
    return found


def record(name: str, task: str, timings: dict[str, Timing]) -> dict[str, Any]:
    own, base = timings["jqx"], timings["int8"]
    peers = {k: v for k, v in timings.items() if k not in ("jqx", "int8")}
    peer = min(peers, key=lambda k: peers[k].median, default=None)
    return {
        "format": name,
        "task": task,
        "ms": own.median * 1e3,
        "p10_ms": own.p10 * 1e3,
        "to_int8": own.ratio(base),
        "p10_to_int8": own.quiet_ratio(base),
        "peer": peer or "-",
        "to_peer": own.ratio(peers[peer]) if peer else None,
    }


def goals(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yields each goal with what was measured."""
    at = {(r["format"], r["task"]): r for r in records}
    for name, bound in {"int4 packed": 1.3, "float8_e4m3fn": 3.0}.items():
        r = at[name, "encode"]
        met = "met" if r["to_int8"] <= bound else "missed"
        yield f"{met}: {name} encode / int8, at most {bound}: {r['to_int8']:.2f}"
    for r in records:
        if r["peer"] == "qwix" and r["to_peer"] > NOISE:
            yield f"missed: {r['format']} {r['task']} / qwix, at most 1: {r['to_peer']:.2f}"
    slowest = max((r["to_peer"] for r in records if r["peer"] == "qwix"), default=None)
    if slowest is not None and slowest <= NOISE:
        yield f"met: never slower than qwix: {slowest:.2f} at worst"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180, help="of measuring, in all")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    facts = environment()
    print_environment(facts)
    x = jax.random.normal(jax.random.key(0), (SIDE, SIDE))
    peers, base = peer_variants(x), jqx_variants("int8", x)
    records, load = [], ForeignLoad()
    for name in FORMATS:
        own = jqx_variants(name, x)
        for task in TASKS:
            variants = {"int8": base[task], "jqx": own[task], **peers.get((name, task), {})}
            seconds = args.seconds / len(FORMATS) / len(TASKS)
            records.append(record(name, task, interleave(variants, seconds)))
    print()
    head = ("format", "task", "ms", "p10 ms", "x int8", "x int8 p10", "peer", "x peer")
    rows = [
        ["-" if v is None else f"{v:.2f}" if isinstance(v, float) else v for v in r.values()]
        for r in records
    ]
    print_table(head, rows)
    facts["foreign_load_cores"] = cores = load.cores()
    if cores is not None:
        print(f"\nother processes kept {cores:.2f} of {threads()} cores busy meanwhile")
    print(*goals(records), sep="\n")
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
