"""Functions whose first argument is the weight indeed are planned, however they are written; those
whose input was taken for it are among the likely mistakes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

X, W = np.ones((4, 64), np.float32), np.ones((64, 10), np.float32)
P = {"w": np.ones((64, 128), np.float32), "v": np.ones((10, 128), np.float32)}
TURN = np.ones((64, 64), np.float32)


def conv(x, w):
    axes = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes)


IMAGE, KERNEL = np.ones((2, 8, 8, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)

LEGITIMATE = {
    "x @ w": (lambda w, x: x @ w, W, X),
    "w @ x": (lambda w, x: w @ x, W.T, X.T),
    "a batch in a dict": (lambda w, b: b["x"] @ w, W, {"x": X, "y": X}),
    "einsum": (lambda w, b: jnp.einsum("bd,dk->bk", b["x"], w), W, {"x": X}),
    "rows of outputs": (lambda w, b: b["x"] @ w.T, W.T, {"x": X}),
    "columns of inputs": (lambda p, b: p["w"].T @ b["x"], P, {"x": X.T}),
    "a batch in a tuple": (lambda w, b: b[0] @ w, W, (X, X)),
    "experts": (
        lambda w, b: jnp.einsum("ebd,edk->ebk", b["x"], w),
        np.ones((3, 64, 8), np.float32),
        {"x": np.ones((3, 4, 64), np.float32)},
    ),
    "images in a dict": (lambda w, b: conv(b["x"], w), KERNEL, {"x": IMAGE}),
    "two inputs": (lambda p, b: b["q"] @ p["w"] @ (b["k"] @ p["w"]).T, P, {"q": X, "k": X}),
    "a cache": (lambda p, x, c: x @ p["w"] @ c["k"].T, P, X, {"k": P["v"]}),
    "data closed over": (lambda w: jnp.mean((X @ w) ** 2), W),
    "data closed over, a tree": (lambda p: jnp.mean((X @ p["w"]) @ p["v"].T), P),
    "a constant rotation": (lambda p, x: (x @ TURN) @ p["w"], P, X),
    "a weight rotated": (lambda w, x: x @ (w @ TURN[:10, :10]) + x @ w, W, X),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_a_weight_is_planned_where_it_stands_as_one(name):
    f, *args = LEGITIMATE[name]
    assert jqx.make_plan(f, jqx.presets.w8a16())(*args).weights


def test_positions_in_a_tuple_are_taken_at_their_word():
    plan = jqx.make_plan(lambda w, b: w @ b["x"], jqx.presets.w8a16(), params=(0,))(X, {"x": W})
    assert [weight.path for weight in plan.weights] == ["0"]
    plan = jqx.make_plan(lambda x, p: x @ p["w"], jqx.presets.w8a16(), params=1)(X, P)
    assert [weight.path for weight in plan.weights] == ["w"]


def test_what_no_rule_quantizes_is_not_looked_at():
    plan = jqx.make_plan(lambda x, p: x @ p["w"], jqx.Policy([jqx.Rule(activation="int8")]))(X, P)
    assert not plan.weights
