"""The one call is its steps, one after another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.ptq.quantized import leaves_by_path

from ..arrays import on_device

W, X = np.linspace(-1, 1, 64 * 8, dtype=np.float32).reshape(64, 8), jnp.ones((3, 64))
PARAMS = {"w": on_device(W), "b": jnp.zeros((1, 8))}
W8A8, W8A16 = jqx.presets.w8a8(), jqx.presets.w8a16()


def f(params, x):
    return jnp.tanh(x @ params["w"]) + params["b"]


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)


def test_it_is_its_steps():
    batches = [X, -3 * X, 2 * X]
    found = jqx.ptq(f, W8A8, progress=False)(PARAMS, (batch for batch in batches))
    plan = jqx.make_plan(f, W8A8)(PARAMS, X)
    affines = jqx.affines(plan, jqx.calibrate_batches(f, plan, PARAMS, batches, progress=False))
    assert found.plan == plan
    assert dataclasses.replace(found.report, codes="") == jqx.report(plan, PARAMS)
    assert_equal(found.affines, affines)
    q = jqx.quantize_params(PARAMS, plan, target=jax.default_backend())
    assert_equal(found.params, q)
    assert_equal(found.function(found.params, X), jqx.convert(f, plan, affines)(q, X))


def test_without_static_scales_one_batch_is_read_and_layouts_may_stay():
    def batches():
        yield (X,)
        raise AssertionError("a second batch")

    found = jqx.ptq(f, W8A16, target=False)(PARAMS, batches())
    assert found.affines == {} and found.params["w"].layout is None
    assert_equal(
        jqx.pack_for(found.params, "tpu"), jqx.ptq(f, W8A16, target="tpu")(PARAMS, [X]).params
    )


def test_an_algorithm_chooses_codes_or_other_floats():
    def zeros(plan, params, stats):
        assert stats is None and plan.weights[0].path == "w"
        w = jqx.quantize_params(params, plan)["w"]
        return {**params, "w": jax.tree.map(jnp.zeros_like, w)}

    def halved(plan, params, stats):
        return {**params, "w": params["w"] / 2}

    def other(plan, params, stats):
        return {**params, "w": jqx.QTensor.quantize(params["w"], jqx.QSpec("int4"))}

    found = jqx.ptq(f, W8A16, zeros, target=False)(PARAMS, [X])
    assert not np.any(found.params["w"].values)
    found = jqx.ptq(f, W8A16, halved, target=False)(PARAMS, [X])
    plan = jqx.make_plan(f, W8A16)(PARAMS, X)
    assert_equal(found.params["w"].values, jqx.quantize_params(PARAMS, plan)["w"].values)
    with pytest.raises(ValueError, match=r"jqx\.ptq: the algorithm chose codes"):
        jqx.ptq(f, W8A16, other)(PARAMS, [X])


def test_weights_may_stand_in_several_places():
    def g(x, w, y, v):
        return x @ w + y @ v

    w = PARAMS["w"]
    found = jqx.ptq(g, W8A16, params=(1, 3), target=False)((w, 2 * w), [(X, X)])
    assert [weight.path for weight in found.plan.weights] == ["1", "3"]
    assert found.function(X, found.params[0], X, found.params[1]).shape == (3, 8)


def test_a_backend_without_layouts_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "metal")
    with pytest.raises(ValueError, match="target == None, and the backend of JAX is 'metal'"):
        jqx.ptq(f, W8A8)
    with pytest.raises(ValueError, match="target == 'rocm'\n"):
        jqx.ptq(f, W8A8, target="rocm")


def test_parameters_of_one_path_cannot_be_saved():
    """Names tell them apart in a plan, and not in a file."""
    params = {"c": {"d": jnp.ones(8)}, "c/d": jnp.ones(8)}
    match = r"several parameters have the path 'c/d'"
    with pytest.raises(ValueError, match=match):
        leaves_by_path(params)


def test_what_does_not_fit_is_refused():
    for make, error, fact in (
        (lambda: jqx.ptq(f, W8A8)(PARAMS, []), ValueError, "there is no batch"),
        (lambda: jqx.ptq(f, W8A8)(PARAMS, 3), TypeError, "`batches`"),
        (lambda: jqx.ptq(f, "w8a8"), TypeError, "`policy`"),
        (lambda: jqx.ptq(PARAMS, W8A8), TypeError, ""),
        (lambda: jqx.ptq(f, W8A8, target="cuda"), ValueError, "`target` is unknown"),
    ):
        with pytest.raises(error, match=rf"jqx\.ptq: .*{fact}"):
            make()


class TestWeightsOfACheckpoint:
    """Some weights are QTensors already, which the policy leaves alone."""

    @staticmethod
    def apply(p, x):
        return jax.nn.relu(x @ p["old"].T) @ p["new"]

    @pytest.fixture
    def params(self):
        rng = np.random.default_rng(0)
        old = jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)
        new = jnp.asarray(rng.normal(size=(64, 16)), jnp.float32)
        return {"old": jqx.QTensor.quantize(old, "int8"), "new": new}

    @pytest.fixture
    def batch(self):
        return jnp.asarray(np.random.default_rng(1).normal(size=(160, 128)), jnp.float32)

    @pytest.mark.parametrize("name", ["nearest", "gptq", "rotate", None])
    def test_they_are_what_they_were(self, params, batch, name):
        algorithm = None if name is None else getattr(jqx.algorithms, name)()
        policy = jqx.Policy({"new": "int4:group=32"})
        found = jqx.ptq(self.apply, policy, algorithm, target=False, progress=False)(
            params, [batch]
        )
        assert_equal(found.params["old"], params["old"])
        assert found.params["new"].qtype == jnp.int4
        want = self.apply(jqx.dequantize_params(params), batch)
        noise = jnp.linalg.norm(found(batch) - want) / jnp.linalg.norm(want)
        assert noise < 0.2  # 4 bits: a tenth

    def test_activations_that_meet_quantized_weights_are_quantized(self, params, batch):
        rules = [
            jqx.Rule("new", weight="int8", activation="int8"),
            jqx.Rule("old", activation="int8"),
        ]
        found = jqx.ptq(self.apply, jqx.Policy(rules), progress=False)(params, [batch])
        assert "smooth_quant" in found.report.codes or "without" in found.report.codes
        want = self.apply(jqx.dequantize_params(params), batch)
        assert jnp.linalg.norm(found(batch) - want) < 0.03 * jnp.linalg.norm(want)
        assert len(found.affines) == 2

    def test_an_algorithm_that_changes_one_is_refused(self, params, batch):
        policy = jqx.Policy({"new": "int4:group=32"})
        quantize = jqx.ptq(self.apply, policy, jqx.algorithms.awq(), progress=False)
        with pytest.raises(NotImplementedError, match="changes a weight that is quantized already"):
            quantize(params, [batch])
