"""Statistics of channels that a site sums over, by channel of its operand. All taps of a kernel,
and all experts, read the same channel of an operand.
"""

import numpy as np

from ._channels import Visit
from ._labels import Array


def most(visit: Visit, x: Array) -> Array:
    """Returns the maximum over the channels of a site, by channel of its operand."""
    if visit.about.patches is not None:
        taps = int(np.prod(visit.about.patches.kernel))
        return x.reshape(-1, taps).max(-1)
    return x.max(0) if visit.site.op == "ragged_dot" else x


def least(visit: Visit, x: Array) -> Array:
    """Returns the minimum, likewise."""
    return -most(visit, -x)


def spread(visit: Visit, own: Array) -> Array:
    """Returns a statistic of the channels of an operand for each channel of a site."""
    if visit.about.patches is not None:
        taps = int(np.prod(visit.about.patches.kernel))
        return np.repeat(own, taps).reshape(visit.inputs.shape)
    return np.broadcast_to(own, visit.inputs.shape)
