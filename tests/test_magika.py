"""The classifier of files of the examples: on a small file of chance, and on the real one."""

import gzip
import importlib.util
import io
import json
import marshal
import os
import pathlib
import struct
import zipfile

import numpy as np
import pytest

from .environment import example

pytestmark = pytest.mark.usefixtures("as_users_write")
TOKENS, WIDTH, BLOCK, POSITIONS, KERNEL, CHANNELS, LABELS = 9, 4, 2, 8, 3, 6, 5
CONFIG = {"beg_size": 4, "end_size": 3, "block_size": 6, "padding_token": 256}


@pytest.fixture(scope="module")
def magika():
    """The example, as a module."""
    return example("magika")


# Protocol buffers, written by hand.


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def field(number, value):
    """A field: an integer, or a string, bytes or a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(name, x):
    """A constant of ONNX."""
    dims = b"".join(field(1, n) for n in x.shape)
    dtype = {"float32": 1, "int64": 7}[x.dtype.name]
    return dims + field(2, dtype) + field(8, name) + field(9, x.tobytes())


def onnx(constants):
    """A file of ONNX with a version, a node, constants, and a name."""
    graph = field(1, field(4, "Tanh")) + field(2, "graph")
    graph += b"".join(field(5, tensor(name, x)) for name, x in constants.items())
    return field(1, 8) + field(2, "by hand") + field(7, graph) + field(8, field(2, 15))


def test_constants_of_a_file_are_read_by_name(magika):
    constants = {
        "a": np.arange(6, dtype="f4").reshape(2, 3),
        "n" * 300: np.float32(2.5).reshape(()),
        "many": np.arange(5000, dtype="f4").reshape(1, 5000, 1),
        "none": np.zeros((0, 3), "f4"),
    }
    found = magika.read_onnx(onnx({**constants, "indices": np.arange(4)}))
    assert list(found) == list(constants)
    for name, x in constants.items():
        assert found[name].shape == x.shape
        np.testing.assert_array_equal(found[name], x)


def test_fields_are_read_of_every_kind(magika):
    fixed = struct.pack("<d", 1.5), struct.pack("<f", 2.5)
    message = field(1, 2**63 - 1) + varint(2 << 3 | 1) + fixed[0] + field(3, b"")
    message += varint(300 << 3 | 5) + fixed[1]
    assert list(magika.fields(message)) == [
        (1, 2**63 - 1),
        (2, fixed[0]),
        (3, b""),
        (300, fixed[1]),
    ]
    with pytest.raises(ValueError, match="unknown kind 3"):
        list(magika.fields(varint(1 << 3 | 3)))
    for size in (1, 3, 7):
        with pytest.raises(ValueError, match=f"a field ends {size} bytes after"):
            list(magika.fields(field(1, b"1234567890")[:-size]))


# The model.


@pytest.fixture(scope="module")
def small():
    """The constants of a small model, as the real file names them."""
    rng, inner = np.random.default_rng(0), "pjit_get_logits_/MagikaV2/"
    wide = WIDTH * BLOCK
    shapes = {
        "Const:0": (TOKENS, WIDTH),
        f"{inner}Dense_0/Reshape:0": (1, 1, WIDTH),
        f"{inner}LayerNorm_0/Reshape_2:0": (1, POSITIONS, 1),
        f"{inner}LayerNorm_0/Reshape_3:0": (1, POSITIONS, 1),
        f"{inner}Conv_0/transpose_3:0": (CHANNELS, wide, KERNEL, 1),
        f"{inner}LayerNorm_1/Reshape_2:0": (1, CHANNELS),
        f"{inner}LayerNorm_1/Reshape_3:0": (1, CHANNELS),
        "Const_24:0": (CHANNELS, LABELS),
        f"{inner}Dense_1/Reshape:0": (1, LABELS),
    }
    found = {f"jax2tf_get_logits_/{name}": shape for name, shape in shapes.items()}
    found["const_fold_opt__209"] = (1, CHANNELS, 1)
    return {name: rng.normal(size=shape).astype("f4") for name, shape in found.items()}


def oracle(constants, tokens):
    """Logits in float64, as the nodes of the real file have them."""
    of = {name.rpartition("MagikaV2/")[2].split("_/")[-1]: x for name, x in constants.items()}
    of = {name: np.float64(x) for name, x in of.items()}

    def gelu(x):
        return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def norm(x, name):  # over what comes after the batch
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
        return x * of[f"{name}/Reshape_2:0"] + of[f"{name}/Reshape_3:0"]

    kernel = of["Conv_0/transpose_3:0"][..., 0]
    channels, wide, size = kernel.shape
    x = gelu(of["Const:0"][tokens] + of["Dense_0/Reshape:0"]).reshape(len(tokens), -1, wide)
    x = norm(x, "LayerNorm_0")
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis=1)
    products = windows.reshape(*windows.shape[:2], -1) @ kernel.reshape(channels, -1).T
    x = gelu(products.swapaxes(1, 2) + of["const_fold_opt__209"]).max(-1)
    return norm(x, "LayerNorm_1") @ of["Const_24:0"] + of["Dense_1/Reshape:0"]


def tolerance(logits, terms):
    """Seven sums of up to `terms` rounded terms (two means, two squares, the convolution, the head,
    the table with its bias), whose errors add up as random ones do, and as much again for what each
    error becomes in the layers after it.
    """
    return 2**-24 * np.sqrt(terms) * 2 * 7 * np.abs(logits).max()


def test_the_model_is_that_of_the_file(magika, small):
    tokens = np.random.default_rng(1).integers(0, TOKENS, (3, POSITIONS * BLOCK))
    want = oracle(small, tokens)
    assert want.shape == (3, LABELS)
    found = magika.pretrained(onnx(small))(tokens.astype("i4"))
    np.testing.assert_allclose(found, want, rtol=0, atol=tolerance(want, WIDTH * BLOCK * KERNEL))


# Files.


def test_both_ends_of_a_file_are_looked_at(magika):
    pad = CONFIG["padding_token"]
    for content, head, tail in (
        (b"abcdefghij", b"abcd", b"hij"),
        (b" \n\tabcdefg\n \t", b"abc", b"efg"),  # blocks of six are stripped
        (b"abc", b"abc", b"abc"),
        (b" a ", b"a ", b" a"),  # on one side each
        (b"", b"", b""),
        (bytes(range(250, 256)), bytes(range(250, 254)), bytes(range(253, 256))),
    ):
        want = [*head, *[pad] * (4 - len(head)), *[pad] * (3 - len(tail)), *tail]
        found = magika.tokens_of(content, CONFIG)
        assert found.dtype == np.int32 and found.tolist() == want, content


def test_files_that_calibrate_are_others(magika, monkeypatch, tmp_path):
    """None comes twice, and none is too short."""
    config = {**CONFIG, "beg_size": 64, "end_size": 64, "block_size": 128}
    contents = [b"%02d" % i * 40 for i in range(30)] + [b"07" * 40, b"x" * 63, b" " * 200]
    for i, content in enumerate(reversed(contents)):
        (tmp_path / f"{i}.py").write_bytes(content)
    paths = [tmp_path / f"{i}.py" for i in range(len(contents))]
    monkeypatch.setattr(magika, "paths_of_kinds", lambda: {"py": paths, "c": paths[:5]})
    evaluation, calibration = magika.labelled(config)
    assert (len(evaluation), len(calibration)) == (magika.MOST * 3 // 4, magika.MOST // 4)
    own = [tokens.tobytes() for _, tokens in evaluation + calibration]
    assert len(set(own)) == magika.MOST  # the `c` files have the contents of `py` files
    batches = magika.batches_of(evaluation)
    assert [batch.shape for batch in batches] == [(magika.BATCH, 128)]
    np.testing.assert_array_equal(batches[0][: len(evaluation)], [x for _, x in evaluation])


def test_files_of_this_machine_are_found_in_an_order_of_chance(magika, monkeypatch):
    monkeypatch.setattr(magika, "PACKAGES", ("json", "no_such_package"))
    found = magika.paths_of_kinds()
    assert list(found) == magika.KINDS.split()
    for kind, paths in found.items():
        assert all(path.suffix == f".{kind}" for path in paths)
    assert len(found["py"]) > 300
    assert found["py"] != sorted(found["py"])


# The real file.


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("magika") is None,
    reason="needs the weights: pip install --no-deps magika",
)
class TestPretrained:
    @pytest.fixture
    def folder(self, magika):
        return magika.package()

    @pytest.fixture
    def config(self, folder):
        return json.loads((folder / "config.min.json").read_text())

    def tokens(self, magika, config):
        """Files whose labels nobody doubts, beside bytes of chance."""
        source = pathlib.Path(os.__file__).read_bytes()
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(zipfile.ZipInfo("os.py"), source)
        compiled = (
            importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(compile(source, "", "exec"))
        )
        files = {
            "python": source,
            "gzip": gzip.compress(source, mtime=0),
            "zip": archive.getvalue(),
            "pythonbytecode": compiled,
            "randombytes": np.random.default_rng(0).bytes(5000),
        }
        return {label: magika.tokens_of(content, config) for label, content in files.items()}

    def test_files_are_told(self, magika, folder, config):
        known = self.tokens(magika, config)
        model = magika.pretrained((folder / "model.onnx").read_bytes())
        logits = np.asarray(model(np.stack(list(known.values()))))
        found = [config["target_labels_space"][i] for i in logits.argmax(-1)]
        assert found == list(known)

    def test_logits_are_those_of_onnxruntime(self, magika, folder, config):
        """The file ends with a softmax: the sum before it is made an output as well."""
        runtime = pytest.importorskip("onnxruntime", reason="needs: pip install onnxruntime")
        logits = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/Dense_1/AddV2:0"
        output = field(12, field(1, logits) + field(2, field(1, field(1, 1))))
        data = (folder / "model.onnx").read_bytes()
        parts = [(n, bytes(x) + output if n == 7 else x) for n, x in magika.fields(data)]
        session = runtime.InferenceSession(b"".join(field(n, x) for n, x in parts))
        tokens = np.stack(list(self.tokens(magika, config).values()))
        (theirs,) = session.run([logits], {"bytes": tokens})
        ours = np.asarray(magika.pretrained(data)(tokens))
        want = oracle(magika.read_onnx(data), tokens)
        for found in (ours, theirs):
            np.testing.assert_allclose(found, want, rtol=0, atol=tolerance(want, 5 * 256))
        print(f"ours to theirs: {np.abs(ours - theirs).max():.2g}, of {np.abs(want).max():.3g}")
