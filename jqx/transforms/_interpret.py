"""Evaluates a jaxpr with a rule for its sites; every other equation is evaluated unchanged.

Nothing is patched and no state is kept: the records of sites are returned as a dict next to the
results.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .. import _compat
from .._compat import Eqn
from ..calibrators import Affine
from ..tensor import QTensor
from ..tensor._shared import alone
from ._affine_checks import check_sums
from ._attention import attention_over
from ._counted import (
    Counted,
    common,
    counted_like,
    is_counted,
    opened,
    value_of,
)
from ._find import addressed
from ._origin import Address, Origin
from ._plan import Plan
from ._site import Site
from ._tainted import tainted_results, tainted_rows
from ._weight import Trainable, as_like, codes_of, is_coded, real_of, with_codes
from .primitives import CONTRACTIONS, FORMS, UPDATES, VIEWS, Records, counted, tracked

_NOWHERE = -1
"""Part of an address that no site has, because an equation without contractions has the address of
the next one.
"""

_TAKE_STACKS = {*CONTRACTIONS, *FORMS, "transpose"}
"""Primitives that receive a weight together with the stack that it is part of."""

Given = tuple[dict[str, Affine], jax.Array | None]
"""What sites read in addition to their operands: scales by key, and a random key."""


@dataclasses.dataclass(frozen=True)
class Rules(abc.ABC):
    """What a transform does at the sites of a plan, and where a weight reaches other operations.

    Attributes:
      plan: the plan with the sites.
      affines: scales, by key.
      key: for gradient estimators that draw random numbers.
    """

    plan: Plan
    affines: Mapping[str, Affine] = dataclasses.field(default_factory=dict)
    key: jax.Array | None = None

    function: ClassVar[str | None] = None
    """The function named in errors about scales from the user; `None` if there are none."""

    differentiable: ClassVar[bool] = True
    """Whether custom derivative rules of the user are kept."""

    @property
    def is_counting(self) -> bool:
        """Whether the counts of the rows of a batch are tracked."""
        return False

    @property
    def leaves_out(self) -> bool:
        """Whether elements that are not finite lose their count."""
        return False

    @property
    def cleans(self) -> bool:
        """Whether contractions see zeros in place of rows that are not finite."""
        return False

    @abc.abstractmethod
    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        """Evaluates a planned contraction."""

    def scope(self, here: Address) -> AbstractContextManager[Any]:
        """Returns the name scope in which the contraction at an address is evaluated."""
        return contextlib.nullcontext()

    def contract(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Evaluates a contraction of quantized arrays that is not a site of the plan."""
        return self.unsupported(eqn, operands)

    def unsupported(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Evaluates an equation that has no quantized form for its quantized operands."""
        return _compat.bind(eqn, [self.dense(eqn, x) for x in operands])

    def view(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
        """Evaluates a view of quantized operands; `None` if it is not one."""
        return view(eqn, operands)

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        """Dequantizes a value where an equation, or a result, supports only arrays."""
        return real_of(x)

    def unseen(self, here: Address) -> Records:
        """Returns the empty records of the sites inside an equation, except those whose weight it
        steps over.
        """
        return {}

    def merge(self, here: Address, a: Records, b: Records) -> Records:
        """Returns the merged records of two evaluations of the inside of an equation."""
        return {}


def interpret(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rules: Rules, address: Address = ()
) -> tuple[list[Any], Records]:
    """Evaluates a jaxpr and returns its results and the records of its sites."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    last_use = {
        atom: i
        for i, eqn in enumerate(jaxpr.eqns)
        for atom in eqn.invars
        if not _compat.is_literal(atom)
    }
    kept = {atom for atom in jaxpr.outvars if not _compat.is_literal(atom)}

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    records: Records = {}
    for i, (here, eqn, holds_site) in enumerate(addressed(jaxpr, address)):
        operands = [read(atom) for atom in eqn.invars]
        scope = rules.scope(here) if holds_site else contextlib.nullcontext()
        with _compat.equation_context(eqn), scope:
            evaluate = evaluate_counted if rules.is_counting else _evaluate
            results, recorded = evaluate(eqn, operands, rules, here, holds_site)
        records.update(recorded)
        env.update(zip(eqn.outvars, results, strict=True))
        for atom in eqn.invars:
            if not _compat.is_literal(atom) and last_use[atom] == i and atom not in kept:
                env.pop(atom, None)
    return [alone(read(atom)) for atom in jaxpr.outvars], records


def _evaluate(
    eqn: Eqn, operands: list[Any], rules: Rules, here: Address, holds_site: bool
) -> tuple[list[Any], Records]:
    name = eqn.primitive.name
    quantized = [i for i, operand in enumerate(operands) if is_coded(operand)]
    if quantized and name not in _TAKE_STACKS:
        operands = list(map(alone, operands))
    if name in CONTRACTIONS:
        site = rules.plan.site_at(here) if holds_site else None
        if site is not None:
            if rules.function is not None and rules.affines:
                kept, shapes = CONTRACTIONS[name].kept(eqn), [x.aval.shape for x in eqn.invars]
                check_sums(rules.function, site, kept, shapes, rules.affines)
            with _noted(f"{site.op} at path {site.path!r}, rule {site.rule}"):
                result, records = rules.at_site(site, eqn, operands)
            return [result], _compat.vary(records, _compat.manual_axes())
        if quantized and CONTRACTIONS[name].excuse(eqn) is None:
            with _noted(f"{name} of a quantized array, scope {_compat.scope_of(eqn) or '(none)'}"):
                return rules.contract(eqn, operands), {}
    has_sites = name in FORMS and holds_site and rules.plan.has_sites_in(here)
    attend = attention_over(eqn, operands) if quantized and not has_sites else None
    if attend is not None:
        return [attend(*operands)], {}
    if name in FORMS and (quantized or has_sites or any(map(is_counted, operands))):
        inside = here if holds_site else (*here, _NOWHERE)
        return FORMS[name].apply(eqn, operands, _Runner(eqn, rules, inside))
    if not quantized:
        return _compat.bind(eqn, operands), {}
    with _noted(f"{name} of a quantized array, scope {_compat.scope_of(eqn) or '(none)'}"):
        seen = rules.view(eqn, operands)
        if seen is None and name in UPDATES:
            seen = _updated(eqn, operands)
    if seen is not None:
        return seen, {}
    return rules.unsupported(eqn, operands), {}


def evaluate_counted(
    eqn: Eqn,
    operands: list[Any],
    rules: Rules,
    here: Address = (_NOWHERE,),
    holds_site: bool = False,
) -> tuple[list[Any], Records]:
    """Evaluates an equation and tracks how much its results count. Sites and forms track it inside.
    Without an address none of its contractions is a site.
    """
    name = eqn.primitive.name
    is_site = holds_site and name in CONTRACTIONS and rules.plan.site_at(here) is not None
    if name in FORMS or is_site:
        return _evaluate(eqn, operands, rules, here, holds_site)
    if rules.leaves_out and name in CONTRACTIONS:
        operands = tainted_rows(eqn, operands, rules.cleans)
    values = list(map(value_of, operands))
    results, records = _evaluate(eqn, values, rules, here, holds_site)
    found = counted(eqn, operands, results)
    return tainted_results(eqn, operands, found) if rules.leaves_out else found, records


def _updated(eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
    """Writes to a quantized array, and to the float values that go with its codes, if any."""
    codes = UPDATES[eqn.primitive.name](eqn, [codes_of(x) for x in operands])
    real = lambda: _compat.bind(eqn, [real_of(x) for x in operands])[0]  # noqa: E731
    return None if codes is None else [with_codes(codes, real, operands)]


@contextlib.contextmanager
def _noted(where: str) -> Iterator[None]:
    """Adds to an error where in the function it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"  at:       {where}")
        raise


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Runs the functions inside an equation with the rules of the transform."""

    eqn: Eqn
    rules: Rules
    here: Address

    @property
    def differentiable(self) -> bool:
        return self.rules.differentiable and not self.is_counting

    @property
    def is_counting(self) -> bool:
        return self.rules.is_counting

    @property
    def given(self) -> Given:
        inside = self.rules.plan.keys_in(self.here)
        affines = self.rules.affines
        return {name: affines[name] for name in inside if name in affines}, self.rules.key

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Address = (), given: Given | None = None
    ) -> tuple[list[Any], Records]:
        body, consts = _compat.open_jaxpr(jaxpr)
        rules = self.rules
        if given is not None:
            rules = dataclasses.replace(rules, affines=given[0], key=given[1])
        return interpret(body, consts, args, rules, (*self.here, *part))

    def split(self, length: int) -> tuple[Given, Given]:
        affines, key = self.given
        steps, shared = {}, {}
        for name, affine in affines.items():
            loops = self.rules.plan.site_of_key(name).loops
            own = any(loop.address == self.here for loop in loops)
            (steps if own else shared)[name] = affine
        keys = None if key is None else jax.random.split(key, length)
        return (steps, keys), (shared, None)

    def join(self, step: Given, shared: Given) -> Given:
        return step[0] | shared[0], step[1]

    def numbered(self, given: Given, step: jax.Array) -> Given:
        affines, key = given
        return affines, None if key is None else jax.random.fold_in(key, step)

    def unseen(self) -> Records:
        return _compat.vary(self.rules.unseen(self.here), _compat.manual_axes())

    def merge(self, a: Records, b: Records) -> Records:
        return self.rules.merge(self.here, a, b)

    def dense(self, x: Any) -> Any:
        return self.rules.dense(self.eqn, x) if is_coded(x) else value_of(x)

    def carried(self, x: Any) -> Any:
        return opened(x) if self.is_counting else x

    def common(self, forms: Sequence[Any]) -> Any:
        return next(filter(is_coded, forms), None) or common(forms)

    def like(self, x: Any, other: Any) -> Any:
        if isinstance(other, Counted):
            return counted_like(x, other)
        return as_like(value_of(x), other, self.dense)


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
    own = [codes[i] for i in quantized]
    if len(eqn.outvars) == 1 and len({_format(q) for q in own}) > 1:
        return None  # no single tensor can hold them
    parts = [part for origin in origins if origin for part in origin.parts]
    alike = len(eqn.outvars) > 1 or len({q.layout for q in own}) == 1
    if not (alike and all(_follows(codes[int(part.path)], part) for part in parts)):
        codes = [x.unpack() if i in quantized else x for i, x in enumerate(codes)]
    seen = VIEWS[eqn.primitive.name].apply(eqn, codes)
    if not any(isinstance(x, Trainable) for x in operands):
        return seen
    real = _compat.bind(eqn, [real_of(x) for x in operands])
    is_state = any(isinstance(x, Trainable) and x.is_state for x in operands)
    both = zip(seen, real, strict=True)
    return [Trainable(q, x, is_state) if is_coded(q) else q for q, x in both]


def _format(q: QTensor) -> Any:
    return q.qtype, jnp.dtype(q.dtype)


def _follows(q: QTensor, seen: Origin) -> bool:
    """Whether the layout of a QTensor can follow a view."""
    moved, cut = ({axis - q.ndim for axis, _ in marks} for marks in (seen.moved, seen.cut))
    return q.layout is None or q.layout.follows(moved, cut)
