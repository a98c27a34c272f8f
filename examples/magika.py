"""A pretrained file classifier, Magika, whose true accuracy can be measured on any machine.

`Magika` is a plain Flax nnx module without quantization. Its weights come from the ONNX file of the
package `magika`; install it with `pip install --no-deps magika`, since only its files are read. A
reader of some thirty lines reads the few fields of protocol buffers that are needed. Every machine
that runs this has files to classify: those of Python's standard library and of the packages that
jqx and its examples need. Their extensions are the true labels, except `txt`, which can be
anything. Prints how often each quantized model is right, and how often it agrees with the float
model, and asserts what it claims.

Needs `pip install -e ".[examples]" && pip install --no-deps magika`. Takes a minute on two cores.
"""

import collections
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqx
import jqx.nnx

MODEL = "magika/models/standard_v3_3"
PACKAGES = ("numpy", "scipy", "jax", "flax", "matplotlib", "sklearn")
KINDS = "c css csv f f90 gif gz h jpg json npy npz pdf pem png py pyc rst so svg ttf wav xml zip"
LABELS = {"f": "fortran", "f90": "fortran", "gz": "gzip", "h": "c cpp", "jpg": "jpeg"}
LABELS |= {
    "py": "python",
    "pyc": "pythonbytecode",
    "so": "elf macho",
}  # others are labels themselves
MOST, BATCH = 24, 32  # files per kind, of which every fourth calibrates; files per batch
SHORTEST = 64  # least number of bytes of a file
DYNAMIC = "W8A8 dynamic"


class Magika(nnx.Module):
    """Logits of the kinds of files (files, tokens); a token is a byte, or padding."""

    def __init__(self, table, kernel, wide, channels, positions, labels, rngs):
        self.shape = (positions, wide)  # four consecutive tokens are a position
        self.embed = nnx.Embed(*table, rngs=rngs)
        self.norm_in = nnx.LayerNorm(positions, reduction_axes=1, feature_axes=1, rngs=rngs)
        self.conv = nnx.Conv(wide, channels, (kernel,), padding="VALID", rngs=rngs)
        self.norm = nnx.LayerNorm(channels, rngs=rngs)
        self.head = nnx.Linear(channels, labels, rngs=rngs)

    def __call__(self, tokens):
        x = nnx.gelu(self.embed(tokens)).reshape(-1, *self.shape)
        x = nnx.gelu(self.conv(self.norm_in(x))).max(1)
        return self.head(self.norm(x))


# The file.


def fields(message):
    """Yields numbers and values (integers or bytes) of the fields of a message."""
    place = 0

    def varint():
        nonlocal place
        value, start = 0, place
        while place == start or message[place - 1] > 127:
            value |= (message[place] & 127) << 7 * (place - start)
            place += 1
        return value

    while place < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        elif kind in (1, 2, 5):
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            place += size
            if place > len(message):
                raise ValueError(f"a field ends {place - len(message)} bytes after its message")
            yield number, message[place - size : place]
        else:
            raise ValueError(f"unknown kind {kind} of a field of protocol buffers")


def read_onnx(data):
    """Returns the float32 constants of an ONNX file (bytes) by name.

    Field 7 of a model is its graph, and field 5 of a graph is a constant. Field 1 of a constant
    has the dimensions, 2 the dtype (1 is float32), 8 the name, and 9 the numbers.
    """
    found = {}
    for tensor in (t for n, graph in fields(data) if n == 7 for m, t in fields(graph) if m == 5):
        parts = collections.defaultdict(list)
        for number, value in fields(tensor):
            parts[number].append(value)
        if parts[2] == [1]:
            found[parts[8][0].decode()] = np.frombuffer(parts[9][0], "<f4").reshape(parts[1])
    return found


def package():
    """Returns the folder of the model by the name of its package; this file is `magika` too."""
    try:
        return Path(str(importlib.metadata.distribution("magika").locate_file(MODEL)))
    except importlib.metadata.PackageNotFoundError:
        sys.exit("This needs the weights: pip install --no-deps magika")


def pretrained(data):
    """Returns the model with the weights of an ONNX file (bytes).

    The table includes the bias that the file adds to it, since every token has one row.
    """
    inner = ("MagikaV2/", "jax2tf_get_logits_/")  # the ends of the long names are enough
    found = read_onnx(data).items()
    of = {name.split(inner[0])[-1].removeprefix(inner[1]): x.squeeze() for name, x in found}
    weights = {
        "embed": {"embedding": of["Const:0"] + of["Dense_0/Reshape:0"]},
        "norm_in": {"scale": of["LayerNorm_0/Reshape_2:0"], "bias": of["LayerNorm_0/Reshape_3:0"]},
        "conv": {"kernel": of["Conv_0/transpose_3:0"].T, "bias": of["const_fold_opt__209"]},
        "norm": {"scale": of["LayerNorm_1/Reshape_2:0"], "bias": of["LayerNorm_1/Reshape_3:0"]},
        "head": {"kernel": of["Const_24:0"], "bias": of["Dense_1/Reshape:0"]},
    }
    shapes = (weights["embed"]["embedding"].shape, *of["Conv_0/transpose_3:0"].T.shape)
    sizes = (*shapes, of["LayerNorm_0/Reshape_2:0"].size, of["Dense_1/Reshape:0"].size)
    graph, state = nnx.split(nnx.eval_shape(lambda: Magika(*sizes, nnx.Rngs(0))))
    for (part, leaf), variable in nnx.to_flat_state(state):
        x = jnp.asarray(weights[part][leaf], jnp.float32)
        assert x.shape == variable.shape, (part, leaf)
        variable.set_value(x)
    return nnx.merge(graph, state)


# Files.


def tokens_of(content, config):
    """Returns the first and last bytes of a file, stripped, with padding between, as int32."""
    first, last, block = config["beg_size"], config["end_size"], config["block_size"]
    head = content[:block].lstrip()[:first]
    tail = content[-block:].rstrip()[-last:]
    tokens = np.full(first + last, config["padding_token"], np.int32)
    tokens[: len(head)] = list(head)
    tokens[len(tokens) - len(tail) :] = list(tail)
    return tokens


def paths_of_kinds():
    """Returns this machine's files by kind, in the order of hashes, which is a random order."""
    known = sysconfig.get_paths()
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    roots = [known["stdlib"], known["include"]]
    roots += [spec.submodule_search_locations[0] for spec in specs if spec]
    found = {kind: [] for kind in KINDS.split()}
    for root in roots:
        for folder, inside, names in os.walk(root):
            inside[:] = [name for name in inside if not name.endswith("-packages")]
            for name in names:
                path = Path(folder, name)
                if path.suffix[1:] in found:
                    own = path.relative_to(Path(root).parent).as_posix()
                    found[path.suffix[1:]].append((hashlib.sha256(own.encode()).digest(), path))
    return {kind: [path for _, path in sorted(own)] for kind, own in found.items()}


def labelled(config):
    """Returns files for evaluation and others for calibration: lists of (kind, tokens).

    Leaves out repeated contents, and files that are too short to be recognised.
    """
    seen, parts = set(), ([], [])
    for kind, paths in paths_of_kinds().items():
        taken = []
        for path in paths:
            tokens = tokens_of(path.read_bytes(), config)
            if tokens[SHORTEST - 1] != config["padding_token"] and tokens.tobytes() not in seen:
                seen.add(tokens.tobytes())
                taken.append((kind, tokens))
            if len(taken) == MOST:
                break
        parts[0].extend(taken[i] for i in range(len(taken)) if i % 4 < 3)
        parts[1].extend(taken[3::4])
    return parts


def batches_of(part):
    """Returns the tokens of files in batches of equal size; padding fills up the last."""
    rows = np.stack([tokens for _, tokens in part])
    fill = np.full((-len(rows) % BATCH, rows.shape[1]), rows.max(), np.int32)
    return np.split(np.concatenate([rows, fill]), -(-len(rows) // BATCH))


LINEAR = "conv/.*|head/.*"  # the table stays in float
NEAREST = jqx.algorithms.nearest()
W8, W4 = jqx.Policy({LINEAR: "int8"}), jqx.Policy({LINEAR: "int4"})
TABLE = [  # name, policy, algorithm, and the least agreement with the float model
    ("float32", jqx.Policy([]), NEAREST, 1.0),
    (DYNAMIC, jqx.Policy({LINEAR: jqx.presets.w8a8_dynamic()}), NEAREST, 0.97),
    ("W8, one scale per channel", W8, NEAREST, 0.97),
    ("W8, table per row too", jqx.Policy({".*": "int8"}), NEAREST, 0.97),
    ("W4, one scale per channel", W4, NEAREST, 0.93),
    ("  GPTQ", W4, jqx.algorithms.gptq(), 0.93),
]


def stored_bytes(weights):
    """Returns the size of weights in a file, with packed codes."""

    def stored(x):
        if not isinstance(x, jqx.QTensor):
            return x.nbytes
        return x.size * jqx.numerics.format_of(x.qtype).bits // 8 + x.nbytes - x.values.nbytes

    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    return sum(map(stored, leaves))


def main():
    """Classifies files, quantizes the classifier in every way, and compares."""
    folder = package()
    config = json.loads((folder / "config.min.json").read_text())
    model = pretrained((folder / "model.onnx").read_bytes())
    evaluation, calibration = labelled(config)
    kinds, batches = [kind for kind, _ in evaluation], batches_of(evaluation)
    counts = ", ".join(f"{n} {kind}" for kind, n in collections.Counter(kinds).items())
    print(f"{len(kinds)} files, calibrated on {len(calibration)} others: {counts}\n")
    print(f"{'scheme':28}{'right':>9}{'as float32':>12}{'MB':>7}")
    labels, whole, told = np.array(config["target_labels_space"]), None, None
    for name, policy, algorithm, goal in TABLE:
        quantize = jqx.nnx.ptq(model, policy, algorithm)
        done = quantize(batches_of(calibration))
        function, params, whole = done.function, done.params, whole or done
        if name == DYNAMIC:  # in float, since XLA on CPU convolves integers 100 times slower
            function, params = jqx.simulate(whole.function, done.plan, done.affines), whole.params
        call = jax.jit(function)
        logits = np.concatenate([call(params, batch) for batch in batches])
        found = labels[logits[: len(kinds)].argmax(-1)]
        told = found if told is None else told
        right = np.mean([a in LABELS.get(b, b).split() for a, b in zip(found, kinds, strict=True)])
        same, size = np.mean(found == told), stored_bytes(done.params) / 1e6
        print(f"{name:28}{100 * right:7.1f} %{100 * same:10.1f} %{size:7.2f}", flush=True)
        assert same >= goal, f"{name}: expected to agree with float32 on {goal}"
        assert right > 0.88, f"{name} is wrong too often"
    print("\nClaims hold.")


if __name__ == "__main__":
    main()
