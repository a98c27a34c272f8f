"""Trees of the gemma library in int4 or int8: `kernel` and the `scale` that divides it."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .._calls import called
from .._checks import check_instance, require_that, shown
from ..tensor import QTensor

_PREFIX, _ONLY, _WEIGHT = "_IntEinsum_", "_IntEinsum_0", "w"
_KINDS = (jnp.dtype(jnp.int4), jnp.dtype(jnp.int8))


@called("interop.from_gemma", "pass the tree that orbax restores.")
def from_gemma(params: Any) -> Any:
    """Returns parameters of the gemma library, quantized by `gemma.peft.quantize`, with QTensors.

    Published int4 checkpoints of Gemma are such trees, in Orbax: restore them with
    `orbax.checkpoint`. Each `kernel` beside a `scale` becomes one QTensor, under the key that the
    float weight has (`w`, `gating_einsum`, `linear`), so that functions of the float parameters run
    on them, by `jqx.convert(f, jqx.Policy([]))`. Codes are those of the tree. gemma divides by its
    scale, and a QTensor multiplies by one over it, in float32: a weight may differ by one unit in
    the last place.

    Args:
      params: nested dicts of arrays.

    Returns:
      The tree, with QTensors of packed codes; other leaves are the same.

    Raises:
      TypeError: `params` are no dicts.
      ValueError: nothing is quantized, a kernel is no int4 or int8, or its scale does not fit.

    Source: https://github.com/google-deepmind/gemma (gemma.peft, version 3.3).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> kernel = jnp.array([[7, -3], [2, 1]], jnp.int4)
      >>> own = {"_IntEinsum_0": {"kernel": kernel, "scale": jnp.array([[2.0, 4.0]])}}
      >>> jqx.interop.from_gemma({"mlp": own})["mlp"]["w"].dequantize()
      Array([[ 3.5 , -0.75],
             [ 1.  ,  0.25]], dtype=float32)
    """
    mend = "pass what orbax.checkpoint restores: nested dicts of arrays."
    check_instance("interop.from_gemma", "params", params, Mapping, mend=mend)
    count = [0]

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(node, Mapping):
            return node
        made: dict[str, Any] = {}
        for key, item in node.items():
            here = (*path, str(key))
            coded = isinstance(item, Mapping) and "kernel" in item and "scale" in item
            name = key
            if coded and str(key).startswith(_PREFIX):
                name = _WEIGHT if key == _ONLY else str(key).removeprefix(_PREFIX)
            _require(name not in made, here, "two weights of one name", "one", "drop one of them")
            if coded and item["kernel"].dtype in _KINDS:
                _require(len(item) == 2, here, shown([*item]), "kernel and scale", "drop the rest")
                made[name] = _coded(here, item["kernel"], item["scale"])
                count[0] += 1
            else:
                made[name] = walk(item, here)
        return made

    found = walk(params, ())
    _require(
        count[0] > 0,
        (),
        "no `kernel` of int4 or int8 beside a `scale`",
        "a tree that gemma.peft.quantize made",
        "float trees need no reading",
    )
    return found


def _coded(path: tuple[str, ...], kernel: Any, scale: Any) -> QTensor:
    shape, sizes = tuple(kernel.shape), tuple(scale.shape)
    fits = len(shape) == len(sizes) and all(m in (1, n) for n, m in zip(shape, sizes, strict=True))
    given = f"kernel {kernel.dtype.name}{list(shape)}, scale {scale.dtype.name}{list(sizes)}"
    expected = "sizes of the scale that are those of the kernel, or 1"
    _require(fits, path, given, expected, "download the checkpoint again")
    factor = 1 / jnp.asarray(scale).astype(jnp.float32)
    qtype, real = jnp.dtype(kernel.dtype), jnp.dtype(scale.dtype)
    q = QTensor(jnp.asarray(kernel), factor, qtype=qtype, dtype=real)
    return q.pack() if qtype == _KINDS[0] else q


def _require(holds: bool, path: tuple[str, ...], given: str, expected: str, mend: str) -> None:
    require_that(
        holds,
        error=ValueError,
        function="interop.from_gemma",
        problem=f"the tree is not one of gemma{' at ' + '/'.join(path) if path else ''}.",
        given=given,
        expected=expected,
        mend=f"{mend}.",
    )
