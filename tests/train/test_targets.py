"""What the products of a training step multiply on machines that need not be present."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx import recipes
from jqx._src.diagnostics import lowering as targets
from jqx.extend import cudnn_blocks, using
from jqx.recipes import Products, Recipe

pytestmark = pytest.mark.aot

SIZE = 512
ROW, RUN = jqx.QSpec("int8", jqx.per_channel()), jqx.QSpec("int8", jqx.per_group(128))
IN_RUNS = Products((ROW, ROW), (ROW, ROW), (RUN, RUN))
INT8 = recipes.int8().rules[-1][1]
RECIPES = {
    "int8": Recipe("int8", {"a": INT8, "b": IN_RUNS}),
    "fp8": recipes.fp8(),
    "fp8_rowwise": recipes.fp8_rowwise(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
}


def compiled(recipe, target):
    """A training step of one layer, or of two that are rounded in different ways."""
    compiler = targets.TARGETS[target]
    if not any(map(targets._is_installed, compiler.modules)):
        pytest.skip(f"no compiler for {target}: the extra {compiler.extra} is not installed")
    recipe = RECIPES[recipe]
    names = [path for path, _ in recipe.rules] if len(recipe.rules) > 1 else ["a"]

    def loss(w, x):
        return sum(jnp.sum((x @ w[name]) ** 2) for name in names)

    trained = functools.partial(jqx.train(loss, recipe.policy, recipe), key=jax.random.key(0))
    matrix = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
    step = jax.value_and_grad(lambda w, x: trained(w, {}, x), (0, 1))
    return jqx.lowering(step, dict.fromkeys(names, matrix), matrix, target=target)


def multiplied(low):
    """How many products of matrices multiply which types."""
    assert all(c.left == "" and "by elements" not in c.runs for c in low.contractions), low
    return collections.Counter(" x ".join(sorted(c.dtypes)) for c in low.contractions)


E4M3, E5M2 = "f8e4m3fn", "f8e5m2"


@pytest.mark.parametrize("target", ["h200", "tpu7x"])
def test_fp8_multiplies_all_three_products_as_8_bit_floats(target):
    expected = {f"{E4M3} x {E4M3}": 1, f"{E4M3} x {E5M2}": 2}
    assert multiplied(compiled("fp8", target)) == expected


def test_rows_of_fp8_multiply_all_three_products_as_8_bit_floats():
    assert multiplied(compiled("fp8_rowwise", "h200")) == {f"{E4M3} x {E4M3}": 3}


@pytest.mark.parametrize("target", ["h200", "tpu-v6e"])
def test_int8_multiplies_two_products_as_int8_and_all_three_in_runs(target):
    counts = multiplied(compiled("int8", target))
    assert counts.pop("bf16 x bf16") == 1  # wgrad of the first layer
    assert {*counts} == {"s8 x s8"}
    assert counts["s8 x s8"] >= 5  # runs are summed by a loop, whose first step stands before it


@pytest.mark.parametrize("target", ["h200", "b200"])
def test_nvfp4_is_emulated_by_exact_products_of_bfloat16(target):
    assert multiplied(compiled("nvfp4", target))["bf16 x bf16"] == 3


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_cudnn_multiplies_all_three_products_in_blocks_on_blackwell(recipe):
    with using(cudnn_blocks):
        contractions = compiled(recipe, "b200").contractions
    products = [c.runs for c in contractions if "jvp()" not in c.op_name]  # not the transforms
    assert products == ["__cudnn$blockScaledDot"] * 3


@pytest.mark.parametrize(("target", "left"), [("b200", ""), ("h200", "emulated: bf16")])
def test_blackwell_multiplies_all_three_products_of_mxfp8_with_their_scales(target, left):
    contractions = compiled("mxfp8", target).contractions
    assert [c.dtypes for c in contractions] == [(E4M3, E4M3)] * 3
    assert all(c.left.startswith(left) and bool(c.left) == bool(left) for c in contractions)
