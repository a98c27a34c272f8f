"""How far a float32 result may be from the number that it stands for: running errors.

N. J. Higham, "Accuracy and Stability of Numerical Algorithms", section 3.3.
"""

import dataclasses
from typing import Any

import numpy as np

from .oracles.contractions import UNIT, gamma

ULPS = 4
"""What a function such as `tanh` may be off, in units of the last place: two of `UNIT` each."""


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Numbers in float64, and how far off any evaluation of them in float32 is at most.

    Operands beside are weights, which may be off by two roundings: a code times its scale, and the
    scale of the sum.
    """

    value: Any
    error: Any

    @property
    def size(self) -> Any:
        return np.abs(self.value) + self.error

    def __add__(self, other: Any) -> "Rounded":
        other = other if isinstance(other, Rounded) else exactly(other)
        value, error = self.value + other.value, self.error + other.error
        return Rounded(value, error + UNIT * (np.abs(value) + error))

    def __mul__(self, w: Any) -> "Rounded":
        return Rounded(self.value * w, self.error * np.abs(w) + gamma(3) * self.size * np.abs(w))

    def __matmul__(self, w: Any) -> "Rounded":
        roundings = gamma(w.shape[-2] + 2)  # a product and sums, and those of the weight
        w = np.float64(w)
        return Rounded(self.value @ w, self.error @ np.abs(w) + roundings * self.size @ np.abs(w))

    def tanh(self) -> "Rounded":
        """Its slope is 1 at most."""
        value = np.tanh(self.value)
        return Rounded(value, self.error + 2 * ULPS * UNIT * np.abs(value))

    def sum(self) -> "Rounded":
        error = np.sum(self.error) + gamma(self.value.size) * np.sum(self.size)
        return Rounded(np.sum(self.value), error)

    def check(self, *found: Any) -> None:
        """Asserts that float32 results are as near as that."""
        for x in found:
            distance = np.abs(np.float64(x) - self.value)
            assert np.all(distance <= self.error), np.max(distance / self.error)


def exactly(x: Any) -> Rounded:
    """Returns numbers as they are given."""
    return Rounded(np.float64(x), np.zeros(np.shape(x)))
