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
from collections.abc import Iterable
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


def check_learned(pairs: Iterable[tuple[str, Learned | None, Learned | None]]) -> None:
    """Asserts that what algorithms chose is what is recorded, case by case and in all."""
    codes, changed, far, cases = 0, 0, [], 0
    for key, recorded, found in pairs:
        assert (recorded is None) == (found is None), f"{key}: {recorded=}, {found=}"
        if recorded is None or found is None:
            continue
        changed += _check_codes(key, recorded.codes, found.codes)
        codes += recorded.codes.size
        _check_floats(key, recorded.floats, found.floats)
        if _distance(key, recorded.results, found.results) > RESULTS:
            assert key.split("/")[1] not in WEIGHTS_ONLY, f"{key}: results differ"
            far.append(key)
        cases += 1
    assert changed <= max(1, CODES * codes), f"{changed} of {codes} codes differ"
    assert len(far) <= max(1, TIES * cases) * (cases > 1), f"results differ: {', '.join(far)}"


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
