"""A convolution as planning sees it: image, kernel and window, by shapes and formats alone."""

import dataclasses
import math
from typing import Any

from ...tensor import QTensor
from .._how._blocks import shares_scale
from .._integers._bytes import is_byte, is_integer
from ._conv_dimensions import Window

MOST_TAPS = 64
"""Taps up to which a depthwise convolution is written out, one product a tap."""


@dataclasses.dataclass(frozen=True)
class Convolution:
    """An image and a kernel, of which one is a QTensor.

    Attributes:
      lhs: the image, an array or a QTensor.
      rhs: the kernel, likewise.
      how: the window.
    """

    lhs: Any
    rhs: Any
    how: Window

    @property
    def is_beside_floats(self) -> bool:
        """Whether a kernel of codes meets an array."""
        return isinstance(self.rhs, QTensor) and not isinstance(self.lhs, QTensor)

    @property
    def are_integers(self) -> bool:
        """Whether both operands are QTensors of integers."""
        return is_integer(self.lhs) and is_integer(self.rhs)

    @property
    def are_bytes(self) -> bool:
        """Whether both operands are QTensors of integers of 8 bits or fewer."""
        return is_byte(self.lhs) and is_byte(self.rhs)

    @property
    def is_shifted(self) -> bool:
        """Whether it is depthwise, of taps few enough to be written out."""
        taps = math.prod(self.rhs.shape[axis] for axis in self.how.taps)
        return self.how.is_depthwise(self.lhs) and taps <= MOST_TAPS

    @property
    def is_plain(self) -> bool:
        """Whether the scale of the kernel can come after the sum, and nothing else need."""
        return self.rhs.zero_point is None and shares_scale(self.rhs, self.how.summed[1])
