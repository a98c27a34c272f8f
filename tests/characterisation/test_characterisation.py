"""jqx does what is recorded: plans, codes, converted programs, sums, what algorithms choose."""

import jax
import pytest

from .cases import (
    ALGORITHMS,
    PRESETS,
    cases,
    codes_of,
    forget,
    kernels_of,
    learned,
    plan_of,
    policies,
)
from .comparisons import check_form, check_learned
from .functions import MODELS
from .products import product_sums
from .record import STORE, choices
from .wide import TARGETS, WIDE, wide_form

IS_SAME_JAX = STORE.jax == jax.__version__

same_jax = pytest.mark.skipif(
    not IS_SAME_JAX,
    reason=f"recorded with jax {STORE.jax}, and this is {jax.__version__}",
)

QUICK = {
    "mlp": "bias_correction",
    "tied": "default",
    "several_axes": "awq",
    "conv2d": "equalize",
    "scanned": "gptq",
    "branches": "adaround",
    "loop": "auto_round",
    "updated": "smooth_quant",
    "nnx_module": "nearest",
    "decoder": "rotate",
}
"""For each algorithm a function on which it is quick."""

_DYNAMIC = [preset for preset in PRESETS if preset not in ("w8a8", "fp8")]

CHOSEN = {name: _DYNAMIC[i % len(_DYNAMIC)] for i, name in enumerate(MODELS)}
CHOSEN |= {"conv2d": "w8a8", "nnx_module": "fp8"}
"""Each function with one preset: what runs by default. Static scales need a calibration."""

WIDE_CASES = [(kind, preset, target) for kind in WIDE for preset in PRESETS for target in TARGETS]


def slow_unless(values, chosen):
    """The values as parameters; tests of those that are not chosen are slow."""
    return [x if x in chosen else pytest.param(*x, marks=pytest.mark.slow) for x in values]


@pytest.fixture(scope="module", autouse=True)
def _forgets():
    yield
    forget()


@pytest.mark.parametrize(("name", "policy"), slow_unless(cases(), CHOSEN.items()))
def test_plans(name, policy):
    key = f"{name}/{policy}: plan"
    check_form(key, STORE.form(key), plan_of(name, policy))


@pytest.mark.parametrize(
    ("name", "policy"), slow_unless(cases(), [(name, CHOSEN[name]) for name in QUICK])
)
def test_weights_rounded_to_nearest(name, policy):
    key = f"{name}/{policy}: codes"
    check_form(key, STORE.form(key), codes_of(name, policy))


@same_jax
@pytest.mark.parametrize(("name", "policy"), slow_unless(cases(), CHOSEN.items()))
def test_contractions_and_kernels_of_converted_functions(name, policy):
    check_kernels(name, policy, "nearest")


def check_kernels(name, policy, algorithm):
    key = f"{name}/{policy}/{algorithm}: kernels"
    check_form(key, STORE.form(key), kernels_of(name, policy, algorithm))


@same_jax
@pytest.mark.parametrize(
    ("kind", "preset", "target"), slow_unless(WIDE_CASES, WIDE_CASES[:: len(PRESETS) + 1])
)
def test_kernels_of_wide_weights(kind, preset, target):
    key = f"{kind}/{preset}/{target}: wide"
    check_form(key, STORE.form(key), wide_form(kind, preset, target))


def test_sums_of_integers():
    for name, sums in product_sums().items():
        check_form(name, STORE.form(f"{name}: integers"), sums)


def test_what_each_algorithm_chooses_for_one_function():
    assert set(QUICK.values()) == set(ALGORITHMS)
    assert set(CHOSEN.values()) == set(PRESETS)
    check_chosen((name, CHOSEN[name], algorithm) for name, algorithm in QUICK.items())


def check_chosen(chosen):
    """Compares what algorithms chose, and then the programs."""
    chosen = list(chosen)
    check_learned(
        (
            f"{name}/{policy}/{algorithm}",
            choices(algorithm, f"{name}/{policy}"),
            learned(name, policy, algorithm),
        )
        for name, policy, algorithm in chosen
    )
    for name, policy, algorithm in chosen * IS_SAME_JAX:
        check_kernels(name, policy, algorithm)


@same_jax
@pytest.mark.sweep
@pytest.mark.parametrize("policy", [*PRESETS, "steps", "tables"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_each_algorithm_chooses_for_all(algorithm, policy):
    names = [name for name in MODELS if policy in policies(name)]
    check_chosen((name, policy, algorithm) for name in names)
    forget()
