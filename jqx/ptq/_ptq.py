"""`ptq`: plan, calibrate, quantize and pack weights, in one call."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Literal, overload

import jax
import numpy as np
from jax.tree_util import keystr

from .._calls import called
from .._errors import fail
from .._signatures import P, R
from ..calibrators import Affine
from ..observers._shared import Weight, check_weight
from ..policy import Policy
from ..policy._shared import check_policy
from ..tensor._shared import abstract as abstract_leaf
from ..tensor._shared import check_read, has_lazy, kept
from ..transforms import (
    Plan,
    affines,
    calibrate_batches,
    dequantize_params,
    make_plan,
    quantize_params,
)
from ..transforms._shared import (
    Algorithm,
    Chosen,
    Names,
    OnNonfinite,
    TracedOnce,
    Unstacked,
    as_chosen,
    as_params,
    check_algorithm,
    check_arguments,
    check_batches,
    check_concrete,
    check_finite_weights,
    check_mode,
    check_no_learned_scales,
    has,
    inputs_of,
    is_array,
    is_quantized,
    named_leaves,
    observers_of,
    parts_of,
    picked,
    placed,
    rooted,
)
from ._basis import Basis
from ._defaults import Choice, Effort, check_effort, default_of, fitted
from ._hoisted import Hoist, Own, check_hoist, split_off
from ._late_folders import shared_algorithms, shared_diagnostics
from ._mapped import Mapped, check_whole
from ._observing import Observing, first_of, has_weight, note_inputs, plans, weighted
from ._other_rows import with_other_rows
from ._own_rows import OwnRows, check_own_text
from ._padding import padding_of
from ._quantized import Quantize, Quantized, abstract, quantized_of
from ._target import Target, target_of


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
    weight: Weight | None = None,
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
    weight: Weight | None = None,
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
    weight: Weight | None = None,
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
      algorithm: chooses the codes of the weights, see `jqx.Algorithm`. For example,
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
    check_whole("ptq", f)
    check_policy("ptq", policy)
    check_algorithm("ptq", algorithm, of_functions=True)
    check_effort("ptq", effort, algorithm)
    check_hoist(hoist)
    check_weight("ptq", weight)
    ignores = check_mode("ptq", on_nonfinite)
    check_own_text(own_text)
    places, meant = as_params("ptq", params), target_of("ptq", target)

    @called("ptq(f, policy)", "pass the parameters, and a list of batches, such as [x].")
    def quantize(params: Any, batches: Iterable[Any] | None = None) -> Quantized:
        given, text = Own(f, params, places, names), None
        if batches is None:
            if own_text is False:
                raise fail(
                    "ptq",
                    "there are no batches, and own_text=False.",
                    given="batches == None",
                    expected="batches, or text that the function writes itself",
                    fix="pass a list of batches, such as [x], or leave own_text out.",
                )
            check_arguments("ptq", places, params)
            batches = text = OwnRows(given, progress)
            first, every = text.first, batches
        else:
            check_batches("ptq", batches)
            first, every = first_of(batches)
        check_concrete("ptq", params, first)
        inputs = inputs_of(first)
        check_arguments("ptq", places, params)
        own = split_off(given, hoist, inputs)
        arguments = placed(own.places, own.params, inputs)
        planned = make_plan(own.f, policy, params=own.places, names=own.names)
        plan = planned(*arguments)
        choice = Choice(algorithm)
        if algorithm is None:
            choice = default_of(plan, effort or "seconds", is_lazy=has_lazy(own.params))
        is_chosen = algorithm is None and choice.reads_batches
        if is_chosen:
            every = list(every)
        padding, notes = None, []
        if choice.reads_batches or plan.static_specs():
            if weight is None and not has_weight(choice.algorithm):
                is_list = isinstance(every, (list, tuple))
                padding = padding_of(given, every if is_list else [first])
            if text is None and (algorithm is None if own_text is None else own_text):
                required: Any = {"required": own_text is True, "progress": progress}
                every, notes = with_other_rows(given, plan, inputs, every, padding, **required)
        elif own_text and text is None:
            notes = ["without text of its own: nothing is calibrated"]
        if is_chosen:
            other = lambda x: planned(*placed(own.places, own.params, x))  # noqa: E731
            alike = partial(plans, every, (first, plan), other)
            choice = fitted(choice, own.f, plan, arguments, alike)
        choice, counting = weighted(choice, plan, weight or padding)
        how = Observing(counting, ignores, progress)
        mapped = Mapped(own.f, plan, basis=Basis())
        done = _carried_out(choice, mapped, own.params, every, how)
        found = shared_diagnostics.report_of(plan, done.values, lambda: done.codes)
        if text is not None:
            notes = [text.written or "without data"]
        choice.notes.extend(([str(padding)] if padding else []) + notes)
        found = dataclasses.replace(found, codes=str(choice))
        given = done.mapped, done.scales, done.codes, found, abstract(inputs), meant
        reports = [x for x in done.reports if x is not None]
        details = reports[0] if len(reports) == 1 else tuple(reports)
        return dataclasses.replace(quantized_of(*given), details=details or None)

    return quantize


@dataclasses.dataclass(frozen=True)
class _Done:
    """The results of algorithms: float weights, their codes, scales of activations, maps at sites,
    and reports.
    """

    values: Any
    codes: Any
    scales: Mapping[str, Affine]
    mapped: "Mapped"
    reports: Sequence[Any]


def _carried_out(
    choice: Choice, mapped: "Mapped", values: Any, batches: Iterable[Any], how: Observing
) -> _Done:
    """Runs the algorithms: first those that rewrite weights, then rounding, then corrections."""
    if mapped.plan.splits and choice.reads_batches:
        own = Unstacked(mapped.plan, values, TracedOnce(mapped.f))
        parts = dataclasses.replace(mapped, f=own.function, plan=own.plan)
        done = _carried_out(choice, parts, own.params, batches, how)
        values, codes = own.together(done.values), own.together(done.codes)
        whole = done.mapped.of_whole(mapped)
        return dataclasses.replace(done, values=values, codes=codes, mapped=whole)
    rewrites, rounding, corrections = parts_of(choice.algorithm)
    plan, run = mapped.plan, has(rounding, "run")
    observers = None if run else observers_of(rounding)
    stats, scales, reports = None, {}, []
    few: dict[str, str] = {}
    given_values, is_plain = values, not (rewrites or corrections or rounding is not None)
    floats = values = values if is_plain else dequantize_params(values)
    if run or rewrites or corrections:
        batches = list(batches)
    named = named_leaves("ptq", rooted(plan.params, values), plan)
    check_no_learned_scales("ptq", named, plan)
    reads_leaves = rounding is None or (getattr(rounding, "lazy", False) and not observers)
    if rewrites or corrections or not reads_leaves:
        check_read("ptq", named)
    check_finite_weights("ptq", plan, values)

    def rewrite(each: Any, *arguments: Any) -> Chosen:
        found = as_chosen(each.rewrite(*arguments, **how.of(each.rewrite)))
        _with_given(given_values, floats, found.params)
        return found

    for each in rewrites:
        given = mapped.function, plan, values, batches
        chosen = choice.attempt(each, rewrite, each, *given)
        if chosen is not None:
            values, mapped = chosen.params, mapped.then(chosen, rewrites=True)
            reports.append(chosen.report)
            few |= chosen.few
    if plan.static_specs() or observers:
        given = mapped.function, plan, values, batches
        calibrated = shared_algorithms.calibrate_stages if has_lazy(values) else calibrate_batches
        stats = calibrated(*given, observers=observers, **how.options)
        scales = affines(plan, stats)
    chosen = None
    if rounding is not None and run:
        given = mapped.function, plan, values, batches
        chosen = choice.choose(rounding, *given, **how.of(rounding.run))
    elif rounding is not None:
        chosen = choice.attempt(rounding, rounding, plan, values, stats)
    if is_plain:
        return _Done(values, quantize_params(values, plan), scales, mapped, reports)
    chosen = Chosen(values, None) if chosen is None else chosen
    codes, mapped = _checked(plan, chosen.params), mapped.then(chosen)
    reports.append(chosen.report)
    few |= chosen.few
    real = values if chosen.basis is None or not corrections else chosen.basis(values)
    for each in corrections:
        given = mapped.function, plan, real, codes, scales, batches
        chosen = choice.attempt(each, each.correct, *given, **how.of(each.correct))
        if chosen is not None:
            real = real if chosen.basis is None else chosen.basis(real)
            codes, mapped = _checked(plan, chosen.params), mapped.then(chosen)
            reports.append(chosen.report)
            few |= chosen.few
    note_inputs(choice, reports, few)
    codes = _with_given(given_values, floats, codes)
    codes = jax.tree.map(partial(kept, "ptq"), given_values, codes, is_leaf=is_quantized)
    return _Done(values, codes, scales, mapped, reports)


def _with_given(given: Any, floats: Any, codes: Any) -> Any:
    """Puts the given QTensors, which algorithms saw as floats, back into the parameters.

    Raises:
      NotImplementedError: an algorithm has changed one of them.
    """

    def pick(path: Any, own: Any, real: Any, chosen: Any) -> Any:
        if not is_quantized(abstract_leaf(own)):
            return chosen
        same = is_array(chosen) and np.array_equal(chosen, real, equal_nan=True)
        if chosen is not real and not same:
            raise fail(
                "ptq",
                "the algorithm changes a weight that is quantized already.",
                given=f"{keystr(path, simple=True, separator='/')!r}: {own!r}",
                expected="an algorithm that does not change it, such as jqx.algorithms.nearest() "
                "or "
                "gptq()",
                fix="pass another algorithm, or the weight in float: "
                "jqx.dequantize_params(params).",
                error=NotImplementedError,
            )
        return own

    return jax.tree_util.tree_map_with_path(pick, given, floats, codes, is_leaf=is_quantized)


def _checked(plan: Plan, chosen: Any) -> Any:
    """Returns parameters with every planned weight as a QTensor of the plan; rounds floats."""
    rounded = quantize_params(dequantize_params(chosen), plan)
    return picked("ptq", chosen, rounded)
