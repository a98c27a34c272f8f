"""Variables of quantized nnx modules. Each has its own type, for `nnx.split`, `nnx.grad` and other
filters.
"""

from typing import Any

from flax import nnx

from ..modules._shared import Wanted


class QParam(nnx.Variable[Any]):
    """A quantized weight: a `jqx.QTensor`, where the float module has an `nnx.Param`.

    It is not an `nnx.Param`, so that gradients with respect to `nnx.Param` leave it out.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a16(), rngs=nnx.Rngs(0))
      >>> jqx.nnx.convert(layer, jnp.ones((1, 4)))
      >>> isinstance(layer.kernel, jqx.nnx.QParam)
      True
      >>> list(nnx.state(layer, nnx.Param))
      ['bias']
    """


class Stat(nnx.Variable[Any]):
    """Statistics of activations, written in `Mode.CALIBRATE`. They are nested dicts, initially
    empty, with each entry at the path of its weight, such as `kernel:dot_general:lhs`.

    Under `nnx.scan` and `nnx.vmap` over layers, statistics need the axis of the layers, as
    parameters do: Flax drops writes to variables with axis `None`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8(), "mode": jqx.nnx.Mode.CALIBRATE}
      >>> layer = jqx.nnx.Linear(4, 2, **options, rngs=nnx.Rngs(0))
      >>> out = layer(jnp.ones((1, 4)))
      >>> list(layer.quant_stats)
      ['kernel:dot_general:lhs']
    """


class Scale(nnx.Variable[Any]):
    """Fixed scales of activations, from `fix_scales` or `convert`: nested dicts as in `Stat`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a8(), rngs=nnx.Rngs(0))
      >>> jqx.nnx.fix_scales(layer, jnp.full((1, 4), 127.0), scales="dynamic")
      >>> layer.quant_scales["kernel:dot_general:lhs"].scale
      Array([[1.]], dtype=float32)
    """


class Found(nnx.Variable[Any]):
    """Results of a run of `convert`, `fix_scales` or `learn_scales` for one module: codes, scales
    and learned scales, by these names. Only the copy that is run has this variable.
    """

    wanted: Wanted
