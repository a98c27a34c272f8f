"""Observers: values that a user passes to choose which statistics of operands a site records."""

from ._src.observers.observer import ObservedSite as ObservedSite
from ._src.observers.observer import Observer as Observer
from ._src.observers.statistics import AbsMax as AbsMax
from ._src.observers.statistics import Hessian as Hessian
from ._src.observers.statistics import Mean as Mean
from ._src.observers.statistics import MeanAbs as MeanAbs
from ._src.observers.statistics import Places as Places
from ._src.observers.statistics import absmax as absmax
from ._src.observers.statistics import hessian as hessian
from ._src.observers.statistics import mean as mean
from ._src.observers.statistics import mean_abs as mean_abs
from ._src.observers.statistics import places as places
