"""jqx does what is recorded: plans, codes, converted programs, sums, what algorithms choose."""

import jax
import pytest

from .cases import ALGORITHMS, PRESETS, cases, exact, forget, kernels, learned, policies
from .comparisons import check_form, check_learned
from .functions import MODELS
from .products import product_sums
from .record import STORE, recorded
from .wide import TARGETS, WIDE, wide_form

IS_SAME_JAX = STORE.jax == jax.__version__

same_jax = pytest.mark.skipif(
    not IS_SAME_JAX,
    reason=f"converted programs are recorded with jax {STORE.jax}, and this is {jax.__version__}",
)

QUICK = {
    "mlp": "bias_correction",
    "fused_attention": "default",
    "conv2d": "equalize",
    "scanned": "gptq",
    "branches": "auto_round",
    "loop": "adaround",
    "mapped_experts": "awq",
    "residual": "smooth_quant",
    "decoder": "rotate",
}
"""A function for each algorithm on which it is quick; the others are rounded to nearest."""

CHOSEN = {
    (name, PRESETS[i % len(PRESETS)]): QUICK.get(name, "nearest") for i, name in enumerate(MODELS)
}
"""Each function once, each preset at least twice, each algorithm once: what runs by default."""

WIDE_CASES = [(kind, preset, target) for kind in WIDE for preset in PRESETS for target in TARGETS]


def slow_unless(values, chosen):
    """The values as parameters; tests of those that are not chosen are slow."""
    return [x if x in chosen else pytest.param(*x, marks=pytest.mark.slow) for x in values]


@pytest.fixture(scope="module", autouse=True)
def _forgets():
    yield
    forget()


@pytest.mark.parametrize(("name", "policy"), slow_unless(cases(), CHOSEN))
def test_plans_and_rounded_codes(name, policy):
    for kind, form in exact(name, policy).items():
        key = f"{name}/{policy}: {kind}"
        check_form(key, STORE.form(key), form)


@same_jax
@pytest.mark.parametrize(("name", "policy"), slow_unless(cases(), CHOSEN))
def test_contractions_and_kernels_of_converted_functions(name, policy):
    check_kernels(name, policy, "nearest")


def check_kernels(name, policy, algorithm):
    key = f"{name}/{policy}/{algorithm}: kernels"
    check_form(key, STORE.form(key), kernels(name, policy, algorithm))


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


def test_what_an_algorithm_chooses_for_each_function():
    assert set(CHOSEN.values()) == set(ALGORITHMS)
    assert {policy for _, policy in CHOSEN} == set(PRESETS)
    check_chosen((name, policy, algorithm) for (name, policy), algorithm in CHOSEN.items())


def check_chosen(chosen):
    """Compares what algorithms chose, and then the programs."""
    chosen = list(chosen)
    check_learned(
        (
            f"{name}/{policy}/{algorithm}",
            recorded(algorithm).get(f"{name}/{policy}"),
            learned(name, policy, algorithm),
        )
        for name, policy, algorithm in chosen
    )
    for name, policy, algorithm in chosen * IS_SAME_JAX:
        check_kernels(name, policy, algorithm)


@pytest.mark.sweep
@pytest.mark.parametrize("policy", [*PRESETS, "steps", "tables"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_each_algorithm_chooses_for_all(algorithm, policy):
    names = [name for name in MODELS if policy in policies(name)]
    check_chosen((name, policy, algorithm) for name in names)
    forget()
