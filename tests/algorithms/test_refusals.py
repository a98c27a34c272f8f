"""Options of algorithms that have no meaning, and chains in a wrong order, are refused."""

import numpy as np
import pytest

from jqx.algorithms import (
    adaround,
    auto_round,
    awq,
    bias_correction,
    chain,
    eora,
    equalize,
    gptq,
    loftq,
    rotate,
    smooth_quant,
)

from ..oracles.refusals import assert_error

VALUES = [
    (gptq, {"order": "desc"}, "'groups', 'activation', 'given'"),
    (gptq, {"groups": None}, "'static', 'dynamic'"),
    (gptq, {"propagation": "gptq"}, "'none', 'qep', 'gptaq'"),
    (gptq, {"ill_conditioned": "ignore"}, "'error', 'round'"),
    (gptq, {"unsupported": "skip"}, "'error', 'round'"),
    (gptq, {"offload": "memory"}, "`offload` is out of range"),
    (adaround, {"offload": "memory"}, "`offload` is out of range"),
    (auto_round, {"offload": "memory"}, "`offload` is out of range"),
    (adaround, {"propagation": "gptaq"}, "`propagation` is out of range"),
    (gptq, {"least_inputs": -1}, "0 or more"),
    (gptq, {"damping": 0}, "above 0"),
    (gptq, {"damping": "1%"}, "above 0"),
    (gptq, {"propagation": "qep", "strength": 2.0}, "0 or more and at most 1"),
    (gptq, {"factors": (0.9, 0.0)}, "above 0 and up to 2"),
    (gptq, {"factors": ("0.9",)}, "above 0 and up to 2"),
    (gptq, {"sweeps": -1}, "a whole number"),
    (adaround, {"steps": 0}, "`steps` is out of range"),
    (adaround, {"learning_rate": -1.0}, "`learning_rate` is out of range"),
    (adaround, {"pull": -0.1}, "`pull` is out of range"),
    (auto_round, {"steps": 0}, "`steps` is out of range"),
    (auto_round, {"learning_rate": -1.0}, "`learning_rate` is out of range"),
    (eora, {"rank": 0}, "1 or more"),
    (loftq, {"rounds": 0}, "loftq: `rounds` is out of range"),
    (rotate, {"block": 6}, "Hadamard"),
    (rotate, {"block": 1}, "Hadamard"),
    (smooth_quant, {"strength": 1.5}, "0 or more and at most 1"),
    (equalize, {"steps": 0}, "1 or more"),
    (awq, {"steps": 1}, "2 or more"),
    (auto_round, {"blocks": "("}, "`blocks` is not a regular expression"),
    (gptq, {"strength": 0.5}, "propagation='none'"),
    (gptq, {"groups": "dynamic", "order": "activation"}, "exclude each other"),
    (gptq, {"groups": "dynamic", "factors": (0.9,)}, "exclude each other"),
    (gptq, {"propagation": "qep", "sequential": False}, "exclude each other"),
    (gptq, {"offload": True, "sequential": False}, "`offload` and `sequential` exclude each other"),
]
TYPES = [
    (gptq, {"factors": 0.9}, "above 0 and up to 2"),
    (gptq, {"sweeps": True}, "a whole number"),
    (auto_round, {"steps": 2.5}, "steps"),
    (eora, {"rank": 2.5}, "`rank`"),
    (rotate, {"block": 2.5}, "`block`"),
    (rotate, {"seed": None}, "`seed`"),
    (gptq, {"calibrator": "mse"}, ""),
    (gptq, {"bits": 4}, ""),
    (gptq, {"checkpoint": 3}, ""),
    (gptq, {"weight": np.ones(3)}, "`weight` is not a function"),
    (adaround, {"calibrator": "mse"}, "`calibrator`"),
    (auto_round, {"calibrator": "mse"}, "`calibrator`"),
    (auto_round, {"blocks": 3}, "`blocks`"),
    (bias_correction, {"weight": 3}, "`weight`"),
    (eora, {"weight": 3}, "`weight`"),
    (rotate, {"offline": 1}, "`offline`"),
    (smooth_quant, {"weight": 3}, "`weight`"),
    (smooth_quant, {"runtime_scales": 1}, "`runtime_scales`"),
    (equalize, {"absorb": 2}, "absorb"),
    (awq, {"clip": 1}, "True or False"),
    (awq, {"runtime_scales": None}, "`runtime_scales`"),
]


@pytest.mark.parametrize(
    ("algorithm", "options", "words", "error"),
    [*((*row, ValueError) for row in VALUES), *((*row, TypeError) for row in TYPES)],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", str(x)),
)
def test_options_that_have_no_meaning_are_refused(algorithm, options, words, error):
    name = algorithm.__name__
    assert_error(lambda: algorithm(**options), f"jqx.algorithms.{name}: ", words, error=error)


def test_chains_without_a_meaning_are_refused():
    for make, error, words in (
        (lambda: auto_round(60), TypeError, "pass options by name"),
        (lambda: chain(), ValueError, "there is none"),
        (lambda: chain(gptq(), awq()), ValueError, "in the wrong order"),
        (lambda: chain(bias_correction(), gptq()), ValueError, "in the wrong order"),
        (lambda: chain(3), TypeError, "argument 0"),
        (lambda: chain(chain(awq())), TypeError, "argument 0"),
    ):
        assert_error(make, "jqx.algorithms.", words, error=error)
