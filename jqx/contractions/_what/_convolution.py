"""A convolution as the planner sees it: image, kernel and window, by shapes and formats only."""

import dataclasses
import math
from typing import Any

from ...tensor import QTensor
from .._how._blocks import shares_scale
from .._integers._bytes import is_byte, is_integer
from ._conv_dimensions import Window

MOST_TAPS = 64
"""Up to this number of taps, a depthwise convolution is unrolled, with one product per tap."""


@dataclasses.dataclass(frozen=True)
class Convolution:
    """An image and a kernel; at least one is a QTensor.

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
        """Whether the kernel is a QTensor and the image an array."""
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
        """Whether the convolution is depthwise, with few enough taps to be unrolled."""
        taps = math.prod(self.rhs.shape[axis] for axis in self.how.taps)
        return self.how.is_depthwise(self.lhs) and taps <= MOST_TAPS

    @property
    def is_plain(self) -> bool:
        """Whether the kernel has no zero points, and scales that can be applied after the sum."""
        return self.rhs.zero_point is None and shares_scale(self.rhs, self.how.summed[1])
