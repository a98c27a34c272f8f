"""Observers: values that a user passes to choose which statistics of operands a site records."""

from ._observer import ObservedSite as ObservedSite
from ._observer import Observer as Observer
from ._statistics import AbsMax as AbsMax
from ._statistics import Cross as Cross
from ._statistics import Hessian as Hessian
from ._statistics import Mean as Mean
from ._statistics import MeanAbs as MeanAbs
from ._statistics import Places as Places
from ._statistics import Samples as Samples
from ._statistics import absmax as absmax
from ._statistics import cross as cross
from ._statistics import hessian as hessian
from ._statistics import mean as mean
from ._statistics import mean_abs as mean_abs
from ._statistics import places as places
from ._statistics import samples as samples
