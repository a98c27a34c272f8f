"""What a conversion looks for."""

import enum


class Wanted(enum.Enum):
    """What a run of a module looks for in addition to its result."""

    CODES = "codes"
    SCALES = "scales"
    LEARNED = "learned"
