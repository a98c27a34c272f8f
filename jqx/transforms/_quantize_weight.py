"""One parameter of a plan, quantized: in parts, laid out, where it is to lie."""

import functools
import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from .. import _compat
from ..calibrators import Affine
from ..tensor import QSpec, QTensor, Segments
from ..tensor._shared import NONE, Lazy, kept, lay_out_for, put, sharding_of, shardings_of, to_json
from ._paths import Split, is_whole
from ._plan import Plan
from ._site import Weight
from ._split import parts_of

_VERSION = 1
"""Of the numbers that this version makes of a weight."""


class Quantizing(NamedTuple):
    """What a plan makes of one parameter.

    Attributes:
      weights: of its parts; one where it is whole.
      split: where it is split, or `None`.
      affines: scales that are given.
      target: for which codes are laid out, or `None`.
      sharding: where it is to lie, or `None`.
    """

    weights: tuple[Weight | None, ...]
    split: Split | None
    affines: Mapping[str, Affine]
    target: str | None
    sharding: Sharding | None

    def __call__(self, leaf: Any) -> Any:
        """Returns the parameter, quantized."""
        whole = [leaf] if self.split is None else parts_of("quantize_params", leaf, self.split)
        parts = [
            _quantized(x, weight, self.affines, self.target, self.sharding)
            for x, weight in zip(whole, self.weights, strict=True)
        ]
        return parts[0] if self.split is None else Segments(parts, self.split.axis)

    def said(self) -> str | None:
        """Returns all that the result depends on beside the parameter; `None` where values of the
        user's are among it, of which no text tells one from another.
        """
        keys = [weight.key for weight in self.weights if weight is not None]
        given = [np.asarray(x) for key in keys for x in self.affines.get(key, ()) if x is not None]
        try:
            known = [to_json("quantize_params", x, Weight, NONE) for x in self.weights if x]
        except (TypeError, ValueError):
            return None
        digest = hashlib.sha256(b"".join([x.tobytes() for x in given])).hexdigest()
        return f"{_VERSION} {known} {self.split} {digest if given else ''} {self.target}"


def _quantized(
    x: Any,
    weight: Weight | None,
    affines: Mapping[str, Affine],
    target: str | None,
    sharding: Sharding | None,
) -> Any:
    """Returns a weight, or a part of one, quantized and laid out; a part in float as it is."""
    if weight is None:
        return at_place(x, sharding, None)
    quantized = quantize_weight(x, weight.spec, affines.get(weight.key), sharding, weight.path)
    return quantized if target is None else _laid_out(quantized, weight, target)


def at_place(leaf: Any, sharding: Sharding | None, path: str | None) -> Any:
    """Puts a leaf where it is to lie."""
    if sharding is None or not hasattr(leaf, "shape"):
        return leaf
    return put("quantize_params", leaf, sharding, path or "")


def lay_out_weights(params: Any, plan: Plan, target: str) -> Any:
    """Returns parameters with the weights of a plan as a target contracts them fastest."""
    return plan.map_weights(lambda weight, leaf: _laid_out(leaf, weight, target), params)


def _laid_out(leaf: Any, weight: Weight, target: str) -> Any:
    """Lays a weight out; where its scales do not tell what is contracted, the plan does. No kernel
    reads one that is on several devices, as compilers do not part kernels.
    """
    if isinstance(leaf, Lazy):
        return leaf.then(lambda x: _laid_out(x, weight, target), f"for {target}")
    if not is_whole(leaf):
        return leaf
    otherwise = -2 if weight.contracted is None else weight.contracted
    kernels = sharding_of(leaf) is None
    laid_out = lay_out_for("quantize_params", leaf, target, otherwise=otherwise, kernels=kernels)
    return kept("quantize_params", leaf, laid_out, weight.path)


def quantize_weight(
    x: Any,
    spec: QSpec,
    affine: Affine | None = None,
    sharding: Sharding | None = None,
    path: str = "",
) -> QTensor:
    """Quantizes one weight with the scale given, or with its calibrator's, where it is to lie. One
    program is compiled for all weights that are alike.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        q = jax.eval_shape(partial(quantize_weight, spec=spec, affine=affine), x)
        return at_place(q, sharding, path)
    if not _compat.is_concrete(x):
        return at_place(QTensor.quantize(x, spec, affine), sharding, path)
    if sharding is None:
        return _compiled(x, spec, affine)
    x = put("quantize_params", x, sharding, path)
    if not isinstance(sharding, NamedSharding):
        return _compiled(x, spec, affine)
    q = jax.eval_shape(partial(QTensor.quantize, spec=spec), x, affine=affine)
    leaves, structure = jax.tree.flatten(shardings_of("quantize_params", q, sharding, place=path))
    return _partitioned(spec, structure, tuple(leaves))(x, affine=affine)


_compiled = jax.jit(QTensor.quantize, static_argnames="spec")


@functools.lru_cache(maxsize=1024)
def _partitioned(spec: QSpec, structure: Any, leaves: tuple[Sharding, ...]) -> Any:
    """Returns a program that quantizes weights, each device a part of them."""
    return jax.jit(partial(QTensor.quantize, spec=spec), out_shardings=structure.unflatten(leaves))
