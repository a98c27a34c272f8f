"""Reading back how contractions are computed, and a formulation that only this file defines: tried
first inside of a context, gone after it.
"""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.contractions.formulation import FORMULATIONS, Formulation, using

from ..oracles.contractions import MATRICES, Layout, chosen
from .blocks import weight

K, N = 128, 160
ROWS = Layout((3, K), (K, N), MATRICES)
WEIGHTS = {"digits": weight("int8", ROWS), "block_digits": weight("int8", ROWS, 32)}
W = WEIGHTS["digits"]
X = np.random.default_rng(0).normal(size=(3, K)).astype(np.float32)
LIKE_X = jax.ShapeDtypeStruct(X.shape, X.dtype)


def product(x, name="digits"):
    return jqx.matmul(x, WEIGHTS[name])


def test_each_formulation_has_a_name_of_its_own_and_a_reason():
    for name, formulation in FORMULATIONS.items():
        assert formulation.name == name and name.isidentifier() and "_else_" not in name
        assert len(formulation.reason.split()) >= 5


def test_what_rounds_an_operand_has_the_derivative_of_what_does_not():
    linear = {f.name for f in FORMULATIONS.values() if f.linear is not None}
    rounding = {
        "digits",
        "block_digits",
        "package_floats",
        "package_decoded",
        "kernel_tpu",
        "kernel_gpu",
    }
    assert linear == rounding | {"dequantize"}
    assert {f.name for f in FORMULATIONS.values() if f.needs_linear} == linear - {"dequantize"}


def test_a_contraction_tells_its_operands_its_result_and_both_formulations():
    (contraction,) = jqx.formulations(product)(LIKE_X)
    assert contraction.operands == ("f32[3,128]", "i8[128,160]", "f32[1,160]")
    assert (contraction.result, contraction.times) == ("f32[3,160]", 1)
    digits, convert = FORMULATIONS["digits"], FORMULATIONS["convert"]
    assert contraction.cpu is digits and contraction.elsewhere is convert
    first, cpu, elsewhere = str(contraction).split("\n")
    assert first == "f32[3,128] x i8[128,160] x f32[1,160] -> f32[3,160]"
    assert cpu == f"  cpu: digits: {digits.reason}"
    assert elsewhere == f"  elsewhere: convert: {convert.reason}"


def test_one_formulation_for_all_platforms_is_listed_once():
    w = weight("int8", Layout((3, 4), (4, 5), MATRICES))
    (contraction,) = jqx.formulations(jqx.matmul)(w.T, w)
    assert contraction.cpu == contraction.elsewhere
    assert str(contraction).split("\n")[1:] == [f"  integer: {contraction.cpu.reason}"]


def test_contractions_are_listed_in_order_and_those_of_arrays_left_out():
    def f(x, *, scale):
        y = product(x, "block_digits") * scale
        return product(jnp.tanh(y @ y.T @ x))

    assert [c.cpu.name for c in jqx.formulations(f)(X, scale=2.0)] == ["block_digits", "digits"]
    assert jqx.formulations(lambda x: jqx.matmul(x, x.T))(X) == []


def scanned(x, times):
    return lax.scan(lambda y, _: (y + product(x).sum(), None), 0.0, None, length=times)[0]


def nested(x):
    body = lambda y, _: (y + scanned(x, 5), None)  # noqa: E731
    return lax.scan(body, 0.0, None, length=3)[0] + product(x).sum()


TIMES = {
    "scan": (functools.partial(scanned, times=7), [7]),
    "nested scans": (nested, [15, 1]),
    "map": (lambda x: lax.map(product, x), [3]),
    "jit in jit": (jax.jit(lambda x: jax.jit(product)(x)), [1]),
    "scan in jit": (jax.jit(lambda x: jax.jit(scanned, static_argnums=1)(x, 4)), [4]),
    "vmap": (jax.vmap(product), [1]),
    "checkpoint": (jax.checkpoint(product), [1]),
    "cond": (lambda x: lax.cond(True, product, lambda x: 2 * product(x), x), [1, 1]),
    "while": (lambda x: lax.while_loop(lambda y: True, lambda y: product(x).sum(), 0.0), [1]),
}


@pytest.mark.parametrize("f, times", TIMES.values(), ids=TIMES)
def test_contractions_are_found_wherever_they_stand(f, times):
    contractions = jqx.formulations(f)(X)
    assert [c.cpu.name for c in contractions] == ["digits"] * len(times)
    assert [c.times for c in contractions] == times
    assert all((f" ({c.times} times)" in str(c)) == (c.times > 1) for c in contractions)


def test_functions_of_users_that_have_a_name_like_ours_are_looked_into():
    @jax.jit
    def jqx_model(x):
        return product(x)

    assert chosen(jqx_model, X) == [("digits", "convert")]


def test_what_a_function_raises_when_traced_is_raised():
    with pytest.raises(TypeError, match="same shape"):
        jqx.formulations(product)(jax.ShapeDtypeStruct((3, 5), jnp.float32))


PLATFORMS = ("cpu", "tpu", "cuda", "rocm", "default")


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


def names(f, *args):
    (contraction,) = jqx.formulations(f)(*args)
    return tuple(form.name for form in contraction.choice)


OURS, MINE = ("digits", *["convert"] * 4), ("tenfold",) * 5


def test_it_computes_what_it_applies_to_and_nothing_after():
    product = jax.jit(jqx.matmul)
    before = product(X, W)
    with using(mine):
        np.testing.assert_allclose(product(X, W), 10 * before, rtol=1e-4)
        np.testing.assert_array_equal(product(X[:2], W), jqx.matmul(X[:2], W))
        assert names(product, X, W) == MINE
    np.testing.assert_array_equal(product(X, W), before)
    assert names(product, X, W) == OURS


def test_it_is_chosen_on_its_platforms_alone():
    def is_tenfold_on_tpu():
        lowered = jax.jit(jqx.matmul).trace(X, W).lower(lowering_platforms=("tpu",))
        return "1.000000e+01" in lowered.as_text()

    product = jax.jit(jqx.matmul)(X, W)
    with using(dataclasses.replace(mine, platforms=("tpu",))):
        (contraction,) = jqx.formulations(jqx.matmul)(X, W)
        choice = [form.name for form in contraction.choice]
        assert choice == ["digits", "tenfold", *["convert"] * 3]
        lines = str(contraction).split("\n")[1:]
        assert [line.split(":")[0].strip() for line in lines] == ["cpu", "tpu", "elsewhere"]
        assert is_tenfold_on_tpu()
        np.testing.assert_array_equal(jax.jit(jqx.matmul)(X, W), product)
    assert not is_tenfold_on_tpu()


def test_those_of_an_inner_context_are_tried_first_and_those_of_an_outer_one_stay():
    other = dataclasses.replace(mine, name="other", platforms=("cpu",))
    with using(mine):
        with using(other):
            assert names(jqx.matmul, X, W) == ("other", *MINE[1:])
        assert names(jqx.matmul, X, W) == MINE
    with using(other, mine):
        assert names(jqx.matmul, X, W) == ("other", *MINE[1:])


def test_two_of_one_name_are_distinguished():
    again = dataclasses.replace(mine, compute=lambda x, q, how: -scaled(x, q, how))
    product = jax.jit(jqx.matmul)
    with using(mine):
        tenfold = product(X, W)
    with using(again):
        np.testing.assert_array_equal(product(X, W), -tenfold)
        (contraction,) = jqx.formulations(product)(X, W)
        assert contraction.cpu is again


def test_other_threads_and_what_raises_know_nothing_of_it():
    in_thread = []
    with pytest.raises(ZeroDivisionError), using(mine):
        thread = threading.Thread(target=lambda: in_thread.append(names(jqx.matmul, X, W)))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert in_thread == [OURS] == [names(jqx.matmul, X, W)]


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
    **{
        name: (functools.partial(dataclasses.replace, mine, **change), ValueError, match)
        for name, change, match in [
            ("an unknown operation", {"op": "sort"}, "operation .* unknown: 'sort'"),
            ("an unknown platform", {"platforms": ("gpu",)}, r"`platforms` .*: \('gpu',\)"),
            ("a string of a platform", {"platforms": "cpu"}, "`platforms` .*: 'cpu'"),
            ("a name of jqx", {"name": "digits"}, "name .*: 'digits'"),
        ]
    },
}


@pytest.mark.parametrize("make, error, match", WRONG.values(), ids=WRONG)
def test_what_cannot_be_tried_is_refused(make, error, match):
    with pytest.raises(error, match=match) as caught, using(make()):
        pass
    assert all(part in str(caught.value) for part in ("jqx.extend.using", "fix:"))
