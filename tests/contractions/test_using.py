"""A formulation that only this file defines: tried first inside of a context, gone after it."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.contractions.formulation import Formulation, using

from ..oracles.contractions import MATRICES, Layout
from .blocks import weight

K, N = 128, 160
PLATFORMS = ("cpu", "tpu", "cuda", "rocm", "default")
W = weight("int8", Layout((3, K), (K, N), MATRICES))
X = np.random.default_rng(0).normal(size=(3, K)).astype(np.float32)


def scaled(x, q, how):
    """Ten times the product, to be told from it."""
    assert how.dimensions.numbers == MATRICES
    return 10 * lax.dot_general(x, q.dequantize(), how.dimensions.numbers)


mine = Formulation(
    name="tenfold",
    reason="in this test: three rows of floats beside a matrix",
    platforms=PLATFORMS,
    applies=lambda case: case.is_beside_floats and case.rows == 3,
    compute=scaled,
)
on_tpu = dataclasses.replace(mine, platforms=("tpu",))


def names(f, *args):
    (chosen,) = jqx.formulations(f)(*args)
    return tuple(form.name for form in chosen.choice)


def test_it_computes_what_it_applies_to_and_nothing_after():
    product = jax.jit(jqx.matmul)
    before = product(X, W)
    with using(mine):
        np.testing.assert_allclose(product(X, W), 10 * before, rtol=1e-4)
        np.testing.assert_array_equal(product(X[:2], W), jqx.matmul(X[:2], W))
        assert names(product, X, W) == ("tenfold",) * 5
    np.testing.assert_array_equal(product(X, W), before)
    assert names(product, X, W) == ("digits", *["convert"] * 4)


def test_it_is_chosen_on_its_platforms_alone():
    with using(on_tpu):
        (chosen,) = jqx.formulations(jqx.matmul)(X, W)
        assert [form.name for form in chosen.choice] == ["digits", "tenfold", *["convert"] * 3]
        assert [line.split(":")[0].strip() for line in str(chosen).split("\n")[1:]] == [
            "cpu",
            "tpu",
            "elsewhere",
        ]
        text = jax.jit(jqx.matmul).trace(X, W).lower(lowering_platforms=("tpu",)).as_text()
        np.testing.assert_array_equal(jax.jit(jqx.matmul)(X, W), AS_OURS)
    assert "1.000000e+01" in text
    text = jax.jit(jqx.matmul).trace(X, W).lower(lowering_platforms=("tpu",)).as_text()
    assert "1.000000e+01" not in text


AS_OURS = jax.jit(jqx.matmul)(X, W)


def test_those_of_an_inner_context_are_tried_first_and_those_of_an_outer_one_stay():
    other = dataclasses.replace(mine, name="other", platforms=("cpu",))
    with using(mine):
        with using(other):
            assert names(jqx.matmul, X, W) == ("other", *["tenfold"] * 4)
        assert names(jqx.matmul, X, W) == ("tenfold",) * 5
    with using(other, mine):
        assert names(jqx.matmul, X, W) == ("other", *["tenfold"] * 4)


def test_two_of_one_name_are_distinguished():
    again = dataclasses.replace(mine, compute=lambda x, q, how: -scaled(x, q, how))
    product = jax.jit(jqx.matmul)
    with using(mine):
        tenfold = product(X, W)
    with using(again):
        np.testing.assert_array_equal(product(X, W), -tenfold)
        (chosen,) = jqx.formulations(product)(X, W)
        assert chosen.cpu is again


def test_other_threads_and_what_raises_know_nothing_of_it():
    found = []
    with pytest.raises(ZeroDivisionError), using(mine):
        thread = threading.Thread(target=lambda: found.append(names(jqx.matmul, X, W)))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert found == [("digits", *["convert"] * 4)] == [names(jqx.matmul, X, W)]


def test_its_derivative_is_that_of_its_linear_form():
    rounds = dataclasses.replace(
        mine, compute=lambda x, q, how: jnp.round(scaled(x, q, how)), linear=scaled
    )
    with using(rounds):
        gradient = jax.jit(jax.grad(lambda x: jqx.matmul(x, W).sum()))(X)
    real = W.dequantize().sum(1)
    np.testing.assert_allclose(gradient, 10 * jnp.broadcast_to(real, X.shape), rtol=1e-4, atol=1e-3)


def test_convolutions_and_groups_of_rows_take_one_too():
    def dequantized(image, kernel, window):
        axes = window.axes
        return lax.conv_general_dilated(
            image, kernel.dequantize(), window.strides, window.padding, dimension_numbers=axes
        )

    def in_turn(x, q, sizes, how):
        return lax.ragged_dot(x, q.dequantize(), sizes)

    kernel = jqx.QTensor.quantize(jnp.ones((4, 2, 3, 3)), jqx.QSpec(jnp.int8))
    experts = jqx.QTensor.quantize(jnp.ones((2, 4, 5)), jqx.QSpec(jnp.int8))
    conv = dataclasses.replace(
        mine,
        name="dequantized",
        op="conv_general_dilated",
        applies=lambda case: case.is_beside_floats,
        compute=dequantized,
    )
    ragged = dataclasses.replace(
        mine, name="in_turn", op="ragged_dot", applies=lambda case: True, compute=in_turn
    )

    def convolve(x):
        return jqx.conv_general_dilated(x, kernel, (1, 1), "SAME")

    def experts_of(x):
        return jqx.ragged_dot(x, experts, jnp.array([1, 2]))

    image, rows = jnp.ones((1, 2, 5, 5)), jnp.ones((3, 4))
    with using(conv, ragged):
        assert names(convolve, image) == ("dequantized",) * 5
        assert names(experts_of, rows) == ("in_turn",) * 5
        mine_all = convolve(image), experts_of(rows)
    for a, b in zip(mine_all, (convolve(image), experts_of(rows)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


WRONG = {
    "no formulation": (lambda: 3, TypeError, "an object of type int|== 3"),
    "an unknown operation": (
        lambda: dataclasses.replace(mine, op="sort"),
        ValueError,
        "operation .* unknown: 'sort'",
    ),
    "an unknown platform": (
        lambda: dataclasses.replace(mine, platforms=("gpu",)),
        ValueError,
        r"`platforms` .*: \('gpu',\)",
    ),
    "a string of a platform": (
        lambda: dataclasses.replace(mine, platforms="cpu"),
        ValueError,
        "`platforms` .*: 'cpu'",
    ),
    "a name of jqx": (
        lambda: dataclasses.replace(mine, name="digits"),
        ValueError,
        "name .*: 'digits'",
    ),
}


@pytest.mark.parametrize("make, error, match", WRONG.values(), ids=WRONG)
def test_what_cannot_be_tried_is_refused(make, error, match):
    with pytest.raises(error, match=match) as caught, using(make()):
        pass
    assert all(part in str(caught.value) for part in ("jqx.extend.using", "fix:"))
