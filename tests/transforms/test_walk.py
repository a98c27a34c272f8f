"""The walk over equations beside what JAX itself finds out about them, in every form."""

import functools
import operator

import jax
import numpy as np
import pytest
from jax import lax

from jqx._src import compat
from jqx._src.transforms.walk import Domain, bodies, walk

from ..models.forms import FORMS, function, rows, weights
from .test_shard_map import FORMS as ON_DEVICES
from .test_shard_map import function as on_devices


class Dependence(Domain[frozenset]):
    """Which operands of a function a value depends on."""

    nothing = frozenset()

    def evaluate(self, eqn, values, where):
        return [functools.reduce(operator.or_, values, self.nothing)] * len(eqn.outvars)

    def start(self, eqn, values, where):
        return values

    def carry(self, eqn, values, results, where):
        return [a | b for a, b in zip(values, results, strict=True)]

    def returned(self, eqn, values, results, where):
        if eqn.primitive.name != "cond":
            return results[-1]
        return [functools.reduce(operator.or_, x, values[0]) for x in zip(*results, strict=True)]


def traced(f, *args):
    return compat.open_jaxpr(jax.make_jaxpr(f)(*args))[0]


def together(f):
    """A function with one result that depends on all operands, and one that depends on each."""
    return lambda w, x, y: (f(w, x), w.sum(), (y @ w[0])[0])


CASES = {name: function(name) for name in FORMS} | {
    f"{name} on devices": on_devices(name) for name in ON_DEVICES
}


@pytest.mark.parametrize("name", CASES)
def test_what_results_depend_on_is_what_jax_needs_for_them(name):
    w, x = weights(), rows()
    jaxpr = traced(together(CASES[name]), w, x, x)
    found = walk(Dependence(), jaxpr, [frozenset({i}) for i in range(3)])
    for i, operands in enumerate(found):
        used = [i == j for j in range(len(found))]
        needed = {k for k, is_needed in enumerate(compat.needed(jaxpr, used)) if is_needed}
        assert operands == needed


def test_a_value_that_later_steps_mix_into_another_is_found():
    def f(a, b, c):
        def step(carry, _):
            a, b, c = carry
            return (a, a + b, b + c), c

        return lax.scan(step, (a, b, c), None, length=3)

    found = walk(Dependence(), traced(f, 1.0, 2.0, 3.0), [frozenset(i) for i in "abc"])
    assert [*map("".join, map(sorted, found))] == ["a", "ab", "abc", "abc"]


class Trace(Domain[str]):
    """What is computed from what, as text, step by step."""

    unrolls = True

    def literal(self, atom):
        return str(atom.val)

    def evaluate(self, eqn, values, where):
        return [f"{eqn.primitive.name}{list(where.steps)}({', '.join(values)})"]

    def part(self, value, step):
        return f"{value}[{step}]"

    def stack(self, values, aval):
        return f"{list(aval.shape)}: {' '.join(values)}"


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_of_scans_are_walked_in_their_order_if_the_domain_unrolls_them(reverse):
    def f(x):
        return lax.scan(lambda c, x: (lax.add(c, x), lax.neg(c)), np.float32(0), x, reverse=reverse)

    order = (1, 0) if reverse else (0, 1)
    last, stack = walk(Trace(), traced(f, np.ones(2, np.float32)), ["x"])
    first, second = order
    inner = f"add[{first}](0.0, x[{first}])"
    assert last == f"add[{second}]({inner}, x[{second}])"
    negated = {first: f"neg[{first}](0.0)", second: f"neg[{second}]({inner})"}
    assert stack == f"[2]: {negated[0]} {negated[1]}"


def test_the_functions_of_an_equation_have_its_operands():
    def f(n, x):
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * x), (0, x))

    (eqn,) = (eqn for eqn in traced(f, 3, 2.0).eqns if eqn.primitive.name == "while")
    condition, step = bodies(eqn)
    assert [len(compat.open_jaxpr(x.jaxpr)[0].invars) for x in (condition, step)] == [3, 3]
    assert (condition.part, step.part) == ((-1,), ())
    assert condition.operands[-2:] == step.operands[-2:] and condition.operands != step.operands
