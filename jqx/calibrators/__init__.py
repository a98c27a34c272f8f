"""Granularities and calibrators: values that a user passes to turn observed values into scales."""

import typing as _typing

from .._late import unknown as _unknown
from ._calibrator import Affine as Affine
from ._calibrator import Calibrator as Calibrator
from ._granularity import Granularity as Granularity
from ._granularity import Groups as Groups
from ._ranges import absmax as absmax
from ._ranges import fixed as fixed
from ._ranges import minmax as minmax
from ._ranges import rms as rms
from ._searches import Entropy as Entropy
from ._searches import Hqq as Hqq
from ._searches import Mse as Mse
from ._searches import Percentile as Percentile
from ._searches import ceil as ceil
from ._searches import entropy as entropy
from ._searches import four_over_six as four_over_six
from ._searches import hqq as hqq
from ._searches import mse as mse
from ._searches import percentile as percentile
from ._wrappers import AcrossDevices as AcrossDevices
from ._wrappers import Delayed as Delayed
from ._wrappers import Rounded as Rounded
from ._wrappers import advance as advance
from ._wrappers import delayed as delayed
from ._wrappers import moving_average as moving_average

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
