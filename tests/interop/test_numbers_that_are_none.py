"""NaN, infinity, scales of 0 and scales beyond their dtype are errors on every way into a file."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx.interop import write

from ..command_line.files import error_of, run, saved
from ..oracles.refusals import assert_error
from .test_write import floats, integers

GGUF = {"metadata": {"general.architecture": "x"}}
CONFIG = {"config": {}}
SCALED = {
    "gptq": (integers(4, shape=(32, 32)), CONFIG),
    "awq": (integers(4, zeros=True, shape=(16, 32)), CONFIG),
    "compressed-tensors": (integers(8), CONFIG),
    "compressed-tensors fp8": (floats(jqx.QSpec("float8_e4m3fn", jqx.per_axis(0))), CONFIG),
    "mlx": (integers(4, shape=(8, 64)), CONFIG),
    "gguf": (integers(8, shape=(8, 64)), GGUF),
    "gguf Q4_1": (integers(4, shape=(8, 64), signed=False), GGUF),
    "fp8": (floats(jqx.QSpec("float8_e4m3fn", jqx.per_block({0: 32, 1: 32}))), CONFIG),
    "bitsandbytes": (floats(jqx.QSpec("nf4", jqx.per_block({0: 1, 1: 64})), (8, 64)), CONFIG),
}


def with_scale(q, value, first=True):
    scale = np.array(q.scale)
    scale.reshape(-1)[: 1 if first else None] = value
    return dataclasses.replace(q, scale=jnp.asarray(scale, q.scale.dtype))


def refused(path, tree, form, options, *words):
    """Refused by `write`, with the name of the tensor; nothing is left."""
    form, *_ = form.split()
    assert_error(lambda: write(path / "out", tree, form, progress=False, **options), *words)
    assert not os.listdir(path)


@pytest.mark.parametrize("case", SCALED)
def test_scales_that_are_no_numbers_are_refused(tmp_path, case):
    q, options = SCALED[case]
    for wrong in (np.nan, np.inf, -np.inf):
        tree = {"good.weight": q, "bad.weight": with_scale(q, wrong)}
        refused(tmp_path, tree, case, options, "'bad.weight'", "NaN or infinite")
    tree = {"good.weight": q, "bad.weight": with_scale(q, 0, first=False)}
    refused(tmp_path, tree, case, options, "'bad.weight'", "0")


CODED = {
    "mxfp4": ("compressed-tensors", "mlx", "gguf"),
    "mxfp8_e4m3": ("compressed-tensors", "mlx"),
    "nvfp4": ("compressed-tensors",),
}


@pytest.mark.parametrize("form", CODED)
def test_a_scale_of_blocks_that_is_none_is_refused(tmp_path, form):
    size = 16 if form == "nvfp4" else 32
    q = floats(jqx.QSpec(form, jqx.per_block({0: 1, 1: size})), (8, 64))
    if form == "nvfp4":
        inner = q.scale
        wrong = [dataclasses.replace(inner, scale=jnp.full((1, 1), x)) for x in (np.nan, 0.0)]
        wrong.append(dataclasses.replace(inner, values=inner.values.at[0, 0].set(jnp.nan)))
    else:
        bits = np.array(q.scale).view(np.uint8)
        bits[0, 0] = 255
        wrong = [jnp.asarray(bits.view(ml_dtypes.float8_e8m0fnu))]
    for scale in wrong:
        tree = {"a.weight": dataclasses.replace(q, scale=scale)}
        for target in CODED[form]:
            options = GGUF if target == "gguf" else CONFIG
            refused(tmp_path, tree, target, options, "'a.weight'")


def test_codes_of_fp8_that_are_none_are_refused(tmp_path):
    for case in ("fp8", "compressed-tensors fp8"):
        q, options = SCALED[case]
        wrong = dataclasses.replace(q, values=q.values.at[0, 0].set(jnp.nan))
        refused(tmp_path, {"a.weight": wrong}, case, options, "'a.weight'", "codes that are NaN")


@pytest.mark.parametrize("name", ["m.input_scale", "m.k_scale", "v_scale", "m.input_global_scale"])
def test_separate_scales_are_above_0_and_other_arrays_are_free(tmp_path, name):
    q, options = SCALED["compressed-tensors"]
    for wrong in (np.nan, np.inf, 0, -1):
        tree = {"m.weight": q, name: jnp.full(1, wrong, jnp.float32)}
        refused(tmp_path, tree, "compressed-tensors", options, repr(name), "not above 0")
    mask = {"m.mask": jnp.array([-jnp.inf, 0, jnp.nan]), "m.layer_scale": jnp.zeros(2)}
    tree = {"m.weight": q, name: jnp.ones(1), **mask}
    write(tmp_path / "out", tree, "compressed-tensors", config={})
    found = jqx.load(tmp_path / "out")
    np.testing.assert_array_equal(found["m.mask"], mask["m.mask"])


def test_a_block_of_zeros_may_have_the_scale_0(capsys, tmp_path):
    """As llama.cpp writes it; its codes may be any."""
    q = with_scale(integers(8, shape=(8, 64)), 0)
    write(tmp_path / "m.gguf", {"a.weight": q}, "gguf", **GGUF)
    command = ["convert", tmp_path / "m.gguf", tmp_path / "out", "--format", "compressed-tensors"]
    assert run(capsys, *command)[0] == 0
    found = jqx.load(tmp_path / "out", dtype=jnp.float32)["a.weight"]
    np.testing.assert_array_equal(found.dequantize(), q.astype(jnp.float32).dequantize())


X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
NAN = np.where(np.arange(64) == 5, np.float32(np.nan), X)
HALF = {"gptq", "gguf"}
"""Formats whose scales are float16."""


@pytest.mark.parametrize("form", ["jqx", "gptq", "gguf", "mlx"])
def test_the_command_line_writes_no_weight_that_its_scales_cannot_hold(capsys, tmp_path, form):
    weights = {"nan": NAN, "inf": np.where(np.isnan(NAN), np.float32(np.inf), X)}
    weights |= {"large": X * 1e6, "tiny": X * 1e-9, "zeros": X * 0}
    rule = ["--rule", "w.weight=int4:group=32"]
    metadata = saved_metadata(tmp_path) if form == "gguf" else []
    for name, x in weights.items():
        source = saved(tmp_path / "in", {"good.weight": X, "w.weight": x})
        command = ["convert", source, tmp_path / "out", "--format", form, *rule, *metadata]
        if name in ("nan", "inf") or (form in HALF and name != "zeros"):
            error = error_of(capsys, *command)
            assert "'w.weight'" in error and "cannot be quantized" in error, error
        else:
            assert run(capsys, *command)[0] == 0
            found = jqx.load(tmp_path / "out")["w.weight"].astype(jnp.float32).dequantize()
            np.testing.assert_allclose(found, x, atol=np.abs(x).max() / 12)  # half a step of 1/7
        left = sorted({*os.listdir(tmp_path)} - {"in", "metadata.json"})
        assert left in ([], ["out"])
        for path in left:
            (os.unlink if (tmp_path / path).is_file() else remove)(tmp_path / path)


def saved_metadata(tmp_path):
    (tmp_path / "metadata.json").write_text('{"general.architecture": "x"}')
    return ["--metadata", tmp_path / "metadata.json"]


def remove(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_quantize_refuses_them_too(capsys, tmp_path):
    source = saved(tmp_path / "in", {"good.weight": X, "w.weight": NAN})
    for more in ([], ["--policy", "w8a16"]):
        more = more or ["--rule", ".*=nvfp4"]
        error = error_of(capsys, "quantize", source, tmp_path / "out", *more)
        assert "'w.weight'" in error and "NaN or infinite" in error
    assert os.listdir(tmp_path) == ["in"]
    more = ["--policy", "w8a16", "--rule", "w.*=float"]
    assert run(capsys, "quantize", source, tmp_path / "out", *more)[0] == 0


def test_a_file_with_such_scales_is_not_converted(capsys, tmp_path):
    q, _ = SCALED["mlx"]
    source = saved(tmp_path / "in", {"good.weight": q, "w.weight": with_scale(q, np.nan)})
    for form in ("mlx", "gptq", "compressed-tensors"):
        error = error_of(capsys, "convert", source, tmp_path / "out", "--format", form)
        assert "'w.weight'" in error and "NaN or infinite" in error
    assert os.listdir(tmp_path) == ["in"]
    assert jax.tree.leaves(jqx.load(source))  # jqx.save keeps it
