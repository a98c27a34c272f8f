"""What XLA on CPU still needs help with: a test that fails says that a workaround can go."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jqx
from jqx.contractions._how import _xla_cpu

from .oracles import MATRICES

LHS_FIRST = (((0,), (0,)), ((), ()))


def multiplied(lhs, rhs, numbers, dtype, result):
    """The dtypes that the compiled program of a product on CPU multiplies, each once."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs)]
    product = lambda a, b: lax.dot_general(a, b, numbers, preferred_element_type=result)  # noqa: E731
    (found,) = jqx.lowering(product, *shapes).contractions
    return set(found.dtypes)


def test_one_row_or_column_is_multiplied_as_int32():
    product = lambda m, n: multiplied((m, 128), (128, n), MATRICES, "int8", "int32")  # noqa: E731
    assert product(2, 160) == {"s8"}
    assert product(1, 160) == product(16, 1) == {"s32"}


def test_a_left_operand_that_is_not_in_order_is_multiplied_as_int32():
    assert multiplied((128, 16), (128, 160), LHS_FIRST, "int8", "int32") == {"s32"}


def test_sixteen_bit_floats_are_multiplied_in_some_layouts_alone():
    bfloat16 = jnp.bfloat16
    assert multiplied((16, 128), (128, 160), MATRICES, bfloat16, "float32") == {"bf16"}
    assert multiplied((128, 16), (128, 160), LHS_FIRST, bfloat16, "float32") == {"f32"}


@pytest.mark.parametrize("name", _xla_cpu.WORKAROUNDS)
def test_each_workaround_has_a_test_and_stands_where_the_list_says(name):
    assert callable(globals()[f"test_{name}"])
    for place in _xla_cpu.WORKAROUNDS[name].where:
        file, function = place.rsplit(".", 1)
        assert hasattr(importlib.import_module(f"jqx.contractions.{file}"), function)
