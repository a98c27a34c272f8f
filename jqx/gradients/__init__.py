"""Gradient estimators: values that define the gradient of a rounding."""

import typing as _typing

from .._old_names import renamed as _renamed
from ._additive_noise import additive_noise as additive_noise
from ._dorefa import dorefa as dorefa
from ._dorefa import dorefa_weights as dorefa_weights
from ._estimator import Gradient as Gradient
from ._estimator import GradientEstimator as GradientEstimator
from ._estimator import Surrogate as Surrogate
from ._ewgs import ElementwiseGradientScaling as ElementwiseGradientScaling
from ._ewgs import ewgs as ewgs
from ._lsq import LearnedStep as LearnedStep
from ._lsq import lsq as lsq
from ._lsq_plus import LearnedStepAndOffset as LearnedStepAndOffset
from ._lsq_plus import lsq_plus as lsq_plus
from ._pact import pact as pact
from ._parq import parq as parq
from ._parq import proximal_round as proximal_round
from ._ste import ste as ste
from ._ste import ste_unclipped as ste_unclipped
from ._ste import straight_through as straight_through
from ._stochastic import StochasticRounding as StochasticRounding
from ._stochastic import stochastic as stochastic
from ._stochastic import stochastic_round as stochastic_round

if not _typing.TYPE_CHECKING:  # so that type checkers report old and unknown names
    __getattr__ = _renamed(__name__, {"Parq": "jqx.gradients.parq"})
