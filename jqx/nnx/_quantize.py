"""Quantizes a whole float module."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from .._checks import check_instance
from .._errors import fail
from ..modules import Mode
from ..modules._shared import Scales
from ..policy import Policy
from ._classes import Over, become, over
from ._quantized import Quantized
from ._state import OWN

ATTRIBUTES = ("policy", "mode", "backward", "quant_dynamic", *OWN)


def quantize(
    model: nnx.Module,
    policy: Policy,
    *,
    mode: Mode = Mode.SIMULATE,
    backward: DTypeLike | None = None,
    scales: Scales = "calibrated",
    rngs: nnx.Rngs | None = None,
) -> Any:
    """Returns a copy of a model whose every public method runs through the transforms.

    So do properties, and methods inherited from bases and mixins. The modules inside become parts
    of the model. A call of a part from outside follows the rules and the mode of the whole. It is
    an error if the call needs statistics or scales, which only the whole has.

    `model` is not changed: the result has new variables with the same values at the same paths. It
    is also an instance of the class of `model`. Shared variables stay shared, and are quantized
    once. A method is traced: it may write variables, but no other attributes. Every rule of the
    policy must match something in `__call__`, and in the method that `convert` and similar
    functions run. In other methods, such as one that makes a cache, rules may match nothing.

    Args:
      model: any nnx module.
      policy: what is quantized; paths are those of the parameters, such as `blocks/0/up/kernel`.
      mode: what a call computes; `result.set_attributes(mode=...)` changes it.
      backward: see `jqx.simulate`.
      scales: `"dynamic"` computes scales of static activations that are not calibrated from the
        values of the call. The default raises an error for them.
      rngs: for gradient estimators that draw random numbers: a fork of the stream `quant`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `model` or a part of it is quantized already; if it has an attribute with a
        name that quantized modules use; or if `scales` is unknown.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> rngs, x = nnx.Rngs(0), jnp.ones((1, 4))
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))
      >>> quantized = jqx.nnx.quantize(model, jqx.presets.w8a8_dynamic())
      >>> trained = quantized(x)
      >>> jqx.nnx.convert(quantized, x)
      >>> bool(jnp.allclose(quantized(x), trained))
      True
    """
    check_float("nnx.quantize", model, ATTRIBUTES)
    result: Any = nnx.clone(model)
    become(result, over(type(model), Quantized, f"Quantized{type(model).__name__}"))
    result._q_set_up(policy, mode, backward, scales, rngs)
    return result


def check_float(function: str, model: Any, attributes: Sequence[str] = ()) -> None:
    """Checks that a model is an nnx module, in float, without attributes of these names."""
    check_instance(function, "model", model, nnx.Module, fix="pass an nnx module.")
    parts = [type(part).__name__ for _, part in nnx.iter_modules(model) if isinstance(part, Over)]
    if parts:
        raise fail(
            function,
            "this model is quantized already.",
            given=f"{type(model).__name__} with quantized parts ({', '.join(parts[:4])})",
            expected="a float model",
            fix="pass the float model that it was made from.",
        )
    used = [name for name in attributes if hasattr(model, name)]
    if used:
        raise fail(
            function,
            "this model has attributes with names that quantized models use.",
            given=f"{type(model).__name__} with attributes {', '.join(used)}",
            expected="a float model without them",
            fix="rename these attributes in the class of the model.",
        )
