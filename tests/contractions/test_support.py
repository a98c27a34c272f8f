"""Every cell of the support matrix, against float64."""

import pathlib

import numpy as np
import pytest

from ..oracles.contractions import gamma
from .support import OPS, cells, errors, matrix, products, usual

K, TAIL = 64, 8
AT_ONCE = 16
"""Cells in one compiled program."""
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "numerics" / "contractions.md"


def length(cell, k):
    """As many elements as asked for, fewer where a tail is."""
    return k - TAIL if "tail" in (cell.lhs.sharing, cell.rhs.sharing) else k


def wrong(op, k, n, only=None):
    """The cells whose result is off: by how many times what float32 allows, or with what error."""
    found = {}
    tried = [cell for cell in cells(op) if only is None or only(cell)]
    for start in range(0, len(tried), AT_ONCE):
        some = tried[start : start + AT_ONCE]
        lengths = [length(cell, k) for cell in some]
        for cell, terms, error in zip(some, lengths, errors(some, lengths, n), strict=True):
            if isinstance(error, str):
                found[cell] = error
                continue
            difference, magnitude = error
            # A float32 sum of products and of sums for zero points, and 16 roundings: of scales,
            # of digits, of corrections, of sums over blocks; then one to the dtype of the result.
            allowed = gamma(products(op, terms) + 16) * magnitude
            if op == "conv_general_dilated" and "bfloat16" in (cell.lhs.kind, cell.rhs.kind):
                # The real kernel is rounded to the dtype of the image, and so is the result.
                allowed = allowed + 2.0**-8 * magnitude
            ratio = np.max(difference / np.maximum(allowed, 1e-30))
            if not ratio <= 1:
                found[cell] = float(ratio)
    return found


def is_block(operand):
    return operand.sharing in ("block", "tail")


def is_usual(operand):
    """One of each kind: a scale for each index of a kept axis, or blocks where they must be."""
    return operand.layout == "plain" and operand == usual(operand.kind)


def test_every_kind_beside_float32_and_int8_is_right():
    near = {"float32", "int8"}
    plain = lambda c: is_usual(c.lhs) and is_usual(c.rhs)  # noqa: E731
    assert wrong("matmul", K, 5, only=lambda c: plain(c) and near & {c.lhs.kind, c.rhs.kind}) == {}


WHOLE = ("dot_general", "conv_general_dilated")
"""Operations that are tried in every cell; the others come down to them: in every third."""


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_kind_sharing_and_layout_is_right(op):
    tried = set(cells(op) if op in WHOLE else list(cells(op))[list(OPS).index(op) % 3 :: 3])
    assert wrong(op, K, 5, only=lambda cell: cell in tried) == {}


@pytest.mark.slow
@pytest.mark.parametrize("op", ["matmul"])
def test_every_sharing_and_layout_is_right_where_operands_are_large(op):
    """Large enough for the formulations of CPU that avoid copies."""
    laid_out = lambda c: c.rhs.layout != "plain" or is_block(c.rhs)  # noqa: E731
    assert wrong(op, 256, 96, only=lambda c: c.lhs.kind == "float32" and laid_out(c)) == {}
    assert wrong(op, 256, 96, only=lambda c: c.lhs == usual("int8") and laid_out(c)) == {}


def test_the_documentation_has_the_matrix():
    assert matrix() in PAGE.read_text()
