"""Recipes for training in low precision: how the three products of a layer are rounded."""

import typing as _typing

from ._src.late import unknown as _unknown
from ._src.tensor.products import Product as Product
from ._src.tensor.products import Products as Products
from ._src.tensor.products import Rounded as Rounded
from ._src.train.recipes import Recipe as Recipe
from ._src.train.recipes import fp8 as fp8
from ._src.train.recipes import fp8_block as fp8_block
from ._src.train.recipes import fp8_delayed as fp8_delayed
from ._src.train.recipes import fp8_rowwise as fp8_rowwise
from ._src.train.recipes import int8 as int8
from ._src.train.recipes import mxfp8 as mxfp8
from ._src.train.recipes import nvfp4 as nvfp4
from ._src.train.recipes import quartet2 as quartet2

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
