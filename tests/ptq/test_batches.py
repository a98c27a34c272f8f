"""What one batch is: a tuple is several arguments, any other pytree is one; numbers are static."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import normal, on_device


class Named(typing.NamedTuple):
    x: jax.Array
    mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    x: jax.Array
    mask: jax.Array


class Registered(tuple):
    x = property(lambda self: self[0])
    mask = property(lambda self: self[1])


jax.tree_util.register_pytree_node(
    Registered, lambda own: (tuple(own), None), lambda _, parts: Registered(parts)
)

W, X, MASK = normal(0, 8, 8), normal(1, 16, 8), on_device(np.ones((16, 1)), jnp.float32)
W8A8, NEAREST = jqx.presets.w8a8(), jqx.algorithms.nearest()


def masked(w, batch):
    return batch.x @ w * batch.mask


def first(w, x, count, is_on):
    assert is_on is True
    return x[:, :count] @ w[:count]


BATCHES = {
    "a named tuple": (masked, Named(X, MASK)),
    "a dataclass": (masked, Fields(X, MASK)),
    "a registered tuple": (masked, Registered((X, MASK))),
    "a list": (lambda w, batch: batch[0] @ w, [X, MASK]),
    "static numbers": (jax.jit(first, static_argnums=(2, 3)), (X, 8, True)),
}
LOOPS = {
    "ptq": lambda f, b: jqx.ptq(f, W8A8, NEAREST, progress=False, target=False)(W, [b, b]).affines,
    "bias_correction": lambda f, b: (
        jqx.ptq(f, W8A8, jqx.algorithms.bias_correction(), progress=False, target=False)(
            W, iter([b, b])
        ).affines
    ),
    "sensitivity": lambda f, b: {
        "": jqx.diagnostics.sensitivity(f, W8A8, progress=False)(W, b, b).everything
    },
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_loop_over_batches_takes_them_alike(name):
    f, batch = BATCHES[name]
    loops = LOOPS if name in ("a named tuple", "static numbers") else {"ptq": LOOPS["ptq"]}
    for loop in loops.values():
        expected, found = loop(lambda w, x: x @ w, X), loop(f, batch)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
            list(expected.values()),
            list(found.values()),
        )


def test_static_numbers_of_batches_may_differ():
    """1, 1.0 and True are equal, but not the same."""
    plan = jqx.make_plan(lambda w, x, n: x @ w, W8A8)(W, X, 1)
    seen = []

    def f(w, x, n):
        seen.append(type(n))
        return x @ w

    jqx.calibrate_batches(f, plan, W, [(X, 1), (X, 1.0), (X, True), (X, 1)], progress=False)
    assert list(dict.fromkeys(seen)) == [int, float, bool]


def test_one_named_tuple_is_no_list_of_batches():
    with pytest.raises(TypeError, match=r"pass a list of batches: \[batch\]"):
        jqx.ptq(masked, W8A8, progress=False)(W, Named(X, MASK))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "adaround", "auto_round", "awq", "rotate", "eora"])
def test_algorithms_take_static_numbers(name):
    def f(w, x, n):
        return jnp.tanh(x[:, :n] @ w["a"][:n]) @ w["b"]

    options = {"steps": 1} if name in ("adaround", "auto_round") else {}
    algorithm = getattr(jqx.algorithms, name)(**options)
    params = {"a": normal(0, 8, 16) / 4, "b": normal(1, 16, 16) / 4}
    batches = [(normal(2, 32, 8), 4), (normal(3, 32, 8), 4)]
    quantized = jqx.ptq(f, W8A8, algorithm, progress=False, target=False)(params, batches)
    whole = jqx.ptq(lambda w, x: f(w, x, 4), W8A8, algorithm, progress=False, target=False)(
        params, [x for x, _ in batches]
    )
    np.testing.assert_allclose(quantized(*batches[0]), whole(batches[0][0]), rtol=1e-6, atol=1e-6)
