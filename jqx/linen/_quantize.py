"""Quantizes a whole float module."""

import dataclasses
import functools
import types
from typing import Any

from flax import linen as nn
from jax.typing import DTypeLike

from .._checks import check_instance
from .._errors import fail
from ..modules import Mode
from ..modules._shared import Scales, forwards
from ..policy import Policy
from ._quantized import OUTER, Quantized
from ._state import State
from ._whole import Whole


def quantize(
    module: nn.Module,
    policy: Policy,
    *,
    mode: Mode = Mode.SIMULATE,
    backward: DTypeLike | None = None,
    scales: Scales = "calibrated",
) -> Quantized:
    """Returns a copy of a module whose every public method runs through the transforms.

    `module` is not changed. The result is also an instance of its class, with its fields and its
    variables at the same paths. It can be a part of other modules, and works under Flax's lifted
    transforms. `result.clone(mode=...)` returns it in another mode. Also quantized are functions of
    the module that are passed to `apply` as `method=`, methods of bases and mixins, and everything
    that is reached through a bound module. In that last case, modules among the fields are left
    unbound.

    Args:
      module: any unbound linen module.
      policy: what is quantized; paths are those in `variables["params"]`.
      mode: what a call computes.
      backward: see `jqx.simulate`.
      scales: `"dynamic"` computes scales of static activations that are not calibrated from the
        values of the call. The default raises an error for them.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `module` is bound, is quantized already, or has a field named `policy`, `mode`,
        `backward` or `scales`; or if `scales` is unknown.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
      >>> x = jnp.ones((1, 4))
      >>> variables = model.init(jax.random.key(0), x)
      >>> quantized = jqx.linen.quantize(model, jqx.presets.w8a8_dynamic())
      >>> trained = quantized.apply(variables, x)
      >>> integers = quantized.clone(mode=jqx.linen.Mode.CONVERT)
      >>> small = jqx.linen.convert(integers, variables, x)
      >>> bool(jnp.allclose(integers.apply(small, x), trained))
      True
    """
    check_instance("linen.quantize", "module", module, nn.Module, fix="pass a linen module.")
    fields = [f.name for f in dataclasses.fields(module) if f.init and f.name not in OUTER]
    own = [f.name for f in dataclasses.fields(Quantized) if f.name not in OUTER]
    both = sorted({*fields} & {*own})
    name = type(module).__name__
    if isinstance(module, State):
        raise fail(
            "linen.quantize",
            "this module is quantized already.",
            given=f"a module of the class {name}",
            expected="a float module",
            fix="pass the float module that it was made from; module.clone(mode=..., policy=...) "
            "changes the mode or the policy of a quantized one.",
        )
    if module.scope is not None:
        raise fail(
            "linen.quantize",
            "this module is bound to variables.",
            given=f"a bound {name}",
            expected="an unbound float module",
            fix="pass the module before it is bound; inside another module, make it with "
            "parent=None.",
        )
    if both:
        raise fail(
            "linen.quantize",
            "this module has fields with names that quantized modules use.",
            given=f"{name} with fields {', '.join(both)}",
            expected="a float module without them",
            fix="rename these fields in the class of the module.",
        )
    kind = _quantized_class(type(module))
    values = {name: getattr(module, name) for name in fields}
    options = {"policy": policy, "mode": mode, "backward": backward, "scales": scales}
    return kind(**values, **options, name=module.name)


@functools.cache
def _quantized_class(kind: type[nn.Module]) -> type[Any]:
    """Returns the class of a quantized module: one for each float class."""
    namespace = forwards(kind, nn.Module.__mro__)
    namespace.pop("setup", None)
    namespace |= {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return types.new_class(
        f"Quantized{kind.__name__}", (Whole, kind), {}, lambda space: space.update(namespace)
    )
