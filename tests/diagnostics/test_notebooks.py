"""What a notebook shows: tables with their text escaped, and nothing left out in silence."""

import html
import re

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx._src.table import Table
from jqx.algorithms import AwqReport, BiasReport, BlocksReport, RotationReport

from ..arrays import normal

W = normal(0, 32, 32)
PARAMS = {"<i>a</i>": W, "b": W, "c": W}


def f(p, x):
    return jnp.tanh(x @ p["<i>a</i>"]) @ p["b"] @ p["c"]


@pytest.fixture(scope="module")
def quantized():
    policy = jqx.Policy({"c": "float", ".*": "int4:group=16"})
    return jqx.ptq(f, policy, jqx.algorithms.gptq(), progress=False)(PARAMS, [normal(1, 64, 32)])


def rows_of(page):
    """The cells of each row, as they are read."""
    rows = re.findall(r"<tr.*?>(.*?)</tr>", page)
    cells = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in rows]
    return [[html.unescape(cell) for cell in row] for row in cells]


def test_a_table_is_that_which_is_printed():
    table = Table(("<path>", "bits"), (("a & b", "4.5"), ("c", "8")), "below", bright=1)
    page = table.to_html("a <title>")
    assert rows_of(page) == [list(row) for row in (table.head, *table.rows)]
    assert "<path>" not in page and "a &lt;title&gt;" in page and "<p>below</p>" in page
    assert page.count('class="jqx-dim"') == 1 and page.count('class="jqx-text"') == 3
    assert "overflow:auto" in page and "max-height" in page


def test_a_long_table_says_how_many_rows_are_left_out():
    page = Table(("i",), tuple((str(i),) for i in range(1234)), "end").to_html()
    assert len(rows_of(page)) == 501
    assert "734 of 1,234 rows are left out here; print shows all.\nend" in page


def test_policies_and_plans_are_tables(quantized):
    policy = jqx.Policy({"<x>": jqx.presets.w8a8(), ".*": "int4"})
    assert rows_of(policy._repr_html_())[1:] == [
        [str(i), rule.path, rule.described()] for i, rule in enumerate(policy.rules)
    ]
    plan = quantized.plan
    page = plan._repr_html_()
    assert rows_of(page)[1:] == [list(row) for row in plan.table().rows]
    assert "<i>" not in page and page.count('class="jqx-dim"') == len(plan.skipped) == 1
    assert str(plan) == str(plan.table()) and plan.to_markdown().startswith("| path | op |")


def test_what_ptq_returns_is_its_report(quantized, tmp_path):
    page = quantized._repr_html_()
    assert html.escape(repr(quantized)) in page
    assert rows_of(page)[1:] == [list(row) for row in quantized.report.table().rows]
    jqx.save(tmp_path / "q.safetensors", quantized)
    assert rows_of(jqx.load(tmp_path / "q.safetensors")._repr_html_()) == rows_of(page)
    assert rows_of(quantized.details._repr_html_())[0][0] == "matrix"


def test_a_qtensor_says_its_format_and_bytes_whatever_its_leaves_are(quantized):
    q = quantized.params["b"]
    told = dict(rows_of(q._repr_html_()))
    assert told["format"] == f"int4 {q.groups}" and told["stands for"] == "float32[32, 32]"
    assert (
        told["bytes"] == f"{q.nbytes:,}, {8 * q.nbytes / 1024:.2f} bits for each of 1,024 numbers"
    )
    assert "float32[2, 32]" in told["scales"]
    assert rows_of(jax.eval_shape(lambda: q)._repr_html_()) == rows_of(q._repr_html_())
    assert "object" in jax.tree.map(lambda _: object(), q)._repr_html_()
    seen = []
    jax.jit(lambda q: seen.append(q._repr_html_()))(q)
    assert dict(rows_of(seen[0]))["format"] == told["format"]


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_a_cache_says_how_full_it_is(format):
    cache = jqx.KVCache.empty(batch=2, length=64, heads=2, width=32, format=format)
    told = dict(rows_of(cache._repr_html_()))
    assert told["format"] == format and told["holds"] == "0 of 64 tokens"
    assert told["shape"] == "batch 2, 2 heads, 32 wide"
    assert told["bytes"].endswith(f"{8 * cache.nbytes / 16384:.2f} bits for each of 16,384 numbers")


@pytest.mark.parametrize("kind", [AwqReport, BiasReport, BlocksReport, RotationReport])
def test_other_reports_are_shown_as_they_print(kind):
    empty = kind(())
    assert f"<pre>{html.escape(str(empty))}</pre>" in empty._repr_html_()
