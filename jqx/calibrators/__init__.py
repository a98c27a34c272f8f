"""Granularities and calibrators: values that a user passes to turn observed values into scales."""

import typing as _typing

from .._old_names import renamed as _renamed
from ._absmax import AbsMax as AbsMax
from ._absmax import absmax as absmax
from ._across_devices import AcrossDevices as AcrossDevices
from ._calibrator import Affine as Affine
from ._calibrator import Calibrator as Calibrator
from ._delayed import Delayed as Delayed
from ._delayed import advance as advance
from ._delayed import delayed as delayed
from ._entropy import Entropy as Entropy
from ._entropy import entropy as entropy
from ._fixed import Fixed as Fixed
from ._fixed import fixed as fixed
from ._granularity import Granularity as Granularity
from ._groups import Groups as Groups
from ._hqq import Hqq as Hqq
from ._hqq import hqq as hqq
from ._minmax import MinMax as MinMax
from ._minmax import minmax as minmax
from ._moving_average import moving_average as moving_average
from ._mse import Mse as Mse
from ._mse import mse as mse
from ._percentile import Percentile as Percentile
from ._percentile import percentile as percentile
from ._rms import Rms as Rms
from ._rms import rms as rms
from ._rounded import Rounded as Rounded
from ._scale_rules import Ceil as Ceil
from ._scale_rules import FourOverSix as FourOverSix
from ._scale_rules import ceil as ceil
from ._scale_rules import four_over_six as four_over_six

if not _typing.TYPE_CHECKING:  # type checkers report old names, as they do unknown ones
    __getattr__ = _renamed(
        __name__,
        {
            "Hqo": "jqx.calibrators.Hqq",
            "hqo": "jqx.calibrators.hqq",
            "per_axis": "jqx.per_axis",
            "per_block": "jqx.per_block",
            "per_channel": "jqx.per_channel",
            "per_group": "jqx.per_group",
            "per_tensor": "jqx.per_tensor",
            "per_token": "jqx.per_token",
        },
    )
