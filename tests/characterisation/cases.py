"""Each function with each policy and algorithm: what public calls make of it."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import jqx

from .functions import MODELS
from .normal_forms import codes_form, kernels_form, ordinals, plan_form, tensors

PRESETS = "w8a8", "w8a8_dynamic", "w8a16", "w4a16", "w4a8", "w4a4", "nf4", "fp8", "mxfp8"

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "nearest": jqx.algorithms.nearest,
    "gptq": jqx.algorithms.gptq,
    "awq": lambda: jqx.algorithms.awq(steps=4),
    "smooth_quant": jqx.algorithms.smooth_quant,
    "rotate": jqx.algorithms.rotate,
    "equalize": jqx.algorithms.equalize,
    "adaround": lambda: jqx.algorithms.adaround(steps=20),
    "auto_round": lambda: jqx.algorithms.auto_round(steps=10),
    "bias_correction": jqx.algorithms.bias_correction,
    "default": lambda: None,
}
"""The algorithms, and what `jqx.ptq` chooses itself. They take few steps, so that this is fast."""


class Learned(NamedTuple):
    """What an algorithm chose for a function.

    Attributes:
      codes: of all weights, as integers in which neighbours differ by one.
      floats: a few values of each scale and float parameter, with their means.
      results: a few values of each result of the converted function, with their means.
    """

    codes: np.ndarray
    floats: np.ndarray
    results: np.ndarray


def policies(name: str) -> dict[str, Any]:
    """The policies of a function: the presets, and its own."""
    presets = {preset: getattr(jqx.presets, preset)() for preset in PRESETS}
    return presets | dict(MODELS[name]().policies)


def cases() -> Iterator[tuple[str, str]]:
    """All functions with all of their policies."""
    return ((name, policy) for name in MODELS for policy in policies(name))


@functools.cache
def quantized(name: str, policy: str, algorithm: str) -> jqx.Quantized | str:
    """A quantized function, or the kind of the error that says why it cannot be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of matrices that few inputs reach
        try:
            return MODELS[name]().quantize(policies(name)[policy], ALGORITHMS[algorithm]())
        except (ValueError, NotImplementedError, TypeError) as error:
            return next(x.__name__ for x in type(error).__mro__ if x.__module__ == "builtins")


def forget() -> None:
    """Drops all quantized functions and their programs."""
    quantized.cache_clear()
    planned.cache_clear()
    traced.cache_clear()
    jax.clear_caches()


@functools.cache
def traced(name: str, policy: str, algorithm: str) -> Any:
    """The converted function, traced on the second batch."""
    own = quantized(name, policy, algorithm)
    return jax.jit(own.function).trace(own.params, *MODELS[name]().batches[1])


@functools.cache
def planned(name: str, policy: str) -> jqx.Plan:
    """The plan of a function. Nothing is computed for it."""
    model = MODELS[name]()
    plan = jqx.make_plan(model.function, policies(name)[policy], names=model.names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of integers that a policy matches
        return plan(model.params, *model.batches[0])


def plan_of(name: str, policy: str) -> Any:
    """The form of a plan."""
    return plan_form(planned(name, policy))


def codes_of(name: str, policy: str) -> Any:
    """The form of the weights rounded to nearest."""
    own = quantized(name, policy, "nearest")
    return own if isinstance(own, str) else codes_form(own.params)


def kernels_of(name: str, policy: str, algorithm: str) -> Any:
    """The form of the converted function. If scales of activations need no batches and no algorithm
    changes it, it is traced on shapes alone.
    """
    model = MODELS[name]()
    if algorithm == "nearest" and not planned(name, policy).static_specs():
        plan = planned(name, policy)
        codes = jqx.quantize_params(jax.eval_shape(lambda: model.params), plan)
        return kernels_form(
            jax.make_jaxpr(jqx.convert(model.function, plan))(codes, *model.batches[1])
        )
    own = quantized(name, policy, algorithm)
    return own if isinstance(own, str) else kernels_form(traced(name, policy, algorithm).jaxpr)


def learned(name: str, policy: str, algorithm: str) -> Learned | None:
    """What an algorithm chose; `None` if it does not apply."""
    own = quantized(name, policy, algorithm)
    if isinstance(own, str):
        return None
    codes, floats = [np.zeros(0, np.int16)], []
    for _, x in tensors(own.params):
        if isinstance(x, jqx.QTensor):
            if algorithm != "nearest":  # whose codes are compared bit for bit
                codes.append(ordinals(x.codes).ravel())
            floats += [sample(y, 4) for y in (x.scale, x.zero_point, x.offset) if y is not None]
        else:
            floats.append(sample(x, 4))
    floats += [sample(x, 4) for x in jax.tree.leaves(dict(sorted(own.affines.items())))]
    compiled = traced(name, policy, algorithm).lower().compile()
    found = jax.tree.leaves(compiled(own.params, *MODELS[name]().batches[1]))
    joined = np.concatenate(codes).astype(np.int8)
    return Learned(joined, np.concatenate(floats), np.concatenate([sample(x, 12) for x in found]))


def sample(x: Any, count: int) -> np.ndarray:
    """Some values of an array, evenly chosen, with the means of all values and of their sizes."""
    values = np.asarray(x).astype(np.float64).ravel()
    chosen = values[np.linspace(0, values.size - 1, min(count, values.size)).astype(int)]
    return np.float32([*chosen, values.mean(), np.abs(values).mean()])
