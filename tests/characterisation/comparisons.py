"""Comparisons of what is recorded with what is found; each raises an AssertionError that says what
differs.

Forms are equal. What algorithms learn, and results, may differ as another order of the same sums in
float32 explains:

- one code in a thousand, or one of a case, by one step;
- each scale and float parameter by 2**-16 of itself, and 2**-26 of the largest of the case;
- results by 2**-14 of the largest of the case. Where activations are rounded, a value that is as
  near to a tie takes the next code: in one case of fifty, but in one of those compared at once, the
  results may differ by a tenth.
"""

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .cases import Learned

CODES, FLOATS, RESULTS, TIES, STEP = 1e-3, 2.0**-16, 2.0**-14, 1 / 50, 1 / 10

WEIGHTS_ONLY = "w8a16", "w4a16", "nf4"
"""Policies that round no activation."""


def check_form(key: str, recorded: Any, found: Any) -> None:
    """Asserts that a form is the recorded one; else prints both, line by line."""
    old, new = (json.dumps(x, indent=1, sort_keys=True).splitlines() for x in (recorded, found))
    if old != new:
        lines = difflib.unified_diff(old, new, "recorded", "found", n=4, lineterm="")
        raise AssertionError("\n".join([f"{key} differs from what is recorded:", *lines]))


def check_learned(cases: Iterable[tuple[str, Sequence[Learned], Learned | None]]) -> None:
    """Asserts that what algorithms chose is recorded, case by case and in all: for each case, what
    they chose on one kind of processor or another.
    """
    codes, changed, far, count = 0, 0, [], 0
    for key, choices, found in cases:
        if found is None:
            assert not choices, f"{key}: nothing is chosen, and it is recorded"
            continue
        assert choices, f"{key}: nothing is recorded"
        differing, distance = _nearest(key, choices, found)
        changed += differing
        codes += found.codes.size
        if distance > RESULTS:
            assert key.split("/")[1] not in WEIGHTS_ONLY, f"{key}: results differ"
            far.append(key)
        count += 1
    assert changed <= max(1, CODES * codes), f"{changed} of {codes} codes differ"
    assert len(far) <= max(1, TIES * count) * (count > 1), f"results differ: {', '.join(far)}"


def _nearest(key: str, choices: Sequence[Learned], found: Learned) -> tuple[int, float]:
    """Returns how many codes differ from the recorded choice that fits, and how far results do.

    Raises:
      AssertionError: none fits; it says what differs from the first.
    """
    fitting, errors = [], []
    for choice in choices:
        try:
            changed = _check_codes(key, choice.codes, found.codes)
            _check_floats(key, choice.floats, found.floats)
            fitting.append((_distance(key, choice.results, found.results), changed))
        except AssertionError as error:
            errors.append(error)
    if not fitting:
        raise errors[0]
    distance, changed = min(fitting)
    return changed, distance


def _check_codes(key: str, recorded: np.ndarray, found: np.ndarray) -> int:
    assert recorded.shape == found.shape, f"{key}: {found.size} codes, not {recorded.size}"
    steps = np.abs(found.astype(int) - recorded)
    assert np.all(steps <= 1), f"{key}: a code is {steps.max()} steps away"
    changed = np.count_nonzero(steps)
    assert changed <= max(1, CODES * steps.size), f"{key}: {changed} of {steps.size} codes differ"
    return changed


def _check_floats(key: str, recorded: np.ndarray, found: np.ndarray) -> None:
    assert recorded.shape == found.shape, f"{key}: {found.size} floats, not {recorded.size}"
    distance = np.abs(np.float64(found) - recorded)
    allowed = FLOATS * (np.abs(recorded) + 2.0**-10 * np.abs(recorded).max(initial=0))
    assert np.all(distance <= allowed), f"{key}: floats {found[distance > allowed]} differ"


def _distance(key: str, recorded: np.ndarray, found: np.ndarray) -> float:
    assert recorded.shape == found.shape, f"{key}: {found.size} results, not {recorded.size}"
    distance = np.abs(np.float64(found) - recorded).max() / np.abs(recorded).max()
    assert distance <= STEP, f"{key}: results differ by {distance} of the largest"
    return float(distance)
