"""The ways to compute a contraction, each under a name, and reading back which one was chosen.

A contraction is traced as a call of a jitted function that bears the name of its formulation, so
that a jaxpr tells how each of its contractions is computed, on which platform.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._calls import called

PREFIX = "jqx_"
_ELSEWHERE = "_else_"

FORMULATIONS: dict[str, "Formulation"] = {}
"""By name."""


@dataclasses.dataclass(frozen=True)
class Formulation:
    """One way to compute a contraction.

    Attributes:
      name: what it is called in a jaxpr, behind `jqx_`.
      reason: when it is chosen, and what for.
      compute: `(lhs, rhs, how) -> result`; `how` is static.
      linear: another one that gives the derivative of this, where this rounds its float operand or
        looks at magnitudes; `None` where it is linear itself.
    """

    name: str
    reason: str
    compute: Callable[[Any, Any, Any], Any] = dataclasses.field(compare=False, repr=False)
    linear: "Formulation | None" = None


def formulation(
    reason: str, linear: Formulation | None = None
) -> Callable[[Callable[..., Any]], Formulation]:
    """Makes a function `(lhs, rhs, how)` the formulation of its name."""

    def register(compute: Callable[..., Any]) -> Formulation:
        name = compute.__name__
        FORMULATIONS[name] = Formulation(name, reason, compute, linear)
        return FORMULATIONS[name]

    return register


class Choice(NamedTuple):
    """The formulation for XLA on CPU, and the one for all other platforms."""

    cpu: Formulation
    elsewhere: Formulation

    def compute(self, lhs: Any, rhs: Any, how: Any) -> Any:
        """Computes the contraction, under its name; the platform decides when it is lowered."""
        return _named(self)(lhs, rhs, how)


@functools.cache
def _named(choice: Choice) -> Callable[..., Any]:
    cpu, elsewhere = choice

    def contract(lhs: Any, rhs: Any, how: Any) -> Any:
        compute = functools.partial(_dispatch, cpu, elsewhere, how=how)
        if cpu.linear is not None:
            compute = _with_derivative(
                compute,
                functools.partial(_dispatch, cpu.linear, elsewhere.linear or elsewhere, how=how),
            )
        elif cpu != elsewhere:
            # Outside of the choice of platform, which would keep converted codes.
            compute = jax.checkpoint(compute)
        return compute(lhs, rhs)

    same = cpu == elsewhere
    contract.__name__ = PREFIX + (cpu.name if same else cpu.name + _ELSEWHERE + elsewhere.name)
    return jax.jit(contract, static_argnums=2)


def _dispatch(cpu: Formulation, elsewhere: Formulation, lhs: Any, rhs: Any, how: Any) -> Any:
    if cpu == elsewhere:
        return cpu.compute(lhs, rhs, how)
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=lambda lhs, rhs: cpu.compute(lhs, rhs, how),
        default=lambda lhs, rhs: elsewhere.compute(lhs, rhs, how),
    )


def _with_derivative(
    product: Callable[[Any, Any], Any], linear: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Gives a product of an array and a QTensor the derivative of one that is linear in the array
    and in the scale. Nothing that it converts is kept for the backward pass.
    """
    function = jax.custom_jvp(product)
    linear = jax.checkpoint(linear)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (x, q), (dx, dq) = primals, tangents
        y = function(x, q)
        dy = jnp.zeros_like(y)
        if not _is_zero(dx):
            dy = dy + linear(dx, q)
        if not _is_zero(dq.scale):
            dy = dy + linear(x, dataclasses.replace(q, scale=dq.scale))
        return y, dy

    return function


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


class Chosen(NamedTuple):
    """A contraction in a traced function, and how it is computed.

    Attributes:
      cpu: the formulation on CPU.
      elsewhere: the formulation on every other platform.
      operands: types of the arrays that it reads.
      result: type of the result.
      times: how often it runs, where it stands in a scan.
    """

    cpu: Formulation
    elsewhere: Formulation
    operands: tuple[str, ...]
    result: str
    times: int

    def __str__(self) -> str:
        lines = [f"{' x '.join(self.operands)} -> {self.result}"]
        lines += [f" ({self.times} times)"] if self.times > 1 else []
        if self.cpu == self.elsewhere:
            return f"{''.join(lines)}\n  {self.cpu.name}: {self.cpu.reason}"
        return (
            f"{''.join(lines)}\n  cpu: {self.cpu.name}: {self.cpu.reason}"
            f"\n  elsewhere: {self.elsewhere.name}: {self.elsewhere.reason}"
        )


@called("formulations")
def formulations(f: Callable[..., Any]) -> Callable[..., list[Chosen]]:
    """Returns a function of the arguments of `f` that tells how jqx computes its contractions.

    Args:
      f: any JAX function that calls contractions of jqx; it is traced, not run.

    Returns:
      `chosen(*args, **kwargs) -> list`, one entry for each contraction with a QTensor, in order;
      its `cpu.name` and `cpu.reason` (and `elsewhere`) say what was chosen and why, and `str` of it
      says all.

    Raises:
      What `f` raises when traced.

    Gradient: none; nothing is computed.
    NaN and infinities: nothing is computed.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 256)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> (chosen,) = jqx.formulations(jqx.matmul)(jnp.ones((1, 256)), w)
      >>> chosen.cpu.name, chosen.elsewhere.name
      ('digits', 'convert')
    """

    def chosen(*args: Any, **kwargs: Any) -> list[Chosen]:
        jaxpr, _ = _compat.open_jaxpr(jax.make_jaxpr(f)(*args, **kwargs))
        return _read(jaxpr, 1)

    return chosen


def _read(jaxpr: Any, times: int) -> list[Chosen]:
    found = []
    for eqn in jaxpr.eqns:
        name = _compat.name_of_jit(eqn)
        cpu, _, elsewhere = name.removeprefix(PREFIX).partition(_ELSEWHERE)
        if name.startswith(PREFIX) and {cpu, elsewhere or cpu} <= {*FORMULATIONS}:
            found.append(
                Chosen(
                    FORMULATIONS[cpu],
                    FORMULATIONS[elsewhere or cpu],
                    tuple(_type(v) for v in eqn.invars),
                    ", ".join(_type(v) for v in eqn.outvars),
                    times,
                )
            )
            continue
        inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in _compat.sub_jaxprs(eqn):
            found += _read(inner, inner_times)
    return found


def _type(atom: Any) -> str:
    return atom.aval.str_short(short_dtypes=True)
