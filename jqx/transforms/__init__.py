"""Functional transforms: plan, calibrate, simulate, quantize, and convert any JAX function."""

from ..contractions._shared import OperandAxes as OperandAxes
from ._calibrate import affines as affines
from ._calibrate import calibrate as calibrate
from ._calibrate import calibrate_batches as calibrate_batches
from ._calibrate import merge_stats as merge_stats
from ._channel_map import ChannelMap as ChannelMap
from ._channel_map import LowRank as LowRank
from ._convert import convert as convert
from ._hoist import hoist as hoist
from ._make_plan import make_plan as make_plan
from ._map_channels import map_channels as map_channels
from ._plan import Operand as Operand
from ._plan import Plan as Plan
from ._plan import Site as Site
from ._plan import Skipped as Skipped
from ._plan import Unreached as Unreached
from ._plan import Weight as Weight
from ._quantize_params import dequantize_params as dequantize_params
from ._quantize_params import quantize_params as quantize_params
from ._quantize_params import quantize_state as quantize_state
from ._rules import Contraction as Contraction
from ._rules import primitive_rules as primitive_rules
from ._simulate import simulate as simulate
from ._views import View as View
