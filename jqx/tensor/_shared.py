"""What other folders of jqx import from this one, and users do not."""

from ._added import added as added
from ._code_range import check_codes as check_codes
from ._export import fields_from_json as fields_from_json
from ._export import fields_to_json as fields_to_json
from ._fields import check_zero_point as check_zero_point
from ._fit import groups_of as groups_of
from ._grid import fake_quantize_as as fake_quantize_as
from ._json import NONE as NONE
from ._json import Values as Values
from ._json import check_values as check_values
from ._json import check_version as check_version
from ._json import record_from_json as record_from_json
from ._json import to_json as to_json
from ._layout import Layout as Layout
from ._layout import Packing as Packing
from ._layout import is_flipped as is_flipped
from ._layout import to_int8 as to_int8
from ._partition import partition_specs as partition_specs
from ._select import refine as refine
from ._select import sliceable as sliceable
from ._targets import TARGETS as TARGETS
from ._targets import check_target as check_target
from ._views import axis_groups as axis_groups
