"""The decoder in Flax, quantized by qwix: its layers stand in the place of weights."""

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from _gpu_decoder_model import Config, prefill, step
from _gpu_decoder_rows import Job, Setting, floats

RULES: Mapping[str, Mapping[str, Any]] = {
    "qwix W8A16": {"weight_qtype": "int8"},
    "qwix W4A16 g128": {"weight_qtype": "int4", "tile_size": 128},
    "qwix W8A8 dynamic": {"weight_qtype": "int8", "act_qtype": "int8"},
    "qwix fp8 dynamic": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "qwix nf4 g64": {"weight_qtype": "nf4", "tile_size": 64},
}
LINEAR = r"((qkv|out|gate_up|down)_\d+|head)"  # not the products of attention


def reason_without_qwix() -> str:
    """Returns why there can be no rows of qwix, or nothing."""
    for name in ("flax.linen", "qwix"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"not installed ({error})"
    return ""


class _Linear:
    """A layer of Flax that a row is multiplied by, as if it were a matrix."""

    def __init__(self, layer: Callable[[jax.Array], jax.Array]):
        self._layer = layer

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return self._layer(x)


def made(setting: Setting, name: str, job: Job) -> tuple[Callable[..., Any], Any]:
    """Returns what a job runs, and its parameters."""
    del job  # the same function serves all
    return _model(setting.config, name)[0], _quantized(setting, name)


@lru_cache(maxsize=1)
def _quantized(setting: Setting, name: str) -> Any:
    qwix = importlib.import_module("qwix")
    _, form = _model(setting.config, name)
    given = _named(setting.config, floats(setting.config, setting.real))
    quantize = partial(qwix.quantize_params, abstract_quantized_params=form)
    return quantize(given) if setting.real else jax.eval_shape(quantize, given)


def _named(config: Config, params: Any) -> dict[str, Any]:
    """Returns the matrices under the names that layers of Flax have."""
    named: dict[str, Any] = {"embed": params["embed"], "head": {"kernel": params["head"]}}
    for i, layer in enumerate(params["layers"]):
        named |= {f"{name}_{i}": {"kernel": layer[name]} for name in config.matrices}
    return named


@lru_cache(maxsize=1)
def _model(config: Config, name: str) -> tuple[Callable[..., Any], Any]:
    """Returns a function of parameters and inputs, and the form of its parameters."""
    qwix, nn = importlib.import_module("qwix"), importlib.import_module("flax.linen")
    dtype = jnp.bfloat16

    class Twin(nn.Module):  # type: ignore[name-defined]
        @nn.compact
        def __call__(self, tokens: Any, *rest: Any) -> Any:
            def linear(title: str, size: int) -> _Linear:
                options = {"use_bias": False, "dtype": dtype, "param_dtype": dtype}
                return _Linear(nn.Dense(size, name=title, **options))

            def layer(i: int) -> dict[str, Any]:
                shapes = config.matrices.items()
                own: dict[str, Any] = {k: linear(f"{k}_{i}", n) for k, (_, n) in shapes}
                return own | {"before_attention": unit, "before_perceptron": unit}

            unit = jnp.ones(config.width, dtype)
            shape, zeros = (config.tokens, config.width), nn.initializers.zeros_init()
            params = {
                "embed": self.param("embed", zeros, shape, dtype),
                "layers": [layer(i) for i in range(config.layers)],
                "norm": unit,
                "head": linear("head", config.tokens),
            }
            return (step if rest else prefill)(config, params, tokens, *rest)

    rules = [qwix.QuantizationRule(module_path=LINEAR, **RULES[name])]
    model = qwix.quantize_model(Twin(), qwix.PtqProvider(rules))
    tokens = jnp.zeros((1, 8), jnp.int32)
    form = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def run(params: Any, *given: Any) -> Any:
        return model.apply({"params": params}, *given)

    return run, form
