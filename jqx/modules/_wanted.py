"""What a conversion looks for."""

import enum


class Wanted(enum.Enum):
    """What a run of a module looks for in addition to its result."""

    CODES = "codes"
    SCALES = "scales"
    LEARNED = "learned"

    @property
    def function(self) -> str:
        """Name of the public function that runs the module."""
        return _FUNCTIONS[self]


_FUNCTIONS = {
    Wanted.CODES: "convert",
    Wanted.SCALES: "fix_scales",
    Wanted.LEARNED: "learn_scales",
}
