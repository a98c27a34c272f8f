"""Trees of the gemma library in int4 or int8, with a `kernel` and the `scale` that divides it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._calls import called
from .._checks import check_instance, shown
from .._errors import fail
from ..calibrators import Groups
from ..tensor import QTensor
from ._bits import pack
from ._coded import CodedLeaf, weight
from ._orbax import OrbaxSource
from ._tree import StoredArray

_PREFIX, _ONLY, _WEIGHT = "_IntEinsum_", "_IntEinsum_0", "w"
_KINDS = (jnp.dtype(jnp.int4), jnp.dtype(jnp.int8))


@called("interop.from_gemma", "pass the tree that Orbax restores.")
def from_gemma(params: Any) -> Any:
    """Returns parameters that `gemma.peft.quantize` has quantized, with QTensors.

    The published int4 checkpoints of Gemma are such trees, in Orbax. `jqx.load(folder)` reads them
    array by array, with the same result. This function takes a tree that has already been restored.

    Each `kernel` with a `scale` becomes one QTensor, under the key of the float weight (`w`,
    `gating_einsum`, `linear`). Thus functions of the float parameters run on them with
    `jqx.convert(f, jqx.Policy([]))`. The codes are those of the tree. gemma divides by its scale,
    and a QTensor multiplies by the reciprocal in float32: a weight may differ by one unit in the
    last place.

    Args:
      params: nested dicts of arrays.

    Returns:
      The tree, with QTensors of packed codes; other leaves are the same.

    Raises:
      TypeError: if `params` is not a dict.
      ValueError: if nothing is quantized, a kernel is not int4 or int8, or its scale does not fit.

    Source: https://github.com/google-deepmind/gemma (gemma.peft, version 3.3).

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> kernel = jnp.array([[7, -3], [2, 1]], jnp.int4)
      >>> own = {"_IntEinsum_0": {"kernel": kernel, "scale": jnp.array([[2.0, 4.0]])}}
      >>> jqx.interop.from_gemma({"mlp": own})["mlp"]["w"].dequantize()
      Array([[ 3.5 , -0.75],
             [ 1.  ,  0.25]], dtype=float32)
    """
    fix = "pass what orbax.checkpoint restores: nested dicts of arrays."
    check_instance("interop.from_gemma", "params", params, Mapping, fix=fix)
    found, count = _replaced(params, _coded)
    _require(
        count > 0,
        (),
        "no `kernel` of int4 or int8 with a `scale`",
        "a tree that gemma.peft.quantize made",
        "use float trees as they are",
    )
    return found


def read_tree(source: OrbaxSource, asked: np.dtype | None) -> tuple[str, Any]:
    """Returns the format of an Orbax checkpoint, and its tree with a reader for each leaf."""

    def leaf(path: tuple[str, ...], kernel: str, scale: str) -> CodedLeaf:
        own = [_Named(source.entries[name].shape, source.dtype(name)) for name in (kernel, scale)]
        groups = _groups(path, *own)
        kinds = [x.dtype for x in own]
        like = weight(groups, kinds[0], np.dtype(np.float32), asked or kinds[1])

        def decode(codes: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
            values = codes
            if kinds[0] == _KINDS[0]:
                values = pack(codes.astype(np.int8).view(np.uint8) & np.uint8(15), 4)
            return [values, np.float32(1) / scales.astype(np.float32)]

        tensors = tuple(zip((kernel, scale), kinds, strict=True))
        return CodedLeaf("/".join(path), tensors, like, decode)

    def stored(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: stored(item) for key, item in node.items()}
        if isinstance(node, list):
            return [stored(item) for item in node]
        return StoredArray(node, source.dtype(node)) if isinstance(node, str) else node

    found, count = _replaced(source.tree, leaf, source.dtype, lambda x: isinstance(x, str))
    return "gemma" if count else "orbax", stored(found)


class _Named(NamedTuple):
    """Shape and dtype of an array that is not read."""

    shape: tuple[int, ...]
    dtype: np.dtype


def _replaced(
    params: Any,
    make: Callable[[tuple[str, ...], Any, Any], Any],
    dtype_of: Callable[[Any], Any] = lambda x: x.dtype,
    is_array: Callable[[Any], bool] = lambda x: hasattr(x, "dtype"),
) -> tuple[Any, int]:
    """Returns a tree with the result of `make` for each `kernel` and `scale`, and their number."""
    count = 0

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        nonlocal count
        if not isinstance(node, Mapping):
            return node
        made: dict[str, Any] = {}
        for key, item in node.items():
            here = (*path, str(key))
            coded = isinstance(item, Mapping) and "kernel" in item and "scale" in item
            coded = coded and all(map(is_array, (item["kernel"], item["scale"])))
            name = key
            if coded and str(key).startswith(_PREFIX):
                name = _WEIGHT if key == _ONLY else str(key).removeprefix(_PREFIX)
            _require(name not in made, here, "two weights of one name", "one", "drop one of them")
            if coded and dtype_of(item["kernel"]) in _KINDS:
                _require(len(item) == 2, here, shown([*item]), "kernel and scale", "drop the rest")
                made[name] = make((*path, str(name)), item["kernel"], item["scale"])
                count += 1
            else:
                made[name] = walk(item, here)
        return made

    return walk(params, ()), count


def _groups(path: tuple[str, ...], kernel: Any, scale: Any) -> Groups:
    """Returns which elements share a scale."""
    shape, sizes = tuple(kernel.shape), tuple(scale.shape)
    fits = len(shape) == len(sizes) and all(m in (1, n) for n, m in zip(shape, sizes, strict=True))
    given = f"kernel {kernel.dtype.name}{list(shape)}, scale {scale.dtype.name}{list(sizes)}"
    expected = "sizes of the scale equal to those of the kernel, or 1"
    _require(fits, path, given, expected, "download the checkpoint again")
    return Groups(shape, tuple(n if m == 1 else 1 for n, m in zip(shape, sizes, strict=True)))


def _coded(path: tuple[str, ...], kernel: Any, scale: Any) -> QTensor:
    _groups(path, kernel, scale)
    factor = 1 / jnp.asarray(scale).astype(jnp.float32)
    qtype, real = jnp.dtype(kernel.dtype), jnp.dtype(scale.dtype)
    q = QTensor(jnp.asarray(kernel), factor, qtype=qtype, dtype=real)
    return q.pack() if qtype == _KINDS[0] else q


def _require(holds: bool, path: tuple[str, ...], given: str, expected: str, fix: str) -> None:
    if not holds:
        raise fail(
            "interop.from_gemma",
            f"the tree is not one of gemma{' at ' + '/'.join(path) if path else ''}.",
            given=given,
            expected=expected,
            fix=f"{fix}.",
        )
