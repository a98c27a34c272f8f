"""Runs an example, and prints and checks the accumulators of the first integer products it plans.

python tests/example_bounds.py examples/digits.py
"""

import pathlib
import runpy
import sys

import jax

from jqx._src.diagnostics.intervals import anything
from jqx._src.diagnostics.ranges import IntervalDomain, Notes, _parameter
from jqx._src.transforms import make_plan

plan_call = make_plan.plan_call


def planned(function, call, policy, weights, *rest):
    """What `plan_call` returns, once its sites have been looked at."""
    plan = plan_call(function, call, policy, weights, *rest)
    arrays = jax.tree.leaves(call.leaves)
    if not any(isinstance(x, jax.core.Tracer) for x in arrays) and look_at(call, plan):
        make_plan.plan_call = plan_call  # seen: the example goes on as ever
    return plan


def look_at(call, plan):
    """Prints the accumulator of each site; returns whether any sums integers."""
    leaves = [
        anything(x) if path is None else _parameter(x, path, plan, {})
        for x, path in zip(call.leaves, call.paths, strict=True)
    ]
    notes = Notes()
    IntervalDomain(plan, {}, notes).run(call.jaxpr, leaves, consts=call.consts)
    assert not notes.unknown, notes.unknown
    assert set(notes.sites) == {site.address for site in plan.sites}
    rows = list(notes.sites.values())
    for row in rows:
        print(row.path, row.op, row.sums, row.bits, row.how)
        assert row.how in ("float", "lookup") or (row.used is not None and row.used <= 1), row
    print(len(rows), "sites")
    return any(row.sums is not None for row in rows)


if __name__ == "__main__":
    make_plan.plan_call = planned
    example = pathlib.Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(example.parent))
    runpy.run_path(str(example), run_name="__main__")
