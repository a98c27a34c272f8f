"""`bind` of a file warns of a function with other operations around its contractions."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jqx
from tests.arrays import normal

PARAMS = {"a": normal(0, 8, 8), "b": normal(1, 8, 8), "s": normal(2, 2, 8, 8)}
X = normal(3, 4, 8)


def normed(h):
    return h * lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6)


def f(p, x):
    h = jax.nn.relu(normed(x) @ p["a"])
    h, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), h, p["s"])
    return jnp.where(h > 0, h, 0.1 * h) @ p["b"]


def with_jit_around_parts(p, x):
    h = jax.jit(lambda h: jnp.maximum(h, 0.0))(jax.jit(normed)(x) @ p["a"])
    h, _ = lax.scan(lambda c, w: (jax.jit(jax.checkpoint(jnp.tanh))(c @ w), None), h, p["s"])
    return jax.jit(lambda h: jnp.where(h > 0, h, 0.1 * h))(h) @ p["b"]


def with_a_custom_derivative(p, x):
    tanh = jax.custom_jvp(jnp.tanh)
    tanh.defjvps(lambda dx, y, x: dx * (1 - y**2))
    h = jax.nn.relu(normed(x) @ p["a"])
    h, _ = lax.scan(lambda c, w: (tanh(c @ w), None), h, p["s"])
    return jnp.where(h > 0, h, 0.1 * h) @ p["b"]


def with_dead_code(p, x):
    jnp.sin(x)
    return f(p, jax.lax.stop_gradient(x))


EQUAL = {
    "itself": f,
    "parts": with_jit_around_parts,
    "custom derivative": with_a_custom_derivative,
    "dead code": with_dead_code,
    "other numbers": lambda p, x: f(p, x).reshape(4, 8).astype(jnp.float32),
}


def other(first=normed, act=jax.nn.relu, inner=jnp.tanh, last=lambda h: h):
    def g(p, x):
        h = act(first(x) @ p["a"])
        h, _ = lax.scan(lambda c, w: (inner(c @ w), None), h, p["s"])
        return last(jnp.where(h > 0, h, 0.1 * h) @ p["b"])

    return g


OTHER = {
    "activation": (other(act=jnp.tanh), "`tanh`", "`max`"),
    "gelu": (other(act=jax.nn.gelu), "`", "`max`"),
    "no norm": (other(first=lambda x: x), "`dot_general`", "`"),
    "larger inputs": (other(first=lambda x: normed(100 * x)), "`mul`", "`"),
    "in a scan": (other(inner=jnp.sin), "`sin`", "`tanh`"),
    "at the end": (other(last=lambda h: h + 5), "`add`", "the end"),
    "integer results": (other(last=lambda h: jnp.argmax(h, -1)), "`argmax`", "the end"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bind") / "model.safetensors"
    policy = jqx.presets.w8a8_dynamic()
    quantize = jqx.ptq(f, policy, jqx.algorithms.nearest(), target=False, progress=False)
    jqx.save(path, quantize(PARAMS, [X]), progress=False)
    return path


def test_equal_functions_are_bound_without_a_word(path):
    unbound = jqx.load(path, progress=False)
    with warnings.catch_warnings(), jax.enable_x64(True):
        warnings.simplefilter("error")
        for g in EQUAL.values():
            unbound.bind(g, target=False, check="function")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for g in EQUAL.values():
            unbound.bind(g, target=False)
    assert len(unbound.plan.operations) < 400


@pytest.mark.parametrize("name", OTHER)
def test_another_function_is_a_warning_that_names_its_first_operation(path, name):
    unbound = jqx.load(path, progress=False)
    g, given, expected = OTHER[name]
    pattern = rf"other operations(.|\n)*given: +{given}(.|\n)*expected: {expected}"
    with pytest.warns(UserWarning, match=pattern):
        unbound.bind(g, target=False)
    with pytest.raises(ValueError, match=pattern):
        unbound.bind(g, target=False, check="function")


def test_what_cannot_be_compared_is_an_error_only_on_request(path):
    unbound = jqx.load(path, progress=False)
    _, _, names = unbound.plan.operations.partition(":")
    for plan, given in (("", "a file without operations"), (f"0.1.2:{names}", "jax 0.1.2")):
        old = dataclasses.replace(unbound, plan=dataclasses.replace(unbound.plan, operations=plan))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            old.bind(OTHER["activation"][0], target=False)
        with pytest.raises(ValueError, match=given):
            old.bind(f, target=False, check="function")
    with pytest.raises(ValueError, match="without operations"):
        dataclasses.replace(unbound, inputs=None).bind(f, target=False, check="function")
    for own in ("no names", "!!!", names[:10]):
        plan = dataclasses.replace(unbound.plan, operations=f"{jax.__version__}:{own}")
        with pytest.raises(ValueError, match="cannot be read"):
            dataclasses.replace(unbound, plan=plan).bind(f, target=False)
    with pytest.raises(ValueError, match="`check` is unknown"):
        unbound.bind(f, target=False, check="all")
