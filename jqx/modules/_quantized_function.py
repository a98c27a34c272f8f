"""A function of weights, evaluated in one of the modes of a quantized module."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path
from jax.typing import DTypeLike

from .._errors import fail, some
from ..calibrators import Affine
from ..gradients._shared import draws
from ..policy import Policy
from ..tensor import QTensor, Segments
from ..transforms import (
    Plan,
    calibrate,
    convert,
    dequantize_params,
    make_plan,
    merge_stats,
    quantize_params,
    simulate,
)
from ..transforms._shared import GivenAffines, TracedOnce, affines_seen, is_whole, named_leaves
from ._learnable import warn_of_scales_without_gradient
from ._mode import Mode
from ._scales import check_calibrated, needs_calibration
from ._wanted import Wanted


def holds_codes(tree: Any) -> bool:
    """Returns whether a leaf of a tree is a QTensor."""
    return any(map(_is_quantized, jax.tree.leaves(tree, is_leaf=_is_quantized)))


def needs_key(policy: Policy) -> bool:
    """Returns whether a gradient estimator of a policy draws random numbers in `Mode.SIMULATE`."""
    specs = [
        spec
        for rule in policy.rules
        for spec in (rule.weight, rule.activation, rule.output, rule.weight_for("gather"))
    ]
    return any(spec is not None and draws(spec.gradient) for spec in specs)


def optional(policy: Policy) -> Policy:
    """Returns a policy for a method that may use only some of the weights."""
    return Policy(dataclasses.replace(rule, optional=True) for rule in policy.rules)


@dataclasses.dataclass(frozen=True)
class QuantizedFunction:
    """A function of weights with its arguments, and what is known about its activations.

    Attributes:
      function: `function(params, *args, **kwargs)`; weights are argument 0. It is traced once, even
        if several transforms use it.
      policy: what is quantized.
      args: positional arguments after the weights.
      kwargs: keyword arguments.
      stats: statistics by key, as far as they are known.
      scales: scales by key, as far as they are known; they take precedence over statistics.
      caller: the name of the caller in errors.
      dynamic: whether scales of static activations and outputs without statistics or a scale are
        computed from the values of the call; otherwise they raise an error.
      path: path of the module, for errors.
      converts: the function that turns the weights of the module into codes, for errors; `None` if
        `Mode.CONVERT` may round floats in each call.
    """

    function: Callable[..., Any]
    policy: Policy
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stats: Mapping[str, Any]
    scales: Mapping[str, Affine]
    caller: str
    dynamic: bool = False
    path: str = ""
    converts: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.function, TracedOnce):
            object.__setattr__(self, "function", TracedOnce(self.function))

    def __call__(
        self,
        params: Any,
        mode: Mode,
        backward: DTypeLike | None = None,
        key: jax.Array | None = None,
    ) -> Any:
        """Returns the result: in float, simulated, or computed on integers."""
        if mode is Mode.SIMULATE:
            key = key if needs_key(self.policy) else None
            transform = simulate(
                self.function, *self._plan_and_scales(params), backward=backward, key=key
            )
        elif mode is Mode.CONVERT:
            plan = self.plan(params)
            scales = self._given_scales(plan, mode)
            self._check_converted(params, plan)
            params = _fit(params, plan)
            transform = convert(self.function, plan, scales)
        else:
            params, transform = dequantize_params(params), self.function
            if holds_codes((self.args, self.kwargs)):
                transform = simulate(self.function, Policy([]))  # the same, with quantized state
        return transform(params, *self.args, **self.kwargs)

    def with_scales(self, scales: Mapping[str, Affine]) -> "QuantizedFunction":
        """Returns the function with more scales; scales that it already has stay."""
        return dataclasses.replace(self, scales={**scales, **self.scales})

    def plan(self, params: Any) -> Plan:
        """Returns the plan of the call."""
        planned = make_plan(self.function, self.policy, unsupported="dequantize")
        return planned(params, *self.args, **self.kwargs)

    def observe(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the result in float, and all statistics merged with those of this call."""
        if self.scales:
            raise fail(
                self.caller,
                "statistics have no use: the scales of activations are fixed already.",
                given=f"scales for {', '.join(list(self.scales)[:4])}, in Mode.CALIBRATE",
                expected="none",
                fix="calibrate before scales are fixed, learned or converted; or drop them.",
            )
        plan = self.plan(params)
        out, seen = calibrate(self.function, plan)(params, *self.args, **self.kwargs)
        if before := {key: self.stats[key] for key in seen if key in self.stats}:
            seen = merge_stats(plan, before, seen)
        return out, {**self.stats, **seen}

    def find_scales(self, params: Any, wanted: Wanted) -> dict[str, Affine]:
        """Returns the scale of every static activation, from statistics if there are any, else from
        the values of this call. Scales of weights are included if they are to be learned.
        """
        plan = self.plan(params)
        found = self._scales_of(plan)
        if missing := self._missing(plan):
            self._check_calibrated([] if self.dynamic else missing, f"a call of {wanted.function}")
            _, seen = calibrate(self.function, plan)(params, *self.args, **self.kwargs)
            found = {**affines_seen(plan, seen), **found}
        if wanted is not Wanted.LEARNED:
            return {key: found[key] for key in plan.static_specs()}
        warn_of_scales_without_gradient(plan)
        codes = quantize_params(dequantize_params(params), plan, found)
        own: dict[str, Any] = {
            f"{path}:weight": Affine(cast(jax.Array, q.scale), q.zero_point)
            for path, q in named_leaves(self.caller, codes, plan)
            if plan.weight_at(path) is not None
        }
        return {**own, **found}

    def quantize(self, params: Any) -> dict[str, QTensor | Segments]:
        """Returns the weights as QTensors, or Segments, by path."""
        plan = self.plan(params)
        return _weights(quantize_params(params, plan, self._scales_of(plan)), plan)

    def _plan_and_scales(self, params: Any) -> tuple[Plan | Policy, GivenAffines]:
        """Returns what `simulate` needs: the policy if no scales are known."""
        if not self.stats and not self.scales:
            if self.dynamic:
                return self.policy, "dynamic"
            if not needs_calibration(self.policy):
                return self.policy, None
        plan = self.plan(params)
        return plan, self._given_scales(plan, Mode.SIMULATE)

    def _given_scales(self, plan: Plan, mode: Mode) -> GivenAffines:
        """Returns the scales that a transform is given."""
        known = self._scales_of(plan)
        missing = self._missing(plan)
        if self.dynamic and len(missing) == len(plan.static_specs()):
            return known if not missing else "dynamic"
        self._check_calibrated(missing, str(mode))
        return known

    def _check_calibrated(self, missing: list[str], where: str) -> None:
        """Checks that every static activation and output has a scale."""
        before = self.path and f"{self.path}/"
        check_calibrated(self.caller, [before + key for key in missing], where)

    def _check_converted(self, params: Any, plan: Plan) -> None:
        """Checks that the weights of a plan are codes."""
        if self.converts is None:
            return
        flat, _ = tree_flatten_with_path(params, is_leaf=is_whole)
        own, before = _paths(plan), self.path and f"{self.path}/"
        floats = [_name(path) for path, x in flat if _name(path) in own and not is_whole(x)]
        if floats:
            raise fail(
                self.caller,
                "weights are not converted.",
                given=f"floats for {some(before + path for path in floats)}, in {Mode.CONVERT}",
                expected="the codes of each weight that the policy quantizes",
                fix=f"call {self.converts} first, and use its result; to quantize floats in each "
                "call, use Mode.SIMULATE.",
            )

    def _missing(self, plan: Plan) -> list[str]:
        """Returns the keys of static activations and outputs without statistics or a scale."""
        return sorted(plan.static_specs().keys() - self.scales.keys() - self.stats.keys())

    def _scales_of(self, plan: Plan) -> dict[str, Affine]:
        """Returns the known scales of a plan, without those of other methods of the module."""
        keys = [*plan.static_specs(), *(weight.key for weight in plan.weights)]
        given = {key: Affine(*self.scales[key]) for key in keys if key in self.scales}
        seen = {key: stat for key, stat in self.stats.items() if key not in given}
        return {**affines_seen(plan, seen), **given}


def _weights(params: Any, plan: Plan) -> dict[str, QTensor | Segments]:
    """Returns the quantized weights of a plan, by path."""
    flat, _ = tree_flatten_with_path(params, is_leaf=is_whole)
    named = {_name(path): leaf for path, leaf in flat}
    own = _paths(plan)
    return {path: named[path] for path in named if path in own}


def _paths(plan: Plan) -> set[str]:
    """Returns the paths of the parameters that a plan quantizes, in whole or in part."""
    own = {weight.path for weight in plan.weights}
    return own | {split.path for split in plan.splits for x in split.parts if x.path in own}


def _fit(params: Any, plan: Plan) -> Any:
    """Dequantizes weights that this plan does not use as codes, but another method does."""
    own = _paths(plan)
    return tree_map_with_path(
        lambda path, x: x if _name(path) in own else dequantize_params(x),
        params,
        is_leaf=is_whole,
    )


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor)


def _name(path: Any) -> str:
    return keystr(path, simple=True, separator="/")
