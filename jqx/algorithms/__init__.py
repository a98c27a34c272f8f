"""Algorithms that choose the codes of weights, where rounding to nearest is not enough."""

from ..transforms._shared import Chosen as Chosen
from ._awq import Awq as Awq
from ._awq import AwqReport as AwqReport
from ._awq import ScaledTogether as ScaledTogether
from ._awq import awq as awq
from ._bias_correction import BiasCorrection as BiasCorrection
from ._bias_correction import BiasReport as BiasReport
from ._bias_correction import SiteShift as SiteShift
from ._bias_correction import bias_correction as bias_correction
from ._chain import Chain as Chain
from ._chain import chain as chain
from ._equalize import Equalize as Equalize
from ._equalize import equalize as equalize
from ._folds import Pair as Pair
from ._gptq import Gptq as Gptq
from ._gptq import gptq as gptq
from ._memory import Memory as Memory
from ._pairs import Pairs as Pairs
from ._pairs import find_pairs as find_pairs
from ._report import AlgorithmReport as AlgorithmReport
from ._report import MatrixReport as MatrixReport
from ._smooth_quant import SmoothQuant as SmoothQuant
from ._smooth_quant import smooth_quant as smooth_quant
