"""Initializes a model with adapters from the quantized float model."""

from collections.abc import Iterable
from typing import Any

from flax import nnx

from .._calls import called
from .._checks import check_instance
from ..modules import Mode
from ..modules._shared import (
    Adapter,
    by_path,
    check_same_parameters,
    initial_adapters,
    nest,
)
from ..ptq import Quantized
from ..transforms._shared import is_whole
from ._convert import replace, variable_at
from ._lora import LoRALinear
from ._pure import Path
from ._state import OWN, State
from ._variables import QParam

_NAME = "nnx.init_lora"


@called("nnx.init_lora", "pass jqx.nnx.init_lora(model, quantized).")
def init_lora(model: nnx.Module, quantized: Quantized) -> None:
    """Gives a model with `LoRALinear` layers the codes of a quantized model, in place. Its adapters
    start from the low-rank products that `jqx.algorithms.loftq` or `eora` has found.

    All parameters become those of `quantized`; its weights are `QParam`s. The mode of every part
    becomes `Mode.SIMULATE`, except that parts in `Mode.FLOAT` stay unchanged. The model then
    computes the same as `quantized`, also in `Mode.CONVERT`, up to rounding in float32: `lora_a`
    and `lora_b` share the factor that cancels `alpha / rank`. Training continues from there.

    Args:
      model: has `LoRALinear` layers where the model that was quantized has `flax.nnx.Linear`, and
        other layers of `jqx.nnx` where it has other quantized weights. Its values are not used.
      quantized: the result of `jqx.nnx.ptq(float_model, policy, loftq(rank=...))`.

    Raises:
      TypeError: if `model` is not a module, or `quantized` is not a `jqx.Quantized`.
      ValueError: if a `LoRALinear` has no such product, or one of another rank; if something else
        is kept at a site; if the parameters of `model` are not those of `quantized`; or if a
        quantized weight is not in a layer of `jqx.nnx`.

    Source: Li et al., arXiv:2310.08659 (LoftQ); Liu et al., arXiv:2410.21271 (EoRA).

    Example:
      >>> import jax, jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> policy, x = jqx.presets.nf4(block=8), jax.random.normal(jax.random.key(0), (4, 16))
      >>> ptq, loftq = jqx.nnx.ptq, jqx.algorithms.loftq(rank=2)
      >>> quantized = ptq(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), policy, loftq, progress=False)([x])
      >>> layer = jqx.nnx.LoRALinear(16, 8, rank=2, policy=policy, rngs=nnx.Rngs(1))
      >>> jqx.nnx.init_lora(layer, quantized)
      >>> bool(jnp.allclose(layer(x), quantized(x), atol=1e-5))
      True
    """
    check_instance(_NAME, "model", model, nnx.Module, fix="pass the model to be trained.")
    fix = "pass what jqx.nnx.ptq returns for the float model."
    check_instance(_NAME, "quantized", quantized, Quantized, fix=fix)
    modules = [(_name(path), part) for path, part in nnx.iter_modules(model)]
    parts = {path: part for path, part in modules if isinstance(part, State)}
    layers = {path: part for path, part in parts.items() if isinstance(part, LoRALinear)}
    wanted = {path: _adapter(layer) for path, layer in layers.items()}
    adapters = initial_adapters(_NAME, quantized.plan, quantized.maps, wanted)
    variables, values = _variables(model), by_path(quantized.params)
    own = {path: variable.get_value() for path, variable in variables.items()}
    check_same_parameters(_NAME, own, values, parts)

    codes: dict[int, nnx.Variable[Any]] = {}
    for path, variable in variables.items():
        if is_whole(values[path]):
            codes[id(variable)] = QParam(values[path])
        else:
            variable.set_value(values[path])
    replace(model, codes)
    for path, (a, b) in adapters.items():
        layers[path].lora_a.set_value(a)
        layers[path].lora_b.set_value(b)
    for path, part in parts.items():
        before = path and f"{path}/"
        own = {key: x for key, x in quantized.affines.items() if key.startswith(before)}
        part.quant_scales.set_value(nest({key[len(before) :]: x for key, x in own.items()}))
        part.quant_stats.set_value({})
        part.learned_scales = None
        if part.mode is not Mode.FLOAT:
            part.mode = Mode.SIMULATE


def _adapter(layer: LoRALinear) -> Adapter:
    a, b = layer.lora_a.get_value(), layer.lora_b.get_value()
    return Adapter(layer.rank, layer.alpha, a.shape, b.shape, a.dtype)


def _variables(model: nnx.Module) -> dict[str, nnx.Variable[Any]]:
    """Returns the variables that the float model also has, by path."""
    _, _, own = nnx.split(model, (nnx.RngState, nnx.LoRAParam, _is_own), ...)
    return {_name(path): variable_at(model, path) for path, _ in nnx.to_flat_state(own)}


def _is_own(path: Path, _: Any) -> bool:
    return any(name in OWN for name in path)


def _name(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))
