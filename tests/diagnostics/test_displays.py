"""What notebooks, pages and pictures show: the numbers, escaped text, and what is not there."""

import dataclasses
import html
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import jqx
from jqx._src.algorithms.activation_aware import AwqReport
from jqx._src.algorithms.corrections import BiasReport
from jqx._src.algorithms.interface import BlocksReport
from jqx._src.algorithms.rotate import RotationReport
from jqx._src.diagnostics.compare import Comparison, SiteError
from jqx._src.diagnostics.report import Report, WeightError, measure
from jqx._src.diagnostics.sensitivity import Sensitivities, Sensitivity
from jqx._src.table import Table
from jqx.diagnostics import Bytes, dashboard, plots, search

from ..arrays import normal

W = normal(0, 32, 32)
W8, W4 = jqx.presets.w8a16(), jqx.presets.w4a16(block=16)
INT4 = jqx.presets.w8a16(weight={"qtype": jnp.int4})
KINDS = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")
DEEP = ["embed", *(f"layers/{i}/{kind}" for i in range(42) for kind in KINDS), "head"]
"""Paths of 296 weights, in the order of the model."""

PARAMS = {"<b>a</b>": W, "b & c": W.at[0, 0].set(50.0), "bias": jnp.zeros(32)}


def f(p, x):
    return jnp.tanh(x @ p["<b>a</b>"]) @ p["b & c"] + (x @ x.T).sum() * p["bias"][None]


@pytest.fixture(scope="module")
def quantized():
    return jqx.ptq(f, W4, jqx.algorithms.nearest(), progress=False)(PARAMS, [W])


def weight(path, sqnr=20.0, scheme="int4 per_block({0: 32, 1: 1})", clipped=0.0, dead=0):
    return WeightError(path, scheme, 4.5, 4000, 600, -1.0, 1.0, clipped, dead, sqnr)


def report(*weights):
    return Report(weights, 0, sites=len(weights), skipped=0, macs=1.0)


def site(name, sqnr=20.0):
    return SiteError(name, "dot_general", (), sqnr - 1, sqnr, 0.99, 0.1, 0.1)


def sensitivities(costs, baseline=None):
    rows = [Sensitivity(path, "dot_general", cost) for path, cost in costs.items()]
    return Sensitivities(tuple(rows), "fisher", baseline)


# Notebooks

THREE = {"<i>a</i>": W, "b": W, "c": W}


def three(p, x):
    return jnp.tanh(x @ p["<i>a</i>"]) @ p["b"] @ p["c"]


@pytest.fixture(scope="module")
def by_gptq():
    policy = jqx.Policy({"c": "float", ".*": "int4:group=16"})
    return jqx.ptq(three, policy, jqx.algorithms.gptq(), progress=False)(THREE, [normal(1, 64, 32)])


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


def test_policies_and_plans_are_tables(by_gptq):
    policy = jqx.Policy({"<x>": jqx.presets.w8a8(), ".*": "int4"})
    assert rows_of(policy._repr_html_())[1:] == [
        [str(i), rule.path, rule.described()] for i, rule in enumerate(policy.rules)
    ]
    plan = by_gptq.plan
    page = plan._repr_html_()
    assert rows_of(page)[1:] == [list(row) for row in plan.table().rows]
    assert "<i>" not in page and page.count('class="jqx-dim"') == len(plan.skipped) == 1
    assert str(plan) == str(plan.table()) and plan.to_markdown().startswith("| path | op |")


def test_what_ptq_returns_is_its_report(by_gptq, tmp_path):
    page = by_gptq._repr_html_()
    assert html.escape(repr(by_gptq)) in page
    assert rows_of(page)[1:] == [list(row) for row in by_gptq.report.table().rows]
    jqx.save(tmp_path / "q.safetensors", by_gptq)
    assert rows_of(jqx.load(tmp_path / "q.safetensors")._repr_html_()) == rows_of(page)
    assert rows_of(by_gptq.details._repr_html_())[0][0] == "matrix"


def test_a_qtensor_says_its_format_and_bytes_whatever_its_leaves_are(by_gptq):
    q = by_gptq.params["b"]
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


# Pages


class Tags(HTMLParser):
    """Reads a page: its text, its tags, and whether each is closed where it is to be."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.titles = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)
        if self.open and self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def measurements(quantized):
    """All that a page may have, each once."""
    plan = quantized.plan
    costs = jqx.diagnostics.sensitivity(f, plan, estimate="weight_error")(PARAMS, W)
    return {
        "comparison": jqx.compare(f, plan, weights=quantized.params)(PARAMS, W),
        "sensitivities": costs,
        "explanation": jqx.explain(f, quantized.params, W, plan=plan),
        "assignment": search(f, W8, {"int8": W8, "int4": W4}, Bytes(1900))(PARAMS, W),
    }


def test_a_page_has_what_it_was_given(quantized, measurements):
    page = dashboard(quantized, **measurements, title="1 < 2")
    seen = Tags(page.html)
    assert page.missing == () and "Not on this page" not in seen.titles
    assert seen.titles == [
        "Sizes and formats",
        "Weights, the worst first",
        "Sensitivities",
        "Results, site by site",
        "What the chip runs",
        "Search",
        "Algorithm",
        "What stays in float",
    ]
    text = " ".join(seen.text)
    report = quantized.report
    for w in report.weights:
        assert w.path in text and f"{w.sqnr:.1f} dB" in text
    for row in measurements["comparison"].sites:
        assert f"{row.local_sqnr:.1f} dB" in text
    bits = sum(w.bits * w.bytes_before for w in report.weights)
    assert f"{bits / sum(w.bytes_before for w in report.weights):.2f}" in seen.text
    assert f"{measurements['comparison'].result.sqnr:.1f} dB" in text
    assert f"{measurements['assignment'].measured:.4g}" in text
    assert f"{measurements['assignment'].bits:.2f}" in seen.text and "at most 1,900 bytes." in text
    assert quantized.plan.skipped[0].reason in text and "1 < 2" in seen.text
    done = sum(site.is_quantized for site in measurements["explanation"].sites)
    assert f"{done} of 3" in seen.text


def test_a_page_stands_alone_and_all_text_is_escaped(quantized, measurements):
    page = dashboard(quantized, **measurements, title="<script>").html
    tags = Tags(page).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe"}
    names = {name for _, attributes in tags for name in attributes}
    assert not names & {"src", "href", "srcset", "action"}
    assert not {name for name in names if name.startswith("on")}
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style and "http" not in page
    assert "<b>a</b>" not in page and "&lt;b&gt;a&lt;/b&gt;" in page and "b &amp; c" in page
    assert "prefers-color-scheme:dark" in style and "max-width:640px" in style
    assert 'name="viewport"' in page


def test_a_page_says_what_it_was_not_given_and_how_to_get_it(quantized, measurements):
    page = dashboard(quantized)
    assert page.missing == (
        "Results, site by site",
        "Sensitivities",
        "What the chip runs",
        "Search",
    )
    text = " ".join(Tags(page.html).text)
    for call in ("jqx.compare(", "jqx.diagnostics.sensitivity(", "jqx.explain(", "search("):
        assert call in text
    for name, value in measurements.items():
        less = dashboard(quantized, **{name: value})
        assert len(less.missing) == 3 and f"{name}={name}" not in less.html


def test_a_plan_has_a_report_where_it_has_parameters(quantized):
    plan = quantized.plan
    alone = dashboard(plan)
    assert alone.missing[0] == "Sizes and weights" and "dashboard(plan, params)" in alone.html
    assert "Sizes and formats" in Tags(dashboard(plan, PARAMS).html).titles
    only = dashboard(quantized.report)
    assert "What stays in float" in only.missing
    assert "dashboard(quantized)  # in place of its report" in only.html


def test_a_lowering_is_enough_for_what_the_chip_runs(quantized, measurements):
    low = measurements["explanation"].lowering
    page = dashboard(quantized, explanation=low)
    assert "What the chip runs" in Tags(page.html).titles
    assert f"{len(low.contractions)} contractions" in page.html


def test_sites_that_read_no_codes_are_told_even_where_the_explanation_has_no_plan(
    quantized, measurements
):
    sites = tuple(
        dataclasses.replace(site, plan="", executed_as="widened first")
        for site in measurements["explanation"].sites
        if site.path
    )
    explained = dataclasses.replace(measurements["explanation"], sites=sites, plain=("w",))
    page = " ".join(Tags(dashboard(quantized, explanation=explained).html).text)
    assert "2 quantized sites whose kernels read no codes" in page
    assert "1 weight not laid out" in page


def test_of_300_weights_the_worst_are_unfolded_and_all_are_there():
    paths = [f"layers/{i}/w" for i in range(300)]
    rows = [weight(path, 10 + i % 97, "int4", 0.01, 2) for i, path in enumerate(paths)]
    costs = sensitivities({path: 1 / (i + 1) for i, path in enumerate(paths)}, 0.5)
    errors = tuple(site(f"layers/{i}/w", 10.0 + i) for i in range(900))
    comparison = Comparison(errors, errors[-1])
    page = dashboard(report(*rows), sensitivities=costs, comparison=comparison).html
    text = " ".join(Tags(page).text)
    assert text.count("The other 285 weights") == 2 and "The other 885 sites" in text
    assert all(f">layers/{i}/w<" in page for i in range(300))
    assert "300 weights with clipped values" in text and "2 groups of zeros" in text
    assert len(page) < 520_000


def test_a_page_of_numbers_that_are_none():
    strange = report(weight("a", math.nan), weight("b", math.inf), weight("c", -math.inf))
    text = " ".join(Tags(dashboard(strange).html).text)
    assert "not a number" in text and "exact" in text and "-inf" in text and "nan" not in text
    assert "nan%" not in dashboard(strange).html
    Tags(dashboard(dataclasses.replace(report(), macs=math.nan)).html)


def test_a_page_is_written_and_shown_in_a_notebook(tmp_path, quantized):
    page = dashboard(quantized)
    page.save(tmp_path / "model.html")
    assert (tmp_path / "model.html").read_text("utf-8") == page.html
    ((tag, attributes),) = Tags(page._repr_html_()).tags
    assert tag == "iframe" and attributes["srcdoc"] == page.html and "sandbox" in attributes
    assert html.unescape(repr(page)).startswith("Dashboard('Quantized model', ")
    assert dashboard(quantized).html == page.html


def test_measurements_of_another_plan_or_model_are_refused(quantized, measurements):
    """A comparison has the paths and the formats of the model, and so has an explanation."""
    plan, report = quantized.plan, quantized.report
    other = jqx.make_plan(f, W8)(PARAMS, W)
    comparison = jqx.compare(f, other)(PARAMS, W)
    explanation = jqx.explain(f, PARAMS, W, plan=other)
    for name, value in {"comparison": comparison, "explanation": explanation}.items():
        with pytest.raises(ValueError, match=f"`{name}` is of another plan than the plan") as error:
            dashboard(quantized, **{name: value})
        text = str(error.value)
        assert f"given:    <b>a</b> as float x int8 per_channel in `{name}`" in text
        assert "expected: float x int4 per_group(16, tail=True) mse" in text
        assert "of the model\n  fix:      pass jqx." in text
    fewer = dataclasses.replace(comparison, sites=measurements["comparison"].sites[:1])
    with pytest.raises(ValueError, match=r"b & c as float, or no contraction, in `comparison`"):
        dashboard(plan, comparison=fewer)
    strange = [dataclasses.replace(site, path="head") for site in comparison.sites]
    with pytest.raises(ValueError, match="`comparison` is of another model"):
        dashboard(report, comparison=dataclasses.replace(comparison, sites=tuple(strange)))
    strangers = sensitivities({"head": 1.0})
    assignment = dataclasses.replace(measurements["assignment"], schemes={"head": "int8"})
    for name, value in {"sensitivities": strangers, "assignment": assignment}.items():
        for model in (quantized, report):
            with pytest.raises(ValueError, match=f"`{name}` is of another model.") as error:
                dashboard(model, **{name: value})
            assert f"the paths 'head' in `{name}`" in str(error.value)
            assert "such as" in str(error.value) and "'<b>a</b>', 'b & c'" in str(error.value)


def test_a_page_says_what_was_measured_with_another_plan(quantized, measurements):
    other = jqx.diagnostics.sensitivity(f, W8, estimate="weight_error")(PARAMS, W)
    text = " ".join(Tags(dashboard(quantized, sensitivities=other).html).text)
    assert "another plan than that of this model: the formats of 2 weights differ" in text
    assert "float x int8 per_channel" in text
    text = " ".join(Tags(dashboard(quantized, **measurements).html).text)
    assert "another plan" not in text and "Sections are of the plan of this model" in text
    assert "Of the candidates of the search: this model may have other formats." in text


def test_measurements_of_parts_and_of_more_axes_are_of_one_model():
    """A split weight is one weight in a plan without splits; batches may have more axes."""

    def f(p, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]

    p, x = {"w": normal(0, 2, 8, 8)}, normal(1, 4, 8)
    policy = jqx.presets.w8a8_dynamic()
    plan = jqx.make_plan(f, policy)(p, x)
    parts = jqx.Policy({"w[0]": "int4", "w[1]": "int8"})
    costs = jqx.diagnostics.sensitivity(f, parts, estimate="weight_error")(p, x)
    assert {row.path for row in costs.ranked} == {"w[0:1]", "w[1:2]"}
    dashboard(plan, p, sensitivities=costs, comparison=jqx.compare(f, policy)(p, x[None]))


def test_what_is_no_model_or_no_result_is_refused(quantized):
    with pytest.raises(TypeError, match=r"(?s)`model` is not a quantized model.*Report, or a Plan"):
        dashboard(PARAMS)
    with pytest.raises(ValueError, match="`params` is passed without a plan"):
        dashboard(quantized, PARAMS)
    for name in ("comparison", "sensitivities", "explanation", "assignment"):
        with pytest.raises(TypeError, match=f"`{name}` is not a"):
            dashboard(quantized, **{name: "x"})
    with pytest.raises(TypeError, match="`title`"):
        dashboard(quantized, title=None)


# Pictures

LAYERS = {"a": W, "b": W.at[0, 0].set(50.0)}


def layers(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


@pytest.fixture(scope="module")
def compared():
    policies = {"8": W8, "4": INT4}
    return {name: jqx.compare(layers, x)(LAYERS, W) for name, x in policies.items()}


def names_of(axis):
    return [label.get_text() for label in axis.get_yticklabels()]


def title(axis):
    return axis.get_title(loc="left")


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def at_right(axis):
    return [text.get_text() for text in axis.texts]


def test_a_histogram_has_all_values_and_a_line_for_each_code():
    q = jqx.QTensor.quantize(W, jqx.QSpec(jnp.int4, jqx.per_axis(1)))
    axis = plots.histogram(W, q).axes[0]
    assert sum(bar.get_height() for bar in axis.patches) == W.size
    codes = {float(line.get_xdata()[0]) for line in axis.lines}
    assert set(np.unique(q.values)) <= codes <= {float(i) for i in range(-8, 8)}
    assert axis.get_xlim()[0] >= -9 and axis.get_xlim()[1] <= 9
    assert title(axis) == "int4 per_axis(1)"


def test_a_legend_says_what_is_clipped():
    q = jqx.QTensor.quantize(W, jqx.QSpec(jnp.int4, jqx.per_axis(1)))
    clipped = dataclasses.replace(q, scale=q.scale / 2)
    axis = plots.histogram(W, clipped).axes[0]
    assert legend(axis)[0] == "values" and legend(axis)[1].endswith("codes in use")
    share = 100 * measure(W, clipped).clipped
    assert legend(axis)[2] == f"ends of int4: {share:.2g} % of values are clipped"


def test_a_histogram_of_zero_points_and_of_a_codebook():
    spec = jqx.QSpec(jnp.uint8, jqx.per_axis(1), symmetric=False)
    axis = plots.histogram(W + 3, jqx.QTensor.quantize(W + 3, spec)).axes[0]
    assert sum(bar.get_height() for bar in axis.patches) == W.size
    nf4 = jqx.QTensor.quantize(W, jqx.QSpec(jqx.numerics.nf4, jqx.per_block({0: 16, 1: 1})))
    axis = plots.histogram(W, nf4, title="a title").axes[0]
    assert title(axis) == "a title"
    lines = sorted({round(float(line.get_xdata()[0]), 3) for line in axis.lines})
    assert len(lines) == 16 and lines[0] == -1.0 and lines[-1] == 1.0


def test_an_outlier_is_a_point_far_from_its_whisker():
    axis = plots.ranges(LAYERS).axes[0]
    largest = max(float(np.max(line.get_xdata())) for line in axis.lines)
    assert largest == 50.0
    assert names_of(axis) == ["a", "b"] and axis.yaxis_inverted()
    whiskers = axis.collections[0].get_segments()
    expected = np.percentile(np.asarray(LAYERS["b"]), [1, 99])
    np.testing.assert_array_equal(whiskers[1][:, 0], expected)
    assert {"median", "1st to 99th percentile", "smallest and largest"} < set(legend(axis))


def test_ranges_are_of_finite_values_and_say_how_many_are_not():
    q = jqx.QTensor.quantize(W, jqx.QSpec(jnp.int8, jqx.per_axis(1)))
    arrays = {"q": q, "nan": W.at[0, :2].set(jnp.nan), "none": jnp.full((2,), jnp.inf)}
    axis = plots.ranges(arrays).axes[0]
    assert names_of(axis) == ["q", "nan (2 not finite)", "none (2 not finite)"]


def test_bars_are_as_long_as_the_ratio(compared):
    comparison = compared["8"]
    axis = plots.sqnr_bars(comparison).axes[0]
    ratios = [row.local_sqnr for row in comparison.sites]
    np.testing.assert_allclose([bar.get_width() for bar in axis.patches], ratios)
    np.testing.assert_allclose(axis.lines[0].get_xdata(), [row.sqnr for row in comparison.sites])
    assert at_right(axis) == [f"{x:.1f}" for x in ratios]
    assert title(axis) == "SQNR of 2 sites, float x int8 per_channel"
    assert legend(axis) == ["this site alone", "with all before it"]
    one = jqx.report(jqx.make_plan(layers, W8)(LAYERS, W), LAYERS)
    axis = plots.sqnr_bars(one).axes[0]
    widths = [bar.get_width() for bar in axis.patches]
    np.testing.assert_allclose(widths, [row.sqnr for row in one.weights])
    assert title(axis) == "SQNR of 2 weights, int8 per_axis(1)"


def test_bars_of_what_is_exact_and_of_what_is_no_number():
    strange = report(weight("a", math.inf), weight("b", math.nan), weight("c", -math.inf, "nf4"))
    axis = plots.sqnr_bars(strange).axes[0]
    assert at_right(axis) == ["exact", "not a number", "-inf"]
    assert legend(axis) == ["int4 per_group(32) (2)", "nf4 (1)", "exact"]
    assert len({bar.get_facecolor() for bar in axis.patches[:3]}) == 2


def test_names_sorted_as_text_are_shown_in_natural_order():
    paths = sorted(f"layers/{i}/w" for i in range(12))
    axis = plots.sqnr_bars(report(*map(weight, paths))).axes[0]
    assert names_of(axis) == [f"layers/{i}" for i in range(12)]
    assert axis.get_ylabel() == "…/w"
    unsorted = ["head", "b", "a"]
    assert names_of(plots.sqnr_bars(report(*map(weight, unsorted))).axes[0]) == unsorted


def test_what_names_share_is_not_repeated():
    paths = [f"params/layers/{i}/{kind}/kernel" for i in range(2) for kind in ("q", "k")]
    axis = plots.sqnr_bars(report(*map(weight, paths))).axes[0]
    assert names_of(axis) == ["layers/0/q", "k", "layers/1/q", "k"]
    assert axis.get_ylabel() == "params/…/kernel"


def test_of_300_tensors_layers_and_the_worst_have_names():
    rows = [weight(name, 20 + i / 100) for i, name in enumerate(DEEP)]
    rows[100] = weight(DEEP[100], 3.0)
    figure = plots.sqnr_bars(report(*rows))
    axis = figure.axes[0]
    assert figure.get_size_inches()[1] < 18 and len(axis.patches) >= 296
    assert len(names_of(axis)) <= 44 and "layers/41" in names_of(axis)
    places, sizes = axis.get_yticks(), {label.get_fontsize() for label in axis.get_yticklabels()}
    points = 72 * 15 / len(DEEP)
    assert min(np.diff(places)) * points > max(sizes) >= 6
    assert any(text.startswith("3.0") and "attn/k" in text for text in at_right(axis))
    assert "296 rows in groups" in axis.get_ylabel()
    flat = plots.sqnr_bars(report(*(weight(f"w{i}") for i in range(296)))).axes[0]
    assert names_of(flat)[:2] == ["w0", "w2"] and "one of 2 with its name" in flat.get_ylabel()


def test_bars_of_costs_begin_with_the_worst():
    costs = sensitivities({f"x/{i}/w": 2.0**-i for i in range(300)})
    axis = plots.sensitivity_bars(costs).axes[0]
    assert names_of(axis)[:2] == ["x/0", "x/1"] and names_of(axis)[-1] == "250 others, together"
    assert [bar.get_width() for bar in axis.patches] == [row.cost for row in costs.ranked[:50]]
    assert at_right(axis)[0] == "50.0 %" and "fisher" in title(axis)


def test_a_heat_map_has_a_cell_for_each_site_and_scheme(compared):
    figure = plots.heat_map(compared)
    axis = figure.axes[0]
    image = axis.images[0].get_array()
    assert image.shape == (2, 2) and (image[:, 0] > image[:, 1]).all()
    pairs = zip(compared["8"].sites, compared["4"].sites, strict=True)
    values = [row.local_sqnr for pair in pairs for row in pair]
    assert [text.get_text() for text in axis.texts] == [f"{x:.1f}" for x in values]
    assert names_of(axis) == ["a", "b"]
    other = jqx.compare(lambda p, x: x @ p["a"], W8)(LAYERS, W)
    with pytest.raises(ValueError, match="different sites"):
        plots.heat_map({"8": compared["8"], "other": other})


def test_a_heat_map_of_300_sites_has_no_numbers_and_hatches_what_never_ran():
    rows = tuple(map(site, DEEP))
    rows = (dataclasses.replace(rows[0], local_sqnr=math.nan), *rows[1:])
    axis = plots.heat_map({"w4": Comparison(rows, site("(result)"))}).axes[0]
    assert not axis.texts and legend(axis) == ["never ran, or not a number"]
    assert len(axis.patches) >= 1 and "layers/41" in names_of(axis)


def test_the_front_and_what_it_is_beside():
    assignment = search(layers, W8, {"int8": W8, "int4": INT4}, Bytes(1800))(LAYERS, W)
    axis = plots.front(assignment).axes[0]
    assert [text.get_text() for text in axis.texts] == ["int8", "int4"]
    assert axis.lines[1].get_xdata()[0] == assignment.bytes
    assert axis.lines[2].get_xdata()[0] == 1800
    assert legend(axis)[-2:] == ["the budget", "one scheme for all, measured"]
    shown = axis.xaxis.get_major_formatter()(1800, None)
    assert shown == f"1.8 kB\n{1800 / assignment.bytes * assignment.bits:.2g}"


def test_every_picture_is_drawn_in_the_axes_given(compared):
    q = jqx.QTensor.quantize(W, jqx.QSpec(jnp.int4))
    assignment = search(layers, W8, {"int8": W8}, Bytes(2500))(LAYERS, W)
    ways = {
        "histogram": (W, q),
        "ranges": (LAYERS,),
        "sqnr_bars": (compared["8"],),
        "sensitivity_bars": (sensitivities({"a": 1.0}),),
        "heat_map": (compared,),
        "front": (assignment,),
    }
    sheet = Figure(figsize=(12, 8), layout="constrained")
    for (name, args), axis in zip(ways.items(), sheet.subplots(2, 3).ravel(), strict=True):
        assert getattr(plots, name)(*args, ax=axis) is sheet
        assert axis.has_data() and title(axis)
    inside = Figure().subfigures(1, 2)[0]
    assert plots.ranges(LAYERS, ax=inside.subplots()) is inside.figure
    with pytest.raises(TypeError, match="`ax` is not an Axes"):
        plots.ranges(LAYERS, ax=sheet)


@pytest.mark.parametrize("draw", [plots.ranges, plots.heat_map])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({})


def test_what_is_no_qtensor_is_refused():
    with pytest.raises(TypeError, match="q"):
        plots.histogram(W, W)
    with pytest.raises(ValueError, match="different shapes"):
        plots.histogram(W, jqx.QTensor.quantize(W[:4], jqx.QSpec(jnp.int8)))


def test_colour_blind_readers_can_distinguish_the_colors():
    """Luminance alone orders the colour map: Rec. 709, as without any hue."""
    image = plots.heat_map({"w4": Comparison((site("a"),), site("r"))}).axes[0].images[0]
    colors = image.get_cmap()(np.linspace(0, 1, 64))[:, :3]
    assert (np.diff(colors @ [0.2126, 0.7152, 0.0722]) > 0).all()


def test_pictures_are_written_without_a_display_and_jqx_needs_no_matplotlib(tmp_path):
    plots.ranges(LAYERS).savefig(tmp_path / "ranges.png")
    assert (tmp_path / "ranges.png").stat().st_size > 1000
    code = (
        "import sys, jqx; plots = jqx.diagnostics.plots; names = dir(plots)\n"
        "assert 'front' in names and not hasattr(plots, 'nothing')\n"
        "assert 'matplotlib' not in sys.modules\n"
        "assert plots.front.__name__ == 'front' and 'matplotlib' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_notebook_shows_a_picture_without_pyplot():
    picture = plots.ranges({"w": np.arange(9.0)})
    assert picture._repr_png_().startswith(b"\x89PNG\r\n")
