"""`quantize_params` and `dequantize_params`: weights of a plan to QTensors, and back to floats.
`quantize_state`: arrays that a function reads and writes, such as caches.
"""

import functools
import hashlib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from .. import compat
from ..checks import called, check_instance, check_pattern, shown
from ..errors import fail, some
from ..signatures import T
from ..statistics.calibrators import Affine
from ..tensor.layout import Layout, lay_out
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy, Segments, abstract, check_read, of_kinds
from ..tensor.serialize import NONE, to_json
from ..tensor.shardings import kept, put, sharding_of, shardings_of
from ..tensor.spec import QSpec, needed_spec
from ..tensor.targets import cache_for, check_target, lay_out_for
from .algorithm import Algorithm, as_result, check_algorithm, merge_codes
from .arguments import check_plan
from .partitioned import as_sharding
from .paths import (
    Params,
    Split,
    as_arguments,
    by_argument,
    flatten,
    is_whole,
    parameter_line,
    part_paths,
    path_of,
    split_leaf,
    stack_leaf,
)
from .plan import Plan, Weight
from .stats import check_finite, in_order, stats_of
from .trace import is_array, is_parameter, is_quantized


@called("quantize_params", "pass for example jqx.quantize_params(params, plan).")
def quantize_params(
    params: T,
    plan: Plan,
    affines: Mapping[str, Affine] | None = None,
    *,
    algorithm: Algorithm | None = None,
    stats: Mapping[str, Any] | None = None,
    donate: bool = False,
    target: str | None = None,
    shardings: Any = None,
) -> T:
    """Returns `params` with every planned weight as a QTensor, rounded to nearest, or as an
    algorithm chooses.

    Args:
      params: the argument of `f` that holds its weights; a tuple of arguments if the plan was made
        with several. Leaves may be `jax.ShapeDtypeStruct`, which gives abstract QTensors.
      plan: from `make_plan`.
      affines: scales to use instead of the calibrators', by key `<path>:weight`. Entries for
        activations are ignored. Pass learned scales here too: without them the weights get the
        scales of their calibrators, which is no error.
      algorithm: chooses the codes, such as `jqx.algorithms.gptq()`; `None` rounds to nearest.
      stats: the statistics that the algorithm needs, from `calibrate_batches(..., observers=
        algorithm.observers)`.
      donate: whether each float weight that is a JAX array is deleted as soon as its codes are
        ready. Then at most all float weights, a copy of one of them and its codes are in memory. An
        array that is a leaf several times is deleted after the last one, and kept if one of these
        leaves is not planned.
      target: `"cpu"`, `"gpu"` or `"tpu"`, such as `jax.default_backend()`, lays the codes out as
        `jqx.pack_for` does, which makes products with few rows several times as fast. `None` keeps
        the default layout, as files have it.
      shardings: the shardings of the arrays of `params`, as `jqx.parallel.shardings` takes them.
        Each device receives its part of a float weight, quantizes it, and never holds another part.
        `None` leaves weights in place: if one is partitioned over devices, codes and scales are
        partitioned in the same way.

    Returns:
      The same tree. Leaves that the plan does not quantize are the very same objects, unless
      `shardings` move them. A `jqx.interop.Lazy` is quantized when it is read. If rules select
      steps of a scan, the weights that it steps over are `Segments` of QTensors, and of arrays for
      parts that stay in float. For type checkers the result has the type of `params`, so that it
      fits the function: a QTensor among its leaves is an array to them. To use one as a QTensor,
      write `typing.cast(jqx.QTensor, qparams["w"])`.

    Raises:
      TypeError: if `plan` is not a `Plan`, or `algorithm` is not an algorithm.
      ValueError: if `stats` are given without an algorithm, or `algorithm` together with `affines`
        or `donate`; if a weight of the plan is missing, has another shape or dtype, or is already
        quantized; if `params` hold learned scales, as `jqx.linen.learn_scales` returns them, that
        `affines` does not have; if `donate=True` under `jax.jit`; if `target` is unknown; or if
        elements that share a scale would be on two devices.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda p, x: x @ p["w"] + p["b"]
      >>> params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(params, jnp.ones((1, 4)))
      >>> jqx.quantize_params(params, plan)["w"]
      QTensor(int8[4, 3] per_axis(1), scale float32[1, 3], dtype=float32, 24 bytes)
    """
    check_plan("quantize_params", plan, params, order="quantize_params(params, plan)")
    if target is not None:
        check_target("quantize_params", target, None)
    check_algorithm("quantize_params", algorithm)
    plan.check_affines("quantize_params", affines)
    _check_together(algorithm, stats, affines, donate)
    check_arguments("quantize_params", plan.params, params)
    named = plan.parameters.named("quantize_params", by_argument(plan.params, params))
    check_no_learned_scales("quantize_params", named, plan, affines or ())
    tree = jax.tree.structure(by_argument(plan.params, params), is_leaf=is_whole)
    leaf_shardings = _leaf_shardings(plan, tree, shardings, named)
    if algorithm is not None:
        check_read("quantize_params", named)
        check_finite_weights("quantize_params", plan, params)
        check_finite("quantize_params", in_order(plan, stats_of(stats or {}).flags))
        quantizing = as_result(algorithm(plan, params, stats)).params
        nearest = quantize_params(dequantize_params(quantizing), plan)
        codes = merge_codes("quantize_params", quantizing, nearest)
        codes = codes if target is None else lay_out_weights(codes, plan, target)
        leaves = tree.flatten_up_to(by_argument(plan.params, codes))
        leaves = list(map(put_leaf, leaves, leaf_shardings, [name for name, _ in named]))
        return as_arguments(plan.params, jax.tree.unflatten(tree, leaves))
    planned: list[list[Weight | None]] = []  # part by part; empty if it is not quantized
    for name, _ in named:
        weights = [plan.weight_at(path) for path in part_paths(name, plan.split_of(name))]
        planned.append(weights if any(weights) else [])
    for weights, (name, leaf) in zip(planned, named, strict=True):
        if weights and is_whole(abstract(leaf)):
            problem = f"the weight {name!r} is quantized already."
            raise fail("quantize_params", problem, fix="pass the float parameters.")
    parameters = [(name, leaf) for name, leaf in named if name is not None and is_parameter(leaf)]
    plan.check_parameters("quantize_params", list(itertools.starmap(parameter_line, parameters)))
    last_use = {id(leaf): index for index, (_, leaf) in enumerate(named)}
    stays = {id(leaf) for weights, (_, leaf) in zip(planned, named, strict=True) if not weights}
    leaves = []
    for index, (weights, (name, leaf)) in enumerate(zip(planned, named, strict=True)):
        sharding = leaf_shardings[index]
        if not weights:
            leaves.append(leaf if shardings is None else put_leaf(leaf, sharding, name))
            continue
        split = plan.split_of(name)
        quantizing = Quantizing(tuple(weights), split, affines or {}, target, sharding)
        if isinstance(leaf, Lazy):
            leaves.append(leaf.then(quantizing, quantizing.description()))
        else:
            leaves.append(quantizing(leaf))
        if donate and last_use[id(leaf)] == index and id(leaf) not in stays:
            _delete(leaf, leaves[-1])
    return as_arguments(plan.params, jax.tree.unflatten(tree, leaves))


@overload
def dequantize_params(params: QTensor | Segments) -> jax.Array: ...
@overload
def dequantize_params(params: T) -> T: ...
@called("dequantize_params", "pass one tree: jqx.dequantize_params(params).")
def dequantize_params(params: Any) -> Any:
    """Returns `params` with every QTensor, and all Segments, dequantized to a float array.

    Args:
      params: any pytree; leaves that are not QTensors are the very same objects, and those that are
        `jqx.interop.Lazy` stay lazy.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> q = jqx.QTensor.quantize(jnp.array([1.0, -127.0]), jqx.QSpec(jnp.int8))
      >>> jqx.dequantize_params({"w": q})
      {'w': Array([   1., -127.], dtype=float32)}
    """
    return jax.tree.map(_dequantized, params, is_leaf=is_whole)


def _dequantized(x: Any) -> Any:
    if isinstance(x, Lazy):
        return x.then(_dequantized, "in float") if is_whole(x.spec) else x
    return of_kinds(lambda q: q.dequantize(), x) if is_whole(x) else x


def _check_together(algorithm: Any, stats: Any, affines: Any, donate: bool) -> None:
    if algorithm is None and stats is not None:
        problem = "`stats` have no effect: rounding to nearest does not read them."
        fix = "pass algorithm=, such as gptq(); scales of activations go to convert."
        raise fail("quantize_params", problem, fix=fix)
    if algorithm is not None and (affines or donate):
        problem = "an algorithm finds the scales of weights, and reads all of them at once."
        details = "affines" if affines else "donate=True"
        fix = "leave them out; scales of activations go to jqx.convert."
        raise fail("quantize_params", problem, given=details, fix=fix)


def _leaf_shardings(
    plan: Plan, tree: Any, shardings: Any, named: list[tuple[str | None, Any]]
) -> list[Sharding | None]:
    """Returns the sharding of each leaf: from `shardings`, or its own if it is partitioned."""
    if shardings is None:
        return [sharding_of(leaf) for _, leaf in named]
    check_arguments("quantize_params", plan.params, shardings)
    try:
        flat = tree.flatten_up_to(by_argument(plan.params, shardings))
    except ValueError as error:
        problem = f"`shardings` are not for these parameters: {str(error).splitlines()[0]}"
        fix = "make them from it, such as jax.tree.map(lambda x: x.sharding, params)."
        raise fail("quantize_params", problem, fix=fix) from error
    pairs = zip(named, flat, strict=True)
    return [as_sharding("quantize_params", sharding, name or "") for (name, _), sharding in pairs]


def named_leaves(function: str, params: Any, plan: Plan) -> list[tuple[str | None, Any]]:
    """Returns the leaves of parameters with the names that the plan has, or `None` for those that
    are not weights. QTensors are leaves, and weights that the plan splits are returned in parts.
    """
    leaves: list[tuple[str | None, Any]] = []
    for name, leaf in plan.parameters.named(function, params):
        split = plan.split_of(name)
        leaves += zip(part_paths(name, split), split_leaf(function, leaf, split), strict=True)
    return leaves


def check_finite_weights(function: str, plan: Plan, params: Any) -> None:
    """Raises if a weight that the plan quantizes holds a NaN or an infinity; lazy leaves are
    checked when they are read.
    """
    for name, leaf in named_leaves(function, by_argument(plan.params, params), plan):
        is_float = not isinstance(leaf, Lazy) and not is_whole(abstract(leaf))
        if is_float and plan.weight_at(name) is not None:
            check_finite_weight(function, leaf, name or "")


def _delete(x: Any, quantized: QTensor | Segments) -> None:
    """Deletes a float weight once its codes are ready."""
    if not compat.is_concrete(x):
        fix = "call quantize_params outside of jit, or use jax.jit(..., donate_argnums=...)."
        raise fail("quantize_params", "`donate` has no effect under jax.jit.", fix=fix)
    if isinstance(x, jax.Array):
        jax.block_until_ready(quantized)
        x.delete()


def check_arguments(function: str, argnums: Params, params: Any) -> None:
    """Checks that arguments are given as a tuple if several hold weights."""
    if isinstance(argnums, int):
        return
    is_tuple = isinstance(params, (tuple, list))
    if not is_tuple or len(params) != len(argnums):
        details = f"a {type(params).__name__}" + (f" of {len(params)}" if is_tuple else "")
        fix = f"pass a tuple of the {len(argnums)} arguments named in params=, in that order."
        raise fail(function, "the weights are in several arguments.", given=details, fix=fix)


# `quantize_state`: arrays that a function reads and writes, such as caches, become QTensors.


@called("quantize_state", 'pass for example jqx.quantize_state(cache, {".*key": "int8:token"}).')
def quantize_state(
    tree: T,
    specs: Mapping[str, QSpec | str | tuple[QSpec | str, Affine]],
    *,
    target: str | None = None,
) -> T:
    """Returns a pytree with some of its float arrays as QTensors, such as the caches of a decoder.

    Every transform takes such a tree in place of the float one. The function still sees arrays of
    the same shape and dtype, contractions read the codes, and values are quantized when written.

    Args:
      tree: caches of plain JAX, a collection of linen variables, an `nnx.State`; any pytree of
        arrays, or of `jax.ShapeDtypeStruct`, which gives abstract QTensors.
      specs: how to quantize leaves, by regular expressions that must match the path of a leaf in
        full. Paths are named as for weights in a plan, and the first match applies. A value is a
        `QSpec`, a scheme such as `"int8"` (one scale for each token), or a pair of either and an
        `Affine` if many writes share a scale. The relative granularities `per_token()` and
        `per_channel()` give each vector along the last axis its own scale, and `per_group(size)`
        each of its blocks.
      target: the platform whose kernel reads the caches in `jqx.decode_attention`, as for
        `jqx.pack_for`; `None` uses no kernel.

    Returns:
      The same tree; leaves that nothing matches are the very same objects. For type checkers it has
      the type of `tree`, as in `jqx.quantize_params`.

    Raises:
      TypeError: if `specs` is not a dict of specs, or a matched leaf has no float dtype.
      ValueError: if a regular expression is invalid or matches no remaining leaf; if a leaf is
        already quantized; if a spec does not fit a leaf; if a scale that many writes share would
        come from an array of zeros; or if the target is unknown, or its kernel cannot read such
        codes.

    Gradient: from JAX, for scales; none for codes.
    NaN and infinities: as in `QTensor.quantize`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> cache = {"keys": jnp.zeros((2, 128, 4, 64)), "length": jnp.int32(0)}
      >>> jqx.quantize_state(cache, {"keys": jqx.QSpec(jnp.int8, jqx.per_token())})["keys"]
      QTensor(int8[2, 128, 4, 64] per_axis(0, 1, 2), scale float32[2, 128, 4, 1], dtype=float32, \
69,632 bytes)
    """
    rules = _rules(specs)
    named = [(path_of(keys), leaf) for keys, leaf in flatten(tree)]
    used: set[str] = set()
    leaves = []
    for name, leaf in named:
        pattern = next((text for text, (regex, _) in rules.items() if regex.fullmatch(name)), None)
        if pattern is None:
            leaves.append(leaf)
            continue
        used.add(pattern)
        q = _quantized(name, leaf, *rules[pattern][1])
        leaves.append(q if target is None else cache_for("quantize_state", q, target))
    unused = [text for text in rules if text not in used]
    if unused:
        problem = f"{unused[0]!r} matches no leaf that is left by earlier entries."
        details = f"the paths {some(repr(name) for name, _ in named)}"
        fix = "let it match a path in full, move it up, or drop it."
        raise fail("quantize_state", problem, given=details, fix=fix)
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_whole), leaves)


Rules = dict[str, tuple[re.Pattern[str], tuple[QSpec, Affine | None]]]


def _rules(specs: Any) -> Rules:
    """Returns the entries, compiled, after checking their types."""
    fix = 'pass for example {".*key": jqx.QSpec("int8", jqx.per_token())}.'
    check_instance("quantize_state", "specs", specs, Mapping, fix=fix)
    rules: Rules = {}
    for text, entry in specs.items():
        pair: Any = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        spec, affine = pair
        if not (isinstance(text, str) and isinstance(spec, (QSpec, str))):
            problem, details = (
                "`specs` has an entry that is not a spec.",
                f"{text!r}: {shown(entry)}",
            )
            raise fail("quantize_state", problem, given=details, fix=fix, error=TypeError)
        spec = needed_spec("quantize_state", f"specs[{text!r}]", spec, "state")
        pattern = check_pattern("quantize_state", f"specs[{text!r}]", text)
        rules[text] = pattern, (spec, affine and Affine(*affine))
    return rules


def _quantized(name: str, leaf: Any, spec: QSpec, affine: Affine | None) -> QTensor:
    if is_quantized(leaf):
        problem = f"the leaf {name!r} is quantized already."
        fix = "quantize the float state, or leave this leaf out."
        raise fail("quantize_state", problem, given=repr(leaf), fix=fix)
    if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        problem = f"the leaf {name!r} is not an array of floats."
        details = f"dtype {leaf.dtype}" if is_array(leaf) else f"an object {type(leaf).__name__}"
        fix = 'write an expression that does not match it, such as ".*(key|value)".'
        raise fail("quantize_state", problem, given=details, fix=fix, error=TypeError)
    resolved = spec.resolve(leaf.ndim, range(leaf.ndim - 1))
    try:
        q = quantize_weight(leaf, resolved, affine)
    except (TypeError, ValueError) as error:
        error.add_note(f"  at:       the leaf {name!r} of the state")
        raise
    if affine is None and _shares_a_scale(q) and _is_zero(leaf):
        problem = f"the scale of {name!r} would come from zeros and be shared by later writes."
        details = f"{spec.granularity} for an array of zeros of shape {leaf.shape}"
        fix = "pass granularity=jqx.per_token(), or (spec, jqx.calibrators.Affine(scale))."
        raise fail("quantize_state", problem, given=details, fix=fix)
    return q


def _shares_a_scale(q: QTensor) -> bool:
    """Whether elements share a scale along an axis before one with several scales, or all do."""
    varies = [m > 1 for m, n in zip(q.scale.shape, q.shape, strict=True) if n > 1]
    return (bool(varies) and varies != sorted(varies, reverse=True)) or (
        len(varies) > 1 and not any(varies)
    )


def _is_zero(x: Any) -> bool:
    is_concrete = not isinstance(x, jax.ShapeDtypeStruct) and compat.is_concrete(x)
    return is_concrete and not bool(jnp.any(x != 0))


_NUMBERS_VERSION = 1
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
        return f"{_NUMBERS_VERSION} {texts} {self.split} {digest if arrays else ''} {self.target}"


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
