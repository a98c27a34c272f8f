"""oneDNN Graph DynamicQuantize and its siblings against the library's vectors."""

import ml_dtypes
import pytest

import jqx

from .forms import FORMS, X64, evaluate
from .golden_io import DTYPES, differing, load

pytestmark = pytest.mark.skipif(X64, reason="oneDNN has no float64 form")


def _placement(attrs):
    kept = {"granularity": attrs["qtype"], "axis": attrs["axis"]}
    return {name: value for name, value in kept.items() if value is not None}


def _dynamic_quantize(attrs):
    return lambda x, scales, zps: jqx.dynamic_quantize(
        x, scales, zps, qtype=DTYPES[attrs["dst"]], **_placement(attrs)
    )


@pytest.mark.parametrize("form", FORMS)
def test_dynamic_quantize_gives_every_specified_code(form):
    cases = list(load("onednn_dynamicquantize"))
    functions = [_dynamic_quantize(case["attrs"]) for case, _ in cases]
    operands = [(a["src"], a["scales"], a.get("zps")) for _, a in cases]
    assert differing(evaluate(form, functions, operands), cases) == {}


def _sibling(attrs):
    """Returns (f, names of its array operands) of a stored sibling case."""
    fixed = (attrs.get("scales"), attrs["zps"])
    match attrs["kind"]:
        case "Quantize":
            qtype = DTYPES[attrs["dst"]]
            return lambda x: jqx.onednn.onednn_quantize(x, *fixed, qtype=qtype, **_placement(attrs))
        case "Dequantize":
            return lambda q: jqx.onednn.onednn_dequantize(q, *fixed, **_placement(attrs))
        case "DynamicDequantize":
            return lambda q, scales, zps: jqx.onednn.dynamic_dequantize(
                q, scales, zps, group_shape=attrs.get("group_shape"), **_placement(attrs)
            )
    raise AssertionError(attrs["kind"])


def _operands(case, arrays):
    """The arrays of a sibling case; codes of 4 bits are stored one a byte."""
    narrow = {"s4": ml_dtypes.int4, "u4": ml_dtypes.uint4}
    names = ["src", "scales", "zps"] if case["attrs"]["kind"] == "DynamicDequantize" else ["src"]
    for name in names:
        array, dtype = arrays.get(name), case["arrays"].get(name, [None])[0]
        yield array.astype(narrow[dtype]) if dtype in narrow else array


@pytest.mark.parametrize("form", FORMS)
def test_siblings_give_every_specified_value(form):
    cases = list(load("onednn_siblings"))
    functions = [_sibling(case["attrs"]) for case, _ in cases]
    operands = [tuple(_operands(case, arrays)) for case, arrays in cases]
    assert differing(evaluate(form, functions, operands), cases) == {}
