"""Contractions to inject into Flax's own layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import dtypes
from jax import lax

from ..modules._shared import QuantizedFunction, split
from ..tensor import QTensor
from ._state import State

INJECTED = "injected:"
"""Prefix of the names of codes whose float weight is a parameter of the containing layer."""


class _Contraction(State, kw_only=True):
    """A quantized contraction with a weight on the right.

    Attributes:
      weight_name: name of the weight among the parameters of the layer that contains it.
    """

    weight_name: str = "kernel"

    def _q_contract(
        self, contraction: Any, lhs: Any, rhs: Any, kwargs: dict[str, Any]
    ) -> jax.Array:
        if self.is_initializing():
            return contraction(lhs, rhs, **kwargs)
        name = self.weight_name

        def function(params: Any, lhs: Any) -> jax.Array:
            return contraction(lhs, params[name], **kwargs)

        _, learned = split(self.variables.get("params", {}))
        call = QuantizedFunction(
            function=function,
            policy=self.policy,
            args=(lhs,),
            kwargs={},
            caller=type(self).__name__,
            **self._q_known(learned),
        )
        return self._q_run(call, {name: rhs}, INJECTED)


class DotGeneral(_Contraction):
    """`jax.lax.dot_general` of an activation and a weight, quantized.

    For `nn.Dense(..., dot_general_cls=...)`, `DenseGeneral`, and attention's `qkv_dot_general_cls`
    and `out_dot_general_cls`. Give the layer `promote_dtype=jqx.linen.promote_dtype` if its kernel
    is to become a QTensor. Attention has no such field: there `Mode.CONVERT` quantizes the float
    kernels in each call.

    Example:
      >>> import functools, jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> w8 = functools.partial(jqx.linen.DotGeneral, policy=jqx.presets.w8a16())
      >>> layer = nn.Dense(2, dot_general_cls=w8)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 4)))
      >>> layer.apply(variables, jnp.ones((1, 4))).shape
      (1, 2)
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


class ConvGeneralDilated(_Contraction):
    """`jax.lax.conv_general_dilated` of an activation and a weight, quantized.

    For `nn.Conv(..., conv_general_dilated_cls=...)`; see `DotGeneral`.

    Example:
      >>> import functools, jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> w8 = functools.partial(jqx.linen.ConvGeneralDilated, policy=jqx.presets.w8a16())
      >>> layer, x = nn.Conv(3, (3, 3), conv_general_dilated_cls=w8), jnp.ones((1, 5, 5, 2))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (1, 5, 5, 3)
    """

    def __call__(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        def contraction(lhs: Any, rhs: Any) -> jax.Array:
            return lax.conv_general_dilated(lhs, rhs, *args, **kwargs)

        return self._q_contract(contraction, lhs, rhs, {})


def promote_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Promotes the operands of a layer as `flax.linen.dtypes.promote_dtype` does, also QTensors.

    For `nn.Dense(..., promote_dtype=jqx.linen.promote_dtype)` with an injected contraction.

    Args:
      *args: arrays, QTensors, or `None`.
      dtype: dtype of the results; `None` for the common dtype of the operands.
      inexact: whether the dtype must be a float dtype.

    Example:
      >>> import jqx, jqx.linen, jax.numpy as jnp
      >>> q = jqx.QTensor.quantize(jnp.ones(2), jqx.QSpec(jnp.int8))
      >>> [x.dtype.name for x in jqx.linen.promote_dtype(jnp.ones(2), q, dtype=jnp.bfloat16)]
      ['bfloat16', 'bfloat16']
    """
    stand_ins = [jnp.zeros((), x.dtype) if isinstance(x, QTensor) else x for x in args]
    dtype = dtypes.canonicalize_dtype(*stand_ins, dtype=dtype, inexact=inexact)
    return [
        x.astype(dtype)
        if isinstance(x, QTensor)
        else dtypes.promote_dtype(x, dtype=dtype, inexact=inexact)[0]
        for x in args
    ]
