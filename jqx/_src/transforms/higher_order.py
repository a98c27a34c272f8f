"""How the transforms run the functions that a primitive holds: a rule for `cond`, `while`, `scan`,
`jax.checkpoint`, `jit`, custom derivatives, `custom_vmap` and `shard_map`, listed in `FORMS`.
`walk` has which functions these are.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from .. import compat
from ..compat import Eqn
from ..gradients.estimators import straight_through
from ..tensor.qtensor import QTensor
from ..tensor.segments import StackSlice, without_stack
from ..tensor.shardings import partition_specs
from ..tensor.targets import kernel_of
from ..tensor.views import sliceable
from .row_counts import Counted, Lost, spread, value_of
from .views import Address, Trainable, is_coded, map_codes, sharded_as
from .walk import REMAT, carried, passed_on, while_starts

Records = dict[str, Any]
"""Records of sites, by key."""


class Runner:
    """How evaluation runs the functions inside an equation. `site_inputs` is what sites read in
    addition to their operands: scales and a random key; a pytree. By default that is nothing, sites
    record nothing, and every value is an array.
    """

    @property
    def site_inputs(self) -> Any:
        """What sites inside the equation read."""
        return ()

    @property
    def differentiable(self) -> bool:
        """Whether derivative rules of the user are kept."""
        return True

    @property
    def is_counting(self) -> bool:
        """Whether the counts of the rows of a batch are tracked."""
        return False

    def run(
        self, jaxpr: Any, args: Sequence[Any], part: Address = (), site_inputs: Any = None
    ) -> tuple[list[Any], Records]:
        """Evaluates a function; returns its results and the records of its sites."""
        raise NotImplementedError

    def split(self, length: int) -> tuple[Any, Any]:
        """Returns the stacked inputs of the steps of this scan, and the inputs shared by all."""
        return (), ()

    def join(self, step: Any, shared: Any) -> Any:
        """Returns the inputs of one step."""
        return step

    def numbered(self, site_inputs: Any, step: Any) -> Any:
        """Returns the inputs of a step of a loop, with its own random numbers."""
        return site_inputs

    def empty_records(self) -> Records:
        """Returns the records of nothing, from which this loop or branch starts."""
        return {}

    def merge(self, a: Records, b: Records) -> Records:
        """Returns the merged records of two evaluations."""
        return {}

    def carried(self, x: Any) -> Any:
        """Returns a value in the form in which a loop carries it."""
        return x

    def common(self, forms: Sequence[Any]) -> Any:
        """Returns the form that results of several branches can have."""
        return forms[0]

    def dense(self, x: Any) -> Any:
        """Returns a value that must be an array here; raises, or dequantizes, if it is not."""
        return x

    def like(self, x: Any, example: Any) -> Any:
        """Returns a value in the form of another: an array, or quantized to the same format."""
        return x


def as_function(runner: Runner, jaxpr: Any) -> Callable[..., tuple[list[Any], Records]]:
    """Returns a function of what sites are given and of operands that evaluates a body."""

    def run(site_inputs: Any, *args: Any) -> tuple[list[Any], Records]:
        return runner.run(jaxpr, args, site_inputs=site_inputs)

    return run


# The carried values of a loop: those that steps change, and unchanged quantized arrays.


@dataclasses.dataclass(frozen=True)
class Carry:
    """The carried values of a loop. Quantized values that no step changes are shared by all steps.

    Attributes:
      init: the values before the first step; each keeps its format.
      shared: indices of the shared values.
      runner: converts the values that a step has changed to that format.
    """

    init: Sequence[Any]
    shared: frozenset[int]
    runner: Runner

    @classmethod
    def of(cls, eqn: Eqn, operands: Sequence[Any], runner: Runner) -> "Carry":
        """Reads the equation of a loop and its operands."""
        init = [runner.carried(without_stack(x)) for x in operands[carried(eqn)]]
        pairs = enumerate(zip(init, passed_on(eqn), strict=True))
        return cls(init, frozenset(i for i, (x, same) in pairs if same and is_coded(x)), runner)

    def start(self) -> list[Any]:
        """Returns the values that change, before the first step."""
        return [x for i, x in enumerate(self.init) if i not in self.shared]

    def changing(self, state: Sequence[Any]) -> list[Any]:
        """Returns the values that change, out of all carried values."""
        changed = []
        for i, (x, init) in enumerate(zip(state, self.init, strict=True)):
            try:
                changed += [] if i in self.shared else [self.runner.like(x, init)]
            except Lost as lost:
                lost.index = i
                raise
        return changed

    def state(self, values: Sequence[Any]) -> list[Any]:
        """Returns all carried values, given those that change."""
        iterator = iter(values)
        return [x if i in self.shared else next(iterator) for i, x in enumerate(self.init)]


def run_loop(carry: Carry, loop: Callable[[Carry], Any]) -> Any:
    """Runs a loop. If the counts of a carried value are unknown after a step, they are unknown in
    all steps, and the loop is traced again.
    """
    while True:
        try:
            return loop(carry)
        except Lost as lost:
            init = list(carry.init)
            init[lost.index] = Counted(value_of(init[lost.index]), None, lost.reason)
            carry = dataclasses.replace(carry, init=init)


# `cond` and `switch`: a branch that is not taken records nothing.
#
# A result that one branch returns quantized has the same format in all branches.


def _apply_cond(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    index, *branch_operands = runner.dense(operands[0]), *operands[1:]

    def take(number: int, branch: Any, site_inputs: Any, *args: Any) -> tuple[list[Any], Records]:
        results, records = runner.run(branch, args, (number,), site_inputs)
        return results, runner.empty_records() | records

    branches: list[Callable[..., Any]] = [
        partial(take, i, branch) for i, branch in enumerate(eqn.params["branches"])
    ]
    if runner.is_counting or any(map(is_coded, branch_operands)):
        args = runner.site_inputs, *branch_operands
        forms = [jax.eval_shape(branch, *args)[0] for branch in branches]
        common = list(map(runner.common, zip(*forms, strict=True)))

        def as_common(branch: Callable[..., Any], *args: Any) -> tuple[list[Any], Records]:
            results, records = branch(*args)
            return list(map(runner.like, results, common)), records

        branches = [partial(as_common, branch) for branch in branches]
    return lax.switch(index, branches, runner.site_inputs, *branch_operands)


# `while`: weights among its constants, or carried unchanged, are shared by its steps. Other
# carried values keep their format.


def _apply_while(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    cond_count, carry_start = while_starts(eqn)
    for_condition, for_body = operands[:cond_count], operands[cond_count:carry_start]

    def loop(carry: Carry) -> tuple[list[Any], Records]:
        def goes_on(state: Any) -> Any:
            (result,), _ = runner.run(condition, [*for_condition, *carry.state(state[1])], (-1,))
            return runner.dense(result)

        def step(state: Any) -> Any:
            i, values, recorded = state
            site_inputs = runner.numbered(runner.site_inputs, i)
            results, records = runner.run(
                body, [*for_body, *carry.state(values)], site_inputs=site_inputs
            )
            return i + 1, carry.changing(results), runner.merge(recorded, records)

        start = jnp.uint32(0), carry.start(), runner.empty_records()
        _, values, recorded = lax.while_loop(goes_on, step, start)
        return carry.state(values), recorded

    return run_loop(Carry.of(eqn, operands, runner), loop)


# `scan`: each step gets a slice of quantized xs, or, if a kernel reads them, one of the stack.
# Constants are shared, and carried values keep their format.


def _apply_scan(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    const_count, count = compat.scan_counts(eqn)
    xs_start = const_count + count
    consts, xs = (
        operands[:const_count],
        [
            # Each index of the leading axis of a weight gets its own scales.
            map_codes(lambda q: sliceable(without_stack(q), 0), x) if is_coded(x) else spread(x)
            for x in operands[xs_start:]
        ],
    )
    sliced = [None if kernel_of(x) else x for x in xs]
    stacks = [x if kernel_of(x) else None for x in xs]
    numbers = jnp.arange(length) if any(map(kernel_of, xs)) else None
    steps, site_inputs = runner.split(length)

    def loop(carry: Carry) -> tuple[list[Any], Records]:
        def step(state: Any, x: Any) -> Any:
            values, recorded = state
            step_inputs, parts, number = x
            args_of_step = [
                part if stack is None else StackSlice.of(stack, number)
                for part, stack in zip(parts, stacks, strict=True)
            ]
            args = [*consts, *carry.state(values), *args_of_step]
            results, records = runner.run(
                body, args, site_inputs=runner.join(step_inputs, site_inputs)
            )
            ours = {key: record for key, record in records.items() if key in recorded}
            new_records = {key: record for key, record in records.items() if key not in recorded}
            values = carry.changing(results[:count])
            return (values, runner.merge(recorded, ours)), (results[count:], new_records)

        (values, recorded), (ys, new_records) = lax.scan(
            step,
            (carry.start(), runner.empty_records()),
            (steps, sliced, numbers),
            length=length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry.state(values), *ys], recorded | new_records

    return run_loop(Carry.of(eqn, operands, runner), loop)


# `jax.checkpoint`: the body is recomputed in the backward pass, quantized.


def _apply_remat(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    run = as_function(runner, eqn.params["jaxpr"])
    remat = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return remat(runner.site_inputs, *operands)


# `jit`: the inside is jitted again, with the same name and shardings.


def _apply_jit(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    in_shardings, out_shardings = compat.shardings_of(eqn)
    body = as_function(runner, eqn.params["jaxpr"])

    def run(in_shardings: Any, *args: Any) -> tuple[list[Any], Records]:
        results, records = body(in_shardings, *args)
        return list(map(spread, results)) if any(out_shardings) else results, records

    run.__name__ = str(eqn.params["name"])
    options: dict[str, Any] = {}
    operands = list(map(spread, operands)) if any(in_shardings) else operands
    if any(in_shardings):
        constrained = [
            sharded_as(x, sharding) if is_coded(x) and sharding else sharding
            for x, sharding in zip(operands, in_shardings, strict=True)
        ]
        options["in_shardings"] = (None, *constrained)
    if any(out_shardings):
        options["out_shardings"] = (out_shardings, None)
    return jax.jit(run, inline=eqn.params["inline"], **options)(runner.site_inputs, *operands)


# `jax.custom_jvp` and `jax.custom_vjp`: the value is quantized, the rule of the user is kept.
#
# The rule receives the inputs of the float function, and the same information on what is
# differentiated as in float. Derivatives of higher order are those of the rule. Scales that are
# used inside get no gradient from it. If a QTensor is among the operands, or nothing is
# differentiated, the body is evaluated as if there were no rule.


def _apply_custom(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    run = as_function(runner, eqn.params["call_jaxpr"])
    if runner.differentiable and not any(isinstance(x, QTensor) for x in operands):
        operands = [runner.dense(x) if isinstance(x, Trainable) else x for x in operands]
        run = (_with_jvp if eqn.primitive.name == "custom_jvp_call" else _with_vjp)(eqn, run)
    return run(runner.site_inputs, *operands)


def _with_jvp(eqn: Eqn, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the forward derivative of an equation."""
    function = jax.custom_jvp(run)

    def rule(primals: Any, tangents: Any) -> Any:
        (_, *args), (_, *moves) = primals, tangents
        results, records = run(*primals)
        moved = {i: x for i, x in enumerate(moves) if not isinstance(x, SymbolicZero)}
        tangents_at = {i: args[i] for i in moved}
        real, changes = jax.jvp(_function_of(eqn, args), (tangents_at,), (moved,))
        results = list(map(straight_through, results, real))
        return (results, records), (changes, jax.tree.map(_no_tangent, records))

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _with_vjp(eqn: Eqn, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the backward derivative of an equation."""
    function = jax.custom_vjp(run)

    def forward(site_inputs: Any, *primals: Any) -> Any:
        site_inputs, args = jax.tree.map(lambda x: x.value, (site_inputs, list(primals)))
        moved = {i: args[i] for i, x in enumerate(primals) if x.perturbed}
        real, pull = jax.vjp(_function_of(eqn, args), moved)
        results, records = run(site_inputs, *args)
        return (list(map(straight_through, results, real)), records), pull

    def backward(pull: Any, cotangents: Any) -> Any:
        (gradients,) = pull([compat.cotangent(x) for x in cotangents[0]])
        return (None, *(gradients.get(i) for i in range(len(eqn.invars))))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _function_of(eqn: Eqn, args: Sequence[Any]) -> Callable[[dict[int, Any]], list[Any]]:
    """Returns an equation as a function of some of its operands, by index. Those that are not
    differentiated are constants, so a rule receives the same information as in float.
    """
    return lambda some: compat.bind(eqn, [some.get(i, x) for i, x in enumerate(args)])


def _no_tangent(x: Any) -> Any:
    dtype = jnp.result_type(x)
    real = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.zeros_like(x) if real else np.zeros(jnp.shape(x), jax.dtypes.float0)


# `jax.custom_batching.custom_vmap`: the rule for `vmap` cannot take what sites read, so JAX batches
# the body. It is jitted, so that addresses inside stay.


def _apply_vmap(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    return jax.jit(as_function(runner, eqn.params["call"]))(runner.site_inputs, *operands)


# `shard_map`: each device sees its part; a scale is partitioned in step with its weight.


def _apply_shard_map(
    eqn: Eqn, operands: Sequence[Any], runner: Runner
) -> tuple[list[Any], Records]:
    """Each device returns its records with a leading axis, along which they are merged."""
    options = compat.shard_map_options(eqn)
    axes, sizes = options["axis_names"], dict(options["mesh"].shape)

    def partitioned(x: Any, spec: PartitionSpec) -> Any:
        def parts(q: QTensor) -> QTensor:
            return partition_specs("shard_map", q, spec, sizes)

        return map_codes(parts, x, spec) if is_coded(x) else spec

    specs = map(partitioned, operands, eqn.params["in_specs"])

    def run(site_inputs: Any, *args: Any) -> tuple[list[Any], Records]:
        results, records = runner.run(eqn.params["jaxpr"], args, site_inputs=site_inputs)
        return list(map(spread, results)), jax.tree.map(lambda x: x[None], records)

    results, records = jax.shard_map(
        run,
        in_specs=(PartitionSpec(), *specs),
        out_specs=(list(eqn.params["out_specs"]), PartitionSpec(tuple(sorted(axes)))),
        **options,
    )(runner.site_inputs, *map(spread, operands))
    first_records = jax.tree.map(lambda x: x[0], records)
    other_records = jax.tree.map(lambda x: x[1:], records)
    others = math.prod(sizes[axis] for axis in axes) - 1
    merged, _ = lax.scan(
        lambda a, b: (runner.merge(a, b), None), first_records, other_records, length=others
    )
    return results, merged


FORMS: dict[str, Callable[[Eqn, Sequence[Any], Runner], tuple[list[Any], Records]]] = {
    **dict.fromkeys(("jit", "pjit"), _apply_jit),
    **dict.fromkeys(REMAT, _apply_remat),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _apply_custom),
    "custom_vmap_call": _apply_vmap,
    "scan": _apply_scan,
    "while": _apply_while,
    "cond": _apply_cond,
    "shard_map": _apply_shard_map,
}
"""How each primitive that holds functions is run: from its operands to its results and the records
of its sites.
"""
