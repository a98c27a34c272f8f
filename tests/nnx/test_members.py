"""Everything that can be used of a quantized model from outside runs quantized, or is refused."""

import abc
import contextlib
import dataclasses
import functools
import types
import typing

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.nnx import Mode, QParam

from ..arrays import normal

POLICY = jqx.presets.w8a8_dynamic()
X = normal(1, 4, 8)
T = typing.TypeVar("T")


class Mixin:
    """Methods, a property and a cached one, of a class that knows nothing of Flax."""

    def encode(self, x):
        return self.inner(x)

    def times(self, x, factor):
        return factor * self.inner(x)

    twice = functools.partialmethod(times, factor=2.0)

    @property
    def gram(self):
        return X @ self.inner.kernel[...]

    @functools.cached_property
    def gram_once(self):
        return X @ self.inner.kernel[...]

    @property
    def width(self):
        return self.inner.out_features

    @property
    def is_deep(self):
        return bool((self.inner.bias[...] == 0).all())

    @width.setter
    def width(self, width):
        self.asked = width

    @property
    def layer(self):
        return self.inner

    def __getitem__(self, x):
        return self.inner(x)


class Abstract(abc.ABC):
    @abc.abstractmethod
    def __call__(self, x): ...

    def encode(self, x):
        return self.inner(x)


class Hooked:
    """Wants to be told of each kind, by name."""

    def __init_subclass__(cls, *, label, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.label = label


class Meta(type(nnx.Module)):
    def __new__(mcls, name, bases, namespace, **kwargs):
        return super().__new__(mcls, name, bases, {**namespace, "made_by": mcls}, **kwargs)


def build(*bases, **options):
    """A module class with these bases, in this order."""

    def init(self, rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)

    def call(self, x):
        return self.inner(x)

    body = {"__init__": init, "__call__": call}
    return types.new_class("Model", bases, options, lambda space: space.update(body))


class Base(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        self.found, self.wanted = 1, None

    def __call__(self, x):
        return self._run(x)

    def _run(self, x):
        return self.inner(x)

    def encode(self, x):
        return self.inner(x)


class Middle(Mixin, Base):
    def encode(self, x):
        return super().encode(x)


class Bottom(Middle):
    def __call__(self, x):
        return super().__call__(x) + 0.0


class Made(Mixin, nnx.Module, metaclass=Meta):
    __init__, __call__, _run = Base.__init__, Base.__call__, Base._run


@dataclasses.dataclass
class Data(Mixin, nnx.Module):
    rngs: dataclasses.InitVar[nnx.Rngs]
    activation: typing.Callable = nnx.relu

    def __post_init__(self, rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


KINDS = {
    "mixin before": build(Mixin, nnx.Module),
    "mixin behind": build(nnx.Module, Mixin),
    "generic": build(Mixin, nnx.Module, typing.Generic[T]),
    "generic before": build(typing.Generic[T], Mixin, nnx.Module),
    "a generic of a type": build(build(typing.Generic[T], Mixin, nnx.Module)[int]),
    "abstract": build(nnx.Module, Abstract),
    "abstract before": build(Abstract, nnx.Module),
    "hooked": build(Hooked, Mixin, nnx.Module, label="seen"),
    "no pytree": build(Mixin, nnx.Module, pytree=False),
    "inherited": Base,
    "inherited twice": Bottom,
    "metaclass": Made,
    "dataclass": Data,
}


@pytest.mark.parametrize("title", KINDS)
def test_methods_of_every_base_are_quantized(title):
    plain = KINDS[title](nnx.Rngs(0))
    model = jqx.nnx.quantize(plain, POLICY)
    assert isinstance(model, KINDS[title]) and type(plain) is KINDS[title]
    expected = model(X)
    assert (expected != plain(X)).any()
    assert (model.encode(X) == expected).all()
    assert (model.inner(X) == expected).all()
    jqx.nnx.convert(model, X)
    assert (model.encode(X) == model(X)).all()
    assert (model.inner(X) == model(X)).all()
    assert jnp.abs(model(X) - expected).max() <= 2.0**-18 * jnp.abs(expected).max()
    model.mode = Mode.FLOAT
    assert jnp.abs(model.encode(X) - plain(X)).max() < 0.05
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(nnx.clone(model)))


def test_members_of_every_kind():
    plain = KINDS["mixin behind"](nnx.Rngs(0))
    model = jqx.nnx.quantize(plain, POLICY)
    expected = model(X)
    assert (model.twice(X) == 2 * expected).all()
    assert (model[X] == expected).all()
    for once in (model.gram, model.gram_once):
        assert (once == expected).all() and (once != plain.gram).any()
    assert model.width == 8 and model.is_deep is True
    model.width = 3
    assert model.asked == 3
    assert model.layer is model.inner
    assert model.inner.kernel[...].shape == (8, 8)
    step = nnx.jit(lambda model, x: model.inner(x))
    assert (step(model, X) == expected).all()
    jqx.nnx.convert(model, X)
    assert isinstance(model.layer.kernel, QParam)
    assert (step(model, X) == model(X)).all()
    assert (model.gram == model(X)).all()
    model.set_attributes(mode=Mode.FLOAT)
    assert jnp.abs(model.inner(X) - plain(X)).max() < 0.05


class Deep(nnx.Module):
    """Parts inside of parts, in lists, with contractions of their own."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Base(rngs), Base(rngs)])
        self.scores = Scores()

    def __call__(self, x):
        for block in self.blocks:
            x = block.encode(x)
        return self.scores(x)

    def stream(self, x):
        for block in self.blocks:
            yield block(x)

    def bound(self):
        return self.blocks[0].encode

    def closed(self):
        return lambda x: self.blocks[0](x)

    @contextlib.contextmanager
    def within(self):
        yield self.blocks[0]

    def part(self, i):
        return self.blocks[i]

    def made(self):
        return nnx.Sequential(self.blocks[0], self.blocks[1])

    @staticmethod
    def of(model, x):
        return model.blocks[0](x)


class Scores(nnx.Module):
    def __call__(self, x):
        return x @ x.T


def test_parts_are_quantized_by_the_rules_of_the_whole():
    spec = jqx.QSpec(jnp.int8, jqx.per_channel())
    policy = jqx.Policy([jqx.Rule("blocks/1/inner/kernel", weight=spec)])
    plain = Deep(nnx.Rngs(0))
    model = jqx.nnx.quantize(plain, policy)
    assert (model.blocks[0](X) == plain.blocks[0](X)).all()
    assert (model.blocks[1](X) != plain.blocks[1](X)).any()
    assert (model.blocks[1].encode(X) == model.blocks[1].inner(X)).all()
    assert model.part(1) is model.blocks[1]
    jqx.nnx.convert(model, X)
    kinds = [type(block.inner.kernel) for block in model.blocks]
    assert kinds == [nnx.Param, QParam]
    rows = jqx.QSpec(jnp.int8, jqx.per_channel(), dynamic=True)
    model = jqx.nnx.quantize(plain, jqx.Policy([jqx.Rule(activation=rows)]))
    assert (model.scores(X) != plain.scores(X)).any()
    assert (model.of(model, X) == model.blocks[0](X)).all()


@pytest.mark.parametrize("name", ["stream", "bound", "closed", "within", "made"])
def test_what_runs_later_is_refused(name):
    model = jqx.nnx.quantize(Deep(nnx.Rngs(0)), POLICY)
    args = (X,) if name == "stream" else ()
    with pytest.raises(ValueError, match=rf"(?s)`{name}` returns .*fix"):
        getattr(model, name)(*args)
    model.set_attributes(mode=Mode.FLOAT)
    getattr(model, name)(*args)


def test_statistics_and_learned_scales_are_the_wholes_alone():
    policy = jqx.presets.w8a8(weight={"gradient": jqx.gradients.lsq})
    model = jqx.nnx.quantize(Deep(nnx.Rngs(0)), policy, mode=Mode.CALIBRATE)
    model(X)
    match = r"(?s)Linear: `__call__` of a part.*blocks/0/inner.*fix"
    with pytest.raises(ValueError, match=match):
        model.blocks[0].inner(X)
    jqx.nnx.learn_scales(model, X)
    with pytest.raises(ValueError, match=r"(?s)Base: `encode` of a part.*learned scales"):
        model.blocks[0].encode(X)
    with pytest.raises(ValueError, match=r"(?s)quantize: this Base is quantized already"):
        jqx.nnx.quantize(model.blocks[0], POLICY)


def test_parts_of_a_layer():
    layer = jqx.nnx.MultiHeadAttention(2, 8, decode=False, policy=POLICY, rngs=nnx.Rngs(0))
    plain = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    assert (layer.query(X) != plain.query(X)).any()
    jqx.nnx.convert(layer, X)
    assert jnp.abs(layer.query(X) - plain.query(X)).max() < 0.05
