"""The default algorithm of `ptq`: what measured best for plans of the given formats."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from ..checks import shown
from ..errors import fail, message, warn
from ..numerics.blocks import Block
from ..numerics.lookup import E8M0, format_of
from ..numerics.qtype import Integer
from ..statistics.granularity import PerGroup, PerRun
from ..tensor.spec import QSpec
from ..transforms.algorithm import Inapplicable, as_chosen, chained
from ..transforms.plan import Plan, Site
from ..transforms.trace import is_array, trace_call
from .quantized import algorithms, grids

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
        """Runs a part of the algorithm and returns its result as `Chosen`.

        If the user did not name the algorithm, and the part does not apply to the function or does
        not support it, adds a note and returns `None`. Warns unless it has nothing to do.
        """
        try:
            return as_chosen(run(*args, **kwargs))
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
