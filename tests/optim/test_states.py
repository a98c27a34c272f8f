"""States of optimizers as codes: what they hold, where they work, and what training comes to."""

import functools
import sys
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
import jqx.optim

from ..arrays import assert_same, normal, on_device
from ..models.parallel import AUTO, mesh_of
from .networks import (
    FIELDS,
    NETWORKS,
    choices,
    dense_init,
    dense_loss,
    labelled,
    losses,
    optimizer,
)

pytestmark = pytest.mark.usefixtures("as_users_write")

ADAM = {"mu": "8bit", "nu": "8bit_positive"}
SHAPES = {"w": (64, 48), "odd": (48, 33), "b": (33,), "conv": (3, 3, 5, 7), "s": (), "none": (0, 3)}


def tree(seed, shapes=None):
    shapes = SHAPES if shapes is None else shapes
    return {name: normal(seed + n, *shape) for n, (name, shape) in enumerate(shapes.items())}


def is_qtensor(x):
    return isinstance(x, jqx.QTensor)


def qtensors(state):
    return [x for x in jax.tree.leaves(state, is_leaf=is_qtensor) if is_qtensor(x)]


def stepped(tx, params, count):
    """The updates and the state after some steps with other gradients each."""
    state, updates = tx.init(params), params
    for n in range(count):
        grads = jax.tree.map(lambda x, n=n: jnp.cos(x * (n + 1)), params)
        updates, state = tx.update(grads, state, params)
    return updates, state


# What one step computes.


def rows_of(x, size):
    """Rows of at most `size` elements that share a scale, as blocks along the last axes do."""
    count = max(1, size // x.shape[-1])
    if x.shape[-1] > size:
        return [part for row in x for part in np.split(row, range(size, x.shape[-1], size))]
    return np.split(x, range(count, len(x), count))


def decoded(q):
    """The real values of a QTensor of `Squares`, in float64, from its codes and scales."""
    codes, scale = np.asarray(q.codes, np.float64), np.asarray(q.scale, np.float64)
    roots = codes / 127 if q.qtype.signed else (codes + 1) / 256
    tails = {(n, m): size for n, m, size in q.blocks}
    lengths = zip(q.shape, scale.shape, strict=True)
    sizes = [tails.get((n, m), -(-n // m)) for n, m in lengths]
    for axis, (size, n) in enumerate(zip(sizes, q.shape, strict=True)):
        scale = np.repeat(scale, size, axis).take(range(n), axis)
    return roots * np.abs(roots) * scale


def roots_in_steps(x, signed, size=256):
    """The root of each element of a block relative to the largest, in steps between codes."""
    parts = [np.abs(part) / np.abs(part).max() for part in rows_of(x, size)]
    return np.concatenate([np.sqrt(part).ravel() for part in parts]) * (127 if signed else 256)


def test_a_step_of_adam_is_that_of_a_reference_in_float64():
    params = {"wide": normal(0, 3, 300), "narrow": normal(1, 40, 10)}
    first, second = tree(2, {"wide": (3, 300), "narrow": (40, 10)}), tree(7, {"wide": (3, 300)})
    second["narrow"] = normal(9, 40, 10)
    tx = jqx.optim.quantized(optax.adam(1e-3), ADAM)
    update = jax.jit(tx.update)
    _, before = update(first, tx.init(params), params)
    updates, after = update(second, before, params)
    for name, grad in second.items():
        grad = np.asarray(grad, np.float64)
        mu = 0.9 * decoded(before[0].mu[name]) + 0.1 * grad
        nu = 0.999 * decoded(before[0].nu[name]) + 0.001 * grad**2
        expected = -1e-3 * (mu / (1 - 0.9**2)) / (np.sqrt(nu / (1 - 0.999**2)) + 1e-8)
        np.testing.assert_allclose(updates[name], expected, rtol=2e-5, atol=1e-9)
        for q, exact, signed in ((after[0].mu[name], mu, True), (after[0].nu[name], nu, False)):
            largest = [np.abs(part).max() for part in rows_of(exact, 256)]
            np.testing.assert_allclose(np.asarray(q.scale).ravel(), largest, rtol=1e-5)
            steps = roots_in_steps(exact, signed)
            codes = np.abs(np.asarray(q.codes, int)) + (not signed)
            codes = np.concatenate([part.ravel() for part in rows_of(codes, 256)])
            assert (np.abs(codes - np.maximum(steps, not signed)) < 1 + 1e-3).all()
            assert np.abs((codes**2 - steps**2).mean()) < 4 * steps.max() / len(steps) ** 0.5
            assert (np.sign(decoded(q)) == np.sign(exact))[np.asarray(q.codes) != 0].all()


@pytest.mark.parametrize(("choice", "size"), [("8bit", 256), ("4bit", 128)])
def test_numbers_are_rounded_so_that_they_are_right_in_the_mean(choice, size):
    """Averages that move by less than half a step do not stand still."""
    x = normal(0, 256, size)
    tx = jqx.optim.quantized(optax.sgd(1.0, 0.0), {"trace": choice})
    update = jax.jit(lambda x: tx.update(x, tx.init(x))[1][0].trace)
    q, again = update(x), update(x)
    assert_same(q, again)
    modes = jqx.RoundMode.DOWN, jqx.RoundMode.UP
    low, high = (q.qtype.round(x / q.scale, mode) for mode in modes)
    error, deviation = q.dequantize() - x, (high - low) * q.scale / 2
    assert (jnp.abs(error) <= 2 * deviation + 1e-5).all()
    assert abs(error.sum()) < 3 * jnp.sqrt((deviation**2).sum())
    assert abs((error * x).sum()) < 3 * jnp.sqrt((deviation**2 * x**2).sum())


def test_the_first_update_is_that_of_the_plain_optimizer():
    """A state of zeros is exact, in a code without zero too."""
    params = tree(0, {"odd": (48, 33), "s": ()})
    specs = choices(("mu", "nu"), "4bit")
    for tx in (jqx.optim.quantized(optax.adam(1e-3), x) for x in (ADAM, specs)):
        state = tx.init(params)
        assert all(not q.dequantize().any() for q in qtensors(state))
        assert len(qtensors(state)) == 2 * len(params)
        updates = jax.jit(tx.update)(params, state, params)[0]
        plain = jax.jit(optax.adam(1e-3).update)(params, optax.adam(1e-3).init(params), params)[0]
        for name in params:
            np.testing.assert_allclose(updates[name], plain[name], rtol=1e-6)


@pytest.mark.parametrize(("choice", "limit"), [("8bit", 0.27), ("4bit", 0.15)])
def test_a_state_has_the_bytes_of_its_codes(choice, limit):
    """Counted in the tree, and by the compiler."""
    shapes = {"w": (64, 48), "b": (48,), "v": (48, 33), "c": (33,), "x": (33, 10), "d": (10,)}
    params, plain = tree(0, shapes), optax.adam(1e-3)
    tx = jqx.optim.quantized(plain, choices(("mu", "nu"), choice))
    sizes = []
    for t in (plain, tx):
        state = t.init(params)
        compiled = jax.jit(lambda s, t=t: t.update(params, s, params)[1]).lower(state).compile()
        analysed = compiled.memory_analysis().argument_size_in_bytes
        sizes.append((sum(x.nbytes for x in jax.tree.leaves(state)), analysed))
    of_tree, analysed = (a / b for a, b in zip(sizes[1], sizes[0], strict=True))
    assert of_tree <= limit and analysed <= limit


def test_codes_have_the_shape_of_the_parameter():
    state = jqx.optim.quantized(optax.adam(1e-3), ADAM).init(tree(0))
    for name, shape in SHAPES.items():
        for q in (state[0].mu[name], state[0].nu[name]):
            assert q.values.shape == shape and q.scale.ndim == len(shape)
    packed = jqx.optim.quantized(optax.sgd(1e-3, 0.9), {"trace": "4bit"}).init(tree(0))[0].trace
    assert [packed[name].values.shape for name in ("w", "odd", "b", "s")] == [
        (64, 24),
        (24, 33),
        (17,),
        (),
    ]


def test_specs_and_schemes_are_taken_too():
    block = jqx.per_block({-1: 16}, tail=True)  # rows share them
    specs = {"mu": jqx.QSpec("int4", block), "nu": jqx.QSpec(jqx.numerics.Squares(6, False), block)}
    state = jqx.optim.quantized(optax.adam(1e-3), specs).init(tree(0, {"w": (4, 40)}))[0]
    assert str(state.mu["w"].groups) == str(state.nu["w"].groups) == "per_block({1: 16})"
    specs = {"mu": "int8:group=64", "nu": "8bit_positive"}
    state = jqx.optim.quantized(optax.adam(1e-3), specs).init(tree(0, {"w": (4, 128)}))[0]
    assert state.mu["w"].scale.shape == (4, 2) and state.mu["w"].qtype == jnp.int8


# Where it works.


WRAPPERS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1e9), tx),
    "named_chain": lambda tx: optax.named_chain(("first", tx)),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda unused: tx)(unused=1.0),
    "multi_transform": lambda tx: optax.multi_transform({0: tx}, lambda p: dict.fromkeys(p, 0)),
    "masked": lambda tx: optax.masked(tx, lambda p: dict.fromkeys(p, True)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
}
"""Wrappers of optax around a transformation, which do not change what it does."""


def test_wrappers_of_optax_go_around_it_and_into_it():
    """All of them in one program, in a scan: the state keeps its structure, dtypes and formats."""
    params = tree(0, {"w": (6, 20), "b": (20,)})
    plain, wrap = optax.adam(1e-3), functools.partial(jqx.optim.quantized, specs=ADAM)
    sides = {}
    for name, wrapper in WRAPPERS.items():
        sides[name, "outside"] = wrapper(wrap(plain))
        inside = wrapper(plain)
        is_tuple = isinstance(inside, optax.GradientTransformation)
        sides[name, "inside"] = wrap(inside if is_tuple else inside.gradient_transformation())

    def in_scan(tx):
        def step(state, n):
            grads = jax.tree.map(lambda x: jnp.cos(x * n), params)
            updates, state = tx.update(grads, state, params)
            return state, updates

        return jax.lax.scan(step, tx.init(params), jnp.arange(1.0, 4.0))

    results = jax.jit(lambda: {key: in_scan(tx) for key, tx in sides.items()})()
    expected = results["alone", "outside"]
    for key, (state, updates) in results.items():
        assert len(qtensors(state)) == 4, key
        assert_close(updates, expected[1])
        for q, of_alone in zip(qtensors(state), qtensors(expected[0]), strict=True):
            assert jnp.abs(q.values.astype(int) - of_alone.values.astype(int)).max() <= 1, key


def assert_close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-8), a, b)


def test_parts_that_a_wrapper_leaves_out_stay_out():
    params = tree(0, {"w": (4, 6), "b": (6,)})
    tx = jqx.optim.quantized(optax.adam(1e-3), ADAM)
    state = optax.masked(tx, {"w": True, "b": False}).init(params).inner_state[0]
    assert is_qtensor(state.mu["w"]) and isinstance(state.mu["b"], optax.MaskedNode)
    groups = {"w": tx, "none": tx, "b": optax.sgd(1e-3)}
    state = optax.multi_transform(groups, {"w": "w", "b": "b"}).init(params)
    assert len(qtensors(state)) == 2


def test_steps_that_are_skipped_leave_the_codes():
    params = tree(0, {"w": (4, 6)})
    tx = jqx.optim.quantized(optax.adam(1e-3), ADAM)
    nan = jax.tree.map(lambda x: x * jnp.nan, params)
    for wrapped, grads in ((optax.apply_if_finite(tx, 3), nan), (optax.MultiSteps(tx, 2), params)):
        update, state = jax.jit(wrapped.update), stepped(wrapped, params, 2)[1]
        after = update(grads, state, params)[1]
        assert qtensors(state)[0].values.any()
        assert_same(qtensors(after), qtensors(state))


def kinds(state):
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(state)]


def test_a_state_may_be_donated_and_is_the_same_eagerly_and_compiled():
    params = tree(0, {"w": (8, 20), "b": (20,)})
    tx = jqx.optim.quantized(optax.adam(1e-3), ADAM)
    step = jax.jit(lambda s, g: tx.update(g, s, params)[1], donate_argnums=0)
    eager, donated = tx.init(params), tx.init(params)
    for n in range(2):
        grads = tree(n + 3, {"w": (8, 20), "b": (20,)})
        eager, donated = tx.update(grads, eager, params)[1], step(donated, grads)
        assert kinds(eager) == kinds(donated)
        assert jax.tree.structure(eager) == jax.tree.structure(donated)
    for a, b in zip(qtensors(eager), qtensors(donated), strict=True):
        assert jnp.abs(a.values.astype(int) - b.values.astype(int)).max() <= 1


def test_extra_arguments_reach_the_transformation():
    def update(updates, state, params=None, *, factor, **extra):
        return jax.tree.map(lambda x: x * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.trace(0.9).init, update)
    tx = jqx.optim.quantized(inner, {"trace": "8bit"})
    params = {"w": jnp.ones(4)}
    updates, _ = tx.update(params, tx.init(params), params, factor=3.0)
    assert (updates["w"] == 3).all()
    plain = jqx.optim.quantized(optax.sgd(0.1, 0.9), {"trace": "8bit"})
    plain.update(params, plain.init(params), params, factor=3.0)  # not needed, not an error


class Params(NamedTuple):
    mu: jax.Array
    nu: jax.Array


def test_attributes_of_parameters_are_no_fields_of_the_state():
    params = Params(jnp.ones(4), jnp.ones(6))
    tx = jqx.optim.quantized(optax.adam(1e-3), {"nu": "8bit_positive"})
    for state in (tx.init(params)[0], tx.update(params, tx.init(params), params)[1][0]):
        assert qtensors(state.mu) == [] and len(qtensors(state.nu)) == 2


def test_transformations_are_wrapped_twice():
    params = tree(0, {"w": (4, 6)})
    once = jqx.optim.quantized(optax.adam(1e-3), ADAM)
    twice = jqx.optim.quantized(optax.adam(1e-3), {"mu": "8bit"})
    twice = jqx.optim.quantized(twice, {"nu": "8bit_positive"})
    assert_same(stepped(twice, params, 2), stepped(once, params, 2))


def test_a_state_is_saved_and_restored_bit_by_bit(tmp_path):
    params = tree(0, {name: shape for name, shape in SHAPES.items() if 0 not in shape})
    for n, choice in enumerate(("8bit", "4bit")):
        tx = jqx.optim.quantized(optax.adam(1e-3), choices(("mu", "nu"), choice))
        state = stepped(tx, params, 1)[1]
        leaves, _ = jax.tree.flatten(state, is_leaf=is_qtensor)
        jqx.save(tmp_path / f"{n}.safetensors", leaves)
        structure = jax.tree.structure(jax.eval_shape(tx.init, params), is_leaf=is_qtensor)
        loaded = jqx.load(tmp_path / f"{n}.safetensors")
        assert_same(jax.tree.unflatten(structure, loaded), state)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / f"orbax{n}", jqx.interop.to_orbax(state))
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / f"orbax{n}", jqx.interop.to_orbax(state))
        assert_same(jqx.interop.from_orbax(restored, like=state), state)


def test_codes_lie_where_the_parameters_lie():
    mesh = mesh_of(AUTO, 2, 2)
    params = {"w": normal(0, 8, 1024), "b": normal(1, 1024)}
    specs = {"w": P("data", "model"), "b": P("model")}
    grads = tree(2, {"w": (8, 1024), "b": (1024,)})
    tx = jqx.optim.quantized(optax.adam(1e-3), ADAM)
    update = jax.jit(tx.update)
    alone = update(grads, tx.init(params), params)
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params, grads = jax.device_put((params, grads), (places, places))
    first = tx.init(params)
    updates, state = update(grads, first, params)
    for parts in (first[0], state[0]):
        for name, spec in specs.items():
            for q in (parts.mu[name], parts.nu[name]):
                for leaf in (q.values, q.scale):
                    assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)
    assert_close(updates, alone[0])
    for a, b in zip(qtensors(state), qtensors(alone[1]), strict=True):
        assert jnp.abs(a.values.astype(int) - jax.device_get(b.values)).max() <= 1


# The format of the choices.


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("signed", [True, False])
def test_squares_are_the_squares_of_even_steps(bits, signed):
    form, mode = jqx.numerics.Squares(bits, signed), jqx.RoundMode.NEAREST_TOWARD_EVEN
    low, high = form.code_range
    codes = np.arange(low, high + 1)
    roots = codes / high if signed else (codes + 1) / 2**bits
    numbers = np.asarray(form.decode(on_device(codes, form.storage)), np.float64)
    np.testing.assert_allclose(numbers, roots * np.abs(roots), rtol=2e-7)
    assert len(codes) == form.levels and numbers[-1] == form.high and numbers[0] == form.low
    assert (numbers > 0).all() != signed
    between = (roots[1:] + roots[:-1]) / 2
    near = np.concatenate([numbers, *(r * np.abs(r) for r in (between - 1e-4, between + 1e-4))])
    found = np.asarray(jax.jit(form.encode, static_argnums=1)(on_device(near, np.float32), mode))
    np.testing.assert_array_equal(found, [*codes, *codes[:-1], *codes[1:]])
    ends = form.encode(on_device(np.float32([-np.inf, -9, 9, np.inf, np.nan, 0])), mode)
    nearest_to_zero = 0
    np.testing.assert_array_equal(ends, [low, low, high, high, *[nearest_to_zero] * 2])


def test_squares_are_refused_where_there_are_none():
    for wrong in ({"bits": 1}, {"bits": 9}, {"bits": 2.5}, {"signed": 1}):
        with pytest.raises((TypeError, ValueError), match=r"numerics\.Squares"):
            jqx.numerics.Squares(**wrong)
    names = [str(jqx.numerics.Squares(bits, signed)) for bits, signed in ((4, True), (8, False))]
    assert names == ["squares4", "usquares8"]


# Errors.


def of_adam(specs, params=None):
    return jqx.optim.quantized(optax.adam(1e-3), specs).init(params or {"w": jnp.ones(4)})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: of_adam({"m": "8bit"}), ValueError, "no field 'm' that.*\n.*some of mu, nu"),
        (lambda: of_adam({"count": "8bit"}), ValueError, "no field 'count' that holds floats"),
        (lambda: of_adam({"mu": "8bits"}), ValueError, "the choice '8bits' for 'mu'.*\n.*'8bit', "),
        (lambda: of_adam({"mu": "int8:size=3"}), ValueError, "the option 'size=3' is unknown"),
        (lambda: of_adam({"mu": 8}), TypeError, r"`specs\['mu'\]` is neither a QSpec nor a scheme"),
        (lambda: of_adam({}), ValueError, "`specs` does not name fields"),
        (lambda: of_adam("8bit"), TypeError, "`specs` is not a Mapping"),
        (lambda: of_adam({0: "8bit"}), ValueError, "`specs` does not name fields"),
        (lambda: jqx.optim.quantized(1e-3, ADAM), TypeError, "`tx` is not a gradient trans"),
        (lambda: jqx.optim.quantized(optax.adam(1.0)), TypeError, "missing a required .*'specs'"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_second_moment_with_a_zero_is_a_warning():
    with pytest.warns(UserWarning, match="int8 rounds small second moments .`nu`. to 0"):
        jqx.optim.quantized(optax.adam(1e-3), {"nu": "int8:group=256"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jqx.optim.quantized(optax.adam(1e-3), {"mu": "int8:group=256", "nu": "8bit_positive"})


def test_an_error_says_how_to_install_optax(monkeypatch):
    tx = optax.adam(1e-3)
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"pip install 'jqx\[optim\]'"):
        jqx.optim.quantized(tx, ADAM)


# What training comes to.


def ratio(network, name, choice, steps, seeds):
    """The mean final loss with a quantized state, relative to the one with a float state."""
    plain = optimizer(name, steps)
    tx = jqx.optim.quantized(plain, choices(FIELDS[name], choice))
    float_losses, found = (losses(network, t, steps, seeds) for t in (plain, tx))
    assert jnp.isfinite(found).all() and (found < 1.2 * float_losses).all()  # none diverged
    return float(found.mean() / float_losses.mean())


@pytest.mark.parametrize("name", FIELDS)
def test_eight_bits_train_as_float32_does(name):
    assert abs(ratio("dense", name, "8bit", 200, jnp.arange(2)) - 1) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", FIELDS)
def test_eight_bits_train_as_float32_does_with_ten_seeds(name, network):
    assert abs(ratio(network, name, "8bit", 400, jnp.arange(10)) - 1) < 0.01


def test_training_with_codes_and_bfloat16_ends_where_float32_does():
    """Four bytes for a parameter and its moments, in place of twelve."""
    x, y = labelled(0, 10)
    rows = jax.random.randint(jax.random.key(1), (300, 64), 0, len(x))
    plain = optax.adam(optax.cosine_decay_schedule(3e-3, 300))
    codes = jqx.optim.quantized(plain, ADAM)

    def trained(tx, dtype):
        def step(carry, rows):
            params, state = carry
            grads = jax.grad(lambda p: dense_loss(widened(p), x[rows], y[rows]))(params)
            updates, state = tx.update(grads, state, params)
            return (jqx.optim.apply_updates(params, updates), state), None

        params = jax.tree.map(lambda p: p.astype(dtype), dense_init(jax.random.key(0)))
        params, _ = jax.lax.scan(step, (params, tx.init(params)), rows)[0]
        return dense_loss(widened(params), x, y)

    def widened(params):
        return jax.tree.map(lambda p: p.astype(jnp.float32), params)

    half = jqx.optim.stochastic_bf16(codes, 0)
    expected, found = jax.jit(lambda: (trained(plain, jnp.float32), trained(half, jnp.bfloat16)))()
    assert abs(found / expected - 1) < 0.02
