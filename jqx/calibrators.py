"""Granularities and calibrators: values that a user passes to turn observed values into scales."""

import typing as _typing

from ._src.late import unknown as _unknown
from ._src.statistics.calibrators import AcrossDevices as AcrossDevices
from ._src.statistics.calibrators import Affine as Affine
from ._src.statistics.calibrators import Delayed as Delayed
from ._src.statistics.calibrators import Rounded as Rounded
from ._src.statistics.calibrators import absmax as absmax
from ._src.statistics.calibrators import advance as advance
from ._src.statistics.calibrators import delayed as delayed
from ._src.statistics.calibrators import fixed as fixed
from ._src.statistics.calibrators import minmax as minmax
from ._src.statistics.calibrators import moving_average as moving_average
from ._src.statistics.calibrators import rms as rms
from ._src.statistics.searches import Hqq as Hqq
from ._src.statistics.searches import Mse as Mse
from ._src.statistics.searches import Percentile as Percentile
from ._src.statistics.searches import ceil as ceil
from ._src.statistics.searches import four_over_six as four_over_six
from ._src.statistics.searches import hqq as hqq
from ._src.statistics.searches import mse as mse
from ._src.statistics.searches import percentile as percentile

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
