"""Rules of primitives by name: those of jqx, and those that the user has added."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import jax

from ..._checks import check_instance
from ..._compat import Eqn
from ..._errors import fail
from .._origin import Origin
from ._contractions import CONTRACTIONS as OF_CONTRACTIONS
from ._contractions import Contraction
from ._view import View, marked
from ._views import VIEWS as OF_VIEWS

Rule = TypeVar("Rule")

_ADDED = jax.make_user_context(())
"""Rules of users, as pairs of a name and a rule; part of the key of traces in `jax.jit`."""


class Known(Mapping[str, Rule], Generic[Rule]):
    """Rules of one kind, by the name of the primitive."""

    def __init__(self, kind: type[Rule], own: Mapping[str, Rule]):
        self._kind, self._own = kind, own

    def __getitem__(self, name: str) -> Rule:
        for added, rule in _ADDED.value:
            if added == name and isinstance(rule, self._kind):
                return rule
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        added = (name for name, rule in _ADDED.value if isinstance(rule, self._kind))
        return iter(dict.fromkeys((*added, *self._own)))

    def __len__(self) -> int:
        return len(list(iter(self)))


CONTRACTIONS: Known[Contraction] = Known(Contraction, OF_CONTRACTIONS)
VIEWS: Known[View] = Known(View, OF_VIEWS)


def tracked(eqn: Eqn, known: Sequence[Origin | None]) -> Sequence[Origin | None] | None:
    """Returns the origins of the results of a view, with what it does to the axes of weights;
    `None` if the equation is not a view. A view of the user may do anything to all axes.
    """
    name = eqn.primitive.name
    view = VIEWS.get(name)
    if view is None:
        return None
    return marked(eqn, known, view.track(eqn, known), is_known=name in OF_VIEWS)


@contextlib.contextmanager
def primitive_rules(rules: Mapping[str, Contraction | View]) -> Iterator[None]:
    """Adds rules for primitives that jqx does not know, for planning, calibration, simulation and
    conversion inside the context.

    It affects only this thread, and only inside the context. A plan that was made inside fits its
    function only inside.

    Args:
      rules: by the name of the primitive, a `Contraction`, whose operands can be quantized, or a
        `View`, through which a weight passes. The primitive has no functions among its parameters.

    Raises:
      TypeError: if `rules` is not a mapping, or an entry is not a rule.
      ValueError: if jqx has a rule for a primitive of that name.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jqx.transforms import View, primitive_rules
      >>> def f(w, x):
      ...     return x @ jax.lax.reduce_precision(w, 8, 23)
      >>> same = View(track=lambda eqn, known: known, apply=lambda eqn, operands: list(operands))
      >>> args = jnp.ones((4, 4)), jnp.ones((1, 4))
      >>> with primitive_rules({"reduce_precision": same}):
      ...     plan = jqx.make_plan(f, jqx.presets.w8a16())(*args)
      >>> [site.op for site in plan.sites]
      ['dot_general']
    """
    name = "transforms.primitive_rules"
    fix = "pass for example {'my_primitive': jqx.transforms.View(track, apply)}."
    check_instance(name, "rules", rules, Mapping, fix=fix)
    for primitive, rule in rules.items():
        check_instance(name, f"rules[{primitive!r}]", rule, (Contraction, View), fix=fix)
        if primitive in {*OF_CONTRACTIONS, *OF_VIEWS}:
            raise fail(
                name,
                "jqx already has a rule for this primitive.",
                given=f"rules[{primitive!r}]",
                expected="the name of another primitive",
                fix="leave it out.",
            )
    with _ADDED((*rules.items(), *_ADDED.value)):
        yield
