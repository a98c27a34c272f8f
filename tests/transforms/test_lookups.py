"""Lookups in a weight, however they are written, against rows rounded by hand, bit by bit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jqx

from ..models.transforms import normal
from .sources import POLICY, assert_quantized, assert_same, cases

OPTIONAL = jqx.Policy([dataclasses.replace(POLICY.rules[0], optional=True)])
IDS = jnp.array([-9, -1, 3, 9])
LOOKUPS = {
    "jnp.take": (lambda w: jnp.take(w, IDS, axis=0), 0),
    "jnp.take, filled": (lambda w: jnp.take(w, IDS, axis=1, fill_value=5.0), 1),
    "jnp.take, clipped": (lambda w: jnp.take(w, IDS, axis=0, mode="clip"), 0),
    "jnp.take, wrapped": (lambda w: jnp.take(w, IDS, axis=0, mode="wrap"), 0),
    "indexed": (lambda w: w[IDS], 0),
    "indexed by bytes": (lambda w: w[IDS.astype(jnp.int8)], 0),
    "indexed columns": (lambda w: w[:, IDS.reshape(2, 2)], 1),
    "get, filled": (lambda w: w.at[IDS].get(mode="fill", fill_value=7.0), 0),
    "a mapped index": (lambda w: jax.vmap(lambda i: w[i])(IDS), 0),
    "an index mapped twice": (lambda w: jax.vmap(jax.vmap(lambda i: w[i]))(IDS.reshape(2, 2)), 0),
    "a mapped index, axes out": (lambda w: jax.vmap(lambda i: w[i], out_axes=1)(IDS), 0),
    "mapped indices": (lambda w: jax.vmap(lambda i: w[i])(IDS.reshape(2, 2)), 0),
    "mapped indices of columns": (lambda w: jax.vmap(lambda i: w[:, i])(IDS.reshape(2, 2)), 1),
    "a mapped slice": (
        lambda w: jax.vmap(lambda i: lax.dynamic_index_in_dim(w, i, 1))(IDS),
        1,
    ),
    "a mapped index, filled": (
        lambda w: jax.vmap(lambda i: w.at[i].get(mode="fill", fill_value=0.0))(IDS),
        0,
    ),
}


SLOW = (
    *("jnp.take, wrapped", "indexed by bytes", "indexed columns", "an index mapped twice"),
    *("mapped indices", "a mapped index, filled", "jnp.take, clipped"),
)


@cases(LOOKUPS, SLOW)
def test_every_way_to_write_a_lookup_is_a_site_also_out_of_bounds(name):
    f, axis = LOOKUPS[name]
    assert_quantized(f, {"": (axis,)}, normal(0, 8, 6))


@pytest.mark.parametrize(
    "f",
    [
        lambda w: w[jnp.array([1, 2]), jnp.array([3, 4])],
        lambda w: jax.vmap(lambda t, i: t[i])(w.reshape(2, 4, 6), jnp.array([1, 3])),
        lambda w: jax.vmap(lambda i: lax.dynamic_slice_in_dim(w, i, 2))(jnp.array([1, 3])),
        lambda w: jax.vmap(lambda i: w[:1][i])(jnp.array([0, 3])),
    ],
)
def test_other_gathers_stay_in_float_and_are_listed(f):
    w = normal(0, 8, 6)
    plan = jqx.make_plan(f, OPTIONAL)(w)
    assert plan.sites == () and "not a lookup along one axis" in plan.skipped[0].reason
    assert_same(jqx.convert(f, plan)(w), f(w))
