"""Files in OpenVINO: the results of jqx, and products of codes in its kernels."""

import jax
import numpy as np
import openvino
import pytest

import jqx
from jqx.interop import to_onnx

from . import test_fusion as fusion
from .runtime import assert_close
from .test_quantized import SCHEMES, X, quantized

CORE = openvino.Core()
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def compiled(model):
    """A model for a processor, whose activations are not rounded where the file does not say so."""
    return CORE.compile_model(CORE.read_model(model.SerializeToString()), "CPU", EXACT)


def outputs(model, *args):
    """The outputs of a model."""
    return [np.array(x) for x in compiled(model)(list(map(np.asarray, args))).values()]


# OpenVINO 2026.4 rounds to float16 on the way to float8, so at times to the other neighbour.
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "fp8"])
def test_a_model_gives_the_results_of_the_quantized_function(name):
    policy, options = SCHEMES[name]
    q = quantized(policy, algorithm=jqx.algorithms.nearest())
    model = to_onnx(q, **options)(X)
    assert_close(outputs(model, X), jax.jit(q.function)(q.params, X))


def test_convolutions_and_products_are_those_of_codes():
    nearest = jqx.algorithms.nearest()
    quantize = jqx.ptq(fusion.network, jqx.presets.w8a8(), nearest, progress=False)
    q = quantize(fusion.CHANNELS, [fusion.IMAGES])
    model = compiled(to_onnx(q, products="qdq_uint8")(fusion.IMAGES))
    products = [
        node.get_rt_info()["runtimePrecision"].value
        for node in model.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].value in ("Convolution", "FullyConnected", "MatMul")
    ]
    assert sorted(products) == ["i8"] + 5 * ["u8"]


@pytest.mark.parametrize("products", ["int8", "qdq_uint8"])
def test_convolutions_by_scales_of_current_values(products):
    nearest = jqx.algorithms.nearest()
    quantize = jqx.ptq(fusion.network, jqx.presets.w8a8_dynamic(), nearest, progress=False)
    q = quantize(fusion.CHANNELS, [fusion.IMAGES])
    model = to_onnx(q, products=products)(fusion.IMAGES)
    assert_close(outputs(model, fusion.IMAGES), jax.jit(q.function)(q.params, fusion.IMAGES))
