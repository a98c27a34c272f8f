"""An algorithm that jqx does not know of, written here: it asks for statistics that an observer
records, one of this file among them, and chooses codes by them, for functions and modules of Flax.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx
from jqx.observers import Observer

POLICY = jqx.Policy([jqx.Rule(weight="int4:channel")])
RNG = np.random.default_rng(0)
MIX = RNG.normal(size=(16, 16))
BATCHES = [np.float32(RNG.normal(size=(32, 16)) @ MIX) for _ in range(2)]
W, V = (np.float32(RNG.normal(size=shape)) for shape in ((16, 12), (12, 4)))


@dataclasses.dataclass(frozen=True)
class Rows(Observer):
    """Counts the rows of an operand."""

    def empty(self, operand, site):
        return jnp.float32(0)

    def observe(self, x, site):
        return jnp.float32(x.size // x.shape[site.contracted[0]])

    def merge(self, a, b):
        return a + b


def corrected(w: np.ndarray, hessian: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rounds row after row; what a row loses, the rows after it make good (Frantar, 2022)."""
    damped = hessian + 0.01 * np.trace(hessian) / len(hessian) * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, codes = w.astype(np.float64), np.zeros(w.shape)
    for i in range(len(w)):
        codes[i] = np.clip(np.round(left[i] / scale[0]), -8, 7)
        lost = (left[i] - codes[i] * scale[0]) / upper[i, i]
        left[i + 1 :] -= np.outer(upper[i, i + 1 :], lost)
    return codes


@dataclasses.dataclass(frozen=True)
class Corrected:
    """An algorithm: codes of which each makes good what those before it lost."""

    @property
    def observers(self) -> dict[str, Any]:
        return {".*": (jqx.observers.hessian, Rows())}

    def __call__(self, plan, params, stats):
        inputs = {}
        for site in plan.sites:
            lhs, weight = site.operands
            assert stats[f"{lhs.key}@rows"] == sum(len(x) for x in BATCHES)
            inputs.setdefault(weight.path, []).append(stats[f"{lhs.key}@hessian"].products)

        def choose(weight, w):
            nearest = jqx.QTensor.quantize(w, weight.spec)
            hessian = np.float64(sum(inputs[weight.path]))
            codes = corrected(np.asarray(w), hessian, np.asarray(nearest.scale))
            return dataclasses.replace(nearest, values=jnp.asarray(codes, nearest.values.dtype))

        return plan.map_weights(choose, params)


class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(12, use_bias=False)(x))
        return nn.Dense(4, use_bias=False)(x)


class Model(nnx.Module):
    """The same in nnx."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(16, 12, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(12, 4, use_bias=False, rngs=rngs)
        self.a.kernel.set_value(jnp.asarray(W))
        self.b.kernel.set_value(jnp.asarray(V))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def function(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["v"]


def plain(algorithm, policy=POLICY):
    quantize = jqx.ptq(function, policy, algorithm, target=False, progress=False)
    return quantize({"w": jnp.asarray(W), "v": jnp.asarray(V)}, BATCHES)


def test_an_algorithm_asks_for_statistics_of_functions_and_modules():
    nearest, better = plain(jqx.algorithms.nearest()), plain(Corrected())
    gram = sum(np.float64(x).T @ x for x in BATCHES)
    want = corrected(W, gram, np.asarray(nearest.params["w"].scale))
    found = np.asarray(better.params["w"].values, np.float64)
    assert np.mean(found == want) > 0.98  # sums of squares are float32 there
    x = np.concatenate(BATCHES)
    lost = [
        np.linalg.norm(x @ (q.params["w"].dequantize() - W)) / np.linalg.norm(x @ W)
        for q in (nearest, better)
    ]
    assert lost[1] < 0.8 * lost[0], lost

    layers = {"Dense_0": {"kernel": jnp.asarray(W)}, "Dense_1": {"kernel": jnp.asarray(V)}}
    options = {"target": False, "progress": False}
    linen = jqx.linen.ptq(Net(), POLICY, Corrected(), **options)({"params": layers}, BATCHES)
    model = jqx.nnx.ptq(Model(), POLICY, Corrected(), **options)(BATCHES)
    for first, second in (
        (linen.params["params"][name]["kernel"] for name in layers),
        (model.params[name]["kernel"] for name in "ab"),
    ):
        np.testing.assert_array_equal(first.values, better.params["w"].values)
        np.testing.assert_array_equal(second.values, better.params["v"].values)


def test_scales_of_activations_are_calibrated_too():
    policy = jqx.Policy([jqx.Rule(weight="int4:channel", activation="int8")])
    found, nearest = plain(Corrected(), policy), plain(jqx.algorithms.nearest(), policy)
    assert set(found.affines) == {"w:dot_general:lhs", "v:dot_general:lhs"}
    for key, affine in nearest.affines.items():
        np.testing.assert_array_equal(found.affines[key].scale, affine.scale)


def test_what_is_no_algorithm_is_refused():
    def asks(plan, params, stats):
        return params

    asks.observers = {"nowhere": jqx.observers.mean}  # pyright: ignore
    for algorithm, error, fact in (
        (3, TypeError, r"jqx\.ptq: `algorithm` is not an algorithm"),
        (Corrected, TypeError, r"call the class: Corrected\(\)"),
        (asks, ValueError, "matches no site"),
        (lambda plan, params, stats: None, ValueError, "other parameters"),
    ):
        with pytest.raises(error, match=fact) as info:
            plain(algorithm)
        assert "fix:" in str(info.value)


class Hostile:
    """An object of a user that can neither be compared nor printed."""

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __repr__(self):
        raise RuntimeError("printed")

    __hash__ = None


@dataclasses.dataclass(eq=False)
class Fields:
    """An algorithm whose fields are arrays, or have names that mean something in jqx."""

    mask: Any = None
    function: Any = jnp.abs
    algorithms: Any = ("first", "second")
    run: int = 3
    correct: bool = True
    rewrite: str = "no"
    other: Any = dataclasses.field(default_factory=Hostile)

    def __call__(self, plan, params, stats):
        return params


@pytest.mark.parametrize("mask", [None, np.ones(3), jnp.ones((2, 2)), Hostile()])
def test_fields_of_an_algorithm_are_its_own(mask):
    f, policy = lambda w, x: x @ w, jqx.presets.w8a16()
    quantized = jqx.ptq(f, policy, Fields(mask), progress=False, target=False)(W, BATCHES)
    assert quantized.report.codes.startswith("fields(")
    if hasattr(mask, "shape"):
        assert f"mask={mask.dtype}{list(mask.shape)}" in quantized.report.codes
    chained = jqx.algorithms.chain(jqx.algorithms.smooth_quant(strength=0.85), Fields(mask))
    assert chained.algorithms[1].mask is mask
    with pytest.raises(ValueError, match="exclude each other"):
        jqx.ptq(f, policy, Fields(mask), effort="hours")
    with pytest.raises(TypeError, match="not an algorithm"):
        jqx.ptq(f, policy, Hostile())
