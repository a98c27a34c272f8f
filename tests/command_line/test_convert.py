"""`python -m jqx convert` and `verify`."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.interop import read_gguf, write

from ..interop.raw_folders import CHECKPOINTS
from ..tensor.tensors import spread_out
from .files import error_of, run, run_json, saved

FLOATS = {
    "layers.0.up.weight": spread_out((32, 64), 0),
    "layers.0.norm.weight": spread_out((64,), 1),
    "lm_head.weight": spread_out((8, 64), 2),
}
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
    rules = ["--rule", "layers.*up.weight=int4:group=32"]
    if format == "gptq":
        half = {name: x.astype(np.float16) for name, x in FLOATS.items()}
        write(folder, half, "safetensors", config={"model_type": "mine"}, overwrite=True)
        (folder / "tokenizer.json").write_text("{}")
    code, printed, error = run(capsys, "convert", folder, out, "--format", format, *rules)
    assert error == ""
    assert code == 0 and f"3 tensors, safetensors to {format}; " in printed
    with jqx.interop.read(out) as archive:
        assert archive.format == format and archive.config["model_type"] == "mine"
        q = archive.read("layers.0.up.weight")
    assert isinstance(q, jqx.QTensor) and (out / "tokenizer.json").exists()
    assert run(capsys, "verify", out, folder)[0] == 0
    assert "exists already" in error_of(capsys, "convert", folder, out, "--format", format)
    assert run(capsys, "convert", folder, out, "--format", format, *rules, "--force")[0] == 0


def test_codes_stay_what_they_are_from_one_format_to_another(capsys, tmp_path, folder):
    chain = [folder, *(tmp_path / name for name in ("a", "b.safetensors", "c.gguf", "d"))]
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps({"general.architecture": "llama"}))
    half = {name: x.astype(np.float16) for name, x in FLOATS.items()}
    write(folder, half, "safetensors", config={}, overwrite=True)
    steps = [
        ["gptq", *RULES],
        ["jqx"],
        ["gguf", "--metadata", metadata],
        ["compressed-tensors"],
    ]
    for source, target, step in zip(chain[:-1], chain[1:], steps, strict=True):
        code, found = run_json(capsys, "convert", source, target, "--format", *step)
        assert (code, found["format"], found["tensors"]) == (0, step[0], 3)
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
    _, found = run_json(capsys, "convert", folder, tmp_path / "b", "--format", "jqx")
    files = "the files config.json, notes.txt, tokenizer.json"
    assert found["left_out"] == [files]
    quantized = run_json(capsys, "quantize", folder, tmp_path / "c", *RULES)[1]
    assert quantized["left_out"] == [files]


def test_files_of_jqx_keep_metadata_as_json(capsys, tmp_path):
    file = CHECKPOINTS / "gguf-0.19.0" / "model.gguf"
    _, found = run_json(capsys, "convert", file, tmp_path / "m", "--format", "jqx")
    assert found["left_out"] == []
    with jqx.interop.read(file) as gguf, jqx.interop.read(tmp_path / "m") as own:
        assert own.metadata.keys() == gguf.metadata.keys()
        assert own.metadata["general.name"] == "fixture"
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "llama.rope.freq_base"):
            assert json.loads(own.metadata[key]) == np.asarray(gguf.metadata[key]).tolist()
    _, found = run_json(capsys, "convert", tmp_path / "m", tmp_path / "n", "--format", "jqx")
    assert found["left_out"] == []


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
    _, found = run_json(capsys, "convert", tmp_path / "a", tmp_path / "b", *to)
    cache = "kv_cache_scheme of the config"
    assert found["left_out"] == ["input_activations of the config", cache]
    to += ["--activation", scheme]
    _, found = run_json(capsys, "convert", tmp_path / "a", tmp_path / "c", *to)
    assert found["left_out"] == [cache]


def test_the_plan_of_a_quantized_function_is_reported_as_left_out(capsys, tmp_path):
    made = jqx.ptq(lambda p, x: x @ p["up"], jqx.presets.w8a8(), progress=False)
    jqx.save(tmp_path / "q", made({"up": jnp.ones((64, 32))}, [(jnp.ones((2, 64)),)]))
    _, found = run_json(capsys, "convert", tmp_path / "q", tmp_path / "o", "--format", "jqx")
    assert "the plan and the scales of activations" in found["left_out"][0]


def test_verify_finds_faults(capsys, tmp_path, folder):
    wrong = {**FLOATS, "lm_head.weight": -FLOATS["lm_head.weight"], "k_scale": np.zeros(1, "f4")}
    other = saved(tmp_path / "other", wrong)
    code, printed, _ = run(capsys, "verify", other, folder)
    assert code == 1 and "a scale is 0" in printed and "2 of them wrong" in printed
    code, found = run_json(capsys, "verify", other, folder, "--ignore", "k_scale")
    assert code == 1 and found["problems"] == ["'lm_head.weight': less than 20 dB"]
    ignored = ["--ignore", "k_scale", "--ignore", "lm_head.*"]
    assert run(capsys, "verify", other, folder, *ignored)[0] == 0


def test_arguments_that_do_not_fit(capsys, tmp_path, folder):
    def refused(*argv):
        return error_of(capsys, "convert", folder, tmp_path / "out", *argv)

    assert "--format" in refused()
    assert "is quantized, for" in refused("--format", "gptq")
    assert "general.architecture" in refused("--format", "gguf")
    assert "`--config` has no use for jqx" in refused("--format", "jqx", "--config", folder)
    assert "`--metadata` has no use" in refused("--format", "mlx", "--metadata", folder, *RULES)
    assert "no such file" in refused("--format", "gguf", "--metadata", tmp_path / "no").lower()
    assert "cannot be opened" in error_of(
        capsys, "convert", tmp_path / "no", tmp_path / "out", "--format", "mlx"
    )
    file = CHECKPOINTS / "gguf-0.19.0" / "model.gguf"
    assert "GGUF cannot hold" in error_of(
        capsys, "convert", file, tmp_path / "out", "--format", "gguf"
    )
    both = saved(tmp_path / "both", {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)})
    assert "two tensors have the same name" in error_of(
        capsys, "convert", both, tmp_path / "out", "--format", "safetensors"
    )
    assert not (tmp_path / "out").exists()
