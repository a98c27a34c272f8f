"""The variables of quantized nnx modules, how each mode uses them, and classes that wrap a float
class.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from ..calibrators.calibrator import Affine
from ..errors import fail
from ..modules.members import forwards, read
from ..modules.quantized_function import (
    Mode,
    QuantizedFunction,
    Scales,
    Search,
    check_mode,
    check_options,
    flatten,
    needs_key,
    overlay,
)
from ..policy import Policy
from ..transforms.plan import Plan

Run = Callable[..., Any]
"""A function of a float module and of arguments."""

CONTAINERS = {*nnx.List.__mro__, *nnx.Dict.__mro__}
"""Bases of modules whose methods compute nothing."""

STATE = ("quant_stats", "quant_scales", "learned_scales", "quant_rng", "quant_found")
"""Attributes of `State` that hold variables."""


class QParam(nnx.Variable[Any]):
    """A quantized weight: a `jqx.QTensor`, where the float module has an `nnx.Param`.

    It is not an `nnx.Param`, so that gradients with respect to `nnx.Param` leave it out.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a16(), rngs=nnx.Rngs(0))
      >>> jqx.nnx.convert(layer, jnp.ones((1, 4)))
      >>> isinstance(layer.kernel, jqx.nnx.QParam)
      True
      >>> list(nnx.state(layer, nnx.Param))
      ['bias']
    """


class Stat(nnx.Variable[Any]):
    """Statistics of activations, written in `Mode.CALIBRATE`. They are nested dicts, initially
    empty, with each entry at the path of its weight, such as `kernel:dot_general:lhs`.

    Under `nnx.scan` and `nnx.vmap` over layers, statistics need the axis of the layers, as
    parameters do: Flax drops writes to variables with axis `None`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8(), "mode": jqx.nnx.Mode.CALIBRATE}
      >>> layer = jqx.nnx.Linear(4, 2, **options, rngs=nnx.Rngs(0))
      >>> out = layer(jnp.ones((1, 4)))
      >>> list(layer.quant_stats)
      ['kernel:dot_general:lhs']
    """


class Scale(nnx.Variable[Any]):
    """Fixed scales of activations, from `fix_scales` or `convert`: nested dicts as in `Stat`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a8(), rngs=nnx.Rngs(0))
      >>> jqx.nnx.fix_scales(layer, jnp.full((1, 4), 127.0), scales="dynamic")
      >>> layer.quant_scales["kernel:dot_general:lhs"].scale
      Array([[1.]], dtype=float32)
    """


class SearchResult(nnx.Variable[Any]):
    """What a run of `convert`, `fix_scales` or `learn_scales` finds for one module: codes, scales
    and learned scales, by these names. Only the copy that is run has this variable.
    """

    search: Search


class Wrapper(nnx.Module):
    """Base of the classes that wrap a float class: whole quantized modules and their parts."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Calls Flax's hook, but not the float class's, which is for its own subclasses."""
        hook: Any = nnx.Module.__init_subclass__
        hook.__func__(cls, **kwargs)

    def _q_is_plain(self) -> bool:
        """Returns whether a call runs the method of the float class unchanged."""
        raise NotImplementedError

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, Any]:
        """Returns `run`, a function of the float module, as one of weights, and as a pure call."""
        raise NotImplementedError

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function of the float module through the transforms."""
        raise NotImplementedError

    def _q_evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method `name` of the float class."""
        if self._q_is_plain():
            return getattr(super(), name)(*args, **kwargs)
        return self._q_call(name, method(name), args, kwargs)

    def _q_read(self, name: str) -> Any:
        """Reads the property `name` of the float class, in float if it contracts nothing."""
        run = functools.partial(read, float_class(type(self)), name=name)
        if not self._q_is_plain():
            call, pure = self._q_function(name, run, (), {})
            with contextlib.suppress(jax.errors.ConcretizationTypeError):
                if call.plan(pure.params).sites:
                    return self._q_call(name, run, (), {})
        return run(self)

    def _q_plan(self, name: str, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call of a method."""
        call, pure = self._q_function(name, method(name), args, kwargs)
        return call.plan(pure.params)


class State(Wrapper):
    """Base of nnx modules that have a policy and a mode.

    Attributes:
      policy: what is quantized; paths are those of the parameters inside this module.
      mode: what a call computes; `model.set_attributes(mode=...)` sets it in all modules.
      backward: `None`, or the dtype of the backward pass of `Mode.SIMULATE`, whose forward pass
        then runs on integers, see `jqx.simulate`.
      quant_dynamic: whether scales of static activations and outputs that are not calibrated are
        computed from the values of the call: `scales="dynamic"`.
      quant_stats: statistics. The variable always exists; only its contents change.
      quant_scales: fixed scales of activations. The variable always exists.
      learned_scales: scales that are trained, from `learn_scales`: nested dicts of arrays.
      quant_rng: stream of random numbers, for gradient estimators that draw them.
      quant_found: what `convert` and similar functions look for, on the copy that they run; else
        `None`.
    """

    policy: Policy
    mode: Mode
    backward: DTypeLike | None
    quant_dynamic: bool
    quant_stats: Stat
    quant_scales: Scale
    learned_scales: nnx.Param[Any] | None
    quant_rng: nnx.RngStream | None
    quant_found: SearchResult | None = None

    def _q_set_up(
        self,
        policy: Policy,
        mode: Mode,
        backward: DTypeLike | None,
        scales: Scales,
        rngs: nnx.Rngs | None,
    ) -> None:
        name = type(self).__name__
        check_options(name, policy, mode, scales)
        draws = needs_key(policy)
        if draws and rngs is None:
            raise fail(
                name,
                "a gradient estimator of the policy draws random numbers, and there are no `rngs`.",
                fix="pass rngs=nnx.Rngs(params=0, quant=1); it takes a fork of the stream `quant`.",
            )
        self.policy, self.mode, self.backward = policy, mode, backward
        self.quant_dynamic = scales == "dynamic"
        self.quant_stats, self.quant_scales = Stat({}), Scale({})
        self.learned_scales = nnx.data(None)
        self.quant_rng = rngs["quant"].fork() if draws and rngs is not None else nnx.data(None)

    def _q_known(self) -> dict[str, Any]:
        """Returns statistics and scales, as arguments of `QuantizedFunction`."""
        scales = flatten(self.quant_scales.get_value())
        if self.learned_scales is not None:
            learned = flatten(self.learned_scales.get_value())
            scales |= {key: Affine(scale) for key, scale in learned.items()}
        if self.quant_found is not None:
            for kind in ("scales", "learned"):
                scales |= flatten(self.quant_found.get_value().get(kind, {}))
        stats = flatten(self.quant_stats.get_value())
        return {"stats": stats, "scales": scales, "dynamic": self.quant_dynamic}

    def _q_run(self, call: QuantizedFunction, params: Mapping[str, Any]) -> Any:
        """Evaluates a function in this mode, and stores the statistics or scales that it finds."""
        check_mode(type(self).__name__, self.mode)
        result, search, codes = self.quant_found, None, {}
        if result is not None:
            search, codes = result.search, result.get_value().get("codes", {})

        def store(kind: str, tree: dict[str, Any]) -> None:
            if result is None:
                self.quant_stats.set_value(tree)
            else:
                stored = result.get_value()
                result.set_value({**stored, kind: overlay(stored.get(kind, {}), tree)})

        def draw_key() -> jax.Array | None:
            return None if self.quant_rng is None else self.quant_rng()

        return call.run(params, self.mode, search, store, self.backward, draw_key, codes)


@functools.cache
def wrapper_class(kind: type[nnx.Module], base: type[Wrapper], name: str) -> type[Any]:
    """Returns a class with bases `base` and `kind`, whose every public method and property goes
    through `base`. A float module can become an instance: its memory layout is that of `kind`.
    """
    namespace = {**forwards(kind, CONTAINERS), "__doc__": kind.__doc__}
    namespace |= {"__module__": kind.__module__}
    pytree = getattr(kind, "_pytree__is_pytree", True)
    wrapper = _meta(type(kind))(name, (kind, base), namespace, pytree=pytree)
    wrapper._pytree__nodes = kind._pytree__nodes
    return wrapper


def has_members(kind: type[nnx.Module]) -> bool:
    """Returns whether a class has methods or properties other than those of containers."""
    return bool(forwards(kind, CONTAINERS))


def float_class(kind: type) -> type:
    """Returns the float class that a quantized class is made from."""
    return next(base for base in kind.__mro__ if not issubclass(base, Wrapper))


def method(name: str) -> Run:
    """Returns a function that calls a method of a module."""
    return lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)


def become(module: nnx.Module, kind: type) -> None:
    """Makes a module an instance of another class, so that all references to it stay valid."""
    object.__setattr__(module, "__class__", kind)


@contextlib.contextmanager
def as_float(modules: list[nnx.Module]) -> Iterator[None]:
    """Makes modules instances of their float classes inside the context."""
    kinds = [type(module) for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        become(module, float_class(kind))
    try:
        yield
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            become(module, kind)


@functools.cache
def _meta(kind: type[type]) -> Callable[..., type]:
    """Returns a metaclass that keeps the order of bases in memory, but looks up `Wrapper` first."""

    def mro(cls: type) -> list[type]:
        cls_itself, *bases = type.mro(cls)
        return [cls_itself, *sorted(bases, key=lambda base: not issubclass(base, Wrapper))]

    return type(f"Wrapper{kind.__name__}", (kind,), {"mro": mro})
