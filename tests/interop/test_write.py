"""What is written in formats of others is read back; what they cannot hold is refused, as are
numbers that are none; and folders are replaced as a whole.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import write
from jqx.numerics import mxfp4, mxfp8_e4m3, nf4, nvfp4

from ..arrays import on_device
from ..command_line.files import error_of, run, saved
from ..oracles.refusals import assert_error
from .files import CHECKPOINTS
from .trees import assert_same_weight, blocks_of, floats, integers, tree_of, with_scale


@functools.cache
def compressed_leaves():
    """Weights of every kind that compressed-tensors holds."""
    return {
        **{f"int{bits}": integers(bits) for bits in range(2, 9)},
        **{f"zeros{bits}": integers(bits, zeros=True) for bits in range(2, 9)},
        "order": integers(4, zeros=True, order=True),
        "order3": integers(3, order=True, block=48),
        "rows": integers(4, block=96),
        "experts": integers(4, shape=(2, 12, 96), zeros=True),
        "packed": integers(4).pack(),
        "packed rows": integers(4).pack(0),
        "turned": integers(4, shape=(96, 12), block=12).T.T,
        "swapped": integers(4).pack_for("cpu"),
        "f8": floats(jqx.QSpec("float8_e4m3fn", jqx.per_axis(0))),
        "f8 tensor": floats(jqx.QSpec("float8_e4m3fn")),
        "f8 blocks": floats(jqx.QSpec("float8_e4m3fn", jqx.per_block({0: 16, 1: 32}))),
        "f8 ragged": floats(jqx.QSpec("float8_e4m3fn", jqx.per_block({0: 48, 1: 64}, tail=True))),
        "mx4": blocks_of(mxfp4, 32),
        "mx8": blocks_of(mxfp8_e4m3, 32),
        "nv4": blocks_of(nvfp4, 16),
    }


def test_what_is_written_as_compressed_tensors_is_read_back(tmp_path):
    tree = {
        **tree_of(compressed_leaves()),
        "norm.weight": jnp.ones(4),
        "head.weight": jnp.ones((4, 4)),
    }
    write(tmp_path / "m", tree, "compressed-tensors", config={"model_type": "mine"})
    with jqx.interop.read(tmp_path / "m") as archive:
        assert archive.config["model_type"] == "mine"
        assert archive.config["quantization_config"]["ignore"] == ["head"]
        assert archive.config["quantization_config"]["format"] == "mixed-precision"
        for name, leaf in compressed_leaves().items():
            assert_same_weight(archive.read(f"{name}.weight"), leaf, name)
        assert archive.read("norm.weight").shape == (4,)


FP8_BLOCKS = jqx.QSpec("float8_e4m3fn", jqx.per_block({0: 128, 1: 128}, tail=True))


NF4 = blocks_of(nf4, 64, (8, 128))


READ_BACK = {
    **{
        f"gptq, {bits} bits": {
            "sym": integers(bits, shape=(64, 96)),
            "asym": integers(bits, zeros=True, shape=(64, 96)),
            "order": integers(bits, zeros=True, order=True, shape=(32, 96)),
            "whole": integers(bits, block=96, shape=(32, 96)).pack_for("cpu"),
        }
        for bits in (2, 3, 4, 8)
    },
    **{
        f"awq, zeros {zeros}": {
            "a": integers(4, zeros=zeros, shape=(1040, 96)),
            "b": integers(4, zeros=zeros, shape=(16, 64)).pack(),
        }
        for zeros in (False, True)
    },
    "awq, one size of groups": {
        "a": integers(4, shape=(16, 64)),
        "b": integers(4, zeros=True, shape=(16, 64)),
        "one group": integers(4, shape=(16, 32)),
    },
    "fp8": {"a": floats(FP8_BLOCKS, (200, 300)), "b": floats(FP8_BLOCKS, (64, 256))},
    "bitsandbytes": {"a": NF4, "b": blocks_of(nf4, 64, (4, 64)).pack()},
}


@pytest.mark.parametrize("case", READ_BACK)
def test_what_is_written_is_read_back(tmp_path, case):
    form, leaves = case.partition(",")[0], READ_BACK[case]
    tree = {**tree_of(leaves), "gate.weight": jnp.ones((4, 4)), "a.bias": jnp.ones(64)}
    write(tmp_path / "m", tree, form, config={})
    with jqx.interop.read(tmp_path / "m") as archive:
        config = archive.config["quantization_config"]
        for name, leaf in leaves.items():
            q, spec = archive.read(f"{name}.weight"), archive.spec(f"{name}.weight")
            assert_same_weight(q, leaf, name)
            assert form != "gptq" or (q.zero_point is None) == (leaf.zero_point is None)
            assert form != "fp8" or jax.tree.structure(q) == jax.tree.structure(spec)
    if form == "gptq":
        assert config["checkpoint_format"] == "gptq_v2" and config["dynamic"]["-:^gate$"] == {}
    if form == "awq":
        assert config["group_size"] == 32


def affine(bits, size=32, dtype=jnp.float32, shape=(8, 128)):
    q = integers(bits, block=size, shape=shape, signed=False)
    rng = np.random.default_rng(0)
    offset = on_device(rng.normal(size=q.scale.shape), dtype)
    return dataclasses.replace(q, scale=on_device(q.scale, dtype), offset=offset, dtype=dtype)


@functools.cache
def of_mlx():
    """Weights of every kind that mlx holds."""
    return {
        **{f"affine{bits}": affine(bits) for bits in (2, 3, 4, 5, 6, 8)},
        "half": affine(4, 64, jnp.float16),
        "brain": affine(4, 64, jnp.bfloat16),
        "packed": affine(4, 128).pack(),
        "experts": affine(4, shape=(2, 8, 64)),
        "symmetric": integers(4, shape=(8, 96)),
        "zeros": integers(4, shape=(8, 96), zeros=True),
        "mxfp4": blocks_of(mxfp4, 32),
        "mxfp8": blocks_of(mxfp8_e4m3, 32),
    }


def test_what_is_written_as_mlx_is_read_back(tmp_path):
    tree = {**tree_of(of_mlx()), "head.weight": jnp.ones((4, 4))}
    write(tmp_path / "m", tree, "mlx", config={"model_type": "mine"})
    with jqx.interop.read(tmp_path / "m", dtype=jnp.float32) as archive:
        assert archive.config["quantization"]["head"] is False
        for name, leaf in of_mlx().items():
            weight = archive.read(f"{name}.weight")
            real = leaf.astype(jnp.float32).dequantize()
            np.testing.assert_array_equal(weight.dequantize(), real, err_msg=name)


def test_nvfp4_of_mlx_has_no_factor_of_the_tensor(tmp_path):
    q = blocks_of(nvfp4, 16)
    with pytest.raises(ValueError, match="whose scales have the factor 1"):
        write(tmp_path / "m", tree_of({"a": q}), "mlx", config={})
    one = dataclasses.replace(q.scale, scale=jnp.ones((1, 1)))
    q = dataclasses.replace(q, scale=one)
    write(tmp_path / "m", tree_of({"a": q}), "mlx", config={})
    weight = jqx.load(str(tmp_path / "m"), dtype=jnp.float32)["a.weight"]
    np.testing.assert_array_equal(weight.dequantize(), q.dequantize())


def test_a_head_that_is_tied_to_the_table_is_left_in_float(tmp_path):
    """transformers has a Linear without tensors there, which `targets` would mean."""
    weight = integers(4)
    for name, ignored in (("up.weight", ["lm_head"]), ("lm_head.weight", [])):
        write(tmp_path / name, {name: weight}, "compressed-tensors", config={})
        with jqx.interop.read(tmp_path / name) as archive:
            assert archive.config["quantization_config"]["ignore"] == ignored


def test_unsigned_codes_are_those_of_a_zero_point(tmp_path):
    for zeros in (False, True):
        q = integers(4, zeros=zeros, signed=False)
        write(tmp_path / "m", tree_of({"a": q}), "compressed-tensors", config={}, overwrite=True)
        weight = jqx.load(str(tmp_path / "m"))["a.weight"]
        np.testing.assert_array_equal(weight.dequantize(), q.dequantize())


@pytest.mark.parametrize("zeros", [False, True])
def test_bytes_with_activations(tmp_path, zeros):
    q = integers(8, zeros=zeros, block=96)
    config = {"quantization_config": {"quant_method": "old"}}
    options = {"config": config, "activation": "int8:token:dynamic"}
    write(tmp_path / "m", tree_of({"a": q}), "compressed-tensors", **options)
    with jqx.interop.read(tmp_path / "m") as archive:
        assert_same_weight(archive.read("a.weight"), q, "a")
        scheme = archive.config["quantization_config"]
    assert scheme["format"] == "int-quantized"
    inputs = scheme["config_groups"]["group_0"]["input_activations"]
    assert inputs["dynamic"] is True and inputs["strategy"] == "token"


def test_an_archive_is_written_a_tensor_at_a_time_in_several_files(tmp_path):
    source = CHECKPOINTS / "compressed-tensors-0.20.0"
    with jqx.interop.read(source) as archive:
        write(tmp_path / "m", archive, "compressed-tensors", limit=20_000)
        files = {path.name for path in (tmp_path / "m").iterdir()}
        assert "model.safetensors.index.json" in files and len(files) > 5
        with jqx.interop.read(tmp_path / "m") as again:
            assert {*again.paths} == {*archive.paths}
            for path in archive.paths:
                a, b = archive.view(path), again.view(path)
                if path == "w8_tensor.weight":  # written with a scale for each row
                    np.testing.assert_array_equal(a.dequantize(), b.dequantize())
                    continue
                assert jax.tree.structure(a) == jax.tree.structure(b), path
                for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                    np.testing.assert_array_equal(x, y, err_msg=path)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index_of_files = json.loads(index.read_text())
    name, file = next(iter(index_of_files["weight_map"].items()))
    for wrong, words in [
        ({**index_of_files["weight_map"], name: f"../{file}"}, "has no weight_map"),
        ({**index_of_files["weight_map"], "no": file}, "lacks the tensor 'no'"),
        (
            {**index_of_files["weight_map"], name: "absent.safetensors"},
            "does not hold|cannot be opened",
        ),
    ]:
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises((ValueError, OSError), match=words):
            jqx.load(str(tmp_path / "m"))


def test_the_tokenizer_and_the_config_are_copied(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text('{"hidden_size": 4}')
    (old / "tokenizer.json").write_text("{}")
    (old / "other.bin").write_text("")
    tree = tree_of({"a": integers(4)})
    write(tmp_path / "m", tree, "compressed-tensors", config=old, tokenizer=old)
    files = {path.name for path in (tmp_path / "m").iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors"}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["hidden_size"] == 4


OFFSET = QTensor(
    jnp.zeros((32, 32), jnp.int4), jnp.ones((32, 1)), offset=jnp.ones((32, 1)), qtype=jnp.int4
)


TAIL = QTensor.quantize(jnp.ones((2, 100)), jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32}, True)))


EMPTY = QTensor.quantize(jnp.ones((0, 64)), jqx.QSpec("int8", jqx.per_axis(0)))


INEXACT = QTensor(
    jnp.zeros((4, 32), jnp.uint8),
    jnp.full((4, 1), 0.1),
    jnp.full((4, 1), 77, jnp.uint8),
    qtype=jnp.uint8,
)


NO_HALF = QTensor(jnp.zeros((32, 32), jnp.int4), jnp.full((32, 1), 0.1), qtype=jnp.int4)


CROSSING = floats(jqx.QSpec(nf4, jqx.per_block({0: 2, 1: 32})), (4, 96))


MINIMUM, ANY = "without a float minimum", "cannot hold the tensor"


UNFIT = {
    "compressed-tensors minimum": (OFFSET, MINIMUM),
    "compressed-tensors tail": (TAIL, "groups of equal size .* the last group has 4"),
    "compressed-tensors nf4": (floats(jqx.QSpec(nf4)), "float8_e4m3fn"),
    "compressed-tensors empty": (EMPTY, ANY),
    "gptq offset": (OFFSET, MINIMUM),
    "gptq bits": (integers(5, shape=(32, 32)), "integers of 2, 3, 4, 8 bits"),
    "gptq words": (integers(4), "whole words"),
    "gptq scales": (NO_HALF, "scales that float16 holds"),
    "awq bits": (integers(8), "matrices of 4-bit integers"),
    "awq order": (integers(4, order=True, shape=(16, 32)), "inputs in order"),
    "awq offset": (OFFSET, MINIMUM),
    "fp8 integers": (integers(8), "float8_e4m3fn with float32 scales"),
    "mlx zeros": (INEXACT, "that float32 holds"),
    "mlx group": (affine(4, 16), "in groups of 32, 64, 128"),
    "mlx bits": (integers(7, shape=(8, 96)), "integers of 2, 3, 4, 5, 6, 8 bits"),
    "mlx order": (integers(4, shape=(8, 96), order=True), "inputs in order"),
    "bitsandbytes integers": (integers(4), ANY),
    "bitsandbytes size": (blocks_of(nf4, 48, (4, 96)), ANY),
    "bitsandbytes rows": (CROSSING, ANY),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_a_format_cannot_hold_is_an_error_that_names_the_tensor(tmp_path, case):
    leaf, words = UNFIT[case]
    form = case.partition(" ")[0]
    with pytest.raises(ValueError, match=words) as caught:
        write(tmp_path / "m", tree_of({"layer": leaf}), form, config={})
    assert "'layer.weight'" in str(caught.value) and "fix:" in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_formats_of_one_kind_for_all_layers(tmp_path):
    awq = {"a": integers(4, shape=(16, 64)), "b": integers(4, block=64, shape=(16, 64))}
    fp8 = {"a": floats(FP8_BLOCKS, (256, 256)), "b": floats(jqx.QSpec("float8_e4m3fn"), (256, 256))}
    for form, kinds in [("awq", awq), ("fp8", fp8)]:
        with pytest.raises(ValueError, match=r"cannot hold the tensor 'b\.weight'"):
            write(tmp_path / "m", tree_of(kinds), form, config={})


WRONG = {
    "a name": (ValueError, "name it <module>.weight", {"kernel": integers(4)}),
    "nothing quantized": (ValueError, "is quantized, for", {"a.weight": jnp.ones(2)}),
    "twice": (
        ValueError,
        "exists twice",
        {"a.weight": integers(4), "a.weight_scale": jnp.ones(2)},
    ),
    "no tensor": (TypeError, "there is no tensor at 'a.b'", {"a": {"b": 1}}),
    "a key": (TypeError, "the key 0 at 'a' is not a string", {"a": {0: jnp.ones(2)}}),
    "no dict": (TypeError, "not a dict of tensors", jnp.ones(2)),
}


@pytest.mark.parametrize("case", WRONG)
def test_trees_that_are_no_weights_of_modules_are_refused(tmp_path, case):
    error, words, tree = WRONG[case]
    with pytest.raises(error, match=words) as caught:
        write(tmp_path / "m", tree, "compressed-tensors", config={})
    assert "fix:" in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_arguments_that_do_not_fit(tmp_path):
    tree = tree_of({"a": integers(4)})
    for error, words, options in [
        (ValueError, "there is no format", {"format": "gguf9"}),
        (TypeError, "there is no config of the model", {"config": None}),
        (ValueError, "static activations need an input_scale", {"activation": "int8:tensor"}),
        (ValueError, "does not support the activations", {"activation": "float8_e5m2:dynamic"}),
        (FileNotFoundError, "there is no tokenizer", {"tokenizer": tmp_path}),
    ]:
        arguments = {"format": "compressed-tensors", "config": {}, **options}
        with pytest.raises(error, match=words):
            write(tmp_path / "m", tree, **arguments)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write(tmp_path / "no" / "m", tree, "compressed-tensors", config={})


def test_a_config_is_the_file_that_is_named(tmp_path):
    (tmp_path / "mine.json").write_text('{"model_type": "mine"}')
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    tree = {"a.weight": jnp.ones((2, 2))}
    for path, model_type in [(tmp_path / "mine.json", "mine"), (tmp_path, "other")]:
        write(tmp_path / "m", tree, "safetensors", config=path, overwrite=True)
        assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == model_type
    for config, error in [
        (tmp_path / "no.json", FileNotFoundError),
        ({"a": np.float32(3)}, TypeError),
    ]:
        with pytest.raises(error, match="fix:"):
            write(tmp_path / "n", tree, "safetensors", config=config)


def test_arrays_that_files_of_others_lack_are_refused(tmp_path):
    for name, x in {
        "a": jnp.ones(4, jnp.int4),
        "b": jnp.ones(4).astype(jnp.float8_e3m4),
        "__metadata__": jnp.ones(4),
    }.items():
        with pytest.raises(ValueError, match=f"{name!r} does not fit safetensors files"):
            write(tmp_path / "m", {name: x}, "safetensors", config={})
    with pytest.raises(TypeError, match="no tensor at 'a'"):
        write(tmp_path / "m", {"a": np.ma.masked_array([1.0])}, "safetensors", config={})
    for limit in (0, -1):
        with pytest.raises(ValueError, match="is not a size of a file"):
            write(tmp_path / "m", {"a": jnp.ones(2)}, "safetensors", config={}, limit=limit)
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_made_is_an_error_of_the_target(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        write(tmp_path / ("n" * 300), {"a": jnp.ones(2)}, "safetensors", config={})


def test_a_folder_is_replaced_where_that_is_asked_for(tmp_path):
    folder, tree = tmp_path / "m", tree_of({"a": integers(4)})
    write(folder, tree, "compressed-tensors", config={})
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        write(folder, tree, "compressed-tensors", config={})
    write(folder, tree, "compressed-tensors", config={}, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_error_leaves_the_old_folder(tmp_path, monkeypatch):
    folder, tree = tmp_path / "m", tree_of({"a": integers(4)})
    write(folder, tree, "compressed-tensors", config={"old": True})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write(folder, tree, "compressed-tensors", config={}, overwrite=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert json.loads((folder / "config.json").read_text())["old"] is True


@pytest.mark.slow
def test_killed_at_any_moment_the_old_folder_or_the_new_one_is_whole(tmp_path):
    program = """
        import sys, jax.numpy as jnp, jqx
        spec = jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32}))
        trees = [
            {f"m{i}.weight": jqx.QTensor.quantize(jnp.full((64, 64), n + 1.0), spec)
             for i in range(8)} for n in range(2)
        ]
        print("ready", flush=True)
        while True:
            for n, tree in enumerate(trees):
                jqx.interop.write(sys.argv[1], tree, "compressed-tensors", config={"n": n},
                                  overwrite=True, limit=5000)
    """
    folder, is_written, rng = tmp_path / "m", False, np.random.default_rng(0)
    for _ in range(12):
        command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout.readline()
        time.sleep(0.05 + rng.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not folder.exists():  # the first ones may be killed before they wrote anything
            assert not is_written
            continue
        is_written = True
        loaded = jqx.load(str(folder))
        number = json.loads((folder / "config.json").read_text())["n"]
        assert {float(x.dequantize()[0, 0]) for x in loaded.values()} == {number + 1.0}
    assert is_written


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
    "bitsandbytes": (blocks_of("nf4", 64, (8, 64)), CONFIG),
}


def assert_not_written(path, tree, form, options, *words):
    """Refused by `write`, with the name of the tensor; nothing is left."""
    form, *_ = form.split()
    assert_error(lambda: write(path / "out", tree, form, progress=False, **options), *words)
    assert not os.listdir(path)


@pytest.mark.parametrize("case", SCALED)
def test_scales_that_are_no_numbers_are_refused(tmp_path, case):
    q, options = SCALED[case]
    for wrong in (np.nan, np.inf, -np.inf):
        tree = {"good.weight": q, "bad.weight": with_scale(q, wrong)}
        assert_not_written(tmp_path, tree, case, options, "'bad.weight'", "NaN or infinite")
    tree = {"good.weight": q, "bad.weight": with_scale(q, 0, first=False)}
    assert_not_written(tmp_path, tree, case, options, "'bad.weight'", "0")


CODED = {
    "mxfp4": ("compressed-tensors", "mlx", "gguf"),
    "mxfp8_e4m3": ("compressed-tensors", "mlx"),
    "nvfp4": ("compressed-tensors",),
}


@pytest.mark.parametrize("form", CODED)
def test_a_scale_of_blocks_that_is_none_is_refused(tmp_path, form):
    size = 16 if form == "nvfp4" else 32
    q = blocks_of(form, size, (8, 64))
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
            assert_not_written(tmp_path, tree, target, options, "'a.weight'")


def test_codes_of_fp8_that_are_none_are_refused(tmp_path):
    for case in ("fp8", "compressed-tensors fp8"):
        q, options = SCALED[case]
        wrong = dataclasses.replace(q, values=q.values.at[0, 0].set(jnp.nan))
        assert_not_written(
            tmp_path, {"a.weight": wrong}, case, options, "'a.weight'", "codes that are NaN"
        )


@pytest.mark.parametrize("name", ["m.input_scale", "m.k_scale", "v_scale", "m.input_global_scale"])
def test_separate_scales_are_above_0_and_other_arrays_are_free(tmp_path, name):
    q, options = SCALED["compressed-tensors"]
    for wrong in (np.nan, np.inf, 0, -1):
        tree = {"m.weight": q, name: jnp.full(1, wrong, jnp.float32)}
        assert_not_written(tmp_path, tree, "compressed-tensors", options, repr(name), "not above 0")
    mask = {"m.mask": jnp.array([-jnp.inf, 0, jnp.nan]), "m.layer_scale": jnp.zeros(2)}
    tree = {"m.weight": q, name: jnp.ones(1), **mask}
    write(tmp_path / "out", tree, "compressed-tensors", config={})
    loaded = jqx.load(tmp_path / "out")
    np.testing.assert_array_equal(loaded["m.mask"], mask["m.mask"])


def test_a_block_of_zeros_may_have_the_scale_0(capsys, tmp_path):
    """As llama.cpp writes it; its codes may be any."""
    q = with_scale(integers(8, shape=(8, 64)), 0)
    write(tmp_path / "m.gguf", {"a.weight": q}, "gguf", **GGUF)
    command = ["convert", tmp_path / "m.gguf", tmp_path / "out", "--format", "compressed-tensors"]
    assert run(capsys, *command)[0] == 0
    weight = jqx.load(tmp_path / "out", dtype=jnp.float32)["a.weight"]
    np.testing.assert_array_equal(weight.dequantize(), q.astype(jnp.float32).dequantize())


NUMBERS = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


WITH_NAN = np.where(np.arange(64) == 5, np.float32(np.nan), NUMBERS)


HALF = {"gptq", "gguf"}
"""Formats whose scales are float16."""


@pytest.mark.parametrize("form", ["jqx", "gptq", "gguf", "mlx"])
def test_the_command_line_writes_no_weight_that_its_scales_cannot_hold(capsys, tmp_path, form):
    weights = {"nan": WITH_NAN, "inf": np.where(np.isnan(WITH_NAN), np.float32(np.inf), NUMBERS)}
    weights |= {"large": NUMBERS * 1e6, "tiny": NUMBERS * 1e-9, "zeros": NUMBERS * 0}
    rule = ["--rule", "w.weight=int4:group=32"]
    metadata = saved_metadata(tmp_path) if form == "gguf" else []
    for name, x in weights.items():
        source = saved(tmp_path / "in", {"good.weight": NUMBERS, "w.weight": x})
        command = ["convert", source, tmp_path / "out", "--format", form, *rule, *metadata]
        if name in ("nan", "inf") or (form in HALF and name != "zeros"):
            error = error_of(capsys, *command)
            assert "'w.weight'" in error and "cannot be quantized" in error, error
        else:
            assert run(capsys, *command)[0] == 0
            real = jqx.load(tmp_path / "out")["w.weight"].astype(jnp.float32).dequantize()
            np.testing.assert_allclose(real, x, atol=np.abs(x).max() / 12)  # half a step of 1/7
        files = sorted({*os.listdir(tmp_path)} - {"in", "metadata.json"})
        assert files in ([], ["out"])
        for path in files:
            (os.unlink if (tmp_path / path).is_file() else shutil.rmtree)(tmp_path / path)


def saved_metadata(tmp_path):
    (tmp_path / "metadata.json").write_text('{"general.architecture": "x"}')
    return ["--metadata", tmp_path / "metadata.json"]


def test_quantize_refuses_them_too(capsys, tmp_path):
    source = saved(tmp_path / "in", {"good.weight": NUMBERS, "w.weight": WITH_NAN})
    for more in (["--rule", ".*=nvfp4"], ["--policy", "w8a16"]):
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
