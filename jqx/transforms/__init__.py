"""Functional transforms: plan, calibrate, simulate, quantize, and convert any JAX function."""

from ..contractions._shared import OperandAxes as OperandAxes
from ._calibrate import calibrate as calibrate
from ._calibrate_batches import calibrate_batches as calibrate_batches
from ._channel_map import ChannelMap as ChannelMap
from ._channel_map import LowRank as LowRank
from ._convert import convert as convert
from ._find_affines import affines as affines
from ._hoist import hoist as hoist
from ._make_plan import make_plan as make_plan
from ._map_channels import map_channels as map_channels
from ._merge_stats import merge_stats as merge_stats
from ._plan import Plan as Plan
from ._quantize_params import dequantize_params as dequantize_params
from ._quantize_params import quantize_params as quantize_params
from ._quantize_state import quantize_state as quantize_state
from ._simulate import simulate as simulate
from ._site import Operand as Operand
from ._site import Site as Site
from ._site import Skipped as Skipped
from ._site import Unreached as Unreached
from ._site import Weight as Weight
from .primitives import Contraction as Contraction
from .primitives import View as View
from .primitives import primitive_rules as primitive_rules
