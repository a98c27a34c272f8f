"""`ptq(..., hoist=)`: weights that are computed from parameters alone, in files and in modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx

from ..models.transforms import normal

X = normal(0, 4, 16)
P = {"w": normal(1, 16, 16), "mask": jnp.tri(16), "v": normal(2, 3, 16, 16), "b": normal(3, 1, 16)}
NEAREST = jqx.algorithms.nearest()


def norm(w):
    return w / jnp.linalg.norm(w, axis=0, keepdims=True)


def f(p, x):
    h = jnp.tanh(x @ (p["w"] * p["mask"]) + p["b"])
    return jax.lax.scan(lambda h, v: (jnp.tanh(h @ norm(v)), None), h, p["v"])[0]


def quantized(function=f, params=P, policy=None, hoist=True, **options):
    policy = policy or jqx.presets.w8a8()
    split = jqx.ptq(function, policy, NEAREST, hoist=hoist, target=False, progress=False, **options)
    return split(params, [X])


def error_of(got, expected):
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def test_what_is_split_off_is_quantized_saved_and_bound_again(tmp_path):
    found = quantized()
    assert [weight.path for weight in found.plan.weights] == ["computed/mask,w", "computed/v"]
    assert found.plan.skipped == () and found.plan.hoisted.what == "weights"
    expected = found(X)
    assert error_of(expected, f(P, X)) < 0.05  # eight bits, in four layers one after another
    jqx.save(tmp_path / "f", found)
    unbound = jqx.load(tmp_path / "f")
    assert unbound.plan == found.plan
    g, _ = jqx.hoist(f, "weights")(P, X)
    for bound in (unbound.bind(f, target=False), unbound.bind(g, target=False)):
        np.testing.assert_array_equal(bound(X), expected)
        np.testing.assert_array_equal(bound(X[:2]), expected[:2])


def test_another_function_of_the_parameters_is_split_in_the_same_way():
    found = quantized()
    step = found.bind(lambda p, x, scale: scale * f(p, x[None])[0])
    np.testing.assert_array_equal(step(X[0], 2.0), 2 * found(X[:1])[0])
    with pytest.raises(ValueError, match="not the computed parameters"):
        found.bind(lambda p, x: f(p, x) @ jnp.exp(p["w"]) @ jnp.tanh(p["w"] * p["mask"]))(X)


def test_a_file_without_the_structure_of_the_parameters_asks_for_it(tmp_path):
    def own(p, x):
        return x @ (p["w"] * p["mask"]) * p["n"]

    params = {"w": P["w"], "mask": P["mask"], "n": 3}
    found = quantized(own, params, jqx.presets.w8a16())
    jqx.save(tmp_path / "f", found)
    unbound = jqx.load(tmp_path / "f")
    with pytest.raises(ValueError, match=r"bind\(f, like=params\)"):
        unbound.bind(own)
    for like in (params, {**jax.eval_shape(lambda: P), "n": 3}):
        like = {key: like[key] for key in params}
        np.testing.assert_array_equal(unbound.bind(own, like, target=False)(X), found(X))
    with pytest.raises(ValueError) as raised:
        unbound.bind(lambda p, x: x @ (p["w"] + jnp.exp(p["w"])), params)
    assert "fix:" in str(raised.value)


def test_values_that_are_larger_are_split_off_only_when_asked():
    low = {"a": normal(1, 16, 4), "b": normal(2, 4, 16)}
    policy = jqx.presets.w8a16()
    product = lambda p, x: x @ (p["a"] @ p["b"])  # noqa: E731
    kept = quantized(product, low, policy)
    assert [weight.path for weight in kept.plan.weights] == ["a", "b"]
    assert "larger than their 128" in kept.plan.skipped[0].reason
    whole = quantized(product, low, policy, hoist="all")
    assert [weight.path for weight in whole.plan.weights] == ["computed/a,b"]
    with pytest.raises(ValueError, match="`hoist` is unknown"):
        quantized(hoist="large")


def test_complex_parameters_are_saved_as_they_are(tmp_path):
    params = {"c": jax.lax.complex(P["w"], P["mask"]), "w": P["w"]}

    def own(p, x):
        return (x.astype(jnp.complex64) @ jnp.exp(p["c"])).real @ norm(p["w"])

    found = quantized(own, params, jqx.presets.w8a16(), hoist="all")
    jqx.save(tmp_path / "f", found)
    bound = jqx.load(tmp_path / "f").bind(own, target=False)
    assert bound.params["computed"]["c"].dtype == jnp.complex64
    np.testing.assert_array_equal(bound(X), found(X))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=True)(nn.WeightNorm(nn.Dense(16))(x))
        return h @ (self.param("w", nn.initializers.normal(), (16, 4)) * jnp.tri(16, 4))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.v, self.g = nnx.Param(normal(5, 16, 16)), nnx.Param(jnp.ones((1, 16)))
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.norm(x @ (self.g[...] * norm(self.v[...])))


@pytest.mark.slow
def test_modules_of_flax_are_split_and_bound_again(tmp_path):
    policy, options = jqx.presets.w8a8_dynamic(), {"hoist": True, "progress": False}
    module = Linen()
    variables = module.init(jax.random.key(0), X)
    found = jqx.linen.ptq(module, policy, NEAREST, **options)(variables, [X])
    names = "Dense_0.kernel,WeightNorm_0.Dense_0.kernel.scale"
    assert [x.path for x in found.plan.weights] == [f"computed/{names}", "computed/w"]
    assert error_of(found(X), module.apply(variables, X)) < 0.02
    jqx.save(tmp_path / "linen", found)
    again = jqx.linen.bind(jqx.load(tmp_path / "linen"), module)
    np.testing.assert_array_equal(again(X), found(X))
    model = Nnx(nnx.Rngs(0))
    found = jqx.nnx.ptq(model, policy, NEAREST, **options)([X])
    assert [x.path for x in found.plan.weights] == ["computed/g,v"]
    assert error_of(found(X), model(X)) < 0.02
    jqx.save(tmp_path / "nnx", found)
    np.testing.assert_array_equal(jqx.nnx.bind(jqx.load(tmp_path / "nnx"), model)(X), found(X))
