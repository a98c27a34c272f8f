"""Checkpoints of every format with something changed: read, or refused in four parts; no crash, no
shape that nobody asked for, no memory beyond the file. The slow run of CI makes 2,000 changes to
each format; a longer one is

    pytest -m slow tests/interop/test_mutations.py --dist load --mutations 100000
"""

import json
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import write
from jqx.numerics import mxfp4, nf4, nvfp4

from .files import CHECKPOINTS, write_folder
from .test_readers_of_formats import OSS, experts
from .trees import blocks_of, floats, halved, integers

FEW = 150
BY_128 = jqx.per_block({0: 128, 1: 128})
VALUES = (
    *(None, True, False, -1, 0, 1, 3, 4, 5, 7, 16, 64, 2**31, 2**63, 2**64, 1e300, -0.5),
    *("", "x", "re:(a+)+$", "re:(", [], {}, [1], [[]], {"a": 1}, "int", "float", "group"),
)


def fp8():
    return floats(jqx.QSpec(jnp.float8_e4m3fn, BY_128), (128, 128))


FOLDERS = {
    "compressed-tensors": lambda: {
        "a.weight": integers(4, zeros=True),
        "b.weight": blocks_of(nvfp4, 16, (8, 64)),
    },
    "gptq": lambda: {"a.weight": halved(integers(4, zeros=True, shape=(8, 64)))},
    "awq": lambda: {"a.weight": halved(integers(4, zeros=True, shape=(8, 64)))},
    "fp8": lambda: {"a.weight": fp8()},
    "mlx": lambda: {
        "a.weight": halved(integers(4, shape=(8, 64))),
        "b.weight": blocks_of(mxfp4, 32, (8, 64)),
    },
    "bitsandbytes": lambda: {"a.weight": blocks_of(nf4, 64, (8, 64))},
}


def auto_round(path):
    """Writes a checkpoint of auto-round: layers of GPTQ, whose config is another."""
    write(path, FOLDERS["gptq"](), "gptq", config={})
    fields = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "sym": False}
    config = {**fields, "group_size": 32, "extra_config": {"b.*": {"bits": 16}}}
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))


@pytest.fixture(params=[*FOLDERS, "auto-round", "mxfp4", "gguf", "jqx"])
def source(request, tmp_path):
    """A small checkpoint, and where a changed one is put."""
    kind, path = request.param, tmp_path / "whole"
    if kind in FOLDERS:
        write(path, {**FOLDERS[kind](), "norm.weight": jnp.ones(4)}, kind, config={"a": 1})
    elif kind == "auto-round":
        auto_round(path)
    elif kind == "mxfp4":
        write_folder(path, experts((1, 2, 2)), OSS)
    else:
        path.mkdir()
        if kind == "gguf":
            whole = (CHECKPOINTS / "gguf-0.19.0" / "model.gguf").read_bytes()
            (path / "model.safetensors").write_bytes(whole)
        else:
            jqx.save(path / "model.safetensors", {"a": integers(4), "b": [jnp.ones(3)]})
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    made = tmp_path / "changed"
    made.mkdir()
    return files, made / "model.safetensors" if kind == "gguf" else made


def changed_json(rng, data):
    """Returns JSON with one value replaced, dropped, or doubled under another name."""
    entries = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, item in items:
            entries.append((node, key))
            if isinstance(item, (dict, list)):
                walk(item)

    walk(data)
    node, key = entries[rng.integers(len(entries))]
    kind = rng.integers(4)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[f"{key}{rng.integers(3)}"] = node[key]
    elif kind == 2 and type(node[key]) is int:
        node[key] = node[key] + int(rng.integers(-3, 4))
    else:
        node[key] = VALUES[rng.integers(len(VALUES))]
    return data


def with_header(rng, raw):
    """Returns a safetensors file whose header is changed, its bytes where they were."""
    length = struct.unpack("<Q", raw[:8])[0]
    head = json.dumps(changed_json(rng, json.loads(raw[8 : 8 + length]))).encode()
    return struct.pack("<Q", len(head)) + head + raw[8 + length :]


def with_bytes(rng, raw):
    """Returns a file with one to three bytes changed, most of them near the begin, or cut short."""
    if rng.integers(8) == 0:
        return raw[: rng.integers(len(raw))]
    data = bytearray(raw)
    for _ in range(rng.integers(1, 4)):
        end = len(data) if rng.integers(3) == 0 else min(len(data), 1500)
        data[rng.integers(end)] = rng.integers(256)
    return bytes(data)


def change(rng, files, path):
    """Writes the checkpoint with one change."""
    files = dict(files)
    name = "model.safetensors"
    is_gguf = files[name].startswith(b"GGUF")
    kind = 2 if is_gguf else rng.integers(3)
    if kind == 0 and "config.json" in files:
        text = json.dumps(changed_json(rng, json.loads(files["config.json"])))
        files["config.json"] = text.encode()
    elif kind <= 1:
        files[name] = with_header(rng, files[name])
    else:
        files[name] = with_bytes(rng, files[name])
    if is_gguf:
        path.write_bytes(files[name])
        return
    for file, raw in files.items():
        (path / file).write_bytes(raw)


def check(path):
    """Reads all of it, or is refused; what is read has the shapes that were announced."""
    try:
        with jqx.interop.Archive(path) as archive:
            for name in archive.paths:
                spec, leaf = archive.spec(name), archive.numpy(name)
                assert jax.tree.structure(spec) == jax.tree.structure(leaf)
                for a, b in zip(jax.tree.leaves(spec), jax.tree.leaves(leaf), strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype), name
                if isinstance(leaf, QTensor):
                    assert leaf.shape == spec.shape
    except (ValueError, TypeError, OSError) as error:
        assert "fix: " in str(error) and len(str(error)) < 20_000, repr(error)
        return 0
    return 1


def run(source, count):
    files, path = source
    size = sum(map(len, files.values()))
    read = 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        change(rng, files, path)
        if seed % 50:
            read += check(path)
            continue
        tracemalloc.start()
        read += check(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 40 * size + 4_000_000, seed
    assert 0 < read < count


def test_a_changed_checkpoint_is_read_or_refused(source):
    run(source, FEW)


@pytest.mark.slow
def test_many_changed_checkpoints_are_read_or_refused(source, pytestconfig):
    run(source, pytestconfig.getoption("mutations"))


LARGE = (1024, 4096)
TO_READ = {
    **{
        f"gptq {bits}": ("gptq", lambda bits=bits: halved(integers(bits, shape=LARGE)))
        for bits in (2, 4)
    },
    "gptq order": ("gptq", lambda: halved(integers(4, zeros=True, order=True, shape=LARGE))),
    "awq": ("awq", lambda: halved(integers(4, zeros=True, shape=LARGE))),
    "packed 3": ("compressed-tensors", lambda: integers(3, zeros=True, shape=LARGE)),
    "packed 4": ("compressed-tensors", lambda: integers(4, zeros=True, shape=LARGE)),
    "nvfp4": ("compressed-tensors", lambda: blocks_of(nvfp4, 16, LARGE)),
    "fp8": ("fp8", lambda: floats(jqx.QSpec(jnp.float8_e4m3fn, BY_128), LARGE)),
    "mlx": ("mlx", lambda: halved(integers(4, shape=LARGE))),
    "nf4": ("bitsandbytes", lambda: blocks_of(nf4, 64, LARGE)),
    "Q4_0": ("gguf", lambda: halved(integers(4, shape=LARGE))),
    "MXFP4": ("gguf", lambda: blocks_of(mxfp4, 32, LARGE)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TO_READ)
def test_reading_holds_one_tensor_in_addition_to_the_result(tmp_path, kind):
    """Codes are taken apart in runs, which need some memory whatever the size of a tensor."""
    form, leaf = TO_READ[kind]
    path = tmp_path / "m"
    more = {"config": {}} if form != "gguf" else {"metadata": {"general.architecture": "llama"}}
    write(path, {"a.weight": leaf()}, form, **more)
    runs = 1_500_000
    with jqx.interop.Archive(path) as archive:
        (name,) = archive.paths
        archive.numpy(name)  # tables of codes
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(archive.spec(name)))
        tracemalloc.start()
        result = archive.numpy(name)
        now, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert now >= 0.9 * size and result.nbytes >= size
    assert peak - now <= size + runs, (peak - now) / size


@pytest.mark.slow
def test_a_file_of_2_gb_is_read_a_tensor_at_a_time(tmp_path):
    """Holes stand for zeros. Beside one weight of the result there is one tensor of the file."""
    shape, count, tensors, offset = (8, 4096, 512), 8, {}, 0
    for i in range(count):
        for end, more, size in (("blocks", (16,), 16), ("scales", (), 1)):
            stop = offset + int(np.prod(shape)) * size
            name = f"layers.{i}.proj_{end}"
            tensors[name] = {
                "dtype": "U8",
                "shape": [*shape, *more],
                "data_offsets": [offset, stop],
            }
            offset = stop
    head = json.dumps(tensors).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + offset)
    (tmp_path / "config.json").write_text(json.dumps(OSS))
    assert offset > 2_000_000_000
    tracemalloc.start()
    with jqx.interop.Archive(tmp_path) as archive:
        _, opened = tracemalloc.get_traced_memory()
        for name in archive.paths:
            leaf = archive.numpy(name)
            assert leaf.nbytes == offset // count
            del leaf
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opened < 1_000_000 and peak < 2.1 * offset / count
