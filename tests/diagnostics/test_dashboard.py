"""`dashboard`: a page that stands alone, says what it was given, and what it was not."""

import dataclasses
import html
import math
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx.diagnostics import (
    Bytes,
    Comparison,
    Report,
    Sensitivities,
    Sensitivity,
    SiteError,
    WeightError,
    dashboard,
    search,
)

from ..arrays import normal

W = normal(0, 32, 32)
PARAMS = {"<b>a</b>": W, "b & c": W.at[0, 0].set(50.0), "bias": jnp.zeros(32)}
W8 = jqx.presets.w8a16()
W4 = jqx.presets.w4a16(block=16)


def f(p, x):
    return jnp.tanh(x @ p["<b>a</b>"]) @ p["b & c"] + (x @ x.T).sum() * p["bias"][None]


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
def quantized():
    return jqx.ptq(f, W4, jqx.algorithms.nearest(), progress=False)(PARAMS, [W])


@pytest.fixture(scope="module")
def found(quantized):
    """All that a page may have, each once."""
    plan = quantized.plan
    costs = jqx.diagnostics.sensitivity(f, plan, estimate="weight_error")(PARAMS, W)
    return {
        "comparison": jqx.compare(f, plan, weights=quantized.params)(PARAMS, W),
        "sensitivities": costs,
        "explanation": jqx.explain(f, quantized.params, W, plan=plan),
        "assignment": search(f, W8, {"int8": W8, "int4": W4}, Bytes(1900))(PARAMS, W),
    }


def test_a_page_has_what_it_was_given(quantized, found):
    page = dashboard(quantized, **found, title="1 < 2")
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
    for row in found["comparison"].sites:
        assert f"{row.local_sqnr:.1f} dB" in text
    bits = sum(w.bits * w.bytes_before for w in report.weights)
    assert f"{bits / sum(w.bytes_before for w in report.weights):.2f}" in seen.text
    assert f"{found['comparison'].result.sqnr:.1f} dB" in text
    assert f"{found['assignment'].measured:.4g}" in text
    assert f"{found['assignment'].bits:.2f}" in seen.text and "at most 1,900 bytes." in text
    assert quantized.plan.skipped[0].reason in text and "1 < 2" in seen.text
    done = sum(site.is_quantized for site in found["explanation"].sites)
    assert f"{done} of 3" in seen.text


def test_a_page_stands_alone_and_all_text_is_escaped(quantized, found):
    page = dashboard(quantized, **found, title="<script>").html
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


def test_a_page_says_what_it_was_not_given_and_how_to_get_it(quantized, found):
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
    for name, value in found.items():
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


def test_a_lowering_is_enough_for_what_the_chip_runs(quantized, found):
    low = found["explanation"].lowering
    page = dashboard(quantized, explanation=low)
    assert "What the chip runs" in Tags(page.html).titles
    assert f"{len(low.contractions)} contractions" in page.html


def test_sites_that_read_no_codes_are_told_even_where_the_explanation_has_no_plan(quantized, found):
    sites = tuple(
        dataclasses.replace(site, plan="", really="widened first")
        for site in found["explanation"].sites
        if site.path
    )
    explained = dataclasses.replace(found["explanation"], sites=sites, plain=("w",))
    page = " ".join(Tags(dashboard(quantized, explanation=explained).html).text)
    assert "2 quantized sites whose kernels read no codes" in page
    assert "1 weight not laid out" in page


def weight(i, sqnr):
    return WeightError(f"layers/{i}/w", "int4 per_axis(1)", 4.5, 400, 60, -1, 1, 0.01, 2, sqnr)


def test_of_300_weights_the_worst_are_unfolded_and_all_are_there():
    report = Report(tuple(weight(i, 10 + i % 97) for i in range(300)), 0, 300, 0, math.nan)
    rows = tuple(Sensitivity(f"layers/{i}/w", "dot_general", 1 / (i + 1)) for i in range(300))
    errors = tuple(
        SiteError(f"layers/{i}/w", "dot_general", (), 9.0, 10.0 + i, 1.0, 0, 0) for i in range(900)
    )
    page = dashboard(
        report,
        sensitivities=Sensitivities(rows, "fisher", 0.5),
        comparison=Comparison(errors, errors[-1]),
    ).html
    text = " ".join(Tags(page).text)
    assert text.count("The other 285 weights") == 2 and "The other 885 sites" in text
    assert all(f">layers/{i}/w<" in page for i in range(300))
    assert "300 weights with clipped values" in text and "2 groups of zeros" in text
    assert len(page) < 520_000


def test_a_page_of_numbers_that_are_none():
    report = Report((weight(0, math.nan), weight(1, math.inf), weight(2, -math.inf)), 0, 3, 0, 1.0)
    text = " ".join(Tags(dashboard(report).html).text)
    assert "not a number" in text and "exact" in text and "-inf" in text and "nan" not in text
    assert "nan%" not in dashboard(report).html
    Tags(dashboard(Report((), 0, 0, 0, math.nan)).html)


def test_a_page_is_written_and_shown_in_a_notebook(tmp_path, quantized):
    page = dashboard(quantized)
    page.save(tmp_path / "model.html")
    assert (tmp_path / "model.html").read_text("utf-8") == page.html
    ((tag, attributes),) = Tags(page._repr_html_()).tags
    assert tag == "iframe" and attributes["srcdoc"] == page.html and "sandbox" in attributes
    assert html.unescape(repr(page)).startswith("Dashboard('Quantized model', ")
    assert dashboard(quantized).html == page.html


def test_measurements_of_another_plan_or_model_are_refused(quantized, found):
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
    fewer = dataclasses.replace(comparison, sites=found["comparison"].sites[:1])
    with pytest.raises(ValueError, match=r"b & c as float, or no contraction, in `comparison`"):
        dashboard(plan, comparison=fewer)
    strange = [dataclasses.replace(site, path="head") for site in comparison.sites]
    with pytest.raises(ValueError, match="`comparison` is of another model"):
        dashboard(report, comparison=dataclasses.replace(comparison, sites=tuple(strange)))
    strangers = Sensitivities((Sensitivity("head", "dot_general", 1.0),), "fisher", None)
    assignment = dataclasses.replace(found["assignment"], schemes={"head": "int8"})
    for name, value in {"sensitivities": strangers, "assignment": assignment}.items():
        for model in (quantized, report):
            with pytest.raises(ValueError, match=f"`{name}` is of another model.") as error:
                dashboard(model, **{name: value})
            assert f"the paths 'head' in `{name}`" in str(error.value)
            assert "such as" in str(error.value) and "'<b>a</b>', 'b & c'" in str(error.value)


def test_a_page_says_what_was_measured_with_another_plan(quantized, found):
    other = jqx.diagnostics.sensitivity(f, W8, estimate="weight_error")(PARAMS, W)
    text = " ".join(Tags(dashboard(quantized, sensitivities=other).html).text)
    assert "another plan than that of this model: the formats of 2 weights differ" in text
    assert "float x int8 per_channel" in text
    text = " ".join(Tags(dashboard(quantized, **found).html).text)
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
