"""GPTQ, AWQ and fp8: worked examples, what is written is read back, and what contradicts itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import write

from .raw_folders import CHECKPOINTS, write_folder
from .test_write import floats, integers, same, tree_of

BLOCKS = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 128, 1: 128}, tail=True))


def gptq(tensors, tmp_path, **fields):
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    config = {"quantization_config": {**said, **fields}}
    return jqx.load(str(write_folder(tmp_path, tensors, config)))["m.weight"]


def layer(word="77777777", zeros=None, columns=32, bits=4, groups=1):
    """A layer of 8 outputs, each of which has the codes 0, 1, 2 and so on."""
    rows = 32
    codes = np.arange(columns) % 2**bits
    stream = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    words = np.frombuffer(stream.to_bytes(columns * bits // 8, "little"), "<i4")
    points = np.full((groups, rows * bits // 32), int(word, 16), np.uint32).view(np.int32)
    return {
        "m.qweight": np.repeat(words[:, None], rows, 1),
        "m.qzeros": points if zeros is None else zeros,
        "m.scales": np.ones((groups, rows), np.float16),
        "m.g_idx": (np.arange(columns) // (columns // groups)).astype(np.int32),
    }


@pytest.mark.parametrize(("form", "word"), [("gptq", "77777777"), ("gptq_v2", "88888888")])
def test_gptq_of_both_versions_stores_the_same_codes(tmp_path, form, word):
    tensors = layer(word)
    assert tensors["m.qweight"][0, 0] == 0x76543210
    q = gptq(tensors, tmp_path, checkpoint_format=form)
    assert q.shape == (32, 32) and q.zero_point is None
    np.testing.assert_array_equal(q.codes[5], np.arange(32) % 16 - 8)
    asymmetric = gptq(tensors, tmp_path, checkpoint_format=form, sym=False)
    assert not asymmetric.zero_point.any()
    np.testing.assert_array_equal(asymmetric.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    ("form", "word", "words"),
    [
        ("gptq", "88888888", "zero points of 'gptq_v2', which the config calls 'gptq'"),
        ("gptq_v2", "77777777", "zero points of 'gptq', which the config calls 'gptq_v2'"),
        ("gptq", "12345678", "has several zero points"),
    ],
)
def test_symmetric_gptq_with_other_zero_points_is_refused(tmp_path, form, word, words):
    with pytest.raises(ValueError, match=words):
        gptq(layer(word), tmp_path, checkpoint_format=form)
    q = gptq(layer(word), tmp_path, checkpoint_format=form, sym=False)  # the config decides
    assert q.zero_point.any()


def test_zero_points_of_the_first_version_wrap_around(tmp_path):
    q = gptq(layer("ffffffff"), tmp_path, sym=False)
    np.testing.assert_array_equal(q.zero_point, np.full((32, 1), -8))


def test_three_bits_lie_across_words(tmp_path):
    tensors = layer(columns=64, bits=3, zeros=np.zeros((1, 3), np.int32))
    q = gptq(tensors, tmp_path, bits=3, sym=False, group_size=-1, checkpoint_format="gptq_v2")
    np.testing.assert_array_equal(q.codes[0], np.arange(64) % 8 - 4)
    np.testing.assert_array_equal(q.zero_point, np.full((32, 1), -4))


def test_layers_may_be_quantized_otherwise_or_not_at_all(tmp_path):
    eight = layer(columns=32, bits=8, zeros=np.full((1, 8), 0x7F7F7F7F, np.int32))
    tensors = {**layer(), **{name.replace("m.", "down."): x for name, x in eight.items()}}
    tensors["head.weight"] = np.ones((2, 2), np.float16)
    dynamic = {"-:head": {}, r"+:.*down": {"bits": 8}}
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    loaded = jqx.load(str(write_folder(tmp_path, tensors, {"quantization_config": said})))
    assert loaded["down.weight"].qtype == jnp.int8 and loaded["m.weight"].qtype == jnp.int4


def test_old_folders_have_a_config_of_their_own(tmp_path):
    write_folder(tmp_path, layer(), {"model_type": "old"})
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "sym": true}')
    with jqx.interop.read(tmp_path) as archive:
        assert archive.format == "gptq" and archive.config["model_type"] == "old"


WRONG = {
    "bits": ({}, {"bits": 5}, "bits == 5"),
    "a layout of kernels": ({}, {"is_marlin_format": True}, "is_marlin_format == True"),
    "another version": ({}, {"checkpoint_format": "gptq_p"}, "checkpoint_format == 'gptq_p'"),
    "words": ({}, {"pack_dtype": "int16"}, "pack_dtype == 'int16'"),
    "groups": ({}, {"group_size": 16}, r"'m.scales' .* its layer needs"),
    "scales": ({"m.scales": np.ones((1, 32), np.int32)}, {}, "'m.scales' .* its layer needs"),
    "no scales": ({"m.scales": None}, {}, "'m.scales' is missing"),
    "no order": ({"m.g_idx": None}, {"desc_act": True}, "'m.g_idx' is missing"),
    "an order": ({"m.g_idx": np.ones(32, np.int32)}, {}, "elements in a group, not always"),
    "three axes": ({"m.qweight": np.zeros((1, 4, 32), np.int32)}, {}, "2 axes"),
    "overrides": ({}, {"dynamic": [1]}, "a JSON object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_gptq_that_contradicts_its_config_is_refused(tmp_path, case):
    tensors, fields, words = WRONG[case]
    tensors = {name: x for name, x in {**layer(), **tensors}.items() if x is not None}
    with pytest.raises(ValueError, match=words) as caught:
        gptq(tensors, tmp_path, **fields)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_is_written_as_gptq_is_read_back(tmp_path, bits):
    kinds = {
        "sym": integers(bits, shape=(64, 96)),
        "asym": integers(bits, zeros=True, shape=(64, 96)),
        "order": integers(bits, zeros=True, order=True, shape=(32, 96)),
        "whole": integers(bits, block=96, shape=(32, 96)).pack_for("cpu"),
    }
    tree = {**tree_of(kinds), "gate.weight": jnp.ones((4, 4)), "sym.bias": jnp.ones(64)}
    write(tmp_path / "m", tree, "gptq", config={})
    with jqx.interop.read(tmp_path / "m") as archive:
        said = archive.config["quantization_config"]
        assert said["checkpoint_format"] == "gptq_v2" and said["dynamic"]["-:^gate$"] == {}
        for name, leaf in kinds.items():
            found = archive.read(f"{name}.weight")
            same(found, leaf, name)
            assert (found.zero_point is None) == (leaf.zero_point is None)


def test_awq_interleaves_columns(tmp_path):
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    tensors = {
        "m.qweight": np.full((32, 1), 0x75316420, np.int32),
        "m.qzeros": np.full((1, 1), 0x75316420, np.int32),
        "m.scales": np.ones((1, 8), np.float16),
    }
    folder = write_folder(tmp_path, tensors, {"quantization_config": said})
    q = jqx.load(str(folder))["m.weight"]
    np.testing.assert_array_equal(q.codes[:, 3], np.arange(8) - 8)
    assert not q.dequantize().any()
    for fields, words in [
        ({"version": "gemv"}, "version == 'gemv'"),
        ({"bits": 8}, "bits == 8"),
        ({"zero_point": False}, "which the config"),
        ({"group_size": 16}, "'m.scales' .* its layer needs"),
        ({"modules_to_not_convert": ["m"]}, "does not belong to a layer"),
    ]:
        write_folder(tmp_path, tensors, {"quantization_config": {**said, **fields}})
        with pytest.raises(ValueError, match=words):
            jqx.load(str(folder))


@pytest.mark.parametrize("zeros", [False, True])
def test_what_is_written_as_awq_is_read_back(tmp_path, zeros):
    kinds = {"a": integers(4, zeros=zeros, shape=(1040, 96)), "b": integers(4, zeros=zeros).pack()}
    kinds["b"] = integers(4, zeros=zeros, shape=(16, 64)).pack()
    write(tmp_path / "m", {**tree_of(kinds), "head.weight": jnp.ones((4, 4))}, "awq", config={})
    with jqx.interop.read(tmp_path / "m") as archive:
        for name, leaf in kinds.items():
            same(archive.read(f"{name}.weight"), leaf, name)


def test_layers_of_awq_share_one_size_of_groups(tmp_path):
    kinds = {
        "a": integers(4, shape=(16, 64)),
        "b": integers(4, zeros=True, shape=(16, 64)),
        "one group": integers(4, shape=(16, 32)),
    }
    write(tmp_path / "m", tree_of(kinds), "awq", config={})
    with jqx.interop.read(tmp_path / "m") as archive:
        assert archive.config["quantization_config"]["group_size"] == 32
        for name, leaf in kinds.items():
            same(archive.read(f"{name}.weight"), leaf, name)


def test_what_is_written_as_fp8_is_read_back(tmp_path):
    kinds = {"a": floats(BLOCKS, (200, 300)), "b": floats(BLOCKS, (64, 256))}
    write(tmp_path / "m", {**tree_of(kinds), "head.weight": jnp.ones((4, 4))}, "fp8", config={})
    with jqx.interop.read(tmp_path / "m") as archive:
        for name, leaf in kinds.items():
            found = archive.read(f"{name}.weight")
            same(found, leaf, name)
            assert jax.tree.structure(found) == jax.tree.structure(archive.spec(f"{name}.weight"))


TRANSFORMERS = CHECKPOINTS / "transformers-5.24.0"


@pytest.mark.parametrize("case", sorted(path.name for path in TRANSFORMERS.iterdir()))
def test_weights_are_those_of_transformers(case):
    expected = np.load(TRANSFORMERS / case / "expected.npz")
    with jqx.interop.read(TRANSFORMERS / case) as archive:
        assert archive.format == case.partition("_")[0]
        assert {*archive.paths} == {*expected, "norm.weight"}
        for name in expected:
            q = archive.read(name)
            assert isinstance(q, QTensor) and q.dtype == jnp.float32
            wanted = expected[name]
            wanted = wanted.swapaxes(1, 2) if case == "mxfp4" else wanted
            np.testing.assert_array_equal(q.dequantize(), wanted)


def test_scales_of_stacked_experts_lie_along_the_axis_that_they_have(tmp_path):
    codes = np.arange(2 * 4 * 4).reshape(2, 4, 4).astype(jnp.float8_e4m3fn)
    scale = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    for shape in [(2, 1, 4), (2, 4, 1)]:
        tensors = {"experts.up": codes, "experts.up_scale": scale.reshape(shape)}
        q = jqx.load(str(write_folder(tmp_path, tensors, config)))["experts.up"]
        wanted = codes.astype(np.float32) * scale.reshape(shape)
        np.testing.assert_array_equal(q.dequantize(), wanted)
    tensors = {"experts.up": codes, "experts.up_scale": scale[:, :3].reshape(2, 3, 1)}
    with pytest.raises(ValueError, match="of blocks"):
        jqx.load(str(write_folder(tmp_path, tensors, config)))


def test_fbgemm_has_a_scale_for_each_row(tmp_path):
    q = floats(jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0)))
    tensors = {
        "m.weight": np.asarray(q.values),
        "m.weight_scale": np.asarray(q.scale),
        "m.input_scale_ub": np.full(1, 1200, np.float32),
    }
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}, "torch_dtype": "bfloat16"}
    loaded = jqx.load(str(write_folder(tmp_path, tensors, config)))
    assert loaded["m.input_scale_ub"] == 1200 and loaded["m.weight"].dtype == jnp.bfloat16
    same(loaded["m.weight"], q.astype(jnp.bfloat16), "m")
    config["quantization_config"] |= {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match=r"not .* of blocks"):
        jqx.load(str(write_folder(tmp_path, tensors, config)))


OFFSET = QTensor(
    jnp.zeros((32, 32), jnp.int4), jnp.ones((32, 1)), offset=jnp.ones((32, 1)), qtype=jnp.int4
)
UNFIT = {
    "gptq offset": ("gptq", OFFSET, "without a float minimum"),
    "gptq bits": ("gptq", integers(5, shape=(32, 32)), "integers of 2, 3, 4, 8 bits"),
    "gptq words": ("gptq", integers(4), "whole words"),
    "gptq scales": (
        "gptq",
        QTensor(jnp.zeros((32, 32), jnp.int4), jnp.full((32, 1), 0.1), qtype=jnp.int4),
        "scales that float16 holds",
    ),
    "awq bits": ("awq", integers(8), "matrices of 4-bit integers"),
    "awq order": ("awq", integers(4, order=True, shape=(16, 32)), "inputs in order"),
    "awq offset": ("awq", OFFSET, "without a float minimum"),
    "fp8 integers": ("fp8", integers(8), "float8_e4m3fn with float32 scales"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_a_format_cannot_hold_is_an_error_that_names_the_tensor(tmp_path, case):
    form, leaf, words = UNFIT[case]
    with pytest.raises(ValueError, match=words) as caught:
        write(tmp_path / "m", tree_of({"layer": leaf}), form, config={})
    assert "'layer.weight'" in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_formats_of_one_kind_for_all_layers(tmp_path):
    awq = {"a": integers(4, shape=(16, 64)), "b": integers(4, block=64, shape=(16, 64))}
    fp8 = {"a": floats(BLOCKS, (256, 256)), "b": floats(jqx.QSpec("float8_e4m3fn"), (256, 256))}
    for form, kinds in [("awq", awq), ("fp8", fp8)]:
        with pytest.raises(ValueError, match=r"cannot hold the tensor 'b\.weight'"):
            write(tmp_path / "m", tree_of(kinds), form, config={})


# gpt-oss.

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
OSS = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def experts(shape=(2, 6, 3)):
    rng = np.random.default_rng(0)
    return {
        "m.experts.up_proj_blocks": rng.integers(0, 256, (*shape, 16)).astype(np.uint8),
        "m.experts.up_proj_scales": rng.integers(100, 140, shape).astype(np.uint8),
        "m.experts.up_proj_bias": np.ones(shape[:2], np.float32),
    }


def test_experts_of_gpt_oss_are_read(tmp_path):
    tensors = experts()
    with jqx.interop.read(write_folder(tmp_path, tensors, OSS)) as archive:
        assert archive.format == "mxfp4"
        assert {*archive.paths} == {"m.experts.up_proj", "m.experts.up_proj_bias"}
        q = archive.read("m.experts.up_proj")
    assert q.shape == (2, 6, 96) and q.nbytes == 2 * 6 * (48 + 3)
    blocks = tensors["m.experts.up_proj_blocks"]
    want = FP4[np.stack([blocks & 15, blocks >> 4], -1)].reshape(2, 6, 3, 32)
    powers = np.ldexp(np.float32(1), tensors["m.experts.up_proj_scales"].astype(int) - 127)
    np.testing.assert_array_equal(q.dequantize(), (want * powers[..., None]).reshape(q.shape))


def test_experts_that_do_not_fit_are_refused(tmp_path):
    tensors = experts()
    blocks, scales, _ = tensors
    for name, x, words in [
        (blocks, tensors[blocks][..., :8], "the last of 16 bytes"),
        (scales, tensors[scales][:1], "a scale for each block"),
        (scales, tensors[scales].astype(np.int8), "uint8"),
    ]:
        folder = write_folder(tmp_path, {**tensors, name: x}, OSS)
        with pytest.raises(ValueError, match=words):
            jqx.interop.read(folder)
    folder = write_folder(tmp_path, {n: x for n, x in tensors.items() if n != blocks}, OSS)
    with pytest.raises(ValueError, match="does not belong to a layer"):
        jqx.interop.read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="has no config that says how"):
        jqx.load(folder / "model.safetensors")


def test_files_of_torchao_are_refused(tmp_path):
    folder = write_folder(tmp_path, {"m._weight_qdata": np.ones((4, 4), np.int8)})
    with pytest.raises(ValueError, match="in the format of torchao, which jqx does not read"):
        jqx.load(folder)
