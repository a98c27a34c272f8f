"""Cotangents go back by the transposed collective, quantized; or where JAX sends none, unsent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jqx import parallel

from .devices import COUNT, MESH, TABLE, normal, on_each

EXACT = "int8:group=1"
COARSE = "int2:group=32"
RING = [(i, (i + 1) % COUNT) for i in range(COUNT - 1)]

PAIRS = {
    "sum": (
        lambda x, names: lax.psum(x, names),
        lambda x, names, **o: parallel.all_reduce(x, names, **o),
    ),
    "sum in a ring": (
        lambda x, names: lax.psum(x, names),
        lambda x, names, **o: parallel.all_reduce(x, names, form="ring", **o),
    ),
    "gathered": (
        lambda x, names: lax.all_gather(x, names, axis=1, tiled=True),
        lambda x, names, **o: parallel.all_gather(x, names, axis=1, tiled=True, **o),
    ),
    "gathered in a ring": (
        lambda x, names: lax.all_gather(x, names, axis=1),
        lambda x, names, **o: parallel.all_gather(x, names, axis=1, form="ring", **o),
    ),
    "scattered": (
        lambda x, names: lax.psum_scatter(x, names),
        lambda x, names, **o: parallel.reduce_scatter(x, names, **o),
    ),
    "to all": (
        lambda x, names: lax.all_to_all(x, names, 0, 1, tiled=True),
        lambda x, names, **o: parallel.all_to_all(x, names, 0, 1, tiled=True, **o),
    ),
    "to all, untiled": (
        # lax.all_to_all of jax 0.10 cannot be transposed where other axes stand between.
        lambda x, names: lax.all_to_all(x, names, 0, 1, tiled=True).reshape(COUNT, -1).T,
        lambda x, names, **o: parallel.all_to_all(x, names, 0, 1, **o),
    ),
    "to some": (
        lambda x, names: lax.ppermute(x, names, RING),
        lambda x, names, **o: parallel.ppermute(x, names, RING, **o),
    ),
}


@pytest.mark.many
@pytest.mark.parametrize(
    "mesh, names, check_vma",
    [
        (MESH, "i", True),
        (MESH, "i", False),
        pytest.param(TABLE, ("a", "b"), True, marks=pytest.mark.slow),
        pytest.param(TABLE, ("a", "b"), False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_jax(mesh, names, check_vma):
    """With a coarse format forward and an exact one backward; through checkpoint and with keys."""

    @functools.partial(on_each, mesh=mesh, check_vma=check_vma)
    def run(x, weights):
        def gradient(f, x, **options):
            def loss(x):
                y = f(x, names, **options)
                w = weights.reshape(-1)[: y.size].reshape(y.shape)
                return (y * w).sum()

            return jax.grad(loss)(x)

        found = {}
        for name, (plain, quantized) in PAIRS.items():
            coarse = functools.partial(quantized, spec=COARSE, backward=EXACT)
            exact = lambda x, names: jax.checkpoint(  # noqa: E731
                lambda x: quantized(x, names, spec=EXACT)  # noqa: B023
            )(x)
            found[name] = (
                gradient(plain, x),
                gradient(coarse, x),
                gradient(coarse, x, key=jax.random.key(0)),
                gradient(exact, x),
            )
        return found

    for name, (exact, *found) in run(normal(0, COUNT, 6), normal(1, COUNT * COUNT * 6)).items():
        for dx in found:
            np.testing.assert_allclose(dx, exact, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_sum_is_invariant_and_sends_nothing_backward():
    """`out_specs=P()` takes it, forward and in a gradient; no float is sent but scales."""
    x = normal(0, 64)

    def loss(x):
        f = lambda x: parallel.all_reduce(x[0], "i", "int8:group=8")  # noqa: E731
        return (jax.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P())(x) ** 2).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    sent = [
        text.count(name) for name in ("all_to_all[", "all_gather_invariant[", "psum", "ppermute[")
    ]
    assert sent == [2, 2, 0, 0]
    y = np.asarray(jax.jit(jax.grad(loss))(x))
    np.testing.assert_allclose(y, np.broadcast_to(2 * x.sum(axis=0), y.shape), atol=0.3)


def test_the_cotangent_is_what_the_transposed_collective_makes_of_it():
    """Bit by bit, with the spec that is given."""
    back = "int4:group=6"

    @functools.partial(on_each, check_vma=False)
    def run(x, c, d):
        pull = lambda f, x, c: jax.vjp(f, x)[1](c)[0]  # noqa: E731
        options = {"spec": "int8:group=6", "backward": back}
        return {
            "gathered": (
                pull(lambda x: parallel.all_gather(x, "i", **options), x, c),
                parallel.reduce_scatter(c, "i", back),
            ),
            "scattered": (
                pull(lambda c: parallel.reduce_scatter(c, "i", **options), c, x),
                parallel.all_gather(x, "i", back),
            ),
            "summed": (
                pull(lambda x: parallel.all_reduce(x, "i", form="ring", **options), x, d),
                parallel.all_reduce(d, "i", back, form="ring"),
            ),
        }

    for name, (found, expected) in run(normal(0, 12), normal(1, COUNT, 12), normal(2, 12)).items():
        assert (found == expected).all(), name


def test_errors_and_keys_have_no_gradient():
    @on_each
    def run(x, error):
        def loss(x, error):
            y, error = parallel.all_reduce(x, "i", EXACT, error=error, key=jax.random.key(0))
            return (y**2).sum() + lax.psum(error.sum(), "i")

        return jax.grad(loss, argnums=(0, 1))(x, error)

    x = normal(0, 12)
    dx, derror = run(x, np.zeros_like(x))
    np.testing.assert_allclose(dx[0], 2 * x.sum(axis=0), rtol=1e-4, atol=1e-4)
    assert (derror == 0).all()


def test_sixteen_bits_have_cotangents_of_their_own():
    @on_each
    def run(x):
        loss = lambda x: parallel.all_gather(x, "i", EXACT).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss)(x.astype(jnp.bfloat16))

    dx = run(normal(0, 12))
    assert dx.dtype == jnp.bfloat16
    np.testing.assert_allclose(dx.astype(jnp.float32), COUNT)
