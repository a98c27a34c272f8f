"""Granularities and calibrators: values that a user passes to turn observed values into scales."""

import typing as _typing

from ._src.calibrators.calibrator import Affine as Affine
from ._src.calibrators.calibrator import Calibrator as Calibrator
from ._src.calibrators.granularity import Granularity as Granularity
from ._src.calibrators.granularity import Groups as Groups
from ._src.calibrators.ranges import absmax as absmax
from ._src.calibrators.ranges import fixed as fixed
from ._src.calibrators.ranges import minmax as minmax
from ._src.calibrators.ranges import rms as rms
from ._src.calibrators.searches import Hqq as Hqq
from ._src.calibrators.searches import Mse as Mse
from ._src.calibrators.searches import Percentile as Percentile
from ._src.calibrators.searches import ceil as ceil
from ._src.calibrators.searches import four_over_six as four_over_six
from ._src.calibrators.searches import hqq as hqq
from ._src.calibrators.searches import mse as mse
from ._src.calibrators.searches import percentile as percentile
from ._src.calibrators.wrappers import AcrossDevices as AcrossDevices
from ._src.calibrators.wrappers import Delayed as Delayed
from ._src.calibrators.wrappers import Rounded as Rounded
from ._src.calibrators.wrappers import advance as advance
from ._src.calibrators.wrappers import delayed as delayed
from ._src.calibrators.wrappers import moving_average as moving_average
from ._src.late import unknown as _unknown

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
