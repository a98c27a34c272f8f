"""Products of two operands in MX or NVFP4 blocks, as GPUs compute them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx._src.contractions import scaled
from jqx._src.contractions.problem import Dimensions, HowTo, Product
from jqx._src.diagnostics import lowering as targets
from jqx.extend import cudnn_blocks, using

FORMATS = {
    "mxfp8_e4m3": (numerics.mxfp8_e4m3, 32),
    "mxfp8_e5m2": (numerics.mxfp8_e5m2, 32),
    "mxfp4": (numerics.mxfp4, 32),
    "nvfp4": (numerics.nvfp4, 16),
}
MATRICES = (((1,), (0,)), ((), ()))
SHAPES = {
    "matrices": ((130, 256), (256, 128), MATRICES),
    "batches and heads": ((2, 40, 3, 128), (128, 2, 48), (((3,), (0,)), ((0,), (1,)))),
}


def tensor(seed, format, shape, axis):
    form, size = FORMATS[format]
    blocks = {i: size if i == axis else 1 for i in range(len(shape))}
    x = 3 * jax.random.normal(jax.random.key(seed), shape)
    return jqx.QTensor.quantize(x, jqx.QSpec(form, jqx.per_block(blocks)))


def problem(format, shapes):
    left, right, numbers = SHAPES[shapes]
    (axis_of_left,), (axis_of_right,) = numbers[0]
    operands = tensor(0, format, left, axis_of_left), tensor(1, format, right, axis_of_right)
    how = HowTo.of(*operands, Dimensions.of(numbers, len(left), len(right)))
    return operands, how, numbers


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_forms_of_gpus_are_the_product_of_real_values(format, shapes):
    """To the rounding of float32 sums of up to 256 products of both sides, in float64 here."""
    operands, how, numbers = problem(format, shapes)
    reals = [np.asarray(q.dequantize(), np.float64) for q in operands]
    left, right = (jnp.asarray(np.abs(x)) for x in reals)
    bound = np.asarray(jax.lax.dot_general(left, right, numbers)) * 256 * 2.0**-23
    exact = np.asarray(jqx.dot_general(*operands, numbers), np.float64)
    forms = [x for x in scaled.SCALED_PRODUCTS if x.applies(Product(*operands, how))]
    assert scaled.exact_blocks in forms
    assert (scaled.scaled_blocks in forms) == format.startswith("mxfp8")
    for form in forms:
        y = np.asarray(jax.jit(form.compute, static_argnums=2)(*operands, how))
        assert (np.abs(y - exact) <= bound).all()


@pytest.mark.parametrize("sizes, loops", [((2048, 64, 64), False), ((2, 512, 4096), True)], ids=str)
def test_an_activation_of_many_rows_is_dequantized_at_once_on_cpu(sizes, loops):
    """A large weight is not: it is dequantized in parts, in a loop."""
    m, k, n = sizes
    x, w = tensor(0, "mxfp8_e4m3", (m, k), 1), tensor(1, "mxfp8_e4m3", (k, n), 0)
    product = jax.jit(jqx.dot_general, static_argnums=2).lower(x, w, MATRICES).compile()
    assert (" while(" in product.as_text()) == loops
    y, exact = (np.asarray(a, np.float64) for a in (product(x, w), x.dequantize() @ w.dequantize()))
    assert (
        np.abs(y - exact) <= 2.0**-23 * k * np.abs(x.dequantize()) @ np.abs(w.dequantize())
    ).all()


def test_their_derivatives_are_those_of_real_operands():
    operands, how, numbers = problem("mxfp8_e4m3", "matrices")
    bare = operands[1].dequantize()
    x = operands[0].dequantize()

    def of(form):
        def f(factor):
            q = dataclasses.replace(operands[1], dtype=jnp.float32)
            y = form(operands[0], q, how) if form else jqx.dot_general(*operands, numbers)
            return (factor * y).sum()

        return jax.grad(f)(2.0)

    expected = float((x @ bare).sum())
    for form in (None, scaled.scaled_blocks.compute):
        assert abs(float(of(form)) - expected) <= 1e-4 * float(jnp.abs(x @ bare).sum())


@pytest.mark.parametrize(
    ("format", "gpu"),
    [("mxfp8_e4m3", "scaled_blocks"), ("mxfp4", "exact_blocks"), ("nvfp4", "exact_blocks")],
)
def test_what_is_chosen(format, gpu):
    operands, _, numbers = problem(format, "matrices")

    def f(*operands):
        return jqx.dot_general(*operands, numbers)

    (chosen,) = jqx.formulations(f)(*operands)
    assert (chosen.choice.cuda.name, chosen.cpu.name) == (gpu, "tiles")
    with using(cudnn_blocks):
        (chosen,) = jqx.formulations(f)(*operands)
    assert chosen.choice.cuda.name == (gpu if format == "mxfp4" else "cudnn_blocks")
    assert chosen.cpu.name == "tiles"


@pytest.mark.aot
@pytest.mark.parametrize(
    ("format", "target", "own", "by_cudnn"),
    [
        ("mxfp8_e4m3", "b200", "f8e4m3fn", "__cudnn$blockScaledDot"),
        ("nvfp4", "b200", "bf16", "__cudnn$blockScaledDot"),
        ("mxfp8_e4m3", "h200", "f8e4m3fn", None),
        ("nvfp4", "h200", "bf16", None),
    ],
)
def test_converted_sites_multiply_codes_on_blackwell(format, target, own, by_cudnn):
    compiler = targets.TARGETS[target]
    if not any(map(targets._is_installed, compiler.modules)):
        pytest.skip(f"no compiler for {target}: the extra {compiler.extra} is not installed")
    form, size = FORMATS[format]
    spec = jqx.QSpec(form, jqx.per_group(size))
    activation = dataclasses.replace(spec, dynamic=True)
    policy = jqx.Policy([jqx.Rule(".*", weight=spec, activation=activation)])
    w = {"w": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)}
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def f(p, x):
        return x @ p["w"]

    plan = jqx.make_plan(f, policy)(w, x)
    codes = jax.eval_shape(lambda w: jqx.quantize_params(w, plan), w)
    (site,) = jqx.lowering(jqx.convert(f, plan), codes, x, target=target).contractions
    assert site.dtypes == (own, own)
    if by_cudnn:
        with using(cudnn_blocks):
            (site,) = jqx.lowering(jqx.convert(f, plan), codes, x, target=target).contractions
        assert site.runs == by_cudnn and not site.widened
