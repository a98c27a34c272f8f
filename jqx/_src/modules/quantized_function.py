"""A function of weights, evaluated in one of the modes of a quantized module."""

import dataclasses
import enum
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

import jax
from jax.tree_util import tree_flatten_with_path, tree_map_with_path
from jax.typing import DTypeLike

from ..checks import check_instance
from ..errors import fail, message, some, warn
from ..gradients.estimators import draws, moves_limits
from ..policy import Policy, check_policy
from ..statistics.calibrators import Affine, absmax
from ..tensor.qtensor import QTensor
from ..tensor.segments import Segments
from ..transforms.calibrate import affines_seen, calibrate, merge_stats
from ..transforms.convert import convert, simulate
from ..transforms.make_plan import make_plan
from ..transforms.paths import is_whole, nested, path_of
from ..transforms.plan import GivenAffines, Plan
from ..transforms.quantize_params import dequantize_params, named_leaves, quantize_params
from ..transforms.trace import TracedOnce

Scales = Literal["calibrated", "dynamic"]
"""Values of `scales=`: the scales of a calibration, or those of the values of the call."""


class Mode(enum.Enum):
    """What a quantized module does when it is called."""

    FLOAT = "float"
    """Computes what the float module computes; quantized weights are dequantized."""

    CALIBRATE = "calibrate"
    """Like FLOAT, and stores statistics of every activation that is to get a static scale."""

    SIMULATE = "simulate"
    """Rounds weights and activations, computes in float, has gradients: for training."""

    CONVERT = "convert"
    """Computes contractions on integers."""


class Search(enum.Enum):
    """What a run of a module looks for in addition to its result."""

    CODES = "codes"
    SCALES = "scales"
    LEARNED = "learned"

    @property
    def function(self) -> str:
        """Name of the public function that runs the module."""
        names = {Search.CODES: "convert", Search.SCALES: "fix_scales"}
        return names.get(self, "learn_scales")


@dataclasses.dataclass(frozen=True)
class QuantizedFunction:
    """A function of weights with its arguments, and what is known about its activations.

    Attributes:
      function: `function(params, *args, **kwargs)`; weights are argument 0. It is traced once, even
        if several transforms use it.
      policy: what is quantized.
      args: positional arguments after the weights.
      caller: the name of the caller in errors.
      converts: the call that turns the weights of the module into codes, for errors.
      kwargs: keyword arguments.
      stats: statistics by key, as far as they are known.
      scales: scales by key, as far as they are known; they take precedence over statistics.
      dynamic: whether scales of static activations and outputs without statistics or a scale are
        computed from the values of the call; otherwise they raise an error.
      path: path of the module, for errors.
    """

    function: Callable[..., Any]
    policy: Policy
    args: tuple[Any, ...]
    caller: str
    converts: str
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scales: Mapping[str, Affine] = dataclasses.field(default_factory=dict)
    dynamic: bool = False
    path: str = ""

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
            plan, scales = self._plan_and_scales(params)
            transform = simulate(self.function, plan, scales, backward=backward, key=key)
        elif mode is Mode.CONVERT:
            plan = self.plan(params)
            scales = self._given_scales(plan, mode)
            planned = _paths(plan)  # other weights are codes that another method uses
            leaves = by_path(params)
            floats = [path for path, x in leaves.items() if path in planned and not is_whole(x)]
            if floats:
                where = f"floats for {some(map(self._full_path, floats))}, in {Mode.CONVERT}"
                fix = f"call {self.converts} first, and use its result; or use Mode.SIMULATE."
                raise fail(self.caller, "weights are not converted.", given=where, fix=fix)
            params = tree_map_with_path(
                lambda path, x: x if path_of(path) in planned else dequantize_params(x),
                params,
                is_leaf=is_whole,
            )
            transform = convert(self.function, plan, scales)
        else:
            params, transform = dequantize_params(params), self.function
            if holds_codes((self.args, self.kwargs)):  # quantized state, such as a cache
                transform = simulate(self.function, Policy([]))
        return transform(params, *self.args, **self.kwargs)

    def run(
        self,
        params: Any,
        mode: Mode,
        search: Search | None,
        store: Callable[[str, dict[str, Any]], None],
        backward: DTypeLike | None,
        draw_key: Callable[[], jax.Array | None],
        known_codes: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Returns the result in a mode, and stores what is found.

        Args:
          params: the weights.
          mode: the mode.
          search: what to look for in addition to the result.
          store: is called with "stats", "scales", "learned" or "codes" and nested dicts.
          backward: see `simulate`.
          draw_key: returns a key for gradient estimators that draw random numbers.
          known_codes: the codes that earlier calls have stored.
        """
        if mode is Mode.CALIBRATE:
            result, stats = self.observe(params)
            store("stats", nest(stats))
            return result
        call = self
        if search is Search.LEARNED and mode is Mode.SIMULATE:
            learned = self.find_scales(params, search)
            store("learned", nest(learned))
            call = self.with_scales(learned)
        elif search in (Search.SCALES, Search.CODES) and mode is not Mode.FLOAT:
            scales = self.find_scales(params, search)
            store("scales", nest(scales))
            call = self.with_scales(scales)
        if search is Search.CODES and mode is Mode.CONVERT:
            params = overlay(params, known_codes)
            codes = nest(call.quantize(params))
            store("codes", codes)
            params = overlay(params, codes)
        return call(params, mode, backward, draw_key() if mode is Mode.SIMULATE else None)

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
            problem = (
                "statistics have no use in Mode.CALIBRATE: the scales of activations are fixed."
            )
            fix = "calibrate before scales are fixed, learned or converted; or drop them."
            raise fail(self.caller, problem, given=f"scales for {some(self.scales)}", fix=fix)
        plan = self.plan(params)
        out, stats = calibrate(self.function, plan)(params, *self.args, **self.kwargs)
        if earlier := {key: self.stats[key] for key in stats if key in self.stats}:
            stats = merge_stats(plan, earlier, stats)
        return out, {**self.stats, **stats}

    def find_scales(self, params: Any, search: Search) -> dict[str, Affine]:
        """Returns the scale of every static activation, from statistics if there are any, else from
        the values of this call. Scales of weights are included if they are to be learned.
        """
        plan = self.plan(params)
        scales = self._scales_of(plan)
        if missing := self._missing(plan):
            if not self.dynamic:
                self._check_calibrated(missing, f"a call of {search.function}")
            _, stats = calibrate(self.function, plan)(params, *self.args, **self.kwargs)
            scales = {**affines_seen(plan, stats), **scales}
        if search is not Search.LEARNED:
            return {key: scales[key] for key in plan.static_specs()}
        warn_of_scales_without_gradient(plan)
        codes = quantize_params(dequantize_params(params), plan, scales)
        of_weights: dict[str, Any] = {
            f"{path}:weight": Affine(cast(jax.Array, q.scale), q.zero_point)
            for path, q in named_leaves(self.caller, codes, plan)
            if plan.weight_at(path) is not None
        }
        return {**of_weights, **scales}

    def quantize(self, params: Any) -> dict[str, QTensor | Segments]:
        """Returns the weights that are not yet codes as QTensors, or Segments, by path."""
        plan = self.plan(params)
        paths, floats = _paths(plan), by_path(params)
        codes = quantize_params(dequantize_params(params), plan, self._scales_of(plan))
        return {
            path: code
            for path, code in by_path(codes).items()
            if path in paths and not is_whole(floats[path])
        }

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
        scales = self._scales_of(plan)
        missing = self._missing(plan)
        if self.dynamic and len(missing) == len(plan.static_specs()):
            return "dynamic" if missing else scales
        self._check_calibrated(missing, str(mode))
        return scales

    def _check_calibrated(self, missing: list[str], where: str) -> None:
        """Checks that every static activation and output has a scale."""
        if missing:
            sites = some(self._full_path(key) for key in missing)
            raise fail(
                self.caller,
                "static activations or outputs have no scale.",
                given=f"{where}, without statistics or a scale: {sites}",
                fix="call the module in Mode.CALIBRATE on typical inputs first, keeping the "
                'statistics; or, if no site has any, pass scales="dynamic": scales from the values '
                "of the call.",
            )

    def _full_path(self, path: str) -> str:
        return f"{self.path}/{path}" if self.path else path

    def _missing(self, plan: Plan) -> list[str]:
        """Returns the keys of static activations and outputs without statistics or a scale."""
        return sorted(plan.static_specs().keys() - self.scales.keys() - self.stats.keys())

    def _scales_of(self, plan: Plan) -> dict[str, Affine]:
        """Returns the known scales of a plan, without those of other methods of the module."""
        keys = [*plan.static_specs(), *(weight.key for weight in plan.weights)]
        scales = {key: Affine(*self.scales[key]) for key in keys if key in self.scales}
        stats = {key: stat for key, stat in self.stats.items() if key not in scales}
        return {**affines_seen(plan, stats), **scales}


def holds_codes(tree: Any) -> bool:
    """Returns whether a leaf of a tree is a QTensor."""

    def is_qtensor(x: Any) -> bool:
        return isinstance(x, QTensor)

    return any(map(is_qtensor, jax.tree.leaves(tree, is_leaf=is_qtensor)))


def needs_key(policy: Policy) -> bool:
    """Returns whether a gradient estimator of a policy draws random numbers in `Mode.SIMULATE`."""
    specs = [
        spec
        for rule in policy.rules
        for spec in (rule.weight, rule.activation, rule.output, rule.weight_for("gather"))
    ]
    return any(spec is not None and draws(spec.gradient) for spec in specs)


def needs_calibration(policy: Policy) -> bool:
    """Returns whether a rule of a policy has a static activation or output."""
    specs = [spec for rule in policy.rules for spec in (rule.activation, rule.output)]
    return any(spec is not None and not spec.dynamic for spec in specs)


def optional(policy: Policy) -> Policy:
    """Returns a policy for a method that may use only some of the weights."""
    return Policy(dataclasses.replace(rule, optional=True) for rule in policy.rules)


def check_options(function: str, policy: Any, mode: Any, scales: Any) -> None:
    """Checks the options of a quantized module."""
    check_policy(function, policy)
    check_mode(function, mode)
    check_scales(function, scales)


def check_mode(function: str, mode: Any) -> None:
    """Checks that `mode` is a `Mode`."""
    check_instance(function, "mode", mode, Mode, fix="pass Mode.SIMULATE or another Mode.")


def check_scales(function: str, scales: Any) -> None:
    """Checks an argument `scales`."""
    if not isinstance(scales, str) or scales not in ("calibrated", "dynamic"):
        fix = (
            "leave it out, or pass 'dynamic' to compute static scales from the values of the call."
        )
        raise fail(function, f"`scales` is unknown: {scales!r}.", fix=fix)


def check_learnable(learned: Mapping[str, Affine]) -> None:
    """Checks that scales have gradients."""
    fixed = [
        key
        for key, (scale, zero_point) in learned.items()
        if zero_point is not None or isinstance(scale, QTensor) or scale.dtype.itemsize == 1
    ]
    if fixed:
        problem = "an integer zero point, or a scale in a special format, has no gradient."
        fix = "pass symmetric=True in their specs and no block format, or use fix_scales."
        raise fail("learn_scales", problem, given=f"such scales at {some(fixed)}", fix=fix)


def warn_of_scales_without_gradient(plan: Plan) -> None:
    """Warns of scales that an estimator gives no gradient, or none at the start: those of weights
    by `absmax`, which clips nothing, where only values that are clipped move a scale.
    """
    weights = {weight.key: weight.spec for weight in plan.weights}
    never, later = {}, {}
    for key, spec in {**weights, **plan.static_specs()}.items():
        inside, outside = moves_limits(spec.gradient)
        if not inside and not outside:
            never[key] = spec.gradient
        elif not inside and key in weights and spec.calibrator == absmax:
            later[key] = spec.gradient
    stay = "scales have no gradient, and stay as they are."
    start = "scales of weights start with a gradient of 0: `absmax` clips none of their values."
    for problem, estimators in ((stay, never), (start, later)):
        if estimators:
            names = ", ".join(dict.fromkeys(map(_estimator_name, estimators.values())))
            fix = 'pass {"gradient": jqx.gradients.lsq} in these specs, or use fix_scales.'
            sites = f"gradient {names} at {some(estimators)}"
            warn(message("learn_scales", problem, given=sites, fix=fix))


def _estimator_name(gradient: Any) -> str:
    """Returns the name of an estimator of jqx, or how another one prints."""
    public = vars(importlib.import_module("jqx.gradients"))
    names = (name for name, value in public.items() if value is gradient)
    return next(names, repr(gradient))


def by_path(params: Any) -> dict[str, Any]:
    """Returns the leaves of nested dicts by path; a quantized weight is one leaf."""
    leaves, _ = tree_flatten_with_path(params, is_leaf=is_whole)
    return {path_of(path): leaf for path, leaf in leaves}


def _paths(plan: Plan) -> set[str]:
    """Returns the paths of the parameters that a plan quantizes, in whole or in part."""
    paths = {weight.path for weight in plan.weights}
    return paths | {*map(plan.whole_of, paths)}


# Statistics and scales by key, such as `attention/query/kernel:dot_general:lhs`, as nested dicts in
# which each entry is next to its weight.


def nest(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts, one for each part of the path, which precedes the first colon."""
    leaves = []
    for key, value in entries.items():
        path, colon, operand = key.partition(":")
        *scopes, leaf_name = path.split("/")
        leaves.append(([*scopes, leaf_name + colon + operand], value))
    return nested(leaves)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Inverts `nest`."""
    entries = {}
    for name, value in nested.items():
        if ":" in name:
            entries[prefix + name] = value
        else:
            entries |= flatten(value, f"{prefix}{name}/")
    return entries


def split(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits nested dicts in two: parameters, and the entries next to them."""
    params, entries = {}, {}
    for name, value in tree.items():
        if ":" in name:
            entries[name] = value
        elif isinstance(value, Mapping):
            params[name], inner = split(value)
            if inner:
                entries[name] = inner
        else:
            params[name] = value
    return params, entries


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `below` updated by `above`: a leaf of `above` replaces the leaf of `below`."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = overlay(inner, value)
        merged[name] = value
    return merged


def without(tree: Mapping[str, Any], removed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts without the leaves that `removed` has, and without the dicts that become
    empty.
    """
    remaining = {}
    for name, value in tree.items():
        inner = removed.get(name, {})
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = without(value, inner) if inner else value
            if not value and inner:
                continue
        elif name in removed and not isinstance(inner, Mapping):
            continue
        remaining[name] = value
    return remaining


def unscaled(stats: Mapping[str, Any], scales: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested statistics without those that have become scales."""
    scaled = flatten(scales)
    return nest({key: stat for key, stat in flatten(stats).items() if key not in scaled})
