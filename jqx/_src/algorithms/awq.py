"""AWQ: scales up the weights of channels with large activations, and clips the ranges of weights.
Both minimize the error of the products.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..checks import check_fields, flag, whole
from ..statistics.statistics import absmax, check_weight, hessian, mean_abs
from ..table import Printed
from ..tensor.spec import QSpec
from ..transforms.algorithm import Chosen
from ..transforms.plan import Plan
from ..transforms.quantize_params import quantize_weight
from ..transforms.stats import OnNonfinite
from .chain import algorithm
from .channels import Visit
from .grids import Grids
from .labels import Array
from .matrices import objective
from .scaled import Scaled, Unpaired, scaled_together

_NO_LESS = 1e-4
_LEAST_RANGE = 0.5
"""The smallest part of a range that is tried."""


@dataclasses.dataclass(frozen=True)
class ScaledTogether:
    """Weights that were scaled with one ratio.

    Attributes:
      sites: their names, with the steps of the surrounding scans.
      ratio: the best exponent of the activations; 0 leaves the weights unchanged.
      duo: whether the weights were divided by their own magnitude.
      before: the squared error of the products with rounding to nearest, per input.
      after: the same after scaling.
      kept: whether part of the scale is applied at the sites at run time, because no parameter
        before them can take it.
    """

    sites: tuple[str, ...]
    ratio: float
    duo: bool
    before: float
    after: float
    kept: bool = False


class AwqReport(Printed, tuple[ScaledTogether, ...]):
    """One entry for each set of weights that was scaled together. Prints as a table."""

    def __str__(self) -> str:
        lines = [
            f"{'ratio':>6} {'duo':>4} {'run time':>8} {'error before':>12} {'after':>10}  sites"
        ]
        lines += [
            f"{x.ratio:6.2f} {'yes' if x.duo else 'no':>4} {'yes' if x.kept else 'no':>8} "
            f"{x.before:12.4g} {x.after:10.4g}  {', '.join(x.sites)}"
            for x in self
        ]
        return "\n".join(lines)


@algorithm("awq", "pass options by name, such as jqx.algorithms.awq(steps=20).")
@dataclasses.dataclass(frozen=True)
class awq:
    """Scales channels of weights by `a**ratio / w**(1 - ratio)`, and divides their inputs by it.

    Here `a` is the mean magnitude of the inputs of a channel, and `w` that of its weights, relative
    to their group. This is an algorithm of `jqx.ptq` that changes weights. The function does not
    change, apart from clipping. The ratio is the one with the least squared error of the products
    of all sites that read the channels together; unchanged weights are one of the candidates. Then
    ranges of weights are clipped, by the same error.

    The division is folded into the parameters that produce the channels, as `find_pairs` finds
    them. If channels have no pair, the division is done at the site at run time, if that reduces
    the error. It is one product for all sites that read the value, and XLA fuses it with the
    producer of the value, or with its quantization.

    Experts that fewer rows reach than they have channels do not decide scales: their own channels
    and ranges are unchanged, and `report.codes` names them.

    Attributes:
      steps: number of ratios that are tried, from 0 to 1, and of parts of a range, from all of it
        to a half.
      duo: whether to try each ratio also without `w`.
      clip: whether ranges are clipped.
      keep: whether scales may be applied at sites at run time. If not, channels without a pair are
        unchanged, and the function does no additional work at run time.
      weight: weights of the rows of the inputs, as in `jqx.observers.hessian`.

    Raises:
      TypeError: an option has the wrong type.
      ValueError: `steps` is less than 2; at run time, nothing can be scaled.

    Source: Lin et al., arXiv:2306.00978. This implementation uses the error of each product, from
    the Hessian of its inputs; the paper uses the error of a block.

    Example:
      >>> import jqx
      >>> jqx.algorithms.awq(clip=False).steps
      20
    """

    steps: int = 20
    duo: bool = True
    clip: bool = True
    keep: bool = True
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_fields("algorithms.awq", self, steps=whole(2), duo=flag(), clip=flag(), keep=flag())
        check_weight("algorithms.awq", self.weight)

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns the parameters with scaled channels and clipped ranges, and the maps that are
        applied at sites.
        """
        observers = tuple(x(weight=self.weight) for x in (hessian, mean_abs, absmax))
        scaled = Scaled.of(
            "algorithms.awq",
            f,
            plan,
            params,
            list(batches),
            observers,
            progress,
            on_nonfinite,
            all_sites=self.clip or self.keep,
        )
        unpaired = Unpaired(scaled, observers[1], scaled.visits if self.keep else ())
        relative = _relative(scaled)
        sites = [
            _Site.of(scaled, visit, observers, relative[visit.leaf_index], unpaired.numbers(visit))
            for visit in scaled.visits
        ]
        factors, report = self._scales(scaled, sites, unpaired.count)
        site_scales = unpaired.kept(factors)
        basis = partial(scaled.folds.folded, factors=factors, site_scales=site_scales.of)
        params = basis(params)
        if self.clip:
            params = self._clipped(scaled, sites, params, factors)
        return Chosen(params, report, site_scales.maps(), basis, few=scaled.few_rows.why)

    def _scales(
        self, scaled: Scaled, sites: Sequence["_Site"], count: int
    ) -> tuple[Array, AwqReport]:
        """Returns the factors with the least error, by number."""
        a, w = _means(count, sites, "inputs"), _means(count, sites, "weights")
        set_of = scaled_together(count, [site.numbers for site in sites])
        read = [(site.numbers, site.is_few) for site in sites]
        largest = np.zeros(count)
        for site in sites:
            np.maximum.at(largest, site.numbers[~site.is_few], site.largest[~site.is_few])
        best = initial_error = np.full(set_of.max() + 1, np.inf)
        ratios, duos = np.zeros(len(best)), np.zeros(len(best), bool)
        factors = np.ones(count)
        duo_options = (False, True) if self.duo else (True,)
        tried = [(i / (self.steps - 1), duo) for duo in duo_options for i in range(1, self.steps)]
        for ratio, duo in [(0.0, False), *tried]:  # unchanged weights first
            scale = a**ratio / (w ** (1 - ratio) + _NO_LESS if duo else 1)
            scale = _centred(scale, set_of)
            scaled.level(scale, largest, read)
            error = np.zeros(len(best))
            for i, _, q in scaled.rounded([(x.visit, x.numbers) for x in sites], scale):
                where = set_of[sites[i].numbers.max()]
                error[where] += sites[i].lost(q / scale[sites[i].numbers][..., None, :])
            if not ratio:
                initial_error = error
            better = error < best
            best = np.where(better, error, best)
            ratios, duos = np.where(better, ratio, ratios), np.where(better, duo, duos)
            factors = np.where(better[set_of], 1 / scale, factors)
        factors[0] = 1
        names = [[] for _ in best]
        rows, at_run_time = np.ones(len(best)), np.zeros(len(best), bool)
        for site in sites:
            where = set_of[site.numbers.max()]
            names[where].append(f"{site.name}{list(site.visit.steps) or ''}")
            rows[where] = max(site.rows, 1)
            without_pair = site.numbers[site.numbers >= scaled.folds.count]
            at_run_time[where] |= np.any(factors[without_pair] != 1)
        entries = [
            ScaledTogether(
                tuple(names[i]),
                float(ratios[i]),
                bool(duos[i]),
                float(initial_error[i] / rows[i]),
                float(best[i] / rows[i]),
                bool(at_run_time[i]),
            )
            for i in range(1, len(best))
        ]
        return factors, AwqReport(entries)

    def _clipped(
        self, scaled: Scaled, sites: Sequence["_Site"], params: Any, factors: Array
    ) -> Any:
        """Returns parameters with clipped groups, where clipping reduces the error."""
        leaves = scaled.folds.leaves(params)
        site_of_leaf = {site.visit.leaf_index: site for site in sites}
        for leaf_index, one_site in site_of_leaf.items():
            leaf_sites = [site for site in sites if site.visit.leaf_index == leaf_index]
            grids = Grids.of({"": leaves[leaf_index]}, {"": one_site.spec})
            values = np.asarray(leaves[leaf_index], np.float32).ravel()
            label = grids.label(np.arange(values.size, dtype=np.int32))
            low, high = np.zeros((2, len(grids.scale)), np.float32)
            np.minimum.at(low, label, values)
            np.maximum.at(high, label, values)
            best, part = np.full(len(low), np.inf), np.ones(len(low), np.float32)
            for step in range(self.steps):
                share = np.float32(1 - step / self.steps * (1 - _LEAST_RANGE))
                cut = np.clip(values, (low * share)[label], (high * share)[label])
                q = quantize_weight(jnp.asarray(cut.reshape(one_site.shape)), one_site.spec)
                change = np.asarray(q.dequantize()).ravel() - values
                error = np.zeros(len(low))
                for site in leaf_sites:
                    site.add_error(error, change, label, factors)
                better = error < best
                best, part = np.where(better, error, best), np.where(better, share, part)
            cut = np.clip(values, (low * part)[label], (high * part)[label])
            leaves[leaf_index] = jnp.asarray(cut.reshape(one_site.shape), leaves[leaf_index].dtype)
        return scaled.folds.with_leaves(params, leaves)


@dataclasses.dataclass(frozen=True)
class _Site:
    """A weight in one step of the scans around its site, with statistics of its inputs.

    Attributes:
      name: name of the site.
      visit: the site.
      spec: how its weight is rounded.
      shape: shape of the weight, over all steps.
      elements: the numbers of its elements, [*batch, rows, channels].
      numbers: numbers of the factors of its channels, [*batch, channels]; 0 if there is none.
      w: its values, [*batch, rows, channels].
      products: the sum of products of its inputs, [*batch, channels, channels]; 0 for a matrix
        that few rows reached.
      inputs: the mean magnitude of each channel over the rows that reach a matrix,
        [*batch, channels].
      largest: the largest magnitude, likewise.
      weights: the mean magnitude of the weight, relative to the largest of its group, likewise.
      rows: number of inputs.
      is_few: which of the matrices only few rows reached, [*batch].
    """

    name: str
    visit: Visit
    spec: QSpec
    shape: tuple[int, ...]
    elements: Array
    numbers: Array
    w: Array
    products: Array
    inputs: Array
    largest: Array
    weights: Array
    rows: float
    is_few: Array

    @classmethod
    def of(
        cls, scaled: Scaled, visit: Visit, observers: Any, relative: Array, numbers: Array
    ) -> "_Site":
        folds = scaled.folds
        weight = folds.weight(visit)
        assert weight is not None
        sums, means, maxima = (scaled.observed(visit, x) for x in observers)
        elements, is_few = visit.elements, scaled.is_few(visit)
        rows = np.maximum(np.asarray(means.rows, np.float64), 1)
        return cls(
            folds.name(visit),
            visit,
            weight.spec,
            folds.shape(visit),
            elements,
            numbers,
            scaled.weights[visit.leaf_index][elements],
            np.where(is_few[..., None, None], 0, np.asarray(sums.products, np.float32)),
            scaled.per_channel(visit, means.total / rows) / scaled.share(visit)[..., None],
            scaled.per_channel(visit, maxima.largest),
            relative[elements].mean(-2),
            float(np.max(sums.rows)),
            is_few,
        )

    def lost(self, rounded: Array) -> float:
        """Returns the squared error of the product, summed over the inputs."""
        difference = (rounded - self.w).astype(np.float32)
        matrices = zip(
            difference.reshape(-1, *difference.shape[-2:]),
            self.products.reshape(-1, *self.products.shape[-2:]),
            strict=True,
        )
        return float(sum(objective(x, gram).sum() for x, gram in matrices))

    def add_error(self, error: Array, difference: Array, label: Array, factors: Array) -> None:
        """Adds the squared error that each group contributes to the product, by the label of the
        group. Inputs are multiplied by their factors.
        """
        scaling = factors[self.numbers]
        products = self.products * (scaling[..., :, None] * scaling[..., None, :]).astype(
            np.float32
        )
        elements = self.elements
        count = elements.shape[-1]
        for element_ids, gram in zip(
            elements.reshape(-1, *elements.shape[-2:]),
            products.reshape(-1, count, count),
            strict=True,
        ):
            groups = label[element_ids]
            starts = np.flatnonzero(np.any(np.diff(groups, axis=1, prepend=-1) != 0, axis=0))
            for start, stop in zip(starts, [*starts[1:], count], strict=True):
                x = difference[element_ids[:, start:stop]]
                np.add.at(error, groups[:, start], objective(x, gram[start:stop, start:stop]))


def _relative(scaled: Scaled) -> dict[int, Array]:
    """Returns the magnitudes of weights, relative to the largest that shares their scale: by leaf,
    flat.
    """
    magnitudes = {}
    for visit in scaled.visits:
        weight, leaf_index = scaled.folds.weight(visit), visit.leaf_index
        if leaf_index not in magnitudes and weight is not None:
            x = scaled.weights[leaf_index]
            grids = Grids.of({"": x.reshape(scaled.folds.shape(visit))}, {"": weight.spec})
            label, size = grids.label(np.arange(x.size, dtype=np.int32)), np.abs(x)
            largest = np.zeros(len(grids.scale), np.float32)
            np.maximum.at(largest, label, size)
            magnitudes[leaf_index] = size / (largest[label] + np.float32(1e-6))
    return magnitudes


def _means(count: int, sites: Sequence[_Site], field: str) -> Array:
    """Returns the mean of a statistic over the channels of each number; 1 if there are none."""
    total, counts = np.zeros(count), np.zeros(count)
    for site in sites:
        numbers = site.numbers[~site.is_few]
        np.add.at(total, numbers, getattr(site, field)[~site.is_few])
        np.add.at(counts, numbers, 1)
    return np.maximum(np.where(counts > 0, total / np.maximum(counts, 1), 1), _NO_LESS)


def _centred(scale: Array, set_of: Array) -> Array:
    """Returns scales, normalized so that the least and the largest of each set multiply to 1."""
    low, high = np.full(set_of.max() + 1, np.inf), np.zeros(set_of.max() + 1)
    scale = np.maximum(np.broadcast_to(scale, set_of.shape), _NO_LESS)
    np.minimum.at(low, set_of, scale)
    np.maximum.at(high, set_of, scale)
    middle = np.where(high > 0, np.sqrt(np.where(np.isfinite(low), low, 1) * high), 1)
    return np.where(set_of > 0, scale / middle[set_of], 1)
