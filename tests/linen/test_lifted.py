"""Quantized modules under Flax's lifted transforms, and lifted transforms inside of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx._src.modules.quantized_function import flatten, nest, overlay
from jqx.linen import Mode

from ..arrays import normal

LAYERS, WIDTH = 3, 8
POLICY = jqx.presets.w8a8()
ALL = {"params": 0, "qparams": 0, "quant_stats": 0, "quant_scales": 0, "learned_scales": 0}
X = normal(1, 4, WIDTH)
ROUNDING = 2 * (LAYERS + 1) * WIDTH * 2.0**-24
"""Between two programs: of the terms of each layer's float sums, relative to the largest result."""


class Block(nn.Module):
    """One residual layer, as a step of a scan."""

    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(self.dense(WIDTH, name="dense")(x)), None


class Stack(nn.Module):
    """Blocks under a lifted transform, and a head."""

    form: str
    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        dense = self.dense
        if self.form == "scan":
            kind = nn.scan(Block, variable_axes=ALL, split_rngs={"params": True}, length=LAYERS)
            x, _ = kind(dense, name="blocks")(x, None)
        elif self.form == "remat":
            x, _ = nn.remat(Block)(dense, name="blocks")(x)
        elif self.form == "remat_scan":
            kind = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes=ALL,
                split_rngs={"params": True},
                length=LAYERS,
            )
            x, _ = kind(dense, name="blocks")(x, None)
        elif self.form == "vmap":
            kind = nn.vmap(
                Block,
                in_axes=(None,),
                out_axes=0,
                axis_size=LAYERS,
                variable_axes=ALL,
                split_rngs={"params": True},
            )
            x = kind(dense, name="blocks")(x)[0].sum(0)
        elif self.form == "jit":
            x, _ = nn.jit(Block)(dense, name="blocks")(x)
        return dense(2, name="head")(x)


FORMS = ("scan", "remat", "remat_scan", "vmap", "jit")


@functools.cache
def variables(form):
    return jax.jit(Stack(form).init)(jax.random.key(0), X)


def of_layers(form, mode):
    return Stack(form, functools.partial(jqx.linen.Dense, policy=POLICY, mode=mode))


def of_whole(form, mode):
    return jqx.linen.quantize(Stack(form), POLICY, mode=mode)


@pytest.mark.many
@pytest.mark.parametrize("make", [of_layers, of_whole])
@pytest.mark.parametrize("form", FORMS)
def test_a_module_of_lifted_layers(form, make):
    """Both ways give what the transforms give; under vmap the layers see one member at a time."""
    stack, known = Stack(form), variables(form)

    def function(params, x):
        return stack.apply({"params": params}, x)

    plan = jqx.make_plan(function, POLICY)(known["params"], X)
    made = jax.jit(make(form, Mode.SIMULATE).init)(jax.random.key(0), X)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), made, known))

    @jax.jit
    def observed(known, x):
        by_module = make(form, Mode.CALIBRATE).apply(known, x, mutable=["quant_stats"])
        stats = jqx.calibrate(function, plan)(known["params"], x)[1]
        return *by_module, stats, function(known["params"], x)

    out, new, stats, plain = observed(known, X)
    affines = jqx.affines(plan, stats)
    assert jnp.abs(out - plain).max() <= ROUNDING * jnp.abs(plain).max()
    each = form == "vmap" and make is of_layers  # a layer under vmap has statistics of its own
    if not each:
        assert flatten(new["quant_stats"]).keys() == stats.keys()
        same = jax.tree.map(lambda a, b: (a == b).all(), new["quant_stats"], nest(stats))
        assert jax.tree.all(same)

    def loss(params, new):
        trained = make(form, Mode.SIMULATE).apply({**known, **new, "params": params}, X)
        return (trained**2).sum(), trained

    @jax.jit
    def simulated(params, new):
        expected = jqx.simulate(function, plan, affines)(params, X)
        return *jax.grad(loss, has_aux=True)(params, new), expected

    gradient, trained, expected = simulated(known["params"], new)
    if not each:
        assert jnp.abs(trained - expected).max() <= ROUNDING * jnp.abs(expected).max()
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(gradient))

    module = make(form, Mode.CONVERT)
    converted = jqx.linen.convert(module, {**known, **new}, X)
    quantized = jqx.quantize_params(known["params"], plan)
    weights = overlay(converted["params"], converted["qparams"])
    same = jax.tree.map(lambda a, b: a.shape == b.shape and (a == b).all(), weights, quantized)
    assert jax.tree.all(same)
    out = jax.jit(module.apply)(converted, X)
    assert jnp.abs(out - trained).max() <= ROUNDING * jnp.abs(out).max()


@pytest.mark.parametrize("form", ["scan", "remat", "vmap", "jit"])
def test_a_whole_quantized_module_under_a_lifted_transform(form):
    """What `quantize` returns is a linen module, so it can be lifted itself."""

    class Outer(nn.Module):
        mode: Mode

        @nn.compact
        def __call__(self, x):
            kind = type(jqx.linen.quantize(Block(parent=None), POLICY))
            options = {"policy": POLICY, "mode": self.mode, "name": "blocks"}
            if form == "scan":
                lifted = nn.scan(kind, variable_axes=ALL, split_rngs={"params": True}, length=3)
                return lifted(**options)(x, None)[0]
            if form == "vmap":
                lifted = nn.vmap(
                    kind,
                    in_axes=(None,),
                    variable_axes=ALL,
                    split_rngs={"params": True},
                    axis_size=3,
                )
                return lifted(**options)(x)[0].sum(0)
            lifted = {"remat": nn.remat, "jit": nn.jit}[form](kind)
            return lifted(**options)(x)[0]

    @jax.jit
    def run(key, x):
        known = Outer(Mode.FLOAT).init(key, x)
        plain = Outer(Mode.FLOAT).apply(known, x)
        _, new = Outer(Mode.CALIBRATE).apply(known, x, mutable=["quant_stats"])
        return known, plain, new, Outer(Mode.SIMULATE).apply({**known, **new}, x)

    known, plain, new, simulated = run(jax.random.key(0), X)
    assert 0 < jnp.abs(simulated - plain).max() < 0.1
    converted = jqx.linen.convert(Outer(Mode.CONVERT), {**known, **new}, X)
    kernel = converted["qparams"]["blocks"]["dense"]["kernel"]
    stacked = (3,) if form in ("scan", "vmap") else ()
    assert kernel.values.shape == (*stacked, WIDTH, WIDTH) and kernel.values.dtype == jnp.int8
    out = jax.jit(Outer(Mode.CONVERT).apply)(converted, X)
    assert jnp.abs(out - simulated).max() <= ROUNDING * jnp.abs(out).max()


def jitted(**kwargs):
    return functools.partial(nn.jit, **kwargs)


def remat(**kwargs):
    return functools.partial(nn.remat, **kwargs)


SCAN = functools.partial(
    nn.scan, variable_broadcast="params", split_rngs={"params": False}, length=4
)
LAYERED = functools.partial(
    nn.scan, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
)
VMAP = functools.partial(nn.vmap, variable_axes={"params": None}, split_rngs={"params": False})
MEMBERS = functools.partial(
    nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
)


def of_methods(lift):
    """A module of modules made in `setup`, with methods under a lifted transform."""

    class Inner(nn.Module):
        def setup(self):
            self.dense = nn.Dense(WIDTH)

        @lift
        def __call__(self, x, flag=None):
            return jnp.tanh(self.dense(x)) if flag is None else x

    class Net(Inner):
        def setup(self):
            self.inner, self.head = Inner(), nn.Dense(2)

        @lift
        def __call__(self, x, flag=None):
            return self.head(self.inner(x, None))

    return Net()


def of_class(lift):
    """The result of a lifted transform of a class, whose method takes a static argument."""

    class Net(nn.Module):
        def setup(self):
            self.dense, self.head = nn.Dense(WIDTH), nn.Dense(2)

        def __call__(self, x, flag=True):
            return self.head(jnp.tanh(self.dense(x)) if flag else x), None

    return lift(Net)()


def of_steps(lift):
    """A module whose own method is a step of a loop."""

    class Net(nn.Module):
        def setup(self):
            self.dense = nn.Dense(WIDTH)

        @lift
        def __call__(self, h, x=None):
            return jnp.tanh(self.dense(h) if x is None else self.dense(h) + x), x

    return Net()


LIFTED = {
    "jit": (of_methods(nn.jit), (X,), {}),
    "jit, static name": (of_methods(jitted(static_argnames=("flag",))), (X,), {"flag": True}),
    "remat": (of_methods(nn.remat), (X,), {}),
    "remat, static number": (of_methods(remat(static_argnums=(2,))), (X, True), {}),
    "jit of a class": (of_class(nn.jit), (X,), {}),
    "jit of a class, static name": (
        of_class(jitted(static_argnames="flag")),
        (X,),
        {"flag": True},
    ),
    "jit of a class, static number": (of_class(jitted(static_argnums=2)), (X, True), {}),
    "remat of a class, static number": (of_class(remat(static_argnums=(2,))), (X, True), {}),
    "scan": (of_steps(SCAN), (X[0], X), {}),
    "scan over weights": (of_steps(LAYERED), (X, None), {}),
    "vmap": (of_steps(VMAP), (X, X), {}),
    "vmap over weights": (of_steps(MEMBERS), (X,), {}),
    "vmap of a class": (of_class(MEMBERS), (X,), {}),
}


@pytest.mark.many
@pytest.mark.parametrize("name", LIFTED)
def test_a_module_under_lifted_transforms_is_initialized_and_converted(name):
    """Flax makes such a module again from its fields, and defers `setup` into the new one."""
    net, args, kwargs = LIFTED[name]
    module = jqx.linen.quantize(net, jqx.presets.w8a8_dynamic(), mode=Mode.CONVERT)

    @jax.jit
    def run(key):
        actual = module.init(key, *args, **kwargs)
        plain = module.clone(mode=Mode.FLOAT).apply(actual, *args, **kwargs)
        converted = jqx.linen.convert(module, actual, *args, **kwargs)
        results = plain, module.apply(converted, *args, **kwargs)
        return actual, net.init(key, *args, **kwargs), net.apply(actual, *args, **kwargs), *results

    actual, known, expected, plain, quantized = run(jax.random.key(0))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), actual, known))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain, expected))
    y, exact = jax.tree.leaves(quantized)[0], jax.tree.leaves(expected)[0]
    assert 0 < jnp.abs(y - exact).max() < 0.05 * jnp.abs(exact).max()
