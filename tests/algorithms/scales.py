"""Divisors of channels that are folded into the parameters before them."""

import numpy as np

from jqx._src.algorithms.channels import clips_of


def divided(pairs, params, scales):
    """Parameters of the same function whose sites get operands divided by scales, and the maps that
    clip these: scales [*loops, *batch, channels] by the key of an operand.
    """
    folds = pairs.folds
    factors = np.ones(folds.count)
    for visit in folds.visits:
        if folds.key(visit) in scales:
            scale = np.asarray(scales[folds.key(visit)], np.float64)
            factors[folds.inputs(visit)] = 1 / scale[visit.steps]
    factors[0] = 1
    return folds.folded(params, factors), clips_of(folds, factors)
