"""Bars are on standard error, where that is a terminal; and nothing depends on them."""

import importlib.util
import sys

import jax.numpy as jnp
import pytest

import jqx
from jqx._src.transforms import calibrate

W, X = jnp.eye(4), jnp.ones((2, 4))
PLAN = jqx.make_plan(lambda w, x: x @ w, jqx.presets.w8a8())(W, X)


def make_terminal(monkeypatch):
    """Makes a terminal of what `capsys` has put in the place of standard error."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def advanced(**options):
    """What a bar of three is moved on by."""
    with calibrate.advancing("count", "item", 3, True, **options) as advance:
        advance()
        advance(2)
    return [*calibrate.with_bar("go through", "item", (1, 2))]


def test_a_terminal_is_shown_how_far_it_is(monkeypatch, capsys):
    make_terminal(monkeypatch)
    assert advanced() == [1, 2]
    shown = capsys.readouterr().err
    assert "count: 100%" in shown and "3/3" in shown
    assert "go through" not in shown  # it took no second


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    assert advanced() == [1, 2]
    calibrate.tell(calibrate.progress_bar("count", "item"), "a line")
    assert jqx.calibrate_batches(lambda w, x: x @ w, PLAN, W, [X])
    assert capsys.readouterr() == ("", "")


def test_nothing_is_shown_where_it_is_not_asked_for(monkeypatch, capsys):
    make_terminal(monkeypatch)
    with calibrate.advancing("count", "item", 3, False) as advance:
        advance()
    jqx.calibrate_batches(lambda w, x: x @ w, PLAN, W, [X], progress=False)
    assert capsys.readouterr() == ("", "")


def test_tqdm_need_not_be_there(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert calibrate.progress_bar("count", "item") is None
    assert advanced() == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_a_sensitivity_shows_each_step(monkeypatch, capsys):
    make_terminal(monkeypatch)
    f = lambda w, x: x @ w  # noqa: E731
    jqx.diagnostics.sensitivity(f, PLAN)(W, X)
    assert "sensitivity: 100%" in capsys.readouterr().err
    jqx.diagnostics.sensitivity(f, PLAN, estimate="hessian", samples=3)(W, X, X)
    assert "6/6" in capsys.readouterr().err
