"""`convert`, `verify`, `diff` and `plot`, of files that exist."""

import importlib.util
import json
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.diagnostics.report import measure
from jqx.diagnostics import plots
from jqx.interop import read_gguf, write

from ..arrays import on_device
from ..interop.files import CHECKPOINTS
from ..tensor.tensors import spec, spread_out
from .files import error_of, run, run_json, saved, torch_weights

GGUF = CHECKPOINTS / "gguf-0.19.0" / "model.gguf"
FLOATS = {
    "layers.0.up.weight": spread_out((32, 64), 0),
    "layers.0.norm.weight": spread_out((64,), 1),
    "lm_head.weight": spread_out((8, 64), 2),
}
HALVES = {name: x.astype(np.float16) for name, x in FLOATS.items()}
RULES = ["--rule", "layers.*up.weight=int4:group=32"]


@pytest.fixture
def folder(tmp_path):
    """A float model as Hugging Face has them."""
    path = tmp_path / "model"
    write(path, FLOATS, "safetensors", config={"model_type": "mine"})
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "mlx"])
def test_a_folder_of_floats_is_quantized_into_the_format_of_others(
    capsys, tmp_path, folder, format
):
    out = tmp_path / "out"
    command = ["convert", folder, out, "--format", format]
    if format == "gptq":
        write(folder, HALVES, "safetensors", config={"model_type": "mine"}, overwrite=True)
        (folder / "tokenizer.json").write_text("{}")
    code, printed, error = run(capsys, *command, *RULES)
    assert error == ""
    assert code == 0 and f"3 tensors, safetensors to {format}; " in printed
    with jqx.interop.read(out) as archive:
        assert archive.format == format and archive.config["model_type"] == "mine"
        q = archive.read("layers.0.up.weight")
    assert isinstance(q, jqx.QTensor) and (out / "tokenizer.json").exists()
    assert run(capsys, "verify", out, folder)[0] == 0
    assert "exists already" in error_of(capsys, *command)
    assert run(capsys, *command, *RULES, "--force")[0] == 0


def test_codes_stay_what_they_are_from_one_format_to_another(capsys, tmp_path, folder):
    chain = [folder, *(tmp_path / name for name in ("a", "b.safetensors", "c.gguf", "d"))]
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps({"general.architecture": "llama"}))
    write(folder, HALVES, "safetensors", config={}, overwrite=True)
    steps = ["gptq", *RULES], ["jqx"], ["gguf", "--metadata", metadata], ["compressed-tensors"]
    for source, target, step in zip(chain[:-1], chain[1:], steps, strict=True):
        code, done = run_json(capsys, "convert", source, target, "--format", *step)
        assert (code, done["format"], done["tensors"]) == (0, step[0], 3)
    _, printed, _ = run(capsys, "convert", chain[1], chain[2], "--format", "jqx", "--force")
    assert "gptq to jqx; 2,304 bytes, as before\n" in printed
    assert read_gguf(chain[3]).tensors["layers.0.up.weight"].format == "Q4_0"
    first, *others = (jqx.load(path)["layers.0.up.weight"] for path in chain[1:])
    for q in others:
        np.testing.assert_array_equal(q.codes, first.codes)
        np.testing.assert_array_equal(q.scale, first.scale)


def test_a_quantized_function_is_converted_and_verified(capsys, tmp_path):
    params = {"up": {"weight": jnp.asarray(spread_out((64, 32)))}}
    batch = (jnp.ones((2, 64)),)
    made = jqx.ptq(lambda p, x: x @ p["up"]["weight"], jqx.presets.w8a16(), progress=False)
    jqx.save(tmp_path / "q", made(params, [batch]))
    reference = saved(tmp_path / "f", params)
    assert run(capsys, "verify", tmp_path / "q", reference)[0] == 0
    assert run(capsys, "report", tmp_path / "q")[0] == 0
    code, _, error = run(capsys, "convert", tmp_path / "q", tmp_path / "o", "--format", "mlx")
    assert code == 2 and "MLX cannot hold the tensor 'up.weight'" in error


def test_what_is_left_out_is_reported(capsys, tmp_path, folder):
    (folder / "notes.txt").write_text("mine")
    code, printed, _ = run(capsys, "convert", folder, tmp_path / "a", "--format", "safetensors")
    assert code == 0 and printed.endswith("left out: the files notes.txt\n")
    _, done = run_json(capsys, "convert", folder, tmp_path / "b", "--format", "jqx")
    files = "the files config.json, notes.txt, tokenizer.json"
    assert done["left_out"] == [files]
    quantized = run_json(capsys, "quantize", folder, tmp_path / "c", *RULES)[1]
    assert quantized["left_out"] == [files]


def test_files_of_jqx_keep_metadata_as_json(capsys, tmp_path):
    _, done = run_json(capsys, "convert", GGUF, tmp_path / "m", "--format", "jqx")
    assert done["left_out"] == []
    with jqx.interop.read(GGUF) as gguf, jqx.interop.read(tmp_path / "m") as archive:
        assert archive.metadata.keys() == gguf.metadata.keys()
        assert archive.metadata["general.name"] == "fixture"
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "llama.rope.freq_base"):
            assert json.loads(archive.metadata[key]) == np.asarray(gguf.metadata[key]).tolist()
    _, done = run_json(capsys, "convert", tmp_path / "m", tmp_path / "n", "--format", "jqx")
    assert done["left_out"] == []


def test_activations_in_a_config_are_reported_as_left_out(capsys, tmp_path):
    w = jqx.QTensor.quantize(jnp.ones((32, 64)), jqx.QSpec("int8", jqx.per_axis(0)))
    tree = {"m.weight": w, "m.k_scale": jnp.ones(1)}
    scheme = "int8:token:dynamic"
    write(tmp_path / "a", tree, "compressed-tensors", config={}, activation=scheme)
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8}
    path.write_text(json.dumps(config))
    to = ["--format", "compressed-tensors"]
    _, done = run_json(capsys, "convert", tmp_path / "a", tmp_path / "b", *to)
    cache = "kv_cache_scheme of the config"
    assert done["left_out"] == ["input_activations of the config", cache]
    to += ["--activation", scheme]
    _, done = run_json(capsys, "convert", tmp_path / "a", tmp_path / "c", *to)
    assert done["left_out"] == [cache]


def test_the_plan_of_a_quantized_function_is_reported_as_left_out(capsys, tmp_path):
    made = jqx.ptq(lambda p, x: x @ p["up"], jqx.presets.w8a8(), progress=False)
    jqx.save(tmp_path / "q", made({"up": jnp.ones((64, 32))}, [(jnp.ones((2, 64)),)]))
    _, done = run_json(capsys, "convert", tmp_path / "q", tmp_path / "o", "--format", "jqx")
    assert "the plan and the scales of activations" in done["left_out"][0]


def test_verify_finds_faults(capsys, tmp_path, folder):
    wrong = {**FLOATS, "lm_head.weight": -FLOATS["lm_head.weight"], "k_scale": np.zeros(1, "f4")}
    other = saved(tmp_path / "other", wrong)
    code, printed, _ = run(capsys, "verify", other, folder)
    assert code == 1 and "a scale is 0" in printed and "2 of them wrong" in printed
    code, done = run_json(capsys, "verify", other, folder, "--ignore", "k_scale")
    assert code == 1 and done["problems"] == ["'lm_head.weight': less than 20 dB"]
    ignored = ["--ignore", "k_scale", "--ignore", "lm_head.*"]
    assert run(capsys, "verify", other, folder, *ignored)[0] == 0


def test_arguments_that_do_not_fit(capsys, tmp_path, folder):
    no, out = tmp_path / "no", tmp_path / "out"
    both = saved(tmp_path / "both", {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)})
    for source, words, *argv in [
        (folder, "--format"),
        (folder, "is quantized, for", "--format", "gptq"),
        (folder, "general.architecture", "--format", "gguf"),
        (folder, "`--config` has no use for jqx", "--format", "jqx", "--config", folder),
        (folder, "`--metadata` has no use", "--format", "mlx", "--metadata", folder, *RULES),
        (folder, "No such file", "--format", "gguf", "--metadata", no),
        (no, "cannot be opened", "--format", "mlx"),
        (GGUF, "GGUF cannot hold", "--format", "gguf"),
        (both, "two tensors have the same name", "--format", "safetensors"),
    ]:
        assert words in error_of(capsys, "convert", source, out, *argv)
    assert not out.exists()


@pytest.fixture
def files(tmp_path):
    """Saves two trees and returns their paths."""

    def save(a, b):
        return saved(tmp_path / "a", a), saved(tmp_path / "b", b)

    return save


def only(capsys, files, a, b):
    """The one difference of two trees."""
    code, done = run_json(capsys, "diff", *files(a, b))
    assert code == 1 and not done["equal"]
    (difference,) = done["differences"]
    return difference


def test_equal_files_are_equal(capsys, files):
    tree = {**torch_weights(), "q": jqx.QTensor.quantize(jnp.ones((2, 2)), spec(jnp.int8))}
    tree["nan"] = np.array([np.nan, np.inf, -0.0], np.float32)
    code, text, _ = run(capsys, "diff", *files(tree, tree))
    assert (code, text) == (0, "9 tensors equal\n")
    assert run_json(capsys, "diff", *files(tree, tree)) == (
        0,
        {"equal": True, "same": 9, "differences": []},
    )


def test_numbers_of_a_change_that_is_known(capsys, files):
    x = np.array([3.0, 4.0, 0.0], np.float32)
    difference = only(capsys, files, {"x": x, "y": x}, {"x": x + np.float32([0, 0, -0.5]), "y": x})
    assert difference == {
        **{"path": "x", "a": "float32[3]", "b": "float32[3]", "what": ["values"]},
        **{"max_abs": 0.5, "relative": 0.1, "sqnr": -20 * math.log10(0.1)},
    }


def test_long_tensors_are_compared_to_their_ends(capsys, files):
    x = np.zeros((3, 1 << 20), np.float32)
    x[0, 0] = 1.0
    y = x.copy()
    y[2, -1] = 2.0
    difference = only(capsys, files, {"x": x}, {"x": y})
    assert (difference["max_abs"], difference["relative"]) == (2.0, 2.0)


X = spread_out((4, 8))
Q = jqx.QTensor.quantize(on_device(X), spec(jnp.int4, jqx.per_axis(0)))
REAL = np.asarray(Q.dequantize())
KINDS = {
    "shape": (X, X.reshape(8, 4), ["shape"], None),
    "rank": (X, X[None], ["shape"], None),
    "dtype": (np.float32([1, 2]), on_device([1, 2], jnp.bfloat16), ["dtype"], 0.0),
    "dtype and values": (np.float32([1, 2]), np.int32([1, 3]), ["dtype", "values"], 1.0),
    "codes and what they stand for": (REAL, Q, ["scheme"], 0.0),
    "codes and what they were made of": (X, Q, ["scheme", "values"], np.abs(X - REAL).max()),
    "layout": (Q, Q.pack(), ["scheme"], 0.0),
    "sign of zero": (np.float32([0.0]), np.float32([-0.0]), ["values"], 0.0),
    "nan": (np.float32([0.0, 1]), np.float32([np.nan, 1]), ["values"], None),
    "infinity": (np.float32([np.inf, 1]), np.float32([np.inf, 2]), ["values"], 1.0),
    "truths": (np.array([True, False]), np.array([True, True]), ["values"], 1.0),
    "complex": (np.complex64([1j]), np.complex64([2j]), ["values"], 1.0),
    "long integers": (np.int64([2**60]), np.int64([2**60 + 1]), ["values"], 0.0),
    "nothing": (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.int8), ["dtype"], 0.0),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_differs_is_named(capsys, files, name):
    a, b, what, largest = KINDS[name]
    difference = only(capsys, files, {"x": a}, {"x": b})
    assert (difference["what"], difference["max_abs"]) == (what, largest)


def test_tensors_in_one_file_alone_are_named(capsys, files):
    a, b = files({"x": X, "gone": X}, {"x": X, "new": Q})
    code, done = run_json(capsys, "diff", a, b)
    assert code == 1 and done["same"] == 1
    assert [(d["path"], d["a"], d["b"], d["what"]) for d in done["differences"]] == [
        ("gone", "float32[4, 8]", None, ["presence"]),
        ("new", None, "int4 per_axis(0), float32[4, 8]", ["presence"]),
    ]
    assert "1 tensors equal, 2 different" in run(capsys, "diff", a, b)[1]


def test_sqnr_of_a_quantized_file_is_that_of_its_report(capsys, tmp_path):
    source = saved(tmp_path / "in", {"weight": spread_out((64, 64))})
    run(capsys, "quantize", source, tmp_path / "out", "--policy", "w4a16")
    _, report = run_json(capsys, "report", source, "--policy", "w4a16")
    _, diff = run_json(capsys, "diff", source, tmp_path / "out")
    want = report["weights"][0]["sqnr"]
    # sums in another order: each of 4096 terms, in float64
    assert abs(diff["differences"][0]["sqnr"] - want) < 20 * 4096 * 2.0**-53 * 100


def test_a_wrong_file_is_two_and_one_line(capsys, tmp_path):
    saved(tmp_path / "a", {"x": X})
    assert "No such file" in error_of(capsys, "diff", tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-1])
    assert "is truncated" in error_of(capsys, "diff", tmp_path / "a", tmp_path / "b")


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def source(tmp_path):
    return saved(tmp_path / "in.safetensors", torch_weights())


@pytest.fixture
def picture(tmp_path):
    return tmp_path / "picture.png"


@pytest.fixture
def drawings(monkeypatch):
    """What the functions that draw are called with."""
    calls = []

    def record(name):
        original = getattr(plots, name)

        def draw(*args, **fields):
            # A mapping reads tensors while the file is open.
            operands = [dict(x) if isinstance(x, Mapping) else x for x in args]
            calls.append((name, operands, fields))
            return original(*args, **fields)

        monkeypatch.setattr(plots, name, draw)

    for name in ("histogram", "ranges", "sqnr_bars"):
        record(name)
    return calls


def test_ranges_are_of_every_float_tensor(capsys, source, picture, drawings):
    code, done = run_json(capsys, "plot", source, "--out", picture)
    floats = [name for name in torch_weights() if name != "position_ids"]
    assert code == 0 and done == {"written": str(picture), "kind": "ranges", "tensors": floats}
    assert picture.read_bytes().startswith(PNG)
    ((name, (arrays,), _),) = drawings
    assert name == "ranges" and list(arrays) == floats
    for name in floats:
        np.testing.assert_array_equal(np.asarray(arrays[name]), torch_weights()[name])


def test_bars_are_of_what_would_be_quantized(capsys, source, picture, drawings):
    flags = ["--kind", "sqnr", "--policy", "w8a16", "--tensor", "layers.*"]
    assert run(capsys, "plot", source, "--out", picture, *flags)[0] == 0
    ((name, (report,), _),) = drawings
    names = ["layers.0.mlp.weight", "layers.1.conv.weight"]
    assert name == "sqnr_bars" and [w.path for w in report.weights] == names
    x = on_device(torch_weights()[names[0]])
    q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    assert report.weights[0] == measure(x, q, names[0])


@pytest.mark.parametrize("first", [False, True])
def test_a_histogram_shows_the_grid_of_one_tensor(
    capsys, source, picture, drawings, tmp_path, first
):
    """Of a float file with a policy, and of the file that `quantize` writes with it."""
    flags = ["--policy", "w4a16"]
    if first:
        assert run(capsys, "quantize", source, tmp_path / "q", *flags)[0] == 0
        source, flags = tmp_path / "q", []
    command = ["plot", source, "--out", picture, "--kind", "histogram", "--tensor", "embed.*"]
    code, out, _ = run(capsys, *command, *flags)
    assert (code, out) == (0, f"{picture}: histogram of 1 tensors\n")
    ((name, (x, q), fields),) = drawings
    assert name == "histogram"
    assert fields == {"title": "embed.weight, int4 per_axis(0)"}
    real = np.asarray(q.dequantize())
    assert np.array_equal(x, real) == first
    (rule,) = jqx.presets.w4a16().rules
    blocks = rule.weight.resolve(rank=2, kept=(0,))
    x = on_device(torch_weights()["embed.weight"])
    np.testing.assert_array_equal(real, jqx.QTensor.quantize(x, blocks).dequantize())


ERRORS = {
    "two for a histogram": (["--kind", "histogram", "--policy", "w8a16"], "shows one quantized"),
    "none for a histogram": (["--kind", "histogram"], "shows one quantized tensor"),
    "no noise": (["--kind", "sqnr"], "there is no noise"),
    "nothing": (["--tensor", "x"], "there is nothing to draw"),
    "integers": (["--tensor", "position_ids"], "there is nothing to draw"),
    "a regex": (["--tensor", "("], "is not a valid regular expression"),
    "a kind": (["--kind", "pie"], "invalid choice: 'pie'"),
    "a rule": (["--rule", "x=int8"], "matches no"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_nothing_is_drawn(capsys, source, picture, name):
    flags, problem = ERRORS[name]
    assert problem in error_of(capsys, "plot", source, "--out", picture, *flags)
    assert not picture.exists()


def test_matplotlib_is_asked_for(capsys, source, picture, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert 'pip install "jqx[examples]"' in error_of(capsys, "plot", source, "--out", picture)
