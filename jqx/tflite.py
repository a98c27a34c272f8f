"""TFLite's integer requantization: a multiplier and a shift in place of a float scale."""

from ._src.contractions.requantize import FixedPointRounding as FixedPointRounding
from ._src.contractions.requantize import Requantization as Requantization
from ._src.contractions.requantize import requantize as requantize
