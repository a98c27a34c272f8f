"""Low-rank compensation: approximates the error of codes by a product of two narrow matrices."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..checks import check_fields, whole
from ..errors import fail
from ..statistics.calibrators import Affine
from ..statistics.statistics import check_weight, hessian
from ..table import Printed
from ..transforms.algorithm import Chosen
from ..transforms.calibrate import arguments_of, calibrate_batches
from ..transforms.channel_map import LowRank
from ..transforms.plan import Plan
from ..transforms.quantize_params import dequantize_params, quantize_params
from ..transforms.stats import OnNonfinite
from .chain import algorithm
from .channels import Folds, Visit
from .labels import Array
from .scaled import find_pairs

_NAME = "algorithms.eora"
_LEAST = 1e-10
"""Eigenvalues below this part of the largest count as directions without inputs."""


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
      weight: weights of the rows, as in `jqx.observers.hessian`.

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
        check_fields(_NAME, self, rank=whole(1))
        check_weight(_NAME, self.weight)

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
    ) -> Chosen:
        """Returns the same codes, and the products to add at sites."""
        batches = list(batches)
        folds, visits = compensated(_NAME, f, plan, params, batches[0])
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
            a, b, error = self._solved(w - rounded, np.asarray(gram.products)[visit.steps])
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
        return Chosen(codes, report, maps, basis_of(folds, [*parts.values()]))

    def _solved(self, error: Array, products: Array) -> tuple[Array, Array, Array]:
        """Returns matrices [*batch, channels, rank] and [*batch, rank, rows] that approximate the
        error of a weight, [*batch, rows, channels], and the squared error before and after.
        """
        values, vectors = np.linalg.eigh(np.asarray(products, np.float64))
        values = np.where(values > _LEAST * values[..., -1:], values, 0)
        root = np.sqrt(values)[..., None, :]
        inverse = np.divide(1, root, out=np.zeros_like(root), where=root > 0)
        a, b, s = narrow((error @ vectors) * root, self.rank)
        remainder = s[..., a.shape[-1] :]
        a = vectors @ (a * np.swapaxes(inverse, -1, -2))
        return a, b, np.array([np.sum(s**2), np.sum(remainder**2)])


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
        leaves = folds.leaves(params)
        for site_parts in parts:
            for part in site_parts:
                leaf_index = part[0].leaf_index
                leaves[leaf_index] = without(leaves[leaf_index], [part])
        return folds.with_leaves(params, leaves)

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
    ) -> Chosen:
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
        return Chosen(folds.with_leaves(params, final_leaves), report, maps, basis)
