"""Evaluates a jaxpr with a rule for its sites; every other equation is evaluated unchanged.

Nothing is patched and no state is kept: the records of sites are returned as a dict next to the
results.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .. import compat
from ..caches.decode_attention import attention_named
from ..compat import Eqn
from ..statistics.calibrators import Affine
from ..tensor.qtensor import QTensor
from ..tensor.segments import without_stack
from .higher_order import FORMS, Records, Runner
from .plan import Plan, Site, check_sums
from .regions import Recorder
from .row_counts import (
    Counted,
    common,
    counted,
    counted_like,
    is_counted,
    opened,
    tainted_results,
    tainted_rows,
    value_of,
)
from .rules import CONTRACTIONS, VIEWS, tracked
from .views import (
    UPDATES,
    Address,
    Origin,
    Trainable,
    as_like,
    codes_of,
    is_coded,
    real_of,
    with_codes,
)
from .walk import NOWHERE, addressed, evaluate

# `jqx.decode_attention` in a traced function, where its name is kept.


_RANKS = [3, 4, 4, 1]


def attention_over(eqn: Eqn, operands: Sequence[Any]) -> Callable[..., Any] | None:
    """Returns `decode_attention` if this equation calls it and its keys or values are quantized. If
    `vmap` or a derivative has changed the call, it is evaluated as any other equation.
    """
    attend = attention_named(compat.name_of_jit(eqn))
    if attend is None or [x.aval.ndim for x in eqn.invars] != _RANKS or len(eqn.outvars) != 1:
        return None
    q, _, values = (x.aval for x in eqn.invars[:3])
    same = eqn.outvars[0].aval.shape == (*q.shape[:2], values.shape[3])
    plain = same and not any(map(is_counted, operands))
    return attend if plain and any(isinstance(x, QTensor) for x in operands[1:3]) else None


_TAKE_STACKS = {*CONTRACTIONS, *FORMS, "transpose"}
"""Primitives that receive a weight together with the stack that it is part of."""

SiteInputs = tuple[dict[str, Affine], jax.Array | None]
"""What sites read in addition to their operands: scales by key, and a random key."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a transform does at the sites of a plan, and where a weight reaches other operations.

    Attributes:
      plan: the plan with the sites.
      affines: scales, by key.
      key: for gradient estimators that draw random numbers.
      is_counting: whether the counts of the rows of a batch are tracked.
      leaves_out: whether elements that are not finite lose their count.
      cleans: whether contractions see zeros in place of rows that are not finite.
    """

    plan: Plan
    affines: Mapping[str, Affine] = dataclasses.field(default_factory=dict)
    key: jax.Array | None = None
    is_counting: bool = dataclasses.field(default=False, kw_only=True)
    leaves_out: bool = dataclasses.field(default=False, kw_only=True)
    cleans: bool = dataclasses.field(default=False, kw_only=True)

    function: ClassVar[str | None] = None
    """The function named in errors about scales from the user; `None` if there are none."""

    differentiable: ClassVar[bool] = True
    """Whether custom derivative rules of the user are kept."""

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        """Evaluates a planned contraction; by default in float."""
        return compat.bind(eqn, [real_of(value_of(x)) for x in operands])[0], {}

    def in_each_step(self, affine: Any, length: int, /) -> Any:
        """Returns what sites read by a key, once for each step of a scan that does not step over
        their weights; `None` if all steps read the same.
        """

    def scope(self, address: Address, /) -> AbstractContextManager[Any]:
        """Returns the name scope in which the contraction at an address is evaluated."""
        return contextlib.nullcontext()

    def recorder(self) -> Recorder | None:
        """Returns what records the equations that a kernel computes together, if anything does."""

    def recorded(
        self, recorder: Recorder, eqn: Eqn, operands: Sequence[Any], address: Address | None, /
    ) -> list[Any] | None:
        """Records an equation, with its address if there is a contraction in it; `None` if it is to
        be evaluated, as are all that hold a site of the plan.
        """
        return None if self.holds_plan(eqn, address) else recorder.equation(eqn, operands)

    def holds_plan(self, eqn: Eqn, address: Address | None) -> bool:
        """Whether an equation is a site of the plan, or a function in it has one."""
        if address is None:
            return False
        if eqn.primitive.name in CONTRACTIONS:
            return self.plan.site_at(address) is not None
        return self.plan.has_sites_in(address)

    def contract(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Evaluates a contraction of quantized arrays that is not a site of the plan."""
        return self.unsupported(eqn, operands)

    def in_float(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Evaluates an equation of arrays that is not a site of the plan."""
        return compat.bind(eqn, operands)

    def unsupported(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Evaluates an equation that has no quantized form for its quantized operands."""
        return compat.bind(eqn, [self.dense(eqn, x) for x in operands])

    def view(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
        """Evaluates a view of quantized operands; `None` if it is not one."""
        return view(eqn, operands)

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        """Dequantizes a value where an equation, or a result, supports only arrays."""
        return real_of(x)

    def empty_records(self, address: Address, /) -> Records:
        """Returns the records of nothing, from which a loop or branch starts, for the sites inside
        an equation, except those whose weight it steps over.
        """
        return {}

    def merge(self, address: Address, /, a: Records, b: Records) -> Records:
        """Returns the merged records of two evaluations of the inside of an equation."""
        return {}


def interpret(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rules: Rules, address: Address = ()
) -> tuple[list[Any], Records]:
    """Evaluates a jaxpr and returns its results and the records of its sites."""
    records: Records = {}
    places = list(addressed(jaxpr, address))
    evaluated = evaluate_counted if rules.is_counting else _evaluate

    def results_now(index: int, eqn: Eqn, operands: list[Any]) -> list[Any]:
        eqn_address, _, holds_site = places[index]
        with rules.scope(eqn_address) if holds_site else contextlib.nullcontext():
            results, recorded = evaluated(eqn, operands, rules, eqn_address, holds_site)
        records.update(recorded)
        return results

    recorder = rules.recorder()
    if recorder is None:
        return list(map(without_stack, evaluate(jaxpr, consts, args, results_now))), records

    def in_context(index: int, eqn: Eqn, operands: list[Any]) -> list[Any]:
        with compat.equation_context(eqn):
            return results_now(index, eqn, operands)

    def results_of(index: int, eqn: Eqn, operands: list[Any]) -> list[Any]:
        eqn_address, _, holds_site = places[index]
        results = rules.recorded(recorder, eqn, operands, eqn_address if holds_site else None)
        if results is None and not holds_site:
            results = recorder.wait(eqn, operands, functools.partial(in_context, index, eqn))
        return results_now(index, eqn, recorder.settled(operands)) if results is None else results

    results = recorder.settled(evaluate(jaxpr, consts, args, results_of))
    return list(map(without_stack, results)), records


def _evaluate(
    eqn: Eqn, operands: list[Any], rules: Rules, address: Address, holds_site: bool
) -> tuple[list[Any], Records]:
    name = eqn.primitive.name
    quantized = [i for i, operand in enumerate(operands) if is_coded(operand)]
    if quantized and name not in _TAKE_STACKS:
        operands = list(map(without_stack, operands))
    if name in CONTRACTIONS:
        site = rules.plan.site_at(address) if holds_site else None
        if site is not None:
            if rules.function is not None and rules.affines:
                kept_axes, shapes = CONTRACTIONS[name].kept(eqn), [x.aval.shape for x in eqn.invars]
                check_sums(rules.function, site, kept_axes, shapes, rules.affines)
            with _noted(f"{site.op} at path {site.path!r}, rule {site.rule}"):
                result, records = rules.at_site(site, eqn, operands)
            return [result], compat.vary(records, compat.manual_axes())
        if quantized and CONTRACTIONS[name].why_unsupported(eqn) is None:
            with _noted(f"{name} of a quantized array, scope {compat.scope_of(eqn) or '(none)'}"):
                return rules.contract(eqn, operands), {}
    has_sites = name in FORMS and holds_site and rules.plan.has_sites_in(address)
    attend = attention_over(eqn, operands) if quantized and not has_sites else None
    if attend is not None:
        return [attend(*operands)], {}
    if name in FORMS and (quantized or has_sites or any(map(is_counted, operands))):
        inside = address if holds_site else (*address, *NOWHERE)
        return FORMS[name](eqn, operands, _Runner(eqn, rules, inside))
    if not quantized:
        return rules.in_float(eqn, operands), {}
    with _noted(f"{name} of a quantized array, scope {compat.scope_of(eqn) or '(none)'}"):
        viewed = rules.view(eqn, operands)
        if viewed is None and name in UPDATES:
            # Written to the codes, and to the float values that go with them, if any.
            codes = UPDATES[name](eqn, [codes_of(x) for x in operands])

            def real() -> jax.Array:
                return compat.bind(eqn, [real_of(x) for x in operands])[0]

            viewed = None if codes is None else [with_codes(codes, real, operands)]
    if viewed is not None:
        return viewed, {}
    return rules.unsupported(eqn, operands), {}


def evaluate_counted(
    eqn: Eqn,
    operands: list[Any],
    rules: Rules,
    address: Address = NOWHERE,
    holds_site: bool = False,
) -> tuple[list[Any], Records]:
    """Evaluates an equation and tracks how much its results count. Sites and forms track it inside.
    Without an address none of its contractions is a site.
    """
    name = eqn.primitive.name
    is_site = holds_site and name in CONTRACTIONS and rules.plan.site_at(address) is not None
    if name in FORMS or is_site:
        return _evaluate(eqn, operands, rules, address, holds_site)
    if rules.leaves_out and name in CONTRACTIONS:
        operands = tainted_rows(eqn, operands, rules.cleans)
    values = list(map(value_of, operands))
    results, records = _evaluate(eqn, values, rules, address, holds_site)
    results = counted(eqn, operands, results)
    if rules.leaves_out:
        results = tainted_results(eqn, operands, results)
    return results, records


@contextlib.contextmanager
def _noted(where: str) -> Iterator[None]:
    """Adds to an error where in the function it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"  at:       {where}")
        raise


@dataclasses.dataclass(frozen=True)
class _Runner(Runner):
    """Runs the functions inside an equation with the rules of the transform."""

    eqn: Eqn
    rules: Rules
    address: Address

    @property
    def differentiable(self) -> bool:
        return self.rules.differentiable and not self.is_counting

    @property
    def is_counting(self) -> bool:
        return self.rules.is_counting

    @property
    def site_inputs(self) -> SiteInputs:
        inside = self.rules.plan.keys_in(self.address)
        affines = self.rules.affines
        return {name: affines[name] for name in inside if name in affines}, self.rules.key

    def run(
        self,
        jaxpr: Any,
        args: Sequence[Any],
        part: Address = (),
        site_inputs: SiteInputs | None = None,
    ) -> tuple[list[Any], Records]:
        body, consts = compat.open_jaxpr(jaxpr)
        rules = self.rules
        if site_inputs is not None:
            rules = dataclasses.replace(rules, affines=site_inputs[0], key=site_inputs[1])
        return interpret(body, consts, args, rules, (*self.address, *part))

    def split(self, length: int) -> tuple[SiteInputs, SiteInputs]:
        affines, key = self.site_inputs
        steps, shared = {}, {}
        for name, affine in affines.items():
            loops = self.rules.plan.site_of_key(name).loops
            is_stepped = any(loop.address == self.address for loop in loops)
            each = affine if is_stepped else self.rules.in_each_step(affine, length)
            (shared if each is None else steps)[name] = affine if each is None else each
        keys = None if key is None else jax.random.split(key, length)
        return (steps, keys), (shared, None)

    def join(self, step: SiteInputs, shared: SiteInputs) -> SiteInputs:
        return step[0] | shared[0], step[1]

    def numbered(self, site_inputs: SiteInputs, step: jax.Array) -> SiteInputs:
        affines, key = site_inputs
        return affines, None if key is None else jax.random.fold_in(key, step)

    def empty_records(self) -> Records:
        return compat.vary(self.rules.empty_records(self.address), compat.manual_axes())

    def merge(self, a: Records, b: Records) -> Records:
        return self.rules.merge(self.address, a, b)

    def dense(self, x: Any) -> Any:
        return self.rules.dense(self.eqn, x) if is_coded(x) else value_of(x)

    def carried(self, x: Any) -> Any:
        return opened(x) if self.is_counting else x

    def common(self, forms: Sequence[Any]) -> Any:
        return next(filter(is_coded, forms), None) or common(forms)

    def like(self, x: Any, example: Any) -> Any:
        if isinstance(example, Counted):
            return counted_like(x, example)
        return as_like(value_of(x), example, self.dense)


def view(eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
    """Evaluates a view of quantized arrays, and of the float values that go with their codes, if
    any. Returns `None` if the equation is not a view of its quantized operands, or joins formats.

    If a layout cannot follow the view, the codes are moved to the default layout first.
    """
    quantized = [i for i, operand in enumerate(operands) if is_coded(operand)]
    origins = tracked(
        eqn,
        [
            Origin.of_leaf(str(i), atom.aval.ndim) if i in quantized else None
            for i, atom in enumerate(eqn.invars)
        ],
    )
    if origins is None or not any(origin and origin.is_view for origin in origins):
        return None
    codes = [codes_of(x) for x in operands]
    qtensors = [codes[i] for i in quantized]
    if len(eqn.outvars) == 1 and len({(q.qtype, jnp.dtype(q.dtype)) for q in qtensors}) > 1:
        return None  # no single tensor can hold them
    parts = [part for origin in origins if origin for part in origin.parts]
    alike = len(eqn.outvars) > 1 or len({q.layout for q in qtensors}) == 1
    if not (alike and all(_follows(codes[int(part.path)], part) for part in parts)):
        codes = [x.unpack() if i in quantized else x for i, x in enumerate(codes)]
    views = VIEWS[eqn.primitive.name].apply(eqn, codes)
    if not any(isinstance(x, Trainable) for x in operands):
        return views
    real = compat.bind(eqn, [real_of(x) for x in operands])
    is_state = any(isinstance(x, Trainable) and x.is_state for x in operands)
    pairs = zip(views, real, strict=True)
    return [Trainable(q, x, is_state) if is_coded(q) else q for q, x in pairs]


def _follows(q: QTensor, origin: Origin) -> bool:
    """Whether the layout of a QTensor can follow a view."""
    moved, cut = ({axis - q.ndim for axis, _ in marks} for marks in (origin.moved, origin.cut))
    return q.layout is None or q.layout.follows(moved, cut)


def followed(plan: Plan, eqn: Any, operands: list[Any], leaves_out: bool = False) -> list[Any]:
    """Evaluates an equation in float and returns results with counts, if those of operands are
    known. With `leaves_out` elements that are not finite do not count.
    """
    rules = Rules(plan, is_counting=True, leaves_out=leaves_out, cleans=leaves_out)
    return evaluate_counted(eqn, operands, rules)[0]
