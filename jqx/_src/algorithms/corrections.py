"""Corrections of what codes change: products of narrow matrices (EoRA, LoftQ), and biases."""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..checks import check_fields, whole
from ..compat import Eqn
from ..errors import fail
from ..statistics.calibrators import Affine
from ..statistics.statistics import Mean, MeanStats, ObservedSite, check_weight, flags, hessian
from ..table import Printed
from ..transforms.algorithm import AlgorithmResult, Unstacked
from ..transforms.calibrate import (
    Batch,
    Observe,
    arguments_of,
    arrays_of,
    calibrate_batches,
    observed,
    progress_bar,
)
from ..transforms.channel_map import ChannelMap, Channels, LowRank
from ..transforms.convert import simulate
from ..transforms.find import contractions
from ..transforms.higher_order import Records
from ..transforms.map_channels import map_channels
from ..transforms.plan import Plan, Site
from ..transforms.quantize_params import dequantize_params, quantize_params
from ..transforms.row_counts import is_counted, value_of
from ..transforms.rules import CONTRACTIONS
from ..transforms.stats import (
    OnNonfinite,
    Stats,
    check_finite,
    check_mode,
    in_order,
    merged_flags,
    observed_parts,
    warn_left_out,
)
from ..transforms.trace import Call, is_array, is_quantized, trace_call
from ..transforms.views import Address
from ..transforms.walk import HOLDING, Enclosing, addressed
from .channels import Folds, Rewritten, Visit
from .grids import reached_sites
from .interface import Few, algorithm
from .labels import Array
from .scaling import find_pairs
from .stages import body_of

# Low-rank compensation: approximates the error of codes by a product of two narrow matrices.


_EORA = "algorithms.eora"
_LEAST = 1e-10
"""Eigenvalues below this part of the largest count as directions without inputs."""


def solve(E: Array, H: Array, rank: int) -> tuple[Array, Array, Array]:
    """Returns matrices `a` [*batch, channels, rank] and `b` [*batch, rank, rows] that approximate
    the error of a weight in the space where inputs are white, and the squared error before and
    after: algorithm 1 of EoRA.

    Args:
      E: the error, [*batch, rows, channels].
      H: the sum of `x x'` over the inputs `x`, [*batch, channels, channels].
      rank: rank of the product.
    """
    values, Q = np.linalg.eigh(np.asarray(H, np.float64))
    values = np.where(values > _LEAST * values[..., -1:], values, 0)
    root = np.sqrt(values)[..., None, :]
    inverse = np.divide(1, root, out=np.zeros_like(root), where=root > 0)
    a, b, s = narrow((E @ Q) * root, rank)
    remainder = s[..., a.shape[-1] :]
    a = Q @ (a * np.swapaxes(inverse, -1, -2))
    return a, b, np.array([np.sum(s**2), np.sum(remainder**2)])


@dataclasses.dataclass(frozen=True)
class Compensation:
    """The effect of a product of two narrow matrices at a site, over all steps of its scans.

    Attributes:
      site: its name.
      rank: rank of the product.
      before: the squared error of the product of inputs and codes, per input.
      after: the same with the compensation.
      why: why there is no compensation.
    """

    site: str
    rank: int
    before: float = 0.0
    after: float = 0.0
    why: str = ""


class CompensationReport(Printed, tuple[Compensation, ...]):
    """The sites of a plan with their compensations. Prints as a table."""

    def __str__(self) -> str:
        lines = [f"{'rank':>6} {'error before':>12} {'after':>10}  site"]
        for x in self:
            reason = f" (none: {x.why})" if x.why else ""
            lines.append(f"{x.rank:6} {x.before:12.4g} {x.after:10.4g}  {x.site}{reason}")
        return "\n".join(lines)


@algorithm("eora", "pass options by name, such as jqx.algorithms.eora(rank=64).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class eora:
    """Adds a product of two narrow matrices, `(x a) b`, to each product with a quantized weight. It
    compensates for most of the quantization error, measured by the squared error over batches: an
    algorithm of `jqx.ptq` that runs after codes are chosen.

    It is the best product of its rank: it comes from the singular vectors of the error of the
    weight, in the space where inputs are white.

    It is added at the site (`jqx.Quantized.maps`), in float: `rank * (inputs + outputs)` numbers,
    and as many multiplications for each row. Convolutions, experts and lookups are not supported;
    the report lists them.

    Attributes:
      rank: rank of the product, at most that of the weight.
      weight: weights of the rows, as in `jqx.extend.hessian`.

    Raises:
      TypeError: an option has the wrong type.
      ValueError: `rank` is less than 1; at run time, no site can have a compensation.

    Source: Liu et al., arXiv:2410.21271 (EoRA); Zhang et al., arXiv:2410.06040 (QERA).

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> w, x = jax.random.normal(jax.random.key(0), (2, 8, 8))
      >>> quantize = jqx.ptq(
      ...     lambda w, x: x @ w, jqx.presets.w4a16(weight={"granularity": jqx.per_channel()}),
      ...     jqx.algorithms.eora(rank=8), progress=False,
      ... )
      >>> bool(jnp.allclose(quantize(w, [x])(x), x @ w, atol=1e-4))
      True
    """

    rank: int = 32
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_fields(_EORA, self, rank=whole(1))
        check_weight(_EORA, self.weight)

    def correct(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        codes: Any,
        affines: Mapping[str, Affine],
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> AlgorithmResult:
        """Returns the same codes, and the products to add at sites."""
        batches = list(batches)
        folds, visits = compensated(_EORA, f, plan, params, batches[0])
        sites = folds.sites
        observer = hessian(weight=self.weight)
        paths = {re.escape(folds.site(x).path): observer for x in visits}
        options: Any = {"progress": progress, "on_nonfinite": on_nonfinite}
        stats = calibrate_batches(f, plan, params, batches, observers=paths, **options)
        exact, real = folds.leaves(params), folds.leaves(dequantize_params(codes))
        parts: dict[str, list[tuple[Visit, Array, Array]]] = {}
        errors: dict[str, Array] = {}
        for visit in visits:
            key, name = folds.key(visit), folds.name(visit)
            gram = stats[f"{key}@{observer}"]
            w, rounded = (
                np.asarray(leaves[visit.leaf_index]).ravel()[visit.elements].astype(np.float64)
                for leaves in (exact, real)
            )
            a, b, error = solve(w - rounded, np.asarray(gram.products)[visit.steps], self.rank)
            rows = max(float(np.max(np.asarray(gram.rows))), 1.0)
            errors[name] = errors.get(name, np.zeros(2)) + error / rows
            parts.setdefault(folds.site(visit).output_key, []).append((visit, a, b))
        maps = {key: in_steps(site_parts) for key, site_parts in parts.items()}
        reason = "its weight has another use, or it is not a plain product"
        report = CompensationReport(
            Compensation(x.name, maps[x.output_key].a.shape[-1], *errors[x.name].tolist())
            if x.name in errors
            else Compensation(x.name, 0, why=reason)
            for x in sites
        )
        return AlgorithmResult(codes, report, maps, basis_of(folds, [*parts.values()]))


def narrow(x: Array, rank: int) -> tuple[Array, Array, Array]:
    """Returns matrices [*batch, channels, rank] and [*batch, rank, rows] and singular values.

    Their product is the best approximation of its rank of the transpose of `x`,
    [*batch, rows, channels]. The singular values are those of the product.
    """
    u, s, v = np.linalg.svd(x, full_matrices=False)
    rank = min(rank, s.shape[-1])
    root = np.sqrt(s[..., :rank])
    a = np.swapaxes(v[..., :rank, :] * root[..., :, None], -1, -2)
    return a, np.swapaxes(u[..., :rank] * root[..., None, :], -1, -2), s


def compensated(
    function: str, f: Callable[..., Any], plan: Plan, params: Any, batch: Any
) -> tuple[Folds, list[Visit]]:
    """Returns the sites that can have a product of narrow matrices, in each step of their scans:
    plain products whose weight has no other use.
    """
    folds = find_pairs(f, plan)(*arguments_of(plan, params, batch)).folds
    visits = [x for x in folds.visits if folds.weight(x) is not None]
    supported = [x for x in visits if x.site.op == "dot_general"]
    if not supported:
        problem = "no site can have a compensation: none is a plain product with a quantized "
        problem += "weight that has no other use."
        detail = ", ".join(x.name for x in folds.sites[:4]) or "no site with a weight"
        fix = "leave this algorithm out."
        raise fail(function, problem, given=detail, fix=fix)
    return folds, supported


def basis_of(
    folds: Folds, parts: Sequence[list[tuple[Visit, Array, Array]]]
) -> Callable[[Any], Any]:
    """Returns a function of parameters that subtracts the products that are added at sites."""

    def basis(params: Any) -> Any:
        new = Rewritten(folds, params)
        for visit, a, b in itertools.chain(*parts):
            new.flat(visit.leaf_index)[visit.elements] -= np.swapaxes(a @ b, -1, -2)
        return new.params()

    return basis


def without(leaf: Any, parts: list[tuple[Visit, Array, Array]]) -> jnp.ndarray:
    """Returns a weight minus the products of narrow matrices."""
    result = np.array(leaf, np.float64)
    for visit, a, b in parts:
        result.reshape(-1)[visit.elements] -= np.swapaxes(a @ b, -1, -2)
    return jnp.asarray(result, leaf.dtype)


def in_steps(parts: list[tuple[Visit, Array, Array]]) -> LowRank:
    """Returns the compensation of a site over all steps of the surrounding scans."""
    loops = tuple(loop.length for loop in parts[0][0].site.loops)
    a, b = (np.zeros((*loops, *parts[0][i].shape), np.float32) for i in (1, 2))
    for visit, own_a, own_b in parts:
        a[visit.steps], b[visit.steps] = own_a, own_b
    return LowRank(jnp.asarray(a), jnp.asarray(b))


# LoftQ: codes plus a product of two narrow matrices that together approximate the weight.


@algorithm("loftq", "pass options by name, such as jqx.algorithms.loftq(rank=64).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class loftq:
    """Approximates each weight by codes plus a product of two narrow matrices: an algorithm of
    `jqx.ptq` that needs no data.

    It alternates between two steps: codes are rounded from the weight minus the product, and the
    product is the best of its rank for the weight minus the dequantized codes. For each weight the
    best round is kept. Use it to start fine-tuning of narrow matrices next to codes (QLoRA). `eora`
    uses the inputs, and has a smaller error without training.

    The product is stored as a map at its site, like that of `eora`, in `quantized.maps`.
    `jqx.linen.init_lora` and `jqx.nnx.init_lora` turn it into trainable adapters.

    Attributes:
      rank: rank of the product, at most that of the weight.
      rounds: number of rounds; with 1, codes are those of rounding to nearest.

    Raises:
      TypeError: an option has the wrong type.
      ValueError: an option is less than 1; at run time, no site can have such a product.

    Source: Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models",
    arXiv:2310.08659.

    Example:
      >>> import jqx, jax
      >>> w, x = jax.random.normal(jax.random.key(0), (2, 32, 32))
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int2:channel"})
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.loftq(rank=8), progress=False)
      >>> entry = quantize(w, [x]).details[0]
      >>> entry.after < 0.6 * entry.before
      True
    """

    rank: int = 32
    rounds: int = 5

    def __post_init__(self) -> None:
        check_fields("algorithms.loftq", self, rank=whole(1), rounds=whole(1))

    def run(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
    ) -> AlgorithmResult:
        """Returns parameters that round to the codes, and the products to add at sites."""
        folds, supported = compensated("algorithms.loftq", f, plan, params, next(iter(batches)))
        of_place: dict[int, list[Visit]] = {}
        for visit in supported:
            of_place.setdefault(visit.leaf_index, []).append(visit)
        exact, leaves = folds.leaves(params), folds.leaves(params)
        initial: dict[int, float] = {}
        best: dict[int, tuple[float, Any, list[tuple[Visit, Array, Array]]]] = {}
        for _ in range(self.rounds):
            codes = quantize_params(folds.with_leaves(params, leaves), plan)
            real = folds.leaves(dequantize_params(codes))
            for leaf_index, visits in of_place.items():
                error, products = 0.0, []
                difference = np.asarray(exact[leaf_index], np.float64) - np.asarray(
                    real[leaf_index], np.float64
                )
                initial.setdefault(leaf_index, float(np.sum(difference**2)))
                for visit in visits:
                    a, b, s = narrow(difference.ravel()[visit.elements], self.rank)
                    error += float(np.sum(s[..., a.shape[-1] :] ** 2))
                    products.append((visit, a, b))
                if leaf_index not in best or error < best[leaf_index][0]:
                    best[leaf_index] = error, leaves[leaf_index], products
                leaves[leaf_index] = without(exact[leaf_index], products)
        final_leaves = {**exact, **{leaf_index: leaf for leaf_index, (_, leaf, _) in best.items()}}
        maps, entries = {}, []
        for leaf_index, (error, _, products) in best.items():
            parts: dict[str, list[tuple[Visit, Array, Array]]] = {}
            for part in products:
                parts.setdefault(folds.site(part[0]).output_key, []).append(part)
            maps |= {key: in_steps(site_parts) for key, site_parts in parts.items()}
            name, rank = folds.name(products[0][0]), products[0][1].shape[-1]
            entries.append(Compensation(name, rank, initial[leaf_index], error))
        basis = basis_of(folds, [products for _, _, products in best.values()])
        report = CompensationReport(entries)
        return AlgorithmResult(folds.with_leaves(params, final_leaves), report, maps, basis)


# Bias correction: gives results of quantized contractions the means that they have in float.


# Biases that take the shifts of results: parameters that are only added to these results. They are
# found in the dataflow.


class _Elements(NamedTuple):
    """A view of a parameter.

    Attributes:
      argnum: index of the parameter among the operands.
      numbers: the numbers of its elements, [steps of each surrounding scan, *shape].
    """

    argnum: int
    numbers: Array


class _Results(NamedTuple):
    """A sum that contains results of sites, each with its channels."""

    parts: tuple[tuple[Site, Channels], ...]


class _BiasUse(NamedTuple):
    """A bias that is added to results of sites, inside some scans."""

    bias: _Elements
    parts: tuple[tuple[Site, Channels], ...]
    loops: tuple[Address, ...]
    dtype: Any


def into_biases(
    plan: Plan, call: Call, codes: Any, batch: Any, shifts: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Folds shifts into biases. Returns the parameters, and the remaining shifts by the key of the
    result.

    A bias can take a shift if it is a parameter of float32 or wider that the plan does not
    quantize, and is read only once: by a sum with the result of the site, or with a sum of that
    result which nothing else reads.

    Args:
      plan: plan of the function.
      call: the function, traced for a batch.
      codes: the parameters.
      batch: that batch.
      shifts: what must be added to results, as in `ChannelMap.shift`.
    """
    walk = _Walk(plan, set(shifts))
    views = [
        None if path is None else _Elements(i, np.arange(x.size).reshape(x.shape))
        for i, (x, path) in enumerate(zip(call.leaves, call.paths, strict=True))
    ]
    walk.body(call.jaxpr, (), views, ())
    unstacked = Unstacked(plan, codes)
    arguments = arguments_of(plan, unstacked.params, batch)
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_quantized)
    argnums = [i for i, x in enumerate(leaves) if is_array(x)]
    left = dict(shifts)
    for use in walk.found:
        leaf = leaves[argnums[use.bias.argnum]]
        if is_quantized(leaf) or leaf.dtype != use.dtype or jnp.finfo(leaf.dtype).bits < 32:
            continue
        total = sum(_taken(use, part, shifts[part[0].output_key]) for part in use.parts)
        delta = _delta(use, np.asarray(total), leaf.size)
        if delta is not None:
            moved = np.asarray(leaf, np.float64) + delta.reshape(leaf.shape)
            leaves[argnums[use.bias.argnum]] = jnp.asarray(moved, leaf.dtype)
            for site, _ in use.parts:
                del left[site.output_key]
    filled = tree.unflatten(leaves)
    if isinstance(plan.params, int):
        return unstacked.together(filled[plan.params]), left
    return unstacked.together(tuple(filled[i] for i in plan.params)), left


def _taken(use: _BiasUse, part: tuple[Site, Channels], shift: Any) -> Array:
    """Returns a shift on the axes of the sum, after those of the surrounding scans; size 1 along
    axes with one value for all.
    """
    site, channels = part
    x, shape = np.asarray(shift, np.float64), use.bias.numbers.shape
    loop_addresses = [loop.address for loop in site.loops]
    steps = [
        n if address in loop_addresses else 1 for address, n in zip(use.loops, shape, strict=False)
    ]
    rows = x.reshape(-1, *x.shape[len(loop_addresses) :])
    spread = np.stack([channels.spread(row, shape[len(use.loops) :]) for row in rows])
    return spread.reshape(*steps, *spread.shape[1:])


def _delta(use: _BiasUse, shift: Array, size: int) -> Array | None:
    """Returns what the elements of a bias take, or `None` if one would take two values."""
    numbers = use.bias.numbers
    repeated = [n > 1 and not step for n, step in zip(numbers.shape, numbers.strides, strict=True)]
    alike = [n == 1 for n in shift.shape]
    numbers = numbers[
        tuple(slice(1) if a and b else slice(None) for a, b in zip(repeated, alike, strict=True))
    ]
    target, delta = np.broadcast_to(shift, numbers.shape), np.zeros(size)
    delta[numbers] = target
    return delta if np.array_equal(delta[numbers], target) else None


class _Walk:
    """Follows parameters and results through a function, as long as each is read only once, or by
    slices that are apart.
    """

    def __init__(self, plan: Plan, output_keys: set[str]):
        self._plan, self._wanted = plan, output_keys
        self.found: list[_BiasUse] = []

    def body(
        self, jaxpr: Any, address: Address, inputs: Sequence[Any], loops: tuple[Address, ...]
    ) -> list[Any]:
        """Returns the tracked objects of the results of a body."""
        body, _ = compat.open_jaxpr(jaxpr)
        read = [*(x for eqn in body.eqns for x in eqn.invars), *body.outvars]
        uses = Counter(x for x in read if not compat.is_literal(x))
        env = dict(zip(body.invars, inputs, strict=True))

        def of(x: Any) -> Any:
            tracked = None if compat.is_literal(x) else env.get(x)
            if tracked is None or uses[x] == 1:
                return tracked
            slices = [eqn for eqn in body.eqns if eqn.primitive.name == "slice" and x in eqn.invars]
            is_apart = isinstance(tracked, _Elements) and len(slices) == uses[x] and _apart(slices)
            return tracked if is_apart else None

        for eqn_address, eqn, marked in addressed(body, address):
            operands = [of(x) for x in eqn.invars]
            results = self._results(eqn_address, eqn, marked, operands, loops)
            env.update(zip(eqn.outvars, results, strict=False))
        return [of(x) for x in body.outvars]

    def _results(
        self,
        address: Address,
        eqn: Eqn,
        marked: bool,
        operands: list[Any],
        loops: tuple[Address, ...],
    ) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            site = self._plan.site_at(address) if marked else None
            if site is None or site.output_key not in self._wanted or site.output is not None:
                return ()
            weight_argnum = next(i for i, x in enumerate(site.operands) if x.role == "weight")
            return [_Results(((site, Channels.of_result(eqn, weight_argnum)),))]
        if name == "add":
            return [self._added(eqn, operands, loops)]
        if name in _VIEWS and isinstance(operands[0], _Elements):
            numbers = _VIEWS[name](operands[0].numbers, eqn, len(loops))
            return [operands[0]._replace(numbers=numbers)]
        if name == "scan":
            count, carried = compat.scan_counts(eqn)
            length = eqn.params["length"]
            inside = [_each(x, length, len(loops)) for x in operands[:count]]
            inside += [None] * carried
            inside += [x if isinstance(x, _Elements) else None for x in operands[count + carried :]]
            self.body(eqn.params["jaxpr"], address, inside, (*loops, address))
        elif name in HOLDING and name not in ("while", "cond", "shard_map"):
            body = body_of(eqn)
            if len(compat.open_jaxpr(body)[0].invars) == len(operands):
                return self.body(body, address, operands, loops)
        return ()

    def _added(self, eqn: Eqn, operands: list[Any], loops: tuple[Address, ...]) -> Any:
        """Returns the tracked object of a sum; records a bias in it."""
        out = eqn.outvars[0].aval
        is_full = [x.aval.shape == out.shape for x in eqn.invars]
        results = [
            x for x, fits in zip(operands, is_full, strict=True) if isinstance(x, _Results) and fits
        ]
        biases = [x for x in operands if isinstance(x, _Elements)]
        if not results:
            return None
        if biases:
            bias = biases[0]
            shape = (*bias.numbers.shape[: len(loops)], *out.shape)
            bias = bias._replace(numbers=np.broadcast_to(bias.numbers, shape))
            self.found.append(_BiasUse(bias, results[0].parts, loops, out.dtype))
            return None
        return _Results(tuple(part for x in results for part in x.parts))


def _each(x: Any, length: int, axis: int) -> Any:
    """Returns a constant as each step of a scan reads it."""
    if not isinstance(x, _Elements):
        return None
    shape = (*x.numbers.shape[:axis], length, *x.numbers.shape[axis:])
    return x._replace(numbers=np.broadcast_to(np.expand_dims(x.numbers, axis), shape))


def _broadcast(x: Array, eqn: Eqn, loops: int) -> Array:
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    lead = x.shape[:loops]
    sizes = [1] * len(shape)
    for axis, n in zip(axes, x.shape[loops:], strict=True):
        sizes[axis] = n
    return np.broadcast_to(x.reshape(*lead, *sizes), (*lead, *shape))


def _reshaped(x: Array, eqn: Eqn, loops: int) -> Array:
    return x.reshape((*x.shape[:loops], *eqn.outvars[0].aval.shape))


def _taken_by(eqn: Eqn) -> tuple[slice, ...]:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (None,) * len(starts)
    return tuple(map(slice, starts, limits, strides))


def _apart(slices: Sequence[Eqn]) -> bool:
    """Whether no two slices of one value take the same element."""
    reads = np.zeros(slices[0].invars[0].aval.shape, np.int8)
    for eqn in slices:
        reads[_taken_by(eqn)] += 1
    return reads.max(initial=0) <= 1


_VIEWS = {
    "slice": lambda x, eqn, loops: x[(slice(None),) * loops + _taken_by(eqn)],
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "transpose": lambda x, eqn, loops: x.transpose(
        *range(loops), *(loops + axis for axis in eqn.params["permutation"])
    ),
}
"""The effect of views on the numbers of elements, after the axes of surrounding scans."""


_BIAS = "algorithms.bias_correction"


@dataclasses.dataclass(frozen=True)
class SiteShift:
    """The difference between the means of a site's result and those in float: the root mean square
    over its channels and the steps of the surrounding scans.

    Attributes:
      site: its name.
      before: the difference with the codes alone.
      after: the difference with all shifts.
    """

    site: str
    before: float
    after: float


class BiasReport(Printed, tuple[SiteShift, ...]):
    """The sites whose results were shifted. Prints as a table."""

    def __str__(self) -> str:
        lines = [f"{'shift before':>12} {'after':>10}  site"]
        lines += [f"{x.before:12.4g} {x.after:10.4g}  {x.site}" for x in self]
        return "\n".join(lines)


@algorithm("bias_correction", "pass options by name: bias_correction(weight=is_token).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class bias_correction:
    """Shifts the result of each quantized contraction so that its channels have the means that they
    have in float: an algorithm of `jqx.ptq` that runs after codes are chosen.

    Sites are corrected in order, in one pass. For each batch, the results of a site get the means
    that they have in float before later sites run. The final shift is the mean over batches.
    Lookups are not corrected, nor is the rounding of a result (`output=`).

    A site in a `while` or a `cond`, or in a scan that does not step over its weight, gets one
    correction for all its steps, and later sites do not see it in this pass. The report says what
    remains. With products of narrow matrices (`eora`, `loftq`), which are added to a result after
    its site, the mean of the site itself is corrected.

    Sites with experts that few rows reached are not corrected, nor other sites with rows of zeros
    beside them: a shift is added to all rows.

    A shift is folded into the bias that is added to the result, if that is a parameter of float32
    or wider with no other use. Otherwise it is added at its site (`jqx.Quantized.maps`), where XLA
    fuses it with the operations that follow.

    Attributes:
      weight: weights of the rows, as in `jqx.extend.mean`.

    Raises:
      TypeError: `weight` is not a function.
      ValueError: at run time, the plan quantizes no contraction with a weight.

    Source: Nagel et al., arXiv:1906.04721, section 4.2, but with measured means.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int2"})
      >>> w, x = jnp.array([[1.0, 0.4], [0.4, 1.0]]), jnp.array([[1.0, 2.0], [3.0, 2.0]])
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.bias_correction(), progress=False)
      >>> quantize(w, [x])(x).mean(0).round(2), f(w, x).mean(0).round(2)
      (Array([2.8, 2.8], dtype=float32), Array([2.8, 2.8], dtype=float32))
    """

    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_weight("algorithms.bias_correction", self.weight)

    def correct(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        codes: Any,
        affines: Mapping[str, Affine],
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> AlgorithmResult:
        """Returns the same codes, biases that include shifts, and the shifts to add at sites."""
        sites = [
            site
            for site in plan.sites
            if site.op != "gather" and any(x.role == "weight" for x in site.operands)
        ]
        if not sites:
            problem = f"none of the {len(plan.sites)} sites of the plan has a quantized weight."
            raise fail(_BIAS, problem, fix="leave this algorithm out.")
        batches, means = list(batches), _Means(_bare(plan), self.weight, on_nonfinite)
        operands = dataclasses.replace(plan, weights=())  # weights are dequantized codes already
        quantized = lambda g: simulate(g, operands, affines)  # noqa: E731
        bar = progress_bar("bias correction", "pass", total=4) if progress else None

        def seen(function: Callable[..., Any], weights: Any, targets: Any = None) -> list[Any]:
            results = means.of(function, weights, batches, targets)
            if bar is not None:
                bar.update()
            return results

        real = dequantize_params(codes)
        exact = seen(f, params)
        arguments = arguments_of(plan, params, batches[0])
        call = trace_call("algorithms.bias_correction", f, plan.parameters, arguments, {})
        few_rows = Few(Stats((), means.flags))
        left_as_is = _left_as_is(few_rows, sites, call)
        once = _run_once(plan, call.jaxpr) - left_as_is
        targets = [{key: _mean(x[key]) for key in once if key in x} for x in exact]
        shifted = seen(quantized(f), real, targets)
        shifts = means.difference(exact, shifted)
        shifts = {key: x for key, x in shifts.items() if key not in left_as_is}
        maps = {key: ChannelMap(shift=x) for key, x in shifts.items()}
        differences = [
            means.difference(exact, seen(quantized(g), real))
            for g in (f, map_channels(f, plan, maps))
        ]
        means.warn()
        if bar is not None:
            bar.close()
        report = BiasReport(
            SiteShift(
                site.name,
                _size(differences[0][key]),
                _size(differences[1][key] - shifts.get(key, 0)),
            )
            for site in sites
            for key in [site.output_key]
        )
        params, left = into_biases(plan, call, codes, batches[0], shifts)
        return AlgorithmResult(params, report, {key: maps[key] for key in left}, few=few_rows.why)


def _left_as_is(few_rows: Few, sites: Sequence[Site], call: Call) -> set[str]:
    """Returns the keys of results that are not shifted: those of sites with a matrix that few rows
    reached, and those with rows of zeros beside such a site. A shift is added to the rows of other
    experts too.
    """
    items = {item.address: item for item in contractions(call)}
    keys, with_zeros = set(), []
    for site in sites:
        parts = {x.observed.role: x for x in observed_parts(site, items[site.address])}
        weight, operand = parts["weight"], parts.get("activation")
        if operand is None:
            continue
        channels = math.prod(weight.kind.shape[axis] for axis in weight.observed.contracted)
        if few_rows.at(site, operand.key, channels).any():
            keys.add(site.output_key)
        elif (few_rows.share(site, operand.key) < 1).any():
            with_zeros.append(site)
    if keys:
        few_rows.why |= {
            x.name: "a shift would reach the rows of other experts" for x in with_zeros
        }
        keys |= {x.output_key for x in with_zeros}
    return keys


def _bare(plan: Plan) -> Plan:
    """Returns a plan that does not round, for observing without calibrators."""
    sites = [
        dataclasses.replace(
            site,
            operands=tuple(dataclasses.replace(x, spec=None) for x in site.operands),
            output=None,
        )
        for site in plan.sites
    ]
    return dataclasses.replace(plan, sites=tuple(sites))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ResultMean(Mean):
    """Sums the channels of results, as `mean` sums those of operands."""

    def looks_at(self, site: ObservedSite) -> bool:
        return site.role == "result" and site.has_weight and site.op != "gather"

    def observe(self, x: jax.Array, site: ObservedSite) -> MeanStats:
        channels = dataclasses.replace(site, contracted=site.channels, sizes=None)
        stats, stack = super().observe(x, channels), [x.shape[axis] for axis in site.batch]
        rows = stats.rows.reshape(*stack, 1) if stats.rows.ndim else stats.rows
        return MeanStats(stats.total.reshape(*stack, -1), rows)  # [*batch, channels]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shifting(Observe):
    """Shifts results to the wanted means, at sites that have some."""

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[Any, Records]:
        result, records = super().at_site(site, eqn, operands)
        if site.output_key not in self.affines:
            return result, records
        stats = next(x for x in records.values() if isinstance(x, MeanStats))
        weight_argnum = next(i for i, x in enumerate(site.operands) if x.role == "weight")
        target: Any = self.affines[site.output_key]
        shift = target - _mean(stats)
        y = value_of(result)
        spread = Channels.of_result(eqn, weight_argnum).spread(shift, y.shape)
        shifted = y + spread.astype(y.dtype)
        if is_counted(result):
            return dataclasses.replace(result, value=shifted), records
        return shifted, records


class _Means:
    """The means of results over batches.

    Attributes:
      flags: the flags of operands and results, over all batches and calls.
    """

    def __init__(self, plan: Plan, weight: Callable[..., Any] | None, on_nonfinite: OnNonfinite):
        self._plan, self._observer = plan, _ResultMean(weight=weight)
        self._ignores = check_mode(_BIAS, on_nonfinite)
        self._left_out: list[Mapping[str, Any]] = []
        self.flags: dict[str, Any] = {}

    def of(
        self, f: Callable[..., Any], params: Any, batches: Sequence[Any], targets: Any = None
    ) -> list[dict[str, MeanStats]]:
        """Returns the means of each batch, by the key of the result. Results are shifted to the
        wanted means before later sites run.
        """
        plan, observers = self._plan, {".*": (self._observer, flags)}
        arrays, filled = arrays_of(params)
        rules = Observe if targets is None else _Shifting

        @jax.jit
        def seen(arrays: list[Any], target: Any, batch: Any) -> Any:
            arguments = arguments_of(plan, filled(arrays), batch)
            means = observed(f, plan, observers, rules, target or {}, ignores=self._ignores)
            stats = means(*arguments)[1]
            means = {
                key.rpartition("@")[0]: x for key, x in stats.items() if isinstance(x, MeanStats)
            }
            return means, stats.flags, stats.left_out

        batch_targets, results = [None] * len(batches) if targets is None else targets, []
        for batch_index, (target, x) in enumerate(zip(batch_targets, batches, strict=True)):
            means, seen_flags, left_out = seen(arrays, target, Batch(x))
            check_finite(_BIAS, in_order(self._plan, seen_flags), batch_index)
            self._left_out.append(left_out)
            self.flags = merged_flags(self.flags, seen_flags or left_out)
            results.append(means)
        return results

    def warn(self) -> None:
        """Warns of rows that were left out."""
        merged: dict[str, Any] = {}
        for batch in self._left_out:
            merged = merged_flags(merged, batch)
        warn_left_out(_BIAS, in_order(self._plan, merged))

    def difference(self, a: Sequence[Any], b: Sequence[Any]) -> dict[str, jax.Array]:
        """Returns the means of `a` over all batches minus those of `b`."""
        merge = self._observer.merge
        means = [
            {key: _mean(functools.reduce(merge, (x[key] for x in batches))) for key in batches[0]}
            for batches in (a, b)
        ]
        return {key: means[0][key] - means[1][key] for key in means[0]}


def _run_once(plan: Plan, jaxpr: Any) -> set[str]:
    """Returns the keys of the results of sites that run once for each part of their weight."""
    stepped = {loop.address for site in plan.sites for loop in site.loops}

    def is_once(form: Enclosing) -> bool:
        return form.address in stepped if form.name == "scan" else form.name != "cond"

    reached = reached_sites(plan, jaxpr)
    return {site.output_key for site, forms in reached if all(map(is_once, forms))}


def _mean(stats: MeanStats) -> jax.Array:
    rows = jnp.maximum(stats.rows, 1).astype(jnp.float32)
    return stats.total / rows.reshape(rows.shape + (1,) * (stats.total.ndim - rows.ndim))


def _size(x: jax.Array) -> float:
    return float(jnp.sqrt(jnp.mean(x**2)))
