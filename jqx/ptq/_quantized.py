"""Quantized: what `ptq` returns."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

import jax

from .._calls import called
from .._errors import fail
from .._signatures import P, R
from ..calibrators import Affine
from ..tensor._shared import abstract as abstract_leaf
from ..transforms import Plan
from ..transforms._shared import (
    Hoisted,
    Maps,
    arguments_of,
    is_array,
    lay_out_weights,
    named_leaves,
    rooted,
)
from ._hoisted import without_values
from ._late_folders import diagnostics
from ._mapped import Mapped, check_whole

Q = ParamSpec("Q")
"""The arguments of another function, after the weights."""

S = TypeVar("S")
"""Its result."""


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized(Generic[P, R]):
    """A quantized function with its weights, plan, scales and report.

    `quantized(*batch)` is `quantized.function(quantized.params, *batch)`, for a first look. To run
    it often, compile the function: `jax.jit(quantized.function)(quantized.params, *batch)`. Do not
    compile `quantized` itself: `jax.jit(quantized)` stores a copy of the weights as constants.

    Attributes:
      function: the quantized function. It takes the weights at the same position as the float
        function.
      params: weights as QTensors, laid out for the target. Other parameters are unchanged.
      plan: which contractions are quantized, and how.
      affines: scales of activations, by key; empty if none is static.
      report: error and size of each weight. Prints as a table.
      inputs: the first batch, a tuple with `jax.ShapeDtypeStruct` in place of arrays. Files store
        it, so that a function is checked when it is bound. With `None` the function is checked at
        its first call.
      details: what the algorithm reports, for instance for each matrix. Files do not store it.
      maps: the channel maps that an algorithm adds at sites. If there are any, the function is
        that of `jqx.map_channels(f, plan, maps)`.
      basis: a function that returns, for the float parameters, those that the codes stand for, and
        maps: after `values, maps = basis(params)`, `jqx.map_channels(f, plan, maps)` of the values
        is the float function. The values are other ones if an algorithm scales or rotates weights.
        The maps are `maps`, without effect where these correct codes. It holds no copy of
        parameters. `None` if it is not known: files have it only if no algorithm has changed what
        codes stand for, and an algorithm of yours may not return it in `jqx.algorithms.Chosen`.
      parents: after `hoist=`, the parameters of the function that was split, one tree for each
        position, with `jax.ShapeDtypeStruct` in place of arrays; otherwise `None`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> x, quantize = jnp.ones((1, 4)), jqx.ptq(f, jqx.presets.w8a16(), progress=False)
      >>> quantized = quantize(jnp.eye(4), [x])
      >>> quantized
      Quantized(1 of 1 contractions, 64 bytes of parameters become 32)
      >>> quantized(x)
      Array([[1., 1., 1., 1.]], dtype=float32)
    """

    function: Callable[Concatenate[Any, P], R]
    params: Any
    plan: Plan
    affines: Mapping[str, Affine]
    report: "diagnostics.Report"
    inputs: tuple[Any, ...] | None = None
    details: Any = None
    maps: Maps = dataclasses.field(default_factory=dict)
    parents: tuple[Any, ...] | None = None
    basis: Callable[[Any], tuple[Any, Maps]] | None = None

    def __call__(self, *batch: P.args, **kwargs: P.kwargs) -> R:
        """Returns the result of the function on its weights and the other arguments."""
        function: Callable[..., R] = self.function
        try:
            return function(*arguments_of(self.plan, self.params, batch), **kwargs)
        except (TypeError, ValueError):
            self._check_without_params(batch)
            raise

    def _check_without_params(self, batch: Sequence[Any]) -> None:
        """Raises if the arguments include the parameters, which a call has already."""
        own = jax.tree.structure(self.params)
        if (
            any(x is self.params or jax.tree.structure(x) == own for x in batch)
            and not own.num_leaves < 2
        ):
            raise fail(
                "Quantized",
                "the arguments include the parameters, which the call has already.",
                given=f"{len(batch)} arguments",
                expected="the other arguments of the function alone",
                fix="write quantized(x), or quantized.function(quantized.params, x).",
                error=TypeError,
            )

    @called("Quantized.bind", "pass a function of the same weights: quantized.bind(step).")
    def bind(self, f: Callable[Concatenate[Any, Q], S]) -> "Quantized[Q, S]":
        """Returns the same weights, plan, scales and maps for another function of them.

        It is for models that are written as several functions, such as one that scores whole texts,
        on which weights were quantized, and one that decodes a token from a cache. What an
        algorithm keeps at sites (`maps`) is applied to the other function too.

        Args:
          f: a function that takes the weights where the first one takes them, and has the same
            contractions of them, in the same order, of operands with as many axes; its other
            arguments and the sizes of batches may differ, as may `jax.jit` and `jax.checkpoint`
            around it or its parts. After `hoist=`, a function of the
            parameters is split in the same way.

        Raises:
          TypeError: `f` is no function.
          ValueError: at the first call: `f` has other contractions than the plan.

        Example:
          >>> import jqx, jax.numpy as jnp
          >>> score, step = lambda w, x: x @ w, lambda w, token, scale: scale * (token @ w)
          >>> quantize = jqx.ptq(score, jqx.presets.w8a16(), progress=False)
          >>> quantized = quantize(jnp.eye(4), [jnp.ones((2, 4))])
          >>> quantized.bind(step)(jnp.ones((1, 4)), 2.0)
          Array([[2., 2., 2., 2.]], dtype=float32)
        """
        check_whole("Quantized.bind", f)
        f = without_values(self.plan, f, self.parents, None)
        function = Mapped(f, self.plan, self.maps).converted(self.affines)
        return Quantized(
            function,
            self.params,
            self.plan,
            self.affines,
            self.report,
            details=self.details,
            maps=self.maps,
            parents=self.parents,
            basis=self.basis,
        )

    def __repr__(self) -> str:
        return f"Quantized({summary(self.plan, self.report)})"

    def _repr_html_(self) -> str:
        return self.report.table().to_html(repr(self))


def abstract(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments with `jax.ShapeDtypeStruct` in place of arrays."""
    return jax.tree.map(lambda x: jax.eval_shape(lambda: x) if is_array(x) else x, inputs)


class Quantize(Protocol[P, R]):
    """What `ptq` returns before it gets parameters and batches."""

    def __call__(self, params: Any, /, batches: Iterable[Any] | None = None) -> Quantized[P, R]: ...


def summary(plan: Plan, report: "diagnostics.Report") -> str:
    """Returns a one-line summary: what was quantized, and how many bytes that saves."""
    count = len(plan.sites) + len(plan.skipped)
    before, after, packed = report.bytes_before, report.bytes_after, report.bytes_packed
    return (
        f"{len(plan.sites)} of {count} contractions, "
        f"{before:,} bytes of parameters become {after:,}"
    ) + (f", {packed:,} with packed codes" if packed < after else "")


def quantized_of(
    mapped: Mapped,
    scales: Mapping[str, Affine],
    codes: Any,
    found: "diagnostics.Report",
    inputs: tuple[Any, ...] | None,
    target: str | Literal[False],
) -> Quantized:
    """Returns a quantized function with its weights, laid out for a target."""
    plan = mapped.plan
    laid_out = lay_out_weights(codes, plan, target) if target and plan.weights else codes
    function = mapped.converted(scales)
    parents = mapped.f.parents if isinstance(mapped.f, Hoisted) else None
    given = function, laid_out, plan, scales, _in_memory(found, plan, laid_out), inputs
    return Quantized(*given, maps=mapped.maps, parents=parents, basis=mapped.basis)


def _in_memory(found: "diagnostics.Report", plan: Plan, params: Any) -> "diagnostics.Report":
    """Returns a report with the bytes that weights take in their layout."""
    leaves = dict(named_leaves("ptq", rooted(plan.params, params), plan))
    weights = [
        dataclasses.replace(x, bytes_after=abstract_leaf(leaves[x.path]).nbytes)
        for x in found.weights
    ]
    return dataclasses.replace(found, weights=tuple(weights))
