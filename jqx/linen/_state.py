"""The variables of a quantized linen module, and how each mode uses them."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen as nn
from flax.core import meta
from jax.typing import DTypeLike

from .._errors import fail
from ..modules import Mode
from ..modules._shared import (
    QuantizedFunction,
    Scales,
    Wanted,
    check_mode,
    check_scales,
    flatten,
    nest,
    overlay,
)
from ..policy import Policy
from ..policy._shared import check_policy

QPARAMS = "qparams"
"""Collection of quantized weights; `params` has the float ones."""

STATS = "quant_stats"
"""Collection of statistics, written in `Mode.CALIBRATE`."""

SCALES = "quant_scales"
"""Collection of fixed scales of activations."""

LEARNED = "learned_scales"
"""Collection that `learn_scales` reads; the scales themselves are in `params`."""

OWN = (QPARAMS, STATS, SCALES, LEARNED)

_SEARCH: contextvars.ContextVar[tuple[Wanted | None, bool]]
_SEARCH = contextvars.ContextVar("search", default=(None, False))


@contextlib.contextmanager
def looking_for(wanted: Wanted, *, dynamic: bool) -> Iterator[None]:
    """A context in which calls of quantized modules find and write what is wanted. `dynamic`
    computes scales that are not calibrated from the values of the call.
    """
    token = _SEARCH.set((wanted, dynamic))
    try:
        yield
    finally:
        _SEARCH.reset(token)


def wanted() -> Wanted | None:
    """Returns what `convert` and similar functions look for in addition to the result."""
    return _SEARCH.get()[0]


class State(nn.Module, kw_only=True):
    """Base of linen modules that have a policy and a mode.

    Attributes:
      policy: what is quantized; paths are those of the parameters inside this module.
      mode: what a call computes.
      backward: `None`, or the dtype of the backward pass of `Mode.SIMULATE`, whose forward pass
        then runs on integers, see `jqx.simulate`.
      scales: for static activations and outputs without scales, in `SIMULATE`, `CONVERT` and
        conversions: `"calibrated"` raises an error, `"dynamic"` computes scales from the values of
        the call.
    """

    policy: Policy
    mode: Mode = Mode.SIMULATE
    backward: DTypeLike | None = None
    scales: Scales = "calibrated"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_policy(name, self.policy)
        check_mode(name, self.mode)
        check_scales(name, self.scales)
        super().__post_init__()

    def _q_known(self, learned: Mapping[str, Any]) -> dict[str, Any]:
        """Returns statistics and scales, as arguments of `QuantizedFunction`."""
        fixed, stats = (self.variables.get(name, {}) for name in (SCALES, STATS))
        return {
            "stats": flatten(stats),
            "scales": {**flatten(fixed), **flatten(learned)},
            "path": "/".join(self.path),
            "dynamic": self.scales == "dynamic" or _SEARCH.get()[1],
        }

    def _q_run(self, call: QuantizedFunction, params: Any, prefix: str = "") -> Any:
        """Evaluates a function in this mode, and stores the statistics, scales or codes that it
        finds. The names of codes start with `prefix`.
        """
        if self.mode is Mode.CALIBRATE:
            result, stats = call.observe(params)
            self._q_keep(STATS, nest(stats))
            return result
        if self.mode is Mode.SIMULATE and wanted() is Wanted.LEARNED:
            self._q_keep(LEARNED, nest(call.find_scales(params, Wanted.LEARNED)))
        search = wanted()
        if self.mode is not Mode.FLOAT and search in (Wanted.SCALES, Wanted.CODES):
            scales = call.find_scales(params, search)
            self._q_keep(SCALES, nest(scales))
            call = call.with_scales(scales)
        if self.mode is Mode.CONVERT and wanted() is Wanted.CODES:
            codes = nest(call.quantize(params))
            self._q_keep(QPARAMS, {prefix + name: tree for name, tree in codes.items()})
            params = overlay(params, codes)
        key = self.make_rng("quant") if self.has_rng("quant") else None
        return call(params, self.mode, self.backward, key)

    def _q_keep(self, collection: str, tree: Mapping[str, Any]) -> None:
        """Writes variables of this module and of the modules inside it."""
        if tree and not self.is_mutable_collection(collection):
            raise fail(
                type(self).__name__,
                f"{self.mode} writes the collection {collection!r}.",
                given="a call in which it is not mutable",
                expected=f"mutable=[{collection!r}] among the arguments of apply",
                fix="pass it, and keep the variables that apply returns with the result.",
            )
        for name, value in tree.items():
            self.put_variable(collection, name, _laid(self.get_variable(collection, name), value))


def _laid(before: Any, value: Any) -> Any:
    """Returns `before` updated by `value`. Values in boxes with axis names stay in such boxes."""
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return {**before, **{name: _laid(before.get(name), new) for name, new in value.items()}}
    if isinstance(before, meta.AxisMetadata):
        return before.replace_boxed(value)
    return value
