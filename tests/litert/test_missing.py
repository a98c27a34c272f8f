"""What users see where the converter is not installed."""

import sys

import pytest

from jqx.interop import to_litert


def test_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "litert_converter.converter_api_ext", None)
    with pytest.raises(
        ImportError, match=r"litert-converter is not(?s:.*)pip install 'jqx\[litert"
    ):
        to_litert(lambda w, x: x @ w)
