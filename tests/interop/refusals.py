"""Errors in four parts."""

import pytest


def assert_refused(call, *words, error=ValueError):
    with pytest.raises(error) as info:
        call()
    text = str(info.value)
    assert all(part in text for part in ("jqx.", "given: ", "expected: ", "fix: ")), text
    assert all(word in text for word in words), text
    assert len(text) < 2000
    return info.value
