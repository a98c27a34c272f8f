"""What a plan quantizes runs: every function, preset and algorithm, whichever way it is run.

A test takes several functions of `functions.py` at once, in one program. Where it fails, `each`
runs them one by one and says which. The default run takes a part of the functions for each preset
and algorithm, the slow run two more parts, and a sweep all of them.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx
from jqx import algorithms

from ..arrays import on_device
from .functions import CASES, inputs, parameters, together

ROWS = 24
BATCHES = [tuple(map(on_device, inputs(seed, ROWS))) for seed in (1, 2)]
Names = tuple[str, ...]

PRESETS = {
    "w8a16": 0.03,
    "w8a8": 0.1,
    "w8a8_dynamic": 0.1,
    "w4a16": 0.35,
    "w4a8": 0.35,
    "w4a4": 0.8,
    "fp8": 0.2,
    "mxfp8": 0.15,
    "nf4": 0.35,
}
"""Presets, and bounds of the relative error of any function: twice what was measured, or more. A
value in the wrong place, or one scaled twice, is far above them.
"""

TRANSFORMS = {
    "smooth_quant": algorithms.smooth_quant(strength=0.85),
    "awq": algorithms.awq(clip=False),
    "equalize": algorithms.equalize(),
    "rotate": algorithms.rotate(),
}
"""Algorithms that change weights, but not the function."""

ROUNDINGS = {
    "gptq": algorithms.gptq(unsupported="round"),
    "adaround": algorithms.adaround(steps=2),
    "auto_round": algorithms.auto_round(steps=2),
    "bias_correction": algorithms.bias_correction(),
    "eora": algorithms.eora(rank=2),
    "loftq": algorithms.loftq(rank=2),
    "default": None,
}

PARTS = 9


def part_of(number: int, *key: str) -> Names:
    """Returns one of `PARTS` parts of the functions, another one for each key."""
    turn = zlib.crc32("/".join(key).encode())
    return tuple(name for i, name in enumerate(CASES) if (i + turn) % PARTS == number)


_MARKS = [(), *2 * [pytest.mark.slow], *(PARTS - 3) * [pytest.mark.sweep]]
parts = pytest.mark.parametrize(
    "part", [pytest.param(i, marks=marks) for i, marks in enumerate(_MARKS)]
)


def of(names: Names) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns one function of many, and its parameters."""
    values = {
        name: parameters(CASES[name].shapes, np.random.default_rng(list(CASES).index(name)))
        for name in names
    }
    return together(names), jax.tree.map(on_device, values)


def each(run: Callable[[Names], None], names: Names) -> None:
    """Runs a check of several functions at once, and if it fails, of each one."""
    try:
        run(names)
    except Exception as error:
        failed = dict(_failures(run, names))
        if failed or not isinstance(error, NotImplementedError):
            raise AssertionError(failed or f"only together: {error}") from error


def _failures(run: Callable[[Names], None], names: Names) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            run((name,))
        except NotImplementedError:  # an algorithm that was named refuses it, and says why
            pass
        except Exception as error:
            yield name, " ".join(str(error).split())[:300]


def relative(found: Any, expected: Any) -> float:
    """Returns the relative error, of Euclidean norms."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@functools.cache
def floats(names: Names) -> dict[str, np.ndarray]:
    """Returns the results of the float functions."""
    f, params = of(names)
    return jax.device_get(jax.jit(f)(params, *BATCHES[0]))


@functools.cache
def rounded(names: Names, preset: str) -> jqx.Quantized:
    """Returns functions whose weights are rounded to nearest, in the layout of files."""
    f, params = of(names)
    quantize = jqx.ptq(
        f, getattr(jqx.presets, preset)(), algorithms.nearest(), target=False, progress=False
    )
    return quantize(params, BATCHES)


@functools.cache
def integers(names: Names, preset: str) -> dict[str, np.ndarray]:
    """Returns the results of `rounded`."""
    q = rounded(names, preset)
    return jax.device_get(jax.jit(q.function)(q.params, *BATCHES[0]))


def assert_near_integers(y: dict[str, Any], names: Names, preset: str) -> None:
    """Checks results against those of `rounded`: float sums may be in another order."""
    for name, expected in integers(names, preset).items():
        np.testing.assert_allclose(y[name], expected, rtol=0, atol=1e-5 * abs(expected).max())


@parts
@pytest.mark.parametrize("preset", PRESETS)
def test_integers_are_what_simulation_says(preset, part):
    def run(names):
        (f, params), q = of(names), rounded(names, preset)
        simulated = jax.jit(jqx.simulate(f, q.plan, q.affines, backward=jnp.float32))
        same = simulated(params, *BATCHES[0])
        for name, y in integers(names, preset).items():
            assert relative(y, floats(names)[name]) < PRESETS[preset], name
            np.testing.assert_array_equal(y, same[name], err_msg=name)

    each(run, part_of(part, preset))


@parts
@pytest.mark.parametrize("preset", PRESETS)
def test_files_are_bound_on_the_layout_of_the_target(preset, part, tmp_path):
    def run(names):
        path = tmp_path / f"{len(names)}{names[0]}.safetensors"
        jqx.save(path, rounded(names, preset), progress=False)
        bound = jqx.load(path, progress=False).bind(of(names)[0])
        y = jax.jit(bound.function)(bound.params, *BATCHES[0])
        assert_near_integers(y, names, preset)

    each(run, part_of(part, preset))


@parts
@pytest.mark.parametrize("preset", PRESETS)
def test_functions_are_exported_with_a_symbolic_batch(preset, part):
    def run(names):
        q = rounded(names, preset)
        (b,) = export.symbolic_shape("b")
        x, tokens = BATCHES[0]
        shapes = [jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in (x, tokens)]
        exported = export.export(jax.jit(q.function))(q.params, *shapes)
        y = exported.call(q.params, x, tokens)
        assert_near_integers(y, names, preset)

    each(run, part_of(part, preset))


COSINES = {
    "w8a8": 0.995,
    "w8a8_dynamic": 0.998,
    "w4a8": 0.998,
    "w4a4": 0.7,
    "fp8": 0.96,
    "mxfp8": 0.91,
}
"""Least cosines of gradients, for presets that round activations: they are three times as far from
1 as the least that was measured. That was .9987, .9995, .9997, .906, .990 and .972, of all
functions and parameters.
"""


@parts
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_are_those_of_rounded_weights(preset, part):
    """Straight through: the gradient is that of the float function at the rounded weights. Rounded
    activations change its values, no weight does.
    """

    def run(names):
        (f, params), q = of(names), rounded(names, preset)

        def loss(f, p):
            return sum(jnp.sum(y * y) for y in f(p, *BATCHES[0]).values())

        # Values at the end of the range saturate behind rounded ones: they have no gradient.
        wider = jax.tree.map(lambda x: x * jnp.asarray(1.1, x.dtype), q.affines)
        simulated = jqx.simulate(f, q.plan, wider, backward=jnp.float32)
        real = jqx.dequantize_params(q.params)
        gradient = jax.grad(loss, 1)
        found, expected = jax.jit(lambda p, r: (gradient(simulated, p), gradient(f, r)))(
            params, real
        )
        for name in names:
            for leaf, own in found[name].items():
                right = np.asarray(expected[name][leaf])
                assert np.any(own) == np.any(right), (name, leaf)
                if preset in COSINES:
                    sizes = np.linalg.norm(own) * np.linalg.norm(right)
                    assert np.vdot(own, right) >= COSINES[preset] * sizes, (name, leaf)
                    continue
                is_clipped = (own == 0) & (right != 0)  # weights at the ends of their groups
                assert np.mean(is_clipped) <= 0.1, (name, leaf)
                right = np.where(is_clipped, 0, right)
                atol = (2**-6 if name == "cast" else 1e-5) * abs(right).max()
                np.testing.assert_allclose(own, right, rtol=0, atol=atol, err_msg=(name, leaf))

    each(run, part_of(part, preset))


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(x, marks=pytest.mark.slow if x in ("awq", "equalize") else [])
        for x in TRANSFORMS
    ],
)
def test_transforms_leave_the_function_as_it_is(algorithm):
    """In float64. The matrices and shifts that are applied at sites are float32."""

    def float64(tree):
        return jax.tree.map(
            lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def run(names):
        f, params = of(names)
        params, batches = float64((params, BATCHES))
        plan = jqx.make_plan(f, jqx.presets.w8a8())(params, *batches[0])
        try:
            chosen = TRANSFORMS[algorithm].rewrite(f, plan, params, batches, progress=False)
        except ValueError as error:  # nothing can be scaled in a function that is tried alone
            assert len(names) == 1 and "can be" in str(error).splitlines()[0], error
            return
        mapped = jqx.map_channels(f, plan, chosen.maps) if chosen.maps else f
        y, exact = (jax.jit(g)(p, *batches[0]) for g, p in ((mapped, chosen.params), (f, params)))
        bound = 1e-6 if algorithm in ("rotate", "equalize") else 1e-12
        for name, expected in exact.items():
            atol = (2**-6 if name == "cast" else bound) * abs(expected).max()  # one is in bfloat16
            np.testing.assert_allclose(y[name], expected, rtol=0, atol=atol, err_msg=name)

    with jax.enable_x64(True):
        each(run, tuple(CASES))


@parts
@pytest.mark.parametrize("algorithm", ROUNDINGS)
def test_algorithms_run_what_is_planned(algorithm, part):
    preset = list(PRESETS)[zlib.crc32(algorithm.encode()) % len(PRESETS)]
    run_with_algorithm(algorithm, preset, part_of(part, algorithm))


@pytest.mark.sweep
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("algorithm", ROUNDINGS | TRANSFORMS)
def test_all_algorithms_run_with_all_presets(algorithm, preset):
    run_with_algorithm(algorithm, preset, tuple(CASES))


def run_with_algorithm(algorithm: str, preset: str, names: Names) -> None:
    def run(names):
        f, params = of(names)
        own = (ROUNDINGS | TRANSFORMS)[algorithm]
        q = jqx.ptq(f, getattr(jqx.presets, preset)(), own, progress=False)(params, BATCHES)
        y = jax.jit(q.function)(q.params, *BATCHES[0])
        for name, expected in floats(names).items():
            assert relative(y[name], expected) < PRESETS[preset], name

    each(run, names)
