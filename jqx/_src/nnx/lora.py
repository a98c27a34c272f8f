"""Adapters of low rank for any nnx model: `apply_lora`."""

import contextvars
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..checks import called, check_instance
from ..errors import fail, some
from ..modules.layers import (
    AdapterMatrices,
    check_same_parameters,
    forwards,
    initial_adapters,
)
from ..modules.lora import (
    base_policy,
    check_base,
    initial_factors,
    of_matrices,
    of_padded,
    with_product,
)
from ..modules.quantized_function import Mode, by_path, nest
from ..policy import Policy
from ..ptq.quantized import Quantized as PtqResult
from ..tensor.spec import QSpec
from ..transforms.adapters import (
    Adapter,
    LoRA,
    Use,
    adapter_of,
    check_rules,
    find_products,
    match_rules,
    use_of,
    with_adapters,
)
from ..transforms.find import Found
from ..transforms.make_plan import make_plan
from ..transforms.quantize_params import quantize_params
from .layers import LoRALinear
from .quantized import ATTRIBUTES, Part, Quantized, check_float
from .state import (
    CONTAINERS,
    STATE,
    Path,
    QParam,
    QuantizedCall,
    Run,
    float_class,
    is_random,
    is_weight,
    replace_nodes,
    split_call,
    split_nodes,
    value_at,
    values,
    variable_at,
    wrapper_class,
    write_values,
)

_NAME = "nnx.apply_lora"

_AXIS_NAMES = ("out_sharding", "sharding_names", "sharding")
"""Metadata of a variable that name its axes, in several versions of Flax."""

_USES: contextvars.ContextVar[dict[str, set[Use]]] = contextvars.ContextVar("uses")
"""How calls of `Watched` modules use weights, by the path of the weight in the model."""


class Watched(Quantized):
    """Base of float modules whose calls are looked at, before they get adapters.

    Attributes:
      watched: for each weight that is to get an adapter its path in this module, its path in the
        model, and its rank.
    """

    watched: tuple[tuple[str, str, int], ...]

    def _q_is_plain(self) -> bool:
        return False

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> QuantizedCall:
        call, params, graph = super()._q_function(name, run, args, kwargs)
        items = find_products(_NAME, call.function, (params, *call.args)).items
        for path, path_in_model, rank in self.watched:
            # A scan or a vmap over modules gives a call one step of a stack.
            stacked = rank - jnp.ndim(value_at(params, _names(path)))
            uses = {use_of(_NAME, path, item).stacked(stacked) for item in items.get(path, ())}
            _USES.get().setdefault(path_in_model, set()).update(uses)
        return call, params, graph


class Adapters(NamedTuple):
    """The adapter of a weight, and where a module has both.

    Attributes:
      weight: path of the weight in the module.
      name: path of the two factors there, without `_lora_a` and `_lora_b`.
      adapter: the adapter.
    """

    weight: str
    name: str
    adapter: Adapter

    def factors(self, params: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the two factors, from the values of the variables of the module."""
        *scopes, name = self.name.split("/")
        a, b = (value_at(params, (*scopes, f"{name}_lora_{side}")) for side in "ab")
        return a, b


class Adapted(Quantized):
    """Base of modules to whose weights `apply_lora` has added adapters.

    Attributes:
      adapters: one for each weight that has one, in this module or in the modules inside it.
    """

    adapters: tuple[Adapters, ...]

    def _q_is_plain(self) -> bool:
        return False

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> QuantizedCall:
        call, params, graph = super()._q_function(name, run, args, kwargs)
        factors = {x.weight: x.factors(params) for x in self.adapters}
        for x in self.adapters:
            weight, (a, _) = value_at(params, _names(x.weight)), factors[x.weight]
            if x.adapter.steps_apart(jnp.ndim(weight), jnp.ndim(a)):
                problem = (
                    f"a scan or vmap steps over the adapter of {x.weight!r}, not over its codes."
                )
                fix = "give jqx.nnx.QParam the axis of nnx.Param there: "
                fix += "nnx.StateAxes({nnx.Param: 0, jqx.nnx.QParam: 0, ...})."
                raise fail(_NAME, problem, fix=fix)
        adapters = {x.weight: x.adapter for x in self.adapters}
        function = with_adapters(_NAME, call.function, adapters)
        return (
            dataclasses.replace(call, function=function, args=(factors, *call.args)),
            params,
            graph,
        )


def apply_lora(
    model: Any,
    rules: Mapping[str, LoRA],
    *args: Any,
    base: str | QSpec | None = None,
    rngs: nnx.Rngs | None = None,
    method: str = "__call__",
    **kwargs: Any,
) -> Any:
    """Adds trainable adapters of low rank to the weights of a model, in place, and returns it.

    A module that holds such a weight, of Flax or of another library, becomes an instance of a
    subclass of its class. Its calls add `alpha / rank * (x @ a) @ b` to each product with the
    weight. For a weight `kernel` the factors are the variables `kernel_lora_a` and `kernel_lora_b`
    next to it, of the type `nnx.LoRAParam`. Their shapes are those of the weight: `a` has the axes
    that are summed, and then the rank; `b` the rank, and then the other axes. Both begin with the
    axes of a stack, such as those of layers in a scan. Names and shapes are those of Qwix.
    `a` is drawn (He, uniform), `b` is 0, so that the model computes the same as before, but for the
    rounding of `base`. Both have the dtype of the weight, and its sharding.

    `nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)` and
    `nnx.grad(..., argnums=nnx.DiffState(0, nnx.LoRAParam))` train only the adapters. With `base`
    the weights become codes, as a `QParam`, and calls dequantize them: `Mode.SIMULATE`.
    `model.set_attributes(mode=jqx.nnx.Mode.CONVERT)` multiplies by the codes, for serving.

    Args:
      model: any float nnx module.
      rules: adapters by regular expression. It matches the whole path of a weight, such as
        `layers/0/attn/q_proj/kernel`, or of the module that has it; the first match counts. Only
        weights of products get adapters: lookups, convolutions and grouped products do not.
      *args: positional arguments of a call; only their shapes and dtypes matter. Without any
        arguments the layers `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum` are looked at one by
        one, and rules match only their weights.
      base: how weights that get adapters are quantized, such as `"nf4:group=64"`; `None` leaves
        them as floats.
      rngs: a stream `params` or `default`, for `a`; by default `nnx.Rngs(0)`.
      method: name of the method to call.
      **kwargs: keyword arguments of the call.

    Returns:
      `model`, which is changed.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if a rule matches no weight of a product; if the model multiplies by a part of a
        matched weight; if it uses a weight outside of the module that has it; or if the model has
        quantized parts already. The model is then not changed.

    Source: Hu et al., "LoRA", arXiv:2106.09685; Dettmers et al., "QLoRA", arXiv:2305.14314.

    Example:
      >>> import jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> model, x = nnx.Linear(64, 8, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
      >>> rules = {".*kernel": jqx.nnx.LoRA(rank=2, alpha=4.0)}
      >>> model = jqx.nnx.apply_lora(model, rules, x, base="nf4:group=64")
      >>> model.kernel.get_value()
      QTensor(nf4[64, 8] per_axis(1), scale float32[1, 8], dtype=float32, 544 bytes)
      >>> {name: x.shape for name, x in nnx.state(model, nnx.LoRAParam).items()}
      {'kernel_lora_a': (64, 2), 'kernel_lora_b': (2, 8)}
    """
    check_float(_NAME, model)
    rules = check_rules(_NAME, rules)
    check_base(_NAME, base)
    calls = _calls(model, method, args, kwargs)
    items, others = dict[str, list[Found]](), set[str]()
    for prefix, call in calls.items():
        products = find_products(_NAME, *call)
        items |= {prefix + path: x for path, x in products.items.items()}
        others |= {prefix + path for path in products.others}
    matched = match_rules(_NAME, rules, items, others)
    for path in matched:
        check_float(_NAME, _holder(model, path)[1], ATTRIBUTES)
    if args or kwargs:
        uses = _uses(model, matched, method, args, kwargs)
    else:
        uses = {path: {use_of(_NAME, path, item) for item in items[path]} for path in matched}
    adapters = {path: adapter_of(_NAME, path, rule, uses[path]) for path, rule in matched.items()}
    codes = {} if base is None else _codes(calls, adapters, base)
    _adapt(model, adapters, base, rngs or nnx.Rngs(0))
    replace_nodes(model, write_values(model, nest(codes)))
    return model


def _calls(
    model: nnx.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns functions of weights and their arguments, by the prefix of the paths of the weights:
    the call of the model, or those of layers of Flax.
    """
    if args or kwargs:
        return {"": _call(model, method, args, kwargs)}
    layers = {
        "/".join(map(str, path)): (part, x)
        for path, part in nnx.iter_modules(model)
        if (x := _input_of(part)) is not None
    }
    return {
        path and f"{path}/": _call(layer, "__call__", (x,), {})
        for path, (layer, x) in layers.items()
    }


def _input_of(layer: Any) -> jax.ShapeDtypeStruct | None:
    """Returns an input of a layer of Flax that multiplies by a kernel, else `None`."""
    if isinstance(layer, nnx.Linear) and layer.kernel.ndim == 2:
        return jax.ShapeDtypeStruct((1, layer.in_features), layer.kernel.dtype)
    if isinstance(layer, nnx.LinearGeneral) and not layer.batch_axis:
        rank = max(max(axis + 1, -axis) for axis in layer.axis)
        shape = [1] * rank
        for axis, size in zip(layer.axis, layer.in_features, strict=True):
            shape[axis] = size
        return jax.ShapeDtypeStruct(tuple(shape), layer.kernel.dtype)
    if isinstance(layer, nnx.Einsum):
        inputs, kernel = layer.einsum_str.replace(" ", "").split("->")[0].split(",")
        sizes = dict(zip(kernel, layer.kernel.shape, strict=True))
        shape = tuple(sizes.get(axis, 1) for axis in inputs.replace("...", ""))
        return jax.ShapeDtypeStruct(shape, layer.kernel.dtype)
    return None


def _call(
    model: nnx.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a call of a model as a function of its weights, and the arguments."""
    graph, leaves, insert = split_nodes(model, args, kwargs)

    def run(copy: Any, leaves: list[Any]) -> Any:
        inner, nodes = copy
        inner_args, inner_kwargs = insert(leaves, nodes)
        return getattr(inner, method)(*inner_args, **inner_kwargs)

    call, params, rest = split_call(graph, is_weight, run)

    def function(weights: Any, rest: Any, leaves: Any) -> Any:
        out, written = call({"0": weights}, rest, leaves)
        return [x for x in jax.tree.leaves((out, written)) if isinstance(x, jax.Array)]

    return function, (params.get("0", {}), rest, leaves)


def _codes(
    calls: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]],
    adapters: Mapping[str, Adapter],
    base: str | QSpec,
) -> dict[str, Any]:
    """Returns the codes of the weights that get adapters, by path."""
    codes = {}
    for prefix, (f, args) in calls.items():
        mine = [path[len(prefix) :] for path in adapters if path.startswith(prefix)]
        if mine:
            plan = make_plan(f, base_policy(mine, base))(*args)
            for path, x in by_path(quantize_params(args[0], plan)).items():
                if path in mine:
                    codes[prefix + path] = x
    return codes


def _holder(model: nnx.Module, path: str) -> tuple[str, nnx.Module]:
    """Returns the path of the innermost module with methods that has a variable, and the module."""
    modules = {"/".join(map(str, names)): part for names, part in nnx.iter_modules(model)}
    holders = [
        (name, part)
        for name, part in modules.items()
        if f"{path}/".startswith(name and f"{name}/") and forwards(type(part), CONTAINERS)
    ]
    return max(holders, key=lambda holder: len(holder[0]))


def _uses(
    model: nnx.Module,
    paths: Collection[str],
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, set[Use]]:
    """Returns how calls of the modules that have weights use these weights."""
    uses = dict[str, set[Use]]()

    def run() -> None:
        graph, leaves, insert = split_nodes(model, args, kwargs)
        copy, nodes = nnx.clone(graph)
        for part, inside in _outermost(copy, paths).values():
            ranks = [(x.weight, x.path, variable_at(copy, _names(x.path)).ndim) for x in inside]
            _change_class(part, Watched, "Watched")
            part.watched = tuple(ranks)
            part._q_set_up(Policy([]), Mode.FLOAT, None, "calibrated", None)
        copy_args, copy_kwargs = insert(leaves, nodes)
        getattr(copy, method)(*copy_args, **copy_kwargs)

    token = _USES.set(uses)
    try:
        jax.eval_shape(run)
    finally:
        _USES.reset(token)
    if missing := sorted(path for path in paths if not uses.get(path)):
        problem = "the model uses weights outside of the modules that have them."
        fix = "leave them out of the rules, or multiply in a method of that module."
        raise fail(_NAME, problem, given=some(map(repr, missing)), fix=fix)
    return uses


class _Inside(NamedTuple):
    """A weight inside a module: its path there, that of its factors, and its path in the model."""

    weight: str
    name: str
    path: str


def _outermost(model: nnx.Module, paths: Collection[str]) -> dict[str, tuple[Any, list[_Inside]]]:
    """Returns the modules that have weights, without those inside of others that do, with the
    weights in them.
    """
    holders = {path: _holder(model, path) for path in paths}
    modules = dict(holders.values())
    outermost = dict[str, tuple[Any, list[_Inside]]]()
    for path, (name, _) in holders.items():
        around = (x for x in modules if f"{name}/".startswith(x and f"{x}/"))
        outer = min(around, key=len)
        start = len(outer and f"{outer}/")
        within = path[len(name) :].lstrip("/").replace("/", "_")
        inside = _Inside(path[start:], (f"{name}/{within}" if name else within)[start:], path)
        outermost.setdefault(outer, (modules[outer], []))[1].append(inside)
    return outermost


def _names(path: str) -> tuple[str, ...]:
    return tuple(path.split("/"))


def _change_class(module: Any, base: type[Quantized], prefix: str) -> None:
    kind = type(module)
    cls = wrapper_class(kind, base, f"{prefix}{kind.__name__}")
    object.__setattr__(module, "__class__", cls)


def _adapt(
    model: nnx.Module, adapters: Mapping[str, Adapter], base: str | QSpec | None, rngs: nnx.Rngs
) -> None:
    """Adds factors next to weights, and changes the classes of the modules that have them."""
    for part, inside in _outermost(model, adapters).values():
        entries = [Adapters(x.weight, x.name, adapters[x.path]) for x in inside]
        for entry in entries:
            *scopes, name = _names(entry.name)
            weight, holder = variable_at(part, _names(entry.weight)), variable_at(part, scopes)
            for side, factor in zip("ab", _factors(entry.adapter, weight, rngs), strict=True):
                setattr(holder, f"{name}_lora_{side}", factor)
        _change_class(part, Adapted, "LoRA")
        part.adapters = tuple(entries)
        weights = [entry.weight for entry in entries]
        policy = Policy([]) if base is None else base_policy(weights, base)
        mode = Mode.FLOAT if base is None else Mode.SIMULATE
        part._q_set_up(policy, mode, None, "calibrated", None)


def _factors(adapter: Adapter, weight: Any, rngs: nnx.Rngs) -> list[nnx.LoRAParam[Any]]:
    """Returns the two factors of a weight, with its metadata, and of those the names of axes."""
    value, metadata = weight.get_value(), weight.get_metadata()
    factors = initial_factors(adapter, rngs.params(), value)
    names = {key: metadata[key] for key in _AXIS_NAMES if metadata.get(key)}
    named = {key: of_padded(adapter, axes, value.ndim) for key, axes in names.items()}
    return [
        nnx.LoRAParam(x, **metadata | {key: axes[side] for key, axes in named.items()})
        for side, x in enumerate(factors)
    ]


def merge_lora(model: nnx.Module) -> nnx.Module:
    """Returns a model with every adapter added to its weight, in float, and without adapters.

    Args:
      model: from `apply_lora`, or with `LoRALinear` layers; float or converted; it is not changed.

    Returns:
      A copy with the classes that the model had in float, such as `flax.nnx.Linear`, and float
      weights.

    Raises:
      TypeError: if `model` is not a module.
      ValueError: if there are no adapters.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.nf4(block=4), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.LoRALinear(4, 2, rank=1, **options)
      >>> type(jqx.nnx.merge_lora(layer)).__name__
      'Linear'
    """
    check_instance("nnx.merge_lora", "model", model, nnx.Module, fix="pass an nnx module.")
    merged = nnx.clone(model)
    modules = [part for _, part in nnx.iter_modules(merged)]
    adapted = [part for part in modules if isinstance(part, (LoRALinear, Adapted))]
    if not adapted:
        problem = f"there are no adapters: {type(model).__name__} has no jqx.nnx.LoRALinear layers,"
        problem += " and is not from jqx.nnx.apply_lora."
        raise fail("nnx.merge_lora", problem, fix="pass the model that was trained.")
    for part in adapted:
        for entry in _entries(part):
            weight = variable_at(part, _names(entry.weight))
            a, b = entry.a.get_value(), entry.b.get_value()
            value = with_product(weight.get_value(), entry.adapter, a, b)
            if isinstance(weight, QParam):
                replace_nodes(part, {id(weight): nnx.Param(value)})
            else:
                weight.set_value(value)
            _remove(part, (entry.a, entry.b))
        for _, inside in nnx.iter_modules(part):
            if inside is part or isinstance(inside, Part):
                _make_float(inside)
    return merged


def _remove(module: nnx.Module, variables: Collection[Any]) -> None:
    """Removes the attributes of modules that are some variables."""
    for _, inside in list(nnx.iter_modules(module)):
        for name in [x for x, value in vars(inside).items() if any(value is y for y in variables)]:
            delattr(inside, name)


def _make_float(module: Any) -> None:
    """Makes a quantized module, or a part of one, an instance of its float class again."""
    for name in ("rank", "alpha", "adapters", "quant_parent", *ATTRIBUTES):
        vars(module).pop(name, None)
    object.__setattr__(module, "__class__", float_class(type(module)))


@called("nnx.init_lora", "pass jqx.nnx.init_lora(model, quantized).")
def init_lora(model: nnx.Module, quantized: PtqResult) -> None:
    """Gives a model with adapters the codes of a quantized model, in place. Its adapters start from
    the low-rank products that `jqx.algorithms.loftq` or `eora` has found.

    All parameters become those of `quantized`; its weights are `QParam`s. The mode of every part
    becomes `Mode.SIMULATE`, except that parts in `Mode.FLOAT` stay unchanged. The model then
    computes the same as `quantized`, also in `Mode.CONVERT`, up to rounding in float32: both
    factors share the one that cancels `alpha / rank`. Training continues from there.

    Args:
      model: the float model after `apply_lora`, with a `base`; or a model that has `LoRALinear`
        where the model that was quantized has `flax.nnx.Linear`, and other layers of `jqx.nnx`
        where it has other quantized weights. Its values are not used.
      quantized: the result of `jqx.nnx.ptq(float_model, policy, loftq(rank=...))`.

    Raises:
      TypeError: if `model` is not a module, or `quantized` is not a `jqx.Quantized`.
      ValueError: if a weight with adapters has no such product, or one of another rank; if
        something else is kept at a site; if the parameters of `model` are not those of `quantized`;
        or if a quantized weight is not in a module of `jqx.nnx`.

    Source: Li et al., arXiv:2310.08659 (LoftQ); Liu et al., arXiv:2410.21271 (EoRA).

    Example:
      >>> import jax, jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> policy, x = jqx.presets.nf4(block=8), jax.random.normal(jax.random.key(0), (4, 16))
      >>> ptq, loftq = jqx.nnx.ptq, jqx.algorithms.loftq(rank=2)
      >>> quantized = ptq(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), policy, loftq, progress=False)([x])
      >>> layer = jqx.nnx.LoRALinear(16, 8, rank=2, policy=policy, rngs=nnx.Rngs(1))
      >>> jqx.nnx.init_lora(layer, quantized)
      >>> bool(jnp.allclose(layer(x), quantized(x), atol=1e-5))
      True
    """
    name = "nnx.init_lora"
    check_instance(name, "model", model, nnx.Module, fix="pass the model to be trained.")
    fix = "pass what jqx.nnx.ptq returns for the float model."
    check_instance(name, "quantized", quantized, PtqResult, fix=fix)
    modules = [("/".join(map(str, path)), part) for path, part in nnx.iter_modules(model)]
    parts = {path: part for path, part in modules if isinstance(part, Quantized)}
    entries = {
        (f"{path}/" if path else "") + entry.weight: entry
        for path, part in parts.items()
        for entry in _entries(part)
    }
    params = _float_values(model)
    shapes = {path: x.shape for path, x in params.items()}
    kinds = {
        path: AdapterMatrices(
            x.adapter.rank, x.adapter.alpha, *x.adapter.of_matrices(shapes[path]), x.a.dtype
        )
        for path, x in entries.items()
    }
    starts = initial_adapters(name, quantized.plan, quantized.maps, kinds)
    check_same_parameters(name, params, by_path(quantized.params), parts)
    replace_nodes(model, write_values(model, quantized.params))
    for path, matrices in starts.items():
        a, b = entries[path].adapter.from_matrices(*matrices, shapes[path])
        entries[path].a.set_value(a)
        entries[path].b.set_value(b)
    for path, part in parts.items():
        prefix = path and f"{path}/"
        scales = {key: x for key, x in quantized.affines.items() if key.startswith(prefix)}
        part.quant_scales.set_value(nest({key[len(prefix) :]: x for key, x in scales.items()}))
        part.quant_stats.set_value({})
        part.learned_scales = None
        if part.mode is not Mode.FLOAT:
            part.mode = Mode.SIMULATE


class _Entry(NamedTuple):
    """The adapter of a weight, with the path of the weight in its module and the two variables."""

    weight: str
    adapter: Adapter
    a: Any
    b: Any


def _entries(part: Any) -> list[_Entry]:
    """Returns the adapters of a module."""
    if isinstance(part, LoRALinear):
        adapter = of_matrices(part.rank, part.alpha, part.kernel.ndim)
        return [_Entry("kernel", adapter, part.lora_a, part.lora_b)]
    entries = []
    for weight, name, adapter in part.adapters if isinstance(part, Adapted) else ():
        *names, name = name.split("/")
        holder = variable_at(part, names)
        pair = getattr(holder, f"{name}_lora_a"), getattr(holder, f"{name}_lora_b")
        entries.append(_Entry(weight, adapter, *pair))
    return entries


def _float_values(model: nnx.Module) -> dict[str, Any]:
    """Returns the values of the variables that the float model also has, by path."""

    def is_state(path: Path, _: Any) -> bool:
        return any(name in STATE for name in path)

    _, _, shared = nnx.split(model, (nnx.LoRAParam, is_random, is_state), ...)
    return by_path(values(shared))
