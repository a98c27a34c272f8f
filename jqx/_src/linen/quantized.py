"""Linen modules whose methods run through the transforms: `quantize`, and the base of layers."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
from flax import linen as nn
from flax.core import DenyList, meta, unfreeze
from flax.core.scope import intersect_filters
from jax.typing import DTypeLike

from ..checks import check_instance
from ..errors import fail
from ..modules.layers import forwards, read
from ..modules.quantized_function import (
    Mode,
    QuantizedFunction,
    Scales,
    Search,
    check_options,
    flatten,
    holds_codes,
    optional,
    overlay,
    split,
)
from ..policy import Policy
from ..transforms.plan import Plan
from ..transforms.quantize_params import dequantize_params

QPARAMS = "qparams"
"""Collection of quantized weights; `params` has the float ones."""

STATS = "quant_stats"
"""Collection of statistics, written in `Mode.CALIBRATE`."""

SCALES = "quant_scales"
"""Collection of fixed scales of activations."""

LEARNED = "learned_scales"
"""Collection that `learn_scales` reads; the scales themselves are in `params`."""

_COLLECTIONS = {"codes": QPARAMS, "stats": STATS, "scales": SCALES, "learned": LEARNED}

_SEARCH: contextvars.ContextVar[tuple[Search | None, bool]]
_SEARCH = contextvars.ContextVar("search", default=(None, False))

Method = str | Callable[..., Any]
"""What runs on a module: the name of a method, or a function of the module."""

Get = Callable[[nn.Module], Any]
"""A function that gets an attribute of a float module."""

_FIELDS = "__dataclass_fields__"


@contextlib.contextmanager
def searching(search: Search, *, dynamic: bool) -> Iterator[None]:
    """A context in which calls of quantized modules also search, and write what they find.
    `dynamic` computes scales that are not calibrated from the values of the call.
    """
    token = _SEARCH.set((search, dynamic))
    try:
        yield
    finally:
        _SEARCH.reset(token)


def current_search() -> Search | None:
    """Returns what `convert` and similar functions look for in addition to the result."""
    return _SEARCH.get()[0]


class Quantized(nn.Module, kw_only=True):
    """Base of modules whose methods run through the transforms, on the weights of a float module.

    A subclass names the float module as its second base.

    Attributes:
      policy: what is quantized; paths are those of the parameters inside this module.
      mode: what a call computes.
      backward: `None`, or the dtype of the backward pass of `Mode.SIMULATE`, whose forward pass
        then runs on integers, see `jqx.simulate`.
      scales: for static activations and outputs without scales, in `SIMULATE`, `CONVERT` and
        conversions: `"calibrated"` raises an error, `"dynamic"` computes scales from the values of
        the call.
    """

    policy: Policy
    mode: Mode = Mode.SIMULATE
    backward: DTypeLike | None = None
    scales: Scales = "calibrated"

    def __post_init__(self) -> None:
        check_options(type(self).__name__, self.policy, self.mode, self.scales)
        super().__post_init__()

    def _q_store(self, collection: str, tree: Mapping[str, Any]) -> None:
        """Writes variables of this module and of the modules inside it."""
        if tree and not self.is_mutable_collection(collection):
            raise fail(
                type(self).__name__,
                f"{self.mode} writes the collection {collection!r}, which is not mutable.",
                fix=f"pass mutable=[{collection!r}] to apply, and keep the variables that it "
                "returns with the result.",
            )
        for name, value in tree.items():
            old = self.get_variable(collection, name)
            self.put_variable(collection, name, _merge_boxed(old, value))

    def setup(self) -> None:
        if self._q_is_plain():
            super().setup()

    @nn.nowrap  # else Flax runs `setup` first, also where it defers that into a transform
    def _q_is_plain(self) -> bool:
        """Returns whether a call runs the method of the float module unchanged."""
        if self.scope is None or self.is_initializing():
            return True
        return self.mode is Mode.FLOAT and not holds_codes(dict(self.variables))

    @nn.nowrap
    def _q_evaluate(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the float module, or a function of the module."""
        if self._q_is_plain():
            float_self = super() if isinstance(method, str) else self
            with self._q_as_float():
                return call_method(float_self, method, *args, **kwargs)
        function, params, is_pair = self._q_function(method, args, kwargs)

        def store(kind: str, tree: dict[str, Any]) -> None:
            self._q_store(_COLLECTIONS[kind], tree)

        def draw_key() -> jax.Array | None:
            return self.make_rng("quant") if self.has_rng("quant") else None

        search = current_search()
        result = function.run(params, self.mode, search, store, self.backward, draw_key)
        if not is_pair:
            return result
        out, updated = result
        for collection, tree in updated.items():
            self._q_store(collection, unfreeze(tree))
        return out

    @contextlib.contextmanager
    def _q_as_float(self) -> Iterator[None]:
        """A context in which this module shows Flax the fields of its float class alone. A class
        that `nn.jit` or a similar function returns passes them all to the class that it lifts.
        """
        if _FIELDS in vars(self):  # one method calls another
            yield
            return
        object.__setattr__(self, _FIELDS, vars(float_class(type(self)))[_FIELDS])
        try:
            yield
        finally:
            object.__delattr__(self, _FIELDS)

    @nn.nowrap
    def clone(self, **updates: Any) -> Self:
        """Returns a copy with some fields changed, as `flax.linen.Module.clone` does."""
        own = [
            x for x in _field_names(type(self)) if x not in _field_names(float_class(type(self)))
        ]
        new = super().clone(**{name: getattr(self, name) for name in own} | updates)
        if _FIELDS in vars(self):
            object.__setattr__(new, _FIELDS, vars(self)[_FIELDS])
        return new

    def _q_plan(self, method: Method, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call."""
        function, params, _ = self._q_function(method, args, kwargs)
        return function.plan(params)

    def _q_function(
        self, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, dict[str, Any], bool]:
        """Returns a method as a function of weights, the weights, and whether the function also
        returns variables.
        """
        module, params, learned, others = self._q_float()
        assert self.scope is not None
        mutable = intersect_filters(
            self.scope.mutable, DenyList(("params", *_COLLECTIONS.values()))
        )
        is_main = method == "__call__" or current_search() is not None

        def function(params: Any, others: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            def run(bound: nn.Module, *args: Any) -> Any:
                return call_method(bound, method, *args, **kwargs)

            variables = {**others, "params": params}
            return module.apply(variables, *args, rngs=rngs, mutable=mutable, method=run)

        fixed, stats = (self.variables.get(name, {}) for name in (SCALES, STATS))
        quantized = QuantizedFunction(
            function=function,
            policy=self.policy if is_main else optional(self.policy),
            args=(others, dict(self.scope.rngs), *args),
            kwargs=kwargs,
            stats=flatten(stats),
            scales={**flatten(fixed), **flatten(learned)},
            dynamic=self.scales == "dynamic" or _SEARCH.get()[1],
            path="/".join(self.path),
            caller=type(self).__name__,
            converts="jqx.linen.convert(module, variables, ...)",
        )
        return quantized, params, mutable is not False

    def _q_float(self) -> tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Returns the float module, unbound, its weights, learned scales, and other collections."""
        variables = values(self.variables)
        params, learned = split(variables.pop("params", {}))
        params = overlay(params, variables.get(QPARAMS, {}))
        others = {key: tree for key, tree in variables.items() if key not in _COLLECTIONS.values()}
        free = self.clone(_deep_clone=True, _reset_names=True, parent=None)
        kind = float_class(type(self))
        module = kind(**{name: getattr(free, name) for name in _field_names(kind)}, parent=None)
        return module, params, learned, others

    def _q_bound(self) -> nn.Module:
        """Returns the float module, bound to its variables in float."""
        module, params, _, others = self._q_float()
        assert self.scope is not None
        variables = {**others, "params": dequantize_params(params)}
        rngs: Any = dict(self.scope.rngs)
        return module.bind(variables, rngs=rngs)


def quantize(
    module: nn.Module,
    policy: Policy,
    *,
    mode: Mode = Mode.SIMULATE,
    backward: DTypeLike | None = None,
    scales: Scales = "calibrated",
) -> Quantized:
    """Returns a copy of a module whose every public method runs through the transforms.

    `module` is not changed. The result is also an instance of its class, with its fields and its
    variables at the same paths. It can be a part of other modules, and works under Flax's lifted
    transforms. `result.clone(mode=...)` returns it in another mode. Also quantized are functions of
    the module that are passed to `apply` as `method=`, methods of bases and mixins, and everything
    that is reached through a bound module. In that last case, modules among the fields are left
    unbound.

    Args:
      module: any unbound linen module.
      policy: what is quantized; paths are those in `variables["params"]`.
      mode: what a call computes.
      backward: see `jqx.simulate`.
      scales: `"dynamic"` computes scales of static activations that are not calibrated from the
        values of the call. The default raises an error for them.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `module` is bound, is quantized already, or has a field named `policy`, `mode`,
        `backward` or `scales`; or if `scales` is unknown.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
      >>> x = jnp.ones((1, 4))
      >>> variables = model.init(jax.random.key(0), x)
      >>> quantized = jqx.linen.quantize(model, jqx.presets.w8a8_dynamic())
      >>> trained = quantized.apply(variables, x)
      >>> integers = quantized.clone(mode=jqx.linen.Mode.CONVERT)
      >>> small = jqx.linen.convert(integers, variables, x)
      >>> bool(jnp.allclose(integers.apply(small, x), trained))
      True
    """
    options = {"policy": policy, "mode": mode, "backward": backward, "scales": scales}
    return wrapped("linen.quantize", module, Whole, "Quantized", options)


def wrapped(
    name: str, module: nn.Module, base: "type[Whole]", prefix: str, options: Mapping[str, Any]
) -> Any:
    """Returns a copy of a float module as an instance of its class and of `base`, with the fields
    of `base` in `options`.
    """
    check_instance(name, "module", module, nn.Module, fix="pass a linen module.")
    kind = type(module)
    fields = _field_names(kind)
    problem = fix = ""
    if isinstance(module, Quantized):
        problem = "is quantized already"
        fix = "pass the float module, or change a quantized one by module.clone(mode=..., ...)."
    elif module.scope is not None:
        problem = "is bound to variables"
        fix = "pass it before it is bound; inside another module, make it with parent=None."
    elif reserved := sorted({*fields} & {*options}):
        problem = f"has fields with names that quantized modules use: {', '.join(reserved)}"
        fix = "rename these fields in the class of the module."
    if problem:
        raise fail(name, f"this module, of the class {kind.__name__}, {problem}.", fix=fix)
    values = {field: getattr(module, field) for field in fields}
    return _wrapper_class(kind, base, prefix)(**values, **options, name=module.name)


@functools.cache
def _wrapper_class(kind: type[nn.Module], base: "type[Whole]", prefix: str) -> type[Any]:
    """Returns the class of a quantized module: one for each float class and each base."""
    namespace = forwards(kind, nn.Module.__mro__)
    namespace.pop("setup", None)
    namespace |= {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return types.new_class(
        f"{prefix}{kind.__name__}", (base, kind), {}, lambda space: space.update(namespace)
    )


class Whole(Quantized, kw_only=True):
    """Base of modules that `quantize` makes. Everything that is reached through a bound module runs
    quantized.
    """

    def apply(self, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Applies a method: one of the class, a name, or any function of the module."""
        return super().apply(variables, *args, method=self._q_routed(method), **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._q_is_plain():
            return super().__getattr__(name)
        return _reached(self, lambda module: getattr(module, name))

    @nn.nowrap
    def _register_submodules(self, name: str, val: Any) -> None:
        """Leaves modules among the fields unbound, so that none of them runs in float."""
        if self._q_is_plain():
            super()._register_submodules(name, val)

    @nn.nowrap
    def _q_evaluate(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._q_evaluate(method, *args, **kwargs)
        modules = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, nn.Module)]
        if not modules or self._q_is_plain():
            return result
        if not isinstance(result, nn.Module):
            problem = f"a method returns a {type(modules[0]).__name__} among other values."
            fix = "return the module from a separate method."
            raise fail(type(self).__name__, problem, fix=fix)
        return _Part(self, lambda module: call_method(module, method, *args, **kwargs))

    def _q_read(self, name: str) -> Any:
        """Reads the property `name` of the float class, in float if it contracts nothing."""
        kind = float_class(type(self))
        if self._q_is_plain():
            return read(kind, self, name)

        def get(module: nn.Module) -> Any:
            return read(kind, module, name)

        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            if self._q_plan(get).sites:
                return self._q_evaluate(get)
        return _reached(self, get)

    def _q_routed(self, method: Any) -> Any:
        """Returns a method that Flax can call on this module."""
        is_method = isinstance(method, str) or callable(method)
        if not is_method or self._q_has(method):
            return method
        unbound = getattr(method, "__func__", method)

        def run(self: Whole, *args: Any, **kwargs: Any) -> Any:
            return self._q_evaluate(unbound, *args, **kwargs)

        return run

    def _q_has(self, method: Any) -> bool:
        """Returns whether a method, or the method of a name, runs quantized."""
        bases = [vars(base) for base in type(self).__mro__ if issubclass(base, Quantized)]
        if isinstance(method, str):
            return any(method in members for members in bases)
        method = getattr(method, "__func__", method)
        return any(method is member for members in bases for member in members.values())


class _Part:
    """A module inside a bound quantized module, whose methods run quantized."""

    def __init__(self, parent: Whole, get: Get):
        self._q_whole, self._q_get = parent, get

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _method(self._q_whole, self._q_get)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _reached(self._q_whole, lambda module: getattr(self._q_get(module), name))


def _method(parent: Whole, get: Get) -> Callable[..., Any]:
    """Returns a method of the float module, or of a module inside it, that runs quantized."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def on(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return get(module)(*args, **kwargs)

        return parent._q_evaluate(on, *args, **kwargs)

    return run


def _reached(parent: Whole, get: Get) -> Any:
    """Returns an attribute of a bound float module. Values are returned unchanged, modules and
    methods as objects that run quantized.
    """
    value = get(parent._q_bound())
    if isinstance(value, nn.Module):
        return _Part(parent, get)
    if inspect.ismethod(value) and isinstance(value.__self__, nn.Module):
        return _method(parent, get)
    if isinstance(value, (list, tuple, Mapping)):

        def item(key: Any) -> Any:
            return _reached(parent, lambda module: get(module)[key])

        if isinstance(value, Mapping):
            return {key: item(key) for key in value}
        return tuple(item(i) for i in range(len(value)))
    return value


def values(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables as nested dicts of values, without boxes such as `nn.Partitioned`."""
    return {name: unfreeze(meta.unbox(tree)) for name, tree in variables.items()}


def call_method(module: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a module, or a function of the module."""
    if isinstance(method, str):
        return getattr(module, method)(*args, **kwargs)
    return method(module, *args, **kwargs)


def float_class(kind: type) -> type[Any]:
    """Returns the float class that a quantized class is made from."""
    return next(base for base in kind.__mro__ if not issubclass(base, Quantized))


def _field_names(kind: type) -> list[str]:
    """Returns the fields of a class of modules, without those that place it in its parent."""
    fields = dataclasses.fields(kind)
    return [x.name for x in fields if x.init and x.name not in ("parent", "name")]


def _merge_boxed(old: Any, value: Any) -> Any:
    """Returns `old` updated by `value`. Values in boxes with axis names stay in such boxes."""
    if isinstance(old, Mapping) and isinstance(value, Mapping):
        return {**old, **{name: _merge_boxed(old.get(name), new) for name, new in value.items()}}
    if isinstance(old, meta.AxisMetadata):
        return old.replace_boxed(value)
    return value
