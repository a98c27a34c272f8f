"""`train` on modules of Flax: batch normalization, dropout, rules by paths, and optimizers."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx

from ..arrays import assert_same, normal, on_device

X = normal(0, 64, 32)
LABELS = on_device(np.asarray(X)[:, :8].argmax(-1))
KEYS = jax.random.split(jax.random.key(0), 20)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, use_bias=False, name="up")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.8, name="norm")(x))
        x = nn.Dropout(0.1, deterministic=False)(x)
        return nn.Dense(8, name="head")(x)


class NnxNet(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.up(x)))))


def linen_net():
    """The function of training, the values, and what puts written ones in."""
    seeds = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = jax.jit(LinenNet().init)(seeds, X)
    f, params = jqx.linen.pure(LinenNet(), variables, mutable=["batch_stats"])
    return f, params, lambda a, b: {**a, **b}


def nnx_net():
    f, params = jqx.nnx.pure(NnxNet(nnx.Rngs(params=1, dropout=2)), mutable=nnx.BatchStat)
    return f, params, jqx.nnx.update


def mean_loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def fitted(run, params, update):
    """Some steps of training with `run(params, dropout key, key)`: the new values; and of each
    step the loss, the gradients and the values that it has written.
    """
    tx = optax.sgd(0.1, momentum=0.9)

    def loss(params, keys):
        logits, written = run(params, *keys)
        return mean_loss(logits), written

    def step(carry, key):
        params, state = carry
        results, gradients = jax.value_and_grad(loss, has_aux=True)(params, jax.random.split(key))
        updates, state = tx.update(gradients, state)
        new = update(optax.apply_updates(params, updates), results[1])
        return (new, state), (results[0], gradients, results[1])

    (new, _), history = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), KEYS))(params)
    return new, *history


def distance(first, second):
    """The distance of trees, relative to the norm of the second."""
    parts = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (first, second)]
    return np.linalg.norm(parts[0] - parts[1]) / np.linalg.norm(parts[1])


@pytest.mark.parametrize("net", [linen_net, nnx_net])
def test_a_module_is_trained_with_its_running_statistics(net):
    f, params, update = net()

    def plain(params, dropout, key):
        return f(params, X, rngs={"dropout": dropout})

    _, _, exact, statistics = fitted(plain, params, update)
    for name, of_gradients, of_statistics in (("int8", 0.1, 0.01), ("nvfp4", 0.4, 0.1)):
        recipe = getattr(jqx.recipes, name)(exclude=".*head/kernel")
        plan = jqx.make_plan(f, recipe.policy)(params, X, rngs={"dropout": KEYS[0]})
        assert [site.path.removeprefix("params/") for site in plan.sites] == ["up/kernel"]
        trained = jqx.train(f, plan, recipe)

        def rounded(params, dropout, key):
            return trained(params, {}, X, rngs={"dropout": dropout}, key=key)  # noqa: B023

        new, losses, gradients, written = fitted(rounded, params, update)
        first = jax.tree.map(lambda x: x[0], (gradients, exact, written, statistics))
        assert 0 < distance(*first[:2]) < of_gradients
        assert 0 < distance(*first[2:]) < of_statistics
        assert losses[-1] < losses[0] / 2
        last = jax.tree.map(lambda x: x[-1], written)
        assert_same(update(new, last), new)


def test_an_optimizer_of_nnx_updates_the_model():
    model, recipe = NnxNet(nnx.Rngs(params=1, dropout=2)), jqx.recipes.nvfp4(exclude="head/.*")
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params, others, x):
        copy = nnx.merge(graph, params, others)
        return mean_loss(copy(x)), nnx.state(copy, nnx.Not(nnx.Param))

    plan = jqx.make_plan(loss, recipe.policy)(params, others, X)
    assert [site.path for site in plan.sites] == ["up/kernel"]
    trained = jqx.train(loss, plan, recipe)

    @nnx.jit
    def step(model, optimizer, key):
        _, params, others = nnx.split(model, nnx.Param, ...)
        run = jax.value_and_grad(trained, has_aux=True)
        (value, new), gradients = run(params, {}, others, X, key=key)
        optimizer.update(model, gradients)
        nnx.update(model, new)
        return value

    losses = [step(model, optimizer, key) for key in KEYS]
    assert losses[-1] < losses[0] / 2
    assert optimizer.step[...] == model.dropout.rngs.count[...] == len(KEYS)
    assert (model.norm.mean[...] != 0).all()
