"""Statistics of channels that a site sums over, by channel of its operand. All taps of a kernel,
and all experts, read the same channel of an operand.
"""

import numpy as np

from ._channels import Met
from ._labels import Array


def most(met: Met, x: Array) -> Array:
    """Returns the maximum over the channels of a site, by channel of its operand."""
    if met.about.patches is not None:
        taps = int(np.prod(met.about.patches.kernel))
        return x.reshape(-1, taps).max(-1)
    return x.max(0) if met.site.op == "ragged_dot" else x


def least(met: Met, x: Array) -> Array:
    """Returns the minimum, likewise."""
    return -most(met, -x)


def spread(met: Met, own: Array) -> Array:
    """Returns a statistic of the channels of an operand for each channel of a site."""
    if met.about.patches is not None:
        taps = int(np.prod(met.about.patches.kernel))
        return np.repeat(own, taps).reshape(met.inputs.shape)
    return np.broadcast_to(own, met.inputs.shape)
