"""diffrax: gradients of a neural differential equation, by each way to find them."""

import jax
import jax.numpy as jnp
import pytest

import jqx

from .checks import POLICIES, Model, check, relative

pytestmark = pytest.mark.bench

ADJOINTS = ("RecursiveCheckpointAdjoint", "BacksolveAdjoint", "DirectAdjoint")
STEPS = 8


@pytest.fixture(scope="module")
def equation():
    """Returns an equation's solution at the end, from parameters and where it starts, for an
    adjoint.
    """
    diffrax = pytest.importorskip("diffrax")
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(8, 8, 32, 2, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)

    def solution(adjoint):
        def f(params, start):
            field = diffrax.ODETerm(lambda t, y, params: eqx.combine(params, static)(y))
            return diffrax.diffeqsolve(
                field,
                diffrax.Heun(),
                t0=0.0,
                t1=1.0,
                dt0=1 / STEPS,
                y0=start,
                args=params,
                adjoint=getattr(diffrax, adjoint)(),
            ).ys

        return f

    starts = tuple((jax.random.normal(jax.random.key(k), (8,)),) for k in (1, 2))
    return lambda adjoint: Model(solution(adjoint), params, starts, depth=3 * 2 * STEPS)


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("policy", ["w8a8", "w4a16"])
def test_solutions_and_their_gradients(equation, adjoint, policy):
    """Two of them are rules of a `custom_vjp`, which `simulate` evaluates in float."""
    check(equation(adjoint), policy, gradient=True, bits=adjoint == "DirectAdjoint")


def test_both_ways_to_differentiate_the_steps_agree(equation):
    """With weights alone: rounded activations tip over ties, each way others."""

    def gradient(adjoint):
        model = equation(adjoint)
        plan = jqx.make_plan(model.f, POLICIES["w4a16"])(model.params, *model.batches[0])
        f = jqx.simulate(model.f, plan)
        loss = lambda params, start: jnp.sum(f(params, start) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss))(model.params, *model.batches[0])

    assert relative(gradient("RecursiveCheckpointAdjoint"), gradient("DirectAdjoint")) <= 1e-5
