"""Low-rank adapters (Hu et al., "LoRA", arXiv:2106.09685) over a linear layer whose weight may be
quantized (Dettmers et al., "QLoRA", arXiv:2305.14314).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._checks import check_instance
from .._errors import fail
from ..policy import Policy
from ..tensor import QTensor
from ._classes import become
from ._quantized import Quantized
from ._state import OWN


class LoRALinear(Quantized, nnx.Linear):
    """`flax.nnx.Linear`, quantized, plus the low-rank product `alpha / rank x a b`.

    The adapters `lora_a` (inputs, rank) and `lora_b` (rank, features) are `nnx.LoRAParam`; their
    product is initially zero. To train only them, differentiate with respect to them:
    `nnx.grad(..., argnums=nnx.DiffState(0, nnx.LoRAParam))`. The base weight may be 4-bit codes in
    training: after `convert` it is a `QParam`. Then set `Mode.SIMULATE`, which dequantizes the
    codes and has all gradients. `init_lora` starts adapters from the products that
    `jqx.algorithms.loftq` or `eora` has found.

    Args:
      in_features: as in `nnx.Linear`.
      out_features: as in `nnx.Linear`.
      rank: rank of the adapters.
      alpha: weight of the adapters, times rank.
      policy: what is quantized in the base layer.
      rngs: for the parameters.
      **kwargs: other arguments of `nnx.Linear`, and `mode`, `backward` and `scales`.

    Example:
      >>> import jqx, jqx.nnx, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.nf4(block=4), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.LoRALinear(4, 2, rank=1, **options)
      >>> jqx.nnx.convert(layer, jnp.ones((1, 4)))
      >>> layer.mode = jqx.nnx.Mode.SIMULATE
      >>> adapters = nnx.DiffState(0, nnx.LoRAParam)
      >>> grads = nnx.grad(lambda layer, x: layer(x).sum(), argnums=adapters)(layer, jnp.ones(4))
      >>> {name: grad.shape for name, grad in grads.items()}
      {'lora_a': (4, 1), 'lora_b': (1, 2)}
    """

    rank: int
    alpha: float

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float = 1.0,
        policy: Policy,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, policy=policy, rngs=rngs, **kwargs)
        self.rank, self.alpha = rank, alpha
        start = nnx.initializers.he_uniform()
        dtype = self.param_dtype
        self.lora_a: nnx.LoRAParam[jax.Array] = nnx.LoRAParam(
            start(rngs.params(), (in_features, rank), dtype)
        )
        self.lora_b: nnx.LoRAParam[jax.Array] = nnx.LoRAParam(
            jnp.zeros((rank, out_features), dtype)
        )

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        base = self._q_evaluate("__call__", inputs, *args, **kwargs)
        operands = (inputs, self.lora_a[...], self.lora_b[...])
        inputs, a, b = self.promote_dtype(operands, dtype=self.dtype)
        low = (inputs @ a) @ b
        return base + (low * jnp.asarray(self.alpha / self.rank, low.dtype)).astype(base.dtype)


def merge_lora(model: nnx.Module) -> nnx.Module:
    """Returns a model with every adapter added to its weight, in float, and without adapters.

    Args:
      model: has `LoRALinear` layers, float or converted; it is not changed.

    Returns:
      A copy in which those layers are `flax.nnx.Linear`, with float kernels.

    Raises:
      TypeError: if `model` is not a module.
      ValueError: if there are no adapters.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.nf4(block=4), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.LoRALinear(4, 2, rank=1, **options)
      >>> type(jqx.nnx.merge_lora(layer)).__name__
      'Linear'
    """
    check_instance("nnx.merge_lora", "model", model, nnx.Module, fix="pass an nnx module.")
    merged = nnx.clone(model)
    layers = [layer for _, layer in nnx.iter_modules(merged) if isinstance(layer, LoRALinear)]
    if not layers:
        raise fail(
            "nnx.merge_lora",
            "there are no adapters.",
            given=type(model).__name__,
            expected="a model with jqx.nnx.LoRALinear layers",
            fix="pass the model that was trained.",
        )
    for layer in layers:
        _merge(layer)
    return merged


def _merge(layer: LoRALinear) -> None:
    kernel = layer.kernel.get_value()
    kernel = kernel.dequantize() if isinstance(kernel, QTensor) else kernel
    low = layer.lora_a[...] @ layer.lora_b[...]
    low = low * jnp.asarray(layer.alpha / layer.rank, low.dtype)
    layer.kernel = nnx.Param(kernel + low.astype(kernel.dtype))
    for name in (
        "rank",
        "alpha",
        "lora_a",
        "lora_b",
        "policy",
        "mode",
        "backward",
        "quant_dynamic",
        *OWN,
    ):
        if name in vars(layer):
            delattr(layer, name)
    become(layer, nnx.Linear)
