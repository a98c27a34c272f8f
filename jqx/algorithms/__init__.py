"""Algorithms that choose the codes of weights, for when rounding to nearest is not good enough."""

import typing as _typing

from .._old_names import renamed as _renamed
from ..transforms._shared import Chosen as Chosen
from ._adaround import AdaRound as AdaRound
from ._adaround import adaround as adaround
from ._auto_round import AutoRound as AutoRound
from ._auto_round import auto_round as auto_round
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
from ._loftq import Loftq as Loftq
from ._loftq import loftq as loftq
from ._low_rank import Compensation as Compensation
from ._low_rank import CompensationReport as CompensationReport
from ._low_rank import Eora as Eora
from ._low_rank import eora as eora
from ._memory import Memory as Memory
from ._nearest import Nearest as Nearest
from ._nearest import nearest as nearest
from ._own_text import own_text as own_text
from ._pairs import Pairs as Pairs
from ._pairs import find_pairs as find_pairs
from ._report import AlgorithmReport as AlgorithmReport
from ._report import BlockReport as BlockReport
from ._report import BlocksReport as BlocksReport
from ._report import MatrixReport as MatrixReport
from ._rotate import Rotate as Rotate
from ._rotate import Rotation as Rotation
from ._rotate import RotationReport as RotationReport
from ._rotate import rotate as rotate
from ._smooth_quant import SmoothQuant as SmoothQuant
from ._smooth_quant import smooth_quant as smooth_quant

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _renamed(__name__, {}, internal=False)
