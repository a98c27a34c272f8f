"""What other folders of jqx import from this one, and users do not."""

from ._affines import GivenAffines as GivenAffines
from ._calibrate import Affines as Affines
from ._calibrate import affines_seen as affines_seen
from ._calibrate_batches import arguments_of as arguments_of
from ._find import is_marked as is_marked
from ._interpret import Rules as Rules
from ._interpret import interpret as interpret
from ._interpret import view as view
from ._origin import Address as Address
from ._plan import Site as Site
from ._plan import Weight as Weight
from ._plan_call import as_plan as as_plan
from ._plan_call import params_of as params_of
from ._quantize_params import named_leaves as named_leaves
from ._quantize_params import quantize_weight as quantize_weight
from ._trace import Call as Call
from ._trace import check_function as check_function
from ._trace import is_array as is_array
from ._trace import is_quantized as is_quantized
from ._trace import trace_call as trace_call
from ._weight import Trainable as Trainable
from ._weight import codes_of as codes_of
from ._weight import real_of as real_of
from .primitives import Records as Records
