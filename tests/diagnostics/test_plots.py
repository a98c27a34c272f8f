"""Pictures: what is drawn are the numbers, nothing is shown, faults are to be seen."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.diagnostics import Bytes, plots, search

from ..arrays import normal

W = normal(0, 32, 32)
W8, W4 = jqx.presets.w8a16(), jqx.presets.w8a16(weight={"qtype": jnp.int4})


def f(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


PARAMS = {"a": W, "b": W.at[0, 0].set(50.0)}


def test_a_histogram_has_all_values_and_a_line_for_each_code():
    q = jqx.QTensor.quantize(W, jqx.QSpec(jnp.int4, jqx.per_axis(1)))
    axis = plots.histogram(W, q).axes[0]
    assert sum(bar.get_height() for bar in axis.patches) == W.size
    codes = {float(line.get_xdata()[0]) for line in axis.lines}
    assert set(np.unique(q.values)) <= codes <= {float(i) for i in range(-8, 8)}
    assert axis.get_xlim()[0] >= -9 and axis.get_xlim()[1] <= 9


def test_a_histogram_of_zero_points_and_of_a_codebook():
    spec = jqx.QSpec(jnp.uint8, jqx.per_axis(1), symmetric=False)
    axis = plots.histogram(W + 3, jqx.QTensor.quantize(W + 3, spec)).axes[0]
    assert sum(bar.get_height() for bar in axis.patches) == W.size
    nf4 = jqx.QTensor.quantize(W, jqx.QSpec(jqx.numerics.nf4, jqx.per_block({0: 16, 1: 1})))
    axis = plots.histogram(W, nf4, title="nf4").axes[0]
    assert axis.get_title() == "nf4"
    lines = sorted({round(float(line.get_xdata()[0]), 3) for line in axis.lines})
    assert len(lines) == 16 and lines[0] == -1.0 and lines[-1] == 1.0


def test_an_outlier_is_a_point_far_from_its_whisker():
    axis = plots.ranges(PARAMS).axes[0]
    largest = max(float(np.max(line.get_ydata())) for line in axis.lines)
    assert largest == 50.0
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b"]


def test_bars_have_the_height_of_the_ratio():
    found = jqx.compare(f, W8)(PARAMS, W)
    axis = plots.sqnr_bars(found).axes[0]
    heights = [bar.get_height() for bar in axis.patches]
    np.testing.assert_allclose(heights, [row.local_sqnr for row in found.sites])
    np.testing.assert_allclose(axis.lines[0].get_ydata(), [row.sqnr for row in found.sites])
    report = jqx.report(jqx.make_plan(f, W8)(PARAMS, W), PARAMS)
    heights = [bar.get_height() for bar in plots.sqnr_bars(report).axes[0].patches]
    np.testing.assert_allclose(heights, [row.sqnr for row in report.weights])


def test_a_heat_map_has_a_cell_for_each_site_and_scheme():
    found = {name: jqx.compare(f, policy)(PARAMS, W) for name, policy in {"8": W8, "4": W4}.items()}
    figure = plots.heat_map(found)
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (2, 2) and (image[0] > image[1]).all()
    other = jqx.compare(lambda p, x: x @ p["a"], W8)(PARAMS, W)
    with pytest.raises(ValueError, match="different sites"):
        plots.heat_map({"8": found["8"], "other": other})


def test_the_front_and_what_it_is_beside():
    found = search(f, W8, {"int8": W8, "int4": W4}, Bytes(1800))(PARAMS, W)
    axis = plots.front(found).axes[0]
    assert [text.get_text() for text in axis.texts] == ["int8", "int4"]
    assert axis.lines[1].get_xdata()[0] == found.bytes


@pytest.mark.parametrize("draw", [plots.ranges, plots.heat_map])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({})


def test_what_is_no_qtensor_is_refused():
    with pytest.raises(TypeError, match="q"):
        plots.histogram(W, W)
    with pytest.raises(ValueError, match="different shapes"):
        plots.histogram(W, jqx.QTensor.quantize(W[:4], jqx.QSpec(jnp.int8)))


def test_pictures_are_written_without_a_display_and_jqx_needs_no_matplotlib(tmp_path):
    plots.ranges(PARAMS).savefig(tmp_path / "ranges.png")
    assert (tmp_path / "ranges.png").stat().st_size > 1000
    code = "import sys, jqx; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
