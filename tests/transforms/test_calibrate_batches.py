"""`calibrate_batches`: one after another is all at once."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..models.transforms import eighths, mlp, plan_of

BATCHES = [eighths(seed, rows, 16) for seed, rows in enumerate((7, 7, 3))]
PARAMS = {"w": eighths(3, 16, 24), "b": eighths(4, 24), "v": eighths(5, 5, 24)}


def test_batches_are_observed_and_merged():
    plan = plan_of(mlp, jqx.presets.w8a8(), PARAMS, BATCHES[0])
    found = jqx.calibrate_batches(mlp, plan, PARAMS, iter(BATCHES), progress=False)
    _, expected = jqx.calibrate(mlp, plan)(PARAMS, jnp.concatenate(BATCHES))
    assert found.keys() == expected.keys() and len(found) > 1
    for key, stats in expected.items():
        np.testing.assert_array_equal(found[key].largest, stats.largest)
        assert int(found[key].observed) == 3


def test_parameters_may_stand_anywhere():
    f = lambda x, w, y, v: (x @ w + y) @ v  # noqa: E731
    x, w, y, v = eighths(0, 3, 4), eighths(1, 4, 4), eighths(2, 1, 4), eighths(3, 4, 2)
    plan = jqx.make_plan(f, jqx.presets.w8a8(), params=(1, 3))(x, w, y, v)
    found = jqx.calibrate_batches(f, plan, (w, v), [(x, y)], progress=False)
    _, expected = jqx.calibrate(f, plan)(x, w, y, v)
    for key, stats in expected.items():
        np.testing.assert_array_equal(found[key].largest, stats.largest)


def test_parameters_may_have_leaves_that_are_no_arrays():
    f = lambda params, x: params["activation"](x @ params["w"]) @ params["w"].T  # noqa: E731
    params = {"w": eighths(0, 4, 4), "activation": jax.nn.relu}
    x = eighths(1, 3, 4)
    plan = jqx.make_plan(f, jqx.presets.w8a8())(params, x)
    found = jqx.calibrate_batches(f, plan, params, [x, x], progress=False)
    _, expected = jqx.calibrate(f, plan)(params, x)
    for key, stats in expected.items():
        np.testing.assert_array_equal(found[key].largest, stats.largest)


def test_it_shows_a_bar_where_asked(capsys, monkeypatch):
    plan = plan_of(mlp, jqx.presets.w8a8(), PARAMS, BATCHES[0])
    jqx.calibrate_batches(mlp, plan, PARAMS, BATCHES, progress=False)
    assert capsys.readouterr().err == ""
    jqx.calibrate_batches(mlp, plan, PARAMS, BATCHES)  # standard error is no terminal here
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    jqx.calibrate_batches(mlp, plan, PARAMS, BATCHES)
    assert "3/3" in capsys.readouterr().err


def test_bad_arguments_are_refused():
    plan = plan_of(mlp, jqx.presets.w8a8(), PARAMS, BATCHES[0])
    wider = {**PARAMS, "v": jnp.ones((6, 24))}
    for args, error, fact in [
        ((mlp, plan, {}, []), ValueError, "there is no batch"),
        ((3, plan, {}, []), TypeError, "`f` is not a function"),
        ((mlp, "plan", {}, []), TypeError, "`plan`"),
        ((mlp, plan, {}, 3), TypeError, "`batches`"),
        ((mlp, plan, wider, BATCHES), ValueError, "made for another function"),
    ]:
        with pytest.raises(error, match=fact):
            jqx.calibrate_batches(*args, progress=False)
