"""The variables of a quantized nnx module, and how each mode uses them."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from .._errors import fail
from ..calibrators import Affine
from ..modules import Mode
from ..modules._shared import (
    QuantizedFunction,
    Scales,
    Wanted,
    check_mode,
    check_scales,
    flatten,
    needs_key,
    nest,
    overlay,
)
from ..policy import Policy
from ..policy._shared import check_policy
from ..transforms import dequantize_params
from ..transforms._shared import is_whole
from ._classes import Over
from ._variables import Found, Scale, Stat


class State(Over):
    """Base of nnx modules that have a policy and a mode.

    Attributes:
      policy: what is quantized; paths are those of the parameters inside this module.
      mode: what a call computes; `model.set_attributes(mode=...)` sets it in all modules.
      backward: `None`, or the dtype of the backward pass of `Mode.SIMULATE`, whose forward pass
        then runs on integers, see `jqx.simulate`.
      quant_dynamic: whether scales of static activations and outputs that are not calibrated are
        computed from the values of the call: `scales="dynamic"`.
      quant_stats: statistics. The variable always exists; only its contents change.
      quant_scales: fixed scales of activations. The variable always exists.
      learned_scales: scales that are trained, from `learn_scales`: nested dicts of arrays.
      quant_rng: stream of random numbers, for gradient estimators that draw them.
      quant_found: what `convert` and similar functions look for, on the copy that they run; else
        `None`.
    """

    policy: Policy
    mode: Mode
    backward: DTypeLike | None
    quant_dynamic: bool
    quant_stats: Stat
    quant_scales: Scale
    learned_scales: nnx.Param[Any] | None
    quant_rng: nnx.RngStream | None
    quant_found: Found | None = None

    def _q_set_up(
        self,
        policy: Policy,
        mode: Mode,
        backward: DTypeLike | None,
        scales: Scales,
        rngs: nnx.Rngs | None,
    ) -> None:
        name = type(self).__name__
        check_policy(name, policy)
        check_mode(name, mode)
        check_scales(name, scales)
        random = needs_key(policy)
        if random and rngs is None:
            raise fail(
                name,
                "a gradient estimator of the policy draws random numbers.",
                given="rngs=None",
                expected="an nnx.Rngs; the model takes a fork of its stream `quant`",
                fix="pass rngs=nnx.Rngs(params=0, quant=1).",
            )
        self.policy, self.mode, self.backward = policy, mode, backward
        self.quant_dynamic = scales == "dynamic"
        self.quant_stats, self.quant_scales = Stat({}), Scale({})
        self.learned_scales = nnx.data(None)
        self.quant_rng = rngs["quant"].fork() if random and rngs is not None else nnx.data(None)

    def _q_wanted(self) -> Wanted | None:
        """Returns what `convert` and similar functions look for in addition to the result."""
        return None if self.quant_found is None else self.quant_found.wanted

    def _q_known(self) -> dict[str, Any]:
        """Returns statistics and scales, as arguments of `QuantizedFunction`."""
        scales = flatten(self.quant_scales.get_value())
        if self.learned_scales is not None:
            learned = flatten(self.learned_scales.get_value())
            scales |= {key: Affine(scale) for key, scale in learned.items()}
        if self.quant_found is not None:
            for wanted in (Wanted.SCALES, Wanted.LEARNED):
                scales |= flatten(self.quant_found.get_value().get(wanted.value, {}))
        stats = flatten(self.quant_stats.get_value())
        return {"stats": stats, "scales": scales, "dynamic": self.quant_dynamic}

    def _q_run(self, call: QuantizedFunction, params: Mapping[str, Any]) -> Any:
        """Evaluates a function in this mode, and stores the statistics or scales that it finds."""
        check_mode(type(self).__name__, self.mode)
        if self.mode is Mode.CALIBRATE:
            result, stats = call.observe(params)
            self.quant_stats.set_value(nest(stats))
            return result
        if self.quant_found is not None and self.mode is not Mode.FLOAT:
            call, params = self._q_search(call, params, self.quant_found)
        key = None
        if self.quant_rng is not None and self.mode is Mode.SIMULATE:
            key = self.quant_rng()
        return call(params, self.mode, self.backward, key)

    def _q_search(
        self, call: QuantizedFunction, params: Mapping[str, Any], found: Found
    ) -> tuple[QuantizedFunction, Mapping[str, Any]]:
        """Finds what is wanted; returns the call and the weights with the values found."""
        if found.wanted is Wanted.LEARNED:
            learned = call.find_scales(params, Wanted.LEARNED)
            self._q_keep(found, Wanted.LEARNED, nest(learned))
            return call.with_scales(learned), params
        scales = call.find_scales(params, found.wanted)
        self._q_keep(found, Wanted.SCALES, nest(scales))
        call = call.with_scales(scales)
        if found.wanted is Wanted.CODES:
            before = found.get_value().get(Wanted.CODES.value, {})
            params = overlay(params, before)
            done = _paths_of_codes(params)
            codes = call.quantize(dequantize_params(params))
            new = nest({path: code for path, code in codes.items() if path not in done})
            self._q_keep(found, Wanted.CODES, new)
            params = overlay(params, new)
        return call, params

    @staticmethod
    def _q_keep(found: Found, wanted: Wanted, tree: Mapping[str, Any]) -> None:
        value = found.get_value()
        before = value.get(wanted.value, {})
        found.set_value({**value, wanted.value: overlay(before, tree)})


OWN = ("quant_stats", "quant_scales", "learned_scales", "quant_rng", "quant_found")
"""Attributes of `State` that hold variables."""


def _paths_of_codes(params: Any) -> set[str]:
    flat, _ = jax.tree.flatten_with_path(params, is_leaf=is_whole)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in flat
        if is_whole(leaf)
    }
