"""Optimizers of optax in few bits: states as codes, and parameters in bfloat16."""

import typing as _typing

from ._src.late import unknown as _unknown
from ._src.optim.states import quantized as quantized
from ._src.optim.stochastic import apply_updates as apply_updates
from ._src.optim.stochastic import stochastic_bf16 as stochastic_bf16

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
