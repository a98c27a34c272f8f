"""oneDNN Graph DynamicQuantize and its siblings against the library's vectors."""

import jax.numpy as jnp
import pytest

import jqx

from .forms import FORMS, X64, evaluate
from .golden_io import DTYPES, load, mismatches

pytestmark = pytest.mark.skipif(X64, reason="oneDNN has no float64 form")


def _placement(attrs):
    kept = {"granularity": attrs["qtype"], "axis": attrs["axis"]}
    return {name: value for name, value in kept.items() if value is not None}


@pytest.mark.parametrize("form", FORMS)
def test_dynamic_quantize_gives_every_specified_code(form):
    wrong = {}
    for case, arrays in load("onednn_dynamicquantize"):
        attrs = case["attrs"]

        def f(x, scales, zps, attrs=attrs):
            return jqx.dynamic_quantize(
                x, scales, zps, qtype=DTYPES[attrs["dst"]], **_placement(attrs)
            )

        operands = (arrays["src"], arrays["scales"], arrays.get("zps"))
        wrong[case["id"]] = mismatches(evaluate(form, f, operands), arrays)
    assert {k: v for k, v in wrong.items() if v} == {}


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


@pytest.mark.parametrize("form", FORMS)
def test_siblings_give_every_specified_value(form):
    narrow = {"s4": jnp.int4, "u4": jnp.uint4}
    wrong = {}
    for case, arrays in load("onednn_siblings"):
        operands = [jnp.asarray(arrays["src"])]
        if case["attrs"]["kind"] == "DynamicDequantize":
            zps = arrays.get("zps")
            operands += [jnp.asarray(arrays["scales"]), None if zps is None else jnp.asarray(zps)]
        stored = [case["arrays"][n][0] for n in ("src", "scales", "zps") if n in case["arrays"]]
        operands = [
            o.astype(narrow[dtype]) if dtype in narrow else o
            for o, dtype in zip(operands, [*stored, None], strict=False)
        ]
        wrong[case["id"]] = mismatches(evaluate(form, _sibling(case["attrs"]), operands), arrays)
    assert {k: v for k, v in wrong.items() if v} == {}
