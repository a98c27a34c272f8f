"""TFLite's integer requantization: a multiplier and a shift in place of a float scale."""

from .contractions._shared import FixedPointRounding as FixedPointRounding
from .contractions._shared import Requantization as Requantization
from .contractions._shared import requantize as requantize
