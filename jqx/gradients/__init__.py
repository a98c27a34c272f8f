"""Gradient estimators: what flows backward through a rounding. Each is a value passed as `gradient=`."""

from ._estimator import GradientEstimator as GradientEstimator
from ._estimator import check_estimator as check_estimator
from ._ste import StraightThrough as StraightThrough
from ._ste import ste as ste
