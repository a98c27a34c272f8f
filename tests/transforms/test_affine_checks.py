"""Entries of `affines=` that no site can use are refused alike by every transform."""

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import Affine

KEY = ":dot_general:lhs"
W, X = jnp.eye(16), jnp.ones((2, 16))


def f(w, x):
    return x @ w


PLAN = jqx.make_plan(f, jqx.presets.w8a8())(W, X)
SCALE, ZERO = jnp.full((1, 1), 0.02), jnp.zeros((1, 1), jnp.int8)
WRONG = {
    "a number": (Affine(0.02, None), TypeError, "not an array of floats"),
    "a list": (Affine([[0.02]], None), TypeError, "not an array of floats"),
    "None": (Affine(None, None), TypeError, "not an array of floats"),
    "int32": (Affine(jnp.ones((1, 1), jnp.int32), None), TypeError, "not an array of floats"),
    "bool": (Affine(np.ones((1, 1), bool), None), TypeError, "not an array of floats"),
    "an array": (SCALE, TypeError, "not a scale and zero point"),
    "a dict": ({"scale": SCALE}, TypeError, "not a scale and zero point"),
    "one part": ((SCALE,), TypeError, "not a scale and zero point"),
    "a zero point of int32": (Affine(SCALE, ZERO.astype(jnp.int32)), TypeError, "codes of int8"),
    "a zero point of floats": (Affine(SCALE, SCALE), TypeError, "codes of int8"),
    "a zero point that is a number": (Affine(SCALE, 0), TypeError, "codes of int8"),
    "a zero point of another shape": (
        Affine(SCALE, jnp.zeros((1, 3), jnp.int8)),
        ValueError,
        "`zero_point` does not fit `scale`",
    ),
    "too few axes": (Affine(jnp.full((1,), 0.02), None), ValueError, "does not have the axes"),
    "no axes": (Affine(jnp.float32(0.02), None), ValueError, "does not have the axes"),
    "a scale per contracted index": (
        Affine(jnp.full((1, 16), 0.02), None),
        ValueError,
        "varies along a contracted axis",
    ),
    "a scale of another size": (Affine(jnp.full((1, 3), 0.02), None), ValueError, "does not fit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_entry_that_does_not_fit_is_refused_alike(name):
    affine, error, words = WRONG[name]
    texts = []
    for transform in (jqx.simulate, jqx.convert):
        with pytest.raises(error, match=words) as info:
            transform(f, PLAN, {KEY: affine})(W, X)
        text = str(info.value)
        assert "fix: " in text
        texts.append(text.replace(f"jqx.{transform.__name__}", "jqx.f"))
    if "size" not in name:
        assert texts[0] == texts[1]


def test_scales_of_tokens_and_pairs_are_taken():
    for affine in ((SCALE, None), Affine(jnp.full((2, 1), 0.02), ZERO), Affine(SCALE, ZERO)):
        for transform in (jqx.simulate, jqx.convert):
            found = transform(f, PLAN, {KEY: affine})(W, X)
            np.testing.assert_allclose(found, X, rtol=1e-2)
