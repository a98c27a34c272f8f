"""Errors that say which function is wrong, the problem, and how to fix it."""

import pytest


def assert_refused(call, *words, error=ValueError):
    with pytest.raises(error) as info:
        call()
    text = str(info.value)
    assert text.startswith("jqx.") and "\n  fix:      " in text, text
    assert all(word in text for word in words), text
    assert len(text) < 2000
    return info.value
