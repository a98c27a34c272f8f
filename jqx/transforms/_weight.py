"""What stands for a weight while a function is evaluated: codes, with or without real values."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ..tensor import QTensor


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "real"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Trainable:
    """A weight in training on integers.

    Attributes:
      codes: what contractions see.
      real: the same numbers as an array, through which gradients pass.
    """

    codes: QTensor
    real: jax.Array


def is_weight(x: Any) -> bool:
    """Whether a value stands for a weight, and is no array."""
    return isinstance(x, (QTensor, Trainable))


def codes_of(x: Any) -> Any:
    """Returns the codes of a weight; arrays as they are."""
    return x.codes if isinstance(x, Trainable) else x


def real_of(x: Any) -> Any:
    """Returns the real values of a weight in training; all else as it is."""
    return x.real if isinstance(x, Trainable) else x


def map_codes(f: Callable[[QTensor], Any], x: Any, real: Any) -> Any:
    """Applies `f` to the codes of a weight, and puts `real` in the place of its real values."""
    return Trainable(f(x.codes), real) if isinstance(x, Trainable) else f(x)
