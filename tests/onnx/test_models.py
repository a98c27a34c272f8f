"""Whole models in ONNX: a decoder with a cache, a network of convolutions, large files."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from jax import export, lax

import jqx
from jqx.interop import to_onnx

from ..arrays import normal
from .runtime import LEVELS, assert_close, operations, run

pytestmark = pytest.mark.usefixtures("as_users_write")
LAYERS, WIDTH, HEADS, HIDDEN, WORDS, CONTEXT = 2, 64, 2, 96, 16_384, 12
BLOCKS = {
    "qkv": normal(0, LAYERS, WIDTH, 3 * WIDTH) / 8,
    "out": normal(1, LAYERS, WIDTH, WIDTH) / 8,
    "up": normal(2, LAYERS, WIDTH, HIDDEN) / 8,
    "down": normal(3, LAYERS, HIDDEN, WIDTH) / 8,
}
PARAMS = {"table": normal(4, WORDS, WIDTH), "blocks": BLOCKS}
CACHE = jnp.zeros((LAYERS, 2, 1, CONTEXT, HEADS, WIDTH // HEADS))
TEXT = np.random.default_rng(0).integers(0, WORDS, (1, 9)).astype("i4")


def decoder(params, words, cache, start):
    """Logits of words, which come after `start` cached ones, and the cache with them. The table of
    words is also the head."""

    def layer(carry, step):
        (x, cache), (w, i) = carry, step
        places = start + jnp.arange(x.shape[1])
        h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        q, k, v = jnp.split((h @ w["qkv"]).reshape(1, -1, 3 * HEADS, WIDTH // HEADS), 3, 2)
        angles = (places[:, None] * 10.0 ** -jnp.arange(q.shape[-1] // 2))[:, None]
        turns = jnp.cos(angles), jnp.sin(angles)

        def turned(x):
            (a, b), (cos, sin) = jnp.split(x, 2, -1), turns
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

        new = jnp.stack([turned(k), v])[None]
        cache = lax.dynamic_update_slice(cache, new, (i, 0, 0, start, 0, 0))
        keys, values = lax.dynamic_index_in_dim(cache, i, keepdims=False)
        seen = jnp.arange(CONTEXT) <= places[:, None]
        mixed = jax.nn.dot_product_attention(turned(q), keys, values, mask=seen[None, None])
        x = x + mixed.reshape(x.shape) @ w["out"]
        return (x + jax.nn.silu(x @ w["up"]) @ w["down"], cache), None

    x = params["table"][words]
    steps = params["blocks"], jnp.arange(LAYERS)
    (x, cache), _ = lax.scan(layer, (x, cache), steps)
    return x @ params["table"].T, cache


SCHEMES = {
    "float": None,
    "w8a8": jqx.presets.w8a8(),
    "w8a8 dynamic": jqx.presets.w8a8_dynamic(),
    "w4a16 in groups": "int4:group=32",
}


def stored_bytes(params):
    """The bytes of codes, two of 4 bits in one, of scales, and of what is not quantized."""

    def size(x):
        if not isinstance(x, jqx.QTensor):
            return x.nbytes
        return x.nbytes - x.values.nbytes + x.size * jqx.numerics.format_of(x.qtype).bits // 8

    is_leaf = lambda x: isinstance(x, jqx.QTensor)  # noqa: E731
    return sum(map(size, jax.tree.leaves(params, is_leaf=is_leaf)))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_decoder_reads_a_prompt_and_writes_words_with_its_cache(name):
    """One file for both. The words are greedy, and those of jqx."""
    policy = jqx.Policy({"blocks/.*": SCHEMES[name]} if SCHEMES[name] else {})
    nearest = jqx.algorithms.nearest()
    args = TEXT, CACHE, jnp.int32(0)
    q = jqx.ptq(decoder, policy, nearest, progress=False)(PARAMS, [args])
    (t,) = export.symbolic_shape("t", constraints=[f"t <= {CONTEXT}"])
    words = jax.ShapeDtypeStruct((1, t), jnp.int32)
    model = to_onnx(q)(words, CACHE, jax.ShapeDtypeStruct((), jnp.int32))
    assert model.ByteSize() < 1.02 * stored_bytes(q.params)
    call, found = jax.jit(q.function), args
    for step in range(3):
        expected = call(q.params, *args)
        found = run(model, *found)
        assert_close(found, expected, 1e-4)
        word, place = expected[0][:, -1:].argmax(-1), jnp.int32(TEXT.shape[1] + step)
        assert found[0][0, -1].argmax() == word[0, 0]
        args, found = (word, expected[1], place), (word, found[1], place)


KERNELS = {
    "stem": normal(10, 3, 3, 3, 16) / 4,
    "blocks": [
        {
            "expand": normal(11, 1, 1, 16, 64) / 4,
            "depthwise": normal(12, size, size, 1, 64) / size,
            "project": normal(13, 1, 1, 64, 16) / 8,
            "bias": normal(14, 16),
        }
        for size in (3, 5)
    ],
    "head": normal(15, 16, 10) / 4,
}
IMAGES = normal(16, 4, 12, 12, 3)


def network(params, x):
    """Inverted residuals, as in EfficientNet-Lite0: 1 x 1, depthwise, 1 x 1."""

    def conv(x, kernel, stride=1, groups=1):
        numbers = ("NHWC", "HWIO", "NHWC")
        strides = stride, stride
        return lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    x = jax.nn.relu6(conv(x, params["stem"], 2))
    for block in params["blocks"]:
        h = jax.nn.relu6(conv(x, block["expand"]))
        h = jax.nn.relu6(conv(h, block["depthwise"], groups=64))
        x = x + conv(h, block["project"]) + block["bias"]
    return x.mean((1, 2)) @ params["head"]


@pytest.mark.parametrize("name", ["float", "w8a8", "w8a8 dynamic", "w8a16"])
def test_a_network_of_convolutions_classifies_as_in_jqx(name):
    """Batches of any size. Where a float differs in its last digit, a code may; and
    optimized, onnxruntime rounds what meets weights in codes.
    """
    policy = jqx.presets.w8a16() if name == "w8a16" else SCHEMES[name] or jqx.Policy({})
    nearest = jqx.algorithms.nearest()
    q = jqx.ptq(network, policy, nearest, progress=False)(KERNELS, [IMAGES])
    (b,) = export.symbolic_shape("b")
    model = to_onnx(q)(jax.ShapeDtypeStruct((b, *IMAGES.shape[1:]), jnp.float32))
    assert operations(model)["ConvInteger" if "a8" in name else "Conv"] == 7
    for images, level in ((IMAGES, LEVELS.ORT_DISABLE_ALL), (IMAGES[:3], LEVELS.ORT_ENABLE_ALL)):
        expected = jax.jit(q.function)(q.params, IMAGES)[: len(images)]
        is_exact = "a8" not in name and level == LEVELS.ORT_DISABLE_ALL
        assert_close(run(model, images, level=level), expected, 1e-5 if is_exact else 2e-2)


def test_a_weight_that_is_used_in_several_ways_is_stored_once():
    """As rows, as a matrix, transposed, with other axes, and as a kernel."""

    def f(w, rows, x):
        products = x @ w, x[:, :12] @ w.T, jnp.einsum("ab,bcd->acd", x, w.reshape(96, 3, 4))
        return w[rows], products, lax.conv(x[None], w.T[:, :, None], (1,), "SAME")

    w, rows, x = normal(5, 96, 12), np.array([3, 95], "i4"), normal(6, 96, 96)
    model = to_onnx(f, w)(rows, x)
    assert model.ByteSize() < 1.02 * w.nbytes + 4_000
    assert_close(run(model, rows, x), f(w, rows, x))
    twice = jqx.QTensor.quantize(normal(9, 256, 128), jqx.QSpec("int4", jqx.per_block({0: 32})))
    model = to_onnx(lambda w, x: jnp.tanh(x @ w) @ w.T, twice)(normal(6, 4, 256))
    assert model.ByteSize() < 256 * 128 * (1 / 2 + 4 / 32) + 4_000


def cache_in(qtype, *axes):
    """A cache with a scale for each element of these axes."""
    spec = jqx.QSpec(qtype, jqx.per_axis(*axes), symmetric=qtype != "uint8")
    return jqx.QTensor.zeros(CACHE.shape, spec)


@pytest.mark.parametrize("qtype", ["int8", "uint8"])
def test_a_cache_may_be_in_codes(qtype):
    """Codes, scales and zero points are inputs and outputs. The codes of a cache are those of jqx,
    but where a float differs in its last digit.
    """
    cache = cache_in(qtype, 0, 1, 2, 3, 4)
    places = [".values", ".scale", ".zero_point"][: len(jax.tree.leaves(cache))]
    (t,) = export.symbolic_shape("t", constraints=[f"t <= {CONTEXT}"])
    words, start = jax.ShapeDtypeStruct((1, t), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    model = to_onnx(decoder, PARAMS)(words, cache, start)
    assert [x.name for x in model.graph.output[1:]] == [f"output[1]{place}" for place in places]
    call = jax.jit(jqx.convert(decoder, jqx.Policy({})))
    args = TEXT, cache, jnp.int32(0)
    for step in range(2):
        logits, cache = call(PARAMS, *args)
        found, *parts = run(model, *args)
        assert_close([found], logits, 2e-2)
        for x, want in zip(parts, jax.tree.leaves(cache), strict=True):
            is_code = x.dtype.name == qtype
            assert x.dtype == want.dtype and np.abs(x.astype("f4") - want).max() <= is_code + 1e-5
            assert not is_code or (x != np.asarray(want)).mean() < 0.01
        args = logits[:, -1:].argmax(-1), cache, jnp.int32(TEXT.shape[1] + step)


def test_a_scan_reads_and_returns_the_caches_of_its_layers():
    def f(_, cache, new):
        def layer(x, own):
            own = lax.dynamic_update_slice(own, x[None], (2, 0))
            return jnp.tanh(x + x @ own.T @ own), own

        return lax.scan(layer, new, cache)

    cache = jqx.QTensor.quantize(normal(20, 3, 4, 8), jqx.QSpec("int8", jqx.per_axis(0, 1)))
    new = normal(21, 8)
    model = to_onnx(f, {})(cache, new)
    want = jqx.convert(f, jqx.Policy({}))({}, cache, new)
    assert_close(run(model, cache, new), want, 1e-5)


def test_states_without_a_form_are_refused():
    shared, words = cache_in("int8", 0), jnp.int32(0)
    slow = lambda _, cache: jnp.exp(cache)  # noqa: E731
    chosen = lambda _, cache, i: lax.cond(i > 0, jnp.flip, jnp.copy, cache)  # noqa: E731
    cases = [
        (lambda: to_onnx(decoder, PARAMS)(TEXT, cache_in("int4", 0), words), "is a QTensor that"),
        (lambda: to_onnx(decoder, PARAMS)(TEXT, shared, words), "share a scale with others"),
        (lambda: to_onnx(slow, {})(shared), "`exp` of an input in codes has no form"),
        (lambda: to_onnx(chosen, {})(shared, words), "`cond` of an input in codes"),
    ]
    for call, text in cases:
        with pytest.raises(NotImplementedError, match=text):
            call()


def test_blocks_of_one_size_are_written_where_the_last_is_smaller():
    """In products, with the weight on either side, and where a weight is read as an array."""

    def f(w, x):
        return x @ w, w.T @ x.T, w * 2

    w, x = normal(7, 200, 48), normal(8, 5, 200)
    q = jqx.QTensor.quantize(w, jqx.QSpec("int4", jqx.per_block({0: 64}, tail=True)))
    model = to_onnx(f, q)(x)
    assert_close(run(model, x), f(q.dequantize(), x))
    sizes = {tuple(x.dims) for x in model.graph.initializer if x.data_type == onnx.TensorProto.INT4}
    assert sizes == {(192, 48), (8, 48), (48, 8)}  # without their transposes, if large


def test_a_file_may_hold_its_weights_in_another(tmp_path):
    """As files above 2 GB must."""
    model, path = to_onnx(network, KERNELS)(IMAGES), tmp_path / "model.onnx"
    expected, size = run(model, IMAGES), model.ByteSize()
    onnx.save(model, path, save_as_external_data=True, location="model.bin")
    onnx.checker.check_model(path, full_check=True)
    weights = (tmp_path / "model.bin").stat().st_size
    assert size / 2 < weights < size and path.stat().st_size < size / 2
    (found,) = onnxruntime.InferenceSession(path).run(None, {"input[0]": np.asarray(IMAGES)})
    assert_close([found], expected)
