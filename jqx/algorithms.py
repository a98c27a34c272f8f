"""Algorithms that choose the codes of weights, for when rounding to nearest is not good enough."""

import typing as _typing

from ._src.late import late as _late

if _typing.TYPE_CHECKING:
    from ._src.algorithms.activation_aware import awq as awq
    from ._src.algorithms.activation_aware import smooth_quant as smooth_quant
    from ._src.algorithms.corrections import bias_correction as bias_correction
    from ._src.algorithms.corrections import eora as eora
    from ._src.algorithms.corrections import loftq as loftq
    from ._src.algorithms.gptq import gptq as gptq
    from ._src.algorithms.interface import chain as chain
    from ._src.algorithms.interface import nearest as nearest
    from ._src.algorithms.own_text import own_text as own_text
    from ._src.algorithms.rotate import rotate as rotate
    from ._src.algorithms.rounding import adaround as adaround
    from ._src.algorithms.rounding import auto_round as auto_round
    from ._src.algorithms.scaling import equalize as equalize
    from ._src.algorithms.scaling import find_pairs as find_pairs
else:  # one algorithm does not need the others; type checkers report unknown names
    __getattr__, __dir__ = _late(
        __name__,
        {
            "jqx._src.algorithms.activation_aware": ("awq", "smooth_quant"),
            "jqx._src.algorithms.corrections": ("bias_correction", "eora", "loftq"),
            "jqx._src.algorithms.gptq": ("gptq",),
            "jqx._src.algorithms.interface": ("chain", "nearest"),
            "jqx._src.algorithms.own_text": ("own_text",),
            "jqx._src.algorithms.rotate": ("rotate",),
            "jqx._src.algorithms.rounding": ("adaround", "auto_round"),
            "jqx._src.algorithms.scaling": ("equalize", "find_pairs"),
        },
    )
