"""Algorithms that choose the codes of weights, for when rounding to nearest is not good enough."""

import typing as _typing

from .._late import unknown as _unknown
from ..transforms._shared import Chosen as Chosen
from ._adaround import adaround as adaround
from ._auto_round import auto_round as auto_round
from ._awq import AwqReport as AwqReport
from ._awq import ScaledTogether as ScaledTogether
from ._awq import awq as awq
from ._bias_correction import BiasReport as BiasReport
from ._bias_correction import SiteShift as SiteShift
from ._bias_correction import bias_correction as bias_correction
from ._chain import chain as chain
from ._chain import nearest as nearest
from ._channels import Pair as Pair
from ._equalize import equalize as equalize
from ._gptq import gptq as gptq
from ._low_rank import Compensation as Compensation
from ._low_rank import CompensationReport as CompensationReport
from ._low_rank import eora as eora
from ._low_rank import loftq as loftq
from ._own_text import own_text as own_text
from ._report import AlgorithmReport as AlgorithmReport
from ._report import BlockReport as BlockReport
from ._report import BlocksReport as BlocksReport
from ._report import MatrixReport as MatrixReport
from ._rotate import Rotation as Rotation
from ._rotate import RotationReport as RotationReport
from ._rotate import rotate as rotate
from ._scaled import Pairs as Pairs
from ._scaled import find_pairs as find_pairs
from ._smooth_quant import smooth_quant as smooth_quant
from ._store import Memory as Memory

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
