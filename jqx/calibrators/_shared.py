"""What other folders of jqx import from this one, but users do not."""

from ._granularity import PerAxis as PerAxis
from ._granularity import PerBlock as PerBlock
from ._granularity import PerGroup as PerGroup
from ._granularity import PerKeptAxis as PerKeptAxis
from ._granularity import PerRun as PerRun
from ._granularity import PerTensor as PerTensor
from ._granularity import is_without_blocks as is_without_blocks
from ._granularity import per_axis as per_axis
from ._granularity import per_block as per_block
from ._granularity import per_channel as per_channel
from ._granularity import per_group as per_group
from ._granularity import per_tensor as per_tensor
from ._granularity import per_token as per_token
from ._ranges import AbsMax as AbsMax
from ._ranges import Fixed as Fixed
from ._ranges import MinMax as MinMax
from ._ranges import Rms as Rms
from ._searches import Ceil as Ceil
from ._searches import FourOverSix as FourOverSix
from ._wrappers import needs_no_values as needs_no_values
from ._wrappers import observe_where as observe_where
