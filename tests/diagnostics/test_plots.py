"""Pictures: what is drawn are the numbers, nothing is shown, faults are to be seen."""

import dataclasses
import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import jqx
from jqx._src.diagnostics.report import measure
from jqx.diagnostics import (
    Bytes,
    Comparison,
    Report,
    Sensitivities,
    Sensitivity,
    SiteError,
    WeightError,
    plots,
    search,
)

from ..arrays import normal

W = normal(0, 32, 32)
W8, W4 = jqx.presets.w8a16(), jqx.presets.w8a16(weight={"qtype": jnp.int4})
PARAMS = {"a": W, "b": W.at[0, 0].set(50.0)}
KINDS = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")
DEEP = ["embed", *(f"layers/{i}/{kind}" for i in range(42) for kind in KINDS), "head"]
"""Paths of 296 weights, in the order of the model."""


def f(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


@pytest.fixture(scope="module")
def compared():
    return {name: jqx.compare(f, policy)(PARAMS, W) for name, policy in {"8": W8, "4": W4}.items()}


def weight(path, sqnr=20.0, scheme="int4 per_block({0: 32, 1: 1})"):
    return WeightError(path, scheme, 4.5, 4000, 600, -1.0, 1.0, 0.0, 0, sqnr)


def report(*weights):
    return Report(weights, 0, sites=len(weights), skipped=0, macs=1.0)


def site(name, own=20.0):
    return SiteError(name, "dot_general", (), own - 1, own, 0.99, 0.1, 0.1)


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
    axis = plots.histogram(W, dataclasses.replace(q, scale=q.scale / 2)).axes[0]
    assert legend(axis)[0] == "values" and legend(axis)[1].endswith("codes in use")
    clipped = dataclasses.replace(q, scale=q.scale / 2)
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
    axis = plots.ranges(PARAMS).axes[0]
    largest = max(float(np.max(line.get_xdata())) for line in axis.lines)
    assert largest == 50.0
    assert names_of(axis) == ["a", "b"] and axis.yaxis_inverted()
    whiskers = axis.collections[0].get_segments()
    expected = np.percentile(np.asarray(PARAMS["b"]), [1, 99])
    np.testing.assert_array_equal(whiskers[1][:, 0], expected)
    assert {"median", "1st to 99th percentile", "smallest and largest"} < set(legend(axis))


def test_ranges_are_of_finite_values_and_say_how_many_are_not():
    q = jqx.QTensor.quantize(W, jqx.QSpec(jnp.int8, jqx.per_axis(1)))
    arrays = {"q": q, "nan": W.at[0, :2].set(jnp.nan), "none": jnp.full((2,), jnp.inf)}
    axis = plots.ranges(arrays).axes[0]
    assert names_of(axis) == ["q", "nan (2 not finite)", "none (2 not finite)"]


def test_bars_are_as_long_as_the_ratio(compared):
    found = compared["8"]
    axis = plots.sqnr_bars(found).axes[0]
    own = [row.local_sqnr for row in found.sites]
    np.testing.assert_allclose([bar.get_width() for bar in axis.patches], own)
    np.testing.assert_allclose(axis.lines[0].get_xdata(), [row.sqnr for row in found.sites])
    assert at_right(axis) == [f"{x:.1f}" for x in own]
    assert title(axis) == "SQNR of 2 sites, float x int8 per_channel"
    assert legend(axis) == ["this site alone", "with all before it"]
    one = jqx.report(jqx.make_plan(f, W8)(PARAMS, W), PARAMS)
    axis = plots.sqnr_bars(one).axes[0]
    widths = [bar.get_width() for bar in axis.patches]
    np.testing.assert_allclose(widths, [row.sqnr for row in one.weights])
    assert title(axis) == "SQNR of 2 weights, int8 per_axis(1)"


def test_bars_of_what_is_exact_and_of_what_is_no_number():
    found = report(weight("a", math.inf), weight("b", math.nan), weight("c", -math.inf, "nf4"))
    axis = plots.sqnr_bars(found).axes[0]
    assert at_right(axis) == ["exact", "not a number", "-inf"]
    assert legend(axis) == ["int4 per_group(32) (2)", "nf4 (1)", "exact"]
    assert len({bar.get_facecolor() for bar in axis.patches[:3]}) == 2


def test_names_sorted_as_text_are_shown_in_natural_order():
    given = sorted(f"layers/{i}/w" for i in range(12))
    axis = plots.sqnr_bars(report(*map(weight, given))).axes[0]
    assert names_of(axis) == [f"layers/{i}" for i in range(12)]
    assert axis.get_ylabel() == "…/w"
    kept = ["head", "b", "a"]
    assert names_of(plots.sqnr_bars(report(*map(weight, kept))).axes[0]) == kept


def test_what_names_share_is_not_repeated():
    given = [f"params/layers/{i}/{kind}/kernel" for i in range(2) for kind in ("q", "k")]
    axis = plots.sqnr_bars(report(*map(weight, given))).axes[0]
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
    rows = tuple(Sensitivity(f"x/{i}/w", "dot_general", 2.0**-i) for i in range(300))
    axis = plots.sensitivity_bars(Sensitivities(rows, "fisher", None)).axes[0]
    assert names_of(axis)[:2] == ["x/0", "x/1"] and names_of(axis)[-1] == "250 others, together"
    assert [bar.get_width() for bar in axis.patches] == [row.cost for row in rows[:50]]
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
    other = jqx.compare(lambda p, x: x @ p["a"], W8)(PARAMS, W)
    with pytest.raises(ValueError, match="different sites"):
        plots.heat_map({"8": compared["8"], "other": other})


def test_a_heat_map_of_300_sites_has_no_numbers_and_hatches_what_never_ran():
    rows = tuple(map(site, DEEP))
    rows = (dataclasses.replace(rows[0], local_sqnr=math.nan), *rows[1:])
    axis = plots.heat_map({"w4": Comparison(rows, site("(result)"))}).axes[0]
    assert not axis.texts and legend(axis) == ["never ran, or not a number"]
    assert len(axis.patches) >= 1 and "layers/41" in names_of(axis)


def test_the_front_and_what_it_is_beside():
    found = search(f, W8, {"int8": W8, "int4": W4}, Bytes(1800))(PARAMS, W)
    axis = plots.front(found).axes[0]
    assert [text.get_text() for text in axis.texts] == ["int8", "int4"]
    assert axis.lines[1].get_xdata()[0] == found.bytes
    assert axis.lines[2].get_xdata()[0] == 1800
    assert legend(axis)[-2:] == ["the budget", "one scheme for all, measured"]
    shown = axis.xaxis.get_major_formatter()(1800, None)
    assert shown == f"1.8 kB\n{1800 / found.bytes * found.bits:.2g}"


def test_every_picture_is_drawn_in_the_axes_given(compared):
    q = jqx.QTensor.quantize(W, jqx.QSpec(jnp.int4))
    found = search(f, W8, {"int8": W8}, Bytes(2500))(PARAMS, W)
    costs = Sensitivities((Sensitivity("a", "dot_general", 1.0),), "fisher", None)
    ways = {
        "histogram": (W, q),
        "ranges": (PARAMS,),
        "sqnr_bars": (compared["8"],),
        "sensitivity_bars": (costs,),
        "heat_map": (compared,),
        "front": (found,),
    }
    sheet = Figure(figsize=(12, 8), layout="constrained")
    for (name, args), axis in zip(ways.items(), sheet.subplots(2, 3).ravel(), strict=True):
        assert getattr(plots, name)(*args, ax=axis) is sheet
        assert axis.has_data() and title(axis)
    inside = Figure().subfigures(1, 2)[0]
    assert plots.ranges(PARAMS, ax=inside.subplots()) is inside.figure
    with pytest.raises(TypeError, match="`ax` is not an Axes"):
        plots.ranges(PARAMS, ax=sheet)


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
    plots.ranges(PARAMS).savefig(tmp_path / "ranges.png")
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
