"""Observers: values that a user passes to choose which statistics of operands a site records."""

from ._src.statistics.statistics import AbsMax as AbsMax
from ._src.statistics.statistics import Hessian as Hessian
from ._src.statistics.statistics import Mean as Mean
from ._src.statistics.statistics import MeanAbs as MeanAbs
from ._src.statistics.statistics import ObservedSite as ObservedSite
from ._src.statistics.statistics import Observer as Observer
from ._src.statistics.statistics import Places as Places
from ._src.statistics.statistics import absmax as absmax
from ._src.statistics.statistics import hessian as hessian
from ._src.statistics.statistics import mean as mean
from ._src.statistics.statistics import mean_abs as mean_abs
from ._src.statistics.statistics import places as places
