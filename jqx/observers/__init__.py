"""Observers: values that a user passes to choose which statistics of operands a site records."""

from ._absmax import AbsMax as AbsMax
from ._absmax import absmax as absmax
from ._cross import Cross as Cross
from ._cross import cross as cross
from ._hessian import Hessian as Hessian
from ._hessian import hessian as hessian
from ._mean import Mean as Mean
from ._mean import MeanAbs as MeanAbs
from ._mean import mean as mean
from ._mean import mean_abs as mean_abs
from ._observer import ObservedSite as ObservedSite
from ._observer import Observer as Observer
from ._places import Places as Places
from ._places import places as places
from ._samples import Samples as Samples
from ._samples import samples as samples
