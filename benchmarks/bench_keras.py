"""How fast is a convolutional network of Keras in int8, beside OpenVINO, on the CPU?

    python benchmarks/bench_keras.py [--pictures 1 8] [--seconds 60] [--json PATH]

ResNet50 of `keras.applications` with random weights, as a function of its variables: in float32, by
`jqx.ptq` in W8A8 with static scales (with jqx-cpu if it is installed), and beside them OpenVINO in
float32, on the file of `jqx.interop.to_onnx`, and on what NNCF makes of that file in int8. All take
turns in one process. Needs `pip install keras onnx openvino nncf`, and for NNCF what it needs to
read ONNX.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import jax
import keras
import numpy as np
import onnx
from _export_peers import Openvino, Task
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
from jqx.interop import to_onnx

SIZE = 224
BASE = "jqx, float32"


def pictures(seed: int, count: int) -> np.ndarray:
    """Random pictures."""
    return np.random.default_rng(seed).normal(size=(count, SIZE, SIZE, 3)).astype(np.float32)


def calls(count: int, folder: Path) -> dict[str, Call]:
    """Returns what computes the classes of some pictures, by name."""
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None)
    paths = [v.path for v in model.trainable_variables]
    params = {v.path: v.value for v in model.trainable_variables}
    statistics = [v.value for v in model.non_trainable_variables]

    def classes(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        result, _ = model.stateless_call([params[path] for path in paths], statistics, x)
        return result

    batches, x = [pictures(seed, count) for seed in (1, 2)], pictures(0, count)
    quantized = jqx.ptq(classes, jqx.presets.w8a8(), jqx.algorithms.nearest())(params, batches)
    found = {
        BASE: fresh(classes, params, x),
        "jqx, W8A8 static": fresh(quantized.function, quantized.params, x),
    }
    runtime, path = Openvino(), folder / "float.onnx"
    onnx.save(to_onnx(classes, params)(x), path)
    task = Task(path, [(batch,) for batch in batches], True, [])
    int8 = folder / "int8.xml"
    runtime.quantizers(task)["W8A8 static"](int8)
    found["OpenVINO, float32"] = runtime.load(path, "float")((x,))
    found["OpenVINO, W8A8 static by NNCF"] = runtime.load(int8, "W8A8 static")((x,))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=60, help="for each number of pictures")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    args = parser.parse_args()
    facts, load, records, rows = environment(), ForeignLoad(), [], []
    print_environment(facts)
    for count in args.pictures:
        with tempfile.TemporaryDirectory() as folder:
            timings = interleave(calls(count, Path(folder)), args.seconds)
        for name, timing in timings.items():
            ratio = timing.ratio(timings[BASE])
            rows.append([str(count), name, f"{timing.median * 1e3:.1f}", f"{ratio:.2f}"])
            records.append({"pictures": count, "variant": name, "ms": timing.median * 1e3})
    print_table(["pictures", "variant", "ms", "ratio"], rows)
    cores = load.cores()
    print(f"\nforeign load: {'unknown' if cores is None else f'{cores:.2f} cores'}")
    if args.json:
        write_json(args.json, facts, records)


if __name__ == "__main__":
    main()
