"""`calibrate_batches`: one after another is all at once."""

import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from .models import mlp, mlp_params, normal, plan_of

BATCHES = [normal(seed, rows, 16) for seed, rows in enumerate((7, 7, 3))]


def test_batches_are_observed_and_merged():
    params = mlp_params()
    plan = plan_of(mlp, jqx.presets.w8a8(), params, BATCHES[0])
    found = jqx.calibrate_batches(mlp, plan, params, iter(BATCHES), progress=False)
    _, expected = jqx.calibrate(mlp, plan)(params, jnp.concatenate(BATCHES))
    assert found.keys() == expected.keys() and len(found) > 1
    for key, stats in expected.items():
        np.testing.assert_allclose(found[key].largest, stats.largest, rtol=1e-5)
        assert int(found[key].observed) == 3


def test_parameters_may_stand_anywhere():
    f = lambda x, w, y, v: (x @ w + y) @ v  # noqa: E731
    x, w, y, v = normal(0, 3, 4), normal(1, 4, 4), normal(2, 1, 4), normal(3, 4, 2)
    plan = jqx.make_plan(f, jqx.presets.w8a8(), params=(1, 3))(x, w, y, v)
    found = jqx.calibrate_batches(f, plan, (w, v), [(x, y)], progress=False)
    _, expected = jqx.calibrate(f, plan)(x, w, y, v)
    for key, stats in expected.items():
        np.testing.assert_allclose(found[key].largest, stats.largest, rtol=1e-6)


def test_it_shows_a_bar_where_asked(capsys):
    plan = plan_of(mlp, jqx.presets.w8a8(), mlp_params(), BATCHES[0])
    jqx.calibrate_batches(mlp, plan, mlp_params(), BATCHES, progress=False)
    assert capsys.readouterr().err == ""
    jqx.calibrate_batches(mlp, plan, mlp_params(), BATCHES)
    assert "3/3" in capsys.readouterr().err


def test_bad_arguments_are_refused():
    plan = plan_of(mlp, jqx.presets.w8a8(), mlp_params(), BATCHES[0])
    wider = {**mlp_params(), "v": jnp.ones((6, 24))}
    for args, error, fact in [
        ((mlp, plan, {}, []), ValueError, "there is no batch"),
        ((3, plan, {}, []), TypeError, "`f` is not a function"),
        ((mlp, "plan", {}, []), TypeError, "`plan`"),
        ((mlp, plan, {}, 3), TypeError, "`batches`"),
        ((mlp, plan, wider, BATCHES), ValueError, "made for another function"),
    ]:
        with pytest.raises(error, match=fact):
            jqx.calibrate_batches(*args, progress=False)
