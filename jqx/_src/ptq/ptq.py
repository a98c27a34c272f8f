"""`ptq`: plan, calibrate, quantize and pack weights, in one call."""

import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Literal, get_args, overload

import jax
import numpy as np
from jax.tree_util import keystr

from ..checks import called, shown
from ..errors import fail, message, some, warn
from ..numerics.blocks import Block
from ..numerics.lookup import E8M0, format_of
from ..numerics.qtype import Integer
from ..policy import Policy, check_policy
from ..signatures import P, R
from ..statistics.calibrators import Affine
from ..statistics.granularity import PerGroup, PerRun
from ..statistics.statistics import RowWeight, check_weight
from ..tensor.segments import abstract as abstract_leaf
from ..tensor.segments import check_read, has_lazy
from ..tensor.shardings import kept
from ..tensor.spec import QSpec
from ..transforms.algorithm import (
    Algorithm,
    AlgorithmResult,
    Inapplicable,
    Unstacked,
    as_result,
    chained,
    check_algorithm,
    has,
    merge_codes,
    parts_of,
)
from ..transforms.arguments import check_batches, check_concrete
from ..transforms.calibrate import affines, calibrate_batches, inputs_of
from ..transforms.make_plan import make_plan
from ..transforms.paths import Names, by_argument
from ..transforms.plan import Plan, Site
from ..transforms.quantize_params import (
    check_arguments,
    check_finite_weights,
    check_no_learned_scales,
    dequantize_params,
    named_leaves,
    quantize_params,
)
from ..transforms.stats import OnNonfinite, check_mode
from ..transforms.trace import TracedOnce, as_params, is_array, is_quantized, trace_call
from .quantized import (
    Basis,
    BoundFunction,
    Hoist,
    Mapped,
    Quantize,
    Quantized,
    Target,
    abstract,
    algorithm_report,
    algorithms,
    check_function,
    check_hoist,
    engine,
    grids,
    model_report,
    quantized_of,
    scaling,
    split_off,
    target_of,
)
from .rows import OwnText, add_rows, check_own_text, padding_of

# The default algorithm: what measured best for plans of the given formats.


Effort = Literal["seconds", "minutes", "hours"]
"""How long an automatically chosen algorithm may take. The scale is a model of about ten million
weights on a few cores.
"""

_FEW_BITS = 4
_NUMBERED = r"^.*?\d+"
"""Matches the part of a weight's path up to its first number. All weights of one layer share it."""

_GPTQ: dict[str, Any] = {
    "damping": 0.05,
    "propagation": "qep",
    "ill_conditioned": "round",
    "unsupported": "round",
    "least_inputs": 1,
    "sweeps": 1,
}
_FACTORS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55)
_SMALL = 64
"""Groups of so many elements have hardly any outliers, so other factors of their scales are tried
only with less than 4 bits. With int4 in groups of 32 they gained nothing: divergences of SmolLM2
on four kinds of text changed by -5 % to 8 %, those with int3 by -3 % to -9 %.
"""


def check_effort(function: str, effort: Any, algorithm: Any) -> None:
    """Checks that an effort is valid, and that no algorithm is given with it."""
    if effort is not None and effort not in get_args(Effort):
        fix = "pass 'seconds', 'minutes' or 'hours', or leave it out for 'seconds'."
        raise fail(function, f"`effort` is unknown: {shown(effort)}.", fix=fix)
    if effort is not None and algorithm is not None:
        problem = f"`effort`, {effort!r}, and `algorithm`, {described(algorithm)}, exclude each "
        problem += "other."
        raise fail(function, problem, fix="leave one of them out.")


@dataclasses.dataclass
class Choice:
    """The algorithm for the weights of a plan.

    Attributes:
      algorithm: the algorithm.
      effort: the effort at which it was chosen; `None` if the user named the algorithm.
      instead: the fallback that chooses codes if `algorithm` does not support the function.
      notes: which parts were left out, and why.
    """

    algorithm: Any
    effort: Effort | None = None
    instead: Any = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def reads_batches(self) -> bool:
        """Whether the algorithm reads all batches."""
        return self.algorithm != algorithms.nearest()

    def attempt(self, part: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a part of the algorithm and returns its result as `AlgorithmResult`.

        If the user did not name the algorithm, and the part does not apply to the function or does
        not support it, adds a note and returns `None`. Warns unless it has nothing to do.
        """
        try:
            return as_result(run(*args, **kwargs))
        except (Inapplicable, NotImplementedError) as error:
            if self.effort is None:
                raise
            reason = str(error).splitlines()[0]
            self.notes.append(f"without {described(part)}: {reason}")
            # That there are no channels to scale or to rotate is no loss.
            if isinstance(error, NotImplementedError) or hasattr(part, "run"):
                problem = "a part of the default algorithm does not support this function."
                fix = "pass an algorithm by name, such as jqx.algorithms.nearest()."
                warn(message("ptq", problem, given=f"{described(part)}: {reason}", fix=fix))
            return None

    def choose(self, rounding: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `rounding`, or of the fallback if it does not apply."""
        outcome = self.attempt(rounding, rounding.run, *args, **kwargs)
        if outcome is None and self.instead is not None:
            self.notes.append(f"{described(self.instead)} in its place")
            outcome = self.attempt(self.instead, self.instead.run, *args, **kwargs)
        return outcome

    def __str__(self) -> str:
        suffix = "" if self.effort is None else f" (effort={self.effort!r})"
        return "; ".join([described(self.algorithm) + suffix, *self.notes])


def default_of(plan: Plan, effort: Effort, *, is_lazy: bool) -> Choice:
    """Returns the algorithm that measured best for the formats of a plan, for any batches.

    Parameters that are read one at a time are not rotated where that is a gain, but no necessity.
    """
    pairs = [pair for site in plan.sites if (pair := _specs(plan, site)) is not None]
    activations = [spec for _, spec in pairs if spec is not None]
    low_bit = [form for spec in activations if (form := format_of(spec.qtype)).bits <= _FEW_BITS]
    sizes = {form.size for form in low_bit if isinstance(form, Block) and form.scale_qtype == E8M0}
    groups = [weight.granularity for weight, _ in pairs]
    is_wide = any(not isinstance(x, (PerGroup, PerRun)) or x.size > _SMALL for x in groups)
    bits = min((format_of(weight.qtype).bits for weight, _ in pairs), default=32)
    gptq = algorithms.gptq(**_GPTQ, factors=_FACTORS if is_wide or bits < _FEW_BITS else ())
    parts: list[Any] = []
    notes: list[str] = []
    few_in_weights, learns = bits <= _FEW_BITS, bits < _FEW_BITS and effort == "hours"

    def has_outliers(spec: QSpec) -> bool:
        """Whether to move outliers of activations into the weights. If activations have scales for
        each token, their outliers do less harm there than in weights of few bits.
        """
        is_integer = isinstance(format_of(spec.qtype), Integer)
        return is_integer and not (spec.dynamic and few_in_weights)

    if any(not isinstance(form, Block) for form in low_bit):
        parts.append(algorithms.rotate())
    elif sizes:
        parts.append(algorithms.rotate(block=min(sizes)))
    elif any(map(has_outliers, activations)):
        parts.append(algorithms.smooth_quant())
    elif few_in_weights and activations and not (low_bit or learns):
        rotated = algorithms.rotate(offline="only")
        if is_lazy:
            notes.append(f"without {described(rotated)}: parameters are read one at a time")
        else:
            parts.append(rotated)
    if learns:
        is_flat = not any(site.loops for site in plan.sites)
        is_numbered = any(re.search(_NUMBERED, site.path) for site in plan.sites)
        parts.append(algorithms.auto_round(blocks=_NUMBERED if is_flat and is_numbered else None))
    elif few_in_weights or (pairs and effort != "seconds"):
        parts.append(gptq)
    return Choice(_joined(parts), effort, gptq if learns else None, notes)


def fitted(
    choice: Choice,
    f: Callable[..., Any],
    plan: Plan,
    args: Sequence[Any],
    plans: Callable[[], Iterable[tuple[int, Plan]]],
) -> Choice:
    """Returns a choice without the parts that depend on inputs, if there are too few inputs.

    There are too few if every site has fewer inputs than channels. Chance correlations between so
    few inputs would decide the codes.

    Args:
      choice: the choice for the plan.
      f: the function.
      plan: the plan.
      args: arguments of the function, with the batch that the plan was made with.
      plans: yields how many batches have the same shapes, and a plan that was made with one of
        them, until there are enough inputs.
    """
    call = trace_call("ptq", f, plan.parameters, args, {}, lazy=True)
    bodies = grids.bodies_of(plan, call.jaxpr)
    inputs_at: dict[Any, float] = {}
    best = (0.0, 0.0, 1.0)  # inputs for each channel of a site, and both numbers
    for count, other_plan in plans():
        for site in other_plan.sites:
            if _specs(plan, site) is None or site.macs == 0:
                continue
            if site.macs is None or site.address not in bodies:
                return choice
            weight = next(i for i, x in enumerate(site.operands) if x.path is not None)
            sizes = math.prod(map(int, site.shapes[weight])), math.prod(map(int, site.result))
            inputs, channels = (site.macs / max(size, 1) for size in sizes)
            total = inputs_at[site.address] = inputs_at.get(site.address, 0) + count * inputs
            best = max(best, (total / channels, total, channels))
        if best[0] >= 1:
            return choice
    parts = chained(choice.algorithm) or (choice.algorithm,)
    rotations = [part for part in parts if isinstance(part, algorithms.rotate)]
    dropped = described(_joined([part for part in parts if part not in rotations]))
    note = f"{best[1]:.0f} inputs of {best[2]:.0f} channels are too few for {dropped}"
    return Choice(_joined(rotations), choice.effort, notes=[note])


def _joined(parts: Sequence[Any]) -> Any:
    """Combines algorithms into one."""
    if len(parts) > 1:
        return algorithms.chain(*parts)
    return parts[0] if parts else algorithms.nearest()


_STORAGE = ("checkpoint", "offload")
"""Options of algorithms that say where intermediate values are kept."""


def described(algorithm: Any) -> str:
    """Returns the call that makes an algorithm, with the options that differ from the defaults.

    Leaves out the options that say where intermediate values are kept. Codes, and files that hold
    them, do not depend on these.
    """
    parts = chained(algorithm)
    if parts is not None:
        return ", ".join(map(described, parts))
    if not dataclasses.is_dataclass(algorithm):
        return str(getattr(algorithm, "__name__", type(algorithm).__name__))
    name = getattr(algorithm, "function", None)
    name = name.rpartition(".")[2] if isinstance(name, str) else type(algorithm).__name__
    options = (
        f"{field.name}={_shown(value)}"
        for field in dataclasses.fields(algorithm)
        if field.name not in _STORAGE
        and _differ(value := getattr(algorithm, field.name, field.default), field.default)
    )
    return f"{re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower()}({', '.join(options)})"


def _differ(value: Any, default: Any) -> bool:
    """Whether an option differs from its default; one that cannot be compared, such as an array,
    does unless it is the same object.
    """
    try:
        return value is not default and bool(value != default)
    except Exception:  # a user's `__eq__`
        return True


def _shown(value: Any) -> str:
    """Returns an option as text: an array as its type and shape."""
    if is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    return re.sub(" at 0x[0-9a-f]+", "", shown(value))


def _specs(plan: Plan, site: Site) -> tuple[QSpec, QSpec | None] | None:
    """Returns the specs of the weight of a site and of the other operand."""
    weights = [x for operand in site.operands if (x := plan.weight_at(operand.path)) is not None]
    others = [operand for operand in site.operands if operand.path is None]
    return (weights[0].spec, others[0].spec) if weights and others else None


# `ptq` itself.


_NAMED = 16
"""How many matrices a report names."""


@overload
def ptq(
    f: Callable[Concatenate[Any, P], R],
    policy: Policy,
    algorithm: Algorithm | None = None,
    *,
    effort: Effort | None = None,
    params: Literal[0] = 0,
    names: Names = None,
    hoist: Hoist = False,
    target: Target = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    own_text: bool | None = None,
    progress: bool = True,
) -> Quantize[P, R]: ...
@overload
def ptq(
    f: Callable[..., R],
    policy: Policy,
    algorithm: Algorithm | None = None,
    *,
    effort: Effort | None = None,
    params: int | tuple[int, ...],
    names: Names = None,
    hoist: Hoist = False,
    target: Target = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    own_text: bool | None = None,
    progress: bool = True,
) -> Quantize[..., R]: ...
@called("ptq", "call it in two steps: jqx.ptq(f, policy)(params, batches).")
def ptq(
    f: Callable[..., Any],
    policy: Policy,
    algorithm: Algorithm | None = None,
    *,
    effort: Effort | None = None,
    params: int | tuple[int, ...] = 0,
    names: Names = None,
    hoist: Hoist = False,
    target: Target = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    own_text: bool | None = None,
    progress: bool = True,
) -> Quantize:
    """Quantizes a function after training: `ptq(f, policy)(params, batches)`.

    It makes a plan, calibrates if activations have static scales or the algorithm needs
    statistics, computes the scales, quantizes the weights and lays them out for the target. The
    steps are `make_plan`, `calibrate_batches`, `affines`, `quantize_params`, `convert` and
    `pack_for`; each can be called on its own. `jqx.save` writes the result. For Flax modules, use
    `jqx.linen.ptq` and `jqx.nnx.ptq`.

    Args:
      f: a function of arrays and pytrees of arrays.
      policy: what is quantized, and how, such as `jqx.presets.w8a8()`.
      algorithm: chooses the codes of the weights, see `jqx.extend.Algorithm`. For example,
        `jqx.algorithms.nearest()` rounds to nearest. `None` takes the algorithm that measured best
        for the formats of the plan; `report.codes` names it.
      effort: how long the default algorithm may take, for a model of about ten million weights on
        a few cores: `"seconds"` (also `None`), `"minutes"` or `"hours"`.
      params: position, or positions, of the arguments of `f` that hold weights.
      names: names of weights, as in `make_plan`.
      hoist: whether weights that `f` computes from parameters alone are computed once, by
        `jqx.hoist`, and quantized: masked, normalised or dequantized weights, for example. `True`
        takes floats that are not larger than the parameters that they are computed from; `"all"`
        takes everything that depends on parameters alone. Then `function`, `params` and `plan` of
        the result are those of the function without them. For new parameters, quantize again. To
        train with quantization, plan and simulate `f` itself.
      target: `"cpu"`, `"gpu"` or `"tpu"`: the platform whose weight layout is used. `None` means
        `jax.default_backend()`. `False` keeps the layout that files use.
      weight: how much the rows of a batch count, for static scales and for algorithms without a
        `weight` of their own: a function of the inputs of a batch, such as
        `lambda tokens: tokens != 0` if 0 is padding. `None`: static scales take the `weight` of the
        algorithm, if it has one. Without one, rows where a mask is 0 are left out, and
        `report.codes` says so: an array [rows, length] of zeros and ones among the inputs, such
        that results depend on the other arrays where it is 1, and nowhere else. It is looked for in
        the first batch in which it has zeros; for a named algorithm and a generator, in its first.
      on_nonfinite: what is done with rows of operands that hold a NaN or an infinity: `"error"`
        raises, `"ignore"` leaves them out of all statistics, with a warning that counts them, as in
        `calibrate`.
      own_text: whether rows of other text are added to a list of batches of tokens, if something is
        calibrated. If `f` is a causal function of tokens and returns the logits of the next token,
        it writes the text itself. There may be a mask of padding, which is then all ones, and
        positions or types of tokens, which continue as in rows without padding. If another function
        has such a mask, the rows are parts of those in the batches, and random tokens. `None` adds
        them for the default algorithm, where there are such inputs; `True` does for any algorithm,
        or raises.
      progress: whether to show a progress bar, as in `calibrate_batches`.

    Returns:
      A function of the parameters (a tuple if there are several positions) and of batches, which
      returns a `Quantized`. Batches are a list, such as `[x]`, or another iterable. Each batch is a
      tuple of the other arguments of `f`, or the one other argument, which may be a named tuple.
      The plan is made with the first batch that is not empty. The other batches are read only if
      something is calibrated.

      Without batches, a causal function `f(params, tokens)` of int32 tokens [rows, length] or
      [length] to logits for each is calibrated on text that it writes itself, if anything is
      calibrated: 16 rows of 512 tokens, or of fewer if it takes no more, that begin with token 0,
      by `jqx.algorithms.own_text`, which has the options. `report.codes` says what was written.
      Where batches are tokens, the default algorithm adds as many tokens of such text to them.

      Leaves of parameters may be `jqx.interop.Lazy`, for a model that is larger than memory, if
      the algorithm is `nearest()`, `gptq()` or `adaround()`. Each leaf is read when it is needed,
      and then dropped. Static scales are computed stage by stage, on all batches. The returned
      weights are lazy too: `jqx.save` reads them one at a time. The report reads each once.

      Parameters may hold QTensors that the policy does not quantize, such as those of a checkpoint.
      They are returned unchanged. Algorithms see their float values, which take the memory of
      floats.

    Raises:
      TypeError: `f` is not a function, `policy` is not a `Policy`, `batches` is not a list of
        batches, a leaf is `Lazy` where arrays are needed, or there are no batches, and `f` does not
        map tokens to logits.
      ValueError: the list of batches is empty, `target`, `effort` or `on_nonfinite` is unknown,
        both `effort` and `algorithm` are given, a weight that is quantized or an activation is not
        finite, or a step rejects its input.
      NotImplementedError: a named algorithm changes a weight that is quantized already.

    Gradient: none; weights are codes.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda params, x: jax.nn.relu(x @ params["w"])
      >>> params, batches = {"w": jnp.eye(64)}, [jnp.ones((8, 64)), jnp.full((8, 64), 2.0)]
      >>> quantized = jqx.ptq(f, jqx.presets.w8a8(), progress=False)(params, batches)
      >>> quantized
      Quantized(1 of 1 contractions, 16,384 bytes of parameters become 4,352)
      >>> y = jax.jit(quantized.function)(quantized.params, batches[0])
      >>> bool(jnp.allclose(y, f(params, batches[0]), atol=0.02))
      True
    """
    check_function("ptq", f)
    check_policy("ptq", policy)
    check_algorithm("ptq", algorithm, of_functions=True)
    check_effort("ptq", effort, algorithm)
    check_hoist(hoist)
    check_weight("ptq", weight)
    ignores = check_mode("ptq", on_nonfinite)
    check_own_text(own_text)
    argnums, platform = as_params("ptq", params), target_of("ptq", target)

    @called("ptq(f, policy)", "pass the parameters, and a list of batches, such as [x].")
    def quantize(params: Any, batches: Iterable[Any] | None = None) -> Quantized:
        original = BoundFunction(f, params, argnums, names)
        text: OwnText | None = None
        if batches is None:
            if own_text is False:
                fix = "pass a list of batches, such as [x], or leave own_text out."
                raise fail("ptq", "there are no batches, and own_text=False.", fix=fix)
            check_arguments("ptq", argnums, params)
            batches = text = OwnText(original, progress)
            first_batch = text.first
        else:
            check_batches("ptq", batches)
            first_batch, batches = first_of(batches)
        check_concrete("ptq", params, first_batch)
        inputs = inputs_of(first_batch)
        check_arguments("ptq", argnums, params)
        bound = split_off(original, hoist, inputs)
        traced_once = TracedOnce(bound.f)
        planned = make_plan(traced_once, policy, params=bound.argnums, names=bound.names)
        plan = planned(*bound.arguments(bound.params, inputs))
        choice = Choice(algorithm)
        if algorithm is None:
            choice = default_of(plan, effort or "seconds", is_lazy=has_lazy(bound.params))
        is_default = algorithm is None and choice.reads_batches
        if is_default:
            batches = list(batches)
        padding, notes = None, []
        if choice.reads_batches or plan.static_specs():
            if weight is None and not has_weight(choice.algorithm):
                is_list = isinstance(batches, (list, tuple))
                padding = padding_of(original, batches if is_list else [first_batch])
            if text is None and (algorithm is None if own_text is None else own_text):
                options: Any = {"required": own_text is True, "progress": progress}
                batches, notes = add_rows(original, plan, inputs, batches, padding, **options)
        elif own_text and text is None:
            notes = ["without text of its own: nothing is calibrated"]
        if is_default:

            def other_plans() -> Iterable[tuple[int, Plan]]:
                def plan_of(inputs: tuple[Any, ...]) -> Plan:
                    return planned(*bound.arguments(bound.params, inputs))

                return plans_by_shape(batches, first_batch, plan, plan_of)

            arguments = bound.arguments(bound.params, inputs)
            choice = fitted(choice, traced_once, plan, arguments, other_plans)
        choice, row_weight = weighted(choice, plan, weight or padding)
        observing = Observing(row_weight, ignores, progress)
        mapped = Mapped(traced_once, plan, basis=Basis())
        result = _run(choice, mapped, bound.params, batches, observing)
        report = model_report.report_of(plan, result.values, lambda: result.codes)
        if text is not None:
            notes = [text.written or "without data"]
        choice.notes.extend(([str(padding)] if padding else []) + notes)
        report = dataclasses.replace(report, codes=str(choice))
        shapes = abstract(inputs)
        mapped = dataclasses.replace(result.mapped, f=bound.f)
        quantized = quantized_of(mapped, result.scales, result.codes, report, shapes, platform)
        reports = [x for x in result.reports if x is not None]
        details = reports[0] if len(reports) == 1 else tuple(reports)
        return dataclasses.replace(quantized, details=details or None)

    return quantize


@dataclasses.dataclass(frozen=True)
class _Result:
    """The results of algorithms: float weights, their codes, scales of activations, the function
    with its maps, and reports.
    """

    values: Any
    codes: Any
    scales: Mapping[str, Affine]
    mapped: Mapped
    reports: Sequence[Any]


def _run(
    choice: Choice, mapped: Mapped, values: Any, batches: Iterable[Any], observing: "Observing"
) -> _Result:
    """Runs the algorithms: first those that rewrite weights, then rounding, then corrections."""
    if mapped.plan.splits and choice.reads_batches:
        parts = Unstacked(mapped.plan, values, TracedOnce(mapped.f))
        mapped_parts = dataclasses.replace(mapped, f=TracedOnce(parts.function), plan=parts.plan)
        result = _run(choice, mapped_parts, parts.params, batches, observing)
        values, codes = parts.together(result.values), parts.together(result.codes)
        mapped = result.mapped.restacked(mapped)
        return dataclasses.replace(result, values=values, codes=codes, mapped=mapped)
    rewrites, rounding, corrections = parts_of(choice.algorithm)
    plan, runs = mapped.plan, has(rounding, "run")
    observers = None if runs else getattr(rounding, "observers", None)
    stats, scales, reports = None, {}, []
    few_inputs: dict[str, str] = {}
    given_values = values
    floats = values = dequantize_params(values)
    if runs or rewrites or corrections:
        batches = list(batches)
    leaves = named_leaves("ptq", by_argument(plan.params, values), plan)
    check_no_learned_scales("ptq", leaves, plan)
    reads_leaves = rounding is None or (getattr(rounding, "lazy", False) and not observers)
    if rewrites or corrections or not reads_leaves:
        check_read("ptq", leaves)
    check_finite_weights("ptq", plan, values)

    def rewrite(algorithm: Any, *args: Any) -> AlgorithmResult:
        outcome = as_result(algorithm.rewrite(*args, **observing.of(algorithm.rewrite)))
        _restore_quantized(given_values, floats, outcome.params)
        return outcome

    def checked(outcome: AlgorithmResult) -> Any:
        """Returns parameters with every planned weight as a QTensor of the plan; rounds floats."""
        floats = jax.tree.map(_without_codes, outcome.params, is_leaf=is_quantized)
        return merge_codes("ptq", outcome.params, quantize_params(floats, plan))

    for algorithm in rewrites:
        outcome = choice.attempt(
            algorithm, rewrite, algorithm, mapped.function, plan, values, batches
        )
        if outcome is not None:
            values, mapped = outcome.params, mapped.then(outcome, rewrites=True)
            reports.append(outcome.report)
            few_inputs |= outcome.few
    args = mapped.function, plan, values, batches
    if plan.static_specs() or observers:
        calibrated = engine.calibrate_stages if has_lazy(values) else calibrate_batches
        stats = calibrated(*args, observers=observers, **observing.options)
        scales = affines(plan, stats)
    outcome = None
    if rounding is not None and runs:
        outcome = choice.choose(rounding, *args, **observing.of(rounding.run))
    elif rounding is not None:
        outcome = choice.attempt(rounding, rounding, plan, values, stats)
    outcome = AlgorithmResult(values, None) if outcome is None else outcome
    codes, mapped = checked(outcome), mapped.then(outcome)
    reports.append(outcome.report)
    few_inputs |= outcome.few
    reals = values if outcome.basis is None or not corrections else outcome.basis(values)
    for algorithm in corrections:
        args = mapped.function, plan, reals, codes, scales, batches
        options = observing.of(algorithm.correct)
        outcome = choice.attempt(algorithm, algorithm.correct, *args, **options)
        if outcome is not None:
            reals = reals if outcome.basis is None else outcome.basis(reals)
            codes, mapped = checked(outcome), mapped.then(outcome)
            reports.append(outcome.report)
            few_inputs |= outcome.few
    note_inputs(choice, reports, few_inputs)
    codes = _restore_quantized(given_values, floats, codes)
    codes = jax.tree.map(partial(kept, "ptq"), given_values, codes, is_leaf=is_quantized)
    return _Result(values, codes, scales, mapped, reports)


def _without_codes(leaf: Any) -> Any:
    """Returns the shape of the array that codes stand for, and any other leaf unchanged."""
    kind = abstract_leaf(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype) if is_quantized(kind) else leaf


def _restore_quantized(params: Any, floats: Any, codes: Any) -> Any:
    """Puts the QTensors of the user, which algorithms saw as floats, back into the parameters.

    Raises:
      NotImplementedError: an algorithm has changed one of them.
    """

    def restored(path: Any, leaf: Any, real: Any, code: Any) -> Any:
        if not is_quantized(abstract_leaf(leaf)):
            return code
        is_same = is_array(code) and np.array_equal(code, real, equal_nan=True)
        if code is not real and not is_same:
            problem = "the algorithm changes a weight that is quantized already."
            details = f"{keystr(path, simple=True, separator='/')!r}: {leaf!r}"
            fix = "pass jqx.algorithms.nearest() or gptq(), or the weight in float: "
            fix += "jqx.dequantize_params(params)."
            raise fail("ptq", problem, given=details, fix=fix, error=NotImplementedError)
        return leaf

    return jax.tree_util.tree_map_with_path(restored, params, floats, codes, is_leaf=is_quantized)


@dataclasses.dataclass(frozen=True)
class Observing:
    """How batches are observed.

    Attributes:
      weight: how much rows count, for static scales.
      ignores: whether rows that are not finite are left out.
      progress: whether to show a progress bar.
    """

    weight: RowWeight | None
    ignores: bool
    progress: bool

    @property
    def options(self) -> dict[str, Any]:
        """The options of a calibration."""
        return {
            "weight": self.weight,
            "on_nonfinite": "ignore" if self.ignores else "error",
            "progress": self.progress,
        }

    def of(self, method: Callable[..., Any]) -> dict[str, Any]:
        """Returns the options of a method of an algorithm; those of users may not know all."""
        options: dict[str, Any] = {"progress": self.progress}
        if self.ignores and "on_nonfinite" in inspect.signature(method).parameters:
            options["on_nonfinite"] = "ignore"
        return options


def weighted(
    choice: Choice, plan: Plan, weight: RowWeight | None
) -> tuple[Choice, RowWeight | None]:
    """Returns a choice whose algorithms have a weight, and the weight for static scales."""
    choice = dataclasses.replace(
        choice,
        algorithm=_with_weight(choice.algorithm, weight),
        instead=_with_weight(choice.instead, weight),
    )
    if weight is not None or not plan.static_specs():
        return choice, weight
    rewrites, rounding, corrections = parts_of(choice.algorithm)
    weights = (getattr(x, "weight", None) for x in (*rewrites, rounding, *corrections))
    functions = list(dict.fromkeys(x for x in weights if callable(x)))
    if len(functions) > 1:
        problem = "static scales have no weight, and algorithms have different ones."
        fix = "pass the weight for static scales: jqx.ptq(f, policy, algorithm, weight=...)."
        raise fail("ptq", problem, fix=fix)
    return choice, functions[0] if functions else None


def has_weight(algorithm: Any) -> bool:
    """Whether a part of an algorithm weights rows."""
    parts = chained(algorithm) or (algorithm,)
    return any(callable(getattr(x, "weight", None)) for x in parts)


def _with_weight(algorithm: Any, weight: RowWeight | None) -> Any:
    """Returns an algorithm in which each part without a weight has this one, if it can."""
    if weight is None:
        return algorithm
    if parts := chained(algorithm):
        return type(algorithm)(*(_with_weight(x, weight) for x in parts))
    fields = getattr(type(algorithm), "__dataclass_fields__", {})
    if "weight" in fields and algorithm.weight is None:
        return dataclasses.replace(algorithm, weight=weight)
    return algorithm


def note_inputs(choice: Choice, reports: Sequence[Any], few_inputs: Mapping[str, str]) -> None:
    """Warns of matrices whose codes an algorithm did not choose, or which it left unchanged,
    because too few inputs reached them, and notes how many there are. Notes too what the inputs of
    the other matrices were too few for.
    """
    rounded: list[tuple[str, str]] = []
    count = 0
    for report in (x for x in reports if x is not None):
        if isinstance(report, algorithm_report.AlgorithmReport):
            choice.notes.extend(report.calibration)
        elif isinstance(report, scaling.Pairs) and report.left:
            choice.notes.append(f"inputs of {len(report.left)} sites not scaled: no clear gain")
        matrices, total = algorithm_report.not_chosen(report)
        rounded, count = [*rounded, *matrices], count + total
    if rounded:
        names = some((name for name, _ in rounded), _NAMED)
        choice.notes.append(f"{len(rounded)} of {count} matrices rounded to nearest: {names}")
    if unfitted := [name for name in few_inputs if name not in dict(rounded)]:
        names = some(unfitted, _NAMED)
        choice.notes.append(f"{len(unfitted)} matrices not fitted to few inputs: {names}")
    if reasons := {**dict(rounded), **few_inputs}:
        problem = "some matrices were rounded to nearest, not fitted to their inputs: they need "
        problem += "about as many inputs as channels, or more."
        details = some(f"{name}: {reason}" for name, reason in reasons.items())
        fix = "calibrate on more batches, or on batches that reach them, such as each expert; or "
        fix += "leave it so."
        warn(message("ptq", problem, given=details, fix=fix))


def first_of(batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Returns the first batch that is not empty, and all batches."""
    remaining, read = iter(batches), []
    for batch in remaining:
        read.append(batch)
        if all(getattr(x, "size", 1) for x in jax.tree.leaves(batch)):
            break
    if not read:
        problem = "there is no batch: `batches` is empty, or an exhausted generator."
        raise fail("ptq", problem, fix="pass a list, or create the generator again.")
    is_list = isinstance(batches, (list, tuple))
    return read[-1], batches if is_list else itertools.chain(read, remaining)


def plans_by_shape(
    batches: Iterable[Any], first_batch: Any, plan: Plan, plan_of: Callable[[tuple[Any, ...]], Plan]
) -> Iterable[tuple[int, Plan]]:
    """Yields how many batches have equal shapes, and the plan of one of them; the shapes that most
    elements have come first, so that few plans are made. That of the first batch is known.
    """
    by_shape: dict[Any, list[Any]] = {}
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch)
        by_shape.setdefault((structure, tuple(map(np.shape, leaves))), []).append(batch)

    def size(group: list[Any]) -> int:
        return len(group) * sum(np.size(x) for x in jax.tree.leaves(group[0]))

    for group in sorted(by_shape.values(), key=size, reverse=True):
        is_planned = any(x is first_batch for x in group)
        yield len(group), plan if is_planned else plan_of(inputs_of(group[0]))
