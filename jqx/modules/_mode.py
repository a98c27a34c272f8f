"""What a quantized module does when it is called."""

import enum
from typing import Any

from .._checks import check_instance


class Mode(enum.Enum):
    """What a quantized module does when it is called."""

    FLOAT = "float"
    """Computes what the float module computes; quantized weights are dequantized."""

    CALIBRATE = "calibrate"
    """Like FLOAT, and stores statistics of every activation that is to get a static scale."""

    SIMULATE = "simulate"
    """Rounds weights and activations, computes in float, has gradients: for training."""

    CONVERT = "convert"
    """Computes contractions on integers."""


def check_mode(function: str, mode: Any) -> None:
    """Checks that `mode` is a `Mode`."""
    check_instance(function, "mode", mode, Mode, fix="pass Mode.SIMULATE or another Mode.")
