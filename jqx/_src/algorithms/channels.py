"""Which channels of a function can be scaled, and what must be scaled with them."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import Eqn
from ..errors import fail
from ..statistics.statistics import ObservedSite
from ..transforms.algorithm import Unstacked
from ..transforms.channel_map import ChannelMap
from ..transforms.paths import as_arguments, by_argument
from ..transforms.plan import Plan, Site, Weight
from ..transforms.rules import CONTRACTIONS
from ..transforms.trace import is_array
from ..transforms.views import Address
from .grids import Elements, Every
from .labels import (
    FIXED,
    VIEWED,
    Array,
    ChannelDomain,
    Known,
    Labelled,
    Labels,
    Parameter,
    Value,
    axes_of_rows,
    channels_of,
    components,
    evaluated,
    gathered,
    is_lookup_of_rows,
    looked_up,
    narrowed,
    product,
    with_line,
)
from .stages import Steps

# The algebra of scaling. A value is labelled if each of its channels may be multiplied by a
# positive factor. Producers, such as the output axis of a weight, the gain of a norm or a bias,
# create labels. Sites compensate for the factor where they sum over channels.


@dataclasses.dataclass(frozen=True)
class Visit:
    """A site in one step of the scans around it.

    Attributes:
      site: the site, of the plan of everything that may be a site.
      steps: the numbers of the steps.
      leaf_index: the index of the leaf of its weight; -1 if it is not a leaf.
      element_ids: which elements of its weight its matrices hold, over all steps; `None` if the
        weight has another use, or is not a plain matrix.
      inputs: labels of channels, [*batch, channels].
      outputs: labels of rows, [*batch, rows].
      observed_site: what observers get to know about the operand that is not a weight.
      shape: shape of that operand.
      reason: why its inputs are fixed, if they are.
    """

    site: Site
    steps: Steps
    leaf_index: int
    element_ids: Elements | None
    inputs: Array
    outputs: Array
    observed_site: ObservedSite
    shape: tuple[int, ...]
    reason: str

    @property
    def elements(self) -> Array:
        """Numbers of elements of its matrices, [*batch, rows, channels]; computed at each call."""
        assert self.element_ids is not None
        return self.element_ids[self.steps]


class ScalingDomain(ChannelDomain):
    """Labels of channels that have the same factor.

    Args:
      traced: the function.
      fixed: labels that are known to have no factor, independent of the choices at products of two
        values that may both have one, and why.

    Attributes:
      made: by leaf, the label of each of its elements, flat; 0 for elements that are not read. An
        element has one label, however often and wherever it is read. Weights of sites have none.
      visits: the sites in all steps whose weight no other operation uses.
      refused: the other sites, likewise. Not even their own channels may be scaled.
    """

    def __init__(self, traced: Every, fixed: "tuple[Array, dict[int, str]] | None" = None):
        self.labels: Labels
        super().__init__(traced, Labels(fixed))
        self.made: dict[int, Array] = {}
        self.visits: list[Visit] = []
        self._alone: set[int] = set()
        self.follow(traced.call)
        visits = self.visits
        self.refused: list[Visit] = [x for x in visits if x.leaf_index in self.elsewhere]
        self.visits = [x for x in visits if x.leaf_index not in self.elsewhere]
        for leaf_index in self.partly_used():
            self.elsewhere.setdefault(leaf_index, "a part of it is not used here")
        for visit in visits:
            if visit.leaf_index in self.elsewhere:
                reason = f"its weight has another use: {self.elsewhere[visit.leaf_index]}"
                self.labels.stop(visit.inputs, reason)
                self.labels.stop(visit.outputs, reason)
        for leaf_index, labels in self.made.items():
            if leaf_index in self.elsewhere:
                self.labels.stop(labels, f"it has another use: {self.elsewhere[leaf_index]}")

    def results(
        self, eqn: Eqn, inputs: list[Value], address: Address, steps: Steps
    ) -> Sequence[Value]:
        """Returns the labels of the results of an equation."""
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            return [self._contraction(eqn, inputs, address, steps)]
        scaled = self.scaled_weight(eqn, inputs)
        if scaled is not None:
            return scaled
        leaves = [x for x in inputs if isinstance(x, Parameter)]
        is_view = name in VIEWED and len({x.leaf_index for x in leaves}) == 1
        if is_view and not any(isinstance(x, Labelled) for x in inputs):
            views = self.viewed(eqn, inputs, leaves[0])
            if views is not None:
                return views
        return evaluated(
            self.labels, eqn, [self.labelled(x, with_line(eqn)) for x in inputs], inputs
        )

    def labelled(self, x: Value, use: str) -> Labelled:
        """Returns a value with labels; each element of a parameter has its own."""
        if isinstance(x, Labelled):
            return x
        if isinstance(x, Known):
            return Labelled.fixed(np.shape(x.value), label=x.label)
        if x.elements is None:
            self.elsewhere.setdefault(x.leaf_index, use)
            return Labelled.fixed(x.shape)
        labels = self._labels_of(x.leaf_index)
        if x.leaf_index not in self._alone:
            self._alone.add(x.leaf_index)
            is_new = labels == FIXED
            labels[is_new] = self.labels.new(int(is_new.sum()))
        self.use(x.leaf_index, x.elements)
        return self.labels.made(labels[x.elements], x.shape)

    def _labels_of(self, leaf_index: int) -> Array:
        """Returns the label of each element of a leaf, 0 for those that have none yet."""
        return self.made.setdefault(leaf_index, np.zeros(self.sizes[leaf_index], np.int32))

    def _columns(self, x: Parameter) -> Array:
        """Returns the labels of the columns of a parameter whose rows are looked up."""
        labels, elements = self._labels_of(x.leaf_index), x.whole
        row_labels = labels[elements]
        self.use(x.leaf_index, elements)
        if (
            len(row_labels)
            and np.all(row_labels[0] > FIXED)
            and np.all(row_labels == row_labels[:1])
        ):
            return row_labels[0]
        columns = self.labels.new(x.shape[1])
        labels[elements] = np.where(row_labels > FIXED, row_labels, columns)
        self.labels.join(labels[elements], columns, "rows of it are looked up")
        return columns

    def _contraction(
        self, eqn: Eqn, inputs: Sequence[Value], address: Address, steps: Steps
    ) -> Labelled:
        name, site = eqn.primitive.name, self.site_at(address)
        if site is not None:
            return self._site(site, eqn, inputs, steps)
        if name == "gather":
            return self._gather(eqn, inputs)
        where = with_line(eqn)
        leaves = [x for x in inputs if isinstance(x, Parameter)]
        self.elsewhere.update({x.leaf_index: where for x in leaves})
        inputs = [Labelled.fixed(x.shape) if isinstance(x, Parameter) else x for x in inputs]
        values = [self.labelled(x, where) for x in inputs]
        if name == "dot_general" and not leaves and not all(x.is_fixed for x in values):
            return product(self.labels, eqn, values)
        result = self.labels.stop_at(eqn, values)[0]
        reason = "; ".join(dict.fromkeys(x.reason for x in values if x.reason))
        return dataclasses.replace(result, reason=reason or result.reason)

    def _site(self, site: Site, eqn: Eqn, operands: Sequence[Value], steps: Steps) -> Labelled:
        weight_argnum, x, observed_site, weight_ids = self.at_site(site, operands)
        leaf, shape = operands[weight_argnum], eqn.outvars[0].aval.shape
        if weight_ids is None or not isinstance(leaf, Parameter):
            reason = f"the weight of {site.name} has another use, or is not a plain matrix"
            self.labels.stop(x.labels, reason)
            return Labelled.fixed(shape, reason)
        elements = weight_ids[steps]
        reason = f"the rows that {site.name} multiplies differ in their channels"
        labels = self.labels.join_along(x.labels, axes_of_rows(x, observed_site), reason)
        inputs = channels_of(labels, x.shape, observed_site)
        batch, rows, columns = elements.shape[:-2], *elements.shape[-2:]
        inputs = np.broadcast_to(inputs, (*batch, columns))
        outputs = self.labels.new(math.prod((*batch, rows))).reshape(*batch, rows)
        self.use(leaf.leaf_index, elements)
        operand = observed_site, x.shape, x.reason
        self.visits.append(
            Visit(site, steps, leaf.leaf_index, weight_ids, inputs, outputs, *operand)
        )
        return self.labels.made(self.labels_of_result(site, eqn, weight_argnum, outputs), shape)

    def _gather(self, eqn: Eqn, inputs: Sequence[Value]) -> Labelled:
        source, indices = inputs
        if isinstance(source, Parameter) and source.elements is not None and is_lookup_of_rows(eqn):
            labels = looked_up(eqn, self._columns(source))
            return self.labels.made(labels, eqn.outvars[0].aval.shape)
        return gathered(self.labels, eqn, self.labelled(source, with_line(eqn)), indices)


def followed_through(traced: Every) -> ScalingDomain:
    """Returns the labels of a function. It repeats passes until it is known which operand of each
    product takes a factor and which must not.
    """
    fixed = None
    while True:
        follower = ScalingDomain(traced, fixed)
        previous, fixed = fixed, follower.labels.fixed()
        is_settled = previous is not None and np.array_equal(previous[0], fixed[0])
        if is_settled or not follower.labels.has_choices:
            return follower


# The sites and the parameters of a function, by their names in a plan.


class Named:
    """The sites and the parameters of a function.

    Args:
      plan: a plan of the function.
      names: the name of each leaf of its arguments, `None` if it is not a parameter.
    """

    def __init__(self, plan: Plan, names: Sequence[str | None]):
        self.plan = plan
        self.names: list[str] = [str(name) for name in names]
        self._places = [i for i, name in enumerate(names) if name is not None]

    @property
    def sites(self) -> list[Site]:
        """The sites of the plan that multiply a weight by something else."""
        kinds = {True, False}
        return [x for x in self.plan.sites if {o.path is None for o in x.operands} == kinds]

    def site(self, visit: Visit) -> Site:
        """The site of the plan; for one that the plan leaves in float, that of the full plan."""
        return self.plan.site_at(visit.site.address) or visit.site

    def key(self, visit: Visit) -> str:
        """The name of the operand that a site multiplies its weight by."""
        return next(x.key for x in self.site(visit).operands if x.path is None)

    def name(self, visit: Visit) -> str:
        """The name of a site."""
        return self.site(visit).name

    def weight(self, visit: Visit) -> Weight | None:
        """Returns the weight of a site if the plan quantizes it."""
        return self.plan.weight_at(self.names[visit.leaf_index])

    def leaves(self, params: Any) -> dict[int, Any]:
        """Returns the leaves of parameters by index, as in `Visit.leaf_index`."""
        tree = by_argument(self.plan.params, Unstacked(self.plan, params).params)
        leaves = list(filter(is_array, jax.tree.leaves(tree)))
        if len(leaves) != len(self._places):
            problem = "the parameters do not have the leaves of those that were quantized: "
            problem += f"{len(leaves)} arrays, and not {len(self._places)}."
            fix = "pass the same parameters as to ptq. For nnx, keep streams of random numbers "
            fix += "in the function: graph, streams, params = nnx.split(model, nnx.RngState, ...)."
            raise fail("Quantized.basis", problem, fix=fix)
        return dict(zip(self._places, leaves, strict=True))

    def with_leaves(self, params: Any, leaves: Mapping[int, Any]) -> Any:
        """Returns parameters with some leaves replaced."""
        unstacked, new_leaves = Unstacked(self.plan, params), map(leaves.get, self._places)
        tree = by_argument(self.plan.params, unstacked.params)
        tree = jax.tree.map(lambda x: next(new_leaves) if is_array(x) else x, tree)
        return unstacked.together(as_arguments(self.plan.params, tree))


class Rewritten:
    """Parameters that are changed in float64, and rounded once."""

    def __init__(self, named: Named, params: Any):
        self._named, self._params, self._leaves = named, params, named.leaves(params)
        self._changed: dict[int, Array] = {}

    def flat(self, leaf_index: int) -> Array:
        """Returns the elements of a leaf, float64, to be changed in place."""
        if leaf_index not in self._changed:
            leaf = np.array(self._leaves[leaf_index], np.float64)
            self._changed[leaf_index] = leaf.reshape(-1)
        return self._changed[leaf_index]

    def params(self) -> Any:
        """Returns the parameters."""
        leaves = dict(self._leaves)
        for leaf_index, x in self._changed.items():
            leaf = leaves[leaf_index]
            leaves[leaf_index] = jnp.asarray(x.reshape(np.shape(leaf)), leaf.dtype)
        return self._named.with_leaves(self._params, leaves)


# Which factor each element of the parameters takes when channels are scaled.


@dataclasses.dataclass(frozen=True)
class Pair:
    """Weights that are scaled together.

    Attributes:
      before: what produces the channels: paths of gains, biases and tables, names of sites.
      after: names of the sites that sum over the channels.
      channels: number of factors, over all steps of scans.
      clipped: whether a constant limits the inputs of a site, such as the 6 of ReLU6. Then sites
        need a clip for each channel.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    channels: int
    clipped: bool = False


class Folds(Named):
    """Which factors the parameters of a function can take.

    Attributes:
      visits: the sites whose weight no other operation uses, one for each step of the scans around
        them.
      numbers: for each label the number of its factor; 0 if the factor is 1.
      count: number of factors, including number 0.
      is_clipped: by number, whether values with that factor are clipped somewhere. Then the factor
        is at most 1.
    """

    def __init__(self, plan: Plan, follower: ScalingDomain):
        super().__init__(plan, follower.names)
        self.visits: list[Visit] = follower.visits
        self._refused: list[Visit] = follower.refused
        self.numbers: Array
        self.numbers, self._why = follower.labels.solved()
        self.count: int = int(self.numbers.max(initial=0)) + 1
        all_labels = np.arange(len(self.numbers))
        self._limits = follower.labels.limits(all_labels)
        self.is_clipped: Array = np.zeros(self.count, bool)
        self.is_clipped[self.numbers[np.isfinite(self._limits)]] = True
        self.is_clipped[0] = False
        self._shapes = follower.shapes
        self._made = {
            leaf_index: narrowed(labels.reshape(follower.shapes[leaf_index]))
            for leaf_index, labels in follower.made.items()
        }

    def inputs(self, visit: Visit) -> Array:
        """Returns the numbers of the factors of the channels of a site, [*batch, channels]."""
        return self._numbers(visit.inputs)

    def outputs(self, visit: Visit) -> Array:
        """Returns the numbers of the factors of the rows of a site, [*batch, rows]."""
        return self._numbers(visit.outputs)

    def limits(self, visit: Visit) -> Array:
        """Returns the upper limits of the channels of a site, [*batch, channels]; infinity for
        channels that have no factor or are not clipped.
        """
        limits = self._limits[np.maximum(visit.inputs, FIXED)]
        return np.where(self.inputs(visit) > 0, limits, np.inf)

    def without_clips(self) -> "Folds":
        """Returns a copy without factors for clipped values."""
        folds = copy.copy(self)
        is_clipped = self.is_clipped[self.numbers]
        labels = np.flatnonzero(is_clipped).tolist()
        folds._why = {**self._why, **dict.fromkeys(labels, "it is clipped by a constant")}
        folds.numbers = np.where(is_clipped, 0, self.numbers)
        folds.is_clipped = np.zeros_like(self.is_clipped)
        return folds

    def _numbers(self, labels: Array) -> Array:
        return np.where(labels > FIXED, self.numbers[labels], 0)

    def shape(self, visit: Visit) -> tuple[int, ...]:
        """Returns the shape of the weight of a site."""
        return self._shapes[visit.leaf_index]

    def largest(self, pairs: Iterable[tuple[Array, Array]]) -> Array:
        """Returns the largest value for each number, from pairs of numbers and values; 0 for
        numbers without values.
        """
        maxima = np.zeros(self.count)
        for numbers, values in pairs:
            np.maximum.at(maxima, numbers.ravel(), np.broadcast_to(values, numbers.shape).ravel())
        return maxima

    def why(self, visit: Visit) -> str:
        """Returns why some channels of a site have no factor."""
        fixed = visit.inputs[self.inputs(visit) == 0]
        reasons = (self._why.get(int(label)) for label in np.unique(fixed) if label > FIXED)
        return next(filter(None, reasons), visit.reason or "nothing before it can be scaled")

    def pairs(self) -> tuple[tuple[Pair, ...], dict[str, str]]:
        """Returns what is scaled together, by names, and why other sites of the plan are not."""
        producers: dict[int, dict[str, None]] = {}
        readers: dict[int, dict[str, None]] = {}

        def add(to: dict[int, dict[str, None]], labels: Array, name: str) -> None:
            for number in np.unique(self.numbers[labels[labels > FIXED]]):
                to.setdefault(int(number), {})[name] = None

        for visit in self.visits:
            add(readers, visit.inputs, self.name(visit))
            add(producers, visit.outputs, self.name(visit))
        for leaf_index, labels in self._made.items():
            add(producers, labels, self.names[leaf_index])
        counts: dict[tuple[tuple[str, ...], tuple[str, ...], bool], int] = {}
        for number, consumers in readers.items():
            if number and number in producers:
                key = tuple(producers[number]), tuple(consumers), bool(self.is_clipped[number])
                counts[key] = counts.get(key, 0) + 1
        visits = [*self.visits, *self._refused]
        reason_of_site = {self.name(visit): self.why(visit) for visit in reversed(visits)}
        paired = {name for _, consumers, _ in counts for name in consumers}
        reasons = {
            site.name: reason_of_site.get(
                site.name, "its weight has another use, or is not a plain matrix"
            )
            for site in self.sites
            if site.name not in paired
        }
        pairs = [Pair(*key[:2], count, key[2]) for key, count in counts.items()]
        return tuple(pairs), reasons

    def folded(
        self, params: Any, factors: Array, site_scales: Callable[[Visit], Array] | None = None
    ) -> Any:
        """Returns parameters scaled by factors. Values between them are scaled; the results of the
        function are unchanged. Computed in float64, rounded once.

        Args:
          params: the parameters.
          factors: the factors, by number.
          site_scales: the divisors that are applied at the site, [*batch, channels].
        """
        new = Rewritten(self, params)
        for visit in self.visits:
            rows, channels = factors[self.outputs(visit)], factors[self.inputs(visit)]
            channels = channels / (site_scales(visit) if site_scales else 1)
            if np.any(rows != 1) or np.any(channels != 1):
                scaling = rows[..., :, None] / channels[..., None, :]
                new.flat(visit.leaf_index)[visit.elements] *= scaling
        for leaf_index, labels in self._made.items():
            scaling = factors[self._numbers(labels)]
            if np.any(scaling != 1):
                new.flat(leaf_index).reshape(self._shapes[leaf_index])[...] *= scaling
        return new.params()


# Statistics of channels that a site sums over, by channel of its operand. All taps of a kernel,
# and all experts, read the same channel of an operand.


def most(visit: Visit, x: Array) -> Array:
    """Returns the maximum over the channels of a site, by channel of its operand."""
    if visit.observed_site.patches is not None:
        taps = int(np.prod(visit.observed_site.patches.kernel))
        return x.reshape(-1, taps).max(-1)
    return x.max(0) if visit.site.op == "ragged_dot" else x


def least(visit: Visit, x: Array) -> Array:
    """Returns the minimum, likewise."""
    return -most(visit, -x)


def spread(visit: Visit, values: Array) -> Array:
    """Returns a statistic of the channels of an operand for each channel of a site."""
    if visit.observed_site.patches is not None:
        taps = int(np.prod(visit.observed_site.patches.kernel))
        return np.repeat(values, taps).reshape(visit.inputs.shape)
    return np.broadcast_to(values, visit.inputs.shape)


# Clips of channels: limits by a constant, as in ReLU6, and what replaces them at sites whose
# channels are scaled.


def at_most_one(folds: Folds, factors: Array) -> Array:
    """Returns factors that are at most 1 for clipped values, so that the clip of the function is
    not too tight.

    The factors of all channels of tensors that share a factor are divided by one number. That does
    not change how weights with one scale round. If one of these channels has no factor, the others
    are limited one by one.
    """
    set_of = _together(folds)
    clipped = folds.is_clipped
    largest = np.ones(set_of.max() + 1)
    np.maximum.at(largest, set_of[clipped], factors[clipped])
    largest[set_of[0]] = 1
    scaled = factors / largest[set_of]
    return np.where(clipped, np.minimum(scaled, 1), scaled)


def _together(folds: Folds) -> Array:
    """Returns for each factor the set of factors of channels of the same tensors."""
    numbers = [
        x.ravel() for visit in folds.visits for x in (folds.inputs(visit), folds.outputs(visit))
    ]
    a = np.concatenate([np.unique(x) for x in numbers if x.size])
    b = np.concatenate([np.full(len(np.unique(x)), x.max()) for x in numbers if x.size])
    return components(folds.count, a, b)


def clips_of(folds: Folds, factors: Array) -> dict[str, ChannelMap]:
    """Returns the clips of sites whose channels are scaled by factors, by key."""
    clips_by_key: dict[str, Array] = {}
    for visit in folds.visits:
        limits, scaling = folds.limits(visit), factors[folds.inputs(visit)]
        clips = np.where((scaling == 1) | np.isinf(limits), np.inf, limits * scaling)
        if np.isfinite(clips).any():
            clips = most(visit, clips)
            loops = tuple(loop.length for loop in visit.site.loops)
            all_steps = clips_by_key.setdefault(
                folds.key(visit), np.full((*loops, *clips.shape), np.inf)
            )
            all_steps[visit.steps] = clips
    return {key: ChannelMap(clip=jnp.asarray(x, jnp.float32)) for key, x in clips_by_key.items()}
