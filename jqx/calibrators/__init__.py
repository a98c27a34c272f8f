"""Granularities and calibrators, values that a user passes: from observed values to a scale."""

from ._absmax import AbsMax as AbsMax
from ._absmax import absmax as absmax
from ._calibrator import Affine as Affine
from ._calibrator import Calibrator as Calibrator
from ._granularity import Granularity as Granularity
from ._granularity import per_axis as per_axis
from ._granularity import per_channel as per_channel
from ._granularity import per_tensor as per_tensor
from ._granularity import per_token as per_token
from ._minmax import MinMax as MinMax
from ._minmax import minmax as minmax
