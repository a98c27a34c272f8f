import jax.numpy as jnp
import numpy as np

import jqx

from ..oracles.contractions import gamma
from ..oracles.numerics import as_float64
from ..tensor.tensors import reals
from .table import PRESETS, each


@each([f for f, (weight, _) in PRESETS.items() if weight.qtype in (jnp.int8, jnp.int4)])
def test_the_specs_of_a_preset_quantize_a_matrix_product(preset):
    """At the site of `x @ w`: the weight per column, the activation as a whole or by row."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 16), (16, 4)))
    (rule,) = preset().rules
    weight = jqx.QTensor.quantize(w, rule.weight.resolve(rank=2, kept=(1,)))
    assert weight.scale.shape == (1, 4)
    operand = x
    # Numbers in range are off by half a step at most: xq wq - x w = x (wq - w) + (xq - x) wq.
    step, lost = as_float64(weight.scale), np.abs(reals(weight) - as_float64(w))
    form = jqx.numerics.format_of(weight.qtype)
    inside = (w / step > form.low - 0.5) & (w / step < form.high + 0.5)
    assert np.all(lost[inside] <= (np.abs(step) / 2 * (1 + 1e-6) + 0 * lost)[inside])
    assert inside.all() or rule.weight.calibrator != jqx.calibrators.absmax
    off = np.abs(as_float64(x)) @ lost
    if rule.activation is not None:
        operand = jqx.QTensor.quantize(x, rule.activation.resolve(rank=2, kept=(0,)))
        assert operand.scale.shape == ((3, 1) if rule.activation.dynamic else (1, 1))
        off = off + as_float64(operand.scale) / 2 * np.abs(reals(weight)).sum(0, keepdims=True)
    # And float32 rounds two quotients, 16 products or sums, and two products with the scales.
    rounding = gamma(20) * (np.abs(as_float64(x)) @ np.abs(as_float64(w)) + off)
    expected = as_float64(x) @ as_float64(w)
    assert np.all(np.abs(as_float64(operand @ weight) - expected) <= off + rounding)
