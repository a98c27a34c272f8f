"""Quantizes one parameter of a plan: in parts, laid out for a target, and sharded, after checks of
its values.
"""

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from .. import compat
from ..errors import fail, some
from ..statistics.calibrators import Affine
from ..tensor.layout import Layout, lay_out
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy
from ..tensor.serialize import NONE, to_json
from ..tensor.shardings import kept, put, sharding_of, shardings_of
from ..tensor.spec import QSpec
from ..tensor.targets import lay_out_for
from .paths import Split, is_whole
from .plan import Plan, Weight
from .unstack import split_leaf, stack_leaf

_VERSION = 1
"""The version of the numbers that result from quantizing a weight."""


class Quantizing(NamedTuple):
    """How a plan quantizes one parameter.

    Attributes:
      weights: the weights of its parts; a single one if it is whole.
      split: how it is split, or `None`.
      affines: scales that are given.
      target: target of the layout of codes, or `None`.
      sharding: its sharding, or `None`.
    """

    weights: tuple[Weight | None, ...]
    split: Split | None
    affines: Mapping[str, Affine]
    target: str | None
    sharding: Sharding | None

    def __call__(self, leaf: Any) -> Any:
        """Returns the parameter, quantized."""
        parts = split_leaf("quantize_params", leaf, self.split)
        return stack_leaf(list(map(self._part, parts, self.weights)), self.split)

    def _part(self, x: Any, weight: Weight | None) -> Any:
        """Returns a part quantized and laid out; a float part is unchanged."""
        if weight is None:
            return put_leaf(x, self.sharding, None)
        check_finite_weight("quantize_params", x, weight.path)
        affine = self.affines.get(weight.key)
        q = quantize_weight(x, weight.spec, affine, self.sharding, weight.path)
        return q if self.target is None else _laid_out(q, weight, self.target)

    def description(self) -> str | None:
        """Describes everything that the result depends on apart from the parameter; `None` if it
        depends on objects of the user, which no text can identify.
        """
        keys = [weight.key for weight in self.weights if weight is not None]
        arrays = [np.asarray(x) for key in keys for x in self.affines.get(key, ()) if x is not None]
        try:
            texts = [to_json("quantize_params", x, Weight, NONE) for x in self.weights if x]
        except (TypeError, ValueError):
            return None
        digest = hashlib.sha256(b"".join([x.tobytes() for x in arrays])).hexdigest()
        return f"{_VERSION} {texts} {self.split} {digest if arrays else ''} {self.target}"


def put_leaf(leaf: Any, sharding: Sharding | None, path: str | None) -> Any:
    """Puts a leaf on devices according to its sharding."""
    if sharding is None or not hasattr(leaf, "shape"):
        return leaf
    return put("quantize_params", leaf, sharding, path or "")


def lay_out_weights(params: Any, plan: Plan, target: str) -> Any:
    """Returns parameters with the weights of a plan in the fastest layout for a target."""
    return plan.map_weights(lambda weight, leaf: _laid_out(leaf, weight, target), params)


def _laid_out(leaf: Any, weight: Weight, target: str) -> Any:
    """Lays a weight out. If its scales do not show which axis is contracted, the plan does. Kernels
    cannot read a weight on several devices, because compilers do not partition kernels.

    A layout that views of the function could not follow would be undone in each call. Then only
    the dtype of the codes is that for the target.
    """
    if isinstance(leaf, Lazy):
        return leaf.then(lambda x: _laid_out(x, weight, target), f"for {target}")
    if not is_whole(leaf):
        return leaf
    default = -2 if weight.contracted is None else weight.contracted
    lay_out_as = partial(lay_out_for, "quantize_params", leaf, target, default=default)
    laid_out = lay_out_as(kernels=sharding_of(leaf) is None)
    if not _follows(laid_out, weight):
        laid_out = lay_out_as(kernels=False)
    if not _follows(laid_out, weight):
        laid_out = lay_out(leaf, Layout(int8=laid_out.layout.int8))
    return kept("quantize_params", leaf, laid_out, weight.path)


def _follows(q: Any, weight: Weight) -> bool:
    """Whether the layout of a QTensor can follow the views of the function."""
    return q.layout is None or q.layout.follows(weight.moved, weight.cut)


def quantize_weight(
    x: Any,
    spec: QSpec,
    affine: Affine | None = None,
    sharding: Sharding | None = None,
    path: str = "",
) -> QTensor:
    """Quantizes one weight with the given scale, or with that of its calibrator, in its sharding.
    One program is compiled for all weights of the same kind.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        q = jax.eval_shape(partial(quantize_weight, spec=spec, affine=affine), x)
        return put_leaf(q, sharding, path)
    if not compat.is_concrete(x):
        return put_leaf(QTensor.quantize(x, spec, affine), sharding, path)
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
    """Returns a program that quantizes weights, with a part on each device."""
    return jax.jit(partial(QTensor.quantize, spec=spec), out_shardings=structure.unflatten(leaves))


# The check that weights are finite, before they are quantized.


_MOST = 2**22
"""Maximum number of elements that are looked at at once on the host."""


def check_finite_weight(function: str, x: Any, path: str) -> None:
    """Raises if a weight holds a NaN or an infinity. Traced and abstract ones are not checked."""
    if isinstance(x, jax.ShapeDtypeStruct) or not compat.is_concrete(x):
        return
    if not jnp.issubdtype(x.dtype, jnp.inexact) or _is_finite(x):
        return
    nans, bad = (int(np.asarray(jnp.sum(f(x)))) for f in (jnp.isnan, lambda x: ~jnp.isfinite(x)))
    counts = ((nans, "NaN"), (bad - nans, "infinite"))
    details = f"{' and '.join(f'{n} {kind}' for n, kind in counts if n)} of {x.size} elements"
    fix = "replace these values, or add a rule that leaves this weight in float."
    raise fail(function, f"the weight {path!r} is not finite.", given=details, fix=fix)


def _is_finite(x: Any) -> bool:
    is_jax = isinstance(x, jax.Array)
    if is_jax and (len(x.devices()) > 1 or next(iter(x.devices())).platform != "cpu"):
        return bool(jnp.isfinite(x).all())  # reading it on the host would copy it
    flat = np.asarray(x).reshape(-1)
    parts = range(0, flat.size, _MOST)
    return all(np.isfinite(flat[start : start + _MOST]).all() for start in parts)


# Scales of weights that were learned, and are not those that the weights are quantized with.


def check_no_learned_scales(
    function: str,
    named: Sequence[tuple[str | None, Any]],
    plan: Plan,
    affines: Collection[str] = (),
) -> None:
    """Raises if parameters hold learned scales of weights, as `jqx.linen.learn_scales` returns
    them, that are not among the `affines` ones: the weights would get other scales.
    """
    names = {name.removesuffix("/scale") for name, _ in named if name is not None}
    learned = sorted((names & {weight.key for weight in plan.weights}).difference(affines))
    if learned:
        problem = "the parameters hold learned scales, which the weights would not get."
        fix = "use jqx.linen.convert(module, variables, x, ...), or pass affines= with these."
        raise fail(function, problem, given=some(learned), fix=fix)


def check_scales_of_weights(
    function: str,
    plan: Plan,
    named: Sequence[tuple[str | None, Any]],
    affines: Mapping[str, Affine],
) -> None:
    """Raises if a quantized weight has another scale than the one in `affines`."""
    scales = {x.path: affines[x.key].scale for x in plan.weights if x.key in affines}
    pairs = [(path, q.scale) for path, q in named if path in scales and isinstance(q, QTensor)]
    differing = [path for path, scale in pairs if not _equal(scale, scales[path])]
    if differing:
        problem = f"weights have other scales than `affines` says: {some(differing)}."
        fix = "pass the scales to both: jqx.quantize_params(params, plan, affines)."
        raise fail(function, problem, fix=fix)


def _equal(scale: Any, learned: Any) -> bool:
    """Returns whether a scale is the learned one, in the shape and dtype that the weight has it."""
    if isinstance(scale, QTensor):
        return True
    array = np.asarray(scale)
    expected = np.asarray(learned).astype(array.dtype).reshape(-1)
    flat = array.reshape(-1)
    return flat.size == expected.size and bool(
        np.all((flat == expected) | (np.isnan(flat) & np.isnan(expected)))
    )
