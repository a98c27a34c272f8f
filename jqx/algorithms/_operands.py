"""What is known of each channel that a site sums over, by channel of its operand: all taps of a
kernel, and all experts, read the same one.
"""

import numpy as np

from ._channels import Met
from ._labels import Array


def most(met: Met, x: Array) -> Array:
    """Returns the largest of what each channel of a site has, by channel of its operand."""
    if met.about.patches is not None:
        taps = int(np.prod(met.about.patches.kernel))
        return x.reshape(-1, taps).max(-1)
    return x.max(0) if met.site.op == "ragged_dot" else x


def least(met: Met, x: Array) -> Array:
    """Returns the least, likewise."""
    return -most(met, -x)


def spread(met: Met, own: Array) -> Array:
    """Returns what each channel of an operand has, for each channel of a site."""
    if met.about.patches is not None:
        taps = int(np.prod(met.about.patches.kernel))
        return np.repeat(own, taps).reshape(met.inputs.shape)
    return np.broadcast_to(own, met.inputs.shape)
