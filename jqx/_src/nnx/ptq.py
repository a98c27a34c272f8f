"""An nnx model as a pure function of the values of its variables, and `ptq` on them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar, cast

import jax
from flax import nnx

from ..checks import called, check_instance
from ..compat import is_concrete
from ..errors import fail, some
from ..modules.quantized_function import by_path, overlay, without
from ..policy import Policy, check_policy
from ..ptq.ptq import Effort, check_effort
from ..ptq.ptq import ptq as ptq_of_function
from ..ptq.quantized import Hoist, Quantized, SavedModel, Target
from ..statistics.statistics import RowWeight
from ..transforms.algorithm import Algorithm
from ..transforms.stats import OnNonfinite
from ..transforms.trace import is_parameter
from .quantized import check_float
from .state import (
    Path,
    is_random,
    replace_nodes,
    split_call,
    stream_of,
    unchanged,
    value_at,
    with_values,
    write_values,
)
from .state import values as values_of


def pure(
    model: nnx.Module, *, method: str = "__call__", mutable: Any = False, **kwargs: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a model as a pure function, and the values of its variables: `f, params`.

    `f(params, *args)` is `model(*args)`, and every transform of jqx takes both. `params` are nested
    dicts of the values by path, also of arrays that are attributes. `model` is not changed, and `f`
    keeps the settings that it has at this moment, such as those of `model.train()`.

    Streams of random numbers stay in the function. A call that draws from one needs a new key:
    `f(params, *args, rngs={"dropout": key})`, by the name of the stream. A stream that
    `nnx.Rngs(0)` makes has the name `"default"`.

    Args:
      model: any float model.
      method: name of the method to call.
      mutable: which variables a call may write: `False`, `True`, or a filter of Flax such as
        `nnx.BatchStat`. Unless it is `False`, `f` returns `(out, written)`, where `written` are
        nested dicts of the values that the call has written; `update` puts them into `params`, or
        into the model.
      **kwargs: keyword arguments of every call. Calls may pass others.

    Raises:
      TypeError: if `model` is not a module.
      ValueError: if `model` or a part of it is quantized already; in a call, if it writes a
        variable that is not mutable, or draws random numbers without a key.

    Example:
      >>> import jax, jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> model, x = nnx.BatchNorm(4, use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((1, 4))
      >>> f, params = jqx.nnx.pure(model, mutable=True)
      >>> sorted(params)
      ['mean', 'scale', 'var']
      >>> out, written = jax.jit(f)(params, x)
      >>> sorted(written)
      ['mean', 'var']
      >>> params = jqx.nnx.update(params, written)
    """
    check_float("nnx.pure", model)
    return _as_function("nnx.pure", model, method, mutable, kwargs)


T = TypeVar("T")
"""A model, a state of it, or nested dicts of its values."""


def update(model: T, values: Mapping[str, Any]) -> T:
    """Writes values into the variables of a model, in place; returns the model.

    A variable that gets a `jqx.QTensor` becomes a `QParam`. Nested dicts of values, such as
    `params` of `pure`, can take the place of the model: then the result is a copy of them with the
    new values. So can a state: with gradients as its values it is what `nnx.Optimizer` takes,
    `optimizer.update(model, jqx.nnx.update(nnx.state(model), gradients))`. Codes are those of the
    float model only where no algorithm has scaled or rotated weights, so that `quantized.maps` is
    empty.

    Args:
      model: the model, a state of it, or nested dicts.
      values: nested dicts of values by path, such as what a function of `pure` writes, or trained
        `params`. They may have values for some variables only.

    Raises:
      TypeError: if `model` is none of these.
      ValueError: if the model or the state has no variable at a path.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> jqx.nnx.update(model, {"bias": jnp.ones(2)}).bias[...]
      Array([1., 1.], dtype=float32)
      >>> sorted(jqx.nnx.update({"bias": 0.0}, {"kernel": 1.0}))
      ['bias', 'kernel']
    """
    fix = "pass the values second: jqx.nnx.update(model, values)."
    check_instance("nnx.update", "model", model, (nnx.Module, Mapping), fix=fix)
    check_instance("nnx.update", "values", values, Mapping, fix=fix)
    if isinstance(model, Mapping) and not isinstance(model, nnx.State):
        return cast(T, overlay(model, values))
    old = values_of(model if isinstance(model, nnx.State) else nnx.state(model))
    if unknown := by_path(without(values, old)):
        problem = f"the model has no variables at {some(map(repr, unknown))}."
        raise fail("nnx.update", problem, fix="leave such values out, or pass those of this model.")
    if isinstance(model, nnx.State):
        return with_values(model, overlay(old, values))
    replace_nodes(model, write_values(model, values))
    return model


class QuantizeModel(Protocol):
    """What `ptq` returns before it gets batches."""

    def __call__(self, batches: Iterable[Any] | None = None) -> Quantized: ...


@called("nnx.ptq", "call it in two steps: jqx.nnx.ptq(model, policy)(batches).")
def ptq(
    model: nnx.Module,
    policy: Policy,
    algorithm: Algorithm | None = None,
    *,
    effort: Effort | None = None,
    hoist: Hoist = False,
    method: str = "__call__",
    target: Target = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    own_text: bool | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> QuantizeModel:
    """Quantizes an nnx model after training: `ptq(model, policy)(batches)`.

    `quantized.function(quantized.params, *args)` calls the model on integers, and is pure: `params`
    are nested dicts of the values of the variables by path, and of arrays that are attributes, with
    QTensors in the place of weights (`nnx.Param`).
    Streams of random numbers stay in the function. A call that writes a variable, such as a running
    mean in training or a cache, is an error: use `pure` or `quantize` for such models. `model` is
    not changed. The weights are those that the model has when batches are passed.

    Args:
      model: any float model.
      policy: what is quantized; paths are those of the parameters, such as `blocks/0/up/kernel`.
      algorithm: as in `jqx.ptq`; its `params` are those nested dicts.
      method: name of the method to call.
      effort: as in `jqx.ptq`.
      hoist: as in `jqx.ptq`; then `params` are what was split off.
      target: as in `jqx.ptq`.
      weight: as in `jqx.ptq`.
      on_nonfinite: as in `jqx.ptq`.
      own_text: as in `jqx.ptq`.
      progress: as in `jqx.ptq`.
      **kwargs: keyword arguments of every call. Calls may pass others.

    Returns:
      A function of batches. Each batch is a tuple of the arguments of the model, or a single
      argument. Without batches, a model of tokens writes its own text, as in `jqx.ptq`. The
      function returns a `jqx.Quantized`, which `jqx.save` writes. After `jqx.load`,
      `jqx.nnx.bind` binds it to the model again.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `model` or a part of it is quantized already, or a call writes a variable; or
        as for `jqx.ptq`.

    Example:
      >>> import jax, jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> model, x = nnx.Linear(64, 8, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
      >>> quantized = jqx.nnx.ptq(model, jqx.presets.w8a8(), progress=False)([x])
      >>> quantized
      Quantized(1 of 1 contractions, 2,080 bytes of parameters become 576)
      >>> bool(jnp.allclose(jax.jit(quantized.function)(quantized.params, x), model(x), atol=0.02))
      True
    """
    check_policy("nnx.ptq", policy)
    check_effort("nnx.ptq", effort, algorithm)
    check_float("nnx.ptq", model)

    fix = "pass a list of batches alone, such as [x]: the parameters are those of the model."

    @called("nnx.ptq(model, policy)", fix)
    def quantize(batches: Iterable[Any] | None = None) -> Quantized:
        function, params = _as_function("nnx.ptq", model, method, False, kwargs)
        _, _, others = nnx.split(model, (nnx.Param, is_random), ...)
        names = {
            "/".join(map(str, path)): None
            for path, variable in nnx.to_flat_state(others)
            if any(map(is_parameter, jax.tree.leaves(variable)))
        }
        options: Any = {"effort": effort, "target": target, "progress": progress, "hoist": hoist}
        options |= {"weight": weight, "on_nonfinite": on_nonfinite, "own_text": own_text}
        return ptq_of_function(function, policy, algorithm, names=names, **options)(params, batches)

    return quantize


@called("nnx.bind", "pass the model second: jqx.nnx.bind(jqx.load(path), model).")
def bind(
    saved: SavedModel,
    model: nnx.Module,
    *,
    method: str = "__call__",
    target: Target = None,
    check: Literal["function"] | None = None,
    **kwargs: Any,
) -> Quantized:
    """Returns the quantized model of a file, bit for bit equal to the one that was saved.

    Args:
      saved: the result of `jqx.load`.
      model: a model with the structure of the one that was quantized. Its values are not used, and
        it may be abstract, from `nnx.eval_shape`, if all its arrays are variables. Streams of
        random numbers are taken from it.
      method: name of the method to call.
      target: as in `jqx.ptq`.
      check: as in `jqx.SavedModel.bind`.
      **kwargs: keyword arguments of every call, the same as for `jqx.nnx.ptq`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the model is not the one that was quantized; or as for `jqx.SavedModel.bind`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp, tempfile
      >>> from flax import nnx
      >>> model, x = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jnp.ones((1, 4))
      >>> path = tempfile.mkdtemp() + "/linear.safetensors"
      >>> jqx.save(path, jqx.nnx.ptq(model, jqx.presets.w8a16(), progress=False)([x]))
      >>> jqx.nnx.bind(jqx.load(path), model)(x).shape
      (1, 8)
    """
    fix = "pass the result of jqx.load for a quantized model."
    check_instance("nnx.bind", "saved", saved, SavedModel, fix=fix)
    check_float("nnx.bind", model)
    if stateless := _stateless_attributes(model):
        raise fail(
            "nnx.bind",
            "an abstract model has attributes without values that are no variables: "
            f"{some(map(repr, stateless))}.",
            fix="pass the model itself, of any values; or make the attribute an nnx.Variable.",
        )
    function, _ = _as_function("nnx.bind", model, method, False, kwargs)
    return saved.bind(function, target=target, check=check)


def _stateless_attributes(model: nnx.Module) -> list[str]:
    """Returns the paths of attributes of an abstract model that take part in its graph, not in its
    state: Flax keeps arrays that are no variables there.
    """
    variables = {path for path, _ in nnx.to_flat_state(nnx.state(model))}

    def has_no_values(x: Any) -> bool:
        is_traced = isinstance(x, jax.Array) and not is_concrete(x)
        return is_traced or isinstance(x, jax.ShapeDtypeStruct)

    leaves = [(path, x) for path, x in nnx.iter_graph(model) if path not in variables]
    return ["/".join(map(str, path)) for path, x in leaves if has_no_values(x)]


def _as_function(
    function: str, model: nnx.Module, method: str, mutable: Any, kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a model as a function of the values of its variables, and these values."""

    def is_param(path: Path, variable: Any) -> bool:
        return not is_random(path, variable)

    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("rngs"), Mapping):
            nnx.reseed(model, policy="match_shape", **kwargs.pop("rngs"))
        return getattr(model, method)(*args, **kwargs)

    call, params_of_model, streams = split_call(model, is_param, run)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, is_param))]

    def apply(params: Any, *args: Any, **call_kwargs: Any) -> Any:
        missing = [(path, None) for path in paths if value_at(params, path, ...) is ...]
        if missing:
            problem = f"the parameters have no value for {some(map(_shown, missing))} of the model."
            raise fail(function, problem, fix="pass the parameters of this model.")
        options = {**kwargs, **call_kwargs}
        out, state = call(params, streams, *args, **options)
        seeds = options.get("rngs")
        seeded = tuple(seeds) if isinstance(seeds, Mapping) else ()
        written = nnx.All(is_param, mutable)
        _, new, refused = nnx.split_state(state, lambda _, x: stream_of(x) in seeded, written, ...)
        if refused:
            same = unchanged(call, params, streams, *args, **options)
            refused = nnx.filter_state(refused, lambda path, _: path not in same)
        if refused:
            problem = f"`{method}` writes variables, which a pure function cannot do: "
            problem += f"{some(map(_shown, nnx.to_flat_state(refused)))}."
            fix = "call model.eval() first, which stops dropout and running means. Or use "
            fix += 'jqx.nnx.pure(model, mutable=True), and pass rngs={"dropout": key}, by the name '
            fix += "of the stream, to each call; or jqx.nnx.quantize."
            raise fail(function, problem, fix=fix)
        return out if mutable is False else (out, values_of(new))

    return apply, params_of_model


def _shown(leaf: tuple[Path, Any]) -> str:
    """Returns the path of a variable as it is shown in messages."""
    path, stream = repr("/".join(map(str, leaf[0]))), stream_of(leaf[1])
    return path if stream is None else f"{path} of the stream {stream!r}"
