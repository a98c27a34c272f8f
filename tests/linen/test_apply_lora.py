"""Adapters that `apply_lora` adds to any linen module."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

import jqx
import jqx.linen
from jqx.algorithms import eora, loftq
from jqx.linen import LoRA, Mode, apply_lora, merge_lora

from ..arrays import normal
from ..oracles.refusals import assert_error

WIDTH, HEADS, SIZE = 16, 2, 8
X = normal(1, 2, 3, WIDTH)
RULES = {".*": LoRA(3, 6.0)}


class Layer(nn.Module):
    """One layer of a scan, with weights of two and three axes."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.DenseGeneral((HEADS, SIZE), name="split")(x)
        y = nn.DenseGeneral(WIDTH, axis=(-2, -1), name="join")(jnp.tanh(y))
        return x + y, None


class Model(nn.Module):
    """Scanned layers, with a norm before and a boxed weight after them."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = layers(name="layers")(nn.LayerNorm(name="norm")(x), None)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(4, kernel_init=init, name="last")(x)


EQUATIONS = {
    "layers/split/kernel": "ldr,lrnh->ldnh",
    "layers/join/kernel": "lnhr,lrd->lnhd",
    "last/kernel": "dr,rf->df",
}


@functools.cache
def variables():
    return Model().init(jax.random.key(0), X)


def randomized(known):
    """The variables, with factors `b` that are not 0."""
    path_and_leaves, tree = jax.tree.flatten_with_path(known["lora"])
    leaves = [
        normal(i, *x.shape) / 8 if "b" in jax.tree_util.keystr(path).split("'") else x
        for i, (path, x) in enumerate(path_and_leaves)
    ]
    return {**known, "lora": jax.tree.unflatten(tree, leaves)}


def flat(tree):
    return flatten_dict(nn.meta.unbox(tree), sep="/")


def test_a_module_with_adapters_is_the_module_with_their_sums():
    model, known = apply_lora(Model(), variables(), RULES, X)
    assert isinstance(model, Model) and isinstance(
        known["lora"]["last"]["kernel"]["b"], nn.Partitioned
    )
    assert known["lora"]["last"]["kernel"]["b"].names == (None, "model")
    known = randomized(known)
    factors, params = flat(known["lora"]), flat(variables()["params"])
    assert {name.rpartition("/")[0] for name in factors} == set(EQUATIONS)
    for path, equation in EQUATIONS.items():
        a, b = (np.asarray(factors[f"{path}/{side}"], np.float64) for side in "ab")
        params[path] = jnp.asarray(params[path] + 2.0 * np.einsum(equation, a, b), jnp.float32)
    merged = merge_lora(known, model)
    assert sorted(merged) == ["params"]
    for path, x in flat(merged["params"]).items():
        assert jnp.abs(x - params[path]).max() <= 2.0**-21
    expected = Model().apply(merged, X)
    assert jnp.abs(model.apply(known, X) - expected).max() <= 2.0**-18 * jnp.abs(expected).max()


def test_a_base_in_codes_trains_only_adapters():
    rules = {".*split": LoRA(2, 4.0), "last": LoRA(4, 4.0)}
    model, known = apply_lora(
        Model(), variables(), rules, X, base="nf4:group=8", key=jax.random.key(3)
    )
    assert set(flat(known["qparams"])) == {"layers/split/kernel", "last/kernel"}
    assert "kernel" not in known["params"]["last"]
    known = randomized(known)

    @jax.jit
    def gradients(lora):
        return jax.grad(lambda lora: jnp.square(model.apply({**known, "lora": lora}, X)).sum())(
            lora
        )

    grads = jax.tree.leaves(gradients(known["lora"]))
    assert len(grads) == 4 and all(bool((x != 0).any()) for x in grads)
    simulated = model.apply(known, X)
    converted = model.clone(mode=Mode.CONVERT).apply(known, X)
    for out in (converted, Model().apply(merge_lora(known, model), X)):
        assert jnp.abs(out - simulated).max() <= 2.0**-17 * jnp.abs(simulated).max()


@pytest.mark.parametrize("algorithm", [loftq(rank=3), eora(rank=3)])
def test_adapters_start_as_the_compensation_of_an_algorithm(algorithm):
    policy = jqx.Policy({".*kernel": "int2:channel"})
    own = jqx.linen.ptq(Model(), policy, algorithm, progress=False)(variables(), [X])
    model, _ = apply_lora(Model(), variables(), {".*": LoRA(3, 1.5)}, X, base="int2:channel")
    known = jqx.linen.init_lora(model, own, X)
    expected = own(X)
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        out = model.clone(mode=mode).apply(known, X)
        assert jnp.abs(out - expected).max() <= 2.0**-17 * jnp.abs(expected).max()


def test_what_does_not_fit_is_refused():
    model, known = apply_lora(Model(), variables(), RULES, X)
    for call, words in (
        (
            lambda: apply_lora(Model(), variables(), {"norm": LoRA(1, 1.0)}, X),
            "'norm' matches no weight",
        ),
        (lambda: apply_lora(model, known, RULES, X), "is quantized already"),
        (lambda: model.apply(variables(), X), "the collection 'lora' has no adapters of"),
        (lambda: merge_lora(variables(), model), "there are no adapters"),
    ):
        assert_error(call, words)
    for call, words in (
        (lambda: apply_lora(Model(), RULES, X), "`rules`"),
        (lambda: apply_lora(variables(), variables(), RULES, X), "`module`"),
        (lambda: apply_lora(Model(), X, RULES, X), "`variables`"),
        (lambda: merge_lora(known, Model()), "`module`"),
    ):
        assert_error(call, words, error=TypeError)
