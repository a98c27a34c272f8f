"""Gradient estimators, values passed as `gradient=`: what flows backward through a rounding."""

from ._estimator import GradientEstimator as GradientEstimator
from ._estimator import check_estimator as check_estimator
from ._ste import StraightThrough as StraightThrough
from ._ste import ste as ste
