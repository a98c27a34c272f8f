"""Contractions to inject into Flax's own layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.typing import DTypeLike

from ..modules import Mode
from ..modules._shared import QuantizedFunction, Scales
from ..policy import Policy
from ..tensor import QTensor
from ._state import State


class Contraction(State):
    """A quantized contraction with a weight on the right.

    It is a module: the layer that contains it also holds its statistics and scales. `convert` makes
    the kernel of that layer a `QParam`. Layers that share one object share its statistics;
    `fix_scales`, `learn_scales` and `convert` give each layer a copy of its own.

    Attributes:
      weight_name: name of the weight in the layer that contains the contraction.
    """

    weight_name: str

    def __init__(
        self,
        *,
        policy: Policy,
        mode: Mode = Mode.SIMULATE,
        backward: DTypeLike | None = None,
        scales: Scales = "calibrated",
        weight_name: str = "kernel",
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.weight_name = weight_name
        self._q_set_up(policy, mode, backward, scales, rngs)

    def _q_contract(
        self, contraction: Any, lhs: Any, rhs: Any, kwargs: dict[str, Any]
    ) -> jax.Array:
        name = self.weight_name

        def function(params: Any, lhs: Any) -> jax.Array:
            return contraction(lhs, params[name], **kwargs)

        call = QuantizedFunction(
            function=function,
            policy=self.policy,
            args=(lhs,),
            kwargs={},
            caller=type(self).__name__,
            **self._q_known(),
        )
        return self._q_run(call, {name: rhs})


class DotGeneral(Contraction):
    """`jax.lax.dot_general` of an activation and a weight, quantized.

    For `nnx.Linear(..., dot_general=...)`, `LinearGeneral`, and attention's `qkv_dot_general` and
    `out_dot_general`. Give the layer `promote_dtype=jqx.nnx.promote_dtype` if its kernel is to
    become a QTensor. Pass an object, not a `dot_general_cls`: Flax makes a new object of a class in
    every call, so that the object could not keep statistics or scales.

    Args:
      policy: what is quantized; the path of the weight is `weight_name`.
      mode: what a call computes.
      backward: see `jqx.simulate`.
      scales: `"dynamic"` computes scales of static activations that are not calibrated from the
        values of the call. The default raises an error for them.
      weight_name: name of the weight in the layer that contains the contraction.
      rngs: for gradient estimators that draw random numbers.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> dot = jqx.nnx.DotGeneral(policy=jqx.presets.w8a8_dynamic())
      >>> options = {"dot_general": dot, "promote_dtype": jqx.nnx.promote_dtype}
      >>> layer = nnx.Linear(4, 2, **options, rngs=nnx.Rngs(0))
      >>> jqx.nnx.convert(layer, jnp.ones((1, 4)))
      >>> layer.kernel.get_value()
      QTensor(int8[4, 2] per_axis(1), scale float32[1, 2], dtype=float32, 16 bytes)
    """

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **kwargs: Any,
    ) -> jax.Array:
        kwargs |= {"dimension_numbers": dimension_numbers, "precision": precision}
        kwargs |= {"preferred_element_type": preferred_element_type}
        return self._q_contract(lax.dot_general, lhs, rhs, kwargs)


class ConvGeneralDilated(Contraction):
    """`jax.lax.conv_general_dilated` of an activation and a weight, quantized.

    For `nnx.Conv(..., conv_general_dilated=...)`; see `DotGeneral`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> conv = jqx.nnx.ConvGeneralDilated(policy=jqx.presets.w8a8_dynamic())
      >>> layer = nnx.Conv(2, 3, (3, 3), conv_general_dilated=conv, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 5, 2))).shape
      (1, 5, 5, 3)
    """

    def __call__(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        def contraction(lhs: Any, rhs: Any) -> jax.Array:
            return lax.conv_general_dilated(lhs, rhs, *args, **kwargs)

        return self._q_contract(contraction, lhs, rhs, {})


def promote_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
    """Promotes the operands of a layer as `flax.nnx.nn.dtypes.promote_dtype` does, also QTensors.

    For `nnx.Linear(..., promote_dtype=jqx.nnx.promote_dtype)` with an injected contraction.

    Args:
      args: a tuple of arrays, QTensors, or `None`.
      dtype: dtype of the results; `None` for the common dtype of the operands.
      inexact: whether the dtype must be a float dtype.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> q = jqx.QTensor.quantize(jnp.ones(2), jqx.QSpec(jnp.int8))
      >>> [x.dtype for x in jqx.nnx.promote_dtype((jnp.ones(2), q), dtype=jnp.bfloat16)]
      [dtype(bfloat16), dtype(bfloat16)]
    """
    stand_ins = [jnp.zeros((), x.dtype) if isinstance(x, QTensor) else x for x in args]
    dtype = dtypes.canonicalize_dtype(*stand_ins, dtype=dtype, inexact=inexact)
    return tuple(
        x.astype(dtype)
        if isinstance(x, QTensor)
        else dtypes.promote_dtype((x,), dtype=dtype, inexact=inexact)[0]
        for x in args
    )
