"""Nnx modules whose methods run through the transforms: `quantize`, and the base of layers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from ..checks import check_instance
from ..errors import fail, some
from ..modules.layers import forwards
from ..modules.quantized_function import (
    Mode,
    Scales,
    Search,
    check_mode,
    check_options,
    flatten,
    holds_codes,
    needs_calibration,
    needs_key,
    optional,
    overlay,
)
from ..policy import Policy
from ..statistics.calibrators import Affine
from .state import (
    CONTAINERS,
    STATE,
    QuantizedCall,
    Run,
    Scale,
    SearchResult,
    Stat,
    Wrapper,
    quantized_call,
    with_classes,
    wrapper_class,
    write_back,
)

COPIED = ("policy", "mode", "backward", "quant_dynamic")
"""Attributes of a quantized module that are copied to its parts."""

ATTRIBUTES = (*COPIED, *STATE)


class Quantized(Wrapper):
    """Base of modules whose methods run through the transforms, on the weights of a float module.

    A subclass names the float class as its second base. It takes the arguments of that class, plus
    the keyword arguments `policy`, `mode`, `backward` and `scales`, see `jqx.nnx.quantize`.

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

    def __init__(
        self,
        *args: Any,
        policy: Policy,
        mode: Mode = Mode.SIMULATE,
        backward: DTypeLike | None = None,
        scales: Scales = "calibrated",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._q_set_up(policy, mode, backward, scales, kwargs.get("rngs"))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in COPIED:
            update_parts(self, **{name: value})
        elif name == "learned_scales":
            update_parts(self, learned=value is not None)

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
        make_parts(self)

    def _q_is_plain(self) -> bool:
        return self.mode is Mode.FLOAT and not holds_codes(nnx.state(self))

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        check_mode(type(self).__name__, self.mode)
        call, params, graph = self._q_function(name, run, args, kwargs)
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

        written = call.run(params, self.mode, search, store, self.backward, draw_key, codes)
        return write_back(graph, written)

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> QuantizedCall:
        search = None if self.quant_found is None else self.quant_found.search
        scales = flatten(self.quant_scales.get_value())
        if self.learned_scales is not None:
            learned = flatten(self.learned_scales.get_value())
            scales |= {key: Affine(scale) for key, scale in learned.items()}
        if self.quant_found is not None:
            for kind in ("scales", "learned"):
                scales |= flatten(self.quant_found.get_value().get(kind, {}))
        is_main = name == "__call__" or search is not None
        options = {
            "policy": self.policy if is_main else optional(self.policy),
            "stats": flatten(self.quant_stats.get_value()),
            "scales": scales,
            "dynamic": self.quant_dynamic,
        }
        constant = search is Search.CODES
        return quantized_call(self, name, run, args, kwargs, constant=constant, **options)


def quantize(
    model: nnx.Module,
    policy: Policy,
    *,
    mode: Mode = Mode.SIMULATE,
    backward: DTypeLike | None = None,
    scales: Scales = "calibrated",
    rngs: nnx.Rngs | None = None,
) -> Any:
    """Returns a copy of a model whose every public method runs through the transforms.

    So do properties, and methods inherited from bases and mixins. The modules inside become parts
    of the model. A call of a part from outside follows the rules and the mode of the whole. It is
    an error if the call needs statistics or scales, which only the whole has.

    `model` is not changed: the result has new variables with the same values at the same paths. It
    is also an instance of the class of `model`. Shared variables stay shared, and are quantized
    once. A method is traced: it may write variables, but no other attributes. Every rule of the
    policy must match something in `__call__`, and in the method that `convert` and similar
    functions run. In other methods, such as one that makes a cache, rules may match nothing.

    Args:
      model: any nnx module.
      policy: what is quantized; paths are those of the parameters, such as `blocks/0/up/kernel`.
      mode: what a call computes; `result.set_attributes(mode=...)` changes it.
      backward: see `jqx.simulate`.
      scales: `"dynamic"` computes scales of static activations that are not calibrated from the
        values of the call. The default raises an error for them.
      rngs: for gradient estimators that draw random numbers: a fork of the stream `quant`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `model` or a part of it is quantized already; if it has an attribute with a
        name that quantized modules use; or if `scales` is unknown.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> rngs, x = nnx.Rngs(0), jnp.ones((1, 4))
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))
      >>> quantized = jqx.nnx.quantize(model, jqx.presets.w8a8_dynamic())
      >>> trained = quantized(x)
      >>> jqx.nnx.convert(quantized, x)
      >>> bool(jnp.allclose(quantized(x), trained))
      True
    """
    check_float("nnx.quantize", model, ATTRIBUTES)
    copy: Any = nnx.clone(model)
    kind = wrapper_class(type(model), Quantized, f"Quantized{type(model).__name__}")
    result = with_classes(copy, {id(copy): kind})
    result._q_set_up(policy, mode, backward, scales, rngs)
    return result


def check_float(function: str, model: Any, attributes: Sequence[str] = ()) -> None:
    """Checks that a model is an nnx module, in float, without attributes of these names."""
    check_instance(function, "model", model, nnx.Module, fix="pass an nnx module.")
    name = type(model).__name__
    parts = [
        type(part).__name__ for _, part in nnx.iter_modules(model) if isinstance(part, Wrapper)
    ]
    if parts:
        problem = f"this {name} is quantized already: {some(parts)}."
        raise fail(function, problem, fix="pass the float model that it was made from.")
    used = [attribute for attribute in attributes if hasattr(model, attribute)]
    if used:
        problem = f"this {name} has attributes that quantized models use: {', '.join(used)}."
        raise fail(function, problem, fix="rename these attributes in the class of the model.")


@dataclasses.dataclass(frozen=True, repr=False)
class Parent:
    """What a part knows about the quantized module that contains it, its parent.

    Attributes:
      path: path of the part.
      policy: policy of the parent; its rules may match nothing in this part.
      mode: mode of the parent.
      backward: backward dtype of the parent.
      quant_dynamic: as in the parent.
      learned: whether the parent learns scales.
    """

    path: tuple[str, ...]
    policy: Policy
    mode: Mode
    backward: DTypeLike | None
    quant_dynamic: bool
    learned: bool

    def __repr__(self) -> str:
        return f"<{'/'.join(self.path)}, {self.mode}>"


class Part(Wrapper):
    """A module inside a quantized module, which runs it in float. A call from outside follows the
    policy and the mode of the parent, but only the parent has statistics and scales.
    """

    quant_parent: Parent
    _q_is_part = True

    def _q_is_plain(self) -> bool:
        return self.quant_parent.mode is Mode.FLOAT and not holds_codes(nnx.state(self))

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        parent = self.quant_parent
        call, params, graph = self._q_function(name, run, args, kwargs)
        unscaled: Mapping[str, Any] = {}
        if needs_calibration(parent.policy) and not parent.quant_dynamic:
            if parent.mode is not Mode.FLOAT:
                unscaled = call.plan(params).static_specs()
        if unscaled or parent.learned or parent.mode is Mode.CALIBRATE:
            state = "/".join(parent.path), f"in {parent.mode}"
            state += ("with learned scales",) * parent.learned
            state += (f"without scales for {some(unscaled)}",) * bool(unscaled)
            problem = f"`{name}` of a part of a quantized module is called from outside."
            fix = "call a method of the whole, which alone has scales, or quantize the parts."
            raise fail(type(self).__name__, problem, given=", ".join(state), fix=fix)
        return write_back(graph, call(params, parent.mode, parent.backward))

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> QuantizedCall:
        parent = self.quant_parent
        options = {"policy": optional(parent.policy), "dynamic": parent.quant_dynamic}
        return quantized_call(self, name, run, args, kwargs, prefix=parent.path, **options)


def make_parts(module: Any) -> None:
    """Makes the modules inside a quantized module its parts."""
    kinds = {
        id(part): wrapper_class(type(part), Part, type(part).__name__)
        for _, part in nnx.iter_modules(module)
        if not isinstance(part, Wrapper) and forwards(type(part), CONTAINERS)
    }
    with_classes(module, kinds)
    options = {name: getattr(module, name) for name in COPIED}
    for path, part in nnx.iter_modules(module):
        if isinstance(part, Part) and "quant_parent" not in vars(part):
            part.quant_parent = Parent(tuple(map(str, path)), **options, learned=False)


def update_parts(module: nnx.Module, **changes: Any) -> None:
    """Updates the parts of a module after a change."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Part):
            part.quant_parent = dataclasses.replace(part.quant_parent, **changes)
