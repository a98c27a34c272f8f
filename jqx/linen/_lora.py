"""Low-rank adapters (Hu et al., "LoRA", arXiv:2106.09685) over a dense layer whose weight may be
quantized (Dettmers et al., "QLoRA", arXiv:2305.14314).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze

from .._errors import fail
from ..modules._shared import without
from ..tensor import QTensor
from ._quantized import Quantized
from ._state import QPARAMS

LORA = "lora"
"""Collection of the adapters, which training differentiates."""


class LoRADense(Quantized, nn.Dense, kw_only=True):
    """`flax.linen.Dense`, quantized, plus the low-rank product `alpha / rank x a b`.

    The adapters `a` (inputs, rank) and `b` (rank, features) are in the collection `lora`; their
    product is initially zero. To train only them, differentiate with respect to that collection.
    The base weight is in `params`, after `convert` in `qparams`. Train adapters over codes in
    `Mode.SIMULATE`, which dequantizes the codes. `init_lora` starts adapters from the products that
    `jqx.algorithms.loftq` or `eora` has found.

    Attributes:
      rank: rank of the adapters.
      alpha: weight of the adapters, times rank.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> layer = jqx.linen.LoRADense(2, rank=1, policy=jqx.presets.nf4(block=4))
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 4)))
      >>> jax.tree.map(jnp.shape, variables["lora"])
      {'a': (4, 1), 'b': (1, 2)}
    """

    rank: int
    alpha: float = 1.0

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        base = self._q_evaluate("__call__", inputs)

        def start() -> jax.Array:
            init = nn.initializers.he_uniform()
            return init(self.make_rng("params"), (inputs.shape[-1], self.rank), self.param_dtype)

        a = self.variable(LORA, "a", start).value
        shape = (self.rank, self.features)
        b = self.variable(LORA, "b", jnp.zeros, shape, self.param_dtype).value
        inputs, a, b = self.promote_dtype(inputs, a, b, dtype=self.dtype)
        low = (inputs @ a) @ b
        return base + (low * jnp.asarray(self.alpha / self.rank, low.dtype)).astype(base.dtype)


def merge_lora(variables: Mapping[str, Any], *, alpha: float = 1.0) -> dict[str, Any]:
    """Returns variables with every adapter added to its weight, in float, and without adapters.

    Args:
      variables: variables of a module with `LoRADense` layers, float or converted.
      alpha: the `alpha` of its layers.

    Returns:
      Variables for the same module with `flax.linen.Dense` layers: float kernels in `params`.

    Raises:
      ValueError: if there are no adapters.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> layer, x = jqx.linen.LoRADense(2, rank=1, policy=jqx.presets.w8a16()), jnp.ones((1, 4))
      >>> merged = jqx.linen.merge_lora(layer.init(jax.random.key(0), x))
      >>> jax.tree.map(jnp.shape, merged)
      {'params': {'bias': (2,), 'kernel': (4, 2)}}
    """
    if not variables.get(LORA):
        raise fail(
            "linen.merge_lora",
            "there are no adapters.",
            given=f"collections {', '.join(variables)}",
            expected=f"a collection {LORA!r}",
            fix="pass all variables of a module with LoRADense layers.",
        )
    kept = {name: unfreeze(tree) for name, tree in variables.items() if name != LORA}
    params, codes = kept.get("params", {}), kept.get(QPARAMS, {})
    kept["params"] = _merge(params, codes, unfreeze(variables[LORA]), alpha)
    kept[QPARAMS] = without(codes, kept["params"])
    return {name: tree for name, tree in kept.items() if tree}


def _merge(params: Any, codes: Any, adapters: Any, alpha: float) -> dict[str, Any]:
    merged = dict(params)
    if isinstance(adapters.get("a"), jax.Array):
        a, b = adapters["a"], adapters["b"]
        kernel = codes["kernel"] if "kernel" in codes else params["kernel"]
        kernel = kernel.dequantize() if isinstance(kernel, QTensor) else kernel
        low = (a @ b) * jnp.asarray(alpha / a.shape[1], a.dtype)
        return {**merged, "kernel": kernel + low.astype(kernel.dtype)}
    for name, inner in adapters.items():
        merged[name] = _merge(params.get(name, {}), codes.get(name, {}), inner, alpha)
    return merged
