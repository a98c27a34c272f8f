"""Everything that can be reached of a quantized module runs quantized, or is refused.
Every call runs the float module once.
"""

import abc
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

from ..arrays import normal

POLICY = jqx.presets.w8a8_dynamic()
X = normal(1, 4, 8)
T = typing.TypeVar("T")


class Mixin:
    """Methods and properties of a class that knows nothing of Flax."""

    def encode(self, x):
        return self.inner(x)

    def times(self, x, factor):
        return factor * self.inner(x)

    twice = functools.partialmethod(times, factor=2.0)

    @property
    def of_ones(self):
        return self.inner(jnp.ones((1, 8)))

    @property
    def width(self):
        return self.inner.features

    def _get_inner(self):
        return self.inner

    def part(self):
        return self.inner


class Base(nn.Module):
    activation: Callable = nn.relu

    def setup(self):
        self.inner = nn.Dense(8)
        self.layers = [nn.Dense(8), nn.Dense(8)]

    def __call__(self, x):
        return self.own(x) + 0 * sum(layer(x) for layer in self.layers)

    def own(self, x):
        return self._run(x)

    def _run(self, x):
        return self.inner(x)


class Behind(Base, Mixin):
    pass


class Before(Mixin, Base):
    pass


class Generic(Mixin, Base, typing.Generic[T]):
    pass


class Abstract(Mixin, abc.ABC):
    @abc.abstractmethod
    def own(self, x): ...


class Concrete(Abstract, nn.Module):
    setup, __call__ = Base.setup, Base.__call__

    def own(self, x):
        return super().encode(x)


class Two(Before):
    def encode(self, x):
        return super().encode(x)


KINDS = (Behind, Before, Generic, Concrete, Two)


def of(kind):
    plain = kind()
    return plain, jqx.linen.quantize(plain, POLICY), plain.init(jax.random.key(0), X)


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_every_base_are_quantized(kind):
    plain, module, variables = of(kind)
    expected = module.apply(variables, X, method="own")
    assert (expected != plain.apply(variables, X, method="own")).any()
    assert (module.apply(variables, X, method="encode") == expected).all()
    assert (module.apply(variables, X, method="twice") == 2 * expected).all()
    integers = module.clone(mode=Mode.CONVERT)
    converted = jqx.linen.convert(integers, variables, X)
    out = integers.apply(converted, X, method="encode")
    assert (out == integers.apply(converted, X, method="own")).all()
    assert jnp.abs(out - expected).max() <= 2.0**-18 * jnp.abs(expected).max()


WAYS = {
    "a function": lambda m, v: m.apply(v, X, method=lambda m, x: m.inner(x)),
    "a function, by keyword": lambda m, v: m.apply(v, x=X, method=lambda m, x: m.inner(x)),
    "a partial": lambda m, v: m.apply(v, method=functools.partial(lambda m, x: m.inner(x), x=X)),
    "unbound": lambda m, v: m.apply(v, X, method=Behind.own),
    "unbound of a mixin": lambda m, v: m.apply(v, X, method=Mixin.encode),
    "unbound of the quantized class": lambda m, v: m.apply(v, X, method=type(m).own),
    "bound": lambda m, v: m.apply(v, X, method=m.encode),
    "bound to the float module": lambda m, v: m.apply(v, X, method=Behind().encode),
    "a private method": lambda m, v: m.apply(v, X, method=lambda m, x: m._get_inner()(x)),
    "a method of a part": lambda m, v: m.apply(v, X, method=lambda m, x: m.inner.__call__(x)),
    "a class's": lambda m, v: m.apply(v, X, method=lambda m, x: nn.Dense.__call__(m.inner, x)),
    "nn.apply": lambda m, v: nn.apply(lambda m, x: m.inner(x), m)(v, X),
    "nn.apply of a method": lambda m, v: nn.apply(type(m).encode, m)(v, X),
    "bind": lambda m, v: m.bind(v).encode(X),
    "bind, a part": lambda m, v: m.bind(v).inner(X),
    "bind, a private method": lambda m, v: m.bind(v)._get_inner()(X),
    "bind, a method that gives a part": lambda m, v: m.bind(v).part()(X),
    "unbind": lambda m, v: m.bind(v).unbind()[0].apply(v, X, method="own"),
    "inside of another": lambda m, v: Outer(m).apply({"params": {"model": v["params"]}}, X),
}  # fmt: skip


class Outer(nn.Module):
    """Calls a part of a module that it has."""

    model: nn.Module

    def __call__(self, x):
        return self.model.inner(x)


@pytest.mark.parametrize("title", WAYS)
def test_a_part_is_quantized_however_it_is_reached(title):
    plain, module, variables = of(Behind)
    out = WAYS[title](module, variables)
    assert (out == module.apply(variables, X, method="own")).all()
    assert (out != plain.apply(variables, X, method="own")).any()
    same = WAYS[title](module.clone(mode=Mode.FLOAT), variables)
    assert (same == plain.apply(variables, X, method="own")).all()


def test_what_is_bound_reads_as_the_float_module():
    plain, module, variables = of(Behind)
    bound = module.bind(variables)
    assert bound.width == 8 and bound.activation is nn.relu
    assert (bound.of_ones == bound.inner(jnp.ones((1, 8)))).all()
    assert (bound.of_ones != plain.bind(variables).of_ones).any()
    x = jnp.stack([X[0], 3 * X[1]])
    assert (bound.layers[1](x) != plain.bind(variables).layers[1](x)).any()
    assert bound.layers[1].features == 8
    with pytest.raises(AttributeError, match="missing"):
        _ = bound.missing


def test_functions_are_calibrated_planned_and_converted():
    plain, _, variables = of(Behind)
    policy = jqx.presets.w8a8()
    observe = jqx.linen.quantize(plain, policy, mode=Mode.CALIBRATE)

    def two(module, x):
        return module.inner(module.inner(x))

    out, stats = observe.apply(variables, X, method=two, mutable=["quant_stats"])
    assert (out == plain.apply(variables, X, method=two)).all()
    variables = {**variables, **stats}
    module = observe.clone(mode=Mode.CONVERT)
    assert len(jqx.linen.make_plan(module, variables, X, method=two).sites) == 2
    converted = jqx.linen.convert(module, variables, X, method=two)
    assert set(converted["qparams"]) == {"inner"} and set(converted["params"]["layers_0"])
    simulated = observe.clone(mode=Mode.SIMULATE).apply(variables, X, method=two)
    out = module.apply(converted, X, method=two)
    assert jnp.abs(out - simulated).max() <= 2.0**-18 * jnp.abs(out).max()


def test_modules_among_the_fields():
    plain = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8)])
    variables = plain.init(jax.random.key(0), X)
    module = jqx.linen.quantize(plain, POLICY)
    assert (module.apply(variables, X) != plain.apply(variables, X)).any()
    first = module.apply(variables, X, method=lambda m, x: m.layers[0](x))
    assert (first != plain.apply(variables, X, method=lambda m, x: m.layers[0](x))).any()
    with pytest.raises(Exception, match="unbound"):
        module.bind(variables).layers[0](X)
    lifted = nn.remat(type(module))
    again = lifted(plain.layers, policy=POLICY).apply(variables, X)
    assert (again == module.apply(variables, X)).all()


@pytest.mark.parametrize("method", ["own", Behind.own, lambda m, x: m.inner(x)])
def test_init_by_a_method(method):
    plain, module, _ = of(Behind)
    key = jax.random.key(0)
    out, variables = module.init_with_output(key, X, method=method)
    expected, want = plain.init_with_output(key, X, method=method)
    assert (out == expected).all() and jax.tree.structure(variables) == jax.tree.structure(want)
    lazy = module.lazy_init(key, jax.ShapeDtypeStruct(X.shape, X.dtype), method=method)
    assert jax.tree.structure(lazy) == jax.tree.structure(want)


def test_methods_that_need_no_variables_run_unbound():
    cell = nn.GRUCell(4)
    module = jqx.linen.quantize(cell, POLICY)
    carry = module.initialize_carry(jax.random.key(0), X.shape)
    assert carry.shape == (4, 4)
    variables = module.init(jax.random.key(0), carry, X)
    assert (module.apply(variables, carry, X)[1] != cell.apply(variables, carry, X)[1]).any()


def test_a_layer_with_a_method_of_its_own_keeps_it():
    class Twice(jqx.linen.Dense):
        def twice(self, x):
            return self(self(x))

    layer = Twice(8, policy=POLICY)
    variables = layer.init(jax.random.key(0), X)
    once = layer.apply(variables, X)
    assert (layer.apply(variables, X, method="twice") == layer.apply(variables, once)).all()
    assert (
        layer.apply(variables, X, method=lambda m, x: m(m(x))) == layer.apply(variables, once)
    ).all()


TRACES = []
ONES = jnp.ones((1, 4))


class Counted(nn.Module):
    """A perceptron that tells how often it runs."""

    @nn.compact
    def __call__(self, x):
        TRACES.append(x)
        return nn.Dense(2)(nn.relu(nn.Dense(4)(x)))


@pytest.mark.parametrize("policy", [jqx.presets.w8a8(), jqx.presets.w8a8_dynamic()])
def test_every_mode_and_conversion_traces_the_module_once(policy):
    variables = Counted().init(jax.random.key(0), ONES)
    module = jqx.linen.quantize(Counted(), policy)
    integers = module.clone(mode=Mode.CONVERT)
    counts = []

    def counted(f):
        TRACES.clear()
        result = f()
        counts.append(len(TRACES))
        return result

    calibrate = module.clone(mode=Mode.CALIBRATE)
    _, seen = counted(lambda: calibrate.apply(variables, ONES, mutable=["quant_stats"]))
    variables = {**variables, **seen}
    counted(lambda: module.apply(variables, ONES))
    codes = counted(lambda: jqx.linen.convert(integers, variables, ONES))
    counted(lambda: integers.apply(codes, ONES))
    assert counts == [1] * 4
